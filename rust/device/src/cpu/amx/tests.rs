//! The model against the instructions, where the processor has them: what other tests see of one they would see of the other.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{detect::is_modelled, *};

/// 16-bit values of about -2..2.
fn values(fp16: bool, n: usize, seed: u64) -> Vec<u16> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = (state >> 40) as f32 / 4_194_304.0 - 2.0;
            if fp16 { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() }
        })
        .collect()
}

/// Two k tiles, the sums stored and loaded between them.
fn product(tiles: &mut Tiles, fp16: bool, rows: usize, a: &[u16], w: &[u16]) -> Vec<[f32; PANEL]> {
    let (a, w) = (a.as_chunks::<{ TILE_ROWS * K_TILE }>().0, w.as_chunks::<{ PANEL * K_TILE }>().0);
    let mut c = vec![[f32::NAN; PANEL]; rows];
    tiles.set_rows(rows);
    tiles.zero();
    tiles.multiply(fp16, [&a[0], &a[1]], &w[0]);
    tiles.store(&mut c);
    tiles.zero();
    tiles.load(&c);
    tiles.multiply(fp16, [&a[2], &a[3]], &w[1]);
    tiles.store(&mut c);
    c
}

#[test]
fn products_of_tiles_are_those_of_rows_and_columns() {
    let Some(amx) = Amx::detect() else { return };
    for fp16 in [true, false].into_iter().filter(|fp16| !fp16 || amx.has_fp16()) {
        let (a, w) = (values(fp16, 4 * 512, 1), values(fp16, 2 * 1024, 2));
        let value = |bits: u16| f64::from(if fp16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() });
        let mut tiles = Tiles::new(amx);
        for rows in [32, 1, 15, 16, 17, 31] {
            let c = product(&mut tiles, fp16, rows, &a, &w);
            for (r, n) in (0..rows).flat_map(|r| (0..PANEL).map(move |n| (r, n))) {
                let terms = (0..64).map(|k| {
                    let a = a[(k / 32 * 2 + r / 16) * 512 + r % 16 * 32 + k % 32];
                    let w = w[k / 32 * 1024 + ((n / 16 * 16 + k % 32 / 2) * 16 + n % 16) * 2 + k % 2];
                    value(a) * value(w)
                });
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                assert!((f64::from(c[r][n]) - sum).abs() <= 1e-6 * size, "f16 {fp16}, {rows} rows, output {r} {n}: {}", c[r][n]);
            }
        }
    }
}

#[test]
fn codes_are_scaled_as_the_model_says() {
    if is_modelled() || !Amx::detect().is_some_and(Amx::has_fp16) {
        return;
    }
    let codes: Vec<u16> = (0..32).map(|i| 0x6400 | (i * 8)).collect();
    let (scale, min) = (values(true, 32, 3), values(true, 32, 4));
    // SAFETY: each is 32 words; the processor has AVX-512 FP16.
    unsafe {
        let [codes, scale, min] = [&codes, &scale, &min].map(|v| _mm512_loadu_si512(v.as_ptr().cast()));
        let zero = _mm512_set1_epi16(0x6400 + 128);
        let bits = |v: __m512i| std::mem::transmute::<__m512i, [u16; 32]>(v);
        assert_eq!(bits(scale_codes(codes, zero, scale, min)), bits(model::scale_codes(codes, zero, scale, min)));
    }
}
