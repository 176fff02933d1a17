//! Whole blocks out of the pool and into it, as plain bytes.

use super::{CacheEngine, on_device};

impl CacheEngine {
    /// Copies a block out, plane after plane (K 0, V 0, K 1, ...), into `[block_bytes]`.
    ///
    /// # Panics
    /// When the block is out of range or `bytes` is not [`Self::block_bytes`] long.
    pub fn export_block(&self, block: u32, bytes: &mut [u8]) {
        self.check_block(block, bytes.len());
        let _reader = self.reader();
        if let Some(blocks) = self.blocks() {
            return bytes.copy_from_slice(&on_device(blocks.export_blocks(&[block]))[0]);
        }
        let block = self.block(block);
        // SAFETY: the block is in range and as long as `bytes`; they cannot overlap, for blocks are never borrowed as slices; the
        // reader's lock keeps writers out.
        unsafe { std::ptr::copy_nonoverlapping(block, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies blocks out, each as [`Self::export_block`] does; on a GPU all at once.
    ///
    /// # Panics
    /// When a block is out of range.
    pub fn export_blocks(&self, blocks: &[u32]) -> Vec<Vec<u8>> {
        let block_bytes = self.block_bytes();
        if let Some(device) = self.blocks() {
            let _reader = self.reader();
            return on_device(device.export_blocks(blocks));
        }
        let export = |block: &u32| {
            let mut bytes = vec![0; block_bytes];
            self.export_block(*block, &mut bytes);
            bytes
        };
        blocks.iter().map(export).collect()
    }

    /// Copies in what [`Self::export_block`] copied out of a storage with the same spec on the same kind of device: keys lie
    /// otherwise on a GPU.
    ///
    /// # Panics
    /// When the block is out of range or `bytes` is not [`Self::block_bytes`] long.
    pub fn import_block(&self, block: u32, bytes: &[u8]) {
        self.check_block(block, bytes.len());
        let _writer = self.writer();
        if let Some(blocks) = self.blocks() {
            return on_device(blocks.import_block(block, bytes));
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
#[allow(clippy::float_cmp)] // Small integers.
mod tests {
    use crate::{CacheEngine, KvCacheSpec, KvDType, KvPlace, KvShape, KvSide};

    fn filled(dtype: KvDType) -> CacheEngine {
        let spec = KvCacheSpec::uniform((4, 8), dtype, KvShape::new(2, 16), 3).unwrap();
        let cache = CacheEngine::new(&spec).unwrap();
        let mut value = 0.0;
        for plane in 0..3 {
            for slot in 0..4 * 8 {
                for head in 0..2 {
                    value += 0.25;
                    let at = KvPlace { layer: plane, slot, head };
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
                        cache.read(side, KvPlace { layer: plane, slot, head }, &mut values);
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

    /// The format that attention reads and `docs/kv-cache.md` describes.
    #[test]
    fn keys_of_a_block_lie_side_by_side_dimension_by_dimension() {
        for (dtype, head_dim, together) in
            [(KvDType::F16, 6, 1), (KvDType::BF16, 6, 2), (KvDType::BF16, 5, 1), (KvDType::F32, 3, 1), (KvDType::Int8, 6, 1)]
        {
            let spec = KvCacheSpec::uniform((2, 8), dtype, KvShape::new(2, head_dim), 1).unwrap();
            let cache = CacheEngine::new(&spec).unwrap();
            let value = |token: usize, head: usize, i: usize| (head * 100 + token * 10 + i) as f32;
            for (token, head) in (0..8).flat_map(|token| [(token, 0), (token, 1)]) {
                let vector: Vec<f32> = (0..head_dim).map(|i| value(token, head, i)).collect();
                for side in [KvSide::Key, KvSide::Value] {
                    cache.write(side, KvPlace { layer: 0, slot: 8 + token, head }, &vector);
                }
            }
            let mut bytes = vec![0; cache.block_bytes()];
            cache.export_block(1, &mut bytes);
            let (keys, values) = bytes.split_at(cache.block_bytes() / 2);
            let bf16_at = |bytes: &[u8], at: usize| half::bf16::from_ne_bytes([bytes[at], bytes[at + 1]]).to_f32();
            let scales = head_dim * dtype.element_bytes() * 16;
            let element = |bytes: &[u8], at: usize, vector: usize| match dtype {
                KvDType::F32 => f32::from_ne_bytes(bytes[4 * at..][..4].try_into().unwrap()),
                KvDType::F16 => half::f16::from_ne_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
                KvDType::BF16 => bf16_at(bytes, 2 * at),
                _ => f32::from(bytes[at] as i8) * bf16_at(bytes, scales + 2 * vector),
            };
            let mut read = vec![0.0; head_dim];
            for (head, token, i) in (0..2).flat_map(|h| (0..8).flat_map(move |t| (0..head_dim).map(move |i| (h, t, i)))) {
                let vector = head * 8 + token;
                let key = ((head * head_dim / together + i / together) * 8 + token) * together + i % together;
                cache.read(KvSide::Key, KvPlace { layer: 0, slot: 8 + token, head }, &mut read);
                assert!(dtype == KvDType::Int8 || read[i] == value(token, head, i));
                assert_eq!(element(keys, key, vector), read[i], "{dtype:?} {head_dim}: key {token} of head {head}");
                let place = vector * head_dim + i;
                assert_eq!(element(values, place, vector), read[i], "{dtype:?} {head_dim}: value {token} of head {head}");
            }
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
