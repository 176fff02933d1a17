//! What a step costs beside the kernels, and what sampling costs a row. Each figure that is promised a bound is a benchmark here.

use std::{hint::black_box, sync::Arc};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use device::{
    AttentionArgs, Backend, BackendInfo, CacheEngine, DType, Device, DeviceError, EmbedArgs, GateUpArgs, KvCacheSpec, Linear,
    LinearOptions, Norm, Phases, Precision, Projection, ResidualArgs, RopeArgs, StepMetadata, Tensor, WeightView, WorkspaceShape,
    cpu::{CpuBackend, Isa},
};
use engine::{
    Engine, EngineConfig, GenerationConfig, GenerationRequest, ModelSource, Prompt, ResolvedSampling, Sampler, SamplingParams,
};

/// A backend that computes nothing: what is left of a step is the engine's own.
struct Null(CpuBackend);

impl Backend for Null {}

impl Device for Null {
    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    fn alloc(&self, max_rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        self.0.alloc(max_rows, cols)
    }

    fn alloc_kv_cache(&self, spec: &KvCacheSpec) -> Result<CacheEngine, DeviceError> {
        self.0.alloc_kv_cache(spec)
    }

    fn load_linear(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        self.0.load_linear(weight, options)
    }

    fn linear_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64 {
        self.0.linear_bytes(dtype, shape, precision)
    }

    fn workspace_bytes(&self, shape: &WorkspaceShape) -> u64 {
        self.0.workspace_bytes(shape)
    }
}

impl Phases for Null {
    fn embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor) {
        out.set_rows(args.token_ids.len());
    }

    fn norm_linear(&self, x: &Tensor, _: Option<&Norm>, projections: &mut [Projection<'_>], _: &StepMetadata) {
        for projection in projections {
            projection.out.set_rows(x.rows());
        }
    }

    fn rope_and_cache(&self, _: RopeArgs<'_>, _: &StepMetadata) {}

    fn attention(&self, _: AttentionArgs<'_>, _: &StepMetadata) {}

    fn linear_residual(&self, _: ResidualArgs<'_>, _: &StepMetadata) {}

    fn gate_up(&self, _: GateUpArgs<'_>, _: &StepMetadata) {}

    fn gather_rows(&self, _: &Tensor, rows: &[u32], out: &mut Tensor) {
        out.set_rows(rows.len());
    }

    fn fetch(&self, x: &mut Tensor) {
        self.0.fetch(x);
    }
}

const NEW: usize = 256;

fn request(id: usize) -> GenerationRequest {
    let prompt = (0..64).map(|position| ((id * 7919 + position * 31) % 400 + 10) as u32).collect();
    let sampling =
        SamplingParams { temperature: Some(0.0), max_tokens: Some(NEW), ignore_eos: true, ..SamplingParams::default() };
    GenerationRequest { stream: true, ..GenerationRequest::new(Prompt::TokenIds(prompt), sampling) }
}

/// Steps of requests that are answered together, from submission to the last event; a vocabulary of 512 makes sampling small.
fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("step without kernels");
    group.throughput(Throughput::Elements(NEW as u64));
    group.sample_size(20);
    for num_seqs in [1, 32, 256] {
        let backend: Arc<dyn Backend> = Arc::new(Null(CpuBackend::new(Isa::detect(), 1).unwrap()));
        let path = goldens::dir().join("text/llama");
        let source = ModelSource::HuggingFace { path, tokenizer_json: None };
        let config = EngineConfig { max_num_seqs: num_seqs, max_step_latency: None, ..EngineConfig::default() };
        let engine = Engine::load_onto(&backend, &source, &config, &|_| {}).unwrap();
        group.bench_function(BenchmarkId::from_parameter(num_seqs), |b| {
            b.iter(|| {
                engine.pause().unwrap();
                let streams: Vec<_> = (0..num_seqs).map(|id| engine.submit(request(id)).unwrap()).collect();
                engine.resume().unwrap();
                for stream in streams {
                    black_box(stream.wait().unwrap());
                }
            });
        });
    }
    group.finish();
}

/// Logits as a model gives them: most far below the best.
fn logits(vocab_size: usize) -> Vec<f32> {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..vocab_size).map(|_| (uniform() + uniform() + uniform() + uniform() - 2.0) * 6.0).collect()
}

fn sampling(c: &mut Criterion) {
    let none = SamplingParams { temperature: Some(0.8), ..SamplingParams::default() };
    let kinds = [
        ("greedy", SamplingParams { temperature: Some(0.0), ..none.clone() }),
        ("greedy, logprobs 5", SamplingParams { temperature: Some(0.0), logprobs: Some(5), ..none.clone() }),
        ("temperature", none.clone()),
        ("top_k 40", SamplingParams { top_k: Some(40), ..none.clone() }),
        ("top_p 0.9", SamplingParams { top_p: Some(0.9), ..none.clone() }),
        ("top_p 0.1, presence", SamplingParams { top_p: Some(0.1), presence_penalty: Some(1.0), ..none.clone() }),
        ("top_k 40, top_p 0.95, min_p 0.05", SamplingParams { top_k: Some(40), top_p: Some(0.95), min_p: Some(0.05), ..none }),
    ];
    for vocab_size in [49_152, 262_144] {
        let mut group = c.benchmark_group(format!("sample a row of {vocab_size}"));
        let row = logits(vocab_size);
        let prompt: Vec<u32> = (0..1000).map(|position| position * 37).collect();
        for (name, params) in &kinds {
            let resolved = ResolvedSampling::new(params, &GenerationConfig::default(), vocab_size).unwrap();
            let mut sampler = Sampler::new(Arc::new(resolved), 7, &prompt, Arc::default());
            let (mut logits, mut position) = (row.clone(), 0);
            group.bench_function(*name, |b| {
                // The sampler leaves the row as it was.
                b.iter(|| {
                    let sampled = sampler.sample(black_box(&mut logits), position, None).unwrap();
                    sampler.observe(sampled.token_id);
                    position += 1;
                    black_box(sampled)
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, steps, sampling);
criterion_main!(benches);
