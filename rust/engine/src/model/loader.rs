//! Loads weights onto a backend.

use std::sync::Arc;

use device::{Backend, Constant, DType, Linear, LinearOptions, Norm, NormKind, Precision, WeightView, mmap::Bytes};

use super::{
    config::{DecoderConfig, NormConfig},
    part::{Table, Weights},
};
use crate::{
    EngineError, Importance, Isq,
    importance::{of_matrix, takes_importance},
    isq::quantize,
    weights::{Matrix, Role, WeightId, WeightSource, floats},
};

/// Loads the weights that it visits.
pub(crate) struct Loader<'a> {
    pub(crate) weights: &'a WeightSource,
    /// What float weights become.
    pub(crate) isq: Option<Isq>,
    /// How much their columns count.
    pub(crate) importance: Option<&'a Importance>,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) backend: &'a dyn Backend,
    pub(crate) precision: Precision,
    /// Called with bytes of the files as they are done.
    pub(crate) progress: &'a dyn Fn(u64),
    /// What is kept so far, pages of the files where weights are used in place.
    pub(crate) bytes: u64,
}

impl Loader<'_> {
    /// A matrix as it is to be kept.
    fn quantized(&self, matrix: &Matrix, name: &str, view: WeightView) -> Result<WeightView, EngineError> {
        let Some(isq) = self.isq.filter(|_| !matrix.is_exact) else { return Ok(view) };
        match isq.dtype(view.dtype, view.cols, matrix.id.layer.is_none()) {
            DType::Ggml(format) if view.dtype != DType::Ggml(format) => {
                let importance = match self.importance.filter(|_| takes_importance(format)) {
                    Some(importance) => of_matrix(importance, self.weights, matrix)?,
                    None => None,
                };
                let quantized = quantize(name, &view, format, importance, self.backend.info().num_threads)?;
                view.release();
                Ok(quantized)
            }
            _ => Ok(view),
        }
    }
}

impl Weights for Loader<'_> {
    fn linear(&mut self, matrix: &Matrix) -> Result<Linear, EngineError> {
        let (id, view) = self.weights.stored(matrix)?;
        let name = self.weights.matrix_name(id, matrix.expert);
        let file_bytes = view.bytes().len() as u64;
        let view = self.quantized(matrix, &name, view)?;
        let is_lm_head = matrix.id.is_lm_head();
        let mut bias = self.weights.bias(matrix)?;
        if is_lm_head {
            for value in bias.iter_mut().flatten() {
                *value *= self.config.logit_scale;
            }
        }
        let precision = if matrix.is_exact { Precision::Exact } else { self.precision };
        let options = LinearOptions { name, precision, bias };
        let backend = self.backend;
        let linear = if is_lm_head { backend.load_lm_head(&view, &options) } else { backend.load_linear(&view, &options) }?;
        if !linear.is_in_place() {
            view.release();
        }
        (self.progress)(file_bytes);
        self.bytes += linear.bytes();
        Ok(linear)
    }

    fn norm(&mut self, id: WeightId, shape: [usize; 2]) -> Result<Norm, EngineError> {
        let NormConfig { kind, eps, offset, has_weights } = self.config.norm;
        let mut weight = if has_weights { self.weights.vectors(id, shape)? } else { vec![1.0; shape[0] * shape[1]] };
        let is_layer = kind == NormKind::Layer;
        let mut bias =
            if is_layer && self.weights.contains(id.bias()) { Some(self.weights.vectors(id.bias(), shape)?) } else { None };
        // GGUF files have the offset added already.
        if matches!(self.weights, WeightSource::Safetensors { .. }) {
            for w in &mut weight {
                *w += offset;
            }
        }
        // Nothing but a product is between it and the logits.
        if matches!(id.role, Role::OutputNorm | Role::MtpOutputNorm) {
            for w in weight.iter_mut().chain(bias.iter_mut().flatten()) {
                *w *= self.config.logit_scale;
            }
        }
        self.bytes += (size_of_val(&weight[..]) + bias.as_deref().map_or(0, size_of_val)) as u64;
        Ok(Norm { kind, weight: weight.into(), bias: bias.map(Arc::new), eps })
    }

    fn vector(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError> {
        self.bytes += (len * size_of::<f32>()) as u64;
        Ok(self.weights.vector(id, len)?.into())
    }

    fn values(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError> {
        self.bytes += (len * size_of::<f32>()) as u64;
        let mut values = self.weights.values(id, len)?;
        // GGUF files have the rate itself.
        if id.role == Role::MixDecay && matches!(self.weights, WeightSource::Safetensors { .. }) {
            for value in &mut values {
                *value = -value.exp();
            }
        }
        Ok(values.into())
    }

    fn table(&mut self, matrix: &Matrix) -> Result<Table, EngineError> {
        let (id, view) = self.weights.stored(matrix)?;
        let (name, file_bytes) = (self.weights.matrix_name(id, matrix.expert), view.bytes().len() as u64);
        let view = self.quantized(matrix, &name, view)?;
        let table = self.loaded_table(name, view)?;
        (self.progress)(file_bytes);
        Ok(table)
    }

    fn table_of_sums(
        &mut self,
        [num_outer, num_inner]: [usize; 2],
        outer: Option<&Matrix>,
        inner: &Matrix,
    ) -> Result<Table, EngineError> {
        let cols = inner.shape[1];
        let (id, of_inner) = self.weights.stored(inner)?;
        let of_outer = outer.map(|outer| self.weights.stored(outer)).transpose()?.map(|(_, view)| view);
        let file_bytes = of_inner.bytes().len() + of_outer.as_ref().map_or(0, |view| view.bytes().len());
        let values = |view: &WeightView| {
            floats(view.dtype, view.bytes())
                .ok_or_else(|| EngineError::NotSupported(format!("a table of positions or of kinds of tokens in {}", view.dtype)))
        };
        let (of_outer, of_inner, zeros) = (of_outer.as_ref().map(values).transpose()?, values(&of_inner)?, vec![0.0; cols]);
        let (mut bytes, len) = (Vec::new(), num_outer.saturating_mul(num_inner * cols * size_of::<f32>()));
        bytes.try_reserve_exact(len).map_err(|e| EngineError::Load(format!("a table of positions of {len} bytes: {e}")))?;
        for row in 0..num_outer {
            let outer = of_outer.as_ref().map_or(&zeros[..], |rows| &rows[row * cols..][..cols]);
            for inner in of_inner.chunks_exact(cols).take(num_inner) {
                bytes.extend(outer.iter().zip(inner).flat_map(|(a, b)| (a + b).to_le_bytes()));
            }
        }
        let view = WeightView::new(DType::F32, num_outer * num_inner, cols, Bytes::from_vec(bytes))?;
        let table = self.loaded_table(self.weights.matrix_name(id, inner.expert), view)?;
        (self.progress)(file_bytes as u64);
        Ok(table)
    }
}

impl Loader<'_> {
    /// A table where its rows are looked up.
    fn loaded_table(&mut self, name: String, view: WeightView) -> Result<Table, EngineError> {
        let table = if self.backend.loads_tables() {
            let options = LinearOptions { name, precision: self.precision, bias: None };
            let linear = self.backend.load_linear(&view, &options)?;
            if !linear.is_in_place() {
                view.release();
            }
            self.bytes += linear.bytes();
            Table::Loaded(linear)
        } else {
            self.bytes += view.bytes().len() as u64;
            Table::Stored(view)
        };
        Ok(table)
    }
}
