//! The sounds of Gemma 3n: a conformer much like that of Gemma 4, of which every sound has as many vectors.

use device::Activation;
use serde_json::json;

use super::{
    Reader, gemma3n,
    gemma4_audio::{PLACES, channels, reach},
};
use crate::{
    EngineError,
    media::config::{ConformerConfig, ConformerStyle, Filled, GEMMA3N, HardTokens, MediaConfig, MediaProcessor, Placeholder},
    model::fields::Fields,
};

pub(super) fn gemma3n_audio(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let fields = &reader.encoder;
    let MediaProcessor::Sounds(own) = &reader.processor else {
        return Err(fields.error("model_type", "is of sounds, and the processor is of images"));
    };
    let audio::Kind::Gemma4(audio::Gemma4 { is_gemma3n: true, .. }) = own.kind else {
        return Err(fields.error("model_type", "goes with features of Gemma3nAudioFeatureExtractor"));
    };
    for (key, usual) in [("sscp_conv_kernel_size", json!([[3, 3], [3, 3]])), ("sscp_conv_stride_size", json!([[2, 2], [2, 2]]))] {
        if let Some(given) = fields.value(key).filter(|given| given != &usual) {
            let shown: String = given.to_string().chars().take(80).collect();
            return Err(fields.error(key, format!("is {shown}; implemented: {usual}")));
        }
    }
    let bins = reader.size("input_feat_size", 128)?;
    if bins != own.num_mel_bins {
        return Err(fields.error("input_feat_size", format!("is {bins}, and the features have {} values", own.num_mel_bins)));
    }
    let channels = channels(reader, "sscp_conv_channel_size")?;
    let reach = reach(reader, "conf_attention_context_left")?;
    let hidden_size = reader.size("hidden_size", 1536)?;
    let conformer = ConformerConfig {
        // A factor of 1 and less leaves every state.
        style: ConformerStyle::Gemma3n { reduction: reader.size("conf_reduction_factor", 4)?.max(1) },
        num_mel_bins: own.num_mel_bins,
        max_frames: own.max_frames(),
        channels,
        hidden_size,
        num_heads: reader.size("conf_num_attention_heads", 8)?,
        num_layers: reader.size("conf_num_hidden_layers", 12)?,
        kernel_size: reader.size("conf_conv_kernel_size", 5)?,
        ffn_scale: reader.number("conf_residual_weight", 0.5)?,
        chunk_size: reader.size("conf_attention_chunk_size", 12)?,
        left: reach - 1,
        right: reader.size("conf_attention_context_right", 0)?,
        score_cap: reader.number("conf_attention_logit_cap", 50.0)?,
        state_cap: reader.number("gradient_clipping", 1e10)?,
        activation: Activation::Silu,
        eps: reader.number("rms_norm_eps", 1e-6)?,
        stem_eps: reader.number("sscp_conv_group_norm_eps", 1e-3)?,
        is_bounded: false,
        out_features: hidden_size,
        names: &GEMMA3N,
    };
    let num_rows = reader.whole.size("audio_soft_tokens_per_image")?.unwrap_or(188);
    let most = conformer.num_places(conformer.max_frames);
    if num_rows < most || num_rows > MAX_VECTORS {
        let why = format!("is {num_rows}; the longest sound has {most} vectors, and there may be {MAX_VECTORS}");
        return Err(reader.whole.error("audio_soft_tokens_per_image", why));
    }
    let (projector, hard) = gemma3n::projector(reader, gemma3n::FIRST_OF_SOUNDS, None)?;
    // The last token of all.
    let token_id = hard.tokens.end.saturating_sub(1);
    if !hard.tokens.contains(&token_id) {
        return Err(fields.error("vocab_offset", "leaves no token whose vector stands behind a sound"));
    }
    let hard = HardTokens { filled: Some(Filled { num_rows, token_id }), ..hard };
    let placeholder = Placeholder::Apart {
        before: reader.token(["boa_token_id", "boa_token_index"])?,
        after: reader.token(["eoa_token_id", "eoa_token_index"])?,
    };
    let config = reader.config("gemma3n", conformer, projector)?;
    gemma3n::check_token(reader, "audio_token_id", config.token_id)?;
    Ok(MediaConfig { placeholder, places: PLACES, hard: Some(hard), ..config })
}

/// Vectors of a sound at most.
const MAX_VECTORS: usize = 4096;
