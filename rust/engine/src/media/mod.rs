//! Images, sounds and videos: from pixels and samples to the vectors that stand in their places of a prompt.
//!
//! ```text
//! image -> tiles  (crate `images`) -> patches -> tower -> projector -> vectors, which replace the rows of image tokens
//! sound -> chunks (crate `audio`)  -> frames  -> tower -> projector -> vectors, which replace the rows of audio tokens
//! video -> frames (crate `video`)  -> groups of them, each of which is encoded as an image is
//! ```
//!
//! There is one encoder for all families, as there is one decoder: [`MediaConfig`] says what it is like. It computes by the
//! phases that the decoder has, over a KV storage of its own in which every tile is a request. A model has one of images, one of
//! sounds, or one of each ([`Encoders`]).

mod arch;
mod bounded;
pub(crate) mod config;
mod conformer;
mod encoders;
mod frames;
mod grid;
mod hard;
mod hd;
mod layout;
pub(crate) mod mmproj;
mod mobile;
mod projector;
pub(crate) mod prompt;
mod resampler;
mod speech;
mod tiled;
mod tower;
mod tower_layer;
mod video;
mod weights;

use std::{path::PathBuf, sync::Arc, time::Duration};

use audio::Sound;
use device::{Backend, KvDType, Precision, WorkspaceShape};
use images::{Processed, RgbImage, Tile};
use paged::{EncoderContent, EncoderItem, EncoderKey};

pub(crate) use arch::{families, hears};
pub(crate) use config::MediaConfig;
pub(crate) use encoders::Encoders;
pub(crate) use layout::ItemLayout;
pub(crate) use weights::TowerWeights;

use self::video::Moment;
use crate::{
    EngineError, Media, MediaKind,
    model::{DecoderConfig, decoder::VectorRows, part::stored},
};
use config::{Arrangement, Body, MediaProcessor, Silence, TowerConfig};
use conformer::Conformer;
use grid::Grid;
use hard::HardVectors;
use mobile::MobileNet;
use projector::Projector;
use resampler::Resampler;
use speech::Speech;
use tower::Tower;

/// How a model sees and hears.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MediaOptions {
    /// An image whose longer edge has more pixels is made smaller first.
    pub max_edge: Option<usize>,
    /// Bytes that outputs of the encoder may take; 256 MiB unless given, or two images of a model with layers that look at them
    /// where these are more.
    pub cache_bytes: Option<u64>,
    /// The encoders of a GGUF file, which are in a GGUF file of their own.
    pub mmproj: Option<PathBuf>,
}

/// Bytes that outputs of the encoder may take, unless given: some hundreds of images, or half an hour of sounds.
const DEFAULT_CACHE_BYTES: u64 = 256 << 20;

impl MediaOptions {
    /// Bytes that outputs of the encoder may take, of a model whose largest image takes so many.
    pub fn cache_bytes(&self, largest: u64) -> u64 {
        // A request that looks at an image keeps it to its end, and another is to go on beside it.
        self.cache_bytes.unwrap_or_else(|| DEFAULT_CACHE_BYTES.max(largest.saturating_mul(2)))
    }
}

/// Of the hash over images and sounds: the same in all processes, so that what a tier keeps of a prompt is found by others.
const KEY: [u8; 32] = [0; 32];

/// An image of a prompt, a chunk of a sound, or a group of a video's frames, ready to be encoded.
#[derive(Debug)]
pub(crate) struct PromptItem {
    /// Which of them.
    pub(crate) kind: MediaKind,
    /// The token in whose places its vectors go.
    pub(crate) token_id: u32,
    /// What the encoder takes. A chunk is a tile of one row, as wide as it has frames, `[frames, mel bins]`.
    pub(crate) processed: Processed,
    /// What it becomes.
    pub(crate) layout: ItemLayout,
    /// Over its values and all that decides the encoder's input.
    pub(crate) key: EncoderKey,
    /// Images whose vectors come before its own, where a row that sees it sees these too.
    pub(crate) before: Vec<Arc<Self>>,
    /// A sound of a prompt that has images as well, where that makes other vectors of it.
    pub(crate) is_beside_images: bool,
    /// When it is, of a video's.
    pub(crate) moment: Option<Moment>,
}

