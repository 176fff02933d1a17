//! GGUF files of quantized weights: they compute what in-situ quantization of their source computes.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use device::{DType, KvDType, Precision, WeightView, cpu::ReferenceBackend, quant::dequantize_row};
use engine::{
    Engine, EngineConfig, EngineError, Importance, Isq, ModelSource, QuantizeOptions, QuantizedFile, Tokenizer,
    chat_template::template_in_dir,
    model::ModelFiles,
    quantize_model,
    weights::{GgufFiles, MetadataValue},
};
use serde_json::{Value, json};

use crate::common::{
    Harness, argmax, drawn, gguf, golden_dir, hugging_face, load_files,
    serving::{exact, request, run},
};

const FOLDERS: [&str; 47] = [
    "llama",
    "llama3-rope",
    "llama-yarn",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma3-linear",
    "phi3",
    "phi3-longrope",
    "gemma",
    "gemma2",
    "starcoder2",
    "phi2",
    "stablelm",
    "stablelm-parallel",
    "olmo2",
    "smollm3",
    "glm4",
    "granite",
    "cohere",
    "cohere2",
    "ministral3",
    "hunyuan-dense",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "phimoe",
    "glm4-moe",
    "hunyuan-moe",
    "deepseek-v2",
    "deepseek-v2-group",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3-yarn",
    "glm4-moe-lite",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "granitemoe",
    "granitemoehybrid",
    "granitemoehybrid-attn",
    "granitemoehybrid-dense",
    "lfm2",
    "lfm2-moe",
    "llama4-text-8k",
    "qwen3-next",
];
const FILES: [&str; 6] = ["llama", "gemma2", "mixtral", "qwen3-moe", "lfm2", "granitemoehybrid"];

fn isq(name: &str) -> Isq {
    name.parse().unwrap()
}

fn options(output: &Path, name: &str) -> QuantizeOptions {
    QuantizeOptions {
        isq: isq(name),
        output: output.to_owned(),
        overwrite: false,
        architecture: None,
        imatrix: None,
        calibration_file: None,
        num_threads: Some(2),
    }
}

fn quantized(source: &ModelSource, output: &Path, name: &str) -> Result<QuantizedFile, EngineError> {
    quantize_model(source, &options(output, name), &|_| {})
}

fn file(path: &Path) -> ModelSource {
    ModelSource::Gguf { files: vec![path.to_owned()], tokenizer_dir: None, tokenizer_json: None }
}

