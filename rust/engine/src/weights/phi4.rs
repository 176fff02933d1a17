//! Names of Phi-4-multimodal's checkpoints, of which there are two kinds: as Transformers saves them, and as the hub had them
//! first, with adapters among the weights.

/// Parts of names, and what they are called here.
const PARTS: [(&str, &str); 15] = [
    (".base_layer.", "."),
    (".global_img_feature_extensor", ".glb_GN"),
    (".sub_img_feature_extensor", ".sub_GN"),
    (".img_projection.0.", ".img_projection_up."),
    (".img_projection.2.", ".img_projection_down."),
    (".audio_projection.speech.0.", ".up_proj_for_speech."),
    (".audio_projection.speech.2.", ".down_proj_for_speech."),
    (".audio_projection.vision.0.", ".up_proj_for_vision_speech."),
    (".audio_projection.vision.2.", ".down_proj_for_vision_speech."),
    (".net.0.linear.", ".gate_up_proj."),
    (".net.2.", ".down_proj."),
    (".linear_q.", ".q_proj."),
    (".linear_k.", ".k_proj."),
    (".linear_v.", ".v_proj."),
    (".linear_out.", ".o_proj."),
];

/// What a tensor of either kind is called here.
pub(crate) fn common_name(name: String) -> String {
    PARTS.iter().fold(name, |name, (part, common)| name.replace(part, common))
}

#[cfg(test)]
mod tests {
    use super::common_name;

    #[test]
    fn both_kinds_have_common_names() {
        let same = |a: &str, b: &str| assert_eq!(common_name(a.into()), common_name(b.into()));
        same("model.layers.0.mlp.down_proj.base_layer.weight", "model.layers.0.mlp.down_proj.weight");
        same("a.image_embed.glb_GN", "a.image_embed.global_img_feature_extensor");
        same("a.encoders.3.feed_forward_in.net.2.bias", "a.encoders.3.feed_forward_in.down_proj.bias");
        let of_adapter = "model.layers.0.mlp.down_proj.lora_A.vision.weight";
        assert_eq!(common_name(of_adapter.into()), of_adapter);
    }
}
