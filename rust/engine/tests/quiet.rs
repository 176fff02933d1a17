//! Files that libraries panic at are errors, and nothing is printed. The hook of the process is counted, so this test is alone.

use std::{
    panic::{set_hook, take_hook},
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
};

use engine::{ChatTemplate, EngineError, Message, RenderOptions, Tokenizer, tokenizer::SpecialTokens};
use serde_json::{Value, json};

static PRINTED: AtomicUsize = AtomicUsize::new(0);

/// A tokenizer of one letter, with these parts.
fn tokenizer_with(parts: Value) -> Value {
    let mut file = json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    });
    let Value::Object(parts) = parts else { panic!("no object") };
    file.as_object_mut().expect("an object").extend(parts);
    file
}

#[test]
fn files_that_libraries_panic_at_are_errors_and_nothing_is_printed() {
    let print = take_hook();
    set_hook(Box::new(move |panic| {
        PRINTED.fetch_add(1, Ordering::Relaxed);
        print(panic);
    }));
    let dir = tempfile::tempdir().expect("a folder");
    let path: PathBuf = dir.path().join("tokenizer.json");
    let load = |parts| {
        std::fs::write(&path, tokenizer_with(parts).to_string()).expect("written");
        Tokenizer::from_file(&path)
    };
    load(json!({})).expect("a good one");

    let piece = |id: &str| json!([{"SpecialToken": {"id": id, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    let template = |single: Value, special: Value| json!({"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}});
    let named = json!({"<s>": {"id": "<s>", "ids": [0], "tokens": ["a"]}});
    load(template(piece("<s>"), named.clone())).expect("a template whose token is there");
    for parts in [
        template(piece("</s>"), named),
        template(piece("<s>"), json!({})),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}}),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}}),
        json!({"decoder": {"type": "Sequence", "decoders": [3]}}),
        json!({"normalizer": {"type": "Sequence", "normalizers": [3]}}),
    ] {
        let error = load(parts.clone()).expect_err(&parts.to_string());
        assert!(matches!(error, EngineError::Tokenizer(_)), "{error}");
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }

    // Loads, and makes the library panic at some texts.
    let parts = json!({
        "normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "\n%}\\<s>\\"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    });
    let tokenizer = load(parts).expect("a tokenizer");
    for text in ["<s>", "\u{0}", "\u{fffd}", "\u{200d}"] {
        for result in [tokenizer.encode(text, true), tokenizer.encode_plain(text)] {
            let error = result.expect_err(text);
            assert!(matches!(error, EngineError::Tokenizer(_)), "{error}");
        }
    }

    for source in ["{{ '%.100000000f'|format(1.0) }}", "{{ '{:.70000f}'.format(1.0) }}", "{{ '%.65536e'|format(1.0) }}"] {
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        let error = template.render(&[Message::user("Hi")], &RenderOptions::default()).expect_err(source);
        assert!(matches!(error, EngineError::ChatTemplate(_)), "{error}");
    }
    assert_eq!(PRINTED.load(Ordering::Relaxed), 0, "panics were printed");
}
