//! tokenizer.json and tokenizer_config.json.

use engine::{EngineError, IncrementalDecoder, Tokenizer};
use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::{
    files::Files,
    grammar::{self, damage, damaged, pick, text},
    kinds::{Outcome, refused},
};

/// Parts that a file may have in place of its own.
fn part(rng: &mut ChaCha8Rng, key: &str) -> Value {
    let pattern = json!({ (pick(rng, &["String", "Regex"])): pick(rng, &[" ", "", "\\s+", "(?i:a)|b", "(a*)*b", "[", "\\p{L}+", "(?=a)", "(a|b)\\1"]) });
    let content = text(rng);
    let list = match key {
        "normalizer" => vec![
            json!({"type": "NFC"}),
            json!({"type": "NFKD"}),
            json!({"type": "Lowercase"}),
            json!({"type": "StripAccents"}),
            json!({"type": "Nmt"}),
            json!({"type": "Strip", "strip_left": true, "strip_right": rng.random::<bool>()}),
            json!({"type": "Prepend", "prepend": content}),
            json!({"type": "Replace", "pattern": pattern, "content": content}),
            json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
            json!({"type": "Precompiled", "precompiled_charsmap": pick(rng, &["", "AAAA", "ALQCAACEAAAAAACAAQAAgPz8AAA=", "////////"])}),
            json!({"type": "ByteLevel"}),
        ],
        "pre_tokenizer" => vec![
            json!({"type": "ByteLevel", "add_prefix_space": rng.random::<bool>(), "trim_offsets": true, "use_regex": rng.random::<bool>()}),
            json!({"type": "Whitespace"}),
            json!({"type": "WhitespaceSplit"}),
            json!({"type": "Metaspace", "replacement": pick(rng, &["\u{2581}", "a", "", "ab"]), "prepend_scheme": pick(rng, &["always", "never", "first"]), "split": true}),
            json!({"type": "Split", "pattern": pattern, "behavior": pick(rng, &["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]), "invert": rng.random::<bool>()}),
            json!({"type": "Punctuation", "behavior": "Isolated"}),
            json!({"type": "Digits", "individual_digits": rng.random::<bool>()}),
            json!({"type": "BertPreTokenizer"}),
            json!({"type": "UnicodeScripts"}),
            json!({"type": "CharDelimiterSplit", "delimiter": pick(rng, &["a", " ", ""])}),
            json!({"type": "FixedLength", "length": grammar::number(rng)}),
        ],
        "post_processor" => vec![
            json!({"type": "ByteLevel", "trim_offsets": true, "add_prefix_space": true, "use_regex": true}),
            json!({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": true, "add_prefix_space": false}),
            json!({"type": "BertProcessing", "sep": ["</s>", grammar::number(rng)], "cls": ["<s>", 1]}),
            json!({"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": pick(rng, &["<s>", "nowhere", ""]), "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": pick(rng, &["A", "B"]), "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [grammar::number(rng)], "tokens": ["<s>"]}}}),
        ],
        "decoder" => vec![
            json!({"type": "ByteLevel"}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
            json!({"type": "WordPiece", "prefix": content, "cleanup": true}),
            json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
            json!({"type": "BPEDecoder", "suffix": content}),
            json!({"type": "CTC", "pad_token": content, "word_delimiter_token": "|", "cleanup": true}),
            json!({"type": "Strip", "content": pick(rng, &[" ", "a", "", "ab"]), "start": grammar::number(rng), "stop": grammar::number(rng)}),
            json!({"type": "Replace", "pattern": pattern, "content": content}),
        ],
        _ => vec![
            json!({"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1, "b": grammar::number(rng)}, "unk_token": pick(rng, &["<unk>", "none"])}),
            json!({"type": "WordPiece", "vocab": {"a": 0, "##b": 1, "[UNK]": 2}, "unk_token": pick(rng, &["[UNK]", "none"]), "continuing_subword_prefix": "##", "max_input_chars_per_word": grammar::number(rng)}),
            json!({"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", grammar::number(rng)], ["b", -1.5]], "unk_id": grammar::number(rng), "byte_fallback": rng.random::<bool>()}),
            json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [pick(rng, &["a b", "a", "b b", "", "a b c"])], "dropout": grammar::leaf(rng), "unk_token": pick(rng, &["a", "none"]),
                "continuing_subword_prefix": grammar::leaf(rng), "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": true}),
        ],
    };
    let one = list.choose(rng).expect("a part").clone();
    if key != "model" && rng.random_bool(0.3) {
        let list_key = match key {
            "normalizer" => "normalizers",
            "pre_tokenizer" => "pretokenizers",
            "post_processor" => "processors",
            _ => "decoders",
        };
        return json!({"type": "Sequence", list_key: [one, list.choose(rng).expect("a part")]});
    }
    one
}

fn added_token(rng: &mut ChaCha8Rng) -> Value {
    json!({"id": grammar::number(rng), "content": text(rng), "single_word": rng.random::<bool>(), "lstrip": rng.random::<bool>(),
        "rstrip": rng.random::<bool>(), "normalized": rng.random::<bool>(), "special": rng.random::<bool>()})
}

/// What is wrong with what the tokenizer does, if it can be used.
fn check(files: &Files, rng: &mut ChaCha8Rng) -> Result<Option<String>, EngineError> {
    let tokenizer = Tokenizer::from_hf_dir(files.dir.path(), None)?;
    for _ in 0..2 {
        let text = text(rng);
        if files.is_shown {
            println!("{text:?}");
        }
        let ids = tokenizer.encode(&text, rng.random())?;
        tokenizer.encode_plain(&text)?;
        tokenizer.with_marked_specials(&text, '\u{10fffe}');
        let ids: Vec<_> = ids.into_iter().chain([rng.random_range(0..600), u32::MAX]).collect();
        let skip = rng.random();
        let (mut decoder, mut pieces) = (IncrementalDecoder::new(skip), String::new());
        for id in &ids {
            decoder.push(&tokenizer, *id, &mut pieces);
            tokenizer.token_text(*id);
            tokenizer.is_special(*id);
        }
        decoder.finish(&mut pieces);
        let whole = tokenizer.decode(&ids, skip);
        if pieces != whole {
            return Ok(Some(format!("{ids:?} are {whole:?}, and token by token {pieces:?}")));
        }
    }
    Ok(None)
}

pub fn case(files: &Files, rng: &mut ChaCha8Rng) -> Outcome {
    let folder = files.folders.choose(rng).expect("a folder");
    let mut tokenizer = folder.tokenizer.clone();
    let mut config = folder.tokenizer_config.clone();
    for _ in 0..rng.random_range(1..=3) {
        // What was damaged before may be no object any more.
        if !tokenizer.is_object() {
            break;
        }
        match rng.random_range(0..8) {
            0..=3 => {
                let key = pick(rng, &["normalizer", "pre_tokenizer", "post_processor", "decoder", "model"]);
                tokenizer[key] = part(rng, key);
            }
            4 => {
                if let Some(tokens) = tokenizer.get_mut("added_tokens").and_then(Value::as_array_mut) {
                    tokens.push(added_token(rng));
                }
            }
            5 => damage(&mut config, rng),
            _ => damage(&mut tokenizer, rng),
        }
    }
    let mut written = tokenizer.to_string();
    if rng.random_bool(0.05) {
        written = damaged(&written, rng);
    }
    files.write("tokenizer.json", written.as_bytes());
    files.write("tokenizer_config.json", config.to_string().as_bytes());
    let _ = std::fs::remove_file(files.dir.path().join("generation_config.json"));
    let _ = std::fs::remove_file(files.dir.path().join("config.json"));
    match check(files, rng) {
        Ok(None) => Ok("used".into()),
        Ok(Some(wrong)) => Err(wrong),
        Err(error) => refused(&error, &["Tokenizer"], &["tokenizer.json", "tokenizer_config.json", "cannot be tokenized"])
            .map_err(|why| format!("{why} of a tokenizer of {}", folder.name)),
    }
}
