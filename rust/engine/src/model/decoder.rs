//! The decoder: weights in the form their backend computes with, and one step over them.

use std::{array, sync::Arc};

use device::{
    AdapterRows, Backend, CacheEngine, EmbedArgs, EmbeddingTable, KvCacheSpec, Linear, Norm, ResidualArgs, StepGraphs,
    StepMetadata, Tensor, TokenMask,
};

use super::{
    altup::{AltUp, StreamTensors, Streams},
    attention::Attention,
    config::{DecoderConfig, ExpertsConfig, FfnConfig, LayerConfig, Norms, ResidualScales},
    cross::{self, CrossAttention, SeenRows, SeenStep},
    dense::Dense,
    experts::Mixture,
    latent::Latent,
    layer_inputs::{LayerInput, LayerInputs},
    mtp::Fusion,
    part::{Buffers, Context, Run, Table, Weights},
    positions::Positions,
    recurrent::RecurrentMixer,
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

/// A decoder: its weights, as a [`Weights`] visitor gave them.
pub struct Decoder {
    /// `None`: the rows of the output projection.
    embedding: Option<Table>,
    embedding_scale: f32,
    embedding_norm: Option<Norm>,
    positions: Option<Positions>,
    /// Of a model whose layers are given more than the residual stream.
    inputs: Option<LayerInputs>,
    /// Of a model with several residual streams.
    streams: Option<Streams>,
    layers: Vec<Layer>,
    /// Its weights, and the bias of `output`, are multiplied by `logit_scale`.
    output_norm: Option<Norm>,
    output: Linear,
    logit_scale: f32,
    /// Of a head that predicts further tokens.
    fusion: Option<Fusion>,
}

/// What a head that predicts further tokens has of its own.
pub(crate) struct Head {
    fusion: Fusion,
    layer: Layer,
    output_norm: Norm,
}

struct Layer {
    /// None, one, or attention and a state beside it, each with what it is multiplied by before it is added.
    mixers: Vec<(Mixer, f32)>,
    ffn: Option<Ffn>,
    attn_norm: Option<Norm>,
    post_attn_norm: Option<Norm>,
    ffn_norm: Option<Norm>,
    post_ffn_norm: Option<Norm>,
    /// The norms after its parts are of the sums with the residual stream.
    norms_of_sums: bool,
    is_parallel: bool,
    /// What the feed-forward network is multiplied by before it is added.
    ffn_scale: f32,
    input: Option<LayerInput>,
    /// Of a model with several residual streams.
    altup: Option<AltUp>,
    /// Multiplied into the residual stream behind it.
    output_scale: Option<f32>,
    /// Columns of its activations.
    columns: Buffers<usize>,
}

/// What mixes tokens.
enum Mixer {
    Attention(Attention),
    Cross(CrossAttention),
    Latent(Latent),
    Recurrent(RecurrentMixer),
}

enum Ffn {
    Dense(Dense),
    Mixture(Box<Mixture>),
}

impl Mixer {
    /// Those of a layer, with what each is multiplied by; `of_attention` is that of the first.
    fn all(
        weights: &mut dyn Weights,
        model: &DecoderConfig,
        config: &LayerConfig,
        layer: usize,
        of_attention: f32,
    ) -> Result<Vec<(Self, f32)>, EngineError> {
        let (attention, hidden) = (&config.attention, model.hidden_size);
        let mut mixers = Vec::new();
        if config.is_cross {
            let number = model.layers[..layer].iter().filter(|layer| layer.is_cross).count();
            let cross = CrossAttention::new(weights, attention, (layer, number), hidden)?;
            mixers.push((Self::Cross(cross), of_attention));
        } else if config.has_attention {
            let attention = match &attention.latent {
                None => Self::Attention(Attention::new(weights, attention, layer, hidden)?),
                Some(latent) => Self::Latent(Latent::new(weights, attention, latent, layer, hidden)?),
            };
            mixers.push((attention, of_attention));
        }
        if let Some(recurrent) = &config.recurrent {
            let mixer = RecurrentMixer::new(weights, (recurrent, config.has_attention), layer, hidden)?;
            mixers.push((Self::Recurrent(mixer), config.residual_scales.recurrent));
        }
        Ok(mixers)
    }

    fn buffers(config: &LayerConfig, hidden: usize) -> Buffers<usize> {
        let attention = &config.attention;
        let of_attention = match &attention.latent {
            _ if config.is_cross => CrossAttention::buffers(attention),
            _ if !config.has_attention => [0; 6],
            None => Attention::buffers(attention),
            Some(latent) => Latent::buffers(attention, latent),
        };
        let of_state = config.recurrent.as_ref().map(|it| RecurrentMixer::buffers(it, config.has_attention, hidden));
        widest(of_attention, of_state.unwrap_or_default())
    }

    fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        match self {
            Self::Attention(attention) => attention.open(norm, cx),
            Self::Cross(cross) => cross.open(norm, cx),
            Self::Latent(latent) => latent.open(norm, cx),
            Self::Recurrent(recurrent) => recurrent.open(norm, cx),
        }
    }

    fn output<'a>(&'a self, buffers: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        match self {
            Self::Attention(attention) => attention.output(buffers),
            Self::Cross(cross) => cross.output(buffers),
            Self::Latent(latent) => latent.output(buffers),
            Self::Recurrent(recurrent) => recurrent.output(buffers),
        }
    }
}

