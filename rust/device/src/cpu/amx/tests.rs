//! Against an f64 oracle on bf16-rounded operands. Where the machine has no AMX, the tests have nothing to run and say so.

use half::{bf16, f16};

use super::*;
use crate::{DType, WeightView, cpu::ThreadPool, mmap::Bytes};

fn amx() -> Option<Amx> {
    let amx = Amx::detect();
    if amx.is_none() {
        eprintln!("this machine has no AMX: nothing is tested");
    }
    amx
}

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

fn weight(dtype: DType, n: usize, k: usize, w: &[f32]) -> WeightView {
    let bytes = match dtype {
        DType::BF16 => w.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F16 => w.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => w.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    WeightView::new(dtype, n, k, Bytes::from_vec(bytes)).expect("the sizes agree")
}

struct Case {
    m: usize,
    n: usize,
    k: usize,
    threads: usize,
}

fn product(amx: Amx, case: &Case, x: &[f32], source: &dyn PanelSource) -> Vec<f32> {
    let Case { m, n, k, threads } = *case;
    let pool = ThreadPool::new(threads).unwrap();
    let mut acts = ActTiles::new().expect("memory");
    let workspace = Workspace::new(threads).expect("memory");
    acts.pack(amx, &pool, &workspace, (m, k), &|i, row| row.copy_from_slice(&x[i * k..(i + 1) * k])).expect("memory");
    let stride = n + 3;
    let mut out = vec![f32::NAN; m * stride];
    multiply_into(amx, &pool, &workspace, &acts, (source, n), (&mut out, stride));
    for row in out.chunks_exact(stride) {
        assert!(row[n..].iter().all(|v| v.is_nan()), "columns beyond N are not written");
    }
    out.chunks_exact(stride).flat_map(|r| r[..n].to_vec()).collect()
}

/// Checks every output against an f64 sum of the rounded operands: within 1e-6 of the sum of magnitudes, where one product left out or
/// taken twice is about 1 / K of it.
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
    let Some(amx) = amx() else { return };
    let (n, k) = (48, 96);
    let w = values(n * k, 1);
    let view = weight(DType::BF16, n, k, &w);
    let source = FloatPanels::new(amx, &view).expect("bf16");
    for m in 1..=40 {
        let case = Case { m, n, k, threads: 1 };
        let x = values(m * k, 2);
        check(&case, &x, &w, &product(amx, &case, &x, &source));
    }
}

#[test]
fn any_n_any_multiple_of_32_columns_and_any_float_type_match_the_oracle() {
    let Some(amx) = amx() else { return };
    for (n, k, dtype) in [
        (1, 32, DType::BF16),
        (31, 64, DType::F16),
        (33, 512, DType::F32),
        (70, 640, DType::F16),
        (100, 672, DType::BF16),
        (257, 1536, DType::BF16),
        (65, 2080, DType::F32),
    ] {
        let case = Case { m: 37, n, k, threads: 3 };
        let w = values(n * k, 3);
        // What the file holds is what is rounded to bf16.
        let stored: Vec<f32> =
            if dtype == DType::F16 { w.iter().map(|v| f16::from_f32(*v).to_f32()).collect() } else { w.clone() };
        let view = weight(dtype, n, k, &w);
        let x = values(case.m * k, 4);
        check(&case, &x, &stored, &product(amx, &case, &x, &FloatPanels::new(amx, &view).expect("a float type")));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads() {
    let Some(amx) = amx() else { return };
    let (m, n, k) = (600, 100, 672);
    let view = weight(DType::BF16, n, k, &values(n * k, 5));
    let source = FloatPanels::new(amx, &view).expect("bf16");
    let x = values(m * k, 6);
    let all = product(amx, &Case { m, n, k, threads: 1 }, &x, &source);
    for threads in [2, 3] {
        assert!(product(amx, &Case { m, n, k, threads }, &x, &source) == all, "{threads} threads");
    }
    for (first, m) in [(0, 1), (599, 1), (7, 16), (500, 17), (13, 40), (40, 513)] {
        let part = product(amx, &Case { m, n, k, threads: 2 }, &x[first * k..(first + m) * k], &source);
        assert!(part == all[first * n..(first + m) * n], "rows {first}..+{m}");
    }
}

#[test]
fn a_reused_buffer_keeps_nothing_of_the_last_product() {
    let Some(amx) = amx() else { return };
    let (n, k) = (32, 64);
    let pool = ThreadPool::new(1).unwrap();
    let workspace = Workspace::new(1).expect("memory");
    let w = values(n * k, 7);
    let view = weight(DType::BF16, n, k, &w);
    let source = FloatPanels::new(amx, &view).expect("bf16");
    let mut acts = ActTiles::new().expect("memory");
    for m in [64, 3, 33] {
        let x = values(m * k, m as u64);
        acts.pack(amx, &pool, &workspace, (m, k), &|i, row| row.copy_from_slice(&x[i * k..(i + 1) * k])).expect("memory");
        let mut out = vec![0.0; m * n];
        multiply_into(amx, &pool, &workspace, &acts, (&source, n), (&mut out, n));
        check(&Case { m, n, k, threads: 1 }, &x, &w, &out);
    }
}
