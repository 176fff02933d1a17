//! The tile instructions. Stable Rust has no intrinsics for them.
//!
//! Sums stay in tmm0 to tmm3 from one block of assembly to the next. Compilers allocate no tile registers and no other code here
//! uses them; the operating system saves them with a thread's other state.

use std::{arch::asm, marker::PhantomData};

use super::{ActTile, Amx, PANEL, TILE_ROWS, WeightTile};
#[cfg(any(test, amx_model))]
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

/// Up to 32 rows of A times a k tile of W, by an instruction of one of the two types.
macro_rules! two_tiles {
    ($product:literal, $a:expr, $w:expr) => {
        asm!(
            "tileloadd tmm6, [{w} + {s}]",
            "tileloaddt1 tmm4, [{a0} + {s}]",
            concat!($product, " tmm0, tmm4, tmm6"),
            "tileloadd tmm7, [{w} + {s} + 1024]",
            concat!($product, " tmm1, tmm4, tmm7"),
            "tileloaddt1 tmm5, [{a1} + {s}]",
            concat!($product, " tmm2, tmm5, tmm6"),
            concat!($product, " tmm3, tmm5, tmm7"),
            a0 = in(reg) $a[0].as_ptr(), a1 = in(reg) $a[1].as_ptr(), w = in(reg) $w.as_ptr(), s = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly, preserves_flags)
        )
    };
}

/// Up to 16.
macro_rules! one_tile {
    ($product:literal, $a:expr, $w:expr) => {
        asm!(
            "tileloadd tmm6, [{w} + {s}]",
            "tileloaddt1 tmm4, [{a} + {s}]",
            concat!($product, " tmm0, tmm4, tmm6"),
            "tileloadd tmm7, [{w} + {s} + 1024]",
            concat!($product, " tmm1, tmm4, tmm7"),
            a = in(reg) $a.as_ptr(), w = in(reg) $w.as_ptr(), s = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly, preserves_flags)
        )
    };
}

/// The tile registers of this thread; released when dropped, so that the kernel need not save them.
pub(in crate::cpu) struct Tiles {
    /// Rows of A, and so of C; a product takes as many cycles as its tile of A has rows.
    rows: usize,
    /// Keeps them on this thread.
    thread: PhantomData<*const ()>,
    #[cfg(any(test, amx_model))]
    model: model::Sums,
}

impl Tiles {
    /// Configured for 32 rows. A thread has one at a time.
    pub(in crate::cpu) fn new(_proof: Amx) -> Self {
        let mut tiles = Self {
            rows: 0,
            thread: PhantomData,
            #[cfg(any(test, amx_model))]
            model: model::ZERO,
        };
        tiles.set_rows(PANEL);
        tiles
    }

    /// The number of rows of A and C, 1 to 32; what C holds is lost.
    pub(in crate::cpu) fn set_rows(&mut self, rows: usize) {
        assert!((1..=PANEL).contains(&rows), "{rows} rows of a product by tiles");
        if rows == self.rows {
            return;
        }
        self.rows = rows;
        #[cfg(any(test, amx_model))]
        if is_modelled() {
            return;
        }
        let (first, second) = (rows.min(TILE_ROWS) as u8, rows.saturating_sub(TILE_ROWS).max(1) as u8);
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].copy_from_slice(&[first, first, second, second, first, second, 16, 16]);
        // SAFETY: `Amx` proves that the instruction exists and is permitted; the operand is a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly, preserves_flags)) }
    }

    /// Whether there is a second tile of A.
    fn is_tall(&self) -> bool {
        self.rows > TILE_ROWS
    }

    /// `c = 0`.
    #[inline]
    #[allow(clippy::unused_self)] // The proof that this thread's tiles are configured.
    pub(in crate::cpu) fn zero(&mut self) {
        #[cfg(any(test, amx_model))]
        if is_modelled() {
            self.model = model::ZERO;
            return;
        }
        // SAFETY: this thread's tiles are configured; the compiler keeps nothing in them.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, options(nostack, nomem, preserves_flags)
            );
        }
    }

    /// Reads C.
    #[inline]
    pub(in crate::cpu) fn load(&mut self, c: &[[f32; PANEL]]) {
        assert!(c.len() >= self.rows);
        #[cfg(any(test, amx_model))]
        if is_modelled() {
            return model::load(&mut self.model, &c[..self.rows]);
        }
        // SAFETY: the tiles are configured to have as many rows together as `c` has at least; rows lie 128 bytes apart.
        unsafe {
            asm!(
                "tileloadd tmm0, [{c} + {s}]", "tileloadd tmm1, [{c} + {s} + 64]",
                c = in(reg) c.as_ptr(), s = in(reg) 128usize,
                out("tmm0") _, out("tmm1") _, options(nostack, readonly, preserves_flags)
            );
            if self.is_tall() {
                asm!(
                    "tileloadd tmm2, [{c} + {s} + 2048]", "tileloadd tmm3, [{c} + {s} + 2112]",
                    c = in(reg) c.as_ptr(), s = in(reg) 128usize,
                    out("tmm2") _, out("tmm3") _, options(nostack, readonly, preserves_flags)
                );
            }
        }
    }

    /// Writes C.
    #[inline]
    pub(in crate::cpu) fn store(&self, c: &mut [[f32; PANEL]]) {
        assert!(c.len() >= self.rows);
        #[cfg(any(test, amx_model))]
        if is_modelled() {
            return model::store(&self.model, &mut c[..self.rows]);
        }
        // SAFETY: as in `load`.
        unsafe {
            asm!(
                "tilestored [{c} + {s}], tmm0", "tilestored [{c} + {s} + 64], tmm1",
                c = in(reg) c.as_mut_ptr(), s = in(reg) 128usize, options(nostack, preserves_flags)
            );
            if self.is_tall() {
                asm!(
                    "tilestored [{c} + {s} + 2048], tmm2", "tilestored [{c} + {s} + 2112], tmm3",
                    c = in(reg) c.as_mut_ptr(), s = in(reg) 128usize, options(nostack, preserves_flags)
                );
            }
        }
    }

    /// `c += a * w^T`, elements being f16 if so and bf16 else; the second tile of A is used from 17 rows on. A is loaded as what
    /// passes once: it comes from the second-level cache, and would push W out of the first.
    #[inline]
    pub(in crate::cpu) fn multiply(&mut self, fp16: bool, a: [&ActTile; 2], w: &WeightTile) {
        #[cfg(any(test, amx_model))]
        if is_modelled() {
            return model::multiply(&mut self.model, fp16, (a, self.rows), w);
        }
        // SAFETY: the types are whole tiles whose rows lie 64 bytes apart, and this thread's tiles are configured. AMX-FP16 is
        // used only by kernels that were chosen by `Amx::has_fp16`.
        unsafe {
            match (fp16, self.is_tall()) {
                (true, true) => two_tiles!("tdpfp16ps", a, w),
                (true, false) => one_tile!("tdpfp16ps", a[0], w),
                (false, true) => two_tiles!("tdpbf16ps", a, w),
                (false, false) => one_tile!("tdpbf16ps", a[0], w),
            }
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(any(test, amx_model))]
        if is_modelled() {
            return;
        }
        // SAFETY: they are configured.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
    }
}
