//! The plain backend: every phase as simple loops, one thread, sums in f64. It is slow, and right: the oracle of every fast one.

mod latent;
mod recurrent;

use std::sync::Arc;

use crate::{
    Activation, AdapterRows, AttentionArgs, Backend, BackendInfo, CacheEngine, DType, Device, DeviceError, ElementwisePhases,
    EmbedArgs, EmbeddingTable, Expert, ExpertActivation, ExpertArgs, ExpertPhases, GateUpArgs, KvCacheSpec, KvDType, KvLayer,
    KvPlace, KvShape, KvSide, LatentPhases, LatentSpace, Linear, LinearDelta, LinearOptions, Norm, NormKind, Phases, Precision,
    Projection, RecurrentPhases, ResidualArgs, RopeArgs, RopeStyle, RopeTable, SharedExpert, StepMetadata, StreamPhases, Tensor,
    WeightView, WorkspaceShape,
    attention::{HeadNorm, NormParts},
    backend::check_bias,
    quant::dequantize_row,
};

/// The plain backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceBackend;

impl ReferenceBackend {
    /// The plain backend; it has no state.
    pub fn new() -> Self {
        Self
    }
}

/// A weight as it lies in its file.
struct StoredLinear {
    weight: WeightView,
    /// `[out_features]`.
    bias: Option<Vec<f32>>,
}

fn stored_row(linear: &Linear, row: usize, out: &mut [f32]) {
    let StoredLinear { weight, .. } = linear.weight();
    dequantize_row(weight.dtype, weight.row(row), out);
}

/// Writes a row of a weight, `[in_features]`.
type TiedRow<'a> = &'a dyn Fn(&Linear, usize, &mut [f32]);

/// `out[i] = table[token_ids[i]] * scale`; `tied_row` reads a table that is tied.
pub(crate) fn embed(args: &EmbedArgs<'_>, out: &mut Tensor, tied_row: TiedRow<'_>) {
    out.set_rows(args.token_ids.len());
    for (i, &id) in args.token_ids.iter().enumerate() {
        table_row(args.table, args.row(id), out.row_mut(i), tied_row);
    }
    for AdapterRows { adapter, rows } in args.adapters {
        let Some(embedding) = &adapter.embedding else { continue };
        for &row in rows {
            embedding.apply(args.token_ids[row as usize], out.row_mut(row as usize));
        }
    }
    for x in out.as_mut_slice() {
        *x *= args.scale;
    }
}

fn table_row(table: EmbeddingTable<'_>, row: usize, out: &mut [f32], tied_row: TiedRow<'_>) {
    match table {
        EmbeddingTable::Stored(table) => dequantize_row(table.dtype, table.row(row), out),
        EmbeddingTable::Loaded(linear) => tied_row(linear, row, out),
    }
}

/// `x[i] += table[positions[i]]`; `tied_row` reads a table that is loaded.
pub(crate) fn add_positions(x: &mut Tensor, table: EmbeddingTable<'_>, positions: &[u32], tied_row: TiedRow<'_>) {
    let mut added = vec![0.0; x.cols()];
    for (row, position) in positions.iter().enumerate() {
        table_row(table, *position as usize, &mut added, tied_row);
        x.row_mut(row).iter_mut().zip(&added).for_each(|(x, added)| *x += added);
    }
}

/// `out[i] = x[rows[i]]`.
pub(crate) fn gather_rows(x: &Tensor, rows: &[u32], out: &mut Tensor) {
    out.set_rows(rows.len());
    for (i, &row) in rows.iter().enumerate() {
        out.row_mut(i).copy_from_slice(x.row(row as usize));
    }
}

/// Normalises one vector in place.
fn norm_row(norm: &Norm, x: &mut [f32]) {
    norm_part(norm, 0, x);
}

/// The same by the values of weight and bias from `first` on.
pub(crate) fn norm_part(norm: &Norm, first: usize, x: &mut [f32]) {
    let n = x.len() as f64;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => x.iter().map(|&v| f64::from(v)).sum::<f64>() / n,
    };
    let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    let scale = (variance + f64::from(norm.eps)).sqrt().recip();
    for (i, v) in x.iter_mut().enumerate() {
        let bias = norm.bias.as_ref().map_or(0.0, |b| f64::from(b[first + i]));
        *v = ((f64::from(*v) - mean) * scale * f64::from(norm.weight[first + i]) + bias) as f32;
    }
}

impl Norm {
    /// Normalises one vector in place: on the host, plainly, and in double precision.
    pub fn apply(&self, x: &mut [f32]) {
        norm_row(self, x);
    }
}

