//! Checkpoints with a head that predicts further tokens, made of the tiny models of the goldens, and what such a head guesses, by
//! a plain forward pass without cache, batches or kernels.

#![allow(dead_code, missing_docs)]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use half::bf16;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

/// Families whose heads are computed, by their goldens.
pub const FAMILIES: [&str; 4] = ["glm4-moe", "deepseek-v3", "glm4-moe-lite", "qwen3-next"];

pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A model whose layers add little to a token's embedding, so that a head guesses it right more often than not.
pub struct Checkpoint {
    pub path: PathBuf,
    /// By the names that most families have for them.
    pub tensors: Tensors,
    pub config: Value,
    _dir: tempfile::TempDir,
}

/// From 0 up to 1, the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    /// So many values, evenly spread up to this.
    fn values(&mut self, len: usize, most: f32) -> Vec<f32> {
        (0..len).map(|_| (self.next() - 0.5) * 2.0 * most).collect()
    }
}

fn floats(view: &TensorView<'_>) -> Vec<f32> {
    match view.dtype() {
        Dtype::F32 => view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        Dtype::BF16 => view.data().chunks_exact(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect(),
        other => panic!("{other:?} in a golden"),
    }
}

/// The golden of that name with one head more; without its weights if it has none.
pub fn checkpoint(model: &str, has_weights: bool) -> Checkpoint {
    checkpoint_of(model, has_weights, 1.0)
}

/// The same, whose head takes so many times as much of the hidden states.
pub fn checkpoint_of(model: &str, has_weights: bool, of_states: f32) -> Checkpoint {
    let golden = goldens::dir().join("text").join(model);
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let mut tensors: Tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.shape().to_vec(), floats(&view))))
        .collect();
    for (name, (_, values)) in &mut tensors {
        if ["o_proj", "out_proj", "down_proj"].iter().any(|part| name.contains(part)) {
            for value in values.iter_mut() {
                *value *= 0.02;
            }
        }
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    // Qwen3-Next has no key for it.
    if model != "qwen3-next" {
        config["num_nextn_predict_layers"] = 1.into();
    }
    if has_weights {
        add_head(&mut tensors, &config, of_states);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(model);
    std::fs::create_dir(&path).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(golden.join(file), path.join(file)).unwrap();
    }
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let stored = tensors.iter().map(|(name, tensor)| (stored_name(name, &config), tensor.clone())).collect();
    save(&stored, &path.join("model.safetensors"));
    Checkpoint { path, tensors, config, _dir: dir }
}

/// What the family calls a tensor.
fn stored_name(name: &str, config: &Value) -> String {
    let head = format!("model.layers.{}.", config["num_hidden_layers"]);
    match name.strip_prefix(&head).filter(|_| config["model_type"] == "qwen3_next") {
        None => name.to_owned(),
        Some("enorm.weight") => "mtp.pre_fc_norm_embedding.weight".to_owned(),
        Some("hnorm.weight") => "mtp.pre_fc_norm_hidden.weight".to_owned(),
        Some("eh_proj.weight") => "mtp.fc.weight".to_owned(),
        Some("shared_head.norm.weight") => "mtp.norm.weight".to_owned(),
        Some(rest) => format!("mtp.layers.0.{rest}"),
    }
}

fn save(tensors: &Tensors, path: &Path) {
    let bytes: BTreeMap<_, Vec<u8>> =
        tensors.iter().map(|(name, (_, values))| (name, values.iter().flat_map(|v| v.to_le_bytes()).collect())).collect();
    let views = tensors
        .iter()
        .map(|(name, (shape, _))| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), &bytes[name]).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A layer like the last, with other values, which mostly passes on the embedding and mixes some of the hidden state in.
