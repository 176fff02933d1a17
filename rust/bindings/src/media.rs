//! Images, sounds and videos in the messages of a chat.

use std::sync::Arc;

use engine::{Media, MediaKind};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple},
};
use server::media;

use crate::{
    arguments::{Text, named},
    exceptions::invalid,
    images::{self, RgbImage},
    sounds::{self, Sound},
    videos::{self, Video},
};

/// What has to be read before it is an image, a sound or a video.
enum Source {
    Image(images::Source),
    Sound(sounds::Source),
    Video(videos::Source),
}

/// The images, sounds and videos of messages, those of each in order, and the messages without them; `None` where there are none.
#[allow(clippy::type_complexity, reason = "messages and what was in them")]
pub fn take<'py>(
    messages: &Bound<'py, PyAny>,
    media: &Arc<media::Media>,
) -> PyResult<Option<(Bound<'py, PyAny>, Vec<Vec<Media>>)>> {
    let py = messages.py();
    let (mut all, mut rest) = (Vec::new(), Vec::new());
    let Some(items) = items(messages) else { return Ok(None) };
    for (i, message) in items.into_iter().enumerate() {
        let content = message.cast::<PyDict>().ok().and_then(|dict| dict.get_item("content").ok().flatten());
        let mut taken = Vec::new();
        let Some(parts) = content.as_ref().and_then(self::items) else {
            all.push(taken);
            rest.push(message);
            continue;
        };
        let mut stripped = Vec::new();
        for (j, part) in parts.into_iter().enumerate() {
            let place = format!("messages[{i}]['content'][{j}]");
            let Some((place, source)) = source_of(&place, &part)? else {
                stripped.push(part);
                continue;
            };
            let one = match source {
                Source::Image(source) => Media::Image(source.read(py, &place, media)?),
                Source::Sound(source) => Media::Sound(source.read(py, &place, media)?),
                Source::Video(source) => Media::Video(source.read(py, &place, media)?),
            };
            let placed = PyDict::new(py);
            placed.set_item("type", one.kind().part_type())?;
            stripped.push(placed.into_any());
            taken.push(one);
        }
        let without = message.cast::<PyDict>()?.copy()?;
        without.set_item("content", stripped)?;
        all.push(taken);
        rest.push(without.into_any());
    }
    if all.iter().all(Vec::is_empty) {
        return Ok(None);
    }
    Ok(Some((PyList::new(py, rest)?.into_any(), all)))
}

fn items<'py>(object: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    match object.cast::<PyList>() {
        Ok(list) => Some(list.iter().collect()),
        Err(_) => object.cast::<PyTuple>().ok().map(|tuple| tuple.iter().collect()),
    }
}

