//! The sampler against plain definitions: which tokens may come, how often they do, and that nothing else matters.

use std::{collections::HashSet, sync::Arc};

use engine::{
    DryParams, EngineError, GenerationConfig, ResolvedSampling, Sampler, SamplingParams, Tokenizer,
    sampler::{dry_breaker_ids, token_logprob},
};
use proptest::prelude::*;

fn resolve(params: &SamplingParams, vocab_size: usize) -> Arc<ResolvedSampling> {
    Arc::new(ResolvedSampling::new(params, &GenerationConfig::default(), vocab_size).expect("valid"))
}

fn sampler(params: &SamplingParams, vocab_size: usize, seed: u64) -> Sampler {
    Sampler::new(resolve(params, vocab_size), seed, &[], Arc::default())
}

fn draws(params: &SamplingParams, logits: &[f32], num: usize) -> Vec<u32> {
    let mut sampler = sampler(params, logits.len(), 7);
    (0..num).map(|position| next(&mut sampler, logits, position)).collect()
}

/// The token at `position`, which is observed.
fn next(sampler: &mut Sampler, logits: &[f32], position: usize) -> u32 {
    let token = sampler.sample(&mut logits.to_vec(), position, None).expect("token").token_id;
    sampler.observe(token);
    token
}

/// Probabilities after temperature, top-k, top-p and min-p, by sorting everything.
fn distribution(params: &SamplingParams, logits: &[f32]) -> Vec<f64> {
    let temperature = f64::from(params.temperature.unwrap_or(1.0));
    let weights: Vec<f64> = logits.iter().map(|x| (f64::from(*x) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
    let mut kept = vec![0.0; logits.len()];
    let mut sum = 0.0;
    for (rank, &i) in order.iter().enumerate() {
        let p = weights[i] / total;
        let in_k = params.top_k.is_none_or(|k| rank < k);
        let in_p = sum < f64::from(params.top_p.unwrap_or(1.0));
        let in_min = p >= f64::from(params.min_p.unwrap_or(0.0)) * weights[order[0]] / total;
        sum += p;
        if in_k && in_p && in_min {
            kept[i] = p;
        }
    }
    let total: f64 = kept.iter().sum();
    kept.iter().map(|p| p / total).collect()
}

fn logits(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 % 101) as f32 / 101.0 - 0.5) * 8.0).collect()
}

#[test]
fn draws_follow_the_truncated_distribution() {
    let d = SamplingParams::default;
    for params in [
        d(),
        SamplingParams { temperature: Some(0.5), ..d() },
        SamplingParams { top_k: Some(5), ..d() },
        SamplingParams { top_p: Some(0.6), ..d() },
        SamplingParams { min_p: Some(0.3), ..d() },
        SamplingParams { temperature: Some(2.0), top_k: Some(12), top_p: Some(0.5), min_p: Some(0.05), ..d() },
    ] {
        let logits = logits(40);
        let expected = distribution(&params, &logits);
        let num = 20_000;
        let mut counts = vec![0_usize; logits.len()];
        for token in draws(&params, &logits, num) {
            counts[token as usize] += 1;
        }
        let mut cells: Vec<(f64, f64)> = Vec::new();
        let mut by_mean: Vec<_> = expected.iter().map(|p| p * num as f64).zip(counts).collect();
        by_mean.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (mean, count) in by_mean {
            if mean == 0.0 {
                assert_eq!(count, 0, "a token outside the truncated set: {params:?}");
                continue;
            }
            // Tokens that are expected fewer than five times are counted together (Cochran 1954), or a single one would decide.
            match cells.last_mut().filter(|(mean, _)| *mean < 5.0) {
                Some(cell) => *cell = (cell.0 + mean, cell.1 + count as f64),
                None => cells.push((mean, count as f64)),
            }
        }
        let chi_square: f64 = cells.iter().map(|(mean, count)| (count - mean).powi(2) / mean).sum();
        // Mean k - 1, standard deviation sqrt(2 (k - 1)): five of them above is chance once in more than a million.
        let degrees = cells.len() as f64 - 1.0;
        assert!(chi_square < degrees + 5.0 * (2.0 * degrees).sqrt() + 5.0, "chi-square {chi_square} of {degrees}: {params:?}");
    }
}

