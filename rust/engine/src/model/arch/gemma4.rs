//! Gemma 4 (text): windowed layers and full ones with heads of another size, normalized values, the last layers reading the keys
//! and values of others, inputs of each layer in small models, and in one a mixture of experts beside the dense network.

use device::{Activation, RopeStyle, RouterScore};
use serde_json::{Value, json};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, FfnConfig, LayerInputsConfig, Norms, QkNorm, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
        rope::{RopeConfig, RopeScaling},
    },
    weights::{Role, WeightId},
};

/// Every sixth layer sees everything.
const PATTERN: usize = 6;
const FULL_HEAD_DIM: usize = 512;
const WINDOW: usize = 512;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gemma4", "gemma4_text"],
    class: "Gemma4ForCausalLM",
    gguf: "gemma4",
    names: &[
        (Role::FfnNorm, "pre_feedforward_layernorm"),
        (Role::Router, "router.proj"),
        (Role::ExpertGateUp, "experts.gate_up_proj$"),
        (Role::ExpertDown, "experts.down_proj$"),
        (Role::SharedGate, "mlp.gate_proj"),
        (Role::SharedUp, "mlp.up_proj"),
        (Role::SharedGateUp, "mlp.gate_up_proj"),
        (Role::SharedDown, "mlp.down_proj"),
    ],
    from_hf,
    from_gguf,
};

/// What differs between the two kinds of layers.
pub(super) struct Kinds {
    pub(super) is_sliding: Vec<bool>,
    pub(super) window: usize,
    /// Of the full layers.
    pub(super) head_dim: usize,
    /// Of each layer.
    pub(super) num_kv_heads: Vec<usize>,
    /// Layers at the end that read the keys and values of others.
    pub(super) num_shared: usize,
    /// Full layers have no matrix of values.
    pub(super) keys_are_values: bool,
}

