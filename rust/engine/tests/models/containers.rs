//! Weights and tokenizers in older containers: what is read, and what is refused by name. `golden_models.rs` compares what models
//! compute.

use std::{fs, path::Path};

use engine::{Engine, EngineConfig, EngineError, ModelDType, ModelSource, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::golden_dir;

fn exact() -> EngineConfig {
    EngineConfig { dtype: ModelDType::F32, ..EngineConfig::default() }
}

fn copied(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden_dir().join("containers").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::write(dir.path().join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
    }
    dir
}

fn hugging_face(path: &Path) -> ModelSource {
    ModelSource::HuggingFace { path: path.to_owned(), tokenizer_json: None }
}

fn why(source: &ModelSource) -> String {
    let Err(error) = Engine::load(source, &exact(), &|_| {}) else { panic!("it was loaded") };
    error.to_string()
}

fn change_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

#[test]
fn a_folder_of_metas_has_its_tokenizer() {
    let dir = golden_dir().join("containers/llama-meta");
    let golden: Value = serde_json::from_slice(&fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let engine = Engine::load(&ModelSource::from_path(&dir).unwrap(), &exact(), &|_| {}).unwrap();
    for case in golden["completions"].as_array().unwrap() {
        let prompt = case["prompt"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        assert_eq!(engine.tokenize_text(prompt, false).unwrap(), ids, "{prompt}");
        let greedy: Vec<u32> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
        assert_eq!(engine.detokenize_text(&greedy, false).unwrap(), case["greedy_text"].as_str().unwrap());
    }
    // BOS goes before a text, as Meta's code puts it there.
    assert_eq!(u64::from(engine.tokenize_text("a", true).unwrap()[0]), golden["bos"].as_u64().unwrap());
    let eot = engine.tokenizer().token_to_id("<|eot_id|>").unwrap();
    assert!(engine.tokenizer().eos_ids().contains(&eot) && engine.tokenizer().is_special(eot));
}

#[test]
fn metas_files_are_found_inside_a_downloaded_folder() {
    let dir = tempfile::tempdir().unwrap();
    fs::rename(copied("llama-meta").keep(), dir.path().join("original")).unwrap();
    assert_eq!(ModelSource::from_path(dir.path()).map(|source| why_or_architecture(&source)).unwrap(), "llama");
}

fn why_or_architecture(source: &ModelSource) -> String {
    Engine::load(source, &exact(), &|_| {}).map_or_else(|error| error.to_string(), |engine| engine.architecture().to_owned())
}

#[test]
fn what_metas_params_cannot_say_is_refused() {
    for (change, words) in [
        (("n_layers", json!(0)), "`n_layers` is 0"),
        (("dim", json!("64")), "`dim` is \"64\""),
        (("moe", json!({})), "`moe` is not known"),
        (("use_scaled_rope", json!(1)), "`use_scaled_rope` is 1"),
        (("n_heads", json!(5)), "head"),
    ] {
        let dir = copied("llama-meta");
        change_json(&dir.path().join("params.json"), |params| params[change.0] = change.1);
        let why = why(&hugging_face(dir.path()));
        assert!(why.contains(words), "{words}: {why}");
    }
    let dir = copied("llama-meta");
    fs::write(dir.path().join("consolidated.01.pth"), "").unwrap();
    assert!(why(&hugging_face(dir.path())).contains("several parts"));
}

#[test]
fn a_scaled_rope_changes_long_distances_alone() {
    let dir = copied("llama-meta");
    change_json(&dir.path().join("params.json"), |params| params["use_scaled_rope"] = json!(true));
    let engine = Engine::load(&hugging_face(dir.path()), &exact(), &|_| {}).unwrap();
    assert_eq!(engine.context_length(), 131_072);
    assert!(engine.tokenizer().token_to_id("<|finetune_right_pad_id|>").is_some());
}

#[test]
fn files_of_pytorch_that_cannot_be_read_say_why() {
    let zipped = "pytorch_model-00001-of-00002.bin";
    let dir = copied("llama-bin-sharded");
    fs::write(dir.path().join(zipped), "not a checkpoint").unwrap();
    assert!(why(&hugging_face(dir.path())).contains("neither a zip archive nor a pickle"));
    let dir = copied("llama-bin-sharded");
    let mut bytes = fs::read(dir.path().join(zipped)).unwrap();
    bytes.truncate(bytes.len() / 2);
    fs::write(dir.path().join(zipped), bytes).unwrap();
    assert!(why(&hugging_face(dir.path())).contains("not a zip archive"));
    let dir = copied("llama-bin-sharded");
    let mut bytes = fs::read(dir.path().join(zipped)).unwrap();
    // A class of storages that is not known, in the place of one that is.
    let at = bytes.windows(8).position(|window| window == b"Storage\n").unwrap();
    bytes[at - 1] = b'Z';
    fs::write(dir.path().join(zipped), bytes).unwrap();
    let why = why(&hugging_face(dir.path()));
    assert!(why.contains("Storage, which is not read"), "{why}");
}

#[test]
fn a_ggml_file_has_a_tokenizer_of_its_own() {
    let file = golden_dir().join("containers/ggml/llama-q8_0.bin");
    let source = |gqa| ModelSource::Ggml { file: file.clone(), gqa, tokenizer_dir: None, tokenizer_json: None };
    // The text of a token of this file is a token of its own.
    let dir = tempfile::tempdir().unwrap();
    let alone = dir.path().join("model.bin");
    fs::write(&alone, fs::read(&file).unwrap()).unwrap();
    let engine =
        Engine::load(&ModelSource::Ggml { file: alone, gqa: 1, tokenizer_dir: None, tokenizer_json: None }, &exact(), &|_| {})
            .unwrap();
    assert_eq!(engine.tokenizer().token_to_id("<|im_start|>"), Some(3));
    assert_eq!(engine.tokenizer().special_tokens().bos_token.as_deref(), Some("<s>"));
    assert!(why(&source(3)).contains("gqa is 3"));
    assert!(why(&source(0)).contains("gqa is 0"));
}

#[test]
fn quantized_blocks_of_old_versions_are_refused() {
    let file = golden_dir().join("containers/ggml/llama-q8_0.bin");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.bin");
    let mut bytes = fs::read(file).unwrap();
    for (version, words) in [(2, "GGJT of version 2"), (4, "version 4 is not known")] {
        bytes[4] = version;
        fs::write(&path, &bytes).unwrap();
        let why = why(&ModelSource::Ggml { file: path.clone(), gqa: 1, tokenizer_dir: None, tokenizer_json: None });
        assert!(why.contains(words), "{why}");
    }
    fs::write(&path, b"GGUF").unwrap();
    let why = why(&ModelSource::Ggml { file: path, gqa: 1, tokenizer_dir: None, tokenizer_json: None });
    assert!(why.contains("none of GGML, GGMF and GGJT"), "{why}");
}

#[test]
fn a_tokenizer_model_goes_where_there_is_no_tokenizer_json() {
    let dir = copied("llama-bin-sharded");
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let missing = Tokenizer::from_hf_dir(dir.path(), None).unwrap_err();
    assert!(matches!(missing, EngineError::Tokenizer(_)), "{missing}");
    fs::write(dir.path().join("tokenizer.model"), "not a model").unwrap();
    let broken = Tokenizer::from_hf_dir(dir.path(), None).unwrap_err().to_string();
    assert!(broken.contains("tokenizer.model") && broken.contains("neither a model of SentencePiece"), "{broken}");
}
