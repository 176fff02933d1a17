//! Models with drawn weights as llama.cpp's converter writes them (names of tensors as in gguf-py), against the goldens of their
//! Hugging Face layouts.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use device::{
    KvDType, Precision,
    cpu::{CpuBackend, Isa},
};
use engine::ModelSource;
use serde_json::Value;

use crate::common::{
    cases::{EXACT, cases_of, check_cases},
    drawn,
    gguf_writer::{Gguf, STRING, U32, string},
    golden_dir, load,
};

const F32: u32 = 6;
const BOOL: u32 = 7;

/// A golden as a GGUF file.
struct File {
    golden: &'static str,
    architecture: &'static str,
    /// Keys beside those of every file.
    sizes: &'static [(&'static str, u32)],
    numbers: &'static [(&'static str, f32)],
    /// The norm behind attention comes before the addition.
    has_norms_after: bool,
    /// The converter permutes the rows of q and k.
    is_permuted: bool,
    /// It adds this to the weights of norms.
    norm_offset: f32,
    /// Of the golden: longer ones reach beyond windows for which files have no key.
    num_cases: usize,
}

const PLAIN: File = File {
    golden: "",
    architecture: "",
    sizes: &[],
    numbers: &[],
    has_norms_after: false,
    is_permuted: false,
    norm_offset: 0.0,
    num_cases: 2,
};

