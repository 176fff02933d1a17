//! Encoders of tiny models that hear, as llama.cpp's converter writes them: beside those of [`super::mmproj`].

use serde_json::Value;

use super::{
    gguf_writer::{Gguf, STRING, U32, string},
    mmproj::{Checkpoint, Tensor, add, renamed},
};

const F32: u32 = 6;
const BOOL: u32 = 7;

const WHISPER: [(&str, &str); 13] = [
    ("audio_tower.embed_positions", "a.position_embd"),
    ("audio_tower.layer_norm", "a.post_ln"),
    ("audio_tower.conv", "a.conv1d."),
    ("audio_tower.layers.", "a.blk."),
    ("self_attn_layer_norm", "ln1"),
    ("final_layer_norm", "ln2"),
    ("self_attn.out_proj", "attn_out"),
    ("self_attn.", "attn_"),
    ("_proj.", "."),
    ("fc1", "ffn_up"),
    ("fc2", "ffn_down"),
    ("multi_modal_projector.linear_", "mm.a.mlp."),
    ("multi_modal_projector.linear", "mm.a.fc"),
];

/// The norms about the convolution over time are called what the other is.
const CONFORMER: [(&str, &str); 26] = [
    ("model.audio_tower.", "a."),
    ("a.subsample_conv_projection.layer", "a.conv1d."),
    (".conv.weight", ".weight"),
    ("subsample_conv_projection.input_proj_linear", "input_projection"),
    ("output_proj", "pre_encode.out"),
    (".linear.", "."),
    ("layers.", "blk."),
    ("feed_forward1.pre_layer_norm", "ffn_norm"),
    ("feed_forward1.post_layer_norm", "ffn_post_norm"),
    ("feed_forward1.ffw_layer_1", "ffn_up"),
    ("feed_forward1.ffw_layer_2", "ffn_down"),
    ("feed_forward2.pre_layer_norm", "ffn_norm_1"),
    ("feed_forward2.post_layer_norm", "ffn_post_norm_1"),
    ("feed_forward2.ffw_layer_1", "ffn_up_1"),
    ("feed_forward2.ffw_layer_2", "ffn_down_1"),
    ("norm_pre_attn", "attn_pre_norm"),
    ("norm_post_attn", "attn_post_norm"),
    ("self_attn.post.", "attn_out."),
    ("self_attn.relative_k_proj", "attn_k_rel"),
    ("self_attn.per_dim_scale", "per_dim_scale.weight"),
    ("lconv1d.pre_layer_norm", "conv_norm"),
    ("lconv1d.conv_norm", "norm_conv"),
    ("lconv1d.linear_start", "conv_pw1"),
    ("lconv1d.linear_end", "conv_pw2"),
    ("lconv1d.depthwise_conv1d", "conv_dw"),
    ("norm_out", "ln2"),
];

