//! Structural tags, and what grammars force.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::Tokenizer;

const VOCAB_SIZE: usize = 512;

fn tokenizer() -> Arc<Tokenizer> {
    let mut tokenizer = Tokenizer::from_file(&goldens::dir().join("text/llama/tokenizer.json")).unwrap();
    tokenizer.add_eos_ids([2]);
    Arc::new(tokenizer)
}

fn begun(tokenizer: &Arc<Tokenizer>, grammar: &Grammar) -> Constraint {
    let compiled = GrammarCompiler::new(Arc::clone(tokenizer), VOCAB_SIZE).compile(grammar);
    compiled.unwrap_or_else(|error| panic!("{grammar:?}: {error}")).begin(1).remove(0)
}

/// How much of an answer may come, and whether it may end there. What spells a special token is one.
fn allowed(tokenizer: &Arc<Tokenizer>, grammar: &Grammar, answer: &str) -> (String, bool) {
    let mut constraint = begun(tokenizer, grammar);
    let mut taken = String::new();
    for id in tokenizer.encode(answer, false).unwrap() {
        if constraint.has_ended() || !constraint.take(id).unwrap() {
            return (taken, false);
        }
        taken.push_str(&tokenizer.token_text(id));
    }
    let ends = constraint.has_ended() || constraint.mask().unwrap().allows(2);
    (taken, ends)
}

fn accepts(tokenizer: &Arc<Tokenizer>, tag: &Value, answer: &str) -> bool {
    let (taken, ends) = allowed(tokenizer, &Grammar::StructuralTag(tag.clone()), answer);
    ends && taken == answer
}

fn check(tokenizer: &Arc<Tokenizer>, tag: &Value, within: &[&str], beyond: &[&str]) {
    for answer in within {
        let (taken, ends) = allowed(tokenizer, &Grammar::StructuralTag(tag.clone()), answer);
        assert!(ends && taken == *answer, "{tag}: {answer:?} is taken as far as {taken:?}");
    }
    for answer in beyond {
        assert!(!accepts(tokenizer, tag, answer), "{tag}: {answer:?} is taken");
    }
}

fn of(format: impl Into<Value>) -> Value {
    json!({ "type": "structural_tag", "format": format.into() })
}

