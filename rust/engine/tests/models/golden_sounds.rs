//! Tiny models that hear against the outputs of transformers (tests/data/golden/hearing), through the whole engine.

use std::{path::PathBuf, sync::Arc};

use device::{
    Backend,
    cuda::{CudaBackend, CudaOptions, Driver},
};
use engine::{
    Completion, Engine, EngineConfig, GenerationRequest, Media, MediaKind, MediaOptions, Message, MessageContent, ModelDType,
    ModelSource, Prompt, audio::Sound, images::RgbImage,
};
use kernel_tests::{EmulatedDriver, Order};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::{
    self, drawn, log_softmax,
    media::{self, GoldenMessage, bits, config, edited, image, run},
    serving::greedy,
};

const MODELS: [&str; 6] = ["voxtral", "gemma3n", "gemma4", "qwen2_audio", "audioflamingo3", "glmasr"];
/// Those that see as well.
const BOTH: [&str; 2] = ["gemma3n", "gemma4"];
/// Of them the one whose rows of images see each other.
const SEEING: &str = "gemma4";

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
    /// Some frames of the first sound, by their numbers.
    #[serde(default)]
    features: Vec<(usize, Vec<f32>)>,
}

#[derive(Deserialize)]
struct Case {
    sounds: Vec<DrawnSound>,
    messages: Vec<GoldenMessage>,
    input_ids: Vec<u32>,
    last_logits: Vec<f32>,
    argmax: Vec<u32>,
    greedy_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct DrawnSound {
    name: String,
    len: usize,
}

fn dir(name: &str) -> PathBuf {
    drawn::hearing(name)
}

fn golden(name: &str) -> Golden {
    serde_json::from_slice(&std::fs::read(dir(name).join("golden.json")).unwrap()).unwrap()
}

fn sound(name: &str, len: usize) -> Media {
    Media::Sound(Arc::new(Sound::new(16_000, drawn::sound(name, len)).unwrap()))
}

/// What is encoded of a case: images, and sounds or chunks of them.
fn num_encoded(name: &str, case: &Case) -> (usize, usize) {
    let chunks = |sound: &DrawnSound| match name {
        "gemma3n" | "gemma4" | "qwen2_audio" => 1,
        "glmasr" => sound.len.div_ceil(32_000),
        _ => sound.len.div_ceil(16_000),
    };
    let parts = case.messages.iter().flat_map(|message| &message.content);
    (parts.filter(|part| part["type"] == "image").count(), case.sounds.iter().map(chunks).sum())
}

fn source(name: &str) -> ModelSource {
    ModelSource::HuggingFace { path: dir(name), tokenizer_json: None }
}

fn engine(name: &str, config: &EngineConfig) -> Engine {
    Engine::load(&source(name), config, &|_| {}).unwrap()
}

fn request(case: &Case) -> GenerationRequest {
    let mut sounds = case.sounds.iter().map(|drawn| sound(&drawn.name, drawn.len));
    media::request(&case.messages, case.greedy_ids.len(), |kind| match kind {
        "audio" => sounds.next(),
        "image" => Some(image()),
        _ => None,
    })
}

fn about(media: Media, parts: Vec<Value>) -> GenerationRequest {
    let message = Message { media: vec![media], ..Message::new("user", MessageContent::Parts(parts)) };
    GenerationRequest::chat(vec![message], greedy(4))
}

/// How far the likeliest first tokens are from the golden's.
fn difference(case: &Case, completion: &Completion) -> f64 {
    let expected = log_softmax(&case.last_logits);
    let first = &completion.choices[0].logprobs.as_ref().unwrap()[0];
    let of = |top: &engine::TopLogprob| (f64::from(top.logprob) - expected[top.token_id as usize]).abs();
    first.top_logprobs.iter().map(of).fold(0.0, f64::max)
}

#[test]
fn every_family_hears_as_transformers_does() {
    for name in MODELS {
        let engine = engine(name, &config());
        let kinds = if BOTH.contains(&name) { &[MediaKind::Image, MediaKind::Sound][..] } else { &[MediaKind::Sound] };
        assert_eq!(engine.media_kinds(), kinds);
        for (number, case) in golden(name).cases.iter().enumerate() {
            let what = format!("{name}, case {number}");
            let mut asked = request(case);
            asked.prompt_logprobs = Some(1);
            let (prompt, completion) = run(&engine, asked);
            assert_eq!(prompt, case.input_ids, "{what}: tokens of the prompt");
            let difference = difference(case, &completion);
            assert!(difference < 2e-3, "{what}: {difference}");
            for (position, token) in completion.prompt_logprobs.iter().enumerate().skip(1) {
                let likeliest = token.token.top_logprobs[0].token_id;
                assert_eq!(likeliest, case.argmax[position - 1], "{what}: behind position {}", position - 1);
            }
            assert_eq!(completion.choices[0].token_ids, case.greedy_ids, "{what}: the answer");
        }
    }
}

#[test]
fn the_fast_path_is_near() {
    for name in MODELS {
        let engine = engine(name, &EngineConfig { dtype: ModelDType::Auto, ..config() });
        for case in &golden(name).cases {
            let difference = difference(case, &run(&engine, request(case)).1);
            assert!(difference < 0.15, "{name}: {difference}");
        }
    }
}

/// On a GPU whose kernels run on the CPU.
#[test]
#[ignore = "models in the emulation; make test-long"]
fn the_kernels_of_a_gpu_hear_the_same() {
    for name in MODELS {
        let driver: Arc<dyn Driver> = Arc::new(EmulatedDriver::with_memory(Order::Ascending, 256 << 20));
        let options = CudaOptions { graphs: false, ..CudaOptions::default() };
        let gpu: Arc<dyn Backend> = Arc::new(CudaBackend::with(driver, options).unwrap());
        let small = EngineConfig { max_num_batched_tokens: 512, max_num_seqs: 2, ..config() };
        let engine = Engine::load_onto(&gpu, &source(name), &small, &|_| {}).unwrap();
        // The third is of an image alone.
        for case in golden(name).cases.iter().step_by(2) {
            let mut asked = request(case);
            asked.sampling.max_tokens = Some(2);
            let (_, completion) = run(&engine, asked);
            let difference = difference(case, &completion);
            assert!(difference < 2e-3, "{name}: {difference}");
            assert_eq!(completion.choices[0].token_ids, case.greedy_ids[..2], "{name}");
        }
    }
}

#[test]
fn chunks_batches_and_what_is_cached_change_no_bits() {
    for name in MODELS {
        let golden = golden(name);
        let alone: Vec<_> = {
            let engine = engine(name, &config());
            golden.cases.iter().map(|case| bits(&run(&engine, request(case)).1)).collect()
        };
        // An image whose rows see each other is not cut.
        let step = if name == SEEING { 70 } else { 7 };
        let mut small = EngineConfig { max_num_batched_tokens: step, ..config() };
        small.paged_attention.block_size = Some(8);
        let engine = engine(name, &small);
        let mut has_seen = false;
        for (case, expected) in golden.cases.iter().zip(&alone) {
            let text = common::serving::request(3, 20, 12);
            let beside = [engine.submit(text.clone()).unwrap(), engine.submit(text).unwrap()];
            let (_, cold) = run(&engine, request(case));
            assert_eq!(&bits(&cold), expected, "{name}: in chunks, beside others");
            let (num_images, num_chunks) = num_encoded(name, case);
            // All cases have the same image.
            let num_images = if has_seen { 0 } else { num_images };
            has_seen |= num_images > 0;
            assert_eq!((cold.usage.encoded_sounds, cold.usage.encoded_images), (num_chunks, num_images), "{name}");
            let (_, warm) = run(&engine, request(case));
            assert_eq!(&bits(&warm), expected, "{name}: with its prefix cached");
            assert_eq!(warm.usage.cached_tokens, case.input_ids.len() - 1, "{name}: tokens of the cached prefix");
            assert_eq!(warm.usage.encoded_sounds, 0, "{name}");
            let answers = beside.map(|stream| common::serving::tokens(&stream.wait().unwrap()));
            assert_eq!(answers[0], answers[1], "{name}: texts beside sounds");
        }
    }
}

#[test]
fn preempted_requests_and_those_without_a_cache_encode_again() {
    for name in MODELS {
        // Windows give back most of what a prompt takes, so that one of few tokens is wanted where each sound has many.
        let case = &golden(name).cases[if name == "gemma3n" { 2 } else { 1 }];
        let mut asked = request(case);
        asked.sampling.max_tokens = Some(80);
        let expected = bits(&run(&engine(name, &config()), asked.clone()).1);
        let mut preemptions = 0;
        for num_tokens in (case.input_ids.len() + 80..3 * case.input_ids.len() + 80).step_by(32) {
            let mut tight = config();
            tight.paged_attention = common::serving::pool_of(num_tokens, 8);
            tight.policies.admission = engine::AdmissionPolicy::Optimistic;
            tight.prefix_caching = false;
            tight.media = Some(MediaOptions { cache_bytes: Some(1), ..MediaOptions::default() });
            let engine = engine(name, &tight);
            engine.pause().unwrap();
            let streams: Vec<_> = (0..3).map(|_| engine.submit(asked.clone()).unwrap()).collect();
            engine.resume().unwrap();
            for answer in streams.into_iter().map(|stream| stream.wait().unwrap()) {
                assert_eq!(bits(&answer), expected, "{name}, a pool of {num_tokens} tokens");
                let (num_images, num_chunks) = num_encoded(name, case);
                assert!(answer.usage.encoded_sounds >= num_chunks * (1 + answer.usage.preemptions), "{name}");
                assert!(answer.usage.encoded_images >= num_images * (1 + answer.usage.preemptions), "{name}");
                preemptions += answer.usage.preemptions;
            }
        }
        assert!(preemptions > 0, "{name}: nobody was preempted");
    }
}

/// Features that are not Whisper's.
#[test]
fn features_are_those_of_transformers() {
    for name in BOTH {
        let processor = engine::audio::Processor::from_folder(&dir(name)).unwrap().unwrap();
        let golden = golden(name);
        let Media::Sound(sound) = sound(&golden.cases[0].sounds[0].name, golden.cases[0].sounds[0].len) else { unreachable!() };
        let features = processor.process(&sound).unwrap();
        assert_eq!(processor.frames_of(&sound), [features.num_frames]);
        let (last, _) = golden.features.last().unwrap();
        assert_eq!(last + 1, features.num_frames, "{name}");
        for (frame, expected) in &golden.features {
            let found = &features.chunks[0][frame * features.num_mel_bins..][..features.num_mel_bins];
            let most = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 1e-4, "{name}, frame {frame}: {most}");
        }
    }
}