impl Layer {
    fn new(weights: &mut dyn Weights, model: &DecoderConfig, config: &LayerConfig, layer: usize) -> Result<Self, EngineError> {
        let hidden = model.hidden_size;
        let mut norm =
            |is_there: bool, role| is_there.then(|| weights.norm(WeightId::layer(layer, role), [1, hidden])).transpose();
        let ([before_attn, before], [after_attn, after_ffn]) = (config.norms.are_before(), config.norms.are_after());
        let attn_norm = norm(before_attn, Role::AttnNorm)?;
        let post_attn_norm = norm(after_attn, Role::PostAttnNorm)?;
        let ffn_norm = match config.ffn {
            FfnConfig::Nothing => None,
            _ if config.is_parallel && !config.has_own_ffn_norm || !config.mixes() => attn_norm.clone(),
            FfnConfig::Experts(ExpertsConfig { has_own_norms: true, .. }) => norm(before, Role::ExpertNorm)?,
            _ => norm(before, Role::FfnNorm)?,
        };
        let post_ffn_norm = norm(after_ffn, Role::PostFfnNorm)?;
        let ResidualScales { attention, ffn, .. } = config.residual_scales;
        let [of_attention, ffn_scale] = if config.is_cross { CrossAttention::gates(weights, layer)? } else { [attention, ffn] };
        Ok(Self {
            attn_norm,
            post_attn_norm,
            ffn_norm,
            post_ffn_norm,
            norms_of_sums: config.norms == Norms::OfSums,
            mixers: Mixer::all(weights, model, config, layer, of_attention)?,
            ffn: match &config.ffn {
                FfnConfig::Dense(config) => Some(Ffn::Dense(Dense::new(weights, config, layer, hidden)?)),
                FfnConfig::Experts(config) => Some(Ffn::Mixture(Box::new(Mixture::new(weights, config, layer, hidden)?))),
                FfnConfig::Nothing => None,
            },
            is_parallel: config.is_parallel,
            ffn_scale,
            input: model.layer_inputs.map(|config| LayerInput::new(weights, &config, layer, hidden)).transpose()?,
            altup: model.streams.map(|config| AltUp::new(weights, &config, layer, hidden)).transpose()?,
            output_scale: if config.has_output_scale {
                weights.values(WeightId::layer(layer, Role::LayerScale), 1)?.first().copied()
            } else {
                None
            },
            columns: columns(model, config),
        })
    }

