//! A transformer over the phases of the decoder: each tile is a request whose rows are its patches, which all see each
//! other, over a KV storage of one layer that every layer writes anew.

use device::{
    AttentionArgs, AttentionParams, Backend, CacheEngine, Constant, GateUpArgs, HeadNorm, KvCacheSpec, KvDType, KvGroupMetadata,
    KvShape, Linear, Mask, Norm, NormSpan, Precision, Projection, ResidualArgs, RopeArgs, RopeTable, StepMetadata, Tensor,
};
use images::Tile;

use super::{
    config::{Positions, Standard, TowerConfig},
    frames::{Convolutions, STRIDE, WIDTH},
    grid::{Grid, learned, read_patch, rope_table},
    tiled::TiledTower,
    tower_layer::TowerLayer,
    weights::TowerWeights,
};
use crate::EngineError;

/// Patches that are computed together at most, but for a tile that has more.
pub(crate) const MAX_ROWS: usize = 4096;
/// Tokens of a block of its storage.
pub(super) const BLOCK_SIZE: usize = 32;

/// A tower that was loaded.
pub(crate) struct Tower {
    pub(super) config: TowerConfig,
    precision: Precision,
    stem: Stem,
    /// `[side * side, hidden_size]`, behind that of the class row if there is one.
    pub(super) positions: Option<Constant>,
    pub(super) class: Option<Constant>,
    pre_norm: Option<Norm>,
    post_norm: Option<Norm>,
    /// What the last hidden states are multiplied by, less the first of these, times the second.
    standard: Option<(f32, Option<[Constant; 2]>)>,
    pub(super) layers: Vec<TowerLayer>,
    /// Of one that sees all tiles of an image at once.
    pub(super) tiled: Option<TiledTower>,
    pub(super) buffers: Option<Buffers>,
}

/// From tiles to hidden states.
enum Stem {
    /// A matrix over the values of a patch, and one over those of a patch of several frames.
    Patches(Linear, Option<Linear>),
    /// Of a tower that hears.
    Frames(Convolutions),
}

/// Activations; rows are patches.
pub(super) struct Buffers {
    /// What a matrix over patches takes.
    pub(super) patches: Option<Tensor>,
    pub(super) hidden: Tensor,
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) out: Tensor,
    pub(super) inner: Tensor,
    /// Of a tower whose products are bounded: what goes into one, and a second activation.
    pub(super) bounded: Option<[Tensor; 2]>,
    pub(super) cache: CacheEngine,
    max_rows: usize,
    max_blocks: usize,
}

/// What the rows of a pass are, as a step: all tiles, and all windows.
struct Pass {
    tiles: StepMetadata,
    windows: StepMetadata,
    rope: Option<RopeTable>,
}

impl TowerConfig {
    pub(super) fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    pub(super) fn num_kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    /// Columns of keys, and of values.
    pub(super) fn kv_size(&self) -> usize {
        self.num_kv_heads() * self.head_dim()
    }

    /// Values of a patch, of one frame.
    pub(super) fn patch_len(&self) -> usize {
        if self.frames.is_some() { 0 } else { 3 * self.patch_size * self.patch_size }
    }

    /// Columns of what comes out: of the last hidden states, and of those that are taken beside them.
    pub(crate) fn output_size(&self) -> usize {
        self.hidden_size * (1 + self.tiled.as_ref().map_or(0, |tiled| tiled.taken.len()))
    }

    /// Patches along a side of a tile, of a tower whose tiles all have one.
    pub(super) fn side(&self) -> usize {
        if let Positions::Learned { side } = self.positions { side } else { 0 }
    }

    /// Columns of the widest product before the layers, of a tower that hears.
    pub(crate) fn frame_columns(&self) -> usize {
        self.frames.map_or(0, |frames| WIDTH * frames.num_mel_bins.max(self.hidden_size))
    }

    /// Bytes of what comes before the layers, of a tower that hears: of one chunk.
    fn frame_bytes(&self) -> u64 {
        let (Some(frames), Positions::Line { len } | Positions::Turns { len, .. }) = (self.frames, &self.positions) else {
            return 0;
        };
        let first = STRIDE * (WIDTH * frames.num_mel_bins + 2 * self.hidden_size);
        let second = (WIDTH + 2) * self.hidden_size;
        // What is put together, and a copy where phases read it.
        (2 * len * (first + second) * size_of::<f32>()) as u64
    }

