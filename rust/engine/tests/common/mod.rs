//! Runs a model over hand-made block tables.

#![allow(dead_code, missing_docs)]

pub mod cases;
pub mod drawn;
pub mod gemma4;
pub mod gguf_writer;
pub mod lora;
pub mod media;
pub mod mmproj;
pub mod mmproj_sounds;
pub mod mmproj_tiles;
pub mod mtp;
pub mod mtp_gguf;
pub mod serving;
pub mod sharded;

use std::{path::PathBuf, sync::Arc};

use device::{Backend, KvDType, KvGroupMetadata, Precision, StepMetadata};
use engine::{
    ModelSource,
    model::{ModelFiles, RopeRows},
    model_runner::{ModelRunner, RunnerOptions},
};
use paged::KvGroups;

pub const MAX_TOKENS: usize = 512;
const NUM_BLOCKS: usize = 400;

pub fn golden_dir() -> PathBuf {
    goldens::dir().to_owned()
}

pub fn hugging_face(name: &str) -> ModelSource {
    ModelSource::HuggingFace { path: golden_dir().join("text").join(name), tokenizer_json: None }
}

pub fn gguf(name: &str) -> ModelSource {
    let files = vec![golden_dir().join("gguf").join(format!("{name}.gguf"))];
    ModelSource::Gguf { files, tokenizer_dir: None, tokenizer_json: None }
}

pub fn load(source: &ModelSource, backend: Arc<dyn Backend>, precision: Precision, kv_dtype: KvDType) -> ModelRunner {
    load_files(&ModelFiles::open(source, None).unwrap(), backend, precision, kv_dtype)
}

pub fn load_files(files: &ModelFiles, backend: Arc<dyn Backend>, precision: Precision, kv_dtype: KvDType) -> ModelRunner {
    let options = RunnerOptions { precision, kv_dtype, max_num_batched_tokens: MAX_TOKENS, max_num_seqs: 8 };
    ModelRunner::load(files, backend, options, &|_| {}).unwrap()
}

/// A request with its own blocks, drawn from a shuffled pool.
struct Sequence {
    ids: Vec<u32>,
    rope: RopeRows,
    computed: usize,
    /// By group.
    blocks: Vec<Vec<u32>>,
    /// Logits of every token so far.
    logits: Vec<Vec<f32>>,
}

pub struct Harness<'a> {
    runner: &'a mut ModelRunner,
    block_size: usize,
    pool: Vec<u32>,
    sequences: Vec<Sequence>,
}

impl<'a> Harness<'a> {
    pub fn new(runner: &'a mut ModelRunner, block_size: usize) -> Self {
        let groups = KvGroups::of_model(runner.config(), paged::KvDType::F16, block_size).unwrap();
        runner.allocate_kv((NUM_BLOCKS, block_size), &groups).unwrap();
        // 11 and 399 have no common divisor: every block but the null block once, neighbours far apart.
        let n = NUM_BLOCKS as u32 - 1;
        let pool = (0..n).map(|i| 1 + i * 11 % n).collect();
        Self { runner, block_size, pool, sequences: Vec::new() }
    }

    /// Adds a request; the first `num_prompt_tokens` ids are its prompt.
    pub fn add(&mut self, ids: Vec<u32>, num_prompt_tokens: usize) -> usize {
        let blocks = vec![Vec::new(); self.runner.kv_groups().groups.len()];
        let rope = self.runner.config().rope_rows(num_prompt_tokens);
        self.sequences.push(Sequence { ids, rope, computed: 0, blocks, logits: Vec::new() });
        self.sequences.len() - 1
    }

    /// Computes the next tokens of some requests in one step.
    pub fn step(&mut self, work: &[(usize, usize)]) {
        let windows: Vec<_> = self.runner.kv_groups().groups.iter().map(|g| g.retention.window()).collect();
        let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
        step.groups = vec![KvGroupMetadata::default(); windows.len()];
        let longest = work.iter().map(|(s, n)| self.sequences[*s].computed + n).max().unwrap();
        let mut token_ids = Vec::new();
        let is_recurrent = self.runner.config().is_recurrent();
        for &(s, n) in work {
            let sequence = &mut self.sequences[s];
            let (start, end) = (sequence.computed, sequence.computed + n);
            token_ids.extend(&sequence.ids[start..end]);
            let positions = start as u32..end as u32;
            step.rope_positions.extend((start..end).map(|p| sequence.rope.row(p)));
            step.positions.extend(positions);
            step.query_start_loc.push(token_ids.len() as u32);
            step.seq_lens.push(end as u32);
            if is_recurrent {
                step.state_slots.push(s as u32);
            }
            for ((group, window), blocks) in step.groups.iter_mut().zip(&windows).zip(&mut sequence.blocks) {
                while blocks.len() * self.block_size < end {
                    blocks.push(self.pool.pop().expect("the pool is large enough"));
                }
                group.slot_mapping.extend(
                    (start..end)
                        .map(|p| i64::from(blocks[p / self.block_size]) * self.block_size as i64 + (p % self.block_size) as i64),
                );
                // What no query of this step sees is given away, as an engine does.
                let first = window.map_or(0, |w| (start + 1).saturating_sub(w) / self.block_size);
                group.max_blocks = longest.div_ceil(self.block_size);
                let mut table = vec![0; group.max_blocks];
                table[first..blocks.len()].copy_from_slice(&blocks[first..]);
                group.block_tables.extend(table);
            }
        }
        let num_tokens = token_ids.len() as u32;
        let chunk = self.runner.max_logit_rows() as u32;
        self.runner.execute(&token_ids, &step).unwrap();
        let mut logits = Vec::new();
        for from in (0..num_tokens).step_by(chunk as usize) {
            let rows: Vec<u32> = (from..(from + chunk).min(num_tokens)).collect();
            logits.extend(copy(self.runner.logits(&rows).unwrap()));
        }
        let mut logits = logits.into_iter();
        for &(s, n) in work {
            self.sequences[s].computed += n;
            self.sequences[s].logits.extend(logits.by_ref().take(n));
        }
    }

    /// Runs a request to its end in chunks and returns the logits of every position.
    pub fn finish(&mut self, sequence: usize, chunk: usize) -> Vec<Vec<f32>> {
        while self.sequences[sequence].computed < self.sequences[sequence].ids.len() {
            let left = self.sequences[sequence].ids.len() - self.sequences[sequence].computed;
            self.step(&[(sequence, left.min(chunk))]);
        }
        for blocks in &mut self.sequences[sequence].blocks {
            self.pool.append(blocks);
        }
        std::mem::take(&mut self.sequences[sequence].logits)
    }
}

fn copy(t: &device::Tensor) -> Vec<Vec<f32>> {
    (0..t.rows()).map(|i| t.row(i).to_vec()).collect()
}

pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

pub fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    best.0 as u32
}
