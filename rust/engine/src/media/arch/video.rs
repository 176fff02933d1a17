//! Families of images that take videos as well.

use std::path::Path;

use images::{VideoProcessor, VideoRules};

use crate::{
    EngineError,
    media::{
        config::{Body, MediaConfig},
        video::{Timing, VideoConfig},
    },
    model::fields::{Fields, HfFields},
};

/// How a family tells when frames are.
#[derive(Clone, Copy)]
enum Told {
    Counted,
    PerSecond,
    Written,
}

/// By HF `model_type`.
const FAMILIES: [(&[&str], VideoRules, Told); 3] = [
    (&["qwen2_vl"], VideoRules::OfFrames, Told::Counted),
    (&["qwen2_5_vl"], VideoRules::OfFrames, Told::PerSecond),
    (&["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], VideoRules::OfAll, Told::Written),
];

/// The names of those families.
pub(crate) fn families_with_videos() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|(names, ..)| names.iter().copied())
}

impl MediaConfig {
    /// With videos, where the family takes them, and config.json has a token for them.
    pub(super) fn with_videos(
        mut self,
        folder: &Path,
        whole: &HfFields<'_>,
        max_edge: Option<usize>,
    ) -> Result<Self, EngineError> {
        let model_type = whole.text("model_type")?.unwrap_or_default();
        let Some((_, rules, told)) = FAMILIES.iter().find(|(names, ..)| names.contains(&&model_type[..])) else {
            return Ok(self);
        };
        let token = |key: &str| {
            let id = whole.size(key)?.map(u32::try_from).transpose();
            id.map_err(|_| whole.error(key, "is no token id"))
        };
        let (Some(token_id), Body::Tower(tower)) = (token("video_token_id")?, &mut self.body) else { return Ok(self) };
        if token_id == self.token_id {
            return Err(whole.error("video_token_id", format!("is {token_id}, which stands for images")));
        }
        let read = VideoProcessor::from_folder(folder, *rules).map_err(|why| EngineError::Load(why.to_string()))?;
        let Some(mut processor) = read else { return Ok(self) };
        processor.frames.max_edge = max_edge;
        let merge_size = self.projector.regroup.sides(1)[0];
        let own = [processor.frames.patch_size, processor.frames.merge_size, processor.frames.temporal_patch_size];
        let towers = [tower.patch_size, merge_size, tower.num_frames];
        if own != towers {
            let text = "patch_size, merge_size and temporal_patch_size";
            return Err(EngineError::Load(format!(
                "{}: the processor of videos has {text} {own:?}, and the encoder {towers:?}",
                folder.display()
            )));
        }
        let timing = match told {
            Told::Counted => Timing::Counted,
            Told::PerSecond => {
                let vision = whole.child("vision_config")?;
                let rate = vision.map(|vision| vision.number("tokens_per_second")).transpose()?.flatten().unwrap_or(4.0);
                if !(0.0..=10_000.0).contains(&rate) {
                    return Err(whole.error("vision_config", format!("has tokens_per_second {rate}")));
                }
                Timing::PerSecond(rate)
            }
            Told::Written => {
                let needed = |key: &str| token(key)?.ok_or_else(|| whole.error(key, "is missing, which videos need"));
                Timing::Written { before: needed("vision_start_token_id")?, after: needed("vision_end_token_id")? }
            }
        };
        tower.sees_frames = true;
        self.video = Some(VideoConfig { token_id, processor, timing });
        Ok(self)
    }
}
