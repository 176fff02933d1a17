//! What is told of one model.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use engine::{AdapterTraffic, Engine, GenerationRequest, KvCacheStats, MissReason, OutputEvent, STEP_TOKENS, StepTokens};
use prometheus::{Histogram, IntCounter, IntCounterVec, core::Metric as _, proto};
use serde_json::{Value, json};

use super::{Maker, Metrics, Result, pool::Pool};
use crate::traces::RequestSpan;

/// vLLM's buckets of the time to the first token, in seconds.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
];
/// vLLM's buckets of the time between tokens, in seconds.
const BETWEEN_TOKENS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// vLLM's buckets of a whole request, in seconds.
pub const WHOLE: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
const TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100_000.0];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// The metrics of a model.
pub struct ModelMetrics {
    model: String,
    first_token: Histogram,
    between_tokens: Histogram,
    per_output_token: Histogram,
    old_per_output_token: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt_tokens_each: Histogram,
    generation_tokens_each: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    success: IntCounterVec,
    rejections: IntCounterVec,
    pool: Pool,
}

impl ModelMetrics {
    /// For a model by its id, which runs so many choices at once.
    pub fn new(metrics: &Metrics, model: &str, max_seqs: usize) -> Result<Self> {
        let make = Maker { registry: &metrics.registry, model: Some(model) };
        Ok(Self {
            first_token: make.histogram(
                "vllm:time_to_first_token_seconds",
                "From submission to the first token.",
                FIRST_TOKEN,
            )?,
            between_tokens: make.histogram("vllm:inter_token_latency_seconds", "Between tokens of a stream.", BETWEEN_TOKENS)?,
            per_output_token: make.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Of each request, the mean time between its tokens.",
                BETWEEN_TOKENS,
            )?,
            old_per_output_token: make.histogram(
                "vllm:time_per_output_token_seconds",
                "Between tokens of a stream, under its older name.",
                BETWEEN_TOKENS,
            )?,
            whole: make.histogram("vllm:e2e_request_latency_seconds", "From submission to the end.", WHOLE)?,
            queue: make.histogram(
                "vllm:request_queue_time_seconds",
                "Of each request, up to the first step with tokens of it.",
                WHOLE,
            )?,
            prefill: make.histogram(
                "vllm:request_prefill_time_seconds",
                "Of each request, from that step to its first token.",
                WHOLE,
            )?,
            inference: make.histogram(
                "vllm:request_inference_time_seconds",
                "Of each request, from that step to its end.",
                WHOLE,
            )?,
            decode: make.histogram(
                "vllm:request_decode_time_seconds",
                "Of each request, from its first token to its end.",
                WHOLE,
            )?,
            prompt_tokens_each: make.histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)?,
            generation_tokens_each: make.histogram("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)?,
            params_n: make.histogram("vllm:request_params_n", "The parameter n.", CHOICES)?,
            params_max_tokens: make.histogram("vllm:request_params_max_tokens", "The parameter max_tokens.", TOKENS)?,
            prompt_tokens: make.int_counter("vllm:prompt_tokens_total", "Prompt tokens of requests that have ended.")?,
            generation_tokens: make
                .int_counter("vllm:generation_tokens_total", "Generated tokens of requests that have ended.")?,
            success: make.int_counters("vllm:request_success_total", "Answers that have ended.", &["finished_reason"])?,
            rejections: make.int_counters("vllm:admission_rejections_total", "Requests that were not admitted.", &["reason"])?,
            pool: Pool::new(&make, max_seqs)?,
            model: model.to_owned(),
        })
    }

    /// A request was not admitted.
    pub fn rejected(&self, reason: &str) {
        self.rejections.with_label_values(&[reason]).inc();
    }

    /// Requests begin; what is returned hears of their events.
    pub fn observe(&self, requests: &[GenerationRequest]) -> Observed {
        for request in requests {
            self.params_n.observe(request.n_choices as f64);
            if let Some(max_tokens) = request.sampling.max_tokens {
                self.params_max_tokens.observe(max_tokens as f64);
            }
        }
        let streams = requests.iter().any(|request| request.stream);
        Observed {
            first_token: self.first_token.clone(),
            between_tokens: self.between_tokens.clone(),
            per_output_token: self.per_output_token.clone(),
            old_per_output_token: self.old_per_output_token.clone(),
            whole: self.whole.clone(),
            queue: self.queue.clone(),
            prefill: self.prefill.clone(),
            decode: self.decode.clone(),
            inference: self.inference.clone(),
            prompt_tokens_each: self.prompt_tokens_each.clone(),
            generation_tokens_each: self.generation_tokens_each.clone(),
            prompt_tokens: self.prompt_tokens.clone(),
            generation_tokens: self.generation_tokens.clone(),
            success: self.success.clone(),
            last_token: streams.then(Vec::new),
            started: Instant::now(),
            span: None,
        }
    }

    /// Tokens of prompts that were not found in the prefix cache, by reason.
    pub fn misses(stats: &KvCacheStats) -> Value {
        MissReason::ALL.iter().zip(stats.prefix_missed_tokens).map(|(reason, tokens)| (reason.name(), tokens)).collect()
    }

    /// Upper ends and counts of the buckets of the time to the first token.
    pub fn first_token_buckets(&self) -> Value {
        buckets(&self.first_token)
    }

    /// The same of the time between tokens.
    pub fn between_tokens_buckets(&self) -> Value {
        buckets(&self.between_tokens)
    }

    /// Tokens of answers that have ended.
    pub fn generated_tokens(&self) -> u64 {
        self.generation_tokens.get()
    }

    /// Reads the figures of an engine that is loaded, as of `stats`; and the families that the engine keeps itself.
    pub fn read(&self, engine: &Engine, stats: &KvCacheStats) -> Vec<proto::MetricFamily> {
        if let Some(events) = engine.kv_events() {
            self.pool.tell_events(&events);
        }
        self.pool.hold(stats, engine.kv_cache_bytes(), engine.block_bytes());
        self.pool.count(stats);
        let mut families = vec![self.step_tokens(&engine.step_tokens())];
        families.extend(engine.adapter_traffic().map(|adapters| self.lora_requests(&adapters)));
        families
    }

    /// The model is not loaded, and holds nothing.
    pub fn is_unloaded(&self) {
        self.pool.hold(&KvCacheStats::default(), 0, 0);
    }

    /// A histogram that the engine keeps.
    fn step_tokens(&self, steps: &StepTokens) -> proto::MetricFamily {
        let bucket = |(end, count): (&usize, &u64)| {
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(*end as f64);
            bucket.set_cumulative_count(*count);
            bucket
        };
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(STEP_TOKENS.iter().zip(&steps.cumulative).map(bucket).collect());
        histogram.set_sample_count(steps.steps);
        histogram.set_sample_sum(steps.tokens as f64);
        let mut metric = proto::Metric::default();
        metric.set_histogram(histogram);
        let help = "Tokens of a step, of prompts and answers together.";
        self.family(("vllm:iteration_tokens_total", help, proto::MetricType::HISTOGRAM), &[], metric)
    }

    /// The one sample of the moment: routers take the newest, and labels that change would leave older ones behind.
    fn lora_requests(&self, adapters: &AdapterTraffic) -> proto::MetricFamily {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut gauge = proto::Gauge::default();
        gauge.set_value(now.as_secs_f64());
        let mut metric = proto::Metric::default();
        metric.set_gauge(gauge);
        let labels = [
            ("max_lora", adapters.max_adapters.to_string()),
            ("running_lora_adapters", adapters.loaded.join(",")),
            ("waiting_lora_adapters", adapters.waiting.join(",")),
        ];
        let help = "When this was so, in seconds since 1970: adapters that are loaded, and those that requests wait for.";
        self.family(("vllm:lora_requests_info", help, proto::MetricType::GAUGE), &labels, metric)
    }

    /// A family of one sample, by its name, help and type.
    fn family(
        &self,
        (name, help, kind): (&str, &str, proto::MetricType),
        labels: &[(&str, String)],
        mut metric: proto::Metric,
    ) -> proto::MetricFamily {
        let label = |(name, value): (&str, &str)| {
            let mut label = proto::LabelPair::default();
            label.set_name(name.to_owned());
            label.set_value(value.to_owned());
            label
        };
        let own = labels.iter().map(|(name, value)| (*name, value.as_str()));
        metric.set_label([("engine", "0"), ("model_name", &self.model)].into_iter().chain(own).map(label).collect());
        let mut family = proto::MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.set_metric(vec![metric]);
        family
    }
}

