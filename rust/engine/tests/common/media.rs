//! Models that see or hear, through the whole engine.

use std::path::Path;

use engine::{Completion, Engine, EngineConfig, GenerationRequest, MediaOptions, ModelDType};

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
