//! Checkpoints that PyTorch has saved (`pytorch_model.bin`, `.pth`): a pickle that describes tensors, and their bytes.
//!
//! Since PyTorch 1.6 a file is a zip archive whose entries are not compressed, before that the pickles and the bytes one behind
//! the other (`torch/serialization.py` reads both). The tensors are views of the mapped file.

use std::{
    collections::{HashMap, HashSet},
    io::Cursor,
    path::Path,
};

use device::mmap::Bytes;
use safetensors::Dtype;
use zip::{CompressionMethod, ZipArchive};

use super::pickle::{Id, Pickle, Value};

/// Entries of an archive at most.
const MAX_ENTRIES: usize = 1 << 20;
/// Tensors at most, and dimensions of each.
const MAX_TENSORS: usize = 1 << 17;
const MAX_DIMS: usize = 8;
/// Bytes of a tensor's name, and of a storage's, which is a number.
const MAX_NAME_BYTES: usize = 1024;
const MAX_KEY_BYTES: usize = 64;
/// What a file of the old kind begins with: protocol 2, and this number.
const OLD_MAGIC: &[u8] = &[0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];
/// Keys that a checkpoint may have its weights under.
const WRAPPERS: [&str; 3] = ["state_dict", "model", "module"];

/// A tensor of a checkpoint.
pub(super) struct TorchTensor {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: Dtype,
    pub(super) bytes: Bytes,
}

/// The tensors of a file.
///
/// # Errors
/// What is wrong with it, without its name.
pub(super) fn read(path: &Path, bytes: &Bytes) -> Result<Vec<TorchTensor>, String> {
    let all = bytes.as_slice();
    if all.starts_with(b"PK") {
        return read_zip(bytes);
    }
    if all.starts_with(OLD_MAGIC) {
        return read_old(bytes);
    }
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Err(format!("{name} is neither a zip archive nor a pickle that PyTorch has saved"))
}

fn read_zip(bytes: &Bytes) -> Result<Vec<TorchTensor>, String> {
    let mut archive = ZipArchive::new(Cursor::new(bytes.as_slice())).map_err(|error| format!("not a zip archive: {error}"))?;
    if archive.len() > MAX_ENTRIES {
        return Err(format!("the archive has {} entries; at most {MAX_ENTRIES} are read", archive.len()));
    }
    let mut entries = HashMap::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(|error| format!("entry {index} of the archive: {error}"))?;
        let name = entry.name().map_err(|error| format!("entry {index} of the archive: {error}"))?.into_owned();
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            return Err(format!("`{name}` is compressed or encrypted, which PyTorch does not do"));
        }
        let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
        let end = start.zip(usize::try_from(entry.size()).ok()).and_then(|(start, size)| start.checked_add(size));
        let range = start.zip(end).filter(|(_, end)| *end <= bytes.len());
        entries.insert(name.clone(), range.ok_or_else(|| format!("`{name}` is not within the file"))?);
    }
    let folder = entries.keys().filter_map(|name| name.strip_suffix("data.pkl")).filter(|folder| folder.ends_with('/')).min();
    let folder = folder.ok_or("the archive has no data.pkl: it is not a checkpoint of PyTorch")?.to_owned();
    let slice_of = |name: &str| entries.get(&format!("{folder}{name}")).map(|(start, end)| bytes.slice(*start, *end));
    if slice_of("byteorder").is_some_and(|order| order.as_slice() != b"little") {
        return Err("its numbers are big-endian; only little-endian ones are read".into());
    }
    let description = slice_of("data.pkl").unwrap_or_else(|| bytes.slice(0, 0));
    let pickle = Pickle::read(description.as_slice(), 0)?;
    let storage = |key: &str| slice_of(&format!("data/{key}"));
    tensors(&pickle, &storage)
}

fn read_old(bytes: &Bytes) -> Result<Vec<TorchTensor>, String> {
    let all = bytes.as_slice();
    let protocol = Pickle::read(all, OLD_MAGIC.len())?;
    let system = Pickle::read(all, protocol.end)?;
    let system_items = system.dict(system.root).unwrap_or_default();
    let is_little = system_items.iter().find(|(key, _)| system.text(*key) == Some("little_endian"));
    if is_little.is_some_and(|(_, value)| system.int(*value) == Some(0)) {
        return Err("its numbers are big-endian; only little-endian ones are read".into());
    }
    let pickle = Pickle::read(all, system.end)?;
    let keys = Pickle::read(all, pickle.end)?;
    let widths = storage_widths(&pickle);
    let mut storages = HashMap::new();
    let mut at = keys.end;
    for id in keys.list(keys.root).ok_or("it has no list of storages")? {
        let key = keys.text(*id).ok_or("a storage has no name")?;
        let cut_off = || format!("storage `{key}` is not within the file");
        let count = all.get(at..).and_then(|rest| rest.first_chunk::<8>()).ok_or_else(cut_off)?;
        let width = *widths.get(key).ok_or_else(|| format!("storage `{key}` is of no type that is read"))?;
        let len = usize::try_from(u64::from_le_bytes(*count)).ok().and_then(|count| count.checked_mul(width));
        let start = at + 8;
        let end = len.and_then(|len| start.checked_add(len)).filter(|end| *end <= all.len()).ok_or_else(cut_off)?;
        storages.insert(key, (start, end));
        at = end;
    }
    let storage = |key: &str| {
        let (start, end) = *storages.get(key)?;
        Some(bytes.slice(start, end))
    };
    tensors(&pickle, &storage)
}

