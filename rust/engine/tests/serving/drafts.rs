//! Answers are the same with drafts, right and wrong, and come in fewer steps with right ones.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use engine::{
    Completion, DraftChoice, DraftModel, DryParams, Engine, EngineConfig, FinishReason, GenerationRequest, KvTierConfig,
    ModelDType, ModelSource, MtpHead, PagedAttentionConfig, PagedCacheType, Prompt, PromptLookup, Proposer, SamplingParams,
    ServiceParams, Speculation, Tokenizer,
};

use crate::common::{
    self, hugging_face, mtp, mtp_gguf,
    serving::{by_head, drafted_by, exact, greedy, pool_of, prompt, start, stats},
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Right,
    Wrong,
    /// Three of four are right, and their number varies.
    Mixed,
}

/// Proposes from answers that were given before.
#[derive(Debug)]
struct Oracle {
    kind: Kind,
    answers: Mutex<Vec<Vec<u32>>>,
    num_calls: AtomicUsize,
}

const MAX_DRAFTS: usize = 5;

impl Oracle {
    fn new(kind: Kind, answers: Vec<Vec<u32>>) -> Arc<Self> {
        Arc::new(Self { kind, answers: Mutex::new(answers), num_calls: AtomicUsize::new(0) })
    }
}

impl Proposer for Oracle {
    fn propose(&self, token_ids: &[u32], _: usize, drafts: &mut Vec<u32>) -> usize {
        let call = self.num_calls.fetch_add(1, Relaxed);
        let answers = self.answers.lock().unwrap();
        let Some(answer) = answers.iter().find(|answer| answer.starts_with(token_ids)) else { return 0 };
        let num_drafts = if self.kind == Kind::Mixed { call * 7 % (MAX_DRAFTS + 1) } else { MAX_DRAFTS };
        let right = answer[token_ids.len()..].iter().take(num_drafts);
        drafts.extend(right.enumerate().map(|(place, &token)| match self.kind {
            Kind::Right => token,
            Kind::Wrong => (token + 1) % 400,
            Kind::Mixed => (token + u32::from((call * 31 + place * 17).is_multiple_of(4))) % 400,
        }));
        0
    }
}

/// The likeliest tokens of a position, and the bits of their log probabilities.
type Top = Vec<(u32, u32)>;

/// All that an answer says, to the bit.
#[derive(Debug, PartialEq)]
struct Choice {
    num_generated: usize,
    token_ids: Vec<u32>,
    text: String,
    end: String,
    logprobs: Vec<(u32, Option<u32>, Top)>,
}

fn choices(completion: &Completion) -> Vec<Choice> {
    let choice = |choice: &engine::CompletionChoice| Choice {
        num_generated: completion.usage.completion_tokens,
        token_ids: choice.sequence.as_ref().map_or(Vec::new(), |sequence| sequence.token_ids().to_vec()),
        text: choice.text.clone(),
        end: format!("{:?} {:?} {:?}", choice.finish_reason, choice.stop_sequence, choice.error),
        logprobs: choice
            .logprobs
            .iter()
            .flatten()
            .map(|l| {
                let top = l.top_logprobs.iter().map(|top| (top.token_id, top.logprob.to_bits())).collect();
                (l.token_id, l.logprob.map(f32::to_bits), top)
            })
            .collect(),
    };
    completion.choices.iter().map(choice).collect()
}

