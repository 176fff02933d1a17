//! Bodies of requests, and requests to every route.

#[path = "../../../openai/tests/common/keys.rs"]
mod keys;

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    http::{Request, Response},
};
use engine::{CpuOptions, Engine, EngineConfig, MemoryGpuConfig, ModelSource, PagedAttentionConfig};
use http_body_util::BodyExt;
use openai::{
    ApiError, Generation, ModelContext,
    anthropic::MessagesRequest,
    chat::ChatRequest,
    completions::CompletionRequest,
    responses::ResponsesRequest,
    text::{DetokenizeRequest, TokenizeRequest},
};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use server::{App, ServerConfig};
use tower::ServiceExt;

use self::keys::KEYS;
use crate::{
    files::{Files, golden_dir},
    grammar::{self, damage, damaged, number, object, pick, text},
    kinds::Outcome,
};

/// Routes that take a body, and others.
const ROUTES: [&str; 28] = [
    "/v1/lora_adapters",
    "/v1/load_lora_adapter",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/responses/resp_1",
    "/v1/models",
    "/v1/models/default",
    "/health",
    "/metrics",
    "/admin/resume",
    "/admin/requests/a",
    "/v1/embeddings",
    "/openapi.json",
    "/tokenizer_info",
    "/v1/system/info",
    "/nowhere",
    "/ui/assets/../x",
];

fn message(rng: &mut ChaCha8Rng) -> Value {
    let role = pick(rng, &["user", "assistant", "system", "developer", "tool", "nobody", ""]).to_owned();
    let content = match rng.random_range(0..6) {
        0 => grammar::value(rng, 2),
        1 => json!([{ "type": pick(rng, &["text", "input_text", "image_url", "output_text", ""]), "text": text(rng) }]),
        _ => json!(text(rng)),
    };
    let mut message = json!({ "role": role, "content": content });
    if rng.random_bool(0.1) {
        message[text(rng)] = grammar::value(rng, 2);
    }
    message
}

fn likely(rng: &mut ChaCha8Rng, key: &str) -> Value {
    if rng.random_bool(0.15) {
        return grammar::value(rng, 3);
    }
    match key {
        "model" => json!(pick(rng, &["default", "tiny", "nobody", ""])),
        "messages" => (0..rng.random_range(0..4)).map(|_| message(rng)).collect(),
        "input" if rng.random() => (0..rng.random_range(0..3)).map(|_| message(rng)).collect(),
        "prompt" if rng.random_bool(0.3) => (0..rng.random_range(0..5)).map(|_| json!(rng.random_range(0..600))).collect(),
        "prompt" if rng.random_bool(0.2) => json!([text(rng), text(rng)]),
        "tokens" | "stop_token_ids" | "allowed_token_ids" => {
            (0..rng.random_range(0..5)).map(|_| json!(rng.random_range(0..520))).collect()
        }
        "prompt" | "input" | "content" | "suffix" | "system" | "instructions" | "cache_salt" | "user" => json!(text(rng)),
        "stop" | "stop_sequences" | "dry_sequence_breakers" => json!([text(rng), text(rng)]),
        "stream" | "echo" | "ignore_eos" | "add_special_tokens" | "truncate_sequence" | "continue_final_message" | "store" => {
            json!(rng.random::<bool>())
        }
        "max_tokens" | "max_completion_tokens" | "max_output_tokens" => json!(rng.random_range(0..12)),
        "n" | "best_of" | "top_logprobs" | "logprobs" => json!(rng.random_range(0..4)),
        "logit_bias" => json!({ (rng.random_range(0..600).to_string()): number(rng) }),
        "stream_options" => json!({ "include_usage": rng.random::<bool>() }),
        "chat_template_kwargs" | "metadata" => json!({ (text(rng)): grammar::leaf(rng) }),
        "temperature" | "top_p" | "min_p" => json!(rng.random_range(0.0..1.2)),
        _ => {
            if rng.random() {
                number(rng)
            } else {
                grammar::leaf(rng)
            }
        }
    }
}

