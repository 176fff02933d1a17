//! Attention by tiles, whose instructions are modelled where the processor lacks them.

#[path = "../../../tests/common/mod.rs"]
mod common;

use super::*;
use crate::cpu::CpuBackend;
use common::{Case, dense, run};

fn params(num_kv_heads: usize, queries_per_kv: usize, head_dim: usize) -> AttentionParams {
    AttentionParams::new([num_kv_heads * queries_per_kv, num_kv_heads, head_dim], Precision::Fast)
}

fn by_tiles(case: &Case, threads: usize) -> Option<Vec<f32>> {
    ByTiles::of(Isa::detect(), &case.params, case.dtype)?;
    Some(run(&CpuBackend::new(Isa::Amx, threads).unwrap(), case))
}

/// Queries are rounded, to 2^-11 or 2^-9 of them, and weights; values are at most 2.
fn check(case: &Case, threads: usize) {
    let Some(got) = by_tiles(case, threads) else { return };
    let (mut errors, mut values) = (0.0, 0.0);
    let fp16 = case.dtype != KvDType::BF16;
    for (i, (got, expected)) in got.iter().zip(dense(case)).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        let most = if fp16 { 4e-3 } else { 2e-2 };
        assert!(error < most, "{:?}, heads of {}: element {i} is {got}, not {expected}", case.dtype, case.params.head_dim);
        errors += error * error;
        values += expected * expected;
    }
    let relative = (errors / values).sqrt();
    let most = if fp16 { 8e-4 } else { 6e-3 };
    assert!(relative < most, "{:?}, heads of {}: {relative:.1e} of the outputs", case.dtype, case.params.head_dim);
}

#[test]
fn tiles_agree_with_the_dense_oracle_for_every_cache_type_and_head_size() {
    for dtype in KvDType::ALL {
        for (i, head_dim) in [8, 10, 16, 27, 32, 40, 64, 72, 80, 96, 128, 256].into_iter().enumerate() {
            let (queries_per_kv, block_size) = ([1, 2, 3, 4, 7, 8][i % 6], [8, 16, 32][i % 3]);
            let case = Case::new(i as u64, params(2, queries_per_kv, head_dim), block_size, dtype, &[(0, 50), (83, 17), (30, 1)]);
            check(&if i % 2 == 0 { case.with_sinks() } else { case }, 1 + i % 3);
        }
    }
}

#[test]
fn tiles_see_what_windows_chunks_and_masks_leave() {
    for dtype in [KvDType::F16, KvDType::BF16, KvDType::Int8] {
        let plain = params(1, 3, 64);
        for params in [
            AttentionParams { window: Some(45), ..plain },
            AttentionParams { window: Some(1), ..plain },
            AttentionParams { window: Some(600), softcap: Some(20.0), ..plain },
            AttentionParams { chunk: Some(50), softcap: Some(5.0), ..plain },
        ] {
            check(&Case::new(3, params, 16, dtype, &[(0, 70), (700, 20), (1020, 40)]), 2);
        }
        check(&Case::new(5, AttentionParams { mask: Mask::Full, ..plain }, 16, dtype, &[(0, 90), (0, 33)]), 2);
        check(&Case::new(5, AttentionParams { mask: Mask::Spans, ..plain }, 16, dtype, &[(0, 150), (83, 60)]), 2);
    }
}

#[test]
fn a_row_by_tiles_has_the_same_bits_in_any_chunk_and_batch_and_on_any_number_of_threads() {
    for dtype in [KvDType::F16, KvDType::BF16, KvDType::F8E4M3] {
        for (queries_per_kv, head_dim, window) in [(3, 64, None), (16, 32, Some(45)), (5, 80, Some(600))] {
            let params = AttentionParams { window, ..params(2, queries_per_kv, head_dim) };
            let whole = Case::new(5, params, 32, dtype, &[(0, 640)]);
            let Some(expected) = by_tiles(&whole, 1) else { continue };
            let cols = params.num_heads * head_dim;
            // Enough rows for tiles, whichever way heads and tokens are divided.
            for (threads, block_size, before, queries) in [(1, 8, 0, 640), (2, 16, 7, 200), (3, 32, 503, 137), (2, 32, 33, 198)] {
                let mut batch = Case::new(6, params, block_size, dtype, &[(50, 70), (before, queries), (3, 1)]);
                batch.adopt(1, &whole, 0, before);
                let Some(got) = by_tiles(&batch, threads) else { continue };
                let (got, expected) = (&got[70 * cols..][..queries * cols], &expected[before * cols..][..queries * cols]);
                let first = got.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(first.map(|i| i / cols), None, "{dtype:?}, heads of {head_dim}: {queries} rows from {before} on");
            }
        }
    }
}

#[test]
fn what_tiles_must_not_read_changes_nothing() {
    for dtype in KvDType::ALL {
        for (block_size, head_dim, request) in [(16, 32, (300, 9)), (8, 64, (301, 20)), (32, 96, (0, 33)), (8, 48, (300, 7))] {
            let params = AttentionParams { window: Some(40), ..params(2, 3, head_dim) };
            let mut case = Case::new(1, params, block_size, dtype, &[request]);
            let Some(clean) = by_tiles(&case, 2) else { continue };
            case.poison = f32::NAN;
            let poisoned = by_tiles(&case, 2).expect("as before");
            let same = clean.iter().zip(&poisoned).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{dtype:?}, {request:?} in blocks of {block_size}, heads of {head_dim}");
        }
    }
}
