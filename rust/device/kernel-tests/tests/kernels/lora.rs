//! Adapters: what kernels make of rows against the plain backend, and beside each other.

use std::{collections::HashMap, sync::Arc};

use device::{
    Activation, Adapter, AdapterRows, Backend, DType, EmbedArgs, EmbeddingDelta, EmbeddingProduct, EmbeddingTable, Expert,
    ExpertActivation, ExpertArgs, Experts, GateUpArgs, Linear, LinearDelta, LinearOptions, LowRank, Magnitude, Norm, NormKind,
    Precision, Projection, ResidualArgs, RouterScore, RoutingRule, SharedExpert, StepMetadata, WeightView, cpu::ReferenceBackend,
    cuda::CudaBackend, mmap::Bytes,
};
use kernel_tests::{
    EmulatedDriver, Order, assert_close, driver,
    random::Rng,
    tensors::{fetched, tensor},
};

/// Columns of the hidden state: more than a CTA of `lora_expand` has, and no multiple of them.
const COLS: usize = 264;
const WIDTH: usize = 72;
const VOCAB: usize = 40;
const NUM_EXPERTS: usize = 5;

fn gpu(order: Order) -> Arc<dyn Backend> {
    Arc::new(CudaBackend::new(driver(order)).unwrap())
}

fn view([rows, cols]: [usize; 2], values: &[f32]) -> WeightView {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    WeightView::new(DType::F32, rows, cols, Bytes::from_vec(bytes)).unwrap()
}

fn load(backend: &dyn Backend, shape: [usize; 2], rng: &mut Rng, bias: bool) -> Linear {
    let [rows, cols] = shape;
    let values: Vec<_> = rng.floats(rows * cols).iter().map(|x| x * 0.1).collect();
    let options = LinearOptions { name: "w".into(), precision: Precision::Exact, bias: bias.then(|| rng.floats(rows)) };
    backend.load_linear(&view(shape, &values), &options).unwrap()
}

/// The layers of the tests, the same for every backend, and numbered for adapters.
struct Layers {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    head: Linear,
    experts: Experts,
}

impl Layers {
    fn new(backend: &dyn Backend) -> Self {
        let mut rng = Rng::new(7);
        let mut site = 0..;
        let mut linear = |shape, bias| {
            let mut linear = load(backend, shape, &mut rng, bias);
            linear.site = site.next();
            linear
        };
        let mut expert = || Expert {
            gate: Some(linear([WIDTH, COLS], false)),
            up: linear([WIDTH, COLS], false),
            down: linear([COLS, WIDTH], false),
        };
        let (experts, shared) = ((0..NUM_EXPERTS).map(|_| expert()).collect(), expert());
        Self {
            experts: Experts {
                router: linear([NUM_EXPERTS, COLS], false),
                correction: None,
                rule: RoutingRule { num_chosen: 2, score: RouterScore::Softmax, groups: None, normalize: None, scale: 1.0 },
                experts,
                activation: ExpertActivation::Gated(Activation::Silu),
                scales_input: false,
                shared: Some(SharedExpert { expert: shared, weight: Some(linear([1, COLS], false)) }),
                scales: None,
                norms: None,
                latent: None,
            },
            q: linear([COLS, COLS], true),
            k: linear([WIDTH, COLS], true),
            v: linear([WIDTH, COLS], false),
            o: linear([COLS, COLS], true),
            gate: linear([WIDTH, COLS], false),
            up: linear([WIDTH, COLS], false),
            down: linear([COLS, WIDTH], true),
            head: linear([VOCAB, COLS], true),
        }
    }

    fn dense(&self) -> [&Linear; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }

    fn of_experts(&self) -> Vec<&Linear> {
        let Experts { router, experts, shared, .. } = &self.experts;
        let shared = shared.as_ref().unwrap();
        let all = experts.iter().chain([&shared.expert]).flat_map(Expert::linears);
        all.chain([router]).chain(&shared.weight).collect()
    }
}

/// What adapters of the tests do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    LowRank(usize),
    Dora,
    Replaced,
    /// Of q and the embedding alone.
    Few,
}

const KINDS: [Kind; 5] = [Kind::LowRank(3), Kind::LowRank(70), Kind::Dora, Kind::Replaced, Kind::Few];

fn low_rank(linear: &Linear, rank: usize, rng: &mut Rng) -> LowRank {
    let small = |rng: &mut Rng, n| rng.floats(n).iter().map(|x| x * 0.1).collect::<Vec<_>>();
    let a = small(rng, rank * linear.in_features);
    LowRank::new(rank, &a, small(rng, rank * linear.out_features)).unwrap()
}

