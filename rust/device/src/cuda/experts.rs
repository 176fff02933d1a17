//! Mixtures of experts: which rows pass which experts is decided on the GPU, and so are the tiles of rows that products take.
//! What the host asks for depends on the number of rows alone, so steps can be recorded.

use std::sync::Arc;

use crate::{
    Activation, AdapterRows, Expert, ExpertActivation, ExpertArgs, ExpertPhases, Experts, LatentSpace, Linear, Norm, PartNorms,
    RouterScore, RoutingRule, SharedExpert, StepMetadata, WorkspaceShape,
    kernel_args::{
        ActivationKind, AddExpertsArgs, DevicePtr, ElementType, GroupTile, MAX_EXPERT_GROUPS, MAX_EXPERTS, RouteArgs,
        RouterScoreKind,
    },
};

use super::{
    CudaBackend, CudaError,
    backend::{State, cuda, done, plain, rows},
    driver::{DeviceMemory, Driver},
    elementwise::{Gating, NormPass},
    grouped::{self, Group, GroupedInput, GroupedRows},
    kernels::{GROUPED_ROWS, Kernel, launch},
    linear::{CudaLinear, Rows},
    lora::{Choices, ExpertTarget},
    memory::{Constants, Scratch},
};

/// Rows that pass the experts at once: of more, what experts give would take much memory.
const MAX_ROWS: usize = 1024;
/// Rows of a CTA of `route`.
const ROUTED_ROWS: usize = 8;
/// Columns of a CTA of `add_experts`.
const ADDED_COLS: usize = 1024;
/// Entries that `route` sorts at most.
const MAX_ENTRIES: usize = 1 << 16;
/// Rows an expert from which on tiles of the larger size pay.
const MANY_ROWS: usize = GROUPED_ROWS[0];
/// The same for the largest tiles, of which the last one of an expert is half full on average.
const MOST_ROWS: usize = 48;

/// What mixtures of experts work in.
pub struct ExpertsState {
    route: Kernel,
    add_experts: Kernel,
    /// CTAs of `route` that are done: 0 between launches.
    arrivals: Option<DeviceMemory>,
    /// `[rows, num_experts]`.
    logits: Scratch,
    /// Of each row's choice: expert, weight, and its row and place in the order of tiles.
    choice: Scratch,
    tiles: Scratch,
    /// `[rows * num_chosen, intermediate_size]`, or of the shared expert `[rows, its own]`.
    gate: Scratch,
    /// Likewise.
    up: Scratch,
    /// `[rows * num_chosen, hidden_size]`.
    given: Scratch,
    /// `[rows, hidden_size]`: what the shared expert gives.
    shared: Scratch,
    /// `[rows]`: logits of the shared expert's weight.
    shared_logits: Scratch,
}

/// What `route` has decided, on the device.
struct Routed {
    /// `[rows, num_chosen]`.
    chosen: DevicePtr,
    weights: DevicePtr,
    tiles: DevicePtr,
    num_tiles: usize,
    /// Rows of x in the order of tiles.
    rows: DevicePtr,
    /// Their places among all choices, likewise.
    places: DevicePtr,
}

impl ExpertsState {
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new() -> Result<Self, CudaError> {
        Ok(Self {
            route: Kernel::named("route")?,
            add_experts: Kernel::named("add_experts")?,
            arrivals: None,
            logits: Scratch::default(),
            choice: Scratch::default(),
            tiles: Scratch::default(),
            gate: Scratch::default(),
            up: Scratch::default(),
            given: Scratch::default(),
            shared: Scratch::default(),
            shared_logits: Scratch::default(),
        })
    }

    /// Addresses that graphs know, 0 of what is not there yet.
    pub fn buffers(&mut self) -> Vec<DevicePtr> {
        let arrivals = self.arrivals.as_ref().map_or(0, DeviceMemory::at);
        self.scratches().into_iter().map(|scratch| scratch.at()).chain([arrivals]).collect()
    }