const FILES: [File; 35] = [
    File { golden: "apertus", architecture: "apertus", ..PLAIN },
    File { golden: "seed_oss", architecture: "seed_oss", has_norms_after: true, ..PLAIN },
    File { golden: "ernie4_5", architecture: "ernie4_5", ..PLAIN },
    File {
        golden: "ernie4_5_moe",
        architecture: "ernie4_5-moe",
        sizes: &[
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 2),
            ("leading_dense_block_count", 1),
            ("interleave_moe_layer_step", 1),
        ],
        ..PLAIN
    },
    File {
        golden: "exaone4",
        architecture: "exaone4",
        sizes: &[("attention.sliding_window", 16)],
        has_norms_after: true,
        ..PLAIN
    },
    File {
        golden: "olmo3",
        architecture: "olmo2",
        sizes: &[("attention.sliding_window", 16), ("rope.scaling.original_context_length", 64)],
        // The golden has 1.15 where yarn has 1.1386 by itself.
        numbers: &[("rope.scaling.factor", 4.0), ("rope.scaling.attn_factor", 1.009_992_2)],
        has_norms_after: true,
        ..PLAIN
    },
    File {
        golden: "arcee",
        architecture: "arcee",
        sizes: &[("rope.scaling.original_context_length", 64)],
        numbers: &[("rope.scaling.factor", 4.0)],
        is_permuted: true,
        ..PLAIN
    },
    File {
        golden: "nemotron",
        architecture: "nemotron",
        sizes: &[("rope.dimension_count", 8)],
        numbers: &[("attention.layer_norm_epsilon", 1e-5)],
        norm_offset: 1.0,
        ..PLAIN
    },
    File { golden: "olmoe", architecture: "olmoe", sizes: &[("expert_count", 8), ("expert_used_count", 3)], ..PLAIN },
    File {
        golden: "dots1",
        architecture: "dots1",
        sizes: &[
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 2),
            ("leading_dense_block_count", 1),
            ("expert_gating_func", 2),
        ],
        numbers: &[("expert_weights_scale", 1.5)],
        num_cases: 1,
        ..PLAIN
    },
    File {
        golden: "afmoe",
        architecture: "afmoe",
        sizes: &[
            ("attention.sliding_window", 16),
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 1),
            ("leading_dense_block_count", 1),
            ("expert_gating_func", 2),
        ],
        numbers: &[("expert_weights_scale", 1.5)],
        has_norms_after: true,
        ..PLAIN
    },
    File {
        golden: "exaone_moe",
        architecture: "exaone-moe",
        sizes: &[
            ("attention.sliding_window", 16),
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 1),
            ("leading_dense_block_count", 1),
            ("expert_gating_func", 2),
        ],
        numbers: &[("expert_weights_scale", 1.5)],
        ..PLAIN
    },
    File { golden: "jais2", architecture: "jais2", numbers: &[("attention.layer_norm_epsilon", 1e-5)], ..PLAIN },
    File {
        golden: "mistral4",
        architecture: "mistral4",
        sizes: &[
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 1),
            ("expert_group_count", 2),
            ("expert_group_used_count", 1),
            ("leading_dense_block_count", 1),
            ("expert_gating_func", 1),
            ("attention.q_lora_rank", 24),
            ("attention.kv_lora_rank", 16),
            ("attention.key_length_mla", 16),
            ("attention.value_length_mla", 12),
            ("attention.temperature_length", 16),
            ("rope.dimension_count", 8),
            ("rope.scaling.original_context_length", 16),
        ],
        numbers: &[
            ("expert_weights_scale", 1.5),
            ("rope.scaling.factor", 4.0),
            ("rope.scaling.yarn_log_multiplier", 0.1),
            ("attention.temperature_scale", 0.3),
        ],
        ..PLAIN
    },
    File {
        golden: "minimax_m2",
        architecture: "minimax-m2",
        sizes: &[
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_gating_func", 2),
            ("rope.dimension_count", 8),
        ],
        ..PLAIN
    },
    File {
        golden: "olmo",
        architecture: "olmo",
        numbers: &[("attention.layer_norm_epsilon", 1e-5), ("attention.clamp_kqv", 0.75)],
        is_permuted: true,
        ..PLAIN
    },
    File {
        golden: "gpt_neox",
        architecture: "gptneox",
        sizes: &[("rope.dimension_count", 4)],
        numbers: &[("attention.layer_norm_epsilon", 1e-5)],
        ..PLAIN
    },
    File { golden: "gpt2", architecture: "gpt2", numbers: &[("attention.layer_norm_epsilon", 1e-5)], ..PLAIN },
    File { golden: "gpt_bigcode", architecture: "starcoder", numbers: &[("attention.layer_norm_epsilon", 1e-5)], ..PLAIN },
    File { golden: "falcon", architecture: "falcon", numbers: &[("attention.layer_norm_epsilon", 1e-5)], ..PLAIN },
    File { golden: "exaone", architecture: "exaone", numbers: &[("attention.layer_norm_rms_epsilon", 1e-5)], ..PLAIN },
    // What its converter writes is a llama.
    File { golden: "internlm3", architecture: "llama", is_permuted: true, ..PLAIN },
    File { golden: "glm", architecture: "chatglm", sizes: &[("rope.dimension_count", 8)], ..PLAIN },
    File {
        golden: "sarvam_moe",
        architecture: "bailingmoe2",
        sizes: &[
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 1),
            ("leading_dense_block_count", 1),
            ("expert_gating_func", 2),
        ],
        numbers: &[("expert_weights_scale", 1.5)],
        ..PLAIN
    },
    File {
        golden: "solar_open",
        architecture: "glm4moe",
        sizes: &[
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 1),
            ("expert_group_count", 2),
            ("expert_group_used_count", 1),
        ],
        numbers: &[("expert_weights_scale", 1.5)],
        has_norms_after: true,
        ..PLAIN
    },
    File {
        golden: "hy_v3",
        architecture: "hy_v3",
        sizes: &[("expert_count", 8), ("expert_used_count", 3), ("expert_feed_forward_length", 32)],
        numbers: &[("expert_weights_scale", 1.5)],
        ..PLAIN
    },
    File {
        golden: "mellum-sparse",
        architecture: "mellum",
        sizes: &[
            ("attention.sliding_window", 16),
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 32),
            ("rope.scaling.original_context_length", 64),
        ],
        numbers: &[("rope.scaling.factor", 4.0), ("rope.freq_base_swa", 500.0)],
        ..PLAIN
    },
    File {
        golden: "granitemoe_swa-nope",
        architecture: "granite_swa",
        sizes: &[
            ("attention.sliding_window", 16),
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_shared_feed_forward_length", 48),
        ],
        numbers: &[("attention.scale", 0.25), ("embedding_scale", 2.0), ("residual_scale", 0.5), ("logit_scale", 2.0)],
        is_permuted: true,
        ..PLAIN
    },
    File {
        golden: "nemotron_h",
        architecture: "nemotron_h",
        sizes: &STATE,
        numbers: &[("attention.layer_norm_rms_epsilon", 1e-5)],
        ..PLAIN
    },
    File {
        golden: "nemotron_h-latent",
        architecture: "nemotron_h_moe",
        sizes: &[
            STATE[0],
            STATE[1],
            STATE[2],
            STATE[3],
            STATE[4],
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 48),
            ("expert_shared_feed_forward_length", 80),
            ("moe_latent_size", 32),
        ],
        numbers: &[("attention.layer_norm_rms_epsilon", 1e-5), ("expert_weights_scale", 1.5)],
        ..PLAIN
    },
    // Its weights are multiplied by what the configuration says.
    File { golden: "falcon_h1", architecture: "falcon-h1", sizes: &STATE, ..PLAIN },
    File {
        golden: "mamba",
        architecture: "mamba",
        sizes: &[("ssm.time_step_rank", 8), ("ssm.inner_size", 64), ("ssm.state_size", 5), ("ssm.conv_kernel", 4)],
        numbers: &[("attention.layer_norm_rms_epsilon", 1e-5)],
        ..PLAIN
    },
    // Which has one epsilon for all norms.
    File {
        golden: "falcon_mamba",
        architecture: "mamba",
        sizes: &[("ssm.time_step_rank", 2), ("ssm.inner_size", 48), ("ssm.state_size", 16), ("ssm.conv_kernel", 3)],
        numbers: &[("attention.layer_norm_rms_epsilon", 1e-3)],
        ..PLAIN
    },
    File {
        golden: "jamba",
        architecture: "jamba",
        sizes: &[
            ("ssm.time_step_rank", 8),
            ("ssm.inner_size", 64),
            ("ssm.state_size", 7),
            ("ssm.conv_kernel", 4),
            ("expert_count", 5),
            ("expert_used_count", 2),
        ],
        ..PLAIN
    },
    File {
        golden: "mamba2",
        architecture: "mamba2",
        sizes: &[
            ("ssm.time_step_rank", 4),
            ("ssm.inner_size", 64),
            ("ssm.group_count", 2),
            ("ssm.state_size", 8),
            ("ssm.conv_kernel", 4),
        ],
        numbers: &[("attention.layer_norm_rms_epsilon", 1e-5)],
        ..PLAIN
    },
];

