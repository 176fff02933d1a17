//! Telling others what the prefix cache holds.

use super::Scheduler;
use crate::kv_events::{EventLog, KvEvent};

impl Scheduler {
    /// Records which full blocks can be found, from now on, and forgets what could be found before. `digest_key` decides what
    /// blocks are called: replicas that serve the same weights have the same one. `max_events` are kept until somebody takes
    /// them; where there were more, [`Self::take_kv_events`] begins anew.
    pub fn record_kv_events(&mut self, digest_key: [u8; 32], max_events: usize) {
        if self.manager.pool().index().num_nodes() > 0 {
            self.reset_prefix_cache();
        }
        self.manager.index_mut().record_events(EventLog::new(digest_key, max_events));
    }

    /// Moves what has happened since the last time behind `out`, in order: whoever applies all events in turn knows exactly
    /// what can be found. Where events were lost it is [`Self::list_kv_events`].
    pub fn take_kv_events(&mut self, out: &mut Vec<KvEvent>) {
        self.manager.index_mut().take_events(out);
    }

    /// [`KvEvent::Cleared`], then every block that can be found, behind `out`: enough to know all without what was told before.
    /// Events that were not taken are forgotten.
    pub fn list_kv_events(&mut self, out: &mut Vec<KvEvent>) {
        self.manager.index_mut().list_events(out);
    }
}
