//! From token ids and block tables to logits.

use std::{ops::Range, sync::Arc};

use device::{
    AdapterRows, Backend, CacheEngine, DeviceSampler, KvDType, Precision, RopeTable, RowSampling, SampledRow, StateCache,
    StepGraphs, StepMetadata, Tensor, TokenMask,
};
use paged::{BlockId, KvGroups};

use crate::{
    EngineError, LoadProgress, MediaKind,
    lora::Sites,
    media::{MediaEncoder, PromptItem},
    model::{
        DecoderConfig, ModelFiles,
        decoder::{Activations, MediaRows, Search, softcap},
        part::Run,
        rope::GrowingRope,
    },
    model_weights::ModelWeights,
};

/// Logit rows computed at once at least, whatever the number of sequences.
const MIN_LOGIT_ROWS: usize = 64;

/// Rows of logits computed at once at most, in a runner of so many requests.
pub(crate) fn max_logit_rows(max_num_seqs: usize) -> usize {
    max_num_seqs.max(MIN_LOGIT_ROWS)
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

/// What an image or a chunk of a sound becomes.
#[derive(Clone)]
pub(crate) enum Encoded {
    /// Vectors, `[planes, rows, hidden_size]`.
    Vectors(Arc<Vec<f32>>),
    /// The keys and values that layers make of its vectors.
    Kept(Arc<CacheEngine>),
}

/// What [`ModelRunner::greedy_tokens`] gave.
pub enum Greedy<'a> {
    /// The tokens.
    Tokens,
    /// All logits, `[rows, vocab_size]`, to find them in: the backend did not.
    Logits(&'a mut Tensor),
}

fn without_cache() -> EngineError {
    EngineError::Internal("a step ran before the KV cache was made".into())
}

/// A loaded model and the buffers of a step.
pub struct ModelRunner {
    /// They know the addresses of what follows.
    graphs: StepGraphs,
    backend: Arc<dyn Backend>,
    config: DecoderConfig,
    options: RunnerOptions,
    groups: KvGroups,
    weights: ModelWeights,
    activations: Activations,
    /// Of the last step.
    adapters: Vec<AdapterRows>,
    ropes: Vec<GrowingRope>,
    /// Of the last step.
    tables: Vec<RopeTable>,
    cache: Option<Arc<CacheEngine>>,
    /// Where its layers begin in the cache, which may have those of another model before them.
    first_layer: usize,
    /// Of models with recurrent layers.
    states: Option<StateCache>,
    /// Slots of states that are kept beside those of requests, behind them.
    num_kept_states: usize,
}

impl ModelRunner {
    /// Loads the weights; `progress` is called as they are done.
    pub fn load(
        files: &ModelFiles,
        backend: Arc<dyn Backend>,
        options: RunnerOptions,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<Self, EngineError> {
        let weights = ModelWeights::load(files, &backend, options, progress)?;
        Self::new(weights, files.config(), backend, options)
    }

    /// Loads a head that predicts further tokens behind a model's layers, with which it shares the rest.
    pub(crate) fn load_head(
        files: &ModelFiles,
        model: &Self,
        backend: Arc<dyn Backend>,
        options: RunnerOptions,
    ) -> Result<Self, EngineError> {
        let weights = ModelWeights::load_head(files, &model.weights, &backend, options)?;
        Self::new(weights, files.config(), backend, options)
    }

    fn new(
        weights: ModelWeights,
        config: &DecoderConfig,
        backend: Arc<dyn Backend>,
        options: RunnerOptions,
    ) -> Result<Self, EngineError> {
        let config = config.clone();
        let max_logit_rows = max_logit_rows(options.max_num_seqs);
        let activations = Activations::new(&*backend, &config, options.max_num_batched_tokens.max(1), max_logit_rows)?;
        let ropes = config.ropes.iter().map(|rope| GrowingRope::new(rope, &config)).collect();
        Ok(Self {
            graphs: StepGraphs::default(),
            backend,
            config,
            options,
            groups: KvGroups::default(),
            weights,
            activations,
            adapters: Vec::new(),
            ropes,
            tables: Vec::new(),
            cache: None,
            first_layer: 0,
            states: None,
            num_kept_states: 0,
        })
    }

    /// Computes with these weights of the same model from now on. What was computed before is of no more use: its keys and values
    /// are those of other weights.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] for weights of another model, or where files have changed: the old ones stay.
    pub fn replace(&mut self, weights: ModelWeights, config: &DecoderConfig) -> Result<(), EngineError> {
        if format!("{config:?}") != format!("{:?}", self.config) {
            return Err(EngineError::InvalidArgument("the model's files have changed since it was loaded: load it again".into()));
        }
        weights.check()?;
        // They know the addresses of the old ones.
        self.graphs = self.new_graphs();
        self.adapters.clear();
        self.weights = weights;
        Ok(())
    }

    fn new_graphs(&self) -> StepGraphs {
        let max_request_rows = if self.config.sees_ahead() { 1 } else { usize::MAX };
        StepGraphs::new(self.options.max_num_batched_tokens, max_request_rows)
    }

    /// The decoder's hyperparameters.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The linear layers that adapters may change.
    pub(crate) fn sites(&self) -> &Arc<Sites> {
        &self.weights.sites
    }

    /// What it computes with.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Bytes of all weights as they are kept, those of files where they are used in place.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes
    }

    /// Bytes of the activations of the largest step.
    pub fn activation_bytes(&self) -> u64 {
        let RunnerOptions { max_num_batched_tokens, max_num_seqs, .. } = self.options;
        Activations::bytes(&self.config, max_num_batched_tokens, max_logit_rows(max_num_seqs))
    }

    /// Bytes of the KV storage, the null block included; 0 before it is reserved.
    pub fn kv_cache_bytes(&self) -> u64 {
        self.cache.as_ref().and_then(|cache| cache.spec().total_bytes()).unwrap_or(0)
    }

    /// How the layers share the KV pool; `StepMetadata::groups` has one entry for each. Empty before [`Self::allocate_kv`].
    pub fn kv_groups(&self) -> &KvGroups {
        &self.groups
    }

    /// Rows of logits computed at once at most.
    pub fn max_logit_rows(&self) -> usize {
        max_logit_rows(self.options.max_num_seqs)
    }

    /// How many states of recurrent layers [`Self::allocate_kv`] makes room for beside one for each request.
    pub(crate) fn keep_states_beside(&mut self, num_kept_states: usize) {
        self.num_kept_states = num_kept_states;
    }

    /// Reserves the KV storage: a number of blocks and the tokens of each, which the layers share in these groups; block 0 is the
    /// null block.
    pub fn allocate_kv(&mut self, pool: (usize, usize), groups: &KvGroups) -> Result<(), EngineError> {
        self.allocate_kv_with(None, pool, groups)
    }

    /// The same, shared with a draft model: in each block lie its layers' keys and values of the same tokens.
    pub(crate) fn allocate_kv_with(
        &mut self,
        draft: Option<&mut Self>,
        pool: (usize, usize),
        groups: &KvGroups,
    ) -> Result<(), EngineError> {
        let models: Vec<_> = [&self.config].into_iter().chain(draft.as_ref().map(|draft| &draft.config)).collect();
        let spec = DecoderConfig::kv_cache_spec_of(&models, pool, self.options.kv_dtype, groups)?;
        let cache = Arc::new(self.backend.alloc_kv_cache(&spec)?);
        if let Some(draft) = draft {
            draft.first_layer = self.config.layers.len();
            draft.groups = groups.clone();
            draft.graphs = draft.new_graphs();
            draft.cache = Some(Arc::clone(&cache));
        }
        self.groups = groups.clone();
        self.graphs = self.new_graphs();
        self.cache = Some(cache);
        if self.config.is_recurrent() {
            let num_slots = self.options.max_num_seqs + self.num_kept_states;
            self.states = Some(self.backend.alloc_states(num_slots, &self.config.state_lens())?);
        }
        Ok(())
    }

    /// The KV storage.
    ///
    /// # Errors
    /// [`EngineError::Internal`] before [`Self::allocate_kv`].
    pub fn cache(&self) -> Result<&CacheEngine, EngineError> {
        self.cache.as_deref().ok_or_else(|| EngineError::Internal("the KV cache was used before it was made".into()))
    }

    /// Copies KV blocks, `(source, destination)`, in order.
    pub fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), EngineError> {
        if pairs.is_empty() {
            return Ok(());
        }
        let cache =
            self.cache.as_ref().ok_or_else(|| EngineError::Internal("a copy of blocks before the KV cache was made".into()))?;
        let pairs: Vec<_> = pairs.iter().map(|(source, destination)| (source.0, destination.0)).collect();
        cache.copy_blocks(&pairs);
        Ok(())
    }

    /// Lets go of the adapters of the last step: no more outputs of it are computed.
    pub fn forget_adapters(&mut self) {
        self.adapters.clear();
    }

    /// Copies the states of recurrent layers from a slot to another.
    ///
    /// # Errors
    /// [`EngineError::Device`] where the device refuses.
    pub fn copy_states(&mut self, from: u32, to: u32) -> Result<(), EngineError> {
        if let Some(states) = &self.states {
            states.copy(from as usize, to as usize)?;
        }
        Ok(())
    }

    /// Runs a step: writes the tokens' keys and values into their slots and keeps their hidden states for [`Self::logits`].
    pub fn execute(&mut self, token_ids: &[u32], step: &StepMetadata) -> Result<(), EngineError> {
        self.execute_with((token_ids, MediaRows::default()), &[], step)
    }

    /// The same, where some rows have vectors in place of their token's or look at images, and rows have `coordinates` instead of
    /// positions, unless there are none.
    pub(crate) fn execute_with(
        &mut self,
        (token_ids, images): (&[u32], MediaRows<'_>),
        coordinates: &[[u32; 3]],
        step: &StepMetadata,
    ) -> Result<(), EngineError> {
        self.prepare(token_ids, coordinates, step)?;
        let hard = self.weights.encoders.hard_rows(&*self.backend, token_ids)?;
        let images = MediaRows { hard: &hard, ..images };
        let cache = self.cache.as_ref().ok_or_else(without_cache)?;
        let states = self.states.as_ref();
        let (backend, precision, first_layer) = (&*self.backend, self.options.precision, self.first_layer);
        let run = Run { backend, precision, cache, ropes: &self.tables, states, first_layer };
        // A graph knows the rope table that grows, and not the one of a step with coordinates.
        let mut unrecorded = StepGraphs::default();
        let graphs = if coordinates.is_empty() { &mut self.graphs } else { &mut unrecorded };
        self.weights.decoder.forward(&run, graphs, &mut self.activations, (token_ids, images), step);
        Ok(())
    }

    /// As [`Self::execute`], of a head that predicts further tokens: `before` writes, for each row, the hidden state
    /// `[hidden_size]` of the token before that of the row, see [`Self::hidden_state`].
    pub(crate) fn execute_head(
        &mut self,
        token_ids: &[u32],
        before: &mut dyn FnMut(usize, &mut [f32]),
        step: &StepMetadata,
    ) -> Result<(), EngineError> {
        self.prepare(token_ids, &[], step)?;
        let cache = self.cache.as_ref().ok_or_else(without_cache)?;
        let (backend, precision, first_layer) = (&*self.backend, self.options.precision, self.first_layer);
        let run = Run { backend, precision, cache, ropes: &self.tables, states: None, first_layer };
        self.weights.decoder.forward_head(&run, &mut self.activations, token_ids, before, step);
        Ok(())
    }

    /// Waits for the last step, whose hidden states [`Self::hidden_state`] then gives.
    pub(crate) fn fetch_hidden_states(&mut self) {
        self.backend.fetch(&mut self.activations.hidden);
    }

    /// The hidden state of a row of the last step behind the output norm, `[hidden_size]`, once they were fetched.
    pub(crate) fn hidden_state(&self, row: usize, out: &mut [f32]) {
        self.weights.decoder.hidden_state(&self.activations, row, out);
    }

    /// Has a head take the token embedding and the output projection of these weights from now on.
    pub(crate) fn share(&mut self, model: &Self) {
        self.weights.decoder.share(&model.weights.decoder);
    }

    /// Checks a step, and makes its rope tables.
    fn prepare(&mut self, token_ids: &[u32], coordinates: &[[u32; 3]], step: &StepMetadata) -> Result<(), EngineError> {
        self.check(token_ids, step)?;
        self.weights.check()?;
        self.tables.clear();
        if coordinates.is_empty() {
            let rope_rows = step.rope_positions.iter().max().map_or(0, |max| *max as usize + 1);
            for rope in &mut self.ropes {
                rope.grow(rope_rows)?;
            }
            self.tables.extend(self.ropes.iter().map(|rope| rope.table().clone()));
        } else {
            self.tables.extend(self.ropes.iter().map(|rope| rope.table_of(coordinates)));
        }
        self.adapters.clone_from(&step.adapters);
        Ok(())
    }

    /// Logits of some tokens of the last step (indices of its rows, at most [`Self::max_logit_rows`]),
    /// `[rows.len(), vocab_size]`.
    pub fn logits(&mut self, rows: &[u32]) -> Result<&mut Tensor, EngineError> {
        self.compute_logits(rows, None)?;
        Ok(self.fetch_logits())
    }

    /// Likewise the tokens with the largest logits, of equal ones the first, into `tokens`, where the backend finds them without
    /// all logits. `masks` has an entry for each row, or none at all.
    pub fn greedy_tokens(
        &mut self,
        rows: &[u32],
        masks: &[Option<TokenMask<'_>>],
        tokens: &mut Vec<u32>,
    ) -> Result<Greedy<'_>, EngineError> {
        // A softcap may make logits equal that are not.
        let search = self.config.final_softcap.is_none().then_some(Search { masks, tokens });
        let found = self.compute_logits(rows, search)?;
        Ok(if found { Greedy::Tokens } else { Greedy::Logits(self.fetch_logits()) })
    }

    fn fetch_logits(&mut self) -> &mut Tensor {
        let logits = &mut self.activations.logits;
        self.backend.fetch(logits);
        softcap(logits.as_mut_slice(), self.config.final_softcap);
        logits
    }

    /// A softcap is the host's.
    fn sampler(&self) -> Option<&dyn DeviceSampler> {
        self.backend.sampler().filter(|_| self.config.final_softcap.is_none())
    }

    /// Whether the device can sample from the logits.
    pub fn samples(&self) -> bool {
        self.sampler().is_some()
    }

    /// As [`Self::logits`], but rows with an entry in `sampling` are sampled on the device, with their `num_top` likeliest
    /// tokens. Rows without a token then have their logits in the tensor: those without an entry, with a logit that is not
    /// finite, or with a mask that allows nothing.
    ///
    /// # Panics
    /// When there are entries, and the device does not sample ([`Self::samples`]).
    pub fn sample(
        &mut self,
        rows: &[u32],
        sampling: &[Option<RowSampling<'_>>],
        num_top: usize,
    ) -> Result<(Vec<Option<SampledRow>>, &mut Tensor), EngineError> {
        if sampling.iter().all(Option::is_none) {
            return Ok((vec![None; rows.len()], self.logits(rows)?));
        }
        self.compute_logits(rows, None)?;
        let sampler = self.sampler().expect("rows to be sampled on a device that samples");
        let mut sampled = sampler.sample(&self.activations.logits, sampling, num_top);
        let logits = &mut self.activations.logits;
        for (sampled, sampling) in sampled.iter_mut().zip(sampling) {
            sampled.take_if(|_| sampling.is_none());
        }
        let others: Vec<_> = (0..rows.len()).filter(|row| sampled[*row].is_none()).collect();
        self.backend.fetch_rows(logits, &others);
        Ok((sampled, logits))
    }

    /// Hidden states of some tokens of the last step behind the output norm, `[rows.len(), hidden_size]`: what [`Self::logits`]
    /// of these rows are computed from.
    ///
    /// # Errors
    /// [`EngineError::Internal`] for more than [`Self::max_logit_rows`] rows, or one that the step does not have.
    pub fn vectors(&mut self, rows: &[u32]) -> Result<&Tensor, EngineError> {
        self.check_output_rows(rows)?;
        Ok(self.weights.decoder.vectors(&*self.backend, &mut self.activations, rows))
    }

    /// The embeddings of requests, by their rows of the last step: all of each, or the last ones where only the last token
    /// counts.
    ///
    /// # Errors
    /// [`EngineError::Internal`] for a model that makes none, or rows that the step does not have.
    pub fn embeddings(&mut self, requests: &[Range<u32>]) -> Result<Vec<Vec<f32>>, EngineError> {
        let num_tokens = self.activations.hidden.rows();
        let is_there = |rows: &Range<u32>| !rows.is_empty() && rows.end as usize <= num_tokens;
        let Some(embedder) = self.weights.embedder.as_mut().filter(|_| requests.iter().all(is_there)) else {
            let text = format!("embeddings of rows {requests:?} were asked for in a step of {num_tokens} tokens");
            return Err(EngineError::Internal(text));
        };
        Ok(embedder.run((&self.weights.decoder, &*self.backend), &mut self.activations, requests))
    }

    /// Vectors of a row of an image or a sound.
    pub(crate) fn num_planes(&self, kind: MediaKind) -> usize {
        self.weights.encoders.get(kind).map_or(1, MediaEncoder::num_planes)
    }

    /// Bytes that what an image or a chunk of a sound becomes is kept in.
    pub(crate) fn encoded_bytes(&self, item: &PromptItem) -> u64 {
        let kept = self.config.cross_kv_spec(item.num_vectors(), self.options.kv_dtype);
        match kept {
            Ok(Some(spec)) => spec.total_bytes().unwrap_or(u64::MAX),
            _ => (item.layout.num_rows * self.num_planes(item.kind) * self.config.hidden_size * size_of::<f32>()) as u64,
        }
    }

    /// What an image or a chunk of a sound becomes.
    ///
    /// # Errors
    /// [`EngineError::Internal`] for a model that neither sees nor hears, [`EngineError::Device`] where there is no memory.
    pub(crate) fn encode(&mut self, item: &PromptItem) -> Result<Encoded, EngineError> {
        let Some(encoder) = self.weights.encoders.get_mut(item.kind) else {
            return Err(EngineError::Internal("an image or a sound for a model that was loaded without its encoder".into()));
        };
        let vectors = encoder.encode(&*self.backend, item)?;
        Ok(match self.config.cross_kv_spec(item.num_vectors(), self.options.kv_dtype)? {
            Some(spec) => Encoded::Kept(Arc::new(self.weights.decoder.keep(&*self.backend, &vectors, &spec)?)),
            None => Encoded::Vectors(Arc::new(vectors)),
        })
    }

    /// Whether there are tokens instead, see [`Decoder::logits`](crate::model::decoder::Decoder::logits).
    fn compute_logits(&mut self, rows: &[u32], greedy: Option<Search<'_>>) -> Result<bool, EngineError> {
        self.check_output_rows(rows)?;
        if rows.is_empty() {
            self.activations.logits.set_rows(0);
            return Ok(false);
        }
        Ok(self.weights.decoder.logits(&*self.backend, &mut self.activations, rows, &self.adapters, greedy))
    }

    fn check_output_rows(&self, rows: &[u32]) -> Result<(), EngineError> {
        let num_tokens = self.activations.hidden.rows();
        let max_rows = self.max_logit_rows();
        if rows.len() > max_rows {
            let n = rows.len();
            return Err(EngineError::Internal(format!(
                "{n} rows of logits were asked for at once; at most {max_rows} are computed"
            )));
        }
        if let Some(row) = rows.iter().find(|row| **row as usize >= num_tokens) {
            return Err(EngineError::Internal(format!("logits of row {row} were asked for in a step of {num_tokens} tokens")));
        }
        Ok(())
    }

    /// The sizes of a step must agree before a backend sees them.
    fn check(&self, token_ids: &[u32], step: &StepMetadata) -> Result<(), EngineError> {
        let n = token_ids.len();
        let fail = |why: String| Err(EngineError::Internal(why));
        if n == 0 || n > self.options.max_num_batched_tokens {
            return fail(format!("a step of {n} tokens; it must have 1 to {}", self.options.max_num_batched_tokens));
        }
        let num_embeddings = self.config.vocab_size + self.config.num_further_rows;
        if let Some(id) = token_ids.iter().find(|id| **id as usize >= num_embeddings) {
            let text = format!("token id {id} is outside of the vocabulary of {num_embeddings} tokens");
            return Err(EngineError::InvalidArgument(text));
        }
        let max_positions = self.config.max_position_embeddings;
        let in_table = |row: &u32| (*row as usize) < max_positions * self.config.num_rope_tables();
        if !step.rope_positions.iter().all(in_table) {
            return fail(format!("a step reaches beyond the model's context of {max_positions} tokens"));
        }
        let rows_agree = step.positions.len() == n
            && step.rope_positions.len() == n
            && step.groups.iter().all(|group| group.slot_mapping.len() == n);
        let requests_agree = step.query_start_loc.len() == step.num_reqs() + 1
            && step.query_start_loc.last() == Some(&(n as u32))
            && step.groups.iter().all(|group| group.block_tables.len() == step.num_reqs() * group.max_blocks);
        let num_states = self.states.as_ref().map_or(0, |_| step.num_reqs());
        let is_slot = |slot: &u32| self.states.as_ref().is_some_and(|states| (*slot as usize) < states.num_slots());
        if step.state_slots.len() != num_states || !step.state_slots.iter().all(is_slot) {
            return fail(format!("the states of a step of {} requests do not agree", step.num_reqs()));
        }
        let mut is_taken = vec![false; if step.adapters.is_empty() { 0 } else { n }];
        let mut take = |row: &u32| is_taken.get_mut(*row as usize).is_some_and(|taken| !std::mem::replace(taken, true));
        let adapters_agree = step.adapters.iter().all(|of| of.rows.is_sorted() && of.rows.iter().all(&mut take));
        if !adapters_agree || (!step.adapters.is_empty() && !self.backend.takes_adapters()) {
            return fail(format!("the adapters of a step of {n} tokens do not agree"));
        }
        if !rows_agree || !requests_agree || step.groups.len() != self.groups.groups.len() {
            return fail(format!("the metadata of a step of {n} tokens and {} requests do not agree", step.num_reqs()));
        }
        Ok(())
    }
}
