//! Models that hear by the encoder of Whisper (arXiv:2212.04356).

use std::path::Path;

use device::NormKind;
use serde_json::json;

use super::{Reader, SIGLIP};
use crate::{
    EngineError,
    media::config::{
        Frames, MediaConfig, MediaProcessor, PatchLayout, Placeholder, Places, Positions, ProjectorConfig, ProjectorLayer,
        ProjectorNorm, Regroup, Silence, TowerConfig, TowerNames,
    },
    model::fields::{Fields, HfFields},
};

const NAMES: TowerNames = TowerNames {
    patch: "",
    positions: "embed_positions.weight",
    class: "",
    pre_norm: "",
    post_norm: "layer_norm",
    attn_norm: "layers.*.self_attn_layer_norm",
    qkv: ["layers.*.self_attn.q_proj", "layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj"],
    attn_output: "layers.*.self_attn.out_proj",
    ffn_norm: "layers.*.final_layer_norm",
    up: "layers.*.fc1",
    down: "layers.*.fc2",
    ..SIGLIP
};

const PLACES: Places = Places {
    tower: &["audio_tower.", "model.audio_tower."],
    projector: &["multi_modal_projector.", "model.multi_modal_projector."],
    newline: &[],
};

/// The same sizes, as older files call them.
const OLDER: [(&str, &str); 4] = [
    ("d_model", "hidden_size"),
    ("encoder_layers", "num_hidden_layers"),
    ("encoder_attention_heads", "num_attention_heads"),
    ("encoder_ffn_dim", "intermediate_size"),
];

/// What makes features of sounds, as the folder says.
pub(super) fn processor(folder: &Path) -> Result<MediaProcessor, EngineError> {
    let processor = audio::Processor::from_folder(folder).map_err(|why| EngineError::Load(why.to_string()))?;
    processor.map(MediaProcessor::Sounds).ok_or_else(|| {
        let folder = folder.display();
        EngineError::Load(format!(
            "{folder}: neither processor_config.json (feature_extractor) nor preprocessor_config.json says how features are made"
        ))
    })
}

/// A tower with these usual sizes: width, feed-forward size, layers, heads, mel bins, and positions of a chunk.
fn tower(
    reader: &Reader<'_, '_>,
    fields: &HfFields<'_>,
    [hidden, inner, layers, heads, bins, positions]: [usize; 6],
) -> Result<TowerConfig, EngineError> {
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    let (num_mel_bins, len) = (size("num_mel_bins", bins)?, size("max_source_positions", positions)?);
    if let MediaProcessor::Sounds(own) = &reader.processor
        && (own.num_mel_bins != num_mel_bins || own.chunk_frames() != 2 * len)
    {
        let why = format!(
            "is {num_mel_bins} and `max_source_positions` {len}; chunks of the feature extractor have {} frames of {} values, and {} \
             are twice the positions",
            own.chunk_frames(),
            own.num_mel_bins,
            2 * len
        );
        return Err(fields.error("num_mel_bins", why));
    }
    Ok(TowerConfig {
        hidden_size: size("hidden_size", hidden)?,
        num_heads: size("num_attention_heads", heads)?,
        num_kv_heads: None,
        intermediate_size: size("intermediate_size", inner)?,
        num_layers: size("num_hidden_layers", layers)?,
        patch_size: 1,
        frames: Some(Frames { num_mel_bins, names: ["conv1", "conv2"] }),
        patch_layout: PatchLayout::Convolution,
        num_frames: 1,
        sees_frames: false,
        norm: NormKind::Layer,
        eps: 1e-5,
        activation: Reader::activation(fields, "activation_function", "gelu")?,
        is_gated: false,
        positions: Positions::Line { len },
        has_class: false,
        has_pre_norm: false,
        norms_first: false,
        has_post_norm: true,
        windows: None,
        qk_norms: None,
        inner_norms: None,
        is_bounded: false,
        standard: None,
        tiled: None,
        names: NAMES,
    })
}

