//! The GPU that buffers lie on and kernels run on, once a test program has said so.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use device::cuda::{Driver, Kernel, Launch, LibraryPaths, NvidiaDriver};

static IN_USE: AtomicBool = AtomicBool::new(false);

/// From now on buffers lie on the machine's first GPU, and kernels run there. To be called before anything else of this crate; it
/// may be called before `main`.
pub extern "C" fn use_gpu() {
    IN_USE.store(true, Ordering::Relaxed);
}

/// The GPU's driver, if it is in use.
///
/// # Panics
/// When there is no GPU that the kernels run on, with what is missing.
pub fn driver() -> Option<&'static Arc<dyn Driver>> {
    static DRIVER: OnceLock<Arc<dyn Driver>> = OnceLock::new();
    let open = || -> Arc<dyn Driver> {
        Arc::new(NvidiaDriver::new(0, &LibraryPaths::default()).unwrap_or_else(|error| panic!("{error}")))
    };
    IN_USE.load(Ordering::Relaxed).then(|| DRIVER.get_or_init(open))
}

/// Runs a kernel and waits for it.
///
/// # Panics
/// When the driver refuses, or the kernel fails.
///
/// # Safety
/// `args` is the kernel's struct, and its addresses are of this driver.
pub(crate) unsafe fn launch(driver: &Arc<dyn Driver>, name: &str, grid: [usize; 3], args: &[u8]) {
    let kernel = Kernel::named(name).expect("a kernel of the manifest");
    let run = || {
        // SAFETY: the caller's promise.
        unsafe { driver.launch(&Launch { kernel, grid: grid.map(|n| n as u32), args })? };
        let at = driver.allocate(1)?;
        // A copy to the host waits, and tells what went wrong before it.
        driver.download(&mut [0], at)?;
        driver.free(at);
        Ok(())
    };
    run().unwrap_or_else(|error: device::cuda::CudaError| panic!("{name} on a grid of {grid:?}: {error}"));
}
