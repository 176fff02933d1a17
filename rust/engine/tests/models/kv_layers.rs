//! Layers whose keys and values have unequal shapes, and layers that read those of another one, over one pool of blocks: a
//! made-up model on every backend, in chunks, after prefix hits and after a preemption, against a plain forward pass without a
//! cache.

use std::{path::Path, sync::Arc};

use device::{
    AttentionArgs, AttentionParams, Backend, CacheEngine, DType, EmbedArgs, EmbeddingTable, KvCacheSpec, KvDType,
    KvGroupMetadata, KvShape, KvSource, Linear, LinearOptions, Precision, Projection, ResidualArgs, RopeArgs, RopeStyle,
    RopeTable, StepMetadata, WeightView,
    cpu::{CpuBackend, Isa, ReferenceBackend},
    cuda::CudaBackend,
    mmap::Bytes,
};
use engine::{ModelSource, model::ModelFiles};
use kernel_tests::{EmulatedDriver, Order, random::Rng};
use paged::{
    BlockHasher, CacheKey, DeviceMemory, KvCacheManager, KvGroups, ModelConfigLike, PagedAttentionConfig, PoolLimits,
    RequestBlocks, Retention, calculate_cache_config,
};
use safetensors::{SafeTensors, tensor::TensorView};

use crate::common::{Harness, golden_dir, load_files};

const HIDDEN: usize = 32;
const VOCAB: usize = 40;
const BLOCK: usize = 8;
const MAX_TOKENS: usize = 80;

#[derive(Clone, Copy)]
struct Layer {
    num_heads: usize,
    window: Option<usize>,
    kv: KvSource,
}

/// Unequal heads in one group, wider ones behind a window in the other, and one layer that shares in each.
const LAYERS: [Layer; 5] = [
    Layer { num_heads: 4, window: None, kv: KvSource::Own(KvShape::new(2, 16)) },
    Layer { num_heads: 2, window: Some(12), kv: KvSource::Own(KvShape::new(1, 64)) },
    Layer { num_heads: 6, window: None, kv: KvSource::Own(KvShape::new(3, 8)) },
    Layer { num_heads: 3, window: None, kv: KvSource::Layer(2) },
    Layer { num_heads: 3, window: Some(12), kv: KvSource::Layer(1) },
];

impl Layer {
    /// The layer whose keys and values it reads, and their shape.
    fn source(index: usize) -> (usize, KvShape) {
        match LAYERS[index].kv {
            KvSource::Own(shape) => (index, shape),
            KvSource::Layer(other) => Self::source(other),
            KvSource::Nothing => unreachable!("all layers have attention"),
        }
    }
}

struct Sizes;

impl ModelConfigLike for Sizes {
    fn num_layers(&self) -> usize {
        LAYERS.len()
    }

    fn kv_shape(&self, layer: usize) -> paged::KvShape {
        match LAYERS[layer].kv {
            KvSource::Own(KvShape { num_kv_heads, k_dim, v_dim }) => {
                paged::KvShape { num_kv_heads, k_head_dim: k_dim, v_head_dim: v_dim }
            }
            KvSource::Layer(_) | KvSource::Nothing => paged::KvShape::default(),
        }
    }

    fn retention(&self, layer: usize) -> Retention {
        LAYERS[layer].window.into()
    }

    fn max_seq_len(&self) -> usize {
        MAX_TOKENS
    }
}

fn groups() -> KvGroups {
    KvGroups::of_model(&Sizes, paged::KvDType::F32, BLOCK).unwrap()
}

fn spec(num_blocks: usize) -> KvCacheSpec {
    let groups = groups();
    let groups: Vec<_> = groups.groups.iter().map(|group| &group.layers[..]).collect();
    KvCacheSpec::grouped((num_blocks, BLOCK), KvDType::F32, &LAYERS.map(|layer| layer.kv), &groups).unwrap()
}

/// Rows of a weight `[out, in]`.
type Matrix = Vec<Vec<f32>>;

struct Model {
    embedding: Matrix,
    /// q, k, v, output; without k and v where another layer's are read.
    layers: Vec<Vec<Matrix>>,
    /// By head size.
    ropes: Vec<(usize, RopeTable)>,
}

