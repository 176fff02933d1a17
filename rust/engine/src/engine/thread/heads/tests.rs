//! What a head guesses, against a plain forward pass.

#[path = "../../../../tests/common/mtp.rs"]
mod mtp;

use std::sync::Arc;

use device::{
    Backend, KvGroupMetadata, StepMetadata,
    cpu::{CpuBackend, Isa},
};
use mtp::{Checkpoint, FAMILIES, Oracle, checkpoint_of};
use paged::KvGroups;

use crate::{
    DraftChoice, Engine, EngineConfig, GenerationRequest, ModelDType, ModelSource, MtpHead, Prompt, SamplingParams, Speculation,
    engine::{load::load_with_backend, thread::EngineThread},
    model::ModelFiles,
    model_runner::{ModelRunner, RunnerOptions},
};

const NUM_DRAFTS: usize = 3;

fn backend() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(Isa::detect(), 1).unwrap())
}

fn source(checkpoint: &Checkpoint) -> ModelSource {
    ModelSource::HuggingFace { path: checkpoint.path.clone(), tokenizer_json: None }
}

fn start(checkpoint: &Checkpoint, max_num_batched_tokens: usize) -> (Engine, EngineThread) {
    let speculation = Speculation { max_drafts: Some(NUM_DRAFTS), ..Speculation::by_model(DraftChoice::All) };
    let config = EngineConfig {
        dtype: ModelDType::F32,
        max_num_seqs: 4,
        max_num_batched_tokens,
        speculation: Some(speculation),
        mtp: Some(MtpHead::default()),
        ..EngineConfig::default()
    };
    let (shared, thread) = load_with_backend(&source(checkpoint), &config, &backend(), &|_| {}).unwrap();
    (Engine { shared: Arc::new(shared) }, thread)
}

/// The hidden states of a model behind its output norm, of tokens that it computes in one step.
fn hidden_states(checkpoint: &Checkpoint, tokens: &[u32]) -> Vec<Option<Vec<f32>>> {
    let files = ModelFiles::open(&source(checkpoint), None).unwrap();
    let options = RunnerOptions {
        precision: device::Precision::Exact,
        kv_dtype: device::KvDType::F32,
        max_num_batched_tokens: tokens.len(),
        max_num_seqs: 1,
    };
    let mut runner = ModelRunner::load(&files, backend(), options, &|_| {}).unwrap();
    let groups = KvGroups::of_model(runner.config(), paged::KvDType::F32, 16).unwrap();
    let num_blocks = tokens.len().div_ceil(16);
    runner.allocate_kv((num_blocks + 1, 16), &groups).unwrap();
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let step = StepMetadata {
        rope_positions: positions.clone(),
        query_start_loc: vec![0, tokens.len() as u32],
        seq_lens: vec![tokens.len() as u32],
        state_slots: if runner.config().is_recurrent() { vec![0] } else { Vec::new() },
        groups: vec![KvGroupMetadata {
            max_blocks: num_blocks,
            block_tables: (1..=num_blocks as u32).collect(),
            slot_mapping: positions.iter().map(|position| i64::from(*position) + 16).collect(),
        }],
        positions,
        ..StepMetadata::default()
    };
    runner.execute(tokens, &step).unwrap();
    let state = |row| {
        let mut state = vec![0.0; runner.config().hidden_size];
        runner.hidden_state(row, &mut state);
        Some(state)
    };
    (0..tokens.len()).map(state).collect()
}

/// What was guessed behind so many tokens of an answer.
struct Guess {
    num_tokens: usize,
    drafts: Vec<u32>,
}

/// The tokens of prompt and answer, the guesses, and where the request began.
fn answer(engine: &Engine, thread: &mut EngineThread, prompt: &[u32]) -> (Vec<u32>, Vec<Guess>, usize) {
    let sampling = SamplingParams {
        temperature: Some(0.0),
        max_tokens: Some(30),
        ignore_eos: true,
        logprobs: Some(0),
        ..SamplingParams::default()
    };
    let stream = engine.submit(GenerationRequest::new(Prompt::TokenIds(prompt.to_vec()), sampling)).unwrap();
    let (mut guesses, mut begin) = (Vec::new(), None);
    loop {
        assert!(thread.turn());
        for row in &thread.output.rows {
            begin.get_or_insert(row.num_computed_tokens);
            if row.num_drafts > 0 {
                assert_eq!(row.num_known_tokens(), 1);
                guesses.push(Guess { num_tokens: row.num_computed_tokens + 1, drafts: thread.output.drafts.clone() });
            }
        }
        if thread.active.is_empty() {
            break;
        }
    }
    let completion = stream.wait().unwrap();
    let said = completion.choices[0].logprobs.iter().flatten().map(|token| token.token_id);
    (prompt.iter().copied().chain(said).collect(), guesses, begin.unwrap())
}

/// Compares the guesses with the oracle's; `unknown`: positions whose hidden states the head was without. Says how many were
/// right, and whether hidden states made a difference.
fn check(checkpoint: &Checkpoint, (tokens, guesses): (&[u32], &[Guess]), unknown: &[usize]) -> (usize, bool) {
    let mut states = hidden_states(checkpoint, tokens);
    for position in unknown {
        states[*position] = None;
    }
    let nothing = vec![None; states.len()];
    let (mut num_right, mut matters) = (0, false);
    for Guess { num_tokens, drafts } in guesses {
        let expected = Oracle::new(checkpoint).guess(&tokens[..*num_tokens], &states, drafts.len());
        assert_eq!(*drafts, expected, "behind {num_tokens} tokens");
        matters |= Oracle::new(checkpoint).guess(&tokens[..*num_tokens], &nothing, drafts.len()) != expected;
        num_right += drafts.iter().zip(&tokens[*num_tokens..]).take_while(|(draft, token)| draft == token).count();
    }
    (num_right, matters)
}

#[test]
fn a_head_guesses_what_a_plain_forward_pass_of_it_does() {
    for family in FAMILIES {
        let checkpoint = checkpoint_of(family, true, 1.5);
        for max_num_batched_tokens in [512, 7] {
            let (engine, mut thread) = start(&checkpoint, max_num_batched_tokens);
            let prompt: Vec<u32> = (0..41).map(|i| (i * 37 + 11) % 500).collect();
            let (tokens, guesses, begin) = answer(&engine, &mut thread, &prompt);
            assert_eq!(begin, 0);
            let (num_right, matters) = check(&checkpoint, (&tokens, &guesses), &[]);
            assert!(matters, "{family}: hidden states change no guess");
            let num_drafts: usize = guesses.iter().map(|guess| guess.drafts.len()).sum();
            assert!(num_right > 3 && num_right + 3 < num_drafts, "{family}: {num_right} of {num_drafts} were right");
            // Behind a hit, which ends within a block, as that of a model with states does only at a snapshot.
            if !checkpoint.config["full_attention_interval"].is_null() {
                continue;
            }
            let prompt = [&tokens[..38], &[7, 8, 9, 10]].concat();
            let (tokens, guesses, begin) = answer(&engine, &mut thread, &prompt);
            assert_eq!(begin, 38);
            check(&checkpoint, (&tokens, &guesses), &[37]);
        }
    }
}
