//! What a caller asks for and what it gets back.

/// One chat message.
#[derive(Clone, Debug)]
pub struct Message {
    /// "system", "user", "assistant", "tool", ... as the chat template knows them.
    pub role: String,
    /// The text, or its parts.
    pub content: MessageContent,
    /// Further keys of the message (name, tool_call_id, ...), handed to the template as they are.
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    /// A user's message.
    pub fn user(text: impl Into<String>) -> Self {
        Self { role: "user".into(), content: MessageContent::Text(text.into()), extra: serde_json::Map::new() }
    }
}

/// Content of a message.
#[derive(Clone, Debug)]
pub enum MessageContent {
    /// Plain text.
    Text(String),
    /// Parts such as `{"type": "text", "text": ...}`.
    Parts(Vec<serde_json::Value>),
}

/// What to continue.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Messages, rendered by the model's chat template with a generation prompt.
    Chat {
        /// The conversation.
        messages: Vec<Message>,
        /// Handed to the template when set.
        enable_thinking: Option<bool>,
        /// Handed to the template when set.
        reasoning_effort: Option<String>,
    },
    /// Text, tokenised with special tokens added.
    Text(String),
    /// Token ids as they are.
    TokenIds(Vec<u32>),
}

/// Penalty on repeating sequences ("Don't Repeat Yourself", text-generation-webui #5677).
#[derive(Clone, Debug, PartialEq)]
pub struct DryParams {
    /// Strength; 0 is off.
    pub multiplier: f32,
    /// Growth with the length of the repetition; 1.75 unless given.
    pub base: f32,
    /// Repetitions up to this many tokens are free; 2 unless given.
    pub allowed_length: usize,
    /// Strings that end a repetition; `\n : " *` unless given.
    pub sequence_breakers: Vec<String>,
}

/// How the next token is chosen. `None` follows generation_config.json, else what the field says.
#[derive(Clone, Debug, Default)]
pub struct SamplingParams {
    /// Divides the logits; 0 or below 1e-7 is greedy; 1.0 unless given.
    pub temperature: Option<f32>,
    /// Smallest set of tokens whose probability reaches this; off unless given.
    pub top_p: Option<f32>,
    /// The k likeliest tokens; 1 is greedy; off unless given.
    pub top_k: Option<usize>,
    /// Tokens at least this fraction as likely as the likeliest; off unless given.
    pub min_p: Option<f32>,
    /// Subtracted from the logit of every token of the context.
    pub presence_penalty: Option<f32>,
    /// Subtracted once for each occurrence of a token in the context.
    pub frequency_penalty: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens of the context.
    pub repetition_penalty: Option<f32>,
    /// The DRY penalty.
    pub dry: Option<DryParams>,
    /// Added to the logits, by token id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Log probabilities of that many likeliest tokens beside the sampled one's; `None` returns none at all.
    pub logprobs: Option<usize>,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Token ids that end the text.
    pub stop_token_ids: Vec<u32>,
    /// Generated tokens at most; up to the model's length unless given.
    pub max_tokens: Option<usize>,
    /// Goes on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Seeds this request's random numbers: the same request gives the same text whatever runs beside it.
    pub seed: Option<u64>,
}

/// Choices of a request at most, those that `best_of` discards included: each has its own sampler, text and sequence.
pub const MAX_CHOICES: usize = 1024;

/// One request.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// What to continue.
    pub prompt: Prompt,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// Number of independent continuations, 1 to [`MAX_CHOICES`].
    pub n_choices: usize,
    /// So many continuations are made, [`MAX_CHOICES`] at most, and the `n_choices` with the best mean log probability a token are
    /// returned, the best first (`None`: all, in order).
    pub best_of: Option<usize>,
    /// Drops the start of a prompt that leaves no room for `max_tokens` in the model's context or the KV pool, instead of rejecting it.
    pub truncate_sequence: bool,
    /// The prompt's text goes before each continuation.
    pub echo_prompt: bool,
    /// Appended after each continuation (completions only).
    pub suffix: Option<String>,
    /// Events come with the tokens. Else all come at the end, which spares the caller's thread a wake-up, and the processor a switch of
    /// threads, for every token.
    pub stream: bool,
}

impl GenerationRequest {
    /// One continuation of a prompt.
    pub fn new(prompt: Prompt, sampling: SamplingParams) -> Self {
        Self {
            prompt,
            sampling,
            n_choices: 1,
            best_of: None,
            truncate_sequence: false,
            echo_prompt: false,
            suffix: None,
            stream: true,
        }
    }

    /// One answer to a conversation.
    pub fn chat(messages: Vec<Message>, sampling: SamplingParams) -> Self {
        Self::new(Prompt::Chat { messages, enable_thinking: None, reasoning_effort: None }, sampling)
    }
}

/// Why a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-sequence token or stop string.
    Stop,
    /// max_tokens, the model's length, or the whole pool was reached.
    Length,
    /// A step failed; the text so far is kept.
    Error,
}

impl FinishReason {
    /// The word of the mirrored interface.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Error => "error",
        }
    }
}

