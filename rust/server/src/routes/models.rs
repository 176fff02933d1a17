//! `GET /v1/models`.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    extract::{Path, State},
    http::HeaderMap,
};
use engine::MediaKind;
use openai::response::ModelCard;
use serde_json::{Value, json};

use crate::{app::App, errors::Failure};

impl App {
    fn card(&self, id: &str) -> ModelCard {
        let is_adapter = !self.is_model(id);

        ModelCard {
            id: id.to_owned(),
            object: "model",
            created: self.created,
            owned_by: "local",
            root: if is_adapter { id.to_owned() } else { self.config.model_id.clone() },
            parent: is_adapter.then(|| self.config.model_id.clone()),
            max_model_len: self.engine.max_sequence_length(),
            more: BTreeMap::from([
                (
                    "input_modalities",
                    std::iter::once("text").chain(self.engine.media_kinds().into_iter().map(MediaKind::part_type)).collect(),
                ),
                ("architecture", json!(self.engine.architecture())),
                ("tool_format", json!(self.engine.tool_format())),
            ]),
        }
    }

    /// Those of the model, then its adapters.
    fn names(&self) -> Vec<String> {
        let config = &self.config;
        let mut names = vec![config.model_id.clone()];
        let adapters = self.engine.adapters().into_iter().map(|adapter| adapter.alias);
        for name in config.served_model_names.iter().cloned().chain(["default".to_owned()]).chain(adapters) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

/// A card in Anthropic's form.
fn anthropic_card(card: &ModelCard) -> Value {
    json!({ "type": "model", "id": card.id, "display_name": card.id, "created_at": "1970-01-01T00:00:00Z" })
}

/// Every name of the model, and its adapters.
pub async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Json<Value> {
    let cards: Vec<ModelCard> = app.names().iter().map(|name| app.card(name)).collect();
    if headers.contains_key("anthropic-version") {
        let data: Vec<Value> = cards.iter().map(anthropic_card).collect();
        let ends = [cards.first(), cards.last()].map(|card| card.map(|card| card.id.clone()));
        return Json(json!({ "data": data, "has_more": false, "first_id": ends[0], "last_id": ends[1] }));
    }
    Json(json!({ "object": "list", "data": cards }))
}

/// One of them.
pub async fn one(State(app): State<Arc<App>>, headers: HeaderMap, Path(id): Path<String>) -> Result<Json<Value>, Failure> {
    app.check_model(Some(&id))?;
    let card = app.card(&id);
    Ok(Json(if headers.contains_key("anthropic-version") { anthropic_card(&card) } else { json!(card) }))
}
