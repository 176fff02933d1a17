//! Telling others which blocks the prefix cache holds.

use std::sync::Arc;

use kv_events::{KvEventsError, Layout, Listeners, Publisher, PublisherOptions};

use super::EngineConfig;
use crate::{EngineError, kv_tier::Space, lora::Registry, model::ModelFiles, model_runner::ModelRunner};

/// Events of a step at most; where there are more, all that is held is told anew.
pub const MAX_EVENTS: usize = 1 << 16;

/// Listens where events are to be had, before anything is loaded.
///
/// # Errors
/// [`EngineError::InvalidArgument`] where nothing is cached, [`EngineError::Address`] for an address that cannot be listened on.
pub fn listen(config: &EngineConfig) -> Result<Option<Listeners>, EngineError> {
    let Some(kv_events) = &config.kv_events else { return Ok(None) };
    let off = match config {
        EngineConfig { no_kv_cache: true, .. } => "no_kv_cache=True",
        EngineConfig { prefix_caching: false, .. } => "prefix_cache_n=0",
        _ => return Listeners::bind(kv_events).map(Some).map_err(|error| refused(&error)),
    };
    Err(EngineError::InvalidArgument(format!(
        "kv_events tells of the prefix cache, which {off} turns off: leave out one of the two"
    )))
}

/// There is something to tell only where prefixes are cached.
pub fn check_cached(config: &EngineConfig, has_prefixes: bool, architecture: &str) -> Result<(), EngineError> {
    if config.kv_events.is_none() || has_prefixes {
        return Ok(());
    }
    let text = format!("kv_events of {architecture}, of which nothing is cached, would tell nothing: leave it out");
    Err(EngineError::NotSupported(text))
}

/// Who is told of the prefix cache, and what blocks are called by: the key of their digests.
pub struct Teller {
    pub publisher: Publisher,
    pub digest_key: [u8; 32],
}

/// Begins to tell, if that was asked for. What blocks are called by follows from the weights as they are computed with, and
/// neither from the device nor from its kernels, so replicas on unlike machines call a block alike.
pub fn start(
    listeners: Option<Listeners>,
    files: &ModelFiles,
    config: &EngineConfig,
    runner: &ModelRunner,
    weights_digest: Option<&[u8; 32]>,
    adapters: Option<Arc<Registry>>,
) -> Result<Option<Teller>, EngineError> {
    let (Some(listeners), Some(weights_digest)) = (listeners, weights_digest) else { return Ok(None) };
    let block_size = runner.cache()?.spec().block_size;
    let digest_key = digest_key(files, config, weights_digest);
    let windows = runner.kv_groups().groups.iter().map(|group| group.retention.window()).collect();
    let adapter_name = Box::new(move |generation: &str| adapters.as_ref()?.alias_of(generation));
    let layout = Layout { block_size, windows, adapter_name };
    let publisher = Publisher::start(listeners, layout, PublisherOptions::default()).map_err(|error| refused(&error))?;
    Ok(Some(Teller { publisher, digest_key }))
}

/// The key of blocks' digests, by the weights as they are computed with.
pub fn digest_key(files: &ModelFiles, config: &EngineConfig, weights_digest: &[u8; 32]) -> [u8; 32] {
    Space::default()
        .with("kv events", b"1")
        .with("weights", weights_digest)
        .with("isq", config.in_situ_quant.map(|isq| isq.to_string()).unwrap_or_default().as_bytes())
        .with("imatrix", config.imatrix.as_ref().map_or(&[][..], |imatrix| imatrix.digest().as_bytes()))
        .with("quantization", format!("{:?}", files.weights().hub_format()).as_bytes())
        .digest()
}

fn refused(error: &KvEventsError) -> EngineError {
    match error {
        KvEventsError::Address { .. } | KvEventsError::Bind { .. } => EngineError::Address(error.to_string()),
        KvEventsError::Thread(_) => EngineError::Internal(error.to_string()),
    }
}
