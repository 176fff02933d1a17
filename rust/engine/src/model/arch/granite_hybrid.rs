//! Granite 4: granite whose layers are Mamba-2, but for a few with attention, with or without a mixture of experts.

use device::{RopeStyle, RouterScore};

use super::{Architecture, granite, granite_moe, mamba};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, RecurrentConfig},
        fields::{Fields, GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["granitemoehybrid"],
    class: "GraniteMoeHybridForCausalLM",
    gguf: "granitehybrid",
    names: granite_moe::NAMES,
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = granite::read_hf("granitemoehybrid", fields)?;
    let num_layers = config.layers.len();
    let fields = &fields.also_called(&[("layers_block_type", "layer_types")]);
    let is_recurrent = fields.recurrent_layers(num_layers, &["mamba", "linear_attention"], |_| false)?;
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    let mamba = mamba::read_hf(fields, &config)?;
    let rotates = match fields.text("position_embedding_type")?.as_deref() {
        Some("rope") => true,
        None | Some("nope") => false,
        Some(other) => {
            return Err(fields.error("position_embedding_type", format!("is `{other}`; implemented: rope, nope")));
        }
    };
    let shared = size("shared_intermediate_size", 1024)?;
    let config = with_layers(config, mamba, rotates, |layer| is_recurrent[layer]);
    if size("num_local_experts", 0)? == 0 {
        return Ok(config.with_layers(|layer| layer.ffn.set_dense(|dense| dense.intermediate_size = shared)));
    }
    Ok(config.with_experts(granite_moe::read_experts(fields, shared)?, |_| true))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let is_mixture = fields.size("expert_count")?.is_some_and(|n| n > 0);
    let (config, experts) = if is_mixture {
        let (config, experts) = fields.mixture("granitemoehybrid", RopeStyle::Interleaved)?;
        (config, Some(experts))
    } else {
        (fields.decoder("granitemoehybrid", RopeStyle::Interleaved)?, None)
    };
    let mamba = mamba::read_gguf(fields, &config)?;
    let rotates = fields.flag("rope.scaling.finetuned")?.unwrap_or(false);
    let is_recurrent = fields.layers_without("attention.head_count_kv", config.layers.len())?;
    let config = granite::with_gguf_multipliers(config, fields)?;
    let config = with_layers(config, mamba, rotates, |layer| is_recurrent[layer]);
    Ok(match experts {
        Some(experts) => config.with_experts(experts.scored(RouterScore::SoftmaxOfChosen), |_| true),
        None => config,
    })
}

fn with_layers(
    config: DecoderConfig,
    mamba: RecurrentConfig,
    rotates: bool,
    is_recurrent: impl Fn(usize) -> bool,
) -> DecoderConfig {
    let config = config.with_layers(|layer| layer.attention.rope = rotates.then_some(0));
    config.with_recurrent(mamba, is_recurrent)
}
