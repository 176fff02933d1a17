//! Memory as a kernel sees it: what lies around a buffer cannot be touched.

use std::ptr;

use device::kernel_args::{AttentionMerge, AttentionWork, DevicePtr, SampleRow};

/// Types whose values are any bytes of their size, without padding.
pub trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for i64 {}
impl Plain for f32 {}
impl Plain for AttentionWork {}
impl Plain for AttentionMerge {}
impl Plain for SampleRow {}

const PAGE: usize = 4096;
/// Device allocations are padded to this.
const PADDING: usize = 16;
const CANARY: u8 = 0xa5;

/// A device buffer. It ends at an unmapped page, up to the padding to 16 bytes, and begins after one, up to the rest of its first page;
/// what a kernel writes there is found when the buffer is dropped, and inputs are read-only.
pub struct Buffer {
    mapping: *mut u8,
    mapped_bytes: usize,
    start: usize,
    bytes: usize,
}

impl Buffer {
    /// What a kernel only reads.
    ///
    /// # Panics
    /// When there is no memory for it; so do the others.
    pub fn input<T: Plain>(values: &[T]) -> Self {
        let buffer = Self::inout(values);
        // SAFETY: the range is this buffer's own mapping.
        let refused = unsafe { libc::mprotect(buffer.mapping.cast(), buffer.mapped_bytes - PAGE, libc::PROT_READ) };
        assert_eq!(refused, 0, "mprotect");
        buffer
    }

    /// What a kernel changes.
    pub fn inout<T: Plain>(values: &[T]) -> Self {
        let buffer = Self::mapped(size_of_val(values));
        // SAFETY: the mapping has room for the values at `start`; the two cannot overlap.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), buffer.mapping.add(buffer.start), buffer.bytes) };
        buffer
    }

    /// What a kernel writes: `len` values that are NaN, or -1, until it does.
    pub fn output<T: Plain>(len: usize) -> Self {
        let buffer = Self::mapped(len * size_of::<T>());
        // SAFETY: the range lies within the mapping.
        unsafe { ptr::write_bytes(buffer.mapping.add(buffer.start), 0xff, buffer.bytes) };
        buffer
    }

    /// `bytes` zeros that take memory only where they are written.
    ///
    /// # Panics
    /// When they are not whole pages.
    pub fn sparse(bytes: usize) -> Self {
        assert!(bytes.is_multiple_of(PAGE), "whole pages");
        Self::reserve(bytes)
    }

    fn mapped(bytes: usize) -> Self {
        let buffer = Self::reserve(bytes);
        let data_bytes = buffer.mapped_bytes - 2 * PAGE;
        // SAFETY: the middle of the mapping is writable.
        unsafe { ptr::write_bytes(buffer.mapping.add(PAGE), CANARY, data_bytes) };
        buffer
    }

    fn reserve(bytes: usize) -> Self {
        let data_bytes = bytes.next_multiple_of(PAGE);
        let mapped_bytes = data_bytes + 2 * PAGE;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a fresh anonymous mapping.
        let mapping = unsafe { libc::mmap(ptr::null_mut(), mapped_bytes, access, flags, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED, "mmap of {mapped_bytes} bytes");
        let mapping = mapping.cast::<u8>();
        for guard in [0, mapped_bytes - PAGE] {
            // SAFETY: the page lies within the mapping.
            assert_eq!(unsafe { libc::mprotect(mapping.add(guard).cast(), PAGE, libc::PROT_NONE) }, 0, "mprotect");
        }
        Self { mapping, mapped_bytes, start: PAGE + data_bytes - bytes.next_multiple_of(PADDING), bytes }
    }

    /// Its address for kernels.
    pub fn ptr(&self) -> DevicePtr {
        self.mapping as DevicePtr + self.start as DevicePtr
    }

    /// What it holds now.
    ///
    /// # Panics
    /// When it does not hold whole values.
    pub fn values<T: Plain>(&self) -> Vec<T> {
        self.values_at(0, self.bytes / size_of::<T>())
    }

    /// `len` values from byte `at` on.
    ///
    /// # Panics
    /// When they are not within the buffer.
    pub fn values_at<T: Plain>(&self, at: usize, len: usize) -> Vec<T> {
        assert!(at + len * size_of::<T>() <= self.bytes, "out of the buffer");
        let mut values = Vec::<T>::with_capacity(len);
        // SAFETY: the range lies within the buffer, any bytes are a value, and the vector has room for them.
        unsafe {
            ptr::copy_nonoverlapping(self.mapping.add(self.start + at), values.as_mut_ptr().cast::<u8>(), len * size_of::<T>());
            values.set_len(len);
        }
        values
    }

    /// Copies values in, from byte `at` on.
    ///
    /// # Panics
    /// When they are not within the buffer.
    pub fn write_at<T: Plain>(&self, at: usize, values: &[T]) {
        assert!(at + size_of_val(values) <= self.bytes, "out of the buffer");
        // SAFETY: the range lies within the buffer, and no kernel runs meanwhile.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), self.mapping.add(self.start + at), size_of_val(values)) };
    }

    fn is_intact(&self) -> bool {
        let (end, last) = (self.start + self.bytes, self.mapped_bytes - PAGE);
        // A sparse buffer fills its pages.
        // SAFETY: both ranges lie between the guard pages.
        (PAGE..self.start).chain(end..last).all(|at| unsafe { self.mapping.add(at).read() } == CANARY)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let intact = self.is_intact();
        // SAFETY: the mapping is this buffer's own and not used any more.
        unsafe { libc::munmap(self.mapping.cast(), self.mapped_bytes) };
        assert!(intact || std::thread::panicking(), "a kernel wrote around a buffer of {} bytes", self.bytes);
    }
}
