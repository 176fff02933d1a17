//! Tiny models against the outputs of transformers (tests/data/golden).

mod common;

use std::sync::Arc;

use common::{Harness, argmax, gguf, golden_dir, hugging_face, load, log_softmax};
use device::{
    Backend, KvDType, Precision,
    cpu::{CpuBackend, CpuTier, ReferenceBackend},
};
use engine::{ModelSource, model_runner::ModelRunner};
use serde::Deserialize;

const HF: [&str; 9] = ["llama", "llama3-rope", "mistral", "mistral-window", "phi3", "phi3-longrope", "qwen2", "qwen3", "gemma3"];
const GGUF: [&str; 5] = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"];

#[derive(Deserialize)]
struct Golden {
    completions: Vec<Case>,
    chat: Case,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    last_logits: Vec<f32>,
    argmax: Vec<u32>,
    argmax_margins: Vec<f32>,
    prompt_logprobs: Vec<f64>,
    greedy_ids: Vec<u32>,
    greedy_logprobs: Vec<f64>,
    greedy_margins: Vec<f32>,
}

/// How near the goldens an output must come.
#[derive(Clone, Copy)]
struct Tolerance {
    logprob: f64,
    margin: f32,
}

const EXACT: Tolerance = Tolerance { logprob: 2e-3, margin: 5e-3 };
const BF16: Tolerance = Tolerance { logprob: 0.15, margin: 0.3 };

fn cases(name: &str) -> Vec<Case> {
    let path = golden_dir().join("text").join(name).join("golden.json");
    let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    golden.completions.into_iter().chain([golden.chat]).collect()
}

fn models() -> Vec<(&'static str, ModelSource)> {
    HF.iter().map(|name| (*name, hugging_face(name))).chain(GGUF.iter().map(|name| (*name, gguf(name)))).collect()
}

impl Case {
    /// Prompt and continuation; the last token of the continuation is only predicted.
    fn ids(&self) -> Vec<u32> {
        let continuation = &self.greedy_ids[..self.greedy_ids.len() - 1];
        [&self.prompt_ids, continuation].concat()
    }

    fn check(&self, logits: &[Vec<f32>], tolerance: Tolerance, what: &str) {
        let n = self.prompt_ids.len();
        let close = |got: f64, want: f64, where_: &str| {
            let error = (got - want).abs();
            assert!(error <= tolerance.logprob, "{what}, prompt of {n}, {where_}: log probability {got}, golden {want}");
        };
        let logprobs: Vec<_> = logits.iter().map(|row| log_softmax(row)).collect();
        for (i, want) in log_softmax(&self.last_logits).into_iter().enumerate() {
            close(logprobs[n - 1][i], want, &format!("last position, token {i}"));
        }
        assert_eq!((self.prompt_logprobs.len(), self.argmax.len()), (n - 1, n));
        for (i, want) in self.prompt_logprobs.iter().enumerate() {
            close(logprobs[i][self.prompt_ids[i + 1] as usize], *want, &format!("prompt position {i}"));
        }
        for (i, want) in self.greedy_logprobs.iter().enumerate() {
            close(logprobs[n - 1 + i][self.greedy_ids[i] as usize], *want, &format!("greedy position {i}"));
        }
        let prompt = self.argmax.iter().zip(&self.argmax_margins).enumerate();
        let greedy = self.greedy_ids.iter().zip(&self.greedy_margins).enumerate().map(|(i, pair)| (n - 1 + i, pair));
        for (i, (want, margin)) in prompt.chain(greedy) {
            assert!(
                *margin <= tolerance.margin || argmax(&logits[i]) == *want,
                "{what}, prompt of {n}, position {i}: other argmax"
            );
        }
    }
}

fn check_alone(runner: &mut ModelRunner, name: &str, chunk: usize, tolerance: Tolerance) {
    let mut harness = Harness::new(runner, 16);
    for case in cases(name) {
        let sequence = harness.add(case.ids(), case.prompt_ids.len());
        case.check(&harness.finish(sequence, chunk), tolerance, &format!("{name} in chunks of {chunk}"));
    }
}

fn cpu(tier: CpuTier, threads: usize) -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(tier, threads).unwrap())
}

fn tiers() -> impl Iterator<Item = CpuTier> {
    CpuTier::ALL.into_iter().filter(|tier| *tier <= CpuTier::detect())
}

#[test]
fn reference_backend_agrees_with_goldens() {
    for (name, source) in models() {
        let mut runner = load(&source, Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
        check_alone(&mut runner, name, common::MAX_TOKENS, EXACT);
    }
}

#[test]
fn reference_backend_agrees_with_goldens_in_chunks() {
    for (name, source) in models() {
        let mut runner = load(&source, Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
        check_alone(&mut runner, name, 1, EXACT);
        check_alone(&mut runner, name, 7, EXACT);
    }
}

#[test]
fn cpu_backend_agrees_with_goldens_on_every_tier() {
    for tier in tiers() {
        for (name, source) in models() {
            let mut runner = load(&source, cpu(tier, 2), Precision::Exact, KvDType::F32);
            for chunk in [common::MAX_TOKENS, 1, 7] {
                check_alone(&mut runner, name, chunk, EXACT);
            }
        }
    }
}

#[test]
fn cpu_backend_agrees_with_goldens_with_16_bit_kv() {
    for kv_dtype in [KvDType::BF16, KvDType::F16] {
        for (name, source) in models() {
            let mut runner = load(&source, cpu(CpuTier::detect(), 2), Precision::Fast, kv_dtype);
            check_alone(&mut runner, name, common::MAX_TOKENS, BF16);
            check_alone(&mut runner, name, 7, BF16);
        }
    }
}

/// All four requests of a model share their steps: decodes beside prefill chunks, ends at different times, blocks of 8.
#[test]
fn requests_in_one_batch_agree_with_goldens() {
    for (name, source) in models() {
        let mut runner = load(&source, cpu(CpuTier::detect(), 2), Precision::Exact, KvDType::F32);
        let mut harness = Harness::new(&mut runner, 8);
        let cases = cases(name);
        let chunks = [1, 5, 64, 9];
        let mut left: Vec<usize> = cases.iter().map(|case| case.ids().len()).collect();
        for case in &cases {
            harness.add(case.ids(), case.prompt_ids.len());
        }
        while left.iter().any(|n| *n > 0) {
            let work: Vec<_> = (0..cases.len()).map(|i| (i, left[i].min(chunks[i]))).filter(|(_, n)| *n > 0).collect();
            harness.step(&work);
            work.iter().for_each(|(i, n)| left[*i] -= n);
        }
        for (i, case) in cases.iter().enumerate() {
            case.check(&harness.finish(i, 1), EXACT, &format!("{name} in a batch"));
        }
    }
}

/// With exact precision a token's logits do not depend on what is computed beside it, to the bit.
#[test]
fn exact_logits_are_the_same_bits_in_every_chunking() {
    for (name, source) in models() {
        let mut runner = load(&source, cpu(CpuTier::detect(), 2), Precision::Exact, KvDType::F32);
        let mut harness = Harness::new(&mut runner, 16);
        for case in cases(name) {
            let mut logits_in = |chunk| {
                let sequence = harness.add(case.ids(), case.prompt_ids.len());
                harness.finish(sequence, chunk)
            };
            let whole = logits_in(common::MAX_TOKENS);
            for chunk in [1, 17] {
                assert!(whole == logits_in(chunk), "{name}, prompt of {}: chunks of {chunk} change bits", case.prompt_ids.len());
            }
        }
    }
}
