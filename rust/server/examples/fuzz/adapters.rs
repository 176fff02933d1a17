//! Files of adapters.

use std::path::PathBuf;

use engine::{
    AdapterChoice, AdapterOptions, Engine, EngineConfig, GenerationRequest, LoadAdapter, ModelSource, Prompt, RequestStream,
    SamplingParams,
};
use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::{
    files::{Files, golden_dir},
    grammar::{self, damage, damaged, pick},
    kinds::{Outcome, answered, refused, small},
};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const FOLDERS: [&str; 8] = [
    "llama-all-rslora",
    "llama-attn",
    "llama-dora",
    "llama-embed-head",
    "llama-layers",
    "llama-patterns",
    "llama-save",
    "llama-tokens",
];
/// Fields that decide something.
const KEYS: [&str; 12] = [
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "layer_replication",
    "lora_alpha",
    "peft_type",
    "r",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
    "use_rslora",
];

pub struct Adapters {
    /// Configuration and weights of each folder.
    folders: Vec<(Value, Vec<u8>)>,
    gguf: Vec<u8>,
    dir: PathBuf,
    /// Of a folder, and of a GGUF file.
    engines: [Engine; 2],
}

fn engine(source: &ModelSource) -> Engine {
    let adapters = Some(AdapterOptions { max_bytes: 4 << 20, ..AdapterOptions::default() });
    let config = EngineConfig { adapters, ..small() };
    Engine::load(source, &config, &|_| {}).expect("a golden model")
}

impl Adapters {
    pub fn new(files: &Files) -> Self {
        let lora = golden_dir().join("lora");
        let folders = FOLDERS.map(|name| {
            let read = |file: &str| std::fs::read(lora.join(name).join(file)).expect("a golden file");
            (serde_json::from_slice(&read(CONFIG)).expect("JSON"), read(WEIGHTS))
        });
        let dir = files.dir.path().join("adapter");
        std::fs::create_dir(&dir).expect("a folder");
        let engines = [
            ModelSource::HuggingFace { path: golden_dir().join("text/llama"), tokenizer_json: None },
            ModelSource::Gguf { files: vec![golden_dir().join("gguf/llama.gguf")], tokenizer_dir: None, tokenizer_json: None },
        ];
        let gguf = std::fs::read(lora.join("llama-gguf/llama-gguf.gguf")).expect("a golden file");
        Self { folders: folders.into(), gguf, dir, engines: engines.map(|source| engine(&source)) }
    }

    /// An adapter whose files are damaged: it is refused, or loaded, asked, and unloaded.
    pub fn case(&self, rng: &mut ChaCha8Rng) -> Outcome {
        let is_gguf = rng.random_bool(0.25);
        let source = if is_gguf { self.write_gguf(rng) } else { self.write_folder(rng) };
        let engine = if is_gguf || rng.random_bool(0.2) { &self.engines[1] } else { &self.engines[0] };
        if let Err(error) = engine.load_adapter("it", &source, &LoadAdapter::default()) {
            return refused(&error, &["Adapter"], &["adapter"]);
        }
        let sampling = SamplingParams { max_tokens: Some(2), ..SamplingParams::default() };
        let mut request = GenerationRequest::new(Prompt::TokenIds(vec![1, 2, 3, 400]), sampling);
        request.adapter = Some(AdapterChoice::Alias("it".into()));
        let answer = engine.submit(request).and_then(RequestStream::wait);
        engine.unload_adapter("it", None).map_err(|error| format!("it is not unloaded: {error}"))?;
        match answer {
            Err(error) => Err(format!("a request is refused: {error}")),
            Ok(completion) => answered(&completion),
        }
    }

    fn write_folder(&self, rng: &mut ChaCha8Rng) -> PathBuf {
        let (config, weights) = self.folders.choose(rng).expect("a folder");
        let (mut config, mut weights) = (config.clone(), weights.clone());
        for _ in 0..rng.random_range(1..=2) {
            match rng.random_range(0..4) {
                0 => damage(&mut config, rng),
                1 => damage_bytes(&mut weights, rng),
                _ => config[pick(rng, &KEYS)] = if rng.random() { grammar::number(rng) } else { grammar::value(rng, 2) },
            }
            if !config.is_object() {
                config = json!({});
            }
        }
        let written = if rng.random_bool(0.05) { damaged(&config.to_string(), rng) } else { config.to_string() };
        std::fs::write(self.dir.join(CONFIG), written).expect("a file of a case");
        std::fs::write(self.dir.join(WEIGHTS), weights).expect("a file of a case");
        self.dir.clone()
    }

    fn write_gguf(&self, rng: &mut ChaCha8Rng) -> PathBuf {
        let mut bytes = self.gguf.clone();
        for _ in 0..rng.random_range(1..=3) {
            damage_bytes(&mut bytes, rng);
        }
        let path = self.dir.with_file_name("adapter.gguf");
        std::fs::write(&path, bytes).expect("a file of a case");
        path
    }
}

/// Changes a byte, mostly of the header, or cuts the end off.
fn damage_bytes(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    if bytes.is_empty() {
        return;
    }
    let reach = if rng.random_bool(0.8) { bytes.len().min(4096) } else { bytes.len() };
    let at = rng.random_range(0..reach);
    match rng.random_range(0..8) {
        0 => bytes.truncate(at),
        1 => bytes[at] = rng.random(),
        2 => bytes[at] = b'0' + rng.random_range(0..10),
        _ => bytes[at] ^= 1 << rng.random_range(0..8),
    }
}
