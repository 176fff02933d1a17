//! EXAONE 3 and 3.5: llamas whose weights and keys are called as GPT-2's.

use device::RopeStyle;
use serde_json::json;

use super::Architecture;
use crate::{model::fields::HfFields, weights::Role};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["exaone"],
    class: "ExaoneForCausalLM",
    gguf: "exaone",
    names: &[
        (Role::Embedding, "model.wte"),
        (Role::OutputNorm, "model.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQ, "attn.attention.q_proj"),
        (Role::AttnK, "attn.attention.k_proj"),
        (Role::AttnV, "attn.attention.v_proj"),
        (Role::AttnOutput, "attn.attention.out_proj"),
        (Role::FfnNorm, "ln_2"),
        (Role::FfnGate, "mlp.c_fc_0"),
        (Role::FfnUp, "mlp.c_fc_1"),
        (Role::FfnDown, "mlp.c_proj"),
    ],
    from_hf: |fields: &HfFields<'_>| {
        let own =
            [("num_layers", "num_hidden_layers"), ("layer_norm_epsilon", "rms_norm_eps"), ("activation_function", "hidden_act")];
        let usual = json!({"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "intermediate_size": 14_336});
        fields.also_called(&own).with_defaults(&usual).decoder("exaone")
    },
    from_gguf: |fields| fields.decoder("exaone", RopeStyle::Neox),
};
