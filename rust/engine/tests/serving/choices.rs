//! Several answers to one prompt: shared blocks, independent tokens.

use std::time::Duration;

use engine::{
    Completion, CompletionChoice, Engine, EngineConfig, EngineError, FinishReason, GenerationRequest, Prompt, SamplingParams,
};

use crate::common::serving::{exact, greedy, pool_of, prompt, request, start, stats};

#[test]
fn choices_are_independent_and_the_best_come_first() {
    let engine = start("llama", &exact());
    let sampling = SamplingParams { temperature: Some(1.5), seed: Some(1), ..greedy(12) };
    let ask = |n_choices, best_of| {
        let request =
            GenerationRequest { n_choices, best_of, ..GenerationRequest::new(Prompt::TokenIds(prompt(2, 20)), sampling.clone()) };
        engine.submit(request).unwrap().wait().unwrap()
    };
    let all = ask(4, None);
    assert_eq!(all.choices.len(), 4);
    assert_eq!(all.usage.completion_tokens, 48);
    assert_ne!(all.choices[0].text, all.choices[1].text);
    let best = ask(1, Some(4));
    assert_eq!(best.choices.len(), 1);
    let wanted = all.choices.iter().max_by(|a, b| mean_logprob(a).total_cmp(&mean_logprob(b))).unwrap();
    assert_eq!(best.choices[0].text, wanted.text);
}

fn sum_logprob(choice: &engine::CompletionChoice) -> f64 {
    choice.logprobs.iter().flatten().filter_map(|l| l.logprob).map(f64::from).sum()
}

fn mean_logprob(choice: &engine::CompletionChoice) -> f64 {
    sum_logprob(choice) / choice.logprobs.as_ref().unwrap().len() as f64
}

#[test]
fn the_best_choices_are_those_with_the_best_mean_log_probability() {
    let engine = start("llama", &exact());
    let mut mean_and_sum_disagreed = false;
    for seed in 0..20 {
        let stop_token_ids = (0..512).filter(|id| id % 8 == 0).collect();
        let sampling = SamplingParams { temperature: Some(1.5), seed: Some(seed), stop_token_ids, ..greedy(40) };
        let ask = |n_choices, best_of| {
            let prompt = Prompt::TokenIds(prompt(2, 20));
            let request = GenerationRequest { n_choices, best_of, ..GenerationRequest::new(prompt, sampling.clone()) };
            engine.submit(request).unwrap().wait().unwrap()
        };
        let mut all = ask(4, None).choices;
        let by_sum = all.iter().max_by(|a, b| sum_logprob(a).total_cmp(&sum_logprob(b))).unwrap().index;
        all.sort_by(|a, b| mean_logprob(b).total_cmp(&mean_logprob(a)));
        mean_and_sum_disagreed |= by_sum != all[0].index;
        let best = ask(2, Some(4)).choices;
        assert_eq!(best.iter().map(|c| &c.text).collect::<Vec<_>>(), [&all[0].text, &all[1].text], "seed {seed}");
    }
    assert!(mean_and_sum_disagreed, "the choices' lengths told nothing apart");
}

/// Four answers of a prompt of 100 tokens: three full blocks of 32, and a part of a fourth.
fn four(sampling: SamplingParams) -> GenerationRequest {
    GenerationRequest { n_choices: 4, ..GenerationRequest::new(Prompt::TokenIds(prompt(6, 100)), sampling) }
}

fn sampled(max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: Some(1.0), seed: Some(3), ..greedy(max_tokens) }
}

fn ask(engine: &Engine, request: GenerationRequest) -> Completion {
    engine.submit(request).unwrap().wait().unwrap()
}

/// What each choice came to: tokens and the bits of their log probabilities.
fn outcome(completion: &Completion) -> Vec<Vec<(u32, Option<u32>)>> {
    let tokens = |choice: &CompletionChoice| {
        choice.logprobs.iter().flatten().map(|l| (l.token_id, l.logprob.map(f32::to_bits))).collect::<Vec<_>>()
    };
    completion.choices.iter().map(tokens).collect()
}

