//! `GpuTimer`, which `benches/gpu.py` asks how long a GPU is at a piece of work.

use engine::cuda::timing::{self, TimedWork};
use pyo3::{exceptions::PyKeyError, prelude::*, types::PyDict};

use crate::{
    arguments::{Integer, Text, at_least},
    detach::enter,
    doctor::library_paths,
    exceptions::invalid,
};

/// Times work on one GPU.
#[pyclass(frozen, module = "mistral_paged._core")]
pub struct GpuTimer(timing::GpuTimer);

#[pymethods]
impl GpuTimer {
    #[new]
    #[pyo3(signature = (ordinal = 0))]
    fn new(py: Python<'_>, ordinal: usize) -> PyResult<Self> {
        let libraries = library_paths(py)?;
        enter(py, || Ok(timing::GpuTimer::open(ordinal, &libraries)?)).map(Self)
    }

    /// Seconds of one call, of each of `runs` runs.
    #[allow(clippy::needless_pass_by_value, reason = "what the extraction makes")]
    fn seconds(&self, py: Python<'_>, work: &Bound<'_, PyDict>, runs: Integer) -> PyResult<Vec<f64>> {
        let (work, runs) = (timed_work(work)?, at_least("runs", &runs, 1)?);
        enter(py, || Ok(self.0.seconds(&work, runs)?))
    }
}

fn timed_work(work: &Bound<'_, PyDict>) -> PyResult<TimedWork> {
    let item = |name: &str| work.get_item(name)?.ok_or_else(|| PyKeyError::new_err(format!("`work` has no {name:?}")));
    let count = |name: &str| at_least(name, &item(name)?.extract()?, 1);
    let Text(kind) = item("kind")?.extract()?;
    match kind.as_str() {
        "copy" => Ok(TimedWork::Copy { bytes: count("bytes")? }),
        "attention" => {
            let Text(name) = item("cache")?.extract()?;
            Ok(TimedWork::Attention {
                batch: count("batch")?,
                context: count("context")?,
                num_kv_heads: count("num_kv_heads")?,
                queries_per_kv: count("queries_per_kv")?,
                head_dim: count("head_dim")?,
                cache: timing::cache_named(&name).ok_or_else(|| invalid(format!("no cache of {name:?}")))?,
                block_size: count("block_size")?,
            })
        }
        "linear" => {
            let Text(name) = item("format")?.extract()?;
            Ok(TimedWork::Linear {
                rows: count("rows")?,
                out_features: count("out_features")?,
                in_features: count("in_features")?,
                format: timing::format_named(&name).ok_or_else(|| invalid(format!("no weights of {name:?}")))?,
            })
        }
        _ => Err(invalid(format!("`kind` must be \"copy\", \"attention\" or \"linear\", got {kind:?}"))),
    }
}
