//! Sampling on the device against a sort on the host.

use std::cmp::Ordering;

use device::{
    TokenSet,
    kernel_args::{
        MAX_SAMPLE_ROWS, SAMPLE_BUCKETS, SAMPLE_LISTED, SAMPLE_PART, SampleArgs, SampleBucket, SamplePart, SampleRow,
        SampleState, TopLogprobsArgs,
    },
};
use kernel_tests::{Buffer, Kernel, Order, assert_close, random::Rng};

/// Token ids and log probabilities of rows of logits.
fn run(logits: &[f32], vocab_size: usize, rows: &[SampleRow], order: Order) -> (Vec<u32>, Vec<f32>) {
    let stride = logits.len() / rows.len();
    let (mut token_ids, mut logprobs) = (vec![], vec![]);
    for (logits, rows) in logits.chunks(MAX_SAMPLE_ROWS * stride).zip(rows.chunks(MAX_SAMPLE_ROWS)) {
        let (ids, values) = launch(logits, vocab_size, rows, order);
        token_ids.extend(ids);
        logprobs.extend(values);
    }
    (token_ids, logprobs)
}

/// As the host launches it, of as many rows as a launch takes.
fn launch(logits: &[f32], vocab_size: usize, rows: &[SampleRow], order: Order) -> (Vec<u32>, Vec<f32>) {
    let (count, stride, num_parts) = (rows.len(), logits.len() / rows.len(), vocab_size.div_ceil(SAMPLE_PART));
    let logits = Buffer::input(logits);
    let [token_ids, logprobs, normalizers] = [(); 3].map(|()| Buffer::output::<u32>(count));
    let words = |bytes: usize| Buffer::output::<u32>(count * bytes / size_of::<u32>());
    let (parts, states) = (words(num_parts * size_of::<SamplePart>()), words(size_of::<SampleState>()));
    let lists = words(num_parts * SAMPLE_LISTED * size_of::<u64>());
    let buckets = Buffer::inout(&vec![0_u32; count * SAMPLE_BUCKETS * size_of::<SampleBucket>() / size_of::<u32>()]);
    let arrivals = Buffer::inout(&vec![0_u32; count]);
    let mut entries = [greedy(); MAX_SAMPLE_ROWS];
    entries[..count].copy_from_slice(rows);
    let args = SampleArgs {
        logits: logits.ptr(),
        token_ids: token_ids.ptr(),
        logprobs: logprobs.ptr(),
        normalizers: normalizers.ptr(),
        parts: parts.ptr(),
        states: states.ptr(),
        buckets: buckets.ptr(),
        lists: lists.ptr(),
        arrivals: arrivals.ptr(),
        num_rows: count as u32,
        vocab_size: vocab_size as u32,
        stride: stride as u32,
        reserved: 0,
        rows: entries,
    };
    let draws = rows.iter().any(|row| row.temperature > 0.0);
    let cuts = draws && rows.iter().any(|row| row.top_k > 0 || row.top_p < 1.0);
    for (kernel, is_needed) in [("sample", true), ("sample_cut", cuts), ("sample_draw", draws)] {
        if is_needed {
            Kernel::named(kernel).launch([num_parts, count, 1], &args, order);
        }
    }
    for counts in [buckets, arrivals] {
        assert!(counts.values::<u32>().iter().all(|count| *count == 0), "what is counted is forgotten");
    }
    (token_ids.values(), logprobs.values())
}

/// Ids from the likeliest on, of equal logits the lowest first.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<_> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(Ordering::Equal).then(a.cmp(&b)));
    ids
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let total: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| (f64::from(x - max) - total.ln()) as f32).collect()
}

/// Kept tokens in the order of their ids, with their weights.
fn kept(logits: &[f32], row: &SampleRow) -> Vec<(usize, f64)> {
    kept_of(ranked(logits), logits, row)
}

/// The same of some tokens, likeliest first.
fn kept_of(ids: Vec<usize>, logits: &[f32], row: &SampleRow) -> Vec<(usize, f64)> {
    let max = logits[ids[0]];
    let weight = |id: usize| f64::from((logits[id] - max) / row.temperature).exp();
    let enough = f64::from(row.top_p) * ids.iter().map(|&id| weight(id)).sum::<f64>();
    let (mut kept, mut sum) = (vec![], 0.0);
    for (rank, id) in ids.into_iter().enumerate() {
        if (row.top_k > 0 && rank >= row.top_k as usize)
            || (row.top_p < 1.0 && sum >= enough)
            || weight(id) < f64::from(row.min_p)
        {
            break;
        }
        sum += weight(id);
        kept.push((id, weight(id)));
    }
    kept.sort_by_key(|(id, _)| *id);
    kept
}