impl PromptItem {
    /// What an image, a sound or a video is encoded as: the first as a whole, the others part by part. `has_images`: the prompt
    /// does. `spent`: the time that its videos before took to be decoded, which all of them have together.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] for one that the processor refuses, with why, or that no encoder takes.
    pub(crate) fn all(
        configs: &Encoders<MediaConfig>,
        media: &Media,
        has_images: bool,
        spent: &mut Duration,
    ) -> Result<Vec<Arc<Self>>, EngineError> {
        let config = configs.get(media.kind());
        if let Media::Video(video) = media {
            let config = config.and_then(|config| Some((config, config.video.as_ref()?)));
            let (config, taken) = config.ok_or_else(|| Self::no_videos(configs))?;
            return Self::groups(config, taken, video, spent);
        }
        match (media, config.map(|config| (config, &config.processor))) {
            (Media::Image(image), Some((config, MediaProcessor::Images(processor)))) => {
                Ok(vec![Self::image(config, processor, image)?])
            }
            (Media::Sound(sound), Some((config, MediaProcessor::Sounds(processor)))) => {
                Self::chunks((config, has_images && config.beside_images.is_some()), processor, sound)
            }
            (given, _) => {
                let (taken, given) = (configs.takes(), given.kind().plural());
                Err(EngineError::InvalidArgument(format!(
                    "this model takes {taken}, and the messages have {given}: leave them out"
                )))
            }
        }
    }

    /// Rows of a prompt that a sound or a video takes, before it is processed; 0 of an image.
    pub(crate) fn num_rows(configs: &Encoders<MediaConfig>, media: &Media) -> usize {
        if let Media::Video(video) = media {
            return Self::rows_of_video(configs, video);
        }
        let (Media::Sound(sound), Some(config)) = (media, configs.get(MediaKind::Sound)) else { return 0 };
        let MediaProcessor::Sounds(processor) = &config.processor else { return 0 };
        let rows = |len: usize| {
            let num_frames = if processor.chunk_frames() > 0 { processor.chunk_frames() } else { len };
            ItemLayout::new(config, &chunk_of(Vec::new(), num_frames, len)).num_rows
        };
        processor.frames_of(sound).into_iter().map(rows).fold(0, usize::saturating_add)
    }

    /// The chunks of a sound. Equal ones have equal keys, in whatever sound they are.
    fn chunks(
        (config, is_beside_images): (&MediaConfig, bool),
        processor: &audio::Processor,
        sound: &Sound,
    ) -> Result<Vec<Arc<Self>>, EngineError> {
        let features = processor.process(sound).map_err(|why| EngineError::InvalidArgument(format!("a sound: {why}")))?;
        let identity = processor.identity();
        let item = |(values, len): (Vec<f32>, usize)| {
            let num_frames = values.len() / features.num_mel_bins;
            let processed = chunk_of(values, num_frames, len);
            let layout = ItemLayout::new(config, &processed);
            let bytes: Vec<u8> = processed.tiles[0].pixels.iter().flat_map(|value| value.to_le_bytes()).collect();
            let item = EncoderItem {
                dimensions: &[num_frames, features.num_mel_bins, len, layout.num_rows],
                mode: if is_beside_images { "log-mel beside images" } else { "log-mel" },
                processor: &identity,
                tower: &[],
                adapter: &[],
                content: EncoderContent::Samples(&bytes),
            };
            let key = item.key(&KEY);
            let (kind, token_id, before) = (MediaKind::Sound, config.token_id, Vec::new());
            Arc::new(Self { kind, token_id, processed, layout, key, before, is_beside_images, moment: None })
        };
        let items = features.chunks.into_iter().zip(features.lens).map(item);
        // What is left over of a sound may be too short for a vector.
        let items: Vec<_> = items.filter(|item: &Arc<Self>| item.layout.num_rows > 0).collect();
        if items.is_empty() {
            let text = format!("a sound of {} samples is too short to become a vector", sound.samples().len());
            return Err(EngineError::InvalidArgument(text));
        }
        Ok(items)
    }

