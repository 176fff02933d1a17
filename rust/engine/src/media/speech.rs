//! The conformer of Phi-4-multimodal, which hears (arXiv:2503.01743): products of the backend, and between them plain steps on
//! the host over rows of places in time.

mod stem;

use device::{Activation, Backend, Constant, Linear, Norm, NormKind};
use images::Tile;

use super::{
    conformer::{add, apply, by_rows, dot, over_time, product},
    weights::TowerWeights,
};
use crate::EngineError;
use stem::Stem;

/// Places that see each other. A longer sound has several such parts, the last of which is filled up with zeros.
const PART: usize = audio::Phi4::PART;
/// Added to variances.
const EPS: f32 = 1e-5;

/// What it is like.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechConfig {
    /// Values of a frame of the features.
    pub num_mel_bins: usize,
    /// Frames of a place: a power of two.
    pub reduction: usize,
    /// Channels of the convolutions before the layers.
    pub channels: usize,
    /// Of these convolutions.
    pub stem_activation: Activation,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Columns of the feed-forward networks.
    pub intermediate_size: usize,
    /// Heads of queries, keys and values.
    pub num_heads: usize,
    /// Layers.
    pub num_layers: usize,
    /// Places that the convolution over time sees: its own and those before.
    pub kernel_size: usize,
    /// Distances, to either side, that scores tell apart.
    pub max_distance: usize,
    /// Of the feed-forward networks' gates.
    pub activation: Activation,
    /// Of the gate before the convolution over time.
    pub gate_activation: Activation,
    /// Behind that convolution.
    pub conv_activation: Activation,
}

impl SpeechConfig {
    /// Places in time that so many frames become.
    pub(crate) fn num_places(&self, num_frames: usize) -> usize {
        num_frames.div_ceil(self.reduction)
    }

    /// Columns of the widest product.
    pub(crate) fn widest(&self) -> usize {
        [self.stem_columns(), self.channels, 2 * self.hidden_size, 2 * self.intermediate_size].into_iter().max().unwrap_or(0)
    }

    /// Bytes of the activations of a part of a sound.
    pub(crate) fn activation_bytes(&self) -> u64 {
        let widest = self.hidden_size.max(self.intermediate_size);
        let of_layers = PART.saturating_mul(6 * self.hidden_size + 4 * self.intermediate_size + 4 * widest);
        // Where phases read them there is a copy.
        let of_stem = self.stem_values().saturating_mul(2).saturating_add(PART.saturating_mul(self.hidden_size));
        let values = of_stem.max(of_layers);
        (values as u64).saturating_mul(size_of::<f32>() as u64)
    }

    /// That every value that memory or a kernel depends on is within bounds; else what is not.
    pub(super) fn check(&self) -> Result<(), String> {
        let sizes = [
            ("a number of mel bins", self.num_mel_bins, 1024),
            ("a number of channels", self.channels, 8192),
            ("a width", self.hidden_size, 1 << 16),
            ("a feed-forward size", self.intermediate_size, 1 << 18),
            ("a number of heads", self.num_heads, 4096),
            ("a number of layers", self.num_layers, crate::model::config::MAX_LAYERS),
            ("a width of convolutions", self.kernel_size, 1024),
            ("a number of distances", self.max_distance, 1 << 16),
            ("a number of frames of a place", self.reduction, 64),
        ];
        if let Some((name, value, most)) = sizes.iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            return Err(format!("has {name} of {value}; it must be from 1 to {most}"));
        }
        if !self.hidden_size.is_multiple_of(self.num_heads) {
            return Err(format!("has a width of {}, not a multiple of {} heads", self.hidden_size, self.num_heads));
        }
        if !self.reduction.is_power_of_two() || self.reduction < 2 {
            return Err(format!("has places of {} frames; they must be a power of two, from 2 on", self.reduction));
        }
        Ok(())
    }
}

/// One that was loaded.
pub(crate) struct Speech {
    config: SpeechConfig,
    stem: Stem,
    /// Of distances from `-max_distance` on, `[distances, num_heads]`.
    bias: Constant,
    layers: Vec<Layer>,
}

struct FeedForward {
    norm: Norm,
    /// What is multiplied by the gate, and the gate.
    up: [Linear; 2],
    down: Linear,
}

/// A convolution over time, each column by itself, between products.
struct Light {
    norm: Norm,
    /// What is multiplied by the gate, and the gate.
    start: [Linear; 2],
    /// Added to each.
    biases: [Constant; 2],
    kernel: Constant,
    bias: Constant,
    middle: Linear,
    end: Linear,
}

