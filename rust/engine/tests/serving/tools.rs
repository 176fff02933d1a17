//! Calls that name a tool that exists, with arguments of its schema, however a model writes them.

use std::sync::Arc;

use engine::{
    CallChoice, CompletionChoice, Engine, EngineConfig, EngineError, FinishReason, GenerationRequest, Grammar, Message,
    ModelSource, OutputEvent, Prompt, Proposer, RenderOptions, SamplingParams, Speculation, Tool, ToolCall, ToolOptions,
};
use serde_json::{Value, json};

use crate::common::{
    golden_dir,
    serving::{exact, start, stats},
};

/// The format, a template as models have them, as far as it tells how calls are written, and which of the markers are tokens.
type Model = (&'static str, &'static str, &'static [&'static str]);

const HARMONY: &str = "{{ tools[0].function.name if tools }}{# <|channel|> functions. #}<|start|>{{ messages[-1].content }}<|end|>{% if \
                       true %}<|start|>assistant{% endif %}";
const GEMMA4: &str = "{{ tools[0].function.name if tools }}{# <|tool_call>call: #}{{ messages[-1].content }}";
const GEMMA4_THINKING: &str = "{{ tools[0].function.name if tools }}{# <|tool_call>call: <channel|> #}{{ messages[-1].content }}";
const FUNCTIONGEMMA: &str = "{{ tools[0].function.name if tools }}{# <start_function_call>call: #}{{ messages[-1].content }}";
const PYTHONIC: &str = "{{ tools[0].function.name if tools }}{# [func_name1(params) #}{{ messages[-1].content }}";
const LLAMA4: &str = "{{ tools[0].function.name if tools }}{# <|python_start|> \"parameters\" #}{{ messages[-1].content }}";
const LLAMA3: &str = "{{ tools[0].function.name if tools }}{# \"parameters\" #}{{ messages[-1].content }}";
const MISTRAL: &str =
    "[AVAILABLE_TOOLS]{{ tools[0].function.name if tools }}[/AVAILABLE_TOOLS]{{ messages[-1].content }}{# [TOOL_CALLS] #}";
const HERMES: &str = "{{ tools[0].function.name if tools }}<tool_call>{{ messages[-1].content }}";
const FUNCTOOLS: &str = "{{ tools[0].function.name if tools }}{# functools[ #}{{ messages[-1].content }}";
const GRANITE: &str =
    "{{ tools[0].function.name if tools }}{# <|start_of_role|> <tool_call> JSON list #}{{ messages[-1].content }}";

