//! Answers are what their grammars say, with the probabilities that the model gives to what may come.

use std::{collections::HashMap, sync::Arc};

use engine::{
    CompletionChoice, DraftChoice, DraftModel, Engine, EngineConfig, EngineError, FinishReason, GenerationRequest, Grammar,
    GrammarFault, Prompt, PromptLookup, Proposer, SamplingParams, Speculation,
};
use serde_json::{Value, json};

use crate::common::{
    hugging_face,
    serving::{exact, greedy, pool_of, prompt, request, run_together, start, stats, tokens},
};

fn with(grammar: Grammar, sampling: SamplingParams) -> SamplingParams {
    SamplingParams { grammar: Some(grammar), ignore_eos: false, logprobs: None, ..sampling }
}

fn sampled(seed: u64, max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: Some(1.0), seed: Some(seed), ..greedy(max_tokens) }
}

fn ask(engine: &Engine, i: usize, sampling: SamplingParams, n_choices: usize) -> Vec<CompletionChoice> {
    let request = GenerationRequest { n_choices, ..GenerationRequest::new(Prompt::TokenIds(prompt(i, 20)), sampling) };
    engine.submit(request).unwrap().wait().unwrap().choices
}

fn refused(engine: &Engine, grammar: Grammar) -> (GrammarFault, String) {
    match engine.submit(GenerationRequest { sampling: with(grammar, greedy(5)), ..request(1, 9, 5) }) {
        Err(EngineError::Grammar { fault, message }) => (fault, message),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was accepted"),
    }
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 6 },
            "kind": { "enum": ["red", "blue"] },
            "size": { "type": "integer", "minimum": -3, "maximum": 40 },
            "tags": { "type": "array", "items": { "type": "boolean" }, "maxItems": 3 },
            "next": { "anyOf": [{ "type": "null" }, { "type": "number" }] },
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": false,
    })
}

fn assert_fits_the_schema(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let map = value.as_object().unwrap();
    assert!(value["name"].as_str().unwrap().chars().count() <= 6, "{text}");
    assert!(["red", "blue"].contains(&value["kind"].as_str().unwrap()), "{text}");
    assert!((-3.0..=40.0).contains(&value["size"].as_f64().unwrap()), "{text}");
    let tags = value["tags"].as_array().unwrap();
    assert!(tags.len() <= 3 && tags.iter().all(Value::is_boolean), "{text}");
    assert!(map.get("next").is_none_or(|next| next.is_null() || next.is_number()), "{text}");
    assert!(map.keys().all(|key| ["name", "kind", "size", "tags", "next"].contains(&key.as_str())), "{text}");
}

#[test]
fn what_ends_fits_its_schema_greedy_and_sampled() {
    let engine = start("llama", &exact());
    let mut num_ended = 0;
    for seed in 0..25 {
        let of = |params: SamplingParams| ask(&engine, seed, with(Grammar::JsonSchema(schema()), params), 3);
        let params = sampled(seed as u64, 300);
        let answers = [
            of(greedy(300)),
            of(params.clone()),
            of(SamplingParams { top_k: Some(40), top_p: Some(0.9), ..params.clone() }),
            of(SamplingParams { min_p: Some(0.3), repetition_penalty: Some(1.2), ..params.clone() }),
            of(SamplingParams { temperature: Some(3.0), logit_bias: vec![(9, 3.0)], ..params }),
        ];
        for choice in answers.into_iter().flatten() {
            assert_eq!(choice.error, None);
            if choice.finish_reason == FinishReason::Stop {
                num_ended += 1;
                assert_fits_the_schema(&choice.text);
            }
        }
    }
    assert!(num_ended > 200, "{num_ended} of 375");
}

