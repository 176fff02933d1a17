//! Requests and responses of OpenAI's HTTP interface, with the extensions of vLLM and mistral.rs, over the engine's own structs.
//!
//! Every key of a request is honoured, says what is so anyway, is a label, is refused by name, or is unknown and refused by name.
//! Nothing here knows of sockets: [`chat::ChatRequest::parse`] and its like turn a body into what the engine takes,
//! [`response`] turns what the engine gives into a body.

pub mod anthropic;
pub mod chat;
pub mod completions;
pub mod embeddings;
mod error;
pub mod fields;
pub mod media;
pub mod messages;
pub mod rerank;
pub mod response;
pub mod responses;
pub mod sampling;
pub mod structured;
pub mod text;
pub mod tools;
pub mod transcription;

pub use error::ApiError;
pub use fields::{Fields, Rule, of_request};

use engine::{GenerationRequest, MediaKind};

/// Prompts times choices of a request at most.
pub const MAX_CHOICES: usize = 128;
/// Entries of `logit_bias` at most.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Messages of a chat at most.
pub const MAX_MESSAGES: usize = 4096;
/// Stop strings at most, and bytes of each.
pub const MAX_STOPS: (usize, usize) = (16, 256);
/// Entries of `bad_words` at most, and bytes of each.
pub const MAX_BAD_WORDS: (usize, usize) = (1024, 256);
/// `top_logprobs`, `prompt_logprobs` and `logprobs` of completions at most.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// What the parsers must know of the model that is asked.
#[derive(Clone, Debug, Default)]
pub struct ModelContext {
    /// The chat template knows the role "developer"; else such messages become the system's.
    pub knows_developer: bool,
    /// What it takes beside text.
    pub media: Vec<MediaKind>,
    /// What it is called.
    pub model_id: String,
}

/// How an answer is to be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// As server-sent events.
    pub stream: bool,
    /// The last chunk has the usage.
    pub include_usage: bool,
    /// Every chunk has the usage so far; needs `include_usage`.
    pub continuous_usage: bool,
    /// The stop string is part of the text.
    pub include_stop: bool,
    /// The ids of prompt and answer come with the text.
    pub token_ids: bool,
    /// Log probabilities name tokens as `token_id:` and the id.
    pub tokens_as_ids: bool,
}

/// What a request asks of the engine: one generation for each of its prompts.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The model's name, if the request has one.
    pub model: Option<String>,
    /// For each prompt.
    pub requests: Vec<GenerationRequest>,
    /// How the answer is sent.
    pub delivery: Delivery,
    /// `user`: who asks, within a tenant.
    pub user: Option<String>,
    /// The key that says what the answer must be.
    pub grammar_param: Option<&'static str>,
}