/// Each form with its markers as text, and as tokens where models have them so.
const TEMPLATES: [Model; 31] = [
    ("generic", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", &[]),
    ("hermes", HERMES, &[]),
    ("hermes", HERMES, &["<tool_call>", "</tool_call>"]),
    ("mistral", MISTRAL, &[]),
    ("mistral", MISTRAL, &["[TOOL_CALLS]"]),
    ("mistral-args", MISTRAL, &["[TOOL_CALLS]", "[ARGS]"]),
    ("mistral-args", MISTRAL, &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]),
    ("deepseek-v3", "{{ tools[0].function.name if tools }}<｜tool▁calls▁begin｜>{{ messages[-1].content }}", &[]),
    ("deepseek-v3.1", "{{ tools[0].function.name if tools }}<｜tool▁calls▁begin｜>tool_call_name{{ messages[-1].content }}", &[]),
    ("qwen3-coder", "{{ tools[0].function.name if tools }}<tool_call><function=f><parameter=p>{{ messages[-1].content }}", &[]),
    ("seed-oss", "{{ tools[0].function.name if tools }}<seed:tool_call><function=f>{{ messages[-1].content }}", &[]),
    ("glm4.5", "{{ tools[0].function.name if tools }}<tool_call>f<arg_key>k</arg_key>{{ messages[-1].content }}", &[]),
    ("harmony", HARMONY, &[]),
    ("harmony", HARMONY, &["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]),
    ("gemma4", GEMMA4, &[]),
    ("gemma4", GEMMA4, &["<|tool_call>", "<tool_call|>", "<|\"|>", "<|tool_response>"]),
    ("gemma4", GEMMA4_THINKING, &["<|tool_call>", "<tool_call|>", "<|\"|>", "<|channel>", "<channel|>"]),
    ("functiongemma", FUNCTIONGEMMA, &[]),
    ("functiongemma", FUNCTIONGEMMA, &["<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"]),
    ("pythonic", PYTHONIC, &[]),
    ("pythonic", PYTHONIC, &["<|python_start|>", "<|python_end|>"]),
    ("llama4-json", LLAMA4, &[]),
    ("llama4-json", LLAMA4, &["<|python_start|>", "<|python_end|>"]),
    ("llama3-json", LLAMA3, &["<|python_tag|>", "<|eom_id|>"]),
    (
        "phi4-mini",
        "{{ tools[0].function.name if tools }}<|tool|>{{ messages[-1].content }}",
        &["<|tool_call|>", "<|/tool_call|>"],
    ),
    ("phi4-mini-functools", FUNCTOOLS, &[]),
    ("granite3", "{{ tools[0].function.name if tools }}<|tool_call|>{{ messages[-1].content }}", &["<|tool_call|>"]),
    ("granite3.1", GRANITE, &[]),
    // With reasoning, which a prompt has opened, closed or not mentioned.
    ("hermes", "{{ tools[0].function.name if tools }}<tool_call>{{ messages[-1].content }}</think>{# #}<think>\n", &[]),
    ("hermes", "{{ tools[0].function.name if tools }}<tool_call>{{ messages[-1].content }}<think>\n\n</think>\n\n", &[]),
    ("hermes", "{{ tools[0].function.name if tools }}<tool_call>{{ messages[-1].content }}<think>a</think> {{ 'b' }}", &[]),
];

fn engine(template: &str) -> Engine {
    start("llama", &EngineConfig { chat_template: Some(template.to_owned()), ..exact() })
}

/// The model has more logits than its tokenizer has tokens: the markers are among those that are left.
fn with_tokens((_, template, tokens): Model) -> Engine {
    if tokens.is_empty() {
        return engine(template);
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = golden_dir().join("text/llama");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(folder.join("tokenizer.json")).unwrap()).unwrap();
    let num_tokens = tokenizer["model"]["vocab"].as_object().unwrap().len();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.extend((num_tokens..).zip(tokens).map(|(id, content)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
    }));
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let config = EngineConfig { chat_template: Some(template.to_owned()), ..exact() };
    Engine::load(&ModelSource::HuggingFace { path: folder, tokenizer_json: Some(path) }, &config, &|_| {}).unwrap()
}

fn tools() -> Vec<Tool> {
    let tool = |name: &str, parameters: Value| Tool { name: name.into(), description: None, parameters, strict: false };
    let days = json!({ "type": "integer", "minimum": 0, "maximum": 9 });
    let place = json!({ "type": "string", "maxLength": 5 });
    // Other properties may come. A number among them could be larger than the reader of JSON here takes.
    let other = json!({ "type": ["string", "boolean", "null"] });
    let stop = json!({
        "type": "object",
        "properties": { "lat": { "type": "integer" }, "next": { "$ref": "#/$defs/stop" } },
        "required": ["lat"],
        "additionalProperties": false
    });
    let tags = json!({ "type": "array", "items": { "type": "string", "maxLength": 3 }, "maxItems": 2 });
    let trip = json!({ "tags": tags, "at": { "$ref": "#/$defs/stop" }, "note": { "type": ["boolean", "null"] } });
    vec![
        tool(
            "weather",
            json!({ "type": "object", "properties": { "days": days, "unit": { "enum": ["C", "F"], "type": "string" } }, "required": ["days", "unit"], "additionalProperties": other }),
        ),
        tool("now", json!({ "type": "object", "properties": {}, "additionalProperties": false })),
        tool(
            "find.it",
            json!({ "type": "object", "properties": { "place": place, "exact": { "type": "boolean" } }, "required": ["exact"], "additionalProperties": other, "uniqueItems": 1 }),
        ),
        tool(
            "trip",
            json!({ "type": "object", "$defs": { "stop": stop }, "properties": trip, "required": ["at", "note"], "additionalProperties": false }),
        ),
    ]
}

fn options(choice: CallChoice) -> ToolOptions {
    ToolOptions { tools: tools(), choice, ..ToolOptions::default() }
}

fn ask(engine: &Engine, tools: ToolOptions, sampling: SamplingParams) -> CompletionChoice {
    let options = RenderOptions { tools, ..RenderOptions::default() };
    let request = GenerationRequest::new(Prompt::Chat { messages: vec![Message::user("Hello")], options }, sampling);
    // The generic form takes more than the tiny context.
    let stream = engine.submit(GenerationRequest { truncate_sequence: true, ..request }).unwrap();
    let mut calls = Vec::new();
    let mut collector = stream.collector();
    loop {
        let event = stream.next_timeout(std::time::Duration::from_secs(60)).unwrap().expect("an event in time");
        if let OutputEvent::Delta { calls: new, .. } = &event {
            for call in new.iter().cloned() {
                call.collect(&mut calls);
            }
        }
        if let Some(mut completion) = collector.push(event) {
            let choice = completion.choices.remove(0);
            assert_eq!(choice.tool_calls, calls, "streamed and whole");
            assert_eq!(choice.error, None);
            return choice;
        }
    }
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams { temperature: Some(1.0), seed: Some(seed), max_tokens: Some(250), ..SamplingParams::default() }
}

/// All but one that was cut off.
fn assert_that_calls_fit(choice: &CompletionChoice) {
    let is_cut = choice.finish_reason == FinishReason::Length;
    let num_complete = choice.tool_calls.len().saturating_sub(usize::from(is_cut));
    choice.tool_calls[..num_complete].iter().for_each(assert_fits);
}

fn assert_fits(call: &ToolCall) {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|error| panic!("{call:?}: {error}"));
    let arguments = arguments.as_object().unwrap();
    match call.name.as_str() {
        "weather" => {
            assert!((0.0..=9.0).contains(&arguments["days"].as_f64().unwrap()), "{call:?}");
            assert!(["C", "F"].contains(&arguments["unit"].as_str().unwrap()), "{call:?}");
        }
        "now" => {}
        "find.it" => assert!(arguments["exact"].is_boolean(), "{call:?}"),
        "trip" => {
            assert!(arguments.keys().all(|key| ["tags", "at", "note"].contains(&key.as_str())), "{call:?}");
            assert!(arguments["note"].is_boolean() || arguments["note"].is_null(), "{call:?}");
            let mut stop = Some(&arguments["at"]);
            while let Some(place) = stop {
                assert!(place["lat"].is_number() && place.as_object().unwrap().len() <= 2, "{call:?}");
                stop = place.get("next");
            }
            let tags = arguments.get("tags").map_or(&[][..], |tags| tags.as_array().unwrap());
            assert!(tags.len() <= 2 && tags.iter().all(|tag| tag.as_str().unwrap().chars().count() <= 3), "{call:?}");
        }
        other => panic!("{other} is no tool"),
    }
    assert!(call.id.len() >= 9);
}

