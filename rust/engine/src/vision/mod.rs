//! Images: from pixels to the vectors that stand in their places of a prompt.
//!
//! ```text
//! image -> tiles (crate `images`) -> patches -> tower -> projector -> vectors, which replace the rows of image tokens
//! ```
//!
//! There is one encoder for all families, as there is one decoder: [`VisionConfig`] says what it is like. It computes by the
//! phases that the decoder has, over a KV storage of its own in which every tile is a request.

mod arch;
mod bounded;
pub(crate) mod config;
mod grid;
mod layout;
pub(crate) mod mmproj;
mod projector;
pub(crate) mod prompt;
mod resampler;
mod tower;
mod weights;

use std::{path::PathBuf, sync::Arc};

use device::{Backend, Precision, Tensor, WorkspaceShape};
use images::{Processed, RgbImage};
use paged::{EncoderContent, EncoderItem, EncoderKey};

pub(crate) use arch::families;
pub(crate) use config::VisionConfig;
pub(crate) use layout::ImageLayout;
pub(crate) use weights::TowerWeights;

use crate::EngineError;
use config::Arrangement;
use projector::Projector;
use resampler::Resampler;
use tower::Tower;

/// How a model sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VisionOptions {
    /// An image whose longer edge has more pixels is made smaller first.
    pub max_edge: Option<usize>,
    /// Bytes that outputs of the encoder may take; 256 MiB unless given.
    pub cache_bytes: Option<u64>,
    /// The image encoder of a GGUF file, which is a GGUF file of its own.
    pub mmproj: Option<PathBuf>,
}

/// Bytes that outputs of the encoder may take, unless given: some hundreds of images.
const DEFAULT_CACHE_BYTES: u64 = 256 << 20;

impl VisionOptions {
    /// Bytes that outputs of the encoder may take.
    pub fn cache_bytes(&self) -> u64 {
        self.cache_bytes.unwrap_or(DEFAULT_CACHE_BYTES)
    }
}

/// Of the hash over images: the same in all processes, so that what a tier keeps of a prompt is found by others.
const KEY: [u8; 32] = [0; 32];

/// An image of a prompt, ready to be encoded.
#[derive(Debug)]
pub(crate) struct PromptImage {
    /// What the encoder takes.
    pub(crate) processed: Processed,
    /// What it becomes.
    pub(crate) layout: ImageLayout,
    /// Over its pixels and all that decides the encoder's input.
    pub(crate) key: EncoderKey,
}

impl PromptImage {
    /// # Errors
    /// [`EngineError::InvalidArgument`] for an image that the processor refuses, with why.
    pub(crate) fn new(config: &VisionConfig, image: &RgbImage) -> Result<Arc<Self>, EngineError> {
        let processed =
            config.processor.process(image).map_err(|why| EngineError::InvalidArgument(format!("an image: {why}")))?;
        config.check_tiles(&processed)?;
        let layout = ImageLayout::new(config, &processed);
        if layout.num_rows == 0 {
            let (height, width) = (image.height(), image.width());
            let text = format!("an image of {width} x {height} pixels is less than a patch of {}", config.tower.patch_size);
            return Err(EngineError::InvalidArgument(text));
        }
        let item = EncoderItem {
            dimensions: &[image.height() as usize, image.width() as usize],
            mode: "RGB8",
            processor: &config.processor.identity(),
            tower: &[],
            adapter: &[],
            content: EncoderContent::Samples(image.pixels()),
        };
        Ok(Arc::new(Self { processed, layout, key: item.key(&KEY) }))
    }
}

/// What makes vectors of the decoder's width of the tower's states.
enum Connector {
    Projector(Projector),
    Resampler(Resampler),
}

/// Rows of so many columns, where phases read them.
fn stored(backend: &dyn Backend, values: &[f32], cols: usize) -> Result<Tensor, EngineError> {
    let num_rows = values.len() / cols;
    let mut tensor = backend.alloc(num_rows, cols)?;
    tensor.set_rows(num_rows);
    tensor.as_mut_slice().copy_from_slice(values);
    backend.store(&mut tensor);
    Ok(tensor)
}

/// An encoder that was loaded.
pub(crate) struct ImageEncoder {
    config: VisionConfig,
    tower: Tower,
    connector: Connector,
    deep: Vec<Projector>,
    /// Vectors of its own that stand between those of an image, one behind the other.
    separators: Vec<f32>,
}

impl ImageEncoder {
    pub(crate) fn new(weights: &mut TowerWeights<'_>, config: &VisionConfig, precision: Precision) -> Result<Self, EngineError> {
        let separators = separators(weights, config)?;
        let places = config.places.projector;
        let connector = match &config.resampler {
            Some(resampler) => Connector::Resampler(Resampler::new(weights, places, resampler, precision)?),
            None => Connector::Projector(Projector::new(weights, places, &config.projector, &config.tower)?),
        };
        let encoder = Self {
            tower: Tower::new(weights, config.places.tower, &config.tower, precision)?,
            connector,
            deep: deep_projectors(weights, config)?,
            separators,
            config: config.clone(),
        };
        if config.has_own_file {
            mmproj::check_rest(weights, config)?;
        }
        Ok(encoder)
    }

    /// Vectors of a row of an image.
    pub(crate) fn num_planes(&self) -> usize {
        self.config.num_planes()
    }

    /// Those between an image's vectors, of the decoder's width.
    fn separators(&self, backend: &dyn Backend) -> Result<Vec<f32>, EngineError> {
        match (&self.config.arrangement, &self.connector) {
            (Arrangement::Separated { .. }, Connector::Projector(projector)) => {
                let columns = self.config.projector.regroup.columns(self.config.tower.hidden_size);
                projector.project(backend, self.separators.clone(), columns)
            }
            _ => Ok(self.separators.clone()),
        }
    }

