//! `GET /v1/models`.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    extract::{Path, State},
    http::HeaderMap,
};
use openai::response::ModelCard;
use serde_json::{Value, json};

use crate::{app::App, errors::Failure};

impl App {
    fn card(&self, id: &str) -> ModelCard {
        ModelCard {
            id: id.to_owned(),
            object: "model",
            created: self.created,
            owned_by: "local",
            root: self.config.model_id.clone(),
            parent: None,
            max_model_len: self.engine.max_sequence_length(),
            more: BTreeMap::from([
                ("architecture", json!(self.engine.architecture())),
                ("tool_format", json!(self.engine.tool_format())),
            ]),
        }
    }

    fn names(&self) -> Vec<&str> {
        let config = &self.config;
        let mut names = vec![config.model_id.as_str()];
        for name in config.served_model_names.iter().map(String::as_str).chain(["default"]) {
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

/// Every name of the model.
pub async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Json<Value> {
    let cards: Vec<ModelCard> = app.names().into_iter().map(|name| app.card(name)).collect();
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
