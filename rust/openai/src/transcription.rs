//! Transcriptions: the fields of a form, in the engine's terms.

use std::sync::Arc;

use engine::{GenerationRequest, Media, MediaKind, Message, MessageContent, Prompt, RenderOptions, SamplingParams, audio::Sound};
use serde_json::json;

use crate::{ApiError, Delivery, Generation, ModelContext};

/// The token that asks for a transcription, of models that know of them.
pub const TRANSCRIBE: &str = "[TRANSCRIBE]";

/// What `response_format` may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TranscriptionFormat {
    /// An object.
    #[default]
    Json,
    /// The text alone.
    Text,
}

/// A form of `/v1/audio/transcriptions`.
#[derive(Debug, Default)]
pub struct TranscriptionForm {
    /// Names of the fields that were taken in.
    taken: Vec<String>,
    file: Option<Vec<u8>>,
    /// What the form calls the model.
    pub model: Option<String>,
    language: Option<String>,
    temperature: Option<f32>,
    max_tokens: Option<usize>,
    /// How the answer is written.
    pub format: TranscriptionFormat,
}

impl TranscriptionForm {
    /// Takes a field in.
    ///
    /// # Errors
    /// For a field that is unknown, comes twice or cannot be honoured, and for values of a wrong form, by the field's name.
    pub fn take(&mut self, name: &str, value: &[u8]) -> Result<(), ApiError> {
        if self.taken.iter().any(|taken| taken == name) {
            return Err(ApiError::value(name, "is in the form twice: send it once"));
        }
        self.taken.push(name.to_owned());
        if name == "file" {
            self.file = Some(value.to_vec());
            return Ok(());
        }
        let text = std::str::from_utf8(value).map_err(|_| ApiError::value(name, "must be text"))?.trim();
        let number = |most: f64| {
            let number = text.parse::<f64>().ok().filter(|number| (0.0..=most).contains(number));
            number.ok_or_else(|| ApiError::value(name, format!("must be a number from 0 to {most}")))
        };
        match name {
            "model" => self.model = Some(text.to_owned()),
            "language" => {
                let is_code = (2..=3).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_lowercase());
                if !is_code {
                    return Err(ApiError::value(name, "must be a code of two or three letters, such as \"en\""));
                }
                self.language = Some(text.to_owned());
            }
            "temperature" => self.temperature = Some(number(2.0)? as f32),
            "max_completion_tokens" => {
                let number = text.parse().ok().filter(|number| *number > 0);
                self.max_tokens = Some(number.ok_or_else(|| ApiError::value(name, "must be a whole number, 1 or more"))?);
            }
            "response_format" => {
                self.format = match text {
                    "json" => TranscriptionFormat::Json,
                    "text" => TranscriptionFormat::Text,
                    _ => return Err(ApiError::unsupported(name, "send \"json\" or \"text\"")),
                }
            }
            "prompt" if text.is_empty() => {}
            "prompt" => return Err(ApiError::unsupported(name, "this model takes no prompt beside a sound: leave it out")),
            "stream" if text == "false" => {}
            "stream" => return Err(ApiError::unsupported(name, "leave it out, or send \"false\"")),
            _ => {
                let shown: String = name.chars().take(32).collect();
                return Err(ApiError::invalid("unknown_parameter", shown.clone(), format!("`{shown}` is no field of this form")));
            }
        }
        Ok(())
    }

    /// The bytes of the sound's file.
    ///
    /// # Errors
    /// Where there are none.
    pub fn file(&mut self) -> Result<Vec<u8>, ApiError> {
        self.file.take().ok_or_else(|| ApiError::missing("file", "give the bytes of a WAV, FLAC, MP3 or Ogg Vorbis file"))
    }

    /// In the engine's terms, for a model that [`check_model`] allows.
    pub fn into_generation(self, sound: Arc<Sound>) -> Generation {
        let content = MessageContent::Parts(vec![json!({ "type": MediaKind::Sound.part_type() })]);
        let message = Message { media: vec![Media::Sound(sound)], ..Message::new("user", content) };
        let language = self.language.map(|language| format!("lang:{language}")).unwrap_or_default();
        let options = RenderOptions { appended: language + TRANSCRIBE, ..RenderOptions::default() };
        // What is said is no matter of chance, unless that is asked for.
        let temperature = Some(self.temperature.unwrap_or(0.0));
        let sampling = SamplingParams { temperature, max_tokens: self.max_tokens, ..SamplingParams::default() };
        let request = GenerationRequest {
            stream: false,
            ..GenerationRequest::new(Prompt::Chat { messages: vec![message], options }, sampling)
        };
        Generation { model: self.model, requests: vec![request], delivery: Delivery::default(), user: None, grammar_param: None }
    }
}

/// Whether a model makes transcriptions; `knows`: it has [`TRANSCRIBE`].
///
/// # Errors
/// For one that makes none.
pub fn check_model(context: &ModelContext, knows: bool) -> Result<(), ApiError> {
    if context.media.contains(&MediaKind::Sound) && knows {
        return Ok(());
    }
    let message = format!("the model `{}` makes no transcriptions; one that does is Voxtral", context.model_id);
    Err(ApiError::invalid("audio_not_supported", None, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(fields: &[(&str, &str)]) -> Result<TranscriptionForm, ApiError> {
        let mut form = TranscriptionForm::default();
        fields.iter().try_for_each(|(name, value)| form.take(name, value.as_bytes()))?;
        Ok(form)
    }

    #[test]
    fn a_form_becomes_a_prompt_that_asks_for_a_transcription() {
        let given = [("file", "RIFF"), ("language", "en"), ("response_format", "text"), ("temperature", "0.5"), ("prompt", "")];
        let mut form = form(&given).unwrap();
        assert_eq!((form.file().unwrap(), form.format), (b"RIFF".to_vec(), TranscriptionFormat::Text));
        assert_eq!(form.file().unwrap_err().param.as_deref(), Some("file"));
        let sound = Arc::new(Sound::new(8000, vec![0.5]).unwrap());
        let generation = form.into_generation(sound);
        let Prompt::Chat { messages, options } = &generation.requests[0].prompt else { panic!("a chat") };
        assert_eq!((messages[0].media.len(), &options.appended[..]), (1, "lang:en[TRANSCRIBE]"));
        assert_eq!(generation.requests[0].sampling.temperature, Some(0.5));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (name, value) in [
            ("language", "english"),
            ("language", "E1"),
            ("temperature", "3"),
            ("temperature", "warm"),
            ("response_format", "srt"),
            ("prompt", "a talk about cats"),
            ("stream", "true"),
            ("max_completion_tokens", "0"),
            ("timestamp_granularities[]", "word"),
        ] {
            let error = form(&[(name, value)]).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name), "{}", error.message);
        }
        let twice = form(&[("language", "en"), ("language", "fr")]).unwrap_err();
        assert_eq!((twice.param.as_deref(), twice.message.contains("twice")), (Some("language"), true), "{}", twice.message);
        let hearing = ModelContext { media: vec![MediaKind::Sound], ..ModelContext::default() };
        assert!(check_model(&hearing, true).is_ok());
        let seeing = ModelContext { media: vec![MediaKind::Image], ..ModelContext::default() };
        for (context, knows) in [(seeing, true), (hearing, false)] {
            let error = check_model(&context, knows).unwrap_err();
            assert!(error.message.contains("makes no transcriptions"));
        }
    }
}
