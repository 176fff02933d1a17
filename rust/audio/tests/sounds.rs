//! Sound files against libsndfile, soxr and Transformers, and files that are made to harm.

use std::{fs, path::PathBuf};

use audio::{Limits, Processor, Sound, SoundError, decode};
use serde_json::{Value, json};

fn folder() -> PathBuf {
    goldens::dir().join("sounds")
}

fn bytes(name: &str) -> Vec<u8> {
    fs::read(folder().join(name)).unwrap()
}

fn processor(num_mel_bins: usize) -> Processor {
    let json = json!({ "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": num_mel_bins });
    Processor::from_json("test", json.as_object().unwrap()).unwrap()
}

#[test]
fn files_have_the_samples_and_features_that_others_find() {
    let expected: Value = serde_json::from_slice(&bytes("expected.json")).unwrap();
    for (name, expected) in expected.as_object().unwrap() {
        let sound = decode(&bytes(name), &Limits::default()).unwrap();
        assert_eq!(u64::from(sound.rate()), expected["rate"], "{name}");
        assert_eq!(sound.samples().len() as u64, expected["len"], "{name}");
        for sample in expected["samples"].as_array().unwrap() {
            let [place, value] = [&sample[0], &sample[1]].map(|value| value.as_f64().unwrap());
            let own = f64::from(sound.samples()[place as usize]);
            assert!((own - value).abs() < 2e-6, "{name}: sample {place} is {own}, not {value}");
        }
        let features = processor(128).process(&sound).unwrap();
        assert_eq!(processor(128).frames_of(&sound).len(), 1);
        assert_eq!((features.chunks.len(), features.num_frames, features.num_mel_bins), (1, 3000, 128));
        // Where another resampler cuts, energies of almost nothing differ.
        let (most, bins) = if sound.rate() == 16_000 { (1e-4, 32) } else { (2e-2, 15) };
        for frame in expected["features"].as_array().unwrap() {
            let number = frame[0].as_u64().unwrap() as usize;
            for (bin, value) in frame[1].as_array().unwrap().iter().enumerate().take(bins) {
                let own = f64::from(features.chunks[0][number * 128 + 4 * bin]);
                let value = value.as_f64().unwrap();
                assert!((own - value).abs() < most, "{name}: frame {number}, bin {bin}: {own}, not {value}");
            }
        }
    }
}

#[test]
fn a_long_sound_has_several_chunks_and_one_loudest_value() {
    let quiet = |at: usize| if at < 480_000 { 0.5 * (at as f32 * 0.3).sin() } else { 1e-4 * (at as f32 * 0.3).sin() };
    let sound = Sound::new(16_000, (0..480_001).map(quiet).collect()).unwrap();
    let features = processor(80).process(&sound).unwrap();
    assert_eq!((features.chunks.len(), processor(80).frames_of(&sound).len()), (2, 2));
    let most = |chunk: &[f32]| chunk.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let least = |chunk: &[f32]| chunk.iter().copied().fold(f32::INFINITY, f32::min);
    assert!((most(&features.chunks[0]) - least(&features.chunks[1]) - 2.0).abs() < 1e-6);
}

#[test]
fn what_is_no_sound_is_refused_with_why() {
    let error = |bytes: &[u8], limits: Limits| decode(bytes, &limits).unwrap_err();
    let wav = bytes("pcm16.wav");
    let text = error(&wav, Limits { max_bytes: 100, ..Limits::default() }).to_string();
    assert!(text.contains("more than the 100 that are allowed"), "{text}");
    let long = Limits { max_seconds: 0, ..Limits::default() };
    for name in ["pcm16.wav", "stereo.flac", "mono.mp3", "mono.ogg"] {
        assert!(matches!(error(&bytes(name), long), SoundError::TooLong { max_seconds: 0 }), "{name}");
    }
    let many = Limits { max_samples: 1000, ..Limits::default() };
    assert!(matches!(error(&wav, many), SoundError::TooManySamples { max_samples: 1000 }));
    assert!(matches!(error(b"\x89PNG\r\n\x1a\n", Limits::default()), SoundError::UnknownFormat { .. }));
    assert!(matches!(error(b"", Limits::default()), SoundError::UnknownFormat { .. }));
    assert!(matches!(error(&wav[..20], Limits::default()), SoundError::Malformed { format: "WAV", .. }));
    let mut fast = wav;
    fast[24..28].copy_from_slice(&400_000_u32.to_le_bytes());
    assert!(matches!(error(&fast, Limits::default()), SoundError::Rate { rate: 400_000 }));
    for value in [f32::NAN, f32::INFINITY, -1.1e4] {
        assert!(matches!(Sound::new(16_000, vec![0.0, value]), Err(SoundError::Sample { index: 1, .. })));
    }
    assert!(matches!(Sound::new(16_000, Vec::new()), Err(SoundError::Empty)));
    assert!(matches!(Sound::new(10, vec![0.0]), Err(SoundError::Rate { rate: 10 })));
}

