//! What a block of the KV storage looks like, on every device.
//!
//! A block of a plane holds everything that is needed to read it, so blocks are copied and moved as bytes:
//!
//! - the elements, `[num_kv_heads, block_size, head_dim]`; keys in the host's memory lie transposed, `[num_kv_heads, head_dim,
//!   block_size]`, so that as many keys as a vector has lanes are read side by side (two dimensions of a BF16 key stay together,
//!   as processors multiply them: `[num_kv_heads, head_dim / 2, block_size, 2]`);
//! - for the one-byte types, the scales, `[num_kv_heads, block_size]` bfloat16 ([`crate::kv_codes`] says how they come about).
//!
//! Each part is padded to a multiple of 16 bytes, which floats in blocks of 8 tokens or more never need. With `head_dim` a
//! multiple of 16 every vector that lies in one piece is aligned to 16 bytes. A one-byte cache takes `(head_dim + 2) / (2 *
//! head_dim)` of a 16-bit one: 51.6 % for 64, 50.8 % for 128.

use crate::{DeviceError, KvDType};

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum KvSide {
    Key,
    Value,
}

/// Heads of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a key of one head.
    pub k_dim: usize,
    /// Elements of a value of one head; 0: the keys are the values too.
    pub v_dim: usize,
}

impl KvShape {
    /// Heads whose keys are as wide as their values.
    pub const fn new(num_kv_heads: usize, head_dim: usize) -> Self {
        Self { num_kv_heads, k_dim: head_dim, v_dim: head_dim }
    }

    /// One head of keys that are the values too, as absorbed latent attention has it.
    pub const fn latent(width: usize) -> Self {
        Self { num_kv_heads: 1, k_dim: width, v_dim: 0 }
    }

    /// Of a layer that has neither.
    pub const NONE: Self = Self { num_kv_heads: 0, k_dim: 0, v_dim: 0 };

    /// Whether the keys are the values too.
    pub const fn is_latent(&self) -> bool {
        self.v_dim == 0 && self.k_dim > 0
    }

    /// Elements of a key, or of a value, of one head.
    pub const fn dim(&self, side: KvSide) -> usize {
        match side {
            KvSide::Key => self.k_dim,
            KvSide::Value => self.v_dim,
        }
    }

    /// The width of keys and values.
    ///
    /// Errors: [`DeviceError::Unsupported`] where they differ, with what computes them.
    pub fn head_dim(&self) -> Result<usize, DeviceError> {
        let Self { k_dim, v_dim, .. } = *self;
        if k_dim == v_dim || v_dim == 0 {
            return Ok(k_dim);
        }
        Err(DeviceError::Unsupported(format!(
            "keys of {k_dim} elements and values of {v_dim} have no kernel; only the reference backend computes heads of two widths"
        )))
    }

    /// Bytes of a key that stay together in the host's memory: an element, or two of [`KvDType::BF16`] where their number is
    /// even.
    pub const fn key_unit_bytes(&self, dtype: KvDType) -> usize {
        if matches!(dtype, KvDType::BF16) && self.k_dim.is_multiple_of(2) { 4 } else { dtype.element_bytes() }
    }

    /// Bytes of the keys, or of the values, of a block; `None` on overflow.
    pub fn plane_block_bytes(&self, side: KvSide, dtype: KvDType, block_size: usize) -> Option<usize> {
        if self.dim(side) == 0 {
            return Some(0);
        }
        let vectors = self.num_kv_heads.checked_mul(block_size)?;
        let elements = vectors.checked_mul(self.dim(side))?.checked_mul(dtype.element_bytes())?;
        let scales = vectors.checked_mul(dtype.scale_bytes())?;
        elements.checked_next_multiple_of(ALIGNMENT)?.checked_add(scales.checked_next_multiple_of(ALIGNMENT)?)
    }

    /// Bytes of the keys and values of a block; `None` on overflow.
    pub fn block_bytes(&self, dtype: KvDType, block_size: usize) -> Option<usize> {
        let of = |side| self.plane_block_bytes(side, dtype, block_size);
        of(KvSide::Key)?.checked_add(of(KvSide::Value)?)
    }
}

/// Where a layer's keys and values lie, and their shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Its KV group: an entry of [`crate::StepMetadata::groups`].
    pub group: usize,
    /// Where in a block of the group its keys begin, in bytes; its values follow them.
    pub offset: usize,
    /// Heads and their widths.
    pub shape: KvShape,
}

/// Whose keys and values a layer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// Its own.
    Own(KvShape),
    /// Those that this layer has written.
    Layer(usize),
    /// Nobody's: it has another way to see the past.
    Nothing,
}

/// The KV storage of a model.
#[derive(Clone, Debug)]
pub struct KvCacheSpec {
    /// Physical blocks, the null block 0 included.
    pub num_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Element type.
    pub dtype: KvDType,
    /// One entry a layer of the model. A layer that reads another one's keys and values has the same entry.
    pub layers: Vec<KvLayer>,
}

/// Number of the format of a block: another one whenever its bytes come to mean something else, for some are kept in files.
pub const KV_FORMAT: u32 = 2;

