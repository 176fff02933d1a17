//! Importance measured here: a text goes through the model before it is quantized, and of each matrix the mean square of every
//! column's activations is kept, as `llama-imatrix` does.
//!
//! [`Observer`] is a backend that sees what goes into the linear layers of another one. The model runs on it as any other: an
//! engine answers the text, a chunk at a time.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use device::{
    AttentionArgs, Backend, BackendInfo, BackendMemory, CacheEngine, DType, DeviceError, ElementwisePhases, EmbedArgs,
    ExpertPhases, GateUpArgs, KvCacheSpec, KvDType, KvShape, LatentPhases, Linear, LinearOptions, Norm, Phases, Precision,
    Projection, RecurrentPhases, ResidualArgs, RopeArgs, StateCache, StepMetadata, StreamPhases, Tensor, WeightView,
    WorkspaceShape,
};
use paged::{MemoryGpuConfig, PagedAttentionConfig};

use crate::{
    Engine, EngineConfig, EngineError, GenerationRequest, Importance, ModelSource, Prompt, SamplingParams,
    engine::open_files,
    importance,
    json::read_bounded,
    model::{ModelFiles, visit::for_each_matrix},
};

/// Bytes of a text at most.
const MAX_BYTES: u64 = 64 << 20;
/// Tokens that see each other.
const CHUNK: usize = 512;
/// Tokens of a text at least: of fewer the squares say little.
const MIN_TOKENS: usize = 64;

/// That a text can be used.
///
/// # Errors
/// [`EngineError::InvalidArgument`] beside an importance matrix, without anything to quantize, or for a type that takes no
/// importance; [`EngineError::NotSupported`] for embeddings and away from the host.
pub(crate) fn check(source: &ModelSource, config: &EngineConfig, is_host: bool) -> Result<(), EngineError> {
    let Some(path) = &config.calibration_file else { return Ok(()) };
    let invalid = |text: String| Err(EngineError::InvalidArgument(text));
    if config.imatrix.is_some() {
        return invalid("imatrix and calibration_file both say how much columns count: leave out one of the two".into());
    }
    if config.in_situ_quant.is_none() {
        let path = path.display();
        let text = format!("calibration_file is {path}, and nothing is quantized; say to what with in_situ_quant (--isq)");
        return invalid(text);
    }
    if config.embedding.is_some() {
        let text = "calibration_file with embeddings is not supported: leave it out";
        return Err(EngineError::NotSupported(text.into()));
    }
    if !is_host {
        let text = "calibration_file is measured on the processor: use device=\"cpu\", or an imatrix";
        return Err(EngineError::NotSupported(text.into()));
    }
    let files = open_files(source, &EngineConfig { media: None, ..config.clone() })?;
    importance::check_types(&files, &format!("calibration_file is {}", path.display()))
}

/// Measures how much each column counts, by the text of `config.calibration_file`.
///
/// # Errors
/// Those of [`check`]; [`EngineError::Load`] for a file that is no text; [`EngineError::InvalidArgument`] for a text of few
/// tokens; those of loading the model.
pub(crate) fn calibrate(
    source: &ModelSource,
    config: &EngineConfig,
    backend: &Arc<dyn Backend>,
) -> Result<Option<Importance>, EngineError> {
    let Some(path) = &config.calibration_file else { return Ok(None) };
    check(source, config, backend.memory()?.is_host)?;
    measure(source, config, backend, path).map(Some)
}

