//! Tiny models that take videos against the outputs of transformers (tests/data/golden/videos), through the whole engine.

use std::sync::Arc;

use engine::{
    Engine, EngineConfig, GenerationRequest, Media, MediaKind, MediaOptions, Message, MessageContent, ModelDType, ModelSource,
    Prompt, SamplingParams,
    images::RgbImage,
    video::{Limits, Video},
};
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;

use crate::common::{
    self, drawn, golden_dir, log_softmax,
    media::{self, GoldenMessage, bits, config, edited, image, run},
    serving::greedy,
};

const MODELS: [&str; 4] = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vision"];
/// Of these, the one with recurrent layers.
const RECURRENT: &str = "qwen3_5_vision";

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    videos: Vec<DrawnVideo>,
    size: [usize; 2],
    messages: Vec<GoldenMessage>,
    input_ids: Vec<u32>,
    last_logits: Vec<f32>,
    argmax: Vec<u32>,
    greedy_ids: Vec<u32>,
}

#[derive(Clone, Deserialize)]
struct DrawnVideo {
    name: String,
    frames: usize,
    fps: f64,
}

fn golden(name: &str) -> Golden {
    serde_json::from_slice(&std::fs::read(golden_dir().join("videos").join(name).join("golden.json")).unwrap()).unwrap()
}

/// The folder of a model, with what it needs for videos.
fn folder(name: &str) -> TempDir {
    let copy = edited(&drawn::seeing(name), "config.json", "{", "{");
    let videos = golden_dir().join("videos");
    std::fs::copy(videos.join("chat_template.jinja"), copy.path().join("chat_template.jinja")).unwrap();
    let file = "video_preprocessor_config.json";
    std::fs::copy(videos.join(name).join(file), copy.path().join(file)).unwrap();
    copy
}

fn load(folder: &TempDir, config: &EngineConfig) -> Engine {
    Engine::load(&ModelSource::HuggingFace { path: folder.path().to_owned(), tokenizer_json: None }, config, &|_| {}).unwrap()
}

fn engine(name: &str, config: &EngineConfig) -> Engine {
    load(&folder(name), config)
}

/// Frames that a name decides. tests/drawn_videos.py has the same.
fn frames(name: &str, count: usize, [height, width]: [usize; 2]) -> Vec<RgbImage> {
    let len = height * width * 3;
    let levels: Vec<u8> =
        drawn::drawn(&format!("video {name}"), count * len).map(|u| ((u + 0.5) * 256.0).floor() as u8).collect();
    levels.chunks_exact(len).map(|frame| RgbImage::new(width as u32, height as u32, frame.to_vec()).unwrap()).collect()
}

fn video(drawn: &DrawnVideo, size: [usize; 2]) -> Media {
    let frames = frames(&drawn.name, drawn.frames, size);
    Media::Video(Arc::new(Video::of_frames(frames, Some(drawn.fps), &Limits::default()).unwrap()))
}

fn request(case: &Case) -> GenerationRequest {
    let mut videos = case.videos.iter().map(|drawn| video(drawn, case.size));
    media::request(&case.messages, case.greedy_ids.len(), |kind| match kind {
        "video" => videos.next(),
        "image" => Some(image()),
        _ => None,
    })
}

fn about(media: Media) -> GenerationRequest {
    let parts = vec![json!({ "type": "video" }), json!({ "type": "text", "text": "what is it?" })];
    let message = Message { media: vec![media], ..Message::new("user", MessageContent::Parts(parts)) };
    GenerationRequest::chat(vec![message], SamplingParams { logprobs: Some(0), ..greedy(4) })
}

fn num_groups(case: &Case) -> usize {
    case.videos.iter().map(|video| video.frames.div_ceil(2)).sum()
}

