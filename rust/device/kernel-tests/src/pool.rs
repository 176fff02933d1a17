//! A KV pool of one plane, on the device and in the CPU's storage, which is the oracle of what it holds.

use device::{CacheEngine, KvCacheSpec, KvDType, KvPlace, KvSide};

use crate::{Buffer, random::Rng};

/// The type's part of kernels' names.
pub fn cache_name(dtype: KvDType) -> &'static str {
    match dtype {
        KvDType::F32 => "f32",
        KvDType::F16 => "f16",
        KvDType::BF16 => "bf16",
        KvDType::Int8 => "i8",
        KvDType::F8E4M3 => "f8",
    }
}

/// Bytes of a block in one plane.
///
/// # Panics
/// When they overflow.
pub fn block_bytes(spec: &KvCacheSpec) -> usize {
    spec.layers[0].shape.plane_block_bytes(KvSide::Key, spec.dtype, spec.block_size).expect("a small spec")
}

fn vector_bytes(spec: &KvCacheSpec) -> usize {
    spec.layers[0].shape.k_dim * spec.dtype.element_bytes()
}

/// Bytes from a block's start to its scales.
pub fn scales_offset(spec: &KvCacheSpec) -> usize {
    (spec.layers[0].shape.num_kv_heads * spec.block_size * vector_bytes(spec)).next_multiple_of(16)
}

/// A storage whose every byte is 0xff, which reads as NaN in all types that have one.
///
/// # Panics
/// When there is no memory for it.
pub fn poisoned(spec: &KvCacheSpec) -> CacheEngine {
    let cache = CacheEngine::new(spec).expect("a small storage");
    for block in 0..spec.num_blocks {
        cache.import_block(block as u32, &vec![0xff; cache.block_bytes()]);
    }
    cache
}

/// The keys of a block in one plane, `[num_kv_heads, block_size, head_dim]`, as the host has them, with units of a dimension side
/// by side; or those of the host, turned back.
fn transposed(spec: &KvCacheSpec, block: &[u8], to_host: bool) -> Vec<u8> {
    let (unit, vector) = (spec.layers[0].shape.key_unit_bytes(spec.dtype), vector_bytes(spec));
    let mut out = block.to_vec();
    for head in 0..spec.layers[0].shape.num_kv_heads {
        for (token, i) in (0..spec.block_size).flat_map(|token| (0..vector / unit).map(move |i| (token, i))) {
            let head = head * spec.block_size * vector;
            let (device, host) = (head + token * vector + i * unit, head + (i * spec.block_size + token) * unit);
            let (from, to) = if to_host { (device, host) } else { (host, device) };
            out[to..to + unit].copy_from_slice(&block[from..from + unit]);
        }
    }
    out
}

/// The K and the V plane as a device has them.
pub fn planes(cache: &CacheEngine) -> [Vec<u8>; 2] {
    let spec = cache.spec();
    let (mut planes, mut block) = ([vec![], vec![]], vec![0; cache.block_bytes()]);
    for id in 0..spec.num_blocks {
        cache.export_block(id as u32, &mut block);
        let (k, v) = block.split_at(block_bytes(spec));
        planes[0].extend(transposed(spec, k, false));
        planes[1].extend(v);
    }
    planes
}

/// A storage that holds what two planes of a device hold.
///
/// # Panics
/// When the planes are not those of the spec.
pub fn from_planes(spec: &KvCacheSpec, k: &Buffer, v: &Buffer) -> CacheEngine {
    let cache = CacheEngine::new(spec).expect("a small storage");
    let (k, v) = (k.values::<u8>(), v.values::<u8>());
    for (id, (k, v)) in k.chunks_exact(block_bytes(spec)).zip(v.chunks_exact(block_bytes(spec))).enumerate() {
        cache.import_block(id as u32, &[&transposed(spec, k, true), v].concat());
    }
    cache
}

/// One vector of the storage.
pub fn vector(cache: &CacheEngine, side: KvSide, slot: usize, head: usize) -> Vec<f32> {
    let mut values = vec![0.0; cache.spec().layers[0].shape.k_dim];
    cache.read(side, KvPlace { layer: 0, slot, head }, &mut values);
    values
}

/// Requests of these lengths over shuffled blocks: a storage with random keys and values, poisoned elsewhere, and the block
/// tables, one after the other, with their row stride.
///
/// # Panics
/// When there is no memory for it.
pub fn filled(spec: &KvCacheSpec, lens: &[usize], rng: &mut Rng) -> (CacheEngine, Vec<u32>, usize) {
    let blocks_of = |len: usize| len.div_ceil(spec.block_size);
    let max_blocks = lens.iter().map(|&len| blocks_of(len)).max().unwrap_or(0) + 1;
    let spec = KvCacheSpec { num_blocks: lens.iter().map(|&len| blocks_of(len)).sum::<usize>() + 1, ..spec.clone() };
    let cache = poisoned(&spec);
    let mut free = rng.permutation(spec.num_blocks - 1).into_iter();
    let mut tables = vec![u32::MAX; lens.len() * max_blocks];
    for (&len, table) in lens.iter().zip(tables.chunks_exact_mut(max_blocks)) {
        for entry in &mut table[..blocks_of(len)] {
            *entry = free.next().expect("enough blocks") as u32 + 1;
        }
        for token in 0..len {
            let slot = table[token / spec.block_size] as usize * spec.block_size + token % spec.block_size;
            for head in 0..spec.layers[0].shape.num_kv_heads {
                // Keys that are values too have no other side.
                for side in [KvSide::Key, KvSide::Value].into_iter().filter(|side| spec.layers[0].shape.dim(*side) > 0) {
                    cache.write(side, KvPlace { layer: 0, slot, head }, &rng.floats(spec.layers[0].shape.k_dim));
                }
            }
        }
    }
    (cache, tables, max_blocks)
}
