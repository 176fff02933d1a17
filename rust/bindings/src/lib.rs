//! The Python extension module `mistral_paged._core`: the only crate that knows Python.
//!
//! Requests become plain Rust structs as they come in ([`request`]), answers leave as frozen classes ([`response`],
//! [`streaming`]), and [`detach`] is the one way from a Python thread into the engine.

mod adapters;
mod answer_json;
mod arguments;
mod completing;
mod control;
mod detach;
mod doctor;
mod embedding;
mod enums;
mod exceptions;
mod fields;
mod gpu_timer;
mod images;
mod load;
mod logger;
mod media;
mod memory;
mod messages;
mod model;
mod options;
mod pending;
mod planned;
mod process;
mod quantize;
mod request;
mod rerank;
mod response;
mod runner;
mod sampling;
mod sequence;
mod serve;
mod service;
mod simulate;
mod sounds;
mod source;
mod stats;
mod streaming;
mod videos;
mod warnings;
mod which;

/// The native part of `mistral_paged`; import from there.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::adapters::{LoraAdapter, LoraAdapterGeneration, LoraAdapterInfo, LoraRuntimeStatus};
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::doctor::survey;
    #[pymodule_export]
    use crate::embedding::EmbeddingRequest;
    #[pymodule_export]
    use crate::enums::{
        Architecture, DiffusionArchitecture, EmbeddingArchitecture, IsqOrganization, ModelDType, MultimodalArchitecture,
        PagedCacheType, SpeechLoaderType, ToolChoice,
    };
    #[pymodule_export]
    use crate::gpu_timer::GpuTimer;
    #[pymodule_export]
    use crate::images::RgbImage;
    #[pymodule_export]
    use crate::memory::MemoryPlan;
    #[pymodule_export]
    use crate::pending::{EventSignal, PendingRequest, submit, submit_embeddings, submit_scores, takes_long};
    #[pymodule_export]
    use crate::quantize::quantize;
    #[pymodule_export]
    use crate::request::{ChatCompletionRequest, CompletionRequest};
    #[pymodule_export]
    use crate::rerank::RerankRequest;
    #[pymodule_export]
    use crate::response::{
        CalledFunction, ChatCompletionChunkResponse, ChatCompletionResponse, Choice, ChunkChoice, CompletionChoice,
        CompletionResponse, Delta, Logprobs, PromptTokensDetails, ResponseLogprob, ResponseMessage, ToolCallResponse, TopLogprob,
        Usage,
    };
    #[pymodule_export]
    use crate::runner::Runner;
    #[pymodule_export]
    use crate::sequence::Sequence;
    #[pymodule_export]
    use crate::serve::{check_server, serve};
    #[pymodule_export]
    use crate::simulate::{simulate, simulator_devices};
    #[pymodule_export]
    use crate::sounds::Sound;
    #[pymodule_export]
    use crate::streaming::ChatCompletionStreamer;
    #[pymodule_export]
    use crate::videos::Video;
    #[pymodule_export]
    use crate::which::Which;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::warnings::collect();
        // The older name.
        let which = module.getattr("Which")?;
        which.setattr("VisionPlain", which.getattr("MultimodalPlain")?)?;
        crate::detach::close_at_exit(module.py())
    }

    /// Version of the package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
