//! What chats and completions have in common.

use std::{collections::HashMap, time::Duration};

use engine::{AdapterChoice, DryParams, GenerationRequest, KeptPrompt, SamplingParams, ServiceParams};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    ApiError, Delivery, MAX_BAD_WORDS, MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOPS, MAX_TOP_LOGPROBS, Rule,
    fields::fields,
    structured::{ResponseFormat, StructuredOutputs, TypedGrammar},
};

/// Seconds that a request may be given.
pub(crate) const MIN_DEADLINE: f64 = 0.001;
pub(crate) const MAX_DEADLINE: f64 = 1e9;

/// What a request says of its deadline, in seconds.
pub(crate) fn deadline(seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(deadline) if (MIN_DEADLINE..=MAX_DEADLINE).contains(&seconds) => Ok(Some(deadline)),
        _ => {
            let message = format!("is {seconds:e}; it must be from {MIN_DEADLINE} to {MAX_DEADLINE} seconds");
            Err(ApiError::value("deadline", message))
        }
    }
}

/// One value or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "it must be a string or a list of strings")]
pub enum OneOrMany {
    /// One.
    One(#[schemars(length(min = 1, max = MAX_STOPS.1))] String),
    /// Several.
    Many(#[schemars(length(max = MAX_STOPS.0), inner(length(min = 1, max = MAX_STOPS.1)))] Vec<String>),
}

impl OneOrMany {
    /// As a list.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// How a stream is sent.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    /// The usage comes in a chunk of its own before the end.
    pub include_usage: Option<bool>,
    /// Every chunk has the usage so far; means nothing without `include_usage`, as at vLLM.
    pub continuous_usage_stats: Option<bool>,
    /// True anyway when false or left out.
    #[schemars(extend("enum" = [false, null]))]
    pub include_obfuscation: Option<bool>,
}

fields! {
    /// How tokens are chosen, and how the answer is sent.
    pub struct SamplingFields {
        /// Divides the logits; 0 is greedy. From 0 to 2 in OpenAI's interface, any number of 0 or more here.
        #[schemars(range(min = 0.0))]
        temperature: f32,
        /// The likeliest tokens of that probability together, in (0, 1].
        #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
        top_p: f32,
        /// The k likeliest tokens; 0 and -1 are off, 1 is greedy.
        #[schemars(range(min = -1))]
        top_k: i64,
        /// Tokens at least this fraction as likely as the likeliest, in [0, 1].
        #[schemars(range(min = 0.0, max = 1.0))]
        min_p: f32,
        /// Subtracted from the logit of every token of the context, in [-2, 2].
        #[schemars(range(min = -2.0, max = 2.0))]
        presence_penalty: f32,
        /// Subtracted once for each occurrence of a token in the context, in [-2, 2].
        #[schemars(range(min = -2.0, max = 2.0))]
        frequency_penalty: f32,
        /// Divides positive and multiplies negative logits of tokens of the context; above 0.
        #[schemars(extend("exclusiveMinimum" = 0))]
        repetition_penalty: f32,
        /// Turns the DRY penalty on.
        #[schemars(range(min = 0.0))]
        dry_multiplier: f32,
        /// Growth of the DRY penalty; 1.75 unless given.
        #[schemars(range(min = 1.0))]
        dry_base: f32,
        /// Repetitions up to this many tokens are free; 2 unless given.
        dry_allowed_length: usize,
        /// Strings that end a repetition.
        #[schemars(inner(length(min = 1)))]
        dry_sequence_breakers: Vec<String>,
        /// Added to the logits, by token id, in [-100, 100].
        #[schemars(schema_with = "biases")]
        logit_bias: HashMap<String, f32>,
        /// The only tokens that may come.
        #[schemars(length(min = 1))]
        allowed_token_ids: Vec<u32>,
        /// Strings that end the text.
        stop: OneOrMany,
        /// Token ids that end the text.
        stop_token_ids: Vec<u32>,
        /// What form the answer has: any text, a JSON object, or JSON by a schema, whose keywords are enforced or refused.
        response_format: ResponseFormat,
        /// vLLM's key: a JSON Schema, a regular expression, a choice of texts or a grammar.
        structured_outputs: StructuredOutputs,
        /// A JSON Schema: vLLM's older key.
        guided_json: Value,
        /// A regular expression: vLLM's older key.
        guided_regex: String,
        /// Texts, one of which comes: vLLM's older key.
        guided_choice: Vec<String>,
        /// A grammar in Lark: vLLM's older key.
        guided_grammar: String,
        /// mistral.rs' key: `{"type": "regex", "value": "[0-9]+"}` and others.
        grammar: TypedGrammar,
        /// The stop string is part of the text.
        include_stop_str_in_output: bool,
        /// Goes on past end-of-sequence tokens.
        ignore_eos: bool,
        /// Before so many tokens nothing ends the text.
        min_tokens: usize,
        /// Texts that do not come: the last of a text's tokens does not, behind the others. Other tokens may spell it.
        #[schemars(length(max = MAX_BAD_WORDS.0), inner(length(min = 1, max = MAX_BAD_WORDS.1)))]
        bad_words: Vec<String>,
        /// False: special tokens are part of the text, but for the one that ends it.
        skip_special_tokens: bool,
        /// Texts of special tokens are joined without spaces; true is refused where it would tell.
        spaces_between_special_tokens: bool,
        /// Log probabilities of the prompt's tokens, and of that many likeliest ones in the place of each, 20 at most; not in
        /// streams.
        #[schemars(range(min = 0, max = MAX_TOP_LOGPROBS))]
        prompt_logprobs: i64,
        /// `prompt_token_ids` and `token_ids` come with the answer.
        return_token_ids: bool,
        /// Log probabilities name tokens as `token_id:` and the id.
        return_tokens_as_token_ids: bool,
        /// Only so many tokens of the prompt are kept; -1: as many as can be served.
        #[schemars(range(min = -1), extend("not" = { "const": 0 }))]
        truncate_prompt_tokens: i64,
        /// Where `truncate_prompt_tokens` drops tokens: "left", unless given, or "right".
        #[schemars(extend("enum" = ["left", "right", null]))]
        truncation_side: String,
        /// Seeds this request's random numbers.
        seed: i64,
        /// Number of answers.
        #[schemars(range(min = 1, max = MAX_CHOICES))]
        n: usize,
        /// Sends server-sent events.
        stream: bool,
        /// How they are sent.
        stream_options: StreamOptions,
        /// Lower goes first.
        priority: i32,
        /// Seconds after which the request ends with the text that it has and the reason "timeout".
        #[schemars(range(min = MIN_DEADLINE, max = MAX_DEADLINE))]
        deadline: f64,
        /// Cached blocks are shared only with requests of the same salt.
        #[schemars(length(min = 1))]
        cache_salt: String,
        /// Drops the start of a prompt that is too long instead of refusing it.
        truncate_sequence: bool,
        /// The adapter that it runs with, by its alias; that of `model` unless given.
        adapter: String,
        /// Who asks: requests of one tenant take turns by it.
        user: String,
    }
}

/// Biases by token id: JSON's keys are strings.
fn biases(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["object", "null"],
        "propertyNames": { "pattern": "^[0-9]{1,9}$" },
        "additionalProperties": { "type": "number", "minimum": -100, "maximum": 100 },
        "maxProperties": MAX_LOGIT_BIAS,
    })
}

