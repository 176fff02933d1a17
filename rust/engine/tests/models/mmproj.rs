//! Models that see from two GGUF files, one of them an image encoder (`mmproj`), against the same models as folders.

use std::{path::PathBuf, sync::Arc};

use engine::{
    Completion, Engine, EngineConfig, GenerationRequest, MediaOptions, Message, MessageContent, ModelDType, ModelSource,
    SamplingParams,
    images::{Limits, RgbImage, decode},
};
use serde_json::Value;

use crate::common::{
    drawn,
    gguf_writer::{Gguf, STRING, U32, string, with_size, without},
    log_softmax,
    mmproj::Checkpoint,
    serving::greedy,
};

const MODELS: [&str; 9] =
    ["llava", "llava_next", "idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3_vision", "mistral3"];

fn dir(name: &str) -> PathBuf {
    drawn::seeing(name)
}

fn config(mmproj: Option<PathBuf>) -> EngineConfig {
    let media = Some(MediaOptions { mmproj, ..MediaOptions::default() });
    let mut config = EngineConfig { dtype: ModelDType::F32, media, ..EngineConfig::default() };
    config.cpu.num_threads = Some(2);
    config.paged_attention.mem_gpu = Some(engine::MemoryGpuConfig::ContextSize(2000));
    config
}

fn folder(name: &str) -> Engine {
    let source = ModelSource::HuggingFace { path: dir(name), tokenizer_json: None };
    Engine::load(&source, &config(None), &|_| {}).unwrap()
}

/// Writes both files and loads them.
fn pair(language: &Gguf, encoder: &Gguf) -> Result<Engine, String> {
    let temp = tempfile::tempdir().unwrap();
    let (model, mmproj) = (temp.path().join("model.gguf"), temp.path().join("mmproj.gguf"));
    language.write(&model);
    encoder.write(&mmproj);
    let source = ModelSource::Gguf { files: vec![model], tokenizer_dir: None, tokenizer_json: None };
    Engine::load(&source, &config(Some(mmproj)), &|_| {}).map_err(|error| error.to_string())
}

fn cases(name: &str) -> Vec<Value> {
    let golden: Value = serde_json::from_slice(&std::fs::read(dir(name).join("golden.json")).unwrap()).unwrap();
    golden["cases"].as_array().unwrap().clone()
}

fn request(name: &str, case: &Value) -> GenerationRequest {
    let read = |file: &Value| {
        let bytes = std::fs::read(dir(name).join(file.as_str().unwrap())).unwrap();
        Arc::new(decode(&bytes, &Limits::default()).unwrap())
    };
    let images: Vec<Arc<RgbImage>> = case["images"].as_array().unwrap().iter().map(read).collect();
    let mut images = images.into_iter();
    let message = |message: &Value| {
        let parts = message["content"].as_array().unwrap().clone();
        let num_images = parts.iter().filter(|part| part["type"] == "image").count();
        let role = message["role"].as_str().unwrap();
        Message {
            media: images.by_ref().take(num_images).map(Into::into).collect(),
            ..Message::new(role, MessageContent::Parts(parts))
        }
    };
    let messages = case["messages"].as_array().unwrap().iter().map(message).collect();
    let sampling = SamplingParams { logprobs: Some(20), ..greedy(case["greedy_ids"].as_array().unwrap().len()) };
    GenerationRequest { return_token_ids: true, ..GenerationRequest::chat(messages, sampling) }
}

/// The prompt's tokens, and the answers' ids and log probabilities as bits.
fn run(engine: &Engine, name: &str, case: &Value) -> (Vec<u32>, Vec<(u32, u32)>, Completion) {
    let stream = engine.submit(request(name, case)).unwrap();
    let prompt = stream.prompt_token_ids().to_vec();
    let completion = stream.wait().unwrap();
    let top = completion.choices[0].logprobs.iter().flatten().flat_map(|token| &token.top_logprobs);
    let bits = top.map(|top| (top.token_id, top.logprob.to_bits())).collect();
    (prompt, bits, completion)
}

