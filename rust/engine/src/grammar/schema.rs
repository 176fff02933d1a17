//! What a JSON Schema may have: what is not enforced is refused by name, and not ignored.

use serde_json::{Map, Value, json};

use super::{GrammarFault, compiler::MAX_INTERSECTED};
use crate::EngineError;

/// Keywords that are enforced.
const ENFORCED: [&str; 26] = [
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "const",
    "enum",
    "type",
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
];
const ALSO_ENFORCED: &str = "multipleOf";
/// Remainders of `multipleOf`: a state of an automaton each.
const MAX_REMAINDERS: u128 = 10_000;

/// Keywords that describe, and forbid nothing. `discriminator` names the property that tells the branches of a union apart, which
/// these say themselves.
const DESCRIBING: [&str; 17] = [
    "$anchor",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "id",
    "$comment",
    "title",
    "description",
    "default",
    "readOnly",
    "writeOnly",
    "examples",
    "example",
    "deprecated",
    "discriminator",
    "strict",
];

/// Whether a keyword describes, and forbids nothing.
pub(crate) fn describes(keyword: &str) -> bool {
    DESCRIBING.contains(&keyword)
}

/// Spaces and line breaks between the parts of JSON at most: enough for indentation, and no model can go on for ever with them.
const WHITESPACE: &str = r"[ \t\n\r]{1,40}";

/// The schema as it is compiled; an error names the first keyword that is not enforced and where it stands.
pub(super) fn prepared(schema: &Value) -> Result<Value, EngineError> {
    check(schema, &mut "#".to_owned())?;
    check_intersections(schema)?;
    let mut schema = match schema {
        Value::Object(map) => {
            let mut map = map.clone();
            strip(&mut map);
            map
        }
        _ => Map::new(),
    };
    schema.insert("x-guidance".into(), json!({ "whitespace_pattern": WHITESPACE }));
    Ok(Value::Object(schema))
}

/// What may have to hold for one text or number together.
#[derive(Default)]
struct Intersected {
    /// There are parts that hold together, wherever these are.
    is_any: bool,
    num_patterns: usize,
    /// The most in one `patternProperties`.
    num_names: usize,
    /// Of `multipleOf`: the digits, and how many of them are behind the point.
    multiples: Vec<(u128, u32)>,
}

impl Intersected {
    fn count(&mut self, schema: &Value) {
        let Value::Object(map) = schema else { return };
        let has = |keys: &[&str]| keys.iter().filter(|key| map.contains_key(**key)).count();
        let num_patterns = has(&["pattern", "format"]);
        let is_beside = has(&["$ref", "anyOf", "oneOf"]) > 0 && num_patterns + has(&["multipleOf"]) > 0;
        self.is_any |= is_beside || map.contains_key("allOf");
        self.num_patterns += num_patterns;
        self.num_names = self.num_names.max(map.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len));
        let multiple = map.get(ALSO_ENFORCED).and_then(digits);
        self.multiples.extend(multiple.filter(|multiple| !self.multiples.contains(multiple)));
        let _ = within(&mut String::new(), map, &mut |schema, _| {
            self.count(schema);
            Ok(())
        });
    }

    /// The remainders that a number is told apart by.
    fn num_remainders(&self) -> u128 {
        if !self.is_any {
            return self.multiples.iter().map(|(digits, _)| *digits).max().unwrap_or(1);
        }
        let behind = self.multiples.iter().map(|(_, behind)| *behind).max().unwrap_or(0);
        let scaled = |(digits, own): &(u128, u32)| digits.saturating_mul(10_u128.saturating_pow(behind - own));
        self.multiples.iter().map(scaled).fold(1, u128::saturating_mul)
    }
}

/// A number as digits, and how many of them are behind the point.
fn digits(number: &Value) -> Option<(u128, u32)> {
    let text = match number.as_u64() {
        Some(number) => number.to_string(),
        None => number.as_f64()?.abs().to_string(),
    };
    let (whole, behind) = text.split_once('.').unwrap_or((&text, ""));
    Some((format!("{whole}{behind}").parse().unwrap_or(u128::MAX), u32::try_from(behind.len()).ok()?))
}

/// Bounds the work for texts of which several expressions have to hold, and for multiples.
fn check_intersections(schema: &Value) -> Result<(), EngineError> {
    let mut all = Intersected::default();
    all.count(schema);
    let num_intersected = if all.is_any { all.num_patterns } else { 0 }.max(all.num_names);
    if num_intersected > MAX_INTERSECTED {
        return Err(GrammarFault::TooComplex.error(format!(
            "the JSON schema has {num_intersected} patterns and formats that may be intersected, of `allOf`, beside `$ref`, `anyOf` \
             or `oneOf`, or in one `patternProperties`; {MAX_INTERSECTED} at most"
        )));
    }
    let num_remainders = all.num_remainders();
    if num_remainders > MAX_REMAINDERS {
        return Err(GrammarFault::TooComplex.error(format!(
            "the JSON schema has a `multipleOf` of {num_remainders} units of its last digit, those that may hold together multiplied; \
             {MAX_REMAINDERS} at most"
        )));
    }
    Ok(())
}

/// The schema of a tool's arguments. Unless it is strict, what cannot be enforced is left to the model, which is told all of it.
pub(crate) fn tool_schema(name: &str, schema: &Value, is_strict: bool) -> Result<Value, EngineError> {
    let named = |error: EngineError| match error {
        EngineError::Grammar { fault, message } => fault.error(format!("tool {name:?}: {message}")),
        other => other,
    };
    if is_strict {
        check_strict(schema).map_err(named)?;
        return prepared(schema).map_err(named);
    }
    let mut schema = schema.clone();
    loosen(&mut schema);
    let mut schema = prepared(&schema).map_err(named)?;
    schema["x-guidance"]["coerce_one_of"] = true.into();
    Ok(schema)
}