fn add_head(tensors: &mut Tensors, config: &Value, of_states: f32) {
    let mut random = Random(7);
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    let hidden = config["hidden_size"].as_u64().unwrap() as usize;
    let [last, head] = [layers - 1, layers].map(|layer| format!("model.layers.{layer}."));
    let mut added = Tensors::new();
    for (name, (shape, values)) in tensors.iter().filter(|(name, _)| name.starts_with(&last)) {
        let noise = random.values(values.len(), 0.02);
        let values = values.iter().rev().zip(noise).map(|(value, noise)| value + noise).collect();
        added.insert(name.replacen(&last, &head, 1), (shape.clone(), values));
    }
    for norm in ["enorm", "hnorm", "shared_head.norm"] {
        let weight = random.values(hidden, 0.2).iter().map(|x| 1.0 + x).collect();
        added.insert(format!("{head}{norm}.weight"), (vec![hidden], weight));
    }
    let mut both = random.values(2 * hidden * hidden, 0.03);
    for row in 0..hidden {
        let row_of_both = &mut both[row * 2 * hidden..][..2 * hidden];
        row_of_both[row] += 1.0;
        for value in &mut row_of_both[hidden..] {
            *value *= of_states;
        }
    }
    added.insert(format!("{head}eh_proj.weight"), (vec![hidden, 2 * hidden], both));
    tensors.extend(added);
}

/// A head, as plainly as it can be written down.
pub struct Oracle<'a> {
    tensors: &'a Tensors,
    config: &'a Value,
    layer: String,
}

/// What a position leaves behind: keys and values of each head.
type Kept = Vec<(Vec<f64>, Vec<f64>)>;

