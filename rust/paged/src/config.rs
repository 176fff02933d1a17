//! How many blocks the KV cache gets: memory knobs in, a number of blocks and a ledger out.
//!
//! Per device, a block of `block_size` tokens costs the planes of the layers that lie on that device; each device
//! affords its own number of blocks and the pool has the least of them. Everything is counted in whole bytes; the one
//! rounding is from bytes down to blocks, or from tokens up to blocks. The null block comes on top of what is
//! promised: `num_gpu_blocks` are all usable, and the cache engine allocates one more.

use crate::error::ConfigError;
use crate::kv_groups::KvGroups;
use crate::scheduler::KvCacheConfig;

/// Block size when none is asked for.
pub const DEFAULT_PAGED_ATTENTION_BLOCK_SIZE: usize = 32;

/// Block sizes that the attention kernels have.
pub const SUPPORTED_BLOCK_SIZES: &[usize] = &[8, 16, 32];

/// With no knob given, the share of a device's own memory that weights, activations and KV may fill together.
pub const DEFAULT_UTILIZATION: f32 = 0.9;

/// With no knob given, a pool in unified memory (a CPU's) takes at most one part in so many of what is free.
pub const UNIFIED_FREE_MEMORY_DIVISOR: u64 = 2;

const MIB: u64 = 1024 * 1024;

/// How much memory the KV cache gets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MemoryGpuConfig {
    /// So many MiB on each device.
    MbAmount(usize),
    /// What is left of this fraction of each device's memory, in (0, 1], after all that is in use.
    Utilization(f32),
    /// Enough for one sequence of so many tokens, prompt and answer together.
    ContextSize(usize),
}

/// Type in which keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PagedCacheType {
    /// The model's own.
    #[default]
    Auto,
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    BF16,
    /// 8-bit floats, with a scale for each token and head.
    F8E4M3,
    /// 8-bit integers, with a scale for each token and head.
    Int8,
}

impl std::str::FromStr for PagedCacheType {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        match name {
            "auto" => Ok(Self::Auto),
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::BF16),
            "f8e4m3" => Ok(Self::F8E4M3),
            "int8" => Ok(Self::Int8),
            _ => Err(ConfigError::UnknownCacheType { name: name.to_owned() }),
        }
    }
}

impl PagedCacheType {
    /// The type that is really used, given the model's.
    pub fn resolve(self, model: KvDType) -> KvDType {
        match self {
            Self::Auto => model,
            Self::F32 => KvDType::F32,
            Self::F16 => KvDType::F16,
            Self::BF16 => KvDType::BF16,
            Self::F8E4M3 => KvDType::F8E4M3,
            Self::Int8 => KvDType::Int8,
        }
    }
}

/// An element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    BF16,
    /// 8-bit floats (OCP e4m3), and a 16-bit scale for each token and head.
    F8E4M3,
    /// 8-bit integers, and a 16-bit scale for each token and head.
    Int8,
}

/// Elements and scales of a block each take a multiple of this many bytes.
const KV_ALIGNMENT: u64 = 16;

impl KvDType {
    /// Bytes of one element, scales apart.
    fn element_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8E4M3 | Self::Int8 => 1,
        }
    }

    /// Bytes of one scale, 0 for types without.
    fn scale_bytes(self) -> u64 {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 0,
            Self::F8E4M3 | Self::Int8 => 2,
        }
    }

    /// Bytes of the keys, or of the values, of a block in one layer: the elements `[num_kv_heads, block_size, head_dim]`, then the
    /// scales `[num_kv_heads, block_size]`, each rounded up to 16 bytes; `None` on overflow.
    pub fn plane_block_bytes(self, num_kv_heads: usize, block_size: usize, head_dim: usize) -> Option<u64> {
        let vectors = (num_kv_heads as u64).checked_mul(block_size as u64)?;
        let elements = vectors.checked_mul(head_dim as u64)?.checked_mul(self.element_bytes())?;
        // A head without elements needs no scales.
        let scales = if head_dim == 0 { 0 } else { vectors.checked_mul(self.scale_bytes())? };
        elements.checked_next_multiple_of(KV_ALIGNMENT)?.checked_add(scales.checked_next_multiple_of(KV_ALIGNMENT)?)
    }
}

/// What a user asks of the KV cache. `None` lets the size follow from the machine, see [`calculate_cache_config`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PagedAttentionConfig {
    /// Tokens a block: 8, 16 or 32, by default 32.
    pub block_size: Option<usize>,
    /// Memory for the blocks.
    pub mem_gpu: Option<MemoryGpuConfig>,
    /// Type of the elements.
    pub cache_type: PagedCacheType,
}

