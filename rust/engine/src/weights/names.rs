//! Names of weights: in Hugging Face checkpoints and in GGUF files.

mod mamba;

pub use mamba::MambaRole;

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Role {
    Embedding,
    /// Behind the token embedding.
    EmbeddingNorm,
    /// `[num_positions, hidden_size]`: added to the token embedding.
    Positions,
    /// The rows of their table before that of position 0, which no file has by themselves.
    PositionPadding,
    /// `[num_token_types, hidden_size]`: added to it as well.
    TokenTypes,
    OutputNorm,
    Output,
    /// The first dense layer behind the pooling of an embedding model.
    Dense2,
    /// The second.
    Dense3,
    /// `[hidden_size, hidden_size]`: before the classifier of a model that scores pairs.
    ClassifierDense,
    /// Behind it.
    ClassifierNorm,
    /// `[num_labels, hidden_size]`.
    Classifier,
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
    /// `[num_heads]`: a score of each head without a value.
    AttnSinks,
    AttnOutput,
    /// Of layers that look at the vectors of images.
    Cross(CrossRole),
    /// `[q_rank, hidden_size]`: what queries of latent attention are made of.
    AttnQDown,
    AttnQDownNorm,
    AttnQUp,
    /// `[kv_rank + rope_dim, hidden_size]`: the latent vector, and the part of a key that rotates.
    AttnKvDown,
    AttnKvNorm,
    /// Of each head, `[kv_rank, nope_dim]`: the transpose of what makes keys.
    AttnKeyUp,
    /// Of each head, `[v_dim, kv_rank]`.
    AttnValueUp,
    /// Of each head, one after the other: what makes keys, then what makes values.
    AttnKvUp,
    /// After attention, before the residual addition.
    PostAttnNorm,
    FfnNorm,
    FfnGate,
    FfnUp,
    /// Rows of the gate, then of up.
    FfnGateUp,
    FfnDown,
    /// The numbers of an activation that has its own (xIELU).
    Xielu(XieluRole),
    /// `[num_experts, hidden_size]`.
    Router,
    /// Added to the scores that experts are chosen by.
    RouterCorrection,
    ExpertGate,
    ExpertUp,
    /// Queries of a head, then the gate of what it gives, head by head.
    AttnQAndGate,
    /// The queries among these.
    AttnOwnQ,
    /// The gate among these.
    AttnGate,
    /// Into a recurrent layer: B, C and x of a short convolution, or z, x with B and C, and dt of Mamba-2.
    MixInput,
    ConvB,
    ConvC,
    ConvX,
    MambaZ,
    MambaXbc,
    MambaDt,
    /// `[num_channels, kernel]`.
    Conv,
    MixDtBias,
    /// The rate of decay; of Hugging Face checkpoints the logarithm of its negative.
    MixDecay,
    MambaD,
    /// Of Mamba alone.
    Mamba(MambaRole),
    MixNorm,
    MixOutput,
    DeltaQ,
    DeltaK,
    DeltaV,
    DeltaZ,
    DeltaQkv,
    /// The same with z, by key head.
    DeltaQkvz,
    DeltaB,
    DeltaA,
    /// Both, by key head.
    DeltaBa,
    /// What z, and the rates of decay, are made of.
    DeltaZDown,
    DeltaADown,
    /// Convolutions that lie apart.
    DeltaQConv,
    DeltaKConv,
    DeltaVConv,
    /// Rows of an expert's gate, then of its up.
    ExpertGateUp,
    ExpertDown,
    /// `[latent_size, hidden_size]`: into the space that experts work in, where that is one of their own.
    LatentDown,
    /// `[hidden_size, latent_size]`: out of it.
    LatentUp,
    SharedGate,
    SharedUp,
    SharedGateUp,
    SharedDown,
    /// `[1, hidden_size]`: the weight of the shared expert.
    SharedWeight,
    /// Multiplied into the weights of experts.
    ExpertScales,
    /// Multiplied into the normalised input of the router.
    RouterNorm,
    /// Before the experts, where a shared one has a norm of its own.
    ExpertNorm,
    /// Of the sum of the experts, beside a shared one with norms of its own.
    ExpertSumNorm,
    /// Before that shared expert.
    SharedNorm,
    /// After it.
    SharedSumNorm,
    /// `[vocab_size, num_layers * width]`: what layers are given of a token besides the residual stream.
    LayerTokens,
    /// `[num_layers * width, hidden_size]`: the same of its embedding.
    LayerProjection,
    LayerProjectionNorm,
    /// `[width, hidden_size]`: how a layer takes it.
    LayerInputGate,
    /// `[hidden_size, width]`
    LayerInputOutput,
    LayerInputNorm,
    /// One number that the residual stream is multiplied by behind a layer.
    LayerScale,
    /// Of each residual stream but the first: what makes it of the embedding.
    StreamInput,
    /// The same: what is made of it behind the last layer.
    StreamOutput,
    /// `[num_streams, hidden_size]`: how streams mix.
    StreamRouter,
    StreamRouterNorm,
    StreamPredict,
    StreamCorrect,
    /// Multiplied into the active stream before a layer's input is made of it.
    StreamScale,
    /// `[rank, hidden_size]`: into the branch beside attention.
    BranchInput,
    BranchOutput,
    BranchNorm,
    /// After the feed-forward network, before the residual addition.
    PostFfnNorm,
    /// Of a layer that predicts further tokens: of the token's embedding.
    MtpEmbeddingNorm,
    /// The same: of the hidden state before it.
    MtpHiddenNorm,
    /// `[hidden_size, 2 * hidden_size]`: what it makes of both, the embedding first.
    MtpInput,
    /// What it has in place of the output norm.
    MtpOutputNorm,
}

