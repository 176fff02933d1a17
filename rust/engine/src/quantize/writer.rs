//! A GGUF file (ggml's `docs/gguf.md`): its header, then its tensors, a few rows of each at a time.

use std::{
    fs::{self, File},
    io::{BufWriter, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use device::{DType, WeightView, mmap::Bytes};

use super::entries::{Entries, string};
use crate::{
    EngineError, Importance,
    importance::takes_importance,
    isq::quantize,
    model::ModelFiles,
    weights::{Matrix, WeightSource, floats},
};

const ALIGNMENT: usize = 32;
/// Values of a tensor that are read, quantized and written at once.
const STRIPE_VALUES: usize = 1 << 22;

/// A tensor of the file.
pub(super) struct PlannedTensor {
    /// Its name in the file.
    pub name: String,
    /// Fastest-varying first.
    pub dims: Vec<usize>,
    /// What it is stored in.
    pub dtype: DType,
    /// Where its values come from.
    pub values: Values,
}

pub(super) enum Values {
    /// What parts of the source have, one after the other, and in which order.
    Stored { parts: Vec<Part>, places: Places },
    /// These.
    Given(Vec<f32>),
}

/// A part of the source.
pub(super) enum Part {
    /// A whole tensor, by its name there.
    Tensor(String),
    /// A matrix that lies there among others, or otherwise than in a GGUF file.
    Matrix(Matrix),
}

impl Part {
    fn view(&self, weights: &WeightSource) -> Result<WeightView, EngineError> {
        match self {
            Self::Tensor(name) => Ok(weights.tensor(name)?.0),
            Self::Matrix(matrix) => Ok(weights.stored(matrix)?.1),
        }
    }
}

/// Where in the source a row and a column of the file are; `None`: at the same place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub rows: Option<Vec<usize>>,
    pub cols: Option<Vec<usize>>,
}

impl PlannedTensor {
    fn rows(&self) -> usize {
        self.dims.iter().skip(1).product()
    }

    fn bytes(&self) -> Option<usize> {
        self.dtype
            .row_bytes(*self.dims.first()?)?
            .checked_mul(self.dims[1..].iter().try_fold(1, |n: usize, d| n.checked_mul(*d))?)
    }
}

/// A file that takes its name only when it is whole. Until then it has a name of its own in the same folder, and is removed
/// when it is given up.
pub(super) struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    is_done: bool,
}

impl NewFile {
    pub fn new(path: &Path) -> Result<Self, EngineError> {
        let name = path.file_name().ok_or_else(|| EngineError::InvalidArgument(format!("{} names no file", path.display())))?;
        let partial = path.with_file_name(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
        Ok(Self { path: path.to_owned(), partial, is_done: false })
    }

    /// Where it is until it is whole.
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Gives it its name; a file of that name is replaced.
    pub fn finish(mut self) -> Result<(), EngineError> {
        fs::rename(&self.partial, &self.path).map_err(|e| failed(&self.path, &e))?;
        self.is_done = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_done {
            // It may never have been made.
            fs::remove_file(&self.partial).unwrap_or_default();
        }
    }
}

fn failed(path: &Path, error: &std::io::Error) -> EngineError {
    EngineError::Load(format!("{} cannot be written: {error}", path.display()))
}

const fn ggml_number(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 30,
        DType::Ggml(format) => format.format().number,
    }
}

/// The bytes before the tensors, padding included, and where the tensors end.
pub(super) fn header(entries: &Entries, tensors: &[PlannedTensor]) -> Result<(Vec<u8>, u64), EngineError> {
    let mut out = b"GGUF".to_vec();
    out.extend(3_u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    out.extend(entries.bytes());
    let mut offset = 0_usize;
    for tensor in tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        out.extend(tensor.dims.iter().flat_map(|dim| (*dim as u64).to_le_bytes()));
        out.extend(ggml_number(tensor.dtype).to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        let end = tensor.bytes().and_then(|bytes| offset.checked_add(bytes)?.checked_next_multiple_of(ALIGNMENT));
        offset = end.ok_or_else(|| EngineError::Load(format!("tensor `{}` is larger than any file", tensor.name)))?;
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    let end = (out.len() + offset) as u64;
    Ok((out, end))
}

/// Writes the header and the tensors whose values are given, which are part of what a model is like, and leaves room for the
/// others.
pub(super) fn write_sketch(path: &Path, header: &[u8], tensors: &[PlannedTensor], end: u64) -> Result<(), EngineError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(header)?;
        file.set_len(end)?;
        let mut at = header.len() as u64;
        for tensor in tensors {
            if let Values::Given(values) = &tensor.values {
                file.seek(SeekFrom::Start(at))?;
                file.write_all(&bytes_of(values))?;
            }
            at += tensor.bytes().unwrap_or(0).next_multiple_of(ALIGNMENT) as u64;
        }
        Ok(())
    };
    write().map_err(|e| failed(path, &e))
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Writes the whole file. `progress` is called with bytes of the source as they are done.
pub(super) fn write(
    path: &Path,
    header: &[u8],
    tensors: &[PlannedTensor],
    source: &ModelFiles,
    num_threads: usize,
    progress: &dyn Fn(u64),
) -> Result<u64, EngineError> {
    let file = File::create(path).map_err(|e| failed(path, &e))?;
    let mut out = Counted { out: BufWriter::with_capacity(1 << 20, file), written: 0, path };
    out.write(header)?;
    for tensor in tensors {
        match &tensor.values {
            Values::Given(values) => out.write(&bytes_of(values))?,
            Values::Stored { parts, places } => {
                let mut first = 0;
                for part in parts {
                    let view = part.view(source.weights())?;
                    if first + view.rows > tensor.rows() || Some(&view.cols) != tensor.dims.first() {
                        return Err(other_shape(tensor));
                    }
                    let rows = Rows { tensor, view: &view, first, places, num_threads };
                    first += view.rows;
                    rows.write(&mut out, source.importance(), progress)?;
                }
                if first != tensor.rows() {
                    return Err(other_shape(tensor));
                }
            }
        }
        out.pad()?;
    }
    let written = out.written;
    let synced = out.out.into_inner().map_err(std::io::IntoInnerError::into_error).and_then(|file| file.sync_all());
    synced.map_err(|e| failed(path, &e))?;
    Ok(written)
}

fn other_shape(PlannedTensor { name, .. }: &PlannedTensor) -> EngineError {
    EngineError::Load(format!("what becomes tensor `{name}` has parts of other shapes than its first, or has changed meanwhile"))
}

/// The rows of a tensor on their way into the file.
struct Rows<'a> {
    tensor: &'a PlannedTensor,
    view: &'a WeightView,
    /// The row of the tensor that is the first of these.
    first: usize,
    places: &'a Places,
    num_threads: usize,
}

