//! Quantized checkpoints of the hub: what config.json says of them, and their tensors.

use std::path::PathBuf;

use engine::{Engine, EngineError, GenerationRequest, ModelSource, Prompt, RequestStream, SamplingParams, model::ModelFiles};
use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::{
    files::{Files, golden_dir},
    grammar::{self, damage, damaged, pick},
    kinds::{Outcome, answered, kind_of, refused, small},
};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const FOLDERS: [&str; 8] = [
    "awq-g64",
    "bnb-nf4",
    "ct-nvfp4",
    "ct-w4a16-g32-asym",
    "fp8-block",
    "gptq-g64-asym-actorder",
    "mlx-4bit-g64",
    "moe-gptq-g32-sym",
];
/// Values of keys that decide something, those of one format in another as well.
const SAID: [(&str, &[&str]); 8] = [
    ("quant_method", &["awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4"]),
    ("version", &["gemm", "gemv"]),
    ("checkpoint_format", &["gptq", "gptq_v2"]),
    ("bnb_4bit_quant_type", &["fp4", "nf4"]),
    ("format", &["float-quantized", "int-quantized", "nvfp4-pack-quantized", "pack-quantized"]),
    ("mode", &["affine", "mxfp4"]),
    ("desc_act", &[]),
    ("sym", &[]),
];
const TYPES: [&str; 10] = ["BF16", "BOOL", "F16", "F32", "F8_E4M3", "I32", "I64", "I8", "U32", "U8"];
/// What loading may fail with.
const LOADING: [&str; 5] = ["Load", "Architecture", "NotSupported", "Device", "KvCache"];

struct Checkpoint {
    config: Value,
    /// The header of the weights, and what it is about.
    header: Value,
    data: Vec<u8>,
}

pub struct Checkpoints {
    all: Vec<Checkpoint>,
    dir: PathBuf,
}

impl Checkpoints {
    pub fn new(files: &Files) -> Self {
        let read = |name: &str| {
            let folder = golden_dir().join("quant").join(name);
            let read = |file: &str| std::fs::read(folder.join(file)).expect("a golden file");
            let weights = read(WEIGHTS);
            let (len, rest) = weights.split_first_chunk().expect("the length of a header");
            let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
            let json = |bytes: &[u8]| serde_json::from_slice(bytes).expect("JSON");
            Checkpoint { config: json(&read(CONFIG)), header: json(header), data: data.to_owned() }
        };
        let dir = files.dir.path().join("checkpoint");
        std::fs::create_dir(&dir).expect("a folder");
        let tokenizer = golden_dir().join("text/llama/tokenizer.json");
        std::fs::copy(tokenizer, dir.join("tokenizer.json")).expect("a golden file");
        Self { all: FOLDERS.map(read).into(), dir }
    }

    /// A checkpoint whose configuration or tensors are damaged: it is refused, or loaded and asked.
    pub fn case(&self, rng: &mut ChaCha8Rng) -> Outcome {
        let checkpoint = self.all.choose(rng).expect("a checkpoint");
        let (mut config, mut header, mut data) = (checkpoint.config.clone(), checkpoint.header.clone(), checkpoint.data.clone());
        for _ in 0..rng.random_range(1..=2) {
            match rng.random_range(0..4) {
                0 => damage_config(&mut config, rng),
                1 => damage_data(&mut data, &header, rng),
                _ => damage_header(&mut header, rng),
            }
        }
        let mut written = header.to_string();
        if rng.random_bool(0.05) {
            written = damaged(&written, rng);
        }
        if rng.random_bool(0.05) {
            data.truncate(rng.random_range(0..=data.len()));
        }
        let weights = [&(written.len() as u64).to_le_bytes(), written.as_bytes(), &data].concat();
        std::fs::write(self.dir.join(CONFIG), config.to_string()).expect("a file of a case");
        std::fs::write(self.dir.join(WEIGHTS), weights).expect("a file of a case");
        let source = ModelSource::HuggingFace { path: self.dir.clone(), tokenizer_json: None };
        // The folder is named, or a tensor in it that is not as the configuration says.
        let names = ["checkpoint", "tensor `", "the model's architecture"];
        let what = |why: String| format!("{why}; {config} and {written}");
        match ModelFiles::open(&source, None) {
            Err(error) => refused(&error, &LOADING, &names).map_err(what),
            Ok(_) => generate(&source, rng, &names).map_err(what),
        }
    }
}

