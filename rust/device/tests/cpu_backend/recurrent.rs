//! Recurrent layers: the fast backend against the plain one, and the same bits in any chunks, beside others and alone.

use device::{
    Backend, Conv, Device, GatedDelta, Linear, Mamba, Mamba2, Norm, NormKind, Precision, Recurrent, RecurrentArgs,
    RecurrentPhases, ShortConv, StateCache, StepMetadata, Tensor,
    cpu::{CpuBackend, ReferenceBackend},
};

use crate::common::{Rng, isas, load, weight};

const HIDDEN: usize = 48;
const LAYERS: usize = 2;

/// Weights in the order in which they are asked for.
struct Source {
    seed: u64,
    precision: Precision,
}

impl Source {
    fn linear(&self, rng: &mut Rng, backend: &dyn Device, rows: usize) -> Linear {
        load(backend, &weight(rng, rows, HIDDEN), self.precision)
    }

    fn load(&self, backend: &dyn Device, kind: usize) -> Recurrent {
        let rng = &mut Rng::new(self.seed);
        let conv = |rng: &mut Rng, num_channels: usize, kernel: usize, has_bias: bool| Conv {
            weight: rng.floats(kernel * num_channels).into(),
            bias: has_bias.then(|| rng.floats(num_channels).into()),
            num_channels,
        };
        let norm =
            |rng: &mut Rng, len: usize| Norm { kind: NormKind::Rms, weight: rng.floats(len).into(), bias: None, eps: 1e-5 };
        let rates = |rng: &mut Rng, len: usize| rng.floats(len).into_iter().map(|value| -value.exp()).collect::<Vec<_>>();
        match kind {
            0 => {
                let [b, c, x] = [(); 3].map(|()| self.linear(rng, backend, HIDDEN));
                Recurrent::ShortConv(ShortConv { b, c, x, conv: conv(rng, HIDDEN, 3, false) })
            }
            // Heads that no vector divides, and such as models have; groups, and one.
            1 | 2 => {
                let [num_heads, dim, num_groups, state_dim] = [[6, 10, 2, 7], [4, 64, 1, 32]][kind - 1];
                let (width, channels) = (num_heads * dim, num_heads * dim + 2 * num_groups * state_dim);
                Recurrent::Mamba2(Mamba2 {
                    z: self.linear(rng, backend, width),
                    xbc: self.linear(rng, backend, channels),
                    dt: self.linear(rng, backend, num_heads),
                    conv: conv(rng, channels, 4, kind == 1),
                    dt_bias: rng.floats(num_heads).into(),
                    a: rates(rng, num_heads).into(),
                    d: rng.floats(num_heads).into(),
                    norm: Some(norm(rng, width)),
                    gates_first: kind == 2,
                    scales: if kind == 1 { [0.6, 1.4] } else { [1.0; 2] },
                    num_heads,
                    num_groups,
                    state_dim,
                    dt_limits: [0.0, f32::INFINITY],
                })
            }
            6 | 7 => self.mamba(rng, backend, [[37, 5, 3], [130, 16, 8]][kind - 6], kind == 7),
            8 => self.gated_delta(rng, backend, [3, 3, 9, 8], true, Some([5, 7])),
            _ => {
                let sizes = [[2, 4, 16, 24], [3, 3, 9, 5], [2, 6, 8, 16]][kind - 3];
                self.gated_delta(rng, backend, sizes, kind != 5, None)
            }
        }
    }
}

