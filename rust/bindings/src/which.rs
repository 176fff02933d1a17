//! Selects the model of a `Runner`.

use pyo3::prelude::*;

use crate::{
    arguments::{Unsupported, refuse},
    enums::{
        Architecture, DiffusionArchitecture, EmbeddingArchitecture, IsqOrganization, ModelDType, MultimodalArchitecture,
        SpeechLoaderType,
    },
    exceptions::not_yet,
};

/// One name or several.
#[derive(Clone, Debug, FromPyObject, IntoPyObject, IntoPyObjectRef)]
pub enum OneOrMany {
    /// One name.
    One(String),
    /// Several, in order.
    Many(Vec<String>),
}

impl OneOrMany {
    fn to_vec(&self) -> Vec<String> {
        match self {
            Self::One(name) => vec![name.clone()],
            Self::Many(names) => names.clone(),
        }
    }
}

/// Selects the model of a `Runner`. `Which.Plain` is a folder in Hugging Face layout (config.json, safetensors, tokenizer.json), local or
/// on the hub; `Which.GGUF` is one GGUF file or the parts of a split one. The others exist, and `Runner` says that they are not
/// supported yet.
#[pyclass(frozen, module = "mistral_paged")]
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Which {
    /// Safetensors in Hugging Face layout: `model_id` is a local folder or a hub id. `arch` left out follows config.json; one that
    /// contradicts it is an error. `tokenizer_json` is the path of a file to use instead of the model's, `hf_cache_path` the folder that
    /// downloads are cached in.
    #[pyo3(constructor = (
        model_id, arch=None, tokenizer_json=None, topology=None, organization=None, write_uqff=None, from_uqff=None,
        dtype=ModelDType::Auto, imatrix=None, calibration_file=None, hf_cache_path=None, matformer_config_path=None,
        matformer_slice_name=None
    ))]
    Plain {
        model_id: String,
        arch: Option<Architecture>,
        tokenizer_json: Option<String>,
        topology: Option<String>,
        organization: Option<IsqOrganization>,
        write_uqff: Option<String>,
        from_uqff: Option<OneOrMany>,
        dtype: ModelDType,
        imatrix: Option<String>,
        calibration_file: Option<String>,
        hf_cache_path: Option<String>,
        matformer_config_path: Option<String>,
        matformer_slice_name: Option<String>,
    },
    /// GGUF: `quantized_model_id` is a local folder, a local .gguf file or a hub id, `quantized_filename` the file in it, or the parts of
    /// a split file in order. `tok_model_id` is a local folder or hub id whose tokenizer.json is used instead of the file's metadata.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename=None, tok_model_id=None, topology=None, dtype=ModelDType::Auto, *,
        tokenizer_json=None, mmproj_filename=None, organization=None, write_uqff=None, imatrix=None, calibration_file=None,
        max_edge=None, adapters=None, hf_cache_path=None, matformer_config_path=None, matformer_slice_name=None
    ))]
    #[allow(clippy::upper_case_acronyms)]
    GGUF {
        quantized_model_id: String,
        quantized_filename: Option<OneOrMany>,
        tok_model_id: Option<String>,
        topology: Option<String>,
        dtype: ModelDType,
        tokenizer_json: Option<String>,
        mmproj_filename: Option<OneOrMany>,
        organization: Option<IsqOrganization>,
        write_uqff: Option<String>,
        imatrix: Option<String>,
        calibration_file: Option<String>,
        max_edge: Option<u32>,
        adapters: Option<Vec<String>>,
        hf_cache_path: Option<String>,
        matformer_config_path: Option<String>,
        matformer_slice_name: Option<String>,
    },
    /// Not supported yet.
    #[pyo3(constructor = (adapters_model_id, order, arch=None, model_id=None, tokenizer_json=None, topology=None, dtype=ModelDType::Auto))]
    Lora {
        adapters_model_id: String,
        order: String,
        arch: Option<Architecture>,
        model_id: Option<String>,
        tokenizer_json: Option<String>,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (
        xlora_model_id, order, arch=None, model_id=None, tokenizer_json=None, tgt_non_granular_index=None, topology=None,
        dtype=ModelDType::Auto
    ))]
    XLora {
        xlora_model_id: String,
        order: String,
        arch: Option<Architecture>,
        model_id: Option<String>,
        tokenizer_json: Option<String>,
        tgt_non_granular_index: Option<usize>,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename, adapters_model_id, order, tok_model_id=None, topology=None, dtype=ModelDType::Auto
    ))]
    LoraGGUF {
        quantized_model_id: String,
        quantized_filename: OneOrMany,
        adapters_model_id: String,
        order: String,
        tok_model_id: Option<String>,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename, xlora_model_id, order, tok_model_id=None, tgt_non_granular_index=None, topology=None,
        dtype=ModelDType::Auto
    ))]
    XLoraGGUF {
        quantized_model_id: String,
        quantized_filename: OneOrMany,
        xlora_model_id: String,
        order: String,
        tok_model_id: Option<String>,
        tgt_non_granular_index: Option<usize>,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename, tok_model_id=None, tokenizer_json=None, gqa=1, topology=None, dtype=ModelDType::Auto
    ))]
    #[allow(clippy::upper_case_acronyms)]
    GGML {
        quantized_model_id: String,
        quantized_filename: String,
        tok_model_id: Option<String>,
        tokenizer_json: Option<String>,
        gqa: usize,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename, adapters_model_id, order, tok_model_id=None, tokenizer_json=None, gqa=1, topology=None,
        dtype=ModelDType::Auto
    ))]
    LoraGGML {
        quantized_model_id: String,
        quantized_filename: String,
        adapters_model_id: String,
        order: String,
        tok_model_id: Option<String>,
        tokenizer_json: Option<String>,
        gqa: usize,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename, xlora_model_id, order, tok_model_id=None, tokenizer_json=None,
        tgt_non_granular_index=None, gqa=1, topology=None, dtype=ModelDType::Auto
    ))]
    XLoraGGML {
        quantized_model_id: String,
        quantized_filename: String,
        xlora_model_id: String,
        order: String,
        tok_model_id: Option<String>,
        tokenizer_json: Option<String>,
        tgt_non_granular_index: Option<usize>,
        gqa: usize,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (model_id, arch=None, tokenizer_json=None, topology=None, dtype=ModelDType::Auto, max_edge=None, hf_cache_path=None))]
    MultimodalPlain {
        model_id: String,
        arch: Option<MultimodalArchitecture>,
        tokenizer_json: Option<String>,
        topology: Option<String>,
        dtype: ModelDType,
        max_edge: Option<u32>,
        hf_cache_path: Option<String>,
    },
    /// The older spelling of `MultimodalPlain`. Not supported yet.
    #[pyo3(constructor = (model_id, arch=None, tokenizer_json=None, topology=None, dtype=ModelDType::Auto))]
    VisionPlain {
        model_id: String,
        arch: Option<MultimodalArchitecture>,
        tokenizer_json: Option<String>,
        topology: Option<String>,
        dtype: ModelDType,
    },
    /// Not supported yet.
    #[pyo3(constructor = (model_id, arch=None, tokenizer_json=None, topology=None, dtype=ModelDType::Auto, hf_cache_path=None))]
    Embedding {
        model_id: String,
        arch: Option<EmbeddingArchitecture>,
        tokenizer_json: Option<String>,
        topology: Option<String>,
        dtype: ModelDType,
        hf_cache_path: Option<String>,
    },
    /// Not supported yet.
    #[pyo3(constructor = (model_id, arch, dtype=ModelDType::Auto))]
    DiffusionPlain { model_id: String, arch: DiffusionArchitecture, dtype: ModelDType },
    /// Not supported yet.
    #[pyo3(constructor = (model_id, arch, dac_model_id=None, dtype=ModelDType::Auto))]
    Speech { model_id: String, arch: SpeechLoaderType, dac_model_id: Option<String>, dtype: ModelDType },
}

