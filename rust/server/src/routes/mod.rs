//! The routes, and what all of them have in common.

mod adapters;
mod admin;
mod chat;
mod completions;
mod embeddings;
mod messages;
mod models;
mod openapi;
mod rerank;
mod responses;
mod status;
mod text;
mod transcriptions;
mod ui;

pub use ui::Watch;

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, MatchedPath, Query, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{any, delete, get, post},
};
use bytes::Bytes;
use engine::EngineError;
use futures_util::FutureExt;
use http_body_util::{BodyExt, Limited};
use openai::ApiError;
use serde::Deserialize;

use crate::{
    access_log::Line,
    app::App,
    auth::Caller,
    errors::{Failure, anthropic_body, internal, method_not_allowed, not_found, with_headers},
    traces::Traces,
};

/// A body must be complete after so long.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Anthropic's name of it.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// These tell nothing that needs a key.
const OPEN: [&str; 6] = ["/health", "/live", "/ready", "/ping", "/ui", "/"];

/// Every route of a server.
pub fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/rerank", post(rerank::create))
        .route("/v2/rerank", post(rerank::create))
        .route("/rerank", post(rerank::create))
        .route("/v1/audio/transcriptions", post(transcriptions::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::one).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/models", get(models::list))
        .route("/v1/models/unload", post(models::unload))
        .route("/v1/models/reload", post(models::reload))
        .route("/v1/models/status", post(models::status))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .route("/apply-template", post(text::apply_template))
        .route("/tokenizer_info", get(text::tokenizer_info))
        .route("/health", get(status::health))
        .route("/ping", get(status::health))
        .route("/", get(status::root))
        .route("/live", get(status::live))
        .route("/ready", get(status::ready))
        .route("/version", get(status::version))
        .route("/v1/system/info", get(status::system_info));
    router = router
        .route("/openapi.json", get(openapi::document))
        .route("/docs", get(openapi::page))
        .route("/v1/lora_adapters", get(adapters::list))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route("/re_isq", post(admin::re_isq))
        .route("/admin/pause", post(admin::pause))
        .route("/admin/resume", post(admin::resume))
        .route("/admin/drain", post(admin::drain))
        .route("/admin/requests/{id}", delete(admin::cancel));
    router = router.route(admin::PLANNED, any(admin::planned));
    if app.config.ui {
        router = router
            .route("/ui", get(ui::page))
            .route("/ui/", get(ui::page))
            .route("/ui/assets/{name}", get(ui::asset))
            .route("/ui/events", get(ui::events));
    }
    if app.config.metrics {
        router = router.route("/metrics", get(status::metrics));
    }
    router
        .fallback(fallback)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(app), around))
        .with_state(Arc::clone(app))
}

async fn fallback(uri: Uri) -> Failure {
    Failure(not_found(uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Failure {
    Failure(method_not_allowed(method.as_str(), uri.path()))
}

/// Around every request: its id, who asks, from which page, the log and the metrics; a panic ends this request alone.
async fn around(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let id = request_id(request.headers()).unwrap_or_else(|| app.id("req-"));
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed_origin = origin.as_ref().filter(|origin| is_allowed(&app, origin)).cloned();
    app.metrics.http_begins();
    let mut tenant = None;
    let checked = check_origin(&app, request.headers(), origin.as_ref()).and_then(|()| caller(&app, &path, request.headers()));
    let pattern = request.extensions().get::<MatchedPath>().map_or("unknown".to_owned(), |path| path.as_str().to_owned());
    let mut response = match checked {
        _ if method == Method::OPTIONS && allowed_origin.is_some() => StatusCode::NO_CONTENT.into_response(),
        Err(error) => Failure(error).into_response(),
        Ok(caller) => {
            tenant.clone_from(&caller.tenant);
            let trace = app.traces.is_some().then(|| Traces::parent(request.headers()));
            request.extensions_mut().insert(Caller { request_id: id.clone(), trace, ..caller });
            match AssertUnwindSafe(next.run(request)).catch_unwind().await {
                Ok(response) => response,
                Err(_) => Failure(internal("a defect ended this request; others go on".into())).into_response(),
            }
        }
    };
    if path.starts_with("/v1/messages")
        && let Some(error) = response.extensions().get::<ApiError>()
    {
        response = with_headers(error, anthropic_body(error, &id));
    }
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert(ANTHROPIC_REQUEST_ID, value.clone());
        headers.insert(REQUEST_ID, value);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(origin) = allowed_origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("authorization, content-type, x-api-key"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE, OPTIONS"));
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
    }
    let status = response.status().as_u16();
    app.metrics.http_ends(method.as_str(), &pattern, status, started.elapsed().as_secs_f64());
    let is_check = matches!(path.as_str(), "/health" | "/live" | "/ready" | "/ping" | "/metrics");
    if !is_check || app.config.access_log_health {
        let line = Line { method: method.as_str(), path: &path, status, request_id: &id, tenant: tenant.as_deref(), started };
        line.write(app.config.access_log);
    }
    response
}

/// A client's own id, if it is plain; the engine never uses it as a key.
fn request_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
    ((1..=128).contains(&id.len()) && id.bytes().all(is_plain)).then(|| id.to_owned())
}

fn is_allowed(app: &App, origin: &HeaderValue) -> bool {
    app.config.cors_origins.iter().any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes())
}

/// A page of another origin may not use the server from a visitor's browser; and on a loopback address, no name but its own may
/// be used for the server, lest a page rebinds its name to it.
fn check_origin(app: &App, headers: &HeaderMap, origin: Option<&HeaderValue>) -> Result<(), ApiError> {
    let refused = |message: &str| Err(ApiError::new(403, "permission_error", "origin_not_allowed", None, message.to_owned()));
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit())).map_or(host, |(name, _)| name);
    let is_loopback = |name: &str| matches!(name, "" | "localhost" | "[::1]") || name.starts_with("127.");
    let bound_to_loopback = matches!(app.config.host.as_str(), "127.0.0.1" | "localhost" | "::1");
    if bound_to_loopback && !is_loopback(name) {
        return refused("this server listens on a loopback address, and the request's Host is another");
    }
    let Some(origin) = origin else { return Ok(()) };
    let is_own = origin.to_str().is_ok_and(|origin| origin.split_once("://").is_some_and(|(_, place)| place == host));
    if is_own || is_allowed(app, origin) {
        return Ok(());
    }
    refused("pages of this origin may not use the server; its operator can allow it with --cors-origin")
}

