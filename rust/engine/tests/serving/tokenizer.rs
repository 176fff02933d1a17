//! Tokenizers against the reference data, against each other, and against plain re-implementations.

use std::{collections::HashMap, path::PathBuf};

use engine::{
    IncrementalDecoder, Tokenizer,
    weights::{
        gguf::GgufFiles,
        metadata::{Metadata, MetadataValue},
    },
};
use proptest::prelude::*;
use serde_json::Value;

/// Folders of golden/text.
const MODELS: [&str; 9] =
    ["llama", "llama3-rope", "mistral", "mistral-window", "phi3", "phi3-longrope", "qwen2", "qwen3", "gemma3"];

fn golden(name: &str) -> PathBuf {
    goldens::dir().join("text").join(name)
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("golden file")).expect("JSON")
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| u32::try_from(id.as_u64().expect("id")).expect("u32")).collect()
}

type Values = HashMap<String, MetadataValue>;

fn strings(texts: &[&str]) -> MetadataValue {
    MetadataValue::Strings(texts.iter().map(|t| (*t).to_owned()).collect())
}

/// The metadata that llama.cpp's converter makes of the golden tokenizer.json.
fn golden_metadata() -> Values {
    let file = json(golden("llama").join("tokenizer.json"));
    let vocab = file["model"]["vocab"].as_object().expect("vocab");
    let mut tokens = vec![String::new(); 512];
    let mut types = vec![5; 512];
    for (text, id) in vocab {
        let id = id.as_u64().expect("id") as usize;
        tokens[id].clone_from(text);
        types[id] = 1;
    }
    for token in file["added_tokens"].as_array().expect("added tokens") {
        let id = token["id"].as_u64().expect("id") as usize;
        token["content"].as_str().expect("text").clone_into(&mut tokens[id]);
        types[id] = 3;
    }
    for (id, text) in tokens.iter_mut().enumerate().skip(466) {
        *text = format!("[PAD{id}]");
    }
    let merge = |m: &Value| match m {
        Value::String(line) => line.clone(),
        pair => format!("{} {}", pair[0].as_str().expect("left"), pair[1].as_str().expect("right")),
    };
    let merges = file["model"]["merges"].as_array().expect("merges").iter().map(merge).collect();
    HashMap::from([
        ("tokenizer.ggml.model".into(), MetadataValue::String("gpt2".into())),
        ("tokenizer.ggml.pre".into(), MetadataValue::String("gpt-2".into())),
        ("tokenizer.ggml.tokens".into(), MetadataValue::Strings(tokens)),
        ("tokenizer.ggml.token_type".into(), MetadataValue::Ints(types)),
        ("tokenizer.ggml.merges".into(), MetadataValue::Strings(merges)),
        ("tokenizer.ggml.bos_token_id".into(), MetadataValue::Int(1)),
        ("tokenizer.ggml.eos_token_id".into(), MetadataValue::Int(2)),
    ])
}

fn from_gguf(values: &Values) -> Result<Tokenizer, String> {
    Tokenizer::from_gguf(&Metadata::new(values.clone())).map_err(|e| e.to_string())
}

/// Text with special tokens, rare scripts, white space and control characters in it.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        3 => "[a-z ]{1,12}",
        2 => "\\PC{1,8}",
        1 => "[ \t\n\r\u{a0}]{1,6}",
        1 => proptest::collection::vec(any::<char>(), 1..4).prop_map(|v| v.into_iter().collect::<String>()),
        1 => proptest::sample::select(vec!["<|im_start|>", "</s>", "<s", "'ll", "1234", "🦀🔥", "é"]).prop_map(String::from),
    ];
    proptest::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

fn gguf_file(name: &str) -> GgufFiles {
    let path = golden("../gguf").join(format!("{name}.gguf"));
    GgufFiles::open(&[path]).expect("golden file")
}

#[test]
fn golden_prompts_have_the_golden_ids() {
    for name in MODELS {
        let tokenizer = Tokenizer::from_hf_dir(&golden(name), None).expect("tokenizer");
        let cases = json(golden(name).join("golden.json"));
        for case in cases["completions"].as_array().expect("completions").iter().chain([&cases["chat"]]) {
            let prompt = case["prompt"].as_str().expect("prompt");
            assert_eq!(tokenizer.encode(prompt, false).expect("ids"), ids(&case["prompt_ids"]), "{name}: {prompt:?}");
            assert_eq!(tokenizer.decode(&ids(&case["greedy_ids"]), true), case["greedy_text"], "{name}: {prompt:?}");
        }
    }
}

