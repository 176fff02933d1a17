//! Layers that keep a state a request, and gates of what attention gives.
//!
//! States lie on the GPU, slot after slot. A step says of each request where its rows and its states are
//! ([`RecurrentRequest`]), in lists that graphs find at fixed addresses; requests that pad a graph have no states, and nothing is
//! computed for them.

mod mamba;

use std::sync::Arc;

use crate::{
    Constant, Conv, DeviceError, DeviceStates, GateActivation, GatedDelta, Linear, Mamba, Mamba2, Norm, Recurrent, RecurrentArgs,
    RecurrentPhases, ShortConv, StateCache, StepMetadata, Tensor, WorkspaceShape,
    kernel_args::{
        AttentionGateArgs, CausalConvArgs, ConvPart, DevicePtr, ElementType, GatedDeltaArgs, GatedNormArgs, MAX_CONVS,
        Mamba2Args, NO_SLOT, RecurrentRequest,
    },
    recurrent::gate_group,
};

use super::{
    CudaBackend, CudaError,
    backend::{State, device, done, plain, rows},
    driver::{DeviceMemory, Driver},
    kernels::{Kernel, launch},
    linear::Rows,
    memory::{Constants, Scratch},
};

/// Channels that a CTA of `causal_conv` computes.
const CHANNELS_PER_CTA: usize = 128;
/// Rows of a step that CTAs of `causal_conv` take one by one: they wait for memory, and one after the other would wait longer.
const FEW_ROWS: usize = 256;
/// Rows that a CTA takes in larger steps, whose inputs it reads again less often.
const ROWS_PER_CTA: usize = 8;
/// Columns of a state that a CTA of `mamba2_*`, `gated_delta_*` or `kimi_delta_*` computes.
const COLUMNS_PER_CTA: usize = 32;
/// Elements that a CTA of `attention_gate` computes.
const GATED_PER_CTA: usize = 1024;
/// Rows of a state that the scans are made for, by their suffix.
const STATE_ROWS: [usize; 2] = [128, 256];
/// The same of `mamba_*`: of most models they are 16.
const CHANNEL_STATE_ROWS: [usize; 3] = [16, 128, 256];
/// Buffers begin at a multiple of so many values.
const ALIGNMENT: usize = 64;
/// Buffers of a layer at most: six projections and three convolutions.
const MAX_BUFFERS: usize = 9;

/// The kernels, and what is between them.
pub struct Recurrence {
    causal_conv: Kernel,
    mamba: [Kernel; CHANNEL_STATE_ROWS.len()],
    mamba2: [Kernel; STATE_ROWS.len()],
    gated_delta: [Kernel; STATE_ROWS.len()],
    kimi_delta: [Kernel; STATE_ROWS.len()],
    gated_norm: Kernel,
    attention_gate: Kernel,
    /// What is projected, and what convolutions make of it.
    between: Scratch,
}

impl Recurrence {
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new() -> Result<Self, CudaError> {
        let scans = |name: &str| -> Result<_, CudaError> {
            let [few, many] = STATE_ROWS;
            Ok([Kernel::named(&format!("{name}_{few}"))?, Kernel::named(&format!("{name}_{many}"))?])
        };
        Ok(Self {
            causal_conv: Kernel::named("causal_conv")?,
            mamba: mamba::kernels()?,
            mamba2: scans("mamba2")?,
            gated_delta: scans("gated_delta")?,
            kimi_delta: scans("kimi_delta")?,
            gated_norm: Kernel::named("gated_norm")?,
            attention_gate: Kernel::named("attention_gate")?,
            between: Scratch::default(),
        })
    }

    /// The address that graphs know.
    pub fn buffer(&self) -> DevicePtr {
        self.between.at()
    }

    /// Steps of that shape are the largest.
    pub fn plan(&mut self, shape: &WorkspaceShape) {
        self.between.plan(workspace_bytes(shape));
    }
}

/// Bytes between the kernels of a layer in the largest step.
pub fn workspace_bytes(shape: &WorkspaceShape) -> usize {
    match shape.recurrent_width {
        0 => 0,
        // No convolution has more columns than the projections that it is over.
        width => (2 * shape.num_tokens * width + MAX_BUFFERS * ALIGNMENT) * size_of::<f32>(),
    }
}

