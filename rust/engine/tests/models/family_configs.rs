//! What keys of further families mean where they are absent, and what is refused of them.

use engine::{
    ModelSource,
    model::{
        DecoderConfig, ModelFiles, RopeScaling,
        config::{FfnConfig, LayerConfig, MambaNorms, RecurrentConfig},
    },
};
use serde_json::{Value, json};

use crate::common::{
    self,
    gguf_writer::{Gguf, STRING, string},
};

/// The decoder of a drawn golden with some fields of its config.json replaced. Those that become `"absent"` are left out.
fn changed(name: &str, changes: &Value) -> Result<DecoderConfig, String> {
    let path = common::golden_dir().join("drawn").join(name).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let fields = config.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        fields.insert(key.clone(), value.clone());
    }
    fields.retain(|_, value| value != "absent");
    let dir = tempfile::tempdir().unwrap();
    // Whatever weights there are: none is looked at.
    let weights = common::golden_dir().join("text/llama/model.safetensors");
    std::fs::copy(weights, dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let source = ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
    ModelFiles::open(&source, None).map(|files| files.config().clone()).map_err(|error| error.to_string())
}

fn windows(config: &DecoderConfig) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.attention.window).collect()
}

fn rotates(config: &DecoderConfig) -> Vec<bool> {
    config.layers.iter().map(|layer| layer.attention.rope.is_some()).collect()
}

#[test]
fn absent_keys_mean_what_they_mean_in_the_family() {
    let seed =
        changed("seed_oss", &json!({"attention_bias": "absent", "attention_out_bias": "absent", "head_dim": "absent"})).unwrap();
    let attention = seed.layers[0].attention;
    assert_eq!((attention.qkv_bias, attention.output_bias, attention.head_dim), (true, false, 128));
    let null = changed("seed_oss", &json!({"head_dim": null})).unwrap();
    assert_eq!(null.layers[0].attention.head_dim, 12, "null is the width of the model by its heads");

    let ernie = changed("ernie4_5", &json!({"tie_word_embeddings": "absent", "rope_theta": "absent"})).unwrap();
    assert!(ernie.tie_word_embeddings);
    assert!((ernie.ropes[0].theta - 500_000.0).abs() < 1e-9);

    let apertus = changed("apertus", &json!({"rope_scaling": null, "rope_theta": 10.0})).unwrap();
    assert!((apertus.ropes[0].theta - 12_000_000.0).abs() < 1e-9);
    assert!(matches!(apertus.ropes[0].scaling, RopeScaling::Llama3 { original_max_positions: 8192, .. }));

    let dbrx = changed("dbrx", &json!({"rope_theta": "absent"})).unwrap();
    assert!((dbrx.ropes[0].theta - 500_000.0).abs() < 1e-9, "the key among those of attention");

    let helium = changed("helium", &json!({"rms_norm_eps": "absent"})).unwrap();
    assert!((helium.norm.eps - 1e-8).abs() < 1e-15);
    let glm = changed("glm", &json!({"partial_rotary_factor": "absent", "attention_bias": "absent"})).unwrap();
    assert_eq!((glm.ropes[0].rotary_dim, glm.layers[0].attention.qkv_bias), (8, true));

    let flint = changed("flint", &json!({"mlp_only_layers": "absent"})).unwrap();
    let sparse: Vec<_> = flint.layers.iter().map(|layer| matches!(layer.ffn, FfnConfig::Experts(_))).collect();
    assert_eq!(sparse, [false, false, true]);
}

#[test]
fn scores_of_gpt2_may_be_divided_by_the_number_of_their_layer() {
    let scales = |changes| -> Vec<_> {
        changed("gpt2", &changes).unwrap().layers.iter().map(|layer| layer.attention.scale.recip().powi(2).round()).collect()
    };
    assert_eq!(scales(json!({})), [12.0; 3]);
    assert_eq!(scales(json!({"scale_attn_by_inverse_layer_idx": true})), [12.0, 48.0, 108.0]);
}

