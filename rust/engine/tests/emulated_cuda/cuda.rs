//! Whole engines on a GPU whose kernels run on the CPU.

use std::{sync::Arc, time::Duration};

use device::{
    Backend,
    cuda::{CudaBackend, CudaError},
};
use engine::{
    Completion, CompletionChoice, EmbeddingInput, EmbeddingOptions, EmbeddingRequest, Engine, EngineConfig, EngineError,
    FinishReason, GenerationRequest, KvTierConfig, MemoryGpuConfig, ModelDType, ModelSource, OutputEvent, PagedAttentionConfig,
    Pooling, Prompt, RequestStream, RerankRequest, SamplingParams,
};
use kernel_tests::{EmulatedDriver, Order};

use crate::{
    MIB,
    common::{
        self, gguf, hugging_face,
        serving::{exact, greedy, pool_of, prompt, request, run, run_together, start, stats, tokens},
    },
    used,
};

/// A GPU with so much memory, too little for what is reserved for graphs.
fn gpu(total_bytes: u64) -> Arc<dyn Backend> {
    crate::gpu(total_bytes, false).0
}

fn refusal(model: &str, config: &EngineConfig, total_bytes: u64) -> String {
    let Err(error) = Engine::load_onto(&gpu(total_bytes), &hugging_face(model), config, &|_| {}) else {
        panic!("{model} was loaded");
    };
    error.to_string()
}

fn small() -> EngineConfig {
    EngineConfig { max_num_batched_tokens: 16, max_num_seqs: 3, ..exact() }
}

/// Chunks of prompts beside answers, preempted requests, and shared prefixes.
#[test]
fn requests_get_the_tokens_that_the_processor_gives_them() {
    let config = EngineConfig { paged_attention: pool_of(72, 8), ..small() };
    let requests = || -> Vec<GenerationRequest> {
        let tails = (0..3).map(|i| [prompt(0, 16), prompt(i + 1, 6)].concat());
        tails.map(|ids| GenerationRequest { prompt: Prompt::TokenIds(ids), ..request(0, 0, 14) }).collect()
    };
    let expected = run_together(&start("llama", &config), requests());
    let engine = Engine::load_onto(&gpu(64 * MIB), &hugging_face("llama"), &config, &|_| {}).unwrap();
    assert!(engine.description()[0].contains("on cuda (emulated"), "{:?}", engine.description());
    assert_eq!(run_together(&engine, requests()), expected);
    assert!(stats(&engine).preemptions > 0, "the pool of 9 blocks held three requests of 36 tokens");
    let again = engine.submit(requests().remove(1)).unwrap().wait().unwrap();
    assert_eq!((tokens(&again), again.usage.cached_tokens >= 16), (expected[1].clone(), true));
}

#[test]
fn quantized_weights_are_uploaded_as_they_are_stored() {
    let config = EngineConfig { dtype: ModelDType::Auto, ..small() };
    let backend = gpu(64 * MIB);
    let engine = Engine::load_onto(&backend, &gguf("qwen3"), &config, &|_| {}).unwrap();
    let expected = run(&start("qwen3.gguf", &EngineConfig { dtype: ModelDType::F32, ..config }), request(1, 9, 4));
    assert_eq!(run(&engine, request(1, 9, 4)), expected, "weights and activations are not rounded");
    let kv = engine.description().iter().any(|line| line.contains("KV cache type is F32"));
    assert!(kv, "heads of 32 elements have kernels for no other type: {:?}", engine.description());
}

