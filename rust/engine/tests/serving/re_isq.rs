//! Weights that are quantized anew under a model that serves: what it says then, and what it may not use any more.

use engine::{AdapterOptions, Engine, EngineConfig, Isq, KvTierConfig, ModelSource, QuantizeOptions, quantize_model};

use crate::common::{
    hugging_face,
    serving::{exact, pool_of, request, run, stats},
};

fn isq(name: &str) -> Isq {
    name.parse().unwrap()
}

fn config(in_situ_quant: Option<&str>) -> EngineConfig {
    EngineConfig { in_situ_quant: in_situ_quant.map(isq), paged_attention: pool_of(400, 8), ..exact() }
}

fn load(model: &str, config: &EngineConfig) -> Engine {
    Engine::load(&hugging_face(model), config, &|_| {}).unwrap()
}

#[test]
fn it_says_what_a_model_says_that_was_loaded_so_and_its_prefix_cache_begins_anew() {
    for model in ["llama", "gemma3", "qwen3-moe", "lfm2"] {
        let engine = load(model, &config(None));
        run(&engine, request(1, 100, 12));
        let old = stats(&engine);
        for name in ["Q8_0", "Q4_0"] {
            engine.re_isq(isq(name), &|_| {}).unwrap();
            let fresh = load(model, &config(Some(name)));
            assert_eq!(run(&engine, request(1, 100, 12)), run(&fresh, request(1, 100, 12)), "{model} {name}");
            assert_eq!(stats(&engine).prefix_hit_tokens, 0, "{model} {name}");
            let told = |engine: &Engine| (engine.weight_bytes(), engine.memory_ledger(), engine.description());
            let (again, first) = (told(&engine), told(&fresh));
            assert_eq!(again.0, first.0, "{model} {name}");
            assert_eq!(again.1.devices[0].weights, first.1.devices[0].weights, "{model} {name}");
        }
        assert_eq!(stats(&engine).blocks_total, old.blocks_total);
    }
}

#[test]
fn records_of_a_tier_are_used_by_the_weights_that_they_are_of() {
    let dir = tempfile::tempdir().unwrap();
    let kv_tier = Some(KvTierConfig::File { path: dir.path().to_owned(), max_bytes: 1 << 30 });
    let engine = load("llama", &EngineConfig { kv_tier, ..config(Some("Q8_0")) });
    let expected = run(&engine, request(1, 100, 12));
    engine.re_isq(isq("Q4_0"), &|_| {}).unwrap();
    assert_ne!(run(&engine, request(1, 100, 12)), expected);
    assert_eq!(stats(&engine).tier.hit_tokens, 0);
    engine.re_isq(isq("Q8_0"), &|_| {}).unwrap();
    assert_eq!(run(&engine, request(1, 100, 12)), expected);
    assert_eq!(stats(&engine).tier.hit_tokens, 96);
}

#[test]
fn what_cannot_be_quantized_anew_says_why_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("llama.gguf");
    let options = QuantizeOptions {
        isq: isq("Q4_0"),
        output: output.clone(),
        overwrite: false,
        architecture: None,
        imatrix: None,
        calibration_file: None,
        num_threads: None,
    };
    quantize_model(&hugging_face("llama"), &options, &|_| {}).unwrap();
    let source = ModelSource::Gguf { files: vec![output], tokenizer_dir: None, tokenizer_json: None };
    let quantized = Engine::load(&source, &config(None), &|_| {}).unwrap();
    let expected = run(&quantized, request(1, 20, 8));
    let error = quantized.re_isq(isq("Q8_0"), &|_| {}).unwrap_err().to_string();
    assert!(error.contains("quantized already"), "{error}");
    assert_eq!(run(&quantized, request(1, 20, 8)), expected);
    let adapting = load("llama", &EngineConfig { adapters: Some(AdapterOptions::default()), ..config(None) });
    let error = adapting.re_isq(isq("Q8_0"), &|_| {}).unwrap_err().to_string();
    assert!(error.contains("with adapters"), "{error}");
    let gone = load("llama", &config(None));
    gone.unload().unwrap();
    assert!(gone.re_isq(isq("Q8_0"), &|_| {}).unwrap_err().to_string().contains("unloaded"));
}
