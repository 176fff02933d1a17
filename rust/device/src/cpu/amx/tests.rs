//! Against an f64 oracle on bf16-rounded operands. Where the machine has no AMX, its tile instructions are modelled; where it has
//! no AVX-512 BF16 either, the tests have nothing to run.

use std::sync::Mutex;

use half::bf16;

use super::*;
use crate::cpu::ThreadPool;

/// A deterministic sequence of values in -1..1.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / 8_388_608.0) - 1.0
        })
        .collect()
}

/// A weight `[n, k]` in panels, and where the products of whole panels go.
struct Panels {
    panels: Vec<Vec<u16>>,
    /// `[rows, panels * 32]`.
    out: Mutex<Vec<f32>>,
}

impl Panels {
    fn new(m: usize, (n, k): (usize, usize), w: &[f32]) -> Self {
        let element = |row: usize, col: usize| if row < n { bf16::from_f32(w[row * k + col]).to_bits() } else { 0 };
        let panel = |p: usize| {
            (0..PANEL * k)
                .map(|i| {
                    let (tile, pair, lane) = (i / TILE_ELEMENTS, i % TILE_ELEMENTS / 32, i % 32);
                    element(p * PANEL + pair / 16 * 16 + lane / 2, tile * K_TILE + pair % 16 * 2 + lane % 2)
                })
                .collect()
        };
        let panels: Vec<_> = (0..n.div_ceil(PANEL)).map(panel).collect();
        let out = Mutex::new(vec![f32::NAN; m * panels.len() * PANEL]);
        Self { panels, out }
    }
}

impl PanelWork for Panels {
    fn items(&self) -> usize {
        self.panels.len()
    }

    fn panel(&self, panel: usize, k0: usize, k_len: usize) -> &[u16] {
        &self.panels[panel][k0 * PANEL..(k0 + k_len) * PANEL]
    }

    fn store(&self, item: usize, row0: usize, rows: usize, c: &mut [f32]) {
        let stride = self.panels.len() * PANEL;
        let mut out = self.out.lock().unwrap();
        for (r, c) in c.chunks_exact(PANEL).take(rows).enumerate() {
            out[(row0 + r) * stride + item * PANEL..][..PANEL].copy_from_slice(c);
        }
    }
}

struct Case {
    m: usize,
    n: usize,
    k: usize,
    threads: usize,
}

fn product(amx: Amx, case: &Case, x: &[f32], w: &[f32]) -> Vec<f32> {
    let Case { m, n, k, threads } = *case;
    let pool = ThreadPool::new(threads).unwrap();
    let mut acts = ActTiles::new().expect("memory");
    let workspace = Workspace::new(threads).expect("memory");
    pack(amx, &mut acts, (&pool, &workspace), (m, k), x);
    let work = Panels::new(m, (n, k), w);
    multiply(amx, &pool, &workspace, &acts, &work);
    let stride = work.panels.len() * PANEL;
    let out = work.out.into_inner().unwrap();
    out.chunks_exact(stride).flat_map(|r| r[..n].to_vec()).collect()
}

fn pack(amx: Amx, acts: &mut ActTiles, (pool, workspace): (&ThreadPool, &Workspace), (m, k): (usize, usize), x: &[f32]) {
    acts.pack(amx, pool, workspace, (m, k), &|i, row| row.copy_from_slice(&x[i * k..(i + 1) * k])).expect("memory");
}

/// Checks every output against an f64 sum of the rounded operands: within 1e-6 of the sum of magnitudes, where one product left
/// out or taken twice is about 1 / K of it.
fn check(case: &Case, x: &[f32], w: &[f32], got: &[f32]) {
    let round = |v: &f32| f64::from(bf16::from_f32(*v).to_f32());
    let (x, w): (Vec<_>, Vec<_>) = (x.iter().map(round).collect(), w.iter().map(round).collect());
    for i in 0..case.m {
        for j in 0..case.n {
            let terms = || x[i * case.k..(i + 1) * case.k].iter().zip(&w[j * case.k..(j + 1) * case.k]).map(|(a, b)| a * b);
            let (want, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let error = (f64::from(got[i * case.n + j]) - want).abs();
            assert!(error <= 1e-6 * size, "m {i} n {j} of {}x{}x{}: {error:e} off {want}", case.m, case.n, case.k);
        }
    }
}

#[test]
fn every_number_of_rows_up_to_forty_matches_the_oracle() {
    let Some(amx) = Amx::detect() else { return };
    let (n, k) = (48, 96);
    let w = values(n * k, 1);
    for m in 1..=40 {
        let case = Case { m, n, k, threads: 1 };
        let x = values(m * k, 2);
        check(&case, &x, &w, &product(amx, &case, &x, &w));
    }
}

#[test]
fn any_n_and_any_multiple_of_32_columns_match_the_oracle() {
    let Some(amx) = Amx::detect() else { return };
    for (n, k) in [(1, 32), (31, 64), (33, 512), (70, 640), (100, 672), (257, 1536), (65, 2080)] {
        let case = Case { m: 37, n, k, threads: 3 };
        let (w, x) = (values(n * k, 3), values(case.m * k, 4));
        check(&case, &x, &w, &product(amx, &case, &x, &w));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads() {
    let Some(amx) = Amx::detect() else { return };
    let (m, n, k) = (600, 40, 672);
    let (w, x) = (values(n * k, 5), values(m * k, 6));
    let all = product(amx, &Case { m, n, k, threads: 1 }, &x, &w);
    for threads in [2, 3] {
        assert!(product(amx, &Case { m, n, k, threads }, &x, &w) == all, "{threads} threads");
    }
    for (first, m) in [(0, 1), (599, 1), (7, 16), (500, 17), (13, 40), (40, 513)] {
        let part = product(amx, &Case { m, n, k, threads: 2 }, &x[first * k..(first + m) * k], &w);
        assert!(part == all[first * n..(first + m) * n], "rows {first}..+{m}");
    }
}

#[test]
fn a_reused_buffer_keeps_nothing_of_the_last_product() {
    let Some(amx) = Amx::detect() else { return };
    let (n, k) = (32, 64);
    let pool = ThreadPool::new(1).unwrap();
    let workspace = Workspace::new(1).expect("memory");
    let w = values(n * k, 7);
    let mut acts = ActTiles::new().expect("memory");
    for m in [64, 3, 33] {
        let x = values(m * k, m as u64);
        pack(amx, &mut acts, (&pool, &workspace), (m, k), &x);
        let work = Panels::new(m, (n, k), &w);
        multiply(amx, &pool, &workspace, &acts, &work);
        check(&Case { m, n, k, threads: 1 }, &x, &w, &work.out.into_inner().unwrap());
    }
}
