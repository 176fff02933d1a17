//! The pool that a scheduler is given.

use crate::error::{InvalidSchedulerConfig, at_least};
use crate::kv_groups::KvGroups;

/// The KV memory that the scheduler hands out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvCacheConfig {
    /// Usable blocks. The cache engine allocates one more, for the null block with id 0.
    pub num_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// How the layers share the blocks.
    pub groups: KvGroups,
    /// Whether prefixes are looked up and kept.
    pub enable_prefix_caching: bool,
    /// Key of the block hash; random for each process.
    pub hash_key: [u8; 32],
}

impl KvCacheConfig {
    /// The number of blocks, if the pool can be built.
    pub(crate) fn check(&self) -> Result<u32, InvalidSchedulerConfig> {
        at_least("block_size", self.block_size, 1, "at least 1 is needed")?;
        let num_groups = self.groups.groups.len();
        at_least("number of KV groups", num_groups, 1, "at least 1 is needed")?;
        at_least("num_blocks", self.num_blocks, num_groups, "at least 1 for each KV group is needed")?;
        match u32::try_from(self.num_blocks) {
            Ok(num_blocks) if num_blocks < u32::MAX - 1 => Ok(num_blocks),
            _ => {
                let requirement = "block ids are 32 bits wide, at most 4294967293 work";
                Err(InvalidSchedulerConfig { field: "num_blocks", value: self.num_blocks, requirement })
            }
        }
    }
}
