//! Architectures: each maps its configuration to the one decoder.

mod afmoe;
mod apertus;
mod bamba;
mod bert;
mod cohere;
mod cohere2;
mod dbrx;
mod deepseek;
mod dots1;
mod ernie4_5;
mod exaone;
mod exaone4;
mod falcon;
mod falcon_h1;
mod flint;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma3n;
mod gemma4;
mod glm4;
mod glm4_moe;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod gptj;
mod granite;
mod granite_hybrid;
mod granite_moe;
mod granite_swa;
mod gte;
mod helium;
mod hunyuan;
mod hunyuan_moe;
mod internlm;
mod jamba;
mod kimi_linear;
mod kolibri;
mod laguna;
mod lfm2;
mod lfm2_moe;
mod lfm3;
mod llama;
mod llama4;
mod mamba;
mod mamba1;
mod mamba2;
mod minicpm;
mod minimax_m2;
mod ministral3;
mod mistral;
mod mistral4;
mod mixtral;
mod mllama;
mod modernbert;
mod nanochat;
mod nemotron;
mod nemotron_h;
mod olmo;
mod olmo2;
mod olmo3;
mod olmo_hybrid;
mod olmoe;
mod opt;
mod orion;
mod persimmon;
mod phi2;
mod phi3;
mod phimoe;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
mod seed_oss;
mod smollm3;
mod stablelm;
mod starcoder2;

use super::{
    config::DecoderConfig,
    fields::{GgufFields, HfFields},
};
use crate::{EngineError, weights::Names};

/// An architecture and where its configurations come from.
pub struct Architecture {
    /// HF `model_type`s; the first is its name here.
    pub model_types: &'static [&'static str],
    /// HF class name in `architectures`.
    pub class: &'static str,
    /// `general.architecture` of GGUF files.
    pub gguf: &'static str,
    /// What its Hugging Face checkpoints call otherwise than others.
    pub names: Names,
    /// From config.json.
    pub from_hf: fn(&HfFields<'_>) -> Result<DecoderConfig, EngineError>,
    /// From GGUF metadata.
    pub from_gguf: fn(&GgufFields<'_>) -> Result<DecoderConfig, EngineError>,
}

/// Every architecture that is implemented, by what its layers are like.
pub const GROUPS: [(&str, &[Architecture]); 5] = [
    (
        "dense",
        &[
            llama::ARCHITECTURE,
            mistral::ARCHITECTURE,
            phi3::ARCHITECTURE,
            qwen2::ARCHITECTURE,
            qwen2::VL,
            qwen2::VL_2_5,
            qwen3::ARCHITECTURE,
            qwen3::VL,
            gemma3::ARCHITECTURE,
            gemma3::EMBEDDING,
            gemma::ARCHITECTURE,
            gemma2::ARCHITECTURE,
            gemma3n::ARCHITECTURE,
            gemma4::ARCHITECTURE,
            starcoder2::ARCHITECTURE,
            phi2::ARCHITECTURE,
            stablelm::ARCHITECTURE,
            olmo2::ARCHITECTURE,
            olmo3::ARCHITECTURE,
            smollm3::ARCHITECTURE,
            glm4::ARCHITECTURE,
            glm4::VL,
            glm4::OCR,
            granite::ARCHITECTURE,
            cohere::ARCHITECTURE,
            cohere2::ARCHITECTURE,
            ministral3::ARCHITECTURE,
            hunyuan::ARCHITECTURE,
            mistral::MINISTRAL,
            gemma2::VAULT,
            glm4::FIRST,
            seed_oss::ARCHITECTURE,
            ernie4_5::ARCHITECTURE,
            exaone4::ARCHITECTURE,
            helium::ARCHITECTURE,
            nemotron::ARCHITECTURE,
            nemotron::ARCEE,
            nemotron::JAIS2,
            apertus::ARCHITECTURE,
            granite_swa::ARCHITECTURE,
            granite::HYPERCLOVAX,
            llama::IQUEST_CODER,
            mistral::CWM,
            mllama::ARCHITECTURE,
            olmo::ARCHITECTURE,
            gpt_neox::ARCHITECTURE,
            falcon::ARCHITECTURE,
            gptj::ARCHITECTURE,
            gptj::CODEGEN,
            gpt2::ARCHITECTURE,
            gpt2::NEO,
            gpt2::BIG_CODE,
            opt::ARCHITECTURE,
            opt::BIOGPT,
            persimmon::ARCHITECTURE,
            nanochat::ARCHITECTURE,
            exaone::ARCHITECTURE,
            internlm::SECOND,
            internlm::THIRD,
            minicpm::ARCHITECTURE,
            orion::ARCHITECTURE,
            llama::XVERSE,
        ],
    ),
    (
        "mixtures of experts",
        &[
            mixtral::ARCHITECTURE,
            qwen2_moe::ARCHITECTURE,
            qwen3_moe::ARCHITECTURE,
            qwen3_moe::VL,
            granite_moe::ARCHITECTURE,
            phimoe::ARCHITECTURE,
            glm4_moe::ARCHITECTURE,
            glm4_moe::VL,
            hunyuan_moe::ARCHITECTURE,
            gpt_oss::ARCHITECTURE,
            llama4::ARCHITECTURE,
            ernie4_5::MOE,
            exaone4::MOE,
            granite_swa::MOE,
            dots1::ARCHITECTURE,
            dots1::SOLAR_OPEN,
            dots1::HY_V3,
            olmoe::ARCHITECTURE,
            olmoe::FLEX_OLMO,
            minimax_m2::ARCHITECTURE,
            qwen3_moe::MELLUM,
            flint::ARCHITECTURE,
            dots1::SARVAM,
            dots1::BAILING,
            dots1::BAILING_V2,
            afmoe::ARCHITECTURE,
            dbrx::ARCHITECTURE,
            cohere2::MOE,
            laguna::ARCHITECTURE,
            kolibri::ARCHITECTURE,
        ],
    ),
    (
        "latent attention",
        &[
            deepseek::V2,
            deepseek::V3,
            deepseek::GLM4_MOE_LITE,
            deepseek::YOUTU,
            deepseek::SARVAM_MLA,
            deepseek::AXK1,
            mistral4::ARCHITECTURE,
            minicpm::THIRD,
        ],
    ),
    (
        "recurrent layers",
        &[
            lfm2::ARCHITECTURE,
            lfm2_moe::ARCHITECTURE,
            lfm3::ARCHITECTURE,
            granite_hybrid::ARCHITECTURE,
            bamba::ARCHITECTURE,
            nemotron_h::ARCHITECTURE,
            nemotron_h::MOE,
            falcon_h1::ARCHITECTURE,
            mamba1::ARCHITECTURE,
            mamba1::FALCON,
            mamba2::ARCHITECTURE,
            jamba::ARCHITECTURE,
            qwen3_next::NEXT,
            qwen3_next::QWEN3_5,
            qwen3_next::QWEN3_5_MOE,
            olmo_hybrid::ARCHITECTURE,
            kimi_linear::ARCHITECTURE,
        ],
    ),
    (
        "encoders, which make vectors",
        &[
            bert::ARCHITECTURE,
            bert::ROBERTA,
            bert::XLM_ROBERTA,
            bert::DISTILBERT,
            bert::NOMIC,
            modernbert::ARCHITECTURE,
            modernbert::EUROBERT,
            gte::ARCHITECTURE,
            gte::JINA,
        ],
    ),
];

/// Architectures whose rows of q and k llama.cpp's converter puts in another order, so that they are rotated in neighbouring
/// pairs.
pub(crate) const PERMUTED: [&str; 17] = [
    "llama",
    "mistral",
    "mixtral",
    "ministral3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granite_swa",
    "granitemoe_swa",
    "arcee",
    "olmo",
    "internlm2",
    "internlm3",
    "minicpm",
    "xverse",
    "bailing_moe",
];

/// Of a row of such heads, in which partners are neighbours, the row of the checkpoint, in which they are half a head apart.
pub(crate) const fn unpermuted(head_dim: usize, row: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    head * head_dim + within % 2 * (head_dim / 2) + within / 2
}

/// Every architecture that is implemented.
pub fn architectures() -> impl Iterator<Item = &'static Architecture> {
    GROUPS.iter().flat_map(|(_, group)| group.iter())
}

