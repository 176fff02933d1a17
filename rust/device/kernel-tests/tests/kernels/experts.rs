//! Mixtures of experts: the router's choice, products of groups of rows, and the phase against the plain backend.

use device::{
    Activation, Backend, DType, Expert, ExpertActivation, ExpertArgs, ExpertGroups, Experts, GgmlType, LatentSpace, Linear,
    LinearOptions, Norm, NormKind, PartNorms, Precision, RouterScore, RoutingRule, SharedExpert, StepMetadata, WeightView,
    cpu::ReferenceBackend,
    cuda::{CudaBackend, packed::PackedFormat},
    kernel_args::{GroupTile, GroupedArgs, GroupedTarget, MAX_TARGETS, RouteArgs, RouterScoreKind},
    mmap::Bytes,
};
use half::{bf16, f16};
use kernel_tests::{
    Buffer, Kernel, Order, assert_close, driver,
    random::Rng,
    tensors::{fetched, tensor},
    weight::{Weight, kernel_suffix},
};

const RULE: RoutingRule = RoutingRule { num_chosen: 3, score: RouterScore::Softmax, groups: None, normalize: None, scale: 1.0 };

/// Rules of published models, with experts to choose from.
fn rules() -> Vec<(RoutingRule, usize)> {
    let groups = |by_two_best| Some(ExpertGroups { num_groups: 4, num_chosen: 2, by_two_best });
    vec![
        (RULE, 5),
        (RoutingRule { num_chosen: 8, normalize: Some(0.0), ..RULE }, 128),
        (RoutingRule { num_chosen: 4, score: RouterScore::SoftmaxOfChosen, ..RULE }, 32),
        (RoutingRule { num_chosen: 2, score: RouterScore::SoftmaxOfChosen, normalize: Some(0.5), scale: 1.5, ..RULE }, 40),
        (RoutingRule { num_chosen: 6, score: RouterScore::SigmoidOfChosen, normalize: Some(0.0), ..RULE }, 384),
        (RoutingRule { num_chosen: 6, groups: groups(false), scale: 16.0, ..RULE }, 160),
        (
            RoutingRule { num_chosen: 8, score: RouterScore::Sigmoid, groups: groups(true), normalize: Some(1e-20), scale: 2.5 },
            256,
        ),
        (RoutingRule { num_chosen: 10, normalize: Some(0.0), ..RULE }, 512),
        (RoutingRule { num_chosen: 1, score: RouterScore::Sigmoid, ..RULE }, 16),
        (RoutingRule { num_chosen: 2, score: RouterScore::Sparsemixer { jitter: 0.01 }, ..RULE }, 16),
        (RoutingRule { num_chosen: 1000, ..RULE }, 1000),
    ]
}

/// What `route` gives: experts and weights of each row, tiles, and the rows and places that these name.
struct Routed {
    chosen: Vec<u32>,
    weights: Vec<f32>,
    tiles: Vec<GroupTile>,
    rows: Vec<u32>,
    places: Vec<u32>,
}

