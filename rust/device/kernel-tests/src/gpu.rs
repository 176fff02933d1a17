//! The GPU that buffers lie on and kernels run on, once a test program has said so.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use device::cuda::{Driver, NvidiaDriver};

static IN_USE: AtomicBool = AtomicBool::new(false);

/// From now on buffers lie on the machine's first GPU, and kernels run there. To be called before anything else of this crate; it may be
/// called before `main`.
pub extern "C" fn use_gpu() {
    IN_USE.store(true, Ordering::Relaxed);
}

/// The GPU's driver, if it is in use.
///
/// # Panics
/// When there is no GPU that the kernels run on, with what is missing.
pub fn driver() -> Option<&'static Arc<dyn Driver>> {
    static DRIVER: OnceLock<Arc<dyn Driver>> = OnceLock::new();
    let open = || -> Arc<dyn Driver> { Arc::new(NvidiaDriver::new(0).unwrap_or_else(|error| panic!("{error}"))) };
    IN_USE.load(Ordering::Relaxed).then(|| DRIVER.get_or_init(open))
}
