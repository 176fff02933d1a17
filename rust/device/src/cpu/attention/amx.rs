//! Many query rows by the tile registers of AMX.
//!
//! ```text
//! Q  [16 rows][32 dimensions]   packed once an item                 K  [16 pairs of dimensions][16 keys][2]
//!        Q x K -> scores of 32 rows and 32 keys -> softmax, row by row -> weights of 16 bits, [16 rows][32 keys]
//!        weights x V -> [32 rows][32 dimensions], added to the sums    V  [16 pairs of keys][16 dimensions][2]
//! ```
//!
//! Items, splits, tiles of keys and the softmax are those of the other kernels, so a row has the same bits in any chunk and
//! batch, as long as it is computed by tiles: from [`MIN_ROWS`] rows of an item on, and with [`Precision::Fast`] alone. A cache
//! of BF16 goes by bf16, as do queries and weights. Those of F16 and of one byte go by f16, in which keys, without their scales,
//! are exact; queries, scaled by a power of two a row, weights, and values of one byte times their scales are rounded to 11 bits.
//!
//! Cost of a tile of keys and 32 rows: `head_dim / 16` steps of four products, 32 softmaxes of 32 keys; and once for all rows of
//! the item `64 * head_dim` elements are laid out.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always)] // ISA code must be inlined.
#![allow(clippy::cast_ptr_alignment)] // Buffers are cut at cache lines.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;
use std::{marker::PhantomData, ops::Range};

use crate::{
    AttentionParams, KvDType, Precision,
    cpu::{
        Amx, Isa,
        amx::{ActTile, K_TILE, PANEL, TILE_ROWS, Tiles, WeightTile},
        simd::{Avx512, Simd, power_to_f16},
    },
};

use super::{
    Problem, TILE_KEYS,
    cached::{AsFloats, Cached},
    element::{Element, F8E4M3, F16, Int8},
    kernel::{Method, attend, visible},
    plan::{Item, padded_dim},
    product::{Pairs, Product},
    row_offset,
    score::{Scales, Softmax, online_softmax_update},
    scratch::Scratch,
    tile::Tiles as KeyTiles,
};

/// From this number of query rows of an item on, tiles compute it.
const MIN_ROWS: usize = 16;

const _: () = assert!(TILE_KEYS == K_TILE && TILE_KEYS == PANEL);

/// How a call computes by tiles, and on what.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByTiles(Amx);

impl ByTiles {
    /// `None` where another precision or ISA is asked for, or the elements of a cache of `dtype` are not exact in tiles of the
    /// processor.
    pub(super) fn of(isa: Isa, params: &AttentionParams, dtype: KvDType) -> Option<Self> {
        if isa != Isa::Amx || params.precision != Precision::Fast {
            return None;
        }
        let amx = Amx::detect()?;
        match dtype {
            KvDType::BF16 if params.head_dim.is_multiple_of(16) => Some(Self(amx)),
            KvDType::F16 | KvDType::F8E4M3 | KvDType::Int8 if amx.has_fp16() => Some(Self(amx)),
            _ => None,
        }
    }
}

/// Whether an item has rows enough for tiles; `queries_per_kv` heads share a KV head.
pub(super) fn is_for_tiles(item: &Item, queries_per_kv: usize) -> bool {
    item.rows(queries_per_kv) >= MIN_ROWS && item.kv_heads.len() == 1
}

/// AsFloats that an item of `rows` query rows takes beside [`Scratch`].
pub(super) fn buffer_len(rows: usize, dim: usize) -> usize {
    let (rows, dim) = (rows.next_multiple_of(TILE_ROWS), dim.next_multiple_of(K_TILE));
    rows * dim / 2 + 2 * dim * TILE_KEYS / 2 + PANEL * TILE_KEYS + 2 * size_of::<ActTile>() / 4 + rows * (dim + 1) + PANEL
}

