//! Copies to a GPU that nothing waits for: through page-locked memory of the host, which is used again in turns.
//!
//! ```text
//! segment 0         | segment 1         | segment 2 ...
//! upload | upload | | upload |          |              a full segment is marked; before it is written to again,
//!                  mark                                its mark is waited for
//! ```
//!
//! From pageable memory the driver makes the copy itself: it may wait for the stream, and on the default stream it disturbs
//! whoever records a graph.

use crate::kernel_args::DevicePtr;

use super::{CudaError, driver::HostPtr};

/// Segments that take turns.
const SEGMENTS: usize = 4;
/// Bytes of one.
const SEGMENT_BYTES: usize = 4 << 20;
/// Copies begin at a multiple of this.
const ALIGNMENT: usize = 64;

/// A stream of copies, done one after the other.
pub trait CopyStream {
    /// Begins a copy to the GPU.
    ///
    /// # Safety
    /// Both are memory with so many bytes, and nobody writes to `from` until the copy is done.
    unsafe fn copy(&self, to: DevicePtr, from: HostPtr, bytes: usize) -> Result<(), CudaError>;

    /// Puts the mark of a segment behind the copies so far.
    fn mark(&self, segment: usize) -> Result<(), CudaError>;

    /// Waits until the last mark of a segment is reached.
    fn wait(&self, segment: usize) -> Result<(), CudaError>;
}

/// Page-locked memory, and how much of it is in use.
pub struct UploadRing {
    memory: HostPtr,
    segment: usize,
    /// Bytes of that segment.
    used: usize,
    /// Whether a segment has been marked since it was last waited for.
    marked: [bool; SEGMENTS],
}

impl UploadRing {
    /// Bytes of its memory.
    pub const BYTES: usize = SEGMENTS * SEGMENT_BYTES;
    /// Marks that it uses.
    pub const SEGMENTS: usize = SEGMENTS;

    /// # Safety
    /// The memory has [`Self::BYTES`] bytes, which nobody else uses, and outlives all copies.
    pub unsafe fn new(memory: HostPtr) -> Self {
        Self { memory, segment: 0, used: 0, marked: [false; SEGMENTS] }
    }

    /// Its memory.
    pub fn memory(&self) -> HostPtr {
        self.memory
    }

