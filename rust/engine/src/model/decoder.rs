//! The decoder: weights in the form their backend computes with, and one step over them.

use device::{
    AttentionArgs, AttentionParams, Backend, CacheEngine, DeviceError, EmbedArgs, EmbeddingTable, GateUpArgs, Linear,
    LinearOptions, Norm, NormKind, Precision, Projection, ResidualArgs, RopeArgs, StepGraphs, StepMetadata, Tensor, WeightView,
};
use paged::KvGroups;

use super::{config::DecoderConfig, rope::GrowingRope};
use crate::{
    EngineError,
    weights::{Part, WeightId, WeightSource},
};

/// The weights of a decoder.
pub struct Decoder {
    /// `None`: the rows of the output projection.
    embedding: Option<WeightView>,
    layers: Vec<Layer>,
    output_norm: Norm,
    output: Linear,
}

struct Layer {
    attn_norm: Norm,
    q: Linear,
    k: Linear,
    v: Linear,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    attn_output: Linear,
    post_attn_norm: Option<Norm>,
    ffn_norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
    post_ffn_norm: Option<Norm>,
    attention: AttentionParams,
    rope: usize,
    group: usize,
    plane: usize,
}

/// Activations of a step; rows are tokens.
pub(crate) struct Activations {
    /// `[num_tokens, hidden_size]`: the residual stream.
    pub(crate) hidden: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Tensor,
    ffn: Tensor,
    sampled: Tensor,
    /// `[rows, vocab_size]`.
    pub(crate) logits: Tensor,
}

impl Activations {
    /// Columns of the hidden state, of q and attention, of k and v, of the feed-forward network.
    fn widths(config: &DecoderConfig) -> [usize; 4] {
        let head = |num_heads: usize| num_heads * config.head_dim;
        [config.hidden_size, head(config.num_heads), head(config.num_kv_heads), config.intermediate_size]
    }

    /// Bytes of the tensors that [`Self::new`] reserves, all rows in use.
    pub(crate) fn bytes(config: &DecoderConfig, max_tokens: usize, max_logit_rows: usize) -> u64 {
        let [hidden, q, kv, ffn] = Self::widths(config);
        let values = |rows: usize, cols: usize| rows as u64 * cols as u64;
        (values(max_tokens, hidden + 2 * q + 2 * kv + ffn) + values(max_logit_rows, hidden + config.vocab_size))
            * size_of::<f32>() as u64
    }

    pub(crate) fn new(
        backend: &dyn Backend,
        config: &DecoderConfig,
        max_tokens: usize,
        max_logit_rows: usize,
    ) -> Result<Self, EngineError> {
        let [hidden, q, kv, ffn] = Self::widths(config);
        let alloc = |argument: &str, rows: usize, cols: usize| {
            backend.alloc(rows, cols).map_err(|e| {
                EngineError::InvalidArgument(format!(
                    "{argument} asks for {rows} rows of activations: {e}; a smaller one may work"
                ))
            })
        };
        let tokens = |cols| alloc("max_num_batched_tokens", max_tokens, cols);
        let logit_rows = |cols| alloc("max_num_seqs", max_logit_rows, cols);
        Ok(Self {
            hidden: tokens(hidden)?,
            q: tokens(q)?,
            k: tokens(kv)?,
            v: tokens(kv)?,
            attention: tokens(q)?,
            ffn: tokens(ffn)?,
            sampled: logit_rows(hidden)?,
            logits: logit_rows(config.vocab_size)?,
        })
    }
}

/// What loading needs to know.
pub(crate) struct Loader<'a> {
    pub(crate) weights: &'a WeightSource,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) backend: &'a dyn Backend,
    pub(crate) precision: Precision,
    /// Called with bytes as they are done.
    pub(crate) progress: &'a dyn Fn(u64),
}

