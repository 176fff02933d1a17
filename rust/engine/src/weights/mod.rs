//! Weights as they lie in files; names are translated here and only here.

mod chunks;
pub(crate) mod ggml;
pub mod gguf;
mod heads;
pub mod hub;
pub(crate) mod meta;
pub mod metadata;
pub mod names;
pub(crate) mod phi4;
mod pickle;
mod pytorch;
pub mod safetensors;
mod stacked;

use std::{ops::Range, path::Path};

use device::{
    DType, WeightView,
    mmap::{Bytes, FileWatch},
};
use half::{bf16, f16};

pub(crate) use chunks::write_chunks;
pub use gguf::GgufFiles;
pub use metadata::{Metadata, MetadataValue};
pub use names::{CrossRole, MambaRole, ModelPlace, Names, Role, WeightId, XieluRole};
pub use safetensors::SafetensorsFiles;

use crate::EngineError;

/// Tensors of one kind in a layer at most.
const MAX_NUMBERED: usize = 1 << 16;

/// A matrix that a model asks for.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Its role.
    pub id: WeightId,
    /// `[rows, cols]`.
    pub shape: [usize; 2],
    /// Where it is in checkpoints that keep several as one.
    pub fused: Option<FusedRows>,
    /// It must have a bias; else it may.
    pub needs_bias: bool,
    /// Which of the experts it belongs to.
    pub expert: Option<ExpertIndex>,
    /// It is multiplied exactly, whatever the others are.
    pub is_exact: bool,
}

/// One of the experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertIndex {
    /// Which, from 0.
    pub index: usize,
    /// Of so many.
    pub count: usize,
}

impl Matrix {
    /// A matrix that checkpoints keep by itself.
    pub const fn new(id: WeightId, shape: [usize; 2], needs_bias: bool) -> Self {
        Self { id, shape, fused: None, needs_bias, expert: None, is_exact: false }
    }

    /// Matrices of so many rows each that some checkpoints keep as one, `whole`, one after the other.
    pub fn fused<const N: usize>(whole: WeightId, parts: [(Role, usize); N], cols: usize, needs_bias: bool) -> [Self; N] {
        let num_rows = parts.iter().map(|(_, rows)| rows).sum();
        let mut first_row = 0;
        parts.map(|(role, rows)| {
            let fused = Some(FusedRows { sign: parts[0].0, whole: whole.role, num_rows, first_row, num_groups: 1 });
            first_row += rows;
            Self { fused, ..Self::new(whole.with_role(role), [rows, cols], needs_bias) }
        })
    }

    /// The same, where the name of the first one may be that of the whole, and this one's is not.
    #[must_use]
    pub fn known_by(mut self, sign: Role) -> Self {
        if let Some(fused) = &mut self.fused {
            fused.sign = sign;
        }
        self
    }

    /// The same, of checkpoints where the matrices take turns: so many rows of each for the first head, then for the next.
    #[must_use]
    pub fn in_groups(mut self, num_groups: usize) -> Self {
        if let Some(fused) = &mut self.fused {
            (fused.first_row, fused.num_groups) = (fused.first_row / num_groups, num_groups);
        }
        self
    }

    /// The same of an expert.
    #[must_use]
    pub const fn of_expert(self, expert: Option<ExpertIndex>) -> Self {
        Self { expert, ..self }
    }

    /// The same, multiplied exactly.
    #[must_use]
    pub const fn exact(self) -> Self {
        Self { is_exact: true, ..self }
    }
}

/// Rows of a fused matrix.
#[derive(Clone, Copy, Debug)]
pub struct FusedRows {
    /// Checkpoints that have this matrix by itself have all of them so.
    pub sign: Role,
    /// The fused matrix.
    pub whole: Role,
    /// All rows of that.
    pub num_rows: usize,
    /// The first row.
    pub first_row: usize,
    /// Groups of equally many rows of the fused matrix; each has its part of the rows, from the first one of the group on.
    pub num_groups: usize,
}

impl FusedRows {
    /// Where in the fused matrix the row of one of `rows` rows is.
    pub const fn row(&self, rows: usize, row: usize) -> usize {
        let own = rows / self.num_groups;
        row / own * (self.num_rows / self.num_groups) + self.first_row + row % own
    }
}

