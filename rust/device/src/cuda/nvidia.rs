//! NVIDIA's driver, loaded at run time.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_int, c_void},
    ptr::null_mut,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cudarc::driver::{
    result::{self, DriverError, stream::StreamKind},
    sys::{self, CUdevice_attribute},
};

use crate::kernel_args::DevicePtr;

use super::{
    CudaError, EMBEDDED, Gpu, GpuMemory, LibraryPaths,
    cublaslt::CublasLt,
    driver::{Driver, HostPtr, Launch, Matmul},
    kernels::Kernel,
    ring::{CopyStream, UploadRing},
    slabs::{Given, MAX_PIECE, SLAB_BYTES, Slabs},
    turns::Turns,
};

/// Dynamic shared memory beyond this is asked for by an attribute of the function.
const STATIC_SHARED_BYTES: u32 = 48 << 10;
/// Virtual architecture from which on kernels wait by themselves (`wait_for_inputs` in kernels/cuda.cuh).
const OVERLAPS: c_int = 90;
/// Page-locked memory that copies to the host go through.
const DOWNLOAD_BYTES: usize = 4 << 20;

/// The CUDA version that the driver serves, and its GPUs.
///
/// Errors: [`CudaError::NoDriver`] when there is none or it does not start.
pub fn gpus() -> Result<((u32, u32), Vec<Gpu>), CudaError> {
    // SAFETY: loading the driver's library has no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver("libcuda.so.1 is in none of the system's library folders".into()));
    }
    result::init().map_err(|e| CudaError::NoDriver(format!("libcuda.so.1 is there, but does not start: {}", code(e))))?;
    let mut version: c_int = 0;
    // SAFETY: `version` is good for the write.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|e| failed("asking the driver's version", e))?;
    let version = version.cast_unsigned();
    let count = result::device::get_count().map_err(|e| failed("counting GPUs", e))?;
    let gpus = (0..count).map(gpu).collect::<Result<_, _>>()?;
    Ok(((version / 1000, version % 1000 / 10), gpus))
}

