//! `POST /v1/completions`.

use engine::{GenerationRequest, Prompt};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::{
    ApiError, Fields, Generation, MAX_CHOICES, MAX_TOP_LOGPROBS, Rule,
    fields::fields,
    sampling::{COMMON_RULES, SamplingFields, check_choices},
};

/// Tokens that are generated unless a request says how many.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A prompt, or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "it must be a string, a list of strings, a list of token ids, or a list of such lists")]
pub enum Prompts {
    /// A text.
    Text(#[schemars(length(min = 1))] String),
    /// Token ids.
    Ids(#[schemars(length(min = 1))] Vec<u32>),
    /// Texts.
    Texts(#[schemars(length(min = 1), inner(length(min = 1)))] Vec<String>),
    /// Lists of token ids.
    IdLists(#[schemars(length(min = 1), inner(length(min = 1)))] Vec<Vec<u32>>),
}

impl Prompts {
    fn into_vec(self) -> Vec<Prompt> {
        match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Ids(ids) if ids.is_empty() => Vec::new(),
            Self::Ids(ids) => vec![Prompt::TokenIds(ids)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::IdLists(lists) => lists.into_iter().map(Prompt::TokenIds).collect(),
        }
    }
}

fields! {
    /// What only completions have.
    pub struct CompletionFields {
        /// The model's id, `default`, or another of its names.
        model: String,
        /// What to continue.
        prompt: Prompts,
        /// Generated tokens at most; 16 unless given.
        #[schemars(range(min = 1))]
        max_tokens: usize,
        /// The same.
        #[schemars(range(min = 1))]
        max_completion_tokens: usize,
        /// Log probabilities of that many likeliest tokens at each position, 20 at most.
        #[schemars(range(max = MAX_TOP_LOGPROBS))]
        logprobs: usize,
        /// The prompt goes before each continuation; with `logprobs` it has log probabilities as well.
        echo: bool,
        /// So many continuations are made, and the `n` likeliest are returned.
        #[schemars(range(min = 1, max = MAX_CHOICES))]
        best_of: usize,
        /// What goes behind the gap that is filled, of a model whose vocabulary has tokens for it; the prompt goes before it.
        suffix: String,
        /// Leading tokens that are shared in spite of a `cache_salt`.
        public_prefix_len: usize,
    }
}

const RULES: &[(&str, Rule)] = &[
    ("store", Rule::True(|v| v == false, "completions are not stored: leave it out, or send false")),
    ("add_special_tokens", Rule::True(|v| v == true, "send token ids to have none added")),
    ("prompt_embeds", Rule::Refused("send a text or token ids")),
    ("messages", Rule::Refused("messages go to /v1/chat/completions")),
];

/// Texts to continue.
#[derive(Clone, Debug, Default)]
pub struct CompletionRequest {
    /// What only completions have.
    pub completion: CompletionFields,
    /// The rest.
    pub sampling: SamplingFields,
}

impl CompletionRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let request = Self { completion: CompletionFields::take(&mut fields)?, sampling: SamplingFields::take(&mut fields)? };
        fields.finish(&[RULES, COMMON_RULES].concat())?;
        Ok(request)
    }

    /// Checks it, in the engine's terms: one request a prompt, whose choices have the indices `prompt * n + choice`.
    pub fn into_generation(self) -> Result<Generation, ApiError> {
        let Self { completion, sampling } = self;
        let prompts = completion.prompt.ok_or_else(|| ApiError::missing("prompt", "give a text or token ids"))?.into_vec();
        if prompts.is_empty() {
            return Err(ApiError::value("prompt", "is empty; give a text or token ids"));
        }
        let n_choices = sampling.n.unwrap_or(1);
        check_choices("n", prompts.len(), n_choices)?;
        let delivery = sampling.delivery()?;
        let best_of = check_best_of(completion.best_of, n_choices, prompts.len(), delivery.stream)?;
        if let Some(logprobs) = completion.logprobs.filter(|logprobs| *logprobs > MAX_TOP_LOGPROBS) {
            return Err(ApiError::value("logprobs", format!("is {logprobs}; it must be at most {MAX_TOP_LOGPROBS}")));
        }
        let max_tokens = completion.max_tokens.or(completion.max_completion_tokens).unwrap_or(DEFAULT_MAX_TOKENS);
        let params = sampling.sampling(Some(max_tokens), completion.logprobs)?;
        let mut service = sampling.service()?;
        service.public_prefix = completion.public_prefix_len.unwrap_or(0);
        let request = |prompt| {
            let prompt = with_suffix(prompt, completion.suffix.as_ref().filter(|suffix| !suffix.is_empty()))?;
            let request = GenerationRequest {
                service: service.clone(),
                n_choices,
                best_of,
                echo_prompt: completion.echo.unwrap_or(false),
                ..GenerationRequest::new(prompt, params.clone())
            };
            sampling.with_wishes(request)
        };
        let requests = prompts.into_iter().map(request).collect::<Result<_, _>>()?;
        let grammar_param = sampling.grammar_param();
        Ok(Generation { model: completion.model, requests, delivery, user: sampling.user, grammar_param })
    }
}

/// The gap between a prompt and what goes behind it.
fn with_suffix(prompt: Prompt, suffix: Option<&String>) -> Result<Prompt, ApiError> {
    match (prompt, suffix) {
        (prompt, None) => Ok(prompt),
        (Prompt::Text(before), Some(after)) => Ok(Prompt::Gap { before, after: after.clone() }),
        (_, Some(_)) => Err(ApiError::value("suffix", "needs a prompt that is a text, not token ids")),
    }
}

fn check_best_of(best_of: Option<usize>, n: usize, num_prompts: usize, stream: bool) -> Result<Option<usize>, ApiError> {
    let Some(best_of) = best_of else { return Ok(None) };
    if best_of < n {
        return Err(ApiError::value("best_of", format!("is {best_of}, but must be at least `n`, which is {n}")));
    }
    if best_of.saturating_mul(num_prompts) > MAX_CHOICES {
        return Err(ApiError::value("best_of", format!("is {best_of}; prompts times best_of may be {MAX_CHOICES} at most")));
    }
    if stream && best_of > n {
        return Err(ApiError::value("best_of", "is above `n`, which a stream cannot have: the best are known at the end"));
    }
    Ok(Some(best_of))
}
