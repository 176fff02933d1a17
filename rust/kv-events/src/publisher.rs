//! The engine's end, and the thread that numbers and encodes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use paged::KvEvent;

use crate::{
    KvEventsError, KvEventsStats, Listeners,
    peers::{Acceptor, Peers, Subscribers},
    queue::Queue,
    replay::Kept,
    wire::{self, Layout},
    zmtp::{self, MORE},
};

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct PublisherOptions {
    /// Batches that may wait to be encoded; what comes beyond is dropped.
    pub max_waiting: usize,
    /// Batches that are kept to be sent again.
    pub max_kept: usize,
    /// Their bytes.
    pub max_kept_bytes: usize,
    /// Events of a message at most.
    pub max_events: usize,
}

impl Default for PublisherOptions {
    fn default() -> Self {
        Self { max_waiting: 1024, max_kept: 10_000, max_kept_bytes: 64 << 20, max_events: 4096 }
    }
}

/// Bytes of batches that may wait to be encoded.
const MAX_WAITING_BYTES: usize = 64 << 20;
/// How long what is on its way has when an engine ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Between two times that all is told because somebody asked, at least.
const LISTING_INTERVAL: Duration = Duration::from_secs(1);

/// What happened in a step.
struct Batch {
    /// Batches before it that were dropped.
    num_lost: u64,
    timestamp: f64,
    events: Vec<KvEvent>,
}

/// What the threads count.
#[derive(Default)]
struct Counts {
    batches: AtomicU64,
    events: AtomicU64,
    dropped: AtomicU64,
    listings: AtomicU64,
    subscriber_dropped: AtomicU64,
}

struct Shared {
    queue: Queue<Batch>,
    kept: Kept,
    subscribers: Subscribers,
    counts: Counts,
    topic: String,
    address: String,
    replay_address: Option<String>,
}

/// Told by the engine's thread of what it holds. When it is dropped, all is told to be cleared, and the sockets close.
pub struct Publisher {
    shared: Arc<Shared>,
    /// Batches that were dropped since the last one that was not.
    num_lost: u64,
    bytes_per_event: usize,
    /// When all that is held was last told because somebody asked.
    last_listing: Option<Instant>,
    thread: Option<JoinHandle<()>>,
}

/// Reads the counts from any thread.
#[derive(Clone)]
pub struct StatsReader(Arc<Shared>);

impl StatsReader {
    /// What was published so far.
    pub fn read(&self) -> KvEventsStats {
        let Shared { counts, kept, subscribers, address, replay_address, .. } = &*self.0;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        KvEventsStats {
            address: address.clone(),
            replay_address: replay_address.clone(),
            batches: of(&counts.batches),
            events: of(&counts.events),
            dropped_batches: of(&counts.dropped),
            listings: of(&counts.listings),
            subscribers: subscribers.len(),
            subscriber_dropped_batches: of(&counts.subscriber_dropped),
            replays: of(&kept.replays),
        }
    }
}

impl Publisher {
    /// Begins to publish on sockets that listen already.
    ///
    /// # Errors
    /// [`KvEventsError::Thread`].
    pub fn start(listeners: Listeners, layout: Layout, options: PublisherOptions) -> Result<Self, KvEventsError> {
        let bytes_per_event = layout.block_size * 4 + 100;
        let shared = Arc::new(Shared {
            queue: Queue::new(options.max_waiting.max(1), MAX_WAITING_BYTES),
            kept: Kept::new(options.max_kept, options.max_kept_bytes),
            subscribers: Subscribers::default(),
            counts: Counts::default(),
            topic: listeners.topic,
            address: listeners.address,
            replay_address: listeners.replay_address,
        });
        let of_subscribers = Arc::clone(&shared);
        let mut acceptors = vec![
            Arc::new(Peers::default())
                .accept(listeners.subscribers, move |stream| of_subscribers.subscribers.serve(stream))
                .map_err(KvEventsError::Thread)?,
        ];
        if let Some(replay) = listeners.replay {
            let of_replay = Arc::clone(&shared);
            let serve = move |stream: &_| of_replay.kept.serve(stream);
            acceptors.push(Arc::new(Peers::default()).accept(replay, serve).map_err(KvEventsError::Thread)?);
        }
        let own = Arc::clone(&shared);
        let run = move || publish_all(&own, &layout, options, acceptors);
        let thread = thread::Builder::new().name("mistral-paged-kv-events".into()).spawn(run).map_err(KvEventsError::Thread)?;
        Ok(Self { shared, num_lost: 0, bytes_per_event, last_listing: None, thread: Some(thread) })
    }