fn rms(x: &[f64], weight: &[f32], eps: f64, offset: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * (offset + f64::from(*w))).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Indices, the largest value first.
fn by_value(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn argmax(values: &[f64]) -> usize {
    values.iter().enumerate().fold(0, |best, (i, value)| if *value > values[best] { i } else { best })
}

impl<'a> Oracle<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        let layer = format!("model.layers.{}.", checkpoint.config["num_hidden_layers"]);
        Self { tensors: &checkpoint.tensors, config: &checkpoint.config, layer }
    }

    fn number(&self, key: &str) -> f64 {
        self.config[key].as_f64().unwrap_or_else(|| panic!("no {key}"))
    }

    fn size(&self, key: &str) -> usize {
        self.number(key) as usize
    }

    fn tensor(&self, name: &str) -> &[f32] {
        let full = format!("{}{name}", self.layer);
        &self.tensors.get(&full).or_else(|| self.tensors.get(name)).unwrap_or_else(|| panic!("no {name}")).1
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let offset = if self.is_qwen() { 1.0 } else { 0.0 };
        rms(x, self.tensor(&format!("{name}.weight")), self.number("rms_norm_eps"), offset)
    }

    /// Attention has gates, norms add 1, and experts are weighed by a softmax.
    fn is_qwen(&self) -> bool {
        self.config["model_type"] == "qwen3_next"
    }

    /// With its bias, where there is one.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.tensor(&format!("{name}.weight"));
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        let mut out: Vec<f64> = weight.chunks_exact(x.len()).map(dot).collect();
        if let Some((_, bias)) = self.tensors.get(&format!("{}{name}.bias", self.layer)) {
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += f64::from(*bias));
        }
        out
    }

    /// The first `dim` elements, in pairs of neighbours or of the two halves.
    fn rotate(&self, x: &mut [f64], dim: usize, position: usize, neighbours: bool) {
        for i in 0..dim / 2 {
            let angle = position as f64 * self.number("rope_theta").powf(-2.0 * i as f64 / dim as f64);
            let (a, b) = if neighbours { (2 * i, 2 * i + 1) } else { (i, i + dim / 2) };
            (x[a], x[b]) = (x[a] * angle.cos() - x[b] * angle.sin(), x[b] * angle.cos() + x[a] * angle.sin());
        }
    }

    /// Queries, and what the position leaves behind, of each head. Behind each head's queries may be its gate.
    fn project(&self, x: &[f64], position: usize) -> (Vec<Vec<f64>>, Kept) {
        let heads = self.size("num_attention_heads");
        if self.config.get("kv_lora_rank").is_none() {
            let dim = self.size("head_dim");
            let rotary = (dim as f64 * self.number("partial_rotary_factor")) as usize;
            let normed = |name: &str, norm: &str, with_gate: bool| {
                let all = self.linear(name, x);
                all.chunks_exact(if with_gate { 2 * dim } else { dim })
                    .map(|both| {
                        let mut head = self.norm(norm, &both[..dim]);
                        self.rotate(&mut head, rotary, position, false);
                        [&head, &both[dim..]].concat()
                    })
                    .collect::<Vec<_>>()
            };
            let q = normed("self_attn.q_proj", "self_attn.q_norm", self.is_qwen());
            let k = normed("self_attn.k_proj", "self_attn.k_norm", false);
            let v = self.linear("self_attn.v_proj", x);
            let of = |head: usize| head * k.len() / heads;
            let kept = (0..heads).map(|head| (k[of(head)].clone(), v[of(head) * dim..][..dim].to_vec())).collect();
            return (q, kept);
        }
        let [rank, nope, rope, v_dim] =
            ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"].map(|k| self.size(k));
        let latent = |name: &str, x: &[f64]| rms(x, self.tensor(&format!("{name}.weight")), 1e-6, 0.0);
        let q = self.linear("self_attn.q_b_proj", &latent("self_attn.q_a_layernorm", &self.linear("self_attn.q_a_proj", x)));
        let mut q: Vec<Vec<f64>> = q.chunks_exact(nope + rope).map(<[f64]>::to_vec).collect();
        for head in &mut q {
            self.rotate(&mut head[nope..], rope, position, true);
        }
        let mut down = self.linear("self_attn.kv_a_proj_with_mqa", x);
        self.rotate(&mut down[rank..], rope, position, true);
        let up = self.linear("self_attn.kv_b_proj", &latent("self_attn.kv_a_layernorm", &down[..rank]));
        let of = |head: &[f64]| ([&head[..nope], &down[rank..]].concat(), head[nope..].to_vec());
        (q, up.chunks_exact(nope + v_dim).map(of).collect())
    }

    fn attend(&self, q: &[Vec<f64>], kept: &[Kept]) -> Vec<f64> {
        let mut out = Vec::new();
        for (head, both) in q.iter().enumerate() {
            let (q, gate) = both.split_at(kept[0][head].0.len());
            let score = |kept: &Kept| q.iter().zip(&kept[head].0).map(|(q, k)| q * k).sum::<f64>() / (q.len() as f64).sqrt();
            let weights: Vec<f64> = kept.iter().map(|kept| score(kept).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..kept[0][head].1.len() {
                let mixed: f64 = kept.iter().zip(&weights).map(|(kept, weight)| kept[head].1[i] * weight / sum).sum();
                out.push(gate.get(i).map_or(mixed, |gate| mixed * sigmoid(*gate)));
            }
        }
        self.linear("self_attn.o_proj", &out)
    }

    fn gated(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let [gate, up] = ["gate_proj", "up_proj"].map(|part| self.linear(&format!("{name}.{part}"), x));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up).collect();
        self.linear(&format!("{name}.down_proj"), &inner)
    }

    fn experts(&self, x: &[f64]) -> Vec<f64> {
        if self.is_qwen() {
            let scores: Vec<f64> = self.linear("mlp.gate", x).iter().map(|x| x.exp()).collect();
            let shared = sigmoid(self.linear("mlp.shared_expert_gate", x)[0]);
            let out = self.gated("mlp.shared_expert", x).iter().map(|value| value * shared).collect();
            return self.add_experts(out, x, &scores, &by_value(&scores)[..self.size("num_experts_per_tok")], 1.0);
        }
        let scores: Vec<f64> = self.linear("mlp.gate", x).iter().map(|x| sigmoid(*x)).collect();
        let correction = self.tensor("mlp.gate.e_score_correction_bias");
        let corrected: Vec<f64> = scores.iter().zip(correction).map(|(score, c)| score + f64::from(*c)).collect();
        let (num_groups, per_group) = (self.size("n_group"), scores.len() / self.size("n_group"));
        let two_best = |group: usize| {
            let values = &corrected[group * per_group..][..per_group];
            by_value(values).iter().take(2).map(|i| values[*i]).sum::<f64>()
        };
        let groups = by_value(&(0..num_groups).map(two_best).collect::<Vec<_>>());
        let is_open = |expert: usize| groups[..self.size("topk_group")].contains(&(expert / per_group));
        let open: Vec<f64> = corrected.iter().enumerate().map(|(i, c)| if is_open(i) { *c } else { f64::MIN }).collect();
        let chosen = &by_value(&open)[..self.size("num_experts_per_tok")];
        self.add_experts(self.gated("mlp.shared_experts", x), x, &scores, chosen, self.number("routed_scaling_factor"))
    }

    /// Adds what these experts make of x, weighed by their part of the scores.
    fn add_experts(&self, mut out: Vec<f64>, x: &[f64], scores: &[f64], chosen: &[usize], scale: f64) -> Vec<f64> {
        let sum: f64 = chosen.iter().map(|i| scores[*i]).sum();
        for expert in chosen {
            let weight = scores[*expert] / sum * scale;
            let own = self.gated(&format!("mlp.experts.{expert}"), x);
            out.iter_mut().zip(own).for_each(|(out, own)| *out += own * weight);
        }
        out
    }

    /// The normalized output of a position, whose token follows one with this hidden state.
    fn run(&self, token: u32, before: &[f64], position: usize, kept: &mut Vec<Kept>) -> Vec<f64> {
        let hidden = before.len();
        let embedding = &self.tensor("model.embed_tokens.weight")[token as usize * hidden..][..hidden];
        let embedding: Vec<f64> = embedding.iter().map(|x| f64::from(*x)).collect();
        let mut x = self.linear("eh_proj", &[self.norm("enorm", &embedding), self.norm("hnorm", before)].concat());
        let (q, own) = self.project(&self.norm("input_layernorm", &x), position);
        kept.push(own);
        let attended = self.attend(&q, kept);
        x.iter_mut().zip(attended).for_each(|(x, y)| *x += y);
        let fed = self.experts(&self.norm("post_attention_layernorm", &x));
        x.iter_mut().zip(fed).for_each(|(x, y)| *x += y);
        self.norm("shared_head.norm", &x)
    }

    /// What it guesses behind these tokens, with the hidden states of all but the last, `None` where they are not known.
    pub fn guess(&self, tokens: &[u32], states: &[Option<Vec<f32>>], num_drafts: usize) -> Vec<u32> {
        let zeros = vec![0.0; self.size("hidden_size")];
        let (mut kept, mut out) = (Vec::new(), Vec::new());
        for (position, token) in tokens.iter().enumerate() {
            let state = position.checked_sub(1).and_then(|before| states[before].as_ref());
            let before = state.map_or_else(|| zeros.clone(), |state| state.iter().map(|x| f64::from(*x)).collect());
            out = self.run(*token, &before, position, &mut kept);
        }
        let head = self.tensor("lm_head.weight");
        let mut drafts = Vec::new();
        loop {
            let dot = |row: &[f32]| row.iter().zip(&out).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            drafts.push(argmax(&head.chunks_exact(out.len()).map(dot).collect::<Vec<_>>()) as u32);
            if drafts.len() == num_drafts {
                return drafts;
            }
            out = self.run(drafts[drafts.len() - 1], &out, tokens.len() + drafts.len() - 1, &mut kept);
        }
    }
}
