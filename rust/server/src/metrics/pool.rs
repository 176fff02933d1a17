//! What is read from an engine when somebody asks.

use engine::{KvCacheStats, KvEventsStats, MissReason};
use prometheus::{Counter, CounterVec, Gauge, GaugeVec};

use super::{Maker, Result, fragmented_bytes};

/// The figures of a model's pool.
pub struct Pool {
    running: GaugeVec,
    waiting: GaugeVec,
    usage: GaugeVec,
    old_usage: GaugeVec,
    queries: CounterVec,
    hits: CounterVec,
    preemptions: CounterVec,
    missed: CounterVec,
    recomputed: Counter,
    deadlines: Counter,
    drafts: Counter,
    draft_tokens: Counter,
    accepted: Counter,
    accepted_at: CounterVec,
    steps: Counter,
    blocks_used: Gauge,
    blocks_total: Gauge,
    blocks_cached: Gauge,
    snapshots_used: Gauge,
    snapshots_total: Gauge,
    snapshots_evicted: Counter,
    fragmented_bytes: Gauge,
    cache_info: GaugeVec,
    event_batches: Counter,
    events: Counter,
    dropped_event_batches: CounterVec,
    event_subscribers: Gauge,
}

/// Brings a counter to what the engine has counted, which begins at 0 again when a model is loaded again.
fn set_counter(counter: &Counter, value: u64) {
    let value = value as f64;
    if value < counter.get() {
        counter.reset();
    }
    counter.inc_by((value - counter.get()).max(0.0));
}

impl Pool {
    /// Of a model that runs so many choices at once.
    pub fn new(make: &Maker<'_>, max_seqs: usize) -> Result<Self> {
        let capacity = make.gauge("mistralrs_sequences_capacity", "Choices that run at once at most.")?;
        capacity.set(max_seqs as f64);
        Ok(Self {
            running: make.gauges("vllm:num_requests_running", "Choices in the batch.")?,
            waiting: make.gauges("vllm:num_requests_waiting", "Choices that wait.")?,
            usage: make.gauges("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold; 1 is all.")?,
            old_usage: make.gauges("vllm:gpu_cache_usage_perc", "The same, under its older name.")?,
            queries: make.counters("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", &[])?,
            hits: make.counters("vllm:prefix_cache_hits_total", "Of those, tokens that were found.", &[])?,
            preemptions: make.counters("vllm:num_preemptions_total", "Times that a request lost its blocks.", &[])?,
            missed: make.counters(
                "mistralrs_prefix_cache_missed_tokens_total",
                "Prompt tokens that were not found, by reason.",
                &["reason"],
            )?,
            recomputed: make.counter("mistralrs_recomputed_tokens_total", "Tokens computed again after a preemption.")?,
            drafts: make
                .counter("vllm:spec_decode_num_drafts_total", "Guesses of what a choice says next, of one token or more.")?,
            draft_tokens: make.counter("vllm:spec_decode_num_draft_tokens_total", "Tokens of these.")?,
            accepted: make.counter("vllm:spec_decode_num_accepted_tokens_total", "Of these tokens, the right ones.")?,
            accepted_at: make.counters(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                "The right ones by their place in their guess.",
                &["position"],
            )?,
            deadlines: make
                .counter("mistralrs_deadlines_missed_total", "Requests that ended because their deadline had passed.")?,
            steps: make.counter("mistralrs_steps_total", "Steps that were computed.")?,
            blocks_used: make.gauge("mistralrs_kv_cache_blocks_used", "Blocks that requests hold.")?,
            blocks_total: make.gauge("mistralrs_kv_cache_blocks_total", "Blocks of the pool.")?,
            blocks_cached: make
                .gauge("mistralrs_kv_cache_blocks_prefix_cached", "Free blocks that the prefix cache can find.")?,
            snapshots_used: make.gauge("mistralrs_state_snapshots_used", "Snapshots of recurrent states that can be found.")?,
            snapshots_total: make.gauge("mistralrs_state_snapshots_total", "Snapshots of recurrent states that can be kept.")?,
            snapshots_evicted: make
                .counter("mistralrs_state_snapshots_evicted_total", "Snapshots of recurrent states that had to go for others.")?,
            fragmented_bytes: make.gauge("mistralrs_kv_cache_fragmented_bytes", "Bytes of held blocks that no token fills.")?,
            cache_info: make.add(GaugeVec::new(
                make.opts("vllm:cache_config_info", "The KV cache's configuration."),
                &["block_size", "num_gpu_blocks", "cache_bytes"],
            )?)?,
            event_batches: make.counter("mistralrs_kv_event_batches_total", "Batches of KV events that were published.")?,
            events: make.counter("mistralrs_kv_events_total", "KV events that were published: blocks stored or removed.")?,
            dropped_event_batches: make.counters(
                "mistralrs_kv_event_batches_dropped_total",
                "Batches of KV events that were dropped for want of room: before they were numbered, or of one subscriber.",
                &["at"],
            )?,
            event_subscribers: make.gauge("mistralrs_kv_event_subscribers", "Subscribers of KV events.")?,
        })
    }