/// Computes an item.
///
/// # Safety
/// As [`attend`], for a cache that [`ByTiles::of`] takes; the rest of `scratch`, from `buffers` on, is good for [`buffer_len`]
/// floats.
pub(super) unsafe fn attend_by_tiles(problem: &Problem<'_>, item: &Item, by: ByTiles, scratch: *mut f32, buffers: *mut f32) {
    let attend = match problem.spec.dtype {
        KvDType::BF16 => attend_bf16,
        KvDType::F16 => attend_f16::<F16>,
        KvDType::F8E4M3 => attend_f16::<F8E4M3>,
        KvDType::Int8 => attend_f16::<Int8>,
        KvDType::F32 => unreachable!("elements of F32 are not exact in tiles"),
    };
    attend(problem, item, by.0, scratch, buffers);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn attend_f16<E: Element>(problem: &Problem<'_>, item: &Item, amx: Amx, scratch: *mut f32, buffers: *mut f32) {
    attend::<Avx512, _>(problem, item, scratch, &mut ByRegisters::<Avx512, AsFloats<E>>::new(problem, item, amx, buffers));
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn attend_bf16(problem: &Problem<'_>, item: &Item, amx: Amx, scratch: *mut f32, buffers: *mut f32) {
    attend::<Avx512<true>, _>(problem, item, scratch, &mut ByRegisters::<Avx512<true>, Pairs>::new(problem, item, amx, buffers));
}

/// By tiles of 16-bit elements: f16 where the softmax is that of products of [`AsFloats`], bf16 where it is that of [`Pairs`].
struct ByRegisters<'a, S, C> {
    registers: Tiles,
    rows: usize,
    /// Steps of 32 dimensions; the last may be padded with zeros.
    steps: usize,
    /// `[rows / 16][steps]`.
    q: &'a mut [ActTile],
    /// What scores of a row are to be multiplied by.
    q_factors: &'a mut [f32],
    /// Of the tile of keys, `[steps]`: "rows" are keys and "columns" dimensions, and the other way round.
    keys: &'a mut [WeightTile],
    values: &'a mut [WeightTile],
    /// Scores of 32 rows, then weights.
    scores: &'a mut [[f32; TILE_KEYS]],
    weights: &'a mut [ActTile],
    /// What the sums of 32 rows are to be multiplied by.
    factors: &'a mut [f32],
    /// Weighted values of the split so far, `[steps][rows][32]`.
    acc: &'a mut [[f32; PANEL]],
    kind: PhantomData<(S, C)>,
}

impl<S: Simd, C: Cached> ByRegisters<'_, S, C> {
    const FP16: bool = C::Product::PACKED == 1;

    /// # Safety
    /// `buffers` is good for [`buffer_len`] floats, on a cache line, and nobody else uses it.
    unsafe fn new(problem: &Problem<'_>, item: &Item, amx: Amx, mut buffers: *mut f32) -> Self {
        /// `len` elements from the start of `buffers`, which then starts behind them.
        unsafe fn take<'a, T>(buffers: &mut *mut f32, len: usize) -> &'a mut [T] {
            let start = *buffers;
            *buffers = start.add(len * size_of::<T>() / size_of::<f32>());
            // SAFETY: T is an array of numbers, or one, and any bits are numbers; the rest is the promise of `new`.
            unsafe { std::slice::from_raw_parts_mut(start.cast(), len) }
        }
        let (rows, steps) = (item.rows(problem.queries_per_kv()), problem.params.head_dim.div_ceil(K_TILE));
        let b = &mut buffers;
        Self {
            registers: Tiles::new(amx),
            rows,
            steps,
            q: take(b, rows.div_ceil(TILE_ROWS) * steps),
            keys: take(b, steps),
            values: take(b, steps),
            scores: take(b, PANEL),
            weights: take(b, 2),
            acc: take(b, steps * rows),
            factors: take(b, PANEL),
            q_factors: take(b, rows),
            kind: PhantomData,
        }
    }

    /// Lays out the keys of a tile that [`KeyTiles::load_keys`] has loaded, `[dimensions or pairs of them][32 keys]`.
    #[inline(always)]
    unsafe fn lay_out_keys(&mut self, keys: *const f32, dim: usize) {
        for (step, tile) in self.keys.iter_mut().enumerate() {
            for (i, line) in tile.as_chunks_mut::<K_TILE>().0.iter_mut().enumerate() {
                let (first, pair) = (i / 16 * 16, step * 16 + i % 16);
                let dimension =
                    |d: usize| if d < dim { _mm512_loadu_ps(keys.add(d * TILE_KEYS + first)) } else { _mm512_setzero_ps() };
                let pairs = if Self::FP16 {
                    interleave_f16(dimension(2 * pair), dimension(2 * pair + 1))
                } else if 2 * pair < dim {
                    _mm512_loadu_si512(keys.add(pair * TILE_KEYS + first).cast())
                } else {
                    _mm512_setzero_si512()
                };
                _mm512_storeu_si512(line.as_mut_ptr().cast(), pairs);
            }
        }
    }

    /// The same of values, `[keys or pairs of them][padded]`, times their scales; those of keys that the item does not see are
    /// zeros.
    #[inline(always)]
    unsafe fn lay_out_values(&mut self, values: *const f32, padded: usize, tile: &KeyTiles<'_>) {
        let lanes = tile.lanes();
        for (step, out) in self.values.iter_mut().enumerate() {
            for (i, line) in out.as_chunks_mut::<K_TILE>().0.iter_mut().enumerate() {
                let (first, pair) = (step * K_TILE + i / 16 * 16, i % 16);
                let sees = |lane: usize| first < padded && lanes.contains(&lane);
                let key = |lane: usize| {
                    if !sees(lane) {
                        return _mm512_setzero_ps();
                    }
                    let value = _mm512_loadu_ps(values.add(lane * padded + first));
                    let Some(scales) = tile.scales() else { return value };
                    // Cut where a cache of F16 cuts; of a NaN and a bound the second operand is taken.
                    let value = _mm512_mul_ps(value, _mm512_set1_ps(scales.values[lane]));
                    _mm512_min_ps(_mm512_set1_ps(65504.0), _mm512_max_ps(_mm512_set1_ps(-65504.0), value))
                };
                let pairs = if Self::FP16 {
                    interleave_f16(key(2 * pair), key(2 * pair + 1))
                } else if sees(2 * pair) || sees(2 * pair + 1) {
                    _mm512_loadu_si512(values.add(pair * padded + first).cast())
                } else {
                    _mm512_setzero_si512()
                };
                _mm512_storeu_si512(line.as_mut_ptr().cast(), pairs);
            }
        }
    }

    /// Row `r` of the block: scores become weights of 16 bits; `lanes` are those that it sees.
    #[inline(always)]
    unsafe fn soften(
        &mut self,
        params: &AttentionParams,
        s: &Scratch,
        (row, r): (usize, usize),
        scales: Option<&Scales>,
        lanes: &Range<usize>,
    ) {
        let line = &mut self.weights[r / TILE_ROWS].as_chunks_mut::<K_TILE>().0[r % TILE_ROWS];
        if lanes.is_empty() {
            line.fill(0);
            self.factors[r] = 1.0;
            return;
        }
        let params = AttentionParams { scale: params.scale * self.q_factors[row], ..*params };
        let (scores, softmax) = (self.scores[r].as_mut_ptr(), Softmax { max: s.max.add(row), sum: s.sum.add(row * 16) });
        self.factors[r] = online_softmax_update::<S, C::Product>(&params, scores, &softmax, scales, lanes);
        let weights = if Self::FP16 {
            let half = |i: usize| _mm512_cvtps_ph::<0>(_mm512_loadu_ps(scores.add(16 * i)));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half(0)), half(1))
        } else {
            // They are packed.
            _mm512_loadu_si512(scores.cast_const().cast())
        };
        _mm512_storeu_si512(line.as_mut_ptr().cast(), weights);
    }

    /// Adds the weighted values of the tile to the sums of `n` rows from `first` on.
    #[inline(always)]
    unsafe fn accumulate(&mut self, first: usize, n: usize) {
        let rescale = self.factors[..n].iter().any(|factor| *factor != 1.0);
        for step in 0..self.steps {
            let acc = &mut self.acc[step * self.rows + first..][..n];
            if rescale {
                for (acc, factor) in acc.iter_mut().zip(&*self.factors) {
                    for half in acc.as_chunks_mut::<16>().0 {
                        let p = half.as_mut_ptr();
                        _mm512_storeu_ps(p, _mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(*factor)));
                    }
                }
            }
            self.registers.load(acc);
            self.registers.multiply(Self::FP16, [&self.weights[0], &self.weights[1]], &self.values[step]);
            self.registers.store(acc);
        }
    }
}

