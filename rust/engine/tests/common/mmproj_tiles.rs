//! Tiny models with encoders for tiles, as llama.cpp's converter writes them: beside those of [`super::mmproj`].

use serde_json::Value;

use super::{
    gguf_writer::{Gguf, STRING, U32, string},
    mmproj::{Checkpoint, Tensor, add, frames, renamed},
};

const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;

const LANGUAGE: [(&str, &str); 25] = [
    ("layers.", "blk."),
    ("input_layernorm", "attn_norm"),
    ("operator_norm", "attn_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("self_attn.", "attn_"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("gate_up_proj.", "up_proj."),
    ("mlp.", "ffn_"),
    ("feed_forward.", "ffn_"),
    ("embed_tokens", "token_embd"),
    ("embedding_norm", "token_embd_norm"),
    ("^norm", "output_norm"),
    ("^lm_head", "output"),
];

const INTERNVL: [(&str, &str); 17] = [
    ("vision_tower.", "v."),
    ("embeddings.cls_token", "class_embd"),
    ("embeddings.patch_embeddings.projection", "patch_embd"),
    ("embeddings.position_embeddings", "position_embd.weight"),
    ("encoder.layer.", "blk."),
    ("layernorm_before", "ln1"),
    ("layernorm_after", "ln2"),
    ("lambda_1", "ls1.weight"),
    ("lambda_2", "ls2.weight"),
    ("attention.projection_layer", "attn_out"),
    ("attention.", "attn_"),
    ("_proj.", "."),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("multi_modal_projector.layer_norm", "mm.model.mlp.0"),
    ("multi_modal_projector.linear_1", "mm.model.mlp.1"),
    ("multi_modal_projector.linear_2", "mm.model.mlp.3"),
];

const LFM2: [(&str, &str); 14] = [
    ("model.vision_tower.", "v."),
    ("model.multi_modal_projector.layer_norm", "mm.input_norm"),
    ("model.multi_modal_projector.linear_", "mm."),
    ("embeddings.patch_embedding", "patch_embd"),
    ("embeddings.position_embedding", "position_embd"),
    ("post_layernorm", "post_ln"),
    ("encoder.layers.", "blk."),
    ("layer_norm", "ln"),
    ("self_attn.out_proj", "attn_out"),
    ("self_attn.", "attn_"),
    ("_proj.", "."),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("^", ""),
];

const LLAMA4: [(&str, &str); 15] = [
    ("multi_modal_projector.linear_1", "mm.model.fc"),
    ("vision_model.vision_adapter.mlp.fc", "mm.model.mlp."),
    ("vision_model.class_embedding", "v.class_embd"),
    ("vision_model.positional_embedding_vlm", "v.position_embd.weight"),
    ("vision_model.patch_embedding.linear", "v.patch_embd"),
    ("vision_model.layernorm_pre", "v.pre_ln"),
    ("vision_model.layernorm_post", "v.post_ln"),
    ("vision_model.model.layers.", "v.blk."),
    ("input_layernorm", "ln1"),
    ("post_attention_layernorm", "ln2"),
    ("self_attn.o_proj", "attn_out"),
    ("self_attn.", "attn_"),
    ("_proj.", "."),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
];

const GLM4V: [(&str, &str); 18] = [
    ("model.visual.", "v."),
    ("v.downsample", "mm.patch_merger"),
    ("v.merger.post_projection_norm", "mm.post_norm"),
    ("v.merger.proj", "mm.model.fc"),
    ("v.merger.gate_proj", "mm.gate"),
    ("v.merger.up_proj", "mm.up"),
    ("v.merger.down_proj", "mm.down"),
    ("embeddings.position_embedding", "position_embd"),
    ("post_conv_layernorm", "norm_embd"),
    ("post_layernorm", "post_ln"),
    ("patch_embed.proj", "patch_embd"),
    ("blocks.", "blk."),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.proj", "attn_out"),
    ("attn.qkv", "attn_qkv"),
    ("mlp.", "ffn_"),
    ("_proj.", "."),
];

/// `[a, b, c]` as `[a, c, b]`, of the columns from `first` on so many.
fn turned((shape, values): &Tensor, first: usize, num: usize) -> Tensor {
    let [a, b, c] = shape[..] else { panic!("{shape:?}") };
    let at = |i: usize, row: usize, column: usize| values[(i * b + column) * c + first + row];
    let turned = (0..a).flat_map(|i| (0..num).flat_map(move |row| (0..b).map(move |column| (i, row, column))));
    (vec![a, num, b], turned.map(|(i, row, column)| at(i, row, column)).collect())
}

/// Of each head, the even rows of the part that rotates before the odd ones.
fn halved((shape, values): &Tensor, head_dim: usize, rotary_dim: usize) -> Tensor {
    let cols = values.len() / shape[0];
    let stored = |row: usize| match row % head_dim {
        at if at < rotary_dim / 2 => row - at + 2 * at,
        at if at < rotary_dim => row - at + 2 * (at - rotary_dim / 2) + 1,
        _ => row,
    };
    (shape.clone(), (0..shape[0]).flat_map(|row| &values[stored(row) * cols..][..cols]).copied().collect())
}

fn size(json: &Value, key: &str) -> u64 {
    json[key].as_u64().or_else(|| json[key][0].as_u64()).unwrap_or_else(|| panic!("{key}"))
}

fn u32s(gguf: Gguf, prefix: &str, sizes: &[(&str, u64)]) -> Gguf {
    sizes.iter().fold(gguf, |gguf, (key, size)| gguf.entry(&format!("{prefix}.{key}"), U32, &(*size as u32).to_le_bytes()))
}

fn i32s(gguf: Gguf, key: &str, values: &[u64]) -> Gguf {
    let bytes: Vec<u8> = values.iter().flat_map(|value| (*value as i32).to_le_bytes()).collect();
    gguf.array(key, I32, values.len() as u64, &bytes)
}

impl Checkpoint {
    /// The language model's file.
    pub fn language_of_tiles(&self) -> Gguf {
        let arch = match &self.name[..] {
            "internvl" => return self.language(true),
            "lfm2_vl" => "lfm2",
            "llama4_vision" => "llama4",
            "glm4v" => "glm4",
            other => panic!("{other}"),
        };
        let mut gguf = self.vocabulary(self.keys_of_tiles(arch));
        let prefixes = ["model.language_model.", "language_model.model.", "language_model."];
        for (name, tensor) in &self.tensors {
            let is_other = ["visual", "vision_", "multi_modal"].iter().any(|part| name.contains(part));
            if is_other {
                continue;
            }
            let rest = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
            for (name, tensor) in self.language_tensors(&renamed(&format!("^{rest}"), &LANGUAGE).replace('^', ""), tensor) {
                gguf = add(gguf, &name, &tensor);
            }
        }
        gguf
    }

    fn keys_of_tiles(&self, arch: &str) -> Gguf {
        let text = &self.config["text_config"];
        let heads = size(text, "num_attention_heads");
        let head_dim = text["head_dim"].as_u64().unwrap_or(size(text, "hidden_size") / heads);
        let inner = text["intermediate_size_mlp"].as_u64().unwrap_or(size(text, "intermediate_size"));
        let mut gguf = u32s(
            Gguf::new().entry("general.architecture", STRING, &string(arch)),
            arch,
            &[
                ("block_count", size(text, "num_hidden_layers")),
                ("context_length", 2048),
                ("embedding_length", size(text, "hidden_size")),
                ("feed_forward_length", inner),
                ("attention.head_count", heads),
                ("attention.key_length", head_dim),
                ("attention.value_length", head_dim),
                ("vocab_size", 640),
            ],
        );
        let kv_heads = size(text, "num_key_value_heads");
        gguf = match text["layer_types"].as_array() {
            Some(kinds) => {
                let heads: Vec<u64> = kinds.iter().map(|kind| if kind == "conv" { 0 } else { kv_heads }).collect();
                u32s(
                    i32s(gguf, "lfm2.attention.head_count_kv", &heads),
                    arch,
                    &[("shortconv.l_cache", size(text, "conv_L_cache"))],
                )
            }
            None => u32s(gguf, arch, &[("attention.head_count_kv", kv_heads)]),
        };
        let rope = &text["rope_parameters"];
        if let Some(sections) = rope["mrope_section"].as_array() {
            let sections: Vec<u64> = sections.iter().map(|size| size.as_u64().unwrap()).chain([0]).collect();
            gguf = u32s(i32s(gguf, "glm4.rope.dimension_sections", &sections), arch, &[("rope.dimension_count", head_dim / 2)]);
        }
        if arch == "llama4" {
            let experts = [
                ("expert_count", size(text, "num_local_experts")),
                ("expert_used_count", 1),
                ("expert_feed_forward_length", size(text, "intermediate_size")),
                ("interleave_moe_layer_step", size(text, "interleave_moe_layer_step")),
                ("rope.dimension_count", head_dim),
            ];
            gguf = u32s(gguf, arch, &experts);
        }
        let eps = text["rms_norm_eps"].as_f64().or(text["norm_eps"].as_f64()).unwrap();
        let numbers = [("rope.freq_base", rope["rope_theta"].as_f64().unwrap()), ("attention.layer_norm_rms_epsilon", eps)];
        numbers
            .into_iter()
            .fold(gguf, |gguf, (key, value)| gguf.entry(&format!("{arch}.{key}"), F32, &(value as f32).to_le_bytes()))
    }

    fn language_tensors(&self, name: &str, tensor: &Tensor) -> Vec<(String, Tensor)> {
        if let Some(place) = name.strip_suffix("ffn_experts.gate_up_proj") {
            let half = tensor.0[2] / 2;
            let of = |part: usize| turned(tensor, part * half, half);
            return vec![(format!("{place}ffn_gate_exps.weight"), of(0)), (format!("{place}ffn_up_exps.weight"), of(1))];
        }
        if let Some(place) = name.strip_suffix("ffn_experts.down_proj") {
            return vec![(format!("{place}ffn_down_exps.weight"), turned(tensor, 0, tensor.0[2]))];
        }
        if let Some((place, part)) = name.split_once("ffn_shared_expert.") {
            let part = part.replace("_proj.weight", "_shexp.weight");
            return vec![(format!("{place}ffn_{part}"), tensor.clone())];
        }
        let name =
            name.replace("_proj.weight", ".weight").replace("_proj.bias", ".bias").replace("shortconv.in.", "shortconv.in_proj.");
        let name = name.replace("shortconv.out.", "shortconv.out_proj.");
        let mut tensor = tensor.clone();
        if name.contains("shortconv.conv") {
            tensor.0.remove(1);
        }
        if self.name == "glm4v" && (name.contains("attn_q.") || name.contains("attn_k.")) {
            let text = &self.config["text_config"];
            let head_dim = (size(text, "hidden_size") / size(text, "num_attention_heads")) as usize;
            tensor = halved(&tensor, head_dim, head_dim / 2);
        }
        vec![(name, tensor)]
    }

    /// The encoder's file.
    pub fn encoder_of_tiles(&self) -> Gguf {
        let (vision, text) = (&self.config["vision_config"], &self.config["text_config"]);
        let either = |keys: [&str; 2]| vision[keys[0]].as_u64().unwrap_or_else(|| size(vision, keys[1]));
        let (projector, image) = match &self.name[..] {
            "internvl" => ("internvl", size(vision, "image_size")),
            "lfm2_vl" => ("lfm2", 256),
            "llama4_vision" => ("llama4", size(vision, "image_size")),
            _ => ("glm4v", size(vision, "image_size")),
        };
        let mut sizes = vec![
            ("image_size", image),
            ("patch_size", size(vision, "patch_size")),
            ("embedding_length", size(vision, "hidden_size")),
            ("feed_forward_length", size(vision, "intermediate_size")),
            ("block_count", either(["num_hidden_layers", "depth"])),
            ("attention.head_count", either(["num_attention_heads", "num_heads"])),
            ("projection_dim", size(text, "hidden_size")),
        ];
        match projector {
            "internvl" => sizes.extend([
                ("projector.scale_factor", 2),
                ("preproc_min_tiles", size(&self.processor, "min_patches")),
                ("preproc_max_tiles", size(&self.processor, "max_patches")),
            ]),
            "glm4v" => {}
            _ => sizes.push(("projector.scale_factor", 2)),
        }
        let gguf = Gguf::new()
            .entry("general.architecture", STRING, &string("clip"))
            .entry("clip.has_vision_encoder", BOOL, &[1])
            .entry("clip.projector_type", STRING, &string(projector))
            .entry(if projector == "glm4v" { "clip.use_silu" } else { "clip.use_gelu" }, BOOL, &[1]);
        let mut gguf = u32s(gguf, "clip.vision", &sizes);
        let eps = ["layer_norm_eps", "norm_eps", "rms_norm_eps"].iter().find_map(|key| vision[*key].as_f64()).unwrap() as f32;
        gguf = gguf.entry("clip.vision.attention.layer_norm_epsilon", F32, &eps.to_le_bytes());
        for key in ["image_mean", "image_std"] {
            let values = self.processor[key].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32);
            gguf = gguf.array(&format!("clip.vision.{key}"), F32, 3, &values.flat_map(f32::to_le_bytes).collect::<Vec<_>>());
        }
        let rules: &[_] = match projector {
            "internvl" => &INTERNVL,
            "lfm2" => &LFM2,
            "llama4" => &LLAMA4,
            _ => &GLM4V,
        };
        let patch = size(vision, "patch_size") as usize;
        for (name, tensor) in &self.tensors {
            let name = renamed(name, rules);
            if !name.starts_with("v.") && !name.starts_with("mm.") {
                continue;
            }
            let (shape, values) = tensor;
            match (projector, &name[..]) {
                ("lfm2", "v.patch_embd.weight") => {
                    let area = patch * patch;
                    let planes =
                        values.chunks_exact(3 * area).flat_map(|row| (0..3 * area).map(|at| row[at % area * 3 + at / area]));
                    gguf = add(gguf, &name, &(vec![shape[0], 3, patch, patch], planes.collect()));
                }
                ("glm4v", "v.patch_embd.weight") => {
                    gguf = frames(shape, values).iter().fold(gguf, |gguf, (name, tensor)| add(gguf, name, tensor));
                }
                _ => gguf = add(gguf, &name, tensor),
            }
        }
        gguf
    }
}