fn gpu(ordinal: c_int) -> Result<Gpu, CudaError> {
    let what = format!("asking about GPU {ordinal}");
    let device = result::device::get(ordinal).map_err(|e| failed(&what, e))?;
    let attribute = |attribute| {
        // SAFETY: the device was just got.
        unsafe { result::device::get_attribute(device, attribute) }.map(i32::cast_unsigned).map_err(|e| failed(&what, e))
    };
    let capability = (
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(Gpu {
        name: result::device::get_name(device).map_err(|e| failed(&what, e))?,
        capability,
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

/// The memory of a GPU that [`gpus`] has shown, measured now. Only a thread with a context is told: where nobody has one there,
/// it is made for the question, which takes a moment and some of that memory.
///
/// Errors: what the driver refuses.
pub fn gpu_memory(ordinal: usize) -> Result<GpuMemory, CudaError> {
    let what = format!("asking how much memory of GPU {ordinal} is free");
    let device = result::device::get(ordinal as c_int).map_err(|e| failed(&what, e))?;
    // SAFETY: the device was got from the driver; the context is released below.
    let context = unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed(&what, e))?;
    let info = within(context, result::mem_get_info);
    // SAFETY: it was retained above, once, and is no longer used.
    unsafe { result::primary_ctx::release(device) }.map_err(|e| failed(&what, e))?;
    let (free, total) = info.map_err(|e| failed(&what, e))?;
    Ok(GpuMemory { total_bytes: total as u64, free_bytes: free as u64 })
}

/// Runs calls of the driver in a context that is retained. The thread is left with the context that it had, or with none: it may
/// be somebody else's, such as PyTorch's on another GPU.
fn within<T>(context: sys::CUcontext, call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
    let before = result::ctx::get_current()?.unwrap_or(null_mut());
    if before == context {
        return call();
    }
    // SAFETY: the caller's promise.
    unsafe { result::ctx::set_current(context)? };
    let answer = call();
    // SAFETY: it was current until now. What cannot be current again was destroyed by its owner meanwhile.
    let _ = unsafe { result::ctx::set_current(before) };
    answer
}

/// Runs calls that a thread is refused while another one records a graph, PyTorch for example, because they could disturb it:
/// what allocates, loads or waits. Ours touch no stream but our own.
fn beside_recordings<T>(call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let mut exchange = || {
        // SAFETY: `mode` is good for reading and writing.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result()
    };
    exchange()?;
    let answer = call();
    // Both modes are the driver's own, so it takes the first one back.
    let _ = exchange();
    answer
}

/// One GPU through NVIDIA's driver, in its primary context.
pub struct NvidiaDriver {
    gpu: Gpu,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// Of steps, with their copies. It neither waits for the default stream nor is waited for: work there would end a recording
    /// of this stream, and work here one of somebody else's.
    stream: sys::CUstream,
    /// Made with the first copy.
    uploads: Mutex<Option<UploadRing>>,
    upload_marks: [sys::CUevent; UploadRing::SEGMENTS],
    downloads: Mutex<Option<HostPtr>>,
    recorded: Mutex<Recorded>,
    /// Of those that ask something of `stream`.
    turns: Turns,
    slabs: Mutex<Slabs>,
    /// Of copies beside the steps.
    copies: sys::CUstream,
    /// What is done of the steps, and of the copies, when one is to wait for the other.
    steps_done: sys::CUevent,
    copies_done: sys::CUevent,
    /// By kernel; a module is loaded with the first of its kernels.
    functions: Mutex<Functions>,
    products: Result<CublasLt, CudaError>,
}

/// Graphs by their number.
#[derive(Default)]
struct Recorded {
    last: u64,
    graphs: HashMap<u64, sys::CUgraphExec>,
}

#[derive(Default)]
struct Functions {
    modules: HashMap<&'static str, sys::CUmodule>,
    functions: HashMap<&'static str, Function>,
}

/// A kernel that is loaded.
#[derive(Clone, Copy)]
struct Function {
    handle: sys::CUfunction,
    /// Whether it waits for what the kernel before it writes, so that it may begin while that one ends: code for [`OVERLAPS`] on,
    /// but not what the driver makes of PTX for older GPUs.
    waits: bool,
}

// SAFETY: the driver's handles may be used from any thread; every call makes the context current first.
unsafe impl Send for NvidiaDriver {}
// SAFETY: as above; the maps are behind a lock.
unsafe impl Sync for NvidiaDriver {}

impl NvidiaDriver {
    /// The GPU of that number, with the libraries that are found there.
    ///
    /// Errors: those of [`require`](super::require), and what the driver refuses. A library that is missing is none.
    pub fn new(ordinal: usize, libraries: &LibraryPaths) -> Result<Self, CudaError> {
        let gpu = super::require(&super::survey(), ordinal)?.clone();
        let device = result::device::get(ordinal as c_int).map_err(|e| failed("opening the GPU", e))?;
        // SAFETY: the device was just got; the context is released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed("opening the GPU", e))?;
        let opened = within(context, || {
            let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
            let stream = || result::stream::create(StreamKind::NonBlocking);
            let mut upload_marks = [null_mut(); UploadRing::SEGMENTS];
            for mark in &mut upload_marks {
                *mark = event()?;
            }
            Ok(Self {
                gpu,
                device,
                context,
                stream: stream()?,
                uploads: Mutex::default(),
                upload_marks,
                downloads: Mutex::default(),
                recorded: Mutex::default(),
                turns: Turns::default(),
                slabs: Mutex::default(),
                copies: stream()?,
                steps_done: event()?,
                copies_done: event()?,
                functions: Mutex::default(),
                products: CublasLt::load(libraries),
            })
        });
        opened.map_err(|e| {
            // SAFETY: it was retained above, once, and is no longer used.
            let _ = unsafe { result::primary_ctx::release(device) };
            failed("making streams", e)
        })
    }

    /// Runs a call of the driver in this context.
    fn call<T>(&self, what: &str, call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, CudaError> {
        within(self.context, call).map_err(|e| failed(what, e))
    }

    /// The same of a call that allocates, loads or waits; see [`beside_recordings`].
    fn settle<T>(&self, what: &str, call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, CudaError> {
        self.call(what, || beside_recordings(call))
    }

    fn finish_steps(&self, what: &str) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as this.
        self.settle(what, || unsafe { result::stream::synchronize(self.stream) })
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is asked of a stream from now on waits for what another one was asked for so far.
    fn order(&self, event: sys::CUevent, first: sys::CUstream, second: sys::CUstream) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: streams and events live as long as this.
        self.call("ordering steps and copies", || unsafe {
            result::event::record(event, first)?;
            result::stream::wait_event(second, event, flags)
        })
    }

    fn function(&self, kernel: Kernel) -> Result<Function, CudaError> {
        let Functions { modules, functions } = &mut *self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(kernel.name) {
            return Ok(*function);
        }
        let what = format!("loading kernel {}", kernel.name);
        let embedded = EMBEDDED.modules.iter().find(|module| module.kernels.contains(&kernel.name));
        let embedded = embedded.ok_or_else(|| CudaError::NoSuchKernel(kernel.name.into()))?;
        let module = if let Some(module) = modules.get(embedded.name) {
            *module
        } else {
            let image = embedded.aligned();
            // SAFETY: the image is a whole fatbin, as nvcc wrote it. The driver has read it when this returns.
            let load = || unsafe { result::module::load_data(image.as_ptr().cast()) };
            *modules.entry(embedded.name).or_insert(self.settle(&what, load)?)
        };
        let name = CString::new(kernel.name).map_err(|_| CudaError::NoSuchKernel(kernel.name.into()))?;
        // SAFETY: the module is loaded and never unloaded before the context is released.
        let handle = self.settle(&what, || unsafe { result::module::get_function(module, name) })?;
        let architecture = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: the function was just got.
        let of = self.settle(&what, || unsafe { result::function::get_function_attribute(handle, architecture) })?;
        if kernel.shared_bytes > STATIC_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just got.
            self.settle(&what, || unsafe {
                result::function::set_function_attribute(handle, attribute, kernel.shared_bytes as c_int)
            })?;
        }
        let function = Function { handle, waits: of >= OVERLAPS };
        functions.insert(kernel.name, function);
        Ok(function)
    }
}

impl NvidiaDriver {
    fn slabs(&self) -> MutexGuard<'_, Slabs> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// So many bytes; `None`: there are not as many.
    fn allocated(&self, bytes: usize) -> Result<Option<DevicePtr>, CudaError> {
        // SAFETY: malloc_sync has no preconditions in a current context.
        self.settle("allocating memory", || match unsafe { result::malloc_sync(bytes) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            other => other.map(Some),
        })
    }
}

impl Driver for NvidiaDriver {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn memory(&self) -> Result<GpuMemory, CudaError> {
        let (free, total) = self.settle("asking how much memory is free", result::mem_get_info)?;
        Ok(GpuMemory { total_bytes: total as u64, free_bytes: free as u64 })
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        if bytes <= MAX_PIECE {
            let mut slabs = self.slabs();
            if let Some(at) = slabs.take(bytes) {
                return Ok(at);
            }
            if let Some(slab) = self.allocated(SLAB_BYTES)? {
                slabs.add(slab);
                return Ok(slabs.take(bytes).expect("room in a new slab"));
            }
        }
        let free_bytes = || self.memory().map_or(0, |memory| memory.free_bytes);
        let allocated = self.allocated(bytes)?;
        allocated.ok_or_else(|| CudaError::OutOfMemory { needed_bytes: bytes as u64, free_bytes: free_bytes() })
    }

    fn free(&self, at: DevicePtr) {
        let at = match self.slabs().give(at) {
            Given::Kept => return,
            Given::Slab(slab) => slab,
            Given::Stranger => at,
        };
        let _asking = self.turns.ask();
        // What a lost device refuses is gone with it.
        let _ = self.finish_steps("freeing memory").and_then(|()| self.finish_copies());
        // SAFETY: it came from `allocated`, and what was asked for before is done.
        let _ = self.settle("freeing memory", || unsafe { result::free_sync(at) });
    }

    fn zero(&self, at: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        let _asking = self.turns.ask();
        // SAFETY: the range was allocated.
        self.call("zeroing memory", || unsafe { result::memset_d8_async(at, 0, bytes, self.stream) })
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), CudaError> {
        let _asking = self.turns.ask();
        let mut uploads = self.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = match &mut *uploads {
            Some(ring) => ring,
            // SAFETY: the memory is as large and the ring's own; it is freed when this is dropped.
            none => none.insert(unsafe { UploadRing::new(self.allocate_host(UploadRing::BYTES)?) }),
        };
        // SAFETY: the range was allocated.
        unsafe { ring.upload(self, to, from) }
    }

    fn download(&self, to: &mut [u8], from: DevicePtr) -> Result<(), CudaError> {
        let _asking = self.turns.ask();
        let mut downloads = self.downloads.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = match *downloads {
            Some(staging) => staging,
            None => *downloads.insert(self.allocate_host(DOWNLOAD_BYTES)?),
        };
        let what = "copying from the GPU";
        for (index, chunk) in to.chunks_mut(DOWNLOAD_BYTES).enumerate() {
            let from = from + (index * DOWNLOAD_BYTES) as u64;
            // SAFETY: the range was allocated; nothing else uses the staging memory, and the copy is waited for.
            let copy = || unsafe { sys::cuMemcpyDtoHAsync_v2(staging.0.cast(), from, chunk.len(), self.stream) }.result();
            self.call(what, copy)?;
            self.finish_steps(what)?;
            // SAFETY: as many bytes were just written.
            chunk.copy_from_slice(unsafe { std::slice::from_raw_parts(staging.0, chunk.len()) });
        }
        Ok(())
    }

    fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        let _asking = self.turns.ask();
        // SAFETY: both ranges were allocated.
        self.call("copying on the GPU", || unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) })
    }

    fn time(&self, work: &mut dyn FnMut()) -> Result<Duration, CudaError> {
        let (what, stream) = ("reading the GPU's clock", self.stream);
        let event = || self.settle(what, || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let (begin, end) = (event()?, event()?);
        // SAFETY: the events were just made.
        let record = |event| self.call(what, || unsafe { result::event::record(event, stream) });
        record(begin)?;
        work();
        record(end)?;
        // SAFETY: as above; both were recorded, and are not used any more once they are destroyed.
        let milliseconds = self.settle(what, || unsafe {
            result::event::synchronize(end)?;
            let elapsed = result::event::elapsed(begin, end);
            result::event::destroy(begin).and_then(|()| result::event::destroy(end)).and(elapsed)
        })?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        let _asking = self.turns.ask();
        let Function { handle, waits } = self.function(launch.kernel)?;
        let [x, y, z] = launch.grid;
        let mut params = [launch.args.as_ptr().cast_mut().cast::<c_void>()];
        let mut overlaps = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.kernel.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.kernel.shared_bytes,
            hStream: self.stream,
            attrs: &raw mut overlaps,
            numAttrs: waits.into(),
        };
        // SAFETY: the caller's promise; the driver copies the argument, which it does not change, before it returns. A kernel
        // that may begin early waits before it reads what others write.
        let start = || unsafe { sys::cuLaunchKernelEx(&raw const config, handle, params.as_mut_ptr(), null_mut()) }.result();
        self.call(&format!("starting kernel {}", launch.kernel.name), start)
    }

    fn begin_recording(&self) -> Result<(), CudaError> {
        self.turns.begin_recording();
        // Kernels that are first needed may be loaded meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as this.
        let begun = self.call("recording a step", || unsafe { result::stream::begin_capture(self.stream, mode) });
        begun.inspect_err(|_| self.turns.end_recording())
    }

    fn end_recording(&self) -> Result<u64, CudaError> {
        let what = "recording a step";
        // SAFETY: the stream lives as long as this.
        let graph = self.call(what, || unsafe { result::stream::end_capture(self.stream) });
        self.turns.end_recording();
        let graph = graph?;
        if graph.is_null() {
            return Err(CudaError::Driver { what: what.into(), code: "that the recording is no good".into() });
        }
        let mut executable = null_mut();
        // SAFETY: the graph was just recorded, and its executable form does not need it.
        let made = self.settle(what, || unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0).result();
            result::graph::destroy(graph).and(made)
        });
        made?;
        let Recorded { last, graphs } = &mut *self.recorded();
        *last += 1;
        graphs.insert(*last, executable);
        Ok(*last)
    }

    unsafe fn replay(&self, recorded: u64) -> Result<(), CudaError> {
        let graph = self.recorded().graphs[&recorded];
        // SAFETY: the caller's promise; the graph is forgotten only by `forget`.
        self.call("replaying a step", || unsafe { result::graph::launch(graph, self.stream) })
    }

    fn forget(&self, recorded: u64) {
        if let Some(graph) = self.recorded().graphs.remove(&recorded) {
            // SAFETY: it was instantiated and is in no other list. The driver waits for what runs of it.
            let _ = self.settle("forgetting a step", || unsafe { result::graph::exec_destroy(graph) });
        }
    }

    fn check_matmul(&self) -> Result<(), CudaError> {
        self.products.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    unsafe fn matmul(&self, matmul: &Matmul) -> Result<(), CudaError> {
        let _asking = self.turns.ask();
        let products = self.products.as_ref().map_err(Clone::clone)?;
        // SAFETY: the caller's promise; the context is current.
        self.call("multiplying", || Ok(unsafe { products.matmul(matmul, self.stream.cast()) }))?
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostPtr, CudaError> {
        // SAFETY: allocating has no preconditions in a current context.
        let at = self.settle("allocating page-locked memory of the host", || unsafe { result::malloc_host(bytes, 0) })?;
        Ok(HostPtr(at.cast()))
    }

    fn free_host(&self, at: HostPtr) {
        // SAFETY: `at` came from `allocate_host`, and no copy uses it.
        let _ = self.settle("freeing memory of the host", || unsafe { result::free_host(at.0.cast()) });
    }

    fn copies_after_steps(&self) -> Result<(), CudaError> {
        self.order(self.steps_done, self.stream, self.copies)
    }

    fn steps_after_copies(&self) -> Result<(), CudaError> {
        self.order(self.copies_done, self.copies, self.stream)
    }

    fn finish_copies(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as this.
        self.settle("waiting for copies of blocks", || unsafe { result::stream::synchronize(self.copies) })
    }

    unsafe fn copy_out(&self, to: HostPtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let copy = || unsafe { sys::cuMemcpyDtoHAsync_v2(to.0.cast(), from, bytes, self.copies) }.result();
        self.call("copying blocks from the GPU", copy)
    }

    unsafe fn copy_in(&self, to: DevicePtr, from: HostPtr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let copy = || unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.0.cast_const().cast(), bytes, self.copies) }.result();
        self.call("copying blocks to the GPU", copy)
    }
}