/// The names of all that are implemented, in groups, and the one that is nearest to a name.
pub fn implemented_beside(name: &str) -> String {
    let names = |group: &[Architecture]| group.iter().map(Architecture::name).collect::<Vec<_>>().join(", ");
    let groups: Vec<_> = GROUPS.iter().map(|(title, group)| format!("{title}: {}", names(group))).collect();
    let nearest = architectures()
        .flat_map(|architecture| architecture.model_types)
        .map(|known| (strsim::jaro_winkler(name, known), *known))
        .filter(|(likeness, _)| *likeness > 0.85)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let nearest = nearest.map_or_else(String::new, |(_, known)| format!("; the nearest is `{known}`"));
    format!("implemented: {}{nearest}", groups.join("; "))
}

/// Of architectures whose GGUF files are not read.
fn no_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let GgufFields { what, prefix, .. } = fields;
    Err(EngineError::Architecture(format!(
        "{what}: GGUF files of `{prefix}` are not implemented; Hugging Face folders of it are"
    )))
}

/// What a file says about its architecture.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// config.json's `model_type` and `architectures`.
    HuggingFace {
        /// `model_type`.
        model_type: Option<&'a str>,
        /// `architectures`.
        classes: &'a [&'a str],
    },
    /// `general.architecture`.
    Gguf(&'a str),
}

impl Architecture {
    /// Its name: HF `model_type`.
    pub const fn name(&self) -> &'static str {
        self.model_types[0]
    }

    fn is(&self, found: Found<'_>) -> bool {
        match found {
            Found::HuggingFace { model_type: Some(model_type), .. } => self.model_types.contains(&model_type),
            Found::HuggingFace { model_type: None, classes } => classes.contains(&self.class),
            Found::Gguf(name) => self.gguf == name,
        }
    }
}

impl std::fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HuggingFace { model_type: Some(name), .. } | Self::Gguf(name) => f.write_str(name),
            Self::HuggingFace { model_type: None, classes: [] } => f.write_str("(no `model_type`)"),
            Self::HuggingFace { model_type: None, classes } => f.write_str(&classes.join(", ")),
        }
    }
}

/// The architecture of a model; an error when it is not implemented or not the one that the caller expects.
pub fn check_architecture(expected: Option<&str>, found: Found<'_>) -> Result<&'static Architecture, EngineError> {
    let mut candidates = architectures().filter(|a| a.is(found));
    let Some(expected) = expected else {
        return candidates.next().ok_or_else(|| {
            let implemented = implemented_beside(&found.to_string());
            EngineError::Architecture(format!("the model's architecture `{found}` is not implemented; {implemented}"))
        });
    };
    let implemented = || implemented_beside(expected);
    if !architectures().any(|a| a.model_types.contains(&expected)) {
        return Err(EngineError::Architecture(format!("the architecture `{expected}` is not implemented; {}", implemented())));
    }
    candidates.find(|a| a.model_types.contains(&expected)).ok_or_else(|| {
        EngineError::Architecture(format!(
            "the model's architecture is `{found}`, which contradicts the expected `{expected}`; {}",
            implemented()
        ))
    })
}
