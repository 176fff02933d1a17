//! Tokens that are drawn where the logits lie, on the kernels' real source compiled for the CPU: those that the host would draw.

use std::sync::Arc;

use device::{
    Backend, DType, Device, DeviceSampler, EmbedArgs, EmbeddingTable, Phases, RowSampling, Tensor, TokenSet, WeightView,
    cuda::CudaBackend, mmap::Bytes,
};
use engine::{
    Engine, EngineConfig, FinishReason, GenerationConfig, GenerationRequest, Grammar, Proposer, ResolvedSampling, Sampler,
    SamplingParams, Speculation,
};
use kernel_tests::{EmulatedDriver, Order, random::Rng};

use crate::common::{
    hugging_face,
    serving::{exact, greedy, pool_of, prompt, request, run_together, start, stats},
};

const VOCAB_SIZE: usize = 700;

fn sampler(params: &SamplingParams, seed: u64) -> Sampler {
    let resolved = ResolvedSampling::new(params, &GenerationConfig::default(), VOCAB_SIZE).unwrap();
    Sampler::new(Arc::new(resolved), seed, &[], Arc::default())
}

fn backend() -> CudaBackend {
    CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap()
}

/// Rows of logits on the device.
fn tensor(backend: &CudaBackend, rows: &[Vec<f32>]) -> Tensor {
    let bytes = rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
    let table = WeightView::new(DType::F32, rows.len(), VOCAB_SIZE, Bytes::from_vec(bytes)).unwrap();
    let ids: Vec<u32> = (0..rows.len() as u32).collect();
    let mut out = backend.alloc(rows.len(), VOCAB_SIZE).unwrap();
    backend.embed(
        &EmbedArgs { table: EmbeddingTable::Stored(&table), token_ids: &ids, beyond: None, adapters: &[], scale: 1.0 },
        &mut out,
    );
    out
}

fn logits(rng: &mut Rng) -> Vec<f32> {
    rng.floats(VOCAB_SIZE).iter().map(|x| x * 3.0).collect()
}

#[test]
fn a_seed_gives_the_same_tokens_on_the_device_and_on_the_host() {
    let d = SamplingParams::default;
    let all = [
        SamplingParams { temperature: Some(0.0), logprobs: Some(3), ..d() },
        d(),
        SamplingParams { temperature: Some(0.4), logprobs: Some(0), ..d() },
        SamplingParams { top_k: Some(5), ..d() },
        SamplingParams { top_k: Some(300), ..d() },
        SamplingParams { top_p: Some(0.6), ..d() },
        SamplingParams { top_p: Some(0.95), temperature: Some(2.0), ..d() },
        SamplingParams { min_p: Some(0.2), ..d() },
        SamplingParams { temperature: Some(1.5), top_k: Some(50), top_p: Some(0.8), min_p: Some(0.02), ..d() },
    ];
    let (backend, mut rng) = (backend(), Rng::new(1));
    let mut samplers: Vec<_> = all.iter().zip(3..).map(|(params, seed)| [sampler(params, seed), sampler(params, seed)]).collect();
    for round in 0..12_usize {
        let mut rows: Vec<_> = all.iter().map(|_| logits(&mut rng)).collect();
        let on_device = tensor(&backend, &rows);
        let asked: Vec<_> = samplers.iter_mut().map(|[device, _]| device.row_sampling(round, None).unwrap()).collect();
        let sampling: Vec<_> = asked.iter().map(|(row, _)| Some(*row)).collect();
        let sampled = backend.sample(&on_device, &sampling, 3);
        for (((params, [device, host]), row), sampled) in all.iter().zip(&mut samplers).zip(&mut rows).zip(sampled) {
            let (actual, expected) = (device.accept(sampled.unwrap()), host.sample(row, round, None).unwrap());
            assert_eq!(actual.token_id, expected.token_id, "round {round}: {params:?}");
            let (Some(actual), Some(expected)) = (&actual.logprobs, &expected.logprobs) else {
                assert!(actual.logprobs.is_none() && expected.logprobs.is_none());
                continue;
            };
            assert!((actual.logprob - expected.logprob).abs() < 1e-4);
            let ids = |top: &[(u32, f32)]| top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(ids(&actual.top), ids(&expected.top));
            assert!(actual.top.iter().zip(&expected.top).all(|(a, e)| (a.1 - e.1).abs() < 1e-4));
        }
    }
}