struct Layer {
    ffns: [FeedForward; 2],
    attn_norm: Norm,
    qkv: [Linear; 3],
    output: Linear,
    light: Light,
    norm: Norm,
}

/// Reads the weights of one place.
struct Reader<'a, 'b> {
    weights: &'a mut TowerWeights<'b>,
    place: String,
}

impl Reader<'_, '_> {
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }

    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Linear, EngineError> {
        self.weights.linear(&self.name(name), shape)
    }

    /// A matrix that is stored as a convolution over one place.
    fn point(&mut self, name: &str, shape: [usize; 2]) -> Result<Linear, EngineError> {
        self.weights.over_time(&self.name(name), shape, 1)
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Norm, EngineError> {
        self.weights.norm(&self.name(name), len, (NormKind::Layer, EPS, 0.0))
    }

    fn constant(&mut self, name: &str, shape: &[usize]) -> Result<Constant, EngineError> {
        self.weights.constant(&self.name(name), shape)
    }

    fn feed_forward(&mut self, name: &str, [hidden, inner]: [usize; 2]) -> Result<FeedForward, EngineError> {
        let both = self.name(&format!("{name}.gate_up_proj"));
        let mut half = |first: usize| self.weights.rows_of_linear(&both, 2 * inner, first, [inner, hidden]);
        let up = [half(0)?, half(inner)?];
        Ok(FeedForward {
            norm: self.norm(&format!("{name}.layer_norm"), hidden)?,
            up,
            down: self.linear(&format!("{name}.down_proj"), [hidden, inner])?,
        })
    }

    fn light(&mut self, config: &SpeechConfig) -> Result<Light, EngineError> {
        let hidden = config.hidden_size;
        let start = self.name("conv.glu.ext_pw_conv_1d");
        let start = [
            self.weights.rows_over_time(&start, [2 * hidden, hidden], 0..hidden)?,
            self.weights.rows_over_time(&start, [2 * hidden, hidden], hidden..2 * hidden)?,
        ];
        Ok(Light {
            norm: self.norm("conv.layer_norm", hidden)?,
            start,
            biases: [self.constant("conv.glu.b1", &[1, hidden, 1])?, self.constant("conv.glu.b2", &[1, hidden, 1])?],
            kernel: self.constant("conv.dw_sep_conv_1d.dw_conv.weight", &[hidden, 1, config.kernel_size])?,
            bias: self.constant("conv.dw_sep_conv_1d.dw_conv.bias", &[hidden])?,
            middle: self.point("conv.dw_sep_conv_1d.pw_conv", [hidden; 2])?,
            end: self.point("conv.ext_pw_conv_1d", [hidden; 2])?,
        })
    }

    fn layer(&mut self, config: &SpeechConfig) -> Result<Layer, EngineError> {
        let (hidden, sizes) = (config.hidden_size, [config.hidden_size, config.intermediate_size]);
        let mut square = |name: &str| self.linear(&format!("self_attn.{name}"), [hidden; 2]);
        let (qkv, output) = ([square("q_proj")?, square("k_proj")?, square("v_proj")?], square("o_proj")?);
        Ok(Layer {
            ffns: [self.feed_forward("feed_forward_in", sizes)?, self.feed_forward("feed_forward_out", sizes)?],
            attn_norm: self.norm("layer_norm_att", hidden)?,
            qkv,
            output,
            light: self.light(config)?,
            norm: self.norm("layer_norm", hidden)?,
        })
    }
}

