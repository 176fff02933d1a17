//! The kernels by name, and how they are launched.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use crate::{
    DType, KvDType,
    kernel_args::{
        AddExpertsArgs, AttentionArgs, AttentionGateArgs, AttentionMergeArgs, CausalConvArgs, CopyBlocksArgs, DequantizeArgs,
        EmbedArgs, FillBiasArgs, GatedActivationArgs, GatedDeltaArgs, GatedNormArgs, GatherRowsArgs, GemmArgs, GemvArgs,
        GroupedArgs, LatentAttentionArgs, LatentCacheArgs, LayerInputsArgs, LoraArgs, LoraEmbedArgs, Mamba2Args, MambaArgs,
        NormArgs, PackedDequantizeArgs, PackedEmbedArgs, RopeAndCacheArgs, RoundValuesArgs, RouteArgs, SampleArgs,
        ScaleAndClampArgs, StreamRowsArgs, StreamsArgs, TopLogprobsArgs,
    },
};

use super::{
    CudaError,
    driver::{Driver, Launch, Plain, bytes_of},
};

/// A kernel as `kernels/manifest.txt` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its symbol.
    pub name: &'static str,
    /// The name of its argument struct.
    pub args: &'static str,
    /// Threads a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory a CTA.
    pub shared_bytes: u32,
}

/// CTAs of a grid in y at most.
pub const MAX_GRID_Y: usize = (1 << 16) - 1;
/// Rows of a step that one launch of `gemv_*` multiplies, by the kernel's suffix.
pub const GEMV_ROWS: [usize; 4] = [1, 2, 4, 8];
/// The same of `gemm_*`.
pub const GEMM_ROWS: [usize; 3] = [8, 16, 32];
/// Rows of a tile of `gemm_*` for many rows of packed weights.
pub const TILE_ROWS: [usize; 2] = [64, 128];
/// The same of `grouped_gemm_*`; `grouped_gemv_*` take the fewest, and packed weights alone the most.
pub const GROUPED_ROWS: [usize; 3] = [8, 32, TILE_ROWS[0]];
/// Elements of a head at most, in a cache of f32 too.
pub const MAX_HEAD_DIM: usize = 512;
/// Heads of more elements are wide: they have kernels of their own, whose names end with `_d512`.
pub const MAX_NARROW_HEAD_DIM: usize = 256;
/// Head sizes that the attention kernels for caches of 16 bits and less are made for.
pub const HEAD_DIMS: [usize; 8] = [64, 80, 96, 112, 128, 192, 256, 512];
/// Elements of a vector that the latent attention kernels for caches of 16 bits are made for: those that rotate, and the latent.
pub const LATENT_DIMS: [usize; 2] = [64, 512];
/// Elements of such a vector in f32 at most.
pub const MAX_LATENT_WIDTH: usize = 1024;

impl Kernel {
    /// Every kernel of the manifest, by name.
    pub fn all() -> &'static BTreeMap<&'static str, Self> {
        static ALL: OnceLock<BTreeMap<&'static str, Kernel>> = OnceLock::new();
        ALL.get_or_init(|| parse_manifest(include_str!("../../../../kernels/manifest.txt")))
    }

    /// The kernel of that name.
    ///
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn named(name: &str) -> Result<Self, CudaError> {
        Self::all().get(name).copied().ok_or_else(|| CudaError::NoSuchKernel(name.into()))
    }
}

fn parse_manifest(text: &'static str) -> BTreeMap<&'static str, Kernel> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let (name, args) = (fields.next()?, fields.next()?);
            let (threads, shared_bytes) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            Some((name, Kernel { name, args, threads, shared_bytes }))
        })
        .collect()
}

/// The part of a kernel's name that says how a weight is stored; `None` for formats that no kernel reads.
pub fn weight_suffix(dtype: DType) -> Option<String> {
    let name = dtype.to_string().to_lowercase();
    Kernel::all().contains_key(format!("embed_{name}").as_str()).then_some(name)
}

/// The part of a kernel's name that says how keys and values are stored.
pub const fn kv_suffix(dtype: KvDType) -> &'static str {
    match dtype {
        KvDType::F32 => "f32",
        KvDType::F16 => "f16",
        KvDType::BF16 => "bf16",
        KvDType::F8E4M3 => "f8",
        KvDType::Int8 => "i8",
    }
}

/// An argument struct of `kernels/args.h`.
pub trait KernelArgs: Plain {
    /// Its name there.
    const NAME: &'static str;
}

macro_rules! args {
    ($($type:ident),* $(,)?) => {$(impl KernelArgs for $type { const NAME: &'static str = stringify!($type); })*};
}
args!(AttentionArgs, AttentionMergeArgs, CopyBlocksArgs, EmbedArgs, GatedActivationArgs, GatherRowsArgs);
args!(LayerInputsArgs, ScaleAndClampArgs, StreamRowsArgs, StreamsArgs);
args!(GemmArgs, PackedDequantizeArgs, PackedEmbedArgs);
args!(AddExpertsArgs, GroupedArgs, RouteArgs);
args!(LatentAttentionArgs, LatentCacheArgs);
args!(LoraArgs, LoraEmbedArgs);
args!(DequantizeArgs, FillBiasArgs, GemvArgs, NormArgs, RopeAndCacheArgs, RoundValuesArgs, SampleArgs, TopLogprobsArgs);
args!(CausalConvArgs, GatedDeltaArgs, GatedNormArgs, Mamba2Args, MambaArgs, AttentionGateArgs);

/// Starts a kernel on a grid; a grid that is empty is nothing to do.
///
/// # Panics
/// When the struct is another kernel's, or the grid is wider than a GPU takes.
///
/// # Safety
/// What the arguments point to is memory of this driver, as large as they say.
pub unsafe fn launch<A: KernelArgs>(
    driver: &Arc<dyn Driver>,
    kernel: Kernel,
    grid: [usize; 3],
    args: &A,
) -> Result<(), CudaError> {
    assert_eq!(kernel.args, A::NAME, "arguments of {}", kernel.name);
    if grid.contains(&0) {
        return Ok(());
    }
    assert!(grid[0] < 1 << 31 && grid[1] <= MAX_GRID_Y && grid[2] <= MAX_GRID_Y, "{} on a grid of {grid:?}", kernel.name);
    let launch = Launch { kernel, grid: grid.map(|n| n as u32), args: bytes_of(std::slice::from_ref(args)) };
    // SAFETY: the struct is the kernel's; the rest is the caller's promise.
    unsafe { driver.launch(&launch) }
}
