//! Structural tags: free text with parts of a given form, as vLLM and xgrammar describe them, as rules of Lark.

use serde_json::{Map, Value, json};

use super::{GrammarFault, Rules, compiler, escaped, rules::ANY, schema};
use crate::{EngineError, Tokenizer};

/// Times that a part may be repeated at most.
const MAX_REPEATS: u64 = 1000;
/// What a format may be.
const KINDS: &str = "const_string, json_schema, regex, any_text, sequence, or, optional, plus, star, repeat, tag, triggered_tags \
                     or tags_with_separator";

/// The rules of a structural tag: an object with `format`, or with `structures` and `triggers`, the older form.
pub(super) fn rules(tag: &Value, tokenizer: &Tokenizer) -> Result<String, EngineError> {
    let fields = Fields::of(tag, "structural_tag", &["type", "format", "structures", "triggers"])?;
    if fields.map.get("type").is_some_and(|kind| kind != "structural_tag") {
        return Err(fields.invalid("has a `type` that is not \"structural_tag\""));
    }
    let mut writer = Writer { rules: Rules::new(tokenizer) };
    let end = End { text: Some(writer.rules.any_text()), ..UNMARKED };
    let start = match (fields.map.get("format"), fields.map.get("structures")) {
        (Some(_), Some(_)) => return Err(fields.invalid("has `format` and `structures`: leave one out")),
        (Some(format), None) if !fields.map.contains_key("triggers") => writer.format(format, &end, "format")?,
        (Some(_), None) => return Err(fields.invalid("has `triggers` beside `format`: put them into a `triggered_tags`")),
        (None, Some(structures)) => {
            let tags = structures.as_array().ok_or_else(|| fields.invalid("has `structures` that are not a list"))?;
            let tags = tags.iter().enumerate().map(|(i, structure)| {
                let place = format!("structures[{i}]");
                let fields = Fields::of(structure, &place, &["begin", "schema", "end"])?;
                let content = json!({ "type": "json_schema", "json_schema": fields.given("schema")? });
                Ok(json!({ "begin": fields.given("begin")?, "content": content, "end": fields.given("end")? }))
            });
            let tags = tags.collect::<Result<Vec<Value>, EngineError>>()?;
            let format = json!({ "type": "triggered_tags", "triggers": fields.given("triggers")?, "tags": tags });
            writer.format(&format, &end, "structural_tag")?
        }
        (None, None) => return Err(fields.invalid("has neither `format` nor `structures`")),
    };
    Ok(format!("start: {start}\n{}", writer.rules.text))
}

fn invalid(place: &str, why: &str) -> EngineError {
    let place: String = place.chars().take(200).collect();
    GrammarFault::Syntax.error(format!("the structural tag at {place} {why}"))
}

/// An object of the structural tag, all of whose keys are known.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    place: &'a str,
}

impl<'a> Fields<'a> {
    fn of(value: &'a Value, place: &'a str, known: &[&str]) -> Result<Self, EngineError> {
        let map = value.as_object().ok_or_else(|| invalid(place, "must be an object"))?;
        let fields = Self { map, place };
        match map.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => {
                let key: String = key.chars().take(64).collect();
                Err(fields.invalid(&format!("has `{key}`, which is not honoured: leave it out")))
            }
            None => Ok(fields),
        }
    }

    fn invalid(&self, why: &str) -> EngineError {
        invalid(self.place, why)
    }

    fn given(&self, key: &str) -> Result<&'a Value, EngineError> {
        self.map.get(key).ok_or_else(|| self.invalid(&format!("needs `{key}`")))
    }

    fn text(&self, key: &str) -> Result<&'a str, EngineError> {
        self.given(key)?.as_str().ok_or_else(|| self.invalid(&format!("must have a text as `{key}`")))
    }

    fn list(&self, key: &str) -> Result<&'a [Value], EngineError> {
        let list = self.given(key)?.as_array().filter(|list| !list.is_empty());
        Ok(list.ok_or_else(|| self.invalid(&format!("must have a list of one or more as `{key}`")))?)
    }

    /// A list of texts of a character or more.
    fn texts(&self, key: &str) -> Result<Vec<&'a str>, EngineError> {
        let text = |value: &'a Value| value.as_str().filter(|text| !text.is_empty());
        let texts: Option<Vec<&str>> = self.list(key)?.iter().map(text).collect();
        texts.ok_or_else(|| self.invalid(&format!("must have texts of a character or more in `{key}`")))
    }

    /// Whether a key that is not given unless asked for says so.
    fn is_true(&self, key: &str) -> Result<bool, EngineError> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.invalid(&format!("must have true or false as `{key}`"))),
        }
    }

    /// Refuses a value of a key that is not what holds anyway.
    fn only(&self, key: &str, expected: &Value) -> Result<(), EngineError> {
        match self.map.get(key) {
            Some(value) if value != expected && !value.is_null() => {
                Err(self.invalid(&format!("has a `{key}` that is not honoured: leave it out, or send {expected}")))
            }
            _ => Ok(()),
        }
    }
}