#[test]
fn masks_forbid_the_same_tokens_on_the_device_and_on_the_host() {
    let d = SamplingParams::default;
    let all = [
        SamplingParams { temperature: Some(0.0), logprobs: Some(3), ..d() },
        d(),
        SamplingParams { top_k: Some(5), ..d() },
        SamplingParams { top_p: Some(0.6), temperature: Some(2.0), ..d() },
        SamplingParams { temperature: Some(1.5), top_k: Some(50), top_p: Some(0.8), min_p: Some(0.02), ..d() },
    ];
    let (backend, mut rng) = (backend(), Rng::new(4));
    for every in [1, 2, 40, 600] {
        for (position, params) in all.iter().enumerate() {
            let mut rows: Vec<_> = (0..4).map(|_| logits(&mut rng)).collect();
            let on_device = tensor(&backend, &rows);
            let sets: Vec<_> = (0..4).map(|first| TokenSet::new((first..VOCAB_SIZE as u32).step_by(every), VOCAB_SIZE)).collect();
            // The last row has none.
            let masks: Vec<_> = sets.iter().take(3).map(|set| Some(set.mask())).chain([None]).collect();
            let mut samplers: Vec<_> = (0..4).map(|seed| sampler(params, seed)).collect();
            let asked =
                samplers.iter_mut().zip(&masks).map(|(sampler, mask)| sampler.row_sampling(position, *mask).map(|(row, _)| row));
            let asked: Vec<_> = asked.collect();
            let sampled = backend.sample(&on_device, &asked, 3);
            for (((sampler, mask), row), sampled) in samplers.iter_mut().zip(masks).zip(&mut rows).zip(sampled) {
                let (actual, expected) = (sampler.accept(sampled.unwrap()), sampler.sample(row, position, mask).unwrap());
                assert_eq!(actual.token_id, expected.token_id, "one in {every}: {params:?}");
                assert!(mask.is_none_or(|mask| mask.allows(actual.token_id)));
                let (Some(actual), Some(expected)) = (&actual.logprobs, &expected.logprobs) else { continue };
                // Of the model, forbidden tokens included.
                assert!((actual.logprob - expected.logprob).abs() < 1e-4);
                assert!(actual.top.iter().zip(&expected.top).all(|(a, e)| a.0 == e.0 && (a.1 - e.1).abs() < 1e-4));
            }
        }
    }
    let (nothing, on_device) = (TokenSet::new([], VOCAB_SIZE), tensor(&backend, &[logits(&mut rng)]));
    let (asked, _) = sampler(&d(), 1).row_sampling(0, Some(nothing.mask())).unwrap();
    assert_eq!(backend.sample(&on_device, &[Some(asked)], 0), [None]);
}

#[test]
fn a_row_that_is_not_finite_has_no_token_and_the_others_do() {
    let (backend, mut rng) = (backend(), Rng::new(2));
    let mut rows = [logits(&mut rng), logits(&mut rng)];
    rows[1][300] = f32::NAN;
    let greedy = RowSampling { temperature: None, top_k: None, top_p: 1.0, min_p: 0.0, uniform: 0.0, mask: None };
    let mut on_device = tensor(&backend, &rows);
    let sampled = backend.sample(&on_device, &[Some(greedy); 2], 0);
    assert_eq!((sampled[0].is_some(), sampled[1].is_none()), (true, true));
    backend.fetch_rows(&mut on_device, &[1]);
    let error = sampler(&SamplingParams::default(), 1).sample(on_device.row_mut(1), 0, None).unwrap_err().to_string();
    assert!(error.contains("token 300") && error.contains("NaN"), "{error}");
}

