//! Phi 3 and 3.5, Phi 4 mini: fused projections, longrope. Phi-3-vision of text alone is one of them.

use device::RopeStyle;

use super::Architecture;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["phi3", "phi3_v"],
    class: "Phi3ForCausalLM",
    gguf: "phi3",
    names: &[],
    from_hf: |fields| fields.windowed("phi3"),
    from_gguf: |fields| fields.decoder("phi3", RopeStyle::Neox),
};
