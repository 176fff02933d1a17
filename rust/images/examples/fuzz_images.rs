//! Decodes and processes damaged images:
//! `cargo run --release -p mistral-paged-images --example fuzz_images -- --cases N --seed S`.
//!
//! Each gives an image or an error. Says how many, and how often a decoder panicked, which [`images::decode`] makes an error of.
#![forbid(unsafe_code)]

#[path = "../tests/common/fuzz.rs"]
mod fuzz;

use std::{
    env,
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use images::{Limits, Processor, decode};
use serde_json::json;

static PANICS: AtomicU64 = AtomicU64::new(0);

fn main() -> ExitCode {
    let (mut cases, mut seed) = (100_000, 0);
    let mut arguments = env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().and_then(|value| value.parse::<u64>().ok());
        match (flag.as_str(), value) {
            ("--cases", Some(value)) => cases = value,
            ("--seed", Some(value)) => seed = value,
            _ => {
                eprintln!("{flag} is not understood; flags are --cases N and --seed S");
                return ExitCode::from(2);
            }
        }
    }
    // libjpeg's errors unwind, but do not come here.
    std::panic::set_hook(Box::new(|panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        eprintln!("{panic}");
    }));
    let seeds = fuzz::seeds(&goldens::dir().join("images"));
    let config = json!({"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32}});
    let processor = Processor::from_json("fuzz", config.as_object().expect("an object")).expect("a known processor");
    let limits = Limits { max_pixels: 1_000_000, ..Limits::default() };
    let mut random = fuzz::Random(seed);
    let (mut decoded, mut slowest) = (0_u64, 0.0_f64);
    for case in 0..cases {
        let bytes = fuzz::mutated(&mut random, &seeds);
        let start = Instant::now();
        let before = PANICS.load(Ordering::Relaxed);
        if let Ok(image) = decode(&bytes, &limits) {
            decoded += 1;
            // Extreme shapes may be refused.
            let _ = processor.process(&image);
        }
        slowest = slowest.max(start.elapsed().as_secs_f64());
        if PANICS.load(Ordering::Relaxed) > before {
            eprintln!("case {case} of seed {seed}");
        }
    }
    let panics = PANICS.load(Ordering::Relaxed);
    println!("{cases} cases, {decoded} decoded, {panics} panics, the slowest took {:.0} ms", slowest * 1000.0);
    ExitCode::SUCCESS
}