    /// Where the learned vectors of the row before the patches, and of the first patch, lie.
    fn first_positions(&self) -> [usize; 2] {
        match self.positions {
            Positions::Turned { side, .. } => [side * side, 0],
            _ => [0, self.num_class_rows()],
        }
    }

    /// Rows before the patches of a tile.
    fn num_class_rows(&self) -> usize {
        usize::from(self.has_class)
    }

    /// Rows and columns of patches of a tile; of a sound's frames one row.
    pub(crate) fn patches(&self, tile: &Tile) -> [usize; 2] {
        match self.frames {
            Some(_) => [tile.height, tile.width.div_ceil(STRIDE)],
            None => [tile.height / self.patch_size, tile.width / self.patch_size],
        }
    }

    fn kv_spec(&self, num_blocks: usize, dtype: KvDType) -> Result<KvCacheSpec, EngineError> {
        let shape = KvShape::new(self.num_kv_heads(), self.head_dim());
        // Block 0 is read by nobody.
        Ok(KvCacheSpec::uniform((num_blocks + 1, BLOCK_SIZE), dtype, shape, 1)?)
    }

    /// Bytes of the activations of a pass of so many rows.
    pub(crate) fn activation_bytes(&self, max_rows: usize) -> u64 {
        let bounded = if self.is_bounded { self.hidden_size.max(self.intermediate_size) + self.intermediate_size } else { 0 };
        let frames = if self.sees_frames { 1 + self.num_frames } else { 1 };
        let columns = self.patch_len() * frames + 3 * self.hidden_size + 2 * self.kv_size() + self.intermediate_size + bounded;
        let kv = self.kv_spec(max_rows.div_ceil(BLOCK_SIZE), KvDType::F32).ok().and_then(|spec| spec.total_bytes()).unwrap_or(0);
        (columns * max_rows * size_of::<f32>()) as u64 + kv + self.frame_bytes()
    }
}