/// The interval of random numbers that choose `token`.
fn interval(kept: &[(usize, f64)], token: usize) -> Option<(f64, f64)> {
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    for (id, weight) in kept {
        if *id == token {
            return Some((sum / total, (sum + weight) / total));
        }
        sum += weight;
    }
    None
}

fn greedy() -> SampleRow {
    SampleRow { temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0, uniform: 0.5, mask: 0 }
}

#[test]
fn the_likeliest_token_is_the_lowest_of_equals() {
    let mut rng = Rng::new(1);
    for vocab_size in [1, 2, 31, 512, 513, 3000] {
        let stride = vocab_size + 5;
        let mut logits = rng.floats(3 * stride);
        for row in logits.chunks_exact_mut(stride) {
            row[vocab_size..].fill(f32::NAN);
        }
        let equal = [rng.below(vocab_size), rng.below(vocab_size)];
        logits[stride + equal[0]] = 9.0;
        logits[stride + equal[1]] = 9.0;
        let (ids, logprobs) = run(&logits, vocab_size, &[greedy(); 3], Order::Descending);
        for (row, (id, logprob)) in logits.chunks_exact(stride).zip(ids.iter().zip(&logprobs)) {
            let best = ranked(&row[..vocab_size])[0];
            assert_eq!(*id as usize, best, "of {vocab_size}");
            assert_close(&[*logprob], &[log_softmax(&row[..vocab_size])[best]], [1e-5, 1e-5], "log probability");
        }
        assert_eq!(ids[1] as usize, equal[0].min(equal[1]));
    }
}

#[test]
fn a_logit_that_is_not_finite_is_told() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = vec![0.5; 3 * 700];
        logits[700 + 650] = bad;
        let (ids, _) = run(&logits, 700, &[SampleRow { temperature: 1.0, ..greedy() }; 3], Order::Ascending);
        assert_eq!((ids[1], ids[0] < 700, ids[2] < 700), (u32::MAX, true, true), "{bad}");
    }
}

#[test]
fn drawn_tokens_are_those_of_a_sort() {
    let mut rng = Rng::new(2);
    let vocab_size = 700;
    let mut filters = vec![];
    for temperature in [0.3, 1.0, 4.0] {
        for (top_k, top_p, min_p) in [
            (0, 1.0, 0.0),
            (1, 1.0, 0.0),
            (40, 1.0, 0.0),
            (699, 1.0, 0.0),
            (5000, 1.0, 0.0),
            (0, 0.1, 0.0),
            (0, 0.9, 0.0),
            (0, 0.999, 0.0),
            (0, 1.0, 0.05),
            (20, 0.5, 0.0),
            (300, 0.95, 0.02),
        ] {
            filters.push(SampleRow { temperature, top_p, min_p, top_k, uniform: 0.0, mask: 0 });
        }
    }
    for round in 0..3 {
        let mut rows = filters.clone();
        let mut logits = vec![];
        for row in &mut rows {
            row.uniform = [0.0, 0.999_999_999, (rng.bits() >> 11) as f64 / (1u64 << 53) as f64][round];
            // Coarse steps in every other row: many equal logits, also at the cut.
            let steps = if row.top_k % 2 == 0 { 4.0 } else { 1e6 };
            logits.extend(rng.floats(vocab_size).iter().map(|x| ((x * 3.0 - 5.0) * steps).round() / steps));
        }
        let (ids, logprobs) = run(&logits, vocab_size, &rows, Order::Ascending);
        let again = run(&logits, vocab_size, &rows, Order::Descending);
        assert_eq!((&ids, &logprobs), (&again.0, &again.1), "the order of threads changes nothing");
        for ((row, logits), (&id, &logprob)) in rows.iter().zip(logits.chunks_exact(vocab_size)).zip(ids.iter().zip(&logprobs)) {
            let (low, high) =
                interval(&kept(logits, row), id as usize).unwrap_or_else(|| panic!("token {id} is not kept by {row:?}"));
            // What rounding of the weights to 2^-40 and of exponentials to f32 comes to.
            let slack = 2e-6;
            assert!(row.uniform >= low - slack && row.uniform <= high + slack, "token {id} is for {low}..{high}, not {row:?}");
            assert_close(&[logprob], &[log_softmax(logits)[id as usize]], [1e-5, 1e-5], "log probability");
        }
    }
}

