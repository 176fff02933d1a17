//! Chat templates: written by a grammar, or damaged.

use engine::{ChatTemplate, Message, MessageContent, RenderOptions, tokenizer::SpecialTokens};
use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use crate::{
    files::Files,
    grammar::{self, damaged, pick, text},
    kinds::{Outcome, refused},
};

const NAMES: [&str; 22] = [
    "messages",
    "m",
    "m.content",
    "m['role']",
    "messages[0]",
    "messages[-1].content",
    "messages[1:]",
    "loop",
    "loop.index0",
    "loop.last",
    "ns",
    "ns.x",
    "bos_token",
    "eos_token",
    "tools",
    "add_generation_prompt",
    "x",
    "undefined_thing",
    "self",
    "caller",
    "namespace",
    "range",
];
const LITERALS: [&str; 18] = [
    "0",
    "1",
    "-1",
    "2",
    "10",
    "99999",
    "9223372036854775807",
    "1.5",
    "1e308",
    "true",
    "none",
    "''",
    "'ab'",
    "'\\u00e9\\n'",
    "[]",
    "{}",
    "[1, 'a', none]",
    "{'a': 1, 'b': [2]}",
];
const FILTERS: [&str; 52] = [
    "abs",
    "attr('content')",
    "batch(3)",
    "batch(2, 'x')",
    "bool",
    "capitalize",
    "chain([1])",
    "default('d')",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "format(1, 'a')",
    "groupby('role')",
    "indent(4)",
    "int",
    "items",
    "join(', ')",
    "last",
    "length",
    "lines",
    "list",
    "lower",
    "map('upper')",
    "map(attribute='content')",
    "max",
    "min",
    "pprint",
    "reject('odd')",
    "rejectattr('role')",
    "replace('a', 'bb')",
    "reverse",
    "round(2)",
    "safe",
    "select",
    "selectattr('role', 'equalto', 'user')",
    "slice(3)",
    "sort",
    "sort(attribute='role', reverse=true)",
    "split",
    "split('a', 2)",
    "string",
    "sum",
    "title",
    "tojson",
    "tojson(indent=2)",
    "trim",
    "unique",
    "upper",
    "urlencode",
    "zip([1, 2])",
];
const TESTS: [&str; 22] = [
    "defined",
    "undefined",
    "none",
    "string",
    "number",
    "mapping",
    "iterable",
    "sequence",
    "true",
    "false",
    "boolean",
    "integer",
    "float",
    "odd",
    "even",
    "divisibleby(3)",
    "eq(1)",
    "in([1])",
    "sameas(1)",
    "startingwith('a')",
    "filter",
    "lt(2)",
];
const METHODS: [&str; 30] = [
    "upper()",
    "lower()",
    "strip()",
    "strip('a')",
    "lstrip()",
    "rstrip()",
    "split()",
    "split('a')",
    "split('', 1)",
    "splitlines()",
    "startswith('a')",
    "endswith(('a', 'b'))",
    "replace('', 'x')",
    "replace('a', '', 1)",
    "join(['a', 'b'])",
    "find('a')",
    "rfind('')",
    "count('a')",
    "count('')",
    "format(1, a=2)",
    "items()",
    "keys()",
    "values()",
    "get('a')",
    "get('a', 1)",
    "index('a')",
    "title()",
    "isdigit()",
    "encode()",
    "append(1)",
];
const OPERATORS: [&str; 17] =
    ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", " and ", " or ", " in ", " not in ", ">"];

fn expression(rng: &mut ChaCha8Rng, depth: usize) -> String {
    if depth == 0 || rng.random_bool(0.25) {
        let is_name = rng.random();
        return pick(rng, if is_name { &NAMES } else { &LITERALS }).to_owned();
    }
    let inner = expression(rng, depth - 1);
    match rng.random_range(0..15) {
        0..=2 => format!("{inner}{}{}", pick(rng, &OPERATORS), expression(rng, depth - 1)),
        3..=5 => format!("({inner})|{}", pick(rng, &FILTERS)),
        6 => format!("{inner} is {}{}", if rng.random() { "not " } else { "" }, pick(rng, &TESTS)),
        7 | 8 => format!("({inner}).{}", pick(rng, &METHODS)),
        9 => format!("({inner})[{}]", expression(rng, depth - 1)),
        10 => format!("({inner})[{}:{}:{}]", pick(rng, &LITERALS), pick(rng, &LITERALS), pick(rng, &["", "-1", "2", "0"])),
        11 => format!("{} if {inner} else {}", expression(rng, depth - 1), expression(rng, depth - 1)),
        12 => format!("[{inner}, {}]", expression(rng, depth - 1)),
        13 => format!("{{{}: {inner}}}", pick(rng, &LITERALS)),
        _ => {
            let call = pick(
                rng,
                &["range", "dict", "namespace", "raise_exception", "strftime_now", "lipsum", "cycler", "joiner", "debug", "f"],
            );
            format!("{call}({inner})")
        }
    }
}

fn statements(rng: &mut ChaCha8Rng, depth: usize) -> String {
    (0..rng.random_range(1..4)).map(|_| statement(rng, depth)).collect()
}

