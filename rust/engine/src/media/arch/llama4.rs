//! Llama 4: an encoder of its own, with learned positions and rotation, whose patches are put together by squares.

use device::{Activation, NormKind};

use super::Reader;
use crate::{
    EngineError,
    media::config::{
        MediaConfig, PatchLayout, Placeholder, Places, Positions, ProjectorConfig, ProjectorLayer, Regroup, TowerConfig,
        TowerNames,
    },
    model::fields::Fields,
};

const NAMES: TowerNames = TowerNames {
    patch: "patch_embedding.linear",
    positions: "positional_embedding_vlm",
    class: "class_embedding",
    pre_norm: "layernorm_pre",
    post_norm: "layernorm_post",
    attn_norm: "model.layers.*.input_layernorm",
    qkv: ["model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj", "model.layers.*.self_attn.v_proj"],
    attn_output: "model.layers.*.self_attn.o_proj",
    ffn_norm: "model.layers.*.post_attention_layernorm",
    gate: "",
    up: "model.layers.*.mlp.fc1",
    down: "model.layers.*.mlp.fc2",
    scales: [""; 2],
    is_paired: false,
};

const PLACES: Places = Places { tower: &["vision_model."], projector: &[""], newline: &[] };

pub(super) fn llama4(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let theta = match reader.encoder.child("rope_parameters")? {
        Some(rope) => rope.number("rope_theta")?,
        None => reader.encoder.number("rope_theta")?,
    };
    let tower = reader.clip([768, 5632, 34, 16, 448, 14], "gelu", 1e-5)?;
    let Positions::Learned { side } = tower.positions else { unreachable!("the same as a CLIP's") };
    let square = Reader::square(&reader.encoder, "pixel_shuffle_ratio", side)?;
    reader.encoder.only_text("vision_feature_select_strategy", "default")?;
    // The sizes and the kind of norm that the file need not say are those of the code, which has no keys for them.
    let tower = TowerConfig {
        eps: 1e-5,
        activation: Activation::Gelu,
        positions: Positions::Turned { side, theta: theta.unwrap_or(10_000.0) },
        patch_layout: PatchLayout::Planes,
        norm: NormKind::Layer,
        has_class: true,
        has_pre_norm: true,
        names: NAMES,
        ..tower
    };
    let (inner, outer) = (reader.size("projector_input_dim", 4096)?, reader.size("projector_output_dim", 4096)?);
    let adapter = |name, out_features| ProjectorLayer { out_features, activation: Some(Activation::Gelu), ..reader.last(name) };
    let layers = vec![
        adapter("vision_model.vision_adapter.mlp.fc1", inner),
        adapter("vision_model.vision_adapter.mlp.fc2", outer),
        reader.last("multi_modal_projector.linear_1"),
    ];
    let projector = ProjectorConfig { norm: None, regroup: Regroup::Squares(square), late_norm: None, layers };
    Ok(MediaConfig { placeholder: Placeholder::Canvas, places: PLACES, ..reader.config("llama4", tower, projector)? })
}
