//! Videos: groups of frames, each of which is encoded by itself as an image is.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use images::{ImageError, Processed, RgbImage, VideoProcessor};
use paged::{EncoderContent, EncoderItem};
use video::{Video, VideoError};

use super::{Encoders, ItemLayout, KEY, MediaConfig, PromptItem, arch::families_with_videos};
use crate::{EngineError, Media, MediaKind, Tokenizer};

/// How a model of images takes videos.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoConfig {
    /// The token in whose places the vectors of frames go.
    pub token_id: u32,
    /// Which frames are taken, and what they become.
    pub processor: VideoProcessor,
    /// How a prompt tells when they are.
    pub timing: Timing,
}

/// How a prompt tells when frames are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Timing {
    /// Groups follow each other; each has a coordinate of time that is larger by one (Qwen2-VL, arXiv:2409.12191).
    Counted,
    /// The same, larger by so much a second (Qwen2.5-VL, arXiv:2502.13923).
    PerSecond(f64),
    /// Each group stands between two tokens, behind a text that says when it is, and has coordinates as an image has (Qwen3-VL,
    /// arXiv:2511.21631).
    Written {
        /// The token before its vectors.
        before: u32,
        /// The one behind them.
        after: u32,
    },
}

/// Where a group of frames stands in its video.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moment {
    /// Seconds from the beginning.
    pub(crate) seconds: f64,
    /// Its coordinate of time behind the first group's; `None` where it stands by itself.
    pub(crate) time: Option<u32>,
    /// It is the video's first.
    pub(crate) is_first: bool,
}

/// What ends the work on a video.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Video(#[from] VideoError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl VideoConfig {
    /// The frames of a video that are taken, and how many of them there are a second.
    fn taken(&self, video: &Video) -> (Vec<usize>, f64) {
        if video.given().is_some() {
            return ((0..video.num_frames()).collect(), video.fps());
        }
        let taken = self.processor.sample(video.num_frames(), video.fps(), video.wanted_fps());
        let fps = taken.len() as f64 / video.num_frames().max(1) as f64 * video.fps();
        (taken, fps)
    }

    /// Coordinates of time of so many groups, of frames of which there are so many a second. As PyTorch multiplies, in f32.
    fn times(&self, num_groups: usize, fps: f64) -> Vec<Option<u32>> {
        let step = match self.timing {
            Timing::Written { .. } => return vec![None; num_groups],
            Timing::Counted => 1.0,
            Timing::PerSecond(rate) => rate * (self.processor.frames.temporal_patch_size as f64 / fps),
        };
        (0..num_groups).map(|group| Some((group as f32 * step as f32) as u32)).collect()
    }
}

impl PromptItem {
    /// Why videos are not taken.
    pub(crate) fn no_videos(configs: &Encoders<MediaConfig>) -> EngineError {
        let known: Vec<_> = families_with_videos().collect();
        EngineError::InvalidArgument(format!(
            "this model takes {}, and the messages have videos: leave them out, or load a model that takes them: {}",
            configs.takes(),
            known.join(", ")
        ))
    }

    /// Rows of a prompt that a video takes, before it is decoded; 0 for a model that takes none.
    pub(crate) fn rows_of_video(configs: &Encoders<MediaConfig>, video: &Video) -> usize {
        let Some(taken) = configs.get(MediaKind::Video).and_then(|config| config.video.as_ref()) else { return 0 };
        let num_frames = taken.taken(video).0.len();
        let Ok((height, width)) = taken.processor.size(num_frames, taken.processor.bounded(video.size())) else { return 0 };
        let group = |edge: usize| edge / taken.processor.frames.patch_size.max(1) / taken.processor.frames.merge_size.max(1);
        let num_groups = num_frames.div_ceil(taken.processor.frames.temporal_patch_size.max(1));
        num_groups.saturating_mul(group(height).saturating_mul(group(width)))
    }

    /// The coordinate of time of a video's last frames.
    pub(crate) fn last_time(configs: &Encoders<MediaConfig>, media: &Media) -> Option<u32> {
        let Media::Video(video) = media else { return None };
        let taken = configs.get(MediaKind::Video)?.video.as_ref()?;
        let (numbers, fps) = taken.taken(video);
        *taken.times(numbers.len().div_ceil(taken.processor.frames.temporal_patch_size.max(1)), fps).last()?
    }

