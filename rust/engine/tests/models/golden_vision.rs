//! Tiny models that see against the outputs of transformers (tests/data/golden/vision), through the whole engine.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use device::{
    Backend,
    cuda::{CudaBackend, CudaOptions, Driver},
};
use engine::{
    Engine, EngineConfig, GenerationRequest, MediaOptions, Message, MessageContent, ModelDType, ModelSource, SamplingParams,
    images::{Limits, RgbImage, decode},
};
use kernel_tests::{EmulatedDriver, Order};
use serde::Deserialize;

use crate::common::{
    self, drawn, golden_dir, log_softmax,
    media::{self, GoldenMessage, bits, config, edited, run},
    serving::greedy,
};

const MODELS: [&str; 26] = [
    "llava",
    "llava_next",
    "idefics2",
    "idefics3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3_vision",
    "mistral3",
    "qwen3_vl_moe",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
    "lfm2_vl",
    "llama4_vision",
    "gemma4_vision",
    "internvl",
    "cohere2_vision",
    "aya_vision",
    "pixtral",
    "glm4v",
    "mllama",
    "glm46v",
    "glm4v_moe",
    "lighton_ocr",
    "glm_ocr",
    "exaone4_5",
];

/// Of these, the ones with recurrent layers, whose hits end at snapshots of states.
const RECURRENT: [&str; 3] = ["qwen3_5_vision", "qwen3_5_moe_vision", "lfm2_vl"];

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    images: Vec<String>,
    messages: Vec<GoldenMessage>,
    input_ids: Vec<u32>,
    last_logits: Vec<f32>,
    #[serde(default)]
    argmax: Vec<u32>,
    greedy_ids: Vec<u32>,
}

fn dir(name: &str) -> PathBuf {
    drawn::seeing(name)
}

fn golden(name: &str) -> Golden {
    serde_json::from_slice(&std::fs::read(dir(name).join("golden.json")).unwrap()).unwrap()
}

fn image(name: &str, file: &str) -> Arc<RgbImage> {
    Arc::new(decode(&std::fs::read(dir(name).join(file)).unwrap(), &Limits::default()).unwrap())
}

fn source(name: &str) -> ModelSource {
    ModelSource::HuggingFace { path: dir(name), tokenizer_json: None }
}

fn engine(name: &str, config: &EngineConfig) -> Engine {
    Engine::load(&source(name), config, &|_| {}).unwrap()
}

fn request(name: &str, case: &Case) -> GenerationRequest {
    let mut images = case.images.iter().map(|file| image(name, file).into());
    media::request(&case.messages, case.greedy_ids.len(), |kind| (kind == "image").then(|| images.next()).flatten())
}

#[test]
fn every_family_sees_as_transformers_does() {
    for name in MODELS {
        let engine = engine(name, &config());
        for (number, case) in golden(name).cases.iter().enumerate() {
            let what = format!("{name}, case {number}");
            let mut asked = request(name, case);
            asked.prompt_logprobs = Some(1);
            let (prompt, completion) = run(&engine, asked);
            assert_eq!(prompt, case.input_ids, "{what}: tokens of the prompt");
            let choice = &completion.choices[0];
            let expected = log_softmax(&case.last_logits);
            let first = &choice.logprobs.as_ref().unwrap()[0];
            for top in &first.top_logprobs {
                let (got, expected) = (f64::from(top.logprob), expected[top.token_id as usize]);
                assert!((got - expected).abs() < 2e-3, "{what}: token {} has {got} and not {expected}", top.token_id);
            }
            for (position, token) in completion.prompt_logprobs.iter().enumerate().skip(1) {
                let likeliest = &token.token.top_logprobs[0];
                assert_eq!(
                    likeliest.token_id,
                    case.argmax[position - 1],
                    "{what}: the likeliest behind position {}",
                    position - 1
                );
            }
            assert_eq!(choice.token_ids, case.greedy_ids, "{what}: the answer");
        }
    }
}

