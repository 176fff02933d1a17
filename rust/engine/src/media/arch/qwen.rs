//! Qwen's families that see.

use device::{Activation, NormKind};

use super::Reader;
use crate::{
    EngineError,
    media::config::{
        DeepStack, MediaConfig, PatchLayout, Places, Positions, ProjectorConfig, ProjectorLayer, ProjectorNorm, Regroup,
        TowerConfig, TowerNames, Windows,
    },
    model::fields::Fields,
};

const QWEN2: TowerNames = TowerNames {
    patch: "patch_embed.proj",
    positions: "",
    class: "",
    pre_norm: "",
    post_norm: "",
    attn_norm: "blocks.*.norm1",
    qkv: ["blocks.*.attn.qkv"; 3],
    attn_output: "blocks.*.attn.proj",
    ffn_norm: "blocks.*.norm2",
    gate: "",
    up: "blocks.*.mlp.fc1",
    down: "blocks.*.mlp.fc2",
    scales: [""; 2],
    is_paired: false,
};

pub(super) const QWEN2_5: TowerNames =
    TowerNames { gate: "blocks.*.mlp.gate_proj", up: "blocks.*.mlp.up_proj", down: "blocks.*.mlp.down_proj", ..QWEN2 };

const QWEN3: TowerNames =
    TowerNames { positions: "pos_embed.weight", up: "blocks.*.mlp.linear_fc1", down: "blocks.*.mlp.linear_fc2", ..QWEN2 };

/// Older checkpoints have the tower by itself, newer ones below `model`.
pub(super) const PLACES: Places =
    Places { tower: &["visual.", "model.visual."], projector: &["visual.merger.", "model.visual.merger."], newline: &[] };

/// What Qwen2-VL and Qwen2.5-VL have in common: `hidden` is the width of the tower.
fn qwen(reader: &Reader<'_, '_>, architecture: &'static str, tower: TowerConfig) -> Result<MediaConfig, EngineError> {
    let merge = reader.size("spatial_merge_size", 2)?;
    let columns = Regroup::Squares(merge).columns(tower.hidden_size);
    let norm = ProjectorNorm { name: "ln_q", kind: tower.norm, eps: 1e-6, offset: 0.0 };
    let first = ProjectorLayer { out_features: columns, activation: Some(Activation::Gelu), ..reader.last("mlp.0") };
    let layers = vec![first, reader.last("mlp.2")];
    let projector = ProjectorConfig { norm: Some(norm), regroup: Regroup::Squares(merge), late_norm: None, layers };
    Ok(MediaConfig { places: PLACES, ..reader.config(architecture, tower, projector)? })
}

/// A tower of Qwen's, of such a width.
pub(super) fn qwen_tower(reader: &Reader<'_, '_>, hidden_size: usize) -> Result<TowerConfig, EngineError> {
    let theta = reader.encoder.child("rope_parameters")?.map(|rope| rope.number("rope_theta")).transpose()?.flatten();
    Ok(TowerConfig {
        hidden_size,
        num_heads: reader.size("num_heads", 16)?,
        num_kv_heads: None,
        intermediate_size: reader.size("intermediate_size", 3420)?,
        num_layers: reader.size("depth", 32)?,
        patch_size: reader.size("patch_size", 14)?,
        frames: None,
        patch_layout: PatchLayout::Convolution,
        num_frames: reader.size("temporal_patch_size", 2)?,
        sees_frames: false,
        norm: NormKind::Layer,
        eps: 1e-6,
        activation: Reader::activation(&reader.encoder, "hidden_act", "quick_gelu")?,
        is_gated: false,
        positions: Positions::Rotary { theta: theta.unwrap_or(10_000.0), takes_turns: false },
        has_class: false,
        has_pre_norm: false,
        norms_first: false,
        has_post_norm: false,
        windows: None,
        qk_norms: None,
        inner_norms: None,
        is_bounded: false,
        standard: None,
        tiled: None,
        names: QWEN2,
    })
}

/// Qwen2-VL (arXiv:2409.12191).
pub(super) fn qwen2_vl(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = qwen_tower(reader, reader.size("embed_dim", 1280)?)?;
    let intermediate_size = (f64::from(reader.number("mlp_ratio", 4.0)?) * tower.hidden_size as f64) as usize;
    qwen(reader, "qwen2_vl", TowerConfig { intermediate_size, ..tower })
}

/// Qwen2.5-VL (arXiv:2502.13923).
pub(super) fn qwen2_5_vl(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = windowed(reader, 1280)?;
    qwen(reader, "qwen2_5_vl", tower)
}

