//! Layers that keep a state a request: `CudaBackend` against the plain backend, the same bits in any chunks, beside others and
//! alone; and the convolution's kernel by itself.

use device::{
    Backend, Conv, DType, Device, EmbedArgs, EmbeddingTable, GateActivation, GatedDelta, Linear, LinearOptions, Mamba, Mamba2,
    Norm, NormKind, Phases, Precision, Recurrent, RecurrentArgs, RecurrentPhases, ShortConv, StateCache, StepGraphs,
    StepMetadata, StepRecorder, WeightView,
    cpu::ReferenceBackend,
    cuda::{CudaBackend, CudaOptions},
    kernel_args::{CausalConvArgs, ConvPart, NO_SLOT, RecurrentRequest},
    mmap::Bytes,
};
use kernel_tests::{
    Buffer, Kernel, Order, assert_close, driver,
    random::Rng,
    tensors::{fetched, tensor},
};

const HIDDEN: usize = 48;
const KINDS: usize = 14;
const CLOSE: [f32; 2] = [1e-3, 1e-3];

/// Loads weights in the order in which they are asked for.
struct Source<'a> {
    rng: Rng,
    backend: &'a dyn Backend,
}

impl Source<'_> {
    fn linear(&mut self, rows: usize) -> Linear {
        self.matrix([rows, HIDDEN], false)
    }

    fn matrix(&mut self, [rows, cols]: [usize; 2], has_bias: bool) -> Linear {
        let scale = (cols as f32).sqrt().recip();
        let bytes = self.rng.floats(rows * cols).into_iter().flat_map(|value| (value * scale).to_le_bytes()).collect();
        let weight = WeightView::new(DType::F32, rows, cols, Bytes::from_vec(bytes)).unwrap();
        let bias = has_bias.then(|| self.rng.floats(rows));
        let options = LinearOptions { name: "w".into(), precision: Precision::Exact, bias };
        self.backend.load_linear(&weight, &options).unwrap()
    }

    fn conv(&mut self, num_channels: usize, kernel: usize, has_bias: bool) -> Conv {
        let weight = self.rng.floats(kernel * num_channels).into();
        Conv { weight, bias: has_bias.then(|| self.rng.floats(num_channels).into()), num_channels }
    }

    fn norm(&mut self, len: usize) -> Norm {
        Norm { kind: NormKind::Rms, weight: self.rng.floats(len).into(), bias: None, eps: 1e-5 }
    }

    fn rates(&mut self, len: usize) -> Vec<f32> {
        self.rng.floats(len).into_iter().map(|value| -value.exp()).collect()
    }

    fn short_conv(&mut self, kernel: usize) -> Recurrent {
        let [b, c, x] = [HIDDEN; 3].map(|rows| self.linear(rows));
        Recurrent::ShortConv(ShortConv { b, c, x, conv: self.conv(HIDDEN, kernel, false) })
    }

    fn mamba(&mut self, [width, state_dim, rank]: [usize; 3], has_norms: bool) -> Recurrent {
        let [x, z] = [width; 2].map(|rows| self.linear(rows));
        let [dt_down, b, c] = [rank, state_dim, state_dim].map(|rows| self.matrix([rows, width], false));
        Recurrent::Mamba(Mamba {
            x,
            z,
            conv: self.conv(width, 4, !has_norms),
            dt_down,
            b,
            c,
            norms: has_norms.then(|| [rank, state_dim, state_dim].map(|len| self.norm(len))),
            dt: self.matrix([width, rank], true),
            a: self.rates(state_dim * width).into(),
            d: self.rng.floats(width).into(),
        })
    }

    fn mamba2(&mut self, [num_heads, dim, num_groups, state_dim]: [usize; 4], has_bias: bool) -> Recurrent {
        let (width, channels) = (num_heads * dim, num_heads * dim + 2 * num_groups * state_dim);
        Recurrent::Mamba2(Mamba2 {
            z: self.linear(width),
            xbc: self.linear(channels),
            dt: self.linear(num_heads),
            conv: self.conv(channels, 4, has_bias),
            dt_bias: self.rng.floats(num_heads).into(),
            a: self.rates(num_heads).into(),
            d: self.rng.floats(num_heads).into(),
            norm: (num_groups > 1 || dim != 33).then(|| self.norm(width)),
            gates_first: !has_bias,
            scales: if has_bias { [0.6, 1.4] } else { [1.0; 2] },
            num_heads,
            num_groups,
            state_dim,
            dt_limits: [0.1, 1.5],
        })
    }

    /// Of Kimi Delta Attention where there are ranks, of the gate and of the decays.
    fn gated_delta(
        &mut self,
        [num_key_heads, num_value_heads, key_dim, dim]: [usize; 4],
        is_grouped: bool,
        ranks: Option<[usize; 2]>,
    ) -> Recurrent {
        let (keys, values) = (num_key_heads * key_dim, num_value_heads * dim);
        let num_decays = if ranks.is_some() { keys } else { num_value_heads };
        let [q, k, v] = [keys, keys, values].map(|rows| self.linear(rows));
        let [z, dt] = [(values, 0), (num_decays, 1)].map(|(rows, i)| match ranks {
            None => self.linear(rows),
            Some(ranks) => self.matrix([rows, ranks[i]], false),
        });
        let b = self.linear(num_value_heads);
        let down = ranks.map(|ranks| ranks.map(|rank| self.linear(rank)));
        Recurrent::GatedDelta(GatedDelta {
            q,
            k,
            v,
            z,
            b,
            dt,
            down,
            convs: [keys, keys, values].map(|channels| self.conv(channels, 4, false)),
            dt_bias: self.rng.floats(num_decays).into(),
            a: self.rates(num_value_heads).into(),
            beta_scale: if num_key_heads == 1 { 2.0 } else { 1.0 },
            norm: self.norm(dim),
            num_key_heads,
            num_value_heads,
            is_grouped,
        })
    }
}

