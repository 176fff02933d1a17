//! Tiny models that see, as llama.cpp's converter writes them: a GGUF file of the language model, and one of its image encoder.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use half::bf16;
use serde_json::Value;

use super::{
    gemma4,
    gguf_writer::{Gguf, STRING, U32, string},
};

const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
/// ggml's number of the type.
const GGML_F32: u32 = 0;

/// A tensor's shape and values.
pub type Tensor = (Vec<usize>, Vec<f32>);

/// A model's folder, read.
pub struct Checkpoint {
    pub name: String,
    dir: PathBuf,
    pub config: Value,
    pub processor: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

fn json(path: &Path) -> Option<Value> {
    std::fs::read(path).ok().map(|bytes| serde_json::from_slice(&bytes).unwrap())
}

fn decoded(dtype: safetensors::Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        safetensors::Dtype::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        safetensors::Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        other => panic!("{other:?}"),
    }
}

/// As llama.cpp's converter orders the rows of heads: those that rotate together beside each other.
fn paired((shape, values): &Tensor, num_heads: usize) -> Tensor {
    let (rows, cols) = (shape[0], shape[1..].iter().product::<usize>());
    let half = rows / num_heads / 2;
    let mut out = Vec::with_capacity(values.len());
    for head in 0..num_heads {
        for i in 0..half {
            for part in 0..2 {
                let row = head * 2 * half + part * half + i;
                out.extend_from_slice(&values[row * cols..(row + 1) * cols]);
            }
        }
    }
    (shape.clone(), out)
}

