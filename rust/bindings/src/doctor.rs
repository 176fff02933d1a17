//! What this machine and this build have, for `mistral-paged doctor`.

use std::path::PathBuf;

use engine::{
    Isa,
    cuda::{self, Library, LibraryPaths},
    host_memory, num_physical_cores,
};
use pyo3::{prelude::*, types::PyDict};

use crate::detach::enter;

/// Where Python's packages and a CUDA toolkit are.
pub fn library_paths(py: Python<'_>) -> PyResult<LibraryPaths> {
    let path: Vec<Bound<'_, PyAny>> = py.import("sys")?.getattr("path")?.extract()?;
    let packages = path.iter().filter_map(|folder| folder.extract::<PathBuf>().ok()).collect();
    let cuda_home = py.import("os")?.getattr("environ")?.call_method1("get", ("CUDA_HOME",))?.extract()?;
    Ok(LibraryPaths { packages, cuda_home })
}

/// What was found: a dict of plain values. It starts the NVIDIA driver where there is one.
#[pyfunction]
pub fn survey(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let paths = library_paths(py)?;
    let (report, memories, libraries) = enter(py, || {
        let libraries = Library::ALL.map(|library| (library.name(), paths.locate(library)));
        let report = cuda::survey();
        let memories: Vec<_> = (0..report.gpus.len()).map(cuda::gpu_memory).collect();
        Ok((report, memories, libraries))
    })?;
    let facts = PyDict::new(py);
    let best = Isa::detect();
    facts.set_item("cpu_tiers", Isa::ALL.into_iter().filter(|isa| *isa <= best).map(Isa::name).collect::<Vec<_>>())?;
    facts.set_item("cores", num_physical_cores())?;
    let memory = host_memory();
    facts.set_item("memory", (memory.total_bytes, memory.available_bytes))?;
    facts.set_item("driver", report.driver.as_ref().ok().map(|(major, minor)| format!("{major}.{minor}")))?;
    facts.set_item("driver_error", report.driver.as_ref().err().map(ToString::to_string))?;
    facts.set_item("kernels", report.kernels.modules.iter().map(|module| module.name).collect::<Vec<_>>())?;
    facts.set_item("kernel_bytes", report.kernels.modules.iter().map(|module| module.image.len()).sum::<usize>())?;
    facts.set_item("kernel_targets", report.kernels.targets)?;
    facts.set_item("kernel_note", report.kernels.note)?;
    let gpus = report.gpus.iter().zip(&memories).enumerate().map(|(ordinal, (gpu, memory))| {
        let dict = PyDict::new(py);
        dict.set_item("name", &gpu.name)?;
        dict.set_item("capability", format!("{}.{}", gpu.capability.0, gpu.capability.1))?;
        dict.set_item("multiprocessors", gpu.multiprocessors)?;
        dict.set_item("memory", memory.as_ref().ok().map(|memory| (memory.total_bytes, memory.free_bytes)))?;
        let problem = cuda::require(&report, ordinal).err().or_else(|| memory.as_ref().err().cloned());
        dict.set_item("problem", problem.map(|error| error.to_string()))?;
        Ok(dict)
    });
    facts.set_item("gpus", gpus.collect::<PyResult<Vec<_>>>()?)?;
    let libraries = libraries.iter().map(|(name, found)| {
        let path = found.as_ref().ok().map(|path| path.display().to_string());
        (*name, path, found.as_ref().err().map(ToString::to_string))
    });
    facts.set_item("libraries", libraries.collect::<Vec<_>>())?;
    Ok(facts)
}