/// Keys of both routes that decide nothing, or that are refused.
pub const COMMON_RULES: &[(&str, Rule)] = &[
    ("metadata", Rule::Label),
    ("safety_identifier", Rule::Label),
    ("service_tier", Rule::True(|v| v == "auto" || v == "default", "leave it out, or send \"auto\"")),
    ("length_penalty", Rule::True(|v| v == 1.0 || v == 1, "there is no beam search: leave it out")),
    ("early_stopping", Rule::True(|v| v == false, "there is no beam search: leave it out")),
    ("use_beam_search", Rule::True(|v| v == false, "sample several answers with n")),
    ("no_stop_trim", Rule::True(|v| v == false, "use include_stop_str_in_output")),
    ("return_hidden_states", Rule::True(|v| v == false, "leave it out")),
    ("adapters", Rule::Refused("name one with adapter, or as the model")),
    ("logits_processors", Rule::Refused("use logit_bias")),
];

/// Whether it is an empty list or object.
pub fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(serde_json::Map::is_empty)
}

impl SamplingFields {
    /// In the engine's terms; `max_tokens` and `logprobs` have names of their own on each route.
    pub fn sampling(&self, max_tokens: Option<usize>, logprobs: Option<usize>) -> Result<SamplingParams, ApiError> {
        Ok(SamplingParams {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k.map(top_k).transpose()?,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            dry: self.dry()?,
            logit_bias: self.logit_bias()?,
            allowed_token_ids: self.allowed_token_ids.clone(),
            logprobs,
            stop: self.stop()?,
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
            max_tokens: check_max_tokens(max_tokens)?,
            min_tokens: self.min_tokens(max_tokens)?,
            bad_words: self.bad_words()?,
            include_special_tokens: self.include_special_tokens()?,
            grammar: self.grammar()?,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            // Any 64 bits, also as a negative number.
            seed: self.seed.map(i64::cast_unsigned),
        })
    }