#[test]
fn a_call_that_is_asked_for_comes_in_every_format() {
    for model in TEMPLATES {
        let (name, engine) = (model.0, with_tokens(model));
        assert_eq!(engine.tool_format(), Some(name), "{model:?}");
        let mut num_ended = 0;
        for seed in 0..12 {
            let greedy = SamplingParams { temperature: Some(0.0), ..sampled(seed) };
            for sampling in [greedy, sampled(seed), SamplingParams { top_k: Some(30), ..sampled(seed) }] {
                let choice = ask(&engine, options(CallChoice::Required), sampling);
                if choice.finish_reason == FinishReason::Length {
                    continue;
                }
                assert_eq!(choice.finish_reason, FinishReason::ToolCalls, "{name}: {choice:?}");
                assert_eq!(choice.text, "", "{name}: {choice:?}");
                assert!(!choice.tool_calls.is_empty());
                choice.tool_calls.iter().for_each(assert_fits);
                num_ended += 1;
            }
        }
        // Reasoning that is open is closed by eight tokens in a row, which no random model writes.
        assert!(num_ended > 0 || model.1.ends_with("<think>\n"), "{model:?}: none ended");
    }
}

#[test]
fn only_the_tools_that_are_named_are_called_and_once_if_so_asked() {
    for model in TEMPLATES {
        let (name, engine) = (model.0, with_tokens(model));
        for seed in 0..6 {
            let only = Some(vec!["weather".to_owned()]);
            let tools = ToolOptions { only, parallel: false, ..options(CallChoice::Required) };
            let choice = ask(&engine, tools, sampled(seed));
            if choice.finish_reason == FinishReason::Length {
                continue;
            }
            assert_eq!(choice.tool_calls.len(), 1, "{name}: {choice:?}");
            assert_eq!(choice.tool_calls[0].name, "weather", "{name}");
            assert_fits(&choice.tool_calls[0]);
        }
    }
}

