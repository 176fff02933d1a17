//! Opening the tier of a loaded model.

use device::{Backend, mmap::FileWatch};
use paged::{TierConfig, TierRates};

use super::EngineConfig;
use crate::{
    EngineError,
    kv_tier::{RecordFormat, Space, Swapper, weights_digest},
    model::ModelFiles,
    model_runner::ModelRunner,
};

/// What a tier is believed to deliver before it was measured.
const BYTES_PER_SECOND: f64 = 1e9;
/// What a device is believed to multiply before it was measured: bytes of weights a second, each once a token.
const WEIGHT_BYTES_PER_SECOND: f64 = 2e10;

/// A tier makes no sense where nothing is looked up.
pub fn check(config: &EngineConfig) -> Result<(), EngineError> {
    let off = match config {
        EngineConfig { kv_tier: None, .. } => return Ok(()),
        EngineConfig { no_kv_cache: true, .. } => "no_kv_cache=True",
        EngineConfig { prefix_caching: false, .. } => "prefix_cache_n=0",
        _ => return Ok(()),
    };
    Err(EngineError::InvalidArgument(format!("kv_tier needs the prefix cache, which {off} turns off: leave out one of the two")))
}

/// Digest of the model's files with weights, of which it reads every byte; `None` where nobody needs it.
pub fn digest(files: &ModelFiles, config: &EngineConfig, backend: &dyn Backend) -> Result<Option<[u8; 32]>, EngineError> {
    let is_needed = config.kv_tier.is_some() || config.kv_events.is_some();
    let digest = || weights_digest(files.watches().map(FileWatch::path), backend.info().num_threads);
    is_needed.then(digest).transpose()
}

/// Of the files of a draft model or a head, and how they are computed with.
fn draft_digest(config: &EngineConfig, num_threads: usize) -> Result<Option<[u8; 32]>, EngineError> {
    if let Some(head) = &config.mtp {
        // Behind its model's layers, it is in the digest of these.
        let Some(source) = &head.source else { return Ok(Some(Space::default().with("head", b"own").digest())) };
        let files = ModelFiles::open(source, config.architecture.as_deref())?;
        let weights = weights_digest(files.weights().watches().iter().map(FileWatch::path), num_threads)?;
        return Ok(Some(Space::default().with("head", &weights).digest()));
    }
    let Some(draft) = &config.draft else { return Ok(None) };
    let files = ModelFiles::open(&draft.source, draft.architecture.as_deref())?;
    let weights = weights_digest(files.weights().watches().iter().map(FileWatch::path), num_threads)?;
    let isq = draft.in_situ_quant.map(|isq| isq.to_string()).unwrap_or_default();
    let config = format!("{:?} {:?}", files.config(), files.weights().hub_format());
    let space = Space::default().with("weights", &weights).with("config", config.as_bytes()).with("isq", isq.as_bytes());
    Ok(Some(space.digest()))
}

/// Opens the tier that was asked for, if any, for weights with this digest.
pub fn open(
    files: &ModelFiles,
    config: &EngineConfig,
    runner: &ModelRunner,
    backend: &dyn Backend,
    weights_digest: Option<&[u8; 32]>,
) -> Result<Option<Swapper>, EngineError> {
    let (Some(kv_tier), Some(weights_digest)) = (&config.kv_tier, weights_digest) else { return Ok(None) };
    let cache = runner.cache()?;
    let info = backend.info();
    let mut shape = cache.spec().clone();
    shape.num_blocks = 0;
    // Bits differ between kernels, and may between versions.
    let space = Space::default()
        .with("version", env!("CARGO_PKG_VERSION").as_bytes())
        .with("weights", weights_digest)
        .with("quantization", format!("{:?}", files.weights().hub_format()).as_bytes())
        .with("config", format!("{:?}", files.config()).as_bytes())
        .with("kv_format", &device::KV_FORMAT.to_le_bytes())
        .with("kv", format!("{shape:?} {:?}", runner.kv_groups()).as_bytes())
        .with("dtype", format!("{:?}", config.dtype).as_bytes())
        .with("isq", config.in_situ_quant.map(|isq| isq.to_string()).unwrap_or_default().as_bytes())
        .with("imatrix", config.imatrix.as_ref().map_or(&[][..], |imatrix| imatrix.digest().as_bytes()))
        .with("deterministic", &[u8::from(config.deterministic)])
        .with("device", format!("{} {}", info.device, info.isa).as_bytes());
    // Their keys and values are in the same blocks.
    let space = match draft_digest(config, info.num_threads)? {
        Some(draft) => space.with("draft", &draft),
        None => space,
    }
    .digest();
    let format = RecordFormat { space, block_size: shape.block_size, payload_bytes: cache.block_bytes() };
    let bytes_per_block = format.payload_bytes as u64;
    let tokens_per_second = WEIGHT_BYTES_PER_SECOND / files.weight_bytes().max(1) as f64;
    let rates = TierRates { bytes_per_second: BYTES_PER_SECOND, tokens_per_second };
    Swapper::new(kv_tier.open(format)?, TierConfig { space, bytes_per_block, rates }).map(Some)
}
