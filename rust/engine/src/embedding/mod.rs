//! Models that turn texts into vectors, or pairs of texts into scores: how a text's hidden states become one vector or number,
//! and what requests ask for.

mod classifier;
mod files;
mod head;
mod logits;
mod request;
mod rerank;
mod template;

use std::{fmt, str::FromStr};

pub(crate) use classifier::of_folder as scores_of_folder;
pub(crate) use files::{add_heads, of_folder, of_gguf};
pub(crate) use head::{Embedder, Heads, buffer_bytes};
pub use logits::TokenLogits;
pub(crate) use logits::of_folder as logits_of_folder;
pub use request::{EmbeddingInput, EmbeddingRequest, Truncation, shorten};
pub use rerank::RerankRequest;
pub use template::PairTemplate;

use device::Activation;

use crate::{
    ChatTemplate, EngineError,
    model::DecoderConfig,
    tokenizer::Tokenizer,
    weights::{Matrix, Role, WeightId},
};

/// How the hidden states of a text's tokens, behind the output norm, become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first one.
    Cls,
    /// The last one.
    Last,
}

impl Pooling {
    /// All, with their names.
    pub const ALL: [(Self, &'static str); 3] = [(Self::Mean, "mean"), (Self::Cls, "cls"), (Self::Last, "last")];

    /// `mean`, `cls` or `last`.
    pub fn name(self) -> &'static str {
        let [mean, cls, last] = Self::ALL.map(|(_, name)| name);
        match self {
            Self::Mean => mean,
            Self::Cls => cls,
            Self::Last => last,
        }
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Pooling {
    type Err = EngineError;

    fn from_str(name: &str) -> Result<Self, EngineError> {
        let found = Self::ALL.into_iter().find(|(_, known)| *known == name);
        found.map(|(pooling, _)| pooling).ok_or_else(|| {
            let shown: String = name.chars().take(40).collect();
            EngineError::InvalidArgument(format!("pooling is {shown:?}; it must be \"mean\", \"cls\" or \"last\""))
        })
    }
}

/// A model that is to make embeddings instead of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingOptions {
    /// Goes before what the model's files say; needed where they say nothing.
    pub pooling: Option<Pooling>,
}

/// How a model makes a vector of a text. The vector has a length of 1 in the end.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingConfig {
    /// From many hidden states to one.
    pub pooling: Pooling,
    /// What it then passes, in order.
    pub heads: Vec<HeadConfig>,
    /// Texts that go before an input, by name, in the order of the file.
    pub prompts: Vec<(String, String)>,
    /// The name of the one that goes before an input that names none.
    pub default_prompt: Option<String>,
    /// Tokens of an input at most, where the files say that beside the context of the decoder.
    pub max_input_len: Option<usize>,
    /// Texts are written in small letters before they are tokenized.
    pub lower_case: bool,
    /// Values of the vector.
    pub dimensions: usize,
    /// The one value is a score of two texts, which becomes this in the end; `None`: it is a vector of a text.
    pub score: Option<ScoreActivation>,
    /// The score is made of these logits, and there are no heads.
    pub logits: Option<TokenLogits>,
    /// How a chat template writes two texts; unless given, the tokenizer joins them.
    pub template: Option<PairTemplate>,
}

/// What the score of a model that compares two texts becomes in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreActivation {
    /// Itself: a logit.
    Identity,
    /// A number from 0 to 1.
    Sigmoid,
}

impl ScoreActivation {
    /// What a logit becomes.
    pub(crate) fn apply(self, logit: f32) -> f32 {
        match self {
            Self::Identity => logit,
            Self::Sigmoid => (1.0 / (1.0 + f64::from(-logit).exp())) as f32,
        }
    }
}

/// A dense layer behind the pooling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadConfig {
    /// Whose weight it is.
    pub role: Role,
    /// Values that it takes.
    pub in_features: usize,
    /// Values that it gives.
    pub out_features: usize,
    /// Whether something is added.
    pub bias: bool,
    /// What each value becomes.
    pub activation: HeadActivation,
    /// There is a norm behind that.
    pub has_norm: bool,
}

