//! A span a request, for an OpenTelemetry collector: OTLP over HTTP with protobuf bodies. Names and attributes are those of
//! OpenTelemetry's conventions for generative AI, and vLLM's where these have none. No word of a prompt or an answer is sent.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant, SystemTime},
};

use axum::http::{HeaderMap, Request, Response, Uri};
use bytes::Bytes;
use engine::{FinishReason, GenerationRequest, OutputEvent, OutputKind, Prompt};
use opentelemetry::{
    Array, Context, KeyValue, StringValue, Value,
    propagation::TextMapPropagator,
    trace::{Span, SpanBuilder, SpanKind, Status, Tracer, TracerProvider},
};
use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{Resource, propagation::TraceContextPropagator, trace::SdkTracerProvider};

use crate::{StartError, auth::Caller};

/// A collector that says nothing for so long is given up for this batch.
const TIMEOUT: Duration = Duration::from_secs(5);
const SERVICE: &str = "mistral_paged";

/// Where spans go: a thread of its own collects and sends them. Those of a collector that cannot be reached are dropped, with one
/// warning.
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: opentelemetry_sdk::trace::SdkTracer,
}

impl Traces {
    /// To the collector at this address, `http://HOST:PORT`, by the path `/v1/traces` unless it has another.
    pub fn new(endpoint: &str) -> Result<Self, StartError> {
        let refused = |why: &str| StartError(format!("--otlp-endpoint {endpoint:?} {why}: give http://HOST:4318"));
        let uri: Uri = endpoint.parse().map_err(|_| refused("is no address"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(refused("is https, for which a collector beside the server is needed")),
            _ => return Err(refused("is no address over HTTP")),
        }
        let path = if uri.path() == "/" { format!("{}/v1/traces", endpoint.trim_end_matches('/')) } else { endpoint.to_owned() };
        let agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).http_status_as_error(false).build();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client { agent: agent.into(), has_failed: AtomicBool::new(false) })
            .with_endpoint(path)
            .build()
            .map_err(|error| refused(&format!("cannot be used ({error})")))?;
        let resource = Resource::builder().with_service_name(SERVICE).build();
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        Ok(Self { tracer: provider.tracer(SERVICE), provider })
    }

    /// What a request's headers `traceparent` and `tracestate` say it is a part of (W3C Trace Context).
    pub fn parent(headers: &HeaderMap) -> Context {
        TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers))
    }

    /// The span of an answer to `request` and its likes, `num_requests` together.
    pub fn begin(&self, caller: &Caller, model: &str, request: &GenerationRequest, num_requests: usize) -> RequestSpan {
        let operation = match (&request.prompt, request.output) {
            (_, OutputKind::Embedding) => "embeddings",
            (Prompt::Chat { .. }, _) => "chat",
            _ => "text_completion",
        };
        let sampling = &request.sampling;
        let mut attributes = vec![
            KeyValue::new("gen_ai.operation.name", operation),
            KeyValue::new("gen_ai.provider.name", SERVICE),
            KeyValue::new("gen_ai.request.model", model.to_owned()),
            KeyValue::new("gen_ai.request.choice.count", request.n_choices as i64),
            KeyValue::new("gen_ai.request.id", caller.request_id.clone()),
        ];
        let given = [
            ("gen_ai.request.max_tokens", sampling.max_tokens.map(|n| Value::I64(n as i64))),
            ("gen_ai.request.temperature", sampling.temperature.map(|t| Value::F64(t.into()))),
            ("gen_ai.request.top_p", sampling.top_p.map(|p| Value::F64(p.into()))),
        ];
        attributes.extend(given.into_iter().filter_map(|(name, value)| Some(KeyValue::new(name, value?))));
        let builder = SpanBuilder::from_name(format!("{operation} {model}"))
            .with_kind(SpanKind::Server)
            .with_start_time(SystemTime::now())
            .with_attributes(attributes);
        let parent = caller.trace.clone().unwrap_or_default();
        RequestSpan {
            span: self.tracer.build_with_context(builder, &parent),
            is_submitted: false,
            num_unfinished: num_requests,
            began: Instant::now(),
            tokens: [0; 3],
            seconds: [0.0; 4],
            reasons: Vec::new(),
            failure: None,
        }
    }

    /// Sends what is left, and waits for it a while.
    pub fn finish(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(TIMEOUT) {
            tracing::warn!("the last traces are lost: {error}");
        }
    }
}

