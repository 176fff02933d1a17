//! The ledger of an engine's memory.

use engine::{CpuOptions, DeviceBytes, Engine, EngineConfig, ModelSource};
use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyDict, PyString, PyType},
};

use crate::{
    arguments::{Integer, Real, at_least, at_least_if_given, text, within},
    detach::enter,
    doctor,
    enums::PagedCacheType,
    exceptions::raise,
    options::{self, MemoryArguments},
    response::escaped,
    runner::{Runner, batched_tokens, check_max_seqs, check_prefix_cache_n},
    which::{Selection, Which},
};

/// Where the memory goes: what `Runner.memory_plan` foretells, and `Runner.memory_ledger` tells of a running model. Sizes are in
/// bytes and, of several devices, sums. Memory is committed as it is first written: these are the figures once every block has
/// been used and a step of the most tokens has run.
///
/// - `weights_bytes` in the form that is computed with, `kv_cache_bytes` with the null block, `states_bytes` of recurrent layers,
///   `state_snapshots_bytes` of snapshots of these for prefix hits, `activations_bytes` with logits and rope tables,
///   `workspaces_bytes` of the kernels, `graphs_bytes` of CUDA graphs on a GPU, `tokenizer_bytes` of the host estimated from the
///   vocabulary, `encoder_cache_bytes` for outputs of vision and audio encoders (0 for models of text), `margin_bytes` left free
///   for what is not counted, such as pages of the program's own file. `resident_bytes` is all of them but the margin. `devices`
///   has these for each device, with its `device_total_bytes` and `device_available_bytes`.
/// - `num_blocks` usable blocks of `block_size` tokens, `bytes_per_block` each. `groups`: of each group of layers with one block
///   table its `window` in tokens (None: all), `num_layers` and `block_bytes`.
/// - `servable_tokens`: the longest request, prompt and answer. `num_requests_that_fit(n)`: requests of n tokens that fit at
///   once.
/// - `max_seqs`, `max_model_len` (tokens of a request at most) and `guaranteed`: whether that many of that length are guaranteed.
///
/// Its `str` is a table. It can be copied, pickled and compared.
#[pyclass(frozen, module = "mistral_paged")]
pub struct MemoryPlan(engine::MemoryPlan);

impl MemoryPlan {
    /// Makes the plan without holding the interpreter; `devices` are megabytes.
    pub fn of(py: Python<'_>, source: &ModelSource, config: &EngineConfig, devices: Option<&[Integer]>) -> PyResult<Self> {
        const MAX_MEGABYTES: usize = 1 << 40;
        let bytes = |megabytes: &Integer| Ok((within("devices", megabytes, 1, MAX_MEGABYTES)? as u64) << 20);
        let cards = devices.map(|devices| devices.iter().map(bytes).collect::<PyResult<Vec<_>>>()).transpose()?;
        enter(py, || Engine::memory_plan(source, config, cards.as_deref())).map(Self)
    }

    /// The plan that an engine was loaded by.
    pub fn of_engine(engine: &Engine) -> Self {
        Self(engine.memory_ledger())
    }

    fn sum(&self, of: impl Fn(&DeviceBytes) -> u64) -> u64 {
        self.0.devices.iter().map(of).sum()
    }
}

#[pymethods]
impl MemoryPlan {
    #[getter]
    fn weights_bytes(&self) -> u64 {
        self.sum(|device| device.weights)
    }

    #[getter]
    fn kv_cache_bytes(&self) -> u64 {
        self.sum(|device| device.kv_cache)
    }

    #[getter]
    fn states_bytes(&self) -> u64 {
        self.sum(|device| device.states)
    }

    #[getter]
    fn state_snapshots_bytes(&self) -> u64 {
        self.sum(|device| device.state_snapshots)
    }

    #[getter]
    fn activations_bytes(&self) -> u64 {
        self.sum(|device| device.activations)
    }

    #[getter]
    fn workspaces_bytes(&self) -> u64 {
        self.sum(|device| device.workspaces)
    }

    #[getter]
    fn graphs_bytes(&self) -> u64 {
        self.sum(|device| device.graphs)
    }

    #[getter]
    fn tokenizer_bytes(&self) -> u64 {
        self.sum(|device| device.tokenizer)
    }

    #[getter]
    fn adapter_bytes(&self) -> u64 {
        self.sum(|device| device.adapters)
    }

