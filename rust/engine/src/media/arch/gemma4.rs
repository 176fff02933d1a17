//! Gemma 4: an encoder of its own for images of any shape, with norms as its language model has them, whose patches become means.

use device::NormKind;

use super::Reader;
use crate::{
    EngineError,
    media::config::{
        InnerNorms, MediaConfig, PatchLayout, Placeholder, Places, Positions, ProjectorConfig, ProjectorNorm, Regroup, Standard,
        TowerConfig, TowerNames,
    },
    model::{config::AttentionConfig, fields::Fields},
};

const NAMES: TowerNames = TowerNames {
    patch: "patch_embedder.input_proj",
    positions: "patch_embedder.position_embedding_table",
    class: "",
    pre_norm: "",
    post_norm: "",
    attn_norm: "encoder.layers.*.input_layernorm",
    qkv: [
        "encoder.layers.*.self_attn.q_proj.linear",
        "encoder.layers.*.self_attn.k_proj.linear",
        "encoder.layers.*.self_attn.v_proj.linear",
    ],
    attn_output: "encoder.layers.*.self_attn.o_proj.linear",
    ffn_norm: "encoder.layers.*.pre_feedforward_layernorm",
    gate: "encoder.layers.*.mlp.gate_proj.linear",
    up: "encoder.layers.*.mlp.up_proj.linear",
    down: "encoder.layers.*.mlp.down_proj.linear",
    is_paired: false,
    scales: [""; 2],
};
const INNER_NORMS: InnerNorms = InnerNorms {
    q: "encoder.layers.*.self_attn.q_norm",
    k: "encoder.layers.*.self_attn.k_norm",
    post_attn: "encoder.layers.*.post_attention_layernorm",
    post_ffn: "encoder.layers.*.post_feedforward_layernorm",
};
const PLACES: Places = Places {
    tower: &["model.vision_tower.", "vision_tower."],
    projector: &["model.embed_vision.", "embed_vision."],
    newline: &[],
};

pub(super) fn gemma4(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = reader.clip([768, 3072, 16, 12, 0, 16], "gelu_pytorch_tanh", 1e-6)?;
    let (hidden, heads) = (tower.hidden_size, tower.num_heads);
    for (key, usual, wanted) in [("head_dim", 64, hidden / heads.max(1)), ("num_key_value_heads", 12, heads)] {
        let given = reader.size(key, usual)?;
        if given != wanted {
            return Err(reader.encoder.error(key, format!("is {given}; implemented beside the other sizes: {wanted}")));
        }
    }
    if reader.encoder.flag("attention_bias")?.unwrap_or(false) {
        return Err(reader.encoder.error("attention_bias", "is true; implemented: false"));
    }
    let theta = match reader.encoder.child("rope_parameters")? {
        Some(rope) => match rope.text("rope_type")?.as_deref().unwrap_or("axial") {
            "axial" | "default" => rope.number("rope_theta")?,
            other => return Err(rope.error("rope_type", format!("is `{other}`; implemented: axial"))),
        },
        None => None,
    };
    let side = reader.size("position_embedding_size", 10 * 1024)?;
    let pooled = reader.size("pooling_kernel_size", 3)?;
    reader.check_processor(&tower, pooled).map_err(|why| reader.encoder.error("pooling_kernel_size", why))?;
    let is_standardized = reader.encoder.flag("standardize")?.unwrap_or(false);
    let eps = reader.number("rms_norm_eps", 1e-6)?;
    let tower = TowerConfig {
        eps,
        activation: Reader::activation(&reader.encoder, "hidden_activation", "gelu_pytorch_tanh")?,
        norm: NormKind::Rms,
        is_gated: true,
        patch_layout: PatchLayout::Pixels,
        positions: Positions::Axes { side, theta: theta.unwrap_or(100.0) },
        has_post_norm: false,
        inner_norms: Some(INNER_NORMS),
        is_bounded: reader.encoder.flag("use_clipped_linears")?.unwrap_or(false),
        standard: Some(Standard { factor: (hidden as f32).sqrt(), names: is_standardized.then_some(["std_bias", "std_scale"]) }),
        names: NAMES,
        ..tower
    };
    let projector = ProjectorConfig {
        norm: None,
        regroup: Regroup::MeansOf(pooled),
        late_norm: Some(ProjectorNorm { name: "", kind: NormKind::Rms, eps, offset: 0.0 }),
        layers: vec![reader.last("embedding_projection")],
    };
    let text = reader.whole.child("text_config")?;
    let senses = text.map(|text| text.text("use_bidirectional_attention")).transpose()?.flatten();
    let has_window = |attention: &AttentionConfig| attention.window.is_some();
    let sees_spans = senses.is_some() && reader.decoder.layers.iter().any(|layer| has_window(&layer.attention));
    let placeholder = Placeholder::Enclosed {
        before: reader.token(["boi_token_id", "boi_token_index"])?,
        after: reader.token(["eoi_token_id", "eoi_token_index"])?,
    };
    Ok(MediaConfig {
        placeholder,
        places: PLACES,
        sees_spans,
        spans_in_windows: true,
        ..reader.config("gemma4", tower, projector)?
    })
}
