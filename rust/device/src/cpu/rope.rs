//! Norm of q and k, rotation, and the write of K and V into their slots.
#![allow(clippy::cast_ptr_alignment)] // Offsets in a plane are multiples of the element's size, those of scales of 2.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `rope_rows`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // ISA code must be inlined; counted loops over registers unroll.

use std::{mem::MaybeUninit, ops::Range};

use half::bf16;

use crate::{
    CacheEngine, KvCacheSpec, KvDType, KvLayer, KvSide, Norm, NormKind, QueryScale, RopeArgs, RopeStyle, RopeTable, StepMetadata,
    Tensor,
    attention::NormParts,
    cache_engine::CacheWriter,
    kv_codes::{quantize_e4m3, quantize_int8},
    kv_layout::{MAX_VECTOR_BYTES, PlaneLayout},
};

use super::{
    Isa, ThreadPool, reference,
    simd::{Simd, isa_entry},
};

/// Elements a thread takes at once; below twice as many a step is not worth waking other threads.
const GRAIN_ELEMENTS: usize = 16 << 10;

/// What all rows of a call share.
struct Rows<'a> {
    q: *mut f32,
    num_heads: usize,
    /// Elements of a head.
    dim: usize,
    q_norm: Option<NormParts<'a>>,
    k_norm: Option<NormParts<'a>>,
    v_norm: Option<NormParts<'a>>,
    rope: Option<&'a RopeTable>,
    norms_last: bool,
    q_scale: Option<QueryScale>,
    positions: &'a [u32],
    rope_positions: &'a [u32],
    /// `None`: another layer has written them.
    kv: Option<KvRows<'a>>,
}

/// Rows of keys and values, and where they go.
struct KvRows<'a> {
    k: *mut f32,
    /// `None`: the keys are the values too.
    v: Option<*mut f32>,
    num_heads: usize,
    spec: &'a KvCacheSpec,
    layout: PlaneLayout,
    slots: &'a [i64],
    keys: *mut u8,
    values: *mut u8,
}

// SAFETY: threads take disjoint rows, and the slots of a step are distinct.
unsafe impl Sync for Rows<'_> {}

/// [`crate::Phases::rope_and_cache`]; the machine must have `isa`.
pub(crate) fn rope_and_cache(args: RopeArgs<'_>, step: &StepMetadata, isa: Isa, pool: &ThreadPool) {
    let RopeArgs { q, kv, q_norm, k_norm, v_norm, norms_last, q_scale, rope, cache, layer } = args;
    let (layer, num_tokens) = (cache.layer(layer), q.rows());
    let (dim, num_kv_heads) = (layer.shape.k_dim, if kv.is_some() { layer.shape.num_kv_heads } else { 0 });
    assert_eq!(q.cols() % dim, 0, "columns of q in heads of {dim}");
    if let Some(rope) = rope {
        assert!(rope.rotary_dim <= dim && rope.rotary_dim % 2 == 0, "{} rotary of {dim} elements", rope.rotary_dim);
        assert!(step.rope_positions.len() >= num_tokens, "{} rope positions of {num_tokens} rows", step.rope_positions.len());
    }
    assert!(q_scale.is_none() || step.positions.len() >= num_tokens, "positions of {num_tokens} rows");
    let writer = kv.is_some().then(|| cache.writer());
    let num_heads = q.cols() / dim;
    let rows = Rows {
        q: q.as_mut_slice().as_mut_ptr(),
        num_heads,
        dim,
        q_norm: q_norm.map(|norm| norm.parts(num_heads, dim)),
        k_norm: k_norm.filter(|_| kv.is_some()).map(|norm| norm.parts(num_kv_heads, dim)),
        v_norm: v_norm.filter(|_| kv.is_some()).map(|norm| norm.parts(num_kv_heads, dim)),
        rope,
        norms_last,
        q_scale,
        positions: &step.positions,
        rope_positions: &step.rope_positions,
        kv: kv.zip(writer.as_ref()).map(|((k, v), writer)| kv_rows(k, v, (cache, layer), step, writer)),
    };
    if let Some(kv) = &rows.kv {
        assert_eq!(kv.slots.len(), num_tokens, "rows of q and k");
    }
    let grain = GRAIN_ELEMENTS.div_ceil((rows.num_heads + 2 * num_kv_heads) * dim);
    let each = |start: usize, end: usize| {
        // SAFETY: the machine has `isa`, the sizes were checked above and in `kv_rows`, ranges are disjoint.
        unsafe { rope_rows_isa(isa, &rows, start..end) };
    };
    if num_tokens <= grain {
        return each(0, num_tokens);
    }
    // Keys of a block share cache lines: a thread has many tokens that follow each other.
    pool.for_each_share(num_tokens, grain, &|_, start, end| each(start, end));
}

