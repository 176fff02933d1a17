//! Learned vectors of positions, and of kinds of tokens.

use super::DecoderConfig;

/// A vector of each position up to the context length, one of each kind of token, or both, added to that of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionsConfig {
    /// There are vectors of positions.
    pub are_there: bool,
    /// Rows of their table before that of position 0.
    pub padding: usize,
    /// Kinds of tokens with a vector each: those of a first text, then those of a second one (BERT's segments). 0: they have
    /// none.
    pub num_token_types: usize,
}

impl Default for PositionsConfig {
    /// Vectors of positions alone, from the first row of their table on.
    fn default() -> Self {
        Self { are_there: true, padding: 0, num_token_types: 0 }
    }
}

impl PositionsConfig {
    /// Rows of a step's table for each position: one of each kind of token that is told from others.
    pub(crate) const fn rows_of_position(&self) -> usize {
        if self.num_token_types > 1 { 2 } else { 1 }
    }
}

impl DecoderConfig {
    /// With such vectors, in place of any rotation.
    #[must_use]
    pub(crate) fn with_positions(self, positions: PositionsConfig) -> Self {
        let config = Self { positions: Some(positions), ropes: Vec::new(), ..self };
        config.with_layers(|layer| layer.attention.rope = None)
    }
}
