//! How long grammars take: `grammar_times MODEL.gguf SCHEMAS.json [TOKENS]`.
//!
//! Compiles every schema of a list, then writes an answer to each, with tokens drawn evenly from those that may come, and prints
//! percentiles of compiling, of a mask, and of a check of a token.

use std::{
    error::Error,
    path::PathBuf,
    time::{Duration, Instant},
};

use engine::{Engine, EngineConfig, Grammar, MemoryGpuConfig, ModelSource, PagedAttentionConfig};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

/// The times, of which it prints the share that was at most so long.
struct Times(&'static str, Vec<Duration>);

impl Times {
    fn measure<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        self.1.push(began.elapsed());
        result
    }

    fn print(&mut self) {
        self.1.sort_unstable();
        let at = |share: f64| {
            let place = ((self.1.len() as f64 * share) as usize).min(self.1.len().saturating_sub(1));
            self.1.get(place).map_or(0.0, |time| time.as_secs_f64() * 1e6)
        };
        let (count, median, most, all_but_few, longest) = (self.1.len(), at(0.5), at(0.99), at(0.9999), at(1.0));
        println!("{}\t{count}\t{median:.1}\t{most:.1}\t{all_but_few:.1}\t{longest:.1}", self.0);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, schemas, rest @ ..] = &arguments[..] else { return Err("give MODEL.gguf SCHEMAS.json [TOKENS]".into()) };
    let num_tokens: usize = rest.first().map_or(Ok(200), |count| count.parse())?;
    let source = ModelSource::Gguf { files: vec![PathBuf::from(model)], tokenizer_dir: None, tokenizer_json: None };
    let mem_gpu = Some(MemoryGpuConfig::ContextSize(1024));
    let paged_attention = PagedAttentionConfig { mem_gpu, ..PagedAttentionConfig::default() };
    let engine = Engine::load(&source, &EngineConfig { paged_attention, ..EngineConfig::default() }, &|_| {})?;
    let schemas: Vec<Value> = serde_json::from_slice(&std::fs::read(schemas)?)?;
    let vocab_size = engine.vocab_size();
    let mut first = Times("vocabulary", Vec::new());
    first.measure(|| engine.grammars().compile(&Grammar::Regex("a".into())))?;
    let [mut compile, mut mask, mut check] = ["compile", "mask", "check"].map(|name| Times(name, Vec::new()));
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for schema in schemas {
        let compiled = compile.measure(|| engine.grammars().compile(&Grammar::JsonSchema(schema)))?;
        let Some(mut constraint) = compiled.begin(1).pop() else { continue };
        for _ in 0..num_tokens {
            if constraint.has_ended() {
                break;
            }
            let allowed = mask.measure(|| constraint.mask().map(device::TokenMask::to_set))?;
            // Mostly a token that may not come, as an unmasked draw of a random model gives.
            let guess = rng.random_range(0..vocab_size as u32);
            if check.measure(|| constraint.take(guess))? {
                continue;
            }
            let num_allowed = (0..vocab_size as u32).filter(|token| allowed.mask().allows(*token)).count();
            let Some(token) = allowed.mask().nth_allowed(rng.random_range(0..num_allowed)) else { break };
            check.measure(|| constraint.take_allowed(token))?;
        }
    }
    println!("what\tcount\tp50 us\tp99 us\tp99.99 us\tmax us");
    [&mut first, &mut compile, &mut mask, &mut check].into_iter().for_each(Times::print);
    Ok(())
}