#[test]
fn every_kept_token_of_a_flat_row_can_come() {
    let params = SamplingParams { top_p: Some(0.5), ..SamplingParams::default() };
    let flat = vec![0.25; 1000];
    let seen: HashSet<u32> = draws(&params, &flat, 20_000).into_iter().collect();
    // Of equal tokens the lowest ids are kept.
    assert!(seen.len() == 500 && seen.iter().all(|t| *t < 500), "{} tokens", seen.len());
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    let params = SamplingParams { temperature: Some(0.0), ..SamplingParams::default() };
    assert_eq!(draws(&params, &[0.0, 3.0, 1.0, 3.0], 2), [1, 1]);
    let one = SamplingParams { top_k: Some(1), temperature: Some(5.0), ..SamplingParams::default() };
    assert_eq!(draws(&one, &[0.0, 3.0, 1.0, 3.0], 2), [1, 1]);
}

#[test]
fn whoever_needs_more_than_the_largest_logit_is_not_greedy() {
    let d = || SamplingParams { temperature: Some(0.0), ..SamplingParams::default() };
    assert!(sampler(&d(), 9, 0).is_greedy());
    for params in [
        SamplingParams { temperature: Some(1.0), ..d() },
        SamplingParams { logprobs: Some(0), ..d() },
        SamplingParams { logit_bias: vec![(3, 1.0)], ..d() },
        SamplingParams { presence_penalty: Some(0.5), ..d() },
        SamplingParams { frequency_penalty: Some(0.5), ..d() },
        SamplingParams { repetition_penalty: Some(1.2), ..d() },
        SamplingParams {
            dry: Some(DryParams { multiplier: 5.0, base: 2.0, allowed_length: 2, sequence_breakers: Vec::new() }),
            ..d()
        },
    ] {
        assert!(!sampler(&params, 9, 0).is_greedy(), "{params:?}");
    }
}

#[test]
fn seeds_and_choices_decide_and_nothing_else() {
    let params = SamplingParams { top_p: Some(0.9), ..SamplingParams::default() };
    let row = logits(200);
    let run = |seed, choice| {
        let mut sampler = Sampler::new(resolve(&params, 200), seed, &[1, 2], Arc::default()).for_choice(choice);
        (0..50).map(|position| next(&mut sampler, &row, position)).collect::<Vec<_>>()
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(1, 1));
    assert_ne!(run(1, 0), run(2, 0));
}

#[test]
fn a_position_has_its_token_in_whatever_order_they_are_drawn() {
    let params = SamplingParams { top_p: Some(0.9), ..SamplingParams::default() };
    let row = logits(200);
    let expected = draws(&params, &row, 40);
    let mut sampler = sampler(&params, 200, 7);
    for position in (0..40).rev().chain((0..40).map(|i| i * 23 % 40)).chain([7, 7, 7]) {
        assert_eq!(next(&mut sampler, &row, position), expected[position], "position {position}");
        let (row, _) = sampler.row_sampling(position + 1, None).expect("nothing changes the logits");
        assert_eq!(Some(row), sampler.clone().row_sampling(position + 1, None).map(|(row, _)| row));
    }
}

#[test]
fn penalties_count_the_prompt_and_the_output() {
    let params = SamplingParams { temperature: Some(0.0), presence_penalty: Some(1.0), ..SamplingParams::default() };
    let mut sampler = Sampler::new(resolve(&params, 4), 0, &[0], Arc::default());
    let row = [2.0, 1.5, 1.2, 0.0];
    let tokens: Vec<u32> = (0..3).map(|position| next(&mut sampler, &row, position)).collect();
    // 0 is in the prompt; then 1 and 2 have come, and 0 is ahead again.
    assert_eq!(tokens, [1, 2, 0]);
    let rising = SamplingParams { temperature: Some(0.0), frequency_penalty: Some(0.5), ..SamplingParams::default() };
    assert_eq!(draws(&rising, &[2.0, 1.2], 4), [0, 0, 1, 0]);
}

