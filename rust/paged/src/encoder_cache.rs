//! Outputs of vision and audio encoders, kept within a budget of bytes.
//!
//! An image is encoded once and its output is read by every prefill chunk that covers it, so the output must stay from
//! the one to the other; and the next turn of a conversation brings the same image again. This module keeps the books:
//! which output has which [`EncoderIndex`] and which may go. It has no tensors; the owner of the memory follows
//! [`EncoderCache::drain_dropped`].
//!
//! How a scheduler uses it:
//!
//! 1. At submit, [`EncoderCache::check`] refuses an item that could never be held.
//! 2. Each step begins with [`EncoderCache::begin_step`]. Then, in order of arrival, each request whose next tokens
//!    reach an item calls [`EncoderCache::acquire`]. `None` means wait: the request's chunk ends before that item.
//! 3. The memory of the dropped outputs is given back, then the items that are [not encoded](EncoderCache::is_encoded) are
//!    encoded. When the step is committed, [`EncoderCache::mark_encoded`] says so; what is not marked is never reused.
//! 4. The request drops its [`EncoderLease`] when the item's last token is computed, and whenever it is preempted or ends.
//!
//! ```
//! use paged::{EncoderCache, EncoderContent, EncoderItem};
//!
//! let picture = EncoderItem {
//!     dimensions: &[2, 2, 3],
//!     mode: "RGB8",
//!     processor: b"size=2",
//!     tower: b"siglip:1",
//!     adapter: b"",
//!     content: EncoderContent::Samples(&[0; 12]),
//! };
//! let key = picture.key(&[7; 32]); // a key drawn at random for the process
//! let mut cache = EncoderCache::new(1 << 20);
//! let lease = cache.acquire(key, 4096)?.expect("nobody else holds anything");
//! assert!(!cache.is_encoded(&lease)); // encode into lease.index(), then
//! cache.mark_encoded(&lease);
//! drop(lease); // the request has ended
//! let again = cache.acquire(key, 4096)?.expect("nobody else holds anything");
//! assert!(cache.is_encoded(&again));
//! # Ok::<(), paged::EncoderCacheError>(())
//! ```
//!
//! Nobody waits for ever. A lease is all its holder needs to compute the item's tokens, so a lease comes back after
//! finitely many steps: no request holds one while it waits for another before it can go on. After the first `None` of a
//! step nobody behind gets anything, not even what is there already, so the leases that a waiting request waits for
//! only become fewer. Once all are back, everything can be evicted, and `check` saw that the item fits. Two items that
//! together exceed the budget therefore take turns: the first to have arrived proceeds, and the other follows when the
//! first is computed.
//!
//! Every call takes constant time, apart from the outputs it evicts: each is evicted once.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::error::EncoderCacheError;

/// 256 bits of a keyed hash over everything that an encoder's output depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EncoderKey([u8; 32]);

