//! Whether answers are allowed, token by token.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    super::{Dialect, Parts, Reader},
    *,
};
use crate::grammar::GrammarCompiler;

const VOCAB_SIZE: usize = 512;

/// The format, what its template has, and which of the markers are tokens; each format with text as markers, too.
const HARMONY: [&str; 7] = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];
const MODELS: [(&str, &str, &[&str]); 5] = [
    ("harmony", "<|start|>assistant<|channel|>functions.", &HARMONY),
    ("gemma4", "<|tool_call>call:<channel|>", &["<|tool_call>", "<tool_call|>", "<|\"|>", "<|channel>", "<channel|>"]),
    ("functiongemma", "<start_function_call>call:", &["<start_function_call>", "<end_function_call>", "<escape>"]),
    ("pythonic", "[func_name1(", &["<|python_start|>", "<|python_end|>"]),
    ("llama4-json", "\"parameters\"<|python_start|>", &["<|python_start|>", "<|python_end|>"]),
];

fn tokenizer(tokens: &[&str]) -> Arc<Tokenizer> {
    let path = goldens::dir().join("text/llama/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let num_tokens = tokenizer["model"]["vocab"].as_object().unwrap().len();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.extend((num_tokens..).zip(tokens).map(|(id, content)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
    }));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let mut tokenizer = Tokenizer::from_file(&path).unwrap();
    tokenizer.add_eos_ids([2]);
    Arc::new(tokenizer)
}

fn tool(name: &str, parameters: Value) -> Tool {
    Tool { name: name.into(), description: None, parameters, strict: false }
}

fn options(choice: CallChoice) -> ToolOptions {
    let place = json!({ "type": "object", "properties": { "lat": { "type": "number" }, "next": { "$ref": "#/$defs/place" } }, "required": ["lat"] });
    let weather = json!({
        "type": "object",
        "$defs": { "place": place },
        "properties": {
            "city": { "type": "string", "minLength": 1, "maxLength": 5 },
            "days": { "type": "integer", "minimum": 0, "maximum": 9 },
            "unit": { "type": ["string", "null"], "enum": ["C", "F", null] },
            "tags": { "type": "array", "items": { "type": "string" }, "minItems": 1, "maxItems": 2 },
            "at": { "$ref": "#/$defs/place" },
            "note": { "anyOf": [{ "type": "boolean" }, { "type": "null" }] }
        },
        "required": ["city", "unit"]
    });
    let tools = vec![
        tool("weather", weather),
        tool("now", json!({ "type": "object", "properties": {}, "additionalProperties": false })),
        tool("any", json!({ "type": "object" })),
    ];
    ToolOptions { tools, choice, ..ToolOptions::default() }
}

/// How much of the answer may come, and whether it may end there.
fn allowed(tokenizer: &Arc<Tokenizer>, template: &str, tools: &ToolOptions, answer: &str) -> (String, bool) {
    allowed_behind("", tokenizer, template, tools, answer)
}

/// The same behind a prompt that ends so.
fn allowed_behind(
    prompt_end: &str,
    tokenizer: &Arc<Tokenizer>,
    template: &str,
    tools: &ToolOptions,
    answer: &str,
) -> (String, bool) {
    let dialect = Arc::new(Dialect::of(template, tokenizer, true));
    let reading = Reading::new(&dialect, tools, prompt_end);
    let rules = answer_grammar(&reading, tools, tokenizer, false).unwrap().unwrap();
    let compiled = GrammarCompiler::new(Arc::clone(tokenizer), VOCAB_SIZE).compile_rules(&rules, None);
    let mut constraint = compiled.unwrap_or_else(|error| panic!("{error}: {rules}")).begin(1).remove(0);
    let mut taken = Vec::new();
    for id in tokenizer.encode(answer, false).unwrap() {
        if constraint.has_ended() || !constraint.take(id).unwrap() {
            return (tokenizer.decode(&taken, false), false);
        }
        taken.push(id);
    }
    let may_end = constraint.has_ended() || constraint.mask().unwrap().allows(2);
    (tokenizer.decode(&taken, false), may_end)
}