fn prompt() -> Vec<u32> {
    let golden: Value = serde_json::from_slice(&fs::read(golden_dir().join("text/llama/golden.json")).unwrap()).unwrap();
    let ids = golden["completions"][2]["prompt_ids"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Logits of every position of a prompt.
fn logits(source: &ModelSource, quantize: Option<&str>) -> Vec<Vec<f32>> {
    let files = ModelFiles::open(source, None).unwrap().with_isq(quantize.map(isq));
    let mut runner = load_files(&files, Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
    let mut harness = Harness::new(&mut runner, 16);
    let ids = prompt();
    let sequence = harness.add(ids.clone(), ids.len());
    harness.finish(sequence, ids.len())
}

fn assert_same(what: &str, expected: &[Vec<f32>], got: &[Vec<f32>]) {
    for (position, (expected, got)) in expected.iter().zip(got).enumerate() {
        let worst = expected.iter().zip(got).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(worst < 1e-3, "{what}: logits of position {position} are off by {worst}");
        assert_eq!(argmax(expected), argmax(got), "{what}: position {position}");
    }
}

#[test]
fn the_file_of_a_folder_computes_what_in_situ_quantization_of_it_computes() {
    let dir = tempfile::tempdir().unwrap();
    for name in FOLDERS {
        for quantize in ["Q4K", "8"] {
            let output = dir.path().join(format!("{name}-{quantize}.gguf"));
            let written = quantized(&hugging_face(name), &output, quantize).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(written.bytes, fs::metadata(&output).unwrap().len(), "{name}");
            let expected = logits(&hugging_face(name), Some(quantize));
            assert_same(&format!("{name} {quantize}"), &expected, &logits(&file(&output), None));
        }
    }
}

fn farthest(expected: &[Vec<f32>], got: &[Vec<f32>]) -> f32 {
    expected.iter().zip(got).flat_map(|(a, b)| a.iter().zip(b)).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs()))
}

/// The columns of a matrix change places and are quantized in other blocks. The model has an encoder, which is left out.
#[test]
fn the_file_of_a_folder_whose_value_heads_change_places_is_as_near_to_it_as_in_situ_quantization_is() {
    let dir = tempfile::tempdir().unwrap();
    let (source, output) = (hugging_face("qwen3_5"), dir.path().join("q.gguf"));
    quantized(&source, &output, "8").unwrap();
    let expected = logits(&source, None);
    let [in_situ, written] = [logits(&source, Some("8")), logits(&file(&output), None)].map(|got| farthest(&expected, &got));
    assert!(written < 1.25 * in_situ, "{written}, and quantized while loading {in_situ}");
}

/// Of which only the configuration is kept.
const DRAWN: [&str; 29] = [
    "afmoe",
    "arcee",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "falcon",
    "glm",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granitemoe_swa-nope",
    "hy_v3",
    "internlm3",
    "jais2",
    "mellum-sparse",
    "minimax_m2",
    "mistral4",
    "nemotron",
    "nemotron_h-latent",
    "nemotron_h-moe",
    "olmo",
    "olmo3",
    "olmoe",
    "qwen2-yarn",
    "sarvam_moe",
    "seed_oss",
    "solar_open",
];

#[test]
fn the_file_of_a_folder_of_any_family_computes_what_its_folder_computes() {
    let dir = tempfile::tempdir().unwrap();
    for name in DRAWN {
        let (folder, source) = drawn::model(name);
        fs::copy(golden_dir().join("text/llama/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        if name == "afmoe" {
            // Files cannot say which layers have windows: of four, all but the last.
            let path = folder.path().join("config.json");
            let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            config.as_object_mut().unwrap().retain(|key, _| !["layer_types", "global_attn_every_n_layers"].contains(&&key[..]));
            fs::write(&path, config.to_string()).unwrap();
        }
        let output = dir.path().join(format!("{name}.gguf"));
        quantized(&source, &output, "8").unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_same(name, &logits(&source, Some("8")), &logits(&file(&output), None));
    }
}

/// The weights of another one, with the keys of these.
#[test]
fn the_file_of_a_renamed_family_computes_what_its_folder_computes() {
    let dir = tempfile::tempdir().unwrap();
    for (name, keys) in [
        ("xverse", json!({})),
        ("orion", json!({})),
        ("minicpm", json!({"scale_emb": 4, "scale_depth": 1.4, "dim_model_base": 32})),
    ] {
        let (folder, source) = drawn::model("iquestcoder");
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config["model_type"] = name.into();
        for (key, value) in keys.as_object().unwrap() {
            config[key] = value.clone();
        }
        fs::write(&path, config.to_string()).unwrap();
        let output = dir.path().join(format!("{name}.gguf"));
        quantized(&source, &output, "8").unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_same(name, &logits(&source, Some("8")), &logits(&file(&output), None));
    }
}

#[test]
fn the_file_of_a_file_computes_what_in_situ_quantization_of_it_computes() {
    let dir = tempfile::tempdir().unwrap();
    for name in FILES {
        let output = dir.path().join(format!("{name}.gguf"));
        quantized(&gguf(name), &output, "Q4_0").unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_same(name, &logits(&gguf(name), Some("Q4_0")), &logits(&file(&output), None));
    }
}

/// A shape without the dimensions of one, which ggml does not tell apart.
fn plain_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|n| *n != 1).collect()
}

