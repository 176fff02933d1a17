//! A conformer, which hears: products of the backend, and between them plain steps on the host over rows of places in time.

mod attention;
pub(crate) mod config;
pub(crate) mod names;
mod stem;

use std::sync::{Mutex, PoisonError};

use device::{Backend, Constant, Linear, Norm, NormKind, Projection, StepMetadata};
use images::Tile;

use super::{stored, tower::MAX_ROWS, weights::TowerWeights};
use crate::EngineError;
use attention::Attention;
pub(super) use attention::dot;
use config::{ConformerConfig, ConformerStyle};
use names::ConformerNames;
use stem::Stem;

/// Columns of a feed-forward network, by those of the residual stream.
const FFN_FACTOR: usize = 4;
/// Added to the mean square, where no configuration says it.
const EPS: f32 = 1e-6;

/// A conformer that was loaded.
pub(crate) struct Conformer {
    config: ConformerConfig,
    stem: Stem,
    layers: Vec<Layer>,
    /// Behind the layers, if there is one.
    output: Option<Linear>,
}

/// A matrix, and the bounds of what goes into its product and of what comes out.
struct Bounded {
    linear: Linear,
    bounds: Option<[[f32; 2]; 2]>,
}

struct FeedForward {
    pre_norm: Norm,
    up: Bounded,
    down: Bounded,
    post_norm: Norm,
}

/// A convolution over time, each column by itself, between two matrices of which the first has a gate.
struct Light {
    pre_norm: Norm,
    start: Bounded,
    /// `[hidden_size, 1, kernel_size]`.
    kernel: Constant,
    norm: Norm,
    end: Bounded,
}

struct Layer {
    ffns: [FeedForward; 2],
    pre_attn: Norm,
    attention: Attention,
    post_attn: Norm,
    light: Light,
    out_norm: Norm,
}

/// Reads the weights of one place.
struct Reader<'a, 'b> {
    weights: &'a mut TowerWeights<'b>,
    place: String,
    names: &'static ConformerNames,
    is_bounded: bool,
}

impl Reader<'_, '_> {
    fn bounded(&mut self, name: &str, shape: [usize; 2]) -> Result<Bounded, EngineError> {
        let name = format!("{}{name}", self.place);
        let linear = self.weights.linear(&format!("{name}{}", self.names.matrix), shape)?;
        let mut number = |what: &str| Ok::<_, EngineError>(self.weights.constant(&format!("{name}.{what}"), &[])?[0]);
        let bounds = if self.is_bounded {
            Some([[number("input_min")?, number("input_max")?], [number("output_min")?, number("output_max")?]])
        } else {
            None
        };
        Ok(Bounded { linear, bounds })
    }

    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Linear, EngineError> {
        self.weights.linear(&format!("{}{name}", self.place), shape)
    }

    fn norm(&mut self, name: &str, len: usize, eps: f32) -> Result<Norm, EngineError> {
        self.weights.norm(&format!("{}{name}", self.place), len, (NormKind::Rms, eps, 0.0))
    }

    fn constant(&mut self, name: &str, shape: &[usize]) -> Result<Constant, EngineError> {
        self.weights.constant(&format!("{}{name}", self.place), shape)
    }

    fn feed_forward(&mut self, names: [&str; 4], hidden: usize) -> Result<FeedForward, EngineError> {
        let (inner, [pre_norm, up, down, post_norm]) = (FFN_FACTOR * hidden, names);
        Ok(FeedForward {
            pre_norm: self.norm(pre_norm, hidden, EPS)?,
            up: self.bounded(up, [inner, hidden])?,
            down: self.bounded(down, [hidden, inner])?,
            post_norm: self.norm(post_norm, hidden, EPS)?,
        })
    }

    fn layer(&mut self, config: &ConformerConfig) -> Result<Layer, EngineError> {
        let (hidden, eps, names) = (config.hidden_size, config.eps, self.names);
        let ([first, second], [pre_attn, post_attn]) = (names.ffns, names.attention_norms);
        let [pre_norm, start, kernel, norm, end] = names.light;
        Ok(Layer {
            ffns: [self.feed_forward(first, hidden)?, self.feed_forward(second, hidden)?],
            pre_attn: self.norm(pre_attn, hidden, EPS)?,
            attention: Attention::new(self, config)?,
            post_attn: self.norm(post_attn, hidden, EPS)?,
            light: Light {
                pre_norm: self.norm(pre_norm, hidden, eps)?,
                start: self.bounded(start, [2 * hidden, hidden])?,
                kernel: self.constant(kernel, &[hidden, 1, config.kernel_size])?,
                norm: self.norm(norm, hidden, eps)?,
                end: self.bounded(end, [hidden; 2])?,
            },
            out_norm: self.norm(names.out_norm, hidden, EPS)?,
        })
    }
}

