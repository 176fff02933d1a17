//! `POST /v1/embeddings`.

use std::sync::Arc;

use axum::{Extension, Json, body::Body, extract::State, http::HeaderMap};
use engine::{Completion, FinishReason};
use openai::{
    ApiError, Delivery, Generation,
    embeddings::{Embedding, EmbeddingUsage, EmbeddingsAnswer, EmbeddingsRequest, of_engine},
};

use super::body;
use crate::{
    app::App,
    auth::Caller,
    errors::{Failure, internal},
    generate::{collect, start},
};

/// Embeds texts.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<EmbeddingsAnswer>, Failure> {
    let bytes = body(&app, &headers, bytes).await?;
    let EmbeddingsRequest { model, request, encoding, user } = EmbeddingsRequest::parse(&bytes)?;
    let target = app.target(&caller, model.as_deref(), request.service.deadline).await?;
    let (engine, dimensions) = (target.model.engine()?, request.dimensions);
    let makes_them = engine.embedding().is_some();
    let requests = tokio::task::spawn_blocking(move || engine.embedding_requests(request)).await;
    let requests = requests.map_err(|panic| internal(format!("a defect ended the request: {panic}")))?;
    let requests = requests.map_err(|error| {
        if makes_them { of_engine(error) } else { ApiError::invalid("embeddings_not_supported", None, error.to_string()) }
    })?;
    let generation = Generation { model, requests, delivery: Delivery::default(), user, grammar_param: None };
    let completions = collect(&app, start(&app, &caller, &target, generation).await?).await?;
    let prompt_tokens = completions.iter().map(|completion| completion.usage.prompt_tokens).sum();
    let data = completions.into_iter().enumerate().map(|(index, completion)| {
        let vector = vector(completion)?;
        Ok::<_, ApiError>(Embedding::new(index, vector, dimensions, encoding))
    });
    Ok(Json(EmbeddingsAnswer {
        object: "list",
        data: data.collect::<Result<_, _>>()?,
        model: target.model.id().to_owned(),
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    }))
}

/// What a request ended with; there is no part of a vector.
pub(super) fn vector(completion: Completion) -> Result<Vec<f32>, ApiError> {
    let choice = completion.choices.into_iter().next().ok_or_else(|| internal("a request ended without an answer".into()))?;
    match (choice.vector, choice.finish_reason) {
        (Some(vector), _) => Ok(vector),
        (None, FinishReason::Timeout) => {
            let message = "the request's deadline passed before its embeddings were made".to_owned();
            Err(ApiError::new(504, "timeout_error", "deadline_exceeded", None, message))
        }
        (None, reason) => Err(internal(format!("the request ended before its vector: {}", reason.as_str()))),
    }
}
