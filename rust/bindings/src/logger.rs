//! The Python logger `mistral_paged`.

use pyo3::prelude::*;

/// One line at a level: "info", "error", ...
pub fn log(py: Python<'_>, level: &str, line: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("mistral_paged",))?;
    logger.call_method1(level, ("%s", line))?;
    Ok(())
}
