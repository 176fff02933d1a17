//! What the weights of a conformer are called.

/// Behind what all of their names begin with.
#[derive(Debug, PartialEq, Eq)]
pub struct ConformerNames {
    /// One that is always there.
    pub first: &'static str,
    /// The two convolutions before the layers, and the norms behind them.
    pub convolutions: [[&'static str; 2]; 2],
    /// The matrix behind those.
    pub input: &'static str,
    /// The matrix behind the layers.
    pub output: &'static str,
    /// Before the number of a layer. The others are a layer's.
    pub layers: &'static str,
    /// Of both feed-forward networks: the norm before, the matrices up and down, the norm behind.
    pub ffns: [[&'static str; 4]; 2],
    /// Norms before attention and behind it.
    pub attention_norms: [&'static str; 2],
    /// Queries, keys, values, and what is behind attention.
    pub attention: [&'static str; 4],
    /// The matrix of positions.
    pub relative: &'static str,
    /// The factors of queries.
    pub scale: &'static str,
    /// Those have been through softplus.
    pub is_scale_soft: bool,
    /// Of the convolution over time: the norm and the matrix before, the kernel, the norm and the matrix behind.
    pub light: [&'static str; 5],
    /// The norm that ends a layer.
    pub out_norm: &'static str,
    /// Behind the names of matrices whose products may be bounded, which are parts of other things.
    pub matrix: &'static str,
}

const LIGHT: [&str; 5] = [
    "lconv1d.pre_layer_norm",
    "lconv1d.linear_start",
    "lconv1d.depthwise_conv1d.weight",
    "lconv1d.conv_norm",
    "lconv1d.linear_end",
];

macro_rules! ffn {
    ($place:literal) => {
        [
            concat!($place, ".pre_layer_norm"),
            concat!($place, ".ffw_layer_1"),
            concat!($place, ".ffw_layer_2"),
            concat!($place, ".post_layer_norm"),
        ]
    };
}

/// Of Gemma 4.
pub const GEMMA4: ConformerNames = ConformerNames {
    first: "output_proj.weight",
    convolutions: [
        ["subsample_conv_projection.layer0.conv", "subsample_conv_projection.layer0.norm"],
        ["subsample_conv_projection.layer1.conv", "subsample_conv_projection.layer1.norm"],
    ],
    input: "subsample_conv_projection.input_proj_linear",
    output: "output_proj",
    layers: "layers.",
    ffns: [ffn!("feed_forward1"), ffn!("feed_forward2")],
    attention_norms: ["norm_pre_attn", "norm_post_attn"],
    attention: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.post"],
    relative: "self_attn.relative_k_proj",
    scale: "self_attn.per_dim_scale",
    is_scale_soft: false,
    light: LIGHT,
    out_norm: "norm_out",
    matrix: ".linear",
};

/// Of Gemma 3n, which has no matrix behind the layers.
pub const GEMMA3N: ConformerNames = ConformerNames {
    first: "subsample_conv_projection.input_proj_linear.weight",
    convolutions: [
        ["subsample_conv_projection.conv_0.conv", "subsample_conv_projection.conv_0.norm"],
        ["subsample_conv_projection.conv_1.conv", "subsample_conv_projection.conv_1.norm"],
    ],
    layers: "conformer.",
    ffns: [ffn!("ffw_layer_start"), ffn!("ffw_layer_end")],
    attention_norms: ["attention.pre_attn_norm", "attention.post_norm"],
    attention: ["attention.attn.q_proj", "attention.attn.k_proj", "attention.attn.v_proj", "attention.post"],
    relative: "attention.attn.relative_position_embedding.pos_proj",
    scale: "attention.attn.per_dim_scale",
    out_norm: "norm",
    matrix: "",
    ..GEMMA4
};
