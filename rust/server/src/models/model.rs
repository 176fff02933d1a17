//! A model that is served: what it is called, what is known of it, and who waits for it.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use engine::{AdapterChoice, AdapterInfo, Engine, EngineError, Vitals};
use openai::{ApiError, ModelContext, response::unix_seconds};
use tokio::sync::{Notify, OwnedMutexGuard, OwnedSemaphorePermit};

use super::{DEFAULT, Host};
use crate::{
    StartError,
    config::{ModelConfig, ServerConfig},
    metrics::{Metrics, ModelMetrics},
    routes::Watch,
};

/// A model that is served.
pub struct Model {
    /// What it is called, and its limits.
    pub config: ModelConfig,
    /// It serves requests that name no model.
    is_default: bool,
    pub(super) host: Arc<dyn Host>,
    /// The engine that was there last: it tells of the model also when that is unloaded.
    last: RwLock<Option<Engine>>,
    known: OnceLock<Known>,
    /// One at a time loads or unloads it.
    changing: Arc<tokio::sync::Mutex<()>>,
    /// It is being loaded or unloaded: its engine, if there is one, is not for requests yet, or no more.
    is_changing: AtomicBool,
    /// The adapters that its engine began with.
    loaded_with: Mutex<Vec<AdapterInfo>>,
    /// Its place among those that may be loaded at once, while it is loaded.
    pub(super) place: Mutex<Option<OwnedSemaphorePermit>>,
    /// Told when another model may find it idle, or gone.
    freed: Arc<Notify>,
    pub(crate) created: u64,
    pub(crate) metrics: ModelMetrics,
    /// Choices that run or wait.
    pub(crate) in_flight: AtomicUsize,
    /// When a request of it last began or ended.
    last_used: Mutex<Instant>,
    pub(crate) watch: Watch,
    served: Served,
}

/// What is known of a model once it has been loaded.
pub struct Known {
    /// What the parsers of requests must know.
    pub context: ModelContext,
    /// Of the version and the model.
    pub fingerprint: String,
}

/// Choices that have ended, for an honest Retry-After.
struct Served {
    since: Instant,
    count: AtomicU64,
}

impl Model {
    pub(super) fn new(
        host: Arc<dyn Host>,
        config: ModelConfig,
        is_default: bool,
        metrics: &Metrics,
        freed: &Arc<Notify>,
    ) -> Result<Self, StartError> {
        let unmeasured = |error| StartError(format!("the metrics cannot be made: {error}"));
        let metrics = ModelMetrics::new(metrics, &config.model_id, config.max_seqs).map_err(unmeasured)?;
        let engine = host.engine();
        let model = Self {
            is_default,
            host,
            last: RwLock::default(),
            known: OnceLock::new(),
            changing: Arc::default(),
            is_changing: AtomicBool::new(false),
            loaded_with: Mutex::default(),
            place: Mutex::default(),
            freed: Arc::clone(freed),
            created: unix_seconds(),
            metrics,
            in_flight: AtomicUsize::new(0),
            last_used: Mutex::new(Instant::now()),
            watch: Watch::default(),
            served: Served { since: Instant::now(), count: AtomicU64::new(0) },
            config,
        };
        match engine {
            Some(engine) => model.learn(&engine).map_err(|error| StartError(error.to_string()))?,
            None => model.metrics.is_unloaded(),
        }
        Ok(model)
    }

    /// Keeps what an engine that was loaded tells of the model.
    pub(super) fn learn(&self, engine: &Engine) -> Result<(), EngineError> {
        // The question turns the engine once: those who follow the cache hear that it is empty before the first request.
        let stats = engine.kv_cache_stats()?;
        self.metrics.read(engine, &stats);
        self.known.get_or_init(|| Known {
            context: ModelContext {
                knows_developer: engine.chat_template().is_some_and(|text| text.contains("developer")),
                media: engine.media_kinds(),
                model_id: self.config.model_id.clone(),
            },
            fingerprint: format!("mistral_paged-{}-{}", env!("CARGO_PKG_VERSION"), engine.architecture()),
        });
        *self.loaded_with.lock().unwrap_or_else(PoisonError::into_inner) = engine.adapters();
        *self.last.write().unwrap_or_else(PoisonError::into_inner) = Some(engine.clone());
        self.touch();
        Ok(())
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.config.model_id
    }

