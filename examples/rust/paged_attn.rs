//! Paged attention from Rust: choose a device, load a model with a `PagedAttentionConfig`, build the engine, send a request,
//! print the answer.
//!
//! `cargo run --release --example paged_attn -- MODEL` where MODEL is a GGUF file or a folder with safetensors.

use std::{path::PathBuf, process::ExitCode};

use engine::{
    Engine, EngineConfig, EngineError, GenerationRequest, MemoryGpuConfig, Message, ModelSource, PagedAttentionConfig,
    PagedCacheType, SamplingParams, best_device,
};

fn setup(model: PathBuf) -> Result<Engine, EngineError> {
    let paged_attention = PagedAttentionConfig::new(Some(32), MemoryGpuConfig::MbAmount(1024), PagedCacheType::Auto)?;
    let config = EngineConfig { max_num_seqs: 5, ..EngineConfig::new(best_device(), paged_attention) };
    Engine::load(&ModelSource::from_path(model)?, &config, &|_| {})
}

fn answer(model: PathBuf) -> Result<(), EngineError> {
    let engine = setup(model)?;
    let messages = vec![Message::user("Tell me a story about the Rust type system.")];
    let sampling = SamplingParams { max_tokens: Some(64), temperature: Some(0.0), ..SamplingParams::default() };
    let completion = engine.submit(GenerationRequest::chat(messages, sampling))?.wait()?;
    println!("{}", completion.choices[0].text);
    println!("{:?}", completion.usage);
    Ok(())
}

fn main() -> ExitCode {
    let Some(model) = std::env::args_os().nth(1) else {
        eprintln!("usage: paged_attn MODEL");
        return ExitCode::from(2);
    };
    match answer(model.into()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
