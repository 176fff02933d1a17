//! Answers, from what the engine gives.

use std::{collections::BTreeMap, time::SystemTime, time::UNIX_EPOCH};

use engine::{CompletionChoice, PromptLogprob, TokenLogprobs, ToolCall, ToolCallDelta, TopLogprob, Usage as EngineUsage};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::Delivery;

/// What OpenAI's clients get for a probability of 0, whose logarithm JSON cannot write.
const LOGPROB_OF_ZERO: f64 = -9999.0;

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
    /// Images of the prompts that had to be encoded, and were not cached; once it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoded_images: Option<usize>,
    /// The same of chunks of sounds, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoded_sounds: Option<usize>,
    /// The same of groups of frames of videos, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoded_videos: Option<usize>,
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
    /// Those that were guessed before the model said them (speculative decoding).
    pub accepted_prediction_tokens: usize,
    /// Guesses that were wrong: not part of the answer.
    pub rejected_prediction_tokens: usize,
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
            encoded_images: None,
            encoded_sounds: None,
            encoded_videos: None,
        }
    }

    /// Of an answer that goes on.
    pub fn so_far(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens_details: None, ..Self::new(prompt_tokens, completion_tokens, 0) }
    }

    /// Of another request as well.
    pub fn add(&mut self, usage: &EngineUsage) {
        let (details, encoded_images) = (self.completion_tokens_details, self.encoded_images.unwrap_or(0));
        let encoded_sounds = self.encoded_sounds.unwrap_or(0) + usage.encoded_sounds;
        let encoded_videos = self.encoded_videos.unwrap_or(0) + usage.encoded_videos;
        *self = Self::new(
            self.prompt_tokens + usage.prompt_tokens,
            self.completion_tokens + usage.completion_tokens,
            self.prompt_tokens_details.map_or(0, |details| details.cached_tokens) + usage.cached_tokens,
        );
        self.encoded_images = Some(encoded_images + usage.encoded_images);
        self.encoded_sounds = (encoded_sounds > 0).then_some(encoded_sounds);
        self.encoded_videos = (encoded_videos > 0).then_some(encoded_videos);
        let rejected = usage.draft_tokens - usage.accepted_draft_tokens;
        self.completion_tokens_details = CompletionTokensDetails {
            reasoning_tokens: details.reasoning_tokens + usage.reasoning_tokens,
            accepted_prediction_tokens: details.accepted_prediction_tokens + usage.accepted_draft_tokens,
            rejected_prediction_tokens: details.rejected_prediction_tokens + rejected,
        };
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
    /// Ids of a chat's prompt, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Log probabilities of a chat's prompt, when asked for; see [`prompt_logprobs`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// Of each token of a prompt, by id: its log probability and those of the likeliest ones in its place; null for the first.
pub type PromptLogprobs = Vec<Option<BTreeMap<u32, RankedLogprob>>>;

/// Log probability of a token in one place of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct RankedLogprob {
    /// Natural logarithm of its probability; -9999.0 for a probability of 0.
    pub logprob: f64,
    /// 1 is the likeliest.
    pub rank: usize,
    /// The token's text.
    pub decoded_token: String,
}

/// In vLLM's form.
pub fn prompt_logprobs(tokens: Vec<PromptLogprob>) -> PromptLogprobs {
    let entry = |PromptLogprob { token, rank }| {
        let mut entries = BTreeMap::new();
        for (place, top) in token.top_logprobs.iter().enumerate() {
            let (logprob, decoded_token) = (written(top.logprob), top.text().into_owned());
            entries.insert(top.token_id, RankedLogprob { logprob, rank: place + 1, decoded_token });
        }
        let own = RankedLogprob { logprob: written(token.logprob?), rank: rank?, decoded_token: token.text };
        entries.entry(token.token_id).or_insert(own);
        Some(entries)
    };
    tokens.into_iter().map(entry).collect()
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
            prompt_token_ids: None,
            prompt_logprobs: None,
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
    /// Ids of its tokens, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What the model said.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatMessage {
    /// "assistant".
    pub role: &'static str,
    /// The text; null beside calls.
    pub content: Option<String>,
    /// What it thought before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same, by vLLM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls that it makes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Call>,
    /// Always null: a local model's refusal is text.
    pub refusal: Option<String>,
}

/// A call of a function.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Call {
    /// By which its result is sent back.
    pub id: String,
    /// "function".
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The function, and its arguments.
    pub function: CalledFunction,
}

/// A function and its arguments.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CalledFunction {
    /// Its name.
    pub name: String,
    /// The text of a JSON object.
    pub arguments: String,
}

/// What is new of a call: with its first part the id, the type and the name.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CallDelta {
    /// Which call of the answer.
    pub index: usize,
    /// By which its result is sent back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// "function".
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// What is new.
    pub function: FunctionDelta,
}

/// What is new of a function's call.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FunctionDelta {
    /// With the first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What is new of the arguments' text.
    pub arguments: String,
}

impl From<ToolCall> for Call {
    fn from(call: ToolCall) -> Self {
        let function = CalledFunction { name: call.name, arguments: call.arguments };
        Self { id: call.id, kind: "function", function }
    }
}

