//! Adapters of the tests, and what PEFT and Transformers computed with them.

use std::{fs, path::PathBuf};

use engine::{AdapterChoice, AdapterOptions, Completion, Engine, EngineConfig, GenerationRequest, Prompt};
use serde::Deserialize;

use super::{
    argmax, golden_dir, log_softmax,
    serving::{greedy, tokens},
};

/// Adapters of PEFT's that there are goldens of.
pub const PEFT: [&str; 17] = [
    "granitemoehybrid-mamba",
    "lfm2-conv",
    "llama-all-rslora",
    "llama-attn",
    "llama-dora",
    "llama-embed-head",
    "llama-layers",
    "llama-patterns",
    "llama-save",
    "llama-tokens",
    "mistral-all-rslora",
    "mistral-attn",
    "qwen2-bias",
    "qwen3-moe-experts",
    "qwen3-moe-params",
    "qwen3-next-mixers",
    "qwen3_5-mixers",
];

#[derive(Deserialize)]
pub struct Golden {
    pub base: String,
    pub completions: Vec<Case>,
}

#[derive(Deserialize)]
pub struct Case {
    pub prompt_ids: Vec<u32>,
    pub last_logits: Vec<f32>,
    pub greedy_ids: Vec<u32>,
    pub greedy_margins: Vec<f32>,
}

pub fn folder(name: &str) -> PathBuf {
    golden_dir().join("lora").join(name)
}

pub fn golden(name: &str) -> Golden {
    serde_json::from_slice(&fs::read(folder(name).join("golden.json")).unwrap()).unwrap()
}

pub fn with_adapters(config: EngineConfig, adapters: &[(&str, PathBuf)]) -> EngineConfig {
    let adapters = adapters.iter().map(|(alias, source)| ((*alias).to_owned(), source.clone())).collect();
    EngineConfig { adapters: Some(AdapterOptions { adapters, ..AdapterOptions::default() }), ..config }
}

pub fn request(ids: Vec<u32>, adapter: Option<&str>, max_tokens: usize) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::TokenIds(ids), greedy(max_tokens));
    request.sampling.logprobs = Some(8);
    request.adapter = adapter.map(|alias| AdapterChoice::Alias(alias.to_owned()));
    request
}

pub fn ask(engine: &Engine, ids: Vec<u32>, adapter: Option<&str>, max_tokens: usize) -> Completion {
    engine.submit(request(ids, adapter, max_tokens)).unwrap().wait().unwrap()
}

/// Tokens, and the bits of their log probabilities.
pub fn bits(completion: &Completion) -> Vec<(u32, u32)> {
    completion.choices[0].logprobs.iter().flatten().map(|token| (token.token_id, token.logprob.unwrap().to_bits())).collect()
}

/// Every case of an adapter: the likeliest first tokens, and the greedy answer as far as it is decided.
pub fn check(engine: &Engine, name: &str, what: &str) {
    check_some(engine, name, what, [usize::MAX; 2]);
}

/// The same of prompts of up to so many tokens, and of as many tokens of each answer.
pub fn check_some(engine: &Engine, name: &str, what: &str, [longest, most]: [usize; 2]) {
    for mut case in golden(name).completions.into_iter().filter(|case| case.prompt_ids.len() <= longest) {
        case.greedy_ids.truncate(most);
        let completion = ask(engine, case.prompt_ids.clone(), Some("it"), case.greedy_ids.len());
        let n = case.prompt_ids.len();
        let wanted = log_softmax(&case.last_logits);
        let first = completion.choices[0].logprobs.iter().flatten().next().unwrap();
        for top in &first.top_logprobs {
            let want = wanted[top.token_id as usize];
            let error = (f64::from(top.logprob) - want).abs();
            assert!(error <= 2e-3, "{name} {what}, prompt of {n}, token {}: {} instead of {want}", top.token_id, top.logprob);
        }
        assert_eq!(first.top_logprobs[0].token_id, argmax(&case.last_logits), "{name} {what}, prompt of {n}");
        let undecided = case.greedy_margins.iter().position(|margin| *margin <= 5e-3).unwrap_or(most).min(case.greedy_ids.len());
        assert_eq!(tokens(&completion)[..undecided], case.greedy_ids[..undecided], "{name} {what}, prompt of {n}");
    }
}
