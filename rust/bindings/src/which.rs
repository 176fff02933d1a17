//! Selects the model of a `Runner`.

use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyDict, PyString, PyType},
};

use crate::{
    adapters::AdapterFields,
    arguments::{
        HfCachePath, ImatrixPath, ModelId, QuantizedFilename, QuantizedModelId, Text, TokModelId, TokenizerJson, refuse,
    },
    enums::{Architecture, ModelDType},
    fields::shown_dict,
};

/// One text or several.
#[derive(Clone, Debug, IntoPyObject, IntoPyObjectRef)]
pub enum OneOrMany {
    /// One.
    One(Text),
    /// Several, in order.
    Many(Vec<Text>),
}

impl<'py> FromPyObject<'_, 'py> for OneOrMany {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyString>() { object.extract().map(Self::One) } else { object.extract().map(Self::Many) }
    }
}

impl OneOrMany {
    /// All of them.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(Text(text)) => vec![text],
            Self::Many(texts) => texts.into_iter().map(|Text(text)| text).collect(),
        }
    }
}

/// Selects the model of a `Runner`. `Which.Plain` is a folder in Hugging Face layout (config.json, safetensors, tokenizer.json),
/// local or on the hub; `Which.GGUF` is one GGUF file or the parts of a split one. `Which.Lora` and `Which.GGUF` take adapters.
/// All give back their fields, are equal to one of equal fields, and can be copied and pickled. The other kinds are not supported
/// yet.
///
/// A model's files are mapped into memory: do not change or shorten them while a runner uses them. To replace one, write a new
/// file and rename it over the old one.
#[pyclass(frozen, module = "mistral_paged")]
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Which {
    /// Safetensors in Hugging Face layout: `model_id` is a local folder or a hub id. `arch` left out follows config.json; one
    /// that contradicts it is an error. `tokenizer_json` is the path of a file to use instead of the model's, `hf_cache_path` the
    /// folder that downloads are cached in. `dtype`: the computation type. Files in use must not be changed. Fields not named
    /// here are not supported yet. `imatrix` is the path of an importance matrix of llama.cpp, of either kind: how much each column
    /// counts where `in_situ_quant` makes Q2K, Q3K, Q4K, Q5K or Q6K of a matrix.
    #[pyo3(constructor = (
        model_id, arch=None, tokenizer_json=None, topology=None, organization=None, write_uqff=None, from_uqff=None,
        dtype=ModelDType::Auto, imatrix=None, calibration_file=None, hf_cache_path=None, matformer_config_path=None,
        matformer_slice_name=None, *, auto_map_params=None
    ))]
    Plain {
        model_id: ModelId,
        arch: Option<Architecture>,
        tokenizer_json: Option<TokenizerJson>,
        topology: Option<Py<PyAny>>,
        organization: Option<Py<PyAny>>,
        write_uqff: Option<Py<PyAny>>,
        from_uqff: Option<Py<PyAny>>,
        dtype: ModelDType,
        imatrix: Option<ImatrixPath>,
        calibration_file: Option<Py<PyAny>>,
        hf_cache_path: Option<HfCachePath>,
        matformer_config_path: Option<Py<PyAny>>,
        matformer_slice_name: Option<Py<PyAny>>,
        auto_map_params: Option<Py<PyAny>>,
    },
    /// A model in Hugging Face layout, as `Which.Plain`, with adapters: `adapters` is a list of `LoraAdapter`, which may be
    /// empty, and more can be loaded while it runs, up to `max_adapters` (16) of rank `max_rank` (256) and `max_bytes` (8 GiB)
    /// together. The older form: `adapters_model_id` is a folder or hub id with a folder an adapter, which the list "order" in
    /// the JSON file `order` names.
    #[pyo3(constructor = (
        model_id, adapters=None, arch=None, tokenizer_json=None, topology=None, write_uqff=None, from_uqff=None,
        dtype=ModelDType::Auto, hf_cache_path=None, max_adapters=None, max_rank=None, max_bytes=None, *, adapters_model_id=None,
        order=None, auto_map_params=None
    ))]
    Lora {
        model_id: ModelId,
        adapters: Option<Py<PyAny>>,
        arch: Option<Architecture>,
        tokenizer_json: Option<TokenizerJson>,
        topology: Option<Py<PyAny>>,
        write_uqff: Option<Py<PyAny>>,
        from_uqff: Option<Py<PyAny>>,
        dtype: ModelDType,
        hf_cache_path: Option<HfCachePath>,
        max_adapters: Option<Py<PyAny>>,
        max_rank: Option<Py<PyAny>>,
        max_bytes: Option<Py<PyAny>>,
        adapters_model_id: Option<Py<PyAny>>,
        order: Option<Py<PyAny>>,
        auto_map_params: Option<Py<PyAny>>,
    },
    /// GGUF: `quantized_model_id` is a local folder, a local .gguf file or a hub id, `quantized_filename` the file in it, or the
    /// parts of a split file in order. `tok_model_id` is a local folder or hub id whose tokenizer.json is used instead of the
    /// file's metadata; `tokenizer_json`, `dtype`, `imatrix` and `hf_cache_path` are as in `Which.Plain`, `adapters` and their limits
    /// as in `Which.Lora`; without any of those it takes none. Files in use must not be changed.
    /// Fields not named here are not supported yet.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename=None, tok_model_id=None, topology=None, dtype=ModelDType::Auto, *,
        tokenizer_json=None, mmproj_filename=None, organization=None, write_uqff=None, from_uqff=None, imatrix=None,
        calibration_file=None, max_edge=None, adapters=None, max_adapters=None, max_rank=None, max_bytes=None, hf_cache_path=None,
        matformer_config_path=None, matformer_slice_name=None, encoder_cache_memory_bytes=None, auto_map_params=None
    ))]
    #[allow(clippy::upper_case_acronyms)]
    GGUF {
        quantized_model_id: QuantizedModelId,
        quantized_filename: Option<QuantizedFilename>,
        tok_model_id: Option<TokModelId>,
        topology: Option<Py<PyAny>>,
        dtype: ModelDType,
        tokenizer_json: Option<TokenizerJson>,
        mmproj_filename: Option<Py<PyAny>>,
        organization: Option<Py<PyAny>>,
        write_uqff: Option<Py<PyAny>>,
        from_uqff: Option<Py<PyAny>>,
        imatrix: Option<ImatrixPath>,
        calibration_file: Option<Py<PyAny>>,
        max_edge: Option<Py<PyAny>>,
        adapters: Option<Py<PyAny>>,
        max_adapters: Option<Py<PyAny>>,
        max_rank: Option<Py<PyAny>>,
        max_bytes: Option<Py<PyAny>>,
        hf_cache_path: Option<HfCachePath>,
        matformer_config_path: Option<Py<PyAny>>,
        matformer_slice_name: Option<Py<PyAny>>,
        encoder_cache_memory_bytes: Option<Py<PyAny>>,
        auto_map_params: Option<Py<PyAny>>,
    },
}

