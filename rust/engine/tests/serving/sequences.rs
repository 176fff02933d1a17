//! Going on from sequences: the same tokens as from a prompt, over shared blocks.

use std::time::Duration;

use engine::{
    Completion, Continuation, Engine, EngineConfig, EngineError, GenerationRequest, Message, OutputEvent, Prompt, SamplingParams,
    Sequence,
};

use crate::common::serving::{exact, greedy, pool_of, prompt, request, run, start, stats, tokens};

fn kept(mut request: GenerationRequest) -> GenerationRequest {
    request.service.keep = true;
    request
}

fn ask(engine: &Engine, request: GenerationRequest) -> (Completion, Sequence) {
    let mut completion = engine.submit(kept(request)).unwrap().wait().unwrap();
    let sequence = completion.choices[0].sequence.take().expect("a sequence was asked for");
    (completion, sequence)
}

fn go_on(sequence: &Sequence, then: Vec<u32>, max_tokens: usize) -> GenerationRequest {
    let sampling = SamplingParams { temperature: Some(1.0), seed: Some(5), ..greedy(max_tokens) };
    GenerationRequest::new(Prompt::Sequence { sequence: sequence.clone(), then: Continuation::TokenIds(then) }, sampling)
}

#[test]
fn going_on_gives_what_the_same_tokens_give_as_a_prompt() {
    for model in ["llama", "mistral-window", "gemma3", "qwen3.gguf", "phi3-longrope"] {
        let alone = start(model, &EngineConfig { prefix_caching: false, ..exact() });
        let configs = [
            ("with all", exact()),
            ("without prefix cache", EngineConfig { prefix_caching: false, ..exact() }),
            ("blocks of 8", EngineConfig { paged_attention: pool_of(4000, 8), ..exact() }),
            ("without KV cache", EngineConfig { no_kv_cache: true, ..exact() }),
            ("whole contexts reserved", EngineConfig { no_paged_attn: true, ..exact() }),
        ];
        for (way, config) in configs {
            let engine = start(model, &config);
            let (_, first) = ask(&engine, request(3, 37, 20));
            assert_eq!((first.token_ids().len(), first.num_prompt_tokens()), (57, 37));
            for then in [vec![], prompt(8, 11)] {
                let given = [first.token_ids(), &then].concat();
                let plain = GenerationRequest { prompt: Prompt::TokenIds(given.clone()), ..go_on(&first, vec![], 20) };
                let (completion, second) = ask(&engine, go_on(&first, then.clone(), 20));
                assert_eq!(tokens(&completion), run(&alone, plain), "{model}, {way}, {} tokens more", then.len());
                assert_eq!(second.token_ids(), [given, tokens(&completion)].concat());
                assert_eq!(second.num_prompt_tokens(), 37);
            }
        }
    }
}

#[test]
fn a_prompt_that_goes_on_from_a_sequence_can_be_scored() {
    let engine = start("llama", &exact());
    let (_, sequence) = ask(&engine, request(3, 37, 20));
    let scored = GenerationRequest { echo_prompt: true, ..go_on(&sequence, vec![], 3) };
    let plain = GenerationRequest { prompt: Prompt::TokenIds(sequence.token_ids().to_vec()), ..scored.clone() };
    let logprobs = |request| {
        let completion = engine.submit(request).unwrap().wait().unwrap();
        completion.choices[0].logprobs.iter().flatten().map(|l| (l.token_id, l.logprob)).collect::<Vec<_>>()
    };
    let got = logprobs(scored);
    assert_eq!(got.len(), 57 + 3);
    assert_eq!(got, logprobs(plain));
}

#[test]
fn a_sequence_at_rest_keeps_its_blocks_and_gives_them_back_when_dropped() {
    let engine = start("llama", &exact());
    let (_, sequence) = ask(&engine, request(1, 60, 10));
    let rest = stats(&engine);
    // 69 tokens have KV: the last one was not computed.
    assert_eq!((rest.requests_kept, rest.blocks_kept, rest.blocks_used), (1, 3, 3));
    let fork = sequence.clone();
    let (completion, second) = ask(&engine, go_on(&fork, vec![], 40));
    assert_eq!(completion.usage.cached_tokens, 69, "only the last token is computed");
    let both = stats(&engine);
    assert_eq!((both.requests_kept, both.blocks_shared, both.blocks_used), (2, 2, 3 + 2), "{both:?}");
    drop(sequence);
    assert_eq!(stats(&engine).requests_kept, 2, "a fork of it is there");
    drop((fork, second));
    let end = stats(&engine);
    assert_eq!((end.requests_kept, end.blocks_kept, end.blocks_used), (0, 0, 0));
}

