//! From prompts to token ids, on the caller's thread.

use std::sync::Arc;

use super::{Shared, forgery};
use crate::{
    EngineError, Message, MessageContent, Prompt,
    chat_template::{ChatTemplate, RenderOptions},
    tools::with_tools,
    vision::{PromptImage, VisionConfig},
};

/// Stands for an image in a message whose template knows texts alone; a noncharacter, as that of [`forgery`].
const IMAGE_MARK: char = '\u{FDD1}';

/// The images of a conversation, ready to be encoded.
pub fn images_of(shared: &Shared, messages: &[Message]) -> Result<Vec<Arc<PromptImage>>, EngineError> {
    let images: Vec<_> = messages.iter().flat_map(|message| &message.images).collect();
    if images.is_empty() {
        return Ok(Vec::new());
    }
    let vision = shared.vision.as_ref().ok_or_else(|| {
        EngineError::InvalidArgument(
            "this model was loaded for text, and the messages have images: load one that sees with `Which.MultimodalPlain`, or leave \
             them out"
                .into(),
        )
    })?;
    images.into_iter().map(|image| PromptImage::new(vision, image)).collect()
}

/// Token ids of a conversation, and its text as the chat template renders it, with the places of its images.
pub fn render_chat(
    shared: &Shared,
    messages: &[Message],
    options: &RenderOptions,
    images: &[Arc<PromptImage>],
) -> Result<(Vec<u32>, String), EngineError> {
    let template = chat_template(shared)?;
    let with_tools = shared.dialect.as_ref().and_then(|dialect| with_tools(dialect, messages, options));
    let (messages, options) = with_tools.as_ref().map_or((messages, options), |(messages, options)| (&messages[..], options));
    let marked = forgery::marked(messages, options, &shared.tokenizer);
    let (messages, options) = marked.as_ref().map_or((messages, options), |(messages, options)| (&messages[..], options));
    let rendered = render(template, messages, options);
    let text = match shared.vision.as_ref().filter(|_| !images.is_empty()) {
        None => rendered?,
        Some(vision) => {
            let replaced = vision.replaced(&shared.tokenizer);
            // Templates that know texts alone leave images out, or fail.
            let text = match rendered {
                Ok(text) if text.matches(&replaced).count() == images.len() => text,
                _ => render(template, &with_marks(messages), options)?.replace(IMAGE_MARK, &replaced),
            };
            expand(shared, vision, &text, images)?
        }
    };
    if marked.is_some() {
        return forgery::encode(&text, &shared.tokenizer);
    }
    // The template writes special tokens itself.
    Ok((shared.tokenizer.encode(&text, false)?, text))
}

/// The same messages as texts, with a mark in place of each image and a line break behind it.
fn with_marks(messages: &[Message]) -> Vec<Message> {
    let text = |part: &serde_json::Value| match part["text"].as_str() {
        Some(text) => text.to_owned(),
        None => format!("{IMAGE_MARK}\n"),
    };
    let flat = |message: &Message| match &message.content {
        MessageContent::Parts(parts) if !message.images.is_empty() => {
            Message { content: MessageContent::Text(parts.iter().map(text).collect()), ..message.clone() }
        }
        _ => message.clone(),
    };
    messages.iter().map(flat).collect()
}

/// A rendered text with what images become in the places that the template has for them.
fn expand(shared: &Shared, vision: &VisionConfig, text: &str, images: &[Arc<PromptImage>]) -> Result<String, EngineError> {
    let replaced = vision.replaced(&shared.tokenizer);
    let places: Vec<_> = text.match_indices(&replaced).map(|(at, _)| at).collect();
    if places.len() != images.len() {
        return Err(EngineError::ChatTemplate(format!(
            "the chat template writes {replaced:?} {} times for {} images: it must once for each",
            places.len(),
            images.len()
        )));
    }
    let (mut expanded, mut rest) = (String::new(), 0);
    for (place, image) in places.into_iter().zip(images) {
        expanded.push_str(&text[rest..place]);
        expanded.push_str(&vision.expansion(&shared.tokenizer, &image.layout));
        rest = place + replaced.len();
    }
    expanded.push_str(&text[rest..]);
    Ok(vision.joined(expanded))
}

/// As `options` says, up to the end of the last message's text at most.
fn render(template: &ChatTemplate, messages: &[Message], options: &RenderOptions) -> Result<String, EngineError> {
    if !options.continue_final_message {
        return template.render(messages, options);
    }
    if options.add_generation_prompt {
        return Err(EngineError::InvalidArgument(
            "continue_final_message goes on from the last message, and add_generation_prompt begins another: give one of them"
                .into(),
        ));
    }
    let last = messages.last().map(Message::text).unwrap_or_default();
    let last = last.trim();
    let mut text = template.render(messages, options)?;
    // A template may trim what it writes.
    match text.rfind(last).filter(|_| !last.is_empty()) {
        Some(start) => text.truncate(start + last.len()),
        None => {
            return Err(EngineError::ChatTemplate(
                "continue_final_message needs a last message whose text the chat template writes as it is".into(),
            ));
        }
    }
    Ok(text)
}

fn chat_template(shared: &Shared) -> Result<&ChatTemplate, EngineError> {
    shared.chat_template.as_ref().ok_or_else(|| {
        EngineError::ChatTemplate(
            "the model has no chat template: give one with chat_template or jinja_explicit, or send a completion request".into(),
        )
    })
}

/// Token ids of a prompt with these images, and its text when it was given as such.
pub fn tokenize(
    shared: &Shared,
    prompt: &Prompt,
    images: &[Arc<PromptImage>],
) -> Result<(Vec<u32>, Option<String>), EngineError> {
    let (ids, text) = match prompt {
        Prompt::Chat { messages, options } => (render_chat(shared, messages, options, images)?.0, None),
        Prompt::Text(text) => (shared.tokenizer.encode(text, true)?, Some(text.clone())),
        Prompt::Gap { before, after } => (shared.tokenizer.encode_gap(before, after)?, Some(before.clone())),
        Prompt::TokenIds(ids) => (ids.clone(), None),
        Prompt::Sequence { sequence, then } => {
            return tokenize(shared, &sequence.prompt(then.clone(), &shared.tokenizer)?, images);
        }
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
pub fn public_prefix_len(
    shared: &Shared,
    prompt: &Prompt,
    (ids, images): (&[u32], &[Arc<PromptImage>]),
    public_prefix: usize,
) -> Result<usize, EngineError> {
    let Prompt::Chat { messages, options } = prompt else {
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
    let options = RenderOptions { add_generation_prompt: false, continue_final_message: false, ..options.clone() };
    let messages = &messages[..public_prefix];
    let num_images = messages.iter().map(|message| message.images.len()).sum::<usize>().min(images.len());
    let (public, _) = render_chat(shared, messages, &options, &images[..num_images]).map_err(|error| {
        EngineError::ChatTemplate(format!(
            "the chat template does not render the first {public_prefix} messages alone, which public_messages needs: {error}"
        ))
    })?;
    // Where the rest begins, a token may hold some of both.
    Ok(public.iter().zip(ids).take_while(|(a, b)| a == b).count())
}
