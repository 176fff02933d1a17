//! What of CUDA this machine and this build have.

use super::{CudaError, EMBEDDED, EmbeddedKernels, nvidia};

/// CUDA version that the driver must serve: that of the compiler of the kernels. Driver 580 is the first.
pub const MIN_DRIVER: (u32, u32) = (13, 0);
/// Compute capability that the kernels need: asynchronous copies and matrix units for bfloat16.
pub const MIN_CAPABILITY: (u32, u32) = (8, 0);

/// Memory of a GPU in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// Of the card.
    pub total_bytes: u64,
    /// Free at the moment, what other processes have taken considered.
    pub free_bytes: u64,
}

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The vendor's name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
}

impl Gpu {
    /// Whether the kernels run on it.
    pub fn check(&self) -> Result<(), CudaError> {
        if self.capability >= MIN_CAPABILITY {
            return Ok(());
        }
        Err(CudaError::UnsupportedGpu { name: self.name.clone(), found: self.capability, needed: MIN_CAPABILITY })
    }
}

/// What was found.
#[derive(Clone, Debug)]
pub struct CudaReport {
    /// CUDA version that the driver serves, major and minor.
    pub driver: Result<(u32, u32), CudaError>,
    /// The GPUs that the driver shows to this process.
    pub gpus: Vec<Gpu>,
    /// The kernels of this build.
    pub kernels: &'static EmbeddedKernels,
}

/// Asks the driver; this starts it when it is there, and computes on no GPU: no context is made.
/// [`gpu_memory`](super::gpu_memory) tells the memory of one.
pub fn survey() -> CudaReport {
    let (driver, gpus) = match nvidia::gpus() {
        Ok((version, gpus)) => (Ok(version), gpus),
        Err(error) => (Err(error), Vec::new()),
    };
    CudaReport { driver, gpus, kernels: &EMBEDDED }
}

/// Whether this build could compute on a GPU of this machine.
///
/// Errors: what is missing first: the driver, a newer one, the GPU, one that the kernels run on, the kernels.
pub fn require(report: &CudaReport, ordinal: usize) -> Result<&Gpu, CudaError> {
    let version = report.driver.clone()?;
    if version < MIN_DRIVER {
        return Err(CudaError::DriverTooOld { found: version, needed: MIN_DRIVER });
    }
    let gpu = report.gpus.get(ordinal).ok_or(CudaError::NoSuchGpu { ordinal, count: report.gpus.len() })?;
    gpu.check()?;
    if report.kernels.modules.is_empty() {
        return Err(CudaError::NoKernels(report.kernels.note.into()));
    }
    Ok(gpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Module;

    static KERNELS: EmbeddedKernels = EmbeddedKernels {
        note: "compiled by nvcc 13.0.88",
        modules: &[Module { name: "norm", image: &[], kernels: &["rms_norm"] }],
        targets: &["sm_90"],
    };
    static NONE: EmbeddedKernels = EmbeddedKernels { note: "no nvcc", modules: &[], targets: &[] };

    fn gpu(capability: (u32, u32)) -> Gpu {
        Gpu { name: "Card".into(), capability, multiprocessors: 132 }
    }

    fn report() -> CudaReport {
        CudaReport { driver: Ok((13, 0)), gpus: vec![gpu((7, 5)), gpu((9, 0))], kernels: &KERNELS }
    }

    #[test]
    fn a_gpu_with_all_that_is_needed_is_taken() {
        assert_eq!(require(&report(), 1), Ok(&gpu((9, 0))));
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let no_driver = Err(CudaError::NoDriver("libcuda.so.1 is in none of the system's library folders".into()));
        let cases = [
            (
                CudaReport { driver: no_driver, gpus: vec![], ..report() },
                0,
                &["libcuda.so.1", "driver 580", "device=\"cpu\""][..],
            ),
            (CudaReport { driver: Ok((12, 4)), ..report() }, 1, &["CUDA 12.4", "CUDA 13.0", "driver 580"]),
            (report(), 2, &["cuda:2", "2 GPUs", "cuda:0 to cuda:1"]),
            (CudaReport { gpus: vec![], ..report() }, 0, &["cuda:0", "0 GPUs", "CUDA_VISIBLE_DEVICES"]),
            (report(), 0, &["Card", "7.5", "8.0", "another GPU"]),
            (CudaReport { kernels: &NONE, ..report() }, 1, &["no CUDA kernels", "no nvcc", "nvidia-cuda-nvcc"]),
        ];
        for (report, ordinal, parts) in cases {
            let text = require(&report, ordinal).unwrap_err().to_string();
            for part in parts {
                assert!(text.contains(part), "{part} is not in: {text}");
            }
        }
    }

    #[test]
    fn embedded_modules_have_images_and_names_of_their_own() {
        let mut names: Vec<_> = EMBEDDED.modules.iter().flat_map(|module| module.kernels).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "two modules have a kernel of the same name");
        assert!(EMBEDDED.modules.iter().all(|module| !module.image.is_empty()));
        assert_eq!(EMBEDDED.modules.is_empty(), EMBEDDED.targets.is_empty());
    }
}