/// The span of an answer. It ends when it is dropped.
pub struct RequestSpan {
    span: opentelemetry_sdk::trace::Span,
    is_submitted: bool,
    num_unfinished: usize,
    began: Instant,
    /// Of the prompts, of these cached, of the choices.
    tokens: [usize; 3],
    /// Of the slowest request: in the queue, to the first token, in prompts, in choices.
    seconds: [f64; 4],
    reasons: Vec<&'static str>,
    failure: Option<String>,
}

impl RequestSpan {
    /// The engine has taken the requests.
    pub fn submitted(mut self) -> Self {
        self.is_submitted = true;
        self
    }

    /// An event of one of its requests.
    pub fn event(&mut self, event: &OutputEvent) {
        match event {
            OutputEvent::Finished { reason, error, .. } => {
                self.reasons.push(reason.as_str());
                if *reason == FinishReason::Error {
                    self.failure.get_or_insert_with(|| error.clone().unwrap_or_else(|| "a step failed".into()));
                }
            }
            OutputEvent::Done(usage) => {
                self.num_unfinished = self.num_unfinished.saturating_sub(1);
                let tokens = [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens];
                self.tokens = std::array::from_fn(|i| self.tokens[i] + tokens[i]);
                let (queue, first) = (usage.total_queue_time_sec, usage.total_prompt_time_sec);
                let seconds = [queue, first, (first - queue).max(0.0), usage.total_completion_time_sec];
                self.seconds = std::array::from_fn(|i| self.seconds[i].max(seconds[i]));
            }
            OutputEvent::Delta { .. } | OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => {}
        }
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        let span = &mut self.span;
        let reasons = self.reasons.iter().copied().map(StringValue::from).collect();
        span.set_attribute(KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons))));
        let names = ["input_tokens", "cache_read.input_tokens", "output_tokens"];
        for (name, tokens) in names.into_iter().zip(self.tokens) {
            span.set_attribute(KeyValue::new(format!("gen_ai.usage.{name}"), tokens as i64));
        }
        let names = ["time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode"];
        for (name, seconds) in names.into_iter().zip(self.seconds) {
            span.set_attribute(KeyValue::new(format!("gen_ai.latency.{name}"), seconds));
        }
        span.set_attribute(KeyValue::new("gen_ai.latency.e2e", self.began.elapsed().as_secs_f64()));
        let (kind, why) = match self.failure.take() {
            Some(why) => ("server_error", why),
            None if !self.is_submitted => ("refused", "it was refused".into()),
            None if self.num_unfinished > 0 => ("cancelled", "it was cancelled before its end".into()),
            None => return,
        };
        span.set_attribute(KeyValue::new("error.type", kind));
        span.set_status(Status::error(why));
    }
}

/// Sends batches, one after the other.
#[derive(Debug)]
struct Client {
    agent: ureq::Agent,
    /// The last batch did not arrive.
    has_failed: AtomicBool,
}

#[async_trait::async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let sent = self.agent.run(Request::from_parts(head, body.to_vec()));
        let sent = sent.and_then(|response| {
            let (head, mut body) = response.into_parts();
            Ok(Response::from_parts(head, Bytes::from(body.read_to_vec()?)))
        });
        let why = match &sent {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("it answers {}", response.status())),
            Err(error) => Some(error.to_string()),
        };
        let had_failed = self.has_failed.swap(why.is_some(), Ordering::Relaxed);
        if let Some(why) = why
            && !had_failed
        {
            tracing::warn!("traces do not reach the collector, and are dropped until they do: {why}");
        }
        Ok(sent?)
    }
}
