//! Importance matrices: how much each column of a matrix counts when it is quantized, the mean square of what it is multiplied
//! by.
//!
//! llama.cpp's `llama-imatrix` writes them, in two kinds of files: an older binary one (`.dat`), and GGUF. Their bytes are
//! untrusted.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
};

use device::{DType, GgmlType};

use crate::{
    EngineError,
    json::read_bounded,
    model::{ModelFiles, visit::for_each_matrix},
    weights::{ExpertIndex, GgufFiles, Matrix, WeightSource},
};

/// Bytes of a file at most; those of the largest models have some hundred megabytes.
const MAX_BYTES: u64 = 2 << 30;
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// How much each column of each matrix counts.
#[derive(Debug)]
pub struct Importance {
    /// By the name of the tensor in a GGUF file: of each expert, `[experts * cols]`.
    values: HashMap<String, Vec<f32>>,
    path: PathBuf,
    /// The argument that named the path.
    argument: &'static str,
    /// Of all values.
    digest: blake3::Hash,
}

impl Importance {
    /// Reads a file of either kind.
    ///
    /// # Errors
    /// [`EngineError::Load`] for a file that cannot be read, is neither, or has values that are negative or not finite.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        let load = |why: String| EngineError::Load(format!("importance matrix {}: {why}", path.display()));
        let bytes = read_bounded(path, MAX_BYTES).map_err(|e| load(e.to_string()))?;
        let values = if bytes.starts_with(b"GGUF") { of_gguf(path)? } else { of_dat(&bytes).map_err(load)? };
        Self::checked(values, path, "imatrix", blake3::hash(&bytes)).map_err(load)
    }

    /// What was measured with the text at `path`: by the name of the tensor in a GGUF file, `[cols]`.
    ///
    /// # Errors
    /// [`EngineError::Load`] for values that are not finite.
    pub(crate) fn measured(values: HashMap<String, Vec<f32>>, path: &Path) -> Result<Self, EngineError> {
        let mut hasher = blake3::Hasher::new();
        let mut names: Vec<_> = values.keys().collect();
        names.sort_unstable();
        for name in names {
            hasher.update(name.as_bytes());
            for value in &values[name] {
                hasher.update(&value.to_le_bytes());
            }
        }
        let load = |why| EngineError::Load(format!("calibration_file {}: {why}", path.display()));
        Self::checked(values, path, "calibration_file", hasher.finalize()).map_err(load)
    }

    fn checked(
        values: HashMap<String, Vec<f32>>,
        path: &Path,
        argument: &'static str,
        digest: blake3::Hash,
    ) -> Result<Self, String> {
        if values.is_empty() {
            return Err("it has no entries".into());
        }
        if let Some((name, _)) = values.iter().find(|(_, all)| all.iter().any(|value| !value.is_finite() || *value < 0.0)) {
            return Err(format!("`{name}` has a value that is negative or not finite"));
        }
        Ok(Self { values, path: path.to_owned(), argument, digest })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Of the file's bytes.
    pub(crate) const fn digest(&self) -> &blake3::Hash {
        &self.digest
    }

    /// Of the columns of a matrix, `[cols]`, by the name of its tensor in a GGUF file; `None` where the file has none.
    ///
    /// # Errors
    /// [`EngineError::Load`] for so many columns, or experts, that it is of another model.
    pub(crate) fn columns(&self, name: &str, expert: Option<ExpertIndex>, cols: usize) -> Result<Option<&[f32]>, EngineError> {
        let Some(all) = self.values.get(name) else { return Ok(None) };
        let ExpertIndex { index, count } = expert.unwrap_or(ExpertIndex { index: 0, count: 1 });
        if Some(all.len()) != cols.checked_mul(count) {
            return Err(EngineError::Load(format!(
                "importance matrix {}: `{name}` has {} values, and the model {count} x {cols} columns: it is of another model",
                self.path.display(),
                all.len()
            )));
        }
        Ok(all.get(index * cols..(index + 1) * cols))
    }
}

