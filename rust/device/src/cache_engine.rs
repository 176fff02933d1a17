//! The KV storage: one K and one V plane a layer of a KV group, each `[num_blocks, num_kv_heads, block_size, head_dim]`.

#![allow(clippy::cast_ptr_alignment)] // Planes are page-aligned.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use half::{bf16, f16};

use crate::{DeviceError, KvDType, host::host_memory, mmap::Pages};

/// The largest finite f16: what is written for values beyond it.
pub(crate) const F16_MAX: f32 = 65504.0;

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

impl KvCacheSpec {
    /// Bytes that one more block takes, over all planes; `None` on overflow.
    pub fn bytes_per_block(&self) -> Option<u64> {
        [self.block_size, self.num_kv_heads, self.head_dim, self.dtype.size_bytes(), self.num_planes]
            .into_iter()
            .try_fold(2u64, |bytes, n| bytes.checked_mul(n as u64))
    }

    /// Bytes of the whole storage; `None` on overflow.
    pub fn total_bytes(&self) -> Option<u64> {
        self.bytes_per_block()?.checked_mul(self.num_blocks as u64)
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum KvSide {
    Key,
    Value,
}

/// Where the vector of one head lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlace {
    /// Layer of the KV group.
    pub plane: usize,
    /// `block_id * block_size + offset`.
    pub slot: usize,
    /// Key and value head.
    pub head: usize,
}

/// A plane's memory. It is written through shared references, by raw pointer.
struct Plane {
    base: *mut u8,
    // Owns what `base` points to; never borrowed again.
    _pages: Pages<u8>,
}

// SAFETY: a plane is memory without thread affinity.
unsafe impl Send for Plane {}
// SAFETY: every access goes through `CacheReader` (shared lock, reads only) or `CacheWriter` (exclusive lock), whose raw pointers
// the kernels of this crate follow to disjoint places.
unsafe impl Sync for Plane {}

/// The storage itself: address space at first, committed as blocks are first written.
///
/// It is shared by reference; a lock, taken once a phase and never contended when one thread drives the steps, keeps a reader from
/// running beside a writer.
pub struct CacheEngine {
    spec: KvCacheSpec,
    /// K plane 0, V plane 0, K plane 1, ...
    planes: Vec<Plane>,
    access: RwLock<()>,
}

/// Shared access to the planes.
pub(crate) struct CacheReader<'a> {
    cache: &'a CacheEngine,
    _guard: RwLockReadGuard<'a, ()>,
}

/// Exclusive access to the planes.
pub(crate) struct CacheWriter<'a> {
    cache: &'a CacheEngine,
    _guard: RwLockWriteGuard<'a, ()>,
}

impl CacheEngine {
    /// Reserves the storage.
    ///
    /// Errors: [`DeviceError::Shape`] when a dimension is 0 or the size overflows, [`DeviceError::OutOfMemory`] when the machine has
    /// less memory than the storage would take once it is full.
    pub fn new(spec: &KvCacheSpec) -> Result<Self, DeviceError> {
        let needed_bytes = Self::checked_bytes(spec)?;
        let available_bytes = host_memory().total_bytes;
        if needed_bytes > available_bytes {
            let what = format!("a KV cache of {} blocks of {} tokens", spec.num_blocks, spec.block_size);
            return Err(DeviceError::OutOfMemory { what, needed_bytes, available_bytes });
        }
        Self::reserve(spec)
    }

    fn checked_bytes(spec: &KvCacheSpec) -> Result<u64, DeviceError> {
        let dims = [spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, spec.num_planes];
        spec.total_bytes().filter(|&bytes| i64::try_from(bytes).is_ok() && dims.iter().all(|&d| d > 0)).ok_or_else(|| {
            DeviceError::Shape(format!("a KV cache cannot have the shape {spec:?}; use positive sizes below 2^63 bytes"))
        })
    }

    fn reserve(spec: &KvCacheSpec) -> Result<Self, DeviceError> {
        let plane_bytes = Self::checked_bytes(spec)? / (2 * spec.num_planes as u64);
        let plane_bytes = usize::try_from(plane_bytes).map_err(|_| {
            DeviceError::Shape(format!("a KV plane of {plane_bytes} bytes is more than this machine can address"))
        })?;
        let planes = (0..2 * spec.num_planes)
            .map(|_| {
                let mut pages = Pages::zeroed(plane_bytes)?;
                Ok(Plane { base: pages.as_mut_slice().as_mut_ptr(), _pages: pages })
            })
            .collect::<Result<_, DeviceError>>()?;
        Ok(Self { spec: spec.clone(), planes, access: RwLock::new(()) })
    }