    /// Copies to the GPU; `from` may change as soon as this returns.
    ///
    /// # Safety
    /// `to` is memory of the GPU with as many bytes.
    pub unsafe fn upload(&mut self, stream: &impl CopyStream, to: DevicePtr, from: &[u8]) -> Result<(), CudaError> {
        for (index, chunk) in from.chunks(SEGMENT_BYTES).enumerate() {
            if self.used + chunk.len() > SEGMENT_BYTES {
                self.turn(stream)?;
            }
            // SAFETY: the chunk fits into what is left of the segment, which no copy reads.
            let at = unsafe { self.memory.0.add(self.segment * SEGMENT_BYTES + self.used) };
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), at, chunk.len()) };
            // Also where the copy cannot be begun: who knows how far it came.
            self.used += chunk.len().next_multiple_of(ALIGNMENT);
            // SAFETY: the segment is written to again only when its mark was waited for; the rest is the caller's promise.
            unsafe { stream.copy(to + (index * SEGMENT_BYTES) as u64, HostPtr(at), chunk.len())? };
        }
        Ok(())
    }

    /// Goes on to the next segment, once its copies are done.
    fn turn(&mut self, stream: &impl CopyStream) -> Result<(), CudaError> {
        stream.mark(self.segment)?;
        self.marked[self.segment] = true;
        let next = (self.segment + 1) % SEGMENTS;
        if self.marked[next] {
            stream.wait(next)?;
            self.marked[next] = false;
        }
        (self.segment, self.used) = (next, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Makes copies as late as it may: when their mark is waited for.
    #[derive(Default)]
    struct Late {
        gpu: RefCell<Vec<u8>>,
        copies: RefCell<Vec<(usize, usize, usize)>>,
        /// Copies before the last mark of each segment.
        marks: RefCell<[usize; SEGMENTS]>,
        done: RefCell<usize>,
        fails: RefCell<bool>,
    }

    impl Late {
        fn finish(&self, count: usize) {
            let mut done = self.done.borrow_mut();
            while *done < count {
                let (to, from, bytes) = self.copies.borrow()[*done];
                // SAFETY: the ring's memory, which outlives it.
                let values = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
                self.gpu.borrow_mut()[to..to + bytes].copy_from_slice(values);
                *done += 1;
            }
        }
    }

    impl CopyStream for Late {
        unsafe fn copy(&self, to: DevicePtr, from: HostPtr, bytes: usize) -> Result<(), CudaError> {
            assert!((from.0 as usize).is_multiple_of(ALIGNMENT));
            self.copies.borrow_mut().push((to as usize, from.0 as usize, bytes));
            Ok(())
        }

        fn mark(&self, segment: usize) -> Result<(), CudaError> {
            self.marks.borrow_mut()[segment] = self.copies.borrow().len();
            Ok(())
        }

        fn wait(&self, segment: usize) -> Result<(), CudaError> {
            if self.fails.replace(false) {
                return Err(CudaError::Driver { what: "waiting".into(), code: "CUDA_ERROR_UNKNOWN".into() });
            }
            self.finish(self.marks.borrow()[segment]);
            Ok(())
        }
    }

    /// Page-locked memory, as far as this is concerned.
    fn memory() -> Vec<[u64; 8]> {
        vec![[0; 8]; UploadRing::BYTES / 64 + 1]
    }

    fn ring(memory: &mut [[u64; 8]]) -> UploadRing {
        let at = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: there is room for the bytes from the first multiple of 64 on.
        unsafe { UploadRing::new(HostPtr(at.add(at.align_offset(ALIGNMENT)))) }
    }

    fn bytes(seed: usize, len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251 + seed * 13) as u8).collect()
    }

    #[test]
    fn nothing_is_written_over_before_it_is_copied() {
        let (mut memory, stream) = (memory(), Late::default());
        let mut ring = ring(&mut memory);
        let sizes = [1, 100, SEGMENT_BYTES, SEGMENT_BYTES + 5, 3, UploadRing::BYTES * 2 + 77, SEGMENT_BYTES - 1, 64, 65];
        let (mut expected, mut at) = (Vec::new(), 0);
        stream.gpu.borrow_mut().resize(sizes.iter().sum(), 0);
        for (seed, size) in sizes.into_iter().enumerate() {
            let mut values = bytes(seed, size);
            // SAFETY: the "GPU" has room for all sizes.
            unsafe { ring.upload(&stream, at as DevicePtr, &values).unwrap() };
            expected.extend_from_slice(&values);
            values.fill(0);
            at += size;
        }
        assert!(*stream.done.borrow() < stream.copies.borrow().len(), "nobody waits for the last ones");
        let count = stream.copies.borrow().len();
        stream.finish(count);
        assert!(*stream.gpu.borrow() == expected);
    }

    #[test]
    fn small_copies_wait_for_nothing_until_every_segment_is_full() {
        let (mut memory, stream) = (memory(), Late::default());
        let mut ring = ring(&mut memory);
        stream.gpu.borrow_mut().resize(4096, 0);
        for _ in 0..UploadRing::BYTES / 4096 {
            // SAFETY: as above.
            unsafe { ring.upload(&stream, 0, &[7; 4096]).unwrap() };
        }
        assert_eq!(*stream.done.borrow(), 0);
        // SAFETY: as above.
        unsafe { ring.upload(&stream, 0, &[8; 4096]).unwrap() };
        assert_eq!(*stream.done.borrow(), SEGMENT_BYTES / 4096, "the first segment");
    }

    #[test]
    fn after_a_wait_that_failed_the_segment_is_still_waited_for() {
        let (mut memory, stream) = (memory(), Late::default());
        let mut ring = ring(&mut memory);
        stream.gpu.borrow_mut().resize(SEGMENT_BYTES * 5, 0);
        let whole = bytes(1, UploadRing::BYTES);
        // SAFETY: as above.
        unsafe { ring.upload(&stream, 0, &whole).unwrap() };
        stream.fails.replace(true);
        let last = bytes(2, SEGMENT_BYTES);
        // SAFETY: as above.
        let mut upload = || unsafe { ring.upload(&stream, UploadRing::BYTES as DevicePtr, &last) };
        assert!(upload().is_err());
        upload().unwrap();
        stream.finish(SEGMENTS + 1);
        assert!(*stream.gpu.borrow() == [whole, last].concat());
    }
}
