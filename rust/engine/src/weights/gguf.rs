//! GGUF files: a checked reader over a memory map (the format: the GGUF specification in ggml's `docs/gguf.md`).
//!
//! The bytes are untrusted. Every size is checked before it is used, and no count read from a file reserves memory that
//! the rest of the file could not fill.

use std::{
    collections::{HashMap, hash_map::Entry},
    path::{Path, PathBuf},
};

use device::{
    DType, DeviceError, GgmlType, WeightView,
    mmap::{Bytes, FileWatch},
};

use super::metadata::{Metadata, MetadataValue};
use crate::EngineError;

/// Metadata entries of a file at most; files in use have some dozens.
const MAX_ENTRIES: u64 = 1 << 16;
/// Elements of all metadata arrays together at most; the largest vocabularies with merges have some hundred thousands.
const MAX_ARRAY_ELEMENTS: u64 = 1 << 22;
/// Tensors of a file at most.
const MAX_TENSORS: u64 = 1 << 17;
/// Dimensions of a tensor at most, ggml's own limit.
const MAX_DIMS: u32 = 4;
/// Files of a split model at most.
const MAX_SPLITS: usize = 4096;

/// One or more GGUF files that make up a model.
pub struct GgufFiles {
    metadata: Metadata,
    tensors: HashMap<String, Tensor>,
    weight_bytes: u64,
    path: PathBuf,
    watches: Vec<FileWatch>,
}

/// Where a tensor lies.
pub(super) struct Tensor {
    /// Fastest-varying first, as in the file.
    dims: Vec<usize>,
    dtype: Result<DType, String>,
    /// From the tensor's first byte to the end of its file, or of the tensor.
    bytes: Bytes,
}

impl Tensor {
    /// Of dimensions that vary fastest first.
    pub(super) fn new(dims: Vec<usize>, dtype: DType, bytes: Bytes) -> Self {
        Self { dims, dtype: Ok(dtype), bytes }
    }

    pub(super) fn dims(&self) -> &[usize] {
        &self.dims
    }
}

impl GgufFiles {
    /// Opens the files of a model, in order. Of a split model the first file is enough: the others are found beside it.
    pub fn open(files: &[PathBuf]) -> Result<Self, EngineError> {
        let first = files.first().ok_or_else(|| EngineError::Load("no GGUF file was given".into()))?;
        let mut model = Self::parse(first)?;
        let count = model.metadata.usize("split.count").unwrap_or(1).max(1);
        let rest = match files.len() {
            n if n == count => files[1..].to_vec(),
            1 => split_siblings(first, count)?,
            n => return Err(load(first, format!("it is one of {count} parts of a split model, but {n} files were given"))),
        };
        for (index, path) in rest.iter().enumerate() {
            let part = Self::parse(path)?;
            let number = part.metadata.usize("split.no");
            if number != Some(index + 1) {
                let got = number.map_or_else(|| "none".into(), |n| n.to_string());
                return Err(load(path, format!("`split.no` should be {}, found {got}", index + 1)));
            }
            model.weight_bytes += part.weight_bytes;
            model.watches.extend(part.watches);
            for (name, info) in part.tensors {
                match model.tensors.entry(name) {
                    Entry::Occupied(e) => return Err(load(path, format!("tensor `{}` is also in an earlier part", e.key()))),
                    Entry::Vacant(e) => e.insert(info),
                };
            }
        }
        if let Some(n) = model.metadata.usize("split.tensors.count")
            && n != model.tensors.len()
        {
            return Err(load(first, format!("`split.tensors.count` is {n}, the parts hold {}", model.tensors.len())));
        }
        Ok(model)
    }

    /// What another kind of file has, as a GGUF file of the same model would have it.
    pub(super) fn of_tensors(
        path: &Path,
        metadata: Metadata,
        tensors: HashMap<String, Tensor>,
        watch: Option<FileWatch>,
    ) -> Self {
        let weight_bytes = tensors.values().map(|tensor| tensor.bytes.len() as u64).sum();
        Self { metadata, tensors, weight_bytes, path: path.to_owned(), watches: watch.into_iter().collect() }
    }

    /// Of each file.
    pub fn watches(&self) -> &[FileWatch] {
        &self.watches
    }

