//! A persistent pool of worker threads. The caller is worker 0; idle workers fetch what comes next ([`super::read_ahead`]), spin
//! for a moment, then park.

use std::{
    cell::UnsafeCell,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{Builder, JoinHandle},
};

use super::read_ahead::{ReadAhead, Reader};
use crate::DeviceError;

/// How often a waiting thread polls before it parks; about 30 µs.
const SPINS: usize = 3_000;

/// Of [`Shared::gate`]: no worker may enter any more.
const CLOSED: usize = 1 << 15;
/// Of [`Shared::gate`]: workers that entered.
const ENTERED: usize = CLOSED - 1;
/// Of [`Shared::gate`]: one run.
const RUN: usize = 1 << 16;

/// Workers of a pool at most.
pub const MAX_THREADS: usize = 1024;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    job: UnsafeCell<Option<Job>>,
    /// The number of the run, [`CLOSED`], and how many workers entered it.
    gate: AtomicUsize,
    /// Workers that have left the run.
    left: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    ahead: ReadAhead,
}

// SAFETY: `job` is written only by the thread that holds `ThreadPool::running`, while the gate is closed and every worker that
// entered has left. Workers read it only after they entered, which acquires the store that opened the gate.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer is only followed while the closure it points to is borrowed by `start`.
unsafe impl Send for Shared {}

/// Runs a closure on several workers at once.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    running: Mutex<()>,
    /// Pieces that were claimed of each worker's share; see [`Self::for_each_share`].
    shares: Vec<Share>,
}

/// On a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Share(AtomicUsize);

impl ThreadPool {
    /// A pool of `num_threads` workers, 1 to [`MAX_THREADS`], the caller of [`Self::run`] included.
    ///
    /// Errors: [`DeviceError::Unsupported`] for another number, [`DeviceError::Io`] when the operating system cannot start a
    /// thread; those that have started are stopped again.
    pub fn new(num_threads: usize) -> Result<Self, DeviceError> {
        Self::with_spawner(num_threads, Builder::spawn)
    }

