//! From a video's frames to tiles: which of them are taken, their size, and how several become one input of an encoder.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{
    ImageError, Processor, RgbImage, Size, Tile,
    config::{Keys, MAX_EDGE, read_object},
    resize,
    resize::check_pixels,
    sizes,
};

/// Frames a second that are taken where a file says nothing, as the models were trained (qwen-vl-utils).
const FPS: f64 = 2.0;
/// Frames of a video at most, whatever a file says.
pub const MAX_FRAMES: usize = 4096;

/// Which rules a processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VideoRules {
    /// Bounds of pixels are those of a frame: Qwen2-VL, Qwen2.5-VL.
    OfFrames,
    /// They are those of all frames together: Qwen3-VL, Qwen 3.5.
    OfAll,
}

impl VideoRules {
    /// The name in files.
    fn name(self) -> &'static str {
        match self {
            Self::OfFrames => "Qwen2VLVideoProcessor",
            Self::OfAll => "Qwen3VLVideoProcessor",
        }
    }

    /// What holds where a file says nothing.
    fn defaults(self) -> Map<String, Value> {
        let defaults = match self {
            Self::OfFrames => json!({ "size": { "shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768 } }),
            Self::OfAll => json!({
                "size": { "shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768 },
                "patch_size": 16,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
            }),
        };
        if let Value::Object(defaults) = defaults { defaults } else { Map::new() }
    }

    /// `max_video_tokens` where a file says nothing: of all frames, or of one.
    fn max_tokens(self) -> usize {
        if self == Self::OfFrames { 128_000 } else { 768 }
    }
}

/// What makes tiles of a video.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoProcessor {
    /// Which rules it has.
    pub rules: VideoRules,
    /// How a frame becomes a tile: filter, mean, patches, and the bounds of pixels.
    pub frames: Processor,
    /// `fps`: frames a second that are taken.
    pub fps: f64,
    /// `num_frames`: so many, however long a video is.
    pub num_frames: Option<usize>,
    /// `min_frames`.
    pub min_frames: usize,
    /// `max_frames`.
    pub max_frames: usize,
    /// `max_video_tokens`, if `cap_pixels_per_frame`.
    pub max_tokens: Option<usize>,
}

/// Keys of videos alone, which are read here or change nothing for frames that are given.
const OWN: [&str; 9] = [
    "cap_pixels_per_frame",
    "do_sample_frames",
    "fps",
    "max_duration",
    "max_video_tokens",
    "num_frames",
    "return_metadata",
    "video_metadata",
    "video_processor_type",
];

impl VideoProcessor {
    /// From a model's folder: the `video_processor` of its `processor_config.json`, or its `video_preprocessor_config.json`, or
    /// what `preprocessor_config.json` says of images. Transformers looks in the same order. `None` where there is none of them.
    ///
    /// # Errors
    /// For files that cannot be read, and as [`Self::from_json`].
    pub fn from_folder(dir: &Path, rules: VideoRules) -> Result<Option<Self>, ImageError> {
        if let Some((what, json)) = read_object(&dir.join("processor_config.json"))?
            && let Some(inner) = json.get("video_processor").and_then(Value::as_object)
        {
            return Self::from_json(&what, inner, rules).map(Some);
        }
        for name in ["video_preprocessor_config.json", "preprocessor_config.json"] {
            if let Some((what, json)) = read_object(&dir.join(name))? {
                return Self::from_json(&what, &json, rules).map(Some);
            }
        }
        Ok(None)
    }

    /// From the object of such a file; `what` is the file's name in errors.
    ///
    /// # Errors
    /// [`ImageError::Config`] for a processor with other rules, values of a wrong form, and keys that are not honoured.
    pub fn from_json(what: &str, json: &Map<String, Value>, rules: VideoRules) -> Result<Self, ImageError> {
        let keys = Keys { what, json };
        if let Some(named) = json.get("video_processor_type").and_then(Value::as_str)
            && named != rules.name()
        {
            return Err(keys.error(format!("video_processor_type is {named}, and the model's videos need {}", rules.name())));
        }
        let mut of_frames = rules.defaults();
        of_frames.extend(json.iter().filter(|(key, value)| !value.is_null() && !OWN.contains(&&key[..])).map(owned));
        of_frames.insert("image_processor_type".into(), "Qwen2VLImageProcessor".into());
        let frames = Processor::from_json(what, &of_frames)?;
        let up_to = |key, default| Ok::<_, ImageError>(keys.up_to(key, MAX_EDGE)?.unwrap_or(default));
        let fps = keys.number("fps")?.unwrap_or(FPS);
        if !(fps > 0.0 && fps <= 1000.0) {
            return Err(keys.error(format!("fps is {fps}, and a number from 0 to 1000 is wanted")));
        }
        let is_capped = keys.bool("cap_pixels_per_frame", false)?;
        let max_tokens = keys.up_to("max_video_tokens", 1 << 24)?.unwrap_or(rules.max_tokens());
        Ok(Self {
            rules,
            fps,
            num_frames: keys.up_to("num_frames", MAX_FRAMES as u64)?,
            min_frames: up_to("min_frames", 4)?,
            max_frames: up_to("max_frames", 768)?.min(MAX_FRAMES),
            max_tokens: is_capped.then_some(max_tokens),
            frames,
        })
    }

    /// Which of `total` frames, `fps` of them a second, are taken, in order; `wanted`: so many a second.
    ///
    /// As `sample_frames` of Transformers 5.24, but that a video of fewer frames than a patch is taken whole.
    pub fn sample(&self, total: usize, fps: f64, wanted: Option<f64>) -> Vec<usize> {
        let group = self.frames.temporal_patch_size.max(1);
        let down = |count: usize| count / group * group;
        if total <= group {
            return (0..total).collect();
        }
        let seconds = total as f64 / fps.max(f64::MIN_POSITIVE);
        let by_rate = (seconds * wanted.unwrap_or(self.fps)).min(total as f64);
        let given = self.num_frames.filter(|_| wanted.is_none());
        match self.rules {
            VideoRules::OfFrames => {
                let most = down(self.max_frames.min(total));
                let count = given.map_or_else(
                    || down((by_rate.max(self.min_frames as f64).min(most as f64)) as usize),
                    |given| (given as f64 / group as f64).round_ties_even() as usize * group,
                );
                let count = count.clamp(1, total);
                // As PyTorch makes a range of them, in f32.
                (0..count).map(|at| ((at as f64 * (total as f64 / count as f64)) as f32 as usize).min(total - 1)).collect()
            }
            VideoRules::OfAll => {
                let count = given.unwrap_or((by_rate as usize).max(self.min_frames).min(self.max_frames)).clamp(1, total);
                let step = (total - 1) as f64 / (count - 1).max(1) as f64;
                (0..count).map(|at| (at as f64 * step).round_ties_even() as usize).collect()
            }
        }
    }

    /// `(height, width)` that frames of such a size are resized to, where there are so many.
    ///
    /// # Errors
    /// [`ImageError::Unfit`] for edges of which one is more than 200 times the other, [`ImageError::TooManyPixels`].
    pub fn size(&self, num_frames: usize, (height, width): (usize, usize)) -> Result<(usize, usize), ImageError> {
        let unfit = |reason: &str| ImageError::Unfit { width: width as u32, height: height as u32, reason: reason.into() };
        let Size::Edges { shortest, longest } = self.frames.size else {
            return Err(unfit("its processor has no bounds of pixels"));
        };
        let group = self.frames.temporal_patch_size.max(1);
        let (num_frames, factor) = (num_frames.max(group), self.frames.patch_size * self.frames.merge_size);
        if !self.frames.resize {
            let fits = height % factor == 0 && width % factor == 0;
            return if fits { Ok((height, width)) } else { Err(unfit("do_resize is false, and its edges are no whole groups")) };
        }
        let floor = (shortest as f64 * 1.05) as usize;
        let size = match self.rules {
            VideoRules::OfFrames => {
                let share = |tokens: usize| (tokens as f64 * (factor * factor) as f64 * 0.9) as usize * group / num_frames;
                let longest = self.max_tokens.map_or(longest, |tokens| longest.min(share(tokens)).max(floor));
                let is_long = height.max(width) > 200 * height.min(width);
                (!is_long).then(|| sizes::qwen2_vl((height, width), factor, shortest, longest))
            }
            VideoRules::OfAll => {
                let capped = |tokens: usize| (tokens * factor * factor).min(longest / num_frames).max(floor) * num_frames;
                let longest = self.max_tokens.map_or(longest, capped);
                sizes::glm4v((height, width), factor, (num_frames, group), (shortest, longest))
            }
        };
        let size = size.ok_or_else(|| unfit("one edge is more than 200 times the other"))?;
        check_pixels(size.0, size.1)?;
        Ok(size)
    }

    /// A frame as it is before others are looked at: no longer than [`Processor::max_edge`].
    pub fn bounded(&self, (height, width): (usize, usize)) -> (usize, usize) {
        match self.frames.max_edge {
            Some(edge) if height.max(width) > edge => sizes::at_most((height, width), edge.max(1)),
            _ => (height, width),
        }
    }

    /// A frame in the size that [`Self::size`] has for it.
    ///
    /// # Errors
    /// [`ImageError::TooManyPixels`].
    pub fn resized(&self, frame: &RgbImage, size: (usize, usize)) -> Result<RgbImage, ImageError> {
        let bounded = self.bounded(frame.size());
        let small = if bounded == frame.size() { None } else { Some(resize(frame, bounded, self.frames.resample)?) };
        resize(small.as_ref().unwrap_or(frame), size, self.frames.resample)
    }

    /// The tile of frames that become one patch each, `[frames, 3, height, width]`; the last is repeated up to as many as a patch
    /// has.
    pub fn tile(&self, frames: &[RgbImage]) -> Tile {
        let mut tiles = frames.iter().map(|frame| self.frames.tile(frame));
        let Some(mut all) = tiles.next() else { return Tile { height: 0, width: 0, pixels: Vec::new() } };
        let mut last = None;
        for tile in tiles {
            all.pixels.extend_from_slice(&tile.pixels);
            last = Some(tile.pixels);
        }
        let last = last.unwrap_or_else(|| all.pixels.clone());
        for _ in frames.len()..self.frames.temporal_patch_size {
            all.pixels.extend_from_slice(&last);
        }
        all
    }

    /// Seconds from a video's beginning to the middle of each group of the frames that were taken, `fps` a second.
    pub fn seconds(&self, taken: &[usize], fps: f64) -> Vec<f64> {
        let at = |frame: &usize| *frame as f64 / fps;
        let group = |frames: &[usize]| frames.first().zip(frames.last()).map(|(first, last)| f64::midpoint(at(first), at(last)));
        taken.chunks(self.frames.temporal_patch_size.max(1)).filter_map(group).collect()
    }
}

fn owned((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rules: VideoRules, json: &Value) -> Result<VideoProcessor, ImageError> {
        VideoProcessor::from_json("video_preprocessor_config.json", json.as_object().unwrap(), rules)
    }

    /// By `sample_frames` of Transformers 5.24 with `fps` and the usual bounds.
    #[test]
    fn frames_are_sampled_as_in_transformers() {
        let first = of(VideoRules::OfFrames, &json!({})).unwrap();
        assert_eq!(first.sample(90, 30.0, None), [0, 15, 30, 45, 60, 75]);
        assert_eq!(first.sample(90, 30.0, Some(1.0)), [0, 22, 45, 67]);
        assert_eq!(first.sample(5, 30.0, None), [0, 1, 2, 3]);
        assert_eq!(first.sample(7, 3.0, None), [0, 1, 3, 5]);
        assert_eq!(first.sample(301, 25.0, None)[12..18], [150, 163, 175, 188, 200, 213]);
        let second = of(VideoRules::OfAll, &json!({})).unwrap();
        assert_eq!(second.sample(90, 30.0, None), [0, 18, 36, 53, 71, 89]);
        assert_eq!(second.sample(90, 30.0, Some(1.0)), [0, 30, 59, 89]);
        assert_eq!(second.sample(5, 30.0, None), [0, 1, 3, 4]);
        assert_eq!(second.sample(100, 29.97, None), [0, 20, 40, 59, 79, 99]);
        assert_eq!(second.sample(3, 30.0, None), [0, 1, 2]);
        for processor in [first, second] {
            assert_eq!(processor.sample(1, 30.0, None), [0]);
            assert_eq!(processor.sample(0, 30.0, None), [0; 0]);
            assert_eq!(processor.sample(1 << 40, 30.0, None).len(), 768);
        }
        let fixed = json!({ "num_frames": 6 });
        assert_eq!(of(VideoRules::OfAll, &fixed).unwrap().sample(90, 30.0, None).len(), 6);
        assert_eq!(of(VideoRules::OfFrames, &fixed).unwrap().sample(90, 30.0, None).len(), 6);
    }

    /// By `smart_resize` of Transformers 5.24.
    #[test]
    fn bounds_of_pixels_are_those_of_a_frame_or_of_all() {
        let size = json!({ "size": { "shortest_edge": 4096, "longest_edge": 25_165_824 / 8 } });
        let all = of(VideoRules::OfAll, &size).unwrap();
        for (num_frames, given, expected) in [
            (4, (100, 60), (96, 64)),
            (6, (480, 854), (480, 864)),
            (30, (1080, 1920), (224, 416)),
            (5, (20, 300), (32, 480)),
            (3, (64, 64), (64, 64)),
        ] {
            assert_eq!(all.size(num_frames, given).unwrap(), expected, "{num_frames} frames of {given:?}");
        }
        let frames = of(VideoRules::OfFrames, &json!({})).unwrap();
        assert_eq!(frames.size(4, (1080, 1920)).unwrap(), frames.size(400, (1080, 1920)).unwrap());
        let capped = of(VideoRules::OfFrames, &json!({ "cap_pixels_per_frame": true, "max_video_tokens": 2000 })).unwrap();
        let (height, width) = capped.size(400, (1080, 1920)).unwrap();
        assert!(height * width <= 128 * 28 * 28 * 105 / 100, "{height} x {width}");
        assert!(frames.size(4, (10, 3000)).is_err());
    }

    #[test]
    fn what_is_not_honoured_is_refused() {
        for (json, said) in [
            (json!({ "video_processor_type": "Glm4vVideoProcessor" }), "the model's videos need Qwen2VLVideoProcessor"),
            (json!({ "fps": 0 }), "fps is 0"),
            (json!({ "num_frames": "all" }), "num_frames"),
            (json!({ "do_mirror": true }), "do_mirror is true"),
        ] {
            let error = of(VideoRules::OfFrames, &json).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn the_last_frame_fills_a_patch_up() {
        let processor = of(VideoRules::OfAll, &json!({})).unwrap();
        let frame = |level| RgbImage::filled((32, 32), [level; 3]);
        let one = processor.tile(&[frame(0)]);
        assert_eq!((one.height, one.width, one.pixels.len()), (32, 32, 2 * 3 * 32 * 32));
        let two = processor.tile(&[frame(0), frame(255)]);
        assert_eq!([two.pixels[0], two.pixels[3 * 32 * 32]], [-1.0, 1.0]);
        assert_eq!(processor.seconds(&[0, 3, 6], 3.0), [0.5, 2.0]);
    }
}
