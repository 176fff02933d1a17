//! The CPU backend against plain oracles.

#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod dequantize;
mod experts;
mod latent;
mod phases;
mod recurrent;
