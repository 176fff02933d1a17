//! Which tokens live in which block, and who runs next.
//!
//! The KV cache of every sequence lies in fixed-size blocks drawn from one pool. This crate keeps the books: the
//! [`BlockPool`] owns the blocks, the [`KvCacheManager`] gives them to requests and finds cached prefixes, and the
//! [`Scheduler`] decides which tokens of which requests are computed in the next step;
//! [`calculate_cache_config`] says how many blocks a machine affords. The crate has no tensors, no I/O, no
//! threads, no clock and no randomness, so a sequence of calls always gives the same decisions.
//!
//! ```text
//! add_request -> schedule -> (run the step) -> update -> schedule -> ...
//! ```
//!
//! Four lengths of a request are kept apart, in this order at all times:
//! published blocks * block size <= computed tokens <= min(known tokens, allocated slots).
//! A block can be found by other requests only after the step that wrote its KV has been committed.

mod block_hash;
mod block_pool;
mod config;
pub mod encoder_cache;
mod error;
mod ids;
mod kv_cache_config;
mod kv_cache_manager;
mod kv_events;
mod kv_groups;
mod output;
mod pacer;
mod prefix_index;
mod request;
mod scheduler;
mod sizing;
mod state_snapshots;
mod tier;

pub use block_hash::{BlockHash, BlockHasher, CacheIdentity, CacheKey, HashFunction, HashInput, IdentityField};
pub use block_pool::BlockPool;
pub use config::{
    DEFAULT_PAGED_ATTENTION_BLOCK_SIZE, KvDType, KvShape, MemoryGpuConfig, ModelConfigLike, PagedAttentionConfig, PagedCacheType,
    Retention, SUPPORTED_BLOCK_SIZES,
};
pub use encoder_cache::{EncoderCache, EncoderCacheStats, EncoderContent, EncoderIndex, EncoderItem, EncoderKey, EncoderLease};
pub use error::{
    AdmissionError, ConfigError, EncoderCacheError, ForkError, IntegrityError, InvalidSchedulerConfig, PoolError, UnknownPolicy,
    UpdateError,
};
pub use ids::{BlockId, RequestId};
pub use kv_cache_config::KvCacheConfig;
pub use kv_cache_manager::{KvCacheManager, MissReason, PrefixHit, RequestBlocks};
pub use kv_events::{KvEvent, StoredBlock};
pub use kv_groups::{KvGroup, KvGroups, SizedLayer};
pub use output::{
    BlockUse, DraftStats, KvCacheStats, PoolSnapshot, Preemption, RequestView, ScheduledRequest, SchedulerOutput, StuckReport,
    SwapIn,
};
pub use pacer::StepPacer;
pub use request::{FinishReason, ForkRequest, NewRequest, PreemptionCost, RequestStatus, Tenant};
pub use scheduler::{
    AdmissionPolicy, FairnessPolicy, MOST_KNOWN, Policies, Policy, PromptLimits, Scheduler, SchedulerConfig, VictimPolicy,
};
pub use sizing::{
    CacheConfig, CacheLedger, DEFAULT_UTILIZATION, DeviceLedger, DeviceMemory, PoolLimits, UNIFIED_FREE_MEMORY_DIVISOR,
    calculate_cache_config,
};
pub use state_snapshots::{SnapshotSlot, StateSave};
pub use tier::{TierBlock, TierConfig, TierKey, TierRates, TierRecordId, TierStats};
