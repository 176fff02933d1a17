//! Tells others which blocks an engine holds, in the form of vLLM's KV events, so that routers send a prompt where its prefix is.
//!
//! ```text
//! engine thread                 publisher thread                         one pair of threads a subscriber
//! Publisher::publish  -> queue -> number, encode, keep for replay  ->  queue -> socket
//! ```
//!
//! A message has three frames: the topic; its number, 8 bytes, the highest first; and a MessagePack array `[timestamp, events,
//! data_parallel_rank]` whose events are maps with a `type`: `BlockStored`, `BlockRemoved` or `AllBlocksCleared` ([`wire`]).
//!
//! Nobody is waited for. Where a queue is full, what should go into it is dropped and counted. A consumer sees that by the
//! numbers, of which some are missing, and asks the replay socket for them. Batches that the engine itself had to drop can be
//! replayed by nobody: their numbers are left out, and what follows is `AllBlocksCleared` with all that is held. The same follows
//! a request for a replay of batches that are not kept any more.
//!
//! The sockets speak ZMTP 3.0 ([`zmtp`]), which is the peers' libzmq's own protocol.

mod address;
mod peers;
mod publisher;
mod queue;
mod replay;
pub mod wire;
pub mod zmtp;

pub use address::Listeners;
pub use publisher::{EventSource, Publisher, PublisherOptions, StatsReader};
pub use wire::Layout;

use thiserror::Error;

/// Where events are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where subscribers connect, `tcp://HOST:PORT`; `*` is every IPv4 address of the host, port 0 a free one.
    pub address: String,
    /// Where batches are asked for again; nowhere unless given.
    pub replay_address: Option<String>,
    /// The first frame of each message, `""` unless given.
    pub topic: String,
}

/// Why nothing can be published.
#[derive(Debug, Error)]
pub enum KvEventsError {
    /// An address that is none.
    #[error("{argument} is {given:?}; it must be tcp://HOST:PORT, such as tcp://127.0.0.1:5557 or tcp://*:5557")]
    Address {
        /// What the address was given as.
        argument: &'static str,
        /// The address.
        given: String,
    },
    /// An address that cannot be listened on.
    #[error("{argument}: cannot listen on {address}: {source}; name an address of this host with a free port")]
    Bind {
        /// What the address was given as.
        argument: &'static str,
        /// The address.
        address: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// No thread can be started.
    #[error("kv_events: a thread cannot start: {0}")]
    Thread(std::io::Error),
}

/// What was published so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEventsStats {
    /// Where subscribers connect, with the port that was taken.
    pub address: String,
    /// Where batches are asked for again.
    pub replay_address: Option<String>,
    /// Batches that went out, to whoever listened.
    pub batches: u64,
    /// Their events: blocks that were stored or removed, and clearings.
    pub events: u64,
    /// Batches that the engine dropped because the publisher lagged behind.
    pub dropped_batches: u64,
    /// Times that all that is held was told anew.
    pub listings: u64,
    /// Subscribers that are connected.
    pub subscribers: usize,
    /// Batches that single subscribers did not get because they lagged behind.
    pub subscriber_dropped_batches: u64,
    /// Replays that were asked for.
    pub replays: u64,
}
