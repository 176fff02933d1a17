//! Selects the model of a `Runner`.

use std::path::Path;

use engine::{EmbeddingOptions, MediaOptions};
use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyDict, PyString, PyType},
};

use crate::{
    adapters::AdapterFields,
    arguments::{
        CalibrationFile, EncoderCacheBytes, Gqa, HfCachePath, ImatrixPath, MaxEdge, MmprojFilename, ModelId, QuantizedFilename,
        QuantizedModelId, Text, TokModelId, TokenizerJson, named, refuse,
    },
    enums::{Architecture, EmbeddingArchitecture, ModelDType, MultimodalArchitecture},
    exceptions::{invalid, raise},
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

/// How hidden states become one vector, by its name.
#[derive(Clone, Copy, Debug)]
pub struct Pooling(pub engine::Pooling);

impl<'py> FromPyObject<'_, 'py> for Pooling {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Text(name) = named("pooling", &object)?;
        name.parse().map(Self).map_err(raise)
    }
}

impl<'py> IntoPyObject<'py> for &Pooling {
    type Target = PyString;
    type Output = Bound<'py, PyString>;
    type Error = std::convert::Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(PyString::new(py, self.0.name()))
    }
}

impl<'py> IntoPyObject<'py> for Pooling {
    type Target = PyString;
    type Output = Bound<'py, PyString>;
    type Error = std::convert::Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        (&self).into_pyobject(py)
    }
}