#[test]
fn gguf_files_of_the_same_models_have_the_same_tokenizer() {
    for name in ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"] {
        let file = Tokenizer::from_hf_dir(&golden(name), None).expect("tokenizer");
        let gguf = Tokenizer::from_gguf(gguf_file(name).metadata()).expect("tokenizer");
        let cases = json(golden(name).join("golden.json"));
        for case in cases["completions"].as_array().expect("completions").iter().chain([&cases["chat"]]) {
            let prompt = case["prompt"].as_str().expect("prompt");
            assert_eq!(gguf.encode(prompt, false).expect("ids"), ids(&case["prompt_ids"]), "{name}: {prompt:?}");
            assert_eq!(gguf.decode(&ids(&case["greedy_ids"]), true), case["greedy_text"], "{name}: {prompt:?}");
        }
        assert_eq!(gguf.eos_ids(), file.eos_ids(), "{name}");
        assert_eq!(gguf.special_tokens(), file.special_tokens(), "{name}");
        for id in 0..512 {
            assert_eq!((gguf.token_bytes(id), gguf.is_special(id)), (file.token_bytes(id), file.is_special(id)), "{name}: {id}");
        }
    }
}

#[test]
fn special_tokens_of_a_folder() {
    let tokenizer = Tokenizer::from_hf_dir(&golden("llama"), None).expect("tokenizer");
    assert_eq!(tokenizer.special_tokens().bos_token.as_deref(), Some("<s>"));
    // </s> by generation_config.json, <|im_end|> because it ends turns.
    assert_eq!(tokenizer.eos_ids(), [2, 4]);
    assert!(tokenizer.is_special(4) && !tokenizer.is_special(40));
    assert_eq!((tokenizer.token_text(3).as_str(), tokenizer.token_bytes(9999)), ("<|im_start|>", &[][..]));
    assert_eq!((tokenizer.token_bytes(466), tokenizer.vocab_size()), (&b""[..], 466));
}

#[test]
fn a_tokenizer_json_beside_a_gguf_file_has_the_files_special_tokens() {
    let metadata = gguf_file("llama");
    let whole = Tokenizer::from_gguf(metadata.metadata()).expect("tokenizer");
    let mut alone = Tokenizer::from_file(&golden("llama").join("tokenizer.json")).expect("tokenizer");
    assert_eq!(alone.special_tokens().bos_token, None);
    alone.add_gguf_special_tokens(metadata.metadata()).expect("special tokens");
    assert_eq!((alone.special_tokens(), alone.eos_ids()), (whole.special_tokens(), whole.eos_ids()));
    assert!(alone.special_tokens().bos_token.is_some());
    alone.add_gguf_special_tokens(&Metadata::default()).expect("a file without a tokenizer is fine");
}

#[test]
fn flags_of_gguf_files_add_bos_and_eos() {
    let mut values = golden_metadata();
    assert!(from_gguf(&values).expect("tokenizer").encode("", true).expect("ids").is_empty());
    values.insert("tokenizer.ggml.add_bos_token".into(), MetadataValue::Bool(true));
    values.insert("tokenizer.ggml.add_eos_token".into(), MetadataValue::Bool(true));
    let tokenizer = from_gguf(&values).expect("tokenizer");
    assert_eq!(tokenizer.encode("", true).expect("ids"), [1, 2]);
    assert!(tokenizer.encode("", false).expect("ids").is_empty());
}

#[test]
fn every_pre_tokenizer_keeps_the_text() {
    let text = "I'LL pay 12345.67€ for  Ünïcode 你好世界 ひらがな\r\n\t(yes?!)  \n end…   ";
    let names = from_gguf(&with(golden_metadata(), "pre", MetadataValue::String("nope".into()))).unwrap_err();
    let names = names.split("known are ").nth(1).expect("the list").split(';').next().expect("its end");
    assert!(names.split(", ").count() > 50, "{names}");
    for name in names.split(", ") {
        let tokenizer = from_gguf(&with(golden_metadata(), "pre", MetadataValue::String(name.into()))).expect(name);
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).expect("ids"), false), text, "{name}");
    }
}

#[test]
fn a_missing_or_malformed_file_is_named() {
    let missing = Tokenizer::from_hf_dir(&PathBuf::from("/nonexistent"), None).unwrap_err().to_string();
    assert!(missing.contains("/nonexistent/tokenizer.json") && missing.contains("tokenizer_json"), "{missing}");
    let config = golden("llama").join("tokenizer_config.json");
    let malformed = Tokenizer::from_file(&config).unwrap_err().to_string();
    assert!(malformed.contains("tokenizer_config.json is not a tokenizer.json"), "{malformed}");
}

