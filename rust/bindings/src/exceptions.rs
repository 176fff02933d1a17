//! Rust errors as Python exceptions. The classes live in `mistral_paged/exceptions.py`.

use engine::EngineError;
use pyo3::{PyErr, exceptions::PyNotImplementedError, import_exception};

import_exception!(mistral_paged.exceptions, MistralPagedError);
import_exception!(mistral_paged.exceptions, ArchitectureError);
import_exception!(mistral_paged.exceptions, ChatTemplateError);
import_exception!(mistral_paged.exceptions, DeviceError);
import_exception!(mistral_paged.exceptions, DrainingError);
import_exception!(mistral_paged.exceptions, InternalError);
import_exception!(mistral_paged.exceptions, InvalidArgumentError);
import_exception!(mistral_paged.exceptions, ModelLoadError);
import_exception!(mistral_paged.exceptions, ModelNotFoundError);

/// The exception that stands for an engine error.
pub fn raise(error: EngineError) -> PyErr {
    match error {
        EngineError::Load(message) | EngineError::Tokenizer(message) => ModelLoadError::new_err(message),
        EngineError::Architecture(message) => ArchitectureError::new_err(message),
        EngineError::InvalidArgument(message) | EngineError::PromptTooLong { message, .. } => {
            InvalidArgumentError::new_err(message)
        }
        EngineError::NotSupported(message) => PyNotImplementedError::new_err(message),
        EngineError::ChatTemplate(message) => ChatTemplateError::new_err(message),
        EngineError::Device(error) => DeviceError::new_err(error.to_string()),
        EngineError::DeviceLost(message) => DeviceError::new_err(message),
        EngineError::KvCache(error) => InvalidArgumentError::new_err(error.to_string()),
        EngineError::Draining(message) => DrainingError::new_err(message),
        EngineError::Internal(message) => InternalError::new_err(message),
    }
}

/// An argument that cannot be honoured.
pub fn invalid(message: impl Into<String>) -> PyErr {
    InvalidArgumentError::new_err(message.into())
}

/// A part of the mirrored interface that is not there yet.
pub fn not_yet(what: &str, instead: &str) -> PyErr {
    PyNotImplementedError::new_err(format!("{what} is not supported yet; {instead}"))
}
