//! Tiny models that see whose weights are drawn from their names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::Mutex,
};

use safetensors::tensor::{Dtype, TensorView, serialize};

use super::golden_dir;

/// Numbers that a name decides: `SplitMix64` (Steele et al. 2014) from the FNV-1a hash of the name on, from -1/2 to 1/2.
fn drawn(name: &str, len: usize) -> impl Iterator<Item = f32> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    (1..=len as u64).map(move |i| {
        let mut z = hash.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32 - 0.5
    })
}

/// Writes `model.safetensors` with weights of the shapes that a file says, unless it is there.
pub fn write_weights(shapes: &Path, folder: &Path) {
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_slice(&fs::read(shapes).unwrap()).unwrap();
    let values: BTreeMap<_, Vec<u8>> = shapes
        .iter()
        .map(|(name, shape)| {
            let value = |u: f32| match shape[..] {
                _ if name.contains("norm") && name.ends_with("weight") => 1.0 + 0.5 * u,
                [_] => 0.25 * u,
                _ => 0.5 * u,
            };
            (name, drawn(name, shape.iter().product()).flat_map(|u| value(u).to_le_bytes()).collect())
        })
        .collect();
    let views = shapes.iter().map(|(name, shape)| (name, TensorView::new(Dtype::F32, shape.clone(), &values[name]).unwrap()));
    write(&folder.join("model.safetensors"), &serialize(views, None).unwrap());
}

/// Writes a file whole, so that other tests see all of it or nothing, unless it is there as it would be.
fn write(path: &Path, content: &[u8]) {
    if fs::read(path).is_ok_and(|there| there == content) {
        return;
    }
    let mut file = tempfile::NamedTempFile::new_in(path.parent().unwrap()).unwrap();
    file.write_all(content).unwrap();
    file.persist(path).unwrap();
}

/// The folder of a tiny model. Where its golden has no weights, they are drawn beside it, and what a model needs besides is that
/// of another.
pub fn folder(name: &str) -> PathBuf {
    static DRAWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let folder = golden_dir().join("vision").join(name);
    let shapes = folder.join("tensors.json");
    let mut drawn = DRAWN.lock().unwrap();
    if shapes.exists() && drawn.insert(name.to_owned()) {
        for file in ["tokenizer.json", "tokenizer_config.json", "image0.png", "image1.png"] {
            if !folder.join(file).exists() {
                write(&folder.join(file), &fs::read(golden_dir().join("vision/qwen3_vl").join(file)).unwrap());
            }
        }
        write_weights(&shapes, &folder);
    }
    folder
}