impl CopyStream for NvidiaDriver {
    unsafe fn copy(&self, to: DevicePtr, from: HostPtr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let copy = || unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.0.cast_const().cast(), bytes, self.stream) }.result();
        self.call("copying to the GPU", copy)
    }

    fn mark(&self, segment: usize) -> Result<(), CudaError> {
        // SAFETY: stream and events live as long as this.
        self.call("copying to the GPU", || unsafe { result::event::record(self.upload_marks[segment], self.stream) })
    }

    fn wait(&self, segment: usize) -> Result<(), CudaError> {
        // SAFETY: as above.
        self.settle("copying to the GPU", || unsafe { result::event::synchronize(self.upload_marks[segment]) })
    }
}

impl Drop for NvidiaDriver {
    fn drop(&mut self) {
        // Copies may still be under way; of a lost device none is.
        let _ = self.finish_steps("closing the GPU");
        let uploads = self.uploads.get_mut().unwrap_or_else(PoisonError::into_inner).take().map(|ring| ring.memory());
        let downloads = self.downloads.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        for memory in [uploads, downloads].into_iter().flatten() {
            self.free_host(memory);
        }
        let products = std::mem::replace(&mut self.products, Err(CudaError::NoDriver("the GPU is closed".into())));
        let _ = self.settle("closing the GPU", || {
            // What was made in the context goes before it.
            drop(products);
            for event in self.upload_marks.into_iter().chain([self.steps_done, self.copies_done]) {
                // SAFETY: all were made once, and nothing that was made in the context outlives this.
                unsafe { result::event::destroy(event)? };
            }
            // SAFETY: as above.
            unsafe { result::stream::destroy(self.stream).and_then(|()| result::stream::destroy(self.copies)) }
        });
        // SAFETY: as above.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

fn failed(what: &str, error: DriverError) -> CudaError {
    use sys::CUresult as Code;
    let (what, name) = (what.to_owned(), code(error));
    match error.0 {
        Code::CUDA_ERROR_ILLEGAL_ADDRESS
        | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | Code::CUDA_ERROR_MISALIGNED_ADDRESS
        | Code::CUDA_ERROR_INVALID_PC
        | Code::CUDA_ERROR_ASSERT
        | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
        | Code::CUDA_ERROR_LAUNCH_FAILED
        | Code::CUDA_ERROR_LAUNCH_TIMEOUT
        | Code::CUDA_ERROR_ECC_UNCORRECTABLE
        | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
        | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED => CudaError::Lost { what, code: name },
        _ => CudaError::Driver { what, code: name },
    }
}

/// Such as "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)".
fn code(error: DriverError) -> String {
    let text =
        |text: Result<&CStr, DriverError>| text.map_or_else(|_| format!("{:?}", error.0), |t| t.to_string_lossy().into_owned());
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}
