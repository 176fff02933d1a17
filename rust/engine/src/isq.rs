//! In-situ quantization: float weights are quantized as they are loaded.
//!
//! The quantizers are candle's, but for MXFP4, which it lacks, and the K types, where its own are slow ([`quantize`]). They are
//! called for some rows at a time, on all threads, so that no matrix is widened to f32 as a whole.

use std::{fmt, str::FromStr};

use candle_core::{
    Device, Tensor,
    quantized::{GgmlDType, QTensor},
};
use device::{
    DType, GgmlType, WeightView,
    cpu::{
        Isa,
        quantize::{self, quantizes},
    },
    mmap::Bytes,
    quant::dequantize_row,
};

use crate::{EngineError, importance::takes_importance, weights::write_chunks};

/// Values that a thread widens to f32 at once.
const TILE_VALUES: usize = 1 << 16;

/// What float weights are quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isq(GgmlType);

/// Names of the mirrored interface, in lower case and without underscores.
const NAMES: [(&str, GgmlType); 24] = [
    ("2", GgmlType::Q2K),
    ("3", GgmlType::Q3K),
    ("4", GgmlType::Q4K),
    ("5", GgmlType::Q5K),
    ("6", GgmlType::Q6K),
    ("8", GgmlType::Q8_0),
    ("int2", GgmlType::Q2K),
    ("int3", GgmlType::Q3K),
    ("int4", GgmlType::Q4K),
    ("int5", GgmlType::Q5K),
    ("int6", GgmlType::Q6K),
    ("int8", GgmlType::Q8_0),
    ("q40", GgmlType::Q4_0),
    ("q41", GgmlType::Q4_1),
    ("q50", GgmlType::Q5_0),
    ("q51", GgmlType::Q5_1),
    ("q80", GgmlType::Q8_0),
    // The same scales and codes as Q8_0; what it has besides are sums of activations.
    ("q81", GgmlType::Q8_0),
    ("q2k", GgmlType::Q2K),
    ("q3k", GgmlType::Q3K),
    ("q4k", GgmlType::Q4K),
    ("q5k", GgmlType::Q5K),
    ("q6k", GgmlType::Q6K),
    ("mxfp4", GgmlType::Mxfp4),
];

/// Types of the mirrored interface that nothing here computes with, and what to take instead.
const OTHERS: [(&str, &str); 9] = [
    ("q8k", "Q8_0"),
    ("fp8", "Q8_0"),
    ("f8e4m3", "Q8_0"),
    ("f8q8", "Q8_0"),
    ("hqq8", "Q8_0"),
    ("hqq4", "Q4K"),
    ("afq8", "Q8_0"),
    ("afq6", "Q6K"),
    ("afq", "Q2K, Q3K or Q4K"),
];

impl FromStr for Isq {
    type Err = EngineError;

    /// See [`Isq::named`].
    fn from_str(name: &str) -> Result<Self, EngineError> {
        Self::named("in_situ_quant", name)
    }
}

impl Isq {
    /// The type of that name, the value of an argument. Upper and lower case, and underscores, make no difference.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] for any other name: which argument it is, and what would work.
    pub fn named(argument: &str, name: &str) -> Result<Self, EngineError> {
        let plain = name.to_ascii_lowercase().replace('_', "");
        if let Some((_, format)) = NAMES.iter().find(|(known, _)| *known == plain) {
            return Ok(Self(*format));
        }
        let instead = OTHERS.iter().find(|(known, _)| plain.starts_with(known));
        Err(EngineError::InvalidArgument(match instead {
            Some((_, instead)) => format!("{argument} is {name:?}, which weights are not computed in here; use {instead}"),
            None => format!(
                "{argument} is {name:?}; use 2, 3, 4, 5, 6 or 8 bits, or Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K or \
                 MXFP4"
            ),
        }))
    }
}

impl fmt::Display for Isq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