#[test]
fn images_and_sounds_of_a_request_go_to_their_own_encoders() {
    let engine = engine(SEEING, &config());
    let case = &golden(SEEING).cases[1];
    let (_, first) = run(&engine, request(case));
    assert_eq!((first.usage.encoded_images, first.usage.encoded_sounds), (1, 2));
    // The same in another order: nothing is encoded anew, and the answer is another.
    let Prompt::Chat { mut messages, options } = request(case).prompt else { unreachable!() };
    messages[0].media.swap(0, 1);
    let MessageContent::Parts(parts) = &mut messages[0].content else { unreachable!() };
    parts.swap(1, 2);
    let swapped = GenerationRequest { prompt: Prompt::Chat { messages, options }, ..request(case) };
    let (prompt, other) = run(&engine, swapped);
    assert_eq!((other.usage.encoded_images, other.usage.encoded_sounds), (0, 0));
    let place = |prompt: &[u32], id: u32| prompt.iter().position(|token| *token == id).unwrap();
    assert!(place(&prompt, 48) < place(&prompt, 28) && place(&case.input_ids, 28) < place(&case.input_ids, 48));
    assert_ne!(bits(&first), bits(&other));
}

#[test]
fn another_sound_of_the_same_length_is_another_one() {
    let audio = || vec![json!({ "type": "audio" }), json!({ "type": "text", "text": "describe" })];
    let engine = engine("voxtral", &config());
    let ask = |name: &str| run(&engine, about(sound(name, 20_000), audio()));
    let (first, _) = ask("a");
    let (second, other) = ask("b");
    assert_eq!(first, second, "the same tokens");
    assert!(other.usage.cached_tokens < 8 && other.usage.encoded_sounds == 2, "{:?}", other.usage);
    // Its chunks are kept.
    assert_eq!(ask("a").1.usage.encoded_sounds, 0);
}

