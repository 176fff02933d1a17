//! Rust errors as Python exceptions. The classes live in `mistral_paged/exceptions.py`.

use engine::EngineError;
use pyo3::{PyErr, exceptions::PyNotImplementedError, import_exception};

import_exception!(mistral_paged.exceptions, MistralPagedError);
import_exception!(mistral_paged.exceptions, AddressError);
import_exception!(mistral_paged.exceptions, ArchitectureError);
import_exception!(mistral_paged.exceptions, ChatTemplateError);
import_exception!(mistral_paged.exceptions, DeviceError);
import_exception!(mistral_paged.exceptions, DrainingError);
import_exception!(mistral_paged.exceptions, InternalError);
import_exception!(mistral_paged.exceptions, LoraAdapterError);
import_exception!(mistral_paged.exceptions, InvalidArgumentError);
import_exception!(mistral_paged.exceptions, ModelLoadError);
import_exception!(mistral_paged.exceptions, ModelNotFoundError);

/// The exception that stands for an engine error.
#[allow(clippy::needless_pass_by_value, reason = "a function for `map_err`")]
pub fn raise(error: EngineError) -> PyErr {
    let message = error.to_string();
    match error {
        EngineError::Load(_) | EngineError::Tokenizer(_) => ModelLoadError::new_err(message),
        EngineError::Architecture(_) => ArchitectureError::new_err(message),
        EngineError::InvalidArgument(_)
        | EngineError::PromptTooLong { .. }
        | EngineError::Grammar { .. }
        | EngineError::KvCache(_) => InvalidArgumentError::new_err(message),
        EngineError::Adapter { code, .. } => LoraAdapterError::new_err((message, code)),
        EngineError::NotSupported(_) => PyNotImplementedError::new_err(message),
        EngineError::ChatTemplate(_) => ChatTemplateError::new_err(message),
        EngineError::Device(_) | EngineError::DeviceLost(_) => DeviceError::new_err(message),
        EngineError::Draining(_) => DrainingError::new_err(message),
        EngineError::Address(_) => AddressError::new_err(message),
        EngineError::Internal(_) => InternalError::new_err(message),
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
