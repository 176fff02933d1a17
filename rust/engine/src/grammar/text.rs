//! Texts as JSON Schema limits them, where they are not written as JSON: expressions that match all of a text.

use llguidance::regex_to_lark;
use regex_syntax::hir::{Dot, Hir, HirKind, Look, Repetition};
use serde_json::{Map, Value};

use super::{ANY, escaped};

const DATE: &str =
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))";
const TIME: &str = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])";
const BYTE: &str = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
/// A repetition has no larger number.
const MAX_LENGTH: u64 = 1 << 20;

/// The keywords that limit a text.
pub(crate) const OF_TEXTS: [&str; 6] = ["enum", "const", "pattern", "format", "minLength", "maxLength"];

/// One limit of a text.
pub(crate) struct TextLimit {
    /// Matches all of each text within it, and of no other; of Lark's, without slashes around it.
    pub expression: String,
    /// Whether no text at all is within it.
    pub may_be_empty: bool,
}

/// The limits that a schema sets to a text; a keyword that cannot be enforced is the error.
pub(crate) fn text_limit(keyword: &str, schema: &Map<String, Value>) -> Result<Option<TextLimit>, String> {
    let value = schema.get(keyword);
    let expression = match (keyword, value) {
        (_, None) => return Ok(None),
        ("minLength" | "maxLength", Some(_)) => return length(keyword, schema),
        ("const", Some(Value::String(text))) => return Ok(Some(one_of(&[text]))),
        ("enum", Some(Value::Array(values))) => {
            let texts: Vec<&str> = values.iter().filter_map(Value::as_str).collect();
            return if texts.is_empty() { Err("has no texts".into()) } else { Ok(Some(one_of(&texts))) };
        }
        ("pattern", Some(Value::String(pattern))) => {
            let whole = whole(pattern)?;
            let may_be_empty = whole.properties().minimum_len() == Some(0);
            return Ok(Some(TextLimit { expression: regex_to_lark(&whole.to_string(), ""), may_be_empty }));
        }
        ("format", Some(Value::String(format))) => match format.as_str() {
            "date" => DATE.to_owned(),
            "time" => TIME.to_owned(),
            "date-time" => format!("{DATE}T{TIME}"),
            "ipv4" => format!(r"({BYTE}\.){{3}}{BYTE}"),
            "uuid" => "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}".to_owned(),
            other => return Err(format!("is {other:?}")),
        },
        _ => return Err("has no text".into()),
    };
    Ok(Some(TextLimit { expression, may_be_empty: false }))
}

/// Both lengths together, for the first of them.
fn length(keyword: &str, schema: &Map<String, Value>) -> Result<Option<TextLimit>, String> {
    if keyword == "maxLength" && schema.contains_key("minLength") {
        return Ok(None);
    }
    let limit = |key: &str| match schema.get(key) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| format!("has a `{key}` that is no count")),
    };
    let (min, max) = (limit("minLength")?.unwrap_or(0), limit("maxLength")?);
    if min > MAX_LENGTH || max.is_some_and(|max| max < min) {
        return Err(format!("is above {MAX_LENGTH}, or above `maxLength`"));
    }
    let max = max.filter(|max| *max <= MAX_LENGTH).map_or(String::new(), |max| max.to_string());
    Ok(Some(TextLimit { expression: format!("{ANY}{{{min},{max}}}"), may_be_empty: min == 0 }))
}

fn one_of(texts: &[&str]) -> TextLimit {
    let all: Vec<String> = texts.iter().map(|text| escaped(text).replace('\n', "\\n")).collect();
    TextLimit { expression: all.join("|"), may_be_empty: texts.contains(&"") }
}

/// What matches all of the texts in which this pattern of JSON Schema is found.
fn whole(pattern: &str) -> Result<Hir, String> {
    let parsed = regex_syntax::Parser::new().parse(&regex_to_lark(pattern, "dw"));
    let parsed = parsed.map_err(|error| format!("cannot be read: {}", error.to_string().lines().last().unwrap_or_default()))?;
    let whole = from_anywhere(&from_anywhere(&parsed, true), false);
    if whole.properties().look_set().is_empty() { Ok(whole) } else { Err("has an anchor or a word boundary within it".into()) }
}