fn with(mut values: Values, name: &str, value: MetadataValue) -> Values {
    values.insert(format!("tokenizer.ggml.{name}"), value);
    values
}

fn without(mut values: Values, name: &str) -> Values {
    values.remove(&format!("tokenizer.ggml.{name}"));
    values
}

#[test]
fn malformed_metadata_is_an_error() {
    let bpe = golden_metadata;
    for (values, part) in [
        (without(bpe(), "model"), "no tokenizer"),
        (with(bpe(), "model", MetadataValue::String("rwkv".into())), "\"rwkv\" is not supported"),
        (with(bpe(), "model", MetadataValue::String("bert".into())), "no token [SEP]"),
        (without(bpe(), "tokens"), "no tokenizer.ggml.tokens"),
        (with(bpe(), "tokens", MetadataValue::Int(3)), "no tokenizer.ggml.tokens"),
        (with(bpe(), "tokens", strings(&[])), "is empty"),
        (with(bpe(), "token_type", MetadataValue::Ints(vec![1; 3])), "3 entries of token_type"),
        (without(bpe(), "merges"), "no tokenizer.ggml.merges"),
        (with(bpe(), "merges", strings(&["ab"])), "\"ab\""),
        (with(bpe(), "merges", strings(&["zzz qqq"])), "zzz"),
        (with(bpe(), "eos_token_id", MetadataValue::Int(512)), "eos_token_id is 512"),
        (without(spm_metadata(), "scores"), "without tokenizer.ggml.scores"),
        (with(spm_metadata(), "scores", MetadataValue::Floats(vec![0.0; 2])), "2 scores"),
        (
            without(with(spm_metadata(), "token_type", MetadataValue::Ints(vec![1; SPM_TOKENS.len()])), "unknown_token_id"),
            "<0x00>",
        ),
    ] {
        let error = from_gguf(&values).unwrap_err();
        assert!(error.contains(part), "{error}");
        assert!(error.contains("tokenizer.json"), "it says what would work: {error}");
    }
}

#[test]
fn repeated_tokens_and_odd_scores_do_no_harm() {
    let mut tokens = SPM_TOKENS.map(String::from).to_vec();
    tokens[8] = tokens[7].clone();
    let values = with(spm_metadata(), "tokens", MetadataValue::Strings(tokens));
    let values = with(values, "scores", MetadataValue::Floats(vec![f32::NAN; SPM_TOKENS.len()]));
    assert!(!from_gguf(&values).expect("tokenizer").encode("abcabc ab", true).expect("ids").is_empty());
}

const SPM_TOKENS: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "<turn>",
    "  ",
    "\u{2581}",
    "a",
    "b",
    "c",
    "d",
    "ab",
    "bc",
    "abc",
    "\u{2581}a",
    "\u{2581}ab",
    "cd",
    "aa",
    "aaaa",
    "é",
    "\u{2581}\u{2581}",
];

/// A `SentencePiece` tokenizer without byte tokens: what it does not know is <unk>, once for each byte.
fn spm_metadata() -> Values {
    let mut types = vec![1; SPM_TOKENS.len()];
    types[..5].copy_from_slice(&[2, 3, 3, 3, 4]);
    // No order in particular, with two equal ones.
    let scores = (0..SPM_TOKENS.len()).map(|i| -((i * 7 % 11) as f32)).collect();
    HashMap::from([
        ("tokenizer.ggml.model".into(), MetadataValue::String("llama".into())),
        ("tokenizer.ggml.tokens".into(), strings(&SPM_TOKENS)),
        ("tokenizer.ggml.token_type".into(), MetadataValue::Ints(types)),
        ("tokenizer.ggml.scores".into(), MetadataValue::Floats(scores)),
        ("tokenizer.ggml.bos_token_id".into(), MetadataValue::Int(1)),
        ("tokenizer.ggml.unknown_token_id".into(), MetadataValue::Int(0)),
        ("tokenizer.ggml.add_space_prefix".into(), MetadataValue::Bool(false)),
    ])
}