impl Importance {
    /// Of the columns of a whole tensor in a GGUF file, `[cols]`, or of those of each expert's rows, `[experts * cols]`.
    ///
    /// # Errors
    /// As [`Self::columns`].
    pub(crate) fn of_tensor(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<Option<&[f32]>, EngineError> {
        let Some(all) = self.values.get(name) else { return Ok(None) };
        let count = all.len() / cols.max(1);
        if all.len() != count * cols || count == 0 || !rows.is_multiple_of(count) {
            self.columns(name, None, cols)?;
        }
        Ok(Some(all))
    }
}

/// Whether there is a quantizer that takes importance.
pub(crate) const fn takes_importance(format: GgmlType) -> bool {
    matches!(format, GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K)
}

/// Mean squares from sums of squares: a tensor each, and one with how many were added up for each expert.
fn of_gguf(path: &Path) -> Result<HashMap<String, Vec<f32>>, EngineError> {
    let files = GgufFiles::open(&[path.to_owned()])?;
    let load = |why: String| EngineError::Load(format!("importance matrix {}: {why}", path.display()));
    let kind = files.metadata().str("general.type").unwrap_or("model");
    if kind != "imatrix" {
        return Err(load(format!("a GGUF file of the type {kind:?} instead of \"imatrix\"")));
    }
    let floats = |name: &str| -> Result<Vec<f32>, EngineError> {
        let (view, _) = files.tensor(name)?;
        if view.dtype != DType::F32 {
            return Err(load(format!("`{name}` is of {} instead of F32", view.dtype)));
        }
        Ok(view.bytes().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    };
    let mut values = HashMap::new();
    for name in files.names().filter_map(|name| name.strip_suffix(SUMS)) {
        let (mut sums, counts) = (floats(&format!("{name}{SUMS}"))?, floats(&format!("{name}{COUNTS}"))?);
        if counts.is_empty() || sums.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            return Err(load(format!("`{name}` has {} sums and {} counts", sums.len(), counts.len())));
        }
        let cols = sums.len() / counts.len();
        for (sums, count) in sums.chunks_exact_mut(cols).zip(counts) {
            mean(sums, count);
        }
        values.insert(name.to_owned(), sums);
    }
    Ok(values)
}

/// An expert that nothing went through has no columns that count for more.
fn mean(sums: &mut [f32], count: f32) {
    for sum in sums {
        *sum = if count > 0.0 { *sum / count } else { 1.0 };
    }
}

/// How many entries; of each its name, how often it was called, and its sums. What follows says how it was made.
fn of_dat(bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, String> {
    let mut rest = bytes;
    let mut take = |len: usize| -> Result<&[u8], String> {
        let (taken, left) = rest.split_at_checked(len).ok_or("neither a GGUF file nor a whole .dat file of llama.cpp")?;
        rest = left;
        Ok(taken)
    };
    let count = int(take(4)?, "number of entries")?;
    let mut values = HashMap::new();
    for _ in 0..count {
        let len = int(take(4)?, "length of a name")?;
        let name = String::from_utf8(take(len)?.to_vec()).map_err(|_| "a name is not UTF-8".to_owned())?;
        let calls = int(take(4)?, "number of calls")?;
        let len = int(take(4)?, "number of values")?.checked_mul(4).ok_or("too many values")?;
        let mut sums: Vec<_> = take(len)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        mean(&mut sums, calls as f32);
        if values.insert(name.clone(), sums).is_some() {
            return Err(format!("`{name}` occurs twice"));
        }
    }
    Ok(values)
}

/// What is not negative.
fn int(bytes: &[u8], what: &str) -> Result<usize, String> {
    let value = bytes.first_chunk().map_or(-1, |b| i32::from_le_bytes(*b));
    usize::try_from(value).map_err(|_| format!("the {what} is {value}: neither a GGUF file nor a .dat file of llama.cpp"))
}

/// Of the columns of a matrix, by its own name or that of what it is stored in.
///
/// # Errors
/// Those of [`Importance::columns`].
pub(crate) fn of_matrix<'a>(
    importance: &'a Importance,
    weights: &WeightSource,
    matrix: &Matrix,
) -> Result<Option<&'a [f32]>, EngineError> {
    let fused = weights.fused(matrix).map(|(id, _)| id);
    for id in [fused, Some(matrix.id)].into_iter().flatten() {
        if let Some(columns) = importance.columns(&id.gguf(), matrix.expert, matrix.shape[1])? {
            return Ok(Some(columns));
        }
    }
    Ok(None)
}

