//! The engine: one thread owns scheduler, pool and device; callers talk to it through channels.

mod config;
mod draft;
mod events;
mod forgery;
mod heartbeat;
mod load;
mod output;
mod plan;
mod prompt;
mod re_isq;
mod sequence;
mod snapshots;
mod submit;
#[cfg(test)]
mod tests;
mod text_files;
mod thread;
mod tier;

use std::{
    path::Path,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use device::{Backend, host::trim_heap};
use kv_events::{KvEventsStats, StatsReader};

pub use config::{CpuOptions, Device, EngineConfig, LoadProgress, ModelDType, ModelSource, best_device};
pub use draft::{DEFAULT_MTP_DRAFTS, DraftModel, MtpHead};
use heartbeat::Heartbeat;
pub use heartbeat::{STEP_TOKENS, StepTokens, Vitals};
pub(crate) use load::open_files;
pub use plan::{DeviceBytes, GroupPlan, MemoryPlan};

use crate::{
    AdapterChoice, AdapterInfo, AdapterStatus, AdapterTraffic, EmbeddingConfig, EngineError, EventSink, GenerationConfig,
    GenerationRequest, LoadAdapter, MediaKind, Message, RenderOptions, RequestStream, ResolvedSampling, SamplingParams,
    chat_template::ChatTemplate,
    completion::CompletionCollector,
    grammar::GrammarCompiler,
    kv_tier::FlushOnDrop,
    lora::{Generation, Registry},
    media::{Encoders, MediaConfig},
    tokenizer::Tokenizer,
    tools::Dialect,
};
use output::WaitingTokens;
pub use sequence::{Continuation, Sequence};
use thread::Command;

/// A running model. Cheap to clone; the engine thread ends when the last clone, the last request and the last [`Sequence`] with
/// blocks are gone.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

/// What callers' threads need.
struct Shared {
    inbox: mpsc::Sender<Command>,
    tokenizer: Arc<Tokenizer>,
    grammars: GrammarCompiler,
    chat_template: Option<ChatTemplate>,
    /// How the model writes calls and reasoning; `None` without a chat template.
    dialect: Option<Arc<Dialect>>,
    generation_config: GenerationConfig,
    architecture: &'static str,
    vocab_size: usize,
    max_model_len: usize,
    /// Tokens that the whole pool can serve one request.
    servable_tokens: usize,
    /// `None`: it makes text.
    embedding: Option<EmbeddingConfig>,
    /// `None`: it takes text alone.
    media: Option<Encoders<MediaConfig>>,
    /// Whether tokens rotate by more than their position.
    has_rope_axes: bool,
    /// Rows of an image that see each other at most.
    longest_span: usize,
    /// Tokens of a step, where a prompt must fit one.
    one_step: Option<usize>,
    num_blocks: usize,
    block_bytes: u64,
    seed: Option<u64>,
    /// Whether requests without a seed have this one, and not one that follows from how many came before.
    one_seed: bool,
    submitted: AtomicU64,
    /// Tokens of the prompts of which no step had any.
    waiting_tokens: Arc<AtomicUsize>,
    /// No requests are accepted.
    draining: AtomicBool,
    /// Why the device computes no more, once it does not.
    lost: Arc<OnceLock<String>>,
    heartbeat: Arc<Heartbeat>,
    kv_events: Option<StatsReader>,
    /// What it was loaded from, and how; `in_situ_quant` may have changed since.
    source: ModelSource,
    config: EngineConfig,
    /// The engine thread's.
    backend: Weak<dyn Backend>,
    loaded: RwLock<Arc<Loaded>>,
    /// Held while weights are quantized anew.
    re_isq: Mutex<()>,
    /// `None`: the model was loaded without.
    adapters: Option<Arc<Registry>>,
    /// Of the model's own, by what a request holds.
    own_adapters: RwLock<Option<Encoders<Arc<Generation>>>>,
    /// Bytes of the draft model's weights.
    draft_bytes: u64,
    kv_cache_bytes: u64,
}

/// What is known of the weights that answer requests.
struct Loaded {
    plan: MemoryPlan,
    description: Vec<String>,
    weight_bytes: u64,
    /// Waits, at the end, until what was computed is in the tier.
    _flush: Option<FlushOnDrop>,
}

impl Shared {
    fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn set_loaded(&self, loaded: Arc<Loaded>) {
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded;
    }

    fn has_own_adapters(&self) -> bool {
        self.own_adapters.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn adapters(&self) -> Result<&Registry, EngineError> {
        self.adapters.as_deref().ok_or_else(|| EngineError::Adapter {
            code: "lora_runtime_unavailable",
            message: "the model was loaded without adapters: load it with `Which.Lora` or `Which.GGUF(adapters=[])`, or with --enable-lora".into(),
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody is left to end a pause, and whoever still reads a stream would wait for ever.
        let _ = self.inbox.send(Command::Resume);
    }
}

impl Engine {
    /// Loads a model and starts its engine thread. `progress` is called on this thread as weights are packed.
    pub fn load(source: &ModelSource, config: &EngineConfig, progress: &dyn Fn(LoadProgress)) -> Result<Self, EngineError> {
        load::load(source, config, progress).map(|shared| Self { shared: Arc::new(shared) })
    }

    /// As [`Self::load`], onto a backend of the caller's; `config.device` and `config.cpu` are not used.
    pub fn load_onto(
        backend: &Arc<dyn Backend>,
        source: &ModelSource,
        config: &EngineConfig,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<Self, EngineError> {
        load::load_onto(backend, source, config, progress).map(|shared| Self { shared: Arc::new(shared) })
    }

    /// What a model would take, and how many blocks and requests that leaves room for, without reading its weights: only the
    /// headers of its files are read. A Hugging Face folder may be without weights; they then count 2 bytes a parameter.
    ///
    /// `cards`: instead of for this host, for devices with so many bytes each, all free, which take equal shares of the layers in
    /// order, the first the token embedding and the last the output projection, weights as they are stored.
    pub fn memory_plan(source: &ModelSource, config: &EngineConfig, cards: Option<&[u64]>) -> Result<MemoryPlan, EngineError> {
        let plan = load::memory_plan(source, config, cards);
        // The vocabulary was read for it.
        trim_heap();
        plan
    }

    /// The plan that this engine was loaded by, with the weights that it has now.
    pub fn memory_ledger(&self) -> MemoryPlan {
        self.shared.loaded().plan.clone()
    }

    /// Bytes of the loaded weights as they are kept, those of files where they are used in place.
    pub fn weight_bytes(&self) -> u64 {
        self.shared.loaded().weight_bytes
    }

    /// Bytes reserved for the KV pool, the null block included.
    pub fn kv_cache_bytes(&self) -> u64 {
        self.shared.kv_cache_bytes
    }

    /// Validates and tokenizes the request on this thread, then hands it to the engine.
    pub fn submit(&self, request: GenerationRequest) -> Result<RequestStream, EngineError> {
        let (sender, events) = mpsc::channel();
        let handle = self.submit_to(request, Box::new(sender))?;
        Ok(RequestStream { events, handle })
    }

    /// As [`Self::submit`], with a reader of the caller's own.
    pub fn submit_to(&self, request: GenerationRequest, sink: Box<dyn EventSink>) -> Result<RequestHandle, EngineError> {
        submit::submit(&self.shared, request, sink)
    }

    /// Ends the requests in flight, with the text that they have and [`crate::FinishReason::Canceled`], and returns when the
    /// memory of weights and pool is given back. Then all handles of this engine, this one too, can tell of the model but serve
    /// nothing.
    ///
    /// An [`EngineError::Internal`] when the engine thread has ended already.
    pub fn unload(&self) -> Result<(), EngineError> {
        if let Some(adapters) = &self.shared.adapters {
            adapters.close();
        }
        *self.shared.own_adapters.write().unwrap_or_else(PoisonError::into_inner) = None;
        let (waiting, done) = mpsc::channel();
        self.shared.inbox.send(Command::Unload(waiting)).map_err(|_| ended())?;
        // Of two at once, the thread may hear only one.
        done.recv().unwrap_or_default();
        Ok(())
    }

    /// Loads an adapter, a PEFT folder or a GGUF file, under an alias, while requests run.
    ///
    /// # Errors
    /// [`EngineError::Adapter`] with a code: no adapters were asked for with the model, a limit is reached, the files cannot be
    /// honoured, the alias is taken, or another thread is loading one.
    pub fn load_adapter(&self, alias: &str, source: &Path, how: &LoadAdapter) -> Result<AdapterInfo, EngineError> {
        self.shared.adapters()?.load(alias, source, how, self.available_bytes()?)
    }

    /// Takes an alias away. Requests in flight go on with what it stood for, whose memory is given back behind the last of them.
    ///
    /// # Errors
    /// [`EngineError::Adapter`]: there is none, or it stands for another generation than is expected.
    pub fn unload_adapter(&self, alias: &str, expected_generation: Option<&str>) -> Result<AdapterInfo, EngineError> {
        self.shared.adapters()?.unload(alias, expected_generation)
    }

    /// The adapters that are loaded, by alias; none where the model was loaded without.
    pub fn adapters(&self) -> Vec<AdapterInfo> {
        self.shared.adapters.as_deref().map(Registry::list).unwrap_or_default()
    }

    /// Which adapter requests run with that name none; `None`: the model as it is.
    ///
    /// # Errors
    /// [`EngineError::Adapter`]: there is no such alias.
    pub fn activate_adapter(&self, alias: Option<&str>) -> Result<(), EngineError> {
        self.shared.adapters()?.activate(alias)
    }

    /// How many adapters there are, and how many more there may be.
    ///
    /// # Errors
    /// [`EngineError::Adapter`]: the model was loaded without.
    pub fn adapter_status(&self) -> Result<AdapterStatus, EngineError> {
        self.shared.adapters().map(Registry::status)
    }

    /// Which adapters there are, and which are waited for; `None` where the model was loaded without.
    pub fn adapter_traffic(&self) -> Option<AdapterTraffic> {
        self.shared.adapters.as_deref().map(Registry::traffic)
    }

    /// The generation that a request with this choice would run with.
    ///
    /// # Errors
    /// [`EngineError::Adapter`]: there is none.
    pub fn adapter_generation(&self, choice: &AdapterChoice) -> Result<String, EngineError> {
        Ok(self.shared.adapters()?.find(choice)?.id.clone())
    }

    /// Bytes of memory that are free once every block of the pool is in use. Blocks that are free and not cached count as never
    /// written.
    fn available_bytes(&self) -> Result<u64, EngineError> {
        let stats = self.kv_cache_stats()?;
        let memory = self.shared.backend.upgrade().map(|backend| backend.memory()).transpose()?;
        if let Some(card) = memory.filter(|memory| !memory.is_host) {
            // The pool is there; buffers of the kernels grow to what was planned as they are first needed.
            let plan = &self.shared.loaded().plan.devices[0];
            return Ok(card.available_bytes.saturating_sub(plan.workspaces + plan.graphs));
        }
        let untouched = (stats.blocks_free.saturating_sub(stats.blocks_cached) as u64).saturating_mul(self.shared.block_bytes);
        Ok(device::host_memory().available_bytes.saturating_sub(untouched))
    }

    /// Tokens of a request at most, prompt and answer together: those of the model's context, or of the pool where that holds
    /// fewer.
    pub fn max_sequence_length(&self) -> usize {
        self.shared.max_model_len.min(self.shared.servable_tokens)
    }

    /// Tokens of the model's context, whatever the pool holds. Without paged attention: what is reserved for a request.
    pub fn context_length(&self) -> usize {
        self.shared.max_model_len
    }

    /// How the model makes embeddings; `None`: it makes text.
    pub fn embedding(&self) -> Option<&EmbeddingConfig> {
        self.shared.embedding.as_ref()
    }

    /// The same, of a model that must make them.
    pub(crate) fn embedding_config(&self) -> Result<&EmbeddingConfig, EngineError> {
        self.embedding().ok_or_else(makes_text)
    }

    /// Tokens of an input at most that is to be embedded.
    pub(crate) fn max_embedding_len(&self) -> usize {
        self.max_sequence_length()
    }

    /// What bounds that, if it is neither the model nor its files.
    pub(crate) fn embedding_limit(&self) -> &'static str {
        let longest = self.max_embedding_len();
        if longest < self.shared.max_model_len {
            " in this KV pool"
        } else if self.shared.one_step == Some(longest) {
            " with this max_num_batched_tokens, for it needs all of them in one step"
        } else {
            ""
        }
    }

    /// Logits of the model: token ids are below. Its tokenizer may have fewer.
    pub fn vocab_size(&self) -> usize {
        self.shared.vocab_size
    }

    /// The model's own sampling defaults.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.shared.generation_config
    }

    /// Bytes of a block of the KV pool.
    pub fn block_bytes(&self) -> u64 {
        self.shared.block_bytes
    }

    /// HF `model_type` of the loaded architecture.
    pub fn architecture(&self) -> &str {
        self.shared.architecture
    }

    /// Lines that describe the loaded model, device and pool, for logs.
    pub fn description(&self) -> Vec<String> {
        self.shared.loaded().description.clone()
    }

    /// Token ids of a text; special tokens such as BOS are added when asked for.
    pub fn tokenize_text(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EngineError> {
        self.shared.tokenizer.encode(text, add_special_tokens)
    }

    /// Token ids of a conversation, rendered by the chat template.
    pub fn tokenize_chat(&self, messages: &[Message], options: &RenderOptions) -> Result<Vec<u32>, EngineError> {
        self.render_chat(messages, options).map(|(_, ids)| ids)
    }

    /// Checks sampling parameters as [`Self::submit`] does; an error names the field, the value and what is allowed.
    pub fn check_sampling(&self, sampling: &SamplingParams) -> Result<(), EngineError> {
        ResolvedSampling::new(sampling, &self.shared.generation_config, self.shared.vocab_size).map(drop)
    }

    /// A conversation as the chat template renders it, and its token ids.
    pub fn render_chat(&self, messages: &[Message], options: &RenderOptions) -> Result<(String, Vec<u32>), EngineError> {
        let media = prompt::media_of(&self.shared, messages)?;
        prompt::render_chat(&self.shared, messages, options, &media).map(|(ids, text)| (text, ids))
    }

    /// What it takes beside text.
    pub fn media_kinds(&self) -> Vec<MediaKind> {
        self.shared.media.as_ref().map(Encoders::kinds).unwrap_or_default()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.shared.tokenizer
    }

    /// The chat template's source; `None` for a model without one.
    pub fn chat_template(&self) -> Option<&str> {
        self.shared.chat_template.as_ref().map(ChatTemplate::source)
    }

    /// Compiles grammars for this model's tokens.
    pub fn grammars(&self) -> &GrammarCompiler {
        &self.shared.grammars
    }

    /// How the model writes calls, as `/v1/models` shows it; `None` without a chat template.
    pub fn tool_format(&self) -> Option<&str> {
        self.shared.dialect.as_ref().map(|dialect| dialect.format.name)
    }

    /// Text of token ids.
    pub fn detokenize_text(&self, token_ids: &[u32], skip_special_tokens: bool) -> Result<String, EngineError> {
        Ok(self.shared.tokenizer.decode(token_ids, skip_special_tokens))
    }

    /// Schedules nothing from the next step on. Requests are accepted and wait, running ones keep their blocks, and deadlines
    /// pass.
    pub fn pause(&self) -> Result<(), EngineError> {
        self.shared.inbox.send(Command::Pause).map_err(|_| ended())
    }

    /// Goes on after [`Self::pause`], and accepts requests after [`Self::drain`].
    pub fn resume(&self) -> Result<(), EngineError> {
        self.shared.draining.store(false, Ordering::SeqCst);
        self.shared.inbox.send(Command::Resume).map_err(|_| ended())
    }

    /// Accepts no requests from now on, and serves those there are to their end; a pause ends. What comes back tells when none is
    /// left.
    pub fn drain(&self) -> Result<Drain, EngineError> {
        self.shared.draining.store(true, Ordering::SeqCst);
        let (waiting, done) = mpsc::channel();
        self.shared.inbox.send(Command::Drain(waiting)).map_err(|_| ended())?;
        Ok(Drain { done })
    }

    /// How the engine's thread does; at once, whatever it is doing. An [`EngineError::DeviceLost`] when its device computes no
    /// more.
    pub fn vitals(&self) -> Result<Vitals, EngineError> {
        match self.shared.lost.get() {
            Some(why) => Err(EngineError::DeviceLost(why.clone())),
            None => Ok(self.shared.heartbeat.vitals()),
        }
    }

    /// What was published of the prefix cache, and where; `None`: nothing is. At once, as [`Self::vitals`].
    pub fn kv_events(&self) -> Option<KvEventsStats> {
        self.shared.kv_events.as_ref().map(StatsReader::read)
    }

    /// Tokens of the prompts that wait: of which no step had any. At once, as [`Self::vitals`].
    pub fn waiting_tokens(&self) -> usize {
        self.shared.waiting_tokens.load(Ordering::Relaxed)
    }

    /// How many tokens the steps had so far; at once, as [`Self::vitals`].
    pub fn step_tokens(&self) -> StepTokens {
        self.shared.heartbeat.step_tokens()
    }

    /// Figures of the KV pool after the current step; requests whose stream was dropped are gone from them.
    ///
    /// An [`EngineError::Internal`] when the engine thread has ended.
    pub fn kv_cache_stats(&self) -> Result<KvCacheStats, EngineError> {
        let (reply, answer) = mpsc::channel();
        self.shared.inbox.send(Command::Stats(reply)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())
    }

    /// What every block of the pool is used for, and every request, after the current step.
    ///
    /// An [`EngineError::Internal`] when the engine thread has ended.
    pub fn pool_snapshot(&self) -> Result<PoolSnapshot, EngineError> {
        let (reply, answer) = mpsc::channel();
        self.shared.inbox.send(Command::PoolSnapshot(reply)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())
    }
}

/// Waits for the end of the requests that an engine serves.
pub struct Drain {
    done: mpsc::Receiver<()>,
}

impl Drain {
    /// Waits up to `timeout`; whether no request is left.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool, EngineError> {
        match self.done.recv_timeout(timeout) {
            Ok(()) => Ok(true),
            Err(mpsc::RecvTimeoutError::Timeout) => Ok(false),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(ended()),
        }
    }
}

/// A request that was submitted. Dropping it cancels the request, if it still runs, and frees its blocks.
pub struct RequestHandle {
    number: u64,
    inbox: mpsc::Sender<Command>,
    cancel: Arc<AtomicBool>,
    wants_logprobs: bool,
    adapter_generation: Option<String>,
    prompt_token_ids: Arc<[u32]>,
    waiting: Arc<WaitingTokens>,
}

impl RequestHandle {
    /// What a choice has come to so far, to be gone on from, while the choice itself runs on. Waits for the current step.
    ///
    /// An [`EngineError::InvalidArgument`] for a choice that has ended, or is not there.
    pub fn sequence(&self, choice: usize) -> Result<Sequence, EngineError> {
        let (reply, answer) = mpsc::channel();
        let inbox = self.inbox.clone();
        self.inbox.send(Command::Snapshot { number: self.number, choice, inbox, reply }).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?
    }

    /// The generation of the adapter that it runs with, if any.
    pub fn adapter_generation(&self) -> Option<&str> {
        self.adapter_generation.as_deref()
    }

    /// Tokens of its prompt.
    pub fn prompt_token_ids(&self) -> &[u32] {
        &self.prompt_token_ids
    }

    /// Collects the request's events into the complete answer, which comes with [`crate::OutputEvent::Done`].
    pub fn collector(&self) -> CompletionCollector {
        CompletionCollector::new(self.wants_logprobs, self.adapter_generation.clone())
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.cancel.store(true, Ordering::Relaxed);
        self.waiting.end();
    }
}

/// Of a model that was not loaded for embeddings.
fn makes_text() -> EngineError {
    EngineError::InvalidArgument(
        "this model was loaded to make text: to make embeddings with it, load it with Which.Embedding(MODEL, pooling=\"last\"), or \
         serve it with `serve embedding -m MODEL --pooling last`; a model whose files say how needs no pooling"
            .into(),
    )
}

fn draining() -> EngineError {
    EngineError::Draining("the engine was drained and takes no requests: resume it first".into())
}

fn ended() -> EngineError {
    EngineError::Internal("the model was unloaded, or the engine thread has ended; load the model again".into())
}

pub use paged::{KvCacheStats, PoolSnapshot};
