//! What is fuzzed.

use engine::{Completion, CpuOptions, EngineConfig, EngineError, MemoryGpuConfig, PagedAttentionConfig};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::{
    adapters::Adapters, bodies::Bodies, checkpoints::Checkpoints, configs, configs::Configs, files::Files, structured, templates,
    tokenizers,
};

/// Where a case's damage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Template,
    Tokenizer,
    Config,
    GenerationConfig,
    Gguf,
    Adapter,
    Checkpoint,
    /// A body that is parsed, and generated from if it is honoured.
    Body,
    /// A request to any route of the server.
    Http,
    /// A grammar, and tokens that it allows.
    Grammar,
}

impl Kind {
    pub const ALL: [Self; 10] = [
        Self::Template,
        Self::Tokenizer,
        Self::Config,
        Self::GenerationConfig,
        Self::Gguf,
        Self::Adapter,
        Self::Checkpoint,
        Self::Body,
        Self::Http,
        Self::Grammar,
    ];

    /// Of so many cases in a row.
    const TURNS: [Self; 22] = {
        use Kind::{Adapter, Body, Checkpoint, Config, GenerationConfig, Gguf, Grammar, Http, Template, Tokenizer};
        [
            Template,
            Body,
            Http,
            Tokenizer,
            Config,
            Body,
            Template,
            GenerationConfig,
            Http,
            Body,
            Template,
            Tokenizer,
            Gguf,
            Adapter,
            Checkpoint,
            Grammar,
            Template,
            Config,
            Http,
            Body,
            Tokenizer,
            Grammar,
        ]
    };

    pub fn name(self) -> &'static str {
        match self {
            Self::Template => "template",
            Self::Tokenizer => "tokenizer",
            Self::Config => "config.json",
            Self::GenerationConfig => "generation_config.json",
            Self::Gguf => "gguf",
            Self::Adapter => "adapter",
            Self::Checkpoint => "checkpoint",
            Self::Body => "body",
            Self::Http => "http",
            Self::Grammar => "grammar",
        }
    }

    /// The kind of a case.
    pub fn of(case: u64, only: Option<Self>) -> Self {
        only.unwrap_or(Self::TURNS[(case % Self::TURNS.len() as u64) as usize])
    }
}

/// How a case ended, or what is wrong with how it did.
pub type Outcome = Result<String, String>;

/// What cases need, made once.
pub struct Fuzzer {
    files: Files,
    configs: Configs,
    bodies: Bodies,
    adapters: Adapters,
    checkpoints: Checkpoints,
}

impl Fuzzer {
    pub fn new(is_shown: bool) -> Self {
        let files = Files::new(is_shown);
        let (configs, bodies) = (Configs::new(&files), Bodies::new(&files));
        let (adapters, checkpoints) = (Adapters::new(&files), Checkpoints::new(&files));
        Self { files, configs, bodies, adapters, checkpoints }
    }

    /// Runs a case.
    pub fn run(&mut self, seed: u64, case: u64, only: Option<Kind>) -> (Kind, Outcome) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ case);
        let kind = Kind::of(case, only);
        let outcome = match kind {
            Kind::Template => templates::case(&self.files, &mut rng),
            Kind::Tokenizer => tokenizers::case(&self.files, &mut rng),
            Kind::Config => self.configs.config(&mut rng),
            Kind::GenerationConfig => configs::generation_config(&self.files, &mut rng),
            Kind::Gguf => self.configs.gguf(&mut rng),
            Kind::Adapter => self.adapters.case(&mut rng),
            Kind::Checkpoint => self.checkpoints.case(&mut rng),
            Kind::Body => self.bodies.body(&mut rng),
            Kind::Http => self.bodies.http(&mut rng),
            Kind::Grammar => structured::case(self.bodies.engine(), self.files.is_shown, &mut rng),
        };
        (kind, outcome)
    }
}

/// The name of an error's kind.
pub fn kind_of(error: &EngineError) -> &'static str {
    match error {
        EngineError::Load(_) => "Load",
        EngineError::Architecture(_) => "Architecture",
        EngineError::InvalidArgument(_) => "InvalidArgument",
        EngineError::PromptTooLong { .. } => "PromptTooLong",
        EngineError::NotSupported(_) => "NotSupported",
        EngineError::ChatTemplate(_) => "ChatTemplate",
        EngineError::Tokenizer(_) => "Tokenizer",
        EngineError::Grammar { .. } => "Grammar",
        EngineError::Adapter { .. } => "Adapter",
        EngineError::Device(_) => "Device",
        EngineError::KvCache(_) => "KvCache",
        EngineError::Draining(_) => "Draining",
        EngineError::Address(_) => "Address",
        EngineError::DeviceLost(_) => "DeviceLost",
        EngineError::Internal(_) => "Internal",
    }
}

/// How an engine of a golden model is run.
pub fn small() -> EngineConfig {
    EngineConfig {
        paged_attention: PagedAttentionConfig {
            block_size: Some(8),
            mem_gpu: Some(MemoryGpuConfig::ContextSize(64)),
            ..PagedAttentionConfig::default()
        },
        max_num_seqs: 2,
        max_num_batched_tokens: 64,
        cpu: CpuOptions { num_threads: Some(1), ..CpuOptions::default() },
        ..EngineConfig::default()
    }
}

/// How an answer ended. Sizes of a damaged file may be sound, and its numbers not.
pub fn answered(completion: &Completion) -> Outcome {
    match completion.failure() {
        None => Ok("answered".into()),
        Some(why) if why.to_string().contains("are damaged") => Ok("ended for a logit that is no number".into()),
        Some(why) => Err(format!("a request ended: {why}")),
    }
}

/// An error as an outcome, if it is of a kind that may be and says what it is about.
pub fn refused(error: &EngineError, kinds: &[&str], names: &[&str]) -> Outcome {
    let (kind, text) = (kind_of(error), error.to_string());
    if !kinds.contains(&kind) {
        return Err(format!("a {kind} error: {text}"));
    }
    if !names.is_empty() && !names.iter().any(|name| text.contains(name)) {
        return Err(format!("the error names none of {names:?}: {text}"));
    }
    if text.len() > 4096 {
        return Err(format!("an error of {} bytes: {text}", text.len()));
    }
    Ok(format!("refused ({kind})"))
}
