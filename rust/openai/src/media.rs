//! Images, sounds and videos in messages: what names them, and putting them in its place.
//!
//! [`crate::messages::parse`] leaves a part `{"type": "image_url", "image_url": URL, "param": PLACE}` for each image, whichever
//! interface it came by, `{"type": "audio_url", "audio_url": URL, "param": PLACE}` for each sound, and the same of `video_url`
//! for each video. Whoever may fetch them calls [`place`] before the engine gets the messages.

use engine::{Media, MediaKind, Message, MessageContent};
use serde_json::{Value, json};

use crate::{ApiError, ModelContext};

/// Formats that `input_audio` may name. The file itself says which it is.
pub const FORMATS: [&str; 4] = ["wav", "mp3", "flac", "ogg"];

/// The key of a part's URL, which is its type as well.
fn url_key(kind: MediaKind) -> &'static str {
    match kind {
        MediaKind::Image => "image_url",
        MediaKind::Sound => "audio_url",
        MediaKind::Video => "video_url",
    }
}

/// Which kind a part still is to be fetched as.
fn pending_kind(part: &Value) -> Option<MediaKind> {
    MediaKind::ALL.into_iter().find(|kind| part["type"] == url_key(*kind))
}

/// Refuses what the model does not take.
fn check_taken(place: &str, part_type: &str, kind: MediaKind, context: &ModelContext) -> Result<(), ApiError> {
    if context.media.contains(&kind) {
        return Ok(());
    }
    let (name, given, verb) = match kind {
        MediaKind::Image => ("images_not_supported", "images", "sees"),
        MediaKind::Sound => ("audio_not_supported", "sounds", "hears"),
        MediaKind::Video => ("video_not_supported", "videos", "sees them"),
    };
    // It does not take the one that is given.
    let takes = match context.media[..] {
        [] => "text only",
        [MediaKind::Image, MediaKind::Sound, ..] => "text, images and sounds",
        [MediaKind::Image, MediaKind::Video, ..] => "text, images and videos",
        [MediaKind::Image, ..] => "text and images",
        [MediaKind::Sound, ..] => "text and sounds",
        [MediaKind::Video, ..] => "text and videos",
    };
    let message = format!(
        "`{place}.type` is \"{part_type}\", and the model `{}` takes {takes}; a model that {verb}, loaded with `serve multimodal`, \
         takes {given}",
        context.model_id
    );
    Err(ApiError::invalid(name, format!("{place}.type"), message))
}

/// The URL of a part, and the key beside it in the same object; `known`: the keys that such an object has.
fn url_of<'a>(param: &str, given: &'a Value, known: &[&str]) -> Result<&'a Value, ApiError> {
    let Value::Object(object) = given else { return Ok(given) };
    if let Some(key) = object.keys().find(|key| !known.contains(&&key[..])) {
        let shown: String = key.chars().take(32).collect();
        return Err(ApiError::value(param, format!("has the unknown key {shown:?}; it has `url`")));
    }
    Ok(&given["url"])
}

