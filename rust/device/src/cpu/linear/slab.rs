//! Memory of packed weights: parts of large mappings on huge pages.
//!
//! A small model's matrices are each smaller than a huge page (2 MiB), and with 4 KiB pages reading them is bound by address
//! translation. So that they share huge pages, they are cut from slabs that are reserved at once and committed as they are
//! written.

use std::sync::{
    Arc, Mutex, PoisonError, Weak,
    atomic::{AtomicUsize, Ordering},
};

use crate::{DeviceError, mmap::Pages};

/// Address space of a slab; a larger allocation gets a mapping of its own.
const SLAB: usize = 64 << 20;
/// Parts start on cache lines.
const ALIGN: usize = 64;

/// The slab that is being cut; freed with the last part that was cut from it.
static CURRENT: Mutex<Weak<Slab>> = Mutex::new(Weak::new());

struct Slab {
    start: *mut u8,
    len: usize,
    /// Bytes handed out.
    used: AtomicUsize,
    /// Keeps the mapping that `start` points to.
    pages: Pages<u8>,
}

// SAFETY: the mapping is plain memory of this process; its bytes are only reached through parts, which are disjoint.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    fn new(len: usize) -> Result<Arc<Self>, DeviceError> {
        let mut pages = Pages::zeroed(len)?;
        pages.advise_huge();
        let start = pages.as_mut_slice().as_mut_ptr();
        Ok(Arc::new(Self { start, len, used: AtomicUsize::new(0), pages }))
    }

    fn cut(self: &Arc<Self>, len: usize) -> Option<SlabBytes> {
        let rounded = len.next_multiple_of(ALIGN);
        let grow = |used: usize| used.checked_add(rounded).filter(|end| *end <= self.len);
        let offset = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).ok()?;
        // SAFETY: offset + len is within the mapping.
        let start = unsafe { self.start.add(offset) };
        Some(SlabBytes { start, len, _slab: Arc::clone(self) })
    }
}

/// Gives back what the current slab has committed beyond its parts: the rest of its last huge page.
pub fn trim() {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(slab) = current.upgrade() {
        // SAFETY: no part reaches beyond `used`, and none is cut from this slab while it is locked.
        unsafe { slab.pages.release(slab.used.load(Ordering::Relaxed)..slab.len) };
    }
}

/// Zeroed bytes of their own, on a cache line.
pub(super) struct SlabBytes {
    start: *mut u8,
    len: usize,
    _slab: Arc<Slab>,
}

// SAFETY: as a Vec<u8>: this part of the slab belongs to it alone.
unsafe impl Send for SlabBytes {}
// SAFETY: as above.
unsafe impl Sync for SlabBytes {}

impl SlabBytes {
    /// `len` zeroed bytes.
    pub(super) fn zeroed(len: usize) -> Result<Self, DeviceError> {
        if len < SLAB {
            let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(part) = current.upgrade().and_then(|slab| slab.cut(len)) {
                return Ok(part);
            }
            let slab = Slab::new(SLAB)?;
            *current = Arc::downgrade(&slab);
            return Ok(slab.cut(len).expect("a new slab holds less than a slab"));
        }
        Ok(Slab::new(len.next_multiple_of(ALIGN))?.cut(len).expect("the slab was made for this part"))
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: `cut` gave these bytes to self alone, and the slab lives as long.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zeroed_disjoint_and_on_cache_lines_and_survive_a_trim() {
        let mut parts: Vec<_> =
            [1, 63, 64, 65, 0, SLAB - 1, SLAB + 1, 7].iter().map(|n| SlabBytes::zeroed(*n).expect("memory")).collect();
        for (i, part) in parts.iter_mut().enumerate() {
            assert_eq!(part.as_slice().as_ptr().addr() % ALIGN, 0);
            assert!(part.as_slice().iter().all(|b| *b == 0));
            part.as_mut_slice().fill(i as u8 + 1);
            trim();
        }
        for (i, part) in parts.iter().enumerate() {
            assert!(part.as_slice().iter().all(|b| *b == i as u8 + 1), "part {i} was overwritten");
        }
    }
}