/// The files of a model, asked by role.
pub enum WeightSource {
    /// GGUF files.
    Gguf(GgufFiles),
    /// A Hugging Face checkpoint.
    Safetensors {
        /// Its files.
        files: SafetensorsFiles,
        /// What its architecture calls otherwise than others.
        names: Names,
        /// Where the decoder lies among the parts of a larger model.
        place: ModelPlace,
    },
}

impl WeightSource {
    /// The weight's name in these files.
    pub fn name(&self, id: WeightId) -> String {
        match self {
            Self::Gguf(files) => {
                let otherwise = || id.gguf_otherwise().filter(|name| files.contains(&numbered(name, 0)));
                let name = id.gguf();
                if files.contains(&name) { name } else { otherwise().unwrap_or(name) }
            }
            Self::Safetensors { files, names, place } => {
                let name = place.name(id.hugging_face(names));
                match id.hugging_face_otherwise(names).map(|other| place.name(other)) {
                    Some(other) if !files.contains(&name) && files.contains(&other) => other,
                    _ => name,
                }
            }
        }
    }

    /// Adds a file of one weight, and its bias, which calls it otherwise: `linear.weight` in a folder of sentence-transformers.
    ///
    /// # Errors
    /// [`EngineError::Load`] for a file that cannot be read.
    pub(crate) fn add_file(&mut self, id: WeightId, path: &Path) -> Result<(), EngineError> {
        let name = self.name(id);
        match self {
            Self::Gguf(_) => Err(EngineError::Internal(format!("{} beside a GGUF file", path.display()))),
            Self::Safetensors { files, .. } => files.add_file(path, name.strip_suffix("linear.weight").unwrap_or(&name)),
        }
    }

    /// The shape of a matrix that is stored by itself.
    pub(crate) fn matrix_shape(&self, id: WeightId) -> Result<[usize; 2], EngineError> {
        let name = self.name(id);
        let (view, shape) = self.tensor(&name)?;
        if shape.len() == 2 {
            return Ok([view.rows, view.cols]);
        }
        Err(self.error(&format!("tensor `{name}` has shape {shape:?}; it must be a matrix")))
    }

    /// Whether the files have the weight.
    pub fn contains(&self, id: WeightId) -> bool {
        let name = numbered(&self.name(id), 0);
        match self {
            Self::Gguf(files) => files.contains(&name),
            Self::Safetensors { files, .. } => files.contains(&name) || stacked::is_mxfp4(files, &name),
        }
    }

    /// How the matrix is stored, whose shape is not looked at.
    pub fn dtype(&self, matrix: &Matrix) -> Result<DType, EngineError> {
        if let (Self::Safetensors { files, names, .. }, Some(_)) = (self, matrix.expert)
            && !matrix.id.place(names).is_plain()
        {
            return stacked::dtype(files, &self.name(matrix.id));
        }
        if self.is_of_all_heads(matrix) {
            return self.dtype_of_head(matrix);
        }
        if let Self::Safetensors { files, .. } = self {
            let id = self.fused(matrix).map_or(matrix.id, |(id, _)| id);
            if self.is_transposed(id) && matrix.expert.is_none() {
                return Ok(files.tensor(&self.name(id))?.0.dtype);
            }
            if let Some(packed) = files.packed(&self.matrix_name(id, matrix.expert)) {
                return packed.dtype();
            }
        }
        Ok(self.stored(matrix)?.1.dtype)
    }

    /// The tensors that a weight is stored in: of experts, or of several vectors, one or many.
    pub(crate) fn stored_names(&self, id: WeightId) -> Vec<String> {
        let name = self.name(id);
        if !name.contains('*') {
            return if self.contains(id) { vec![name] } else { Vec::new() };
        }
        let is_there = |name: &String| self.tensor(name).is_ok();
        (0..MAX_NUMBERED).map(|number| numbered(&name, number)).take_while(is_there).collect()
    }

    /// Whether experts are stacked otherwise than one after the other: see [`stacked`].
    pub(crate) fn is_stacked_otherwise(&self, id: WeightId) -> bool {
        let Self::Safetensors { files, names, .. } = self else { return false };
        !id.place(names).is_plain() || stacked::is_mxfp4(files, &self.name(id))
    }

