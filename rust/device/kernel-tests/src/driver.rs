//! A GPU's driver that runs the kernels here, so that whole models run "on CUDA" without one.

use std::{
    collections::BTreeMap,
    ptr, slice,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use device::{
    cuda::{CudaError, Driver, Gpu, GpuMemory, Launch, driver::HostPtr},
    kernel_args::DevicePtr,
};

use crate::{Buffer, Kernel, Order};

/// Memory between guard pages, and kernels that run when they are started.
pub struct EmulatedDriver {
    gpu: Gpu,
    order: Order,
    total_bytes: u64,
    fault: Mutex<Option<CudaError>>,
    buffers: Mutex<BTreeMap<DevicePtr, (Buffer, usize)>>,
    /// Page-locked memory, by its address.
    host: Mutex<BTreeMap<HostPtr, Buffer>>,
}

impl EmulatedDriver {
    /// With as much memory as is asked for; its kernels' threads take their turns in this order.
    pub fn new(order: Order) -> Self {
        Self::with_memory(order, 1 << 40)
    }

    /// With so much memory.
    pub fn with_memory(order: Order, total_bytes: u64) -> Self {
        let memory = Ok(GpuMemory { total_bytes, free_bytes: total_bytes });
        let gpu = Gpu { name: "emulated".into(), capability: (9, 0), multiprocessors: 1, memory };
        Self { gpu, order, total_bytes, fault: Mutex::default(), buffers: Mutex::default(), host: Mutex::default() }
    }

    /// The next launch gives this error; after [`CudaError::Lost`], so does every call.
    pub fn fail(&self, error: CudaError) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    fn check(&self, launches: bool) -> Result<(), CudaError> {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        match &*fault {
            Some(error @ CudaError::Lost { .. }) => Err(error.clone()),
            Some(_) if launches => fault.take().map_or(Ok(()), Err),
            _ => Ok(()),
        }
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
        self.check(false)?;
        let used: usize = self.buffers().values().map(|(_, bytes)| bytes).sum();
        Ok(GpuMemory { total_bytes: self.total_bytes, free_bytes: self.total_bytes - used as u64 })
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let GpuMemory { free_bytes, .. } = self.memory()?;
        if bytes as u64 > free_bytes {
            return Err(CudaError::OutOfMemory { needed_bytes: bytes as u64, free_bytes });
        }
        let buffer = Buffer::output::<u8>(bytes);
        let at = buffer.ptr();
        self.buffers().insert(at, (buffer, bytes));
        Ok(at)
    }

    fn free(&self, at: DevicePtr) {
        assert!(self.buffers().remove(&at).is_some(), "{at:#x} was freed twice, or never allocated");
    }

    fn zero(&self, at: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.check(false)?;
        // SAFETY: the range is of a live buffer, whose memory only kernels use, and none runs.
        self.with(at, bytes, |to| unsafe { ptr::write_bytes(to, 0, bytes) });
        Ok(())
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), CudaError> {
        self.check(false)?;
        // SAFETY: as above; `from` is memory of the host.
        self.with(to, from.len(), |to| unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) });
        Ok(())
    }

    fn download(&self, to: &mut [u8], from: DevicePtr) -> Result<(), CudaError> {
        self.check(false)?;
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
        self.check(true)?;
        let kernel = Kernel::named(launch.kernel.name);
        assert_eq!(kernel.args_bytes(), launch.args.len(), "arguments of {}", kernel.name());
        // SAFETY: the caller's promise; what the addresses lead to is checked by guard pages.
        unsafe { kernel.run(launch.grid.map(|n| n as usize), launch.args.as_ptr().cast(), self.order) };
        Ok(())
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostPtr, CudaError> {
        self.check(false)?;
        let buffer = Buffer::output::<u8>(bytes);
        let at = HostPtr(buffer.ptr() as *mut u8);
        self.host.lock().unwrap_or_else(PoisonError::into_inner).insert(at, buffer);
        Ok(at)
    }

    fn free_host(&self, at: HostPtr) {
        let freed = self.host.lock().unwrap_or_else(PoisonError::into_inner).remove(&at);
        assert!(freed.is_some(), "{at:?} was freed twice, or never allocated");
    }

    // Copies are done when they are asked for, as steps are.
    fn copies_after_steps(&self) -> Result<(), CudaError> {
        self.check(false)
    }

    fn steps_after_copies(&self) -> Result<(), CudaError> {
        self.check(false)
    }

    fn finish_copies(&self) -> Result<(), CudaError> {
        self.check(false)
    }

    unsafe fn copy_out(&self, to: HostPtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.download(unsafe { slice::from_raw_parts_mut(to.0, bytes) }, from)
    }

    unsafe fn copy_in(&self, to: DevicePtr, from: HostPtr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.upload(to, unsafe { slice::from_raw_parts(from.0, bytes) })
    }
}
