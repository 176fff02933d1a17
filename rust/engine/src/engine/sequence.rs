//! Sequences that can be gone on from: the branches of a search.

use std::{
    fmt,
    sync::{Arc, mpsc::Sender},
};

use paged::RequestId;

use super::thread::Command;
use crate::{
    EngineError, Message, MessageContent, Prompt, RenderOptions,
    lora::Generation,
    media::prompt::{PromptItems, with_row_ids},
    model::RopeRows,
    tokenizer::Tokenizer,
};

/// Tokens that a request came to, and, while nobody needs their memory more, their keys and values.
///
/// Never changes: to go on from it is a new request with [`Prompt::Sequence`], which shares its blocks and copies what it writes
/// to. A clone is a fork. The blocks are given back when the last clone is gone; when the pool takes them before, a request that
/// goes on from here computes them again.
#[derive(Clone)]
pub struct Sequence {
    pub(super) origin: Origin,
    pub(super) token_ids: Arc<[u32]>,
    pub(super) kept: Option<Arc<Kept>>,
}

/// Where a sequence comes from.
#[derive(Clone)]
pub(super) struct Origin {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) num_prompt_tokens: usize,
    /// The messages of its prompt, if it began as a chat.
    pub(super) conversation: Option<Arc<Conversation>>,
    pub(super) cache_salt: Vec<u8>,
    pub(super) public_prefix_len: usize,
    pub(super) adapter: Option<Arc<Generation>>,
    /// `None`: it has none.
    pub(super) items: Option<Arc<PromptItems>>,
    /// Where tokens of the second kind begin, of two texts.
    pub(super) second: Option<usize>,
}

impl Origin {
    /// Of sequences that begin with `prompt`, and go on from `source`.
    pub(super) fn of(self, prompt: Prompt, source: Option<&Source>) -> Self {
        let conversation = match prompt {
            Prompt::Chat { messages, options } => Some(Arc::new(Conversation { messages, options })),
            _ => None,
        };
        match source {
            // What was given behind a sequence counts with what was generated, unless its beginning was cut off.
            Some(source) if conversation.is_none() && source.num_tokens == source.sequence.token_ids.len() => {
                source.sequence.origin.clone()
            }
            Some(source) => {
                let Self { cache_salt, adapter, .. } = source.sequence.origin.clone();
                Self { conversation, cache_salt, adapter, ..self }
            }
            None => Self { conversation, ..self },
        }
    }
}

/// What a request goes on from.
pub(super) struct Source {
    pub(super) sequence: Sequence,
    /// How many of its tokens the prompt begins with.
    pub(super) num_tokens: usize,
}

impl Source {
    /// For a prompt that begins as the sequence does, as far as it does, images and sounds in both told apart.
    pub(super) fn new(sequence: Sequence, prompt: &[u32]) -> Self {
        let own = with_row_ids(sequence.origin.items.as_deref(), &sequence.token_ids);
        let num_tokens = own.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        Self { sequence, num_tokens }
    }
}

/// A chat as it was asked.
pub(super) struct Conversation {
    pub(super) messages: Vec<Message>,
    pub(super) options: RenderOptions,
}

/// A request whose blocks the scheduler keeps.
pub(super) struct Kept {
    pub(super) id: RequestId,
    pub(super) rope: RopeRows,
    pub(super) inbox: Sender<Command>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        // An engine that has ended keeps nothing.
        let _ = self.inbox.send(Command::Release(self.id));
    }
}

/// What comes behind a sequence.
#[derive(Clone, Debug)]
pub enum Continuation {
    /// Text, tokenized without special tokens.
    Text(String),
    /// Token ids; none go on right where the sequence ended.
    TokenIds(Vec<u32>),
    /// Further messages of a chat; what was generated so far is the assistant's.
    Messages(Vec<Message>),
}

impl Sequence {
    /// Whether it goes on from images or sounds.
    pub(crate) fn has_media(&self) -> bool {
        self.origin.items.is_some()
    }

    /// Prompt and answer, the token that ended it included.
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// How many of them are the prompt.
    pub fn num_prompt_tokens(&self) -> usize {
        self.origin.num_prompt_tokens
    }

    /// Text of all that came behind the prompt, without special tokens.
    pub fn text(&self) -> String {
        self.origin.tokenizer.decode(&self.token_ids[self.origin.num_prompt_tokens..], true)
    }

    /// The same without the blocks, which are given back if nobody else holds them.
    pub fn release(&mut self) {
        self.kept = None;
    }

    /// The prompt of a request that goes on from here.
    pub(super) fn prompt(&self, then: Continuation, tokenizer: &Arc<Tokenizer>) -> Result<Prompt, EngineError> {
        if !Arc::ptr_eq(tokenizer, &self.origin.tokenizer) {
            return Err(EngineError::InvalidArgument(
                "the sequence belongs to another engine: go on from it there, or send its tokens as a prompt".into(),
            ));
        }
        let behind = match then {
            Continuation::Text(text) => tokenizer.encode(&text, false)?,
            Continuation::TokenIds(ids) => ids,
            Continuation::Messages(messages) => return self.chat(messages),
        };
        Ok(Prompt::TokenIds([&*self.token_ids, &behind].concat()))
    }

    fn chat(&self, messages: Vec<Message>) -> Result<Prompt, EngineError> {
        let Some(conversation) = &self.origin.conversation else {
            return Err(EngineError::InvalidArgument(
                "messages go on from a sequence that began as a chat, and this one did not: give text or token ids".into(),
            ));
        };
        let answer = Message::new("assistant", MessageContent::Text(self.text()));
        Ok(Prompt::Chat {
            messages: conversation.messages.iter().cloned().chain([answer]).chain(messages).collect(),
            options: conversation.options.clone(),
        })
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequence").field("num_tokens", &self.token_ids.len()).finish_non_exhaustive()
    }
}
