//! Prometheus metrics, under vLLM's names, so that its dashboards and the Gateway API inference extension work, and the mirror's.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use engine::{
    AdapterTraffic, Engine, GenerationRequest, KvCacheStats, KvEventsStats, MissReason, OutputEvent, STEP_TOKENS, StepTokens,
};
use prometheus::{
    Counter, CounterVec, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder, core::Metric as _, proto,
};

use serde_json::{Value, json};

use crate::{config::ServerConfig, traces::RequestSpan};

/// vLLM's buckets of the time to the first token, in seconds.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
];
/// vLLM's buckets of the time between tokens, in seconds.
const BETWEEN_TOKENS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// vLLM's buckets of a whole request, in seconds.
const WHOLE: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
const TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100_000.0];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

type Result<T> = std::result::Result<T, prometheus::Error>;

/// The metrics of a server.
pub struct Metrics {
    registry: Registry,
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
    http_requests: IntCounterVec,
    http_seconds: prometheus::HistogramVec,
    http_in_flight: IntGauge,
    pool: Pool,
}

/// What is read from the engine when somebody asks.
struct Pool {
    running: GaugeVec,
    waiting: GaugeVec,
    usage: GaugeVec,
    old_usage: GaugeVec,
    queries: CounterVec,
    hits: CounterVec,
    preemptions: CounterVec,
    missed: CounterVec,
    recomputed: Counter,
    deadlines: Counter,
    drafts: Counter,
    draft_tokens: Counter,
    accepted: Counter,
    accepted_at: CounterVec,
    steps: Counter,
    blocks_used: Gauge,
    blocks_total: Gauge,
    blocks_cached: Gauge,
    snapshots_used: Gauge,
    snapshots_total: Gauge,
    snapshots_evicted: Counter,
    fragmented_bytes: Gauge,
    capacity: Gauge,
    event_batches: Counter,
    events: Counter,
    dropped_event_batches: CounterVec,
    event_subscribers: Gauge,
}

struct Maker<'a> {
    registry: &'a Registry,
    model: &'a str,
}

