//! Every kernel of the manifest is launched by some phase, and nothing else is.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    CudaBackend, EMBEDDED,
    kernels::{HEAD_DIMS, Kernel, LATENT_DIMS},
    recording::{Event, RecordingDriver},
};
use crate::{
    Activation, Adapter, AdapterRows, AttentionArgs, AttentionParams, Backend, CacheEngine, Conv, DType, Device, DeviceSampler,
    EmbedArgs, EmbeddingDelta, EmbeddingTable, Expert, ExpertActivation, ExpertArgs, ExpertPhases, Experts, GateActivation,
    GateUpArgs, GatedDelta, KvCacheSpec, KvDType, KvGroupMetadata, KvShape, LatentArgs, LatentAttention, LatentPhases,
    LatentQuery, LayerInputArgs, Linear, LinearDelta, LinearOptions, LowRank, Magnitude, Mamba, Mamba2, Norm, NormKind, Phases,
    Precision, Projection, Recurrent, RecurrentArgs, RecurrentPhases, ResidualArgs, RopeArgs, RouterScore, RoutingRule,
    RowSampling, StepMetadata, StreamArgs, WeightView, mmap::Bytes,
};

/// Kernels that no phase launches: floats are multiplied as they are.
const NOT_LAUNCHED: [&str; 3] = ["dequantize_bf16", "dequantize_f16", "dequantize_f32"];
const WIDTH: usize = 256;

/// Names in `one` and not in `other`.
fn only_in<'a>(one: &BTreeSet<&'a str>, other: &BTreeSet<&'a str>) -> Vec<&'a str> {
    one.difference(other).copied().collect()
}

#[test]
fn the_embedded_kernels_are_those_of_the_manifest() {
    if EMBEDDED.modules.is_empty() {
        return;
    }
    let embedded: BTreeSet<&str> = EMBEDDED.modules.iter().flat_map(|module| module.kernels).copied().collect();
    let listed: BTreeSet<&str> = Kernel::all().keys().copied().collect();
    let (missing, unknown) = (only_in(&listed, &embedded), only_in(&embedded, &listed));
    assert!(missing.is_empty() && unknown.is_empty(), "not embedded: {missing:?}, not listed: {unknown:?}; run `make kernels`");
}

#[test]
fn every_kernel_is_launched() {
    let recording = RecordingDriver::new(1 << 30);
    let backend = CudaBackend::new(Arc::<RecordingDriver>::clone(&recording)).unwrap();
    for (format, precision) in DType::all().flat_map(|format| [Precision::Fast, Precision::Exact].map(|p| (format, p))) {
        multiply(&backend, format, precision);
        mix(&backend, format, precision);
    }
    norm_and_gate(&backend);
    add_bias_and_sample(&backend);
    for state_rows in [16, 128, WIDTH] {
        recur(&backend, state_rows);
    }
    adapt(&backend);
    for cache in caches(&backend) {
        attend(&backend, &cache);
    }
    for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
        attend_latent(&backend, dtype);
    }
    let events = recording.events();
    let launched: BTreeSet<&str> =
        events.iter().filter_map(|event| if let Event::Launch { kernel, .. } = event { Some(*kernel) } else { None }).collect();
    let expected: BTreeSet<&str> = Kernel::all().keys().copied().filter(|name| !NOT_LAUNCHED.contains(name)).collect();
    assert_eq!(only_in(&expected, &launched), [""; 0], "no phase launches these");
    assert_eq!(only_in(&launched, &expected), [""; 0], "these are launched after all");
}

fn linear(backend: &CudaBackend, format: DType, precision: Precision) -> Linear {
    let bytes = vec![0; format.row_bytes(WIDTH).unwrap() * WIDTH];
    let weight = WeightView::new(format, WIDTH, WIDTH, Bytes::from_vec(bytes)).unwrap();
    backend.load_linear(&weight, &LinearOptions { name: "w".into(), precision, bias: None }).unwrap()
}

/// One row, and up to every capacity, and many; and rows of a table.
fn multiply(backend: &CudaBackend, format: DType, precision: Precision) {
    let linear = linear(backend, format, precision);
    let (mut x, mut out) = (backend.alloc(300, WIDTH).unwrap(), backend.alloc(300, WIDTH).unwrap());
    for rows in [1, 2, 4, 8, 16, 32, 64, 128, 300] {
        backend.embed(
            &EmbedArgs {
                table: EmbeddingTable::Loaded(&linear),
                token_ids: &vec![0; rows],
                beyond: None,
                adapters: &[],
                scale: 1.0,
            },
            &mut x,
        );
        backend.norm_linear(&x, None, &mut [Projection { linear: &linear, out: &mut out }], &StepMetadata::default());
    }
}

