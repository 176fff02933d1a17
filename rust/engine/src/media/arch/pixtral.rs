//! Families with Pixtral's encoder (arXiv:2410.07073).

use device::NormKind;
use serde_json::json;

use super::Reader;
use crate::{
    EngineError,
    media::config::{
        MediaConfig, Placeholder, Places, Positions, ProjectorLayer, ProjectorNorm, Regroup, TowerConfig, TowerNames,
    },
    model::fields::Fields,
};

const PIXTRAL: TowerNames = TowerNames {
    patch: "patch_conv",
    positions: "",
    class: "",
    pre_norm: "ln_pre",
    post_norm: "",
    attn_norm: "transformer.layers.*.attention_norm",
    qkv: [
        "transformer.layers.*.attention.q_proj",
        "transformer.layers.*.attention.k_proj",
        "transformer.layers.*.attention.v_proj",
    ],
    attn_output: "transformer.layers.*.attention.o_proj",
    ffn_norm: "transformer.layers.*.ffn_norm",
    gate: "transformer.layers.*.feed_forward.gate_proj",
    up: "transformer.layers.*.feed_forward.up_proj",
    down: "transformer.layers.*.feed_forward.down_proj",
    scales: [""; 2],
    is_paired: false,
};

fn tower(reader: &Reader<'_, '_>) -> Result<TowerConfig, EngineError> {
    let theta = match reader.encoder.child("rope_parameters")? {
        Some(rope) => rope.number("rope_theta")?,
        None => reader.encoder.number("rope_theta")?,
    };
    let tower = reader.clip([1024, 4096, 24, 16, 1024, 16], "gelu", 1e-5)?;
    Ok(TowerConfig {
        num_layers: Reader::layers_up_to(reader.whole, "vision_feature_layer", tower.num_layers, -1)?,
        norm: NormKind::Rms,
        eps: 1e-5,
        is_gated: true,
        positions: Positions::Rotary { theta: theta.unwrap_or(10_000.0), takes_turns: true },
        has_pre_norm: true,
        has_post_norm: false,
        names: PIXTRAL,
        ..tower
    })
}

/// Pixtral, which is a LLaVA with an encoder of its own.
pub(super) fn pixtral(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let strategy = reader.whole.text("vision_feature_select_strategy")?;
    if strategy.as_deref() != Some("full") {
        let why = "is not `full`, which is implemented with such a tower";
        return Err(reader.whole.error("vision_feature_select_strategy", why));
    }
    if reader.whole.value("vision_feature_layer").is_none() {
        return Err(reader.whole.error("vision_feature_layer", "is missing"));
    }
    let activation = Reader::activation(reader.whole, "projector_hidden_act", "gelu")?;
    let config = reader.config("llava", tower(reader)?, reader.two_layers(activation))?;
    Ok(MediaConfig { placeholder: Placeholder::Rows, ..config })
}

/// Mistral Small 3.1.
pub(super) fn mistral3(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    Ok(MediaConfig { placeholder: Placeholder::Rows, ..merged(reader, "mistral3")? })
}

/// `LightOnOCR`: the same without tokens between rows, before a Qwen 3.
pub(super) fn lighton_ocr(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let implemented = [
        ("vision_feature_layer", json!(-1)),
        ("projector_hidden_act", json!("gelu")),
        ("multimodal_projector_bias", json!(false)),
    ];
    reader.whole.only(&implemented)?;
    let config = merged(reader, "lighton_ocr")?;
    if let (Some(head_dim), Some(tower)) = (reader.encoder.size("head_dim")?, config.tower())
        && head_dim * tower.num_heads != tower.hidden_size
    {
        let why = format!("is {head_dim}; implemented: the width of {} over {} heads", tower.hidden_size, tower.num_heads);
        return Err(reader.encoder.error("head_dim", why));
    }
    reader.check_rest(&[])?;
    let places = Places { tower: &["model.vision_encoder."], projector: &["model.vision_projection."], newline: &[] };
    Ok(MediaConfig { places, ..config })
}

/// With a projector that makes one vector of a square of patches.
fn merged(reader: &Reader<'_, '_>, architecture: &'static str) -> Result<MediaConfig, EngineError> {
    let tower = tower(reader)?;
    let hidden = tower.hidden_size;
    let merge = reader.whole.size("spatial_merge_size")?.unwrap_or(2);
    let activation = Reader::activation(reader.whole, "projector_hidden_act", "gelu")?;
    let mut projector = reader.two_layers(activation);
    projector.norm = Some(ProjectorNorm { name: "norm", kind: NormKind::Rms, eps: reader.decoder.norm.eps, offset: 0.0 });
    projector.regroup = Regroup::Interleaved(merge);
    projector.layers.insert(0, ProjectorLayer { out_features: hidden, ..reader.last("patch_merger.merging_layer") });
    reader.config(architecture, tower, projector)
}