/// Heads that no warp divides, and such as models have; groups, and one; states for both kernels of each family.
fn load(backend: &dyn Backend, kind: usize) -> Recurrent {
    let mut source = Source { rng: Rng::new(kind as u64), backend };
    match kind {
        0 => source.short_conv(3),
        1 => source.short_conv(1),
        2 => source.mamba2([6, 10, 2, 7], true),
        3 => source.mamba2([1, 64, 1, 128], false),
        4 => source.mamba2([1, 33, 1, 130], false),
        5 => source.gated_delta([2, 4, 16, 24], true, None),
        6 => source.gated_delta([2, 4, 9, 33], false, None),
        7 => source.gated_delta([1, 1, 130, 33], true, None),
        8 => source.mamba([72, 16, 8], true),
        9 => source.mamba([40, 7, 16], false),
        10 => source.mamba([40, 40, 8], true),
        11 => source.mamba([40, 130, 8], true),
        12 => source.gated_delta([3, 3, 9, 33], true, Some([24, 8])),
        _ => source.gated_delta([1, 1, 130, 24], true, Some([16, 8])),
    }
}

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

/// Room for four requests, and a layer before that keeps something as well.
fn states(backend: &dyn Backend, weights: &Recurrent) -> StateCache {
    backend.alloc_states(4, &[3, weights.state_len()]).unwrap()
}

/// Computes the next rows of some requests.
fn step(backend: &dyn Backend, weights: &Recurrent, states: &StateCache, work: &mut [(&mut Request, usize)]) {
    let (mut step, mut rows) = (StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() }, Vec::new());
    for (request, count) in work.iter() {
        rows.extend(request.rows[request.done..request.done + count].concat());
        step.positions.extend((request.done..request.done + count).map(|position| position as u32));
        step.query_start_loc.push(step.positions.len() as u32);
        step.seq_lens.push((request.done + count) as u32);
        step.state_slots.push(request.slot);
    }
    step.rope_positions.clone_from(&step.positions);
    backend.begin_step(&step);
    let hidden = tensor(backend, &rows, HIDDEN);
    let mut out = backend.alloc(step.positions.len(), weights.width()).unwrap();
    let phases = backend.recurrent_phases().unwrap();
    phases.recurrent(RecurrentArgs { hidden: &hidden, norm: None, weights, states, layer: 1, out: &mut out }, &step);
    backend.fetch(&mut out);
    let mut first = 0;
    for (request, count) in work {
        request.out.extend_from_slice(&out.as_slice()[first * weights.width()..(first + *count) * weights.width()]);
        (request.done, first) = (request.done + *count, first + *count);
    }
}

/// One request, in such chunks.
fn alone(backend: &dyn Backend, weights: &Recurrent, mut request: Request, chunks: &[usize]) -> Vec<f32> {
    let states = states(backend, weights);
    for chunk in chunks {
        step(backend, weights, &states, &mut [(&mut request, *chunk)]);
    }
    request.out
}