/// The states of requests in a GPU's memory.
pub struct DeviceStateSlots {
    driver: Arc<dyn Driver>,
    memory: DeviceMemory,
}

impl DeviceStateSlots {
    /// So many values.
    pub fn new(driver: &Arc<dyn Driver>, len: usize) -> Result<Self, CudaError> {
        Ok(Self { driver: Arc::clone(driver), memory: DeviceMemory::zeroed(driver, len * size_of::<f32>())? })
    }
}

impl DeviceStates for DeviceStateSlots {
    fn copy(&self, from: usize, to: usize, len: usize) -> Result<(), DeviceError> {
        let [from, to, bytes] = [from, to, len].map(|values| values * size_of::<f32>());
        Ok(self.driver.copy(self.memory.range(to, bytes), self.memory.range(from, bytes), bytes)?)
    }
}

/// Where the rows and the states of each request of a step are.
pub fn requests(step: &StepMetadata) -> Vec<RecurrentRequest> {
    let request = |(slot, rows): (&u32, &[u32])| RecurrentRequest {
        first_row: rows[0],
        num_rows: rows[1] - rows[0],
        slot: *slot,
        begins: u32::from(step.positions[rows[0] as usize] == 0),
    };
    step.state_slots.iter().zip(step.query_start_loc.windows(2)).map(request).collect()
}

/// The request of each row of a step.
pub fn row_requests(step: &StepMetadata) -> Vec<u32> {
    let of_request = |(request, rows): (usize, &[u32])| std::iter::repeat_n(request as u32, (rows[1] - rows[0]) as usize);
    step.query_start_loc.windows(2).enumerate().flat_map(of_request).collect()
}

/// The lists of a step on the device.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct RecurrentLists {
    /// [`requests`].
    pub requests: DevicePtr,
    /// [`row_requests`].
    pub row_requests: DevicePtr,
}

/// What the parts of a layer have in common.
struct Run<'a> {
    driver: &'a Arc<dyn Driver>,
    kernels: &'a Recurrence,
    constants: &'a mut Constants,
    lists: RecurrentLists,
    num_reqs: usize,
    num_rows: usize,
    /// The layer's values of slot 0, so many of them.
    states: DevicePtr,
    state_len: usize,
    slot_stride: u64,
    /// `[num_rows, width]`.
    out: DevicePtr,
}

/// A convolution over what was projected, and where its result goes.
struct Convolved<'a> {
    conv: &'a Conv,
    x: DevicePtr,
    out: DevicePtr,
    /// What goes in and what comes out is multiplied by; 0: nothing.
    gates: [DevicePtr; 2],
    activates: bool,
}

