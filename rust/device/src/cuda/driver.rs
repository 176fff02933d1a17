//! What is asked of a GPU's driver: memory, copies and launches, in the order of one stream.
//!
//! [`NvidiaDriver`](super::NvidiaDriver) is the real one. Tests bring their own: one that records, one that runs the kernels on
//! the CPU.

use std::{sync::Arc, time::Duration};

use crate::kernel_args::{
    AddExpertsArgs, AttentionArgs, AttentionGateArgs, AttentionMergeArgs, CausalConvArgs, CopyBlocksArgs, DequantizeArgs,
    DevicePtr, ElementType, EmbedArgs, FillBiasArgs, GatedActivationArgs, GatedDeltaArgs, GatedNormArgs, GatherRowsArgs,
    GemmArgs, GemvArgs, GroupTile, GroupedArgs, LatentAttentionArgs, LatentCacheArgs, LayerInputsArgs, LoraArgs, LoraDelta,
    LoraEmbedArgs, LoraEmbedding, LoraRow, LoraTile, Mamba2Args, MambaArgs, NormArgs, PackedDequantizeArgs, PackedEmbedArgs,
    RecurrentRequest, RopeAndCacheArgs, RoundValuesArgs, RouteArgs, SampleArgs, SampleRow, ScaleAndClampArgs, StreamRowsArgs,
    StreamsArgs, TopLogprobsArgs,
};

use super::{CudaError, Gpu, GpuMemory, kernels::Kernel};

/// A kernel's run.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// What runs, with its threads and shared memory.
    pub kernel: Kernel,
    /// CTAs in x, y, z; none is 0.
    pub grid: [u32; 3],
    /// The kernel's argument struct as bytes.
    pub args: &'a [u8],
}

/// A product of matrices: `out = (x @ weight^T) * scale`, or that added to `out`; sums and `out` are f32.
///
/// Addresses are multiples of 16, and so are the bytes of a row of `x` and `weight`.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// `[rows, in_features]` of `element`.
    pub x: DevicePtr,
    /// `[out_features, in_features]` of `element`.
    pub weight: DevicePtr,
    /// `[rows, out_stride]`, of which the first `out_features` columns.
    pub out: DevicePtr,
    /// How `x` and `weight` are stored.
    pub element: ElementType,
    /// Rows of `x`; more than 0, as the others.
    pub rows: usize,
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of both.
    pub in_features: usize,
    /// Values from one row of `out` to the next.
    pub out_stride: usize,
    /// Multiplied into the product.
    pub scale: f32,
    /// Whether `out` is added to.
    pub accumulate: bool,
    /// [`MATMUL_WORKSPACE`] bytes that nothing else uses meanwhile, at a multiple of 256.
    pub workspace: DevicePtr,
}

/// Bytes that [`Driver::matmul`] works in.
pub const MATMUL_WORKSPACE: usize = 32 << 20;

/// An address in page-locked memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPtr(pub *mut u8);

// SAFETY: an address; whoever follows it says why that is right.
unsafe impl Send for HostPtr {}

/// A GPU, from which one thread at a time computes. Everything happens in the order in which it was asked for: the order of the
/// steps. Only [`Self::copy_out`] and [`Self::copy_in`] have an order of their own beside it, which meets that one where it is
/// told to.
///
/// Other threads load adapters beside the steps, and give their memory back: what they ask for waits while a step is recorded.
pub trait Driver: Send + Sync {
    /// What the GPU is.
    fn gpu(&self) -> &Gpu;

    /// Its memory at the moment.
    fn memory(&self) -> Result<GpuMemory, CudaError>;

    /// So many bytes, more than 0, at a multiple of 256; their values are anything.
    ///
    /// Errors: [`CudaError::OutOfMemory`].
    fn allocate(&self, bytes: usize) -> Result<DevicePtr, CudaError>;

    /// Gives back what [`Self::allocate`] gave, once everything that was asked for before is done.
    fn free(&self, at: DevicePtr);

    /// Fills memory with zero bytes.
    fn zero(&self, at: DevicePtr, bytes: usize) -> Result<(), CudaError>;

