//! Whether this process may use the tile registers.

use std::{
    arch::x86_64::{__cpuid, __cpuid_count, _xgetbv},
    array::from_fn,
    sync::OnceLock,
};

use half::{bf16, f16};

use super::{ActTile, K_TILE, PANEL, TILE_ROWS, Tiles, WeightTile};

/// Whether [`super::model`] stands in for AMX on processors without: in this crate's tests, and in engines built to be tested.
const MODELLED: bool = cfg!(any(test, amx_model));

/// Proof that the processor has AMX-BF16, AVX-512 F, BW, VL, DQ, VNNI, BF16 and VBMI, and F16C (all that have the first have the
/// others) and that the kernel lets this process use it.
#[derive(Clone, Copy, Debug)]
pub struct Amx {
    fp16: bool,
}

impl Amx {
    /// The proof, if there is one. The first call asks the operating system for permission, once for all threads of the process.
    pub fn detect() -> Option<Self> {
        static AVAILABLE: OnceLock<Option<Amx>> = OnceLock::new();
        *AVAILABLE.get_or_init(|| {
            if !has_vectors() || !(has_tiles() || MODELLED) {
                return None;
            }
            let fp16 = if has_tiles() { processor_has_fp16() } else { MODELLED };
            [Self { fp16 }, Self { fp16: false }].into_iter().find(|amx| amx.computes())
        })
    }

    /// Whether the instructions compute what they should, of small integers, which both types hold: a virtual machine may say
    /// that it has some and not have them whole.
    fn computes(self) -> bool {
        let bits = |x: i16| if self.fp16 { f16::from_f32(x.into()).to_bits() } else { bf16::from_f32(x.into()).to_bits() };
        let a = |row: usize, col: usize| (row * 7 + col * 3) as i16 % 11 - 5;
        let w = |out: usize, col: usize| (out * 5 + col * col) as i16 % 13 - 6;
        let tile = |t: usize| -> ActTile { from_fn(|i| bits(a(t * TILE_ROWS + i / K_TILE, i % K_TILE))) };
        // Tile, column pair, output, column.
        let weights: WeightTile = from_fn(|i| {
            let (t, pair, out, odd) = (i / 512, i / 32 % 16, i / 2 % TILE_ROWS, i % 2);
            bits(w(t * TILE_ROWS + out, 2 * pair + odd))
        });
        let (mut tiles, mut sums) = (Tiles::new(self), [[0.0; PANEL]; PANEL]);
        tiles.zero();
        tiles.multiply(self.fp16, [&tile(0), &tile(1)], &weights);
        tiles.store(&mut sums);
        let expected = |row: usize, out: usize| (0..K_TILE).map(|col| f32::from(a(row, col) * w(out, col))).sum::<f32>();
        (0..PANEL * PANEL).all(|i| sums[i / PANEL][i % PANEL] == expected(i / PANEL, i % PANEL))
    }

    /// Whether the processor has AMX-FP16 and AVX-512 FP16 as well: from Granite Rapids on, and not Sapphire Rapids.
    pub fn has_fp16(self) -> bool {
        self.fp16
    }

    /// What is detected where there is no AMX-FP16.
    #[cfg(test)]
    pub(in crate::cpu) fn without_fp16() -> Option<Self> {
        Self::detect().map(|_| Self { fp16: false })
    }
}

/// Whether scalar code ([`super::model`]) stands in for AMX, so that all that is around it is tested on machines without.
#[cfg(any(test, amx_model))]
pub(super) fn is_modelled() -> bool {
    !has_tiles()
}

fn has_vectors() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("f16c")
}

fn has_tiles() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| processor_has_tiles() && permission())
}

/// CPUID leaf 7 and XCR0, as the Intel SDM (volume 1, chapter 18) prescribes; the standard library's detection of AMX is not
/// stable.
fn processor_has_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const XTILE_CFG_AND_DATA: u64 = 3 << 17;
    // SAFETY: a 64-bit processor has CPUID. (Newer compilers know; the oldest supported one does not.)
    #[allow(unused_unsafe)]
    let (max_leaf, leaf1, leaf7) = unsafe { (__cpuid(0).eax, __cpuid(1), __cpuid_count(7, 0)) };
    if max_leaf < 7 || leaf1.ecx & OSXSAVE == 0 || leaf7.edx & AMX_BF16_AND_TILE != AMX_BF16_AND_TILE {
        return false;
    }
    // SAFETY: OSXSAVE implies XSAVE.
    unsafe { xcr0() & XTILE_CFG_AND_DATA == XTILE_CFG_AND_DATA }
}

/// CPUID leaf 7: AMX-FP16 is bit 21 of EAX of subleaf 1, AVX-512 FP16 bit 23 of EDX of subleaf 0. The processor has leaf 7.
fn processor_has_fp16() -> bool {
    const AVX512_FP16: u32 = 1 << 23;
    const AMX_FP16: u32 = 1 << 21;
    // SAFETY: a 64-bit processor has CPUID. (Newer compilers know; the oldest supported one does not.)
    #[allow(unused_unsafe)]
    let (subleaf0, subleaf1) = unsafe { (__cpuid_count(7, 0), __cpuid_count(7, 1)) };
    // EAX of subleaf 0 is the last subleaf; one beyond it has the bits of another.
    subleaf0.edx & AVX512_FP16 != 0 && subleaf0.eax >= 1 && subleaf1.eax & AMX_FP16 != 0
}

/// The extended control register 0. The processor must have OSXSAVE.
#[target_feature(enable = "xsave")]
fn xcr0() -> u64 {
    // SAFETY: the processor has OSXSAVE, which lets user code read XCR0.
    unsafe { _xgetbv(0) }
}

/// Asks Linux for the tile state (`Documentation/arch/x86/xstate.rst`).
#[cfg(target_os = "linux")]
fn permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this call takes two integers and changes only which registers the process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permission() -> bool {
    false
}