/// Requests of every kind, all of which keep their sequences.
fn requests() -> Vec<GenerationRequest> {
    let plain = SamplingParams { logprobs: None, ..greedy(40) };
    let sampled = SamplingParams { temperature: Some(1.2), seed: Some(5), logprobs: Some(3), ..greedy(40) };
    let penalties = SamplingParams {
        presence_penalty: Some(0.7),
        frequency_penalty: Some(0.4),
        repetition_penalty: Some(1.2),
        dry: Some(DryParams { multiplier: 0.8, base: 1.75, allowed_length: 1, sequence_breakers: Vec::new() }),
        ..sampled.clone()
    };
    let few = SamplingParams { top_k: Some(20), top_p: Some(0.9), min_p: Some(0.01), logprobs: None, ..sampled.clone() };
    let stopped = SamplingParams { stop_token_ids: (0..512).filter(|id| id % 16 == 0).collect(), ..sampled.clone() };
    let worded = SamplingParams { stop: vec!["e".into(), "the".into()], logprobs: None, seed: Some(9), ..sampled.clone() };
    let of = |i: usize, len, sampling: &SamplingParams| {
        let request = GenerationRequest::new(Prompt::TokenIds(prompt(i, len)), sampling.clone());
        GenerationRequest { service: ServiceParams { keep: true, ..ServiceParams::default() }, ..request }
    };
    let biased = SamplingParams { logit_bias: vec![(17, 4.0), (40, -100.0)], ..sampled.clone() };
    let repeating = |of: GenerationRequest| {
        let prompt = Prompt::TokenIds(prompt(11, 20).repeat(3));
        GenerationRequest { prompt, ..of }
    };
    vec![
        repeating(of(1, 30, &plain)),
        repeating(of(1, 30, &biased)),
        of(1, 30, &plain),
        of(2, 45, &plain),
        of(1, 30, &greedy(33)),
        of(3, 61, &sampled),
        GenerationRequest { n_choices: 3, ..of(4, 20, &sampled) },
        GenerationRequest { n_choices: 2, ..of(5, 9, &plain) },
        of(6, 40, &penalties),
        of(7, 25, &few),
        of(8, 50, &stopped),
        of(9, 33, &worded),
        GenerationRequest { echo_prompt: true, ..of(10, 37, &sampled) },
    ]
}

/// In two batches, the second of which finds prefixes of the first. Kept blocks go with each answer. Also says how many tokens
/// were computed again.
fn ask(engine: &Engine) -> (Vec<Vec<Choice>>, usize) {
    let (mut answers, mut num_recomputed) = (Vec::new(), 0);
    for _ in 0..2 {
        engine.pause().unwrap();
        let streams: Vec<_> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
        engine.resume().unwrap();
        for stream in streams {
            let completion = stream.wait().unwrap();
            answers.push(choices(&completion));
            num_recomputed += completion.usage.recomputed_tokens;
        }
    }
    (answers, num_recomputed)
}

/// Of models with states, whose answers repeat nothing that could be looked up.
const STATES: &str = "exact, with states";

fn check(model: &str, way: &str, config: &EngineConfig) {
    let engine = start(model, config);
    let (expected, num_recomputed) = ask(&engine);
    let plain = stats(&engine);
    assert!(expected.iter().flatten().all(|choice| choice.end.starts_with("Stop") || choice.end.starts_with("Length")));
    assert!(expected.iter().flatten().any(|choice| choice.end.starts_with("Stop Some")), "no stop string was met");
    drop(engine);
    let answers: Vec<_> = expected.iter().flatten().map(|choice| choice.token_ids.clone()).collect();
    for speculation in [Speculation::auto(), Speculation::always(Arc::new(PromptLookup))] {
        let engine = start(model, &EngineConfig { speculation: Some(speculation.clone()), ..config.clone() });
        for (number, (got, expected)) in ask(&engine).0.iter().zip(&expected).enumerate() {
            assert_eq!(got, expected, "{model}, {way}, {:?} of looked up drafts, request {number}", speculation.choice);
        }
        assert!(stats(&engine).drafts.tokens > 0 || way != "exact", "{model}: nothing was guessed");
        let was_any_right = stats(&engine).drafts.accepted > 0;
        assert!(was_any_right || way != "exact" || speculation.choice == DraftChoice::Auto, "{model}: none was right");
    }
    let choices = [DraftChoice::All, DraftChoice::Auto];
    for (draft, choice) in ["qwen3", "gemma3"].into_iter().zip(choices).take(if way == "exact" { 2 } else { 1 }) {
        let engine = start(model, &drafted_by(draft, choice, config));
        let (got, num_recomputed_with) = ask(&engine);
        for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(got, expected, "{model}, {way}, drafts of the model {draft}, request {number}");
        }
        let drafts = stats(&engine).drafts;
        assert!(drafts.tokens > 0 || choice == DraftChoice::Auto, "{model}, {way}: {draft} guessed nothing");
        if ["exact", STATES].contains(&way) {
            assert_eq!(num_recomputed_with, 0, "{model}, {draft}");
        }
    }
    for kind in [Kind::Right, Kind::Mixed, Kind::Wrong] {
        let proposer = Oracle::new(kind, answers.clone());
        let engine = start(
            model,
            &EngineConfig { speculation: Some(Speculation::always(Arc::<Oracle>::clone(&proposer))), ..config.clone() },
        );
        let (got, num_recomputed_with) = ask(&engine);
        for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(got, expected, "{model}, {way}, {kind:?} drafts, request {number}");
        }
        let stats = stats(&engine);
        assert!(proposer.num_calls.load(Relaxed) > 0);
        assert_eq!((stats.requests_running, stats.requests_waiting), (0, 0));
        if ["exact", STATES].contains(&way) {
            assert_eq!((num_recomputed, num_recomputed_with), (0, 0), "wrong drafts count as computed again");
        }
        if kind == Kind::Right && plain.preemptions == 0 {
            // A small budget bounds the drafts of a step too.
            let factor = if config.max_num_batched_tokens < 64 { 1 } else { 2 };
            assert!(stats.steps * factor < plain.steps, "{model}, {way}: {} steps instead of {}", stats.steps, plain.steps);
        }
    }
}

