//! nanochat: norms without weights, behind the token embedding and behind the rotation of queries and keys too, which turns the
//! other way round.

use device::Activation;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, QkNorm},
        fields::{Fields, HfFields},
        rope::RopeScaling,
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["nanochat"],
    class: "NanoChatForCausalLM",
    gguf: "nanochat",
    names: &[(Role::FfnUp, "mlp.fc1"), (Role::FfnDown, "mlp.fc2")],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let activation = fields.activation(Activation::Relu2)?;
    let mut config = fields.decoder("nanochat")?;
    if config.ropes[0].scaling != RopeScaling::None {
        return Err(fields.error("rope_parameters", "stretches the rotation, which is implemented here without"));
    }
    config.ropes[0].scaling = RopeScaling::Backwards;
    let norm = NormConfig { has_weights: false, ..config.norm };
    // Null is none.
    let has_softcap = fields.object.contains_key("final_logit_softcapping");
    let final_softcap = if has_softcap { fields.softcap("final_logit_softcapping")? } else { Some(15.0) };
    Ok(DecoderConfig { norm, final_softcap, embedding_norm: true, ..config }.with_layers(|layer| {
        (layer.attention.qk_norm, layer.attention.norms_last) = (Some(QkNorm::Unweighted(norm.eps)), true);
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
    }))
}