/// The rows of `x`, normalised.
fn normed(x: &Tensor, norm: Option<&Norm>) -> Vec<f32> {
    let mut rows = x.as_slice().to_vec();
    if let Some(norm) = norm {
        rows.chunks_exact_mut(x.cols()).for_each(|row| norm_row(norm, row));
    }
    rows
}

/// [`product`] of all rows, `[rows, out_features]`.
fn products(x: &[f32], linear: &Linear, adapters: &[AdapterRows]) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / linear.in_features * linear.out_features];
    product(x, linear, adapters, &mut out);
    out
}

/// `out[row, n] = x[row] · weight[n] + bias[n]`, and what the rows' adapters make of it.
fn product(x: &[f32], linear: &Linear, adapters: &[AdapterRows], out: &mut [f32]) {
    matmul(x, linear, out);
    let rows = |row: u32, n: usize| row as usize * n..(row as usize + 1) * n;
    for AdapterRows { adapter, rows: adapted } in adapters {
        let Some(delta) = adapter.delta(linear) else { continue };
        for &row in adapted {
            adapt(delta, &x[rows(row, linear.in_features)], &mut out[rows(row, linear.out_features)]);
        }
    }
}

/// What an adapter makes of a row of a layer's output.
fn adapt(delta: &LinearDelta, x: &[f32], out: &mut [f32]) {
    let dot = |weights: &WeightView, row: usize| {
        let mut w = vec![0.0; x.len()];
        dequantize_row(weights.dtype, weights.row(row), &mut w);
        x.iter().zip(&w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
    };
    match delta {
        LinearDelta::Replaced(linear) => matmul(x, linear, out),
        LinearDelta::Rows { ids, rows } => ids.iter().enumerate().for_each(|(i, id)| out[*id as usize] = dot(rows, i) as f32),
        LinearDelta::LowRank(low_rank) => {
            let low: Vec<_> = (0..low_rank.rank()).map(|k| dot(low_rank.a(), k)).collect();
            for (n, out) in out.iter_mut().enumerate() {
                let mut y = f64::from(*out);
                if let Some(magnitude) = &low_rank.magnitude {
                    let bias = magnitude.bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]));
                    y = (y - bias) * f64::from(magnitude.factors[n]) + bias;
                }
                y += low.iter().enumerate().map(|(k, low)| low * f64::from(low_rank.b_row(k)[n])).sum::<f64>();
                *out = (y + low_rank.bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]))) as f32;
            }
        }
    }
}

/// `out[row, n] = x[row] · weight[n] + bias[n]`; the weight is read one row at a time.
fn matmul(x: &[f32], linear: &Linear, out: &mut [f32]) {
    let StoredLinear { weight, bias } = linear.weight();
    let (out_features, in_features) = (linear.out_features, linear.in_features);
    let mut w = vec![0.0; in_features];
    for n in 0..out_features {
        dequantize_row(weight.dtype, weight.row(n), &mut w);
        let bias = bias.as_ref().map_or(0.0, |b| f64::from(b[n]));
        for (x, out) in x.chunks_exact(in_features).zip(out.chunks_exact_mut(out_features)) {
            out[n] = (x.iter().zip(&w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() + bias) as f32;
        }
    }
}

/// The error function, by its series of positive terms (Abramowitz and Stegun 7.1.6).
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI
}

/// The activation of one value.
pub(crate) fn activate(activation: Activation, x: f32) -> f32 {
    let x = f64::from(x);
    let y = match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Activation::Swish(beta) => x / (1.0 + (-f64::from(beta) * x).exp()),
        Activation::Relu | Activation::Relu2 if x < 0.0 => 0.0,
        Activation::Relu => x,
        Activation::Relu2 => x * x,
        Activation::Xielu(xielu) => {
            let [positive, negative, linear, eps] = [xielu.positive, xielu.negative, xielu.linear, xielu.eps].map(f64::from);
            let curved = if x > 0.0 { positive * x * x } else { negative * (x.min(eps).exp_m1() - x) };
            curved + linear * x
        }
    };
    y as f32
}

impl Activation {
    /// Of one value: on the host, plainly, and in double precision.
    pub fn apply(self, x: f32) -> f32 {
        activate(self, x)
    }
}

