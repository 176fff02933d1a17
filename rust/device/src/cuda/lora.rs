//! Adapters on a GPU: their weights lie there, in one piece of memory an adapter, and kernels add to the rows that have one what
//! it says of a layer. Rows without one are not touched.
//!
//! What the host asks for depends on the layers that adapters of the step change, on their ranks and on the number of rows. Which
//! rows have which adapter is in lists that are copied once a step.

use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::{Arc, Weak},
};

use crate::{
    Adapter, AdapterRows, DType, DeviceError, EmbeddingDelta, Linear, LinearDelta, LowRank, WeightView, WorkspaceShape,
    kernel_args::{
        DevicePtr, ElementType, LORA_ROWS, LoraArgs, LoraDelta, LoraEmbedArgs, LoraEmbedding, LoraRow, LoraTarget, LoraTile,
        MAX_TARGETS,
    },
};

use super::{
    CudaError,
    attention::StepLists,
    dense::Product,
    driver::{DeviceMemory, Driver, Plain},
    kernels::{Kernel, MAX_GRID_Y, launch},
    linear::{CudaLinear, Form, Rows},
    memory::Scratch,
};

/// Values of an adapter begin at a multiple of this.
const ALIGNMENT: usize = 256;
/// Rows of a first factor that a CTA of `lora_shrink` takes.
const RANKS_PER_CTA: usize = 4;
/// Columns of a CTA of `lora_expand` and `lora_embed`.
const COLS_PER_CTA: usize = 256;
/// The same of `lora_keep`.
const KEPT_COLS: usize = 1024;

/// What an adapter does to a layer, as far as launches depend on it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Use {
    /// Rows of its first factor, or of what stands in the place of others.
    rank: usize,
    /// Whether there is a second factor.
    has_low: bool,
    /// Whether it must see the layer's own product alone.
    is_kept: bool,
}

impl Use {
    /// Of one adapter or another.
    fn or(self, other: Self) -> Self {
        Self { rank: self.rank.max(other.rank), has_low: self.has_low || other.has_low, is_kept: self.is_kept || other.is_kept }
    }
}

/// Which layers an adapter changes.
#[derive(Clone, Default)]
pub struct Uses {
    sites: BTreeMap<u32, Use>,
    changes_embedding: bool,
}

impl Uses {
    /// Adds what another adapter does; whether that is more.
    fn add(&mut self, other: &Self) -> bool {
        let mut is_more = other.changes_embedding && !self.changes_embedding;
        self.changes_embedding |= other.changes_embedding;
        for (site, of) in &other.sites {
            let known = self.sites.entry(*site).or_default();
            let both = known.or(*of);
            is_more |= both != *known;
            *known = both;
        }
        is_more
    }

    fn of(&self, sites: RangeInclusive<u32>) -> Option<Use> {
        self.sites.range(sites).map(|(_, of)| *of).reduce(Use::or)
    }
}

/// An adapter's weights on a GPU.
pub struct CudaAdapter {
    /// What follows, and all factors.
    _memory: DeviceMemory,
    /// Weights in the place of others.
    _replaced: Vec<Linear>,
    /// See [`LoraRow`]; of no row.
    row: LoraRow,
    uses: Arc<Uses>,
}

/// Puts values one behind the other, once to count them and once to copy them.
struct Writer<'a> {
    memory: Option<&'a DeviceMemory>,
    end: usize,
}

