//! Families that differ from others in names, keys and the order of rows alone: the goldens of those others, written as theirs.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use device::{
    KvDType, Precision,
    cpu::{CpuBackend, Isa},
};
use engine::ModelSource;
use half::bf16;
use safetensors::{
    SafeTensors,
    tensor::{Dtype, TensorView, serialize},
};
use serde_json::{Value, json};

use crate::common::{
    cases::{EXACT, cases_of, check_cases},
    drawn, golden_dir, load,
};

/// Shapes and values.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(file: &Path) -> Tensors {
    let bytes = std::fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let values = |tensor: &TensorView<'_>| match tensor.dtype() {
        Dtype::F32 => tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::BF16 => tensor.data().as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        other => panic!("{other:?}"),
    };
    file.tensors().into_iter().map(|(name, tensor)| (name, (tensor.shape().to_vec(), values(&tensor)))).collect()
}

fn write(tensors: &Tensors, file: &Path) {
    let bytes: BTreeMap<_, Vec<u8>> =
        tensors.iter().map(|(name, (_, values))| (name, values.iter().flat_map(|v| v.to_le_bytes()).collect())).collect();
    let views =
        tensors.iter().map(|(name, (shape, _))| (name, TensorView::new(Dtype::F32, shape.clone(), &bytes[name]).unwrap()));
    std::fs::write(file, serialize(views, None).unwrap()).unwrap();
}

/// Checks that the model of a golden computes the same once its configuration has these keys and its tensors are changed so.
fn agrees(golden: &str, keys: &Value, change: impl Fn(Tensors) -> Tensors) {
    let (kind, name) = golden.split_once('/').unwrap();
    let folder = golden_dir().join(golden);
    let (drawn, source) = if kind == "drawn" {
        drawn::model(name)
    } else {
        let copy = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(folder.join(file), copy.path().join(file)).unwrap();
        }
        let path = copy.path().to_owned();
        (copy, ModelSource::HuggingFace { path, tokenizer_json: None })
    };
    let file = drawn.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(&file, config.to_string()).unwrap();
    let file = drawn.path().join("model.safetensors");
    write(&change(tensors(&file)), &file);
    let mut runner = load(&source, Arc::new(CpuBackend::new(Isa::detect(), 2).unwrap()), Precision::Exact, KvDType::F32);
    let model_type = keys["model_type"].as_str().unwrap();
    check_cases(&mut runner, &format!("{golden} as {model_type}"), cases_of(&folder.join("golden.json")), 17, EXACT);
}

fn renamed(tensors: Tensors, names: &[(&str, &str)]) -> Tensors {
    let rename = |name: String| names.iter().fold(name, |name, (from, to)| name.replace(from, to));
    tensors.into_iter().map(|(name, tensor)| (rename(name), tensor)).collect()
}

/// Makes one matrix of q, k and v: the rows of each of so many groups of heads, one group after the other.
fn fused(mut tensors: Tensors, num_groups: usize, name: &str) -> Tensors {
    let first: Vec<_> = tensors.keys().filter(|name| name.ends_with("q_proj.weight")).cloned().collect();
    for q in first {
        let parts = ["q_proj", "k_proj", "v_proj"].map(|part| tensors.remove(&q.replace("q_proj", part)).unwrap());
        let rows = parts.iter().map(|(shape, _)| shape[0]).sum();
        let of_group = |group: usize| {
            parts.iter().flat_map(move |(_, values)| values.chunks_exact(values.len() / num_groups).nth(group).unwrap()).copied()
        };
        let values = (0..num_groups).flat_map(of_group).collect();
        let columns = parts[0].0[1];
        tensors.insert(q.replace("self_attn.q_proj", name), (vec![rows, columns], values));
    }
    tensors
}

#[test]
fn internlm2_is_a_llama_whose_queries_keys_and_values_lie_by_key_head() {
    agrees("drawn/iquestcoder", &json!({"model_type": "internlm2", "bias": false}), |tensors| {
        let names = [
            ("embed_tokens", "tok_embeddings"),
            ("lm_head", "output"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.o_proj", "attention.wo"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
        ];
        renamed(fused(tensors, 2, "attention.wqkv"), &names)
    });
}

#[test]
fn xverse_is_a_llama() {
    agrees("drawn/iquestcoder", &json!({"model_type": "xverse"}), |tensors| tensors);
}

#[test]
fn orion_is_a_stablelm_with_another_key_of_the_epsilon() {
    let keys = json!({"model_type": "orion", "rms_norm_eps": 1e-5, "layer_norm_eps": null, "use_qkv_bias": null});
    agrees("text/stablelm", &keys, |tensors| tensors);
}

/// With attention as ever: the granite's has another scale, which goes into its queries.
#[test]
fn minicpm_is_a_granite_with_other_keys() {
    let keys = json!({
        "model_type": "minicpm", "scale_emb": 4, "scale_depth": 0.5 * 3.0_f64.sqrt(), "dim_model_base": 32,
        "attention_multiplier": null, "embedding_multiplier": null, "residual_multiplier": null, "logits_scaling": null,
    });
    agrees("text/granite", &keys, |mut tensors| {
        for (_, (_, values)) in tensors.iter_mut().filter(|(name, _)| name.contains("q_proj")) {
            for value in values {
                *value *= 0.2 / 0.25;
            }
        }
        tensors
    });
}

/// As the first ones on the hub: without what stands before all names, and with masks among the weights.
#[test]
fn gpt2_may_lie_by_itself_with_its_masks() {
    agrees("drawn/gpt2", &json!({"model_type": "gpt2"}), |tensors| {
        let mut tensors = renamed(tensors, &[("transformer.", "")]);
        for layer in 0..3 {
            tensors.insert(format!("h.{layer}.attn.bias"), (vec![1, 1, 2, 2], vec![1.0, 0.0, 1.0, 1.0]));
            tensors.insert(format!("h.{layer}.attn.masked_bias"), (vec![1], vec![-1e4]));
        }
        tensors
    });
}

#[test]
fn opt_may_lie_by_itself() {
    agrees("drawn/opt", &json!({"model_type": "opt"}), |tensors| renamed(tensors, &[("model.decoder.", "decoder.")]));
}

#[test]
fn kimi_k2_is_a_deepseek_v3() {
    agrees("text/deepseek-v3", &json!({"model_type": "kimi_k2"}), |tensors| tensors);
}

#[test]
fn the_first_ling_chooses_experts_as_qwen3_does() {
    let keys = json!({
        "model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"], "num_experts": 8, "num_shared_experts": 0,
        "num_local_experts": null, "use_qk_norm": true, "decoder_sparse_step": null, "mlp_only_layers": null,
    });
    agrees("text/qwen3-moe", &keys, |tensors| {
        let names = [
            ("embed_tokens", "word_embeddings"),
            ("self_attn.o_proj", "attention.dense"),
            ("self_attn.q_norm", "attention.query_layernorm"),
            ("self_attn.k_norm", "attention.key_layernorm"),
        ];
        renamed(fused(tensors, 1, "attention.query_key_value"), &names)
    });
}

#[test]
fn ling_2_is_a_sarvam_by_another_name() {
    for (model_type, classes) in [("bailing_moe", json!(["BailingMoeV2ForCausalLM"])), ("bailing_moe_v2", Value::Null)] {
        let keys = json!({"model_type": model_type, "architectures": classes, "partial_rotary_factor": 1.0});
        agrees("drawn/sarvam_moe", &keys, |tensors| tensors);
    }
}
