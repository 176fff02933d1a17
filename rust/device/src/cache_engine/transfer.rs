//! Whole blocks out of the pool and into it, as plain bytes.

use super::{CacheEngine, on_gpu};

impl CacheEngine {
    /// Copies a block out, plane after plane (K 0, V 0, K 1, ...), into `[block_bytes]`.
    ///
    /// # Panics
    /// When the block is out of range or `bytes` is not [`Self::block_bytes`] long.
    pub fn export_block(&self, block: u32, bytes: &mut [u8]) {
        self.check_block(block, bytes.len());
        let _reader = self.reader();
        if let Some(device) = self.device() {
            return on_gpu(device.export_block(block, bytes));
        }
        let block = self.block(block);
        // SAFETY: the block is in range and as long as `bytes`; they cannot overlap, for blocks are never borrowed as slices; the
        // reader's lock keeps writers out.
        unsafe { std::ptr::copy_nonoverlapping(block, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies in what [`Self::export_block`] copied out of a storage with the same spec.
    ///
    /// # Panics
    /// When the block is out of range or `bytes` is not [`Self::block_bytes`] long.
    pub fn import_block(&self, block: u32, bytes: &[u8]) {
        self.check_block(block, bytes.len());
        let _writer = self.writer();
        if let Some(device) = self.device() {
            return on_gpu(device.import_block(block, bytes));
        }
        let block = self.block(block);
        // SAFETY: as in `export_block`, with the writer's lock held.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), block, bytes.len()) };
    }

    fn check_block(&self, block: u32, num_bytes: usize) {
        assert!((block as usize) < self.spec.num_blocks, "block {block} of {}", self.spec.num_blocks);
        assert_eq!(num_bytes, self.block_bytes(), "bytes of a block");
    }
}

#[cfg(test)]
mod tests {
    use crate::{CacheEngine, KvCacheSpec, KvDType, KvPlace, KvSide};

    fn filled(dtype: KvDType) -> CacheEngine {
        let spec = KvCacheSpec { num_blocks: 4, block_size: 8, num_kv_heads: 2, head_dim: 16, num_planes: 3, dtype };
        let cache = CacheEngine::new(&spec).unwrap();
        let mut value = 0.0;
        for plane in 0..3 {
            for slot in 0..4 * 8 {
                for head in 0..2 {
                    value += 0.25;
                    let at = KvPlace { plane, slot, head };
                    cache.write(KvSide::Key, at, &[value; 16]);
                    cache.write(KvSide::Value, at, &[-value; 16]);
                }
            }
        }
        cache
    }

    fn block(cache: &CacheEngine, block: usize) -> Vec<f32> {
        let mut all = Vec::new();
        let mut values = [0.0; 16];
        for plane in 0..3 {
            for slot in block * 8..(block + 1) * 8 {
                for head in 0..2 {
                    for side in [KvSide::Key, KvSide::Value] {
                        cache.read(side, KvPlace { plane, slot, head }, &mut values);
                        all.extend(values);
                    }
                }
            }
        }
        all
    }

    #[test]
    fn a_block_that_went_out_and_in_is_the_same_and_its_neighbours_are_untouched() {
        for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
            let cache = filled(dtype);
            let before: Vec<_> = (0..4).map(|i| block(&cache, i)).collect();
            let mut bytes = vec![0; cache.block_bytes()];
            assert_eq!(bytes.len() as u64 * 4, cache.spec().total_bytes().unwrap());
            cache.export_block(3, &mut bytes);
            cache.import_block(1, &bytes);
            for (i, source) in [(0, 0), (1, 3), (2, 2), (3, 3)] {
                assert_eq!(block(&cache, i), before[source]);
            }
            let other = CacheEngine::new(cache.spec()).unwrap();
            other.import_block(2, &bytes);
            assert_eq!(block(&other, 2), before[3]);
        }
    }

    #[test]
    #[should_panic(expected = "block 4 of 4")]
    fn a_block_out_of_range_is_refused() {
        let cache = filled(KvDType::F16);
        cache.export_block(4, &mut vec![0; cache.block_bytes()]);
    }

    #[test]
    #[should_panic(expected = "bytes of a block")]
    fn bytes_of_another_length_are_refused() {
        let cache = filled(KvDType::F16);
        cache.import_block(1, &vec![0; cache.block_bytes() - 1]);
    }
}