#[test]
fn every_form_of_a_grammar_decides_the_text() {
    let engine = start("llama", &exact());
    let lark = "start: greeting \", \" NAME \"!\"\ngreeting: \"Hi\" | \"Hello\"\nNAME: /[A-Z][a-z]{2,4}/\n";
    let form = json!({ "grammars": [{ "lark_grammar": lark }] }).to_string();
    let is_greeting = |text: &str| {
        let Some(rest) = text.strip_prefix("Hi, ").or_else(|| text.strip_prefix("Hello, ")) else { return false };
        let name = rest.strip_suffix('!').unwrap_or_default();
        name.starts_with(|c: char| c.is_ascii_uppercase())
            && (2..=4).contains(&name[1..].len())
            && name[1..].bytes().all(|b| b.is_ascii_lowercase())
    };
    let texts = ["x(1)*", "\u{e9}t\u{e9}", "a b"].map(String::from);
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    for seed in 0..6 {
        for params in [greedy(80), sampled(seed, 80)] {
            let of = |grammar: Grammar| {
                let choice = ask(&engine, seed as usize, with(grammar, params.clone()), 1).remove(0);
                assert_eq!(choice.finish_reason, FinishReason::Stop, "{choice:?}");
                choice.text
            };
            let text = of(Grammar::Regex("[0-9]{5}".into()));
            assert!(is_number(&text), "{text}");
            let text = of(Grammar::Lark(lark.into()));
            assert!(is_greeting(&text), "{text}");
            let text = of(Grammar::Llguidance(form.clone()));
            assert!(is_greeting(&text), "{text}");
            let text = of(Grammar::Choice(texts.to_vec()));
            assert!(texts.contains(&text), "{text}");
        }
    }
}

/// Tokens of one byte each that stand for nothing else.
const LETTERS: [&str; 6] = ["Q", "Z", "7", "w", "%", "J"];

#[test]
fn what_may_come_has_the_probability_that_it_has_among_what_may_come() {
    let engine = start("llama", &exact());
    let texts = LETTERS.map(String::from).to_vec();
    let ids: Vec<u32> = LETTERS.iter().map(|letter| engine.tokenizer().token_to_id(letter).unwrap()).collect();
    let all = SamplingParams { logprobs: Some(512), ..greedy(1) };
    let all = ask(&engine, 4, all, 1).remove(0).logprobs.unwrap().remove(0).top_logprobs;
    let logprob = |id: u32| f64::from(all.iter().find(|top| top.token_id == id).unwrap().logprob);
    // A temperature that makes the letters unlike each other.
    let weights: Vec<f64> = ids.iter().map(|id| (logprob(*id) / 0.7).exp()).collect();
    let total: f64 = weights.iter().sum();
    for (params, what) in [
        (SamplingParams { temperature: Some(0.7), ..sampled(9, 8) }, "drawn, and again"),
        (SamplingParams { temperature: Some(0.7), top_k: Some(400), ..sampled(9, 8) }, "drawn from the mask"),
    ] {
        let mut counts: HashMap<String, f64> = HashMap::new();
        for round in 0..20 {
            let params = with(Grammar::Choice(texts.clone()), SamplingParams { seed: Some(round), ..params.clone() });
            for choice in ask(&engine, 4, params, 200) {
                *counts.entry(choice.text).or_default() += 1.0;
            }
        }
        let statistic: f64 = LETTERS
            .iter()
            .zip(&weights)
            .map(|(letter, weight)| {
                let expected = 4000.0 * weight / total;
                (counts.get(*letter).copied().unwrap_or(0.0) - expected).powi(2) / expected
            })
            .sum();
        assert_eq!(counts.values().sum::<f64>(), 4000.0);
        // One in a thousand for 5 degrees of freedom.
        assert!(statistic < 20.5, "{what}: chi squared is {statistic}, of {counts:?}");
    }
}

