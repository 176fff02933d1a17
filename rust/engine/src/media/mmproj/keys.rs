//! The keys of an encoder's file.

use super::Reader;
use crate::{EngineError, keys, model::fields::Fields};

/// Keys that are read, or that say what tensors and other keys say as well.
const KNOWN: [&str; 43] = [
    "clip.audio.attention.head_count",
    "clip.audio.attention.layer_norm_epsilon",
    "clip.audio.block_count",
    "clip.audio.embedding_length",
    "clip.audio.feed_forward_length",
    "clip.audio.num_mel_bins",
    "clip.audio.projection_dim",
    "clip.audio.projector.stack_factor",
    "clip.audio.projector_type",
    "clip.has_audio_encoder",
    "clip.has_llava_projector",
    "clip.has_qwen2vl_merger",
    "clip.has_text_encoder",
    "clip.has_vision_encoder",
    "clip.projector_type",
    "clip.use_gelu",
    "clip.use_silu",
    "clip.vision.attention.head_count",
    "clip.vision.attention.layer_norm_epsilon",
    "clip.vision.block_count",
    "clip.vision.embedding_length",
    "clip.vision.feature_layer",
    "clip.vision.feed_forward_length",
    "clip.vision.image_aspect_ratio",
    "clip.vision.image_crop_resolution",
    "clip.vision.image_grid_pinpoints",
    "clip.vision.image_max_pixels",
    "clip.vision.image_mean",
    "clip.vision.image_min_pixels",
    "clip.vision.image_size",
    "clip.vision.image_std",
    "clip.vision.is_deepstack_layers",
    "clip.vision.mm_patch_merge_type",
    "clip.vision.n_wa_pattern",
    "clip.vision.patch_size",
    "clip.vision.preproc_image_size",
    "clip.vision.preproc_max_tiles",
    "clip.vision.preproc_min_tiles",
    "clip.vision.projection_dim",
    "clip.vision.projector.scale_factor",
    "clip.vision.projector_type",
    "clip.vision.spatial_merge_size",
    "clip.vision.window_size",
];

/// Keys behind `clip.vision` that only some projectors go with.
const OF_SOME: [&str; 15] = [
    "feature_layer",
    "image_aspect_ratio",
    "image_crop_resolution",
    "image_grid_pinpoints",
    "image_max_pixels",
    "image_min_pixels",
    "is_deepstack_layers",
    "mm_patch_merge_type",
    "n_wa_pattern",
    "preproc_image_size",
    "preproc_max_tiles",
    "preproc_min_tiles",
    "projector.scale_factor",
    "spatial_merge_size",
    "window_size",
];

impl Reader<'_> {
    /// That there are no such keys but those that a projector reads.
    pub(super) fn check_own_keys(&self, own: &[&str]) -> Result<(), EngineError> {
        let is_other = |key: &&&str| !own.contains(*key) && self.vision.value(key).is_some();
        match OF_SOME.iter().find(is_other) {
            Some(key) => Err(self.vision.error(key, "asks for what is not computed with this projector")),
            None => Ok(()),
        }
    }

    /// That no key asks for what is not computed.
    pub(super) fn check_keys(&self) -> Result<(), EngineError> {
        let is_unknown = |key: &&str| key.starts_with("clip.") && !KNOWN.contains(key);
        let mut unknown: Vec<_> = self.metadata.iter().map(|(key, _)| key).filter(is_unknown).map(str::to_owned).collect();
        unknown.sort_unstable();
        let is_refused =
            |key: &&String| key.contains("wa_layer_indexes") || key.contains("head_count_kv") || key.starts_with("clip.audio.");
        if let Some(key) = unknown.iter().find(is_refused) {
            return Err(self.error(&format!("`{key}` asks for what is not computed")));
        }
        keys::warn_of(&unknown, self.what);
        Ok(())
    }
}