impl Run<'_> {
    fn constant(&mut self, values: &Constant, len: usize) -> Result<DevicePtr, CudaError> {
        assert_eq!(values.len(), len, "values of a recurrent layer");
        self.constants.of(self.driver, values)
    }

    /// The address of the layer's values of slot 0 from `offset` on, of which there are `len`.
    fn states(&self, offset: usize, len: usize) -> DevicePtr {
        assert!(offset + len <= self.state_len, "{len} values at {offset} of a state of {}", self.state_len);
        self.states + (offset * size_of::<f32>()) as u64
    }

    /// Convolutions whose states follow each other; returns where those end.
    fn convolve(&mut self, convs: &[Convolved<'_>]) -> Result<usize, CudaError> {
        let mut parts = [ConvPart::default(); MAX_CONVS];
        let (mut num_ctas, mut offset) = (0, 0);
        for (part, Convolved { conv, x, out, gates: [gate_in, gate_out], activates }) in parts.iter_mut().zip(convs) {
            let bias = conv.bias.as_ref().map_or(Ok(0), |bias| self.constant(bias, conv.num_channels))?;
            *part = ConvPart {
                x: *x,
                gate_in: *gate_in,
                gate_out: *gate_out,
                weight: self.constant(&conv.weight, conv.kernel() * conv.num_channels)?,
                bias,
                out: *out,
                state: self.states(offset, conv.state_len()),
                num_channels: conv.num_channels as u32,
                kernel: conv.kernel() as u32,
                first_cta: num_ctas as u32,
                activates: (*activates).into(),
            };
            num_ctas += conv.num_channels.div_ceil(CHANNELS_PER_CTA);
            offset += conv.state_len();
        }
        let rows_per_cta = if self.num_rows <= FEW_ROWS { 1 } else { ROWS_PER_CTA };
        let args = CausalConvArgs {
            parts,
            requests: self.lists.requests,
            row_requests: self.lists.row_requests,
            slot_stride: self.slot_stride,
            num_rows: self.num_rows as u32,
            rows_per_cta: rows_per_cta as u32,
        };
        let grid = [num_ctas, self.num_rows.div_ceil(rows_per_cta), 1];
        // SAFETY: inputs, gates and results have these rows and channels, weights and biases the lengths that were checked; the
        // states lie in the layer's part of a slot, and the lists name slots that there are.
        unsafe { launch(self.driver, self.kernels.causal_conv, grid, &args)? };
        Ok(offset)
    }

    /// The scan for states of so many rows, of one of these families, whose kernels are made for so many.
    fn scan<const N: usize>(kernels: [Kernel; N], made_for: [usize; N], rows: usize) -> Kernel {
        let fits = made_for.iter().position(|most| rows <= *most);
        kernels[fits.unwrap_or_else(|| panic!("states of {rows} rows have no GPU kernel; those of up to {made_for:?} have"))]
    }

    fn short_conv(&mut self, weights: &ShortConv, [b, c, x]: [DevicePtr; 3]) -> Result<(), CudaError> {
        let (conv, out) = (&weights.conv, self.out);
        self.convolve(&[Convolved { conv, x, out, gates: [b, c], activates: false }]).map(drop)
    }

    fn mamba2(&mut self, weights: &Mamba2, [z, xbc, dt]: [DevicePtr; 3], mixed: DevicePtr) -> Result<(), CudaError> {
        let Mamba2 { ref conv, num_heads, num_groups, state_dim, dt_limits: [dt_min, dt_max], scales, .. } = *weights;
        let [z_scale, dt_scale] = scales;
        let (head_dim, width) = (weights.head_dim(), weights.z.out_features);
        assert_eq!(conv.num_channels, width + 2 * num_groups * state_dim, "channels of x, b and c");
        let offset = self.convolve(&[Convolved { conv, x: xbc, out: mixed, gates: [0; 2], activates: true }])?;
        let args = Mamba2Args {
            xbc: mixed,
            dt,
            dt_bias: self.constant(&weights.dt_bias, num_heads)?,
            a: self.constant(&weights.a, num_heads)?,
            d: self.constant(&weights.d, num_heads)?,
            out: self.out,
            states: self.states(offset, width * state_dim),
            requests: self.lists.requests,
            slot_stride: self.slot_stride,
            num_heads: num_heads as u32,
            num_groups: num_groups as u32,
            head_dim: head_dim as u32,
            state_dim: state_dim as u32,
            dt_min,
            dt_max,
            dt_scale,
            reserved: 0,
        };
        let grid = [num_heads * head_dim.div_ceil(COLUMNS_PER_CTA), self.num_reqs, 1];
        // SAFETY: as for the convolution.
        unsafe { launch(self.driver, Self::scan(self.kernels.mamba2, STATE_ROWS, state_dim), grid, &args)? };
        let groups = [num_groups, width / num_groups];
        let gate = Gate { z, scale: z_scale, is_sigmoid: false, goes_first: weights.gates_first };
        self.gated_norm(weights.norm.as_ref(), &gate, groups)
    }

    fn gated_delta(
        &mut self,
        weights: &GatedDelta,
        [q, k, v, z, b, dt]: [DevicePtr; 6],
        mixed: [DevicePtr; 3],
    ) -> Result<(), CudaError> {
        let GatedDelta { num_key_heads, num_value_heads, ref convs, .. } = *weights;
        let (key_dim, value_dim) = (weights.key_dim(), weights.value_dim());
        for (conv, channels) in convs.iter().zip(weights.channels()) {
            assert_eq!(conv.num_channels, channels, "channels of a convolution");
        }
        let [mixed_q, mixed_k, mixed_v] = mixed;
        let offset = self.convolve(&[(0, q), (1, k), (2, v)].map(|(i, x)| Convolved {
            conv: &convs[i],
            x,
            out: mixed[i],
            gates: [0; 2],
            activates: true,
        }))?;
        let args = GatedDeltaArgs {
            q: mixed_q,
            k: mixed_k,
            v: mixed_v,
            b,
            dt,
            dt_bias: self.constant(&weights.dt_bias, weights.dt.out_features)?,
            a: self.constant(&weights.a, num_value_heads)?,
            out: self.out,
            states: self.states(offset, weights.v.out_features * key_dim),
            requests: self.lists.requests,
            slot_stride: self.slot_stride,
            num_key_heads: num_key_heads as u32,
            num_value_heads: num_value_heads as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            is_grouped: weights.is_grouped.into(),
            beta_scale: weights.beta_scale,
        };
        let kernels = if weights.decays_by_row() { self.kernels.kimi_delta } else { self.kernels.gated_delta };
        let grid = [num_value_heads * value_dim.div_ceil(COLUMNS_PER_CTA), self.num_reqs, 1];
        // SAFETY: as for the convolutions.
        unsafe { launch(self.driver, Self::scan(kernels, STATE_ROWS, key_dim), grid, &args)? };
        let gate = Gate { z, scale: 1.0, is_sigmoid: weights.down.is_some(), goes_first: false };
        self.gated_norm(Some(&weights.norm), &gate, [num_value_heads, value_dim])
    }

    /// Norms the result by groups of columns, which share the norm's weight where it is of one group, and gates it; gates it
    /// alone where there is no norm.
    fn gated_norm(&mut self, norm: Option<&Norm>, gate: &Gate, [num_groups, group_dim]: [usize; 2]) -> Result<(), CudaError> {
        let weight_stride = norm.map_or(0, |norm| if norm.weight.len() == group_dim { 0 } else { group_dim });
        let len = if weight_stride == 0 { group_dim } else { num_groups * group_dim };
        let args = GatedNormArgs {
            x: self.out,
            z: gate.z,
            weight: norm.map_or(Ok(0), |norm| self.constant(&norm.weight, len))?,
            num_rows: self.num_rows as u32,
            num_groups: num_groups as u32,
            group_dim: group_dim as u32,
            weight_stride: weight_stride as u32,
            gates_first: gate.goes_first.into(),
            eps: norm.map_or(0.0, |norm| norm.eps),
            z_scale: gate.scale,
            is_sigmoid: gate.is_sigmoid.into(),
        };
        // SAFETY: the result and its gate have these rows and groups, a weight a value for each column.
        unsafe { launch(self.driver, self.kernels.gated_norm, [num_groups * self.num_rows, 1, 1], &args) }
    }
}