    /// Steps of that shape are the largest.
    pub fn plan(&mut self, shape: &WorkspaceShape) {
        let bytes = planned_bytes(shape);
        self.scratches().into_iter().zip(bytes).for_each(|(scratch, bytes)| scratch.plan(bytes));
    }

    fn scratches(&mut self) -> [&mut Scratch; 8] {
        let Self { logits, choice, tiles, gate, up, given, shared, shared_logits, .. } = self;
        [logits, choice, tiles, gate, up, given, shared, shared_logits]
    }

    /// The experts of some rows, by the router's logits.
    fn route(
        &mut self,
        driver: &Arc<dyn Driver>,
        constants: &mut Constants,
        experts: &Experts,
        num_rows: usize,
        tile_rows: usize,
    ) -> Result<Routed, CudaError> {
        let RoutingRule { num_chosen, score, groups, normalize, scale } = experts.rule;
        let (num_experts, entries) = (experts.experts.len(), num_rows * num_chosen);
        assert!(num_experts <= MAX_EXPERTS && entries < MAX_ENTRIES, "{num_experts} experts, {entries} choices");
        assert!(groups.is_none_or(|groups| groups.num_groups <= MAX_EXPERT_GROUPS), "{groups:?}");
        let num_tiles = most_tiles(entries, num_experts, tile_rows);
        let choice = self.choice.bytes(driver, 4 * entries * size_of::<u32>())?;
        let [chosen, weights, rows, places] = [0, 1, 2, 3].map(|i| choice + (i * entries * size_of::<u32>()) as u64);
        let arrivals = match &self.arrivals {
            Some(memory) => memory.at(),
            None => self.arrivals.insert(DeviceMemory::zeroed(driver, size_of::<u32>())?).at(),
        };
        let (kind, jitter) = match score {
            RouterScore::Softmax => (RouterScoreKind::Softmax, 0.0),
            RouterScore::SoftmaxOfChosen => (RouterScoreKind::SoftmaxOfChosen, 0.0),
            RouterScore::SigmoidOfChosen => (RouterScoreKind::SigmoidOfChosen, 0.0),
            RouterScore::Sigmoid => (RouterScoreKind::Sigmoid, 0.0),
            RouterScore::Sparsemixer { jitter } => (RouterScoreKind::Sparsemixer, jitter),
        };
        let args = RouteArgs {
            logits: self.logits.at(),
            correction: experts.correction.as_ref().map_or(Ok(0), |values| constants.of(driver, values))?,
            scales: experts.scales.as_ref().map_or(Ok(0), |values| constants.of(driver, values))?,
            chosen,
            weights,
            tiles: self.tiles.bytes(driver, num_tiles * size_of::<GroupTile>())?,
            rows,
            places,
            arrivals,
            num_rows: num_rows as u32,
            num_experts: num_experts as u32,
            num_chosen: num_chosen as u32,
            num_tiles: num_tiles as u32,
            tile_rows: tile_rows as u32,
            score: kind as u32,
            jitter,
            num_groups: groups.map_or(0, |groups| groups.num_groups as u32),
            num_chosen_groups: groups.map_or(0, |groups| groups.num_chosen as u32),
            by_two_best: groups.is_some_and(|groups| groups.by_two_best).into(),
            normalizes: normalize.is_some().into(),
            normalize_eps: normalize.unwrap_or(0.0),
            scale,
            reserved: 0,
        };
        // SAFETY: the logits are those of these rows; the lists were made for them.
        unsafe { launch(driver, self.route, [num_rows.div_ceil(ROUTED_ROWS), 1, 1], &args)? };
        Ok(Routed { chosen, weights, tiles: args.tiles, num_tiles, rows, places })
    }
}