    /// Reads the counts from any thread.
    pub fn stats_reader(&self) -> StatsReader {
        StatsReader(Arc::clone(&self.shared))
    }

    /// Publishes what happened, without waiting. `take` gives the events since the last time, `list` that all was cleared and
    /// then all that is held; one of them is called, or none.
    pub fn publish(&mut self, source: &mut dyn EventSource) {
        let Shared { queue, kept, counts, .. } = &*self.shared;
        let is_asked = kept.misses_some.load(Ordering::Relaxed) && !self.has_just_listed();
        let mut events = Vec::new();
        let lists = (self.num_lost > 0 || is_asked) && queue.is_half_empty();
        if lists {
            source.list(&mut events);
            kept.misses_some.store(false, Ordering::Relaxed);
            self.last_listing = Some(Instant::now());
        } else {
            source.take(&mut events);
        }
        if events.is_empty() {
            return;
        }
        let bytes = events.len() * self.bytes_per_event;
        let batch = Batch { num_lost: self.num_lost, timestamp: now(), events };
        let is_sent = (lists || self.num_lost == 0) && queue.push(batch, if lists { 0 } else { bytes });
        if is_sent {
            if self.num_lost > 0 {
                tracing::warn!("kv_events: {} batches were dropped; all that is held is published anew", self.num_lost);
            }
            self.num_lost = 0;
            counts.listings.fetch_add(u64::from(lists), Ordering::Relaxed);
        } else {
            self.num_lost += 1;
            counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether [`Self::publish`] should be called though nothing has happened.
    pub fn is_behind(&self) -> bool {
        self.num_lost > 0 || (self.shared.kept.misses_some.load(Ordering::Relaxed) && !self.has_just_listed())
    }

    /// Whoever asks again and again is not to make steps slow.
    fn has_just_listed(&self) -> bool {
        self.last_listing.is_some_and(|at| at.elapsed() < LISTING_INTERVAL)
    }
}

/// Where events come from.
pub trait EventSource {
    /// Adds what happened since the last time.
    fn take(&mut self, out: &mut Vec<KvEvent>);
    /// Adds [`KvEvent::Cleared`] and all that is held, and forgets what was not taken.
    fn list(&mut self, out: &mut Vec<KvEvent>);
}

impl EventSource for paged::Scheduler {
    fn take(&mut self, out: &mut Vec<KvEvent>) {
        self.take_kv_events(out);
    }

    fn list(&mut self, out: &mut Vec<KvEvent>) {
        self.list_kv_events(out);
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let last = Batch { num_lost: self.num_lost, timestamp: now(), events: vec![KvEvent::Cleared] };
        self.shared.queue.wait_until_done(FLUSH_TIMEOUT);
        self.shared.queue.push(last, 0);
        self.shared.queue.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn publish_all(shared: &Shared, layout: &Layout, options: PublisherOptions, acceptors: Vec<Acceptor>) {
    let topic = shared.topic.as_bytes();
    let (mut number, mut kept_bytes) = (0u64, 0);
    while let Some(Batch { num_lost, timestamp, events }) = shared.queue.pop() {
        number += num_lost;
        for events in events.chunks(options.max_events.max(1)) {
            let payload = wire::encode(timestamp, events, layout);
            let mut message = Vec::with_capacity(payload.len() + topic.len() + 40);
            zmtp::write_frame(&mut message, MORE, topic);
            zmtp::write_frame(&mut message, MORE, &number.to_be_bytes());
            zmtp::write_frame(&mut message, 0, &payload);
            // Kept first: who hears of a later one can ask for it.
            shared.kept.keep(number, payload.into(), &mut kept_bytes);
            let num_missed = shared.subscribers.send(topic, &message.into());
            shared.counts.subscriber_dropped.fetch_add(num_missed, Ordering::Relaxed);
            shared.counts.batches.fetch_add(1, Ordering::Relaxed);
            shared.counts.events.fetch_add(events.len() as u64, Ordering::Relaxed);
            number += 1;
        }
    }
    shared.subscribers.flush(FLUSH_TIMEOUT);
    drop(acceptors);
}