impl From<ToolCallDelta> for CallDelta {
    fn from(delta: ToolCallDelta) -> Self {
        let kind = delta.id.is_some().then_some("function");
        Self { index: delta.index, id: delta.id, kind, function: FunctionDelta { name: delta.name, arguments: delta.arguments } }
    }
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
    /// Ids of the new tokens, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
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
    /// Of its reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same, by vLLM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Of its calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallDelta>,
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
    pub logprob: f64,
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
    pub logprob: f64,
    /// Its bytes.
    pub bytes: Option<Vec<u8>>,
}

/// The same number as the Python API's, digit for digit.
fn written(logprob: f32) -> f64 {
    if logprob.is_finite() { logprob.into() } else { LOGPROB_OF_ZERO }
}

/// How log probabilities name a token.
fn named(text: String, token_id: u32, as_ids: bool) -> String {
    if as_ids { format!("token_id:{token_id}") } else { text }
}

impl ChatLogprobs {
    /// Of these tokens, by their texts or their ids.
    pub fn new(tokens: Vec<TokenLogprobs>, as_ids: bool) -> Self {
        let top = |top: TopLogprob| ChatTopLogprob {
            token: named(top.text().into_owned(), top.token_id, as_ids),
            logprob: written(top.logprob),
            bytes: Some(top.bytes),
        };
        let one = |token: TokenLogprobs| ChatLogprob {
            token: named(token.text, token.token_id, as_ids),
            logprob: written(token.logprob.unwrap_or(0.0)),
            bytes: Some(token.bytes),
            top_logprobs: token.top_logprobs.into_iter().map(top).collect(),
        };
        Self { content: tokens.into_iter().map(one).collect(), refusal: None }
    }
}

impl ChatChoice {
    /// Of a complete choice.
    pub fn new(choice: CompletionChoice, delivery: &Delivery) -> Self {
        let content = with_stop(choice.text, choice.stop_sequence.as_deref(), delivery.include_stop);
        let tool_calls: Vec<Call> = choice.tool_calls.into_iter().map(Call::from).collect();
        let message = ChatMessage {
            role: "assistant",
            content: Some(content).filter(|content| !content.is_empty() || tool_calls.is_empty()),
            reasoning_content: choice.reasoning.clone(),
            reasoning: choice.reasoning,
            tool_calls,
            refusal: None,
        };
        Self {
            index: choice.index,
            message,
            logprobs: choice.logprobs.map(|tokens| ChatLogprobs::new(tokens, delivery.tokens_as_ids)),
            finish_reason: choice.finish_reason.as_str(),
            stop_reason: choice.stop_sequence,
            token_ids: delivery.token_ids.then_some(choice.token_ids),
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
    /// Ids of its tokens, or of the new ones, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Ids of its prompt, when asked for; of a stream with the first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Log probabilities of its prompt, when asked for; see [`prompt_logprobs`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// Log probabilities of a text's tokens, as lists of one length.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct TextLogprobs {
    /// Where each token begins, in code points from the text's start.
    pub text_offset: Vec<usize>,
    /// Null for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f64>>,
    /// Texts of the tokens.
    pub tokens: Vec<String>,
    /// Of each position the likeliest tokens and its own, by text.
    pub top_logprobs: Vec<Option<TopLogprobs>>,
}

/// Log probabilities by the tokens' texts, likeliest first.
#[derive(Clone, Debug, Default, JsonSchema)]
#[schemars(with = "BTreeMap<String, f64>")]
pub struct TopLogprobs(Vec<(String, f64)>);

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
    /// Of these tokens, by their texts or their ids; `offset` is where they begin, and then where they end.
    pub fn new(tokens: Vec<TokenLogprobs>, offset: &mut TextOffset, as_ids: bool) -> Self {
        let mut lists = Self::default();
        for token in tokens {
            lists.text_offset.push(offset.next(&token.bytes));
            lists.top_logprobs.push(token.logprob.map(|own| {
                let mut top = TopLogprobs::default();
                for likely in token.top_logprobs {
                    top.add(named(likely.text().into_owned(), likely.token_id, as_ids), likely.logprob);
                }
                top.add(named(token.text.clone(), token.token_id, as_ids), own);
                top
            }));
            lists.token_logprobs.push(token.logprob.map(written));
            lists.tokens.push(named(token.text, token.token_id, as_ids));
        }
        lists
    }
}

impl TextChoice {
    /// Nothing, of this choice.
    pub fn empty(index: usize) -> Self {
        Self {
            index,
            text: String::new(),
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }

    /// Of a complete choice, `index` among those of all prompts.
    pub fn new(index: usize, choice: CompletionChoice, delivery: &Delivery) -> Self {
        let lists = |tokens| TextLogprobs::new(tokens, &mut TextOffset::default(), delivery.tokens_as_ids);
        Self {
            index,
            text: with_stop(choice.text, choice.stop_sequence.as_deref(), delivery.include_stop),
            logprobs: choice.logprobs.map(lists),
            finish_reason: Some(choice.finish_reason.as_str()),
            stop_reason: choice.stop_sequence,
            token_ids: delivery.token_ids.then_some(choice.token_ids),
            prompt_token_ids: None,
            prompt_logprobs: None,
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
    /// Tokens of a request at most, where the model has been loaded.
    pub max_model_len: Option<usize>,
    /// Further facts.
    #[serde(flatten)]
    pub more: BTreeMap<&'static str, Value>,
}
