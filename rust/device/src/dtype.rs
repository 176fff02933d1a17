//! Element and block types of weights and of the KV cache.

use std::fmt;

use crate::quant::GgmlType;

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

impl DType {
    /// Every type.
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        [Self::F32, Self::F16, Self::BF16].into_iter().chain(GgmlType::ALL.into_iter().map(Self::Ggml))
    }

    /// The type of ggml's number; `None` for one that is not read.
    pub fn of_ggml(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::F32),
            1 => Some(Self::F16),
            30 => Some(Self::BF16),
            _ => GgmlType::ALL.into_iter().find(|format| format.format().number == number).map(Self::Ggml),
        }
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