impl Writer<'_> {
    /// The address of these values; 0 while they are counted.
    fn put<T: Plain>(&mut self, values: &[T]) -> Result<DevicePtr, CudaError> {
        let (at, bytes) = (self.end, size_of_val(values));
        self.end = (at + bytes).next_multiple_of(ALIGNMENT);
        let Some(memory) = self.memory else { return Ok(0) };
        memory.upload(at, values)?;
        Ok(memory.range(at, bytes))
    }

    fn put_some<T: Plain>(&mut self, values: Option<&[T]>) -> Result<DevicePtr, CudaError> {
        values.map_or(Ok(0), |values| self.put(values))
    }

    fn low_rank(&mut self, low_rank: &LowRank) -> Result<LoraDelta, CudaError> {
        let magnitude = low_rank.magnitude.as_ref();
        Ok(LoraDelta {
            a: self.put(low_rank.a().bytes())?,
            b: self.put(low_rank.b())?,
            ids: 0,
            bias: self.put_some(low_rank.bias.as_deref())?,
            factors: self.put_some(magnitude.map(|magnitude| &magnitude.factors[..]))?,
            own_bias: self.put_some(magnitude.and_then(|magnitude| magnitude.bias.as_deref()))?,
            rank: low_rank.rank() as u32,
            reserved: 0,
        })
    }

    fn delta(&mut self, delta: &LinearDelta) -> Result<LoraDelta, CudaError> {
        match delta {
            LinearDelta::LowRank(low_rank) => self.low_rank(low_rank),
            LinearDelta::Replaced(linear) => {
                let linear: &CudaLinear = linear.weight();
                let (a, bias, rank) = (linear.weight(), linear.bias().unwrap_or(0), linear.out_features() as u32);
                Ok(LoraDelta { a, bias, rank, ..LoraDelta::default() })
            }
            LinearDelta::Rows { ids, rows } => {
                // Of an id that is there twice the last row counts.
                let last: BTreeMap<u32, usize> = ids.iter().copied().zip(0..).collect();
                let ids: Vec<u32> = last.keys().copied().collect();
                let rows: Vec<u8> = last.values().flat_map(|row| rows.row(*row)).copied().collect();
                Ok(LoraDelta { a: self.put(&rows)?, ids: self.put(&ids)?, rank: ids.len() as u32, ..LoraDelta::default() })
            }
        }
    }

    fn embedding(&mut self, embedding: &EmbeddingDelta) -> Result<DevicePtr, CudaError> {
        let sorted: BTreeMap<u32, &Vec<f32>> = embedding.rows.iter().map(|(id, row)| (*id, row)).collect();
        let ids: Vec<u32> = sorted.keys().copied().collect();
        let rows: Vec<f32> = sorted.values().flat_map(|row| row.iter()).copied().collect();
        let product = embedding.low_rank.as_ref();
        let header = LoraEmbedding {
            table: self.put_some(embedding.table.as_ref().map(WeightView::bytes))?,
            a: self.put_some(product.map(|product| &product.a[..]))?,
            b: self.put_some(product.map(|product| &product.b[..]))?,
            ids: self.put(&ids)?,
            rows: self.put(&rows)?,
            rank: product.map_or(0, |product| product.rank) as u32,
            num_ids: ids.len() as u32,
        };
        self.put(&[header])
    }

    /// All of an adapter; the row is of no step.
    fn adapter(&mut self, adapter: &Adapter) -> Result<LoraRow, CudaError> {
        let num_sites = adapter.deltas().map(|(site, _)| site as usize + 1).max().unwrap_or(1);
        let mut deltas = vec![LoraDelta::default(); num_sites];
        for (site, delta) in adapter.deltas() {
            deltas[site as usize] = self.delta(delta)?;
        }
        let embedding = adapter.embedding.as_ref().map_or(Ok(0), |embedding| self.embedding(embedding))?;
        Ok(LoraRow { deltas: self.put(&deltas)?, embedding, num_sites: num_sites as u32, row: 0 })
    }
}

/// What launches depend on.
fn use_of(delta: &LinearDelta) -> Use {
    match delta {
        LinearDelta::LowRank(low_rank) => Use { rank: low_rank.rank(), has_low: true, is_kept: low_rank.magnitude.is_some() },
        LinearDelta::Replaced(linear) => Use { rank: linear.out_features, has_low: false, is_kept: true },
        LinearDelta::Rows { ids, .. } => Use { rank: ids.len(), has_low: false, is_kept: true },
    }
}

/// Kernels read f32.
fn check(adapter: &Adapter) -> Result<(), DeviceError> {
    let are_floats = |delta: &LinearDelta| match delta {
        LinearDelta::LowRank(low_rank) => low_rank.a().dtype == DType::F32,
        LinearDelta::Rows { rows, .. } => rows.dtype == DType::F32,
        LinearDelta::Replaced(linear) => {
            let linear: &CudaLinear = linear.weight();
            linear.dtype() == DType::F32 && matches!(linear.form(), Form::Stored(_))
        }
    };
    let table = adapter.embedding.as_ref().and_then(|embedding| embedding.table.as_ref());
    if adapter.deltas().all(|(_, delta)| are_floats(delta)) && table.is_none_or(|table| table.dtype == DType::F32) {
        return Ok(());
    }
    Err(DeviceError::Unsupported("adapters on a GPU are of F32; use device=\"cpu\" for others".into()))
}

