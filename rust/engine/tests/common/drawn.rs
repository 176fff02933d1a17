//! Weights that lie nowhere: each is drawn from its name. tests/drawn.py draws the same for the reference.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Mutex,
};

use engine::ModelSource;
use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::common::golden_dir;

/// Numbers that a name decides: `SplitMix64` (Steele et al. 2014) from the FNV-1a hash of the name on, from -1/2 to 1/2.
pub fn drawn(name: &str, len: usize) -> impl Iterator<Item = f32> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    (1..=len as u64).map(move |i| {
        let mut z = hash.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32 - 0.5
    })
}

/// Writes `folder/model.safetensors`, in float32, with the tensors of a file of names and shapes. `value` makes a value of a
/// tensor of what was drawn for it.
pub fn write_weights(shapes: &Path, folder: &Path, value: impl Fn(&str, &[usize], f32) -> f32) {
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_slice(&std::fs::read(shapes).unwrap()).unwrap();
    let values: BTreeMap<_, Vec<u8>> = shapes
        .iter()
        .map(|(name, shape)| {
            let values = drawn(name, shape.iter().product()).map(|u| value(name, shape, u));
            (name, values.flat_map(f32::to_le_bytes).collect())
        })
        .collect();
    let views = shapes.iter().map(|(name, shape)| (name, TensorView::new(Dtype::F32, shape.clone(), &values[name]).unwrap()));
    std::fs::write(folder.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
}

/// A value of a language model's weight, of a size that gives every part an effect: norms and scales lie around 1, matrices
/// keep the size of what they multiply, routers choose clearly. What bfloat16 does not hold is cut off.
pub fn text_value(name: &str, shape: &[usize], u: f32) -> f32 {
    let value = match shape {
        _ if name.contains("scal") || name.contains("norm") && name.ends_with("weight") => 1.0 + 0.5 * u,
        [] | [_] => 0.5 * u,
        _ if name.contains("embed") => 2.0 * u,
        [.., inputs] => {
            let is_router = name.contains("router") || name.ends_with("gate.weight");
            let gain = if is_router { 8.0 } else { 4.0 };
            gain / (*inputs as f32).sqrt() * u
        }
    };
    f32::from_bits(value.to_bits() & 0xffff_0000)
}

/// The same of a model that sees.
pub fn vision_value(name: &str, shape: &[usize], u: f32) -> f32 {
    match shape {
        // Bounds that some values are beyond.
        _ if name.ends_with("_max") => 1.5 + u,
        _ if name.ends_with("_min") => -1.5 - u,
        _ if name.contains("scal") => 1.0 + 0.5 * u,
        _ if name.contains("norm") && name.ends_with("weight") => 1.0 + 0.5 * u,
        // Gates.
        [1] => 2.0 * u,
        [_] => 0.25 * u,
        _ => 0.5 * u,
    }
}

/// The folder of a tiny model that sees. Where its golden has no weights, they are drawn beside it, and what a model needs
/// besides is that of another.
pub fn seeing(name: &str) -> PathBuf {
    let lent = ["tokenizer.json", "tokenizer_config.json", "image0.png", "image1.png"];
    with_weights(golden_dir().join("vision").join(name), &lent, vision_value)
}

/// The same of one that hears, which lacks its weights alone.
pub fn hearing(name: &str) -> PathBuf {
    with_weights(golden_dir().join("hearing").join(name), &[], vision_value)
}

/// The same of an encoder.
pub fn encoder(name: &str) -> PathBuf {
    with_weights(golden_dir().join("encoders").join(name), &[], |name, shape, u| text_value(&name.to_lowercase(), shape, u))
}

/// Samples of a sound: a tone that its name decides, and noise. tests/drawn_sounds.py has the same.
pub fn sound(name: &str, len: usize) -> Vec<f32> {
    let noise: Vec<_> = drawn(&format!("sound {name}"), len).collect();
    let pitch = f64::from(0.02_f32 + 0.1_f32 * noise[0].abs());
    let level = |(at, noise): (usize, &f32)| (at as f64 * pitch).sin() * 9000.0 + f64::from(*noise) * 6000.0;
    noise.iter().enumerate().map(|at| level(at).floor() as f32 / 32768.0).collect()
}

fn with_weights(folder: PathBuf, lent: &[&str], value: impl Fn(&str, &[usize], f32) -> f32) -> PathBuf {
    static DRAWN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let shapes = folder.join("tensors.json");
    let mut drawn = DRAWN.lock().unwrap();
    if !shapes.exists() || !drawn.insert(folder.clone()) {
        return folder;
    }
    // Other tests may be reading: a file appears whole, and stays if it is what it would be.
    let fresh = tempfile::tempdir_in(golden_dir()).unwrap();
    for file in lent {
        if !folder.join(file).exists() {
            std::fs::copy(golden_dir().join("vision/qwen3_vl").join(file), fresh.path().join(file)).unwrap();
        }
    }
    write_weights(&shapes, fresh.path(), value);
    for entry in std::fs::read_dir(fresh.path()).unwrap() {
        let entry = entry.unwrap();
        let place = folder.join(entry.file_name());
        if std::fs::read(&place).ok() != Some(std::fs::read(entry.path()).unwrap()) {
            std::fs::rename(entry.path(), place).unwrap();
        }
    }
    folder
}

/// A model of tests/data/golden/drawn, complete, in a folder that goes with what is returned.
pub fn model(name: &str) -> (tempfile::TempDir, ModelSource) {
    let (copy, from) = (tempfile::tempdir().unwrap(), golden_dir().join("drawn").join(name));
    std::fs::copy(from.join("config.json"), copy.path().join("config.json")).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden_dir().join("text/llama").join(file), copy.path().join(file)).unwrap();
    }
    write_weights(&from.join("tensors.json"), copy.path(), text_value);
    let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
    (copy, source)
}