/// Of the goldens with layers of Mamba-2.
const STATE: [(&str, u32); 5] =
    [("ssm.time_step_rank", 6), ("ssm.inner_size", 96), ("ssm.group_count", 2), ("ssm.state_size", 16), ("ssm.conv_kernel", 4)];

/// What gguf-py calls a module, without its number; `*` stands for that of an expert.
fn renamed(module: &str, has_norms_after: bool) -> &'static str {
    match module {
        "model.embed_tokens"
        | "model.word_embeddings"
        | "backbone.embeddings"
        | "transformer.wte"
        | "transformer.word_embeddings"
        | "gpt_neox.embed_in" => "token_embd",
        "model.norm" | "model.final_layernorm" | "backbone.norm_f" | "transformer.ln_f" | "gpt_neox.final_layer_norm" => {
            "output_norm"
        }
        "transformer.wpe" => "position_embd",
        "lm_head" | "embed_out" => "output",
        "input_layernorm" | "attention_layernorm" | "norm" | "ln_1" => "attn_norm",
        "self_attn.q_proj" | "mixer.q_proj" | "attn.attention.q_proj" => "attn_q",
        "self_attn.k_proj" | "mixer.k_proj" | "attn.attention.k_proj" => "attn_k",
        "self_attn.v_proj" | "mixer.v_proj" | "attn.attention.v_proj" => "attn_v",
        "self_attn.o_proj"
        | "attention.dense"
        | "mixer.o_proj"
        | "self_attention.dense"
        | "attn.attention.out_proj"
        | "attn.c_proj" => "attn_output",
        "mixer.in_proj" | "mamba.in_proj" => "ssm_in",
        "mixer.conv1d" | "mamba.conv1d" => "ssm_conv1d",
        "mixer.norm" | "mamba.norm" => "ssm_norm",
        "mixer.out_proj" | "mamba.out_proj" => "ssm_out",
        "mixer.x_proj" | "mamba.x_proj" => "ssm_x",
        "mixer.dt_proj" | "mamba.dt_proj" => "ssm_dt",
        "mamba.dt_layernorm" => "ssm_dt_norm",
        "mamba.b_layernorm" => "ssm_b_norm",
        "mamba.c_layernorm" => "ssm_c_norm",
        "mixer.fc1_latent_proj" => "ffn_latent_down",
        "mixer.fc2_latent_proj" => "ffn_latent_up",
        "self_attn.sinks" => "attn_sinks",
        "attention.query_key_value" | "self_attention.query_key_value" | "attn.c_attn" => "attn_qkv",
        "self_attn.gate_proj" => "attn_gate",
        "self_attn.q_a_proj" => "attn_q_a",
        "self_attn.q_a_layernorm" => "attn_q_a_norm",
        "self_attn.q_b_proj" => "attn_q_b",
        "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
        "self_attn.kv_b_proj" => "attn_kv_b",
        "self_attn.q_norm" | "attention.query_layernorm" => "attn_q_norm",
        "self_attn.k_norm" | "attention.key_layernorm" => "attn_k_norm",
        "post_attention_layernorm" if has_norms_after => "post_attention_norm",
        "feedforward_layernorm" | "pre_mlp_layernorm" | "post_attention_layernorm" | "pre_ff_layernorm" | "ln_2" => "ffn_norm",
        "post_feedforward_layernorm" | "post_mlp_layernorm" => "post_ffw_norm",
        "mlp.gate_proj" | "feed_forward.gate_proj" | "mlp.c_fc_0" => "ffn_gate",
        "mlp.up_proj"
        | "mlp.gate_up_proj"
        | "feed_forward.up_proj"
        | "mixer.up_proj"
        | "mlp.c_fc_1"
        | "mlp.dense_h_to_4h"
        | "mlp.c_fc" => "ffn_up",
        "mlp.down_proj" | "feed_forward.down_proj" | "mixer.down_proj" | "mlp.c_proj" | "mlp.dense_4h_to_h" => "ffn_down",
        "mlp.gate"
        | "mlp.router.gate"
        | "block_sparse_moe.gate"
        | "block_sparse_moe.router"
        | "mixer.gate"
        | "feed_forward.router" => "ffn_gate_inp",
        "mlp.experts.*.gate_proj" | "block_sparse_moe.experts.*.w1" | "feed_forward.experts.*.gate_proj" => "ffn_gate_exps",
        "mlp.experts.*.up_proj"
        | "block_sparse_moe.experts.*.w3"
        | "mixer.experts.*.up_proj"
        | "feed_forward.experts.*.up_proj" => "ffn_up_exps",
        "mlp.experts.*.down_proj"
        | "block_sparse_moe.experts.*.w2"
        | "mixer.experts.*.down_proj"
        | "feed_forward.experts.*.down_proj" => "ffn_down_exps",
        "mlp.shared_experts.gate_proj" | "mlp.shared_mlp.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_experts.up_proj" | "mlp.shared_mlp.up_proj" | "shared_mlp.input_linear" | "mixer.shared_experts.up_proj" => {
            "ffn_up_shexp"
        }
        "mlp.shared_experts.down_proj"
        | "mlp.shared_mlp.down_proj"
        | "shared_mlp.output_linear"
        | "mixer.shared_experts.down_proj" => "ffn_down_shexp",
        other => panic!("{other}"),
    }
}