fn adapter(backend: &dyn Backend, layers: &Layers, kind: Kind) -> Arc<Adapter> {
    let mut rng = Rng::new(100 + KINDS.iter().position(|other| *other == kind).unwrap() as u64);
    let mut adapter = Adapter::default();
    let some = if kind == Kind::Few { vec![&layers.q] } else { [&layers.dense()[..], &layers.of_experts()].concat() };
    for (i, linear) in some.into_iter().enumerate() {
        let delta = match kind {
            Kind::LowRank(rank) => {
                let mut low_rank = low_rank(linear, rank, &mut rng);
                low_rank.bias = (i % 2 == 0).then(|| rng.floats(linear.out_features));
                LinearDelta::LowRank(low_rank)
            }
            Kind::Dora | Kind::Few => {
                let mut low_rank = low_rank(linear, 4, &mut rng);
                let (factors, bias) = (rng.floats(linear.out_features), (i % 2 == 0).then(|| rng.floats(linear.out_features)));
                low_rank.magnitude = Some(Magnitude { factors, bias });
                LinearDelta::LowRank(low_rank)
            }
            Kind::Replaced => {
                let shape = [linear.out_features, linear.in_features];
                LinearDelta::Replaced(load(backend, shape, &mut rng, i % 2 == 0))
            }
        };
        assert!(adapter.insert(linear.site.unwrap(), delta));
    }
    let ids = [3_u32, 39, 0];
    let head = match kind {
        Kind::Replaced => LinearDelta::Replaced(load(backend, [VOCAB, COLS], &mut rng, true)),
        Kind::Few => LinearDelta::Rows { ids: ids.to_vec(), rows: view([3, COLS], &rng.floats(3 * COLS)) },
        _ => LinearDelta::LowRank(low_rank(&layers.head, 2, &mut rng)),
    };
    assert!(adapter.insert(layers.head.site.unwrap(), head));
    adapter.embedding = match kind {
        Kind::LowRank(3) => None,
        Kind::LowRank(_) => Some(EmbeddingDelta {
            low_rank: Some(EmbeddingProduct { rank: 5, a: rng.floats(VOCAB * 5), b: rng.floats(5 * COLS) }),
            ..EmbeddingDelta::default()
        }),
        Kind::Replaced => {
            Some(EmbeddingDelta { table: Some(view([VOCAB, COLS], &rng.floats(VOCAB * COLS))), ..EmbeddingDelta::default() })
        }
        Kind::Dora | Kind::Few => {
            let rows: HashMap<_, _> = ids.into_iter().map(|id| (id, rng.floats(COLS))).collect();
            Some(EmbeddingDelta { rows, ..EmbeddingDelta::default() })
        }
    };
    Arc::new(backend.load_adapter(adapter).unwrap())
}

/// A backend with everything.
struct Setup {
    backend: Arc<dyn Backend>,
    layers: Layers,
    adapters: Vec<Arc<Adapter>>,
}

/// Which adapter each row of a step has, and the rows' inputs and tokens.
#[derive(Clone)]
struct Step {
    adapters: Vec<Option<usize>>,
    x: Vec<f32>,
    tokens: Vec<u32>,
}

impl Step {
    fn random(adapters: Vec<Option<usize>>, rng: &mut Rng) -> Self {
        let n = adapters.len();
        Self { x: rng.floats(n * COLS), tokens: (0..n).map(|i| [3, 7, 39, 0, 12][i % 5]).collect(), adapters }
    }

    fn row(&self, row: usize) -> Self {
        Self {
            adapters: vec![self.adapters[row]],
            x: self.x[row * COLS..(row + 1) * COLS].to_vec(),
            tokens: vec![self.tokens[row]],
        }
    }
}

impl Setup {
    fn new(backend: Arc<dyn Backend>) -> Self {
        let layers = Layers::new(&*backend);
        let adapters = KINDS.iter().map(|kind| adapter(&*backend, &layers, *kind)).collect();
        Self { backend, layers, adapters }
    }

    fn meta(&self, step: &Step) -> StepMetadata {
        let n = step.adapters.len();
        let of = |(i, adapter): (usize, &Arc<Adapter>)| AdapterRows {
            adapter: Arc::clone(adapter),
            rows: (0..n).filter(|row| step.adapters[*row] == Some(i)).map(|row| row as u32).collect(),
        };
        let rows: Vec<_> = self.adapters.iter().enumerate().map(of).filter(|of| !of.rows.is_empty()).collect();
        StepMetadata {
            positions: vec![0; n],
            rope_positions: vec![0; n],
            query_start_loc: (0..=n as u32).collect(),
            seq_lens: vec![1; n],
            adapters: rows,
            ..StepMetadata::default()
        }
    }