#[test]
fn what_changes_the_logits_is_left_to_the_host() {
    let d = SamplingParams::default;
    for params in [
        SamplingParams { presence_penalty: Some(0.5), ..d() },
        SamplingParams { repetition_penalty: Some(1.2), ..d() },
        SamplingParams { logit_bias: vec![(3, 1.0)], ..d() },
    ] {
        let [mut asked, mut alone] = [sampler(&params, 5), sampler(&params, 5)];
        assert_eq!(asked.row_sampling(0, None), None, "{params:?}");
        let mut row = logits(&mut Rng::new(3));
        let token = |sampler: &mut Sampler, row: &mut [f32]| sampler.sample(row, 0, None).unwrap().token_id;
        assert_eq!(token(&mut asked, &mut row), token(&mut alone, &mut row), "{params:?}");
    }
}

#[test]
#[ignore = "models in the emulation; make test-long"]
fn an_engine_gives_the_tokens_of_the_processor_whoever_draws_them() {
    let config = EngineConfig { paged_attention: pool_of(512, 16), max_num_seqs: 4, max_num_batched_tokens: 64, ..exact() };
    let requests = || {
        let odd = || Some((1..512).step_by(2).collect::<Vec<u32>>());
        let drawn = SamplingParams { temperature: Some(1.0), seed: Some(3), ..greedy(12) };
        let all = [
            greedy(12),
            drawn.clone(),
            SamplingParams { presence_penalty: Some(1.0), ..drawn.clone() },
            SamplingParams { top_p: Some(0.8), logprobs: Some(2), ..drawn.clone() },
            SamplingParams { allowed_token_ids: odd(), ..greedy(12) },
            SamplingParams { allowed_token_ids: odd(), top_k: Some(20), min_p: Some(0.01), logprobs: Some(2), ..drawn.clone() },
            SamplingParams { allowed_token_ids: odd(), presence_penalty: Some(1.0), ..drawn },
        ];
        let with = |(i, sampling)| GenerationRequest { sampling, ..request(i, 20 + i, 12) };
        all.into_iter().enumerate().map(with).collect::<Vec<_>>()
    };
    let on_device: Arc<dyn Backend> = Arc::new(backend());
    let cuda = Engine::load_onto(&on_device, &hugging_face("llama"), &config, &|_| {}).unwrap();
    let answers = run_together(&cuda, requests());
    assert!(answers[4..].iter().flatten().all(|token| token % 2 == 1), "{answers:?}");
    assert_eq!(answers, run_together(&start("llama", &config), requests()));
}

#[test]
fn a_grammar_holds_where_the_device_draws() {
    let config = EngineConfig { paged_attention: pool_of(512, 16), max_num_seqs: 6, max_num_batched_tokens: 64, ..exact() };
    let grammar = || Some(Grammar::Regex("[a-f]{3}-[0-9]{2}[xyz]".into()));
    let held = |sampling| SamplingParams { grammar: grammar(), ignore_eos: false, ..sampling };
    let drawn = SamplingParams { temperature: Some(1.0), seed: Some(3), ..greedy(12) };
    let same = [
        held(greedy(12)),
        held(SamplingParams { logprobs: None, ..greedy(12) }),
        held(SamplingParams { top_k: Some(200), ..drawn.clone() }),
        held(SamplingParams { top_p: Some(0.9), logprobs: Some(2), ..drawn.clone() }),
        held(SamplingParams { presence_penalty: Some(1.0), ..drawn.clone() }),
    ];
    // What the processor draws from all tokens first, the device draws from the mask at once.
    let all = [&same[..], &[held(drawn)]].concat();
    let on_device: Arc<dyn Backend> = Arc::new(backend());
    let cuda = Engine::load_onto(&on_device, &hugging_face("llama"), &config, &|_| {}).unwrap();
    let cpu = start("llama", &config);
    let answers = |engine: &Engine| -> Vec<(String, FinishReason)> {
        let request =
            |(i, sampling): (usize, &SamplingParams)| GenerationRequest { sampling: sampling.clone(), ..request(i, 20 + i, 12) };
        let streams: Vec<_> = all.iter().enumerate().map(|case| engine.submit(request(case)).unwrap()).collect();
        let choice = |stream: engine::RequestStream| stream.wait().unwrap().choices.remove(0);
        streams.into_iter().map(choice).map(|choice| (choice.text, choice.finish_reason)).collect()
    };
    let (actual, expected) = (answers(&cuda), answers(&cpu));
    assert_eq!(actual[..same.len()], expected[..same.len()]);
    for (text, reason) in actual {
        let bytes = text.as_bytes();
        assert!(reason == FinishReason::Stop && bytes.len() == 7 && bytes[3] == b'-' && b"xyz".contains(&bytes[6]), "{text}");
    }
}

