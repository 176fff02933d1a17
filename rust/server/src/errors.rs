//! Errors as responses.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use openai::ApiError;
use serde_json::{Value, json};

use crate::models::Model;

/// An error on its way to a client.
#[derive(Debug)]
pub struct Failure(pub ApiError);

impl<E: Into<ApiError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = with_headers(&self.0, self.0.body());
        // Routes of another form write it again.
        response.extensions_mut().insert(self.0);
        response
    }
}

/// A response with the error's status and headers, and this body.
pub fn with_headers(error: &ApiError, body: Value) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, axum::Json(body)).into_response();
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    // OpenAI's and Anthropic's clients try 5xx again unless told that it is no use.
    if status.is_server_error() && error.retry_after.is_none() {
        headers.insert("x-should-retry", HeaderValue::from_static("false"));
    }
    response
}

/// The error in Anthropic's form.
pub fn anthropic_body(error: &ApiError, request_id: &str) -> Value {
    let kind = match error.status {
        429 => "rate_limit_error",
        500 => "api_error",
        503 => "overloaded_error",
        _ => error.kind,
    };
    json!({ "type": "error", "error": { "type": kind, "message": error.message }, "request_id": request_id })
}

/// A path that is not there.
pub fn not_found(path: &str) -> ApiError {
    let shown: String = path.chars().take(128).collect();
    let advice = if path.starts_with("/api/") {
        "Ollama's interface is not offered; OpenAI's is, below /v1"
    } else if path.starts_with("/v1/images") || path.starts_with("/v1/audio") || path.starts_with("/v1/files") {
        "this server generates text only"
    } else {
        "GET /docs lists the routes"
    };
    ApiError::new(404, "not_found_error", "route_not_found", None, format!("there is no route {shown}: {advice}"))
}

/// A method that a path has not.
pub fn method_not_allowed(method: &str, path: &str) -> ApiError {
    let shown: String = path.chars().take(128).collect();
    ApiError::new(405, "invalid_request_error", "method_not_allowed", None, format!("{method} is not a method of {shown}"))
}

/// A model that is not served, where these are.
pub fn model_not_found<'a>(name: &str, default: &Model, served: impl Iterator<Item = &'a str>) -> ApiError {
    let shown: String = name.chars().take(128).collect();
    let served: Vec<String> = served
        .map(|id| if id == default.id() { format!("`{id}`, also known as `default`") } else { format!("`{id}`") })
        .collect();
    let message = format!("The model `{shown}` does not exist; this server has {}", served.join(", and "));
    ApiError::new(404, "not_found_error", "model_not_found", Some("model".into()), message)
}

/// A defect in the server; other requests go on.
pub fn internal(message: String) -> ApiError {
    ApiError::new(500, "server_error", "internal_error", None, message)
}
