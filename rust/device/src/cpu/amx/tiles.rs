//! The tile instructions. Stable Rust has no intrinsics for them, so each loop over k tiles is one block of assembly.

use std::{arch::asm, marker::PhantomData};

use super::{Amx, PANEL, TILE_ELEMENTS};
#[cfg(test)]
use super::{detect::is_modelled, model};

/// Operand of `ldtilecfg` (Intel SDM): palette 1 has eight tiles of up to 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static FULL_TILES: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// The tile registers of this thread, configured; released when dropped, so that the kernel need not save them.
pub(super) struct Tiles(PhantomData<*const ()>);

impl Tiles {
    pub(super) fn configure(_proof: Amx) -> Self {
        #[cfg(test)]
        if is_modelled() {
            return Self(PhantomData);
        }
        // SAFETY: `Amx` proves that the instruction exists and is permitted; the operand is a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const FULL_TILES, options(nostack, readonly, preserves_flags)) }
        Self(PhantomData)
    }

    /// `c (+)= a * panel` over `k_tiles` k tiles; `c` is `[32][32]`, of which only the first 16 rows are computed when `half`.
    /// The sums go on from `c` when `accumulate`, else from zero.
    #[inline]
    #[allow(clippy::unused_self)] // The proof that this thread's tiles are configured.
    pub(super) fn multiply(&self, a: &[u16], panel: &[u16], k_tiles: usize, c: &mut [f32; PANEL * PANEL], mode: Mode) {
        assert!(k_tiles > 0 && a.len() >= k_tiles * TILE_ELEMENTS && panel.len() >= k_tiles * TILE_ELEMENTS);
        #[cfg(test)]
        if is_modelled() {
            return model::multiply(a, panel, k_tiles, c, mode);
        }
        let (a, b, c) = (a.as_ptr(), panel.as_ptr(), c.as_mut_ptr());
        let accumulate = u64::from(mode.accumulate);
        if mode.half {
            // SAFETY: the assertion bounds what is read, the type of `c` what is written; this thread's tiles are configured.
            unsafe {
                asm!(
                    "test {acc}, {acc}",
                    "jz 3f",
                    "tileloadd tmm0, [{c} + {ldc}]",
                    "tileloadd tmm1, [{c} + {ldc} + 64]",
                    "jmp 2f",
                    "3:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "2:",
                    "tileloadd tmm4, [{a} + {s}]",
                    "tileloadd tmm6, [{b} + {s}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {s} + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {a}, 2048",
                    "add {b}, 2048",
                    "dec {k}",
                    "jnz 2b",
                    "tilestored [{c} + {ldc}], tmm0",
                    "tilestored [{c} + {ldc} + 64], tmm1",
                    a = inout(reg) a => _, b = inout(reg) b => _, k = inout(reg) k_tiles => _,
                    s = in(reg) 64usize, c = in(reg) c, ldc = in(reg) 128usize, acc = in(reg) accumulate,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
            return;
        }
        // SAFETY: as above.
        unsafe {
            asm!(
                "test {acc}, {acc}",
                "jz 3f",
                "tileloadd tmm0, [{c} + {ldc}]",
                "tileloadd tmm1, [{c} + {ldc} + 64]",
                "tileloadd tmm2, [{c} + {ldc} + 2048]",
                "tileloadd tmm3, [{c} + {ldc} + 2112]",
                "jmp 2f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {s}]",
                "tileloadd tmm6, [{b} + {s}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {s} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a} + {s} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                "prefetcht0 [{a} + 4096 + \\line]",
                "prefetcht0 [{a} + 5120 + \\line]",
                ".endr",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {k}",
                "jnz 2b",
                "tilestored [{c} + {ldc}], tmm0",
                "tilestored [{c} + {ldc} + 64], tmm1",
                "tilestored [{c} + {ldc} + 2048], tmm2",
                "tilestored [{c} + {ldc} + 2112], tmm3",
                a = inout(reg) a => _, b = inout(reg) b => _, k = inout(reg) k_tiles => _,
                s = in(reg) 64usize, c = in(reg) c, ldc = in(reg) 128usize, acc = in(reg) accumulate,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(test)]
        if is_modelled() {
            return;
        }
        // SAFETY: a `Tiles` exists only where the tiles are configured.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
    }
}

/// What [`Tiles::multiply`] computes.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    pub accumulate: bool,
    /// 16 rows of A instead of 32.
    pub half: bool,
}
