//! The engine as a caller sees it: exactness whatever runs beside a request, and a clean pool whatever ends it.

use std::{thread, time::Duration};

use engine::{
    Engine, EngineConfig, EngineError, FinishReason, GenerationRequest, MemoryGpuConfig, Message, MissReason, OutputEvent,
    PagedAttentionConfig, Prompt, RenderOptions, SamplingParams, TokenLogprobs,
};

use crate::common::{
    self, golden_dir, hugging_face,
    serving::{exact, greedy, pool_of, prompt, request, run, run_together, start, stats, tokens},
};

const LENGTHS: [usize; 8] = [1, 5, 31, 32, 33, 64, 90, 120];

fn requests() -> Vec<GenerationRequest> {
    (0..32).map(|i| request(i, LENGTHS[i % LENGTHS.len()], 40)).collect()
}

/// What each request gives when nothing runs beside it and nothing is cached.
fn alone(model: &str) -> Vec<Vec<u32>> {
    let engine = start(model, &EngineConfig { prefix_caching: false, ..exact() });
    requests().into_iter().map(|r| run(&engine, r)).collect()
}

fn assert_same_in_every_way(model: &str) {
    let expected = alone(model);
    assert!(expected.iter().all(|t| t.len() == 40));
    let configs = [
        ("batch of 32", exact()),
        ("chunks of one token", EngineConfig { max_num_batched_tokens: 1, ..exact() }),
        ("chunks of a block and one", EngineConfig { max_num_batched_tokens: 33, ..exact() }),
        ("blocks of 8", EngineConfig { paged_attention: pool_of(20_000, 8), ..exact() }),
        ("blocks of 16", EngineConfig { paged_attention: pool_of(20_000, 16), ..exact() }),
        ("whole context reserved", EngineConfig { no_paged_attn: true, ..exact() }),
        ("one thread", {
            let mut config = exact();
            config.cpu.num_threads = Some(1);
            config
        }),
    ];
    for (way, config) in configs {
        let engine = start(model, &config);
        let first = run_together(&engine, requests());
        let again = run_together(&engine, requests());
        for (i, want) in expected.iter().enumerate() {
            assert_eq!(want, &first[i], "{model}, {way}: request {i}");
            assert_eq!(want, &again[i], "{model}, {way}, after the same requests: request {i}");
        }
        assert_eq!(stats(&engine).blocks_used, 0, "{model}, {way}");
    }
}

#[test]
fn llama_gives_the_same_tokens_in_every_way() {
    assert_same_in_every_way("llama");
}

#[test]
fn a_windowed_model_gives_the_same_tokens_in_every_way() {
    assert_same_in_every_way("mistral-window");
}

#[test]
fn a_model_with_two_kinds_of_layers_gives_the_same_tokens_in_every_way() {
    assert_same_in_every_way("gemma3");
}

#[test]
fn a_gguf_file_gives_the_same_tokens_in_every_way() {
    assert_same_in_every_way("qwen3.gguf");
}

#[test]
fn blocks_out_of_the_window_are_given_back_while_a_request_runs() {
    // The window is 24 tokens: four blocks of 8 at most are seen from a position, and one more is written.
    let engine = start("mistral-window", &EngineConfig { paged_attention: pool_of(512, 8), ..exact() });
    let stream = engine.submit(request(1, 30, 300)).unwrap();
    let mut most = 0;
    let mut num_tokens = 0;
    while let Some(event) = stream.next_timeout(Duration::from_secs(20)).unwrap() {
        match event {
            OutputEvent::Delta { logprobs, .. } => num_tokens += logprobs.len(),
            OutputEvent::Finished { .. } => {}
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => panic!("nobody asked for it"),
            OutputEvent::Done(_) => break,
        }
        if num_tokens > 1 {
            most = most.max(stats(&engine).blocks_used);
        }
    }
    assert_eq!(num_tokens, 300);
    assert!((1..=5).contains(&most), "{most} blocks were used at once; the whole sequence has 41");
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn preemption_does_not_change_tokens() {
    let expected = alone("llama");
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(256, 8), ..exact() });
    let got = run_together(&engine, requests());
    let stats = stats(&engine);
    assert!(stats.preemptions > 0, "the pool was not tight: {stats:?}");
    assert_eq!(expected, got);
    assert_eq!(stats.blocks_used, 0);
}

