//! The options of a `Runner` that take some reading: memory, chat template, device.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use engine::{
    AdapterOptions, DEFAULT_MTP_DRAFTS, Device, DraftChoice, DraftModel, Importance, Isq, KvEventsConfig, KvTierConfig,
    MediaOptions, MemoryGpuConfig, ModelSource, MtpHead, PagedAttentionConfig, Policies, PromptLookup, Speculation,
    cuda::CudaOptions,
};
use pyo3::{
    exceptions::{PyTypeError, PyUnicodeEncodeError},
    prelude::*,
    types::{PyBool, PyFloat, PyInt, PyString},
};

use crate::{
    arguments::{Integer, Real, at_least, at_least_if_given, named_text, shorten, within},
    detach::enter,
    enums::{ModelDType, MultimodalArchitecture, PagedCacheType},
    exceptions::{ArchitectureError, invalid, raise},
    service::seconds,
    which::{Place, Selection, Which},
};

const FRACTION: &str = "GPU memory utilization must be finite and in (0, 1]";

/// The spellings of the size of the KV pool.
pub struct MemoryArguments<'a, 'py> {
    pub pa_gpu_mem: Option<Integer>,
    pub pa_gpu_mem_usage: Option<Real>,
    pub pa_ctxt_len: Option<Integer>,
    pub memory_goal: Option<&'a Bound<'py, PyAny>>,
}

impl MemoryArguments<'_, '_> {
    /// These and the other options of the pool.
    pub fn paged_attention(
        &self,
        block_size: Option<&Integer>,
        cache_type: Option<PagedCacheType>,
        guaranteed: bool,
    ) -> PyResult<PagedAttentionConfig> {
        Ok(PagedAttentionConfig {
            block_size: at_least_if_given("pa_blk_size", block_size, 0)?,
            mem_gpu: self.check()?,
            cache_type: cache_type.map_or(engine::PagedCacheType::Auto, Into::into),
            guaranteed,
        })
    }

