//! Tiny models of further families, whose weights are drawn from their names, against Transformers (tests/data/golden/drawn).

use std::sync::{Arc, Mutex};

use device::{
    KvDType, Precision,
    cpu::{CpuBackend, Isa, ReferenceBackend},
    cuda::CudaBackend,
};
use engine::{Engine, EngineConfig, MemoryGpuConfig, model::config::FfnConfig, model_runner::ModelRunner};
use kernel_tests::{EmulatedDriver, Order};

use crate::common::{
    Harness, MAX_TOKENS,
    cases::{BF16, Case, EXACT, cases_of, check_cases},
    drawn, golden_dir, load,
};

/// Some that are dense, and some with experts.
const CHUNKED: [&str; 18] = [
    "gpt2",
    "gpt_neo",
    "opt",
    "dots1",
    "gemma3n",
    "gemma4",
    "gemma4-moe",
    "olmo3",
    "nemotron_h",
    "nemotron_h-latent",
    "falcon_h1",
    "falcon_h1-norm",
    "mamba",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "lfm3",
    "olmo_hybrid",
];
/// What their kernels are asked for, no other golden asks for.
const ON_CUDA: [&str; 22] = [
    "afmoe",
    "apertus",
    "cohere2_moe",
    "gemma3n",
    "gemma4",
    "gemma4-moe",
    "gpt2",
    "gpt_neox",
    "jais2",
    "jamba",
    "kimi_linear",
    "laguna",
    "lfm3",
    "mamba",
    "mamba2",
    "mistral4",
    "nanochat",
    "nemotron_h-latent",
    "falcon_h1",
    "falcon_h1-norm",
    "olmo",
    "opt",
];

fn names() -> Vec<String> {
    let mut names: Vec<_> =
        golden_dir().join("drawn").read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(!names.is_empty());
    names
}

fn cases(name: &str) -> Vec<Case> {
    cases_of(&golden_dir().join("drawn").join(name).join("golden.json"))
}

fn load_on_cpu(name: &str, precision: Precision, kv_dtype: KvDType) -> ModelRunner {
    let (_folder, source) = drawn::model(name);
    load(&source, Arc::new(CpuBackend::new(Isa::detect(), 2).unwrap()), precision, kv_dtype)
}

#[test]
fn drawn_models_agree_with_goldens_on_the_best_isa() {
    for name in names() {
        check_cases(&mut load_on_cpu(&name, Precision::Exact, KvDType::F32), &name, cases(&name), MAX_TOKENS, EXACT);
        let mut runner = load_on_cpu(&name, Precision::Fast, KvDType::F16);
        // Where two experts are nearly tied, the smallest difference flips them.
        if runner.config().layers.iter().all(|layer| matches!(layer.ffn, FfnConfig::Dense(_) | FfnConfig::Nothing)) {
            check_cases(&mut runner, &name, cases(&name), 17, BF16);
        }
    }
}

#[test]
fn drawn_models_agree_with_goldens_on_the_reference_backend() {
    for name in names() {
        let (_folder, source) = drawn::model(&name);
        let mut runner = load(&source, Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
        check_cases(&mut runner, &name, cases(&name), 23, EXACT);
    }
}

/// In one batch, one beside the other, and each alone token by token: the same bits.
#[test]
fn drawn_models_have_the_same_bits_in_chunks_and_beside_others() {
    for name in CHUNKED {
        let mut runner = load_on_cpu(name, Precision::Exact, KvDType::F32);
        let mut harness = Harness::new(&mut runner, 8);
        let cases = cases(name);
        let mut left: Vec<usize> = cases.iter().map(|case| case.ids().len()).collect();
        for case in &cases {
            harness.add(case.ids(), case.prompt_ids.len());
        }
        while left.iter().any(|n| *n > 0) {
            let work: Vec<_> = left.iter().enumerate().filter(|(_, n)| **n > 0).map(|(i, n)| (i, (*n).min(3 + 4 * i))).collect();
            harness.step(&work);
            for (i, n) in work {
                left[i] -= n;
            }
        }
        for (i, case) in cases.iter().enumerate() {
            let beside = harness.finish(i, 1);
            case.check(&beside, EXACT, &format!("{name} in a batch"));
            let alone = harness.add(case.ids(), case.prompt_ids.len());
            assert!(beside == harness.finish(alone, 1), "{name}: a batch changes bits");
        }
    }
}

/// The short prompt of each, in the emulation.
#[test]
fn cuda_backend_agrees_with_drawn_goldens() {
    let waiting = Mutex::new(ON_CUDA.iter());
    let next = || waiting.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(name) = next() {
                    let (_folder, source) = drawn::model(name);
                    let backend = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
                    let mut runner = load(&source, Arc::new(backend), Precision::Exact, KvDType::F32);
                    check_cases(&mut runner, name, [cases(name).swap_remove(0)], 7, EXACT);
                }
            });
        }
    });
}

#[test]
fn a_context_is_as_long_as_its_table_of_positions() {
    for (name, key, rows) in [("gpt2", "n_positions", [512, 513]), ("opt", "max_position_embeddings", [514, 515])] {
        let (folder, source) = drawn::model(name);
        let path = folder.path().join("config.json");
        let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        json[key] = 513.into();
        std::fs::write(&path, json.to_string()).unwrap();
        let error = Engine::load(&source, &EngineConfig::default(), &|_| ()).err().unwrap().to_string();
        let [there, asked] = rows;
        assert!(error.contains(&format!("has shape [{there}, 48]; the configuration asks for [{asked}, 48]")), "{name}: {error}");
    }
}

#[test]
fn the_plan_of_drawn_models_is_what_is_loaded() {
    let mut config = EngineConfig { max_num_seqs: 2, max_num_batched_tokens: 64, ..EngineConfig::default() };
    config.paged_attention.mem_gpu = Some(MemoryGpuConfig::ContextSize(100));
    for name in names() {
        let (_folder, source) = drawn::model(&name);
        let plan = Engine::memory_plan(&source, &config, None).unwrap();
        let engine = Engine::load(&source, &config, &|_| ()).unwrap();
        let (planned, loaded) = (plan.devices[0], engine.memory_ledger().devices[0]);
        assert_eq!(planned.weights, engine.weight_bytes(), "{name}");
        assert_eq!(planned.kv_cache, engine.kv_cache_bytes(), "{name}");
        assert_eq!(planned.resident(), loaded.resident(), "{name}");
    }
}
