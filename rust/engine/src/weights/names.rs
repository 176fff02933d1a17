//! Names of weights: in Hugging Face checkpoints and in GGUF files.

/// A weight by its role in the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Part {
    Embedding,
    OutputNorm,
    Output,
    /// Divisors of the rope frequencies (GGUF only).
    RopeFreqs,
    RopeFactorsShort,
    RopeFactorsLong,
    AttnNorm,
    AttnQ,
    AttnK,
    AttnV,
    /// Rows of q, then k, then v.
    AttnQkv,
    AttnQNorm,
    AttnKNorm,
    AttnOutput,
    /// After attention, before the residual addition.
    PostAttnNorm,
    FfnNorm,
    FfnGate,
    FfnUp,
    /// Rows of the gate, then of up.
    FfnGateUp,
    FfnDown,
    /// After the feed-forward network, before the residual addition.
    PostFfnNorm,
}

impl Part {
    /// The name in a GGUF file, without `blk.N.` and `.weight`.
    const fn gguf(self) -> &'static str {
        match self {
            Self::Embedding => "token_embd",
            Self::OutputNorm => "output_norm",
            Self::Output => "output",
            Self::RopeFreqs => "rope_freqs",
            Self::RopeFactorsShort => "rope_factors_short",
            Self::RopeFactorsLong => "rope_factors_long",
            Self::AttnNorm => "attn_norm",
            Self::AttnQ => "attn_q",
            Self::AttnK => "attn_k",
            Self::AttnV => "attn_v",
            Self::AttnQkv => "attn_qkv",
            Self::AttnQNorm => "attn_q_norm",
            Self::AttnKNorm => "attn_k_norm",
            Self::AttnOutput => "attn_output",
            Self::PostAttnNorm => "post_attention_norm",
            Self::FfnNorm => "ffn_norm",
            Self::FfnGate => "ffn_gate",
            Self::FfnUp | Self::FfnGateUp => "ffn_up",
            Self::FfnDown => "ffn_down",
            Self::PostFfnNorm => "post_ffw_norm",
        }
    }

    /// The name in a Hugging Face checkpoint, without `model.layers.N.` and `.weight`. The norm before the feed-forward network
    /// is called after the attention that precedes it, unless attention has an output norm of its own (`sandwich`).
    const fn hugging_face(self, sandwich: bool) -> &'static str {
        match self {
            Self::Embedding => "model.embed_tokens",
            Self::OutputNorm => "model.norm",
            Self::Output => "lm_head",
            Self::RopeFreqs => "rope_freqs",
            Self::RopeFactorsShort => "rope_factors_short",
            Self::RopeFactorsLong => "rope_factors_long",
            Self::AttnNorm => "input_layernorm",
            Self::AttnQ => "self_attn.q_proj",
            Self::AttnK => "self_attn.k_proj",
            Self::AttnV => "self_attn.v_proj",
            Self::AttnQkv => "self_attn.qkv_proj",
            Self::AttnQNorm => "self_attn.q_norm",
            Self::AttnKNorm => "self_attn.k_norm",
            Self::AttnOutput => "self_attn.o_proj",
            Self::FfnNorm if sandwich => "pre_feedforward_layernorm",
            Self::PostAttnNorm | Self::FfnNorm => "post_attention_layernorm",
            Self::FfnGate => "mlp.gate_proj",
            Self::FfnUp => "mlp.up_proj",
            Self::FfnGateUp => "mlp.gate_up_proj",
            Self::FfnDown => "mlp.down_proj",
            Self::PostFfnNorm => "post_feedforward_layernorm",
        }
    }
}

/// A weight of the whole model, or of one layer.
#[derive(Clone, Copy, Debug)]
pub struct WeightId {
    /// The layer, from 0.
    pub layer: Option<usize>,
    /// The role.
    pub part: Part,
    /// The additive vector instead of the weight.
    pub bias: bool,
}

impl WeightId {
    /// A weight of the whole model.
    pub const fn global(part: Part) -> Self {
        Self { layer: None, part, bias: false }
    }

    /// A weight of a layer.
    pub const fn layer(layer: usize, part: Part) -> Self {
        Self { layer: Some(layer), part, bias: false }
    }

    /// Its bias.
    #[must_use]
    pub const fn bias(self) -> Self {
        Self { bias: true, ..self }
    }

    /// The name in a GGUF file.
    pub fn gguf(self) -> String {
        let suffix = self.suffix();
        match self.layer {
            Some(layer) => format!("blk.{layer}.{}.{suffix}", self.part.gguf()),
            None => format!("{}.{suffix}", self.part.gguf()),
        }
    }

    /// The name in a Hugging Face checkpoint; `sandwich`: the model has norms after attention and feed-forward too.
    pub fn hugging_face(self, sandwich: bool) -> String {
        let suffix = self.suffix();
        match self.layer {
            Some(layer) => format!("model.layers.{layer}.{}.{suffix}", self.part.hugging_face(sandwich)),
            None => format!("{}.{suffix}", self.part.hugging_face(sandwich)),
        }
    }

    const fn suffix(self) -> &'static str {
        if self.bias { "bias" } else { "weight" }
    }
}
