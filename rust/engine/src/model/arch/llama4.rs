//! Llama 4, its text: most layers rotate and see a chunk, the others neither; experts whose weights multiply what goes in.

use device::{QueryScale, RopeStyle, RouterScore};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, QkNorm, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

/// Every fourth layer does not rotate.
const INTERVAL: usize = 4;
const CHUNK: usize = 8192;
const SCALE: QueryScale = QueryScale { beta: 0.1, length: 8192, offset: 1 };

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["llama4_text", "llama4"],
    class: "Llama4ForCausalLM",
    gguf: "llama4",
    names: &[
        (Role::FfnGate, "feed_forward.gate_proj"),
        (Role::FfnUp, "feed_forward.up_proj"),
        (Role::FfnDown, "feed_forward.down_proj"),
        (Role::Router, "feed_forward.router"),
        (Role::ExpertGateUp, "feed_forward.experts.gate_up_proj$.T"),
        (Role::ExpertDown, "feed_forward.experts.down_proj$.T"),
        (Role::SharedGate, "feed_forward.shared_expert.gate_proj"),
        (Role::SharedUp, "feed_forward.shared_expert.up_proj"),
        (Role::SharedDown, "feed_forward.shared_expert.down_proj"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.decoder("llama4_text")?;
    config.ropes[0].style = RopeStyle::Interleaved;
    let num_layers = config.layers.len();
    let keys = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
    let [num_experts, num_chosen, width] = keys.map(|key| fields.required_size(key));
    let interval = fields.size("no_rope_layer_interval")?.unwrap_or(INTERVAL).max(1);
    let usual = || (0..num_layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect();
    let rotates = fields.flags("no_rope_layers", num_layers)?.unwrap_or_else(usual);
    let scale = QueryScale {
        beta: fields.number("attn_scale")?.map_or(SCALE.beta, |beta| beta as f32),
        length: fields.size("floor_scale")?.map_or(SCALE.length, |length| length as u32),
        ..SCALE
    };
    // The first files have a number, 4, for true.
    let is_tuned = fields.typed("attn_temperature_tuning", "true or false", |v| v.as_bool().or(v.as_u64().map(|n| n != 0)))?;
    let scale = is_tuned.unwrap_or(true).then_some(scale);
    let qk_norm = fields.flag("use_qk_norm")?.unwrap_or(true);
    let chunk = fields.size("attention_chunk_size")?;
    let dense = fields.size("intermediate_size_mlp")?;
    let step = fields.size("interleave_moe_layer_step")?.unwrap_or(1).max(1);
    let sparse = fields.layers("moe_layers")?;
    let is_sparse = |layer: usize| sparse.as_ref().map_or((layer + 1).is_multiple_of(step), |list| list.contains(&layer));
    let kinds: [&[&str]; 2] = [&["full_attention"], &["chunked_attention"]];
    let is_chunked = fields.layers_called("layer_types", num_layers, kinds, |layer| rotates[layer])?;
    let config = with_layers(config, |layer| rotates[layer], |layer| chunk.filter(|_| is_chunked[layer]), scale, qk_norm);
    let config =
        config.with_layers(|layer| layer.ffn.set_dense(|ffn| ffn.intermediate_size = dense.unwrap_or(ffn.intermediate_size)));
    let experts = ExpertsConfig::new([num_experts?, num_chosen?, width?], RouterScore::Sigmoid);
    Ok(config.with_experts(with_shared(experts), is_sparse))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("llama4", RopeStyle::Interleaved)?;
    let experts = experts.scored(RouterScore::Sigmoid);
    let step = fields.size("interleave_moe_layer_step")?.unwrap_or(1).max(1);
    // Whether queries and keys are normalized has no key: the largest of the family, with 128 experts, does without.
    let rotates = |layer: usize| !(layer + 1).is_multiple_of(INTERVAL);
    let chunk = |layer| rotates(layer).then_some(CHUNK);
    let config = with_layers(config, rotates, chunk, Some(SCALE), experts.num_experts != 128);
    Ok(config.with_experts(with_shared(experts), |layer| (layer + 1).is_multiple_of(step)))
}

fn with_shared(experts: ExpertsConfig) -> ExpertsConfig {
    let shared = Some(SharedConfig { intermediate_size: experts.intermediate_size, is_weighted: false });
    ExpertsConfig { scales_input: true, shared, ..experts }
}

fn with_layers(
    mut config: DecoderConfig,
    rotates: impl Fn(usize) -> bool,
    chunk: impl Fn(usize) -> Option<usize>,
    scale: Option<QueryScale>,
    qk_norm: bool,
) -> DecoderConfig {
    let eps = config.norm.eps;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let attention = &mut layer.attention;
        attention.chunk = chunk(index).filter(|chunk| *chunk < config.max_position_embeddings);
        if rotates(index) {
            (attention.qk_norm, attention.norms_last) = (qk_norm.then_some(QkNorm::Unweighted(eps)), true);
        } else {
            (attention.rope, attention.q_scale) = (None, scale);
        }
    }
    config
}