impl Source {
    /// Of Kimi Delta Attention where there are ranks, of the gate and of the decays.
    fn gated_delta(
        &self,
        rng: &mut Rng,
        backend: &dyn Device,
        [num_key_heads, num_value_heads, key_dim, dim]: [usize; 4],
        is_grouped: bool,
        ranks: Option<[usize; 2]>,
    ) -> Recurrent {
        let (keys, values) = (num_key_heads * key_dim, num_value_heads * dim);
        let num_decays = if ranks.is_some() { keys } else { num_value_heads };
        let [of_z, of_dt] = ranks.unwrap_or([HIDDEN; 2]);
        let mut linear = |rows, cols| load(backend, &weight(rng, rows, cols), self.precision);
        let [q, k, v] = [keys, keys, values].map(|rows| linear(rows, HIDDEN));
        let (z, b, dt) = (linear(values, of_z), linear(num_value_heads, HIDDEN), linear(num_decays, of_dt));
        let down = ranks.map(|ranks| ranks.map(|rank| linear(rank, HIDDEN)));
        let convs = [keys, keys, values].map(|num_channels| Conv {
            weight: rng.floats(4 * num_channels).into(),
            bias: None,
            num_channels,
        });
        Recurrent::GatedDelta(GatedDelta {
            q,
            k,
            v,
            z,
            b,
            dt,
            down,
            convs,
            dt_bias: rng.floats(num_decays).into(),
            a: rng.floats(num_value_heads).into_iter().map(|value| -value.exp()).collect::<Vec<_>>().into(),
            beta_scale: if num_key_heads == num_value_heads { 2.0 } else { 1.0 },
            norm: Norm { kind: NormKind::Rms, weight: rng.floats(dim).into(), bias: None, eps: 1e-5 },
            num_key_heads,
            num_value_heads,
            is_grouped,
        })
    }

    /// Of so many channels, rows of a state, and columns that steps are made of.
    fn mamba(&self, rng: &mut Rng, backend: &dyn Device, [width, state_dim, rank]: [usize; 3], has_norms: bool) -> Recurrent {
        let mut linear = |rows, cols| load(backend, &weight(rng, rows, cols), self.precision);
        let [x, z] = [(); 2].map(|()| linear(width, HIDDEN));
        let [dt_down, b, c] = [rank, state_dim, state_dim].map(|rows| linear(rows, width));
        let dt = linear(width, rank);
        let norm = |len: usize| Norm { kind: NormKind::Rms, weight: rng.floats(len).into(), bias: None, eps: 1e-5 };
        let norms = has_norms.then(|| [rank, state_dim, state_dim].map(norm));
        let conv = Conv { weight: rng.floats(4 * width).into(), bias: Some(rng.floats(width).into()), num_channels: width };
        let a = rng.floats(state_dim * width).into_iter().map(|value| -value.exp()).collect::<Vec<_>>().into();
        Recurrent::Mamba(Mamba { x, z, conv, dt_down, b, c, norms, dt, a, d: rng.floats(width).into() })
    }
}

const KINDS: usize = 9;

/// The rows of a request, as they were given and as they came out.
#[derive(Clone)]
struct Request {
    rows: Vec<Vec<f32>>,
    out: Vec<f32>,
    done: usize,
    slot: u32,
}

impl Request {
    fn new(seed: u64, num_rows: usize, slot: u32) -> Self {
        let mut rng = Rng::new(seed);
        Self { rows: (0..num_rows).map(|_| rng.floats(HIDDEN)).collect(), out: Vec::new(), done: 0, slot }
    }
}

/// Computes the next rows of some requests.
fn step(phases: &dyn RecurrentPhases, weights: &Recurrent, states: &StateCache, work: &mut [(&mut Request, usize)]) {
    let (mut step, mut rows) = (StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() }, Vec::new());
    for (request, count) in work.iter() {
        rows.extend(request.rows[request.done..request.done + count].concat());
        step.positions.extend((request.done..request.done + count).map(|position| position as u32));
        step.query_start_loc.push(step.positions.len() as u32);
        step.seq_lens.push((request.done + count) as u32);
        step.state_slots.push(request.slot);
    }
    let num_rows = step.positions.len();
    let mut hidden = Tensor::new(num_rows, HIDDEN).unwrap();
    hidden.set_rows(num_rows);
    hidden.as_mut_slice().copy_from_slice(&rows);
    let mut out = Tensor::new(num_rows, weights.width()).unwrap();
    phases.recurrent(RecurrentArgs { hidden: &hidden, norm: None, weights, states, layer: 1, out: &mut out }, &step);
    let mut first = 0;
    for (request, count) in work {
        request.out.extend_from_slice(&out.as_slice()[first * weights.width()..(first + *count) * weights.width()]);
        (request.done, first) = (request.done + *count, first + *count);
    }
}

