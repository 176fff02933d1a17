//! A block: what it adds to a map, or makes of it.

use device::{Constant, Linear, Norm};

use super::{
    Network, Run,
    attention::Attention,
    config::{BlockConfig, BlockKind},
    map::{Map, Reach},
    norm, parts,
};
use crate::{EngineError, media::weights::TowerWeights};

/// A block that was loaded.
pub(super) struct Block {
    config: BlockConfig,
    body: Body,
}

enum Body {
    Edge { reach: Reach, up: Linear, up_norm: Norm, down: Linear, down_norm: Norm },
    Inverted { convolutions: [Option<Normed>; 2], network: Network },
    Attention(Box<Attention>),
}

/// A convolution and the norm behind it.
struct Normed {
    convolution: Depthwise,
    norm: Norm,
}

/// A convolution of each channel by itself.
pub(super) struct Depthwise {
    reach: Reach,
    /// `[side, side, channels]`.
    kernel: Constant,
}

impl Depthwise {
    pub(super) fn new(
        weights: &mut TowerWeights<'_>,
        name: &str,
        (reach, channels): (Reach, usize),
    ) -> Result<Self, EngineError> {
        let area = reach.side * reach.side;
        let stored = weights.constant(&format!("{name}.weight"), &[channels, 1, reach.side, reach.side])?;
        let kernel: Vec<f32> = (0..stored.len()).map(|at| stored[at % channels * area + at / channels]).collect();
        Ok(Self { reach, kernel: kernel.into() })
    }

    pub(super) fn run(&self, run: &Run<'_>, map: &Map) -> Map {
        map.depthwise(run.backend, self.reach, &self.kernel)
    }
}

impl Block {
    pub(super) fn new(weights: &mut TowerWeights<'_>, place: &str, config: &BlockConfig) -> Result<Self, EngineError> {
        let BlockConfig { in_channels, out_channels, stride, .. } = *config;
        let named = |name: &str| format!("{place}{name}");
        let gamma = named("layer_scale.gamma");
        let body = match config.kind {
            BlockKind::Edge { side, inner } => Body::Edge {
                reach: Reach { side, stride },
                up: weights.over_squares(&named("conv_exp"), [inner, in_channels], side)?,
                up_norm: norm(weights, &named("bn1"), inner)?,
                down: weights.pointwise(&named("conv_pwl"), [out_channels, inner])?,
                down_norm: norm(weights, &named("bn2"), out_channels)?,
            },
            BlockKind::Inverted { start, middle, inner } => {
                let mut part = |name: &str, side: usize, stride: usize, channels: usize| {
                    let load = || {
                        let reach = (Reach { side, stride }, channels);
                        let convolution = Depthwise::new(weights, &named(&format!("{name}.conv")), reach)?;
                        Ok::<_, EngineError>(Normed {
                            convolution,
                            norm: norm(weights, &named(&format!("{name}.bn")), channels)?,
                        })
                    };
                    (side > 0).then(load).transpose()
                };
                // The last one there is takes every other place.
                let start = part("dw_start", start, if middle > 0 { 1 } else { stride }, in_channels)?;
                let middle = part("dw_mid", middle, stride, inner)?;
                let network = Network::new(weights, place, [in_channels, inner, out_channels], Some(&gamma))?;
                Body::Inverted { convolutions: [start, middle], network }
            }
            BlockKind::Attention { .. } => Body::Attention(Box::new(Attention::new(weights, place, config, &gamma)?)),
        };
        Ok(Self { config: *config, body })
    }

    pub(super) fn run(&self, run: &mut Run<'_>, map: Map) -> Result<Map, EngineError> {
        match &self.body {
            Body::Edge { reach, up, up_norm, down, down_norm } => {
                let mut out = Map::new(map.size_behind(*reach), self.config.out_channels);
                for part in parts(out.len()) {
                    run.squares(&map, *reach, &part, up.in_features);
                    run.product(None, up);
                    run.activate(up_norm);
                    let range = part.start * out.channels..part.end * out.channels;
                    let rows = self.config.is_residual().then(|| map.rows(&part));
                    run.project(down, Some(down_norm), rows, &mut out.values[range]);
                }
                Ok(out)
            }
            Body::Inverted { convolutions, network } => Ok(self.inverted(run, &map, convolutions, network)),
            Body::Attention(attention) => attention.run(run, map),
        }
    }

    fn inverted(&self, run: &mut Run<'_>, map: &Map, [start, middle]: &[Option<Normed>; 2], network: &Network) -> Map {
        let seen = start.as_ref().map(|start| start.convolution.run(run, map));
        let (seen, seen_norm) = (seen.as_ref().unwrap_or(map), start.as_ref().map(|start| &start.norm));
        let up = |run: &mut Run<'_>, part: &std::ops::Range<usize>| {
            run.put(seen.rows(part), seen.channels);
            run.product(seen_norm, &network.up);
            run.activate(&network.up_norm);
        };
        let wide = middle.as_ref().map(|middle| {
            let mut wide = Map::new([seen.height, seen.width], network.up.out_features);
            for part in parts(wide.len()) {
                up(run, &part);
                run.take(&mut wide, &part);
            }
            middle.convolution.run(run, &wide)
        });
        let size = wide.as_ref().map_or([seen.height, seen.width], |wide| [wide.height, wide.width]);
        let mut out = Map::new(size, self.config.out_channels);
        for part in parts(out.len()) {
            match (&wide, middle) {
                (Some(wide), Some(Normed { norm, .. })) => {
                    run.put_inner(wide.rows(&part), wide.channels);
                    run.activate(norm);
                }
                _ => up(run, &part),
            }
            let range = part.start * out.channels..part.end * out.channels;
            let rows = self.config.is_residual().then(|| map.rows(&part));
            run.project(&network.down, Some(&network.down_norm), rows, &mut out.values[range]);
        }
        out
    }
}
