//! How many blocks the KV cache gets: memory knobs in, a number of blocks and a ledger out.
//!
//! Per device, a block of `block_size` tokens costs the layers that lie on that device; each device affords its own
//! number of blocks and the pool has the least of them. Everything is counted in whole bytes; the one rounding is
//! from bytes down to blocks, or from tokens up to blocks. The null block comes on top of what is promised:
//! `num_gpu_blocks` are all usable, and the cache engine allocates one more.

use crate::config::{KvDType, MemoryGpuConfig, ModelConfigLike, PagedAttentionConfig, valid_fraction};
use crate::error::ConfigError;
use crate::kv_cache_config::KvCacheConfig;
use crate::kv_groups::{KvGroups, SizedLayer, last_that_holds, sized_layers};

/// With no knob given, the share of a device's own memory that weights, activations and KV may fill together.
pub const DEFAULT_UTILIZATION: f32 = 0.9;

/// With no knob given, a pool in unified memory (a CPU's) takes at most one part in so many of what is free.
pub const UNIFIED_FREE_MEMORY_DIVISOR: u64 = 2;

/// Blocks without bytes, of a model whose layers keep no keys and values, are no more than this unless a context asks for them:
/// what is known of each takes memory of the host.
const MAX_EMPTY_BLOCKS: u64 = 1 << 17;

const MIB: u64 = 1024 * 1024;

/// Memory of one device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// All it has.
    pub total: u64,
    /// What nobody uses now.
    pub available: u64,
    /// What of that will still be taken: weights not loaded yet, activations, workspaces, the encoder cache.
    pub pending: u64,
    /// The host's own memory, handed out as it is first touched.
    pub unified: bool,
}

impl DeviceMemory {
    fn free_for_kv(&self) -> u64 {
        self.available.saturating_sub(self.pending)
    }

    /// The most that can be asked of it. Unified memory is only reserved, so what others use now does not count.
    fn limit(&self) -> u64 {
        if self.unified { self.total.saturating_sub(self.pending) } else { self.free_for_kv() }
    }
}

/// What the engine will run, for sizes that follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolLimits {
    /// Requests in a step.
    pub max_num_seqs: usize,
    /// Tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a request.
    pub max_model_len: usize,
}

/// The KV cache of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLedger {
    /// Bytes it may take.
    pub budget_bytes: u64,
    /// Bytes of a block there.
    pub bytes_per_block: u64,
    /// Bytes that will be allocated, the null block included.
    pub pool_bytes: u64,
}

/// How the number of blocks came about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheLedger {
    /// One a device, in the order given; all zero for a device without layers.
    pub devices: Vec<DeviceLedger>,
    /// The device that allows fewest blocks.
    pub tightest_device: usize,
    /// Bytes given to the KV cache on that device.
    pub budget_bytes: u64,
    /// Bytes of a block on that device.
    pub bytes_per_block: u64,
    /// Usable blocks.
    pub num_blocks: usize,
    /// The longest sequence that can be served alone; no further than the pool's slots or the model's context,
    /// whichever is more.
    pub servable_tokens: usize,
}

/// A KV cache that can be built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// Tokens a block.
    pub block_size: usize,
    /// Usable blocks; the cache engine allocates one more, for the null block.
    pub num_gpu_blocks: usize,
    /// Type of the elements.
    pub cache_type: KvDType,
    /// How the layers share the blocks.
    pub groups: KvGroups,
    /// How the number of blocks came about.
    pub ledger: CacheLedger,
}

impl CacheConfig {
    /// Requests of `num_tokens` tokens each, prompt and answer, that the blocks hold at once.
    pub fn num_requests_that_fit(&self, num_tokens: usize, max_num_batched_tokens: usize) -> usize {
        let blocks =
            |requests: usize| self.groups.concurrent_blocks(requests, num_tokens, max_num_batched_tokens.max(1), self.block_size);
        // A request takes a block at least. One that is alone is computed in smaller steps where those take fewer blocks.
        let together = last_that_holds(self.num_gpu_blocks, |requests| blocks(requests) <= self.num_gpu_blocks);
        together.max(usize::from(num_tokens <= self.ledger.servable_tokens))
    }

    /// The same for the scheduler.
    pub fn kv_cache_config(&self, enable_prefix_caching: bool, hash_key: [u8; 32]) -> KvCacheConfig {
        KvCacheConfig {
            num_blocks: self.num_gpu_blocks,
            block_size: self.block_size,
            groups: self.groups.clone(),
            enable_prefix_caching,
            hash_key,
        }
    }
}

