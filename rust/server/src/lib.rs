//! HTTP over the engine: one thread with tokio and axum, a small pool for templates and tokenizing, and the engine's own thread.
//!
//! A request's way: [`connection`] accepts, [`routes`] reads the body with the `openai` crate, [`generate`] submits it, and the
//! engine's events come back through a [`mailbox`], one wake-up a step for all. The response owns the request: when a client
//! goes, its response is dropped, and with it the request and its blocks.

mod access_log;
mod app;
mod auth;
mod cancels;
mod config;
mod connection;
mod errors;
mod generate;
mod mailbox;
pub mod media;
mod metrics;
mod models;
mod routes;
mod seeing;
mod store;
mod streaming;
mod traces;

use std::sync::Arc;

pub use app::App;
pub use config::{AccessLog, KeyConfig, ModelConfig, ServerConfig};
pub use connection::Exit;
pub use models::Host;

/// What can stop a server from starting.
#[derive(Debug)]
pub struct StartError(pub String);

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StartError {}

/// Every route of a server, to be called with or without a socket, within the tokio runtime that calls this.
pub fn router(app: &Arc<App>) -> axum::Router {
    tokio::spawn(Arc::clone(&app.bell).run());
    for model in app.models.iter() {
        tokio::spawn(Arc::clone(model).watch_idleness());
    }
    routes::router(app)
}

/// Serves models, one for each of the settings, until a SIGTERM or SIGINT; `listening` is called with the address
/// once connections are accepted.
pub fn serve(hosts: Vec<Arc<dyn Host>>, config: ServerConfig, listening: impl FnOnce(&str)) -> Result<Exit, StartError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Tokenizing is short, and the cores belong to the models. One may be loaded while the others' requests are tokenized.
        .max_blocking_threads(4 + seeing::MAX_AT_ONCE + hosts.len())
        .thread_name("mistral_paged-http")
        .build()
        .map_err(|error| StartError(format!("the server's runtime cannot start: {error}")))?;
    let app = Arc::new(App::new(hosts, config)?);
    let result = runtime.block_on(connection::run(Arc::clone(&app), listening));
    // What still tokenizes is not waited for.
    runtime.shutdown_background();
    if let Some(traces) = &app.traces {
        traces.finish();
    }
    result
}
