//! Draws against a plain one, which sorts the whole row.

use device::cpu::softmax::{Softmax, block_sums};
use proptest::prelude::*;
use rand::Rng;

use super::*;

/// The (id, weight) of the tokens that are kept, by id, and the one that is drawn.
fn plain_draw(logits: &[f32], sampling: &ResolvedSampling, uniform: f64) -> (Vec<(u32, f32)>, u32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let softmax = Softmax::new(max, 1.0 / sampling.temperature.unwrap());
    let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().map(|x| softmax.weight(*x))).collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut sums = Vec::new();
    block_sums(logits, softmax, &mut sums);
    let total: f64 = sums.iter().map(|sum| f64::from(*sum)).sum();
    let mass = if sampling.top_p < 1.0 { f64::from(sampling.top_p) * total } else { f64::INFINITY };
    let mut sum = 0.0;
    let kept = sorted.iter().take(sampling.top_k.unwrap_or(usize::MAX)).take_while(|(_, weight)| {
        let is_kept = sum < mass && *weight >= sampling.min_p;
        sum += f64::from(*weight);
        is_kept
    });
    let mut kept: Vec<_> = kept.copied().collect();
    kept.sort_by_key(|(id, _)| *id);
    let target = uniform * kept.iter().map(|(_, weight)| f64::from(*weight)).sum::<f64>();
    let mut sum = 0.0;
    let drawn = kept.iter().find(|(_, weight)| {
        sum += f64::from(*weight);
        sum > target
    });
    let drawn = drawn.unwrap_or(&kept[kept.len() - 1]).0;
    (kept, drawn)
}

fn check(logits: &[f32], sampling: &ResolvedSampling, seed: u64) {
    let mut sampler = Sampler::new(Arc::new(sampling.clone()), seed, &[], Arc::default());
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for position in 0..3 {
        let (kept, drawn) = plain_draw(logits, sampling, rng.random());
        let sampled = sampler.sample(&mut logits.to_vec(), position, None).unwrap();
        assert_eq!(sampler.candidates, kept, "{sampling:?}");
        assert_eq!(sampled.token_id, drawn, "{sampling:?}");
    }
}

fn sampling(temperature: f32, top_k: Option<usize>, top_p: f32, min_p: f32) -> ResolvedSampling {
    let plain = ResolvedSampling::new(&crate::SamplingParams::default(), &crate::GenerationConfig::default(), 1).unwrap();
    ResolvedSampling { temperature: Some(temperature), top_k, top_p, min_p, ..plain }
}

fn rows() -> impl Strategy<Value = Vec<f32>> {
    let lens = 1_usize..2000;
    prop_oneof![
        proptest::collection::vec(prop_oneof![20 => -30.0_f32..30.0, 1 => Just(-1e30)], lens.clone()),
        proptest::collection::vec(-12.0_f32..0.0, lens.clone()),
        // Many of them equal.
        proptest::collection::vec((-6_i8..4).prop_map(|n| f32::from(n) * std::f32::consts::LN_2), lens.clone()),
        (-9.0_f32..9.0, lens.clone()).prop_map(|(x, len)| vec![x; len]),
        // One far above the others.
        (lens, any::<proptest::sample::Index>()).prop_map(|(len, at)| {
            let mut row = vec![0.0; len];
            row[at.index(len)] = 60.0;
            row
        }),
    ]
}

proptest! {
    #[test]
    fn a_draw_is_that_from_the_sorted_row(
        row in rows(),
        temperature in prop_oneof![Just(1.0_f32), 0.75_f32..3.0],
        top_k in proptest::option::of(2_usize..1500),
        top_p in prop_oneof![3 => 0.01_f32..1.0, 1 => Just(f32::MIN_POSITIVE), 1 => Just(0.5), 1 => Just(0.999_999_9), 1 => Just(1.0)],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..=1.0, Just(1e-30)],
        seed in any::<u64>(),
    ) {
        let sampling = sampling(temperature, top_k, top_p, min_p);
        prop_assume!(top_k.is_some() || top_p < 1.0 || min_p > 0.0);
        check(&row, &sampling, seed);
    }
}

#[test]
fn draws_of_large_vocabularies_are_those_from_the_sorted_row() {
    let mut state = 1_u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    let flat: Vec<f32> = (0..262_144).map(|_| (uniform() + uniform() + uniform() - 1.5) * 6.0).collect();
    let peaked: Vec<f32> = flat.iter().enumerate().map(|(i, x)| if i % 40_000 == 7 { x + 20.0 } else { *x }).collect();
    for row in [flat, peaked] {
        for (top_k, top_p, min_p) in
            [(None, 0.9, 0.0), (None, 0.1, 0.0), (Some(1000), 1.0, 0.0), (Some(5000), 0.99, 0.001), (None, 1.0, 0.01)]
        {
            check(&row, &sampling(0.8, top_k, top_p, min_p), 3);
        }
    }
}
