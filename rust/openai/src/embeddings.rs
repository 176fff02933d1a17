//! `POST /v1/embeddings`.

use engine::{EmbeddingInput, EmbeddingRequest, EngineError, ServiceParams, Truncation, embedding::shorten};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    ApiError, Fields, Rule,
    fields::fields,
    of_request,
    sampling::{MAX_DEADLINE, MIN_DEADLINE, deadline},
};

/// Inputs of a request at most, as OpenAI has it.
pub const MAX_INPUTS: usize = 2048;

/// A text, or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "it must be a string, a list of strings, a list of token ids, or a list of such lists")]
pub enum Inputs {
    /// A text.
    Text(String),
    /// Token ids of one.
    Ids(#[schemars(length(min = 1))] Vec<u32>),
    /// Texts.
    Texts(#[schemars(length(min = 1, max = MAX_INPUTS))] Vec<String>),
    /// Lists of token ids.
    IdLists(#[schemars(length(min = 1, max = MAX_INPUTS), inner(length(min = 1)))] Vec<Vec<u32>>),
}

impl Inputs {
    fn into_vec(self) -> Vec<EmbeddingInput> {
        match self {
            Self::Text(text) => vec![EmbeddingInput::Text(text)],
            Self::Ids(ids) if ids.is_empty() => Vec::new(),
            Self::Ids(ids) => vec![EmbeddingInput::TokenIds(ids)],
            Self::Texts(texts) => texts.into_iter().map(EmbeddingInput::Text).collect(),
            Self::IdLists(lists) => lists.into_iter().map(EmbeddingInput::TokenIds).collect(),
        }
    }
}

/// How vectors are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// Base64 of the numbers as little-endian f32.
    Base64,
}

fields! {
    /// A request for embeddings.
    pub struct EmbeddingFields {
        /// The model's id, `default`, or another of its names.
        model: String,
        /// What to embed: a text, token ids, or a list of either, 2048 at most.
        input: Inputs,
        /// `float`, a list of numbers, unless given; or `base64`, of their bytes as little-endian f32.
        encoding_format: EncodingFormat,
        /// The first so many values of each vector, which is then made of length 1 again; all unless given.
        #[schemars(range(min = 1))]
        dimensions: usize,
        /// One of the model's prompts, such as `query` or `document`, which goes before each text.
        prompt_name: String,
        /// Cuts a text that is too long instead of refusing it.
        truncate_sequence: bool,
        /// Cuts every text to so many tokens; -1: to as many as the model takes.
        #[schemars(range(min = -1))]
        truncate_prompt_tokens: i64,
        /// Lower goes first.
        priority: i32,
        /// Seconds after which the request fails.
        #[schemars(range(min = MIN_DEADLINE, max = MAX_DEADLINE))]
        deadline: f64,
        /// Cached blocks are shared only with requests of the same salt.
        #[schemars(length(min = 1))]
        cache_salt: String,
        /// Who asks: requests of one tenant take turns by it.
        user: String,
    }
}

const RULES: &[(&str, Rule)] = &[
    ("add_special_tokens", Rule::True(|v| v == true, "send token ids to have none added")),
    ("normalize", Rule::True(|v| v == true, "vectors have a length of 1")),
    ("input_type", Rule::Refused("name one of the model's prompts with prompt_name")),
    ("messages", Rule::Refused("send texts as input")),
    ("stream", Rule::True(|v| v == false, "embeddings come at once")),
];

/// Texts to embed.
#[derive(Clone, Debug)]
pub struct EmbeddingsRequest {
    /// The model's name, if the request has one.
    pub model: Option<String>,
    /// In the engine's terms.
    pub request: EmbeddingRequest,
    /// How vectors are written.
    pub encoding: EncodingFormat,
    /// `user`: who asks, within a tenant.
    pub user: Option<String>,
}

impl EmbeddingsRequest {
    /// Reads a body and checks it.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let given = EmbeddingFields::take(&mut fields)?;
        fields.finish(RULES)?;
        let inputs = given.input.ok_or_else(|| ApiError::missing("input", "give a text or token ids"))?.into_vec();
        if inputs.is_empty() {
            return Err(ApiError::value("input", "is empty; give a text or token ids"));
        }
        if inputs.len() > MAX_INPUTS {
            return Err(ApiError::value("input", format!("has {} entries; it may have {MAX_INPUTS} at most", inputs.len())));
        }
        let truncation = truncation(given.truncate_sequence, given.truncate_prompt_tokens)?;
        if given.cache_salt.as_ref().is_some_and(String::is_empty) {
            return Err(ApiError::value("cache_salt", "is empty: give some text, or leave it out to share with all"));
        }
        let service = ServiceParams {
            priority: given.priority.unwrap_or(0),
            deadline: deadline(given.deadline)?,
            cache_salt: given.cache_salt,
            ..ServiceParams::default()
        };
        let (prompt_name, dimensions) = (given.prompt_name, given.dimensions);
        Ok(Self {
            model: given.model,
            request: EmbeddingRequest { inputs, prompt_name, dimensions, truncation, service },
            encoding: given.encoding_format.unwrap_or_default(),
            user: given.user,
        })
    }
}

/// What becomes of inputs that are too long.
pub(crate) fn truncation(truncates: Option<bool>, limit: Option<i64>) -> Result<Truncation, ApiError> {
    Ok(match (truncates, limit) {
        (Some(true), None) | (_, Some(-1)) => Truncation::ToModel,
        (_, Some(limit)) => {
            let limit = usize::try_from(limit).ok().filter(|limit| *limit > 0);
            Truncation::To(limit.ok_or_else(|| ApiError::value("truncate_prompt_tokens", "must be 1 or more, or -1"))?)
        }
        (_, None) => Truncation::Refuse,
    })
}

/// What the engine says of a request for embeddings.
pub fn of_engine(error: EngineError) -> ApiError {
    match error {
        EngineError::PromptTooLong { message, .. } => ApiError::invalid("context_length_exceeded", "input".to_owned(), message),
        error => of_request(error),
    }
}

/// Embeddings of all inputs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EmbeddingsAnswer {
    /// `list`.
    pub object: &'static str,
    /// In the order of the inputs.
    pub data: Vec<Embedding>,
    /// The model's id.
    pub model: String,
    /// Tokens of the inputs.
    pub usage: EmbeddingUsage,
}

