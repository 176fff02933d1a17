//! Looks at and decodes damaged GIF files, and reads damaged answers of ffprobe:
//! `cargo run --release -p mistral-paged-video --example fuzz_videos -- --cases N --seed S`.
//!
//! Each gives frames or an error, within the limits. Says how many; ends with 1 where one panicked or went beyond.
#![forbid(unsafe_code)]

#[path = "../../images/tests/common/fuzz.rs"]
mod fuzz;

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::{Duration, Instant},
};

use gif::{DisposalMethod, Encoder, Frame};
use video::{Limits, Video, VideoError, told_by_ffprobe};

const LIMITS: Limits = Limits {
    max_bytes: 1 << 20,
    max_pixels: 1_000_000,
    max_frames: 1000,
    max_kept_pixels: 1_000_000,
    max_time: Duration::from_secs(10),
};
const TOLD: [&str; 3] = [
    r#"{"programs": [], "streams": [{"width": 64, "height": 48, "r_frame_rate": "10/1", "avg_frame_rate": "30000/1001", "nb_read_packets": "30"}]}"#,
    r#"{"streams": [{"width": 1, "height": 1, "r_frame_rate": "1/1", "avg_frame_rate": "0/0", "nb_read_packets": "1"}, {}]}"#,
    r#"{"streams": [{"width": 1000, "height": 1000, "avg_frame_rate": "1000/1", "nb_read_packets": "1000"}]}"#,
];

/// Animations whose frames lie at many places and are taken away in every way.
fn animations() -> Vec<Vec<u8>> {
    let palette: Vec<u8> = (0..48).collect();
    let disposals = [DisposalMethod::Any, DisposalMethod::Keep, DisposalMethod::Background, DisposalMethod::Previous];
    let animation = |(width, height): (u16, u16)| {
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, width, height, &palette).expect("a palette");
        for (number, dispose) in disposals.into_iter().enumerate() {
            let (left, top) = (number as u16 % width, number as u16 % height);
            let (width, height) = (width - left, height - top);
            let buffer =
                (0..usize::from(width) * usize::from(height)).map(|at| ((at + number) % 16) as u8).collect::<Vec<_>>().into();
            let frame = Frame { left, top, width, height, dispose, delay: number as u16, buffer, ..Frame::default() };
            encoder.write_frame(&frame).expect("a frame");
        }
        drop(encoder);
        bytes
    };
    [(1, 1), (3, 2), (40, 30)].map(animation).into()
}

/// Whether there were frames; what is beyond the limits is a defect.
fn decoded(bytes: Vec<u8>) -> bool {
    let Ok(video) = Video::of_file(bytes, None, &LIMITS) else { return false };
    let (height, width) = video.size();
    assert!(video.num_frames() <= LIMITS.max_frames && (height * width) as u64 <= LIMITS.max_pixels);
    let numbers: Vec<usize> = (0..video.num_frames()).collect();
    let mut seen = 0;
    let done = video.frames(&numbers, &mut Duration::default(), |frame| {
        assert_eq!(frame.size(), (height, width));
        seen += 1;
        Ok::<_, VideoError>(())
    });
    assert!(done.is_err() || seen == numbers.len());
    done.is_ok()
}

/// The same of what ffprobe says.
fn told(bytes: &[u8]) -> bool {
    let Ok((num_frames, fps, (height, width))) = told_by_ffprobe(&String::from_utf8_lossy(bytes), &LIMITS) else { return false };
    assert!((1..=LIMITS.max_frames).contains(&num_frames) && fps > 0.0 && fps <= 1000.0);
    assert!(height > 0 && width > 0 && height as u64 * width as u64 <= LIMITS.max_pixels);
    true
}

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
    let (files, answers) = (animations(), TOLD.map(|text| text.as_bytes().to_vec()));
    let mut random = fuzz::Random(seed);
    let (mut good, mut panics, mut slowest) = ([0_u64; 2], 0_u64, 0.0_f64);
    for case in 0..cases {
        let of_gif = case % 2 == 0;
        let bytes = fuzz::mutated(&mut random, if of_gif { &files } else { &answers });
        let start = Instant::now();
        if let Ok(is_good) = catch_unwind(AssertUnwindSafe(|| if of_gif { decoded(bytes) } else { told(&bytes) })) {
            good[usize::from(!of_gif)] += u64::from(is_good);
        } else {
            panics += 1;
            eprintln!("case {case} of seed {seed}");
        }
        slowest = slowest.max(start.elapsed().as_secs_f64());
    }
    let [videos, answers] = good;
    println!(
        "{cases} cases, {videos} decoded, {answers} answers read, {panics} panics, the slowest took {:.0} ms",
        slowest * 1000.0
    );
    ExitCode::from(u8::from(panics > 0))
}