/// Which of the numbers of an activation that has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum XieluRole {
    Positive,
    Negative,
    Linear,
    Eps,
}

impl XieluRole {
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Positive => ("ffn_xielu_alpha_p$", "mlp.act_fn.alpha_p$"),
            Self::Negative => ("ffn_xielu_alpha_n$", "mlp.act_fn.alpha_n$"),
            Self::Linear => ("ffn_xielu_beta$", "mlp.act_fn.beta$"),
            Self::Eps => ("ffn_xielu_eps$", "mlp.act_fn.eps$"),
        }
    }
}

/// What a weight of a layer that looks at the vectors of images is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CrossRole {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Norm of each head of the queries.
    QNorm,
    /// Norm of each head of the keys.
    KNorm,
    /// Behind attention.
    Output,
    /// One number, by whose tanh what attention gives is multiplied.
    AttnGate,
    /// The same of the feed-forward network behind it.
    FfnGate,
}

impl CrossRole {
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Q => ("cross_attn_q_proj", "cross_attn.q_proj"),
            Self::K => ("cross_attn_k_proj", "cross_attn.k_proj"),
            Self::V => ("cross_attn_v_proj", "cross_attn.v_proj"),
            Self::QNorm => ("cross_attn_q_norm", "cross_attn.q_norm"),
            Self::KNorm => ("cross_attn_k_norm", "cross_attn.k_norm"),
            Self::Output => ("cross_attn_o_proj", "cross_attn.o_proj"),
            Self::AttnGate => ("cross_attn_attn_gate$", "cross_attn_attn_gate$"),
            Self::FfnGate => ("cross_attn_mlp_gate$", "cross_attn_mlp_gate$"),
        }
    }
}

/// The names of an architecture's Hugging Face checkpoints that differ from the usual ones. A `*` stands for the numbers 0, 1,
/// ... of several vectors or of experts; without one, experts are stacked in one tensor. A `$` at the end says that no `.weight`
/// follows, and `_bias` instead of `.bias`. Behind it may be said how stacked matrices lie, as in NumPy: `.T` of their transpose,
/// `.T?` of that unless the shape is of themselves, `[1::2]` of every second row from row 1 on. Without a `$`, a `.T` at the end
/// says that a matrix lies there transposed. A role that is there twice has its second name in checkpoints without the first.
pub type Names = &'static [(Role, &'static str)];

