//! The KV storage: a K and a V plane for each layer of a KV group ([`crate::kv_layout`] has the format of a block in a plane).
//!
//! Of the host's memory a block takes one range, the planes of its group one after the other:
//!
//! ```text
//! block 0, of a group with layers 0, 1, ...     block 1, of one with fewer and wider layers
//! | K 0 | V 0 | K 1 | V 1 | ...                 | K 7   | V 7   | ...
//! ```
//!
//! So huge pages, without which reading long contexts is bound by address translation, fill up before the next one is touched,
//! and a block is copied or moved as one.

mod transfer;

use std::{
    any::Any,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use half::{bf16, f16};

use crate::{
    DeviceError, KvCacheSpec, KvDType, KvLayer, KvShape, KvSide,
    host::host_memory,
    kv_codes::{E4M3_VALUES, quantize_e4m3, quantize_int8},
    kv_layout::{MAX_VECTOR_BYTES, PlaneLayout},
    mmap::Pages,
};

/// The largest finite f16: what is written for values beyond it.
pub(crate) const F16_MAX: f32 = 65504.0;

/// Where the vector of one head lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlace {
    /// An entry of [`KvCacheSpec::layers`].
    pub layer: usize,
    /// `block_id * block_size + offset`.
    pub slot: usize,
    /// Key and value head.
    pub head: usize,
}

/// Where a head's vector lies: in a block, bytes of it.
struct Place {
    block: usize,
    /// Its first unit: what stays together.
    first: usize,
    unit: usize,
    /// From a unit to the next one.
    stride: usize,
    /// Its scale; out of the block for types without.
    scale: usize,
}

/// The blocks' memory. It is written through shared references, by raw pointer.
struct Blocks {
    base: *mut u8,
    // Owns what `base` points to; never borrowed again.
    _pages: Pages<u8>,
}

// SAFETY: it is memory without thread affinity.
unsafe impl Send for Blocks {}
// SAFETY: every access goes through `CacheReader` (shared lock, reads only) or `CacheWriter` (exclusive lock), whose raw pointers
// the kernels of this crate follow to disjoint places.
unsafe impl Sync for Blocks {}

enum Storage {
    Host(Blocks),
    Device(Box<dyn DeviceBlocks>),
}

