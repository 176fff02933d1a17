//! Memory: mapped files, and anonymous pages that are committed as they are first touched.

use std::{
    fs::File,
    marker::PhantomData,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use memmap2::{Mmap, MmapMut, MmapOptions};

use crate::DeviceError;

/// A range of bytes of a mapped file, or of owned memory; cheap to clone and to slice.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    start: usize,
    end: usize,
}

#[derive(Clone)]
enum Owner {
    File(Arc<Mapped>),
    Memory(Arc<Vec<u8>>),
}

/// A file in memory, and open, to be asked for its length.
struct Mapped {
    map: Mmap,
    file: File,
    path: PathBuf,
}

/// Tells whether a mapped file is as long as it was, as long as somebody uses it.
#[derive(Clone)]
pub struct FileWatch {
    mapped: Weak<Mapped>,
    path: PathBuf,
}

impl FileWatch {
    /// The file, in use or not.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A [`DeviceError::Io`] that names the file, if it is shorter than what is mapped of it: to read what is gone would end the
    /// process. Costs a system call where the file is in use, and nothing where nobody uses it any more.
    pub fn check(&self) -> Result<(), DeviceError> {
        let Some(mapped) = self.mapped.upgrade() else { return Ok(()) };
        let what = || format!("{} is in use", mapped.path.display());
        let len = mapped.file.metadata().map_err(|source| DeviceError::Io { what: what(), source })?.len();
        let expected = mapped.map.len() as u64;
        if len >= expected {
            return Ok(());
        }
        let why = format!("it was shortened from {expected} to {len} bytes; put it back and load the model again");
        Err(DeviceError::Io { what: what(), source: std::io::Error::new(std::io::ErrorKind::UnexpectedEof, why) })
    }
}

impl Bytes {
    /// Maps a file for reading.
    pub fn map_file(path: &Path) -> Result<Self, DeviceError> {
        let error = |source| DeviceError::Io { what: format!("cannot map {}", path.display()), source };
        // Opening a pipe would wait for a writer.
        if !std::fs::metadata(path).map_err(error)?.is_file() {
            return Err(error(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        let file = File::open(path).map_err(error)?;
        // SAFETY: the mapping is read-only and private to this process. What another program writes to the file shows in it, and
        // what it cuts off raises SIGBUS when it is read: `FileWatch` finds that before a step, and the documentation says what
        // is left.
        let map = unsafe { Mmap::map(&file) }.map_err(error)?;
        let end = map.len();
        Ok(Self { owner: Owner::File(Arc::new(Mapped { map, file, path: path.to_owned() })), start: 0, end })
    }

    /// Watches the file that these bytes are of; `None` of owned bytes.
    pub fn watch(&self) -> Option<FileWatch> {
        match &self.owner {
            Owner::File(mapped) => Some(FileWatch { mapped: Arc::downgrade(mapped), path: mapped.path.clone() }),
            Owner::Memory(_) => None,
        }
    }

    /// Owned bytes.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let end = bytes.len();
        Self { owner: Owner::Memory(Arc::new(bytes)), start: 0, end }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.owner {
            Owner::File(m) => &m.map[self.start..self.end],
            Owner::Memory(m) => &m[self.start..self.end],
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Gives the memory of mapped pages back, those included that are only partly of these bytes; they are read from the file
    /// again when they are next touched. A hint: refusal is harmless, and owned bytes stay.
    pub fn release(&self) {
        #[cfg(unix)]
        if let Owner::File(mapped) = &self.owner {
            // SAFETY: the mapping is of a file, read-only and never written, so the pages come back with the same bytes.
            let _ = unsafe {
                mapped.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, self.start, self.end - self.start)
            };
        }
    }

    /// The bytes `start..end` of these.
    ///
    /// # Panics
    /// When the range is not within these bytes; callers check ranges that come from a file.
    #[must_use]
    pub fn slice(&self, start: usize, end: usize) -> Self {
        assert!(start <= end && end <= self.len(), "bytes {start}..{end} of {}", self.len());
        Self { owner: self.owner.clone(), start: self.start + start, end: self.start + end }
    }
}

/// Element types that are valid for any bit pattern, zero included.
pub trait Plain: Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for u16 {}
impl Plain for u64 {}
impl Plain for u8 {}
impl Plain for i8 {}

/// Zeroed anonymous pages holding `len` elements: address space at first, committed as pages are first written.
pub struct Pages<T: Plain> {
    map: MmapMut,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Pages<T> {
    /// Reserves address space for `len` zeroed elements, page-aligned.
    pub fn zeroed(len: usize) -> Result<Self, DeviceError> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| DeviceError::Shape(format!("{len} elements overflow")))?;
        let map = MmapOptions::new()
            .len(bytes.max(1))
            .no_reserve_swap()
            .map_anon()
            .map_err(|source| DeviceError::Io { what: format!("cannot reserve {bytes} bytes of memory"), source })?;
        Ok(Self { map, len, element: PhantomData })
    }

    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: the mapping is page-aligned, holds at least `len` elements and lives as long as self; T: Plain allows any bits.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.len) }
    }

    /// The elements.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.len) }
    }

    /// Gives the memory of `bytes` back but for at most 64 KiB at their start; they are zeros when they are next touched. A hint:
    /// refusal is harmless.
    ///
    /// # Safety
    /// Nobody reads or writes these bytes meanwhile, or expects to find what they held.
    pub(crate) unsafe fn release(&self, bytes: Range<usize>) {
        #[cfg(target_os = "linux")]
        {
            /// No system's pages are larger; the start would be rounded down to them.
            const PAGE: usize = 64 << 10;
            let start = bytes.start.next_multiple_of(PAGE);
            if start < bytes.end {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                // SAFETY: the caller's promise.
                let _ = unsafe { self.map.unchecked_advise_range(advice, start, bytes.end - start) };
            }
        }
    }

    /// Asks the kernel for huge pages (a hint; refusal is harmless).
    pub fn advise_huge(&self) {
        #[cfg(target_os = "linux")]
        let _ = self.map.advise(memmap2::Advice::HugePage);
    }
}
