//! The loops around the tiles.
//!
//! Rows are cut into groups whose tiles fit in half of the level 2 cache: one group for all threads while there are few, else
//! groups of each thread's own, so that a row stays in one core's caches from phase to phase. A group meets the panels of a phase
//! one after the other:
//!
//! ```text
//! up to 64 rows   32 rows at a time: a k tile of the panel is dequantized into a ring while the one before it is multiplied
//! more            a part of the panel, up to 640 columns, is dequantized into the level 1 cache and meets all rows
//! ```
//!
//! Every output is the sum over k tiles in order, each tile one instruction, carried in f32. A sum that is stored and loaded is
//! the same, so the bits of a row depend on neither the number of rows nor on groups, parts and threads.

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    super::{PANEL, layout::Lookup},
    acts::ActTiles,
    dequantize::{Dequantize, UNIT},
};
use crate::{
    DeviceError,
    cpu::{
        Amx, ThreadPool,
        amx::{TILE_ROWS, Tiles, WeightTile},
    },
    mmap::Pages,
};

/// From so many rows a thread on threads divide rows, below panels.
const OWN_ROWS: usize = 16;
/// Up to this number of rows weights are dequantized again for every 32.
const RING_ROWS: usize = 64;
/// K tiles of the ring.
const RING: usize = 4;
/// K tiles of a panel that are dequantized together: all of them up to the first number, else up to the second.
const K_TILES: [usize; 2] = [20, 16];
/// Bytes of a group's activations.
const GROUP_BYTES: usize = 1 << 20;
/// Rows of a group at most, and of the groups of many rows at least.
pub(super) const MAX_ROWS: usize = 512;
const MIN_ROWS: usize = 96;
/// Panels of an item at most.
const MAX_WIDTH: usize = 2;

/// Panels to multiply, and what happens with the results. Item i is the panels `i * width()..(i + 1) * width()`, whose results
/// are stored together.
pub(super) trait PanelWork: Sync {
    /// Number of items.
    fn items(&self) -> usize;

    /// Panels of an item, 1 or 2.
    fn width(&self) -> usize;

    /// A panel's weights.
    fn panel(&self, panel: usize) -> Weights<'_>;

    /// Takes some rows of an item: `c` is `[width][rows][32]`.
    fn store(&self, item: usize, rows: Range<usize>, c: &mut [f32]);
}

/// The weights of a panel.
#[derive(Clone, Copy)]
pub(super) enum Weights<'a> {
    /// As tiles take them, `[k tiles]`: f16 times `unit`, or bf16 where there is none.
    Tiles { tiles: &'a [WeightTile], unit: Option<f32> },
    /// Packed, and what makes k tiles of them.
    Packed { planes: [&'a [u8]; 2], lookup: &'a Lookup, dequantize: Dequantize },
}

/// Rows of activations in the forms that the weights of a phase need.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub amx: Amx,
    /// Rows, and k tiles.
    pub rows: usize,
    pub k_tiles: usize,
    /// For [`Weights::Tiles`]; all of a phase are of one type.
    pub floats: &'a ActTiles,
    /// For [`Weights::Packed`].
    pub quads: &'a ActTiles,
}

/// Buffers of the workers of a pool, kept from product to product.
pub(super) struct Workspace {
    workers: Vec<Mutex<Scratch>>,
}

struct Scratch {
    /// A part of a panel, or the ring.
    weights: Pages<u16>,
    /// `[width][rows][32]`.
    c: Pages<f32>,
}

/// Bytes of a worker's buffers.
pub(in crate::cpu::linear) const WORKER_BYTES: usize =
    K_TILES[0] * size_of::<WeightTile>() + MAX_WIDTH * MAX_ROWS * PANEL * size_of::<f32>();

impl Workspace {
    /// Buffers for `num_threads` workers; pages are committed as they are used.
    pub(super) fn new(num_threads: usize) -> Result<Self, DeviceError> {
        let scratch = || {
            let (weights, c) = (Pages::zeroed(K_TILES[0] * PANEL * PANEL)?, Pages::zeroed(MAX_WIDTH * MAX_ROWS * PANEL)?);
            Ok(Mutex::new(Scratch { weights, c }))
        };
        Ok(Self { workers: (0..num_threads).map(|_| scratch()).collect::<Result<_, DeviceError>>()? })
    }

    /// The buffers of a worker; waits while another product of the same worker uses them.
    fn scratch(&self, worker: usize) -> MutexGuard<'_, Scratch> {
        self.workers[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how many workers.
    pub(super) fn num_threads(&self) -> usize {
        self.workers.len()
    }
}

/// How rows are cut into groups.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    rows: usize,
    pub(super) count: usize,
}

impl Groups {
    pub(super) fn new(rows: usize, k_tiles: usize, threads: usize) -> Self {
        let shares = if rows >= OWN_ROWS * threads { threads } else { 1 };
        let most = (GROUP_BYTES / (k_tiles * size_of::<[u16; PANEL]>())).clamp(MIN_ROWS, MAX_ROWS) / TILE_ROWS * TILE_ROWS;
        Self { rows, count: shares * rows.div_ceil(shares).div_ceil(most) }
    }

    /// Rows of group `g`, whole tiles but for the last.
    pub(super) fn rows(self, g: usize) -> Range<usize> {
        let tiles = self.rows.div_ceil(TILE_ROWS);
        let start = |g: usize| (tiles * g / self.count * TILE_ROWS).min(self.rows);
        start(g)..start(g + 1)
    }
}

