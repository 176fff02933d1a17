//! Templates, tokenizers, configurations, GGUF metadata, adapters, quantized checkpoints and requests that nobody would write:
//! each is honoured or refused.
//!
//! ```text
//! cargo run --release --package mistral-paged-server --example fuzz -- [--cases N] [--seed N] [--only KIND]
//! cargo run --release --package mistral-paged-server --example fuzz -- --seed N --case N
//! ```
//!
//! A case is a function of the seed and its number. Cases run in processes of their own, some thousand in each, so that one that
//! ends its process is found and named; a case may take [`MAX_SECONDS`] and [`MAX_BYTES`] of the heap. The exit status is 1 if a
//! case failed.

mod adapters;
mod bodies;
mod checkpoints;
mod configs;
mod files;
mod grammar;
mod kinds;
mod structured;
mod templates;
mod tokenizers;
mod worker;

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Command, ExitCode},
    time::Instant,
};

use kinds::Kind;
use peak_alloc::PeakAlloc;
use worker::{Counts, State};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Seconds that a case may take, beside others on the machine.
const MAX_SECONDS: u64 = 30;
/// Bytes of the heap that a case may take; a template alone may make 64 MiB of text, and copies of it.
const MAX_BYTES: usize = 512 << 20;
/// Cases of one process.
const CASES_OF_A_PROCESS: u64 = 5000;

/// What the command line says.
#[derive(Clone, Debug)]
struct Options {
    seed: u64,
    cases: u64,
    /// This case alone.
    case: Option<u64>,
    only: Option<Kind>,
    /// Of a process that was started by another: its cases, and a file for the number of the one that runs.
    range: Option<(u64, u64, String)>,
}

fn parse(arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options { seed: 0, cases: 10_000, case: None, only: None, range: None };
    let mut arguments = arguments;
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("{name} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{name} is {value}; it must be a whole number, 0 or more"));
        match name.as_str() {
            "--seed" => options.seed = number()?,
            "--cases" => options.cases = number()?,
            "--case" => options.case = Some(number()?),
            "--only" => {
                let known = Kind::ALL.map(Kind::name).join(", ");
                let kind = Kind::ALL.into_iter().find(|kind| kind.name() == value);
                options.only = Some(kind.ok_or(format!("--only is {value}; it must be one of {known}"))?);
            }
            "--range" => {
                let parts: Vec<_> = value.splitn(3, ',').collect();
                let [from, to, file] = parts[..] else { return Err("--range is FROM,TO,FILE".into()) };
                let number = |text: &str| text.parse().map_err(|_| format!("--range is {value}"));
                options.range = Some((number(from)?, number(to)?, file.to_owned()));
            }
            other => return Err(format!("{other} is unknown; there are --cases, --seed, --case and --only")),
        }
    }
    Ok(options)
}

/// What all processes came to.
#[derive(Default)]
struct Total {
    counts: Counts,
    failures: Vec<String>,
}

/// Runs cases in another process, and goes on behind one that ends it.
fn supervise(options: &Options, from: u64, to: u64, total: &mut Total) -> Result<(), String> {
    let state = std::env::temp_dir().join(format!("fuzz-{}", std::process::id()));
    let result = supervise_with(options, (from, to), &state, total);
    let _ = std::fs::remove_file(&state);
    result
}

fn supervise_with(options: &Options, (from, to): (u64, u64), state: &Path, total: &mut Total) -> Result<(), String> {
    if from >= to {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.args(["--seed", &options.seed.to_string(), "--range", &format!("{from},{to},{}", state.display())]);
    if let Some(kind) = options.only {
        command.args(["--only", kind.name()]);
    }
    let output = command.stderr(std::process::Stdio::inherit()).output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    if let Some(report) = said.lines().find_map(|line| line.strip_prefix("REPORT ")) {
        let (counts, failures): (BTreeMap<String, u64>, Vec<String>) = serde_json::from_str(report).map_err(|e| e.to_string())?;
        total.counts.add(counts);
        total.failures.extend(failures);
        return Ok(());
    }
    let at = std::fs::read_to_string(state).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let Some(at) = at.filter(|at| (from..to).contains(at)) else {
        return Err(format!("a process ended before its first case: {}: {said}", output.status));
    };
    let why = said.lines().find_map(|line| line.strip_prefix("ENDED ")).unwrap_or("ended the process").to_owned();
    total.failures.push(format!("case {at}: {why} ({})", output.status));
    // What was counted went with the process; the cases before are the same again.
    supervise_with(options, (from, at), state, total)?;
    supervise_with(options, (at + 1, to), state, total)
}

fn run(options: &Options) -> Result<bool, String> {
    if let Some((from, to, file)) = &options.range {
        let (counts, failures) = worker::run(options.seed, *from..*to, options.only, State::File(Path::new(file)));
        println!("REPORT {}", serde_json::json!([counts.0, failures]));
        return Ok(true);
    }
    if let Some(case) = options.case {
        let (counts, failures) = worker::run(options.seed, case..case + 1, options.only, State::Shown);
        println!("{counts}{}", failures.join("\n"));
        return Ok(failures.is_empty());
    }
    let started = Instant::now();
    let mut total = Total::default();
    let mut next = 0;
    while next < options.cases {
        let end = (next + CASES_OF_A_PROCESS).min(options.cases);
        let known = total.failures.len();
        supervise(options, next, end, &mut total)?;
        for failure in &total.failures[known..] {
            println!("FAILED {failure}");
        }
        next = end;
        eprintln!("{next} cases, {} failed, {:.0} s", total.failures.len(), started.elapsed().as_secs_f64());
    }
    println!("{}", total.counts);
    println!("{} cases, seed {}, {} failed, {:.0} s", next, options.seed, total.failures.len(), started.elapsed().as_secs_f64());
    Ok(total.failures.is_empty())
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(2)
        }
    }
}

#[test]
fn some_cases_of_each_kind_are_honoured_or_refused() {
    let (counts, failures) = worker::run(1, 0..2400, None, State::Nothing);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for kind in Kind::ALL {
        let outcomes = counts.0.keys().filter(|key| key.starts_with(kind.name())).count();
        assert!(outcomes > 1, "{} came to one end only", kind.name());
    }
}

#[test]
fn a_case_is_the_same_each_time() {
    let run = || worker::run(7, 100..400, None, State::Nothing).0.0;
    assert_eq!(run(), run());
}