#[test]
fn bias_and_dry_change_the_choice() {
    let biased = SamplingParams { temperature: Some(0.0), logit_bias: vec![(2, 10.0), (1, -100.0)], ..SamplingParams::default() };
    assert_eq!(draws(&biased, &[5.0, 50.0, 0.0], 1), [2]);
    let dry = DryParams { multiplier: 5.0, base: 2.0, allowed_length: 2, sequence_breakers: Vec::new() };
    let params = SamplingParams { temperature: Some(0.0), dry: Some(dry), ..SamplingParams::default() };
    // After 1 2 3 ... 1 2 the third repetition would be 3.
    let choose = |prompt: &[u32], breakers: HashSet<u32>| {
        let mut sampler = Sampler::new(resolve(&params, 5), 0, prompt, Arc::new(breakers));
        next(&mut sampler, &[0.0, 0.0, 0.0, 4.0, 1.0], 0)
    };
    assert_eq!(choose(&[1, 2, 3, 0, 1, 2], HashSet::new()), 4);
    assert_eq!(choose(&[1, 2, 3, 0, 0, 2], HashSet::new()), 3);
    assert_eq!(choose(&[1, 2, 3, 0, 1, 2], HashSet::from([2])), 3);
}

#[test]
fn breakers_are_the_tokens_that_contain_them() {
    let tokenizer = Tokenizer::from_hf_dir(&goldens::dir().join("text/llama"), None).expect("tokenizer");
    let ids = dry_breaker_ids(&tokenizer, &["\n".into(), "*".into()]).expect("ids");
    for id in 0..tokenizer.vocab_size() as u32 {
        let text = tokenizer.token_text(id);
        assert_eq!(ids.contains(&id), text.contains('\n') || text.contains('*'), "{text:?}");
    }
    assert!(!ids.is_empty());
}

#[test]
fn logprobs_are_the_models_own() {
    let params =
        SamplingParams { temperature: Some(0.0), logprobs: Some(2), logit_bias: vec![(0, 100.0)], ..SamplingParams::default() };
    let row = [1.0_f32, 3.0, 2.0];
    let normaliser = row.iter().map(|x| x.exp()).sum::<f32>().ln();
    let sampled = sampler(&params, 3, 0).sample(&mut row.to_vec(), 0, None).expect("token");
    let logprobs = sampled.logprobs.expect("asked for");
    assert_eq!(sampled.token_id, 0);
    assert!((logprobs.logprob - (1.0 - normaliser)).abs() < 1e-6);
    assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
    assert!((logprobs.top[0].1 - (3.0 - normaliser)).abs() < 1e-6);
    assert_eq!(token_logprob(&row, 0, 2).expect("logprobs"), logprobs);
    assert!(matches!(token_logprob(&row, 3, 0), Err(EngineError::InvalidArgument(m)) if m.contains("token 3")));
}

#[test]
fn damaged_rows_are_errors_that_name_the_logit() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut row = vec![0.0; 100];
        row[42] = bad;
        let error = sampler(&SamplingParams::default(), 100, 0).sample(&mut row, 0, None).unwrap_err();
        assert!(matches!(&error, EngineError::Internal(m) if m.contains("token 42") && m.contains(&bad.to_string())), "{error}");
    }
    assert!(matches!(sampler(&SamplingParams::default(), 100, 0).sample(&mut [], 0, None), Err(EngineError::Internal(_))));
}

proptest! {
    #[test]
    fn truncation_keeps_what_sorting_keeps(
        row in proptest::collection::vec(-6.0_f32..6.0, 2..400),
        temperature in 0.2_f32..3.0,
        top_k in proptest::option::of(2_usize..300),
        top_p in proptest::option::of(0.05_f32..0.999),
        min_p in proptest::option::of(0.0_f32..0.9),
        seed in any::<u64>(),
    ) {
        let params = SamplingParams { temperature: Some(temperature), top_k, top_p, min_p, ..SamplingParams::default() };
        // A hair wider, for thresholds that fall on a token.
        let wider = SamplingParams { top_p: top_p.map(|p| p * 1.00001), min_p: min_p.map(|p| p * 0.99999), ..params.clone() };
        let expected = distribution(&wider, &row);
        let mut sampler = sampler(&params, row.len(), seed);
        for position in 0..20 {
            let token = next(&mut sampler, &row, position);
            prop_assert!(expected[token as usize] > 0.0, "token {} is outside", token);
        }
    }
}