/// Few rows and many of layers of experts, all of one weight; and one that a product norms.
fn mix(backend: &CudaBackend, format: DType, precision: Precision) {
    let (weight, router) = (linear(backend, format, precision), linear(backend, DType::F32, Precision::Exact));
    let expert = || Expert { gate: Some(weight.clone()), up: weight.clone(), down: weight.clone() };
    let experts = |num_experts| Experts {
        router: router.clone(),
        correction: None,
        rule: RoutingRule { num_chosen: 8, score: RouterScore::Softmax, groups: None, normalize: None, scale: 1.0 },
        experts: (0..num_experts).map(|_| expert()).collect(),
        activation: ExpertActivation::Gated(Activation::Silu),
        scales_input: false,
        shared: None,
        scales: None,
        norms: None,
        latent: None,
    };
    let norm = Norm { kind: NormKind::Rms, weight: vec![1.0; WIDTH].into(), bias: None, eps: 1e-5 };
    let [mut hidden, mut out] = [(); 2].map(|()| backend.alloc(300, WIDTH).unwrap());
    let step = StepMetadata::default();
    // Some rows of each on average, and many.
    for (rows, num_experts) in [(1, WIDTH), (300, WIDTH), (300, 16)] {
        hidden.set_rows(rows);
        let args = ExpertArgs { hidden: &mut hidden, norm: None, experts: &experts(num_experts), post_norm: None, scale: 1.0 };
        backend.experts(args, &step);
        backend.norm_linear(&hidden, Some(&norm), &mut [Projection { linear: &weight, out: &mut out }], &step);
    }
}

fn norm_and_gate(backend: &CudaBackend) {
    let linear = linear(backend, DType::F32, Precision::Fast);
    let [mut x, mut residual, mut out] = [(); 3].map(|()| backend.alloc(4, WIDTH).unwrap());
    for tensor in [&mut x, &mut residual] {
        backend.embed(
            &EmbedArgs { table: EmbeddingTable::Loaded(&linear), token_ids: &[0], beyond: None, adapters: &[], scale: 1.0 },
            tensor,
        );
    }
    for kind in [NormKind::Rms, NormKind::Layer] {
        let norm = Norm { kind, weight: vec![1.0; WIDTH].into(), bias: None, eps: 1e-5 };
        let args = GateUpArgs {
            x: &x,
            norm: Some(&norm),
            gate: Some(&linear),
            up: &linear,
            activation: Activation::Silu,
            out: &mut out,
            next: None,
        };
        backend.gate_up(args, &StepMetadata::default());
        let args = ResidualArgs { x: &out, linear: &linear, post_norm: Some(&norm), scale: 1.0, residual: &mut residual };
        backend.linear_residual(args, &StepMetadata::default());
    }
    backend.gather_rows(&x, &[0], &mut out);
    let phases = backend.elementwise_phases().unwrap();
    let norm = Norm { kind: NormKind::Rms, weight: vec![1.0; WIDTH].into(), bias: None, eps: 1e-5 };
    phases.layer_inputs(LayerInputArgs { x: &mut x, tokens: &residual, norm: &norm, scale: 1.0 });
    phases.scale(&mut x, 2.0);
    let phases = backend.stream_phases().unwrap();
    let (mut streams, mut hidden) = ([(); 2].map(|()| backend.alloc(4, WIDTH).unwrap()), backend.alloc(4, WIDTH).unwrap());
    let mut routed = backend.alloc(4, 2).unwrap();
    for tensor in streams.iter_mut().chain([&mut hidden, &mut routed]) {
        tensor.set_rows(1);
    }
    for factors in [4, 2] {
        let coefficients = &vec![0.0; 2 * factors].into();
        let args = StreamArgs { routed: &routed, coefficients, streams: &mut streams, active: 0, hidden: &mut hidden };
        if factors == 4 { phases.predict(args) } else { phases.correct(args, None) }
    }
    let [one, other] = &mut streams;
    phases.add(one, other, 1.0);
    phases.match_size(one, other);
    phases.keep_largest(one, 1.0);
}

