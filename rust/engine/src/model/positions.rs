//! Learned vectors of positions and of kinds of tokens, which are added to those of tokens before the first layer.

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
        let Some(positions) = config.positions else { return Ok(None) };
        let PositionsConfig { are_there, padding, num_token_types } = positions;
        let (count, width) = (config.max_position_embeddings, config.hidden_size);
        let parts = [(Role::PositionPadding, padding), (Role::Positions, count)];
        let [_, of_positions] = Matrix::fused(WeightId::global(Role::Positions), parts, width, false);
        let of_positions = are_there.then(|| of_positions.exact());
        let of_types = Matrix::new(WeightId::global(Role::TokenTypes), [num_token_types, width], false).exact();
        let table = match of_positions {
            Some(of_positions) if num_token_types == 0 => weights.table(&of_positions)?,
            of_positions => weights.table_of_sums([count, positions.rows_of_position()], of_positions.as_ref(), &of_types)?,
        };
        Ok(Some(Self(table)))
    }

    /// Adds to each row of the step, `[num_tokens, hidden_size]`, the vector of its position and kind.
    pub(crate) fn add(&self, backend: &dyn Backend, hidden: &mut Tensor, step: &StepMetadata) {
        let phases = backend.elementwise_phases().expect("the plan was refused where nothing adds vectors of positions");
        phases.add_positions(hidden, self.0.view(), step);
    }
}