#[test]
fn text_is_text_where_calls_may_come_and_do_not() {
    for model in TEMPLATES {
        let (name, engine) = (model.0, with_tokens(model));
        for seed in 0..4 {
            let sampling = SamplingParams { max_tokens: Some(60), ..sampled(seed) };
            let choice = ask(&engine, options(CallChoice::Auto), sampling.clone());
            assert_that_calls_fit(&choice);
            let none = ask(&engine, options(CallChoice::None), sampling);
            assert!(none.tool_calls.is_empty(), "{name}");
        }
    }
}

#[test]
fn tools_leave_room_for_an_answer_in_the_form_that_is_asked_for() {
    for model in TEMPLATES {
        let (name, engine) = (model.0, with_tokens(model));
        for seed in 0..6 {
            let grammar = Some(Grammar::Choice(vec!["yes".into(), "no".into()]));
            let choice = ask(&engine, options(CallChoice::Auto), SamplingParams { grammar, ..sampled(seed) });
            if choice.finish_reason == FinishReason::Stop {
                assert!(["yes", "no"].contains(&choice.text.as_str()), "{name}: {choice:?}");
            }
            assert_that_calls_fit(&choice);
        }
    }
}

#[test]
fn tokens_that_end_a_call_end_an_answer() {
    const ENDS: [&str; 4] = ["<|call|>", "<|return|>", "<|tool_response>", "<start_function_response>"];
    for name in ["harmony", "gemma4", "functiongemma"] {
        let has_end = |model: &&Model| model.0 == name && model.2.iter().any(|token| ENDS.contains(token));
        let engine = with_tokens(*TEMPLATES.iter().find(has_end).unwrap());
        let ids: Vec<u32> = ENDS.iter().filter_map(|token| engine.tokenizer().token_to_id(token)).collect();
        assert!(!ids.is_empty() && ids.iter().all(|id| engine.tokenizer().eos_ids().contains(id)), "{name}");
        // What ends a message of several does not end the answer.
        let message = engine.tokenizer().token_to_id("<|end|>");
        assert!(message.is_none_or(|id| !engine.tokenizer().eos_ids().contains(&id)));
    }
}

#[test]
fn a_token_that_begins_a_call_does_not_come_where_none_may() {
    for model in TEMPLATES {
        let begins = ["<tool_call>", "[TOOL_CALLS]", "<|tool_call>", "<start_function_call>", "<|python_tag|>", "<|tool_call|>"];
        let Some(token) = model.2.iter().find(|token| begins.contains(token)) else { continue };
        let engine = with_tokens(model);
        let id = engine.tokenizer().token_to_id(token).unwrap();
        let sampling = |seed| SamplingParams {
            logit_bias: [(id, 100.0)].into_iter().collect(),
            include_special_tokens: true,
            max_tokens: Some(8),
            ..sampled(seed)
        };
        assert!(ask(&engine, ToolOptions::default(), sampling(0)).text.contains(token), "{model:?}: it would come");
        for seed in 0..4 {
            assert!(!ask(&engine, options(CallChoice::None), sampling(seed)).text.contains(token), "{model:?}");
        }
    }
}