/// What multiplies the result of a layer.
struct Gate {
    /// As many columns as the result has.
    z: DevicePtr,
    /// Multiplied into that first.
    scale: f32,
    /// It passes by its sigmoid; else by its SiLU.
    is_sigmoid: bool,
    /// The norm is of what is gated already.
    goes_first: bool,
}

/// Addresses of the buffers of a layer, one behind the other from `at` on, `[num_rows, cols]` each, and where they end.
fn place<const N: usize>(num_rows: usize, cols: [usize; N], at: DevicePtr) -> ([DevicePtr; N], DevicePtr) {
    let mut end = at;
    let buffers = cols.map(|cols| {
        let at = end;
        end += ((num_rows * cols).next_multiple_of(ALIGNMENT) * size_of::<f32>()) as u64;
        at
    });
    (buffers, end)
}

impl GatedDelta {
    /// Of queries, keys and values.
    fn channels(&self) -> [usize; 3] {
        [self.q.out_features, self.k.out_features, self.v.out_features]
    }
}

impl CudaBackend {
    fn try_recurrent(&self, args: RecurrentArgs<'_>, step: &StepMetadata) -> Result<(), CudaError> {
        let RecurrentArgs { hidden, norm, weights, states, layer, out } = args;
        let num_reqs = step.num_reqs();
        assert_eq!(step.state_slots.len(), num_reqs, "slots of the requests");
        let is_slot = |slot: &u32| *slot == NO_SLOT || (*slot as usize) < states.num_slots();
        assert!(step.state_slots.iter().all(is_slot), "slots {:?} of {}", step.state_slots, states.num_slots());
        assert_eq!(out.cols(), weights.width(), "columns of the output");
        out.set_rows(hidden.rows());
        let mut guard = self.state();
        let linears = linears(weights);
        let state = &mut *guard;
        assert_eq!(num_reqs, state.lists.num_reqs(), "the step that was begun");
        let num_rows = hidden.rows();
        let cols: Vec<usize> = linears.iter().map(|linear| linear.out_features).collect();
        let of_hidden = match weights {
            Recurrent::Mamba(_) => mamba::OF_HIDDEN,
            Recurrent::GatedDelta(GatedDelta { down: Some(down), .. }) => linears.len() - down.len(),
            _ => linears.len(),
        };
        let convolved = match weights {
            Recurrent::ShortConv(_) => [0; 3],
            Recurrent::Mamba(weights) => [weights.conv.num_channels, 0, 0],
            Recurrent::Mamba2(weights) => [weights.conv.num_channels, 0, 0],
            Recurrent::GatedDelta(weights) => weights.channels(),
        };
        let mut projected_cols = [0; 8];
        projected_cols[..cols.len()].copy_from_slice(&cols);
        let (_, end) = place(num_rows, convolved, place(num_rows, projected_cols, 0).1);
        let at = state.recurrence.between.bytes(self.driver(), end as usize)?;
        let (projected, end) = place(num_rows, projected_cols, at);
        let (mixed, _) = place(num_rows, convolved, end);
        let products: Vec<_> = linears.iter().zip(projected).map(|(linear, out)| plain(linear, out)).collect();
        // SAFETY: there is room for every product.
        unsafe { self.multiply(state, rows(hidden), norm, &products[..of_hidden])? };
        let [first, second, third, ..] = projected;
        let of_layer = (states, layer, device(out).at());
        let mut run = self.run(state, (num_reqs, num_rows), of_layer);
        match weights {
            Recurrent::Mamba(weights) => {
                run.convolve_mamba(weights, first, mixed[0])?;
                // SAFETY: as above, of what has been computed since.
                unsafe { self.multiply_mixed(state, weights, (num_rows, mixed[0], projected[2]), &products[of_hidden..])? };
                self.run(state, (num_reqs, num_rows), of_layer).mamba(weights, projected, mixed[0])
            }
            Recurrent::ShortConv(weights) => run.short_conv(weights, [first, second, third]),
            Recurrent::Mamba2(weights) => run.mamba2(weights, [first, second, third], mixed[0]),
            Recurrent::GatedDelta(weights) => {
                let [q, k, v, b, others @ ..] = projected;
                let (z, dt) = match &weights.down {
                    None => (others[0], others[1]),
                    Some(down) => {
                        for (i, down) in down.iter().enumerate() {
                            let thin =
                                Rows { at: others[i], count: num_rows, cols: down.out_features, element: ElementType::F32 };
                            // SAFETY: as above, of what has been computed since.
                            unsafe { self.multiply(state, thin, None, &products[of_hidden + i..=of_hidden + i])? };
                        }
                        (others[2], others[3])
                    }
                };
                self.run(state, (num_reqs, num_rows), of_layer).gated_delta(weights, [q, k, v, z, b, dt], mixed)
            }
        }
    }