/// Blocks in memory that is not the host's. Bytes of a block are counted as [`KvLayer::offset`] does.
pub trait DeviceBlocks: Any + Send + Sync {
    /// Copies bytes of a block in, from its byte `offset` on; they are of one plane.
    fn upload(&self, block: usize, offset: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// The way back.
    fn download(&self, block: usize, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies whole blocks `(source, destination)`, as if one after the other.
    fn copy_blocks(&self, pairs: &[(u32, u32)]) -> Result<(), DeviceError>;

    /// Copies whole blocks out.
    fn export_blocks(&self, blocks: &[u32]) -> Result<Vec<Vec<u8>>, DeviceError>;

    /// Copies a whole block in.
    fn import_block(&self, block: u32, bytes: &[u8]) -> Result<(), DeviceError>;
}

/// The storage itself: address space at first, committed as blocks are first written.
///
/// It is shared by reference; a lock, taken once a phase and never contended when one thread drives the steps, keeps a reader
/// from running beside a writer.
pub struct CacheEngine {
    spec: KvCacheSpec,
    block_bytes: usize,
    storage: Storage,
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
    /// Errors: [`DeviceError::Shape`] when a dimension is 0, a head's vector is longer than 8 KiB or the size overflows,
    /// [`DeviceError::OutOfMemory`] when the machine has less memory than the storage would take once it is full.
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
        let is_possible = |layer: &KvLayer| {
            let KvShape { num_kv_heads, k_dim, v_dim } = layer.shape;
            layer.shape == KvShape::NONE
                || num_kv_heads > 0 && k_dim > 0 && k_dim.max(v_dim) <= MAX_VECTOR_BYTES / spec.dtype.element_bytes()
        };
        let possible = |bytes: &u64| {
            let dims = [spec.num_blocks, spec.block_size, spec.layers.len()];
            i64::try_from(*bytes).is_ok() && dims.iter().all(|&d| d > 0) && spec.layers.iter().all(is_possible)
        };
        spec.total_bytes().filter(possible).ok_or_else(|| {
            DeviceError::Shape(format!(
                "a KV cache cannot have the shape {spec:?}; use positive sizes below 2^63 bytes, and of a head's vector {MAX_VECTOR_BYTES} at most"
            ))
        })
    }

    fn reserve(spec: &KvCacheSpec) -> Result<Self, DeviceError> {
        let bytes = Self::checked_bytes(spec)?;
        let bytes = usize::try_from(bytes)
            .map_err(|_| DeviceError::Shape(format!("a KV cache of {bytes} bytes is more than this machine can address")))?;
        let mut pages = Pages::zeroed(bytes)?;
        pages.advise_huge();
        let storage = Storage::Host(Blocks { base: pages.as_mut_slice().as_mut_ptr(), _pages: pages });
        Ok(Self::with(spec, storage))
    }

    /// A storage in a device's own memory; `blocks` makes them, each of so many bytes.
    ///
    /// Errors: those of [`Self::new`] but for memory, and those of `blocks`.
    pub fn on_device<B: DeviceBlocks>(
        spec: &KvCacheSpec,
        blocks: impl FnOnce(usize) -> Result<B, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let block_bytes = Self::checked_bytes(spec)? / spec.num_blocks as u64;
        Ok(Self::with(spec, Storage::Device(Box::new(blocks(block_bytes as usize)?))))
    }

    fn with(spec: &KvCacheSpec, storage: Storage) -> Self {
        // It was counted before memory was taken.
        let block_bytes = spec.bytes_per_block().map_or(0, |bytes| bytes as usize);
        Self { spec: spec.clone(), block_bytes, storage, access: RwLock::new(()) }
    }

    /// The blocks in a device's own memory, if they are there.
    fn blocks(&self) -> Option<&dyn DeviceBlocks> {
        match &self.storage {
            Storage::Host(_) => None,
            Storage::Device(blocks) => Some(&**blocks),
        }
    }

    /// What [`Self::on_device`] was given; `None` for a storage of the host, and for blocks that are no `B`.
    pub fn device<B: DeviceBlocks>(&self) -> Option<&B> {
        let blocks: &dyn Any = self.blocks()?;
        blocks.downcast_ref()
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

    /// A layer's place and shape.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, layer: usize) -> &KvLayer {
        self.spec.layers.get(layer).unwrap_or_else(|| panic!("layer {layer} of {} with KV", self.spec.layers.len()))
    }

    /// Where things lie in a plane of the host's memory.
    pub(crate) fn host_layout(&self, layer: &KvLayer, side: KvSide) -> PlaneLayout {
        self.spec.host_layout(&layer.shape, side, self.block_bytes)
    }

    /// Writes one head's vector, `[head_dim]`, rounded to nearest even; f16 saturates at ±65504, the one-byte types do as
    /// [`crate::kv_codes`] says.
    ///
    /// # Panics
    /// When `at` is out of range or `values` is not `head_dim` long.
    pub fn write(&self, side: KvSide, at: KvPlace, values: &[f32]) {
        assert_eq!(values.len(), self.layer(at.layer).shape.dim(side), "values of one head");
        let Place { block, first, unit, stride, scale } = self.place(side, at);
        let writer = self.writer();
        let (elements, scale_bytes) = encode(self.spec.dtype, values);
        let scale_bytes = &scale_bytes.to_ne_bytes()[..self.spec.dtype.scale_bytes()];
        if let Some(blocks) = self.blocks() {
            on_device(blocks.upload(block, first, &elements));
            return on_device(blocks.upload(block, scale, scale_bytes));
        }
        let base = writer.block(block);
        let put = |place: usize, bytes: &[u8]| {
            // SAFETY: `place` checked that the plane holds the vector and its scale, if it has one; `writer` is alive.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.wrapping_add(place), bytes.len()) };
        };
        elements.chunks_exact(unit).enumerate().for_each(|(i, bytes)| put(first + i * stride, bytes));
        put(scale, scale_bytes);
    }

    /// Reads one head's vector, `[head_dim]`.
    ///
    /// # Panics
    /// When `at` is out of range or `values` is not `head_dim` long.
    pub fn read(&self, side: KvSide, at: KvPlace, values: &mut [f32]) {
        assert_eq!(values.len(), self.layer(at.layer).shape.dim(side), "values of one head");
        let Place { block, first, unit, stride, scale } = self.place(side, at);
        let reader = self.reader();
        let (mut elements, mut scale_bytes) = (vec![0; values.len() * self.spec.dtype.element_bytes()], [0; 2]);
        let stored_scale = &mut scale_bytes[..self.spec.dtype.scale_bytes()];
        if let Some(blocks) = self.blocks() {
            on_device(blocks.download(block, first, &mut elements));
            on_device(blocks.download(block, scale, stored_scale));
        } else {
            let base = reader.block(block);
            let take = |place: usize, bytes: &mut [u8]| {
                // SAFETY: as in `write`, with `reader` alive.
                unsafe { std::ptr::copy_nonoverlapping(base.wrapping_add(place), bytes.as_mut_ptr(), bytes.len()) };
            };
            elements.chunks_exact_mut(unit).enumerate().for_each(|(i, bytes)| take(first + i * stride, bytes));
            take(scale, stored_scale);
        }
        decode(self.spec.dtype, &elements, bf16::from_ne_bytes(scale_bytes), values);
    }

    /// Copies whole blocks `(source, destination)` in every plane, in order.
    ///
    /// # Panics
    /// When a block id is out of range.
    pub fn copy_blocks(&self, pairs: &[(u32, u32)]) {
        let (last, block_bytes) = (self.spec.num_blocks - 1, self.block_bytes());
        for &(source, destination) in pairs {
            assert!(
                source.max(destination) as usize <= last,
                "copy of block {source} to {destination}, the last block is {last}"
            );
        }
        let _writer = self.writer();
        if let Some(blocks) = self.blocks() {
            return on_device(blocks.copy_blocks(pairs));
        }
        for &(source, destination) in pairs {
            // SAFETY: both ids are below num_blocks, so both ranges are within the storage; `copy` allows them to be the same;
            // the writer's lock is held.
            unsafe { std::ptr::copy(self.block(source), self.block(destination), block_bytes) };
        }
    }

    /// Bytes of a block over all planes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The first byte of the host's memory.
    fn host(&self) -> *mut u8 {
        match &self.storage {
            Storage::Host(blocks) => blocks.base,
            Storage::Device(_) => panic!("the KV storage of another device was given to the CPU"),
        }
    }

    /// The first byte of a block in the host's memory; its id is below `num_blocks`.
    fn block(&self, block: u32) -> *mut u8 {
        self.host().wrapping_add(block as usize * self.block_bytes)
    }

    fn place(&self, side: KvSide, at: KvPlace) -> Place {
        let (spec, layer) = (&self.spec, self.layer(at.layer));
        let (block, offset) = (at.slot / spec.block_size, at.slot % spec.block_size);
        assert!(block < spec.num_blocks, "slot {} of {} blocks of {}", at.slot, spec.num_blocks, spec.block_size);
        let num_heads = layer.shape.num_kv_heads;
        assert!(at.head < num_heads, "head {} of {num_heads}", at.head);
        let on_host = self.blocks().is_none();
        let layout = if on_host { self.host_layout(layer, side) } else { spec.layout(&layer.shape, side, 0) };
        let (first, unit, stride) = match side {
            KvSide::Key => (layout.key(0, at.head, offset), layout.key_unit_bytes, layout.key_stride()),
            KvSide::Value => (layout.value(0, at.head, offset), layout.vector_bytes, layout.vector_bytes),
        };
        let plane = spec.plane_offset(layer, side);
        Place { block, first: plane + first, unit, stride, scale: plane + layout.scale(0, at.head, offset) }
    }

    fn base(&self, side: KvSide, layer: &KvLayer) -> *mut u8 {
        self.host().wrapping_add(self.spec.plane_offset(layer, side))
    }
}

/// The elements of a head's vector, and its scale for the one-byte types.
fn encode(dtype: KvDType, values: &[f32]) -> (Vec<u8>, bf16) {
    let coded = |quantize: fn(&[f32], &mut [u8]) -> bf16| {
        let mut codes = vec![0; values.len()];
        let scale = quantize(values, &mut codes);
        (codes, scale)
    };
    let half = |x: &f32| f16::from_f32(x.clamp(-F16_MAX, F16_MAX));
    match dtype {
        KvDType::F32 => (values.iter().flat_map(|x| x.to_ne_bytes()).collect(), bf16::ONE),
        KvDType::F16 => (values.iter().flat_map(|x| half(x).to_ne_bytes()).collect(), bf16::ONE),
        KvDType::BF16 => (values.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(), bf16::ONE),
        KvDType::F8E4M3 => coded(quantize_e4m3),
        KvDType::Int8 => coded(quantize_int8),
    }
}

/// Reads the elements of a head's vector; `scale` counts for the one-byte types only.
fn decode(dtype: KvDType, elements: &[u8], scale: bf16, values: &mut [f32]) {
    let scale = scale.to_f32();
    for (value, bytes) in values.iter_mut().zip(elements.chunks_exact(dtype.element_bytes())) {
        *value = match (dtype, bytes) {
            (KvDType::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
            (KvDType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
            (KvDType::BF16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
            (KvDType::F8E4M3, &[code]) => E4M3_VALUES[usize::from(code)] * scale,
            (KvDType::Int8, &[code]) => f32::from(code as i8) * scale,
            _ => unreachable!("{} bytes of {dtype:?}", bytes.len()),
        };
    }
}

/// A step cannot return what the driver refuses.
fn on_device<T>(result: Result<T, DeviceError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

impl CacheReader<'_> {
    /// The first byte of a plane. It may be read, not written, while this reader lives.
    pub(crate) fn base(&self, side: KvSide, layer: &KvLayer) -> *const u8 {
        self.cache.base(side, layer)
    }

    fn block(&self, block: usize) -> *const u8 {
        self.cache.block(block as u32)
    }
}

impl CacheWriter<'_> {
    /// The first byte of a plane. It may be read and written while this writer lives.
    pub(crate) fn base(&self, side: KvSide, layer: &KvLayer) -> *mut u8 {
        self.cache.base(side, layer)
    }

    fn block(&self, block: usize) -> *mut u8 {
        self.cache.block(block as u32)
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // Conversions are exact.
mod tests {
    use super::*;

    fn spec(dtype: KvDType) -> KvCacheSpec {
        KvCacheSpec::uniform((5, 8), dtype, KvShape::new(2, 16), 3).unwrap()
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
        let cache = |num_blocks, head_dim| {
            let shape = KvShape::new(2, head_dim);
            CacheEngine::new(&KvCacheSpec::uniform((num_blocks, 8), KvDType::F16, shape, 3)?)
        };
        for (num_blocks, head_dim) in [(0, 16), (5, 0), (usize::MAX, 16), (1 << 40, 1 << 20), (5, 4097), (5, usize::MAX / 8)] {
            assert!(
                matches!(cache(num_blocks, head_dim), Err(DeviceError::Shape(_))),
                "{num_blocks} blocks, {head_dim} elements"
            );
        }
        assert!(cache(5, 4096).is_ok());
        assert!(matches!(CacheEngine::new(&KvCacheSpec { layers: vec![], ..spec(KvDType::F16) }), Err(DeviceError::Shape(_))));
    }

    #[test]
    fn the_last_block_of_a_plane_of_more_than_2_pow_31_elements_is_its_own() {
        let spec = KvCacheSpec::uniform(((1 << 31) / (32 * 8 * 128) + 2, 32), KvDType::F16, KvShape::new(8, 128), 1).unwrap();
        // Address space only: `reserve` does not compare with the machine's memory.
        let cache = CacheEngine::reserve(&spec).unwrap();
        let last = KvPlace { layer: 0, slot: spec.num_blocks * 32 - 1, head: 7 };
        let values: Vec<f32> = (0..128).map(|i| i as f32 - 60.0).collect();
        let mut read = vec![0.0; 128];
        for side in [KvSide::Key, KvSide::Value] {
            let Place { block, first, .. } = cache.place(side, last);
            let place = block * cache.block_bytes() + first;
            assert!(place > 1 << 32);
            cache.write(side, last, &values);
            cache.read(side, last, &mut read);
            assert_eq!(read, values);
            // Where a 32-bit signed byte offset, and an element index cut at 2^31, would have landed.
            let cut = place / 2 % (1 << 31) / (2 * 32 * 8 * 128) * 32 + 31;
            cache.read(side, KvPlace { slot: cut, ..last }, &mut read);
            assert!(read.iter().all(|&x| x == 0.0));
        }
        let last_block = spec.num_blocks as u32 - 1;
        cache.copy_blocks(&[(last_block, 3)]);
        for side in [KvSide::Key, KvSide::Value] {
            cache.read(side, KvPlace { layer: 0, slot: 3 * 32 + 31, head: 7 }, &mut read);
            assert_eq!(read, values);
        }
    }

    #[test]
    fn values_round_to_nearest_even_and_f16_saturates() {
        let mut values = [0.0f32; 16];
        values[..8].copy_from_slice(&[1.0, 1.000_488_3, 1.001_464_8, 1e9, -1e9, 65_519.9, 5.96e-8, f32::NEG_INFINITY]);
        let at = KvPlace { layer: 2, slot: 39, head: 1 };
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
                _ => assert_eq!(read[..4], [1.0, 1.0, 1.0, 998_244_350.0]),
            }
        }
    }

    #[test]
    fn one_byte_vectors_keep_a_scale_each_within_their_block() {
        // An odd head size: elements and scales are both padded.
        for dtype in [KvDType::Int8, KvDType::F8E4M3] {
            let spec = KvCacheSpec::uniform((5, 5), dtype, KvShape::new(2, 27), 3).unwrap();
            assert_eq!(spec.layers[0].shape.plane_block_bytes(KvSide::Key, dtype, 5), Some(272 + 32));
            assert_eq!(spec.bytes_per_block(), Some(6 * 304));
            let cache = CacheEngine::new(&spec).unwrap();
            let vector = |slot: usize, head: usize| -> Vec<f32> {
                (0..27).map(|i| ((slot * 2 + head) * 27 + i) as f32 * 0.7 - 40.0).collect()
            };
            let places = || (0..25).flat_map(|slot| [0, 1].map(|head| KvPlace { layer: 1, slot, head }));
            for at in places() {
                cache.write(KvSide::Key, at, &vector(at.slot, at.head));
            }
            cache.copy_blocks(&[(3, 0)]);
            for at in places() {
                let source = if at.slot < 5 { at.slot + 15 } else { at.slot };
                let (values, mut read) = (vector(source, at.head), vec![0.0; 27]);
                cache.read(KvSide::Key, at, &mut read);
                let largest = values.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                for (value, read) in values.iter().zip(read) {
                    let bound =
                        if dtype == KvDType::Int8 { largest / 252.0 } else { largest / 448.0 / 512.0 + value.abs() / 16.0 };
                    assert!((value - read).abs() <= bound, "{dtype:?} {at:?}: {value} was read as {read}");
                }
            }
            let mut read = [1.0; 27];
            cache.write(KvSide::Key, KvPlace { layer: 1, slot: 7, head: 0 }, &[f32::NAN; 27]);
            cache.read(KvSide::Key, KvPlace { layer: 1, slot: 7, head: 0 }, &mut read);
            assert!(read.iter().all(|x| x.is_nan()), "{read:?}");
        }
    }

    #[test]
    fn copied_blocks_are_equal_in_every_plane_and_others_are_untouched() {
        let cache = CacheEngine::new(&spec(KvDType::BF16)).unwrap();
        let place = |layer, block, offset| KvPlace { layer, slot: block * 8 + offset, head: 1 };
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