    /// The metadata of the first file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Bytes of all tensors.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Where the model lies, for errors.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The metadata entries of the first file: their keys, and all bytes of each as they lie in the file.
    pub(crate) fn raw_entries(&self) -> Result<Vec<(String, Vec<u8>)>, EngineError> {
        let bytes = Bytes::map_file(&self.path)?;
        let mut r = Reader { bytes: bytes.as_slice(), at: 0, array_elements: 0 };
        r.raw_entries().map_err(|why| load(&self.path, why))
    }

    /// The names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor and its shape, as a matrix: all but its last dimension are rows. A file stores dimensions the other way round.
    pub fn tensor(&self, name: &str) -> Result<(WeightView, Vec<usize>), EngineError> {
        let info = self.info(name)?;
        let (cols, rows) =
            info.dims.split_first().ok_or_else(|| load(&self.path, format!("tensor `{name}` has no dimensions")))?;
        let rows = rows.iter().try_fold(1_usize, |rows, n| rows.checked_mul(*n));
        let rows = rows.ok_or_else(|| load(&self.path, format!("tensor `{name}` is larger than any file")))?;
        Ok((self.view(name, info, rows, *cols)?, info.dims.iter().rev().copied().collect()))
    }

    /// A vector, as a matrix of one row.
    pub fn vector(&self, name: &str) -> Result<WeightView, EngineError> {
        let info = self.info(name)?;
        match info.dims[..] {
            [cols] | [cols, 1] => self.view(name, info, 1, cols),
            _ => Err(load(&self.path, format!("tensor `{name}` has {} dimensions instead of 1", info.dims.len()))),
        }
    }

    fn info(&self, name: &str) -> Result<&Tensor, EngineError> {
        self.tensors.get(name).ok_or_else(|| load(&self.path, format!("tensor `{name}` is missing")))
    }

    fn view(&self, name: &str, info: &Tensor, rows: usize, cols: usize) -> Result<WeightView, EngineError> {
        let dtype = info.dtype.clone().map_err(|found| DeviceError::UnsupportedType {
            name: name.into(),
            dtype: found,
            supported: supported_types(),
        })?;
        let len =
            dtype.row_bytes(cols).and_then(|b| b.checked_mul(rows)).filter(|len| *len <= info.bytes.len()).ok_or_else(|| {
                load(&self.path, format!("tensor `{name}` of type {dtype} and shape [{rows}, {cols}] is cut off"))
            })?;
        Ok(WeightView::new(dtype, rows, cols, info.bytes.slice(0, len))?)
    }

    fn parse(path: &Path) -> Result<Self, EngineError> {
        Self::of_bytes(path, &Bytes::map_file(path)?)
    }

    /// A file by itself, whose bytes are these.
    pub(crate) fn of_bytes(path: &Path, bytes: &Bytes) -> Result<Self, EngineError> {
        let mut r = Reader { bytes: bytes.as_slice(), at: 0, array_elements: 0 };
        let (metadata, tensors, weight_bytes) = r.file(bytes).map_err(|why| load(path, why))?;
        // The header is copied, and a large one: it has the vocabulary.
        bytes.release();
        Ok(Self { metadata, tensors, weight_bytes, path: path.to_owned(), watches: bytes.watch().into_iter().collect() })
    }
}

fn load(path: &Path, why: impl std::fmt::Display) -> EngineError {
    EngineError::Load(format!("{}: {why}", path.display()))
}

/// `NAME-00002-of-00003.gguf` and so on, beside the first file.
fn split_siblings(first: &Path, count: usize) -> Result<Vec<PathBuf>, EngineError> {
    if count > MAX_SPLITS {
        return Err(load(first, format!("`split.count` is {count}; at most {MAX_SPLITS} files are read")));
    }
    let name = first.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = name.strip_suffix(&format!("-00001-of-{count:05}.gguf")).ok_or_else(|| {
        load(
            first,
            format!("it is one of {count} parts of a split model; give the file that ends in -00001-of-{count:05}.gguf, or all"),
        )
    })?;
    Ok((2..=count).map(|i| first.with_file_name(format!("{stem}-{i:05}-of-{count:05}.gguf"))).collect())
}

fn supported_types() -> String {
    let quantized = GgmlType::ALL.iter().map(|t| t.name());
    ["F32", "F16", "BF16"].into_iter().chain(quantized).collect::<Vec<_>>().join(", ")
}

