//! A quantized GGUF file from float weights: `mistral-paged quantize`.
//!
//! The tensors that in-situ quantization takes are quantized as it does; all others stay as they are. A GGUF file keeps its
//! metadata. A folder in Hugging Face layout gets that which llama.cpp's converter writes.

mod entries;
mod families;
mod hugging_face;
mod tensors;
mod vocabulary;
mod writer;

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering as Order},
    },
};

use device::{
    Backend, DType,
    cpu::{CpuBackend, Isa},
    host::num_physical_cores,
};

use self::{
    entries::{Entries, Value},
    writer::{NewFile, Part, Places, PlannedTensor, Values, header, write, write_sketch},
};
use crate::{
    EngineConfig, EngineError, Importance, Isq, LoadProgress, ModelSource,
    calibration::calibrate,
    model::{ModelFiles, visit::for_each_matrix},
    weights::{GgufFiles, WeightSource},
};

/// What is to be written, and where.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// What matrices of layers become; see [`Isq`] for what the others become.
    pub isq: Isq,
    /// The GGUF file.
    pub output: PathBuf,
    /// A file of that name is replaced; else it is an error.
    pub overwrite: bool,
    /// `model_type` that the source must have.
    pub architecture: Option<String>,
    /// How much the columns of weights count; all alike unless given.
    pub imatrix: Option<Arc<Importance>>,
    /// A text by which that is measured first.
    pub calibration_file: Option<PathBuf>,
    /// Threads; the machine's cores unless given.
    pub num_threads: Option<usize>,
}

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizedFile {
    /// Its bytes.
    pub bytes: u64,
    /// How many tensors it has of each type, by ggml's name of the type.
    pub types: BTreeMap<String, usize>,
}

/// Writes a GGUF file of a model's weights, quantized. It is written under another name in the same folder and renamed when it is
/// whole. A few rows are in memory at a time. `progress` is told the bytes of the source.
///
/// # Errors
/// [`EngineError::InvalidArgument`] for an output that exists, or a source that is quantized already;
/// [`EngineError::NotSupported`] for a folder whose architecture or tokenizer has no GGUF form here; those of opening a model;
/// and [`EngineError::Load`] where the file cannot be written.
pub fn quantize_model(
    source: &ModelSource,
    options: &QuantizeOptions,
    progress: &dyn Fn(LoadProgress),
) -> Result<QuantizedFile, EngineError> {
    let output = &options.output;
    if !options.overwrite && output.exists() {
        let text = format!("{} exists: name another file, or replace it with force=True (--force)", output.display());
        return Err(EngineError::InvalidArgument(text));
    }
    if output.is_dir() {
        return Err(EngineError::InvalidArgument(format!("{} is a folder; name a file in it", output.display())));
    }
    if let ModelSource::Gguf { tokenizer_dir: Some(_), .. } | ModelSource::Gguf { tokenizer_json: Some(_), .. } = source {
        return Err(EngineError::InvalidArgument(
            "a GGUF file keeps the tokenizer that it has: leave out tok_model_id and tokenizer_json (--tok-model-id, --tokenizer)".into(),
        ));
    }
    let files = ModelFiles::open(source, options.architecture.as_deref())?
        .with_isq(Some(options.isq))
        .with_importance(importance(source, options)?);
    files.check_isq()?;
    let (entries, tensors) = if let WeightSource::Gguf(gguf) = files.weights() {
        of_gguf(&files, gguf, options)?
    } else {
        hugging_face::contents(source, &files, options.isq)?
    };
    let new = NewFile::new(output)?;
    let (header, end) = header(&entries, &tensors)?;
    write_sketch(new.partial(), &header, &tensors, end)?;
    let read = ModelFiles::open(
        &ModelSource::Gguf { files: vec![new.partial().to_owned()], tokenizer_dir: None, tokenizer_json: None },
        None,
    )?;
    hugging_face::check(files.config(), read.config(), output)?;
    drop(read);
    let (done_bytes, total_bytes) = (AtomicU64::new(0), files.weight_bytes());
    let add = |bytes| {
        let done_bytes = (done_bytes.fetch_add(bytes, Order::Relaxed) + bytes).min(total_bytes);
        progress(LoadProgress { done_bytes, total_bytes });
    };
    let num_threads = options.num_threads.unwrap_or_else(num_physical_cores);
    let bytes = write(new.partial(), &header, &tensors, &files, num_threads, &add)?;
    for watch in files.weights().watches() {
        watch.check()?;
    }
    new.finish()?;
    let mut types = BTreeMap::new();
    for tensor in &tensors {
        *types.entry(tensor.dtype.to_string()).or_default() += 1;
    }
    Ok(QuantizedFile { bytes, types })
}