/// On a GPU whose kernels run on the CPU: a resampler, windows with rotations, spans, neighbours that rotate, layers over images.
#[test]
#[ignore = "models in the emulation; make test-long"]
fn the_kernels_of_a_gpu_see_the_same() {
    see_on_a_gpu(&["idefics2", "qwen2_5_vl", "gemma3_vision", "llama4_vision", "mllama"]);
}

#[test]
#[ignore = "half a minute; make test-long"]
fn the_kernels_of_a_gpu_see_the_same_in_every_family() {
    see_on_a_gpu(&MODELS);
}

fn see_on_a_gpu(models: &[&str]) {
    for &name in models {
        let driver: Arc<dyn Driver> = Arc::new(EmulatedDriver::with_memory(Order::Ascending, 256 << 20));
        let options = CudaOptions { graphs: false, ..CudaOptions::default() };
        let gpu: Arc<dyn Backend> = Arc::new(CudaBackend::with(driver, options).unwrap());
        // Its memory is small, and snapshots of states would take all of it, and so would what layers look at.
        let media = Some(MediaOptions { cache_bytes: Some(1 << 20), ..MediaOptions::default() });
        let small =
            EngineConfig { max_num_batched_tokens: 512, max_num_seqs: 2, state_snapshot_bytes: Some(0), media, ..config() };
        let engine = Engine::load_onto(&gpu, &source(name), &small, &|_| {}).unwrap();
        let case = &golden(name).cases[0];
        let mut asked = request(name, case);
        asked.sampling.max_tokens = Some(2);
        let (_, completion) = run(&engine, asked);
        let choice = &completion.choices[0];
        let expected = log_softmax(&case.last_logits);
        for top in &choice.logprobs.as_ref().unwrap()[0].top_logprobs {
            let (got, expected) = (f64::from(top.logprob), expected[top.token_id as usize]);
            assert!((got - expected).abs() < 2e-3, "{name}: token {} has {got} and not {expected}", top.token_id);
        }
        assert_eq!(choice.token_ids, case.greedy_ids[..2], "{name}");
    }
}

#[test]
fn a_configuration_may_have_the_language_model_s_keys_beside_the_encoder_s() {
    // As Qwen2-VL lies on the hub.
    let folder = edited(&dir("qwen2_vl"), "config.json", "{", "{");
    let path = folder.path().join("config.json");
    let mut keys: serde_json::Map<_, _> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let serde_json::Value::Object(mut text) = keys.remove("text_config").unwrap() else { panic!("an object") };
    text.remove("model_type");
    keys.extend(text);
    std::fs::write(&path, serde_json::to_vec(&keys).unwrap()).unwrap();
    let source = ModelSource::HuggingFace { path: folder.path().to_owned(), tokenizer_json: None };
    let (flat, nested) = (Engine::load(&source, &self::config(), &|_| {}).unwrap(), engine("qwen2_vl", &self::config()));
    let case = &golden("qwen2_vl").cases[0];
    assert_eq!(bits(&run(&flat, request("qwen2_vl", case)).1), bits(&run(&nested, request("qwen2_vl", case)).1));
}

/// Gemma 3's folder with a processor that cuts long images.
fn gemma3_with_crops() -> tempfile::TempDir {
    let copy = edited(&dir("gemma3_vision"), "config.json", "{", "{");
    std::fs::copy(dir("gemma3_pan_and_scan").join("processor_config.json"), copy.path().join("processor_config.json")).unwrap();
    copy
}

