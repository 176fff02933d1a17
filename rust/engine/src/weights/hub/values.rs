//! Matrices whose values are known one by one, and the formats that hold them.

use device::{DType, GgmlType, WeightView, host::num_physical_cores, mmap::Bytes};
use half::f16;

use crate::{EngineError, weights::write_chunks};

/// Values of a block of the formats that integer codes become.
const BLOCK: usize = 32;

/// Words of packed codes, the first in the lowest bits.
#[derive(Clone, Copy)]
pub(super) struct Words<'a>(pub &'a [[u8; 4]]);

impl Words<'_> {
    pub fn code(word: [u8; 4], place: usize, bits: u32) -> i32 {
        (u32::from_le_bytes(word) >> (place as u32 * bits) & ((1 << bits) - 1)) as i32
    }

    /// Code `i` of those that begin with a word. `bits` divides 32.
    pub fn at(self, first: usize, i: usize, bits: u32) -> i32 {
        let per_word = (32 / bits) as usize;
        self.0.get(first + i / per_word).map_or(0, |word| Self::code(*word, i % per_word, bits))
    }

    /// Likewise, of codes that may lie in two words.
    pub fn bits_at(self, first: usize, i: usize, bits: u32) -> i32 {
        let bit = i * bits as usize;
        let word = |at: usize| self.0.get(first + at).map_or(0, |word| u64::from(u32::from_le_bytes(*word)));
        let both = word(bit / 32) | word(bit / 32 + 1) << 32;
        (both >> (bit % 32) & ((1 << bits) - 1)) as i32
    }
}

/// `(row, column, group)`.
pub(super) type Code<'a> = Box<dyn Fn(usize, usize, usize) -> i32 + Sync + 'a>;
/// `(row, group)`.
pub(super) type Scale<'a> = Box<dyn Fn(usize, usize) -> f32 + Sync + 'a>;
/// `(row, its values)`.
pub(super) type Floats<'a> = Box<dyn Fn(usize, &mut [f32]) + Sync + 'a>;

/// Least and largest code of the formats that integers become, and whether they have minima; the smaller first.
const FORMATS: [(i32, i32, bool, GgmlType); 5] = [
    (-8, 7, false, GgmlType::Q4_0),
    (-16, 15, false, GgmlType::Q5_0),
    (-128, 127, false, GgmlType::Q8_0),
    (0, 15, true, GgmlType::Q4_1),
    (0, 31, true, GgmlType::Q5_1),
];

enum Values<'a> {
    Floats(Floats<'a>),
    Integers { range: [i32; 2], num_groups: usize, group_of: Option<Vec<usize>>, code: Code<'a>, scale: Scale<'a> },
}

/// A matrix whose values are known one by one.
pub(super) struct Matrix<'a> {
    pub rows: usize,
    pub cols: usize,
    values: Values<'a>,
    /// What is added to integers times their scales, `[rows, groups]`.
    pub mins: Option<Vec<f32>>,
}

impl<'a> Matrix<'a> {
    pub fn of_floats([rows, cols]: [usize; 2], values: Floats<'a>) -> Self {
        Self { rows, cols, values: Values::Floats(values), mins: None }
    }

    /// `group_of`: of each column, where groups are not columns in a row.
    pub fn of_integers(
        [rows, cols]: [usize; 2],
        range: [i32; 2],
        num_groups: usize,
        group_of: Option<Vec<usize>>,
        code: Code<'a>,
        scale: Scale<'a>,
    ) -> Self {
        Self { rows, cols, values: Values::Integers { range, num_groups, group_of, code, scale }, mins: None }
    }

