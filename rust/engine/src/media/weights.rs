//! The weights of an encoder, by the names that its checkpoint has for them.

use std::{collections::BTreeSet, ops::Range, path::Path, sync::Arc};

use device::{Backend, Constant, DType, GgmlType, Linear, LinearOptions, Norm, NormKind, Precision, WeightView, mmap::Bytes};

use super::config::PatchLayout;
use crate::{
    EngineError,
    isq::quantize,
    weights::{WeightSource, floats},
};

/// What float matrices are multiplied as in the fast path, as activations are: patches are many, and products are all that
/// counts.
const EIGHT_BITS: DType = DType::Ggml(GgmlType::Q8_0);

/// A GPU multiplies multiples of so many columns.
const COLUMNS: usize = 8;

/// Reads weights, or counts what they will take.
pub(crate) struct TowerWeights<'a> {
    files: &'a WeightSource,
    /// Where they are loaded to, or would be; `None`: they count as they are stored.
    backend: Option<&'a dyn Backend>,
    is_host: bool,
    precision: Precision,
    loads: bool,
    progress: &'a dyn Fn(u64),
    /// The names of the tensors that were asked for.
    read: BTreeSet<String>,
    /// Bytes of what was asked for so far, as it is kept.
    pub(crate) bytes: u64,
}

impl<'a> TowerWeights<'a> {
    /// Loads them onto a backend; `progress` is called with bytes of the files as they are done.
    pub(crate) fn load(
        files: &'a WeightSource,
        backend: &'a dyn Backend,
        precision: Precision,
        progress: &'a dyn Fn(u64),
    ) -> Result<Self, EngineError> {
        Ok(Self { loads: true, progress, ..Self::count(files, Some(backend), precision)? })
    }

    /// Counts only: what is returned is empty.
    pub(crate) fn count(
        files: &'a WeightSource,
        backend: Option<&'a dyn Backend>,
        precision: Precision,
    ) -> Result<Self, EngineError> {
        let is_host = backend.map_or(Ok(true), |backend| backend.memory().map(|memory| memory.is_host))?;
        Ok(Self { files, backend, is_host, precision, loads: false, progress: &|_| {}, read: BTreeSet::new(), bytes: 0 })
    }

    /// The first of some beginnings that the name of a tensor has.
    pub(crate) fn place<P: AsRef<str>>(&self, places: &[P], name: &str) -> Result<String, EngineError> {
        let mut all = places.iter().map(AsRef::as_ref);
        let is_there = |place: &&str| self.files.tensor(&format!("{place}{name}")).is_ok();
        if let Some(place) = all.find(is_there) {
            return Ok(place.to_owned());
        }
        let names: Vec<_> = places.iter().map(|place| format!("`{}{name}`", place.as_ref())).collect();
        Err(self.error(&format!("there is no encoder: none of the tensors {}", names.join(", "))))
    }

    /// A matrix `[rows, cols]` with its bias, if it has one.
    pub(crate) fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Linear, EngineError> {
        self.rows_of_linear(name, shape[0], 0, shape)
    }

