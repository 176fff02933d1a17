//! Tokens that may not come never do, and the others as if there were nothing else.

use engine::{
    Completion, CpuOptions, DryParams, Engine, EngineConfig, EngineError, FinishReason, GenerationRequest, Prompt, SamplingParams,
};

use crate::common::{
    self,
    serving::{exact, greedy, pool_of, prompt, request, run, start},
};

const VOCAB_SIZE: u32 = 512;

/// Engines of every instruction set of this machine, on float weights as they are and on quantized ones that are packed.
fn engines() -> impl Iterator<Item = Engine> {
    let isas = ["scalar", "avx2", "avx512", "amx"].into_iter().filter(|isa| {
        let isa = device::cpu::Isa::parse(isa);
        isa.is_ok_and(|isa| isa <= device::cpu::Isa::detect())
    });
    isas.flat_map(|isa| {
        let on_isa = |config: EngineConfig| EngineConfig {
            cpu: CpuOptions { isa: Some(isa.into()), num_threads: Some(2) },
            paged_attention: pool_of(2048, 32),
            ..config
        };
        [start("llama", &on_isa(exact())), start("llama.gguf", &on_isa(EngineConfig::default()))]
    })
}

fn sets() -> [Vec<u32>; 3] {
    [
        (0..VOCAB_SIZE).filter(|token| token % 2 == 1).collect(),
        (0..VOCAB_SIZE).filter(|token| token % 50 == 3).collect(),
        vec![77],
    ]
}

fn ask(engine: &Engine, token_ids: Vec<u32>, sampling: SamplingParams, n_choices: usize) -> Completion {
    let request = GenerationRequest { n_choices, ..GenerationRequest::new(Prompt::TokenIds(token_ids), sampling) };
    engine.submit(request).unwrap().wait().unwrap()
}

#[test]
fn a_greedy_answer_has_the_likeliest_allowed_tokens() {
    for engine in engines() {
        for allowed in sets() {
            let masked = SamplingParams { allowed_token_ids: Some(allowed.clone()), ..greedy(8) };
            let mut context = prompt(3, 30);
            let completion = ask(&engine, context.clone(), masked.clone(), 1);
            let answer = common::serving::tokens(&completion);
            assert_eq!(answer.len(), 8);
            for token in &answer {
                // All tokens of the position by the model, likeliest first.
                let all = SamplingParams { logprobs: Some(VOCAB_SIZE as usize), ..greedy(1) };
                let all = ask(&engine, context.clone(), all, 1).choices.remove(0).logprobs.unwrap().remove(0);
                let likeliest = all.top_logprobs.iter().map(|top| top.token_id).find(|token| allowed.contains(token));
                assert_eq!(Some(*token), likeliest);
                context.push(*token);
            }
            // Where nothing but the largest logit is asked for, it may be found without the others.
            let alone = ask(&engine, prompt(3, 30), SamplingParams { logprobs: None, ..masked }, 1);
            assert_eq!(alone.choices[0].text, completion.choices[0].text);
        }
    }
}

#[test]
fn no_choice_ever_has_a_forbidden_token() {
    let engine = start("llama", &exact());
    let d = || SamplingParams { temperature: Some(1.5), seed: Some(5), logprobs: Some(3), ..greedy(12) };
    let dry = DryParams { multiplier: 5.0, base: 2.0, allowed_length: 1, sequence_breakers: Vec::new() };
    for allowed in sets() {
        // What is forbidden is also what the bias is for.
        let forbidden = (0..VOCAB_SIZE).filter(|token| !allowed.contains(token));
        let logit_bias: Vec<_> = forbidden.take(30).map(|token| (token, 100.0)).collect();
        for params in [
            d(),
            SamplingParams { temperature: Some(0.0), ..d() },
            SamplingParams { top_k: Some(4), ..d() },
            SamplingParams { top_k: Some(200), top_p: Some(0.7), ..d() },
            SamplingParams { min_p: Some(0.2), ..d() },
            SamplingParams { logit_bias, presence_penalty: Some(2.0), ..d() },
            SamplingParams { dry: Some(dry.clone()), repetition_penalty: Some(3.0), ..d() },
        ] {
            let masked = SamplingParams { allowed_token_ids: Some(allowed.clone()), ..params };
            let completion = ask(&engine, prompt(1, 25), masked.clone(), 3);
            assert_eq!(completion.choices.len(), 3);
            for choice in completion.choices {
                assert_eq!(choice.finish_reason, FinishReason::Length);
                let logprobs = choice.logprobs.unwrap();
                assert!(logprobs.len() == 12 && logprobs.iter().all(|l| allowed.contains(&l.token_id)), "{masked:?}");
            }
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_model_whatever_is_allowed() {
    let engine = start("llama", &exact());
    let of = |allowed_token_ids| {
        let sampling = SamplingParams { logprobs: Some(4), allowed_token_ids, ..greedy(1) };
        ask(&engine, prompt(6, 20), sampling, 1).choices.remove(0).logprobs.unwrap().remove(0)
    };
    let free = of(None);
    let [best, second] = [0, 1].map(|rank| free.top_logprobs[rank].clone());
    let forced = of(Some(vec![second.token_id]));
    assert_eq!((forced.token_id, forced.logprob), (second.token_id, Some(second.logprob)));
    assert_eq!(forced.top_logprobs[0].token_id, best.token_id);
    assert_eq!(forced.top_logprobs[0].logprob, best.logprob);
}

#[test]
fn a_mask_that_forbids_what_would_not_have_come_changes_nothing() {
    let engine = start("llama", &exact());
    for params in [greedy(12), SamplingParams { temperature: Some(1.0), top_k: Some(5), seed: Some(2), ..greedy(12) }] {
        let free = run(&engine, GenerationRequest { sampling: params.clone(), ..request(2, 20, 12) });
        let all = Some((0..VOCAB_SIZE).collect());
        let masked = SamplingParams { allowed_token_ids: all, ..params };
        assert_eq!(run(&engine, GenerationRequest { sampling: masked, ..request(2, 20, 12) }), free);
    }
}

#[test]
fn ids_that_the_model_does_not_have_are_refused() {
    let engine = start("llama", &exact());
    for (ids, why) in [(vec![], "allowed_token_ids is empty"), (vec![1, VOCAB_SIZE], "with token 512")] {
        let sampling = SamplingParams { allowed_token_ids: Some(ids), ..greedy(3) };
        let Err(error) = engine.submit(GenerationRequest { sampling, ..request(1, 9, 3) }) else { panic!("{why}") };
        assert!(matches!(&error, EngineError::InvalidArgument(message) if message.contains(why)), "{error}");
    }
}
