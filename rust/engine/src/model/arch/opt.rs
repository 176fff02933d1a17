//! OPT (arXiv:2205.01068; Galactica too) and `BioGPT`: a learned vector of each position, whose table begins with two rows that
//! no position has.

use device::Activation;
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, PositionsConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["opt"],
    class: "OPTForCausalLM",
    gguf: "opt",
    names: &[
        (Role::OutputNorm, "model.final_layer_norm"),
        (Role::AttnNorm, "self_attn_layer_norm"),
        (Role::AttnOutput, "self_attn.out_proj"),
        (Role::FfnNorm, "final_layer_norm"),
        (Role::FfnUp, "fc1"),
        (Role::FfnDown, "fc2"),
    ],
    from_hf: |fields| {
        let own = [("ffn_dim", "intermediate_size"), ("activation_function", "hidden_act")];
        let mut fields = fields.also_called(&own);
        // Those of 350 million parameters have norms behind the additions, and token embeddings of another width.
        fields.only(&[
            ("do_layer_norm_before", json!(true)),
            ("_remove_final_layer_norm", json!(false)),
            ("word_embed_proj_dim", json!(fields.required_size("hidden_size")?)),
        ])?;
        fields.set_usual_width()?;
        let has_weights = fields.flag("layer_norm_elementwise_affine")?.unwrap_or(true);
        let bias = fields.flag("enable_bias")?.unwrap_or(true);
        from_hf("opt", &fields, (NormConfig { has_weights, ..NormConfig::layer(None) }, bias), Activation::Relu)
    },
    from_gguf: no_gguf,
};

/// Token embeddings are multiplied by the root of their width.
pub(super) const BIOGPT: Architecture = Architecture {
    model_types: &["biogpt"],
    class: "BioGptForCausalLM",
    gguf: "biogpt",
    names: &[
        (Role::OutputNorm, "model.layer_norm"),
        (Role::Output, "output_projection"),
        (Role::AttnNorm, "self_attn_layer_norm"),
        (Role::AttnOutput, "self_attn.out_proj"),
        (Role::FfnNorm, "final_layer_norm"),
        (Role::FfnUp, "fc1"),
        (Role::FfnDown, "fc2"),
    ],
    from_hf: |fields| {
        // Transformers gives its norms the usual one, whatever this says.
        fields.number("layer_norm_eps")?;
        let mut config = from_hf("biogpt", fields, (NormConfig::layer(None), true), Activation::Gelu)?;
        if fields.flag("scale_embedding")?.unwrap_or(true) {
            config.embedding_scale = (config.hidden_size as f32).sqrt();
        }
        Ok(config)
    },
    from_gguf: no_gguf,
};

fn from_hf(
    architecture: &'static str,
    fields: &HfFields<'_>,
    (norm, bias): (NormConfig, bool),
    usual: Activation,
) -> Result<DecoderConfig, EngineError> {
    let config = DecoderConfig {
        norm,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        ..fields.decoder(architecture)?
    };
    let activation = fields.activation(usual)?;
    Ok(config.with_positions(PositionsConfig { padding: 2, ..PositionsConfig::default() }).with_layers(|layer| {
        layer.set_biases(bias);
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
    }))
}
