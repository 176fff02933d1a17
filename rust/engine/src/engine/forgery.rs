//! Text of messages cannot forge what a chat template writes: a special token in it, such as `<|im_start|>`, stays text.
//!
//! A mark is put inside the text of every special token that a message has, before the template is rendered. What the template
//! wrote itself has none. So the specials of the rendered text are told apart, and what is marked is tokenized as plain text.

use serde_json::Value;

use crate::{EngineError, Message, MessageContent, RenderOptions, Tokenizer};

/// A noncharacter: no text for interchange has it (Unicode 17, section 23.7).
const MARK: char = '\u{FDD0}';

/// Messages and variables with the special tokens in their texts marked; `None` if they have none.
pub fn marked(messages: &[Message], options: &RenderOptions, tokenizer: &Tokenizer) -> Option<(Vec<Message>, RenderOptions)> {
    let (mut messages, mut options) = (messages.to_vec(), options.clone());
    let mut is_marked = false;
    let mut text = |text: &mut String| {
        if let Some(marked) = tokenizer.with_marked_specials(text, MARK) {
            *text = marked;
            is_marked = true;
        }
    };
    for message in &mut messages {
        text(&mut message.role);
        match &mut message.content {
            MessageContent::Text(content) => text(content),
            MessageContent::Parts(parts) => parts.iter_mut().for_each(|part| strings(part, &mut text)),
        }
        message.extra.values_mut().for_each(|value| strings(value, &mut text));
    }
    options.extra.values_mut().for_each(|value| strings(value, &mut text));
    is_marked.then_some((messages, options))
}

/// Every string of a value, but the keys of its objects.
fn strings(value: &mut Value, work: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => work(text),
        Value::Array(values) => values.iter_mut().for_each(|value| strings(value, work)),
        Value::Object(map) => map.values_mut().for_each(|value| strings(value, work)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Token ids of a rendered text, of whose special tokens those without a mark are tokens; and the text without marks.
pub fn encode(rendered: &str, tokenizer: &Tokenizer) -> Result<(Vec<u32>, String), EngineError> {
    let mut ids = Vec::new();
    let mut rest = rendered;
    loop {
        let special = tokenizer.find_special(rest);
        let plain = &rest[..special.as_ref().map_or(rest.len(), |(range, _)| range.start)];
        if !plain.is_empty() {
            ids.extend(tokenizer.encode_plain(&plain.replace(MARK, ""))?);
        }
        let Some((range, id)) = special else { break };
        ids.push(id);
        rest = &rest[range.end..];
    }
    Ok((ids, rendered.replace(MARK, "")))
}
