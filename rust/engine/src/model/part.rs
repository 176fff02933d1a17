//! What the parts of a layer have in common: how they ask for weights, where their activations are, what they run with.

use device::{
    Backend, CacheEngine, Constant, EmbeddingTable, Linear, Norm, Precision, RopeTable, StateCache, StepMetadata, Tensor,
    WeightView,
};

use super::{altup::StreamTensors, cross::SeenStep};
use crate::{
    EngineError,
    weights::{Matrix, WeightId},
};

/// Rows of so many columns, where phases read them.
pub(crate) fn stored(backend: &dyn Backend, values: &[f32], cols: usize) -> Result<Tensor, EngineError> {
    let num_rows = values.len() / cols;
    let mut tensor = backend.alloc(num_rows, cols)?;
    tensor.set_rows(num_rows);
    tensor.as_mut_slice().copy_from_slice(values);
    backend.store(&mut tensor);
    Ok(tensor)
}

/// Visits the weights that a decoder asks for, each with its shape. One visitor loads them. Another counts their bytes: what it
/// returns is empty, and the decoder that is made of it never runs.
pub(crate) trait Weights {
    /// A matrix that activations are multiplied by. One gives the logits ([`WeightId::is_lm_head`]); with the role of the token
    /// embedding it is that too.
    fn linear(&mut self, matrix: &Matrix) -> Result<Linear, EngineError>;

    /// The weights of a norm are several vectors one after the other, `[number, len]`.
    fn norm(&mut self, id: WeightId, shape: [usize; 2]) -> Result<Norm, EngineError>;

    /// A vector of so many values.
    fn vector(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError>;

    /// So many values, whatever the shape of the tensor.
    fn values(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError>;

    /// A matrix whose rows are looked up.
    fn table(&mut self, matrix: &Matrix) -> Result<Table, EngineError>;

    /// A table of rows that no file has: for each of so many `outer` rows, 0 unless there is a matrix of them, the sums with each
    /// of the first so many `inner` ones, `[outer * inner, columns]`, in F32.
    fn table_of_sums(&mut self, shape: [usize; 2], outer: Option<&Matrix>, inner: &Matrix) -> Result<Table, EngineError>;
}

/// A matrix whose rows are looked up: by the host as it is stored, or by a backend that has loaded it.
#[derive(Clone)]
pub(crate) enum Table {
    Stored(WeightView),
    Loaded(Linear),
}

impl Table {
    /// As the phases take it.
    pub(crate) fn view(&self) -> EmbeddingTable<'_> {
        match self {
            Self::Stored(view) => EmbeddingTable::Stored(view),
            Self::Loaded(linear) => EmbeddingTable::Loaded(linear),
        }
    }
}

/// What a step keeps between the phases of a layer, `[num_tokens, columns]` each, or those columns: q, k, v, what attention
/// gives, its gate, and the activation of the feed-forward network. Layers take turns.
pub(crate) type Buffers<T> = [T; 6];

/// What a step runs with.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) precision: Precision,
    pub(crate) cache: &'a CacheEngine,
    /// A table of each kind of rotation.
    pub(crate) ropes: &'a [RopeTable],
    /// Of models with recurrent layers.
    pub(crate) states: Option<&'a StateCache>,
    /// Where the model's layers begin in the cache.
    pub(crate) first_layer: usize,
}

/// What the phases of a layer run on.
pub(crate) struct Context<'a> {
    pub(crate) run: Run<'a>,
    pub(crate) step: &'a StepMetadata,
    /// The layer's number, in the cache too.
    pub(crate) layer: usize,
    /// `[num_tokens, hidden_size]`: the residual stream.
    pub(crate) hidden: &'a mut Tensor,
    pub(crate) buffers: &'a mut Buffers<Tensor>,
    /// `[num_tokens, num_layers * width]`: what layers are given besides.
    pub(crate) inputs: Option<&'a Tensor>,
    /// The rows of the step, of a layer that looks at images.
    pub(crate) seen: Option<&'a SeenStep>,
    /// Of models with several residual streams; `hidden` is then what a layer makes of the active one.
    pub(crate) streams: Option<&'a mut StreamTensors>,
}
