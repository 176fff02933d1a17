//! The KV storage: one K and one V plane a layer of a KV group, each `[num_blocks, num_kv_heads, block_size, head_dim]`.

use crate::KvDType;

/// Shape of the KV storage.
#[derive(Clone, Debug)]
pub struct KvCacheSpec {
    /// Physical blocks, the null block 0 included.
    pub num_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Layers of a KV group: each has a K and a V plane.
    pub num_planes: usize,
    /// Element type.
    pub dtype: KvDType,
}

/// The storage itself.
pub struct CacheEngine {
    spec: KvCacheSpec,
}

impl CacheEngine {
    /// The shape it was made with.
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }
}
