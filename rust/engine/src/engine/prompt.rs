//! From prompts to token ids, on the caller's thread.

use super::Shared;
use crate::{EngineError, Message, Prompt, chat_template::ChatTemplate, chat_template::RenderOptions};

/// Token ids of a conversation, rendered by the chat template with a generation prompt.
pub fn render_chat(
    shared: &Shared,
    messages: &[Message],
    enable_thinking: Option<bool>,
    reasoning_effort: Option<&str>,
) -> Result<Vec<u32>, EngineError> {
    let text = chat_template(shared)?.render(messages, &render_options(enable_thinking, reasoning_effort))?;
    // The template writes special tokens itself.
    shared.tokenizer.encode(&text, false)
}

fn chat_template(shared: &Shared) -> Result<&ChatTemplate, EngineError> {
    shared.chat_template.as_ref().ok_or_else(|| {
        EngineError::ChatTemplate(
            "the model has no chat template: give one with chat_template or jinja_explicit, or send a completion request".into(),
        )
    })
}

fn render_options(enable_thinking: Option<bool>, reasoning_effort: Option<&str>) -> RenderOptions {
    RenderOptions { enable_thinking, reasoning_effort: reasoning_effort.map(str::to_owned), ..RenderOptions::default() }
}

/// Token ids of a prompt, and its text when it was given as such.
pub fn tokenize(shared: &Shared, prompt: &Prompt) -> Result<(Vec<u32>, Option<String>), EngineError> {
    let (ids, text) = match prompt {
        Prompt::Chat { messages, enable_thinking, reasoning_effort } => {
            (render_chat(shared, messages, *enable_thinking, reasoning_effort.as_deref())?, None)
        }
        Prompt::Text(text) => (shared.tokenizer.encode(text, true)?, Some(text.clone())),
        Prompt::TokenIds(ids) => (ids.clone(), None),
        Prompt::Sequence { sequence, then } => return tokenize(shared, &sequence.prompt(then.clone(), &shared.tokenizer)?),
    };
    if ids.is_empty() {
        return Err(EngineError::InvalidArgument("the prompt is empty: give at least one token".into()));
    }
    // A tokenizer may know more tokens than the model has embeddings.
    let vocab_size = shared.vocab_size;
    if let Some(&bad) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        let token = shared.tokenizer.token_text(bad);
        return Err(EngineError::InvalidArgument(format!(
            "the prompt has token id {bad} ({token:?}), which is outside of the model's vocabulary of {vocab_size}"
        )));
    }
    Ok((ids, text))
}

/// How many tokens of `prompt`, from its beginning, are everybody's: those that its first `public_prefix` messages or tokens
/// decide.
pub fn public_prefix_len(shared: &Shared, prompt: &Prompt, ids: &[u32], public_prefix: usize) -> Result<usize, EngineError> {
    let Prompt::Chat { messages, enable_thinking, reasoning_effort } = prompt else {
        if public_prefix > ids.len() {
            return Err(EngineError::InvalidArgument(format!(
                "public_prefix_len is {public_prefix} and the prompt has {} tokens: give at most as many",
                ids.len()
            )));
        }
        return Ok(public_prefix);
    };
    if public_prefix > messages.len() {
        return Err(EngineError::InvalidArgument(format!(
            "public_messages is {public_prefix} and the chat has {} messages: give at most as many",
            messages.len()
        )));
    }
    if public_prefix == 0 {
        return Ok(0);
    }
    let options = RenderOptions { add_generation_prompt: false, ..render_options(*enable_thinking, reasoning_effort.as_deref()) };
    let text = chat_template(shared)?.render(&messages[..public_prefix], &options).map_err(|error| {
        EngineError::ChatTemplate(format!(
            "the chat template does not render the first {public_prefix} messages alone, which public_messages needs: {error}"
        ))
    })?;
    let public = shared.tokenizer.encode(&text, false)?;
    // Where the rest begins, a token may hold some of both.
    Ok(public.iter().zip(ids).take_while(|(a, b)| a == b).count())
}
