//! From prompts to token ids, on the caller's thread.

use std::{sync::Arc, time::Duration};

use super::{Shared, forgery};
use crate::{
    EngineError, MediaKind, Message, MessageContent, Prompt,
    chat_template::{ChatTemplate, RenderOptions},
    media::{Encoders, MediaConfig, PromptItem},
    tools::with_tools,
};

/// Stands for an image or a sound in a message whose template knows texts alone; a noncharacter, as that of [`forgery`].
const MEDIA_MARK: char = '\u{FDD1}';

/// The images and sounds of a conversation, ready to be encoded: of each its items, of which a sound may have several.
pub fn media_of(shared: &Shared, messages: &[Message]) -> Result<Vec<Vec<Arc<PromptItem>>>, EngineError> {
    let media: Vec<_> = messages.iter().flat_map(|message| &message.media).collect();
    let Some(first) = media.first() else { return Ok(Vec::new()) };
    let configs = shared.media.as_ref().ok_or_else(|| {
        let (given, verb) = match first.kind() {
            MediaKind::Image => ("images", "sees"),
            MediaKind::Sound => ("sounds", "hears"),
            MediaKind::Video => ("videos", "sees"),
        };
        EngineError::InvalidArgument(format!(
            "this model was loaded for text, and the messages have {given}: load one that {verb} with `Which.MultimodalPlain`, or \
             leave them out"
        ))
    })?;
    let num_rows: usize = media.iter().map(|media| PromptItem::num_rows(configs, media)).sum();
    let max_len = shared.max_model_len;
    if num_rows >= max_len {
        let is_seen = media.iter().any(|media| media.kind() == MediaKind::Video);
        let (given, hint) = if is_seen { ("videos and sounds", " or smaller (max_edge)") } else { ("sounds", "") };
        let message =
            format!("the {given} take {num_rows} tokens, and the model's context has {max_len}: make them shorter{hint}");
        return Err(EngineError::PromptTooLong { prompt_tokens: num_rows, max_tokens: max_len, message });
    }
    // Rotations are made for every position up to the last.
    let last: u64 = media.iter().filter_map(|media| PromptItem::last_time(configs, media)).map(u64::from).sum();
    if last >= max_len as u64 {
        return Err(EngineError::InvalidArgument(format!(
            "the frames of the videos are {last} positions apart, and the model's context has {max_len}: give more frames a second (fps)"
        )));
    }
    let has_images = media.iter().any(|media| media.kind() == MediaKind::Image);
    let mut spent = Duration::ZERO;
    media.into_iter().map(|media| PromptItem::all(configs, media, has_images, &mut spent)).collect()
}

/// Token ids of a conversation, and its text as the chat template renders it, with the places of its images and sounds.
pub fn render_chat(
    shared: &Shared,
    messages: &[Message],
    options: &RenderOptions,
    media: &[Vec<Arc<PromptItem>>],
) -> Result<(Vec<u32>, String), EngineError> {
    let template = chat_template(shared)?;
    let with_tools = shared.dialect.as_ref().and_then(|dialect| with_tools(dialect, messages, options));
    let (messages, options) = with_tools.as_ref().map_or((messages, options), |(messages, options)| (&messages[..], options));
    let marked = forgery::marked(messages, options, &shared.tokenizer);
    let (messages, options) = marked.as_ref().map_or((messages, options), |(messages, options)| (&messages[..], options));
    let rendered = render(template, messages, options);
    let text = match shared.media.as_ref().filter(|_| !media.is_empty()) {
        None => rendered?,
        Some(configs) => {
            // Templates that know texts alone leave them out, or fail.
            let text = match rendered {
                Ok(text) if places(shared, configs, &text).iter().map(|place| place.kind).eq(kinds(media)) => text,
                _ => marked_places(
                    shared,
                    configs,
                    &render(template, &with_marks(messages, configs.behind_image()), options)?,
                    media,
                ),
            };
            expand(shared, configs, &text, media)?
        }
    };
    let text = text + &options.appended;
    if marked.is_some() {
        return forgery::encode(&text, &shared.tokenizer);
    }
    // The template writes special tokens itself.
    Ok((shared.tokenizer.encode(&text, false)?, text))
}

/// The same messages as texts, with a mark in place of each image or sound, and this behind an image.
fn with_marks(messages: &[Message], behind_image: &str) -> Vec<Message> {
    let text = |part: &serde_json::Value| match part["text"].as_str() {
        Some(text) => text.to_owned(),
        None if part["type"] == MediaKind::Sound.part_type() => MEDIA_MARK.into(),
        None => format!("{MEDIA_MARK}{behind_image}"),
    };
    let flat = |message: &Message| match &message.content {
        MessageContent::Parts(parts) if !message.media.is_empty() => {
            Message { content: MessageContent::Text(parts.iter().map(text).collect()), ..message.clone() }
        }
        _ => message.clone(),
    };
    messages.iter().map(flat).collect()
}

/// Which kinds these are.
fn kinds(media: &[Vec<Arc<PromptItem>>]) -> impl Iterator<Item = MediaKind> {
    media.iter().filter_map(|items| items.first()).map(|item| item.kind)
}

/// The place of an image or a sound in a text.
struct Place {
    start: usize,
    len: usize,
    kind: MediaKind,
}