fn matrix(rng: &mut Rng, rows: usize, cols: usize) -> Matrix {
    let scale = (cols as f32).sqrt().recip();
    (0..rows).map(|_| rng.floats(cols).iter().map(|x| x * scale).collect()).collect()
}

impl Model {
    fn new() -> Self {
        let mut rng = Rng::new(11);
        let embedding = (0..VOCAB).map(|_| rng.floats(HIDDEN)).collect();
        let layer = |index: usize| {
            let (source, KvShape { num_kv_heads, k_dim, v_dim }) = Layer::source(index);
            let q = matrix(&mut rng, LAYERS[index].num_heads * k_dim, HIDDEN);
            let mut all = vec![q];
            if source == index {
                all.extend([k_dim, v_dim].map(|dim| matrix(&mut rng, num_kv_heads * dim, HIDDEN)));
            }
            all.push(matrix(&mut rng, HIDDEN, LAYERS[index].num_heads * v_dim));
            all
        };
        let layers = (0..LAYERS.len()).map(layer).collect();
        let rope = |dim: usize| {
            let angle = |at: usize| (at / (dim / 2)) as f32 * 100f32.powf(-((at % (dim / 2)) as f32) / (dim / 2) as f32);
            let table = |of: fn(f32) -> f32| Arc::new((0..MAX_TOKENS * dim / 2).map(|at| of(angle(at))).collect::<Vec<f32>>());
            (dim, RopeTable { style: RopeStyle::Neox, rotary_dim: dim, cos: table(f32::cos), sin: table(f32::sin) })
        };
        Self { embedding, layers, ropes: [8, 16, 64].map(rope).into() }
    }

    fn rope(&self, dim: usize) -> &RopeTable {
        &self.ropes.iter().find(|(of, _)| *of == dim).unwrap().1
    }

    /// The hidden state of every token, in f64, without a cache.
    fn plain(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let product = |x: &[f64], weight: &Matrix| -> Vec<f64> {
            weight.iter().map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
        };
        let mut hidden: Vec<_> = tokens.iter().map(|id| wide(&self.embedding[*id as usize])).collect();
        let mut kv: Vec<[Vec<Vec<f64>>; 2]> = vec![Default::default(); LAYERS.len()];
        for (index, layer) in LAYERS.iter().enumerate() {
            let (source, KvShape { num_kv_heads, k_dim, v_dim }) = Layer::source(index);
            let weights = &self.layers[index];
            let rotated = |mut x: Vec<f64>, position: usize| {
                let (rope, half) = (self.rope(k_dim), k_dim / 2);
                for head in x.chunks_exact_mut(k_dim) {
                    for i in 0..half {
                        let (cos, sin) = (f64::from(rope.cos[position * half + i]), f64::from(rope.sin[position * half + i]));
                        (head[i], head[i + half]) = (head[i] * cos - head[i + half] * sin, head[i + half] * cos + head[i] * sin);
                    }
                }
                x
            };
            if source == index {
                kv[index] = [
                    hidden.iter().enumerate().map(|(at, x)| rotated(product(x, &weights[1]), at)).collect(),
                    hidden.iter().map(|x| product(x, &weights[2])).collect(),
                ];
            }
            let [keys, values] = &kv[source];
            let attended = (0..tokens.len()).map(|at| {
                let q = rotated(product(&hidden[at], &weights[0]), at);
                let first = layer.window.map_or(0, |window| (at + 1).saturating_sub(window));
                let mut out = vec![0.0; layer.num_heads * v_dim];
                for head in 0..layer.num_heads {
                    let kv_head = head * num_kv_heads / layer.num_heads;
                    let query = &q[head * k_dim..(head + 1) * k_dim];
                    let score = |key: &[f64]| -> f64 {
                        let key = &key[kv_head * k_dim..(kv_head + 1) * k_dim];
                        query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * f64::from(scale(k_dim))
                    };
                    let scores: Vec<f64> = keys[first..=at].iter().map(|key| score(key)).collect();
                    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for (weight, value) in weights.iter().zip(&values[first..=at]) {
                        let value = &value[kv_head * v_dim..(kv_head + 1) * v_dim];
                        let out = &mut out[head * v_dim..(head + 1) * v_dim];
                        out.iter_mut().zip(value).for_each(|(out, v)| *out += weight / total * v);
                    }
                }
                out
            });
            let attended: Vec<_> = attended.collect();
            for (x, attended) in hidden.iter_mut().zip(&attended) {
                x.iter_mut().zip(product(attended, weights.last().unwrap())).for_each(|(x, y)| *x += y);
            }
        }
        hidden
    }
}

