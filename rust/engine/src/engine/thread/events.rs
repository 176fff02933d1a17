//! Events beside the steps.

use std::{sync::mpsc::RecvTimeoutError, time::Duration};

use kv_events::StatsReader;

use super::{Command, EngineThread};
use crate::engine::events::{MAX_EVENTS, Teller};

/// How often an engine that has nothing to do looks whether somebody asks for all that is held.
const IDLE_TURN: Duration = Duration::from_millis(100);

impl EngineThread {
    /// Tells of the prefix cache from now on, if anybody is told; what reads how that goes.
    pub fn tell(&mut self, teller: Option<Teller>) -> Option<StatsReader> {
        self.teller = teller;
        self.record_events();
        self.teller.as_ref().map(|teller| teller.publisher.stats_reader())
    }

    /// The scheduler is new: it must record what is to be told.
    pub(super) fn record_events(&mut self) {
        if let Some(teller) = &self.teller {
            self.scheduler.record_kv_events(teller.digest_key, MAX_EVENTS);
        }
    }

    /// Tells what has happened since the last time.
    pub(super) fn publish_events(&mut self) {
        if let Some(teller) = &mut self.teller {
            teller.publisher.publish(&mut self.scheduler);
        }
    }

    /// Waits for a command while there is nothing else to do; `None` when there will be none.
    pub(super) fn wait_for_command(&mut self) -> Option<Command> {
        if self.teller.is_none() {
            return self.inbox.recv().ok();
        }
        loop {
            match self.inbox.recv_timeout(IDLE_TURN) {
                Ok(command) => return Some(command),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    if self.teller.as_ref().is_some_and(|teller| teller.publisher.is_behind()) {
                        self.publish_events();
                    }
                }
            }
        }
    }
}
