//! Thousands of corrupted model files: each loads or is an error, without a panic and without much memory.

mod common;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

use device::{
    Backend, KvDType, Precision,
    cpu::{CpuBackend, Isa},
};
use engine::{
    ChatTemplate, EngineError, GenerationConfig, MediaOptions, Message, ModelSource, RenderOptions, Tokenizer,
    chat_template::template_in_dir,
    model::ModelFiles,
    model_runner::{ModelRunner, RunnerOptions},
};
use peak_alloc::PeakAlloc;
use rand::{Rng, SeedableRng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;

use crate::common::{drawn, golden_dir, mmproj, sharded};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const CORRUPTIONS_OF_GGUF: u64 = 1200;
const CORRUPTIONS_OF_FOLDERS: u64 = 800;
const CORRUPTIONS_OF_CONTAINERS: u64 = 240;
const MEMORY_BEYOND_FILES: usize = 256 << 20;

/// Numbers that break careless arithmetic.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    7,
    0x7f,
    0xff,
    0x3fff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    1 << 40,
    i64::MAX as u64,
    u64::MAX - 31,
    u64::MAX,
];

/// Damages a file, its first `header` bytes above all.
fn corrupt(bytes: &mut Vec<u8>, header: usize, rng: &mut ChaCha8Rng) {
    for _ in 0..rng.random_range(1..=4) {
        if bytes.is_empty() {
            return;
        }
        let end = if rng.random_bool(0.85) { header.min(bytes.len()) } else { bytes.len() };
        let at = rng.random_range(0..end);
        match rng.random_range(0..10) {
            0..=2 => bytes[at] ^= 1 << rng.random_range(0..8),
            3 => bytes[at] = rng.random(),
            4..=6 => {
                // What looks like a count or a length, where there is one ahead.
                let low = rng.random_range(1..=4);
                let small = |p: &usize| bytes.get(*p + low..*p + 8).is_some_and(|high| high.iter().all(|b| *b == 0));
                let at = (at..end).find(small).unwrap_or(at);
                let number = EDGES.choose(rng).expect("a number").to_le_bytes();
                let width = *[1, 4, 8, 8].choose(rng).expect("a width");
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&number[..end - at]);
            }
            7 => bytes.truncate(at),
            8 => {
                let from = rng.random_range(0..bytes.len());
                let len = rng.random_range(1..=256).min(bytes.len() - from);
                let piece = bytes[from..from + len].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => drop(bytes.drain(at..(at + rng.random_range(1..=64)).min(bytes.len()))),
        }
    }
}

/// Replaces a number or a word of a JSON text by something else.
fn corrupt_json(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    const VALUES: [&str; 14] = [
        "0",
        "-1",
        "1",
        "3",
        "1e308",
        "1e-320",
        "18446744073709551615",
        "4294967296",
        "null",
        "true",
        "\"x\"",
        "[]",
        "{}",
        "NaN",
    ];
    let text = String::from_utf8_lossy(bytes).into_owned();
    let starts: Vec<_> = text.match_indices(": ").map(|(i, _)| i + 2).collect();
    let Some(&start) = starts.choose(rng) else { return };
    let end = text[start..].find([',', '\n', '}']).map_or(text.len(), |i| start + i);
    *bytes = [&text[..start], VALUES.choose(rng).expect("a value"), &text[end..]].concat().into_bytes();
}

/// What turns text into tokens and back.
fn load_text(source: &ModelSource, files: &ModelFiles) -> Result<(), EngineError> {
    let (tokenizer, template) = match source {
        ModelSource::HuggingFace { path, .. } if files.metadata().is_none() => {
            GenerationConfig::from_dir(path)?;
            (Tokenizer::from_hf_dir(path, None)?, template_in_dir(path)?)
        }
        _ => {
            let metadata = files.metadata().expect("a GGUF file has metadata");
            (Tokenizer::from_gguf(metadata)?, metadata.str("tokenizer.chat_template").map(str::to_owned))
        }
    };
    let ids = tokenizer.encode("Hello, world\n 123 \u{e9}", true)?;
    tokenizer.decode(&ids, false);
    if let Some(template) = template {
        let template = ChatTemplate::new(&template, tokenizer.special_tokens().clone())?;
        template.render(&[Message::user("Hello")], &RenderOptions::default())?;
    }
    Ok(())
}