fn assert_allowed(format: &str, choice: CallChoice, answers: &[&str]) {
    each(format, |tokenizer, template| {
        for answer in answers {
            let (taken, may_end) = allowed(tokenizer, template, &options(choice), answer);
            assert!(taken == **answer && may_end, "{answer}: ended behind {taken}");
        }
    });
}

fn assert_refused(format: &str, choice: CallChoice, answers: &[&str]) {
    each(format, |tokenizer, template| {
        for answer in answers {
            let (taken, may_end) = allowed(tokenizer, template, &options(choice), answer);
            assert!(taken != **answer || !may_end, "{answer}");
        }
    });
}

/// With markers that are text, and with such that are tokens.
fn each(format: &str, work: impl Fn(&Arc<Tokenizer>, &str)) {
    let (name, template, tokens) = MODELS.iter().find(|(name, ..)| *name == format).unwrap();
    for tokens in [&[][..], tokens] {
        let tokenizer = tokenizer(tokens);
        assert_eq!(Dialect::of(template, &tokenizer, true).format.name, *name);
        work(&tokenizer, template);
    }
}

#[test]
fn harmony_is_reasoning_and_then_a_text_or_a_call() {
    let call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}";
    let thought = format!("<|channel|>analysis<|message|>So.<|end|><|start|>assistant{call}");
    let before = " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Oslo\", \"unit\": \"C\"}";
    let none = "<|channel|>commentary to=functions.now<|message|>{}";
    assert_allowed("harmony", CallChoice::Required, &[call, &thought, before, none]);
    let text = "<|channel|>final<|message|>Yes.";
    let remark = format!("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{call}");
    assert_allowed("harmony", CallChoice::Auto, &[call, &thought, before, text, &remark]);
    assert_refused("harmony", CallChoice::Required, &[text, &remark, "<|channel|>commentary to=functions.walk<|message|>{}"]);
    assert_refused("harmony", CallChoice::Auto, &["Yes.", "<|channel|>analysis<|message|>So.", &format!("{call}<|end|>")]);
    assert_refused("harmony", CallChoice::Auto, &["<|channel|>commentary to=functions.weather<|message|>{}"]);
    let then = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
    assert_allowed("harmony", CallChoice::None, &[text, then]);
    assert_refused("harmony", CallChoice::None, &[call, before]);
}

#[test]
fn harmony_goes_on_with_the_message_that_the_prompt_has_begun() {
    each("harmony", |tokenizer, template| {
        let is_allowed = |channel: &str, choice, answer: &str| {
            let prompt_end = format!("Hi<|end|><|start|>assistant<|channel|>{channel}<|message|>");
            let (taken, may_end) = allowed_behind(&prompt_end, tokenizer, template, &options(choice), answer);
            taken == answer && may_end
        };
        let call = "<|channel|>commentary to=functions.now<|message|>{}";
        let then_a_call = format!("So.<|end|><|start|>assistant{call}");
        assert!(is_allowed("analysis", CallChoice::Auto, &then_a_call));
        assert!(!is_allowed("analysis", CallChoice::Auto, "So."));
        assert!(is_allowed("final", CallChoice::Auto, "Yes."));
        assert!(is_allowed("final", CallChoice::Required, &then_a_call));
        assert!(!is_allowed("final", CallChoice::Required, "Yes."));
    });
}

#[test]
fn pythonic_arguments_are_those_of_the_schema_in_its_order() {
    assert_allowed(
        "pythonic",
        CallChoice::Required,
        &[
            "[now()]",
            "[now(), now()]",
            "<|python_start|>[now()]<|python_end|>",
            "<|python_start|>[now()]",
            "[weather(city='Oslo', unit='C')]",
            "[weather(city=\"Oslo\",days=3,unit=None)]",
            "[weather(city='O\\'s\\n', unit='F', tags=['a', \"b\"], at={'lat': 1.5, 'next': {\"lat\": -2}}, note=True)]",
            "[any()]",
            "[any(x=[1, {'k': None}], y='s')]",
        ],
    );
    assert_refused(
        "pythonic",
        CallChoice::Required,
        &[
            "Text",
            "[walk()]",
            "[now(x=1)]",
            "[weather()]",
            "[weather(unit='C', city='Oslo')]",
            "[weather(city='', unit='C')]",
            "[weather(city='Utrecht', unit='C')]",
            "[weather(city='Oslo', days=10, unit='C')]",
            "[weather(city='Oslo', unit='K')]",
            "[weather(city='Oslo', unit='C', tags=[])]",
            "[weather(city='Oslo', unit='C', tags=['a', 'b', 'c'])]",
            "[weather(city='Oslo', unit='C', at={})]",
            "[weather(city='Oslo', unit='C', note=1)]",
            "[weather(city='Oslo', unit='C', note=true)]",
            "[weather(city='Oslo', unit='C'",
        ],
    );
    assert_allowed("pythonic", CallChoice::Auto, &["Text [1]", "[now()]", ""]);
    assert_refused("pythonic", CallChoice::Auto, &["[1]"]);
}

