//! Writes what an encoder takes of a sound: `cargo run --example features -- FILE NUM_MEL_BINS OUT`. A file named OUT has the
//! features, chunk after chunk, `[frames, mel bins]`, and one named OUT.samples the samples at 16,000 a second; both as f32.

use std::fs;

use audio::{Limits, Processor, decode};
use serde_json::json;

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [file, num_mel_bins, out] = &arguments[..] else { panic!("usage: features FILE NUM_MEL_BINS OUT") };
    let sound = decode(&fs::read(file).expect("a file"), &Limits::default()).expect("a sound");
    let json = json!({
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": num_mel_bins.parse::<u32>().expect("a number"),
    });
    let processor = Processor::from_json("the arguments", json.as_object().expect("an object")).expect("a processor");
    let begun = std::time::Instant::now();
    let features = processor.process(&sound).expect("features");
    println!("{:.2} s of {} a second: {} chunks in {:?}", sound.seconds(), sound.rate(), features.chunks.len(), begun.elapsed());
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    fs::write(out, bytes(&features.chunks.concat())).expect("a file that can be written");
    fs::write(format!("{out}.samples"), bytes(&sound.resampled(processor.sampling_rate))).expect("a file that can be written");
}
