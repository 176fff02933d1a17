//! Learned vectors of positions.

use super::DecoderConfig;

/// A vector of each position up to the context length, added to that of the token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PositionsConfig {
    /// Rows of their table before that of position 0.
    pub padding: usize,
}

impl DecoderConfig {
    /// With such vectors, in place of any rotation.
    #[must_use]
    pub(crate) fn with_positions(self, positions: PositionsConfig) -> Self {
        let config = Self { positions: Some(positions), ropes: Vec::new(), ..self };
        config.with_layers(|layer| layer.attention.rope = None)
    }
}
