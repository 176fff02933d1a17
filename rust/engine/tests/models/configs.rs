//! Configurations in every layout, and what is said of those that make no sense.

use std::{collections::BTreeSet, path::Path};

use device::Activation;
use engine::{
    EngineError, GenerationConfig, ModelSource,
    keys::Unread,
    model::{
        DecoderConfig, ModelFiles, RopeScaling,
        arch::{Found, check_architecture},
        config::FfnConfig,
        fields::HfFields,
    },
    weights::SafetensorsFiles,
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{
    self,
    gguf_writer::{Gguf, STRING, U32, string},
};

fn golden_config(name: &str) -> Value {
    let path = common::golden_dir().join("text").join(name).join("config.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The decoder of a golden model with some fields of its config.json replaced; null removes one.
fn changed(name: &str, changes: &Value) -> Result<DecoderConfig, String> {
    let mut config = golden_config(name);
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    open(name, &config, None)
}

fn open(weights: &str, config: &Value, expected: Option<&str>) -> Result<DecoderConfig, String> {
    let dir = TempDir::new().unwrap();
    let source = common::golden_dir().join("text").join(weights).join("model.safetensors");
    std::fs::copy(source, dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    open_dir(dir.path(), expected).map_err(|e| e.to_string())
}

fn open_dir(dir: &Path, expected: Option<&str>) -> Result<DecoderConfig, EngineError> {
    let source = ModelSource::HuggingFace { path: dir.to_owned(), tokenizer_json: None };
    ModelFiles::open(&source, expected).map(|files| files.config().clone())
}

#[test]
fn older_and_newer_layouts_say_the_same() {
    let old = changed("llama3-rope", &json!({})).unwrap();
    let mut parameters = golden_config("llama3-rope")["rope_scaling"].clone();
    parameters["rope_theta"] = json!(500_000.0);
    let new = changed("llama3-rope", &json!({"rope_scaling": null, "rope_theta": null, "rope_parameters": parameters})).unwrap();
    assert_eq!(old.ropes, new.ropes);
    assert!(matches!(old.ropes[0].scaling, RopeScaling::Llama3 { original_max_positions: 64, .. }));

    let old = changed("gemma3", &json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0}})).unwrap();
    let types: Vec<_> = (1..=7).map(|i| if i == 6 { "full_attention" } else { "sliding_attention" }).collect();
    let parameters = json!({
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    });
    let new = changed(
        "gemma3",
        &json!({"rope_scaling": null, "rope_theta": null, "rope_local_base_freq": null, "sliding_window_pattern": null,
            "rope_parameters": parameters, "layer_types": types}),
    )
    .unwrap();
    assert_eq!((&old.ropes, &old.layers), (&new.ropes, &new.layers));
    assert_eq!(new.ropes[0].scaling, RopeScaling::Linear(8.0));
    assert_eq!((new.ropes[1].theta, &new.ropes[1].scaling), (10_000.0, &RopeScaling::None));
}

#[test]
fn each_family_has_its_own_rule_of_windows() {
    let windows = |name, changes| changed(name, &changes).unwrap().layers.iter().map(|l| l.attention.window).collect::<Vec<_>>();
    assert_eq!(windows("mistral", json!({})), [None; 3], "a window beyond the context is none");
    assert_eq!(windows("mistral", json!({"sliding_window": 100})), [Some(100); 3]);
    assert_eq!(windows("mistral", json!({"sliding_window": null})), [None; 3]);
    assert_eq!(windows("phi3", json!({"sliding_window": 100})), [Some(100); 3]);
    for name in ["qwen2", "qwen3"] {
        let base = json!({"sliding_window": 100, "max_window_layers": 1, "layer_types": null});
        assert_eq!(windows(name, base), [None; 3], "use_sliding_window is false");
        let used = json!({"sliding_window": 100, "max_window_layers": 1, "layer_types": null, "use_sliding_window": true});
        assert_eq!(windows(name, used), [None, Some(100), Some(100)]);
        let types = json!({"sliding_window": 100, "use_sliding_window": true,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]});
        assert_eq!(windows(name, types), [Some(100), None, Some(100)]);
    }
    let w = Some(24);
    assert_eq!(windows("gemma3", json!({})), [w, w, w, w, w, None, w]);
    assert_eq!(windows("gemma3", json!({"sliding_window_pattern": 2})), [w, None, w, None, w, None, w]);
}

