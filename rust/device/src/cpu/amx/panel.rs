//! The right operand: panels of 32 rows of a weight as bf16 pairs.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm256_loadu_si256, _mm512_cvtne2ps_pbh, _mm512_cvtph_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use super::{Amx, K_TILE, PANEL, TILE_ELEMENTS};
use crate::{DType, WeightView};

/// Rows of a tile.
const TILE: usize = 16;

/// A weight `[N, K]` that is read in panels.
pub trait PanelSource: Sync {
    /// Writes rows `n0..n0 + 32` (zeros beyond N), columns `k0..k0 + k_len`, as bf16 to `out`:
    /// `[k_len / 32 k tiles][2 tiles of 16 rows][16 column pairs][16 rows][2 columns]`. `k0` and `k_len` are multiples of 32.
    fn fill(&self, n0: usize, k0: usize, k_len: usize, out: &mut [u16]);
}

/// Panels of a float weight as it lies in its file; f16 and f32 values are rounded to bf16.
pub struct FloatPanels<'a> {
    weight: &'a WeightView,
}

impl<'a> FloatPanels<'a> {
    /// `None` when `weight` is quantised or its columns are not a multiple of 32.
    pub fn new(_proof: Amx, weight: &'a WeightView) -> Option<Self> {
        let float = matches!(weight.dtype, DType::F32 | DType::F16 | DType::BF16);
        (float && weight.cols.is_multiple_of(K_TILE)).then_some(Self { weight })
    }
}

impl PanelSource for FloatPanels<'_> {
    fn fill(&self, n0: usize, k0: usize, k_len: usize, out: &mut [u16]) {
        let w = self.weight;
        assert!(k0 + k_len <= w.cols && out.len() >= k_len * PANEL, "columns {k0}..+{k_len} of {}", w.cols);
        // SAFETY: `new` took the proof that the processor has AVX-512 BF16 and F16C.
        unsafe {
            match w.dtype {
                DType::BF16 => fill_tiles::<BF16>(w, (n0, k0, k_len), out),
                DType::F16 => fill_tiles::<F16>(w, (n0, k0, k_len), out),
                _ => fill_tiles::<F32>(w, (n0, k0, k_len), out),
            }
        }
    }
}

// Float types, as constants to be generic over.
const BF16: u8 = 0;
const F16: u8 = 1;
const F32: u8 = 2;

#[target_feature(enable = "avx512f,avx512bf16,f16c")]
fn fill_tiles<const TYPE: u8>(w: &WeightView, (n0, k0, k_len): (usize, usize, usize), out: &mut [u16]) {
    let width = if TYPE == F32 { 4 } else { 2 };
    for (t, out) in out.chunks_exact_mut(TILE_ELEMENTS).take(k_len / K_TILE).enumerate() {
        let start = (k0 + t * K_TILE) * width;
        for (h, out) in out.chunks_exact_mut(TILE_ELEMENTS / 2).enumerate() {
            let mut rows = [_mm512_setzero_si512(); TILE];
            for (r, row) in rows.iter_mut().enumerate() {
                let n = n0 + h * TILE + r;
                if n < w.rows {
                    *row = load::<TYPE>(&w.row(n)[start..start + K_TILE * width]);
                }
            }
            for (pairs, out) in transpose(&rows).iter().zip(out.chunks_exact_mut(K_TILE)) {
                // SAFETY: the chunk has 64 bytes.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), *pairs) }
            }
        }
    }
}

/// 32 values as bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16,f16c")]
fn load<const TYPE: u8>(x: &[u8]) -> __m512i {
    assert!(x.len() >= K_TILE * if TYPE == F32 { 4 } else { 2 });
    let x = x.as_ptr();
    // SAFETY: `x` has 32 values, asserted; a __m512bh is 64 plain bytes.
    unsafe {
        let (low, high) = match TYPE {
            BF16 => return _mm512_loadu_si512(x.cast()),
            F16 => (_mm512_cvtph_ps(_mm256_loadu_si256(x.cast())), _mm512_cvtph_ps(_mm256_loadu_si256(x.add(32).cast()))),
            _ => (_mm512_loadu_ps(x.cast()), _mm512_loadu_ps(x.add(64).cast())),
        };
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Transposes 16 x 16 words of 32 bits: in groups of four words by unpacking, then the groups by shuffling.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: &[__m512i; 16]) -> [__m512i; 16] {
    let mut quads = [_mm512_setzero_si512(); 16];
    // quads[4 i + j], group g: rows 4 i..4 i + 4 of column 4 g + j.
    for i in 0..4 {
        let [a, b, c, d] = [r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]];
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        quads[4 * i] = _mm512_unpacklo_epi64(ab, cd);
        quads[4 * i + 1] = _mm512_unpackhi_epi64(ab, cd);
        let (ab, cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        quads[4 * i + 2] = _mm512_unpacklo_epi64(ab, cd);
        quads[4 * i + 3] = _mm512_unpackhi_epi64(ab, cd);
    }
    let mut out = [_mm512_setzero_si512(); 16];
    for j in 0..4 {
        let [a, b, c, d] = [quads[j], quads[4 + j], quads[8 + j], quads[12 + j]];
        // Groups 0, 2 and groups 1, 3 of two rows of quads, then one group of each.
        let (ab_even, cd_even) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d));
        let (ab_odd, cd_odd) = (_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d));
        out[j] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
    }
    out
}
