//! A persistent pool of worker threads. The caller is worker 0; idle workers spin for a moment, then park.

use std::{
    cell::UnsafeCell,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

/// How often a waiting thread polls before it parks; about 30 µs.
const SPINS: usize = 3_000;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    job: UnsafeCell<Option<Job>>,
    generation: AtomicUsize,
    remaining: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is written only by the thread that holds `ThreadPool::running`, before the release store of `generation`, and read by
// workers only after an acquire load sees that store; the writer waits for `remaining == 0` before it writes again.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer is only followed while the closure it points to is borrowed by `run`.
unsafe impl Send for Shared {}

/// Runs a closure on every worker at once.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    running: Mutex<()>,
}

impl ThreadPool {
    /// A pool of `num_threads` workers (at least one), the caller of [`Self::run`] included.
    pub fn new(num_threads: usize) -> Self {
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            generation: AtomicUsize::new(0),
            remaining: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let workers = (1..num_threads.max(1))
            .map(|id| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("mistral-paged-{id}"))
                    .spawn(move || work(&shared, id))
                    .expect("the operating system starts a thread")
            })
            .collect();
        Self { shared, workers, running: Mutex::new(()) }
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
        if self.workers.is_empty() {
            job(0);
            return;
        }
        let guard = self.running.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let s = &*self.shared;
        s.remaining.store(self.workers.len(), Ordering::Relaxed);
        // SAFETY: no worker runs (see `Sync for Shared`). The lifetime is erased, but this function does not return, nor unwind,
        // before every worker has finished with the closure.
        unsafe {
            *s.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(std::ptr::from_ref(job)));
        }
        s.generation.fetch_add(1, Ordering::Release);
        for w in &self.workers {
            w.thread().unpark();
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(0)));
        let mut spins = 0;
        while s.remaining.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panicked = s.panicked.swap(false, Ordering::Relaxed);
        drop(guard);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!panicked, "a worker thread panicked");
    }

    /// Calls `body(start, end)` for disjoint ranges that cover `0..len`; ranges are multiples of `grain` and claimed as workers get free.
    pub fn for_each_range(&self, len: usize, grain: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let grain = grain.max(1);
        let next = AtomicUsize::new(0);
        if len <= grain || self.workers.is_empty() {
            if len > 0 {
                body(0, len);
            }
            return;
        }
        self.run(&|_| {
            loop {
                let start = next.fetch_add(grain, Ordering::Relaxed);
                if start >= len {
                    break;
                }
                body(start, (start + grain).min(len));
            }
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.generation.fetch_add(1, Ordering::Release);
        for w in self.workers.drain(..) {
            w.thread().unpark();
            let _ = w.join();
        }
    }
}

fn work(s: &Shared, id: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while s.generation.load(Ordering::Acquire) == seen {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::park() }
        }
        seen = seen.wrapping_add(1);
        if s.stop.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the acquire load above orders this read after the write in `run`, which waits for `remaining` before it returns.
        let job = unsafe { (*s.job.get()).map(|j| &*j) };
        if let Some(job) = job
            && std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(id))).is_err()
        {
            s.panicked.store(true, Ordering::Relaxed);
        }
        s.remaining.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_every_job_once() {
        let pool = ThreadPool::new(4);
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
        let pool = ThreadPool::new(3);
        let hits: Vec<_> = (0..1_001).map(|_| AtomicUsize::new(0)).collect();
        pool.for_each_range(hits.len(), 16, &|a, b| {
            for h in &hits[a..b] {
                h.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn a_panic_in_a_worker_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2);
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
}