#[test]
fn gemma3_scales_scores_by_its_own_scalar() {
    let config = changed("gemma3", &json!({"query_pre_attn_scalar": 64})).unwrap();
    assert!((config.layers[0].attention.scale - 0.125).abs() < 1e-7);
    assert!((config.embedding_scale - 8.0).abs() < 1e-7);
}

#[test]
fn gemma2_has_softcaps_unless_they_are_null() {
    let caps = |config: DecoderConfig| (config.layers[0].attention.softcap, config.final_softcap);
    let mut config = golden_config("gemma2");
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        config.as_object_mut().unwrap().remove(key);
    }
    assert_eq!(caps(open("gemma2", &config, None).unwrap()), (Some(50.0), Some(30.0)));
    let null = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null});
    assert_eq!(caps(changed("gemma2", &null).unwrap()), (None, None));
}

#[test]
fn smollm3_rotates_as_listed_or_by_interval() {
    let ropes = |changes| {
        let config = changed("smollm3", &changes).unwrap();
        config.layers.iter().map(|layer| layer.attention.rope.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(ropes(json!({"no_rope_layers": [0, 1, 1, 0]})), [false, true, true, false]);
    assert_eq!(ropes(json!({"no_rope_layers": null, "no_rope_layer_interval": 2})), [true, false, true, false]);
    assert_eq!(ropes(json!({"no_rope_layers": null, "no_rope_layer_interval": null})), [true, true, true, false]);
}

#[test]
fn granite_divides_logits_and_has_a_scale_of_its_own() {
    let config = changed("granite", &json!({"logits_scaling": 8.0, "attention_multiplier": 0.25})).unwrap();
    assert_eq!((config.logit_scale, config.layers[0].attention.scale), (0.125, 0.25));
    for (changes, words) in [
        (json!({"logits_scaling": 0.0}), ["logit scale", "inf"]),
        (json!({"residual_multiplier": -1.0}), ["residual scale", "-1"]),
        (json!({"embedding_multiplier": 0.0}), ["embedding scale", "0"]),
        (json!({"attention_multiplier": 1e300}), ["attention scale", "inf"]),
    ] {
        let error = changed("granite", &changes).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{changes}: {error}");
    }
}

/// What Transformers 5 writes for these families, beside what their checkpoints have.
#[test]
fn lists_say_of_each_layer_what_it_is() {
    let recurrent = |changes| {
        let layers = changed("granitemoehybrid", &changes).unwrap().layers;
        layers.iter().map(|layer| layer.recurrent.is_some()).collect::<Vec<_>>()
    };
    let types = json!({"layer_types": ["full_attention", "linear_attention", "linear_attention"]});
    assert_eq!(recurrent(types), [false, true, true]);

    let sparse = |changes| {
        let layers = changed("glm4-moe-lite", &changes).unwrap().layers;
        layers.iter().map(|layer| matches!(layer.ffn, FfnConfig::Experts(_))).collect::<Vec<_>>()
    };
    assert_eq!(sparse(json!({"mlp_layer_types": ["sparse", "dense"]})), [true, false]);
    assert_eq!(sparse(json!({"first_k_dense_replace": 2})), [false, false]);
    let error = changed("glm4-moe-lite", &json!({"mlp_layer_types": ["sparse", "thin"]})).unwrap_err();
    assert!(error.contains("`mlp_layer_types` has `thin`"), "{error}");

    let chunks = |changes| {
        let layers = changed("llama4-text", &changes).unwrap().layers;
        layers.iter().map(|layer| (layer.attention.chunk, layer.attention.rope.is_some())).collect::<Vec<_>>()
    };
    let (chunked, whole) = ((Some(24), true), (None, false));
    assert_eq!(chunks(json!({"no_rope_layers": []})), [chunked, chunked, chunked, whole], "an empty list says nothing");
    let tuned = |value| changed("llama4-text", &json!({"attn_temperature_tuning": value})).unwrap().layers[3].attention.q_scale;
    assert_eq!(tuned(json!(4)), tuned(json!(true)));
    assert_eq!((tuned(json!(0)), tuned(json!(false))), (None, None));
    let types = ["chunked_attention", "full_attention", "full_attention", "chunked_attention"];
    assert_eq!(chunks(json!({"layer_types": types})), [chunked, (None, true), (None, true), (Some(24), false)]);
}

/// As the files of LFM2 and of Command R7B say it.
#[test]
fn older_files_have_other_words_for_the_same() {
    let width = |changes| match changed("lfm2", &changes).unwrap().layers[0].ffn {
        FfnConfig::Dense(dense) => dense.intermediate_size,
        _ => panic!("no dense network"),
    };
    let beginning = json!({"intermediate_size": null, "block_ff_dim": 12_288, "block_auto_adjust_ff_dim": true});
    assert_eq!(width(beginning), 8192);
    let both = json!({"intermediate_size": 96, "block_ff_dim": 80, "tie_word_embeddings": true, "tie_embedding": false});
    assert_eq!((width(both.clone()), changed("lfm2", &both).unwrap().tie_word_embeddings), (80, false));
    for name in ["cohere", "cohere2"] {
        changed(name, &json!({"position_embedding_type": "rope_gptj"})).unwrap();
    }
    for (name, kind) in [("cohere2", "alibi"), ("llama", "rope_gptj")] {
        let error = changed(name, &json!({"position_embedding_type": kind})).unwrap_err();
        assert!(error.contains("`position_embedding_type`") && error.contains(kind), "{error}");
    }
    let error = changed("deepseek-v3", &json!({"moe_layer_freq": 2})).unwrap_err();
    assert!(error.contains("`moe_layer_freq`"), "{error}");
}

/// GLM 4.7 Flash has 20 heads and a width of 2048.
#[test]
fn heads_of_latent_attention_need_not_divide_the_width() {
    for name in ["deepseek-v2", "deepseek-v3", "glm4-moe-lite"] {
        let config = changed(name, &json!({"num_attention_heads": 3, "head_dim": null})).unwrap();
        assert_eq!(config.layers[0].attention.num_heads, 3, "{name}");
        let error = changed(name, &json!({"num_attention_heads": 3, "head_dim": null, "qk_rope_head_dim": null})).unwrap_err();
        assert!(error.contains("`qk_rope_head_dim` is missing"), "{error}");
    }
}

#[test]
fn biases_of_attention_are_asked_for() {
    for name in ["deepseek-v2", "deepseek-v3", "glm4-moe-lite", "qwen3-next", "llama"] {
        for bias in [true, false] {
            let attention = changed(name, &json!({"attention_bias": bias})).unwrap().layers[0].attention;
            assert_eq!([attention.qkv_bias, attention.output_bias], [bias; 2], "{name}");
        }
    }
}

#[test]
fn networks_without_gates_have_the_activation_that_the_file_says() {
    let activation = |name, value| match changed(name, &json!({"hidden_act": value})).unwrap().layers[0].ffn {
        FfnConfig::Dense(dense) => dense.activation,
        _ => panic!("{name} has no dense network"),
    };
    for name in ["starcoder2", "phi2"] {
        assert_eq!(activation(name, json!("gelu")), Activation::Gelu, "{name}");
        assert_eq!(activation(name, json!("silu")), Activation::Silu, "{name}");
        assert_eq!(activation(name, json!(null)), Activation::GeluTanh, "{name}");
    }
}

/// The keys of Command R, where they have one head.
#[test]
fn norms_of_one_head_of_its_own_may_be_stored_as_a_matrix() {
    let dir = TempDir::new().unwrap();
    let data: Vec<u8> = (0..4).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let shapes = [("matrix", vec![1, 4]), ("vector", vec![4]), ("rows", vec![2, 2])];
    let views = shapes.map(|(name, shape)| (name, TensorView::new(Dtype::F32, shape, &data).unwrap()));
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let files = SafetensorsFiles::open(dir.path()).unwrap();
    assert_eq!(files.vector("matrix").unwrap().bytes(), files.vector("vector").unwrap().bytes());
    let error = files.vector("rows").err().unwrap().to_string();
    assert!(error.contains("`rows` has 2 dimensions instead of 1"), "{error}");
}

#[test]
fn part_of_a_head_rotates_where_the_file_says_nothing() {
    for (name, rotary_dim) in [("phi2", 8), ("stablelm", 4), ("glm4", 8), ("starcoder2", 16)] {
        assert_eq!(changed(name, &json!({"partial_rotary_factor": null})).unwrap().ropes[0].rotary_dim, rotary_dim, "{name}");
    }
}

#[test]
fn longrope_chooses_by_prompt_and_stretches_by_the_ratio_of_lengths() {
    let config = changed("phi3-longrope", &json!({})).unwrap();
    assert_eq!([64, 65].map(|n| [0, 1, 255].map(|p| config.rope_rows(n).row(p))), [[0, 2, 510], [1, 3, 511]]);
    assert_eq!(config.num_rope_tables(), 2);
    let RopeScaling::LongRope { attention_factor, .. } = config.ropes[0].scaling else { panic!("longrope") };
    let expected = (1.0 + 4_f32.ln() / 64_f32.ln()).sqrt();
    assert!((attention_factor - expected).abs() < 1e-6);
}

#[test]
fn values_that_make_no_sense_are_named() {
    for (changes, words) in [
        (json!({"num_attention_heads": 0}), ["number of attention heads", "0"]),
        (json!({"num_attention_heads": null}), ["`num_attention_heads`", "missing"]),
        (json!({"num_attention_heads": -4}), ["`num_attention_heads`", "-4"]),
        (json!({"num_key_value_heads": 3}), ["4 attention heads", "3 key and value heads"]),
        (json!({"hidden_size": 1_u64 << 40}), ["`hidden_size`", "1099511627776"]),
        (json!({"hidden_size": 63, "head_dim": null}), ["`hidden_size`", "63"]),
        (json!({"hidden_size": "64"}), ["`hidden_size`", "\"64\""]),
        (json!({"head_dim": 15}), ["15 elements", "even"]),
        (json!({"head_dim": 1 << 20}), ["head dimension", "1048576"]),
        (json!({"num_hidden_layers": 1_000_000}), ["`num_hidden_layers`", "1000000"]),
        (json!({"vocab_size": 0}), ["vocabulary size", "0"]),
        (json!({"rms_norm_eps": 0.0}), ["norm epsilon", "0"]),
        (json!({"rms_norm_eps": 1e300}), ["norm epsilon", "inf"]),
        (json!({"rope_theta": -1.0}), ["rope base", "-1"]),
        (json!({"hidden_act": "mish"}), ["`hidden_act`", "`mish`"]),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}),
            ["`dynamic`", "yarn"],
        ),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}}), ["beta_fast", "0"]),
        (json!({"rope_scaling": {"type": "linear"}}), ["`rope_scaling.factor`", "missing"]),
        (json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}), ["1 rope short", "8"]),
    ] {
        let error = changed("llama", &changes).err().unwrap_or_else(|| panic!("{changes} is accepted"));
        for word in words {
            assert!(error.contains(word) && error.contains("config.json"), "{changes}: {error:?} does not contain {word:?}");
        }
    }
}

