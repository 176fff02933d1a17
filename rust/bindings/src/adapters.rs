//! Adapters in the mirrored interface: what names them, and the methods of a runner that load and unload them.

use std::path::PathBuf;

use engine::{AdapterChoice, AdapterInfo, AdapterOptions, LoadAdapter};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyList, PyString, PyTuple, PyType},
};

use crate::{
    arguments::{Gqa, Integer, QuantizedFilename, QuantizedModelId, TokModelId, TokenizerJson, at_least},
    detach::enter,
    enums::ModelDType,
    exceptions::{invalid, raise},
    fields::record,
    runner::Runner,
    which::Which,
};

record! {
    /// An adapter to load: what requests call it, and a local folder (PEFT), a GGUF file or a hub id.
    pub struct LoraAdapter(alias, source, revision=None) {
        alias: String,
        source: String,
        revision: Option<String>,
    }
}

record! {
    /// Weights of an adapter by the hash of its files, 64 hexadecimal digits: `adapter=` of a request may be one.
    pub struct LoraAdapterGeneration {
        generation: String,
    }
}

record! {
    /// An adapter that is loaded. `bytes` are those that it keeps in memory.
    pub struct LoraAdapterInfo {
        alias: String,
        generation: String,
        source: String,
        rank: usize,
        bytes: u64,
    }
}

record! {
    /// How many adapters are loaded, and how many more may be. `bytes` counts those too that only running requests still use.
    pub struct LoraRuntimeStatus {
        num_adapters: usize,
        max_adapters: usize,
        max_rank: usize,
        bytes: u64,
        max_bytes: u64,
    }
}

impl From<AdapterInfo> for LoraAdapterInfo {
    fn from(info: AdapterInfo) -> Self {
        let AdapterInfo { alias, generation, source, rank, bytes } = info;
        Self { alias, generation, source: source.display().to_string(), rank, bytes }
    }
}

/// What `adapter` or the older `adapters` of a request says.
pub fn choice(adapter: Option<&Bound<'_, PyAny>>, adapters: Option<&Bound<'_, PyAny>>) -> PyResult<Option<AdapterChoice>> {
    let one = |value: &Bound<'_, PyAny>| {
        if let Ok(generation) = value.cast::<LoraAdapterGeneration>() {
            return Ok(AdapterChoice::Generation(generation.get().generation.clone()));
        }
        let alias = value.cast::<PyString>().map_err(|_| {
            PyTypeError::new_err(format!("`adapter` must be the alias of an adapter or a LoraAdapterGeneration, got {value}"))
        })?;
        Ok(AdapterChoice::Alias(alias.to_cow()?.into_owned()))
    };
    match (adapter, adapters) {
        (Some(_), Some(_)) => Err(invalid("`adapters` is the older name of `adapter`: give one of them")),
        (Some(adapter), None) => one(adapter).map(Some),
        (None, Some(adapters)) => Ok(Some(only(adapters, "adapters")?.as_ref().map_or(Ok(AdapterChoice::Base), one)?)),
        (None, None) => Ok(None),
    }
}

/// The one entry of a list, or none.
fn only<'py>(list: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    let list = list.cast::<PyList>().map_err(|_| PyTypeError::new_err(format!("`{name}` must be a list, got {list}")))?;
    match list.len() {
        0 => Ok(None),
        1 => list.get_item(0).map(Some),
        n => Err(invalid(format!("`{name}` has {n} entries, and a request runs with one adapter: merge them, or name one"))),
    }
}

/// What a `Which` says of adapters.
#[derive(Default)]
pub struct AdapterFields {
    /// Alias, source and revision.
    pub adapters: Vec<(String, String, Option<String>)>,
    /// The older form: where folders of adapters lie, and the file with their order.
    pub ordered: Option<(String, String)>,
    /// The limits; no adapters are in it.
    pub limits: AdapterOptions,
}

impl AdapterFields {
    /// Of a `Which` with such fields; `None` if all are left out.
    pub fn of(which: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let field = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
            if !which.hasattr(name)? {
                return Ok(None);
            }
            Ok(Some(which.getattr(name)?).filter(|value| !value.is_none()))
        };
        let count = |name: &str, default: usize| match field(name)? {
            Some(value) => at_least(name, &value.extract::<Integer>()?, 1),
            None => Ok(default),
        };
        let default = AdapterOptions::default();
        let limits = AdapterOptions {
            adapters: Vec::new(),
            max_adapters: count("max_adapters", default.max_adapters)?,
            max_rank: count("max_rank", default.max_rank)?,
            max_bytes: count("max_bytes", usize::try_from(default.max_bytes).unwrap_or(usize::MAX))? as u64,
        };
        let mut adapters = Vec::new();
        let listed = field("adapters")?.map(|list| list.extract::<Vec<Bound<'_, PyAny>>>()).transpose()?;
        for adapter in listed.into_iter().flatten() {
            let adapter = adapter
                .cast::<LoraAdapter>()
                .map_err(|_| PyTypeError::new_err(format!("`adapters` must be a list of LoraAdapter, got {adapter}")))?;
            let LoraAdapter { alias, source, revision } = adapter.get();
            adapters.push((alias.clone(), source.clone(), revision.clone()));
        }
        let text = |name: &str| field(name)?.map(|value| value.extract::<String>()).transpose();
        let ordered = match (text("adapters_model_id")?, text("order")?) {
            (Some(source), Some(order)) => Some((source, order)),
            (None, None) => None,
            _ => return Err(invalid("`adapters_model_id` and `order` go together: give both, or `adapters`")),
        };
        let names = ["adapters", "max_adapters", "max_rank", "max_bytes", "adapters_model_id"];
        let is_given = names.iter().map(|name| Ok(field(name)?.is_some())).collect::<PyResult<Vec<_>>>()?;
        Ok(is_given.contains(&true).then_some(Self { adapters, ordered, limits }))
    }
}

