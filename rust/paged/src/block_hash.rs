//! Content-addressed identity of a block.
//!
//! A block's hash covers everything its KV depends on: the hash of its parent (hence the whole prefix), its own tokens, at the
//! root the request's cache identity, and behind what is everybody's the salt of those who share it. It is a keyed BLAKE3, of
//! which 128 bits are kept; without the key nobody can aim for a collision. It is still only a way to find a candidate: the
//! prefix index compares tokens and parent before it serves one.

/// 128 bits of a keyed hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash(pub [u8; 16]);

/// What a hash is taken of. The kinds never share an input: each is tagged and framed.
#[derive(Debug, Clone, Copy)]
pub enum HashInput<'a> {
    /// The start of every prefix under one cache identity.
    Root {
        /// Opaque bytes, see [`CacheIdentity`].
        identity: &'a [u8],
    },
    /// The place in a prefix behind which only those with one salt share.
    Salt {
        /// Hash of the block before it, or of the root.
        parent: BlockHash,
        /// Opaque bytes, see [`crate::NewRequest::cache_salt`].
        salt: &'a [u8],
    },
    /// One block.
    Block {
        /// Hash of what is before it: a block, a salt or the root.
        parent: BlockHash,
        /// Its tokens, `[block_size]`; fewer at the end of a sequence.
        tokens: &'a [u32],
    },
}

/// A hash function over framed inputs; the first argument is the key.
pub type HashFunction = fn(&[u8; 32], HashInput<'_>) -> BlockHash;

/// A hash function with its key.
#[derive(Clone)]
pub struct BlockHasher {
    key: [u8; 32],
    function: HashFunction,
}

impl BlockHasher {
    /// Keyed BLAKE3. The key should be drawn at random for each process.
    pub fn new(key: [u8; 32]) -> Self {
        Self::with_function(key, keyed_blake3)
    }

    /// Another function, however weak: hits stay exact because they are verified.
    pub fn with_function(key: [u8; 32], function: HashFunction) -> Self {
        Self { key, function }
    }

    /// Hash of a root, or of a block behind its parent.
    pub fn hash(&self, input: HashInput<'_>) -> BlockHash {
        (self.function)(&self.key, input)
    }
}

impl std::fmt::Debug for BlockHasher {
    /// Keeps the key out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockHasher").finish_non_exhaustive()
    }
}

const TAG_ROOT: u8 = 1;
const TAG_BLOCK: u8 = 2;
const TAG_SALT: u8 = 3;

fn keyed_blake3(key: &[u8; 32], input: HashInput<'_>) -> BlockHash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    match input {
        HashInput::Root { identity } => {
            hasher.update(&[TAG_ROOT]);
            hasher.update(&(identity.len() as u64).to_le_bytes());
            hasher.update(identity);
        }
        HashInput::Salt { parent, salt } => {
            hasher.update(&[TAG_SALT]);
            hasher.update(&parent.0);
            hasher.update(&(salt.len() as u64).to_le_bytes());
            hasher.update(salt);
        }
        HashInput::Block { parent, tokens } => {
            hasher.update(&[TAG_BLOCK]);
            hasher.update(&parent.0);
            hasher.update(&(tokens.len() as u64).to_le_bytes());
            // One update a token would cost more than the compression itself.
            let mut bytes = [0u8; 128];
            for chunk in tokens.chunks(32) {
                for (place, token) in bytes.chunks_exact_mut(4).zip(chunk) {
                    place.copy_from_slice(&token.to_le_bytes());
                }
                hasher.update(&bytes[..chunk.len() * 4]);
            }
        }
    }
    let mut kept = [0u8; 16];
    kept.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    BlockHash(kept)
}

/// What a cached prefix depends on besides its tokens. The number is the tag under which it is framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum IdentityField {
    /// Model and the generation of its weights.
    Model = 1,
    /// Adapter and the generation of its weights; a name alone is not enough, it can be reloaded.
    Adapter = 2,
    /// The tenant that may see the prefix. Set by the server, never by a client.
    Tenant = 3,
    /// A salt that the caller chose.
    Salt = 4,
    /// Digest of an image or audio item, with its place and processing parameters.
    Media = 5,
    /// How positions became keys: which rope table.
    Rope = 6,
}