#[test]
fn crops_of_a_long_image_stand_behind_it() {
    let folder = gemma3_with_crops();
    let load = |config: &EngineConfig| {
        Engine::load(&ModelSource::HuggingFace { path: folder.path().to_owned(), tokenizer_json: None }, config, &|_| {}).unwrap()
    };
    // Steps of seven tokens, in which each crop stays whole.
    let (whole, cut) = (load(&config()), load(&EngineConfig { max_num_batched_tokens: 7, ..config() }));
    for (number, case) in golden("gemma3_pan_and_scan").cases.iter().enumerate() {
        let (prompt, completion) = run(&whole, request("gemma3_vision", case));
        assert_eq!(prompt, case.input_ids, "case {number}: tokens of the prompt");
        let expected = log_softmax(&case.last_logits);
        for top in &completion.choices[0].logprobs.as_ref().unwrap()[0].top_logprobs {
            let (got, expected) = (f64::from(top.logprob), expected[top.token_id as usize]);
            assert!((got - expected).abs() < 2e-3, "case {number}: token {} has {got} and not {expected}", top.token_id);
        }
        assert_eq!(completion.choices[0].token_ids, case.greedy_ids, "case {number}: the answer");
        assert_eq!(bits(&run(&cut, request("gemma3_vision", case)).1), bits(&completion), "case {number}: in steps of seven");
    }
}

#[test]
fn the_fast_path_is_near() {
    for name in MODELS {
        let engine = engine(name, &EngineConfig { dtype: ModelDType::Auto, ..config() });
        for (number, case) in golden(name).cases.iter().enumerate() {
            let (_, completion) = run(&engine, request(name, case));
            let expected = log_softmax(&case.last_logits);
            for top in &completion.choices[0].logprobs.as_ref().unwrap()[0].top_logprobs {
                let (got, expected) = (f64::from(top.logprob), expected[top.token_id as usize]);
                assert!(
                    (got - expected).abs() < 0.15,
                    "{name}, case {number}: token {} has {got} and not {expected}",
                    top.token_id
                );
            }
        }
    }
}

#[test]
fn chunks_batches_and_what_is_cached_change_no_bits() {
    for name in MODELS {
        let golden = golden(name);
        let alone: Vec<_> = {
            let engine = engine(name, &config());
            golden.cases.iter().map(|case| bits(&run(&engine, request(name, case)).1)).collect()
        };
        // Steps of seven tokens, so that prompts and images are cut wherever they may be; an image whose rows see each other is
        // not.
        let step = if name == "gemma4_vision" { 70 } else { 7 };
        let mut small = EngineConfig { max_num_batched_tokens: step, ..config() };
        small.paged_attention.block_size = Some(8);
        let engine = engine(name, &small);
        for (case, expected) in golden.cases.iter().zip(&alone) {
            let text = common::serving::request(3, 20, 12);
            let beside = [engine.submit(text.clone()).unwrap(), engine.submit(text).unwrap()];
            let (_, cold) = run(&engine, request(name, case));
            assert_eq!(&bits(&cold), expected, "{name}: in chunks, beside others");
            let (_, warm) = run(&engine, request(name, case));
            assert_eq!(&bits(&warm), expected, "{name}: with its prefix cached");
            if !RECURRENT.contains(&name) {
                assert_eq!(warm.usage.cached_tokens, case.input_ids.len() - 1, "{name}: tokens of the cached prefix");
            }
            assert_eq!(warm.usage.encoded_images, 0, "{name}");
            let answers = beside.map(|stream| common::serving::tokens(&stream.wait().unwrap()));
            assert_eq!(answers[0], answers[1], "{name}: texts beside images");
        }
    }
}

/// An image, a text so long that a snapshot is made before its end, and more.
fn long_request(name: &str, image: &Arc<RgbImage>, text: &str) -> GenerationRequest {
    let text = format!("{}{text}", "what does it show? ".repeat(20));
    let parts = serde_json::json!([{ "type": "image" }, { "type": "text", "text": text }]);
    let serde_json::Value::Array(parts) = parts else { unreachable!() };
    let message = Message { media: vec![Arc::clone(image).into()], ..Message::new("user", MessageContent::Parts(parts)) };
    let sampling = SamplingParams { logprobs: Some(0), ..greedy(12) };
    assert!(RECURRENT.contains(&name));
    GenerationRequest::chat(vec![message], sampling)
}