    /// Its id and its further names, of the default model that word at the end.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.config.names().chain(self.is_default.then_some(DEFAULT))
    }

    /// Whether this is a name of it; none at all is one of the default model.
    pub fn is_named(&self, name: &str) -> bool {
        self.names().any(|own| own == name) || (self.is_default && name.is_empty())
    }

    /// Whether an adapter of it goes by this alias, also while it is unloaded.
    pub(super) fn has_adapter(&self, alias: &str) -> bool {
        match self.host.engine() {
            Some(engine) => engine.adapter_generation(&AdapterChoice::Alias(alias.to_owned())).is_ok(),
            None => self.is_loaded_with(alias),
        }
    }

    /// Whether an adapter of this alias is loaded with it, whether it is there now or was taken away since.
    pub(super) fn is_loaded_with(&self, alias: &str) -> bool {
        self.host.own_adapters().iter().any(|own| own == alias)
    }

    /// Aliases of its adapters, also while it is unloaded.
    pub fn adapters(&self) -> Vec<String> {
        match self.host.engine() {
            Some(engine) => engine.adapters().into_iter().map(|adapter| adapter.alias).collect(),
            None => self.host.own_adapters(),
        }
    }

    /// Whether it has adapters that it would not have once it is loaded again, be it by the same name.
    pub(super) fn would_lose_adapters(&self) -> bool {
        let loaded_with = self.loaded_with.lock().unwrap_or_else(PoisonError::into_inner);
        let is_kept = |adapter: &AdapterInfo| {
            loaded_with.iter().any(|own| (&own.alias, &own.generation) == (&adapter.alias, &adapter.generation))
        };
        self.host.engine().is_some_and(|engine| !engine.adapters().iter().all(is_kept))
    }

    /// "loaded", "unloaded" or "reloading".
    pub fn status(&self) -> &'static str {
        self.host.status()
    }

    /// The engine, where it is loaded.
    pub fn loaded(&self) -> Option<Engine> {
        self.host.engine()
    }

    /// The engine, where it is loaded and stays so for requests that are counted.
    pub(super) fn at_hand(&self) -> Option<Engine> {
        if self.is_changing() { None } else { self.host.engine() }
    }

    /// Whether it is being loaded or unloaded.
    pub(super) fn is_changing(&self) -> bool {
        self.is_changing.load(Ordering::SeqCst)
    }

    /// The engine, which only tells of the model while that is unloaded; an error of one that was never loaded.
    pub fn engine(&self) -> Result<Engine, ApiError> {
        let last = || self.last.read().unwrap_or_else(PoisonError::into_inner).clone();
        self.host.engine().or_else(last).ok_or_else(|| self.gone())
    }

    /// What is known of it; an error of one that was never loaded.
    pub fn known(&self) -> Result<&Known, ApiError> {
        self.known.get().ok_or_else(|| self.gone())
    }

    /// What a client is told whose request came as the model was taken out of memory.
    pub fn gone(&self) -> ApiError {
        let message = format!("the model `{}` is not loaded; the next request loads it", self.id());
        let mut error = ApiError::new(503, "server_error", "model_not_loaded", None, message);
        error.retry_after = Some(1);
        error
    }

    /// How its engine does; `None` of one that is not loaded.
    pub fn vitals(&self) -> Result<Option<Vitals>, ApiError> {
        Ok(self.loaded().map(|engine| engine.vitals()).transpose()?)
    }

    /// The right to load, unload or change it, once nobody else has it.
    pub(super) async fn turn(self: &Arc<Self>) -> Turn {
        let turn = Arc::clone(&self.changing).lock_owned().await;
        Turn { model: Arc::clone(self), turn: Some(turn) }
    }

    /// The same, if nobody has it.
    pub(super) fn turn_now(self: &Arc<Self>) -> Option<Turn> {
        let turn = Arc::clone(&self.changing).try_lock_owned().ok()?;
        Some(Turn { model: Arc::clone(self), turn: Some(turn) })
    }

    /// A request of it begins, or ends.
    fn touch(&self) {
        *self.last_used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// When a request of it last began or ended.
    pub(super) fn last_used(&self) -> Instant {
        *self.last_used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is loaded for nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) == 0 && self.host.engine().is_some()
    }

    /// How long it may be idle before it is unloaded.
    pub(super) fn idle_unload(&self) -> Option<Duration> {
        self.config.idle_unload.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    /// So many choices begin, unless that is too many beside others.
    pub(crate) fn enter(&self, config: &ServerConfig, num_choices: usize) -> Result<(), ApiError> {
        let limit = self.config.max_seqs + config.max_queued;
        let before = self.in_flight.fetch_add(num_choices, Ordering::SeqCst);
        // One request too large for an empty queue still runs: it waits for itself alone.
        if before > 0 && before + num_choices > limit {
            self.in_flight.fetch_sub(num_choices, Ordering::SeqCst);
            let message = format!("{before} answers are being made or wait, and {limit} may; try again in a moment");
            return Err(self.too_many(before, ApiError::new(429, "rate_limit_error", "queue_full", None, message)));
        }
        self.touch();
        Ok(())
    }

    /// So many choices have ended.
    pub(crate) fn leave(&self, num_choices: usize) {
        self.touch();
        self.served.count.fetch_add(num_choices as u64, Ordering::Relaxed);
        if self.in_flight.fetch_sub(num_choices, Ordering::SeqCst) == num_choices {
            self.freed.notify_one();
        }
    }

    /// Whether prompts of so many tokens, which have been submitted, may wait beside the others that do.
    pub(crate) fn check_waiting_tokens(&self, config: &ServerConfig, own: usize) -> Result<(), ApiError> {
        let Some(limit) = config.max_queued_tokens else { return Ok(()) };
        let others = self.loaded().map_or(0, |engine| engine.waiting_tokens()).saturating_sub(own);
        // One prompt too long for an empty queue still waits: for nobody.
        if others == 0 || others + own <= limit {
            return Ok(());
        }
        let message = format!("prompts of {others} tokens wait, and this one has {own}; {limit} may; try again in a moment");
        let error = ApiError::new(429, "rate_limit_error", "queue_full", None, message);
        Err(self.too_many(self.in_flight.load(Ordering::SeqCst), error))
    }

    /// The refusal of a request, counted, with an honest wait.
    pub(crate) fn too_many(&self, waiting: usize, mut error: ApiError) -> ApiError {
        self.metrics.rejected(error.code);
        error.retry_after = Some(self.retry_after(waiting));
        error
    }

    /// Seconds until half of what waits is served, by the rate so far; 1 to 60.
    fn retry_after(&self, waiting: usize) -> u64 {
        let served = self.served.count.load(Ordering::Relaxed) as f64;
        let rate = served / self.served.since.elapsed().as_secs_f64().max(1.0);
        if rate > 0.0 { ((waiting as f64 / 2.0 / rate).ceil() as u64).clamp(1, 60) } else { 10 }
    }
}

/// The right to load, unload or change a model. Whoever waits for a place hears of its end.
pub(super) struct Turn {
    model: Arc<Model>,
    /// There until the end.
    turn: Option<OwnedMutexGuard<()>>,
}

impl Turn {
    /// The model.
    pub(super) fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// From now on, and until it ends, requests wait for it.
    pub(super) fn change(self) -> Change {
        self.model.is_changing.store(true, Ordering::SeqCst);
        Change(self)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        drop(self.turn.take());
        self.model.freed.notify_one();
    }
}

/// A model that is being loaded or unloaded.
pub(super) struct Change(Turn);

impl Change {
    /// The model.
    pub(super) fn model(&self) -> &Arc<Model> {
        &self.0.model
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        // Before the turn ends.
        self.0.model.is_changing.store(false, Ordering::SeqCst);
    }
}
