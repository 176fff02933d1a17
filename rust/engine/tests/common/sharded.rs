//! A golden model's folder with its weights in two files and an index.

use std::{collections::HashMap, path::Path};

use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Map, Value, json};

pub fn write(golden: &Path, dir: &Path) {
    std::fs::copy(golden.join("config.json"), dir.join("config.json")).unwrap();
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<_> = tensors.names().into_iter().map(String::from).collect();
    names.sort();
    let mut weight_map = Map::new();
    for (i, half) in names.chunks(names.len().div_ceil(2)).enumerate() {
        let file = format!("model-{:05}-of-00002.safetensors", i + 1);
        let views = half.iter().map(|name| (name, tensors.tensor(name).unwrap()));
        serialize_to_file(views, None::<HashMap<_, _>>, &dir.join(&file)).unwrap();
        weight_map.extend(half.iter().map(|name| (name.clone(), Value::from(file.clone()))));
    }
    let index = json!({"metadata": {"total_size": bytes.len()}, "weight_map": weight_map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
