//! Disjoint writes to one buffer from several threads.

use std::marker::PhantomData;

/// A mutable slice that the threads of a pool write disjoint parts of: a projection's threads own columns, not rows, of its
/// output.
pub(in crate::cpu) struct SharedOut<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a SharedOut only hands out parts through `part`, whose caller promises that no two overlap; T: Send lets them be
// written elsewhere.
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    pub(in crate::cpu) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    /// No two parts that overlap may be alive at once.
    #[allow(clippy::mut_from_ref)]
    pub(in crate::cpu) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start}..+{len} of {}", self.len);
        // SAFETY: in bounds by the assertion, borrowed for 'a by `new`, and unique by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
