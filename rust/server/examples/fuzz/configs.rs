//! config.json, generation_config.json, and the metadata of GGUF files.

use std::path::{Path, PathBuf};

use engine::{
    ChatTemplate, Engine, EngineError, GenerationConfig, GenerationRequest, ModelSource, Prompt, RenderOptions, SamplingParams,
    Tokenizer, keys, model::ModelFiles,
};
use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::{
    files::Files,
    grammar::{self, damage, damaged, pick, text},
    kinds::{Outcome, answered, kind_of, refused, small},
    templates::messages,
};

/// What loading a model may fail with.
const LOADING: [&str; 6] = ["Load", "Architecture", "NotSupported", "Tokenizer", "ChatTemplate", "KvCache"];

pub struct Configs {
    models: Vec<Model>,
    ggufs: Vec<Gguf>,
    gguf_path: PathBuf,
}

/// A copy of a golden model whose config.json is written again and again.
struct Model {
    path: PathBuf,
    config: Value,
}

impl Configs {
    pub fn new(files: &Files) -> Self {
        let models = files.folders.iter().map(|folder| {
            let path = files.dir.path().join(folder.name);
            std::fs::create_dir(&path).expect("a folder");
            for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
                std::fs::copy(folder.path.join(file), path.join(file)).expect("a golden file");
            }
            Model { path, config: folder.config.clone() }
        });
        let ggufs = files.ggufs.iter().map(|bytes| Gguf::parse(bytes)).collect();
        Self { models: models.collect(), ggufs, gguf_path: files.dir.path().join("model.gguf") }
    }

    /// A config.json with a few keys damaged, added or removed.
    pub fn config(&self, rng: &mut ChaCha8Rng) -> Outcome {
        let model = self.models.choose(rng).expect("a model");
        let mut config = model.config.clone();
        let mut changed = Vec::new();
        for _ in 0..rng.random_range(1..=3) {
            match rng.random_range(0..4) {
                0 => damage(&mut config, rng),
                1 => {
                    let key = known_key(rng, keys::CONFIG);
                    set(&mut config, &key, grammar::value(rng, 2));
                    changed.push(key);
                }
                _ => {
                    let Some(object) = config.as_object() else { continue };
                    let Some(key) = object.keys().collect::<Vec<_>>().choose(rng).map(|key| (*key).clone()) else { continue };
                    let value = if rng.random() { grammar::number(rng) } else { grammar::value(rng, 2) };
                    set(&mut config, &key, value);
                    changed.push(key);
                }
            }
        }
        let mut written = config.to_string();
        if rng.random_bool(0.05) {
            written = damaged(&written, rng);
        }
        std::fs::write(model.path.join("config.json"), &written).expect("a file of a case");
        let source = ModelSource::HuggingFace { path: model.path.clone(), tokenizer_json: None };
        // The file is named, or a tensor of it that is not as the file says.
        let names = ["config.json", "model.safetensors", "tensor `", "the model's architecture"];
        let what = |why: String| format!("{why} of {written}");
        match ModelFiles::open(&source, None) {
            Err(error) => refused(&error, &LOADING, &names).map_err(what),
            Ok(_) if rng.random_bool(0.7) => Ok("opened".into()),
            Ok(_) => generate(&source, rng, &names).map_err(what),
        }
    }

    /// The entries of a GGUF file, damaged.
    pub fn gguf(&self, rng: &mut ChaCha8Rng) -> Outcome {
        let mut gguf = self.ggufs.choose(rng).expect("a file").clone();
        let mut what = Vec::new();
        for _ in 0..rng.random_range(1..=3) {
            what.push(gguf.damage(rng));
        }
        std::fs::write(&self.gguf_path, gguf.bytes()).expect("a file of a case");
        // What stands beside the file counts as well.
        let _ = std::fs::remove_file(self.gguf_path.with_file_name("generation_config.json"));
        let source = ModelSource::Gguf { files: vec![self.gguf_path.clone()], tokenizer_dir: None, tokenizer_json: None };
        let names = ["model.gguf", "the chat template", "cannot be tokenized", "GGUF", "tokenizer.", "the model's architecture"];
        let result = open_gguf(&source, rng);
        let outcome = match result {
            Err(error) => refused(&error, &LOADING, &names),
            Ok(()) if rng.random_bool(0.7) => Ok("opened".into()),
            Ok(()) => generate(&source, rng, &names),
        };
        outcome.map_err(|why| format!("{why} with {}", what.join(", ")))
    }
}

