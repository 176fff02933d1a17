//! What the KV memory is taken by.

/// The slots of a pool by what they are taken by: their sum is the pool. In slots, each the place of one token's KV
/// in the layers of one KV group; as a mean over time they need not be whole.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MemoryByKind {
    /// Hold the KV of a token of a live request; one that several requests share counts once.
    pub token_states: f64,
    /// Held by a request that will never fill them: the last block's rest, or a reservation that is too long.
    pub internal: f64,
    /// Held by a request that will fill them later.
    pub reserved: f64,
    /// Of no use to anybody: what a buddy allocator rounds up, and pieces too small for the request that waits.
    pub external: f64,
    /// Free, but a prefix in them can still be found.
    pub cached: f64,
    /// Free.
    pub free: f64,
}

impl MemoryByKind {
    /// The kinds by name, in the order in which they are stacked.
    pub const NAMES: [&'static str; 6] = ["token_states", "internal", "reserved", "external", "cached", "free"];

    /// The kinds in the order of [`Self::NAMES`].
    pub fn values(&self) -> [f64; 6] {
        [self.token_states, self.internal, self.reserved, self.external, self.cached, self.free]
    }

    fn from_values([token_states, internal, reserved, external, cached, free]: [f64; 6]) -> Self {
        Self { token_states, internal, reserved, external, cached, free }
    }

    /// All slots together.
    pub fn total(&self) -> f64 {
        self.values().iter().sum()
    }

    /// `f` of each kind.
    #[must_use]
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self::from_values(self.values().map(f))
    }

    /// Kind by kind.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let mut sum = self.values();
        sum.iter_mut().zip(other.values()).for_each(|(sum, value)| *sum += value);
        Self::from_values(sum)
    }

    /// Books the `len` slots that a request holds: `computed` have KV, and more will, until there are `end`.
    pub(crate) fn add_held(&mut self, len: usize, computed: usize, end: usize) {
        let rest = len.saturating_sub(computed);
        let reserved = rest.min(end.saturating_sub(computed));
        self.token_states += (len - rest) as f64;
        self.reserved += reserved as f64;
        self.internal += (rest - reserved) as f64;
    }
}
