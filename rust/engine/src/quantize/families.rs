//! The families of which GGUF files are made, and what their metadata has beside that of a llama.

use super::entries::Value;
use device::RouterScore;

use crate::{
    EngineError,
    model::{
        DecoderConfig,
        config::{ExpertsConfig, LayerConfig},
    },
    weights::Role,
};

/// A family, as llama.cpp's converter writes it.
pub(super) struct Family {
    /// Its name here: `model_type`.
    pub name: &'static str,
    /// How it says which layers have a window.
    pub windows: Windows,
    /// Parts that have their other name ([`WeightId::gguf_otherwise`](crate::weights::WeightId::gguf_otherwise)).
    pub otherwise: &'static [Role],
    /// The epsilon has the key of the other kind of norm.
    pub calls_norm_rms: bool,
    /// Further metadata, without the prefix.
    pub own: fn(&DecoderConfig) -> Vec<(&'static str, Value)>,
}

/// How a family says which layers have a window.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// Not at all: they are always the same ones.
    Implied,
    /// Each but every so many, which need not be said if it is the usual number.
    Period(u32),
    /// One flag a layer.
    Flags,
    /// There is always a key, 0 without a window.
    Always,
}

const fn family(name: &'static str) -> Family {
    Family { name, windows: Windows::Implied, otherwise: &[], calls_norm_rms: false, own: |_| Vec::new() }
}

/// All of them.
pub(super) const FAMILIES: [Family; 47] = [
    family("llama"),
    family("mistral"),
    family("qwen2"),
    family("qwen3"),
    Family { windows: Windows::Period(6), ..family("gemma3") },
    Family { windows: Windows::Always, ..family("phi3") },
    family("gemma"),
    Family { own: gemma2, ..family("gemma2") },
    family("starcoder2"),
    family("phi"),
    Family { own: stablelm, ..family("stablelm") },
    family("olmo2"),
    Family { windows: Windows::Flags, ..family("olmo3") },
    family("smollm3"),
    family("glm4"),
    family("glm"),
    Family { own: granite, ..family("granite") },
    Family { windows: Windows::Flags, own: granite_swa, ..family("granite_swa") },
    Family { own: cohere, ..family("cohere") },
    Family { own: cohere, ..family("cohere2") },
    Family { own: ministral3, ..family("ministral3") },
    family("hunyuan_v1_dense"),
    Family { otherwise: &[Role::FfnNorm], ..family("seed_oss") },
    family("ernie4_5"),
    Family { windows: Windows::Flags, ..family("exaone4") },
    family("nemotron"),
    family("arcee"),
    family("jais2"),
    family("mixtral"),
    family("qwen2_moe"),
    family("qwen3_moe"),
    Family { windows: Windows::Flags, ..family("mellum") },
    Family { windows: Windows::Always, calls_norm_rms: true, ..family("phimoe") },
    family("olmoe"),
    family("dots1"),
    Family { otherwise: &[Role::FfnNorm], ..family("glm4_moe") },
    Family { otherwise: &[Role::FfnNorm], ..family("solar_open") },
    Family { otherwise: &[Role::RouterCorrection], ..family("hy_v3") },
    family("hunyuan_v1_moe"),
    Family { own: |_| vec![("interleave_moe_layer_step", Value::U32(1))], ..family("ernie4_5_moe") },
    Family { windows: Windows::Flags, ..family("exaone_moe") },
    family("minimax_m2"),
    Family { own: olmo, ..family("olmo") },
    family("exaone"),
    Family { own: minicpm, ..family("minicpm") },
    family("orion"),
    family("xverse"),
];

/// What a mixture of experts has, which begins with that layer.
pub(super) fn experts(first: usize, experts: &ExpertsConfig) -> Result<Vec<(&'static str, Value)>, EngineError> {
    let size = |n: usize| u32::try_from(n).map(Value::U32).map_err(|_| EngineError::Load(format!("a size of {n}")));
    let (rule, width) = (experts.rule, experts.intermediate_size);
    let mut entries = vec![
        ("expert_count", size(experts.num_experts)?),
        ("expert_used_count", size(rule.num_chosen)?),
        ("expert_feed_forward_length", size(width)?),
    ];
    if first > 0 {
        entries.push(("leading_dense_block_count", size(first)?));
    }
    if let Some(shared) = experts.shared {
        entries.push(("expert_shared_feed_forward_length", size(shared.intermediate_size)?));
        entries.push(("expert_shared_count", size(shared.intermediate_size / width.max(1))?));
    }
    if rule.score == RouterScore::Sigmoid {
        entries.push(("expert_gating_func", Value::U32(2)));
    }
    if rule.score != RouterScore::SoftmaxOfChosen {
        entries.push(("expert_weights_norm", Value::Bool(rule.normalize.is_some())));
    }
    if rule.scale.to_bits() != 1_f32.to_bits() {
        entries.push(("expert_weights_scale", Value::F32(rule.scale)));
    }
    if let Some(groups) = rule.groups {
        entries.push(("expert_group_count", size(groups.num_groups)?));
        entries.push(("expert_group_used_count", size(groups.num_chosen)?));
    }
    Ok(entries)
}

fn first(config: &DecoderConfig) -> Option<&LayerConfig> {
    config.layers.first()
}

fn gemma2(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let cap = first(config).and_then(|layer| layer.attention.softcap);
    cap.map(|cap| ("attn_logit_softcapping", Value::F32(cap))).into_iter().collect()
}

fn stablelm(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    vec![("use_parallel_residual", Value::Bool(first(config).is_some_and(|layer| layer.is_parallel)))]
}

fn granite(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let of_layers = first(config).into_iter().flat_map(|layer| {
        [("attention.scale", Value::F32(layer.attention.scale)), ("residual_scale", Value::F32(layer.residual_scale))]
    });
    // Logits are divided.
    let of_model =
        [("embedding_scale", Value::F32(config.embedding_scale)), ("logit_scale", Value::F32(config.logit_scale.recip()))];
    of_layers.chain(of_model).collect()
}

fn olmo(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let clip = first(config).and_then(|layer| layer.attention.clip);
    clip.map(|clip| ("attention.clamp_kqv", Value::F32(clip))).into_iter().collect()
}

/// Scores are as ever.
fn minicpm(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    granite(config).into_iter().filter(|(key, _)| *key != "attention.scale").collect()
}

fn granite_swa(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let rotates = config.layers.iter().map(|layer| layer.attention.rope.is_some()).collect();
    granite(config).into_iter().chain([("attention.rope_pattern", Value::Bools(rotates))]).collect()
}

fn cohere(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    vec![("logit_scale", Value::F32(config.logit_scale))]
}

fn ministral3(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let Some(scale) = first(config).and_then(|layer| layer.attention.q_scale) else { return Vec::new() };
    vec![("attention.temperature_scale", Value::F32(scale.beta)), ("attention.temperature_length", Value::U32(scale.length))]
}