/// How much columns count, as it is given or measured.
fn importance(source: &ModelSource, options: &QuantizeOptions) -> Result<Option<Arc<Importance>>, EngineError> {
    if options.calibration_file.is_none() {
        return Ok(options.imatrix.clone());
    }
    let config = EngineConfig {
        in_situ_quant: Some(options.isq),
        imatrix: options.imatrix.clone(),
        calibration_file: options.calibration_file.clone(),
        architecture: options.architecture.clone(),
        ..EngineConfig::default()
    };
    let num_threads = options.num_threads.unwrap_or_else(num_physical_cores);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(Isa::detect(), num_threads)?);
    Ok(calibrate(source, &config, &backend)?.map(Arc::new))
}

/// What a tensor is stored in. Only whole matrices are quantized.
fn dtype(isq: Isq, stored: DType, dims: &[usize], is_outer: Option<bool>) -> DType {
    match is_outer {
        Some(is_outer) if dims.len() > 1 => isq.dtype(stored, dims[0], is_outer),
        _ => stored,
    }
}

/// The tensors that are quantized, by name, and of each whether it is the token embedding or the matrix of logits.
fn quantized_tensors(files: &ModelFiles) -> Result<HashMap<String, bool>, EngineError> {
    let mut found = HashMap::new();
    for_each_matrix(files.config(), |matrix| {
        if !matrix.is_exact {
            found.insert(files.weights().tensor_name(matrix), matrix.id.layer.is_none());
        }
        Ok(())
    })?;
    Ok(found)
}

/// The same metadata but for the type of the file; of a split file there is no split any more.
fn of_gguf(
    files: &ModelFiles,
    gguf: &GgufFiles,
    options: &QuantizeOptions,
) -> Result<(Entries, Vec<PlannedTensor>), EngineError> {
    let mut entries = Entries::default();
    for (key, bytes) in gguf.raw_entries()? {
        let is_replaced = matches!(&key[..], "general.file_type" | "general.quantization_version" | "general.alignment");
        if !is_replaced && !key.starts_with("split.") {
            entries.copy(bytes);
        }
    }
    entries.push("general.file_type", Value::U32(options.isq.file_type()));
    entries.push("general.quantization_version", Value::U32(2));
    let quantized = quantized_tensors(files)?;
    let mut names: Vec<_> = gguf.names().collect();
    names.sort_unstable_by(|a, b| natural(a, b));
    let mut tensors = Vec::with_capacity(names.len());
    for name in names {
        let (view, shape) = gguf.tensor(name)?;
        let dims: Vec<_> = shape.into_iter().rev().collect();
        let dtype = dtype(options.isq, view.dtype, &dims, quantized.get(name).copied());
        tensors.push(PlannedTensor {
            name: name.to_owned(),
            dims,
            dtype,
            values: Values::Stored { parts: vec![Part::Tensor(name.to_owned())], places: Places::default() },
        });
    }
    Ok((entries, tensors))
}

/// Numbers in names by value.
fn natural(a: &str, b: &str) -> Ordering {
    let key = |name: &str| -> Vec<(u64, String)> {
        name.split('.').map(|part| part.parse().map_or_else(|_| (0, part.to_owned()), |n| (n, String::new()))).collect()
    };
    key(a).cmp(&key(b)).then_with(|| a.cmp(b))
}

/// The name of a model, by its folder.
fn model_name(path: &Path) -> Option<String> {
    path.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned())
}
