//! A tiny Phi-3-vision, whose weights are drawn from their names, against Transformers' CLIP and Phi-3 with the rules of the code
//! beside the hub's weights between them.

use std::path::Path;

use engine::{
    Engine, EngineConfig, GenerationRequest, MediaOptions, Message, MessageContent, ModelDType, ModelSource, SamplingParams,
};
use serde::Deserialize;
use serde_json::json;

use crate::common::{drawn, golden_dir, log_softmax, media, serving::greedy};

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    /// Width and height.
    sizes: Vec<[u32; 2]>,
    text: String,
    num_image_tokens: Vec<usize>,
    num_tokens: usize,
    last_logits: Vec<f32>,
    greedy_ids: Vec<u32>,
}

/// The model's folder, with `edit` made in its config.json.
fn folder(edit: (&str, &str)) -> tempfile::TempDir {
    let (copy, from) = (tempfile::tempdir().unwrap(), golden_dir().join("vision"));
    for file in ["phi3_v/config.json", "phi3_v/preprocessor_config.json", "phi3_v/chat_template.jinja", "llava/tokenizer.json"] {
        let name = Path::new(file).file_name().unwrap();
        std::fs::copy(from.join(file), copy.path().join(name)).unwrap();
    }
    let config = std::fs::read_to_string(copy.path().join("config.json")).unwrap();
    assert!(config.contains(edit.0), "{}", edit.0);
    std::fs::write(copy.path().join("config.json"), config.replace(edit.0, edit.1)).unwrap();
    drawn::write_weights(&from.join("phi3_v/tensors.json"), copy.path(), drawn::vision_value);
    copy
}

fn load(folder: &tempfile::TempDir) -> Result<Engine, String> {
    let mut config = EngineConfig { dtype: ModelDType::F32, media: Some(MediaOptions::default()), ..EngineConfig::default() };
    config.cpu.num_threads = Some(2);
    config.paged_attention.mem_gpu = Some(engine::MemoryGpuConfig::ContextSize(3000));
    let source = ModelSource::HuggingFace { path: folder.path().to_owned(), tokenizer_json: None };
    Engine::load(&source, &config, &|_| {}).map_err(|error| error.to_string())
}

fn request(case: &Case) -> GenerationRequest {
    let images: Vec<_> = case.sizes.iter().enumerate().map(|(seed, size)| media::pattern(seed, *size)).collect();
    let mut parts = vec![json!({ "type": "image" }); images.len()];
    parts.push(json!({ "type": "text", "text": case.text }));
    let message =
        Message { media: images.into_iter().map(Into::into).collect(), ..Message::new("user", MessageContent::Parts(parts)) };
    let sampling = SamplingParams { logprobs: Some(20), ..greedy(case.greedy_ids.len()) };
    GenerationRequest { return_token_ids: true, ..GenerationRequest::chat(vec![message], sampling) }
}

fn golden() -> Golden {
    serde_json::from_slice(&std::fs::read(golden_dir().join("vision/phi3_v/golden.json")).unwrap()).unwrap()
}

/// The largest difference between the likeliest tokens' log probabilities and those of the golden, and the answer.
fn compared(engine: &Engine, case: &Case) -> (f64, Vec<u32>) {
    let stream = engine.submit(request(case)).unwrap();
    let prompt = stream.prompt_token_ids().to_vec();
    assert_eq!(prompt.len(), case.num_tokens);
    assert_eq!(prompt.iter().filter(|id| **id == 6).count(), case.num_image_tokens.iter().sum::<usize>());
    let completion = stream.wait().unwrap();
    let expected = log_softmax(&case.last_logits);
    let first = &completion.choices[0].logprobs.as_ref().unwrap()[0];
    let differences = first.top_logprobs.iter().map(|top| (f64::from(top.logprob) - expected[top.token_id as usize]).abs());
    (differences.fold(0.0, f64::max), completion.choices[0].token_ids.clone())
}

#[test]
fn rows_and_parts_of_an_image_are_separated_as_the_model_was_trained() {
    let engine = load(&folder(("sub_glb", "sub_glb"))).unwrap();
    for (number, case) in golden().cases.iter().enumerate() {
        let (difference, answer) = compared(&engine, case);
        assert!(difference < 2e-3, "case {number}: {difference}");
        assert_eq!(answer, case.greedy_ids, "case {number}");
    }
}

#[test]
fn the_whole_image_may_come_first() {
    let engine = load(&folder(("sub_glb", "glb_sub"))).unwrap();
    let (difference, _) = compared(&engine, &golden().cases[0]);
    assert!(difference > 2e-3, "the other order gives the same: {difference}");
}

#[test]
fn what_the_encoder_is_not_is_refused_by_name() {
    let refused = [
        (
            "\"projection_cls\": \"mlp\"",
            "\"projection_cls\": \"linear\"",
            "`embd_layer.projection_cls` is \"linear\"; implemented: mlp",
        ),
        ("\"use_hd_transform\": true", "\"use_hd_transform\": false", "`embd_layer.use_hd_transform` is not true"),
        ("\"sub_glb\"", "\"sub\"", "`embd_layer.hd_transform_order` is `sub`; implemented: glb_sub, sub_glb"),
        ("\"clip_vision_model\"", "\"siglip\"", "`img_processor.name` is \"siglip\""),
        ("\"name\":", "\"layer_idx\": -9, \"name\":", "`img_processor.layer_idx` is -9"),
        ("\"image_token_id\": 6,", "", "is not over 32044, the id of the image token"),
        ("\"img_processor\":", "\"img_processors\":", "`img_processor` is missing"),
    ];
    for (from, to, part) in refused {
        let Err(error) = load(&folder((from, to))) else { panic!("{part}") };
        assert!(error.contains(part), "{error}");
    }
}
