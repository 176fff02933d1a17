//! A plan as text and back, so that it can be kept and sent.

use paged::{CacheConfig, CacheLedger, DeviceLedger, KvDType, KvGroup, KvGroups, Retention};
use serde::{Deserialize, Serialize};

use super::{DeviceBytes, GroupPlan, MemoryPlan};
use crate::EngineError;

const CACHE_TYPES: [KvDType; 5] = [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::F8E4M3, KvDType::Int8];

/// All of a plan, in plain types.
#[derive(Serialize, Deserialize)]
struct Saved {
    devices: Vec<DeviceBytes>,
    groups: Vec<GroupPlan>,
    bytes_per_block: u64,
    max_num_seqs: usize,
    max_model_len: usize,
    guaranteed: bool,
    num_state_snapshots: usize,
    max_num_batched_tokens: usize,
    reserves_full_context: bool,
    block_size: usize,
    num_gpu_blocks: usize,
    /// Place in [`CACHE_TYPES`].
    cache_type: usize,
    /// Window and layers of each group.
    kv_groups: Vec<(Option<usize>, Vec<usize>)>,
    layers_per_group: usize,
    /// Budget, bytes of a block and bytes of the pool.
    ledgers: Vec<(u64, u64, u64)>,
    tightest_device: usize,
    budget_bytes: u64,
    tightest_bytes_per_block: u64,
    num_blocks: usize,
    servable_tokens: usize,
}

impl MemoryPlan {
    /// The plan as JSON.
    pub fn to_json(&self) -> Result<String, EngineError> {
        let CacheConfig { block_size, num_gpu_blocks, cache_type, groups, ledger } = &self.cache;
        let saved = Saved {
            devices: self.devices.clone(),
            groups: self.groups.clone(),
            bytes_per_block: self.bytes_per_block,
            max_num_seqs: self.max_num_seqs,
            max_model_len: self.max_model_len,
            guaranteed: self.guaranteed,
            num_state_snapshots: self.num_state_snapshots,
            max_num_batched_tokens: self.max_num_batched_tokens,
            reserves_full_context: self.reserves_full_context,
            block_size: *block_size,
            num_gpu_blocks: *num_gpu_blocks,
            cache_type: CACHE_TYPES.iter().position(|kind| kind == cache_type).unwrap_or_default(),
            kv_groups: groups.groups.iter().map(|group| (group.retention.window(), group.layers.clone())).collect(),
            layers_per_group: groups.layers_per_group,
            ledgers: ledger.devices.iter().map(|d| (d.budget_bytes, d.bytes_per_block, d.pool_bytes)).collect(),
            tightest_device: ledger.tightest_device,
            budget_bytes: ledger.budget_bytes,
            tightest_bytes_per_block: ledger.bytes_per_block,
            num_blocks: ledger.num_blocks,
            servable_tokens: ledger.servable_tokens,
        };
        serde_json::to_string(&saved).map_err(|error| EngineError::Internal(format!("the plan cannot be written: {error}")))
    }

    /// The plan that [`Self::to_json`] wrote. An [`EngineError::InvalidArgument`] for any other text.
    pub fn from_json(text: &str) -> Result<Self, EngineError> {
        let invalid = |why: String| EngineError::InvalidArgument(format!("this is no memory plan: {why}"));
        let saved: Saved = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        let cache_type = *CACHE_TYPES.get(saved.cache_type).ok_or_else(|| invalid("its cache type is unknown".into()))?;
        if saved.block_size == 0 || saved.kv_groups.is_empty() || saved.max_model_len == 0 {
            return Err(invalid("it has no blocks, groups or tokens".into()));
        }
        let group = |(window, layers): (Option<usize>, Vec<usize>)| KvGroup {
            retention: window.map_or(Retention::All, Retention::Window),
            layers,
        };
        let device = |(budget_bytes, bytes_per_block, pool_bytes)| DeviceLedger { budget_bytes, bytes_per_block, pool_bytes };
        let groups =
            KvGroups { groups: saved.kv_groups.into_iter().map(group).collect(), layers_per_group: saved.layers_per_group };
        let ledger = CacheLedger {
            devices: saved.ledgers.into_iter().map(device).collect(),
            tightest_device: saved.tightest_device,
            budget_bytes: saved.budget_bytes,
            bytes_per_block: saved.tightest_bytes_per_block,
            num_blocks: saved.num_blocks,
            servable_tokens: saved.servable_tokens,
        };
        let (block_size, num_gpu_blocks) = (saved.block_size, saved.num_gpu_blocks);
        Ok(Self {
            devices: saved.devices,
            groups: saved.groups,
            bytes_per_block: saved.bytes_per_block,
            max_num_seqs: saved.max_num_seqs,
            max_model_len: saved.max_model_len,
            guaranteed: saved.guaranteed,
            num_state_snapshots: saved.num_state_snapshots,
            cache: CacheConfig { block_size, num_gpu_blocks, cache_type, groups, ledger },
            max_num_batched_tokens: saved.max_num_batched_tokens,
            reserves_full_context: saved.reserves_full_context,
        })
    }
}
