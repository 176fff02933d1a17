//! How long a step lasts.

use paged::{KvGroups, ScheduledRequest};

use crate::error::SimulationError;

/// A device and a model on it, as the time that a step takes:
/// `step + weights + token * tokens in the step + kv_token * KV tokens read`.
///
/// The terms are added: nothing is said to overlap. A row reads the KV of all tokens up to its last one, once; in
/// windowed layers only those that its tokens see.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// Seconds a step, whatever is in it: launches, sampling, the scheduler itself. Above 0.
    pub step_seconds: f64,
    /// Seconds to read all weights once, which each step does.
    pub weights_seconds: f64,
    /// Seconds to compute one token, attention apart.
    pub token_seconds: f64,
    /// Seconds to read the KV of one token in all layers.
    pub kv_token_seconds: f64,
}

/// A cost model with a name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// The model.
    pub cost: CostModel,
    /// Where the figures come from.
    pub source: &'static str,
}

/// The cost models that can be named.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "smollm2-135m-cpu",
        cost: CostModel { step_seconds: 1e-4, weights_seconds: 2.4e-3, token_seconds: 4.4e-4, kv_token_seconds: 2.26e-6 },
        source: "measured, docs/benchmarks.md: SmolLM2-135M Q4_1 on two cores. Prefill of 256 tokens at 2,260 tokens/s; decode at \
                 356 tokens/s behind 128 tokens and at 85 behind 4,096",
    },
    Preset {
        name: "opt-13b-a100",
        cost: CostModel { step_seconds: 1e-3, weights_seconds: 1.67e-2, token_seconds: 8.3e-5, kv_token_seconds: 5.27e-7 },
        source: "roofs, not measured: 26 GB of weights and 819,200 bytes of KV a token at 1.555 TB/s, 26 GFLOP a token at 312 \
                 TFLOP/s (A100-40G); its KV memory of 12 GB is 15,700 slots, table 1 of arXiv 2309.06180",
    },
    Preset {
        name: "llama-8b-h200",
        cost: CostModel { step_seconds: 2e-4, weights_seconds: 3.49e-3, token_seconds: 1.62e-5, kv_token_seconds: 3.05e-8 },
        source: "roofs, not measured: 15.0 GB of weights and 131,072 bytes of KV a token at the 4.3 TB/s that a copy reaches, 16 \
                 GFLOP a token at 989 TFLOP/s, 200 kernels a step of 1 us each in a graph",
    },
];

impl CostModel {
    /// The model of that name.
    pub fn preset(name: &str) -> Result<Self, SimulationError> {
        PRESETS.iter().find(|preset| preset.name == name).map(|preset| preset.cost).ok_or_else(|| {
            let names: Vec<_> = PRESETS.iter().map(|preset| preset.name).collect();
            SimulationError::setting("device", &format!("{name:?}"), format!("known devices are {}", names.join(", ")))
        })
    }

    pub(crate) fn validate(&self) -> Result<(), SimulationError> {
        let times = [
            ("step_seconds", self.step_seconds),
            ("weights_seconds", self.weights_seconds),
            ("token_seconds", self.token_seconds),
            ("kv_token_seconds", self.kv_token_seconds),
        ];
        for (field, seconds) in times {
            if !(0.0..=MAX_SECONDS).contains(&seconds) {
                return Err(SimulationError::setting(field, &seconds, format!("it is a time from 0 to {MAX_SECONDS} seconds")));
            }
        }
        if self.step_seconds < MIN_STEP_SECONDS {
            let requirement = format!("a step takes at least {MIN_STEP_SECONDS} seconds");
            return Err(SimulationError::setting("step_seconds", &self.step_seconds, requirement));
        }
        Ok(())
    }

    /// Seconds that a step of these rows takes.
    pub fn seconds(&self, rows: &[ScheduledRequest], groups: &KvGroups) -> f64 {
        let mut num_tokens = 0;
        let mut num_kv_tokens = 0.0;
        for row in rows {
            num_tokens += row.num_scheduled_tokens;
            num_kv_tokens += kv_tokens_read(row, groups);
        }
        self.step_seconds + self.weights_seconds + self.token_seconds * num_tokens as f64 + self.kv_token_seconds * num_kv_tokens
    }
}

/// No time of a cost model is longer.
const MAX_SECONDS: f64 = 3600.0;
/// Below it, time would stand still at the end of a long trace.
const MIN_STEP_SECONDS: f64 = 1e-6;

/// KV tokens that a row reads, as a mean over the layers.
fn kv_tokens_read(row: &ScheduledRequest, groups: &KvGroups) -> f64 {
    let end = row.num_computed_tokens + row.num_scheduled_tokens;
    let mut num_layers = 0;
    let mut sum = 0;
    for group in &groups.groups {
        let seen = group.retention.window().map_or(end, |window| end.min(window - 1 + row.num_scheduled_tokens));
        num_layers += group.layers.len();
        sum += seen * group.layers.len();
    }
    sum as f64 / num_layers as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(num_computed_tokens: usize, num_scheduled_tokens: usize) -> ScheduledRequest {
        ScheduledRequest {
            request_id: paged::RequestId(0),
            num_computed_tokens,
            num_scheduled_tokens,
            num_drafts: 0,
            num_again: 0,
            num_outputs: 1,
            num_cached_tokens: 0,
            miss: None,
            snapshot: None,
        }
    }

    #[test]
    fn a_step_costs_the_sum_of_its_parts() {
        let cost = CostModel { step_seconds: 1.0, weights_seconds: 10.0, token_seconds: 100.0, kv_token_seconds: 1000.0 };
        let full = KvGroups::from_layers(&[None]);
        assert_eq!(cost.seconds(&[row(4, 1), row(0, 3)], &full), 1.0 + 10.0 + 100.0 * 4.0 + 1000.0 * (5.0 + 3.0));
    }

    #[test]
    fn a_windowed_layer_reads_its_window_only() {
        // One layer of two sees the last 4 tokens: those of 2 queries are 5 tokens.
        let groups = KvGroups::from_layers(&[Some(4), None]);
        assert_eq!(kv_tokens_read(&row(98, 2), &groups), f64::midpoint(5.0, 100.0));
    }

    #[test]
    fn presets_are_valid_and_found_by_name() {
        for preset in PRESETS {
            preset.cost.validate().unwrap();
            assert_eq!(CostModel::preset(preset.name).unwrap(), preset.cost);
        }
        let error = CostModel::preset("abacus").unwrap_err().to_string();
        assert!(error.contains("abacus") && error.contains("opt-13b-a100"), "{error}");
    }

    #[test]
    fn times_that_are_none_are_refused_by_name() {
        let good = PRESETS[0].cost;
        for seconds in [-1.0, f64::NAN, f64::INFINITY] {
            let error = CostModel { token_seconds: seconds, ..good }.validate().unwrap_err().to_string();
            assert!(error.contains("token_seconds"), "{error}");
        }
        assert!(CostModel { step_seconds: 0.0, ..good }.validate().is_err());
    }
}