    /// What the experts give for each row.
    fn mix(&self, step: &Step, meta: &StepMetadata, norm: &Norm) -> Vec<f32> {
        let backend = &*self.backend;
        let mut mixed = tensor(backend, &step.x, COLS);
        let experts = &self.layers.experts;
        let args = ExpertArgs { hidden: &mut mixed, norm: Some(norm), experts, post_norm: None, scale: 1.0 };
        backend.expert_phases().unwrap().experts(args, meta);
        fetched(backend, mixed)
    }

    /// What each phase gives for each row, by name.
    fn run(&self, step: &Step) -> Vec<(&'static str, Vec<f32>)> {
        let Self { backend, layers, .. } = self;
        let (backend, n) = (&**backend, step.adapters.len());
        let meta = self.meta(step);
        backend.begin_step(&meta);
        let norm = Norm { kind: NormKind::Rms, weight: vec![0.7; COLS].into(), bias: None, eps: 1e-5 };
        let x = tensor(backend, &step.x, COLS);
        let alloc = |cols| backend.alloc(n, cols).unwrap();
        let (mut embedded, mut q, mut k, mut v) = (alloc(COLS), alloc(COLS), alloc(WIDTH), alloc(WIDTH));
        let table = EmbeddingTable::Loaded(&layers.head);
        backend.embed(
            &EmbedArgs { table, token_ids: &step.tokens, beyond: None, adapters: &meta.adapters, scale: 0.5 },
            &mut embedded,
        );
        let mut projections =
            [(&layers.q, &mut q), (&layers.k, &mut k), (&layers.v, &mut v)].map(|(linear, out)| Projection { linear, out });
        backend.norm_linear(&x, Some(&norm), &mut projections, &meta);
        let mut gated = alloc(WIDTH);
        let (gate, up, activation) = (Some(&layers.gate), &layers.up, Activation::Silu);
        backend.gate_up(GateUpArgs { x: &x, norm: Some(&norm), gate, up, activation, out: &mut gated, next: None }, &meta);
        let mut residuals: Vec<_> = (0..2).map(|_| tensor(backend, &step.x, COLS)).collect();
        for (residual, post_norm) in residuals.iter_mut().zip([None, Some(&norm)]) {
            let args = ResidualArgs { x: &q, linear: &layers.o, post_norm, scale: 0.25, residual: &mut *residual };
            backend.linear_residual(args, &meta);
            let args = ResidualArgs { x: &gated, linear: &layers.down, post_norm, scale: 1.0, residual };
            backend.linear_residual(args, &meta);
        }
        let [added, normed] = <[_; 2]>::try_from(residuals).ok().unwrap();
        let mixed = self.mix(step, &meta, &norm);
        // Rows that are sampled have other numbers.
        let chosen: Vec<u32> = (0..n as u32).rev().collect();
        let (mut sampled, mut logits) = (alloc(COLS), alloc(VOCAB));
        backend.gather_rows(&x, &chosen, &mut sampled);
        let of_chosen = AdapterRows::of_chosen(&meta.adapters, &chosen.iter().copied());
        backend.logits(&sampled, Some(&norm), &layers.head, &of_chosen, &mut logits);
        let logits: Vec<f32> = fetched(backend, logits).chunks_exact(VOCAB).rev().flatten().copied().collect();
        let phases =
            [("embed", embedded), ("q", q), ("k", k), ("v", v), ("gate_up", gated), ("residual", added), ("post norm", normed)];
        let others = [("experts", mixed), ("logits", logits)];
        phases.into_iter().map(|(name, out)| (name, fetched(backend, out))).chain(others).collect()
    }
}

/// Rows with every adapter and without any, some adapters with more rows than a tile has.
fn mixed(rng: &mut Rng) -> Step {
    let adapters = (0..27).map(|i| [None, Some(0), Some(1), Some(0), Some(2), Some(3), Some(4), Some(0)][i * 5 % 8]).collect();
    Step::random(adapters, rng)
}

#[test]
fn phases_agree_with_the_plain_backend() {
    let mut rng = Rng::new(1);
    let steps = [mixed(&mut rng), Step::random(vec![Some(2)], &mut rng), Step::random(vec![None, Some(3), Some(3)], &mut rng)];
    let expected = steps.each_ref().map(|step| Setup::new(Arc::new(ReferenceBackend::new())).run(step));
    for order in [Order::Ascending, Order::Descending] {
        let setup = Setup::new(gpu(order));
        for (step, expected) in steps.iter().zip(&expected) {
            for ((name, actual), (_, expected)) in setup.run(step).iter().zip(expected) {
                assert_close(actual, expected, [2e-3, 1e-4], &format!("{name} of {} rows, {order:?}", step.adapters.len()));
            }
        }
    }
}