#[test]
fn a_grammar_changes_no_answer_beside_it_and_is_changed_by_none() {
    let engine = start("llama", &exact());
    let free: Vec<_> = (0..4).map(|i| request(i, 20, 60)).collect();
    let held: Vec<_> = (4..10)
        .map(|i| {
            let params = if i % 2 == 0 { greedy(60) } else { sampled(i as u64, 60) };
            let sampling = SamplingParams { logprobs: Some(0), ..with(Grammar::JsonSchema(schema()), params) };
            GenerationRequest { sampling, ..request(i, 20, 60) }
        })
        .collect();
    let mut alone: Vec<_> = run_together(&engine, free.clone());
    alone.extend(held.iter().map(|request| run_together(&engine, vec![request.clone()]).remove(0)));
    let together = || [&free[..], &held[..]].concat();
    assert_eq!(run_together(&engine, together()), alone);
    // Blocks that are lost and computed again tell nothing of a grammar.
    let small = start("llama", &EngineConfig { paged_attention: pool_of(256, 8), ..exact() });
    let streams: Vec<_> = together().into_iter().map(|request| small.submit(request).unwrap()).collect();
    let completions: Vec<_> = streams.into_iter().map(|stream| stream.wait().unwrap()).collect();
    assert!(completions.iter().map(|completion| completion.usage.preemptions).sum::<usize>() > 0);
    assert_eq!(completions.iter().map(tokens).collect::<Vec<_>>(), alone);
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn greedy_without_logits_is_greedy_with_them() {
    for model in ["llama", "llama.gguf"] {
        let engine = start(model, &EngineConfig::default());
        for i in 0..6 {
            let params = with(Grammar::JsonSchema(schema()), greedy(120));
            let text = |params| ask(&engine, i, params, 2).remove(1).text;
            let with_logits = SamplingParams { logprobs: Some(0), ..params.clone() };
            assert_eq!(text(params), text(with_logits));
        }
    }
}

/// Proposes what comes and what does not, in turn.
#[derive(Debug)]
struct Drafts(Vec<Vec<u32>>);

impl Proposer for Drafts {
    fn propose(&self, token_ids: &[u32], _: usize, drafts: &mut Vec<u32>) -> usize {
        if let Some(answer) = self.0.iter().find(|answer| answer.starts_with(token_ids)) {
            drafts.extend(answer[token_ids.len()..].iter().take(4));
            if token_ids.len().is_multiple_of(3) {
                drafts.extend([40, 41]);
            }
        }
        0
    }
}

#[test]
fn drafts_change_no_token_of_a_grammar() {
    let requests = |logprobs| -> Vec<GenerationRequest> {
        let of = |i: usize| {
            let params = if i.is_multiple_of(2) { greedy(100) } else { sampled(i as u64, 100) };
            let sampling = SamplingParams { logprobs, ..with(Grammar::JsonSchema(schema()), params) };
            GenerationRequest { return_token_ids: true, ..GenerationRequest::new(Prompt::TokenIds(prompt(i, 20)), sampling) }
        };
        (0..6).map(of).collect()
    };
    let answers = |engine: &Engine, logprobs| -> Vec<(Vec<u32>, String, FinishReason)> {
        let streams: Vec<_> = requests(logprobs).into_iter().map(|request| engine.submit(request).unwrap()).collect();
        let choice = |stream: engine::RequestStream| stream.wait().unwrap().choices.remove(0);
        let tell = |choice: CompletionChoice| (choice.token_ids, choice.text, choice.finish_reason);
        streams.into_iter().map(choice).map(tell).collect()
    };
    let expected = answers(&start("llama", &exact()), None);
    let known = expected.iter().enumerate().map(|(i, (answer, ..))| [&prompt(i, 20)[..], answer].concat()).collect();
    let engine = start("llama", &EngineConfig { speculation: Some(Speculation::always(Arc::new(Drafts(known)))), ..exact() });
    for logprobs in [None, Some(0)] {
        assert_eq!(answers(&engine, logprobs), expected);
    }
}

/// Texts that repeat themselves, so that there is something to look up, with and without a choice at each place.
fn repetitive() -> Vec<Grammar> {
    let item = json!({
        "type": "object",
        "properties": { "kind": { "enum": ["red", "blue"] }, "on": { "type": "boolean" } },
        "required": ["kind", "on"],
        "additionalProperties": false,
    });
    vec![
        Grammar::JsonSchema(json!({ "type": "array", "items": item, "minItems": 5, "maxItems": 6 })),
        Grammar::Regex("((ab|Qcd|[0-3])-){18}".into()),
        Grammar::Lark("start: (WORD <|im_start|>){12} \"!\"\nWORD: /[xyz]{2}/\n".into()),
        Grammar::Choice(["red red red red red blue", "red red red red green"].map(String::from).to_vec()),
    ]
}

#[test]
fn grammars_and_drafts_of_every_kind_give_the_answers_without_drafts() {
    let ways_to_sample = |seed| [greedy(90), sampled(seed, 90), SamplingParams { top_p: Some(0.9), ..sampled(seed, 90) }];
    let requests = |logprobs| -> Vec<GenerationRequest> {
        let mut all = Vec::new();
        for (i, grammar) in repetitive().into_iter().enumerate() {
            for params in ways_to_sample(i as u64) {
                let sampling = SamplingParams { logprobs, ..with(grammar.clone(), params) };
                let request = GenerationRequest::new(Prompt::TokenIds(prompt(i, 20)), sampling);
                all.push(GenerationRequest { return_token_ids: true, n_choices: 1 + i % 2, ..request });
            }
        }
        all
    };
    let answers = |engine: &Engine, logprobs| -> Vec<String> {
        let streams: Vec<_> = requests(logprobs).into_iter().map(|request| engine.submit(request).unwrap()).collect();
        streams.into_iter().map(|stream| format!("{:?}", stream.wait().unwrap().choices)).collect()
    };
    let by = |name: &str| {
        let draft = DraftModel { source: hugging_face(name), architecture: None, in_situ_quant: None };
        EngineConfig { speculation: Some(Speculation::by_model(DraftChoice::All)), draft: Some(draft), ..exact() }
    };
    let lookup = Some(Speculation::always(Arc::new(PromptLookup)));
    let ways = [
        ("looked up", EngineConfig { speculation: lookup.clone(), forced_drafts: false, ..exact() }),
        ("looked up and forced", EngineConfig { speculation: lookup, ..exact() }),
        ("of the model itself", EngineConfig { forced_drafts: false, ..by("llama") }),
        ("of another model, and forced", by("qwen3")),
    ];
    for logprobs in [None, Some(2)] {
        let expected = answers(&start("llama", &EngineConfig { forced_drafts: false, ..exact() }), logprobs);
        for (way, config) in &ways {
            let engine = start("llama", config);
            for (got, expected) in answers(&engine, logprobs).iter().zip(&expected) {
                assert_eq!(got, expected, "drafts {way}");
            }
            let drafts = stats(&engine).drafts;
            // What a model of random weights guesses is hardly ever what a grammar allows.
            let num_right = if config.draft.is_some() { 1 } else { 50 };
            let (right, all) = (drafts.accepted, drafts.tokens);
            assert!(right >= num_right && all > 100, "drafts {way}: {right} of {all} were right");
        }
    }
}

/// Proposes what no grammar here allows.
#[derive(Debug)]
struct Invalid(u32);

impl Proposer for Invalid {
    fn propose(&self, _: &[u32], most: usize, drafts: &mut Vec<u32>) -> usize {
        drafts.resize(most, self.0);
        0
    }
}

#[test]
fn drafts_that_a_grammar_refuses_are_not_computed() {
    let plain = start("llama", &exact());
    let token = plain.tokenizer().token_to_id("J").unwrap();
    let speculation = Some(Speculation::always(Arc::new(Invalid(token))));
    let engine = start("llama", &EngineConfig { speculation, forced_drafts: false, ..exact() });
    let params = with(Grammar::Regex("[a-d]{12}".into()), greedy(40));
    let text = |engine: &Engine| ask(engine, 1, params.clone(), 1).remove(0).text;
    assert_eq!(text(&engine), text(&plain));
    assert_eq!(stats(&engine).drafts.tokens, 0);
    // Without the grammar they are.
    ask(&engine, 1, greedy(5), 1);
    assert!(stats(&engine).drafts.tokens > 0);
}

#[test]
fn an_incomplete_answer_ends_with_length() {
    let engine = start("llama", &exact());
    let choice = ask(&engine, 1, with(Grammar::Regex("[a-z]{40}".into()), greedy(4)), 1).remove(0);
    assert_eq!(choice.finish_reason, FinishReason::Length);
    assert!(choice.text.bytes().all(|b| b.is_ascii_lowercase()), "{}", choice.text);
}

#[test]
fn special_tokens_of_a_grammar_are_tokens_and_no_text() {
    let engine = start("llama", &exact());
    let mut sampling = with(Grammar::Lark("start: \"a\" <|im_start|> \"b\"\n".into()), greedy(9));
    sampling.include_special_tokens = true;
    let choice = ask(&engine, 1, sampling.clone(), 1).remove(0);
    assert_eq!((choice.text.as_str(), choice.finish_reason), ("a<|im_start|>b", FinishReason::Stop));
    let request = GenerationRequest { return_token_ids: true, ..request(1, 20, 9) };
    let choice = engine.submit(GenerationRequest { sampling, ..request }).unwrap().wait().unwrap().choices.remove(0);
    let ids = ["a", "<|im_start|>", "b"].map(|token| engine.tokenizer().token_to_id(token).unwrap());
    assert_eq!(choice.token_ids, ids);
    let (fault, message) = refused(&engine, Grammar::Lark("start: \"a\" <|unheard_of|>\n".into()));
    assert!(fault == GrammarFault::Syntax && message.contains("<|unheard_of|>"), "{message}");
}

#[test]
fn what_a_grammar_cannot_be_combined_with_is_refused_by_name() {
    let engine = start("llama", &exact());
    let grammar = || with(Grammar::Regex("a+".into()), greedy(5));
    for (name, sampling) in [
        ("ignore_eos", SamplingParams { ignore_eos: true, ..grammar() }),
        ("min_tokens", SamplingParams { min_tokens: 2, ..grammar() }),
        ("allowed_token_ids", SamplingParams { allowed_token_ids: Some(vec![30]), ..grammar() }),
        ("bad_words", SamplingParams { bad_words: vec!["a".into()], ..grammar() }),
    ] {
        let Err(error) = engine.submit(GenerationRequest { sampling, ..request(1, 9, 5) }) else { panic!("{name}") };
        assert!(matches!(&error, EngineError::InvalidArgument(message) if message.starts_with(name)), "{error}");
    }
}

#[test]
fn what_is_not_enforced_is_refused_by_name() {
    let engine = start("llama", &exact());
    let mut deep = json!({ "type": "string" });
    for _ in 0..100 {
        deep = json!({ "type": "array", "items": deep });
    }
    for (schema, name) in [
        (json!({ "type": "object", "colour": 3 }), "`colour`"),
        (json!({ "type": "array", "items": { "uniqueItems": true } }), "`uniqueItems`"),
        (json!({ "properties": { "a": { "not": {} } } }), "`not`"),
        (json!({ "$ref": "https://example.com/schema" }), "`$ref`"),
        (json!({ "$ref": "#/$defs/none" }), "none"),
        (json!({ "type": "string", "format": "telephone" }), "telephone"),
        (json!({ "type": "strange" }), "strange"),
        (json!({ "oneOf": [{ "type": "integer" }, { "type": "number" }] }), "oneOf"),
        (json!(false), "false"),
        (json!([]), "object"),
        (json!({ "type": "string", "pattern": "(?=a)b" }), ""),
    ] {
        let (fault, message) = refused(&engine, Grammar::JsonSchema(schema.clone()));
        assert_eq!(fault, GrammarFault::Schema, "{schema}: {message}");
        assert!(message.contains(name), "{schema}: {message}");
    }
    // The compiler's own options are not a client's.
    let lenient = json!({ "type": "integer", "x-guidance": { "lenient": true, "whitespace_flexible": false } });
    ask(&engine, 1, with(Grammar::JsonSchema(lenient), greedy(5)), 1);
    ask(&engine, 1, with(Grammar::JsonSchema(deep), greedy(5)), 1);
}

#[test]
fn a_hostile_grammar_is_served_or_refused_by_its_size() {
    let engine = start("llama", &exact());
    let bomb: serde_json::Map<String, Value> = (0..40)
        .map(|i| {
            let next = json!({ "$ref": format!("#/$defs/d{}", i + 1) });
            let own = json!({ "type": "object", "properties": { "a": next, "b": next, "c": next }, "required": ["a", "b", "c"] });
            (format!("d{i}"), if i == 39 { json!({ "type": "string", "pattern": "(a|b){1,500}c{1,500}" }) } else { own })
        })
        .collect();
    let all_of = |count: usize| -> Vec<Value> {
        (0..count).map(|i| json!({ "type": "string", "pattern": format!("(.*[a-z]){{1,20}}.*x{i}") })).collect()
    };
    let link = |i: usize| json!({ "type": "string", "pattern": format!("x{i}"), "$ref": format!("#/$defs/d{}", i + 1) });
    let links: serde_json::Map<String, Value> =
        (0..20).map(|i| (format!("d{i}"), if i < 19 { link(i) } else { json!({}) })).collect();
    let chain = json!({ "$defs": links, "$ref": "#/$defs/d0" });
    let huge: Vec<String> = (0..9000).map(|i| format!("value {i}")).collect();
    let (syntax, complex, schema) = (Some(GrammarFault::Syntax), Some(GrammarFault::TooComplex), Some(GrammarFault::Schema));
    for (grammar, fault) in [
        (Grammar::Regex("(((a{1,1000}){1,1000}){1,1000}){1,1000}".into()), None),
        (Grammar::Regex("(a|aa|b)*(.*a.{200}){5}[^x]{300}".into()), None),
        (Grammar::Regex("(x+x+)+y|".repeat(4000)), None),
        (Grammar::Regex("(".repeat(20_000)), complex),
        (Grammar::Regex("a".repeat(100_000)), complex),
        (Grammar::Regex(String::new()), syntax),
        (Grammar::Regex("[".into()), syntax),
        (Grammar::Lark(format!("start: {}", "(".repeat(5000))), complex),
        (Grammar::Lark("start: start start | \"a\" start \"b\" start | \n".repeat(3)), syntax),
        (Grammar::Lark(format!("start: \"a\"{{1,{}}}", u32::MAX)), complex),
        (Grammar::Lark("start: /a/ temperature=0.5".into()), syntax),
        (Grammar::Lark(format!("start: A\nA: {}/a/\n", "/.*b.*/ & ".repeat(200))), complex),
        (Grammar::Llguidance("{\"grammars\": []}".into()), syntax),
        (Grammar::Llguidance("{".into()), syntax),
        (Grammar::JsonSchema(json!({ "enum": huge })), complex),
        (Grammar::JsonSchema(json!({ "type": "string", "minLength": 1_000_000_000, "maxLength": 2_000_000_000 })), None),
        (Grammar::JsonSchema(json!({ "type": "array", "minItems": 100_000_000, "items": { "type": "string" } })), None),
        (Grammar::JsonSchema(json!({ "$ref": "#" })), schema),
        (Grammar::JsonSchema(json!({ "$defs": bomb, "$ref": "#/$defs/d0" })), None),
        (Grammar::JsonSchema(json!({ "allOf": all_of(2) })), None),
        (Grammar::JsonSchema(json!({ "allOf": all_of(8) })), schema),
        (Grammar::JsonSchema(json!({ "allOf": all_of(30) })), complex),
        (Grammar::JsonSchema(chain), complex),
        (Grammar::JsonSchema(json!({ "type": "integer", "multipleOf": 9973 })), None),
        (Grammar::JsonSchema(json!({ "type": "number", "multipleOf": 0.01 })), None),
        (Grammar::JsonSchema(json!({ "type": "integer", "multipleOf": 1_000_003 })), complex),
        (Grammar::JsonSchema(json!({ "type": "number", "multipleOf": 1.23456 })), complex),
        (Grammar::JsonSchema(json!({ "allOf": [{ "multipleOf": 1009 }, { "multipleOf": 1013 }] })), complex),
        (Grammar::JsonSchema(json!({ "multipleOf": 1009, "anyOf": [{ "multipleOf": 1013 }, {}] })), complex),
        (Grammar::JsonSchema(json!({ "allOf": [{ "multipleOf": 0.001 }, { "multipleOf": 50 }] })), complex),
        (Grammar::Choice(Vec::new()), syntax),
        (Grammar::Choice(vec![String::new()]), syntax),
    ] {
        let shown: String = format!("{grammar:?}").chars().take(100).collect();
        match (engine.submit(GenerationRequest { sampling: with(grammar, greedy(3)), ..request(1, 9, 3) }), fault) {
            (Ok(stream), None) => assert!(stream.wait().unwrap().failure().is_none(), "{shown}"),
            (Err(EngineError::Grammar { fault: found, message }), Some(fault)) => assert_eq!(found, fault, "{shown}: {message}"),
            (Ok(_), Some(_)) => panic!("{shown} was accepted"),
            (Err(error), _) => panic!("{shown}: {error}"),
        }
    }
    assert_eq!(stats(&engine).blocks_used, 0);
}

#[test]
fn what_a_grammar_forces_takes_fewer_steps_and_changes_no_token() {
    // Its letters have one spelling; of other texts the model may draw any.
    let letters = LETTERS.concat().repeat(4);
    let texts = ["red", "a long text that is forced from its second letter on", "another one of the kind"].map(String::from);
    let head = Grammar::Lark(format!("start: \"{letters}\" /[0-9]/ <|im_start|> \"{letters}\" /[a-z]/\n"));
    let grammars = [Grammar::Regex(format!("{letters}[0-9]{letters}")), head, Grammar::Choice(texts.to_vec())];
    // Of nobody but grammars.
    let always = Speculation::always(Arc::new(Drafts(Vec::new())));
    let requests = |logprobs| {
        let mut all = Vec::new();
        for (i, grammar) in grammars.iter().chain(&[Grammar::JsonSchema(schema())]).enumerate() {
            for params in [greedy(90), sampled(i as u64, 90), SamplingParams { top_p: Some(0.9), ..sampled(7, 90) }] {
                let sampling = SamplingParams { logprobs, ..with(grammar.clone(), params) };
                let request = GenerationRequest::new(Prompt::TokenIds(prompt(i, 20)), sampling);
                all.push(GenerationRequest { return_token_ids: true, n_choices: 1 + i % 2, ..request });
            }
        }
        all
    };
    let answers = |engine: &Engine, logprobs| -> Vec<String> {
        let two_at_once = |requests: &[GenerationRequest]| -> Vec<String> {
            let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
            streams.into_iter().map(|stream| format!("{:?}", stream.wait().unwrap().choices)).collect()
        };
        requests(logprobs).chunks(2).flat_map(two_at_once).collect()
    };
    for logprobs in [None, Some(3)] {
        let without = start("llama", &EngineConfig { forced_drafts: false, ..exact() });
        let expected = answers(&without, logprobs);
        // Where it pays; always; with drafts of others behind it.
        for speculation in
            [None, Some(always.clone()), Some(Speculation::always(Arc::new(PromptLookup))), Some(Speculation::auto())]
        {
            let engine = start("llama", &EngineConfig { speculation, ..exact() });
            let got = answers(&engine, logprobs);
            got.iter().zip(&expected).for_each(|(got, expected)| assert_eq!(got, expected));
        }
    }
    for grammar in &grammars[..2] {
        let steps = |forced_drafts| {
            let engine = start("llama", &EngineConfig { forced_drafts, speculation: Some(always.clone()), ..exact() });
            let choice = ask(&engine, 1, with(grammar.clone(), sampled(3, 90)), 1).remove(0);
            assert_eq!(choice.finish_reason, FinishReason::Stop);
            stats(&engine).steps
        };
        let (with, without) = (steps(true), steps(false));
        assert!(with * 4 < without, "{with} steps instead of {without}");
    }
}

#[test]
fn a_grammar_that_becomes_too_complex_ends_its_own_request_with_the_text_it_has() {
    let engine = start("llama", &exact());
    let a = engine.tokenize_text("a", false).unwrap();
    // Each letter more may be read in more ways.
    let grammar = Grammar::Lark("start: s\ns: s s | \"a\"".into());
    let sampling = SamplingParams { logit_bias: vec![(a[0], 100.0)], ..greedy(600) };
    let request = GenerationRequest { sampling: with(grammar, sampling), ..request(1, 9, 600) };
    let streams = [engine.submit(request).unwrap(), engine.submit(self::request(2, 9, 40)).unwrap()];
    let [failed, other] = streams.map(|stream| stream.wait().unwrap());
    assert!(matches!(failed.failure(), Some(EngineError::Grammar { fault: GrammarFault::TooComplex, .. })), "{failed:?}");
    assert!(failed.choices[0].text.starts_with("aaaa"), "{:?}", failed.choices[0].text);
    assert_eq!(other.choices[0].finish_reason, FinishReason::Length);
}
