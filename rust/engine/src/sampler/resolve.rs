//! Sampling parameters with nothing left open: the request's, else the model's, else the defaults.

use std::{collections::HashSet, fmt::Display, sync::Arc};

use device::TokenSet;

use crate::{DryParams, EngineError, GenerationConfig, SamplingParams, Tokenizer};

/// Temperatures below this are greedy.
const GREEDY_BELOW: f32 = 1e-7;

/// Longer repetitions than any model's context has.
const MAX_DRY_LENGTH: usize = 1 << 27;

/// Valid sampling parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedSampling {
    /// Divides the logits, above 0; `None` is greedy: the likeliest token, of equal ones the lowest id.
    pub temperature: Option<f32>,
    /// The k likeliest tokens, 2 or more.
    pub top_k: Option<usize>,
    /// In (0, 1]; 1 is off.
    pub top_p: f32,
    /// In [0, 1]; 0 is off.
    pub min_p: f32,
    /// In [-2, 2]; 0 is off.
    pub presence_penalty: f32,
    /// In [-2, 2]; 0 is off.
    pub frequency_penalty: f32,
    /// Above 0; 1 is off.
    pub repetition_penalty: f32,
    /// Strength above 0.
    pub dry: Option<DryParams>,
    /// Token ids with what is added to their logits, in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// The only tokens that may come; whoever samples gives their mask.
    pub allowed: Option<Arc<TokenSet>>,
    /// Whether the sampled token's log probability is wanted, and how many of the likeliest tokens' beside it.
    pub logprobs: Option<usize>,
}

/// What [`SamplingParams::logprobs`] is to a user.
const TOP_LOGPROBS: &str = "the number of likeliest tokens (top_logprobs of a chat, else logprobs)";
/// So many likeliest tokens may be had for each of any number of tokens.
const FREE_TOP_LOGPROBS: usize = 20;
/// With more of them, a request may have so many log probabilities; each takes some 100 bytes.
const MAX_LOGPROBS: usize = 1 << 20;

/// Refuses more log probabilities than memory should hold: those of `num_tokens` tokens, and of the `top` likeliest beside each.
pub fn check_num_logprobs(top: Option<usize>, num_tokens: usize) -> Result<(), EngineError> {
    let top = top.unwrap_or(0);
    if top <= FREE_TOP_LOGPROBS || (top + 1).saturating_mul(num_tokens) <= MAX_LOGPROBS {
        return Ok(());
    }
    Err(invalid(
        TOP_LOGPROBS,
        format!("{top} for each of up to {num_tokens} tokens"),
        format!(
            "at most {FREE_TOP_LOGPROBS}, or together with the tokens themselves no more than {MAX_LOGPROBS} log probabilities: \
             ask for fewer, or for fewer tokens (max_tokens, choices, no echo of the prompt)"
        ),
    ))
}

