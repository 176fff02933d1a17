//! The ledger of bytes that is made before a model is loaded.

use std::path::PathBuf;

use engine::{Engine, EngineConfig, EngineError, MemoryGpuConfig, MemoryPlan, ModelDType, ModelSource, PagedAttentionConfig};

const GIB: u64 = 1 << 30;

fn golden(path: &str) -> PathBuf {
    goldens::dir().join(path)
}

fn config(mem_gpu: Option<MemoryGpuConfig>, max_num_seqs: usize) -> EngineConfig {
    EngineConfig {
        max_num_seqs,
        max_num_batched_tokens: 64,
        paged_attention: PagedAttentionConfig { block_size: Some(8), mem_gpu, ..PagedAttentionConfig::default() },
        ..EngineConfig::default()
    }
}

fn plan(model: &str, config: &EngineConfig) -> Result<MemoryPlan, EngineError> {
    Engine::memory_plan(&ModelSource::from_path(golden(model)).unwrap(), config, None)
}

/// A folder with nothing but a config.json.
fn only_config(text: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), text).unwrap();
    dir
}

const LLAMA_3_8B: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu"}"#;

#[test]
fn the_plan_of_every_golden_is_what_is_loaded() {
    let models = ["llama", "llama3-rope", "mistral", "mistral-window", "phi3", "phi3-longrope", "qwen2", "qwen3", "gemma3"];
    let more = ["gemma2", "starcoder2", "phi2-qknorm", "stablelm-parallel", "olmo2", "glm4"];
    let others = ["deepseek-v2-lite", "gpt-oss", "gpt-oss-mxfp4", "granitemoehybrid", "lfm2-moe", "llama4-text", "qwen3-next"];
    let models = models.into_iter().chain(more).chain(others).map(|name| format!("text/{name}"));
    let quantized = ["llama", "mistral", "qwen2", "qwen3", "phi2"].map(|name| format!("gguf/{name}.gguf"));
    for model in models.chain(quantized) {
        for dtype in [ModelDType::Auto, ModelDType::F32] {
            let config = EngineConfig { dtype, ..config(Some(MemoryGpuConfig::ContextSize(100)), 2) };
            let plan = plan(&model, &config).unwrap();
            let engine = Engine::load(&ModelSource::from_path(golden(&model)).unwrap(), &config, &|_| ()).unwrap();
            let (planned, loaded) = (plan.devices[0], engine.memory_ledger().devices[0]);
            assert_eq!(planned.weights, engine.weight_bytes(), "{model} {dtype:?}");
            assert_eq!(planned.kv_cache, engine.kv_cache_bytes(), "{model} {dtype:?}");
            assert_eq!(planned.resident(), loaded.resident(), "{model} {dtype:?}");
            assert_eq!(plan.num_blocks(), engine.kv_cache_stats().unwrap().blocks_total);
            assert!(plan.servable_tokens() >= 100.min(engine.context_length()));
        }
    }
}

#[test]
fn seven_requests_of_llama_3_8b_fit_a_card_of_24_gb_and_eight_do_not() {
    let dir = only_config(LLAMA_3_8B);
    let source = ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
    let guaranteed = |max_num_seqs| EngineConfig {
        max_num_seqs,
        paged_attention: PagedAttentionConfig {
            mem_gpu: Some(MemoryGpuConfig::Utilization(0.95)),
            guaranteed: true,
            ..PagedAttentionConfig::default()
        },
        ..EngineConfig::default()
    };
    let plan = Engine::memory_plan(&source, &guaranteed(7), Some(&[24 * GIB])).unwrap();
    // 8 030 261 248 parameters, of which the norms' 65 * 4096 are kept as floats.
    assert_eq!(plan.devices[0].weights, 2 * 8_030_261_248 + 2 * 65 * 4096);
    assert_eq!(plan.bytes_per_block, 32 * 128 * 1024);
    assert_eq!(plan.num_requests_that_fit(8192), 7);
    assert!(plan.devices[0].resident() + plan.devices[0].margin <= 24 * GIB);
    let error = Engine::memory_plan(&source, &guaranteed(8), Some(&[24 * GIB])).unwrap_err().to_string();
    assert!(error.contains("7 x 8192 tokens would fit"), "{error}");
    assert!(plan.to_string().contains("7 of that length fit at once"), "{plan}");
}