#[pymethods]
#[allow(non_snake_case, reason = "constructors in all but name")]
#[allow(clippy::too_many_arguments, reason = "mirrors a documented signature")]
impl Which {
    /// A GGUF file with adapters, in the older form: `Which.GGUF` with `adapters_model_id`, a folder or hub id with a folder an
    /// adapter, which the list "order" in the JSON file `order` names. What it gives is a `Which.GGUF`.
    #[staticmethod]
    #[pyo3(signature = (
        quantized_model_id, quantized_filename, adapters_model_id, order, tok_model_id=None, topology=None, dtype=ModelDType::Auto
    ))]
    fn LoraGGUF(
        quantized_model_id: QuantizedModelId,
        quantized_filename: Option<QuantizedFilename>,
        adapters_model_id: Py<PyAny>,
        order: Py<PyAny>,
        tok_model_id: Option<TokModelId>,
        topology: Option<Py<PyAny>>,
        dtype: ModelDType,
    ) -> Self {
        Self::GGUF {
            quantized_model_id,
            quantized_filename,
            tok_model_id,
            topology,
            dtype,
            tokenizer_json: None,
            mmproj_filename: None,
            organization: None,
            write_uqff: None,
            from_uqff: None,
            imatrix: None,
            calibration_file: None,
            max_edge: None,
            adapters: None,
            max_adapters: None,
            max_rank: None,
            max_bytes: None,
            hf_cache_path: None,
            matformer_config_path: None,
            matformer_slice_name: None,
            encoder_cache_memory_bytes: None,
            auto_map_params: None,
            adapters_model_id: Some(adapters_model_id),
            order: Some(order),
        }
    }

    /// The same with a file from before GGUF: a `Which.GGML`.
    #[staticmethod]
    #[pyo3(signature = (
        quantized_model_id, quantized_filename, adapters_model_id, order, tok_model_id=None, tokenizer_json=None, gqa=Gqa(1),
        topology=None, dtype=ModelDType::Auto
    ))]
    fn LoraGGML(
        quantized_model_id: QuantizedModelId,
        quantized_filename: Option<QuantizedFilename>,
        adapters_model_id: Py<PyAny>,
        order: Py<PyAny>,
        tok_model_id: Option<TokModelId>,
        tokenizer_json: Option<TokenizerJson>,
        gqa: Gqa,
        topology: Option<Py<PyAny>>,
        dtype: ModelDType,
    ) -> Self {
        Self::GGML {
            quantized_model_id,
            quantized_filename,
            tok_model_id,
            tokenizer_json,
            gqa,
            topology,
            dtype,
            hf_cache_path: None,
            adapters: None,
            max_adapters: None,
            max_rank: None,
            max_bytes: None,
            adapters_model_id: Some(adapters_model_id),
            order: Some(order),
        }
    }
}

#[pymethods]
impl Runner {
    /// Loads an adapter under an alias while requests run: a `LoraAdapterInfo`. `load_inplace` puts it in the place of another,
    /// whose requests go on with what they began with; `expected_generation` is that of the other.
    ///
    /// Raises `LoraAdapterError`, whose `code` says why: "lora_adapter_already_loaded", "lora_rank_limit_exceeded",
    /// "invalid_lora_adapter", ...
    #[pyo3(signature = (alias, adapter_dir, load_inplace=false, expected_generation=None))]
    fn load_lora_adapter(
        &self,
        py: Python<'_>,
        alias: &str,
        adapter_dir: PathBuf,
        load_inplace: bool,
        expected_generation: Option<String>,
    ) -> PyResult<LoraAdapterInfo> {
        let engine = self.engine()?;
        let alias = alias.to_owned();
        let how = LoadAdapter { in_place: load_inplace, expected_generation };
        let info = enter(py, move || Ok(engine.load_adapter(&alias, &adapter_dir, &how)))?;
        info.map(LoraAdapterInfo::from).map_err(raise)
    }

    /// Takes an alias away: the `LoraAdapterInfo` of what it was. Requests in flight go on with it; its memory is given back
    /// behind the last of them.
    #[pyo3(signature = (alias, expected_generation=None))]
    fn unload_lora_adapter(&self, alias: &str, expected_generation: Option<&str>) -> PyResult<LoraAdapterInfo> {
        self.engine()?.unload_adapter(alias, expected_generation).map(LoraAdapterInfo::from).map_err(raise)
    }

    /// The adapters that are loaded, by alias.
    fn list_lora_adapters(&self) -> PyResult<Vec<LoraAdapterInfo>> {
        Ok(self.engine()?.adapters().into_iter().map(LoraAdapterInfo::from).collect())
    }

    /// How many adapters are loaded, and how many more may be: a `LoraRuntimeStatus`.
    fn lora_adapter_status(&self) -> PyResult<LoraRuntimeStatus> {
        let status = self.engine()?.adapter_status().map_err(raise)?;
        let engine::AdapterStatus { num_adapters, max_adapters, max_rank, bytes, max_bytes } = status;
        Ok(LoraRuntimeStatus { num_adapters, max_adapters, max_rank, bytes, max_bytes })
    }

    /// Which adapter requests run with that name none: a list with one alias, or an empty one for the model as it is. Several at
    /// once are not supported.
    fn activate_adapters(&self, adapter_names: &Bound<'_, PyAny>) -> PyResult<()> {
        let name = only(adapter_names, "adapter_names")?.map(|name| name.extract::<String>()).transpose()?;
        self.engine()?.activate_adapter(name.as_deref()).map_err(raise)
    }
}