/// Selects the model of a `Runner`. `Which.Plain` is a folder in Hugging Face layout (config.json, safetensors, tokenizer.json),
/// local or on the hub; `Which.GGUF` is one GGUF file or the parts of a split one, `Which.GGML` a file from before GGUF.
/// `Which.Lora`, `Which.GGUF` and `Which.GGML` take adapters (the older forms are `Which.LoraGGUF` and `Which.LoraGGML`),
/// `Which.MultimodalPlain` (or `Which.VisionPlain`) and `Which.GGUF` with an image encoder see images, and `Which.Embedding`
/// makes embeddings. All give back their fields, are equal to one of equal fields, and can be copied and pickled. The other kinds
/// are not supported yet.
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
    /// here are not supported yet. `imatrix` is the path of an importance matrix of llama.cpp, of either kind: how much each
    /// column counts where `in_situ_quant` makes Q2K, Q3K, Q4K, Q5K or Q6K of a matrix. `calibration_file` is the path of a text
    /// by which the same is measured before.
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
        calibration_file: Option<CalibrationFile>,
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
    /// A model that sees images, hears sounds, or does both, beside text, in Hugging Face layout with
    /// `preprocessor_config.json` or `processor_config.json`; `Which.VisionPlain` is the same. `arch` left out follows
    /// config.json. `max_edge`, in pixels, 1 or more: an image whose longer edge has more is made smaller first.
    /// `encoder_cache_memory_bytes`, 1 or more: what vectors of images and sounds may take beside the KV pool; a conversation
    /// about one computes them once. Unless given it is 256 MiB, or two images of Llama 3.2 Vision if that is more. The other
    /// fields are as in `Which.Plain`. Fields not named here are not supported yet.
    #[pyo3(constructor = (
        model_id, arch=None, tokenizer_json=None, topology=None, write_uqff=None, from_uqff=None, dtype=ModelDType::Auto,
        max_edge=None, calibration_file=None, imatrix=None, hf_cache_path=None, matformer_config_path=None,
        matformer_slice_name=None, organization=None, encoder_cache_memory_bytes=None, *, auto_map_params=None
    ))]
    MultimodalPlain {
        model_id: ModelId,
        arch: Option<MultimodalArchitecture>,
        tokenizer_json: Option<TokenizerJson>,
        topology: Option<Py<PyAny>>,
        write_uqff: Option<Py<PyAny>>,
        from_uqff: Option<Py<PyAny>>,
        dtype: ModelDType,
        max_edge: Option<MaxEdge>,
        calibration_file: Option<CalibrationFile>,
        imatrix: Option<ImatrixPath>,
        hf_cache_path: Option<HfCachePath>,
        matformer_config_path: Option<Py<PyAny>>,
        matformer_slice_name: Option<Py<PyAny>>,
        organization: Option<Py<PyAny>>,
        encoder_cache_memory_bytes: Option<EncoderCacheBytes>,
        auto_map_params: Option<Py<PyAny>>,
    },
    /// A model that makes embeddings: `model_id` is a local folder or a hub id, in Hugging Face layout as sentence-transformers
    /// writes it, or a local GGUF file. `pooling`, "mean", "cls" or "last", says how a text's hidden states become one vector; it
    /// is needed where the files do not say, so that any text model can be loaded so, and goes before them. `quantized_filename`
    /// is a GGUF file in `model_id`, or the parts of a split one; `tok_model_id` is as in `Which.GGUF`, the other fields as in
    /// `Which.Plain`. Fields not named here are not supported yet.
    #[pyo3(constructor = (
        model_id, arch=None, tokenizer_json=None, topology=None, write_uqff=None, from_uqff=None, dtype=ModelDType::Auto,
        hf_cache_path=None, imatrix=None, calibration_file=None, *, pooling=None, quantized_filename=None, tok_model_id=None
    ))]
    Embedding {
        model_id: ModelId,
        arch: Option<EmbeddingArchitecture>,
        tokenizer_json: Option<TokenizerJson>,
        topology: Option<Py<PyAny>>,
        write_uqff: Option<Py<PyAny>>,
        from_uqff: Option<Py<PyAny>>,
        dtype: ModelDType,
        hf_cache_path: Option<HfCachePath>,
        imatrix: Option<Py<PyAny>>,
        calibration_file: Option<Py<PyAny>>,
        pooling: Option<Pooling>,
        quantized_filename: Option<QuantizedFilename>,
        tok_model_id: Option<TokModelId>,
    },
    /// GGUF: `quantized_model_id` is a local folder, a local .gguf file or a hub id, `quantized_filename` the file in it, or the
    /// parts of a split file in order. `tok_model_id` is a local folder or hub id whose tokenizer.json is used instead of the
    /// file's metadata; `tokenizer_json`, `dtype`, `imatrix`, `calibration_file` and `hf_cache_path` are as in `Which.Plain`,
    /// `adapters`, their limits and their older form as in `Which.Lora`; without any of those it takes none. Files in use must
    /// not be changed. `mmproj_filename` is the GGUF file of a model's encoders, beside the other in the folder or on the hub, or
    /// the path of a local file: with it the model sees or hears, and `max_edge` and `encoder_cache_memory_bytes` are as in
    /// `Which.MultimodalPlain`. Fields not named here are not supported yet.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename=None, tok_model_id=None, topology=None, dtype=ModelDType::Auto, *,
        tokenizer_json=None, mmproj_filename=None, organization=None, write_uqff=None, from_uqff=None, imatrix=None,
        calibration_file=None, max_edge=None, adapters=None, max_adapters=None, max_rank=None, max_bytes=None, hf_cache_path=None,
        matformer_config_path=None, matformer_slice_name=None, encoder_cache_memory_bytes=None, auto_map_params=None,
        adapters_model_id=None, order=None
    ))]
    #[allow(clippy::upper_case_acronyms)]
    GGUF {
        quantized_model_id: QuantizedModelId,
        quantized_filename: Option<QuantizedFilename>,
        tok_model_id: Option<TokModelId>,
        topology: Option<Py<PyAny>>,
        dtype: ModelDType,
        tokenizer_json: Option<TokenizerJson>,
        mmproj_filename: Option<MmprojFilename>,
        organization: Option<Py<PyAny>>,
        write_uqff: Option<Py<PyAny>>,
        from_uqff: Option<Py<PyAny>>,
        imatrix: Option<ImatrixPath>,
        calibration_file: Option<CalibrationFile>,
        max_edge: Option<MaxEdge>,
        adapters: Option<Py<PyAny>>,
        max_adapters: Option<Py<PyAny>>,
        max_rank: Option<Py<PyAny>>,
        max_bytes: Option<Py<PyAny>>,
        hf_cache_path: Option<HfCachePath>,
        matformer_config_path: Option<Py<PyAny>>,
        matformer_slice_name: Option<Py<PyAny>>,
        encoder_cache_memory_bytes: Option<EncoderCacheBytes>,
        auto_map_params: Option<Py<PyAny>>,
        adapters_model_id: Option<Py<PyAny>>,
        order: Option<Py<PyAny>>,
    },
    /// A file of Llama as they were before GGUF (GGML, GGMF, GGJT): floats of any version, quantized weights of GGJT v3.
    /// `quantized_model_id` and `quantized_filename` are as in `Which.GGUF`; the file may be the former. `gqa`: how many heads of
    /// queries share one of keys, which the file does not say: 1, or 8 for Llama 2 70B. `tok_model_id` and `tokenizer_json` are
    /// used instead of the file's vocabulary, `dtype` and `hf_cache_path` as in `Which.Plain`, `adapters`, their limits and their
    /// older form as in `Which.Lora`.
    #[pyo3(constructor = (
        quantized_model_id, quantized_filename=None, tok_model_id=None, tokenizer_json=None, gqa=Gqa(1), topology=None,
        dtype=ModelDType::Auto, *, hf_cache_path=None, adapters=None, max_adapters=None, max_rank=None, max_bytes=None,
        adapters_model_id=None, order=None
    ))]
    #[allow(clippy::upper_case_acronyms)]
    GGML {
        quantized_model_id: QuantizedModelId,
        quantized_filename: Option<QuantizedFilename>,
        tok_model_id: Option<TokModelId>,
        tokenizer_json: Option<TokenizerJson>,
        gqa: Gqa,
        topology: Option<Py<PyAny>>,
        dtype: ModelDType,
        hf_cache_path: Option<HfCachePath>,
        adapters: Option<Py<PyAny>>,
        max_adapters: Option<Py<PyAny>>,
        max_rank: Option<Py<PyAny>>,
        max_bytes: Option<Py<PyAny>>,
        adapters_model_id: Option<Py<PyAny>>,
        order: Option<Py<PyAny>>,
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
            Self::MultimodalPlain { dtype, .. } => ("MultimodalPlain", dtype),
            Self::Embedding { dtype, .. } => ("Embedding", dtype),
            Self::GGUF { dtype, .. } => ("GGUF", dtype),
            Self::GGML { dtype, .. } => ("GGML", dtype),
        };
        let fields = PyDict::new(slf.py());
        for name in slf.as_any().getattr("__match_args__")?.try_iter()? {
            let name = name?;
            let value = slf.as_any().getattr(name.cast::<PyString>()?)?;
            let is_default =
                value.is_none() || name.eq("dtype")? && *dtype == ModelDType::Auto || name.eq("gqa")? && value.eq(1)?;
            if !is_default {
                fields.set_item(name, value)?;
            }
        }
        Ok((kind, fields))
    }
}

