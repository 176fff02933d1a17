//! Latent attention: the absorbed form against the one that makes keys and values of all heads, and its independence of chunks.

use device::{
    AttentionParams, Backend, Device, KvCacheSpec, KvDType, KvGroupMetadata, KvShape, LatentArgs, LatentAttention, LatentPhases,
    LatentQuery, Norm, NormKind, Precision, QueryScale, RopeStyle, RopeTable, StepMetadata, Tensor, WeightView,
    cpu::{CpuBackend, ReferenceBackend},
};

use crate::common::{Rng, isas, load, weight};

const HIDDEN: usize = 64;
const HEADS: usize = 3;
const BLOCK_SIZE: usize = 8;

/// Elements that do not rotate and that do, of a value, of the latent vector, and of a query's low rank.
struct Shape {
    nope: usize,
    rope: usize,
    value: usize,
    kv_rank: usize,
    q_rank: Option<usize>,
}

/// Matrices in the order in which they are loaded, norms, and the rows of a request.
struct Problem {
    shape: Shape,
    query: Vec<WeightView>,
    kv_down: WeightView,
    key_up: Vec<WeightView>,
    value_up: Vec<WeightView>,
    norms: [Norm; 3],
    rope: RopeTable,
    rows: Vec<Vec<f32>>,
}

impl Problem {
    fn new(rng: &mut Rng, shape: Shape, num_rows: usize) -> Self {
        let Shape { nope, rope, value, kv_rank, q_rank } = shape;
        let q_size = HEADS * (nope + rope);
        let query = match q_rank {
            None => vec![weight(rng, q_size, HIDDEN)],
            Some(rank) => vec![weight(rng, rank, HIDDEN), weight(rng, q_size, rank)],
        };
        let norm =
            |rng: &mut Rng, len: usize| Norm { kind: NormKind::Rms, weight: rng.floats(len).into(), bias: None, eps: 1e-6 };
        let angles = rng.floats(num_rows * rope / 2);
        let [cos, sin] = [f32::cos, f32::sin].map(|of: fn(f32) -> f32| angles.iter().map(|a| of(*a)).collect::<Vec<_>>());
        Self {
            query,
            kv_down: weight(rng, kv_rank + rope, HIDDEN),
            key_up: (0..HEADS).map(|_| weight(rng, kv_rank, nope)).collect(),
            value_up: (0..HEADS).map(|_| weight(rng, value, kv_rank)).collect(),
            norms: [norm(rng, HIDDEN), norm(rng, q_rank.unwrap_or(1)), norm(rng, kv_rank)],
            rope: RopeTable { style: RopeStyle::Interleaved, rotary_dim: rope, cos: cos.into(), sin: sin.into() },
            rows: (0..num_rows).map(|_| rng.floats(HIDDEN)).collect(),
            shape,
        }
    }

    fn load(&self, backend: &dyn Device) -> LatentAttention {
        let load = |weight: &WeightView| load(backend, weight, Precision::Exact);
        let [_, low, latent] = self.norms.clone();
        LatentAttention {
            query: match &self.query[..] {
                [down, up] => LatentQuery::LowRank { down: load(down), norm: low, up: load(up) },
                whole => LatentQuery::Whole(load(&whole[0])),
            },
            kv_down: load(&self.kv_down),
            kv_norm: latent,
            key_up: self.key_up.iter().map(load).collect(),
            value_up: self.value_up.iter().map(load).collect(),
        }
    }