fn route(rule: RoutingRule, logits: &[f32], num_experts: usize, correction: Option<&[f32]>, tile_rows: usize) -> Routed {
    let (num_rows, num_chosen) = (logits.len() / num_experts, rule.num_chosen);
    let entries = num_rows * num_chosen;
    let num_tiles = entries.min(num_experts + entries / tile_rows) + 2;
    let (score, jitter) = match rule.score {
        RouterScore::Softmax => (RouterScoreKind::Softmax, 0.0),
        RouterScore::SoftmaxOfChosen => (RouterScoreKind::SoftmaxOfChosen, 0.0),
        RouterScore::SigmoidOfChosen => (RouterScoreKind::SigmoidOfChosen, 0.0),
        RouterScore::Sigmoid => (RouterScoreKind::Sigmoid, 0.0),
        RouterScore::Sparsemixer { jitter } => (RouterScoreKind::Sparsemixer, jitter),
    };
    let logits = Buffer::input(logits);
    let correction = correction.map(Buffer::input);
    let chosen = Buffer::output::<u32>(entries);
    let (weights, tiles) = (Buffer::output::<f32>(entries), Buffer::output::<u32>(num_tiles * 4));
    let (rows, places) = (Buffer::output::<u32>(entries), Buffer::output::<u32>(entries));
    let arrivals = Buffer::inout(&[0u32]);
    let args = RouteArgs {
        logits: logits.ptr(),
        correction: correction.as_ref().map_or(0, Buffer::ptr),
        scales: 0,
        chosen: chosen.ptr(),
        weights: weights.ptr(),
        tiles: tiles.ptr(),
        rows: rows.ptr(),
        places: places.ptr(),
        arrivals: arrivals.ptr(),
        num_rows: num_rows as u32,
        num_experts: num_experts as u32,
        num_chosen: num_chosen as u32,
        num_tiles: num_tiles as u32,
        tile_rows: tile_rows as u32,
        score: score as u32,
        jitter,
        num_groups: rule.groups.map_or(0, |groups| groups.num_groups as u32),
        num_chosen_groups: rule.groups.map_or(0, |groups| groups.num_chosen as u32),
        by_two_best: u32::from(rule.groups.is_some_and(|groups| groups.by_two_best)),
        normalizes: u32::from(rule.normalize.is_some()),
        normalize_eps: rule.normalize.unwrap_or(0.0),
        scale: rule.scale,
        reserved: 0,
    };
    Kernel::named("route").launch([num_rows.div_ceil(8), 1, 1], &args, Order::Descending);
    assert_eq!(arrivals.values::<u32>(), [0], "arrivals are forgotten");
    let tile = |words: &[u32]| GroupTile { group: words[0], first_row: words[1], num_rows: words[2], reserved: words[3] };
    Routed {
        chosen: chosen.values(),
        weights: weights.values(),
        tiles: tiles.values::<u32>().chunks_exact(4).map(tile).collect(),
        rows: rows.values(),
        places: places.values(),
    }
}

#[test]
fn rows_choose_the_experts_that_the_rule_says() {
    let mut rng = Rng::new(1);
    for (rule, num_experts) in rules() {
        for has_correction in [false, true] {
            let logits: Vec<f32> = rng.floats(19 * num_experts).iter().map(|x| x * 4.0).collect();
            let correction =
                (has_correction && !matches!(rule.score, RouterScore::Sparsemixer { .. })).then(|| rng.floats(num_experts));
            let routed = route(rule, &logits, num_experts, correction.as_deref(), 8);
            let (chosen, weights) = (routed.chosen.chunks_exact(rule.num_chosen), routed.weights.chunks_exact(rule.num_chosen));
            for ((logits, chosen), weights) in logits.chunks_exact(num_experts).zip(chosen).zip(weights) {
                let mut want = vec![(0, 0.0); rule.num_chosen];
                rule.choose(logits, correction.as_deref(), &mut want);
                let (experts, values): (Vec<_>, Vec<_>) =
                    want.into_iter().map(|(expert, weight)| (expert as u32, weight)).unzip();
                assert_eq!(chosen, experts, "{rule:?}");
                assert_close(weights, &values, [1e-6, 1e-5], &format!("{rule:?}"));
            }
        }
    }
}

#[test]
fn of_equal_experts_the_first_are_chosen_and_none_twice_whatever_the_logits_are() {
    for bad in [0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for score in [
            RouterScore::Softmax,
            RouterScore::Sigmoid,
            RouterScore::SoftmaxOfChosen,
            RouterScore::SigmoidOfChosen,
            RouterScore::Sparsemixer { jitter: 0.1 },
        ] {
            let rule = RoutingRule { num_chosen: 40, score, ..RULE };
            let mut chosen = route(rule, &[bad; 40], 40, None, 8).chosen;
            if bad == 0.0 {
                assert!(chosen.iter().enumerate().all(|(i, expert)| i as u32 == *expert), "{score:?}");
            }
            chosen.sort_unstable();
            assert_eq!(chosen, (0..40).collect::<Vec<_>>(), "{score:?} of {bad}");
        }
    }
}