/// See [`crate::Device::load_adapter`].
pub fn load(driver: &Arc<dyn Driver>, adapter: &Adapter) -> Result<Adapter, DeviceError> {
    check(adapter)?;
    let mut counted = Writer { memory: None, end: 0 };
    counted.adapter(adapter)?;
    let memory = DeviceMemory::new(driver, counted.end)?;
    let row = Writer { memory: Some(&memory), end: 0 }.adapter(adapter)?;
    let replaced: Vec<_> = adapter
        .deltas()
        .filter_map(|(_, delta)| if let LinearDelta::Replaced(linear) = delta { Some(linear.clone()) } else { None })
        .collect();
    let uses = Uses {
        sites: adapter.deltas().map(|(site, delta)| (site, use_of(delta))).collect(),
        changes_embedding: adapter.embedding.is_some(),
    };
    let bytes = memory.bytes() as u64 + replaced.iter().map(Linear::bytes).sum::<u64>();
    let sites = uses.sites.keys().copied().collect();
    let weights = CudaAdapter { _memory: memory, _replaced: replaced, row, uses: Arc::new(uses) };
    Ok(Adapter::on_device(sites, bytes, Arc::new(weights)))
}

/// What the adapters do that were in a step, for graphs: what is launched depends on nothing else.
#[derive(Default)]
pub struct KnownAdapters {
    uses: Arc<Uses>,
    /// Of these.
    of: Vec<Weak<Uses>>,
}

impl KnownAdapters {
    /// Adds the adapters of a step; whether they do more than those before.
    pub fn add(&mut self, adapters: &[AdapterRows]) -> bool {
        let mut is_more = false;
        for AdapterRows { adapter, .. } in adapters {
            let uses = &adapter.weights::<CudaAdapter>().uses;
            // A weak reference keeps its address from being given to others.
            if self.of.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(uses))) {
                continue;
            }
            self.of.retain(|known| known.strong_count() > 0);
            self.of.push(Arc::downgrade(uses));
            is_more |= Arc::make_mut(&mut self.uses).add(uses);
        }
        is_more
    }

    /// Of all of them.
    pub fn uses(&self) -> &Arc<Uses> {
        &self.uses
    }
}

/// The rows of a step with adapters.
pub struct AdaptedRows {
    /// By adapter.
    pub rows: Vec<LoraRow>,
    /// Of those.
    pub tiles: Vec<LoraTile>,
    /// The same rows by number.
    pub by_number: Vec<LoraRow>,
}

impl AdaptedRows {
    /// Of a step.
    pub fn of(adapters: &[AdapterRows]) -> Self {
        let (mut rows, mut tiles) = (Vec::new(), Vec::new());
        for AdapterRows { adapter, rows: own } in adapters {
            let adapter: &CudaAdapter = adapter.weights();
            for chunk in own.chunks(LORA_ROWS) {
                tiles.push(LoraTile { first_row: rows.len() as u32, num_rows: chunk.len() as u32 });
                rows.extend(chunk.iter().map(|row| LoraRow { row: *row, ..adapter.row }));
            }
        }
        let mut by_number = rows.clone();
        by_number.sort_by_key(|row| row.row);
        Self { rows, tiles, by_number }
    }
}

/// The rows of the phases that follow, on the device.
#[derive(Clone)]
pub struct LoraLists {
    /// `[num_rows]` of [`LoraRow`], by adapter.
    rows: DevicePtr,
    num_rows: usize,
    /// `[num_tiles]` of [`LoraTile`].
    tiles: DevicePtr,
    num_tiles: usize,
    /// The same rows by number.
    by_number: DevicePtr,
    numbers: Vec<u32>,
    /// Of the adapters.
    uses: Vec<Arc<Uses>>,
}