    fn image(config: &MediaConfig, processor: &images::Processor, image: &RgbImage) -> Result<Arc<Self>, EngineError> {
        let processed = processor.process(image).map_err(|why| EngineError::InvalidArgument(format!("an image: {why}")))?;
        config.check_tiles(&processed)?;
        let layout = ItemLayout::new(config, &processed);
        if layout.num_rows == 0 {
            let (height, width) = (image.height(), image.width());
            let patch_size = config.tower().map_or(0, |tower| tower.patch_size);
            let text = format!("an image of {width} x {height} pixels is less than a patch of {patch_size}");
            return Err(EngineError::InvalidArgument(text));
        }
        let item = EncoderItem {
            dimensions: &[image.height() as usize, image.width() as usize],
            mode: "RGB8",
            processor: &processor.identity(),
            tower: &[],
            adapter: &[],
            content: EncoderContent::Samples(image.pixels()),
        };
        let (kind, token_id, key) = (MediaKind::Image, config.token_id, item.key(&KEY));
        let before = Vec::new();
        Ok(Arc::new(Self { kind, token_id, processed, layout, key, before, is_beside_images: false, moment: None }))
    }

    /// Images that are seen together, as one item: the last, behind the others.
    pub(crate) fn together(images: &[Arc<Self>]) -> Option<Arc<Self>> {
        let (last, before) = images.split_last()?;
        if before.is_empty() {
            return Some(Arc::clone(last));
        }
        let keys: Vec<u8> = images.iter().flat_map(|image| *image.key.as_bytes()).collect();
        let content = EncoderContent::Samples(&keys);
        let item = EncoderItem { dimensions: &[images.len()], mode: "images", processor: &[], tower: &[], adapter: &[], content };
        Some(Arc::new(Self {
            kind: last.kind,
            token_id: last.token_id,
            processed: last.processed.clone(),
            layout: last.layout.clone(),
            key: item.key(&KEY),
            before: before.to_vec(),
            is_beside_images: last.is_beside_images,
            moment: last.moment,
        }))
    }

    /// Images or sounds that are encoded for it.
    pub(crate) fn num_encoded(&self) -> usize {
        1 + self.before.len()
    }

    /// Vectors of all of them.
    pub(crate) fn num_vectors(&self) -> usize {
        self.before.iter().map(|image| image.layout.num_vectors).sum::<usize>() + self.layout.num_vectors
    }
}

/// A chunk of a sound as a tile of one row, of which so many frames are the sound's.
fn chunk_of(values: Vec<f32>, num_frames: usize, len: usize) -> Processed {
    let tile = Tile { height: 1, width: num_frames, pixels: values };
    Processed { tiles: vec![tile], original: (1, len), grid: (0, 0), whole: 0 }
}

/// What makes vectors of the decoder's width of the tower's states.
enum Connector {
    Projector(Projector),
    Resampler(Resampler),
}

/// What makes hidden states, loaded.
enum LoadedBody {
    Tower(Box<Tower>),
    Conformer(Box<Conformer>),
    Speech(Box<Speech>),
    Mobile(Box<MobileNet>),
}

/// An encoder that was loaded.
pub(crate) struct MediaEncoder {
    config: MediaConfig,
    body: LoadedBody,
    connector: Connector,
    beside_images: Option<Projector>,
    deep: Vec<Projector>,
    /// Vectors of its own that stand between those of an image, one behind the other.
    separators: Vec<f32>,
    /// Of tokens that have vectors as well.
    hard: Option<HardVectors>,
}

impl MediaEncoder {
    pub(crate) fn new(weights: &mut TowerWeights<'_>, config: &MediaConfig, precision: Precision) -> Result<Self, EngineError> {
        let separators = separators(weights, config)?;
        let places = config.places.projector;
        let connector = match &config.resampler {
            Some(resampler) => Connector::Resampler(Resampler::new(weights, places, resampler, precision)?),
            None => Connector::Projector(Projector::new(weights, places, &config.projector, config.body.width())?),
        };
        let beside_images = config.beside_images.as_ref();
        let beside_images =
            beside_images.map(|projector| Projector::new(weights, places, projector, config.body.width())).transpose()?;
        let hard = config.hard.as_ref().map(|hard| HardVectors::new(weights, places, (hard, config.body.width()))).transpose()?;
        let places = config.places.tower;
        let body = match &config.body {
            Body::Tower(tower) => LoadedBody::Tower(Box::new(Tower::new(weights, places, tower, precision)?)),
            Body::Conformer(conformer) => LoadedBody::Conformer(Box::new(Conformer::new(weights, places, conformer)?)),
            Body::Speech(speech) => LoadedBody::Speech(Box::new(Speech::new(weights, places, speech)?)),
            Body::Mobile(mobile) => LoadedBody::Mobile(Box::new(MobileNet::new(weights, places, mobile, precision)?)),
        };
        let deep = deep_projectors(weights, config)?;
        let encoder = Self { body, connector, beside_images, deep, separators, hard, config: config.clone() };
        if config.has_own_file {
            mmproj::check_rest(weights, config)?;
        }
        Ok(encoder)
    }