impl Role {
    /// The usual names: in a GGUF file, without `blk.N.` and `.weight`, and in a Hugging Face checkpoint, without
    /// `model.layers.N.` and `.weight`.
    #[allow(clippy::too_many_lines, reason = "a row a role")]
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Embedding => ("token_embd", "model.embed_tokens"),
            Self::EmbeddingNorm => ("token_embd_norm", "model.embedding_norm"),
            Self::Positions => ("position_embd", "model.embed_positions"),
            Self::PositionPadding => ("position_padding", "model.position_padding"),
            Self::TokenTypes => ("token_types", "model.token_type_embeddings"),
            Self::OutputNorm => ("output_norm", "model.norm"),
            Self::Output => ("output", "lm_head"),
            Self::Dense2 => ("dense_2", "dense_2.linear"),
            Self::Dense3 => ("dense_3", "dense_3.linear"),
            Self::ClassifierDense => ("cls", "classifier.dense"),
            Self::ClassifierNorm => ("cls.norm", "head.norm"),
            Self::Classifier => ("cls.output", "score"),
            Self::RopeFreqs => ("rope_freqs", "rope_freqs"),
            Self::RopeFactorsShort => ("rope_factors_short", "rope_factors_short"),
            Self::RopeFactorsLong => ("rope_factors_long", "rope_factors_long"),
            Self::AttnNorm => ("attn_norm", "input_layernorm"),
            Self::AttnQ | Self::AttnQAndGate => ("attn_q", "self_attn.q_proj"),
            Self::AttnK => ("attn_k", "self_attn.k_proj"),
            Self::AttnV => ("attn_v", "self_attn.v_proj"),
            Self::AttnQkv => ("attn_qkv", "self_attn.qkv_proj"),
            Self::AttnQNorm => ("attn_q_norm", "self_attn.q_norm"),
            Self::AttnKNorm => ("attn_k_norm", "self_attn.k_norm"),
            Self::AttnSinks => ("attn_sinks", "self_attn.sinks$"),
            Self::AttnOutput => ("attn_output", "self_attn.o_proj"),
            Self::Cross(role) => role.names(),
            Self::AttnQDown => ("attn_q_a", "self_attn.q_a_proj"),
            Self::AttnQDownNorm => ("attn_q_a_norm", "self_attn.q_a_layernorm"),
            Self::AttnQUp => ("attn_q_b", "self_attn.q_b_proj"),
            Self::AttnKvDown => ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
            Self::AttnKvNorm => ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
            Self::AttnKeyUp => ("attn_k_b", "self_attn.k_b_proj"),
            Self::AttnValueUp => ("attn_v_b", "self_attn.v_b_proj"),
            Self::AttnKvUp => ("attn_kv_b", "self_attn.kv_b_proj"),
            Self::PostAttnNorm => ("post_attention_norm", "post_attention_layernorm"),
            // Called after the attention that precedes it.
            Self::FfnNorm => ("ffn_norm", "post_attention_layernorm"),
            Self::FfnGate => ("ffn_gate", "mlp.gate_proj"),
            Self::FfnUp => ("ffn_up", "mlp.up_proj"),
            Self::FfnGateUp => ("ffn_up", "mlp.gate_up_proj"),
            Self::FfnDown => ("ffn_down", "mlp.down_proj"),
            Self::Xielu(role) => role.names(),
            Self::Router => ("ffn_gate_inp", "mlp.gate"),
            Self::RouterCorrection => ("exp_probs_b.bias$", "mlp.gate.e_score_correction_bias$"),
            Self::ExpertGate => ("ffn_gate_exps", "mlp.experts.*.gate_proj"),
            Self::ExpertUp => ("ffn_up_exps", "mlp.experts.*.up_proj"),
            Self::ExpertGateUp => ("ffn_gate_up_exps", "mlp.experts.*.gate_up_proj"),
            Self::ExpertDown => ("ffn_down_exps", "mlp.experts.*.down_proj"),
            Self::LatentDown => ("ffn_latent_down", "mlp.fc1_latent_proj"),
            Self::LatentUp => ("ffn_latent_up", "mlp.fc2_latent_proj"),
            Self::SharedGate => ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
            Self::SharedUp => ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
            Self::SharedGateUp => ("ffn_gate_up_shexp", "mlp.shared_experts.gate_up_proj"),
            Self::SharedDown => ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
            Self::SharedWeight => ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
            Self::AttnOwnQ => ("attn_q", "self_attn.own_q_proj"),
            Self::AttnGate => ("attn_gate", "self_attn.own_gate_proj"),
            Self::MixInput => ("ssm_in", "mamba.in_proj"),
            Self::ConvB => ("shortconv.b", "conv.b_proj"),
            Self::ConvC => ("shortconv.c", "conv.c_proj"),
            Self::ConvX => ("shortconv.x", "conv.x_proj"),
            Self::MambaZ => ("ssm_z", "mamba.z_proj"),
            Self::MambaXbc => ("ssm_xbc", "mamba.xbc_proj"),
            Self::MambaDt => ("ssm_in_dt", "mamba.dt_proj"),
            Self::Conv => ("ssm_conv1d", "mamba.conv1d"),
            Self::MixDtBias => ("ssm_dt.bias$", "mamba.dt_bias$"),
            Self::MixDecay => ("ssm_a$", "mamba.A_log$"),
            Self::Mamba(role) => role.names(),
            Self::MambaD => ("ssm_d$", "mamba.D$"),
            Self::MixNorm => ("ssm_norm", "mamba.norm"),
            Self::MixOutput => ("ssm_out", "mamba.out_proj"),
            Self::DeltaQ => ("ssm_q", "linear_attn.in_proj_q"),
            Self::DeltaK => ("ssm_k", "linear_attn.in_proj_k"),
            Self::DeltaV => ("ssm_v", "linear_attn.in_proj_v"),
            Self::DeltaZ => ("attn_gate", "linear_attn.in_proj_z"),
            Self::DeltaQkv => ("attn_qkv", "linear_attn.in_proj_qkv"),
            Self::DeltaQkvz => ("attn_qkvz", "linear_attn.in_proj_qkvz"),
            Self::DeltaB => ("ssm_beta", "linear_attn.in_proj_b"),
            Self::DeltaA => ("ssm_alpha", "linear_attn.in_proj_a"),
            Self::DeltaBa => ("ssm_ba", "linear_attn.in_proj_ba"),
            Self::DeltaZDown => ("ssm_g_a", "linear_attn.g_a_proj"),
            Self::DeltaADown => ("ssm_f_a", "linear_attn.f_a_proj"),
            Self::DeltaQConv => ("ssm_conv1d_q", "linear_attn.q_conv1d"),
            Self::DeltaKConv => ("ssm_conv1d_k", "linear_attn.k_conv1d"),
            Self::DeltaVConv => ("ssm_conv1d_v", "linear_attn.v_conv1d"),
            Self::ExpertScales => ("ffn_down_exps.scale$", "router.per_expert_scale$"),
            Self::RouterNorm => ("ffn_gate_inp.scale$", "router.scale$"),
            Self::ExpertNorm => ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            Self::ExpertSumNorm => ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
            Self::SharedNorm => ("ffn_norm", "pre_feedforward_layernorm"),
            Self::SharedSumNorm => ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            Self::LayerTokens => ("per_layer_token_embd", "model.embed_tokens_per_layer"),
            Self::LayerProjection => ("per_layer_model_proj", "model.per_layer_model_projection"),
            Self::LayerProjectionNorm => ("per_layer_proj_norm", "model.per_layer_projection_norm"),
            Self::LayerInputGate => ("inp_gate", "per_layer_input_gate"),
            Self::LayerInputOutput => ("proj", "per_layer_projection"),
            Self::LayerInputNorm => ("post_norm", "post_per_layer_input_norm"),
            Self::LayerScale => ("layer_output_scale", "layer_scalar$"),
            Self::StreamInput => ("altup_proj", "model.altup_projections.*"),
            Self::StreamOutput => ("altup_unembd_proj", "model.altup_unembed_projections.*"),
            Self::StreamRouter => ("altup_router", "altup.modality_router"),
            Self::StreamRouterNorm => ("altup_router_norm", "altup.router_norm"),
            Self::StreamPredict => ("altup_predict_coef", "altup.prediction_coefs"),
            Self::StreamCorrect => ("altup_correct_coef", "altup.correction_coefs"),
            Self::StreamScale => ("altup_correct_scale", "altup.correct_output_scale$"),
            Self::BranchInput => ("laurel_l", "laurel.linear_left"),
            Self::BranchOutput => ("laurel_r", "laurel.linear_right"),
            Self::BranchNorm => ("laurel_post_norm", "laurel.post_laurel_norm"),
            Self::PostFfnNorm => ("post_ffw_norm", "post_feedforward_layernorm"),
            Self::MtpEmbeddingNorm | Self::MtpHiddenNorm | Self::MtpInput | Self::MtpOutputNorm => self.names_of_mtp(),
        }
    }

    /// Of layers that predict further tokens.
    const fn names_of_mtp(self) -> (&'static str, &'static str) {
        match self {
            Self::MtpEmbeddingNorm => ("nextn.enorm", "enorm"),
            Self::MtpHiddenNorm => ("nextn.hnorm", "hnorm"),
            Self::MtpInput => ("nextn.eh_proj", "eh_proj"),
            _ => ("nextn.shared_head_norm", "shared_head.norm"),
        }
    }
}