#[pymethods]
impl Which {
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let (kind, fields) = slf.get().given(slf)?;
        shown_dict(&format!("Which.{kind}"), &fields)
    }

    fn __eq__(slf: &Bound<'_, Self>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        let Ok(other) = other.cast::<Self>() else { return Ok(py.NotImplemented()) };
        let ((kind, fields), (other_kind, others)) = (slf.get().given(slf)?, other.get().given(other)?);
        (kind == other_kind && fields.eq(others)?).into_py_any(py)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyType>,))> {
        let py = slf.py();
        let (kind, fields) = slf.get().given(slf)?;
        // The class of a kind has no name of its own to be pickled by.
        let call = py.import("operator")?.getattr("methodcaller")?.call((kind,), Some(&fields))?;
        Ok((call, (py.get_type::<Self>(),)))
    }
}

impl Which {
    /// The kind, and the fields that are not at their defaults.
    fn given<'py>(&self, slf: &Bound<'py, Self>) -> PyResult<(&'static str, Bound<'py, PyDict>)> {
        let (kind, dtype) = match self {
            Self::Plain { dtype, .. } => ("Plain", dtype),
            Self::Lora { dtype, .. } => ("Lora", dtype),
            Self::GGUF { dtype, .. } => ("GGUF", dtype),
        };
        let fields = PyDict::new(slf.py());
        for name in slf.as_any().getattr("__match_args__")?.try_iter()? {
            let name = name?;
            let value = slf.as_any().getattr(name.cast::<PyString>()?)?;
            let is_default = value.is_none() || name.eq("dtype")? && *dtype == ModelDType::Auto;
            if !is_default {
                fields.set_item(name, value)?;
            }
        }
        Ok((kind, fields))
    }
}

