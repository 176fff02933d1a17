//! A convolutional encoder of images: products of the backend over rows, which are places of maps, and between them plain steps
//! on the host. Convolutions are products over squares of neighbours; those of single channels are added up plainly.

mod attention;
mod block;
pub(crate) mod config;
mod map;

use std::ops::Range;

use device::{Activation, Backend, Linear, Norm, NormKind, Precision, Projection, ResidualArgs, StepMetadata, Tensor};
use images::Tile;

use super::weights::TowerWeights;
use crate::EngineError;
use block::Block;
use config::{FUSED, FUSED_FACTOR, MobileConfig};
use map::{Map, Reach};

/// Places that are computed at once.
const ROWS: usize = 1024;
/// Added to the mean square of every norm.
const EPS: f32 = 1e-6;
/// Of all networks.
const ACTIVATION: Activation = Activation::GeluTanh;
/// The first convolution.
const STEM: Reach = Reach { side: 3, stride: 2 };

/// An encoder that was loaded.
pub(crate) struct MobileNet {
    config: MobileConfig,
    stem: (Linear, Norm),
    stages: Vec<Vec<Block>>,
    fusion: Network,
    norm: Norm,
    precision: Precision,
}

/// Two matrices with a norm and an activation between, and a norm behind.
struct Network {
    up: Linear,
    up_norm: Norm,
    down: Linear,
    down_norm: Norm,
}

/// Where products read and write; rows are places.
struct Buffers {
    x: Tensor,
    inner: Tensor,
    out: Tensor,
}

/// What a run computes with.
struct Run<'a> {
    backend: &'a dyn Backend,
    precision: Precision,
    buffers: Buffers,
    /// Columns that a buffer has room for.
    widest: usize,
}

/// Norms with weights of such a name.
fn norm(weights: &mut TowerWeights<'_>, name: &str, len: usize) -> Result<Norm, EngineError> {
    weights.norm(name, len, (NormKind::Rms, EPS, 0.0))
}

/// Parts of so many places that are computed at once.
fn parts(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(ROWS).map(move |first| first..len.min(first + ROWS))
}

impl Network {
    /// From and to so many channels; `scale` names factors of what comes out.
    fn new(
        weights: &mut TowerWeights<'_>,
        place: &str,
        [channels, inner, out]: [usize; 3],
        scale: Option<&str>,
    ) -> Result<Self, EngineError> {
        let mut down_norm = norm(weights, &format!("{place}pw_proj.bn"), out)?;
        if let Some(scale) = scale {
            down_norm = scaled(weights, down_norm, scale)?;
        }
        Ok(Self {
            up: weights.pointwise(&format!("{place}pw_exp.conv"), [inner, channels])?,
            up_norm: norm(weights, &format!("{place}pw_exp.bn"), inner)?,
            down: weights.pointwise(&format!("{place}pw_proj.conv"), [out, inner])?,
            down_norm,
        })
    }
}

/// A norm whose outputs are multiplied by values of this name.
fn scaled(weights: &mut TowerWeights<'_>, norm: Norm, name: &str) -> Result<Norm, EngineError> {
    let factors = weights.constant(name, &[norm.weight.len()])?;
    let weight: Vec<_> = norm.weight.iter().zip(factors.iter()).map(|(weight, factor)| weight * factor).collect();
    Ok(Norm { weight: weight.into(), ..norm })
}

impl Run<'_> {
    /// The rows in the buffer of inputs.
    fn put(&mut self, rows: &[f32], columns: usize) {
        put(self.backend, &mut self.buffers.x, rows, columns);
    }

    /// The same in the inner buffer.
    fn put_inner(&mut self, rows: &[f32], columns: usize) {
        put(self.backend, &mut self.buffers.inner, rows, columns);
    }

    /// Their product, behind a norm if there is one, in the inner buffer.
    fn product(&mut self, norm: Option<&Norm>, linear: &Linear) {
        let Buffers { x, inner, .. } = &mut self.buffers;
        inner.set_cols(linear.out_features);
        self.backend.norm_linear(x, norm, &mut [Projection { linear, out: inner }], &StepMetadata::default());
    }

    /// Norms the inner buffer and activates it.
    fn activate(&mut self, norm: &Norm) {
        let phases = self.backend.elementwise_phases().expect("a backend that runs encoders has these phases");
        phases.normed(&mut self.buffers.inner, norm, Some(ACTIVATION));
    }

    /// Adds the product of the inner buffer, behind a norm, to these rows, which become `out`.
    fn project(&mut self, linear: &Linear, post_norm: Option<&Norm>, rows: Option<&[f32]>, out: &mut [f32]) {
        let Buffers { inner, out: residual, .. } = &mut self.buffers;
        match rows {
            Some(rows) => put(self.backend, residual, rows, linear.out_features),
            None => put(self.backend, residual, &vec![0.0; inner.rows() * linear.out_features], linear.out_features),
        }
        let args = ResidualArgs { x: inner, linear, post_norm, scale: 1.0, residual };
        self.backend.linear_residual(args, &StepMetadata::default());
        self.backend.fetch(residual);
        out.copy_from_slice(residual.as_slice());
    }

    /// The norm of all places.
    fn normed(&mut self, map: &mut Map, norm: &Norm, activation: Option<Activation>) {
        let phases = self.backend.elementwise_phases().expect("a backend that runs encoders has these phases");
        for part in parts(map.len()) {
            self.put(map.rows(&part), map.channels);
            phases.normed(&mut self.buffers.x, norm, activation);
            self.backend.fetch(&mut self.buffers.x);
            map.values[part.start * map.channels..part.end * map.channels].copy_from_slice(self.buffers.x.as_slice());
        }
    }
}

