//! What can go wrong on a device.

use thiserror::Error;

/// Error of a backend, a weight format or the KV storage.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A weight's type has no implementation here.
    #[error("tensor `{name}` has type {dtype}, which is not supported; supported types: {supported}")]
    UnsupportedType {
        /// The tensor's name in its file.
        name: String,
        /// The type's name.
        dtype: String,
        /// The types that would work.
        supported: String,
    },
    /// A shape or size that does not fit.
    #[error("{0}")]
    Shape(String),
    /// The machine has less memory than was asked for.
    #[error("{what} needs {needed_bytes} bytes, but only {available_bytes} bytes are available")]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes that the machine has.
        available_bytes: u64,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// A GPU, its driver or its libraries.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// An option that cannot be honoured.
    #[error("{0}")]
    Unsupported(String),
}