fn scale(k_dim: usize) -> f32 {
    (k_dim as f32).sqrt().recip()
}

fn view(matrix: &Matrix) -> WeightView {
    let bytes = matrix.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
    WeightView::new(DType::F32, matrix.len(), matrix[0].len(), Bytes::from_vec(bytes)).unwrap()
}

struct Request {
    tokens: Vec<u32>,
    num_computed: usize,
    blocks: RequestBlocks,
    /// Of every token that was computed.
    hidden: Vec<Option<Vec<f32>>>,
}

impl Request {
    fn new(tokens: &[u32]) -> Self {
        let (blocks, hidden) = (RequestBlocks::new(groups().groups.len(), tokens.len()), vec![None; tokens.len()]);
        Self { tokens: tokens.to_vec(), num_computed: 0, blocks, hidden }
    }
}

/// The model on a backend, and its pool.
struct Runner<'a> {
    model: &'a Model,
    backend: &'a dyn Backend,
    embedding: WeightView,
    layers: Vec<Vec<Linear>>,
    cache: CacheEngine,
    manager: KvCacheManager,
    num_copies: usize,
}

impl<'a> Runner<'a> {
    fn new(model: &'a Model, backend: &'a dyn Backend, num_blocks: usize) -> Self {
        let options = LinearOptions { name: "made up".into(), precision: Precision::Exact, bias: None };
        let load = |matrix: &Matrix| backend.load_linear(&view(matrix), &options).unwrap();
        Self {
            model,
            backend,
            embedding: view(&model.embedding),
            layers: model.layers.iter().map(|layer| layer.iter().map(load).collect()).collect(),
            cache: backend.alloc_kv_cache(&spec(num_blocks + 1)).unwrap(),
            manager: KvCacheManager::new(num_blocks as u32, BLOCK, groups(), BlockHasher::new([7; 32]), true),
            num_copies: 0,
        }
    }

    /// Computes so many more tokens of these requests in one step.
    fn step(&mut self, work: &mut [(&mut Request, usize)]) {
        let mut copies = Vec::new();
        for (request, n) in &mut *work {
            let end = request.num_computed + *n;
            self.manager.allocate_slots(&mut request.blocks, request.num_computed, end, &mut copies).unwrap();
        }
        self.num_copies += copies.len();
        self.cache.copy_blocks(&copies.iter().map(|(from, to)| (from.0, to.0)).collect::<Vec<_>>());
        let max_blocks = work.iter().map(|(request, _)| request.blocks.num_blocks()).max().unwrap();
        let num_groups = groups().groups.len();
        let group = KvGroupMetadata { max_blocks, ..KvGroupMetadata::default() };
        let mut step = StepMetadata { query_start_loc: vec![0], groups: vec![group; num_groups], ..StepMetadata::default() };
        let mut token_ids = Vec::new();
        for (request, n) in &*work {
            let positions = request.num_computed..request.num_computed + n;
            token_ids.extend(&request.tokens[positions.clone()]);
            step.positions.extend(positions.clone().map(|at| at as u32));
            step.query_start_loc.push(token_ids.len() as u32);
            step.seq_lens.push(positions.end as u32);
            for (index, group) in step.groups.iter_mut().enumerate() {
                let table = request.blocks.table(index);
                let slot = |at: usize| i64::from(table[at / BLOCK].0) * BLOCK as i64 + (at % BLOCK) as i64;
                group.slot_mapping.extend(positions.clone().map(slot));
                group.block_tables.extend((0..max_blocks).map(|i| table.get(i).map_or(0, |block| block.0)));
            }
        }
        step.rope_positions.clone_from(&step.positions);
        let hidden = self.run(&token_ids, &step);
        let mut rows = hidden.into_iter();
        for (request, n) in &mut *work {
            for at in request.num_computed..request.num_computed + *n {
                request.hidden[at] = rows.next();
            }
            request.num_computed += *n;
            self.manager.commit(&mut request.blocks, &request.tokens, CacheKey::new(b""), request.num_computed);
        }
    }