impl Isq {
    /// What a matrix of a layer with so many columns becomes; `None`: it stays as it is, for its columns are no whole blocks of
    /// any type. K types have blocks of 256, and what they cannot hold takes the next type of 32, as llama.cpp has it.
    pub fn format(self, cols: usize) -> Option<GgmlType> {
        let of_32 = match self.0 {
            GgmlType::Q2K | GgmlType::Q3K => GgmlType::Q4_0,
            GgmlType::Q4K => GgmlType::Q5_0,
            GgmlType::Q5K => GgmlType::Q5_1,
            GgmlType::Q6K => GgmlType::Q8_0,
            other => other,
        };
        [self.0, of_32].into_iter().find(|format| cols.is_multiple_of(format.block_len()))
    }

    /// The same of the token embedding and of the matrix of logits, which count for more.
    pub fn outer_format(self, cols: usize) -> Option<GgmlType> {
        let outer = match self.0 {
            GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K | GgmlType::Mxfp4 => GgmlType::Q6K,
            _ => GgmlType::Q8_0,
        };
        Self(outer).format(cols)
    }

    /// `general.file_type` of a GGUF file: llama.cpp's number of what most of its matrices are.
    pub(crate) const fn file_type(self) -> u32 {
        match self.0 {
            GgmlType::Q4_0 => 2,
            GgmlType::Q4_1 => 3,
            GgmlType::Q5_0 => 8,
            GgmlType::Q5_1 => 9,
            GgmlType::Q2K => 10,
            GgmlType::Q3K => 11,
            GgmlType::Q4K => 14,
            GgmlType::Q5K => 16,
            GgmlType::Q6K => 18,
            GgmlType::Mxfp4 => 38,
            // Q8_0; there are no others.
            _ => 7,
        }
    }

    /// How a matrix that is stored in `dtype` is kept. What is quantized already stays.
    pub(crate) fn dtype(self, dtype: DType, cols: usize, is_outer: bool) -> DType {
        let format = if is_outer { self.outer_format(cols) } else { self.format(cols) };
        match (dtype, format) {
            (DType::F32 | DType::F16 | DType::BF16, Some(format)) => DType::Ggml(format),
            _ => dtype,
        }
    }
}

/// A matrix of floats in another type, on so many threads. `name` is for errors, `importance` says how much each column counts,
/// `[cols]`; only types of blocks of 256 take it.
///
/// # Errors
/// [`EngineError::Load`] for a value that is not finite; [`EngineError::NotSupported`] for a type that nothing quantizes to.
pub fn quantize(
    name: &str,
    view: &WeightView,
    format: GgmlType,
    importance: Option<&[f32]>,
    num_threads: usize,
) -> Result<WeightView, EngineError> {
    let (rows, cols) = (view.rows, view.cols);
    let row_bytes = DType::Ggml(format).row_bytes(cols);
    let bytes = row_bytes.and_then(|bytes| bytes.checked_mul(rows));
    let (Some(row_bytes), Some(bytes)) = (row_bytes.filter(|bytes| *bytes > 0), bytes) else {
        let text = format!("tensor `{name}` of shape [{rows}, {cols}] cannot be quantized to {}", format.name());
        return Err(EngineError::Load(text));
    };
    let mut out = vec![0; bytes];
    let tile_rows = (TILE_VALUES / cols).max(1);
    write_chunks(&mut out, tile_rows * row_bytes, num_threads, |tile, out| {
        let mut values = vec![0.0; out.len() / row_bytes * cols];
        for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            dequantize_row(view.dtype, view.row(tile * tile_rows + row), values);
        }
        if values.iter().any(|value| !value.is_finite()) {
            return Err(EngineError::Load(format!("tensor `{name}` has a value that is not finite: it cannot be quantized")));
        }
        quantize_rows(values, cols, format, importance, out)
    })?;
    Ok(WeightView::new(DType::Ggml(format), rows, cols, Bytes::from_vec(out))?)
}