/// Formats that the compiler knows.
const FORMATS: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Leaves out of a schema and its parts what is not enforced.
fn loosen(schema: &mut Value) {
    let Value::Object(map) = schema else { return };
    map.retain(|key, _| ENFORCED.contains(&key.as_str()) || DESCRIBING.contains(&key.as_str()) || key == ALSO_ENFORCED);
    if map.get("format").and_then(Value::as_str).is_none_or(|format| !FORMATS.contains(&format)) {
        map.shift_remove("format");
    }
    parts_of(map).for_each(loosen);
}

/// The schemas that are parts of a schema.
fn parts_of(map: &mut Map<String, Value>) -> impl Iterator<Item = &mut Value> {
    map.iter_mut().flat_map(|(key, value)| -> Vec<&mut Value> {
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().collect()
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(schemas)) => schemas.iter_mut().collect(),
            ("items" | "additionalItems" | "additionalProperties", schema) => vec![schema],
            _ => Vec::new(),
        }
    })
}

fn invalid(place: &str, why: &str) -> EngineError {
    GrammarFault::Schema.error(format!("the JSON schema at {place} {why}"))
}

fn check(schema: &Value, place: &mut String) -> Result<(), EngineError> {
    let map = match schema {
        Value::Object(map) => map,
        Value::Bool(true) => return Ok(()),
        Value::Bool(false) if place.len() > 1 => return Ok(()),
        Value::Bool(false) => return Err(invalid(place, "is false, which nothing is valid against")),
        _ => return Err(invalid(place, "must be an object")),
    };
    let unknown: Vec<&str> = map
        .keys()
        .map(String::as_str)
        .filter(|key| !ENFORCED.contains(key) && !DESCRIBING.contains(key) && *key != ALSO_ENFORCED && *key != "x-guidance")
        .map(|key| key.char_indices().nth(64).map_or(key, |(end, _)| &key[..end]))
        .take(8)
        .collect();
    if !unknown.is_empty() {
        let names = unknown.join("`, `");
        return Err(invalid(place, &format!("has `{names}`, which is not enforced: leave it out")));
    }
    if let Some(reference) = map.get("$ref") {
        match reference.as_str() {
            Some(text) if text.starts_with('#') => {}
            _ => return Err(invalid(place, "has a `$ref` to something outside of it: put the schema under `$defs`")),
        }
    }
    within(place, map, &mut |schema, place| check(schema, place))
}

/// Calls `work` for the schemas that are parts of a schema, each with its place.
fn within(
    place: &mut String,
    map: &Map<String, Value>,
    work: &mut dyn FnMut(&Value, &mut String) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let mut at = |keys: &[&str], schema: &Value| {
        let len = place.len();
        for key in keys {
            place.push('/');
            place.extend(key.chars().take(64));
        }
        let result = work(schema, place);
        place.truncate(len);
        result
    };
    for (key, value) in map {
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.iter().try_for_each(|(name, schema)| at(&[key, name], schema))?;
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                schemas.iter().enumerate().try_for_each(|(i, schema)| at(&[key, &i.to_string()], schema))?;
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => at(&[key], schema)?,
            _ => {}
        }
    }
    Ok(())
}

/// Takes what the compiler would read differently, or not know, out of a schema and its parts.
fn strip(map: &mut Map<String, Value>) {
    for key in ["x-guidance", "discriminator", "deprecated", "example", "strict"] {
        map.shift_remove(key);
    }
    // The compiler's times have a second 60 in every minute; a leap second is rare enough to be left out.
    if map.get("format").is_some_and(|format| format == "time" || format == "date-time") {
        let has_no_leap_second = ":[0-9][0-9]:[0-5]";
        if let Some(Value::Array(all)) = map.get_mut("allOf") {
            all.push(json!({ "pattern": has_no_leap_second }));
        } else if map.contains_key("pattern") {
            map.insert("allOf".into(), json!([{ "pattern": has_no_leap_second }]));
        } else {
            map.insert("pattern".into(), has_no_leap_second.into());
        }
    }
    parts_of(map).filter_map(Value::as_object_mut).for_each(strip);
}

/// Checks what OpenAI's `strict: true` promises: every property of every object is required, and there are no others.
pub fn check_strict(schema: &Value) -> Result<(), EngineError> {
    strict(schema, &mut "#".to_owned())
}

fn strict(schema: &Value, place: &mut String) -> Result<(), EngineError> {
    let Value::Object(map) = schema else { return Ok(()) };
    if map.contains_key("properties") || map.get("type").is_some_and(|kind| kind == "object") {
        if map.get("additionalProperties") != Some(&Value::Bool(false)) {
            return Err(invalid(place, "must have `additionalProperties`: false with `strict`: true"));
        }
        let required = map.get("required").and_then(Value::as_array);
        let is_required = |name: &String| required.is_some_and(|names| names.iter().any(|other| other == name.as_str()));
        let properties = map.get("properties").and_then(Value::as_object);
        if let Some(name) = properties.into_iter().flat_map(Map::keys).find(|name| !is_required(name)) {
            let name: String = name.chars().take(64).collect();
            return Err(invalid(place, &format!("must have {name:?} in `required` with `strict`: true")));
        }
    }
    within(place, map, &mut |schema, place| strict(schema, place))
}