    #[getter]
    fn encoder_cache_bytes(&self) -> u64 {
        self.sum(|device| device.encoder_cache)
    }

    #[getter]
    fn margin_bytes(&self) -> u64 {
        self.sum(|device| device.margin)
    }

    #[getter]
    fn resident_bytes(&self) -> u64 {
        self.sum(DeviceBytes::resident)
    }

    #[getter]
    fn devices<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let device = |bytes: &DeviceBytes| {
            let dict = PyDict::new(py);
            dict.set_item("weights_bytes", bytes.weights)?;
            dict.set_item("kv_cache_bytes", bytes.kv_cache)?;
            dict.set_item("states_bytes", bytes.states)?;
            dict.set_item("state_snapshots_bytes", bytes.state_snapshots)?;
            dict.set_item("activations_bytes", bytes.activations)?;
            dict.set_item("workspaces_bytes", bytes.workspaces)?;
            dict.set_item("graphs_bytes", bytes.graphs)?;
            dict.set_item("tokenizer_bytes", bytes.tokenizer)?;
            dict.set_item("encoder_cache_bytes", bytes.encoder_cache)?;
            dict.set_item("adapter_bytes", bytes.adapters)?;
            dict.set_item("margin_bytes", bytes.margin)?;
            dict.set_item("device_total_bytes", bytes.device_total)?;
            dict.set_item("device_available_bytes", bytes.device_available)?;
            Ok(dict)
        };
        self.0.devices.iter().map(device).collect()
    }

    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let group = |group: &engine::GroupPlan| {
            let dict = PyDict::new(py);
            dict.set_item("window", group.window)?;
            dict.set_item("num_layers", group.num_layers)?;
            dict.set_item("block_bytes", group.block_bytes)?;
            Ok(dict)
        };
        self.0.groups.iter().map(group).collect()
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    #[getter]
    fn bytes_per_block(&self) -> u64 {
        self.0.bytes_per_block
    }

    #[getter]
    fn servable_tokens(&self) -> usize {
        self.0.servable_tokens()
    }

    #[getter]
    fn max_seqs(&self) -> usize {
        self.0.max_num_seqs
    }

    #[getter]
    fn max_model_len(&self) -> usize {
        self.0.max_model_len
    }

    #[getter]
    fn guaranteed(&self) -> bool {
        self.0.guaranteed
    }

    /// Requests of so many tokens each, prompt and answer, whose KV the pool holds at once.
    #[allow(clippy::needless_pass_by_value, reason = "an argument")]
    fn num_requests_that_fit(&self, num_tokens: Integer) -> PyResult<usize> {
        Ok(self.0.num_requests_that_fit(at_least("num_tokens", &num_tokens, 1)?))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn _repr_html_(&self) -> String {
        format!("<pre>{}</pre>", escaped(&self.0.to_string()))
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        match other.cast::<Self>() {
            Ok(other) => (self.0 == other.get().0).into_py_any(py),
            Err(_) => Ok(py.NotImplemented()),
        }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyType>,))> {
        let saved = slf.get().0.to_json().map_err(raise)?;
        // A static method has no name of its own to be pickled by.
        let call = slf.py().import("operator")?.getattr("methodcaller")?.call1(("_of_json", saved))?;
        Ok((call, (slf.get_type(),)))
    }

    /// The plan that was pickled.
    #[staticmethod]
    fn _of_json(text: &str) -> PyResult<Self> {
        engine::MemoryPlan::from_json(text).map(Self).map_err(raise)
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        format!(
            "MemoryPlan(resident_bytes={}, num_blocks={}, block_size={}, servable_tokens={})",
            self.resident_bytes(),
            self.num_blocks(),
            self.block_size(),
            self.servable_tokens()
        )
    }
}

