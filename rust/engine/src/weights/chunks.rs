//! Bytes that several threads write.

use std::{sync::Mutex, thread};

use crate::EngineError;

/// Calls `body(i, chunk)` for all chunks of so many bytes, the last one perhaps shorter, on so many threads.
///
/// # Errors
/// Those of `body`; [`EngineError::Internal`] when it panics. The other chunks may have been written.
pub fn write_chunks(
    out: &mut [u8],
    chunk_bytes: usize,
    num_threads: usize,
    body: impl Fn(usize, &mut [u8]) -> Result<(), EngineError> + Sync,
) -> Result<(), EngineError> {
    let chunks = Mutex::new(out.chunks_mut(chunk_bytes).enumerate());
    let next = || chunks.lock().ok()?.next();
    let work = || -> Result<(), EngineError> {
        while let Some((i, chunk)) = next() {
            body(i, chunk)?;
        }
        Ok(())
    };
    let panicked = || Err(EngineError::Internal("a thread that made weights panicked".into()));
    thread::scope(|scope| {
        let workers: Vec<_> = (1..num_threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| panicked())).fold(own, Result::and)
    })
}