/// One request, in such chunks.
fn alone(backend: &dyn Backend, weights: &Recurrent, mut request: Request, chunks: &[usize]) -> Vec<f32> {
    let states = StateCache::new(4, &[3, weights.state_len()][..LAYERS]).unwrap();
    for chunk in chunks {
        step(backend.recurrent_phases().unwrap(), weights, &states, &mut [(&mut request, *chunk)]);
    }
    request.out
}

#[test]
fn recurrent_layers_agree_with_the_plain_backend_and_have_the_same_bits_in_any_chunks() {
    for (kind, precision) in (0..KINDS).flat_map(|kind| [Precision::Exact, Precision::Deterministic].map(|it| (kind, it))) {
        let source = Source { seed: kind as u64, precision };
        let request = Request::new(9, 60, 2);
        let reference = ReferenceBackend::new();
        let expected = alone(&reference, &source.load(&reference, kind), request.clone(), &[7, 53]);
        for backend in isas().flat_map(|isa| [1, 3].map(|threads| CpuBackend::new(isa, threads).unwrap())) {
            let what = format!("{:?}, kind {kind}, {precision:?}", backend.info());
            let weights = source.load(&backend, kind);
            let whole = alone(&backend, &weights, request.clone(), &[60]);
            for (i, (got, want)) in whole.iter().zip(&expected).enumerate() {
                assert!((got - want).abs() <= 1e-3 * (1.0 + want.abs()), "{what}: element {i} is {got}, not {want}");
            }
            for chunks in [&[2, 1, 20, 37][..], &[1; 60]] {
                assert!(
                    alone(&backend, &weights, request.clone(), chunks) == whole,
                    "{what}: other bits in chunks of {chunks:?}"
                );
            }
        }
    }
}

#[test]
fn requests_do_not_see_each_other_and_a_copied_state_goes_on_where_its_source_was() {
    let backend = CpuBackend::new(isas().last().unwrap(), 2).unwrap();
    let phases = backend.recurrent_phases().unwrap();
    for kind in 0..KINDS {
        let weights = Source { seed: 3, precision: Precision::Exact }.load(&backend, kind);
        let states = StateCache::new(4, &[3, weights.state_len()]).unwrap();
        let mut requests: Vec<_> =
            [(1, 20), (2, 33), (3, 9)].map(|(seed, rows)| Request::new(seed, rows, 3 - seed as u32)).into();
        let expected: Vec<_> =
            requests.iter().map(|request| alone(&backend, &weights, request.clone(), &[request.rows.len()])).collect();
        let [a, b, c] = &mut requests[..] else { unreachable!() };
        step(phases, &weights, &states, &mut [(a, 5), (b, 30)]);
        step(phases, &weights, &states, &mut [(c, 4), (a, 1)]);
        // From another slot from now on.
        let mut fork = Request { slot: 3, ..c.clone() };
        states.copy(c.slot as usize, 3).unwrap();
        step(phases, &weights, &states, &mut [(a, 14), (c, 5), (b, 3)]);
        step(phases, &weights, &states, &mut [(&mut fork, 5)]);
        for (request, expected) in requests.iter().zip(&expected) {
            assert!(&request.out == expected, "kind {kind}, the request in slot {}", request.slot);
        }
        assert!(fork.out == expected[2], "kind {kind}, the fork");
        // A slot serves another request from its first row on.
        let mut next = Request::new(7, 11, 0);
        step(phases, &weights, &states, &mut [(&mut next, 11)]);
        assert!(next.out == alone(&backend, &weights, Request::new(7, 11, 1), &[11]), "kind {kind}, the next in a slot");
    }
}