    /// Vectors of a row of an item.
    pub(crate) fn num_planes(&self) -> usize {
        self.config.num_planes()
    }

    /// The rows of a step whose tokens have vectors as images or sounds have them.
    pub(crate) fn hard_rows(&mut self, backend: &dyn Backend, token_ids: &[u32]) -> Result<Option<VectorRows>, EngineError> {
        match (&mut self.hard, &self.connector) {
            (Some(hard), Connector::Projector(projector)) => hard.of_step((backend, projector), token_ids),
            _ => Ok(None),
        }
    }

    /// Those between an item's vectors, of the decoder's width.
    fn separators(&self, backend: &dyn Backend) -> Result<Vec<f32>, EngineError> {
        match (&self.config.arrangement, &self.connector) {
            (Arrangement::Separated { .. }, Connector::Projector(projector)) => {
                let columns = self.config.projector.regroup.columns(self.config.body.width());
                projector.project(backend, self.separators.clone(), columns)
            }
            _ => Ok(self.separators.clone()),
        }
    }

    /// The vectors of an item, `[1 + deep, num_rows, hidden_size]`: those of its rows, then those that are added behind the
    /// decoder's first layers.
    pub(crate) fn encode(&mut self, backend: &dyn Backend, item: &PromptItem) -> Result<Vec<f32>, EngineError> {
        if self.config.is_crossed {
            let (LoadedBody::Tower(tower), Connector::Projector(projector)) = (&mut self.body, &self.connector) else {
                return Err(EngineError::Internal("vectors that layers look at are a tower's and a projector's".into()));
            };
            let mut vectors = Vec::new();
            for image in item.before.iter().map(|image| &image.processed).chain([&item.processed]) {
                let states = tower.run_tiled(backend, image)?;
                vectors.extend(projector.project(backend, states, self.config.body.width())?);
            }
            return Ok(vectors);
        }
        let tiles = &item.processed.tiles;
        let grids = self.config.grids(&item.processed);
        let taken: Vec<_> = self.config.deep.iter().map(|deep| deep.layer).collect();
        let mut states = match &mut self.body {
            LoadedBody::Tower(tower) => {
                let pairs: Vec<_> = tiles.iter().zip(&grids).collect();
                tower.run(backend, &pairs, &taken)?
            }
            LoadedBody::Conformer(conformer) => {
                tiles.iter().map(|tile| Ok(vec![conformer.run(backend, tile)?])).collect::<Result<Vec<_>, EngineError>>()?
            }
            LoadedBody::Speech(speech) => {
                let parts = tiles.iter().zip(&grids);
                parts
                    .map(|(tile, grid)| Ok(vec![speech.run(backend, tile, grid.len())?]))
                    .collect::<Result<Vec<_>, EngineError>>()?
            }
            LoadedBody::Mobile(mobile) => {
                tiles.iter().map(|tile| Ok(vec![mobile.run(backend, tile)?])).collect::<Result<Vec<_>, EngineError>>()?
            }
        };
        let separators = self.separators(backend)?;
        let mut vectors = Vec::new();
        let mut outputs = Vec::with_capacity(tiles.len());
        for (states, grid) in states.iter_mut().zip(&grids) {
            let last = &mut states[taken.len()];
            outputs.push(match &self.connector {
                Connector::Projector(projector) => {
                    let beside = self.beside_images.as_ref().filter(|_| item.is_beside_images);
                    let projector = beside.unwrap_or(projector);
                    self.config.kept(projector.run(backend, last, grid)?, &item.layout)
                }
                Connector::Resampler(resampler) => resampler.run(backend, last)?,
            });
        }
        vectors.extend(item.layout.arrange(&self.config, &outputs, &separators));
        if let (Some(hard), Connector::Projector(projector)) = (&mut self.hard, &self.connector) {
            hard.fill((backend, projector), &mut vectors)?;
        }
        for (place, projector) in self.deep.iter().enumerate() {
            let mut outputs = Vec::with_capacity(tiles.len());
            for (states, grid) in states.iter_mut().zip(&grids) {
                outputs.push(projector.run(backend, &mut states[place], grid)?);
            }
            vectors.extend(item.layout.arrange(&self.config, &outputs, &separators));
        }
        Ok(vectors)
    }
}

