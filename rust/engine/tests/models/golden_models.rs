//! Tiny models against the outputs of transformers (tests/data/golden).

use std::{
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use device::{
    Backend, KvDType, Precision,
    cpu::{CpuBackend, Isa, ReferenceBackend},
    cuda::{CudaBackend, Driver, LibraryPaths, NvidiaDriver},
};
use engine::{ModelSource, model_runner::ModelRunner};
use kernel_tests::{EmulatedDriver, Order};
use safetensors::{Dtype, SafeTensors};

use crate::common::{
    self, Harness,
    cases::{BF16, Case, EXACT, Tolerance, cases_of, check_cases},
    gguf,
    gguf_writer::{Gguf, STRING, U32, string},
    golden_dir, hugging_face, load, log_softmax,
};

const HF: [&str; 9] = ["llama", "llama3-rope", "mistral", "mistral-window", "phi3", "phi3-longrope", "qwen2", "qwen3", "gemma3"];
const GGUF: [&str; 5] = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"];
/// Families and variants that share most of their path with the models above, and are tried in fewer ways.
const MORE_HF: [&str; 16] = [
    "gemma",
    "gemma2",
    "starcoder2",
    "phi2",
    "phi2-qknorm",
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
    "llama-yarn",
];
const MORE_GGUF: [&str; 10] =
    ["gemma2", "starcoder2", "phi2", "stablelm", "olmo2", "smollm3", "glm4", "granite", "ministral3", "hunyuan-dense"];
/// Mixtures of experts. Where two experts are nearly tied, the smallest difference flips them, so they are compared exactly.
const MIXTURES_HF: [&str; 25] = [
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "granitemoe",
    "phimoe",
    "glm4-moe",
    "hunyuan-moe",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "llama4-text",
    "llama4-text-8k",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v2-group",
    "deepseek-v3",
    "deepseek-v3-yarn",
    "glm4-moe-lite",
    "lfm2",
    "lfm2-moe",
    "granitemoehybrid",
    "granitemoehybrid-attn",
    "granitemoehybrid-dense",
    "qwen3-next",
    "qwen3_5",
    "qwen3_5-moe",
];
/// Recurrent layers of each kind, without mixtures of experts beside them.
const RECURRENT: [&str; 3] = ["lfm2", "granitemoehybrid-dense", "qwen3_5"];
const MIXTURES_GGUF: [&str; 15] = [
    "mixtral",
    "qwen3-moe",
    "granitemoe",
    "phimoe",
    "glm4-moe",
    "hunyuan-moe",
    "gpt-oss-mxfp4",
    "llama4-text-8k",
    "deepseek-v2-lite",
    "deepseek-v3-yarn",
    "lfm2",
    "lfm2-moe",
    "granitemoehybrid",
    "qwen3-next",
    "qwen3_5-moe",
];

fn cases(name: &str) -> Vec<Case> {
    cases_in(&golden_dir().join("text").join(name))
}

fn cases_in(folder: &Path) -> Vec<Case> {
    cases_of(&folder.join("golden.json"))
}

fn models() -> Vec<(&'static str, ModelSource)> {
    HF.iter().map(|name| (*name, hugging_face(name))).chain(GGUF.iter().map(|name| (*name, gguf(name)))).collect()
}

fn more_models() -> impl Iterator<Item = (&'static str, ModelSource)> {
    MORE_HF.iter().map(|name| (*name, hugging_face(name))).chain(MORE_GGUF.iter().map(|name| (*name, gguf(name))))
}

fn check_alone(runner: &mut ModelRunner, name: &str, chunk: usize, tolerance: Tolerance) {
    check_cases(runner, name, cases(name), chunk, tolerance);
}

/// Logits are the same bits, whole, in chunks and token by token.
fn check_chunkings(name: &str, precision: Precision) {
    let mut runner = load(&hugging_face(name), cpu(Isa::detect(), 2), precision, KvDType::F32);
    let mut harness = Harness::new(&mut runner, 16);
    let case = cases(name).swap_remove(1);
    let [whole, chunks, single] = [common::MAX_TOKENS, 17, 1].map(|chunk| {
        let sequence = harness.add(case.ids(), case.prompt_ids.len());
        harness.finish(sequence, chunk)
    });
    assert!(whole == chunks && whole == single, "{name}: chunks change bits");
}

fn cpu(isa: Isa, threads: usize) -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(isa, threads).unwrap())
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect())
}

