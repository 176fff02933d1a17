//! The weights that a configuration asks for, by role and shape.

use device::DType;

use super::config::DecoderConfig;
use crate::{
    EngineError,
    weights::{Part, WeightId, WeightSource},
};

/// A weight of a decoder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameter {
    /// `None`: of the whole model.
    pub(crate) layer: Option<usize>,
    pub(crate) part: Part,
    /// `[rows, cols]`; a vector is one row.
    pub(crate) shape: [usize; 2],
    /// Its rows are looked up and it is not multiplied by.
    pub(crate) is_looked_up: bool,
    /// Both token embedding and output projection.
    pub(crate) is_tied: bool,
}

impl Parameter {
    /// Whether it is a bias or the weight of a norm.
    pub(crate) fn is_vector(&self) -> bool {
        self.shape[0] == 1
    }

    /// Whether logits are its products.
    pub(crate) fn is_lm_head(&self) -> bool {
        self.is_tied || self.part == Part::Output && !self.is_vector()
    }

    /// How files store it, alone or as rows of a fused matrix. Vectors are floats.
    pub(crate) fn dtype(&self, weights: &WeightSource) -> Result<DType, EngineError> {
        if self.is_vector() {
            return Ok(DType::F32);
        }
        let id = |part| self.layer.map_or(WeightId::global(part), |layer| WeightId::layer(layer, part));
        let fused = match self.part {
            Part::AttnQ | Part::AttnK | Part::AttnV => Some(Part::AttnQkv),
            Part::FfnGate | Part::FfnUp => Some(Part::FfnGateUp),
            _ => None,
        };
        weights.dtype(id(fused.filter(|_| !weights.contains(id(self.part))).unwrap_or(self.part)))
    }
}

/// All weights of a decoder; biases that a checkpoint may have beyond those that its configuration asks for are left out.
pub(crate) fn parameters(config: &DecoderConfig) -> Vec<Parameter> {
    let global = |part, shape| Parameter { layer: None, part, shape, is_looked_up: false, is_tied: false };
    let vocab = [config.vocab_size, config.hidden_size];
    let mut all = vec![global(Part::OutputNorm, [1, config.hidden_size])];
    if config.tie_word_embeddings {
        all.push(Parameter { is_tied: true, ..global(Part::Embedding, vocab) });
    } else {
        all.push(Parameter { is_looked_up: true, ..global(Part::Embedding, vocab) });
        all.push(global(Part::Output, vocab));
    }
    let shapes = layer_shapes(config);
    for layer in 0..config.layers.len() {
        all.extend(shapes.iter().map(|&(part, shape)| Parameter { layer: Some(layer), ..global(part, shape) }));
    }
    all
}

fn layer_shapes(config: &DecoderConfig) -> Vec<(Part, [usize; 2])> {
    let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let mut shapes = vec![
        (Part::AttnNorm, [1, hidden]),
        (Part::AttnQ, [q, hidden]),
        (Part::AttnK, [kv, hidden]),
        (Part::AttnV, [kv, hidden]),
        (Part::AttnOutput, [hidden, q]),
        (Part::FfnNorm, [1, hidden]),
        (Part::FfnGate, [ffn, hidden]),
        (Part::FfnUp, [ffn, hidden]),
        (Part::FfnDown, [hidden, ffn]),
    ];
    if config.qkv_bias {
        // Biases, whichever matrix their checkpoint has.
        shapes.extend([q, kv, kv].map(|rows| (Part::AttnQkv, [1, rows])));
    }
    if config.qk_norm {
        shapes.extend([Part::AttnQNorm, Part::AttnKNorm].map(|part| (part, [1, config.head_dim])));
    }
    if config.sandwich_norms {
        shapes.extend([Part::PostAttnNorm, Part::PostFfnNorm].map(|part| (part, [1, hidden])));
    }
    shapes
}