/// Fields of any kind that are not supported yet.
const PLANNED: [&str; 7] =
    ["topology", "organization", "write_uqff", "from_uqff", "matformer_config_path", "matformer_slice_name", "auto_map_params"];

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
    /// A text to measure it by.
    pub calibration_file: Option<String>,
    /// Folder of the download cache.
    pub cache_dir: Option<String>,
    /// The adapters that it is loaded with, if it takes any.
    pub adapters: Option<AdapterFields>,
    /// It makes embeddings.
    pub embedding: Option<EmbeddingOptions>,
    /// It sees or hears; the encoder's file is that of `mmproj`, once it is found.
    pub media: Option<MediaOptions>,
    /// The encoder's file, of a GGUF file.
    pub mmproj: Option<String>,
    /// What config.json must say of a model that sees.
    pub multimodal: Option<MultimodalArchitecture>,
}

/// Where a model lies, before downloading.
pub enum Place {
    /// A folder or hub id.
    Plain,
    /// The same with what images need.
    Multimodal,
    /// The same with the folders of sentence-transformers.
    Embedding,
    /// A folder, file or hub id with GGUF files.
    Gguf {
        /// The files, when named.
        files: Option<Vec<String>>,
        /// Folder or hub id with a tokenizer.json.
        tok_model_id: Option<String>,
        /// `None`: GGUF. Else a file from before, and how many heads of queries share one of keys.
        gqa: Option<usize>,
    },
}

