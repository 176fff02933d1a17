//! What telling of the prefix cache adds to a step of 32 streams that decode, to be compared with the milliseconds that a model
//! takes.

#![allow(missing_docs)]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use kv_events::{KvEventsConfig, Layout, Listeners, Publisher, PublisherOptions};
use paged::{KvCacheConfig, KvGroups, NewRequest, RequestId, Scheduler, SchedulerConfig, SchedulerOutput};

const STREAMS: usize = 32;
const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 64;
const NEW: usize = 64;

/// Streams that begin again with another prompt when they end, in a pool that evicts all the time.
struct Streams {
    scheduler: Scheduler,
    output: SchedulerOutput,
    next: u64,
}

impl Streams {
    fn new() -> Self {
        let groups = KvGroups::from_layers(&[None]);
        let num_blocks = 2 * STREAMS * (PROMPT + NEW) / BLOCK_SIZE;
        let kv = KvCacheConfig { num_blocks, block_size: BLOCK_SIZE, groups, enable_prefix_caching: true, hash_key: [1; 32] };
        let scheduler = Scheduler::new(SchedulerConfig::new(STREAMS, 4096, 256), kv).unwrap();
        Self { scheduler, output: SchedulerOutput::default(), next: 0 }
    }

    fn step(&mut self) {
        while self.scheduler.num_running() + self.scheduler.num_waiting() < STREAMS {
            let first = self.next as u32;
            let prompt = (0..PROMPT as u32).map(|position| first.wrapping_mul(7919).wrapping_add(position) % 30_000).collect();
            self.scheduler.add_request(NewRequest::new(RequestId(self.next), prompt, NEW)).unwrap();
            self.next += 1;
        }
        self.scheduler.schedule_into(&mut self.output);
        let with_output = self.output.rows.iter().filter(|row| row.num_outputs > 0);
        let sampled: Vec<_> = with_output.map(|row| (row.request_id, &[5u32][..])).collect();
        self.scheduler.update(&self.output, &sampled).unwrap();
    }
}

fn publish(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a step of 32 streams");
    let mut alone = Streams::new();
    group.bench_function("without events", |bench| bench.iter(|| alone.step()));
    let mut told = Streams::new();
    let config = KvEventsConfig { address: "tcp://127.0.0.1:0".into(), replay_address: None, topic: String::new() };
    let layout = Layout { block_size: BLOCK_SIZE, windows: vec![None], adapter_name: Box::new(|_| None) };
    let mut publisher = Publisher::start(Listeners::bind(&config).unwrap(), layout, PublisherOptions::default()).unwrap();
    told.scheduler.record_kv_events([2; 32], 1 << 16);
    group.bench_function("with events", |bench| {
        bench.iter(|| {
            told.step();
            publisher.publish(black_box(&mut told.scheduler));
        });
    });
    group.finish();
}

criterion_group!(benches, publish);
criterion_main!(benches);