#[test]
fn snapshots_behind_images_change_no_bits() {
    for name in RECURRENT {
        let (first, other) = (image(name, "image0.png"), other_of_its_shape(&image(name, "image0.png")));
        let cold = engine(name, &EngineConfig { state_snapshot_bytes: Some(0), ..config() });
        let mut small = EngineConfig { max_num_batched_tokens: 50, ..config() };
        small.paged_attention.block_size = Some(8);
        let engine = engine(name, &small);
        let mut cached = Vec::new();
        for (image, text) in [(&first, "say"), (&first, "say"), (&first, "tell"), (&other, "say"), (&other, "say")] {
            let expected = bits(&run(&cold, long_request(name, image, text)).1);
            let (_, completion) = run(&engine, long_request(name, image, text));
            assert_eq!(bits(&completion), expected, "{name}: {text}");
            cached.push(completion.usage.cached_tokens);
        }
        let image_tokens = [48, 6];
        let behind_image = golden(name).cases[0].input_ids.iter().rposition(|id| image_tokens.contains(id)).unwrap();
        assert!(cached[1] > behind_image && cached[4] > behind_image, "{name}: {cached:?}");
        assert_eq!([cached[0], cached[3]], [0, 0], "{name}: another image of the same shape");
    }
}

#[test]
fn preempted_requests_have_their_images_again() {
    for name in [
        "idefics3",
        "gemma3_vision",
        "qwen3_vl",
        "qwen3_5_vision",
        "qwen3_5_moe_vision",
        "lfm2_vl",
        "llama4_vision",
        "gemma4_vision",
        "mllama",
    ] {
        // Where layers look at images, they are kept to the end.
        let are_kept = name == "mllama";
        let case = &golden(name).cases[1];
        let mut asked = request(name, case);
        asked.sampling.max_tokens = Some(80);
        let expected = bits(&run(&engine(name, &config()), asked.clone()).1);
        let mut preemptions = 0;
        // Pools that hold from one request to three at their ends.
        for num_tokens in (case.input_ids.len() + 80..3 * case.input_ids.len() + 80).step_by(16) {
            let mut tight = config();
            tight.paged_attention = common::serving::pool_of(num_tokens, 8);
            tight.policies.admission = engine::AdmissionPolicy::Optimistic;
            tight.prefix_caching = false;
            tight.media = Some(MediaOptions { cache_bytes: (!are_kept).then_some(1), ..MediaOptions::default() });
            let engine = engine(name, &tight);
            engine.pause().unwrap();
            let streams: Vec<_> = (0..3).map(|_| engine.submit(asked.clone()).unwrap()).collect();
            engine.resume().unwrap();
            for answer in streams.into_iter().map(|stream| stream.wait().unwrap()) {
                assert_eq!(bits(&answer), expected, "{name}, a pool of {num_tokens} tokens");
                let times = 2 * (1 + answer.usage.preemptions);
                let is_right = if are_kept { answer.usage.encoded_images <= 2 } else { answer.usage.encoded_images >= times };
                assert!(is_right, "{name}: {} images encoded in {times} steps or more", answer.usage.encoded_images);
                preemptions += answer.usage.preemptions;
            }
        }
        assert!(preemptions > 0, "{name}: nobody was preempted");
    }
}

/// The golden's case with one image, asked about again and again.
fn turn(images: &[Arc<RgbImage>], answers: &[String]) -> GenerationRequest {
    let parts = |number: usize| {
        let text = serde_json::json!({ "type": "text", "text": format!("what about it? {number}") });
        if number < images.len() { vec![serde_json::json!({ "type": "image" }), text] } else { vec![text] }
    };
    let mut messages = Vec::new();
    for number in 0..=answers.len() {
        let media = images.get(number).cloned().into_iter().map(Into::into).collect();
        messages.push(Message { media, ..Message::new("user", MessageContent::Parts(parts(number))) });
        messages.extend(answers.get(number).map(|text| Message::new("assistant", MessageContent::Text(text.clone()))));
    }
    let sampling = SamplingParams { temperature: Some(0.0), max_tokens: Some(6), ignore_eos: true, ..SamplingParams::default() };
    GenerationRequest::chat(messages, sampling)
}