/// Fields of either kind that are not supported yet.
const PLANNED: [&str; 11] = [
    "topology",
    "organization",
    "write_uqff",
    "from_uqff",
    "calibration_file",
    "matformer_config_path",
    "matformer_slice_name",
    "auto_map_params",
    "mmproj_filename",
    "max_edge",
    "encoder_cache_memory_bytes",
];

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
    /// An importance matrix.
    pub imatrix: Option<String>,
    /// Folder of the download cache.
    pub cache_dir: Option<String>,
    /// The adapters that it is loaded with, if it takes any.
    pub adapters: Option<AdapterFields>,
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

impl Selection {
    /// The model to load; a field that is not supported yet is an error that names it.
    pub fn of(which: &Bound<'_, Which>) -> PyResult<Self> {
        let fields = which.as_any();
        for name in PLANNED {
            refuse(&[(name, fields.hasattr(name)? && !fields.getattr(name)?.is_none())])?;
        }
        let string = |text: Option<&Text>| text.map(|Text(text)| text.clone());
        match which.get() {
            Which::Plain { model_id, arch, tokenizer_json, dtype, hf_cache_path, .. }
            | Which::Lora { model_id, arch, tokenizer_json, dtype, hf_cache_path, .. } => Ok(Self {
                place: Place::Plain,
                model_id: model_id.0.0.clone(),
                architecture: arch.map(Architecture::model_type).transpose()?,
                dtype: *dtype,
                tokenizer_json: string(tokenizer_json.as_ref().map(|path| &path.0)),
                imatrix: imatrix_of(which.get()),
                cache_dir: string(hf_cache_path.as_ref().map(|path| &path.0)),
                adapters: match which.get() {
                    Which::Lora { .. } => Some(AdapterFields::of(fields)?.unwrap_or_default()),
                    _ => None,
                },
            }),
            Which::GGUF {
                quantized_model_id, quantized_filename, tok_model_id, dtype, tokenizer_json, hf_cache_path, ..
            } => Ok(Self {
                place: Place::Gguf {
                    files: quantized_filename.clone().map(|files| files.0.into_vec()),
                    tok_model_id: string(tok_model_id.as_ref().map(|id| &id.0)),
                },
                model_id: quantized_model_id.0.0.clone(),
                architecture: None,
                dtype: *dtype,
                tokenizer_json: string(tokenizer_json.as_ref().map(|path| &path.0)),
                imatrix: imatrix_of(which.get()),
                cache_dir: string(hf_cache_path.as_ref().map(|path| &path.0)),
                adapters: AdapterFields::of(fields)?,
            }),
        }
    }
}

fn imatrix_of(which: &Which) -> Option<String> {
    match which {
        Which::Plain { imatrix, .. } | Which::GGUF { imatrix, .. } => imatrix.as_ref().map(|path| path.0.0.clone()),
        Which::Lora { .. } => None,
    }
}