/// The keys of `audio_config` under the names of today.
fn todays<'a>(reader: &Reader<'_, 'a>) -> HfFields<'a> {
    let fields = &reader.encoder;
    let older: Vec<_> = OLDER.into_iter().filter(|(own, _)| fields.value(own).is_some()).collect();
    fields.renamed(&older)
}

/// What the norm behind the layers of Qwen2-Audio and Audio Flamingo 3 is called: it comes behind the means.
const POOLED_NORM: &str = "audio_tower.layer_norm";

/// The names of a projector begin nowhere, or within the model.
const POOLED_PLACES: Places = Places { projector: &["", "model."], ..PLACES };

/// The tower of both, of whose states two become a vector, by their mean; what is behind a sound is not seen.
fn pooled(reader: &Reader<'_, '_>, architecture: &'static str, layers: Vec<ProjectorLayer>) -> Result<MediaConfig, EngineError> {
    let tower = tower(reader, &todays(reader), [1280, 5120, 32, 20, 128, 1500])?;
    let norm = ProjectorNorm { name: POOLED_NORM, kind: NormKind::Layer, eps: tower.eps, offset: 0.0 };
    let tower = TowerConfig { has_post_norm: false, ..tower };
    let projector = ProjectorConfig { norm: None, regroup: Regroup::MeansOfRuns(2), late_norm: Some(norm), layers };
    let config = reader.config(architecture, tower, projector)?;
    Ok(MediaConfig { silence: Silence::Unseen, places: POOLED_PLACES, ..config })
}

/// The same with chunks that become features each for itself, of a sound of so many seconds at most unless its file says it.
fn apart(mut config: MediaConfig, seconds: usize) -> MediaConfig {
    if let MediaProcessor::Sounds(processor) = &mut config.processor {
        processor.are_chunks_apart = true;
        if processor.max_seconds.is_none() {
            processor.set_max_seconds(seconds);
        }
    }
    config
}

/// The architecture whose folders have a chat template of texts, or none.
pub(in crate::media) const QWEN2_AUDIO: &str = "qwen2_audio";

