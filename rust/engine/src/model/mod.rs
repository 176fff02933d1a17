//! The one decoder, and what tells architectures apart.

mod altup;
pub mod arch;
mod attention;
pub mod config;
pub mod cross;
pub mod decoder;
mod dense;
mod experts;
pub mod fields;
pub mod files;
mod language_model;
mod latent;
mod layer_inputs;
pub(crate) mod loader;
pub(crate) mod mtp;
pub(crate) mod part;
mod positions;
mod recurrent;
pub mod rope;
pub(crate) mod visit;

pub use arch::{Architecture, architectures, implemented_beside};
pub use config::{DecoderConfig, LayerConfig};
pub use decoder::Decoder;
pub use files::ModelFiles;
pub use rope::{RopeConfig, RopeRows, RopeScaling};
