//! What a request may ask of its answer beside the tokens themselves: a least length, words that do not come, special tokens in
//! the text, ids, and log probabilities of the prompt.

use engine::{Completion, Engine, EngineConfig, FinishReason, GenerationRequest, KeptPrompt, Message, Prompt, SamplingParams};

use crate::common::serving::{exact, greedy, pool_of, prompt, request, run, start, tokens};

fn ask(engine: &Engine, request: GenerationRequest) -> Completion {
    engine.submit(request).unwrap().wait().unwrap()
}

/// Of a prompt whose greedy answer is known: its first tokens, all different.
fn known(engine: &Engine) -> (GenerationRequest, Vec<u32>) {
    (0..40)
        .map(|i| (request(i, 20, 12), run(engine, request(i, 20, 12))))
        .find(|(_, answer)| (1..4).all(|i| !answer[..i].contains(&answer[i])))
        .expect("a prompt whose answer begins with four different tokens")
}

fn with(request: &GenerationRequest, change: impl FnOnce(&mut SamplingParams)) -> GenerationRequest {
    let mut request = request.clone();
    change(&mut request.sampling);
    request
}

#[test]
fn nothing_ends_an_answer_before_its_least_number_of_tokens() {
    let engine = start("llama", &exact());
    let (plain, answer) = known(&engine);
    let end = answer[2];
    let stopped = ask(&engine, with(&plain, |params| params.stop_token_ids = vec![end]));
    assert_eq!((tokens(&stopped), stopped.choices[0].finish_reason), (answer[..3].to_vec(), FinishReason::Stop));
    for (temperature, n_choices) in [(0.0, 1), (0.0, 2), (1.0, 3)] {
        let request = with(&plain, |params| {
            (params.stop_token_ids, params.min_tokens) = (vec![end], 6);
            (params.temperature, params.seed) = (Some(temperature), Some(1));
        });
        let completion = ask(&engine, GenerationRequest { n_choices, ..request });
        for choice in completion.choices {
            let ids: Vec<_> = choice.logprobs.unwrap().iter().map(|token| token.token_id).collect();
            assert!(ids.len() > 6 && !ids[..6].contains(&end), "{ids:?}");
        }
    }
    // As greedy goes without the token that ends the text.
    let banned = with(&plain, |params| params.logit_bias = vec![(end, -100.0)]);
    let least = with(&plain, |params| (params.stop_token_ids, params.min_tokens) = (vec![end], 6));
    assert_eq!(run(&engine, banned)[..6], run(&engine, least)[..6]);
}

#[test]
fn a_stop_string_before_the_least_number_of_tokens_is_text() {
    let engine = start("llama", &exact());
    let (plain, _) = known(&engine);
    let text = |sampling: SamplingParams| ask(&engine, GenerationRequest { sampling, ..plain.clone() }).choices.remove(0);
    let whole = text(plain.sampling.clone()).text;
    let first: String = whole.chars().take(1).collect();
    let stop = vec![first];
    assert_eq!(text(SamplingParams { stop: stop.clone(), ..plain.sampling.clone() }).text, "");
    let kept = text(SamplingParams { stop, min_tokens: 12, ..plain.sampling.clone() });
    assert_eq!((kept.text, kept.finish_reason), (whole, FinishReason::Length));
}

#[test]
fn a_least_number_of_tokens_needs_one_that_may_come() {
    let engine = start("llama", &exact());
    let only = SamplingParams { allowed_token_ids: Some(vec![7]), stop_token_ids: vec![7], min_tokens: 2, ..greedy(4) };
    let Err(error) = engine.submit(GenerationRequest::new(Prompt::TokenIds(prompt(1, 5)), only)) else { panic!("accepted") };
    assert!(error.to_string().starts_with("min_tokens is 2, and all tokens"), "{error}");
}

#[test]
fn bad_words_do_not_come() {
    let engine = start("llama", &exact());
    let tokenizer = engine.tokenizer();
    // Words of one token, and of several, that the answer has.
    let spelled = |i: usize| {
        let answer = run(&engine, request(i, 20, 12));
        let words = (0..10).flat_map(|at| [1, 2, 3].map(|len| answer[at..at + len].to_vec()));
        let found = words.filter(|ids| {
            let text = tokenizer.decode(ids, false);
            !text.starts_with(char::is_whitespace) && !text.contains(char::REPLACEMENT_CHARACTER) && {
                let again = tokenizer.encode(&text, false).unwrap();
                again == *ids
            }
        });
        (i, answer.clone(), found.collect::<Vec<_>>())
    };
    let mut lengths = [0; 4];
    for (i, answer, words) in (0..30).map(spelled) {
        for ids in words {
            let word = tokenizer.decode(&ids, false);
            let ids_of = tokens(&ask(&engine, with(&request(i, 20, 12), |params| params.bad_words = vec![word.clone()])));
            assert!(!ids_of.windows(ids.len()).any(|window| window == ids), "{word:?} came in {ids_of:?}");
            let first = answer.windows(ids.len()).position(|window| window == ids).unwrap();
            assert_eq!(ids_of[..first + ids.len() - 1], answer[..first + ids.len() - 1], "only its last token is another");
            lengths[ids.len()] += 1;
        }
    }
    assert!(lengths[1] > 0 && lengths[2] > 0, "{lengths:?}");
    let blank = with(&request(1, 5, 4), |params| params.bad_words = vec!["x".into(), " ".into()]);
    assert!(engine.submit(blank).err().unwrap().to_string().contains("bad_words[1] is blank"));
}