/// Multiplies all rows by every panel of `work`.
///
/// # Panics
/// When the workspace has fewer workers than the pool.
pub(super) fn multiply(pool: &ThreadPool, workspace: &Workspace, operands: Operands<'_>, work: &dyn PanelWork) {
    let items = work.items();
    if operands.rows == 0 || operands.k_tiles == 0 || items == 0 {
        return;
    }
    let groups = Groups::new(operands.rows, operands.k_tiles, pool.num_threads());
    let units = groups.count * items;
    let grain = units.div_ceil(pool.num_threads() * 6);
    pool.for_each_share(units, grain, &|worker, start, end| {
        let mut scratch = workspace.scratch(worker);
        let Scratch { weights, c } = &mut *scratch;
        let (mut tiles, c) = (Tiles::new(operands.amx), c.as_mut_slice());
        for unit in start..end {
            let (rows, item) = (groups.rows(unit / items), unit % items);
            if rows.is_empty() {
                continue;
            }
            let c = &mut c[..work.width() * rows.len() * PANEL];
            for (i, c) in c.chunks_exact_mut(rows.len() * PANEL).enumerate() {
                let panel = work.panel(item * work.width() + i);
                let mut product =
                    Product { tiles: &mut tiles, operands, rows: rows.clone(), panel, buffer: weights.as_mut_slice() };
                product.run(c.as_chunks_mut().0);
            }
            work.store(item, rows, c);
        }
    });
}

/// A panel times a group of rows.
struct Product<'a> {
    tiles: &'a mut Tiles,
    operands: Operands<'a>,
    rows: Range<usize>,
    panel: Weights<'a>,
    buffer: &'a mut [u16],
}

impl Product<'_> {
    /// `c` is `[rows][32]`.
    fn run(&mut self, c: &mut [[f32; PANEL]]) {
        match self.panel {
            Weights::Packed { .. } if self.rows.len() <= RING_ROWS => self.through_ring(c),
            _ => self.in_parts(c),
        }
        let (acts, unit) = match self.panel {
            Weights::Packed { .. } => (self.operands.quads, Some(UNIT)),
            Weights::Tiles { unit, .. } => (self.operands.floats, unit),
        };
        if let Some(unit) = unit {
            for (r, c) in self.rows.clone().zip(c) {
                // One after the other: together they may be beyond f32.
                let factors = [acts.factor(r), 1.0 / unit];
                for c in c {
                    *c = *c * factors[0] * factors[1];
                }
            }
        }
    }

    fn through_ring(&mut self, c: &mut [[f32; PANEL]]) {
        let k_tiles = self.operands.k_tiles;
        for (block, c) in (self.rows.start..).step_by(PANEL).zip(c.chunks_mut(PANEL)) {
            self.tiles.set_rows(c.len());
            self.tiles.zero();
            self.dequantize(0, 0);
            for t in 0..k_tiles {
                if t + 1 < k_tiles {
                    self.dequantize(t + 1, (t + 1) % RING);
                }
                self.step(block, t, t % RING);
            }
            self.tiles.store(c);
        }
    }

    fn in_parts(&mut self, c: &mut [[f32; PANEL]]) {
        let k_tiles = self.operands.k_tiles;
        let parts = if k_tiles <= K_TILES[0] { 1 } else { k_tiles.div_ceil(K_TILES[1]) };
        for part in 0..parts {
            let part = part * k_tiles / parts..(part + 1) * k_tiles / parts;
            for (slot, t) in part.clone().enumerate() {
                self.dequantize(t, slot);
            }
            for (block, c) in (self.rows.start..).step_by(PANEL).zip(c.chunks_mut(PANEL)) {
                self.tiles.set_rows(c.len());
                if part.start == 0 {
                    self.tiles.zero();
                } else {
                    self.tiles.load(c);
                }
                for (slot, t) in part.clone().enumerate() {
                    self.step(block, t, slot);
                }
                self.tiles.store(c);
            }
        }
    }

    /// Makes k tile `t` of the panel ready, in a place of the buffer where it is packed.
    #[inline]
    fn dequantize(&mut self, t: usize, slot: usize) {
        if let Weights::Packed { planes, lookup, dequantize } = self.panel {
            // SAFETY: the kernel is of `operands.amx`, which proves that its instructions exist.
            unsafe { dequantize(planes, lookup, t, &mut self.buffer.as_chunks_mut().0[slot]) }
        }
    }

    /// Adds the product of k tile `t` of the rows from `block` on.
    #[inline]
    fn step(&mut self, block: usize, t: usize, slot: usize) {
        let (fp16, acts, weights) = match self.panel {
            Weights::Tiles { tiles, unit } => (unit.is_some(), self.operands.floats, &tiles[t]),
            Weights::Packed { .. } => (self.operands.amx.has_fp16(), self.operands.quads, &self.buffer.as_chunks().0[slot]),
        };
        let (group, end) = (block / TILE_ROWS, self.rows.end.div_ceil(TILE_ROWS));
        // Of up to 16 rows the second tile is not read.
        let a = [acts.tile(group, t), acts.tile((group + 1).min(end - 1), t)];
        self.tiles.multiply(fp16, a, weights);
    }
}
