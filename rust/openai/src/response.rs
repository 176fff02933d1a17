//! Answers, from what the engine gives.

use std::{collections::BTreeMap, time::SystemTime, time::UNIX_EPOCH};

use engine::{CompletionChoice, TokenLogprobs, TopLogprob, Usage as EngineUsage};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// What OpenAI's clients get for a probability of 0, whose logarithm JSON cannot write.
const LOGPROB_OF_ZERO: f32 = -9999.0;

/// What all parts of one answer share.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// Such as `chatcmpl-` and 32 hexadecimal digits.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's id.
    pub model: String,
    /// Which build and weights answer.
    pub system_fingerprint: String,
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Usage {
    /// Of the prompts.
    pub prompt_tokens: usize,
    /// Generated, over all choices.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Of the prompts'; once it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
    /// Of the generated.
    pub completion_tokens_details: CompletionTokensDetails,
}

/// Of a prompt's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PromptTokensDetails {
    /// Those that the prefix cache had.
    pub cached_tokens: usize,
}

/// Of generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CompletionTokensDetails {
    /// Those of reasoning.
    pub reasoning_tokens: usize,
}

impl Usage {
    /// Of so many tokens.
    pub fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: Some(PromptTokensDetails { cached_tokens }),
            completion_tokens_details: CompletionTokensDetails::default(),
        }
    }

    /// Of an answer that goes on.
    pub fn so_far(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens_details: None, ..Self::new(prompt_tokens, completion_tokens, 0) }
    }

    /// Of another request as well.
    pub fn add(&mut self, usage: &EngineUsage) {
        *self = Self::new(
            self.prompt_tokens + usage.prompt_tokens,
            self.completion_tokens + usage.completion_tokens,
            self.prompt_tokens_details.map_or(0, |details| details.cached_tokens) + usage.cached_tokens,
        );
    }
}

/// A complete answer, or a part of one: `object` says which.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Answer<'a, C> {
    /// The answer's id.
    pub id: &'a str,
    /// `chat.completion`, `chat.completion.chunk` or `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's id.
    pub model: &'a str,
    /// Which build and weights answer.
    pub system_fingerprint: &'a str,
    /// The answers.
    pub choices: Vec<C>,
    /// What it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

impl Envelope {
    /// An answer of its choices.
    pub fn answer<C>(&self, object: &'static str, choices: Vec<C>, usage: Option<Option<Usage>>) -> Answer<'_, C> {
        Answer {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.system_fingerprint,
            choices,
            usage,
        }
    }
}

/// One answer of a chat.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatChoice {
    /// Which.
    pub index: usize,
    /// What the model said.
    pub message: ChatMessage,
    /// When asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended: stop, length, timeout or canceled.
    pub finish_reason: &'static str,
    /// The stop string that ended it.
    pub stop_reason: Option<String>,
}

/// What the model said.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatMessage {
    /// "assistant".
    pub role: &'static str,
    /// The text.
    pub content: String,
    /// Always null: a local model's refusal is text.
    pub refusal: Option<String>,
}

/// A part of one answer of a chat.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChunkChoice {
    /// Which.
    pub index: usize,
    /// What is new.
    pub delta: Delta,
    /// When asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// With the last part.
    pub finish_reason: Option<&'static str>,
    /// The stop string that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<String>,
}

/// What is new.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct Delta {
    /// With the first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// Log probabilities of a chat's tokens.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatLogprobs {
    /// Of each token.
    pub content: Vec<ChatLogprob>,
    /// Always null.
    pub refusal: Option<Vec<ChatLogprob>>,
}

/// Log probability of a token.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatLogprob {
    /// The token's text.
    pub token: String,
    /// Natural logarithm of its probability; -9999.0 for a probability of 0.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Option<Vec<u8>>,
    /// The likeliest tokens at its position.
    pub top_logprobs: Vec<ChatTopLogprob>,
}

/// One of the likeliest tokens.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatTopLogprob {
    /// The token's text.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Option<Vec<u8>>,
}

fn written(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LOGPROB_OF_ZERO }
}

impl ChatLogprobs {
    /// Of these tokens.
    pub fn new(tokens: Vec<TokenLogprobs>) -> Self {
        let top = |top: TopLogprob| ChatTopLogprob {
            token: top.text().into_owned(),
            logprob: written(top.logprob),
            bytes: Some(top.bytes),
        };
        let one = |token: TokenLogprobs| ChatLogprob {
            token: token.text,
            logprob: written(token.logprob.unwrap_or(0.0)),
            bytes: Some(token.bytes),
            top_logprobs: token.top_logprobs.into_iter().map(top).collect(),
        };
        Self { content: tokens.into_iter().map(one).collect(), refusal: None }
    }
}

