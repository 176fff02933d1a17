//! A second, smaller model that proposes drafts: opened, and checked to go with the first.

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

/// A head of a model that predicts further tokens (multi-token prediction), which a [`crate::Speculation::by_model`] asks.
#[derive(Clone, Debug, Default)]
pub struct MtpHead {
    /// Where it lies, with all of its model's configuration; unless given, behind the layers of the model itself.
    pub source: Option<ModelSource>,
}

/// Drafts of a head unless it is said how many: it was trained to guess one, and each further one is less often right.
pub const DEFAULT_MTP_DRAFTS: usize = 2;

/// Opens the draft model of a model, or the head that drafts, if it has one.
///
/// # Errors
/// [`EngineError::NotSupported`] for what is not computed with one, and for a draft model that cannot be one;
/// [`EngineError::InvalidArgument`] for one of another vocabulary; those of opening files.
pub(super) fn open(
    (source, config): (&ModelSource, &EngineConfig),
    decoder: &DecoderConfig,
    tokenizer: &Tokenizer,
) -> Result<Option<ModelFiles>, EngineError> {
    let refused = |text: String| Err(EngineError::NotSupported(text));
    if let Some(head) = &config.mtp {
        check_head(config)?;
        return Ok(Some(open_head(head, source, config, decoder)?));
    }
    let Some(draft) = &config.draft else { return Ok(None) };
    if config.media.is_some() {
        return refused("a draft model for a model that sees is not supported: leave which_draft (--draft-model) out".into());
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

/// What a head goes with.
pub(super) fn check_head(config: &EngineConfig) -> Result<(), EngineError> {
    let refused = |text: String| Err(EngineError::NotSupported(text));
    if config.draft.is_some() {
        let text =
            "mtp_model and mtp_n_predict (--mtp) name one who guesses, and which_draft (--draft-model) another: leave one out";
        return Err(EngineError::InvalidArgument(text.into()));
    }
    if config.no_kv_cache {
        let text = "heads that predict further tokens (mtp_model, --mtp) go on from what is kept, and no_kv_cache keeps nothing: \
                    leave one of them out";
        return Err(EngineError::InvalidArgument(text.into()));
    }
    if config.media.is_some() || config.embedding.is_some() {
        return refused("heads that predict further tokens (mtp_model, --mtp) are of models of text: leave them out".into());
    }
    Ok(())
}

/// The files of a head.
pub(super) fn open_head(
    head: &MtpHead,
    source: &ModelSource,
    config: &EngineConfig,
    decoder: &DecoderConfig,
) -> Result<ModelFiles, EngineError> {
    let files = ModelFiles::open(head.source.as_ref().unwrap_or(source), config.architecture.as_deref())?;
    let files = files.with_isq(config.in_situ_quant).into_head()?;
    let (own, num_layers) = (files.config(), decoder.layers.len());
    let sizes = |config: &DecoderConfig| (config.architecture, config.hidden_size, config.vocab_size);
    if sizes(own) == sizes(decoder) && own.head_layer == Some(num_layers) {
        return Ok(files);
    }
    let told = |config: &DecoderConfig| format!("a {} of hidden size {}", config.architecture, config.hidden_size);
    Err(EngineError::InvalidArgument(format!(
        "mtp_model is of another model: its head is layer {} of {} and {} tokens, and the model {}, {} tokens and {num_layers} layers",
        own.head_layer.unwrap_or(0),
        told(own),
        own.vocab_size,
        told(decoder),
        decoder.vocab_size
    )))
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