impl Speech {
    pub(crate) fn new(
        weights: &mut TowerWeights<'_>,
        places: &[&'static str],
        config: &SpeechConfig,
    ) -> Result<Self, EngineError> {
        let place = weights.place(places, "embed.out.weight")?;
        let mut reader = Reader { weights, place: place.clone() };
        let stem = Stem::new(&mut reader, config)?;
        let shape = [2 * config.max_distance, config.num_heads];
        let bias = reader.constant("relative_attention_bias_layer.bias_values.weight", &shape)?;
        let mut layers = Vec::with_capacity(config.num_layers);
        for number in 0..config.num_layers {
            reader.place = format!("{place}encoders.{number}.");
            layers.push(reader.layer(config)?);
        }
        Ok(Self { config: config.clone(), stem, bias, layers })
    }

    /// States of the last places of a part of a sound, `[places, hidden_size]`, of its features, `[frames, mel bins]`. Any places
    /// before them are another part's.
    pub(crate) fn run(&self, backend: &dyn Backend, sound: &Tile, num_places: usize) -> Result<Vec<f32>, EngineError> {
        let (end, hidden) = (self.config.num_places(sound.width), self.config.hidden_size);
        let before = end.checked_sub(num_places).filter(|_| num_places <= PART);
        let before = before.ok_or_else(|| EngineError::Internal(format!("{num_places} of {end} places of a part of a sound")))?;
        let mut states = self.stem.run(backend, sound, before..end)?;
        if before > 0 {
            // As the model was trained, what fills the last part up is seen.
            states.resize(PART * hidden, 0.0);
        }
        for layer in &self.layers {
            self.layer(backend, layer, &mut states)?;
        }
        states.truncate(num_places * hidden);
        Ok(states)
    }

    fn layer(&self, backend: &dyn Backend, layer: &Layer, states: &mut [f32]) -> Result<(), EngineError> {
        let [first, second] = &layer.ffns;
        self.feed_forward(backend, first, states)?;
        let x = normed(&layer.attn_norm, states);
        add(states, &self.attend(backend, layer, &x)?, 1.0);
        self.light(backend, &layer.light, states)?;
        self.feed_forward(backend, second, states)?;
        apply(&layer.norm, states);
        Ok(())
    }

    fn feed_forward(&self, backend: &dyn Backend, ffn: &FeedForward, states: &mut [f32]) -> Result<(), EngineError> {
        let x = normed(&ffn.norm, states);
        let (mut up, gate) = (product(backend, &ffn.up[0], &x)?, product(backend, &ffn.up[1], &x)?);
        up.iter_mut().zip(gate).for_each(|(up, gate)| *up *= self.config.activation.apply(gate));
        add(states, &product(backend, &ffn.down, &up)?, 0.5);
        Ok(())
    }

    fn light(&self, backend: &dyn Backend, light: &Light, states: &mut [f32]) -> Result<(), EngineError> {
        let hidden = self.config.hidden_size;
        let x = normed(&light.norm, states);
        let (mut up, gate) = (product(backend, &light.start[0], &x)?, product(backend, &light.start[1], &x)?);
        for (up, gate) in up.chunks_exact_mut(hidden).zip(gate.chunks_exact(hidden)) {
            for (column, (up, gate)) in up.iter_mut().zip(gate).enumerate() {
                *up = (*up + light.biases[0][column]) * self.config.gate_activation.apply(gate + light.biases[1][column]);
            }
        }
        let mut x = over_time(&up, &light.kernel, hidden);
        for row in x.chunks_exact_mut(hidden) {
            row.iter_mut().zip(light.bias.iter()).for_each(|(x, bias)| *x += bias);
        }
        let mut x = product(backend, &light.middle, &x)?;
        for value in &mut x {
            *value = self.config.conv_activation.apply(*value);
        }
        add(states, &product(backend, &light.end, &x)?, 1.0);
        Ok(())
    }

    fn attend(&self, backend: &dyn Backend, layer: &Layer, x: &[f32]) -> Result<Vec<f32>, EngineError> {
        let hidden = self.config.hidden_size;
        let head_dim = hidden / self.config.num_heads;
        let [q, k, v] = &layer.qkv;
        let [q, k, v] = [product(backend, q, x)?, product(backend, k, x)?, product(backend, v, x)?];
        let mut out = vec![0.0; q.len()];
        by_rows(backend, &mut out, hidden, |place, out| {
            for (head, out) in out.chunks_exact_mut(head_dim).enumerate() {
                let part = |row: usize| row * hidden + head * head_dim..row * hidden + (head + 1) * head_dim;
                let score = |other: usize| dot(&q[part(place)], &k[part(other)]) / (head_dim as f32).sqrt();
                let num_places = k.len() / hidden;
                let mut scores: Vec<_> = (0..num_places).map(|other| score(other) + self.bias_of(place, other, head)).collect();
                let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                for score in &mut scores {
                    *score = (*score - most).exp();
                }
                let sum: f32 = scores.iter().sum();
                for (other, score) in scores.iter().enumerate() {
                    out.iter_mut().zip(&v[part(other)]).for_each(|(out, v)| *out += score / sum * v);
                }
            }
        });
        product(backend, &layer.output, &out)
    }

    /// What is added to the score of a place for another.
    fn bias_of(&self, place: usize, other: usize, head: usize) -> f32 {
        let most = self.config.max_distance;
        let distance = (other + most).saturating_sub(place).min(2 * most - 1);
        self.bias[distance * self.config.num_heads + head]
    }
}

fn normed(norm: &Norm, states: &[f32]) -> Vec<f32> {
    let mut x = states.to_vec();
    apply(norm, &mut x);
    x
}