#[test]
fn every_family_sees_videos_as_transformers_does() {
    for name in MODELS {
        let engine = engine(name, &config());
        assert_eq!(engine.media_kinds(), [MediaKind::Image, MediaKind::Video], "{name}");
        let fast = self::engine(name, &EngineConfig { dtype: ModelDType::Auto, ..config() });
        for (number, case) in golden(name).cases.iter().enumerate() {
            let what = format!("{name}, case {number}");
            let mut asked = request(case);
            asked.prompt_logprobs = Some(1);
            let (prompt, completion) = run(&engine, asked);
            assert_eq!(prompt, case.input_ids, "{what}: tokens of the prompt");
            let expected = log_softmax(&case.last_logits);
            for (completion, most) in [(&completion, 2e-3), (&run(&fast, request(case)).1, 0.15)] {
                for top in &completion.choices[0].logprobs.as_ref().unwrap()[0].top_logprobs {
                    let (got, expected) = (f64::from(top.logprob), expected[top.token_id as usize]);
                    assert!((got - expected).abs() < most, "{what}: token {} has {got} and not {expected}", top.token_id);
                }
            }
            for (position, token) in completion.prompt_logprobs.iter().enumerate().skip(1) {
                let likeliest = token.token.top_logprobs[0].token_id;
                assert_eq!(likeliest, case.argmax[position - 1], "{what}: the likeliest behind position {}", position - 1);
            }
            assert_eq!(completion.choices[0].token_ids, case.greedy_ids, "{what}: the answer");
            assert_eq!(completion.usage.encoded_videos, num_groups(case), "{what}");
        }
    }
}

#[test]
fn chunks_batches_and_what_is_cached_change_no_bits() {
    for name in MODELS {
        let folder = folder(name);
        let cases = golden(name).cases;
        let alone: Vec<_> = {
            let engine = load(&folder, &config());
            cases.iter().map(|case| bits(&run(&engine, request(case)).1)).collect()
        };
        let mut small = EngineConfig { max_num_batched_tokens: 7, ..config() };
        small.paged_attention.block_size = Some(8);
        let engine = load(&folder, &small);
        for (case, expected) in cases.iter().zip(&alone) {
            let text = common::serving::request(3, 20, 12);
            let beside = [engine.submit(text.clone()).unwrap(), engine.submit(text).unwrap()];
            let (_, cold) = run(&engine, request(case));
            assert_eq!(&bits(&cold), expected, "{name}: in chunks, beside others");
            let (_, warm) = run(&engine, request(case));
            assert_eq!(&bits(&warm), expected, "{name}: with its prefix cached");
            if name != RECURRENT {
                assert_eq!(warm.usage.cached_tokens, case.input_ids.len() - 1, "{name}: tokens of the cached prefix");
            }
            assert_eq!((warm.usage.encoded_videos, warm.usage.encoded_images), (0, 0), "{name}");
            for stream in beside {
                stream.wait().unwrap();
            }
        }
        // Without a cache of outputs they are encoded in the steps that need them.
        let media = Some(MediaOptions { cache_bytes: Some(1), ..MediaOptions::default() });
        let forgetful = load(&folder, &EngineConfig { media, prefix_caching: false, ..small.clone() });
        assert_eq!(bits(&run(&forgetful, request(&cases[1])).1), alone[1], "{name}: without a cache");
    }
}

#[test]
fn other_frames_and_other_times_are_other_prompts() {
    for name in ["qwen2_5_vl", "qwen3_vl"] {
        let folder = folder(name);
        let case = &golden(name).cases[0];
        let drawn = &case.videos[0];
        let mut other = frames(&drawn.name, drawn.frames, case.size);
        let last = other.last_mut().unwrap();
        let mut pixels = last.pixels().to_vec();
        pixels[100] ^= 0x80;
        *last = RgbImage::new(last.width(), last.height(), pixels).unwrap();
        let other = Media::Video(Arc::new(Video::of_frames(other, Some(drawn.fps), &Limits::default()).unwrap()));
        let slower = video(&DrawnVideo { fps: drawn.fps / 4.0, ..drawn.clone() }, case.size);
        let warm = load(&folder, &config());
        run(&warm, about(video(drawn, case.size)));
        // Of another last frame the groups before it are the same. Those of another rate have other times.
        let encoded = [1, if name == "qwen3_vl" { 0 } else { 2 }];
        for (media, encoded) in [other, slower].into_iter().zip(encoded) {
            let expected = bits(&run(&load(&folder, &config()), about(media.clone())).1);
            let (_, completion) = run(&warm, about(media));
            assert_eq!(bits(&completion), expected, "{name}");
            assert_eq!(completion.usage.encoded_videos, encoded, "{name}");
        }
    }
}

/// An animated GIF whose frames are those of a golden's video, of one colour each.
fn gif(colors: &[u8], size: [usize; 2], hundredths: u16) -> (Vec<u8>, Vec<RgbImage>) {
    let [height, width] = size;
    let palette: Vec<u8> = colors.iter().flat_map(|level| [*level, level / 2, 255 - level]).collect();
    let mut bytes = Vec::new();
    let mut encoder = gif::Encoder::new(&mut bytes, width as u16, height as u16, &palette).unwrap();
    for color in 0..colors.len() {
        let buffer = vec![color as u8; width * height].into();
        let (width, height) = (width as u16, height as u16);
        encoder.write_frame(&gif::Frame { width, height, delay: hundredths, buffer, ..gif::Frame::default() }).unwrap();
    }
    drop(encoder);
    let frame = |color: &[u8]| RgbImage::new(width as u32, height as u32, color.repeat(width * height)).unwrap();
    (bytes, palette.chunks_exact(3).map(frame).collect())
}

