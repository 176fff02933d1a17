//! Element and block types of weights and of the KV cache.

use std::fmt;

/// How the values of a weight are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// A ggml block format.
    Ggml(GgmlType),
}

/// The ggml block formats that matmul reads directly (their layouts: the GGUF specification and ggml's `ggml-common.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum GgmlType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
}

impl GgmlType {
    /// Every format, in the order of ggml's type numbers.
    pub const ALL: [Self; 11] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Mxfp4,
    ];

    /// Values in one block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Mxfp4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Mxfp4 => 17,
        }
    }

    /// The name ggml gives the format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Mxfp4 => "MXFP4",
        }
    }
}

impl DType {
    /// Every type.
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        [Self::F32, Self::F16, Self::BF16].into_iter().chain(GgmlType::ALL.into_iter().map(Self::Ggml))
    }

    /// Bytes of a row of `cols` values; `None` when `cols` is not a whole number of blocks or the product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Self::F32 => cols.checked_mul(4),
            Self::F16 | Self::BF16 => cols.checked_mul(2),
            Self::Ggml(t) if cols.is_multiple_of(t.block_len()) => (cols / t.block_len()).checked_mul(t.block_bytes()),
            Self::Ggml(_) => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Ggml(t) => t.name(),
        })
    }
}

/// Element type of the KV cache.
///
/// The one-byte types keep a scale for each token and head: an element is its code times the scale. See [`crate::kv_codes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// OCP e4m3 ("fn": no infinities, largest 448).
    F8E4M3,
    /// Integers from -127 to 127.
    Int8,
}

impl KvDType {
    /// Every type.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::BF16, Self::F8E4M3, Self::Int8];

    /// Bytes of one element, scales apart.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8E4M3 | Self::Int8 => 1,
        }
    }

    /// Bytes of the scale of one token and head; 0 for types without.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 0,
            Self::F8E4M3 | Self::Int8 => 2,
        }
    }
}
