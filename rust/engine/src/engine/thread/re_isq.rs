//! Other weights for a model that serves.

use std::sync::mpsc::Sender;

use super::EngineThread;
use crate::{
    EngineError,
    engine::{EngineConfig, events, tier},
    kv_tier::{FlushOnDrop, Swapper},
    model::ModelFiles,
    model_weights::ModelWeights,
};

/// Weights that are to answer requests once nobody is answered by the old ones.
pub struct NewWeights {
    pub weights: ModelWeights,
    /// What they were made from, and how.
    pub files: ModelFiles,
    pub config: EngineConfig,
    /// Of the files' bytes, where somebody needs it.
    pub digest: Option<[u8; 32]>,
    /// Where to tell that it is done; what comes with it waits, at the end, until what was computed is in the tier.
    pub reply: Sender<Result<Option<FlushOnDrop>, EngineError>>,
}

impl EngineThread {
    /// Where weights wait to be changed and nobody is answered any more: changes them, and begins the requests that came
    /// meanwhile. Whether there was anything to do.
    pub(super) fn change_weights(&mut self) -> bool {
        let Some(new) = self.new_weights.take() else { return false };
        let reply = new.reply.clone();
        let changed = self.guarded(|thread| thread.replace_weights(*new));
        self.begin_held();
        // Who has stopped to wait is not there to be told.
        reply.send(changed.unwrap_or_else(|why| Err(EngineError::Internal(why)))).unwrap_or_default();
        true
    }

    #[cfg(test)]
    pub(in crate::engine) fn waits_for_weights(&self) -> bool {
        self.new_weights.is_some()
    }

    fn replace_weights(&mut self, new: NewWeights) -> Result<Option<FlushOnDrop>, EngineError> {
        let NewWeights { weights, files, config, digest, .. } = new;
        let backend = std::sync::Arc::clone(self.runner.backend());
        let swapper = tier::open(&files, &config, &self.runner, &*backend, digest.as_ref())?;
        self.runner.replace(weights, files.config())?;
        // What layers look at was made by the old ones.
        if let Some(senses) = self.senses.as_mut().filter(|_| files.config().is_crossed()) {
            senses.forget();
        }
        if let Some(drafter) = self.drafter.as_mut().filter(|drafter| drafter.is_head()) {
            drafter.runner.share(&self.runner);
        }
        let flush = swapper.as_ref().map(Swapper::flush_on_drop);
        self.swapper = swapper;
        if let (Some(teller), Some(digest)) = (&mut self.teller, &digest) {
            teller.digest_key = events::digest_key(&files, &config, digest);
        }
        self.renew_scheduler();
        device::host::trim_heap();
        Ok(flush)
    }

    /// Begins the requests that have waited for other weights. They were accepted before any drain that is asked for now.
    pub(super) fn begin_held(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let (is_paused, is_draining) = (self.scheduler.is_paused(), self.scheduler.is_draining());
        self.scheduler.resume();
        for submitted in std::mem::take(&mut self.held) {
            let _ = self.guarded(|thread| thread.receive_request(submitted));
        }
        if is_draining {
            let _ = self.guarded(Self::begin_waiting);
            self.scheduler.drain();
        }
        if is_paused {
            self.scheduler.pause();
        }
    }
}