#[test]
fn tiles_have_every_choice_once() {
    let mut rng = Rng::new(2);
    for (num_rows, num_experts, num_chosen, tile_rows) in [(1, 4, 2, 8), (3, 128, 8, 8), (100, 8, 2, 8), (257, 40, 6, 32)] {
        let rule = RoutingRule { num_chosen, ..RULE };
        let routed = route(rule, &rng.floats(num_rows * num_experts), num_experts, None, tile_rows);
        let mut seen = vec![0; num_rows * num_chosen];
        let mut is_over = false;
        for tile in &routed.tiles {
            is_over |= tile.num_rows == 0;
            assert!((tile.num_rows == 0) == is_over && tile.num_rows as usize <= tile_rows);
            for at in tile.first_row..tile.first_row + tile.num_rows {
                let (row, place) = (routed.rows[at as usize] as usize, routed.places[at as usize] as usize);
                assert_eq!((row, routed.chosen[place]), (place / num_chosen, tile.group));
                seen[place] += 1;
            }
        }
        assert!(is_over && seen.iter().all(|times| *times == 1), "{num_rows} rows, {num_chosen} of {num_experts} experts");
    }
}

/// A product of groups: kernels by name, and what they read.
struct Grouped {
    weights: Vec<Weight>,
    /// As kernels take them.
    bytes: Vec<Vec<u8>>,
    w_stride: u64,
    /// The kernels' names without the rows.
    family: String,
    /// Features of a CTA.
    features: usize,
    /// What x is rounded to.
    round: fn(f32) -> f32,
}

impl Grouped {
    fn random(format: DType, precision: Precision, shape: [usize; 2], num_groups: usize, rng: &mut Rng) -> Self {
        let [features, cols] = shape;
        let weights: Vec<_> = (0..num_groups).map(|_| Weight::random(format, features, cols, rng)).collect();
        let suffix = kernel_suffix(format);
        let plain = || weights.iter().map(|weight| weight.bytes.clone()).collect();
        if let Some(packed) = PackedFormat::of(format, precision) {
            let pack = |weight: &Weight| {
                packed.pack(&WeightView::new(format, features, cols, Bytes::from_vec(weight.bytes.clone())).unwrap(), 1)
            };
            let bytes = weights.iter().map(pack).collect();
            let (w_stride, family) = (packed.panel_bytes(cols) as u64, format!("grouped_gemm_{suffix}"));
            return Self { bytes, w_stride, family, features: 64, round: |x| bf16::from_f32(x).to_f32(), weights };
        }
        let w_stride = weights[0].row_bytes();
        let round: fn(f32) -> f32 = match format {
            _ if precision == Precision::Exact => |x| x,
            DType::BF16 => |x| bf16::from_f32(x).to_f32(),
            DType::F16 => |x| f16::from_f32(x).to_f32(),
            _ => |x| x,
        };
        let is_gemm = precision != Precision::Exact && matches!(format, DType::BF16 | DType::F16);
        let (family, features) = if is_gemm { ("grouped_gemm", 64) } else { ("grouped_gemv", 4) };
        Self { bytes: plain(), w_stride, family: format!("{family}_{suffix}"), features, round, weights }
    }

    fn cols(&self) -> usize {
        self.weights[0].cols
    }

    fn rows(&self) -> usize {
        self.weights[0].rows
    }

    /// `rows` of x, `[_, cols]`, as the kernels for `capacity` rows read them.
    fn input(&self, x: &[f32], capacity: usize) -> Buffer {
        if capacity == 8 {
            return Buffer::input(x);
        }
        let is_f16 = self.weights[0].format == DType::F16;
        let bits = |x: &f32| if is_f16 { f16::from_f32(*x).to_bits() } else { bf16::from_f32(*x).to_bits() };
        Buffer::input(&x.iter().map(bits).collect::<Vec<u16>>())
    }