impl ConformerConfig {
    /// States that come out of so many frames.
    pub(crate) fn num_places(&self, num_frames: usize) -> usize {
        let of_layers = stem::halved(stem::halved(num_frames));
        match self.style {
            ConformerStyle::Gemma4 => of_layers,
            ConformerStyle::Gemma3n { reduction } => of_layers.div_ceil(reduction),
        }
    }

    /// Columns of the widest product.
    pub(crate) fn widest(&self) -> usize {
        let of_stem = self.stem_columns().into_iter().max().unwrap_or(0);
        of_stem.max(FFN_FACTOR * self.hidden_size).max(self.out_features)
    }

    /// Bytes of the activations of the longest sound.
    pub(crate) fn activation_bytes(&self) -> u64 {
        let halved = stem::halved(self.max_frames).saturating_mul(stem::halved(self.num_mel_bins));
        // What comes out of the first convolution, what the second sees, and a copy where phases read it.
        let of_stem = halved.saturating_mul(2 * self.channels[0]).saturating_add(2 * MAX_ROWS * self.widest());
        let of_layers = stem::halved(stem::halved(self.max_frames)).saturating_mul((2 * FFN_FACTOR + 6) * self.hidden_size);
        (of_stem.max(of_layers) as u64).saturating_mul(size_of::<f32>() as u64)
    }
}