#[test]
fn ten_turns_about_an_image_encode_it_once() {
    for (name, prefix_caching) in
        [("llava", true), ("qwen2_vl", false), ("gemma3_vision", true), ("mllama", true), ("mllama", false)]
    {
        let engine = engine(name, &EngineConfig { prefix_caching, ..config() });
        let images = [image(name, "image0.png")];
        let (mut answers, mut encoded) = (Vec::new(), Vec::new());
        for number in 0..10 {
            let (_, completion) = run(&engine, turn(&images, &answers));
            encoded.push(completion.usage.encoded_images);
            if number > 0 && prefix_caching {
                assert!(completion.usage.cached_tokens > 20, "{name}, turn {number}: {} cached", completion.usage.cached_tokens);
            }
            answers.push(completion.choices[0].text.clone());
        }
        assert_eq!(encoded, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0], "{name}");
    }
}

fn other_of_its_shape(image: &RgbImage) -> Arc<RgbImage> {
    let mut pixels = image.pixels().to_vec();
    pixels[1000] ^= 0x80;
    Arc::new(RgbImage::new(image.width(), image.height(), pixels).unwrap())
}

#[test]
fn an_image_of_the_same_shape_is_another_one() {
    for (name, image_token) in [("llava", 6), ("mllama", 512)] {
        let first = image(name, "image0.png");
        let second = other_of_its_shape(&first);
        let ask = |engine: &Engine, image: &Arc<RgbImage>| run(engine, turn(&[Arc::clone(image)], &[])).1;
        let alone = ask(&engine(name, &config()), &second);
        let engine = engine(name, &config());
        ask(&engine, &first);
        let after = ask(&engine, &second);
        assert_eq!(after.choices[0].text, alone.choices[0].text, "{name}");
        assert_eq!(after.usage.encoded_images, 1, "{name}");
        let before_image = golden(name).cases[0].input_ids.iter().position(|id| *id == image_token).unwrap();
        // The one row of an image at which layers look is told apart with its whole block.
        let same = if name == "mllama" { 0 } else { before_image };
        assert_eq!(after.usage.cached_tokens, same, "{name}: what is before the image is the same");
    }
}

/// Bytes of what Llama 3.2 Vision's layers make of an image of two tiles of 17 rows, in F32: blocks of 32 and an empty one, of
/// two layers with keys and values of two heads of 16.
const KEPT_OF_TWO_TILES: u64 = 3 * 32 * 2 * 2 * 2 * 16 * 4;

#[test]
fn requests_wait_for_room_for_what_layers_look_at() {
    let name = "mllama";
    let cases = golden(name).cases;
    let images = [image(name, "image0.png"), other_of_its_shape(&image(name, "image0.png")), image(name, "image1.png")];
    let asked = |image: &Arc<RgbImage>| {
        let mut asked = turn(std::slice::from_ref(image), &[]);
        asked.sampling = SamplingParams { logprobs: Some(0), max_tokens: Some(12), ..asked.sampling };
        asked
    };
    let alone: Vec<_> = images.iter().map(|image| bits(&run(&engine(name, &config()), asked(image)).1)).collect();
    assert_ne!(alone[0], alone[1]);
    let with_room = |room| {
        let media = Some(MediaOptions { cache_bytes: Some(room), ..MediaOptions::default() });
        engine(name, &EngineConfig { media, prefix_caching: false, ..config() })
    };
    let refusal = |engine: &Engine, request| engine.submit(request).unwrap().wait().err().unwrap().to_string();
    for room in [KEPT_OF_TWO_TILES, 2 * KEPT_OF_TWO_TILES] {
        let engine = with_room(room);
        engine.pause().unwrap();
        let streams: Vec<_> = images.iter().map(|image| engine.submit(asked(image)).unwrap()).collect();
        engine.resume().unwrap();
        for (stream, expected) in streams.into_iter().zip(&alone) {
            let answer = stream.wait().unwrap();
            assert_eq!(&bits(&answer), expected, "room for {room} bytes");
            assert_eq!(answer.usage.encoded_images, 1, "room for {room} bytes");
        }
        if room > KEPT_OF_TWO_TILES {
            let answer = run(&engine, request(name, &cases[1])).1;
            assert_eq!(answer.choices[0].token_ids, cases[1].greedy_ids);
            assert!(answer.usage.encoded_images <= 2);
        } else {
            // Two images at once, where there is room for one.
            let text = refusal(&engine, request(name, &cases[1]));
            assert!(text.contains("the images of a request") && text.contains("the encoder cache has"), "{text}");
        }
    }
    assert!(refusal(&with_room(KEPT_OF_TWO_TILES - 1), asked(&images[0])).contains("the encoder cache has"));
}