#[test]
fn sums_of_weights_that_need_more_than_32_bits_are_exact() {
    // Logits so near each other that one bucket has nearly all the weight: its sum runs over 32 bits thousands of times.
    let (mut rng, vocab_size) = (Rng::new(8), 20_000);
    let logits: Vec<f32> = rng.floats(vocab_size).iter().map(|x| 1.0 + x / 64.0).collect();
    for top_p in [0.25, 0.5, 0.9] {
        let row = SampleRow { temperature: 1.0, top_p, ..greedy() };
        let kept = kept(&logits, &row);
        // Of the kept tokens, the first and the last by their ids.
        let rows = [1e-7, 0.999_999_9].map(|uniform| SampleRow { uniform, ..row });
        let (ids, _) = run(&logits.repeat(2), vocab_size, &rows, Order::Ascending);
        let again = run(&logits.repeat(2), vocab_size, &rows, Order::Descending).0;
        assert_eq!(ids, again, "the order of threads changes nothing");
        assert_eq!(ids, [kept[0].0, kept[kept.len() - 1].0].map(|id| id as u32), "top_p {top_p}");
    }
}

#[test]
fn tokens_of_several_parts_are_those_of_a_sort_alone_and_beside_others() {
    let mut rng = Rng::new(9);
    let vocab_size = 2 * SAMPLE_PART + 77;
    let filters = [(0, 1.0, 0.0), (40, 1.0, 0.0), (9000, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (3000, 0.95, 0.01)];
    for stride in [vocab_size + 3, vocab_size.next_multiple_of(4)] {
        let allowed = TokenSet::new((0..vocab_size as u32).filter(|_| rng.below(3) > 0), vocab_size);
        let mask = Buffer::input(allowed.mask().words());
        let (mut rows, mut logits) = (vec![], vec![]);
        for (i, (top_k, top_p, min_p)) in filters.into_iter().enumerate() {
            let (temperature, uniform) = ([0.5, 1.0, 0.0][i % 3], (rng.bits() >> 11) as f64 / (1u64 << 53) as f64);
            rows.push(SampleRow { temperature, top_p, min_p, top_k, uniform, mask: if i % 2 == 0 { mask.ptr() } else { 0 } });
            // Nearly all logits are apart, or many are equal.
            let steps = if i < 3 { 1e6 } else { 8.0 };
            logits.extend(rng.floats(stride).iter().map(|x| (x * 10.0 * steps).round() / steps));
        }
        let (ids, logprobs) = run(&logits, vocab_size, &rows, Order::Ascending);
        assert_eq!((ids.clone(), logprobs.clone()), run(&logits, vocab_size, &rows, Order::Descending), "the order of CTAs");
        for (i, (row, logits)) in rows.iter().zip(logits.chunks_exact(stride)).enumerate() {
            let alone = run(logits, vocab_size, &rows[i..=i], Order::Descending);
            assert_eq!(alone, (vec![ids[i]], vec![logprobs[i]]), "row {i} alone");
            let (logits, id) = (&logits[..vocab_size], ids[i] as usize);
            let mut order = ranked(logits);
            order.retain(|&id| row.mask == 0 || allowed.mask().allows(id as u32));
            if row.temperature == 0.0 {
                assert_eq!(id, order[0], "row {i}");
            } else {
                let (low, high) =
                    interval(&kept_of(order, logits, row), id).unwrap_or_else(|| panic!("token {id} is not kept by {row:?}"));
                let slack = 4e-6;
                assert!(row.uniform >= low - slack && row.uniform <= high + slack, "{id} is for {low}..{high}, not {row:?}");
            }
            assert_close(&[logprobs[i]], &[log_softmax(logits)[id]], [1e-5, 1e-5], "log probability");
        }
    }
}

#[test]
fn of_very_many_equal_logits_the_lowest_ids_are_kept() {
    // More than the lists of parts have room for, and than a part has tokens.
    let (vocab_size, top_k) = (20_000, 12_345);
    let logits = vec![1.5; 4 * vocab_size];
    let filter = SampleRow { temperature: 1.0, top_k, ..greedy() };
    let half = SampleRow { temperature: 1.0, top_p: 0.5, ..greedy() };
    let rows = [
        SampleRow { uniform: 0.0, ..filter },
        SampleRow { uniform: 0.5, ..filter },
        SampleRow { uniform: 1.0 - 1e-9, ..filter },
        SampleRow { uniform: 1.0 - 1e-9, ..half },
    ];
    for order in [Order::Ascending, Order::Descending] {
        assert_eq!(run(&logits, vocab_size, &rows, order).0, [0, top_k / 2, top_k - 1, vocab_size as u32 / 2 - 1]);
    }
}

#[test]
fn every_kept_token_is_drawn_and_no_other() {
    let mut rng = Rng::new(3);
    let logits: Vec<f32> = rng.floats(30).iter().map(|x| (x * 2.0).round() / 2.0).collect();
    for filter in [
        SampleRow { temperature: 1.0, top_k: 7, ..greedy() },
        SampleRow { temperature: 2.0, top_p: 0.6, ..greedy() },
        SampleRow { temperature: 1.0, min_p: 0.3, ..greedy() },
    ] {
        let kept = kept(&logits, &filter);
        let rows: Vec<_> = (0..100).map(|i| SampleRow { uniform: f64::from(i) / 100.0, ..filter }).collect();
        let (mut ids, _) = run(&logits.repeat(100), 30, &rows, Order::Ascending);
        assert!(ids.is_sorted(), "tokens are drawn in the order of their ids");
        ids.dedup();
        let expected: Vec<u32> = kept.iter().map(|(id, _)| *id as u32).collect();
        assert_eq!(ids, expected, "{filter:?}");
    }
}

#[test]
fn forbidden_tokens_have_no_rank_and_no_weight() {
    let mut rng = Rng::new(5);
    let vocab_size = 713;
    for temperature in [0.0, 0.4, 1.0, 3.0] {
        for (top_k, top_p, min_p) in
            [(0, 1.0, 0.0), (1, 1.0, 0.0), (25, 1.0, 0.0), (0, 0.3, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.1), (60, 0.9, 0.01)]
        {
            let filter = SampleRow { temperature, top_p, min_p, top_k, uniform: 0.0, mask: 0 };
            // Of each row: all but the likeliest, half of them, few, one alone.
            let logits: Vec<Vec<f32>> =
                (0..5).map(|_| rng.floats(vocab_size).iter().map(|x| (x * 12.0).round() / 4.0).collect()).collect();
            let likeliest = ranked(&logits[0])[0];
            let alone = [rng.below(vocab_size), vocab_size - 1];
            let allowed: Vec<Vec<usize>> = vec![
                (0..vocab_size).filter(|id| *id != likeliest).collect(),
                (0..vocab_size).filter(|_| rng.below(2) == 0).collect(),
                (0..vocab_size).filter(|id| *id == 600 || rng.below(90) == 0).collect(),
                vec![alone[0]],
                vec![alone[1]],
            ];
            let masks: Vec<_> = allowed
                .iter()
                .map(|ids| {
                    let mut words = TokenSet::new(ids.iter().map(|id| *id as u32), vocab_size).mask().words().to_vec();
                    // Bits behind the last token mean nothing.
                    *words.last_mut().unwrap() |= u32::MAX << (vocab_size % 32);
                    Buffer::input(&words)
                })
                .collect();
            let rows: Vec<_> = masks
                .iter()
                .map(|mask| SampleRow { uniform: (rng.bits() >> 11) as f64 / (1u64 << 53) as f64, mask: mask.ptr(), ..filter })
                .collect();
            let (ids, logprobs) = run(&logits.concat(), vocab_size, &rows, Order::Ascending);
            let again = run(&logits.concat(), vocab_size, &rows, Order::Descending);
            assert_eq!((&ids, &logprobs), (&again.0, &again.1), "the order of threads changes nothing");
            for i in 0..rows.len() {
                let (row, logits, id) = (&rows[i], &logits[i], ids[i] as usize);
                let mut order = ranked(logits);
                order.retain(|id| allowed[i].contains(id));
                if temperature == 0.0 {
                    assert_eq!(id, order[0], "row {i}");
                } else {
                    let (low, high) = interval(&kept_of(order, logits, row), id)
                        .unwrap_or_else(|| panic!("token {id} of row {i} is not kept by {row:?}"));
                    let slack = 2e-6;
                    assert!(
                        row.uniform >= low - slack && row.uniform <= high + slack,
                        "token {id} is for {low}..{high}, not {row:?}"
                    );
                }
                assert_close(&[logprobs[i]], &[log_softmax(logits)[id]], [1e-5, 1e-5], "log probability by all logits");
            }
        }
    }
}

#[test]
fn every_allowed_token_is_drawn_and_no_other() {
    let mut rng = Rng::new(6);
    let logits: Vec<f32> = rng.floats(40).iter().map(|x| (x * 2.0).round() / 2.0).collect();
    let allowed: Vec<usize> = (0..40).filter(|id| id % 3 == 1).collect();
    let mask = Buffer::input(TokenSet::new(allowed.iter().map(|id| *id as u32), 40).mask().words());
    let filters = [
        SampleRow { temperature: 2.0, ..greedy() },
        SampleRow { temperature: 1.0, top_k: 5, ..greedy() },
        SampleRow { temperature: 2.0, top_p: 0.6, ..greedy() },
        SampleRow { temperature: 1.0, min_p: 0.3, ..greedy() },
    ];
    for filter in filters {
        let mut order = ranked(&logits);
        order.retain(|id| allowed.contains(id));
        let expected: Vec<u32> = kept_of(order, &logits, &filter).iter().map(|(id, _)| *id as u32).collect();
        let rows: Vec<_> = (0..200).map(|i| SampleRow { uniform: f64::from(i) / 200.0, mask: mask.ptr(), ..filter }).collect();
        let (mut ids, _) = run(&logits.repeat(200), 40, &rows, Order::Ascending);
        ids.dedup();
        assert_eq!(ids, expected, "{filter:?}");
    }
}

#[test]
fn a_mask_that_allows_nothing_is_told_and_a_damaged_logit_that_is_forbidden_too() {
    let mut logits = vec![0.5; 3 * 70];
    logits[2 * 70 + 3] = f32::NAN;
    // Bits behind the last token allow none.
    let (nothing, all_but_eight) = (Buffer::input(&[0_u32, 0, 0xffff_ffc0]), Buffer::input(&[u32::MAX << 8, u32::MAX, u32::MAX]));
    for temperature in [0.0, 1.0] {
        let masked = |mask| SampleRow { temperature, mask, ..greedy() };
        let rows = [masked(nothing.ptr()), masked(all_but_eight.ptr()), masked(all_but_eight.ptr())];
        let (ids, logprobs) = run(&logits, 70, &rows, Order::Ascending);
        assert_eq!((ids[0], (8..70).contains(&ids[1]), ids[2]), (u32::MAX, true, u32::MAX));
        assert_eq!((logprobs[0], logprobs[2]), (f32::NEG_INFINITY, f32::NEG_INFINITY));
    }
}

#[test]
fn top_log_probabilities_are_those_of_a_sort() {
    let mut rng = Rng::new(4);
    let (vocab_size, stride, num_top) = (5000, 5004, 13);
    let mut logits: Vec<f32> = rng.floats(2 * stride).iter().map(|x| (x * 8.0).round()).collect();
    // More of one thread's tokens than it holds.
    for id in [0, 1, 2, 3, 2048, 2049, 2050, 2051, 4096, 4098] {
        logits[stride + id] = 40.0 + (id % 5) as f32;
    }
    let buffer = Buffer::input(&logits);
    let normalizer = |logits: &[f32]| logits[0] - log_softmax(&logits[..vocab_size])[0];
    let normalizers: Vec<f32> = logits.chunks_exact(stride).map(normalizer).collect();
    let normalizers = Buffer::input(&normalizers);
    let (token_ids, logprobs) = (Buffer::output::<u32>(2 * num_top), Buffer::output::<f32>(2 * num_top));
    let args = TopLogprobsArgs {
        logits: buffer.ptr(),
        normalizers: normalizers.ptr(),
        token_ids: token_ids.ptr(),
        logprobs: logprobs.ptr(),
        num_rows: 2,
        vocab_size: vocab_size as u32,
        stride: stride as u32,
        num_top: num_top as u32,
    };
    Kernel::named("top_logprobs").launch([2, 1, 1], &args, Order::Descending);
    for (row, logits) in logits.chunks_exact(stride).enumerate() {
        let logits = &logits[..vocab_size];
        let best = &ranked(logits)[..num_top];
        let ids = &token_ids.values::<u32>()[row * num_top..][..num_top];
        assert_eq!(ids.iter().map(|&id| id as usize).collect::<Vec<_>>(), best);
        let expected: Vec<f32> = best.iter().map(|&id| log_softmax(logits)[id]).collect();
        assert_close(&logprobs.values::<f32>()[row * num_top..][..num_top], &expected, [1e-5, 1e-5], "log probability");
    }
}
