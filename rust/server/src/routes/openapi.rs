//! `GET /openapi.json`, made from the structs that read the requests, and `/docs`, which shows it without anybody else's script.

use std::{fmt::Write as _, sync::Arc};

use axum::{Json, extract::State, response::Html};
use openai::{
    anthropic::MessagesFields,
    chat::ChatFields,
    completions::CompletionFields,
    embeddings::{EmbeddingFields, EmbeddingsAnswer},
    rerank::{RerankAnswer, RerankFields},
    response::{Answer, ChatChoice, ModelCard, TextChoice},
    responses::ResponsesFields,
    sampling::SamplingFields,
    text::{DetokenizeRequest, TokenizeRequest},
};
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{
    adapters::{LoadBody, UnloadBody},
    admin::ReIsqBody,
    models::ModelBody,
};
use crate::app::App;

/// Method, path, summary, required keys.
type Route = (&'static str, &'static str, &'static str, &'static [&'static str]);

const ROUTES: [Route; 35] = [
    ("post", "/v1/chat/completions", "Answers a chat.", &["messages"]),
    ("post", "/v1/completions", "Continues texts.", &["prompt"]),
    ("post", "/v1/embeddings", "Makes vectors of texts.", &["input"]),
    ("post", "/v1/rerank", "Scores texts against a query.", &["query", "documents"]),
    ("post", "/v2/rerank", "The same, as Cohere's clients call it.", &["query", "documents"]),
    ("post", "/rerank", "The same, as text-embeddings-inference's and vLLM's clients call it.", &["query", "documents"]),
    ("post", "/v1/responses", "Makes a response.", &["input"]),
    ("get", "/v1/responses/{id}", "A response that was kept.", &[]),
    ("delete", "/v1/responses/{id}", "Forgets a response.", &[]),
    ("post", "/v1/responses/input_tokens", "How many tokens a response's prompt would have.", &["input"]),
    ("post", "/v1/messages", "Answers with a message, in Anthropic's form.", &["messages", "max_tokens"]),
    ("post", "/v1/messages/count_tokens", "How many tokens a message's prompt would have.", &["messages"]),
    ("post", "/v1/audio/transcriptions", "Writes down what is said in a sound, which a form has.", &[]),
    ("get", "/v1/models", "The models.", &[]),
    ("get", "/v1/models/{id}", "A model.", &[]),
    ("post", "/v1/models/unload", "Takes a model out of memory.", &["model_id"]),
    ("post", "/v1/models/reload", "Loads a model again.", &["model_id"]),
    ("post", "/v1/models/status", "Whether a model is loaded.", &["model_id"]),
    ("get", "/v1/lora_adapters", "The adapters.", &[]),
    ("post", "/v1/load_lora_adapter", "Loads an adapter.", &["lora_name", "lora_path"]),
    ("post", "/v1/unload_lora_adapter", "Takes an adapter away.", &["lora_name"]),
    ("post", "/tokenize", "Text, or a chat, to token ids.", &[]),
    ("post", "/detokenize", "Token ids to text.", &["tokens"]),
    ("post", "/apply-template", "What a chat becomes.", &["messages"]),
    ("get", "/tokenizer_info", "The tokenizer's special tokens, and the chat template.", &[]),
    ("get", "/health", "200 while steps go on.", &[]),
    ("get", "/live", "200 while the server's thread answers.", &[]),
    ("get", "/ready", "200 while requests are welcome.", &[]),
    ("get", "/metrics", "Prometheus metrics.", &[]),
    ("get", "/v1/system/info", "What runs here, and on what.", &[]),
    ("post", "/re_isq", "Quantizes the weights anew.", &["ggml_type"]),
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
        "/v1/embeddings" => properties::<EmbeddingFields>(&mut all),
        "/v1/rerank" | "/v2/rerank" | "/rerank" => properties::<RerankFields>(&mut all),
        "/v1/responses" | "/v1/responses/input_tokens" => properties::<ResponsesFields>(&mut all),
        "/v1/messages" | "/v1/messages/count_tokens" => properties::<MessagesFields>(&mut all),
        "/v1/load_lora_adapter" => properties::<LoadBody>(&mut all),
        "/v1/unload_lora_adapter" => properties::<UnloadBody>(&mut all),
        "/v1/models/unload" | "/v1/models/reload" | "/v1/models/status" => properties::<ModelBody>(&mut all),
        "/re_isq" => properties::<ReIsqBody>(&mut all),
        "/tokenize" => properties::<TokenizeRequest>(&mut all),
        "/detokenize" => properties::<DetokenizeRequest>(&mut all),
        _ => return None,
    }
    Some(all)
}

/// The form of a route's answer, in its content type.
fn answer(path: &str) -> Value {
    let schema = match path {
        "/v1/chat/completions" => response_schema::<Answer<'_, ChatChoice>>(),
        "/v1/completions" => response_schema::<Answer<'_, TextChoice>>(),
        "/v1/embeddings" => response_schema::<EmbeddingsAnswer>(),
        "/v1/rerank" | "/v2/rerank" | "/rerank" => response_schema::<RerankAnswer>(),
        "/v1/models/{id}" => response_schema::<ModelCard>(),
        "/metrics" => return json!({ "text/plain": { "schema": { "type": "string" } } }),
        _ => json!({ "type": "object" }),
    };
    let mut content = json!({ "application/json": { "schema": schema } });
    if matches!(path, "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages") {
        let event = json!({ "data": { "type": "string" }, "event": { "type": "string" } });
        content["text/event-stream"] = json!({ "schema": { "type": "object", "properties": event, "required": ["data"] } });
    }
    content
}

fn response_schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true).for_serialize();
    let mut schema = json!(settings.into_generator().into_root_schema_for::<T>());
    if let Value::Object(schema) = &mut schema {
        schema.shift_remove("$schema");
    }
    schema
}