    /// Copies to the GPU; `from` may change as soon as this returns.
    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), CudaError>;

    /// Copies from the GPU and waits for it.
    fn download(&self, to: &mut [u8], from: DevicePtr) -> Result<(), CudaError>;

    /// Copies from one place of the GPU to another.
    fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError>;

    /// How long the GPU is at what `work` asks for; waits for it.
    fn time(&self, work: &mut dyn FnMut()) -> Result<Duration, CudaError>;

    /// Starts a kernel.
    ///
    /// # Safety
    /// The arguments are the kernel's struct, and the memory that they point to is as large as it says, until the kernel is done.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError>;

    /// Whether [`Self::matmul`] works.
    ///
    /// Errors: [`CudaError::MissingLibrary`], and what the library says that does not start.
    fn check_matmul(&self) -> Result<(), CudaError>;

    /// Starts a product.
    ///
    /// # Safety
    /// The memory is as large as the shapes say, until the product is done.
    unsafe fn matmul(&self, matmul: &Matmul) -> Result<(), CudaError>;

    /// From now on, kernels and products are recorded instead of started; nothing else may be asked for.
    fn begin_recording(&self) -> Result<(), CudaError>;

    /// Ends the recording, also one that went wrong, and gives what was recorded a number.
    fn end_recording(&self) -> Result<u64, CudaError>;

    /// Starts what was recorded, in its order.
    ///
    /// # Safety
    /// The memory that the arguments point to is still as large as they say, until everything is done.
    unsafe fn replay(&self, recorded: u64) -> Result<(), CudaError>;

    /// Forgets a recording, once everything that was asked for before is done.
    fn forget(&self, recorded: u64);

    /// So many bytes of page-locked memory of the host, more than 0; their values are anything.
    fn allocate_host(&self, bytes: usize) -> Result<HostPtr, CudaError>;

    /// Gives back what [`Self::allocate_host`] gave. No copy that is not finished uses it.
    fn free_host(&self, at: HostPtr);

    /// Copies that are asked for from now on begin when what was asked of the steps so far is done.
    fn copies_after_steps(&self) -> Result<(), CudaError>;

    /// What is asked of the steps from now on begins when the copies so far are done.
    fn steps_after_copies(&self) -> Result<(), CudaError>;

    /// Waits until the copies so far are done.
    fn finish_copies(&self) -> Result<(), CudaError>;

    /// Begins to copy from the GPU, beside the steps.
    ///
    /// # Safety
    /// Both are memory of this driver with so many bytes, and nobody touches `to` until the copy is done.
    unsafe fn copy_out(&self, to: HostPtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError>;

    /// Begins to copy to the GPU, beside the steps.
    ///
    /// # Safety
    /// Both are memory of this driver with so many bytes, and nobody writes to `from` until the copy is done.
    unsafe fn copy_in(&self, to: DevicePtr, from: HostPtr, bytes: usize) -> Result<(), CudaError>;
}

/// Memory of a GPU, given back when it is dropped.
pub struct DeviceMemory {
    driver: Arc<dyn Driver>,
    at: DevicePtr,
    bytes: usize,
}

impl DeviceMemory {
    /// So many bytes, at least 16; their values are anything.
    pub fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.next_multiple_of(16).max(16);
        Ok(Self { driver: Arc::clone(driver), at: driver.allocate(bytes)?, bytes })
    }

    /// Zero bytes.
    pub fn zeroed(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, CudaError> {
        let memory = Self::new(driver, bytes)?;
        driver.zero(memory.at, memory.bytes)?;
        Ok(memory)
    }

    /// A copy of `values`, padded to a multiple of 16 bytes.
    pub fn of<T: Plain>(driver: &Arc<dyn Driver>, values: &[T]) -> Result<Self, CudaError> {
        let memory = Self::new(driver, size_of_val(values))?;
        memory.upload(0, values)?;
        Ok(memory)
    }

    /// The address of its first byte.
    pub fn at(&self) -> DevicePtr {
        self.at
    }

    /// Its size, the padding included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies in, from byte `offset` on.
    ///
    /// # Panics
    /// When it is too small.
    pub fn upload<T: Plain>(&self, offset: usize, values: &[T]) -> Result<(), CudaError> {
        if values.is_empty() {
            return Ok(());
        }
        self.driver.upload(self.range(offset, size_of_val(values)), bytes_of(values))
    }

    /// Copies out, from byte `offset` on.
    ///
    /// # Panics
    /// When it is too small.
    pub fn download<T: Plain>(&self, offset: usize, values: &mut [T]) -> Result<(), CudaError> {
        if values.is_empty() {
            return Ok(());
        }
        let at = self.range(offset, size_of_val(values));
        self.driver.download(bytes_of_mut(values), at)
    }

    /// The address of so many bytes from byte `offset` on.
    ///
    /// # Panics
    /// When it is too small.
    pub fn range(&self, offset: usize, bytes: usize) -> DevicePtr {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        assert!(end.is_some(), "{bytes} bytes at {offset} of device memory of {} bytes", self.bytes);
        self.at + offset as u64
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.driver.free(self.at);
    }
}

/// A type whose values are any bytes of its size.
///
/// # Safety
/// No padding, no invalid bit patterns.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty),* $(,)?) => {$(
        // SAFETY: numbers, or a `repr(C)` struct of numbers whose sizes leave no padding (`no_struct_is_padded` adds them up).
        unsafe impl Plain for $type {}
    )*};
}
plain!(u8, u32, u64, i64, f32, crate::kernel_args::AttentionWork, crate::kernel_args::AttentionMerge);
plain!(AttentionArgs, AttentionMergeArgs, CopyBlocksArgs, EmbedArgs, GatedActivationArgs, GatherRowsArgs);
plain!(GemmArgs, PackedDequantizeArgs, PackedEmbedArgs);
plain!(LayerInputsArgs, ScaleAndClampArgs, StreamRowsArgs, StreamsArgs);
plain!(DequantizeArgs, FillBiasArgs, GemvArgs, NormArgs, RopeAndCacheArgs, RoundValuesArgs);
plain!(SampleArgs, SampleRow, TopLogprobsArgs);
plain!(AddExpertsArgs, GroupTile, GroupedArgs, RouteArgs);
plain!(LatentAttentionArgs, LatentCacheArgs);
plain!(LoraArgs, LoraDelta, LoraEmbedArgs, LoraEmbedding, LoraRow, LoraTile);
plain!(CausalConvArgs, GatedDeltaArgs, GatedNormArgs, Mamba2Args, MambaArgs, RecurrentRequest, AttentionGateArgs);

/// The values as they lie in memory.
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a `Plain` type has no padding; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

/// The values as they lie in memory, to be written to.
pub fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: a `Plain` type has no padding, and any bytes are one of its values; the length is that of the slice.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), size_of_val(values)) }
}
