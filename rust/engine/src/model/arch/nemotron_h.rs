//! Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without rotation, a feed-forward network without a gate, or a
//! mixture of such, and has one norm.

use device::{Activation, ExpertActivation, ExpertGroups, RopeStyle, RouterScore};
use serde_json::json;

use super::{Architecture, deepseek, mamba};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, DenseConfig, ExpertsConfig, FfnConfig, LayerConfig, RecurrentConfig, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role},
};

const NAMES: Names = &[
    (Role::Embedding, "model.embeddings"),
    (Role::OutputNorm, "model.norm_f"),
    (Role::AttnNorm, "norm"),
    (Role::AttnQ, "mixer.q_proj"),
    (Role::AttnK, "mixer.k_proj"),
    (Role::AttnV, "mixer.v_proj"),
    (Role::AttnOutput, "mixer.o_proj"),
    (Role::MixInput, "mixer.in_proj"),
    (Role::Conv, "mixer.conv1d"),
    (Role::MixDtBias, "mixer.dt_bias$"),
    (Role::MixDecay, "mixer.A_log$"),
    (Role::MambaD, "mixer.D$"),
    (Role::MixNorm, "mixer.norm"),
    (Role::MixOutput, "mixer.out_proj"),
    (Role::FfnUp, "mixer.up_proj"),
    (Role::FfnDown, "mixer.down_proj"),
    (Role::Router, "mixer.gate"),
    (Role::RouterCorrection, "mixer.gate.e_score_correction_bias$"),
    (Role::ExpertUp, "mixer.experts.*.up_proj"),
    (Role::ExpertDown, "mixer.experts.*.down_proj"),
    (Role::SharedUp, "mixer.shared_experts.up_proj"),
    (Role::SharedDown, "mixer.shared_experts.down_proj"),
    (Role::LatentDown, "mixer.fc1_latent_proj"),
    (Role::LatentUp, "mixer.fc2_latent_proj"),
];

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["nemotron_h"],
    class: "NemotronHForCausalLM",
    gguf: "nemotron_h",
    names: NAMES,
    from_hf,
    from_gguf: |fields| {
        let config = fields.decoder("nemotron_h", RopeStyle::Neox)?;
        read_gguf(config, fields, |ffn| ffn)
    },
};

/// As GGUF files call those with experts; folders of the hub call both alike.
pub(super) const MOE: Architecture = Architecture {
    model_types: &["nemotron_h_moe", "nemotron_h"],
    class: "NemotronHForCausalLM",
    gguf: "nemotron_h_moe",
    names: NAMES,
    from_hf,
    from_gguf: |fields| {
        let (config, mut experts) = fields.mixture("nemotron_h_moe", RopeStyle::Neox)?;
        experts = with_plain_experts(experts.scored(RouterScore::Sigmoid));
        experts.rule.normalize = experts.rule.normalize.map(|_| deepseek::EPS);
        deepseek::set_by_two_best(&mut experts);
        experts.latent_size = fields.size("moe_latent_size")?;
        read_gguf(config, fields, |_| FfnConfig::Experts(experts))
    },
};

/// What a layer is.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Mamba,
    Attention,
    Dense,
    Experts,
}

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = &with_usual_keys(fields);
    let kinds = kinds(fields)?;
    if let Some(num_layers) = fields.size("num_hidden_layers")?.filter(|n| *n != kinds.len()) {
        return Err(fields.error("num_hidden_layers", format!("is {num_layers}; there are kinds of {} layers", kinds.len())));
    }
    let fields = &fields.with_defaults(&json!({"num_hidden_layers": kinds.len()}));
    let config = fields.decoder("nemotron_h")?;
    fields.only_text("mamba_hidden_act", "silu")?;
    if fields.flag("mamba_proj_bias")? == Some(true) {
        return Err(fields.error("mamba_proj_bias", "is true; it is `use_bias` that says so of this family"));
    }
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    // Transformers takes `time_step_min` for the lower bound of steps, which is that of what training begins with; the code
    // beside the weights, vLLM and llama.cpp do not.
    let sizes = [size("mamba_num_heads", 128)?, size("mamba_head_dim", 64)?, size("ssm_state_size", 128)?];
    let mamba = mamba::read_plain(fields, &config, sizes)?;
    // Files of models without experts have keys for some.
    let experts = read_experts(fields)?;
    if kinds.contains(&Kind::Experts) && fields.flag("mlp_bias")? == Some(true) {
        return Err(fields.error("mlp_bias", "is true; experts with biases are not implemented for this family"));
    }
    let activation = fields.activation(Activation::Relu2)?;
    let experts = ExpertsConfig { activation: ExpertActivation::Plain(activation), ..experts };
    Ok(with_kinds(config, &kinds, mamba, |_| FfnConfig::Experts(experts)))
}

/// With keys under the names that other families have for them, and what they mean where they are absent.
fn with_usual_keys<'a>(fields: &HfFields<'a>) -> HfFields<'a> {
    let mut fields = fields.with_defaults(&json!({"mlp_hidden_act": "relu2"})).renamed(&[("mlp_hidden_act", "hidden_act")]);
    for (own, usual) in [("layer_norm_epsilon", "rms_norm_eps"), ("attention_head_dim", "head_dim")] {
        let is_there = usual == "head_dim" && fields.value(usual).is_some();
        if let Some(value) = fields.value(own).filter(|_| !is_there) {
            fields.object.insert(usual.into(), value);
        }
    }
    fields.with_defaults(&json!({"rms_norm_eps": 1e-5, "head_dim": 128}))
}