#[test]
fn frames_of_a_file_are_sampled() {
    let name = "qwen3_vl";
    let engine = engine(name, &config());
    // Ten frames in two seconds, of which the model takes four.
    let colors: Vec<u8> = (0..10).map(|frame| frame * 25).collect();
    let (bytes, frames) = gif(&colors, [64, 96], 20);
    let file = Video::of_file(bytes.clone(), None, &Limits::default()).unwrap();
    assert_eq!((file.num_frames(), file.fps(), file.size()), (10, 5.0, (64, 96)));
    let sampled = run(&engine, about(Media::Video(Arc::new(file)))).1;
    assert_eq!(sampled.usage.encoded_videos, 2);
    let four: Vec<_> = [0, 3, 6, 9].map(|frame| frames[frame].clone()).to_vec();
    // Times are those of the file: 0.3 and 1.5 seconds. Of frames by themselves they are 0.3 and 1.5 as well at 5 / 3 a second.
    let given = Video::of_frames(four, Some(5.0 / 3.0), &Limits::default()).unwrap();
    assert_eq!(bits(&run(&engine, about(Media::Video(Arc::new(given)))).1), bits(&sampled));
    let wanted = Video::of_file(bytes, Some(5.0), &Limits::default()).unwrap();
    assert_eq!(run(&engine, about(Media::Video(Arc::new(wanted)))).1.usage.encoded_videos, 5);
}

#[test]
fn what_does_not_fit_is_refused() {
    let case = &golden("qwen3_vl").cases[0];
    let video = video(&case.videos[0], case.size);
    let refusal = |engine: &Engine, media| engine.submit(about(media)).err().unwrap().to_string();
    let source = ModelSource::HuggingFace { path: drawn::seeing("llava"), tokenizer_json: None };
    let text = refusal(&Engine::load(&source, &config(), &|_| {}).unwrap(), video.clone());
    assert!(text.contains("this model takes images, and the messages have videos"), "{text}");
    assert!(text.contains("qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe"), "{text}");
    let folder = folder("qwen3_vl");
    let text = refusal(&load(&folder, &EngineConfig { media: None, ..config() }), video);
    assert!(text.contains("loaded for text, and the messages have videos"), "{text}");
    // Refused before it is decoded.
    let frame = RgbImage::new(96, 64, vec![0; 96 * 64 * 3]).unwrap();
    let long = Media::Video(Arc::new(Video::of_frames(vec![frame; 4200], None, &Limits::default()).unwrap()));
    let text = refusal(&load(&folder, &config()), long);
    assert!(text.contains("videos and sounds take") && text.contains("make them shorter or smaller"), "{text}");
    let ids = Prompt::TokenIds(vec![3, 49, 4]);
    assert!(load(&folder, &config()).submit(GenerationRequest::new(ids, greedy(2))).is_ok(), "a token without a video");
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    for (file, from, to, said) in [
        ("config.json", "\"video_token_id\": 49", "\"video_token_id\": 48", "`video_token_id` is 48, which stands for images"),
        ("config.json", "\"vision_start_token_id\": 46", "\"x_token_id\": 46", "`vision_start_token_id` is missing"),
        ("video_preprocessor_config.json", "\"merge_size\":2", "\"merge_size\":4", "the processor of videos has"),
        ("video_preprocessor_config.json", "Qwen3VL", "Other", "video_processor_type is OtherVideoProcessor"),
    ] {
        let copy = edited(folder("qwen3_vl").path(), file, from, to);
        let source = ModelSource::HuggingFace { path: copy.path().to_owned(), tokenizer_json: None };
        let error = Engine::load(&source, &config(), &|_| {}).err().unwrap().to_string();
        assert!(error.contains(said), "{error}");
    }
    // Without a token for them a model takes images alone.
    let copy = edited(folder("qwen3_vl").path(), "config.json", "\"video_token_id\": 49", "\"x_token_id\": 49");
    assert_eq!(load(&copy, &config()).media_kinds(), [MediaKind::Image]);
}