impl EncoderKey {
    /// Its bits.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// What an item is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncoderContent<'a> {
    /// Decoded samples: pixels, audio.
    Samples(&'a [u8]),
    /// A file as it came.
    File(&'a [u8]),
}

/// An item to encode, with all that decides the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderItem<'a> {
    /// Extent along each axis, such as height, width and channels: equal bytes can be pictures of different shape.
    pub dimensions: &'a [usize],
    /// How the bytes are meant, such as "RGB8" or "mono f32 16000 Hz".
    pub mode: &'a str,
    /// Parameters of the processor: size, crop, mean and deviation, tiling.
    pub processor: &'a [u8],
    /// The encoder's name and the generation of its weights.
    pub tower: &'a [u8],
    /// The adapter's name and generation; empty without one.
    pub adapter: &'a [u8],
    /// The bytes.
    pub content: EncoderContent<'a>,
}

impl EncoderItem<'_> {
    /// The item's key. `hash_key` should be drawn at random for each process, so that nobody can aim for a collision.
    pub fn key(&self, hash_key: &[u8; 32]) -> EncoderKey {
        let mut hasher = blake3::Hasher::new_keyed(hash_key);
        let mut field = |tag: u8, length: usize, bytes: &[u8]| {
            hasher.update(&[tag]);
            hasher.update(&(length as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(1, self.dimensions.len(), &[]);
        for dimension in self.dimensions {
            field(2, *dimension, &[]);
        }
        for (tag, bytes) in [(3, self.mode.as_bytes()), (4, self.processor), (5, self.tower), (6, self.adapter)] {
            field(tag, bytes.len(), bytes);
        }
        match self.content {
            EncoderContent::Samples(bytes) => field(7, bytes.len(), bytes),
            EncoderContent::File(bytes) => field(8, bytes.len(), bytes),
        }
        EncoderKey(*hasher.finalize().as_bytes())
    }
}

/// Where an output lies: an index into the owner's list of outputs, which has no gaps for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EncoderIndex(pub u32);

/// Keeps an output in place. It cannot be copied, and dropping it gives it back, so that it is given back once, however
/// its request ends.
///
/// ```compile_fail,E0382
/// fn twice(lease: paged::EncoderLease) {
///     drop(lease);
///     drop(lease);
/// }
/// ```
#[derive(Debug)]
#[must_use = "dropping a lease gives it back"]
pub struct EncoderLease {
    index: EncoderIndex,
    returns: Sender<EncoderIndex>,
}

impl EncoderLease {
    /// Where the output lies, or will.
    pub fn index(&self) -> EncoderIndex {
        self.index
    }
}

impl Drop for EncoderLease {
    fn drop(&mut self) {
        // Without a cache there is nothing to give back to.
        let _ = self.returns.send(self.index);
    }
}

/// Figures of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncoderCacheStats {
    /// Bytes it may take.
    pub budget_bytes: u64,
    /// Bytes of all outputs that are kept.
    pub used_bytes: u64,
    /// Of those, bytes that requests hold.
    pub leased_bytes: u64,
    /// Outputs that are kept.
    pub num_outputs: usize,
    /// Leases that found an output, or one about to be encoded.
    pub hits: u64,
    /// Leases that did not.
    pub misses: u64,
    /// Outputs dropped for others.
    pub evictions: u64,
}

#[derive(Debug)]
struct Output {
    key: EncoderKey,
    num_bytes: u64,
    num_leases: u32,
    is_encoded: bool,
    /// Neighbours among the outputs that nobody holds.
    older: Option<u32>,
    newer: Option<u32>,
}

/// The books of the encoder outputs. See the [module](self) for how to use it.
#[derive(Debug)]
pub struct EncoderCache {
    stats: EncoderCacheStats,
    outputs: Vec<Option<Output>>,
    vacant: Vec<u32>,
    indices: HashMap<EncoderKey, u32>,
    /// Ends of the list of outputs that nobody holds, the first to go and the last.
    oldest: Option<u32>,
    newest: Option<u32>,
    /// Somebody has to wait in this step, and so has everybody behind.
    closed: bool,
    dropped: Vec<EncoderIndex>,
    sender: Sender<EncoderIndex>,
    returned: Receiver<EncoderIndex>,
}

impl EncoderCache {
    /// An empty cache. 0 bytes turn it off: it refuses every item.
    pub fn new(budget_bytes: u64) -> Self {
        let (sender, returned) = channel();
        Self {
            stats: EncoderCacheStats { budget_bytes, ..EncoderCacheStats::default() },
            outputs: Vec::new(),
            vacant: Vec::new(),
            indices: HashMap::new(),
            oldest: None,
            newest: None,
            closed: false,
            dropped: Vec::new(),
            sender,
            returned,
        }
    }

    /// Whether an item of so many bytes of output can ever be held; to be asked at submit.
    ///
    /// # Errors
    /// [`EncoderCacheError::Off`] and [`EncoderCacheError::TooLarge`], with the bytes that would do.
    pub fn check(&self, num_bytes: u64) -> Result<(), EncoderCacheError> {
        let budget_bytes = self.stats.budget_bytes;
        if budget_bytes == 0 {
            return Err(EncoderCacheError::Off { needed_bytes: num_bytes });
        }
        if num_bytes > budget_bytes {
            return Err(EncoderCacheError::TooLarge { needed_bytes: num_bytes, budget_bytes });
        }
        Ok(())
    }

    /// Lets requests ask again, in order of arrival.
    pub fn begin_step(&mut self) {
        self.closed = false;
    }

    /// A lease on an item's output, for which room of `num_bytes` is made if it is not there; `None` if the request has
    /// to wait because others hold too much, or because one ahead of it waits in this step.
    ///
    /// # Errors
    /// Those of [`Self::check`], and [`EncoderCacheError::OtherSize`] if the output is there with another size. Nothing
    /// has changed then.
    pub fn acquire(&mut self, key: EncoderKey, num_bytes: u64) -> Result<Option<EncoderLease>, EncoderCacheError> {
        self.check(num_bytes)?;
        self.take_back();
        let known = self.indices.get(&key).copied();
        if let Some(output) = known.map(|index| self.output(index))
            && output.num_bytes != num_bytes
        {
            return Err(EncoderCacheError::OtherSize { kept_bytes: output.num_bytes, asked_bytes: num_bytes });
        }
        if self.closed {
            return Ok(None);
        }
        let index = match known {
            Some(index) => index,
            None if self.stats.budget_bytes - self.stats.leased_bytes < num_bytes => {
                self.closed = true;
                return Ok(None);
            }
            None => self.insert(key, num_bytes),
        };
        let (hits, misses) = if known.is_some() { (1, 0) } else { (0, 1) };
        self.stats.hits += hits;
        self.stats.misses += misses;
        if self.output(index).num_leases == 0 {
            self.unlink(index);
            self.stats.leased_bytes += num_bytes;
        }
        self.output_mut(index).num_leases += 1;
        Ok(Some(EncoderLease { index: EncoderIndex(index), returns: self.sender.clone() }))
    }

    /// Whether the output is there to be read; if not, it has to be encoded, once for all who hold a lease on it.
    pub fn is_encoded(&self, lease: &EncoderLease) -> bool {
        self.output(lease.index.0).is_encoded
    }

    /// The step that encoded it is committed.
    pub fn mark_encoded(&mut self, lease: &EncoderLease) {
        self.output_mut(lease.index.0).is_encoded = true;
    }

    /// Indices whose outputs are gone since the last call; some may belong to other items by now. To be taken once a step,
    /// before anything is encoded.
    pub fn drain_dropped(&mut self) -> impl Iterator<Item = EncoderIndex> + '_ {
        self.take_back();
        self.dropped.drain(..)
    }

    /// Drops every output that nobody holds, as after a change of weights; their keys would not be asked for again.
    pub fn clear(&mut self) {
        self.take_back();
        while let Some(index) = self.oldest {
            self.unlink(index);
            self.remove(index);
        }
    }

    /// Figures, after the leases that were dropped.
    pub fn stats(&mut self) -> EncoderCacheStats {
        self.take_back();
        self.stats
    }

    /// Takes note of the leases that were dropped, in the order in which they were.
    fn take_back(&mut self) {
        while let Ok(EncoderIndex(index)) = self.returned.try_recv() {
            let output = self.output_mut(index);
            output.num_leases -= 1;
            if output.num_leases > 0 {
                continue;
            }
            let (num_bytes, is_encoded) = (output.num_bytes, output.is_encoded);
            self.stats.leased_bytes -= num_bytes;
            if is_encoded {
                self.link_newest(index);
            } else {
                self.remove(index);
            }
        }
    }

    /// Makes room, which there is, and puts a new output there, in no list yet.
    fn insert(&mut self, key: EncoderKey, num_bytes: u64) -> u32 {
        while self.stats.budget_bytes - self.stats.used_bytes < num_bytes {
            let oldest = self.oldest.expect("what is not leased can be evicted");
            self.unlink(oldest);
            self.remove(oldest);
            self.stats.evictions += 1;
        }
        let output = Output { key, num_bytes, num_leases: 0, is_encoded: false, older: None, newer: None };
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.outputs.push(None);
            u32::try_from(self.outputs.len() - 1).expect("fewer than 2^32 outputs")
        });
        self.outputs[index as usize] = Some(output);
        self.indices.insert(key, index);
        self.stats.used_bytes += num_bytes;
        self.stats.num_outputs += 1;
        index
    }

    /// Forgets an output that is in no list.
    fn remove(&mut self, index: u32) {
        let output = self.outputs[index as usize].take().expect("the output is there");
        if let MapEntry::Occupied(entry) = self.indices.entry(output.key) {
            entry.remove();
        }
        self.vacant.push(index);
        self.dropped.push(EncoderIndex(index));
        self.stats.used_bytes -= output.num_bytes;
        self.stats.num_outputs -= 1;
    }

    fn link_newest(&mut self, index: u32) {
        let older = self.newest.replace(index);
        self.output_mut(index).older = older;
        match older {
            Some(older) => self.output_mut(older).newer = Some(index),
            None => self.oldest = Some(index),
        }
    }

    /// Takes an output out of the list of those that nobody holds; does nothing to a new one, which is not in it.
    fn unlink(&mut self, index: u32) {
        let output = self.output_mut(index);
        let (older, newer) = (output.older.take(), output.newer.take());
        match older {
            Some(older) => self.output_mut(older).newer = newer,
            None if self.oldest == Some(index) => self.oldest = newer,
            None => {}
        }
        match newer {
            Some(newer) => self.output_mut(newer).older = older,
            None if self.newest == Some(index) => self.newest = older,
            None => {}
        }
    }

    fn output(&self, index: u32) -> &Output {
        self.outputs[index as usize].as_ref().expect("a lease, or a list, keeps the output")
    }

    fn output_mut(&mut self, index: u32) -> &mut Output {
        self.outputs[index as usize].as_mut().expect("a lease, or a list, keeps the output")
    }
}
