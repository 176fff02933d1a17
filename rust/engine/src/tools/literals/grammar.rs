//! The grammar of a call's arguments as literals, from the JSON Schema that describes them.

use std::{collections::HashMap, fmt::Write as _};

use serde_json::{Map, Value};

use super::super::{
    Tool,
    formats::{Literals, Quotes},
};
use crate::{
    EngineError,
    grammar::{GrammarFault, Rules, describes, escaped, tool_schema},
};

/// Schemas within schemas, references followed.
const MAX_DEPTH: usize = 64;
/// Schemas, each as often as something refers to it, and bytes of the rules for them.
const MAX_SCHEMAS: usize = 5000;
const MAX_BYTES: usize = 1 << 18;
/// A larger limit to the size of a text or a list is none: no answer comes to it.
const MAX_SIZE: u64 = 10_000;
/// Between two arguments, keys or values, and behind a key.
const COMMA: &str = "/, ?/";
const COLON: &str = "/: ?/";
/// Keywords that are enforced; with `strict` others are refused.
const ENFORCED: [&str; 19] = [
    "type",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
/// Those of texts that are written as in JSON.
const OF_TEXTS: [&str; 4] = ["pattern", "format", "minLength", "maxLength"];

impl Rules<'_> {
    /// A call of a tool: its name and its arguments.
    pub(in super::super) fn literals(&mut self, language: &'static Literals, tool: &Tool) -> Result<String, EngineError> {
        let mut schema = tool_schema(&tool.name, &tool.parameters, tool.strict)?;
        if let Some(map) = schema.as_object_mut() {
            map.shift_remove("x-guidance");
        }
        let (before, after) = language.brackets;
        let mut writer =
            Writer { rules: self, language, tool, root: &schema, references: HashMap::new(), any: None, num_schemas: 0 };
        let resolved = writer.resolved(schema.as_object().unwrap_or(&Map::new()), 0)?;
        let is_choice = |key: &&&str| resolved.contains_key(**key) && tool.strict;
        if let Some(key) = ["anyOf", "enum", "const"].iter().find(is_choice) {
            return Err(writer.left_out(key));
        }
        let members = writer.arguments(&resolved, 0)?;
        let [head, tail] = [format!("{}{before}", tool.name), after.to_string()].map(|text| Rules::plain(&text));
        Ok(self.rule(&format!("{head} {members} {tail}")))
    }
}

struct Writer<'a, 'r> {
    rules: &'a mut Rules<'r>,
    language: &'static Literals,
    tool: &'a Tool,
    root: &'a Value,
    /// The rules of what `$ref` names.
    references: HashMap<String, String>,
    /// The rule of any value.
    any: Option<String>,
    num_schemas: usize,
}

impl Writer<'_, '_> {
    fn refused(&self, why: &str) -> EngineError {
        GrammarFault::Schema.error(format!("tool {:?}: {why}", self.tool.name))
    }

    fn left_out(&self, key: &str) -> EngineError {
        self.refused(&format!("`{key}` is not enforced in calls as this model writes them: leave it out"))
    }

    fn check(&mut self, map: &Map<String, Value>, depth: usize) -> Result<(), EngineError> {
        self.num_schemas += 1;
        if depth > MAX_DEPTH || self.num_schemas > MAX_SCHEMAS || self.rules.text.len() > MAX_BYTES {
            return Err(GrammarFault::TooComplex.error(format!(
                "tool {:?}: its schema is nested deeper than {MAX_DEPTH}, refers to more than {MAX_SCHEMAS} schemas, or makes a \
                 grammar of more than {MAX_BYTES} bytes",
                self.tool.name
            )));
        }
        let is_left_out = |key: &&String| {
            let is_enforced =
                ENFORCED.contains(&key.as_str()) || (self.language.quotes == Quotes::Python && OF_TEXTS.contains(&key.as_str()));
            !is_enforced && !describes(key)
        };
        match map.keys().find(is_left_out).filter(|_| self.tool.strict) {
            Some(key) => Err(self.left_out(key)),
            None => Ok(()),
        }
    }

