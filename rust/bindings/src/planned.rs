//! What of the mirrored `Runner` and `Which` does not work yet: each says so, whatever it is given.

use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::{exceptions::not_yet, runner::Runner, which::Which};

macro_rules! planned {
    ($($name:ident)+) => {
        #[pymethods]
        #[allow(clippy::unused_self, reason = "methods of a class")]
        impl Runner {
            $(
                /// Not supported yet.
                #[pyo3(signature = (*args, **kwargs))]
                fn $name(&self, args: &Bound<'_, PyTuple>, kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
                    let _ = (args, kwargs);
                    Err(not_yet(concat!("Runner.", stringify!($name)), "this version generates text"))
                }
            )+
        }
    };
}

planned! {
    send_embedding_request
    generate_image
    generate_audio
    send_re_isq
    begin_calibration
    calibration_status
    apply_calibration
    remove_model
    activate_adapters
    load_lora_adapter
    unload_lora_adapter
    list_lora_adapters
    lora_adapter_status
    export_session
    import_session
    delete_session
    list_session_ids
    find_file
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
    Lora
    XLora
    LoraGGUF
    XLoraGGUF
    GGML
    LoraGGML
    XLoraGGML
    MultimodalPlain
    VisionPlain
    Embedding
    DiffusionPlain
    Speech
}
