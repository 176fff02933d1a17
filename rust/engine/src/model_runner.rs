//! From token ids and block tables to logits.

use std::{
    cell::Cell,
    path::{Path, PathBuf},
    sync::Arc,
};

use device::{Backend, CacheEngine, KvCacheSpec, KvDType, Precision, StepMetadata, Tensor};
use paged::KvGroups;

use crate::{
    EngineError, LoadProgress, ModelSource,
    model::{
        Decoder, DecoderConfig,
        arch::{Architecture, Found, check_architecture},
        decoder::{Activations, Loader, Run},
        fields::{GgufFields, HfFields},
        rope::GrowingRope,
    },
    weights::{GgufFiles, Metadata, SafetensorsFiles, WeightSource, safetensors::read_json},
};

/// Logit rows computed at once at least, whatever the number of sequences.
const MIN_LOGIT_ROWS: usize = 64;

/// The files of a model, opened and checked; no weight has been read yet.
pub struct ModelFiles {
    config: DecoderConfig,
    weights: WeightSource,
}

impl ModelFiles {
    /// Opens a model's files and reads its configuration.
    ///
    /// Errors: [`EngineError::Load`] for a missing or malformed file, [`EngineError::Architecture`] for an architecture that is
    /// not implemented or contradicts `architecture` (HF `model_type`).
    pub fn open(source: &ModelSource, architecture: Option<&str>) -> Result<Self, EngineError> {
        let files = match source {
            ModelSource::HuggingFace { path, .. } => Self::open_hugging_face(path, architecture)?,
            ModelSource::Gguf { files, .. } => Self::open_gguf(files, architecture)?,
        };
        Ok(files)
    }

    fn open_hugging_face(dir: &Path, expected: Option<&str>) -> Result<Self, EngineError> {
        let path = dir.join("config.json");
        let what = path.display().to_string();
        let json = read_json(&path)?;
        let object = json.as_object().ok_or_else(|| EngineError::Load(format!("{what}: not a JSON object")))?;
        let fields = HfFields { what: &what, object };
        let classes = fields.texts("architectures")?.unwrap_or_default();
        let found = Found::HuggingFace { model_type: fields.text("model_type")?, classes: &classes };
        let architecture: &Architecture = check_architecture(expected, found)?;
        let config = (architecture.from_hf)(&fields)?;
        config.validate(&what)?;
        let weights = WeightSource::Safetensors { files: SafetensorsFiles::open(dir)?, sandwich: config.sandwich_norms };
        Ok(Self { config, weights })
    }

    fn open_gguf(paths: &[PathBuf], expected: Option<&str>) -> Result<Self, EngineError> {
        let weights = WeightSource::Gguf(GgufFiles::open(paths)?);
        let what = weights.path().display().to_string();
        let metadata = weights.metadata().ok_or_else(|| EngineError::Internal("a GGUF file without metadata".into()))?;
        let prefix = metadata
            .str("general.architecture")
            .ok_or_else(|| EngineError::Load(format!("{what}: `general.architecture` is missing or not a string")))?;
        let architecture = check_architecture(expected, Found::Gguf(prefix))?;
        let config = (architecture.from_gguf)(&GgufFields { what: &what, prefix, metadata, weights: &weights })?;
        config.validate(&what)?;
        Ok(Self { config, weights })
    }

    /// The decoder's hyperparameters.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// GGUF metadata; `None` for a Hugging Face folder.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.weights.metadata()
    }

    /// Bytes of all weights in the files.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.weight_bytes()
    }

    /// How the layers share the KV pool.
    pub fn kv_groups(&self) -> KvGroups {
        KvGroups::from_layers(&self.config.windows())
    }

    /// Shape of a KV storage for this model.
    pub fn kv_cache_spec(&self, num_blocks: usize, block_size: usize, dtype: KvDType) -> KvCacheSpec {
        kv_cache_spec(&self.config, &self.kv_groups(), num_blocks, block_size, dtype)
    }
}

fn kv_cache_spec(config: &DecoderConfig, groups: &KvGroups, num_blocks: usize, block_size: usize, dtype: KvDType) -> KvCacheSpec {
    KvCacheSpec {
        num_blocks,
        block_size,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        num_planes: groups.layers_per_group,
        dtype,
    }
}

/// How a runner computes.
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Exact or fast linear layers.
    pub precision: Precision,
    /// Element type of the KV storage.
    pub kv_dtype: KvDType,
    /// Tokens of a step at most.
    pub max_num_batched_tokens: usize,
    /// Requests of a step at most.
    pub max_num_seqs: usize,
}

/// A loaded model and the buffers of a step.
pub struct ModelRunner {
    backend: Arc<dyn Backend>,
    config: DecoderConfig,
    options: RunnerOptions,
    groups: KvGroups,
    decoder: Decoder,
    activations: Activations,
    ropes: Vec<GrowingRope>,
    cache: Option<CacheEngine>,
    model_bytes: u64,
}

