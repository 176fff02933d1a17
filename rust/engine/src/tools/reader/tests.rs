mod cases;
mod cuts;

use std::sync::Arc;

use cases::Case as Ported;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;

use super::{
    super::{
        Tool, ToolCall,
        formats::{Dialect, FORMATS, THINKING, Thinking},
    },
    *,
};

/// What may be a special token in the answers of the formats that are ported.
const MARKERS: [&str; 23] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
];

fn tools() -> Arc<[Tool]> {
    let city = json!({ "type": "object", "properties": { "city": { "type": "string" }, "zip": { "type": "string" } } });
    let code = json!({ "type": "object", "properties": { "code": { "type": "string" } } });
    let nothing = json!({ "type": "null" });
    let typed = json!({
        "type": "object",
        "$defs": { "text": { "type": "string" } },
        "properties": {
            "count": { "type": "integer" },
            "ratio": { "type": "number" },
            "on": { "type": "boolean" },
            "text": { "type": "string" },
            "shape": { "type": "object" },
            "maybe_count": { "anyOf": [{ "type": "integer" }, nothing] },
            "maybe_text": { "anyOf": [{ "type": "string" }, nothing] },
            "maybe_list": { "anyOf": [{ "type": "array" }, nothing] },
            "text_or_null": { "type": ["null", "string"] },
            "union": { "type": ["object", "string"] },
            "unit": { "enum": ["C", "F"] },
            "size": { "enum": ["1", "2"] },
            "referred": { "$ref": "#/$defs/text" },
            "any": {},
        },
    });
    let payload = json!({ "type": "object", "properties": { "value": { "type": "string" } }, "required": ["value"] });
    let parts = json!({
        "type": "object",
        "$defs": {
            "payload": payload,
            "sent": { "properties": { "kind": { "const": "sent" }, "payload": { "$ref": "#/$defs/payload" } } },
        },
        "properties": { "to": { "type": "string" } },
        "oneOf": [{ "$ref": "#/$defs/sent" }, { "properties": { "kind": { "const": "other" } } }],
        "allOf": [{ "properties": { "zip": { "type": "string" } } }],
    });
    [("weather", city), ("python", code), ("typed", typed), ("parts", parts)]
        .map(|(name, parameters)| Tool { name: name.into(), description: None, parameters, strict: false })
        .into()
}

fn reading(name: &str) -> Reading {
    let format = FORMATS.iter().find(|format| format.name == name).unwrap();
    let thinking = match name {
        "harmony" => None,
        "mistral-args" => Some("[THINK]"),
        "seed-oss" => Some("<seed:think>"),
        "gemma4" => Some("<|channel>thought\n"),
        _ => Some("<think>"),
    };
    let thinking = thinking.and_then(|open| THINKING.iter().find(|thinking| thinking.open == open));
    let dialect = Arc::new(Dialect { format, thinking, markers: Vec::new() });
    Reading { dialect, tools: tools(), calls: true, thinks: false, has_thought: false, begun: String::new() }
}

/// The same of a model whose markers are tokens.
fn with_tokens(name: &str) -> Reading {
    let reading = reading(name);
    let markers = (0..).zip(MARKERS.map(str::to_owned)).collect();
    let Dialect { format, thinking, .. } = *reading.dialect;
    Reading { dialect: Arc::new(Dialect { format, thinking, markers }), ..reading }
}

/// Reasoning, text, calls as name and arguments, and whether one is complete.
type Read = (String, String, Vec<(String, String)>, bool);

fn read<'a>(reading: &Reading, parts: impl IntoIterator<Item = &'a str>) -> Read {
    let mut reader = Reader::new(reading.clone());
    let mut out = Parts::default();
    for part in parts {
        reader.push(part, &mut out);
    }
    reader.finish(&mut out);
    let mut calls: Vec<ToolCall> = Vec::new();
    let mut ids = Vec::new();
    for delta in out.calls {
        ids.extend(delta.id.clone());
        assert_eq!(delta.id.is_some(), delta.name.is_some());
        delta.collect(&mut calls);
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), calls.len(), "an id each");
    let calls = calls.into_iter().map(|call| (call.name, call.arguments)).collect();
    (out.reasoning, out.text, calls, reader.has_calls())
}