/// Where a decoder lies in a checkpoint: by itself, or as the language model of one that sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelPlace {
    /// What names begin with in place of `model.`.
    model: &'static str,
    /// What layers are called behind that.
    layers: &'static str,
    /// What stands before all other names.
    others: &'static str,
    /// The layer that predicts further tokens, if it lies apart from the others.
    head: Option<usize>,
}

impl Default for ModelPlace {
    /// A decoder by itself.
    fn default() -> Self {
        Self::ALL[0]
    }
}

impl ModelPlace {
    /// All that are known.
    const ALL: [Self; 26] = [
        Self::at("model.", ""),
        Self::at("model.language_model.", ""),
        Self::at("model.text_model.", ""),
        Self::at("language_model.model.", "language_model."),
        Self::at("model.language_model.model.", "model.language_model."),
        // Mamba and Nemotron-H.
        Self::at("backbone.", ""),
        // As GPT-NeoX and GPT-2 are, by themselves.
        Self::at("gpt_neox.", ""),
        Self { layers: "h.", ..Self::at("transformer.", "") },
        // DBRX.
        Self { layers: "blocks.", ..Self::at("transformer.", "") },
        // OPT and BioGPT.
        Self::at("model.decoder.", ""),
        Self::at("decoder.", ""),
        Self::at("biogpt.", ""),
        // Encoders, by themselves and below a classifier.
        Self { layers: "encoder.layer.", ..Self::at("", "") },
        Self { layers: "encoder.layer.", ..Self::at("bert.", "") },
        Self { layers: "encoder.layer.", ..Self::at("roberta.", "") },
        Self { layers: "encoder.layer.", ..Self::at("new.", "") },
        Self { layers: "encoder.layer.", ..Self::at("gte.", "") },
        Self::at("new.", ""),
        Self::at("gte.", ""),
        Self { layers: "transformer.layer.", ..Self::at("", "") },
        Self { layers: "transformer.layer.", ..Self::at("distilbert.", "") },
        Self { layers: "encoder.layers.", ..Self::at("", "") },
        Self { layers: "encoder.layers.", ..Self::at("bert.", "") },
        Self { layers: "encoder.layers.", ..Self::at("roberta.", "") },
        // Without what gives logits.
        Self { layers: "h.", ..Self::at("", "") },
        Self::at("", ""),
    ];