/// Each card has its own layers' weights and KV, so two small ones serve what one large one does.
#[test]
fn cards_share_layers_and_weights() {
    let dir = only_config(LLAMA_3_8B);
    let source = ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
    let mut config = EngineConfig::default();
    config.paged_attention.mem_gpu = Some(MemoryGpuConfig::ContextSize(8192));
    let one = Engine::memory_plan(&source, &config, Some(&[24 * GIB])).unwrap();
    let two = Engine::memory_plan(&source, &config, Some(&[12 * GIB, 12 * GIB])).unwrap();
    assert_eq!(one.num_blocks(), two.num_blocks());
    let sum =
        |plan: &MemoryPlan| plan.devices.iter().map(|d| (d.weights, d.kv_cache)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    assert_eq!(sum(&one), sum(&two));
    assert_eq!(two.devices[0].kv_cache, two.devices[1].kv_cache);
    // Token embedding and output projection are of one size; the last norm is on the last card.
    assert_eq!(two.devices[1].weights - two.devices[0].weights, 4 * 4096);
    // Without a size the fuller card decides, and the emptier one has no more blocks.
    config.paged_attention.mem_gpu = None;
    let uneven = Engine::memory_plan(&source, &config, Some(&[24 * GIB, 12 * GIB])).unwrap();
    let even = Engine::memory_plan(&source, &config, Some(&[12 * GIB, 12 * GIB])).unwrap();
    assert_eq!(uneven.num_blocks(), even.num_blocks());
    let error = Engine::memory_plan(&source, &config, Some(&[])).unwrap_err().to_string();
    assert!(error.contains("name at least one device"), "{error}");
}

#[test]
fn more_memory_or_shorter_requests_never_mean_fewer() {
    let mut last = (0, 0);
    for megabytes in 1..20 {
        let plan = plan("text/gemma3", &config(Some(MemoryGpuConfig::MbAmount(megabytes)), 4)).unwrap();
        let now = (plan.num_blocks(), plan.num_requests_that_fit(200));
        assert!(now.0 > last.0 && now.1 >= last.1, "{now:?} after {last:?}");
        last = now;
        let fit: Vec<_> = (1..plan.servable_tokens()).map(|tokens| plan.num_requests_that_fit(tokens)).collect();
        assert!(fit.is_sorted_by(|a, b| a >= b) && fit.last() >= Some(&1), "{fit:?}");
    }
}

#[test]
fn what_cannot_be_guaranteed_is_refused_with_what_can() {
    let guaranteed = |tokens, no_paged_attn| {
        let mut config = EngineConfig { no_paged_attn, ..config(Some(MemoryGpuConfig::ContextSize(tokens)), 2) };
        config.paged_attention.guaranteed = true;
        plan("text/llama", &config)
    };
    let longest = guaranteed(100, false).unwrap();
    assert_eq!((longest.max_model_len, longest.num_requests_that_fit(100)), (100, 2));
    let error = guaranteed(1 << 20, false).unwrap_err().to_string();
    assert!(error.contains("1048576 tokens a request cannot be guaranteed"), "{error}");
    let error = guaranteed(100, true).unwrap_err().to_string();
    assert!(error.contains("no_paged_attn"), "{error}");
}

/// Windows save nothing where whole contexts are reserved.
#[test]
fn a_context_that_was_asked_for_is_not_cut_without_paged_attention() {
    let naive = |mem_gpu| plan("text/gemma3", &EngineConfig { no_paged_attn: true, ..config(Some(mem_gpu), 2) });
    let paged = plan("text/gemma3", &config(Some(MemoryGpuConfig::ContextSize(400)), 2)).unwrap();
    assert!(paged.servable_tokens() >= 400);
    let error = naive(MemoryGpuConfig::ContextSize(400)).unwrap_err().to_string();
    assert!(error.contains("a context of 400 tokens with no_paged_attn"), "{error}");
    let megabytes: usize = error.split(" MB instead").next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert!(naive(MemoryGpuConfig::MbAmount(megabytes)).unwrap().max_model_len >= 400);
}
