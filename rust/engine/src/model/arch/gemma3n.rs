//! Gemma 3n (text): several residual streams, inputs of each layer, the last layers reading the keys and values of others, and in
//! the first ones gates of which few pass.

use device::{Activation, RopeStyle};
use serde_json::{Value, json};

use super::{
    Architecture,
    gemma4::{Kinds, with_kinds},
};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, LayerInputsConfig, MAX_SIZE, StreamsConfig},
        fields::{Fields, GgufFields, HfFields},
        rope::{RopeConfig, RopeScaling},
    },
    weights::{MetadataValue, Role, WeightId},
};

/// Every fifth layer sees everything.
const PATTERN: usize = 5;
/// Layers that read the keys and values of others are those behind these, where a file says nothing.
const OWN_KV: usize = 20;
const NUM_SPARSE: usize = 10;
const LOCAL_THETA: f64 = 10_000.0;
const SOFTCAP: f32 = 30.0;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gemma3n", "gemma3n_text"],
    class: "Gemma3nForCausalLM",
    gguf: "gemma3n",
    names: &[(Role::FfnNorm, "pre_feedforward_layernorm")],
    from_hf,
    from_gguf,
};

/// What Transformers takes where a file says nothing.
fn usual() -> Value {
    json!({
        "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "tie_word_embeddings": true,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "num_kv_shared_layers": 15,
        "final_logit_softcapping": SOFTCAP, "rope_theta": 1e6, "altup_num_inputs": 4, "altup_active_idx": 0,
        "altup_correct_scale": true, "laurel_rank": 64,
    })
}

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.with_defaults(&usual());
    let widths = widths(&fields)?;
    if let Some(widest) = widths.iter().flatten().max() {
        fields.object.insert("intermediate_size".into(), json!(widest));
    }
    let mut config = fields.decoder("gemma3n")?;
    let num_layers = config.layers.len();
    // Scores have no factor, whatever it says.
    fields.number("query_pre_attn_scalar")?;
    let cutoffs = cutoffs(&fields, num_layers)?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.ffn.set_dense(|dense| {
            dense.cutoff = cutoffs[index];
            dense.intermediate_size = widths.as_ref().map_or(dense.intermediate_size, |widths| widths[index]);
        });
    }
    let head_dim = config.largest(|layer| layer.attention.head_dim);
    config.ropes.push(local_rope(&fields, head_dim)?);
    config.final_softcap = fields.softcap("final_logit_softcapping")?;
    config.layer_inputs = Some(LayerInputsConfig {
        width: fields.required_size("hidden_size_per_layer_input")?,
        vocab_size: fields.required_size("vocab_size_per_layer_input")?,
        pad_token_id: 0,
        activation: fields.activation(Activation::GeluTanh)?,
    });
    config.streams = Some(StreamsConfig {
        count: fields.required_size("altup_num_inputs")?,
        active: fields.required_size("altup_active_idx")?,
        has_output_scale: fields.flag("altup_correct_scale")?.unwrap_or(true),
        branch_rank: fields.required_size("laurel_rank")?,
    });
    let kinds = Kinds {
        is_sliding: fields.sliding_layers(num_layers, is_sliding)?,
        window: fields.required_size("sliding_window")?,
        head_dim,
        num_kv_heads: config.layers.iter().map(|layer| layer.attention.num_kv_heads).collect(),
        num_shared: fields.required_size("num_kv_shared_layers")?,
        keys_are_values: false,
    };
    with_kinds(config, &kinds).map_err(|why| fields.error("num_kv_shared_layers", why))
}

fn is_sliding(layer: usize) -> bool {
    !(layer + 1).is_multiple_of(PATTERN)
}

/// Widths of the feed-forward networks, where there is a list of them.
fn widths(fields: &HfFields<'_>) -> Result<Option<Vec<usize>>, EngineError> {
    let key = "intermediate_size";
    if !fields.value(key).is_some_and(|value| value.is_array()) {
        return Ok(None);
    }
    let num_layers = fields.required_size("num_hidden_layers")?;
    let size = |value: &Value| value.as_u64().filter(|n| (1..=MAX_SIZE as u64).contains(n)).map(|n| n as usize);
    fields.typed(key, &format!("a size, or a list of {num_layers} sizes from 1 to {MAX_SIZE}"), |value| {
        let sizes: Option<Vec<_>> = value.as_array()?.iter().map(size).collect();
        sizes.filter(|sizes| sizes.len() == num_layers && num_layers > 0)
    })
}

