//! The configuration of the language model within a model that sees or hears.

use serde_json::{Map, Value, json};

use super::arch::architectures;
use crate::media;

/// What Transformers takes where the configuration of a language model within another says nothing: such files have only what
/// differs from it. An older file has no `rope_parameters`, and may lack the base of its rotations, too.
fn usual() -> Vec<(&'static str, Value)> {
    [of_glm(), of_qwen(), of_others()].concat()
}

/// Of GLM.
fn of_glm() -> Vec<(&'static str, Value)> {
    vec![
        ("glmasr", glmasr()),
        (
            "glm4v_text",
            json!({
                "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
            }),
        ),
        (
            "glm4v_moe_text",
            json!({
                "vocab_size": 151_424, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
                "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5,
                "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_routed_experts": 128,
            }),
        ),
        (
            "glm_ocr_text",
            json!({
                "vocab_size": 59_392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
                "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            }),
        ),
    ]
}

/// Of Qwen.
fn of_qwen() -> Vec<(&'static str, Value)> {
    vec![
        (
            "qwen2",
            json!({
                "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
            }),
        ),
        ("qwen2_vl_text", qwen2_vl()),
        ("qwen2_5_vl_text", qwen2_vl()),
        (
            "qwen3",
            json!({
                "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768,
                "rms_norm_eps": 1e-6,
            }),
        ),
        (
            "qwen3_vl_text",
            json!({
                "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128_000,
                "rms_norm_eps": 1e-6, "rope_theta": 5e5,
            }),
        ),
        (
            "qwen3_vl_moe_text",
            json!({
                "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6,
                "rope_theta": 5e5, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
            }),
        ),
        (
            "qwen3_5_text",
            qwen3_5(
                &json!({ "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4, "intermediate_size": 12_288 }),
            ),
        ),
        (
            "qwen3_5_moe_text",
            qwen3_5(&json!({
                "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
            })),
        ),
    ]
}

/// Of others.
fn of_others() -> Vec<(&'static str, Value)> {
    vec![
        ("exaone4", exaone4()),
        ("exaone4_5_text", exaone4()),
        (
            "gemma3_text",
            json!({
                "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
            }),
        ),
        (
            "lfm2",
            json!({
                "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
                "rope_theta": 1e6,
            }),
        ),
        (
            "llama",
            json!({
                "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
                "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
            }),
        ),
        (
            "llama4_text",
            json!({
                "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
                "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_experts_per_tok": 1,
                "num_local_experts": 16, "attention_chunk_size": 8192,
            }),
        ),
        (
            "ministral3",
            json!({
                "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
                "rms_norm_eps": 1e-5,
            }),
        ),
        (
            "mistral",
            json!({
                "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
                "sliding_window": 4096,
            }),
        ),
        ("mllama_text_model", mllama()),
    ]
}

/// Under both of its names.
fn exaone4() -> Value {
    json!({
        "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    })
}

/// Of the smaller of two.
fn mllama() -> Value {
    json!({
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    })
}

/// A llama whose sizes are its own.
fn glmasr() -> Value {
    json!({
        "vocab_size": 59_264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "eos_token_id": [59_246, 59_253, 59_255],
    })
}

/// Of both generations.
fn qwen2_vl() -> Value {
    json!({
        "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    })
}

/// Of both kinds, beside their own.
fn qwen3_5(own: &Value) -> Value {
    let mut usual = json!({
        "vocab_size": 248_320, "num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    });
    for (key, value) in own.as_object().into_iter().flatten() {
        usual[key] = value.clone();
    }
    usual
}

/// Keys of encoders, and of adapters that go with these, which stand beside those of a language model.
const OF_ENCODERS: [&str; 7] =
    ["vision_config", "audio_config", "img_processor", "embd_layer", "audio_processor", "vision_lora", "speech_lora"];

/// The configuration of the language model of one that sees; of a model of text its own.
pub(super) fn config_of(mut whole: Map<String, Value>) -> Map<String, Value> {
    let is_implemented = |object: &Map<String, Value>| {
        let name = object.get("model_type").and_then(Value::as_str);
        name.is_some_and(|name| architectures().any(|architecture| architecture.model_types.contains(&name)))
    };
    match whole.get("text_config").and_then(Value::as_object) {
        Some(text) if is_implemented(text) => {
            let mut text = text.clone();
            let model_type = |object: &Map<String, Value>| object.get("model_type").and_then(Value::as_str).map(str::to_owned);
            let is_of = |name: &str, object| model_type(object).as_deref() == Some(name);
            let all = usual();
            // Of some, the whole model decides.
            let own =
                all.iter().find(|(name, _)| is_of(name, &whole)).or_else(|| all.iter().find(|(name, _)| is_of(name, &text)));
            if let Some((_, usual)) = own {
                for (key, value) in usual.as_object().into_iter().flatten() {
                    text.entry(key).or_insert_with(|| value.clone());
                }
            }
            for key in ["eos_token_id", "tie_word_embeddings", "quantization_config"] {
                if let (None, Some(value)) = (text.get(key), whole.remove(key)) {
                    text.insert(key.to_owned(), value);
                }
            }
            text
        }
        _ => {
            // Of some that see, the language model's keys stand beside those of the encoder.
            let sees = |name: &str| media::families().any(|family| family == name);
            if whole.get("model_type").and_then(Value::as_str).is_some_and(sees) {
                for key in OF_ENCODERS {
                    whole.remove(key);
                }
            }
            whole
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{DecoderConfig, fields::HfFields};

    fn decoder(whole: &Value) -> DecoderConfig {
        let text = config_of(whole.as_object().unwrap().clone());
        let name = text["model_type"].as_str().unwrap().to_owned();
        let own = architectures().find(|own| own.model_types.contains(&&name[..])).unwrap();
        (own.from_hf)(&HfFields::new("config.json", text)).unwrap()
    }

    /// As the files of Gemma 3 4B and 12B say it.
    #[test]
    fn what_a_language_model_leaves_out_is_what_transformers_takes() {
        let mut file = json!({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {
            "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        }});
        let config = decoder(&file);
        let attention = config.layers[0].attention;
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (8, 4, 256));
        assert_eq!((attention.window, config.layers[5].attention.window), (Some(1024), None));
        assert_eq!(
            (config.vocab_size, config.max_position_embeddings, &config.eos_token_ids[..]),
            (262_208, 131_072, &[1, 106][..])
        );
        assert_eq!(config.ropes.iter().map(|rope| rope.theta).collect::<Vec<_>>(), [1e6, 1e4]);
        assert!(config.tie_word_embeddings);
        file["text_config"]["num_attention_heads"] = json!(16);
        file["text_config"]["num_key_value_heads"] = json!(8);
        assert_eq!(decoder(&file).layers[0].attention.num_heads, 16, "what the file says goes first");
    }

    /// LLaVA 1.5 and 1.6.
    #[test]
    fn a_null_is_no_omission() {
        let vicuna = json!({"model_type": "llava", "text_config": {
            "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32_064,
        }});
        let config = decoder(&vicuna);
        assert_eq!((config.layers.len(), config.hidden_size, config.layers[0].attention.num_kv_heads), (32, 4096, 32));
        let mut mistral = json!({"model_type": "llava_next", "text_config": {"model_type": "mistral", "sliding_window": null}});
        assert_eq!(decoder(&mistral).layers[0].attention.window, None);
        mistral["text_config"].as_object_mut().unwrap().remove("sliding_window");
        assert_eq!(decoder(&mistral).layers[0].attention.window, Some(4096));
    }
}