    /// What token embeddings are called.
    const EMBEDDINGS: [&str; 5] = ["embed_tokens", "embed_in", "word_embeddings", "embeddings", "wte"];

    const fn at(model: &'static str, others: &'static str) -> Self {
        Self { model, layers: "layers.", others, head: None }
    }

    /// With a head that predicts further tokens as this layer, where it lies apart (Qwen3-Next).
    #[must_use]
    pub fn with_head(self, layer: usize, contains: impl Fn(&str) -> bool) -> Self {
        Self { head: contains("mtp.fc.weight").then_some(layer), ..self }
    }

    /// The one at which a checkpoint has a token embedding, and tensors of layers by what their names begin with.
    pub fn find(names: Names, contains: impl Fn(&str) -> bool, has_some: impl Fn(&str) -> bool) -> Self {
        let embedding = WeightId::global(Role::Embedding).hugging_face(names);
        let known = || Self::ALL.iter().filter(|place| contains(&place.name(embedding.clone())));
        let has_layers = |place: &&Self| has_some(&format!("{}{}", place.model, place.layers));
        *known().find(has_layers).or_else(|| known().next()).unwrap_or(&Self::ALL[0])
    }

    /// Whether it is by itself.
    pub fn is_alone(self) -> bool {
        ["model.", "gpt_neox.", "transformer.", "model.decoder.", "biogpt."].contains(&self.model)
    }

