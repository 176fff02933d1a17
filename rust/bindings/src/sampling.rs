//! The sampling fields that all requests have.

use std::collections::BTreeMap;

use engine::{DryParams, Grammar, SamplingParams};
use openai::{sampling::dry, structured::typed};
use pyo3::prelude::*;

use crate::{
    arguments::{Integer, Real, Text, at_least_if_given, check_seed, token_id},
    exceptions::invalid,
    which::OneOrMany,
};

/// The sampling fields that both kinds of request have.
pub struct SamplingFields {
    pub temperature: Option<Real>,
    pub top_p: Option<Real>,
    pub top_k: Option<Integer>,
    pub min_p: Option<Real>,
    pub presence_penalty: Option<Real>,
    pub frequency_penalty: Option<Real>,
    pub repetition_penalty: Option<Real>,
    pub dry: DryFields,
    pub logit_bias: Option<BTreeMap<Integer, Real>>,
    pub logprobs: Option<usize>,
    pub stop_seqs: Option<OneOrMany>,
    pub max_tokens: Option<Integer>,
    pub grammar: Option<serde_json::Value>,
    pub grammar_type: Option<String>,
    pub ignore_eos: bool,
    pub seed: Option<Integer>,
}

pub struct DryFields {
    pub multiplier: Option<Real>,
    pub base: Option<Real>,
    pub allowed_length: Option<Integer>,
    pub sequence_breakers: Option<Vec<Text>>,
}

impl SamplingFields {
    /// Checks every field.
    pub fn check(self) -> PyResult<SamplingParams> {
        let stop = match self.stop_seqs {
            None => Vec::new(),
            Some(stop) => stop.into_vec(),
        };
        if stop.iter().any(String::is_empty) {
            return Err(invalid("`stop_seqs` has an empty string, which would end every text at once; remove it"));
        }
        Ok(SamplingParams {
            temperature: self.temperature.map(Real::single),
            top_p: self.top_p.map(Real::single),
            top_k: at_least_if_given("top_k", self.top_k.as_ref(), 0)?,
            min_p: self.min_p.map(Real::single),
            presence_penalty: self.presence_penalty.map(Real::single),
            frequency_penalty: self.frequency_penalty.map(Real::single),
            repetition_penalty: self.repetition_penalty.map(Real::single),
            dry: self.dry.check()?,
            logit_bias: self.logit_bias.unwrap_or_default().into_iter().map(check_bias).collect::<PyResult<_>>()?,
            logprobs: self.logprobs,
            stop,
            max_tokens: at_least_if_given("max_tokens", self.max_tokens.as_ref(), 0)?,
            grammar: grammar(self.grammar, self.grammar_type.as_deref())?,
            ignore_eos: self.ignore_eos,
            seed: check_seed(self.seed.as_ref())?,
            ..SamplingParams::default()
        })
    }
}

const GRAMMAR_TYPES: &str = "\"regex\", \"json_schema\", \"choice\", \"lark\", \"llguidance\" or \"structural_tag\"";

fn grammar(grammar: Option<serde_json::Value>, kind: Option<&str>) -> PyResult<Option<Grammar>> {
    match (grammar, kind) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(invalid(format!("`grammar` needs `grammar_type`: {GRAMMAR_TYPES}"))),
        (None, Some(_)) => Err(invalid("`grammar_type` needs a `grammar`")),
        (Some(grammar), Some(kind)) => typed(kind, grammar, "grammar").map(Some).map_err(|error| invalid(error.message)),
    }
}

impl DryFields {
    fn check(self) -> PyResult<Option<DryParams>> {
        let allowed_length = at_least_if_given("dry_allowed_length", self.allowed_length.as_ref(), 0)?;
        let breakers = self.sequence_breakers.map(|breakers| breakers.into_iter().map(|Text(breaker)| breaker).collect());
        dry(self.multiplier.map(Real::single), self.base.map(Real::single), allowed_length, breakers)
            .map_err(|error| invalid(error.message))
    }
}

fn check_bias((id, bias): (Integer, Real)) -> PyResult<(u32, f32)> {
    Ok((token_id("logit_bias", &id)?, bias.single()))
}
