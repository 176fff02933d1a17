//! Adapters over HTTP: a list for everyone, and loading and unloading for whoever administers, where the operator allows it.

use std::{path::PathBuf, sync::Arc};

use axum::{Extension, Json, extract::State};
use bytes::Bytes;
use engine::{AdapterInfo, EngineError, LoadAdapter};
use openai::ApiError;
use schemars::JsonSchema;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::OfModel;
use crate::{
    app::App,
    auth::{Caller, require_admin},
    errors::{Failure, internal},
    models::Target,
};

/// What `POST /v1/load_lora_adapter` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadBody {
    /// What requests will call it.
    lora_name: String,
    /// A folder with an adapter, or a GGUF file, below the folder that adapters are taken from.
    lora_path: String,
    /// A name of the model that it belongs to, the default one unless given.
    model: Option<String>,
    /// In the place of another of this name.
    #[serde(default)]
    load_inplace: bool,
    /// Only where the name stands for this generation.
    expected_generation: Option<String>,
}

/// What `POST /v1/unload_lora_adapter` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UnloadBody {
    /// What requests call it.
    lora_name: String,
    /// Only where the name stands for this generation.
    expected_generation: Option<String>,
}

fn card(info: &AdapterInfo) -> Value {
    let AdapterInfo { alias, generation, rank, bytes, .. } = info;
    json!({ "id": alias, "object": "lora_adapter", "generation": generation, "rank": rank, "bytes": bytes })
}

/// The adapters that are loaded, and how many more may be, of the model that the address names, or of the default one; of one
/// that is not loaded, those that will be loaded with it.
pub async fn list(State(app): State<Arc<App>>, which: OfModel) -> Result<Json<Value>, Failure> {
    let Target { model, .. } = app.models.find(which.model.as_deref())?;
    let Some(engine) = model.loaded() else {
        let of = |alias: String| json!({ "id": alias, "object": "lora_adapter", "status": "unloaded" });
        let data: Vec<Value> = model.adapters().into_iter().map(of).collect();
        return Ok(Json(json!({ "object": "list", "data": data, "status": null })));
    };
    let status = engine.adapter_status()?;
    let data: Vec<Value> = engine.adapters().iter().map(card).collect();
    let limits = json!({
        "num_adapters": status.num_adapters,
        "max_adapters": status.max_adapters,
        "max_rank": status.max_rank,
        "bytes": status.bytes,
        "max_bytes": status.max_bytes,
    });
    Ok(Json(json!({ "object": "list", "data": data, "status": limits })))
}

/// The folder that adapters are taken from; an error that says how to allow it.
fn root(app: &App, caller: &Caller) -> Result<PathBuf, ApiError> {
    require_admin(caller)?;
    app.config.lora_root.clone().ok_or_else(|| {
        let message = "adapters are not loaded or unloaded over HTTP here: start the server with MISTRAL_PAGED_LORA_ROOT, the folder \
                       that they are taken from";
        ApiError::new(403, "permission_error", "lora_updates_not_allowed", None, message.into())
    })
}

/// A body's keys; those that are null are not there.
pub fn parsed<T: DeserializeOwned>(body: &Bytes) -> Result<T, ApiError> {
    let value = serde_json::from_slice::<Value>(body).and_then(|mut value| {
        if let Value::Object(keys) = &mut value {
            keys.retain(|_, value| !value.is_null());
        }
        serde_json::from_value(value)
    });
    value.map_err(|error| ApiError::invalid("invalid_body", None, format!("the body is not as it must be: {error}")))
}

/// Loads an adapter.
pub async fn load(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Result<Json<Value>, Failure> {
    let root = root(&app, &caller)?;
    let LoadBody { lora_name, lora_path, model, load_inplace, expected_generation } = parsed(&body)?;
    let Target { model, .. } = app.models.find(model.as_deref())?;
    // As a request of the model, which is not unloaded meanwhile.
    let _admission = app.admit(&caller, &model, 1)?;
    app.models.check_alias(&lora_name, &model)?;
    let engine = app.models.ready(&model).await?;
    // Only now: while a model is loaded, others may get adapters.
    let naming = Arc::clone(&app.models.naming).lock_owned().await;
    app.models.check_alias(&lora_name, &model)?;
    let how = LoadAdapter { in_place: load_inplace, expected_generation };
    let loaded = tokio::task::spawn_blocking(move || {
        let _naming = naming;
        let outside = || EngineError::Adapter {
            code: "adapter_file_not_found",
            message: "lora_path is nothing in the folder that adapters are taken from".into(),
        };
        let (root, path) =
            (root.canonicalize().map_err(|_| outside())?, root.join(lora_path).canonicalize().map_err(|_| outside())?);
        // Links within the folder may lead out of it.
        let files = [path.join("adapter_config.json"), path.join("adapter_model.safetensors")];
        let files = files.iter().filter_map(|file| file.canonicalize().ok());
        if path == root || !files.chain([path.clone()]).all(|file| file.starts_with(&root)) {
            return Err(outside());
        }
        engine.load_adapter(&lora_name, &path, &how).map_err(|error| without_path(error, &root))
    });
    let info = loaded.await.map_err(|panic| internal(format!("a defect ended the request: {panic}")))??;
    Ok(Json(card(&info)))
}

/// Clients are not told where the folder lies.
fn without_path(error: EngineError, root: &std::path::Path) -> EngineError {
    match error {
        EngineError::Adapter { code, message } => {
            let root = format!("{}/", root.display());
            EngineError::Adapter { code, message: message.replace(&root, "") }
        }
        error => error,
    }
}

/// Takes an adapter away; answers that run with it go on.
pub async fn unload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Result<Json<Value>, Failure> {
    root(&app, &caller)?;
    let UnloadBody { lora_name, expected_generation } = parsed(&body)?;
    // An alias is of one model only; where it is none's, the default one says so, as it was when it was loaded last.
    let Some(model) = app.models.with_adapter(&lora_name) else {
        let engine = app.models.default().engine()?;
        return Ok(Json(card(&engine.unload_adapter(&lora_name, expected_generation.as_deref())?)));
    };
    // As a request of the model, which is not unloaded meanwhile; who waits for a place hears of its end.
    let _admission = app.admit(&caller, model, 1)?;
    let engine = app.models.ready(model).await?;
    Ok(Json(card(&engine.unload_adapter(&lora_name, expected_generation.as_deref())?)))
}
