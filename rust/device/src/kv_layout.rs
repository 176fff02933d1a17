//! What a block of the KV storage looks like, on every device.
//!
//! A block of a plane holds everything that is needed to read it, so blocks are copied and moved as bytes:
//!
//! - the elements, `[num_kv_heads, block_size, head_dim]`; keys in the host's memory lie transposed, `[num_kv_heads, head_dim,
//!   block_size]`, so that as many keys as a vector has lanes are read side by side (two dimensions of a BF16 key stay together, as
//!   processors multiply them: `[num_kv_heads, head_dim / 2, block_size, 2]`);
//! - for the one-byte types, the scales, `[num_kv_heads, block_size]` bfloat16 ([`crate::kv_codes`] says how they come about).
//!
//! Each part is padded to a multiple of 16 bytes, which floats in blocks of 8 tokens or more never need. With `head_dim` a multiple
//! of 16 every vector that lies in one piece is aligned to 16 bytes. A one-byte cache takes `(head_dim + 2) / (2 * head_dim)` of a 16-bit
//! one: 51.6 % for 64, 50.8 % for 128.

use crate::KvDType;

/// Shape of the KV storage.
#[derive(Clone, Debug)]
pub struct KvCacheSpec {
    /// Physical blocks, the null block 0 included.
    pub num_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Layers of a KV group: each has a K and a V plane.
    pub num_planes: usize,
    /// Element type.
    pub dtype: KvDType,
}

/// Number of the format of a block: another one whenever its bytes come to mean something else, for some are kept in files.
pub const KV_FORMAT: u32 = 2;

/// Elements and scales of a block each take a multiple of this many bytes.
const ALIGNMENT: usize = 16;
/// The longest vector of a head, in bytes.
pub(crate) const MAX_VECTOR_BYTES: usize = 8 << 10;

impl KvCacheSpec {
    /// Bytes of one head's vector, its scale apart.
    pub const fn vector_bytes(&self) -> usize {
        self.head_dim * self.dtype.element_bytes()
    }

    /// Bytes of a key that stay together in the host's memory: an element, or two of [`KvDType::BF16`] where `head_dim` is even.
    pub const fn key_unit_bytes(&self) -> usize {
        if matches!(self.dtype, KvDType::BF16) && self.head_dim.is_multiple_of(2) { 4 } else { self.dtype.element_bytes() }
    }

    /// Bytes of a block in one plane; `None` on overflow.
    pub fn plane_block_bytes(&self) -> Option<usize> {
        let vectors = self.num_kv_heads.checked_mul(self.block_size)?;
        let elements = vectors.checked_mul(self.head_dim)?.checked_mul(self.dtype.element_bytes())?;
        let scales = vectors.checked_mul(self.dtype.scale_bytes())?;
        elements.checked_next_multiple_of(ALIGNMENT)?.checked_add(scales.checked_next_multiple_of(ALIGNMENT)?)
    }

    /// Bytes that one more block takes, over all planes; `None` on overflow.
    pub fn bytes_per_block(&self) -> Option<u64> {
        (self.plane_block_bytes()? as u64).checked_mul(2)?.checked_mul(self.num_planes as u64)
    }

    /// Bytes of the whole storage; `None` on overflow.
    pub fn total_bytes(&self) -> Option<u64> {
        self.bytes_per_block()?.checked_mul(self.num_blocks as u64)
    }

    /// Where things lie in a plane whose blocks follow each other.
    pub(crate) fn layout(&self) -> PlaneLayout {
        let vectors = self.num_kv_heads * self.block_size;
        PlaneLayout {
            block_size: self.block_size,
            vector_bytes: self.vector_bytes(),
            key_unit_bytes: self.vector_bytes(),
            scales: (vectors * self.vector_bytes()).next_multiple_of(ALIGNMENT),
            block_bytes: self.plane_block_bytes().expect("a storage of this shape was made"),
            block_stride: self.plane_block_bytes().expect("a storage of this shape was made"),
        }
    }

    /// Where things lie in a plane of the host's memory, where the planes of a block follow each other.
    pub(crate) fn host_layout(&self) -> PlaneLayout {
        let block_stride = self.bytes_per_block().expect("a storage of this shape was made") as usize;
        PlaneLayout { block_stride, key_unit_bytes: self.key_unit_bytes(), ..self.layout() }
    }
}

/// Byte offsets within a plane.
#[derive(Clone, Copy)]
pub(crate) struct PlaneLayout {
    block_size: usize,
    /// Bytes of a head's vector: values of a head follow each other at this distance.
    pub(crate) vector_bytes: usize,
    /// Bytes of a key that stay together: the keys of a head follow each other at this distance.
    pub(crate) key_unit_bytes: usize,
    /// Where in a block its scales start.
    pub(crate) scales: usize,
    /// Bytes of a block in a plane.
    pub(crate) block_bytes: usize,
    /// Bytes from a block to the next one.
    pub(crate) block_stride: usize,
}

impl PlaneLayout {
    /// Where the elements of a head start.
    #[inline]
    pub(crate) fn head(&self, block: usize, head: usize) -> usize {
        block * self.block_stride + head * self.block_size * self.vector_bytes
    }

    /// Where the first unit of a head's key at token `offset` of a block starts.
    #[inline]
    pub(crate) fn key(&self, block: usize, head: usize, offset: usize) -> usize {
        self.head(block, head) + offset * self.key_unit_bytes
    }

    /// Bytes from a unit of a key to the next one.
    #[inline]
    pub(crate) fn key_stride(&self) -> usize {
        self.block_size * self.key_unit_bytes
    }

    /// Where the value of a head at token `offset` of a block starts.
    #[inline]
    pub(crate) fn value(&self, block: usize, head: usize, offset: usize) -> usize {
        self.head(block, head) + offset * self.vector_bytes
    }

    /// Where the scale of the key or the value, a bfloat16, lies. For types without scales this is out of the block.
    #[inline]
    pub(crate) fn scale(&self, block: usize, head: usize, offset: usize) -> usize {
        block * self.block_stride + self.scales + (head * self.block_size + offset) * 2
    }
}
