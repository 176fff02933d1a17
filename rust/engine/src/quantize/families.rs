//! The families of which GGUF files are made, and what their metadata has beside that of a llama.

use super::entries::Value;
use device::RouterScore;

use crate::{
    EngineError,
    model::{
        DecoderConfig, RopeScaling,
        config::{AttentionConfig, ExpertsConfig, FfnConfig, LayerConfig, RecurrentConfig},
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
    /// Gate and up of feed-forward networks are one in folders, and two in files.
    pub cuts_ffn: bool,
    /// So are queries, keys and values.
    pub cuts_qkv: bool,
    /// Layers say how many key and value heads they have, the recurrent ones none.
    pub counts_heads: bool,
    /// Layers say how wide their networks are, those without one 0.
    pub counts_widths: bool,
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
    Family {
        name,
        windows: Windows::Implied,
        otherwise: &[],
        cuts_ffn: false,
        cuts_qkv: false,
        counts_heads: false,
        counts_widths: false,
        calls_norm_rms: false,
        own: |_| Vec::new(),
    }
}

/// All of them.
pub(super) const FAMILIES: [Family; 73] = [
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
    Family { own: parallel, ..family("stablelm") },
    family("olmo2"),
    Family { windows: Windows::Flags, ..family("olmo3") },
    family("smollm3"),
    family("glm4"),
    family("glm"),
    Family { cuts_ffn: true, own: granite, ..family("granite") },
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
    family("gpt2"),
    family("gpt_bigcode"),
    Family { own: minicpm, ..family("minicpm") },
    family("orion"),
    family("xverse"),
    Family { own: latent, ..family("deepseek_v2") },
    Family { own: latent, ..family("deepseek_v3") },
    Family { own: latent, ..family("glm4_moe_lite") },
    Family { own: |config| [latent(config), ministral3(config)].concat(), ..family("mistral4") },
    Family { otherwise: &[Role::FfnNorm], ..family("gpt_oss") },
    Family { own: llama4, ..family("llama4_text") },
    Family { cuts_ffn: true, own: granite, ..family("granitemoe") },
    Family { cuts_ffn: true, counts_heads: true, own: granite_hybrid, ..family("granitemoehybrid") },
    Family { otherwise: &LFM2, counts_heads: true, ..family("lfm2") },
    Family { otherwise: &LFM2, counts_heads: true, ..family("lfm2_moe") },
    Family { otherwise: &[Role::FfnNorm], own: qwen3_next, ..family("qwen3_next") },
    Family { otherwise: &[Role::FfnNorm], own: qwen3_next, ..family("qwen3_5_text") },
    Family { otherwise: &[Role::FfnNorm], own: qwen3_next, ..family("qwen3_5_moe_text") },
    family("afmoe"),
    Family { own: |_| vec![("tensor_data_layout", Value::Text("jploski".into()))], ..family("falcon") },
    Family { own: parallel, ..family("gpt_neox") },
    Family { windows: Windows::Flags, cuts_ffn: true, own: granite_swa, ..family("granitemoe_swa") },
    Family { cuts_qkv: true, ..family("internlm2") },
    family("internlm3"),
    Family { cuts_qkv: true, ..family("bailing_moe") },
    family("bailing_moe_v2"),
    family("sarvam_moe"),
    Family { counts_heads: true, counts_widths: true, ..family("nemotron_h") },
    Family { counts_heads: true, counts_widths: true, own: nemotron_h_moe, ..family("nemotron_h_moe") },
];

/// The name of the family as which a model is written, which may be that of a plainer one.
pub(super) fn name(config: &DecoderConfig) -> &'static str {
    let is_attentive = config.layers.iter().all(|layer| layer.has_attention);
    match config.architecture {
        "granitemoehybrid" if is_attentive && config.layers.iter().any(|layer| layer.ffn.num_experts() > 0) => "granitemoe",
        "granitemoehybrid" if is_attentive => "granite",
        "nemotron_h" if config.layers.iter().any(|layer| layer.ffn.num_experts() > 0) => "nemotron_h_moe",
        name => name,
    }
}

/// What LFM2's files call otherwise.
const LFM2: [Role; 4] = [Role::OutputNorm, Role::MixInput, Role::Conv, Role::MixOutput];

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

