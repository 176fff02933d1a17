//! Answers as server-sent events.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use engine::OutputEvent;
use futures_core::Stream;
use openai::{ApiError, response::Usage};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::{
    app::App,
    generate::{Running, failure},
};

/// The form of a route's stream. Each call appends whole frames.
pub trait Frames: Send + Unpin + 'static {
    /// Takes an event of a request; true when it was the answer's last.
    fn push(&mut self, number: usize, event: OutputEvent, out: &mut Vec<u8>) -> bool;

    /// What tells a proxy that a silent stream lives.
    fn keep_alive(&self) -> Bytes {
        Bytes::from_static(b": keep-alive\n\n")
    }

    /// The stream ends with an error.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        data(out, &error.body());
    }
}

/// What the chunks of a stream say of its usage.
pub struct UsageSoFar {
    include: bool,
    prompt_tokens: usize,
    /// By choice of all prompts, its generated tokens; empty unless every chunk has a usage.
    num_tokens: Vec<usize>,
}

impl UsageSoFar {
    /// Of an answer that begins.
    pub fn new(running: &Running) -> Self {
        let delivery = &running.delivery;
        let num_choices = if delivery.continuous_usage { running.num_requests() * running.n_choices } else { 0 };
        Self { include: delivery.include_usage, prompt_tokens: running.num_prompt_tokens(), num_tokens: vec![0; num_choices] }
    }

    /// A choice has come so far.
    pub fn set(&mut self, choice: usize, num_tokens: usize) {
        if let Some(count) = self.num_tokens.get_mut(choice) {
            *count = num_tokens;
        }
    }

    /// What a chunk with text says: nothing, null, or the usage so far.
    #[allow(clippy::option_option, reason = "left out, null, or there")]
    pub fn of_part(&self) -> Option<Option<Usage>> {
        let so_far = || Usage::so_far(self.prompt_tokens, self.num_tokens.iter().sum());
        self.include.then(|| (!self.num_tokens.is_empty()).then(so_far))
    }
}

/// Appends one unnamed frame.
pub fn data(out: &mut Vec<u8>, value: &impl serde::Serialize) {
    out.extend_from_slice(b"data: ");
    // Plain structs are always written.
    serde_json::to_writer(&mut *out, value).unwrap_or_default();
    out.extend_from_slice(b"\n\n");
}

/// Appends one frame with a name.
pub fn named(out: &mut Vec<u8>, name: &str, value: &impl serde::Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\n");
    data(out, value);
}

/// A response whose body is the stream of an answer. It owns the requests: when it is dropped, they are cancelled.
pub fn respond(app: &Arc<App>, running: Running, frames: impl Frames) -> Response {
    let keep_alive = app.config.keep_alive();
    let ended = Box::pin(running.ended(app));
    let stream = EventStream {
        running: Some(running),
        frames,
        silence: Box::pin(sleep_until(Instant::now() + keep_alive)),
        keep_alive,
        ended,
    };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(stream)).into_response()
}

struct EventStream<F> {
    /// `None` once the answer is complete.
    running: Option<Running>,
    frames: F,
    silence: Pin<Box<Sleep>>,
    keep_alive: std::time::Duration,
    /// Becomes ready when the answer must end before its time.
    ended: Pin<Box<dyn Future<Output = ApiError> + Send>>,
}

impl<F: Frames> EventStream<F> {
    /// Everything that is there, as frames. A slow reader comes seldom, and gets more at once.
    fn take(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        let Some(running) = &mut self.running else { return Poll::Ready(None) };
        let mut out = Vec::new();
        let events = match running.mailbox.poll(context) {
            Poll::Ready(events) => events,
            Poll::Pending => {
                if let Poll::Ready(why) = self.ended.as_mut().poll(context) {
                    self.frames.fail(&why, &mut out);
                    self.running = None;
                    return Poll::Ready(Some(out));
                }
                return Poll::Pending;
            }
        };
        for (number, event) in merged(events) {
            let error = match event {
                Ok(event) => {
                    running.observed.event(number, &event);
                    match failure(&event) {
                        Some(error) => error,
                        None if self.frames.push(number, event, &mut out) => {
                            self.running = None;
                            return Poll::Ready(Some(out));
                        }
                        None => continue,
                    }
                }
                Err(error) => ApiError::from(error),
            };
            self.frames.fail(&error, &mut out);
            self.running = None;
            return Poll::Ready(Some(out));
        }
        Poll::Ready(Some(out))
    }
}

/// Deltas of a choice that follow each other become one.
fn merged(events: Vec<(usize, engine::Event)>) -> Vec<(usize, engine::Event)> {
    let mut all: Vec<(usize, engine::Event)> = Vec::with_capacity(events.len());
    for (number, event) in events {
        let event = match (event, all.last_mut()) {
            (Ok(event), Some((last_number, Ok(last)))) if *last_number == number => match last.append(event) {
                Ok(()) => continue,
                Err(event) => Ok(*event),
            },
            (event, _) => event,
        };
        all.push((number, event));
    }
    all
}

impl<F: Frames> Stream for EventStream<F> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match self.take(context) {
                Poll::Ready(Some(out)) => {
                    let next = Instant::now() + self.keep_alive;
                    self.silence.as_mut().reset(next);
                    if !out.is_empty() {
                        return Poll::Ready(Some(Ok(out.into())));
                    }
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => break,
            }
        }
        if self.silence.as_mut().poll(context).is_ready() {
            let next = Instant::now() + self.keep_alive;
            self.silence.as_mut().reset(next);
            // The timer has to know of this task again.
            let _ = self.silence.as_mut().poll(context);
            return Poll::Ready(Some(Ok(self.frames.keep_alive())));
        }
        Poll::Pending
    }
}
