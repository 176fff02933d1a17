//! The KV books and the scheduler over them.

#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod config;
mod defects;
mod drafts;
mod encoder_cache;
mod exhaustive;
mod followers;
mod guarantee;
mod in_flight;
mod kept;
mod kv_events;
mod policies;
mod prefix;
mod scheduler;
mod sharing;
mod simulation;
mod spans;
mod state_snapshots;
mod state_space;
mod tier;
mod urgent;
mod usage;
mod whole_prompts;
