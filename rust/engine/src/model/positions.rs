//! Learned vectors of positions, which are added to those of tokens before the first layer.

use device::{Backend, StepMetadata, Tensor};

use super::{
    config::{DecoderConfig, PositionsConfig},
    part::{Table, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

pub(crate) struct Positions(Table);

impl Positions {
    /// Asks for the table of a model that has one.
    pub(crate) fn new(weights: &mut dyn Weights, config: &DecoderConfig) -> Result<Option<Self>, EngineError> {
        let Some(PositionsConfig { padding }) = config.positions else { return Ok(None) };
        let parts = [(Role::PositionPadding, padding), (Role::Positions, config.max_position_embeddings)];
        let [_, table] = Matrix::fused(WeightId::global(Role::Positions), parts, config.hidden_size, false);
        Ok(Some(Self(weights.table(&table.exact())?)))
    }

    /// Adds to each row of the step, `[num_tokens, hidden_size]`, the vector of its position.
    pub(crate) fn add(&self, backend: &dyn Backend, hidden: &mut Tensor, step: &StepMetadata) {
        let phases = backend.elementwise_phases().expect("the plan was refused where nothing adds vectors of positions");
        phases.add_positions(hidden, self.0.view(), step);
    }
}