impl PagedAttentionConfig {
    /// Checks what can be checked without a machine.
    pub fn new(block_size: Option<usize>, mem_gpu: MemoryGpuConfig, cache_type: PagedCacheType) -> Result<Self, ConfigError> {
        let config = Self { block_size, mem_gpu: Some(mem_gpu), cache_type };
        config.validated_block_size()?;
        match mem_gpu {
            MemoryGpuConfig::MbAmount(0) => Err(ConfigError::Zero { field: "the memory amount" }),
            MemoryGpuConfig::ContextSize(0) => Err(ConfigError::Zero { field: "the context size" }),
            MemoryGpuConfig::Utilization(fraction) => valid_fraction(fraction).map(|_| config),
            _ => Ok(config),
        }
    }

    fn validated_block_size(&self) -> Result<usize, ConfigError> {
        let block_size = self.block_size.unwrap_or(DEFAULT_PAGED_ATTENTION_BLOCK_SIZE);
        if SUPPORTED_BLOCK_SIZES.contains(&block_size) {
            Ok(block_size)
        } else {
            Err(ConfigError::BlockSize { supported: SUPPORTED_BLOCK_SIZES, block_size })
        }
    }
}

fn valid_fraction(fraction: f32) -> Result<f64, ConfigError> {
    if fraction > 0.0 && fraction <= 1.0 { Ok(f64::from(fraction)) } else { Err(ConfigError::Fraction { fraction }) }
}

/// What a token takes in one layer of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvShape {
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a key of one head.
    pub k_head_dim: usize,
    /// Elements of a value of one head.
    pub v_head_dim: usize,
}

impl KvShape {
    /// Bytes of a block's keys and values in one layer; `None` on overflow.
    pub fn block_bytes(&self, cache_type: KvDType, block_size: usize) -> Option<u64> {
        let keys = cache_type.plane_block_bytes(self.num_kv_heads, block_size, self.k_head_dim)?;
        keys.checked_add(cache_type.plane_block_bytes(self.num_kv_heads, block_size, self.v_head_dim)?)
    }
}

/// What of a model decides the size of its KV cache.
pub trait ModelConfigLike {
    /// Layers with a KV cache of their own.
    fn num_layers(&self) -> usize;
    /// What a token takes in a layer.
    fn kv_shape(&self, layer: usize) -> KvShape;
    /// The layer's attention window: key `j` is visible to query `i` iff `i - window < j <= i`.
    fn window(&self, _layer: usize) -> Option<usize> {
        None
    }
    /// The device that keeps the layer, an index in the list of devices.
    fn device(&self, _layer: usize) -> usize {
        0
    }
    /// Context length of the model.
    fn max_seq_len(&self) -> usize;
}

/// Memory of one device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// All it has.
    pub total: u64,
    /// What nobody uses now.
    pub available: u64,
    /// What of that will still be taken: weights not loaded yet, activations, workspaces.
    pub pending: u64,
    /// The host's own memory, handed out as it is first touched.
    pub unified: bool,
}

impl DeviceMemory {
    fn free_for_kv(&self) -> u64 {
        self.available.saturating_sub(self.pending)
    }

