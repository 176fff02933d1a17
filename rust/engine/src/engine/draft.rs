//! A second, smaller model that proposes drafts: opened, and checked to go with the first.

use device::Backend;

use super::{EngineConfig, ModelSource, plan::PlannedDraft, text_files::TextFiles};
use crate::{
    EngineError, Isq,
    model::{DecoderConfig, ModelFiles},
    tokenizer::Tokenizer,
};

/// A draft model, which a [`crate::Speculation::by_model`] asks.
#[derive(Clone, Debug)]
pub struct DraftModel {
    /// Where it lies.
    pub source: ModelSource,
    /// Architecture by HF `model_type` that the caller expects.
    pub architecture: Option<String>,
    /// What its float weights are quantized to.
    pub in_situ_quant: Option<Isq>,
}

/// Opens the draft model of a model, if it has one.
///
/// # Errors
/// [`EngineError::NotSupported`] for what is not computed with one, and for a draft model that cannot be one;
/// [`EngineError::InvalidArgument`] for one of another vocabulary; those of opening files.
pub(super) fn open(
    config: &EngineConfig,
    decoder: &DecoderConfig,
    tokenizer: &Tokenizer,
    backend: &dyn Backend,
) -> Result<Option<ModelFiles>, EngineError> {
    let Some(draft) = &config.draft else { return Ok(None) };
    let refused = |text: String| Err(EngineError::NotSupported(text));
    if config.vision.is_some() {
        return refused("a draft model for a model that sees is not supported: leave which_draft (--draft-model) out".into());
    }
    if !backend.memory()?.is_host {
        let device = backend.info().device;
        return refused(format!("a draft model on {device} is not supported yet: use device=\"cpu\""));
    }
    let files = ModelFiles::open(&draft.source, draft.architecture.as_deref())?.with_isq(draft.in_situ_quant);
    files.check_isq()?;
    let own = files.config();
    if own.is_recurrent() || own.sees_ahead() {
        let name = own.architecture;
        return refused(format!(
            "{name} as a draft model is not supported: its layers keep more than the keys and values of a pool"
        ));
    }
    let text = TextFiles::open(&draft.source, &files, None)?;
    check_vocabulary((decoder, tokenizer), (own, &text.tokenizer))?;
    Ok(Some(files))
}

/// Drafts are ids, so these must mean the same.
fn check_vocabulary(
    (decoder, tokenizer): (&DecoderConfig, &Tokenizer),
    (draft, drafting): (&DecoderConfig, &Tokenizer),
) -> Result<(), EngineError> {
    let common = tokenizer.vocab_size().min(drafting.vocab_size()).min(decoder.vocab_size).min(draft.vocab_size);
    let differs = |id: &u32| tokenizer.token_bytes(*id) != drafting.token_bytes(*id);
    let most = tokenizer.vocab_size().max(drafting.vocab_size());
    // What a few have that others have not are special tokens.
    if most - common <= most / 8
        && let None = (0..common as u32).find(differs)
    {
        return Ok(());
    }
    let what = (0..common as u32).find(differs).map_or_else(
        || format!("{} tokens, and the model {}", drafting.vocab_size(), tokenizer.vocab_size()),
        |id| format!("{:?} as token {id}, and the model {:?}", drafting.token_text(id), tokenizer.token_text(id)),
    );
    Err(EngineError::InvalidArgument(format!(
        "which_draft (--draft-model) has {what}: a draft model must have the vocabulary of its model"
    )))
}

/// What it adds to a plan.
pub(super) fn planned(files: &ModelFiles) -> PlannedDraft<'_> {
    PlannedDraft { config: files.config(), weights: Some(files.weights()), isq: files.isq() }
}