impl Tower {
    pub(crate) fn new(
        weights: &mut TowerWeights<'_>,
        places: &[&'static str],
        config: &TowerConfig,
        precision: Precision,
    ) -> Result<Self, EngineError> {
        let names = config.names;
        let hidden = config.hidden_size;
        let first = config.frames.map_or(names.patch, |frames| frames.names[0]);
        let place = weights.place(places, &format!("{first}.weight"))?;
        let named = |name: &str| format!("{place}{name}");
        let kind = (config.norm, config.eps, 0.0);
        let layers =
            (0..config.num_layers).map(|layer| TowerLayer::new(weights, config, layer, &named)).collect::<Result<_, _>>()?;
        let positions = match config.positions {
            Positions::Learned { side }
            | Positions::Fractions { side }
            | Positions::Resized { side }
            | Positions::Interpolated { side, .. }
            | Positions::Cubic { side, .. }
            | Positions::Turned { side, .. } => {
                let num = side * side + config.num_class_rows();
                Some(weights.constant(&named(names.positions), &[num, hidden])?)
            }
            Positions::Line { len } => Some(weights.constant(&named(names.positions), &[len, hidden])?),
            Positions::Axes { side, .. } => Some(weights.constant(&named(names.positions), &[2, side, hidden])?),
            Positions::Rotary { .. } | Positions::Turns { .. } => None,
        };
        let standard = match config.standard {
            Some(Standard { factor, names: Some(names) }) => {
                let [bias, scale] = names.map(|name| weights.constant(&named(name), &[hidden]));
                Some((factor, Some([bias?, scale?])))
            }
            other => other.map(|standard| (standard.factor, None)),
        };
        let stem = if let Some(frames) = &config.frames {
            Stem::Frames(Convolutions::new(weights, frames, hidden, &named)?)
        } else {
            let shape = [config.num_frames, config.patch_size];
            let (patch, of_frames) = (named(names.patch), config.sees_frames && config.num_frames > 1);
            let of_one = weights.patches(&patch, hidden, config.patch_layout, shape)?;
            let of_frames = of_frames.then(|| weights.frame_patches(&patch, hidden, shape)).transpose()?;
            Stem::Patches(of_one, of_frames)
        };
        let tiled = config.tiled.as_ref().map(|tiled| TiledTower::new(weights, (config, tiled), &place)).transpose()?;
        let mut norm = |is_there: bool, name| is_there.then(|| weights.norm(&named(name), hidden, kind)).transpose();
        Ok(Self {
            pre_norm: norm(config.has_pre_norm, names.pre_norm)?,
            post_norm: norm(config.has_post_norm, names.post_norm)?,
            stem,
            class: config.has_class.then(|| weights.constant(&named(names.class), &[hidden])).transpose()?,
            positions,
            standard,
            layers,
            tiled,
            config: config.clone(),
            precision,
            buffers: None,
        })
    }

    /// The hidden states of the patches of tiles, in the order of each tile's grid, `[patches, hidden_size]` each: of each tile
    /// those behind the layers of `taken`, and behind the last.
    pub(crate) fn run(
        &mut self,
        backend: &dyn Backend,
        tiles: &[(&Tile, &Grid)],
        taken: &[usize],
    ) -> Result<Vec<Vec<Vec<f32>>>, EngineError> {
        let mut outputs = Vec::with_capacity(tiles.len());
        let (mut first, mut num_rows) = (0, 0);
        let num_class_rows = self.config.num_class_rows();
        let rows = |(_, grid): &(&Tile, &Grid)| grid.len() + num_class_rows;
        let mut bounds = Vec::new();
        for (i, tile) in tiles.iter().enumerate() {
            if num_rows > 0 && num_rows + rows(tile) > MAX_ROWS {
                bounds.push(first..i);
                (first, num_rows) = (i, 0);
            }
            num_rows += rows(tile);
        }
        bounds.push(first..tiles.len());
        for range in bounds.into_iter().filter(|range| !range.is_empty()) {
            let num_rows = tiles[range.clone()].iter().map(rows).sum();
            outputs.extend(self.pass(backend, &tiles[range], num_rows, taken)?);
        }
        Ok(outputs)
    }

    /// The matrix over the values of a patch.
    pub(super) fn patch_matrix(&self) -> Result<&Linear, EngineError> {
        match &self.stem {
            Stem::Patches(patch, _) => Ok(patch),
            Stem::Frames(_) => Err(EngineError::Internal("patches for a tower that hears".into())),
        }
    }

    /// Makes room for so many rows, in so many blocks.
    pub(super) fn reserve(&mut self, backend: &dyn Backend, max_rows: usize, max_blocks: usize) -> Result<Buffers, EngineError> {
        if let Some(buffers) = self.buffers.take().filter(|it| it.max_rows >= max_rows && it.max_blocks >= max_blocks) {
            return Ok(buffers);
        }
        let (hidden, config) = (self.config.hidden_size, &self.config);
        // A GPU has kernels for some sizes of heads.
        let prefers_bf16 = backend.prefers_bf16_cache() || !backend.memory()?.is_host;
        let shape = KvShape::new(config.num_kv_heads(), config.head_dim());
        let takes_bf16 = backend.check_kv_layer(KvDType::BF16, shape, config.num_heads / config.num_kv_heads()).is_ok();
        let is_fast = self.precision != Precision::Exact && prefers_bf16 && takes_bf16;
        let kv_dtype = if is_fast { KvDType::BF16 } else { KvDType::F32 };
        let alloc = |cols| backend.alloc(max_rows, cols);
        Ok(Buffers {
            patches: match &self.stem {
                Stem::Patches(patch, _) => Some(alloc(patch.in_features)?),
                Stem::Frames(_) => None,
            },
            hidden: alloc(hidden)?,
            q: alloc(hidden)?,
            k: alloc(config.kv_size())?,
            v: alloc(config.kv_size())?,
            out: alloc(hidden)?,
            inner: alloc(config.intermediate_size)?,
            bounded: if config.is_bounded {
                Some([alloc(hidden.max(config.intermediate_size))?, alloc(config.intermediate_size)?])
            } else {
                None
            },
            cache: backend.alloc_kv_cache(&config.kv_spec(max_blocks, kv_dtype)?)?,
            max_rows,
            max_blocks,
        })
    }

    /// Of each tile, the states behind the last layer, and before them those behind the layers of `taken`.
    fn pass(
        &mut self,
        backend: &dyn Backend,
        tiles: &[(&Tile, &Grid)],
        num_rows: usize,
        taken: &[usize],
    ) -> Result<Vec<Vec<Vec<f32>>>, EngineError> {
        let pass = self.steps(tiles);
        let mut buffers = self.reserve(backend, num_rows, num_blocks(&pass.tiles).max(num_blocks(&pass.windows)))?;
        self.embed(backend, tiles, &mut buffers, num_rows)?;
        let mut outputs = vec![Vec::with_capacity(taken.len() + 1); tiles.len()];
        let mut begun = None;
        for (number, layer) in self.layers.iter().enumerate() {
            let step = if layer.has_window { &pass.windows } else { &pass.tiles };
            if begun.replace(layer.has_window) != Some(layer.has_window) {
                backend.begin_step(step);
            }
            match &layer.bounds {
                Some(bounds) => self.bounded_layer(backend, (layer, bounds), (step, pass.rope.as_ref()), &mut buffers),
                None => self.layer(backend, layer, (step, pass.rope.as_ref()), &mut buffers),
            }
            if taken.contains(&number) {
                backend.fetch(&mut buffers.hidden);
                self.take(tiles, &buffers.hidden, None, &mut outputs);
            }
        }
        backend.fetch(&mut buffers.hidden);
        self.take(tiles, &buffers.hidden, self.post_norm.as_ref(), &mut outputs);
        if let Some((factor, bias_and_scale)) = &self.standard {
            let last = outputs.iter_mut().filter_map(|states| states.last_mut());
            last.for_each(|states| standardize(states, *factor, bias_and_scale.as_ref()));
        }
        self.buffers = Some(buffers);
        Ok(outputs)
    }

    /// Adds to the outputs of each tile its hidden states, without the row before its patches.
    fn take(&self, tiles: &[(&Tile, &Grid)], hidden: &Tensor, norm: Option<&Norm>, outputs: &mut [Vec<Vec<f32>>]) {
        let (cols, mut row) = (self.config.hidden_size, 0);
        for ((_, grid), outputs) in tiles.iter().zip(outputs) {
            row += self.config.num_class_rows();
            let mut states = hidden.as_slice()[row * cols..(row + grid.len()) * cols].to_vec();
            if let Some(norm) = norm {
                states.chunks_exact_mut(cols).for_each(|row| norm.apply(row));
            }
            outputs.push(states);
            row += grid.len();
        }
    }

    /// Patches as hidden states, those of rows before them being of no meaning.
    fn patches(
        &self,
        backend: &dyn Backend,
        tiles: &[(&Tile, &Grid)],
        buffers: &mut Buffers,
        num_rows: usize,
    ) -> Result<(), EngineError> {
        let Buffers { patches, hidden, .. } = buffers;
        let patch = match &self.stem {
            Stem::Patches(_, Some(of_frames)) if tiles.iter().all(|(tile, _)| num_frames(tile) > 1) => {
                return self.patches_of_frames(backend, tiles, of_frames, (hidden, num_rows));
            }
            Stem::Patches(patch, _) => patch,
            Stem::Frames(convolutions) => {
                hidden.set_rows(num_rows);
                let mut row = 0;
                for (tile, grid) in tiles {
                    // Of a chunk whose end layers do not see, no more than they see.
                    let states = convolutions.run(backend, tile)?;
                    for states in states.chunks_exact(self.config.hidden_size).take(grid.len()) {
                        hidden.row_mut(row).copy_from_slice(states);
                        row += 1;
                    }
                }
                return Ok(());
            }
        };
        let patches = patches.as_mut().expect("buffers of a tower that sees");
        patches.set_rows(num_rows);
        let mut row = 0;
        for (tile, grid) in tiles {
            if self.config.has_class {
                patches.row_mut(row).fill(0.0);
                row += 1;
            }
            for place in &grid.places {
                read_patch(tile, *place, self.config.patch_size, &mut patches.row_mut(row)[..self.config.patch_len()]);
                row += 1;
            }
        }
        backend.store(patches);
        let step = StepMetadata::default();
        backend.norm_linear(patches, None, &mut [Projection { linear: patch, out: hidden }], &step);
        backend.fetch(hidden);
        Ok(())
    }

    /// The same of tiles that have several frames, in a tower without rows before its patches. Values are in the order of the
    /// checkpoint: channel, frame, line.
    fn patches_of_frames(
        &self,
        backend: &dyn Backend,
        tiles: &[(&Tile, &Grid)],
        linear: &Linear,
        (hidden, num_rows): (&mut Tensor, usize),
    ) -> Result<(), EngineError> {
        let (side, num_frames) = (self.config.patch_size, self.config.num_frames);
        let mut patches = backend.alloc(num_rows, linear.in_features)?;
        patches.set_rows(num_rows);
        hidden.set_rows(num_rows);
        let places = tiles.iter().flat_map(|(tile, grid)| grid.places.iter().map(move |place| (tile, place)));
        for (row, (tile, (y, x))) in places.enumerate() {
            let area = tile.width * tile.height;
            for (line, out) in patches.row_mut(row)[..3 * num_frames * side * side].chunks_exact_mut(side).enumerate() {
                let (plane, dy) = (line / side, line % side);
                let (channel, frame) = (plane / num_frames, plane % num_frames);
                let start = (3 * frame + channel) * area + (y * side + dy) * tile.width + x * side;
                out.copy_from_slice(&tile.pixels[start..start + side]);
            }
        }
        backend.store(&mut patches);
        backend.norm_linear(&patches, None, &mut [Projection { linear, out: &mut *hidden }], &StepMetadata::default());
        backend.fetch(hidden);
        Ok(())
    }

    /// The same, with their positions.
    fn embed(
        &self,
        backend: &dyn Backend,
        tiles: &[(&Tile, &Grid)],
        buffers: &mut Buffers,
        num_rows: usize,
    ) -> Result<(), EngineError> {
        self.patches(backend, tiles, buffers, num_rows)?;
        let hidden = &mut buffers.hidden;
        let add = |row: &mut [f32], index: usize, weight: f32| {
            let Some(positions) = &self.positions else { return };
            let position = &positions[index * row.len()..];
            row.iter_mut().zip(position).for_each(|(x, position)| *x += position * weight);
        };
        let norm = |hidden: &mut Tensor| {
            let Some(norm) = &self.pre_norm else { return };
            (0..num_rows).for_each(|row| norm.apply(hidden.row_mut(row)));
        };
        if self.config.norms_first {
            norm(hidden);
        }
        let [of_class, of_patches] = self.config.first_positions();
        let mut row = 0;
        for (_, grid) in tiles {
            if let Some(class) = &self.class {
                hidden.row_mut(row).copy_from_slice(class);
                add(hidden.row_mut(row), of_class, 1.0);
                row += 1;
            }
            for place in &grid.places {
                for (index, weight) in learned(&self.config.positions, grid, *place) {
                    add(hidden.row_mut(row), of_patches + index, weight);
                }
                row += 1;
            }
        }
        if !self.config.norms_first {
            norm(hidden);
        }
        backend.store(hidden);
        Ok(())
    }

    pub(super) fn layer(
        &self,
        backend: &dyn Backend,
        layer: &TowerLayer,
        (step, rope): (&StepMetadata, Option<&RopeTable>),
        buffers: &mut Buffers,
    ) {
        let Buffers { hidden, q, k, v, out, inner, cache, .. } = buffers;
        let [of_q, of_k, of_v] = &layer.qkv;
        let projections = &mut [
            Projection { linear: of_q, out: &mut *q },
            Projection { linear: of_k, out: &mut *k },
            Projection { linear: of_v, out: &mut *v },
        ];
        backend.norm_linear(hidden, Some(&layer.attn_norm), projections, step);
        self.attend(backend, layer, (step, rope), [q, k, v, out], cache, Some(&layer.attn_output));
        let [post_attn, post_ffn] = layer.inner.as_ref().map_or([None; 2], |inner| [&inner.post_attn, &inner.post_ffn].map(Some));
        let add = |x: &Tensor, linear: &Linear, (post_norm, scale): (Option<&Norm>, f32), residual: &mut Tensor| {
            backend.linear_residual(ResidualArgs { x, linear, post_norm, scale, residual }, step);
        };
        add(out, &layer.attn_output, (post_attn, layer.scales[0]), hidden);
        let (gate, up, activation) = (layer.gate.as_ref(), &layer.up, self.config.activation);
        let (norm, next) = (Some(&layer.ffn_norm), Some(&layer.down));
        backend.gate_up(GateUpArgs { x: hidden, norm, gate, up, activation, out: inner, next }, step);
        add(inner, &layer.down, (post_ffn, layer.scales[1]), hidden);
    }

    /// From queries, keys and values to what attention gives; `next`: see [`AttentionArgs::next`].
    pub(super) fn attend(
        &self,
        backend: &dyn Backend,
        layer: &TowerLayer,
        (step, rope): (&StepMetadata, Option<&RopeTable>),
        [q, k, v, out]: [&mut Tensor; 4],
        cache: &CacheEngine,
        next: Option<&Linear>,
    ) {
        let head_norm = |norm| HeadNorm { norm, span: NormSpan::Head };
        let [q_norm, k_norm, v_norm] = match (&layer.inner, &layer.qk_norms) {
            (Some(inner), _) => [Some(&inner.q), Some(&inner.k), Some(&inner.v)],
            (None, Some([q, k])) => [Some(q), Some(k), None],
            (None, None) => [None; 3],
        }
        .map(|norm| norm.map(head_norm));
        let args = RopeArgs::new(q, Some((k, Some(v))), rope, (cache, 0));
        backend.rope_and_cache(RopeArgs { q_norm, k_norm, v_norm, ..args }, step);
        let heads = [self.config.num_heads, self.config.num_kv_heads(), self.config.head_dim()];
        let mask = if step.span_ends.is_empty() { Mask::Full } else { Mask::Spans };
        let mut params = AttentionParams { mask, ..AttentionParams::new(heads, self.precision) };
        if layer.inner.is_some() {
            params.scale = 1.0;
        }
        backend.attention(AttentionArgs { q, out, cache, layer: 0, sinks: None, params, next }, step);
    }

    fn steps(&self, tiles: &[(&Tile, &Grid)]) -> Pass {
        let class = self.config.num_class_rows();
        let whole: Vec<_> = tiles.iter().map(|(_, grid)| [grid.len() + class, grid.num_seen() + class]).collect();
        let windows: Vec<_> = tiles.iter().flat_map(|(_, grid)| grid.windows.iter().map(|len| [*len; 2])).collect();
        let before = || std::iter::repeat_n(None, class);
        let places: Vec<_> = tiles.iter().flat_map(|(_, grid)| before().chain(grid.places.iter().copied().map(Some))).collect();
        Pass {
            tiles: segments(&whole),
            windows: if self.config.windows.is_some() { segments(&windows) } else { StepMetadata::default() },
            rope: rope_table(&self.config.positions, &places, self.config.head_dim()),
        }
    }
}

/// Frames of a tile.
fn num_frames(tile: &Tile) -> usize {
    tile.pixels.len() / (3 * tile.height * tile.width).max(1)
}

/// Makes states what [`Standard`] says.
fn standardize(states: &mut [f32], factor: f32, bias_and_scale: Option<&[Constant; 2]>) {
    for x in &mut *states {
        *x *= factor;
    }
    let Some([bias, scale]) = bias_and_scale else { return };
    for row in states.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias.iter().zip(scale.iter())).for_each(|(x, (bias, scale))| *x = (*x - bias) * scale);
    }
}