#[pymethods]
impl Runner {
    /// What a model would take of the memory, and how many blocks and requests that leaves room for: a `MemoryPlan`, made from
    /// the headers of the model's files without reading weights. The keywords are those of `Runner` that concern memory, and
    /// refuse what `Runner` would.
    ///
    /// - A `Which.Plain` folder may be without weights: config.json is enough. Each parameter of the architecture then counts 2
    ///   bytes (norms and biases 4), and the tokenizer nothing.
    /// - `devices`: a list of megabytes, one a device, to plan for instead of this host: all free, each with an equal share of
    ///   the layers in order, the first with the token embedding and the last with the output projection, weights as their files
    ///   store them.
    #[staticmethod]
    #[pyo3(signature = (
        which, max_seqs=32, token_source="cache", pa_gpu_mem=None, pa_gpu_mem_usage=None, pa_ctxt_len=None, pa_blk_size=None,
        pa_cache_type=None, no_paged_attn=false, memory_goal=None, max_num_batched_tokens=None, device="auto", *,
        deterministic=false, guaranteed=false, devices=None, cpu_tier=None, num_threads=None, in_situ_quant=None, which_draft=None,
        speculative=None, mtp_model=None, mtp_n_predict=None, state_snapshot_mb=None, prefix_cache_n=16
    ))]
    #[allow(clippy::too_many_arguments, reason = "those of the constructor")]
    #[allow(clippy::needless_pass_by_value, reason = "one line an argument")]
    fn memory_plan(
        py: Python<'_>,
        which: &Bound<'_, Which>,
        #[pyo3(from_py_with = check_max_seqs)] max_seqs: usize,
        #[pyo3(from_py_with = text::token_source)] token_source: &str,
        pa_gpu_mem: Option<Integer>,
        pa_gpu_mem_usage: Option<Real>,
        pa_ctxt_len: Option<Integer>,
        pa_blk_size: Option<Integer>,
        pa_cache_type: Option<PagedCacheType>,
        no_paged_attn: bool,
        memory_goal: Option<Bound<'_, PyAny>>,
        max_num_batched_tokens: Option<Integer>,
        #[pyo3(from_py_with = text::device)] device: &str,
        deterministic: bool,
        guaranteed: bool,
        devices: Option<Vec<Integer>>,
        #[pyo3(from_py_with = text::cpu_tier)] cpu_tier: Option<&str>,
        num_threads: Option<Integer>,
        #[pyo3(from_py_with = text::in_situ_quant)] in_situ_quant: Option<&str>,
        which_draft: Option<Bound<'_, PyAny>>,
        speculative: Option<&Bound<'_, PyString>>,
        mtp_model: Option<&Bound<'_, PyString>>,
        mtp_n_predict: Option<Integer>,
        state_snapshot_mb: Option<Integer>,
        #[pyo3(from_py_with = check_prefix_cache_n)] prefix_cache_n: usize,
    ) -> PyResult<MemoryPlan> {
        let selection = Selection::of(which)?;
        let memory = MemoryArguments { pa_gpu_mem, pa_gpu_mem_usage, pa_ctxt_len, memory_goal: memory_goal.as_ref() };
        let mtp = options::mtp(py, mtp_model, mtp_n_predict.as_ref(), token_source)?;
        let speculation = options::speculation(speculative, None, mtp.as_ref(), which_draft.is_some())?;
        let config = EngineConfig {
            max_num_seqs: max_seqs,
            max_num_batched_tokens: batched_tokens(max_num_batched_tokens.as_ref(), None)?,
            no_paged_attn,
            prefix_caching: prefix_cache_n > 0,
            state_snapshot_bytes: options::state_snapshot_bytes(state_snapshot_mb.as_ref())?,
            paged_attention: memory.paged_attention(pa_blk_size.as_ref(), pa_cache_type, guaranteed)?,
            dtype: selection.dtype.into(),
            architecture: selection.architecture.map(str::to_owned),
            device: options::device(device)?,
            deterministic,
            in_situ_quant: options::in_situ_quant(in_situ_quant)?,
            imatrix: options::imatrix(py, &selection)?,
            calibration_file: options::calibration_file(py, &selection)?,
            adapters: options::resolve_adapters(py, &selection, token_source)?,
            draft: options::draft(py, which_draft.as_ref(), selection.dtype, token_source)?,
            speculation,
            mtp: mtp.map(|(head, _)| head),
            embedding: selection.embedding,
            media: options::media(py, &selection, token_source)?,
            cpu: CpuOptions {
                isa: cpu_tier.map(str::to_owned),
                num_threads: at_least_if_given("num_threads", num_threads.as_ref(), 1)?,
            },
            cuda_libraries: doctor::library_paths(py)?,
            ..EngineConfig::default()
        };
        let source = options::resolve(py, &selection, token_source)?;
        MemoryPlan::of(py, &source, &config, devices.as_deref())
    }

    /// Where this runner's memory goes, as its plan foretold: a `MemoryPlan`.
    fn memory_ledger(&self) -> PyResult<MemoryPlan> {
        Ok(MemoryPlan::of_engine(&self.engine()?))
    }
}
