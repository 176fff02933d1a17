//! Llama 3.2 Vision: an encoder over all tiles of an image, at whose vectors layers of the decoder look.

use serde_json::{Value, json};

use super::Reader;
use crate::{
    EngineError,
    media::config::{MediaConfig, MediaProcessor, Places, ProjectorConfig, Regroup, Tiled, TowerConfig, TowerNames},
    model::fields::Fields,
};

const NAMES: TowerNames = TowerNames {
    patch: "patch_embedding",
    positions: "gated_positional_embedding.embedding",
    class: "class_embedding",
    pre_norm: "layernorm_pre",
    post_norm: "layernorm_post",
    attn_norm: "transformer.layers.*.input_layernorm",
    qkv: [
        "transformer.layers.*.self_attn.q_proj",
        "transformer.layers.*.self_attn.k_proj",
        "transformer.layers.*.self_attn.v_proj",
    ],
    attn_output: "transformer.layers.*.self_attn.o_proj",
    ffn_norm: "transformer.layers.*.post_attention_layernorm",
    gate: "",
    up: "transformer.layers.*.mlp.fc1",
    down: "transformer.layers.*.mlp.fc2",
    scales: [""; 2],
    is_paired: false,
};

const PLACES: Places = Places { tower: &["vision_model.", "model.vision_model."], projector: &["", "model."], newline: &[] };

/// Tiles of an image.
pub(super) const MAX_TILES: usize = 64;

/// Layers behind which states are taken, unless the file says which.
const TAKEN: [usize; 5] = [3, 7, 15, 23, 30];

pub(super) fn mllama(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let mut encoder = reader.encoder.clone();
    for (own, usual) in [("attention_heads", "num_attention_heads"), ("norm_eps", "layer_norm_eps")] {
        if let Some(value) = encoder.value(own) {
            encoder.object.insert(usual.to_owned(), value);
        }
    }
    let reader = &Reader { encoder, processor: reader.processor.clone(), ..*reader };
    let fields = &reader.encoder;
    let tower = reader.clip([1280, 5120, 32, 16, 448, 14], "gelu", 1e-5)?;
    let max_tiles = reader.size("max_num_tiles", 4)?;
    if !(1..=MAX_TILES).contains(&max_tiles) {
        return Err(fields.error("max_num_tiles", format!("is {max_tiles}; it must be from 1 to {MAX_TILES}")));
    }
    let taken = fields.layers("intermediate_layers_indices")?.unwrap_or_else(|| TAKEN.into());
    let tiled = Tiled { max_tiles, num_global_layers: reader.size("num_global_layers", 8)?, taken };
    let tower = TowerConfig { has_class: true, has_post_norm: false, names: NAMES, tiled: Some(tiled), ..tower };
    let width = tower.output_size();
    for (key, usual, wanted) in [("num_channels", 3, 3), ("vision_output_dim", 7680, width)] {
        let given = reader.size(key, usual)?;
        if given != wanted {
            return Err(fields.error(key, format!("is {given}; it must be {wanted}, as the other keys have it")));
        }
    }
    check_ratios(reader, max_tiles)?;
    let edge = reader.edge("image_size", 448)?;
    check_processor(reader, edge, max_tiles)?;
    let layers = vec![reader.last("multi_modal_projector")];
    let projector = ProjectorConfig { norm: None, regroup: Regroup::Each, late_norm: None, layers };
    Ok(MediaConfig { places: PLACES, is_crossed: true, ..reader.config("mllama", tower, projector)? })
}

/// Each shape of an image has a number, by its place among all of up to so many tiles.
fn check_ratios(reader: &Reader<'_, '_>, max_tiles: usize) -> Result<(), EngineError> {
    let key = "supported_aspect_ratios";
    let all: Vec<_> =
        (1..=max_tiles.min(64)).flat_map(|rows| (1..=max_tiles / rows).map(move |columns| json!([rows, columns]))).collect();
    let usual = || (1..=4).flat_map(|rows| (1..=4 / rows).map(move |columns| json!([rows, columns]))).collect();
    let given = reader.encoder.typed(key, "a list of pairs", |value| value.as_array().cloned())?.unwrap_or_else(usual);
    if given == all {
        return Ok(());
    }
    let why = format!("is {}; implemented: all of up to {max_tiles} tiles (max_num_tiles), in order", Value::from(given));
    Err(reader.encoder.error(key, why))
}

/// The tiles of the image processor are those of the encoder.
fn check_processor(reader: &Reader<'_, '_>, edge: usize, max_tiles: usize) -> Result<(), EngineError> {
    let MediaProcessor::Images(own) = &reader.processor else {
        return Err(reader.encoder.error("max_num_tiles", "goes with an image processor, and this is none"));
    };
    let made = own.canvas.filter(|_| own.kind == images::ProcessorKind::Mllama).map(|canvas| (own.size, canvas.max_tiles));
    if made == Some((images::Size::Exact { height: edge, width: edge }, max_tiles)) {
        return Ok(());
    }
    Err(reader.encoder.error(
        "max_num_tiles",
        format!(
            "is {max_tiles}, of {edge} x {edge} pixels (image_size); the image processor must be a MllamaImageProcessor with the same \
             max_image_tiles and size"
        ),
    ))
}