    fn run(&self, cx: &mut Context<'_>) {
        let (backend, step) = (cx.run.backend, cx.step);
        for (buffer, columns) in cx.buffers.iter_mut().zip(self.columns) {
            buffer.set_cols(columns);
        }
        if let Some(altup) = &self.altup {
            altup.predict(cx);
        }
        for (mixer, _) in &self.mixers {
            mixer.open(self.attn_norm.as_ref(), cx);
        }
        if let Some(altup) = &self.altup {
            altup.branch(self.attn_norm.as_ref(), cx);
        }
        match &self.ffn {
            Some(Ffn::Dense(dense)) if self.is_parallel => dense.open(self.ffn_norm.as_ref(), cx),
            // Experts add what they give at once, and what mixes tokens has read the hidden state already.
            Some(Ffn::Mixture(mixture)) if self.is_parallel => self.run_mixture(mixture, cx),
            _ => {}
        }
        let add = |(x, linear): (&Tensor, &Linear), norm: &Option<Norm>, scale: f32, residual: &mut Tensor| {
            let (post_norm, of_sum) = if self.norms_of_sums { (None, norm.as_ref()) } else { (norm.as_ref(), None) };
            backend.linear_residual(ResidualArgs { x, linear, post_norm, scale, residual }, step);
            if let Some(norm) = of_sum {
                let phases = backend.elementwise_phases().expect("the plan was refused where nothing normalizes sums");
                phases.normed(residual, norm, None);
            }
        };
        for (mixer, scale) in &self.mixers {
            add(mixer.output(cx.buffers), &self.post_attn_norm, *scale, cx.hidden);
        }
        if self.altup.is_some() {
            AltUp::add_branch(cx);
        }
        match &self.ffn {
            Some(Ffn::Dense(dense)) => {
                if !self.is_parallel {
                    dense.open(self.ffn_norm.as_ref(), cx);
                }
                add(dense.output(cx.buffers), &self.post_ffn_norm, self.ffn_scale, cx.hidden);
            }
            Some(Ffn::Mixture(mixture)) if !self.is_parallel => self.run_mixture(mixture, cx),
            Some(Ffn::Mixture(_)) | None => {}
        }
        if let Some(altup) = &self.altup {
            altup.correct(cx);
        }
        if let Some(input) = &self.input {
            input.run(cx);
        }
        if let Some(factor) = self.output_scale {
            let phases = backend.elementwise_phases().expect("the plan was refused where nothing scales the residual stream");
            phases.scale(cx.hidden, factor);
        }
    }
}

impl Layer {
    fn run_mixture(&self, mixture: &Mixture, cx: &mut Context<'_>) {
        mixture.run(self.ffn_norm.as_ref(), self.post_ffn_norm.as_ref(), self.ffn_scale, cx);
    }

    /// Runs a layer that looks at images on the rows that see some.
    fn look(&self, run: &Run<'_>, a: &mut Activations, seen: &SeenStep, step: &StepMetadata) {
        let (backend, hidden) = (run.backend, a.seen.as_mut().expect("rows were reserved for layers that look at images"));
        backend.begin_step(&seen.step);
        backend.gather_rows(&a.hidden, &seen.rows, hidden);
        let (step_of_rows, buffers) = (&seen.step, &mut a.buffers);
        let (inputs, streams) = (None, None);
        self.run(&mut Context { run: *run, step: step_of_rows, layer: 0, hidden, buffers, inputs, seen: Some(seen), streams });
        backend.fetch(hidden);
        for (own, row) in seen.rows.iter().enumerate() {
            a.hidden.row_mut(*row as usize).copy_from_slice(hidden.row(own));
        }
        let places: Vec<_> = seen.rows.iter().map(|row| *row as usize).collect();
        backend.store_rows(&mut a.hidden, &places);
        backend.begin_step(step);
    }
}

/// What images and sounds are to the rows of a step.
#[derive(Clone, Copy, Default)]
pub struct MediaRows<'a> {
    /// Rows whose tokens have vectors as those of images and sounds are.
    pub hard: &'a [VectorRows],
    /// Rows that are theirs.
    pub own: &'a [VectorRows],
    /// Rows that look at them, of a decoder with layers that do.
    pub seen: &'a [SeenRows],
}

/// Rows of a step that have vectors of their own in place of the token embedding.
pub struct VectorRows {
    /// `[1 + deep, vectors, hidden_size]`: those of rows, then those that are added behind the first layers.
    pub vectors: Arc<Vec<f32>>,
    /// How many there are of a row.
    pub num_planes: usize,
    /// Which row has which of them; rows in ascending order.
    pub rows: Vec<(u32, u32)>,
}