/// What each value of a dense layer becomes in the end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadActivation {
    /// Itself.
    Identity,
    /// Its hyperbolic tangent.
    Tanh,
    /// What an activation makes of it.
    Of(Activation),
}

impl HeadActivation {
    /// Changes a row.
    pub(crate) fn apply(self, row: &mut [f32]) {
        for x in row {
            *x = match self {
                Self::Identity => *x,
                Self::Tanh => x.tanh(),
                Self::Of(activation) => activation.apply(*x),
            };
        }
    }
}

impl HeadConfig {
    /// Its weight, `[out_features, in_features]`. It is small, so it is multiplied exactly.
    pub(crate) fn matrix(&self) -> Matrix {
        Matrix::new(WeightId::global(self.role), [self.out_features, self.in_features], self.bias).exact()
    }
}

impl EmbeddingConfig {
    /// Of a model that scores pairs of texts; its last head has one value, unless logits are its score.
    pub(crate) fn scores(pooling: Pooling, heads: Vec<HeadConfig>, activation: ScoreActivation) -> Self {
        Self {
            pooling,
            heads,
            prompts: Vec::new(),
            default_prompt: None,
            max_input_len: None,
            lower_case: false,
            dimensions: 1,
            score: Some(activation),
            logits: None,
            template: None,
        }
    }

    /// Whether a model of this decoder can be told two texts, as these write them.
    pub(crate) fn check_pairs(
        &self,
        (template, tokenizer): (Option<&ChatTemplate>, &Tokenizer),
        decoder: &DecoderConfig,
    ) -> Result<(), EngineError> {
        if let Some(pair) = &self.template {
            return pair.check(template, self.prompt(None)?);
        }
        if decoder.positions.is_some_and(|positions| positions.num_token_types == 1) && tokenizer.tells_pairs_apart() {
            return Err(EngineError::NotSupported(
                "the tokenizer gives tokens of a second text another kind (token_type_ids), and the model has one kind \
                 (type_vocab_size is 1): leave token_type_ids out of model_input_names in tokenizer_config.json"
                    .into(),
            ));
        }
        Ok(())
    }

    /// Whether the vector is made of more than the hidden state of the last token.
    pub(crate) fn needs_all_tokens(&self) -> bool {
        self.pooling != Pooling::Last
    }

    /// Values of the widest vector between pooling and the end; 0 without heads.
    pub(crate) fn widest_head(&self) -> usize {
        let of_logits = self.logits.map(|logits| logits.in_features);
        self.heads.iter().map(|head| head.in_features.max(head.out_features)).chain(of_logits).max().unwrap_or(0)
    }

    /// The text that goes before an input; an error names those that there are.
    pub(crate) fn prompt(&self, name: Option<&str>) -> Result<Option<&str>, EngineError> {
        let Some(name) = name.or(self.default_prompt.as_deref()) else { return Ok(None) };
        let found = self.prompts.iter().find(|(known, _)| known == name);
        found.map(|(_, text)| Some(text.as_str())).ok_or_else(|| {
            let shown: String = name.chars().take(40).collect();
            let names: Vec<_> = self.prompts.iter().map(|(name, _)| format!("{name:?}")).collect();
            EngineError::InvalidArgument(match names.len() {
                0 => format!("prompt_name is {shown:?}, and the model has no prompts: leave it out"),
                _ => format!("prompt_name is {shown:?}; the model's prompts are {}", names.join(", ")),
            })
        })
    }
}

/// Makes the length of a vector 1; what has none stays as it is.
pub(crate) fn normalize(vector: &mut [f32]) {
    let square: f64 = vector.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    let length = square.sqrt();
    if length > 0.0 && length.is_finite() {
        for value in vector {
            *value = (f64::from(*value) / length) as f32;
        }
    }
}
