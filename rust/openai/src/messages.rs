//! Messages of a chat.

use engine::{Message, MessageContent};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::{ApiError, MAX_MESSAGES, ModelContext, media, tools::earlier_calls};

/// What messages are, in JSON Schema.
pub fn schema(_: &mut SchemaGenerator) -> Schema {
    let text = json!({
        "type": "object",
        "properties": { "type": { "enum": ["text", "input_text", "output_text"] }, "text": { "type": "string" } },
        "required": ["type", "text"],
    });
    let url = json!({ "type": "string", "description": "data:image/...;base64, or file: and https: where they are allowed" });
    let detail = json!({ "enum": ["auto", null] });
    let object = json!({
        "type": "object",
        "properties": { "url": url, "detail": detail },
        "required": ["url"],
        "additionalProperties": false,
    });
    let image = json!({
        "type": "object",
        "description": "an image, for a model that sees",
        "properties": {
            "type": { "enum": ["image_url", "input_image"] },
            "image_url": { "anyOf": [object, url] },
            "detail": detail,
        },
        "required": ["type", "image_url"],
    });
    let sound_url =
        json!({ "type": "string", "description": "data:audio/...;base64, or file: and https: where they are allowed" });
    let sound = json!({
        "type": "object",
        "description": "a sound, for a model that hears",
        "properties": {
            "type": { "const": "input_audio" },
            "input_audio": {
                "type": "object",
                "properties": {
                    "data": { "type": "string", "description": "a file as base64" },
                    "format": { "enum": media::FORMATS },
                },
                "required": ["data", "format"],
                "additionalProperties": false,
            },
        },
        "required": ["type", "input_audio"],
    });
    let sound_by_url = json!({
        "type": "object",
        "properties": {
            "type": { "const": "audio_url" },
            "audio_url": { "anyOf": [
                { "type": "object", "properties": { "url": sound_url }, "required": ["url"], "additionalProperties": false },
                sound_url,
            ] },
        },
        "required": ["type", "audio_url"],
    });
    let video_url = json!({
        "type": "string",
        "description": "data:video/...;base64, frames as data:video/jpeg;base64,FRAME,FRAME, or file: and https: where they are allowed",
    });
    let video_object = json!({
        "type": "object",
        "properties": {
            "url": video_url,
            "fps": { "type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1000, "description": "frames a second" },
        },
        "required": ["url"],
        "additionalProperties": false,
    });
    let video = json!({
        "type": "object",
        "description": "a video, for a model that takes them",
        "properties": { "type": { "const": "video_url" }, "video_url": { "anyOf": [video_object, video_url] } },
        "required": ["type", "video_url"],
    });
    let part = json!({ "anyOf": [text, image, sound, sound_by_url, video, { "type": "string" }] });
    let content = json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": part, "minItems": 1 }] });
    // An assistant that only called tools has said nothing.
    let said = json!({ "anyOf": [content, { "type": "null" }] });
    let message = json!({ "anyOf": [
        { "type": "object", "properties": { "role": { "type": "string" }, "content": content }, "required": ["role", "content"] },
        { "type": "object", "properties": { "role": { "const": "assistant" }, "content": said }, "required": ["role"] },
    ] });
    json_schema!({ "type": "array", "items": message, "minItems": 1 })
}

/// The same, or null.
pub fn nullable_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "anyOf": [schema(generator), { "type": "null" }] })
}

/// Checks messages and turns them into the engine's.
pub fn parse(messages: Vec<Value>, context: &ModelContext) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::value(
            "messages",
            "is empty; give at least one message, such as {\"role\": \"user\", \"content\": \"Hello\"}",
        ));
    }
    if messages.len() > MAX_MESSAGES {
        return Err(ApiError::value("messages", format!("has {} messages; {MAX_MESSAGES} at most", messages.len())));
    }
    messages.into_iter().enumerate().map(|(index, message)| parse_one(index, message, context)).collect()
}