fn generate(source: &ModelSource, rng: &mut ChaCha8Rng, names: &[&str]) -> Outcome {
    let engine = match Engine::load(source, &small(), &|_| {}) {
        Ok(engine) => engine,
        Err(error @ EngineError::InvalidArgument(_)) => return Ok(format!("refused ({}) at load", kind_of(&error))),
        Err(error) => return refused(&error, &LOADING, names).map(|outcome| format!("{outcome} at load")),
    };
    let sampling = SamplingParams { max_tokens: Some(2), ..SamplingParams::default() };
    let request = GenerationRequest::new(Prompt::TokenIds(vec![1, 2, rng.random_range(0..300)]), sampling);
    match engine.submit(request).and_then(RequestStream::wait) {
        Ok(completion) => answered(&completion),
        Err(error) => refused(&error, &["InvalidArgument", "PromptTooLong", "KvCache"], &[]),
    }
}

fn damage_config(config: &mut Value, rng: &mut ChaCha8Rng) {
    let quantization = &mut config["quantization_config"];
    if rng.random_bool(0.4) {
        damage(quantization, rng);
        return;
    }
    if !quantization.is_object() {
        *quantization = json!({});
    }
    let (key, values) = SAID.choose(rng).expect("a key");
    let value = match values.choose(rng) {
        Some(value) if rng.random_bool(0.8) => (*value).into(),
        _ if rng.random() => rng.random::<bool>().into(),
        _ => grammar::value(rng, 2),
    };
    match rng.random_range(0..4) {
        0 => quantization["bits"] = rng.random_range(0..10).into(),
        1 => quantization["weight_block_size"] = json!([grammar::number(rng), rng.random_range(0..300)]),
        _ => quantization[*key] = value,
    }
}

/// A tensor gets another type, another shape that may be as large, another name, or another one's place; or it goes.
fn damage_header(header: &mut Value, rng: &mut ChaCha8Rng) {
    if rng.random_bool(0.15) {
        damage(header, rng);
        return;
    }
    let Some(object) = header.as_object_mut() else { return };
    let names: Vec<_> = object.keys().filter(|name| *name != "__metadata__").cloned().collect();
    let (Some(name), Some(other)) = (names.choose(rng), names.choose(rng)) else { return };
    if !object[name].is_object() {
        object[name] = json!({});
    }
    match rng.random_range(0..6) {
        0 => drop(object.remove(name)),
        1 => {
            let moved = object.remove(name).unwrap_or_default();
            object.insert(other.clone(), moved);
        }
        2 => {
            let tensor = object.get(other).cloned().unwrap_or_default();
            object.insert(name.clone(), tensor);
        }
        3 => object[name]["dtype"] = pick(rng, &TYPES).into(),
        _ => reshape(&mut object[name], rng),
    }
}

fn reshape(tensor: &mut Value, rng: &mut ChaCha8Rng) {
    let shape: Vec<u64> = tensor["shape"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let count: u64 = shape.iter().fold(1, |count, size| count.saturating_mul(*size));
    let factor = [1, 2, 3, 4, 8, 16, 32, 64].choose(rng).copied().unwrap_or(1);
    tensor["shape"] = match rng.random_range(0..6) {
        0 => json!([count / factor, factor]),
        1 => json!([factor, count / factor]),
        2 => json!([count]),
        3 => shape.iter().rev().copied().collect(),
        // No values, and more columns than can be counted.
        4 => {
            tensor["data_offsets"] = json!([0, 0]);
            let exponent = if rng.random() { rng.random_range(56..64) } else { rng.random_range(0..64) };
            json!([0, 1_u64 << exponent])
        }
        _ => grammar::value(rng, 2),
    };
}

/// Bytes of one tensor: small ones, which scales and orders are, as often as large ones.
fn damage_data(data: &mut [u8], header: &Value, rng: &mut ChaCha8Rng) {
    let Some(object) = header.as_object() else { return };
    let places: Vec<_> = object.values().filter_map(|tensor| tensor["data_offsets"].as_array()).collect();
    let Some([start, end]) = places.choose(rng).map(|place| &place[..]) else { return };
    let at = |value: &Value| value.as_u64().map_or(0, |at| (at as usize).min(data.len()));
    let (start, end) = (at(start), at(end));
    if start >= end {
        return;
    }
    for _ in 0..rng.random_range(1..=8) {
        let at = rng.random_range(start..end);
        data[at] = match rng.random_range(0..4) {
            0 => 0,
            1 => 0xff,
            2 => 0x7f,
            _ => rng.random(),
        };
    }
}