/// What is wrong with the weights of a folder.
fn load_error(dir: &Path) -> String {
    let source = ModelSource::HuggingFace { path: dir.to_owned(), tokenizer_json: None };
    let files = ModelFiles::open(&source, None).unwrap();
    let backend = std::sync::Arc::new(device::cpu::ReferenceBackend::new());
    let options = engine::model_runner::RunnerOptions {
        precision: device::Precision::Exact,
        kv_dtype: device::KvDType::F32,
        max_num_batched_tokens: 8,
        max_num_seqs: 1,
    };
    engine::model_runner::ModelRunner::load(&files, backend, options, &|_| {}).err().expect("an error").to_string()
}

#[test]
fn weights_that_contradict_the_configuration_are_named() {
    let error = |name, changes: &Value| {
        let dir = TempDir::new().unwrap();
        let mut config = golden_config(name);
        changes.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
        let weights = common::golden_dir().join("text").join(name).join("model.safetensors");
        std::fs::copy(weights, dir.path().join("model.safetensors")).unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        load_error(dir.path())
    };
    let e = error("llama", &json!({"intermediate_size": 95}));
    assert!(e.contains("mlp.gate_proj.weight") && e.contains("[96, 64]") && e.contains("[95, 64]"), "{e}");
    let e = error("llama", &json!({"vocab_size": 511}));
    assert!(e.contains("model.embed_tokens.weight") && e.contains("[511, 64]"), "{e}");
    let e = error("llama", &json!({"num_hidden_layers": 4}));
    assert!(e.contains("model.layers.3."), "{e}");
    let e = error("llama", &json!({"model_type": "qwen2"}));
    assert!(e.contains("model.layers.0.self_attn.q_proj.bias"), "{e}");
    let e = error("stablelm", &json!({"model_type": "starcoder2", "use_qkv_bias": null}));
    assert!(e.contains("model.layers.0.self_attn.o_proj.bias"), "{e}");
    let e = error("stablelm-parallel", &json!({"num_key_value_heads": 4}));
    assert!(e.contains("k_layernorm.norms.2.weight"), "{e}");
    let e = error("llama", &json!({"model_type": "qwen3"}));
    assert!(e.contains("model.layers.0.self_attn.q_norm.weight"), "{e}");
}

