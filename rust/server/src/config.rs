//! How a server is set up.

use std::{num::NonZeroU32, path::PathBuf, time::Duration};

use serde::Deserialize;

use crate::{StartError, auth::Keys, models::DEFAULT};

/// Settings of a server. Each has the value of its documentation unless given.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Address to listen on, `127.0.0.1`, or `unix:` and a path.
    pub host: String,
    /// Port, 1234; 0 takes a free one.
    pub port: u16,
    /// The models, at least one.
    pub models: Vec<ModelConfig>,
    /// A name of the one that is also called `default`, the first unless given.
    pub default_model: Option<String>,
    /// Models that are loaded at once at most; without limit unless given.
    pub max_loaded_models: Option<usize>,
    /// Keys that clients must have; none guard nothing.
    pub keys: Vec<KeyConfig>,
    /// Choices of a model that wait beyond its `max_seqs` at most, 512.
    pub max_queued: usize,
    /// Tokens of waiting prompts of a model at most, beside which no other prompt may wait; without limit unless given.
    pub max_queued_tokens: Option<usize>,
    /// Bytes of a body at most, 16 MiB.
    pub max_body_bytes: usize,
    /// Connections at most, 1024.
    pub max_connections: usize,
    /// Seconds after which every request ends with the text that it has; without limit unless given.
    pub request_timeout: Option<f64>,
    /// Seconds that running requests have after a SIGTERM, 30.
    pub shutdown_timeout: f64,
    /// Milliseconds between comments on a silent stream, 10000.
    pub keep_alive_ms: u64,
    /// Origins whose pages may call the server from a browser; `*` is any.
    pub cors_origins: Vec<String>,
    /// One line a request to standard error.
    pub access_log: AccessLog,
    /// Health checks are logged as well.
    pub access_log_health: bool,
    /// The page at `/ui`.
    pub ui: bool,
    /// File with the secret that the salts of tenants are made with, the same on every replica; drawn at random unless given.
    pub cache_salt_secret: Option<PathBuf>,
    /// Where adapters are taken from that are loaded over HTTP; nowhere unless given.
    pub lora_root: Option<PathBuf>,
    /// The folder that images may be read from by `file:` URLs, if any.
    pub allowed_local_media_path: Option<PathBuf>,
    /// Hosts that images may be fetched from; none unless given.
    pub allowed_media_domains: Vec<String>,
    /// `/metrics`.
    pub metrics: bool,
    /// Where a collector takes OpenTelemetry's traces, `http://HOST:PORT`; nowhere unless given.
    pub otlp_endpoint: Option<String>,
    /// What `/v1/system/info` tells beside the engine's own lines.
    pub system: serde_json::Value,
}

/// A model of a server.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Its id, as responses give it.
    pub model_id: String,
    /// Further names that requests may use for it.
    pub served_model_names: Vec<String>,
    /// Choices that run at once, the engine's own limit.
    pub max_seqs: usize,
    /// Images and sounds of a request at most, 16.
    pub max_num_images: usize,
    /// Seconds without a request after which it is unloaded; never unless given.
    pub idle_unload: Option<f64>,
}

/// The form of the access log.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum AccessLog {
    /// None.
    Off,
    /// One line of words.
    #[default]
    Text,
    /// One JSON object.
    Json,
}

/// A key, and whose it is.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyConfig {
    /// The key itself, or else its hash.
    pub key: Option<String>,
    /// The SHA-256 of the key's bytes, as 64 hexadecimal digits: then nobody who reads the settings knows the key.
    pub sha256: Option<String>,
    /// Whose it is: tenants take turns and share no cached blocks.
    pub tenant: Option<String>,
    /// How much longer its tenant's turns are than those of others, 1 unless given; needs a tenant.
    pub weight: Option<NonZeroU32>,
    /// Choices of its requests that run or wait at most; as many as the server takes unless given.
    pub max_in_flight: Option<usize>,
    /// May pause, resume, drain and cancel.
    #[serde(default)]
    pub admin: bool,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self { model_id: "default".into(), served_model_names: Vec::new(), max_seqs: 32, max_num_images: 16, idle_unload: None }
    }
}

impl ModelConfig {
    /// The id, and the further names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.model_id.as_str()).chain(self.served_model_names.iter().map(String::as_str))
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 1234,
            models: vec![ModelConfig::default()],
            default_model: None,
            max_loaded_models: None,
            keys: Vec::new(),
            max_queued: 512,
            max_queued_tokens: None,
            max_body_bytes: 16 << 20,
            max_connections: 1024,
            request_timeout: None,
            shutdown_timeout: 30.0,
            keep_alive_ms: 10_000,
            cors_origins: Vec::new(),
            access_log: AccessLog::default(),
            access_log_health: false,
            ui: true,
            cache_salt_secret: None,
            lora_root: None,
            allowed_local_media_path: None,
            allowed_media_domains: Vec::new(),
            metrics: true,
            otlp_endpoint: None,
            system: serde_json::Value::Null,
        }
    }
}

impl ServerConfig {
    /// Whether the keys can be honoured, the file with the secret of salts, and the models' names: what can be told before
    /// anything is loaded.
    pub fn check(&self) -> Result<(), StartError> {
        Keys::new(&self.keys, self.cache_salt_secret.as_deref())?;
        self.check_models().map(drop)
    }

    /// Which model is the default one; an error where a name is of two.
    pub(crate) fn check_models(&self) -> Result<usize, StartError> {
        let default = match &self.default_model {
            None => 0,
            Some(name) => self.models.iter().position(|model| model.names().any(|own| own == name)).ok_or_else(|| {
                let ids: Vec<&str> = self.models.iter().map(|model| model.model_id.as_str()).collect();
                StartError(format!("the default model {name:?} is not served; there are {}", ids.join(", ")))
            })?,
        };
        if default >= self.models.len() {
            return Err(StartError("there is no model to serve".into()));
        }
        if self.max_loaded_models == Some(0) {
            return Err(StartError(
                "max_loaded_models is 0, and no model could be loaded: give at least 1, or leave it out".into(),
            ));
        }
        for (number, model) in self.models.iter().enumerate() {
            for name in model.names() {
                if self.models[..number].iter().any(|other| other.names().any(|own| own == name)) {
                    return Err(StartError(format!("two models are called {name:?}: give one an alias of its own")));
                }
                if number != default && [DEFAULT, ""].contains(&name) {
                    return Err(StartError(format!(
                        "{name:?} is what {:?} is called, the default model: give another model another name",
                        self.models[default].model_id
                    )));
                }
            }
        }
        Ok(default)
    }

    /// The path of a Unix socket, when the host is one.
    pub fn unix_path(&self) -> Option<PathBuf> {
        self.host.strip_prefix("unix:").map(PathBuf::from)
    }

    /// Between comments on a silent stream.
    pub fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms.max(1))
    }
}
