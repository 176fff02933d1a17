//! Somebody who knows only what events tell, and loses some.

use std::collections::HashMap;

use paged::*;

use super::Sim;

/// What a consumer believes to be held, and how it comes to hear of it.
pub struct Consumer {
    /// By digest and group.
    pub held: HashMap<(u64, u32), StoredBlock>,
    /// One in so many batches of events does not arrive; then all is asked for anew. 0: none.
    loses_one_in: u64,
    /// One in so many times it looks; 0 and 1: each time.
    looks_one_in: u64,
    count: u64,
    /// Events that it applied, and times that it began anew.
    pub num_events: usize,
    pub num_listings: usize,
}

impl Consumer {
    pub fn apply(&mut self, event: KvEvent) {
        self.num_events += 1;
        match event {
            KvEvent::Stored(block) => {
                let before = self.held.insert((block.digest, block.group), block);
                assert_eq!(before, None, "stored twice");
            }
            KvEvent::Removed { digest, group } => {
                assert!(self.held.remove(&(digest, group)).is_some(), "removed, and was not stored");
            }
            KvEvent::Cleared => self.held.clear(),
        }
    }

    /// Drawn from a fixed sequence.
    fn happens_one_in(&mut self, n: u64) -> bool {
        self.count = self.count.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        n > 0 && (self.count >> 33).is_multiple_of(n)
    }
}

impl Sim {
    /// Records events under `digest_key`, `max_events` of them; see [`Consumer`].
    pub fn record_events(&mut self, digest_key: [u8; 32], max_events: usize, loses_one_in: u64, looks_one_in: u64) {
        self.scheduler.record_kv_events(digest_key, max_events);
        let held = HashMap::new();
        self.consumer = Some(Consumer { held, loses_one_in, looks_one_in, count: 1, num_events: 0, num_listings: 0 });
    }

    /// The consumer, where it looks, holds exactly what the pool does.
    pub(super) fn check_events(&mut self) {
        let Some(consumer) = &mut self.consumer else { return };
        let stats = self.scheduler.stats();
        assert_eq!(stats.kv_event_blocks, self.scheduler.pool().kv_event_blocks().count());
        if consumer.looks_one_in > 1 && !consumer.happens_one_in(consumer.looks_one_in) {
            return;
        }
        let mut events = Vec::new();
        self.scheduler.take_kv_events(&mut events);
        if consumer.happens_one_in(consumer.loses_one_in) {
            events.clear();
            self.scheduler.list_kv_events(&mut events);
            consumer.num_listings += 1;
        }
        for event in events {
            consumer.apply(event);
        }
        let mut held: Vec<_> = consumer.held.keys().copied().collect();
        let mut expected: Vec<_> = self.scheduler.pool().kv_event_blocks().collect();
        held.sort_unstable();
        expected.sort_unstable();
        assert_eq!(held, expected, "a consumer of all events holds something else than the pool");
        assert!(consumer.held.values().all(|block| block.tokens.len() == stats.block_size));
    }
}