#[test]
fn a_missing_projection_is_named_itself() {
    let folder = common::golden_dir().join("text/llama");
    let mut bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    for (name, other) in
        [("layers.1.self_attn.q_proj", "layers.1.self_attn.x_proj"), ("layers.1.mlp.up_proj", "layers.1.mlp.xx_proj")]
    {
        let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
        bytes[at..at + name.len()].copy_from_slice(other.as_bytes());
        let dir = TempDir::new().unwrap();
        std::fs::copy(folder.join("config.json"), dir.path().join("config.json")).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
        bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
        let error = load_error(dir.path());
        assert!(error.contains(&format!("`model.{name}.weight` is missing")), "{error}");
    }
}

#[test]
fn experts_of_a_gguf_file_are_refused_as_such() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("experts.gguf");
    Gguf::new()
        .entry("general.architecture", STRING, &string("qwen2"))
        .entry("qwen2.expert_count", U32, &8_u32.to_le_bytes())
        .tensor("token_embd.weight", &[4, 2], 0, 0)
        .write(&path);
    let source = ModelSource::Gguf { files: vec![path], tokenizer_dir: None, tokenizer_json: None };
    let error = ModelFiles::open(&source, None).map(drop).unwrap_err();
    assert!(
        matches!(&error, EngineError::Architecture(why) if why.contains("8 experts") && why.contains("qwen2.expert_count")),
        "{error}"
    );
}

