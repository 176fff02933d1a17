//! `InternVL` (arXiv:2504.10479), as Transformers lays it out: layers whose outputs are scaled, squares of patches.

use device::NormKind;

use super::{Reader, SIGLIP};
use crate::{
    EngineError,
    media::config::{
        MediaConfig, Placeholder, Positions, ProjectorConfig, ProjectorLayer, ProjectorNorm, Regroup, TowerConfig, TowerNames,
    },
    model::fields::Fields,
};

const NAMES: TowerNames = TowerNames {
    patch: "embeddings.patch_embeddings.projection",
    positions: "embeddings.position_embeddings",
    class: "embeddings.cls_token",
    post_norm: "layernorm",
    attn_norm: "encoder.layer.*.layernorm_before",
    qkv: ["encoder.layer.*.attention.q_proj", "encoder.layer.*.attention.k_proj", "encoder.layer.*.attention.v_proj"],
    attn_output: "encoder.layer.*.attention.projection_layer",
    ffn_norm: "encoder.layer.*.layernorm_after",
    up: "encoder.layer.*.mlp.fc1",
    down: "encoder.layer.*.mlp.fc2",
    scales: ["encoder.layer.*.lambda_1", "encoder.layer.*.lambda_2"],
    ..SIGLIP
};

pub(super) fn internvl(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let vision = &reader.encoder;
    for (key, implemented) in [("use_qk_norm", false), ("use_absolute_position_embeddings", true)] {
        if vision.flag(key)?.is_some_and(|flag| flag != implemented) {
            return Err(vision.error(key, format!("is {}; implemented: {implemented}", !implemented)));
        }
    }
    let norm = match vision.text("norm_type")?.as_deref() {
        None | Some("layer_norm") => NormKind::Layer,
        Some("rms_norm") => NormKind::Rms,
        Some(other) => return Err(vision.error("norm_type", format!("is `{other}`; implemented: layer_norm, rms_norm"))),
    };
    let has_post_norm = !vision.flag("use_mean_pooling")?.unwrap_or(true);
    if has_post_norm && norm != NormKind::Layer {
        return Err(vision.error("use_mean_pooling", "is false beside `norm_type` rms_norm; implemented with it: true"));
    }
    let tower = reader.clip([1024, 4096, 24, 16, 448, 14], "gelu", 1e-6)?;
    if Reader::layers_up_to(reader.whole, "vision_feature_layer", tower.num_layers, -1)? != tower.num_layers {
        return Err(reader.whole.error("vision_feature_layer", "is not the last one; implemented: -1"));
    }
    reader.whole.only_text("vision_feature_select_strategy", "default")?;
    let Positions::Learned { side } = tower.positions else { unreachable!("the same as a CLIP's") };
    let square = Reader::square(reader.whole, "downsample_ratio", side)?;
    let activation = Reader::activation(reader.whole, "projector_hidden_act", "gelu")?;
    let first = ProjectorLayer { activation: Some(activation), ..reader.last("linear_1") };
    let projector = ProjectorConfig {
        norm: None,
        regroup: Regroup::Squares(square),
        late_norm: Some(ProjectorNorm { name: "layer_norm", kind: NormKind::Layer, eps: 1e-5, offset: 0.0 }),
        layers: vec![first, reader.last("linear_2")],
    };
    let tower = TowerConfig { norm, has_class: true, has_post_norm, names: NAMES, ..tower };
    let placeholder = Placeholder::Wrapped { before: "<img>", behind_tile: "", after: "</img>" };
    let mut config = reader.config("internvl", tower, projector)?;
    // The processor asks for tiles, whatever the file of images says.
    if let Some(processor) = config.images_mut() {
        processor.split = true;
    }
    Ok(MediaConfig { placeholder, ..config })
}