    /// What the parts of a layer have in common, whose result is there.
    fn run<'a>(
        &'a self,
        state: &'a mut State,
        (num_reqs, num_rows): (usize, usize),
        (states, layer, out): (&StateCache, usize, DevicePtr),
    ) -> Run<'a> {
        let of_slot = states.range(0, layer);
        let slots = states.device::<DeviceStateSlots>().expect("states of this backend");
        Run {
            driver: self.driver(),
            kernels: &state.recurrence,
            constants: &mut state.constants,
            lists: state.lists.recurrent(),
            num_reqs,
            num_rows,
            states: slots.memory.range(of_slot.start * size_of::<f32>(), of_slot.len() * size_of::<f32>()),
            state_len: of_slot.len(),
            slot_stride: states.slot_len() as u64,
            out,
        }
    }

    fn try_gate(&self, x: &Tensor, gate: &Tensor, activation: GateActivation) -> Result<(), CudaError> {
        let group = gate_group(x, gate);
        let (x, gate) = (rows(x), rows(gate));
        let count = x.count * x.cols;
        let is_softplus = u32::from(activation == GateActivation::Softplus);
        let args = AttentionGateArgs { x: x.at, gate: gate.at, count: count as u64, group: group as u32, is_softplus };
        let kernel = self.state().recurrence.attention_gate;
        // SAFETY: both are buffers of so many values.
        unsafe { launch(self.driver(), kernel, [count.div_ceil(GATED_PER_CTA), 1, 1], &args) }
    }

    pub(super) fn new_states(&self, num_slots: usize, lens: &[usize]) -> Result<StateCache, DeviceError> {
        StateCache::on_device(num_slots, lens, |len| Ok(DeviceStateSlots::new(self.driver(), len)?))
    }
}