impl ResolvedSampling {
    /// Fills what the request leaves unset from the model's `generation_config.json`, then from the defaults, and checks every
    /// value.
    ///
    /// `vocab_size` is the number of logits. An [`EngineError::InvalidArgument`] names the field, the value and what is allowed.
    pub fn new(params: &SamplingParams, model: &GenerationConfig, vocab_size: usize) -> Result<Self, EngineError> {
        let temperature = params.temperature.or(model.temperature).unwrap_or(1.0);
        check("temperature", temperature, temperature >= 0.0, "0 or more")?;
        let top_p = params.top_p.or(model.top_p).unwrap_or(1.0);
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        let min_p = params.min_p.or(model.min_p).unwrap_or(0.0);
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        let presence_penalty = params.presence_penalty.unwrap_or(0.0);
        check("presence_penalty", presence_penalty, presence_penalty.abs() <= 2.0, "from -2 to 2")?;
        let frequency_penalty = params.frequency_penalty.unwrap_or(0.0);
        check("frequency_penalty", frequency_penalty, frequency_penalty.abs() <= 2.0, "from -2 to 2")?;
        let repetition_penalty = params.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0);
        check("repetition_penalty", repetition_penalty, repetition_penalty > 0.0, "above 0; 1 is off")?;
        for &(id, bias) in &params.logit_bias {
            if id as usize >= vocab_size {
                return Err(invalid("logit_bias", format!("for token {id}"), format!("for ids below {vocab_size}")));
            }
            check("logit_bias", bias, bias.abs() <= 100.0, "from -100 to 100")?;
        }
        if let Some(id) = params.stop_token_ids.iter().find(|id| **id as usize >= vocab_size) {
            return Err(invalid("stop_token_ids", format!("with token {id}"), format!("of ids below {vocab_size}")));
        }
        if let Some(dry) = &params.dry {
            check("dry_multiplier", dry.multiplier, dry.multiplier >= 0.0, "0 or more; 0 is off")?;
            check("dry_base", dry.base, dry.base >= 1.0, "1 or more")?;
            if dry.allowed_length > MAX_DRY_LENGTH {
                return Err(invalid("dry_allowed_length", dry.allowed_length, format!("at most {MAX_DRY_LENGTH}")));
            }
            if dry.sequence_breakers.iter().any(String::is_empty) {
                return Err(invalid("dry_sequence_breakers", "with an empty string", "a list of texts of a character or more"));
            }
        }
        if let Some(top) = params.logprobs.filter(|top| *top > vocab_size) {
            return Err(invalid(TOP_LOGPROBS, top, format!("at most {vocab_size}, the model's vocabulary")));
        }
        let allowed = params.allowed_token_ids.as_deref().map(|ids| allowed(ids, vocab_size)).transpose()?.map(Arc::new);
        // 0 is off, as in generation_config.json.
        let top_k = params.top_k.or(model.top_k).filter(|k| *k > 0 && *k < vocab_size);
        Ok(Self {
            temperature: (temperature >= GREEDY_BELOW && top_k != Some(1)).then_some(temperature),
            top_k,
            top_p,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            dry: params.dry.clone().filter(|dry| dry.multiplier > 0.0),
            logit_bias: params.logit_bias.clone(),
            allowed,
            logprobs: params.logprobs,
        })
    }
}

fn allowed(ids: &[u32], vocab_size: usize) -> Result<TokenSet, EngineError> {
    if ids.is_empty() {
        return Err(invalid("allowed_token_ids", "empty", "a list of one id or more; leave it out to allow all"));
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocab_size) {
        return Err(invalid("allowed_token_ids", format!("with token {id}"), format!("of ids below {vocab_size}")));
    }
    Ok(TokenSet::new(ids.iter().copied(), vocab_size))
}

fn check(field: &str, value: f32, in_range: bool, allowed: &str) -> Result<(), EngineError> {
    if value.is_finite() && in_range { Ok(()) } else { Err(invalid(field, format!("{value:?}"), allowed)) }
}

fn invalid(field: &str, value: impl Display, allowed: impl Display) -> EngineError {
    EngineError::InvalidArgument(format!("{field} is {value}; it must be {allowed}"))
}

