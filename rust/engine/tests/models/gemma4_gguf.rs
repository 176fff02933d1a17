//! GGUF files of Gemma 4 and Gemma 3n, as llama.cpp's converter names what is in them, against the goldens of the same weights.

use std::{path::Path, sync::Arc};

use device::{
    KvDType, Precision,
    cpu::{CpuBackend, Isa},
};
use engine::ModelSource;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::common::{
    MAX_TOKENS,
    cases::{EXACT, cases_of, check_cases},
    drawn,
    gemma4::{gguf_name, metadata},
    gguf_writer::{Gguf, STRING, U32, string},
    golden_dir, load,
};

const F32: u32 = 6;
const I32: u32 = 5;
const BOOL: u32 = 7;
/// Of tensors.
const FLOATS: u32 = 0;

/// Of each residual stream but the first, one after the other in a file of GGUF.
const STACKED: [(&str, &str); 2] =
    [("model.altup_projections.", "altup_proj.weight"), ("model.altup_unembed_projections.", "altup_unembd_proj.weight")];

fn gemma3n_metadata(config: &Value) -> Gguf {
    let size = |key: &str| config[key].as_u64().unwrap() as u32;
    let list = |key: &str| config[key].as_array().unwrap().clone();
    let count = u64::from(size("num_hidden_layers"));
    let mut file = Gguf::new().entry("general.architecture", STRING, &string("gemma3n"));
    for (key, value) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("attention.sliding_window", "sliding_window"),
        ("attention.shared_kv_layers", "num_kv_shared_layers"),
        ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        ("altup.active_idx", "altup_active_idx"),
        ("altup.num_inputs", "altup_num_inputs"),
    ] {
        file = file.entry(&format!("gemma3n.{key}"), U32, &size(value).to_le_bytes());
    }
    for (key, value) in [("attention.layer_norm_rms_epsilon", 1e-6_f32), ("rope.freq_base", 1e6)] {
        file = file.entry(&format!("gemma3n.{key}"), F32, &value.to_le_bytes());
    }
    let widths = list("intermediate_size").into_iter().flat_map(|width| (width.as_u64().unwrap() as u32).to_le_bytes());
    let is_sliding = list("layer_types").into_iter().map(|kind| u8::from(kind == "sliding_attention"));
    // As `torch.distributions.Normal(0, 1).icdf` has them.
    let cutoffs = list("activation_sparsity_pattern").into_iter().flat_map(|part| match part.as_f64().unwrap() {
        0.0 => f32::NEG_INFINITY.to_le_bytes(),
        0.4 => (-0.253_347_1_f32).to_le_bytes(),
        0.9 => 1.281_551_6_f32.to_le_bytes(),
        other => panic!("no quantile of {other}"),
    });
    file.array("gemma3n.feed_forward_length", I32, count, &widths.collect::<Vec<_>>())
        .array("gemma3n.attention.sliding_window_pattern", BOOL, count, &is_sliding.collect::<Vec<_>>())
        .array("gemma3n.activation_sparsity_scale", F32, count, &cutoffs.collect::<Vec<_>>())
}

fn write(name: &str, path: &Path) {
    let (folder, _) = drawn::model(name);
    let read = |file: &str| std::fs::read(folder.path().join(file)).unwrap();
    let config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    let mut file = if name == "gemma3n" { gemma3n_metadata(&config) } else { metadata(&config) };
    let bytes = read("model.safetensors");
    let mut tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let dims = |shape: &[usize]| shape.iter().rev().map(|n| *n as u64).collect::<Vec<_>>();
    for (first, there) in STACKED {
        let (all, others): (Vec<_>, Vec<_>) = tensors.into_iter().partition(|(name, _)| name.starts_with(first));
        tensors = others;
        let Some((_, view)) = all.first() else { continue };
        let data: Vec<u8> = all.iter().flat_map(|(_, view)| view.data()).copied().collect();
        file = file.weight(there, &[&dims(view.shape())[..], &[all.len() as u64]].concat(), FLOATS, &data);
    }
    for (name, view) in tensors {
        file = file.weight(&gguf_name(&name), &dims(view.shape()), FLOATS, view.data());
    }
    file.write(path);
}

#[test]
fn gguf_files_of_gemma_agree_with_goldens() {
    for name in ["gemma3n", "gemma4", "gemma4-moe"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        write(name, &path);
        let source = ModelSource::Gguf { files: vec![path], tokenizer_dir: None, tokenizer_json: None };
        let backend = Arc::new(CpuBackend::new(Isa::detect(), 2).unwrap());
        let mut runner = load(&source, backend, Precision::Exact, KvDType::F32);
        check_cases(&mut runner, name, cases_of(&golden_dir().join("drawn").join(name).join("golden.json")), MAX_TOKENS, EXACT);
    }
}