fn open_gguf(source: &ModelSource, rng: &mut ChaCha8Rng) -> Result<(), EngineError> {
    let files = ModelFiles::open(source, None)?;
    let metadata = files.metadata().expect("a GGUF file has metadata");
    let tokenizer = Tokenizer::from_gguf(metadata)?;
    let ids = tokenizer.encode(&text(rng), rng.random())?;
    tokenizer.decode(&ids, rng.random());
    if let Some(template) = metadata.str("tokenizer.chat_template") {
        ChatTemplate::new(template, tokenizer.special_tokens().clone())?.render(&messages(rng), &RenderOptions::default())?;
    }
    Ok(())
}

/// Loads a model, and answers.
fn generate(source: &ModelSource, rng: &mut ChaCha8Rng, names: &[&str]) -> Outcome {
    let engine = match Engine::load(source, &small(), &|_| {}) {
        Ok(engine) => engine,
        // A model of less than 64 positions, or of blocks that do not fit.
        Err(error @ EngineError::InvalidArgument(_)) => return Ok(format!("refused ({}) at load", kind_of(&error))),
        Err(error) => return refused(&error, &LOADING, names).map(|outcome| format!("{outcome} at load")),
    };
    let sampling = SamplingParams { max_tokens: Some(3), ignore_eos: rng.random(), ..SamplingParams::default() };
    match engine.submit(GenerationRequest::new(Prompt::TokenIds(vec![1, 2, 3]), sampling)).and_then(engine::RequestStream::wait) {
        Ok(completion) => answered(&completion),
        Err(error) => refused(&error, &["InvalidArgument", "PromptTooLong", "KvCache"], &[])
            .map(|outcome| format!("{outcome} in a request")),
    }
}

fn known_key(rng: &mut ChaCha8Rng, table: keys::Table) -> String {
    let (names, _) = table.choose(rng).expect("a row");
    pick(rng, names).to_owned()
}

fn set(config: &mut Value, key: &str, value: Value) {
    if let Some(object) = config.as_object_mut() {
        object.insert(key.to_owned(), value);
    }
}

/// A generation_config.json alone: an error names one of its keys.
pub fn generation_config(files: &Files, rng: &mut ChaCha8Rng) -> Outcome {
    const READ: [&str; 9] = [
        "do_sample",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "min_p",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    ];
    let folder = files.folders.choose(rng).expect("a folder");
    let mut config = if rng.random() { folder.generation_config.clone() } else { json!({}) };
    for _ in 0..rng.random_range(1..=4) {
        let key = if rng.random() { pick(rng, &READ).to_owned() } else { known_key(rng, keys::GENERATION) };
        set(&mut config, &key, if rng.random() { grammar::number(rng) } else { grammar::value(rng, 2) });
    }
    if rng.random_bool(0.2) {
        damage(&mut config, rng);
    }
    let written = if rng.random_bool(0.05) { damaged(&config.to_string(), rng) } else { config.to_string() };
    files.write("generation_config.json", written.as_bytes());
    let result = GenerationConfig::from_dir(Path::new(files.dir.path()));
    match result {
        Err(error) => {
            let text = error.to_string();
            let is_named = config.as_object().is_none_or(|object| object.keys().any(|key| text.contains(key.as_str())));
            let is_json = serde_json::from_str::<Value>(&written).is_ok_and(|value| value.is_object());
            if is_json && !is_named {
                return Err(format!("the error names no key: {text}"));
            }
            refused(&error, &["Load"], &["generation_config.json"])
        }
        Ok(config) => {
            let sound = |number: Option<f32>, low: f32, high: f32| number.is_none_or(|n| (low..=high).contains(&n));
            if !sound(config.temperature, 0.0, f32::MAX) || !sound(config.top_p, 0.0, 1.0) || !sound(config.min_p, 0.0, 1.0) {
                return Err(format!("out of range: {config:?} of {written}"));
            }
            config.max_tokens(usize::MAX);
            Ok("read".into())
        }
    }
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A GGUF file in parts.
#[derive(Clone)]
struct Gguf {
    /// Key, type and value of each entry.
    entries: Vec<(Vec<u8>, u32, Vec<u8>)>,
    num_tensors: u64,
    /// From the first tensor's description to the padding before the data.
    tensors: Vec<u8>,
    data: Vec<u8>,
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("4 bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("8 bytes"))
    }

    fn string(&mut self) -> &'a [u8] {
        let len = self.u64() as usize;
        self.take(len)
    }

    fn skip(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            10..=12 => drop(self.take(8)),
            STRING => drop(self.string()),
            ARRAY => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.skip(kind));
            }
            other => panic!("a golden file has no type {other}"),
        }
    }
}