#[test]
fn kept_blocks_are_there_for_whoever_needs_them_and_the_sequence_goes_on() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(128, 8), ..exact() });
    let (_, sequence) = ask(&engine, request(1, 60, 20));
    let expected = run(&engine, go_on(&sequence, vec![], 20));
    // As large as the pool.
    assert_eq!(run(&engine, request(2, 100, 28)).len(), 28);
    let taken = stats(&engine);
    assert_eq!((taken.requests_kept, taken.blocks_kept), (1, 0));
    assert_eq!(run(&engine, go_on(&sequence, vec![], 20)), expected);
}

#[test]
fn what_is_cut_off_a_sequence_is_no_part_of_its_prompt() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(128, 8), ..exact() });
    let (_, sequence) = ask(&engine, request(1, 60, 20));
    let (completion, cut) = ask(&engine, GenerationRequest { truncate_sequence: true, ..go_on(&sequence, vec![], 100) });
    let kept = completion.usage.prompt_tokens;
    assert!(kept < 60);
    assert_eq!((cut.num_prompt_tokens(), cut.token_ids().len()), (kept, kept + 100));
    assert_eq!(cut.token_ids()[..kept], sequence.token_ids()[80 - kept..]);
}

#[test]
fn a_deadline_beyond_all_clocks_never_comes() {
    let engine = start("llama", &exact());
    let mut patient = request(1, 10, 3);
    patient.service.deadline = Some(Duration::MAX);
    assert_eq!(run(&engine, patient), run(&engine, request(1, 10, 3)));
}

