//! Checkpoints of the hub, one file or sharded, over memory maps: safetensors, and where there are none what PyTorch has saved.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::Display,
    path::{Path, PathBuf},
};

use ::safetensors::{Dtype, SafeTensors};
use device::{
    DType, DeviceError, WeightView,
    mmap::{Bytes, FileWatch},
};

use super::{
    hub::{HubFormat, Packed},
    pytorch::{self, TorchTensor},
};
use crate::{EngineError, json::required_json};

/// A file with all weights, and the index of several; the first that are there are read.
const NAMES: [[&str; 2]; 2] =
    [["model.safetensors", "model.safetensors.index.json"], ["pytorch_model.bin", "pytorch_model.bin.index.json"]];

/// The files of weights of a model folder.
pub struct SafetensorsFiles {
    tensors: HashMap<String, TensorInfo>,
    weight_bytes: u64,
    dir: PathBuf,
    watches: Vec<FileWatch>,
    hub: Option<HubFormat>,
}

struct TensorInfo {
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Bytes,
    file: PathBuf,
}

impl SafetensorsFiles {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names; else `pytorch_model.bin` likewise.
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        let mut files = Self { tensors: HashMap::new(), weight_bytes: 0, dir: dir.to_owned(), watches: Vec::new(), hub: None };
        for names in NAMES {
            let [single, index] = names.map(|name| dir.join(name));
            if index.is_file() {
                files.open_index(&index)?;
                return Ok(files);
            }
            if single.is_file() {
                files.open_file(&single)?;
                return Ok(files);
            }
        }
        let names = NAMES.concat().join(", ");
        Err(load(dir, format!("there is none of {names} in this folder")))
    }

    /// The same, quantized as config.json says.
    #[must_use]
    pub fn quantized(self, hub: Option<HubFormat>) -> Self {
        Self { hub, ..self }
    }

    /// The same under other names.
    ///
    /// # Errors
    /// [`EngineError::Load`] for two that then have one name.
    pub fn renamed(self, rename: impl Fn(String) -> String) -> Result<Self, EngineError> {
        let mut files = Self { tensors: HashMap::with_capacity(self.tensors.len()), weight_bytes: 0, ..self };
        for (name, info) in self.tensors {
            files.insert(rename(name), info)?;
        }
        Ok(files)
    }

    /// How config.json says that they are quantized.
    pub fn format(&self) -> Option<HubFormat> {
        self.hub
    }

    /// The tensors that stand for one of floats.
    pub fn packed<'a>(&'a self, name: &'a str) -> Option<Packed<'a>> {
        Packed::find(self, self.hub?, name)
    }

    /// A tensor's shape, type and bytes.
    pub(super) fn raw(&self, name: &str) -> Option<(&[usize], Dtype, &[u8])> {
        self.tensors.get(name).map(|info| (&info.shape[..], info.dtype, info.bytes.as_slice()))
    }

    /// Of each file.
    pub fn watches(&self) -> &[FileWatch] {
        &self.watches
    }

    /// Whether a folder has such files.
    pub fn are_in(dir: &Path) -> bool {
        NAMES.concat().iter().any(|name| dir.join(name).is_file())
    }

    /// Bytes of all tensors.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Where the model lies, for errors.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The names of all tensors, in no order: of a quantized one those of the floats that it stands for.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.packed(name).is_some()
    }

    /// A tensor and its shape, as a matrix: all but its last dimension are rows.
    pub fn tensor(&self, name: &str) -> Result<(WeightView, Vec<usize>), EngineError> {
        if let Some(packed) = self.packed(name) {
            return packed.read();
        }
        let info = self.info(name)?;
        // Without dimensions it is one value.
        let (cols, rows) = info.shape.split_last().unwrap_or((&1, &[]));
        let rows = rows.iter().try_fold(1_usize, |rows, n| rows.checked_mul(*n));
        let rows = rows.ok_or_else(|| load(&info.file, format!("tensor `{name}` is larger than any file")))?;
        Ok((view(name, info, rows, *cols)?, info.shape.clone()))
    }

    /// A vector, as a matrix of one row.
    pub fn vector(&self, name: &str) -> Result<WeightView, EngineError> {
        let info = self.info(name)?;
        match info.shape[..] {
            [cols] | [1, cols] => view(name, info, 1, cols),
            _ => Err(load(&info.file, format!("tensor `{name}` has {} dimensions instead of 1", info.shape.len()))),
        }
    }

    /// The bytes of a tensor of bytes, which must have this shape.
    pub fn bytes_of(&self, name: &str, shape: &[usize]) -> Result<Bytes, EngineError> {
        let info = self.info(name)?;
        if info.dtype != Dtype::U8 || info.shape != shape {
            let (dtype, stored) = (info.dtype, &info.shape);
            let why =
                format!("tensor `{name}` has type {dtype:?} and shape {stored:?}; the configuration asks for U8, {shape:?}");
            return Err(load(&info.file, why));
        }
        Ok(info.bytes.clone())
    }

    /// An error about these files.
    pub fn error(&self, why: &str) -> EngineError {
        load(&self.dir, why)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, EngineError> {
        self.tensors.get(name).ok_or_else(|| load(&self.dir, format!("tensor `{name}` is missing")))
    }

    fn open_index(&mut self, index: &Path) -> Result<(), EngineError> {
        let json = required_json(index)?;
        let map = json
            .get("weight_map")
            .and_then(|m| m.as_object())
            .ok_or_else(|| load(index, "`weight_map` is missing or not an object"))?;
        let mut shards: Vec<&str> = Vec::new();
        for (tensor, file) in map {
            let file =
                file.as_str().ok_or_else(|| load(index, format!("`weight_map` has no file name for tensor `{tensor}`")))?;
            if Path::new(file).file_name().is_none_or(|name| name != file) {
                return Err(load(index, format!("`weight_map` names the file {file:?}; only names within the folder are read")));
            }
            shards.push(file);
        }
        shards.sort_unstable();
        shards.dedup();
        let dir = self.dir.clone();
        for shard in shards {
            self.open_file(&dir.join(shard))?;
        }
        match map.iter().find(|(tensor, _)| !self.contains(tensor)) {
            Some((tensor, file)) => Err(load(index, format!("tensor `{tensor}` is not in {file}"))),
            None => Ok(()),
        }
    }

    fn open_file(&mut self, path: &Path) -> Result<(), EngineError> {
        self.add_file(path, "")
    }

    /// Adds the tensors of another file, with `prefix` before their names.
    pub(super) fn add_file(&mut self, path: &Path, prefix: &str) -> Result<(), EngineError> {
        let bytes = Bytes::map_file(path)?;
        self.watches.extend(bytes.watch());
        if path.extension().is_some_and(|extension| extension == "bin") {
            for TorchTensor { name, shape, dtype, bytes } in pytorch::read(path, &bytes).map_err(|why| load(path, why))? {
                self.insert(format!("{prefix}{name}"), TensorInfo { shape, dtype, bytes, file: path.to_owned() })?;
            }
            return Ok(());
        }
        let (header, metadata) = SafeTensors::read_metadata(bytes.as_slice()).map_err(|e| load(path, e))?;
        let data = header + 8;
        for (name, tensor) in metadata.tensors() {
            let (start, end) = tensor.data_offsets;
            let range = data.checked_add(start).zip(data.checked_add(end));
            let (start, end) = range
                .filter(|(start, end)| start <= end && *end <= bytes.len())
                .ok_or_else(|| load(path, format!("tensor `{name}` is not within the file")))?;
            let info = TensorInfo {
                shape: tensor.shape.clone(),
                dtype: tensor.dtype,
                bytes: bytes.slice(start, end),
                file: path.to_owned(),
            };
            self.insert(format!("{prefix}{name}"), info)?;
        }
        Ok(())
    }

    fn insert(&mut self, name: String, info: TensorInfo) -> Result<(), EngineError> {
        self.weight_bytes += info.bytes.len() as u64;
        match self.tensors.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(info);
                Ok(())
            }
            Entry::Occupied(entry) => {
                let (name, other) = (entry.key(), entry.get().file.display());
                Err(load(&info.file, format!("tensor `{name}` is also in {other}")))
            }
        }
    }
}

/// The device's name of a type of floats; `None` for others.
pub(super) fn float_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}

fn view(name: &str, info: &TensorInfo, rows: usize, cols: usize) -> Result<WeightView, EngineError> {
    let Some(dtype) = float_dtype(info.dtype) else {
        let dtype = format!("{:?}", info.dtype);
        return Err(DeviceError::UnsupportedType { name: name.into(), dtype, supported: "F32, F16, BF16".into() }.into());
    };
    WeightView::new(dtype, rows, cols, info.bytes.clone()).map_err(|e| load(&info.file, format!("tensor `{name}`: {e}")))
}

fn load(path: &Path, why: impl Display) -> EngineError {
    EngineError::Load(format!("{}: {why}", path.display()))
}