    /// [`Self::stored_names`], with those of the parts of what is stored as MXFP4.
    pub(crate) fn names_of_parts(&self, id: WeightId) -> Vec<String> {
        match self {
            Self::Safetensors { files, .. } if stacked::is_mxfp4(files, &self.name(id)) => {
                stacked::mxfp4_names(&self.name(id)).into()
            }
            _ => self.stored_names(id),
        }
    }

    /// Whether a tensor belongs to what a larger model has beside its decoder.
    pub(crate) fn is_beside_decoder(&self, name: &str) -> bool {
        matches!(self, Self::Safetensors { place, .. } if !place.is_alone() && ModelPlace::plain(name) == name)
    }

    /// The values of a float tensor, whatever its shape.
    pub(crate) fn floats(&self, name: &str) -> Result<Vec<f32>, EngineError> {
        let (view, _) = self.tensor(name)?;
        let values = floats(view.dtype, view.bytes()).ok_or_else(|| self.not_floats(name, &view))?;
        view.release();
        Ok(values)
    }

    /// The type of a tensor that is stored by itself.
    pub fn stored_type(&self, id: WeightId) -> Option<DType> {
        let name = self.name(id);
        self.tensor(&name).ok().map(|(view, _)| view.dtype)
    }

    /// A matrix, which must have this shape.
    pub fn matrix(&self, id: WeightId, shape: [usize; 2]) -> Result<WeightView, EngineError> {
        self.named(&self.name(id), &shape)
    }

    /// The tensor that holds a matrix, or a part of it.
    pub(crate) fn tensor_name(&self, matrix: &Matrix) -> String {
        let id = if self.is_of_all_heads(matrix) { matrix.id.with_role(Role::AttnKvUp) } else { matrix.id };
        let id = self.fused(matrix).map_or(id, |(id, _)| id);
        numbered(&self.name(id), matrix.expert.map_or(0, |expert| expert.index))
    }

    /// The names of all tensors, in no order.
    pub(crate) fn tensor_names(&self) -> Vec<&str> {
        match self {
            Self::Gguf(files) => files.names().collect(),
            Self::Safetensors { files, .. } => files.names().collect(),
        }
    }

    /// A tensor and its shape, as a matrix: all but its last dimension are rows.
    pub(crate) fn tensor(&self, name: &str) -> Result<(WeightView, Vec<usize>), EngineError> {
        match self {
            Self::Gguf(files) => files.tensor(name),
            Self::Safetensors { files, .. } => files.tensor(name),
        }
    }

    /// A tensor of this shape as a matrix: all but its last dimension are rows.
    fn named(&self, name: &str, shape: &[usize]) -> Result<WeightView, EngineError> {
        let (view, stored) = self.tensor(name)?;
        // A single row may be a vector.
        if stored != shape
            && !stacked::is_flat(&stored, shape)
            && !(stored.len() == 1 && shape.len() == 2 && shape == [1, stored[0]])
        {
            return Err(self.error(&format!("tensor `{name}` has shape {stored:?}; the configuration asks for {shape:?}")));
        }
        Ok(view)
    }

    /// The same of an expert, of tensors that have a number each, or of one in which they are stacked.
    fn of_expert(&self, id: WeightId, expert: Option<ExpertIndex>, shape: &[usize]) -> Result<WeightView, EngineError> {
        let name = self.name(id);
        if self.is_transposed(id) && expert.is_none() {
            return match shape {
                [rows, cols] => self.transposed(&name, [*rows, *cols], 0..*rows),
                _ => self.named(&name, shape),
            };
        }
        if let (Self::Safetensors { files, names, .. }, Some(expert)) = (self, expert) {
            let place = id.place(names);
            if !place.is_plain() || stacked::is_mxfp4(files, &name) {
                return stacked::read(files, &name, place, expert, shape);
            }
        }
        match expert {
            Some(ExpertIndex { index, count }) if !name.contains('*') => {
                let stacked = self.named(&name, &[&[count], shape].concat())?;
                let rows = stacked.rows / count;
                Ok(stacked.slice_rows(index * rows, (index + 1) * rows)?)
            }
            expert => self.named(&numbered(&name, expert.map_or(0, |expert| expert.index)), shape),
        }
    }

    /// Whether a matrix lies in the files as its transpose. What is packed never does.
    pub(crate) fn is_transposed(&self, id: WeightId) -> bool {
        let Self::Safetensors { files, names, .. } = self else { return false };
        id.place(names).is_transposed && files.packed(&self.name(id)).is_none()
    }

