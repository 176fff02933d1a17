//! The files of a model that are not weights: tokenizer, chat template, sampling defaults.

use std::path::Path;

use serde_json::json;

use super::ModelSource;
use crate::{
    EngineError, GenerationConfig, Message, RenderOptions,
    chat_template::{ChatTemplate, template_in_dir},
    keys,
    media::Encoders,
    model::ModelFiles,
    tokenizer::{Tokenizer, tekken},
    tools::Dialect,
};

/// What turns requests into tokens and back.
pub(super) struct TextFiles {
    pub(super) tokenizer: Tokenizer,
    pub(super) chat_template: Option<ChatTemplate>,
    pub(super) generation_config: GenerationConfig,
}

impl TextFiles {
    /// An explicit template goes before the folder's, which goes before the GGUF file's own.
    pub(super) fn open(source: &ModelSource, files: &ModelFiles, template: Option<&str>) -> Result<Self, EngineError> {
        let (mut tokenizer, dir) = match source {
            // As Meta publishes Llama: with a tokenizer, and without a template.
            ModelSource::HuggingFace { path, tokenizer_json } if files.metadata().is_some() => {
                (gguf_tokenizer(files, None, tokenizer_json.as_deref())?, Some(path.as_path()))
            }
            ModelSource::Ggml { file, tokenizer_dir, tokenizer_json, .. } => {
                let dir = tokenizer_dir.as_deref().or_else(|| file.parent());
                (gguf_tokenizer(files, tokenizer_dir.as_deref(), tokenizer_json.as_deref())?, dir)
            }
            ModelSource::HuggingFace { path, tokenizer_json } => {
                (Tokenizer::from_hf_dir(path, tokenizer_json.as_deref())?, Some(path.as_path()))
            }
            ModelSource::Gguf { files: paths, tokenizer_dir, tokenizer_json } => {
                let dir = tokenizer_dir.as_deref().or_else(|| paths.first().and_then(|p| p.parent()));
                (gguf_tokenizer(files, tokenizer_dir.as_deref(), tokenizer_json.as_deref())?, dir)
            }
        };
        tokenizer.add_eos_ids(files.config().eos_token_ids.iter().copied());
        let generation_config = dir.map(GenerationConfig::from_dir).transpose()?.unwrap_or_default();
        keys::warn_of(&generation_config.unknown_keys, "generation_config.json");
        tokenizer.add_eos_ids(generation_config.eos_token_ids.iter().copied());
        let own = files.media().and_then(Encoders::chat_template);
        // One of texts, for a model that hears, is not what it was trained with.
        let is_usable = |text: &str| own.is_none() || text.contains("audio");
        let is_mistral_s = files.media().is_some_and(Encoders::are_voxtral_s)
            || files.hears() && dir.is_some_and(|dir| dir.join(tekken::FILE).is_file());
        let source_text = match template {
            Some(text) => Some(text.to_owned()),
            None => match dir.map(template_in_dir).transpose()?.flatten().filter(|text| is_usable(text)) {
                Some(text) => Some(text),
                None => match files.metadata().and_then(|m| m.str("tokenizer.chat_template")).filter(|text| is_usable(text)) {
                    Some(text) => Some(text.to_owned()),
                    None if is_mistral_s => tekken::template(&tokenizer).map(str::to_owned),
                    None => own.map(str::to_owned),
                },
            },
        };
        let special = tokenizer.special_tokens().clone();
        let chat_template = source_text.map(|text| ChatTemplate::new(&text, special)).transpose()?;
        if let Some(scores) = files.embedding().filter(|config| config.score.is_some()) {
            scores.check_pairs((chat_template.as_ref(), &tokenizer), files.config())?;
        }
        Ok(Self { tokenizer, chat_template, generation_config })
    }
}

/// How a model writes, by its template: whether that puts the tools that it gets into a prompt, it shows.
pub(super) fn dialect(template: &ChatTemplate, tokenizer: &Tokenizer) -> Dialect {
    let rendered = |extra: serde_json::Map<String, serde_json::Value>| {
        template
            .render(&[Message::user("Hello")], &RenderOptions { extra, now: std::time::UNIX_EPOCH, ..RenderOptions::default() })
    };
    let function =
        json!({ "name": "a_function", "description": "It does.", "parameters": { "type": "object", "properties": {} } });
    let tools = json!([{ "type": "function", "function": function }]);
    let with_tools = rendered([("tools".to_owned(), tools)].into_iter().collect());
    let uses_tools = with_tools.is_ok_and(|text| text.contains("a_function"));
    Dialect::of(template.source(), tokenizer, uses_tools)
}

fn gguf_tokenizer(files: &ModelFiles, dir: Option<&Path>, json: Option<&Path>) -> Result<Tokenizer, EngineError> {
    let metadata = files.metadata().ok_or_else(|| EngineError::Internal("a GGUF file without metadata".into()))?;
    let mut tokenizer = match (dir, json) {
        (Some(dir), json) => Tokenizer::from_hf_dir(dir, json)?,
        (None, Some(json)) => Tokenizer::from_file(json)?,
        (None, None) => return Tokenizer::from_gguf(metadata),
    };
    // A tokenizer.json alone does not say which tokens are special to templates; what a folder says goes first.
    tokenizer.add_gguf_special_tokens(metadata)?;
    Ok(tokenizer)
}
