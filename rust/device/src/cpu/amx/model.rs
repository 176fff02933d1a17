//! The tile instructions in plain Rust, as the Intel SDM describes them but for denormal numbers, which it does not flush.

use super::{K_TILE, PANEL, TILE_ELEMENTS, tiles::Mode};

/// 16 rows of 32 bf16.
type Tile = [[u16; K_TILE]; 16];
type Sums = [[f32; 16]; 16];

fn value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `tdpbf16ps`: the products of even columns are summed up, and those of odd ones; both sums are added, and the result to `c`.
fn product(c: &mut Sums, a: &Tile, b: &Tile) {
    for (c, a) in c.iter_mut().zip(a) {
        for (n, c) in c.iter_mut().enumerate() {
            let (mut even, mut odd) = (0.0f32, 0.0f32);
            for (k, b) in b.iter().enumerate() {
                even += value(a[2 * k]) * value(b[2 * n]);
                odd += value(a[2 * k + 1]) * value(b[2 * n + 1]);
            }
            *c += even + odd;
        }
    }
}

fn tiles(elements: &[u16]) -> [Tile; 2] {
    std::array::from_fn(|t| std::array::from_fn(|i| std::array::from_fn(|j| elements[(t * 16 + i) * K_TILE + j])))
}

/// As [`super::tiles::Tiles::multiply`].
pub(super) fn multiply(a: &[u16], panel: &[u16], k_tiles: usize, c: &mut [f32; PANEL * PANEL], mode: Mode) {
    for row in 0..if mode.half { 1 } else { 2 } {
        for col in 0..2 {
            let at = |i: usize, j: usize| (row * 16 + i) * PANEL + col * 16 + j;
            let mut sums: Sums =
                std::array::from_fn(|i| std::array::from_fn(|j| if mode.accumulate { c[at(i, j)] } else { 0.0 }));
            for (a, b) in a.chunks_exact(TILE_ELEMENTS).zip(panel.chunks_exact(TILE_ELEMENTS)).take(k_tiles) {
                product(&mut sums, &tiles(a)[row], &tiles(b)[col]);
            }
            for (i, sums) in sums.iter().enumerate() {
                c[at(i, 0)..][..16].copy_from_slice(sums);
            }
        }
    }
}