/// What layers with a state have.
pub(super) fn recurrent(config: &RecurrentConfig, hidden: usize) -> Vec<(&'static str, usize)> {
    let ssm = |kernel, state_dim, groups, heads| {
        vec![
            ("ssm.conv_kernel", kernel),
            ("ssm.state_size", state_dim),
            ("ssm.group_count", groups),
            ("ssm.time_step_rank", heads),
            ("ssm.inner_size", config.width(hidden)),
        ]
    };
    match *config {
        // No family of it is made into a file.
        RecurrentConfig::Mamba { .. } => Vec::new(),
        RecurrentConfig::ShortConv { kernel } => vec![("shortconv.l_cache", kernel)],
        RecurrentConfig::Mamba2 { num_heads, num_groups, state_dim, kernel, .. } => ssm(kernel, state_dim, num_groups, num_heads),
        RecurrentConfig::GatedDelta { num_key_heads, num_value_heads, key_dim, kernel, .. } => {
            ssm(kernel, key_dim, num_key_heads, num_value_heads)
        }
    }
}

/// Latent attention.
fn latent(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let Some((attention, latent)) = first(config).and_then(|layer| Some((layer.attention, layer.attention.latent?))) else {
        return Vec::new();
    };
    let size = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut entries = vec![
        ("attention.kv_lora_rank", size(latent.kv_rank)),
        ("attention.key_length_mla", size(latent.nope_dim + latent.rope_dim)),
        ("attention.value_length_mla", size(latent.v_dim)),
    ];
    entries.extend(latent.q_rank.map(|rank| ("attention.q_lora_rank", size(rank))));
    if let Some(multiplier) = log_multiplier(&attention, config) {
        entries.push(("rope.scaling.yarn_log_multiplier", Value::F32(multiplier)));
    }
    let experts = config.layers.iter().find_map(|layer| match layer.ffn {
        FfnConfig::Experts(experts) => Some(experts),
        FfnConfig::Dense(_) | FfnConfig::Nothing => None,
    });
    if let Some(experts) = experts.filter(|experts| experts.rule.groups.is_none()) {
        entries.extend([("expert_group_count", Value::U32(1)), ("expert_group_used_count", Value::U32(1))]);
        if experts.rule.scale.to_bits() == 1_f32.to_bits() {
            entries.push(("expert_weights_scale", Value::F32(1.0)));
        }
    }
    entries
}

/// By how much the logarithm of yarn's factor raises the root of the scale of latent attention's scores.
pub(super) fn log_multiplier(attention: &AttentionConfig, config: &DecoderConfig) -> Option<f32> {
    let (latent, rope) = (attention.latent?, &config.ropes[attention.rope?]);
    let RopeScaling::Yarn { factor, .. } = rope.scaling else { return None };
    let scale = f64::from(attention.scale) * ((latent.nope_dim + latent.rope_dim) as f64).sqrt();
    let multiplier = (scale.sqrt() - 1.0) / factor.ln();
    (factor > 1.0 && multiplier > 1e-6).then_some(multiplier as f32)
}

/// Every so many layers have experts, and by default rotate.
fn llama4(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let step = config.layers.iter().position(|layer| layer.ffn.num_experts() > 0).map_or(1, |first| first + 1);
    vec![("interleave_moe_layer_step", Value::U32(step as u32))]
}

/// Every so many layers have attention, which may rotate by sections.
fn qwen3_next(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let full = config.layers.iter().position(|layer| layer.has_attention);
    let mut entries = vec![("full_attention_interval", Value::U32(full.map_or(config.layers.len(), |full| full + 1) as u32))];
    if let Some(axes) = config.ropes.first().and_then(|rope| rope.axes) {
        let sections = axes.sections.iter().map(|pairs| *pairs as i32).chain([0]).collect();
        entries.push(("rope.dimension_sections", Value::I32s(sections)));
    }
    entries
}

fn first(config: &DecoderConfig) -> Option<&LayerConfig> {
    config.layers.first()
}

fn gemma2(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let cap = first(config).and_then(|layer| layer.attention.softcap);
    cap.map(|cap| ("attn_logit_softcapping", Value::F32(cap))).into_iter().collect()
}

fn parallel(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    vec![("use_parallel_residual", Value::Bool(first(config).is_some_and(|layer| layer.is_parallel)))]
}

/// Experts may compute in a space of their own.
fn nemotron_h_moe(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let size = config.layers.iter().find_map(|layer| match layer.ffn {
        FfnConfig::Experts(experts) => experts.latent_size,
        FfnConfig::Dense(_) | FfnConfig::Nothing => None,
    });
    size.map(|size| ("moe_latent_size", Value::U32(size as u32))).into_iter().collect()
}

fn granite(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let of_layers = first(config).into_iter().flat_map(|layer| {
        [("attention.scale", Value::F32(layer.attention.scale)), ("residual_scale", Value::F32(layer.residual_scales.ffn))]
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

fn granite_hybrid(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let rotates = config.layers.iter().any(|layer| layer.has_attention && layer.attention.rope.is_some());
    granite(config).into_iter().chain([("rope.scaling.finetuned", Value::Bool(rotates))]).collect()
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
