//! Engines and requests of the tests.

use engine::{
    Completion, DraftChoice, DraftModel, Engine, EngineConfig, GenerationRequest, MemoryGpuConfig, ModelDType, MtpHead,
    PagedAttentionConfig, Prompt, SamplingParams, Speculation,
};

use super::{gguf, hugging_face};

pub fn exact() -> EngineConfig {
    EngineConfig { dtype: ModelDType::F32, ..EngineConfig::default() }
}

pub fn pool_of(num_tokens: usize, block_size: usize) -> PagedAttentionConfig {
    PagedAttentionConfig {
        block_size: Some(block_size),
        mem_gpu: Some(MemoryGpuConfig::ContextSize(num_tokens)),
        ..PagedAttentionConfig::default()
    }
}

pub fn stats(engine: &Engine) -> engine::KvCacheStats {
    engine.kv_cache_stats().unwrap()
}

pub fn start(model: &str, config: &EngineConfig) -> Engine {
    let source = model.strip_suffix(".gguf").map_or_else(|| hugging_face(model), gguf);
    Engine::load(&source, config, &|_| {}).unwrap()
}

pub fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: Some(0.0),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        logprobs: Some(0),
        ..SamplingParams::default()
    }
}

pub fn prompt(i: usize, len: usize) -> Vec<u32> {
    (0..len).map(|j| ((i * 7919 + j * 31) % 400 + 10) as u32).collect()
}

pub fn request(i: usize, len: usize, new: usize) -> GenerationRequest {
    GenerationRequest::new(Prompt::TokenIds(prompt(i, len)), greedy(new))
}

pub fn tokens(completion: &Completion) -> Vec<u32> {
    completion.choices[0].logprobs.iter().flatten().map(|l| l.token_id).collect()
}

pub fn run(engine: &Engine, request: GenerationRequest) -> Vec<u32> {
    tokens(&engine.submit(request).unwrap().wait().unwrap())
}

pub fn run_together(engine: &Engine, requests: Vec<GenerationRequest>) -> Vec<Vec<u32>> {
    let streams: Vec<_> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
    streams.into_iter().map(|s| tokens(&s.wait().unwrap())).collect()
}

pub fn drafted_by(draft: &str, choice: DraftChoice, config: &EngineConfig) -> EngineConfig {
    let draft = DraftModel { source: hugging_face(draft), architecture: None, in_situ_quant: None };
    EngineConfig { speculation: Some(Speculation::by_model(choice)), draft: Some(draft), ..config.clone() }
}

pub fn by_head(choice: DraftChoice, config: &EngineConfig) -> EngineConfig {
    let speculation = Speculation { max_drafts: Some(3), ..Speculation::by_model(choice) };
    EngineConfig { speculation: Some(speculation), mtp: Some(MtpHead::default()), ..config.clone() }
}