#[test]
fn gemmas_arguments_are_those_of_the_schema_in_its_order() {
    let of = |format: &str, answers: &[&str]| -> Vec<String> {
        let written = |answer: &&str| match format {
            "gemma4" => format!("<|tool_call>call:{}<tool_call|>", answer.replace('\'', "<|\"|>")),
            _ => format!("<start_function_call>call:{}<end_function_call>", answer.replace('\'', "<escape>")),
        };
        answers.iter().map(written).collect()
    };
    for format in ["gemma4", "functiongemma"] {
        let good = of(
            format,
            &[
                "now{}",
                "weather{city:'Oslo',unit:'C'}",
                "weather{city:'a\"b',days:3,unit:null,tags:['a','b'],at:{lat:1.5,next:{lat:-2}},note:true}",
                "any{x:[1,{k:null}],y:'s'}",
            ],
        );
        assert_allowed(format, CallChoice::Required, &good.iter().map(String::as_str).collect::<Vec<_>>());
        let twice = format!("{}{}", good[0], good[1]);
        assert_allowed(format, CallChoice::Auto, &[&twice, "Text", &format!("Text {}", good[0])]);
        let bad = of(
            format,
            &[
                "walk{}",
                "now{x:1}",
                "weather{}",
                "weather{unit:'C',city:'Oslo'}",
                "weather{city:'',unit:'C'}",
                "weather{city:'Utrecht',unit:'C'}",
                "weather{city:'Oslo',unit:'K'}",
                "weather{city:'Oslo',unit:'C',tags:[]}",
                "weather{city:'Oslo',unit:'C',at:{}}",
                "weather{city:'Oslo',unit:'C',note:1}",
                "weather{city:Oslo,unit:'C'}",
            ],
        );
        assert_refused(format, CallChoice::Auto, &bad.iter().map(String::as_str).collect::<Vec<_>>());
        assert_refused(format, CallChoice::Required, &["Text"]);
    }
    let thought = "<|channel>thought\nSo.<channel|><|tool_call>call:now{}<tool_call|>";
    assert_allowed("gemma4", CallChoice::Required, &[thought]);
}

#[test]
fn a_call_that_begins_an_answer_may_stand_between_markers() {
    let call = "{\"name\": \"now\", \"parameters\": {}}";
    assert_allowed("llama4-json", CallChoice::Auto, &[call, "Text", &format!("<|python_start|>{call}<|python_end|>")]);
    assert_refused("llama4-json", CallChoice::Auto, &["{\"x\": 1}", "<|python_start|>print(1)<|python_end|>"]);
}

#[test]
fn one_call_is_all_where_one_is_asked_for() {
    for (format, once, twice) in [
        ("pythonic", "[now()]", "[now(), now()]"),
        ("gemma4", "<|tool_call>call:now{}<tool_call|>", "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{}<tool_call|>"),
    ] {
        each(format, |tokenizer, template| {
            let tools = ToolOptions { parallel: false, ..options(CallChoice::Required) };
            assert_eq!(allowed(tokenizer, template, &tools, once), (once.to_owned(), true));
            assert!(!allowed(tokenizer, template, &tools, twice).1, "{twice}");
        });
    }
}