/// A tensor's name in the file.
fn gguf_name(name: &str, has_norms_after: bool) -> String {
    let layers = ["model.layers.", "backbone.layers.", "gpt_neox.layers.", "transformer.h."];
    let (block, rest) = match layers.iter().find_map(|layers| name.strip_prefix(layers)) {
        Some(rest) => {
            let (layer, rest) = rest.split_once('.').unwrap();
            (format!("blk.{layer}."), rest)
        }
        None => (String::new(), name),
    };
    if let Some((_, part)) = rest.split_once("experts.").filter(|(_, part)| !part.contains('.')) {
        let part = if part == "down_proj" { "ffn_down_exps" } else { "ffn_gate_up_exps" };
        return format!("{block}{part}.weight");
    }
    for (end, part) in [("A_log", "ssm_a"), (".D", "ssm_d"), ("dt_bias", "ssm_dt.bias")] {
        if rest.ends_with(end) {
            return format!("{block}{part}");
        }
    }
    if rest.ends_with("e_score_correction_bias") || rest.ends_with("expert_bias") {
        return format!("{block}exp_probs_b.bias");
    }
    let (module, kind) = if rest.ends_with("sinks") { (rest, "weight") } else { rest.rsplit_once('.').unwrap() };
    let module: Vec<_> =
        module.split('.').map(|part| if part.chars().all(|c| c.is_ascii_digit()) { "*" } else { part }).collect();
    format!("{block}{}.{kind}", renamed(&module.join("."), has_norms_after))
}

