//! GGUF files of Gemma 4 and Gemma 3n: names and keys of llama.cpp's converter.

use serde_json::Value;

use super::gguf_writer::{Gguf, STRING, U32, string};

const F32: u32 = 6;
const I32: u32 = 5;
const BOOL: u32 = 7;
/// Of tensors.
const FLOATS: u32 = 0;

const GLOBAL_NAMES: [(&str, &str); 5] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
    ("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
    ("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
];
const LAYER_NAMES: [(&str, &str); 33] = [
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("per_layer_input_gate.weight", "inp_gate.weight"),
    ("per_layer_projection.weight", "proj.weight"),
    ("post_per_layer_input_norm.weight", "post_norm.weight"),
    ("router.proj.weight", "ffn_gate_inp.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    ("experts.down_proj", "ffn_down_exps.weight"),
    ("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
    ("post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
    ("post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
    ("altup.correct_output_scale", "altup_correct_scale.weight"),
    ("altup.correction_coefs.weight", "altup_correct_coef.weight"),
    ("altup.prediction_coefs.weight", "altup_predict_coef.weight"),
    ("altup.modality_router.weight", "altup_router.weight"),
    ("altup.router_norm.weight", "altup_router_norm.weight"),
    ("laurel.linear_left.weight", "laurel_l.weight"),
    ("laurel.linear_right.weight", "laurel_r.weight"),
    ("laurel.post_laurel_norm.weight", "laurel_post_norm.weight"),
];
/// The name of a tensor.
pub fn gguf_name(name: &str) -> String {
    if let Some((_, there)) = GLOBAL_NAMES.iter().find(|(here, _)| *here == name) {
        return (*there).to_owned();
    }
    let (layer, part) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let (_, there) = LAYER_NAMES.iter().find(|(here, _)| *here == part).unwrap();
    format!("blk.{layer}.{there}")
}

/// The keys of a text model of Gemma 4, and the frequencies that its full layers rotate by.
pub fn metadata(config: &Value) -> Gguf {
    let size = |key: &str| config[key].as_u64().unwrap_or(0) as u32;
    let layers = config["layer_types"].as_array().unwrap();
    let is_sliding: Vec<_> = layers.iter().map(|kind| kind == "sliding_attention").collect();
    let (count, shared) = (layers.len() as u32, size("num_kv_shared_layers"));
    let wide = |layer: u32| config["use_double_wide_mlp"] == true && layer >= count - shared;
    let widths = (0..count).map(|layer| size("intermediate_size") * (1 + u32::from(wide(layer))));
    let full_heads = config["num_global_key_value_heads"].as_u64().map_or(size("num_key_value_heads"), |heads| heads as u32);
    let kv_heads = is_sliding.iter().map(|sliding| if *sliding { size("num_key_value_heads") } else { full_heads });
    let bytes = |values: Vec<u32>| values.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let flags: Vec<u8> = is_sliding.iter().map(|sliding| u8::from(*sliding)).collect();
    let mut file = Gguf::new().entry("general.architecture", STRING, &string("gemma4"));
    for (key, value) in [
        ("block_count", count),
        ("context_length", size("max_position_embeddings")),
        ("embedding_length", size("hidden_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.key_length", size("global_head_dim")),
        ("attention.value_length", size("global_head_dim")),
        ("attention.key_length_swa", size("head_dim")),
        ("attention.value_length_swa", size("head_dim")),
        ("attention.sliding_window", size("sliding_window")),
        ("attention.shared_kv_layers", shared),
        ("embedding_length_per_layer_input", size("hidden_size_per_layer_input")),
        ("rope.dimension_count", size("global_head_dim")),
        ("rope.dimension_count_swa", size("head_dim")),
        ("expert_count", size("num_experts")),
        ("expert_used_count", size("top_k_experts")),
        ("expert_feed_forward_length", size("moe_intermediate_size")),
    ] {
        file = file.entry(&format!("gemma4.{key}"), U32, &value.to_le_bytes());
    }
    for (key, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-6_f32),
        ("final_logit_softcapping", 30.0),
        ("rope.freq_base", 1e6),
        ("rope.freq_base_swa", 1e4),
    ] {
        file = file.entry(&format!("gemma4.{key}"), F32, &value.to_le_bytes());
    }
    let pairs = size("global_head_dim") as usize / 2;
    let divisors = (0..pairs).flat_map(|pair| if pair < pairs / 4 { 1.0_f32 } else { 1e30 }.to_le_bytes());
    file.array("gemma4.feed_forward_length", I32, u64::from(count), &bytes(widths.collect()))
        .array("gemma4.attention.head_count_kv", I32, u64::from(count), &bytes(kv_heads.collect()))
        .array("gemma4.attention.sliding_window_pattern", BOOL, u64::from(count), &flags)
        .weight("rope_freqs.weight", &[pairs as u64], FLOATS, &divisors.collect::<Vec<_>>())
}
