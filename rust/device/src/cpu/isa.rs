//! Instruction sets, chosen at run time.

#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

use crate::DeviceError;

/// The instruction sets that the kernels of a process use; a machine runs every ISA up to its best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable code.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// AVX-512, and AMX-BF16, or AMX-FP16 where there is, for many rows of linear layers and of attention.
    Amx,
}

impl Isa {
    /// Every ISA, slowest first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Amx];

    /// The best ISA of this machine.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 && avx512 && super::Amx::detect().is_some() {
                return Self::Amx;
            }
            if avx2 && avx512 {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// Whether this machine multiplies bf16 faster than f32 in this ISA, which decides the form of float weights unless
    /// [`Self::multiplies_f16`] does: by AMX, or as [`Self::dots_bf16`] says.
    pub fn multiplies_bf16(self) -> bool {
        self == Self::Amx || self.dots_bf16()
    }

    /// Whether this machine multiplies f16 faster than f32 in this ISA, and as fast as bf16: by AMX-FP16.
    pub fn multiplies_f16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Self::Amx && super::Amx::detect().is_some_and(super::Amx::has_fp16);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether this machine multiplies pairs of bf16 values faster than f32 in this ISA: by AVX-512 BF16 on a processor of AMD.
    /// Intel's take twice as long for `vdpbf16ps` as for a fused multiplication of half as many columns.
    pub fn dots_bf16(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512bf16") && is_amd(),
            _ => false,
        }
    }

    /// The ISA's name: "scalar", "avx2", "avx512" or "amx".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// An ISA by name, if this machine has it.
    pub fn parse(name: &str) -> Result<Self, DeviceError> {
        let best = Self::detect();
        let have: Vec<_> = Self::ALL.into_iter().filter(|t| *t <= best).collect();
        have.iter().copied().find(|t| t.name() == name).ok_or_else(|| {
            let names: Vec<_> = have.iter().map(|t| t.name()).collect();
            DeviceError::Unsupported(format!("cpu_tier `{name}` is not available on this machine; it has {}", names.join(", ")))
        })
    }
}

/// Whether prefetches go to the second-level cache alone, from where this processor fetches lines in time: on AMD's with AVX-512.
/// On two cores of a Zen 4 decode attention streams 1.3 to 1.7 times as fast so, and packed weights pass 1.1 to 1.6 times as fast
/// for up to eight rows. On a Zen 5 that alone changes nothing, but prefetching the same again, on its way to the first level,
/// does ([`super::simd::prefetch_stream`]): for one row Q6_K passes 1.12 to 1.18 times as fast, Q4_K and Q8_0 1.05 to 1.2, Q4_0
/// and Q4_1 1.0 to 1.04. Others have not been timed.
pub(super) fn reads_ahead_to_l2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f") && is_amd();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether the processor is one of AMD.
#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    static AMD: OnceLock<bool> = OnceLock::new();
    *AMD.get_or_init(|| {
        // SAFETY: a 64-bit processor has CPUID. (Newer compilers know; the oldest supported one does not.)
        #[allow(unused_unsafe)]
        let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
        [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    })
}