/// The vectors of its own that an encoder has: of the decoder's width, or of what is projected to it.
fn separators(weights: &mut TowerWeights<'_>, config: &MediaConfig) -> Result<Vec<f32>, EngineError> {
    let hidden = config.projector.out_features();
    let columns = config.projector.regroup.columns(config.body.width());
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

fn deep_projectors(weights: &mut TowerWeights<'_>, config: &MediaConfig) -> Result<Vec<Projector>, EngineError> {
    let projector = |deep: &config::DeepStack| {
        let places: Vec<_> = config.places.tower.iter().map(|place| format!("{place}{}", deep.place)).collect();
        Projector::new(weights, &places, &deep.projector, config.body.width())
    };
    config.deep.iter().map(projector).collect()
}

impl Body {
    /// Columns of what comes out.
    pub(crate) fn width(&self) -> usize {
        match self {
            Self::Tower(tower) => tower.output_size(),
            Self::Conformer(conformer) => conformer.out_features,
            Self::Speech(speech) => speech.hidden_size,
            Self::Mobile(mobile) => mobile.out_features,
        }
    }

    /// Rows and columns of places of a tile; of a sound's frames one row.
    fn patches(&self, tile: &Tile) -> [usize; 2] {
        match self {
            Self::Tower(tower) => tower.patches(tile),
            Self::Conformer(conformer) => [tile.height, conformer.num_places(tile.width)],
            Self::Speech(speech) => [tile.height, speech.num_places(tile.width)],
            Self::Mobile(mobile) => [mobile.side; 2],
        }
    }
}

impl MediaConfig {
    /// The places of a tile that become vectors.
    fn vectored(&self, item: &Processed, tile: &Tile) -> [usize; 2] {
        match self.silence {
            Silence::Heard => self.body.patches(tile),
            Silence::Unseen | Silence::Dropped => {
                self.body.patches(&Tile { height: 1, width: item.original.1.min(tile.width), pixels: Vec::new() })
            }
        }
    }

    /// The grids of what layers see of the tiles.
    fn grids(&self, item: &Processed) -> Vec<Grid> {
        if let Some(grids) = self.partly_seen(item) {
            return grids;
        }
        let windows = self.tower().and_then(|tower| tower.windows.as_ref());
        let patches = |tile| if self.silence == Silence::Unseen { self.vectored(item, tile) } else { self.body.patches(tile) };
        item.tiles.iter().map(|tile| Grid::new(patches(tile), windows)).collect()
    }

    /// The first of a chunk's vectors: as many as it has in a prompt.
    fn kept(&self, mut vectors: Vec<f32>, layout: &ItemLayout) -> Vec<f32> {
        if self.silence == Silence::Dropped {
            let hidden = self.projector.out_features();
            vectors.truncate(layout.num_rows * hidden);
        }
        vectors
    }

    /// The transformer that makes its states, if it is one.
    pub(crate) fn tower(&self) -> Option<&TowerConfig> {
        if let Body::Tower(tower) = &self.body { Some(tower) } else { None }
    }

    /// What it encodes.
    pub(crate) fn kind(&self) -> MediaKind {
        match self.processor {
            MediaProcessor::Images(_) => MediaKind::Image,
            MediaProcessor::Sounds(_) => MediaKind::Sound,
        }
    }

    /// How images become the encoder's input, if it takes images.
    pub(crate) fn images_mut(&mut self) -> Option<&mut images::Processor> {
        if let MediaProcessor::Images(processor) = &mut self.processor { Some(processor) } else { None }
    }

    /// Whether the tower has positions for these tiles.
    fn check_tiles(&self, image: &Processed) -> Result<(), EngineError> {
        if let Body::Mobile(mobile) = &self.body
            && image.tiles.iter().any(|tile| [tile.height, tile.width] != mobile.size)
        {
            return Err(EngineError::Internal(format!("an image of another size than {:?}", mobile.size)));
        }
        let Some(tower) = self.tower() else { return Ok(()) };
        let patch = tower.patch_size;
        if let config::Positions::Axes { side, .. } = tower.positions {
            let is_long = |tile: &&images::Tile| tile.height.max(tile.width) / patch > side;
            return image.tiles.iter().find(is_long).map_or(Ok(()), |tile| {
                Err(EngineError::InvalidArgument(format!(
                    "the model's image processor makes {} x {} pixels, and its encoder takes {side} patches of {patch} a side",
                    tile.width, tile.height
                )))
            });
        }
        let (config::Positions::Learned { side } | config::Positions::Turned { side, .. }) = tower.positions else {
            return Ok(());
        };
        let is_other = |tile: &&images::Tile| [tile.height / patch, tile.width / patch] != [side; 2];
        image.tiles.iter().find(is_other).map_or(Ok(()), |tile| {
            Err(EngineError::InvalidArgument(format!(
                "the model's image processor makes tiles of {} x {} pixels, and its encoder takes {side} x {side} patches of {patch}",
                tile.width, tile.height
            )))
        })
    }

    /// Vectors of a row of an item.
    pub(crate) fn num_planes(&self) -> usize {
        1 + self.deep.len()
    }

    /// Bytes that layers which look at images make of the largest, in F32; 0 where none do.
    pub(crate) fn largest_kept(&self, decoder: &DecoderConfig) -> u64 {
        let tiled = self.tower().and_then(|tower| Some((tower.tiled.as_ref()?.max_tiles, tower.rows_of_tile())));
        let num_vectors = tiled.map_or(0, |(tiles, rows)| tiles * rows);
        let spec = decoder.cross_kv_spec(num_vectors, KvDType::F32).ok().flatten();
        spec.and_then(|spec| spec.total_bytes()).unwrap_or(0)
    }

    /// Rows that a tile of full size becomes, of a tower whose tiles all have one, or whose processor has a bound.
    pub(crate) fn rows_of_tile(&self) -> usize {
        if let MediaProcessor::Images(processor) = &self.processor
            && let Some(most) = processor.max_tokens
        {
            return most;
        }
        if let Body::Mobile(mobile) = &self.body {
            return mobile.side * mobile.side;
        }
        let Some(TowerConfig { positions: config::Positions::Learned { side }, .. }) = self.tower() else { return 0 };
        let rows = side / self.projector.regroup.sides(*side)[0].max(1);
        rows * rows
    }

    /// Bytes of the encoder's activations for its largest input.
    pub(crate) fn activation_bytes(&self) -> u64 {
        let columns = self.projector.out_features();
        match &self.body {
            Body::Tower(tower) => tower.activation_bytes(self.max_rows()) + tower.taken_bytes(columns),
            Body::Conformer(conformer) => conformer.activation_bytes(),
            Body::Speech(speech) => speech.activation_bytes(),
            Body::Mobile(mobile) => mobile.activation_bytes(),
        }
    }

    /// Rows of any image, of a tower that computes all of its tiles together.
    fn rows_of_image(&self) -> usize {
        self.tower().map_or(0, TowerConfig::rows_of_image)
    }

    /// Rows that are computed at once at most, but for a tile that has more.
    fn max_rows(&self) -> usize {
        tower::MAX_ROWS.max(self.rows_of_image())
    }

    /// Workspaces that serve the encoder as well.
    pub(crate) fn widen(&self, shape: WorkspaceShape) -> WorkspaceShape {
        let (widest, inner) = match &self.body {
            Body::Tower(tower) => (tower.hidden_size.max(tower.frame_columns()), tower.intermediate_size),
            Body::Conformer(conformer) => (conformer.widest(), 0),
            Body::Speech(speech) => (speech.widest(), 0),
            Body::Mobile(mobile) => (mobile.widest(), 0),
        };
        WorkspaceShape {
            num_tokens: shape.num_tokens.max(self.max_rows()),
            seq_len: shape.seq_len.max(self.rows_of_image()),
            hidden_size: shape.hidden_size.max(widest),
            intermediate_size: shape.intermediate_size.max(inner),
            ..shape
        }
    }
}
