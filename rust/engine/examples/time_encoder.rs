//! Times the image encoder of a model folder: `cargo run --release -p mistral-paged-engine --example time_encoder -- FOLDER
//! [SIDE]`, over an image of `SIDE` by `SIDE` pixels (512), in F32 and in Auto. Prints the seconds of the prompt and its tokens.

use std::{path::PathBuf, sync::Arc};

use engine::{
    Engine, EngineConfig, EngineError, GenerationRequest, MediaOptions, MemoryGpuConfig, Message, MessageContent, ModelDType,
    ModelSource, SamplingParams, images::RgbImage,
};

const ROUNDS: u8 = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("give a model's folder")?);
    let side: u32 = arguments.next().map_or(Ok(512), |side| side.parse())?;
    for dtype in [ModelDType::F32, ModelDType::Auto] {
        let mut config = EngineConfig { dtype, media: Some(MediaOptions::default()), ..EngineConfig::default() };
        config.paged_attention.mem_gpu = Some(MemoryGpuConfig::ContextSize(4096));
        let source = ModelSource::HuggingFace { path: folder.clone(), tokenizer_json: None };
        let engine = Engine::load(&source, &config, &|_| {})?;
        let mut seconds = Vec::new();
        for round in 0..ROUNDS {
            let usage = ask(&engine, side, round)?;
            seconds.push(usage.total_prompt_time_sec);
            println!(
                "{dtype:?}: {:.3} s, {} tokens, {} images encoded",
                usage.total_prompt_time_sec, usage.prompt_tokens, usage.encoded_images
            );
        }
        seconds.sort_by(f64::total_cmp);
        println!("{dtype:?}: median {:.3} s", seconds[seconds.len() / 2]);
    }
    Ok(())
}

/// Another image each time, so that none is known.
fn ask(engine: &Engine, side: u32, round: u8) -> Result<engine::Usage, Box<dyn std::error::Error>> {
    let pixels = (0..3 * side * side).map(|i| (i * 7 % 251) as u8 ^ round).collect();
    let image = Arc::new(RgbImage::new(side, side, pixels)?);
    let parts = vec![serde_json::json!({ "type": "image" }), serde_json::json!({ "type": "text", "text": "?" })];
    let message = Message { media: vec![image.into()], ..Message::new("user", MessageContent::Parts(parts)) };
    let sampling = SamplingParams { max_tokens: Some(1), temperature: Some(0.0), ..SamplingParams::default() };
    let completion = engine
        .submit(GenerationRequest::chat(vec![message], sampling))?
        .wait()
        .map_err(|error: EngineError| error.to_string())?;
    Ok(completion.usage)
}
