//! The Python logger `mistral_paged`.

use pyo3::prelude::*;

/// One line at a level: "info", "error", ...
pub fn log(py: Python<'_>, level: &str, line: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("mistral_paged",))?;
    logger.call_method1(level, ("%s", line))?;
    Ok(())
}

/// Tells why a choice ended with the reason "error"; its text is kept in the response.
pub fn log_failure(py: Python<'_>, request_id: &str, index: usize, error: Option<&str>) -> PyResult<()> {
    error.map_or(Ok(()), |cause| log(py, "error", &format!("request {request_id}, choice {index} failed: {cause}")))
}