    fn run(&self, token_ids: &[u32], step: &StepMetadata) -> Vec<Vec<f32>> {
        let (backend, rows) = (self.backend, token_ids.len());
        let mut hidden = backend.alloc(rows, HIDDEN).unwrap();
        backend.begin_step(step);
        backend.embed(
            &EmbedArgs { table: EmbeddingTable::Stored(&self.embedding), token_ids, beyond: None, adapters: &[], scale: 1.0 },
            &mut hidden,
        );
        for (index, weights) in self.layers.iter().enumerate() {
            let num_heads = LAYERS[index].num_heads;
            let (source, KvShape { num_kv_heads, k_dim, v_dim }) = Layer::source(index);
            let alloc = |cols: usize| backend.alloc(rows, cols).unwrap();
            let (mut q, mut out) = (alloc(num_heads * k_dim), alloc(num_heads * v_dim));
            let (mut k, mut v) = (alloc(num_kv_heads * k_dim), alloc(num_kv_heads * v_dim));
            let mut projections = vec![Projection { linear: &weights[0], out: &mut q }];
            if source == index {
                projections
                    .extend([Projection { linear: &weights[1], out: &mut k }, Projection { linear: &weights[2], out: &mut v }]);
            }
            backend.norm_linear(&hidden, None, &mut projections, step);
            let kv = (source == index).then_some((&mut k, Some(&mut v)));
            let (rope, cache) = (Some(self.model.rope(k_dim)), &self.cache);
            backend.rope_and_cache(RopeArgs::new(&mut q, kv, rope, (cache, index)), step);
            let params = AttentionParams {
                scale: scale(k_dim),
                window: LAYERS[index].window,
                ..AttentionParams::new([num_heads, num_kv_heads, k_dim], Precision::Exact)
            };
            backend.attention(AttentionArgs { q: &q, out: &mut out, cache, layer: index, sinks: None, params, next: None }, step);
            let linear = weights.last().unwrap();
            let args = ResidualArgs { x: &out, linear, post_norm: None, scale: 1.0, residual: &mut hidden };
            backend.linear_residual(args, step);
        }
        backend.fetch(&mut hidden);
        (0..rows).map(|row| hidden.row(row).to_vec()).collect()
    }
}

fn tokens(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| rng.below(VOCAB) as u32).collect()
}

/// Two prompts with 43 tokens in common: five blocks and a part.
fn prompts() -> [Vec<u32>; 2] {
    let first = tokens(1, 61);
    let second = [&first[..43], &tokens(2, 20)[..]].concat();
    [first, second]
}

/// What was computed is what the plain pass gives.
fn check(model: &Model, request: &Request, what: &str) {
    assert_eq!(request.num_computed, request.tokens.len());
    for (at, (row, plain)) in request.hidden.iter().zip(model.plain(&request.tokens)).enumerate() {
        let Some(row) = row else { continue };
        for (x, plain) in row.iter().zip(&plain) {
            assert!((f64::from(*x) - plain).abs() < 2e-4 * plain.abs().max(1.0), "{what}, token {at}: {x} and not {plain}");
        }
    }
}

fn whole(model: &Model, backend: &dyn Backend, tokens: &[u32]) -> Vec<Option<Vec<f32>>> {
    let mut request = Request::new(tokens);
    Runner::new(model, backend, 40).step(&mut [(&mut request, tokens.len())]);
    check(model, &request, "in one step");
    request.hidden
}

/// In chunks beside each other, the second request after a hit on the first one's blocks.
fn chunks_and_hits(model: &Model, backend: &dyn Backend) -> [Request; 2] {
    let mut runner = Runner::new(model, backend, 40);
    let [mut first, mut second] = prompts().map(|tokens| Request::new(&tokens));
    for n in [7, 1, 13, 30] {
        runner.step(&mut [(&mut first, n)]);
    }
    let hit = runner.manager.get_computed_blocks(&second.tokens, CacheKey::new(b""));
    assert_eq!(hit.num_tokens, 43, "every group has the prefix, its last block in part");
    runner.manager.take_hit(&mut second.blocks, hit);
    second.num_computed = hit.num_tokens;
    runner.step(&mut [(&mut first, 2), (&mut second, 9)]);
    runner.step(&mut [(&mut second, 11), (&mut first, 8)]);
    assert!(runner.num_copies > 0, "what is used in part is copied");
    for request in [&first, &second] {
        check(model, request, "in chunks, after a hit");
    }
    [first, second]
}

