//! Text to tokens and back, without generation.

use std::sync::Arc;

use axum::{Extension, Json, body::Body, extract::State, http::HeaderMap};
use engine::{EngineError, GenerationRequest, Prompt, RenderOptions};
use openai::{
    ApiError, Generation,
    chat::ChatRequest,
    messages,
    text::{DetokenizeRequest, TokenizeRequest},
};
use serde_json::{Map, Value, json};

use super::{OfModel, blocking, body};
use crate::{
    app::App,
    auth::Caller,
    errors::Failure,
    models::{Model, Target},
    seeing,
};

/// `POST /tokenize`.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<Value>, Failure> {
    let request = TokenizeRequest::parse(&body(&app, &headers, bytes).await?)?;
    let Target { model, .. } = app.target(&caller, request.model.as_deref(), None).await?;
    let engine = model.engine()?;
    let tokens = engine.clone();
    let add_special = request.add_special_tokens.or(request.add_special);
    let ids = if let Some(chat) = request.messages {
        let (chat, turn) = seeing::place(&app, &model, messages::parse(chat, &model.known()?.context)?).await?;
        let extra = request.chat_template_kwargs.unwrap_or_default();
        messages::check_template_kwargs(&extra)?;
        let continue_final_message = request.continue_final_message.unwrap_or(false);
        let options = RenderOptions {
            add_generation_prompt: request.add_generation_prompt.unwrap_or(!continue_final_message),
            continue_final_message,
            extra,
            ..RenderOptions::default()
        };
        blocking(move || {
            let _turn = turn;
            tokens.tokenize_chat(&chat, &options)
        })
        .await?
    } else {
        // vLLM adds special tokens to a prompt, llama.cpp none to a content.
        let adds = add_special.unwrap_or(request.prompt.is_some());
        let text = request.prompt.or(request.content).unwrap_or_default();
        blocking(move || tokens.tokenize_text(&text, adds)).await?
    };
    let tokenizer = engine.tokenizer();
    let mut answer = Map::new();
    answer.insert("count".into(), ids.len().into());
    answer.insert("max_model_len".into(), engine.max_sequence_length().into());
    if request.return_token_strs == Some(true) {
        answer.insert("token_strs".into(), ids.iter().map(|id| tokenizer.token_text(*id)).collect());
    }
    let tokens = if request.with_pieces == Some(true) {
        let piece = |id: &u32| match std::str::from_utf8(tokenizer.token_bytes(*id)) {
            Ok(text) => json!({ "id": id, "piece": text }),
            Err(_) => json!({ "id": id, "piece": tokenizer.token_bytes(*id) }),
        };
        ids.iter().map(piece).collect()
    } else {
        json!(ids)
    };
    answer.insert("tokens".into(), tokens);
    Ok(Json(answer.into()))
}

/// `POST /detokenize`: the text as `prompt` (vLLM) and as `content` (llama.cpp).
pub async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<Value>, Failure> {
    let request = DetokenizeRequest::parse(&body(&app, &headers, bytes).await?)?;
    let engine = app.target(&caller, request.model.as_deref(), None).await?.model.engine()?;
    let tokens = request.tokens.ok_or_else(|| ApiError::missing("tokens", "give a list of token ids"))?;
    let vocab_size = engine.tokenizer().vocab_size();
    if let Some(i) = tokens.iter().position(|id| *id as usize >= vocab_size) {
        let message = format!("is {}; it must be below {vocab_size}, the size of the vocabulary", tokens[i]);
        return Err(ApiError::value(format!("tokens[{i}]"), message).into());
    }
    let text = blocking(move || engine.detokenize_text(&tokens, false)).await?;
    Ok(Json(json!({ "prompt": text, "content": text })))
}

/// `POST /apply-template`: what a chat becomes.
pub async fn apply_template(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<Value>, Failure> {
    let request = ChatRequest::parse(&body(&app, &headers, bytes).await?)?;
    let Target { model, .. } = app.target(&caller, request.chat.model.as_deref(), None).await?;
    let (prompt, tokens) = render(&app, &model, request.into_generation(&model.known()?.context)?).await?;
    Ok(Json(json!({ "prompt": prompt, "count": tokens.len(), "tokens": tokens })))
}

/// The prompt of a chat and its tokens, after all the checks of a chat that is answered.
pub async fn render(app: &App, model: &Model, mut generation: Generation) -> Result<(String, Vec<u32>), ApiError> {
    let turn = seeing::place_all(app, model, &mut generation.requests).await?;
    let engine = model.engine()?;
    blocking(move || {
        let _turn = turn;
        let request = generation.requests.into_iter().next();
        let Some(GenerationRequest { prompt: Prompt::Chat { messages, options }, sampling, .. }) = request else {
            return Err(EngineError::Internal("a chat without messages".into()));
        };
        engine.check_sampling(&sampling)?;
        engine.render_chat(&messages, &options)
    })
    .await
}

/// `GET /tokenizer_info`.
pub async fn tokenizer_info(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    which: OfModel,
) -> Result<Json<Value>, Failure> {
    let engine = app.target(&caller, which.model.as_deref(), None).await?.model.engine()?;
    let tokenizer = engine.tokenizer();
    let special = tokenizer.special_tokens();
    Ok(Json(json!({
        "vocab_size": tokenizer.vocab_size(),
        "eos_token": special.eos_token,
        "bos_token": special.bos_token,
        "pad_token": special.pad_token,
        "unk_token": special.unk_token,
        "eos_token_ids": tokenizer.eos_ids(),
        "chat_template": engine.chat_template(),
        "max_model_len": engine.max_sequence_length(),
    })))
}