#[test]
fn a_template_of_texts_has_a_place_before_the_text() {
    let copy = edited(&dir("voxtral"), "chat_template.jinja", "<s>", "<s>");
    std::fs::write(
        copy.path().join("chat_template.jinja"),
        "<s>{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}",
    )
    .unwrap();
    let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
    let engine = Engine::load(&source, &config(), &|_| {}).unwrap();
    let case = &golden("voxtral").cases[0];
    let (prompt, completion) = run(&engine, request(case));
    assert_eq!(prompt, case.input_ids);
    assert_eq!(completion.choices[0].token_ids, case.greedy_ids);
}

/// The template of models that hear is not that of others with such a tokenizer.
#[test]
fn a_folder_without_a_template_has_that_of_its_family() {
    for (family, has_template) in [("voxtral", true), ("llava", false)] {
        let from = "\"model_type\":\"voxtral\"";
        let copy = edited(&dir("voxtral"), "config.json", from, &from.replace("voxtral", family));
        std::fs::remove_file(copy.path().join("chat_template.jinja")).unwrap();
        std::fs::write(copy.path().join("tekken.json"), "").unwrap();
        let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
        let engine = Engine::load(&source, &EngineConfig { media: None, ..config() }, &|_| {}).unwrap();
        assert_eq!(engine.chat_template().is_some(), has_template, "{family}");
    }
}

