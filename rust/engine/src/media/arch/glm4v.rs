//! GLM-4.1V (arXiv:2507.01006): a tower much as that of Qwen2.5-VL without windows, and a projector of a convolution and a gated
//! network.

use device::{Activation, NormKind};

use super::{
    Reader,
    qwen::{PLACES, QWEN2_5, qwen_tower},
};
use crate::{
    EngineError,
    media::config::{
        MediaConfig, Placeholder, Places, Positions, ProjectorConfig, ProjectorGate, ProjectorLayer, ProjectorLayout,
        ProjectorNorm, Regroup, TowerConfig, TowerNames,
    },
    model::fields::Fields,
};

const NAMES: TowerNames = TowerNames {
    positions: "embeddings.position_embedding.weight",
    pre_norm: "post_conv_layernorm",
    post_norm: "post_layernorm",
    ..QWEN2_5
};

pub(super) fn glm4v(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = qwen_tower(reader, reader.size("hidden_size", 1536)?)?;
    let Positions::Rotary { theta, .. } = tower.positions else { unreachable!("a tower of Qwen's rotates") };
    let side = reader.edge("image_size", 336)? / tower.patch_size.max(1);
    let activation = Reader::activation(&reader.encoder, "hidden_act", "silu")?;
    let width = reader.size("out_hidden_size", 4096)?;
    let inner = reader.size("intermediate_size", 13_696)?;
    let tower = TowerConfig {
        num_layers: reader.size("depth", 24)?,
        num_heads: reader.size("num_heads", 12)?,
        intermediate_size: width,
        norm: NormKind::Rms,
        eps: reader.number("rms_norm_eps", 1e-5)?,
        activation,
        is_gated: true,
        positions: Positions::Cubic { side, theta },
        has_pre_norm: true,
        norms_first: true,
        has_post_norm: true,
        names: NAMES,
        ..tower
    };
    let merge = reader.size("spatial_merge_size", 2)?;
    let layer = |name, out_features| ProjectorLayer { out_features, ..reader.last(name) };
    let norm = ProjectorNorm { name: "merger.post_projection_norm", kind: NormKind::Layer, eps: 1e-5, offset: 0.0 };
    let layers = vec![
        ProjectorLayer { layout: ProjectorLayout::Convolution(merge), ..layer("downsample", width) },
        ProjectorLayer { norm: Some(norm), activation: Some(Activation::Gelu), ..layer("merger.proj", width) },
        ProjectorLayer {
            gate: ProjectorGate::Named("merger.gate_proj"),
            activation: Some(activation),
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
    Ok(MediaConfig { placeholder: Placeholder::Repeated, places, ..reader.config("glm4v", tower, projector)? })
}