#[test]
fn without_kv_cache_the_tokens_are_the_same() {
    let expected = alone("llama");
    let engine = start("llama", &EngineConfig { no_kv_cache: true, ..exact() });
    assert_eq!(expected[..4], run_together(&engine, requests().into_iter().take(4).collect()));
    let stats = stats(&engine);
    assert_eq!((stats.blocks_used, stats.blocks_cached), (0, 0));
}

#[test]
fn a_repeated_prompt_is_found_in_the_cache_and_reported() {
    let engine = start("llama", &exact());
    let ask = || engine.submit(request(3, 100, 4)).unwrap().wait().unwrap();
    let cold = ask().usage;
    assert_eq!((cold.cached_tokens, cold.cache_miss), (0, Some(MissReason::Cold)));
    let warm = ask().usage;
    assert_eq!((warm.cached_tokens, warm.cache_miss), (99, None), "all but the token whose logits are wanted");
    let stats = stats(&engine);
    assert_eq!((stats.prefix_queried_tokens, stats.prefix_hit_tokens), (200, 99));
}

#[test]
fn sixty_four_threads_at_once_finish() {
    let engine = start("llama", &exact());
    let lengths: Vec<usize> = thread::scope(|scope| {
        let handles: Vec<_> = (0..64)
            .map(|i| {
                scope.spawn({
                    let engine = &engine;
                    move || run(engine, request(i, 20 + i, 16)).len()
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    assert_eq!(lengths, vec![16; 64]);
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn dropping_a_stream_frees_its_blocks_in_every_state() {
    let engine = start("llama", &EngineConfig { max_num_seqs: 4, ..exact() });
    let streams: Vec<_> = (0..12).map(|i| engine.submit(request(i, 30, 300)).unwrap()).collect();
    // Four run, eight wait.
    let _ = streams[0].next_timeout(Duration::from_secs(20)).unwrap();
    drop(streams);
    let stats = stats(&engine);
    assert_eq!((stats.blocks_used, stats.requests_running, stats.requests_waiting), (0, 0, 0));
    assert_eq!(stats.blocks_free, stats.blocks_total);
    assert_eq!(run(&engine, request(1, 30, 5)).len(), 5);
}

#[test]
fn a_request_that_alone_outgrows_the_pool_ends_with_length_and_its_text() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(64, 8), ..exact() });
    let completion = engine.submit(request(1, 40, 400)).unwrap().wait().unwrap();
    assert_eq!(completion.choices[0].finish_reason, FinishReason::Length);
    // 64 tokens have slots; the token after them was sampled from the last slot's logits.
    assert_eq!(tokens(&completion).len(), 64 - 40 + 1);
    assert!(!completion.choices[0].text.is_empty());
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn prompts_that_cannot_be_served_are_refused_with_the_numbers() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(64, 8), ..exact() });
    let refuse = |request| match engine.submit(request) {
        Err(EngineError::InvalidArgument(message) | EngineError::PromptTooLong { message, .. }) => message,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("the request was taken"),
    };
    let message = refuse(request(1, 65, 1));
    assert!(message.contains("65 tokens") && message.contains("64") && message.contains("8 blocks"), "{message}");
    assert_eq!(engine.max_sequence_length(), 64, "what the pool holds");
    let longest = engine.submit(request(1, 63, 1)).unwrap().wait().unwrap();
    assert_eq!(longest.usage.prompt_tokens + longest.usage.completion_tokens, 64);
    let context = engine.context_length();
    let message = refuse(request(1, context, 1));
    assert!(message.contains(&(context - 1).to_string()), "{message}");
    assert!(refuse(request(1, 0, 1)).contains("empty"));
    assert!(refuse(GenerationRequest::new(Prompt::TokenIds(vec![99_999]), greedy(1))).contains("99999"));
    assert!(refuse(request(1, 8, 0)).contains("max_tokens"));
    assert!(refuse(GenerationRequest { n_choices: 0, ..request(1, 8, 1) }).contains("choices"));
    assert!(refuse(GenerationRequest { n_choices: 3, best_of: Some(2), ..request(1, 8, 1) }).contains("best_of"));
    let long = GenerationRequest { truncate_sequence: true, ..request(1, 100, 4) };
    let completion = engine.submit(long).unwrap().wait().unwrap();
    assert_eq!((completion.usage.prompt_tokens, completion.usage.completion_tokens), (61, 4), "all four tokens have room");
}

#[test]
fn log_probabilities_that_memory_should_not_hold_are_refused() {
    let engine = start("llama", &exact());
    let asking = |logprobs, n_choices, echo_prompt| {
        let mut request = request(0, 120, 40);
        request.sampling.logprobs = Some(logprobs);
        (request.n_choices, request.echo_prompt) = (n_choices, echo_prompt);
        engine.submit(request)
    };
    for (logprobs, n_choices, echo) in [(64, 1000, false), (64, 200, true)] {
        let error = asking(logprobs, n_choices, echo).map(drop).unwrap_err().to_string();
        assert!(error.contains("1048576 log probabilities"), "{error}");
    }
    let error = asking(1 << 20, 1, false).map(drop).unwrap_err().to_string();
    assert!(error.contains("top_logprobs") && error.contains("vocabulary"), "{error}");
    for (logprobs, n_choices, echo) in [(20, 1000, true), (64, 1, true)] {
        drop(asking(logprobs, n_choices, echo).unwrap());
    }
}

/// A copy of the llama model whose tokenizer has one token more than the model has embeddings.
fn llama_with_a_token_too_many() -> (tempfile::TempDir, u32) {
    let dir = tempfile::tempdir().unwrap();
    let golden = golden_dir().join("text/llama");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden.join(file), dir.path().join(file)).unwrap();
    }
    let read =
        |file: &str| -> serde_json::Value { serde_json::from_slice(&std::fs::read(dir.path().join(file)).unwrap()).unwrap() };
    let vocab_size = read("config.json")["vocab_size"].as_u64().unwrap() as u32;
    let mut tokenizer = read("tokenizer.json");
    // New tokens get the ids after the vocabulary's.
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    for i in vocab.len() as u32..vocab_size {
        vocab.insert(format!("unused {i}"), i.into());
    }
    tokenizer["added_tokens"].as_array_mut().unwrap().push(serde_json::json!({
        "id": vocab_size, "content": "<soft token>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true
    }));
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    (dir, vocab_size)
}