/// That rows are those of a twin, as far as what they are quantized to can tell.
fn assert_near(what: &str, own: &WeightView, twin: &WeightView) {
    let values = |view: &WeightView, row| {
        let mut values = vec![0.0_f32; view.cols];
        dequantize_row(view.dtype, view.row(row), &mut values);
        values
    };
    for row in 0..twin.rows {
        let (own_values, twin_values) = (values(own, row), values(twin, row));
        let largest = twin_values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let step = if own.dtype == DType::F32 { 1e-6 * largest } else { largest / 127.0 };
        for (a, b) in own_values.into_iter().zip(twin_values) {
            assert!((a - b).abs() <= step, "{what}, row {row}: {a} and {b}");
        }
    }
}

/// What describes the file, not the model.
fn is_about_the_file(key: &str) -> bool {
    key.starts_with("general.")
}

#[test]
fn metadata_and_names_are_those_of_llama_cpps_converter() {
    let dir = tempfile::tempdir().unwrap();
    let plain = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3-linear", "phi3"];
    let further = ["gemma", "gemma2", "glm4", "granite", "olmo2", "phi2", "smollm3", "stablelm", "starcoder2"];
    let experts = ["deepseek-v2-lite", "deepseek-v3-yarn", "gpt-oss-mxfp4", "granitemoe", "lfm2-moe", "llama4-text-8k"];
    let recurrent = ["granitemoehybrid", "lfm2", "qwen3-next", "qwen3_5-moe"];
    for name in plain.into_iter().chain(further).chain(experts).chain(recurrent) {
        let output = dir.path().join(format!("{name}.gguf"));
        quantized(&hugging_face(name), &output, "8").unwrap();
        let twin_path = golden_dir().join("gguf").join(format!("{name}.gguf"));
        let open = |path: &Path| GgufFiles::open(&[path.to_owned()]).unwrap();
        let (own, twin) = (open(&output), open(&twin_path));
        let sorted = |files: &GgufFiles| {
            let mut names: Vec<_> = files.names().map(str::to_owned).collect();
            names.sort_unstable();
            names
        };
        assert_eq!(sorted(&own), sorted(&twin), "{name}");
        for tensor in twin.names() {
            let (own, twin) = (own.tensor(tensor).unwrap(), twin.tensor(tensor).unwrap());
            assert_eq!(plain_shape(&own.1), plain_shape(&twin.1), "{name} {tensor}");
            assert_eq!(own.0.dtype == DType::F32, twin.0.dtype == DType::F32, "{name} {tensor}");
            assert_near(&format!("{name} {tensor}"), &own.0, &twin.0);
        }
        for (key, value) in twin.metadata().iter().filter(|(key, _)| !is_about_the_file(key)) {
            // The twin of phi3 has the default of a folder that names no original context; granite with states has no bound
            // there; others have the width of dense layers, of which they have none.
            let otherwise = ["phi3.rope.scaling.original_context_length", "granitehybrid.context_length"];
            let without_dense = ["llama4", "qwen3next", "qwen35moe"].map(|prefix| format!("{prefix}.feed_forward_length"));
            if otherwise.contains(&key) || without_dense.iter().any(|known| known == key) {
                continue;
            }
            let own = own.metadata().get(key).unwrap_or_else(|| panic!("{name}: no {key}"));
            match (own, value) {
                (MetadataValue::Float(a), MetadataValue::Float(b)) => assert!((a - b).abs() <= 1e-6 * b.abs(), "{name} {key}"),
                (own, value) => assert_eq!(own, value, "{name} {key}"),
            }
        }
    }
}

#[test]
fn the_file_of_a_file_keeps_its_metadata_byte_for_byte_and_what_is_no_matrix() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("q.gguf");
    quantized(&gguf("mixtral"), &output, "Q4_0").unwrap();
    let source = GgufFiles::open(&[golden_dir().join("gguf/mixtral.gguf")]).unwrap();
    let own = GgufFiles::open(std::slice::from_ref(&output)).unwrap();
    for (key, value) in source.metadata().iter().filter(|(key, _)| *key != "general.file_type") {
        assert_eq!(own.metadata().get(key), Some(value), "{key}");
    }
    assert_eq!(own.metadata().usize("general.file_type"), Some(2));
    for name in source.names() {
        let (before, after) = (source.tensor(name).unwrap().0, own.tensor(name).unwrap().0);
        let stays = name.contains("norm") || name.contains("ffn_gate_inp");
        assert_eq!(stays, before.dtype == after.dtype, "{name}: {} and {}", before.dtype, after.dtype);
        assert!(!stays || before.bytes() == after.bytes(), "{name}");
    }
}