/// Some of the tokens end a choice, so choices end at different steps, while others wait for the room.
#[test]
fn choices_hold_what_they_look_at_to_their_ends() {
    let name = "mllama";
    let media = Some(MediaOptions { cache_bytes: Some(KEPT_OF_TWO_TILES), ..MediaOptions::default() });
    let engine = engine(name, &EngineConfig { media, prefix_caching: false, ..config() });
    let images = [image(name, "image0.png"), other_of_its_shape(&image(name, "image0.png"))];
    engine.pause().unwrap();
    let streams = images.each_ref().map(|image| {
        let mut asked = turn(std::slice::from_ref(image), &[]);
        let stop_token_ids = (5..512).step_by(12).collect();
        asked.sampling =
            SamplingParams { temperature: Some(1.0), max_tokens: Some(40), seed: Some(8), stop_token_ids, ..asked.sampling };
        asked.n_choices = 6;
        engine.submit(asked).unwrap()
    });
    engine.resume().unwrap();
    for answer in streams.map(|stream| stream.wait().unwrap()) {
        let lens: BTreeSet<_> = answer.choices.iter().map(|choice| choice.text.len()).collect();
        assert!(lens.len() > 2 && Some(&answer.choices[0].text.len()) < lens.last(), "others go on behind the first: {lens:?}");
        assert_eq!(answer.usage.encoded_images, 1, "{lens:?}");
    }
}

#[test]
fn other_weights_look_at_images_anew() {
    let case = &golden("mllama").cases[0];
    let quantized = |isq: &str| EngineConfig { in_situ_quant: Some(isq.parse().unwrap()), ..config() };
    let engine = engine("mllama", &quantized("Q8_0"));
    let before = run(&engine, request("mllama", case)).1;
    engine.re_isq("Q4_0".parse().unwrap(), &|_| {}).unwrap();
    let after = run(&engine, request("mllama", case)).1;
    let fresh = run(&self::engine("mllama", &quantized("Q4_0")), request("mllama", case)).1;
    assert_ne!(bits(&after), bits(&before));
    assert_eq!(bits(&after), bits(&fresh));
    assert_eq!(after.usage.encoded_images, 1);
}

#[test]
fn without_images_layers_that_look_at_them_are_passed_by() {
    let name = "mllama";
    let case = golden(name).cases.pop().unwrap();
    assert!(case.images.is_empty());
    let blind = engine(name, &EngineConfig { media: None, ..config() });
    assert_eq!(run(&blind, request(name, &case)).1.choices[0].token_ids, case.greedy_ids);
    for engine in [blind, engine(name, &config())] {
        let ids = vec![3, 140, 512, 138];
        let request = GenerationRequest::new(engine::Prompt::TokenIds(ids), greedy(2));
        let error = engine.submit(request).err().unwrap().to_string();
        assert!(error.contains("token id 512 (\"<|image|>\"), which is outside of the model's vocabulary of 512"), "{error}");
    }
}