/// EXAONE 4.5: the same with fewer heads of keys and values, before an EXAONE 4, whose positions are plain.
pub(super) fn exaone4_5(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = TowerConfig {
        num_kv_heads: Some(reader.size("num_key_value_heads", 8)?),
        activation: Reader::activation(&reader.encoder, "hidden_act", "silu")?,
        ..windowed(reader, 3584)?
    };
    let (width, patch) = (reader.size("out_hidden_size", 3584)?, reader.size("spatial_patch_size", tower.patch_size)?);
    if width != reader.decoder.hidden_size {
        let why = format!("is {width}, and the language model has {} columns", reader.decoder.hidden_size);
        return Err(reader.encoder.error("out_hidden_size", why));
    }
    if patch != tower.patch_size {
        return Err(reader.encoder.error("spatial_patch_size", format!("is {patch}; patch_size is {}", tower.patch_size)));
    }
    let config = qwen(reader, "exaone4_5", tower)?;
    // Of coordinates in time, which it has not.
    reader.check_rest(&["tokens_per_second"])?;
    Ok(config)
}

/// A tower of which some layers see windows, of this usual width.
fn windowed(reader: &Reader<'_, '_>, hidden_size: usize) -> Result<TowerConfig, EngineError> {
    let tower = qwen_tower(reader, reader.size("hidden_size", hidden_size)?)?;
    let merge = reader.size("spatial_merge_size", 2)?.max(1);
    let side = reader.size("window_size", 112)? / merge / tower.patch_size.max(1) * merge;
    if side == 0 {
        return Err(reader.encoder.error("window_size", "is less than what becomes one vector"));
    }
    let full_layers = reader.encoder.layers("fullatt_block_indexes")?.unwrap_or_else(|| vec![7, 15, 23, 31]);
    let windows = Some(Windows { side, full_layers });
    Ok(TowerConfig { norm: NormKind::Rms, is_gated: true, windows, names: QWEN2_5, ..tower })
}

/// What Qwen3-VL and Qwen 3.5 have in common.
fn qwen3(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = qwen_tower(reader, reader.size("hidden_size", 1152)?)?;
    let side = reader.size("num_position_embeddings", 2304)?.isqrt();
    let Positions::Rotary { theta, .. } = tower.positions else { unreachable!("a tower of Qwen's rotates") };
    let tower = TowerConfig {
        patch_size: reader.size("patch_size", 16)?,
        num_layers: reader.size("depth", 27)?,
        intermediate_size: reader.size("intermediate_size", 4304)?,
        activation: Reader::activation(&reader.encoder, "hidden_act", "gelu_pytorch_tanh")?,
        positions: Positions::Interpolated { side, theta },
        names: QWEN3,
        ..tower
    };
    let merge = reader.size("spatial_merge_size", 2)?;
    let columns = Regroup::Squares(merge).columns(tower.hidden_size);
    let first = ProjectorLayer { out_features: columns, activation: Some(Activation::Gelu), ..reader.last("linear_fc1") };
    let layers = vec![first, reader.last("linear_fc2")];
    let norm = Some(ProjectorNorm { name: "norm", kind: NormKind::Layer, eps: 1e-6, offset: 0.0 });
    let projector = ProjectorConfig { norm, regroup: Regroup::Squares(merge), late_norm: None, layers };
    Ok(MediaConfig { places: PLACES, ..reader.config("qwen3_5", tower, projector)? })
}

/// Qwen 3.5: as Qwen3-VL, without `DeepStack`.
pub(super) fn qwen3_5(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let key = "deepstack_visual_indexes";
    match reader.encoder.layers(key)? {
        Some(layers) if !layers.is_empty() => Err(reader.encoder.error(key, format!("is {layers:?}; implemented here: []"))),
        _ => qwen3(reader),
    }
}

/// Qwen3-VL (arXiv:2511.21631).
pub(super) fn qwen3_vl(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let config = qwen3(reader)?;
    let indexes = reader.encoder.layers("deepstack_visual_indexes")?.unwrap_or_else(|| vec![8, 16, 24]);
    let deep = |(number, layer): (usize, usize)| {
        let projector = ProjectorConfig { norm: None, late_norm: config.projector.norm.clone(), ..config.projector.clone() };
        DeepStack { layer, projector, place: format!("deepstack_merger_list.{number}.") }
    };
    let deep = indexes.into_iter().enumerate().map(deep).collect();
    Ok(MediaConfig { architecture: "qwen3_vl", deep, ..config })
}