/// A model that can be loaded.
pub struct Selection {
    /// Where it lies.
    pub place: Place,
    /// What the caller calls it.
    pub model_id: String,
    /// `model_type` that config.json must have.
    pub architecture: Option<&'static str>,
    /// Computation type.
    pub dtype: ModelDType,
    /// A tokenizer.json elsewhere.
    pub tokenizer_json: Option<String>,
    /// Folder of the download cache.
    pub cache_dir: Option<String>,
}

/// Where a model lies, before downloading.
pub enum Place {
    /// A folder or hub id.
    Plain,
    /// A folder, file or hub id with GGUF files.
    Gguf {
        /// The files, when named.
        files: Option<Vec<String>>,
        /// Folder or hub id with a tokenizer.json.
        tok_model_id: Option<String>,
    },
}

const LEAVE_OUT: &str = "leave it out";

impl Which {
    /// The model to load; a variant or a field that is not supported yet is an error that names it.
    pub fn selection(&self) -> PyResult<Selection> {
        match self {
            Self::Plain { model_id, arch, tokenizer_json, dtype, hf_cache_path, .. } => {
                self.refuse_fields()?;
                Ok(Selection {
                    place: Place::Plain,
                    model_id: model_id.clone(),
                    architecture: arch.map(Architecture::model_type).transpose()?,
                    dtype: *dtype,
                    tokenizer_json: tokenizer_json.clone(),
                    cache_dir: hf_cache_path.clone(),
                })
            }
            Self::GGUF { quantized_model_id, quantized_filename, tok_model_id, dtype, tokenizer_json, hf_cache_path, .. } => {
                self.refuse_fields()?;
                Ok(Selection {
                    place: Place::Gguf {
                        files: quantized_filename.as_ref().map(OneOrMany::to_vec),
                        tok_model_id: tok_model_id.clone(),
                    },
                    model_id: quantized_model_id.clone(),
                    architecture: None,
                    dtype: *dtype,
                    tokenizer_json: tokenizer_json.clone(),
                    cache_dir: hf_cache_path.clone(),
                })
            }
            other => Err(not_yet(&format!("Which.{}", other.name()), "use Which.Plain or Which.GGUF")),
        }
    }

