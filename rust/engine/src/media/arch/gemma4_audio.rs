//! The sounds of Gemma 4: a conformer, whose states a norm and a matrix bring to the decoder's width.

use device::NormKind;
use serde_json::Value;

use super::Reader;
use crate::{
    EngineError,
    media::config::{
        ConformerConfig, ConformerStyle, GEMMA4, MediaConfig, MediaProcessor, Placeholder, Places, ProjectorConfig,
        ProjectorNorm, Regroup,
    },
    model::fields::Fields,
};

/// Of Gemma 3n's as well.
pub(super) const PLACES: Places =
    Places { tower: &["model.audio_tower.", "audio_tower."], projector: &["model.embed_audio.", "embed_audio."], newline: &[] };

/// Scores of what is not seen, so far below all others that they have no part.
const UNSEEN: f64 = -1e6;

/// Of the two convolutions before the layers.
pub(super) fn channels(reader: &Reader<'_, '_>, key: &str) -> Result<[usize; 2], EngineError> {
    let channels = reader.encoder.typed(key, "two numbers of channels", |value| {
        let numbers: Vec<_> = value.as_array()?.iter().filter_map(Value::as_u64).map(|number| number as usize).collect();
        <[usize; 2]>::try_from(numbers).ok()
    })?;
    Ok(channels.unwrap_or([128, 32]))
}

/// Places that attention sees, its own and those before.
pub(super) fn reach(reader: &Reader<'_, '_>, key: &str) -> Result<usize, EngineError> {
    let reach = reader.size(key, 13)?;
    // Of so little there is nothing that attention sees.
    if reach < 2 {
        return Err(reader.encoder.error(key, format!("is {reach}; implemented: 2 or more")));
    }
    Ok(reach)
}

pub(super) fn gemma4_audio(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let fields = &reader.encoder;
    let MediaProcessor::Sounds(own) = &reader.processor else {
        return Err(fields.error("model_type", "is of sounds, and the processor is of images"));
    };
    let audio::Kind::Gemma4(audio::Gemma4 { is_gemma3n: false, .. }) = own.kind else {
        return Err(fields.error("model_type", "goes with features of Gemma4AudioFeatureExtractor"));
    };
    if let Some(unseen) = fields.number("attention_invalid_logits_value")?.filter(|unseen| *unseen > UNSEEN) {
        return Err(fields.error("attention_invalid_logits_value", format!("is {unseen}; implemented: at most {UNSEEN}")));
    }
    let channels = channels(reader, "subsampling_conv_channels")?;
    let reach = reach(reader, "attention_context_left")?;
    let eps = reader.number("rms_norm_eps", 1e-6)?;
    let conformer = ConformerConfig {
        style: ConformerStyle::Gemma4,
        num_mel_bins: own.num_mel_bins,
        max_frames: own.max_frames(),
        channels,
        hidden_size: reader.size("hidden_size", 1024)?,
        num_heads: reader.size("num_attention_heads", 8)?,
        num_layers: reader.size("num_hidden_layers", 12)?,
        kernel_size: reader.size("conv_kernel_size", 5)?,
        ffn_scale: reader.number("residual_weight", 0.5)?,
        chunk_size: reader.size("attention_chunk_size", 12)?,
        left: reach - 1,
        right: reader.size("attention_context_right", 0)?,
        score_cap: reader.number("attention_logit_cap", 50.0)?,
        state_cap: reader.number("gradient_clipping", 1e10)?,
        activation: Reader::activation(fields, "hidden_act", "silu")?,
        eps,
        stem_eps: eps,
        is_bounded: fields.flag("use_clipped_linears")?.unwrap_or(true),
        out_features: reader.size("output_proj_dims", 1536)?,
        names: &GEMMA4,
    };
    let projector = ProjectorConfig {
        norm: None,
        regroup: Regroup::Each,
        late_norm: Some(ProjectorNorm { name: "", kind: NormKind::Rms, eps, offset: 0.0 }),
        layers: vec![reader.last("embedding_projection")],
    };
    let placeholder = Placeholder::Enclosed {
        before: reader.token(["boa_token_id", "boa_token_index"])?,
        after: reader.token(["eoa_token_index", "eoa_token_id"])?,
    };
    Ok(MediaConfig { placeholder, places: PLACES, ..reader.config("gemma4", conformer, projector)? })
}