    /// Some rows of a matrix of this shape, which lies in the files as its transpose.
    fn transposed(&self, name: &str, [rows, cols]: [usize; 2], own: Range<usize>) -> Result<WeightView, EngineError> {
        let view = self.named(name, &[cols, rows])?;
        if matches!(view.dtype, DType::Ggml(_)) {
            return Err(self.not_floats(name, &view));
        }
        let size = view.row_bytes() / view.cols.max(1);
        let mut bytes = Vec::with_capacity(own.len() * cols * size);
        for row in own.clone() {
            for col in 0..cols {
                bytes.extend_from_slice(&view.row(col)[row * size..][..size]);
            }
        }
        view.release();
        Ok(WeightView::new(view.dtype, own.len(), cols, Bytes::from_vec(bytes))?)
    }

    /// A float vector, which must have this length.
    pub fn vector(&self, id: WeightId, len: usize) -> Result<Vec<f32>, EngineError> {
        self.vectors(id, [1, len])
    }

    /// Float vectors of the same length one after the other, `[rows * cols]`: the rows of a matrix, or tensors with numbered
    /// names.
    pub fn vectors(&self, id: WeightId, [rows, cols]: [usize; 2]) -> Result<Vec<f32>, EngineError> {
        let name = self.name(id);
        let mut all = Vec::new();
        if rows > 1 && !name.contains('*') {
            all.push(self.matrix(id, [rows, cols])?);
        } else {
            for row in 0..rows {
                all.push(self.row(&numbered(&name, row), cols)?);
            }
        }
        let mut values = Vec::with_capacity(rows * cols);
        for view in all {
            let Some(floats) = floats(view.dtype, view.bytes()) else {
                return Err(self.not_floats(&name, &view));
            };
            values.extend(floats);
            view.release();
        }
        Ok(values)
    }

    /// So many floats, whatever the shape of the tensor.
    pub fn values(&self, id: WeightId, len: usize) -> Result<Vec<f32>, EngineError> {
        let name = self.name(id);
        let (view, shape) = self.tensor(&name)?;
        if view.rows.checked_mul(view.cols) != Some(len) {
            return Err(self.error(&format!("tensor `{name}` has shape {shape:?}; the configuration asks for {len} values")));
        }
        let values = floats(view.dtype, view.bytes()).ok_or_else(|| self.not_floats(&name, &view))?;
        view.release();
        Ok(values)
    }

    fn row(&self, name: &str, len: usize) -> Result<WeightView, EngineError> {
        let view = match self {
            Self::Gguf(files) => files.vector(name)?,
            Self::Safetensors { files, .. } => files.vector(name)?,
        };
        if view.cols != len {
            return Err(self.error(&format!("tensor `{name}` has {} values; the configuration asks for {len}", view.cols)));
        }
        Ok(view)
    }

    /// A float vector if the files have it.
    pub fn optional_vector(&self, id: WeightId, len: usize) -> Result<Option<Vec<f32>>, EngineError> {
        self.contains(id).then(|| self.vector(id, len)).transpose()
    }

    /// A matrix with the id of what holds it: its own, or that of a fused one.
    pub fn stored(&self, matrix: &Matrix) -> Result<(WeightId, WeightView), EngineError> {
        if self.is_of_all_heads(matrix) {
            return Ok((matrix.id.with_role(Role::AttnKvUp), self.of_head(matrix)?));
        }
        let Some((id, fused)) = self.fused(matrix) else {
            return Ok((matrix.id, self.of_expert(matrix.id, matrix.expert, &matrix.shape)?));
        };
        let [rows, cols] = matrix.shape;
        if self.is_transposed(id) && matrix.expert.is_none() && fused.num_groups == 1 {
            let own = fused.first_row..fused.first_row + rows;
            return Ok((id, self.transposed(&self.name(id), [fused.num_rows, cols], own)?));
        }
        let whole = self.of_expert(id, matrix.expert, &[fused.num_rows, cols])?;
        if fused.num_groups > 1 {
            return Ok((id, rows_of_groups(&whole, &fused, rows)?));
        }
        Ok((id, whole.slice_rows(fused.first_row, fused.first_row + rows)?))
    }

    /// Whether a bias is stored for the matrix.
    pub fn has_bias(&self, matrix: &Matrix) -> bool {
        self.contains(self.fused(matrix).map_or(matrix.id, |(id, _)| id).bias())
    }

