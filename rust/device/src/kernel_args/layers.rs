//! Arguments of experts and of layers that keep a state.

use super::DevicePtr;

/// Values of [`RouteArgs::score`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoreKind {
    Softmax = 0,
    SoftmaxOfChosen = 1,
    Sigmoid = 2,
    Sparsemixer = 3,
    SigmoidOfChosen = 4,
}

/// Experts of a layer at most.
pub const MAX_EXPERTS: usize = 1024;
/// Groups of experts at most.
pub const MAX_EXPERT_GROUPS: usize = 32;

/// `route`: the experts of each row with their weights, and the rows of each expert as tiles.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RouteArgs {
    pub logits: DevicePtr,
    pub correction: DevicePtr,
    pub scales: DevicePtr,
    pub chosen: DevicePtr,
    pub weights: DevicePtr,
    pub tiles: DevicePtr,
    pub rows: DevicePtr,
    pub places: DevicePtr,
    pub arrivals: DevicePtr,
    pub num_rows: u32,
    pub num_experts: u32,
    pub num_chosen: u32,
    pub num_tiles: u32,
    pub tile_rows: u32,
    pub score: u32,
    pub jitter: f32,
    pub num_groups: u32,
    pub num_chosen_groups: u32,
    pub by_two_best: u32,
    pub normalizes: u32,
    pub normalize_eps: f32,
    pub scale: f32,
    pub reserved: u32,
}

/// `add_experts`: out = sum of weights * experts + sigmoid(`shared_logits`) * shared, times scale, or that added to out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AddExpertsArgs {
    pub experts: DevicePtr,
    pub weights: DevicePtr,
    pub shared: DevicePtr,
    pub shared_logits: DevicePtr,
    pub out: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
    pub num_chosen: u32,
    pub accumulate: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// A request of a step, to layers that keep a state a request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecurrentRequest {
    pub first_row: u32,
    pub num_rows: u32,
    pub slot: u32,
    pub begins: u32,
}

/// [`RecurrentRequest::slot`] of a request for which nothing is computed or kept.
pub const NO_SLOT: u32 = u32::MAX;

/// A convolution over channels of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ConvPart {
    pub x: DevicePtr,
    pub gate_in: DevicePtr,
    pub gate_out: DevicePtr,
    pub weight: DevicePtr,
    pub bias: DevicePtr,
    pub out: DevicePtr,
    pub state: DevicePtr,
    pub num_channels: u32,
    pub kernel: u32,
    pub first_cta: u32,
    pub activates: u32,
}

impl Default for ConvPart {
    /// None.
    fn default() -> Self {
        Self {
            x: 0,
            gate_in: 0,
            gate_out: 0,
            weight: 0,
            bias: 0,
            out: 0,
            state: 0,
            num_channels: 0,
            kernel: 0,
            first_cta: u32::MAX,
            activates: 0,
        }
    }
}

/// Convolutions that one launch computes.
pub const MAX_CONVS: usize = 3;

/// `causal_conv`: up to three convolutions over the rows of each request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CausalConvArgs {
    pub parts: [ConvPart; MAX_CONVS],
    pub requests: DevicePtr,
    pub row_requests: DevicePtr,
    pub slot_stride: u64,
    pub num_rows: u32,
    pub rows_per_cta: u32,
}

/// `mamba_*`: the scan of Mamba, times silu(z).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MambaArgs {
    pub x: DevicePtr,
    pub z: DevicePtr,
    pub dt: DevicePtr,
    pub b: DevicePtr,
    pub c: DevicePtr,
    pub b_norm: DevicePtr,
    pub c_norm: DevicePtr,
    pub a: DevicePtr,
    pub d: DevicePtr,
    pub out: DevicePtr,
    pub states: DevicePtr,
    pub requests: DevicePtr,
    pub slot_stride: u64,
    pub num_channels: u32,
    pub state_dim: u32,
    pub b_eps: f32,
    pub c_eps: f32,
}

/// `mamba2_*`: the scan of Mamba-2.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mamba2Args {
    pub xbc: DevicePtr,
    pub dt: DevicePtr,
    pub dt_bias: DevicePtr,
    pub a: DevicePtr,
    pub d: DevicePtr,
    pub out: DevicePtr,
    pub states: DevicePtr,
    pub requests: DevicePtr,
    pub slot_stride: u64,
    pub num_heads: u32,
    pub num_groups: u32,
    pub head_dim: u32,
    pub state_dim: u32,
    pub dt_min: f32,
    pub dt_max: f32,
    pub dt_scale: f32,
    pub reserved: u32,
}

/// `gated_delta_*`: the gated delta rule.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GatedDeltaArgs {
    pub q: DevicePtr,
    pub k: DevicePtr,
    pub v: DevicePtr,
    pub b: DevicePtr,
    pub dt: DevicePtr,
    pub dt_bias: DevicePtr,
    pub a: DevicePtr,
    pub out: DevicePtr,
    pub states: DevicePtr,
    pub requests: DevicePtr,
    pub slot_stride: u64,
    pub num_key_heads: u32,
    pub num_value_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub is_grouped: u32,
    pub beta_scale: f32,
}

/// `gated_norm`: x = rms_norm(x * silu(z)), or x = rms_norm(x) * silu(z), each group of columns with a mean square of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GatedNormArgs {
    pub x: DevicePtr,
    pub z: DevicePtr,
    pub weight: DevicePtr,
    pub num_rows: u32,
    pub num_groups: u32,
    pub group_dim: u32,
    pub weight_stride: u32,
    pub gates_first: u32,
    pub eps: f32,
    pub z_scale: f32,
    pub is_sigmoid: u32,
}

/// `attention_gate`: x *= sigmoid(gate), or x *= softplus(gate); each value of the gate is of so many elements of x.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionGateArgs {
    pub x: DevicePtr,
    pub gate: DevicePtr,
    pub count: u64,
    pub group: u32,
    pub is_softplus: u32,
}
