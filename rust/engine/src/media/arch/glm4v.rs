//! GLM's families that see (arXiv:2507.01006): a tower much as that of Qwen2.5-VL without windows, and a projector of a
//! convolution and a gated network.

use device::{Activation, NormKind};

use super::{
    Reader,
    qwen::{PLACES, QWEN2_5, qwen_tower},
};
use crate::{
    EngineError,
    media::config::{
        MediaConfig, Places, Positions, ProjectorConfig, ProjectorGate, ProjectorLayer, ProjectorLayout, ProjectorNorm, Regroup,
        TowerConfig, TowerNames,
    },
    model::fields::Fields,
};

const NAMES: TowerNames = TowerNames {
    positions: "embeddings.position_embedding.weight",
    pre_norm: "post_conv_layernorm",
    post_norm: "post_layernorm",
    ..QWEN2_5
};

/// GLM-4.1V.
pub(super) fn glm4v(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = tower(reader, [1536, 12])?;
    let Positions::Rotary { theta, .. } = tower.positions else { unreachable!("a tower of Qwen's rotates") };
    let side = reader.edge("image_size", 336)? / tower.patch_size.max(1);
    let (width, inner) = (reader.size("out_hidden_size", 4096)?, reader.size("intermediate_size", 13_696)?);
    let tower = TowerConfig {
        intermediate_size: width,
        positions: Positions::Cubic { side, theta },
        has_pre_norm: true,
        norms_first: true,
        ..tower
    };
    projected(reader, tower, [width, inner])
}

/// GLM-4.5V and GLM-4.6V, with or without experts.
pub(super) fn glm46v(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let config = glm4v(reader)?;
    reader.check_rest(&[])?;
    Ok(config)
}

/// GLM-OCR: no learned positions, and normalized heads.
pub(super) fn glm_ocr(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = TowerConfig {
        intermediate_size: reader.size("intermediate_size", 4096)?,
        qk_norms: Some(["blocks.*.attn.q_norm", "blocks.*.attn.k_norm"]),
        ..tower(reader, [1024, 16])?
    };
    let width = reader.size("out_hidden_size", 1536)?;
    // As many columns as in the network of the projector there would be of so many channels.
    let config = projected(reader, tower, [width, 3 * width])?;
    reader.check_rest(&["image_size"])?;
    Ok(config)
}

/// What the towers have in common, with these usual sizes: width and heads.
fn tower(reader: &Reader<'_, '_>, [hidden, heads]: [usize; 2]) -> Result<TowerConfig, EngineError> {
    // Which biases there are, the weights say.
    reader.encoder.flag("attention_bias")?;
    let tower = qwen_tower(reader, reader.size("hidden_size", hidden)?)?;
    Ok(TowerConfig {
        num_layers: reader.size("depth", 24)?,
        num_heads: reader.size("num_heads", heads)?,
        norm: NormKind::Rms,
        eps: reader.number("rms_norm_eps", 1e-5)?,
        activation: Reader::activation(&reader.encoder, "hidden_act", "silu")?,
        is_gated: true,
        has_post_norm: true,
        names: NAMES,
        ..tower
    })
}

/// With the projector: vectors of `width` values, by a network of `inner` columns.
fn projected(reader: &Reader<'_, '_>, tower: TowerConfig, [width, inner]: [usize; 2]) -> Result<MediaConfig, EngineError> {
    let merge = reader.size("spatial_merge_size", 2)?;
    let layer = |name, out_features| ProjectorLayer { out_features, ..reader.last(name) };
    let norm = ProjectorNorm { name: "merger.post_projection_norm", kind: NormKind::Layer, eps: 1e-5, offset: 0.0 };
    let layers = vec![
        ProjectorLayer { layout: ProjectorLayout::Convolution(merge), ..layer("downsample", width) },
        ProjectorLayer { norm: Some(norm), activation: Some(Activation::Gelu), ..layer("merger.proj", width) },
        ProjectorLayer {
            gate: ProjectorGate::Named("merger.gate_proj"),
            activation: Some(tower.activation),
            ..layer("merger.up_proj", inner)
        },
        layer("merger.down_proj", width),
    ];
    if width != reader.decoder.hidden_size {
        let why = format!("is {width}, and the language model has {} columns", reader.decoder.hidden_size);
        return Err(reader.encoder.error("out_hidden_size", why));
    }
    let projector = ProjectorConfig { norm: None, regroup: Regroup::Interleaved(merge), late_norm: None, layers };
    let places = Places { projector: PLACES.tower, ..PLACES };
    Ok(MediaConfig { places, ..reader.config("glm4v", tower, projector)? })
}