    fn dry(&self) -> Result<Option<DryParams>, ApiError> {
        dry(self.dry_multiplier, self.dry_base, self.dry_allowed_length, self.dry_sequence_breakers.clone())
    }

    fn logit_bias(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let Some(biases) = &self.logit_bias else { return Ok(Vec::new()) };
        if biases.len() > MAX_LOGIT_BIAS {
            return Err(ApiError::value("logit_bias", format!("has {} entries; {MAX_LOGIT_BIAS} at most", biases.len())));
        }
        let mut wrong: Vec<String> = Vec::new();
        let mut entries = Vec::with_capacity(biases.len());
        for (id, bias) in biases {
            match id.parse() {
                Ok(id) => entries.push((id, *bias)),
                Err(_) => wrong.push(format!("{:?}", id.chars().take(32).collect::<String>())),
            }
        }
        if wrong.is_empty() {
            return Ok(entries);
        }
        wrong.sort();
        wrong.truncate(8);
        Err(ApiError::value("logit_bias", format!("has keys that are no token ids: {}", wrong.join(", "))))
    }

    fn min_tokens(&self, max_tokens: Option<usize>) -> Result<usize, ApiError> {
        let min_tokens = self.min_tokens.unwrap_or(0);
        match max_tokens.filter(|max_tokens| *max_tokens < min_tokens) {
            Some(max_tokens) => Err(ApiError::value(
                "min_tokens",
                format!("is {min_tokens} and `max_tokens` {max_tokens}; it must be at most that"),
            )),
            None => Ok(min_tokens),
        }
    }

    fn bad_words(&self) -> Result<Vec<String>, ApiError> {
        let words = self.bad_words.clone().unwrap_or_default();
        let (max_words, max_bytes) = MAX_BAD_WORDS;
        if words.len() > max_words {
            return Err(ApiError::value("bad_words", format!("has {} entries; {max_words} at most", words.len())));
        }
        match words.iter().position(|word| word.trim_start().is_empty() || word.len() > max_bytes) {
            Some(i) => {
                let message = format!("is blank, or has more than {max_bytes} bytes; give a text of a character or more");
                Err(ApiError::value(format!("bad_words[{i}]"), message))
            }
            None => Ok(words),
        }
    }

    fn include_special_tokens(&self) -> Result<bool, ApiError> {
        let include = self.skip_special_tokens == Some(false);
        if include && self.spaces_between_special_tokens == Some(true) {
            let advice = "texts of special tokens are joined without spaces: leave it out, or send false";
            return Err(ApiError::unsupported("spaces_between_special_tokens", advice));
        }
        Ok(include)
    }

    /// The request, with what is asked for beside its sampling.
    pub fn with_wishes(&self, request: GenerationRequest) -> Result<GenerationRequest, ApiError> {
        let (stream, kept_prompt) = (self.stream.unwrap_or(false), self.kept_prompt()?);
        let prompt_logprobs = self.prompt_logprobs.map(|top| match usize::try_from(top) {
            Ok(_) if stream => {
                let advice = "they come with a whole answer: leave `stream` out, or send false";
                Err(ApiError::unsupported("prompt_logprobs", advice))
            }
            Ok(top) if top <= MAX_TOP_LOGPROBS => Ok(top),
            _ => Err(ApiError::value("prompt_logprobs", format!("is {top}; it must be from 0 to {MAX_TOP_LOGPROBS}"))),
        });
        Ok(GenerationRequest {
            adapter: self.adapter.clone().map(AdapterChoice::Alias),
            truncate_sequence: self.truncate_sequence.unwrap_or(false) || self.truncate_prompt_tokens == Some(-1),
            kept_prompt,
            prompt_logprobs: prompt_logprobs.transpose()?,
            return_token_ids: self.return_token_ids.unwrap_or(false),
            stream,
            ..request
        })
    }

    fn kept_prompt(&self) -> Result<Option<KeptPrompt>, ApiError> {
        let keep = match self.truncation_side.as_deref() {
            None | Some("left") => KeptPrompt::Last,
            Some("right") => KeptPrompt::First,
            Some(_) => return Err(ApiError::value("truncation_side", "must be \"left\" or \"right\"")),
        };
        let Some(num_tokens) = self.truncate_prompt_tokens else {
            return match self.truncation_side {
                None => Ok(None),
                Some(_) => Err(ApiError::value("truncation_side", "needs `truncate_prompt_tokens`")),
            };
        };
        match usize::try_from(num_tokens) {
            Ok(0) => Err(ApiError::value("truncate_prompt_tokens", "is 0; it must be at least 1, or -1 for what can be served")),
            Ok(num_tokens) => Ok(Some(keep(num_tokens))),
            Err(_) if num_tokens == -1 && self.truncation_side.as_deref() != Some("right") => Ok(None),
            Err(_) if num_tokens == -1 => {
                Err(ApiError::value("truncate_prompt_tokens", "is -1, which drops on the left; give a number of tokens"))
            }
            Err(_) => {
                let message = format!("is {num_tokens}; it must be at least 1, or -1 for what can be served");
                Err(ApiError::value("truncate_prompt_tokens", message))
            }
        }
    }

