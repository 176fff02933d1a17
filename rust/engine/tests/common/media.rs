//! Models that see or hear, through the whole engine.

use std::{path::Path, sync::Arc};

use engine::{
    Completion, Engine, EngineConfig, GenerationRequest, Media, MediaOptions, Message, MessageContent, ModelDType,
    SamplingParams,
    images::{Limits, RgbImage, decode},
};
use serde::Deserialize;
use serde_json::Value;

use super::{golden_dir, serving::greedy};

/// A message of a golden.
#[derive(Deserialize)]
pub struct GoldenMessage {
    pub role: String,
    pub content: Vec<Value>,
}

/// A chat of a golden, with what `media_of` has for parts of a type, in order: `num_tokens` of an answer, each with the
/// likeliest ones.
pub fn request(
    messages: &[GoldenMessage],
    num_tokens: usize,
    mut media_of: impl FnMut(&str) -> Option<Media>,
) -> GenerationRequest {
    let message = |message: &GoldenMessage| {
        let media = message.content.iter().filter_map(|part| media_of(part["type"].as_str()?)).collect();
        Message { media, ..Message::new(&message.role, MessageContent::Parts(message.content.clone())) }
    };
    let sampling = SamplingParams { logprobs: Some(20), ..greedy(num_tokens) };
    let mut request = GenerationRequest::chat(messages.iter().map(message).collect(), sampling);
    request.return_token_ids = true;
    request
}

/// The image of a golden that sees, for models that see besides.
pub fn image() -> Media {
    let file = std::fs::read(golden_dir().join("vision/qwen3_vl/image0.png")).unwrap();
    Media::Image(Arc::new(decode(&file, &Limits::default()).unwrap()))
}

/// The image that a number decides: those of the goldens of Phi.
pub fn pattern(seed: usize, [width, height]: [u32; 2]) -> Arc<RgbImage> {
    let value = |x: u32, y: u32, channel: u32| (x * 7 + y * 13 + channel * 50 + seed as u32 * 31 + x * y) as u8;
    let places = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    let pixels = places.flat_map(|(x, y)| (0..3).map(move |channel| value(x, y, channel))).collect();
    Arc::new(RgbImage::new(width, height, pixels).unwrap())
}

/// Exact, with a pool for a few requests.
pub fn config() -> EngineConfig {
    let mut config = EngineConfig { dtype: ModelDType::F32, media: Some(MediaOptions::default()), ..EngineConfig::default() };
    config.cpu.num_threads = Some(2);
    config.paged_attention.mem_gpu = Some(engine::MemoryGpuConfig::ContextSize(2000));
    config
}

/// The tokens of a request's prompt, and its answer.
pub fn run(engine: &Engine, request: GenerationRequest) -> (Vec<u32>, Completion) {
    let stream = engine.submit(request).unwrap();
    let prompt = stream.prompt_token_ids().to_vec();
    (prompt, stream.wait().unwrap())
}

/// The answers' bits: ids and log probabilities.
pub fn bits(completion: &Completion) -> Vec<(u32, Option<u32>)> {
    completion.choices[0].logprobs.iter().flatten().map(|token| (token.token_id, token.logprob.map(f32::to_bits))).collect()
}

/// A copy of a model's folder in which a file's text is another.
pub fn edited(folder: &Path, file: &str, from: &str, to: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let path = copy.path().join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{} has no {from:?}", path.display());
    std::fs::write(path, text.replace(from, to)).unwrap();
    copy
}