#[test]
fn recurrent_layers_agree_with_the_plain_backend_and_have_the_same_bits_in_any_chunks() {
    for kind in 0..KINDS {
        let request = Request::new(9, 11, 2);
        let reference = ReferenceBackend::new();
        let expected = alone(&reference, &load(&reference, kind), request.clone(), &[4, 7]);
        for order in [Order::Ascending, Order::Descending] {
            let cuda = CudaBackend::new(driver(order)).unwrap();
            let weights = load(&cuda, kind);
            let whole = alone(&cuda, &weights, request.clone(), &[11]);
            assert_close(&whole, &expected, CLOSE, &format!("kind {kind}, {order:?}"));
            if order == Order::Ascending {
                let in_chunks = alone(&cuda, &weights, request.clone(), &[1, 1, 6, 3]);
                assert!(in_chunks == whole, "kind {kind}: chunks change bits");
            }
        }
    }
}

#[test]
fn requests_do_not_see_each_other_and_a_copied_state_goes_on_where_its_source_was() {
    let cuda = CudaBackend::new(driver(Order::Ascending)).unwrap();
    let backend: &dyn Backend = &cuda;
    for kind in [0, 2, 5, 8] {
        let weights = load(backend, kind);
        let states = states(backend, &weights);
        let mut requests: Vec<_> = [(1, 8), (2, 12), (3, 9)].map(|(seed, rows)| Request::new(seed, rows, 3 - seed as u32)).into();
        let expected: Vec<_> =
            requests.iter().map(|request| alone(backend, &weights, request.clone(), &[request.rows.len()])).collect();
        let [a, b, c] = &mut requests[..] else { unreachable!() };
        step(backend, &weights, &states, &mut [(a, 3), (b, 9)]);
        // What pads a step has no states, and changes none.
        let mut nobody = Request::new(5, 2, NO_SLOT);
        step(backend, &weights, &states, &mut [(c, 4), (&mut nobody, 2), (a, 1)]);
        // From another slot from now on.
        let mut fork = Request { slot: 3, ..c.clone() };
        states.copy(c.slot as usize, 3).unwrap();
        step(backend, &weights, &states, &mut [(a, 4), (c, 5), (b, 2)]);
        step(backend, &weights, &states, &mut [(&mut fork, 5), (b, 1)]);
        for (request, expected) in requests.iter().zip(&expected) {
            assert!(&request.out == expected, "kind {kind}, the request in slot {}", request.slot);
        }
        assert!(fork.out == expected[2], "kind {kind}, the fork");
        // A slot serves another request from its first row on.
        let mut next = Request::new(7, 5, 0);
        step(backend, &weights, &states, &mut [(&mut next, 5)]);
        assert!(next.out == alone(backend, &weights, Request::new(7, 5, 1), &[5]), "kind {kind}, the next in a slot");
    }
}

/// What requests in slots come to that decode from their first token on, `batches` of them in a step, each with so many rows;
/// replayed, if the backend records steps.
fn decoded(backend: &CudaBackend, kind: usize, batches: &[&[(u32, u32)]]) -> Vec<f32> {
    let weights = load(backend, kind);
    let states = states(backend, &weights);
    let rows = Rng::new(3).floats(16 * HIDDEN).iter().flat_map(|value| value.to_le_bytes()).collect();
    let table = WeightView::new(DType::F32, 16, HIDDEN, Bytes::from_vec(rows)).unwrap();
    let options = LinearOptions { name: "t".into(), precision: Precision::Exact, bias: None };
    let table = backend.load_linear(&table, &options).unwrap();
    let [mut hidden, mut out] = [HIDDEN, weights.width()].map(|cols| backend.alloc(8, cols).unwrap());
    let (mut graphs, mut done, mut all) = (StepGraphs::new(8, 8), [0; 4], Vec::new());
    for batch in batches {
        let rows: Vec<_> =
            batch.iter().flat_map(|(slot, rows)| (0..*rows).map(|row| (*slot, done[*slot as usize] + row))).collect();
        let positions: Vec<u32> = rows.iter().map(|(_, position)| *position).collect();
        let ends = batch.iter().scan(0, |end, (_, rows)| {
            *end += rows;
            Some(*end)
        });
        let step = StepMetadata {
            rope_positions: positions.clone(),
            query_start_loc: std::iter::once(0).chain(ends).collect(),
            seq_lens: batch.iter().map(|(slot, rows)| done[*slot as usize] + rows).collect(),
            state_slots: batch.iter().map(|(slot, _)| *slot).collect(),
            positions,
            ..StepMetadata::default()
        };
        let token_ids: Vec<u32> = rows.iter().map(|(slot, position)| (slot * 5 + position * 3) % 16).collect();
        let mut run = |token_ids: &[u32], step: &StepMetadata| {
            let args = EmbedArgs { table: EmbeddingTable::Loaded(&table), token_ids, beyond: None, adapters: &[], scale: 1.0 };
            backend.embed(&args, &mut hidden);
            let args = RecurrentArgs { hidden: &hidden, norm: None, weights: &weights, states: &states, layer: 1, out: &mut out };
            backend.recurrent(args, step);
        };
        let recorder = backend.recorder();
        if recorder.is_some_and(|recorder| recorder.begin_recorded(&mut graphs, &token_ids, &step, &mut run)) {
            backend.replay(&mut graphs);
        } else {
            assert!(recorder.is_none(), "{} rows were not recorded", rows.len());
            backend.begin_step(&step);
            run(&token_ids, &step);
        }
        out.set_rows(rows.len());
        backend.fetch(&mut out);
        all.extend_from_slice(out.as_slice());
        batch.iter().for_each(|(slot, rows)| done[*slot as usize] += rows);
    }
    all
}