/// What the hidden state is multiplied by; behind that what other rows are, of Mamba and of a gated delta with thin matrices.
fn linears(weights: &Recurrent) -> Vec<&Linear> {
    match weights {
        Recurrent::ShortConv(ShortConv { b, c, x, .. }) => vec![b, c, x],
        Recurrent::Mamba(Mamba { x, z, dt_down, b, c, dt, .. }) => vec![x, z, dt_down, b, c, dt],
        Recurrent::Mamba2(Mamba2 { z, xbc, dt, .. }) => vec![z, xbc, dt],
        Recurrent::GatedDelta(GatedDelta { q, k, v, z, b, dt, down: None, .. }) => vec![q, k, v, b, z, dt],
        Recurrent::GatedDelta(GatedDelta { q, k, v, z, b, dt, down: Some([z_down, dt_down]), .. }) => {
            vec![q, k, v, b, z_down, dt_down, z, dt]
        }
    }
}

impl RecurrentPhases for CudaBackend {
    fn recurrent(&self, args: RecurrentArgs<'_>, step: &StepMetadata) {
        done(self.try_recurrent(args, step));
    }

    fn gate(&self, x: &mut Tensor, gate: &Tensor, activation: GateActivation) {
        done(self.try_gate(x, gate, activation));
    }

    fn max_state_rows(&self) -> usize {
        STATE_ROWS[STATE_ROWS.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_where_their_rows_and_states_are() {
        let step = StepMetadata {
            positions: vec![7, 0, 1, 2, 9, 10],
            query_start_loc: vec![0, 1, 4, 6],
            seq_lens: vec![8, 3, 11],
            state_slots: vec![5, 0, NO_SLOT],
            ..StepMetadata::default()
        };
        let request = |first_row, num_rows, slot, begins| RecurrentRequest { first_row, num_rows, slot, begins };
        assert_eq!(requests(&step), [request(0, 1, 5, 0), request(1, 3, 0, 1), request(4, 2, NO_SLOT, 0)]);
        assert_eq!(row_requests(&step), [0, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn buffers_of_a_layer_are_apart_aligned_and_within_what_is_planned() {
        // Two heads for keys, three for values.
        let (keys, values, rates) = (2 * 9, 3 * 5, 3);
        let (projected, convolved) = ([keys, keys, values, values, rates, rates], [keys, keys, values]);
        for num_rows in [1, 33, 512] {
            let (first, end) = place(num_rows, projected, 1 << 20);
            let (second, end) = place(num_rows, convolved, end);
            let mut places: Vec<_> = first.into_iter().zip(projected).chain(second.into_iter().zip(convolved)).collect();
            places.push((end, 0));
            assert!(places.iter().all(|(at, _)| at % 256 == 0));
            assert!(places.windows(2).all(|pair| pair[1].0 - pair[0].0 >= (num_rows * pair[0].1 * 4) as u64));
            let shape = WorkspaceShape { num_tokens: num_rows, recurrent_width: projected.iter().sum(), ..shape() };
            assert!(end - (1 << 20) <= workspace_bytes(&shape) as u64, "{num_rows} rows");
        }
        assert_eq!(workspace_bytes(&shape()), 0, "of a model without such layers");
    }

    fn shape() -> WorkspaceShape {
        WorkspaceShape {
            num_tokens: 1,
            seq_len: 1,
            hidden_size: 0,
            intermediate_size: 0,
            num_heads: 1,
            num_kv_heads: 1,
            queries_per_kv: 1,
            head_dim: 1,
            dtype: crate::DType::F32,
            num_logit_rows: 1,
            num_sampled_rows: 1,
            vocab_size: 1,
            lm_head_dtype: crate::DType::F32,
            precision: crate::Precision::Exact,
            post_norms: false,
            gated: false,
            num_experts: 0,
            num_chosen_experts: 0,
            expert_latent_size: 0,
            has_latent: false,
            recurrent_width: 0,
        }
    }
}