    /// At most one knob; two are an error that names both.
    fn check(&self) -> PyResult<Option<MemoryGpuConfig>> {
        let given: Vec<&str> = [
            ("pa_gpu_mem", self.pa_gpu_mem.is_some()),
            ("pa_gpu_mem_usage", self.pa_gpu_mem_usage.is_some()),
            ("pa_ctxt_len", self.pa_ctxt_len.is_some()),
            ("memory_goal", self.memory_goal.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.then_some(name))
        .collect();
        if given.len() > 1 {
            return Err(invalid(format!("`{}` each size the KV pool; give at most one of them", given.join("` and `"))));
        }
        if let Some(goal) = self.memory_goal {
            return parse_goal(goal);
        }
        if let Some(mb) = &self.pa_gpu_mem {
            return Ok(Some(MemoryGpuConfig::MbAmount(at_least("pa_gpu_mem", mb, 1)?)));
        }
        if let Some(tokens) = &self.pa_ctxt_len {
            return Ok(Some(MemoryGpuConfig::ContextSize(at_least("pa_ctxt_len", tokens, 1)?)));
        }
        self.pa_gpu_mem_usage.map(|Real(fraction)| parse_fraction("pa_gpu_mem_usage", fraction)).transpose()
    }
}

fn parse_fraction(name: &str, fraction: f64) -> PyResult<MemoryGpuConfig> {
    // What is no more than 0 in single precision is none.
    if fraction.is_finite() && fraction as f32 > 0.0 && fraction <= 1.0 {
        Ok(MemoryGpuConfig::Utilization(fraction as f32))
    } else {
        Err(invalid(format!("{FRACTION}, got {name}={fraction}")))
    }
}

/// "auto", a fraction, "4GiB" or "65536tokens".
fn parse_goal(goal: &Bound<'_, PyAny>) -> PyResult<Option<MemoryGpuConfig>> {
    if goal.is_instance_of::<PyBool>()
        || !(goal.is_instance_of::<PyFloat>() || goal.is_instance_of::<PyInt>() || goal.is_instance_of::<PyString>())
    {
        return Err(PyTypeError::new_err(format!(
            "`memory_goal` must be \"auto\", a fraction such as 0.5, or a str such as \"4GiB\" or \"65536tokens\", got {}",
            goal.repr()?
        )));
    }
    if let Ok(Real(fraction)) = goal.extract() {
        return parse_fraction("memory_goal", fraction).map(Some);
    }
    let text = named_text("memory_goal", goal.cast::<PyString>()?)?;
    if text.eq_ignore_ascii_case("auto") {
        return Ok(None);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: usize = number
        .parse()
        .ok()
        .filter(|&number| number > 0)
        .ok_or_else(|| invalid(format!("KV capacity must start with a positive integer, got memory_goal={text:?}")))?;
    let megabytes =
        |factor: usize| number.checked_mul(factor).ok_or_else(|| invalid(format!("`memory_goal` is too large: {text:?}")));
    match unit.trim().to_ascii_lowercase().as_str() {
        "tokens" => Ok(Some(MemoryGpuConfig::ContextSize(number))),
        "mib" | "mb" => Ok(Some(MemoryGpuConfig::MbAmount(number))),
        "gib" | "gb" => Ok(Some(MemoryGpuConfig::MbAmount(megabytes(1 << 10)?))),
        "tib" | "tb" => Ok(Some(MemoryGpuConfig::MbAmount(megabytes(1 << 20)?))),
        _ => Err(invalid(format!("`memory_goal` has an unknown unit: {text:?}; units: MiB, GiB, TiB, tokens"))),
    }
}

/// The device by its name.
pub fn device(device: &str) -> PyResult<Device> {
    let gpu = || device.strip_prefix("cuda:")?.parse().ok().map(Device::Cuda);
    match device {
        "auto" => Ok(Device::Auto),
        "cpu" => Ok(Device::Cpu),
        _ => gpu().ok_or_else(|| {
            let given = shorten(device);
            invalid(format!("`device` must be \"auto\", \"cpu\" or an NVIDIA GPU such as \"cuda:0\", got {given:?}"))
        }),
    }
}

/// Arguments about GPUs, and those of them that a processor cannot honour. What is not given, the environment may say as in
/// mistral.rs: `MISTRALRS_CUDA_GRAPHS=0` and `MISTRALRS_FLASHINFER_DECODE=0` choose the plain way.
pub fn cuda(py: Python<'_>, graphs: Option<bool>, attention: &str) -> PyResult<(CudaOptions, Vec<String>)> {
    let environment = py.import("os")?.getattr("environ")?;
    let is_off = |name: &str| {
        environment.call_method1("get", (name,))?.extract().map(|value: Option<String>| value.as_deref() == Some("0"))
    };
    let splits_keys = match attention {
        "auto" => !is_off("MISTRALRS_FLASHINFER_DECODE")?,
        "split" => true,
        "plain" => false,
        other => {
            return Err(invalid(format!("`attention_backend` must be \"auto\", \"split\" or \"plain\", got {other:?}")));
        }
    };
    let graphs_or_default = graphs.map_or_else(|| is_off("MISTRALRS_CUDA_GRAPHS").map(|off| !off), Ok)?;
    let gpu_only = [
        (graphs == Some(true)).then(|| "cuda_graphs=True".to_owned()),
        (attention != "auto").then(|| format!("attention_backend={attention:?}")),
    ];
    Ok((
        CudaOptions { graphs: graphs_or_default, splits_keys, ..CudaOptions::default() },
        gpu_only.into_iter().flatten().collect(),
    ))
}

/// Bytes of snapshots of states, given in MB.
pub fn state_snapshot_bytes(megabytes: Option<&Integer>) -> PyResult<Option<u64>> {
    const MAX_MEGABYTES: usize = 1 << 40;
    megabytes.map(|mb| Ok((within("state_snapshot_mb", mb, 0, MAX_MEGABYTES)? as u64) << 20)).transpose()
}

/// MB of a tier whose size is not given.
const DEFAULT_TIER_SIZE: usize = 4096;

/// The tier outside the pool.
pub fn kv_tier(py: Python<'_>, path: Option<&Bound<'_, PyAny>>, size: Option<&Integer>) -> PyResult<Option<KvTierConfig>> {
    let Some(path) = path else {
        let Some(_) = size else { return Ok(None) };
        return Err(invalid("`kv_tier_size` is the size of `kv_tier`, which is not given; name a folder"));
    };
    // A path with a lone surrogate makes the conversion panic.
    if let Err(error) = py.import("os")?.call_method1("fsencode", (path,)) {
        return Err(if error.is_instance_of::<PyUnicodeEncodeError>(py) {
            invalid(format!("`kv_tier`: {error}"))
        } else {
            error
        });
    }
    let path: PathBuf = path.extract()?;
    if path.as_os_str().is_empty() {
        return Err(invalid("`kv_tier` is empty; name a folder"));
    }
    let path = path.to_str().map_or_else(|| Ok(path.clone()), |path| local_path(py, path))?;
    let megabytes = size.map_or(Ok(DEFAULT_TIER_SIZE), |size| at_least("kv_tier_size", size, 1))?;
    Ok(Some(KvTierConfig::File { path, max_bytes: (megabytes as u64).saturating_mul(1 << 20) }))
}

/// Where others are told of the prefix cache.
pub fn kv_events(
    address: Option<&Bound<'_, PyString>>,
    replay: Option<&Bound<'_, PyString>>,
    topic: Option<&Bound<'_, PyString>>,
) -> PyResult<Option<KvEventsConfig>> {
    let text = |name, value: Option<&Bound<'_, PyString>>| value.map(|value| named_text(name, value)).transpose();
    let replay_address = text("kv_events_replay", replay)?;
    let topic = text("kv_events_topic", topic)?;
    let Some(address) = text("kv_events", address)? else {
        let given = [replay_address.map(|_| "kv_events_replay"), topic.map(|_| "kv_events_topic")];
        return match given.into_iter().flatten().next() {
            Some(given) => Err(invalid(format!("`{given}` goes with `kv_events`, which is not given; name an address"))),
            None => Ok(None),
        };
    };
    Ok(Some(KvEventsConfig { address, replay_address, topic: topic.unwrap_or_default() }))
}

/// The type that weights are quantized to, by its name.
pub fn in_situ_quant(name: Option<&str>) -> PyResult<Option<Isq>> {
    name.map(str::parse).transpose().map_err(raise)
}

/// The importance matrix of a selection, read.
pub fn imatrix(py: Python<'_>, selection: &Selection) -> PyResult<Option<Arc<Importance>>> {
    let Some(path) = &selection.imatrix else { return Ok(None) };
    let path = local_path(py, path)?;
    enter(py, || Importance::open(&path)).map(|importance| Some(Arc::new(importance)))
}

/// The text to calibrate by.
pub fn calibration_file(py: Python<'_>, selection: &Selection) -> PyResult<Option<PathBuf>> {
    selection.calibration_file.as_ref().map(|path| local_path(py, path)).transpose()
}

/// The scheduler's policies by their names.
pub fn policies(
    admission: Option<&Bound<'_, PyString>>,
    victim: Option<&Bound<'_, PyString>>,
    fairness: Option<&Bound<'_, PyString>>,
) -> PyResult<Policies> {
    fn named<P: FromStr<Err: Display> + Default>(argument: &str, name: Option<&Bound<'_, PyString>>) -> PyResult<P> {
        let Some(name) = name else { return Ok(P::default()) };
        named_text(argument, name)?.parse().map_err(|error| invalid(format!("`{argument}`: {error}")))
    }
    Ok(Policies {
        admission: named("admission", admission)?,
        victim: named("victim", victim)?,
        fairness: named("fairness", fairness)?,
    })
}

/// How drafts are made and chosen, by a head if there is one; `has_model`: there is a draft model.
pub fn speculation(
    name: Option<&Bound<'_, PyString>>,
    gamma: Option<&Integer>,
    head: Option<&(MtpHead, usize)>,
    has_model: bool,
) -> PyResult<Option<Speculation>> {
    if let Some((_, num_drafts)) = head {
        return speculation_by_head(name, gamma, *num_drafts);
    }
    let max_drafts = at_least_if_given("speculative_gamma", gamma, 1)?;
    let name = name.map(|name| named_text("speculative", name)).transpose()?;
    let speculation = match name.as_deref() {
        None | Some("auto") if has_model => Speculation::by_model(DraftChoice::Auto),
        Some("draft_model") if has_model => Speculation::by_model(DraftChoice::All),
        Some(other) if has_model => {
            return Err(invalid(format!(
                "`speculative` is {other:?}, and `which_draft` names a model that guesses: it must be \"auto\" or \"draft_model\", or \
                 leave out one of the two"
            )));
        }
        None | Some("off") if max_drafts.is_some() => {
            return Err(invalid(
                "`speculative_gamma` bounds the drafts of a step: give speculative=\"auto\" or \"prompt_lookup\", or `which_draft`, \
                 as well",
            ));
        }
        None | Some("off") => return Ok(None),
        Some("auto") => Speculation::auto(),
        Some("prompt_lookup") => Speculation::always(Arc::new(PromptLookup)),
        Some("draft_model") => {
            return Err(invalid("`speculative` is \"draft_model\": name the model with `which_draft` (--draft-model)"));
        }
        Some("mtp") => {
            return Err(invalid("`speculative` is \"mtp\": say with `mtp_n_predict` (--mtp) that a head of the model guesses"));
        }
        Some(other) => {
            return Err(invalid(format!(
                "`speculative` is {other:?}; it must be \"off\", \"auto\", \"prompt_lookup\", \"draft_model\" or \"mtp\""
            )));
        }
    };
    Ok(Some(Speculation { max_drafts: max_drafts.or(speculation.max_drafts), ..speculation }))
}

/// The head that predicts further tokens, after downloading it when it is on the hub, and how many it is to guess.
pub fn mtp(
    py: Python<'_>,
    model: Option<&Bound<'_, PyString>>,
    num_drafts: Option<&Integer>,
    token_source: &str,
) -> PyResult<Option<(MtpHead, usize)>> {
    let num_drafts = at_least_if_given("mtp_n_predict", num_drafts, 1)?;
    if model.is_none() && num_drafts.is_none() {
        return Ok(None);
    }
    let model = model.map(|model| named_text("mtp_model", model)).transpose()?;
    let source = model.map(|model| resolve(py, &Selection::of_text(&model), token_source)).transpose()?;
    Ok(Some((MtpHead { source }, num_drafts.unwrap_or(DEFAULT_MTP_DRAFTS))))
}

/// How the drafts of a head are chosen, of so many at most.
fn speculation_by_head(
    name: Option<&Bound<'_, PyString>>,
    gamma: Option<&Integer>,
    num_drafts: usize,
) -> PyResult<Option<Speculation>> {
    if gamma.is_some() {
        return Err(invalid(
            "`speculative_gamma` is not of heads that predict further tokens: `mtp_n_predict` bounds their guesses",
        ));
    }
    let choice = match name.map(|name| named_text("speculative", name)).transpose()?.as_deref() {
        None | Some("auto") => DraftChoice::Auto,
        Some("mtp") => DraftChoice::All,
        Some(other) => {
            return Err(invalid(format!(
                "`speculative` is {other:?}, and `mtp_model` or `mtp_n_predict` asks for a head that guesses: it must be \"auto\" or \
                 \"mtp\", or leave out one of the two"
            )));
        }
    };
    Ok(Some(Speculation { max_drafts: Some(num_drafts), ..Speculation::by_model(choice) }))
}

/// The draft model of a model with this dtype, after downloading it when it is on the hub.
pub fn draft(
    py: Python<'_>,
    which: Option<&Bound<'_, PyAny>>,
    dtype: ModelDType,
    token_source: &str,
) -> PyResult<Option<DraftModel>> {
    let Some(which) = which else { return Ok(None) };
    let which =
        which.cast::<Which>().map_err(|_| PyTypeError::new_err("`which_draft` must be a Which, such as Which.GGUF(FILE)"))?;
    let selection = Selection::of(which)?;
    let text = "a draft model is Which.Plain, Which.GGUF or Which.GGML";
    refuse_draft(selection.adapters.is_some(), "adapters", text)?;
    refuse_draft(selection.embedding.is_some(), "embeddings", text)?;
    refuse_draft(selection.media.is_some(), "images", text)?;
    refuse_draft(selection.imatrix.is_some() || selection.calibration_file.is_some(), "an importance of columns", text)?;
    if selection.dtype != ModelDType::Auto && selection.dtype != dtype {
        return Err(invalid("`which_draft` has another dtype than `which`, in whose a draft model computes: leave it out"));
    }
    let source = resolve(py, &selection, token_source)?;
    Ok(Some(DraftModel { source, architecture: selection.architecture.map(str::to_owned), in_situ_quant: None }))
}

fn refuse_draft(is_given: bool, what: &str, text: &str) -> PyResult<()> {
    if is_given { Err(invalid(format!("`which_draft` has {what}: {text}"))) } else { Ok(()) }
}

/// Seconds; infinite for `None`.
pub fn max_step_latency(value: &Bound<'_, PyAny>) -> PyResult<f64> {
    let Some(Real(value)) = value.extract()? else { return Ok(f64::INFINITY) };
    seconds("max_step_latency", value).map(|duration| duration.as_secs_f64())
}

/// A path that may begin with `~`.
pub fn local_path(py: Python<'_>, path: &str) -> PyResult<PathBuf> {
    py.import("mistral_paged.hub")?.call_method1("local_path", (path,))?.extract()
}

/// The text of the template at a path; `explicit` goes before `template`, and both must be readable.
pub fn chat_template(py: Python<'_>, template: Option<&str>, explicit: Option<&str>) -> PyResult<Option<String>> {
    let read = |path: Option<&str>| {
        path.map(|path| engine::chat_template::read_template(&local_path(py, path)?).map_err(raise)).transpose()
    };
    let (template, explicit) = (read(template)?, read(explicit)?);
    Ok(explicit.or(template))
}

/// The adapters that a model is loaded with, after downloading those that are on the hub.
pub fn resolve_adapters(py: Python<'_>, selection: &Selection, token_source: &str) -> PyResult<Option<AdapterOptions>> {
    let Some(fields) = &selection.adapters else { return Ok(None) };
    let hub = py.import("mistral_paged.hub")?;
    let cache_dir = selection.cache_dir.as_deref();
    let mut adapters = Vec::new();
    for (alias, source, revision) in &fields.adapters {
        let path: PathBuf = hub.call_method1("resolve_adapter", (source, revision, token_source, cache_dir))?.extract()?;
        adapters.push((alias.clone(), path));
    }
    if let Some((source, order)) = &fields.ordered {
        let named = hub.call_method1("resolve_ordered_adapters", (source, order, token_source, cache_dir))?;
        adapters.extend(named.extract::<Vec<(String, PathBuf)>>()?);
    }
    Ok(Some(AdapterOptions { adapters, ..fields.limits.clone() }))
}

/// How the model sees, after downloading an image encoder that has a file of its own.
pub fn media(py: Python<'_>, selection: &Selection, token_source: &str) -> PyResult<Option<MediaOptions>> {
    let (Some(media), Some(mmproj)) = (&selection.media, &selection.mmproj) else { return Ok(selection.media.clone()) };
    let arguments = (&selection.model_id, mmproj, token_source, selection.cache_dir.as_deref());
    let path: PathBuf = py.import("mistral_paged.hub")?.call_method1("resolve_mmproj", arguments)?.extract()?;
    Ok(Some(MediaOptions { mmproj: Some(path), ..media.clone() }))
}

/// A model that sees is of the architecture that the caller expects. The engine itself knows that of its language model.
fn check_multimodal(folder: &Path, arch: MultimodalArchitecture) -> PyResult<()> {
    let file = folder.join("config.json");
    let text = std::fs::read_to_string(&file).map_err(|error| invalid(format!("{}: {error}", file.display())))?;
    let config: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| invalid(format!("{}: {error}", file.display())))?;
    let (found, expected) = (config["model_type"].as_str().unwrap_or_default(), arch.model_types()?);
    if expected.contains(&found) {
        return Ok(());
    }
    let (file, expected) = (file.display(), expected.join(" or "));
    Err(ArchitectureError::new_err(format!(
        "arch=MultimodalArchitecture.{arch:?} is {expected}, and {file} has model_type {found:?}; leave arch out to follow the file"
    )))
}

/// Local paths of the model, after downloading it when it is on the hub.
pub fn resolve(py: Python<'_>, selection: &Selection, token_source: &str) -> PyResult<ModelSource> {
    let hub = py.import("mistral_paged.hub")?;
    let tokenizer_json = selection.tokenizer_json.as_ref().map(|path| local_path(py, path)).transpose()?;
    let cache_dir = selection.cache_dir.as_deref();
    match &selection.place {
        Place::Plain | Place::Multimodal | Place::Embedding => {
            let arguments = (&selection.model_id, token_source, cache_dir);
            let resolve = match selection.place {
                Place::Multimodal => "resolve_multimodal",
                Place::Embedding => "resolve_embedding",
                _ => "resolve_plain",
            };
            let path: PathBuf = hub.call_method1(resolve, arguments)?.extract()?;
            selection.multimodal.map_or(Ok(()), |arch| check_multimodal(&path, arch))?;
            Ok(ModelSource::HuggingFace { path, tokenizer_json })
        }
        Place::Gguf { files, tok_model_id, gqa } => {
            let arguments = (&selection.model_id, files.as_ref(), tok_model_id.as_deref(), token_source, cache_dir);
            let name = if gqa.is_some() { "resolve_ggml" } else { "resolve_gguf" };
            let (mut files, tokenizer_dir): (Vec<PathBuf>, _) = hub.call_method1(name, arguments)?.extract()?;
            match (gqa, files.pop()) {
                (Some(gqa), Some(file)) => Ok(ModelSource::Ggml { file, gqa: *gqa, tokenizer_dir, tokenizer_json }),
                (_, last) => {
                    files.extend(last);
                    Ok(ModelSource::Gguf { files, tokenizer_dir, tokenizer_json })
                }
            }
        }
    }
}
