//! Blocks that outlive the pool: a second engine over the same folder computes only what it must, and says the same.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use engine::{
    Completion, Engine, EngineConfig, GenerationRequest, KvTierConfig, MemoryGpuConfig, ModelDType, PagedAttentionConfig, Prompt,
    SamplingParams,
};

use crate::common::{self, hugging_face};

const BLOCK_SIZE: usize = 8;
const PROMPT_LEN: usize = 100;

fn config(dtype: ModelDType, kv_tier: Option<KvTierConfig>) -> EngineConfig {
    let paged_attention = PagedAttentionConfig {
        block_size: Some(BLOCK_SIZE),
        mem_gpu: Some(MemoryGpuConfig::ContextSize(400)),
        ..PagedAttentionConfig::default()
    };
    EngineConfig { dtype, kv_tier, paged_attention, ..EngineConfig::default() }
}

fn file_tier(path: &Path) -> KvTierConfig {
    KvTierConfig::File { path: path.to_owned(), max_bytes: 1 << 30 }
}

fn start(model: &str, path: &Path) -> Engine {
    Engine::load(&hugging_face(model), &config(ModelDType::F32, Some(file_tier(path))), &|_| {}).unwrap()
}

fn request(i: usize) -> GenerationRequest {
    let ids = (0..PROMPT_LEN).map(|j| ((i * 7919 + j * 31) % 400 + 10) as u32).collect();
    let sampling = SamplingParams {
        temperature: Some(0.0),
        max_tokens: Some(12),
        ignore_eos: true,
        logprobs: Some(0),
        ..SamplingParams::default()
    };
    GenerationRequest::new(Prompt::TokenIds(ids), sampling)
}

/// Tokens with their log probabilities, and how much of the prompt was not computed.
fn run(engine: &Engine, i: usize) -> (Vec<(u32, f32)>, usize) {
    let completion: Completion = engine.submit(request(i)).unwrap().wait().unwrap();
    let tokens = completion.choices[0].logprobs.iter().flatten().map(|l| (l.token_id, l.logprob.unwrap())).collect();
    (tokens, completion.usage.cached_tokens)
}

/// Every file of every model.
fn files(dir: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())).collect();
    files.sort();
    files
}

/// The most that a prompt's blocks can save: all but the block of its last token.
const MOST_CACHED: usize = (PROMPT_LEN - 1) / BLOCK_SIZE * BLOCK_SIZE;

#[test]
fn a_second_engine_skips_the_prefill_and_says_the_same() {
    for model in ["llama", "gemma3"] {
        let dir = tempfile::tempdir().unwrap();
        let (expected, cached) = run(&start(model, dir.path()), 1);
        assert_eq!(cached, 0);
        let engine = start(model, dir.path());
        assert_eq!(run(&engine, 1), (expected, MOST_CACHED), "{model}");
        let stats = engine.kv_cache_stats().unwrap().tier;
        assert_eq!((stats.hit_tokens, stats.failed_blocks, stats.dropped_blocks), (MOST_CACHED as u64, 0, 0));
        assert!(stats.swapped_in_blocks > 0 && stats.bytes_per_block > 0);
    }
}

#[test]
fn damaged_files_are_computed_and_healed() {
    let dir = tempfile::tempdir().unwrap();
    let (expected, _) = run(&start("llama", dir.path()), 1);
    let damage: [fn(&mut Vec<u8>); 3] = [
        |bytes| {
            let at = bytes.len() - 40;
            bytes[at] ^= 4;
        },
        |bytes| bytes.truncate(bytes.len() / 2),
        Vec::clear,
    ];
    for damage in damage {
        for file in files(dir.path()) {
            let mut bytes = fs::read(&file).unwrap();
            damage(&mut bytes);
            fs::write(&file, bytes).unwrap();
        }
        let engine = start("llama", dir.path());
        assert_eq!(run(&engine, 1), (expected.clone(), 0));
        assert!(engine.kv_cache_stats().unwrap().tier.failed_blocks > 0);
        drop(engine);
        assert_eq!(run(&start("llama", dir.path()), 1), (expected.clone(), MOST_CACHED));
    }
}

#[test]
fn what_follows_a_damaged_file_is_computed_and_what_is_before_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (expected, _) = run(&start("llama", dir.path()), 1);
    // The header says which block of the prefix it is.
    let index_at = 8 + 4 + 3 * 32 + 4;
    let fourth = files(dir.path()).into_iter().find(|file| fs::read(file).unwrap()[index_at..index_at + 4] == [3, 0, 0, 0]);
    fs::write(fourth.unwrap(), "foreign").unwrap();
    assert_eq!(run(&start("llama", dir.path()), 1), (expected, 3 * BLOCK_SIZE));
}

#[test]
fn another_model_or_type_finds_nothing_in_the_same_folder() {
    let dir = tempfile::tempdir().unwrap();
    run(&start("llama", dir.path()), 1);
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(common::golden_dir().join("text/llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let same = engine::ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
    let exact = config(ModelDType::F32, Some(file_tier(dir.path())));
    assert_eq!(run(&Engine::load(&same, &exact, &|_| {}).unwrap(), 1).1, MOST_CACHED);
    let other_type = config(ModelDType::F16, Some(file_tier(dir.path())));
    assert_eq!(run(&Engine::load(&same, &other_type, &|_| {}).unwrap(), 1).1, 0);
    // One bit of one weight.
    let weights = copy.path().join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    assert_eq!(run(&Engine::load(&same, &exact, &|_| {}).unwrap(), 1).1, 0);
}

/// The pool holds three contexts or so; what it evicts is fetched.
#[test]
fn evicted_blocks_come_back_from_host_memory() {
    let tier = KvTierConfig::Memory { max_bytes: 1 << 28 };
    let engine = Engine::load(&hugging_face("llama"), &config(ModelDType::F32, Some(tier)), &|_| {}).unwrap();
    let expected: Vec<_> = (0..8).map(|i| run(&engine, i).0).collect();
    let deadline = Instant::now() + Duration::from_secs(20);
    let full_blocks = 8 * ((PROMPT_LEN + 11) / BLOCK_SIZE) as u64;
    while engine.kv_cache_stats().unwrap().tier.swapped_out_blocks < full_blocks {
        assert!(Instant::now() < deadline, "{:?}", engine.kv_cache_stats().unwrap().tier);
        std::thread::sleep(Duration::from_millis(5));
    }
    for (i, expected) in expected.iter().enumerate() {
        let (tokens, cached) = run(&engine, i);
        assert_eq!(&tokens, expected);
        assert!(cached >= MOST_CACHED);
    }
    assert!(engine.kv_cache_stats().unwrap().tier.hit_tokens > 0);
}

#[test]
fn a_tier_that_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = config(ModelDType::F32, Some(file_tier(dir.path())));
        change(&mut config);
        let Err(error) = Engine::load(&hugging_face("llama"), &config, &|_| {}) else { panic!("it was loaded") };
        error.to_string()
    };
    assert!(refused(&|config| config.prefix_caching = false).contains("prefix_cache_n=0"));
    assert!(refused(&|config| config.no_kv_cache = true).contains("no_kv_cache=True"));
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(refused(&|config| config.kv_tier = Some(file_tier(&file))).contains("name a folder"));
    let none = KvTierConfig::File { path: dir.path().to_owned(), max_bytes: 0 };
    assert!(refused(&|config| config.kv_tier = Some(none.clone())).contains("kv_tier_size is 0 MB"));
}
