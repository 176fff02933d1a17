//! Which layers of the KV storage attention has kernels for.

use crate::{DeviceError, KvDType, KvShape};

use super::{
    attention_plan,
    kernels::{HEAD_DIMS, LATENT_DIMS, MAX_HEAD_DIM, MAX_LATENT_WIDTH, kv_suffix},
};

/// See [`crate::Device::check_kv_layer`].
pub fn check(dtype: KvDType, shape: KvShape, queries_per_kv: usize) -> Result<(), DeviceError> {
    let head_dim = shape.head_dim()?;
    if shape.is_latent() {
        return check_latent(dtype, head_dim);
    }
    check_heads(dtype, head_dim)?;
    let most = attention_plan::max_queries_per_kv(dtype, head_dim);
    if queries_per_kv <= most {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!(
        "{queries_per_kv} query heads of {head_dim} elements share a KV head, and GPU kernels for a {} KV cache take {most} at \
         most; pa_cache_type=PagedCacheType.F32 takes any number",
        kv_suffix(dtype)
    )))
}

/// Whether latent attention has kernels for vectors of so many elements.
fn check_latent(dtype: KvDType, width: usize) -> Result<(), DeviceError> {
    let made_for: usize = LATENT_DIMS.iter().sum();
    let is_there = match dtype {
        // Products read what a head has of a query 8 elements at a time.
        KvDType::F32 => width <= MAX_LATENT_WIDTH && width.is_multiple_of(8),
        KvDType::F16 | KvDType::BF16 => width == made_for,
        KvDType::F8E4M3 | KvDType::Int8 => false,
    };
    if is_there {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!(
        "latent attention with vectors of {width} elements has no GPU kernel for a {} KV cache; pa_cache_type=PagedCacheType.F16 \
         and BF16 take {made_for}, F32 any multiple of 8 up to {MAX_LATENT_WIDTH}, and device=\"cpu\" computes all",
        kv_suffix(dtype)
    )))
}

/// Whether attention has kernels for heads of so many elements.
fn check_heads(dtype: KvDType, head_dim: usize) -> Result<(), DeviceError> {
    if !head_dim.is_multiple_of(4) || head_dim > MAX_HEAD_DIM {
        return Err(DeviceError::Unsupported(format!(
            "heads of {head_dim} elements have no GPU kernel; sizes that have are multiples of 4 up to {MAX_HEAD_DIM}: use \
             device=\"cpu\""
        )));
    }
    if dtype == KvDType::F32 || HEAD_DIMS.contains(&head_dim) {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!(
        "heads of {head_dim} elements have no GPU kernel for a {} KV cache; sizes that have: {HEAD_DIMS:?}; \
         pa_cache_type=PagedCacheType.F32 takes all multiples of 4 up to {MAX_HEAD_DIM}",
        kv_suffix(dtype)
    )))
}