fn statement(rng: &mut ChaCha8Rng, depth: usize) -> String {
    let dash = if rng.random_bool(0.2) { "-" } else { "" };
    let e = expression(rng, 3);
    if depth == 0 {
        return format!("{{{{{dash} {e} }}}}");
    }
    let body = statements(rng, depth - 1);
    match rng.random_range(0..16) {
        0..=2 => format!("{{%{dash} for m in {e} %}}{body}{{% endfor %}}"),
        3 => format!("{{% for a, b in {e} if a %}}{body}{{% else %}}x{{% endfor {dash}%}}"),
        4 | 5 => format!("{{% if {e} %}}{body}{{% elif x %}}{{% else %}}{body}{{% endif %}}"),
        6 => format!("{{% set x = {e} %}}{body}"),
        7 => format!("{{% set ns = namespace(x={e}) %}}{{% set ns.x = {} %}}{body}", expression(rng, 2)),
        8 => format!("{{% set x %}}{body}{{% endset %}}{{{{ x }}}}"),
        9 => format!("{{% macro f(a, b={e}) %}}{body}{{% endmacro %}}{{{{ f({e}) }}}}"),
        10 => format!("{{% call f({e}) %}}{body}{{% endcall %}}"),
        11 => format!("{{% filter {} %}}{body}{{% endfilter %}}", pick(rng, &FILTERS)),
        12 => format!("{{% generation %}}{body}{{% endgeneration %}}"),
        13 => format!("{{% raw %}}{body}{{% endraw %}}{{# {e} #}}"),
        14 => format!("{{% with x = {e} %}}{body}{{% endwith %}}{{% do {e} %}}"),
        _ => {
            let odd = [
                "{% break %}",
                "{% continue %}",
                "{% include 'chat_template' %}",
                "{% import 'chat_template' as f %}",
                "{% extends 'chat_template' %}",
                "{% block b %}{% endblock %}",
                "{% autoescape true %}",
                "{% endfor %}",
            ];
            format!("{}{body}", pick(rng, &odd))
        }
    }
}

/// A unit that recurs: what a parser or a loop may do for ever.
fn repeated(rng: &mut ChaCha8Rng) -> String {
    const UNITS: [(&str, &str, &str); 16] = [
        ("{{ ", "-", "1 }}"),
        ("{{ ", "not ", "1 }}"),
        ("{{ ", "(", "1 }}"),
        ("{{ ", "[", "1 }}"),
        ("{{ ", "{1:", "1 }}"),
        ("{{ 1", "+1", " }}"),
        ("{{ 'a'", "~'a'", " }}"),
        ("{{ 1", "**1", " }}"),
        ("{{ a", ".a", " }}"),
        ("{{ a", "[0]", " }}"),
        ("{{ a", "()", " }}"),
        ("{{ 1", "|string", " }}"),
        ("{{ ", "1 if 1 else ", "1 }}"),
        ("", "{% if 1 %}", ""),
        ("{% if 1 %}", "{% elif 1 %}", "{% endif %}"),
        ("", "{% for m in messages %}", ""),
    ];
    let (prefix, unit, suffix) = UNITS.choose(rng).expect("a unit");
    let times = 1 << rng.random_range(0..15);
    format!("{prefix}{}{suffix}", unit.repeat(times))
}

fn source(files: &Files, rng: &mut ChaCha8Rng) -> String {
    match rng.random_range(0..10) {
        0..=4 => statements(rng, 3),
        5 => {
            let written = statements(rng, 2);
            damaged(&written, rng)
        }
        6 | 7 => {
            let template = files.templates.choose(rng).expect("a golden template");
            damaged(template, rng)
        }
        8 if rng.random_bool(0.3) => repeated(rng),
        8 => text(rng),
        _ => {
            // Grown without end.
            format!(
                "{{% set ns = namespace(x={}) %}}{{% for m in range({}) %}}{{% set ns.x = {} %}}{{% endfor %}}{{{{ ns.x }}}}",
                expression(rng, 2),
                pick(rng, &["3", "40", "4000", "99999"]),
                expression(rng, 3).replace("undefined_thing", "ns.x"),
            )
        }
    }
}

pub fn messages(rng: &mut ChaCha8Rng) -> Vec<Message> {
    let roles = ["user", "assistant", "system", "tool", ""];
    (0..rng.random_range(1..4))
        .map(|_| Message {
            role: pick(rng, &roles).into(),
            content: MessageContent::Text(text(rng)),
            media: Vec::new(),
            extra: if rng.random_bool(0.1) {
                [(text(rng), grammar::value(rng, 2))].into_iter().collect()
            } else {
                serde_json::Map::new()
            },
        })
        .collect()
}

pub fn case(files: &Files, rng: &mut ChaCha8Rng) -> Outcome {
    let source = source(files, rng);
    if files.is_shown {
        println!("{source}");
    }
    let special = SpecialTokens { bos_token: Some("<s>".into()), eos_token: Some("</s>".into()), ..SpecialTokens::default() };
    let kinds = ["ChatTemplate"];
    let template = match ChatTemplate::new(&source, special) {
        Ok(template) => template,
        Err(error) => return refused(&error, &kinds, &["the chat template"]).map_err(|why| format!("{why} of {source}")),
    };
    let messages = messages(rng);
    let mut options = RenderOptions { now: std::time::UNIX_EPOCH, ..RenderOptions::default() };
    if rng.random_bool(0.1) {
        options.extra.insert("x".into(), json!({ "ns": grammar::value(rng, 3) }));
    }
    match template.render(&messages, &options) {
        Ok(_) => Ok("rendered".into()),
        Err(error) => refused(&error, &kinds, &["the chat template rejected"])
            .map_err(|why| format!("{why} of {source}"))
            .map(|o| format!("{o} in a render")),
    }
}