#[test]
fn reference_backend_agrees_with_goldens() {
    for (name, source) in models() {
        let mut runner = load(&source, Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
        check_alone(&mut runner, name, common::MAX_TOKENS, EXACT);
    }
}

#[test]
fn reference_backend_agrees_with_goldens_in_chunks() {
    for (name, source) in models() {
        let mut runner = load(&source, Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
        check_alone(&mut runner, name, 1, EXACT);
        check_alone(&mut runner, name, 7, EXACT);
    }
}

#[test]
fn cpu_backend_agrees_with_goldens_on_every_isa() {
    for isa in isas() {
        for (name, source) in models() {
            let mut runner = load(&source, cpu(isa, 2), Precision::Exact, KvDType::F32);
            for chunk in [common::MAX_TOKENS, 1, 7] {
                check_alone(&mut runner, name, chunk, EXACT);
            }
        }
    }
}

#[test]
fn cpu_backend_agrees_with_goldens_with_16_bit_kv() {
    for kv_dtype in [KvDType::BF16, KvDType::F16] {
        for (name, source) in models() {
            let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Fast, kv_dtype);
            check_alone(&mut runner, name, common::MAX_TOKENS, BF16);
            check_alone(&mut runner, name, 7, BF16);
        }
    }
}

#[test]
fn more_families_agree_with_goldens_on_the_best_isa() {
    for (name, source) in more_models() {
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, KvDType::F32);
        for chunk in [common::MAX_TOKENS, 7] {
            check_alone(&mut runner, name, chunk, EXACT);
        }
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Fast, KvDType::F16);
        check_alone(&mut runner, name, 17, BF16);
    }
}

/// Checkpoints of the hub in each format that is read, against floats of the same values.
#[test]
fn the_hubs_quantized_checkpoints_agree_with_goldens() {
    let mut folders: Vec<_> = golden_dir().join("quant").read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 7);
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let source = ModelSource::HuggingFace { path: folder.clone(), tokenizer_json: None };
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, KvDType::F32);
        check_cases(&mut runner, &name, cases_in(&folder), 7, EXACT);
        // Where two experts are nearly tied, the smallest difference flips them.
        if !name.starts_with("moe") {
            let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Fast, KvDType::F16);
            check_cases(&mut runner, &name, cases_in(&folder), 17, BF16);
        }
    }
}

/// What PyTorch saved, zipped and in the older way; what Meta published; what llama.cpp read before GGUF.
#[test]
fn older_containers_agree_with_goldens() {
    let dir = golden_dir().join("containers");
    for name in ["llama-bin-sharded", "llama-meta"] {
        let source = ModelSource::HuggingFace { path: dir.join(name), tokenizer_json: None };
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, KvDType::F32);
        check_cases(&mut runner, name, cases_in(&dir.join(name)), 7, EXACT);
    }
    for (name, gqa) in [("llama-q4_0", 1), ("llama-q5_1", 1), ("llama-q8_0", 1), ("llama-gqa2-f16", 2)] {
        let file = dir.join(format!("ggml/{name}.bin"));
        let source = ModelSource::Ggml { file, gqa, tokenizer_dir: None, tokenizer_json: None };
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, KvDType::F32);
        check_cases(&mut runner, name, cases_of(&dir.join(format!("ggml/{name}.golden.json"))), 7, EXACT);
    }
}