#[test]
fn a_running_choice_can_be_gone_on_from() {
    let engine = start("llama", &exact());
    let stream = engine.submit(GenerationRequest { n_choices: 2, ..request(4, 40, 300) }).unwrap();
    let mut collector = stream.collector();
    assert!(collector.push(stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time")).is_none());
    engine.pause().unwrap();
    let branch = stream.sequence(1).unwrap();
    assert!(stats(&engine).paused);
    engine.resume().unwrap();
    assert!((41..340).contains(&branch.token_ids().len()));
    let whole = loop {
        let event = stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time");
        if let Some(whole) = collector.push(event) {
            break whole;
        }
    };
    let told: Vec<u32> = whole.choices[1].logprobs.iter().flatten().map(|l| l.token_id).collect();
    assert_eq!(branch.token_ids(), [&prompt(4, 40), &told[..branch.token_ids().len() - 40]].concat());
    // Greedy, it comes to what the choice itself came to.
    let rest = GenerationRequest::new(
        Prompt::Sequence { sequence: branch.clone(), then: Continuation::TokenIds(Vec::new()) },
        greedy(340 - branch.token_ids().len()),
    );
    assert_eq!(run(&engine, rest), told[branch.token_ids().len() - 40..]);
}

#[test]
fn a_choice_that_does_not_run_has_no_sequence_to_ask_for() {
    let engine = start("llama", &exact());
    let stream = engine.submit(request(4, 40, 1)).unwrap();
    while !matches!(stream.next_timeout(Duration::from_secs(20)).unwrap(), Some(OutputEvent::Done(_))) {}
    for choice in [0, 1] {
        let error = stream.sequence(choice).unwrap_err();
        assert!(matches!(&error, EngineError::InvalidArgument(m) if m.contains(&format!("choice {choice}"))), "{error}");
    }
}

#[test]
fn messages_go_on_from_a_chat_and_find_its_blocks() {
    let engine = start("llama", &exact());
    let sampling = SamplingParams { logprobs: None, ..greedy(12) };
    let (_, sequence) = ask(&engine, GenerationRequest::chat(vec![Message::user("What is a block table?")], sampling.clone()));
    let answer = Message { role: "assistant".into(), ..Message::user(sequence.text()) };
    let next = || Message::user("And a slot?");
    let then = Continuation::Messages(vec![next()]);
    let going_on = GenerationRequest::new(Prompt::Sequence { sequence: sequence.clone(), then }, sampling.clone());
    let (completion, _) = ask(&engine, going_on);
    let conversation = vec![Message::user("What is a block table?"), answer, next()];
    let plain = engine.submit(GenerationRequest::chat(conversation, sampling.clone())).unwrap().wait().unwrap();
    assert_eq!(completion.choices[0].text, plain.choices[0].text);
    assert_eq!(completion.usage.prompt_tokens, plain.usage.prompt_tokens);
    assert!(completion.usage.cached_tokens > sequence.num_prompt_tokens() / 2, "{:?}", completion.usage);

    let (_, text) = ask(&engine, request(1, 20, 4));
    let then = Continuation::Messages(vec![next()]);
    let refused = engine.submit(GenerationRequest::new(Prompt::Sequence { sequence: text, then }, sampling.clone()));
    assert!(matches!(refused, Err(EngineError::InvalidArgument(m)) if m.contains("began as a chat")));
    let other = start("llama", &exact());
    let refused = other.submit(go_on(&sequence, vec![], 4));
    assert!(matches!(refused, Err(EngineError::InvalidArgument(m)) if m.contains("another engine")));
}

#[test]
fn a_paused_engine_waits_and_a_drained_one_refuses_until_it_is_resumed() {
    let engine = start("llama", &exact());
    let expected = run(&engine, request(1, 30, 20));
    engine.pause().unwrap();
    let stream = engine.submit(request(1, 30, 20)).unwrap();
    assert!(stream.next_timeout(Duration::from_millis(100)).unwrap().is_none());
    let paused = stats(&engine);
    assert!(paused.paused && paused.requests_waiting == 1, "{paused:?}");
    let mut late = request(2, 30, 20);
    late.service.deadline = Some(Duration::from_millis(1));
    let late = engine.submit(late).unwrap().wait().unwrap();
    assert_eq!(late.choices[0].finish_reason, engine::FinishReason::Timeout, "deadlines pass in a pause");
    // Draining ends the pause, and serves what was accepted: its choices too.
    let choices = engine.submit(GenerationRequest { n_choices: 3, ..request(1, 30, 20) }).unwrap();
    let drain = engine.drain().unwrap();
    let Err(EngineError::Draining(message)) = engine.submit(request(1, 8, 1)).map(|_| ()) else { panic!("it was taken") };
    assert!(message.contains("resume"), "{message}");
    assert!(drain.wait_timeout(Duration::from_secs(20)).unwrap());
    assert_eq!(tokens(&stream.wait().unwrap()), expected);
    let choices = choices.wait().unwrap().choices;
    assert!(choices.iter().all(|choice| choice.logprobs.as_ref().unwrap().len() == 20 && choice.error.is_none()));
    assert!(stats(&engine).draining);
    engine.resume().unwrap();
    assert_eq!(run(&engine, request(1, 30, 20)), expected);
}

#[test]
fn salts_part_caches_and_a_public_prefix_is_shared() {
    let engine = start("llama", &exact());
    let ask = |salt: Option<&str>, public_prefix| {
        let mut request = request(1, 100, 4);
        request.service.cache_salt = salt.map(str::to_owned);
        request.service.public_prefix = public_prefix;
        let usage = engine.submit(request).unwrap().wait().unwrap().usage;
        (usage.cached_tokens, usage.cache_miss.map(engine::MissReason::name))
    };
    assert_eq!(ask(None, 0), (0, Some("cold")));
    assert_eq!(ask(Some("a"), 0), (0, Some("salt")));
    assert_eq!(ask(Some("a"), 0), (99, None));
    assert_eq!(ask(Some("b"), 64), (64, Some("salt")));
    assert_eq!(ask(Some("b"), 64), (99, None));
    let refuse = |change: fn(&mut engine::ServiceParams)| {
        let mut request = request(1, 10, 1);
        change(&mut request.service);
        match engine.submit(request) {
            Err(EngineError::InvalidArgument(message)) => message,
            _ => panic!("it was taken"),
        }
    };
    assert!(refuse(|service| service.public_prefix = 4).contains("cache_salt"));
    assert!(refuse(|service| service.cache_salt = Some(String::new())).contains("cache_salt is empty"));
    assert!(refuse(|service| service.deadline = Some(Duration::ZERO)).contains("deadline is 0ns"));
    let too_long = refuse(|service| (service.public_prefix, service.cache_salt) = (11, Some("a".into())));
    assert!(too_long.contains("public_prefix_len is 11") && too_long.contains("10 tokens"), "{too_long}");
}