#[test]
fn a_sequence_with_images_goes_on() {
    for name in ["qwen2_vl", "gemma3_vision", "gemma4_vision", "mllama"] {
        let engine = engine(name, &config());
        let mut first = turn(&[image(name, "image0.png")], &[]);
        first.service.keep = true;
        let sequence = run(&engine, first.clone()).1.choices[0].sequence.clone().unwrap();
        let then = engine::Continuation::TokenIds(vec![140, 141, 142]);
        let greedy = || SamplingParams { logprobs: Some(0), ..first.sampling.clone() };
        let forked =
            GenerationRequest::new(engine::Prompt::Sequence { sequence: sequence.clone(), then: then.clone() }, greedy());
        let (_, forked) = run(&engine, forked);
        assert_eq!(forked.usage.encoded_images, 0, "{name}");
        // The same without the blocks, in an engine without a cache of prefixes.
        let fresh = without_prefixes(name);
        let mut kept = first.clone();
        kept.service.keep = true;
        let mut sequence = run(&fresh, kept).1.choices[0].sequence.clone().unwrap();
        sequence.release();
        let again = GenerationRequest::new(engine::Prompt::Sequence { sequence, then }, greedy());
        let (_, again) = run(&fresh, again);
        assert_eq!(bits(&again), bits(&forked), "{name}");
    }
}

fn without_prefixes(name: &str) -> Engine {
    engine(name, &EngineConfig { prefix_caching: false, ..config() })
}

#[test]
fn what_cannot_be_seen_is_refused_by_name() {
    let fails = |engine: &Engine, request: GenerationRequest, part: &str| {
        let error = engine.submit(request).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    };
    let name = "llava";
    let blind = engine(name, &EngineConfig { media: None, ..config() });
    fails(&blind, turn(&[image(name, "image0.png")], &[]), "loaded for text");
    let engine = engine(name, &config());
    let mut cut = turn(&[image(name, "image0.png")], &[]);
    cut.kept_prompt = Some(engine::KeptPrompt::Last(12));
    fails(&engine, cut, "cannot be cut");
    // The text of a special token in a message is text.
    let mut forged = turn(&[image(name, "image0.png")], &[]);
    let engine::Prompt::Chat { messages, .. } = &mut forged.prompt else { unreachable!() };
    messages.push(Message::user("<image> and <image>"));
    engine.submit(forged).unwrap().wait().unwrap();
    let source = ModelSource::HuggingFace { path: golden_dir().join("text/llama"), tokenizer_json: None };
    let error = Engine::load(&source, &config(), &|_| {}).err().unwrap().to_string();
    assert!(error.contains("preprocessor_config.json"), "{error}");
}