/// `values` are whole rows.
fn quantize_rows(
    values: Vec<f32>,
    cols: usize,
    format: GgmlType,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), EngineError> {
    if importance.is_some() && !takes_importance(format) {
        return Err(EngineError::NotSupported(format!("{} is quantized without importance", format.name())));
    }
    if format == GgmlType::Mxfp4 {
        for (values, out) in values.chunks_exact(32).zip(out.chunks_exact_mut(17)) {
            mxfp4(values, out);
        }
        return Ok(());
    }
    if quantizes(format) {
        quantize::quantize_rows(Isa::detect(), &values, cols, format, importance, out);
        return Ok(());
    }
    let to = match format {
        GgmlType::Q4_0 => GgmlDType::Q4_0,
        GgmlType::Q4_1 => GgmlDType::Q4_1,
        GgmlType::Q5_0 => GgmlDType::Q5_0,
        GgmlType::Q5_1 => GgmlDType::Q5_1,
        GgmlType::Q8_0 => GgmlDType::Q8_0,
        other => return Err(EngineError::NotSupported(format!("nothing quantizes to {}", other.name()))),
    };
    let failed = |error: candle_core::Error| EngineError::Internal(format!("quantizing to {}: {error}", format.name()));
    let shape = (values.len() / cols, cols);
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).map_err(failed)?;
    let quantized = QTensor::quantize(&tensor, to).map_err(failed)?;
    out.copy_from_slice(&quantized.data().map_err(failed)?);
    Ok(())
}

