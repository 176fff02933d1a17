//! Keys of a model's JSON files that nothing reads: which of them change nothing, and which would change the results.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// What a key means where nothing has read it.
#[derive(Clone, Copy, Debug)]
pub enum Unread {
    /// The results are the same whatever it says.
    WithoutEffect,
    /// The results would be others, unless it says what [`is_off`](Off::is_off) takes; the text is a value that is refused.
    Refused(Off, &'static str),
}

/// When a key asks for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Off {
    /// False, 0, or empty.
    Empty,
    /// One.
    One,
    /// `"full_attention"` for all layers.
    FullAttention,
    /// `"rope"`.
    Rope,
}

impl Off {
    /// Whether the value asks for nothing.
    pub fn is_off(self, value: &Value) -> bool {
        match self {
            Self::Empty => match value {
                Value::Null => true,
                Value::Bool(on) => !on,
                Value::Number(n) => n.as_f64() == Some(0.0),
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(object) => object.is_empty(),
            },
            Self::One => value.as_f64() == Some(1.0),
            Self::FullAttention => value.as_array().is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention")),
            Self::Rope => value == "rope",
        }
    }
}

/// Keys with what they mean unread; the same for several keys.
pub type Table = &'static [(&'static [&'static str], Unread)];

use Unread::{Refused, WithoutEffect};

/// config.json, whatever the architecture. Keys that an architecture reads never come here.
pub const CONFIG: Table = &[
    // How the file, the training and other programs are.
    (
        &[
            "architectures",
            "model_type",
            "torch_dtype",
            "dtype",
            "transformers_version",
            "transformers.js_config",
            "_name_or_path",
            "_model_name_or_path",
            "name_or_path",
            "_commit_hash",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "attn_implementation",
            "auto_map",
            "cache_implementation",
            "use_cache",
            "gradient_checkpointing",
            "initializer_range",
            "use_return_dict",
            "return_dict",
            "return_dict_in_generate",
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "torchscript",
            "use_bfloat16",
            "pretraining_tp",
            "task_specific_params",
            "problem_type",
            "finetuning_task",
            "id2label",
            "label2id",
            "num_labels",
            "tokenizer_class",
            "tf_legacy_loss",
            "chunk_size_feed_forward",
            "tie_encoder_decoder",
            "is_decoder",
            "is_llama_config",
            "unsloth_fixed",
            "unsloth_version",
            "max_sequence_length",
            "num_nextn_predict_layers",
            "mamba_chunk_size",
            "chunk_size",
            "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "num_logits_to_keep",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "use_associative_scan",
            "use_falcon_mambapy",
            "use_mamba_kernels",
            "use_mambapy",
            "ep_size",
            "init_method",
            "init_std",
            "normalization_function",
            // Of Mamba 2, whose norms follow the gate whatever it says, and whose steps have no rank.
            "norm_before_gate",
            "time_step_rank",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        WithoutEffect,
    ),
    // What only training does.
    (
        &[
            "attention_dropout",
            "activation_dropout",
            "attention_probs_dropout_prob",
            "attn_pdrop",
            "embd_pdrop",
            "emb_pdrop",
            "embed_dropout",
            "hidden_dropout_prob",
            "layerdrop",
            "resid_dropout",
            "dropout",
            "embedding_dropout",
            "hidden_dropout",
            "mlp_dropout",
            "resid_pdrop",
            "residual_dropout",
            "classifier_dropout",
            "input_jitter_noise",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "router_z_loss_coef",
            "aux_loss_alpha",
            "neftune_noise_alpha",
            "seq_aux",
            "time_step_floor",
            "time_step_init_scheme",
            "time_step_max",
            "time_step_min",
            "time_step_scale",
            "z_loss_coefficient",
            "altup_coef_clip",
            "altup_lr_multiplier",
        ],
        WithoutEffect,
    ),
    // Token ids: the tokenizer adds what is to be added.
    (
        &[
            "bos_token_id",
            "pad_token_id",
            "unk_token_id",
            "sep_token_id",
            "cls_token_id",
            "mask_token_id",
            "decoder_start_token_id",
            "eod_token_id",
            "audio_token_id",
            "image_token_id",
            "video_token_id",
            "vision_end_token_id",
            "vision_start_token_id",
            "vision_token_id",
        ],
        WithoutEffect,
    ),
    // Another key that was read says it too.
    (
        &[
            "hidden_act",
            "activation_function",
            "mlp_type",
            "norm_type",
            "rope_theta",
            "rope_scaling",
            "rope_local_base_freq",
            "partial_rotary_factor",
            "original_max_position_embeddings",
            "_sliding_window_pattern",
            "sliding_window_size",
            "head_dim",
            "qk_head_dim",
            "n_ctx",
            "attention_layers",
            "block_ffn_dim_multiplier",
            "block_multiple_of",
            "mamba_expand",
            "expand",
            "layers_block_type",
            "hybrid_override_pattern",
            "norm_eps",
        ],
        WithoutEffect,
    ),
    // Sampling is what generation_config.json says; files of old have the library's defaults here.
    (
        &[
            "bad_words_ids",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "prefix",
            "remove_invalid_values",
            "repetition_penalty",
            "suppress_tokens",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        ],
        WithoutEffect,
    ),
    // Weights in formats that are not read.
    (
        &["quantization_config", "quantization", "compression_config"],
        Refused(Off::Empty, r#"{"quant_method": "quip", "bits": 4}"#),
    ),
    // Other models than the one that is computed.
    (
        &[
            "add_cross_attention",
            "alibi",
            "attention_bias",
            "attn_logit_softcapping",
            "clip_qkv",
            "final_logit_softcapping",
            "is_encoder_decoder",
            "lm_head_bias",
            "mlp_bias",
            "qk_layernorm",
            "rope_interleave",
            "rope_interleaved",
            "use_alibi",
            "use_bidirectional_attention",
            "use_cla",
            "use_mla",
            "use_mrope",
            "use_parallel_residual",
            "use_qk_norm",
            "use_qkv_bias",
            "use_sliding_window",
        ],
        Refused(Off::Empty, "true"),
    ),
    (
        &[
            "attention_chunk_size",
            "cross_attention_hidden_size",
            "moe_intermediate_size",
            "n_routed_experts",
            "no_rope_layer_interval",
            "num_experts",
            "num_kv_shared_layers",
            "num_local_experts",
            "query_pre_attn_scalar",
            "sliding_window",
            "sliding_window_pattern",
        ],
        Refused(Off::Empty, "8"),
    ),
    (
        &["audio_config", "pruned_heads", "text_config", "vision_config", "no_rope_layers"],
        Refused(Off::Empty, r#"{"hidden_size": 8}"#),
    ),
    (
        &[
            "attention_multiplier",
            "embedding_multiplier",
            "full_attn_mod",
            "interpolate_factor",
            "logit_scale",
            "logits_scaling",
            "moe_layer_freq",
            "residual_multiplier",
            "rotary_pct",
        ],
        Refused(Off::One, "2.5"),
    ),
    (&["layer_types"], Refused(Off::FullAttention, r#"["sliding_attention"]"#)),
    (&["position_embedding_type"], Refused(Off::Rope, r#""nope""#)),
];

/// An object under `rope_scaling` or `rope_parameters`: what the type of rope that it names does not take.
pub const ROPE: Table = &[
    (
        &[
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "finetuned",
            "full_attention",
            "high_freq_factor",
            "low_freq_factor",
            "mscale",
            "mrope_interleaved",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "partial_rotary_factor",
            "rope_theta",
            "rope_type",
            "sliding_attention",
            "truncate",
            "type",
        ],
        WithoutEffect,
    ),
    (&["long_mscale", "short_mscale"], Refused(Off::One, "1.25")),
    (&["mrope_section"], Refused(Off::Empty, "[16, 24, 24]")),
];

/// generation_config.json.
pub const GENERATION: Table = &[
    (
        &[
            "_from_model_config",
            "transformers_version",
            "trust_remote_code",
            "bos_token_id",
            "pad_token_id",
            "decoder_start_token_id",
            "cache_config",
            "cache_implementation",
            "chat_format",
            "max_matching_ngram_size",
            "max_window_size",
            "disable_compile",
            "low_memory",
            "output_attentions",
            "output_hidden_states",
            "output_logits",
            "output_scores",
            "return_dict_in_generate",
            "return_legacy_cache",
            "use_cache",
            // Of beam search, which another key asks for.
            "diversity_penalty",
            "early_stopping",
            "length_penalty",
            "low_memory",
            // Of an assistant, which changes the speed alone.
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_lookbehind",
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "prompt_lookup_num_tokens",
            "target_lookbehind",
            // The probabilities are the same, and those that are no numbers end a request.
            "remove_invalid_values",
            "renormalize_logits",
        ],
        WithoutEffect,
    ),
    (
        &["bad_words_ids", "begin_suppress_tokens", "sequence_bias", "stop_strings", "suppress_tokens"],
        Refused(Off::Empty, "[[5]]"),
    ),
    (
        &[
            "encoder_no_repeat_ngram_size",
            "epsilon_cutoff",
            "eta_cutoff",
            "force_words_ids",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "max_time",
            "min_length",
            "min_new_tokens",
            "no_repeat_ngram_size",
            "penalty_alpha",
            "top_h",
        ],
        Refused(Off::Empty, "3"),
    ),
    (
        &["constraints", "dola_layers", "exponential_decay_length_penalty", "guidance", "token_healing", "watermarking_config"],
        Refused(Off::Empty, r#"{"bias": 2.5}"#),
    ),
    (
        &["encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_beams", "num_return_sequences", "typical_p"],
        Refused(Off::One, "4"),
    ),
];

/// The keys of an object that nobody knows, or why the object asks for what is not done.
///
/// `read` are the keys that were read, behind `prefix`.
pub fn check(
    table: Table,
    object: &Map<String, Value>,
    read: &BTreeSet<String>,
    prefix: &str,
) -> Result<Vec<String>, (String, String)> {
    let mut unknown = Vec::new();
    for (key, value) in object.iter().filter(|(key, value)| !value.is_null() && !read.contains(&format!("{prefix}{key}"))) {
        match table.iter().find(|(keys, _)| keys.contains(&key.as_str())) {
            None => unknown.push(format!("{prefix}{key}")),
            Some((_, Refused(off, _))) if !off.is_off(value) => {
                let shown: String = value.to_string().chars().take(80).collect();
                return Err((key.clone(), format!("is {shown}, which is not supported here and would change the results")));
            }
            Some(_) => {}
        }
    }
    Ok(unknown)
}

/// Warns of keys that nobody knows, once for a file.
pub fn warn_of(unknown: &[String], file: &str) {
    if !unknown.is_empty() {
        tracing::warn!("{file}: unknown keys are ignored: {}", unknown.join(", "));
    }
}
