//! Products of small integers held as bf16, exact as long as sums stay below 2^24.

use std::arch::asm;

use super::{Amx, tiles::Tiles};
#[cfg(test)]
use super::{detect::is_modelled, model};

/// Two parts of 16 rows of 32 columns.
pub type Parts = [[[u16; 32]; 16]; 2];

/// Two tiles of 16 rows by 16 sums.
#[repr(C, align(64))]
pub struct Sums(pub [[[f32; 16]; 16]; 2]);

impl Sums {
    /// Zeros.
    pub const ZERO: Self = Self([[[0.0; 16]; 16]; 2]);
}

/// The tile registers of this thread, configured; released when dropped. Weights are `[16 column pairs][16 rows][2 columns]`
/// bf16, in the bits of 256 f32.
pub struct IntTiles {
    /// Keeps them configured, and on this thread.
    _tiles: Tiles,
}

impl IntTiles {
    /// Configures them.
    pub fn configure(amx: Amx) -> Self {
        Self { _tiles: Tiles::configure(amx) }
    }

    /// The first tile of sums: both parts times `weights`, added.
    #[inline]
    pub fn of_block(&self, parts: &Parts, weights: &[f32; 256], sums: &mut Sums) {
        #[cfg(test)]
        if is_modelled() {
            sums.0[0] = model::of_parts(parts, weights);
            return;
        }
        // SAFETY: the types are whole tiles, and this thread's tiles are configured.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm4, [{w} + {s}]",
                "tileloadd tmm2, [{a} + {s}]",
                "tdpbf16ps tmm0, tmm2, tmm4",
                "tileloadd tmm3, [{a} + {s} + 1024]",
                "tdpbf16ps tmm0, tmm3, tmm4",
                "tilestored [{c} + {s}], tmm0",
                a = in(reg) parts, w = in(reg) weights, c = in(reg) sums, s = in(reg) 64usize,
                out("tmm0") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// A tile of sums for each part times `weights`.
    #[inline]
    pub fn of_parts(&self, parts: &Parts, weights: &[f32; 256], sums: &mut Sums) {
        #[cfg(test)]
        if is_modelled() {
            sums.0 = [&parts[..1], &parts[1..]].map(|part| model::of_parts(part, weights));
            return;
        }
        // SAFETY: as above.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm4, [{w} + {s}]",
                "tileloadd tmm2, [{a} + {s}]",
                "tdpbf16ps tmm0, tmm2, tmm4",
                "tileloadd tmm3, [{a} + {s} + 1024]",
                "tdpbf16ps tmm1, tmm3, tmm4",
                "tilestored [{c} + {s}], tmm0",
                "tilestored [{c} + {s} + 1024], tmm1",
                a = in(reg) parts, w = in(reg) weights, c = in(reg) sums, s = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// A tile of sums for each of two `weights`: both parts times it, added.
    #[inline]
    pub fn of_halves(&self, parts: &Parts, weights: [&[f32; 256]; 2], sums: &mut Sums) {
        #[cfg(test)]
        if is_modelled() {
            sums.0 = weights.map(|weights| model::of_parts(parts, weights));
            return;
        }
        // SAFETY: as above.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm4, [{w0} + {s}]",
                "tileloadd tmm2, [{a} + {s}]",
                "tdpbf16ps tmm0, tmm2, tmm4",
                "tileloadd tmm5, [{w1} + {s}]",
                "tdpbf16ps tmm1, tmm2, tmm5",
                "tileloadd tmm3, [{a} + {s} + 1024]",
                "tdpbf16ps tmm0, tmm3, tmm4",
                "tdpbf16ps tmm1, tmm3, tmm5",
                "tilestored [{c} + {s}], tmm0",
                "tilestored [{c} + {s} + 1024], tmm1",
                a = in(reg) parts, w0 = in(reg) weights[0], w1 = in(reg) weights[1], c = in(reg) sums, s = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack, preserves_flags)
            );
        }
    }
}