    /// Runs the kernel on `num_tiles` tiles; `fill` completes the arguments. What two targets give, the second with a bias.
    fn run(&self, capacity: usize, x: &Buffer, args: GroupedArgs, num_tiles: usize, outs: [&Buffer; 2], biases: &[Vec<f32>]) {
        let weights: Vec<_> = self.bytes.iter().map(|bytes| Buffer::input(bytes)).collect();
        let biases: Vec<_> = biases.iter().map(|bias| Buffer::input(bias)).collect();
        let pointers = |of: &[Buffer]| Buffer::input(&of.iter().map(Buffer::ptr).collect::<Vec<u64>>());
        let (w, bias) = (pointers(&weights), pointers(&biases));
        let ctas = self.rows().div_ceil(if capacity == 64 { 128 } else { self.features });
        let mut targets = [GroupedTarget::default(); MAX_TARGETS];
        for (i, (target, out)) in targets.iter_mut().zip(outs).enumerate() {
            *target = GroupedTarget {
                w: w.ptr(),
                bias: if i == 1 { bias.ptr() } else { 0 },
                out: out.ptr(),
                first_cta: (i * ctas) as u32,
                out_features: self.rows() as u32,
                out_stride: if args.tiles == 0 { (self.rows() * self.weights.len()) as u32 } else { self.rows() as u32 },
                reserved: 0,
            };
        }
        let args = GroupedArgs { x: x.ptr(), targets, w_stride: self.w_stride, in_features: self.cols() as u32, ..args };
        Kernel::named(&format!("{}_r{capacity}", self.family)).launch([2 * ctas, num_tiles, 1], &args, Order::Ascending);
    }

    /// A row's product with a group's weight, by the kernels for `capacity` rows.
    fn expected(&self, capacity: usize, group: usize, x: &[f32]) -> Vec<f32> {
        // The largest tiles are of rounded weights.
        let weight = |w: f32| if capacity == 64 { (self.round)(w) } else { w };
        let dot =
            |w: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(weight(*w)) * f64::from((self.round)(*x))).sum::<f64>() as f32;
        self.weights[group].values.chunks_exact(self.cols()).map(dot).collect()
    }

    fn capacities(&self) -> &'static [usize] {
        let is_packed = self.w_stride != self.weights[0].row_bytes();
        if is_packed {
            &[8, 32, 64]
        } else if self.family.starts_with("grouped_gemm") {
            &[8, 32]
        } else {
            &[8]
        }
    }
}

/// Every kernel of `grouped_*` once.
fn kinds() -> impl Iterator<Item = (DType, Precision)> {
    let exact = DType::all().map(|format| (format, Precision::Exact));
    let is_gemm =
        |format: &DType| PackedFormat::of(*format, Precision::Fast).is_some() || matches!(format, DType::BF16 | DType::F16);
    exact.chain(DType::all().filter(is_gemm).map(|format| (format, Precision::Fast)))
}