/// The kinds of all layers, in words or as a letter each.
fn kinds(fields: &HfFields<'_>) -> Result<Vec<Kind>, EngineError> {
    let (words, pattern) = ("layers_block_type", "hybrid_override_pattern");
    // It says the same where there are both.
    let letters = fields.text(pattern)?;
    let list = match fields.texts(words)? {
        Some(list) => Some(list),
        None => fields.texts("layer_types")?,
    };
    let of_word = |word: &String| match &word[..] {
        "mamba" | "linear_attention" => Ok(Kind::Mamba),
        "attention" | "full_attention" => Ok(Kind::Attention),
        "mlp" => Ok(Kind::Dense),
        "moe" => Ok(Kind::Experts),
        other => Err(fields.error(words, format!("has `{other}`; implemented: mamba, attention, mlp, moe"))),
    };
    let of_letter = |letter| match letter {
        'M' => Ok(Kind::Mamba),
        '*' => Ok(Kind::Attention),
        '-' => Ok(Kind::Dense),
        'E' => Ok(Kind::Experts),
        other => Err(fields.error(pattern, format!("has `{other}`; implemented: M, *, -, E"))),
    };
    match (list, letters) {
        (Some(list), _) => list.iter().map(of_word).collect(),
        (None, Some(letters)) => letters.chars().map(of_letter).collect(),
        (None, None) => Err(fields.error(pattern, "is missing, and `layers_block_type` as well")),
    }
}

fn read_experts(fields: &HfFields<'_>) -> Result<ExpertsConfig, EngineError> {
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    let sizes = [size("n_routed_experts", 8)?, size("num_experts_per_tok", 2)?, size("moe_intermediate_size", 7688)?];
    let mut experts = with_plain_experts(ExpertsConfig::new(sizes, RouterScore::Sigmoid));
    if let Some(count) = fields.size("n_shared_experts")?.filter(|n| *n != 1) {
        return Err(fields.error("n_shared_experts", format!("is {count}; implemented: 1")));
    }
    let intermediate_size = size("moe_shared_expert_intermediate_size", 7688)?;
    experts.shared = Some(SharedConfig { intermediate_size, is_weighted: false });
    experts.rule.scale = fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    experts.rule.normalize = fields.flag("norm_topk_prob")?.unwrap_or(true).then_some(deepseek::EPS);
    let (num_groups, num_chosen) = (size("n_group", 1)?, size("topk_group", 1)?);
    experts.rule.groups = (num_groups > 1).then_some(ExpertGroups { num_groups, num_chosen, by_two_best: true });
    experts.latent_size = fields.size("moe_latent_size")?;
    Ok(experts)
}

fn with_plain_experts(experts: ExpertsConfig) -> ExpertsConfig {
    ExpertsConfig { activation: ExpertActivation::Plain(Activation::Relu2), has_correction: true, ..experts }
}

/// Layers without keys and values, and without a network, are Mamba-2.
fn read_gguf(
    config: DecoderConfig,
    fields: &GgufFields<'_>,
    network: impl Fn(FfnConfig) -> FfnConfig,
) -> Result<DecoderConfig, EngineError> {
    let num_layers = config.layers.len();
    let lacks = |key| fields.layers_without(key, num_layers);
    let (lacks_attention, lacks_ffn) = (lacks("attention.head_count_kv")?, lacks("feed_forward_length")?);
    let kinds = lacks_attention.into_iter().zip(lacks_ffn).enumerate().map(|(layer, lacks)| match lacks {
        (true, true) => Ok(Kind::Mamba),
        (false, true) => Ok(Kind::Attention),
        (true, false) => Ok(Kind::Dense),
        (false, false) => Err(fields.error(
            "feed_forward_length",
            format!("is there for layer {layer} as `attention.head_count_kv` is; each layer is one of both, or Mamba-2"),
        )),
    });
    let kinds = kinds.take(num_layers).collect::<Result<Vec<_>, _>>()?;
    let mamba = mamba::read_gguf(fields, &config)?;
    let config = config.with_layers(|layer| {
        layer.ffn.set_dense(|dense| dense.activation = Activation::Relu2);
        layer.ffn = network(layer.ffn);
    });
    Ok(with_kinds(config, &kinds, mamba, |ffn| ffn))
}

/// Makes each layer what it is; `experts` are those of layers that are a mixture.
fn with_kinds(
    config: DecoderConfig,
    kinds: &[Kind],
    mamba: RecurrentConfig,
    experts: impl Fn(FfnConfig) -> FfnConfig,
) -> DecoderConfig {
    let mut kinds = kinds.iter();
    config.with_layers(|layer: &mut LayerConfig| {
        let Some(kind) = kinds.next() else { return };
        layer.attention.rope = None;
        layer.has_attention = *kind == Kind::Attention;
        layer.recurrent = (*kind == Kind::Mamba).then_some(mamba);
        layer.ffn = match (kind, layer.ffn) {
            (Kind::Mamba | Kind::Attention, _) => FfnConfig::Nothing,
            (Kind::Experts, ffn) => experts(ffn),
            (Kind::Dense, FfnConfig::Dense(dense)) => FfnConfig::Dense(DenseConfig { is_gated: false, ..dense }),
            (Kind::Dense, ffn) => ffn,
        };
    })
}