impl<S: Simd, C: Cached> Method for ByRegisters<'_, S, C> {
    #[inline(always)]
    unsafe fn pack_queries(&mut self, problem: &Problem<'_>, item: &Item, kv_head: usize, _: &Scratch) {
        let (dim, steps) = (problem.params.head_dim, self.steps);
        for row in 0..self.rows {
            let q = std::slice::from_raw_parts(problem.q.add(row_offset(problem, kv_head, item.first_row, row)), dim);
            let up = if Self::FP16 { power_to_f16(q.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff))) } else { 1.0 };
            self.q_factors[row] = 1.0 / up;
            for step in 0..steps {
                let half = |i: usize| {
                    let d = (step * K_TILE + 16 * i).min(dim);
                    let seen = u16::MAX.checked_shr(16 - (dim - d).min(16) as u32).unwrap_or(0);
                    _mm512_mul_ps(_mm512_maskz_loadu_ps(seen, q.as_ptr().add(d)), _mm512_set1_ps(up))
                };
                let line = &mut self.q[row / TILE_ROWS * steps + step].as_chunks_mut::<K_TILE>().0[row % TILE_ROWS];
                if Self::FP16 {
                    let half = |i| _mm512_cvtps_ph::<0>(half(i));
                    let values = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half(0)), half(1));
                    _mm512_storeu_si512(line.as_mut_ptr().cast(), values);
                } else {
                    let values = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(half(1), half(0)));
                    _mm512_storeu_si512(line.as_mut_ptr().cast(), values);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn begin_split(&mut self, _: &Scratch) {
        self.acc.as_flattened_mut().fill(0.0);
    }

    #[inline(always)]
    unsafe fn attend_tile(&mut self, problem: &Problem<'_>, item: &Item, s: &Scratch, tile: &KeyTiles<'_>) {
        let (queries_per_kv, dim) = (problem.queries_per_kv(), problem.params.head_dim);
        tile.load_keys::<S, C>(s.keys, s.values);
        self.lay_out_keys(s.keys, dim);
        C::load_values::<S>(tile, s.values);
        self.lay_out_values(s.values, padded_dim(dim), tile);
        // Values have theirs already.
        let scales = tile.scales().map(|scales| Scales { keys: scales.keys, values: [1.0; TILE_KEYS] });
        let visible = |token: usize| visible(problem, (item.query(token), item.seq_len), tile.start());
        for first in (0..self.rows).step_by(PANEL) {
            let n = PANEL.min(self.rows - first);
            let mut tokens = first / queries_per_kv..(first + n - 1) / queries_per_kv + 1;
            if tokens.all(|token| visible(token).is_empty()) {
                continue;
            }
            self.registers.set_rows(n);
            self.registers.zero();
            for step in 0..self.steps {
                let group = first / TILE_ROWS;
                // Of up to 16 rows the second tile is not read.
                let q = [group, if n > TILE_ROWS { group + 1 } else { group }].map(|group| &self.q[group * self.steps + step]);
                self.registers.multiply(Self::FP16, q, &self.keys[step]);
            }
            self.registers.store(&mut self.scores[..n]);
            for r in 0..n {
                let lanes = visible((first + r) / queries_per_kv);
                self.soften(&problem.params, s, (first + r, r), scales.as_ref(), &lanes);
            }
            self.accumulate(first, n);
        }
    }

    #[inline(always)]
    unsafe fn end_split(&mut self, s: &Scratch, padded: usize) {
        for (row, step) in (0..self.rows).flat_map(|row| (0..self.steps).map(move |step| (row, step))) {
            let (sums, d) = (&self.acc[step * self.rows + row], step * PANEL);
            std::ptr::copy_nonoverlapping(sums.as_ptr(), s.acc.add(row * padded + d), PANEL.min(padded - d));
        }
    }
}

/// 16 pairs of f16, rounded to nearest, ties to even.
#[inline(always)]
unsafe fn interleave_f16(first: __m512, second: __m512) -> __m512i {
    let word = |v| _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<0>(v));
    _mm512_or_si512(word(first), _mm512_slli_epi32::<16>(word(second)))
}