#[test]
fn what_a_gpu_cannot_do_is_refused_by_name() {
    let refused = |config: &EngineConfig| refusal("llama", config, 64 * MIB);
    let text = refused(&EngineConfig { dtype: ModelDType::BF16, ..small() });
    for part in ["heads of 16 elements", "bf16", "128", "pa_cache_type=PagedCacheType.F32"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Cold, from the prefix cache, alone, beside others, in chunks, and computed again after a preemption.
#[test]
fn deterministic_answers_have_the_same_bits_whatever_runs_beside_them() {
    let config = |pool, max_num_batched_tokens| EngineConfig {
        deterministic: true,
        dtype: ModelDType::Auto,
        max_num_batched_tokens,
        paged_attention: pool_of(pool, 8),
        ..small()
    };
    let asked = |i: usize| {
        let sampling = SamplingParams { temperature: Some(1.0), logprobs: Some(1), ..greedy(14) };
        GenerationRequest { prompt: Prompt::TokenIds([prompt(0, 16), prompt(i + 1, 6)].concat()), sampling, ..request(0, 0, 14) }
    };
    let engine =
        |pool, tokens| Engine::load_onto(&gpu(64 * MIB), &hugging_face("llama"), &config(pool, tokens), &|_| {}).unwrap();
    let bits = |completion: &engine::Completion| -> Vec<(u32, u32)> {
        let logprobs = completion.choices[0].logprobs.as_ref().expect("log probabilities");
        logprobs.iter().map(|token| (token.token_id, token.logprob.expect("of every token").to_bits())).collect()
    };
    // Alone, its prompt in one chunk; the others find its beginning in the prefix cache, and so does it the second time.
    let alone = engine(300, 64);
    let answer = |i| alone.submit(asked(i)).unwrap().wait().unwrap();
    let expected: Vec<_> = (0..3).map(|i| bits(&answer(i))).collect();
    let again = answer(0);
    assert!(again.usage.cached_tokens >= 16);
    assert_eq!(bits(&again), expected[0], "from the prefix cache");
    for (pool, tokens) in [(300, 16), (72, 7)] {
        let engine = engine(pool, tokens);
        let streams: Vec<_> = (0..3).map(|i| engine.submit(asked(i)).unwrap()).collect();
        let together: Vec<_> = streams.into_iter().map(|stream| bits(&stream.wait().unwrap())).collect();
        assert_eq!(together, expected, "a pool of {pool} tokens, {tokens} tokens a step");
        assert_eq!(stats(&engine).preemptions > 0, pool == 72, "{:?}", stats(&engine));
    }
}

#[test]
fn the_pool_is_sized_by_the_memory_of_the_card() {
    let config = |mem_gpu| EngineConfig { paged_attention: PagedAttentionConfig { mem_gpu, ..Default::default() }, ..small() };
    for (mem_gpu, fraction) in [(None, 0.9), (Some(MemoryGpuConfig::Utilization(0.5)), 0.5)] {
        let backend = gpu(16 * MIB);
        let engine = Engine::load_onto(&backend, &hugging_face("llama"), &config(mem_gpu), &|_| {}).unwrap();
        let plan = engine.memory_ledger();
        let card = plan.devices[0];
        assert_eq!((card.device_total, card.tokenizer, card.is_host), (16 * MIB, 0, false));
        let limit = (16.0 * MIB as f64 * fraction) as u64;
        let full = card.resident() + card.margin;
        assert!(full <= limit + plan.bytes_per_block && full + 2 * plan.bytes_per_block > limit, "{plan}");
        // Of what is planned, workspaces and rope tables are taken with the first step.
        let loaded = used(&*backend);
        let table = (2 * 2 * engine.context_length() * 16) as u64;
        assert!(
            loaded <= card.resident() && loaded + card.workspaces + table + card.margin >= card.resident(),
            "{loaded}: {plan}"
        );
        run(&engine, request(1, 40, 2));
        assert!(used(&*backend) <= full, "{}: {plan}", used(&*backend));
    }
    let engine = Engine::load_onto(&gpu(16 * MIB), &hugging_face("llama"), &config(Some(MemoryGpuConfig::MbAmount(3))), &|_| {});
    let plan = engine.unwrap().memory_ledger().clone();
    assert_eq!(plan.num_blocks() as u64, 3 * MIB / plan.bytes_per_block);
}

#[test]
fn a_pool_beyond_the_card_is_refused_with_the_ledger() {
    let config = |mem_gpu| EngineConfig { paged_attention: PagedAttentionConfig { mem_gpu, ..Default::default() }, ..small() };
    let asked = [MemoryGpuConfig::MbAmount(16), MemoryGpuConfig::ContextSize(100_000), MemoryGpuConfig::Utilization(0.01)];
    for mem_gpu in asked {
        let text = refusal("llama", &config(Some(mem_gpu)), 16 * MIB);
        for part in ["of 16 MB, 16 MB are free", "weights", "activations", "workspaces", "margin"] {
            assert!(text.contains(part), "{mem_gpu:?}: {part} is not in: {text}");
        }
    }
    let text = refusal("llama", &config(None), MIB / 4);
    assert!(text.contains("Num GPU blocks is 0") && text.contains("weights"), "{text}");
}

/// Without an NVIDIA driver, or with one: never a panic, and `Auto` always finds a device.
#[test]
fn a_missing_gpu_is_an_error_that_says_what_would_work() {
    let load = |device| Engine::load(&hugging_face("llama"), &EngineConfig { device, ..small() }, &|_| {});
    let Err(EngineError::Device(error)) = load(engine::Device::Cuda(99)) else { panic!("there are no 100 GPUs") };
    let text = error.to_string();
    assert!(text.contains("device=\"cuda:99\" cannot be used") && text.contains("driver"), "{text}");
    let with_isa = EngineConfig { cpu: engine::CpuOptions { isa: Some("scalar".into()), num_threads: None }, ..small() };
    let with_isa = EngineConfig { device: engine::Device::Cuda(0), ..with_isa };
    let Err(error) = Engine::load(&hugging_face("llama"), &with_isa, &|_| {}) else { panic!("cpu_tier on a GPU") };
    assert!(error.to_string().contains("cpu_tier=\"scalar\""), "{error}");
    assert!(!run(&load(engine::Device::Auto).unwrap(), request(1, 9, 4)).is_empty());
}

fn after_first_token(stream: &RequestStream, then: impl FnOnce()) -> CompletionChoice {
    let mut collector = stream.collector();
    let mut then = Some(then);
    loop {
        let event = stream.next_timeout(Duration::from_secs(60)).unwrap().expect("an event in time");
        if let OutputEvent::Delta { .. } = &event
            && let Some(then) = then.take()
        {
            then();
        }
        if let Some(mut completion) = collector.push(event) {
            return completion.choices.remove(0);
        }
    }
}

#[test]
fn what_the_driver_refuses_in_a_step_ends_its_requests_with_their_text_and_no_others() {
    let driver = Arc::new(EmulatedDriver::new(Order::Ascending));
    let backend: Arc<dyn Backend> = Arc::new(CudaBackend::new(Arc::<EmulatedDriver>::clone(&driver)).unwrap());
    let config = EngineConfig { max_num_seqs: 1, paged_attention: pool_of(300, 8), ..small() };
    let engine = Engine::load_onto(&backend, &hugging_face("llama"), &config, &|_| {}).unwrap();
    let expected = run(&start("llama", &config), request(2, 5, 3));
    let code = || "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)".to_owned();
    let refused = [
        CudaError::OutOfMemory { needed_bytes: 4096, free_bytes: 1024 },
        CudaError::Driver { what: "starting kernel rms_norm".into(), code: "CUDA_ERROR_INVALID_VALUE".into() },
        CudaError::Lost { what: "copying from the GPU".into(), code: code() },
    ];
    for error in refused {
        let is_lost = matches!(error, CudaError::Lost { .. });
        let running = engine.submit(request(1, 5, 250)).unwrap();
        let waiting = engine.submit(request(2, 5, 3)).unwrap();
        let choice = after_first_token(&running, || driver.fail(error.clone()));
        assert_eq!((choice.finish_reason, choice.error), (FinishReason::Error, Some(error.to_string())));
        assert!(!choice.text.is_empty());
        let waiting = waiting.wait().unwrap();
        if is_lost {
            assert_eq!(waiting.choices[0].error, Some(error.to_string()));
        } else {
            assert_eq!(tokens(&waiting), expected);
        }
        assert_eq!((stats(&engine).blocks_used, stats(&engine).requests_waiting), (0, 0));
    }
    let Err(EngineError::DeviceLost(why)) = engine.submit(request(2, 5, 3)) else { panic!("a lost GPU took a request") };
    assert!(why.contains(&code()) && why.contains("start a new one"), "{why}");
}

#[test]
fn blocks_in_files_come_back_to_a_card() {
    let dir = tempfile::tempdir().unwrap();
    let kv_tier = Some(KvTierConfig::File { path: dir.path().to_owned(), max_bytes: 1 << 30 });
    let config = EngineConfig { paged_attention: pool_of(100, 8), kv_tier, ..small() };
    let answer = || {
        let engine = Engine::load_onto(&gpu(64 * MIB), &hugging_face("llama"), &config, &|_| {}).unwrap();
        engine.submit(request(1, 20, 4)).unwrap().wait().unwrap()
    };
    let (first, second) = (answer(), answer());
    assert_eq!((first.usage.cached_tokens, second.usage.cached_tokens), (0, 16));
    assert_eq!(tokens(&first), tokens(&second));
}

/// Tokens of a choice with their log probabilities, to the bit.
fn bits_of(choice: &CompletionChoice) -> Vec<(u32, u32)> {
    let logprobs = choice.logprobs.as_ref().expect("log probabilities");
    logprobs.iter().map(|token| (token.token_id, token.logprob.map_or(0, f32::to_bits))).collect()
}

fn with_states(model: &str, pool: usize, state_snapshot_bytes: u64) -> Engine {
    let snapshots = Some(state_snapshot_bytes);
    let config = EngineConfig { paged_attention: pool_of(pool, 8), state_snapshot_bytes: snapshots, ..small() };
    Engine::load_onto(&gpu(64 * MIB), &hugging_face(model), &config, &|_| {}).unwrap()
}

fn answer(engine: &Engine, request: GenerationRequest) -> Completion {
    engine.submit(request).unwrap().wait().unwrap()
}

/// A choice that forks, and a turn of a conversation that begins with a snapshot.
fn check_copied_states(model: &str) {
    let engine = with_states(model, 300, 4 * MIB);
    let plan = engine.memory_ledger();
    let card = plan.devices[0];
    assert!(card.states > 0 && card.state_snapshots > 0 && !card.is_host, "{plan}");
    let forked = answer(&engine, GenerationRequest { n_choices: 2, ..request(3, 12, 4) });
    let bits: Vec<_> = forked.choices.iter().map(bits_of).collect();
    assert!(bits[0] == bits[1], "{model}: {bits:?}");
    let turn = [&prompt(3, 12), &tokens(&forked)[..], &prompt(4, 3)].concat();
    let next = || GenerationRequest { prompt: Prompt::TokenIds(turn.clone()), ..request(0, 0, 3) };
    let (cached, cold) = (answer(&engine, next()), answer(&with_states(model, 300, 0), next()));
    // All but the last token of the answer, which was never computed.
    assert_eq!((cached.usage.cached_tokens, cold.usage.cached_tokens), (15, 0), "{model}");
    assert!(bits_of(&cached.choices[0]) == bits_of(&cold.choices[0]), "{model}: a snapshot changes bits");
}

#[test]
fn states_of_recurrent_layers_are_copied_on_the_card() {
    check_copied_states("lfm2");
}

#[test]
#[ignore = "a minute; make test-long"]
fn states_of_every_kind_are_copied_on_the_card_and_computed_again_after_a_preemption() {
    for model in ["lfm2", "granitemoehybrid-dense", "qwen3_5"] {
        check_copied_states(model);
        let requests = || (0..3).map(|i| request(i, 12, 14));
        let roomy = with_states(model, 300, 0);
        let alone: Vec<_> = requests().map(|request| bits_of(&answer(&roomy, request).choices[0])).collect();
        let tight = with_states(model, 56, 0);
        let streams: Vec<_> = requests().map(|request| tight.submit(request).unwrap()).collect();
        let together: Vec<_> = streams.into_iter().map(|stream| bits_of(&stream.wait().unwrap().choices[0])).collect();
        assert!(together == alone, "{model}: other bits beside others");
        assert!(stats(&tight).preemptions > 0, "{:?}", stats(&tight));
    }
}

#[test]
fn embeddings_are_those_of_the_processor() {
    let inputs = || (0..3).map(|i| EmbeddingInput::TokenIds(prompt(i, 5 * i + 1))).collect();
    let request = || EmbeddingRequest { inputs: inputs(), ..EmbeddingRequest::default() };
    let with =
        |pooling| EngineConfig { embedding: Some(EmbeddingOptions { pooling }), paged_attention: pool_of(72, 8), ..small() };
    for pooling in [Pooling::Mean, Pooling::Last] {
        let expected = start("llama", &with(Some(pooling))).embed(request()).unwrap();
        let engine = Engine::load_onto(&gpu(64 * MIB), &hugging_face("llama"), &with(Some(pooling)), &|_| {}).unwrap();
        for (vector, expected) in engine.embed(request()).unwrap().iter().zip(&expected) {
            assert!(vector.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "{pooling}: {vector:?} is not {expected:?}");
        }
    }
    let path = common::golden_dir().join("embed/embeddinggemma");
    let gemma = ModelSource::HuggingFace { path, tokenizer_json: None };
    let texts = ["Crabs", "a longer text about what lives on the shore", "it rained"];
    let request = || EmbeddingRequest {
        inputs: texts.map(|text| EmbeddingInput::Text(text.to_owned())).to_vec(),
        ..EmbeddingRequest::default()
    };
    let config = EngineConfig { max_num_batched_tokens: 64, ..with(None) };
    let expected = Engine::load(&gemma, &config, &|_| {}).unwrap().embed(request()).unwrap();
    let engine = Engine::load_onto(&gpu(64 * MIB), &gemma, &config, &|_| {}).unwrap();
    for (vector, expected) in engine.embed(request()).unwrap().iter().zip(&expected) {
        assert!(vector.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "embeddinggemma: {vector:?} is not {expected:?}");
    }
}

#[test]
fn encoders_are_those_of_the_processor() {
    let config = || EngineConfig {
        embedding: Some(EmbeddingOptions::default()),
        max_num_batched_tokens: 64,
        paged_attention: pool_of(72, 8),
        ..small()
    };
    let texts = ["Crabs live here.", "It rained on the harbour all night, and the boats lay still."].map(str::to_owned);
    let source = |name: &str| ModelSource::HuggingFace { path: common::drawn::encoder(name), tokenizer_json: None };
    for name in ["bert", "nomic", "modernbert"] {
        let inputs = || texts.iter().cloned().map(EmbeddingInput::Text).collect();
        let request = || EmbeddingRequest { inputs: inputs(), ..EmbeddingRequest::default() };
        let expected = Engine::load(&source(name), &config(), &|_| {}).unwrap().embed(request()).unwrap();
        let engine = Engine::load_onto(&gpu(64 * MIB), &source(name), &config(), &|_| {}).unwrap();
        for (vector, expected) in engine.embed(request()).unwrap().iter().zip(&expected) {
            assert!(vector.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "{name}: {vector:?} is not {expected:?}");
        }
    }
    let request =
        || RerankRequest { query: "Where do crabs live?".into(), documents: texts.to_vec(), ..RerankRequest::default() };
    let expected = Engine::load(&source("bert-rerank"), &config(), &|_| {}).unwrap().rerank(request()).unwrap();
    let engine = Engine::load_onto(&gpu(64 * MIB), &source("bert-rerank"), &config(), &|_| {}).unwrap();
    let scores = engine.rerank(request()).unwrap();
    assert!(scores.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{scores:?} are not {expected:?}");
}