#[test]
fn rows_are_multiplied_with_the_weight_of_their_group() {
    let mut rng = Rng::new(3);
    for (format, precision) in kinds() {
        let cols = if matches!(format, DType::Ggml(_)) { 512 } else { 264 };
        let grouped = Grouped::random(format, precision, [70, cols], 3, &mut rng);
        let biases: Vec<_> = (0..3).map(|_| rng.floats(70)).collect();
        // Two rows have two groups each, one has none.
        let (x, x_rows, places) = (rng.floats(5 * cols), [4_u32, 0, 2, 0, 4], [3_u32, 0, 2, 4, 1]);
        let groups = [2, 2, 2, 0, 0];
        let tile = |group, first_row, num_rows| [group, first_row, num_rows, 0];
        let tiles = [tile(2, 0, 3), tile(0, 3, 2), tile(0, 0, 0)].concat();
        let lists = [tiles, x_rows.to_vec(), places.to_vec()].map(|list| Buffer::input(&list));
        let mut all = Vec::new();
        for &capacity in grouped.capacities() {
            let outs = [(); 2].map(|()| Buffer::output::<f32>(5 * 70));
            let [tiles, x_rows, out_rows] = lists.each_ref().map(Buffer::ptr);
            let args = GroupedArgs { tiles, x_rows, out_rows, x_stride: cols as u32, ..GroupedArgs::default() };
            grouped.run(capacity, &grouped.input(&x, capacity), args, 3, outs.each_ref(), &biases);
            all.push((capacity, outs.map(|out| out.values::<f32>())));
        }
        let few: Vec<_> = all.iter().filter(|(capacity, _)| *capacity < 64).collect();
        assert!(few.iter().all(|(_, outs)| *outs == all[0].1), "{format}: a row has other bits in larger tiles");
        for ((capacity, outs), (i, group)) in all.iter().flat_map(|outs| groups.into_iter().enumerate().map(move |i| (outs, i))) {
            let expected = grouped.expected(*capacity, group, &x[x_rows[i] as usize * cols..][..cols]);
            let with_bias: Vec<_> = expected.iter().zip(&biases[group]).map(|(x, bias)| x + bias).collect();
            for (out, expected) in outs.iter().zip([expected, with_bias]) {
                let out = &out[places[i] as usize * 70..][..70];
                assert_close(out, &expected, [5e-4, 1e-4], &format!("{format} {precision:?}, {capacity} rows, entry {i}"));
            }
        }
    }
}

#[test]
fn groups_that_have_all_rows_read_and_write_columns_of_their_own() {
    let mut rng = Rng::new(4);
    let formats =
        [(DType::F32, Precision::Exact), (DType::BF16, Precision::Fast), (DType::Ggml(GgmlType::Q8_0), Precision::Fast)];
    for ((format, precision), rows) in formats.into_iter().flat_map(|format| [1, 7, 45].map(|rows| (format, rows))) {
        let (cols, num_groups) = (64, 3);
        let grouped = Grouped::random(format, precision, [20, cols], num_groups, &mut rng);
        let biases = vec![vec![0.0; 20]; num_groups];
        // Eight columns between groups that none reads.
        let stride = cols + 8;
        let x = rng.floats(rows * num_groups * stride);
        for &capacity in grouped.capacities() {
            let outs = [(); 2].map(|()| Buffer::output::<f32>(rows * num_groups * 20));
            let args = GroupedArgs {
                num_rows: rows as u32,
                num_groups: num_groups as u32,
                x_stride: (num_groups * stride) as u32,
                x_group_stride: stride as u32,
                out_group_stride: 20,
                ..GroupedArgs::default()
            };
            let tiles = num_groups * rows.div_ceil(capacity);
            grouped.run(capacity, &grouped.input(&x, capacity), args, tiles, outs.each_ref(), &biases);
            let out = outs[0].values::<f32>();
            for (row, group) in (0..rows).flat_map(|row| (0..num_groups).map(move |group| (row, group))) {
                let x = &x[(row * num_groups + group) * stride..][..cols];
                let out = &out[(row * num_groups + group) * 20..][..20];
                assert_close(
                    out,
                    &grouped.expected(capacity, group, x),
                    [5e-4, 1e-4],
                    &format!("{format}, row {row}, group {group}"),
                );
            }
        }
    }
}

const HIDDEN: usize = 256;
const WIDTH: usize = 256;
const NUM_EXPERTS: usize = 6;

/// The weights of a layer.
struct Layer {
    router: WeightView,
    shared_weight: WeightView,
    /// Gate, up, down of each, and of the shared one last.
    networks: Vec<[WeightView; 3]>,
    correction: Vec<f32>,
    bias: Vec<f32>,
}