    fn target(&self, reference: &str) -> Result<&Map<String, Value>, EngineError> {
        let pointer = reference.strip_prefix('#').unwrap_or(reference);
        let target = self.root.pointer(pointer).and_then(Value::as_object);
        target.ok_or_else(|| self.refused(&format!("`$ref` {reference:?} names no schema in it")))
    }

    /// A schema with what it refers to and all of `allOf` in it.
    fn resolved(&mut self, map: &Map<String, Value>, depth: usize) -> Result<Map<String, Value>, EngineError> {
        self.check(map, depth)?;
        let mut whole = map.clone();
        let mut parts = Vec::new();
        if let Some(Value::String(reference)) = whole.shift_remove("$ref") {
            parts.push(self.target(&reference)?.clone());
        }
        if let Some(Value::Array(all)) = whole.shift_remove("allOf") {
            parts.extend(all.into_iter().filter_map(|part| if let Value::Object(part) = part { Some(part) } else { None }));
        }
        for part in parts {
            let part = self.resolved(&part, depth + 1)?;
            merge(&mut whole, &part);
        }
        Ok(whole)
    }

    /// What stands between the brackets of a call: the arguments of one of the branches, with those beside these.
    fn arguments(&mut self, map: &Map<String, Value>, depth: usize) -> Result<String, EngineError> {
        for key in ["anyOf", "oneOf"] {
            let mut base = map.clone();
            let Some(Value::Array(branches)) = base.shift_remove(key) else { continue };
            let mut rules = Vec::new();
            for branch in branches.iter().filter_map(Value::as_object) {
                let mut whole = base.clone();
                merge(&mut whole, &self.resolved(branch, depth + 1)?);
                rules.push(self.arguments(&whole, depth + 1)?);
            }
            let num_rules = rules.len();
            if num_rules == 0 {
                return self.arguments(&base, depth + 1);
            }
            rules.retain(|rule| !rule.is_empty());
            let or_none = if rules.len() < num_rules { "?" } else { "" };
            return Ok(if rules.is_empty() {
                String::new()
            } else {
                self.rules.rule(&format!("({}){or_none}", rules.join(" | ")))
            });
        }
        self.members(map, true, depth)
    }

    fn value(&mut self, schema: &Value, depth: usize) -> Result<String, EngineError> {
        let Some(map) = schema.as_object() else { return self.any_value() };
        self.check(map, depth)?;
        let reference = map.get("$ref").and_then(Value::as_str);
        if let Some(reference) = reference.filter(|_| map.keys().all(|key| key == "$ref" || describes(key))) {
            return self.reference(reference, depth);
        }
        let map = self.resolved(map, depth)?;
        if let Some(value) = map.get("const") {
            return self.constants(std::slice::from_ref(value));
        }
        if let Some(Value::Array(values)) = map.get("enum") {
            return self.constants(values);
        }
        for key in ["anyOf", "oneOf"] {
            let mut base = map.clone();
            let Some(Value::Array(branches)) = base.shift_remove(key) else { continue };
            let mut rules = Vec::new();
            let has_base = base.keys().any(|key| !describes(key));
            for branch in &branches {
                // What has nothing beside it may be a reference, and the rule of that.
                let mut whole = base.clone();
                let branch = match branch.as_object().filter(|_| has_base) {
                    Some(branch) => {
                        merge(&mut whole, &self.resolved(branch, depth + 1)?);
                        Value::Object(whole)
                    }
                    None => branch.clone(),
                };
                rules.push(self.value(&branch, depth + 1)?);
            }
            return if rules.is_empty() { self.any_value() } else { Ok(self.rules.rule(&rules.join(" | "))) };
        }
        self.typed(&map, depth)
    }

    fn typed(&mut self, map: &Map<String, Value>, depth: usize) -> Result<String, EngineError> {
        let types = match map.get("type") {
            Some(Value::String(kind)) => vec![kind.as_str()],
            Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
            _ if map.contains_key("properties") || map.contains_key("required") => vec!["object"],
            _ if map.contains_key("items") => vec!["array"],
            _ => Vec::new(),
        };
        if types.is_empty() {
            return self.any_value();
        }
        let mut rules = Vec::new();
        for kind in types {
            rules.push(match kind {
                "string" => self.text(map)?,
                "integer" | "number" => self.number(kind, map)?,
                "boolean" => self.words(&[0, 1]),
                "null" => self.words(&[2]),
                "array" => self.array(map, depth)?,
                "object" => format!("\"{{\" {} \"}}\"", self.members(map, false, depth)?),
                _ => self.any_value()?,
            });
        }
        Ok(self.rules.rule(&rules.join(" | ")))
    }