/// One of the likeliest tokens at a position.
#[derive(Clone, Debug)]
pub struct TopLogprob {
    /// Token id.
    pub token_id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The token's text.
    pub text: String,
}

/// Log probability of one token.
#[derive(Clone, Debug)]
pub struct TokenLogprobs {
    /// Token id.
    pub token_id: u32,
    /// Natural logarithm of its probability; `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The token's text.
    pub text: String,
    /// The token's own bytes.
    pub bytes: Vec<u8>,
    /// The likeliest tokens at this position, likeliest first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// What a request used.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Generated tokens, over all choices.
    pub completion_tokens: usize,
    /// Of the prompt, tokens whose KV came from the prefix cache.
    pub cached_tokens: usize,
    /// Seconds from submission to the end.
    pub total_time_sec: f64,
    /// Seconds from submission to the first sampled token.
    pub total_prompt_time_sec: f64,
    /// Seconds from the first sampled token to the end.
    pub total_completion_time_sec: f64,
}

/// A part of the answer, in order for each choice.
#[derive(Clone, Debug)]
pub enum OutputEvent {
    /// New text of a choice; may be empty when only log probabilities are new.
    Delta {
        /// Which choice.
        index: usize,
        /// The text since the last delta.
        text: String,
        /// Log probabilities of the tokens since the last delta, when asked for.
        logprobs: Vec<TokenLogprobs>,
    },
    /// A choice has ended; its text is complete.
    Finished {
        /// Which choice.
        index: usize,
        /// Why.
        reason: FinishReason,
        /// The stop string that ended it.
        stop_sequence: Option<String>,
        /// What went wrong, for [`FinishReason::Error`].
        error: Option<String>,
    },
    /// Every choice has ended: the last event.
    Done(Usage),
}

/// One complete continuation.
#[derive(Clone, Debug)]
pub struct CompletionChoice {
    /// Which choice.
    pub index: usize,
    /// Its whole text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The stop string that ended it.
    pub stop_sequence: Option<String>,
    /// What went wrong, for [`FinishReason::Error`].
    pub error: Option<String>,
    /// Log probabilities, when asked for; the prompt's own first when it is echoed.
    pub logprobs: Option<Vec<TokenLogprobs>>,
}

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Completion {
    /// By index.
    pub choices: Vec<CompletionChoice>,
    /// Over all choices.
    pub usage: Usage,
}

/// The events of one request. Dropping it cancels the request and frees its blocks.
pub struct RequestStream {
    pub(crate) events: std::sync::mpsc::Receiver<Result<OutputEvent, crate::EngineError>>,
    pub(crate) cancel: std::sync::Arc<std::sync::atomic::AtomicBool>,
    pub(crate) wants_logprobs: bool,
}

impl RequestStream {
    /// Waits up to `timeout` for the next event; `Ok(None)` when none came in time.
    pub fn next_timeout(&self, timeout: std::time::Duration) -> Result<Option<OutputEvent>, crate::EngineError> {
        use std::sync::mpsc::RecvTimeoutError;
        match self.events.recv_timeout(timeout) {
            Ok(event) => event.map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(crate::EngineError::Internal("the engine stopped before the request ended".into()))
            }
        }
    }

    /// Waits for the complete answer.
    pub fn wait(self) -> Result<Completion, crate::EngineError> {
        let mut collector = self.collector();
        loop {
            let event = self.next_timeout(std::time::Duration::from_secs(3600))?;
            if let Some(completion) = event.and_then(|e| collector.push(e)) {
                return Ok(completion);
            }
        }
    }

    /// Collects events into the complete answer, which comes with [`OutputEvent::Done`].
    pub fn collector(&self) -> CompletionCollector {
        CompletionCollector { choices: Vec::new(), wants_logprobs: self.wants_logprobs }
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        self.cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Puts the events of one request together.
pub struct CompletionCollector {
    choices: Vec<CompletionChoice>,
    wants_logprobs: bool,
}

impl CompletionCollector {
    /// Takes one event; the answer is complete with the last.
    pub fn push(&mut self, event: OutputEvent) -> Option<Completion> {
        match event {
            OutputEvent::Delta { index, text, logprobs } => {
                let choice = self.choice(index);
                choice.text.push_str(&text);
                if let Some(all) = &mut choice.logprobs {
                    all.extend(logprobs);
                }
                None
            }
            OutputEvent::Finished { index, reason, stop_sequence, error } => {
                let choice = self.choice(index);
                choice.finish_reason = reason;
                choice.stop_sequence = stop_sequence;
                choice.error = error;
                None
            }
            OutputEvent::Done(usage) => Some(Completion { choices: std::mem::take(&mut self.choices), usage }),
        }
    }

    fn choice(&mut self, index: usize) -> &mut CompletionChoice {
        while self.choices.len() <= index {
            self.choices.push(CompletionChoice {
                index: self.choices.len(),
                text: String::new(),
                finish_reason: FinishReason::Error,
                stop_sequence: None,
                error: None,
                logprobs: self.wants_logprobs.then(Vec::new),
            });
        }
        &mut self.choices[index]
    }
}
