//! The models of a server: what each is called, and the engine that it has while it is loaded.

use std::{
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use engine::{AdapterChoice, AdapterInfo, Engine, EngineError, Isq, Vitals};
use openai::{ApiError, ModelContext, response::unix_seconds};
use tokio::sync::Mutex;

use crate::{
    StartError,
    config::{ModelConfig, ServerConfig},
    errors::{internal, model_not_found},
    metrics::{Metrics, ModelMetrics},
    routes::Watch,
};

/// What a model is called where a request names none.
pub const DEFAULT: &str = "default";

/// Where a model lies that may be taken out of memory, and loaded again.
pub trait Host: Send + Sync {
    /// The engine, while it is loaded. At once.
    fn engine(&self) -> Option<Engine>;

    /// "loaded", "unloaded" or "reloading". At once.
    fn status(&self) -> &'static str;

    /// The engine, after loading the model where it is not loaded.
    fn load(&self) -> Result<Engine, EngineError>;

    /// Ends what runs, with the text that it has, and gives the memory back; nothing happens where it is not loaded.
    fn unload(&self) -> Result<(), EngineError>;

    /// Quantizes a loaded model anew; loaded again, it is quantized so.
    fn re_isq(&self, isq: Isq) -> Result<(), EngineError>;
}

/// An engine that stays loaded.
impl Host for Engine {
    fn engine(&self) -> Option<Engine> {
        Some(self.clone())
    }

    fn status(&self) -> &'static str {
        "loaded"
    }

    fn load(&self) -> Result<Engine, EngineError> {
        Ok(self.clone())
    }

    fn unload(&self) -> Result<(), EngineError> {
        Err(EngineError::NotSupported("the engine of this model is another's, who alone unloads it".into()))
    }

    fn re_isq(&self, isq: Isq) -> Result<(), EngineError> {
        Self::re_isq(self, isq, &|_| ())
    }
}

/// A model that is served.
pub struct Model {
    /// What it is called, and its limits.
    pub config: ModelConfig,
    /// It serves requests that name no model.
    is_default: bool,
    host: Arc<dyn Host>,
    /// The engine that was there last: it tells of the model also when that is unloaded.
    last: RwLock<Engine>,
    /// One at a time loads or unloads it.
    changing: Arc<Mutex<()>>,
    /// Aliases of the adapters that are loaded with it.
    own_adapters: Vec<String>,
    pub(crate) context: ModelContext,
    pub(crate) fingerprint: String,
    pub(crate) created: u64,
    pub(crate) metrics: ModelMetrics,
    /// Choices that run or wait.
    pub(crate) in_flight: AtomicUsize,
    pub(crate) watch: Watch,
    served: Served,
}

/// Choices that have ended, for an honest Retry-After.
struct Served {
    since: Instant,
    count: AtomicU64,
}

impl Model {
    fn new(host: Arc<dyn Host>, config: ModelConfig, is_default: bool, metrics: &Metrics) -> Result<Self, StartError> {
        let unready = || StartError(format!("the model {:?} is not loaded", config.model_id));
        let engine = host.engine().ok_or_else(unready)?;
        let unmeasured = |error| StartError(format!("the metrics cannot be made: {error}"));
        let metrics = ModelMetrics::new(metrics, &config.model_id, config.max_seqs).map_err(unmeasured)?;
        // The question turns the engine once: those who follow the cache hear that it is empty before the first request.
        let stats = engine.kv_cache_stats().map_err(|error| StartError(error.to_string()))?;
        metrics.read(&engine, &stats);
        Ok(Self {
            is_default,
            host,
            changing: Arc::default(),
            own_adapters: engine.adapters().into_iter().map(|AdapterInfo { alias, .. }| alias).collect(),
            context: ModelContext {
                knows_developer: engine.chat_template().is_some_and(|text| text.contains("developer")),
                media: engine.media_kinds(),
                model_id: config.model_id.clone(),
            },
            fingerprint: format!("mistral_paged-{}-{}", env!("CARGO_PKG_VERSION"), engine.architecture()),
            created: unix_seconds(),
            metrics,
            in_flight: AtomicUsize::new(0),
            watch: Watch::default(),
            served: Served { since: Instant::now(), count: AtomicU64::new(0) },
            last: RwLock::new(engine),
            config,
        })
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
    fn has_adapter(&self, alias: &str) -> bool {
        match self.host.engine() {
            Some(engine) => engine.adapter_generation(&AdapterChoice::Alias(alias.to_owned())).is_ok(),
            None => self.own_adapters.iter().any(|own| own == alias),
        }
    }

    /// Aliases of its adapters, also while it is unloaded.
    pub fn adapters(&self) -> Vec<String> {
        match self.host.engine() {
            Some(engine) => engine.adapters().into_iter().map(|adapter| adapter.alias).collect(),
            None => self.own_adapters.clone(),
        }
    }

    /// "loaded", "unloaded" or "reloading".
    pub fn status(&self) -> &'static str {
        self.host.status()
    }

    /// The engine, where it is loaded.
    pub fn loaded(&self) -> Option<Engine> {
        self.host.engine()
    }

