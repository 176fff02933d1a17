//! The two crates that know how large a block is agree: what the pool is sized by is what the storage takes.

use device::KvCacheSpec;
use paged::KvShape;

#[test]
fn sizing_and_storage_count_the_same_bytes_for_every_type_and_shape() {
    let types = [
        (paged::KvDType::F32, device::KvDType::F32),
        (paged::KvDType::F16, device::KvDType::F16),
        (paged::KvDType::BF16, device::KvDType::BF16),
        (paged::KvDType::F8E4M3, device::KvDType::F8E4M3),
        (paged::KvDType::Int8, device::KvDType::Int8),
    ];
    for (cache_type, dtype) in types {
        for block_size in [8, 16, 32] {
            for num_kv_heads in [1, 2, 3, 8] {
                for head_dim in [1, 16, 27, 64, 80, 81, 128, 256] {
                    let shape = KvShape { num_kv_heads, k_head_dim: head_dim, v_head_dim: head_dim };
                    let spec =
                        KvCacheSpec::uniform((7, block_size), dtype, device::KvShape::new(num_kv_heads, head_dim), 1).unwrap();
                    assert_eq!(shape.block_bytes(cache_type, block_size), spec.bytes_per_block(), "{spec:?}");
                    let shape = KvShape { v_head_dim: head_dim / 2 + 1, ..shape };
                    let stored = device::KvShape { num_kv_heads, k_dim: head_dim, v_dim: head_dim / 2 + 1 };
                    let bytes = stored.block_bytes(dtype, block_size).unwrap() as u64;
                    assert_eq!(shape.block_bytes(cache_type, block_size), Some(bytes), "{stored:?}");
                }
            }
        }
    }
}