/// Of each layer, how many standard deviations above the mean a gate passes.
fn cutoffs(fields: &HfFields<'_>, num_layers: usize) -> Result<Vec<Option<f32>>, EngineError> {
    let part = |value: &Value| value.as_f64().filter(|part| (0.0..1.0).contains(part));
    let wanted = format!("a list of {num_layers} numbers from 0 to below 1");
    let parts = fields.typed("activation_sparsity_pattern", &wanted, |value| {
        let parts: Option<Vec<_>> = value.as_array()?.iter().map(part).collect();
        parts.filter(|parts| parts.len() == num_layers)
    })?;
    let usual = |layer: usize| if num_layers > NUM_SPARSE && layer < NUM_SPARSE { 0.95 } else { 0.0 };
    let parts = parts.unwrap_or_else(|| (0..num_layers).map(usual).collect());
    Ok(parts.into_iter().map(|part| (part > 0.0).then(|| normal_quantile(part) as f32)).collect())
}

/// Below which that part of normally distributed numbers is. The integral of their density from 0 to x is the density at x times
/// x + x^3/3 + x^5/(3*5) + ...
fn normal_quantile(part: f64) -> f64 {
    let below = |x: f64| {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        0.5 + sum * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt()
    };
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..64 {
        let middle = 0.5 * (low + high);
        *(if below(middle) < part { &mut low } else { &mut high }) = middle;
    }
    0.5 * (low + high)
}

/// The rotation of windowed layers. Older files have its base under a key of its own, and scale the other rotation only.
fn local_rope(fields: &HfFields<'_>, head_dim: usize) -> Result<RopeConfig, EngineError> {
    let mut local = fields.clone();
    let theta = fields.number("rope_local_base_freq")?.unwrap_or(LOCAL_THETA);
    local.object.insert("rope_theta".into(), json!(theta));
    local.object.remove("rope_scaling");
    local.rope("sliding_attention", head_dim, 1.0)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = &GgufFields { by_layer: &["feed_forward_length"], ..*fields };
    let mut config = fields.decoder("gemma3n", RopeStyle::Neox)?;
    let num_layers = config.layers.len();
    let widths = fields.sizes_by_layer("feed_forward_length", num_layers)?;
    let cutoffs = gguf_cutoffs(fields, num_layers)?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.ffn.set_dense(|dense| {
            (dense.intermediate_size, dense.activation, dense.cutoff) = (widths[index], Activation::GeluTanh, cutoffs[index]);
        });
    }
    let theta = fields.number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA);
    config.ropes.push(RopeConfig { theta, scaling: RopeScaling::None, ..config.ropes[0].clone() });
    config.final_softcap = Some(fields.softcap("final_logit_softcapping")?.unwrap_or(SOFTCAP));
    config.layer_inputs = Some(LayerInputsConfig {
        width: fields.required_size("embedding_length_per_layer_input")?,
        vocab_size: fields.weights.matrix_shape(WeightId::global(Role::LayerTokens))?[0],
        pad_token_id: 0,
        activation: Activation::GeluTanh,
    });
    config.streams = Some(StreamsConfig {
        count: fields.required_size("altup.num_inputs")?,
        active: fields.required_size("altup.active_idx")?,
        has_output_scale: true,
        branch_rank: fields.weights.matrix_shape(WeightId::layer(0, Role::BranchInput))?[0],
    });
    let kinds = Kinds {
        is_sliding: fields.sliding_layers(num_layers, is_sliding)?,
        window: fields.required_size("attention.sliding_window")?,
        head_dim: config.largest(|layer| layer.attention.head_dim),
        num_kv_heads: config.layers.iter().map(|layer| layer.attention.num_kv_heads).collect(),
        num_shared: fields.size("attention.shared_kv_layers")?.unwrap_or(num_layers.saturating_sub(OWN_KV)),
        keys_are_values: false,
    };
    with_kinds(config, &kinds).map_err(|why| fields.error("attention.shared_kv_layers", why))
}

/// The cutoffs themselves; minus infinity where all of a gate passes.
fn gguf_cutoffs(fields: &GgufFields<'_>, num_layers: usize) -> Result<Vec<Option<f32>>, EngineError> {
    let key = "activation_sparsity_scale";
    match fields.metadata.get(&format!("{}.{key}", fields.prefix)) {
        Some(MetadataValue::Floats(list)) if list.len() == num_layers => {
            Ok(list.iter().map(|cutoff| Some(*cutoff).filter(|cutoff| *cutoff != f32::NEG_INFINITY)).collect())
        }
        None => {
            let usual = normal_quantile(0.95) as f32;
            Ok((0..num_layers).map(|layer| (layer < NUM_SPARSE).then_some(usual)).collect())
        }
        Some(_) => Err(fields.error(key, format!("must be a list of {num_layers} floats"))),
    }
}

#[cfg(test)]
mod tests {
    use super::normal_quantile;

    /// As `torch.distributions.Normal(0, 1).icdf` has them.
    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (part, wanted) in [(0.95, 1.644_853_6), (0.5, 0.0), (0.25, -0.674_489_75), (0.999, 3.090_232_3), (0.01, -2.326_347_9)]
        {
            assert!((normal_quantile(part) - wanted).abs() < 1e-6, "{part}: {}", normal_quantile(part));
        }
    }
}
