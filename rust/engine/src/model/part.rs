//! What the parts of a layer have in common: how they ask for weights, where their activations are, what they run with.

use device::{Backend, CacheEngine, Linear, Norm, Precision, ResidualArgs, StepMetadata, Tensor};

use super::rope::GrowingRope;
use crate::{
    EngineError,
    weights::{Matrix, WeightId},
};

/// Visits the weights that a decoder asks for, each with its shape: one visitor loads them, another counts their bytes.
pub(crate) trait Weights {
    /// A matrix that activations are multiplied by.
    type Linear;
    /// A normalisation.
    type Norm: Clone;
    /// A matrix whose rows are looked up.
    type Table;

    fn linear(&mut self, matrix: &Matrix) -> Result<Self::Linear, EngineError>;

    /// The matrix of logits; with the role of the token embedding it is that too.
    fn lm_head(&mut self, matrix: &Matrix) -> Result<Self::Linear, EngineError>;

    /// Its weights are several vectors one after the other, `[number, len]`.
    fn norm(&mut self, id: WeightId, shape: [usize; 2]) -> Result<Self::Norm, EngineError>;

    fn table(&mut self, matrix: &Matrix) -> Result<Self::Table, EngineError>;
}

/// One half of a layer: it reads the hidden state, and then adds to it.
pub(crate) trait Part {
    /// All phases that read the hidden state, normalised if there is a norm.
    fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>);

    /// The phase that adds to it.
    fn close(&self, join: Join<'_>, cx: &mut Context<'_>);
}

/// What a step keeps between the phases of a part, or the columns of each; parts take turns.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Buffers<T> {
    pub(crate) q: T,
    pub(crate) k: T,
    pub(crate) v: T,
    pub(crate) attention: T,
    pub(crate) ffn: T,
}

impl<T> Buffers<T> {
    pub(crate) fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<Buffers<U>, E> {
        let Self { q, k, v, attention, ffn } = self;
        Ok(Buffers { q: f(q)?, k: f(k)?, v: f(v)?, attention: f(attention)?, ffn: f(ffn)? })
    }
}

impl Buffers<usize> {
    /// The columns that serve either.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            q: self.q.max(other.q),
            k: self.k.max(other.k),
            v: self.v.max(other.v),
            attention: self.attention.max(other.attention),
            ffn: self.ffn.max(other.ffn),
        }
    }

    pub(crate) fn sum(self) -> usize {
        self.q + self.k + self.v + self.attention + self.ffn
    }
}

/// What a step runs with.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) precision: Precision,
    pub(crate) cache: &'a CacheEngine,
    pub(crate) ropes: &'a [GrowingRope],
}

/// What the phases of a layer run on.
pub(crate) struct Context<'a> {
    pub(crate) run: Run<'a>,
    pub(crate) step: &'a StepMetadata,
    /// The layer's number.
    pub(crate) layer: usize,
    /// `[num_tokens, hidden_size]`: the residual stream.
    pub(crate) hidden: &'a mut Tensor,
    pub(crate) buffers: &'a mut Buffers<Tensor>,
}

/// How the output of a part joins the residual stream.
#[derive(Clone, Copy)]
pub(crate) struct Join<'a> {
    pub(crate) post_norm: Option<&'a Norm>,
    pub(crate) scale: f32,
}

impl Join<'_> {
    pub(crate) fn add(self, (run, step): (&Run<'_>, &StepMetadata), x: &Tensor, linear: &Linear, residual: &mut Tensor) {
        run.backend.linear_residual(ResidualArgs { x, linear, post_norm: self.post_norm, scale: self.scale, residual }, step);
    }
}