/// A part whose image is still to be fetched; `place` is that of the part.
pub fn pending_image(place: &str, part: &Value, kind: &str, context: &ModelContext) -> Result<Value, ApiError> {
    check_taken(place, kind, MediaKind::Image, context)?;
    let param = format!("{place}.image_url");
    let given = &part["image_url"];
    let url = url_of(&param, given, &["url", "detail"])?;
    let detail = if given.is_object() { &given["detail"] } else { &part["detail"] };
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

/// A part whose sound is still to be fetched; `place` is that of the part.
pub fn pending_sound(place: &str, part: &Value, kind: &str, context: &ModelContext) -> Result<Value, ApiError> {
    check_taken(place, kind, MediaKind::Sound, context)?;
    let param = format!("{place}.{kind}");
    if kind == "audio_url" {
        return match url_of(&param, &part[kind], &["url"])?.as_str() {
            Some(url) => Ok(json!({ "type": "audio_url", "audio_url": url, "param": param })),
            None => Err(ApiError::missing(&param, "give the URL of a sound, such as data:audio/wav;base64,...")),
        };
    }
    let given = &part[kind];
    if let Some(key) = given.as_object().and_then(|object| object.keys().find(|key| !matches!(&key[..], "data" | "format"))) {
        let shown: String = key.chars().take(32).collect();
        return Err(ApiError::value(param, format!("has the unknown key {shown:?}; it has `data` and `format`")));
    }
    match given["format"].as_str() {
        Some(format) if FORMATS.contains(&format) => {}
        _ => return Err(ApiError::value(format!("{param}.format"), format!("must be one of {}", FORMATS.join(", ")))),
    }
    match given["data"].as_str() {
        Some(data) => Ok(json!({ "type": "audio_url", "audio_url": format!("data:audio/wav;base64,{data}"), "param": param })),
        None => Err(ApiError::missing(&format!("{param}.data"), "give the bytes of a file as base64")),
    }
}

/// A part whose video is still to be fetched; `place` is that of the part.
pub fn pending_video(place: &str, part: &Value, kind: &str, context: &ModelContext) -> Result<Value, ApiError> {
    check_taken(place, kind, MediaKind::Video, context)?;
    let param = format!("{place}.video_url");
    let given = &part["video_url"];
    let Some(url) = url_of(&param, given, &["url", "fps"])?.as_str() else {
        return Err(ApiError::missing(&param, "give the URL of a video, such as data:video/mp4;base64,..."));
    };
    if !part["fps"].is_null() {
        return Err(ApiError::value(format!("{place}.fps"), "belongs into `video_url`, beside the `url`"));
    }
    let fps = given.get("fps").filter(|fps| !fps.is_null());
    if let Some(fps) = fps.filter(|fps| !fps.as_f64().is_some_and(|fps| fps > 0.0 && fps <= 1000.0)) {
        return Err(ApiError::value(format!("{param}.fps"), format!("is {fps}; it must be a number over 0 and not over 1000")));
    }
    Ok(json!({ "type": "video_url", "video_url": url, "fps": fps, "param": param }))
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

/// Whether there are images, sounds or videos that are still to be fetched.
pub fn are_pending(messages: &[Message]) -> bool {
    messages.iter().any(|message| parts(message).iter().any(|part| pending_kind(part).is_some()))
}

fn parts(message: &Message) -> &[Value] {
    if let MessageContent::Parts(parts) = &message.content { parts } else { &[] }
}

/// What a part names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Named<'a> {
    /// What lies there.
    pub kind: MediaKind,
    /// Where it lies.
    pub url: &'a str,
    /// Of a video, frames a second.
    pub fps: Option<f64>,
}

/// Puts images, sounds and videos in place, in order.
///
/// # Errors
/// Of `fetch`, with the place in the request.
pub fn place(messages: &mut [Message], mut fetch: impl FnMut(Named<'_>) -> Result<Media, String>) -> Result<(), ApiError> {
    for message in messages {
        let MessageContent::Parts(parts) = &mut message.content else { continue };
        for part in parts {
            let Some(kind) = pending_kind(part) else { continue };
            let param = part["param"].as_str().unwrap_or_default();
            let url = part[url_key(kind)].as_str().unwrap_or_default();
            let media = fetch(Named { kind, url, fps: part["fps"].as_f64() });
            message.media.push(media.map_err(|why| ApiError::value(param, format!("cannot be read: {why}")))?);
            *part = json!({ "type": kind.part_type() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use engine::{audio::Sound, images::RgbImage, video::Video};

    use super::*;
    use crate::messages::parse;

    fn context(sees: bool) -> ModelContext {
        ModelContext {
            media: if sees { vec![MediaKind::Image] } else { Vec::new() },
            model_id: "m".into(),
            ..ModelContext::default()
        }
    }

    fn hears() -> ModelContext {
        ModelContext { media: vec![MediaKind::Sound], model_id: "m".into(), ..ModelContext::default() }
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
            let image = Media::Image(Arc::new(RgbImage::new(1, 1, vec![1, 2, 3]).unwrap()));
            place(&mut messages, |named| if named.url == "data:x" { Ok(image.clone()) } else { Err(named.url.into()) }).unwrap();
            assert!(!are_pending(&messages));
            assert_eq!(messages[0].media, [image]);
            assert_eq!(parts(&messages[0])[1], json!({ "type": "image" }));
        }
    }

    #[test]
    fn every_form_of_a_sound_is_put_in_place() {
        for (part, key, url) in [
            (json!({ "type": "audio_url", "audio_url": { "url": "file:///x" } }), "audio_url", "file:///x"),
            (json!({ "type": "audio_url", "audio_url": "file:///x" }), "audio_url", "file:///x"),
            (
                json!({ "type": "input_audio", "input_audio": { "data": "AAAA", "format": "mp3" } }),
                "input_audio",
                "data:audio/wav;base64,AAAA",
            ),
        ] {
            let mut messages = parse(message(&part), &hears()).unwrap();
            assert!(are_pending(&messages), "{part}");
            let error = place(&mut messages, |_| Err("not there".into())).unwrap_err();
            assert_eq!(error.param, Some(format!("messages[0].content[1].{key}")));
            let sound = Media::Sound(Arc::new(Sound::new(8000, vec![0.5]).unwrap()));
            let fetch = |named: Named<'_>| {
                assert_eq!(named, Named { kind: MediaKind::Sound, url, fps: None });
                Ok(sound.clone())
            };
            place(&mut messages, fetch).unwrap();
            assert_eq!(messages[0].media, [sound]);
            assert_eq!(parts(&messages[0])[1], json!({ "type": "audio" }));
        }
        for (part, param) in [
            (json!({ "type": "audio_url" }), "audio_url"),
            (json!({ "type": "audio_url", "audio_url": { "url": "x", "rate": 3 } }), "audio_url"),
            (json!({ "type": "input_audio", "input_audio": { "data": "AAAA", "format": "aiff" } }), "input_audio.format"),
            (json!({ "type": "input_audio", "input_audio": { "format": "wav" } }), "input_audio.data"),
            (json!({ "type": "input_audio", "input_audio": { "data": "", "format": "wav", "id": 1 } }), "input_audio"),
            (json!({ "type": "image_url", "image_url": "x" }), "type"),
        ] {
            let error = parse(message(&part), &hears()).unwrap_err();
            assert_eq!(error.param, Some(format!("messages[0].content[1].{param}")), "{part}");
            let error = parse(message(&part), &context(false)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages[0].content[1].type"), "{part}");
        }
    }

    #[test]
    fn every_form_of_a_video_is_put_in_place() {
        let takes = ModelContext { media: vec![MediaKind::Image, MediaKind::Video], model_id: "m".into(), ..Default::default() };
        for (part, fps) in [
            (json!({ "type": "video_url", "video_url": { "url": "data:x", "fps": 0.5 } }), Some(0.5)),
            (json!({ "type": "video_url", "video_url": { "url": "data:x" } }), None),
            (json!({ "type": "video_url", "video_url": "data:x" }), None),
        ] {
            let mut messages = parse(message(&part), &takes).unwrap();
            assert!(are_pending(&messages), "{part}");
            let frame = RgbImage::new(1, 1, vec![1, 2, 3]).unwrap();
            let video = Video::of_frames(vec![frame], None, &engine::video::Limits::default()).unwrap();
            let video = Media::Video(Arc::new(video));
            let fetch = |named: Named<'_>| {
                assert_eq!(named, Named { kind: MediaKind::Video, url: "data:x", fps });
                Ok(video.clone())
            };
            place(&mut messages, fetch).unwrap();
            assert_eq!(messages[0].media, [video]);
            assert_eq!(parts(&messages[0])[1], json!({ "type": "video" }));
        }
        for (part, param) in [
            (json!({ "type": "video_url" }), "video_url"),
            (json!({ "type": "video_url", "video_url": { "url": "x", "num_frames": 3 } }), "video_url"),
            (json!({ "type": "video_url", "video_url": { "url": "x", "fps": "2" } }), "video_url.fps"),
            (json!({ "type": "video_url", "video_url": { "url": "x", "fps": 0 } }), "video_url.fps"),
        ] {
            let error = parse(message(&part), &takes).unwrap_err();
            assert_eq!(error.param, Some(format!("messages[0].content[1].{param}")), "{part}");
            let error = parse(message(&part), &context(true)).unwrap_err();
            assert!(error.message.contains("takes text and images"), "{}", error.message);
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
