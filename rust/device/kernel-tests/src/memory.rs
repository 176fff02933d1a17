//! Memory as a kernel sees it: what lies around a buffer cannot be touched.

use std::{ptr, sync::Arc};

use device::{
    cuda::Driver,
    kernel_args::{AttentionMerge, AttentionWork, DevicePtr, RecurrentRequest, SampleRow},
};

use crate::gpu;

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
impl Plain for RecurrentRequest {}

const PAGE: usize = 4096;
/// Device allocations are padded to this.
const PADDING: usize = 16;
const CANARY: u8 = 0xa5;

/// A device buffer. What a kernel writes into the padding to 16 bytes, or to an input, is found.
pub struct Buffer {
    place: Place,
    bytes: usize,
}

enum Place {
    Host(Mapping),
    Gpu(Allocation),
}

impl Buffer {
    /// What a kernel only reads.
    ///
    /// # Panics
    /// When there is no memory for it; so do the others.
    pub fn input<T: Plain>(values: &[T]) -> Self {
        let mut buffer = Self::inout(values);
        match &mut buffer.place {
            Place::Host(mapping) => mapping.protect(),
            Place::Gpu(allocation) => allocation.expected = Some(bytes_of(values).to_vec()),
        }
        buffer
    }

    /// What a kernel changes.
    pub fn inout<T: Plain>(values: &[T]) -> Self {
        Self::of(bytes_of(values))
    }

    /// What a kernel writes: `len` values that are NaN, or -1, until it does.
    pub fn output<T: Plain>(len: usize) -> Self {
        Self::of(&vec![0xff; len * size_of::<T>()])
    }

    /// `bytes` zeros that take memory only where they are written; on a GPU they all do.
    ///
    /// # Panics
    /// When they are not whole pages.
    pub fn sparse(bytes: usize) -> Self {
        assert!(bytes.is_multiple_of(PAGE), "whole pages");
        let place = match gpu::driver() {
            Some(driver) => Place::Gpu(Allocation::zeroed(driver, bytes)),
            None => Place::Host(Mapping::new(bytes)),
        };
        Self { place, bytes }
    }

    fn of(values: &[u8]) -> Self {
        let mut padded = values.to_vec();
        padded.resize(values.len().next_multiple_of(PADDING), CANARY);
        let place = match gpu::driver() {
            Some(driver) => Place::Gpu(Allocation::of(driver, &padded)),
            None => Place::Host(Mapping::of(&padded)),
        };
        Self { place, bytes: values.len() }
    }

    /// Its address for kernels.
    pub fn ptr(&self) -> DevicePtr {
        match &self.place {
            Place::Host(mapping) => mapping.data() as DevicePtr,
            Place::Gpu(allocation) => allocation.at,
        }
    }

    /// Its whole pages and whether they can be written; `None` on a GPU.
    pub(crate) fn pages(&self) -> Option<(*mut u8, usize, bool)> {
        match &self.place {
            Place::Host(mapping) => Some(mapping.pages()),
            Place::Gpu(_) => None,
        }
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
        let bytes = len * size_of::<T>();
        assert!(at + bytes <= self.bytes, "out of the buffer");
        let mut values = Vec::<T>::with_capacity(len);
        match &self.place {
            // SAFETY: the range lies within the mapping, and the vector has room for it.
            Place::Host(mapping) => unsafe {
                ptr::copy_nonoverlapping(mapping.data().add(at), values.as_mut_ptr().cast(), bytes);
            },
            Place::Gpu(allocation) => {
                let read = allocation.read(at, bytes);
                // SAFETY: as many bytes were read, and the vector has room for them.
                unsafe { ptr::copy_nonoverlapping(read.as_ptr(), values.as_mut_ptr().cast(), bytes) };
            }
        }
        // SAFETY: the values were written above, and any bytes are one.
        unsafe { values.set_len(len) };
        values
    }

    /// Copies values in, from byte `at` on.
    ///
    /// # Panics
    /// When they are not within the buffer.
    pub fn write_at<T: Plain>(&self, at: usize, values: &[T]) {
        let from = bytes_of(values);
        assert!(at + from.len() <= self.bytes, "out of the buffer");
        match &self.place {
            // SAFETY: the range lies within the mapping, which is writable, and no kernel runs meanwhile.
            Place::Host(mapping) => unsafe { ptr::copy_nonoverlapping(from.as_ptr(), mapping.data().add(at), from.len()) },
            Place::Gpu(allocation) => allocation.driver.upload(allocation.at + at as u64, from).expect("an upload"),
        }
    }