fn view(weight: Weight) -> WeightView {
    WeightView::new(weight.format, weight.rows, weight.cols, Bytes::from_vec(weight.bytes)).unwrap()
}

impl Layer {
    /// Gate, up and down are stored as `formats` say.
    fn random(formats: [DType; 3], rng: &mut Rng) -> Self {
        let shapes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)];
        let network = |rng: &mut Rng| [0, 1, 2].map(|i| view(Weight::random(formats[i], shapes[i].0, shapes[i].1, rng)));
        Self {
            router: view(Weight::random(DType::F32, NUM_EXPERTS, HIDDEN, rng)),
            shared_weight: view(Weight::random(DType::F32, 1, HIDDEN, rng)),
            networks: (0..=NUM_EXPERTS).map(|_| network(rng)).collect(),
            correction: rng.floats(NUM_EXPERTS),
            bias: rng.floats(WIDTH),
        }
    }

    fn load(&self, backend: &dyn Backend, rule: RoutingRule, variant: usize, precision: Precision) -> Experts {
        let load = |weight: &WeightView, precision, bias: Option<&[f32]>| -> Linear {
            let bias = bias.map(|bias| bias[..weight.rows].to_vec());
            backend.load_linear(weight, &LinearOptions { name: "w".into(), precision, bias }).unwrap()
        };
        let network = |[gate, up, down]: &[WeightView; 3], bias: Option<&[f32]>| Expert {
            gate: (variant != 5).then(|| load(gate, precision, bias)),
            up: load(up, precision, bias),
            down: load(down, precision, bias),
        };
        let biases = (variant == 0).then_some(&self.bias[..]);
        let weight = (variant == 1).then(|| load(&self.shared_weight, Precision::Exact, None));
        Experts {
            router: load(&self.router, Precision::Exact, None),
            correction: (variant == 2).then(|| self.correction.clone().into()),
            rule,
            experts: self.networks[..NUM_EXPERTS].iter().map(|it| network(it, biases)).collect(),
            activation: match variant {
                0 => ExpertActivation::Clamped { alpha: 1.702, limit: 0.5 },
                5 => ExpertActivation::Plain(Activation::Relu2),
                _ => ExpertActivation::Gated(Activation::Silu),
            },
            scales_input: variant == 3,
            shared: (variant > 0).then(|| SharedExpert { expert: network(&self.networks[NUM_EXPERTS], None), weight }),
            scales: (variant == 4).then(|| self.correction.clone().into()),
            norms: (variant == 4).then(|| {
                let mut rng = Rng::new(6);
                let mut norm = || norm(&mut rng);
                PartNorms { router: norm(), sum: norm(), shared: norm(), shared_sum: norm() }
            }),
            latent: (variant == 5).then(|| {
                let [down, up] = [0, 1].map(|i| load(&self.networks[i][0], precision, None));
                LatentSpace { down, up }
            }),
        }
    }
}

fn run(backend: &dyn Backend, experts: &Experts, norms: [Option<&Norm>; 2], rows: &[f32]) -> Vec<f32> {
    let mut hidden = tensor(backend, rows, HIDDEN);
    let [norm, post_norm] = norms;
    let args = ExpertArgs { hidden: &mut hidden, norm, experts, post_norm, scale: 0.7 };
    backend.expert_phases().unwrap().experts(args, &StepMetadata::default());
    fetched(backend, hidden)
}

const RULES: [RoutingRule; 6] = [
    RoutingRule { num_chosen: 2, score: RouterScore::SoftmaxOfChosen, ..RULE },
    RoutingRule { num_chosen: 3, normalize: Some(0.0), ..RULE },
    RoutingRule { num_chosen: 2, score: RouterScore::Sigmoid, normalize: Some(1e-20), scale: 2.5, ..RULE },
    RoutingRule { num_chosen: 1, score: RouterScore::Sigmoid, ..RULE },
    RoutingRule { num_chosen: 3, normalize: Some(0.0), ..RULE },
    RoutingRule { num_chosen: 2, score: RouterScore::Sigmoid, normalize: Some(1e-20), scale: 2.5, ..RULE },
];