#[test]
fn special_tokens_are_text_when_asked_for() {
    let engine = start("llama", &exact());
    let tokenizer = engine.tokenizer();
    let special = (0..512).find(|id| tokenizer.is_special(*id) && !tokenizer.token_bytes(*id).is_empty()).unwrap();
    let text = |include_special_tokens| {
        let sampling = SamplingParams { allowed_token_ids: Some(vec![special]), include_special_tokens, ..greedy(3) };
        ask(&engine, GenerationRequest::chat(vec![Message::user("Hello")], sampling)).choices.remove(0).text
    };
    assert_eq!(text(false), "");
    assert_eq!(text(true), tokenizer.token_text(special).repeat(3));
}

#[test]
fn the_ids_of_the_tokens_come_with_the_text() {
    let engine = start("llama", &exact());
    for (stream, n_choices) in [(true, 1), (false, 2)] {
        let plain = GenerationRequest { stream, n_choices, ..request(3, 20, 12) };
        let handle = engine.submit(GenerationRequest { return_token_ids: true, ..plain.clone() }).unwrap();
        for choice in handle.wait().unwrap().choices {
            let ids: Vec<_> = choice.logprobs.unwrap().iter().map(|token| token.token_id).collect();
            assert_eq!((choice.token_ids, ids.len()), (ids, 12));
        }
        assert!(ask(&engine, plain).choices[0].token_ids.is_empty());
    }
}

#[test]
fn log_probabilities_of_a_prompt_come_apart_from_its_answers() {
    for chunk in [4096, 7] {
        let engine = start("llama", &EngineConfig { max_num_batched_tokens: chunk, ..exact() });
        let plain = request(2, 30, 4);
        let echoed = with(&plain, |params| params.logprobs = Some(2));
        let echoed = ask(&engine, GenerationRequest { echo_prompt: true, ..echoed }).choices.remove(0).logprobs.unwrap();
        // Twice: the prefix cache has no log probabilities.
        for n_choices in [1, 2] {
            let request = GenerationRequest { prompt_logprobs: Some(2), n_choices, ..plain.clone() };
            let completion = ask(&engine, request);
            assert_eq!(completion.prompt_logprobs.len(), 30);
            for (entry, echoed) in completion.prompt_logprobs.iter().zip(&echoed) {
                let token = &entry.token;
                assert_eq!((token.token_id, token.logprob), (echoed.token_id, echoed.logprob));
                let top = |logprobs: &[engine::TopLogprob]| logprobs.iter().map(|top| top.token_id).collect::<Vec<_>>();
                assert_eq!(top(&token.top_logprobs), top(&echoed.top_logprobs));
                if let Some(place) = top(&token.top_logprobs).iter().position(|id| *id == token.token_id) {
                    assert_eq!(entry.rank, Some(place + 1));
                } else {
                    assert!(entry.rank.is_none_or(|rank| rank > 2), "{:?}", entry.rank);
                }
            }
            assert_eq!(completion.prompt_logprobs[0].rank, None);
            assert!(completion.prompt_logprobs[1..].iter().all(|entry| entry.rank.is_some()));
            assert_eq!(tokens(&completion).len(), 4, "the answer has its own alone");
        }
    }
}

#[test]
fn a_prompt_keeps_the_end_that_is_asked_for() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(256, 8), ..exact() });
    let ids = prompt(1, 50);
    for (kept, rest) in [
        (KeptPrompt::Last(9), &ids[41..]),
        (KeptPrompt::First(9), &ids[..9]),
        (KeptPrompt::Last(50), &ids[..]),
        (KeptPrompt::First(99), &ids[..]),
    ] {
        let cut = GenerationRequest { kept_prompt: Some(kept), ..request(1, 50, 8) };
        let handle = engine.submit(cut).unwrap();
        assert_eq!(handle.prompt_token_ids(), rest);
        let whole = GenerationRequest::new(Prompt::TokenIds(rest.to_vec()), greedy(8));
        assert_eq!(tokens(&handle.wait().unwrap()), run(&engine, whole));
    }
    let none = GenerationRequest { kept_prompt: Some(KeptPrompt::Last(0)), ..request(1, 5, 8) };
    assert!(engine.submit(none).err().unwrap().to_string().contains("truncate_prompt_tokens is 0"));
}

#[test]
fn waiting_for_the_first_step_is_part_of_the_time_to_the_first_token() {
    let engine = start("llama", &EngineConfig { max_num_seqs: 1, ..exact() });
    let streams: Vec<_> = (0..3).map(|i| engine.submit(request(i, 20, 60)).unwrap()).collect();
    let usages: Vec<_> = streams.into_iter().map(|stream| stream.wait().unwrap().usage).collect();
    for usage in &usages {
        assert!(usage.total_queue_time_sec <= usage.total_prompt_time_sec, "{usage:?}");
    }
    // They run one after the other.
    assert!(usages[2].total_queue_time_sec > usages[0].total_completion_time_sec, "{usages:?}");
}

#[test]
fn tokens_wait_until_a_step_has_some_or_nobody_waits_for_them() {
    let engine = start("llama", &EngineConfig { max_num_seqs: 1, ..exact() });
    engine.pause().unwrap();
    let [first, second, third] = [10, 20, 30].map(|len| engine.submit(request(1, len, 4)).unwrap());
    assert_eq!(engine.waiting_tokens(), 60);
    drop(second);
    assert_eq!(engine.waiting_tokens(), 40);
    engine.resume().unwrap();
    for stream in [first, third] {
        stream.wait().unwrap();
    }
    assert_eq!(engine.waiting_tokens(), 0);
}