/// What follows a part.
struct End {
    /// The rule of it; empty at the answer's end.
    closing: String,
    /// The same as a terminal, where it is text.
    terminal: Option<String>,
    /// The rule of any text up to it, with it; `None` where text has no end that could be told.
    text: Option<String>,
}

impl End {
    /// The rule of any text up to it.
    fn free(&self, place: &str) -> Result<String, EngineError> {
        let why = "is free text without an end: put it last, or into a tag with an `end`";
        self.text.clone().ok_or_else(|| invalid(place, why))
    }
}

/// Something follows that does not tell where a text ends.
const UNMARKED: End = End { closing: String::new(), terminal: None, text: None };

struct Writer<'a> {
    rules: Rules<'a>,
}

impl Writer<'_> {
    /// The rule of a format and of what follows it.
    fn format(&mut self, format: &Value, end: &End, place: &str) -> Result<String, EngineError> {
        let kind = format.get("type").and_then(Value::as_str).ok_or_else(|| invalid(place, "needs a `type`"))?;
        let of = |keys: &[&str]| Fields::of(format, place, &[&["type"], keys].concat());
        let closing = &end.closing;
        let body = match kind {
            "const_string" => format!("{} {closing}", self.rules.literal(of(&["value"])?.text("value")?)),
            "json_schema" => {
                let fields = of(&["json_schema", "style", "any_order"])?;
                fields.only("style", &"json".into())?;
                fields.only("any_order", &false.into())?;
                let schema = fields.given("json_schema")?;
                let schema = schema::prepared(schema)?;
                let value = self.rules.rule(&format!("%json {schema}"));
                format!("{value} {closing}")
            }
            "regex" => self.regex(&of(&["pattern"])?, end)?,
            "any_text" => {
                let fields = of(&["excludes", "max_tokens", "max_chars"])?;
                fields.only("excludes", &json!([]))?;
                fields.only("max_tokens", &Value::Null)?;
                fields.only("max_chars", &Value::Null)?;
                end.free(place)?
            }
            "sequence" => {
                let elements = of(&["elements"])?.list("elements")?;
                let mut terms = Vec::new();
                for (i, element) in elements.iter().enumerate() {
                    let end = if i + 1 == elements.len() { end } else { &UNMARKED };
                    terms.push(self.format(element, end, &format!("{place}.elements[{i}]"))?);
                }
                terms.join(" ")
            }
            "or" => {
                let mut rules = Vec::new();
                for (i, element) in of(&["elements"])?.list("elements")?.iter().enumerate() {
                    rules.push(self.format(element, end, &format!("{place}.elements[{i}]"))?);
                }
                rules.join(" | ")
            }
            "optional" | "plus" | "star" | "repeat" => self.repeated(kind, format, end, place)?,
            "tag" => self.tag(format, 0, end, place)?,
            "triggered_tags" => self.triggered(format, end, place)?,
            "tags_with_separator" => self.separated(format, end, place)?,
            other => {
                let other: String = other.chars().take(32).collect();
                return Err(invalid(place, &format!("has the type {other:?}, which is not honoured; give {KINDS}")));
            }
        };
        Ok(self.rules.rule(&body))
    }

    /// One terminal with the text behind it: either may begin with what the other ends with.
    fn regex(&mut self, fields: &Fields<'_>, end: &End) -> Result<String, EngineError> {
        let pattern = fields.text("pattern")?;
        compiler::check_depth(pattern)?;
        if pattern.is_empty() {
            return Err(fields.invalid("has an empty `pattern`"));
        }
        let pattern = format!("/({})/", llguidance::regex_to_lark(pattern, ""));
        Ok(match &end.terminal {
            Some(behind) => self.rules.terminal(&format!("{pattern} {behind}")),
            None => format!("{} {}", self.rules.terminal(&pattern), end.closing),
        })
    }

    fn repeated(&mut self, kind: &str, format: &Value, end: &End, place: &str) -> Result<String, EngineError> {
        let keys: &[&str] = if kind == "repeat" { &["type", "content", "min", "max"] } else { &["type", "content"] };
        let fields = Fields::of(format, place, keys)?;
        let (content, inner) = (fields.given("content")?, format!("{place}.content"));
        let closing = &end.closing;
        if kind == "optional" {
            let content = self.format(content, end, &inner)?;
            return Ok(if closing.is_empty() { format!("{content}?") } else { format!("{content} | {closing}") });
        }
        let content = self.format(content, &UNMARKED, &inner)?;
        let times = match kind {
            "plus" => "+".to_owned(),
            "star" => "*".to_owned(),
            _ => {
                let why = format!("must have numbers of 0 to {MAX_REPEATS} as `min` and `max`, or -1 as `max` for no limit");
                let count = |key| fields.given(key).map(|count| count.as_u64().filter(|count| *count <= MAX_REPEATS));
                let min = count("min")?.ok_or_else(|| fields.invalid(&why))?;
                let max = match fields.given("max")? {
                    max if *max == -1 => String::new(),
                    _ => count("max")?.filter(|max| *max >= min.max(1)).ok_or_else(|| fields.invalid(&why))?.to_string(),
                };
                format!("{{{min},{max}}}")
            }
        };
        Ok(format!("({content}){times} {closing}"))
    }

    /// A tag without so many bytes at its beginning.
    fn tag(&mut self, tag: &Value, from: usize, end: &End, place: &str) -> Result<String, EngineError> {
        if tag.get("type").is_some_and(|kind| kind != "tag") {
            return Err(invalid(place, "must be of the type \"tag\""));
        }
        let fields = Fields::of(tag, place, &["type", "begin", "content", "end"])?;
        let begin = self.rules.literal(&fields.text("begin")?[from..]);
        let ends = match fields.given("end")? {
            Value::String(text) if text.is_empty() => Vec::new(),
            Value::String(text) => vec![text.as_str()],
            Value::Array(_) => fields.texts("end")?,
            _ => return Err(fields.invalid("must have a text or a list of texts as `end`")),
        };
        let own = if ends.is_empty() { UNMARKED } else { self.end(&ends) };
        let content = self.format(fields.given("content")?, &own, &format!("{place}.content"))?;
        Ok(format!("{begin} {content} {}", end.closing))
    }

    fn end(&mut self, ends: &[&str]) -> End {
        let all: Vec<String> = ends.iter().map(|text| self.rules.literal(text)).collect();
        let closing = self.rules.rule(&all.join(" | "));
        let (tokens, texts): (Vec<&str>, Vec<&str>) = ends.iter().partition(|text| self.rules.has_special(text));
        let terminal = tokens.is_empty().then(|| self.rules.terminal(&all.join(" | ")));
        let mut ways: Vec<String> = tokens.into_iter().map(|text| self.rules.up_to(text)).collect();
        if !texts.is_empty() {
            let texts: Vec<String> = texts.into_iter().map(escaped).collect();
            ways.push(self.rules.lazy(&format!("/{ANY}*({})/", texts.join("|"))));
        }
        End { closing, terminal, text: Some(self.rules.rule(&ways.join(" | "))) }
    }

    /// Text in which each trigger begins a tag.
    fn triggered(&mut self, format: &Value, end: &End, place: &str) -> Result<String, EngineError> {
        let keys = ["type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"];
        let fields = Fields::of(format, place, &keys)?;
        fields.only("excludes", &json!([]))?;
        let (triggers, tags) = (fields.texts("triggers")?, fields.list("tags")?);
        let (must_begin, is_one) = (fields.is_true("at_least_one")?, fields.is_true("stop_after_first")?);
        let text = end.free(place)?;
        // What is read before a tag, up to where they part.
        let mut heads: Vec<(String, Vec<String>)> = Vec::new();
        let mut whole = Vec::new();
        let mut is_used = vec![false; triggers.len()];
        for (i, tag) in tags.iter().enumerate() {
            let place = format!("{place}.tags[{i}]");
            let begin = tag.get("begin").and_then(Value::as_str).unwrap_or_default();
            let own: Vec<usize> = (0..triggers.len()).filter(|trigger| begin.starts_with(triggers[*trigger])).collect();
            let [trigger] = own[..] else {
                let count = own.len();
                return Err(invalid(&place, &format!("must have a `begin` that begins with one of the `triggers`; {count} do")));
            };
            is_used[trigger] = true;
            let head = self.head(begin, triggers[trigger].len());
            let rest = self.tag(tag, head.len(), &UNMARKED, &place)?;
            let rest = self.rules.rule(&rest);
            whole.push(format!("{} {rest}", self.rules.literal(head)));
            match heads.iter_mut().find(|(other, _)| other == head) {
                Some((_, rests)) => rests.push(rest),
                None => heads.push((head.to_owned(), vec![rest])),
            }
        }
        if let Some(unused) = is_used.iter().position(|is_used| !is_used) {
            return Err(fields.invalid(&format!("has a trigger {:?} with which no tag begins", triggers[unused])));
        }
        let mut later = Vec::new();
        for (head, rests) in heads {
            later.push(format!("{} ({})", self.rules.up_to(&head), rests.join(" | ")));
        }
        let (first, later) = (self.rules.rule(&whole.join(" | ")), self.rules.rule(&later.join(" | ")));
        let closing = &end.closing;
        Ok(match (must_begin, is_one) {
            (true, true) => format!("{first} {closing}"),
            (true, false) => format!("{first} {later}* {text}"),
            (false, true) => format!("{later} {closing} | {text}"),
            (false, false) => format!("{later}* {text}"),
        })
    }

    /// A trigger, with all of a special token that it has a part of.
    fn head<'t>(&self, begin: &'t str, mut end: usize) -> &'t str {
        let mut at = 0;
        while let Some((range, _)) = self.rules.find_special(&begin[at..]) {
            let token = at + range.start..at + range.end;
            if token.start >= end {
                break;
            }
            (at, end) = (token.end, end.max(token.end));
        }
        &begin[..end]
    }

    fn separated(&mut self, format: &Value, end: &End, place: &str) -> Result<String, EngineError> {
        let fields = Fields::of(format, place, &["type", "tags", "separator", "at_least_one", "stop_after_first"])?;
        let mut tags = Vec::new();
        for (i, tag) in fields.list("tags")?.iter().enumerate() {
            tags.push(self.tag(tag, 0, &UNMARKED, &format!("{place}.tags[{i}]"))?);
        }
        let (tag, separator) = (self.rules.rule(&tags.join(" | ")), self.rules.literal(fields.text("separator")?));
        let all = if fields.is_true("stop_after_first")? { tag } else { format!("{tag} ({separator} {tag})*") };
        let all = if fields.is_true("at_least_one")? { all } else { format!("({all})?") };
        Ok(format!("{all} {}", end.closing))
    }
}
