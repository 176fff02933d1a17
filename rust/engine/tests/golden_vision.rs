//! Tiny models that see against the outputs of transformers (tests/data/golden/vision), through the whole engine.

#![allow(missing_docs)]

mod common;

use std::{path::PathBuf, sync::Arc};

use common::{golden_dir, log_softmax};
use engine::{
    Completion, Engine, EngineConfig, GenerationRequest, Message, MessageContent, ModelDType, ModelSource, SamplingParams,
    VisionOptions,
    images::{Limits, RgbImage, decode},
};
use serde::Deserialize;

const MODELS: [&str; 7] = ["llava", "llava_next", "idefics3", "qwen2_vl", "qwen2_5_vl", "gemma3_vision", "mistral3"];

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
    argmax: Vec<u32>,
    greedy_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct GoldenMessage {
    role: String,
    content: Vec<serde_json::Value>,
}

fn dir(name: &str) -> PathBuf {
    golden_dir().join("vision").join(name)
}

fn golden(name: &str) -> Golden {
    serde_json::from_slice(&std::fs::read(dir(name).join("golden.json")).unwrap()).unwrap()
}

fn image(name: &str, file: &str) -> Arc<RgbImage> {
    Arc::new(decode(&std::fs::read(dir(name).join(file)).unwrap(), &Limits::default()).unwrap())
}

fn config() -> EngineConfig {
    let mut config = EngineConfig { dtype: ModelDType::F32, vision: Some(VisionOptions::default()), ..EngineConfig::default() };
    config.cpu.num_threads = Some(2);
    config.paged_attention.mem_gpu = Some(engine::MemoryGpuConfig::ContextSize(2000));
    config
}

fn engine(name: &str, config: &EngineConfig) -> Engine {
    let source = ModelSource::HuggingFace { path: dir(name), tokenizer_json: None };
    Engine::load(&source, config, &|_| {}).unwrap()
}

fn request(name: &str, case: &Case) -> GenerationRequest {
    let mut images = case.images.iter().map(|file| image(name, file));
    let message = |message: &GoldenMessage| {
        let num_images = message.content.iter().filter(|part| part["type"] == "image").count();
        let content = MessageContent::Parts(message.content.clone());
        Message { images: images.by_ref().take(num_images).collect(), ..Message::new(&message.role, content) }
    };
    let sampling = SamplingParams {
        temperature: Some(0.0),
        max_tokens: Some(case.greedy_ids.len()),
        ignore_eos: true,
        logprobs: Some(20),
        ..SamplingParams::default()
    };
    let mut request = GenerationRequest::chat(case.messages.iter().map(message).collect(), sampling);
    request.return_token_ids = true;
    request
}

fn run(engine: &Engine, request: GenerationRequest) -> (Vec<u32>, Completion) {
    let stream = engine.submit(request).unwrap();
    let prompt = stream.prompt_token_ids().to_vec();
    (prompt, stream.wait().unwrap())
}

/// The answers' bits: ids and log probabilities.
fn bits(completion: &Completion) -> Vec<(u32, Option<u32>)> {
    completion.choices[0].logprobs.iter().flatten().map(|token| (token.token_id, token.logprob.map(f32::to_bits))).collect()
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
