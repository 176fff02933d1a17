//! Messages of a chat, from Python dicts.

use std::sync::Arc;

use engine::{Message, MessageContent};
use pyo3::{
    exceptions::{PyRecursionError, PyTypeError},
    prelude::*,
    types::{IntoPyDict, PyString},
};
use serde_json::{Map, Value, json};
use server::media::Media;

use crate::{
    arguments::{Text, named},
    enums::ToolChoice,
    exceptions::invalid,
    images, media,
};

/// A list of dicts, or a text that is one user turn. Nothing is fetched from elsewhere.
pub fn parse(messages: &Bound<'_, PyAny>) -> PyResult<Vec<Message>> {
    parse_with(messages, &images::media(None)?)
}

/// The same, with images, sounds and videos that may be fetched.
pub fn parse_with(messages: &Bound<'_, PyAny>, fetcher: &Arc<Media>) -> PyResult<Vec<Message>> {
    if messages.is_instance_of::<PyString>() {
        let Text(text) = named("messages", messages)?;
        return Ok(vec![Message {
            role: "user".into(),
            content: MessageContent::Text(text),
            media: Vec::new(),
            extra: Map::new(),
        }]);
    }
    let taken = media::take(messages, fetcher)?;
    let (messages, mut media) = match &taken {
        Some((messages, media)) => (messages, media.clone().into_iter()),
        None => (messages, Vec::new().into_iter()),
    };
    let Value::Array(messages) = to_json("messages", messages)? else {
        return Err(PyTypeError::new_err("`messages` must be a str or a list of dicts"));
    };
    if messages.is_empty() {
        return Err(invalid(
            "`messages` is empty; give at least one message, such as {\"role\": \"user\", \"content\": \"Hello\"}",
        ));
    }
    let message = |(index, message)| -> PyResult<Message> {
        let media = media.next().unwrap_or_default();
        Ok(Message { media, ..parse_one(index, message)? })
    };
    messages.into_iter().enumerate().map(message).collect()
}

/// The argument `tool_schemas`: texts or dicts, each of a function in OpenAI's form, with or without `type` and `function`
/// around.
pub fn tools(schemas: &Bound<'_, PyAny>) -> PyResult<Vec<Value>> {
    let Value::Array(schemas) = to_json("tool_schemas", schemas)? else {
        return Err(PyTypeError::new_err("`tool_schemas` must be a list of JSON texts or dicts"));
    };
    let tool = |(index, schema): (usize, Value)| {
        let schema: Value = match schema {
            Value::String(text) => {
                serde_json::from_str(&text).map_err(|error| invalid(format!("`tool_schemas[{index}]` is not JSON: {error}")))?
            }
            schema => schema,
        };
        let is_bare = schema.get("function").is_none() && schema.get("name").is_some();
        Ok(if is_bare { json!({ "type": "function", "function": schema }) } else { schema })
    };
    schemas.into_iter().enumerate().map(tool).collect()
}

/// The argument `tool_choice`: of the enum, or as OpenAI's interface has it.
pub fn tool_choice(choice: &Bound<'_, PyAny>) -> PyResult<Value> {
    match choice.extract::<ToolChoice>() {
        Ok(ToolChoice::NoTools) => Ok("none".into()),
        Ok(ToolChoice::Auto) => Ok("auto".into()),
        Err(_) => to_json("tool_choice", choice),
    }
}

/// The argument `grammar`: a text, or what JSON can write.
pub fn to_json_named(grammar: &Bound<'_, PyAny>) -> PyResult<Value> {
    to_json("grammar", grammar)
}

