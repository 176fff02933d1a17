//! Errors of the engine; every one names the value that cannot be honoured.

use thiserror::Error;

/// What can go wrong from loading a model to ending a request.
#[derive(Debug, Error)]
pub enum EngineError {
    /// A file is missing, unreadable or malformed.
    #[error("{0}")]
    Load(String),
    /// The architecture is not implemented, or contradicts the configuration.
    #[error("{0}")]
    Architecture(String),
    /// An argument of the engine or of a request cannot be honoured.
    #[error("{0}")]
    InvalidArgument(String),
    /// Part of the mirrored interface that is not there yet.
    #[error("{0}")]
    NotSupported(String),
    /// The chat template is missing or rejected the messages.
    #[error("{0}")]
    ChatTemplate(String),
    /// The tokenizer is missing or malformed.
    #[error("{0}")]
    Tokenizer(String),
    /// The device refused something.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The KV pool cannot be made as asked.
    #[error(transparent)]
    KvCache(#[from] paged::ConfigError),
    /// A step failed, or the engine has stopped.
    #[error("{0}")]
    Internal(String),
}