impl LoraLists {
    fn put(arena: &mut StepLists, rows: &AdaptedRows, uses: Vec<Arc<Uses>>) -> Result<Self, CudaError> {
        Ok(Self {
            rows: arena.put(&rows.rows)?,
            num_rows: rows.rows.len(),
            tiles: arena.put(&rows.tiles)?,
            num_tiles: rows.tiles.len(),
            by_number: arena.put(&rows.by_number)?,
            numbers: rows.by_number.iter().map(|row| row.row).collect(),
            uses,
        })
    }

    /// Of a captured graph of so many rows, at these addresses.
    pub fn padded([rows, tiles, by_number]: [DevicePtr; 3], num_rows: usize, uses: &Arc<Uses>) -> Self {
        let numbers = (0..num_rows as u32).collect();
        Self { rows, num_rows, tiles, num_tiles: num_rows, by_number, numbers, uses: vec![Arc::clone(uses)] }
    }

    /// What the adapters do to any of these layers.
    fn of(&self, sites: &RangeInclusive<u32>) -> Option<Use> {
        self.uses.iter().filter_map(|uses| uses.of(sites.clone())).reduce(Use::or)
    }
}

/// The experts of a layer, and what comes of them.
#[derive(Clone, Copy)]
pub struct ExpertTarget {
    /// Numbers of their layers on the device, `[num_experts]`.
    pub sites: DevicePtr,
    /// The first of them and the last; `None`: adapters change none.
    pub range: Option<(u32, u32)>,
    /// `[rows * num_chosen, out_features]`.
    pub out: DevicePtr,
    /// Columns.
    pub out_features: usize,
}

/// Experts that rows have chosen.
#[derive(Clone, Copy)]
pub struct Choices {
    /// `[rows, num_chosen]`.
    pub chosen: DevicePtr,
    /// Experts of a row.
    pub num_chosen: usize,
    /// How many rows there are, of the step's from the first on.
    pub count: usize,
    /// Whether x has a row for each choice.
    pub has_own_x: bool,
}

/// What adapters are computed with.
pub struct Lora {
    keep: Kernel,
    shrink: Kernel,
    expand: Kernel,
    embed: Kernel,
    low: Scratch,
    kept: Scratch,
    /// `None`: no row has an adapter.
    lists: Option<LoraLists>,
}

impl Lora {
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new() -> Result<Self, CudaError> {
        let [keep, shrink, expand, embed] = ["lora_keep", "lora_shrink", "lora_expand", "lora_embed"].map(Kernel::named);
        let (low, kept) = (Scratch::default(), Scratch::default());
        Ok(Self { keep: keep?, shrink: shrink?, expand: expand?, embed: embed?, low, kept, lists: None })
    }

    /// Addresses that graphs know.
    pub fn buffers(&self) -> [DevicePtr; 2] {
        [self.low.at(), self.kept.at()]
    }

    /// The rows of the phases that follow; gives those of the phases before.
    pub fn begin(&mut self, lists: &mut StepLists, adapters: &[AdapterRows]) -> Result<Option<LoraLists>, CudaError> {
        let made = if adapters.iter().all(|of| of.rows.is_empty()) {
            None
        } else {
            let uses = adapters.iter().map(|of| Arc::clone(&of.adapter.weights::<CudaAdapter>().uses)).collect();
            Some(LoraLists::put(lists, &AdaptedRows::of(adapters), uses)?)
        };
        Ok(std::mem::replace(&mut self.lists, made))
    }

    /// Rows of a step that is run before it is recorded, which have no adapters.
    pub fn rehearse(&mut self, lists: &mut StepLists, num_rows: usize, uses: &Arc<Uses>) -> Result<(), CudaError> {
        let rows = vec![LoraRow::default(); num_rows];
        let rows = AdaptedRows { by_number: rows.clone(), rows, tiles: vec![LoraTile::default(); num_rows] };
        let put = LoraLists::put(lists, &rows, vec![Arc::clone(uses)])?;
        // Experts find rows by their numbers.
        self.lists = Some(LoraLists::padded([put.rows, put.tiles, put.by_number], num_rows, uses));
        Ok(())
    }

    /// Steps of that shape are the largest.
    pub fn plan(&mut self, shape: &WorkspaceShape) {
        self.kept.plan(shape.num_tokens * shape.hidden_size * size_of::<f32>());
    }

    /// Goes back to the rows of the phases before.
    pub fn go_back(&mut self, lists: Option<LoraLists>) {
        self.lists = lists;
    }