impl VectorRows {
    /// Makes those of plane 0 the rows.
    fn write(&self, backend: &dyn Backend, hidden: &mut Tensor) {
        self.for_each(0, hidden, |hidden, vector| hidden.copy_from_slice(vector));
        backend.store_rows(hidden, &self.places());
    }

    /// Adds those of a plane to the rows.
    fn add(&self, backend: &dyn Backend, plane: usize, hidden: &mut Tensor) {
        let places = self.places();
        backend.fetch_rows(hidden, &places);
        self.for_each(plane, hidden, |hidden, vector| hidden.iter_mut().zip(vector).for_each(|(x, v)| *x += v));
        backend.store_rows(hidden, &places);
    }

    fn places(&self) -> Vec<usize> {
        self.rows.iter().map(|(row, _)| *row as usize).collect()
    }

    /// Calls `work` with each row and its vector of a plane.
    fn for_each(&self, plane: usize, hidden: &mut Tensor, work: impl Fn(&mut [f32], &[f32])) {
        let cols = hidden.cols();
        let vectors = &self.vectors[self.vectors.len() / self.num_planes * plane..];
        for (row, vector) in &self.rows {
            work(hidden.row_mut(*row as usize), &vectors[*vector as usize * cols..][..cols]);
        }
    }
}

/// Activations of a step; rows are tokens.
pub(crate) struct Activations {
    /// `[num_tokens, hidden_size]`: the residual stream.
    pub(crate) hidden: Tensor,
    /// Of the parts of layers.
    buffers: Buffers<Tensor>,
    /// `[num_tokens, 2 * hidden_size]`, of a head that predicts further tokens.
    both: Option<Tensor>,
    /// `[num_tokens, num_layers * width]` each: what layers are given besides, and what it is made of.
    inputs: Option<[Tensor; 2]>,
    streams: Option<StreamTensors>,
    /// `[rows, hidden_size]`: the residual stream of the rows that see images.
    seen: Option<Tensor>,
    sampled: Tensor,
    /// `[rows, vocab_size]`.
    pub(crate) logits: Tensor,
}

impl Activations {
    /// Bytes of the tensors that [`Self::new`] reserves, all rows in use.
    pub(crate) fn bytes(config: &DecoderConfig, max_tokens: usize, max_logit_rows: usize) -> u64 {
        let values = |rows: usize, cols: usize| rows as u64 * cols as u64;
        let both = if config.head_layer.is_some() { 2 * config.hidden_size } else { 0 };
        let seen = if config.is_crossed() { config.hidden_size } else { 0 };
        let beside = 2 * LayerInputs::columns(config) + StreamTensors::columns(config) + seen;
        let of_tokens = values(max_tokens, config.hidden_size + both + beside + buffers(config).iter().sum::<usize>());
        (of_tokens + values(max_logit_rows, config.hidden_size + config.vocab_size)) * size_of::<f32>() as u64
    }

    pub(crate) fn new(
        backend: &dyn Backend,
        config: &DecoderConfig,
        max_tokens: usize,
        max_logit_rows: usize,
    ) -> Result<Self, EngineError> {
        let alloc = |argument: &str, rows: usize, cols: usize| {
            backend.alloc(rows, cols).map_err(|e| {
                EngineError::InvalidArgument(format!(
                    "{argument} asks for {rows} rows of activations: {e}; a smaller one may work"
                ))
            })
        };
        let tokens = |cols| alloc("max_num_batched_tokens", max_tokens, cols);
        let logit_rows = |cols| alloc("max_num_seqs", max_logit_rows, cols);
        let [q, k, v, attention, gate, ffn] = buffers(config).map(tokens);
        Ok(Self {
            hidden: tokens(config.hidden_size)?,
            buffers: [q?, k?, v?, attention?, gate?, ffn?],
            both: config.head_layer.map(|_| tokens(2 * config.hidden_size)).transpose()?,
            inputs: match LayerInputs::columns(config) {
                0 => None,
                columns => Some([tokens(columns)?, tokens(columns)?]),
            },
            streams: config.streams.map(|streams| StreamTensors::new(&streams, config.hidden_size, tokens)).transpose()?,
            seen: config.is_crossed().then(|| tokens(config.hidden_size)).transpose()?,
            sampled: logit_rows(config.hidden_size)?,
            logits: logit_rows(config.vocab_size)?,
        })
    }
}