fn norm(rng: &mut Rng) -> Norm {
    let weight: Vec<f32> = rng.floats(HIDDEN).iter().map(|x| x + 1.5).collect();
    Norm { kind: NormKind::Rms, weight: weight.into(), bias: None, eps: 1e-5 }
}

/// Experts agree with those of the plain backend, and a row has the bits that it has alone. `close`: in parts of the largest
/// value, as they are sums of large terms.
fn check_experts(formats: [DType; 3], precision: Precision, close: f32, variants: &[usize]) {
    let mut rng = Rng::new(5);
    let (norm, post_norm) = (norm(&mut rng), norm(&mut rng));
    let layer = Layer::random(formats, &mut rng);
    // With three experts a row, more than 8 rows an expert on average.
    let rows = rng.floats(17 * HIDDEN);
    for &variant in variants {
        let rule = RULES[variant];
        let norms = match variant {
            4 => [Some(&norm), Some(&post_norm)],
            0 | 2 => [Some(&norm), None],
            _ => [None, Some(&post_norm)],
        };
        let what = format!("{formats:?}, {rule:?}");
        let (reference, cuda) = (ReferenceBackend::new(), CudaBackend::new(driver(Order::Ascending)).unwrap());
        let expected = run(&reference, &layer.load(&reference, rule, variant, precision), norms, &rows);
        let experts = layer.load(&cuda, rule, variant, precision);
        let all = run(&cuda, &experts, norms, &rows);
        let largest = expected.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        assert_close(&all, &expected, [close * largest, 0.0], &what);
        for (row, all) in rows.chunks_exact(HIDDEN).zip(all.chunks_exact(HIDDEN)).step_by(9) {
            assert_eq!(run(&cuda, &experts, norms, row), all, "{what}: other bits alone");
        }
    }
}

#[test]
fn packed_experts_that_have_many_rows_agree_with_the_plain_backend() {
    let mut rng = Rng::new(6);
    let layer = Layer::random([DType::Ggml(GgmlType::Q4K), DType::Ggml(GgmlType::Q4K), DType::Ggml(GgmlType::Q6K)], &mut rng);
    // With three of six experts a row, 53 rows an expert on average.
    let rows = rng.floats(106 * HIDDEN);
    let (reference, cuda) = (ReferenceBackend::new(), CudaBackend::new(driver(Order::Ascending)).unwrap());
    let [expected, all] = [&reference as &dyn Backend, &cuda]
        .map(|backend| run(backend, &layer.load(backend, RULES[1], 1, Precision::Fast), [None, None], &rows));
    let largest = expected.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    assert_close(&all, &expected, [0.03 * largest, 0.0], "many rows");
}

#[test]
fn experts_in_f32_agree_with_the_plain_backend() {
    check_experts([DType::F32; 3], Precision::Exact, 1e-5, &[0, 1, 2, 3, 4, 5]);
}

#[test]
fn experts_in_bf16_agree_with_the_plain_backend() {
    check_experts([DType::BF16; 3], Precision::Fast, 0.03, &[1, 0]);
}

#[test]
fn packed_experts_agree_with_the_plain_backend() {
    check_experts([GgmlType::Q4K, GgmlType::Q4K, GgmlType::Q6K].map(DType::Ggml), Precision::Fast, 0.03, &[1, 2, 5]);
}

#[test]
fn experts_of_formats_that_differ_agree_with_the_plain_backend() {
    // Two of them have no kernels for many rows.
    check_experts([GgmlType::Q4K, GgmlType::Q3K, GgmlType::Q3K].map(DType::Ggml), Precision::Fast, 0.03, &[3]);
}