fn plain(max_tokens: usize) -> SamplingParams {
    SamplingParams { logprobs: None, ignore_eos: false, ..greedy(max_tokens) }
}

/// Prompts that a model has more to say to than is asked for: where it would end, a draft model does not know that it may not.
fn prompts_without_end(model: &str) -> Vec<Vec<u32>> {
    let engine = start(model, &exact());
    let goes_on = |prompt: &Vec<u32>| {
        let completion =
            engine.submit(GenerationRequest::new(Prompt::TokenIds(prompt.clone()), plain(40))).unwrap().wait().unwrap();
        completion.choices[0].finish_reason == FinishReason::Length
    };
    let prompts: Vec<_> = (0..40).map(|i| prompt(i % 7, 30 + 2 * i)).filter(goes_on).take(4).collect();
    assert_eq!(prompts.len(), 4, "{model} ends most answers");
    prompts
}

/// A model that is its own draft model is always right, as long as the keys and values of its second self are there: of cached
/// and copied blocks, of forks, behind preemptions, and in files.
#[test]
fn a_model_is_right_about_itself_wherever_its_blocks_come_from() {
    let dir = tempfile::tempdir().unwrap();
    let kv_tier = Some(KvTierConfig::File { path: dir.path().to_owned(), max_bytes: 1 << 30 });
    let int8 = PagedAttentionConfig { cache_type: PagedCacheType::Int8, ..pool_of(4000, 16) };
    let tiered = EngineConfig { kv_tier, paged_attention: pool_of(4000, 8), ..exact() };
    let configs = [
        ("llama", exact()),
        ("llama", EngineConfig { paged_attention: int8, ..exact() }),
        ("llama", EngineConfig { paged_attention: pool_of(200, 8), ..exact() }),
        ("llama", EngineConfig { max_num_batched_tokens: 7, ..exact() }),
        ("llama", EngineConfig { no_kv_cache: true, ..exact() }),
        ("llama", tiered.clone()),
        ("llama", tiered),
        ("gemma3", EngineConfig { paged_attention: pool_of(400, 8), ..exact() }),
        ("mistral-window", exact()),
        ("deepseek-v2-lite", exact()),
        ("phi3-longrope", exact()),
    ];
    for (number, (model, config)) in configs.into_iter().enumerate() {
        let prompts = prompts_without_end(model);
        let engine = start(model, &drafted_by(model, DraftChoice::All, &config));
        for round in 0..3 {
            engine.pause().unwrap();
            let of = |i: usize, n_choices| GenerationRequest {
                n_choices,
                service: ServiceParams { keep: true, ..ServiceParams::default() },
                ..GenerationRequest::new(Prompt::TokenIds(prompts[i].clone()), plain(25))
            };
            let requests = [of(0, 1), of(1, 1), of(2, 2), of(3, 1)];
            let streams: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
            engine.resume().unwrap();
            let kept: Vec<_> = streams.into_iter().map(|stream| stream.wait().unwrap()).collect();
            // From the middle of a block, which is copied.
            for completion in &kept {
                let sequence = completion.choices[0].sequence.as_ref().unwrap();
                let prompt = Prompt::TokenIds(sequence.token_ids()[..sequence.token_ids().len() - 3].to_vec());
                engine.submit(GenerationRequest::new(prompt, plain(9))).unwrap().wait().unwrap();
            }
            let drafts = stats(&engine).drafts;
            assert!(drafts.tokens > 20, "{model}: {} drafts", drafts.tokens);
            assert_eq!(drafts.accepted, drafts.tokens, "{model}, configuration {number}, round {round}");
        }
        let tier = stats(&engine).tier;
        assert!(tier.failed_blocks == 0, "{model}");
    }
}