/// Halves of heads in turns, as llama.cpp rotates them.
fn permuted(values: &[f32], num_heads: usize, cols: usize) -> Vec<f32> {
    let head = values.len() / num_heads;
    let half = head / cols / 2;
    let row = |head_values: &[f32], row: usize| head_values[row * cols..(row + 1) * cols].to_vec();
    let rows = values.chunks_exact(head).flat_map(|values| (0..half).flat_map(move |i| [row(values, i), row(values, i + half)]));
    rows.flatten().collect()
}

/// Rows of q, k and v of each head: all of q, then of k, then of v.
fn apart(values: &[f32], num_heads: usize) -> Vec<f32> {
    let parts: Vec<_> = values.chunks_exact(values.len() / num_heads / 3).collect();
    (0..3).flat_map(|part| parts.iter().skip(part).step_by(3)).copied().flatten().copied().collect()
}

/// What frequencies are divided by (Llama 3.1).
fn llama3_factors(scaling: &Value, head_dim: usize) -> Vec<f32> {
    let number = |key: &str| scaling[key].as_f64().unwrap();
    let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
    let original = number("original_max_position_embeddings");
    let factor = |i: usize| {
        let wave_length = std::f64::consts::TAU * 10_000_f64.powf(2.0 * i as f64 / head_dim as f64);
        let smooth = ((original / wave_length - low) / (high - low)).clamp(0.0, 1.0);
        ((1.0 - smooth) / number("factor") + smooth).recip() as f32
    };
    (0..head_dim / 2).map(factor).collect()
}

/// What the converter of Falcon-H1 multiplies a row of a weight by.
fn multiplier(config: &Value, name: &str, row: usize) -> f32 {
    let number = |value: &Value| value.as_f64().map_or(1.0, |n| n as f32);
    let (of_input, mlp) = (number(&config["attention_in_multiplier"]), &config["mlp_multipliers"]);
    match name.trim_end_matches(".weight").rsplit('.').next().unwrap() {
        "down_proj" => number(&mlp[1]),
        "gate_proj" => number(&mlp[0]),
        "k_proj" => number(&config["key_multiplier"]) * of_input,
        "q_proj" | "v_proj" => of_input,
        "o_proj" => number(&config["attention_out_multiplier"]),
        "out_proj" => number(&config["ssm_out_multiplier"]),
        "in_proj" => {
            let [width, of_state] = ["mamba_d_ssm", "mamba_d_state"].map(|key| config[key].as_u64().unwrap_or(1) as usize);
            let of_state = of_state * config["mamba_n_groups"].as_u64().unwrap_or(1) as usize;
            let ends = [width, 2 * width, 2 * width + of_state, 2 * (width + of_state)];
            let part = ends.iter().filter(|end| row >= **end).count();
            number(&config["ssm_in_multiplier"]) * number(&config["ssm_multipliers"][part])
        }
        "lm_head" => number(&config["lm_head_multiplier"]),
        "embed_tokens" => number(&config["embedding_multiplier"]),
        _ => 1.0,
    }
}

/// Of each layer of a model whose layers mix tokens or have a network: its key and value heads, and columns of its network.
fn sizes_by_layer(config: &Value, layer: usize, [kv_heads, width]: [usize; 2]) -> [u32; 2] {
    if let [Some(period), Some(offset)] = ["attn_layer_period", "attn_layer_offset"].map(|key| config[key].as_u64()) {
        let attends = layer as u64 % period == offset;
        return [if attends { kv_heads as u32 } else { 0 }, width as u32];
    }
    let letter = config["hybrid_override_pattern"].as_str().map(|pattern| &pattern[layer..=layer]);
    match letter.or_else(|| config["layers_block_type"][layer].as_str()) {
        Some("*" | "attention") => [kv_heads as u32, 0],
        Some("-" | "moe") => [0, width as u32],
        _ => [0, 0],
    }
}