/// `SentencePiece` BPE in quadratic time: of all neighbours that make a piece, the best score first, the leftmost of equal ones.
fn spm_oracle(text: &str) -> Vec<u32> {
    let id = |piece: &str| SPM_TOKENS.iter().skip(4).position(|t| *t == piece).map(|i| i as u32 + 4);
    let score = |piece: &str| id(piece).map(|id| -((id as usize * 7 % 11) as f32));
    let mut symbols: Vec<String> = text.chars().map(|c| if c == ' ' { '\u{2581}' } else { c }.to_string()).collect();
    loop {
        let mut best: Option<(usize, f32)> = None;
        for i in 1..symbols.len() {
            if let Some(s) = score(&format!("{}{}", symbols[i - 1], symbols[i]))
                && best.is_none_or(|(_, b)| s > b)
            {
                best = Some((i, s));
            }
        }
        let Some((i, _)) = best else { break };
        let right = symbols.remove(i);
        symbols[i - 1].push_str(&right);
    }
    symbols.iter().flat_map(|s| id(s).map_or_else(|| vec![0; s.len()], |id| vec![id])).collect()
}

#[test]
fn sentencepiece_takes_special_tokens_whole_and_prefixes_spaces() {
    let tokenizer = from_gguf(&spm_metadata()).expect("tokenizer");
    assert_eq!(tokenizer.encode("ab<turn>cd", true).expect("ids"), [1, 10, 3, 15]);
    assert_eq!(tokenizer.encode("a  b", false).expect("ids"), [6, 4, 7]);
    let prefixed = from_gguf(&with(spm_metadata(), "add_space_prefix", MetadataValue::Bool(true))).expect("tokenizer");
    assert_eq!(prefixed.encode("c<turn>d", false).expect("ids"), [5, 8, 3, 5, 9]);
    assert_eq!(prefixed.decode(&[5, 8, 5, 9], false), "c d");
    let mut continued = String::new();
    IncrementalDecoder::continuing(false).push(&prefixed, 13, &mut continued);
    assert_eq!(continued, " a");
}

/// `SentencePiece` BPE with merges in place of scores, as llama.cpp's converter writes Gemma 4's.
fn merged_metadata() -> Values {
    let named = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>"].map(str::to_owned);
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let normal = ["▁", "a", "b", "c", "\n", "ab", "▁a", "▁ab", "▁▁", "\n\n", "é", "abc"].map(str::to_owned);
    let tokens: Vec<_> = named.into_iter().chain(bytes).chain(normal).collect();
    let mut types = vec![1; tokens.len()];
    types[..5].copy_from_slice(&[3, 3, 3, 2, 4]);
    types[5..261].fill(6);
    HashMap::from([
        ("tokenizer.ggml.model".into(), MetadataValue::String("gemma4".into())),
        ("tokenizer.ggml.tokens".into(), MetadataValue::Strings(tokens)),
        ("tokenizer.ggml.token_type".into(), MetadataValue::Ints(types)),
        ("tokenizer.ggml.merges".into(), strings(&["a b", "▁ a", "▁ ab", "▁ ▁", "\n \n", "ab c"])),
        ("tokenizer.ggml.bos_token_id".into(), MetadataValue::Int(2)),
        ("tokenizer.ggml.unknown_token_id".into(), MetadataValue::Int(3)),
        ("tokenizer.ggml.add_space_prefix".into(), MetadataValue::Bool(false)),
    ])
}

/// Ids by the library of Transformers, with the parts that its Gemma tokenizer has.
#[test]
fn sentencepiece_with_merges_falls_back_to_bytes_and_takes_special_tokens_whole() {
    let tokenizer = from_gguf(&merged_metadata()).expect("tokenizer");
    for (text, ids) in [
        (" abc", &[268, 264][..]),
        ("ab abc\n\ncab", &[266, 268, 264, 270, 264, 266]),
        ("a<|turn>b  ab", &[262, 4, 263, 261, 268]),
        ("日é a", &[235, 156, 170, 271, 267]),
        ("a\n \n", &[262, 265, 261, 265]),
        ("    a", &[269, 261, 267]),
    ] {
        assert_eq!(tokenizer.encode(text, false).expect("ids"), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids, false), text);
    }
    assert_eq!(tokenizer.encode("a", true).expect("ids"), [2, 262]);
    let sarvam = with(merged_metadata(), "model", MetadataValue::String("gpt2".into()));
    let sarvam = from_gguf(&with(sarvam, "pre", MetadataValue::String("sarvam-moe".into()))).expect("tokenizer");
    assert_eq!(sarvam.encode("ab abc", true).expect("ids"), [266, 268, 264]);
    let prefixed = with(merged_metadata(), "add_space_prefix", MetadataValue::Bool(true));
    assert!(from_gguf(&prefixed).unwrap_err().contains("add_space_prefix"));
    assert!(from_gguf(&without(merged_metadata(), "merges")).unwrap_err().contains("tokenizer.ggml.merges"));
}