#[test]
fn what_literals_cannot_enforce_is_refused_where_it_is_strict() {
    let tokenizer = tokenizer(&[]);
    let rules = |template: &str, property: Value| {
        let parameters =
            json!({ "type": "object", "properties": { "x": property }, "required": ["x"], "additionalProperties": false });
        let tools = vec![Tool { strict: true, ..tool("f", parameters) }];
        let tools = ToolOptions { tools, choice: CallChoice::Required, ..ToolOptions::default() };
        let dialect = Arc::new(Dialect::of(template, &tokenizer, true));
        answer_grammar(&Reading::new(&dialect, &tools, ""), &tools, &tokenizer, false)
    };
    let pattern = json!({ "type": "string", "pattern": "^[0-9]+$" });
    assert!(rules("[func_name1(", pattern.clone()).is_ok());
    let error = rules("<|tool_call>call:", pattern).unwrap_err().to_string();
    assert!(error.contains("`pattern`"), "{error}");
    assert!(rules("<|tool_call>call:", json!({ "type": "string", "maxLength": 3 })).is_ok());
}

#[test]
fn schemas_that_refer_to_themselves_end() {
    let tokenizer = tokenizer(&[]);
    let rules = |parameters: Value| {
        let tools = ToolOptions { tools: vec![tool("f", parameters)], choice: CallChoice::Required, ..ToolOptions::default() };
        let dialect = Arc::new(Dialect::of("[func_name1(", &tokenizer, true));
        answer_grammar(&Reading::new(&dialect, &tools, ""), &tools, &tokenizer, false)
    };
    let with = |defs: Value, property: Value| json!({ "type": "object", "$defs": defs, "properties": { "x": property } });
    let itself = json!({ "$ref": "#/$defs/a" });
    assert!(rules(with(json!({ "a": itself }), itself.clone())).is_err());
    assert!(rules(with(json!({ "a": { "allOf": [itself, itself] } }), itself.clone())).is_err());
    assert!(rules(with(json!({}), itself.clone())).is_err());
    assert!(rules(with(json!({ "a": { "type": "array", "items": itself } }), itself.clone())).is_ok());
    // Each refers twice to the next.
    let mut chain = serde_json::Map::new();
    for i in 0..60 {
        let next = json!({ "$ref": format!("#/$defs/a{}", i + 1), "type": "object" });
        chain.insert(format!("a{i}"), json!({ "type": "object", "properties": { "p": next, "q": next } }));
    }
    chain.insert("a60".into(), json!({ "type": "object" }));
    assert!(rules(with(Value::Object(chain), json!({ "$ref": "#/$defs/a0" }))).is_err());
}

