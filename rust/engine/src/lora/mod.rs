//! Adapters (LoRA): opened from their files, kept under aliases, and chosen by requests.
//!
//! An adapter's weights are a [`device::Adapter`] by *site*, the number of a linear layer in the order in which the decoder asked
//! for it ([`sites`]). Files are read by [`peft`] and [`gguf`]; both fill an [`AdapterBuilder`], which knows what each of the
//! model's layers is called. A [`Registry`] has the aliases. A request holds the generation that it began with, so that unloading
//! or reloading an alias changes nothing for it, and its blocks are found under that generation only.

mod builder;
mod gguf;
mod own;
mod peft;
mod registry;
mod sites;

use std::path::PathBuf;

use crate::EngineError;

pub(crate) use builder::AdapterBuilder;
pub(crate) use own::OwnAdapter;
pub use registry::{AdapterInfo, AdapterStatus, AdapterTraffic, LoadAdapter};
pub(crate) use registry::{Generation, Registry};
pub(crate) use sites::{Recorder, Sites};

/// Which adapters a model is loaded with, and what later ones may take.
#[derive(Clone, Debug)]
pub struct AdapterOptions {
    /// Alias and place, a PEFT folder or a GGUF file, of those that are there from the beginning.
    pub adapters: Vec<(String, PathBuf)>,
    /// Adapters at once at most.
    pub max_adapters: usize,
    /// The largest rank.
    pub max_rank: usize,
    /// Bytes of all adapters together at most.
    pub max_bytes: u64,
}

impl Default for AdapterOptions {
    fn default() -> Self {
        Self { adapters: Vec::new(), max_adapters: 16, max_rank: 256, max_bytes: 8 << 30 }
    }
}

/// Bytes that these adapters will keep, by the headers of their files: four a value.
pub(crate) fn planned_bytes(options: &AdapterOptions) -> Result<u64, EngineError> {
    options.adapters.iter().map(|(_, source)| registry::planned_bytes(source)).sum()
}

/// What a request runs with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterChoice {
    /// What an alias stands for when the request is submitted.
    Alias(String),
    /// A generation, 64 hexadecimal digits.
    Generation(String),
    /// None, whatever is active.
    Base,
}
