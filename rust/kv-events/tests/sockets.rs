//! The publisher and a consumer over sockets: whatever is lost on the way, the consumer comes to know what is held.

#![allow(missing_docs)]

use std::{
    collections::BTreeSet,
    io::Write,
    net::TcpStream,
    time::{Duration, Instant},
};

use kv_events::{KvEventsConfig, Layout, Listeners, Publisher, PublisherOptions, zmtp};
use paged::{KvCacheConfig, KvEvent, KvGroups, NewRequest, RequestId, Scheduler, SchedulerConfig, StoredBlock};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(20);
const TOPIC: &str = "kv";

fn start(options: PublisherOptions, num_groups: usize) -> Publisher {
    let any = || "tcp://127.0.0.1:0".to_owned();
    let config = KvEventsConfig { address: any(), replay_address: Some(any()), topic: TOPIC.into() };
    let layout = Layout { block_size: 4, windows: vec![None; num_groups], adapter_name: Box::new(|_| None) };
    Publisher::start(Listeners::bind(&config).unwrap(), layout, options).unwrap()
}

fn connect(address: &str, kind: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&zmtp::greeting()).unwrap();
    let mut data = b"\x0bSocket-Type".to_vec();
    data.extend((kind.len() as u32).to_be_bytes());
    data.extend(kind);
    let mut ready = Vec::new();
    zmtp::write_command(&mut ready, b"READY", &data);
    stream.write_all(&ready).unwrap();
    zmtp::read_greeting(&mut stream).unwrap();
    assert!(zmtp::read_frame(&mut stream, 100).unwrap().is_command);
    stream
}

fn message(stream: &mut TcpStream) -> Option<Vec<Vec<u8>>> {
    let mut frames = Vec::new();
    loop {
        let frame = zmtp::read_frame(stream, 1 << 26).ok()?;
        let more = frame.more;
        frames.push(frame.body);
        if !more {
            return Some(frames);
        }
    }
}

fn subscribe(publisher: &Publisher, topic: &[u8]) -> TcpStream {
    let stats = publisher.stats_reader();
    let mut stream = connect(&stats.read().address, b"SUB");
    let mut frame = Vec::new();
    zmtp::write_frame(&mut frame, 0, &[b"\x01", topic].concat());
    // A PING behind it, so that its answer tells that the subscription was heard.
    zmtp::write_command(&mut frame, b"PING", b"\0\x0aabc");
    stream.write_all(&frame).unwrap();
    let mut pong = zmtp::read_frame(&mut stream, 1 << 26).unwrap();
    // What was published before, and is sent between the two, comes first.
    while !pong.is_command {
        pong = zmtp::read_frame(&mut stream, 1 << 26).unwrap();
    }
    assert_eq!(zmtp::command(&pong.body), Some((&b"PONG"[..], &b"abc"[..])));
    assert!(stats.read().subscribers > 0);
    stream
}

/// Numbers and payloads from `start` on.
fn replay(publisher: &Publisher, start: u64) -> Vec<(u64, Vec<u8>)> {
    let mut stream = connect(&publisher.stats_reader().read().replay_address.unwrap(), b"DEALER");
    let mut request = Vec::new();
    zmtp::write_frame(&mut request, zmtp::MORE, b"");
    zmtp::write_frame(&mut request, 0, &start.to_be_bytes());
    stream.write_all(&request).unwrap();
    let mut batches = Vec::new();
    loop {
        let [delimiter, number, payload] = message(&mut stream).unwrap().try_into().unwrap();
        assert!(delimiter.is_empty());
        let number = u64::from_be_bytes(number.try_into().unwrap());
        if number == u64::MAX {
            assert!(payload.is_empty());
            return batches;
        }
        batches.push((number, payload));
    }
}

#[derive(Default)]
struct Consumer {
    held: BTreeSet<(u64, u32)>,
    next: u64,
    num_gaps: usize,
    num_clearings: usize,
    /// Batches are missing that nobody has any more; a clearing will come.
    is_wrong: bool,
}

