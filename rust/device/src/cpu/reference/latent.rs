//! Latent attention, plainly: keys and values of every head are made of the latent vectors, and nothing is absorbed.

use crate::{KvPlace, KvSide, LatentArgs, LatentPhases, LatentQuery, Linear, StepMetadata, quant::dequantize_row};

use super::{ReferenceBackend, StoredLinear, norm_row, normed, products, rotate};

impl LatentPhases for ReferenceBackend {
    fn latent_attention(&self, args: LatentArgs<'_>, step: &StepMetadata) {
        let LatentArgs { hidden, norm, weights, rope, q_scale, cache, layer, params, out } = args;
        let (kv_rank, rope_dim, nope_dim) = (weights.kv_rank(), weights.rope_dim(), weights.nope_dim());
        let product = |x: &[f32], linear: &Linear| products(x, linear, &step.adapters);
        let input = normed(hidden, norm);
        let queries = match &weights.query {
            LatentQuery::Whole(whole) => product(&input, whole),
            LatentQuery::LowRank { down, norm, up } => {
                let mut low = product(&input, down);
                low.chunks_exact_mut(down.out_features).for_each(|row| norm_row(norm, row));
                product(&low, up)
            }
        };
        let group = &step.groups[cache.layer(layer).group];
        let turn = |token: usize, part: &mut [f32]| {
            if let Some(rope) = rope {
                rotate(rope, step.rope_positions[token] as usize, part);
            }
        };
        for (token, latent) in product(&input, &weights.kv_down).chunks_exact_mut(kv_rank + rope_dim).enumerate() {
            norm_row(&weights.kv_norm, &mut latent[..kv_rank]);
            latent.rotate_left(kv_rank);
            turn(token, &mut latent[..rope_dim]);
            if let Ok(slot) = usize::try_from(group.slot_mapping[token]) {
                cache.write(KvSide::Key, KvPlace { layer, slot, head: 0 }, latent);
            }
        }
        let block_size = cache.spec().block_size;
        let q_width = nope_dim + rope_dim;
        out.set_rows(hidden.rows());
        for request in 0..step.num_reqs() {
            let table = &group.block_tables[request * group.max_blocks..(request + 1) * group.max_blocks];
            let stored: Vec<_> = (0..step.seq_lens[request] as usize)
                .map(|key| {
                    let slot = table[key / block_size] as usize * block_size + key % block_size;
                    let mut vector = vec![0.0; rope_dim + kv_rank];
                    cache.read(KvSide::Key, KvPlace { layer, slot, head: 0 }, &mut vector);
                    vector
                })
                .collect();
            for head in 0..params.num_heads {
                // A key is the latent vector times the transpose of what makes queries of its size.
                let StoredLinear { weight, .. } = weights.key_up[head].weight();
                let mut up = vec![0.0; kv_rank * nope_dim];
                for (row, up) in up.chunks_exact_mut(nope_dim).enumerate() {
                    dequantize_row(weight.dtype, weight.row(row), up);
                }
                let key = |latent: &[f32], i: usize| -> f64 {
                    latent.iter().zip(up.iter().skip(i).step_by(nope_dim)).map(|(l, w)| f64::from(*l) * f64::from(*w)).sum()
                };
                let keys: Vec<Vec<f64>> =
                    stored.iter().map(|stored| (0..nope_dim).map(|i| key(&stored[rope_dim..], i)).collect()).collect();
                let values: Vec<_> = stored.iter().map(|stored| product(&stored[rope_dim..], &weights.value_up[head])).collect();
                for token in step.query_start_loc[request] as usize..step.query_start_loc[request + 1] as usize {
                    let mut query = queries[(token * params.num_heads + head) * q_width..][..q_width].to_vec();
                    turn(token, &mut query[nope_dim..]);
                    if let Some(scale) = q_scale {
                        for x in &mut query {
                            *x *= scale.factor(step.positions[token]);
                        }
                    }
                    let last = step.positions[token] as usize;
                    let score = |at: usize| {
                        let nope: f64 = query[..nope_dim].iter().zip(&keys[at]).map(|(q, k)| f64::from(*q) * k).sum();
                        let rotated = query[nope_dim..].iter().zip(&stored[at][..rope_dim]);
                        (nope + rotated.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()) * f64::from(params.scale)
                    };
                    let scores: Vec<_> = (0..=last).map(score).collect();
                    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|score| (score - most).exp()).sum();
                    let v_dim = values[0].len();
                    let mut sum = vec![0.0; v_dim];
                    for (score, value) in scores.iter().zip(&values) {
                        let weight = (score - most).exp() / total;
                        sum.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * f64::from(*value));
                    }
                    let out = &mut out.row_mut(token)[head * v_dim..(head + 1) * v_dim];
                    out.iter_mut().zip(sum).for_each(|(out, sum)| *out = sum as f32);
                }
            }
        }
    }
}
