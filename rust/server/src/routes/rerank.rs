//! `POST /v1/rerank`.

use std::sync::Arc;

use axum::{Extension, Json, body::Body, extract::State, http::HeaderMap};
use openai::{
    ApiError, Delivery, Generation,
    embeddings::EmbeddingUsage,
    rerank::{RerankAnswer, RerankBody, RerankResult, of_engine},
};

use super::{body, embeddings::vector};
use crate::{
    app::App,
    auth::Caller,
    errors::{Failure, internal},
    generate::{collect, start},
};

/// Scores texts against a query.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<RerankAnswer>, Failure> {
    let bytes = body(&app, &headers, bytes).await?;
    let RerankBody { model, request, top_n, return_documents, user } = RerankBody::parse(&bytes)?;
    let target = app.target(&caller, model.as_deref(), request.service.deadline).await?;
    let engine = target.model.engine()?;
    let scores_pairs = engine.embedding().is_some_and(|config| config.score.is_some());
    let documents = return_documents.then(|| request.documents.clone());
    let requests = tokio::task::spawn_blocking(move || engine.rerank_requests(request)).await;
    let requests = requests.map_err(|panic| internal(format!("a defect ended the request: {panic}")))?;
    let requests = requests.map_err(|error| {
        if scores_pairs { of_engine(error) } else { ApiError::invalid("rerank_not_supported", None, error.to_string()) }
    })?;
    let generation = Generation { model, requests, delivery: Delivery::default(), user, grammar_param: None };
    let completions = collect(&app, start(&app, &caller, &target, generation).await?).await?;
    let prompt_tokens = completions.iter().map(|completion| completion.usage.prompt_tokens).sum();
    let scores = completions.into_iter().map(|completion| Ok(vector(completion)?.first().copied().unwrap_or_default()));
    let scores = scores.collect::<Result<Vec<_>, ApiError>>()?;
    Ok(Json(RerankAnswer {
        id: format!("rerank-{}", caller.request_id),
        model: target.model.id().to_owned(),
        results: RerankResult::best(&scores, documents, top_n),
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    }))
}