fn put(backend: &dyn Backend, tensor: &mut Tensor, rows: &[f32], columns: usize) {
    tensor.set_cols(columns);
    tensor.set_rows(rows.len() / columns);
    tensor.as_mut_slice().copy_from_slice(rows);
    backend.store(tensor);
}

impl MobileNet {
    pub(crate) fn new(
        weights: &mut TowerWeights<'_>,
        places: &[&'static str],
        config: &MobileConfig,
        precision: Precision,
    ) -> Result<Self, EngineError> {
        let place = weights.place(places, "conv_stem.conv.weight")?;
        let stem = weights.over_squares(&format!("{place}conv_stem.conv"), [config.stem, COLOURS], STEM.side)?;
        let stem = (stem, norm(weights, &format!("{place}conv_stem.bn"), config.stem)?);
        let mut stages = Vec::with_capacity(config.stages.len());
        for (number, stage) in config.stages.iter().enumerate() {
            let block = |(at, block)| Block::new(weights, &format!("{place}blocks.{number}.{at}."), block);
            stages.push(stage.iter().enumerate().map(block).collect::<Result<_, _>>()?);
        }
        let (fused, out) = (config.fused_channels(), config.out_features);
        let fusion = Network::new(weights, &format!("{place}msfa.ffn."), [fused, FUSED_FACTOR * fused, out], None)?;
        let norm = norm(weights, &format!("{place}msfa.norm"), out)?;
        Ok(Self { config: config.clone(), stem, stages, fusion, norm, precision })
    }

    /// Vectors of an image, from left to right and from top to bottom, `[side * side, out_features]`.
    pub(crate) fn run(&self, backend: &dyn Backend, tile: &Tile) -> Result<Vec<f32>, EngineError> {
        let widest = self.config.widest();
        let tensor = || backend.alloc(ROWS, widest);
        let buffers = Buffers { x: tensor()?, inner: tensor()?, out: tensor()? };
        let mut run = Run { backend, precision: self.precision, buffers, widest };
        let mut map = self.stem(&mut run, tile);
        let mut last = Vec::new();
        for (number, stage) in self.stages.iter().enumerate() {
            for block in stage {
                map = block.run(&mut run, map)?;
            }
            if number + FUSED >= self.stages.len() {
                last.push(map.clone());
            }
        }
        Ok(self.fuse(&mut run, &last))
    }

    /// The first convolution, its norm and its activation.
    fn stem(&self, run: &mut Run<'_>, tile: &Tile) -> Map {
        let (linear, norm) = &self.stem;
        let mut pixels = Map::new([tile.height, tile.width], COLOURS);
        for (at, pixel) in pixels.values.chunks_exact_mut(COLOURS).enumerate() {
            for (colour, value) in pixel.iter_mut().enumerate() {
                *value = tile.pixels[colour * tile.height * tile.width + at];
            }
        }
        let mut out = Map::new(pixels.size_behind(STEM), linear.out_features);
        for part in parts(out.len()) {
            run.squares(&pixels, STEM, &part, linear.in_features);
            run.product(None, linear);
            run.activate(norm);
            run.take(&mut out, &part);
        }
        out
    }

    /// What the last stages become together.
    fn fuse(&self, run: &mut Run<'_>, last: &[Map]) -> Vec<f32> {
        let Network { up, up_norm, down, down_norm } = &self.fusion;
        let size = [last[0].height, last[0].width];
        let mut out = Map::new(size, down.out_features);
        for part in parts(out.len()) {
            let rows: Vec<f32> = part
                .clone()
                .flat_map(|place| last.iter().map(move |map| (map, map.nearest(place, size))))
                .flat_map(|(map, place)| map.rows(&(place..place + 1)))
                .copied()
                .collect();
            run.put(&rows, up.in_features);
            run.product(None, up);
            run.activate(up_norm);
            let range = part.start * out.channels..part.end * out.channels;
            run.project(down, Some(down_norm), None, &mut out.values[range]);
        }
        let mut out = out.means(self.config.side);
        run.normed(&mut out, &self.norm, None);
        // As its language model's embeddings are.
        let factor = (self.config.out_features as f32).sqrt();
        out.values.iter_mut().for_each(|value| *value *= factor);
        out.values
    }
}

impl Run<'_> {
    /// What a convolution sees of these places of its output, in the buffer of inputs.
    fn squares(&mut self, map: &Map, reach: Reach, part: &Range<usize>, columns: usize) {
        let x = &mut self.buffers.x;
        x.set_cols(columns);
        x.set_rows(part.len());
        map.squares(self.backend, reach, part.start, x.as_mut_slice(), columns);
        self.backend.store(x);
    }

    /// The inner buffer as these places of a map.
    fn take(&mut self, map: &mut Map, part: &Range<usize>) {
        self.backend.fetch(&mut self.buffers.inner);
        map.values[part.start * map.channels..part.end * map.channels].copy_from_slice(self.buffers.inner.as_slice());
    }
}

const COLOURS: usize = 3;