fn calls(calls: &[(&str, &str)]) -> Vec<(String, String)> {
    calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect()
}

/// A format, an answer, its text, and its calls.
type Case = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)]);

/// Answers in each format, of the kinds that the tool parsers of vLLM, llama.cpp and SGLang are tried with.
const CASES: &[Case] = &[
    (
        "hermes",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
        "",
        &[("weather", "{\"city\": \"Oslo\"}")],
    ),
    (
        "hermes",
        "I look.\n<tool_call>{\"name\":\"a\",\"arguments\":{}}</tool_call>\n<tool_call>{\"name\":\"b\",\"arguments\":{\"x\":[1,{\"y\":\"}\"}]}}</tool_call>",
        "I look.",
        &[("a", "{}"), ("b", "{\"x\":[1,{\"y\":\"}\"}]}")],
    ),
    ("hermes", "<tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"late\"}</tool_call>", "", &[("late", "{\"x\": 1}")]),
    ("hermes", "<tool_call>{\"name\": \"none\"}</tool_call>", "", &[("none", "{}")]),
    (
        "hermes",
        "<tool_call>{\"name\": \"t\", \"arguments\": {\"s\": \"</tool_call> \\\" {\"}}</tool_call>",
        "",
        &[("t", "{\"s\": \"</tool_call> \\\" {\"}")],
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"\\u00e9\\n\", \"arguments\": {\"s\": \"\u{4f60}\u{597d}\"}}</tool_call>",
        "",
        &[("\u{e9}\n", "{\"s\": \"\u{4f60}\u{597d}\"}")],
    ),
    ("hermes", "A plain answer, 1 < 2 and <tool", "A plain answer, 1 < 2 and <tool", &[]),
    ("hermes", "<tool_call>\nno JSON", "<tool_call>\nno JSON", &[]),
    ("hermes", "  \n", "", &[]),
    (
        "generic",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
        "",
        &[("weather", "{\"city\": \"Oslo\"}")],
    ),
    (
        "mistral",
        "[TOOL_CALLS][{\"name\": \"a\", \"arguments\": {\"x\": 1}}, {\"name\": \"b\", \"arguments\": {}}]",
        "",
        &[("a", "{\"x\": 1}"), ("b", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] [{\"name\": \"a\", \"arguments\": {\"l\": [[1], [2]]}}]", "", &[("a", "{\"l\": [[1], [2]]}")]),
    ("mistral", "Text [TOOL_CALLS][{\"arguments\": {\"x\": 1}, \"name\": \"a\"}]", "Text", &[("a", "{\"x\": 1}")]),
    ("mistral-args", "[TOOL_CALLS]a[ARGS]{\"x\": 1}[TOOL_CALLS]b[ARGS]{}", "", &[("a", "{\"x\": 1}"), ("b", "{}")]),
    ("mistral-args", "Hm. [TOOL_CALLS]a_b-c[ARGS]{\"s\": \"[TOOL_CALLS]\"}", "Hm.", &[("a_b-c", "{\"s\": \"[TOOL_CALLS]\"}")]),
    ("phi4-mini", "<|tool_call|>[{\"name\": \"a\", \"arguments\": {\"x\": 1}}]<|/tool_call|>", "", &[("a", "{\"x\": 1}")]),
    (
        "granite3",
        "<|tool_call|>[{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\", \"arguments\": {\"x\": null}}]",
        "",
        &[("a", "{}"), ("b", "{\"x\": null}")],
    ),
    ("llama3-json", "{\"name\": \"a\", \"parameters\": {\"x\": 1}}", "", &[("a", "{\"x\": 1}")]),
    ("llama3-json", " {\"type\": \"function\", \"name\": \"a\", \"parameters\": {}}", "", &[("a", "{}")]),
    ("llama3-json", "No {\"name\": \"a\", \"parameters\": {}}", "No {\"name\": \"a\", \"parameters\": {}}", &[]),
    ("llama3-json", "{\"answer\": 42}", "{\"answer\": 42}", &[]),
    (
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        &[("a", "{\"x\": 1}"), ("b", "{}")],
    ),
    (
        "deepseek-v3.1",
        "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>b<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So.",
        &[("a", "{\"x\": 1}"), ("b", "{}")],
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=zip>\n10001\n</parameter>\n<parameter=days>\n5\n</parameter>\n</function>\n</tool_call>",
        "",
        &[("weather", "{\"city\": \"New\\nYork\", \"zip\": \"10001\", \"days\": 5}")],
    ),
    ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", &[("now", "{}")]),
    (
        "qwen3-coder",
        "One.\n<tool_call>\n<function=a>\n<parameter=o>\n{\"k\": [1]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=b>\n</function>\n</tool_call>",
        "One.",
        &[("a", "{\"o\": {\"k\": [1]}}"), ("b", "{}")],
    ),
    (
        "glm4.5",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key><arg_value>3</arg_value>\n</tool_call>",
        "",
        &[("weather", "{\"city\": \"Oslo\", \"days\": 3}")],
    ),
    ("glm4.5", "<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>", "", &[("now", "{}"), ("now", "{}")]),
];

#[test]
fn each_format_is_read_as_it_is_written() {
    for (format, answer, text, expected) in CASES {
        let reading = reading(format);
        let expected = (String::new(), (*text).to_owned(), calls(expected), !expected.is_empty());
        assert_eq!(read(&reading, [*answer]), expected, "{format}: {answer}");
        let characters: Vec<String> = answer.chars().map(String::from).collect();
        assert_eq!(read(&reading, characters.iter().map(String::as_str)), expected, "{format}, by characters: {answer}");
        let Thinking { open, close } = reading.dialect.thinking.unwrap();
        let thought = format!("{open}\nWhy? <tool_call> [TOOL_CALLS] {{{close}\n\n{answer}");
        let expected = ("\nWhy? <tool_call> [TOOL_CALLS] {".to_owned(), expected.1, expected.2, expected.3);
        assert_eq!(read(&reading, [&*thought]), expected, "{format}, behind reasoning: {answer}");
    }
}

/// What other engines read in an answer, we read as well, or as the case says, wherever the answer is cut in two.
fn assert_that_it_is_read(reading: Reading, answer: &str, case: &Ported) {
    let reading = &Reading { thinks: case.thinks, ..reading };
    let expected = (case.reasoning.to_owned(), case.text.to_owned(), calls(case.calls), case.calls.len() > case.num_cut);
    assert_eq!(read(reading, [answer]), expected, "{case:?}");
    for (at, _) in answer.char_indices() {
        assert_eq!(read(reading, [&answer[..at], &answer[at..]]), expected, "cut at {at}: {case:?}");
    }
    let characters: Vec<String> = answer.chars().map(String::from).collect();
    assert_eq!(read(reading, characters.iter().map(String::as_str)), expected, "by characters: {case:?}");
    for seed in 0..16 {
        assert_eq!(read(reading, random_parts(answer, seed)), expected, "in random parts, {seed}: {case:?}");
    }
}

/// A text in parts of up to 12 characters, other ones for each seed.
fn random_parts(text: &str, seed: u64) -> Vec<&str> {
    let mut random = StdRng::seed_from_u64(seed);
    let (mut parts, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let len = random.random_range(1..=12);
        let at = rest.char_indices().nth(len).map_or(rest.len(), |(at, _)| at);
        let (part, behind) = rest.split_at(at);
        parts.push(part);
        rest = behind;
    }
    parts
}

#[test]
fn reasoning_that_other_engines_are_tried_with_is_read() {
    for format in ["hermes", "mistral-args", "seed-oss", "gemma4", "deepseek-v3.1"] {
        for thinking in &THINKING {
            for case in cases::reasoning::CASES {
                let of = |text: &str| text.replace('<', "\u{1}").replace('>', thinking.close).replace('\u{1}', thinking.open);
                let dialect = Dialect { format: reading(format).dialect.format, thinking: Some(thinking), markers: Vec::new() };
                let reading = Reading { dialect: Arc::new(dialect), thinks: case.thinks, ..reading(format) };
                let answer = of(case.answer);
                let expected = (of(case.reasoning), of(case.text), Vec::new(), false);
                let characters: Vec<String> = answer.chars().map(String::from).collect();
                assert_eq!(read(&reading, [&*answer]), expected, "{format}: {answer:?}");
                assert_eq!(
                    read(&reading, characters.iter().map(String::as_str)),
                    expected,
                    "{format}, by characters: {answer:?}"
                );
                for seed in 0..8 {
                    assert_eq!(read(&reading, random_parts(&answer, seed)), expected, "{format}, in random parts: {answer:?}");
                }
            }
        }
    }
}

/// The ids of the calls in an answer, whose markers are text or tokens.
fn ids(format: &str, answer: &str, are_tokens: bool) -> Vec<String> {
    let reading = if are_tokens { with_tokens(format) } else { reading(format) };
    let answer = if are_tokens { reading.marked(answer) } else { answer.to_owned() };
    let mut by_cut = Vec::new();
    for (at, _) in answer.char_indices() {
        let mut reader = Reader::new(reading.clone());
        let mut out = Parts::default();
        reader.push(&answer[..at], &mut out);
        reader.push(&answer[at..], &mut out);
        reader.finish(&mut out);
        by_cut.push(out.calls.into_iter().filter_map(|delta| delta.id).collect::<Vec<_>>());
    }
    let first = by_cut.remove(0);
    // Those that we make are other ones each time.
    assert!(by_cut.iter().all(|ids| ids.len() == first.len()), "{answer}: {by_cut:?}");
    first
}

/// vLLM's and llama.cpp's cases of ids that Mistral's models write.
#[test]
fn the_id_that_a_model_gives_a_call_is_kept() {
    for are_tokens in [false, true] {
        let of = |format, answer| ids(format, answer, are_tokens);
        assert_eq!(of("mistral-args", "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"x\": 1}"), ["123456789"]);
        let two = "[TOOL_CALLS]f[CALL_ID]000000001[ARGS]{\"x\": 1}[TOOL_CALLS]g[CALL_ID]aB0000002[ARGS]{}";
        assert_eq!(of("mistral-args", two), ["000000001", "aB0000002"]);
        assert_eq!(of("mistral-args", "[TOOL_CALLS]f [CALL_ID] 123456789 [ARGS] {}"), ["123456789"]);
        assert_eq!(of("mistral", "[TOOL_CALLS][{\"id\": \"123456789\", \"name\": \"f\", \"arguments\": {}}]"), ["123456789"]);
    }
}

#[test]
fn an_id_that_a_template_would_refuse_or_that_comes_twice_or_too_late_is_another() {
    for own in ["", "12345", "1234567890", "12345678-", "12345678\u{e9}"] {
        let given = ids("mistral-args", &format!("[TOOL_CALLS]f[CALL_ID]{own}[ARGS]{{}}"), false);
        assert!(given.len() == 1 && given[0] != own && given[0].len() == 9, "{own}: {given:?}");
    }
    let twice = "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}";
    let given = ids("mistral-args", twice, true);
    assert!(given.len() == 2 && given[0] == "123456789" && given[1] != "123456789", "{given:?}");
    // The call has been given out when its id comes.
    let late = ids("mistral", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}, \"id\": \"123456789\"}]", false);
    assert!(late.len() == 1 && late[0] != "123456789", "{late:?}");
    // Other models' ids are ours alone.
    let hermes = ids("hermes", "<tool_call>{\"id\": \"123456789\", \"name\": \"f\", \"arguments\": {}}</tool_call>", false);
    assert!(hermes[0].starts_with("call_"), "{hermes:?}");
}

/// A text of which little is known when it ends would be no stream.
#[test]
fn texts_of_arguments_stream() {
    for (format, head) in [
        ("qwen3-coder", "<tool_call>\n<function=python>\n<parameter=code>\n"),
        ("glm4.5", "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>"),
        ("seed-oss", "<seed:tool_call>\n<function=python>\n<parameter=code>"),
    ] {
        let mut reader = Reader::new(reading(format));
        reader.push(head, &mut Parts::default());
        for line in 0..20 {
            let mut out = Parts::default();
            reader.push(&format!("print({line})\n"), &mut out);
            assert!(!out.calls.is_empty(), "{format}: line {line} is held");
        }
    }
}

#[test]
fn answers_that_other_engines_are_tried_with_are_read() {
    for case in cases::all() {
        assert_that_it_is_read(reading(case.format), case.answer, case);
    }
}

#[test]
fn the_same_answers_are_read_where_their_markers_are_tokens() {
    for case in cases::all() {
        let reading = with_tokens(case.format);
        let answer = reading.marked(case.answer);
        assert_that_it_is_read(reading, &answer, case);
    }
}

#[test]
fn arguments_that_are_literals_become_json() {
    for case in cases::all().filter(|case| ["pythonic", "gemma4", "functiongemma"].contains(&case.format)) {
        let (_, _, calls, _) = read(&reading(case.format), [case.answer]);
        for (name, arguments) in calls.iter().take(case.calls.len() - case.num_cut) {
            // A number may be larger than the reader here takes.
            let is_json = arguments.contains("1e999") || serde_json::from_str::<serde_json::Value>(arguments).is_ok();
            assert!(is_json, "{name}: {arguments}");
        }
    }
}

#[test]
fn messages_to_functions_are_dropped_where_none_may_be_called() {
    let reading = Reading { calls: false, tools: Arc::new([]), ..reading("harmony") };
    let answer = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
                  <|constrain|>json<|message|>{\"x\": 1}<|call|>";
    assert_eq!(read(&reading, [answer]), ("So.".to_owned(), String::new(), Vec::new(), false));
}

#[test]
fn an_answer_goes_on_with_the_message_that_the_prompt_has_begun() {
    let reading = reading("harmony");
    let of = |end: &str, answer: &str| {
        let reading = Reading::new(&reading.dialect, &super::super::ToolOptions::default(), end);
        assert!(reading.is_needed());
        let (reasoning, text, ..) = read(&reading, [answer]);
        (reasoning, text)
    };
    let pair = |reasoning: &str, text: &str| (reasoning.to_owned(), text.to_owned());
    assert_eq!(of("Hi<|end|><|start|>assistant", "<|channel|>final<|message|>Yes"), pair("", "Yes"));
    assert_eq!(of("Hi<|end|><|start|>assistant", "Yes"), pair("", "Yes"));
    assert_eq!(of("<|start|>assistant<|channel|>", "analysis<|message|>So."), pair("So.", ""));
    assert_eq!(of("<|start|>assistant<|channel|>analysis<|message|>As", " so.<|end|>"), pair(" so.", ""));
    assert_eq!(of("<|start|>assistant<|channel|>final<|message|>", "Yes"), pair("", "Yes"));
}

#[test]
fn a_thought_channel_is_told_by_the_prompts_end() {
    let reading = reading("gemma4");
    let of = |end: &str, answer: &str| {
        let reading = Reading::new(&reading.dialect, &super::super::ToolOptions::default(), end);
        let (reasoning, text, ..) = read(&reading, [answer]);
        (reasoning, text)
    };
    let pair = |reasoning: &str, text: &str| (reasoning.to_owned(), text.to_owned());
    assert_eq!(of("<|turn>model\n<|channel>thought\n", "So.<channel|>Yes"), pair("So.", "Yes"));
    assert_eq!(of("<|turn>model\n<|channel>thought\n<channel|>", "<|channel>Yes"), pair("", "<|channel>Yes"));
}

#[test]
fn every_format_has_cases() {
    for format in &FORMATS {
        let is_here = CASES.iter().any(|(name, ..)| *name == format.name);
        assert!(is_here || cases::all().any(|case| case.format == format.name), "{}", format.name);
    }
    // Those that are written as another of them.
    let alike = ["generic", "granite3", "phi4-mini", "llama4-json", "seed-oss"];
    for format in FORMATS.iter().filter(|format| !alike.contains(&format.name)) {
        let num_cases = cases::all().filter(|case| case.format == format.name).count();
        assert!(num_cases >= 7, "{}: {num_cases}", format.name);
    }
}

#[test]
fn reasoning_is_told_by_the_prompts_end() {
    let reading = reading("hermes");
    let of = |end: &str, answer: &str| {
        let reading = Reading::new(&reading.dialect, &super::super::ToolOptions::default(), end);
        let (reasoning, text, ..) = read(&reading, [answer]);
        (reasoning, text)
    };
    let pair = |reasoning: &str, text: &str| (reasoning.to_owned(), text.to_owned());
    assert_eq!(of("<think>\n", "So.</think>Yes"), pair("So.", "Yes"));
    assert_eq!(of("<think>\n", "cut off"), pair("cut off", ""));
    assert_eq!(of("<think>\n\n</think>\n\n", "<think>Yes</think>"), pair("", "<think>Yes</think>"));
    assert_eq!(of("assistant\n", "\n<think>So.</think>\n\nYes <think>"), pair("So.", "Yes <think>"));
    assert_eq!(of("assistant\n", "<thin"), pair("", "<thin"));
}

#[test]
fn a_marker_that_is_a_token_is_none_when_it_is_spelled() {
    let mut reading = reading("hermes");
    let markers = vec![(7, "<tool_call>".to_owned()), (8, "</tool_call>".to_owned())];
    reading.dialect = Arc::new(Dialect { format: reading.dialect.format, thinking: None, markers });
    let call = "{\"name\": \"a\", \"arguments\": {}}";
    let spelled = format!("<tool_call>{call}</tool_call>");
    assert_eq!(read(&reading, [&*spelled]), (String::new(), spelled.clone(), Vec::new(), false));
    let marked = format!("{MARK}<tool_call>{call}{MARK}</tool_call>");
    assert_eq!(read(&reading, [&*marked]), (String::new(), String::new(), calls(&[("a", "{}")]), true));
    let stray = format!("a{MARK}</tool_call>b");
    assert_eq!(read(&reading, [&*stray]).1, "a</tool_call>b");
}

#[test]
fn a_call_that_is_cut_off_keeps_what_there_is_of_it() {
    let of = |answer: &str| read(&reading("hermes"), [answer]);
    let (_, text, got, is_complete) = of("<tool_call>\n{\"name\": \"a\", \"arguments\": {\"x\": \"y");
    assert_eq!((text.as_str(), got, is_complete), ("", calls(&[("a", "{\"x\": \"y")]), false));
    for rest in ["\n<tool", "\n<tool_call>", "<tool_call>{\"name\": \"a"] {
        let answer = format!("<tool_call>{{\"name\": \"a\", \"arguments\": {{}}}}</tool_call>{rest}");
        assert_eq!(of(&answer), (String::new(), String::new(), calls(&[("a", "{}")]), true), "{rest}");
    }
    let (_, text, got, _) = of("<tool_call>\n{\"na");
    assert_eq!((text.as_str(), got.len()), ("<tool_call>\n{\"na", 0));
}