/// A step of tiles with so many rows each, all of them new, of which the first so many are seen; each begins a block of its own.
fn segments(tiles: &[[usize; 2]]) -> StepMetadata {
    let max_blocks = tiles.iter().map(|[rows, _]| rows.div_ceil(BLOCK_SIZE)).max().unwrap_or(0);
    let mut group = KvGroupMetadata { max_blocks, ..KvGroupMetadata::default() };
    let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
    let are_all_seen = tiles.iter().all(|[rows, seen]| rows == seen);
    let mut next_block = 1;
    for &[rows, seen] in tiles {
        let num_blocks = rows.div_ceil(BLOCK_SIZE);
        group.slot_mapping.extend((0..rows).map(|i| (next_block * BLOCK_SIZE + i) as i64));
        // A request has no more rows than keys, so what is not seen may be several.
        for first in (0..rows).step_by(seen.max(1)) {
            let len = seen.min(rows - first);
            group.block_tables.extend((0..max_blocks).map(|i| if i < num_blocks { (next_block + i) as u32 } else { 0 }));
            step.positions.extend(0..len as u32);
            step.query_start_loc.push(step.positions.len() as u32);
            step.seq_lens.push(seen as u32);
            if !are_all_seen {
                step.span_ends.extend(std::iter::repeat_n(seen as u32, len));
            }
        }
        next_block += num_blocks;
    }
    step.rope_positions = (0..step.positions.len() as u32).collect();
    step.groups.push(group);
    step
}

/// Blocks of a step's tiles.
fn num_blocks(step: &StepMetadata) -> usize {
    let last = step.groups.iter().filter_map(|group| group.slot_mapping.last()).max();
    last.map_or(0, |slot| *slot as usize / BLOCK_SIZE)
}