#[test]
fn a_token_without_an_embedding_is_refused_in_every_prompt_and_harms_nobody_else() {
    let (dir, id) = llama_with_a_token_too_many();
    let source = engine::ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
    let engine = Engine::load(
        &source,
        &EngineConfig { chat_template: Some("{{ messages[0].content }}<soft token>".into()), ..exact() },
        &|_| {},
    );
    let engine = engine.unwrap();
    let other = engine.submit(request(1, 30, 60)).unwrap();
    let _ = other.next_timeout(Duration::from_secs(20)).unwrap();
    let text = "Look at <soft token>".to_owned();
    let prompts = [
        Prompt::Text(text.clone()),
        Prompt::TokenIds(vec![5, id]),
        Prompt::Chat { messages: vec![Message::user(text)], options: RenderOptions::default() },
    ];
    for prompt in prompts {
        let what = format!("{prompt:?}");
        match engine.submit(GenerationRequest::new(prompt, greedy(4))) {
            Err(EngineError::InvalidArgument(message)) => {
                assert!(message.contains(&format!("token id {id} (\"<soft token>\")")), "{what}: {message}");
            }
            Err(other) => panic!("{what}: another error: {other}"),
            Ok(_) => panic!("{what} was taken"),
        }
    }
    assert_eq!(other.wait().unwrap().choices[0].finish_reason, FinishReason::Length);
}

#[test]
fn a_special_token_in_a_message_stays_text_and_one_of_the_template_does_not() {
    let (dir, id) = llama_with_a_token_too_many();
    let source = engine::ModelSource::HuggingFace { path: dir.path().to_owned(), tokenizer_json: None };
    let chat_template = Some("<soft token>{{ messages[0].content }}".into());
    let engine = Engine::load(&source, &EngineConfig { chat_template, ..exact() }, &|_| {}).unwrap();
    let render = |text: &str| engine.render_chat(&[Message::user(text)], &RenderOptions::default()).unwrap();
    let count = |ids: &[u32]| ids.iter().filter(|other| **other == id).count();
    let (text, ids) = render("Look at <soft token> here");
    assert_eq!(text, "<soft token>Look at <soft token> here");
    assert_eq!(count(&ids), 1);
    let (_, plain) = render("Look here");
    assert_eq!(count(&plain), 1);
    assert!(engine.detokenize_text(&ids, true).unwrap().contains("Look at <soft token> here"));
}