fn kv_rows<'a>(
    k: &mut Tensor,
    v: Option<&mut Tensor>,
    (cache, layer): (&'a CacheEngine, &KvLayer),
    step: &'a StepMetadata,
    writer: &CacheWriter<'_>,
) -> KvRows<'a> {
    let (shape, num_tokens) = (layer.shape, k.rows());
    assert_eq!(k.cols(), shape.num_kv_heads * shape.k_dim, "columns of k");
    assert_eq!(v.is_none(), shape.is_latent(), "values where the keys are not the values too");
    if let Some(v) = &v {
        assert_eq!(shape.v_dim, shape.k_dim, "elements of values and keys");
        assert_eq!([v.rows(), v.cols()], [num_tokens, k.cols()], "rows and columns of v");
    }
    let slots = &step.groups[layer.group].slot_mapping;
    assert!(slots.len() >= num_tokens, "{} slots of {num_tokens} rows", slots.len());
    let slots = &slots[..num_tokens];
    debug_assert!(distinct(slots), "slots of a step are distinct: {slots:?}");
    KvRows {
        k: k.as_mut_slice().as_mut_ptr(),
        v: v.map(|v| v.as_mut_slice().as_mut_ptr()),
        num_heads: shape.num_kv_heads,
        spec: cache.spec(),
        layout: cache.host_layout(layer, KvSide::Key),
        slots,
        keys: writer.base(KvSide::Key, layer),
        values: writer.base(KvSide::Value, layer),
    }
}

fn distinct(slots: &[i64]) -> bool {
    slots.iter().enumerate().all(|(i, slot)| *slot < 0 || !slots[..i].contains(slot))
}

