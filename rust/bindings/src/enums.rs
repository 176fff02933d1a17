//! The enums of the mirrored interface.

use engine::model::{architectures, implemented_beside};
use pyo3::{prelude::*, types::PyType};

use crate::exceptions::ArchitectureError;

/// Architecture of a text model. Left out, it is taken from the model's config.json.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, missing_docs)]
pub enum Architecture {
    Mistral,
    Gemma,
    Mixtral,
    Llama,
    Phi2,
    Phi3,
    Qwen2,
    Gemma2,
    Starcoder2,
    Phi3_5MoE,
    DeepseekV2,
    DeepseekV3,
    Qwen3,
    GLM4,
    GLM4Moe,
    GLM4MoeLite,
    Qwen3Moe,
    SmolLm3,
    GraniteMoeHybrid,
    GptOss,
    Qwen3Next,
    Lfm2,
    Lfm2Moe,
    HunYuanDenseV1,
    HunYuanMoEV1,
}

impl Architecture {
    /// `model_type` of config.json; an error before anything is downloaded when the architecture is not implemented.
    pub fn model_type(self) -> PyResult<&'static str> {
        let name = match self {
            Self::Mistral => "mistral",
            Self::Gemma => "gemma",
            Self::Mixtral => "mixtral",
            Self::Llama => "llama",
            Self::Phi2 => "phi",
            Self::Phi3 => "phi3",
            Self::Qwen2 => "qwen2",
            Self::Gemma2 => "gemma2",
            Self::Starcoder2 => "starcoder2",
            Self::Phi3_5MoE => "phimoe",
            Self::DeepseekV2 => "deepseek_v2",
            Self::DeepseekV3 => "deepseek_v3",
            Self::Qwen3 => "qwen3",
            Self::GLM4 => "glm4",
            Self::GLM4Moe => "glm4_moe",
            Self::GLM4MoeLite => "glm4_moe_lite",
            Self::Qwen3Moe => "qwen3_moe",
            Self::SmolLm3 => "smollm3",
            Self::GraniteMoeHybrid => "granitemoehybrid",
            Self::GptOss => "gpt_oss",
            Self::Qwen3Next => "qwen3_next",
            Self::Lfm2 => "lfm2",
            Self::Lfm2Moe => "lfm2_moe",
            Self::HunYuanDenseV1 => "hunyuan_v1_dense",
            Self::HunYuanMoEV1 => "hunyuan_v1_moe",
        };
        if architectures().any(|known| known.model_types.contains(&name)) {
            return Ok(name);
        }
        let implemented = implemented_beside(name);
        Err(ArchitectureError::new_err(format!("Architecture.{self:?} ({name}) is not implemented yet; {implemented}")))
    }
}

/// Architecture of a multimodal model.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, missing_docs)]
pub enum MultimodalArchitecture {
    Phi3V,
    Idefics2,
    LLaVANext,
    LLaVA,
    Lfm2Vl,
    VLlama,
    Qwen2VL,
    Idefics3,
    MiniCpmO,
    Phi4MM,
    Qwen2_5VL,
    Gemma3,
    Mistral3,
    Llama4,
    Gemma3n,
    Qwen3VL,
    Qwen3VLMoE,
    Qwen3_5,
    Qwen3_5Moe,
    Qwen4Exp,
    Voxtral,
    Gemma4,
    MuseGlimmer,
    DiffusionGemma,
}

impl MultimodalArchitecture {
    /// Those whose images or sounds are computed.
    const IMPLEMENTED: [Self; 20] = [
        Self::LLaVA,
        Self::LLaVANext,
        Self::Idefics2,
        Self::Idefics3,
        Self::Qwen2VL,
        Self::Qwen2_5VL,
        Self::Qwen3VL,
        Self::Qwen3VLMoE,
        Self::Qwen3_5,
        Self::Qwen3_5Moe,
        Self::Gemma3,
        Self::Mistral3,
        Self::Phi3V,
        Self::Phi4MM,
        Self::Lfm2Vl,
        Self::Llama4,
        Self::Gemma3n,
        Self::Gemma4,
        Self::VLlama,
        Self::Voxtral,
    ];