#[test]
fn a_pair_of_files_gives_the_bits_of_the_folder() {
    for name in MODELS {
        let checkpoint = Checkpoint::open(&dir(name));
        let pair = pair(&checkpoint.language(true), &checkpoint.encoder()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let folder = folder(name);
        for (number, case) in cases(name).iter().enumerate() {
            let ((prompt, bits, _), (same, expected, _)) = (run(&pair, name, case), run(&folder, name, case));
            assert_eq!(prompt, same, "{name}, case {number}: tokens of the prompt");
            assert_eq!(bits, expected, "{name}, case {number}");
        }
    }
}

#[test]
fn with_the_converter_s_order_of_rows_a_llama_sees_as_transformers_does() {
    for name in ["llava", "llava_next", "idefics3", "mistral3"] {
        let checkpoint = Checkpoint::open(&dir(name));
        let pair = pair(&checkpoint.language(false), &checkpoint.encoder()).unwrap();
        for (number, case) in cases(name).iter().enumerate() {
            let (_, _, completion) = run(&pair, name, case);
            let numbers = |key: &str| case[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
            let expected = log_softmax(&numbers("last_logits").iter().map(|x| *x as f32).collect::<Vec<_>>());
            for top in &completion.choices[0].logprobs.as_ref().unwrap()[0].top_logprobs {
                let expected = expected[top.token_id as usize];
                let what = format!("{name}, case {number}: token {} has {} and not {expected}", top.token_id, top.logprob);
                assert!((f64::from(top.logprob) - expected).abs() < 2e-3, "{what}");
            }
            let answer: Vec<_> = completion.choices[0].token_ids.iter().map(|id| f64::from(*id)).collect();
            assert_eq!(answer, numbers("greedy_ids"), "{name}, case {number}: the answer");
        }
    }
}

/// Of a token in the vocabulary another text.
fn with_token(mut gguf: Gguf, from: &str, to: &str) -> Gguf {
    let tokens = gguf.entries.iter_mut().find(|entry| entry.starts_with(&string("tokenizer.ggml.tokens"))).unwrap();
    let (from, to) = (string(from), string(to));
    let at = tokens.windows(from.len()).position(|window| window == from).unwrap();
    tokens.splice(at..at + from.len(), to);
    gguf
}

#[test]
fn a_vocabulary_that_ends_before_the_image_token_has_another_in_its_place() {
    // Of the one `<unk>`, which has the id 0, takes the place; of the other a token that no text uses.
    for (name, token, instead, id, num_rows) in
        [("llava", "<image>", "<another>", 0, 9), ("gemma3_vision", "<image_soft_token>", "<unused98>", 52, 4)]
    {
        let checkpoint = Checkpoint::open(&dir(name));
        let pair = pair(&with_token(checkpoint.language(true), token, instead), &checkpoint.encoder()).unwrap();
        let mut asked = request(name, &cases(name)[0]);
        let engine::Prompt::Chat { messages, .. } = &mut asked.prompt else { unreachable!() };
        messages.truncate(1);
        let parts = [serde_json::json!({ "type": "image" }), serde_json::json!({ "type": "text", "text": "what?" })];
        messages[0].content = MessageContent::Parts(parts.into());
        let stream = pair.submit(asked).unwrap();
        assert_eq!(stream.prompt_token_ids().iter().filter(|it| **it == id).count(), num_rows, "{name}");
        stream.wait().unwrap();
    }
    let qwen = Checkpoint::open(&dir("qwen2_vl"));
    let Err(error) = pair(&with_token(qwen.language(true), "<|image_pad|>", "<another>"), &qwen.encoder()) else {
        panic!("without an image token")
    };
    assert!(error.contains("has no token `<|image_pad|>`"), "{error}");
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let fails = |name: &str, change: &dyn Fn(Gguf) -> Gguf, part: &str| {
        let checkpoint = Checkpoint::open(&dir(name));
        let Err(error) = pair(&checkpoint.language(true), &change(checkpoint.encoder())) else { panic!("{part}") };
        assert!(error.contains(part), "{name}: {error}");
        assert!(error.contains("mmproj.gguf"), "{name}: {error}");
    };
    let kind = |gguf: Gguf, name: &str| without(gguf, "clip.projector_type").entry("clip.projector_type", STRING, &string(name));
    let row = |gguf: Gguf, name: &str| gguf.weight(name, &[48], 0, &[0; 192]);
    fails("llava", &|gguf| kind(gguf, "ldpv2"), "`clip.projector_type` is `ldpv2`, which is not computed; mlp, idefics3");
    fails("llava", &|gguf| without(gguf, "clip.projector_type"), "`clip.projector_type` is missing");
    fails("llava", &|gguf| without(gguf, "general.architecture"), "`general.architecture` is `missing`");
    fails("llava", &|gguf| without(gguf, "clip.vision.image_mean"), "`clip.vision.image_mean` must be a list of three numbers");
    fails("llava", &|gguf| with_size(gguf, "clip.vision.patch_size", 0), "`clip.vision.patch_size` is 0");
    fails("llava", &|gguf| with_size(gguf, "clip.vision.patch_size", 7), "tensor `v.position_embd.weight` has shape");
    fails("llava", &|gguf| with_size(gguf, "clip.vision.block_count", 9), "tensor `v.blk.3.attn_q.weight` is missing");
    fails("llava", &|gguf| with_size(gguf, "clip.vision.block_count", 1 << 20), "at most 4096 are supported");
    fails("llava", &|gguf| row(gguf, "v.blk.0.ls1.weight"), "tensor `v.blk.0.ls1.weight` is of a kind of encoder");
    fails("llava", &|gguf| row(gguf, "mm.4.weight"), "tensor `mm.4.weight` is of a kind of encoder");
    fails("mistral3", &|gguf| with_size(gguf, "clip.vision.spatial_merge_size", 1), "tensor `mm.patch_merger.weight` has shape");
    fails("qwen2_5_vl", &|gguf| without(gguf, "clip.vision.n_wa_pattern"), "`clip.vision.n_wa_pattern` is missing");
    // Known, and of other projectors.
    let (tiles, scale) = ("clip.vision.preproc_max_tiles", "clip.vision.projector.scale_factor");
    fails("gemma3_vision", &|gguf| gguf.entry(tiles, U32, &[9, 0, 0, 0]), "`clip.vision.preproc_max_tiles` asks for what is");
    fails("qwen2_5_vl", &|gguf| gguf.entry(scale, U32, &[2, 0, 0, 0]), "`clip.vision.projector.scale_factor` asks for what is");
    fails("qwen2_5_vl", &|gguf| gguf.entry("clip.vision.wa_layer_indexes", U32, &[1, 0, 0, 0]), "wa_layer_indexes` asks for");
    fails("qwen3_vl", &|gguf| without(gguf, "clip.vision.is_deepstack_layers"), "tensor `v.deepstack.0.fc1.bias` is of a kind");
    fails("gemma3_vision", &|gguf| with_size(gguf, "clip.vision.projector.scale_factor", 9), "is 9, which leaves nothing");
    fails("idefics3", &|gguf| gguf.entry("clip.use_silu", 7, &[1]), "both `clip.use_gelu` and `clip.use_silu` are true");
}

#[test]
fn an_encoder_goes_with_its_language_model_alone() {
    let [llava, qwen] = ["llava", "qwen2_vl"].map(|name| Checkpoint::open(&dir(name)));
    let Err(error) = pair(&llava.language(true), &qwen.encoder()) else { panic!("a Llama with Qwen2-VL's encoder") };
    assert!(error.contains("no `rope.dimension_sections`"), "{error}");
    let language = without(qwen.language(true), "qwen2vl.rope.dimension_sections");
    let Err(error) = pair(&language, &qwen.encoder()) else { panic!("without sections") };
    assert!(error.contains("no `rope.dimension_sections`"), "{error}");
    let narrow = Checkpoint::open(&dir("qwen3_vl"));
    let Err(error) = pair(&narrow.language(true), &qwen.encoder()) else { panic!("of another width") };
    assert!(error.contains("tensor `mm.2.weight` has shape [64, 128]; the configuration asks for [32, 128]"), "{error}");
}

#[test]
fn an_encoder_s_file_is_asked_for_where_one_is_needed() {
    let temp = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&dir("llava"));
    let (model, mmproj) = (temp.path().join("model.gguf"), temp.path().join("mmproj.gguf"));
    checkpoint.language(false).write(&model);
    checkpoint.encoder().write(&mmproj);
    let error =
        |source: &ModelSource, mmproj: Option<PathBuf>| Engine::load(source, &config(mmproj), &|_| {}).err().unwrap().to_string();
    let gguf = ModelSource::Gguf { files: vec![model.clone()], tokenizer_dir: None, tokenizer_json: None };
    assert!(error(&gguf, None).contains("mmproj_filename (--mmproj)"));
    let twice = error(&gguf, Some(model));
    assert!(twice.contains("`general.architecture` is `llama`; it must be `clip`"), "{twice}");
    let folder = ModelSource::HuggingFace { path: dir("llava"), tokenizer_json: None };
    assert!(error(&folder, Some(mmproj)).contains("leave out mmproj_filename"));
}
