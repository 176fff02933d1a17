//! Runs the CUDA kernels of `kernels/` on the CPU, or on a GPU once [`gpu::use_gpu`] was called: device memory, and launches.
//!
//! The tests of this crate compare every kernel with a plain oracle.

mod driver;
pub mod gpu;
mod memory;
pub mod packed;
pub mod pool;
pub mod random;
pub mod scales;
pub mod tensors;
pub mod weight;

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::Arc,
};

use device::{GgmlType, cuda::Driver};
pub use driver::EmulatedDriver;
pub use memory::{Buffer, Plain};

/// `emulation::Kernel` in `kernels/emulation/emulation.h`.
#[repr(C)]
struct RawKernel {
    name: *const c_char,
    args: *const c_char,
    args_bytes: usize,
    threads: c_uint,
    shared_bytes: c_uint,
    thread: extern "C" fn(*const c_void),
    next: *const RawKernel,
}

unsafe extern "C" {
    fn emulation_kernels() -> *const RawKernel;
    fn emulation_next(kernel: *const RawKernel) -> *const RawKernel;
    fn emulation_launch(kernel: *const RawKernel, grid: *const c_uint, args: *const c_void, reverse: c_int);
    fn emulation_produced(at: *mut c_void, bytes: usize, is_writable: c_int);
}

/// A kernel as its source file defines it.
#[derive(Clone, Copy)]
pub struct Kernel {
    raw: &'static RawKernel,
}

/// In which order the threads of a CTA, and the CTAs of a grid, take their turns. Results are the same in both unless a barrier
/// is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From the first on.
    Ascending,
    /// From the last on.
    Descending,
}

impl Kernel {
    /// Every kernel, sorted by name.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        // SAFETY: the list is made before main and never changes; its nodes are statics.
        let mut raw = unsafe { emulation_kernels() };
        // SAFETY: as above: each pointer is null or one to a node.
        while let Some(kernel) = unsafe { raw.as_ref() } {
            all.push(Self { raw: kernel });
            // SAFETY: as above.
            raw = unsafe { emulation_next(raw) };
        }
        all.sort_by_key(|kernel| kernel.name());
        all
    }

    /// The kernel of that name.
    ///
    /// # Panics
    /// When there is none.
    pub fn named(name: &str) -> Self {
        let found = Self::all().into_iter().find(|kernel| kernel.name() == name);
        found.unwrap_or_else(|| panic!("there is no kernel {name}"))
    }

    /// Its symbol.
    pub fn name(self) -> &'static str {
        string(self.raw.name)
    }

    /// The line of `kernels/manifest.txt`.
    pub fn manifest_line(self) -> String {
        format!("{} {} {} {}", self.name(), string(self.raw.args), self.raw.threads, self.raw.shared_bytes)
    }

    /// Bytes of its argument struct.
    pub fn args_bytes(self) -> usize {
        self.raw.args_bytes
    }

    /// The name of its argument struct.
    pub fn args_name(self) -> &'static str {
        string(self.raw.args)
    }

    /// Runs the whole grid.
    ///
    /// An access outside the buffers ends the process with a message.
    ///
    /// # Panics
    /// When `args` is not the kernel's argument struct, or the grid is empty.
    pub fn launch<A>(self, grid: [usize; 3], args: &A, order: Order) {
        let expected = std::any::type_name::<A>().rsplit("::").next();
        assert_eq!((expected, size_of::<A>()), (Some(self.args_name()), self.args_bytes()), "arguments of {}", self.name());
        if let Some(driver) = gpu::driver() {
            // SAFETY: argument structs have no padding.
            let args = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(args).cast(), size_of::<A>()) };
            // SAFETY: the struct has the kernel's type; tests give addresses of buffers.
            return unsafe { gpu::launch(driver, self.name(), grid, args) };
        }
        // SAFETY: the struct has the kernel's type; the addresses in it are checked by guard pages as the kernel follows them.
        unsafe { self.run(grid, std::ptr::from_ref(args).cast(), order) };
    }

    /// Runs the whole grid behind a kernel that writes these buffers and may not have ended: in the emulation, who touches one
    /// before it calls `wait_for_inputs` ends the process with a message; in descending order copies are made at once, and seen.
    ///
    /// # Panics
    /// See [`Self::launch`].
    pub fn launch_behind<A>(self, produced: &[&Buffer], grid: [usize; 3], args: &A, order: Order) {
        for (at, bytes, is_writable) in produced.iter().filter_map(|buffer| buffer.pages()) {
            // SAFETY: whole pages of a buffer that outlives the launch, which opens them again.
            unsafe { emulation_produced(at.cast(), bytes, is_writable.into()) };
        }
        self.launch(grid, args, order);
    }

    /// # Safety
    /// `args` is the kernel's struct.
    unsafe fn run(self, grid: [usize; 3], args: *const c_void, order: Order) {
        assert!(grid.iter().all(|&n| n > 0) && grid[1] <= 65535, "{} cannot have a grid of {grid:?}", self.name());
        let grid = grid.map(|n| n as c_uint);
        // SAFETY: the caller's promise.
        unsafe { emulation_launch(self.raw, grid.as_ptr(), args, c_int::from(order == Order::Descending)) };
    }
}

fn string(text: *const c_char) -> &'static str {
    // SAFETY: the strings are literals of the kernels' sources.
    unsafe { CStr::from_ptr(text) }.to_str().expect("names are ASCII")
}

/// Where kernels run: the emulation, or the GPU, which has no use for an order.
pub fn driver(order: Order) -> Arc<dyn Driver> {
    gpu::driver().map_or_else(|| -> Arc<dyn Driver> { Arc::new(EmulatedDriver::new(order)) }, Arc::clone)
}

/// The text of `kernels/manifest.txt` for these sources.
pub fn manifest() -> String {
    Kernel::all().into_iter().map(|kernel| kernel.manifest_line() + "\n").collect()
}

/// Asserts that values agree within `absolute + relative * |expected|`, and names the first that does not.
///
/// # Panics
/// When one does not.
pub fn assert_close(actual: &[f32], expected: &[f32], [absolute, relative]: [f32; 2], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= absolute + relative * e.abs(), "{what}: value {i} is {a}, not {e}");
    }
}
