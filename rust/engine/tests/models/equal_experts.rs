//! A dense model written as a mixture of equal experts: whatever a router chooses, the answers must be those of the dense one.

use std::{collections::HashMap, path::Path, sync::Arc};

use device::{
    KvDType, Precision,
    cpu::{CpuBackend, Isa},
};
use engine::ModelSource;
use safetensors::{Dtype, SafeTensors, serialize_to_file, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{self, Harness, hugging_face, load};

const NUM_EXPERTS: usize = 3;

/// The golden llama as a Mixtral, so many experts a token; the router's weights are those of the first rows of the output.
fn mixture(dir: &Path, num_chosen: usize) -> ModelSource {
    let golden = common::golden_dir().join("text/llama");
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    let changes = json!({"model_type": "mixtral", "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": num_chosen});
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    for key in ["architectures", "mlp_bias", "attention_bias"] {
        config.as_object_mut().unwrap().remove(key);
    }
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(golden.join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let hidden = config["hidden_size"].as_u64().unwrap() as usize;
    let router = &tensors.tensor("lm_head.weight").unwrap().data()[..NUM_EXPERTS * hidden * 2];
    let mut written = Vec::new();
    for (name, tensor) in tensors.tensors() {
        let view = |shape: &[usize], data| TensorView::new(Dtype::BF16, shape.to_vec(), data).unwrap();
        let parts = [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")];
        match parts.iter().find_map(|(part, expert)| Some((name.strip_suffix(&format!("mlp.{part}.weight"))?, expert))) {
            None => {
                written
                    .push((name.clone(), view(tensor.shape(), &bytes[offset(&bytes, tensor.data())..][..tensor.data().len()])));
            }
            Some((layer, part)) => {
                let data = &bytes[offset(&bytes, tensor.data())..][..tensor.data().len()];
                for expert in 0..NUM_EXPERTS {
                    let name = format!("{layer}block_sparse_moe.experts.{expert}.{part}.weight");
                    written.push((name, view(tensor.shape(), data)));
                }
                if *part == "w1" {
                    written.push((format!("{layer}block_sparse_moe.gate.weight"), view(&[NUM_EXPERTS, hidden], router)));
                }
            }
        }
    }
    serialize_to_file(written, None::<HashMap<_, _>>, &dir.join("model.safetensors")).unwrap();
    ModelSource::HuggingFace { path: dir.to_owned(), tokenizer_json: None }
}

/// Where a part lies within all.
fn offset(all: &[u8], part: &[u8]) -> usize {
    part.as_ptr() as usize - all.as_ptr() as usize
}

fn logits(source: &ModelSource, precision: Precision) -> Vec<Vec<f32>> {
    let backend = Arc::new(CpuBackend::new(Isa::detect(), 2).unwrap());
    let mut runner = load(source, backend, precision, KvDType::F32);
    let mut harness = Harness::new(&mut runner, 16);
    let sequence = harness.add((0..80).map(|i| (i * 37) % 500 + 8).collect(), 80);
    harness.finish(sequence, 33)
}

#[test]
fn one_of_equal_experts_gives_the_bits_of_the_dense_model_and_two_nearly() {
    for precision in [Precision::Exact, Precision::Deterministic] {
        let dense = logits(&hugging_face("llama"), precision);
        let dir = TempDir::new().unwrap();
        assert!(logits(&mixture(dir.path(), 1), precision) == dense, "{precision:?}, one expert a token");
        let dir = TempDir::new().unwrap();
        for (got, want) in logits(&mixture(dir.path(), 2), precision).concat().iter().zip(dense.concat()) {
            assert!((got - want).abs() <= 1e-4 * (1.0 + want.abs()), "{precision:?}, two experts a token: {got}, not {want}");
        }
    }
}