#[test]
fn a_row_has_the_bits_that_it_has_alone_and_one_without_adapter_those_of_a_step_without_any() {
    let step = mixed(&mut Rng::new(2));
    let setup = Setup::new(gpu(Order::Ascending));
    let together = setup.run(&step);
    let without = setup.run(&Step { adapters: vec![None; step.adapters.len()], ..step.clone() });
    let some = |adapter| step.adapters.iter().position(|other| *other == adapter);
    let firsts = (0..KINDS.len()).map(Some).chain([None]).filter_map(some);
    for row in firsts.chain([step.adapters.len() - 1]) {
        let alone = setup.run(&step.row(row));
        for (((name, alone), (_, together)), (_, without)) in alone.iter().zip(&together).zip(&without) {
            let cols = alone.len();
            let own = row * cols..(row + 1) * cols;
            assert!(*alone == together[own.clone()], "{name} of row {row}, adapter {:?}", step.adapters[row]);
            if step.adapters[row].is_none() {
                assert!(without[own.clone()] == together[own], "{name} of row {row} without an adapter");
            }
        }
    }
}

/// A GPU computes the experts of long prompts a part of the rows at a time.
#[test]
#[ignore = "a minute; make test-long"]
fn experts_of_more_rows_than_are_computed_at_once_have_the_adapters_of_their_rows() {
    let mut rng = Rng::new(4);
    let adapters = (0..1040).map(|i| [None, Some(0), Some(2), Some(1)][i / 3 % 4]).collect();
    let step = Step::random(adapters, &mut rng);
    let norm = Norm { kind: NormKind::Rms, weight: vec![0.7; COLS].into(), bias: None, eps: 1e-5 };
    let [expected, actual] = [Arc::new(ReferenceBackend::new()) as Arc<dyn Backend>, gpu(Order::Ascending)].map(|backend| {
        let setup = Setup::new(backend);
        let meta = setup.meta(&step);
        setup.backend.begin_step(&meta);
        setup.mix(&step, &meta, &norm)
    });
    assert_close(&actual, &expected, [2e-3, 1e-4], "1040 rows");
}

#[test]
fn adapters_change_no_table_beside_the_token_embedding() {
    let step = Step::random(vec![Some(0), Some(1), None], &mut Rng::new(5));
    let setup = Setup::new(gpu(Order::Ascending));
    let meta = setup.meta(&step);
    setup.backend.begin_step(&meta);
    let mut out = setup.backend.alloc(3, COLS).unwrap();
    let (table, token_ids) = (EmbeddingTable::Loaded(&setup.layers.head), &[3, VOCAB as u32, 7][..]);
    setup.backend.embed(&EmbedArgs { table, token_ids, beyond: Some(12), adapters: &[], scale: 1.0 }, &mut out);
    let mut rows = vec![0.0; VOCAB * COLS];
    setup.backend.read_rows(&setup.layers.head, 0, &mut rows).unwrap();
    let expected: Vec<f32> = [3, 12, 7].iter().flat_map(|id| rows[id * COLS..(id + 1) * COLS].to_vec()).collect();
    assert_eq!(fetched(&*setup.backend, out), expected);
}

#[test]
fn rows_of_a_weight_are_read_as_they_are_in_its_file() {
    let backend = gpu(Order::Ascending);
    let mut rng = Rng::new(3);
    for format in [DType::F32, DType::BF16, DType::Ggml(device::GgmlType::Q8_0), DType::Ggml(device::GgmlType::Q4K)] {
        let weight = kernel_tests::weight::Weight::random(format, 9, 256, &mut rng);
        let options = LinearOptions { name: "w".into(), precision: Precision::Fast, bias: None };
        let view = WeightView::new(format, 9, 256, Bytes::from_vec(weight.bytes.clone())).unwrap();
        let linear = backend.load_linear(&view, &options).unwrap();
        let mut rows = vec![0.0; 4 * 256];
        backend.read_rows(&linear, 5, &mut rows).unwrap();
        assert_close(&rows, &weight.values[5 * 256..], [1e-6, 1e-5], &format!("{format}"));
    }
}

#[test]
fn an_adapter_takes_the_memory_that_it_tells_and_gives_it_back() {
    // A card tells what is free a slab at a time, and of others' memory too.
    let backend: Arc<dyn Backend> = Arc::new(CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap());
    let layers = Layers::new(&*backend);
    let free = || backend.memory().unwrap().available_bytes;
    for kind in KINDS {
        let before = free();
        let adapter = adapter(&*backend, &layers, kind);
        assert_eq!(before - free(), adapter.bytes(), "{kind:?}");
        drop(adapter);
        assert_eq!(free(), before, "{kind:?}");
    }
}