impl ChatChoice {
    /// Of a complete choice.
    pub fn new(choice: CompletionChoice, include_stop: bool) -> Self {
        let content = with_stop(choice.text, choice.stop_sequence.as_deref(), include_stop);
        Self {
            index: choice.index,
            message: ChatMessage { role: "assistant", content, refusal: None },
            logprobs: choice.logprobs.map(ChatLogprobs::new),
            finish_reason: choice.finish_reason.as_str(),
            stop_reason: choice.stop_sequence,
        }
    }
}

fn with_stop(mut text: String, stop: Option<&str>, include_stop: bool) -> String {
    if include_stop {
        text.push_str(stop.unwrap_or_default());
    }
    text
}

/// One continuation of a text, or a part of it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TextChoice {
    /// Which: prompt times `n` plus choice.
    pub index: usize,
    /// The text.
    pub text: String,
    /// When asked for.
    pub logprobs: Option<TextLogprobs>,
    /// Why it ended.
    pub finish_reason: Option<&'static str>,
    /// The stop string that ended it.
    pub stop_reason: Option<String>,
}

/// Log probabilities of a text's tokens, as lists of one length.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct TextLogprobs {
    /// Where each token begins, in code points from the text's start.
    pub text_offset: Vec<usize>,
    /// Null for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// Texts of the tokens.
    pub tokens: Vec<String>,
    /// Of each position the likeliest tokens and its own, by text.
    pub top_logprobs: Vec<Option<TopLogprobs>>,
}

/// Log probabilities by the tokens' texts, likeliest first.
#[derive(Clone, Debug, Default, JsonSchema)]
#[schemars(with = "BTreeMap<String, f32>")]
pub struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    /// Of several tokens with one text the first stands for it.
    fn add(&mut self, text: String, logprob: f32) {
        if self.0.iter().all(|(other, _)| *other != text) {
            self.0.push((text, written(logprob)));
        }
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// Where the tokens of a text begin.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextOffset {
    code_points: usize,
}

impl TextOffset {
    /// Of the next token, by its bytes.
    fn next(&mut self, bytes: &[u8]) -> usize {
        let continues = |byte: u8| byte & 0xC0 == 0x80;
        // A token that begins within a character begins where that does.
        let start = self.code_points - usize::from(bytes.first().is_some_and(|b| continues(*b)) && self.code_points > 0);
        self.code_points += bytes.iter().filter(|byte| !continues(**byte)).count();
        start
    }
}

impl TextLogprobs {
    /// Of these tokens; `offset` is where they begin, and then where they end.
    pub fn new(tokens: Vec<TokenLogprobs>, offset: &mut TextOffset) -> Self {
        let mut lists = Self::default();
        for token in tokens {
            lists.text_offset.push(offset.next(&token.bytes));
            lists.top_logprobs.push(token.logprob.map(|own| {
                let mut top = TopLogprobs::default();
                token.top_logprobs.into_iter().for_each(|likely| top.add(likely.text().into_owned(), likely.logprob));
                top.add(token.text.clone(), own);
                top
            }));
            lists.token_logprobs.push(token.logprob.map(written));
            lists.tokens.push(token.text);
        }
        lists
    }
}

impl TextChoice {
    /// Of a complete choice, `index` among those of all prompts.
    pub fn new(index: usize, choice: CompletionChoice, include_stop: bool) -> Self {
        Self {
            index,
            text: with_stop(choice.text, choice.stop_sequence.as_deref(), include_stop),
            logprobs: choice.logprobs.map(|tokens| TextLogprobs::new(tokens, &mut TextOffset::default())),
            finish_reason: Some(choice.finish_reason.as_str()),
            stop_reason: choice.stop_sequence,
        }
    }
}

/// A model, as `GET /v1/models` lists it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelCard {
    /// The model's id.
    pub id: String,
    /// "model".
    pub object: &'static str,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// "local".
    pub owned_by: &'static str,
    /// The model that this name stands for.
    pub root: String,
    /// The model that an adapter belongs to.
    pub parent: Option<String>,
    /// Tokens of a request at most.
    pub max_model_len: usize,
    /// Further facts.
    #[serde(flatten)]
    pub more: BTreeMap<&'static str, Value>,
}