fn load(source: &ModelSource, backend: &Arc<dyn Backend>) -> Result<(), EngineError> {
    let files = ModelFiles::open(source, None)?;
    load_text(source, &files)?;
    let options =
        RunnerOptions { precision: Precision::Fast, kv_dtype: KvDType::F16, max_num_batched_tokens: 8, max_num_seqs: 1 };
    let mut runner = ModelRunner::load(&files, Arc::clone(backend), options, &|_| {})?;
    let groups = paged::KvGroups::of_model(runner.config(), paged::KvDType::F16, 8)?;
    runner.allocate_kv((2 * groups.groups.len() + 1, 8), &groups)?;
    let groups = (0..groups.groups.len() as u32)
        .map(|group| device::KvGroupMetadata {
            block_tables: vec![group + 1],
            max_blocks: 1,
            slot_mapping: (0..3).map(|i| i64::from(group + 1) * 8 + i).collect(),
        })
        .collect();
    let step = device::StepMetadata {
        positions: vec![0, 1, 2],
        rope_positions: vec![0, 1, 2],
        query_start_loc: vec![0, 3],
        seq_lens: vec![3],
        groups,
        state_slots: if runner.config().is_recurrent() { vec![0] } else { Vec::new() },
        adapters: Vec::new(),
        span_ends: Vec::new(),
    };
    runner.execute(&[0, 1, 2], &step)?;
    runner.logits(&[2]).map(|_| ())
}

/// Loads what may be broken; true when it loaded.
fn attempt(source: &ModelSource, file_bytes: usize, backend: &Arc<dyn Backend>, what: &str) -> bool {
    attempt_with(|| load(source, backend), file_bytes, what)
}

fn attempt_with(load: impl FnOnce() -> Result<(), EngineError>, file_bytes: usize, what: &str) -> bool {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let result = catch_unwind(AssertUnwindSafe(load)).ok();
    let used = MEMORY.peak_usage().saturating_sub(before);
    assert!(used <= file_bytes + MEMORY_BEYOND_FILES, "{what}: {used} bytes of memory for {file_bytes} bytes of files");
    match result {
        Some(Ok(())) => true,
        Some(Err(error)) => {
            assert!(!error.to_string().is_empty(), "{what}: an error without words");
            false
        }
        None => panic!("{what}: panicked"),
    }
}

/// Encoders that lie in files of their own, damaged so many times in all.
fn corrupt_encoders(count: u64) {
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(Isa::detect(), 1).unwrap());
    let temp = tempfile::tempdir().unwrap();
    let seeing = ["llava", "llava_next", "idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3_vision", "mistral3"];
    let hearing = ["voxtral", "qwen2_audio", "gemma4"];
    let folders = seeing.map(|name| (name, golden_dir().join("vision").join(name)));
    let tiled = ["internvl", "lfm2_vl", "llama4_vision", "glm4v"];
    let folders = folders.into_iter().chain(hearing.map(|name| (name, drawn::hearing(name))));
    let folders = folders.chain(tiled.map(|name| (name, drawn::seeing(name))));
    let pairs = folders.map(|(name, folder)| {
        let checkpoint = mmproj::Checkpoint::open(&folder);
        let (model, encoder) = (temp.path().join(name), temp.path().join("mmproj.gguf"));
        let (language, file) = match name {
            _ if hearing.contains(&name) => (checkpoint.language(false), checkpoint.hearing()),
            _ if tiled.contains(&name) => (checkpoint.language_of_tiles(), checkpoint.encoder_of_tiles()),
            _ => (checkpoint.language(false), checkpoint.encoder()),
        };
        language.write(&model);
        file.write(&encoder);
        (ModelSource::Gguf { files: vec![model], tokenizer_dir: None, tokenizer_json: None }, std::fs::read(encoder).unwrap())
    });
    let pairs: Vec<_> = pairs.collect();
    let path = temp.path().join("mmproj.gguf");
    let vision = MediaOptions { mmproj: Some(path.clone()), ..MediaOptions::default() };
    let load = |source: &ModelSource| {
        let files = ModelFiles::open(source, None)?.with_media(source, &vision)?;
        let options =
            RunnerOptions { precision: Precision::Fast, kv_dtype: KvDType::F16, max_num_batched_tokens: 8, max_num_seqs: 1 };
        ModelRunner::load(&files, Arc::clone(&backend), options, &|_| {}).map(|_| ())
    };
    let mut loaded = 0;
    for seed in 0..count {
        let mut rng = ChaCha8Rng::seed_from_u64(3 << 32 | seed);
        let (source, sound) = pairs.choose(&mut rng).unwrap();
        let mut bytes = sound.clone();
        let header = if rng.random_bool(0.8) { 1400 } else { 6 * 1024 };
        corrupt(&mut bytes, header, &mut rng);
        std::fs::write(&path, &bytes).unwrap();
        loaded += u64::from(attempt_with(|| load(source), bytes.len(), &format!("an encoder, seed {seed}")));
    }
    assert!((1..count / 2).contains(&loaded), "{loaded} of {count} corrupted encoders loaded");
}

