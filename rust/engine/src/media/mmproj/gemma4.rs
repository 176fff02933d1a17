//! Gemma 4, which has an encoder of images and may have one of sounds.

use serde_json::{Map, json};

use super::{Files, Kind, Reader, SoundKind, positive, rename, set, whisper::PLACES};
use crate::{
    EngineError,
    media::config::{Body, ConformerNames, InnerNorms, MediaConfig, MediaProcessor},
    model::fields::{Fields, HfFields},
};

pub(super) const IMAGES: Kind = Kind {
    name: "gemma4v",
    gelu: "gelu_pytorch_tanh",
    image_tokens: &["<|image|>"],
    names: &[("embedding_projection", "mm.input_projection")],
    own_keys: &["projector.scale_factor"],
    fill: images,
};

pub(super) const SOUNDS: SoundKind = SoundKind { name: "gemma4a", tokens: &["<|audio|>"], read: sounds };

pub(super) const INNER_NORMS: InnerNorms = InnerNorms {
    q: "blk.*.attn_q_norm",
    k: "blk.*.attn_k_norm",
    post_attn: "blk.*.attn_post_norm",
    post_ffn: "blk.*.ffn_post_norm",
};

/// Two norms have each other's names in these files.
static NAMES: ConformerNames = ConformerNames {
    first: "pre_encode.out.weight",
    convolutions: [["conv1d.0", "conv1d.0.norm"], ["conv1d.1", "conv1d.1.norm"]],
    input: "input_projection",
    output: "pre_encode.out",
    layers: "blk.",
    ffns: [["ffn_norm", "ffn_up", "ffn_down", "ffn_post_norm"], ["ffn_norm_1", "ffn_up_1", "ffn_down_1", "ffn_post_norm_1"]],
    attention_norms: ["attn_pre_norm", "attn_post_norm"],
    attention: ["attn_q", "attn_k", "attn_v", "attn_out"],
    relative: "attn_k_rel",
    scale: "per_dim_scale.weight",
    is_scale_soft: true,
    light: ["conv_norm", "conv_pw1", "conv_dw.weight", "norm_conv", "conv_pw2"],
    out_norm: "ln2",
    matrix: "",
};

/// A file does not say whether the rows of an image see each other in the decoder: they do in the models without inputs of
/// layers.
fn images(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let (hidden, heads) = (reader.required("embedding_length")?, reader.required("attention.head_count")?);
    let merge = reader.vision.size("projector.scale_factor")?.unwrap_or(3);
    let [_, side, _] = reader.shape("v.position_embd.weight")?;
    for (key, wanted) in [("clip.vision.image_mean", 0.0), ("clip.vision.image_std", 1.0)] {
        if let Some(other) = reader.colors(key)?.iter().find(|value| **value != wanted) {
            return Err(reader.error(&format!("`{key}` has {other}; implemented: {wanted}")));
        }
    }
    let senses = reader.decoder.layer_inputs.is_none().then_some("vision");
    // The files do not say it.
    let activation = if files.vision["hidden_act"] == "silu" { "silu" } else { "gelu_pytorch_tanh" };
    set(
        &mut files.whole,
        json!({
            "model_type": "gemma4", "boi_token_id": reader.token(&["<|image>"])?, "eoi_token_id": reader.token(&["<image|>"])?,
            "text_config": { "use_bidirectional_attention": senses },
        }),
    );
    set(
        &mut files.vision,
        json!({
            "head_dim": hidden / heads, "num_key_value_heads": heads, "hidden_activation": activation,
            "rms_norm_eps": reader.eps()?, "pooling_kernel_size": merge, "position_embedding_size": side,
            "standardize": reader.has("v.std_bias"), "use_clipped_linears": reader.has("v.blk.0.attn_q.input_min"),
        }),
    );
    set(
        &mut files.processor,
        json!({
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": reader.required("patch_size")?,
            "pooling_kernel_size": merge,
        }),
    );
    Ok(())
}

/// What no key says is as in all models that there are.
fn sounds(reader: &Reader<'_>, token: usize) -> Result<MediaConfig, EngineError> {
    let audio = &reader.audio;
    let (hidden, bins) = (positive(audio, "embedding_length")?, positive(audio, "num_mel_bins")?);
    let inner = positive(audio, "feed_forward_length")?;
    if inner != hidden.saturating_mul(4) {
        return Err(audio.error("feed_forward_length", format!("is {inner}; implemented: four times the width")));
    }
    if let Some(given) = audio.size("projector.stack_factor")? {
        return Err(audio.error("projector.stack_factor", format!("is {given}, and this projector has none")));
    }
    let [first, _, _, _] = reader.shape("a.conv1d.0.weight")?;
    let [second, _, _, _] = reader.shape("a.conv1d.1.weight")?;
    let [_, kernel] = reader.shape("a.blk.0.conv_dw.weight")?;
    let [outputs, _] = reader.shape("a.pre_encode.out.weight")?;
    let mut features = Map::new();
    set(&mut features, json!({ "feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": bins }));
    let processor = audio::Processor::from_json(reader.what, &features).map_err(|why| EngineError::Load(why.to_string()))?;
    let conformer = json!({
        "hidden_size": hidden, "num_hidden_layers": positive(audio, "block_count")?,
        "num_attention_heads": positive(audio, "attention.head_count")?, "subsampling_conv_channels": [first, second],
        "conv_kernel_size": kernel, "rms_norm_eps": reader.sound_eps()?, "output_proj_dims": outputs,
        "use_clipped_linears": reader.has("a.blk.0.attn_q.input_min"),
    });
    let mut whole = Map::new();
    set(
        &mut whole,
        json!({
            "model_type": "gemma4", "audio_token_id": token, "boa_token_id": reader.token(&["<|audio>"])?,
            "eoa_token_id": reader.token(&["<audio|>"])?, "audio_config": conformer,
        }),
    );
    let fields = HfFields::new(reader.what, whole);
    let mut config = MediaConfig::read(&fields, reader.decoder, MediaProcessor::Sounds(processor))?;
    if let Body::Conformer(conformer) = &mut config.body {
        conformer.names = &NAMES;
    }
    rename(&mut config.projector, &[("embedding_projection", "mm.a.input_projection")]);
    Ok(MediaConfig { places: PLACES, ..config })
}