    fn reference(&mut self, reference: &str, depth: usize) -> Result<String, EngineError> {
        if let Some(rule) = self.references.get(reference) {
            return Ok(rule.clone());
        }
        let rule = self.rules.reserved();
        self.references.insert(reference.to_owned(), rule.clone());
        let target = Value::Object(self.target(reference)?.clone());
        let body = self.value(&target, depth + 1)?;
        if body == rule {
            return Err(self.refused(&format!("`$ref` {reference:?} names itself")));
        }
        let _ = writeln!(self.rules.text, "{rule}: {body}");
        Ok(rule)
    }

    fn any_value(&mut self) -> Result<String, EngineError> {
        if let Some(rule) = &self.any {
            return Ok(rule.clone());
        }
        let rule = self.rules.reserved();
        self.any = Some(rule.clone());
        let no_limits = Map::new();
        let (text, number) = (self.text(&no_limits)?, self.number("number", &no_limits)?);
        let (words, key) = (self.words(&[0, 1, 2]), self.any_key(false)?);
        let list = format!("\"[\" ({rule} ({COMMA} {rule})*)? \"]\"");
        let object = format!("\"{{\" ({key} {rule} ({COMMA} {key} {rule})*)? \"}}\"");
        let _ = writeln!(self.rules.text, "{rule}: {text} | {number} | {words} | {list} | {object}");
        Ok(rule)
    }

    fn words(&self, which: &[usize]) -> String {
        let words: Vec<String> = which.iter().map(|word| Rules::plain(self.language.words[*word])).collect();
        format!("({})", words.join(" | "))
    }

    fn number(&mut self, kind: &str, map: &Map<String, Value>) -> Result<String, EngineError> {
        let is_limit = |key: &str| ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"].contains(&key);
        let mut schema: Map<String, Value> = map.iter().filter(|(key, _)| is_limit(key)).map(pair).collect();
        schema.insert("type".to_owned(), kind.into());
        let schema = tool_schema(&self.tool.name, &Value::Object(schema), false)?;
        Ok(self.rules.rule(&format!("%json {schema}")))
    }

    /// A text. Patterns and formats are enforced where texts are written as in JSON.
    fn text(&mut self, map: &Map<String, Value>) -> Result<String, EngineError> {
        let length = |key: &str| map.get(key).and_then(Value::as_u64);
        let (min, max) = (length("minLength").unwrap_or(0), length("maxLength").filter(|max| *max <= MAX_SIZE));
        let times = format!("{{{min},{}}}", max.map_or(String::new(), |max| max.to_string()));
        let marker = match self.language.quotes {
            Quotes::Marker(marker) => marker,
            Quotes::Python if map.contains_key("pattern") || map.contains_key("format") => {
                let of_texts = map.iter().filter(|(key, _)| OF_TEXTS.contains(&key.as_str()));
                let mut schema: Map<String, Value> = of_texts.map(pair).collect();
                schema.insert("type".to_owned(), "string".into());
                let schema = tool_schema(&self.tool.name, &Value::Object(schema), false)?;
                return Ok(self.rules.rule(&format!("%json {schema}")));
            }
            Quotes::Python => {
                let quoted = |quote: &str| format!("/{quote}([^{quote}\\\\\\x00-\\x1f\\x7f]|\\\\[\\\\'\"nrt]){times}{quote}/");
                return Ok(self.rules.rule(&format!("{} | {}", quoted("'"), quoted("\""))));
            }
        };
        let quote = self.rules.literal(marker);
        if min == 0 && max.is_none() {
            let rest = self.rules.up_to(marker);
            return Ok(self.rules.rule(&format!("{quote} {rest}")));
        }
        let rule = self.rules.reserved();
        let text = rule.to_uppercase();
        if !self.rules.has_special(marker) {
            let (text, quoted) = (text.to_lowercase() + "t", escaped(marker));
            let _ = writeln!(self.rules.text, "{text}[lazy]: /(?s:.){times}{quoted}/");
            let _ = writeln!(self.rules.text, "{rule}: {quote} {text}");
        } else if max == Some(0) {
            let _ = writeln!(self.rules.text, "{rule}: {quote} {quote}");
        } else {
            let times = format!("{{{},{}}}", min.max(1), max.map_or(String::new(), |max| max.to_string()));
            let _ = writeln!(self.rules.text, "{text}: /(?s:.){times}/");
            let _ = writeln!(self.rules.text, "{rule}: {quote} {text}{} {quote}", if min == 0 { "?" } else { "" });
        }
        Ok(rule)
    }