/// Of one input.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Embedding {
    /// `embedding`.
    pub object: &'static str,
    /// Which input.
    pub index: usize,
    /// The vector, of length 1.
    pub embedding: Vector,
}

/// A vector, as it is written.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Vector {
    /// Its values.
    Floats(Vec<f32>),
    /// Base64 of their bytes as little-endian f32.
    Base64(String),
}

/// Tokens of inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct EmbeddingUsage {
    /// Tokens of the inputs.
    pub prompt_tokens: usize,
    /// The same: nothing is generated.
    pub total_tokens: usize,
}

impl Embedding {
    /// Of an input's whole vector.
    pub fn new(index: usize, mut vector: Vec<f32>, dimensions: Option<usize>, encoding: EncodingFormat) -> Self {
        shorten(&mut vector, dimensions);
        let embedding = match encoding {
            EncodingFormat::Float => Vector::Floats(vector),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                Vector::Base64(base64(&bytes))
            }
        };
        Self { object: "embedding", index, embedding }
    }
}

/// As RFC 4648 has it, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().enumerate().fold(0_u32, |word, (i, byte)| word | u32::from(*byte) << (16 - 8 * i));
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i)) as usize % 64];
            text.push(if i <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xbf]), "+/+/");
    }

    #[test]
    fn a_body_says_what_is_embedded_and_how() {
        let parsed = |body: &str| EmbeddingsRequest::parse(body.as_bytes());
        let request =
            parsed(r#"{"input": ["a", ""], "encoding_format": "base64", "dimensions": 3, "prompt_name": "query"}"#).unwrap();
        assert_eq!(request.encoding, EncodingFormat::Base64);
        assert_eq!((request.request.inputs.len(), request.request.dimensions), (2, Some(3)));
        assert_eq!(request.request.prompt_name.as_deref(), Some("query"));
        for (body, inputs) in [
            (r#"{"input": "a"}"#, vec![EmbeddingInput::Text("a".into())]),
            (r#"{"input": [1, 2]}"#, vec![EmbeddingInput::TokenIds(vec![1, 2])]),
            (r#"{"input": [[1], [2]]}"#, vec![EmbeddingInput::TokenIds(vec![1]), EmbeddingInput::TokenIds(vec![2])]),
        ] {
            assert_eq!(parsed(body).unwrap().request.inputs, inputs);
        }
        for (body, truncation) in [
            (r#"{"input": "a"}"#, Truncation::Refuse),
            (r#"{"input": "a", "truncate_sequence": true}"#, Truncation::ToModel),
            (r#"{"input": "a", "truncate_prompt_tokens": -1}"#, Truncation::ToModel),
            (r#"{"input": "a", "truncate_prompt_tokens": 9, "truncate_sequence": true}"#, Truncation::To(9)),
        ] {
            assert_eq!(parsed(body).unwrap().request.truncation, truncation);
        }
        for (body, param) in [
            ("{}", "input"),
            (r#"{"input": []}"#, "input"),
            (r#"{"input": {"a": 1}}"#, "input"),
            (r#"{"input": "a", "truncate_prompt_tokens": 0}"#, "truncate_prompt_tokens"),
            (r#"{"input": "a", "encoding_format": "int8"}"#, "encoding_format"),
            (r#"{"input": "a", "input_type": "query"}"#, "input_type"),
            (r#"{"input": "a", "normalize": false}"#, "normalize"),
            (r#"{"input": "a", "temperature": 0}"#, "temperature"),
            (r#"{"input": "a", "deadline": -1}"#, "deadline"),
        ] {
            assert_eq!(parsed(body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
