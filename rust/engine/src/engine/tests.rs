//! A backend that fails on purpose: what ends, what goes on, and what is left in the pool.

use std::{
    ops::ControlFlow,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use device::{
    AttentionArgs, Backend, BackendInfo, CacheEngine, DType, DeviceError, EmbedArgs, GateUpArgs, KvCacheSpec, Linear,
    LinearOptions, Norm, Phases, Precision, Projection, ResidualArgs, RopeArgs, StepMetadata, Tensor, TokenMask, TokenSet,
    WeightView, WorkspaceShape,
    cpu::{CpuBackend, Isa},
};

use paged::RequestId;

use super::{
    load::load_with_backend,
    thread::{Command, EngineThread},
    *,
};
use crate::{
    CompletionChoice, Event, FinishReason, OutputEvent, Prompt, Proposer, SamplingParams, ServiceParams, Speculation,
    sampler::Sampled,
};

const NO_ROW: u32 = u32::MAX;

/// Panics in the next attention when told to, and spoils one row of what logits are made from.
struct Failing {
    inner: CpuBackend,
    panics: AtomicBool,
    bad_row: AtomicU32,
    /// Whether it finds the tokens of the largest logits, and of how many rows it has.
    finds: AtomicBool,
    num_found: AtomicUsize,
    /// Tokens that were computed.
    num_tokens: AtomicUsize,
    /// Of those, whose logits were.
    num_logit_rows: AtomicUsize,
}

impl Backend for Failing {}

impl device::Device for Failing {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn alloc(&self, max_rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        self.inner.alloc(max_rows, cols)
    }

    fn alloc_kv_cache(&self, spec: &KvCacheSpec) -> Result<CacheEngine, DeviceError> {
        self.inner.alloc_kv_cache(spec)
    }

    fn load_linear(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        self.inner.load_linear(weight, options)
    }

    fn linear_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64 {
        self.inner.linear_bytes(dtype, shape, precision)
    }

    fn workspace_bytes(&self, shape: &WorkspaceShape) -> u64 {
        self.inner.workspace_bytes(shape)
    }
}

impl Phases for Failing {
    fn embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor) {
        self.num_tokens.fetch_add(args.token_ids.len(), SeqCst);
        self.inner.embed(args, out);
    }

    fn norm_linear(&self, x: &Tensor, norm: Option<&Norm>, projections: &mut [Projection<'_>], step: &StepMetadata) {
        self.inner.norm_linear(x, norm, projections, step);
    }

    fn greedy_tokens(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        lm_head: &Linear,
        masks: &[Option<TokenMask<'_>>],
        tokens: &mut Vec<u32>,
    ) -> bool {
        if !self.finds.load(SeqCst) {
            return false;
        }
        let mut logits = Tensor::new(x.rows(), lm_head.out_features).unwrap();
        self.inner.logits(x, norm, lm_head, &[], &mut logits);
        let found = |row| {
            let logits: &[f32] = logits.row(row);
            let mask = masks.get(row).copied().flatten();
            let allowed = (0..).zip(logits).filter(|(token, _)| mask.is_none_or(|mask| mask.allows(*token)));
            let best = allowed.reduce(|best, next| if next.1 > best.1 { next } else { best });
            best.filter(|_| logits.iter().all(|v| v.is_finite())).map(|(token, _)| token)
        };
        let Some(found) = (0..x.rows()).map(found).collect() else { return false };
        *tokens = found;
        self.num_found.fetch_add(tokens.len(), SeqCst);
        true
    }

    fn rope_and_cache(&self, args: RopeArgs<'_>, step: &StepMetadata) {
        self.inner.rope_and_cache(args, step);
    }

    fn attention(&self, args: AttentionArgs<'_>, step: &StepMetadata) {
        assert!(!self.panics.swap(false, SeqCst), "the backend fails on purpose");
        self.inner.attention(args, step);
    }

    fn linear_residual(&self, args: ResidualArgs<'_>, step: &StepMetadata) {
        self.inner.linear_residual(args, step);
    }

    fn gate_up(&self, args: GateUpArgs<'_>, step: &StepMetadata) {
        self.inner.gate_up(args, step);
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) {
        self.num_logit_rows.fetch_add(rows.len(), SeqCst);
        self.inner.gather_rows(x, rows, out);
        let bad_row = self.bad_row.load(SeqCst);
        if let Some(at) = rows.iter().position(|row| *row == bad_row) {
            self.bad_row.store(NO_ROW, SeqCst);
            let cols = out.cols();
            out.as_mut_slice()[at * cols..][..cols].fill(f32::NAN);
        }
    }

    fn fetch(&self, x: &mut Tensor) {
        self.inner.fetch(x);
    }
}

fn exact() -> EngineConfig {
    EngineConfig { dtype: ModelDType::F32, max_num_seqs: 2, ..EngineConfig::default() }
}

fn start() -> (Engine, EngineThread, Arc<Failing>) {
    start_with(&exact())
}

fn start_with(config: &EngineConfig) -> (Engine, EngineThread, Arc<Failing>) {
    let inner = CpuBackend::new(Isa::detect(), 1).unwrap();
    let backend = Arc::new(Failing {
        inner,
        panics: AtomicBool::new(false),
        bad_row: AtomicU32::new(NO_ROW),
        finds: AtomicBool::new(false),
        num_found: AtomicUsize::new(0),
        num_tokens: AtomicUsize::new(0),
        num_logit_rows: AtomicUsize::new(0),
    });
    let path = goldens::dir().join("text/llama");
    let source = ModelSource::HuggingFace { path, tokenizer_json: None };
    let dynamic: Arc<dyn Backend> = Arc::<Failing>::clone(&backend);
    let (shared, thread) = load_with_backend(&source, config, &dynamic, &|_| {}).unwrap();
    (Engine { shared: Arc::new(shared) }, thread, backend)
}

fn request(i: u32, max_tokens: usize) -> GenerationRequest {
    let sampling =
        SamplingParams { temperature: Some(0.0), max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::default() };
    GenerationRequest::new(Prompt::TokenIds((0..40).map(|j| (i * 97 + j * 31) % 400 + 10).collect()), sampling)
}

fn answer(stream: RequestStream) -> CompletionChoice {
    stream.wait().unwrap().choices.remove(0)
}

fn assert_clean(engine: &Engine) {
    let stats = engine.kv_cache_stats().unwrap();
    assert_eq!((stats.blocks_used, stats.requests_running, stats.requests_waiting), (0, 0, 0));
    assert_eq!(stats.blocks_free, stats.blocks_total);
}

#[test]
fn a_panic_in_a_step_ends_its_requests_with_text_and_cause_and_no_others() {
    let (engine, thread, backend) = start();
    let serving = thread::spawn(move || thread.run());
    let expected = answer(engine.submit(request(3, 30)).unwrap()).text;
    let running = [1, 2].map(|i| engine.submit(request(i, 400)).unwrap());
    let waiting = engine.submit(request(3, 30)).unwrap();
    let mut collectors = running.each_ref().map(RequestStream::collector);
    for (stream, collector) in running.iter().zip(&mut collectors) {
        let event = stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time");
        assert!(matches!(event, OutputEvent::Delta { .. }));
        assert!(collector.push(event).is_none());
    }
    backend.panics.store(true, SeqCst);
    for (stream, mut collector) in running.into_iter().zip(collectors) {
        let completion = loop {
            let event = stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time");
            if let Some(completion) = collector.push(event) {
                break completion;
            }
        };
        let choice = &completion.choices[0];
        assert_eq!(choice.finish_reason, FinishReason::Error);
        assert!(choice.error.as_ref().unwrap().contains("the backend fails on purpose"), "{:?}", choice.error);
        assert!(!choice.text.is_empty());
    }
    let choice = answer(waiting);
    assert_eq!((choice.finish_reason, choice.error, &choice.text), (FinishReason::Length, None, &expected));
    assert_clean(&engine);
    assert_eq!(answer(engine.submit(request(3, 30)).unwrap()).text, expected);
    drop(engine);
    serving.join().unwrap();
}

#[test]
fn streams_that_are_dropped_at_any_moment_end_no_other() {
    let (engine, thread, _) = start_with(&EngineConfig { max_num_seqs: 8, ..exact() });
    let serving = thread::spawn(move || thread.run());
    let done = AtomicBool::new(false);
    let choices: Vec<_> = thread::scope(|scope| {
        for i in 0..3 {
            let (engine, done) = (&engine, &done);
            scope.spawn(move || {
                while !done.load(SeqCst) {
                    let stream = engine.submit(GenerationRequest { stream: true, ..request(i, 400) }).unwrap();
                    stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time");
                }
            });
        }
        let choices = (0..20).map(|_| answer(engine.submit(request(9, 300)).unwrap())).collect();
        done.store(true, SeqCst);
        choices
    });
    for choice in choices {
        assert_eq!((choice.finish_reason, choice.error), (FinishReason::Length, None));
    }
    assert_clean(&engine);
    drop(engine);
    serving.join().unwrap();
}

#[test]
fn a_panic_in_the_books_ends_every_request_and_not_the_thread() {
    let (engine, mut thread, _) = start();
    let streams = [1, 2, 3].map(|i| engine.submit(request(i, 400)).unwrap());
    for _ in 0..5 {
        assert!(thread.turn());
    }
    let why = thread.guarded(|_| panic!("the books are torn")).unwrap_err();
    assert_eq!(why, "the books are torn");
    for stream in streams {
        let choice = answer(stream);
        assert_eq!((choice.finish_reason, choice.error.as_deref()), (FinishReason::Error, Some("the books are torn")));
    }
    let serving = thread::spawn(move || thread.run());
    assert_clean(&engine);
    assert_eq!(answer(engine.submit(request(1, 20)).unwrap()).finish_reason, FinishReason::Length);
    assert_clean(&engine);
    drop(engine);
    serving.join().unwrap();
}

#[test]
fn a_stream_ends_though_its_engine_is_dropped_in_a_pause() {
    let (engine, thread, _) = start();
    let serving = thread::spawn(move || thread.run());
    engine.pause().unwrap();
    let stream = engine.submit(request(1, 5)).unwrap();
    drop(engine);
    let mut collector = stream.collector();
    let completion = loop {
        let event = stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time");
        if let Some(completion) = collector.push(event) {
            break completion;
        }
    };
    assert_eq!(completion.choices[0].finish_reason, FinishReason::Length);
    drop(stream);
    serving.join().unwrap();
}

#[test]
fn a_bad_row_of_prompt_log_probabilities_ends_its_request_alone() {
    let (engine, thread, backend) = start();
    let mut scored = request(1, 10);
    scored.echo_prompt = true;
    scored.sampling.logprobs = Some(1);
    let scored = engine.submit(scored).unwrap();
    let other = engine.submit(request(2, 10)).unwrap();
    backend.bad_row.store(7, SeqCst);
    let serving = thread::spawn(move || thread.run());
    let bad = answer(scored);
    assert_eq!(bad.finish_reason, FinishReason::Error);
    assert!(bad.error.as_ref().unwrap().contains("NaN"), "{:?}", bad.error);
    assert_eq!(answer(other).finish_reason, FinishReason::Length);
    assert_clean(&engine);
    drop(engine);
    serving.join().unwrap();
}

#[test]
fn tokens_that_the_backend_finds_are_those_of_the_logits() {
    let (engine, thread, backend) = start_with(&EngineConfig { max_num_seqs: 8, ..exact() });
    let serving = thread::spawn(move || thread.run());
    let texts = || -> Vec<String> {
        let n_choices = |i| if i == 1 { 2 } else { 1 };
        let request = |i| {
            let mut request = GenerationRequest { n_choices: n_choices(i), ..request(i, 25) };
            // Every other token, beside rows without a mask.
            request.sampling.allowed_token_ids = (i == 2).then(|| (1..512).step_by(2).collect());
            request
        };
        let streams = [0, 1, 2].map(|i| engine.submit(request(i)).unwrap());
        streams.into_iter().flat_map(|stream| stream.wait().unwrap().choices).map(|choice| choice.text).collect()
    };
    let expected = texts();
    assert_eq!(expected.len(), 4);
    assert_eq!(backend.num_found.load(SeqCst), 0);
    backend.finds.store(true, SeqCst);
    assert_eq!(texts(), expected);
    // Both choices draw from the last row of their prompt.
    assert_eq!(backend.num_found.load(SeqCst), 4 * 25 - 1);
    drop(engine);
    serving.join().unwrap();
}

#[test]
fn a_bad_row_among_those_whose_tokens_the_backend_finds_ends_its_request_alone() {
    let (engine, thread, backend) = start();
    backend.finds.store(true, SeqCst);
    let [bad, other] = [1, 2].map(|i| engine.submit(request(i, 10)).unwrap());
    // The last of the first one's 40 tokens.
    backend.bad_row.store(39, SeqCst);
    let serving = thread::spawn(move || thread.run());
    let bad = answer(bad);
    assert_eq!(bad.finish_reason, FinishReason::Error);
    assert!(bad.error.as_ref().unwrap().contains("NaN"), "{:?}", bad.error);
    assert_eq!(answer(other).finish_reason, FinishReason::Length);
    assert_eq!(backend.num_found.load(SeqCst), 9);
    assert_clean(&engine);
    drop(engine);
    serving.join().unwrap();
}

#[test]
fn a_request_that_may_have_no_token_ends_alone_and_says_so() {
    for finds in [false, true] {
        let (mut engine, thread, backend) = start();
        backend.finds.store(finds, SeqCst);
        let shared = Arc::get_mut(&mut engine.shared).unwrap();
        let nothing = TokenSet::new([], shared.vocab_size);
        let (inbox, submitted) = mpsc::channel();
        let onward = std::mem::replace(&mut shared.inbox, inbox);
        let [none, other] = [1, 2].map(|i| engine.submit(request(i, 10)).unwrap());
        for allowed in [Some(Arc::new(nothing)), None] {
            let Ok(Command::Submit(mut request)) = submitted.recv() else { panic!("a submitted request") };
            request.allowed.only = allowed;
            onward.send(Command::Submit(request)).unwrap();
        }
        let serving = thread::spawn(move || thread.run());
        let none = answer(none);
        assert_eq!((none.finish_reason, none.text.as_str()), (FinishReason::Error, ""));
        assert!(none.error.as_ref().unwrap().contains("no token is allowed"), "{:?}", none.error);
        assert_eq!(answer(other).finish_reason, FinishReason::Length);
        drop((engine, onward));
        serving.join().unwrap();
    }
}

#[test]
fn a_choice_whose_first_token_fails_ends_alone() {
    for failed in 0..3 {
        let (engine, mut thread, _) = start_with(&EngineConfig { max_num_batched_tokens: 16, ..exact() });
        let stream = engine.submit(GenerationRequest { n_choices: 3, ..request(1, 10) }).unwrap();
        // Its prompt of 40 tokens is not computed yet.
        assert!(thread.turn());
        let token = |choice| {
            if choice == failed { Err("spoilt".to_owned()) } else { Ok(Sampled { token_id: 50, logprobs: None }) }
        };
        thread.branch_out(RequestId(0), (0..3).map(token).collect());
        while thread.scheduler().has_requests() {
            assert!(thread.turn());
        }
        for (index, choice) in stream.wait().unwrap().choices.into_iter().enumerate() {
            let end = if index == failed { (FinishReason::Error, Some("spoilt")) } else { (FinishReason::Length, None) };
            assert_eq!((choice.finish_reason, choice.error.as_deref()), end);
            assert_eq!(choice.text.is_empty(), index == failed);
        }
        assert_eq!(thread.scheduler().stats().blocks_used, 0);
    }
}

#[test]
fn choices_compute_their_prompt_once_and_hold_its_blocks_together() {
    for prefix_caching in [true, false] {
        let (engine, mut thread, backend) = start_with(&EngineConfig { prefix_caching, max_num_seqs: 4, ..exact() });
        // 100 tokens: three full blocks of 32, and a part of a fourth.
        let prompt = Prompt::TokenIds((0..100).map(|j| j * 31 % 400 + 10).collect());
        let stream = engine.submit(GenerationRequest { prompt, n_choices: 4, ..request(1, 20) }).unwrap();
        assert!(thread.turn());
        assert!(thread.turn());
        assert_eq!(backend.num_tokens.load(SeqCst), 100 + 4);
        let stats = thread.scheduler().stats();
        // Each writes to a fourth block of its own.
        assert_eq!((stats.blocks_shared, stats.blocks_saved, stats.blocks_used), (3, 9, 3 + 4), "{stats:?}");
        assert_eq!(stats.prefix_hit_tokens, 0, "a choice does not look for what it shares");
        while thread.scheduler().has_requests() {
            assert!(thread.turn());
        }
        assert_eq!(backend.num_tokens.load(SeqCst), 100 + 4 * 19, "the last token of each is not computed");
        let completion = stream.wait().unwrap();
        assert_eq!((completion.usage.cached_tokens, completion.usage.completion_tokens), (0, 80));
        assert_eq!(thread.scheduler().stats().blocks_used, 0);
    }
}

#[test]
fn an_engine_without_its_thread_says_so() {
    let (engine, thread, _) = start();
    drop(thread);
    let error = engine.kv_cache_stats().unwrap_err();
    assert!(error.to_string().contains("the engine thread has ended"), "{error}");
    assert!(engine.submit(request(1, 1)).is_err());
}

#[test]
fn the_first_chunk_beside_an_answer_is_as_short_as_asked() {
    // No machine computes a token in a nanosecond, so the first chunk is as small as they get.
    for (max_step_latency, chunk) in [(Some(Duration::from_nanos(1)), 2), (None, 100)] {
        let (engine, mut thread, backend) = start_with(&EngineConfig { max_step_latency, ..exact() });
        let _answered = engine.submit(request(1, 50)).unwrap();
        assert!(thread.turn());
        let prompt = Prompt::TokenIds((0..100).map(|j| j * 31 % 400 + 10).collect());
        let _prompted = engine.submit(GenerationRequest { prompt, ..request(2, 20) }).unwrap();
        let before = backend.num_tokens.load(SeqCst);
        assert!(thread.turn());
        assert_eq!(backend.num_tokens.load(SeqCst) - before, 1 + chunk);
    }
}

#[test]
fn every_answer_gets_a_token_in_every_step_beside_a_long_prompt() {
    // Behind the answers, and before them.
    for priority in [1, -1] {
        let max_step_latency = Some(Duration::from_nanos(1));
        let config = EngineConfig { max_num_seqs: 8, max_num_batched_tokens: 32, max_step_latency, ..exact() };
        let (engine, mut thread, backend) = start_with(&config);
        let answer = |i| {
            let mut request = GenerationRequest { stream: true, ..request(i, 300) };
            // An event for each token, whatever its text.
            request.sampling.logprobs = Some(0);
            engine.submit(request).unwrap()
        };
        let answers: Vec<_> = (1..8).map(answer).collect();
        let events = |stream: &RequestStream| std::iter::from_fn(|| stream.next_timeout(Duration::ZERO).unwrap()).count();
        while answers.iter().any(|stream| events(stream) == 0) {
            assert!(thread.turn());
        }
        for stream in &answers {
            events(stream);
        }
        let prompt = Prompt::TokenIds((0..400).map(|j| j * 31 % 400 + 10).collect());
        let service = ServiceParams { priority, ..ServiceParams::default() };
        let _prompted = engine.submit(GenerationRequest { prompt, service, ..request(9, 1) }).unwrap();
        for _ in 0..12 {
            let computed = [&backend.num_tokens, &backend.num_logit_rows].map(|count| count.load(SeqCst));
            assert!(thread.turn());
            assert_eq!(answers.iter().map(events).collect::<Vec<_>>(), [1; 7]);
            let now = [&backend.num_tokens, &backend.num_logit_rows].map(|count| count.load(SeqCst));
            assert!((7 + 2..=32).contains(&(now[0] - computed[0])), "a chunk of the prompt");
            assert_eq!(now[1] - computed[1], 7, "nobody wants logits of the prompt");
        }
    }
}

/// Proposes the next four tokens of an answer that it knows, or others.
#[derive(Debug, Default)]
struct Known {
    answer: Mutex<Vec<u32>>,
    is_wrong: AtomicBool,
}

impl Proposer for Known {
    fn propose(&self, token_ids: &[u32], _: usize, drafts: &mut Vec<u32>) -> usize {
        let answer = self.answer.lock().unwrap();
        let shift = u32::from(self.is_wrong.load(SeqCst));
        if answer.starts_with(token_ids) {
            drafts.extend(answer[token_ids.len()..].iter().take(4).map(|token| (token + shift) % 512));
        }
        0
    }
}

/// An engine that knows the 20 tokens that it is going to say, and those.
fn start_knowing() -> (Engine, EngineThread, Arc<Failing>, Arc<Known>) {
    let known = Arc::new(Known::default());
    let config = EngineConfig { speculation: Some(Speculation::always(Arc::<Known>::clone(&known))), ..exact() };
    let (engine, mut thread, backend) = start_with(&config);
    let service = ServiceParams { keep: true, ..ServiceParams::default() };
    let answer = serve(&mut thread, engine.submit(GenerationRequest { service, ..request(1, 20) }).unwrap());
    *known.answer.lock().unwrap() = answer.sequence.unwrap().token_ids().to_vec();
    (engine, thread, backend, known)
}

fn serve(thread: &mut EngineThread, stream: RequestStream) -> CompletionChoice {
    assert!(thread.turn());
    while thread.scheduler().has_requests() {
        assert!(thread.turn());
    }
    answer(stream)
}

#[test]
fn tokens_that_the_backend_finds_verify_drafts() {
    let (engine, mut thread, backend, known) = start_knowing();
    backend.finds.store(true, SeqCst);
    // With 4 right drafts a step says 5 tokens, the last of them 4; with wrong ones one, and computes up to 4 more in vain.
    for (is_wrong, num_steps) in [(false, 5), (true, 20)] {
        known.is_wrong.store(is_wrong, SeqCst);
        let (before, found) = (thread.scheduler().stats().steps, backend.num_found.load(SeqCst));
        let answer = serve(&mut thread, engine.submit(request(1, 20)).unwrap());
        assert_eq!(answer.text, engine.detokenize_text(&known.answer.lock().unwrap()[40..], true).unwrap());
        assert_eq!(thread.scheduler().stats().steps - before, num_steps);
        let num_found = backend.num_found.load(SeqCst) - found;
        assert_eq!(num_found, if is_wrong { 20 + 15 * 4 + 3 + 2 + 1 } else { 20 }, "a row for each token and draft");
    }
    assert_eq!(thread.scheduler().stats().blocks_used, 0);
}

#[test]
fn a_bad_row_behind_an_accepted_draft_ends_the_request_with_what_was_before_it() {
    for (finds, is_wrong) in [(false, false), (true, false), (false, true), (true, true)] {
        let (engine, mut thread, backend, known) = start_knowing();
        known.is_wrong.store(is_wrong, SeqCst);
        backend.finds.store(finds, SeqCst);
        let stream = engine.submit(request(1, 20)).unwrap();
        assert!(thread.turn());
        // Its first token is there; the next step has a row for it, and one for each of four drafts.
        backend.bad_row.store(2, SeqCst);
        while thread.scheduler().has_requests() {
            assert!(thread.turn());
        }
        assert_eq!(backend.bad_row.load(SeqCst), NO_ROW);
        let choice = answer(stream);
        let answer = &known.answer.lock().unwrap()[40..];
        let (end, len) = if is_wrong { (FinishReason::Length, 20) } else { (FinishReason::Error, 3) };
        assert_eq!((choice.finish_reason, choice.error.is_some()), (end, !is_wrong));
        assert_eq!(choice.text, engine.detokenize_text(&answer[..len], true).unwrap());
        assert_eq!(thread.scheduler().stats().blocks_used, 0);
    }
}
/// What a sink was called for, by the number of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Take(u32),
    Flush(u32),
}

/// Writes its calls down with those of others, and fails where it is told to.
struct Noting {
    number: u32,
    calls: Arc<Mutex<Vec<Call>>>,
    events: Arc<Mutex<Vec<Event>>>,
    fails: Option<&'static str>,
}

impl Noting {
    fn new(number: u32, calls: &Arc<Mutex<Vec<Call>>>) -> Self {
        Self { number, calls: Arc::clone(calls), events: Arc::default(), fails: None }
    }

    fn fail(&self, at: &str) {
        assert_ne!(self.fails, Some(at), "the sink fails on purpose");
    }
}

impl EventSink for Noting {
    fn take(&mut self, events: &mut Vec<Event>) -> ControlFlow<()> {
        self.calls.lock().unwrap().push(Call::Take(self.number));
        self.fail("take");
        self.events.lock().unwrap().append(events);
        if self.fails == Some("gone") { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn flush(&mut self) {
        self.calls.lock().unwrap().push(Call::Flush(self.number));
        self.fail("flush");
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        self.fail("drop");
    }
}

/// An event for each token, whatever its text.
fn chatty(i: u32, max_tokens: usize) -> GenerationRequest {
    let mut request = request(i, max_tokens);
    request.sampling.logprobs = Some(0);
    request
}

#[test]
fn sinks_are_flushed_when_all_requests_of_a_step_have_handed_over_once() {
    let (engine, mut thread, _) = start_with(&EngineConfig { max_num_seqs: 8, ..exact() });
    let calls = Arc::default();
    let submit = |i| engine.submit_to(chatty(i, 4 + i as usize), Box::new(Noting::new(i, &calls))).unwrap();
    let _handles: Vec<_> = (0..5).map(submit).collect();
    let mut num_taken = 0;
    loop {
        assert!(thread.turn());
        let calls = std::mem::take(&mut *calls.lock().unwrap());
        let takes = calls.iter().take_while(|call| matches!(call, Call::Take(_))).count();
        num_taken += takes;
        let numbers = |calls: &[Call]| {
            let mut numbers: Vec<_> = calls.iter().map(|(Call::Take(number) | Call::Flush(number))| *number).collect();
            numbers.sort_unstable();
            numbers
        };
        let (taken, flushed) = calls.split_at(takes);
        assert!(flushed.iter().all(|call| matches!(call, Call::Flush(_))), "{calls:?}");
        assert_eq!(numbers(taken), numbers(flushed));
        let mut distinct = numbers(taken);
        distinct.dedup();
        assert_eq!(distinct.len(), takes, "each hands over once a step: {calls:?}");
        if !thread.scheduler().has_requests() {
            break;
        }
    }
    // The end comes with the last token.
    assert_eq!(num_taken, (0..5).map(|i| 4 + i).sum::<usize>());
}

#[test]
fn a_sink_that_fails_or_is_gone_ends_its_own_request_and_no_other() {
    let (engine, thread, _) = start_with(&EngineConfig { max_num_seqs: 8, ..exact() });
    let serving = thread::spawn(move || thread.run());
    let expected = answer(engine.submit(request(9, 60)).unwrap()).text;
    let calls = Arc::default();
    let submit = |(fails, i)| {
        let mut sink = Noting::new(i, &calls);
        sink.fails = Some(fails);
        engine.submit_to(chatty(i, 400), Box::new(sink)).unwrap()
    };
    let handles: Vec<_> = ["take", "flush", "gone"].into_iter().zip(1..).map(submit).collect();
    let ends = submit(("drop", 4));
    let other = engine.submit(request(9, 60)).unwrap();
    assert_eq!(answer(other).text, expected);
    drop(ends);
    assert_clean(&engine);
    let calls = calls.lock().unwrap();
    for number in 1..=3 {
        assert_eq!(calls.iter().filter(|call| **call == Call::Take(number)).count(), 1, "not called again: {calls:?}");
    }
    drop((engine, handles));
    serving.join().unwrap();
}

#[test]
fn unloading_ends_every_request_with_its_text_and_gives_the_engine_back() {
    let (engine, mut thread, backend) = start_with(&EngineConfig { max_num_seqs: 2, ..exact() });
    let streams = [1, 2, 3].map(|i| engine.submit(chatty(i, 400)).unwrap());
    for _ in 0..8 {
        assert!(thread.turn());
    }
    let held = Arc::strong_count(&backend);
    let unloading = thread::spawn({
        let engine = engine.clone();
        move || engine.unload()
    });
    let serving = thread::spawn(move || thread.run());
    unloading.join().unwrap().unwrap();
    assert!(Arc::strong_count(&backend) < held, "the model runner is gone");
    let tokens = streams.map(|stream| {
        let choice = answer(stream);
        assert_eq!((choice.finish_reason, choice.error), (FinishReason::Canceled, None));
        choice.logprobs.unwrap().len()
    });
    // The first step computed both prompts; the third request waited. More steps may have come before the command.
    assert!(tokens[0] >= 8 && tokens == [tokens[0], tokens[0], 0], "{tokens:?}");
    serving.join().unwrap();
    for error in [engine.submit(request(1, 1)).err().unwrap(), engine.unload().unwrap_err()] {
        assert!(error.to_string().contains("the model was unloaded"), "{error}");
    }
}

#[test]
fn whatever_was_submitted_hears_of_the_end_of_the_engine() {
    let (engine, thread, _) = start();
    let sink = Noting::new(1, &Arc::default());
    let events = Arc::clone(&sink.events);
    let handle = engine.submit_to(request(1, 1), Box::new(sink)).unwrap();
    let cancelled = Noting::new(2, &Arc::default());
    let unheard = Arc::clone(&cancelled.events);
    drop(engine.submit_to(request(2, 1), Box::new(cancelled)).unwrap());
    // With both still in its inbox.
    drop(thread);
    let events = events.lock().unwrap();
    assert!(matches!(&events[..], [Err(EngineError::Internal(why))] if why.contains("stopped before")), "{events:?}");
    assert!(unheard.lock().unwrap().is_empty());
    drop(handle);
}
