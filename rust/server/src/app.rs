//! What all requests share.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use openai::{ApiError, response::Envelope, response::unix_seconds};
use tokio::sync::watch;

use crate::{
    StartError,
    auth::{Caller, Keys, Taken},
    cancels::Cancels,
    config::ServerConfig,
    mailbox::Bell,
    metrics::Metrics,
    models::{Host, Model, Models},
    seeing::Seeing,
    store::Store,
    traces::Traces,
};

/// The state of a server.
pub struct App {
    /// The models.
    pub models: Models,
    /// How it is set up.
    pub config: ServerConfig,
    pub(crate) keys: Keys,
    pub(crate) metrics: Metrics,
    pub(crate) traces: Option<Traces>,
    pub(crate) bell: Arc<Bell>,
    pub(crate) seeing: Seeing,
    pub(crate) responses: Store,
    pub(crate) is_draining: AtomicBool,
    /// Becomes true when running streams must end.
    pub(crate) abort: watch::Sender<bool>,
    pub(crate) cancels: Arc<Cancels>,
    ids: Ids,
}

/// Ids of answers: nobody can guess the next.
struct Ids {
    key: [u8; 32],
    next: AtomicU64,
}

impl App {
    /// For models that are loaded, one for each of the settings.
    pub fn new(hosts: Vec<Arc<dyn Host>>, config: ServerConfig) -> Result<Self, StartError> {
        let unmeasured = |error| StartError(format!("the metrics cannot be made: {error}"));
        let metrics = Metrics::new().map_err(unmeasured)?;
        Ok(Self {
            keys: Keys::new(&config.keys, config.cache_salt_secret.as_deref())?,
            traces: config.otlp_endpoint.as_deref().map(Traces::new).transpose()?,
            bell: Arc::default(),
            seeing: Seeing::new(&config)?,
            models: Models::new(hosts, &config, &metrics)?,
            metrics,
            responses: Store::default(),
            is_draining: AtomicBool::new(false),
            abort: watch::channel(false).0,
            cancels: Arc::default(),
            ids: Ids { key: rand::random(), next: AtomicU64::new(0) },
            config,
        })
    }

    /// A new id with this prefix.
    pub fn id(&self, prefix: &str) -> String {
        let number = self.ids.next.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.ids.key, &number.to_le_bytes());
        format!("{prefix}{}", &hash.to_hex()[..32])
    }

    /// What all parts of a new answer of a model share.
    pub fn envelope(&self, prefix: &str, model: &Model) -> Envelope {
        Envelope {
            id: self.id(prefix),
            created: unix_seconds(),
            model: model.id().to_owned(),
            system_fingerprint: model.fingerprint.clone(),
        }
    }

    /// The right to run so many choices of a model, until it is dropped; an error with an honest wait when too many wait already.
    pub fn admit(&self, caller: &Caller, model: &Arc<Model>, num_choices: usize) -> Result<Admission, ApiError> {
        if self.is_draining.load(Ordering::SeqCst) {
            return Err(draining());
        }
        let taken = caller.quota.as_ref().map(|quota| quota.take(num_choices)).transpose();
        let taken = taken.map_err(|error| model.too_many(num_choices, error))?;
        model.enter(&self.config, num_choices)?;
        Ok(Admission { model: Arc::clone(model), num_choices, _taken: taken })
    }

    /// Choices that run or wait, of all models.
    pub fn in_flight(&self) -> usize {
        self.models.iter().map(|model| model.in_flight.load(Ordering::SeqCst)).sum()
    }
}

/// The right of a request to run.
pub struct Admission {
    model: Arc<Model>,
    num_choices: usize,
    _taken: Option<Taken>,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.model.leave(self.num_choices);
    }
}

/// The server is about to end.
pub fn draining() -> ApiError {
    let mut error = ApiError::new(503, "server_error", "draining", None, "the server is shutting down".into());
    error.retry_after = Some(10);
    error
}