impl Loader<'_> {
    pub(crate) fn decoder(&self, groups: &KvGroups) -> Result<Decoder, EngineError> {
        let config = self.config;
        let vocab = [config.vocab_size, config.hidden_size];
        let embedding = self.weights.matrix(WeightId::global(Part::Embedding), vocab)?;
        let layers = (0..config.layers.len()).map(|i| self.layer(i, groups)).collect::<Result<_, _>>()?;
        let output_norm = self.norm(WeightId::global(Part::OutputNorm), config.hidden_size)?;
        let (embedding, output) = if config.tie_word_embeddings {
            (None, self.lm_head(WeightId::global(Part::Embedding), &embedding, None)?)
        } else {
            (self.progress)(embedding.bytes().len() as u64);
            let id = WeightId::global(Part::Output);
            (
                Some(embedding),
                self.lm_head(id, &self.weights.matrix(id, vocab)?, self.weights.optional_vector(id.bias(), vocab[0])?)?,
            )
        };
        Ok(Decoder { embedding, layers, output_norm, output })
    }

    fn layer(&self, i: usize, groups: &KvGroups) -> Result<Layer, EngineError> {
        let config = self.config;
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let id = |part| WeightId::layer(i, part);
        let (group, plane) = groups.layer_slot(i).ok_or_else(|| EngineError::Internal(format!("layer {i} is in no KV group")))?;
        let q_rows = config.num_heads * head_dim;
        let kv_rows = config.num_kv_heads * head_dim;
        let [q, k, v] = self.fused([(Part::AttnQ, q_rows), (Part::AttnK, kv_rows), (Part::AttnV, kv_rows)], Part::AttnQkv, i)?;
        let [gate, up] =
            self.fused([(Part::FfnGate, config.intermediate_size), (Part::FfnUp, config.intermediate_size)], Part::FfnGateUp, i)?;
        let norm_if = |wanted: bool, part, len| wanted.then(|| self.norm(id(part), len)).transpose();
        Ok(Layer {
            attn_norm: self.norm(id(Part::AttnNorm), hidden)?,
            q,
            k,
            v,
            q_norm: norm_if(config.qk_norm, Part::AttnQNorm, head_dim)?,
            k_norm: norm_if(config.qk_norm, Part::AttnKNorm, head_dim)?,
            attn_output: self.matrix(id(Part::AttnOutput), [hidden, q_rows])?,
            post_attn_norm: norm_if(config.sandwich_norms, Part::PostAttnNorm, hidden)?,
            ffn_norm: self.norm(id(Part::FfnNorm), hidden)?,
            gate,
            up,
            down: self.matrix(id(Part::FfnDown), [hidden, config.intermediate_size])?,
            post_ffn_norm: norm_if(config.sandwich_norms, Part::PostFfnNorm, hidden)?,
            attention: AttentionParams {
                num_heads: config.num_heads,
                num_kv_heads: config.num_kv_heads,
                head_dim,
                scale: config.attention_scale,
                window: config.layers[i].window,
                softcap: config.attention_softcap,
                precision: self.precision,
            },
            rope: config.layers[i].rope,
            group,
            plane,
        })
    }

    /// Projections of the hidden state that some checkpoints keep as one matrix, one after the other.
    fn fused<const N: usize>(&self, parts: [(Part, usize); N], whole: Part, layer: usize) -> Result<[Linear; N], EngineError> {
        let cols = self.config.hidden_size;
        let mut linears = Vec::with_capacity(N);
        if self.weights.contains(WeightId::layer(layer, parts[0].0)) {
            for (part, rows) in parts {
                linears.push(self.matrix(WeightId::layer(layer, part), [rows, cols])?);
            }
        } else {
            let id = WeightId::layer(layer, whole);
            let all_rows = parts.iter().map(|(_, rows)| rows).sum();
            let view = self.weights.matrix(id, [all_rows, cols])?;
            let bias = self.weights.optional_vector(id.bias(), all_rows)?;
            let mut start = 0;
            for (_, rows) in parts {
                let end = start + rows;
                let bias = bias.as_ref().map(|b| b[start..end].to_vec());
                linears.push(self.linear(id, &view.slice_rows(start, end)?, bias)?);
                start = end;
            }
        }
        linears.try_into().map_err(|_| EngineError::Internal("a projection was lost".into()))
    }

    fn matrix(&self, id: WeightId, shape: [usize; 2]) -> Result<Linear, EngineError> {
        let view = self.weights.matrix(id, shape)?;
        let needed = self.config.qkv_bias && matches!(id.part, Part::AttnQ | Part::AttnK | Part::AttnV);
        let bias = if needed {
            Some(self.weights.vector(id.bias(), shape[0])?)
        } else {
            self.weights.optional_vector(id.bias(), shape[0])?
        };
        self.linear(id, &view, bias)
    }

    fn linear(&self, id: WeightId, view: &WeightView, bias: Option<Vec<f32>>) -> Result<Linear, EngineError> {
        self.load(id, view, bias, &|options| self.backend.load_linear(view, options))
    }

    fn lm_head(&self, id: WeightId, view: &WeightView, bias: Option<Vec<f32>>) -> Result<Linear, EngineError> {
        self.load(id, view, bias, &|options| self.backend.load_lm_head(view, options))
    }

    fn load(
        &self,
        id: WeightId,
        view: &WeightView,
        bias: Option<Vec<f32>>,
        load: &dyn Fn(&LinearOptions) -> Result<Linear, DeviceError>,
    ) -> Result<Linear, EngineError> {
        let linear = load(&LinearOptions { name: self.weights.name(id), precision: self.precision, bias })?;
        if !linear.is_in_place() {
            view.release();
        }
        (self.progress)(view.bytes().len() as u64);
        Ok(linear)
    }

    fn norm(&self, id: WeightId, len: usize) -> Result<Norm, EngineError> {
        let mut weight = self.weights.vector(id, len)?;
        // GGUF files have the offset added already.
        if matches!(self.weights, WeightSource::Safetensors { .. }) {
            for w in &mut weight {
                *w += self.config.norm_offset;
            }
        }
        Ok(Norm { kind: NormKind::Rms, weight: weight.into(), bias: None, eps: self.config.norm_eps })
    }
}

