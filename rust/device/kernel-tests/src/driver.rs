//! A GPU's driver that runs the kernels here, so that whole models run "on CUDA" without one.

use std::{
    collections::BTreeMap,
    ptr, slice,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use device::{
    cuda::{CudaError, Driver, Gpu, GpuMemory, Launch},
    kernel_args::DevicePtr,
};

use crate::{Buffer, Kernel, Order};

/// Memory between guard pages, and kernels that run when they are started.
pub struct EmulatedDriver {
    gpu: Gpu,
    order: Order,
    buffers: Mutex<BTreeMap<DevicePtr, (Buffer, usize)>>,
}

impl EmulatedDriver {
    /// Its kernels' threads take their turns in this order.
    pub fn new(order: Order) -> Self {
        let memory = Ok(GpuMemory { total_bytes: 1 << 40, free_bytes: 1 << 40 });
        let gpu = Gpu { name: "emulated".into(), capability: (9, 0), multiprocessors: 1, memory };
        Self { gpu, order, buffers: Mutex::default() }
    }

    fn buffers(&self) -> MutexGuard<'_, BTreeMap<DevicePtr, (Buffer, usize)>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on memory that is checked to be of one live allocation.
    fn with<T>(&self, at: DevicePtr, bytes: usize, work: impl FnOnce(*mut u8) -> T) -> T {
        let buffers = self.buffers();
        let (start, (_, size)) = buffers.range(..=at).next_back().unwrap_or_else(|| panic!("{at:#x} was never allocated"));
        let offset = (at - start) as usize;
        assert!(offset + bytes <= *size, "{bytes} bytes at {offset} of device memory of {size}, or freed");
        work(at as *mut u8)
    }
}

impl Driver for EmulatedDriver {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn memory(&self) -> Result<GpuMemory, CudaError> {
        self.gpu.memory.clone()
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let buffer = Buffer::output::<u8>(bytes);
        let at = buffer.ptr();
        self.buffers().insert(at, (buffer, bytes));
        Ok(at)
    }

    fn free(&self, at: DevicePtr) {
        assert!(self.buffers().remove(&at).is_some(), "{at:#x} was freed twice, or never allocated");
    }

    fn zero(&self, at: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the range is of a live buffer, whose memory only kernels use, and none runs.
        self.with(at, bytes, |to| unsafe { ptr::write_bytes(to, 0, bytes) });
        Ok(())
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: as above; `from` is memory of the host.
        self.with(to, from.len(), |to| unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) });
        Ok(())
    }

    fn download(&self, to: &mut [u8], from: DevicePtr) -> Result<(), CudaError> {
        // SAFETY: as above.
        self.with(from, to.len(), |from| to.copy_from_slice(unsafe { slice::from_raw_parts(from, to.len()) }));
        Ok(())
    }

    fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        let mut copied = vec![0; bytes];
        self.download(&mut copied, from)?;
        self.upload(to, &copied)
    }

    fn time(&self, work: &mut dyn FnMut()) -> Result<Duration, CudaError> {
        let begin = Instant::now();
        work();
        Ok(begin.elapsed())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        let kernel = Kernel::named(launch.kernel.name);
        assert_eq!(kernel.args_bytes(), launch.args.len(), "arguments of {}", kernel.name());
        // SAFETY: the caller's promise; what the addresses lead to is checked by guard pages.
        unsafe { kernel.run(launch.grid.map(|n| n as usize), launch.args.as_ptr().cast(), self.order) };
        Ok(())
    }
}
