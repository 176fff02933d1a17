//! `POST /v1/audio/transcriptions`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use engine::audio::{self, Limits};
use futures_util::stream;
use multer::Multipart;
use openai::{
    ApiError,
    transcription::{TRANSCRIBE, TranscriptionForm, TranscriptionFormat, check_model},
};
use serde_json::json;

use super::whole;
use crate::{
    app::App,
    auth::Caller,
    errors::Failure,
    generate::{collect_one, start_admitted},
    models::Model,
};

/// Whether a model makes transcriptions; one that was never loaded may.
fn check(model: &Model) -> Result<(), ApiError> {
    let Ok(known) = model.known() else { return Ok(()) };
    check_model(&known.context, model.engine()?.tokenizer().token_to_id(TRANSCRIBE).is_some())
}

/// Writes down what is said in a sound.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    if app.models.iter().all(|model| check(model).is_err()) {
        check(app.models.default())?;
    }
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(kind).map_err(|_| {
        let message = "send a form, with `Content-Type: multipart/form-data`".to_owned();
        ApiError::new(415, "invalid_request_error", "unsupported_media_type", None, message)
    })?;
    let mut form = read(whole(&app, body, "invalid_form").await?, boundary).await?;
    let target = app.target(&caller, form.model.as_deref(), None).await?;
    check(&target.model)?;
    let (file, format) = (form.file()?, form.format);
    let admission = app.admit(&caller, &target.model, 1)?;
    let sound = app.seeing.decode(move || {
        audio::decode(&file, &Limits::default()).map_err(|why| ApiError::value("file", format!("cannot be read: {why}")))
    });
    let generation = form.into_generation(Arc::new(sound.await?));
    let completion = collect_one(&app, start_admitted(&app, &caller, &target, generation, admission).await?).await?;
    let text = completion.choices.first().map(|choice| choice.text.trim()).unwrap_or_default();
    Ok(match format {
        TranscriptionFormat::Text => format!("{text}\n").into_response(),
        TranscriptionFormat::Json => {
            let (input, output) = (completion.usage.prompt_tokens, completion.usage.completion_tokens);
            let usage =
                json!({ "type": "tokens", "input_tokens": input, "output_tokens": output, "total_tokens": input + output });
            Json(json!({ "text": text, "usage": usage })).into_response()
        }
    })
}

/// The fields of a form.
async fn read(body: Bytes, boundary: String) -> Result<TranscriptionForm, ApiError> {
    let broken = |why: multer::Error| ApiError::invalid("invalid_form", None, format!("the form cannot be read: {why}"));
    let mut parts = Multipart::new(stream::iter([Ok::<_, std::convert::Infallible>(body)]), boundary);
    let mut form = TranscriptionForm::default();
    while let Some(part) = parts.next_field().await.map_err(broken)? {
        let name = part.name().unwrap_or_default().to_owned();
        form.take(&name, &part.bytes().await.map_err(broken)?)?;
    }
    Ok(form)
}
