//! The HTTP server over the models of runners.

use std::sync::Arc;

use pyo3::{exceptions::PyOSError, prelude::*};
use server::{Exit, Host, ServerConfig};

use crate::{detach::enter, exceptions::invalid, runner::Runner};

/// Serves the models of runners over HTTP until a SIGTERM or SIGINT, without holding the interpreter. `config` is a JSON object
/// with the fields of `ServerConfig` (rust/server/src/config.rs), one of `models` for each of the runners; `listening` is called
/// with the address once connections are accepted.
///
/// Returns how it ended: "drained", "forced" or "interrupted". Raises `ValueError` for a setting that cannot be honoured,
/// `OSError` when it cannot listen.
#[pyfunction]
#[pyo3(signature = (runners, config, listening))]
#[allow(clippy::needless_pass_by_value, reason = "arguments come from Python as values")]
pub fn serve(py: Python<'_>, runners: Vec<Py<Runner>>, config: &str, listening: Py<PyAny>) -> PyResult<&'static str> {
    let config = read(config)?;
    let host = |runner: &Py<Runner>| runner.get().model().map(|model| Arc::clone(model) as Arc<dyn Host>);
    let hosts = runners.iter().map(host).collect::<PyResult<Vec<_>>>()?;
    let told = move |address: &str| {
        Python::attach(|py| {
            if let Err(error) = listening.call1(py, (address,)) {
                error.write_unraisable(py, None);
            }
        });
    };
    let exit = enter(py, move || Ok(server::serve(hosts, config, told)))?;
    exit.map_err(|error| PyOSError::new_err(error.to_string())).map(|exit| match exit {
        Exit::Drained => "drained",
        Exit::Forced => "forced",
        Exit::Interrupted => "interrupted",
    })
}

/// Refuses keys, a file with the secret of salts, and names of models, that `serve` would refuse once they are loaded. `config`
/// is as there.
///
/// Raises `ValueError` for settings that cannot be read, `OSError` for what cannot be honoured.
#[pyfunction]
pub fn check_server(config: &str) -> PyResult<()> {
    read(config)?.check().map_err(|error| PyOSError::new_err(error.to_string()))
}

fn read(config: &str) -> PyResult<ServerConfig> {
    serde_json::from_str(config).map_err(|error| invalid(format!("the server's settings cannot be read: {error}")))
}