    /// Whether adapters change what comes of any of these products.
    pub fn touches(&self, products: &[Product<'_>]) -> bool {
        products.iter().any(|product| self.use_of(product.site).is_some())
    }

    fn use_of(&self, site: Option<u32>) -> Option<Use> {
        self.lists.as_ref()?.of(&(site?..=site?))
    }

    /// Puts rows aside that a product is to be added to, where an adapter must see it alone; 0: there are none.
    ///
    /// # Safety
    /// The output has the rows of the step.
    pub unsafe fn keep(&mut self, driver: &Arc<dyn Driver>, product: &Product<'_>) -> Result<DevicePtr, CudaError> {
        let Some(lists) = self.lists.as_ref().filter(|_| product.accumulate) else { return Ok(0) };
        if !self.use_of(product.site).is_some_and(|of| of.is_kept) {
            return Ok(0);
        }
        let width = product.linear.out_features();
        let kept = self.kept.floats(driver, lists.num_rows * width)?;
        for first in (0..lists.num_rows).step_by(MAX_GRID_Y) {
            let args = LoraArgs {
                targets: [target(product), LoraTarget::default(), LoraTarget::default()],
                rows: lists.rows + (first * size_of::<LoraRow>()) as u64,
                kept: kept + (first * width * size_of::<f32>()) as u64,
                ..LoraArgs::default()
            };
            let grid = [width.div_ceil(KEPT_COLS), MAX_GRID_Y.min(lists.num_rows - first), 1];
            // SAFETY: the list names rows of the output, and a row was made for each.
            unsafe { launch(driver, self.keep, grid, &args)? };
        }
        Ok(kept)
    }

    /// Changes what came of products for the rows with adapters; `kept` is what [`Self::keep`] gave.
    ///
    /// # Safety
    /// `x` and the outputs have the rows of the step.
    pub unsafe fn adapt(
        &mut self,
        driver: &Arc<dyn Driver>,
        x: Rows,
        products: &[Product<'_>],
        kept: DevicePtr,
    ) -> Result<(), CudaError> {
        let Some(lists) = &self.lists else { return Ok(()) };
        let touched: Vec<_> = products.iter().filter_map(|product| Some((product, self.use_of(product.site)?))).collect();
        let (num_rows, num_tiles, list, tiles) = (lists.num_rows, lists.num_tiles, lists.rows, lists.tiles);
        for alike in touched.chunk_by(|(one, _), (other, _)| one.scale.to_bits() == other.scale.to_bits()) {
            for some in alike.chunks(MAX_TARGETS) {
                assert_eq!(x.element, ElementType::F32, "what adapters multiply");
                let mut targets = [LoraTarget::default(); MAX_TARGETS];
                targets.iter_mut().zip(some).for_each(|(to, (product, _))| *to = target(product));
                let all = some.iter().map(|(_, of)| *of).reduce(Use::or).unwrap_or_default();
                let scale = some[0].0.scale;
                let args = LoraArgs {
                    x: x.at,
                    targets,
                    rows: list,
                    tiles,
                    kept,
                    scale,
                    ..self.sized(driver, x, some.len(), (num_rows, all))?
                };
                // SAFETY: the caller's promise; the lists name rows of the step.
                unsafe {
                    self.start(driver, (args, all, some.len()), num_tiles, |args, first| LoraArgs {
                        tiles: args.tiles + (first * size_of::<LoraTile>()) as u64,
                        ..args
                    })?;
                }
            }
        }
        Ok(())
    }

    /// The same of experts, whose outputs have a row for each choice.
    ///
    /// # Safety
    /// `x` has the rows that were said, the outputs and choices likewise.
    pub unsafe fn adapt_experts(
        &mut self,
        driver: &Arc<dyn Driver>,
        x: Rows,
        choices: &Choices,
        experts: &[ExpertTarget],
    ) -> Result<(), CudaError> {
        let Some(lists) = &self.lists else { return Ok(()) };
        let touched = |expert: &&ExpertTarget| expert.range.is_some_and(|(first, last)| lists.of(&(first..=last)).is_some());
        let uses = experts.iter().filter_map(|expert| expert.range).filter_map(|(first, last)| lists.of(&(first..=last)));
        let Some(all) = uses.reduce(Use::or) else { return Ok(()) };
        assert!(x.element == ElementType::F32 && experts.len() <= MAX_TARGETS, "what adapters multiply");
        let (mut targets, mut count) = ([LoraTarget::default(); MAX_TARGETS], 0);
        for expert in experts.iter().filter(touched) {
            let (out, sites, out_features) = (expert.out, expert.sites, expert.out_features as u32);
            targets[count] = LoraTarget { out, sites, site: 0, out_features };
            count += 1;
        }
        let num_rows = lists.numbers.partition_point(|number| (*number as usize) < choices.count);
        let (num_chosen, entries) = (choices.num_chosen, num_rows * choices.num_chosen);
        let rows = lists.by_number;
        assert!(entries <= MAX_GRID_Y, "{entries} choices of rows with adapters");
        let args = LoraArgs {
            x: x.at,
            targets,
            rows,
            chosen: choices.chosen,
            num_chosen: num_chosen as u32,
            has_own_x: choices.has_own_x.into(),
            scale: 1.0,
            ..self.sized(driver, x, count, (entries, all))?
        };
        // SAFETY: the caller's promise; the list names rows of these.
        unsafe { self.start(driver, (args, all, count), entries, |args, _| args) }
    }

    /// Arguments with room for products with first factors.
    fn sized(
        &mut self,
        driver: &Arc<dyn Driver>,
        x: Rows,
        num_targets: usize,
        (num_low, all): (usize, Use),
    ) -> Result<LoraArgs, CudaError> {
        let low_stride = if all.has_low { all.rank } else { 0 };
        Ok(LoraArgs {
            // In few sizes: graphs know the address.
            low: self.low.floats(driver, (num_targets * num_low * low_stride).next_power_of_two())?,
            in_features: x.cols as u32,
            num_low: num_low as u32,
            low_stride: low_stride as u32,
            ..LoraArgs::default()
        })
    }

    /// Starts both kernels, for so many tiles; `from` has them begin with another one than the first.
    ///
    /// # Safety
    /// The arguments are right.
    unsafe fn start(
        &self,
        driver: &Arc<dyn Driver>,
        (args, all, num_targets): (LoraArgs, Use, usize),
        num_tiles: usize,
        from: impl Fn(LoraArgs, usize) -> LoraArgs,
    ) -> Result<(), CudaError> {
        let widest = args.targets.iter().map(|target| target.out_features as usize).max().unwrap_or(0);
        for first in (0..num_tiles).step_by(MAX_GRID_Y) {
            let (args, tiles) = (from(args, first), MAX_GRID_Y.min(num_tiles - first));
            // SAFETY: the caller's promise.
            unsafe {
                launch(driver, self.shrink, [all.rank.div_ceil(RANKS_PER_CTA), tiles, num_targets], &args)?;
                if all.has_low {
                    launch(driver, self.expand, [widest.div_ceil(COLS_PER_CTA), tiles, num_targets], &args)?;
                }
            }
        }
        Ok(())
    }

    /// Changes rows of the token embedding, which were multiplied by `scale`.
    ///
    /// # Safety
    /// The output has the rows of the step, and there is a token for each.
    pub unsafe fn embed(&self, driver: &Arc<dyn Driver>, token_ids: DevicePtr, out: Rows, scale: f32) -> Result<(), CudaError> {
        let Some(lists) = &self.lists else { return Ok(()) };
        if !lists.uses.iter().any(|uses| uses.changes_embedding) {
            return Ok(());
        }
        for first in (0..lists.num_rows).step_by(MAX_GRID_Y) {
            let rows = lists.rows + (first * size_of::<LoraRow>()) as u64;
            let args = LoraEmbedArgs { out: out.at, token_ids, rows, cols: out.cols as u32, scale };
            let grid = [out.cols.div_ceil(COLS_PER_CTA), MAX_GRID_Y.min(lists.num_rows - first), 1];
            // SAFETY: the caller's promise; the list names rows of the step.
            unsafe { launch(driver, self.embed, grid, &args)? };
        }
        Ok(())
    }
}

fn target(product: &Product<'_>) -> LoraTarget {
    LoraTarget {
        out: product.out,
        sites: 0,
        site: product.site.unwrap_or(u32::MAX),
        out_features: product.linear.out_features() as u32,
    }
}