#[test]
fn an_echo_has_what_was_kept_of_a_prompt_that_was_cut() {
    let engine = start("llama", &EngineConfig { paged_attention: pool_of(64, 8), ..exact() });
    let text = "one two three four five six seven eight nine ten ".repeat(12);
    let ids = engine.tokenize_text(&text, true).unwrap();
    assert!(ids.len() > 64);
    let sampling = SamplingParams { logprobs: None, ..greedy(5) };
    let request = GenerationRequest {
        echo_prompt: true,
        truncate_sequence: true,
        ..GenerationRequest::new(Prompt::Text(text.clone()), sampling)
    };
    let completion = engine.submit(request).unwrap().wait().unwrap();
    assert_eq!(completion.usage.prompt_tokens, 60);
    let kept = engine.detokenize_text(&ids[ids.len() - 60..], false).unwrap();
    assert!(completion.choices[0].text.starts_with(&kept), "{:?} does not begin with {kept:?}", completion.choices[0].text);
    assert!(kept.len() < text.len());
}

#[test]
fn a_seed_gives_the_same_text_whatever_runs_beside_it() {
    let engine = start("llama", &exact());
    let sampling = SamplingParams { temperature: Some(1.0), seed: Some(7), ..greedy(30) };
    let seeded = || GenerationRequest::new(Prompt::TokenIds(prompt(5, 40)), sampling.clone());
    let first = run(&engine, seeded());
    let mut requests: Vec<_> = (0..9).map(|i| request(i, 25, 30)).collect();
    requests.push(seeded());
    assert_eq!(first, run_together(&engine, requests)[9]);
    let other = SamplingParams { seed: Some(8), ..sampling };
    assert_ne!(first, run(&engine, GenerationRequest::new(Prompt::TokenIds(prompt(5, 40)), other)));
}