/// A row of the token embedding with an adapter, and of a product that is added to.
fn adapt(backend: &CudaBackend) {
    let mut linear = linear(backend, DType::F32, Precision::Fast);
    linear.site = Some(0);
    let mut low_rank = LowRank::new(1, &[0.0; WIDTH], vec![0.0; WIDTH]).unwrap();
    low_rank.magnitude = Some(Magnitude { factors: vec![1.0; WIDTH], bias: None });
    let mut adapter = Adapter::default();
    adapter.embedding = Some(EmbeddingDelta::default());
    assert!(adapter.insert(0, LinearDelta::LowRank(low_rank)));
    let adapter = Arc::new(backend.load_adapter(adapter).unwrap());
    let step = StepMetadata { adapters: vec![AdapterRows { adapter, rows: vec![0] }], ..StepMetadata::default() };
    backend.begin_step(&step);
    let [mut x, mut residual] = [(); 2].map(|()| backend.alloc(1, WIDTH).unwrap());
    for tensor in [&mut x, &mut residual] {
        let table = EmbeddingTable::Loaded(&linear);
        backend.embed(&EmbedArgs { table, token_ids: &[0], beyond: None, adapters: &step.adapters, scale: 1.0 }, tensor);
    }
    backend.linear_residual(ResidualArgs { x: &x, linear: &linear, post_norm: None, scale: 1.0, residual: &mut residual }, &step);
}

fn add_bias_and_sample(backend: &CudaBackend) {
    let weight = WeightView::new(DType::F32, WIDTH, WIDTH, Bytes::from_vec(vec![0; WIDTH * WIDTH * 4])).unwrap();
    let options = LinearOptions { name: "w".into(), precision: Precision::Fast, bias: Some(vec![0.0; WIDTH]) };
    let linear = backend.load_linear(&weight, &options).unwrap();
    let [mut x, mut logits] = [(); 2].map(|()| backend.alloc(100, WIDTH).unwrap());
    x.set_rows(100);
    backend.logits(&x, None, &linear, &[], &mut logits);
    let drawn = RowSampling { temperature: Some(1.0), top_k: Some(4), top_p: 1.0, min_p: 0.0, uniform: 0.5, mask: None };
    backend.sample(&logits, &[Some(drawn); 100], 2);
}

/// Layers of a head whose state has so many rows, and the gate of attention.
fn recur(backend: &CudaBackend, state_rows: usize) {
    let linear = |rows: usize| {
        let weight = WeightView::new(DType::F32, rows, WIDTH, Bytes::from_vec(vec![0; rows * WIDTH * 4])).unwrap();
        let options = LinearOptions { name: "w".into(), precision: Precision::Fast, bias: None };
        backend.load_linear(&weight, &options).unwrap()
    };
    let conv = |num_channels| Conv { weight: vec![0.0; 4 * num_channels].into(), bias: None, num_channels };
    let one = || vec![0.0; 1].into();
    let norm = || Norm { kind: NormKind::Rms, weight: vec![1.0; WIDTH].into(), bias: None, eps: 1e-5 };
    let mamba2 = Recurrent::Mamba2(Mamba2 {
        z: linear(WIDTH),
        xbc: linear(WIDTH + 2 * state_rows),
        dt: linear(1),
        conv: conv(WIDTH + 2 * state_rows),
        dt_bias: one(),
        a: one(),
        d: one(),
        norm: Some(norm()),
        gates_first: true,
        scales: [1.0; 2],
        num_heads: 1,
        num_groups: 1,
        state_dim: state_rows,
        dt_limits: [0.0, f32::INFINITY],
    });
    let zeros = |len| vec![0.0; len].into();
    let mamba = Recurrent::Mamba(Mamba {
        x: linear(WIDTH),
        z: linear(WIDTH),
        conv: conv(WIDTH),
        dt_down: linear(WIDTH),
        b: linear(state_rows),
        c: linear(state_rows),
        norms: None,
        dt: linear(WIDTH),
        a: zeros(state_rows * WIDTH),
        d: zeros(WIDTH),
    });
    let delta = |down: Option<[Linear; 2]>| {
        let num_decays = if down.is_some() { state_rows } else { 1 };
        Recurrent::GatedDelta(GatedDelta {
            q: linear(state_rows),
            k: linear(state_rows),
            v: linear(WIDTH),
            z: linear(WIDTH),
            b: linear(1),
            dt: linear(num_decays),
            down,
            convs: [state_rows, state_rows, WIDTH].map(conv),
            dt_bias: zeros(num_decays),
            a: one(),
            beta_scale: 1.0,
            norm: norm(),
            num_key_heads: 1,
            num_value_heads: 1,
            is_grouped: true,
        })
    };
    let (gated_delta, kimi_delta) = (delta(None), delta(Some([linear(WIDTH), linear(WIDTH)])));
    let step = StepMetadata {
        positions: vec![0, 1],
        rope_positions: vec![0, 1],
        query_start_loc: vec![0, 2],
        seq_lens: vec![2],
        state_slots: vec![1],
        ..StepMetadata::default()
    };
    backend.begin_step(&step);
    let [mut hidden, mut out] = [(); 2].map(|()| backend.alloc(2, WIDTH).unwrap());
    hidden.set_rows(2);
    for weights in [&mamba, &mamba2, &gated_delta, &kimi_delta] {
        let states = backend.alloc_states(2, &[weights.state_len()]).unwrap();
        backend
            .recurrent(RecurrentArgs { hidden: &hidden, norm: None, weights, states: &states, layer: 0, out: &mut out }, &step);
        states.copy(1, 0).unwrap();
    }
    backend.gate(&mut out, &hidden, GateActivation::Sigmoid);
}