/// Sizes the KV cache.
///
/// - `MbAmount` and `Utilization` give each device a budget, of which the blocks are as many as fit.
/// - `ContextSize(n)` asks for the blocks that one sequence of `n` tokens needs: `ceil(n / block_size)` for each group
///   of full-attention layers, and the window with one step's tokens for each group of windowed layers.
/// - Nothing: on devices with memory of their own, `Utilization(0.9)`. In unified memory, what `max_num_seqs`
///   sequences of `max_model_len` tokens need, but no more than half of what is free.
/// - Blocks that take no bytes, of a model without attention, are as many as sequences need, whatever the budget.
/// - `guaranteed` asks for the blocks of `max_num_seqs` sequences, each as long as the context size or, without one,
///   as the model's context; a budget must hold them.
///
/// # Errors
/// [`ConfigError`]: an unsupported block size, a fraction outside (0, 1], more memory than the machine has, a context
/// or a guarantee that does not fit (with what would), or too little for a block.
pub fn calculate_cache_config(
    config: &PagedAttentionConfig,
    model: &dyn ModelConfigLike,
    model_dtype: KvDType,
    devices: &[DeviceMemory],
    limits: &PoolLimits,
) -> Result<CacheConfig, ConfigError> {
    let block_size = config.validated_block_size()?;
    let cache_type = config.cache_type.resolve(model_dtype);
    let layers = sized_layers(model, cache_type, block_size)?;
    let groups = KvGroups::from_sized_layers(&layers);
    let bytes_per_block = bytes_per_block(model, &layers, &groups, devices.len())?;
    let request = SizeRequest { config, limits, groups: &groups, block_size };

    let mut ledger = CacheLedger {
        devices: vec![DeviceLedger { budget_bytes: 0, bytes_per_block: 0, pool_bytes: 0 }; devices.len()],
        tightest_device: 0,
        budget_bytes: 0,
        bytes_per_block: 0,
        num_blocks: 0,
        servable_tokens: 0,
    };
    let mut fewest = u64::MAX;
    for (index, device) in devices.iter().enumerate().filter(|(index, _)| bytes_per_block[*index] > 0) {
        let budget_bytes = request.budget(index, device, bytes_per_block[index])?;
        let num_blocks = budget_bytes / bytes_per_block[index];
        ledger.devices[index] = DeviceLedger { budget_bytes, bytes_per_block: bytes_per_block[index], pool_bytes: 0 };
        if num_blocks < fewest {
            fewest = num_blocks;
            (ledger.tightest_device, ledger.budget_bytes) = (index, budget_bytes);
            ledger.bytes_per_block = bytes_per_block[index];
        }
    }
    if bytes_per_block.iter().all(|bytes| *bytes == 0) {
        fewest = request.empty_blocks(devices)?;
    }
    let num_groups = groups.groups.len() as u64;
    if fewest < num_groups {
        return Err(ConfigError::NoBlocks {
            budget_bytes: ledger.budget_bytes,
            needed_bytes: num_groups.saturating_mul(ledger.bytes_per_block),
            bytes_per_block: ledger.bytes_per_block,
            block_size,
        });
    }
    // Block ids are 32 bits wide, and two values are taken.
    if fewest >= u64::from(u32::MAX - 1) {
        return Err(ConfigError::TooLarge { what: "the number of KV blocks", value: fewest });
    }
    for device in &mut ledger.devices {
        device.pool_bytes = (fewest + 1).saturating_mul(device.bytes_per_block);
    }
    ledger.num_blocks = fewest as usize;
    let longest = ledger.num_blocks.saturating_mul(block_size).max(model.max_seq_len());
    ledger.servable_tokens = groups.servable_tokens(ledger.num_blocks, block_size, longest);
    Ok(CacheConfig { block_size, num_gpu_blocks: ledger.num_blocks, cache_type, groups, ledger })
}

/// What is asked of each device.
struct SizeRequest<'a> {
    config: &'a PagedAttentionConfig,
    limits: &'a PoolLimits,
    groups: &'a KvGroups,
    block_size: usize,
}

