//! What other software answered, and how near to it an output must come.

use std::path::Path;

use engine::model_runner::ModelRunner;
use serde::Deserialize;

use crate::common::{Harness, argmax, log_softmax};

#[derive(Deserialize)]
struct Golden {
    completions: Vec<Case>,
    chat: Option<Case>,
}

#[derive(Deserialize)]
pub struct Case {
    pub prompt_ids: Vec<u32>,
    pub last_logits: Vec<f32>,
    pub argmax: Vec<u32>,
    pub argmax_margins: Vec<f32>,
    pub prompt_logprobs: Vec<f64>,
    pub greedy_ids: Vec<u32>,
    pub greedy_logprobs: Vec<f64>,
    pub greedy_margins: Vec<f32>,
}

/// How near the goldens an output must come.
#[derive(Clone, Copy)]
pub struct Tolerance {
    pub logprob: f64,
    pub margin: f32,
}

pub const EXACT: Tolerance = Tolerance { logprob: 2e-3, margin: 5e-3 };
pub const BF16: Tolerance = Tolerance { logprob: 0.15, margin: 0.3 };

pub fn cases_of(path: &Path) -> Vec<Case> {
    let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    golden.completions.into_iter().chain(golden.chat).collect()
}

impl Case {
    /// Prompt and continuation; the last token of the continuation is only predicted.
    pub fn ids(&self) -> Vec<u32> {
        let continuation = &self.greedy_ids[..self.greedy_ids.len() - 1];
        [&self.prompt_ids, continuation].concat()
    }

    pub fn check(&self, logits: &[Vec<f32>], tolerance: Tolerance, what: &str) {
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

pub fn check_cases(
    runner: &mut ModelRunner,
    name: &str,
    cases: impl IntoIterator<Item = Case>,
    chunk: usize,
    tolerance: Tolerance,
) {
    let mut harness = Harness::new(runner, 16);
    for case in cases {
        let sequence = harness.add(case.ids(), case.prompt_ids.len());
        case.check(&harness.finish(sequence, chunk), tolerance, &format!("{name} in chunks of {chunk}"));
    }
}