#[test]
fn replayed_steps_have_the_states_of_their_own_requests() {
    // Three are padded to four; a slot begins while a graph of its size is there, and others rest meanwhile. Some have drafts.
    let batches: [&[(u32, u32)]; 8] = [
        &[(2, 1), (0, 1), (1, 1)],
        &[(1, 1)],
        &[(3, 1)],
        &[(0, 1), (3, 1), (1, 1)],
        &[(2, 4), (1, 1)],
        &[(2, 1), (1, 1)],
        &[(3, 1), (2, 1), (0, 1)],
        &[(1, 3)],
    ];
    for kind in [0, 2, 5, 8] {
        let backend =
            |graphs| CudaBackend::with(driver(Order::Ascending), CudaOptions { graphs, ..CudaOptions::default() }).unwrap();
        assert!(decoded(&backend(true), kind, &batches) == decoded(&backend(false), kind, &batches), "kind {kind}");
    }
}

/// What a convolution without a gate makes of a request's rows, with SiLU, and the inputs that it keeps.
fn convolved(conv: &Conv, kept: &[f32], rows: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let channels = conv.num_channels;
    let all = [kept, rows].concat();
    let out = (0..rows.len()).map(|at| {
        let (row, channel) = (at / channels, at % channels);
        let taps = (0..conv.kernel())
            .map(|i| f64::from(all[(row + i) * channels + channel]) * f64::from(conv.weight[i * channels + channel]));
        let sum = taps.sum::<f64>() + conv.bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]));
        (sum / (1.0 + (-sum).exp())) as f32
    });
    (out.collect(), all[all.len() - kept.len()..].to_vec())
}

