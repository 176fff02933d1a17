//! What callers ask of a model that scores pairs of texts.

use super::{Truncation, template::ChatPairs};
use crate::{Engine, EngineError, GenerationRequest, OutputKind, Prompt, SamplingParams, ServiceParams, tokenizer::FirstOfPair};

/// How a query and a document become one list of tokens.
enum Pairs<'a> {
    /// A chat template writes them.
    Chat(ChatPairs<'a>),
    /// The tokenizer joins them.
    Joined(FirstOfPair),
}

/// Texts to be scored, each by how well it answers a query.
#[derive(Clone, Debug, Default)]
pub struct RerankRequest {
    /// What is asked.
    pub query: String,
    /// The texts.
    pub documents: Vec<String>,
    /// What becomes of a query and a text that together are too long: the longer of both is cut at its end.
    pub truncation: Truncation,
    /// How it is served beside others.
    pub service: ServiceParams,
}

impl RerankRequest {
    /// Bytes of the texts that are to be tokenized.
    pub fn text_bytes(&self) -> usize {
        self.query.len() + self.documents.iter().map(String::len).sum::<usize>()
    }
}

impl Engine {
    /// A request for each document, whose score is the one value of [`crate::CompletionChoice::vector`]. Tokenizes on this
    /// thread.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`]: the model does not score pairs. [`EngineError::PromptTooLong`]: a document has too many
    /// tokens, together with the query; it is named.
    pub fn rerank_requests(&self, request: RerankRequest) -> Result<Vec<GenerationRequest>, EngineError> {
        let Some(config) = self.embedding().filter(|config| config.score.is_some()) else {
            return Err(EngineError::InvalidArgument(
                "this model does not score pairs of texts: load one whose files name a class that ends in \
                 ForSequenceClassification, such as a cross-encoder, or whose modules.json has a LogitScore, with Which.Embedding, or \
                 serve it with `serve embedding`"
                    .into(),
            ));
        };
        let RerankRequest { query, documents, truncation, service } = request;
        let longest = self.max_embedding_len();
        let limit = truncation.limit(longest)?;
        let too_long = |what: &str, prompt_tokens: usize| {
            let message = format!(
                "{what} {prompt_tokens} tokens, and this model takes {longest} at most{}: shorten them, or set truncate_sequence",
                self.embedding_limit()
            );
            EngineError::PromptTooLong { prompt_tokens, max_tokens: longest, message }
        };
        let written = |text: &str| if config.lower_case { text.to_lowercase() } else { text.to_owned() };
        let prompt = config.prompt(None)?;
        let pairs = if let Some(template) = &config.template {
            Pairs::Chat(ChatPairs::new(self, template, prompt, &query))
        } else {
            // More are never used.
            let most = limit.unwrap_or(longest).saturating_add(1);
            let query = [prompt.unwrap_or_default(), &query].concat();
            let query = self.tokenizer().encode_first(&written(&query), most)?;
            if limit.is_none() && query.num_tokens > longest {
                return Err(too_long("the query has", query.num_tokens));
            }
            Pairs::Joined(query)
        };
        let mut requests = Vec::with_capacity(documents.len());
        for (number, document) in documents.into_iter().enumerate() {
            let (ids, second) = match &pairs {
                Pairs::Chat(pairs) => {
                    let ids = pairs.encode(&document, limit)?;
                    let len = ids.len();
                    (ids, len)
                }
                Pairs::Joined(query) => self.tokenizer().encode_pair(query, &written(&document), limit)?,
            };
            if ids.is_empty() {
                let text = format!("documents[{number}] and the query are empty: give at least one token");
                return Err(EngineError::InvalidArgument(text));
            }
            if ids.len() > longest {
                return Err(too_long(&format!("documents[{number}] and the query have"), ids.len()));
            }
            let request = GenerationRequest::new(Prompt::TokenPair { ids, second }, SamplingParams::default());
            requests.push(GenerationRequest {
                output: OutputKind::Embedding,
                service: service.clone(),
                stream: false,
                ..request
            });
        }
        Ok(requests)
    }

    /// Scores documents against a query and waits for the scores, in the order of the documents: higher is nearer.
    ///
    /// # Errors
    /// Those of [`Self::rerank_requests`]; [`EngineError::Internal`] where a step fails.
    pub fn rerank(&self, request: RerankRequest) -> Result<Vec<f32>, EngineError> {
        let scores = self.vectors(self.rerank_requests(request)?)?;
        Ok(scores.into_iter().flatten().collect())
    }
}