/// The columns of each buffer, as a layer uses them.
fn columns(model: &DecoderConfig, layer: &LayerConfig) -> Buffers<usize> {
    let of_ffn = match &layer.ffn {
        FfnConfig::Dense(config) => Dense::buffers(config),
        // The backend keeps what it needs.
        FfnConfig::Experts(_) | FfnConfig::Nothing => [0; 6],
    };
    let of_mixer = Mixer::buffers(layer, model.hidden_size);
    let of_input = model.layer_inputs.as_ref().map_or([0; 6], LayerInput::buffers);
    let of_streams = model.streams.as_ref().map_or([0; 6], AltUp::buffers);
    array::from_fn(|i| [of_mixer[i], of_ffn[i], of_input[i], of_streams[i]].into_iter().max().unwrap_or(0))
}

fn widest(a: Buffers<usize>, b: Buffers<usize>) -> Buffers<usize> {
    array::from_fn(|i| a[i].max(b[i]))
}

/// The same, wide enough for all layers.
fn buffers(config: &DecoderConfig) -> Buffers<usize> {
    config.layers.iter().map(|layer| columns(config, layer)).fold([0; 6], widest)
}

impl Decoder {
    /// Asks for all weights, each once.
    pub(crate) fn new(weights: &mut dyn Weights, config: &DecoderConfig) -> Result<Self, EngineError> {
        let of_vocab = |role| Matrix::new(WeightId::global(role), [config.vocab_size, config.hidden_size], false);
        let is_tied = config.tie_word_embeddings;
        let num_rows = config.vocab_size + config.num_further_rows;
        let table = Matrix::new(WeightId::global(Role::Embedding), [num_rows, config.hidden_size], false);
        let embedding = if is_tied { None } else { Some(weights.table(&table)?) };
        // Before the layers: it is the largest matrix, and while it is packed it lies twice.
        let output = weights.linear(&of_vocab(if is_tied { Role::Embedding } else { Role::Output }))?;
        let embedding_norm = WeightId::global(Role::EmbeddingNorm);
        let embedding_norm = config.embedding_norm.then(|| weights.norm(embedding_norm, [1, config.hidden_size])).transpose()?;
        let inputs = LayerInputs::new(weights, config)?;
        let streams = config.streams.map(|streams| Streams::new(weights, &streams, config.hidden_size)).transpose()?;
        let positions = Positions::new(weights, config)?;
        let layer = |(i, layer)| Layer::new(weights, config, layer, i);
        Ok(Self {
            embedding,
            embedding_scale: config.embedding_scale,
            embedding_norm,
            positions,
            inputs,
            streams,
            layers: config.layers.iter().enumerate().map(layer).collect::<Result<_, _>>()?,
            output_norm: config
                .output_norm
                .then(|| weights.norm(WeightId::global(Role::OutputNorm), [1, config.hidden_size]))
                .transpose()?,
            output,
            logit_scale: config.logit_scale,
            fusion: None,
        })
    }

    /// Computes with the token embedding and the output projection of this model from now on.
    pub(crate) fn share(&mut self, model: &Self) {
        (self.embedding, self.output) = (model.embedding.clone(), model.output.clone());
    }

    /// The same of a head that predicts further tokens: each row goes on from the hidden state that `before` writes for it,
    /// behind the output norm of whoever made it.
    pub(crate) fn forward_head(
        &self,
        run: &Run<'_>,
        a: &mut Activations,
        token_ids: &[u32],
        before: &mut dyn FnMut(usize, &mut [f32]),
        step: &StepMetadata,
    ) {
        run.backend.begin_step(step);
        self.embed(run.backend, token_ids, step, &mut a.hidden);
        if let (Some(fusion), Some(both)) = (&self.fusion, &mut a.both) {
            fusion.run(run.backend, &mut a.hidden, both, before, step);
        }
        self.layers(run, a, MediaRows::default(), step);
    }

    /// A row of the hidden state behind the output norm, from the host's copy.
    pub(crate) fn hidden_state(&self, a: &Activations, row: usize, out: &mut [f32]) {
        out.copy_from_slice(a.hidden.row(row));
        self.normalize(out);
    }