/// The image, sound or video that a part has, and what errors call it.
fn source_of(place: &str, part: &Bound<'_, PyAny>) -> PyResult<Option<(String, Source)>> {
    let Ok(part) = part.cast::<PyDict>() else { return Ok(None) };
    let Some(kind) = part.get_item("type")? else { return Ok(None) };
    let Some(Text(key)) = kind.cast::<PyString>().ok().and_then(|kind| kind.extract::<Text>().ok()) else { return Ok(None) };
    let (kind, beside): (_, &[&str]) = match &key[..] {
        "image" | "image_url" => (MediaKind::Image, &["detail"]),
        "audio" => (MediaKind::Sound, &["rate"]),
        "audio_url" | "input_audio" => (MediaKind::Sound, &[]),
        "video" | "video_url" => (MediaKind::Video, &["fps"]),
        _ => return Ok(None),
    };
    let place = format!("{place}['{key}']");
    let is_known =
        |name: &Bound<'_, PyAny>| [&["type", &key[..]], beside].concat().iter().any(|own| name.eq(*own).unwrap_or(false));
    if let Some(other) = part.keys().iter().find(|name| !is_known(name)) {
        return Err(invalid(format!("`{place}` stands beside the unknown key {}; leave it out", other.repr()?)));
    }
    let noun = match kind {
        MediaKind::Image => "image",
        MediaKind::Sound => "sound",
        MediaKind::Video => "video",
    };
    let missing = || invalid(format!("`{place}` is missing; give the {noun}"));
    let value = part.get_item(&key)?.filter(|value| !value.is_none()).ok_or_else(missing)?;
    if key == "input_audio" {
        return input_audio(&place, &value).map(|url| Some((place, Source::Sound(sounds::Source::Url(url)))));
    }
    if kind == MediaKind::Image {
        check_detail(&place, part)?;
    }
    let mut inner_fps = None;
    let (place, value) = match value.cast::<PyDict>() {
        Ok(dict) => {
            if kind == MediaKind::Image {
                check_detail(&place, dict)?;
            }
            if kind == MediaKind::Video {
                inner_fps = videos::fps(dict)?;
            }
            let url = dict.get_item("url")?.ok_or_else(|| invalid(format!("`{place}` has no 'url'")))?;
            (format!("{place}['url']"), url)
        }
        Err(_) => (place, value),
    };
    let source = match kind {
        MediaKind::Image => Source::Image(images::source(&place, &value)?),
        MediaKind::Sound => {
            let rate = part.get_item("rate")?.filter(|rate| !rate.is_none());
            Source::Sound(sounds::source(&place, &value, rate.as_ref())?)
        }
        MediaKind::Video => Source::Video(videos::source(&place, &value, videos::fps(part)?.or(inner_fps))?),
    };
    Ok(Some((place, source)))
}

/// The sound of `{"data": ..., "format": ...}`, as OpenAI's interface has it, as a URL.
fn input_audio(place: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let form = || {
        let formats = openai::media::FORMATS.join(", ");
        invalid(format!("`{place}` must be {{'data': base64, 'format': one of {formats}}}"))
    };
    let dict = value.cast::<PyDict>().map_err(|_| form())?;
    if let Some(other) = dict.keys().iter().find(|name| !["data", "format"].iter().any(|own| name.eq(*own).unwrap_or(false))) {
        return Err(invalid(format!("`{place}` has the unknown key {}; leave it out", other.repr()?)));
    }
    let text = |key: &str| dict.get_item(key)?.map(|value| named::<Text>(&format!("{place}['{key}']"), &value)).transpose();
    match (text("data")?, text("format")?) {
        (Some(Text(data)), Some(Text(format))) if openai::media::FORMATS.contains(&&format[..]) => {
            Ok(format!("data:audio/{format};base64,{data}"))
        }
        _ => Err(form()),
    }
}

/// What a model makes of an image is its own.
fn check_detail(place: &str, dict: &Bound<'_, PyDict>) -> PyResult<()> {
    match dict.get_item("detail")? {
        Some(detail) if !detail.is_none() && !detail.eq("auto")? => {
            Err(invalid(format!("`{place}`: 'detail' is {}; leave it out, or give 'auto'", detail.repr()?)))
        }
        _ => Ok(()),
    }
}

/// Puts the images, sounds and videos of a message, as a dict, back into its parts.
pub fn put_back(message: &Bound<'_, PyAny>, media: &[Media]) -> PyResult<()> {
    let py = message.py();
    let mut media = media.iter();
    for part in message.get_item("content")?.try_iter()? {
        let (part, key) = (part?, "type");
        let kind = part.get_item(key)?;
        if !MediaKind::ALL.iter().any(|own| kind.eq(own.part_type()).unwrap_or(false)) {
            continue;
        }
        match media.next() {
            Some(Media::Image(image)) => part.set_item("image", Py::new(py, RgbImage::from(Arc::clone(image)))?)?,
            Some(Media::Sound(sound)) => part.set_item("audio", Py::new(py, Sound::from(Arc::clone(sound)))?)?,
            Some(Media::Video(video)) => part.set_item("video", Py::new(py, Video::from(Arc::clone(video)))?)?,
            None => {}
        }
    }
    Ok(())
}