    /// What a request gives that is computed in such chunks, beside another one that has the same rows in the other order.
    fn run(&self, backend: &dyn Backend, dtype: KvDType, chunks: &[usize]) -> Vec<f32> {
        let phases: &dyn LatentPhases = backend.latent_phases().unwrap();
        let (weights, Shape { nope, rope, value, kv_rank, .. }) = (self.load(backend), &self.shape);
        let max_blocks = self.rows.len().div_ceil(BLOCK_SIZE);
        let spec = KvCacheSpec::uniform((2 * max_blocks + 1, BLOCK_SIZE), dtype, KvShape::latent(rope + kv_rank), 2).unwrap();
        let cache = backend.alloc_kv_cache(&spec).unwrap();
        let scale = ((nope + rope) as f32).sqrt().recip();
        let params = AttentionParams { scale, ..AttentionParams::new([HEADS, 1, rope + kv_rank], Precision::Exact) };
        // The first request has the even blocks, from the last one on.
        let tables: Vec<_> =
            [0, 1].iter().flat_map(|r| (0..max_blocks).map(move |i| (2 * (max_blocks - i) - r) as u32)).collect();
        let (mut all, mut done) = (Vec::new(), 0);
        for chunk in chunks {
            let range = done..done + chunk;
            let reversed = self.rows.iter().rev().skip(done).take(*chunk);
            let rows: Vec<_> = self.rows[range.clone()].iter().chain(reversed).cloned().collect();
            let slot = |request: usize, position: usize| {
                i64::from(tables[request * max_blocks + position / BLOCK_SIZE]) * BLOCK_SIZE as i64
                    + (position % BLOCK_SIZE) as i64
            };
            let positions: Vec<_> = range.clone().chain(range.clone()).map(|position| position as u32).collect();
            let step = StepMetadata {
                rope_positions: positions.clone(),
                positions,
                query_start_loc: vec![0, *chunk as u32, 2 * *chunk as u32],
                seq_lens: vec![range.end as u32; 2],
                groups: vec![KvGroupMetadata {
                    slot_mapping: [0, 1].iter().flat_map(|r| range.clone().map(|position| slot(*r, position))).collect(),
                    block_tables: tables.clone(),
                    max_blocks,
                }],
                ..StepMetadata::default()
            };
            let mut hidden = Tensor::new(rows.len(), HIDDEN).unwrap();
            hidden.set_rows(rows.len());
            hidden.as_mut_slice().copy_from_slice(&rows.concat());
            let mut out = Tensor::new(rows.len(), HEADS * value).unwrap();
            let (norm, rope) = (Some(&self.norms[0]), Some(&self.rope));
            let q_scale = self.shape.q_rank.map(|_| QueryScale { beta: 0.3, length: 7, offset: 1 });
            let cache = &cache;
            let args =
                LatentArgs { hidden: &hidden, norm, weights: &weights, rope, q_scale, cache, layer: 1, params, out: &mut out };
            phases.latent_attention(args, &step);
            all.extend_from_slice(&out.as_slice()[..chunk * HEADS * value]);
            done = range.end;
        }
        assert_eq!(done, self.rows.len());
        all
    }
}

#[test]
fn the_absorbed_form_agrees_with_the_expanded_one_and_has_the_same_bits_in_any_chunks() {
    let mut rng = Rng::new(3);
    for shape in [
        Shape { nope: 16, rope: 8, value: 24, kv_rank: 32, q_rank: Some(20) },
        Shape { nope: 32, rope: 16, value: 16, kv_rank: 80, q_rank: None },
        Shape { nope: 9, rope: 2, value: 5, kv_rank: 11, q_rank: Some(7) },
    ] {
        let problem = Problem::new(&mut rng, shape, 75);
        for dtype in KvDType::ALL {
            let expected = problem.run(&ReferenceBackend::new(), dtype, &[75]);
            for backend in isas().flat_map(|isa| [1, 3].map(|threads| CpuBackend::new(isa, threads).unwrap())) {
                let what = format!("{:?}, {dtype:?}, rank {}", backend.info(), problem.shape.kv_rank);
                let whole = problem.run(&backend, dtype, &[75]);
                // Where a last bit decides how a vector is rounded, it is another one in the cache.
                let tolerance = match dtype {
                    KvDType::F32 => 1e-4,
                    KvDType::F16 => 2e-3,
                    _ => 3e-2,
                };
                for (i, (got, want)) in whole.iter().zip(&expected).enumerate() {
                    assert!((got - want).abs() <= tolerance * (1.0 + want.abs()), "{what}: element {i} is {got}, not {want}");
                }
                for chunks in [&[30, 1, 44][..], &[1; 75]] {
                    assert!(problem.run(&backend, dtype, chunks) == whole, "{what}: other bits in chunks of {chunks:?}");
                }
            }
        }
    }
}
