//! What tells one model and KV layout from another.

use std::{fs::File, io::Read, path::Path, thread};

use crate::EngineError;

/// A piece of a file that one thread hashes.
const SPAN_BYTES: u64 = 32 << 20;
const CHUNK_BYTES: usize = 1 << 18;
const CONTEXT: &str = "mistral_paged 2026 KV tier, space of records";

/// Everything that the KV of a prefix depends on besides its tokens and its request, in a fixed order; each field is framed.
#[derive(Default)]
pub struct Space(Vec<u8>);

impl Space {
    /// Adds a field.
    #[must_use]
    pub fn with(mut self, name: &str, value: &[u8]) -> Self {
        for part in [name.as_bytes(), value] {
            self.0.extend((part.len() as u64).to_le_bytes());
            self.0.extend(part);
        }
        self
    }

    /// Digest of the fields.
    pub fn digest(&self) -> [u8; 32] {
        blake3::derive_key(CONTEXT, &self.0)
    }
}

/// Digest of every byte of files with weights, in the order of their names: two fine-tunes may differ in a few numbers only.
/// Reads at the speed of the disk, or of `num_threads` threads that hash.
///
/// # Errors
/// [`EngineError::Load`] for a file that cannot be read.
pub fn weights_digest<'a>(files: impl Iterator<Item = &'a Path>, num_threads: usize) -> Result<[u8; 32], EngineError> {
    let mut files: Vec<_> = files.collect();
    files.sort_unstable();
    let mut space = Space::default();
    for file in files {
        space = space.with("file", &file_digest(file, num_threads).map_err(|e| load(file, &e))?);
    }
    Ok(space.digest())
}

/// Digest of the digests of a file's spans.
fn file_digest(path: &Path, num_threads: usize) -> std::io::Result<[u8; 32]> {
    let len = path.metadata()?.len();
    let num_spans = len.div_ceil(SPAN_BYTES);
    let num_threads = num_threads.clamp(1, num_spans.max(1) as usize) as u64;
    let digests = thread::scope(|scope| {
        let of_thread = |t: u64| (t..num_spans).step_by(num_threads as usize).map(|span| span_digest(path, span)).collect();
        let workers: Vec<_> = (0..num_threads).map(|t| scope.spawn(move || of_thread(t))).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, std::io::Result<Vec<_>>>| {
            worker.join().unwrap_or_else(|_| Err(std::io::Error::other("a hashing thread panicked")))
        };
        workers.into_iter().map(join).collect::<std::io::Result<Vec<Vec<[u8; 32]>>>>()
    })?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&len.to_le_bytes());
    for span in 0..num_spans {
        hasher.update(&digests[(span % num_threads) as usize][(span / num_threads) as usize]);
    }
    Ok(*hasher.finalize().as_bytes())
}

fn span_digest(path: &Path, span: u64) -> std::io::Result<[u8; 32]> {
    use std::io::{Seek, SeekFrom};
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(span * SPAN_BYTES))?;
    let mut rest = file.take(SPAN_BYTES);
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match rest.read(&mut chunk)? {
            0 => return Ok(*hasher.finalize().as_bytes()),
            n => hasher.update(&chunk[..n]),
        };
    }
}

fn load(path: &Path, error: &std::io::Error) -> EngineError {
    EngineError::Load(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_byte_anywhere_changes_a_files_digest_and_threads_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let mut bytes = vec![7u8; (2 * SPAN_BYTES + 1000) as usize];
        let digest = |bytes: &[u8], num_threads| {
            std::fs::write(&path, bytes).unwrap();
            file_digest(&path, num_threads).unwrap()
        };
        let before = digest(&bytes, 1);
        assert_eq!(digest(&bytes, 2), before);
        assert_eq!(digest(&bytes, 9), before);
        for at in [0, SPAN_BYTES as usize + 5, bytes.len() - 1] {
            bytes[at] ^= 1;
            assert_ne!(digest(&bytes, 2), before);
            bytes[at] ^= 1;
        }
        assert_ne!(digest(&bytes[..bytes.len() - 1], 1), before);
        assert_ne!(digest(&[], 1), before);
    }

    #[test]
    fn fields_are_framed() {
        let of = |name: &str, value: &[u8]| Space::default().with(name, value).digest();
        assert_ne!(of("ab", b"c"), of("a", b"bc"));
        assert_ne!(Space::default().with("a", b"").with("b", b"").digest(), of("a", b"b"));
    }
}