/// Preempted in the middle: the other one's keys and values lie where its own were when it comes back.
fn preemption(model: &Model, backend: &dyn Backend) -> Request {
    let mut runner = Runner::new(model, backend, 18);
    let mut first = Request::new(&prompts()[0]);
    runner.step(&mut [(&mut first, 37)]);
    runner.manager.free(&mut first.blocks);
    first.num_computed = 0;
    let mut other = Request::new(&tokens(3, 70));
    for n in [33, 37] {
        runner.step(&mut [(&mut other, n)]);
    }
    check(model, &other, "in place of another");
    runner.manager.free(&mut other.blocks);
    first.hidden.fill(None);
    for n in [20, 41] {
        runner.step(&mut [(&mut first, n)]);
    }
    check(model, &first, "after a preemption");
    first
}

/// Whether or not a request is alone, whole, after a hit or after a preemption: the same bits.
fn same_bits(model: &Model, backend: &dyn Backend) {
    let expected = prompts().map(|tokens| whole(model, backend, &tokens));
    let [first, second] = chunks_and_hits(model, backend);
    assert_eq!(first.hidden, expected[0]);
    assert_eq!(second.hidden[43..], expected[1][43..]);
    assert_eq!(preemption(model, backend).hidden, expected[0]);
}

#[test]
fn the_reference_reads_each_layers_own_keys_and_values() {
    same_bits(&Model::new(), &ReferenceBackend::new());
}

#[test]
fn the_cpu_reads_each_layers_own_keys_and_values() {
    for num_threads in [1, 3] {
        same_bits(&Model::new(), &CpuBackend::new(Isa::detect(), num_threads).unwrap());
    }
}

#[test]
fn a_gpu_reads_each_layers_own_keys_and_values() {
    let backend = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
    let model = Model::new();
    chunks_and_hits(&model, &backend);
    preemption(&model, &backend);
}

#[test]
fn groups_are_cut_by_bytes_and_a_block_takes_those_of_the_largest() {
    let groups = groups();
    let layers: Vec<_> = groups.groups.iter().map(|group| (group.retention, &group.layers[..])).collect();
    assert_eq!(layers, [(Retention::All, &[0, 2][..]), (Retention::Window(12), &[1])]);
    let spec = spec(3);
    // Keys and values, 8 tokens, 4 bytes.
    assert_eq!(spec.bytes_per_block(), Some(2 * 8 * 4 * 64));
    assert_eq!(spec.layers.iter().map(|layer| layer.offset).collect::<Vec<_>>(), [0, 0, 2 * 8 * 4 * 32, 2 * 8 * 4 * 32, 0]);
    assert_eq!(
        (spec.layers[3], spec.layers[4]),
        (spec.layers[2], spec.layers[1]),
        "a layer that shares is where the other one is"
    );
    let memory = DeviceMemory { total: 1 << 30, available: 1 << 30, pending: 0, unified: true };
    let limits = PoolLimits { max_num_seqs: 2, max_num_batched_tokens: 16, max_model_len: MAX_TOKENS };
    let config = PagedAttentionConfig { block_size: Some(BLOCK), ..PagedAttentionConfig::default() };
    let cache = calculate_cache_config(&config, &Sizes, paged::KvDType::F32, &[memory], &limits).unwrap();
    assert_eq!((&cache.groups, cache.ledger.bytes_per_block), (&groups, spec.bytes_per_block().unwrap()));
}