/// Rotates one head in place for the table's row `position`.
pub(crate) fn rotate(rope: &RopeTable, position: usize, head: &mut [f32]) {
    let half = rope.rotary_dim / 2;
    for i in 0..half {
        let (cos, sin) = (f64::from(rope.cos[position * half + i]), f64::from(rope.sin[position * half + i]));
        let (a, b) = match rope.style {
            RopeStyle::Neox => (i, i + half),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        head[a] = (x * cos - y * sin) as f32;
        head[b] = (y * cos + x * sin) as f32;
    }
}

/// What an expert gives for one row, `[hidden_size]`.
fn expert_row(expert: &Expert, activation: ExpertActivation, x: &[f32], adapters: &[AdapterRows]) -> Vec<f32> {
    let of_row = |linear: &Linear, x: &[f32]| products(x, linear, adapters);
    let up = of_row(&expert.up, x);
    let gate = expert.gate.as_ref().map_or_else(|| up.clone(), |gate| of_row(gate, x));
    let hidden: Vec<_> = gate
        .iter()
        .zip(&up)
        .map(|(&gate, &up)| match activation {
            ExpertActivation::Gated(activation) => activate(activation, gate) * up,
            ExpertActivation::Plain(activation) => activate(activation, up),
            ExpertActivation::Clamped { alpha, limit } => {
                let (gate, up) = (f64::from(gate.min(limit)), f64::from(up.clamp(-limit, limit)));
                ((up + 1.0) * gate / (1.0 + (-f64::from(alpha) * gate).exp())) as f32
            }
        })
        .collect();
    of_row(&expert.down, &hidden)
}

impl ExpertPhases for ReferenceBackend {
    fn experts(&self, args: ExpertArgs<'_>, step: &StepMetadata) {
        let ExpertArgs { hidden, norm, experts, post_norm, scale } = args;
        let input = normed(hidden, norm);
        let cols = hidden.cols();
        let norms = experts.norms.as_ref();
        let for_router = norms.map(|norms| normed(hidden, Some(&norms.router)));
        let for_shared = norms.map(|norms| normed(hidden, Some(&norms.shared)));
        for (row, x) in input.chunks_exact(cols).enumerate() {
            let of_row = |values: &Option<Vec<f32>>| values.as_ref().map_or(x.to_vec(), |v| v[row * cols..][..cols].to_vec());
            let adapters = AdapterRows::of_chosen(&step.adapters, &std::iter::once(row as u32));
            let mut logits = vec![0.0; experts.experts.len()];
            product(&of_row(&for_router), &experts.router, &adapters, &mut logits);
            let mut chosen = vec![(0, 0.0); experts.rule.num_chosen];
            experts.rule.choose(&logits, experts.correction.as_ref().map(|values| &values[..]), &mut chosen);
            let within = experts.latent.as_ref().map(|latent| products(x, &latent.down, &adapters));
            let for_experts = within.as_deref().unwrap_or(x);
            let mut sum = vec![0.0; for_experts.len()];
            for (expert, weight) in chosen {
                let weight = weight * experts.scales.as_ref().map_or(1.0, |scales| scales[expert]);
                let x: Vec<_> = for_experts.iter().map(|x| if experts.scales_input { x * weight } else { *x }).collect();
                let weight = if experts.scales_input { 1.0 } else { weight };
                let given = expert_row(&experts.experts[expert], experts.activation, &x, &adapters);
                sum.iter_mut().zip(given).for_each(|(sum, given)| *sum += f64::from(given) * f64::from(weight));
            }
            if let Some(LatentSpace { up, .. }) = &experts.latent {
                let within: Vec<_> = sum.iter().map(|value| *value as f32).collect();
                sum = products(&within, up, &adapters).into_iter().map(f64::from).collect();
            }
            let normalize = |norm: Option<&Norm>, values: &mut [f64]| {
                let Some(norm) = norm else { return };
                let mut row: Vec<_> = values.iter().map(|value| *value as f32).collect();
                norm_row(norm, &mut row);
                values.iter_mut().zip(row).for_each(|(value, normed)| *value = f64::from(normed));
            };
            normalize(norms.map(|norms| &norms.sum), &mut sum);
            if let Some(SharedExpert { expert, weight }) = &experts.shared {
                let x = of_row(&for_shared);
                let mut given: Vec<_> =
                    expert_row(expert, experts.activation, &x, &adapters).into_iter().map(f64::from).collect();
                normalize(norms.map(|norms| &norms.shared_sum), &mut given);
                let mut logit = [0.0];
                let weight = weight.as_ref().map_or(1.0, |weight| {
                    product(&x, weight, &adapters, &mut logit);
                    1.0 / (1.0 + (-f64::from(logit[0])).exp())
                });
                sum.iter_mut().zip(given).for_each(|(sum, given)| *sum += given * weight);
            }
            let mut sum: Vec<_> = sum.into_iter().map(|sum: f64| sum as f32).collect();
            if let Some(norm) = post_norm {
                norm_row(norm, &mut sum);
            }
            hidden.row_mut(row).iter_mut().zip(sum).for_each(|(x, sum)| *x += sum * scale);
        }
    }
}

impl StreamPhases for ReferenceBackend {}

impl ElementwisePhases for ReferenceBackend {
    fn add_positions(&self, x: &mut Tensor, table: EmbeddingTable<'_>, step: &StepMetadata) {
        add_positions(x, table, &step.rope_positions, &stored_row);
    }

    fn gated(&self, activation: Activation, gate: &mut Tensor, up: &Tensor) {
        let gated = |gate: f32, up: &f32| activate(activation, gate) * up;
        gate.as_mut_slice().iter_mut().zip(up.as_slice()).for_each(|(gate, up)| *gate = gated(*gate, up));
    }
}

impl Backend for ReferenceBackend {
    fn sees_ahead(&self) -> bool {
        true
    }

    fn recurrent_phases(&self) -> Option<&dyn RecurrentPhases> {
        Some(self)
    }

    fn latent_phases(&self) -> Option<&dyn LatentPhases> {
        Some(self)
    }

    fn elementwise_phases(&self) -> Option<&dyn ElementwisePhases> {
        Some(self)
    }

    fn stream_phases(&self) -> Option<&dyn StreamPhases> {
        Some(self)
    }

    fn expert_phases(&self) -> Option<&dyn ExpertPhases> {
        Some(self)
    }
}

impl Device for ReferenceBackend {
    fn takes_adapters(&self) -> bool {
        true
    }

    fn read_rows(&self, linear: &Linear, first: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        out.chunks_exact_mut(linear.in_features).zip(first..).for_each(|(out, row)| stored_row(linear, row, out));
        Ok(())
    }

    fn check_kv_layer(&self, _dtype: KvDType, _shape: KvShape, _queries_per_kv: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn info(&self) -> BackendInfo {
        BackendInfo { device: "cpu".into(), isa: "reference".into(), num_threads: 1 }
    }

    fn alloc(&self, max_rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        Tensor::new(max_rows, cols)
    }

    fn alloc_kv_cache(&self, spec: &KvCacheSpec) -> Result<CacheEngine, DeviceError> {
        CacheEngine::new(spec)
    }

    fn load_linear(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        check_bias(weight, options)?;
        let bytes = weight.bytes().len() + options.bias.as_deref().map_or(0, size_of_val);
        let stored = StoredLinear { weight: weight.clone(), bias: options.bias.clone() };
        Ok(Linear::new([weight.rows, weight.cols], bytes as u64, true, Arc::new(stored)))
    }

    fn linear_bytes(&self, dtype: DType, [rows, cols]: [usize; 2], _precision: Precision) -> u64 {
        dtype.row_bytes(cols).unwrap_or(0) as u64 * rows as u64
    }

    fn workspace_bytes(&self, _shape: &WorkspaceShape) -> u64 {
        0
    }
}

impl Phases for ReferenceBackend {
    fn embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor) {
        embed(args, out, &stored_row);
    }

    fn norm_linear(&self, x: &Tensor, norm: Option<&Norm>, projections: &mut [Projection<'_>], step: &StepMetadata) {
        let input = normed(x, norm);
        for p in projections {
            p.out.set_rows(x.rows());
            product(&input, p.linear, &step.adapters, p.out.as_mut_slice());
        }
    }

    fn rope_and_cache(&self, args: RopeArgs<'_>, step: &StepMetadata) {
        let RopeArgs { q, mut kv, q_norm, k_norm, v_norm, norms_last, q_scale, rope, cache, layer } = args;
        let KvLayer { group, shape: KvShape { num_kv_heads, k_dim, v_dim }, .. } = *cache.layer(layer);
        for token in 0..q.rows() {
            let position = step.rope_positions.get(token).map_or(0, |&p| p as usize);
            let normalize = |row: &mut [f32], norm: Option<HeadNorm<'_>>| {
                if let Some(norm) = norm {
                    let NormParts { norm, len, stride } = norm.parts(row.len() / k_dim, k_dim);
                    for (i, part) in row.chunks_exact_mut(len).enumerate() {
                        norm_part(norm, i * stride, part);
                    }
                }
            };
            let turn = |row: &mut [f32], norm: Option<HeadNorm<'_>>| {
                normalize(row, norm.filter(|_| !norms_last));
                if let Some(rope) = rope {
                    row.chunks_exact_mut(k_dim).for_each(|head| rotate(rope, position, head));
                }
                normalize(row, norm.filter(|_| norms_last));
            };
            turn(q.row_mut(token), q_norm);
            if let Some(scale) = q_scale {
                q.row_mut(token).iter_mut().for_each(|x| *x *= scale.factor(step.positions[token]));
            }
            let Some((k, v)) = &mut kv else { continue };
            turn(k.row_mut(token), k_norm);
            if let Some(v) = v {
                normalize(v.row_mut(token), v_norm);
            }
            let Ok(slot) = usize::try_from(step.groups[group].slot_mapping[token]) else { continue };
            for head in 0..num_kv_heads {
                let at = KvPlace { layer, slot, head };
                cache.write(KvSide::Key, at, &k.row(token)[head * k_dim..(head + 1) * k_dim]);
                if let Some(v) = v {
                    cache.write(KvSide::Value, at, &v.row(token)[head * v_dim..(head + 1) * v_dim]);
                }
            }
        }
    }

    fn attention(&self, args: AttentionArgs<'_>, step: &StepMetadata) {
        let AttentionArgs { q, out, cache, layer, sinks, params, next: _ } = args;
        let KvLayer { group, shape: KvShape { k_dim, v_dim, .. }, .. } = *cache.layer(layer);
        let (group, block_size) = (&step.groups[group], cache.spec().block_size);
        let queries_per_kv = params.num_heads / params.num_kv_heads;
        out.set_rows(q.rows());
        let (mut k, mut v) = (vec![0.0; k_dim], vec![0.0; v_dim]);
        for request in 0..step.num_reqs() {
            let rows = step.query_start_loc[request] as usize..step.query_start_loc[request + 1] as usize;
            let table = &group.block_tables[request * group.max_blocks..(request + 1) * group.max_blocks];
            for (row, head) in rows.flat_map(|row| (0..params.num_heads).map(move |head| (row, head))) {
                let position = step.positions[row] as usize;
                let keys =
                    params.first_key(position)..params.end_key((row, position), step.seq_lens[request] as usize, &step.span_ends);
                let place = |key: usize| KvPlace {
                    layer,
                    slot: table[key / block_size] as usize * block_size + key % block_size,
                    head: head / queries_per_kv,
                };
                let query = &q.row(row)[head * k_dim..(head + 1) * k_dim];
                let mut weights = Vec::with_capacity(keys.len());
                for key in keys.clone() {
                    cache.read(KvSide::Key, place(key), &mut k);
                    let dot: f64 = query.iter().zip(&k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    let score = dot * f64::from(params.scale);
                    weights.push(params.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()));
                }
                let max = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                for w in &mut weights {
                    *w = (*w - max).exp();
                }
                let sink = sinks.map_or(0.0, |sinks| (f64::from(sinks[head]) - max).exp());
                let total: f64 = weights.iter().sum::<f64>() + sink;
                let mut sum = vec![0.0f64; v_dim];
                for (key, weight) in keys.zip(&weights) {
                    cache.read(KvSide::Value, place(key), &mut v);
                    sum.iter_mut().zip(&v).for_each(|(s, &v)| *s += weight * f64::from(v));
                }
                let out = &mut out.row_mut(row)[head * v_dim..(head + 1) * v_dim];
                out.iter_mut().zip(&sum).for_each(|(o, s)| *o = (s / total) as f32);
            }
        }
    }

    fn linear_residual(&self, args: ResidualArgs<'_>, step: &StepMetadata) {
        let mut y = vec![0.0; args.x.rows() * args.linear.out_features];
        product(args.x.as_slice(), args.linear, &step.adapters, &mut y);
        if let Some(norm) = args.post_norm {
            y.chunks_exact_mut(args.linear.out_features).for_each(|row| norm_row(norm, row));
        }
        for (r, y) in args.residual.as_mut_slice().iter_mut().zip(&y) {
            *r += y * args.scale;
        }
    }

    fn gate_up(&self, args: GateUpArgs<'_>, step: &StepMetadata) {
        let input = normed(args.x, args.norm);
        args.out.set_rows(args.x.rows());
        let out = args.out.as_mut_slice();
        product(&input, args.gate.unwrap_or(args.up), &step.adapters, out);
        for x in &mut *out {
            *x = activate(args.activation, *x);
        }
        if args.gate.is_some() {
            let mut up = vec![0.0; out.len()];
            product(&input, args.up, &step.adapters, &mut up);
            out.iter_mut().zip(&up).for_each(|(x, up)| *x *= up);
        }
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) {
        gather_rows(x, rows, out);
    }
}
