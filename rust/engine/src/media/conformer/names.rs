//! What the weights of a conformer are called.

use super::config::ConformerStyle;

/// Behind what all of their names begin with.
pub(super) struct Names {
    /// One that is always there.
    pub(super) first: &'static str,
    pub(super) convolutions: [&'static str; 2],
    pub(super) layers: &'static str,
    pub(super) ffns: [&'static str; 2],
    pub(super) pre_attn: &'static str,
    pub(super) post_attn: &'static str,
    /// Queries, keys, values, and what is behind attention.
    pub(super) attention: [&'static str; 4],
    pub(super) relative: &'static str,
    pub(super) scale: &'static str,
    pub(super) out_norm: &'static str,
    /// Behind the names of matrices, which are parts of other things.
    pub(super) matrix: &'static str,
}

const GEMMA4: Names = Names {
    first: "output_proj.weight",
    convolutions: ["subsample_conv_projection.layer0.", "subsample_conv_projection.layer1."],
    layers: "layers",
    ffns: ["feed_forward1", "feed_forward2"],
    pre_attn: "norm_pre_attn",
    post_attn: "norm_post_attn",
    attention: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.post"],
    relative: "self_attn.relative_k_proj",
    scale: "self_attn.per_dim_scale",
    out_norm: "norm_out",
    matrix: ".linear",
};

const GEMMA3N: Names = Names {
    first: "subsample_conv_projection.input_proj_linear.weight",
    convolutions: ["subsample_conv_projection.conv_0.", "subsample_conv_projection.conv_1."],
    layers: "conformer",
    ffns: ["ffw_layer_start", "ffw_layer_end"],
    pre_attn: "attention.pre_attn_norm",
    post_attn: "attention.post_norm",
    attention: ["attention.attn.q_proj", "attention.attn.k_proj", "attention.attn.v_proj", "attention.post"],
    relative: "attention.attn.relative_position_embedding.pos_proj",
    scale: "attention.attn.per_dim_scale",
    out_norm: "norm",
    matrix: "",
};

impl ConformerStyle {
    pub(super) fn names(self) -> &'static Names {
        match self {
            Self::Gemma4 => &GEMMA4,
            Self::Gemma3n { .. } => &GEMMA3N,
        }
    }
}