impl CudaBackend {
    fn try_experts(&self, args: ExpertArgs<'_>, adapters: &[AdapterRows]) -> Result<(), CudaError> {
        let ExpertArgs { hidden, norm, experts, post_norm, scale } = args;
        let state = &mut *self.state();
        let hidden = rows(hidden);
        assert_eq!(experts.router.in_features, hidden.cols, "columns of the hidden state");
        let mut input = hidden;
        if norm.is_some() {
            input.at = state.normed.floats(self.driver(), hidden.count * hidden.cols)?;
            let pass = NormPass { norm, out: input.at, ..NormPass::default() };
            self.norm_pass(&mut state.constants, hidden, &pass)?;
        }
        let num_rows = hidden.count;
        for first in (0..num_rows).step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(num_rows - first);
            let offset = (first * hidden.cols * size_of::<f32>()) as u64;
            let part = |rows: Rows| Rows { at: rows.at + offset, count, ..rows };
            let (input, hidden) = (part(input), part(hidden));
            // Rows of a part have other numbers than those of the step.
            let before = if count < num_rows && !adapters.is_empty() {
                let State { lists, lora, .. } = state;
                let of_part = AdapterRows::of_chosen(adapters, &(first as u32..(first + count) as u32));
                Some(lora.begin(lists, &of_part)?)
            } else {
                None
            };
            if post_norm.is_none() && experts.norms.is_none() {
                self.add_experts(state, experts, [input; 2], hidden.at, Some(scale))?;
            } else {
                let sum = state.projected.floats(self.driver(), count * hidden.cols)?;
                match &experts.norms {
                    Some(norms) => self.add_parts(state, (experts, norms), [input, hidden], sum)?,
                    None => self.add_experts(state, experts, [input; 2], sum, None)?,
                }
                let pass = NormPass { add: Some(sum), post_norm, scale, ..NormPass::default() };
                self.norm_pass(&mut state.constants, hidden, &pass)?;
            }
            if let Some(before) = before {
                state.lora.go_back(before);
            }
        }
        Ok(())
    }

    /// What the experts give for `x`, and the shared one for other rows, each with norms of their own, as
    /// [`PartNorms`] has them: to `out`.
    fn add_parts(
        &self,
        state: &mut State,
        (experts, norms): (&Experts, &PartNorms),
        [x, hidden]: [Rows; 2],
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        let normed = |state: &mut State, norm: &Norm, out: DevicePtr| -> Result<_, CudaError> {
            let pass = NormPass { norm: Some(norm), out, ..NormPass::default() };
            self.norm_pass(&mut state.constants, hidden, &pass)?;
            Ok(Rows { at: out, ..hidden })
        };
        let floats = x.count * x.cols;
        // The router has read its rows when the shared expert writes there.
        let for_router = state.experts.shared.floats(self.driver(), floats)?;
        let for_router = normed(state, &norms.router, for_router)?;
        self.add_experts(state, experts, [x, for_router], out, None)?;
        let sum = Rows { at: out, ..x };
        let pass = NormPass { norm: Some(&norms.sum), out, ..NormPass::default() };
        self.norm_pass(&mut state.constants, sum, &pass)?;
        let Some(shared) = &experts.shared else { return Ok(()) };
        assert!(shared.weight.is_none(), "a shared expert with a norm of its own has no weight");
        // What the others gave was summed.
        let for_shared = state.experts.given.floats(self.driver(), floats)?;
        let for_shared = normed(state, &norms.shared, for_shared)?;
        let (given, _) = self.shared_expert(state, shared, experts.activation, for_shared)?;
        let pass = NormPass { add: Some(given), post_norm: Some(&norms.shared_sum), scale: 1.0, ..NormPass::default() };
        self.norm_pass(&mut state.constants, sum, &pass)
    }

    /// What the experts give for rows of `x`, chosen by others: to `out`, or times a scale added to it. The shared one is among
    /// them where parts have no norms of their own.
    fn add_experts(
        &self,
        state: &mut State,
        experts: &Experts,
        [x, for_router]: [Rows; 2],
        out: DevicePtr,
        added: Option<f32>,
    ) -> Result<(), CudaError> {
        let driver = self.driver();
        let (num_rows, num_chosen) = (x.count, experts.rule.num_chosen);
        let logits = state.experts.logits.floats(driver, num_rows * experts.experts.len())?;
        // SAFETY: `x` is a buffer of its shape, and the logits have its rows.
        unsafe { self.products(state, for_router, &[plain(&experts.router, logits)])? };
        let tile_rows = tile_rows(experts, num_rows);
        let routed = state.experts.route(driver, &mut state.constants, experts, num_rows, tile_rows)?;
        let (given, places) = match &experts.latent {
            None => (self.multiply_experts(state, experts, x, &routed, tile_rows)?, (routed.weights, num_chosen)),
            Some(latent) => (self.add_latent(state, (experts, latent), x, &routed, tile_rows)?, (0, 1)),
        };
        let (weights, num_chosen) = places;
        let (shared, shared_logits) = match experts.shared.as_ref().filter(|_| experts.norms.is_none()) {
            Some(shared) => self.shared_expert(state, shared, experts.activation, x)?,
            None => (0, 0),
        };
        let args = AddExpertsArgs {
            experts: given,
            weights: if experts.scales_input { 0 } else { weights },
            shared,
            shared_logits,
            out,
            num_rows: num_rows as u32,
            cols: x.cols as u32,
            num_chosen: num_chosen as u32,
            accumulate: added.is_some().into(),
            scale: added.unwrap_or(1.0),
            reserved: 0,
        };
        let grid = [x.cols.div_ceil(ADDED_COLS), num_rows, 1];
        // SAFETY: each is a buffer of these rows and columns, or none.
        unsafe { launch(driver, state.experts.add_experts, grid, &args) }
    }

    /// `[rows, hidden_size]`: what experts that work in a space of their own give together.
    fn add_latent(
        &self,
        state: &mut State,
        (experts, LatentSpace { down, up }): (&Experts, &LatentSpace),
        x: Rows,
        routed: &Routed,
        tile_rows: usize,
    ) -> Result<DevicePtr, CudaError> {
        let (driver, cols) = (self.driver(), down.out_features);
        assert!(cols <= x.cols, "experts in a space of {cols} columns, beside a shared one of {}", x.cols);
        // The shared expert's buffer is free until that runs.
        let within = state.experts.shared.floats(driver, x.count * x.cols)?;
        // SAFETY: `x` is a buffer of its shape, and the other one has room for its rows.
        unsafe { self.products(state, x, &[plain(down, within)])? };
        let rows = Rows { at: within, cols, ..x };
        let given = self.multiply_experts(state, experts, rows, routed, tile_rows)?;
        let args = AddExpertsArgs {
            experts: given,
            weights: if experts.scales_input { 0 } else { routed.weights },
            shared: 0,
            shared_logits: 0,
            out: within,
            num_rows: x.count as u32,
            cols: cols as u32,
            num_chosen: experts.rule.num_chosen as u32,
            accumulate: 0,
            scale: 1.0,
            reserved: 0,
        };
        // SAFETY: as for the products. What the experts gave is summed before its buffer is written.
        unsafe {
            launch(driver, state.experts.add_experts, [cols.div_ceil(ADDED_COLS), x.count, 1], &args)?;
            let out = state.experts.given.floats(driver, x.count * experts.rule.num_chosen * x.cols)?;
            self.products(state, rows, &[plain(up, out)])?;
            Ok(out)
        }
    }

    /// `[rows * num_chosen, hidden_size]`: what each chosen expert makes of its row.
    fn multiply_experts(
        &self,
        state: &mut State,
        experts: &Experts,
        x: Rows,
        routed: &Routed,
        tile_rows: usize,
    ) -> Result<DevicePtr, CudaError> {
        let driver = self.driver();
        let State { dense, groups, experts: own, lora, .. } = state;
        let entries = x.count * experts.rule.num_chosen;
        let mut group = |role: fn(&Expert) -> &Linear| groups.of(driver, experts.experts.iter().map(role));
        let gate_or_up: fn(&Expert) -> &Linear = |it| it.gate.as_ref().unwrap_or(&it.up);
        let [gates, ups, downs] = [group(gate_or_up)?, group(|it| &it.up)?, group(|it| &it.down)?];
        let is_plain = matches!(experts.activation, ExpertActivation::Plain(_));
        let width = gates.first.out_features();
        assert_eq!([ups.first.out_features(), downs.first.in_features(), downs.first.out_features()], [width, width, x.cols]);
        assert!(!experts.scales_input || gates.bias == 0, "what goes into an expert with a bias is scaled before it");
        let [gate, up] = [own.gate.floats(driver, entries * width)?, own.up.floats(driver, entries * width)?];
        let given = own.given.floats(driver, entries * x.cols)?;
        let tiles =
            |x_rows| GroupedRows::Tiles { tiles: routed.tiles, num_tiles: routed.num_tiles, x_rows, out_rows: routed.places };
        let mut input = |x: Rows, of: &CudaLinear, x_rows| -> Result<_, CudaError> {
            let at = if tile_rows == GROUPED_ROWS[0] { x.at } else { dense.rounded_for(x, of)? };
            Ok(GroupedInput { x: at, x_stride: x.cols, rows: tiles(x_rows), tile_rows })
        };
        let choices =
            |has_own_x| Choices { chosen: routed.chosen, num_chosen: experts.rule.num_chosen, count: x.count, has_own_x };
        let adapted = |role: fn(&Expert) -> &Linear, group: Group<'_>, out, out_features| {
            let site = |expert: Option<&Expert>| expert.and_then(|expert| role(expert).site);
            let ends = site(experts.experts.first()).zip(site(experts.experts.last()));
            let range = ends.map(|(one, other)| (one.min(other), one.max(other)));
            ExpertTarget { sites: group.sites, range, out, out_features }
        };
        let targets = [(gates, gate, width), (ups, up, width)];
        let of_gate = input(x, gates.first, routed.rows)?;
        // SAFETY: `x` has the rows that tiles name; gate, up and what is given have one for each choice.
        unsafe {
            if is_plain {
                grouped::multiply(driver, &of_gate, &targets[..1])?;
            } else if gates.first.dtype() == ups.first.dtype() {
                grouped::multiply(driver, &of_gate, &targets)?;
            } else {
                grouped::multiply(driver, &of_gate, &targets[..1])?;
                grouped::multiply(driver, &input(x, ups.first, routed.rows)?, &targets[1..])?;
            }
            let adapted_gates = [adapted(gate_or_up, gates, gate, width), adapted(|it| &it.up, ups, up, width)];
            lora.adapt_experts(driver, x, &choices(false), &adapted_gates[..if is_plain { 1 } else { 2 }])?;
            let weights = if experts.scales_input { routed.weights } else { 0 };
            let gated = Rows { at: gate, count: entries, cols: width, element: ElementType::F32 };
            let up = if is_plain { 0 } else { up };
            self.activate(gated, up, (gate, ElementType::F32), Gating { weights, ..gating(experts.activation) })?;
            grouped::multiply(driver, &input(gated, downs.first, routed.places)?, &[(downs, given, x.cols)])?;
            let adapted_downs = [adapted(|it| &it.down, downs, given, x.cols)];
            lora.adapt_experts(driver, gated, &choices(true), &adapted_downs)?;
        }
        Ok(given)
    }

    /// What the shared expert makes of every row, and the logits of its weight, or 0.
    fn shared_expert(
        &self,
        state: &mut State,
        shared: &SharedExpert,
        activation: ExpertActivation,
        x: Rows,
    ) -> Result<(DevicePtr, DevicePtr), CudaError> {
        let driver = self.driver();
        let own = &mut state.experts;
        let SharedExpert { expert: Expert { gate, up, down }, weight } = shared;
        let width = up.out_features;
        let [gated, other] = [own.gate.floats(driver, x.count * width)?, own.up.floats(driver, x.count * width)?];
        let out = own.shared.floats(driver, x.count * x.cols)?;
        let logits = if weight.is_some() { own.shared_logits.floats(driver, x.count)? } else { 0 };
        let gates = gate.as_ref().map(|gate| plain(gate, gated));
        let (at_up, other) = if gate.is_some() { (other, other) } else { (gated, 0) };
        let weights = weight.as_ref().map(|weight| plain(weight, logits));
        let products: Vec<_> = gates.into_iter().chain([plain(up, at_up)]).chain(weights).collect();
        let rows = Rows { at: gated, count: x.count, cols: width, element: ElementType::F32 };
        // SAFETY: `x` is a buffer of its shape; the others were made for its rows and these widths.
        unsafe {
            self.products(state, x, &products)?;
            self.activate(rows, other, (gated, ElementType::F32), gating(activation))?;
            self.products(state, rows, &[plain(down, out)])?;
        }
        Ok((out, logits))
    }
}