#[test]
fn what_cannot_be_heard_is_refused_by_name() {
    let fails = |engine: &Engine, request: GenerationRequest, part: &str| {
        let error = engine.submit(request).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    };
    let part = |kind: &str| vec![json!({ "type": kind }), json!({ "type": "text", "text": "describe" })];
    let name = "voxtral";
    let deaf = engine(name, &EngineConfig { media: None, ..config() });
    fails(&deaf, about(sound("a", 9000), part("audio")), "the messages have sounds: load one that hears");
    let engine = engine(name, &config());
    let image = Media::Image(Arc::new(RgbImage::new(1, 1, vec![0; 3]).unwrap()));
    fails(&engine, about(image, part("image")), "this model takes sounds, and the messages have images");
    let mut cut = about(sound("a", 9000), part("audio"));
    cut.kept_prompt = Some(engine::KeptPrompt::Last(12));
    fails(&engine, cut, "cannot be cut");
    fails(&engine, about(sound("a", 16_000 * 2000), part("audio")), "make them shorter");
    // The text of a special token in a message is text.
    let forged = about(
        sound("a", 9000),
        vec![json!({ "type": "audio" }), json!({ "type": "text", "text": "[AUDIO] and [BEGIN_AUDIO][BEGIN_AUDIO]" })],
    );
    engine.submit(forged).unwrap().wait().unwrap();
    let edge = MediaOptions { max_edge: Some(100), ..MediaOptions::default() };
    let error = Engine::load(&source(name), &EngineConfig { media: Some(edge), ..config() }, &|_| {}).err().unwrap().to_string();
    assert!(error.contains("max_edge"), "{error}");
}