isa_entry! { fn rope_rows_isa => rope_rows(rows: &Rows<'_>, range: Range<usize>) }

/// # Safety
/// The machine has `S`; `rows` has the sizes that `rope_and_cache` checks; no one else works on the rows of `range`.
#[inline(always)]
unsafe fn rope_rows<S: Simd>(rows: &Rows<'_>, range: Range<usize>) {
    let dim = rows.dim;
    let keys = rows.kv.as_ref().map(|kv| (kv.k, kv.num_heads, rows.k_norm));
    for token in range {
        let angles = rows.rope.map(|rope| {
            let half = rope.rotary_dim / 2;
            let first = rows.rope_positions[token] as usize * half;
            (&rope.cos[first..first + half], &rope.sin[first..first + half], rope.style)
        });
        for (x, heads, norm) in std::iter::once((rows.q, rows.num_heads, rows.q_norm)).chain(keys) {
            let x = x.add(token * heads * dim);
            if !rows.norms_last {
                norm_heads::<S>(norm, x, heads * dim);
            }
            if let Some((cos, sin, style)) = angles {
                for head in 0..heads {
                    rotate::<S>(cos, sin, style, x.add(head * dim));
                }
            }
            if rows.norms_last {
                norm_heads::<S>(norm, x, heads * dim);
            }
        }
        if let Some(scale) = rows.q_scale {
            let factor = scale.factor(rows.positions[token]);
            for x in std::slice::from_raw_parts_mut(rows.q.add(token * rows.num_heads * dim), rows.num_heads * dim) {
                *x *= factor;
            }
        }
        if let Some(kv) = &rows.kv {
            if let Some(v) = kv.v {
                norm_heads::<S>(rows.v_norm, v.add(token * kv.num_heads * dim), kv.num_heads * dim);
            }
            write_rows::<S>(kv, token, dim);
        }
    }
}

/// Writes the keys and values of a token, `dim` elements a head, if it has a slot.
#[inline(always)]
unsafe fn write_rows<S: Simd>(kv: &KvRows<'_>, token: usize, dim: usize) {
    let spec = kv.spec;
    let Ok(slot) = usize::try_from(kv.slots[token]) else { return };
    let (block, offset) = (slot / spec.block_size, slot % spec.block_size);
    assert!(block < spec.num_blocks, "slot {slot} of {} blocks of {}", spec.num_blocks, spec.block_size);
    for head in 0..kv.num_heads {
        let source = (token * kv.num_heads + head) * dim;
        let head_of = |x: *const f32| std::slice::from_raw_parts(x.add(source), dim);
        let k = head_of(kv.k.cast_const());
        // Out of the block, and not followed, for types without scales.
        let scale = kv.layout.scale(block, head, offset);
        // Units of a key are far from each other, so the key is converted before they go there.
        let mut key = MaybeUninit::<[u32; MAX_VECTOR_BYTES / 4]>::uninit();
        store_head::<S>(spec.dtype, k, key.as_mut_ptr().cast(), kv.keys.wrapping_add(scale));
        scatter(key.as_ptr().cast(), &kv.layout, kv.keys.add(kv.layout.key(block, head, offset)));
        let Some(v) = kv.v else { continue };
        store_head::<S>(
            spec.dtype,
            head_of(v.cast_const()),
            kv.values.add(kv.layout.value(block, head, offset)),
            kv.values.wrapping_add(scale),
        );
    }
}

/// Puts the units of a key, one after the other at `key`, where they belong, from `out` on.
#[inline(always)]
unsafe fn scatter(key: *const u8, layout: &PlaneLayout, out: *mut u8) {
    let (units, stride) = (layout.vector_bytes / layout.key_unit_bytes, layout.key_stride());
    match layout.key_unit_bytes {
        1 => scatter_units::<u8>(key, units, out, stride),
        2 => scatter_units::<u16>(key, units, out, stride),
        _ => scatter_units::<u32>(key, units, out, stride),
    }
}

#[inline(always)]
unsafe fn scatter_units<T>(key: *const u8, units: usize, out: *mut u8, stride: usize) {
    for i in 0..units {
        out.add(i * stride).cast::<T>().write(key.cast::<T>().add(i).read());
    }
}

/// Normalises the heads at `x`, `row` values in all, if there is a norm.
#[inline(always)]
unsafe fn norm_heads<S: Simd>(norm: Option<NormParts<'_>>, x: *mut f32, row: usize) {
    let Some(NormParts { norm, len, stride }) = norm else { return };
    for part in 0..row / len {
        norm_part::<S>(norm, part * stride, std::slice::from_raw_parts_mut(x.add(part * len), len));
    }
}

/// Normalises `x` by the values of weight and bias from `first` on.
#[inline(always)]
unsafe fn norm_part<S: Simd>(norm: &Norm, first: usize, x: &mut [f32]) {
    if !x.len().is_multiple_of(S::LANES) {
        reference::norm_part(norm, first, x);
        return;
    }
    let count = x.len() as f32;
    let mut mean = S::splat(0.0);
    if norm.kind == NormKind::Layer {
        for i in (0..x.len()).step_by(S::LANES) {
            mean = S::add(mean, S::load(x.as_ptr().add(i)));
        }
        mean = S::splat(S::reduce_add(mean) / count);
    }
    let mut squares = S::splat(0.0);
    for i in (0..x.len()).step_by(S::LANES) {
        let v = S::sub(S::load(x.as_ptr().add(i)), mean);
        squares = S::fma(v, v, squares);
    }
    let scale = (S::reduce_add(squares) / count + norm.eps).sqrt().recip();
    for i in (0..x.len()).step_by(S::LANES) {
        let v = S::mul(S::sub(S::load(x.as_ptr().add(i)), mean), S::splat(scale));
        let mut v = S::mul(v, S::load(norm.weight.as_ptr().add(first + i)));
        if let Some(bias) = &norm.bias {
            v = S::add(v, S::load(bias.as_ptr().add(first + i)));
        }
        S::store(x.as_mut_ptr().add(i), v);
    }
}

/// Rotates the head at `x`; `cos` and `sin` have half as many elements as rotate.
#[inline(always)]
unsafe fn rotate<S: Simd>(cos: &[f32], sin: &[f32], style: RopeStyle, x: *mut f32) {
    let half = cos.len();
    let whole = if style == RopeStyle::Neox { half / S::LANES * S::LANES } else { 0 };
    for i in (0..whole).step_by(S::LANES) {
        let (c, s) = (S::load(cos.as_ptr().add(i)), S::load(sin.as_ptr().add(i)));
        let (a, b) = (S::load(x.add(i)), S::load(x.add(half + i)));
        S::store(x.add(i), S::sub(S::mul(a, c), S::mul(b, s)));
        S::store(x.add(half + i), S::add(S::mul(b, c), S::mul(a, s)));
    }
    for i in whole..half {
        let (first, second) = match style {
            RopeStyle::Neox => (x.add(i), x.add(half + i)),
            RopeStyle::Interleaved => (x.add(2 * i), x.add(2 * i + 1)),
        };
        let (a, b) = (*first, *second);
        first.write(a * cos[i] - b * sin[i]);
        second.write(b * cos[i] + a * sin[i]);
    }
}

/// Converts a head's `values` to `dtype` at `out`; their scale, if the type has one, goes to `scale`.
#[inline(always)]
unsafe fn store_head<S: Simd>(dtype: KvDType, values: &[f32], out: *mut u8, scale: *mut u8) {
    let (source, dim) = (values.as_ptr(), values.len());
    match dtype {
        KvDType::F32 => std::ptr::copy_nonoverlapping(source, out.cast(), dim),
        KvDType::F16 => store_halves::<S, false>(source, out.cast(), dim),
        KvDType::BF16 => store_halves::<S, true>(source, out.cast(), dim),
        KvDType::F8E4M3 => store_codes(values, out, scale, quantize_e4m3),
        KvDType::Int8 => store_codes(values, out, scale, quantize_int8),
    }
}

/// Writes the codes of `values`, and their scale.
#[inline(always)]
unsafe fn store_codes(values: &[f32], codes: *mut u8, scale: *mut u8, quantize: impl FnOnce(&[f32], &mut [u8]) -> bf16) {
    // A reference is made only to what has been written.
    std::ptr::write_bytes(codes, 0, values.len());
    scale.cast::<bf16>().write(quantize(values, std::slice::from_raw_parts_mut(codes, values.len())));
}

#[inline(always)]
unsafe fn store_halves<S: Simd, const BF16: bool>(source: *const f32, out: *mut u16, dim: usize) {
    let whole = dim / S::LANES * S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        store_half::<S, BF16>(out.add(i), S::load(source.add(i)));
    }
    if whole < dim {
        let (mut values, mut halves) = ([0.0f32; 16], [0u16; 16]);
        std::ptr::copy_nonoverlapping(source.add(whole), values.as_mut_ptr(), dim - whole);
        store_half::<S, BF16>(halves.as_mut_ptr(), S::load(values.as_ptr()));
        std::ptr::copy_nonoverlapping(halves.as_ptr(), out.add(whole), dim - whole);
    }
}

// Not a closure, which would not have the features of its function.
#[inline(always)]
unsafe fn store_half<S: Simd, const BF16: bool>(out: *mut u16, v: S::V) {
    if BF16 { S::store_bf16(out, v) } else { S::store_f16(out, v) }
}
