//! What an operator may do, and routes that come with later versions.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::Uri,
};
use openai::ApiError;
use serde_json::{Value, json};

use crate::{
    app::App,
    auth::{Caller, require_admin},
    errors::Failure,
};

/// Routes of the mirrored interface that are not there yet.
pub const PLANNED: [&str; 4] = ["/re_isq", "/v1/models/unload", "/v1/models/reload", "/v1/models/tune"];

/// Schedules nothing until a resume; requests wait.
pub async fn pause(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    app.engine.pause()?;
    Ok(Json(json!({ "status": "paused" })))
}

/// Goes on after a pause, and takes requests again after a drain.
pub async fn resume(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    app.engine.resume()?;
    app.is_draining.store(false, Ordering::SeqCst);
    Ok(Json(json!({ "status": "running" })))
}

/// Takes no more requests; those there are run to their end.
pub async fn drain(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    app.is_draining.store(true, Ordering::SeqCst);
    Ok(Json(json!({ "status": "draining", "in_flight": app.in_flight.load(Ordering::SeqCst) })))
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

/// Says what is missing.
pub async fn planned(uri: Uri) -> Failure {
    let (what, advice) = match uri.path() {
        "/re_isq" => ("quantising a loaded model", "load a quantised GGUF file"),
        _ => ("loading models over HTTP", "start another server for another model"),
    };
    let message = format!("{} is not served: {what} come with a later version; {advice}", uri.path());
    Failure(ApiError::new(501, "invalid_request_error", "not_implemented", None, message))
}