/// Some change for the worse of one value.
fn damage(value: &mut MetadataValue, how: u8, number: i64, at: usize) {
    let at_of = |len: usize| if len == 0 { 0 } else { at % len };
    match (how % 4, &mut *value) {
        (0, MetadataValue::Strings(v)) => v.truncate(at_of(v.len())),
        (0, MetadataValue::Ints(v)) => v.truncate(at_of(v.len())),
        (0, MetadataValue::Floats(v)) => v.truncate(at_of(v.len())),
        (1, MetadataValue::Strings(v)) if !v.is_empty() => {
            let (from, to) = (at_of(v.len()), number.unsigned_abs() as usize % v.len());
            v[to] = v[from].clone();
        }
        (2, MetadataValue::Strings(v)) if !v.is_empty() => {
            let i = at_of(v.len());
            v[i] = ["", " ", "<0x", "é\u{fffd}", "\u{2581}"][number.unsigned_abs() as usize % 5].into();
        }
        (1 | 2, MetadataValue::Ints(v)) if !v.is_empty() => {
            let i = at_of(v.len());
            v[i] = number;
        }
        (1 | 2, MetadataValue::Floats(v)) if !v.is_empty() => {
            let i = at_of(v.len());
            v[i] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][number.unsigned_abs() as usize % 3];
        }
        (1 | 2, MetadataValue::Int(v)) => *v = number.into(),
        _ => *value = MetadataValue::Int(number.into()),
    }
}

proptest! {
    #[test]
    fn damaged_metadata_gives_an_error_or_a_tokenizer_that_works(
        kind in 0_usize..3,
        damages in proptest::collection::vec((0_usize..16, any::<u8>(), prop_oneof![-2_i64..8, any::<i64>()], any::<usize>()), 1..4),
        text in text(),
    ) {
        let mut values = [spm_metadata, golden_metadata, merged_metadata][kind]();
        let mut keys: Vec<String> = values.keys().cloned().collect();
        keys.sort();
        for (key, how, number, at) in damages {
            damage(values.get_mut(&keys[key % keys.len()]).expect("a key"), how, number, at);
        }
        if let Ok(tokenizer) = from_gguf(&values) {
            let ids = tokenizer.encode(&text, true).expect("ids");
            prop_assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids, true);
        }
    }

    #[test]
    fn byte_level_texts_come_back_and_both_sources_agree(text in text()) {
        let file = Tokenizer::from_hf_dir(&golden("llama"), None).expect("tokenizer");
        let gguf = from_gguf(&golden_metadata()).expect("tokenizer");
        let ids = file.encode(&text, false).expect("ids");
        prop_assert_eq!(&gguf.encode(&text, false).expect("ids"), &ids);
        prop_assert_eq!(file.decode(&ids, false), text.clone());
        prop_assert_eq!(gguf.decode(&ids, false), text);
    }

    #[test]
    fn sentencepiece_merges_like_the_oracle(text in "[abcdé ]{0,24}") {
        // Two spaces are a user-defined token and cut the text.
        let text = text.replace("  ", " ");
        prop_assume!(!text.contains("  "));
        let tokenizer = from_gguf(&spm_metadata()).expect("tokenizer");
        prop_assert_eq!(tokenizer.encode(&text, false).expect("ids"), spm_oracle(&text));
    }

    #[test]
    fn increments_add_up_to_the_whole_text(ids in proptest::collection::vec(0_u32..470, 0..60), skip in any::<bool>()) {
        let tokenizer = from_gguf(&golden_metadata()).expect("tokenizer");
        let kept: Vec<u32> = ids.iter().copied().filter(|id| !(skip && tokenizer.is_special(*id))).collect();
        let bytes: Vec<u8> = kept.iter().flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
        let whole = String::from_utf8_lossy(&bytes);
        let mut decoder = IncrementalDecoder::new(skip);
        let mut so_far = String::new();
        for id in ids {
            decoder.push(&tokenizer, id, &mut so_far);
            prop_assert!(whole.starts_with(&so_far), "{:?} is not the start of {:?}", so_far, whole);
        }
        decoder.finish(&mut so_far);
        prop_assert_eq!(so_far, whole.into_owned());
    }

    #[test]
    fn valid_text_never_shows_a_broken_character(text in text()) {
        let tokenizer = from_gguf(&golden_metadata()).expect("tokenizer");
        let mut decoder = IncrementalDecoder::new(false);
        let mut so_far = String::new();
        for id in tokenizer.encode(&text, false).expect("ids") {
            decoder.push(&tokenizer, id, &mut so_far);
            prop_assert!(text.starts_with(&so_far));
        }
        prop_assert_eq!(so_far, text);
    }
}