/// The values of a tensor as the converter leaves them.
fn converted(file: &File, config: &Value, (name, shape): (&str, &[usize]), [num_heads, kv_heads]: [usize; 2]) -> Vec<f32> {
    let values = drawn::drawn(name, shape.iter().product()).map(|u| drawn::text_value(name, shape, u));
    let mut values: Vec<f32> = values.collect();
    if name.contains("norm") && name.ends_with("weight") {
        for value in &mut values {
            *value += file.norm_offset;
        }
    }
    for (part, heads) in [("q_proj.", num_heads), ("k_proj.", kv_heads)] {
        if file.is_permuted && name.contains(part) {
            values = permuted(&values, heads, shape.get(1).copied().unwrap_or(1));
        }
    }
    if name.ends_with("A_log") {
        for value in &mut values {
            *value = -value.exp();
        }
    }
    if file.architecture == "falcon-h1" {
        let cols = shape[1..].iter().product::<usize>().max(1);
        for (i, value) in values.iter_mut().enumerate() {
            *value *= multiplier(config, name, i / cols);
        }
    }
    if file.golden == "gpt_neox" && name.contains("query_key_value") {
        values = apart(&values, num_heads);
    }
    values
}

/// With what the metadata has a list of, a value a layer.
fn with_lists(mut gguf: Gguf, (file, config): (&File, &Value), shapes: &BTreeMap<String, Vec<usize>>) -> Gguf {
    let key = |key: &str| format!("{}.{key}", file.architecture);
    // The other family with windows leaves them out.
    let lists_windows = ["exaone4", "exaone_moe", "afmoe", "mellum-sparse", "granitemoe_swa-nope"].contains(&file.golden);
    if let Some(kinds) = config["layer_types"].as_array().filter(|_| lists_windows) {
        let is_sliding: Vec<u8> = kinds.iter().map(|kind| u8::from(kind == "sliding_attention")).collect();
        gguf = gguf.array(&key("attention.sliding_window_pattern"), BOOL, is_sliding.len() as u64, &is_sliding);
    }
    if let Some(bases) = config["layer_rope_theta"].as_array() {
        let rotates: Vec<u8> = bases.iter().map(|base| u8::from(base.as_f64() != Some(0.0))).collect();
        gguf = gguf.array(&key("attention.rope_pattern"), BOOL, rotates.len() as u64, &rotates);
    }
    // Numbers of activations are lists of the metadata.
    for part in ["alpha_p", "alpha_n", "beta", "eps"] {
        let of_layers = shapes.keys().filter(|name| name.ends_with(&format!("act_fn.{part}")));
        let values: Vec<f32> =
            of_layers.map(|name| drawn::text_value(name, &[], drawn::drawn(name, 1).next().unwrap())).collect();
        if !values.is_empty() {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            gguf = gguf.array(&format!("xielu.{part}"), F32, values.len() as u64, &bytes);
        }
    }
    gguf
}