/// Proposes what comes, and in places what does not, by grammars or by chance.
#[derive(Debug)]
struct Known(Vec<Vec<u32>>);

impl Proposer for Known {
    fn propose(&self, token_ids: &[u32], _: usize, drafts: &mut Vec<u32>) -> usize {
        if let Some(known) = self.0.iter().find(|known| known.starts_with(token_ids)) {
            drafts.extend(known[token_ids.len()..].iter().take(3));
            drafts.extend([token_ids[token_ids.len() - 2], 40].iter().take(token_ids.len() % 3));
        }
        0
    }
}

/// A mask for each drafted row: where the drafts before are right, what the grammar allows behind them.
#[test]
#[ignore = "half a minute; make test-long"]
fn grammars_and_drafts_go_together_where_the_device_draws() {
    let held = |grammar: &str, sampling: SamplingParams| {
        let grammar = Some(Grammar::Regex(grammar.into()));
        SamplingParams { grammar, ignore_eos: false, ..sampling }
    };
    let drawn = SamplingParams { temperature: Some(1.0), seed: Some(3), ..greedy(40) };
    let (one, two) = ("((ab|Qcd|[0-3])-){6}", "(red |blue ){2}(red ){5}!");
    let all = [
        held(one, drawn.clone()),
        held(one, SamplingParams { top_k: Some(200), logprobs: Some(2), ..drawn.clone() }),
        held(two, SamplingParams { logprobs: None, ..greedy(40) }),
        held(two, SamplingParams { top_p: Some(0.9), ..drawn.clone() }),
        held(two, SamplingParams { presence_penalty: Some(1.0), ..drawn }),
    ];
    let on_device: Arc<dyn Backend> = Arc::new(backend());
    let answers = |speculation: Option<Speculation>| {
        let pool = pool_of(1024, 16);
        let config = EngineConfig { paged_attention: pool, max_num_seqs: 6, max_num_batched_tokens: 96, speculation, ..exact() };
        let engine = Engine::load_onto(&on_device, &hugging_face("llama"), &config, &|_| {}).unwrap();
        let request = |(i, sampling): (usize, &SamplingParams)| GenerationRequest {
            sampling: sampling.clone(),
            return_token_ids: true,
            ..request(i, 20 + i, 40)
        };
        let streams: Vec<_> = all.iter().enumerate().map(|case| engine.submit(request(case)).unwrap()).collect();
        let choice = |stream: engine::RequestStream| stream.wait().unwrap().choices.remove(0);
        let answers: Vec<_> =
            streams.into_iter().map(choice).map(|choice| (choice.token_ids, choice.text, choice.finish_reason)).collect();
        (answers, stats(&engine).drafts)
    };
    let (expected, none) = answers(None);
    let known = expected.iter().enumerate().map(|(i, (answer, ..))| [&prompt(i, 20 + i)[..], answer].concat()).collect();
    let (actual, drafts) = answers(Some(Speculation::always(Arc::new(Known(known)))));
    assert_eq!(actual, expected);
    assert!(expected.iter().all(|(.., reason)| *reason == FinishReason::Stop), "{expected:?}");
    assert_eq!(none.tokens, 0, "forced text is not drafted on a device that draws");
    let (right, all) = (drafts.accepted, drafts.tokens);
    assert!(right > 40 && right < all, "{right} of {all} drafts were right");
}