impl Selection {
    /// A model without anything that its kind may leave out.
    fn new(place: Place, model_id: &Text, dtype: ModelDType) -> Self {
        Self {
            place,
            model_id: model_id.0.clone(),
            architecture: None,
            dtype,
            tokenizer_json: None,
            imatrix: None,
            calibration_file: None,
            cache_dir: None,
            adapters: None,
            embedding: None,
            media: None,
            mmproj: None,
            multimodal: None,
        }
    }

    /// A model of text by its name alone: a GGUF file, else a folder in Hugging Face layout or a hub id.
    pub fn of_text(model: &str) -> Self {
        let is_gguf = Path::new(model).extension().is_some_and(|end| end == "gguf");
        let place = if is_gguf { gguf(None, None, None) } else { Place::Plain };
        Self::new(place, &Text(model.to_owned()), ModelDType::Auto)
    }

    /// The model to load; a field that is not supported yet is an error that names it.
    pub fn of(which: &Bound<'_, Which>) -> PyResult<Self> {
        let fields = which.as_any();
        for name in PLANNED {
            refuse(&[(name, fields.hasattr(name)? && !fields.getattr(name)?.is_none())])?;
        }
        let string = |text: Option<&Text>| text.map(|Text(text)| text.clone());
        let (imatrix, calibration_file) = importance_of(which.get());
        match which.get() {
            Which::Plain { model_id, arch, tokenizer_json, dtype, hf_cache_path, .. }
            | Which::Lora { model_id, arch, tokenizer_json, dtype, hf_cache_path, .. } => Ok(Self {
                architecture: arch.map(Architecture::model_type).transpose()?,
                tokenizer_json: string(tokenizer_json.as_ref().map(|path| &path.0)),
                imatrix,
                calibration_file,
                cache_dir: string(hf_cache_path.as_ref().map(|path| &path.0)),
                adapters: match which.get() {
                    Which::Lora { .. } => Some(AdapterFields::of(fields)?.unwrap_or_default()),
                    _ => None,
                },
                ..Self::new(Place::Plain, &model_id.0, *dtype)
            }),
            Which::MultimodalPlain { .. } => Self::multimodal(which.get()),
            Which::Embedding { .. } => Self::embedding(which.get()),
            Which::GGUF {
                quantized_model_id,
                quantized_filename,
                tok_model_id,
                dtype,
                tokenizer_json,
                mmproj_filename,
                max_edge,
                encoder_cache_memory_bytes,
                hf_cache_path,
                ..
            } => {
                let adapters = AdapterFields::of(fields)?;
                let mmproj = string(mmproj_filename.as_ref().map(|path| &path.0));
                Ok(Self {
                    tokenizer_json: string(tokenizer_json.as_ref().map(|path| &path.0)),
                    imatrix,
                    calibration_file,
                    cache_dir: string(hf_cache_path.as_ref().map(|path| &path.0)),
                    media: gguf_media(mmproj.as_deref(), *max_edge, *encoder_cache_memory_bytes, adapters.is_some())?,
                    mmproj,
                    adapters,
                    ..Self::new(gguf(quantized_filename.as_ref(), tok_model_id.as_ref(), None), &quantized_model_id.0, *dtype)
                })
            }
            Which::GGML {
                quantized_model_id,
                quantized_filename,
                tok_model_id,
                tokenizer_json,
                gqa,
                dtype,
                hf_cache_path,
                ..
            } => Ok(Self {
                tokenizer_json: string(tokenizer_json.as_ref().map(|path| &path.0)),
                cache_dir: string(hf_cache_path.as_ref().map(|path| &path.0)),
                adapters: AdapterFields::of(fields)?,
                ..Self::new(gguf(quantized_filename.as_ref(), tok_model_id.as_ref(), Some(gqa.0)), &quantized_model_id.0, *dtype)
            }),
        }
    }