/// Elements and scales of a block each take a multiple of this many bytes.
const ALIGNMENT: usize = 16;
/// The longest vector of a head, in bytes.
pub(crate) const MAX_VECTOR_BYTES: usize = 8 << 10;

impl KvCacheSpec {
    /// A storage for `num_layers` layers of one shape, all in one KV group.
    ///
    /// Errors: [`DeviceError::Shape`] when the size of a block overflows.
    pub fn uniform(
        (num_blocks, block_size): (usize, usize),
        dtype: KvDType,
        shape: KvShape,
        num_layers: usize,
    ) -> Result<Self, DeviceError> {
        let layers: Vec<usize> = (0..num_layers).collect();
        Self::grouped((num_blocks, block_size), dtype, &vec![KvSource::Own(shape); num_layers], &[&layers])
    }

    /// A storage for layers in groups: in a block of its group, each layer follows the one before. `sources` has an entry for
    /// each layer, `groups` the layers of each group.
    ///
    /// Errors: [`DeviceError::Shape`] for a layer with keys and values of its own that is not in exactly one group, for one that
    /// reads those of a layer without, and when the size of a block overflows.
    pub fn grouped(
        (num_blocks, block_size): (usize, usize),
        dtype: KvDType,
        sources: &[KvSource],
        groups: &[&[usize]],
    ) -> Result<Self, DeviceError> {
        let fail = |layer: usize, why: &str| Err(DeviceError::Shape(format!("layer {layer} of the KV cache {why}")));
        let mut placed: Vec<Option<KvLayer>> = vec![None; sources.len()];
        for (group, members) in groups.iter().enumerate() {
            let mut offset = 0_usize;
            for &layer in *members {
                let Some(KvSource::Own(shape)) = sources.get(layer).copied() else {
                    return fail(layer, "is in a group and has no keys and values of its own");
                };
                if placed[layer].replace(KvLayer { group, offset, shape }).is_some() {
                    return fail(layer, "is in two groups");
                }
                let Some(end) = shape.block_bytes(dtype, block_size).and_then(|bytes| offset.checked_add(bytes)) else {
                    return fail(layer, "takes more bytes than can be counted");
                };
                offset = end;
            }
        }
        let mut layers = Vec::with_capacity(sources.len());
        for (layer, source) in sources.iter().enumerate() {
            let of = match source {
                KvSource::Own(_) => layer,
                KvSource::Layer(other) => *other,
                KvSource::Nothing => {
                    layers.push(KvLayer { group: 0, offset: 0, shape: KvShape::NONE });
                    continue;
                }
            };
            match placed.get(of).copied().flatten() {
                Some(place) => layers.push(place),
                None => return fail(layer, "reads keys and values that no group has"),
            }
        }
        Ok(Self { num_blocks, block_size, dtype, layers })
    }

    /// Bytes of one head's vector, its scale apart.
    pub(crate) const fn vector_bytes(&self, shape: &KvShape, side: KvSide) -> usize {
        shape.dim(side) * self.dtype.element_bytes()
    }

    /// Bytes that a block takes: those of the group that takes most; `None` on overflow.
    pub fn bytes_per_block(&self) -> Option<u64> {
        let end = |layer: &KvLayer| layer.offset.checked_add(layer.shape.block_bytes(self.dtype, self.block_size)?);
        self.layers.iter().map(end).try_fold(0, |most, end| Some(most.max(end? as u64)))
    }

    /// Bytes of the whole storage; `None` on overflow.
    pub fn total_bytes(&self) -> Option<u64> {
        self.bytes_per_block()?.checked_mul(self.num_blocks as u64)
    }

    /// Bytes of a layer's keys, or values, in a block.
    pub(crate) fn plane_block_bytes(&self, shape: &KvShape, side: KvSide) -> usize {
        shape.plane_block_bytes(side, self.dtype, self.block_size).expect("a storage of this shape was made")
    }

    /// Where in a block a layer's keys, or values, begin.
    pub(crate) fn plane_offset(&self, layer: &KvLayer, side: KvSide) -> usize {
        layer.offset + if side == KvSide::Value { self.plane_block_bytes(&layer.shape, KvSide::Key) } else { 0 }
    }

    /// Where things lie in a plane with `block_stride` bytes from a block to the next one.
    pub(crate) fn layout(&self, shape: &KvShape, side: KvSide, block_stride: usize) -> PlaneLayout {
        let vector_bytes = self.vector_bytes(shape, side);
        PlaneLayout {
            block_size: self.block_size,
            vector_bytes,
            key_unit_bytes: vector_bytes,
            scales: (shape.num_kv_heads * self.block_size * vector_bytes).next_multiple_of(ALIGNMENT),
            block_stride,
        }
    }

    /// The same in the host's memory, where keys are transposed.
    pub(crate) fn host_layout(&self, shape: &KvShape, side: KvSide, block_stride: usize) -> PlaneLayout {
        PlaneLayout { key_unit_bytes: shape.key_unit_bytes(self.dtype), ..self.layout(shape, side, block_stride) }
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