    /// The bias of a matrix, `[rows]`; `None` where it may lack one and does.
    pub fn bias(&self, matrix: &Matrix) -> Result<Option<Vec<f32>>, EngineError> {
        let rows = matrix.shape[0];
        if !matrix.needs_bias && !self.has_bias(matrix) {
            return Ok(None);
        }
        let fused = self.fused(matrix);
        let (id, num_rows) = fused.map_or((matrix.id, rows), |(id, fused)| (id, fused.num_rows));
        let all = match matrix.expert {
            None => self.vector(id.bias(), num_rows)?,
            expert => {
                let view = self.of_expert(id.bias(), expert, &[num_rows])?;
                floats(view.dtype, view.bytes()).ok_or_else(|| self.not_floats(&self.matrix_name(id.bias(), expert), &view))?
            }
        };
        Ok(Some(match fused {
            Some((_, fused)) => (0..rows).map(|row| all[fused.row(rows, row)]).collect(),
            None => all,
        }))
    }

    fn not_floats(&self, name: &str, view: &WeightView) -> EngineError {
        self.error(&format!("tensor `{name}` has type {}; it must be F32, F16 or BF16", view.dtype))
    }

    /// The name of what holds a matrix, for errors.
    pub fn matrix_name(&self, id: WeightId, expert: Option<ExpertIndex>) -> String {
        let name = self.name(id);
        match expert {
            Some(ExpertIndex { index, .. }) if !name.contains('*') => format!("{name}[{index}]"),
            expert => numbered(&name, expert.map_or(0, |expert| expert.index)),
        }
    }

    /// Where these files have a matrix among others.
    pub(crate) fn fused(&self, matrix: &Matrix) -> Option<(WeightId, FusedRows)> {
        let there = |role| self.contains(matrix.id.with_role(role));
        let fused = matrix.fused.filter(|fused| !there(fused.sign) && there(fused.whole))?;
        Some((matrix.id.with_role(fused.whole), fused))
    }

    /// Rows of the token embedding.
    pub fn vocab_size(&self) -> Result<usize, EngineError> {
        let name = self.name(WeightId::global(Role::Embedding));
        Ok(self.tensor(&name)?.0.rows)
    }

    /// Bytes of all tensors.
    pub fn weight_bytes(&self) -> u64 {
        match self {
            Self::Gguf(files) => files.weight_bytes(),
            Self::Safetensors { files, .. } => files.weight_bytes(),
        }
    }

    /// Watches the files, as long as they are in use.
    pub fn watches(&self) -> &[FileWatch] {
        match self {
            Self::Gguf(files) => files.watches(),
            Self::Safetensors { files, .. } => files.watches(),
        }
    }

    /// How a checkpoint's configuration says that its weights are quantized.
    pub fn hub_format(&self) -> Option<hub::HubFormat> {
        match self {
            Self::Gguf(_) => None,
            Self::Safetensors { files, .. } => files.format(),
        }
    }

    /// GGUF metadata.
    pub fn metadata(&self) -> Option<&Metadata> {
        match self {
            Self::Gguf(files) => Some(files.metadata()),
            Self::Safetensors { .. } => None,
        }
    }

    /// The file or folder.
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(files) => files.path(),
            Self::Safetensors { files, .. } => files.path(),
        }
    }

    fn error(&self, why: &str) -> EngineError {
        EngineError::Load(format!("{}: {why}", self.path().display()))
    }
}

fn rows_of_groups(whole: &WeightView, fused: &FusedRows, rows: usize) -> Result<WeightView, EngineError> {
    let bytes = (0..rows).flat_map(|row| whole.row(fused.row(rows, row))).copied().collect();
    whole.release();
    Ok(WeightView::new(whole.dtype, rows, whole.cols, Bytes::from_vec(bytes))?)
}

/// A name with a number in place of `*`.
fn numbered(name: &str, number: usize) -> String {
    name.replace('*', &number.to_string())
}

/// The values of a safetensors tensor; `None` unless it is of floats.
pub(crate) fn decode_floats(dtype: ::safetensors::Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    floats(safetensors::float_dtype(dtype)?, bytes)
}

/// The values of a float tensor; `None` for a block format.
pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    Some(match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        DType::Ggml(_) => return None,
    })
}
