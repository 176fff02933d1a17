//! Heads that predict further tokens (multi-token prediction): a layer of its own behind those of a model, which goes on from the
//! model's hidden states (DeepSeek-V3, arXiv:2412.19437, section 2.2).
//!
//! With h the hidden state of token i behind the output norm, and e the embedding of token i + 1, the layer's input is
//! `input * [norm(e); norm(h)]`. Its own output, normalized and through the model's output projection, gives the logits of token
//! i + 2. For the tokens after that, the head takes its own normalized output in place of the model's, and so on.

use device::{Linear, Norm, Phases, Projection, StepMetadata, Tensor};

use super::{config::DecoderConfig, part::Weights};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId, WeightSource},
};

/// What a head begins with.
pub(crate) struct Fusion {
    embedding_norm: Norm,
    hidden_norm: Norm,
    /// `[hidden_size, 2 * hidden_size]`.
    input: Linear,
}

impl Fusion {
    /// Of the layer with this number, of this width.
    pub(crate) fn new(weights: &mut dyn Weights, layer: usize, hidden: usize) -> Result<Self, EngineError> {
        let id = |role| WeightId::layer(layer, role);
        Ok(Self {
            embedding_norm: weights.norm(id(Role::MtpEmbeddingNorm), [1, hidden])?,
            hidden_norm: weights.norm(id(Role::MtpHiddenNorm), [1, hidden])?,
            input: weights.linear(&Matrix::new(id(Role::MtpInput), [hidden, 2 * hidden], false))?,
        })
    }

    /// Turns token embeddings, `[num_tokens, hidden_size]`, into the layer's input. `before` writes the hidden state of the token
    /// before that of a row; `both` is a buffer of twice the columns. The host puts it together.
    pub(crate) fn run(
        &self,
        backend: &dyn Phases,
        hidden: &mut Tensor,
        both: &mut Tensor,
        before: &mut dyn FnMut(usize, &mut [f32]),
        step: &StepMetadata,
    ) {
        let cols = hidden.cols();
        backend.fetch(hidden);
        both.set_rows(hidden.rows());
        for row in 0..hidden.rows() {
            let (embedding, state) = both.row_mut(row).split_at_mut(cols);
            embedding.copy_from_slice(hidden.row(row));
            self.embedding_norm.apply(embedding);
            before(row, state);
            self.hidden_norm.apply(state);
        }
        backend.store(both);
        backend.norm_linear(both, None, &mut [Projection { linear: &self.input, out: hidden }], step);
    }
}

/// The configuration of the first head behind a model's layers: one more layer like the last that has attention.
///
/// # Errors
/// [`EngineError::NotSupported`] for a model without heads, one whose files leave them out, or one of whose heads nothing is
/// computed; the text says what works instead.
pub(crate) fn head_config(model: &DecoderConfig, weights: Option<&WeightSource>) -> Result<DecoderConfig, EngineError> {
    let refused = |why: String| {
        let others = "speculative=\"auto\" guesses without them, and which_draft (--draft-model) by a smaller model";
        Err(EngineError::NotSupported(format!("{why}: leave mtp_model and mtp_n_predict (--mtp) out; {others}")))
    };
    let name = model.architecture;
    let layer = model.layers.len();
    let last = model.layers.iter().rfind(|layer| layer.has_attention && layer.recurrent.is_none());
    let Some(last) = last.copied().filter(|_| model.num_mtp_layers > 0) else {
        return refused(format!("this {name} has no heads that predict further tokens (num_nextn_predict_layers)"));
    };
    if let Some(weights) = weights {
        let id = WeightId::layer(layer, Role::MtpInput);
        if !weights.contains(id) {
            let (path, tensor) = (weights.path().display(), weights.name(id));
            return refused(format!(
                "{path}: the head that predicts further tokens was left out, for there is no tensor `{tensor}`"
            ));
        }
    }
    Ok(DecoderConfig { layers: vec![last], head_layer: Some(layer), ..model.clone() })
}
