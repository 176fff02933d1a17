//! Weights to test kernels with.

use device::{DType, GgmlType, quant::dequantize_row};
use half::{bf16, f16};

use crate::{random::Rng, scales::f16_scales};

/// A format's part of kernels' names.
pub fn kernel_suffix(format: DType) -> String {
    format.to_string().to_lowercase()
}

/// A weight of random codes.
pub struct Weight {
    /// How it is stored.
    pub format: DType,
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
    /// As in a file.
    pub bytes: Vec<u8>,
    /// Exactly.
    pub values: Vec<f32>,
}

impl Weight {
    /// With scales that keep values small.
    ///
    /// # Panics
    /// When rows are not whole blocks.
    pub fn random(format: DType, rows: usize, cols: usize, rng: &mut Rng) -> Self {
        let row_bytes = format.row_bytes(cols).expect("whole blocks");
        let mut bytes = match format {
            DType::F32 => rng.floats(rows * cols).iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F16 => rng.floats(rows * cols).iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            DType::BF16 => rng.floats(rows * cols).iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            DType::Ggml(_) => (0..rows * row_bytes).map(|_| rng.below(256) as u8).collect::<Vec<u8>>(),
        };
        if let DType::Ggml(format) = format {
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                match format {
                    // An exponent: of powers about 1, and the two whose power has no leading one.
                    GgmlType::Mxfp4 => block[0] = [0, 1, 120, 124, 128, 130][rng.below(6)],
                    // Small ones, those without a leading one, and the two that are 0 or no number.
                    GgmlType::Nvfp4 => block[..4].fill_with(|| [0, 1, 7, 0x27, 0x7f, 0x80][rng.below(6)]),
                    // The upper bits of an f16 in quarters: from 2^-11 to 2^-7.
                    GgmlType::Iq1M => block[55] = block[55] & 0x8f | 0x10,
                    _ => {}
                }
                for &at in f16_scales(format) {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(rng.float() / 50.0).to_le_bytes());
                }
            }
        }
        let mut values = vec![0.0; rows * cols];
        for (values, bytes) in values.chunks_exact_mut(cols).zip(bytes.chunks_exact(row_bytes)) {
            dequantize_row(format, bytes, values);
        }
        Self { format, rows, cols, bytes, values }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        (self.bytes.len() / self.rows) as u64
    }
}
