//! Weights as they lie in files; names are translated here and only here.

pub mod gguf;
pub mod metadata;
pub mod names;
pub mod safetensors;

use std::path::Path;

use device::{DType, WeightView};
use half::{bf16, f16};

pub use gguf::GgufFiles;
pub use metadata::{Metadata, MetadataValue};
pub use names::{Part, WeightId};
pub use safetensors::SafetensorsFiles;

use crate::EngineError;

/// The files of a model, asked by role.
pub enum WeightSource {
    /// GGUF files.
    Gguf(GgufFiles),
    /// A Hugging Face checkpoint.
    Safetensors {
        /// Its files.
        files: SafetensorsFiles,
        /// Whether the model has norms after attention and feed-forward too, which changes names.
        sandwich: bool,
    },
}

impl WeightSource {
    /// The weight's name in these files.
    pub fn name(&self, id: WeightId) -> String {
        match self {
            Self::Gguf(_) => id.gguf(),
            Self::Safetensors { sandwich, .. } => id.hugging_face(*sandwich),
        }
    }

    /// Whether the files have the weight.
    pub fn contains(&self, id: WeightId) -> bool {
        let name = self.name(id);
        match self {
            Self::Gguf(files) => files.contains(&name),
            Self::Safetensors { files, .. } => files.contains(&name),
        }
    }

    /// A matrix, which must have this shape.
    pub fn matrix(&self, id: WeightId, [rows, cols]: [usize; 2]) -> Result<WeightView, EngineError> {
        let name = self.name(id);
        let view = match self {
            Self::Gguf(files) => files.matrix(&name)?,
            Self::Safetensors { files, .. } => files.matrix(&name)?,
        };
        if [view.rows, view.cols] != [rows, cols] {
            return Err(self.error(&format!(
                "tensor `{name}` has shape [{}, {}]; the configuration asks for [{rows}, {cols}]",
                view.rows, view.cols
            )));
        }
        Ok(view)
    }

    /// A float vector, which must have this length.
    pub fn vector(&self, id: WeightId, len: usize) -> Result<Vec<f32>, EngineError> {
        let name = self.name(id);
        let view = match self {
            Self::Gguf(files) => files.vector(&name)?,
            Self::Safetensors { files, .. } => files.vector(&name)?,
        };
        if view.cols != len {
            return Err(self.error(&format!("tensor `{name}` has {} values; the configuration asks for {len}", view.cols)));
        }
        let values = floats(&view);
        view.release();
        values.ok_or_else(|| self.error(&format!("tensor `{name}` has type {}; a vector must be F32, F16 or BF16", view.dtype)))
    }

    /// A float vector if the files have it.
    pub fn optional_vector(&self, id: WeightId, len: usize) -> Result<Option<Vec<f32>>, EngineError> {
        self.contains(id).then(|| self.vector(id, len)).transpose()
    }

    /// How the weight is stored.
    pub fn dtype(&self, id: WeightId) -> Result<DType, EngineError> {
        let name = self.name(id);
        match self {
            Self::Gguf(files) => Ok(files.matrix(&name)?.dtype),
            Self::Safetensors { files, .. } => Ok(files.matrix(&name)?.dtype),
        }
    }

    /// Rows of the token embedding.
    pub fn vocab_size(&self) -> Result<usize, EngineError> {
        let name = self.name(WeightId::global(Part::Embedding));
        match self {
            Self::Gguf(files) => Ok(files.matrix(&name)?.rows),
            Self::Safetensors { files, .. } => Ok(files.matrix(&name)?.rows),
        }
    }

    /// Bytes of all tensors.
    pub fn weight_bytes(&self) -> u64 {
        match self {
            Self::Gguf(files) => files.weight_bytes(),
            Self::Safetensors { files, .. } => files.weight_bytes(),
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

/// The values of a float tensor; `None` for a block format.
fn floats(view: &WeightView) -> Option<Vec<f32>> {
    let bytes = view.bytes();
    Some(match view.dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        DType::Ggml(_) => return None,
    })
}