    /// What was published.
    pub fn tell_events(&self, stats: &KvEventsStats) {
        set_counter(&self.event_batches, stats.batches);
        set_counter(&self.events, stats.events);
        set_counter(&self.dropped_event_batches.with_label_values(&["publisher"]), stats.dropped_batches);
        set_counter(&self.dropped_event_batches.with_label_values(&["subscriber"]), stats.subscriber_dropped_batches);
        self.event_subscribers.set(stats.subscribers as f64);
    }

    /// What a model's pool is and holds now: nothing, of one that is not loaded.
    pub fn hold(&self, stats: &KvCacheStats, cache_bytes: u64, block_bytes: u64) {
        let none: [&str; 0] = [];
        self.cache_info.reset();
        let sizes = [stats.block_size.to_string(), stats.blocks_total.to_string(), cache_bytes.to_string()];
        if stats.blocks_total > 0 {
            self.cache_info.with_label_values(&sizes).set(1.0);
        }
        let used = stats.blocks_used as f64 / stats.blocks_total.max(1) as f64;
        self.running.with_label_values(&none).set(stats.requests_running as f64);
        self.waiting.with_label_values(&none).set(stats.requests_waiting as f64);
        self.usage.with_label_values(&none).set(used);
        self.old_usage.with_label_values(&none).set(used);
        self.blocks_used.set(stats.blocks_used as f64);
        self.blocks_total.set(stats.blocks_total as f64);
        self.blocks_cached.set(stats.blocks_cached as f64);
        self.snapshots_used.set(stats.state_snapshots_used as f64);
        self.snapshots_total.set(stats.state_snapshots_total as f64);
        self.fragmented_bytes.set(fragmented_bytes(stats, block_bytes));
    }

    /// What a model has counted since it was loaded.
    pub fn count(&self, stats: &KvCacheStats) {
        let none: [&str; 0] = [];
        set_counter(&self.queries.with_label_values(&none), stats.prefix_queried_tokens);
        set_counter(&self.hits.with_label_values(&none), stats.prefix_hit_tokens);
        set_counter(&self.preemptions.with_label_values(&none), stats.preemptions);
        for (reason, tokens) in MissReason::ALL.iter().zip(stats.prefix_missed_tokens) {
            set_counter(&self.missed.with_label_values(&[reason.name()]), tokens);
        }
        set_counter(&self.recomputed, stats.recomputed_tokens);
        set_counter(&self.deadlines, stats.deadlines_missed);
        set_counter(&self.drafts, stats.drafts.rows);
        set_counter(&self.draft_tokens, stats.drafts.tokens);
        set_counter(&self.accepted, stats.drafts.accepted);
        for (place, tokens) in stats.drafts.accepted_at.iter().enumerate() {
            set_counter(&self.accepted_at.with_label_values(&[&place.to_string()]), *tokens);
        }
        set_counter(&self.steps, stats.steps);
        set_counter(&self.snapshots_evicted, stats.state_snapshots_evicted);
    }
}