impl ExpertPhases for CudaBackend {
    fn experts(&self, args: ExpertArgs<'_>, step: &StepMetadata) {
        done(self.try_experts(args, &step.adapters));
    }
}

fn gating(activation: ExpertActivation) -> Gating {
    match activation {
        ExpertActivation::Gated(activation) | ExpertActivation::Plain(activation) => Gating::of(activation),
        ExpertActivation::Clamped { alpha, limit } => {
            Gating { activation: ActivationKind::Clamped as u32, alpha, limit, ..Gating::of(Activation::Silu) }
        }
    }
}

/// Rows of a tile: the more, the more rows experts have on average, if all their weights have kernels for them.
fn tile_rows(experts: &Experts, num_rows: usize) -> usize {
    let [few, many, most] = GROUPED_ROWS;
    let all = |has: fn(&CudaLinear) -> bool| {
        let first = experts.experts.first();
        first.is_some_and(|expert| expert.linears().all(|linear| has(cuda(linear))))
    };
    let have_more_than = |rows: usize| num_rows * experts.rule.num_chosen > rows * experts.experts.len();
    if have_more_than(MOST_ROWS) && all(grouped::has_tiles) {
        most
    } else if have_more_than(MANY_ROWS) && all(grouped::has_many_rows) {
        many
    } else {
        few
    }
}