#[test]
fn a_form_holds_behind_reasoning() {
    let engine = engine("{{ messages[-1].content }}</think>{# #}<think>\n");
    for seed in 0..8 {
        let grammar = Some(Grammar::Regex("[0-9]{4}".into()));
        let sampling = SamplingParams { grammar, max_tokens: Some(400), ..sampled(seed) };
        // The close of reasoning is many tokens here, and random.
        let bias =
            ["</", "think", ">"].iter().filter_map(|text| engine.tokenizer().token_to_id(text)).map(|id| (id, 4.0)).collect();
        let choice = ask(&engine, ToolOptions::default(), SamplingParams { logit_bias: bias, ..sampling });
        if choice.finish_reason == FinishReason::Stop {
            assert!(choice.text.len() == 4 && choice.text.bytes().all(|b| b.is_ascii_digit()), "{choice:?}");
        } else {
            assert_eq!(choice.text, "");
        }
    }
}

/// Random tokens hardly ever spell what ends reasoning: at its budget it ends all the same, and the answer begins.
#[test]
fn reasoning_ends_at_its_budget() {
    let thinking = "{{ tools[0].function.name if tools }}<tool_call>{{ messages[-1].content }}</think>{# #}<think>\n";
    let models: [Model; 3] = [
        ("hermes", thinking, &[]),
        ("hermes", thinking, &["</think>"]),
        ("hermes", thinking, &["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    ];
    for (model, limit) in models.into_iter().flat_map(|model| [(model, 0), (model, 1), (model, 7)]) {
        let engine = with_tokens(model);
        for (seed, temperature) in [(1, 1.0), (2, 1.0), (3, 0.0)] {
            for choice in [CallChoice::None, CallChoice::Auto, CallChoice::Required] {
                let tools = if choice == CallChoice::None { ToolOptions::default() } else { options(choice) };
                let render = RenderOptions { tools, thinking_budget: Some(limit), ..RenderOptions::default() };
                let prompt = Prompt::Chat { messages: vec![Message::user("Hello")], options: render };
                let sampling = SamplingParams { max_tokens: Some(limit + 60), ..sampled(seed) };
                let sampling = SamplingParams { temperature: Some(temperature), ..sampling };
                let request = GenerationRequest { return_token_ids: true, ..GenerationRequest::new(prompt, sampling) };
                let completion = engine.submit(request).unwrap().wait().unwrap();
                let answer = &completion.choices[0];
                let close = engine.tokenizer().encode("</think>", false).unwrap();
                assert_eq!(answer.token_ids[limit..limit + close.len()], close, "{model:?} {limit} {choice:?} {answer:?}");
                let reasoning = engine.tokenizer().decode(&answer.token_ids[..limit], true);
                assert_eq!(answer.reasoning.as_deref().unwrap_or_default().trim(), reasoning.trim(), "{model:?} {limit}");
                let is_answered = !answer.text.is_empty() || !answer.tool_calls.is_empty();
                assert!(is_answered || answer.finish_reason == FinishReason::Stop, "{model:?} {limit} {choice:?} {answer:?}");
                assert_eq!(choice == CallChoice::Required, !answer.tool_calls.is_empty(), "{model:?} {answer:?}");
            }
        }
    }
}

/// Proposes what came behind a prompt of so many tokens.
#[derive(Debug)]
struct Known(usize, Vec<u32>);

impl Proposer for Known {
    fn propose(&self, token_ids: &[u32], _: usize, drafts: &mut Vec<u32>) -> usize {
        let Self(prompt_len, answer) = self;
        if let Some(rest) = answer.strip_prefix(&token_ids[*prompt_len..]) {
            drafts.extend(rest.iter().take(5));
        }
        0
    }
}

/// Drafts that would be right without the budget go beyond it.
#[test]
fn reasoning_ends_at_its_budget_with_drafts() {
    let template = "{{ tools[0].function.name if tools }}<tool_call>{{ messages[-1].content }}</think>{# #}<think>\n";
    let ask = |engine: &Engine, thinking_budget, seed| {
        let options = RenderOptions { thinking_budget, ..RenderOptions::default() };
        let prompt = Prompt::Chat { messages: vec![Message::user("Hello")], options };
        let request = GenerationRequest::new(prompt, SamplingParams { max_tokens: Some(40), ..sampled(seed) });
        let completion = engine.submit(GenerationRequest { return_token_ids: true, ..request }).unwrap().wait().unwrap();
        (completion.usage.prompt_tokens, completion.choices[0].token_ids.clone(), stats(engine).drafts)
    };
    let plain = engine(template);
    for seed in 0..3 {
        let (prompt_len, free, _) = ask(&plain, None, seed);
        let speculation = Some(Speculation::always(Arc::new(Known(prompt_len, free))));
        let chat_template = Some(template.to_owned());
        let drafting = start("llama", &EngineConfig { chat_template, speculation, ..exact() });
        for limit in [0, 1, 2, 7, 12] {
            let (expected, drafted) = (ask(&plain, Some(limit), seed), ask(&drafting, Some(limit), seed));
            assert_eq!(drafted.1, expected.1, "a budget of {limit}, seed {seed}");
        }
        assert!(ask(&drafting, Some(12), seed).2.accepted > 10);
    }
}

/// A model of messages goes on to its text; a budget says nothing to a model that marks no reasoning.
#[test]
fn a_budget_of_reasoning_leads_on_to_the_text_of_a_message() {
    let harmony = (
        "harmony",
        HARMONY,
        &["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"][..],
    );
    let engine = with_tokens(harmony);
    let messages = vec![Message::user("Hello")];
    let render = RenderOptions { thinking_budget: Some(4), ..RenderOptions::default() };
    let grammar = Some(Grammar::Regex("[0-9]{3}".into()));
    let sampling = SamplingParams { grammar, max_tokens: Some(80), ..sampled(5) };
    let request = GenerationRequest::new(Prompt::Chat { messages: messages.clone(), options: render.clone() }, sampling);
    let completion = engine.submit(request).unwrap().wait().unwrap();
    let choice = &completion.choices[0];
    assert!(choice.text.len() == 3 && choice.text.bytes().all(|b| b.is_ascii_digit()), "{choice:?}");
    let plain = self::engine(TEMPLATES[0].1);
    let request = |options| GenerationRequest::new(Prompt::Chat { messages: messages.clone(), options }, sampled(5));
    let [with, without] = [render, RenderOptions::default()]
        .map(|options| plain.submit(request(options)).unwrap().wait().unwrap().choices.remove(0));
    assert_eq!(with.text, without.text);
}

#[test]
fn what_tools_cannot_do_is_refused_by_name() {
    let engine = engine(TEMPLATES[0].1);
    let refused = |tools: ToolOptions, sampling: SamplingParams| {
        let options = RenderOptions { tools, ..RenderOptions::default() };
        let prompt = Prompt::Chat { messages: vec![Message::user("Hello")], options };
        match engine.submit(GenerationRequest::new(prompt, sampling)) {
            Err(error) => error,
            Ok(_) => panic!("it was accepted"),
        }
    };
    let unknown = ToolOptions { only: Some(vec!["walk".into()]), ..options(CallChoice::Required) };
    assert!(refused(unknown, sampled(0)).to_string().contains("\"walk\""));
    let none = ToolOptions { choice: CallChoice::Required, ..ToolOptions::default() };
    assert!(refused(none, sampled(0)).to_string().contains("no tools"));
    let ignoring = SamplingParams { ignore_eos: true, ..sampled(0) };
    assert!(refused(options(CallChoice::Auto), ignoring).to_string().starts_with("ignore_eos"));
    let mut strict = options(CallChoice::Auto);
    strict.tools[0].strict = true;
    let error = refused(strict, sampled(0));
    assert!(
        matches!(&error, EngineError::Grammar { message, .. } if message.contains("\"weather\"") && message.contains("strict")),
        "{error}"
    );
}

#[test]
fn the_generic_form_tells_of_tools_calls_and_results() {
    let engine = engine(TEMPLATES[0].1);
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "now", "arguments": "{\"a\": 1}" } });
    let message = |role: &str, text: &str, extra: Value| Message {
        role: role.into(),
        content: engine::MessageContent::Text(text.into()),
        media: Vec::new(),
        extra: extra.as_object().unwrap().clone(),
    };
    let chat = [
        message("user", "When?", json!({})),
        message("assistant", "", json!({ "tool_calls": [call] })),
        message("tool", "12:00", json!({ "tool_call_id": "c1" })),
    ];
    let render = |tools| {
        let options = RenderOptions { tools, ..RenderOptions::default() };
        engine.render_chat(&chat, &options).unwrap().0
    };
    let text = render(options(CallChoice::Auto));
    assert!(text.starts_with("system: You can call functions."), "{text}");
    assert!(
        text.contains(
            "{\"name\":\"now\",\"parameters\":{\"type\":\"object\",\"properties\":{},\"additionalProperties\":false}}\n"
        ),
        "{text}"
    );
    let spoken = "user: When?\nassistant: <tool_call>\n{\"name\":\"now\",\"arguments\":{\"a\":1}}\n</tool_call>\nuser: \
                  <tool_response>\n12:00\n</tool_response>\n";
    assert!(text.ends_with(spoken), "{text}");
    assert_eq!(render(options(CallChoice::None)), spoken);
}

