//! How many snapshots of recurrent layers' states are kept, and how many requests may go back to theirs.

use super::EngineConfig;
use crate::{EmbeddingConfig, EngineError, model::DecoderConfig};

/// Bytes of all snapshots where none are asked for.
const DEFAULT_BYTES: u64 = 256 << 20;
/// So many there are in any case then, however large each is: those of a few conversations.
const MIN_SNAPSHOTS: u64 = 8;

/// Whether a prompt of a model must be computed in one step: each of its tokens is needed beside the others.
pub fn needs_whole_prompts(decoder: &DecoderConfig, embedding: Option<&EmbeddingConfig>) -> bool {
    decoder.sees_ahead() || embedding.is_some_and(EmbeddingConfig::needs_all_tokens)
}

/// How many snapshots a model of recurrent layers keeps beside a pool of so many blocks: no more than that is of use. 0 of any
/// other, or where nothing is looked up.
pub fn count(config: &EngineConfig, decoder: &DecoderConfig, embedding: Option<&EmbeddingConfig>, num_blocks: usize) -> usize {
    let is_off = !config.prefix_caching || config.no_kv_cache || needs_whole_prompts(decoder, embedding);
    if is_off || !decoder.is_recurrent() {
        return 0;
    }
    let state_bytes = decoder.state_bytes().max(1);
    let num = match config.state_snapshot_bytes {
        Some(bytes) => bytes / state_bytes,
        None => (DEFAULT_BYTES / state_bytes).max(MIN_SNAPSHOTS),
    };
    usize::try_from(num).unwrap_or(usize::MAX).min(num_blocks)
}

/// Requests whose drafts a step verifies at most: more at once gain little, and each keeps its states from before the step.
const MOST_DRAFTING: usize = 8;

/// Places for states from before a step, which wrong drafts go back to.
pub fn num_spare(config: &EngineConfig, decoder: &DecoderConfig) -> usize {
    if config.speculation.is_some() && decoder.is_recurrent() { config.max_num_seqs.min(MOST_DRAFTING) } else { 0 }
}

/// Whether what is asked of snapshots can be had.
///
/// # Errors
/// [`EngineError::InvalidArgument`] for a budget of a model without states, without a prefix cache, or of less than one snapshot;
/// [`EngineError::NotSupported`] for what would have to know of snapshots as well.
pub fn check(config: &EngineConfig, decoder: &DecoderConfig, embedding: Option<&EmbeddingConfig>) -> Result<(), EngineError> {
    let name = decoder.architecture;
    if decoder.is_recurrent() && config.kv_tier.is_some() {
        let why = "whose states it does not keep, would keep nothing that is found again";
        return Err(EngineError::NotSupported(format!("kv_tier of {name}, {why}: leave it out")));
    }
    if decoder.is_recurrent() && config.kv_events.is_some() {
        let why = "would tell of blocks, which without its states nobody can begin with";
        return Err(EngineError::NotSupported(format!("kv_events of {name} {why}: leave it out")));
    }
    let Some(bytes) = config.state_snapshot_bytes.filter(|bytes| *bytes > 0) else { return Ok(()) };
    let asked = bytes >> 20;
    if !decoder.is_recurrent() {
        return Err(EngineError::InvalidArgument(format!(
            "state_snapshot_mb={asked} is about states of recurrent layers, and {name} has none: leave it out"
        )));
    }
    let off = match config {
        EngineConfig { no_kv_cache: true, .. } => Some("no_kv_cache=True turns off"),
        EngineConfig { prefix_caching: false, .. } => Some("prefix_cache_n=0 turns off"),
        _ => needs_whole_prompts(decoder, embedding).then_some("a model that needs all tokens of an input at once goes without"),
    };
    if let Some(off) = off {
        return Err(EngineError::InvalidArgument(format!(
            "state_snapshot_mb={asked} is about the prefix cache, which {off}: leave it out"
        )));
    }
    let state_bytes = decoder.state_bytes();
    if bytes < state_bytes {
        let least = state_bytes.div_ceil(1 << 20);
        let megabytes = state_bytes as f64 / f64::from(1 << 20);
        return Err(EngineError::InvalidArgument(format!(
            "state_snapshot_mb={asked} holds no snapshot of {name}, whose states take {megabytes:.1} MB: give {least} or more, or 0 \
             for none"
        )));
    }
    Ok(())
}
