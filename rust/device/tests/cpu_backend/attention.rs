//! Paged attention against a dense oracle, in every ISA and cache type, and its independence of batch, chunks and threads.

use device::{
    AttentionParams, KvDType, Mask, Precision,
    cpu::{CpuBackend, Isa, ReferenceBackend},
};
use proptest::prelude::*;

use crate::common::{Case, Rng, dense, isas, run};

fn params(num_kv_heads: usize, queries_per_kv: usize, head_dim: usize) -> AttentionParams {
    AttentionParams::new([num_kv_heads * queries_per_kv, num_kv_heads, head_dim], Precision::Exact)
}

fn assert_close(got: &[f32], expected: &[f64], what: &str) {
    assert_eq!(got.len(), expected.len());
    for (i, (&g, &e)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(g) - e).abs() < 2e-5 * (1.0 + e.abs()), "{what}: element {i} is {g}, the oracle says {e}");
    }
}

fn check_case(case: &Case, threads: usize) {
    let expected = dense(case);
    assert_close(&run(&ReferenceBackend::new(), case), &expected, "reference");
    for isa in isas() {
        let backend = CpuBackend::new(isa, threads).unwrap();
        assert_close(&run(&backend, case), &expected, &format!("{isa:?} {:?}", case.dtype));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn equals_the_dense_oracle(
        seed in any::<u64>(),
        num_kv_heads in 1usize..4,
        queries_per_kv in 1usize..9,
        head_dim in prop::sample::select(vec![8usize, 10, 16, 24, 27, 32, 40, 64, 72, 80, 96, 128, 256]),
        block_size in prop::sample::select(vec![8usize, 16, 32]),
        window in prop::option::of(1usize..200),
        chunk in prop::option::of(1usize..200),
        has_sinks in any::<bool>(),
        softcap in prop::option::of(1.0f32..50.0),
        dtype in prop::sample::select(KvDType::ALL.to_vec()),
        // (keys before the chunk, queries)
        requests in prop::collection::vec((0usize..300, 1usize..60), 1..5),
        threads in 1usize..4,
    ) {
        let params = AttentionParams { window, chunk, softcap, ..params(num_kv_heads, queries_per_kv, head_dim) };
        let case = Case::new(seed, params, block_size, dtype, &requests);
        check_case(&if has_sinks { case.with_sinks() } else { case }, threads);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn keys_behind_a_query_are_seen_as_the_dense_oracle_sees_them(
        seed in any::<u64>(),
        num_kv_heads in 1usize..3,
        queries_per_kv in 1usize..5,
        head_dim in prop::sample::select(vec![8usize, 27, 32, 64, 256]),
        block_size in prop::sample::select(vec![8usize, 16, 32]),
        window in prop::option::of(1usize..200),
        softcap in prop::option::of(1.0f32..50.0),
        dtype in prop::sample::select(KvDType::ALL.to_vec()),
        lens in prop::collection::vec(1usize..150, 1..5),
        threads in 1usize..4,
    ) {
        let params = AttentionParams { mask: Mask::Full, window, softcap, ..params(num_kv_heads, queries_per_kv, head_dim) };
        let requests: Vec<_> = lens.into_iter().map(|len| (0, len)).collect();
        check_case(&Case::new(seed, params, block_size, dtype, &requests), threads);
    }
}

#[test]
fn keys_behind_a_query_may_lie_in_other_splits() {
    for (dtype, window) in [(KvDType::F32, None), (KvDType::F16, Some(257)), (KvDType::BF16, Some(600)), (KvDType::Int8, Some(1))]
    {
        let params = AttentionParams { mask: Mask::Full, window, ..params(1, 3, 16) };
        check_case(&Case::new(7, params, 16, dtype, &[(0, 1500), (0, 5), (0, 513)]), 3);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn rows_of_a_span_see_each_other_as_the_dense_oracle_has_it(
        seed in any::<u64>(),
        num_kv_heads in 1usize..3,
        queries_per_kv in 1usize..5,
        head_dim in prop::sample::select(vec![8usize, 27, 32, 64, 256]),
        block_size in prop::sample::select(vec![8usize, 16, 32]),
        window in prop::option::of(1usize..200),
        dtype in prop::sample::select(KvDType::ALL.to_vec()),
        // No request begins within a span.
        requests in prop::collection::vec((prop::sample::select(vec![0usize, 12, 83, 100, 500]), 1usize..150), 1..5),
        threads in 1usize..4,
    ) {
        let params = AttentionParams { mask: Mask::Spans, window, ..params(num_kv_heads, queries_per_kv, head_dim) };
        check_case(&Case::new(seed, params, block_size, dtype, &requests), threads);
    }
}

#[test]
fn a_row_that_sees_keys_behind_it_has_the_same_bits_in_a_batch_for_any_threads_and_block_size() {
    for isa in isas() {
        let kinds =
            [(KvDType::F32, Precision::Exact), (KvDType::F16, Precision::Exact), (KvDType::BF16, Precision::Deterministic)];
        for (dtype, precision) in kinds {
            for (queries_per_kv, head_dim, window) in [(3, 64, None), (3, 256, Some(257)), (1, 16, Some(13))] {
                let params = AttentionParams { mask: Mask::Full, window, precision, ..params(1, queries_per_kv, head_dim) };
                let alone = Case::new(5, params, 32, dtype, &[(0, 700)]);
                let expected = run(&CpuBackend::new(isa, 1).unwrap(), &alone);
                for (threads, block_size) in [(1, 8), (2, 16), (3, 32)] {
                    let mut batch = Case::new(6, params, block_size, dtype, &[(0, 90), (0, 700), (0, 3)]);
                    batch.adopt(1, &alone, 0, 0);
                    let out = run(&CpuBackend::new(isa, threads).unwrap(), &batch);
                    for row in 0..700 {
                        let (got, wanted) = (row_bits(&batch, &out, 1, row), row_bits(&alone, &expected, 0, row));
                        assert_eq!(
                            got, wanted,
                            "{isa:?} {dtype:?} {precision:?}, window {window:?}: row {row}, {threads} threads"
                        );
                    }
                }
            }
        }
    }
}

/// All that pairs may add is the rounding of a weight, 2^-9 of it at most, times values of at most 2.
#[test]
fn products_of_bf16_round_queries_and_weights_and_nothing_else() {
    let bound = 2.0 * 2f64.powi(-9);
    for (queries_per_kv, head_dim, window, chunk, softcap) in [
        (1, 16, None, None, None),
        (3, 64, None, None, None),
        (4, 256, Some(45), None, None),
        (7, 80, Some(600), None, Some(20.0)),
        (2, 96, None, None, Some(5.0)),
        (5, 64, None, Some(50), None),
    ] {
        let params =
            AttentionParams { window, chunk, softcap, precision: Precision::Fast, ..params(2, queries_per_kv, head_dim) };
        let mut case = Case::new(9, params, 16, KvDType::BF16, &[(0, 70), (700, 1), (45, 33), (1023, 2)]);
        case.round_queries();
        let expected = dense(&case);
        for isa in isas() {
            let got = run(&CpuBackend::new(isa, 2).unwrap(), &case);
            for (i, (&g, &e)) in got.iter().zip(&expected).enumerate() {
                let error = (f64::from(g) - e).abs();
                assert!(error < bound + 2e-5 * (1.0 + e.abs()), "{isa:?}, heads of {head_dim}: element {i} is {g}, not {e}");
            }
        }
    }
}

/// As Gemma 2 has them: heads of 256, scores capped at 50, a window in every other layer.
#[test]
fn wide_heads_with_a_cap_and_a_window_agree_with_the_dense_oracle() {
    for (dtype, cap) in KvDType::ALL.into_iter().flat_map(|dtype| [50.0, 2.0].map(|cap| (dtype, cap))) {
        let params = AttentionParams { window: Some(33), softcap: Some(cap), scale: 0.5, ..params(2, 2, 256) };
        check_case(&Case::new(21, params, 16, dtype, &[(0, 40), (600, 1), (31, 5)]), 2);
    }
}

#[test]
fn long_requests_span_several_splits() {
    for (dtype, window, chunk) in [
        (KvDType::F16, None, None),
        (KvDType::F32, Some(700), None),
        (KvDType::BF16, Some(512), None),
        (KvDType::F16, Some(1), None),
        (KvDType::Int8, None, None),
        (KvDType::F8E4M3, Some(700), None),
        (KvDType::F32, None, Some(700)),
        (KvDType::BF16, None, Some(1024)),
    ] {
        let params = AttentionParams { window, chunk, ..params(1, 3, 16) };
        let case = Case::new(7, params, 16, dtype, &[(1500, 1), (511, 2), (0, 5), (2040, 40)]);
        check_case(&if window.is_none() { case.with_sinks() } else { case }, 3);
    }
}

#[test]
fn a_window_is_exact_for_all_small_lengths_and_block_sizes() {
    for block_size in [8, 16, 32] {
        for len in [1usize, 2, 7, 8, 9, 31, 32, 33, 40, 65] {
            for queries in [1, 2, len / 2, len] {
                for window in [1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 70] {
                    if queries == 0 || queries > len {
                        continue;
                    }
                    let params = AttentionParams { window: Some(window), ..params(1, 2, 8) };
                    let case = Case::new(3, params, block_size, KvDType::F32, &[(len - queries, queries)]);
                    let expected = dense(&case);
                    let what = format!("len {len}, {queries} queries, window {window}, block size {block_size}");
                    assert_close(&run(&ReferenceBackend::new(), &case), &expected, &what);
                    for isa in isas() {
                        assert_close(&run(&CpuBackend::new(isa, 1).unwrap(), &case), &expected, &format!("{isa:?} {what}"));
                    }
                }
            }
        }
    }
}

/// Bits of the output of query `row` of request `request`.
fn row_bits(case: &Case, out: &[f32], request: usize, row: usize) -> Vec<u32> {
    let cols = case.params.num_heads * case.params.head_dim;
    let first: usize = case.requests[..request].iter().map(|r| r.1).sum::<usize>() + row;
    out[first * cols..(first + 1) * cols].iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_row_has_the_same_bits_alone_in_chunks_of_any_size_in_a_batch_for_any_threads_and_block_size() {
    let mut rng = Rng::new(11);
    for isa in isas() {
        let exact = KvDType::ALL.map(|dtype| (dtype, Precision::Exact));
        for (dtype, precision) in exact.into_iter().chain([(KvDType::BF16, Precision::Deterministic)]) {
            for (queries_per_kv, head_dim, window, softcap) in
                [(3, 64, None, None), (1, 16, Some(45), None), (7, 40, Some(600), Some(20.0)), (2, 96, None, Some(5.0))]
            {
                let params = AttentionParams { window, softcap, precision, ..params(2, queries_per_kv, head_dim) };
                let len = 1_100 + rng.below(200);
                let whole = Case::new(5, params, 32, dtype, &[(0, len)]);
                let backend = CpuBackend::new(isa, 1).unwrap();
                let expected = run(&backend, &whole);
                // Each (threads, block size) is met by one chunk size or two.
                for (threads, block_size, chunks) in [(1, 8, &[1, 33][..]), (2, 16, &[5, 400]), (3, 32, &[1, 2])] {
                    let backend = CpuBackend::new(isa, threads).unwrap();
                    for &queries in chunks {
                        let before = rng.below(len - queries + 1);
                        // The same request, seen through other blocks, with strangers before and after it.
                        let others = [(rng.below(900), 1 + rng.below(3)), (before, queries), (rng.below(50), 1 + rng.below(70))];
                        for (requests, which) in [(&others[1..2], 0), (&others[..], 1)] {
                            let mut case = Case::new(rng.bits(), params, block_size, dtype, requests);
                            case.adopt(which, &whole, 0, before);
                            let out = run(&backend, &case);
                            for row in 0..queries {
                                assert_eq!(
                                    row_bits(&case, &out, which, row),
                                    row_bits(&whole, &expected, 0, before + row),
                                    "{isa:?} {dtype:?} {precision:?} {queries_per_kv} queries a KV head, dim {head_dim} window {window:?}: position {} of {len} in a \
                                     chunk of {queries} of {} requests, {threads} threads, block size {block_size}",
                                    before + row,
                                    requests.len()
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn keys_beyond_a_request_and_out_of_the_window_are_never_read() {
    for isa in isas() {
        for (dtype, precision) in KvDType::ALL.iter().flat_map(|&dtype| [(dtype, Precision::Exact), (dtype, Precision::Fast)]) {
            // One row block and several, keys that begin and end at even and odd places.
            for (block_size, head_dim, request) in [
                (16, 32, (300, 9)),
                (8, 32, (300, 1)),
                (16, 32, (301, 1)),
                (32, 32, (301, 2)),
                (32, 64, (0, 1)),
                (8, 27, (300, 2)),
            ] {
                let params = AttentionParams { window: Some(40), precision, ..params(2, 3, head_dim) };
                let mut case = Case::new(1, params, block_size, dtype, &[request]);
                let backend = CpuBackend::new(isa, 2).unwrap();
                let clean = run(&backend, &case);
                case.poison = f32::NAN;
                let poisoned = run(&backend, &case);
                let same = clean.iter().zip(&poisoned).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa:?} {dtype:?} {precision:?}, {request:?} in blocks of {block_size}, heads of {head_dim}");
            }
        }
    }
}

#[test]
fn a_isa_that_the_machine_lacks_is_refused() {
    for isa in Isa::ALL {
        assert_eq!(CpuBackend::new(isa, 1).is_ok(), isa <= Isa::detect(), "{isa:?}");
    }
}
