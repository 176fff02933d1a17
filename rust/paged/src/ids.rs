//! The names of what the books are about.

/// Index of a physical block. Token `t` of a block lies in slot `block_id * block_size + t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The null block: a place in a block table whose KV is never read. It is never held, freed or published.
    pub const NULL: Self = Self(0);
}

/// Names a request; chosen by the caller, unique among those being served. The scheduler hashes it without a key, so whoever
/// sends requests should not choose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);
