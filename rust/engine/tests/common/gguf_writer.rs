//! Writes GGUF files, sound and otherwise.

use std::path::Path;

use engine::weights::GgufFiles;
use tempfile::TempDir;

/// A GGUF file in the making; integers are little-endian.
#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    pub counts: Option<(u64, u64)>,
    pub entries: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
}

pub const U32: u32 = 4;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Gguf {
    pub fn new() -> Self {
        Self { version: 3, counts: None, entries: Vec::new(), tensors: Vec::new(), data: vec![0; 256] }
    }

    pub fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.entries.push([&string(key), &kind.to_le_bytes()[..], value].concat());
        self
    }

    pub fn array(self, key: &str, kind: u32, count: u64, values: &[u8]) -> Self {
        self.entry(key, ARRAY, &[&kind.to_le_bytes(), &count.to_le_bytes()[..], values].concat())
    }

    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let dims_bytes: Vec<u8> = dims.iter().flat_map(|d| d.to_le_bytes()).collect();
        let ndims = (dims.len() as u32).to_le_bytes();
        self.tensors.push([&string(name), &ndims[..], &dims_bytes, &kind.to_le_bytes(), &offset.to_le_bytes()].concat());
        self
    }

    pub fn write(&self, path: &Path) {
        let (tensors, entries) = self.counts.unwrap_or((self.tensors.len() as u64, self.entries.len() as u64));
        let mut bytes = [b"GGUF", &self.version.to_le_bytes()[..], &tensors.to_le_bytes(), &entries.to_le_bytes()].concat();
        bytes.extend(self.entries.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        std::fs::write(path, bytes).unwrap();
    }

    /// A tensor with its bytes, at the end of the data.
    pub fn weight(mut self, name: &str, dims: &[u64], kind: u32, bytes: &[u8]) -> Self {
        let offset = self.data.len().next_multiple_of(32);
        self.data.resize(offset, 0);
        self.data.extend(bytes);
        self.tensor(name, dims, kind, offset as u64)
    }

    pub fn open(&self) -> Result<GgufFiles, String> {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("model.gguf");
        self.write(&path);
        GgufFiles::open(&[path]).map_err(|e| e.to_string())
    }
}

/// A copy in which a key is left out.
pub fn without(mut gguf: Gguf, key: &str) -> Gguf {
    let before = gguf.entries.len();
    gguf.entries.retain(|entry| !entry.starts_with(&string(key)));
    assert_eq!(gguf.entries.len(), before - 1, "{key}");
    gguf
}

/// A copy in which a key has another size.
pub fn with_size(gguf: Gguf, key: &str, size: u32) -> Gguf {
    without(gguf, key).entry(key, U32, &size.to_le_bytes())
}