    fn with_spawner(
        num_threads: usize,
        spawn: impl Fn(Builder, Box<dyn FnOnce() + Send>) -> std::io::Result<JoinHandle<()>>,
    ) -> Result<Self, DeviceError> {
        if !(1..=MAX_THREADS).contains(&num_threads) {
            return Err(DeviceError::Unsupported(format!("num_threads is {num_threads}; it must be from 1 to {MAX_THREADS}")));
        }
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            gate: AtomicUsize::new(CLOSED),
            left: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            ahead: ReadAhead::default(),
        });
        // Dropping it stops the workers it has.
        let shares = std::iter::repeat_with(Share::default).take(num_threads).collect();
        let mut pool = Self { shared, workers: Vec::with_capacity(num_threads - 1), running: Mutex::new(()), shares };
        for id in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let builder = Builder::new().name(format!("mistral-paged-{id}"));
            let worker = spawn(builder, Box::new(move || work(&shared, id, num_threads))).map_err(|source| DeviceError::Io {
                what: format!("thread {id} of {num_threads} cannot start; a smaller num_threads may work"),
                source,
            })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// What workers fetch while they wait.
    pub(super) fn ahead(&self) -> &ReadAhead {
        &self.shared.ahead
    }

    /// Workers, the caller included.
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job(worker)` once for every worker id in `0..num_threads`, in parallel, and waits for all.
    ///
    /// # Panics
    /// When a job panicked.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        self.start(self.lock(), job, true);
    }

    /// Calls `job(0)`, and `job(worker)` at most once for each other id in `0..num_threads`: workers that have not begun when
    /// `job(0)` returns are not waited for. For jobs that claim shares of the work until none is left: a worker whose processor
    /// is busy elsewhere then costs its help, not a wait.
    ///
    /// # Panics
    /// When a job panicked.
    pub fn run_available(&self, job: &(dyn Fn(usize) + Sync)) {
        self.start(self.lock(), job, false);
    }

    /// Waits until no other job runs.
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, guard: MutexGuard<'_, ()>, job: &(dyn Fn(usize) + Sync), all: bool) {
        if self.workers.is_empty() {
            job(0);
            drop(guard);
            return;
        }
        let s = &*self.shared;
        s.left.store(0, Ordering::Relaxed);
        let job_pointer = std::ptr::from_ref(job);
        // SAFETY: the gate is closed and no worker is inside (see `Sync for Shared`). The lifetime is erased, but this function
        // does not return, nor unwind, before it has closed the gate again and every worker that entered has left.
        #[allow(clippy::transmute_ptr_to_ptr)]
        unsafe {
            *s.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job_pointer));
        }
        let run = (s.gate.load(Ordering::Relaxed) & !(RUN - 1)).wrapping_add(RUN);
        s.gate.store(run, Ordering::Release);
        for w in &self.workers {
            w.thread().unpark();
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(0)));
        if all {
            wait_until(|| s.left.load(Ordering::Acquire) == self.workers.len());
        }
        let entered = s.gate.fetch_or(CLOSED, Ordering::Relaxed) & ENTERED;
        wait_until(|| s.left.load(Ordering::Acquire) == entered);
        let panicked = s.panicked.swap(false, Ordering::Relaxed);
        drop(guard);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!panicked, "a worker thread panicked");
    }

    /// Calls `body(start, end)` for disjoint ranges that cover `0..len`; ranges are multiples of `grain` and claimed as workers
    /// get free.
    pub fn for_each_range(&self, len: usize, grain: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let grain = grain.max(1);
        let next = AtomicUsize::new(0);
        if len <= grain || self.workers.is_empty() {
            if len > 0 {
                body(0, len);
            }
            return;
        }
        self.run_available(&|_| {
            loop {
                let start = next.fetch_add(grain, Ordering::Relaxed);
                if start >= len {
                    break;
                }
                body(start, (start + grain).min(len));
            }
        });
    }

    /// Calls `body(worker, start, end)` for disjoint ranges of up to `grain` that cover `0..len`. A worker goes through a share
    /// of its own from first to last, so that memory that lies in this order is one stream to it. Idle workers steal from the
    /// shares of others.
    pub fn for_each_share(&self, len: usize, grain: usize, body: &(dyn Fn(usize, usize, usize) + Sync)) {
        let (grain, threads) = (grain.max(1), self.num_threads());
        let guard = self.lock();
        for share in &self.shares {
            share.0.store(0, Ordering::Relaxed);
        }
        let job = |worker: usize| {
            for owner in (worker..threads).chain(0..worker) {
                let (claimed, first) = (&self.shares[owner].0, len * owner / threads);
                let pieces = Pieces::new(len * (owner + 1) / threads - first, grain);
                while pieces.get(claimed.load(Ordering::Relaxed)).is_some() {
                    if let Some(piece) = pieces.get(claimed.fetch_add(1, Ordering::Relaxed)) {
                        body(worker, first + piece.start, first + piece.end);
                    }
                }
            }
        };
        self.start(guard, &job, false);
    }
}

/// The pieces of a share: of `grain`, and of half of what is left towards the end, so that no worker waits long for the last one.
struct Pieces {
    len: usize,
    grain: usize,
    /// Pieces of `grain`.
    whole: usize,
}

impl Pieces {
    fn new(len: usize, grain: usize) -> Self {
        Self { len, grain, whole: (len / grain).saturating_sub(1) }
    }

    /// Piece `number`, if there are so many.
    fn get(&self, number: usize) -> Option<Range<usize>> {
        let size = |start: usize| (self.len.saturating_sub(start) / 2).clamp(1, self.grain);
        let mut start = self.whole.min(number) * self.grain;
        for _ in self.whole..number {
            start += size(start);
        }
        (start < self.len).then(|| start..start + size(start))
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fetch_add(RUN, Ordering::Release);
        for w in self.workers.drain(..) {
            w.thread().unpark();
            let _ = w.join();
        }
    }
}

fn wait_until(done: impl Fn() -> bool) {
    let mut spins = 0;
    while !done() {
        spins += 1;
        if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

fn work(s: &Shared, id: usize, num_threads: usize) {
    let mut seen = 0;
    let mut reader = Reader::new();
    loop {
        let mut spins = 0;
        reader.look(&s.ahead, (id, num_threads));
        let mut gate = s.gate.load(Ordering::Acquire);
        while gate / RUN == seen {
            if reader.proceed().is_none() {
                spins += 1;
            }
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::park();
            }
            gate = s.gate.load(Ordering::Acquire);
        }
        seen = gate / RUN;
        if s.stop.load(Ordering::Relaxed) {
            return;
        }
        let enter = |gate: usize| (gate / RUN == seen && gate & CLOSED == 0).then_some(gate + 1);
        if s.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_err() {
            continue;
        }
        // SAFETY: this worker has entered and not left, so the closure is borrowed by `start` and the cell is not written.
        let job = unsafe { (*s.job.get()).map(|j| &*j) };
        if let Some(job) = job
            && std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(id))).is_err()
        {
            s.panicked.store(true, Ordering::Relaxed);
        }
        s.left.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_every_job_once() {
        let pool = ThreadPool::new(4).unwrap();
        let counts: Vec<_> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..2_000 {
            pool.run(&|id| {
                counts[id].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2_000));
    }

    #[test]
    fn ranges_cover_everything_once() {
        let pool = ThreadPool::new(3).unwrap();
        let hits: Vec<_> = (0..1_001).map(|_| AtomicUsize::new(0)).collect();
        pool.for_each_range(hits.len(), 16, &|a, b| {
            for h in &hits[a..b] {
                h.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn shares_cover_everything_once_and_each_worker_begins_with_its_own() {
        let pool = ThreadPool::new(3).unwrap();
        for (len, grain) in [(0, 1), (1, 1), (2, 5), (3, 1), (100, 7), (1_001, 16)] {
            let hits: Vec<_> = (0..len).map(|_| AtomicUsize::new(0)).collect();
            let firsts: [AtomicUsize; 3] = std::array::from_fn(|_| AtomicUsize::new(usize::MAX));
            pool.for_each_share(len, grain, &|worker, start, end| {
                assert!(start < end && end - start <= grain);
                let _ = firsts[worker].compare_exchange(usize::MAX, start, Ordering::Relaxed, Ordering::Relaxed);
                for hit in &hits[start..end] {
                    hit.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{len} by {grain}");
            // Worker 0 always runs, and others steal from its share only when theirs are done.
            assert!(len < 100 || firsts[0].load(Ordering::Relaxed) < len / 3, "{len} by {grain}");
        }
    }

    #[test]
    fn pieces_get_smaller_towards_the_end_of_a_share() {
        let sizes = |len, grain| (0..len + 3).filter_map(|i| Pieces::new(len, grain).get(i)).map(|p| p.len()).collect::<Vec<_>>();
        assert_eq!(sizes(24, 8), [8, 8, 4, 2, 1, 1]);
        assert_eq!(sizes(31, 8), [8, 8, 7, 4, 2, 1, 1]);
        assert_eq!(sizes(5, 8), [2, 1, 1, 1]);
        assert_eq!(sizes(3, 1), [1, 1, 1]);
    }

    #[test]
    fn an_available_worker_runs_at_most_once_and_never_after_the_call() {
        let pool = ThreadPool::new(4).unwrap();
        for i in 0..20_000 {
            let counts: [AtomicUsize; 4] = std::array::from_fn(|_| AtomicUsize::new(0));
            let alive = AtomicBool::new(true);
            pool.run_available(&|id| {
                assert!(alive.load(Ordering::SeqCst));
                counts[id].fetch_add(1, Ordering::SeqCst);
                for _ in 0..(i * 7 + id) % 50 {
                    std::hint::spin_loop();
                }
                assert!(alive.load(Ordering::SeqCst));
            });
            alive.store(false, Ordering::SeqCst);
            assert_eq!(counts[0].load(Ordering::SeqCst), 1);
            assert!(counts.iter().all(|c| c.load(Ordering::SeqCst) <= 1));
        }
    }

    #[test]
    fn a_panic_in_a_worker_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2).unwrap();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(&|id| assert!(id != 1, "worker 1 fails"));
        }));
        assert!(caught.is_err());
        let ran = AtomicUsize::new(0);
        pool.run(&|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn numbers_of_threads_that_make_no_sense_are_named() {
        for num_threads in [0, MAX_THREADS + 1, usize::MAX] {
            let error = ThreadPool::new(num_threads).err().expect("refused").to_string();
            assert!(error.contains(&format!("num_threads is {num_threads}")) && error.contains("1 to 1024"), "{error}");
        }
    }

    #[test]
    fn a_thread_that_cannot_start_is_an_error_and_stops_the_others() {
        let running = Arc::new(AtomicUsize::new(0));
        let started = AtomicUsize::new(0);
        let result = ThreadPool::with_spawner(8, |builder, work| {
            if started.fetch_add(1, Ordering::SeqCst) == 4 {
                return Err(std::io::ErrorKind::WouldBlock.into());
            }
            let running = Arc::clone(&running);
            running.fetch_add(1, Ordering::SeqCst);
            builder.spawn(move || {
                work();
                running.fetch_sub(1, Ordering::SeqCst);
            })
        });
        let error = result.err().expect("an error").to_string();
        assert!(error.contains("thread 5 of 8") && error.contains("num_threads"), "{error}");
        assert_eq!(running.load(Ordering::SeqCst), 0);
    }
}
