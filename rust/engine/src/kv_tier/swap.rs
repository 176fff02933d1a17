//! The engine thread's side of a tier: moves blocks, and measures.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use device::CacheEngine;
use paged::{Scheduler, TierBlock, TierConfig, TierRates, TierRecordId};

use super::{
    KvTier, TierError,
    writer::{FlushOnDrop, Writer},
};
use crate::EngineError;

/// Weight of a new measurement.
const NEWEST: f64 = 0.3;
/// When fetching was judged too slow, the judgement drifts back so far to what was believed at first: else one slow read would be
/// the last.
const FORGIVENESS: f64 = 0.05;

/// Moves blocks between the pool and a tier.
pub struct Swapper {
    tier: Arc<dyn KvTier>,
    writer: Writer,
    config: TierConfig,
    prior: TierRates,
    declined_tokens: u64,
    offers: Vec<TierBlock>,
    payload: Vec<u8>,
    /// Records that were there and could not be used.
    num_unusable: u64,
}

impl Swapper {
    /// Starts the writer of a tier.
    pub fn new(tier: Arc<dyn KvTier>, config: TierConfig) -> Result<Self, EngineError> {
        let writer = Writer::start(Arc::clone(&tier))?;
        let payload = vec![0; config.bytes_per_block as usize];
        let prior = config.rates;
        Ok(Self { tier, writer, config, prior, declined_tokens: 0, offers: Vec::new(), payload, num_unusable: 0 })
    }

    /// What waits at its end until all is written.
    pub fn flush_on_drop(&self) -> FlushOnDrop {
        self.writer.flush_on_drop()
    }

    /// Tells a new scheduler what there is.
    pub fn attach(&self, scheduler: &mut Scheduler) {
        scheduler.attach_tier(self.config.clone());
        for id in self.tier.records() {
            scheduler.tier_has(id);
        }
    }

    /// Tells the scheduler what was written and what was lost since, and how fast things are: `prompt_rate` is how many tokens a
    /// second are computed that could be fetched, once that was measured.
    pub fn report(&mut self, scheduler: &mut Scheduler, prompt_rate: Option<f64>) {
        for changes in self.writer.changes.try_iter() {
            for id in changes.lost {
                scheduler.tier_lost(id);
            }
            for id in changes.found {
                scheduler.tier_has(id);
            }
        }
        let declined_tokens = scheduler.tier_stats().declined_tokens;
        if declined_tokens != self.declined_tokens {
            self.declined_tokens = declined_tokens;
            let rate = &mut self.config.rates.bytes_per_second;
            *rate += FORGIVENESS * (self.prior.bytes_per_second - *rate);
        }
        self.config.rates.tokens_per_second = prompt_rate.unwrap_or(self.config.rates.tokens_per_second);
        scheduler.set_tier_rates(self.config.rates);
    }

    /// Copies out what the scheduler offers. Must run before anything is written to the pool after the call that offered it.
    pub fn swap_out(&mut self, scheduler: &mut Scheduler, cache: &CacheEngine) {
        scheduler.take_swap_outs(&mut self.offers);
        let bytes = self.payload.len();
        let mut taken = 0;
        self.offers.retain(|block| {
            let has_room = self.writer.has_room(taken, bytes);
            if has_room {
                taken += bytes;
            } else {
                scheduler.tier_lost(block.id);
            }
            has_room
        });
        let ids: Vec<u32> = self.offers.iter().map(|block| block.block.0).collect();
        for (block, payload) in self.offers.drain(..).zip(cache.export_blocks(&ids)) {
            self.writer.write(block, payload);
        }
    }

    /// Copies blocks in, each one verified; returns those that could not be.
    pub fn swap_in(&mut self, blocks: &[TierBlock], cache: &CacheEngine) -> Vec<TierRecordId> {
        let started = Instant::now();
        let mut failed = Vec::new();
        for block in blocks {
            match self.tier.load(block, &mut self.payload) {
                Ok(()) => cache.import_block(block.block.0, &self.payload),
                Err(error) => {
                    failed.push(block.id);
                    match error {
                        TierError::Gone => tracing::debug!("kv_tier: a record is gone; its tokens are computed"),
                        error => self.warn_of(&error),
                    }
                }
            }
        }
        let num_bytes = (blocks.len() - failed.len()) * self.payload.len();
        if num_bytes > 0 {
            approach(&mut self.config.rates.bytes_per_second, num_bytes as f64, started.elapsed());
        }
        failed
    }
}

impl Swapper {
    fn warn_of(&mut self, error: &TierError) {
        self.num_unusable += 1;
        let n = self.num_unusable;
        if is_told(n) {
            tracing::warn!("kv_tier: a record is not used, its tokens are computed: {error} ({n} so far)");
        }
    }
}

/// Whether the `n`-th unusable record is told of: a damaged disk has many.
fn is_told(n: u64) -> bool {
    n <= 32 || n.is_power_of_two()
}

fn approach(rate: &mut f64, amount: f64, elapsed: Duration) {
    *rate += NEWEST * (amount / elapsed.as_secs_f64().max(1e-6) - *rate);
}

#[cfg(test)]
mod tests {
    use super::is_told;

    #[test]
    fn of_many_unusable_records_few_are_told_of() {
        assert_eq!((1..=1_000_000).filter(|n| is_told(*n)).count(), 32 + 14);
        assert!((1..=32).all(is_told));
    }
}
