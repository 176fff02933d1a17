//! Grammars that nobody would write: each is compiled and gone on with for a while, or refused by name.

use engine::{Engine, Grammar};
use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::{
    grammar::{self, damage, damaged, number, pick, text},
    kinds::{Outcome, refused},
};

const REGEXES: [&str; 10] = [
    "[a-z]{1,8}",
    "(a|aa|b)*c",
    "(.*a.{20}){3}",
    "((x{1,50}){1,50}){1,50}",
    "\\d+(\\.\\d+)?",
    "(?i)yes|no",
    "[^\\x00-\\x7f]*",
    "(a+)+b",
    "\\p{L}{2,9}",
    "^a$",
];

const RULES: [&str; 5] = [
    "start: \"a\" B | start \"c\"\nB: /[b-d]{1,9}/\n",
    "start: a b\na: \"x\" a | \"y\"\nb[lazy]: /.*z/\n",
    "start: %json {\"type\": \"integer\"} /[ ]?/ \"!\"\n",
    "start: (\"a\" | \"b\"){2,40}\n%ignore /[ ]+/\n",
    "start: A\nA: /[a-z]+/ & /.*x.*/ & ~/.*y.*/\n",
];

const KEYWORDS: [&str; 30] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "anyOf",
    "oneOf",
    "allOf",
    "enum",
    "const",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "$ref",
    "$defs",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "not",
    "x-guidance",
    "title",
    "uniqueItems",
];

fn part(rng: &mut ChaCha8Rng, key: &str, depth: usize) -> Value {
    let one = |rng: &mut ChaCha8Rng| schema(rng, depth.saturating_sub(1));
    match key {
        "type" => json!(pick(rng, &["object", "array", "string", "integer", "number", "boolean", "null", "thing"])),
        "properties" | "$defs" | "patternProperties" => {
            let count = rng.random_range(0..4);
            (0..count)
                .map(|i| (if rng.random() { format!("p{i}") } else { text(rng) }, one(rng)))
                .collect::<serde_json::Map<_, _>>()
                .into()
        }
        "items" | "additionalProperties" | "not" => one(rng),
        "anyOf" | "oneOf" | "allOf" | "prefixItems" => (0..rng.random_range(0..4)).map(|_| one(rng)).collect(),
        "required" => json!(["p0", text(rng)]),
        "pattern" => json!(damaged(pick(rng, &REGEXES), rng)),
        "format" => json!(pick(rng, &["date", "uuid", "email", "ipv4", "uri", "nothing"])),
        "$ref" => json!(pick(rng, &["#", "#/$defs/p0", "#/$defs/none", "https://a.b/c", "#/properties/p0"])),
        "enum" => (0..rng.random_range(0..5)).map(|_| grammar::value(rng, 2)).collect(),
        "const" => grammar::value(rng, 2),
        _ => number(rng),
    }
}

fn schema(rng: &mut ChaCha8Rng, depth: usize) -> Value {
    if depth == 0 && rng.random_bool(0.8) {
        return json!({ "type": pick(rng, &["string", "integer", "boolean"]) });
    }
    if depth == 0 {
        return grammar::value(rng, 1);
    }
    let count = rng.random_range(0..5);
    let keys: Vec<&str> = (0..count).map(|_| *KEYWORDS.choose(rng).expect("a keyword")).collect();
    keys.into_iter().map(|key| (key.to_owned(), part(rng, key, depth))).collect::<serde_json::Map<_, _>>().into()
}

/// Most kinds of parts, one in the other.
fn tag(rng: &mut ChaCha8Rng) -> Value {
    let any = json!({ "type": "any_text" });
    let begin = pick(rng, &["<a>", "<a", "<|im_start|>", "#"]);
    let inner = match rng.random_range(0..4) {
        0 => json!({ "type": "json_schema", "json_schema": schema(rng, 2) }),
        1 => json!({ "type": "regex", "pattern": *REGEXES.choose(rng).expect("one") }),
        2 => json!({ "type": "or", "elements": [any, { "type": "const_string", "value": text(rng) }] }),
        _ => any.clone(),
    };
    let tag = json!({ "type": "tag", "begin": begin, "content": inner, "end": ["</a>", text(rng)] });
    let triggered =
        json!({ "type": "triggered_tags", "triggers": [&begin[..1]], "tags": [tag], "at_least_one": rng.random::<bool>() });
    let times = json!({ "type": "repeat", "min": 0, "max": rng.random_range(-1..2000), "content": tag });
    let format = match rng.random_range(0..4) {
        0 => tag,
        1 => triggered,
        2 => json!({ "type": "sequence", "elements": [times, triggered] }),
        _ => json!({ "type": "tags_with_separator", "separator": text(rng), "tags": [tag] }),
    };
    json!({ "type": "structural_tag", "format": format })
}

fn any(rng: &mut ChaCha8Rng) -> Grammar {
    match rng.random_range(0..8) {
        0 => Grammar::Regex(damaged(pick(rng, &REGEXES), rng)),
        1 => {
            Grammar::Regex((0..rng.random_range(1..40)).map(|_| *REGEXES.choose(rng).expect("one")).collect::<Vec<_>>().join("|"))
        }
        2 => Grammar::Lark(damaged(pick(rng, &RULES), rng)),
        3 => Grammar::Choice((0..rng.random_range(0..9)).map(|_| text(rng)).collect()),
        4 if rng.random() => {
            let mut tag = tag(rng);
            damage(&mut tag, rng);
            Grammar::StructuralTag(tag)
        }
        4 => Grammar::Llguidance(json!({ "grammars": [{ "json_schema": schema(rng, 3) }] }).to_string()),
        _ => {
            let mut schema = schema(rng, 4);
            if rng.random_bool(0.3) {
                damage(&mut schema, rng);
            }
            Grammar::JsonSchema(schema)
        }
    }
}

/// Compiles a grammar, and takes tokens that it allows.
pub fn case(engine: &Engine, is_shown: bool, rng: &mut ChaCha8Rng) -> Outcome {
    let grammar = any(rng);
    if is_shown {
        println!("{grammar:?}");
    }
    let compiled = match engine.grammars().compile(&grammar) {
        Ok(compiled) => compiled,
        Err(error) => return refused(&error, &["Grammar"], &[]),
    };
    let Some(mut constraint) = compiled.begin(1).pop() else { return Err("no choice begins".into()) };
    let vocab_size = engine.vocab_size() as u32;
    for _ in 0..24 {
        if constraint.has_ended() {
            return Ok("ended".into());
        }
        let mask = match constraint.mask() {
            Ok(mask) => mask,
            // A limit of a step, or what the vocabulary cannot spell.
            Err(error) => return refused(&error, &["InvalidArgument"], &["grammar"]),
        };
        let allowed: Vec<u32> = (0..vocab_size).filter(|token| mask.allows(*token)).collect();
        let Some(token) = allowed.choose(rng) else { return Err("a mask that allows nothing".into()) };
        if let Err(error) = constraint.take_allowed(*token) {
            return refused(&error, &["InvalidArgument"], &["too complex"]);
        }
    }
    Ok("goes on".into())
}