    /// The groups of a video's frames. Equal ones at equal times have equal keys, in whatever video they are.
    /// `spent` is the time that those before it in a request took, to which its own is added.
    pub(crate) fn groups(
        config: &MediaConfig,
        taken: &VideoConfig,
        video: &Video,
        spent: &mut Duration,
    ) -> Result<Vec<Arc<Self>>, EngineError> {
        let begun = Instant::now();
        let (numbers, fps) = taken.taken(video);
        let processor = &taken.processor;
        let len = processor.frames.temporal_patch_size.max(1);
        let (seconds, times) = (processor.seconds(&numbers, video.fps()), taken.times(numbers.len().div_ceil(len), fps));
        let (mut items, mut group, mut left) = (Vec::new(), Vec::with_capacity(len), numbers.len());
        let mut size = None;
        let take = |frame: &RgbImage| -> Result<(), Failed> {
            let size = match size {
                Some(size) => size,
                None => *size.insert(processor.size(numbers.len(), processor.bounded(frame.size()))?),
            };
            group.push(processor.resized(frame, size)?);
            left -= 1;
            if group.len() == len || left == 0 {
                let number = items.len();
                let moment = Moment { seconds: seconds[number], time: times[number], is_first: number == 0 };
                items.push(Self::group(config, taken, &group, moment)?);
                group.clear();
            }
            Ok(())
        };
        video.frames(&numbers, spent, take).map_err(|error| match error {
            Failed::Engine(error) => error,
            why => EngineError::InvalidArgument(format!("a video: {why}")),
        })?;
        tracing::debug!("{} frames of a video were read in {:.3} s", numbers.len(), begun.elapsed().as_secs_f64());
        Ok(items)
    }

    fn group(config: &MediaConfig, taken: &VideoConfig, frames: &[RgbImage], moment: Moment) -> Result<Arc<Self>, EngineError> {
        let tile = taken.processor.tile(frames);
        let processed = Processed { original: (tile.height, tile.width), tiles: vec![tile], grid: (0, 0), whole: 0 };
        config.check_tiles(&processed)?;
        let layout = ItemLayout::new(config, &processed);
        let pixels: Vec<u8> = frames.iter().flat_map(|frame| frame.pixels().iter().copied()).collect();
        // Rows whose coordinates differ are different rows to the prefix cache.
        let time = moment.time.map_or(0, |time| 1 + 2 * time as usize + usize::from(moment.is_first));
        let item = EncoderItem {
            dimensions: &[processed.original.0, processed.original.1, frames.len(), time],
            mode: "RGB8 frames",
            processor: &taken.processor.frames.identity(),
            tower: &[],
            adapter: &[],
            content: EncoderContent::Samples(&pixels),
        };
        let (kind, token_id, key) = (MediaKind::Video, taken.token_id, item.key(&KEY));
        let before = Vec::new();
        Ok(Arc::new(Self { kind, token_id, processed, layout, key, before, is_beside_images: false, moment: Some(moment) }))
    }
}

impl VideoConfig {
    /// What a chat template writes for a video. Where groups of frames stand between tokens each, the two about the whole go.
    pub(crate) fn replaced(&self, tokenizer: &Tokenizer) -> String {
        let ids = match self.timing {
            Timing::Counted | Timing::PerSecond(_) => vec![self.token_id],
            Timing::Written { before, after } => vec![before, self.token_id, after],
        };
        ids.into_iter().map(|id| tokenizer.token_text(id)).collect()
    }

    /// What comes in the place of a video in a prompt.
    pub(crate) fn expansion<'a>(&self, tokenizer: &Tokenizer, groups: impl Iterator<Item = &'a Arc<PromptItem>>) -> String {
        let token = tokenizer.token_text(self.token_id);
        let rows = |group: &PromptItem| token.repeat(group.layout.num_rows);
        match self.timing {
            Timing::Counted | Timing::PerSecond(_) => groups.map(|group| rows(group)).collect(),
            Timing::Written { before, after } => {
                let [before, after] = [before, after].map(|id| tokenizer.token_text(id));
                let seconds = |group: &PromptItem| group.moment.map_or(0.0, |moment| moment.seconds);
                groups.fold(String::new(), |text, group| {
                    text + &format!("<{:.1} seconds>{before}{}{after}", seconds(group), rows(group))
                })
            }
        }
    }
}
