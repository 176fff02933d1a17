//! What the files of models that see ask for is computed, or refused by name.

use engine::{Engine, ModelSource};

use crate::common::{
    drawn,
    media::{config, edited},
};

/// A golden, what takes the place of what in its config.json, and a part of the error.
const REFUSED: [(&str, &str, &str, &str); 17] = [
    ("glm46v", r#""in_channels":3"#, r#""in_channels":1"#, "`vision_config.in_channels` is 1; implemented: 3"),
    ("glm46v", r#""in_channels":3"#, r#""use_head":true"#, "`vision_config.use_head` is true, which is not supported"),
    ("glm46v", r#""in_channels":3"#, r#""rope_parameters":{"factor":2}"#, "`vision_config.rope_parameters.factor` is not"),
    ("glm46v", r#"out_hidden_size":32"#, r#"out_hidden_size":16"#, "is 16, and the language model has 32 columns"),
    ("glm46v", r#"text","attention_bias":true"#, r#"text","attention_bias":false"#, "is false; implemented: true"),
    ("glm4v_moe", r#""use_qk_norm":false"#, r#""use_qk_norm":true"#, "`use_qk_norm` is true, which is not supported"),
    ("lighton_ocr", r#""spatial_merge_size":2"#, r#""vision_feature_layer":-2"#, "is -2; implemented: -1"),
    ("lighton_ocr", r#""spatial_merge_size":2"#, r#""projector_hidden_act":"silu""#, "is \"silu\"; implemented: \"gelu\""),
    ("lighton_ocr", r#""spatial_merge_size":2"#, r#""multimodal_projector_bias":true"#, "is true; implemented: false"),
    ("lighton_ocr", r#""head_dim":16"#, r#""head_dim":8"#, "is 8; implemented: the width of 32 over 2 heads"),
    ("lighton_ocr", r#""num_channels":3"#, r#""num_channels":1"#, "is 1; implemented: 3"),
    (
        "glm_ocr",
        r#"text","head_dim":24,"attention_bias":false"#,
        r#"text","head_dim":24,"attention_bias":true"#,
        "`attention_bias` is true",
    ),
    ("glm_ocr", r#""in_channels":3"#, r#""in_channels":1"#, "is 1; implemented: 3"),
    ("exaone4_5", r#""num_key_value_heads":2"#, r#""num_key_value_heads":3"#, "not a multiple of 3 heads of keys and values"),
    ("exaone4_5", r#""num_key_value_heads":2"#, r#""num_key_value_heads":0"#, "not a multiple of 0 heads of keys and values"),
    ("exaone4_5", r#""in_channels":3"#, r#""spatial_patch_size":8"#, "`vision_config.spatial_patch_size` is 8; patch_size is 7"),
    ("exaone4_5", r#"out_hidden_size":32"#, r#"out_hidden_size":48"#, "is 48, and the language model has 32 columns"),
];

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (name, from, to, part) in REFUSED {
        let copy = edited(&drawn::seeing(name), "config.json", from, to);
        let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
        let error = Engine::load(&source, &config(), &|_| {}).err().unwrap().to_string();
        assert!(error.contains(part), "{name}: {error}");
    }
}