#[test]
fn a_processor_that_does_not_go_with_its_encoder_is_refused() {
    let load = |copy: &tempfile::TempDir| {
        Engine::load(&ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None }, &config(), &|_| {})
    };
    let smaller = edited(&dir("llava"), "processor_config.json", "42", "28");
    let error = load(&smaller).unwrap().submit(turn(&[image("llava", "image0.png")], &[])).err().unwrap().to_string();
    assert!(error.contains("tiles of 28 x 28 pixels, and its encoder takes 3 x 3 patches of 14"), "{error}");
    let refused = [
        ("gemma3_vision", "processor_config.json", "\"do_pan_and_scan\": false", "\"do_pan_and_scan\": true", "do_pan_and_scan"),
        ("gemma3_vision", "config.json", "\"mm_tokens_per_image\": 4", "\"mm_tokens_per_image\": 400", "makes 20 means along 4"),
        ("llava", "config.json", "\"vision_feature_layer\": -2", "\"vision_feature_layer\": -9", "vision_feature_layer"),
        ("llava", "config.json", "_strategy\": \"default\"", "_strategy\": \"full\"", "with such a tower: default"),
        ("llava", "config.json", "clip_vision_model", "siglip_vision_model", "with such a tower: full"),
        ("llava", "config.json", "clip_vision_model", "dino_vision_model", "`vision_config.model_type` is `dino_vision_model`"),
        ("qwen2_vl", "config.json", "\"patch_size\": 14", "\"patch_size\": 0", "patch size of 0"),
        ("qwen2_5_vl", "config.json", "\"num_heads\": 2", "\"num_heads\": 3", "not a multiple of 3 heads"),
        ("qwen3_vl", "config.json", "deepstack_visual_indexes\": [", "deepstack_visual_indexes\": [7,", "[7, 0, 1] of 3"),
        ("qwen3_5_vision", "config.json", "visual_indexes\": []", "visual_indexes\": [0]", "is [0]; implemented here: []"),
        ("qwen3_5_vision", "config.json", "interleaved\": true", "interleaved\": false", "is false; implemented: true"),
        ("lfm2_vl", "config.json", "\"num_patches\": 25", "\"num_patches\": 24", "is 24, which is no square"),
        ("lfm2_vl", "config.json", "\"downsample_factor\": 2", "\"downsample_factor\": 1", "the image processor has 2 and 8"),
        ("lfm2_vl", "config.json", "feature_layer\": -1", "feature_layer\": -2", "is not the last one"),
        ("lfm2_vl", "preprocessor_config.json", "\"tile_size\": 32", "\"tile_size\": 40", "no multiple of 16"),
        ("lfm2_vl", "preprocessor_config.json", "do_resize\": true", "do_resize\": false", "always resizes"),
        ("llama4_vision", "config.json", "shuffle_ratio\": 0.5", "shuffle_ratio\": 0.3", "must be 1, 1/2, 1/3, ..."),
        ("internvl", "config.json", "\"use_qk_norm\": false", "\"use_qk_norm\": true", "is true; implemented: false"),
        ("aya_vision", "config.json", "downsample_factor\": 2", "downsample_factor\": 3", "must divide the 4 patches"),
        (
            "mllama",
            "config.json",
            "\"max_num_tiles\": 4",
            "\"max_num_tiles\": 3",
            "all of up to 3 tiles (max_num_tiles), in order",
        ),
        ("mllama", "config.json", "\"vision_output_dim\": 96", "\"vision_output_dim\": 64", "is 64; it must be 96"),
        ("mllama", "config.json", "\"num_channels\": 3", "\"num_channels\": 1", "is 1; it must be 3"),
        ("mllama", "config.json", "indices\": [\n   0,\n   2", "indices\": [\n   0,\n   3", "behind the layers [0, 3]"),
        ("mllama", "config.json", "\"image_size\": 64", "\"image_size\": 32", "the same max_image_tiles and size"),
        ("mllama", "config.json", "_layers\": [\n   1,\n   3", "_layers\": [0, 1, 2, 3, 4", "no layer has attention over tokens"),
        ("mllama", "config.json", "\"hidden_act\": \"silu\"", "\"mlp_bias\": true", "`mlp_bias` is true; implemented: false"),
        ("mllama", "config.json", "\"hidden_act\": \"silu\"", "\"head_dim\": 32", "`head_dim` is 32; it must be the width of 64"),
        ("mllama", "config.json", "embeddings\": false", "embeddings\": true", "must be made of another matrix"),
        (
            "mllama",
            "preprocessor_config.json",
            "max_image_tiles\": 4",
            "max_image_tiles\": 2",
            "the same max_image_tiles and size",
        ),
        ("mllama", "preprocessor_config.json", "do_pad\": true", "do_pad\": false", "always fills up its tiles"),
        ("qwen3_vl", "config.json", "\"model_type\": \"qwen3_vl\"", "\"model_type\": \"qwen9_vl\"", "those of llava"),
    ];
    for (name, file, from, to, part) in refused {
        let error = load(&edited(&dir(name), file, from, to)).err().unwrap().to_string();
        assert!(error.contains(part), "{name}: {error}");
    }
}