    /// The engine, which only tells of the model while that is unloaded.
    pub fn engine(&self) -> Engine {
        match self.host.engine() {
            Some(engine) => {
                self.last.write().unwrap_or_else(PoisonError::into_inner).clone_from(&engine);
                engine
            }
            None => self.last.read().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// The engine, after loading the model where it is not loaded.
    pub async fn ready(self: &Arc<Self>) -> Result<Engine, ApiError> {
        if let Some(engine) = self.host.engine() {
            return Ok(engine);
        }
        let failed = |error: ApiError| {
            // Clients are not told where files lie.
            tracing::warn!("the model {:?} cannot be loaded again: {}", self.id(), error.message);
            let message = format!("the model `{}` cannot be loaded again; the server's log says why", self.id());
            ApiError::new(503, "server_error", "model_not_loaded", None, message)
        };
        self.change(|host| host.load()).await.map_err(failed)
    }

    /// What a client is told whose request came as the model was taken out of memory.
    pub fn gone(&self) -> ApiError {
        let message = format!("the model `{}` has been unloaded; the next request loads it again", self.id());
        let mut error = ApiError::new(503, "server_error", "model_not_loaded", None, message);
        error.retry_after = Some(1);
        error
    }

    /// Takes it out of memory until a request, or a reload, wants it; nothing happens where it is unloaded.
    pub async fn unload(self: &Arc<Self>) -> Result<(), ApiError> {
        self.change(|host| host.unload()).await
    }

    /// Quantizes its weights anew.
    pub async fn re_isq(self: &Arc<Self>, isq: Isq) -> Result<(), ApiError> {
        self.change(move |host| host.re_isq(isq)).await
    }

    /// Work on a host, beside the server's thread: of one model at a time, lest those who wait for it keep all threads.
    async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&dyn Host) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let changing = Arc::clone(&self.changing).lock_owned().await;
        let host = Arc::clone(&self.host);
        // The turn ends with the work, which goes on when the client goes.
        let done = tokio::task::spawn_blocking(move || {
            let _changing = changing;
            work(host.as_ref())
        });
        let done = done.await;
        Ok(done.map_err(|panic| internal(format!("a defect ended the request: {panic}")))??)
    }

    /// How its engine does; `None` of one that is not loaded.
    pub fn vitals(&self) -> Result<Option<Vitals>, ApiError> {
        Ok(self.loaded().map(|engine| engine.vitals()).transpose()?)
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
        Ok(())
    }

    /// So many choices have ended.
    pub(crate) fn leave(&self, num_choices: usize) {
        self.in_flight.fetch_sub(num_choices, Ordering::SeqCst);
        self.served.count.fetch_add(num_choices as u64, Ordering::Relaxed);
    }

    /// Whether prompts of so many tokens, which have been submitted, may wait beside the others that do.
    pub(crate) fn check_waiting_tokens(&self, config: &ServerConfig, own: usize) -> Result<(), ApiError> {
        let Some(limit) = config.max_queued_tokens else { return Ok(()) };
        let others = self.engine().waiting_tokens().saturating_sub(own);
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

/// A model that a request names, and what it then is to run with.
#[derive(Clone)]
pub struct Target {
    pub model: Arc<Model>,
    pub adapter: Option<AdapterChoice>,
}

/// All models of a server, in the order of its settings.
pub struct Models {
    all: Vec<Arc<Model>>,
    default: Arc<Model>,
}

impl Models {
    /// Models that are loaded, one for each of the settings. No two names, adapters' aliases among them, may be the same.
    pub(crate) fn new(hosts: Vec<Arc<dyn Host>>, config: &ServerConfig, metrics: &Metrics) -> Result<Self, StartError> {
        let default = config.check_models()?;
        if hosts.len() != config.models.len() {
            return Err(StartError(format!("there are {} models and settings of {}", hosts.len(), config.models.len())));
        }
        let all = hosts
            .into_iter()
            .zip(&config.models)
            .enumerate()
            .map(|(number, (host, config))| Model::new(host, config.clone(), number == default, metrics).map(Arc::new));
        let all = all.collect::<Result<Vec<_>, _>>()?;
        let models = Self { default: Arc::clone(&all[default]), all };
        for (number, model) in models.all.iter().enumerate() {
            for alias in &model.own_adapters {
                let others = models.all.iter().take(number).find(|other| other.own_adapters.contains(alias));
                if let Some(other) = models.named(alias).or(others) {
                    let whose = if Arc::ptr_eq(other, model) { "the model itself" } else { other.id() };
                    return Err(StartError(format!(
                        "the adapter's alias {alias:?} of {:?} is a name of {whose} already: give it another",
                        model.id()
                    )));
                }
            }
        }
        Ok(models)
    }

    /// All of them.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<Model>> {
        self.all.iter()
    }

    /// The one that serves requests that name none.
    pub fn default(&self) -> &Arc<Model> {
        &self.default
    }

    /// The model with this name.
    pub fn named(&self, name: &str) -> Option<&Arc<Model>> {
        self.all.iter().find(|model| model.is_named(name))
    }

    /// The model with this name, or with an adapter that goes by it; an error that says what there is.
    pub fn find(&self, name: Option<&str>) -> Result<Target, ApiError> {
        let Some(name) = name else { return Ok(Target { model: Arc::clone(&self.default), adapter: None }) };
        if let Some(model) = self.named(name) {
            return Ok(Target { model: Arc::clone(model), adapter: None });
        }
        let adapted = self.all.iter().find(|model| model.has_adapter(name));
        let adapted = adapted.ok_or_else(|| self.unknown(name))?;
        Ok(Target { model: Arc::clone(adapted), adapter: Some(AdapterChoice::Alias(name.to_owned())) })
    }

    /// What a client is told of a name that no model has.
    pub fn unknown(&self, name: &str) -> ApiError {
        model_not_found(name, &self.default, self.iter().map(|model| model.id()))
    }

    /// The model with an adapter of this alias.
    pub fn with_adapter(&self, alias: &str) -> Option<&Arc<Model>> {
        self.all.iter().find(|model| model.has_adapter(alias))
    }
}