/// The form of an error: OpenAI's, below `/v1/messages` Anthropic's.
fn error(path: &str) -> Value {
    let text = json!({ "type": "string" });
    let schema = if path.starts_with("/v1/messages") {
        let error = json!({ "type": "object", "properties": { "type": text, "message": text }, "required": ["type", "message"] });
        json!({
            "type": "object",
            "properties": { "type": { "const": "error" }, "error": error, "request_id": text },
            "required": ["type", "error", "request_id"],
        })
    } else {
        let properties = json!({ "message": text, "type": text, "param": { "type": ["string", "null"] }, "code": text });
        let error = json!({ "type": "object", "properties": properties, "required": ["message", "type", "param", "code"] });
        json!({ "type": "object", "properties": { "error": error }, "required": ["error"] })
    };
    json!({ "description": "What is wrong, and what would work.", "content": { "application/json": { "schema": schema } } })
}

fn operation((method, path, summary, required): Route, vocab_size: usize) -> Value {
    let mut operation = json!({
        "operationId": operation_id(method, path),
        "summary": summary,
        "responses": { "200": { "description": "OK", "content": answer(path) }, "default": error(path) },
    });
    if path == "/health" || path == "/ready" {
        let object = json!({ "application/json": { "schema": { "type": "object" } } });
        operation["responses"]["503"] = json!({ "description": "The status says why not.", "content": object });
    }
    let link = |method, path, id| json!({ "operationId": operation_id(method, path), "parameters": { "id": id } });
    if path == "/v1/responses" {
        let link = |method| link(method, "/v1/responses/{id}", "$response.body#/id");
        operation["responses"]["200"]["links"] = json!({ "read": link("get"), "forget": link("delete") });
    }
    if path == "/v1/models" {
        operation["responses"]["200"]["links"] = json!({ "read": link("get", "/v1/models/{id}", "$response.body#/data/0/id") });
    }
    if path.contains("{id}") {
        let schema = json!({ "type": "string", "minLength": 1 });
        operation["parameters"] = json!([{ "name": "id", "in": "path", "required": true, "schema": schema }]);
    }
    if let Some(mut properties) = body(path) {
        for (name, property) in &mut properties {
            bound(property, vocab_size);
            if required.contains(&name.as_str()) {
                forbid_null(property);
            }
        }
        let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": { "type": "null" } });
        if !required.is_empty() {
            schema["required"] = json!(required);
        }
        operation["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    operation
}

/// Such as `post_v1_chat_completions`.
fn operation_id(method: &str, path: &str) -> String {
    format!("{method}{}", path.replace(['/', '-'], "_").replace(['{', '}'], ""))
}

/// Says how large an integer may be, which its format only implies: all of 32 bits without a sign are token ids.
fn bound(schema: &mut Value, vocab_size: usize) {
    match schema {
        Value::Object(object) => {
            let (least, most) = match object.get("format").and_then(Value::as_str) {
                Some("uint") => (json!(0), json!(u64::MAX)),
                Some("uint32") => (json!(0), json!(vocab_size.saturating_sub(1))),
                Some("int32") => (json!(i32::MIN), json!(i32::MAX)),
                Some("int64") => (json!(i64::MIN), json!(i64::MAX)),
                Some("float") => (json!(f32::MIN), json!(f32::MAX)),
                _ => return object.values_mut().for_each(|value| bound(value, vocab_size)),
            };
            object.shift_remove("format");
            if !object.contains_key("exclusiveMinimum") {
                object.entry("minimum").or_insert(least);
            }
            object.entry("maximum").or_insert(most);
        }
        Value::Array(values) => values.iter_mut().for_each(|value| bound(value, vocab_size)),
        _ => {}
    }
}

/// A key that must be there is not null.
fn forbid_null(schema: &mut Value) {
    if let Some(Value::Array(kinds)) = schema.get_mut("type") {
        kinds.retain(|kind| kind != "null");
    }
    if let Some(Value::Array(schemas)) = schema.get_mut("anyOf") {
        schemas.retain(|schema| schema["type"] != "null");
    }
}

/// For a model with so many logits, and with so many tokens that have a text.
fn openapi(vocab_size: usize, num_texts: usize) -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let (method, path, ..) = route;
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[method] = operation(route, if path == "/detokenize" { num_texts } else { vocab_size });
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "mistral_paged", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": { "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } } },
    })
}

/// The document.
pub async fn document(State(app): State<Arc<App>>) -> Json<Value> {
    // The bounds of the default model, where they are known.
    let sizes = app.models.default().engine().map(|engine| (engine.vocab_size(), engine.tokenizer().vocab_size()));
    let (vocab_size, num_texts) = sizes.unwrap_or((u32::MAX as usize, u32::MAX as usize));
    Json(openapi(vocab_size, num_texts))
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
        let document = super::openapi(512, 500);
        let chat = &document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"];
        for key in ["messages", "max_completion_tokens", "temperature", "stream_options", "logit_bias"] {
            assert!(chat["properties"][key]["description"].is_string(), "{key}");
        }
        assert_eq!(chat["required"][0], "messages");
        assert_eq!(chat["properties"]["messages"]["type"], "array");
        assert_eq!(chat["properties"]["stop_token_ids"]["items"]["maximum"], 511);
        let texts = &document["paths"]["/detokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(texts["properties"]["tokens"]["items"]["maximum"], 499);
    }
}
