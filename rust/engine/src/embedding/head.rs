//! From the hidden states of a step to vectors.

use std::ops::Range;

use device::{Backend, Linear, Norm, Projection, StepMetadata, Tensor};

use super::{EmbeddingConfig, HeadActivation, Pooling, ScoreActivation, TokenLogits, normalize};
use crate::{
    EngineError,
    model::{
        decoder::{Activations, Decoder},
        part::Weights,
    },
    weights::{Role, WeightId},
};

/// A dense layer that was loaded.
pub(crate) struct Head {
    linear: Linear,
    activation: HeadActivation,
    norm: Option<Norm>,
}

/// What is behind the pooling.
pub(crate) struct Heads {
    dense: Vec<Head>,
    /// The rows of tokens whose logits make the score.
    logits: Option<(TokenLogits, Vec<Linear>)>,
}

impl Heads {
    /// Asks for the weights of all, each once.
    pub(crate) fn new(weights: &mut dyn Weights, config: &EmbeddingConfig) -> Result<Self, EngineError> {
        let head = |head: &super::HeadConfig| {
            let norm = WeightId::global(Role::ClassifierNorm);
            let norm = head.has_norm.then(|| weights.norm(norm, [1, head.out_features])).transpose()?;
            Ok(Head { linear: weights.linear(&head.matrix())?, activation: head.activation, norm })
        };
        let dense = config.heads.iter().map(head).collect::<Result<_, EngineError>>()?;
        let rows = |logits: TokenLogits| {
            let rows = logits.matrices().map(|matrix| weights.linear(&matrix)).collect::<Result<_, _>>()?;
            Ok::<_, EngineError>((logits, rows))
        };
        Ok(Self { dense, logits: config.logits.map(rows).transpose()? })
    }
}

/// Pools hidden states, and takes the result through the dense layers.
pub(crate) struct Embedder {
    pooling: Pooling,
    score: Option<ScoreActivation>,
    heads: Heads,
    /// What goes into a head and what comes out, `[max_rows, widest]`.
    buffers: [Tensor; 2],
    /// Requests that pass the heads together at most.
    max_rows: usize,
}

/// Bytes of the buffers between heads.
pub(crate) fn buffer_bytes(config: &EmbeddingConfig, max_rows: usize) -> u64 {
    (2 * config.widest_head() * max_rows * size_of::<f32>()) as u64
}

impl Embedder {
    pub(crate) fn new(
        backend: &dyn Backend,
        config: &EmbeddingConfig,
        heads: Heads,
        max_rows: usize,
    ) -> Result<Self, EngineError> {
        let alloc = || backend.alloc(max_rows, config.widest_head());
        Ok(Self { pooling: config.pooling, score: config.score, heads, buffers: [alloc()?, alloc()?], max_rows })
    }

    /// The vectors of requests, or one score of each, by their rows of the step: all of each, unless the last token's is
    /// wanted.
    pub(crate) fn run(
        &mut self,
        (decoder, backend): (&Decoder, &dyn Backend),
        activations: &mut Activations,
        requests: &[Range<u32>],
    ) -> Vec<Vec<f32>> {
        let mut vectors = Vec::with_capacity(requests.len());
        match self.pooling {
            Pooling::Mean => {
                for rows in requests {
                    vectors.push(mean(decoder, backend, activations, rows, self.max_rows));
                }
            }
            Pooling::Cls | Pooling::Last => {
                let of = |rows: &Range<u32>| if self.pooling == Pooling::Cls { rows.start } else { rows.end - 1 };
                for chunk in requests.chunks(self.max_rows) {
                    let rows: Vec<_> = chunk.iter().map(of).collect();
                    let hidden = decoder.vectors(backend, activations, &rows);
                    vectors.extend((0..rows.len()).map(|row| hidden.row(row).to_vec()));
                }
            }
        }
        for chunk in vectors.chunks_mut(self.max_rows) {
            self.pass_heads(backend, chunk);
            self.score_tokens(backend, chunk);
        }
        for vector in &mut vectors {
            match self.score {
                None => normalize(vector),
                Some(score) => vector.iter_mut().for_each(|logit| *logit = score.apply(*logit)),
            }
        }
        vectors
    }

    fn pass_heads(&mut self, backend: &dyn Backend, vectors: &mut [Vec<f32>]) {
        let Some(first) = self.heads.dense.first() else { return };
        let [x, out] = &mut self.buffers;
        fill(x, first.linear.in_features, vectors, backend);
        for head in &self.heads.dense {
            multiply(&head.linear, x, out, backend);
            if head.activation != HeadActivation::Identity || head.norm.is_some() {
                backend.fetch(out);
                for row in 0..out.rows() {
                    head.activation.apply(out.row_mut(row));
                    head.norm.iter().for_each(|norm| norm.apply(out.row_mut(row)));
                }
                backend.store(out);
            }
            std::mem::swap(x, out);
        }
        backend.fetch(x);
        for (row, vector) in vectors.iter_mut().enumerate() {
            vector.clear();
            vector.extend_from_slice(x.row(row));
        }
    }

    /// Hidden states become scores.
    fn score_tokens(&mut self, backend: &dyn Backend, vectors: &mut [Vec<f32>]) {
        let Some((logits, rows)) = &self.heads.logits else { return };
        let [x, out] = &mut self.buffers;
        fill(x, logits.in_features, vectors, backend);
        vectors.iter_mut().for_each(Vec::clear);
        for linear in rows {
            multiply(linear, x, out, backend);
            backend.fetch(out);
            for (row, products) in vectors.iter_mut().enumerate() {
                products.push(out.row(row)[0]);
            }
        }
        for products in vectors {
            *products = vec![logits.score(products)];
        }
    }
}

/// Rows of the vectors, where the backend computes.
fn fill(x: &mut Tensor, cols: usize, vectors: &[Vec<f32>], backend: &dyn Backend) {
    x.set_cols(cols);
    x.set_rows(vectors.len());
    for (row, vector) in vectors.iter().enumerate() {
        x.row_mut(row).copy_from_slice(vector);
    }
    backend.store(x);
}

fn multiply(linear: &Linear, x: &mut Tensor, out: &mut Tensor, backend: &dyn Backend) {
    out.set_cols(linear.out_features);
    out.set_rows(x.rows());
    backend.norm_linear(x, None, &mut [Projection { linear, out }], &StepMetadata::default());
}

/// Summed in the order of the tokens, in f64: what else is in the step changes nothing.
fn mean(decoder: &Decoder, backend: &dyn Backend, activations: &mut Activations, rows: &Range<u32>, max_rows: usize) -> Vec<f32> {
    let mut sum: Vec<f64> = Vec::new();
    for start in rows.clone().step_by(max_rows) {
        let chunk: Vec<_> = (start..rows.end.min(start + max_rows as u32)).collect();
        let hidden = decoder.vectors(backend, activations, &chunk);
        sum.resize(hidden.cols(), 0.0);
        for row in 0..chunk.len() {
            sum.iter_mut().zip(hidden.row(row)).for_each(|(sum, value)| *sum += f64::from(*value));
        }
    }
    sum.into_iter().map(|sum| (sum / f64::from(rows.end - rows.start)) as f32).collect()
}