/// Through Python's own json, which knows every kind of number, string and mapping.
fn to_json(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Value> {
    let options = [("ensure_ascii", false)].into_py_dict(object.py())?;
    let written = object.py().import("json")?.call_method("dumps", (object,), Some(&options)).map_err(|error| {
        // What json does not know, it does not say where; an error of the object's own is left alone.
        let is_about_json =
            error.is_instance_of::<PyTypeError>(object.py()) || error.is_instance_of::<PyRecursionError>(object.py());
        if is_about_json { PyTypeError::new_err(format!("`{name}`: {}", error.value(object.py()))) } else { error }
    })?;
    let Text(text) = named(name, &written)?;
    serde_json::from_str(&text).map_err(|error| invalid(format!("`{name}` is not JSON: {error}")))
}

/// The messages as a list of dicts.
pub fn to_python<'py>(py: Python<'py>, messages: &[Message]) -> PyResult<Bound<'py, PyAny>> {
    let dict = |message: &Message| {
        let content = match &message.content {
            MessageContent::Text(text) => Value::from(text.as_str()),
            MessageContent::Parts(parts) => Value::from(parts.as_slice()),
        };
        let mut dict = Map::from_iter([("role".to_owned(), message.role.as_str().into()), ("content".to_owned(), content)]);
        dict.extend(message.extra.clone());
        Value::Object(dict)
    };
    let dicts: Value = messages.iter().map(dict).collect();
    let dicts = py.import("json")?.call_method1("loads", (dicts.to_string(),))?;
    for (i, message) in messages.iter().enumerate().filter(|(_, message)| !message.media.is_empty()) {
        media::put_back(&dicts.get_item(i)?, &message.media)?;
    }
    Ok(dicts)
}

fn parse_one(index: usize, message: Value) -> PyResult<Message> {
    let Value::Object(mut message) = message else {
        return Err(invalid(format!("`messages[{index}]` must be a dict, got {message}")));
    };
    if message.get("tool_calls").is_some_and(|calls| !calls.is_null()) {
        message.retain(|_, value| !value.is_null());
    }
    let role = match message.shift_remove("role") {
        Some(Value::String(role)) => role,
        Some(other) => return Err(invalid(format!("`messages[{index}]['role']` must be a str, got {other}"))),
        None => return Err(invalid(format!("`messages[{index}]` has no 'role'; give 'system', 'user' or 'assistant'"))),
    };
    let content = match message.shift_remove("content") {
        Some(Value::String(text)) => MessageContent::Text(text),
        Some(Value::Array(parts)) => MessageContent::Parts(check_parts(index, parts)?),
        Some(other) => {
            return Err(invalid(format!("`messages[{index}]['content']` must be a str or a list of parts, got {other}")));
        }
        None if message.contains_key("tool_calls") => MessageContent::Text(String::new()),
        None => return Err(invalid(format!("`messages[{index}]` has no 'content'; give a str"))),
    };
    if let Some(calls) = message.get_mut("tool_calls") {
        let place = format!("messages[{index}].tool_calls");
        *calls = openai::tools::earlier_calls(&place, calls).map_err(|error| invalid(error.message))?;
    }
    Ok(Message { role, content, media: Vec::new(), extra: message })
}

fn check_parts(index: usize, parts: Vec<Value>) -> PyResult<Vec<Value>> {
    if parts.is_empty() {
        return Err(invalid(format!("`messages[{index}]['content']` is an empty list; give a str or at least one text part")));
    }
    for (number, part) in parts.iter().enumerate() {
        let place = format!("`messages[{index}]['content'][{number}]`");
        match part.get("type").and_then(Value::as_str) {
            Some("text") if part.get("text").is_some_and(Value::is_string) => {}
            Some("text") => return Err(invalid(format!("{place} has no 'text' of type str"))),
            // What it had was taken out of it.
            Some("image" | "audio" | "video") => {}
            Some(other) => {
                return Err(invalid(format!("{place} has the unknown type '{other}'; give 'text', 'image', 'audio' or 'video'")));
            }
            None => return Err(invalid(format!("{place} must be a dict with a 'type', such as 'text', got {part}"))),
        }
    }
    Ok(parts)
}