    /// The shape it was made with.
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    /// Waits for writers and keeps them out.
    pub(crate) fn reader(&self) -> CacheReader<'_> {
        CacheReader { cache: self, _guard: self.access.read().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Waits for everyone else and keeps them out.
    pub(crate) fn writer(&self) -> CacheWriter<'_> {
        CacheWriter { cache: self, _guard: self.access.write().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Writes one head's vector, `[head_dim]`, rounded to nearest even; f16 saturates at ±65504.
    ///
    /// # Panics
    /// When `at` is out of range or `values` is not `head_dim` long.
    pub fn write(&self, side: KvSide, at: KvPlace, values: &[f32]) {
        assert_eq!(values.len(), self.spec.head_dim, "values of one head");
        let first = self.first_element(at);
        let writer = self.writer();
        let base = writer.base(side, at.plane);
        for (i, &value) in (first..).zip(values) {
            // SAFETY: `first_element` checked that the plane holds `head_dim` elements from `first` on; its base is page-aligned;
            // `writer` is alive.
            unsafe {
                match self.spec.dtype {
                    KvDType::F32 => base.cast::<f32>().add(i).write(value),
                    KvDType::F16 => base.cast::<f16>().add(i).write(f16::from_f32(value.clamp(-F16_MAX, F16_MAX))),
                    KvDType::BF16 => base.cast::<bf16>().add(i).write(bf16::from_f32(value)),
                }
            }
        }
    }

    /// Reads one head's vector, `[head_dim]`.
    ///
    /// # Panics
    /// When `at` is out of range or `values` is not `head_dim` long.
    pub fn read(&self, side: KvSide, at: KvPlace, values: &mut [f32]) {
        assert_eq!(values.len(), self.spec.head_dim, "values of one head");
        let first = self.first_element(at);
        let reader = self.reader();
        let base = reader.base(side, at.plane);
        for (i, value) in (first..).zip(values) {
            // SAFETY: as in `write`, with `reader` alive; the element types are valid for any bits.
            *value = unsafe {
                match self.spec.dtype {
                    KvDType::F32 => base.cast::<f32>().add(i).read(),
                    KvDType::F16 => base.cast::<f16>().add(i).read().to_f32(),
                    KvDType::BF16 => base.cast::<bf16>().add(i).read().to_f32(),
                }
            };
        }
    }

    /// Copies whole blocks `(source, destination)` in every plane, in order.
    ///
    /// # Panics
    /// When a block id is out of range.
    pub fn copy_blocks(&self, pairs: &[(u32, u32)]) {
        let spec = &self.spec;
        let block_bytes = spec.num_kv_heads * spec.block_size * spec.head_dim * spec.dtype.size_bytes();
        for &(source, destination) in pairs {
            let last = spec.num_blocks - 1;
            assert!(
                source.max(destination) as usize <= last,
                "copy of block {source} to {destination}, the last block is {last}"
            );
        }
        let _writer = self.writer();
        for plane in &self.planes {
            for &(source, destination) in pairs {
                // SAFETY: both ids are below num_blocks, so both ranges are within the plane; `copy` allows them to be the same;
                // the writer's lock is held.
                unsafe {
                    let from = plane.base.add(source as usize * block_bytes);
                    let to = plane.base.add(destination as usize * block_bytes);
                    std::ptr::copy(from, to, block_bytes);
                }
            }
        }
    }

    /// Element index of the start of a head's vector within its plane.
    fn first_element(&self, at: KvPlace) -> usize {
        let spec = &self.spec;
        let (block, offset) = (at.slot / spec.block_size, at.slot % spec.block_size);
        assert!(block < spec.num_blocks, "slot {} of {} blocks of {}", at.slot, spec.num_blocks, spec.block_size);
        assert!(at.head < spec.num_kv_heads, "head {} of {}", at.head, spec.num_kv_heads);
        ((block * spec.num_kv_heads + at.head) * spec.block_size + offset) * spec.head_dim
    }

    fn base(&self, side: KvSide, plane: usize) -> *mut u8 {
        assert!(plane < self.spec.num_planes, "plane {plane} of {}", self.spec.num_planes);
        self.planes[2 * plane + usize::from(side == KvSide::Value)].base
    }
}

impl CacheReader<'_> {
    /// The first byte of a plane. It may be read, not written, while this reader lives.
    pub(crate) fn base(&self, side: KvSide, plane: usize) -> *const u8 {
        self.cache.base(side, plane)
    }
}

impl CacheWriter<'_> {
    /// The first byte of a plane. It may be read and written while this writer lives.
    pub(crate) fn base(&self, side: KvSide, plane: usize) -> *mut u8 {
        self.cache.base(side, plane)
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // Conversions are exact.
mod tests {
    use super::*;

    fn spec(dtype: KvDType) -> KvCacheSpec {
        KvCacheSpec { num_blocks: 5, block_size: 8, num_kv_heads: 2, head_dim: 16, num_planes: 3, dtype }
    }

    #[test]
    fn a_pool_beyond_the_machine_is_refused_with_both_figures() {
        let total = host_memory().total_bytes;
        let spec = KvCacheSpec { num_blocks: (total / 4096) as usize, ..spec(KvDType::F32) };
        let needed = spec.total_bytes().unwrap();
        let Err(error) = CacheEngine::new(&spec) else { panic!("{needed} bytes were promised of {total}") };
        let text = error.to_string();
        assert!(text.contains(&needed.to_string()) && text.contains(&total.to_string()), "{text}");
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for (num_blocks, head_dim) in [(0, 16), (5, 0), (usize::MAX, 16), (1 << 40, 1 << 20)] {
            let spec = KvCacheSpec { num_blocks, head_dim, ..spec(KvDType::F16) };
            assert!(matches!(CacheEngine::new(&spec), Err(DeviceError::Shape(_))), "{spec:?}");
        }
    }

    #[test]
    fn the_last_block_of_a_plane_of_more_than_2_pow_31_elements_is_its_own() {
        let spec = KvCacheSpec {
            num_blocks: (1 << 31) / (32 * 8 * 128) + 2,
            block_size: 32,
            num_kv_heads: 8,
            head_dim: 128,
            num_planes: 1,
            dtype: KvDType::F16,
        };
        // Address space only: `reserve` does not compare with the machine's memory.
        let cache = CacheEngine::reserve(&spec).unwrap();
        let last = KvPlace { plane: 0, slot: spec.num_blocks * 32 - 1, head: 7 };
        assert!(cache.first_element(last) > 1 << 31);
        let values: Vec<f32> = (0..128).map(|i| i as f32 - 60.0).collect();
        cache.write(KvSide::Value, last, &values);
        let mut read = vec![0.0; 128];
        cache.read(KvSide::Value, last, &mut read);
        assert_eq!(read, values);
        // Where a 32-bit signed byte offset, and an element index cut at 2^31, would have landed.
        let cut = (cache.first_element(last) - (1 << 31)) / (32 * 8 * 128) * 32 + 31;
        cache.read(KvSide::Value, KvPlace { slot: cut, ..last }, &mut read);
        assert!(read.iter().all(|&x| x == 0.0));
        let last_block = spec.num_blocks as u32 - 1;
        cache.copy_blocks(&[(last_block, 3)]);
        cache.read(KvSide::Value, KvPlace { plane: 0, slot: 3 * 32 + 31, head: 7 }, &mut read);
        assert_eq!(read, values);
    }

    #[test]
    fn values_round_to_nearest_even_and_f16_saturates() {
        let mut values = [0.0f32; 16];
        values[..8].copy_from_slice(&[1.0, 1.000_488_3, 1.001_464_8, 1e9, -1e9, 65_519.9, 5.96e-8, f32::NEG_INFINITY]);
        let at = KvPlace { plane: 2, slot: 39, head: 1 };
        for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
            let cache = CacheEngine::new(&spec(dtype)).unwrap();
            cache.write(KvSide::Key, at, &values);
            let mut read = [0.0; 16];
            cache.read(KvSide::Key, at, &mut read);
            match dtype {
                KvDType::F32 => assert_eq!(read, values),
                // 1 + 2^-11 is a tie that goes down to 1; 1 + 3 * 2^-11 one that goes up to 1 + 2^-9.
                KvDType::F16 => {
                    assert_eq!(read[..8], [1.0, 1.0, 1.001_953_1, F16_MAX, -F16_MAX, F16_MAX, 5.960_464_5e-8, -F16_MAX]);
                }
                KvDType::BF16 => assert_eq!(read[..4], [1.0, 1.0, 1.0, 998_244_350.0]),
            }
        }
    }

    #[test]
    fn copied_blocks_are_equal_in_every_plane_and_others_are_untouched() {
        let cache = CacheEngine::new(&spec(KvDType::BF16)).unwrap();
        let place = |plane, block, offset| KvPlace { plane, slot: block * 8 + offset, head: 1 };
        for plane in 0..3 {
            for block in 0..5 {
                let value = (plane * 5 + block) as f32 + 1.0;
                cache.write(KvSide::Key, place(plane, block, 7), &[value; 16]);
                cache.write(KvSide::Value, place(plane, block, 0), &[-value; 16]);
            }
        }
        cache.copy_blocks(&[(1, 3), (3, 4), (2, 2)]);
        let mut read = [0.0; 16];
        for plane in 0..3 {
            for (block, source) in [(0, 0), (1, 1), (2, 2), (3, 1), (4, 1)] {
                let value = (plane * 5 + source) as f32 + 1.0;
                cache.read(KvSide::Key, place(plane, block, 7), &mut read);
                assert_eq!(read, [value; 16]);
                cache.read(KvSide::Value, place(plane, block, 0), &mut read);
                assert_eq!(read, [-value; 16]);
            }
        }
    }
}
