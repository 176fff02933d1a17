//! Runs cases one after the other, and ends the process at one that takes too long or too much memory.

use std::{
    backtrace::Backtrace,
    cell::RefCell,
    collections::BTreeMap,
    fmt,
    fmt::Write as _,
    io::{Seek, Write as _},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook},
    path::Path,
    sync::{
        Arc, Mutex, Once, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    MAX_BYTES, MAX_SECONDS, MEMORY,
    kinds::{Fuzzer, Kind},
};

/// How often cases of each kind ended in each way.
#[derive(Clone, Debug, Default)]
pub struct Counts(pub BTreeMap<String, u64>);

impl Counts {
    pub fn add(&mut self, other: BTreeMap<String, u64>) {
        for (key, count) in other {
            *self.0.entry(key).or_default() += count;
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(key, count)| writeln!(f, "{count:>9}  {key}"))
    }
}

/// Panics that a case made, wherever; those that a library is expected to make never come here.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    /// The file that has the number of the case that runs.
    static STATE: RefCell<Option<std::fs::File>> = const { RefCell::new(None) };
}

/// Tests share the process, its memory and its panics.
static RUNNING: Mutex<()> = Mutex::new(());
static IS_RUNNING: AtomicBool = AtomicBool::new(false);

/// Once, before the engine wraps the hook to keep expected panics quiet.
fn record_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if IS_RUNNING.load(Ordering::Relaxed) {
                let text = format!("{panic}\n{}", Backtrace::force_capture());
                PANICS.lock().unwrap_or_else(PoisonError::into_inner).push(text);
            } else {
                print(panic);
            }
        }));
    });
}

fn panics() -> Vec<String> {
    std::mem::take(&mut *PANICS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Ends the process when a case takes too long or too much.
struct Watch {
    /// The case that runs, and milliseconds since `started` when it began; 0 is none.
    began: AtomicU64,
    case: AtomicU64,
    is_over: AtomicBool,
    started: Instant,
    base: AtomicU64,
}

impl Watch {
    fn new() -> Arc<Self> {
        let watch = Arc::new(Self {
            began: AtomicU64::new(0),
            case: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            started: Instant::now(),
            base: AtomicU64::new(0),
        });
        let seen = Arc::clone(&watch);
        thread::spawn(move || seen.look());
        watch
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64 + 1
    }

    fn look(&self) {
        while !self.is_over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
            let began = self.began.load(Ordering::Relaxed);
            let case = self.case.load(Ordering::Relaxed);
            if began > 0 && self.now().saturating_sub(began) > MAX_SECONDS * 1000 {
                println!("ENDED took more than {MAX_SECONDS} s (case {case})");
                std::process::exit(3);
            }
            let used = (MEMORY.current_usage() as u64).saturating_sub(self.base.load(Ordering::Relaxed));
            if began > 0 && used > 4 * MAX_BYTES as u64 {
                println!("ENDED took {used} bytes of memory (case {case})");
                std::process::exit(3);
            }
        }
    }
}

/// What is told of a case as it runs.
#[derive(Clone, Copy, Debug)]
pub enum State<'a> {
    #[cfg_attr(not(test), allow(dead_code, reason = "the tests'"))]
    Nothing,
    /// Its number, in a file.
    File(&'a Path),
    /// What it writes, on standard output.
    Shown,
}

/// Runs cases; what they came to, and what failed.
pub fn run(seed: u64, cases: Range<u64>, only: Option<Kind>, state: State<'_>) -> (Counts, Vec<String>) {
    let _one_at_a_time = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    record_panics();
    IS_RUNNING.store(true, Ordering::Relaxed);
    let is_shown = matches!(state, State::Shown);
    STATE.set(if let State::File(path) = state { std::fs::File::create(path).ok() } else { None });
    let watch = Watch::new();
    let mut fuzzer = Fuzzer::new(is_shown);
    let (mut counts, mut failures) = (Counts::default(), Vec::new());
    for case in cases {
        write_state(case);
        watch.case.store(case, Ordering::Relaxed);
        let before = MEMORY.current_usage();
        watch.base.store(before as u64, Ordering::Relaxed);
        watch.began.store(watch.now(), Ordering::Relaxed);
        MEMORY.reset_peak_usage();
        let outcome = catch_unwind(AssertUnwindSafe(|| fuzzer.run(seed, case, only)));
        watch.began.store(0, Ordering::Relaxed);
        let used = MEMORY.peak_usage().saturating_sub(before);
        let (kind, mut result) = outcome.unwrap_or((Kind::of(case, only), Ok("panicked".into())));
        let panicked = panics();
        if !panicked.is_empty() {
            result = Err(format!("panicked: {}", panicked.join("; ")));
        }
        if used > MAX_BYTES {
            result = Err(format!("took {used} bytes of memory"));
        }
        match result {
            Ok(outcome) => *counts.0.entry(format!("{}: {outcome}", kind.name())).or_default() += 1,
            Err(why) => {
                let mut text = format!("case {case} ({}): {why}", kind.name());
                // What is broken may be long.
                if text.len() > 4000 {
                    text.truncate((0..4000).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0));
                    let _ = write!(text, "...");
                }
                *counts.0.entry(format!("{}: FAILED", kind.name())).or_default() += 1;
                failures.push(text);
            }
        }
    }
    watch.is_over.store(true, Ordering::Relaxed);
    IS_RUNNING.store(false, Ordering::Relaxed);
    (counts, failures)
}

fn write_state(case: u64) {
    STATE.with_borrow_mut(|file| {
        let Some(file) = file else { return };
        let _ = file.rewind();
        let _ = writeln!(file, "{case:>20}");
    });
}