    fn refuse_fields(&self) -> PyResult<()> {
        let field = |name, given| Unsupported { name, given, instead: LEAVE_OUT };
        match self {
            Self::Plain {
                topology,
                organization,
                write_uqff,
                from_uqff,
                imatrix,
                calibration_file,
                matformer_config_path,
                matformer_slice_name,
                ..
            } => refuse(&[
                field("topology", topology.is_some()),
                field("organization", organization.is_some()),
                field("write_uqff", write_uqff.is_some()),
                field("from_uqff", from_uqff.is_some()),
                field("imatrix", imatrix.is_some()),
                field("calibration_file", calibration_file.is_some()),
                field("matformer_config_path", matformer_config_path.is_some()),
                field("matformer_slice_name", matformer_slice_name.is_some()),
            ]),
            Self::GGUF {
                topology,
                mmproj_filename,
                organization,
                write_uqff,
                imatrix,
                calibration_file,
                max_edge,
                adapters,
                matformer_config_path,
                matformer_slice_name,
                ..
            } => refuse(&[
                field("topology", topology.is_some()),
                field("mmproj_filename", mmproj_filename.is_some()),
                field("organization", organization.is_some()),
                field("write_uqff", write_uqff.is_some()),
                field("imatrix", imatrix.is_some()),
                field("calibration_file", calibration_file.is_some()),
                field("max_edge", max_edge.is_some()),
                field("adapters", adapters.is_some()),
                field("matformer_config_path", matformer_config_path.is_some()),
                field("matformer_slice_name", matformer_slice_name.is_some()),
            ]),
            _ => Ok(()),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Plain { .. } => "Plain",
            Self::GGUF { .. } => "GGUF",
            Self::Lora { .. } => "Lora",
            Self::XLora { .. } => "XLora",
            Self::LoraGGUF { .. } => "LoraGGUF",
            Self::XLoraGGUF { .. } => "XLoraGGUF",
            Self::GGML { .. } => "GGML",
            Self::LoraGGML { .. } => "LoraGGML",
            Self::XLoraGGML { .. } => "XLoraGGML",
            Self::MultimodalPlain { .. } => "MultimodalPlain",
            Self::VisionPlain { .. } => "VisionPlain",
            Self::Embedding { .. } => "Embedding",
            Self::DiffusionPlain { .. } => "DiffusionPlain",
            Self::Speech { .. } => "Speech",
        }
    }
}