#[test]
fn layers_that_have_no_place_are_refused() {
    let own = KvSource::Own(KvShape::new(1, 8));
    let of = |sources: &[KvSource], groups: &[&[usize]]| {
        KvCacheSpec::grouped((2, BLOCK), KvDType::F16, sources, groups).err().map(|error| error.to_string())
    };
    assert_eq!(of(&[own, KvSource::Layer(0)], &[&[0]]), None);
    for (sources, groups, why) in [
        (&[own, own][..], &[&[0][..]][..], "layer 1 of the KV cache reads keys and values that no group has"),
        (&[own, KvSource::Layer(2)], &[&[0]], "layer 1 of the KV cache reads keys and values that no group has"),
        (&[own, KvSource::Layer(0)], &[&[0, 1]], "layer 1 of the KV cache is in a group and has no keys and values of its own"),
        (&[own], &[&[0], &[0]], "layer 0 of the KV cache is in two groups"),
        (&[own], &[&[0, 7]], "layer 7 of the KV cache is in a group and has no keys and values of its own"),
    ] {
        let error = of(sources, groups).unwrap();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn only_the_reference_computes_keys_and_values_of_two_widths() {
    let shape = KvShape { num_kv_heads: 2, k_dim: 24, v_dim: 16 };
    let spec = KvCacheSpec::uniform((4, BLOCK), KvDType::F16, shape, 2).unwrap();
    let cpu = CpuBackend::new(Isa::detect(), 1).unwrap();
    let gpu = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
    for backend in [&cpu as &dyn Backend, &gpu] {
        let error = backend.alloc_kv_cache(&spec).err().expect("there is no kernel").to_string();
        assert!(error.contains("24") && error.contains("16"), "{error}");
    }
    let reference: &dyn Backend = &ReferenceBackend::new();
    assert!(reference.alloc_kv_cache(&spec).is_ok());
}

/// A llama whose layer 1 adds nothing to the hidden state, so that layer 2 sees what it sees, and has its norm and its weights of
/// k and v.
fn write_twins(folder: &Path) {
    let golden = golden_dir().join("text/llama");
    std::fs::copy(golden.join("config.json"), folder.join("config.json")).unwrap();
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| {
        let twin = ["input_layernorm", "self_attn.k_proj", "self_attn.v_proj"].iter().find(|part| name.contains(**part));
        let of = twin.filter(|_| name.starts_with("model.layers.2.")).map(|_| name.replace("layers.2", "layers.1"));
        let view = file.tensor(of.as_deref().unwrap_or(name)).unwrap();
        let adds = name.starts_with("model.layers.1.") && (name.contains("o_proj") || name.contains("down_proj"));
        let data = if adds { vec![0; view.data().len()] } else { view.data().to_vec() };
        (name.to_owned(), view.dtype(), view.shape().to_vec(), data)
    };
    let tensors: Vec<_> = file.names().into_iter().map(tensor).collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

#[test]
fn a_decoder_reads_another_layers_keys_and_values_as_its_own_like_ones() {
    let folder = tempfile::TempDir::new().unwrap();
    write_twins(folder.path());
    let reference: Arc<dyn Backend> = Arc::new(ReferenceBackend::new());
    let cpu: Arc<dyn Backend> = Arc::new(CpuBackend::new(Isa::detect(), 2).unwrap());
    for (backend, precision) in [(reference, Precision::Exact), (cpu.clone(), Precision::Exact), (cpu, Precision::Fast)] {
        let logits_and_bytes = |shared_kv| {
            let source = ModelSource::HuggingFace { path: folder.path().to_owned(), tokenizer_json: None };
            let files = ModelFiles::open(&source, None).unwrap();
            let mut config = files.config().clone();
            config.layers[2].attention.shared_kv = shared_kv;
            let files = files.with_config(config).unwrap();
            let mut runner = load_files(&files, backend.clone(), precision, KvDType::F32);
            let mut harness = Harness::new(&mut runner, BLOCK);
            let request = harness.add(tokens(5, 60), 60);
            let logits = harness.finish(request, 23);
            (logits, runner.kv_cache_bytes())
        };
        let ((own, own_bytes), (shared, shared_bytes)) = (logits_and_bytes(None), logits_and_bytes(Some(1)));
        assert_eq!(own, shared);
        assert_eq!(own_bytes * 2, shared_bytes * 3, "two of three layers have a place of their own");
        assert_ne!(logits_and_bytes(Some(0)).0, own, "the other layer's keys are others");
    }
}
