//! Images in messages: what names them, and putting them in its place.
//!
//! [`crate::messages::parse`] leaves a part `{"type": "image_url", "image_url": URL, "param": PLACE}` for each, whichever
//! interface it came by. Whoever may fetch them calls [`place`] before the engine gets the messages.

use std::sync::Arc;

use engine::{Message, MessageContent, images::RgbImage};
use serde_json::{Value, json};

use crate::{ApiError, ModelContext};

/// The part that an image is, in the engine's form.
fn placed() -> Value {
    json!({ "type": "image" })
}

/// A part whose image is still to be fetched; `place` is that of the part.
pub fn pending(place: &str, part: &Value, kind: &str, context: &ModelContext) -> Result<Value, ApiError> {
    if !context.sees {
        let model = &context.model_id;
        let message = format!(
            "`{place}.type` is \"{kind}\", and the model `{model}` takes text only; a model that sees, loaded with `serve multimodal`, \
             takes images"
        );
        return Err(ApiError::invalid("images_not_supported", format!("{place}.type"), message));
    }
    let param = format!("{place}.image_url");
    let given = &part["image_url"];
    let (url, detail) = match given {
        Value::Object(object) => {
            if let Some(key) = object.keys().find(|key| !matches!(key.as_str(), "url" | "detail")) {
                let shown: String = key.chars().take(32).collect();
                return Err(ApiError::value(param, format!("has the unknown key {shown:?}; it has `url`")));
            }
            (&given["url"], &given["detail"])
        }
        _ => (given, &part["detail"]),
    };
    // What a model makes of an image is its own; `max_edge` is the operator's.
    if !(detail.is_null() || detail == "auto") {
        return Err(ApiError::unsupported(format!("{param}.detail"), "leave it out, or send \"auto\""));
    }
    if part.get("file_id").is_some_and(|id| !id.is_null()) {
        return Err(ApiError::unsupported(format!("{place}.file_id"), "this server keeps no files: send a data: URL"));
    }
    match url.as_str() {
        Some(url) => Ok(json!({ "type": "image_url", "image_url": url, "param": param })),
        None => Err(ApiError::missing(&param, "give the URL of an image, such as data:image/png;base64,...")),
    }
}

/// A block of Anthropic's interface in OpenAI's form; others as they are.
pub fn of_block(place: &str, block: Value) -> Result<Value, ApiError> {
    if block["type"] != "image" {
        return Ok(block);
    }
    let source = &block["source"];
    let url = match (source["type"].as_str(), source["media_type"].as_str(), source["data"].as_str(), source["url"].as_str()) {
        (Some("base64"), Some(media_type), Some(data), _) => format!("data:{media_type};base64,{data}"),
        (Some("url"), _, _, Some(url)) => url.to_owned(),
        (Some("file"), ..) => {
            return Err(ApiError::unsupported(format!("{place}.source"), "this server keeps no files: send it as base64"));
        }
        _ => {
            let forms = "must be {\"type\": \"base64\", \"media_type\", \"data\"} or {\"type\": \"url\", \"url\"}";
            return Err(ApiError::value(format!("{place}.source"), forms));
        }
    };
    Ok(json!({ "type": "image_url", "image_url": url }))
}

/// Whether there are images that are still to be fetched.
pub fn are_pending(messages: &[Message]) -> bool {
    messages.iter().any(|message| parts(message).iter().any(|part| part["type"] == "image_url"))
}

fn parts(message: &Message) -> &[Value] {
    if let MessageContent::Parts(parts) = &message.content { parts } else { &[] }
}

/// Puts the images in place, in order; `fetch` has the URL of each.
///
/// # Errors
/// Of `fetch`, with the place in the request.
pub fn place(messages: &mut [Message], mut fetch: impl FnMut(&str) -> Result<Arc<RgbImage>, String>) -> Result<(), ApiError> {
    for message in messages {
        let MessageContent::Parts(parts) = &mut message.content else { continue };
        for part in parts.iter_mut().filter(|part| part["type"] == "image_url") {
            let param = part["param"].as_str().unwrap_or_default();
            let image = fetch(part["image_url"].as_str().unwrap_or_default());
            message.images.push(image.map_err(|why| ApiError::value(param, format!("cannot be read: {why}")))?);
            *part = placed();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::parse;

    fn context(sees: bool) -> ModelContext {
        ModelContext { sees, model_id: "m".into(), ..ModelContext::default() }
    }

    fn message(part: &Value) -> Vec<Value> {
        vec![json!({ "role": "user", "content": [{ "type": "text", "text": "look" }, part] })]
    }

    #[test]
    fn every_form_of_an_image_is_put_in_place() {
        for part in [
            json!({ "type": "image_url", "image_url": { "url": "data:x", "detail": "auto" } }),
            json!({ "type": "image_url", "image_url": "data:x" }),
            json!({ "type": "input_image", "image_url": "data:x", "detail": null, "file_id": null }),
        ] {
            let mut messages = parse(message(&part), &context(true)).unwrap();
            assert!(are_pending(&messages), "{part}");
            let error = place(&mut messages, |_| Err("not there".into())).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages[0].content[1].image_url"));
            let image = Arc::new(RgbImage::new(1, 1, vec![1, 2, 3]).unwrap());
            place(&mut messages, |url| if url == "data:x" { Ok(Arc::clone(&image)) } else { Err(url.into()) }).unwrap();
            assert!(!are_pending(&messages));
            assert_eq!(messages[0].images, [image]);
            assert_eq!(parts(&messages[0])[1], json!({ "type": "image" }));
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_its_place() {
        for (part, param) in [
            (json!({ "type": "image_url" }), "image_url"),
            (json!({ "type": "image_url", "image_url": { "url": 3 } }), "image_url"),
            (json!({ "type": "image_url", "image_url": { "url": "x", "detail": "high" } }), "image_url.detail"),
            (json!({ "type": "image_url", "image_url": { "url": "x", "size": 3 } }), "image_url"),
            (json!({ "type": "input_image", "image_url": "x", "file_id": "f" }), "file_id"),
        ] {
            let error = parse(message(&part), &context(true)).unwrap_err();
            assert_eq!(error.param, Some(format!("messages[0].content[1].{param}")), "{part}");
            let error = parse(message(&part), &context(false)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages[0].content[1].type"));
            assert!(error.message.contains("the model `m` takes text only"), "{}", error.message);
        }
    }

    #[test]
    fn a_block_becomes_a_part() {
        let source = json!({ "type": "base64", "media_type": "image/png", "data": "AAAA" });
        let block = of_block("p", json!({ "type": "image", "source": source })).unwrap();
        assert_eq!(block, json!({ "type": "image_url", "image_url": "data:image/png;base64,AAAA" }));
        let block = of_block("p", json!({ "type": "image", "source": { "type": "url", "url": "https://h/x" } })).unwrap();
        assert_eq!(block["image_url"], "https://h/x");
        for source in [json!({ "type": "file", "file_id": "f" }), json!({ "type": "base64" }), json!(3)] {
            let error = of_block("p", json!({ "type": "image", "source": source })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("p.source"));
        }
    }
}