    fn constants(&mut self, values: &[Value]) -> Result<String, EngineError> {
        let mut rules = Vec::new();
        for value in values {
            rules.push(self.constant(value, 0)?);
        }
        if rules.is_empty() {
            return Err(self.refused("`enum` has no values"));
        }
        Ok(self.rules.rule(&rules.join(" | ")))
    }

    fn constant(&mut self, value: &Value, depth: usize) -> Result<String, EngineError> {
        self.check(&Map::new(), depth)?;
        Ok(match value {
            Value::Null => self.words(&[2]),
            Value::Bool(value) => self.words(&[usize::from(!value)]),
            Value::Number(number) => Rules::plain(&number.to_string()),
            Value::String(text) => self.constant_text(text)?,
            Value::Array(values) => {
                let values = values.iter().map(|value| self.constant(value, depth + 1)).collect::<Result<Vec<_>, _>>()?;
                format!("\"[\" {} \"]\"", values.join(&format!(" {COMMA} ")))
            }
            Value::Object(map) => {
                let mut members = Vec::new();
                for (key, value) in map {
                    members.push(format!("{} {}", self.key(key, false)?, self.constant(value, depth + 1)?));
                }
                format!("\"{{\" {} \"}}\"", members.join(&format!(" {COMMA} ")))
            }
        })
    }

    fn constant_text(&self, text: &str) -> Result<String, EngineError> {
        match self.language.quotes {
            Quotes::Marker(marker) if text.contains(marker) => {
                Err(self.refused(&format!("the text {text:?} has a {marker}, with which it would end")))
            }
            Quotes::Marker(marker) => {
                let (quote, text) = (self.rules.literal(marker), text.to_owned());
                let text = if text.is_empty() { String::new() } else { Rules::plain(&text) };
                Ok(format!("{quote} {text} {quote}"))
            }
            Quotes::Python => {
                let double = Rules::plain(&Value::from(text).to_string());
                let is_plain = !text.contains(['\'', '"', '\\']) && !text.contains(char::is_control);
                Ok(if is_plain { format!("({} | {double})", Rules::plain(&format!("'{text}'"))) } else { double })
            }
        }
    }

    /// A key and what stands between it and its value.
    fn key(&self, key: &str, is_argument: bool) -> Result<String, EngineError> {
        let is_word = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-' || c == '.');
        let assign = if is_argument { Rules::plain(&self.language.assign.to_string()) } else { COLON.to_owned() };
        match self.language.quotes {
            Quotes::Python if is_argument && !is_word => {
                Err(self.refused(&format!("{key:?} cannot be an argument's name in calls as this model writes them")))
            }
            Quotes::Marker(_) if is_word => Ok(format!("{} {assign}", Rules::plain(key))),
            Quotes::Python if is_argument => Ok(format!("{} {assign}", Rules::plain(key))),
            Quotes::Python | Quotes::Marker(_) => Ok(format!("{} {assign}", self.constant_text(key)?)),
        }
    }

    fn any_key(&mut self, is_argument: bool) -> Result<String, EngineError> {
        let assign = if is_argument { Rules::plain(&self.language.assign.to_string()) } else { COLON.to_owned() };
        if self.language.quotes == Quotes::Python && !is_argument {
            return Ok(format!("{} {assign}", self.text(&Map::new())?));
        }
        Ok(format!("/[A-Za-z_][A-Za-z0-9_]*/ {assign}"))
    }