#[test]
fn a_configuration_that_makes_no_sense_is_refused_by_its_key() {
    let refused = [
        ("config.json", "\"num_mel_bins\":16", "\"num_mel_bins\":17", "num_mel_bins"),
        ("config.json", "\"max_source_positions\":50", "\"max_source_positions\":49", "are twice the positions"),
        ("config.json", "\"intermediate_size\":160", "\"intermediate_size\":161", "no whole rows of it"),
        (
            "config.json",
            "\"num_attention_heads\":4,\"num_mel",
            "\"num_attention_heads\":5,\"num_mel",
            "not a multiple of 5 heads",
        ),
        ("config.json", "\"activation_function\":\"gelu\"", "\"activation_function\":\"relu9\"", "activation_function"),
        ("config.json", "\"projector_hidden_act\":\"gelu\"", "\"projector_hidden_act\":\"tan\"", "projector_hidden_act"),
        ("config.json", "\"audio_token_id\":24,", "", "audio_token_index"),
        ("preprocessor_config.json", "Whisper", "Clap", "ClapFeatureExtractor"),
        ("preprocessor_config.json", "\"hop_length\": 160", "\"hop_length\": 320", "twice the positions"),
    ];
    let refused = refused.map(|(file, from, to, part)| ("voxtral", file, from, to, part)).into_iter();
    let others = [
        ("gemma4", "config.json", "context_left\":5", "context_left\":1", "attention_context_left"),
        (
            "gemma4",
            "config.json",
            "logit_cap\":3.0",
            "logit_cap\":3.0,\"attention_invalid_logits_value\":-9",
            "invalid_logits_value",
        ),
        ("gemma4", "config.json", "_channels\":[16,4]", "_channels\":[16]", "subsampling_conv_channels"),
        ("gemma4", "config.json", "_channels\":[16,4]", "_channels\":[16,5]", "subsample_conv_projection"),
        ("gemma4", "config.json", "logit_cap\":3.0", "logit_cap\":0.0", "no positive numbers"),
        ("gemma4", "config.json", "kernel_size\":3", "kernel_size\":0", "a width of convolutions of 0"),
        ("gemma4", "config.json", "attention_heads\":3", "attention_heads\":5", "of 5 heads"),
        ("gemma4", "config.json", "audio_token_id\":28", "audio_token_id\":48", "stands for images"),
        ("gemma4", "config.json", "\"boa_token_id\":29,", "", "boa_token_id"),
        ("gemma4", "processor_config.json", "Gemma4Audio", "Whisper", "goes with features of Gemma4AudioFeatureExtractor"),
        ("gemma4", "processor_config.json", "\"feature_extractor\"", "\"no\"", "preprocessor_config.json"),
        ("gemma3n", "config.json", "context_left\":5", "context_left\":1", "conf_attention_context_left"),
        ("gemma3n", "config.json", "_size\":[8,4]", "_size\":[8,4],\"sscp_conv_stride_size\":[[1,2],[2,2]]", "stride_size"),
        ("gemma3n", "config.json", "feat_size\":16", "feat_size\":17", "input_feat_size"),
        ("gemma3n", "config.json", "per_image\":188", "per_image\":187", "the longest sound has 188 vectors"),
        ("gemma3n", "config.json", "vocab_size\":20", "vocab_size\":18", "need vectors, and `vocab_size` is 18"),
        ("gemma3n", "config.json", "cap\":3.0", "cap\":3.0,\"conf_reduction_factor\":2", "has 375 vectors"),
        ("gemma3n", "config.json", "layer_input\":379", "layer_input\":400", "vocab_size_per_layer_input"),
        ("gemma3n", "config.json", "300m_enc", "900m_enc", "architecture"),
        ("gemma3n", "config.json", "per_image\":16", "per_image\":17", "vision_soft_tokens_per_image"),
        ("gemma3n", "config.json", "vocab_size\":3,", "vocab_size\":3,\"hidden_size\":1024,", "hidden_size"),
        ("gemma3n", "config.json", "_resolution\":4", "_resolution\":4,\"drop_path_rate\":0.1", "drop_path_rate"),
        ("gemma3n", "config.json", "_resolution\":4", "_resolution\":5", "vision_soft_tokens_per_image"),
        ("gemma3n", "config.json", "kernel_size_end\":0", "kernel_size_end\":3", "dw_kernel_size_end"),
        ("gemma3n", "config.json", "value_dim\":8", "value_dim\":16", "value_dim"),
        ("gemma3n", "config.json", "stride\":1,\"act", "stride\":2,\"act", "stride"),
        ("gemma3n", "config.json", "\"er\"", "\"ir\"", "block_type"),
        ("gemma3n", "config.json", "act_layer\":null", "act_layer\":\"relu\"", "act_layer"),
        ("gemma3n", "preprocessor_config.json", "\"height\": 64", "\"height\": 66", "whole parts of 4 times 4"),
        ("gemma3n", "preprocessor_config.json", "\"do_resize\": true", "\"do_resize\": false", "do_resize"),
        ("gemma3n", "preprocessor_config.json", "Siglip", "CLIP", "SiglipImageProcessor"),
        ("gemma3n", "preprocessor_config.json", "Gemma3nAudio", "Gemma4Audio", "Gemma3nAudioFeatureExtractor"),
        ("glmasr", "config.json", "intermediate_size\":128", "intermediate_size\":64", "4 times the width"),
        ("glmasr", "config.json", "rope_type\":\"default\",\"rope_theta\":10000.0,\"p", "rope_type\":\"yarn\",\"p", "`yarn`"),
        ("glmasr", "config.json", "rotary_factor\":0.5", "rotary_factor\":1.5", "partial_rotary_factor"),
        ("qwen2_audio", "config.json", "\"audio_token_index\":28,", "", "audio_token_index"),
        ("audioflamingo3", "config.json", "max_source_positions\":50", "max_source_positions\":60", "twice the positions"),
    ];
    for (name, file, from, to, part) in refused.chain(others) {
        let copy = edited(&dir(name), file, from, to);
        let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
        let error = Engine::load(&source, &config(), &|_| {}).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|error| error.contains(part)), "{name}: {to}: {error:?}");
    }
}