#[test]
fn convolutions_have_the_same_bits_however_rows_are_shared_out() {
    let mut rng = Rng::new(4);
    // Rows before: none of some, which begin. One has fewer rows than are kept, one pads.
    let (requests, num_slots) = ([(3, 1, true), (0, 12, false), (1, 2, false), (2, 5, true)], 4);
    let num_rows: usize = requests.iter().map(|(_, rows, _)| rows).sum::<usize>() + 1;
    let convs = [(130, 4), (7, 6), (40, 2)].map(|(num_channels, kernel)| Conv {
        weight: rng.floats(kernel * num_channels).into(),
        bias: (num_channels == 7).then(|| rng.floats(num_channels).into()),
        num_channels,
    });
    let inputs = convs.each_ref().map(|conv| rng.floats(num_rows * conv.num_channels));
    let stride: usize = convs.iter().map(Conv::state_len).sum();
    let before = rng.floats(num_slots * stride);
    let (mut list, mut row_requests, mut row) = (Vec::new(), Vec::new(), 0);
    for (i, &(slot, rows, begins)) in requests.iter().enumerate() {
        list.push(RecurrentRequest { first_row: row as u32, num_rows: rows as u32, slot, begins: begins.into() });
        row_requests.extend(std::iter::repeat_n(i as u32, rows));
        row += rows;
    }
    list.push(RecurrentRequest { first_row: row as u32, num_rows: 1, slot: NO_SLOT, begins: 0 });
    row_requests.push(requests.len() as u32);
    let run = |rows_per_cta: usize, order| {
        let states = Buffer::inout(&before);
        let outs = convs.each_ref().map(|conv| Buffer::output::<f32>(num_rows * conv.num_channels));
        let (list, row_requests) = (Buffer::input(&list), Buffer::input(&row_requests));
        let own = [0, 1, 2].map(|i| {
            (Buffer::input(&inputs[i]), Buffer::input(&convs[i].weight), convs[i].bias.as_ref().map(|bias| Buffer::input(bias)))
        });
        let (mut first_cta, mut offset) = (0, 0);
        let parts = [0, 1, 2].map(|i| {
            let (conv, (x, weight, bias)) = (&convs[i], &own[i]);
            let part = ConvPart {
                x: x.ptr(),
                weight: weight.ptr(),
                bias: bias.as_ref().map_or(0, Buffer::ptr),
                out: outs[i].ptr(),
                state: states.ptr() + (offset * size_of::<f32>()) as u64,
                num_channels: conv.num_channels as u32,
                kernel: conv.kernel() as u32,
                first_cta: first_cta as u32,
                activates: 1,
                ..ConvPart::default()
            };
            first_cta += conv.num_channels.div_ceil(128);
            offset += conv.state_len();
            part
        });
        let args = CausalConvArgs {
            parts,
            requests: list.ptr(),
            row_requests: row_requests.ptr(),
            slot_stride: stride as u64,
            num_rows: num_rows as u32,
            rows_per_cta: rows_per_cta as u32,
        };
        Kernel::named("causal_conv").launch([first_cta, num_rows.div_ceil(rows_per_cta), 1], &args, order);
        (outs.each_ref().map(Buffer::values::<f32>), states.values::<f32>())
    };
    let (outs, after) = run(1, Order::Ascending);
    let mut offset = 0;
    for ((conv, input), out) in convs.iter().zip(&inputs).zip(&outs) {
        let channels = conv.num_channels;
        for (request, of) in list.iter().zip(&requests) {
            let place = of.0 as usize * stride + offset..of.0 as usize * stride + offset + conv.state_len();
            let kept = if of.2 { vec![0.0; conv.state_len()] } else { before[place.clone()].to_vec() };
            let rows = request.first_row as usize * channels..(request.first_row + request.num_rows) as usize * channels;
            let (expected, kept) = convolved(conv, &kept, &input[rows.clone()]);
            assert_close(&out[rows], &expected, [2e-6, 2e-6], &format!("{channels} channels, slot {}", of.0));
            assert_eq!(after[place], kept, "inputs that are kept, {channels} channels, slot {}", of.0);
        }
        let padding = &out[(num_rows - 1) * channels..];
        assert!(padding.iter().all(|x| x.is_nan()), "a row of nobody was written");
        offset += conv.state_len();
    }
    let bits = |(outs, states): ([Vec<f32>; 3], Vec<f32>)| {
        let values = outs.into_iter().flatten().chain(states);
        values.map(f32::to_bits).collect::<Vec<_>>()
    };
    let expected = bits((outs, after));
    for (rows_per_cta, order) in [(1, Order::Descending), (3, Order::Ascending), (8, Order::Descending), (64, Order::Ascending)] {
        assert!(bits(run(rows_per_cta, order)) == expected, "{rows_per_cta} rows a CTA, {order:?}");
    }
}

#[test]
fn attention_is_gated() {
    let mut rng = Rng::new(6);
    let [x, gate] = [(); 2].map(|()| rng.floats(3 * 700));
    let cuda = CudaBackend::new(driver(Order::Descending)).unwrap();
    for (cols, activation) in [(700, GateActivation::Sigmoid), (7, GateActivation::Sigmoid), (7, GateActivation::Softplus)] {
        let run = |backend: &dyn Backend| {
            let (mut x, gate) = (tensor(backend, &x, 700), tensor(backend, &gate[..3 * cols], cols));
            backend.recurrent_phases().unwrap().gate(&mut x, &gate, activation);
            fetched(backend, x)
        };
        assert_close(&run(&cuda), &run(&ReferenceBackend::new()), [1e-6, 1e-6], &format!("{activation:?} of {cols}"));
    }
}

#[test]
#[should_panic(expected = "states of 257 rows have no GPU kernel")]
fn states_that_no_kernel_takes_are_named() {
    let cuda = CudaBackend::new(driver(Order::Ascending)).unwrap();
    let weights = Source { rng: Rng::new(1), backend: &cuda }.mamba2([1, 8, 1, 257], false);
    alone(&cuda, &weights, Request::new(1, 1, 0), &[1]);
}
