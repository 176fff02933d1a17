//! Prometheus metrics, under vLLM's names, so that its dashboards and the Gateway API inference extension work, and the mirror's.

mod model;
mod pool;

use engine::KvCacheStats;
use prometheus::{
    Counter, CounterVec, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder, proto,
};

pub use model::{ModelMetrics, Observed};

/// Of a response's head, in seconds.
const HEAD: &[f64] = model::WHOLE;

type Result<T> = std::result::Result<T, prometheus::Error>;

/// The metrics of a server, those of its models in the same registry.
pub struct Metrics {
    registry: Registry,
    http_requests: IntCounterVec,
    http_seconds: prometheus::HistogramVec,
    http_in_flight: IntGauge,
}

struct Maker<'a> {
    registry: &'a Registry,
    /// Whose they are; of the server itself unless given.
    model: Option<&'a str>,
}

impl Maker<'_> {
    fn add<C: prometheus::core::Collector + Clone + 'static>(&self, collector: C) -> Result<C> {
        self.registry.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    fn opts(&self, name: &str, help: &str) -> Opts {
        let opts = Opts::new(name, help);
        match self.model {
            Some(model) => opts.const_label("model_name", model).const_label("engine", "0"),
            None => opts,
        }
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

impl Metrics {
    /// For a server without models yet.
    pub fn new() -> Result<Self> {
        let registry = Registry::new();
        let make = Maker { registry: &registry, model: None };
        Ok(Self {
            http_requests: make.int_counters("http_requests_total", "Requests.", &["method", "path", "status"])?,
            http_seconds: make.add(prometheus::HistogramVec::new(
                HistogramOpts {
                    common_opts: make.opts("http_request_duration_seconds", "Up to the response's head."),
                    buckets: HEAD.to_vec(),
                },
                &["method", "path"],
            )?)?,
            http_in_flight: make
                .add(IntGauge::with_opts(make.opts("http_requests_in_flight", "Requests without a response yet."))?)?,
            registry,
        })
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

    /// The page of `/metrics`, with `more` families, which several models may have.
    pub fn page(&self, more: Vec<proto::MetricFamily>) -> Result<String> {
        let mut families = self.registry.gather();
        for mut family in more {
            match families.iter_mut().find(|other| other.name() == family.name()) {
                Some(other) => other.mut_metric().extend(family.take_metric()),
                None => families.push(family),
            }
        }
        let mut page = Vec::new();
        TextEncoder::new().encode(&families, &mut page)?;
        Ok(String::from_utf8_lossy(&page).into_owned())
    }
}

/// Bytes of the blocks that requests hold in which no token's KV is.
pub fn fragmented_bytes(stats: &KvCacheStats, block_bytes: u64) -> f64 {
    let slot_bytes = block_bytes as f64 / stats.block_size.max(1) as f64;
    stats.slots_held.saturating_sub(stats.slots_live) as f64 * slot_bytes
}