    /// What a decoder by itself calls a module of the decoder, wherever that lies; other names stay.
    pub fn plain(name: &str) -> String {
        let is_embedding = |rest: &str| {
            let is_called = |name: &&str| rest.strip_prefix(*name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            rest.starts_with("embed_tokens") || Self::EMBEDDINGS.iter().any(is_called)
        };
        let at = |place: &Self| {
            let within = name.strip_prefix(place.model);
            let within = within.and_then(|rest| match rest.strip_prefix(place.layers) {
                Some(rest) => Some(format!("layers.{rest}")),
                None => is_embedding(rest).then(|| rest.to_owned()),
            });
            let beside = name.strip_prefix(place.others).filter(|rest| rest.starts_with("lm_head"));
            within.map(|rest| format!("model.{rest}")).or(beside.map(str::to_owned))
        };
        Self::ALL.iter().find_map(at).unwrap_or_else(|| name.to_owned())
    }

    /// The name there of what a decoder by itself calls so.
    pub fn name(self, name: String) -> String {
        if let Some(name) = self.name_of_head(&name) {
            return name;
        }
        match name.strip_prefix("model.") {
            Some(rest) => match rest.strip_prefix("layers.") {
                Some(rest) => format!("{}{}{rest}", self.model, self.layers),
                None => format!("{}{rest}", self.model),
            },
            None if self.others.is_empty() => name,
            None => format!("{}{name}", self.others),
        }
    }

    /// That of a tensor of the head that lies apart.
    fn name_of_head(self, name: &str) -> Option<String> {
        let rest = name.strip_prefix("model.layers.")?.strip_prefix(&format!("{}.", self.head?))?;
        Some(match rest.strip_suffix(".weight") {
            Some("enorm") => "mtp.pre_fc_norm_embedding.weight".into(),
            Some("hnorm") => "mtp.pre_fc_norm_hidden.weight".into(),
            Some("eh_proj") => "mtp.fc.weight".into(),
            Some("shared_head.norm") => "mtp.norm.weight".into(),
            _ => format!("mtp.layers.0.{rest}"),
        })
    }
}

/// How the matrix of an expert lies in a tensor of many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The transpose is there.
    pub is_transposed: bool,
    /// Unless the tensor has the shape of what is not transposed.
    pub or_plain: bool,
    /// Its first row among those that are there.
    pub first: usize,
    /// From each of its rows to the next.
    pub step: usize,
}

impl Place {
    /// All rows, one after the other.
    pub fn is_plain(self) -> bool {
        self == Self { is_transposed: false, or_plain: false, first: 0, step: 1 }
    }
}

/// A weight of the whole model, or of one layer.
#[derive(Clone, Copy, Debug)]
pub struct WeightId {
    /// The layer, from 0.
    pub layer: Option<usize>,
    /// The role.
    pub role: Role,
    /// The additive vector instead of the weight.
    pub bias: bool,
}

impl WeightId {
    /// A weight of the whole model.
    pub const fn global(role: Role) -> Self {
        Self { layer: None, role, bias: false }
    }

    /// A weight of a layer.
    pub const fn layer(layer: usize, role: Role) -> Self {
        Self { layer: Some(layer), role, bias: false }
    }

    /// Its bias.
    #[must_use]
    pub const fn bias(self) -> Self {
        Self { bias: true, ..self }
    }

    /// Another weight of the same layer.
    #[must_use]
    pub const fn with_role(self, role: Role) -> Self {
        Self { role, ..self }
    }

