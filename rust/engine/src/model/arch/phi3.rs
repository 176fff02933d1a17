//! Phi 3 and 3.5, Phi 4 mini: fused projections, longrope.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{config::DecoderConfig, fields::HfFields},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["phi3"],
    class: "Phi3ForCausalLM",
    gguf: "phi3",
    from_hf,
    from_gguf: |fields| fields.decoder("phi3", RopeStyle::Neox),
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.decoder("phi3")?;
    let window = fields.size("sliding_window")?;
    config.set_windows(|_| window);
    Ok(config)
}