/// The exponent that makes the largest magnitude of 32 values one of e2m1's largest binade, then the nearest codes, as gguf-py
/// has it.
fn mxfp4(values: &[f32], out: &mut [u8]) {
    // Halfway between neighbours of 0, 1, 2, 3, 4, 6, 8 and 12, e2m1's magnitudes doubled. What lies there takes the lower one.
    const BETWEEN: [f64; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let exponent = if largest > 0.0 { (largest.log2().floor() as i32 + 125).clamp(0, 254) } else { 0 };
    // The inverse of half of e8m0's power, as codes are doubled: exact, and beyond an f32.
    let inverse = 2f64.powi(128 - exponent);
    let code = |value: f32| {
        let size = f64::from(value.abs()) * inverse;
        let nearest: u8 = BETWEEN.iter().map(|between| u8::from(size > *between)).sum();
        // A zero has no sign.
        nearest | u8::from(value < 0.0 && nearest > 0) << 3
    };
    out[0] = exponent as u8;
    for (i, out) in out[1..].iter_mut().enumerate() {
        *out = code(values[i]) | code(values[i + 16]) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_mirror_and_others_say_what_to_use() {
        for (name, format) in
            [("4", "Q4_K"), ("Q4K", "Q4_K"), ("q4_k", "Q4_K"), ("Q8_1", "Q8_0"), ("int8", "Q8_0"), ("mxfp4", "MXFP4")]
        {
            assert_eq!(name.parse::<Isq>().unwrap().to_string(), format, "{name}");
        }
        for (name, instead) in [("Q8K", "Q8_0"), ("FP8", "Q8_0"), ("AFQ4", "Q4K"), ("HQQ4", "Q4K"), ("7", "8 bits"), ("", "Q4_0")]
        {
            let error = name.parse::<Isq>().unwrap_err().to_string();
            assert!(error.contains(&format!("{name:?}")) && error.contains(instead), "{error}");
        }
    }

    #[test]
    fn what_has_no_blocks_of_256_takes_a_type_of_32_or_stays() {
        let format = |name: &str, cols| name.parse::<Isq>().unwrap().format(cols).map(GgmlType::name);
        assert_eq!(format("Q4K", 512), Some("Q4_K"));
        for (name, other) in
            [("Q2K", "Q4_0"), ("Q3K", "Q4_0"), ("Q4K", "Q5_0"), ("Q5K", "Q5_1"), ("Q6K", "Q8_0"), ("Q8_0", "Q8_0")]
        {
            assert_eq!((format(name, 576), format(name, 48)), (Some(other), None), "{name}");
        }
        let outer = |name: &str, cols| name.parse::<Isq>().unwrap().outer_format(cols).map(GgmlType::name);
        assert_eq!((outer("Q4K", 512), outer("Q4K", 576), outer("Q5K", 512)), (Some("Q6_K"), Some("Q8_0"), Some("Q8_0")));
        let isq: Isq = "Q4_0".parse().unwrap();
        assert_eq!(isq.dtype(DType::Ggml(GgmlType::Q8_0), 512, false), DType::Ggml(GgmlType::Q8_0));
    }

    fn weights(rows: usize, cols: usize) -> (Vec<f32>, WeightView) {
        let values: Vec<_> =
            (0..rows * cols).map(|i| ((i * 7919 % 1009) as f32 / 504.0 - 1.0) * (1 + i / cols % 3) as f32).collect();
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (values, WeightView::new(DType::F32, rows, cols, Bytes::from_vec(bytes)).unwrap())
    }

    #[test]
    fn every_type_is_as_near_as_its_bits_allow_whatever_the_threads() {
        // Of the largest magnitude: half a step between codes, of types whose codes end on one side sooner a whole one, and of
        // MXFP4 what is lost beyond its largest code. A tenth more for scales that are quantized themselves. The search for Q4_K
        // and Q5_K has the least squares in mind and may clip the ends, by up to half a step more.
        let bounds = [
            ("Q2K", 1.1 / 3.0),
            ("Q3K", 1.1 / 4.0),
            ("Q4K", 2.0 / 15.0),
            ("Q5K", 2.0 / 31.0),
            ("Q6K", 1.1 / 32.0),
            ("Q8_0", 1.1 / 254.0),
            ("Q4_0", 1.0 / 8.0),
            ("Q4_1", 1.1 / 15.0),
            ("Q5_0", 1.0 / 16.0),
            ("Q5_1", 1.1 / 31.0),
            ("MXFP4", 1.0 / 4.0),
        ];
        let (values, view) = weights(300, 512);
        for (name, bound) in bounds {
            let format = name.parse::<Isq>().unwrap().format(512).unwrap();
            let quantized = quantize("w", &view, format, None, 3).unwrap();
            assert!(quantized.bytes() == quantize("w", &view, format, None, 1).unwrap().bytes(), "{name}: threads change bytes");
            let mut row = vec![0.0; 512];
            for r in 0..300 {
                dequantize_row(quantized.dtype, quantized.row(r), &mut row);
                let largest = (1 + r % 3) as f32;
                let worst = row.iter().zip(&values[r * 512..]).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs()));
                assert!(worst <= bound * largest, "{name} row {r}: off by {worst} of {largest}");
                let squares = row.iter().zip(&values[r * 512..]).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
                let Some(codes) = [("Q4K", 15.0), ("Q5K", 31.0)].iter().find_map(|(of, codes)| (*of == name).then_some(*codes))
                else {
                    continue;
                };
                let step = 2.0 * largest / codes;
                // Of values that are as likely anywhere between two codes.
                assert!(squares / 512.0 <= 1.1 * step * step / 12.0, "{name} row {r}: {}", squares / 512.0);
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_are_errors_by_name() {
        let (mut values, _) = weights(2, 256);
        values[300] = f32::INFINITY;
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let view = WeightView::new(DType::F32, 2, 256, Bytes::from_vec(bytes)).unwrap();
        let error = quantize("blk.0.attn_q.weight", &view, GgmlType::Q4K, None, 2).err().unwrap().to_string();
        assert!(error.contains("blk.0.attn_q.weight") && error.contains("not finite"), "{error}");
    }

    #[test]
    fn columns_that_count_for_more_are_nearer_with_importance() {
        let (values, view) = weights(64, 512);
        let importance: Vec<f32> = (0..512).map(|col| if col % 4 == 0 { 100.0 } else { 0.01 }).collect();
        let error = |quantized: &WeightView| {
            let mut row = vec![0.0; 512];
            let mut sum = 0.0;
            for r in 0..64 {
                dequantize_row(quantized.dtype, quantized.row(r), &mut row);
                let errors = row.iter().zip(&values[r * 512..]).step_by(4).map(|(a, b)| (a - b) * (a - b));
                sum += errors.sum::<f32>();
            }
            sum
        };
        for name in ["Q2K", "Q3K", "Q4K", "Q5K", "Q6K"] {
            let format = name.parse::<Isq>().unwrap().format(512).unwrap();
            let plain = error(&quantize("w", &view, format, None, 2).unwrap());
            let weighted = error(&quantize("w", &view, format, Some(&importance), 2).unwrap());
            assert!(weighted < 0.9 * plain, "{name}: {weighted} with importance, {plain} without");
        }
        let refused = quantize("w", &view, GgmlType::Q4_0, Some(&importance), 2).err().unwrap().to_string();
        assert!(refused.contains("Q4_0 is quantized without importance"), "{refused}");
    }

    const COLS: usize = 512;

    /// Weights as models have them: near a bell, some columns wider.
    fn bell(seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..64 * COLS)
            .map(|i| {
                let bell = (0..6).map(|_| uniform()).sum::<f32>();
                bell * if i % 37 == 0 { 4.0 } else { 1.0 } * 0.03
            })
            .collect()
    }

    /// Squares, weighted as the search has them.
    fn error(format: GgmlType, bytes: &[u8], values: &[f32], importance: Option<&[f32]>) -> f64 {
        let mut row = vec![0.0; COLS];
        let row_bytes = format.block_bytes() * COLS / 256;
        let mut sum = 0.0;
        for (bytes, values) in bytes.chunks_exact(row_bytes).zip(values.chunks_exact(COLS)) {
            dequantize_row(DType::Ggml(format), bytes, &mut row);
            let mean_square = |i: usize| {
                let block = &values[i / 256 * 256..][..256];
                block.iter().map(|x| x * x).sum::<f32>() / 256.0
            };
            for (i, (a, b)) in row.iter().zip(values).enumerate() {
                let weight = (mean_square(i) + b * b).sqrt() * importance.map_or(1.0, |of| of[i]);
                sum += f64::from((a - b) * (a - b) * weight);
            }
        }
        sum
    }

    /// candle's are the slow plain version.
    #[test]
    fn blocks_are_as_near_as_those_of_candle() {
        let importance: Vec<f32> = (0..COLS).map(|i| if i % 5 == 0 { 30.0 } else { 0.5 }).collect();
        for (format, to) in [
            (GgmlType::Q2K, GgmlDType::Q2K),
            (GgmlType::Q3K, GgmlDType::Q3K),
            (GgmlType::Q4K, GgmlDType::Q4K),
            (GgmlType::Q5K, GgmlDType::Q5K),
            (GgmlType::Q6K, GgmlDType::Q6K),
        ] {
            for seed in 1..4 {
                let values = bell(seed);
                let tensor = Tensor::from_vec(values.clone(), (64, COLS), &Device::Cpu).unwrap();
                for importance in [None, Some(&importance[..])] {
                    let theirs = match importance {
                        Some(importance) => QTensor::quantize_imatrix(&tensor, importance, to),
                        None => QTensor::quantize_imatrix(&tensor, &[1.0; COLS], to),
                    };
                    let theirs = theirs.unwrap().data().unwrap().to_vec();
                    let mut own = vec![0xaa; theirs.len()];
                    quantize_rows(values.clone(), COLS, format, importance, &mut own).unwrap();
                    let [own, theirs] = [own, theirs].map(|bytes| error(format, &bytes, &values, importance));
                    let name = format.name();
                    assert!(own <= 1.05 * theirs, "{name}, importance {}: {own} against {theirs}", importance.is_some());
                }
            }
        }
    }
}