/// What config.json does not describe is not loaded, and asked for not given.
#[test]
fn one_of_two_encoders_may_be_missing() {
    let text = std::fs::read_to_string(dir(SEEING).join("config.json")).unwrap();
    let whole: Value = serde_json::from_str(&text).unwrap();
    for (key, kind, refused) in
        [("vision_config", MediaKind::Sound, image()), ("audio_config", MediaKind::Image, sound("a", 9000))]
    {
        let copy = edited(&dir(SEEING), "chat_template.jinja", "<|im_start|>", "<|im_start|>");
        let mut config_of_one = whole.clone();
        config_of_one[key] = Value::Null;
        std::fs::write(copy.path().join("config.json"), config_of_one.to_string()).unwrap();
        let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
        let engine = Engine::load(&source, &config(), &|_| {}).unwrap();
        assert_eq!(engine.media_kinds(), [kind]);
        let part = refused.kind().part_type();
        let error = engine.submit(about(refused, vec![json!({ "type": part })])).err().unwrap().to_string();
        assert!(error.contains("this model takes"), "{error}");
    }
    let neither =
        edited(&dir(SEEING), "config.json", "_config\":{\"model_type\":\"gemma4_", "_other\":{\"model_type\":\"gemma4_");
    let source = ModelSource::HuggingFace { path: neither.path().to_owned(), tokenizer_json: None };
    assert!(Engine::load(&source, &config(), &|_| {}).is_err());
}

#[test]
fn sounds_are_counted_where_the_folder_has_no_template_of_them() {
    let case = &golden("qwen2_audio").cases[1];
    let text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nfirst\
                Audio 1: <|audio_bos|>*<|audio_eos|>\nthen aAudio 2: <|audio_bos|>*<|audio_eos|>\n<|im_end|>\n<|im_start|>assistant\n";
    for template in [None, Some("{% for m in messages %}{{ m['content'] }}{% endfor %}")] {
        let copy = edited(&dir("qwen2_audio"), "chat_template.jinja", "<|im_start|>", "<|im_start|>");
        let file = copy.path().join("chat_template.jinja");
        match template {
            None => std::fs::remove_file(file).unwrap(),
            Some(text) => std::fs::write(file, text).unwrap(),
        }
        let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
        let engine = Engine::load(&source, &config(), &|_| {}).unwrap();
        let Prompt::Chat { messages, options } = request(case).prompt else { unreachable!() };
        let (rendered, _) = engine.render_chat(&messages, &options).unwrap();
        let mut short = rendered.replace("<|AUDIO|>", "*");
        while short.contains("**") {
            short = short.replace("**", "*");
        }
        assert_eq!(short, text);
    }
}

#[test]
fn sounds_that_a_model_was_not_trained_for_are_refused() {
    let fails = |name: &str, len: usize, part: &str| {
        let engine = engine(name, &config());
        let error = engine.submit(about(sound("a", len), vec![json!({ "type": "audio" })])).err().unwrap().to_string();
        assert!(error.contains(part), "{name}: {error}");
    };
    fails("qwen2_audio", 16_001, "longer than the 1 seconds");
    fails("gemma4", 480_001, "longer than the 30 seconds");
    fails("gemma4", 160, "a frame needs 161");
    fails("glmasr", 600, "too short to become a vector");
    fails("qwen2_audio", 300, "too short to become a vector");
}