#[test]
fn an_echoed_prompt_has_the_log_probabilities_of_the_reference() {
    let golden: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(golden_dir().join("text/llama/golden.json")).unwrap()).unwrap();
    for chunk in [4096, 7] {
        let engine = start("llama", &EngineConfig { max_num_batched_tokens: chunk, ..exact() });
        for case in golden["completions"].as_array().unwrap() {
            let numbers = |key: &str| case[key].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect::<Vec<_>>();
            let ids: Vec<u32> = numbers("prompt_ids").into_iter().map(|v| v as u32).collect();
            let request =
                GenerationRequest { echo_prompt: true, ..GenerationRequest::new(Prompt::TokenIds(ids.clone()), greedy(1)) };
            let completion = engine.submit(request).unwrap().wait().unwrap();
            let logprobs = completion.choices[0].logprobs.clone().unwrap();
            assert_eq!(logprobs.len(), ids.len() + 1);
            assert_eq!(logprobs[0].logprob, None);
            for (i, want) in numbers("prompt_logprobs").into_iter().enumerate() {
                let got = logprobs[i + 1].logprob.unwrap();
                assert_eq!(logprobs[i + 1].token_id, ids[i + 1]);
                assert!((f64::from(got) - want).abs() < 2e-3, "token {i}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let engine = start("llama", &exact());
    let chat = |stop: Vec<String>| {
        let sampling = SamplingParams { stop, ..greedy(60) };
        engine.submit(GenerationRequest::chat(vec![Message::user("Hello")], sampling)).unwrap().wait().unwrap()
    };
    let whole = chat(Vec::new()).choices[0].text.clone();
    let characters: Vec<char> = whole.chars().collect();
    let stop: String = characters[characters.len() / 2..characters.len() / 2 + 3].iter().collect();
    let stopped = chat(vec![stop.clone()]);
    let choice = &stopped.choices[0];
    assert_eq!(choice.text, whole[..whole.find(&stop).unwrap()]);
    assert_eq!((choice.finish_reason, choice.stop_sequence.as_deref()), (FinishReason::Stop, Some(stop.as_str())));
}

#[test]
fn the_events_of_a_stream_add_up_to_the_answer() {
    let engine = start("llama", &exact());
    let want = engine.submit(request(4, 30, 20)).unwrap().wait().unwrap();
    let stream = engine.submit(request(4, 30, 20)).unwrap();
    let mut text = String::new();
    let mut deltas = 0;
    loop {
        match stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time") {
            OutputEvent::Delta { text: delta, .. } => {
                text.push_str(&delta);
                deltas += 1;
            }
            OutputEvent::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => panic!("nobody asked for it"),
            OutputEvent::Done(usage) => {
                assert_eq!((usage.prompt_tokens, usage.completion_tokens), (30, 20));
                break;
            }
        }
    }
    assert_eq!(text, want.choices[0].text);
    assert!(deltas >= 20);
}

#[test]
fn an_answer_that_is_not_streamed_comes_as_one_delta() {
    let engine = start("llama", &exact());
    let want = engine.submit(request(4, 30, 20)).unwrap().wait().unwrap().choices.remove(0);
    let stream = engine.submit(GenerationRequest { stream: false, ..request(4, 30, 20) }).unwrap();
    let next = || stream.next_timeout(Duration::from_secs(20)).unwrap().expect("an event in time");
    let OutputEvent::Delta { index: 0, text, logprobs, .. } = next() else { panic!("no delta") };
    let ids = |logprobs: &[TokenLogprobs]| logprobs.iter().map(|token| token.token_id).collect::<Vec<_>>();
    assert_eq!((&text, ids(&logprobs)), (&want.text, ids(want.logprobs.as_ref().unwrap())));
    assert!(matches!(next(), OutputEvent::Finished { index: 0, reason: FinishReason::Length, .. }));
    assert!(matches!(next(), OutputEvent::Done(usage) if usage.completion_tokens == 20));
}

#[test]
fn a_template_has_bos_when_a_gguf_file_comes_with_a_tokenizer_json() {
    let engine::ModelSource::Gguf { files, .. } = common::gguf("llama") else { panic!("a GGUF source") };
    let tokenizer_json = Some(golden_dir().join("text/llama/tokenizer.json"));
    let source = engine::ModelSource::Gguf { files, tokenizer_dir: None, tokenizer_json };
    let config = EngineConfig { chat_template: Some("{{ bos_token }}{{ messages[0].content }}".into()), ..exact() };
    let engine = Engine::load(&source, &config, &|_| {}).unwrap();
    let ids = engine.tokenize_chat(&[Message::user("Hello")], &RenderOptions::default()).unwrap();
    assert_eq!((ids[0], &ids[1..]), (1, &engine.tokenize_text("Hello", false).unwrap()[..]));
}

#[test]
fn configurations_that_cannot_be_honoured_are_refused() {
    let refuse = |config: EngineConfig| match Engine::load(&hugging_face("llama"), &config, &|_| {}) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("the configuration was taken"),
    };
    assert!(refuse(EngineConfig { max_num_seqs: 0, ..exact() }).contains("max_num_seqs is 0"));
    for huge in [1 << 45, usize::MAX] {
        assert!(refuse(EngineConfig { max_num_seqs: huge, ..exact() }).contains("max_num_seqs"));
        assert!(refuse(EngineConfig { max_num_batched_tokens: huge, ..exact() }).contains("max_num_batched_tokens"));
    }
    for num_threads in [0, 100_000] {
        let mut config = exact();
        config.cpu.num_threads = Some(num_threads);
        assert!(refuse(config).contains(&format!("num_threads is {num_threads}")));
    }
    assert!(
        refuse(EngineConfig { paged_attention: pool_of(64, 7), ..exact() }).contains("Block size must be in [8, 16, 32], got 7")
    );
    let huge = PagedAttentionConfig { mem_gpu: Some(MemoryGpuConfig::MbAmount(1 << 40)), ..PagedAttentionConfig::default() };
    assert!(refuse(EngineConfig { paged_attention: huge, ..exact() }).contains("bytes"));
    let wrong = EngineConfig { architecture: Some("qwen2".into()), ..exact() };
    assert!(refuse(wrong).contains("llama"));
    let mut isa = exact();
    isa.cpu.isa = Some("mmx".into());
    assert!(refuse(isa).contains("mmx"));
}