    /// The vectors of an image, `[1 + deep, num_rows, hidden_size]`: those of its rows, then those that are added behind the
    /// decoder's first layers.
    pub(crate) fn encode(&mut self, backend: &dyn Backend, image: &PromptImage) -> Result<Vec<f32>, EngineError> {
        let tiles = &image.processed.tiles;
        let grids: Vec<_> = tiles.iter().map(|tile| self.config.tower.grid(tile.height, tile.width)).collect();
        let pairs: Vec<_> = tiles.iter().zip(&grids).collect();
        let taken: Vec<_> = self.config.deep.iter().map(|deep| deep.layer).collect();
        let mut states = self.tower.run(backend, &pairs, &taken)?;
        let separators = self.separators(backend)?;
        let mut vectors = Vec::new();
        let mut outputs = Vec::with_capacity(tiles.len());
        for (states, grid) in states.iter_mut().zip(&grids) {
            let last = &mut states[taken.len()];
            outputs.push(match &self.connector {
                Connector::Projector(projector) => projector.run(backend, last, grid)?,
                Connector::Resampler(resampler) => resampler.run(backend, last)?,
            });
        }
        vectors.extend(image.layout.arrange(&self.config, &outputs, &separators));
        for (place, projector) in self.deep.iter().enumerate() {
            let mut outputs = Vec::with_capacity(tiles.len());
            for (states, grid) in states.iter_mut().zip(&grids) {
                outputs.push(projector.run(backend, &mut states[place], grid)?);
            }
            vectors.extend(image.layout.arrange(&self.config, &outputs, &separators));
        }
        Ok(vectors)
    }
}

/// The vectors of its own that an encoder has: of the decoder's width, or of what is projected to it.
fn separators(weights: &mut TowerWeights<'_>, config: &VisionConfig) -> Result<Vec<f32>, EngineError> {
    let hidden = config.projector.layers.last().map_or(0, |layer| layer.out_features);
    let columns = config.projector.regroup.columns(config.tower.hidden_size);
    let named: &[(&str, &[usize])] = match config.arrangement {
        Arrangement::Tiles => &[],
        Arrangement::Unpadded => &[("image_newline", &[hidden])],
        Arrangement::Separated { .. } => &[("sub_GN", &[1, 1, 1, columns]), ("glb_GN", &[1, 1, columns])],
    };
    let mut all = Vec::new();
    for (name, shape) in named {
        let place = weights.place(config.places.newline, name)?;
        all.extend_from_slice(&weights.constant(&format!("{place}{name}"), shape)?);
    }
    Ok(all)
}

fn deep_projectors(weights: &mut TowerWeights<'_>, config: &VisionConfig) -> Result<Vec<Projector>, EngineError> {
    let projector = |deep: &config::DeepStack| {
        let places: Vec<_> = config.places.tower.iter().map(|place| format!("{place}{}", deep.place)).collect();
        Projector::new(weights, &places, &deep.projector, &config.tower)
    };
    config.deep.iter().map(projector).collect()
}

impl VisionConfig {
    /// Whether the tower has positions for these tiles.
    fn check_tiles(&self, image: &Processed) -> Result<(), EngineError> {
        if let config::Positions::Axes { side, .. } = self.tower.positions {
            let is_long = |tile: &&images::Tile| tile.height.max(tile.width) / self.tower.patch_size > side;
            return image.tiles.iter().find(is_long).map_or(Ok(()), |tile| {
                Err(EngineError::InvalidArgument(format!(
                    "the model's image processor makes {} x {} pixels, and its encoder takes {side} patches of {} a side",
                    tile.width, tile.height, self.tower.patch_size
                )))
            });
        }
        let (config::Positions::Learned { side } | config::Positions::Turned { side, .. }) = self.tower.positions else {
            return Ok(());
        };
        let patch = self.tower.patch_size;
        let is_other = |tile: &&images::Tile| [tile.height / patch, tile.width / patch] != [side; 2];
        image.tiles.iter().find(is_other).map_or(Ok(()), |tile| {
            Err(EngineError::InvalidArgument(format!(
                "the model's image processor makes tiles of {} x {} pixels, and its encoder takes {side} x {side} patches of {patch}",
                tile.width, tile.height
            )))
        })
    }

    /// Vectors of a row of an image.
    pub(crate) fn num_planes(&self) -> usize {
        1 + self.deep.len()
    }

    /// Rows that a tile of full size becomes, of a tower whose tiles all have one, or whose processor has a bound.
    pub(crate) fn rows_of_tile(&self) -> usize {
        if let Some(most) = self.processor.max_tokens {
            return most;
        }
        let config::Positions::Learned { side } = self.tower.positions else { return 0 };
        let rows = side / self.projector.regroup.side(side).max(1);
        rows * rows
    }

    /// Bytes of the encoder's activations for its largest image.
    pub(crate) fn activation_bytes(&self) -> u64 {
        self.tower.activation_bytes(tower::MAX_ROWS)
    }

    /// Workspaces that serve the encoder as well.
    pub(crate) fn widen(&self, shape: WorkspaceShape) -> WorkspaceShape {
        let tower = &self.tower;
        WorkspaceShape {
            num_tokens: shape.num_tokens.max(tower::MAX_ROWS),
            hidden_size: shape.hidden_size.max(tower.hidden_size),
            intermediate_size: shape.intermediate_size.max(tower.intermediate_size),
            ..shape
        }
    }
}
