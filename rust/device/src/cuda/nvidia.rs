//! NVIDIA's driver, loaded at run time.

use std::ffi::{CStr, c_int};

use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUdevice_attribute},
};

use super::{CudaError, Gpu, GpuMemory};

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
        memory: memory(device),
    })
}

/// Free memory is only told to a thread with a context, which is made for the question.
fn memory(device: sys::CUdevice) -> Result<GpuMemory, CudaError> {
    let what = "asking how much memory is free";
    // SAFETY: the device was got from the driver; the context is released below.
    let context = unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed(what, e))?;
    // SAFETY: the context is retained.
    let info = unsafe { result::ctx::set_current(context) }.and_then(|()| result::mem_get_info());
    // SAFETY: it was retained above, once, and is no longer used.
    unsafe { result::ctx::set_current(std::ptr::null_mut()).and_then(|()| result::primary_ctx::release(device)) }
        .map_err(|e| failed(what, e))?;
    let (free, total) = info.map_err(|e| failed(what, e))?;
    Ok(GpuMemory { total_bytes: total as u64, free_bytes: free as u64 })
}

fn failed(what: &str, error: DriverError) -> CudaError {
    CudaError::Driver { what: what.into(), code: code(error) }
}

/// Such as "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)".
fn code(error: DriverError) -> String {
    let text =
        |text: Result<&CStr, DriverError>| text.map_or_else(|_| format!("{:?}", error.0), |t| t.to_string_lossy().into_owned());
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}
