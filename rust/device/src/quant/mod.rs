//! Weight formats: their block layouts and exact dequantization.
//!
//! Every ggml block format here is a list of small integers, the codes, in sub-blocks that share a scale and sometimes a minimum:
//! `value = scale * code` or `scale * code + min`, multiplied and then added in f32. [`Format::unpack`] says what the three are;
//! exact dequantization and the packing of the fast kernels both start from it.
//!
//! A format is a [`Format`] beside its `unpack` function, and a row of the table of them.

mod grids;
mod k_quants;
mod legacy;
mod tables;

use half::f16;

use crate::DType;

/// Most values in a block of any format.
const MAX_BLOCK: usize = 256;

/// A ggml block format (the GGUF specification and ggml's `ggml-common.h`). What else there is to know of it follows from this.
pub struct Format {
    /// The name ggml gives it.
    pub name: &'static str,
    /// The number ggml gives it.
    pub number: u32,
    /// Values in one block.
    pub block_len: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Values of a sub-block, which share a scale: 16 or 32.
    pub(crate) sub_block_len: usize,
    /// Whether a minimum is added to each sub-block.
    pub(crate) has_min: bool,
    /// Whether blocks are super-blocks: scales and minima of their sub-blocks are quantized themselves.
    pub(crate) has_super_blocks: bool,
    /// Bits of a code as the fast kernels take it: 4, 5, 6 or 8. Without minima, codes are from `-2^(bits - 1)` on.
    pub(crate) code_bits: u8,
    /// Where codes are not whole numbers in a row but some 16 at most: the fast kernels look 4 bits up in it.
    pub(crate) table: Option<&'static Table>,
    /// Takes one block of `block_bytes` bytes apart.
    pub(crate) unpack: fn(&[u8], &mut BlockCodes),
}

/// The codes of a format that has few.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Table {
    /// From -127 to 127, and from -64 to 64 where sub-blocks have 16 values. What is left over is 0.
    pub codes: [i8; 16],
    /// Scales are those of [`BlockCodes::super_block_scales`] and [`BlockCodes::sub_block_scales`] divided by two so often: that
    /// all three are what f16 and i8 hold.
    pub halvings: u8,
}

impl Table {
    /// What scales are multiplied by.
    pub const fn unit(&self) -> f32 {
        1.0 / (1 << self.halvings) as f32
    }
}

macro_rules! formats {
    ($($variant:ident = $format:path,)*) => {
        /// The ggml block formats that matmul reads directly.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum GgmlType {
            $($variant,)*
        }

        static FORMATS: [Format; [$(stringify!($variant)),*].len()] = [$($format),*];

        impl GgmlType {
            /// Every format, in the order of ggml's numbers.
            pub const ALL: [Self; FORMATS.len()] = [$(Self::$variant),*];
        }
    };
}

formats! {
    Q4_0 = legacy::Q4_0,
    Q4_1 = legacy::Q4_1,
    Q5_0 = legacy::Q5_0,
    Q5_1 = legacy::Q5_1,
    Q8_0 = legacy::Q8_0,
    Q2K = k_quants::Q2_K,
    Q3K = k_quants::Q3_K,
    Q4K = k_quants::Q4_K,
    Q5K = k_quants::Q5_K,
    Q6K = k_quants::Q6_K,
    Iq2Xxs = grids::IQ2_XXS,
    Iq2Xs = grids::IQ2_XS,
    Iq3Xxs = grids::IQ3_XXS,
    Iq1S = grids::IQ1_S,
    Iq4Nl = tables::IQ4_NL,
    Iq3S = grids::IQ3_S,
    Iq2S = grids::IQ2_S,
    Iq4Xs = tables::IQ4_XS,
    Iq1M = grids::IQ1_M,
    Tq1_0 = tables::TQ1_0,
    Tq2_0 = tables::TQ2_0,
    Mxfp4 = tables::MXFP4,
    Nvfp4 = tables::NVFP4,
    Q1_0 = tables::Q1_0,
}

impl GgmlType {
    /// What there is to know of the format.
    pub const fn format(self) -> &'static Format {
        &FORMATS[self as usize]
    }

    /// Values in one block.
    pub const fn block_len(self) -> usize {
        self.format().block_len
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.format().block_bytes
    }

    /// The name ggml gives the format.
    pub const fn name(self) -> &'static str {
        self.format().name
    }
}

/// One block, taken apart.
pub(crate) struct BlockCodes {
    /// One a value.
    pub codes: [i8; MAX_BLOCK],
    /// One a sub-block.
    pub scales: [f32; MAX_BLOCK / 16],
    /// One a sub-block; only what formats with [`Format::has_min`] fill.
    pub mins: [f32; MAX_BLOCK / 16],
    /// What scales and minima are products of in formats with [`Format::has_super_blocks`]: one of each for the super-block, ...
    pub super_block_scales: [f32; 2],
    /// ... and of each one a sub-block.
    pub sub_block_scales: [[i8; MAX_BLOCK / 16]; 2],
}

impl BlockCodes {
    pub const fn new() -> Self {
        Self {
            codes: [0; MAX_BLOCK],
            scales: [0.0; MAX_BLOCK / 16],
            mins: [0.0; MAX_BLOCK / 16],
            super_block_scales: [0.0; 2],
            sub_block_scales: [[0; MAX_BLOCK / 16]; 2],
        }
    }

    /// Sets scales and minima from those of the super-block and of its sub-blocks.
    fn multiply(&mut self) {
        self.multiply_in(1.0);
    }

    /// Likewise, in the unit of a [`Table`].
    fn multiply_in(&mut self, unit: f32) {
        let outs = [&mut self.scales, &mut self.mins].into_iter();
        for ((out, super_block), sub_blocks) in outs.zip(self.super_block_scales).zip(&self.sub_block_scales) {
            for (out, sub_block) in out.iter_mut().zip(sub_blocks) {
                *out = super_block * f32::from(*sub_block) * unit;
            }
        }
    }
}

/// Writes the values of one stored row to `out`, `[cols]`, bit for bit as gguf-py computes them.
///
/// # Panics
/// When `bytes` is not exactly a row of `out.len()` values.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "bytes of a {dtype} row of {} values", out.len());
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        DType::Ggml(format) => dequantize_blocks(format.format(), bytes, out),
    }
}

fn dequantize_blocks(format: &Format, bytes: &[u8], out: &mut [f32]) {
    let &Format { sub_block_len, has_min, unpack, .. } = format;
    let mut block = BlockCodes::new();
    for (bytes, out) in bytes.chunks_exact(format.block_bytes).zip(out.chunks_exact_mut(format.block_len)) {
        unpack(bytes, &mut block);
        for (g, (out, codes)) in out.chunks_exact_mut(sub_block_len).zip(block.codes.chunks_exact(sub_block_len)).enumerate() {
            let scale = block.scales[g];
            for (o, c) in out.iter_mut().zip(codes) {
                *o = scale * f32::from(*c);
            }
            if has_min {
                for o in out {
                    *o += block.mins[g];
                }
            }
        }
    }
}

/// The f16 at byte `at` of a block.
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}