/// Bytes of an element, by the storage's key.
fn storage_widths<'a>(pickle: &Pickle<'a>) -> HashMap<&'a str, usize> {
    let of = |id| {
        let (key, class) = storage_of(pickle, id)?;
        Some((key, dtype_of(class)?.1))
    };
    pickle.values().filter_map(of).collect()
}

/// The key and the class of a storage.
fn storage_of<'a>(pickle: &Pickle<'a>, id: Id) -> Option<(&'a str, &'a str)> {
    let Value::Persistent(description) = pickle.value(id) else { return None };
    let [kind, class, key, ..] = *pickle.list(*description)? else { return None };
    let key = pickle.text(key).filter(|key| key.len() <= MAX_KEY_BYTES)?;
    (pickle.text(kind)? == "storage").then_some((key, pickle.class(class)?))
}

/// The type and the bytes of an element of a class of storages.
fn dtype_of(class: &str) -> Option<(Dtype, usize)> {
    Some(match class {
        "DoubleStorage" => (Dtype::F64, 8),
        "LongStorage" => (Dtype::I64, 8),
        "FloatStorage" => (Dtype::F32, 4),
        "IntStorage" => (Dtype::I32, 4),
        "HalfStorage" => (Dtype::F16, 2),
        "BFloat16Storage" => (Dtype::BF16, 2),
        "ShortStorage" => (Dtype::I16, 2),
        "CharStorage" => (Dtype::I8, 1),
        "ByteStorage" => (Dtype::U8, 1),
        "BoolStorage" => (Dtype::BOOL, 1),
        _ => return None,
    })
}

/// The dict of weights: the whole, or what it has under one of the usual keys.
fn state_dict<'a>(pickle: &'a Pickle<'_>) -> &'a [(Id, Id)] {
    let whole = pickle.dict(pickle.root).unwrap_or_default();
    let is_tensor = |(_, value): &(Id, Id)| matches!(pickle.value(*value), Value::Tensor(_));
    let wrapped = whole
        .iter()
        .find(|(key, value)| pickle.text(*key).is_some_and(|key| WRAPPERS.contains(&key)) && pickle.dict(*value).is_some());
    match wrapped {
        Some((_, inner)) if !whole.iter().any(is_tensor) => pickle.dict(*inner).unwrap_or_default(),
        _ => whole,
    }
}

fn tensors(pickle: &Pickle<'_>, storage: &dyn Fn(&str) -> Option<Bytes>) -> Result<Vec<TorchTensor>, String> {
    let mut names = HashSet::new();
    let mut all = Vec::new();
    for (key, value) in state_dict(pickle) {
        let Some(name) = pickle.text(*key) else { continue };
        if name.len() > MAX_NAME_BYTES || names.len() == MAX_TENSORS {
            return Err(format!("it has more than {MAX_TENSORS} tensors, or a name of more than {MAX_NAME_BYTES} bytes"));
        }
        if !names.insert(name) {
            return Err(format!("`{name}` is there twice"));
        }
        let of = || format!("tensor `{name}`");
        let arguments = match pickle.value(*value) {
            Value::Tensor(arguments) => arguments,
            Value::Made(function) if pickle.module(*function).is_some_and(|module| module.starts_with("torch")) => {
                let function = pickle.class(*function).unwrap_or_default();
                return Err(format!("{} is made by {function}, which is not read: save it as a plain tensor of floats", of()));
            }
            _ => continue,
        };
        let [source, offset, shape, strides, ..] = *pickle.list(*arguments).unwrap_or_default() else {
            return Err(format!("{} is not described as PyTorch does", of()));
        };
        let (key, class) = storage_of(pickle, source).ok_or_else(|| format!("{} has no storage", of()))?;
        let (dtype, width) =
            dtype_of(class).ok_or_else(|| format!("{} is of {class}, which is not read: save it as float", of()))?;
        let bytes = storage(key).ok_or_else(|| format!("{} is in storage `{key}`, which the file lacks", of()))?;
        let sizes = |id| {
            let items = pickle.list(id).filter(|items| items.len() <= MAX_DIMS)?.iter();
            items.map(|id| pickle.int(*id).and_then(|n| usize::try_from(n).ok())).collect::<Option<Vec<_>>>()
        };
        let (shape, strides, offset) = sizes(shape)
            .zip(sizes(strides))
            .zip(pickle.int(offset).and_then(|n| usize::try_from(n).ok()))
            .map(|((shape, strides), offset)| (shape, strides, offset))
            .filter(|(shape, strides, _)| shape.len() == strides.len())
            .ok_or_else(|| format!("{} has no shape", of()))?;
        let mut stride = 1_usize;
        for (size, given) in shape.iter().zip(&strides).rev() {
            if *size > 1 && *given != stride {
                return Err(format!("{} does not lie row by row (strides {strides:?}): save it as `contiguous()`", of()));
            }
            stride = stride.checked_mul(*size).ok_or_else(|| format!("{} is larger than any file", of()))?;
        }
        let range = offset.checked_mul(width).zip(stride.checked_mul(width));
        let range = range.and_then(|(start, len)| Some((start, start.checked_add(len)?)));
        let (start, end) = range
            .filter(|(_, end)| *end <= bytes.len())
            .ok_or_else(|| format!("{} is not within its storage of {} bytes", of(), bytes.len()))?;
        all.push(TorchTensor { name: name.to_owned(), shape, dtype, bytes: bytes.slice(start, end) });
    }
    if all.is_empty() { Err("it is no dict of tensors".into()) } else { Ok(all) }
}