impl Consumer {
    fn apply(&mut self, payload: &[u8]) {
        let batch: Value = rmp_serde::from_slice(payload).unwrap();
        for event in batch[1].as_array().unwrap() {
            let group = event["group_idx"].as_u64().unwrap_or_default() as u32;
            let hashes = event["block_hashes"].as_array().into_iter().flatten().map(|hash| (hash.as_u64().unwrap(), group));
            match event["type"].as_str().unwrap() {
                "BlockStored" => self.held.extend(hashes),
                "BlockRemoved" => {
                    hashes.for_each(|hash| assert!(self.held.remove(&hash) || self.is_wrong, "removed and not stored"));
                }
                _ => {
                    self.held.clear();
                    self.is_wrong = false;
                    self.num_clearings += 1;
                }
            }
        }
    }

    /// Takes a message, after what was missed before it, as far as that can be had.
    fn take(&mut self, publisher: &Publisher, number: u64, payload: &[u8]) {
        if number > self.next {
            self.num_gaps += 1;
            for (number, payload) in replay(publisher, self.next) {
                if number >= self.next {
                    self.is_wrong |= number > self.next;
                    self.next = number + 1;
                    self.apply(&payload);
                }
            }
        }
        if number >= self.next {
            self.is_wrong |= number > self.next;
            self.next = number + 1;
            self.apply(payload);
        }
    }
}

fn scheduler() -> Scheduler {
    let groups = KvGroups::from_layers(&[Some(8), None]);
    let kv = KvCacheConfig { num_blocks: 40, block_size: 4, groups, enable_prefix_caching: true, hash_key: [3; 32] };
    let mut scheduler = Scheduler::new(SchedulerConfig::new(4, 64, 64), kv).unwrap();
    scheduler.record_kv_events([1; 32], 100);
    scheduler
}

/// Requests with common prefixes come, are computed, and end.
fn operate(scheduler: &mut Scheduler, random: &mut impl FnMut(u64) -> u64, id: u64) {
    let mut tokens: Vec<u32> = (0..random(30) as u32).collect();
    tokens.extend((0..=random(8)).map(|position| (random(5) * 100 + position) as u32));
    let _ = scheduler.add_request(NewRequest::new(RequestId(id), tokens, 2));
    let output = scheduler.schedule();
    let sampled: Vec<_> = output.rows.iter().filter(|row| row.num_outputs > 0).map(|row| (row.request_id, &[7u32][..])).collect();
    scheduler.update(&output, &sampled).unwrap();
    if random(100) == 0 {
        scheduler.reset_prefix_cache();
    }
}

fn random() -> impl FnMut(u64) -> u64 {
    let mut state = 11u64;
    move |n| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    }
}