#[test]
fn architectures_are_found_or_refused_with_the_list() {
    let hf = |model_type| Found::HuggingFace { model_type, classes: &["Qwen3ForCausalLM"] };
    assert_eq!(check_architecture(None, hf(Some("phi3"))).unwrap().name(), "phi3");
    assert_eq!(check_architecture(None, hf(None)).unwrap().name(), "qwen3");
    assert_eq!(check_architecture(None, Found::Gguf("llama")).unwrap().name(), "llama");
    assert_eq!(check_architecture(Some("mistral"), Found::Gguf("llama")).unwrap().name(), "mistral");
    assert_eq!(check_architecture(Some("gemma3"), hf(Some("gemma3_text"))).unwrap().name(), "gemma3");
    let list = "implemented: dense: llama, mistral, phi3, qwen2, qwen2_vl, qwen2_5_vl, qwen3, qwen3_vl, gemma3, \
         gemma-embedding, gemma, gemma2, gemma3n, gemma4, starcoder2, phi, stablelm, olmo2, olmo3, smollm3, glm4, glm4v, glm_ocr, granite, cohere, cohere2, \
         ministral3, hunyuan_v1_dense, ministral, vaultgemma, glm, seed_oss, ernie4_5, exaone4, helium, nemotron, arcee, \
         jais2, apertus, granite_swa, hyperclovax, iquestcoder, cwm, mllama_text_model, olmo, gpt_neox, falcon, gptj, \
         codegen, gpt2, gpt_neo, gpt_bigcode, opt, biogpt, persimmon, nanochat, exaone, internlm2, internlm3, minicpm, orion, xverse; mixtures of experts: mixtral, qwen2_moe, qwen3_moe, \
         qwen3_vl_moe, granitemoe, phimoe, glm4_moe, glm4v_moe, hunyuan_v1_moe, gpt_oss, llama4_text, ernie4_5_moe, exaone_moe, granitemoe_swa, \
         dots1, solar_open, hy_v3, olmoe, flex_olmo, minimax_m2, mellum, flint, sarvam_moe, bailing_moe, bailing_moe_v2, afmoe, dbrx, cohere2_moe, laguna, kolibri1; latent attention: \
         deepseek_v2, deepseek_v3, glm4_moe_lite, youtu, sarvam_mla, axk1, mistral4, minicpm3; recurrent layers: lfm2, lfm2_moe, lfm3, \
         granitemoehybrid, bamba, nemotron_h, nemotron_h_moe, falcon_h1, mamba, falcon_mamba, mamba2, jamba, qwen3_next, qwen3_5_text, qwen3_5_moe_text, olmo_hybrid, kimi_linear; \
         encoders, which make vectors: bert, roberta, xlm-roberta, distilbert, nomic_bert, modernbert, eurobert, gte, \
         jina_embeddings_v3";
    for (expected, found, words) in [
        (None, hf(Some("xlstm")), vec!["`xlstm`"]),
        (None, Found::Gguf("jina-bert-v2"), vec!["`jina-bert-v2`"]),
        (None, Found::HuggingFace { model_type: None, classes: &[] }, vec!["no `model_type`"]),
        (None, hf(Some("deepseek_v32")), vec!["the nearest is `deepseek_v3`"]),
        (Some("phi2"), hf(Some("phi3")), vec!["`phi2`", "not implemented"]),
        (Some("qwen2"), hf(Some("phi3")), vec!["`phi3`", "contradicts", "`qwen2`"]),
        (Some("qwen2"), Found::Gguf("llama"), vec!["`llama`", "contradicts", "`qwen2`"]),
    ] {
        let error = check_architecture(expected, found).err().unwrap();
        assert!(matches!(error, EngineError::Architecture(_)));
        for word in words.into_iter().chain([list]) {
            assert!(error.to_string().contains(word), "{error} does not contain {word}");
        }
    }
}

