//! What a caller asks for.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use audio::Sound;
use images::RgbImage;
use video::Video;

use crate::{AdapterChoice, Continuation, Grammar, RenderOptions, Sequence};

/// One chat message.
#[derive(Clone, Debug)]
pub struct Message {
    /// "system", "user", "assistant", "tool", ... as the chat template knows them.
    pub role: String,
    /// The text, or its parts.
    pub content: MessageContent,
    /// The images, sounds and videos of the parts `{"type": "image"}`, `{"type": "audio"}` and `{"type": "video"}`, in order.
    pub media: Vec<Media>,
    /// Further keys of the message (name, tool_call_id, ...), handed to the template as they are.
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    /// Its text; of parts, those of text together.
    pub fn text(&self) -> String {
        match &self.content {
            MessageContent::Text(text) => text.clone(),
            MessageContent::Parts(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        }
    }

    /// A message without images, sounds or further keys.
    pub fn new(role: impl Into<String>, content: MessageContent) -> Self {
        Self { role: role.into(), content, media: Vec::new(), extra: serde_json::Map::new() }
    }

    /// A user's message.
    pub fn user(text: impl Into<String>) -> Self {
        Self::new("user", MessageContent::Text(text.into()))
    }
}

impl Message {
    /// Bytes of its text.
    pub fn text_bytes(&self) -> usize {
        match &self.content {
            MessageContent::Text(text) => text.len(),
            MessageContent::Parts(parts) => parts.iter().filter_map(|part| part["text"].as_str()).map(str::len).sum(),
        }
    }
}

/// What a message has beside text.
#[derive(Clone, Debug, PartialEq)]
pub enum Media {
    /// Of a part `{"type": "image"}`.
    Image(Arc<RgbImage>),
    /// Of a part `{"type": "audio"}`.
    Sound(Arc<Sound>),
    /// Of a part `{"type": "video"}`.
    Video(Arc<Video>),
}

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaKind {
    /// An image.
    Image,
    /// A sound.
    Sound,
    /// A video.
    Video,
}

impl MediaKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Image, Self::Sound, Self::Video];

    /// What a part of a message calls it.
    pub fn part_type(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Sound => "audio",
            Self::Video => "video",
        }
    }

    /// Several of them, in messages.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Image => "images",
            Self::Sound => "sounds",
            Self::Video => "videos",
        }
    }
}

impl Media {
    /// Which kind it is.
    pub fn kind(&self) -> MediaKind {
        match self {
            Self::Image(_) => MediaKind::Image,
            Self::Sound(_) => MediaKind::Sound,
            Self::Video(_) => MediaKind::Video,
        }
    }

    /// Bytes of its pixels or samples; of a video that is not decoded, of its file.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Image(image) => image.pixels().len(),
            Self::Sound(sound) => size_of_val(sound.samples()),
            Self::Video(video) => video.num_bytes(),
        }
    }
}

impl From<Arc<RgbImage>> for Media {
    fn from(image: Arc<RgbImage>) -> Self {
        Self::Image(image)
    }
}

impl From<Arc<Sound>> for Media {
    fn from(sound: Arc<Sound>) -> Self {
        Self::Sound(sound)
    }
}

impl From<Arc<Video>> for Media {
    fn from(video: Arc<Video>) -> Self {
        Self::Video(video)
    }
}

/// Content of a message.
#[derive(Clone, Debug)]
pub enum MessageContent {
    /// Plain text.
    Text(String),
    /// Parts such as `{"type": "text", "text": ...}`, `{"type": "image"}`, `{"type": "audio"}` and `{"type": "video"}`.
    Parts(Vec<serde_json::Value>),
}