#[test]
fn the_tokenizer_and_the_template_come_along() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("q.gguf");
    let folder = golden_dir().join("text/gemma3-linear");
    quantized(&hugging_face("gemma3-linear"), &output, "8").unwrap();
    let own = GgufFiles::open(std::slice::from_ref(&output)).unwrap();
    let (original, written) = (Tokenizer::from_hf_dir(&folder, None).unwrap(), Tokenizer::from_gguf(own.metadata()).unwrap());
    for text in ["The block of 2024 is <|im_start|>user\ncafé<|im_end|>", "", " a  b"] {
        assert_eq!(original.encode(text, true).unwrap(), written.encode(text, true).unwrap(), "{text:?}");
    }
    assert_eq!(original.eos_ids(), written.eos_ids());
    assert_eq!(original.special_tokens(), written.special_tokens());
    assert_eq!(own.metadata().str("tokenizer.chat_template"), template_in_dir(&folder).unwrap().as_deref());
}

/// A folder with another tokenizer.json.
fn folder_with(dir: &Path, tokenizer: &Value) -> ModelSource {
    let golden = golden_dir().join("text/llama");
    fs::create_dir_all(dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), dir.join(name)).unwrap();
    }
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    ModelSource::HuggingFace { path: dir.to_owned(), tokenizer_json: None }
}

/// As a converter makes it of a `SentencePiece` model: pieces with a visible space, bytes, and a merge for each way to a piece.
fn sentencepiece(prepends: bool) -> Value {
    let mut vocab = serde_json::Map::new();
    for text in ["<unk>", "<s>", "</s>"] {
        vocab.insert(text.into(), vocab.len().into());
    }
    for byte in 0..=255_u8 {
        vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
    }
    let mut merges = Vec::new();
    for (left, right) in
        [("l", "l"), ("h", "e"), ("\u{2581}", "a"), ("he", "ll"), ("hell", "o"), ("\u{2581}", "hello"), ("o", "r")]
    {
        vocab.insert(format!("{left}{right}"), vocab.len().into());
        merges.push(serde_json::json!([left, right]));
    }
    for letter in ["l", "h", "e", "\u{2581}", "a", "o", "r", "w", "d"] {
        vocab.insert(letter.into(), vocab.len().into());
    }
    let replace = serde_json::json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
    let prepend = serde_json::json!({ "type": "Prepend", "prepend": "\u{2581}" });
    let normalizers = if prepends { vec![prepend, replace] } else { vec![replace] };
    let mut decoders = vec![
        serde_json::json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }),
        serde_json::json!({ "type": "ByteFallback" }),
        serde_json::json!({ "type": "Fuse" }),
    ];
    if prepends {
        decoders.push(serde_json::json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let special = |id: usize, text: &str| {
        serde_json::json!({
            "id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
        })
    };
    serde_json::json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab, "merges": merges
        },
    })
}

#[test]
fn pieces_get_scores_that_merge_in_the_order_of_the_merges() {
    let dir = tempfile::tempdir().unwrap();
    for prepends in [true, false] {
        let folder = dir.path().join(prepends.to_string());
        let source = folder_with(&folder, &sentencepiece(prepends));
        let output = dir.path().join(format!("{prepends}.gguf"));
        quantized(&source, &output, "8").unwrap();
        let own = GgufFiles::open(std::slice::from_ref(&output)).unwrap();
        assert_eq!(own.metadata().bool("tokenizer.ggml.add_space_prefix"), Some(prepends));
        let (original, written) = (Tokenizer::from_hf_dir(&folder, None).unwrap(), Tokenizer::from_gguf(own.metadata()).unwrap());
        for text in ["hello world", "a hello\n hellor", "hehello"] {
            let ids = written.encode(text, true).unwrap();
            assert_eq!(original.encode(text, true).unwrap(), ids, "{text:?}");
            assert_eq!(written.decode(&ids, true), text);
        }
    }
}