    /// Applies the output norm, unscaled.
    fn normalize(&self, row: &mut [f32]) {
        let Some(norm) = &self.output_norm else { return };
        norm.apply(row);
        for value in row {
            *value /= self.logit_scale;
        }
    }

    /// Runs the layers over the step's tokens, of which some rows have other vectors than their token's: fills `a.hidden` and the
    /// KV slots of the step.
    pub(crate) fn forward(
        &self,
        run: &Run<'_>,
        graphs: &mut StepGraphs,
        a: &mut Activations,
        (token_ids, images): (&[u32], MediaRows<'_>),
        step: &StepMetadata,
    ) {
        let backend = run.backend;
        let mut recorded = |token_ids: &[u32], step: &StepMetadata| {
            self.embed(backend, token_ids, step, &mut a.hidden);
            self.add_positions(backend, step, &mut a.hidden);
            self.layer_inputs(backend, a, (token_ids, &[]), step);
            self.layers(run, a, MediaRows::default(), step);
        };
        if let Some(recorder) =
            backend.recorder().filter(|_| images.hard.is_empty() && images.own.is_empty() && images.seen.is_empty())
            && recorder.begin_recorded(graphs, token_ids, step, &mut recorded)
        {
            recorder.replay(graphs);
            a.hidden.set_rows(token_ids.len());
            return;
        }
        backend.begin_step(step);
        self.embed(backend, token_ids, step, &mut a.hidden);
        for images in images.hard.iter().chain(images.own) {
            images.write(backend, &mut a.hidden);
        }
        self.add_positions(backend, step, &mut a.hidden);
        self.layer_inputs(backend, a, (token_ids, images.own), step);
        self.layers(run, a, images, step);
    }

    fn embed(&self, backend: &dyn Backend, token_ids: &[u32], step: &StepMetadata, hidden: &mut Tensor) {
        let table = self.embedding.as_ref().map_or(EmbeddingTable::Loaded(&self.output), Table::view);
        let args = EmbedArgs { table, token_ids, beyond: None, adapters: &step.adapters, scale: self.embedding_scale };
        backend.embed(&args, hidden);
        if self.positions.is_none() {
            self.normalize_embeddings(backend, hidden);
        }
    }

    fn add_positions(&self, backend: &dyn Backend, step: &StepMetadata, hidden: &mut Tensor) {
        if let Some(positions) = &self.positions {
            positions.add(backend, hidden, step);
            self.normalize_embeddings(backend, hidden);
        }
    }

    fn normalize_embeddings(&self, backend: &dyn Backend, hidden: &mut Tensor) {
        if let Some(norm) = &self.embedding_norm {
            let phases = backend.elementwise_phases().expect("the plan was refused where nothing normalizes embeddings");
            phases.normed(hidden, norm, None);
        }
    }

    fn layer_inputs(&self, backend: &dyn Backend, a: &mut Activations, tokens: (&[u32], &[VectorRows]), step: &StepMetadata) {
        if let (Some(inputs), Some(tensors)) = (&self.inputs, &mut a.inputs) {
            inputs.run(backend, &a.hidden, tensors, tokens, step);
        }
    }

    fn layers(&self, run: &Run<'_>, a: &mut Activations, images: MediaRows<'_>, step: &StepMetadata) {
        let seen = SeenStep::new(images.seen);
        if let (Some(streams), Some(tensors)) = (&self.streams, &mut a.streams) {
            streams.split(run.backend, &a.hidden, tensors, step);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            if let [(Mixer::Cross(_), _)] = layer.mixers[..] {
                if let Some(seen) = &seen {
                    layer.look(run, a, seen, step);
                }
                continue;
            }
            let number = run.first_layer + index;
            let inputs = a.inputs.as_ref().map(|[inputs, _]| inputs);
            let (hidden, buffers) = (&mut a.hidden, &mut a.buffers);
            let streams = a.streams.as_mut();
            layer.run(&mut Context { run: *run, step, layer: number, hidden, buffers, inputs, seen: None, streams });
            for images in images.own.iter().filter(|images| index + 1 < images.num_planes) {
                images.add(run.backend, index + 1, &mut a.hidden);
            }
        }
        if let (Some(streams), Some(tensors)) = (&self.streams, &mut a.streams) {
            streams.join(run.backend, &mut a.hidden, tensors, step);
        }
    }

    /// What the layers that look at images make of the vectors of one, `[rows, hidden_size]`, in a storage like `spec`.
    ///
    /// # Errors
    /// Those of a device that has no memory for it.
    pub(crate) fn keep(&self, backend: &dyn Backend, vectors: &[f32], spec: &KvCacheSpec) -> Result<CacheEngine, EngineError> {
        let layers = self.layers.iter().flat_map(|layer| &layer.mixers).filter_map(|(mixer, _)| match mixer {
            Mixer::Cross(cross) => Some(cross),
            _ => None,
        });
        cross::keep(&layers, backend, (vectors, self.output.in_features), spec)
    }

    /// These rows of the hidden state behind the output norm, unscaled, on the host.
    pub(crate) fn vectors<'a>(&self, backend: &dyn Backend, a: &'a mut Activations, rows: &[u32]) -> &'a Tensor {
        backend.gather_rows(&a.hidden, rows, &mut a.sampled);
        backend.fetch(&mut a.sampled);
        let cols = a.sampled.cols();
        a.sampled.as_mut_slice().chunks_exact_mut(cols).for_each(|row| self.normalize(row));
        &a.sampled
    }

    /// Logits of these rows of the hidden state, into `a.logits` on the device; before any softcap, see [`softcap`]. Where the
    /// backend finds the tokens of their largest without all of them, and there is a place for these, it does that and returns
    /// true. `adapters` are those of the step.
    pub(crate) fn logits(
        &self,
        backend: &dyn Backend,
        a: &mut Activations,
        rows: &[u32],
        adapters: &[AdapterRows],
        greedy: Option<Search<'_>>,
    ) -> bool {
        backend.gather_rows(&a.hidden, rows, &mut a.sampled);
        let (norm, linear) = (self.output_norm.as_ref(), &self.output);
        let are_touched = AdapterRows::touch(adapters, [linear]);
        let adapters = if are_touched { AdapterRows::of_chosen(adapters, &rows.iter().copied()) } else { Vec::new() };
        let greedy = greedy.filter(|_| adapters.is_empty());
        if greedy.is_some_and(|Search { masks, tokens }| backend.greedy_tokens(&a.sampled, norm, linear, masks, tokens)) {
            return true;
        }
        backend.logits(&a.sampled, norm, linear, &adapters, &mut a.logits);
        false
    }
}