    /// The most that can be asked of it. Unified memory is only reserved, so what is in use now does not count.
    fn limit(&self) -> u64 {
        if self.unified { self.total } else { self.free_for_kv() }
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
///
/// # Errors
/// [`ConfigError`]: an unsupported block size, a fraction outside (0, 1], more memory than the machine
/// has, or too little for a block.
pub fn calculate_cache_config(
    config: &PagedAttentionConfig,
    model: &dyn ModelConfigLike,
    model_dtype: KvDType,
    devices: &[DeviceMemory],
    limits: &PoolLimits,
) -> Result<CacheConfig, ConfigError> {
    let block_size = config.validated_block_size()?;
    let cache_type = config.cache_type.resolve(model_dtype);
    let windows: Vec<_> = (0..model.num_layers()).map(|layer| model.window(layer)).collect();
    let groups = KvGroups::from_layers(&windows);
    let bytes_per_block = bytes_per_block(model, &groups, |shape| shape.block_bytes(cache_type, block_size), devices.len())?;

    let mut ledger = CacheLedger {
        devices: vec![DeviceLedger { budget_bytes: 0, bytes_per_block: 0, pool_bytes: 0 }; devices.len()],
        tightest_device: 0,
        budget_bytes: 0,
        bytes_per_block: 0,
        num_blocks: 0,
        servable_tokens: 0,
    };
    let blocks_for = |num_tokens: usize| groups.peak_blocks(num_tokens, limits.max_num_batched_tokens.max(1), block_size) as u64;
    let mut fewest = u64::MAX;
    for (index, device) in devices.iter().enumerate().filter(|(index, _)| bytes_per_block[*index] > 0) {
        let of_blocks = |num_blocks: u64| {
            let too_large = ConfigError::TooLarge { what: "the KV cache in bytes", value: num_blocks };
            num_blocks.checked_mul(bytes_per_block[index]).ok_or(too_large)
        };
        let budget_bytes = match config.mem_gpu {
            Some(MemoryGpuConfig::MbAmount(0)) => return Err(ConfigError::Zero { field: "the memory amount" }),
            Some(MemoryGpuConfig::MbAmount(amount)) => {
                let too_large = ConfigError::TooLarge { what: "the memory amount in MiB", value: amount as u64 };
                (amount as u64).checked_mul(MIB).ok_or(too_large)?
            }
            Some(MemoryGpuConfig::ContextSize(0)) => return Err(ConfigError::Zero { field: "the context size" }),
            Some(MemoryGpuConfig::ContextSize(num_tokens)) => of_blocks(blocks_for(num_tokens))?,
            Some(MemoryGpuConfig::Utilization(fraction)) => utilization_budget(device, fraction)?,
            None if device.unified => {
                let wanted = blocks_for(limits.max_model_len).saturating_mul(limits.max_num_seqs as u64);
                let share = device.free_for_kv() / UNIFIED_FREE_MEMORY_DIVISOR;
                wanted.saturating_mul(bytes_per_block[index]).min(share)
            }
            None => utilization_budget(device, DEFAULT_UTILIZATION)?,
        };
        let asked_for = matches!(config.mem_gpu, Some(MemoryGpuConfig::MbAmount(_) | MemoryGpuConfig::ContextSize(_)));
        if asked_for && budget_bytes > device.limit() {
            let (requested_bytes, limit_bytes) = (budget_bytes, device.limit());
            return Err(ConfigError::MoreThanTheMachine { device: index, requested_bytes, limit_bytes });
        }
        let num_blocks = budget_bytes / bytes_per_block[index];
        ledger.devices[index] = DeviceLedger { budget_bytes, bytes_per_block: bytes_per_block[index], pool_bytes: 0 };
        if num_blocks < fewest {
            fewest = num_blocks;
            (ledger.tightest_device, ledger.budget_bytes) = (index, budget_bytes);
            ledger.bytes_per_block = bytes_per_block[index];
        }
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

/// What the fraction of all memory leaves after what is used or will be.
fn utilization_budget(device: &DeviceMemory, fraction: f32) -> Result<u64, ConfigError> {
    let cap = (device.total as f64 * valid_fraction(fraction)?) as u64;
    let used = device.total.saturating_sub(device.available).saturating_add(device.pending);
    Ok(cap.saturating_sub(used))
}

/// Bytes of a block on each device. Plane `i` of a block serves layer `i` of whichever group holds the block, so it
/// has the size of the largest of them; it lies on every device that has one of them.
fn bytes_per_block(
    model: &dyn ModelConfigLike,
    groups: &KvGroups,
    block_bytes: impl Fn(KvShape) -> Option<u64>,
    num_devices: usize,
) -> Result<Vec<u64>, ConfigError> {
    if num_devices == 0 {
        return Err(ConfigError::NoDevices);
    }
    let mut bytes = vec![0u64; num_devices];
    for plane in 0..groups.layers_per_group {
        let mut largest = vec![0u64; num_devices];
        for &layer in groups.groups.iter().filter_map(|group| group.layers.get(plane)) {
            let device = model.device(layer);
            let place = largest.get_mut(device).ok_or(ConfigError::UnknownDevice { layer, device, num_devices })?;
            let too_large = ConfigError::TooLarge { what: "the bytes of a KV block, in layer", value: layer as u64 };
            *place = (*place).max(block_bytes(model.kv_shape(layer)).ok_or(too_large)?);
        }
        for (bytes, more) in bytes.iter_mut().zip(largest) {
            let too_large = ConfigError::TooLarge { what: "the bytes of a KV block", value: more };
            *bytes = bytes.checked_add(more).ok_or(too_large)?;
        }
    }
    if bytes.iter().all(|bytes| *bytes == 0) {
        return Err(ConfigError::Zero { field: "the size of a token's KV" });
    }
    Ok(bytes)
}