#[test]
fn corrupted_encoders_are_errors_or_load() {
    corrupt_encoders(600);
}

#[test]
#[ignore = "minutes; the same as above, of more files"]
fn many_corrupted_encoders_are_errors_or_load() {
    corrupt_encoders(60_000);
}

fn copy_folder(name: &str, dir: &Path) {
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden_dir().join("text").join(name).join(file), dir.join(file)).unwrap();
    }
}

#[test]
fn corrupted_files_are_errors_or_load() {
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(Isa::detect(), 1).unwrap());
    let temp = tempfile::tempdir().unwrap();
    let mut loaded = 0;

    let ggufs: Vec<_> =
        ["llama3-rope", "qwen2", "qwen3", "phi2", "granite", "glm4-moe", "deepseek-v3-yarn", "lfm2", "qwen3-next"]
            .map(|n| std::fs::read(golden_dir().join(format!("gguf/{n}.gguf"))).unwrap())
            .into();
    let path = temp.path().join("fuzzed.gguf");
    let source = ModelSource::Gguf { files: vec![path.clone()], tokenizer_dir: None, tokenizer_json: None };
    for seed in 0..CORRUPTIONS_OF_GGUF {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut bytes = ggufs.choose(&mut rng).unwrap().clone();
        // Half of the damage goes to the fixed header and the first entries, where the counts are.
        let header = if rng.random_bool(0.5) { 1024 } else { 24 * 1024 };
        corrupt(&mut bytes, header, &mut rng);
        std::fs::write(&path, &bytes).unwrap();
        loaded += usize::from(attempt(&source, bytes.len(), &backend, &format!("GGUF, seed {seed}")));
    }
    assert!((1..CORRUPTIONS_OF_GGUF as usize / 2).contains(&loaded), "{loaded} corrupted GGUF files loaded");

    let folders: Vec<PathBuf> =
        ["llama3-rope", "phi3-longrope", "gemma3", "smollm3", "stablelm-parallel", "granitemoe", "sharded"]
            .map(|name| temp.path().join(name))
            .into();
    for folder in &folders {
        std::fs::create_dir(folder).unwrap();
        let name = folder.file_name().unwrap().to_str().unwrap();
        if name == "sharded" {
            copy_folder("llama3-rope", folder);
            std::fs::remove_file(folder.join("model.safetensors")).unwrap();
            sharded::write(&golden_dir().join("text/llama3-rope"), folder);
        } else {
            copy_folder(name, folder);
        }
        let source = ModelSource::HuggingFace { path: folder.clone(), tokenizer_json: None };
        assert!(attempt(&source, 1 << 20, &backend, name), "{name} is sound");
    }
    loaded = 0;
    for seed in 0..CORRUPTIONS_OF_FOLDERS {
        let mut rng = ChaCha8Rng::seed_from_u64(1 << 32 | seed);
        let folder = folders.choose(&mut rng).unwrap();
        let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
        let total: usize = files.iter().map(|f| f.metadata().unwrap().len() as usize).sum();
        let json: Vec<_> = files.iter().filter(|f| f.extension().unwrap() == "json").collect();
        let target = if rng.random_bool(0.5) { *json.choose(&mut rng).unwrap() } else { files.choose(&mut rng).unwrap() };
        let sound = std::fs::read(target).unwrap();
        let mut bytes = sound.clone();
        if target.extension().unwrap() == "json" && rng.random_bool(0.8) {
            corrupt_json(&mut bytes, &mut rng);
        } else {
            corrupt(&mut bytes, 4096, &mut rng);
        }
        std::fs::write(target, &bytes).unwrap();
        let source = ModelSource::HuggingFace { path: folder.clone(), tokenizer_json: None };
        loaded += usize::from(attempt(&source, total + bytes.len(), &backend, &format!("{}, seed {seed}", target.display())));
        std::fs::write(target, &sound).unwrap();
    }
    assert!((1..CORRUPTIONS_OF_FOLDERS as usize * 3 / 4).contains(&loaded), "{loaded} corrupted folders loaded");
}