/// Publishes until nothing is outstanding.
fn settle(publisher: &mut Publisher, scheduler: &mut Scheduler) {
    let began = Instant::now();
    loop {
        publisher.publish(scheduler);
        if !publisher.is_behind() {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "the publisher does not catch up");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn expected(scheduler: &Scheduler) -> BTreeSet<(u64, u32)> {
    scheduler.pool().kv_event_blocks().collect()
}

#[test]
fn a_consumer_of_a_queue_that_drops_batches_holds_what_the_pool_holds_in_the_end() {
    let options = PublisherOptions { max_waiting: 2, max_kept: 20, max_events: 3, ..PublisherOptions::default() };
    let (mut publisher, mut scheduler, mut random) = (start(options, 2), scheduler(), random());
    let mut stream = subscribe(&publisher, b"k");
    for id in 0..20_000 {
        operate(&mut scheduler, &mut random, id);
        publisher.publish(&mut scheduler);
    }
    settle(&mut publisher, &mut scheduler);
    let stats = publisher.stats_reader();
    let expected = expected(&scheduler);
    let mut consumer = Consumer::default();
    let began = Instant::now();
    // A replay of what is not kept any more makes the engine tell all anew.
    while consumer.held != expected || publisher.is_behind() {
        assert!(began.elapsed() < PATIENCE, "the consumer does not come to know what is held: {:?}", stats.read());
        publisher.publish(&mut scheduler);
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let Some(frames) = message(&mut stream) else { continue };
        let [topic, number, payload] = frames.try_into().unwrap();
        assert_eq!(topic, TOPIC.as_bytes());
        consumer.take(&publisher, u64::from_be_bytes(number.try_into().unwrap()), &payload);
    }
    let stats = stats.read();
    assert!(stats.dropped_batches > 0 && stats.listings > 0 && consumer.num_gaps > 0, "{stats:?}");
    assert!(consumer.num_clearings > 1);
}

#[test]
fn a_late_consumer_replays_all_and_the_end_is_told() {
    let (mut publisher, mut scheduler, mut random) = (start(PublisherOptions::default(), 2), scheduler(), random());
    for id in 0..50 {
        operate(&mut scheduler, &mut random, id);
        publisher.publish(&mut scheduler);
    }
    let mut stream = subscribe(&publisher, b"");
    let stats = publisher.stats_reader();
    let began = Instant::now();
    let mut consumer = Consumer::default();
    while consumer.held != expected(&scheduler) {
        assert!(began.elapsed() < PATIENCE);
        consumer = Consumer::default();
        for (number, payload) in replay(&publisher, 0) {
            consumer.take(&publisher, number, &payload);
        }
    }
    assert!(consumer.num_gaps == 0 && !consumer.held.is_empty());
    assert_eq!((stats.read().dropped_batches, stats.read().listings), (0, 0));
    let other = subscribe(&publisher, b"another");
    drop(publisher);
    let mut last = None;
    while let Some(frames) = message(&mut stream) {
        last = Some(frames);
    }
    consumer.apply(&last.unwrap()[2]);
    assert!(consumer.held.is_empty(), "an engine that has ended holds nothing");
    let mut other = other;
    assert_eq!(message(&mut other), None, "it wanted another topic");
}

/// Has these events to tell, and nothing else.
struct Fixed(Vec<KvEvent>);

impl kv_events::EventSource for Fixed {
    fn take(&mut self, out: &mut Vec<KvEvent>) {
        out.append(&mut self.0);
    }

    fn list(&mut self, out: &mut Vec<KvEvent>) {
        out.append(&mut self.0);
    }
}

#[test]
fn a_subscriber_that_reads_nothing_holds_up_nobody_and_its_losses_are_counted() {
    let options = PublisherOptions { max_kept_bytes: 1 << 20, ..PublisherOptions::default() };
    let mut publisher = start(options, 1);
    let _deaf = subscribe(&publisher, b"");
    let stats = publisher.stats_reader();
    let block = |digest| {
        let tokens = vec![digest as u32; 50_000].into();
        KvEvent::Stored(StoredBlock { digest, parent: None, group: 0, tokens, identity: [].into(), salt: None })
    };
    let began = Instant::now();
    let mut digest = 0;
    while stats.read().subscriber_dropped_batches == 0 {
        assert!(began.elapsed() < PATIENCE, "{:?}", stats.read());
        digest += 1;
        publisher.publish(&mut Fixed(vec![block(digest)]));
        std::thread::yield_now();
    }
    // Another one gets what comes now.
    let mut stream = subscribe(&publisher, b"");
    publisher.publish(&mut Fixed(vec![block(0)]));
    assert!(message(&mut stream).is_some());
}

#[test]
fn peers_that_speak_something_else_are_let_go_and_others_served() {
    let mut publisher = start(PublisherOptions::default(), 1);
    let address = publisher.stats_reader().read().address;
    let plain = address.strip_prefix("tcp://").unwrap().to_owned();
    let mut web = TcpStream::connect(&plain).unwrap();
    web.set_read_timeout(Some(PATIENCE)).unwrap();
    web.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut web, &mut rest);
    assert_eq!(rest.len(), zmtp::GREETING_LEN, "our greeting, and then the end");
    // A frame of 2^62 bytes is no reason to allocate them.
    let mut hostile = connect(&address, b"SUB");
    hostile.write_all(&[2, 0x40, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    assert_eq!(message(&mut hostile), None);
    let mut scheduler = scheduler();
    let mut stream = subscribe(&publisher, b"");
    publisher.publish(&mut scheduler);
    assert!(message(&mut stream).is_some());
}