/// The tokens that end a repetition for the DRY penalty: those whose text contains a breaker, and the one that a breaker ends
/// with when it stands behind a letter.
pub fn dry_breaker_ids(tokenizer: &Tokenizer, breakers: &[String]) -> Result<HashSet<u32>, EngineError> {
    let mut ids = HashSet::new();
    for breaker in breakers {
        let spelled = tokenizer.encode(&format!("a{breaker}"), false)?;
        ids.extend(spelled.last());
    }
    for id in 0..tokenizer.vocab_size() as u32 {
        let text = tokenizer.token_bytes(id);
        if breakers.iter().any(|b| text.windows(b.len().max(1)).any(|w| w == b.as_bytes())) {
            ids.insert(id);
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(params: &SamplingParams) -> Result<ResolvedSampling, EngineError> {
        ResolvedSampling::new(params, &GenerationConfig::default(), 100)
    }

    #[test]
    fn a_request_goes_before_the_model_and_the_model_before_the_defaults() {
        let model = GenerationConfig { temperature: Some(0.6), top_k: Some(20), top_p: Some(0.9), ..GenerationConfig::default() };
        let params = SamplingParams { top_k: Some(5), ..SamplingParams::default() };
        let resolved = ResolvedSampling::new(&params, &model, 100).unwrap();
        assert_eq!((resolved.temperature, resolved.top_k, resolved.top_p), (Some(0.6), Some(5), 0.9));
        let plain = resolve(&SamplingParams::default()).unwrap();
        assert_eq!((plain.temperature, plain.top_k, plain.top_p, plain.repetition_penalty), (Some(1.0), None, 1.0, 1.0));
    }

    #[test]
    fn zero_temperature_and_one_candidate_are_greedy() {
        for params in [
            SamplingParams { temperature: Some(0.0), ..SamplingParams::default() },
            SamplingParams { temperature: Some(1e-8), ..SamplingParams::default() },
            SamplingParams { top_k: Some(1), ..SamplingParams::default() },
        ] {
            assert_eq!(resolve(&params).unwrap().temperature, None);
        }
    }

    #[test]
    fn values_out_of_range_are_named_with_the_range() {
        let dry = |multiplier, base| DryParams { multiplier, base, allowed_length: 2, sequence_breakers: vec!["\n".into()] };
        let d = SamplingParams::default;
        for (params, parts) in [
            (SamplingParams { temperature: Some(f32::NAN), ..d() }, ["temperature is NaN", "0 or more"]),
            (SamplingParams { temperature: Some(-0.5), ..d() }, ["temperature is -0.5", "0 or more"]),
            (SamplingParams { temperature: Some(f32::INFINITY), ..d() }, ["temperature is inf", "0 or more"]),
            (SamplingParams { top_p: Some(0.0), ..d() }, ["top_p is 0", "at most 1"]),
            (SamplingParams { top_p: Some(1.1), ..d() }, ["top_p is 1.1", "at most 1"]),
            (SamplingParams { min_p: Some(-0.1), ..d() }, ["min_p is -0.1", "from 0 to 1"]),
            (SamplingParams { presence_penalty: Some(2.5), ..d() }, ["presence_penalty is 2.5", "-2 to 2"]),
            (SamplingParams { frequency_penalty: Some(f32::NAN), ..d() }, ["frequency_penalty is NaN", "-2 to 2"]),
            (SamplingParams { repetition_penalty: Some(0.0), ..d() }, ["repetition_penalty is 0", "above 0"]),
            (SamplingParams { logit_bias: vec![(100, 1.0)], ..d() }, ["token 100", "below 100"]),
            (SamplingParams { logit_bias: vec![(3, 101.0)], ..d() }, ["logit_bias is 101", "-100 to 100"]),
            (SamplingParams { allowed_token_ids: Some(vec![]), ..d() }, ["allowed_token_ids is empty", "one id or more"]),
            (SamplingParams { allowed_token_ids: Some(vec![3, 100]), ..d() }, ["token 100", "below 100"]),
            (SamplingParams { logprobs: Some(101), ..d() }, ["top_logprobs of a chat, else logprobs) is 101", "at most 100"]),
            (SamplingParams { dry: Some(dry(-1.0, 1.75)), ..d() }, ["dry_multiplier is -1", "0 or more"]),
            (SamplingParams { dry: Some(dry(1.0, 0.5)), ..d() }, ["dry_base is 0.5", "1 or more"]),
        ] {
            let error = resolve(&params).unwrap_err();
            assert!(matches!(error, EngineError::InvalidArgument(_)));
            for part in parts {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }

    #[test]
    fn few_likeliest_tokens_are_free_and_many_have_a_cap_with_the_tokens() {
        for (top, num_tokens) in [(None, 1 << 27), (Some(20), 1 << 27), (Some(49_152), 21), (Some(63), 16_384)] {
            check_num_logprobs(top, num_tokens).unwrap();
        }
        for (top, num_tokens) in [(Some(21), 1 << 20), (Some(49_152), 60), (Some(64), 16_384), (Some(usize::MAX - 1), usize::MAX)]
        {
            let error = check_num_logprobs(top, num_tokens).unwrap_err().to_string();
            assert!(error.contains("1048576 log probabilities") && error.contains("max_tokens"), "{error}");
        }
    }
}
