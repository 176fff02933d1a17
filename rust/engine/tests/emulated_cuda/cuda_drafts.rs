//! Draft models, heads of models and other weights on a GPU whose kernels run on the CPU: the same answers, in planned memory.

use std::sync::Arc;

use device::Backend;
use engine::{DraftChoice, Engine, EngineConfig, GenerationRequest, KvCacheStats, ModelDType, ModelSource, Speculation};

use crate::{
    MIB,
    common::{
        hugging_face, mtp,
        serving::{self, exact, pool_of, request, run, run_together, start, stats},
    },
    gpu, used,
};

fn config() -> EngineConfig {
    EngineConfig { max_num_batched_tokens: 24, max_num_seqs: 3, paged_attention: pool_of(400, 8), ..exact() }
}

fn drafted_by(model: &str, config: &EngineConfig) -> EngineConfig {
    let speculation = Speculation { max_drafts: Some(3), ..Speculation::by_model(DraftChoice::All) };
    EngineConfig { speculation: Some(speculation), ..serving::drafted_by(model, DraftChoice::All, config) }
}

fn by_head(config: &EngineConfig) -> EngineConfig {
    serving::by_head(DraftChoice::All, config)
}

/// More than a step has room for, and two that begin alike.
fn requests() -> Vec<GenerationRequest> {
    [(1, 17), (2, 5), (1, 17), (3, 9)].map(|(i, len)| request(i, len, 8)).to_vec()
}

/// Answers, and how many drafts there were and how many were right.
fn ask(engine: &Engine) -> (Vec<Vec<u32>>, [u64; 2]) {
    let answers = run_together(engine, requests());
    let KvCacheStats { drafts, .. } = stats(engine);
    (answers, [drafts.tokens, drafts.accepted])
}

#[test]
fn answers_are_the_same_with_a_draft_model() {
    let expected = run_together(&start("llama", &config()), requests());
    let drafted = drafted_by("llama", &config());
    // With graphs it is large enough for what is reserved for two models' of them.
    for (memory, graphs) in [(64 * MIB, false), (2048 * MIB, true)] {
        let (backend, driver) = gpu(memory, graphs);
        let engine = Engine::load_onto(&backend, &hugging_face("llama"), &drafted, &|_| {}).unwrap();
        let (answers, [tokens, accepted]) = ask(&engine);
        assert_eq!(answers, expected, "{memory} bytes");
        assert!(tokens > 10 && accepted * 10 > tokens * 9, "a model is right about itself: {accepted} of {tokens}");
        let num_recorded = driver.num_recorded();
        assert_eq!(num_recorded > 0, graphs, "{num_recorded} steps were recorded");
        assert_eq!(run(&engine, request(1, 17, 8)), expected[0], "from the prefix cache");
    }
}

/// Sums on a GPU are in another order, so that a guess of nearly equal tokens may differ, and no answer.
fn check_head(family: &str) {
    let checkpoint = mtp::checkpoint(family, true);
    let source = ModelSource::HuggingFace { path: checkpoint.path.clone(), tokenizer_json: None };
    let on_cpu = Engine::load(&source, &by_head(&config()), &|_| {}).unwrap();
    let (expected, [_, accepted_there]) = ask(&on_cpu);
    let (backend, _) = gpu(512 * MIB, false);
    let engine = Engine::load_onto(&backend, &source, &by_head(&config()), &|_| {}).unwrap();
    let (answers, [tokens, accepted]) = ask(&engine);
    assert_eq!(answers, expected, "{family}");
    assert!(tokens > 10 && accepted.abs_diff(accepted_there) <= 1, "{family}: {accepted}, {accepted_there} on a processor");
    assert!(accepted > 3, "{family}: {accepted} of {tokens}");
}

#[test]
fn answers_are_the_same_with_a_head() {
    check_head("glm4-moe");
}

#[test]
#[ignore = "a model in the emulation; make test-long"]
fn answers_of_a_recurrent_model_are_the_same_with_a_head() {
    check_head("qwen3-next");
}

#[test]
fn what_guesses_is_in_the_plan_of_the_card() {
    let checkpoint = mtp::checkpoint("glm4-moe", true);
    let with_head = ModelSource::HuggingFace { path: checkpoint.path.clone(), tokenizer_json: None };
    // The pool takes what is left.
    let whole = EngineConfig { paged_attention: engine::PagedAttentionConfig::default(), ..config() };
    for (source, config) in [(hugging_face("llama"), drafted_by("llama", &whole)), (with_head, by_head(&whole))] {
        let (backend, _) = gpu(32 * MIB, false);
        let engine = Engine::load_onto(&backend, &source, &config, &|_| {}).unwrap();
        let plan = engine.memory_ledger();
        let card = plan.devices[0];
        let (loaded, full) = (used(&*backend), card.resident() + card.margin);
        assert_eq!(card.weights, engine.weight_bytes());
        assert!(loaded <= full && loaded + card.workspaces + card.margin + MIB >= full, "{loaded}: {plan}");
        let of_card = (32.0 * MIB as f64 * 0.9) as u64;
        assert!(full <= of_card + plan.bytes_per_block && full + 2 * plan.bytes_per_block > of_card, "{plan}");
        run(&engine, request(1, 30, 3));
        assert!(used(&*backend) <= full, "{}: {plan}", used(&*backend));
    }
}

#[test]
fn weights_that_are_quantized_anew_answer_as_those_that_were_loaded_so_and_the_old_ones_are_given_back() {
    let isq = |name: Option<&str>| EngineConfig { in_situ_quant: name.map(|name| name.parse().unwrap()), ..config() };
    let load = |backend: &Arc<dyn Backend>, name| {
        Engine::load_onto(backend, &hugging_face("llama"), &EngineConfig { dtype: ModelDType::F32, ..isq(name) }, &|_| {})
            .unwrap()
    };
    let [(changed, _), (fresh, _)] = [(); 2].map(|()| gpu(64 * MIB, false));
    let (engine, expected) = (load(&changed, None), load(&fresh, Some("Q8_0")));
    let before = run(&engine, request(1, 30, 12));
    let answer = run(&expected, request(1, 30, 12));
    assert_ne!(before, answer, "the weights make a difference");
    engine.re_isq("Q8_0".parse().unwrap(), &|_| {}).unwrap();
    assert_eq!(run(&engine, request(1, 30, 12)), answer);
    assert_eq!((engine.weight_bytes(), used(&*changed)), (expected.weight_bytes(), used(&*fresh)));
}
