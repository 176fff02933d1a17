//! What of the mirrored `Runner` and `Which` does not work yet: each says so, whatever it is given.

use pyo3::{
    exceptions::PyAttributeError,
    prelude::*,
    types::{PyCFunction, PyDict, PyTuple},
};

use crate::{exceptions::not_yet, runner::Runner, which::Which};

/// Methods of the mirrored `Runner`. They are attributes of a runner and not of the class, whose help would be full of them.
const METHODS: [(&str, &str); 11] = [
    ("generate_image", TEXT),
    ("generate_audio", TEXT),
    ("begin_calibration", TEXT),
    ("calibration_status", TEXT),
    ("apply_calibration", TEXT),
    ("remove_model", "a runner has one model: close() ends it, and a server takes several (docs/serving.md)"),
    ("export_session", TEXT),
    ("import_session", TEXT),
    ("delete_session", TEXT),
    ("list_session_ids", TEXT),
    ("find_file", TEXT),
];
const TEXT: &str = "this version generates text";

#[pymethods]
#[allow(clippy::unused_self, reason = "a method of the class")]
impl Runner {
    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let Some((method, instead)) = METHODS.into_iter().find(|(method, _)| *method == name) else {
            return Err(PyAttributeError::new_err(format!("'Runner' object has no attribute '{name}'")));
        };
        let refuse = move |_: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<()> {
            Err(not_yet(&format!("Runner.{method}"), instead))
        };
        Ok(PyCFunction::new_closure(py, None, Some(c"Not supported yet."), refuse)?.into_any())
    }
}

macro_rules! planned_models {
    ($($name:ident)+) => {
        #[pymethods]
        #[allow(non_snake_case, reason = "constructors in all but name")]
        impl Which {
            $(
                /// Not supported yet.
                #[staticmethod]
                #[pyo3(signature = (*args, **kwargs))]
                fn $name(args: &Bound<'_, PyTuple>, kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
                    let _ = (args, kwargs);
                    Err(not_yet(concat!("Which.", stringify!($name)), "use Which.Plain or Which.GGUF"))
                }
            )+
        }
    };
}

planned_models! {
    XLora
    XLoraGGUF
    XLoraGGML
    DiffusionPlain
    Speech
}