/// Damages the files that came before safetensors and GGUF, so many times in all.
fn corrupt_containers(count: u64) {
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(Isa::detect(), 1).unwrap());
    let temp = tempfile::tempdir().unwrap();
    let containers = golden_dir().join("containers");
    // Each with the files that are damaged: of the two of PyTorch one is zipped.
    let mut sources = Vec::new();
    for name in ["llama-bin-sharded", "llama-meta"] {
        let (from, folder) = (containers.join(name), temp.path().join(name));
        std::fs::create_dir(&folder).unwrap();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            let copy = folder.join(path.file_name().unwrap());
            std::fs::write(&copy, std::fs::read(&path).unwrap()).unwrap();
            if !path.ends_with("golden.json") && !path.ends_with("tokenizer.json") {
                files.push(copy);
            }
        }
        files.sort();
        sources.push((ModelSource::HuggingFace { path: folder, tokenizer_json: None }, files));
    }
    for (name, gqa) in [("llama-q4_0", 1), ("llama-gqa2-f16", 2)] {
        let file = temp.path().join(name);
        std::fs::write(&file, std::fs::read(containers.join(format!("ggml/{name}.bin"))).unwrap()).unwrap();
        let source = ModelSource::Ggml { file: file.clone(), gqa, tokenizer_dir: None, tokenizer_json: None };
        sources.push((source, vec![file]));
    }
    for (source, files) in &sources {
        assert!(attempt(source, 1 << 20, &backend, "a sound file"), "{files:?} are sound");
    }
    let mut loaded = 0;
    for seed in 0..count {
        let mut rng = ChaCha8Rng::seed_from_u64(2 << 32 | seed);
        let (source, files) = sources.choose(&mut rng).unwrap();
        let target = files.choose(&mut rng).unwrap();
        let sound = std::fs::read(target).unwrap();
        let mut bytes = sound.clone();
        let is_json = target.extension().is_some_and(|extension| extension == "json");
        if is_json && rng.random_bool(0.8) {
            corrupt_json(&mut bytes, &mut rng);
        } else if rng.random_bool(0.2) {
            // Of an archive the end says where everything is.
            let end = bytes.len() - bytes.len().min(2048);
            let mut tail = bytes.split_off(end);
            corrupt(&mut tail, 2048, &mut rng);
            bytes.extend(tail);
        } else {
            corrupt(&mut bytes, 4096, &mut rng);
        }
        std::fs::write(target, &bytes).unwrap();
        let total = files.iter().map(|file| file.metadata().unwrap().len() as usize).sum::<usize>();
        loaded += u64::from(attempt(source, total + bytes.len(), &backend, &format!("{}, seed {seed}", target.display())));
        std::fs::write(target, &sound).unwrap();
    }
    assert!((1..count * 3 / 4).contains(&loaded), "{loaded} of {count} corrupted containers loaded");
}

#[test]
fn corrupted_containers_are_errors_or_load() {
    corrupt_containers(CORRUPTIONS_OF_CONTAINERS);
}

#[test]
#[ignore = "minutes; the same as above, of more files"]
fn many_corrupted_containers_are_errors_or_load() {
    corrupt_containers(12_000);
}
