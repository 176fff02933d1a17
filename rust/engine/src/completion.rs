//! What a caller gets back: events, and the complete answer made of them.

use std::borrow::Cow;

use paged::MissReason;

use crate::{EngineError, GrammarFault, Sequence, ToolCall, ToolCallDelta, engine::RequestHandle};

/// Why a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-sequence token, stop string, or the end of a grammar.
    Stop,
    /// Likewise, with a call of a tool.
    ToolCalls,
    /// max_tokens, the model's length, or the whole pool was reached.
    Length,
    /// A step failed; the text so far is kept.
    Error,
    /// The request's time was over; the text so far is kept.
    Timeout,
    /// The model was unloaded; the text so far is kept.
    Canceled,
}

impl FinishReason {
    /// The word of the mirrored interface.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
            Self::Error => "error",
            Self::Timeout => "timeout",
            Self::Canceled => "canceled",
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
    /// The token's own bytes, which need not be a character by themselves.
    pub bytes: Vec<u8>,
}

impl TopLogprob {
    /// The token's text, with replacement characters where its bytes are none.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.bytes)
    }
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

/// Log probability of one token of a prompt.
#[derive(Clone, Debug)]
pub struct PromptLogprob {
    /// The token, its log probability, and the likeliest tokens in its place.
    pub token: TokenLogprobs,
    /// How many tokens are likelier, and 1; `None` for the first token of a prompt.
    pub rank: Option<usize>,
}

/// What a request used.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Generated tokens, over all choices.
    pub completion_tokens: usize,
    /// Of these, tokens of reasoning.
    pub reasoning_tokens: usize,
    /// Of the prompt, tokens that were not computed: their KV was in the prefix cache, or in the sequence that was gone on from.
    pub cached_tokens: usize,
    /// Why no more of the prompt was cached; `None` if all but its last token was.
    pub cache_miss: Option<MissReason>,
    /// Times that a choice lost its blocks to another request.
    pub preemptions: usize,
    /// Tokens that were computed again after that.
    pub recomputed_tokens: usize,
    /// Drafts that were computed, over all choices: guesses of later tokens.
    pub draft_tokens: usize,
    /// Of these, the right ones, which are part of the answer.
    pub accepted_draft_tokens: usize,
    /// Images of the prompt that had to be encoded; the vectors of others were there.
    pub encoded_images: usize,
    /// The same of chunks of sounds, which are encoded one by one.
    pub encoded_sounds: usize,
    /// The same of groups of frames of videos, pairs with the models that there are.
    pub encoded_videos: usize,
    /// Seconds from submission to the end.
    pub total_time_sec: f64,
    /// Seconds from submission to the first step that had tokens of it.
    pub total_queue_time_sec: f64,
    /// Seconds from submission to the first sampled token.
    pub total_prompt_time_sec: f64,
    /// Seconds from the first sampled token to the end.
    pub total_completion_time_sec: f64,
}

/// A part of the answer, in order for each choice.
#[derive(Clone, Debug)]
pub enum OutputEvent {
    /// New text of a choice; may be empty when only something else is new.
    Delta {
        /// Which choice.
        index: usize,
        /// Of its reasoning, before its text.
        reasoning: String,
        /// The text since the last delta.
        text: String,
        /// Of its calls, behind its text.
        calls: Vec<ToolCallDelta>,
        /// Log probabilities of the tokens since the last delta, when asked for.
        logprobs: Vec<TokenLogprobs>,
        /// Ids of the tokens since the last delta, when asked for; one that ends the text is among them.
        token_ids: Vec<u32>,
        /// Tokens that the choice has generated so far.
        num_tokens: usize,
    },
    /// Log probabilities of further tokens of the prompt, in order, when asked for.
    PromptLogprobs(Vec<PromptLogprob>),
    /// The hidden state of the prompt's last token behind the output norm, `[hidden_size]`: all that comes before the end of a
    /// request with [`crate::OutputKind::Vector`].
    Vector {
        /// Which choice.
        index: usize,
        /// The vector.
        values: Vec<f32>,
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
        /// Whether that is the request's own grammar.
        grammar_fault: Option<GrammarFault>,
        /// Tokens that it has generated.
        num_tokens: usize,
        /// What it came to, when it is to be kept.
        sequence: Option<Sequence>,
    },
    /// Every choice has ended: the last event.
    Done(Usage),
}

impl OutputEvent {
    /// What ended a choice, if it ends one with [`FinishReason::Error`].
    pub fn failure(&self) -> Option<EngineError> {
        match self {
            Self::Finished { reason: FinishReason::Error, error, grammar_fault, .. } => {
                Some(failure(error.as_deref(), *grammar_fault))
            }
            _ => None,
        }
    }

    /// Of a choice that has generated so many tokens, with nothing new.
    pub fn empty_delta(index: usize, num_tokens: usize) -> Self {
        Self::Delta {
            index,
            reasoning: String::new(),
            text: String::new(),
            calls: Vec::new(),
            logprobs: Vec::new(),
            token_ids: Vec::new(),
            num_tokens,
        }
    }

    /// Appends a delta to one of the same choice; gives back what cannot be.
    pub fn append(&mut self, event: Self) -> Result<(), Box<Self>> {
        match (self, event) {
            (
                Self::Delta { index, reasoning, text, calls, logprobs, token_ids, num_tokens },
                Self::Delta {
                    index: next_index,
                    reasoning: next_reasoning,
                    text: next_text,
                    calls: next_calls,
                    logprobs: next_logprobs,
                    token_ids: next_ids,
                    num_tokens: next_num_tokens,
                },
            ) if *index == next_index
                && (calls.is_empty() || next_text.is_empty())
                && (text.is_empty() || next_reasoning.is_empty()) =>
            {
                reasoning.push_str(&next_reasoning);
                text.push_str(&next_text);
                for call in next_calls {
                    call.join(calls);
                }
                logprobs.extend(next_logprobs);
                token_ids.extend(next_ids);
                *num_tokens = next_num_tokens;
                Ok(())
            }
            (_, event) => Err(Box::new(event)),
        }
    }
}

