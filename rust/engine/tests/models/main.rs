//! Model files of every family and format: what is read, and what the models answer, against goldens.

#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod configs;
mod containers;
mod drawn_gguf;
mod drawn_models;
mod equal_experts;
mod family_configs;
mod gemma4_gguf;
mod golden_models;
mod golden_sounds;
mod golden_videos;
mod golden_vision;
mod kv_layers;
mod kv_sizes;
mod masks;
mod memory_plan;
mod mmproj;
mod mmproj_sounds;
mod mmproj_tiles;
mod phi3_vision;
mod phi4_multimodal;
mod quantize;
mod renamed_models;
mod vision_files;
mod weight_files;