/// A frame of MP3 begins with eleven bits that are set; its side information follows four bytes further.
#[test]
fn a_broken_packet_is_left_out() {
    let (limits, mut mp3) = (Limits::default(), bytes("mono.mp3"));
    let whole = decode(&mp3, &limits).unwrap();
    let middle = mp3.len() / 2;
    let frame = middle + mp3[middle..].windows(2).position(|pair| pair[0] == 0xff && pair[1] & 0xe6 == 0xe2).unwrap();
    mp3[frame + 4..frame + 40].fill(0xff);
    let broken = decode(&mp3, &limits).unwrap();
    let missing = whole.samples().len() - broken.samples().len();
    assert!((1..10_000).contains(&missing), "{missing}");
}

#[test]
fn what_a_processor_cannot_do_is_refused_by_its_key() {
    for (key, value) in [
        ("feature_extractor_type", json!("SeamlessM4TFeatureExtractor")),
        ("feature_extractor_type", Value::Null),
        ("do_normalize", json!(true)),
        ("dither", json!(0.1)),
        ("n_fft", json!(401)),
        ("hop_length", json!(0)),
        ("feature_size", json!("many")),
    ] {
        let mut json = json!({ "feature_extractor_type": "WhisperFeatureExtractor" });
        json[key] = value;
        let error = Processor::from_json("file", json.as_object().unwrap()).unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}

fn gemma4(changes: &Value) -> Result<Processor, SoundError> {
    let mut json = json!({ "feature_extractor_type": "Gemma4AudioFeatureExtractor", "frame_length": 320, "hop_length": 160 });
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    Processor::from_json("file", json.as_object().unwrap())
}

#[test]
fn a_sound_of_gemma_4_is_one_chunk_of_the_frames_that_end_within_it() {
    let processor = gemma4(&json!({ "fft_length": 512, "preemphasis": null })).unwrap();
    let sound = |num_samples: usize| Sound::new(16_000, vec![0.1; num_samples]).unwrap();
    for (num_samples, num_frames) in [(161, 1), (320, 1), (321, 2), (9000, 56), (480_000, 2999)] {
        assert_eq!(processor.frames_of(&sound(num_samples)), [num_frames]);
        let features = processor.process(&sound(num_samples)).unwrap();
        assert_eq!(
            (features.num_frames, features.chunks[0].len(), features.lens),
            (num_frames, 128 * num_frames, vec![num_frames])
        );
    }
    assert_eq!((processor.max_frames(), processor.frames_of(&sound(160))), (2999, vec![0]));
    assert!(matches!(processor.process(&sound(160)), Err(SoundError::TooShort { num_samples: 160, least: 161 })));
    assert!(matches!(processor.process(&sound(480_001)), Err(SoundError::TooLong { max_seconds: 30 })));
}

#[test]
fn what_features_of_gemma_4_cannot_be_is_refused_by_its_key() {
    for (key, value) in [
        ("dither", json!(1e-4)),
        ("padding_side", json!("left")),
        ("padding_value", json!(1.0)),
        ("frame_length", json!(400)),
        ("hop_length", json!(80)),
        ("fft_length", json!(1024)),
        ("frame_length_ms", json!(0.02)),
        ("min_frequency", json!(8000.0)),
        ("max_frequency", json!(9000.0)),
        ("preemphasis", json!(2.0)),
        ("preemphasis_htk_flavor", json!("yes")),
        ("mel_floor", json!(0.0)),
        ("per_bin_mean", json!([1.0, 2.0])),
        ("per_bin_stddev", json!(vec![0.0; 128])),
        ("do_normalize", json!(true)),
    ] {
        let error = gemma4(&json!({ key: value })).unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}

#[test]
fn chunks_know_what_is_sound_and_may_be_made_each_for_itself() {
    let json = json!({ "feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 1, "feature_size": 8 });
    let mut processor = Processor::from_json("test", json.as_object().unwrap()).unwrap();
    // Loud, then quiet: the loudest value of the whole bounds the quiet chunk from below.
    let samples: Vec<f32> = (0..20_001).map(|at| if at < 16_000 { 0.9 } else { 1e-5 } * (at as f32 * 0.3).sin()).collect();
    let sound = Sound::new(16_000, samples).unwrap();
    let together = processor.process(&sound).unwrap();
    assert_eq!((&together.lens[..], processor.frames_of(&sound)), (&[100, 26][..], vec![100, 26]));
    processor.are_chunks_apart = true;
    let apart = processor.process(&sound).unwrap();
    assert_eq!(apart.lens, together.lens);
    assert_ne!(apart.chunks[1], together.chunks[1]);
    let alone = processor.process(&Sound::new(16_000, sound.samples()[16_000..].to_vec()).unwrap()).unwrap();
    assert_eq!(apart.chunks[1], alone.chunks[0]);
    processor.set_max_seconds(1);
    assert!(matches!(processor.process(&sound), Err(SoundError::TooLong { max_seconds: 1 })));
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((value ^ (value >> 31)) % limit as u64) as usize
    }
}

/// Changes, cuts and repeats; headers are hit as often as the rest.
#[test]
fn damaged_files_are_sounds_or_errors() {
    let seeds: Vec<_> = ["pcm16.wav", "pcm24.wav", "stereo.flac", "mono.mp3", "mono.ogg"].map(bytes).into();
    let limits = Limits { max_seconds: 2, ..Limits::default() };
    let mut random = Random(1);
    let mut decoded = 0;
    std::panic::set_hook(Box::new(|_| {}));
    for _ in 0..3000 {
        let mut bytes = seeds[random.below(seeds.len())].clone();
        for _ in 0..=random.below(4) {
            let reach = if random.below(2) == 0 { bytes.len() } else { bytes.len().min(120) };
            let at = random.below(reach.max(1)).min(bytes.len().saturating_sub(1));
            match random.below(4) {
                0 if !bytes.is_empty() => bytes[at] = random.below(256) as u8,
                1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
                2 if random.below(4) == 0 => bytes.truncate(at),
                _ => {
                    let part = bytes[at..bytes.len().min(at + random.below(100))].to_vec();
                    bytes.splice(at..at, part);
                }
            }
        }
        if let Ok(sound) = decode(&bytes, &limits) {
            decoded += 1;
            assert!(sound.seconds() <= 2.0 && sound.samples().iter().all(|value| value.is_finite()));
        }
    }
    let _ = std::panic::take_hook();
    assert!(decoded > 300, "only {decoded} decoded");
}

#[test]
fn a_long_sound_of_phi_4_is_parts_with_the_frames_of_the_vector_before() {
    let json = json!({ "feature_extractor_type": "Phi4MultimodalFeatureExtractor", "feature_size": 8 });
    let processor = Processor::from_json("test", json.as_object().unwrap()).unwrap();
    let sound = |num_frames: usize| {
        let samples = (0..400 + 160 * (num_frames - 1)).map(|at| (at as f32 * at as f32 * 1e-5).sin()).collect();
        Sound::new(16_000, samples).unwrap()
    };
    for (num_frames, lens) in [(1, &[1][..]), (4000, &[4000]), (4001, &[4000, 1]), (8100, &[4000, 4000, 100])] {
        let features = processor.process(&sound(num_frames)).unwrap();
        assert_eq!((&features.lens[..], &processor.frames_of(&sound(num_frames))[..]), (lens, lens));
        assert!(features.num_frames <= processor.max_frames());
        let mut whole = Vec::new();
        for (number, (chunk, len)) in features.chunks.iter().zip(lens).enumerate() {
            let before = if number == 0 { 0 } else { 8 * 8 };
            assert_eq!(chunk.len(), before + 8 * len, "chunk {number} of {num_frames} frames");
            assert_eq!(chunk[..before], whole[whole.len() - before..]);
            whole.extend_from_slice(&chunk[before..]);
        }
        assert_eq!(whole.len(), 8 * num_frames);
    }
}
