//! The one decoder, and what tells architectures apart.

pub mod arch;
pub mod config;
pub mod decoder;
pub mod fields;
pub mod files;
pub(crate) mod parameters;
pub mod rope;

pub use arch::{ARCHITECTURES, Architecture};
pub use config::{DecoderConfig, LayerConfig};
pub use decoder::Decoder;
pub use files::ModelFiles;
pub use rope::{RopeConfig, RopeScaling};