/// Of llama.cpp's quantizer: each is a mixture of several types.
#[test]
fn quantized_files_agree_with_goldens_on_every_isa() {
    for name in ["IQ1_S", "IQ3_XXS"] {
        let folder = golden_dir().join("gguf-quant").join(name);
        let files = vec![folder.join(format!("llama-{name}.gguf"))];
        let source = ModelSource::Gguf { files, tokenizer_dir: None, tokenizer_json: None };
        for isa in isas() {
            let mut runner = load(&source, cpu(isa, 2), Precision::Exact, KvDType::F32);
            check_cases(&mut runner, name, cases_in(&folder), 7, EXACT);
            let mut runner = load(&source, cpu(isa, 2), Precision::Fast, KvDType::F16);
            check_cases(&mut runner, name, cases_in(&folder), 17, BF16);
        }
    }
}

#[test]
fn mixtures_of_experts_agree_with_goldens() {
    let models = MIXTURES_HF.iter().map(|name| (*name, hugging_face(name)));
    for (name, source) in models.chain(MIXTURES_GGUF.iter().map(|name| (*name, gguf(name)))) {
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, KvDType::F32);
        for chunk in [common::MAX_TOKENS, 7] {
            check_alone(&mut runner, name, chunk, EXACT);
        }
    }
}

#[test]
fn mixtures_of_experts_have_the_same_bits_in_any_chunks() {
    for name in MIXTURES_HF {
        for precision in [Precision::Exact, Precision::Deterministic] {
            check_chunkings(name, precision);
        }
    }
}

#[test]
fn more_families_agree_with_goldens_on_the_reference_backend() {
    for name in MORE_HF.into_iter().chain(MIXTURES_HF) {
        let mut runner = load(&hugging_face(name), Arc::new(ReferenceBackend::new()), Precision::Exact, KvDType::F32);
        check_alone(&mut runner, name, 23, EXACT);
    }
}

/// With exact precision a token's logits do not depend on what is computed beside it, to the bit.
#[test]
fn exact_logits_of_more_families_are_the_same_bits_in_every_chunking() {
    for name in MORE_HF {
        check_chunkings(name, Precision::Exact);
    }
}

/// The shortest prompt of each, in the emulation: names in two threads.
fn check_on_cuda(names: &[&str]) {
    let check = |name: &str| {
        let backend = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
        let mut runner = load(&hugging_face(name), Arc::new(backend), Precision::Exact, KvDType::F32);
        check_cases(&mut runner, name, [cases(name).swap_remove(0)], 7, EXACT);
    };
    let (even, odd): (Vec<_>, Vec<_>) = names.iter().enumerate().partition(|(i, _)| i % 2 == 0);
    thread::scope(|scope| {
        for half in [even, odd] {
            scope.spawn(move || {
                for (_, name) in half {
                    check(name);
                }
            });
        }
    });
}

/// As below.
#[test]
#[ignore = "half a minute; make test-long"]
fn cuda_backend_agrees_with_goldens_of_more_families() {
    check_on_cuda(&MORE_HF);
}

/// Clamped activations and biases in MXFP4; a shared expert with a weight.
#[test]
#[ignore = "models in the emulation; make test-long"]
fn cuda_backend_agrees_with_goldens_of_mixtures_of_experts() {
    check_on_cuda(&["gpt-oss-mxfp4", "qwen2-moe"]);
}

#[test]
#[ignore = "a minute; make test-long"]
fn cuda_backend_agrees_with_goldens_of_all_mixtures_of_experts() {
    check_on_cuda(&MIXTURES_HF[..11]);
}

/// Weights that are packed for tensor cores, beside others, in products of one row and of a whole prompt's, up to 32 at once.
#[test]
#[ignore = "models in the emulation; make test-long"]
fn cuda_backend_agrees_with_goldens_of_quantized_files() {
    let dir = golden_dir();
    let ggml = |name: &str| {
        let file = dir.join(format!("containers/ggml/{name}.bin"));
        let cases = cases_of(&dir.join(format!("containers/ggml/{name}.golden.json")));
        (ModelSource::Ggml { file, gqa: 1, tokenizer_dir: None, tokenizer_json: None }, cases)
    };
    let gguf = |name: &str| {
        let folder = dir.join("gguf-quant").join(name);
        let files = vec![folder.join(format!("llama-{name}.gguf"))];
        (ModelSource::Gguf { files, tokenizer_dir: None, tokenizer_json: None }, cases_in(&folder))
    };
    let check = |(source, cases): (ModelSource, Vec<Case>), precision, chunk| {
        let backend = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
        let mut runner = load(&source, Arc::new(backend), precision, KvDType::F32);
        check_cases(&mut runner, &format!("{source:?}"), cases.into_iter().take(1), chunk, BF16);
    };
    check(ggml("llama-q4_0"), Precision::Fast, 1);
    check(ggml("llama-q4_0"), Precision::Deterministic, common::MAX_TOKENS);
    for quantized in [ggml("llama-q8_0"), gguf("IQ1_S"), gguf("IQ3_XXS")] {
        check(quantized, Precision::Fast, 17);
    }
}