pub fn renamed(name: &str, rules: &[(&str, &str)]) -> String {
    rules.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

const CLIP: [(&str, &str); 13] = [
    ("embeddings.class_embedding", "class_embd"),
    ("embeddings.patch_embedding", "patch_embd"),
    ("embeddings.position_embedding", "position_embd"),
    ("pre_layrnorm", "pre_ln"),
    ("post_layernorm", "post_ln"),
    ("encoder.layers.", "blk."),
    ("layer_norm", "ln"),
    ("self_attn.out_proj", "attn_out"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
];

const PIXTRAL: [(&str, &str); 11] = [
    ("patch_conv", "patch_embd"),
    ("ln_pre", "pre_ln"),
    ("transformer.layers.", "blk."),
    ("attention_norm", "ln1"),
    ("ffn_norm", "ln2"),
    ("attention.o_proj", "attn_out"),
    ("attention.q_proj", "attn_q"),
    ("attention.k_proj", "attn_k"),
    ("attention.v_proj", "attn_v"),
    ("feed_forward.", "ffn_"),
    ("_proj", ""),
];

const QWEN: [(&str, &str); 14] = [
    ("patch_embed.proj", "patch_embd"),
    ("pos_embed", "position_embd"),
    ("blocks.", "blk."),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.proj", "attn_out"),
    ("attn.qkv", "attn_qkv"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const PROJECTORS: [(&str, &str); 16] = [
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
    ("multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger"),
    ("multi_modal_projector.norm", "mm.input_norm"),
    ("multi_modal_projector.linear_1", "mm.0"),
    ("multi_modal_projector.linear_2", "mm.2"),
    ("model.connector.modality_projection.proj", "mm.model.fc"),
    ("merger.ln_q", "post_ln"),
    ("merger.norm", "post_ln"),
    ("v.merger.mlp.", "mm."),
    ("v.merger.linear_fc1", "mm.0"),
    ("v.merger.linear_fc2", "mm.2"),
    ("deepstack_merger_list.", "deepstack."),
    ("linear_fc", "fc"),
    ("vision_tower.", "v."),
    ("model.vision_model.", "v."),
];

const LANGUAGE: [(&str, &str); 20] = [
    ("layers.", "blk."),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("embed_tokens", "token_embd"),
    ("^norm", "output_norm"),
    ("^lm_head", "output"),
    ("^", ""),
];

impl Checkpoint {
    pub fn open(dir: &Path) -> Self {
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            (name, (view.shape().to_vec(), decoded(view.dtype(), view.data())))
        };
        let outer = json(&dir.join("processor_config.json")).and_then(|json| json.get("image_processor").cloned());
        Self {
            name: dir.file_name().unwrap().to_str().unwrap().to_owned(),
            dir: dir.to_owned(),
            config: json(&dir.join("config.json")).unwrap(),
            processor: outer.or_else(|| json(&dir.join("preprocessor_config.json"))).unwrap(),
            tensors: file.tensors().into_iter().map(read).collect(),
        }
    }

    fn text_size(&self, key: &str) -> u64 {
        self.config["text_config"][key].as_u64().unwrap_or_else(|| panic!("{key}"))
    }

    /// The language model of a Llama as one of Qwen 2 with biases of zero, which computes the same and whose rows the converter
    /// leaves in their order: so sums of products have the same order, too.
    pub fn language(&self, as_qwen2: bool) -> Gguf {
        let model_type = self.config["text_config"]["model_type"].as_str().unwrap();
        if model_type == "gemma4_text" {
            return self.language_of_gemma4();
        }
        let arch = match model_type {
            "llama" | "mistral" if as_qwen2 => "qwen2",
            "qwen2" => "qwen2",
            "llama" | "mistral" => "llama",
            "qwen2_vl_text" | "qwen2_5_vl_text" => "qwen2vl",
            "qwen3_vl_text" => "qwen3vl",
            "qwen3_vl_moe_text" => "qwen3vlmoe",
            "gemma3_text" => "gemma3",
            other => panic!("{other}"),
        };
        let mut gguf = self.vocabulary(self.language_keys(arch));
        let heads = |name: &str| match name {
            name if name.contains("attn_q.") => self.text_size("num_attention_heads") as usize,
            name if name.contains("attn_k.") => self.text_size("num_key_value_heads") as usize,
            _ => 0,
        };
        for (name, tensor) in self.tensors.iter().filter_map(|(name, tensor)| Some((language_name(name, arch)?, tensor))) {
            let mut tensor = tensor.clone();
            if arch == "llama" && heads(&name) > 0 {
                tensor = paired(&tensor, heads(&name));
            }
            if let Some(place) = name.strip_suffix("mlp.experts.gate_up_proj") {
                let half = |part| half_of_rows(&tensor, part);
                gguf = add(gguf, &format!("{place}ffn_gate_exps.weight"), &half(0));
                gguf = add(gguf, &format!("{place}ffn_up_exps.weight"), &half(1));
                continue;
            }
            if arch == "gemma3" && name.contains("norm") {
                tensor.1.iter_mut().for_each(|value| *value += 1.0);
            }
            if arch == "qwen2"
                && model_type != "qwen2"
                && ["attn_q.", "attn_k.", "attn_v."].iter().any(|part| name.contains(part))
            {
                let rows = tensor.0[0];
                gguf = add(gguf, &name.replace("weight", "bias"), &(vec![rows], vec![0.0; rows]));
            }
            gguf = add(gguf, &name, &tensor);
        }
        gguf
    }

    fn language_keys(&self, arch: &str) -> Gguf {
        let mut gguf = Gguf::new().entry("general.architecture", STRING, &string(arch));
        let hidden = self.text_size("hidden_size");
        let head = self.config["text_config"]["head_dim"].as_u64().unwrap_or(hidden / self.text_size("num_attention_heads"));
        let sizes = [
            ("block_count", self.text_size("num_hidden_layers")),
            ("context_length", 2048),
            ("embedding_length", hidden),
            ("feed_forward_length", self.text_size("intermediate_size")),
            ("attention.head_count", self.text_size("num_attention_heads")),
            ("attention.head_count_kv", self.text_size("num_key_value_heads")),
            ("attention.key_length", head),
            ("attention.value_length", head),
            ("vocab_size", 640),
        ];
        for (key, size) in sizes {
            gguf = gguf.entry(&format!("{arch}.{key}"), U32, &(size as u32).to_le_bytes());
        }
        let rope = &self.config["text_config"]["rope_parameters"];
        let theta = rope["rope_theta"].as_f64().or(rope["full_attention"]["rope_theta"].as_f64()).unwrap();
        let eps = self.config["text_config"]["rms_norm_eps"].as_f64().unwrap();
        for (key, value) in [("rope.freq_base", theta), ("attention.layer_norm_rms_epsilon", eps)] {
            gguf = gguf.entry(&format!("{arch}.{key}"), F32, &(value as f32).to_le_bytes());
        }
        let experts = [
            ("expert_count", "num_experts"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
        ];
        for (key, of_text) in experts {
            if let Some(size) = self.config["text_config"][of_text].as_u64() {
                gguf = gguf.entry(&format!("{arch}.{key}"), U32, &(size as u32).to_le_bytes());
            }
        }
        if let Some(window) = self.config["text_config"]["sliding_window"].as_u64() {
            gguf = gguf.entry(&format!("{arch}.attention.sliding_window"), U32, &(window as u32).to_le_bytes());
        }
        if let Some(sections) = rope["mrope_section"].as_array() {
            let sizes = sections.iter().map(|size| size.as_u64().unwrap() as i32).chain([0]);
            let bytes: Vec<u8> = sizes.flat_map(i32::to_le_bytes).collect();
            gguf = gguf.array(&format!("{arch}.rope.dimension_sections"), I32, 4, &bytes);
        }
        gguf
    }

    fn language_of_gemma4(&self) -> Gguf {
        let gguf = self.vocabulary(gemma4::metadata(&self.config["text_config"]));
        let tensors = self.tensors.iter().filter(|(name, _)| name.starts_with("model.language_model."));
        tensors.fold(gguf, |gguf, (name, tensor)| add(gguf, &gemma4::gguf_name(&name.replace("language_model.", "")), tensor))
    }

    /// What tokens and texts of the golden are called in the family's own vocabulary.
    fn own_tokens(&self) -> &'static [(&'static str, &'static str)] {
        match &self.name[..] {
            "internvl" => &[("<row_2_col_3>", "<IMG_CONTEXT>")],
            "llama4_vision" => &[("[IMG_BREAK]", "<|patch|>")],
            "glm4v" => &[("<|image_pad|>", "<|image|>")],
            "audioflamingo3" => &[("<|AUDIO|>", "<sound>")],
            "gemma4" => &[
                ("<|AUDIO|>", "<|audio|>"),
                ("<|audio_bos|>", "<|audio>"),
                ("<|audio_eos|>", "<audio|>"),
                ("<|image_pad|>", "<|image|>"),
                ("<|vision_start|>", "<|image>"),
                ("<|vision_end|>", "<image|>"),
            ],
            _ => &[],
        }
    }

    /// With the tokenizer.
    pub fn vocabulary(&self, gguf: Gguf) -> Gguf {
        let tokenizer = json(&self.dir.join("tokenizer.json")).unwrap();
        let mut tokens: Vec<_> = (0..640).map(|id| (format!("[PAD{id}]"), 5_i32)).collect();
        for (text, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
            tokens[id.as_u64().unwrap() as usize] = (text.clone(), 1);
        }
        for token in tokenizer["added_tokens"].as_array().unwrap() {
            tokens[token["id"].as_u64().unwrap() as usize] = (renamed(token["content"].as_str().unwrap(), self.own_tokens()), 3);
        }
        let merges = tokenizer["model"]["merges"].as_array().unwrap();
        let merge = |pair: &Value| string(&format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
        let texts: Vec<u8> = tokens.iter().flat_map(|(text, _)| string(text)).collect();
        let types: Vec<u8> = tokens.iter().flat_map(|(_, kind)| kind.to_le_bytes()).collect();
        let template = renamed(&std::fs::read_to_string(self.dir.join("chat_template.jinja")).unwrap(), self.own_tokens());
        let ids = [("bos", 1_u32), ("eos", 2), ("unknown", 0), ("padding", 5)];
        let gguf = gguf
            .entry("tokenizer.ggml.model", STRING, &string("gpt2"))
            .entry("tokenizer.ggml.pre", STRING, &string("gpt-2"))
            .array("tokenizer.ggml.tokens", STRING, 640, &texts)
            .array("tokenizer.ggml.token_type", I32, 640, &types)
            .array("tokenizer.ggml.merges", STRING, merges.len() as u64, &merges.iter().flat_map(merge).collect::<Vec<_>>())
            .entry("tokenizer.chat_template", STRING, &string(&template));
        ids.into_iter()
            .fold(gguf, |gguf, (name, id)| gguf.entry(&format!("tokenizer.ggml.{name}_token_id"), U32, &id.to_le_bytes()))
    }

    /// `clip.projector_type`.
    pub fn projector(&self) -> &'static str {
        match &self.name[..] {
            "llava" | "llava_next" => "mlp",
            "idefics3" => "idefics3",
            "gemma3_vision" => "gemma3",
            "mistral3" => "pixtral",
            "qwen2_vl" => "qwen2vl_merger",
            "qwen2_5_vl" => "qwen2.5vl_merger",
            "qwen3_vl" | "qwen3_vl_moe" => "qwen3vl_merger",
            other => panic!("{other}"),
        }
    }

    /// The image encoder's file.
    pub fn encoder(&self) -> Gguf {
        let mut gguf = self.encoder_keys();
        for (name, tensor) in &self.tensors {
            for (name, tensor) in self.encoder_tensors(name, tensor) {
                gguf = add(gguf, &name, &tensor);
            }
        }
        gguf
    }

    fn vision_size(&self, keys: [&str; 3]) -> u64 {
        keys.iter().find_map(|key| self.config["vision_config"][*key].as_u64()).unwrap_or_else(|| panic!("{keys:?}"))
    }

    fn encoder_keys(&self) -> Gguf {
        let vision = &self.config["vision_config"];
        let patch = self.vision_size(["patch_size"; 3]);
        let side = vision["num_position_embeddings"].as_u64().map(|num| num.isqrt() * patch);
        let mut sizes = vec![
            ("image_size", vision["image_size"].as_u64().or(side).unwrap_or(560)),
            ("patch_size", patch),
            ("embedding_length", self.vision_size(["embed_dim", "hidden_size", "hidden_size"])),
            // What the converter writes for Qwen2-VL is the width of something else; nobody reads it.
            ("feed_forward_length", 1),
            ("projection_dim", self.text_size("hidden_size")),
            ("attention.head_count", self.vision_size(["num_attention_heads", "num_heads", "num_heads"])),
        ];
        let num_layers = self.vision_size(["num_hidden_layers", "depth", "depth"]);
        let is_llava = self.projector() == "mlp";
        // As far as it is computed.
        sizes.push(("block_count", if is_llava { num_layers - 1 } else { num_layers }));
        let size = &self.processor["size"];
        match self.projector() {
            "idefics3" => {
                sizes.push(("preproc_image_size", size["longest_edge"].as_u64().unwrap()));
                sizes.push(("projector.scale_factor", self.config["scale_factor"].as_u64().unwrap()));
            }
            "gemma3" => sizes.push(("projector.scale_factor", 2)),
            "pixtral" => sizes.push(("spatial_merge_size", self.config["spatial_merge_size"].as_u64().unwrap())),
            "mlp" => {}
            _ => {
                sizes.push((
                    "image_min_pixels",
                    size["shortest_edge"].as_u64().or(self.processor["min_pixels"].as_u64()).unwrap(),
                ));
                sizes
                    .push(("image_max_pixels", size["longest_edge"].as_u64().or(self.processor["max_pixels"].as_u64()).unwrap()));
                sizes.push(("spatial_merge_size", vision["spatial_merge_size"].as_u64().unwrap()));
            }
        }
        if let Some(full) = vision["fullatt_block_indexes"].as_array() {
            sizes.push(("n_wa_pattern", full[0].as_u64().unwrap() + 1));
            sizes.push(("window_size", vision["window_size"].as_u64().unwrap()));
        }
        let mut gguf = Gguf::new()
            .entry("general.architecture", STRING, &string("clip"))
            .entry("clip.has_vision_encoder", BOOL, &[1])
            .entry("clip.projector_type", STRING, &string(self.projector()));
        for (key, size) in sizes {
            gguf = gguf.entry(&format!("clip.vision.{key}"), U32, &(size as u32).to_le_bytes());
        }
        gguf = match vision["hidden_act"].as_str().unwrap() {
            "quick_gelu" => gguf,
            "silu" => gguf.entry("clip.use_silu", BOOL, &[1]),
            _ => gguf.entry("clip.use_gelu", BOOL, &[1]),
        };
        let is_rms = self.projector() == "pixtral";
        let eps = vision["layer_norm_eps"].as_f64().unwrap_or(if is_rms { 1e-5 } else { 1e-6 }) as f32;
        gguf = gguf.entry("clip.vision.attention.layer_norm_epsilon", F32, &eps.to_le_bytes());
        for key in ["image_mean", "image_std"] {
            let values = self.processor[key].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32);
            gguf = gguf.array(&format!("clip.vision.{key}"), F32, 3, &values.flat_map(f32::to_le_bytes).collect::<Vec<_>>());
        }
        if let Some(points) = self.processor["image_grid_pinpoints"].as_array() {
            let sides = points.iter().flat_map(|point| point.as_array().unwrap()).map(|side| side.as_u64().unwrap() as i32);
            let bytes: Vec<u8> = sides.flat_map(i32::to_le_bytes).collect();
            gguf = gguf.array("clip.vision.image_grid_pinpoints", I32, 2 * points.len() as u64, &bytes);
        }
        if let Some(layers) = vision["deepstack_visual_indexes"].as_array() {
            let deep: Vec<u8> =
                (0..num_layers).map(|layer| u8::from(layers.iter().any(|it| it.as_u64() == Some(layer)))).collect();
            gguf = gguf.array("clip.vision.is_deepstack_layers", BOOL, num_layers, &deep);
        }
        gguf
    }

    /// What becomes of a tensor; nothing of those of the language model.
    fn encoder_tensors(&self, name: &str, tensor: &Tensor) -> Vec<(String, Tensor)> {
        let visual = name.strip_prefix("model.visual.").or_else(|| name.strip_prefix("visual."));
        let name = visual.map_or_else(|| name.to_owned(), |rest| format!("v.{rest}"));
        let rules: &[_] = match self.projector() {
            "pixtral" => &PIXTRAL,
            "mlp" | "idefics3" | "gemma3" => &CLIP,
            _ => &QWEN,
        };
        let mut name = renamed(&renamed(&name, &PROJECTORS), rules);
        if name == "image_newline" {
            return vec![("model.image_newline".into(), tensor.clone())];
        }
        if !name.starts_with("v.") && !name.starts_with("mm.") {
            return Vec::new();
        }
        match self.projector() {
            // As the older converter does, which calls one of the two what the other is called elsewhere.
            "mlp" if name.contains("post_ln") => return Vec::new(),
            "mlp" if name.contains("ffn_up") => name = name.replace("ffn_up", "ffn_down"),
            "mlp" => name = name.replace("ffn_down", "ffn_up").replace("class_embd.weight", "class_embd"),
            "pixtral" => name = name.replace("mm.0", "mm.1"),
            "gemma3" if name == "mm.soft_emb_norm.weight" => {
                return vec![(name, (tensor.0.clone(), tensor.1.iter().map(|value| value + 1.0).collect()))];
            }
            "qwen3vl_merger" if name.starts_with("v.deepstack.") => {
                let (number, rest) = name["v.deepstack.".len()..].split_once('.').unwrap();
                let layer = &self.config["vision_config"]["deepstack_visual_indexes"][number.parse::<usize>().unwrap()];
                name = format!("v.deepstack.{layer}.{rest}");
            }
            _ => {}
        }
        if self.projector() == "pixtral" && (name.contains("attn_q.") || name.contains("attn_k.")) {
            return vec![(name, paired(tensor, self.vision_size(["num_attention_heads"; 3]) as usize))];
        }
        let (shape, values) = tensor;
        if name == "v.patch_embd.weight" && shape.len() == 5 {
            return frames(shape, values);
        }
        if name.contains("attn_qkv") && self.projector() != "qwen3vl_merger" {
            let part = values.len() / 3;
            let shape = [&[shape[0] / 3], &shape[1..]].concat();
            let of = |i: usize, letter: &str| {
                (name.replace("attn_qkv", &format!("attn_{letter}")), (shape.clone(), values[i * part..(i + 1) * part].to_vec()))
            };
            return vec![of(0, "q"), of(1, "k"), of(2, "v")];
        }
        vec![(name, tensor.clone())]
    }
}

/// A convolution over two frames as two over one.
pub fn frames(shape: &[usize], values: &[f32]) -> Vec<(String, Tensor)> {
    let area = shape[3] * shape[4];
    let of = |frame: usize| {
        let chunks = values.chunks_exact(2 * area);
        let values = chunks.flat_map(|both| &both[frame * area..(frame + 1) * area]).copied().collect();
        (vec![shape[0], shape[1], shape[3], shape[4]], values)
    };
    vec![("v.patch_embd.weight".into(), of(0)), ("v.patch_embd.weight.1".into(), of(1))]
}

/// Of each expert of `[experts, 2 * rows, cols]` the first half of the rows, or the second.
fn half_of_rows((shape, values): &Tensor, part: usize) -> Tensor {
    let half = shape[1] / 2 * shape[2];
    let values = values.chunks_exact(2 * half).flat_map(|expert| &expert[part * half..(part + 1) * half]).copied().collect();
    (vec![shape[0], shape[1] / 2, shape[2]], values)
}

fn language_name(name: &str, arch: &str) -> Option<String> {
    let prefixes = ["language_model.model.", "model.text_model.", "model.language_model.", "language_model.", "model."];
    let rest = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    let is_language = ["layers.", "embed_tokens", "norm", "lm_head"].iter().any(|part| rest.starts_with(part));
    if !is_language {
        return None;
    }
    let name = format!("^{rest}");
    let name = if arch == "gemma3" { name.replace("post_attention_layernorm", "post_attention_norm") } else { name };
    Some(renamed(&name, &LANGUAGE))
}

pub fn add(gguf: Gguf, name: &str, (shape, values): &Tensor) -> Gguf {
    let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    gguf.weight(name, &dims, GGML_F32, &bytes)
}