/// Tiles of so many choices at most: an expert's last one may have fewer rows than others.
fn most_tiles(entries: usize, num_experts: usize, tile_rows: usize) -> usize {
    entries.min(num_experts + entries / tile_rows)
}

/// Bytes of each of the buffers in the largest step.
fn planned_bytes(shape: &WorkspaceShape) -> [usize; 8] {
    let &WorkspaceShape { num_tokens, hidden_size, intermediate_size, num_experts, num_chosen_experts, .. } = shape;
    if num_experts == 0 {
        return [0; 8];
    }
    let num_rows = num_tokens.min(MAX_ROWS);
    let entries = num_rows * num_chosen_experts;
    let floats = |count: usize| count * size_of::<f32>();
    [
        floats(num_rows * num_experts),
        floats(4 * entries),
        most_tiles(entries, num_experts, GROUPED_ROWS[0]) * size_of::<GroupTile>(),
        floats(entries.max(num_rows) * intermediate_size),
        floats(entries.max(num_rows) * intermediate_size),
        floats(entries * hidden_size),
        floats(num_rows * hidden_size),
        floats(num_rows),
    ]
}

/// Bytes of all buffers once the largest step has run.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    planned_bytes(shape).iter().sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::{GROUPED_ROWS, most_tiles};

    #[test]
    fn there_is_a_tile_for_the_rows_of_every_expert() {
        // The most that are needed: as many experts as can have a tile that is not full, and full ones of the rest.
        for num_experts in [1_usize, 3, 8, 128] {
            for entries in 1_usize..600 {
                for tile_rows in GROUPED_ROWS {
                    let partial = entries.min(num_experts);
                    let needed = partial + (entries - partial) / tile_rows;
                    let most = most_tiles(entries, num_experts, tile_rows);
                    assert!(most >= needed, "{entries} choices of {num_experts} experts: {most} tiles, not {needed}");
                }
            }
        }
    }
}
