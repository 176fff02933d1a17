//! What all requests share.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use openai::{ApiError, response::Envelope, response::unix_seconds};
use tokio::{sync::watch, time::Instant};

use crate::{
    StartError,
    auth::{Caller, Keys, Taken},
    cancels::{self, Cancelled, Cancels},
    config::ServerConfig,
    mailbox::Bell,
    metrics::Metrics,
    models::{Host, Model, Models, Target},
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
    /// For models, one for each of the settings.
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
    pub fn envelope(&self, prefix: &str, model: &Model) -> Result<Envelope, ApiError> {
        Ok(Envelope {
            id: self.id(prefix),
            created: unix_seconds(),
            model: model.id().to_owned(),
            system_fingerprint: model.known()?.fingerprint.clone(),
        })
    }

    /// The model that a request names. One that was never loaded is loaded first: without it a request cannot be read. That
    /// takes no longer than the request has, by a limit of its own and by that of the server.
    pub async fn target(&self, caller: &Caller, name: Option<&str>, own: Option<Duration>) -> Result<Target, ApiError> {
        let target = self.models.find(name)?;
        if target.model.known().is_err() {
            let _admission = self.admit(caller, &target.model, 1)?;
            let cancelled = self.cancels.register(&caller.request_id);
            let loaded = self.models.ready(&target.model);
            self.in_time(&cancelled, self.time_left(&target, own), loaded).await?;
        }
        Ok(target)
    }

    /// How long a request may still take, by a limit of its own and by that of the server.
    pub fn time_left(&self, target: &Target, own: Option<Duration>) -> Option<Duration> {
        let limit = self.config.request_timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let limit = [own, limit].into_iter().flatten().min()?;
        Some(limit.saturating_sub(target.since.elapsed()))
    }

    /// What a request waits for before it runs; an error when that takes longer than it may, or nobody wants it any more.
    pub async fn in_time<T>(
        &self,
        cancelled: &Cancelled,
        left: Option<Duration>,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let late = async {
            match left.and_then(|left| Instant::now().checked_add(left)) {
                Some(end) => tokio::time::sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            error = self.ended(cancelled) => Err(error),
            done = work => done,
            () = late => Err(too_late()),
        }
    }

    /// Becomes ready, with the reason, when a request must end before its time.
    pub fn ended(&self, cancelled: &Cancelled) -> impl Future<Output = ApiError> + Send + use<> {
        let (mut abort, mut cancelled) = (self.abort.subscribe(), cancelled.watch());
        async move {
            tokio::select! {
                _ = abort.wait_for(|is_aborted| *is_aborted) => draining(),
                _ = cancelled.wait_for(|is_cancelled| *is_cancelled) => cancels::error(),
            }
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

/// A request's time was over before it ran.
pub fn too_late() -> ApiError {
    let message = "the request's deadline passed before it could run: its model was being loaded, or others were before it";
    ApiError::new(504, "timeout_error", "deadline_exceeded", None, message.into())
}

/// The server is about to end.
pub fn draining() -> ApiError {
    let mut error = ApiError::new(503, "server_error", "draining", None, "the server is shutting down".into());
    error.retry_after = Some(10);
    error
}
