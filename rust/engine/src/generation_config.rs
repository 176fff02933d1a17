//! `generation_config.json`: a model's own sampling defaults.

use std::path::Path;

use serde_json::Value;

use crate::{EngineError, json::read_json, keys};

/// What a model's `generation_config.json` says; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Divides the logits, 0 or more. An explicit `do_sample: false` means greedy and makes it 0.
    pub temperature: Option<f32>,
    /// The k likeliest tokens; 0 means off.
    pub top_k: Option<usize>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// Above 0; 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Ids that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Tokens of an answer at most, where the request does not say.
    pub max_new_tokens: Option<usize>,
    /// Tokens of prompt and answer at most, where neither the request nor `max_new_tokens` says.
    pub max_length: Option<usize>,
    /// Keys that nobody knows.
    pub unknown_keys: Vec<String>,
}

/// What is read here; [`keys::GENERATION`] has the others.
const USED_KEYS: [&str; 9] =
    ["do_sample", "eos_token_id", "max_length", "max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p"];

impl GenerationConfig {
    /// How many tokens an answer to a prompt of so many may have where the request does not say.
    pub fn max_tokens(&self, num_prompt_tokens: usize) -> Option<usize> {
        self.max_new_tokens.or(self.max_length.map(|length| length.saturating_sub(num_prompt_tokens).max(1)))
    }

    /// Reads `generation_config.json` of a model folder; everything is unset where there is none.
    pub fn from_dir(dir: &Path) -> Result<Self, EngineError> {
        let path = dir.join("generation_config.json");
        match read_json(&path).map_err(EngineError::Load)? {
            Some(config) => Self::from_json(&config, &path.display().to_string()),
            None => Ok(Self::default()),
        }
    }

    /// From the file's contents; `file` names it in errors.
    ///
    /// An [`EngineError::Load`] names what is out of range, and what asks for a way to sample that there is not.
    pub fn from_json(config: &Value, file: &str) -> Result<Self, EngineError> {
        let Value::Object(object) = config else { return Err(EngineError::Load(format!("{file}: not a JSON object"))) };
        let used = USED_KEYS.map(str::to_owned).into();
        let unknown_keys = keys::check(keys::GENERATION, object, &used, "")
            .map_err(|(key, why)| EngineError::Load(format!("{file}: {key} {why}; remove it from the file to do without")))?;
        let number = |key: &str, range: std::ops::RangeInclusive<f64>| match &config[key] {
            Value::Null => Ok(None),
            value => match value.as_f64().filter(|v| range.contains(v)) {
                Some(v) => Ok(Some(v as f32)),
                None => Err(EngineError::Load(format!(
                    "{file}: {key} is {value}; it is a number from {} to {}",
                    shown(*range.start()),
                    shown(*range.end())
                ))),
            },
        };
        let huge = f64::from(f32::MAX);
        let temperature = if config["do_sample"] == false { Some(0.0) } else { number("temperature", 0.0..=huge)? };
        let top_k = match &config["top_k"] {
            Value::Null => None,
            value => match value.as_u64() {
                Some(k) => Some(usize::try_from(k).unwrap_or(usize::MAX)),
                None => return Err(EngineError::Load(format!("{file}: top_k is {value}; it is a whole number, 0 or more"))),
            },
        };
        let count = |key: &str| match &config[key] {
            Value::Null => Ok(None),
            value => match value.as_u64().filter(|n| *n > 0) {
                Some(n) => Ok(Some(usize::try_from(n).unwrap_or(usize::MAX))),
                None => Err(EngineError::Load(format!("{file}: {key} is {value}; it is a whole number, 1 or more"))),
            },
        };
        match &config["do_sample"] {
            Value::Null | Value::Bool(_) => {}
            value => return Err(EngineError::Load(format!("{file}: do_sample is {value}; it is true or false"))),
        }
        let eos_token_ids = token_ids(&config["eos_token_id"]).ok_or_else(|| {
            EngineError::Load(format!("{file}: eos_token_id is {}; it is a token id or a list of them", config["eos_token_id"]))
        })?;
        Ok(Self {
            temperature,
            top_k,
            top_p: number("top_p", f64::MIN_POSITIVE..=1.0)?,
            min_p: number("min_p", 0.0..=1.0)?,
            repetition_penalty: number("repetition_penalty", f64::from(f32::MIN_POSITIVE)..=huge)?,
            eos_token_ids,
            max_new_tokens: count("max_new_tokens")?,
            max_length: count("max_length")?,
            unknown_keys,
        })
    }
}

/// A number in few digits.
fn shown(number: f64) -> String {
    if number == 0.0 || (1e-3..1e6).contains(&number) { number.to_string() } else { format!("{number:.1e}") }
}

/// One id, a list of ids, or nothing; `None` for anything else.
pub(crate) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Null => Some(Vec::new()),
        Value::Array(list) => list.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(config: &Value) -> Result<GenerationConfig, EngineError> {
        GenerationConfig::from_json(config, "generation_config.json")
    }

    #[test]
    fn fields_are_read_and_absent_ones_stay_unset() {
        let config =
            parse(&json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 106], "do_sample": true})).unwrap();
        assert_eq!((config.temperature, config.top_k, config.top_p), (Some(0.6), Some(20), Some(0.95)));
        assert_eq!((config.min_p, config.repetition_penalty), (None, None));
        assert_eq!(config.eos_token_ids, [1, 106]);
        assert_eq!(parse(&json!({"eos_token_id": 2})).unwrap().eos_token_ids, [2]);
        assert_eq!(parse(&json!({"top_k": 0})).unwrap().top_k, Some(0));
        assert_eq!(parse(&json!({})).unwrap(), GenerationConfig::default());
    }

    #[test]
    fn do_sample_false_is_greedy() {
        assert_eq!(parse(&json!({"do_sample": false, "temperature": 0.7})).unwrap().temperature, Some(0.0));
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (config, part) in [
            (json!({"temperature": -1}), "temperature is -1"),
            (json!({"top_p": 1.5}), "top_p is 1.5"),
            (json!({"top_p": 0}), "top_p is 0"),
            (json!({"top_k": -5}), "top_k is -5"),
            (json!({"repetition_penalty": "high"}), "repetition_penalty is \"high\""),
            (json!({"eos_token_id": [1, "x"]}), "eos_token_id is [1,\"x\"]"),
            (json!({"eos_token_id": 5_000_000_000_u64}), "eos_token_id is 5000000000"),
        ] {
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("generation_config.json"), "{error}");
            assert!(error.len() < 120, "{error}");
        }
    }
}
