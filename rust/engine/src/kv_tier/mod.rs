//! Tiers: where committed blocks go so that they need not be computed again once the pool has dropped them.
//!
//! The scheduler decides what goes out and comes in ([`paged::TierBlock`]); here are the bytes. A tier is a cache of immutable
//! records addressed by content ([`KvTier`]): files, or host memory for a pool elsewhere. Blocks go out through a bounded
//! writer thread, are read and verified on the engine thread before the step that needs them, and whatever is wrong with a
//! record only means that its tokens are computed.

mod digest;
mod file;
mod lru;
mod memory;
mod record;
mod swap;
#[cfg(test)]
mod tests;
mod writer;

use std::{path::PathBuf, sync::Arc};

use paged::{TierBlock, TierRecordId};
use thiserror::Error;

pub use digest::{Space, weights_digest};
pub use file::FileTier;
pub use memory::MemoryTier;
pub use record::RecordFormat;
pub use swap::Swapper;
pub use writer::FlushOnDrop;

use crate::EngineError;

/// Where blocks go that leave the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvTierConfig {
    /// Files in a folder; they survive the process.
    File {
        /// The folder, made if there is none.
        path: PathBuf,
        /// Bytes of all files at most.
        max_bytes: u64,
    },
    /// Host memory.
    Memory {
        /// Bytes at most.
        max_bytes: u64,
    },
}

impl KvTierConfig {
    /// Opens the tier.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] for a folder that cannot be used, or a size without room for a block.
    pub fn open(&self, format: RecordFormat) -> Result<Arc<dyn KvTier>, EngineError> {
        Ok(match self {
            Self::File { path, max_bytes } => Arc::new(FileTier::open(path, format, *max_bytes)?),
            Self::Memory { max_bytes } => Arc::new(MemoryTier::new(format, *max_bytes)?),
        })
    }
}

/// A bounded store of immutable records. One thread stores while another loads.
pub trait KvTier: Send + Sync {
    /// The records that are there.
    fn records(&self) -> Vec<TierRecordId>;

    /// What others have added and taken away, where somebody else can.
    fn refresh(&self) -> Changes {
        Changes::default()
    }

    /// Keeps a block's bytes, making room for them.
    fn store(&self, block: &TierBlock, payload: Vec<u8>) -> Result<Changes, TierError>;

    /// Fills `payload`, of the format's size, with the bytes of just this block; after an error its content means nothing.
    fn load(&self, block: &TierBlock, payload: &mut [u8]) -> Result<(), TierError>;
}

/// How the set of records changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Records that are there now.
    pub found: Vec<TierRecordId>,
    /// Records that are not.
    pub lost: Vec<TierRecordId>,
}

/// Why a record was not loaded or stored.
#[derive(Debug, Error)]
pub enum TierError {
    /// It is not there any more: another process made room.
    #[error("the record is gone")]
    Gone,
    /// Damaged or foreign.
    #[error("{place}: {why}")]
    Refused {
        /// The file.
        place: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Unreadable.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// It could not be written.
    #[error("cannot write {path}: {source}", path = path.display())]
    NotStored {
        /// What changed all the same, the record itself being lost.
        changes: Changes,
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
}

fn check_size(format: &RecordFormat, max_bytes: u64) -> Result<(), EngineError> {
    const MIB: u64 = 1 << 20;
    let needed = format.record_bytes();
    if max_bytes >= needed {
        return Ok(());
    }
    let (given, least) = (max_bytes / MIB, needed.div_ceil(MIB));
    Err(EngineError::InvalidArgument(format!(
        "kv_tier_size is {given} MB, and a block of this model takes {needed} bytes: give at least {least} MB"
    )))
}
