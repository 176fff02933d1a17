//! The prefix cache of models with recurrent layers: where hits end, and that they change no bit.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Mutex,
};

use engine::{
    AdmissionPolicy, Completion, Continuation, Engine, EngineConfig, EngineError, GenerationRequest, ModelDType, ModelSource,
    Policies, Prompt, Usage, kv_tier::KvTierConfig,
};

use crate::common::{
    self, drawn,
    serving::{exact, greedy, pool_of, prompt, request, stats},
};

/// A short convolution, Mamba-2, the gated delta rule, and it again in the form of another family; Mamba beside attention, and
/// alone, where blocks hold nothing.
const MODELS: [&str; 6] = ["lfm2", "granitemoehybrid", "qwen3-next", "qwen3_5", "jamba", "mamba"];
/// Those whose weights are drawn.
const DRAWN: [&str; 2] = ["jamba", "mamba"];
const NEW: usize = 12;

fn source(model: &str) -> ModelSource {
    static MADE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if !DRAWN.contains(&model) {
        return common::hugging_face(model);
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(model);
    let mut made = MADE.lock().unwrap();
    if made.insert(model.to_owned()) {
        let (fresh, _) = drawn::model(model);
        std::fs::create_dir_all(&folder).unwrap();
        for entry in fresh.path().read_dir().unwrap() {
            let entry = entry.unwrap();
            let content = std::fs::read(entry.path()).unwrap();
            let place = folder.join(entry.file_name());
            if std::fs::read(&place).ok().as_ref() != Some(&content) {
                std::fs::write(place, content).unwrap();
            }
        }
    }
    ModelSource::HuggingFace { path: folder, tokenizer_json: None }
}

fn start(model: &str, config: &EngineConfig) -> Engine {
    Engine::load(&source(model), config, &|_| {}).unwrap()
}

fn uncached(config: &EngineConfig) -> EngineConfig {
    EngineConfig { state_snapshot_bytes: Some(0), ..config.clone() }
}

/// Tokens of a choice with their log probabilities, to the bit.
fn bits_of(completion: &Completion, choice: usize) -> Vec<(u32, u32)> {
    completion.choices[choice]
        .logprobs
        .iter()
        .flatten()
        .map(|token| (token.token_id, token.logprob.map_or(0, f32::to_bits)))
        .collect()
}

fn ask(engine: &Engine, request: GenerationRequest) -> (Vec<(u32, u32)>, Usage) {
    let completion = engine.submit(request).unwrap().wait().unwrap();
    (bits_of(&completion, 0), completion.usage)
}

fn of(tokens: Vec<u32>) -> GenerationRequest {
    GenerationRequest::new(Prompt::TokenIds(tokens), greedy(NEW))
}

/// A common beginning of 96 tokens and an ending of its own.
fn with_system_prompt(i: usize, own: usize) -> Vec<u32> {
    [prompt(0, 96), prompt(i + 1, own)].concat()
}

fn cached(usage: &Usage) -> (usize, Option<&'static str>) {
    (usage.cached_tokens, usage.cache_miss.map(engine::MissReason::name))
}

#[test]
fn a_repeated_prompt_begins_at_its_last_block_and_has_the_same_bits() {
    for model in MODELS {
        for config in [exact(), EngineConfig { deterministic: true, ..EngineConfig::default() }] {
            let config = EngineConfig { paged_attention: pool_of(2000, 8), ..config };
            let (cold, engine) = (start(model, &uncached(&config)), start(model, &config));
            let expected = ask(&cold, request(3, 100, NEW));
            assert_eq!(cached(&expected.1), (0, Some("disabled")), "{model}");
            let first = ask(&engine, request(3, 100, NEW));
            let again = ask(&engine, request(3, 100, NEW));
            assert_eq!(cached(&first.1), (0, Some("cold")), "{model}");
            assert_eq!(cached(&again.1).0, 96, "{model}");
            assert!(first.0 == expected.0 && again.0 == expected.0, "{model} {:?}: other bits", config.dtype);
            let stats = stats(&engine);
            assert_eq!(stats.prefix_hit_tokens, 96);
            assert!(stats.state_snapshots_used > 0 && stats.state_snapshots_taken >= 2, "{stats:?}");
        }
    }
}

#[test]
fn a_common_beginning_is_learned_on_its_first_miss() {
    for model in MODELS {
        let config = EngineConfig { paged_attention: pool_of(4000, 8), ..exact() };
        let (cold, engine) = (start(model, &uncached(&config)), start(model, &config));
        let mut found = Vec::new();
        for i in 0..4 {
            let (bits, usage) = ask(&engine, of(with_system_prompt(i, 21 + i)));
            assert!(bits == ask(&cold, of(with_system_prompt(i, 21 + i))).0, "{model}, prompt {i}: other bits");
            found.push(cached(&usage));
        }
        assert_eq!(found[..2], [(0, Some("cold")), (0, Some("no_snapshot"))], "{model}");
        assert!(found[2..].iter().all(|found| found.0 == 96), "{model}: {found:?}");
    }
}

#[test]
fn the_next_turn_begins_where_the_answer_ended() {
    for model in MODELS {
        let config = EngineConfig { paged_attention: pool_of(4000, 8), ..exact() };
        let (cold, engine) = (start(model, &uncached(&config)), start(model, &config));
        let mut conversation = prompt(5, 75);
        for turn in 0..3 {
            let (bits, usage) = ask(&engine, of(conversation.clone()));
            assert!(bits == ask(&cold, of(conversation.clone())).0, "{model}, turn {turn}: other bits");
            // All but the answer's last token, which was never computed, and what the user said.
            let had = if turn == 0 { 0 } else { conversation.len() - 10 - 1 };
            assert_eq!(usage.cached_tokens, had, "{model}, turn {turn}: {:?}", usage.cache_miss);
            conversation.extend(bits.iter().map(|(token, _)| *token));
            conversation.extend(prompt(turn + 9, 10));
        }
    }
}

#[test]
fn batches_chunks_and_preemptions_change_no_bit() {
    for model in MODELS {
        let config = EngineConfig { paged_attention: pool_of(4000, 8), ..exact() };
        let cold = start(model, &uncached(&config));
        let prompts: Vec<_> = (0..16).map(|i| with_system_prompt(i / 2, 5 + 3 * (i / 2))).collect();
        let expected: Vec<_> = prompts.iter().map(|prompt| ask(&cold, of(prompt.clone())).0).collect();
        for (pool, chunk) in [(4000, 4096), (4000, 33), (160, 4096), (160, 50)] {
            let config = EngineConfig {
                paged_attention: pool_of(pool, 8),
                max_num_batched_tokens: chunk,
                max_num_seqs: 8,
                policies: Policies { admission: AdmissionPolicy::Optimistic, ..Policies::default() },
                ..exact()
            };
            let engine = start(model, &config);
            for round in 0..2 {
                let streams: Vec<_> = prompts.iter().map(|prompt| engine.submit(of(prompt.clone())).unwrap()).collect();
                for (i, stream) in streams.into_iter().enumerate() {
                    let bits = bits_of(&stream.wait().unwrap(), 0);
                    assert!(
                        bits == expected[i],
                        "{model}, pool of {pool}, chunks of {chunk}, round {round}, prompt {i}: other bits"
                    );
                }
            }
            let stats = stats(&engine);
            assert!(stats.prefix_hit_tokens > 0, "{model}: {stats:?}");
            assert!(pool > 160 || stats.preemptions > 0, "{model}: the pool was not tight: {stats:?}");
        }
    }
}

#[test]
fn prompts_that_arrive_together_compute_their_beginning_once() {
    let config = EngineConfig { paged_attention: pool_of(4000, 8), max_num_batched_tokens: 64, ..exact() };
    let engine = start("lfm2", &config);
    engine.pause().unwrap();
    let streams: Vec<_> = (0..6).map(|i| engine.submit(of(with_system_prompt(i, 21))).unwrap()).collect();
    engine.resume().unwrap();
    let usages: Vec<_> = streams.into_iter().map(|stream| cached(&stream.wait().unwrap().usage).0).collect();
    assert_eq!(usages, [0, 96, 96, 96, 96, 96]);
}

#[test]
fn forks_and_choices_go_on_with_the_same_bits() {
    for model in MODELS {
        let config = EngineConfig { paged_attention: pool_of(4000, 8), ..exact() };
        let (cold, engine) = (start(model, &uncached(&config)), start(model, &config));
        let choices = |engine: &Engine| {
            let completion = engine.submit(GenerationRequest { n_choices: 3, ..request(2, 90, NEW) }).unwrap().wait().unwrap();
            (0..3).map(|choice| bits_of(&completion, choice)).collect::<Vec<_>>()
        };
        let expected = choices(&cold);
        assert!(choices(&engine) == expected && choices(&engine) == expected, "{model}");
        let mut kept = request(4, 83, NEW);
        kept.service.keep = true;
        let mut completion = engine.submit(kept).unwrap().wait().unwrap();
        let sequence = completion.choices[0].sequence.take().unwrap();
        let then = Continuation::TokenIds(prompt(8, 9));
        let given = [sequence.token_ids(), &prompt(8, 9)].concat();
        let (bits, usage) = ask(&engine, GenerationRequest::new(Prompt::Sequence { sequence, then }, greedy(NEW)));
        assert!(bits == ask(&cold, of(given.clone())).0, "{model}: other bits behind a sequence");
        assert_eq!(usage.cached_tokens, given.len() - 9 - 1, "{model}");
    }
}

#[test]
fn a_salt_parts_states_as_it_parts_blocks() {
    let engine = start("lfm2", &EngineConfig { paged_attention: pool_of(4000, 8), ..exact() });
    let ask = |salt: &str| {
        let mut request = request(1, 100, 4);
        request.service.cache_salt = Some(salt.into());
        cached(&ask(&engine, request).1)
    };
    assert_eq!([ask("a"), ask("b")].map(|(tokens, _)| tokens), [0, 0]);
    assert_eq!([ask("a"), ask("b")].map(|(tokens, _)| tokens), [96, 96]);
}

#[test]
fn one_snapshot_is_enough_to_be_right() {
    for model in MODELS {
        let config = EngineConfig { paged_attention: pool_of(4000, 8), max_num_seqs: 4, ..exact() };
        let plan = Engine::memory_plan(&source(model), &config, None).unwrap();
        let state_bytes = plan.devices[0].states / 4;
        assert_eq!(plan.devices[0].state_snapshots, plan.num_state_snapshots as u64 * state_bytes);
        let one = EngineConfig { state_snapshot_bytes: Some(state_bytes.max(1 << 20)), ..config.clone() };
        let engine = start(model, &one);
        let cold = start(model, &uncached(&config));
        assert!(stats(&engine).state_snapshots_total >= 1);
        for i in [0, 1, 0, 1, 2, 2] {
            assert!(ask(&engine, request(i, 90, NEW)).0 == ask(&cold, request(i, 90, NEW)).0, "{model}, prompt {i}: other bits");
        }
    }
}

fn refusal(model: &str, change: impl Fn(&mut EngineConfig)) -> String {
    let mut config = EngineConfig { dtype: ModelDType::F32, paged_attention: pool_of(500, 8), ..EngineConfig::default() };
    change(&mut config);
    match Engine::load(&source(model), &config, &|_| {}) {
        Err(EngineError::InvalidArgument(why) | EngineError::NotSupported(why)) => why,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was taken"),
    }
}

#[test]
fn what_cannot_be_had_is_refused_by_name() {
    let why = refusal("llama", |config| config.state_snapshot_bytes = Some(1 << 20));
    assert!(why.contains("state_snapshot_mb=1") && why.contains("llama has none"), "{why}");
    let why = refusal("lfm2", |config| (config.state_snapshot_bytes, config.prefix_caching) = (Some(1 << 20), false));
    assert!(why.contains("prefix_cache_n=0"), "{why}");
    let why = refusal("lfm2", |config| (config.state_snapshot_bytes, config.no_kv_cache) = (Some(1 << 20), true));
    assert!(why.contains("no_kv_cache=True"), "{why}");
    let why = refusal("lfm2", |config| config.state_snapshot_bytes = Some(1));
    assert!(why.contains("holds no snapshot of lfm2") && why.contains("give 1 or more, or 0"), "{why}");
    let tier = KvTierConfig::File { path: PathBuf::from("tier"), max_bytes: 1 << 20 };
    let why = refusal("lfm2", |config| config.kv_tier = Some(tier.clone()));
    assert!(why.contains("kv_tier of lfm2"), "{why}");
}