/// With any text before it, or else behind it, but where an anchor says that it begins there, or ends.
fn from_anywhere(pattern: &Hir, is_before: bool) -> Hir {
    let anchor = if is_before { Look::Start } else { Look::End };
    match pattern.kind() {
        HirKind::Look(look) if *look == anchor => Hir::empty(),
        HirKind::Alternation(branches) => {
            Hir::alternation(branches.iter().map(|branch| from_anywhere(branch, is_before)).collect())
        }
        HirKind::Capture(capture) => from_anywhere(&capture.sub, is_before),
        HirKind::Concat(parts) => {
            let mut parts = parts.clone();
            let outer = if is_before { parts.first_mut() } else { parts.last_mut() };
            if let Some(outer) = outer {
                *outer = from_anywhere(outer, is_before);
            }
            Hir::concat(parts)
        }
        _ => {
            let any = Repetition { min: 0, max: None, greedy: true, sub: Box::new(Hir::dot(Dot::AnyChar)) };
            let mut parts = vec![Hir::repetition(any), pattern.clone()];
            if !is_before {
                parts.reverse();
            }
            Hir::concat(parts)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(keyword: &str, schema: &Value, text: &str) -> bool {
        let limit = text_limit(keyword, schema.as_object().unwrap()).unwrap().unwrap();
        let regex = regex::Regex::new(&format!("^(?:{})$", limit.expression)).unwrap();
        assert_eq!(limit.may_be_empty, regex.is_match(""), "{schema}");
        regex.is_match(text)
    }

    #[test]
    fn a_pattern_may_be_found_anywhere_unless_it_is_anchored() {
        for (pattern, within, beyond) in [
            ("b", "abc", "acd"),
            ("^b", "bc\n", "ab"),
            ("b$", "ab", "bc"),
            ("^b$", "b", "bb"),
            ("^a|b$", "axx", "xax"),
            ("^a|b$", "xxb", "xbx"),
            ("(^a|b)c", "xbc", "xac"),
            ("(^a$|^b$)", "b", "ab"),
            ("^(a|b)+$", "abab", "abc"),
            (r"^\d/\w$", "4/x", "\u{664}/x"),
            ("^[^a]*$", "x/\n", "xa"),
            ("^$|^a$", "", "b"),
        ] {
            let schema = serde_json::json!({ "pattern": pattern });
            assert!(matches("pattern", &schema, within), "{pattern}: {within:?}");
            assert!(!matches("pattern", &schema, beyond), "{pattern}: {beyond:?}");
        }
        for pattern in ["a^b", r"\ba", "(", "(?=a)"] {
            let schema = serde_json::json!({ "pattern": pattern });
            assert!(text_limit("pattern", schema.as_object().unwrap()).is_err(), "{pattern}");
        }
    }

    #[test]
    fn formats_and_lengths_are_what_they_say() {
        for (format, within, beyond) in [
            ("date", "2024-02-28", "2024-02-30"),
            ("time", "23:59:59.5+02:00", "24:00:00Z"),
            ("date-time", "1999-12-31T00:00:00Z", "1999-12-31"),
            ("ipv4", "192.168.0.255", "1.2.3.256"),
            ("uuid", "01234567-89ab-cdef-0123-456789abcdef", "01234567-89ab-cdef-0123-456789abcde"),
        ] {
            let schema = serde_json::json!({ "format": format });
            assert!(matches("format", &schema, within) && !matches("format", &schema, beyond), "{format}");
        }
        let lengths = serde_json::json!({ "minLength": 1, "maxLength": 2 });
        assert!(matches("minLength", &lengths, "\u{1f600}\n") && !matches("minLength", &lengths, "abc"));
        let most = serde_json::json!({ "maxLength": 2 });
        assert!(matches("maxLength", &most, "") && !matches("maxLength", &most, "abc"));
        let some = serde_json::json!({ "enum": ["a.b", "", "x/y"] });
        assert!(matches("enum", &some, "x/y") && !matches("enum", &some, "axb"));
        for schema in [serde_json::json!({ "format": "uri" }), serde_json::json!({ "minLength": 2, "maxLength": 1 })] {
            let (key, _) = schema.as_object().unwrap().iter().next().unwrap();
            assert!(text_limit(key, schema.as_object().unwrap()).is_err(), "{schema}");
        }
    }
}
