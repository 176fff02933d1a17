//! Figures of the KV pool as a dict.

use engine::{KvCacheStats, KvEventsStats, MissReason};
use pyo3::{prelude::*, types::PyDict};

/// One entry a figure; the misses are a dict by reason.
pub fn dict<'py>(py: Python<'py>, stats: &KvCacheStats, block_bytes: u64) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in [
        ("blocks_total", stats.blocks_total),
        ("blocks_used", stats.blocks_used),
        ("peak_blocks_used", stats.peak_blocks_used),
        ("blocks_cached", stats.blocks_cached),
        ("blocks_free", stats.blocks_free),
        ("blocks_shared", stats.blocks_shared),
        ("blocks_saved", stats.blocks_saved),
        ("blocks_kept", stats.blocks_kept),
        ("block_size", stats.block_size),
        ("tokens_total", stats.tokens_total),
        ("requests_running", stats.requests_running),
        ("requests_waiting", stats.requests_waiting),
        ("requests_kept", stats.requests_kept),
        ("slots_held", stats.slots_held),
        ("slots_live", stats.slots_live),
        ("peak_running", stats.peak_running),
        ("peak_running_before_preemption", stats.peak_running_before_preemption),
        ("kv_event_blocks", stats.kv_event_blocks),
        ("state_snapshots_total", stats.state_snapshots_total),
        ("state_snapshots_used", stats.state_snapshots_used),
    ] {
        dict.set_item(name, value)?;
    }
    for (name, value) in [
        ("prefix_queried_tokens", stats.prefix_queried_tokens),
        ("prefix_hit_tokens", stats.prefix_hit_tokens),
        ("resumed_queried_tokens", stats.resumed_queried_tokens),
        ("resumed_hit_tokens", stats.resumed_hit_tokens),
        ("state_snapshots_taken", stats.state_snapshots_taken),
        ("state_snapshots_evicted", stats.state_snapshots_evicted),
        ("preemptions", stats.preemptions),
        ("recomputed_tokens", stats.recomputed_tokens),
        ("deadlines_missed", stats.deadlines_missed),
        ("draft_rows", stats.drafts.rows),
        ("draft_tokens", stats.drafts.tokens),
        ("accepted_draft_tokens", stats.drafts.accepted),
        ("steps", stats.steps),
        ("slots_held_sum", stats.slots_held_sum),
        ("slots_live_sum", stats.slots_live_sum),
        ("tier_blocks", stats.tier.blocks as u64),
        ("tier_block_bytes", stats.tier.bytes_per_block),
        ("tier_hit_tokens", stats.tier.hit_tokens),
        ("tier_declined_tokens", stats.tier.declined_tokens),
        ("tier_swapped_out_blocks", stats.tier.swapped_out_blocks),
        ("tier_swapped_in_blocks", stats.tier.swapped_in_blocks),
        ("tier_failed_blocks", stats.tier.failed_blocks),
        ("tier_dropped_blocks", stats.tier.dropped_blocks),
    ] {
        dict.set_item(name, value)?;
    }
    dict.set_item("block_bytes", block_bytes)?;
    let missed = PyDict::new(py);
    for (reason, tokens) in MissReason::ALL.into_iter().zip(stats.prefix_missed_tokens) {
        missed.set_item(reason.name(), tokens)?;
    }
    dict.set_item("prefix_missed_tokens", missed)?;
    dict.set_item("accepted_draft_tokens_at", stats.drafts.accepted_at.to_vec())?;
    dict.set_item("paused", stats.paused)?;
    dict.set_item("draining", stats.draining)?;
    Ok(dict)
}

/// Figures of what was published of the prefix cache, one entry each.
pub fn events_dict<'py>(py: Python<'py>, stats: &KvEventsStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("address", &stats.address)?;
    dict.set_item("replay_address", &stats.replay_address)?;
    for (name, value) in [
        ("batches", stats.batches),
        ("events", stats.events),
        ("dropped_batches", stats.dropped_batches),
        ("listings", stats.listings),
        ("subscribers", stats.subscribers as u64),
        ("subscriber_dropped_batches", stats.subscriber_dropped_batches),
        ("replays", stats.replays),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
