//! What all requests share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use engine::{AdapterChoice, AdapterInfo, Engine, Vitals};
use openai::{ApiError, ModelContext, response::Envelope, response::unix_seconds};
use tokio::sync::watch;

use crate::{
    StartError,
    auth::{Caller, Keys, Taken},
    cancels::Cancels,
    config::ServerConfig,
    errors::model_not_found,
    mailbox::Bell,
    metrics::Metrics,
    routes::Watch,
    seeing::Seeing,
    store::Store,
    traces::Traces,
};

/// The state of a server.
pub struct App {
    /// The model.
    pub engine: Engine,
    /// How it is set up.
    pub config: ServerConfig,
    pub(crate) keys: Keys,
    pub(crate) metrics: Metrics,
    pub(crate) traces: Option<Traces>,
    pub(crate) bell: Arc<Bell>,
    pub(crate) context: ModelContext,
    pub(crate) seeing: Seeing,
    pub(crate) fingerprint: String,
    pub(crate) created: u64,
    pub(crate) responses: Store,
    pub(crate) is_draining: AtomicBool,
    /// Choices that run or wait.
    pub(crate) in_flight: AtomicUsize,
    /// Becomes true when running streams must end.
    pub(crate) abort: watch::Sender<bool>,
    pub(crate) watch: Watch,
    pub(crate) cancels: Arc<Cancels>,
    served: Served,
    ids: Ids,
}

/// Choices that have ended, for an honest Retry-After.
struct Served {
    since: Instant,
    count: AtomicU64,
}

/// Ids of answers: nobody can guess the next.
struct Ids {
    key: [u8; 32],
    next: AtomicU64,
}

impl App {
    /// For an engine that is loaded.
    pub fn new(engine: Engine, config: ServerConfig) -> Result<Self, StartError> {
        let keys = Keys::new(&config.keys, config.cache_salt_secret.as_deref())?;
        let traces = config.otlp_endpoint.as_deref().map(Traces::new).transpose()?;
        let seeing = Seeing::new(&config)?;
        let context = ModelContext {
            knows_developer: engine.chat_template().is_some_and(|text| text.contains("developer")),
            media: engine.media_kinds(),
            model_id: config.model_id.clone(),
        };
        let fingerprint = format!("mistral_paged-{}-{}", env!("CARGO_PKG_VERSION"), engine.architecture());
        let metrics =
            Metrics::new(&engine, &config).map_err(|error| StartError(format!("the metrics cannot be made: {error}")))?;
        let app = Self {
            keys,
            metrics,
            traces,
            bell: Arc::default(),
            context,
            seeing,
            fingerprint,
            created: unix_seconds(),
            responses: Store::default(),
            is_draining: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            abort: watch::channel(false).0,
            watch: Watch::default(),
            cancels: Arc::default(),
            served: Served { since: Instant::now(), count: AtomicU64::new(0) },
            ids: Ids { key: rand::random(), next: AtomicU64::new(0) },
            engine,
            config,
        };
        match app.engine.adapters().into_iter().find(|adapter| app.is_model(&adapter.alias)) {
            Some(AdapterInfo { alias, .. }) => {
                Err(StartError(format!("the adapter's alias {alias:?} is a name of the model itself: give it another")))
            }
            None => Ok(app),
        }
    }

    /// A new id with this prefix.
    pub fn id(&self, prefix: &str) -> String {
        let number = self.ids.next.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.ids.key, &number.to_le_bytes());
        format!("{prefix}{}", &hash.to_hex()[..32])
    }

    /// What all parts of a new answer share.
    pub fn envelope(&self, prefix: &str) -> Envelope {
        Envelope {
            id: self.id(prefix),
            created: unix_seconds(),
            model: self.config.model_id.clone(),
            system_fingerprint: self.fingerprint.clone(),
        }
    }

    /// Whether this is a name of the model that is served.
    pub fn is_model(&self, name: &str) -> bool {
        let config = &self.config;
        ["default", ""].contains(&name) || name == config.model_id || config.served_model_names.iter().any(|own| own == name)
    }

    /// Whether a request's model is the one that is served, or one of its adapters, which it then is to run with.
    pub fn check_model(&self, model: Option<&str>) -> Result<Option<AdapterChoice>, ApiError> {
        let Some(model) = model.filter(|model| !self.is_model(model)) else { return Ok(None) };
        let choice = AdapterChoice::Alias(model.to_owned());
        match self.engine.adapter_generation(&choice) {
            Ok(_) => Ok(Some(choice)),
            Err(_) => Err(model_not_found(model, &self.config.model_id)),
        }
    }

    /// The right to run so many choices, until it is dropped; an error with an honest wait when too many wait already.
    pub fn admit(self: &Arc<Self>, caller: &Caller, num_choices: usize) -> Result<Admission, ApiError> {
        if self.is_draining.load(Ordering::SeqCst) {
            return Err(draining());
        }
        let taken = caller.quota.as_ref().map(|quota| quota.take(num_choices)).transpose();
        let taken = taken.map_err(|error| self.too_many(num_choices, error))?;
        let limit = self.config.max_seqs + self.config.max_queued;
        let before = self.in_flight.fetch_add(num_choices, Ordering::SeqCst);
        // One request too large for an empty queue still runs: it waits for itself alone.
        if before > 0 && before + num_choices > limit {
            self.in_flight.fetch_sub(num_choices, Ordering::SeqCst);
            let message = format!("{before} answers are being made or wait, and {limit} may; try again in a moment");
            return Err(self.too_many(before, ApiError::new(429, "rate_limit_error", "queue_full", None, message)));
        }
        Ok(Admission { app: Arc::clone(self), num_choices, _taken: taken })
    }

    /// Whether prompts of so many tokens, which have been submitted, may wait beside the others that do.
    pub fn check_waiting_tokens(&self, own: usize) -> Result<(), ApiError> {
        let Some(limit) = self.config.max_queued_tokens else { return Ok(()) };
        let others = self.engine.waiting_tokens().saturating_sub(own);
        // One prompt too long for an empty queue still waits: for nobody.
        if others == 0 || others + own <= limit {
            return Ok(());
        }
        let message = format!("prompts of {others} tokens wait, and this one has {own}; {limit} may; try again in a moment");
        let error = ApiError::new(429, "rate_limit_error", "queue_full", None, message);
        Err(self.too_many(self.in_flight.load(Ordering::SeqCst), error))
    }

    /// The refusal of a request, counted, with an honest wait.
    fn too_many(&self, waiting: usize, mut error: ApiError) -> ApiError {
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

    /// How the engine does.
    pub fn vitals(&self) -> Result<Vitals, ApiError> {
        self.engine.vitals().map_err(ApiError::from)
    }
}

/// The right of a request to run.
pub struct Admission {
    app: Arc<App>,
    num_choices: usize,
    _taken: Option<Taken>,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.app.in_flight.fetch_sub(self.num_choices, Ordering::SeqCst);
        self.app.served.count.fetch_add(self.num_choices as u64, Ordering::Relaxed);
    }
}

/// The server is about to end.
pub fn draining() -> ApiError {
    let mut error = ApiError::new(503, "server_error", "draining", None, "the server is shutting down".into());
    error.retry_after = Some(10);
    error
}