/// The kernels' real source, compiled for the CPU: some hundred times slower than the CPU's own, so a prompt or two a model. The
/// short one is longer than windows; other rotations begin within the long one.
#[test]
#[ignore = "models in the emulation; make test-long"]
fn cuda_backend_agrees_with_goldens() {
    let check = |index: usize, name: &str, source: &ModelSource| {
        let backend = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
        let mut runner = load(source, Arc::new(backend), Precision::Exact, KvDType::F32);
        let [tiny, short, long, _] = <[Case; 4]>::try_from(cases(name)).ok().expect("four cases");
        if index < HF.len() {
            let whole = if name == "phi3-longrope" { long } else { short };
            check_cases(&mut runner, name, [whole], common::MAX_TOKENS, EXACT);
        }
        let mut harness = Harness::new(&mut runner, 16);
        let [chunks, whole] = [7, common::MAX_TOKENS].map(|chunk| {
            let sequence = harness.add(tiny.ids(), tiny.prompt_ids.len());
            harness.finish(sequence, chunk)
        });
        tiny.check(&chunks, EXACT, &format!("{name} in chunks of 7"));
        assert!(whole == chunks, "{name}: chunks change bits");
    };
    let waiting = Mutex::new(models().into_iter().enumerate());
    let next = || waiting.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((index, (name, source))) = next() {
                    check(index, name, &source);
                }
            });
        }
    });
}

/// The shortest prompt in chunks, and with short convolutions as a whole with the same bits: the other kinds' kernels are asked
/// for those by their own tests.
#[test]
#[ignore = "models in the emulation; make test-long"]
fn cuda_backend_agrees_with_goldens_of_recurrent_layers() {
    thread::scope(|scope| {
        for name in RECURRENT {
            scope.spawn(move || {
                let backend = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
                let mut runner = load(&hugging_face(name), Arc::new(backend), Precision::Exact, KvDType::F32);
                let tiny = cases(name).swap_remove(0);
                let mut harness = Harness::new(&mut runner, 16);
                let mut finish = |chunk| {
                    let sequence = harness.add(tiny.ids(), tiny.prompt_ids.len());
                    harness.finish(sequence, chunk)
                };
                let chunks = finish(7);
                tiny.check(&chunks, EXACT, &format!("{name} in chunks of 7"));
                assert!(name != "lfm2" || finish(common::MAX_TOKENS) == chunks, "{name}: chunks change bits");
            });
        }
    });
}

#[test]
#[ignore = "half a minute; make test-long"]
fn cuda_backend_agrees_with_goldens_of_recurrent_layers_beside_mixtures_of_experts() {
    check_on_cuda(&["lfm2-moe", "granitemoehybrid", "granitemoehybrid-attn", "qwen3-next", "qwen3_5-moe"]);
}

