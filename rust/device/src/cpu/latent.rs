//! Latent attention, absorbed: queries are brought into the space of the latent vectors, which then are keys and values of one
//! head that all query heads share. So a token takes one vector of the cache, and a row has the same bits in any chunk.

use crate::{AttentionArgs, LatentArgs, LatentQuery, Linear, Norm, Projection, RopeArgs, StepMetadata, Tensor, WorkspaceShape};

use super::{
    attention::{AttentionScratch, attention},
    linear::{Buffer, LinearContext, LinearScratch, elementwise::norm_row, norm_linear},
    rope::rope_and_cache,
};

/// Buffers of the phase; they grow to the largest step seen and are then reused.
#[derive(Default)]
pub struct LatentScratch {
    /// `[rows, q_rank]`.
    low: Buffer,
    /// `[rows, num_heads * (nope_dim + rope_dim)]`.
    query: Buffer,
    /// `[rows, kv_rank + rope_dim]`, as it is projected.
    latent: Buffer,
    /// `[rows, rope_dim + kv_rank]`.
    key: Buffer,
    /// `[rows, num_heads * (rope_dim + kv_rank)]`.
    absorbed: Buffer,
    /// The same of what attention gives.
    attended: Buffer,
    /// What one head takes and gives, `[rows, nope_dim]` and `[rows, kv_rank]` or the other way round.
    head: [Buffer; 4],
}

/// Bytes of [`LatentScratch`] once it has grown to its largest.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    if !shape.has_latent {
        return 0;
    }
    // Queries before they are absorbed are not wider than after, nor is their low rank than the hidden state.
    let cols = 3 * shape.num_heads * shape.head_dim + 6 * shape.head_dim + shape.hidden_size;
    (shape.num_tokens.next_power_of_two() * cols * size_of::<f32>()) as u64
}

/// [`LatentPhases::latent_attention`](crate::LatentPhases::latent_attention).
///
/// # Panics
/// When sizes disagree.
pub fn latent_attention(
    context: LinearContext<'_>,
    linear: &mut LinearScratch,
    attention_scratch: &AttentionScratch,
    scratch: &mut LatentScratch,
    args: LatentArgs<'_>,
    step: &StepMetadata,
) {
    let LatentArgs { hidden, norm, weights, rope, q_scale, cache, layer, params, out } = args;
    let (rows, num_heads) = (hidden.rows(), params.num_heads);
    let (kv_rank, rope_dim, nope_dim) = (weights.kv_rank(), weights.rope_dim(), weights.nope_dim());
    let width = rope_dim + kv_rank;
    assert_eq!([weights.key_up.len(), weights.value_up.len()], [num_heads; 2], "heads of the weights");
    assert_eq!((params.num_kv_heads, params.head_dim), (1, width), "the absorbed form");
    let LatentScratch { low, query, latent, key, absorbed, attended, head } = scratch;
    let q_width = nope_dim + rope_dim;
    let (query, latent) = (query.rows(rows, num_heads * q_width), latent.rows(rows, width));
    let mut project = |x: &Tensor, norm: Option<&Norm>, outputs: &mut [(&Linear, &mut Tensor)]| {
        let mut projections: Vec<_> = outputs.iter_mut().map(|(linear, out)| Projection { linear, out }).collect();
        norm_linear(context, linear, x, norm, &mut projections);
    };
    match &weights.query {
        LatentQuery::Whole(whole) => project(hidden, norm, &mut [(whole, &mut *query), (&weights.kv_down, &mut *latent)]),
        LatentQuery::LowRank { down, norm: low_norm, up } => {
            let low = low.rows(rows, down.out_features);
            project(hidden, norm, &mut [(down, &mut *low), (&weights.kv_down, &mut *latent)]);
            project(low, Some(low_norm), &mut [(up, &mut *query)]);
        }
    }
    let key = key.rows(rows, width);
    for row in 0..rows {
        let (vector, rotates) = latent.row(row).split_at(kv_rank);
        let (to_rotate, to_vector) = key.row_mut(row).split_at_mut(rope_dim);
        to_rotate.copy_from_slice(rotates);
        norm_row(context.isa, &weights.kv_norm, vector, to_vector);
    }
    let (absorbed, attended) = (absorbed.rows(rows, num_heads * width), attended.rows(rows, num_heads * width));
    let [nope, wide, narrow, value] = head;
    for (head, up) in weights.key_up.iter().enumerate() {
        let (nope, wide) = (nope.rows(rows, nope_dim), wide.rows(rows, kv_rank));
        for row in 0..rows {
            let query = &query.row(row)[head * q_width..(head + 1) * q_width];
            nope.row_mut(row).copy_from_slice(&query[..nope_dim]);
            absorbed.row_mut(row)[head * width..head * width + rope_dim].copy_from_slice(&query[nope_dim..]);
        }
        project(nope, None, &mut [(up, &mut *wide)]);
        for row in 0..rows {
            absorbed.row_mut(row)[head * width + rope_dim..(head + 1) * width].copy_from_slice(wide.row(row));
        }
    }
    let (q_norm, k_norm, norms_last) = (None, None, false);
    let kv = Some((&mut *key, None));
    let isa = context.isa;
    let args = RopeArgs { q: absorbed, kv, q_norm, k_norm, v_norm: None, norms_last, q_scale, rope, cache, layer };
    rope_and_cache(args, step, isa, context.pool);
    let args = AttentionArgs { q: absorbed, out: attended, cache, layer, sinks: None, params, next: None };
    attention(args, step, isa, context.pool, attention_scratch);
    out.set_rows(rows);
    for (head, up) in weights.value_up.iter().enumerate() {
        let (narrow, value) = (narrow.rows(rows, kv_rank), value.rows(rows, up.out_features));
        for row in 0..rows {
            narrow.row_mut(row).copy_from_slice(&attended.row(row)[head * width + rope_dim..(head + 1) * width]);
        }
        project(narrow, None, &mut [(up, &mut *value)]);
        for row in 0..rows {
            let v_dim = up.out_features;
            out.row_mut(row)[head * v_dim..(head + 1) * v_dim].copy_from_slice(value.row(row));
        }
    }
}
