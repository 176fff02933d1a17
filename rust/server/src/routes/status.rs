//! How the server does.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::{
    app::App,
    errors::{Failure, internal},
};

/// The server's thread answers.
pub async fn live() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// As mistral.rs: something answers.
pub async fn root() -> &'static str {
    "OK"
}

/// 200 only while steps go on, and the device computes.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let vitals = match app.vitals() {
        Ok(vitals) => vitals,
        Err(error) => return Failure(error).into_response(),
    };
    let (status, word) = if vitals.is_alive() { (StatusCode::OK, "ok") } else { (StatusCode::SERVICE_UNAVAILABLE, "stuck") };
    let body = json!({
        "status": word,
        "is_busy": vitals.is_busy,
        "step_age_seconds": vitals.since_last_step.as_secs_f64(),
        "mean_step_seconds": vitals.mean_step.as_secs_f64(),
        "in_flight": app.in_flight.load(Ordering::SeqCst),
    });
    (status, Json(body)).into_response()
}

/// 200 while more requests are welcome.
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let limit = app.config.max_seqs + app.config.max_queued;
    let why = if app.is_draining.load(Ordering::SeqCst) {
        "draining"
    } else if !app.vitals().is_ok_and(|vitals| vitals.is_alive()) {
        "stuck"
    } else if app.in_flight.load(Ordering::SeqCst) >= limit {
        "full"
    } else {
        return Json(json!({ "status": "ready" })).into_response();
    };
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": why }))).into_response()
}

/// The package's version.
pub async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// What runs here, and on what.
pub async fn system_info(State(app): State<Arc<App>>) -> Json<Value> {
    let engine = &app.engine;
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.config.model_id,
        "architecture": engine.architecture(),
        "max_model_len": engine.max_sequence_length(),
        "weight_bytes": engine.weight_bytes(),
        "kv_cache_bytes": engine.kv_cache_bytes(),
        "max_seqs": app.config.max_seqs,
        "max_queued": app.config.max_queued,
        "description": engine.description(),
        "system": app.config.system,
    }))
}

/// `GET /metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let engine = app.engine.clone();
    // Waits for the current step.
    let stats = tokio::task::spawn_blocking(move || engine.kv_cache_stats()).await;
    let stats = stats.map_err(|panic| internal(format!("a defect: {panic}")))??;
    let page = app
        .metrics
        .page(
            &stats,
            &app.engine.step_tokens(),
            app.engine.block_bytes(),
            app.engine.kv_events().as_ref(),
            app.engine.adapter_traffic().as_ref(),
        )
        .map_err(|error| internal(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response())
}