fn parse_one(index: usize, message: Value, context: &ModelContext) -> Result<Message, ApiError> {
    let place = format!("messages[{index}]");
    let Value::Object(mut message) = message else { return Err(ApiError::value(place, "must be an object")) };
    message.retain(|_, value| !value.is_null());
    let role = match message.shift_remove("role") {
        Some(Value::String(role)) if role == "developer" && !context.knows_developer => "system".to_owned(),
        Some(Value::String(role)) => role,
        Some(_) => return Err(ApiError::value(format!("{place}.role"), "must be a string")),
        None => {
            return Err(ApiError::missing(&format!("{place}.role"), "it is \"system\", \"user\" or \"assistant\""));
        }
    };
    if message.get("function_call").is_some_and(|value| !crate::sampling::is_empty(value)) {
        return Err(ApiError::unsupported(format!("{place}.function_call"), "use tool_calls"));
    }
    message.shift_remove("function_call");
    match message.shift_remove("tool_calls") {
        Some(calls) if !crate::sampling::is_empty(&calls) => {
            if role != "assistant" {
                return Err(ApiError::value(format!("{place}.tool_calls"), "is an assistant's alone"));
            }
            message.insert("tool_calls".into(), earlier_calls(&format!("{place}.tool_calls"), &calls)?);
        }
        _ => {}
    }
    for key in ["audio", "images"] {
        if message.contains_key(key) {
            return Err(ApiError::unsupported(format!("{place}.{key}"), "this version takes text only"));
        }
    }
    // What an assistant said is sent back as it came.
    for key in ["refusal", "annotations"] {
        message.shift_remove(key);
    }
    let content = match message.shift_remove("content") {
        Some(Value::String(text)) => MessageContent::Text(text),
        Some(Value::Array(parts)) => MessageContent::Parts(check_parts(&place, &parts, context)?),
        Some(_) => return Err(ApiError::value(format!("{place}.content"), "must be a string or a list of parts")),
        None if role == "assistant" => MessageContent::Text(String::new()),
        None => return Err(ApiError::missing(&format!("{place}.content"), "give a string or a list of parts")),
    };
    Ok(Message { role, content, media: Vec::new(), extra: message })
}

fn check_parts(place: &str, parts: &[Value], context: &ModelContext) -> Result<Vec<Value>, ApiError> {
    if parts.is_empty() {
        return Err(ApiError::value(format!("{place}.content"), "is an empty list; give a string or at least one text part"));
    }
    parts.iter().enumerate().map(|(i, part)| check_part(&format!("{place}.content[{i}]"), part, context)).collect()
}

/// A part of text, in the engine's form, or of an image or a sound that is still to be fetched.
fn check_part(place: &str, part: &Value, context: &ModelContext) -> Result<Value, ApiError> {
    let text = |text: &Value| text.as_str().map(|text| json!({ "type": "text", "text": text }));
    if part.is_string() {
        return text(part).ok_or_else(|| ApiError::value(place, "must be an object"));
    }
    match part.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => {
            part.get("text").and_then(text).ok_or_else(|| ApiError::value(format!("{place}.text"), "must be a string"))
        }
        Some("refusal") => {
            part.get("refusal").and_then(text).ok_or_else(|| ApiError::value(format!("{place}.refusal"), "must be a string"))
        }
        Some(kind @ ("image_url" | "input_image")) => media::pending_image(place, part, kind, context),
        Some(kind @ ("audio_url" | "input_audio")) => media::pending_sound(place, part, kind, context),
        Some(kind @ "video_url") => media::pending_video(place, part, kind, context),
        Some(kind @ ("file" | "input_file")) => {
            Err(ApiError::unsupported(format!("{place}.type"), format!("\"{kind}\" is no text, image, sound or video")))
        }
        Some(other) => {
            let shown: String = other.chars().take(32).collect();
            Err(ApiError::value(
                format!("{place}.type"),
                format!("is {shown:?}, which is unknown; give \"text\", \"image_url\", \"input_audio\" or \"video_url\""),
            ))
        }
        None => Err(ApiError::missing(
            &format!("{place}.type"),
            "a part is an object such as {\"type\": \"text\", \"text\": \"...\"}",
        )),
    }
}

/// Variables of a chat template that a client may set; those of the conversation itself it may not.
pub fn check_template_kwargs(kwargs: &Map<String, Value>) -> Result<(), ApiError> {
    const OWN: [&str; 9] = [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "bos_token",
        "eos_token",
        "strftime_now",
    ];
    match OWN.iter().find(|name| kwargs.contains_key(**name)) {
        Some(name) => {
            Err(ApiError::value(format!("chat_template_kwargs.{name}"), "is not a client's to set; use the request's own fields"))
        }
        None => Ok(()),
    }
}