impl Gguf {
    /// Of a golden file, which is sound.
    fn parse(bytes: &[u8]) -> Self {
        let mut reader = Reader(bytes);
        reader.take(8);
        let (num_tensors, num_entries) = (reader.u64(), reader.u64());
        let entries = (0..num_entries)
            .map(|_| {
                let (key, kind) = (reader.string().to_vec(), reader.u32());
                let before = reader.0;
                reader.skip(kind);
                (key, kind, before[..before.len() - reader.0.len()].to_vec())
            })
            .collect();
        let before = reader.0;
        for _ in 0..num_tensors {
            reader.string();
            let num_dims = reader.u32() as usize;
            reader.take(8 * num_dims + 12);
        }
        let tensors = before[..before.len() - reader.0.len()].to_vec();
        let at = (bytes.len() - reader.0.len()).next_multiple_of(32);
        Self { entries, num_tensors, tensors, data: bytes[at..].to_vec() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(self.num_tensors.to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.entries {
            bytes.extend((key.len() as u64).to_le_bytes());
            bytes.extend(key);
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        }
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }

    /// Changes an entry, and says which.
    fn damage(&mut self, rng: &mut ChaCha8Rng) -> String {
        if self.entries.is_empty() {
            return "nothing".into();
        }
        let at = rng.random_range(0..self.entries.len());
        let name = String::from_utf8_lossy(&self.entries[at].0).into_owned();
        match rng.random_range(0..9) {
            0 => drop(self.entries.remove(at)),
            1 => {
                let entry = self.entries[at].clone();
                self.entries.push(entry);
            }
            2 => self.entries[at].0 = damaged(&name, rng).into_bytes(),
            3 => {
                let other = self.entries.choose(rng).expect("an entry").clone();
                (self.entries[at].1, self.entries[at].2) = (other.1, other.2);
            }
            4 | 5 => (self.entries[at].1, self.entries[at].2) = scalar(rng),
            6 => {
                let (kind, count) =
                    (*[0_u32, 4, 5, 6, 7, STRING, ARRAY, 12, 77].choose(rng).expect("a type"), rng.random_range(0..700_u64));
                let item = |rng: &mut ChaCha8Rng| match kind {
                    STRING | ARRAY => string(&text(rng)),
                    0 | 7 => vec![rng.random()],
                    12 => rng.random::<f64>().to_le_bytes().to_vec(),
                    _ => rng.random_range(0..600_u32).to_le_bytes().to_vec(),
                };
                let items: Vec<u8> = (0..count).flat_map(|_| item(rng)).collect();
                (self.entries[at].1, self.entries[at].2) =
                    (ARRAY, [&kind.to_le_bytes()[..], &count.to_le_bytes(), &items].concat());
            }
            _ => {
                let value = &mut self.entries[at].2;
                if !value.is_empty() {
                    let at = rng.random_range(0..value.len());
                    value[at] = if rng.random() { rng.random() } else { value[at] ^ (1 << rng.random_range(0..8)) };
                }
            }
        }
        name
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A type and a value of it.
fn scalar(rng: &mut ChaCha8Rng) -> (u32, Vec<u8>) {
    let number = grammar::number(rng);
    let integer = number.as_u64().or(number.as_i64().map(|n| n as u64)).unwrap_or(3);
    let float = number.as_f64().unwrap_or(0.0);
    match rng.random_range(0..8) {
        0 => (4, (integer as u32).to_le_bytes().to_vec()),
        1 => (5, (integer as i32).to_le_bytes().to_vec()),
        2 => (6, (float as f32).to_le_bytes().to_vec()),
        3 => (7, vec![rng.random_range(0..3)]),
        4 => (10, integer.to_le_bytes().to_vec()),
        5 => (12, float.to_le_bytes().to_vec()),
        6 => (6, f32::NAN.to_le_bytes().to_vec()),
        _ => (STRING, string(&text(rng))),
    }
}