/// A body that may be one of any route.
fn body(rng: &mut ChaCha8Rng) -> Value {
    let mut body = object(rng, 5, &KEYS, likely);
    // Mostly what the route needs is there.
    if rng.random_bool(0.8) {
        let needed = pick(rng, &["messages", "prompt", "input"]);
        body[needed] = likely(rng, needed);
    }
    if rng.random_bool(0.7) {
        body["max_tokens"] = json!(rng.random_range(1..8));
    }
    if rng.random_bool(0.1) {
        damage(&mut body, rng);
    }
    body
}

fn written(rng: &mut ChaCha8Rng) -> Vec<u8> {
    let body = body(rng).to_string();
    match rng.random_range(0..40) {
        0 => damaged(&body, rng).into_bytes(),
        1 => {
            let mut bytes = body.into_bytes();
            let at = rng.random_range(0..bytes.len());
            bytes[at] = rng.random();
            bytes
        }
        2 => "[".repeat(rng.random_range(1..2000)).into_bytes(),
        _ => body.into_bytes(),
    }
}

pub struct Bodies {
    engine: Engine,
    router: Router,
    runtime: tokio::runtime::Runtime,
}

impl Bodies {
    pub fn new(_files: &Files) -> Self {
        let source = ModelSource::HuggingFace { path: golden_dir().join("text/llama"), tokenizer_json: None };
        let config = EngineConfig {
            paged_attention: PagedAttentionConfig {
                block_size: Some(8),
                mem_gpu: Some(MemoryGpuConfig::ContextSize(64)),
                ..PagedAttentionConfig::default()
            },
            cpu: CpuOptions { num_threads: Some(1), ..CpuOptions::default() },
            ..EngineConfig::default()
        };
        let engine = Engine::load(&source, &config, &|_| {}).expect("a golden model loads");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let models = vec![server::ModelConfig { model_id: "tiny".into(), ..server::ModelConfig::default() }];
        let server = ServerConfig { models, access_log: server::AccessLog::Off, ..ServerConfig::default() };
        let app = Arc::new(App::new(vec![Arc::new(engine.clone())], server).expect("a server"));
        let router = runtime.block_on(async { server::router(&app) });
        Self { engine, router, runtime }
    }

    /// The engine that answers.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// A body for every parser, and an answer to the first that takes it.
    pub fn body(&self, rng: &mut ChaCha8Rng) -> Outcome {
        let body = written(rng);
        let context = ModelContext {
            knows_developer: rng.random(),
            media: engine::MediaKind::ALL.into_iter().filter(|_| rng.random()).collect(),
            model_id: "m".into(),
        };
        let parsed: [Result<Option<Generation>, ApiError>; 6] = [
            ChatRequest::parse(&body).and_then(|request| request.into_generation(&context)).map(Some),
            CompletionRequest::parse(&body).and_then(CompletionRequest::into_generation).map(Some),
            MessagesRequest::parse(&body).and_then(|request| request.into_generation(&context)).map(Some),
            ResponsesRequest::parse(&body)
                .and_then(|request| request.input(&context).and_then(|chat| request.generation(chat)))
                .map(Some),
            TokenizeRequest::parse(&body).map(|_| None),
            DetokenizeRequest::parse(&body).map(|_| None),
        ];
        let shown = || String::from_utf8_lossy(&body).into_owned();
        let mut outcome = None;
        for result in parsed {
            match result {
                Err(error) => {
                    check(&error).map_err(|why| format!("{why}: {}", shown()))?;
                    outcome.get_or_insert_with(|| error.code.to_owned());
                }
                Ok(Some(generation)) => {
                    outcome = Some(self.answer(generation, rng).map_err(|why| format!("{why}: {}", shown()))?);
                }
                Ok(None) => {}
            }
        }
        outcome.ok_or_else(|| "no parser said anything".into())
    }

