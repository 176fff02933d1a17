//! The instructions of [`Tiles`](super::Tiles) and of [`scale_codes`](super::scale_codes) in plain Rust, as the Intel SDM
//! describes them but for denormal numbers, which it does not flush, and for the order in which sums are rounded.

use std::arch::x86_64::__m512i;

use half::{
    bf16, f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};

use super::{ActTile, K_TILE, PANEL, TILE_ROWS, WeightTile};

/// C.
pub(super) type Sums = [[f32; PANEL]; PANEL];
pub(super) const ZERO: Sums = [[0.0; PANEL]; PANEL];

pub(super) fn load(sums: &mut Sums, c: &[[f32; PANEL]]) {
    sums[..c.len()].copy_from_slice(c);
}

pub(super) fn store(sums: &Sums, c: &mut [[f32; PANEL]]) {
    c.copy_from_slice(&sums[..c.len()]);
}

/// `tdpfp16ps` or `tdpbf16ps`: of each output the products of even columns are summed up, and those of odd ones; both sums are
/// added, and the result to C.
pub(super) fn multiply(sums: &mut Sums, fp16: bool, (a, rows): ([&ActTile; 2], usize), w: &WeightTile) {
    // [tile][column pair][output][2 columns], to [column pair][output][2 columns].
    let tiles = values(fp16, w);
    let tiles: &[[[[f32; 2]; TILE_ROWS]; K_TILE / 2]] = tiles.as_chunks().0.as_chunks().0.as_chunks().0;
    let w: [[[f32; 2]; PANEL]; K_TILE / 2] =
        std::array::from_fn(|pair| std::array::from_fn(|n| tiles[n / TILE_ROWS][pair][n % TILE_ROWS]));
    for (row, sums) in sums[..rows].iter_mut().enumerate() {
        let a: [f32; K_TILE] = values(fp16, &a[row / TILE_ROWS].as_chunks().0[row % TILE_ROWS]);
        let mut parts = [[0.0f32; 2]; PANEL];
        for (a, w) in a.as_chunks::<2>().0.iter().zip(&w) {
            for (parts, w) in parts.iter_mut().zip(w) {
                parts[0] += a[0] * w[0];
                parts[1] += a[1] * w[1];
            }
        }
        for (sum, parts) in sums.iter_mut().zip(parts) {
            *sum += parts[0] + parts[1];
        }
    }
}

/// As f32.
fn values<const N: usize>(fp16: bool, bits: &[u16; N]) -> [f32; N] {
    let mut out = [0.0; N];
    if fp16 {
        bits.reinterpret_cast::<f16>().convert_to_f32_slice(&mut out);
    } else {
        bits.reinterpret_cast::<bf16>().convert_to_f32_slice(&mut out);
    }
    out
}

/// `vsubph`, then `vfmadd213ph`.
pub(super) fn scale_codes(codes: __m512i, zero: __m512i, scale: __m512i, min: __m512i) -> __m512i {
    // SAFETY: a __m512i is 32 plain f16.
    let values = |v: __m512i| unsafe { std::mem::transmute::<__m512i, [u16; 32]>(v) }.map(f16::from_bits);
    let [codes, zero, scale, min] = [codes, zero, scale, min].map(values);
    let out: [u16; 32] = std::array::from_fn(|i| {
        let code = f16::from_f32(codes[i].to_f32() - zero[i].to_f32());
        f16::from_f64(code.to_f64() * scale[i].to_f64() + min[i].to_f64()).to_bits()
    });
    // SAFETY: as above.
    unsafe { std::mem::transmute::<[u16; 32], __m512i>(out) }
}