/// Builds the identity bytes of a request: every field is typed and length-prefixed, so that no two different lists
/// of fields give the same bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheIdentity(Vec<u8>);

impl CacheIdentity {
    /// The identity of a request that shares with every other plain request.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one field; order matters.
    #[must_use]
    pub fn with(mut self, field: IdentityField, value: &[u8]) -> Self {
        self.0.push(field as u8);
        self.0.extend_from_slice(&(value.len() as u64).to_le_bytes());
        self.0.extend_from_slice(value);
        self
    }

    /// The value of the first field of this kind in a request's identity bytes; `None` without one, and of bytes that are not
    /// an identity's.
    pub fn find(bytes: &[u8], field: IdentityField) -> Option<&[u8]> {
        let mut rest = bytes;
        loop {
            let (tag, behind) = rest.split_first()?;
            let (len, behind) = behind.split_first_chunk()?;
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let (value, behind) = behind.split_at_checked(len)?;
            if *tag == field as u8 {
                return Some(value);
            }
            rest = behind;
        }
    }

    /// The bytes for [`crate::NewRequest::identity`].
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// What a request's blocks are found by besides their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheKey<'a> {
    /// See [`crate::NewRequest::identity`].
    pub identity: &'a [u8],
    /// See [`crate::NewRequest::cache_salt`].
    pub salt: &'a [u8],
    /// So many leading blocks are found without the salt.
    pub num_public_blocks: usize,
}

impl<'a> CacheKey<'a> {
    /// A key without a salt.
    pub fn new(identity: &'a [u8]) -> Self {
        Self { identity, salt: b"", num_public_blocks: 0 }
    }

    /// Whether both keys lead to the same block `index` behind the same tokens.
    pub(crate) fn is_same_at(&self, other: Self, index: usize) -> bool {
        let is_public = |key: &Self| key.salt.is_empty() || index < key.num_public_blocks;
        let same_salt = || self.salt == other.salt && self.num_public_blocks == other.num_public_blocks;
        self.identity == other.identity && ((is_public(self) && is_public(&other)) || same_salt())
    }

    /// Whether the salt stands before block `index`.
    pub(crate) fn is_salted_at(&self, index: usize) -> bool {
        !self.salt.is_empty() && index == self.num_public_blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_join_to_the_same_text_stay_apart() {
        let split =
            |a: &[u8], b: &[u8]| CacheIdentity::new().with(IdentityField::Tenant, a).with(IdentityField::Salt, b).into_bytes();
        assert_ne!(split(b"org_1", b"2345"), split(b"org_12345", b""));
        assert_ne!(
            CacheIdentity::new().with(IdentityField::Adapter, b"x").into_bytes(),
            CacheIdentity::new().with(IdentityField::Salt, b"x").into_bytes(),
        );
    }

    #[test]
    fn the_hash_depends_on_key_parent_tokens_and_kind() {
        let hasher = BlockHasher::new([7; 32]);
        let root = hasher.hash(HashInput::Root { identity: b"" });
        let block = |hasher: &BlockHasher, parent, tokens: &[u32]| hasher.hash(HashInput::Block { parent, tokens });
        let first = block(&hasher, root, &[1, 2]);
        assert_eq!(first, block(&hasher, root, &[1, 2]));
        assert_ne!(first, block(&hasher, first, &[1, 2]));
        assert_ne!(first, block(&hasher, root, &[1, 3]));
        assert_ne!(first, block(&hasher, root, &[1, 2, 0]));
        assert_ne!(first, block(&BlockHasher::new([8; 32]), root, &[1, 2]));
        assert_ne!(root, hasher.hash(HashInput::Root { identity: b"x" }));
        // Same bytes, other kind.
        assert_ne!(hasher.hash(HashInput::Root { identity: &root.0 }), block(&hasher, root, &[]));
        let salt = |parent, salt| hasher.hash(HashInput::Salt { parent, salt });
        assert_ne!(salt(root, b"x"), salt(first, b"x"));
        assert_ne!(salt(root, b"x"), salt(root, b"y"));
        assert_ne!(salt(root, b""), block(&hasher, root, &[]));
        // Longer than one internal chunk.
        let long: Vec<u32> = (0..64).collect();
        let mut other = long.clone();
        other[40] = 0;
        assert_ne!(block(&hasher, root, &long), block(&hasher, root, &other));
    }
}
