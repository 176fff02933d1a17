//! Names of what only layers of Mamba have.

/// What a weight of a layer of Mamba is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MambaRole {
    /// What passes the convolution, the first part of the layer's input.
    X,
    /// `[rank + 2 * state_dim, num_channels]`: the three that follow, one after the other.
    Parameters,
    /// What the lengths of steps are made of.
    StepsDown,
    /// What x is multiplied by on its way into the state.
    B,
    /// What the state is multiplied by.
    C,
    /// `[num_channels, rank]`: the lengths of steps.
    Steps,
    /// Of what they are made of.
    StepsNorm,
    /// Of B.
    BNorm,
    /// Of C.
    CNorm,
}

impl MambaRole {
    pub(super) const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::X => ("ssm_in_x", "mamba.in_proj_x"),
            Self::Parameters => ("ssm_x", "mamba.x_proj"),
            Self::StepsDown => ("ssm_x_dt", "mamba.x_proj_dt"),
            Self::B => ("ssm_x_b", "mamba.x_proj_b"),
            Self::C => ("ssm_x_c", "mamba.x_proj_c"),
            Self::Steps => ("ssm_dt", "mamba.dt_proj"),
            Self::StepsNorm => ("ssm_dt_norm", "mamba.dt_layernorm"),
            Self::BNorm => ("ssm_b_norm", "mamba.b_layernorm"),
            Self::CNorm => ("ssm_c_norm", "mamba.c_layernorm"),
        }
    }
}