impl Decoder {
    /// Runs the layers over the step's tokens: fills `a.hidden` and the KV slots of the step.
    pub(crate) fn forward(
        &self,
        run: &Run<'_>,
        graphs: &mut StepGraphs,
        a: &mut Activations,
        token_ids: &[u32],
        step: &StepMetadata,
    ) {
        let Run { backend, config, .. } = *run;
        let recorded = backend.begin_recorded(graphs, step, &mut |step| {
            a.hidden.set_rows(step.positions.len());
            self.layers(run, a, step);
        });
        if !recorded {
            backend.begin_step(step);
        }
        let table = self.embedding.as_ref().map_or(EmbeddingTable::Tied(&self.output), EmbeddingTable::Stored);
        backend.embed(&EmbedArgs { table, token_ids, scale: config.embedding_scale }, &mut a.hidden);
        if recorded {
            backend.replay(graphs);
        } else {
            self.layers(run, a, step);
        }
    }

    fn layers(&self, run: &Run<'_>, a: &mut Activations, step: &StepMetadata) {
        let Run { backend, config, cache, ropes } = *run;
        for layer in &self.layers {
            let projections = &mut [
                Projection { linear: &layer.q, out: &mut a.q },
                Projection { linear: &layer.k, out: &mut a.k },
                Projection { linear: &layer.v, out: &mut a.v },
            ];
            backend.norm_linear(&a.hidden, Some(&layer.attn_norm), projections);
            let args = RopeArgs {
                q: &mut a.q,
                k: &mut a.k,
                v: &a.v,
                q_norm: layer.q_norm.as_ref(),
                k_norm: layer.k_norm.as_ref(),
                rope: Some(ropes[layer.rope].table()),
                cache,
                plane: layer.plane,
            };
            backend.rope_and_cache(args, layer.group, step);
            let args = AttentionArgs {
                q: &a.q,
                out: &mut a.attention,
                cache,
                plane: layer.plane,
                group: layer.group,
                params: layer.attention,
            };
            backend.attention(args, step);
            backend.linear_residual(ResidualArgs {
                x: &a.attention,
                linear: &layer.attn_output,
                post_norm: layer.post_attn_norm.as_ref(),
                scale: 1.0,
                residual: &mut a.hidden,
            });
            backend.gate_up(GateUpArgs {
                x: &a.hidden,
                norm: Some(&layer.ffn_norm),
                gate: &layer.gate,
                up: &layer.up,
                activation: config.activation,
                out: &mut a.ffn,
            });
            backend.linear_residual(ResidualArgs {
                x: &a.ffn,
                linear: &layer.down,
                post_norm: layer.post_ffn_norm.as_ref(),
                scale: 1.0,
                residual: &mut a.hidden,
            });
        }
    }