/// What Transformers takes where a file says nothing.
fn usual() -> Value {
    json!({
        "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "tie_word_embeddings": true,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "pad_token_id": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    })
}

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = &fields.with_defaults(&usual());
    let mut config = fields.decoder("gemma4")?;
    if let Some(sight) = fields.text("use_bidirectional_attention")?.filter(|sight| sight != "vision") {
        return Err(fields.error("use_bidirectional_attention", format!("is `{sight}`; implemented: null, vision")));
    }
    let num_layers = config.layers.len();
    let is_sliding = fields.sliding_layers(num_layers, |layer| !(layer + 1).is_multiple_of(PATTERN) && layer + 1 < num_layers)?;
    if is_sliding.last() == Some(&true) {
        return Err(fields.error("layer_types", "ends with a windowed layer; the last must be `full_attention`"));
    }
    let keys_are_values = fields.flag("attention_k_eq_v")?.unwrap_or(false);
    let sliding = config.layers.first().map_or(1, |layer| layer.attention.num_kv_heads);
    let full = fields.size("num_global_key_value_heads")?.filter(|_| keys_are_values).unwrap_or(sliding);
    let mut kinds = Kinds {
        window: fields.size("sliding_window")?.unwrap_or(WINDOW),
        head_dim: fields.size("global_head_dim")?.unwrap_or(FULL_HEAD_DIM),
        num_kv_heads: is_sliding.iter().map(|is_sliding| if *is_sliding { sliding } else { full }).collect(),
        num_shared: fields.size("num_kv_shared_layers")?.unwrap_or(0),
        is_sliding,
        keys_are_values,
    };
    let head_dim = config.largest(|layer| layer.attention.head_dim);
    by_layer(fields, head_dim, &mut kinds)?;
    let rope = |kind: &str, head_dim: usize| fields.rope(kind, head_dim, 1.0);
    config.ropes = vec![rope("full_attention", kinds.head_dim)?, rope("sliding_attention", head_dim)?];
    config.final_softcap = fields.softcap("final_logit_softcapping")?;
    let activation = fields.activation(Activation::GeluTanh)?;
    let width = fields.size("hidden_size_per_layer_input")?.unwrap_or(0);
    let vocab_size = fields.required_size("vocab_size_per_layer_input")?;
    if width > 0 && vocab_size < config.vocab_size {
        let why = format!("is {vocab_size}; there must be inputs of layers for all {} tokens", config.vocab_size);
        return Err(fields.error("vocab_size_per_layer_input", why));
    }
    let pad_token_id = fields.size("pad_token_id")?.unwrap_or(0) as u32;
    config.layer_inputs = (width > 0).then_some(LayerInputsConfig { width, vocab_size, pad_token_id, activation });
    let is_wide = fields.flag("use_double_wide_mlp")?.unwrap_or(false);
    let first_shared = num_layers.saturating_sub(kinds.num_shared);
    for layer in config.layers.iter_mut().skip(first_shared).filter(|_| is_wide) {
        layer.ffn.set_dense(|dense| dense.intermediate_size *= 2);
    }
    let config = with_kinds(config, &kinds).map_err(|why| fields.error("num_kv_shared_layers", why))?;
    let mut config = config.with_layers(|layer| layer.has_output_scale = true);
    if fields.flag("enable_moe_block")?.unwrap_or(false) {
        let [num_experts, num_chosen, width] =
            ["num_experts", "top_k_experts", "moe_intermediate_size"].map(|key| fields.required_size(key));
        config = with_experts(config, ExpertsConfig::new([num_experts?, num_chosen?, width?], RouterScore::Softmax), activation);
    } else {
        for key in ["num_experts", "top_k_experts", "moe_intermediate_size"] {
            fields.size(key)?;
        }
    }
    Ok(config)
}

/// Transformers writes what differs from the whole as an object by layer, `usual` being the elements of a head of the whole.
fn by_layer(fields: &HfFields<'_>, usual: usize, kinds: &mut Kinds) -> Result<(), EngineError> {
    let Some(layers) = fields.child("per_layer_config")? else { return Ok(()) };
    let mut full = None;
    for (layer, is_sliding) in kinds.is_sliding.iter().enumerate() {
        let own = layers.child(&layer.to_string())?;
        let size = |key| own.as_ref().map_or(Ok(None), |own| own.size(key));
        let head_dim = size("head_dim")?.unwrap_or(usual);
        let wanted = if *is_sliding { usual } else { *full.get_or_insert(head_dim) };
        if head_dim != wanted {
            let why = format!("has heads of {head_dim} in layer {layer}; they must be of {wanted}, as in all layers of its kind");
            return Err(fields.error("per_layer_config", why));
        }
        kinds.num_kv_heads[layer] = size("num_key_value_heads")?.unwrap_or(kinds.num_kv_heads[layer]);
        let known = ["head_dim", "num_key_value_heads"];
        if let Some(key) = own.iter().flat_map(|own| own.object.keys()).find(|key| !known.contains(&key.as_str())) {
            let why = format!("has `{key}` in layer {layer}; implemented: {}", known.join(", "));
            return Err(fields.error("per_layer_config", why));
        }
    }
    kinds.head_dim = full.unwrap_or(usual);
    Ok(())
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = &GgufFields { by_layer: &["attention.head_count_kv", "feed_forward_length"], ..*fields };
    let (mut config, experts) = if fields.size("expert_count")?.is_some_and(|n| n > 0) {
        let (config, experts) = fields.mixture("gemma4", RopeStyle::Neox)?;
        (config, Some(experts))
    } else {
        (fields.decoder("gemma4", RopeStyle::Neox)?, None)
    };
    let num_layers = config.layers.len();
    let is_sliding = fields.flags_by_layer("attention.sliding_window_pattern", num_layers)?;
    let head_dim = config.largest(|layer| layer.attention.head_dim);
    let sliding_head_dim = fields.size("attention.key_length_swa")?.unwrap_or(head_dim);
    let widths = fields.sizes_by_layer("feed_forward_length", num_layers)?;
    for (layer, width) in config.layers.iter_mut().zip(widths) {
        layer.ffn.set_dense(|dense| (dense.intermediate_size, dense.activation) = (width, Activation::GeluTanh));
        layer.attention.head_dim = sliding_head_dim;
    }
    let kinds = Kinds {
        window: fields.size("attention.sliding_window")?.unwrap_or(WINDOW),
        head_dim,
        num_kv_heads: fields.sizes_by_layer("attention.head_count_kv", num_layers)?,
        num_shared: fields.size("attention.shared_kv_layers")?.unwrap_or(0),
        keys_are_values: is_sliding
            .iter()
            .position(|is_sliding| !is_sliding)
            .is_some_and(|layer| !fields.weights.contains(WeightId::layer(layer, Role::AttnV))),
        is_sliding,
    };
    let local = RopeConfig {
        theta: fields.number("rope.freq_base_swa")?.unwrap_or(1e4),
        rotary_dim: sliding_head_dim,
        scaling: RopeScaling::None,
        ..config.ropes[0].clone()
    };
    config.ropes.push(local);
    config.final_softcap = fields.softcap("final_logit_softcapping")?;
    config.layer_inputs = match fields.size("embedding_length_per_layer_input")?.filter(|width| *width > 0) {
        Some(width) => {
            let vocab_size = config.vocab_size;
            Some(LayerInputsConfig { width, vocab_size, pad_token_id: 0, activation: Activation::GeluTanh })
        }
        None => None,
    };
    let config = with_kinds(config, &kinds).map_err(|why| fields.error("attention.shared_kv_layers", why))?;
    let config = config.with_layers(|layer| layer.has_output_scale = true);
    Ok(match experts {
        Some(experts) => with_experts(config, experts, Activation::GeluTanh),
        None => config,
    })
}

/// The layers of both kinds; those of the first so far have the heads of windowed ones.
pub(super) fn with_kinds(mut config: DecoderConfig, kinds: &Kinds) -> Result<DecoderConfig, String> {
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    let (num_layers, eps) = (config.layers.len(), config.norm.eps);
    let first_shared = num_layers
        .checked_sub(kinds.num_shared)
        .filter(|first| *first > 0)
        .ok_or_else(|| format!("is {}; of {num_layers} layers some must have keys and values of their own", kinds.num_shared))?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let is_sliding = kinds.is_sliding[index];
        let attention = &mut layer.attention;
        if !is_sliding {
            attention.head_dim = kinds.head_dim;
        }
        attention.num_kv_heads = kinds.num_kv_heads[index];
        (attention.rope, attention.scale) = (Some(usize::from(is_sliding)), 1.0);
        (attention.qk_norm, attention.v_norm) = (Some(QkNorm::Heads), Some(eps));
        attention.keys_are_values = kinds.keys_are_values && !is_sliding;
        if index >= first_shared {
            let of = kinds.is_sliding[..first_shared].iter().rposition(|other| *other == is_sliding);
            let without = || format!("is {}; layer {index} has no layer of its kind to read from", kinds.num_shared);
            attention.shared_kv = Some(of.ok_or_else(without)?);
        }
        layer.norms = Norms::Around;
    }
    if !kinds.is_sliding.contains(&true) {
        config.ropes.truncate(1);
    }
    Ok(config.with_windows(|layer| kinds.is_sliding[layer].then_some(kinds.window)))
}

/// The dense network of each layer becomes one that every token passes beside its experts.
fn with_experts(config: DecoderConfig, experts: ExpertsConfig, activation: Activation) -> DecoderConfig {
    config.with_layers(|layer| {
        let shared = SharedConfig { intermediate_size: layer.ffn.intermediate_size(), is_weighted: false };
        let experts = ExpertsConfig { shared: Some(shared), has_own_norms: true, ..experts }.normalized(true);
        let activation = device::ExpertActivation::Gated(activation);
        layer.ffn = FfnConfig::Experts(ExpertsConfig { activation, ..experts });
    })
}