impl Conformer {
    pub(crate) fn new(
        weights: &mut TowerWeights<'_>,
        places: &[&'static str],
        config: &ConformerConfig,
    ) -> Result<Self, EngineError> {
        let names = config.names;
        let place = weights.place(places, names.first)?;
        let mut reader = Reader { weights, place: place.clone(), names, is_bounded: config.is_bounded };
        let stem = Stem::new(&mut reader, config)?;
        let output = match config.style {
            ConformerStyle::Gemma4 => Some(reader.linear(names.output, [config.out_features, config.hidden_size])?),
            ConformerStyle::Gemma3n { .. } => None,
        };
        let mut layers = Vec::with_capacity(config.num_layers);
        for number in 0..config.num_layers {
            reader.place = format!("{place}{}{number}.", names.layers);
            layers.push(reader.layer(config)?);
        }
        Ok(Self { config: config.clone(), stem, layers, output })
    }

    /// States of the places of a sound, `[places, out_features]`, of its features, `[frames, mel bins]`.
    pub(crate) fn run(&self, backend: &dyn Backend, sound: &Tile) -> Result<Vec<f32>, EngineError> {
        let mut states = self.stem.run(backend, sound)?;
        for layer in &self.layers {
            self.layer(backend, layer, &mut states)?;
        }
        match (&self.output, self.config.style) {
            (Some(output), _) => product(backend, output, &states),
            (None, ConformerStyle::Gemma3n { reduction }) => {
                let hidden = self.config.hidden_size;
                Ok(states.chunks_exact(hidden).step_by(reduction).flatten().copied().collect())
            }
            (None, ConformerStyle::Gemma4) => Ok(states),
        }
    }

    fn layer(&self, backend: &dyn Backend, layer: &Layer, states: &mut Vec<f32>) -> Result<(), EngineError> {
        let [first, second] = &layer.ffns;
        self.feed_forward(backend, first, states)?;
        let mut x = self.capped(states);
        apply(&layer.pre_attn, &mut x);
        let mut x = self.capped(&layer.attention.run(backend, x)?);
        apply(&layer.post_attn, &mut x);
        add(states, &x, 1.0);
        self.light(backend, &layer.light, states)?;
        self.feed_forward(backend, second, states)?;
        *states = self.capped(states);
        apply(&layer.out_norm, states);
        Ok(())
    }

    fn feed_forward(&self, backend: &dyn Backend, ffn: &FeedForward, states: &mut [f32]) -> Result<(), EngineError> {
        let mut x = self.capped(states);
        apply(&ffn.pre_norm, &mut x);
        let mut inner = ffn.up.run(backend, x)?;
        self.activate(backend, &mut inner);
        let mut x = self.capped(&ffn.down.run(backend, inner)?);
        apply(&ffn.post_norm, &mut x);
        add(states, &x, self.config.ffn_scale);
        Ok(())
    }

    fn light(&self, backend: &dyn Backend, light: &Light, states: &mut [f32]) -> Result<(), EngineError> {
        let hidden = self.config.hidden_size;
        let mut x = states.to_vec();
        apply(&light.pre_norm, &mut x);
        let gated: Vec<f32> = light
            .start
            .run(backend, x)?
            .chunks_exact(2 * hidden)
            .flat_map(|row| (0..hidden).map(move |column| row[column] / (1.0 + (-row[hidden + column]).exp())))
            .collect();
        let mut x = self.capped(&over_time(&gated, &light.kernel, hidden));
        apply(&light.norm, &mut x);
        self.activate(backend, &mut x);
        add(states, &light.end.run(backend, x)?, 1.0);
        Ok(())
    }

    fn activate(&self, backend: &dyn Backend, values: &mut [f32]) {
        by_rows(backend, values, self.config.hidden_size, |_, row| {
            for value in row {
                *value = self.config.activation.apply(*value);
            }
        });
    }

    /// The same within the bound of states.
    fn capped(&self, values: &[f32]) -> Vec<f32> {
        let cap = self.config.state_cap;
        values.iter().map(|value| value.max(-cap).min(cap)).collect()
    }
}

impl Bounded {
    /// The product of rows.
    fn run(&self, backend: &dyn Backend, mut rows: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        let [input, output] = self.bounds.map_or([None; 2], |bounds| bounds.map(Some));
        bound(&mut rows, input);
        let mut out = product(backend, &self.linear, &rows)?;
        bound(&mut out, output);
        Ok(out)
    }
}

fn bound(values: &mut [f32], bounds: Option<[f32; 2]>) {
    // Not `clamp`, which ends the process where a file has bounds in the wrong order.
    let Some([least, most]) = bounds else { return };
    for value in values {
        *value = value.max(least).min(most);
    }
}

/// Does something with each row of so many columns, on the backend's threads of the host.
pub(super) fn by_rows(backend: &dyn Backend, rows: &mut [f32], columns: usize, body: impl Fn(usize, &mut [f32]) + Sync) {
    let rows: Vec<_> = rows.chunks_exact_mut(columns).map(Mutex::new).collect();
    backend.for_each(rows.len(), &|number| {
        // Each is taken once, so nobody waits, and a panic elsewhere has left it whole.
        body(number, &mut rows[number].lock().unwrap_or_else(PoisonError::into_inner));
    });
}

/// The product of rows by a matrix, as many at once as buffers are made for.
pub(super) fn product(backend: &dyn Backend, linear: &Linear, rows: &[f32]) -> Result<Vec<f32>, EngineError> {
    let mut values = Vec::with_capacity(rows.len() / linear.in_features * linear.out_features);
    for rows in rows.chunks(MAX_ROWS * linear.in_features) {
        let x = stored(backend, rows, linear.in_features)?;
        let mut out = backend.alloc(x.rows(), linear.out_features)?;
        backend.norm_linear(&x, None, &mut [Projection { linear, out: &mut out }], &StepMetadata::default());
        backend.fetch(&mut out);
        values.extend_from_slice(out.as_slice());
    }
    Ok(values)
}

pub(super) fn apply(norm: &Norm, rows: &mut [f32]) {
    rows.chunks_exact_mut(norm.weight.len()).for_each(|row| norm.apply(row));
}

pub(super) fn add(states: &mut [f32], x: &[f32], scale: f32) {
    states.iter_mut().zip(x).for_each(|(state, x)| *state += x * scale);
}

/// A convolution over rows of `columns` values, each column by its own kernel of its own row and those before; before the first
/// are zeros.
pub(super) fn over_time(rows: &[f32], kernel: &[f32], columns: usize) -> Vec<f32> {
    let size = kernel.len() / columns;
    let mut out = vec![0.0; rows.len()];
    for (place, out) in out.chunks_exact_mut(columns).enumerate() {
        for back in 0..size.min(place + 1) {
            let row = &rows[(place - back) * columns..][..columns];
            for (column, out) in out.iter_mut().enumerate() {
                *out += row[column] * kernel[column * size + size - 1 - back];
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_sees_itself_and_those_before() {
        let rows = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        // The last weight of a column is of the row itself.
        assert_eq!(over_time(&rows, &[0.5, 1.0, 0.0, 2.0], 2), [1.0, 20.0, 2.5, 40.0, 4.0, 60.0]);
        assert_eq!(over_time(&rows[..2], &[9.0, 9.0, 1.0, 9.0, 9.0, 2.0], 2), [1.0, 20.0]);
    }

    #[test]
    fn bounds_in_the_wrong_order_give_the_second() {
        let mut values = [0.0, 5.0];
        bound(&mut values, Some([2.0, 1.0]));
        assert_eq!(values, [1.0, 1.0]);
    }
}