/// What to continue.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Messages, rendered by the model's chat template.
    Chat {
        /// The conversation.
        messages: Vec<Message>,
        /// What the template gets beside them.
        options: RenderOptions,
    },
    /// Text, tokenized with special tokens added.
    Text(String),
    /// What goes between two texts, of a model whose vocabulary has tokens for it.
    Gap {
        /// What goes before it.
        before: String,
        /// What goes behind it.
        after: String,
    },
    /// Token ids as they are.
    TokenIds(Vec<u32>),
    /// Those of two texts, for a score ([`crate::Engine::rerank_requests`]).
    TokenPair {
        /// All of them.
        ids: Vec<u32>,
        /// Where tokens of the second kind begin.
        second: usize,
    },
    /// What a sequence came to, and more.
    Sequence {
        /// The sequence.
        sequence: Sequence,
        /// What comes behind it.
        then: Continuation,
    },
}

impl Prompt {
    /// Bytes of the text that is to be tokenized.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Chat { messages, .. } | Self::Sequence { then: Continuation::Messages(messages), .. } => {
                messages.iter().map(Message::text_bytes).sum()
            }
            Self::Text(text) | Self::Sequence { then: Continuation::Text(text), .. } => text.len(),
            Self::Gap { before, after } => before.len() + after.len(),
            Self::TokenIds(_) | Self::TokenPair { .. } | Self::Sequence { then: Continuation::TokenIds(_), .. } => 0,
        }
    }

    /// Where tokens of the second kind begin, of two texts.
    pub(crate) fn second(&self) -> Option<usize> {
        if let Self::TokenPair { second, .. } = self { Some(*second) } else { None }
    }

    /// Whether there are images, sounds or videos. Before it can be submitted an image takes up to a second, a sound of 40
    /// minutes 10 to 20, and a video up to a minute.
    pub fn has_media(&self) -> bool {
        let any = |messages: &[Message]| messages.iter().any(|message| !message.media.is_empty());
        match self {
            Self::Chat { messages, .. } => any(messages),
            Self::Sequence { sequence, then: Continuation::Messages(messages) } => sequence.has_media() || any(messages),
            Self::Sequence { .. } | Self::Text(_) | Self::Gap { .. } | Self::TokenIds(_) | Self::TokenPair { .. } => false,
        }
    }
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
    /// The only tokens that may come, by id, at least one, as vLLM's field of this name; any unless given. Others have the
    /// probability 0, the end-of-sequence token as well unless it is listed. Log probabilities are the model's.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Log probabilities of that many likeliest tokens beside the sampled one's; `None` returns none at all.
    pub logprobs: Option<usize>,
    /// Texts that do not come, as vLLM's field of this name: of a text's tokens, spelled with and without a space before it, the
    /// last one does not come behind the others. What is spelled by other tokens may.
    pub bad_words: Vec<String>,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Token ids that end the text.
    pub stop_token_ids: Vec<u32>,
    /// Generated tokens at most; up to the model's length unless given.
    pub max_tokens: Option<usize>,
    /// Before so many tokens nothing ends the text: no token that would may come, and stop strings are text.
    pub min_tokens: usize,
    /// What the text must be: every token of it is one that the grammar allows. An end-of-sequence token may come where the
    /// grammar is complete, and where nothing more may come the text ends; so does it, incomplete, at `max_tokens` or a stop
    /// string. Log probabilities are the model's.
    pub grammar: Option<Grammar>,
    /// Goes on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Special tokens are part of the text, but for the one that ends it.
    pub include_special_tokens: bool,
    /// Seeds this request's random numbers: the same request gives the same text whatever runs beside it.
    pub seed: Option<u64>,
}