    /// Whether it is the matrix of logits, which may be the token embedding too.
    pub const fn is_lm_head(self) -> bool {
        self.layer.is_none() && matches!(self.role, Role::Embedding | Role::Output)
    }

    /// The name in a GGUF file.
    pub fn gguf(self) -> String {
        self.full("blk", self.role.names().0)
    }

    /// The name in GGUF files that lack the usual one: those of before experts were stacked, with a `*` for the expert, and those
    /// of architectures that call a norm after what precedes it.
    pub fn gguf_otherwise(self) -> Option<String> {
        let name = match self.role {
            Role::OutputNorm => "token_embd_norm",
            Role::RouterCorrection => "exp_probs_b$",
            Role::MixInput => "shortconv.in_proj",
            Role::Conv => "shortconv.conv",
            Role::MixOutput => "shortconv.out_proj",
            Role::FfnNorm => "post_attention_norm",
            // Of sums (BERT).
            Role::PostAttnNorm => "attn_output_norm",
            Role::PostFfnNorm => "layer_output_norm",
            // Both in one, where there is no gate.
            Role::SharedGateUp => "ffn_up_shexp",
            // A dense network beside the experts (Gemma 4).
            Role::SharedGate => "ffn_gate",
            Role::SharedUp => "ffn_up",
            Role::SharedDown => "ffn_down",
            Role::ExpertGate => "ffn_gate.*",
            Role::ExpertUp => "ffn_up.*",
            Role::ExpertDown => "ffn_down.*",
            _ => return None,
        };
        Some(self.full("blk", name))
    }

    /// The name in a Hugging Face checkpoint whose architecture has these names of its own.
    pub fn hugging_face(self, names: Names) -> String {
        let own = names.iter().find(|(role, _)| *role == self.role).map(|(_, name)| *name);
        self.full("model.layers", own.unwrap_or(self.role.names().1))
    }

    /// The name in one that lacks that.
    pub fn hugging_face_otherwise(self, names: Names) -> Option<String> {
        let (_, name) = names.iter().filter(|(role, _)| *role == self.role).nth(1)?;
        Some(self.full("model.layers", name))
    }

    /// How stacked matrices lie in the tensor of that name.
    pub fn place(self, names: Names) -> Place {
        let own = names.iter().find(|(role, _)| *role == self.role).map_or(self.role.names().1, |(_, name)| name);
        let place = own.split_once('$').map_or(own.strip_suffix(".T").map_or("", |_| ".T"), |(_, place)| place);
        let (is_transposed, rows) = place.strip_prefix(".T").map_or((false, place), |rows| (true, rows));
        let (or_plain, rows) = rows.strip_prefix('?').map_or((false, rows), |rows| (true, rows));
        let rows = rows.trim_matches(['[', ']']).split_once("::");
        let (first, step) = rows.and_then(|(first, step)| Some((first.parse().ok()?, step.parse().ok()?))).unwrap_or((0, 1));
        Place { is_transposed, or_plain, first, step }
    }

    fn full(self, layers: &str, name: &str) -> String {
        let (name, suffix) = match name.split_once('$') {
            Some((name, _)) => (name, if self.bias { "_bias" } else { "" }),
            None => (name.strip_suffix(".T").unwrap_or(name), if self.bias { ".bias" } else { ".weight" }),
        };
        match self.layer {
            Some(layer) => format!("{layers}.{layer}.{name}{suffix}"),
            None => format!("{name}{suffix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ModelPlace;

    #[test]
    fn a_decoder_s_modules_have_one_name_wherever_it_lies() {
        for place in ModelPlace::ALL {
            let embeddings = ["model.embed_in", "model.word_embeddings", "model.embeddings", "model.wte.weight"];
            for plain in ["model.layers.0.mlp.up_proj", "model.embed_tokens", "lm_head"].into_iter().chain(embeddings) {
                let outer = place.name(plain.to_owned());
                assert_eq!(ModelPlace::plain(&outer), plain, "{outer}");
            }
        }
        assert_eq!(ModelPlace::plain("visual.blocks.0.attn.qkv"), "visual.blocks.0.attn.qkv");
    }
}