    /// What a kernel did to it that it may not.
    fn fault(&self) -> Option<&'static str> {
        let intact = match &self.place {
            Place::Host(mapping) => mapping.is_intact(self.bytes),
            Place::Gpu(allocation) => allocation.is_intact(self.bytes),
        };
        match &self.place {
            _ if !intact => Some("wrote around"),
            Place::Gpu(allocation) if !allocation.is_as_expected() => Some("changed an input,"),
            _ => None,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let fault = self.fault();
            assert!(fault.is_none(), "a kernel {} a buffer of {} bytes", fault.unwrap_or_default(), self.bytes);
        }
    }
}

fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a `Plain` type has no padding; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Memory of the host that ends at an unmapped page, up to the padding, and begins after one, up to the rest of its first page.
struct Mapping {
    start: *mut u8,
    mapped_bytes: usize,
    /// From `start` to the data.
    offset: usize,
    is_writable: bool,
}

// SAFETY: the memory is the mapping's own, and has no thread affinity.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Zeros that take memory where they are written.
    fn new(bytes: usize) -> Self {
        let data_bytes = bytes.next_multiple_of(PAGE);
        let mapped_bytes = data_bytes + 2 * PAGE;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a fresh anonymous mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), mapped_bytes, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "mmap of {mapped_bytes} bytes");
        let start = start.cast::<u8>();
        for guard in [0, mapped_bytes - PAGE] {
            // SAFETY: the page lies within the mapping.
            assert_eq!(unsafe { libc::mprotect(start.add(guard).cast(), PAGE, libc::PROT_NONE) }, 0, "mprotect");
        }
        Self { start, mapped_bytes, offset: PAGE + data_bytes - bytes, is_writable: true }
    }

    fn of(padded: &[u8]) -> Self {
        let mapping = Self::new(padded.len());
        // SAFETY: between the guard pages the mapping is writable, and has room for the values at their offset.
        unsafe {
            ptr::write_bytes(mapping.start.add(PAGE), CANARY, mapping.offset - PAGE);
            ptr::copy_nonoverlapping(padded.as_ptr(), mapping.data(), padded.len());
        }
        mapping
    }

    fn data(&self) -> *mut u8 {
        // SAFETY: the offset lies within the mapping.
        unsafe { self.start.add(self.offset) }
    }

    /// Those between the guard pages.
    fn pages(&self) -> (*mut u8, usize, bool) {
        // SAFETY: the first page lies within the mapping.
        (unsafe { self.start.add(PAGE) }, self.mapped_bytes - 2 * PAGE, self.is_writable)
    }

    fn protect(&mut self) {
        self.is_writable = false;
        // SAFETY: the range is this mapping's own.
        let refused = unsafe { libc::mprotect(self.start.cast(), self.mapped_bytes - PAGE, libc::PROT_READ) };
        assert_eq!(refused, 0, "mprotect");
    }

    /// Nothing was written before the data, nor behind its first `bytes`. A sparse one fills its pages.
    fn is_intact(&self, bytes: usize) -> bool {
        let around = (PAGE..self.offset).chain(self.offset + bytes..self.mapped_bytes - PAGE);
        // SAFETY: both ranges lie between the guard pages.
        around.into_iter().all(|at| unsafe { self.start.add(at).read() } == CANARY)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own and not used any more.
        unsafe { libc::munmap(self.start.cast(), self.mapped_bytes) };
    }
}

/// Memory of a GPU, with the padding; compute-sanitizer sees accesses beyond it.
struct Allocation {
    driver: Arc<dyn Driver>,
    at: DevicePtr,
    /// What it must still hold when it is dropped.
    expected: Option<Vec<u8>>,
}

impl Allocation {
    fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Self {
        let at = driver.allocate(bytes.max(PADDING)).expect("memory of the GPU");
        Self { driver: Arc::clone(driver), at, expected: None }
    }

    fn zeroed(driver: &Arc<dyn Driver>, bytes: usize) -> Self {
        let allocation = Self::new(driver, bytes);
        driver.zero(allocation.at, bytes).expect("zeros");
        allocation
    }

    fn of(driver: &Arc<dyn Driver>, padded: &[u8]) -> Self {
        let allocation = Self::new(driver, padded.len());
        if !padded.is_empty() {
            driver.upload(allocation.at, padded).expect("an upload");
        }
        allocation
    }

    fn read(&self, at: usize, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        if bytes > 0 {
            self.driver.download(&mut read, self.at + at as u64).expect("a download");
        }
        read
    }

    fn is_intact(&self, bytes: usize) -> bool {
        let padding = bytes.next_multiple_of(PADDING) - bytes;
        self.read(bytes, padding).iter().all(|byte| *byte == CANARY)
    }

    fn is_as_expected(&self) -> bool {
        self.expected.as_ref().is_none_or(|expected| self.read(0, expected.len()) == *expected)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.driver.free(self.at);
    }
}