#[test]
fn layers_have_windows_by_the_family_s_pattern() {
    let neo = changed("gpt_neo", &json!({})).unwrap();
    assert_eq!(windows(&neo), [None, Some(24), Some(24)]);
    assert_eq!(windows(&changed("gpt_neo", &json!({"attention_types": "absent"})).unwrap()), [None, Some(24), None]);

    let plain = json!({"layer_types": "absent", "sliding_window_pattern": "absent"});
    let exaone = changed("exaone4", &plain).unwrap();
    assert_eq!(windows(&exaone), [Some(16), Some(16), Some(16), None]);
    assert_eq!(rotates(&exaone), [true, true, true, false]);
    let whole =
        changed("exaone4", &json!({"layer_types": "absent", "sliding_window": null, "sliding_window_pattern": null})).unwrap();
    assert_eq!((windows(&whole), rotates(&whole)), (vec![None; 4], vec![true; 4]));

    let granite = changed("granite_swa", &json!({"layer_types": "absent", "layer_rope_theta": "absent"})).unwrap();
    assert_eq!((windows(&granite), rotates(&granite)), (vec![None, Some(16), Some(16)], vec![true; 3]));
    let ministral = changed("ministral", &json!({"layer_types": "absent"})).unwrap();
    assert_eq!(windows(&ministral), [Some(16); 3]);
    let cwm = changed("cwm", &json!({"layer_types": "absent"})).unwrap();
    assert_eq!(windows(&cwm), [None, Some(16), Some(16)]);
}

/// The base of dynamic rope is what it is up to the length that the model says, and no request is longer.
#[test]
fn dynamic_rope_is_plain_up_to_the_context() {
    let config = changed("internlm3", &json!({})).unwrap();
    assert_eq!((&config.ropes[0].scaling, config.max_position_embeddings), (&RopeScaling::None, 512));
}

