//! Requests through the engine: sampling, drafts, adapters, templates, tools and grammars.

#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod choices;
mod drafts;
mod embeddings;
mod encoder_gguf;
mod encoders;
mod engine;
mod forged_roles;
mod grammars;
mod kv_tier;
mod lora;
mod re_isq;
mod sampler;
mod sequences;
mod state_snapshots;
mod tokenizer;
mod tools;
mod vectors;
mod wishes;