/// How a request is served beside others.
#[derive(Clone, Debug, Default)]
pub struct ServiceParams {
    /// Lower goes first.
    pub priority: i32,
    /// A request that has not ended so long after its submission ends with the text it has and [`crate::FinishReason::Timeout`].
    pub deadline: Option<Duration>,
    /// Whom the request belongs to; tenants are served in turn. It does not part their caches: see `cache_salt`.
    pub tenant: Option<String>,
    /// How much longer the turns of its tenant are than those of others, 1 unless given.
    pub tenant_weight: Option<NonZeroU32>,
    /// Requests share cached blocks only with those of the same salt; those without one share among themselves.
    pub cache_salt: Option<String>,
    /// Beginning of the prompt that all share, whatever their salt: so many messages of a chat, or tokens of another prompt.
    pub public_prefix: usize,
    /// Each choice ends with a [`Sequence`] that can be gone on from.
    pub keep: bool,
}

/// Which part of a long prompt is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptPrompt {
    /// So many of its first tokens.
    First(usize),
    /// So many of its last tokens.
    Last(usize),
}

impl KeptPrompt {
    /// Tokens at most.
    pub fn num_tokens(self) -> usize {
        let (Self::First(num_tokens) | Self::Last(num_tokens)) = self;
        num_tokens
    }
}

/// Choices of a request at most, those that `best_of` discards included: each has its own sampler, text and sequence.
pub const MAX_CHOICES: usize = 1024;

/// What a request ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputKind {
    /// The tokens that continue its prompt, and their text.
    #[default]
    Tokens,
    /// The hidden state of its last token behind the output norm, from which the logits of the next one would be computed;
    /// [`crate::OutputEvent::Vector`]. Nothing is sampled: of the sampling parameters only the defaults are taken.
    Vector,
    /// The vector that an embedding model makes of its prompt, of length 1; [`crate::OutputEvent::Vector`]. The prompt is taken
    /// as it is; [`crate::Engine::embedding_requests`] makes such requests.
    Embedding,
}

/// One request.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// What to continue.
    pub prompt: Prompt,
    /// What it runs with; unless given, the adapter that is active, if one is.
    pub adapter: Option<AdapterChoice>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// Whether tokens are chosen at all.
    pub output: OutputKind,
    /// How it is served beside others.
    pub service: ServiceParams,
    /// Number of independent continuations, 1 to [`MAX_CHOICES`].
    pub n_choices: usize,
    /// So many continuations are made, [`MAX_CHOICES`] at most, and the `n_choices` with the best mean log probability a token
    /// are returned, the best first (`None`: all, in order).
    pub best_of: Option<usize>,
    /// Drops the start of a prompt that leaves no room for `max_tokens` in the model's context or the KV pool, instead of
    /// rejecting it.
    pub truncate_sequence: bool,
    /// Drops the rest of a prompt that has more tokens, before anything else is checked.
    pub kept_prompt: Option<KeptPrompt>,
    /// The prompt's text goes before each continuation.
    pub echo_prompt: bool,
    /// Log probabilities of the prompt's tokens, and of that many likeliest ones in the place of each, apart from the
    /// continuations: [`crate::OutputEvent::PromptLogprobs`].
    pub prompt_logprobs: Option<usize>,
    /// The ids of the tokens come with the text.
    pub return_token_ids: bool,
    /// Appended after each continuation (completions only).
    pub suffix: Option<String>,
    /// Events come with the tokens. Else all come at the end, which spares the caller's thread a wake-up, and the processor a
    /// switch of threads, for every token.
    pub stream: bool,
}

impl GenerationRequest {
    /// One continuation of a prompt.
    pub fn new(prompt: Prompt, sampling: SamplingParams) -> Self {
        Self {
            prompt,
            adapter: None,
            sampling,
            output: OutputKind::default(),
            service: ServiceParams::default(),
            n_choices: 1,
            best_of: None,
            truncate_sequence: false,
            kept_prompt: None,
            echo_prompt: false,
            prompt_logprobs: None,
            return_token_ids: false,
            suffix: None,
            stream: true,
        }
    }

    /// One answer to a conversation.
    pub fn chat(messages: Vec<Message>, sampling: SamplingParams) -> Self {
        Self::new(Prompt::Chat { messages, options: RenderOptions::default() }, sampling)
    }
}