const GEMMA4_TOWER: [(&str, &str); 15] = [
    ("model.vision_tower.", "v."),
    ("patch_embedder.input_proj", "patch_embd"),
    ("patch_embedder.position_embedding_table", "position_embd.weight"),
    ("encoder.layers.", "blk."),
    (".linear.weight", ".weight"),
    ("post_attention_layernorm", "attn_post_norm"),
    ("post_feedforward_layernorm", "ffn_post_norm"),
    ("pre_feedforward_layernorm", "ln2"),
    ("input_layernorm", "ln1"),
    ("self_attn.o_proj", "attn_out"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.", "attn_"),
    ("mlp.", "ffn_"),
    ("_proj", ""),
];

fn sizes(gguf: Gguf, prefix: &str, sizes: &[(&str, u64)]) -> Gguf {
    sizes.iter().fold(gguf, |gguf, (key, size)| gguf.entry(&format!("{prefix}.{key}"), U32, &(*size as u32).to_le_bytes()))
}

fn number(gguf: Gguf, key: &str, value: f32) -> Gguf {
    gguf.entry(key, F32, &value.to_le_bytes())
}

impl Checkpoint {
    /// The file of the encoder of sounds, or of both.
    pub fn hearing(&self) -> Gguf {
        let gguf = Gguf::new().entry("general.architecture", STRING, &string("clip")).entry("clip.has_audio_encoder", BOOL, &[1]);
        if self.name == "gemma4" { self.of_gemma4(gguf) } else { self.of_whisper(gguf) }
    }

    fn audio_size(&self, keys: [&str; 2]) -> u64 {
        keys.iter().find_map(|key| self.config["audio_config"][*key].as_u64()).unwrap_or_else(|| panic!("{keys:?}"))
    }

    fn of_whisper(&self, gguf: Gguf) -> Gguf {
        let (hidden, inner) =
            (self.audio_size(["hidden_size", "d_model"]), self.audio_size(["intermediate_size", "encoder_ffn_dim"]));
        let mut keys = vec![
            ("embedding_length", hidden),
            ("feed_forward_length", inner),
            ("block_count", self.audio_size(["num_hidden_layers", "encoder_layers"])),
            ("attention.head_count", self.audio_size(["num_attention_heads", "encoder_attention_heads"])),
            ("num_mel_bins", self.audio_size(["num_mel_bins"; 2])),
            ("projection_dim", self.config["text_config"]["hidden_size"].as_u64().unwrap()),
        ];
        let projector = match &self.name[..] {
            "voxtral" => "voxtral",
            "qwen2_audio" => "qwen2a",
            _ => "musicflamingo",
        };
        if projector == "voxtral" {
            keys.push(("projector.stack_factor", inner / hidden));
        }
        let gguf = sizes(gguf, "clip.audio", &keys).entry("clip.projector_type", STRING, &string(projector));
        let gguf = number(gguf, "clip.audio.attention.layer_norm_epsilon", 1e-5);
        let tensors = self.tensors.iter().filter(|(name, _)| !name.starts_with("language_model."));
        tensors.fold(gguf, |gguf, (name, (shape, values))| {
            let name = renamed(name, &WHISPER);
            let is_bias = name.contains("conv1d") && name.ends_with("bias");
            let shape = if is_bias { vec![shape[0], 1] } else { shape.clone() };
            add(gguf, &name, &(shape, values.clone()))
        })
    }

    fn of_gemma4(&self, gguf: Gguf) -> Gguf {
        let of = |part: &str, key: &str| self.config[part][key].as_u64().unwrap();
        let [see, hear] = ["vision_config", "audio_config"].map(|part| move |key: &str| of(part, key));
        let text = of("text_config", "hidden_size");
        let vision = [
            ("image_size", 224),
            ("patch_size", see("patch_size")),
            ("embedding_length", see("hidden_size")),
            ("feed_forward_length", see("intermediate_size")),
            ("block_count", see("num_hidden_layers")),
            ("attention.head_count", see("num_attention_heads")),
            ("projection_dim", text),
            // Read by llama.cpp, and written where it is not 3.
            ("projector.scale_factor", see("pooling_kernel_size")),
        ];
        let audio = [
            ("embedding_length", hear("hidden_size")),
            ("feed_forward_length", 4 * hear("hidden_size")),
            ("block_count", hear("num_hidden_layers")),
            ("attention.head_count", hear("num_attention_heads")),
            ("num_mel_bins", 16),
            ("projection_dim", text),
        ];
        let mut gguf = sizes(sizes(gguf, "clip.vision", &vision), "clip.audio", &audio)
            .entry("clip.has_vision_encoder", BOOL, &[1])
            .entry("clip.vision.projector_type", STRING, &string("gemma4v"))
            .entry("clip.audio.projector_type", STRING, &string("gemma4a"));
        for part in ["vision", "audio"] {
            gguf = number(gguf, &format!("clip.{part}.attention.layer_norm_epsilon"), 1e-6);
        }
        for (key, value) in [("image_mean", 0.0_f32), ("image_std", 1.0)] {
            gguf = gguf.array(&format!("clip.vision.{key}"), F32, 3, &value.to_le_bytes().repeat(3));
        }
        let patch = see("patch_size") as usize;
        let tensors = self.tensors.iter().filter(|(name, _)| !name.starts_with("model.language_model."));
        tensors.fold(gguf, |gguf, (name, tensor)| {
            let (name, tensor) = of_gemma4(name, tensor, patch);
            add(gguf, &name, &tensor)
        })
    }
}

fn of_gemma4(name: &str, (shape, values): &Tensor, patch: usize) -> (String, Tensor) {
    let as_is = (shape.clone(), values.clone());
    match name {
        "model.embed_audio.embedding_projection.weight" => ("mm.a.input_projection.weight".into(), as_is),
        "model.embed_vision.embedding_projection.weight" => ("mm.input_projection.weight".into(), as_is),
        // Numbers become lists of one.
        _ if shape.is_empty() => (of_part(name), (vec![1], values.clone())),
        _ if name.ends_with("per_dim_scale") => {
            let soft = values.iter().map(|value| value.exp().ln_1p()).collect();
            (of_part(name), (shape.clone(), soft))
        }
        _ if name.contains("depthwise_conv1d") => (of_part(name), (vec![shape[0], shape[2]], values.clone())),
        _ if name.ends_with("input_proj.weight") => {
            let area = patch * patch;
            let planes = values.chunks_exact(3 * area).flat_map(|row| (0..3 * area).map(|at| row[at % area * 3 + at / area]));
            (of_part(name), (vec![shape[0], 3, patch, patch], planes.collect()))
        }
        _ => (of_part(name), as_is),
    }
}

fn of_part(name: &str) -> String {
    if name.starts_with("model.vision_tower.") {
        return renamed(name, &GEMMA4_TOWER);
    }
    let name = renamed(name, &CONFORMER);
    ["q", "k", "v"].iter().fold(name, |name, part| name.replace(&format!("self_attn.{part}_proj"), &format!("attn_{part}")))
}

/// What a file does not say of a folder's configuration, as the engine takes it: the text of the file with such a change.
pub fn without_keys(text: &str, part: &[&str], keys: &[&str]) -> String {
    let mut json: Value = serde_json::from_str(text).unwrap();
    let object = part.iter().fold(&mut json, |json, key| &mut json[*key]).as_object_mut().unwrap();
    for key in keys {
        assert!(object.remove(*key).is_some(), "{key}");
    }
    json.to_string()
}