/// Of OLMo 3, only full layers take what an older file says of the rotation.
#[test]
fn olmo3_rotates_in_two_ways() {
    let scaling = json!({"rope_type": "linear", "factor": 2.0});
    let old = json!({"rope_parameters": "absent", "rope_scaling": scaling, "rope_theta": 10_000.0});
    let config = changed("olmo3", &old).unwrap();
    let [full, local] = &config.ropes[..] else { panic!("{:?}", config.ropes) };
    assert_eq!((&full.scaling, &local.scaling), (&RopeScaling::Linear(2.0), &RopeScaling::None));
    assert!((full.theta - 10_000.0).abs() < 1e-9 && (local.theta - 500_000.0).abs() < 1e-9);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (name, changes, words) in [
        ("minimax_m2", json!({"use_qk_norm": false}), "`use_qk_norm` is false; implemented: true"),
        ("minimax_m2", json!({"scoring_func": "softmax"}), "`scoring_func` is \"softmax\""),
        ("minimax_m2", json!({"shared_intermediate_size": 64}), "`shared_intermediate_size` is 64; implemented: 0"),
        ("minimax_m2", json!({"attn_type_list": [1, 0, 1]}), "`attn_type_list` has layers other than 1"),
        ("ernie4_5_moe", json!({"use_bias": true}), "`use_bias` is true"),
        ("ernie4_5_moe", json!({"moe_norm_min": 0.5}), "`moe_norm_min` is over"),
        ("ernie4_5_moe", json!({"moe_layer_end_index": -2}), "`moe_layer_end_index` is -2"),
        ("olmoe", json!({"clip_qkv": 8.0}), "`clip_qkv`"),
        ("olmo3", json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}), "`rope_parameters` must say"),
        ("granite_swa", json!({"layer_rope_theta": [0, 1e4]}), "`layer_rope_theta` is [0,10000.0]; it must be a list of 3 bases"),
        ("granite_swa", json!({"layer_types": ["mamba", "mamba", "mamba"]}), "`layer_types` has `mamba`"),
        ("exaone4", json!({"layer_types": "absent"}), "`sliding_window_pattern` is \"LLLG\""),
        ("hy_v3", json!({"mlp_layer_types": ["thin", "thin", "thin"]}), "`mlp_layer_types` has `thin`"),
        ("afmoe", json!({"score_func": "softmax"}), "`score_func` is \"softmax\"; implemented: \"sigmoid\""),
        ("afmoe", json!({"attention_bias": true}), "`attention_bias` is true"),
        ("apertus", json!({"hidden_act": "mish"}), "`hidden_act` is `mish`"),
        ("apertus", json!({"mlp_bias": true}), "`mlp_bias` is true"),
        ("falcon", json!({"alibi": true}), "`alibi` is true; implemented: false"),
        ("gptj", json!({"scale_attn_weights": false}), "`scale_attn_weights` is false; implemented: true"),
        ("gptj", json!({"rotary_dim": 7}), "7 elements of a head rotate"),
        ("gpt2", json!({"attention_head_type": "multiquery"}), "`attention_head_type` is \"multiquery\""),
        ("gpt2", json!({"add_cross_attention": true}), "`add_cross_attention` is true"),
        ("gpt_neo", json!({"attention_types": [[["global", "near"], 1]]}), "`attention_types` is [[[\"global\",\"near\"],1]]"),
        ("gpt_neo", json!({"attention_types": [[["global"], 4]]}), "3 layers"),
        ("opt", json!({"word_embed_proj_dim": 24}), "`word_embed_proj_dim` is 24; implemented: 48"),
        ("opt", json!({"do_layer_norm_before": false}), "`do_layer_norm_before` is false; implemented: true"),
        ("opt", json!({"max_position_embeddings": 1 << 27}), "number of rows of positions is 134217730"),
        ("codegen", json!({"n_head": 6}), "6 key and value heads are not a multiple of 4 groups"),
        (
            "dbrx",
            json!({"attn_config": {}, "ffn_config": {"moe_normalize_expert_weights": 2.0}}),
            "`ffn_config.moe_normalize_expert_weights` is 2.0",
        ),
        ("dbrx", json!({"attn_config": {}, "ffn_config": {"ffn_act_fn": {"name": "gelu"}}}), "`ffn_config.ffn_act_fn` is"),
        ("olmo", json!({"clip_qkv": -1.0}), "`clip_qkv` is -1.0; it must be a positive number"),
        (
            "olmo",
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}),
            "`dynamic`",
        ),
        ("nanochat", json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}), "stretches the rotation"),
        ("exaone", json!({"model_type": "minicpm", "sparse_config": {"dense_len": 8}}), "`sparse_config` is"),
        ("sarvam_moe", json!({"model_type": "bailing_moe", "norm_head": true}), "`norm_head` is true; implemented: false"),
        ("sarvam_moe", json!({"model_type": "bailing_moe_v2", "score_function": "softmax"}), "`score_function` is \"softmax\""),
        ("lfm3", json!({"conv_bias": true}), "`conv_bias` is true"),
        ("lfm3", json!({"layer_types": ["conv", "full_attention", "mamba", "conv"]}), "`layer_types` has `mamba`"),
        ("laguna", json!({"moe_router_logit_softcapping": 5.0}), "`moe_router_logit_softcapping` is 5; implemented: 0"),
        ("laguna", json!({"gating": "rows"}), "`gating` is \"rows\"; implemented: true, per-head, per-element"),
        ("laguna", json!({"num_attention_heads_per_layer": [4]}), "has 1 entries for 3 layers"),
        ("laguna", json!({"num_attention_heads_per_layer": [4, 3, 4]}), "3 attention heads are not a multiple of 2"),
        ("cohere2_moe", json!({"expert_selection_fn": "top"}), "`expert_selection_fn` is `top`; implemented: softmax, sigmoid"),
        ("cohere2_moe", json!({"shared_expert_combination_strategy": "max"}), "is `max`; implemented: average, sum"),
        ("kimi_linear", json!({"mla_use_nope": false}), "`mla_use_nope` is false; implemented: true"),
        (
            "kimi_linear",
            json!({"linear_attn_config": {"gate_lower_bound": -5.0}}),
            "`linear_attn_config.gate_lower_bound` is -5.0",
        ),
        (
            "kimi_linear",
            json!({"linear_attn_config": {"safe_gate": true}}),
            "`linear_attn_config.safe_gate` is true, which is not",
        ),
        ("kimi_linear", json!({"linear_attn_config": {"kda_layers": [1]}}), "full_attn_layers` is missing beside `kda_layers`"),
        ("kimi_linear", json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "`rope_scaling` is"),
        ("laguna", json!({"gating_types": ["per-head"]}), "`gating_types` is"),
        ("laguna", json!({"sliding_window": 0}), "`sliding_window` is missing or 0, and layer 0 has a window"),
        ("cohere2_moe", json!({"sliding_window_pattern": 0}), "`sliding_window_pattern` is 0; it must be at least 1"),
        (
            "kimi_linear",
            json!({"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}}),
            "have layer 2 in both or in neither",
        ),
        (
            "sarvam_moe",
            json!({"model_type": "bailing_moe_v2", "moe_shared_expert_intermediate_size": 48}),
            "`moe_shared_expert_intermediate_size` is 48; implemented: 32",
        ),
    ] {
        let error = changed(name, &changes).err().unwrap_or_else(|| panic!("{name} with {changes} is accepted"));
        assert!(error.contains(words), "{error} does not contain {words}");
    }
}

