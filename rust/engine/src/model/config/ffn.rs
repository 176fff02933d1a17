//! What feed-forward networks are like.

use device::{Activation, ExpertActivation, RouterScore, RoutingRule};

/// A feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FfnConfig {
    /// All tokens pass all of it.
    Dense(DenseConfig),
    /// A mixture of experts.
    Experts(ExpertsConfig),
    /// There is none: the layer mixes tokens alone.
    Nothing,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of the layer.
    pub num_experts: usize,
    /// Columns of an expert's activation.
    pub intermediate_size: usize,
    /// How many a token passes, and which.
    pub rule: RoutingRule,
    /// Of all experts.
    pub activation: ExpertActivation,
    /// Columns of a space of their own that experts work in, but the shared one.
    pub latent_size: Option<usize>,
    /// The router must have a bias; else it may.
    pub router_bias: bool,
    /// The choice has a correction.
    pub has_correction: bool,
    /// The experts' matrices must have biases; else they may.
    pub bias: bool,
    /// Weights multiply what goes into an expert.
    pub scales_input: bool,
    /// An expert that every token passes.
    pub shared: Option<SharedConfig>,
    /// Each expert's weight is multiplied by one of the checkpoint, and router, experts and shared expert have norms of their own
    /// (Gemma 4).
    pub has_own_norms: bool,
}

/// An expert that every token passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedConfig {
    /// Columns of its activation.
    pub intermediate_size: usize,
    /// It has a weight for each token.
    pub is_weighted: bool,
}

/// A feed-forward network of two or three matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DenseConfig {
    /// Columns of the activation.
    pub intermediate_size: usize,
    /// `activation(gate) * up`; else `activation(up)`.
    pub is_gated: bool,
    /// Of the gate, or of up. The numbers of an xIELU that has none but zeros are weights of the layer.
    pub activation: Activation,
    /// Its matrices must have biases; else they may.
    pub bias: bool,
    /// Checkpoints that keep both as one have `up` before the gate.
    pub is_up_first: bool,
    /// Of the gate only what is so many standard deviations above the mean of its row passes, less that.
    pub cutoff: Option<f32>,
}

impl ExpertsConfig {
    /// So many experts, of which a token passes so many, each of that width and gated by SiLU.
    pub(crate) fn new([num_experts, num_chosen, intermediate_size]: [usize; 3], score: RouterScore) -> Self {
        Self {
            num_experts,
            intermediate_size,
            rule: RoutingRule { num_chosen, score, groups: None, normalize: None, scale: 1.0 },
            activation: ExpertActivation::Gated(Activation::Silu),
            latent_size: None,
            router_bias: false,
            has_correction: false,
            bias: false,
            scales_input: false,
            shared: None,
            has_own_norms: false,
        }
    }

    /// Whether experts have gates.
    pub(crate) const fn is_gated(&self) -> bool {
        !matches!(self.activation, ExpertActivation::Plain(_))
    }

    /// Chosen by this of the router's logits.
    #[must_use]
    pub(crate) const fn scored(mut self, score: RouterScore) -> Self {
        self.rule.score = score;
        self
    }

    /// With weights that add up to one.
    #[must_use]
    pub(crate) const fn normalized(mut self, is_normalized: bool) -> Self {
        self.rule.normalize = if is_normalized { Some(0.0) } else { None };
        self
    }
}

impl FfnConfig {
    /// Changes a network that is dense.
    pub(crate) fn set_dense(&mut self, set: impl FnOnce(&mut DenseConfig)) {
        if let Self::Dense(dense) = self {
            set(dense);
        }
    }

    /// Columns of the widest activation.
    pub(crate) fn intermediate_size(&self) -> usize {
        match self {
            Self::Dense(dense) => dense.intermediate_size,
            Self::Experts(experts) => experts.shared.map_or(0, |shared| shared.intermediate_size).max(experts.intermediate_size),
            Self::Nothing => 0,
        }
    }

    /// Whether it has a gate.
    pub(crate) fn is_gated(&self) -> bool {
        match self {
            Self::Dense(dense) => dense.is_gated,
            Self::Experts(experts) => experts.is_gated(),
            Self::Nothing => false,
        }
    }

    /// Its experts; 0 where all tokens pass all of it.
    pub(crate) fn num_experts(&self) -> usize {
        match self {
            Self::Experts(experts) => experts.num_experts,
            Self::Dense(_) | Self::Nothing => 0,
        }
    }

    /// Columns of the space that experts work in, where that is one of their own; else 0.
    pub(crate) fn latent_size(&self) -> usize {
        match self {
            Self::Experts(experts) => experts.latent_size.unwrap_or(0),
            Self::Dense(_) | Self::Nothing => 0,
        }
    }

    /// Those that a token passes.
    pub(crate) fn num_chosen_experts(&self) -> usize {
        match self {
            Self::Experts(experts) => experts.rule.num_chosen,
            Self::Dense(_) | Self::Nothing => 0,
        }
    }
}