/// A golden model of each architecture that is implemented.
const ARCHITECTURE_GOLDENS: [&str; 37] = [
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma",
    "gemma2",
    "starcoder2",
    "phi2",
    "stablelm",
    "olmo2",
    "smollm3",
    "glm4",
    "granite",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "granitemoe",
    "phimoe",
    "glm4-moe",
    "cohere",
    "cohere2",
    "ministral3",
    "hunyuan-dense",
    "hunyuan-moe",
    "gpt-oss",
    "llama4-text",
    "deepseek-v2",
    "deepseek-v3-yarn",
    "glm4-moe-lite",
    "lfm2",
    "lfm2-moe",
    "granitemoehybrid",
    "qwen3-next",
    "qwen3_5",
    "qwen3_5-moe",
];

#[test]
fn every_key_of_the_tables_changes_nothing_or_is_refused_by_name() {
    for (table, at) in [(engine::keys::CONFIG, ""), (engine::keys::ROPE, "rope_scaling.")] {
        for (names, unread) in table {
            // What llama reads itself.
            for name in names.iter().filter(|name| !["attention_bias", "mlp_bias"].contains(name)) {
                let Unread::Refused(_, on) = unread else {
                    let object = json!({*name: "anything"});
                    let unknown = engine::keys::check(table, object.as_object().unwrap(), &BTreeSet::new(), at);
                    assert_eq!(unknown, Ok(vec![]), "{name}");
                    continue;
                };
                let on: Value = serde_json::from_str(on).unwrap();
                let on = json!({*name: on});
                let error = changed("llama", &if at.is_empty() { on } else { json!({"rope_scaling": on}) }).unwrap_err();
                assert!(error.contains(&format!("`{at}{name}`")) && error.contains("config.json"), "{error}");
            }
        }
    }
    let off = json!({"quantization_config": {}, "attn_logit_softcapping": null, "sliding_window": null, "logit_scale": 1.0,
        "layer_types": ["full_attention"], "position_embedding_type": "rope", "num_experts": 0, "use_qk_norm": false});
    changed("llama", &off).unwrap();
}