fn write(file: &File, config: &Value, path: &Path) {
    let own = [
        ("num_attention_heads", "n_head"),
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
        ("intermediate_size", "n_inner"),
    ];
    let also_called = |key: &str| own.iter().find(|(usual, _)| *usual == key).and_then(|(_, own)| config[*own].as_u64());
    let size = |key: &str| config[key].as_u64().or_else(|| also_called(key)).map(|n| n as usize);
    // Zeros, where nothing attends.
    let num_heads = size("num_attention_heads").unwrap_or(0);
    let usual_kv_heads = if config["multi_query"] == true { 1 } else { num_heads };
    let kv_heads = size("num_key_value_heads").unwrap_or(usual_kv_heads);
    let usual_width = if ["falcon", "gpt2"].contains(&file.golden) { 4 * size("hidden_size").unwrap() } else { 1 };
    let head_dim = size("head_dim").unwrap_or_else(|| size("hidden_size").unwrap() / num_heads.max(1));
    let num_layers =
        size("num_hidden_layers").or(size("num_layers")).unwrap_or_else(|| config["layers_block_type"].as_array().unwrap().len());
    let mut gguf = Gguf::new().entry("general.architecture", STRING, &string(file.architecture));
    let key = |key: &str| format!("{}.{key}", file.architecture);
    let of_config = [
        ("context_length", size("max_position_embeddings").unwrap_or(1 << 20)),
        ("embedding_length", size("hidden_size").unwrap()),
        ("feed_forward_length", size("intermediate_size").unwrap_or(usual_width)),
        ("block_count", num_layers),
        ("attention.head_count", num_heads),
        ("attention.head_count_kv", kv_heads),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
    ];
    let sizes = of_config.into_iter().chain(file.sizes.iter().map(|(key, n)| (*key, *n as usize)));
    let is_partial =
        ["hybrid_override_pattern", "layers_block_type", "attn_layer_period"].iter().any(|key| !config[*key].is_null());
    for (name, n) in sizes {
        let place = ["attention.head_count_kv", "feed_forward_length"].iter().position(|by_layer| *by_layer == name);
        gguf = match place.filter(|_| is_partial) {
            None => gguf.entry(&key(name), U32, &(n as u32).to_le_bytes()),
            Some(place) => {
                let width = size("intermediate_size").unwrap();
                let of_layer = |layer| sizes_by_layer(config, layer, [kv_heads, width])[place].to_le_bytes();
                let bytes: Vec<u8> = (0..num_layers).flat_map(of_layer).collect();
                gguf.array(&key(name), U32, num_layers as u64, &bytes)
            }
        };
    }
    let eps = config["rms_norm_eps"].as_f64().map(|eps| ("attention.layer_norm_rms_epsilon", eps as f32));
    for (name, number) in [("rope.freq_base", 10_000.0)].into_iter().chain(eps).chain(file.numbers.iter().copied()) {
        gguf = gguf.entry(&key(name), F32, &number.to_le_bytes());
    }
    if file.numbers.iter().any(|(name, _)| *name == "rope.scaling.factor") {
        gguf = gguf.entry(&key("rope.scaling.type"), STRING, &string("yarn"));
    }
    // Some have no key of it.
    let is_normalized = if ["afmoe", "hy_v3"].contains(&file.golden) { Some(true) } else { config["norm_topk_prob"].as_bool() };
    if file.golden == "falcon_mamba" {
        gguf = gguf.entry(&key("ssm.dt_b_c_rms"), BOOL, &[1]);
    }
    if let Some(is_normalized) = is_normalized {
        gguf = gguf.entry(&key("expert_weights_norm"), BOOL, &[u8::from(is_normalized)]);
    }
    let shapes = std::fs::read(golden_dir().join("drawn").join(file.golden).join("tensors.json")).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_slice(&shapes).unwrap();
    gguf = with_lists(gguf, (file, config), &shapes);
    let factors = &config["rope_scaling"];
    if factors["rope_type"] == "llama3" {
        let factors: Vec<u8> = llama3_factors(factors, head_dim).into_iter().flat_map(f32::to_le_bytes).collect();
        gguf = gguf.weight("rope_freqs.weight", &[head_dim as u64 / 2], 0, &factors);
    }
    // Experts lie one after the other in one tensor.
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (name, shape) in shapes.iter().filter(|(name, _)| !name.contains("act_fn")) {
        let mut values = converted(file, config, (name, shape), [num_heads, kv_heads]);
        let mut shape = shape.clone();
        if let ("gpt2", true, [rows, cols]) = (file.golden, name.contains(".c_"), &shape[..]) {
            values = (0..*cols).flat_map(|col| values.iter().skip(col).step_by(*cols)).copied().collect();
            shape = vec![*cols, *rows];
        }
        let is_expert = name.contains(".experts.") && name.ends_with(".weight");
        let (whole, all) = tensors
            .entry(gguf_name(name, file.has_norms_after))
            .or_insert_with(|| (if is_expert { [&[0], &shape[..]].concat() } else { shape.clone() }, Vec::new()));
        if is_expert {
            whole[0] += 1;
        }
        all.extend(values);
    }
    for (name, (shape, values)) in tensors {
        let dims: Vec<u64> = shape.iter().rev().map(|n| *n as u64).filter(|n| *n > 1).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        gguf = gguf.weight(&name, &dims, 0, &bytes);
    }
    gguf.write(path);
}

#[test]
fn drawn_models_agree_with_goldens_as_gguf_files() {
    for file in FILES {
        let golden = golden_dir().join("drawn").join(file.golden);
        let config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        write(&file, &config, &path);
        let source = ModelSource::Gguf { files: vec![path], tokenizer_dir: None, tokenizer_json: None };
        let backend = Arc::new(CpuBackend::new(Isa::detect(), 2).unwrap());
        let mut runner = load(&source, backend, Precision::Exact, KvDType::F32);
        let cases = cases_of(&golden.join("golden.json")).into_iter().take(file.num_cases);
        check_cases(&mut runner, &format!("{} as GGUF", file.golden), cases, 17, EXACT);
    }
}