/// Its chat template, as it was trained: sounds are counted over the whole conversation.
pub(in crate::media) const QWEN2_AUDIO_TEMPLATE: &str = r"{%- set sounds = namespace(count=0) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif -%}
{{- '<|im_start|>' ~ message['role'] ~ '\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'audio' -%}
{%- set sounds.count = sounds.count + 1 -%}
{{- 'Audio ' ~ sounds.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' -}}
{%- else %}{{ part['text'] }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}";

/// Qwen2-Audio (arXiv:2407.10759), which hears one chunk.
pub(super) fn qwen2_audio(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let mut config = pooled(reader, QWEN2_AUDIO, vec![reader.last("multi_modal_projector.linear")])?;
    if let MediaProcessor::Sounds(audio::Processor { kind: audio::Kind::Whisper { chunk_seconds }, max_seconds, .. }) =
        &mut config.processor
    {
        *max_seconds = Some(*chunk_seconds as u32);
    }
    Ok(MediaConfig { placeholder: Placeholder::Fringed { before: "<|audio_bos|>", after: "<|audio_eos|>" }, ..config })
}

/// Audio Flamingo 3 (arXiv:2507.08128).
pub(super) fn audioflamingo3(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let activation = Reader::activation(reader.whole, "projector_hidden_act", "gelu")?;
    let first = ProjectorLayer { activation: Some(activation), ..reader.last("multi_modal_projector.linear_1") };
    let layers = vec![first, reader.last("multi_modal_projector.linear_2")];
    Ok(apart(pooled(reader, "audioflamingo3", layers)?, 600))
}

const GLM_NAMES: TowerNames = TowerNames {
    positions: "",
    post_norm: "norm",
    attn_norm: "layers.*.input_layernorm",
    attn_output: "layers.*.self_attn.o_proj",
    ffn_norm: "layers.*.post_attention_layernorm",
    up: "layers.*.mlp.fc1",
    down: "layers.*.mlp.fc2",
    ..NAMES
};

/// States of GLM-ASR that become a vector.
const GLM_RUN: usize = 4;

/// GLM-ASR, whose positions are rotations.
pub(super) fn glmasr(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let fields = &reader.encoder;
    let MediaProcessor::Sounds(own) = &reader.processor else {
        return Err(fields.error("model_type", "is of sounds, and the processor is of images"));
    };
    let len = own.chunk_frames() / 2;
    // Of positions it has as many as a chunk needs.
    let tower = tower(reader, &fields.with_defaults(&json!({ "max_source_positions": len })), [1280, 5120, 32, 20, 128, len])?;
    let head_dim = tower.hidden_size / tower.num_heads.max(1);
    for (key, wanted) in [("head_dim", head_dim), ("num_key_value_heads", tower.num_heads)] {
        if let Some(given) = fields.size(key)?.filter(|given| *given != wanted) {
            return Err(fields.error(key, format!("is {given}; implemented beside the other sizes: {wanted}")));
        }
    }
    if tower.intermediate_size != GLM_RUN * tower.hidden_size || !len.is_multiple_of(GLM_RUN) {
        let why =
            format!("is {}; implemented: {GLM_RUN} times the width, with as many states to a vector", tower.intermediate_size);
        return Err(fields.error("intermediate_size", why));
    }
    let rope = fields.child("rope_parameters")?;
    let (mut theta, mut part) = (fields.number("rope_theta")?, fields.number("partial_rotary_factor")?);
    if let Some(rope) = &rope {
        match rope.text("rope_type")?.as_deref().unwrap_or("default") {
            "default" => {}
            other => return Err(rope.error("rope_type", format!("is `{other}`; implemented: default"))),
        }
        (theta, part) = (rope.number("rope_theta")?.or(theta), rope.number("partial_rotary_factor")?.or(part));
    }
    let part = part.unwrap_or(0.5);
    if !(0.0..=1.0).contains(&part) {
        return Err(fields.error("partial_rotary_factor", format!("is {part}; it must be from 0 to 1")));
    }
    let rotary_dim = (head_dim as f64 * part) as usize;
    let tower = TowerConfig {
        activation: Reader::activation(fields, "hidden_act", "gelu")?,
        positions: Positions::Turns { len, rotary_dim, theta: theta.unwrap_or(10_000.0) },
        names: GLM_NAMES,
        ..tower
    };
    let activation = Reader::activation(reader.whole, "projector_hidden_act", "gelu")?;
    let mut projector = reader.two_layers(activation);
    projector.layers[0].out_features *= 2;
    projector.regroup = Regroup::Runs(GLM_RUN);
    let config = reader.config("glmasr", tower, projector)?;
    Ok(apart(MediaConfig { silence: Silence::Dropped, places: PLACES, ..config }, 655))
}

/// Its name.
pub(in crate::media) const VOXTRAL: &str = "voxtral";

/// Voxtral (arXiv:2507.13264).
pub(super) fn voxtral(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let fields = todays(reader);
    let tower = tower(reader, &fields, [1280, 5120, 32, 20, 128, 1500])?;
    let Positions::Line { len } = tower.positions else { unreachable!("a tower that hears") };
    // As many states as are as wide as a feed-forward network become a vector.
    let run = tower.intermediate_size / tower.hidden_size.max(1);
    if run * tower.hidden_size != tower.intermediate_size || run == 0 || !len.is_multiple_of(run) {
        let why = format!("is {}, and {len} states of {} are no whole rows of it", tower.intermediate_size, tower.hidden_size);
        return Err(fields.error("intermediate_size", why));
    }
    let mut projector = reader.two_layers(Reader::activation(reader.whole, "projector_hidden_act", "gelu")?);
    projector.regroup = Regroup::Runs(run);
    let config = reader.config(VOXTRAL, tower, projector)?;
    Ok(MediaConfig { placeholder: Placeholder::Fringed { before: "[BEGIN_AUDIO]", after: "" }, places: PLACES, ..config })
}
