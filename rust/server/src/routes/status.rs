//! How the server does.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use engine::{Engine, Vitals};
use serde_json::{Value, json};

use crate::{
    app::App,
    errors::{Failure, internal},
    models::Model,
};

/// The server's thread answers.
pub async fn live() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// As mistral.rs: something answers.
pub async fn root() -> &'static str {
    "OK"
}

/// 200 only while steps go on, and the devices compute, of all models that are loaded.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let vitals: Result<Vec<_>, _> = app.models.iter().map(|model| model.vitals()).collect();
    let vitals = match vitals {
        Ok(vitals) => vitals,
        Err(error) => return Failure(error).into_response(),
    };
    // The stuck one, or else the one whose step lasts longest.
    let severity = |vitals: &Vitals| (!vitals.is_alive(), vitals.is_busy, vitals.since_last_step);
    let worst = vitals.into_iter().flatten().max_by_key(severity);
    let is_alive = worst.as_ref().is_none_or(Vitals::is_alive);
    let (status, word) = if is_alive { (StatusCode::OK, "ok") } else { (StatusCode::SERVICE_UNAVAILABLE, "stuck") };
    let body = json!({
        "status": word,
        "is_busy": worst.as_ref().is_some_and(|vitals| vitals.is_busy),
        "step_age_seconds": worst.as_ref().map(|vitals| vitals.since_last_step.as_secs_f64()),
        "mean_step_seconds": worst.as_ref().map(|vitals| vitals.mean_step.as_secs_f64()),
        "in_flight": app.in_flight(),
        "models": app.models.iter().map(|model| (model.id(), model.status())).collect::<BTreeMap<_, _>>(),
    });
    (status, Json(body)).into_response()
}

/// 200 while more requests are welcome, to one model at least; names those that take none.
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let is_stuck = |model: &Model| !model.vitals().is_ok_and(|vitals| vitals.is_none_or(|vitals| vitals.is_alive()));
    let is_full = |model: &Model| model.in_flight.load(Ordering::SeqCst) >= model.config.max_seqs + app.config.max_queued;
    let (stuck, others): (Vec<_>, Vec<_>) = app.models.iter().partition(|model| is_stuck(model));
    let (full, open): (Vec<_>, Vec<_>) = others.into_iter().partition(|model| is_full(model));
    let (status, word) = if app.is_draining.load(Ordering::SeqCst) {
        (StatusCode::SERVICE_UNAVAILABLE, "draining")
    } else if !open.is_empty() {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, if full.is_empty() { "stuck" } else { "full" })
    };
    let ids = |models: Vec<&Arc<Model>>| models.iter().map(|model| model.id()).collect::<Value>();
    (status, Json(json!({ "status": word, "stuck": ids(stuck), "full": ids(full) }))).into_response()
}

/// The package's version.
pub async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// What is told of a model.
fn model_info(model: &Model) -> Value {
    // Of one that was never loaded little is known.
    let engine = model.engine().ok();
    let engine = engine.as_ref();
    json!({
        "model": model.id(),
        "status": model.status(),
        "architecture": engine.map(Engine::architecture),
        "max_model_len": engine.map(Engine::max_sequence_length),
        "weight_bytes": engine.map(Engine::weight_bytes),
        "kv_cache_bytes": engine.map(Engine::kv_cache_bytes),
        "max_seqs": model.config.max_seqs,
        "description": engine.map(Engine::description),
    })
}

/// What runs here, and on what: of the default model as ever, and of all of them.
pub async fn system_info(State(app): State<Arc<App>>) -> Json<Value> {
    let mut info = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "max_queued": app.config.max_queued,
        "system": app.config.system,
        "models": app.models.iter().map(|model| model_info(model)).collect::<Vec<_>>(),
    });
    if let (Value::Object(info), Value::Object(own)) = (&mut info, model_info(app.models.default())) {
        info.extend(own);
    }
    Json(info)
}

/// `GET /metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let mut more = Vec::new();
    for model in app.models.iter() {
        let Some(engine) = model.loaded() else {
            model.metrics.is_unloaded();
            continue;
        };
        let asked = engine.clone();
        // Waits for the current step.
        let stats = tokio::task::spawn_blocking(move || asked.kv_cache_stats()).await;
        match stats.map_err(|panic| internal(format!("a defect: {panic}")))? {
            Ok(stats) => more.extend(model.metrics.read(&engine, &stats)),
            // It has been unloaded meanwhile.
            Err(_) if model.loaded().is_none() => model.metrics.is_unloaded(),
            Err(error) => return Err(error.into()),
        }
    }
    let page = app.metrics.page(more).map_err(|error| internal(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response())
}
