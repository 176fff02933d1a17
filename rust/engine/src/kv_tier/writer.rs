//! The thread that writes blocks out while steps go on.

use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use paged::TierBlock;

use super::{Changes, KvTier, TierError};
use crate::{EngineError, error::caught};

/// Bytes that may wait for the writer; what comes beyond is dropped.
const MAX_QUEUED_BYTES: usize = 256 << 20;
/// How often the tier is asked what others did to it, at most.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long a process waits at its end for what is queued.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// A block that waits to be written.
struct QueuedBlock {
    block: TierBlock,
    payload: Vec<u8>,
}

/// Bytes that wait to be written.
#[derive(Default)]
struct Queue {
    bytes: Mutex<usize>,
    changed: Condvar,
}

impl Queue {
    fn change(&self, by: impl FnOnce(&mut usize)) {
        by(&mut self.bytes.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn len(&self) -> usize {
        *self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine's end of the writer thread, which ends when this is dropped and all is written.
pub struct Writer {
    blocks: Sender<QueuedBlock>,
    queue: Arc<Queue>,
    /// What became of the blocks.
    pub changes: Receiver<Changes>,
}

impl Writer {
    /// Starts the thread.
    pub fn start(tier: Arc<dyn KvTier>) -> Result<Self, EngineError> {
        let (blocks, inbox) = mpsc::channel::<QueuedBlock>();
        let (outbox, changes) = mpsc::channel();
        let queue = Arc::new(Queue::default());
        let shared = Arc::clone(&queue);
        let run = move || {
            let mut is_failing = false;
            let (mut next_look, mut wait) = (Instant::now() + LOOK_INTERVAL, LOOK_INTERVAL);
            loop {
                let now = Instant::now();
                if now >= next_look {
                    let changes = caught(|| tier.refresh()).unwrap_or_default();
                    if changes != Changes::default() {
                        let _ = outbox.send(changes);
                    }
                    // A large folder takes long to look at.
                    wait = LOOK_INTERVAL.max(now.elapsed() * 20);
                    next_look = Instant::now() + wait;
                }
                let QueuedBlock { block, payload } = match inbox.recv_timeout(wait) {
                    Ok(queued) => queued,
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                let bytes = payload.len();
                let stored = caught(|| tier.store(&block, payload));
                let failed = !matches!(stored, Ok(Ok(_)));
                let changes = match stored {
                    Ok(Ok(changes)) => changes,
                    Ok(Err(error)) => {
                        warn_once(is_failing, &error.to_string());
                        if let TierError::NotStored { changes, .. } = error { changes } else { lost(&block) }
                    }
                    Err(why) => {
                        warn_once(is_failing, &why);
                        lost(&block)
                    }
                };
                is_failing = failed;
                let _ = outbox.send(changes);
                shared.change(|queued| *queued -= bytes);
            }
        };
        thread::Builder::new()
            .name("mistral-paged-kv-tier".into())
            .spawn(run)
            .map_err(|e| EngineError::Internal(format!("the writer thread of the KV tier cannot start: {e}")))?;
        Ok(Self { blocks, queue, changes })
    }

    /// Whether a block of so many bytes would be taken after others of `before` bytes in all.
    pub fn has_room(&self, before: usize, bytes: usize) -> bool {
        let queued = self.queue.len() + before;
        queued == 0 || queued + bytes <= MAX_QUEUED_BYTES
    }

    /// Hands over a block.
    pub fn write(&self, block: TierBlock, payload: Vec<u8>) {
        let bytes = payload.len();
        self.queue.change(|queued| *queued += bytes);
        if self.blocks.send(QueuedBlock { block, payload }).is_err() {
            self.queue.change(|queued| *queued -= bytes);
        }
    }

    /// Waits for the queue when it is dropped.
    pub fn flush_on_drop(&self) -> FlushOnDrop {
        FlushOnDrop(Arc::clone(&self.queue))
    }
}

fn lost(block: &TierBlock) -> Changes {
    Changes { found: Vec::new(), lost: vec![block.id] }
}

/// A full disk would say it again with every block.
fn warn_once(is_failing: bool, why: &str) {
    if !is_failing {
        tracing::warn!("kv_tier: a block is not kept: {why}");
    }
}

/// Held by whoever uses the engine: when the last one is gone, what was computed is in the tier.
pub struct FlushOnDrop(Arc<Queue>);

impl Drop for FlushOnDrop {
    fn drop(&mut self) {
        let queued = self.0.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.0.changed.wait_timeout_while(queued, FLUSH_TIMEOUT, |bytes| *bytes > 0);
    }
}
