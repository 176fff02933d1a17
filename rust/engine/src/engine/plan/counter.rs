//! Counts the bytes of a model's weights by device.

use std::sync::Arc;

use device::{Constant, DType, Linear, Norm, NormKind, Precision};
use paged::ModelConfigLike;

use super::{KvLayers, PlannedDevices};
use crate::{
    EngineError, Isq,
    model::part::{Table, Weights},
    weights::{Matrix, Role, WeightId, WeightSource},
};

/// Counts the weights that it visits, in the form that they are computed with.
pub(super) struct Counter<'a> {
    weights: Option<&'a WeightSource>,
    isq: Option<Isq>,
    devices: PlannedDevices<'a>,
    precision: Precision,
    layers: &'a KvLayers<'a>,
    /// By device.
    pub(super) bytes: Vec<u64>,
    /// How the last matrix of a layer is stored, as most are.
    pub(super) layer_dtype: DType,
    /// How the matrix of logits is stored.
    pub(super) lm_head_dtype: DType,
}

impl<'a> Counter<'a> {
    pub(super) fn new(
        (weights, isq): (Option<&'a WeightSource>, Option<Isq>),
        devices: PlannedDevices<'a>,
        precision: Precision,
        layers: &'a KvLayers<'a>,
    ) -> Self {
        let (layer_dtype, lm_head_dtype) = (DType::BF16, DType::BF16);
        Self { weights, isq, devices, precision, layers, bytes: vec![0; devices.len()], layer_dtype, lm_head_dtype }
    }

    fn dtype(&self, matrix: &Matrix) -> Result<DType, EngineError> {
        let stored = self.weights.map_or(Ok(DType::BF16), |weights| weights.dtype(matrix))?;
        Ok(match self.isq.filter(|_| !matrix.is_exact) {
            Some(isq) => isq.dtype(stored, matrix.shape[1], matrix.id.layer.is_none()),
            None => stored,
        })
    }

    /// A bias is kept as floats.
    fn bias_bytes(&self, matrix: &Matrix) -> u64 {
        let is_there = matrix.needs_bias || self.weights.is_some_and(|weights| weights.has_bias(matrix));
        if is_there { (matrix.shape[0] * size_of::<f32>()) as u64 } else { 0 }
    }

    /// Adds to the device of the layer; what is no layer's is on the last one.
    fn add(&mut self, layer: Option<usize>, bytes: u64) {
        let device = layer.map_or(self.bytes.len() - 1, |layer| self.layers.device(layer));
        self.bytes[device] += bytes;
    }
}

/// As they are stored: packed forms are the host's.
fn stored_bytes(dtype: DType, [rows, cols]: [usize; 2]) -> u64 {
    dtype.row_bytes(cols).unwrap_or(0) as u64 * rows as u64
}

impl Weights for Counter<'_> {
    fn linear(&mut self, matrix: &Matrix) -> Result<Linear, EngineError> {
        let (shape, dtype, is_lm_head) = (matrix.shape, self.dtype(matrix)?, matrix.id.is_lm_head());
        *(if is_lm_head { &mut self.lm_head_dtype } else { &mut self.layer_dtype }) = dtype;
        let bytes = match self.devices {
            PlannedDevices::Own { backend, .. } if is_lm_head => backend.lm_head_bytes(dtype, shape, self.precision),
            PlannedDevices::Own { backend, .. } if matrix.is_exact => backend.linear_bytes(dtype, shape, Precision::Exact),
            PlannedDevices::Own { backend, .. } => backend.linear_bytes(dtype, shape, self.precision),
            PlannedDevices::Cards(_) => stored_bytes(dtype, shape),
        };
        self.add(matrix.id.layer, bytes + self.bias_bytes(matrix));
        // A token embedding that gives the logits too: its rows are looked up on the first device.
        if matrix.id.role == Role::Embedding && self.bytes.len() > 1 {
            self.bytes[0] += bytes;
        }
        Ok(Linear::new(shape, bytes, false, Arc::new(())))
    }

    fn norm(&mut self, id: WeightId, [number, len]: [usize; 2]) -> Result<Norm, EngineError> {
        let has_bias = self.weights.is_some_and(|weights| weights.contains(id.bias()));
        let vectors = if has_bias { 2 * number } else { number };
        self.add(id.layer, (vectors * len * size_of::<f32>()) as u64);
        Ok(Norm { kind: NormKind::Rms, weight: Arc::default(), bias: None, eps: 0.0 })
    }

    fn vector(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError> {
        self.add(id.layer, (len * size_of::<f32>()) as u64);
        Ok(Constant::default())
    }

    fn values(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError> {
        self.vector(id, len)
    }

    fn table(&mut self, matrix: &Matrix) -> Result<Table, EngineError> {
        let (shape, dtype) = (matrix.shape, self.dtype(matrix)?);
        self.bytes[0] += match self.devices {
            PlannedDevices::Own { backend, .. } if backend.loads_tables() => backend.linear_bytes(dtype, shape, self.precision),
            // Read by rows, as it is stored.
            _ => stored_bytes(dtype, shape),
        };
        Ok(Table::Loaded(Linear::new(shape, 0, false, Arc::new(()))))
    }

    fn table_of_sums(&mut self, [outer, inner]: [usize; 2], _: Option<&Matrix>, of_inner: &Matrix) -> Result<Table, EngineError> {
        let shape = [outer * inner, of_inner.shape[1]];
        self.bytes[0] += match self.devices {
            PlannedDevices::Own { backend, .. } if backend.loads_tables() => {
                backend.linear_bytes(DType::F32, shape, self.precision)
            }
            _ => stored_bytes(DType::F32, shape),
        };
        Ok(Table::Loaded(Linear::new(shape, 0, false, Arc::new(()))))
    }
}