    /// The format that holds every value.
    pub fn dtype(&self) -> DType {
        let Values::Integers { range, num_groups, group_of: None, scale, .. } = &self.values else { return DType::F32 };
        let (codes, has_mins) = (range[0]..=range[1], self.mins.is_some());
        let holds =
            |format: &&(i32, i32, bool, GgmlType)| format.0 <= *codes.start() && *codes.end() <= format.1 && format.2 == has_mins;
        let Some((.., format)) = FORMATS.iter().find(holds) else { return DType::F32 };
        let is_f16 = |value: f32| f16::from_f32(value).to_f32() == value;
        let whole_blocks = (self.cols / num_groups).is_multiple_of(BLOCK);
        let scales_fit = || (0..self.rows).all(|row| (0..*num_groups).all(|group| is_f16(scale(row, group))));
        let mins_fit = || self.mins.iter().flatten().all(|min| is_f16(*min));
        if whole_blocks && scales_fit() && mins_fit() { DType::Ggml(*format) } else { DType::F32 }
    }

    pub fn read(&self) -> Result<WeightView, EngineError> {
        let dtype = self.dtype();
        let row_bytes = dtype.row_bytes(self.cols);
        let (Some(row_bytes), Some(bytes)) = (row_bytes, row_bytes.and_then(|bytes| bytes.checked_mul(self.rows))) else {
            return Err(EngineError::Load(format!("a matrix [{}, {}] is larger than any memory", self.rows, self.cols)));
        };
        let mut out = vec![0; bytes];
        write_chunks(&mut out, row_bytes, num_physical_cores().min(self.rows), |row, out| {
            self.row(dtype, row, out);
            Ok(())
        })?;
        Ok(WeightView::new(dtype, self.rows, self.cols, Bytes::from_vec(out))?)
    }

    fn row(&self, dtype: DType, row: usize, out: &mut [u8]) {
        match (&self.values, dtype) {
            (Values::Integers { range, num_groups, code, scale, .. }, DType::Ggml(format)) => {
                let group_cols = self.cols / num_groups;
                for (b, out) in out.chunks_exact_mut(format.block_bytes()).enumerate() {
                    let group = b * BLOCK / group_cols;
                    let min = self.mins.as_ref().map(|mins| mins[row * num_groups + group]);
                    let codes = std::array::from_fn(|i| code(row, b * BLOCK + i, group).clamp(range[0], range[1]));
                    put_block(format, scale(row, group), min, &codes, out);
                }
            }
            (values, _) => {
                let mut floats = vec![0.0; self.cols];
                match values {
                    Values::Floats(values) => values(row, &mut floats),
                    Values::Integers { num_groups, group_of, code, scale, .. } => {
                        for (col, value) in floats.iter_mut().enumerate() {
                            let group = group_of.as_ref().map_or(col / (self.cols / num_groups), |groups| groups[col]);
                            let min = self.mins.as_ref().map_or(0.0, |mins| mins[row * num_groups + group]);
                            *value = code(row, col, group) as f32 * scale(row, group) + min;
                        }
                    }
                }
                for (out, value) in out.as_chunks_mut().0.iter_mut().zip(floats) {
                    *out = value.to_le_bytes();
                }
            }
        }
    }
}

/// Writes a block of Q4_0, Q5_0, Q8_0, Q4_1 or Q5_1.
fn put_block(format: GgmlType, scale: f32, min: Option<f32>, codes: &[i32; BLOCK], out: &mut [u8]) {
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    let mut at = 2;
    if let Some(min) = min {
        out[2..4].copy_from_slice(&f16::from_f32(min).to_le_bytes());
        at = 4;
    }
    if format == GgmlType::Q8_0 {
        for (out, code) in out[at..].iter_mut().zip(codes) {
            *out = (*code as i8).cast_unsigned();
        }
        return;
    }
    let zero = match format {
        GgmlType::Q4_0 => 8,
        GgmlType::Q5_0 => 16,
        _ => 0,
    };
    let stored = codes.map(|code| (code + zero) as u32);
    if matches!(format, GgmlType::Q5_0 | GgmlType::Q5_1) {
        let fifth = stored.iter().enumerate().fold(0, |fifth, (i, code)| fifth | (code >> 4 & 1) << i);
        out[at..at + 4].copy_from_slice(&fifth.to_le_bytes());
        at += 4;
    }
    for (i, out) in out[at..].iter_mut().enumerate() {
        *out = (stored[i] & 15 | (stored[i + 16] & 15) << 4) as u8;
    }
}
