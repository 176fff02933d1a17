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
    names: &[],
    from_hf,
    from_gguf: |fields| fields.decoder("phi3", RopeStyle::Neox),
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let window = fields.size("sliding_window")?;
    Ok(fields.decoder("phi3")?.with_windows(|_| window))
}