impl Rows<'_> {
    /// Experts may each have an importance of their own.
    fn write(&self, out: &mut Counted<'_>, importance: Option<&Importance>, progress: &dyn Fn(u64)) -> Result<(), EngineError> {
        let (rows, cols) = (self.view.rows, self.view.cols);
        let is_weighted = matches!(self.tensor.dtype, DType::Ggml(format) if takes_importance(format));
        let importance = match importance.filter(|_| is_weighted && self.tensor.dtype != self.view.dtype) {
            Some(_) if self.places.cols.is_some() => {
                tracing::warn!("{} is quantized without importance: its columns change places", self.tensor.name);
                None
            }
            Some(importance) => importance.of_tensor(&self.tensor.name, [self.tensor.rows(), cols])?,
            None => None,
        };
        let of_expert = self.tensor.rows() / importance.map_or(1, |all| all.len() / cols).max(1);
        let stripe = (STRIPE_VALUES / cols.max(1)).max(1);
        let mut start = 0;
        while start < rows {
            let expert = (self.first + start) / of_expert;
            let end = rows.min(start + stripe).min((expert + 1) * of_expert - self.first);
            self.stripe(out, [start, end], importance.map(|all| &all[expert * cols..(expert + 1) * cols]))?;
            progress(((end - start) * self.view.row_bytes()) as u64);
            start = end;
        }
        self.view.release();
        Ok(())
    }

    fn stripe(&self, out: &mut Counted<'_>, [start, end]: [usize; 2], columns: Option<&[f32]>) -> Result<(), EngineError> {
        let Self { tensor, view, .. } = *self;
        let rows = self.ordered([start, end])?;
        match tensor.dtype {
            dtype if dtype == view.dtype => out.write(rows.bytes())?,
            DType::F32 => match floats(view.dtype, rows.bytes()) {
                Some(values) => out.write(&bytes_of(&values))?,
                None => return Err(not_written(tensor, view)),
            },
            DType::Ggml(format) => {
                out.write(quantize(&tensor.name, &rows, format, columns, self.num_threads)?.bytes())?;
            }
            DType::F16 | DType::BF16 => return Err(not_written(tensor, view)),
        }
        rows.release();
        Ok(())
    }

    /// The rows of the source from which these are made.
    fn ordered(&self, [start, end]: [usize; 2]) -> Result<WeightView, EngineError> {
        let Self { tensor, view, places, .. } = *self;
        let Places { rows, cols } = places;
        let source = |row: usize| view.row(rows.as_ref().map_or(row, |rows| rows[row]));
        let bytes: Vec<u8> = match (rows, cols) {
            (None, None) => return Ok(view.slice_rows(start, end)?),
            (_, None) => (start..end).flat_map(source).copied().collect(),
            (_, Some(cols)) => {
                if matches!(view.dtype, DType::Ggml(_)) {
                    return Err(not_written(tensor, view));
                }
                let size = view.row_bytes() / view.cols.max(1);
                (start..end).map(source).flat_map(|row| cols.iter().flat_map(|at| &row[at * size..][..size])).copied().collect()
            }
        };
        Ok(WeightView::new(view.dtype, end - start, view.cols, Bytes::from_vec(bytes))?)
    }
}

fn not_written(tensor: &PlannedTensor, view: &WeightView) -> EngineError {
    let PlannedTensor { name, dtype, .. } = tensor;
    EngineError::Internal(format!("tensor `{name}` of type {} cannot be written as {dtype}", view.dtype))
}

struct Counted<'a> {
    out: BufWriter<File>,
    written: u64,
    path: &'a Path,
}

impl Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), EngineError> {
        self.out.write_all(bytes).map_err(|e| failed(self.path, &e))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// To the next place where a tensor may begin. The header ends at one.
    fn pad(&mut self) -> Result<(), EngineError> {
        let end = self.written.next_multiple_of(ALIGNMENT as u64);
        self.write(&vec![0; (end - self.written) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_given_up_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let file = NewFile::new(&path).unwrap();
        fs::write(file.partial(), b"GGUF").unwrap();
        drop(file);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let file = NewFile::new(&path).unwrap();
        fs::write(file.partial(), b"GGUF").unwrap();
        file.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"GGUF");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