/// One complete continuation.
#[derive(Clone, Debug)]
pub struct CompletionChoice {
    /// Which choice.
    pub index: usize,
    /// Its whole text.
    pub text: String,
    /// What it thought before, where its model's reasoning is marked.
    pub reasoning: Option<String>,
    /// The calls that it makes.
    pub tool_calls: Vec<ToolCall>,
    /// The vector that was asked for instead, `[hidden_size]`.
    pub vector: Option<Vec<f32>>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The stop string that ended it.
    pub stop_sequence: Option<String>,
    /// What went wrong, for [`FinishReason::Error`].
    pub error: Option<String>,
    /// Whether that is the request's own grammar.
    pub grammar_fault: Option<GrammarFault>,
    /// Log probabilities, when asked for; the prompt's own first when it is echoed.
    pub logprobs: Option<Vec<TokenLogprobs>>,
    /// Ids of the generated tokens, when asked for.
    pub token_ids: Vec<u32>,
    /// What it came to, when it is to be kept.
    pub sequence: Option<Sequence>,
}

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Completion {
    /// By index.
    pub choices: Vec<CompletionChoice>,
    /// Of every token of the prompt, when asked for.
    pub prompt_logprobs: Vec<PromptLogprob>,
    /// Over all choices.
    pub usage: Usage,
    /// The generation of the adapter that it ran with, if any.
    pub adapter_generation: Option<String>,
}

/// What ended a choice with [`FinishReason::Error`].
fn failure(error: Option<&str>, grammar_fault: Option<GrammarFault>) -> EngineError {
    let message = error.unwrap_or("a step failed");
    grammar_fault.map_or_else(|| EngineError::Internal(message.into()), |fault| fault.error(message))
}

impl Completion {
    /// Why a choice ended with [`FinishReason::Error`], if one did.
    pub fn failure(&self) -> Option<EngineError> {
        let failed = self.choices.iter().find(|choice| choice.finish_reason == FinishReason::Error)?;
        Some(failure(failed.error.as_deref(), failed.grammar_fault))
    }
}

/// The events of one request, for a thread that waits for them. Dropping it cancels the request and frees its blocks.
pub struct RequestStream {
    pub(crate) events: std::sync::mpsc::Receiver<crate::Event>,
    pub(crate) handle: RequestHandle,
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

    /// See [`RequestHandle::prompt_token_ids`].
    pub fn prompt_token_ids(&self) -> &[u32] {
        self.handle.prompt_token_ids()
    }

    /// See [`RequestHandle::sequence`].
    pub fn sequence(&self, choice: usize) -> Result<Sequence, crate::EngineError> {
        self.handle.sequence(choice)
    }

    /// See [`RequestHandle::collector`].
    pub fn collector(&self) -> CompletionCollector {
        self.handle.collector()
    }
}

/// Puts the events of one request together.
pub struct CompletionCollector {
    choices: Vec<CompletionChoice>,
    prompt_logprobs: Vec<PromptLogprob>,
    wants_logprobs: bool,
    adapter_generation: Option<String>,
}

impl CompletionCollector {
    pub(crate) fn new(wants_logprobs: bool, adapter_generation: Option<String>) -> Self {
        Self { choices: Vec::new(), prompt_logprobs: Vec::new(), wants_logprobs, adapter_generation }
    }

    /// Takes one event; the answer is complete with the last.
    pub fn push(&mut self, event: OutputEvent) -> Option<Completion> {
        match event {
            OutputEvent::Delta { index, reasoning, text, calls, logprobs, token_ids, .. } => {
                let choice = self.choice(index);
                choice.text.push_str(&text);
                if !reasoning.is_empty() {
                    choice.reasoning.get_or_insert_default().push_str(&reasoning);
                }
                for call in calls {
                    call.collect(&mut choice.tool_calls);
                }
                choice.token_ids.extend(token_ids);
                if let Some(all) = &mut choice.logprobs {
                    all.extend(logprobs);
                }
                None
            }
            OutputEvent::PromptLogprobs(logprobs) => {
                self.prompt_logprobs.extend(logprobs);
                None
            }
            OutputEvent::Vector { index, values } => {
                self.choice(index).vector = Some(values);
                None
            }
            OutputEvent::Finished { index, reason, stop_sequence, error, grammar_fault, sequence, .. } => {
                let choice = self.choice(index);
                choice.finish_reason = reason;
                choice.stop_sequence = stop_sequence;
                choice.error = error;
                choice.grammar_fault = grammar_fault;
                choice.sequence = sequence;
                None
            }
            OutputEvent::Done(usage) => Some(Completion {
                choices: std::mem::take(&mut self.choices),
                prompt_logprobs: std::mem::take(&mut self.prompt_logprobs),
                usage,
                adapter_generation: self.adapter_generation.take(),
            }),
        }
    }

    fn choice(&mut self, index: usize) -> &mut CompletionChoice {
        while self.choices.len() <= index {
            self.choices.push(CompletionChoice {
                index: self.choices.len(),
                text: String::new(),
                reasoning: None,
                tool_calls: Vec::new(),
                vector: None,
                finish_reason: FinishReason::Error,
                stop_sequence: None,
                error: None,
                grammar_fault: None,
                logprobs: self.wants_logprobs.then(Vec::new),
                token_ids: Vec::new(),
                sequence: None,
            });
        }
        &mut self.choices[index]
    }
}