fn refusal(source: &ModelSource, output: &Path) -> String {
    quantized(source, output, "Q4K").expect_err("it is refused").to_string()
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out").join("q.gguf");
    fs::create_dir(output.parent().unwrap()).unwrap();
    let (_folder, source) = drawn::model("helium");
    let error = refusal(&source, &output);
    assert!(error.contains("helium") && error.contains("llama, mistral, qwen2"), "{error}");
    // Of its files no key says that a layer has a window.
    let (folder, windowed) = drawn::model("dots1");
    fs::copy(golden_dir().join("text/llama/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let error = refusal(&windowed, &output);
    assert!(error.contains("the layers of this dots1 cannot be said"), "{error}");
    let error = refusal(&hugging_face("mistral"), &dir.path().join("absent/q.gguf"));
    assert!(error.contains("absent") && error.contains("cannot be written"), "{error}");
    let mut odd = sentencepiece(true);
    odd["normalizer"] = serde_json::json!({ "type": "Lowercase" });
    let error = refusal(&folder_with(&dir.path().join("odd"), &odd), &output);
    assert!(error.contains("cannot be written to a GGUF file") && error.contains("otherwise"), "{error}");
    odd["model"]["byte_fallback"] = false.into();
    let error = refusal(&folder_with(&dir.path().join("odder"), &odd), &output);
    assert!(error.contains("no name for the way it cuts text"), "{error}");
    let mut many = sentencepiece(true);
    many["added_tokens"].as_array_mut().unwrap().push(serde_json::json!({
        "id": 512, "content": "<more>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
    }));
    let error = refusal(&folder_with(&dir.path().join("many"), &many), &output);
    assert!(error.contains("<more>") && error.contains("512 rows"), "{error}");
    assert_eq!(fs::read_dir(output.parent().unwrap()).unwrap().count(), 0);
}

#[test]
fn a_file_that_exists_is_kept_unless_it_is_to_be_replaced_and_quantized_weights_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let output: PathBuf = dir.path().join("q.gguf");
    fs::write(&output, "mine").unwrap();
    let error = refusal(&hugging_face("llama"), &output);
    assert!(error.contains("exists") && error.contains("--force"), "{error}");
    assert_eq!(fs::read(&output).unwrap(), b"mine");
    let replace = QuantizeOptions { overwrite: true, ..options(&output, "Q4K") };
    quantize_model(&hugging_face("llama"), &replace, &|_| {}).unwrap();
    let error = refusal(&file(&output), &dir.path().join("again.gguf"));
    assert!(error.contains("quantized already"), "{error}");
    let error = quantize_model(&hugging_face("llama"), &QuantizeOptions { overwrite: true, ..options(dir.path(), "8") }, &|_| {});
    assert!(error.unwrap_err().to_string().contains("is a folder"));
}

#[test]
fn values_that_are_not_finite_are_an_error_and_leave_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let golden = golden_dir().join("gguf/llama.gguf");
    let mut bytes = fs::read(&golden).unwrap();
    let source = GgufFiles::open(std::slice::from_ref(&golden)).unwrap();
    let weight = source.tensor("blk.0.ffn_down.weight").unwrap().0;
    let at = bytes.windows(weight.bytes().len()).position(|window| window == weight.bytes()).unwrap();
    bytes[at..at + 2].copy_from_slice(&0x7f80_u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let error = refusal(&file(&path), &out.join("q.gguf"));
    assert!(error.contains("blk.0.ffn_down.weight") && error.contains("not finite"), "{error}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
}

#[test]
fn progress_ends_at_what_was_to_be_done() {
    let dir = tempfile::tempdir().unwrap();
    let seen = std::sync::Mutex::new(Vec::new());
    let progress = |step: engine::LoadProgress| seen.lock().unwrap().push((step.done_bytes, step.total_bytes));
    quantize_model(&hugging_face("llama"), &options(&dir.path().join("q.gguf"), "8"), &progress).unwrap();
    let seen = seen.into_inner().unwrap();
    assert!(seen.windows(2).all(|two| two[0].0 <= two[1].0));
    let (done, total) = *seen.last().unwrap();
    // Norms are not counted.
    assert!(done <= total && done > total * 9 / 10, "{done} of {total}");
}

/// A llama of one layer, all of whose matrices have 256 columns, in bf16.
fn wide_folder(dir: &Path) -> ModelSource {
    let golden = golden_dir().join("text/llama");
    fs::create_dir_all(dir).unwrap();
    fs::copy(golden.join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", 256),
        ("intermediate_size", 256),
        ("head_dim", 64),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("num_hidden_layers", 1),
        ("vocab_size", 512),
    ] {
        config[key] = value.into();
    }
    config["tie_word_embeddings"] = true.into();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut seed = 1_u32;
    let mut values = |count: usize, scale: f32, offset: f32| -> Vec<u8> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            half::bf16::from_f32((seed >> 8) as f32 / (1 << 23) as f32 * scale - scale + offset).to_le_bytes()
        };
        (0..count).flat_map(|_| next()).collect()
    };
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let tensors = [
        ("model.embed_tokens.weight".to_owned(), vec![512, 256], 0.5),
        ("model.norm.weight".to_owned(), vec![256], 0.0),
        (layer("input_layernorm"), vec![256], 0.0),
        (layer("post_attention_layernorm"), vec![256], 0.0),
        (layer("self_attn.q_proj"), vec![256, 256], 0.2),
        (layer("self_attn.k_proj"), vec![128, 256], 0.2),
        (layer("self_attn.v_proj"), vec![128, 256], 0.2),
        (layer("self_attn.o_proj"), vec![256, 256], 0.2),
        (layer("mlp.gate_proj"), vec![256, 256], 0.2),
        (layer("mlp.up_proj"), vec![256, 256], 0.2),
        (layer("mlp.down_proj"), vec![256, 256], 0.2),
    ];
    let bytes: Vec<_> = tensors
        .iter()
        .map(|(_, shape, scale)| {
            let count = shape.iter().product();
            if *scale == 0.0 { values(count, 0.0, 1.0) } else { values(count, *scale, 0.0) }
        })
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name.clone(), safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    ModelSource::HuggingFace { path: dir.to_owned(), tokenizer_json: None }
}

