//! What callers ask of an embedding model.

use super::normalize;
use crate::{Engine, EngineError, GenerationRequest, OutputKind, Prompt, SamplingParams, ServiceParams};

/// A text to be embedded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmbeddingInput {
    /// Text: a prompt goes before it, and the tokenizer adds its special tokens.
    Text(String),
    /// Token ids as they are.
    TokenIds(Vec<u32>),
}

impl EmbeddingInput {
    /// Bytes of the text that is to be tokenized.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::TokenIds(_) => 0,
        }
    }
}

/// What becomes of an input with more tokens than it may have. What the tokenizer adds at the ends stays; else the first tokens
/// do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    /// It is an error.
    #[default]
    Refuse,
    /// It is cut to what the model takes.
    ToModel,
    /// Every input is cut to so many tokens, at least 1 and at most what the model takes.
    To(usize),
}

impl Truncation {
    /// Tokens of an input at most where a model takes so many; `None`: whatever it has.
    pub(super) fn limit(self, longest: usize) -> Result<Option<usize>, EngineError> {
        match self {
            Self::Refuse => Ok(None),
            Self::ToModel => Ok(Some(longest)),
            Self::To(limit) if (1..=longest).contains(&limit) => Ok(Some(limit)),
            Self::To(limit) => Err(EngineError::InvalidArgument(format!(
                "truncate_prompt_tokens is {limit}; it must be 1 to {longest}, or -1 for as many"
            ))),
        }
    }
}

/// Texts to be embedded, each by itself.
#[derive(Clone, Debug, Default)]
pub struct EmbeddingRequest {
    /// The texts.
    pub inputs: Vec<EmbeddingInput>,
    /// One of the model's prompts ([`super::EmbeddingConfig::prompts`]), which goes before each text.
    pub prompt_name: Option<String>,
    /// Values of each vector; all unless given. What is left is of length 1 again (Matryoshka, arXiv:2205.13147).
    pub dimensions: Option<usize>,
    /// What becomes of long inputs.
    pub truncation: Truncation,
    /// How it is served beside others.
    pub service: ServiceParams,
}

/// The first values of a vector, with a length of 1.
pub fn shorten(vector: &mut Vec<f32>, dimensions: Option<usize>) {
    if let Some(dimensions) = dimensions.filter(|dimensions| *dimensions < vector.len()) {
        vector.truncate(dimensions);
        normalize(vector);
    }
}

impl Engine {
    /// A request for each input, whose vector [`crate::CompletionChoice::vector`] has in full: [`shorten`] cuts it. Tokenizes on
    /// this thread.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`]: the model was not loaded for embeddings, `dimensions` or `prompt_name` is none of its
    /// own, or an input is empty. [`EngineError::PromptTooLong`]: an input has too many tokens. Both name the input.
    pub fn embedding_requests(&self, request: EmbeddingRequest) -> Result<Vec<GenerationRequest>, EngineError> {
        let config = self.embedding_config()?;
        if config.score.is_some() {
            return Err(EngineError::InvalidArgument(
                "this model scores pairs of texts, and makes no vectors: send a RerankRequest, or POST /v1/rerank; `pooling` \
                 (Which.Embedding, or --pooling) loads it for vectors"
                    .into(),
            ));
        }
        let EmbeddingRequest { inputs, prompt_name, dimensions, truncation, service } = request;
        if let Some(asked) = dimensions.filter(|asked| !(1..=config.dimensions).contains(asked)) {
            let text = format!("dimensions is {asked}; vectors of this model have {}: ask for 1 to as many", config.dimensions);
            return Err(EngineError::InvalidArgument(text));
        }
        let prompt = config.prompt(prompt_name.as_deref())?;
        let longest = self.max_embedding_len();
        let limit = truncation.limit(longest)?;
        let is_one = inputs.len() == 1;
        let mut requests = Vec::with_capacity(inputs.len());
        for (number, input) in inputs.into_iter().enumerate() {
            let what = || if is_one { "input".to_owned() } else { format!("input[{number}]") };
            let ids = match input {
                EmbeddingInput::TokenIds(_) if prompt_name.is_some() => {
                    let text = format!("prompt_name is given, and {} is token ids: put the prompt's before them", what());
                    return Err(EngineError::InvalidArgument(text));
                }
                EmbeddingInput::TokenIds(mut ids) => {
                    ids.truncate(limit.unwrap_or(usize::MAX));
                    ids
                }
                EmbeddingInput::Text(text) => self.embedding_tokens(&[prompt.unwrap_or_default(), &text].concat(), limit)?,
            };
            if ids.is_empty() {
                return Err(EngineError::InvalidArgument(format!("{} is empty: give at least one token", what())));
            }
            if ids.len() > longest {
                let message = format!(
                    "{} has {} tokens, and this model takes {longest} at most{}: shorten it, or set truncate_sequence",
                    what(),
                    ids.len(),
                    self.embedding_limit()
                );
                return Err(EngineError::PromptTooLong { prompt_tokens: ids.len(), max_tokens: longest, message });
            }
            let request = GenerationRequest::new(Prompt::TokenIds(ids), SamplingParams::default());
            let service = service.clone();
            requests.push(GenerationRequest { output: OutputKind::Embedding, service, stream: false, ..request });
        }
        Ok(requests)
    }