    /// `model_type` that config.json may have; an error before anything is downloaded when they are not computed.
    pub fn model_types(self) -> PyResult<&'static [&'static str]> {
        Ok(match self {
            Self::LLaVA => &["llava"],
            Self::LLaVANext => &["llava_next"],
            Self::Idefics2 => &["idefics2"],
            Self::Idefics3 => &["idefics3", "smolvlm"],
            Self::Qwen2VL => &["qwen2_vl"],
            Self::Qwen2_5VL => &["qwen2_5_vl"],
            Self::Qwen3VL => &["qwen3_vl"],
            Self::Qwen3VLMoE => &["qwen3_vl_moe"],
            Self::Qwen3_5 => &["qwen3_5"],
            Self::Qwen3_5Moe => &["qwen3_5_moe"],
            Self::Gemma3 => &["gemma3"],
            Self::Mistral3 => &["mistral3"],
            Self::Phi3V => &["phi3_v"],
            Self::Phi4MM => &["phi4mm", "phi4_multimodal"],
            Self::Lfm2Vl => &["lfm2_vl"],
            Self::Llama4 => &["llama4"],
            Self::Gemma3n => &["gemma3n"],
            Self::Gemma4 => &["gemma4"],
            Self::VLlama => &["mllama"],
            Self::Voxtral => &["voxtral"],
            _ => {
                let known: Vec<String> = Self::IMPLEMENTED.iter().map(|known| format!("{known:?}")).collect();
                let known = known.join(", ");
                let text = format!("MultimodalArchitecture.{self:?} is not implemented yet; {known} are");
                return Err(ArchitectureError::new_err(text));
            }
        })
    }
}

/// Architecture of an embedding model.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum EmbeddingArchitecture {
    EmbeddingGemma,
    Qwen3Embedding,
}

impl EmbeddingArchitecture {
    /// `model_type` of config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::EmbeddingGemma => "gemma3_text",
            Self::Qwen3Embedding => "qwen3",
        }
    }
}

/// Architecture of an image generation model.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DiffusionArchitecture {
    Flux,
    FluxOffloaded,
}

/// Loader of a speech model.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum SpeechLoaderType {
    Dia,
}

/// Computation type. `Auto` is the fast path: activations of 8 bits, 15 where they are large, on quantized weights and a 16-bit
/// KV cache; `BF16` and `F16` name the type of that cache. `F32` is the exact path: float weights, activations and KV, for GGUF
/// files too.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ModelDType {
    Auto,
    BF16,
    F16,
    F32,
}

impl From<ModelDType> for engine::ModelDType {
    fn from(dtype: ModelDType) -> Self {
        match dtype {
            ModelDType::Auto => Self::Auto,
            ModelDType::BF16 => Self::BF16,
            ModelDType::F16 => Self::F16,
            ModelDType::F32 => Self::F32,
        }
    }
}

/// Type of the KV cache. `Auto` follows the computation type: 32-bit floats for `ModelDType.F32`, else 16-bit ones. `F8E4M3` and
/// `Int8` take one byte an element, and a scale for each token and head.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum PagedCacheType {
    Auto,
    F8E4M3,
    F16,
    BF16,
    F32,
    Int8,
}

impl From<PagedCacheType> for engine::PagedCacheType {
    fn from(cache_type: PagedCacheType) -> Self {
        match cache_type {
            PagedCacheType::Auto => Self::Auto,
            PagedCacheType::F8E4M3 => Self::F8E4M3,
            PagedCacheType::F16 => Self::F16,
            PagedCacheType::BF16 => Self::BF16,
            PagedCacheType::F32 => Self::F32,
            PagedCacheType::Int8 => Self::Int8,
        }
    }
}

/// What in-situ quantization covers.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum IsqOrganization {
    Default,
    MoQE,
}

/// Whether the model may call tools.
#[pyclass(eq, eq_int, frozen, hash, module = "mistral_paged")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ToolChoice {
    NoTools,
    Auto,
}

/// Enums are pickled by name.
macro_rules! pickled {
    ($($class:ident)+) => {
        $(
            #[pymethods]
            impl $class {
                fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyType>, String))> {
                    let getattr = slf.py().import("builtins")?.getattr("getattr")?;
                    Ok((getattr, (slf.py().get_type::<Self>(), format!("{:?}", slf.get()))))
                }
            }
        )+
    };
}

pickled! {
    Architecture
    MultimodalArchitecture
    EmbeddingArchitecture
    DiffusionArchitecture
    SpeechLoaderType
    ModelDType
    PagedCacheType
    IsqOrganization
    ToolChoice
}
