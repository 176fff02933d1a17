//! `GET /openapi.json`, made from the structs that read the requests, and `/docs`, which shows it without anybody else's script.

use std::{fmt::Write as _, sync::Arc};

use axum::{Json, extract::State, response::Html};
use openai::{
    anthropic::MessagesFields,
    chat::ChatFields,
    completions::CompletionFields,
    responses::ResponsesFields,
    sampling::SamplingFields,
    text::{DetokenizeRequest, TokenizeRequest},
};
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::app::App;

/// Method, path, summary, required keys.
type Route = (&'static str, &'static str, &'static str, &'static [&'static str]);

const ROUTES: [Route; 23] = [
    ("post", "/v1/chat/completions", "Answers a chat.", &["messages"]),
    ("post", "/v1/completions", "Continues texts.", &["prompt"]),
    ("post", "/v1/responses", "Makes a response.", &["input"]),
    ("get", "/v1/responses/{id}", "A response that was kept.", &[]),
    ("delete", "/v1/responses/{id}", "Forgets a response.", &[]),
    ("post", "/v1/responses/input_tokens", "How many tokens a response's prompt would have.", &["input"]),
    ("post", "/v1/messages", "Answers with a message, in Anthropic's form.", &["messages", "max_tokens"]),
    ("post", "/v1/messages/count_tokens", "How many tokens a message's prompt would have.", &["messages"]),
    ("get", "/v1/models", "The models.", &[]),
    ("get", "/v1/models/{id}", "A model.", &[]),
    ("post", "/tokenize", "Text, or a chat, to token ids.", &[]),
    ("post", "/detokenize", "Token ids to text.", &["tokens"]),
    ("post", "/apply-template", "What a chat becomes.", &["messages"]),
    ("get", "/tokenizer_info", "The tokenizer's special tokens, and the chat template.", &[]),
    ("get", "/health", "200 while steps go on.", &[]),
    ("get", "/live", "200 while the server's thread answers.", &[]),
    ("get", "/ready", "200 while requests are welcome.", &[]),
    ("get", "/metrics", "Prometheus metrics.", &[]),
    ("get", "/v1/system/info", "What runs here, and on what.", &[]),
    ("post", "/admin/pause", "Schedules nothing until a resume.", &[]),
    ("post", "/admin/resume", "Goes on.", &[]),
    ("post", "/admin/drain", "Takes no more requests.", &[]),
    ("delete", "/admin/requests/{id}", "Ends the requests that go by this x-request-id.", &[]),
];

fn generator() -> SchemaGenerator {
    SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true).into_generator()
}

fn properties<T: JsonSchema>(all: &mut Map<String, Value>) {
    let schema: Schema = generator().into_root_schema_for::<T>();
    if let Some(Value::Object(properties)) = schema.get("properties") {
        all.extend(properties.clone());
    }
}

/// The keys of a route's body.
fn body(path: &str) -> Option<Map<String, Value>> {
    let mut all = Map::new();
    match path {
        "/v1/chat/completions" | "/apply-template" => {
            properties::<ChatFields>(&mut all);
            properties::<SamplingFields>(&mut all);
        }
        "/v1/completions" => {
            properties::<CompletionFields>(&mut all);
            properties::<SamplingFields>(&mut all);
        }
        "/v1/responses" | "/v1/responses/input_tokens" => properties::<ResponsesFields>(&mut all),
        "/v1/messages" | "/v1/messages/count_tokens" => properties::<MessagesFields>(&mut all),
        "/tokenize" => properties::<TokenizeRequest>(&mut all),
        "/detokenize" => properties::<DetokenizeRequest>(&mut all),
        _ => return None,
    }
    Some(all)
}

fn operation(path: &str, summary: &str, required: &[&str]) -> Value {
    let error = json!({ "description": "What is wrong, and what would work.", "content": { "application/json": { "schema": {
        "type": "object", "properties": { "error": { "type": "object" } } } } } });
    let mut operation = json!({
        "summary": summary,
        "responses": { "200": { "description": "OK" }, "default": error },
    });
    if path.contains("{id}") {
        operation["parameters"] = json!([{ "name": "id", "in": "path", "required": true, "schema": { "type": "string" } }]);
    }
    if let Some(properties) = body(path) {
        let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
        if !required.is_empty() {
            schema["required"] = json!(required);
        }
        operation["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    operation
}

fn openapi() -> Value {
    let mut paths = Map::new();
    for (method, path, summary, required) in ROUTES {
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[method] = operation(path, summary, required);
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "mistral_paged", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": { "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } } },
    })
}

/// The document.
pub async fn document(State(_app): State<Arc<App>>) -> Json<Value> {
    Json(openapi())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The document, to be read.
pub async fn page() -> Html<String> {
    let mut page = String::from(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>mistral_paged: routes</title><style>body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}\
         code{font:14px ui-monospace,monospace}dt{margin-top:.5rem}h2{margin-top:2rem;font-size:1.1rem}</style>\
         <h1>Routes</h1><p>The same for machines: <a href=\"/openapi.json\">/openapi.json</a>.</p>",
    );
    for (method, path, summary, required) in ROUTES {
        let _ = write!(page, "<h2><code>{} {path}</code></h2><p>{}</p>", method.to_uppercase(), escaped(summary));
        let Some(properties) = body(path) else { continue };
        page.push_str("<dl>");
        for (name, schema) in properties {
            let must = if required.contains(&name.as_str()) { " (required)" } else { "" };
            let about = schema["description"].as_str().unwrap_or_default();
            let _ = write!(page, "<dt><code>{name}</code>{must}</dt><dd>{}</dd>", escaped(about));
        }
        page.push_str("</dl>");
    }
    Html(page)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_document_has_every_key_of_a_chat() {
        let document = super::openapi();
        let chat = &document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"];
        for key in ["messages", "max_completion_tokens", "temperature", "stream_options", "logit_bias"] {
            assert!(chat["properties"][key]["description"].is_string(), "{key}");
        }
        assert_eq!(chat["required"][0], "messages");
    }
}