#[test]
fn a_draft_model_is_in_the_plan() {
    let with = drafted_by("qwen3", DraftChoice::All, &exact());
    let (alone, both) = [&exact(), &with].map(|config| start("llama", config)).into();
    let planned = Engine::memory_plan(&hugging_face("llama"), &with, None).unwrap();
    assert_eq!(planned.devices[0].weights, both.weight_bytes());
    assert_eq!(both.memory_ledger().devices[0].weights, both.weight_bytes());
    assert!(both.weight_bytes() > alone.weight_bytes());
    let own = start("qwen3", &exact());
    assert_eq!(both.weight_bytes(), alone.weight_bytes() + own.weight_bytes());
    assert_eq!(both.block_bytes(), alone.block_bytes() + own.block_bytes());
}

#[test]
fn a_model_that_cannot_draft_is_refused_by_its_reason() {
    let refused = |model: &str, draft: &str| {
        let source = model.strip_suffix(".gguf").map_or_else(|| hugging_face(model), common::gguf);
        let config = drafted_by(draft, DraftChoice::All, &exact());
        Engine::load(&source, &config, &|_| {}).err().unwrap().to_string()
    };
    let error = refused("llama", "lfm2");
    assert!(error.contains("lfm2 as a draft model"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("llama");
    std::fs::create_dir(&folder).unwrap();
    for file in std::fs::read_dir(common::golden_dir().join("text/llama")).unwrap() {
        let file = file.unwrap().path();
        let bytes = std::fs::read(&file).unwrap();
        let name = file.file_name().unwrap();
        let bytes = if name == "tokenizer.json" {
            let text = String::from_utf8(bytes).unwrap();
            // Two tokens change places.
            let of = |id: u32| {
                let tokenizer = Tokenizer::from_file(&file).unwrap();
                serde_json::to_string(&tokenizer.token_text(id)).unwrap()
            };
            let (a, b) = (of(100), of(101));
            text.replacen(&format!("{a}: 100"), "\u{1}", 1)
                .replacen(&format!("{b}: 101"), &format!("{a}: 101"), 1)
                .replacen('\u{1}', &format!("{b}: 100"), 1)
                .into_bytes()
        } else {
            bytes
        };
        std::fs::write(folder.join(name), bytes).unwrap();
    }
    let draft = DraftModel {
        source: engine::ModelSource::HuggingFace { path: folder, tokenizer_json: None },
        architecture: None,
        in_situ_quant: None,
    };
    let config = EngineConfig { draft: Some(draft), ..drafted_by("llama", DraftChoice::All, &exact()) };
    let error = Engine::load(&hugging_face("llama"), &config, &|_| {}).err().unwrap().to_string();
    assert!(error.contains("must have the vocabulary of its model"), "{error}");
}

fn load(checkpoint: &mtp::Checkpoint, config: &EngineConfig) -> Engine {
    let source = ModelSource::HuggingFace { path: checkpoint.path.clone(), tokenizer_json: None };
    Engine::load(&source, config, &|_| {}).unwrap()
}

#[test]
fn answers_are_the_same_with_drafts_of_a_head() {
    let int8 = PagedAttentionConfig { cache_type: PagedCacheType::Int8, ..pool_of(4000, 16) };
    let dir = tempfile::tempdir().unwrap();
    let kv_tier = Some(KvTierConfig::File { path: dir.path().to_owned(), max_bytes: 1 << 30 });
    let ways = [
        ("glm4-moe", "exact", exact()),
        ("glm4-moe", "a tier", EngineConfig { kv_tier, paged_attention: pool_of(400, 8), ..exact() }),
        ("deepseek-v3", "exact", exact()),
        ("glm4-moe-lite", "fast", fast()),
        ("glm4-moe", "an int8 cache", EngineConfig { paged_attention: int8, ..exact() }),
        ("glm4-moe", "without prefix cache", EngineConfig { prefix_caching: false, ..exact() }),
        ("glm4-moe", "chunks of seven tokens", EngineConfig { max_num_batched_tokens: 7, ..exact() }),
        ("glm4-moe", "a tight pool", EngineConfig { paged_attention: pool_of(200, 8), ..exact() }),
        ("deepseek-v3", "whole contexts reserved", EngineConfig { no_paged_attn: true, ..exact() }),
        ("qwen3-next", "exact", exact()),
        ("qwen3-next", "chunks of seven tokens", EngineConfig { max_num_batched_tokens: 7, ..exact() }),
    ];
    for (family, way, config) in ways {
        let checkpoint = mtp::checkpoint(family, true);
        let (expected, _) = ask(&load(&checkpoint, &config));
        for choice in [DraftChoice::All, DraftChoice::Auto] {
            let engine = load(&checkpoint, &by_head(choice, &config));
            for (number, (got, expected)) in ask(&engine).0.iter().zip(&expected).enumerate() {
                assert_eq!(got, expected, "{family}, {way}, {choice:?} drafts of its head, request {number}");
            }
            let drafts = stats(&engine).drafts;
            assert!(drafts.tokens > 50 || choice == DraftChoice::Auto, "{family}, {way}: {} drafts", drafts.tokens);
            // A small budget leaves little room for drafts.
            let least = if config.max_num_batched_tokens < 64 { 1 } else { 6 };
            assert!(drafts.accepted >= least || choice == DraftChoice::Auto, "{family}, {way}: {} were right", drafts.accepted);
            assert!(drafts.accepted < drafts.tokens || drafts.tokens == 0, "{family}, {way}: a head that is always right");
        }
    }
}

#[test]
fn the_head_of_a_gguf_file_guesses_what_that_of_its_folder_does() {
    let checkpoint = mtp::checkpoint("glm4-moe", true);
    let file = mtp_gguf::write(&checkpoint, "glm4-moe", "glm4moe");
    let source = ModelSource::Gguf { files: vec![file], tokenizer_dir: None, tokenizer_json: None };
    let config = by_head(DraftChoice::All, &exact());
    let of_file = Engine::load(&source, &config, &|_| {}).unwrap();
    let of_folder = load(&checkpoint, &config);
    assert_eq!(ask(&of_file), ask(&of_folder));
    let drafts = [&of_file, &of_folder].map(|engine| stats(engine).drafts);
    assert_eq!((drafts[0].tokens, drafts[0].accepted), (drafts[1].tokens, drafts[1].accepted));
    assert!(drafts[0].accepted > 5);
}

#[test]
fn a_head_is_in_the_plan() {
    for family in mtp::FAMILIES {
        let checkpoint = mtp::checkpoint(family, true);
        let (alone, with) = (load(&checkpoint, &exact()), load(&checkpoint, &by_head(DraftChoice::All, &exact())));
        let source = ModelSource::HuggingFace { path: checkpoint.path.clone(), tokenizer_json: None };
        let planned = Engine::memory_plan(&source, &by_head(DraftChoice::All, &exact()), None).unwrap();
        assert_eq!(planned.devices[0].weights, with.weight_bytes());
        assert_eq!(with.memory_ledger().devices[0].weights, with.weight_bytes());
        // Its layer, and neither a token embedding nor an output projection.
        let layer = |name: &&String| name.starts_with(&format!("model.layers.{}.", checkpoint.config["num_hidden_layers"]));
        let values: usize = checkpoint.tensors.iter().filter(|(name, _)| layer(name)).map(|(_, (_, values))| values.len()).sum();
        let (bytes, least) = (with.weight_bytes() - alone.weight_bytes(), 4 * values as u64);
        assert!((least..least + least / 4).contains(&bytes), "{family}: {bytes} bytes for {values} values");
        let layers = match checkpoint.config["full_attention_interval"].as_u64() {
            Some(interval) => checkpoint.config["num_hidden_layers"].as_u64().unwrap() / interval,
            None => checkpoint.config["num_hidden_layers"].as_u64().unwrap(),
        };
        assert_eq!(with.block_bytes() * layers, alone.block_bytes() * (layers + 1), "{family}");
    }
}

#[test]
fn a_head_that_cannot_draft_is_refused_by_its_reason() {
    let refused = |path: std::path::PathBuf, config: &EngineConfig| {
        let source = ModelSource::HuggingFace { path, tokenizer_json: None };
        Engine::load(&source, config, &|_| {}).err().unwrap().to_string()
    };
    let golden = |name: &str| common::golden_dir().join("text").join(name);
    let config = by_head(DraftChoice::All, &exact());
    let error = refused(golden("llama"), &config);
    assert!(error.contains("this llama has no heads") && error.contains("which_draft"), "{error}");
    let error = refused(golden("qwen3-next"), &config);
    assert!(error.contains("the head that predicts further tokens was left out"), "{error}");
    // It says that it has one, and its files leave it out.
    let without = mtp::checkpoint("glm4-moe", false);
    let error = refused(without.path.clone(), &config);
    assert!(error.contains("there is no tensor `model.layers.2.eh_proj.weight`"), "{error}");
    let with = mtp::checkpoint("glm4-moe", true);
    let error = refused(with.path.clone(), &EngineConfig { no_kv_cache: true, ..config.clone() });
    assert!(error.contains("no_kv_cache"), "{error}");
    let draft = DraftModel { source: hugging_face("llama"), architecture: None, in_situ_quant: None };
    let error = refused(with.path.clone(), &EngineConfig { draft: Some(draft), ..config.clone() });
    assert!(error.contains("leave one out"), "{error}");
    let other = mtp::checkpoint("deepseek-v3", true);
    let source = Some(ModelSource::HuggingFace { path: other.path.clone(), tokenizer_json: None });
    let error = refused(with.path.clone(), &EngineConfig { mtp: Some(MtpHead { source }), ..config.clone() });
    assert!(error.contains("mtp_model is of another model"), "{error}");
    // Of the files that have it, it goes with those that have not.
    let source = Some(ModelSource::HuggingFace { path: with.path.clone(), tokenizer_json: None });
    let engine = load(&without, &EngineConfig { mtp: Some(MtpHead { source }), ..config });
    ask(&engine);
    assert!(stats(&engine).drafts.accepted > 5);
}

fn fast() -> EngineConfig {
    EngineConfig { dtype: ModelDType::Auto, deterministic: true, ..EngineConfig::default() }
}

#[test]
fn exact_answers_are_the_same_with_drafts() {
    for model in ["llama", "gemma3", "mistral-window"] {
        check(model, "exact", &exact());
    }
}

/// Behind a wrong draft their states go back to where the step began.
#[test]
fn answers_of_recurrent_models_are_the_same_with_drafts() {
    for model in ["lfm2", "qwen3-next", "granitemoehybrid"] {
        check(model, STATES, &exact());
    }
    let tight = EngineConfig { paged_attention: pool_of(200, 8), ..exact() };
    let chunks = EngineConfig { max_num_batched_tokens: 7, max_num_seqs: 3, ..exact() };
    for (way, config) in [("chunks of seven tokens", chunks), ("a tight pool", tight)] {
        check("qwen3-next", way, &config);
    }
}

#[test]
fn fast_answers_are_the_same_with_drafts() {
    for model in ["llama", "qwen3.gguf"] {
        check(model, "fast", &fast());
    }
}

#[test]
fn answers_are_the_same_with_drafts_however_they_are_served() {
    let int8 = PagedAttentionConfig { cache_type: PagedCacheType::Int8, ..pool_of(4000, 16) };
    let configs = [
        ("blocks of 8", EngineConfig { paged_attention: pool_of(4000, 8), ..exact() }),
        ("an int8 cache", EngineConfig { paged_attention: int8, ..exact() }),
        ("without prefix cache", EngineConfig { prefix_caching: false, ..exact() }),
        ("three at a time", EngineConfig { max_num_seqs: 3, ..exact() }),
        ("chunks of seven tokens", EngineConfig { max_num_batched_tokens: 7, ..exact() }),
        ("whole contexts reserved", EngineConfig { no_paged_attn: true, ..exact() }),
    ];
    for (way, config) in configs {
        check("llama", way, &config);
    }
}

#[test]
fn preempted_answers_are_the_same_with_drafts() {
    for (model, prefix_caching) in [("llama", true), ("llama", false), ("mistral-window", true)] {
        let config = EngineConfig { prefix_caching, paged_attention: pool_of(200, 8), ..exact() };
        let engine = start(model, &config);
        ask(&engine);
        assert!(stats(&engine).preemptions > 0, "the pool was not tight");
        check(model, "a tight pool", &config);
    }
}

#[test]
fn answers_without_a_kv_cache_are_the_same_with_drafts() {
    check("llama", "without KV cache", &EngineConfig { no_kv_cache: true, ..exact() });
}

#[derive(Debug)]
struct Broken(AtomicUsize);

impl Proposer for Broken {
    fn propose(&self, _: &[u32], _: usize, drafts: &mut Vec<u32>) -> usize {
        // An id that no model has, then a panic.
        drafts.extend([3, u32::MAX, 4]);
        assert_eq!(self.0.fetch_add(1, Relaxed), 0, "the proposer fails on purpose");
        0
    }
}

#[test]
fn a_proposer_that_fails_is_asked_no_more_and_ends_no_request() {
    let expected = ask(&start("llama", &exact()));
    let broken = Arc::new(Broken(AtomicUsize::new(0)));
    let engine =
        start("llama", &EngineConfig { speculation: Some(Speculation::always(Arc::<Broken>::clone(&broken))), ..exact() });
    assert_eq!(ask(&engine), expected);
    assert_eq!(broken.0.load(Relaxed), 2, "asked again after it has failed");
}
