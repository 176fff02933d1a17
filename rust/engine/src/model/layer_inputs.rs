//! What each layer is given besides the residual stream: a vector of each token and layer, made of a table and of the token's
//! embedding before the first layer (per-layer embeddings of Gemma 3n and Gemma 4).

use device::{
    Activation, Backend, EmbedArgs, GateUpArgs, LayerInputArgs, Linear, Norm, Projection, ResidualArgs, StepMetadata, Tensor,
};

use super::{
    config::{DecoderConfig, LayerInputsConfig},
    decoder::VectorRows,
    part::{Buffers, Context, Table, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

/// What makes the vectors of all layers.
pub(crate) struct LayerInputs {
    width: usize,
    pad_token_id: u32,
    table: Table,
    projection: Linear,
    norm: Norm,
}

/// How a layer takes its vector.
pub(crate) struct LayerInput {
    activation: Activation,
    width: usize,
    /// Where it begins among those of all layers.
    first: usize,
    gate: Linear,
    output: Linear,
    norm: Norm,
}

impl LayerInputs {
    /// Asks for the weights of a model that has such inputs.
    pub(crate) fn new(weights: &mut dyn Weights, config: &DecoderConfig) -> Result<Option<Self>, EngineError> {
        let Some(LayerInputsConfig { width, vocab_size, pad_token_id, .. }) = config.layer_inputs else { return Ok(None) };
        let cols = width * config.layers.len();
        let table = weights.table(&Matrix::new(WeightId::global(Role::LayerTokens), [vocab_size, cols], false))?;
        let projection = Matrix::new(WeightId::global(Role::LayerProjection), [cols, config.hidden_size], false);
        let projection = weights.linear(&projection)?;
        let mut norm = weights.norm(WeightId::global(Role::LayerProjectionNorm), [1, width])?;
        // The norm of the product times `1 / sqrt(hidden_size)`, which is the norm of the product with another epsilon.
        norm.eps *= config.hidden_size as f32;
        Ok(Some(Self { width, pad_token_id, table, projection, norm }))
    }

    /// Columns of each of the two tensors that [`Self::run`] takes; 0 for a model without.
    pub(crate) fn columns(config: &DecoderConfig) -> usize {
        config.layer_inputs.map_or(0, |inputs| inputs.width * config.layers.len())
    }

    /// Fills the first tensor, `[num_tokens, num_layers * width]`, from the embeddings of the step's tokens, of which these rows
    /// have others than their tokens'.
    pub(crate) fn run(
        &self,
        backend: &dyn Backend,
        hidden: &Tensor,
        [inputs, tokens]: &mut [Tensor; 2],
        (token_ids, images): (&[u32], &[VectorRows]),
        step: &StepMetadata,
    ) {
        let mut without_images = Vec::new();
        let token_ids = if images.is_empty() {
            token_ids
        } else {
            without_images.extend_from_slice(token_ids);
            for (row, _) in images.iter().flat_map(|images| &images.rows) {
                without_images[*row as usize] = self.pad_token_id;
            }
            &without_images[..]
        };
        let phases = backend.elementwise_phases().expect("the plan was refused where nothing computes inputs of layers");
        backend.norm_linear(hidden, None, &mut [Projection { linear: &self.projection, out: inputs }], step);
        let scale = (self.width as f32).sqrt();
        backend.embed(
            &EmbedArgs { table: self.table.view(), token_ids, beyond: Some(self.pad_token_id), adapters: &[], scale },
            tokens,
        );
        phases.layer_inputs(LayerInputArgs { x: inputs, tokens, norm: &self.norm, scale: std::f32::consts::FRAC_1_SQRT_2 });
    }
}

impl LayerInput {
    /// Asks for the weights of a layer.
    pub(crate) fn new(
        weights: &mut dyn Weights,
        config: &LayerInputsConfig,
        layer: usize,
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let (id, width) = (|role| WeightId::layer(layer, role), config.width);
        Ok(Self {
            activation: config.activation,
            width,
            first: layer * width,
            gate: weights.linear(&Matrix::new(id(Role::LayerInputGate), [width, hidden], false))?,
            output: weights.linear(&Matrix::new(id(Role::LayerInputOutput), [hidden, width], false))?,
            norm: weights.norm(id(Role::LayerInputNorm), [1, hidden])?,
        })
    }

    pub(crate) fn buffers(config: &LayerInputsConfig) -> Buffers<usize> {
        [0, 0, 0, 0, 0, config.width]
    }

    /// Adds to the hidden state what the layer makes of its vector; of several residual streams, to all but the first.
    pub(crate) fn run(&self, cx: &mut Context<'_>) {
        let (backend, step, inputs) = (cx.run.backend, cx.step, cx.inputs.expect("inputs of the layers of this step"));
        let [.., out] = &mut *cx.buffers;
        out.set_cols(self.width);
        let args =
            GateUpArgs { x: cx.hidden, norm: None, gate: None, up: &self.gate, activation: self.activation, out, next: None };
        backend.gate_up(args, step);
        let phases = backend.elementwise_phases().expect("the plan was refused where nothing computes inputs of layers");
        phases.multiply(out, inputs, self.first);
        let add = |residual: &mut Tensor| {
            let (linear, post_norm) = (&self.output, Some(&self.norm));
            backend.linear_residual(ResidualArgs { x: out, linear, post_norm, scale: 1.0, residual }, step);
        };
        match &mut cx.streams {
            None => add(cx.hidden),
            Some(streams) => streams.others().for_each(add),
        }
    }
}