/// The places that a rendered text has for images and sounds, in order.
fn places(shared: &Shared, configs: &Encoders<MediaConfig>, text: &str) -> Vec<Place> {
    let mut places = Vec::new();
    for kind in configs.kinds() {
        let Some(config) = configs.get(kind) else { continue };
        let replaced = config.replaced(&shared.tokenizer, kind);
        places.extend(text.match_indices(&replaced).map(|(start, found)| Place { start, len: found.len(), kind }));
    }
    places.sort_by_key(|place| place.start);
    places
}

/// A text with the places of images and sounds where it has marks, in order.
fn marked_places(shared: &Shared, configs: &Encoders<MediaConfig>, text: &str, media: &[Vec<Arc<PromptItem>>]) -> String {
    let mut replaced = kinds(media).filter_map(|kind| Some(configs.get(kind)?.replaced(&shared.tokenizer, kind)));
    let mut parts = text.split(MEDIA_MARK);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + &replaced.next().unwrap_or_default() + part)
}

/// A rendered text with what images and sounds become in the places that the template has for them.
fn expand(
    shared: &Shared,
    configs: &Encoders<MediaConfig>,
    text: &str,
    media: &[Vec<Arc<PromptItem>>],
) -> Result<String, EngineError> {
    let places = places(shared, configs, text);
    for kind in configs.kinds() {
        let Some(config) = configs.get(kind) else { continue };
        let num_places = places.iter().filter(|place| place.kind == kind).count();
        let num_given = kinds(media).filter(|other| *other == kind).count();
        if num_places != num_given {
            return Err(EngineError::ChatTemplate(format!(
                "the chat template writes {:?} {num_places} times for {num_given} {}: it must once for each",
                config.replaced(&shared.tokenizer, kind),
                kind.plural()
            )));
        }
    }
    if !places.iter().map(|place| place.kind).eq(kinds(media)) {
        return Err(EngineError::ChatTemplate(
            "the chat template writes images, sounds and videos in another order than they have".into(),
        ));
    }
    let (mut expanded, mut rest) = (String::new(), 0);
    for (place, items) in places.into_iter().zip(media) {
        let Some(config) = configs.get(place.kind) else { continue };
        expanded.push_str(&text[rest..place.start]);
        let mut layouts = items.iter().map(|item| &item.layout);
        match (place.kind, layouts.next()) {
            (MediaKind::Video, _) => {
                let taken = config.video.as_ref().map(|video| video.expansion(&shared.tokenizer, items.iter()));
                expanded.push_str(&taken.unwrap_or_default());
            }
            (MediaKind::Image, Some(layout)) => expanded.push_str(&config.expansion(&shared.tokenizer, layout)),
            (_, first) => expanded.push_str(&config.expansion_of_chunks(&shared.tokenizer, first.into_iter().chain(layouts))),
        }
        rest = place.start + place.len;
    }
    expanded.push_str(&text[rest..]);
    Ok(configs.iter().fold(expanded, |text, config| config.joined(text)))
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

/// Token ids of a prompt with these images and sounds, or that goes on from some, and its text when it was given as such.
pub fn tokenize(
    shared: &Shared,
    prompt: &Prompt,
    (media, goes_on_from_media): (&[Vec<Arc<PromptItem>>], bool),
) -> Result<(Vec<u32>, Option<String>), EngineError> {
    let (ids, text) = match prompt {
        Prompt::Chat { messages, options } => (render_chat(shared, messages, options, media)?.0, None),
        Prompt::Text(text) => (shared.tokenizer.encode(text, true)?, Some(text.clone())),
        Prompt::Gap { before, after } => (shared.tokenizer.encode_gap(before, after)?, Some(before.clone())),
        Prompt::TokenIds(ids) | Prompt::TokenPair { ids, .. } => (ids.clone(), None),
        Prompt::Sequence { sequence, then } => {
            let prompt = sequence.prompt(then.clone(), &shared.tokenizer)?;
            return tokenize(shared, &prompt, (media, sequence.has_media()));
        }
    };
    if ids.is_empty() {
        return Err(EngineError::InvalidArgument("the prompt is empty: give at least one token".into()));
    }
    // A tokenizer may know more tokens than the model has embeddings. That of images may stand behind those of answers.
    let vocab_size = shared.vocab_size;
    let of_media = || {
        let configs = shared.media.as_ref().filter(|_| !media.is_empty() || goes_on_from_media);
        configs.into_iter().flat_map(Encoders::token_ids).map(|(_, token_id)| token_id)
    };
    if let Some(&bad) = ids.iter().find(|&&id| id as usize >= vocab_size && !of_media().any(|of_media| of_media == id)) {
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
    (ids, media): (&[u32], &[Vec<Arc<PromptItem>>]),
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
    let num_media = messages.iter().map(|message| message.media.len()).sum::<usize>().min(media.len());
    let (public, _) = render_chat(shared, messages, &options, &media[..num_media]).map_err(|error| {
        EngineError::ChatTemplate(format!(
            "the chat template does not render the first {public_prefix} messages alone, which public_messages needs: {error}"
        ))
    })?;
    // Where the rest begins, a token may hold some of both.
    Ok(public.iter().zip(ids).take_while(|(a, b)| a == b).count())
}