/// Requests in step, token by token, so that every step is a CUDA graph: of more rows than kernels of our own take, whose
/// activations are rounded to the weights' BF16 and multiplied as matrices; and of twelve and fewer, once the shortest have
/// ended.
fn check_products_in_graphs(driver: Arc<dyn Driver>) {
    driver.check_matmul().expect("LD_LIBRARY_PATH with the folder of libcublasLt.so.13");
    let backend = Arc::new(CudaBackend::new(driver).unwrap());
    let mut runner = load(&hugging_face("llama"), backend, Precision::Fast, KvDType::F32);
    let mut harness = Harness::new(&mut runner, 8);
    let [tiny, short, _, chat] = <[Case; 4]>::try_from(cases("llama")).ok().expect("four cases");
    let long = [&tiny, &short, &chat].into_iter().cycle().take(12);
    let cases: Vec<&Case> = long.chain(std::iter::repeat_n(&tiny, 22)).collect();
    for case in &cases {
        harness.add(case.ids(), case.prompt_ids.len());
    }
    for computed in 0..chat.ids().len() {
        let left: Vec<_> = (0..cases.len()).filter(|i| computed < cases[*i].ids().len()).collect();
        // Shorter requests end together, and those that are left go on in fewer rows.
        harness.step(&left.into_iter().map(|i| (i, 1)).collect::<Vec<_>>());
    }
    for (i, case) in cases.iter().enumerate() {
        case.check(&harness.finish(i, 1), BF16, &format!("request {i}"));
    }
}

#[test]
#[ignore = "models in the emulation; make test-long"]
fn cuda_backend_agrees_with_goldens_in_graphs_of_products_of_bf16() {
    let driver = Arc::new(EmulatedDriver::new(Order::Ascending));
    check_products_in_graphs(Arc::<EmulatedDriver>::clone(&driver));
    assert!(driver.num_matmuls() > 100, "{} products of matrices", driver.num_matmuls());
}

#[test]
#[ignore = "needs a GPU; make test-gpu"]
fn cuda_backend_agrees_with_goldens_on_a_gpu() {
    let driver: Arc<dyn Driver> = Arc::new(NvidiaDriver::new(0, &LibraryPaths::default()).unwrap());
    check_products_in_graphs(Arc::clone(&driver));
    let backend: Arc<dyn Backend> = Arc::new(CudaBackend::new(driver).unwrap());
    for (name, source) in models().into_iter().chain(RECURRENT.map(|name| (name, hugging_face(name)))) {
        let mut runner = load(&source, Arc::clone(&backend), Precision::Exact, KvDType::F32);
        for chunk in [common::MAX_TOKENS, 1, 7] {
            check_alone(&mut runner, name, chunk, EXACT);
        }
    }
}

#[test]
fn cpu_backend_agrees_with_the_reference_with_one_byte_kv() {
    for kv_dtype in [KvDType::Int8, KvDType::F8E4M3] {
        for (name, source) in models() {
            let logits_on = |backend| {
                let mut runner = load(&source, backend, Precision::Exact, kv_dtype);
                let mut harness = Harness::new(&mut runner, 8);
                let case = &cases(name)[0];
                let sequence = harness.add(case.ids(), case.prompt_ids.len());
                harness.finish(sequence, 7)
            };
            let (want, got) = (logits_on(Arc::new(ReferenceBackend::new())), logits_on(cpu(Isa::detect(), 2)));
            for (want, got) in want.iter().zip(&got) {
                for (want, got) in log_softmax(want).into_iter().zip(log_softmax(got)) {
                    // A last bit of f32 that differs may go to the next code.
                    assert!((want - got).abs() < 0.05, "{name} {kv_dtype:?}: {got}, the reference says {want}");
                }
            }
        }
    }
}

/// All four requests of a model share their steps: decodes beside prefill chunks, ends at different times, blocks of 8.
#[test]
fn requests_in_one_batch_agree_with_goldens() {
    for (name, source) in models() {
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, KvDType::F32);
        let mut harness = Harness::new(&mut runner, 8);
        let cases = cases(name);
        let chunks = [1, 5, 64, 9];
        let mut left: Vec<usize> = cases.iter().map(|case| case.ids().len()).collect();
        for case in &cases {
            harness.add(case.ids(), case.prompt_ids.len());
        }
        while left.iter().any(|n| *n > 0) {
            let work: Vec<_> = (0..cases.len()).map(|i| (i, left[i].min(chunks[i]))).filter(|(_, n)| *n > 0).collect();
            harness.step(&work);
            for (i, n) in work {
                left[i] -= n;
            }
        }
        for (i, case) in cases.iter().enumerate() {
            case.check(&harness.finish(i, 1), EXACT, &format!("{name} in a batch"));
        }
    }
}