#[test]
fn calls_of_mistral_may_have_the_ids_that_their_templates_write() {
    let weather = "{\"city\": \"Oslo\", \"unit\": \"C\"}";
    let named = |id: &str| format!("[TOOL_CALLS]now{id}[ARGS]{{}}[TOOL_CALLS]weather{id}[ARGS]{weather}");
    let listed = |id: &str| format!("[TOOL_CALLS][{{\"name\": \"weather\", \"arguments\": {weather}{id}}}]");
    let with_ids = tokenizer(&["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]);
    let without_ids = tokenizer(&["[TOOL_CALLS]", "[ARGS]"]);
    let list = tokenizer(&["[TOOL_CALLS]"]);
    for choice in [CallChoice::Auto, CallChoice::Required] {
        let is_allowed =
            |tokenizer, answer: &str| allowed(tokenizer, "[TOOL_CALLS]", &options(choice), answer) == (answer.to_owned(), true);
        for (tokenizer, answer, expected) in [
            (&with_ids, named(""), true),
            (&with_ids, named("[CALL_ID]aB3456789"), true),
            (&with_ids, named("[CALL_ID]12345678"), false),
            (&with_ids, named("[CALL_ID]1234567890"), false),
            (&with_ids, named("[CALL_ID]12345678_"), false),
            (&with_ids, named("[CALL_ID]"), false),
            (&without_ids, named(""), true),
            (&without_ids, named("[CALL_ID]123456789"), false),
            (&list, listed(""), true),
            (&list, listed(", \"id\": \"123456789\""), true),
            (&list, listed(", \"id\": \"1234\""), false),
            (&list, listed(", \"key\": \"123456789\""), false),
        ] {
            assert_eq!(is_allowed(tokenizer, &answer), expected, "{answer}");
        }
    }
}

/// Tools whose arguments are parts of a schema put together, as unions of records are described.
fn of_parts(choice: CallChoice) -> ToolOptions {
    let sent = json!({
        "properties": { "kind": { "const": "sent" }, "count": { "$ref": "#/$defs/count" } },
        "required": ["kind", "count"]
    });
    let kept = json!({ "properties": { "kind": { "const": "kept" } }, "required": ["kind"], "additionalProperties": false });
    let parts = json!({
        "type": "object",
        "$defs": { "sent": sent, "count": { "type": "integer" } },
        "properties": { "to": { "type": "string" } },
        "oneOf": [{ "$ref": "#/$defs/sent" }, kept]
    });
    let tools = vec![
        tool("parts", parts),
        tool("any", json!({ "type": "object" })),
        tool("none", json!({ "type": "object", "properties": {} })),
    ];
    ToolOptions { tools, choice, ..ToolOptions::default() }
}

#[test]
fn arguments_may_be_put_together_of_parts() {
    let of = |name: &str, arguments: &[(&str, &str)]| {
        let written = |(key, value): &(&str, &str)| format!("<parameter={key}>\n{value}\n</parameter>\n");
        let arguments = arguments.iter().map(written).collect::<Vec<_>>().concat();
        format!("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>")
    };
    let good = [
        of("parts", &[("to", "me"), ("kind", "sent"), ("count", "2")]),
        of("parts", &[("kind", "sent"), ("count", "2")]),
        of("parts", &[("to", "me"), ("kind", "kept")]),
        of("any", &[]),
        of("any", &[("x", "some text"), ("y_2", "[1]")]),
        of("none", &[]),
    ];
    let bad = [
        of("parts", &[]),
        of("parts", &[("kind", "sent")]),
        of("parts", &[("kind", "kept"), ("count", "2")]),
        of("parts", &[("kind", "lost")]),
        of("parts", &[("kind", "sent"), ("count", "two")]),
        of("none", &[("x", "1")]),
    ];
    for tokens in [&[][..], &["<tool_call>", "</tool_call>"]] {
        let tokenizer = tokenizer(tokens);
        let of = |answer: &str| allowed(&tokenizer, BETWEEN_MARKERS[0].0, &of_parts(CallChoice::Required), answer);
        for answer in &good {
            assert_eq!(of(answer), (answer.clone(), true));
        }
        for answer in &bad {
            assert!(!of(answer).1, "{answer}");
        }
    }
}

#[test]
fn literals_may_be_put_together_of_parts() {
    let tokenizer = tokenizer(&[]);
    let is_allowed = |answer: &str| {
        let (taken, may_end) = allowed(&tokenizer, "[func_name1(", &of_parts(CallChoice::Required), answer);
        taken == answer && may_end
    };
    for answer in
        ["[parts(to='me', kind='sent', count=2)]", "[parts(kind='kept')]", "[parts(to='me', kind='kept')]", "[any(x=1)]"]
    {
        assert!(is_allowed(answer), "{answer}");
    }
    for answer in ["[parts()]", "[parts(kind='sent')]", "[parts(kind='kept', count=2)]", "[parts(kind='lost')]"] {
        assert!(!is_allowed(answer), "{answer}");
    }
}

/// Formats whose arguments stand between markers, with a call of `f` with one argument, and their markers of it.
const BETWEEN_MARKERS: [(&str, &str, &[&str]); 3] = [
    (
        "<tool_call><function=<parameter=",
        "<tool_call>\n<function=f>\n<parameter=x>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        &["<tool_call>", "</tool_call>", "</parameter>"],
    ),
    (
        "<seed:tool_call><function=",
        "<seed:tool_call>\n<function=f>\n<parameter=x>VALUE</parameter>\n</function>\n</seed:tool_call>",
        &["<seed:tool_call>", "</seed:tool_call>"],
    ),
    (
        "<arg_key><tool_call>",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
];

fn strict(property: impl Into<Value>) -> ToolOptions {
    let parameters =
        json!({ "type": "object", "properties": { "x": property.into() }, "required": ["x"], "additionalProperties": false });
    let tools = vec![Tool { strict: true, ..tool("f", parameters) }];
    ToolOptions { tools, choice: CallChoice::Required, ..ToolOptions::default() }
}

#[test]
fn texts_between_markers_are_within_their_limits() {
    for (template, call, markers) in BETWEEN_MARKERS {
        for tokens in [&[][..], markers] {
            let tokenizer = tokenizer(tokens);
            for (property, within, beyond) in [
                (json!({ "type": "string" }), vec!["", "a\n<b>", "a\n", "\"x\""], vec![]),
                (json!({ "type": "string", "minLength": 2 }), vec!["ab", "a\nb"], vec!["", "a"]),
                (json!({ "type": "string", "maxLength": 2 }), vec!["", "ab", "<a"], vec!["abc", "\na"]),
                (json!({ "type": "string", "pattern": "^[a-z</>]*$" }), vec!["", "ab", "</b>"], vec!["A"]),
                (json!({ "type": "string", "pattern": "[0-9]", "maxLength": 3 }), vec!["4", "a4/"], vec!["abc", "4444"]),
                (json!({ "type": "string", "enum": ["red", "b/w", ""] }), vec!["red", "b/w", ""], vec!["re", "blue"]),
                (json!({ "type": "string", "enum": ["red", "blue"], "maxLength": 3 }), vec!["red"], vec!["blue"]),
                // llama.cpp's: one is the beginning of another, or has a line break or quotes in it.
                (
                    json!({ "enum": ["load", "reload", "re", "", "a \"b\"", "a\nb"] }),
                    vec!["load", "reload", "re", "", "a \"b\"", "a\nb"],
                    vec!["erase", "loading", "reloaded", " load", "load ", "\"load\""],
                ),
                (json!({ "const": "re" }), vec!["re"], vec!["r", "\"re\""]),
                (json!({ "type": "string", "const": "a.b" }), vec!["a.b"], vec!["axb"]),
                (json!({ "type": "string", "format": "date" }), vec!["2024-01-31"], vec!["2024-13-01", ""]),
                (json!({ "type": "integer", "maximum": 9 }), vec!["7"], vec!["17", "\"7\""]),
            ] {
                let tools = strict(property.clone());
                for value in within {
                    let answer = call.replace("VALUE", value);
                    assert_eq!(allowed(&tokenizer, template, &tools, &answer), (answer, true), "{property} {tokens:?}");
                }
                for value in beyond {
                    let answer = call.replace("VALUE", value);
                    assert!(!allowed(&tokenizer, template, &tools, &answer).1, "{property} {tokens:?}: {answer}");
                }
            }
        }
    }
}

#[test]
fn what_texts_between_markers_cannot_be_held_to_is_refused_where_it_is_strict() {
    let tokenizer = tokenizer(&[]);
    let refusal = |tools: &ToolOptions| {
        let dialect = Arc::new(Dialect::of(BETWEEN_MARKERS[0].0, &tokenizer, true));
        let rules = answer_grammar(&Reading::new(&dialect, tools, ""), tools, &tokenizer, false);
        rules.err().map(|error| error.to_string()).unwrap_or_default()
    };
    for (property, keyword) in [
        (json!({ "type": "string", "format": "uri" }), "`format`"),
        (json!({ "type": "string", "pattern": "\\bword\\b" }), "`pattern`"),
        (json!({ "type": "string", "enum": [1] }), "`enum`"),
        (json!({ "type": "string", "anyOf": [{ "maxLength": 3 }] }), "`anyOf`"),
        (json!({ "type": "array", "uniqueItems": true }), "`uniqueItems`"),
        (json!({ "type": "object", "properties": {} }), "`additionalProperties`"),
    ] {
        let mut tools = strict(property);
        let why = refusal(&tools);
        assert!(why.contains(keyword) && why.contains("\"f\""), "{keyword}: {why}");
        tools.tools[0].strict = false;
        assert_eq!(refusal(&tools), "", "{keyword}");
    }
    let mut tools = strict(json!({ "type": "string" }));
    tools.tools[0].parameters["minProperties"] = 1.into();
    assert!(refusal(&tools).contains("`minProperties`"));
    tools.tools[0].parameters = json!({ "type": "object", "properties": { "x": { "type": "string" } } });
    assert!(refusal(&tools).contains("`additionalProperties`"));
}

#[test]
fn a_call_may_lack_its_first_marker_on_a_line_of_its_own() {
    let call = "<function=f>\n<parameter=x>\n7\n</parameter>\n</function>";
    let closed = format!("{call}\n</tool_call>");
    let marked = format!("<tool_call>\n{closed}");
    for tokens in [&[][..], &["<tool_call>", "</tool_call>"]] {
        let tokenizer = tokenizer(tokens);
        let is_allowed = |choice: CallChoice, parallel: bool, answer: &str| {
            let tools = ToolOptions { choice, parallel, ..strict(json!({ "type": "integer", "maximum": 9 })) };
            let (taken, may_end) = allowed(&tokenizer, BETWEEN_MARKERS[0].0, &tools, answer);
            taken == answer && may_end
        };
        let is_read_as_a_call = |answer: &str| {
            let dialect = Arc::new(Dialect::of(BETWEEN_MARKERS[0].0, &tokenizer, true));
            let reading = Reading::new(&dialect, &strict(json!({ "type": "integer" })), "");
            let (marked, mut out) = (reading.marked(answer), Parts::default());
            let mut reader = Reader::new(reading);
            reader.push(&marked, &mut out);
            reader.finish(&mut out);
            reader.has_calls()
        };
        for answer in [
            call,
            &closed,
            &marked,
            &format!("I call.\n\n \t{closed}"),
            &format!("{closed}\n{marked}\n{marked}"),
            "As in `<function=f>\n<parameter=x>\nseven`",
            "As in <function=f>\n",
            "So:\n<function=f> and more",
            "So:\n<function=NAME>\n<parameter=KEY>",
            "<function=",
        ] {
            assert!(is_allowed(CallChoice::Auto, true, answer), "{tokens:?}: {answer}");
            assert_eq!(is_allowed(CallChoice::Required, true, answer), answer == marked, "{tokens:?}: {answer}");
            assert_eq!(is_read_as_a_call(answer), answer.contains("</function>"), "{tokens:?}: {answer}");
        }
        for answer in [
            &call.replace('7', "17"),
            &call.replace('7', "seven"),
            &format!("I call.\n{}", call.replace("=x", "=y")),
            "<function=f>\n</function>",
            "<function=f>\nis how it begins",
            "I call.\n <function=f> \n",
            &format!("{closed}\nText"),
            &format!("{call}\n{marked}"),
        ] {
            assert!(!is_allowed(CallChoice::Auto, true, answer), "{tokens:?}: {answer}");
        }
        assert!(is_allowed(CallChoice::Auto, false, &closed));
        assert!(!is_allowed(CallChoice::Auto, false, &format!("{closed}\n{marked}")));
    }
}

#[test]
fn as_many_tools_as_there_may_be_are_called_without_the_first_marker() {
    let parameters = json!({ "type": "object", "properties": { "x": { "type": "string", "maxLength": 30 } }, "required": ["x"] });
    let tools = (0..128).map(|index| tool(&format!("some_tool_{index}"), parameters.clone())).collect();
    let tools = ToolOptions { tools, ..ToolOptions::default() };
    let text = "As in `<function=some_tool_1>\n<function=some_tool_\n<function=some_tool_128>\n<function=\n";
    let call = |name: &str| format!("<function=some_tool_{name}>\n<parameter=x>\ny\n</parameter>\n</function>");
    let marked = format!("<tool_call>\n{}\n</tool_call>", call("5"));
    for tokens in [&[][..], &["<tool_call>", "</tool_call>"]] {
        let tokenizer = tokenizer(tokens);
        let of = |answer: &str| allowed(&tokenizer, BETWEEN_MARKERS[0].0, &tools, answer);
        for rest in ["", &call("0"), &call("127"), &call("128"), &marked] {
            let answer = format!("{text}{rest}");
            assert_eq!(of(&answer), (answer.clone(), true), "{tokens:?}");
        }
        // What no tool is called is text, and what one is called has its arguments.
        for name in ["0", "127"] {
            assert!(!of(&format!("{text}{}", call(name).replace("=x", "=y"))).1, "{tokens:?}: {name}");
        }
        assert!(of(&format!("{text}{}", call("128").replace("=x", "=y"))).1, "{tokens:?}");
    }
}
