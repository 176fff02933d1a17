//! What is asked of the KV cache, and what of a model decides its size.

use crate::error::ConfigError;

/// Block size when none is asked for.
pub const DEFAULT_PAGED_ATTENTION_BLOCK_SIZE: usize = 32;

/// Block sizes that the attention kernels have.
pub const SUPPORTED_BLOCK_SIZES: &[usize] = &[8, 16, 32];

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

    /// Bytes of the keys, or of the values, of a block in one layer: the elements of `[num_kv_heads, block_size, head_dim]`, then
    /// the scales `[num_kv_heads, block_size]`, each rounded up to 16 bytes; `None` on overflow.
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
    /// The blocks must hold as many requests as may run, all at their full length: the context size, or the model's.
    pub guaranteed: bool,
}

impl PagedAttentionConfig {
    /// Checks what can be checked without a machine.
    pub fn new(block_size: Option<usize>, mem_gpu: MemoryGpuConfig, cache_type: PagedCacheType) -> Result<Self, ConfigError> {
        let config = Self { block_size, mem_gpu: Some(mem_gpu), cache_type, guaranteed: false };
        config.validated_block_size()?;
        match mem_gpu {
            MemoryGpuConfig::MbAmount(0) => Err(ConfigError::Zero { field: "the memory amount" }),
            MemoryGpuConfig::ContextSize(0) => Err(ConfigError::Zero { field: "the context size" }),
            MemoryGpuConfig::Utilization(fraction) => valid_fraction(fraction).map(|_| config),
            _ => Ok(config),
        }
    }

    pub(crate) fn validated_block_size(&self) -> Result<usize, ConfigError> {
        let block_size = self.block_size.unwrap_or(DEFAULT_PAGED_ATTENTION_BLOCK_SIZE);
        if SUPPORTED_BLOCK_SIZES.contains(&block_size) {
            Ok(block_size)
        } else {
            Err(ConfigError::BlockSize { supported: SUPPORTED_BLOCK_SIZES, block_size })
        }
    }
}

pub(crate) fn valid_fraction(fraction: f32) -> Result<f64, ConfigError> {
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

/// Which tokens' keys and values a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Retention {
    /// Those of every token.
    #[default]
    All,
    /// Key `j` is visible to query `i` iff `i - window < j <= i`; a window of 0 counts as 1.
    Window(usize),
}

impl Retention {
    /// The window; `None` where all is kept.
    pub fn window(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Window(window) => Some(window.max(1)),
        }
    }
}

impl From<Option<usize>> for Retention {
    fn from(window: Option<usize>) -> Self {
        window.map_or(Self::All, |window| Self::Window(window.max(1)))
    }
}

/// What of a model decides the size of its KV cache.
pub trait ModelConfigLike {
    /// Layers.
    fn num_layers(&self) -> usize;
    /// What a token takes in a layer; nothing in one that reads another layer's KV.
    fn kv_shape(&self, layer: usize) -> KvShape;
    /// Whose keys and values the layer still reads.
    fn retention(&self, _layer: usize) -> Retention {
        Retention::All
    }
    /// The device that keeps the layer, an index in the list of devices.
    fn device(&self, _layer: usize) -> usize {
        0
    }
    /// Context length of the model.
    fn max_seq_len(&self) -> usize;
}
