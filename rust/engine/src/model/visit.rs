//! The matrices of a model, without loading any.

use std::sync::Arc;

use device::{Constant, Linear, Norm, NormKind};

use super::{
    config::DecoderConfig,
    decoder::Decoder,
    part::{Table, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, WeightId},
};

struct Visitor<F>(F);

/// Calls `each` with every matrix of a model: those that activations are multiplied by, and the token embedding.
///
/// # Errors
/// Those of `each`.
pub(crate) fn for_each_matrix(
    config: &DecoderConfig,
    each: impl FnMut(&Matrix) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    Decoder::new(&mut Visitor(each), config).map(drop)
}

impl<F: FnMut(&Matrix) -> Result<(), EngineError>> Weights for Visitor<F> {
    fn linear(&mut self, matrix: &Matrix) -> Result<Linear, EngineError> {
        self.0(matrix)?;
        Ok(Linear::new(matrix.shape, 0, false, Arc::new(())))
    }

    fn norm(&mut self, _id: WeightId, _shape: [usize; 2]) -> Result<Norm, EngineError> {
        Ok(Norm { kind: NormKind::Rms, weight: Arc::default(), bias: None, eps: 0.0 })
    }

    fn vector(&mut self, _id: WeightId, _len: usize) -> Result<Constant, EngineError> {
        Ok(Constant::default())
    }

    fn values(&mut self, _id: WeightId, _len: usize) -> Result<Constant, EngineError> {
        Ok(Constant::default())
    }

    fn table(&mut self, matrix: &Matrix) -> Result<Table, EngineError> {
        self.linear(matrix).map(Table::Loaded)
    }

    fn table_of_sums(&mut self, _: [usize; 2], outer: Option<&Matrix>, inner: &Matrix) -> Result<Table, EngineError> {
        outer.map_or(Ok(()), &mut self.0)?;
        self.table(inner)
    }
}