    fn answer(&self, generation: Generation, rng: &mut ChaCha8Rng) -> Outcome {
        for mut request in generation.requests.into_iter().take(2) {
            // How long an answer is, and how many there are, has been tried elsewhere.
            request.sampling.max_tokens = Some(request.sampling.max_tokens.unwrap_or(3).min(rng.random_range(1..10)));
            request.n_choices = request.n_choices.min(3);
            request.best_of = request.best_of.map(|n| n.min(4).max(request.n_choices));
            match self.engine.submit(request).map_err(openai::of_request).map(engine::RequestStream::wait) {
                Ok(Ok(completion)) => {
                    if let Some(why) = completion.failure() {
                        return Err(format!("a request ended: {why}"));
                    }
                }
                Ok(Err(error)) => return Err(format!("a request that was accepted ended with {error:?}")),
                Err(error) => {
                    check(&error)?;
                    return Ok(format!("{} in the engine", error.code));
                }
            }
        }
        Ok("answered".into())
    }

    /// A request to a route: its status, after the answer was read to its end.
    pub fn http(&self, rng: &mut ChaCha8Rng) -> Outcome {
        let route = pick(rng, &ROUTES).to_owned();
        let method = if rng.random_bool(0.85) { "POST" } else { pick(rng, &["GET", "DELETE", "PUT", "OPTIONS", "HEAD"]) };
        let body = written(rng);
        let mut request = Request::builder().method(method).uri(&route).header("host", "localhost");
        if rng.random_bool(0.9) {
            request = request
                .header("content-type", pick(rng, &["application/json", "application/json; charset=utf-8", "text/plain", ""]));
        }
        if rng.random_bool(0.1) {
            let name = pick(rng, &["x-request-id", "authorization", "x-api-key", "origin", "anthropic-version", "accept"]);
            if let Ok(value) = axum::http::HeaderValue::from_bytes(text(rng).as_bytes()) {
                request = request.header(name, value);
            }
        }
        let Ok(request) = request.body(Body::from(body.clone())) else { return Ok("no request".into()) };
        let shown = || format!("{method} {route} {}", String::from_utf8_lossy(&body));
        let (status, said) = self.runtime.block_on(async {
            let response: Response<Body> = self.router.clone().oneshot(request).await.expect("routes never fail");
            let status = response.status().as_u16();
            (status, response.into_body().collect().await.map(http_body_util::Collected::to_bytes))
        });
        let said = said.map_err(|error| format!("the answer broke off: {error}: {}", shown()))?;
        let text = String::from_utf8_lossy(&said);
        if status >= 500 && status != 501 {
            return Err(format!("{status}: {text}: {}", shown()));
        }
        if status >= 400 && !said.is_empty() {
            let value: Value = serde_json::from_str(&text).map_err(|_| format!("{status} without JSON: {text}: {}", shown()))?;
            let error = &value["error"];
            let is_sound = error["message"].as_str().is_some_and(|text| !text.is_empty()) && error["type"].is_string();
            if !is_sound {
                return Err(format!("{status}: {text}: {}", shown()));
            }
            return Ok(format!("{status} {}", error["code"].as_str().unwrap_or("in Anthropic's form")));
        }
        if text.contains("internal_error") {
            return Err(format!("an answer ended with an error: {text}: {}", shown()));
        }
        Ok(status.to_string())
    }
}

/// Whether an error is the client's, and names the key it is about.
fn check(error: &ApiError) -> Result<(), String> {
    let wrong = |why: &str| Err(format!("{why}: {error:?}"));
    if error.status != 400 {
        return wrong("no 400");
    }
    if error.message.is_empty() || error.message.len() > 2048 {
        return wrong("an error without words, or with too many");
    }
    let needs_name = ["unknown_parameter", "unsupported_parameter", "missing_required_parameter", "invalid_messages"];
    match &error.param {
        None if needs_name.contains(&error.code) => wrong("it names no key"),
        Some(param) if error.code != "invalid_messages" => {
            let key: String = param.chars().take_while(|c| *c != '.' && *c != '[').collect();
            if error.message.contains(&key) { Ok(()) } else { wrong("its words do not name the key") }
        }
        _ => Ok(()),
    }
}
