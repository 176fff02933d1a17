//! The page at `/ui`, and what it shows: the pool, the requests and the latencies, four times a second while somebody watches.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use axum::{
    body::Body,
    extract::{Path, State},
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use engine::{BlockUse, Engine, PoolSnapshot, RequestStatus};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::OfModel;
use crate::{
    app::App,
    errors::{Failure, not_found},
    metrics::{ModelMetrics, fragmented_bytes},
    models::{Model, Target},
    streaming::data,
};

const PERIOD: Duration = Duration::from_millis(250);
const PAGE: &str = include_str!("../../ui/index.html");
const ASSETS: [(&str, &str, &str); 2] = [
    ("page.js", "text/javascript; charset=utf-8", include_str!("../../ui/page.js")),
    ("page.css", "text/css; charset=utf-8", include_str!("../../ui/page.css")),
];

/// The page itself. It may load nothing from elsewhere.
pub async fn page() -> Response {
    let policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                  base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, PAGE).into_response()
}

/// Its script and its style.
pub async fn asset(Path(name): Path<String>) -> Response {
    match ASSETS.iter().find(|(own, _, _)| *own == name) {
        Some((_, kind, text)) => {
            let headers = [
                (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
                (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            ];
            (headers, *text).into_response()
        }
        None => Failure(not_found(&format!("/ui/assets/{name}"))).into_response(),
    }
}

/// What the watchers see, made once for all of them.
pub struct Watch {
    watchers: AtomicUsize,
    is_publishing: AtomicBool,
    frame: watch::Sender<Bytes>,
}

impl Default for Watch {
    fn default() -> Self {
        Self { watchers: AtomicUsize::new(0), is_publishing: AtomicBool::new(false), frame: watch::channel(Bytes::new()).0 }
    }
}

/// A stream of what happens in a model.
pub async fn events(State(app): State<Arc<App>>, which: OfModel) -> Result<Response, Failure> {
    let Target { model, .. } = app.models.find(which.model.as_deref())?;
    let mut frames = model.watch.frame.subscribe();
    model.watch.watchers.fetch_add(1, Ordering::SeqCst);
    if !model.watch.is_publishing.swap(true, Ordering::SeqCst) {
        tokio::spawn(publish(Arc::clone(&model), app.abort.subscribe()));
    }
    let watcher = Watcher(model);
    let (sender, receiver) = tokio::sync::mpsc::channel(2);
    tokio::spawn(async move {
        let _watcher = watcher;
        while frames.changed().await.is_ok() {
            let frame = frames.borrow_and_update().clone();
            if sender.send(frame).await.is_err() {
                return;
            }
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    Ok((headers, Body::from_stream(Frames(receiver))).into_response())
}

struct Frames(tokio::sync::mpsc::Receiver<Bytes>);

impl Stream for Frames {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}

/// One who watches, until it goes.
struct Watcher(Arc<Model>);

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.watch.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Publishes as long as somebody watches.
async fn publish(model: Arc<Model>, mut abort: watch::Receiver<bool>) {
    let mut beat = tokio::time::interval(PERIOD);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while model.watch.watchers.load(Ordering::SeqCst) > 0 {
        tokio::select! {
            _ = beat.tick() => {}
            _ = abort.wait_for(|is_aborted| *is_aborted) => break,
        }
        let mut frame = Vec::new();
        match model.loaded() {
            Some(engine) => {
                let asked = engine.clone();
                match tokio::task::spawn_blocking(move || asked.pool_snapshot()).await {
                    Ok(Ok(snapshot)) => data(&mut frame, &view(&model, &engine, &snapshot)),
                    // It is being unloaded.
                    Ok(Err(_)) if model.loaded().is_none() => continue,
                    _ => break,
                }
            }
            None => data(&mut frame, &json!({ "model": model.id(), "status": model.status() })),
        }
        model.watch.frame.send_replace(frame.into());
    }
    // All of it is on one thread, so nobody came between the last look and this.
    model.watch.is_publishing.store(false, Ordering::SeqCst);
}

/// A snapshot as the page gets it. Runs of blocks are pairs of use and length: 0 free, 1 cached, 2 shared, and from 3 on held by
/// the request with that number less 3.
pub fn view(model: &Model, engine: &Engine, snapshot: &PoolSnapshot) -> Value {
    let stats = &snapshot.stats;
    let token_bytes = engine.kv_cache_bytes() as f64 / (stats.tokens_total.max(1)) as f64;
    let naive_request_bytes = engine.context_length() as f64 * token_bytes;
    let requests: Vec<Value> = snapshot
        .requests
        .iter()
        .map(|request| {
            json!({
                "id": request.id.0,
                "status": status_name(request.status),
                "tokens": request.num_tokens,
                "prompt_tokens": request.num_prompt_tokens,
                "cached_tokens": request.num_cached_tokens,
                "computed_tokens": request.num_computed_tokens,
                "blocks": request.num_blocks,
                "preemptions": request.preemptions,
            })
        })
        .collect();
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    json!({
        "time": time.as_secs_f64(),
        "model": model.id(),
        "status": model.status(),
        "stats": {
            "blocks_total": stats.blocks_total,
            "blocks_used": stats.blocks_used,
            "blocks_cached": stats.blocks_cached,
            "blocks_free": stats.blocks_free,
            "blocks_shared": stats.blocks_shared,
            "block_size": stats.block_size,
            "requests_running": stats.requests_running,
            "requests_waiting": stats.requests_waiting,
            "prefix_queried_tokens": stats.prefix_queried_tokens,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "preemptions": stats.preemptions,
            "recomputed_tokens": stats.recomputed_tokens,
            "steps": stats.steps,
            "paused": stats.paused,
        },
        "tier": { "blocks": stats.tier.blocks, "bytes": stats.tier.blocks as u64 * stats.tier.bytes_per_block },
        "misses": ModelMetrics::misses(stats),
        "block_bytes": engine.block_bytes(),
        "fragmented_bytes": fragmented_bytes(stats, engine.block_bytes()),
        "held_bytes": stats.blocks_used as u64 * engine.block_bytes(),
        "naive_bytes": stats.requests_running as f64 * naive_request_bytes,
        "naive_request_bytes": naive_request_bytes,
        "pool_bytes": engine.kv_cache_bytes(),
        "max_seqs": model.config.max_seqs,
        "runs": runs(&snapshot.blocks),
        "requests": requests,
        "first_token": model.metrics.first_token_buckets(),
        "between_tokens": model.metrics.between_tokens_buckets(),
        "generated_tokens": model.metrics.generated_tokens(),
    })
}

fn status_name(status: RequestStatus) -> &'static str {
    match status {
        RequestStatus::Waiting => "waiting",
        RequestStatus::Running => "running",
        RequestStatus::Preempted => "preempted",
        RequestStatus::Kept => "kept",
    }
}

fn runs(blocks: &[BlockUse]) -> Vec<[u64; 2]> {
    let mut runs: Vec<[u64; 2]> = Vec::new();
    for block in blocks {
        let code = match block {
            BlockUse::Free => 0,
            BlockUse::Cached => 1,
            BlockUse::Shared => 2,
            BlockUse::Held(request) => u64::from(*request) + 3,
        };
        match runs.last_mut() {
            Some([last, length]) if *last == code => *length += 1,
            _ => runs.push([code, 1]),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_one_use_are_one_run() {
        use BlockUse::{Cached, Free, Held, Shared};
        let blocks = [Held(0), Held(0), Held(2), Shared, Cached, Free, Free, Free];
        assert_eq!(runs(&blocks), [[3, 2], [5, 1], [2, 1], [1, 1], [0, 3]]);
    }
}