fn buckets(histogram: &Histogram) -> Value {
    let metric = histogram.metric();
    let all = metric.get_histogram();
    let pairs = all.get_bucket().iter().map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
    let (ends, counts): (Vec<f64>, Vec<u64>) = pairs.unzip();
    json!({ "le": ends, "cumulative": counts, "count": all.get_sample_count(), "sum": all.get_sample_sum() })
}

/// Hears of the events of an answer.
pub struct Observed {
    first_token: Histogram,
    between_tokens: Histogram,
    per_output_token: Histogram,
    old_per_output_token: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt_tokens_each: Histogram,
    generation_tokens_each: Histogram,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    success: IntCounterVec,
    /// Of a stream, when each choice had its last token.
    last_token: Option<Vec<((usize, usize), Instant)>>,
    started: Instant,
    /// What a collector is told of the answer.
    pub span: Option<RequestSpan>,
}

impl Observed {
    /// An event of the request with this number.
    pub fn event(&mut self, number: usize, event: &OutputEvent) {
        if let Some(span) = &mut self.span {
            span.event(event);
        }
        match event {
            OutputEvent::Delta { index, .. } => self.token((number, *index)),
            OutputEvent::Finished { reason, .. } => self.success.with_label_values(&[reason.as_str()]).inc(),
            OutputEvent::Done(usage) => {
                if self.last_token.is_none() {
                    self.first_token.observe(usage.total_prompt_time_sec);
                }
                let queue = usage.total_queue_time_sec;
                self.queue.observe(queue);
                self.prefill.observe((usage.total_prompt_time_sec - queue).max(0.0));
                self.inference.observe((usage.total_time_sec - queue).max(0.0));
                self.decode.observe(usage.total_completion_time_sec);
                self.whole.observe(usage.total_time_sec);
                self.prompt_tokens_each.observe(usage.prompt_tokens as f64);
                self.generation_tokens_each.observe(usage.completion_tokens as f64);
                self.prompt_tokens.inc_by(usage.prompt_tokens as u64);
                self.generation_tokens.inc_by(usage.completion_tokens as u64);
                if usage.completion_tokens > 1 {
                    self.per_output_token.observe(usage.total_completion_time_sec / (usage.completion_tokens - 1) as f64);
                }
            }
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => {}
        }
    }

    fn token(&mut self, choice: (usize, usize)) {
        let Some(last) = &mut self.last_token else { return };
        let now = Instant::now();
        if let Some((_, before)) = last.iter_mut().find(|(which, _)| *which == choice) {
            let seconds = (now - *before).as_secs_f64();
            self.between_tokens.observe(seconds);
            self.old_per_output_token.observe(seconds);
            *before = now;
            return;
        }
        if last.iter().all(|((request, _), _)| *request != choice.0) {
            self.first_token.observe((now - self.started).as_secs_f64());
        }
        last.push((choice, now));
    }
}