fn measure(
    source: &ModelSource,
    config: &EngineConfig,
    backend: &Arc<dyn Backend>,
    path: &Path,
) -> Result<Importance, EngineError> {
    let load = |why: String| EngineError::Load(format!("calibration_file {}: {why}", path.display()));
    let bytes = read_bounded(path, MAX_BYTES).map_err(|e| load(e.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|_| load("not UTF-8 text".into()))?;
    let plain = EngineConfig {
        max_num_seqs: 1,
        max_num_batched_tokens: CHUNK,
        prefix_caching: false,
        paged_attention: PagedAttentionConfig {
            mem_gpu: Some(MemoryGpuConfig::ContextSize(2 * CHUNK)),
            ..PagedAttentionConfig::default()
        },
        architecture: config.architecture.clone(),
        dtype: config.dtype,
        deterministic: config.deterministic,
        ..EngineConfig::default()
    };
    let names = gguf_names(&open_files(source, &plain)?)?;
    let observer = Arc::new(Observer { inner: Arc::clone(backend), names: Mutex::default(), sums: Mutex::default() });
    let observing: Arc<dyn Backend> = Arc::<Observer>::clone(&observer);
    let engine = Engine::load_onto(&observing, source, &plain, &|_| ())?;
    run(&engine, path, &text)?;
    engine.unload()?;
    let mut values = HashMap::new();
    for (name, sums) in std::mem::take(&mut *locked(&observer.sums)) {
        if let Some(name) = names.get(&name) {
            values.insert(name.clone(), sums.means());
        }
    }
    Importance::measured(values, path)
}

/// What a file's matrices are called in a GGUF file, by their names in errors; experts, which see some tokens only, are left out.
fn gguf_names(files: &ModelFiles) -> Result<HashMap<String, String>, EngineError> {
    let (weights, mut names) = (files.weights(), HashMap::new());
    for_each_matrix(files.config(), |matrix| {
        if matrix.expert.is_none() {
            let id = weights.fused(matrix).map_or(matrix.id, |(id, _)| id);
            names.insert(weights.matrix_name(id, None), id.gguf());
        }
        Ok(())
    })?;
    Ok(names)
}

/// The text in chunks, each with the tokens that prompts begin with.
fn run(engine: &Engine, path: &Path, text: &str) -> Result<(), EngineError> {
    let first = engine.tokenize_text("", true)?;
    let ids = engine.tokenize_text(text, false)?;
    let chunk_len = CHUNK.min(engine.max_sequence_length().saturating_sub(1)).saturating_sub(first.len()).max(1);
    if ids.len() < MIN_TOKENS {
        let (n, path) = (ids.len(), path.display());
        return Err(EngineError::InvalidArgument(format!(
            "calibration_file is {path}, a text of {n} tokens; it must have {MIN_TOKENS}, and some ten thousand do better"
        )));
    }
    tracing::info!("measuring the importance of columns by {} tokens of {}", ids.len(), path.display());
    let (chunks, mut told) = (ids.chunks(chunk_len), 0);
    let count = chunks.len();
    for (done, chunk) in chunks.enumerate() {
        let sampling = SamplingParams { temperature: Some(0.0), max_tokens: Some(1), ..SamplingParams::default() };
        let prompt = Prompt::TokenIds([&first[..], chunk].concat());
        let completion = engine.submit(GenerationRequest::new(prompt, sampling))?.wait()?;
        if let Some(why) = completion.choices.first().and_then(|choice| choice.error.as_ref()) {
            return Err(EngineError::Internal(format!("the calibration failed: {why}")));
        }
        let tenth = (done + 1) * 10 / count;
        if tenth > told {
            told = tenth;
            tracing::info!("{}0 % of the text is measured", tenth);
        }
    }
    Ok(())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Squares of a matrix's columns.
#[derive(Default)]
struct Sums {
    squares: Vec<f64>,
    rows: u64,
}

impl Sums {
    fn add(&mut self, row: &[f32]) {
        self.squares.resize(row.len(), 0.0);
        self.squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
        self.rows += 1;
    }

    fn means(&self) -> Vec<f32> {
        let rows = self.rows.max(1) as f64;
        self.squares.iter().map(|sum| (sum / rows) as f32).collect()
    }
}

/// Sees what goes into the linear layers of a backend of the host.
struct Observer {
    inner: Arc<dyn Backend>,
    /// Of the weights that it loaded.
    names: Mutex<HashMap<usize, String>>,
    /// By the same names.
    sums: Mutex<HashMap<String, Sums>>,
}

impl Observer {
    fn note(&self, linear: Linear, options: &LinearOptions) -> Linear {
        locked(&self.names).insert(linear.id(), options.name.clone());
        linear
    }

    /// Rows of activations that go into some linear layers, behind a norm if there is one.
    fn see<'a>(&self, x: &Tensor, norm: Option<&Norm>, linears: impl IntoIterator<Item = &'a Linear>) {
        let mut rows = x.as_slice().to_vec();
        for row in rows.chunks_exact_mut(x.cols().max(1)) {
            if let Some(norm) = norm {
                norm.apply(row);
            }
        }
        let (names, mut sums) = (locked(&self.names), locked(&self.sums));
        for name in linears.into_iter().filter_map(|linear| names.get(&linear.id())) {
            if !sums.contains_key(name) {
                sums.insert(name.clone(), Sums::default());
            }
            if let Some(sums) = sums.get_mut(name) {
                rows.chunks_exact(x.cols().max(1)).for_each(|row| sums.add(row));
            }
        }
    }
}

impl device::Device for Observer {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn memory(&self) -> Result<BackendMemory, DeviceError> {
        self.inner.memory()
    }

    fn check_kv_layer(&self, dtype: KvDType, shape: KvShape, queries_per_kv: usize) -> Result<(), DeviceError> {
        self.inner.check_kv_layer(dtype, shape, queries_per_kv)
    }

    fn prefers_bf16_cache(&self) -> bool {
        self.inner.prefers_bf16_cache()
    }

    fn alloc(&self, max_rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        self.inner.alloc(max_rows, cols)
    }

    fn alloc_kv_cache(&self, spec: &KvCacheSpec) -> Result<CacheEngine, DeviceError> {
        self.inner.alloc_kv_cache(spec)
    }

    fn alloc_states(&self, num_slots: usize, lens: &[usize]) -> Result<StateCache, DeviceError> {
        self.inner.alloc_states(num_slots, lens)
    }

    fn load_linear(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        Ok(self.note(self.inner.load_linear(weight, options)?, options))
    }

    fn load_lm_head(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        Ok(self.note(self.inner.load_lm_head(weight, options)?, options))
    }

    fn linear_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64 {
        self.inner.linear_bytes(dtype, shape, precision)
    }

    fn lm_head_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64 {
        self.inner.lm_head_bytes(dtype, shape, precision)
    }

    fn workspace_bytes(&self, shape: &WorkspaceShape) -> u64 {
        self.inner.workspace_bytes(shape)
    }

    fn for_each(&self, len: usize, body: &(dyn Fn(usize) + Sync)) {
        self.inner.for_each(len, body);
    }
}

impl Phases for Observer {
    fn begin_step(&self, step: &StepMetadata) {
        self.inner.begin_step(step);
    }

    fn embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor) {
        self.inner.embed(args, out);
    }

    fn norm_linear(&self, x: &Tensor, norm: Option<&Norm>, projections: &mut [Projection<'_>], step: &StepMetadata) {
        self.see(x, norm, projections.iter().map(|projection| projection.linear));
        self.inner.norm_linear(x, norm, projections, step);
    }

    fn rope_and_cache(&self, args: RopeArgs<'_>, step: &StepMetadata) {
        self.inner.rope_and_cache(args, step);
    }

    fn attention(&self, args: AttentionArgs<'_>, step: &StepMetadata) {
        self.inner.attention(args, step);
    }

    fn linear_residual(&self, args: ResidualArgs<'_>, step: &StepMetadata) {
        self.see(args.x, None, [args.linear]);
        self.inner.linear_residual(args, step);
    }

    fn gate_up(&self, args: GateUpArgs<'_>, step: &StepMetadata) {
        self.see(args.x, args.norm, args.gate.into_iter().chain([args.up]));
        self.inner.gate_up(args, step);
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) {
        self.inner.gather_rows(x, rows, out);
    }

    fn fetch(&self, x: &mut Tensor) {
        self.inner.fetch(x);
    }
}

impl Backend for Observer {
    fn expert_phases(&self) -> Option<&dyn ExpertPhases> {
        self.inner.expert_phases()
    }

    fn latent_phases(&self) -> Option<&dyn LatentPhases> {
        self.inner.latent_phases()
    }

    fn recurrent_phases(&self) -> Option<&dyn RecurrentPhases> {
        self.inner.recurrent_phases()
    }

    fn elementwise_phases(&self) -> Option<&dyn ElementwisePhases> {
        self.inner.elementwise_phases()
    }

    fn stream_phases(&self) -> Option<&dyn StreamPhases> {
        self.inner.stream_phases()
    }

    fn sees_ahead(&self) -> bool {
        self.inner.sees_ahead()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use device::{
        cpu::{CpuBackend, Isa},
        quant::dequantize_row,
    };

    use super::*;
    use crate::{
        ModelDType,
        weights::{Matrix, Role, WeightId},
    };

    fn source(name: &str) -> ModelSource {
        ModelSource::HuggingFace { path: goldens::dir().join("text").join(name), tokenizer_json: None }
    }

    fn backend() -> Arc<dyn Backend> {
        Arc::new(CpuBackend::new(Isa::detect(), 1).unwrap())
    }

    #[test]
    fn what_goes_into_the_first_layer_is_the_mean_square_of_normalized_embeddings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text.txt");
        let text = "The quick brown fox jumps over the lazy dog, and then it naps. ".repeat(60);
        fs::write(&path, &text).unwrap();
        let (source, backend) = (source("llama"), backend());
        let config = EngineConfig { dtype: ModelDType::F32, ..EngineConfig::default() };
        let importance = measure(&source, &config, &backend, &path).unwrap();

        let files = ModelFiles::open(&source, None).unwrap();
        let (decoder, weights) = (files.config(), files.weights());
        let engine = Engine::load_onto(&backend, &source, &config, &|_| ()).unwrap();
        let (first, ids) = (engine.tokenize_text("", true).unwrap(), engine.tokenize_text(&text, false).unwrap());
        let hidden = decoder.hidden_size;
        let embedding = Matrix::new(WeightId::global(Role::Embedding), [decoder.vocab_size, hidden], false);
        let (_, embedding) = weights.stored(&embedding).unwrap();
        let norm = weights.vector(WeightId::layer(0, Role::AttnNorm), hidden).unwrap();
        let (mut expected, mut rows) = (vec![0.0; hidden], 0);
        for chunk in ids.chunks(CHUNK.min(engine.max_sequence_length() - 1) - first.len()) {
            for id in first.iter().chain(chunk) {
                let mut row = vec![0.0; hidden];
                dequantize_row(embedding.dtype, embedding.row(*id as usize), &mut row);
                let mean = row.iter().map(|x| x * x).sum::<f32>() / hidden as f32;
                for ((sum, x), w) in expected.iter_mut().zip(&row).zip(&norm) {
                    *sum += f64::from((x * w).powi(2) / (mean + decoder.norm.eps));
                }
                rows += 1;
            }
        }
        assert!(rows > CHUNK, "several chunks");
        for name in ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"] {
            let columns = importance.columns(name, None, hidden).unwrap().unwrap();
            for (column, sum) in columns.iter().zip(&expected) {
                let expected = (sum / rows as f64) as f32;
                assert!((column - expected).abs() <= 1e-4 * expected, "{name}: {column} instead of {expected}");
            }
        }
        for part in ["attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
            let name = format!("blk.1.{part}.weight");
            let cols = if part == "ffn_down" { decoder.largest(|layer| layer.ffn.intermediate_size()) } else { hidden };
            assert!(importance.columns(&name, None, cols).unwrap().is_some(), "{name}");
        }
    }

    #[test]
    fn a_text_that_cannot_be_used_is_refused_by_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text.txt");
        let given = |isq: Option<&str>| EngineConfig {
            calibration_file: Some(path.clone()),
            in_situ_quant: isq.map(|name| name.parse().unwrap()),
            ..EngineConfig::default()
        };
        let refused = |config: &EngineConfig| calibrate(&source("llama"), config, &backend()).unwrap_err().to_string();
        assert!(refused(&given(None)).contains("nothing is quantized"));
        let error = refused(&given(Some("Q4K")));
        assert!(error.contains("calibration_file is") && error.contains("multiple of 256 columns"), "{error}");
        let of = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            measure(&source("llama"), &EngineConfig::default(), &backend(), &path).unwrap_err().to_string()
        };
        assert!(of(b"\xff\xfe").contains("not UTF-8"));
        assert!(of(b"A few words.").contains("it must have 64"));
        let error = check(&source("llama"), &given(Some("Q4K")), false).unwrap_err().to_string();
        assert!(error.contains("processor"), "{error}");
    }
}
