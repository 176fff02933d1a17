//! The loops around the AMX kernel.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use super::{
    ActTiles, Amx, K_TILE, KBlocks, PANEL,
    tiles::{Mode, Tiles},
};
use crate::{DeviceError, cpu::ThreadPool, mmap::Pages};

/// The most rows of A that a panel is used for before the next; keeps A's block and C in the level 2 cache.
const MAX_ROWS: usize = 512;
/// Panels of a claim at most, whose C is in a worker's scratch; A is read from beyond the level 2 cache once a claim where K is
/// large.
const MAX_CLAIM: usize = 8;

/// Panels to multiply, and what happens with the results.
///
/// Items are claimed by workers; item i is the panels `i * width()..(i + 1) * width()`, whose results are stored together.
pub trait PanelWork: Sync {
    /// Number of items.
    fn items(&self) -> usize;

    /// Panels of an item, 1 to 8.
    fn width(&self) -> usize {
        1
    }

    /// Columns `k0..k0 + k_len` of a panel, multiples of 32, as bf16:
    /// `[k_len / 32 k tiles][2 tiles of 16 rows][16 column pairs][16 rows][2 columns]`.
    fn panel(&self, panel: usize, k0: usize, k_len: usize) -> &[u16];

    /// Takes rows `row0..row0 + rows` of an item: `c` is `[width][padded rows][32]`.
    fn store(&self, item: usize, row0: usize, rows: usize, c: &mut [f32]);
}

/// The most columns of A: a worker's scratch also holds a row while it is packed.
pub const MAX_K: usize = MAX_CLAIM * MAX_ROWS * PANEL;

/// Buffers of the workers of a pool, kept from product to product.
pub struct Workspace {
    workers: Vec<Mutex<Scratch>>,
}

pub(super) struct Scratch {
    pub(super) c: Pages<f32>,
}

impl Workspace {
    /// Buffers for `num_threads` workers; pages are committed as they are used.
    pub fn new(num_threads: usize) -> Result<Self, DeviceError> {
        let scratch = || {
            let c = Pages::zeroed(MAX_K)?;
            c.advise_huge();
            Ok(Mutex::new(Scratch { c }))
        };
        Ok(Self { workers: (0..num_threads).map(|_| scratch()).collect::<Result<_, DeviceError>>()? })
    }
}

impl Workspace {
    /// The buffers of a worker; waits while another product of the same worker uses them.
    pub(super) fn scratch(&self, worker: usize) -> MutexGuard<'_, Scratch> {
        self.workers[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how many workers.
    pub fn num_threads(&self) -> usize {
        self.workers.len()
    }
}

/// Multiplies `acts` by every panel of `work`.
///
/// # Panics
/// When the workspace has fewer workers than the pool.
pub fn multiply(amx: Amx, pool: &ThreadPool, workspace: &Workspace, acts: &ActTiles, work: &dyn PanelWork) {
    if acts.rows() == 0 || acts.k() == 0 {
        return;
    }
    let (items, width) = (work.items(), work.width());
    let next = AtomicUsize::new(0);
    // About four claims a worker, as long as that makes claims that fit.
    let claim = items.div_ceil(pool.num_threads() * 4).clamp(1, MAX_CLAIM / width);
    pool.run_available(&|worker| {
        let mut scratch = workspace.scratch(worker);
        let tiles = Tiles::configure(amx);
        loop {
            let start = next.fetch_add(claim, Ordering::Relaxed);
            if start >= items {
                break;
            }
            multiply_claim(&tiles, &mut scratch, acts, work, (start, (start + claim).min(items)));
        }
    });
}

fn multiply_claim(tiles: &Tiles, scratch: &mut Scratch, acts: &ActTiles, work: &dyn PanelWork, (start, end): (usize, usize)) {
    let width = work.width();
    for row0 in (0..acts.rows()).step_by(MAX_ROWS) {
        let rows = (acts.rows() - row0).min(MAX_ROWS);
        let blocks = rows.div_ceil(PANEL);
        let c = &mut scratch.c.as_mut_slice()[..(end - start) * width * blocks * PANEL * PANEL];
        for (first, len) in KBlocks::of(acts.k()).iter() {
            for (panel, c) in (start * width..end * width).zip(c.chunks_exact_mut(blocks * PANEL * PANEL)) {
                let panel = work.panel(panel, first * K_TILE, len * K_TILE);
                for (b, c) in c.as_chunks_mut().0.iter_mut().enumerate() {
                    let mode = Mode { accumulate: first > 0, half: rows - b * PANEL <= 16 };
                    tiles.multiply(acts.block((first, len), row0 / PANEL + b), panel, len, c, mode);
                }
            }
        }
        for (item, c) in (start..end).zip(c.chunks_exact_mut(width * blocks * PANEL * PANEL)) {
            work.store(item, row0, rows, c);
        }
    }
}
