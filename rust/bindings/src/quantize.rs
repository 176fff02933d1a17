//! Writes quantized GGUF files.

use std::{collections::BTreeMap, path::PathBuf};

use engine::{Isq, QuantizeOptions, quantize_model};
use pyo3::{prelude::*, types::PyString};

use crate::{
    arguments::{Integer, at_least_if_given, named_text, text},
    enums::ModelDType,
    exceptions::{invalid, raise},
    load::with_progress,
    options,
    which::{Selection, Which},
};

/// Writes a GGUF file of a model's weights, quantized, which llama.cpp reads too. How many tensors it has of each type.
///
/// - `which` is a float model: a GGUF file, or a folder of an architecture that docs/quantization.md lists.
/// - `type` is what matrices of layers become, by the names of `in_situ_quant`; the same tensors take other types as there.
/// - `output` is the path of the file. One that exists is an error unless `force`. It is written under another name and renamed
///   when it is whole.
/// - `num_threads`, 1 or more; the machine's cores unless given. `progress` is called with the bytes of weights done and in all.
///
/// The importance of columns is the `imatrix` of `which`, or measured first by its `calibration_file`. Raises `ValueError` for
/// what cannot be honoured, and `NotImplementedError` for an architecture or a tokenizer that has no GGUF form here.
#[pyfunction]
#[pyo3(signature = (which, r#type, output, *, force=false, token_source="cache", num_threads=None, progress=None))]
#[allow(clippy::too_many_arguments, reason = "keywords")]
#[allow(clippy::needless_pass_by_value, reason = "one line an argument")]
pub fn quantize(
    py: Python<'_>,
    which: &Bound<'_, Which>,
    r#type: &Bound<'_, PyString>,
    output: PathBuf,
    force: bool,
    #[pyo3(from_py_with = text::token_source)] token_source: &str,
    num_threads: Option<Integer>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<BTreeMap<String, usize>> {
    let selection = Selection::of(which)?;
    if selection.adapters.is_some() {
        return Err(invalid(
            "`which` has adapters, which are not written to a GGUF file; use Which.Plain, or Which.GGUF without",
        ));
    }
    if selection.media.is_some() {
        return Err(invalid(
            "`which` sees images or hears sounds, and its encoder has no place in the GGUF file; use Which.Plain for its text",
        ));
    }
    if selection.dtype != ModelDType::Auto {
        return Err(invalid("`dtype` is a type to compute in, and nothing is computed: leave it out of `which`"));
    }
    let options = QuantizeOptions {
        isq: Isq::named("type", &named_text("type", r#type)?).map_err(raise)?,
        output: output.to_str().map_or_else(|| Ok(output.clone()), |path| options::local_path(py, path))?,
        overwrite: force,
        architecture: selection.architecture.map(str::to_owned),
        imatrix: options::imatrix(py, &selection)?,
        calibration_file: options::calibration_file(py, &selection)?,
        num_threads: at_least_if_given("num_threads", num_threads.as_ref(), 1)?,
    };
    let source = options::resolve(py, &selection, token_source)?;
    let work = move |progress: &dyn Fn(_)| quantize_model(&source, &options, progress);
    with_progress(py, "mistral_paged-quantize", progress.as_ref(), work).map(|file| file.types)
}