const HARMONY_HISTORY: &str = "{# <|start|>assistant #}{{ tools[0].function.name if tools }}{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}\
                               <|channel|>{{ m.thinking }}<|end|> to=functions.{{ m.tool_calls[0].function.name }}\
                               {{ m.tool_calls[0].function.arguments|tojson }}{% endif %}{{ m.content }}{% endfor %}";

/// An answer of before, with calls of these names, whose ids are the same.
fn calling(names: &[&str], text: &str) -> Message {
    let call = |name: &&str| json!({ "id": name, "type": "function", "function": { "name": name, "arguments": "{\"a\": 1}" } });
    let calls: Vec<Value> = names.iter().map(call).collect();
    Message {
        role: "assistant".into(),
        content: engine::MessageContent::Text(text.into()),
        media: Vec::new(),
        extra: json!({ "tool_calls": calls, "reasoning_content": "So." }).as_object().unwrap().clone(),
    }
}

#[test]
fn harmonys_history_has_arguments_and_the_thoughts_before_a_call() {
    let engine = engine(HARMONY_HISTORY);
    assert_eq!(engine.tool_format(), Some("harmony"));
    let render = |text: &str| engine.render_chat(&[calling(&["now"], text)], &RenderOptions::default()).unwrap().0;
    assert_eq!(render(""), "<|start|>assistant<|channel|>So.<|end|> to=functions.now{\"a\": 1}");
    // The template takes thoughts or a text.
    assert_eq!(render("I look."), "<|start|>assistant<|channel|><|end|> to=functions.now{\"a\": 1}I look.");
}

#[test]
fn harmonys_history_has_each_of_several_calls_with_its_result() {
    let engine = engine(HARMONY_HISTORY);
    let result = |id: &str, text: &str| Message {
        role: "tool".into(),
        content: engine::MessageContent::Text(text.into()),
        media: Vec::new(),
        extra: json!({ "tool_call_id": id }).as_object().unwrap().clone(),
    };
    let chat = [calling(&["a", "b"], ""), result("b", "2"), result("a", "1"), result("c", "3"), Message::user("Well?")];
    let text = engine.render_chat(&chat, &RenderOptions::default()).unwrap().0;
    let expected = "<|start|>assistant<|channel|>So.<|end|> to=functions.a{\"a\": 1}<|start|>tool1\
                    <|start|>assistant<|channel|><|end|> to=functions.b{\"a\": 1}<|start|>tool2<|start|>tool3<|start|>userWell?";
    assert_eq!(text, expected);
}