#[test]
fn text_is_free_until_a_trigger_begins_a_tag() {
    let tokenizer = tokenizer();
    let number = json!({ "type": "object", "properties": { "x": { "type": "integer" } }, "required": ["x"], "additionalProperties": false });
    let tag = |name: &str| json!({ "begin": format!("<f={name}>"), "schema": number, "end": "</f>" });
    let older = json!({ "type": "structural_tag", "structures": [tag("one"), tag("two")], "triggers": ["<f="] });
    let newer = |more: Value| {
        let content = json!({ "type": "json_schema", "json_schema": number });
        let tag = |name: &str| json!({ "type": "tag", "begin": format!("<f={name}>"), "content": content, "end": "</f>" });
        let mut format = json!({ "type": "triggered_tags", "triggers": ["<f="], "tags": [tag("one"), tag("two")] });
        format.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        of(format)
    };
    let (call, other) = (r#"<f=one>{"x": 4}</f>"#, r#"<f=two>{"x": 5}</f>"#);
    let many = format!("a {call} <f b{other}{call} c");
    let within = ["", "no < f", call, &many];
    let beyond = ["<f=three>", r#"<f=one>{"y": 4}</f>"#, r#"a<f=one>{"x": 4}<"#, r#"<f=one>{"x": 4}"#];
    check(&tokenizer, &older, &within, &beyond);
    check(&tokenizer, &newer(json!({})), &within, &beyond);
    let first = json!({ "at_least_one": true });
    check(&tokenizer, &newer(first), &[call, &format!("{call}a{other}b")], &["", "a", &format!("a{call}")]);
    let one = json!({ "stop_after_first": true });
    check(&tokenizer, &newer(one), &["", "ab", call, &format!("a{call}")], &[&format!("{call}a"), &format!("{call}{call}")]);
    let both = json!({ "at_least_one": true, "stop_after_first": true });
    check(&tokenizer, &newer(both), &[call, other], &["", "a", &format!("{call}a")]);
}

#[test]
fn parts_of_every_kind_stand_where_the_tag_says() {
    let tokenizer = tokenizer();
    let text = |value: &str| json!({ "type": "const_string", "value": value });
    let digits = json!({ "type": "regex", "pattern": "[0-9]+" });
    let free = json!({ "type": "any_text" });
    let tag = |begin: &str, content: &Value, end: Value| json!({ "type": "tag", "begin": begin, "content": content, "end": end });
    for (format, within, beyond) in [
        (text("a<b"), vec!["a<b"], vec!["", "a", "a<bc"]),
        (free.clone(), vec!["", "anything"], vec![]),
        (json!({ "type": "sequence", "elements": [text("a"), digits, free] }), vec!["a1", "a12 b"], vec!["a", "1"]),
        (
            json!({ "type": "or", "elements": [text("a"), digits, tag("<", &free, json!(">"))] }),
            vec!["a", "07", "<x>"],
            vec!["b"],
        ),
        (json!({ "type": "optional", "content": digits }), vec!["", "3"], vec!["x"]),
        (json!({ "type": "star", "content": text("ab") }), vec!["", "abab"], vec!["aba"]),
        (json!({ "type": "plus", "content": text("ab") }), vec!["ab", "abab"], vec!["", "aba"]),
        (json!({ "type": "repeat", "min": 1, "max": 2, "content": text("ab") }), vec!["ab", "abab"], vec!["", "ababab"]),
        (json!({ "type": "repeat", "min": 2, "max": -1, "content": text("ab") }), vec!["abab", "ababab"], vec!["ab"]),
        (tag("[", &free, json!(["]", "END"])), vec!["[]", "[abENc]", "[abEND"], vec!["[a]b", "[a", "a]"]),
        // What matches may be what ends it.
        (tag("<", &json!({ "type": "regex", "pattern": "[a-z<>/]*" }), json!("</>")), vec!["<ab</>", "<</></>"], vec!["<ab<"]),
        (tag("x", &tag("y", &free, json!("z")), json!("w")), vec!["xyazw"], vec!["xyaz", "xyaw"]),
        (tag("<", &json!({ "type": "optional", "content": digits }), json!(">")), vec!["<>", "<7>"], vec!["<", "<a>"]),
        (tag("{", &text("a"), json!("")), vec!["{a"], vec!["{", "{ab"]),
        (
            json!({ "type": "tags_with_separator", "separator": ", ", "tags": [tag("<", &digits, json!(">"))] }),
            vec!["", "<1>", "<1>, <2>"],
            vec!["<1><2>", "<1>, ", "x<1>"],
        ),
        (
            json!({ "type": "tags_with_separator", "separator": ",", "at_least_one": true, "stop_after_first": true,
                "tags": [tag("<", &digits, json!(">"))] }),
            vec!["<1>"],
            vec!["", "<1>,<2>"],
        ),
        // Free text with tags, up to the end of what is around it.
        (
            tag(
                "(",
                &json!({ "type": "triggered_tags", "triggers": ["#"], "tags": [tag("#", &digits, json!(";"))] }),
                json!(")"),
            ),
            vec!["()", "(a#1;b)", "(#1;#2;)"],
            vec!["(a#b)", "(a#1;b", "(a)b"],
        ),
    ] {
        check(&tokenizer, &of(format), &within, &beyond);
    }
}

#[test]
fn special_tokens_in_a_tag_are_tokens() {
    let tokenizer = tokenizer();
    let special = "<|im_start|>";
    let id = tokenizer.token_to_id(special).unwrap();
    let tag = json!({ "begin": format!("{special}a"), "content": { "type": "regex", "pattern": "[0-9]" }, "end": special });
    for trigger in ["<|im", special] {
        let tag = of(json!({ "type": "triggered_tags", "triggers": [trigger], "tags": [tag] }));
        check(&tokenizer, &tag, &["b", "b<|im_start|>a1<|im_start|>c"], &["b<|im_start|>b", "<|im_start|>"]);
        assert!(begun(&tokenizer, &Grammar::StructuralTag(tag)).take(id).unwrap());
    }
}

#[test]
fn times_have_no_leap_seconds() {
    let tokenizer = tokenizer();
    for (schema, within, beyond) in [
        (json!({ "format": "time" }), "02:28:59.5Z", "02:28:60Z"),
        (json!({ "format": "time" }), "02:28:09+05:30", "02:28:60+05:30"),
        (json!({ "format": "date-time" }), "2024-02-29T02:28:00Z", "2024-02-29T02:28:60Z"),
        (json!({ "format": "time", "pattern": "^0" }), "02:28:59Z", "12:28:59Z"),
        (json!({ "format": "time", "allOf": [{ "pattern": "Z$" }] }), "02:28:59Z", "02:28:60Z"),
    ] {
        let mut schema = schema;
        schema["type"] = "string".into();
        let grammar = Grammar::JsonSchema(schema);
        let quoted = |text: &str| format!("\"{text}\"");
        assert_eq!(allowed(&tokenizer, &grammar, &quoted(within)), (quoted(within), true), "{grammar:?}");
        assert!(!allowed(&tokenizer, &grammar, &quoted(beyond)).1, "{grammar:?}: {beyond}");
    }
}

#[test]
fn what_of_a_structural_tag_is_not_honoured_is_named() {
    let tokenizer = tokenizer();
    let compiler = GrammarCompiler::new(tokenizer, VOCAB_SIZE);
    let free = json!({ "type": "any_text" });
    let tag = |begin: &str| json!({ "begin": begin, "content": free, "end": ">" });
    let triggered = |triggers: Value, tags: Value| of(json!({ "type": "triggered_tags", "triggers": triggers, "tags": tags }));
    let deep = (0..100).fold(free.clone(), |inner, _| json!({ "type": "tag", "begin": "a", "content": inner, "end": "b" }));
    for (tag, name) in [
        (json!([]), "must be an object"),
        (json!({}), "neither `format` nor `structures`"),
        (json!({ "type": "other", "format": free }), "`type`"),
        (json!({ "format": free, "triggers": ["a"] }), "`triggers`"),
        (json!({ "format": free, "structures": [] }), "leave one out"),
        (json!({ "structures": [], "triggers": ["a"] }), "`tags`"),
        (json!({ "structures": [{ "begin": "a", "end": "b" }], "triggers": ["a"] }), "`schema`"),
        (json!({ "structures": [{ "begin": "a", "schema": { "not": {} }, "end": "b" }], "triggers": ["a"] }), "`not`"),
        (of(json!({ "type": "grammar", "grammar": "root ::= \"a\"" })), "\"grammar\""),
        (of(json!({ "type": "token_triggered_tags" })), "\"token_triggered_tags\""),
        (of(json!({ "type": "any_text", "max_tokens": 5 })), "`max_tokens`"),
        (of(json!({ "type": "any_text", "excludes": ["a"] })), "`excludes`"),
        (of(json!({ "type": "json_schema", "json_schema": {}, "style": "qwen_xml" })), "`style`"),
        (of(json!({ "type": "json_schema" })), "`json_schema`"),
        (of(json!({ "type": "regex", "pattern": "" })), "`pattern`"),
        (of(json!({ "type": "regex", "pattern": "[" })), "unclosed"),
        (of(json!({ "type": "sequence", "elements": [free, free] })), "elements[0]"),
        (of(json!({ "type": "star", "content": free })), "without an end"),
        (of(json!({ "type": "repeat", "content": { "type": "const_string", "value": "a" }, "min": 1, "max": 5000 })), "`max`"),
        (triggered(json!(["x"]), json!([tag("y")])), "0 do"),
        (triggered(json!(["a", "ab"]), json!([tag("abc")])), "2 do"),
        (triggered(json!(["a", "b"]), json!([tag("ac")])), "\"b\""),
        (triggered(json!([""]), json!([tag("ac")])), "`triggers`"),
    ] {
        let Err(error) = compiler.compile(&Grammar::StructuralTag(tag.clone())) else { panic!("{tag} was accepted") };
        let EngineError::Grammar { fault, message } = error else { panic!("{tag}: {error}") };
        assert!(message.contains(name), "{tag}: {message}");
        assert_ne!(fault, GrammarFault::TooComplex, "{tag}");
    }
    assert!(compiler.compile(&Grammar::StructuralTag(of(deep))).is_ok());
}

#[test]
fn forced_text_is_told_in_its_tokens() {
    let tokenizer = tokenizer();
    let forced = |grammar: &str, taken: &str| {
        let mut constraint = begun(&tokenizer, &Grammar::Lark(grammar.to_owned()));
        let mut last = None;
        for id in tokenizer.encode(taken, false).unwrap() {
            assert!(constraint.take(id).unwrap(), "{grammar}");
            last = Some(id);
        }
        let mut ids = Vec::new();
        constraint.forced(last, &mut ids).unwrap();
        // Nothing is taken by asking, and all of it may come.
        let mut again = Vec::new();
        constraint.forced(last, &mut again).unwrap();
        assert_eq!(ids, again);
        for id in &ids {
            assert!(constraint.take(*id).unwrap(), "{grammar}");
        }
        tokenizer.decode(&ids, false)
    };
    assert_eq!(forced("start: /[a-z]/", ""), "");
    assert_eq!(forced("start: \"QZ7\"", ""), "QZ7");
    assert_eq!(forced("start: \"QZ7\" | \"Q%\"", ""), "Q");
    assert_eq!(forced("start: \"QZ7\" | \"Q%\"", "QZ"), "7");
    assert_eq!(forced("start: \"QZ\" <|im_start|> \"Zw\" /[%J]/", "Q"), "Z<|im_start|>Zw");
    // With its second letter the first may be another token.
    let two = ["h", "he"].map(|text| tokenizer.token_to_id(text).unwrap());
    assert_eq!(tokenizer.encode_plain("he").unwrap(), two[1..]);
    assert_eq!(forced("start: \"h\" /[a-z]/", ""), "");
    assert_eq!(forced("start: \"h\" /[A-Z]/", ""), "h");
    assert_eq!(forced("start: \"\u{4e2d}\" | \"\u{4e2e}\"", ""), "");
}

/// Two ways to read each text of at least two letters, and more with each letter.
fn ambiguous() -> Grammar {
    Grammar::Lark("start: s\ns: s s | \"a\"".into())
}

#[test]
fn a_grammar_that_becomes_too_complex_says_so() {
    let tokenizer = tokenizer();
    let mut constraint = begun(&tokenizer, &ambiguous());
    let id = tokenizer.encode("a", false).unwrap()[0];
    let error = (0..1000).find_map(|_| constraint.take(id).err()).expect("an end");
    assert!(matches!(&error, EngineError::Grammar { fault: GrammarFault::TooComplex, message } if message.contains("too complex")));
    assert_eq!(constraint.fault(), Some(GrammarFault::TooComplex));
}
