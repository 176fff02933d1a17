//! What can go wrong with a GPU, and what to do about it.

use thiserror::Error;

/// An error of the CUDA side; each names what it is about and what would work.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CudaError {
    /// `libcuda` is not there or cannot be started.
    #[error("no NVIDIA driver was found ({0}); install NVIDIA's driver 580 or newer, or use device=\"cpu\"")]
    NoDriver(String),
    /// The driver is older than the kernels.
    #[error(
        "the NVIDIA driver serves CUDA {}.{}, and the kernels need CUDA {}.{}: install driver 580 or newer, or use device=\"cpu\"",
        .found.0, .found.1, .needed.0, .needed.1
    )]
    DriverTooOld {
        /// Major and minor version that the driver serves.
        found: (u32, u32),
        /// Major and minor version that it would have to serve.
        needed: (u32, u32),
    },
    /// No GPU of that number.
    #[error("device=\"cuda:{ordinal}\" is not there: the NVIDIA driver shows {count} GPUs{}", choices(*.count))]
    NoSuchGpu {
        /// The number asked for.
        ordinal: usize,
        /// GPUs that the driver shows to this process.
        count: usize,
    },
    /// A GPU that no embedded kernel runs on.
    #[error(
        "{name} has compute capability {}.{}; the kernels need {}.{} or newer (Ampere), so use device=\"cpu\" or another GPU",
        .found.0, .found.1, .needed.0, .needed.1
    )]
    UnsupportedGpu {
        /// The GPU's name.
        name: String,
        /// Its compute capability.
        found: (u32, u32),
        /// The lowest that would do.
        needed: (u32, u32),
    },
    /// The kernels were not compiled into this build.
    #[error(
        "this build has no CUDA kernels ({0}); `pip install` it where pip can fetch nvidia-cuda-nvcc (Linux x86-64), or use device=\"cpu\""
    )]
    NoKernels(String),
    /// A library of the extra `cuda` is nowhere.
    #[error("{library} was not found in {looked_in}; `pip install \"mistral-paged[cuda]\"` brings it")]
    MissingLibrary {
        /// Its file name.
        library: String,
        /// Where it was looked for, in that order.
        looked_in: String,
    },
    /// The card is full.
    #[error(
        "the GPU has {free_bytes} bytes free, and {needed_bytes} are needed; a smaller KV pool or max_num_batched_tokens may fit"
    )]
    OutOfMemory {
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// A kernel that this build should have.
    #[error("this build has no kernel `{0}`, which is a defect of the build; please report it")]
    NoSuchKernel(String),
    /// After such an error the driver refuses everything in this process.
    #[error("{what}: the NVIDIA driver says {code}; the GPU is lost to this process, so start a new one")]
    Lost {
        /// What was being done.
        what: String,
        /// The driver's name for the error.
        code: String,
    },
    /// The driver refused something.
    #[error("{what}: the NVIDIA driver says {code}")]
    Driver {
        /// What was being done.
        what: String,
        /// The driver's name for the error.
        code: String,
    },
}

fn choices(count: usize) -> String {
    match count {
        0 => "; CUDA_VISIBLE_DEVICES may hide them".into(),
        1 => ": cuda:0".into(),
        n => format!(": cuda:0 to cuda:{}", n - 1),
    }
}