impl ModelRunner {
    /// Loads the weights; `progress` is called as they are done.
    pub fn load(
        files: &ModelFiles,
        backend: Arc<dyn Backend>,
        options: RunnerOptions,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<Self, EngineError> {
        let config = files.config.clone();
        let groups = files.kv_groups();
        let total_bytes = files.weight_bytes();
        let done = Cell::new(0);
        let count = |bytes: u64| {
            done.set((done.get() + bytes).min(total_bytes));
            progress(LoadProgress { done_bytes: done.get(), total_bytes });
        };
        let loader = Loader {
            weights: &files.weights,
            config: &config,
            backend: &*backend,
            precision: options.precision,
            progress: &count,
        };
        let decoder = loader.decoder(&groups)?;
        progress(LoadProgress { done_bytes: total_bytes, total_bytes });
        let max_logit_rows = options.max_num_seqs.max(MIN_LOGIT_ROWS);
        let activations = Activations::new(&*backend, &config, options.max_num_batched_tokens.max(1), max_logit_rows)?;
        let ropes = config.ropes.iter().map(|rope| GrowingRope::new(rope, config.num_rope_tables())).collect();
        Ok(Self { backend, config, options, groups, decoder, activations, ropes, cache: None, model_bytes: total_bytes })
    }

    /// The decoder's hyperparameters.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// How the layers share the KV pool; `StepMetadata::groups` has one entry for each.
    pub fn kv_groups(&self) -> &KvGroups {
        &self.groups
    }

    /// Bytes of all weights in the files.
    pub fn model_bytes(&self) -> u64 {
        self.model_bytes
    }

    /// Rows of logits computed at once at most.
    pub fn max_logit_rows(&self) -> usize {
        self.options.max_num_seqs.max(MIN_LOGIT_ROWS)
    }

    /// Reserves the KV storage; block 0 is the null block.
    pub fn allocate_kv(&mut self, num_blocks: usize, block_size: usize) -> Result<(), EngineError> {
        let spec = kv_cache_spec(&self.config, &self.groups, num_blocks, block_size, self.options.kv_dtype);
        self.cache = Some(self.backend.alloc_kv_cache(&spec)?);
        Ok(())
    }

    /// Copies whole blocks `(source, destination)` in every layer.
    pub fn copy_blocks(&self, pairs: &[(u32, u32)]) {
        if let Some(cache) = &self.cache {
            self.backend.copy_blocks(cache, pairs);
        }
    }

    /// Runs a step: writes the tokens' keys and values into their slots and returns the logits of `logit_rows`
    /// (indices of tokens in the step, at most [`Self::max_logit_rows`]), `[logit_rows.len(), vocab_size]`.
    pub fn execute(&mut self, token_ids: &[u32], step: &StepMetadata, logit_rows: &[u32]) -> Result<&Tensor, EngineError> {
        self.check(token_ids, step)?;
        let rows = step.rope_positions.iter().max().map_or(0, |max| *max as usize + 1);
        let max_rows = self.config.max_position_embeddings * self.config.num_rope_tables();
        if rows > max_rows {
            let max = self.config.max_position_embeddings;
            return Err(EngineError::Internal(format!("a step reaches beyond the model's context of {max} tokens")));
        }
        for rope in &mut self.ropes {
            rope.grow(rows, max_rows);
        }
        let cache = self.cache.as_ref().ok_or_else(|| EngineError::Internal("a step ran before the KV cache was made".into()))?;
        let run = Run { backend: &*self.backend, config: &self.config, cache, ropes: &self.ropes };
        self.decoder.forward(&run, &mut self.activations, token_ids, step);
        self.compute_logits(logit_rows)
    }

    /// Logits of other tokens of the last step, `[logit_rows.len(), vocab_size]`.
    pub fn compute_logits(&mut self, logit_rows: &[u32]) -> Result<&Tensor, EngineError> {
        let num_tokens = self.activations.hidden.rows();
        if logit_rows.len() > self.max_logit_rows() {
            let (n, max) = (logit_rows.len(), self.max_logit_rows());
            return Err(EngineError::Internal(format!("{n} rows of logits were asked for at once; at most {max} are computed")));
        }
        if let Some(row) = logit_rows.iter().find(|row| **row as usize >= num_tokens) {
            return Err(EngineError::Internal(format!("logits of row {row} were asked for in a step of {num_tokens} tokens")));
        }
        if logit_rows.is_empty() {
            self.activations.logits.set_rows(0);
        } else {
            self.decoder.logits(&*self.backend, &self.config, &mut self.activations, logit_rows);
        }
        Ok(&self.activations.logits)
    }

    /// The sizes of a step must agree before a backend sees them.
    fn check(&self, token_ids: &[u32], step: &StepMetadata) -> Result<(), EngineError> {
        let n = token_ids.len();
        let fail = |why: String| Err(EngineError::Internal(why));
        if n == 0 || n > self.options.max_num_batched_tokens {
            return fail(format!("a step of {n} tokens; it must have 1 to {}", self.options.max_num_batched_tokens));
        }
        if let Some(id) = token_ids.iter().find(|id| **id as usize >= self.config.vocab_size) {
            return Err(EngineError::InvalidArgument(format!(
                "token id {id} is outside of the vocabulary of {} tokens",
                self.config.vocab_size
            )));
        }
        let rows_agree = step.positions.len() == n
            && step.rope_positions.len() == n
            && step.groups.iter().all(|group| group.slot_mapping.len() == n);
        let requests_agree = step.query_start_loc.len() == step.num_reqs() + 1
            && step.query_start_loc.last() == Some(&(n as u32))
            && step.groups.iter().all(|group| group.block_tables.len() == step.num_reqs() * group.max_blocks);
        if !rows_agree || !requests_agree || step.groups.len() != self.groups.groups.len() {
            return fail(format!("the metadata of a step of {n} tokens and {} requests do not agree", step.num_reqs()));
        }
        Ok(())
    }
}