/// That importance does something for the model.
///
/// # Errors
/// [`EngineError::InvalidArgument`] where it does not, by the reason; those of [`Importance::columns`].
pub(crate) fn check(files: &ModelFiles) -> Result<(), EngineError> {
    let Some(importance) = files.importance() else { return Ok(()) };
    let given = format!("{} is {}", importance.argument, importance.path.display());
    if files.isq().is_none() {
        let text = format!("{given}, and nothing is quantized; say to what with in_situ_quant (--isq)");
        return Err(EngineError::InvalidArgument(text));
    }
    check_types(files, &given)?;
    let (weights, mut with, mut without, mut formats) = (files.weights(), 0, BTreeSet::new(), BTreeSet::new());
    for_each_quantized(files, |matrix, format| {
        if !takes_importance(format) {
            formats.insert(format.name());
        } else if of_matrix(importance, weights, matrix)?.is_some() {
            with += 1;
        } else {
            without.insert(matrix.id.gguf());
        }
        Ok(())
    })?;
    let (names, others) = (joined(without.iter().map(String::as_str)), joined(formats.iter().copied()));
    if with == 0 {
        let text = format!("{given}, which has nothing about the matrices of this model ({names}): it is of another one");
        return Err(EngineError::InvalidArgument(text));
    }
    if !without.is_empty() || !formats.is_empty() {
        tracing::warn!(
            "{with} matrices are quantized with importance, but not those that {} has nothing about ({names}), nor those that \
             become {others}",
            importance.path.display()
        );
    }
    Ok(())
}

/// That some matrix of the layers becomes a type that takes importance.
///
/// # Errors
/// [`EngineError::InvalidArgument`]: none does.
pub(crate) fn check_types(files: &ModelFiles, given: &str) -> Result<(), EngineError> {
    let (Some(isq), mut is_of_use, mut formats) = (files.isq(), false, BTreeSet::new()) else { return Ok(()) };
    for_each_quantized(files, |matrix, format| {
        // The token embedding may be of a type that takes it where the layers are not.
        is_of_use |= takes_importance(format) && matrix.id.layer.is_some();
        if !takes_importance(format) {
            formats.insert(format.name());
        }
        Ok(())
    })?;
    if is_of_use {
        return Ok(());
    }
    Err(EngineError::InvalidArgument(format!(
        "{given}, and what {isq} makes of this model's matrices ({}) is quantized without importance; Q2K, Q3K, Q4K, Q5K and Q6K \
         take it, where a matrix has a multiple of 256 columns",
        joined(formats.iter().copied())
    )))
}

/// Calls `each` with every matrix that is quantized, and what it becomes.
fn for_each_quantized(
    files: &ModelFiles,
    mut each: impl FnMut(&Matrix, GgmlType) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let (Some(isq), weights) = (files.isq(), files.weights()) else { return Ok(()) };
    for_each_matrix(files.config(), |matrix| {
        let stored = weights.dtype(matrix)?;
        match isq.dtype(stored, matrix.shape[1], matrix.id.layer.is_none()) {
            DType::Ggml(format) if !matrix.is_exact && stored != DType::Ggml(format) => each(matrix, format),
            _ => Ok(()),
        }
    })
}

fn joined<'a>(all: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<_> = all.collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dat(name: &str, calls: i32, values: &[f32]) -> Vec<u8> {
        let mut bytes = 1_i32.to_le_bytes().to_vec();
        bytes.extend((name.len() as i32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(calls.to_le_bytes());
        bytes.extend((values.len() as i32).to_le_bytes());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        bytes
    }

    #[test]
    fn sums_of_a_dat_file_become_means_and_a_damaged_one_is_an_error() {
        let bytes = dat("blk.0.attn_q.weight", 4, &[4.0, 8.0]);
        assert_eq!(of_dat(&bytes).unwrap()["blk.0.attn_q.weight"], [1.0, 2.0]);
        for len in 0..bytes.len() {
            assert!(of_dat(&bytes[..len]).unwrap_err().contains(".dat"), "{len} bytes");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x80;
            drop(of_dat(&damaged));
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("imatrix.dat");
        for value in [-1.0, f32::NAN, f32::INFINITY] {
            std::fs::write(&path, dat("w", 1, &[1.0, value])).unwrap();
            let error = Importance::open(&path).unwrap_err().to_string();
            assert!(error.contains("`w` has a value that is negative or not finite"), "{error}");
        }
    }

    #[test]
    fn columns_of_another_model_are_an_error_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("imatrix.dat");
        std::fs::write(&path, dat("w", 1, &[1.0, 2.0, 3.0, 4.0])).unwrap();
        let importance = Importance::open(&path).unwrap();
        let second = Some(ExpertIndex { index: 1, count: 2 });
        assert_eq!(importance.columns("w", second, 2).unwrap(), Some(&[3.0, 4.0][..]));
        assert_eq!(importance.columns("v", None, 4).unwrap(), None);
        for (expert, cols) in [(None, 2), (second, 4)] {
            let error = importance.columns("w", expert, cols).unwrap_err().to_string();
            assert!(error.contains("`w` has 4 values") && error.contains("another model"), "{error}");
        }
        assert_eq!(importance.of_tensor("w", [6, 2]).unwrap().map(<[f32]>::len), Some(4));
        assert!(importance.of_tensor("w", [5, 2]).is_err());
    }
}
