//! Models that hear by the encoder of Whisper (arXiv:2212.04356).

use std::path::Path;

use device::NormKind;

use super::{Reader, SIGLIP};
use crate::{
    EngineError,
    media::config::{
        Frames, MediaConfig, MediaProcessor, PatchLayout, Placeholder, Places, Positions, Regroup, TowerConfig, TowerNames,
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
    processor.map(MediaProcessor::Sounds).ok_or_else(|| super::no_processor(folder))
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
        intermediate_size: size("intermediate_size", inner)?,
        num_layers: size("num_hidden_layers", layers)?,
        patch_size: 1,
        frames: Some(Frames { num_mel_bins, names: ["conv1", "conv2"] }),
        patch_layout: PatchLayout::Convolution,
        num_frames: 1,
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
    let config = reader.config("voxtral", tower, projector)?;
    Ok(MediaConfig { placeholder: Placeholder::Begun("[BEGIN_AUDIO]"), places: PLACES, ..config })
}