impl SizeRequest<'_> {
    fn blocks(&self, num_seqs: usize, num_tokens: usize) -> u64 {
        self.groups.concurrent_blocks(num_seqs, num_tokens, self.limits.max_num_batched_tokens.max(1), self.block_size) as u64
    }

    /// How many blocks there are where they take no bytes, so that no budget bounds them: as many as a context asks for, or all
    /// sequences. Budgets must be such as the devices have nevertheless.
    fn empty_blocks(&self, devices: &[DeviceMemory]) -> Result<u64, ConfigError> {
        for (index, device) in devices.iter().enumerate() {
            self.budget(index, device, 0)?;
        }
        let PoolLimits { max_num_seqs, max_model_len, .. } = *self.limits;
        Ok(match self.config.mem_gpu {
            // More than a request can have is of no use.
            Some(MemoryGpuConfig::ContextSize(num_tokens)) => {
                let num_seqs = if self.config.guaranteed { max_num_seqs } else { 1 };
                self.blocks(num_seqs, num_tokens.min(max_model_len))
            }
            _ if self.config.guaranteed => self.blocks(max_num_seqs, max_model_len),
            _ => self.blocks(max_num_seqs, max_model_len).min(MAX_EMPTY_BLOCKS.max(self.blocks(1, max_model_len))),
        })
    }

    /// Bytes for blocks on a device, where a block takes `bytes_per_block`.
    fn budget(&self, index: usize, device: &DeviceMemory, bytes_per_block: u64) -> Result<u64, ConfigError> {
        let all_seqs = (self.limits.max_num_seqs, self.limits.max_model_len);
        match self.config.mem_gpu {
            Some(MemoryGpuConfig::MbAmount(0)) => Err(ConfigError::Zero { field: "the memory amount" }),
            Some(MemoryGpuConfig::ContextSize(0)) => Err(ConfigError::Zero { field: "the context size" }),
            Some(MemoryGpuConfig::MbAmount(amount)) => {
                let too_large = ConfigError::TooLarge { what: "the memory amount in MiB", value: amount as u64 };
                let budget = (amount as u64).checked_mul(MIB).ok_or(too_large)?;
                if budget > device.limit() {
                    let (requested_bytes, limit_bytes) = (budget, device.limit());
                    return Err(ConfigError::MoreThanTheMachine { device: index, requested_bytes, limit_bytes });
                }
                self.guaranteed_within(index, budget, bytes_per_block)
            }
            Some(MemoryGpuConfig::Utilization(fraction)) => {
                self.guaranteed_within(index, utilization_budget(device, fraction)?, bytes_per_block)
            }
            Some(MemoryGpuConfig::ContextSize(num_tokens)) if self.config.guaranteed => {
                let longest = self.limits.max_model_len;
                if num_tokens > longest {
                    return Err(ConfigError::BeyondTheModel { num_tokens, longest });
                }
                self.checked(index, (self.limits.max_num_seqs, num_tokens), device.free_for_kv(), bytes_per_block)
            }
            Some(MemoryGpuConfig::ContextSize(num_tokens)) => {
                self.checked(index, (1, num_tokens), device.limit(), bytes_per_block)
            }
            None if self.config.guaranteed => self.checked(index, all_seqs, device.free_for_kv(), bytes_per_block),
            None if device.unified => {
                let wanted = self.blocks(all_seqs.0, all_seqs.1).saturating_mul(bytes_per_block);
                Ok(wanted.min(device.free_for_kv() / UNIFIED_FREE_MEMORY_DIVISOR))
            }
            None => utilization_budget(device, DEFAULT_UTILIZATION),
        }
    }

    /// The budget, which must hold what is guaranteed.
    fn guaranteed_within(&self, index: usize, budget: u64, bytes_per_block: u64) -> Result<u64, ConfigError> {
        if self.config.guaranteed {
            self.checked(index, (self.limits.max_num_seqs, self.limits.max_model_len), budget, bytes_per_block)?;
        }
        Ok(budget)
    }

    /// Bytes of the blocks of sequences of so many tokens each, which must not be over the limit.
    fn checked(&self, device: usize, seqs: (usize, usize), limit_bytes: u64, bytes_per_block: u64) -> Result<u64, ConfigError> {
        let (num_seqs, num_tokens) = seqs;
        let num_blocks = self.blocks(num_seqs, num_tokens);
        let too_large = ConfigError::TooLarge { what: "the KV cache in bytes", value: num_blocks };
        let needed_bytes = num_blocks.checked_mul(bytes_per_block).ok_or(too_large)?;
        if needed_bytes <= limit_bytes {
            return Ok(needed_bytes);
        }
        let fits = |num_seqs, num_tokens| self.blocks(num_seqs, num_tokens) <= limit_bytes / bytes_per_block;
        Err(ConfigError::DoesNotFit {
            device,
            num_seqs,
            num_tokens,
            needed_bytes,
            limit_bytes,
            fitting_seqs: last_that_holds(num_seqs, |n| fits(n, num_tokens)),
            fitting_tokens: last_that_holds(num_tokens, |n| fits(num_seqs, n)),
        })
    }
}

/// What the fraction of all memory leaves after what is used or will be.
fn utilization_budget(device: &DeviceMemory, fraction: f32) -> Result<u64, ConfigError> {
    let cap = (device.total as f64 * valid_fraction(fraction)?) as u64;
    let used = device.total.saturating_sub(device.available).saturating_add(device.pending);
    Ok(cap.saturating_sub(used))
}

/// Bytes of a block on each device. A block serves any of the groups, each of which lays its layers one after the
/// other in it, so it has the size of the group with most bytes there.
fn bytes_per_block(
    model: &dyn ModelConfigLike,
    layers: &[SizedLayer],
    groups: &KvGroups,
    num_devices: usize,
) -> Result<Vec<u64>, ConfigError> {
    if num_devices == 0 {
        return Err(ConfigError::NoDevices);
    }
    let mut bytes = vec![0u64; num_devices];
    for group in &groups.groups {
        let mut of_group = vec![0u64; num_devices];
        for &layer in &group.layers {
            let device = model.device(layer);
            let place = of_group.get_mut(device).ok_or(ConfigError::UnknownDevice { layer, device, num_devices })?;
            let too_large = ConfigError::TooLarge { what: "the bytes of a KV block, in layer", value: layer as u64 };
            *place = place.checked_add(layers[layer].block_bytes).ok_or(too_large)?;
        }
        for (bytes, of_group) in bytes.iter_mut().zip(of_group) {
            *bytes = (*bytes).max(of_group);
        }
    }
    Ok(bytes)
}