/// With exact precision a token's logits do not depend on what is computed beside it, to the bit.
#[test]
fn exact_logits_are_the_same_bits_in_every_chunking() {
    let cached = KvDType::ALL.into_iter().flat_map(|kv_dtype| models().into_iter().map(move |model| (kv_dtype, model)));
    for (kv_dtype, (name, source)) in cached.filter(|(kv_dtype, (name, _))| *kv_dtype == KvDType::F32 || *name == "gemma3") {
        let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, kv_dtype);
        let mut harness = Harness::new(&mut runner, 16);
        for case in cases(name) {
            let mut logits_in = |chunk| {
                let sequence = harness.add(case.ids(), case.prompt_ids.len());
                harness.finish(sequence, chunk)
            };
            let whole = logits_in(common::MAX_TOKENS);
            for chunk in [1, 17] {
                assert!(
                    whole == logits_in(chunk),
                    "{name}, {kv_dtype:?}, prompt of {}: chunks of {chunk} change bits",
                    case.prompt_ids.len()
                );
            }
        }
    }
}

/// Quantized weights, float ones and windowed layers: a token's logits are the same bits in every chunking, beside others, with
/// every type of KV, on any number of threads.
#[test]
fn deterministic_logits_are_the_same_bits_in_every_way() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("phi3.gguf");
    write_phi3_gguf(&path, true);
    let quantized = ModelSource::Gguf { files: vec![path], tokenizer_dir: None, tokenizer_json: None };
    let sources = [
        ("llama", hugging_face("llama")),
        ("mistral", gguf("mistral")),
        ("gemma3", hugging_face("gemma3")),
        ("phi3-longrope", quantized),
    ];
    for (kv_dtype, (name, source)) in KvDType::ALL.into_iter().flat_map(|kv_dtype| sources.iter().map(move |s| (kv_dtype, s))) {
        let cases = cases(name);
        let mut whole: Vec<Vec<Vec<f32>>> = Vec::new();
        for threads in [1, 3] {
            let mut runner = load(source, cpu(Isa::detect(), threads), Precision::Deterministic, kv_dtype);
            for (block_size, chunk) in [(16, common::MAX_TOKENS), (8, 1), (32, 23)] {
                let mut harness = Harness::new(&mut runner, block_size);
                for (i, case) in cases.iter().enumerate() {
                    // A stranger's tokens in the same steps.
                    let stranger = harness.add(cases[(i + 1) % cases.len()].ids(), 1);
                    let sequence = harness.add(case.ids(), case.prompt_ids.len());
                    harness.step(&[(stranger, 1), (sequence, chunk.min(case.ids().len()))]);
                    let logits = harness.finish(sequence, chunk);
                    harness.finish(stranger, common::MAX_TOKENS);
                    let bits = |logits: &[Vec<f32>]| -> Vec<u32> { logits.iter().flatten().map(|x| x.to_bits()).collect() };
                    match whole.get(i) {
                        None => whole.push(logits),
                        Some(whole) => {
                            let same = bits(whole) == bits(&logits);
                            assert!(same, "{name} {kv_dtype:?}, case {i}, chunks of {chunk}, {threads} threads: other bits");
                        }
                    }
                }
            }
        }
    }
}

/// Rows of bfloat16 as Q8_0 blocks: 32 codes and their f16 scale.
fn q8_0(bf16: &[u8]) -> Vec<u8> {
    let values: Vec<f32> =
        bf16.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect();
    let mut bytes = Vec::new();
    for block in values.chunks_exact(32) {
        let scale = block.iter().fold(0.0f32, |a, b| a.max(b.abs())) / 127.0;
        bytes.extend(half::f16::from_f32(scale).to_le_bytes());
        bytes.extend(block.iter().map(|x| (x / scale.max(1e-30)).round() as i8 as u8));
    }
    bytes
}

