//! When models are loaded and unloaded: for a request, by an operator, after a while without requests, and to make room.

use std::sync::{
    Arc, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use engine::{Engine, EngineError, Isq};
use openai::ApiError;
use tokio::sync::OwnedSemaphorePermit;

use super::{
    Model, Models,
    model::{Change, Turn},
};
use crate::errors::internal;

/// Whether nothing is scheduled until a resume, of models that are loaded meanwhile too.
#[derive(Debug, Default)]
pub(super) struct Pause(AtomicBool);

impl Pause {
    /// Tells an engine that has just been loaded.
    fn tell(&self, engine: &Engine) -> Result<(), EngineError> {
        if !self.0.load(Ordering::SeqCst) {
            return Ok(());
        }
        engine.pause()?;
        // Whoever ended the pause meanwhile may have come before it.
        if self.0.load(Ordering::SeqCst) { Ok(()) } else { engine.resume() }
    }
}

impl Models {
    /// Schedules nothing until a resume; requests wait.
    pub fn pause(&self) -> Result<(), ApiError> {
        self.pause.0.store(true, Ordering::SeqCst);
        self.iter().filter_map(|model| model.loaded()).try_for_each(|engine| Ok(engine.pause()?))
    }

    /// Goes on after a pause.
    pub fn resume(&self) -> Result<(), ApiError> {
        self.pause.0.store(false, Ordering::SeqCst);
        self.iter().filter_map(|model| model.loaded()).try_for_each(|engine| Ok(engine.resume()?))
    }

    /// The engine of a model, after loading it where it is not loaded. It stays loaded for whoever is counted with
    /// [`Model::enter`].
    pub async fn ready(&self, model: &Arc<Model>) -> Result<Engine, ApiError> {
        if let Some(engine) = model.at_hand() {
            return Ok(engine);
        }
        let turn = model.turn().await;
        if let Some(engine) = model.loaded() {
            return Ok(engine);
        }
        let place = self.place().await?;
        let pause = Arc::clone(&self.pause);
        let load = move |change: &Change| {
            let model = change.model();
            let engine = model.host.load()?;
            model.hold(place);
            // One of which nothing is known, or that is not paused, is of no use.
            if let Err(error) = model.learn(&engine).and_then(|()| pause.tell(&engine)) {
                model.free()?;
                return Err(error);
            }
            Ok(engine)
        };
        beside(turn.change(), load).await.map_err(|error| {
            // Clients are not told where files lie.
            tracing::warn!("the model {:?} cannot be loaded: {}", model.id(), error.message);
            let message = format!("the model `{}` cannot be loaded; the server's log says why", model.id());
            ApiError::new(503, "server_error", "model_not_loaded", None, message)
        })
    }

    /// The right to load one more model, where there is a limit: where that is reached, the idle one that was not used for
    /// longest is unloaded, as soon as there is one.
    async fn place(&self) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let Some(places) = &self.places else { return Ok(None) };
        // Who came first is first.
        let _turn = self.making_room.lock().await;
        loop {
            if let Ok(place) = Arc::clone(places).try_acquire_owned() {
                return Ok(Some(place));
            }
            let loaded = || self.iter().filter(|model| model.loaded().is_some());
            if Some(loaded().count()) == self.max_loaded && loaded().all(|model| model.would_lose_adapters()) {
                let message = "as many models as may be are loaded, and would lose adapters that were loaded over HTTP: unload one \
                               with POST /v1/models/unload";
                return Err(ApiError::new(503, "server_error", "model_not_loaded", None, message.into()));
            }
            // One that cannot be unloaded would be asked again and again.
            let mut idle: Vec<_> = loaded().filter(|model| model.is_idle() && !model.would_lose_adapters()).collect();
            idle.sort_by_key(|model| model.last_used());
            let mut has_room = false;
            for model in idle {
                has_room = model.unload_idle("to make room for another").await?;
                if has_room {
                    break;
                }
            }
            if !has_room {
                self.freed.notified().await;
            }
        }
    }
}

impl Model {
    /// Takes it out of memory until a request, or a reload, wants it; nothing happens where it is unloaded.
    pub async fn unload(self: &Arc<Self>) -> Result<(), ApiError> {
        // A request that waits for room to load it has the turn.
        if self.loaded().is_none() && !self.is_changing() {
            return Ok(());
        }
        beside(self.turn().await.change(), |change| change.model().free()).await
    }

    /// Quantizes its weights anew, while requests are answered.
    pub async fn re_isq(self: &Arc<Self>, isq: Isq) -> Result<(), ApiError> {
        beside(self.turn().await, move |turn: &Turn| turn.model().host.re_isq(isq)).await
    }

    /// Unloads it if it is idle, nobody changes it and nothing is lost; whether it did.
    async fn unload_idle(self: &Arc<Self>, why: &str) -> Result<bool, ApiError> {
        let Some(turn) = self.turn_now() else { return Ok(false) };
        let change = turn.change();
        // A request that is counted from here on sees the change, and waits.
        if !self.is_idle() || self.would_lose_adapters() {
            return Ok(false);
        }
        tracing::info!("the model {:?} is unloaded {why}", self.id());
        beside(change, |change| change.model().free()).await?;
        Ok(true)
    }

    /// Unloads it each time that it has been idle for as long as it may be; never ends.
    pub async fn watch_idleness(self: Arc<Self>) {
        let Some(limit) = self.idle_unload() else { return };
        loop {
            // One that is in use, or not there, may not be idle for long enough before it is looked at again.
            let left = if self.is_idle() { limit.saturating_sub(self.last_used().elapsed()) } else { limit };
            if left.is_zero() {
                if let Err(error) = self.unload_idle("for it was idle").await {
                    tracing::warn!("the model {:?} cannot be unloaded: {}", self.id(), error.message);
                }
                tokio::time::sleep(limit).await;
            } else {
                tokio::time::sleep(left).await;
            }
        }
    }

    fn free(&self) -> Result<(), EngineError> {
        self.host.unload()?;
        self.hold(None);
        Ok(())
    }

    /// Has this place from now on, and gives another back.
    pub(super) fn hold(&self, place: Option<OwnedSemaphorePermit>) {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = place;
    }
}

/// Work beside the server's thread, which has the right to it and goes on when the client goes: one piece for a model at a time,
/// lest those who wait for it keep all threads.
async fn beside<R: Send + 'static, T: Send + 'static>(
    right: R,
    work: impl FnOnce(&R) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(move || work(&right)).await;
    Ok(done.map_err(|panic| internal(format!("a defect ended the request: {panic}")))??)
}