impl Maker<'_> {
    fn add<C: prometheus::core::Collector + Clone + 'static>(&self, collector: C) -> Result<C> {
        self.registry.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", self.model).const_label("engine", "0")
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram> {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.add(Histogram::with_opts(opts)?)
    }

    fn int_counter(&self, name: &str, help: &str) -> Result<IntCounter> {
        self.add(IntCounter::with_opts(self.opts(name, help))?)
    }

    fn counter(&self, name: &str, help: &str) -> Result<Counter> {
        self.add(Counter::with_opts(self.opts(name, help))?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<CounterVec> {
        self.add(CounterVec::new(self.opts(name, help), labels)?)
    }

    fn int_counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec> {
        self.add(IntCounterVec::new(self.opts(name, help), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<Gauge> {
        self.add(Gauge::with_opts(self.opts(name, help))?)
    }

    fn gauges(&self, name: &str, help: &str) -> Result<GaugeVec> {
        self.add(GaugeVec::new(self.opts(name, help), &[])?)
    }
}

/// Names of counters for one value at a time.
fn set_counter(counter: &Counter, value: u64) {
    counter.inc_by((value as f64 - counter.get()).max(0.0));
}

impl Pool {
    fn new(make: &Maker<'_>) -> Result<Self> {
        Ok(Self {
            running: make.gauges("vllm:num_requests_running", "Choices in the batch.")?,
            waiting: make.gauges("vllm:num_requests_waiting", "Choices that wait.")?,
            usage: make.gauges("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold; 1 is all.")?,
            old_usage: make.gauges("vllm:gpu_cache_usage_perc", "The same, under its older name.")?,
            queries: make.counters("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", &[])?,
            hits: make.counters("vllm:prefix_cache_hits_total", "Of those, tokens that were found.", &[])?,
            preemptions: make.counters("vllm:num_preemptions_total", "Times that a request lost its blocks.", &[])?,
            missed: make.counters(
                "mistralrs_prefix_cache_missed_tokens_total",
                "Prompt tokens that were not found, by reason.",
                &["reason"],
            )?,
            recomputed: make.counter("mistralrs_recomputed_tokens_total", "Tokens computed again after a preemption.")?,
            drafts: make
                .counter("vllm:spec_decode_num_drafts_total", "Guesses of what a choice says next, of one token or more.")?,
            draft_tokens: make.counter("vllm:spec_decode_num_draft_tokens_total", "Tokens of these.")?,
            accepted: make.counter("vllm:spec_decode_num_accepted_tokens_total", "Of these tokens, the right ones.")?,
            accepted_at: make.counters(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                "The right ones by their place in their guess.",
                &["position"],
            )?,
            deadlines: make
                .counter("mistralrs_deadlines_missed_total", "Requests that ended because their deadline had passed.")?,
            steps: make.counter("mistralrs_steps_total", "Steps that were computed.")?,
            blocks_used: make.gauge("mistralrs_kv_cache_blocks_used", "Blocks that requests hold.")?,
            blocks_total: make.gauge("mistralrs_kv_cache_blocks_total", "Blocks of the pool.")?,
            blocks_cached: make
                .gauge("mistralrs_kv_cache_blocks_prefix_cached", "Free blocks that the prefix cache can find.")?,
            snapshots_used: make.gauge("mistralrs_state_snapshots_used", "Snapshots of recurrent states that can be found.")?,
            snapshots_total: make.gauge("mistralrs_state_snapshots_total", "Snapshots of recurrent states that can be kept.")?,
            snapshots_evicted: make
                .counter("mistralrs_state_snapshots_evicted_total", "Snapshots of recurrent states that had to go for others.")?,
            fragmented_bytes: make.gauge("mistralrs_kv_cache_fragmented_bytes", "Bytes of held blocks that no token fills.")?,
            capacity: make.gauge("mistralrs_sequences_capacity", "Choices that run at once at most.")?,
            event_batches: make.counter("mistralrs_kv_event_batches_total", "Batches of KV events that were published.")?,
            events: make.counter("mistralrs_kv_events_total", "KV events that were published: blocks stored or removed.")?,
            dropped_event_batches: make.counters(
                "mistralrs_kv_event_batches_dropped_total",
                "Batches of KV events that were dropped for want of room: before they were numbered, or of one subscriber.",
                &["at"],
            )?,
            event_subscribers: make.gauge("mistralrs_kv_event_subscribers", "Subscribers of KV events.")?,
        })
    }

    fn tell_events(&self, stats: &KvEventsStats) {
        set_counter(&self.event_batches, stats.batches);
        set_counter(&self.events, stats.events);
        set_counter(&self.dropped_event_batches.with_label_values(&["publisher"]), stats.dropped_batches);
        set_counter(&self.dropped_event_batches.with_label_values(&["subscriber"]), stats.subscriber_dropped_batches);
        self.event_subscribers.set(stats.subscribers as f64);
    }
}

impl Metrics {
    /// For a model that is loaded.
    pub fn new(engine: &Engine, config: &ServerConfig) -> Result<Self> {
        let registry = Registry::new();
        let make = Maker { registry: &registry, model: &config.model_id };
        let pool = Pool::new(&make)?;
        let info = make.add(GaugeVec::new(
            make.opts("vllm:cache_config_info", "The KV cache's configuration."),
            &["block_size", "num_gpu_blocks", "cache_bytes"],
        )?)?;
        let stats = engine.kv_cache_stats().map_err(|error| prometheus::Error::Msg(error.to_string()))?;
        let labels = [stats.block_size.to_string(), stats.blocks_total.to_string(), engine.kv_cache_bytes().to_string()];
        info.with_label_values(&labels).set(1.0);
        pool.capacity.set(config.max_seqs as f64);
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
            http_requests: make.int_counters("http_requests_total", "Requests.", &["method", "path", "status"])?,
            http_seconds: make.add(prometheus::HistogramVec::new(
                HistogramOpts {
                    common_opts: make.opts("http_request_duration_seconds", "Up to the response's head."),
                    buckets: WHOLE.to_vec(),
                },
                &["method", "path"],
            )?)?,
            http_in_flight: make
                .add(IntGauge::with_opts(make.opts("http_requests_in_flight", "Requests without a response yet."))?)?,
            pool,
            model: config.model_id.clone(),
            registry,
        })
    }

    /// A request was not admitted.
    pub fn rejected(&self, reason: &str) {
        self.rejections.with_label_values(&[reason]).inc();
    }

    /// A request's head came.
    pub fn http_begins(&self) {
        self.http_in_flight.inc();
    }

    /// Its response's head goes; `path` is the route's pattern.
    pub fn http_ends(&self, method: &str, path: &str, status: u16, seconds: f64) {
        self.http_in_flight.dec();
        self.http_requests.with_label_values(&[method, path, &status.to_string()]).inc();
        self.http_seconds.with_label_values(&[method, path]).observe(seconds);
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

    /// The page of `/metrics`, after the pool's figures are read.
    pub fn page(
        &self,
        stats: &KvCacheStats,
        steps: &StepTokens,
        block_bytes: u64,
        kv_events: Option<&KvEventsStats>,
        adapters: Option<&AdapterTraffic>,
    ) -> Result<String> {
        let pool = &self.pool;
        if let Some(stats) = kv_events {
            pool.tell_events(stats);
        }
        let none: [&str; 0] = [];
        let used = stats.blocks_used as f64 / stats.blocks_total.max(1) as f64;
        pool.running.with_label_values(&none).set(stats.requests_running as f64);
        pool.waiting.with_label_values(&none).set(stats.requests_waiting as f64);
        pool.usage.with_label_values(&none).set(used);
        pool.old_usage.with_label_values(&none).set(used);
        set_counter(&pool.queries.with_label_values(&none), stats.prefix_queried_tokens);
        set_counter(&pool.hits.with_label_values(&none), stats.prefix_hit_tokens);
        set_counter(&pool.preemptions.with_label_values(&none), stats.preemptions);
        for (reason, tokens) in MissReason::ALL.iter().zip(stats.prefix_missed_tokens) {
            set_counter(&pool.missed.with_label_values(&[reason.name()]), tokens);
        }
        set_counter(&pool.recomputed, stats.recomputed_tokens);
        set_counter(&pool.deadlines, stats.deadlines_missed);
        set_counter(&pool.drafts, stats.drafts.rows);
        set_counter(&pool.draft_tokens, stats.drafts.tokens);
        set_counter(&pool.accepted, stats.drafts.accepted);
        for (place, tokens) in stats.drafts.accepted_at.iter().enumerate() {
            set_counter(&pool.accepted_at.with_label_values(&[&place.to_string()]), *tokens);
        }
        set_counter(&pool.steps, stats.steps);
        pool.blocks_used.set(stats.blocks_used as f64);
        pool.blocks_total.set(stats.blocks_total as f64);
        pool.blocks_cached.set(stats.blocks_cached as f64);
        pool.snapshots_used.set(stats.state_snapshots_used as f64);
        pool.snapshots_total.set(stats.state_snapshots_total as f64);
        set_counter(&pool.snapshots_evicted, stats.state_snapshots_evicted);
        pool.fragmented_bytes.set(fragmented_bytes(stats, block_bytes));
        let mut page = Vec::new();
        let mut families = self.registry.gather();
        families.push(self.step_tokens(steps));
        families.extend(adapters.map(|adapters| self.lora_requests(adapters)));
        TextEncoder::new().encode(&families, &mut page)?;
        Ok(String::from_utf8_lossy(&page).into_owned())
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

/// Bytes of the blocks that requests hold in which no token's KV is.
pub fn fragmented_bytes(stats: &KvCacheStats, block_bytes: u64) -> f64 {
    let slot_bytes = block_bytes as f64 / stats.block_size.max(1) as f64;
    stats.slots_held.saturating_sub(stats.slots_live) as f64 * slot_bytes
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
