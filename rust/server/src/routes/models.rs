//! `GET /v1/models`, and what an operator does with them.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::HeaderMap,
};
use bytes::Bytes;
use engine::{EmbeddingConfig, Engine, MediaKind};
use openai::response::ModelCard;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::adapters::parsed;
use crate::{
    app::App,
    auth::{Caller, require_admin},
    errors::Failure,
    models::{Model, Models},
};

impl Model {
    /// Of one of its names, or of an adapter of it.
    fn card(&self, name: &str) -> ModelCard {
        // Of one that was never loaded little is known.
        let (engine, is_adapter) = (self.engine().ok(), !self.is_named(name));
        let told = |what: fn(&Engine) -> Value| engine.as_ref().map_or(Value::Null, what);
        ModelCard {
            id: name.to_owned(),
            object: "model",
            created: self.created,
            owned_by: "local",
            root: if is_adapter { name.to_owned() } else { self.id().to_owned() },
            parent: is_adapter.then(|| self.id().to_owned()),
            max_model_len: engine.as_ref().map(Engine::max_sequence_length),
            more: BTreeMap::from([
                (
                    "input_modalities",
                    told(|engine| {
                        std::iter::once("text").chain(engine.media_kinds().into_iter().map(MediaKind::part_type)).collect()
                    }),
                ),
                ("architecture", told(|engine| json!(engine.architecture()))),
                ("tool_format", told(|engine| json!(engine.tool_format()))),
                ("kind", told(|engine| json!(kind(engine)))),
                ("status", json!(self.status())),
            ]),
        }
    }

    /// Of all its names, then of its adapters.
    fn cards(&self) -> Vec<ModelCard> {
        let mut names: Vec<String> = Vec::new();
        for name in self.names().map(str::to_owned).chain(self.adapters()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.iter().map(|name| self.card(name)).collect()
    }
}

/// What a model is asked for.
fn kind(engine: &Engine) -> &'static str {
    match engine.embedding() {
        None => "chat",
        Some(EmbeddingConfig { score: None, .. }) => "embedding",
        Some(_) => "rerank",
    }
}

/// A card in Anthropic's form.
fn anthropic_card(card: &ModelCard) -> Value {
    json!({ "type": "model", "id": card.id, "display_name": card.id, "created_at": "1970-01-01T00:00:00Z" })
}

/// Every name of the models, and their adapters.
pub async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Json<Value> {
    let cards: Vec<ModelCard> = app.models.iter().flat_map(|model| model.cards()).collect();
    if headers.contains_key("anthropic-version") {
        let data: Vec<Value> = cards.iter().map(anthropic_card).collect();
        let ends = [cards.first(), cards.last()].map(|card| card.map(|card| card.id.clone()));
        return Json(json!({ "data": data, "has_more": false, "first_id": ends[0], "last_id": ends[1] }));
    }
    Json(json!({ "object": "list", "data": cards }))
}

/// One of them.
pub async fn one(State(app): State<Arc<App>>, headers: HeaderMap, Path(id): Path<String>) -> Result<Json<Value>, Failure> {
    let card = app.models.find(Some(&id))?.model.card(&id);
    Ok(Json(if headers.contains_key("anthropic-version") { anthropic_card(&card) } else { json!(card) }))
}

/// What `POST /v1/models/unload`, `reload` and `status` take.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelBody {
    /// A name of the model.
    model_id: String,
}

/// The model that a body names; adapters have no memory of their own.
fn named(models: &Models, body: &Bytes) -> Result<Arc<Model>, Failure> {
    let ModelBody { model_id } = parsed(body)?;
    match models.named(&model_id) {
        Some(model) => Ok(Arc::clone(model)),
        None => Err(models.unknown(&model_id).into()),
    }
}

fn told(model: &Model) -> Json<Value> {
    Json(json!({ "model_id": model.id(), "status": model.status() }))
}

/// Takes a model out of memory. What it answers ends with the text that is there; the next request loads it again.
pub async fn unload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    let model = named(&app.models, &body)?;
    model.unload().await?;
    Ok(told(&model))
}

/// Loads a model that is unloaded, and answers when it is there.
pub async fn reload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Result<Json<Value>, Failure> {
    require_admin(&caller)?;
    let model = named(&app.models, &body)?;
    app.models.ready(&model).await?;
    Ok(told(&model))
}

/// Whether a model is loaded.
pub async fn status(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, Failure> {
    Ok(told(named(&app.models, &body)?.as_ref()))
}