/// The golden phi3-longrope model as llama.cpp's converter writes it: fused projections under its names, factors as tensors; with
/// its matrices quantized if asked to.
fn write_phi3_gguf(path: &Path, quantized: bool) {
    const LAYER: [(&str, &str); 6] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let folder = golden_dir().join("text/phi3-longrope");
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut file = Gguf::new().entry("general.architecture", STRING, &string("phi3"));
    for (key, value) in [
        ("context_length", 256),
        ("rope.scaling.original_context_length", 64),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("block_count", 3),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 16),
    ] {
        file = file.entry(&format!("phi3.{key}"), U32, &u32::to_le_bytes(value));
    }
    let attention_factor = (1.0 + 4_f32.ln() / 64_f32.ln()).sqrt();
    for (key, value) in
        [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 10_000.0), ("rope.scaling.attn_factor", attention_factor)]
    {
        file = file.entry(&format!("phi3.{key}"), 6, &f32::to_le_bytes(value));
    }
    for (key, name) in [("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")] {
        let factors: Vec<f32> = serde_json::from_value(config["rope_scaling"][key].clone()).unwrap();
        let bytes: Vec<u8> = factors.iter().flat_map(|f| f.to_le_bytes()).collect();
        file = file.weight(name, &[8], 0, &bytes);
    }
    let globals = [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
    let mut names: Vec<_> = globals.iter().map(|(hf, gguf)| ((*hf).to_owned(), (*gguf).to_owned())).collect();
    for i in 0..3 {
        names.extend(LAYER.map(|(hf, gguf)| (format!("model.layers.{i}.{hf}"), format!("blk.{i}.{gguf}"))));
    }
    for (hf, gguf) in names {
        let tensor = tensors.tensor(&format!("{hf}.weight")).unwrap();
        assert_eq!(tensor.dtype(), Dtype::BF16);
        let dims: Vec<u64> = tensor.shape().iter().rev().map(|n| *n as u64).collect();
        file = if quantized && dims.len() == 2 {
            file.weight(&format!("{gguf}.weight"), &dims, 8, &q8_0(tensor.data()))
        } else {
            file.weight(&format!("{gguf}.weight"), &dims, 30, tensor.data())
        };
    }
    file.write(path);
}

#[test]
fn a_phi3_gguf_with_fused_weights_and_longrope_agrees_with_goldens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("phi3.gguf");
    write_phi3_gguf(&path, false);
    let source = ModelSource::Gguf { files: vec![path], tokenizer_dir: None, tokenizer_json: None };
    let mut runner = load(&source, cpu(Isa::detect(), 2), Precision::Exact, KvDType::F32);
    for chunk in [common::MAX_TOKENS, 7] {
        check_alone(&mut runner, "phi3-longrope", chunk, EXACT);
    }
}

/// The shortest prompt, whose rows have the same bits in any chunks.
fn check_latent_on_cuda(name: &str) {
    let backend = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
    let mut runner = load(&hugging_face(name), Arc::new(backend), Precision::Exact, KvDType::F32);
    let mut harness = Harness::new(&mut runner, 16);
    let case = cases(name).swap_remove(0);
    let [chunks, whole] = [7, common::MAX_TOKENS].map(|chunk| {
        let sequence = harness.add(case.ids(), case.prompt_ids.len());
        harness.finish(sequence, chunk)
    });
    case.check(&chunks, EXACT, &format!("{name} in chunks of 7"));
    assert!(whole == chunks, "{name}: chunks change bits");
}

#[test]
#[ignore = "models in the emulation; make test-long"]
fn cuda_backend_agrees_with_a_golden_of_latent_attention() {
    check_latent_on_cuda("deepseek-v2-lite");
}

#[test]
#[ignore = "half a minute; make test-long"]
fn cuda_backend_agrees_with_goldens_of_latent_attention() {
    for name in MIXTURES_HF.iter().filter(|name| name.starts_with("deepseek") || name.ends_with("lite")) {
        check_latent_on_cuda(name);
    }
}
