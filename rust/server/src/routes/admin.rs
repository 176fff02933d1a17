//! What an operator may do, and routes that come with later versions.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::Uri,
};
use bytes::Bytes;
use engine::Isq;
use openai::ApiError;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::adapters::parsed;
use crate::{
    app::App,
    auth::{Caller, require_admin},
    errors::Failure,
    models::Target,
};

/// A route of the mirrored interface that is not there yet.
pub const PLANNED: &str = "/v1/models/tune";

/// Schedules nothing until a resume, of models that are loaded meanwhile too; requests wait.
pub async fn pause(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    app.models.pause()?;
    Ok(Json(json!({ "status": "paused" })))
}

/// Goes on after a pause, and takes requests again after a drain.
pub async fn resume(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    app.models.resume()?;
    app.is_draining.store(false, Ordering::SeqCst);
    Ok(Json(json!({ "status": "running" })))
}

/// Takes no more requests; those there are run to their end.
pub async fn drain(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    app.is_draining.store(true, Ordering::SeqCst);
    Ok(Json(json!({ "status": "draining", "in_flight": app.in_flight() })))
}

/// Ends the requests that go by this `x-request-id`; their clients get an error.
pub async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    match app.cancels.cancel(&id) {
        0 => {
            let message = "no request that runs or waits goes by this x-request-id".to_owned();
            Err(ApiError::new(404, "not_found_error", "request_not_found", Some("id".into()), message).into())
        }
        count => Ok(Json(json!({ "cancelled": count }))),
    }
}

/// What `POST /re_isq` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReIsqBody {
    /// What the weights become, by a name that `--isq` takes.
    ggml_type: String,
    /// A name of the model, the default one unless given.
    model: Option<String>,
}

/// Quantizes the weights anew, and answers when requests are answered by the new ones.
pub async fn re_isq(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    let ReIsqBody { ggml_type, model } = parsed(&body)?;
    let isq = Isq::named("ggml_type", &ggml_type)?;
    let Target { model, .. } = app.models.find(model.as_deref())?;
    model.re_isq(isq).await?;
    let weight_bytes = model.engine()?.weight_bytes();
    Ok(Json(json!({ "status": "ok", "ggml_type": isq.to_string(), "weight_bytes": weight_bytes })))
}

/// Says what is missing.
pub async fn planned(uri: Uri) -> Failure {
    let path = uri.path();
    let message = format!("{path} is not served: `mistral-paged tune` tells which type to quantize to, and POST /re_isq does it");
    Failure(ApiError::new(501, "invalid_request_error", "not_implemented", None, message))
}
