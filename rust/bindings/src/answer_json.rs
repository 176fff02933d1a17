//! Answers as JSON in the shape of OpenAI's API (<https://platform.openai.com/docs/api-reference>): `chat.completion`,
//! `text_completion` and `chat.completion.chunk`. Knows nothing of Python.
//!
//! Beyond that shape, an answer that a stop string ended names it, and the usage has the times and counts that
//! [`Usage`](engine::Usage) has.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// An answer, or a part of one.
#[derive(Serialize)]
pub struct Answer<'a> {
    pub id: &'a str,
    pub object: &'a str,
    /// Seconds since 1970.
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    pub choices: Vec<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage<'a>>,
}

#[derive(Serialize)]
pub struct Choice<'a> {
    pub index: usize,
    #[serde(flatten)]
    pub said: Said<'a>,
    pub logprobs: Option<Value>,
    pub finish_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_sequence: Option<&'a str>,
}

/// What a choice says: each object has a key of its own for it.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Said<'a> {
    Message {
        role: &'a str,
        content: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<&'a str>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<Call<'a>>,
        refusal: Option<&'a str>,
    },
    Delta {
        role: &'a str,
        content: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<&'a str>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<Call<'a>>,
    },
    Text(&'a str),
}

/// A call, or a part of one.
#[derive(Serialize)]
pub struct Call<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'a str>,
    pub function: Function<'a>,
}

#[derive(Serialize)]
pub struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    pub arguments: &'a str,
}

#[derive(Serialize)]
pub struct Usage<'a> {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails<'a>>,
    pub avg_tok_per_sec: f64,
    pub avg_prompt_tok_per_sec: f64,
    pub avg_compl_tok_per_sec: f64,
    pub total_time_sec: f64,
    pub total_prompt_time_sec: f64,
    pub total_completion_time_sec: f64,
    pub preemptions: usize,
    pub recomputed_tokens: usize,
    pub draft_tokens: usize,
    pub accepted_draft_tokens: usize,
    pub encoded_images: usize,
    pub encoded_sounds: usize,
    pub encoded_videos: usize,
}

#[derive(Serialize)]
pub struct PromptTokensDetails<'a> {
    pub cached_tokens: usize,
    pub miss_reason: Option<&'a str>,
}

/// A token with its log probability, `None` for the first of an echoed prompt, and the likeliest at its place.
pub struct Token<'a> {
    pub text: &'a str,
    pub bytes: &'a [u8],
    pub logprob: Option<f32>,
    pub top: Vec<Self>,
}

impl Token<'_> {
    fn entry(&self) -> Map<String, Value> {
        let mut entry = Map::new();
        entry.insert("token".to_owned(), json!(self.text));
        entry.insert("logprob".to_owned(), json!(self.logprob));
        entry.insert("bytes".to_owned(), json!(self.bytes));
        entry
    }
}

/// The `logprobs` of a chat's choice.
pub fn chat_logprobs(tokens: &[Token<'_>]) -> Value {
    let content = tokens.iter().map(|token| {
        let mut entry = token.entry();
        entry.insert("top_logprobs".to_owned(), token.top.iter().map(|top| Value::Object(top.entry())).collect());
        Value::Object(entry)
    });
    json!({"content": content.collect::<Value>(), "refusal": null})
}

/// The `logprobs` of a text's choice: lists side by side, with the place of each token in the text, in characters.
pub fn text_logprobs(tokens: &[Token<'_>]) -> Value {
    let mut offset = 0;
    let offsets: Vec<usize> = tokens
        .iter()
        .map(|token| {
            let start = offset;
            offset += token.text.chars().count();
            start
        })
        .collect();
    let top = |token: &Token<'_>| {
        let by_text: Map<String, Value> = token.top.iter().map(|top| (top.text.to_owned(), json!(top.logprob))).collect();
        token.logprob.map(|_| by_text)
    };
    json!({
        "tokens": tokens.iter().map(|token| token.text).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