/// There is no form of such files.
#[test]
fn gguf_files_of_families_that_are_read_from_folders_alone_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for name in [
        "flint",
        "helium",
        "vaultgemma",
        "flex_olmo",
        "gptj",
        "nanochat",
        "persimmon",
        "minicpm3",
        "opt",
        "biogpt",
        "dbrx",
        "cohere2moe",
        "kimi-linear",
        "kolibri1",
        "laguna",
        "lfm3",
        "olmo_hybrid",
    ] {
        let file = Gguf::new().entry("general.architecture", STRING, &string(name));
        file.weight("token_embd.weight", &[32, 2], 0, &[0; 256]).write(&path);
        let source = ModelSource::Gguf { files: vec![path.clone()], tokenizer_dir: None, tokenizer_json: None };
        let error = ModelFiles::open(&source, None).err().unwrap().to_string();
        assert!(
            error.contains(&format!("GGUF files of `{name}` are not implemented; Hugging Face folders of it are")),
            "{error}"
        );
    }
}

#[test]
fn layers_are_what_words_or_letters_call_them() {
    let parts = |config: &DecoderConfig| -> Vec<_> {
        let layers = config.layers.iter();
        layers.map(|layer| (layer.has_attention, layer.recurrent.is_some(), layer.ffn != FfnConfig::Nothing)).collect()
    };
    let letters = changed("nemotron_h", &json!({})).unwrap();
    let (mamba, attention, network) = ((false, true, false), (true, false, false), (false, false, true));
    assert_eq!(parts(&letters), [mamba, network, mamba, attention, network, mamba]);
    for words in [["mamba", "mlp", "attention"], ["linear_attention", "mlp", "full_attention"]] {
        let [mamba, network, attention] = words;
        let words = [mamba, network, mamba, attention, network, mamba];
        let named = json!({"hybrid_override_pattern": "absent", "num_hidden_layers": "absent", "layers_block_type": words});
        assert_eq!(parts(&changed("nemotron_h", &named).unwrap()), parts(&letters));
    }
    assert!(letters.layers.iter().all(|layer| layer.attention.rope.is_none()));
    let falcon = changed("falcon_h1", &json!({})).unwrap();
    assert_eq!(parts(&falcon), [(true, true, true); 3]);
    let limits = json!({"time_step_limit": [0.5, {"__float__": "Infinity"}]});
    let limited = changed("falcon_h1", &limits).unwrap().layers[0].recurrent;
    assert!(matches!(limited, Some(RecurrentConfig::Mamba2 { limits: [0.5, f32::INFINITY], eps: None, .. })), "{limited:?}");
}