fn imatrix(kind: &str) -> Arc<Importance> {
    Arc::new(Importance::open(&golden_dir().join(format!("imatrix/imatrix.{kind}"))).unwrap())
}

#[test]
fn an_importance_matrix_of_llama_cpp_of_either_kind_weighs_the_columns_of_matrices() {
    let dir = tempfile::tempdir().unwrap();
    let source = wide_folder(&dir.path().join("model"));
    let written = |name: &str, quantize: &str, imatrix: Option<Arc<Importance>>| {
        let output = dir.path().join(name);
        quantize_model(&source, &QuantizeOptions { imatrix, ..options(&output, quantize) }, &|_| {}).unwrap();
        GgufFiles::open(&[output]).unwrap()
    };
    let bytes = |files: &GgufFiles, tensor: &str| files.tensor(tensor).unwrap().0.bytes().to_vec();
    for quantize in ["Q2K", "Q4K"] {
        let plain = written(&format!("{quantize}-plain.gguf"), quantize, None);
        let dat = written(&format!("{quantize}-dat.gguf"), quantize, Some(imatrix("dat")));
        let gguf = written(&format!("{quantize}-gguf.gguf"), quantize, Some(imatrix("gguf")));
        for part in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
            let tensor = format!("blk.0.{part}.weight");
            assert_ne!(bytes(&plain, &tensor), bytes(&dat, &tensor), "{quantize} {part}");
            // Sums and counts, rounded otherwise than means.
            let (dat, gguf) = (bytes(&dat, &tensor), bytes(&gguf, &tensor));
            let same = dat.iter().zip(&gguf).filter(|(a, b)| a == b).count();
            assert!(same * 1000 >= dat.len() * 999, "{quantize} {part}: {same} of {} bytes", dat.len());
        }
        // It has nothing about the token embedding.
        assert_eq!(bytes(&plain, "token_embd.weight"), bytes(&dat, "token_embd.weight"));
    }
    let weighted = |source: &ModelSource, quantize: Option<&str>| {
        let files = ModelFiles::open(source, None).unwrap().with_isq(quantize.map(isq));
        let files = if quantize.is_some() { files.with_importance(Some(imatrix("dat"))) } else { files };
        files.check_isq().unwrap();
        let mut runner = load_files(&files, Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
        let mut harness = Harness::new(&mut runner, 16);
        let sequence = harness.add(prompt(), prompt().len());
        harness.finish(sequence, prompt().len())
    };
    let of_file = weighted(&file(&dir.path().join("Q4K-dat.gguf")), None);
    assert_same("Q4K with importance", &weighted(&source, Some("Q4K")), &of_file);
}

