//! A GPU's driver that runs the kernels here, so that whole models run "on CUDA" without one.

use std::{
    collections::BTreeMap,
    ptr, slice,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use device::{
    cuda::{CudaError, Driver, Gpu, GpuMemory, Launch, MATMUL_WORKSPACE, Matmul, driver::HostPtr},
    kernel_args::{DevicePtr, ElementType},
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
    recordings: Mutex<Recordings>,
    matmuls: AtomicUsize,
}

#[derive(Default)]
struct Recordings {
    current: Option<Vec<Asked>>,
    all: BTreeMap<u64, Vec<Asked>>,
}

/// What is started, or recorded.
#[derive(Clone)]
enum Asked {
    Launch { kernel: &'static str, grid: [u32; 3], args: Vec<u64> },
    Matmul(Matmul),
}

impl EmulatedDriver {
    /// With as much memory as is asked for; its kernels' threads take their turns in this order.
    pub fn new(order: Order) -> Self {
        Self::with_memory(order, 1 << 40)
    }

    /// With so much memory.
    pub fn with_memory(order: Order, total_bytes: u64) -> Self {
        let gpu = Gpu { name: "emulated".into(), capability: (9, 0), multiprocessors: 1 };
        Self {
            gpu,
            order,
            total_bytes,
            fault: Mutex::default(),
            buffers: Mutex::default(),
            host: Mutex::default(),
            recordings: Mutex::default(),
            matmuls: AtomicUsize::new(0),
        }
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

    fn recordings(&self) -> MutexGuard<'_, Recordings> {
        self.recordings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many steps are recorded and not forgotten.
    pub fn num_recorded(&self) -> usize {
        self.recordings().all.len()
    }

    /// How many products of matrices have run, those of replayed steps included.
    pub fn num_matmuls(&self) -> usize {
        self.matmuls.load(Ordering::Relaxed)
    }

    fn ask(&self, asked: Asked) {
        if let Some(recording) = &mut self.recordings().current {
            recording.push(asked);
            return;
        }
        self.run(&asked);
    }

    fn run(&self, asked: &Asked) {
        match asked {
            Asked::Launch { kernel, grid, args } => {
                // SAFETY: the struct is the kernel's, and aligned; what the addresses lead to is checked by guard pages.
                unsafe { Kernel::named(kernel).run(grid.map(|n| n as usize), args.as_ptr().cast(), self.order) };
            }
            Asked::Matmul(matmul) => {
                self.matmuls.fetch_add(1, Ordering::Relaxed);
                self.multiply(matmul);
            }
        }
    }

    /// Runs `work` on memory that is checked to be of one live allocation.
    fn with<T>(&self, at: DevicePtr, bytes: usize, work: impl FnOnce(*mut u8) -> T) -> T {
        assert!(self.recordings().current.is_none(), "a copy in a recording");
        let buffers = self.buffers();
        let (start, (_, size)) = buffers.range(..=at).next_back().unwrap_or_else(|| panic!("{at:#x} was never allocated"));
        let offset = (at - start) as usize;
        assert!(offset + bytes <= *size, "{bytes} bytes at {offset} of device memory of {size}, or freed");
        work(at as *mut u8)
    }
}

impl EmulatedDriver {
    fn multiply(&self, matmul: &Matmul) {
        let Matmul { x, weight, element, rows, out_features, in_features, out_stride, scale, accumulate, .. } = *matmul;
        let (x, weight) =
            (self.operand(x, element, rows * in_features), self.operand(weight, element, out_features * in_features));
        self.with(matmul.workspace, MATMUL_WORKSPACE, |_| ());
        let mut line = vec![0.0_f32; out_features];
        for (row, x) in x.chunks_exact(in_features).enumerate() {
            let at = matmul.out + (row * out_stride * size_of::<f32>()) as u64;
            self.with(at, size_of_val(&line[..]), |_| ());
            // SAFETY: the range was checked; nothing else uses it meanwhile.
            let out = unsafe { slice::from_raw_parts_mut(at as *mut f32, out_features) };
            for (sum, weight) in line.iter_mut().zip(weight.chunks_exact(in_features)) {
                *sum = x.iter().zip(weight).map(|(x, w)| x * w).sum::<f32>() * scale;
            }
            for (out, sum) in out.iter_mut().zip(&line) {
                *out = if accumulate { *out + sum } else { *sum };
            }
        }
    }

    /// What a product reads.
    fn operand(&self, at: DevicePtr, element: ElementType, len: usize) -> Vec<f32> {
        assert!(at.is_multiple_of(16), "{at:#x} is not aligned");
        let bytes = if element == ElementType::F32 { 4 } else { 2 };
        let mut raw = vec![0; len * bytes];
        // SAFETY: the range is checked; the vector has room for it.
        self.with(at, raw.len(), |from| unsafe { ptr::copy_nonoverlapping(from, raw.as_mut_ptr(), raw.len()) });
        let value = |raw: &[u8]| match element {
            ElementType::F32 => f32::from_le_bytes(raw.try_into().expect("4 bytes")),
            ElementType::F16 => half::f16::from_le_bytes(raw.try_into().expect("2 bytes")).to_f32(),
            ElementType::BF16 => half::bf16::from_le_bytes(raw.try_into().expect("2 bytes")).to_f32(),
        };
        raw.chunks_exact(bytes).map(value).collect()
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
        let args = launch.args.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
        self.ask(Asked::Launch { kernel: launch.kernel.name, grid: launch.grid, args: args.collect() });
        Ok(())
    }

    fn check_matmul(&self) -> Result<(), CudaError> {
        Ok(())
    }

    unsafe fn matmul(&self, matmul: &Matmul) -> Result<(), CudaError> {
        self.ask(Asked::Matmul(*matmul));
        Ok(())
    }

    fn begin_recording(&self) -> Result<(), CudaError> {
        assert!(self.recordings().current.replace(Vec::new()).is_none(), "a recording in a recording");
        Ok(())
    }

    fn end_recording(&self) -> Result<u64, CudaError> {
        let Recordings { current, all } = &mut *self.recordings();
        let id = all.keys().next_back().map_or(1, |id| id + 1);
        all.insert(id, current.take().expect("a recording"));
        Ok(id)
    }

    unsafe fn replay(&self, recorded: u64) -> Result<(), CudaError> {
        self.check(true)?;
        let asked = self.recordings().all.get(&recorded).cloned();
        asked.expect("a recording that was not forgotten").iter().for_each(|asked| self.run(asked));
        Ok(())
    }

    fn forget(&self, recorded: u64) {
        assert!(self.recordings().all.remove(&recorded).is_some(), "forgotten twice");
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
