//! How long an image takes: `cargo run --release -p mistral-paged-images --example time_images -- FILE...`.
//!
//! Says the best of five for decoding, and for making the tiles of three processors.
#![forbid(unsafe_code)]

use std::{env, fs, time::Instant};

use images::{Limits, Processor, decode};
use serde_json::json;

fn best<T>(mut run: impl FnMut() -> T) -> (T, f64) {
    let mut once = || {
        let start = Instant::now();
        (run(), start.elapsed().as_secs_f64() * 1000.0)
    };
    (1..5).fold(once(), |best, _| {
        let next = once();
        if next.1 < best.1 { next } else { best }
    })
}

fn main() {
    let configs = [
        json!({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}, "crop_size": 336}),
        json!({"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512}}),
        json!({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12_845_056}),
    ];
    for path in env::args().skip(1) {
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let (image, milliseconds) = best(|| decode(&bytes, &Limits::default()));
        let image = image.unwrap_or_else(|error| panic!("{path}: {error}"));
        println!("{path}: {} x {}, decoded in {milliseconds:.0} ms", image.width(), image.height());
        for config in &configs {
            let processor =
                Processor::from_json("time_images", config.as_object().expect("an object")).expect("a known processor");
            let (processed, milliseconds) = best(|| processor.process(&image));
            let tiles = processed.unwrap_or_else(|error| panic!("{path}: {error}")).tiles;
            let (width, height) = (tiles[0].width, tiles[0].height);
            println!("  {:?}: {} tiles of {width} x {height} in {milliseconds:.0} ms", processor.kind, tiles.len());
        }
    }
}