fn caches(backend: &CudaBackend) -> impl Iterator<Item = CacheEngine> {
    let shapes = KvDType::ALL.into_iter().flat_map(|dtype| HEAD_DIMS.map(|head_dim| (dtype, head_dim)));
    shapes.map(|(dtype, head_dim)| {
        let spec = KvCacheSpec::uniform((300, 8), dtype, KvShape::new(1, head_dim), 1).unwrap();
        backend.alloc_kv_cache(&spec).unwrap()
    })
}

const PROMPT: usize = 90;

/// A request that decodes after so many tokens that it comes in parts, and a prompt.
fn step() -> StepMetadata {
    let (before, prompt) = (2000, PROMPT);
    let rows = prompt + 1;
    let max_blocks = (before + 1_usize).div_ceil(8);
    let group = KvGroupMetadata { block_tables: vec![1; 2 * max_blocks], max_blocks, slot_mapping: vec![8; rows] };
    let positions: Vec<u32> = std::iter::once(before as u32).chain(0..prompt as u32).collect();
    StepMetadata {
        rope_positions: positions.clone(),
        positions,
        query_start_loc: vec![0, 1, rows as u32],
        seq_lens: vec![before as u32 + 1, prompt as u32],
        groups: vec![group],
        ..StepMetadata::default()
    }
}

fn attend(backend: &CudaBackend, cache: &CacheEngine) {
    let head_dim = cache.layer(0).shape.k_dim;
    let (step, num_heads, rows) = (step(), 2, PROMPT + 1);
    let [mut q, mut out] = [(); 2].map(|()| backend.alloc(rows, num_heads * head_dim).unwrap());
    let [mut k, mut v] = [(); 2].map(|()| backend.alloc(rows, head_dim).unwrap());
    for tensor in [&mut q, &mut k, &mut v] {
        tensor.set_rows(rows);
    }
    backend.begin_step(&step);
    backend.rope_and_cache(RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), None, (cache, 0)), &step);
    let params = AttentionParams { scale: 1.0, ..AttentionParams::new([num_heads, 1, head_dim], Precision::Fast) };
    backend.attention(AttentionArgs { q: &q, out: &mut out, cache, layer: 0, sinks: None, params, next: None }, &step);
    cache.copy_blocks(&[(1, 2)]);
}

fn attend_latent(backend: &CudaBackend, dtype: KvDType) {
    let [rope, rank] = LATENT_DIMS;
    let (step, rows, width) = (step(), PROMPT + 1, rope + rank);
    let spec = KvCacheSpec::uniform((300, 8), dtype, KvShape::latent(width), 1).unwrap();
    let cache = backend.alloc_kv_cache(&spec).unwrap();
    let linear = |rows: usize, cols: usize| {
        let weight = WeightView::new(DType::F32, rows, cols, Bytes::from_vec(vec![0; rows * cols * 4])).unwrap();
        backend.load_linear(&weight, &LinearOptions { name: "w".into(), precision: Precision::Fast, bias: None }).unwrap()
    };
    let norm = |len| Norm { kind: NormKind::Rms, weight: vec![1.0; len].into(), bias: None, eps: 1e-5 };
    let weights = LatentAttention {
        query: LatentQuery::LowRank { down: linear(8, WIDTH), norm: norm(8), up: linear(2 * (16 + rope), 8) },
        kv_down: linear(width, WIDTH),
        kv_norm: norm(rank),
        key_up: vec![linear(rank, 16), linear(rank, 16)],
        value_up: vec![linear(16, rank), linear(16, rank)],
    };
    let (mut hidden, mut out) = (backend.alloc(rows, WIDTH).unwrap(), backend.alloc(rows, 32).unwrap());
    hidden.set_rows(rows);
    backend.begin_step(&step);
    let params = AttentionParams { scale: 1.0, ..AttentionParams::new([2, 1, width], Precision::Fast) };
    let (norm, rope) = (Some(&norm(WIDTH)), None);
    let (q_scale, cache) = (None, &cache);
    let args = LatentArgs { hidden: &hidden, norm, weights: &weights, rope, q_scale, cache, layer: 0, params, out: &mut out };
    backend.latent_attention(args, &step);
}