#[test]
fn every_key_of_the_golden_models_is_known() {
    let mut unknown = Vec::new();
    for name in ARCHITECTURE_GOLDENS {
        let file = golden_config(name);
        // Of models that see, the language model.
        let file = file.get("text_config").unwrap_or(&file);
        let fields = HfFields::new("config.json", file.as_object().unwrap().clone());
        let model_type = file["model_type"].as_str();
        let architecture = check_architecture(None, Found::HuggingFace { model_type, classes: &[] }).unwrap();
        (architecture.from_hf)(&fields).unwrap();
        unknown.extend(fields.unknown_keys().unwrap().into_iter().map(|key| (name, key)));
    }
    assert_eq!(unknown, []);
    let mut object = golden_config("llama3-rope").as_object().unwrap().clone();
    object.insert("colour".into(), json!("blue"));
    object["rope_scaling"]["wobble"] = json!(3);
    let fields = HfFields::new("config.json", object);
    let architecture = check_architecture(Some("llama"), Found::HuggingFace { model_type: Some("llama"), classes: &[] }).unwrap();
    (architecture.from_hf)(&fields).unwrap();
    assert_eq!(fields.unknown_keys().unwrap(), ["colour", "rope_scaling.wobble"]);
}

#[test]
fn what_a_config_asks_for_is_done_or_refused() {
    let error = changed("llama", &json!({"rope_scaling": {"factor": 2.0}})).unwrap_err();
    assert!(error.contains("rope_scaling.rope_type") && error.contains("factor"), "{error}");
    let biased = changed("llama", &json!({"attention_bias": true, "mlp_bias": true})).unwrap();
    let layer = biased.layers[0];
    assert!(
        layer.attention.qkv_bias
            && layer.attention.output_bias
            && matches!(layer.ffn, engine::model::config::FfnConfig::Dense(dense) if dense.bias),
        "required of the weights"
    );
    let num_layers = golden_config("llama")["num_hidden_layers"].as_u64().unwrap();
    let error = changed("llama", &json!({"num_hidden_layers": num_layers - 1})).unwrap_err();
    assert!(error.contains("num_hidden_layers") && error.contains(&format!("model.layers.{}.", num_layers - 1)), "{error}");
}

#[test]
fn every_key_of_generation_config_is_used_or_changes_nothing_or_is_refused_by_name() {
    let read = |json: &Value| GenerationConfig::from_json(json, "generation_config.json").map_err(|e| e.to_string());
    for (names, unread) in engine::keys::GENERATION {
        for name in *names {
            match unread {
                Unread::WithoutEffect => assert_eq!(read(&json!({*name: "anything"})).unwrap(), GenerationConfig::default()),
                Unread::Refused(_, on) => {
                    let error = read(&json!({*name: serde_json::from_str::<Value>(on).unwrap()})).unwrap_err();
                    assert!(error.contains(name) && error.contains("generation_config.json"), "{error}");
                }
            }
        }
    }
    let config = read(&json!({"num_beams": 1, "min_length": 0, "max_new_tokens": 7, "max_length": 30, "colour": 1})).unwrap();
    assert_eq!((config.unknown_keys.clone(), config.max_tokens(10)), (vec!["colour".to_owned()], Some(7)));
    let config = read(&json!({"max_length": 30})).unwrap();
    assert_eq!((config.max_tokens(10), config.max_tokens(40)), (Some(20), Some(1)));
    assert!(read(&json!([])).unwrap_err().contains("not a JSON object"));
}