    /// The tokens of a text, cut to `limit` between those that the tokenizer adds.
    fn embedding_tokens(&self, text: &str, limit: Option<usize>) -> Result<Vec<u32>, EngineError> {
        let small = self.embedding_config()?.lower_case.then(|| text.to_lowercase());
        let text = small.as_deref().unwrap_or(text);
        let ids = self.tokenize_text(text, true)?;
        let Some(limit) = limit.filter(|limit| *limit < ids.len()) else { return Ok(ids) };
        let plain = self.tokenize_text(text, false)?;
        // They stand together, unless the tokenizer does something of its own at the ends.
        let Some(before) = ids.windows(plain.len().max(1)).position(|part| part == plain) else {
            return Ok(ids[..limit].to_vec());
        };
        let behind = ids.len() - before - plain.len();
        let Some(room) = limit.checked_sub(before + behind).filter(|room| *room > 0) else {
            let text = format!(
                "truncate_prompt_tokens is {limit}, and the tokenizer adds {} tokens to each text: leave room for more",
                before + behind
            );
            return Err(EngineError::InvalidArgument(text));
        };
        let start = before + plain.len();
        if self.tokenizer().cuts_left() {
            return Ok([&ids[..before], &plain[plain.len() - room..], &ids[start..]].concat());
        }
        Ok([&ids[..before + room], &ids[start..]].concat())
    }

    /// Embeds texts and waits for the vectors, in the order of the inputs, each of `dimensions` values and of length 1.
    ///
    /// # Errors
    /// Those of [`Self::embedding_requests`]; [`EngineError::Internal`] where a step fails.
    pub fn embed(&self, request: EmbeddingRequest) -> Result<Vec<Vec<f32>>, EngineError> {
        let dimensions = request.dimensions;
        let mut vectors = self.vectors(self.embedding_requests(request)?)?;
        for vector in &mut vectors {
            shorten(vector, dimensions);
        }
        Ok(vectors)
    }

    /// What requests for vectors end with, in their order.
    pub(super) fn vectors(&self, requests: Vec<GenerationRequest>) -> Result<Vec<Vec<f32>>, EngineError> {
        let streams: Vec<_> = requests.into_iter().map(|request| self.submit(request)).collect::<Result<_, _>>()?;
        let vector = |stream: crate::RequestStream| {
            let mut completion = stream.wait()?;
            if let Some(why) = completion.failure() {
                return Err(why);
            }
            let vector = completion.choices.first_mut().and_then(|choice| choice.vector.take());
            vector.ok_or_else(|| EngineError::Internal("a request ended before its vector".into()))
        };
        streams.into_iter().map(vector).collect()
    }
}