    /// Rows `first..first + rows` of a matrix of `num_rows` rows.
    pub(crate) fn rows_of_linear(
        &mut self,
        name: &str,
        num_rows: usize,
        first: usize,
        [rows, cols]: [usize; 2],
    ) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let view = self.matrix(&weight, [num_rows, cols])?;
        let bias = self.optional(&format!("{name}.bias"), num_rows)?;
        let bias = bias.map(|bias| bias[first..first + rows].to_vec());
        self.keep(weight, &view.slice_rows(first, first + rows)?, bias)
    }

    /// A matrix with its bias, of which each row is multiplied by a value of the vector `scale`, unless that has no name.
    pub(crate) fn scaled(&mut self, name: &str, scale: &str, shape: [usize; 2]) -> Result<Linear, EngineError> {
        if scale.is_empty() {
            return self.linear(name, shape);
        }
        let weight = format!("{name}.weight");
        let factors = self.values(scale, &shape[..1])?;
        let mut values = self.values(&weight, &shape)?;
        for (row, factor) in values.chunks_exact_mut(shape[1].max(1)).zip(&factors) {
            for value in row {
                *value *= factor;
            }
        }
        let bias = self.optional(&format!("{name}.bias"), shape[0])?;
        let bias = bias.map(|bias| bias.iter().zip(&factors).map(|(value, factor)| value * factor).collect());
        self.keep(weight, &of_floats(&values, shape[0], shape[1])?, bias)
    }

    /// A matrix that is stored as a convolution over squares of `side` by `side`, with its bias.
    pub(crate) fn convolution(&mut self, name: &str, [rows, cols]: [usize; 2], side: usize) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let values = self.values(&weight, &[rows, cols / (side * side).max(1), side, side])?;
        let bias = self.optional(&format!("{name}.bias"), rows)?;
        self.keep(weight, &of_floats(&values, rows, cols)?, bias)
    }

    /// A matrix that is stored as a convolution over single places, with its bias.
    pub(crate) fn pointwise(&mut self, name: &str, [rows, cols]: [usize; 2]) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let stored = self.matrix_of(&weight, &[rows, cols, 1, 1])?;
        let view = WeightView::new(stored.dtype, rows, cols, Bytes::from_vec(stored.bytes().to_vec()))?;
        stored.release();
        let bias = self.optional(&format!("{name}.bias"), rows)?;
        self.keep(weight, &view, bias)
    }

    /// A convolution over squares of `channels`, with those of each place of a square together, and zeros up to a multiple of
    /// the columns that a GPU takes at once.
    pub(crate) fn over_squares(&mut self, name: &str, [rows, channels]: [usize; 2], side: usize) -> Result<Linear, EngineError> {
        let (weight, area) = (format!("{name}.weight"), side * side);
        let stored = self.values(&weight, &[rows, channels, side, side])?;
        let cols = (channels * area).next_multiple_of(COLUMNS);
        let mut values = vec![0.0; rows * cols];
        for (row, stored) in values.chunks_exact_mut(cols).zip(stored.chunks_exact(channels * area)) {
            stored.iter().enumerate().for_each(|(at, value)| row[at % area * channels + at / area] = *value);
        }
        let bias = self.optional(&format!("{name}.bias"), rows)?;
        self.keep(weight, &of_floats(&values, rows, cols)?, bias)
    }

    /// A convolution over `width` rows that follow each other, as a matrix over the values of these rows one behind the other,
    /// with its bias.
    pub(crate) fn over_time(&mut self, name: &str, [rows, cols]: [usize; 2], width: usize) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let stored = self.values(&weight, &[rows, cols, width])?;
        let value = |at: usize| stored[at / (width * cols) * width * cols + at % cols * width + at / cols % width];
        let values: Vec<f32> = (0..stored.len()).map(value).collect();
        let bias = self.optional(&format!("{name}.bias"), rows)?;
        self.keep(weight, &of_floats(&values, rows, width * cols)?, bias)
    }

    /// Rows of a matrix that is stored as a convolution over one place, with their biases.
    pub(crate) fn rows_over_time(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
        own: Range<usize>,
    ) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let values = self.values(&weight, &[rows, cols, 1])?;
        let bias = self.optional(&format!("{name}.bias"), rows)?;
        let bias = bias.map(|bias| bias[own.clone()].to_vec());
        self.keep(weight, &of_floats(&values[own.start * cols..own.end * cols], own.len(), cols)?, bias)
    }

    /// A square matrix for heads whose rows that rotate together are neighbours in the file, with these half a head apart.
    pub(crate) fn unpaired(&mut self, name: &str, size: usize, num_heads: usize) -> Result<Linear, EngineError> {
        let half = size / num_heads / 2;
        self.reordered(name, size, |row| row / (2 * half) * 2 * half + row % half * 2 + row / half % 2)
    }

    /// A square matrix whose rows lie elsewhere in the file: row `row` is the file's row `stored(row)`.
    pub(crate) fn reordered(&mut self, name: &str, size: usize, stored: impl Fn(usize) -> usize) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let view = self.matrix(&weight, [size; 2])?;
        let bytes = (0..size).flat_map(|row| view.row(stored(row))).copied().collect();
        view.release();
        let bias = self.optional(&format!("{name}.bias"), size)?;
        let bias = bias.map(|bias| (0..size).map(|row| bias[stored(row)]).collect());
        self.keep(weight, &WeightView::new(view.dtype, size, size, Bytes::from_vec(bytes))?, bias)
    }

    fn matrix(&mut self, name: &str, asked: [usize; 2]) -> Result<WeightView, EngineError> {
        self.matrix_of(name, &asked)
    }

    fn matrix_of(&mut self, name: &str, asked: &[usize]) -> Result<WeightView, EngineError> {
        self.read.insert(name.to_owned());
        let (view, shape) = self.files.tensor(name)?;
        if shape == asked { Ok(view) } else { Err(self.wrong_shape(name, &shape, asked)) }
    }

    /// Where they lie, for errors.
    pub(crate) fn path(&self) -> &Path {
        self.files.path()
    }

    /// The tensors that nothing has asked for, in order.
    pub(crate) fn unread(&self) -> BTreeSet<&str> {
        self.files.tensor_names().into_iter().filter(|name| !self.read.contains(*name)).collect()
    }

    /// The matrix whose transpose `[cols, rows]` is stored by that name.
    pub(crate) fn transposed(&mut self, name: &str, [rows, cols]: [usize; 2]) -> Result<Linear, EngineError> {
        let stored = self.values(name, &[cols, rows])?;
        let values: Vec<f32> = (0..rows * cols).map(|at| stored[at % cols * rows + at / cols]).collect();
        self.keep(name.to_owned(), &of_floats(&values, rows, cols)?, None)
    }

    /// The convolution over patches, `[rows, 3, frames, side, side]` or without frames, as a matrix over the values of a patch:
    /// the same frame in all, and zeros up to a multiple of the columns that a GPU takes at once. Each frame may have a tensor of
    /// its own: the second has `.1` behind the name of the first. Some files have it as a matrix.
    pub(crate) fn patches(
        &mut self,
        name: &str,
        rows: usize,
        layout: PatchLayout,
        [frames, side]: [usize; 2],
    ) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let matrix = [rows, 3 * side * side];
        let of_one: &[usize] = if layout == PatchLayout::Convolution { &[rows, 3, side, side] } else { &matrix };
        // Shapes are checked before memory is taken.
        let stored = if frames == 1 || self.files.tensor(&format!("{weight}.1")).is_ok() {
            let names = (0..frames).map(|frame| if frame == 0 { weight.clone() } else { format!("{weight}.{frame}") });
            names.map(|name| self.values(&name, of_one)).collect::<Result<Vec<_>, _>>()?
        } else {
            vec![self.values(&weight, &[rows, 3, frames, side, side])?]
        };
        let (area, frames) = (side * side, frames / stored.len());
        let cols = (3 * area).next_multiple_of(COLUMNS);
        let mut values = vec![0.0; rows * cols];
        for stored in &stored {
            if layout == PatchLayout::Pixels {
                for (row, stored) in values.chunks_exact_mut(cols).zip(stored.chunks_exact(3 * area)) {
                    stored.iter().enumerate().for_each(|(at, value)| row[at % 3 * area + at / 3] = *value);
                }
                continue;
            }
            for (row, stored) in values.chunks_exact_mut(cols).zip(stored.chunks_exact(3 * frames * area)) {
                for (to, from) in row.chunks_exact_mut(area).zip(stored.chunks_exact(frames * area)) {
                    for frame in from.chunks_exact(area) {
                        to.iter_mut().zip(frame).for_each(|(to, from)| *to += from);
                    }
                }
            }
        }
        let bias = self.optional(&format!("{name}.bias"), rows)?;
        self.keep(weight, &of_floats(&values, rows, cols)?, bias)
    }

    /// The same over the values of several frames, which lie channel by channel and in each frame by frame.
    pub(crate) fn frame_patches(&mut self, name: &str, rows: usize, [frames, side]: [usize; 2]) -> Result<Linear, EngineError> {
        let weight = format!("{name}.weight");
        let stored = self.values(&weight, &[rows, 3, frames, side, side])?;
        let (len, cols) = (3 * frames * side * side, (3 * frames * side * side).next_multiple_of(COLUMNS));
        let mut values = vec![0.0; rows * cols];
        for (row, stored) in values.chunks_exact_mut(cols).zip(stored.chunks_exact(len)) {
            row[..len].copy_from_slice(stored);
        }
        let bias = self.optional(&format!("{name}.bias"), rows)?;
        self.keep(format!("{weight} of frames"), &of_floats(&values, rows, cols)?, bias)
    }

    fn keep(&mut self, name: String, view: &WeightView, bias: Option<Vec<f32>>) -> Result<Linear, EngineError> {
        let shape = [view.rows, view.cols];
        let is_eight_bits = self.is_host
            && self.precision == Precision::Fast
            && !matches!(view.dtype, DType::Ggml(_))
            && view.cols.is_multiple_of(32);
        let bias_bytes = bias.as_deref().map_or(0, size_of_val) as u64;
        (self.progress)(view.bytes().len() as u64);
        let Some(backend) = self.backend.filter(|_| self.loads) else {
            let stored = view.bytes().len() as u64;
            let dtype = if is_eight_bits { EIGHT_BITS } else { view.dtype };
            self.bytes += self.backend.map_or(stored, |it| it.linear_bytes(dtype, shape, self.precision)) + bias_bytes;
            return Ok(Linear::new(shape, 0, false, Arc::new(())));
        };
        let packed = match EIGHT_BITS {
            DType::Ggml(format) if is_eight_bits => Some(quantize(&name, view, format, None, backend.info().num_threads)?),
            _ => None,
        };
        let options = LinearOptions { name, precision: self.precision, bias };
        let linear = backend.load_linear(packed.as_ref().unwrap_or(view), &options)?;
        if packed.is_some() || !linear.is_in_place() {
            view.release();
        }
        self.bytes += linear.bytes() + bias_bytes;
        Ok(linear)
    }

    /// A norm over `len` values; `offset` is added to its weights.
    pub(crate) fn norm(
        &mut self,
        name: &str,
        len: usize,
        (kind, eps, offset): (NormKind, f32, f32),
    ) -> Result<Norm, EngineError> {
        let mut weight = self.values(&format!("{name}.weight"), &[len])?;
        for value in &mut weight {
            *value += offset;
        }
        let bias = if kind == NormKind::Layer { self.optional(&format!("{name}.bias"), len)? } else { None };
        self.bytes += (size_of_val(&weight[..]) + bias.as_deref().map_or(0, size_of_val)) as u64;
        Ok(Norm { kind, weight: weight.into(), bias: bias.map(Arc::new), eps })
    }

    /// Values that are kept as floats.
    pub(crate) fn constant(&mut self, name: &str, shape: &[usize]) -> Result<Constant, EngineError> {
        let values = self.values(name, shape)?;
        self.bytes += size_of_val(&values[..]) as u64;
        Ok(values.into())
    }

    /// A matrix of floats, used as it is stored.
    pub(crate) fn float_rows(&mut self, name: &str, shape: [usize; 2]) -> Result<WeightView, EngineError> {
        let view = self.matrix(name, shape)?;
        if matches!(view.dtype, DType::Ggml(_)) {
            return Err(self.error(&format!("tensor `{name}` has type {}; it must be F32, F16 or BF16", view.dtype)));
        }
        (self.progress)(view.bytes().len() as u64);
        self.bytes += view.bytes().len() as u64;
        Ok(view)
    }

    fn optional(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, EngineError> {
        if self.files.tensor(name).is_err() { Ok(None) } else { self.values(name, &[len]).map(Some) }
    }

    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        self.read.insert(name.to_owned());
        let (view, stored) = self.files.tensor(name)?;
        // Some vectors are stored as those of a batch of one.
        let is_that = stored == shape || stored.iter().filter(|edge| **edge != 1).eq(shape.iter().filter(|edge| **edge != 1));
        if !is_that {
            return Err(self.wrong_shape(name, &stored, shape));
        }
        let values = floats(view.dtype, view.bytes());
        values.ok_or_else(|| self.error(&format!("tensor `{name}` has type {}; it must be F32, F16 or BF16", view.dtype)))
    }

    fn wrong_shape(&self, name: &str, stored: &[usize], asked: &[usize]) -> EngineError {
        self.error(&format!("tensor `{name}` has shape {stored:?}; the configuration asks for {asked:?}"))
    }

    fn error(&self, why: &str) -> EngineError {
        EngineError::Load(format!("{}: {why}", self.files.path().display()))
    }
}

/// A matrix of floats.
fn of_floats(values: &[f32], rows: usize, cols: usize) -> Result<WeightView, EngineError> {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Ok(WeightView::new(DType::F32, rows, cols, Bytes::from_vec(bytes))?)
}