    /// Of a model that makes embeddings.
    fn embedding(which: &Which) -> PyResult<Self> {
        let Which::Embedding {
            model_id,
            arch,
            tokenizer_json,
            dtype,
            hf_cache_path,
            pooling,
            quantized_filename,
            tok_model_id,
            imatrix,
            calibration_file,
            ..
        } = which
        else {
            return Err(invalid("`which` makes no embeddings"));
        };
        let string = |text: Option<&Text>| text.map(|Text(text)| text.clone());
        refuse(&[("imatrix", imatrix.is_some()), ("calibration_file", calibration_file.is_some())])?;
        let is_gguf = quantized_filename.is_some() || Path::new(&model_id.0.0).extension().is_some_and(|end| end == "gguf");
        let arch = arch.map(EmbeddingArchitecture::model_type);
        if is_gguf && arch.is_some() {
            return Err(invalid("`arch` goes with a model in Hugging Face layout; a GGUF file names its own"));
        }
        if !is_gguf && tok_model_id.is_some() {
            return Err(invalid("`tok_model_id` goes with a GGUF file; name it with quantized_filename"));
        }
        let place = if is_gguf { gguf(quantized_filename.as_ref(), tok_model_id.as_ref(), None) } else { Place::Embedding };
        Ok(Self {
            architecture: arch,
            tokenizer_json: string(tokenizer_json.as_ref().map(|path| &path.0)),
            cache_dir: string(hf_cache_path.as_ref().map(|path| &path.0)),
            embedding: Some(EmbeddingOptions { pooling: pooling.as_ref().map(|pooling| pooling.0) }),
            ..Self::new(place, &model_id.0, *dtype)
        })
    }

    /// A model that sees images or hears sounds.
    fn multimodal(which: &Which) -> PyResult<Self> {
        let Which::MultimodalPlain {
            model_id,
            arch,
            tokenizer_json,
            dtype,
            max_edge,
            hf_cache_path,
            encoder_cache_memory_bytes,
            ..
        } = which
        else {
            return Err(invalid("not a model that sees or hears"));
        };
        arch.map(MultimodalArchitecture::model_types).transpose()?;
        let (imatrix, calibration_file) = importance_of(which);
        let media = MediaOptions {
            max_edge: max_edge.map(|edge| edge.0),
            cache_bytes: encoder_cache_memory_bytes.map(|bytes| bytes.0 as u64),
            mmproj: None,
        };
        Ok(Self {
            tokenizer_json: tokenizer_json.as_ref().map(|path| path.0.0.clone()),
            imatrix,
            calibration_file,
            cache_dir: hf_cache_path.as_ref().map(|path| path.0.0.clone()),
            media: Some(media),
            multimodal: *arch,
            ..Self::new(Place::Multimodal, &model_id.0, *dtype)
        })
    }
}

/// How a GGUF file sees or hears, if an encoder goes with it.
fn gguf_media(
    mmproj: Option<&str>,
    max_edge: Option<MaxEdge>,
    cache_bytes: Option<EncoderCacheBytes>,
    has_adapters: bool,
) -> PyResult<Option<MediaOptions>> {
    if mmproj.is_none() {
        let given = [("max_edge", max_edge.is_some()), ("encoder_cache_memory_bytes", cache_bytes.is_some())];
        return match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(invalid(format!("`{name}` is about images, which a GGUF file sees with mmproj_filename"))),
            None => Ok(None),
        };
    }
    if has_adapters {
        return Err(invalid("adapters with images are not supported: leave out mmproj_filename, or adapters"));
    }
    let cache_bytes = cache_bytes.map(|bytes| bytes.0 as u64);
    Ok(Some(MediaOptions { max_edge: max_edge.map(|edge| edge.0), cache_bytes, mmproj: None }))
}

/// GGUF files, or with `gqa` one from before.
fn gguf(files: Option<&QuantizedFilename>, tok_model_id: Option<&TokModelId>, gqa: Option<usize>) -> Place {
    Place::Gguf { files: files.map(|files| files.0.clone().into_vec()), tok_model_id: tok_model_id.map(|id| id.0.0.clone()), gqa }
}

/// An importance matrix, and a text to measure one by.
fn importance_of(which: &Which) -> (Option<String>, Option<String>) {
    match which {
        Which::Plain { imatrix, calibration_file, .. }
        | Which::MultimodalPlain { imatrix, calibration_file, .. }
        | Which::GGUF { imatrix, calibration_file, .. } => {
            (imatrix.as_ref().map(|path| path.0.0.clone()), calibration_file.as_ref().map(|path| path.0.0.clone()))
        }
        Which::Lora { .. } | Which::Embedding { .. } | Which::GGML { .. } => (None, None),
    }
}