#[test]
fn a_text_measures_the_importance_of_every_matrix_of_the_layers() {
    let dir = tempfile::tempdir().unwrap();
    let source = wide_folder(&dir.path().join("model"));
    let text = dir.path().join("text.txt");
    fs::write(&text, "A lazy dog naps while the quick brown fox jumps over it. ".repeat(20)).unwrap();
    let written = |name: &str, calibration_file: Option<PathBuf>| {
        let output = dir.path().join(name);
        quantize_model(&source, &QuantizeOptions { calibration_file, ..options(&output, "Q4K") }, &|_| {}).unwrap();
        GgufFiles::open(&[output]).unwrap()
    };
    let (plain, measured) = (written("plain.gguf", None), written("measured.gguf", Some(text.clone())));
    let bytes = |files: &GgufFiles, tensor: &str| files.tensor(tensor).unwrap().0.bytes().to_vec();
    for part in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        let tensor = format!("blk.0.{part}.weight");
        assert_ne!(bytes(&plain, &tensor), bytes(&measured, &tensor), "{part}");
    }
    // What is loaded so is the same as what is written so.
    let load = |source: &ModelSource, isq: Option<&str>, calibration_file: Option<PathBuf>| {
        let in_situ_quant = isq.map(|name| name.parse().unwrap());
        let config = EngineConfig { in_situ_quant, calibration_file, ..exact() };
        run(&Engine::load(source, &config, &|_| {}).unwrap(), request(1, 100, 12))
    };
    let of_file = load(&file(&dir.path().join("measured.gguf")), None, None);
    assert_eq!(load(&source, Some("Q4K"), Some(text)), of_file);
}

#[test]
fn importance_that_has_no_use_is_refused_by_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |source: &ModelSource, quantize: Option<&str>| {
        let files = ModelFiles::open(source, None).unwrap().with_isq(quantize.map(isq)).with_importance(Some(imatrix("gguf")));
        files.check_isq().unwrap_err().to_string()
    };
    let wide = wide_folder(&dir.path().join("model"));
    let error = refused(&wide, Some("Q4_0"));
    assert!(error.contains("Q4_0") && error.contains("without importance") && error.contains("Q2K, Q3K"), "{error}");
    let error = refused(&hugging_face("llama"), Some("Q4K"));
    assert!(error.contains("Q5_0") && error.contains("multiple of 256 columns"), "{error}");
    let error = refused(&wide, None);
    assert!(error.contains("nothing is quantized") && error.contains("--isq"), "{error}");
    let path = dir.path().join("model.gguf");
    fs::copy(golden_dir().join("gguf/llama.gguf"), &path).unwrap();
    let error = Importance::open(&path).unwrap_err().to_string();
    assert!(error.contains("instead of \"imatrix\""), "{error}");
    let error = Importance::open(&dir.path().join("absent")).unwrap_err().to_string();
    assert!(error.contains("absent"), "{error}");
}