    /// What stands between the brackets of an object or of a call: the properties in the schema's order, of which those that
    /// are not required may be left out.
    fn members(&mut self, map: &Map<String, Value>, is_call: bool, depth: usize) -> Result<String, EngineError> {
        let none = Map::new();
        let properties = map.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let required: Vec<&str> =
            map.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let more = map.get("additionalProperties").unwrap_or(&Value::Bool(true));
        if properties.is_empty() && required.is_empty() && *more != Value::Bool(false) {
            let (key, value) = (self.any_key(is_call)?, self.value(more, depth + 1)?);
            return Ok(self.rules.rule(&format!("({key} {value} ({COMMA} {key} {value})*)?")));
        }
        let mut all: Vec<(&str, &Value)> = properties.iter().map(|(key, schema)| (key.as_str(), schema)).collect();
        // What is required and not described is anything.
        all.extend(required.iter().filter(|key| !properties.contains_key(**key)).map(|key| (*key, more)));
        // What may come from here on, behind other members and as the first.
        let (mut behind, mut first) = (String::new(), String::new());
        for (key, schema) in all.into_iter().rev() {
            let is_required = required.contains(&key);
            if *schema == Value::Bool(false) && !is_required {
                continue;
            }
            let member = format!("{} {}", self.key(key, is_call)?, self.value(schema, depth + 1)?);
            let member = self.rules.rule(&member);
            let with_it = [format!("{COMMA} {member} {behind}"), format!("{member} {behind}")];
            let without_it = [behind, first];
            [behind, first] = [0, 1].map(|i| match (is_required, without_it[i].as_str()) {
                (true, _) => self.rules.rule(&with_it[i]),
                (false, "") => self.rules.rule(&format!("({})?", with_it[i])),
                (false, rest) => self.rules.rule(&format!("{} | {rest}", with_it[i])),
            });
        }
        Ok(first)
    }

    fn array(&mut self, map: &Map<String, Value>, depth: usize) -> Result<String, EngineError> {
        let size = |key: &str| map.get(key).and_then(Value::as_u64);
        let (min, max) = (size("minItems").unwrap_or(0), size("maxItems").filter(|max| *max <= MAX_SIZE));
        let first = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let first = &first[..first.len().min(max.map_or(usize::MAX, |max| max as usize))];
        let taken = first.len() as u64;
        let others = map.get("items").unwrap_or(&Value::Bool(true));
        let room = max.map(|max| max - taken);
        // What may come behind those that have schemas of their own.
        let mut rest = String::new();
        let mut is_optional = min <= taken;
        if *others != Value::Bool(false) && room != Some(0) {
            let item = self.value(others, depth + 1)?;
            let least = min.saturating_sub(taken).max(1);
            let more = match (least - 1, room.map(|room| room.max(least) - 1)) {
                (_, Some(0)) => String::new(),
                (least, None) => format!("({COMMA} {item}){{{least},}}"),
                (least, Some(most)) => format!("({COMMA} {item}){{{least},{most}}}"),
            };
            rest = self.rules.rule(&format!("{item} {more}"));
        }
        for (index, schema) in first.iter().enumerate().rev() {
            let item = self.value(schema, depth + 1)?;
            rest = match (rest.is_empty(), is_optional) {
                (true, _) => item,
                (false, true) => self.rules.rule(&format!("{item} ({COMMA} {rest})?")),
                (false, false) => self.rules.rule(&format!("{item} {COMMA} {rest}")),
            };
            is_optional = min <= index as u64;
        }
        let inner = match (rest.is_empty(), is_optional) {
            (false, true) => format!("({rest})?"),
            (true, _) | (false, false) => rest,
        };
        Ok(format!("\"[\" {inner} \"]\""))
    }
}

fn pair<'a>((key, value): (&'a String, &'a Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

/// Both schemas hold.
fn merge(whole: &mut Map<String, Value>, part: &Map<String, Value>) {
    for (key, value) in part {
        match (key.as_str(), whole.get_mut(key), value) {
            ("properties", Some(Value::Object(all)), Value::Object(more)) => {
                all.extend(more.iter().map(pair));
            }
            ("required", Some(Value::Array(all)), Value::Array(more)) => all.extend(more.iter().cloned()),
            _ => {
                whole.insert(key.clone(), value.clone());
            }
        }
    }
}