    fn stop(&self) -> Result<Vec<String>, ApiError> {
        let stops = self.stop.clone().map(OneOrMany::into_vec).unwrap_or_default();
        check_stops("stop", &stops).map(|()| stops)
    }

    /// How the request is served beside others.
    pub fn service(&self) -> Result<ServiceParams, ApiError> {
        let deadline = deadline(self.deadline)?;
        if self.cache_salt.as_ref().is_some_and(String::is_empty) {
            return Err(ApiError::value("cache_salt", "is empty: give some text, or leave it out to share with all"));
        }
        Ok(ServiceParams {
            priority: self.priority.unwrap_or(0),
            deadline,
            cache_salt: self.cache_salt.clone(),
            ..ServiceParams::default()
        })
    }

    /// How the answer is sent.
    pub fn delivery(&self) -> Result<Delivery, ApiError> {
        let stream = self.stream.unwrap_or(false);
        let options = self.stream_options.clone().unwrap_or_default();
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::value("stream_options", "goes with `stream`: true"));
        }
        if options.include_obfuscation == Some(true) {
            return Err(ApiError::unsupported("stream_options.include_obfuscation", "leave it out"));
        }
        let include_usage = options.include_usage.unwrap_or(false);
        Ok(Delivery {
            stream,
            include_usage,
            continuous_usage: include_usage && options.continuous_usage_stats.unwrap_or(false),
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            token_ids: self.return_token_ids.unwrap_or(false),
            tokens_as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
        })
    }
}

/// The DRY penalty, which `multiplier` turns on.
pub fn dry(
    multiplier: Option<f32>,
    base: Option<f32>,
    allowed_length: Option<usize>,
    sequence_breakers: Option<Vec<String>>,
) -> Result<Option<DryParams>, ApiError> {
    let Some(multiplier) = multiplier else {
        let given = [
            ("dry_base", base.is_some()),
            ("dry_allowed_length", allowed_length.is_some()),
            ("dry_sequence_breakers", sequence_breakers.is_some()),
        ];
        return match given.iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(ApiError::value(*name, "needs `dry_multiplier`, which turns the penalty on")),
            None => Ok(None),
        };
    };
    let breakers = || ["\n", ":", "\"", "*"].map(String::from).to_vec();
    Ok(Some(DryParams {
        multiplier,
        base: base.unwrap_or(1.75),
        allowed_length: allowed_length.unwrap_or(2),
        sequence_breakers: sequence_breakers.unwrap_or_else(breakers),
    }))
}

/// Stop strings within the limits.
pub fn check_stops(param: &str, stops: &[String]) -> Result<(), ApiError> {
    let (max_stops, max_bytes) = MAX_STOPS;
    if stops.len() > max_stops {
        return Err(ApiError::value(param, format!("has {} strings; {max_stops} at most", stops.len())));
    }
    match stops.iter().position(|stop| stop.is_empty() || stop.len() > max_bytes) {
        Some(i) => Err(ApiError::value(
            format!("{param}[{i}]"),
            format!("has {} bytes; a stop string has 1 to {max_bytes}", stops[i].len()),
        )),
        None => Ok(()),
    }
}

fn top_k(k: i64) -> Result<usize, ApiError> {
    match k {
        -1 => Ok(0),
        k => usize::try_from(k).map_err(|_| ApiError::value("top_k", format!("is {k}; it must be 0 or more, or -1 for all"))),
    }
}

fn check_max_tokens(max_tokens: Option<usize>) -> Result<Option<usize>, ApiError> {
    if max_tokens == Some(0) {
        return Err(ApiError::value("max_tokens", "is 0; it must be at least 1"));
    }
    Ok(max_tokens)
}

/// A number of answers, and of prompts times answers, within the limits.
pub fn check_choices(param: &str, num_prompts: usize, num_choices: usize) -> Result<(), ApiError> {
    if num_choices == 0 {
        return Err(ApiError::value(param, "is 0; it must be at least 1"));
    }
    match num_prompts.checked_mul(num_choices) {
        Some(all) if all <= MAX_CHOICES => Ok(()),
        _ => Err(ApiError::value(
            param,
            format!("is {num_choices} with {num_prompts} prompts; prompts times answers may be {MAX_CHOICES} at most"),
        )),
    }
}