    /// Bytes of all weights as they are kept, those of files where they are used in place.
    pub(crate) fn weight_bytes(&self) -> u64 {
        let norm = |norm: &Norm| size_of_val(&norm.weight[..]) as u64;
        let layer = |layer: &Layer| {
            let Layer {
                attn_norm,
                q,
                k,
                v,
                q_norm,
                k_norm,
                attn_output,
                post_attn_norm,
                ffn_norm,
                gate,
                up,
                down,
                post_ffn_norm,
                ..
            } = layer;
            let linears: u64 = [q, k, v, attn_output, gate, up, down].into_iter().map(Linear::bytes).sum();
            let optional = [q_norm, k_norm, post_attn_norm, post_ffn_norm].into_iter().flatten();
            linears + [attn_norm, ffn_norm].into_iter().chain(optional).map(norm).sum::<u64>()
        };
        let embedding = self.embedding.as_ref().map_or(0, |view| view.bytes().len() as u64);
        embedding + self.layers.iter().map(layer).sum::<u64>() + norm(&self.output_norm) + self.output.bytes()
    }

    /// These rows of the hidden state behind the output norm, on the host.
    pub(crate) fn vectors<'a>(&self, backend: &dyn Backend, a: &'a mut Activations, rows: &[u32]) -> &'a Tensor {
        backend.gather_rows(&a.hidden, rows, &mut a.sampled);
        backend.fetch(&mut a.sampled);
        let cols = a.sampled.cols();
        a.sampled.as_mut_slice().chunks_exact_mut(cols).for_each(|row| self.output_norm.apply(row));
        &a.sampled
    }

    /// Logits of these rows of the hidden state, into `a.logits` on the device; before any softcap, see [`softcap`]. Where the backend finds
    /// the tokens of their largest without all of them, and there is a place for these, it does that and returns true.
    pub(crate) fn logits(&self, backend: &dyn Backend, a: &mut Activations, rows: &[u32], greedy: Option<&mut Vec<u32>>) -> bool {
        backend.gather_rows(&a.hidden, rows, &mut a.sampled);
        let (norm, linear) = (Some(&self.output_norm), &self.output);
        if greedy.is_some_and(|tokens| backend.greedy_tokens(&a.sampled, norm, linear, tokens)) {
            return true;
        }
        backend.norm_linear(&a.sampled, norm, &mut [Projection { linear, out: &mut a.logits }]);
        false
    }
}

/// `cap * tanh(x / cap)`, which some models end with.
pub(crate) fn softcap(logits: &mut [f32], cap: Option<f32>) {
    if let Some(cap) = cap {
        for x in logits {
            *x = cap * (*x / cap).tanh();
        }
    }
}

/// What a step runs with.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) cache: &'a CacheEngine,
    pub(crate) ropes: &'a [GrowingRope],
}
