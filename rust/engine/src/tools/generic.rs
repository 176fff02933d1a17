//! How tools are put to a model: by its template, or, where that knows nothing of tools, by a text of our own.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{
    Dialect,
    formats::{Body, GENERIC},
};
use crate::{Message, MessageContent, RenderOptions};

const BEFORE: &str = "You can call functions. They are, one a line, as JSON:\n<tools>\n";
const AFTER: &str = "</tools>\nTo call a function, write its name and its arguments like this:\n<tool_call>\n{\"name\": \"function\", \
                     \"arguments\": {\"argument\": \"value\"}}\n</tool_call>\nWhat it gives comes back between <tool_response> and \
                     </tool_response>. Answer in plain text when no function helps.";

/// The conversation, and what the template gets, with the tools of `options` and with earlier calls and their results; `None`
/// where there is nothing of that.
pub(crate) fn with_tools(
    dialect: &Dialect,
    messages: &[Message],
    options: &RenderOptions,
) -> Option<(Vec<Message>, RenderOptions)> {
    let is_offered = options.tools.callable().next().is_some();
    let is_about_tools = |message: &Message| message.role == "tool" || message.extra.contains_key("tool_calls");
    if !is_offered && !messages.iter().any(is_about_tools) {
        return None;
    }
    let (mut messages, mut options) = (messages.to_vec(), options.clone());
    if *dialect.format == GENERIC {
        if is_offered {
            offer(&mut messages, &options);
        }
        messages.iter_mut().for_each(as_text);
        return Some((messages, options));
    }
    if is_offered {
        let definitions = options.tools.tools.iter().map(super::Tool::definition).collect();
        options.extra.insert("tools".into(), Value::Array(definitions));
    }
    if !dialect.format.arguments_as_text {
        messages.iter_mut().for_each(read_arguments);
    }
    if dialect.format.body == Body::Harmony {
        messages.iter_mut().for_each(name_thoughts);
        messages = one_call_each(messages);
    }
    Some((messages, options))
}

/// A system message tells of the tools.
fn offer(messages: &mut Vec<Message>, options: &RenderOptions) {
    let mut text = BEFORE.to_owned();
    for tool in &options.tools.tools {
        let _ = writeln!(text, "{}", tool.definition()["function"]);
    }
    text.push_str(AFTER);
    match messages.first_mut() {
        Some(first) if first.role == "system" => {
            let own = first.text();
            first.content = MessageContent::Text(format!("{own}\n\n{text}"));
        }
        _ => messages.insert(0, Message::new("system", MessageContent::Text(text))),
    }
}

/// Calls and results as the model is told to write and to read them.
fn as_text(message: &mut Message) {
    if let Some(Value::Array(calls)) = message.extra.shift_remove("tool_calls") {
        let mut text = message.text();
        for call in &calls {
            let function = &call["function"];
            let call = json!({ "name": function["name"], "arguments": parsed(&function["arguments"]) });
            if !text.is_empty() {
                text.push('\n');
            }
            let _ = write!(text, "{}{call}{}", GENERIC.open, GENERIC.close);
        }
        message.content = MessageContent::Text(text);
    }
    if message.role == "tool" {
        message.role = "user".into();
        message.content = MessageContent::Text(format!("<tool_response>\n{}\n</tool_response>", message.text()));
        message.extra.clear();
    }
}

/// Arguments as an object: a client sends them as its text.
fn parsed(arguments: &Value) -> Value {
    let text = arguments.as_str().map(|text| if text.trim().is_empty() { "{}" } else { text });
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_else(|| arguments.clone())
}

fn read_arguments(message: &mut Message) {
    let calls = message.extra.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
    for call in calls {
        if let Some(arguments) = call.pointer_mut("/function/arguments") {
            *arguments = parsed(arguments);
        }
    }
}

/// What was thought before a call stands where harmony's template looks for it, which takes it or a text.
fn name_thoughts(message: &mut Message) {
    if !message.extra.contains_key("tool_calls") || !message.text().is_empty() || message.extra.contains_key("thinking") {
        return;
    }
    let thoughts = ["reasoning_content", "reasoning"].iter().find_map(|key| message.extra.get(*key)).cloned();
    if let Some(thoughts) = thoughts.filter(Value::is_string) {
        message.extra.insert("thinking".into(), thoughts);
    }
}

/// Each call as a message with its results behind it: harmony's template writes the first call of a message only.
fn one_call_each(messages: Vec<Message>) -> Vec<Message> {
    let mut all = Vec::new();
    let mut rest = messages.into_iter().peekable();
    while let Some(mut message) = rest.next() {
        let calls = match message.extra.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) if calls.len() > 1 => std::mem::take(calls),
            _ => {
                all.push(message);
                continue;
            }
        };
        let mut results: Vec<Message> = std::iter::from_fn(|| rest.next_if(|next| next.role == "tool")).collect();
        for call in calls {
            let id = call["id"].clone();
            message.extra.insert("tool_calls".into(), json!([call]));
            all.push(message.clone());
            let is_its = |result: &mut Message| result.extra.get("tool_call_id") == Some(&id);
            all.extend(results.extract_if(.., is_its));
            // What was said and thought stands before the first.
            message.content = MessageContent::Text(String::new());
            message.extra.shift_remove("thinking");
        }
        all.extend(results);
    }
    all
}
