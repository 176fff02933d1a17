//! `POST /v1/rerank`, as Jina and Cohere have it.

use engine::{EngineError, RerankRequest, ServiceParams};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    ApiError, Fields, Rule,
    embeddings::{EmbeddingUsage, MAX_INPUTS, truncation},
    fields::fields,
    of_request,
    sampling::{MAX_DEADLINE, MIN_DEADLINE, deadline},
};

/// A text that is scored.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "each must be a string or an object with `text`")]
pub enum Document {
    /// The text.
    Plain(String),
    /// The same in an object.
    Object {
        /// The text.
        text: String,
    },
}

fields! {
    /// A request for scores.
    pub struct RerankFields {
        /// The model's id, `default`, or another of its names.
        model: String,
        /// What is asked.
        query: String,
        /// The texts that are scored against it, 2048 at most.
        #[schemars(length(min = 1, max = MAX_INPUTS))]
        documents: Vec<Document>,
        /// So many results at most, the best; all unless given.
        #[schemars(range(min = 1))]
        top_n: usize,
        /// Whether results have their texts; they do unless this is false.
        return_documents: bool,
        /// Cuts the longer of query and text where both are too long together, instead of refusing them.
        truncate_sequence: bool,
        /// Cuts every pair to so many tokens; -1: to as many as the model takes.
        #[schemars(range(min = -1))]
        truncate_prompt_tokens: i64,
        /// Lower goes first.
        priority: i32,
        /// Seconds after which the request fails.
        #[schemars(range(min = MIN_DEADLINE, max = MAX_DEADLINE))]
        deadline: f64,
        /// Who asks: requests of one tenant take turns by it.
        user: String,
    }
}

const RULES: &[(&str, Rule)] = &[
    ("max_chunks_per_doc", Rule::Refused("set truncate_sequence, or cut texts yourself")),
    ("max_tokens_per_doc", Rule::Refused("set truncate_prompt_tokens")),
    ("rank_fields", Rule::Refused("send texts as documents")),
    ("raw_scores", Rule::True(|v| v == false, "scores are what the model's files say")),
    ("stream", Rule::True(|v| v == false, "scores come at once")),
];

/// Texts to score.
#[derive(Clone, Debug)]
pub struct RerankBody {
    /// The model's name, if the request has one.
    pub model: Option<String>,
    /// In the engine's terms.
    pub request: RerankRequest,
    /// Results at most.
    pub top_n: usize,
    /// Whether results have their texts.
    pub return_documents: bool,
    /// `user`: who asks, within a tenant.
    pub user: Option<String>,
}

impl RerankBody {
    /// Reads a body and checks it.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let given = RerankFields::take(&mut fields)?;
        fields.finish(RULES)?;
        let query = given.query.ok_or_else(|| ApiError::missing("query", "give the text that documents are scored against"))?;
        let documents = given.documents.ok_or_else(|| ApiError::missing("documents", "give a list of texts"))?;
        if documents.is_empty() {
            return Err(ApiError::value("documents", "is empty; give at least one text"));
        }
        if documents.len() > MAX_INPUTS {
            return Err(ApiError::value(
                "documents",
                format!("has {} entries; it may have {MAX_INPUTS} at most", documents.len()),
            ));
        }
        if given.top_n == Some(0) {
            return Err(ApiError::value("top_n", "is 0; it must be 1 or more"));
        }
        let text = |document| match document {
            Document::Plain(text) | Document::Object { text } => text,
        };
        let service = ServiceParams {
            priority: given.priority.unwrap_or(0),
            deadline: deadline(given.deadline)?,
            ..ServiceParams::default()
        };
        Ok(Self {
            model: given.model,
            request: RerankRequest {
                query,
                documents: documents.into_iter().map(text).collect(),
                truncation: truncation(given.truncate_sequence, given.truncate_prompt_tokens)?,
                service,
            },
            top_n: given.top_n.unwrap_or(usize::MAX),
            return_documents: given.return_documents.unwrap_or(true),
            user: given.user,
        })
    }
}

/// What the engine says of a request for scores.
pub fn of_engine(error: EngineError) -> ApiError {
    match error {
        EngineError::PromptTooLong { message, .. } => {
            ApiError::invalid("context_length_exceeded", "documents".to_owned(), message)
        }
        error => of_request(error),
    }
}

/// Scores of all documents.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RerankAnswer {
    /// The request's id.
    pub id: String,
    /// The model's id.
    pub model: String,
    /// The best first.
    pub results: Vec<RerankResult>,
    /// Tokens of the pairs.
    pub usage: EmbeddingUsage,
}

/// The score of a document.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RerankResult {
    /// Which document.
    pub index: usize,
    /// Higher is nearer to the query.
    pub relevance_score: f32,
    /// Its text, unless the request leaves it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<RerankedText>,
}

/// A document's text.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RerankedText {
    /// The text.
    pub text: String,
}

impl RerankResult {
    /// The best of these, in order; documents of equal scores stay in theirs.
    pub fn best(scores: &[f32], documents: Option<Vec<String>>, top_n: usize) -> Vec<Self> {
        let mut texts: Vec<_> = documents.unwrap_or_default().into_iter().map(Some).collect();
        texts.resize(scores.len(), None);
        let mut order: Vec<_> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(top_n);
        let result = |index: usize| Self {
            index,
            relevance_score: scores[index],
            document: texts[index].take().map(|text| RerankedText { text }),
        };
        order.into_iter().map(result).collect()
    }
}

#[cfg(test)]
mod tests {
    use engine::Truncation;

    use super::*;

    #[test]
    fn a_body_says_what_is_scored() {
        let parsed = |body: &str| RerankBody::parse(body.as_bytes());
        let body = parsed(r#"{"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": false}"#).unwrap();
        assert_eq!((&body.request.query[..], &body.request.documents[..]), ("q", &["a".to_owned(), "b".into()][..]));
        assert_eq!((body.top_n, body.return_documents, body.request.truncation), (1, false, Truncation::Refuse));
        for (body, param) in [
            (r#"{"documents": ["a"]}"#, "query"),
            (r#"{"query": "q"}"#, "documents"),
            (r#"{"query": "q", "documents": []}"#, "documents"),
            (r#"{"query": "q", "documents": [1]}"#, "documents[0]"),
            (r#"{"query": "q", "documents": ["a"], "top_n": 0}"#, "top_n"),
            (r#"{"query": "q", "documents": ["a"], "max_chunks_per_doc": 4}"#, "max_chunks_per_doc"),
            (r#"{"query": "q", "documents": ["a"], "truncate_prompt_tokens": 0}"#, "truncate_prompt_tokens"),
            (r#"{"query": "q", "documents": ["a"], "deadline": -1}"#, "deadline"),
            (r#"{"query": "q", "documents": ["a"], "input": "x"}"#, "input"),
        ] {
            assert_eq!(parsed(body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn the_best_come_first_and_equals_in_their_order() {
        let texts = || Some(["a", "b", "c", "d"].map(str::to_owned).to_vec());
        let shown = |results: Vec<RerankResult>| {
            results.into_iter().map(|one| (one.index, one.document.map(|it| it.text).unwrap_or_default())).collect::<Vec<_>>()
        };
        let scores = [0.5, -1.0, 2.0, 0.5];
        assert_eq!(
            shown(RerankResult::best(&scores, texts(), 9)),
            [(2, "c".into()), (0, "a".into()), (3, "d".into()), (1, "b".into())]
        );
        assert_eq!(shown(RerankResult::best(&scores, None, 1)), [(2, String::new())]);
    }
}