impl Head {
    /// Asks for its own weights, each once.
    pub(crate) fn new(weights: &mut dyn Weights, config: &DecoderConfig) -> Result<Self, EngineError> {
        let (Some(number), [layer]) = (config.head_layer, &config.layers[..]) else {
            return Err(EngineError::Internal("a model was to be loaded as a head".into()));
        };
        Ok(Self {
            fusion: Fusion::new(weights, number, config.hidden_size)?,
            layer: Layer::new(weights, config, layer, number)?,
            output_norm: weights.norm(WeightId::layer(number, Role::MtpOutputNorm), [1, config.hidden_size])?,
        })
    }

    /// Together with what it shares with its model.
    pub(crate) fn beside(self, model: &Decoder) -> Decoder {
        Decoder {
            embedding: model.embedding.clone(),
            embedding_scale: model.embedding_scale,
            embedding_norm: model.embedding_norm.clone(),
            positions: None,
            inputs: None,
            streams: None,
            layers: vec![self.layer],
            output_norm: Some(self.output_norm),
            output: model.output.clone(),
            logit_scale: model.logit_scale,
            fusion: Some(self.fusion),
        }
    }
}

/// A search for the largest logits of rows; see [`Backend::greedy_tokens`].
pub(crate) struct Search<'a> {
    pub(crate) masks: &'a [Option<TokenMask<'a>>],
    pub(crate) tokens: &'a mut Vec<u32>,
}

/// `cap * tanh(x / cap)`, which some models end with.
pub(crate) fn softcap(logits: &mut [f32], cap: Option<f32>) {
    if let Some(cap) = cap {
        for x in logits {
            *x = cap * (*x / cap).tanh();
        }
    }
}