#[test]
fn choices_are_what_they_are_alone_however_they_are_served() {
    for model in ["llama", "mistral-window", "gemma3", "qwen3.gguf"] {
        // One at a time, each computing its prompt for itself.
        let alone = start(model, &EngineConfig { max_num_seqs: 1, prefix_caching: false, ..exact() });
        let scored = || GenerationRequest { echo_prompt: true, ..four(sampled(40)) };
        let (expected, expected_scored) = (outcome(&ask(&alone, four(sampled(40)))), outcome(&ask(&alone, scored())));
        assert_eq!(expected.len(), 4);
        assert_ne!(expected[0], expected[1]);
        assert_eq!(expected_scored[3].len(), 140);
        let configs = [
            ("together", exact()),
            ("without prefix cache", EngineConfig { prefix_caching: false, ..exact() }),
            ("three at a time", EngineConfig { max_num_seqs: 3, ..exact() }),
            ("chunks of seven tokens", EngineConfig { max_num_batched_tokens: 7, ..exact() }),
            ("blocks of 8", EngineConfig { paged_attention: pool_of(4000, 8), ..exact() }),
            ("without KV cache", EngineConfig { no_kv_cache: true, ..exact() }),
            ("whole contexts reserved", EngineConfig { no_paged_attn: true, ..exact() }),
        ];
        for (way, config) in configs {
            let engine = start(model, &config);
            for _ in 0..2 {
                assert_eq!(expected, outcome(&ask(&engine, four(sampled(40)))), "{model}, {way}");
            }
            assert_eq!(expected_scored, outcome(&ask(&engine, scored())), "{model}, {way}, with the prompt scored");
            assert_eq!(stats(&engine).blocks_used, 0, "{model}, {way}");
        }
    }
}

#[test]
fn choices_that_are_preempted_come_to_the_same() {
    for prefix_caching in [true, false] {
        let alone = start("llama", &EngineConfig { max_num_seqs: 1, prefix_caching: false, ..exact() });
        let expected = outcome(&ask(&alone, four(sampled(60))));
        // Twelve blocks are shared and four have eight each of their own: more than there are.
        let engine = start("llama", &EngineConfig { prefix_caching, paged_attention: pool_of(200, 8), ..exact() });
        assert_eq!(expected, outcome(&ask(&engine, four(sampled(60)))));
        let stats = stats(&engine);
        assert!(stats.preemptions > 0, "the pool was not tight: {stats:?}");
        assert_eq!(stats.blocks_used, 0);
    }
}

#[test]
fn choices_of_a_prompt_that_fills_the_pool_end_with_their_first_token() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(64, 8), ..exact() });
    let request = GenerationRequest { n_choices: 3, ..request(1, 64, 10) };
    for choice in ask(&engine, request).choices {
        assert_eq!((choice.finish_reason, choice.logprobs.unwrap().len()), (FinishReason::Length, 1));
    }
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn a_request_with_choices_that_is_dropped_leaves_nothing_in_any_state() {
    let engine = start("llama", &EngineConfig { max_num_batched_tokens: 16, max_num_seqs: 3, ..exact() });
    for num_events in 0..12 {
        let stream = engine.submit(GenerationRequest { n_choices: 6, ..four(sampled(40)) }).unwrap();
        for _ in 0..num_events {
            stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time");
        }
        drop(stream);
        let stats = stats(&engine);
        assert_eq!((stats.blocks_used, stats.requests_running, stats.requests_waiting), (0, 0, 0), "after {num_events} events");
    }
}

#[test]
fn choices_end_with_their_stream_and_with_their_first_token() {
    let engine = start("llama", &EngineConfig { max_num_batched_tokens: 8, ..exact() });
    let many = |i| engine.submit(GenerationRequest { n_choices: 8, ..request(i, 120, 40) }).unwrap();
    drop(many(1));
    assert_eq!(stats(&engine).blocks_used, 0);
    // The first choice ends at its first token, before the others begin.
    let one = engine.submit(GenerationRequest { n_choices: 3, ..request(2, 40, 1) }).unwrap().wait().unwrap();
    assert_eq!(one.choices.iter().map(|c| c.finish_reason).collect::<Vec<_>>(), [FinishReason::Length; 3]);
    assert_eq!(one.usage.completion_tokens, 3);
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn more_choices_than_the_limit_are_refused_before_anything_is_made() {
    let engine = start("llama", &exact());
    for (n_choices, best_of, name) in
        [(usize::MAX, None, "n_choices"), (1, Some(usize::MAX), "best_of"), (1025, None, "n_choices")]
    {
        match engine.submit(GenerationRequest { n_choices, best_of, ..request(1, 8, 1) }) {
            Err(EngineError::InvalidArgument(message)) => {
                let value = best_of.unwrap_or(n_choices).to_string();
                assert!(message.contains(name) && message.contains(&value) && message.contains("1024"), "{message}");
            }
            _ => panic!("{name} was taken"),
        }
    }
    let most = engine.submit(GenerationRequest { n_choices: 1024, ..request(1, 8, 1) }).unwrap().wait().unwrap();
    assert_eq!(most.choices.len(), 1024);
}