/// The type of ggml's number, or its name where it is not supported.
fn dtype(number: u32) -> Result<DType, String> {
    const NAMED: [(u32, &str); 7] = [(9, "Q8_1"), (15, "Q8_K"), (24, "I8"), (25, "I16"), (26, "I32"), (27, "I64"), (28, "F64")];
    DType::of_ggml(number).ok_or_else(|| {
        let name = NAMED.iter().find(|(n, _)| *n == number);
        name.map_or_else(|| format!("number {number}"), |(_, name)| (*name).to_owned())
    })
}

/// Values of a file in their order; errors say what is wrong, the caller adds the path.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    array_elements: u64,
}

type Parsed = (Metadata, HashMap<String, Tensor>, u64);

impl<'a> Reader<'a> {
    fn file(&mut self, bytes: &Bytes) -> Result<Parsed, String> {
        let magic = self.take(4)?;
        if magic != b"GGUF" {
            return Err(format!("not a GGUF file: it starts with {magic:02x?} instead of \"GGUF\""));
        }
        let version = self.u32()?;
        match version {
            2 | 3 => {}
            v if matches!(v.swap_bytes(), 1..=3) => {
                return Err("a big-endian GGUF file; only little-endian files are read".into());
            }
            v => return Err(format!("GGUF version {v} is not supported; supported versions: 2, 3")),
        }
        let num_tensors = self.count("tensors", MAX_TENSORS)?;
        let num_entries = self.count("metadata entries", MAX_ENTRIES)?;
        let metadata = Metadata::new(self.entries(num_entries)?);
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(_) => metadata
                .usize("general.alignment")
                .filter(|a| a.is_power_of_two() && (8..=1 << 20).contains(a))
                .ok_or("`general.alignment` must be a power of two from 8 to 1048576")?,
        };
        let mut infos = Vec::new();
        for _ in 0..num_tensors {
            infos.push(self.tensor_info()?);
        }
        let data = self.at.checked_next_multiple_of(alignment).ok_or("the header is too long")?;
        let mut tensors = HashMap::with_capacity(infos.len());
        let mut weight_bytes = 0_u64;
        for (name, dims, number, offset) in infos {
            let start = usize::try_from(offset)
                .ok()
                .filter(|offset| offset.is_multiple_of(alignment))
                .and_then(|offset| offset.checked_add(data))
                .filter(|start| *start <= bytes.len())
                .ok_or_else(|| {
                    format!("tensor `{name}` lies at offset {offset}, which is not an aligned place within the file")
                })?;
            let dtype = dtype(number);
            if let Ok(dtype) = dtype {
                let len = tensor_bytes(dtype, &dims)
                    .filter(|len| *len <= bytes.len() - start)
                    .ok_or_else(|| format!("tensor `{name}` of type {dtype} and dimensions {dims:?} is not within the file"))?;
                weight_bytes += len as u64;
            }
            let info = Tensor { dims, dtype, bytes: bytes.slice(start, bytes.len()) };
            match tensors.entry(name) {
                Entry::Occupied(e) => return Err(format!("tensor `{}` occurs twice", e.key())),
                Entry::Vacant(e) => e.insert(info),
            };
        }
        Ok((metadata, tensors, weight_bytes))
    }

    fn entries(&mut self, count: usize) -> Result<HashMap<String, MetadataValue>, String> {
        let mut values = HashMap::new();
        for _ in 0..count {
            let key = self.string()?;
            let kind = self.u32()?;
            let value = self.value(kind).map_err(|why| format!("metadata `{key}`: {why}"))?;
            match values.entry(key) {
                Entry::Occupied(e) => return Err(format!("metadata `{}` occurs twice", e.key())),
                Entry::Vacant(e) => e.insert(value),
            };
        }
        Ok(values)
    }

    fn raw_entries(&mut self) -> Result<Vec<(String, Vec<u8>)>, String> {
        // What `file` has checked: magic and version.
        self.take(8)?;
        self.count("tensors", MAX_TENSORS)?;
        let count = self.count("metadata entries", MAX_ENTRIES)?;
        let mut entries = Vec::new();
        for _ in 0..count {
            let start = self.at;
            let key = self.string()?;
            let kind = self.u32()?;
            self.value(kind)?;
            entries.push((key, self.bytes[start..self.at].to_vec()));
        }
        Ok(entries)
    }

    fn tensor_info(&mut self) -> Result<(String, Vec<usize>, u32, u64), String> {
        let name = self.string()?;
        let n = self.u32()?;
        if n > MAX_DIMS {
            return Err(format!("tensor `{name}` has {n} dimensions; at most {MAX_DIMS} are supported"));
        }
        let mut dims = Vec::with_capacity(n as usize);
        for _ in 0..n {
            let dim = self.u64()?;
            dims.push(usize::try_from(dim).map_err(|_| format!("tensor `{name}` has a dimension of {dim}"))?);
        }
        Ok((name, dims, self.u32()?, self.u64()?))
    }

    fn value(&mut self, kind: u32) -> Result<MetadataValue, String> {
        Ok(match kind {
            6 => MetadataValue::Float(f64::from(self.f32()?)),
            7 => MetadataValue::Bool(self.take(1)?[0] != 0),
            8 => MetadataValue::String(self.string()?),
            9 => return self.array(),
            12 => MetadataValue::Float(self.f64()?),
            _ => MetadataValue::Int(self.int(kind)?),
        })
    }

    fn array(&mut self) -> Result<MetadataValue, String> {
        let kind = self.u32()?;
        let smallest = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err("arrays of arrays are not supported".into()),
            other => return Err(format!("value type {other} is unknown")),
        };
        let count = self.u64()?;
        if count > ((self.bytes.len() - self.at) / smallest) as u64 {
            return Err(format!("an array of {count} elements does not fit in the file"));
        }
        self.array_elements += count;
        if self.array_elements > MAX_ARRAY_ELEMENTS {
            return Err(format!("an array of {count} elements; all arrays together may have {MAX_ARRAY_ELEMENTS}"));
        }
        Ok(match kind {
            6 => MetadataValue::Floats(self.elements(count, Self::f32)?),
            7 => MetadataValue::Bools(self.elements(count, |r| Ok(r.take(1)?[0] != 0))?),
            8 => MetadataValue::Strings(self.elements(count, Self::string)?),
            12 => MetadataValue::Floats(self.elements(count, |r| Ok(r.f64()? as f32))?),
            _ => MetadataValue::Ints(self.elements(count, |r| {
                let value = r.int(kind)?;
                i64::try_from(value).map_err(|_| format!("{value} does not fit in a 64-bit signed integer"))
            })?),
        })
    }

    /// `count` elements, which are known to fit in the rest of the file.
    fn elements<T>(&mut self, count: u64, read: impl Fn(&mut Self) -> Result<T, String>) -> Result<Vec<T>, String> {
        (0..count).map(|_| read(self)).collect()
    }

    fn int(&mut self, kind: u32) -> Result<i128, String> {
        Ok(match kind {
            0 => i128::from(self.take(1)?[0]),
            1 => i128::from(self.take(1)?[0].cast_signed()),
            2 => i128::from(u16::from_le_bytes(self.array_of()?)),
            3 => i128::from(i16::from_le_bytes(self.array_of()?)),
            4 => i128::from(self.u32()?),
            5 => i128::from(i32::from_le_bytes(self.array_of()?)),
            10 => i128::from(self.u64()?),
            11 => i128::from(i64::from_le_bytes(self.array_of()?)),
            other => return Err(format!("value type {other} is unknown")),
        })
    }

    fn string(&mut self) -> Result<String, String> {
        let len = self.u64()?;
        let len = usize::try_from(len).map_err(|_| format!("a string of {len} bytes does not fit in the file"))?;
        Ok(String::from_utf8_lossy(self.take(len)?).into_owned())
    }

    fn count(&mut self, what: &str, limit: u64) -> Result<usize, String> {
        match self.u64()? {
            n if n <= limit => Ok(n as usize),
            n => Err(format!("{n} {what}; at most {limit} are supported")),
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        if len > rest.len() {
            return Err(format!("the file ends at byte {}, where {len} more bytes are needed at {}", self.bytes.len(), self.at));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    fn array_of<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array_of()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array_of()?))
    }

    fn f32(&mut self) -> Result<f32, String> {
        Ok(f32::from_le_bytes(self.array_of()?))
    }

    fn f64(&mut self) -> Result<f64, String> {
        Ok(f64::from_le_bytes(self.array_of()?))
    }
}

/// Bytes of a tensor; `None` when its first dimension is not whole blocks or the product overflows.
fn tensor_bytes(dtype: DType, dims: &[usize]) -> Option<usize> {
    let (cols, rows) = dims.split_first()?;
    rows.iter().try_fold(dtype.row_bytes(*cols)?, |bytes, n| bytes.checked_mul(*n))
}
