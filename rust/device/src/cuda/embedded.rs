//! The compiled kernels, as data: `kernels/compiler.py` writes the expression below, and a build without nvcc embeds none.

/// All kernels of this build.
#[derive(Debug)]
pub struct EmbeddedKernels {
    /// By what they were compiled, or why there are none.
    pub note: &'static str,
    /// One a file of kernels/.
    pub modules: &'static [Module],
    /// Machine code, such as "sm_90", and PTX, such as "compute_80", in every module; empty without modules.
    pub targets: &'static [&'static str],
}

/// A fatbin: machine code for every target, and PTX.
pub struct Module {
    /// Its file's name without the suffix.
    pub name: &'static str,
    /// What the driver loads.
    pub image: &'static [u8],
    /// Names of its kernels.
    pub kernels: &'static [&'static str],
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, image, kernels } = self;
        write!(f, "Module {{ name: {name:?}, image: {} bytes, kernels: {kernels:?} }}", image.len())
    }
}

/// What this build has.
pub static EMBEDDED: EmbeddedKernels = include!(env!("EMBEDDED_KERNELS"));