#[test]
fn layers_of_mamba_have_the_sizes_and_norms_that_their_files_say() {
    // As many layers as there are weights of.
    let layer = |name, mut changes: Value| {
        changes["num_hidden_layers"] = 3.into();
        changed(name, &changes).unwrap().layers[0].recurrent.unwrap()
    };
    let mamba = layer("mamba", json!({}));
    let sizes = RecurrentConfig::Mamba {
        num_channels: 64,
        state_dim: 5,
        rank: 8,
        kernel: 4,
        conv_bias: true,
        proj_bias: true,
        norms: MambaNorms::Nothing,
    };
    assert_eq!(mamba, sizes);
    // What says how many channels there are goes before the factor.
    let falcon = layer("falcon_mamba", json!({"mixer_rms_eps": 0.5}));
    let of_falcon = (48, 2, MambaNorms::Unweighted(0.5));
    assert!(
        matches!(falcon, RecurrentConfig::Mamba { num_channels, rank, norms, .. } if (num_channels, rank, norms) == of_falcon)
    );
    let falcon = layer("falcon_mamba", json!({"intermediate_size": "absent"}));
    assert!(matches!(falcon, RecurrentConfig::Mamba { num_channels: 96, .. }), "{falcon:?}");
    let jamba = changed("jamba", &json!({})).unwrap();
    let has_experts = |layer: &LayerConfig| matches!(layer.ffn, FfnConfig::Experts(experts) if experts.num_experts == 5);
    let kinds: Vec<_> = jamba.layers.iter().map(|layer| (layer.has_attention, has_experts(layer))).collect();
    assert_eq!(kinds, [(false, false), (true, true), (false, false), (false, true)]);
    let dense = changed("jamba", &json!({"num_experts": 1})).unwrap();
    assert!(dense.layers.iter().all(|layer| matches!(layer.ffn, FfnConfig::Dense(_))));
}

#[test]
fn what_is_not_computed_of_mamba_s_families_is_refused_by_its_key() {
    for (name, changes, words) in [
        ("nemotron_h", json!({"hybrid_override_pattern": "M-M*-X"}), "`hybrid_override_pattern` has `X`"),
        ("nemotron_h", json!({"hybrid_override_pattern": "M-M*-"}), "`num_hidden_layers` is 6"),
        ("nemotron_h", json!({"hybrid_override_pattern": "------"}), "no layer has attention"),
        ("nemotron_h", json!({"mamba_hidden_act": "gelu"}), "`mamba_hidden_act`"),
        ("nemotron_h", json!({"sliding_window": 16}), "`sliding_window`"),
        ("nemotron_h-moe", json!({"n_shared_experts": 2}), "`n_shared_experts` is 2"),
        ("nemotron_h-moe", json!({"mlp_bias": true}), "`mlp_bias` is true"),
        ("nemotron_h-latent", json!({"moe_latent_size": 65}), "experts' own space is 65"),
        ("falcon_h1", json!({"projectors_bias": true}), "`projectors_bias` is true"),
        ("falcon_h1", json!({"attention_bias": true}), "`attention_in_multiplier`"),
        ("falcon_h1", json!({"ssm_multipliers": [1.0]}), "`ssm_multipliers` is [1.0]"),
        ("falcon_h1", json!({"time_step_limit": [0.5, 0.1]}), "steps of the state"),
        ("mamba", json!({"hidden_act": "gelu"}), "`hidden_act` is `gelu`"),
        ("mamba", json!({"time_step_rank": 33}), "rank of the steps of the state is 33"),
        ("mamba", json!({"time_step_rank": "none"}), "`time_step_rank` is"),
        ("falcon_mamba", json!({"mixer_rms_eps": 0.0}), "epsilon of the norms of the state"),
        ("mamba2", json!({"expand": 3}), "`expand` makes 96 columns"),
        ("mamba2", json!({"rms_norm": false}), "`rms_norm` is false"),
        ("mamba2", json!({"intermediate_size": 48}), "`intermediate_size` is 48"),
        ("jamba", json!({"mamba_inner_layernorms": false}), "`mamba_inner_layernorms` is false"),
        ("jamba", json!({"attn_layer_offset": 3}), "`attn_layer_offset` is 3"),
        ("jamba", json!({"expert_layer_period": 0}), "`expert_layer_offset` is 1"),
        ("bamba", json!({"attn_layer_indices": [4]}), "`attn_layer_indices` has 4"),
        ("bamba", json!({"attn_rotary_emb": 16}), "`attn_rotary_emb` is 16"),
    ] {
        let error = changed(name, &changes).unwrap_err();
        assert!(error.contains(words), "{name} with {changes}: {error}");
    }
}