fn caller(app: &App, path: &str, headers: &HeaderMap) -> Result<Caller, ApiError> {
    if OPEN.contains(&path) || path.starts_with("/ui/assets/") {
        return Ok(app.keys.caller(headers).unwrap_or_default());
    }
    app.keys.caller(headers)
}

/// The model that an address asks of, `?model=NAME`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfModel {
    model: Option<String>,
}

impl<S: Sync> FromRequestParts<S> for OfModel {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Failure> {
        match Query::<Self>::try_from_uri(&parts.uri) {
            Ok(Query(which)) => Ok(which),
            Err(why) => {
                Err(ApiError::invalid("invalid_value", None, format!("the address takes ?model=NAME alone: {why}")).into())
            }
        }
    }
}

/// Runs `work`, which may take a while, beside the server's thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, EngineError> + Send + 'static) -> Result<T, ApiError> {
    let result = tokio::task::spawn_blocking(work).await;
    result.map_err(|panic| internal(format!("a defect ended the request: {panic}")))?.map_err(openai::of_request)
}

/// The bytes of a body, within the server's limits of size and time.
async fn body(app: &App, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let is_form = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"multipart/"));
    if is_form {
        let message = "send JSON, with `Content-Type: application/json`".to_owned();
        return Err(ApiError::new(415, "invalid_request_error", "unsupported_media_type", None, message));
    }
    whole(app, body, "invalid_json").await
}

/// The whole of a body, of whatever kind; `broken` is the code of one that ends before its time.
async fn whole(app: &App, body: Body, broken: &'static str) -> Result<Bytes, ApiError> {
    let limit = app.config.max_body_bytes;
    match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, limit).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            let message = format!("the body has more than {limit} bytes; the server's --max-body-mb allows more");
            Err(ApiError::new(413, "invalid_request_error", "request_too_large", None, message))
        }
        Ok(Err(_)) => Err(ApiError::invalid(broken, None, "the body ended before it was complete")),
        Err(_) => {
            let message = format!("the body was not complete after {} s", BODY_TIMEOUT.as_secs());
            Err(ApiError::new(408, "timeout_error", "body_timeout", None, message))
        }
    }
}

#[cfg(test)]
mod tests {

    use engine::{Engine, EngineConfig, MemoryGpuConfig, ModelSource, PagedAttentionConfig};
    use tower::Service;

    use super::*;
    use crate::ServerConfig;

    #[test]
    fn a_panic_in_a_request_is_its_own_error() {
        let dir = goldens::dir().join("text/llama");
        let source = ModelSource::from_path(dir).unwrap();
        let paged_attention =
            PagedAttentionConfig { mem_gpu: Some(MemoryGpuConfig::ContextSize(64)), ..PagedAttentionConfig::default() };
        let engine = Engine::load(&source, &EngineConfig { paged_attention, ..EngineConfig::default() }, &|_| {}).unwrap();
        let app = Arc::new(App::new(vec![Arc::new(engine)], ServerConfig::default()).unwrap());
        let panicking = |body: Bytes| async move { assert!(!body.is_empty(), "a defect") };
        let mut router = router(&app).merge(
            Router::new()
                .route("/v1/messages/panics", post(panicking))
                .route("/panics", post(panicking))
                .layer(middleware::from_fn_with_state(Arc::clone(&app), around)),
        );
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut ask = |method, path| {
            let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
            runtime.block_on(async {
                let response = router.call(request).await.unwrap();
                let status = response.status().as_u16();
                let body = response.into_body().collect().await.unwrap().to_bytes();
                (status, String::from_utf8(body.to_vec()).unwrap())
            })
        };
        for path in ["/panics", "/v1/messages/panics"] {
            let (status, body) = ask(Method::POST, path);
            assert_eq!(status, 500);
            assert!(body.contains("a defect ended this request"), "{body}");
        }
        assert_eq!(ask(Method::GET, "/health").0, 200);
    }
}
