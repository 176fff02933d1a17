//! Mixtures of experts: the fast backend against the plain one.

use device::{
    Activation, Backend, Device, Expert, ExpertActivation, ExpertArgs, ExpertPhases, Experts, LatentSpace, Norm, NormKind,
    PartNorms, Precision, RouterScore, RoutingRule, SharedExpert, StepMetadata, Tensor, WeightView,
    cpu::{CpuBackend, ReferenceBackend},
};

use crate::common::{Rng, isas, load, weight};

const HIDDEN: usize = 96;
const WIDTH: usize = 64;
const NUM_EXPERTS: usize = 6;

/// The shapes of a network: its width, and how many of them there are.
struct Weights {
    router: WeightView,
    shared_weight: WeightView,
    /// Gate, up, down of each, and of the shared one last.
    networks: Vec<[WeightView; 3]>,
    correction: Vec<f32>,
    scales: Vec<f32>,
    /// Of the parts that have norms of their own.
    norms: [Norm; 4],
    /// Into and out of the space that experts of their own work in.
    latent: [WeightView; 2],
}

fn norm(rng: &mut Rng) -> Norm {
    Norm { kind: NormKind::Rms, weight: rng.floats(HIDDEN).into(), bias: None, eps: 1e-5 }
}

impl Weights {
    fn new(rng: &mut Rng) -> Self {
        let network = |rng: &mut Rng| [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)].map(|(r, c)| weight(rng, r, c));
        Self {
            router: weight(rng, NUM_EXPERTS, HIDDEN),
            shared_weight: weight(rng, 1, HIDDEN),
            networks: (0..=NUM_EXPERTS).map(|_| network(rng)).collect(),
            correction: rng.floats(NUM_EXPERTS),
            scales: rng.floats(NUM_EXPERTS),
            norms: std::array::from_fn(|_| norm(rng)),
            latent: std::array::from_fn(|_| weight(rng, HIDDEN, HIDDEN)),
        }
    }

    fn load(&self, backend: &dyn Device, rule: RoutingRule, variant: usize) -> Experts {
        let load = |weight: &WeightView| load(backend, weight, Precision::Exact);
        let network = |[gate, up, down]: &[WeightView; 3]| Expert {
            gate: (variant != 5).then(|| load(gate)),
            up: load(up),
            down: load(down),
        };
        let weight = (variant == 1).then(|| load(&self.shared_weight));
        Experts {
            router: load(&self.router),
            correction: (variant == 2).then(|| self.correction.clone().into()),
            rule,
            experts: self.networks[..NUM_EXPERTS].iter().map(network).collect(),
            activation: match variant {
                0 => ExpertActivation::Clamped { alpha: 1.702, limit: 0.5 },
                5 => ExpertActivation::Plain(Activation::Relu2),
                _ => ExpertActivation::Gated(Activation::Silu),
            },
            scales_input: variant == 3,
            shared: (variant > 0).then(|| SharedExpert { expert: network(&self.networks[NUM_EXPERTS]), weight }),
            scales: (variant == 4).then(|| self.scales.clone().into()),
            norms: (variant == 4).then(|| {
                let [router, sum, shared, shared_sum] = self.norms.clone();
                PartNorms { router, sum, shared, shared_sum }
            }),
            latent: (variant == 5).then(|| LatentSpace { down: load(&self.latent[0]), up: load(&self.latent[1]) }),
        }
    }
}

fn run(backend: &dyn ExpertPhases, experts: &Experts, norms: [Option<&Norm>; 2], rows: &[Vec<f32>]) -> Vec<f32> {
    let mut hidden = Tensor::new(rows.len(), HIDDEN).unwrap();
    hidden.set_rows(rows.len());
    hidden.as_mut_slice().copy_from_slice(&rows.concat());
    let [norm, post_norm] = norms;
    let args = ExpertArgs { hidden: &mut hidden, norm, experts, post_norm, scale: 0.7 };
    backend.experts(args, &StepMetadata::default());
    hidden.as_slice().to_vec()
}

const RULES: [RoutingRule; 6] = [
    RoutingRule { num_chosen: 2, score: RouterScore::SoftmaxOfChosen, groups: None, normalize: None, scale: 1.0 },
    RoutingRule { num_chosen: 3, score: RouterScore::Softmax, groups: None, normalize: Some(0.0), scale: 1.0 },
    RoutingRule { num_chosen: 2, score: RouterScore::Sigmoid, groups: None, normalize: Some(1e-20), scale: 2.5 },
    RoutingRule { num_chosen: 1, score: RouterScore::Sigmoid, groups: None, normalize: None, scale: 1.0 },
    RoutingRule { num_chosen: 3, score: RouterScore::Softmax, groups: None, normalize: Some(0.0), scale: 1.0 },
    RoutingRule { num_chosen: 2, score: RouterScore::Sigmoid, groups: None, normalize: Some(1e-20), scale: 2.5 },
];

#[test]
fn experts_agree_with_the_plain_backend_and_a_row_has_the_bits_that_it_has_alone() {
    let mut rng = Rng::new(5);
    let weights = Weights::new(&mut rng);
    let (norm, post_norm) = (norm(&mut rng), norm(&mut rng));
    // More rows of all experts than are computed together.
    let rows: Vec<_> = (0..140).map(|_| rng.floats(HIDDEN)).collect();
    for (variant, rule) in RULES.into_iter().enumerate() {
        for norms in [[Some(&norm), None], [None, Some(&post_norm)]] {
            let reference = ReferenceBackend::new();
            let expected = run(&reference, &weights.load(&reference, rule, variant), norms, &rows);
            for backend in isas().flat_map(|isa| [1, 3].map(|threads| CpuBackend::new(isa, threads).unwrap())) {
                let what = format!("{:?}, {rule:?}", backend.info());
                let (phases, experts) = (backend.expert_phases().unwrap(), weights.load(&backend, rule, variant));
                let all = run(phases, &experts, norms, &rows);
                for (i, (got, want)) in all.iter().zip(&expected).enumerate() {
                    assert!((got - want).abs() <= 2e-4 * (1.0 + want.abs()), "{what}: element {i} is {got}, not {want}");
                }
                for (row, all) in rows.iter().zip(all.chunks_exact(HIDDEN)).step_by(9) {
                    assert_eq!(run(phases, &experts, norms, std::slice::from_ref(row)), all, "{what}: other bits alone");
                }
            }
        }
    }
}
