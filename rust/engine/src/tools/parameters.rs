//! A call whose arguments stand one by one between markers.

mod grammar;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{
    Tool,
    call_json::Step,
    formats::Parameters,
    literals::push_character,
    reader::{MARK, end_of, is_name},
    shapes::{is_text, of_argument, shapes},
};

/// Schemas within schemas that are looked at.
const MAX_DEPTH: usize = 16;

/// Reads the name and the arguments of a call, and writes these as a JSON object: texts by the character, other values when they
/// are complete.
#[derive(Clone, Debug)]
pub(super) struct ParametersReader {
    after_name: String,
    before_key: String,
    after_key: String,
    before_value: String,
    after_value: String,
    /// What closes the call: the first of these lines that comes.
    close: Vec<String>,
    held: String,
    /// What was held up to the end of what may be the end of a value.
    ended: String,
    place: Place,
    name: Option<String>,
    key: String,
    num_arguments: usize,
    tools: Arc<[Tool]>,
    /// What the arguments may be, once the name is known, as far as those that have come leave it open.
    shapes: Vec<Map<String, Value>>,
    /// What has come of a text that may tell which of them it is.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Name,
    /// Before a key, or the end.
    Next,
    Key,
    Value,
    /// In a text; has any of it come?
    Text {
        is_begun: bool,
    },
    /// Behind what ends a value if another argument or the end of the call follows. Else it is some of the value, which may have
    /// the same characters in it. The value is so much of what was held; of a text nothing, which has been given out.
    Behind {
        value_len: usize,
        is_text: bool,
    },
}

impl ParametersReader {
    pub fn new(format: &Parameters, close: &str, tools: &Arc<[Tool]>, marked: impl Fn(&str) -> String) -> Self {
        // Between what ends a key and what begins its value may be any spaces.
        let (after_key, before_value) = format.before_value.rsplit_once('\n').unwrap_or_default();
        let (after_key, before_value) =
            if before_value.is_empty() { ("", format.before_value) } else { (after_key, before_value) };
        Self {
            tools: Arc::clone(tools),
            after_name: marked(format.after_name),
            before_key: marked(format.before_key),
            after_key: marked(after_key),
            before_value: marked(before_value),
            after_value: marked(format.after_value),
            close: close.split('\n').map(str::to_owned).collect(),
            held: String::new(),
            ended: String::new(),
            place: Place::Name,
            name: None,
            key: String::new(),
            num_arguments: 0,
            shapes: Vec::new(),
            text: String::new(),
        }
    }

    /// Once it is known.
    pub fn name(&self) -> Option<String> {
        self.name.clone()
    }

    /// Takes a character, and appends what it makes known of the arguments.
    pub fn push(&mut self, character: char, arguments: &mut String) -> Step {
        self.held.push(character);
        match self.place {
            Place::Name => return self.name_character(character),
            Place::Next => {
                if self.held.ends_with(&self.before_key) {
                    self.place = Place::Key;
                    self.held.clear();
                } else if self.closed_at().is_some() {
                    return self.complete(arguments);
                }
            }
            Place::Key => {
                if self.held.ends_with(&self.before_value) {
                    let key = self.held[..self.held.len() - self.before_value.len()].trim();
                    self.key = key.strip_suffix(self.after_key.as_str()).unwrap_or(key).trim().to_owned();
                    self.held.clear();
                    self.begin_value(arguments);
                }
            }
            Place::Value => {
                if self.held.ends_with(&self.after_value) {
                    let value_len = self.held.len() - self.after_value.len();
                    self.ended = std::mem::take(&mut self.held);
                    self.place = Place::Behind { value_len, is_text: false };
                }
            }
            Place::Text { is_begun } => self.text(is_begun, arguments),
            Place::Behind { value_len, is_text } => return self.behind(value_len, is_text, arguments),
        }
        Step::More
    }

    /// The answer has ended within the call: a text that has begun is what there is of it, and a value that may have ended has.
    pub fn finish(&mut self, arguments: &mut String) {
        match self.place {
            Place::Text { .. } => self.held.drain(..).for_each(|character| push_character(character, arguments)),
            Place::Behind { value_len, is_text } => self.end_value(value_len, is_text, arguments),
            Place::Name | Place::Next | Place::Key | Place::Value => {}
        }
    }

    /// Where that begins which closes the call, if it ends what is held.
    fn closed_at(&self) -> Option<usize> {
        self.close.iter().find_map(|line| self.held.strip_suffix(line.as_str())).map(str::len)
    }

    fn complete(&self, arguments: &mut String) -> Step {
        if self.num_arguments > 0 {
            arguments.push('}');
        }
        Step::Complete
    }

    /// Takes a character behind what may be the end of a value.
    fn behind(&mut self, value_len: usize, is_text: bool, arguments: &mut String) -> Step {
        if self.held.trim_start().is_empty() {
            self.ended.push_str(&self.held);
            self.held.clear();
        } else if self.held == self.before_key {
            self.end_value(value_len, is_text, arguments);
            self.place = Place::Key;
            self.held.clear();
        } else if self.close.contains(&self.held) {
            self.end_value(value_len, is_text, arguments);
            return self.complete(arguments);
        } else if !self.close.iter().chain([&self.before_key]).any(|marker| marker.starts_with(&self.held)) {
            self.ended.push_str(&self.held);
            self.held = std::mem::take(&mut self.ended);
            self.place = if is_text { Place::Text { is_begun: true } } else { Place::Value };
        }
        Step::More
    }

    fn end_value(&mut self, value_len: usize, is_text: bool, arguments: &mut String) {
        let ended = std::mem::take(&mut self.ended);
        if is_text {
            arguments.push('"');
            let text = std::mem::take(&mut self.text);
            self.narrow(&Value::from(text.replace(MARK, "")));
        } else {
            self.write(&ended[..value_len], arguments);
        }
    }

    fn name_character(&mut self, character: char) -> Step {
        // The name ends at a line's end where nothing else is said.
        let is_line = self.after_name.is_empty() && character == '\n';
        let is_next = self.held.ends_with(&self.before_key);
        let closed_at = self.closed_at();
        let end = if is_line {
            1
        } else if !self.after_name.is_empty() && self.held.ends_with(&self.after_name) {
            self.after_name.len()
        } else if is_next {
            self.before_key.len()
        } else if let Some(at) = closed_at {
            self.held.len() - at
        } else {
            return Step::More;
        };
        let name = self.held[..self.held.len() - end].trim().to_owned();
        if name.is_empty() && is_line {
            return Step::More;
        }
        if !is_name(&name) {
            return Step::Malformed;
        }
        let tool = self.tools.iter().find(|tool| tool.name == name);
        self.shapes = tool.map(|tool| shapes(&tool.parameters)).unwrap_or_default();
        self.name = Some(name);
        self.place = if is_next { Place::Key } else { Place::Next };
        self.held.clear();
        if closed_at.is_some() && !is_line { Step::Complete } else { Step::More }
    }

    fn begin_value(&mut self, arguments: &mut String) {
        self.place = Place::Value;
        let is_known = of_argument(&self.shapes, &self.key).next().is_some();
        if is_known && of_argument(&self.shapes, &self.key).all(is_text) {
            self.write_key(arguments);
            arguments.push('"');
            self.place = Place::Text { is_begun: false };
        }
    }

    /// Gives out what has come of a text, but for what may be its end. A line break at either end is none of it.
    fn text(&mut self, is_begun: bool, arguments: &mut String) {
        if !is_begun {
            self.place = Place::Text { is_begun: true };
            if self.held == "\n" {
                self.held.clear();
                return;
            }
        }
        let is_over = self.held.ends_with(&self.after_value);
        let len = if is_over {
            let text = &self.held[..self.held.len() - self.after_value.len()];
            text.strip_suffix('\n').unwrap_or(text).len()
        } else {
            let broken = format!("\n{}", self.after_value);
            end_of(&self.held, &broken).min(end_of(&self.held, &self.after_value))
        };
        self.held[..len].chars().for_each(|character| push_character(character, arguments));
        if self.shapes.len() > 1 {
            self.text.push_str(&self.held[..len]);
        }
        self.held.drain(..len);
        if is_over {
            self.ended = std::mem::take(&mut self.held);
            self.place = Place::Behind { value_len: 0, is_text: true };
        }
    }

    fn write_key(&mut self, arguments: &mut String) {
        arguments.push_str(if self.num_arguments == 0 { "{" } else { ", " });
        self.num_arguments += 1;
        arguments.push_str(&Value::from(self.key.as_str()).to_string());
        arguments.push_str(": ");
    }

    fn write(&mut self, value: &str, arguments: &mut String) {
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        self.write_key(arguments);
        let json = serde_json::from_str::<Value>(value).ok().filter(|json| self.is_json(json, value));
        if json.is_some() {
            arguments.push_str(value.trim());
        } else {
            arguments.push('"');
            value.chars().for_each(|character| push_character(character, arguments));
            arguments.push('"');
        }
        self.narrow(&json.unwrap_or_else(|| Value::from(value.replace(MARK, ""))));
    }

    /// Whether a value is JSON by the schema, and no text; where that says nothing of it, what is JSON is JSON.
    fn is_json(&self, json: &Value, text: &str) -> bool {
        let is_known = of_argument(&self.shapes, &self.key).next().is_some();
        let may_be = |value: &Value, is_equal: IsEqual| {
            of_argument(&self.shapes, &self.key).any(|schema| may_be(schema, self.root(), value, is_equal, MAX_DEPTH))
        };
        let is_value = |value: &Value| may_be(value, |value, other| value == other);
        !is_known || is_value(json) || (!is_value(&Value::from(text)) && may_be(json, is_alike))
    }

    /// Leaves the shapes that an argument with this value goes with, if there are any.
    fn narrow(&mut self, value: &Value) {
        if self.shapes.len() < 2 {
            return;
        }
        let goes_with = |shape: &Map<String, Value>| {
            let schema = shape.get("properties").and_then(|properties| properties.get(&self.key));
            schema.is_none_or(|schema| may_be(schema, self.root(), value, |value, other| value == other, MAX_DEPTH))
        };
        let left: Vec<_> = self.shapes.iter().filter(|shape| goes_with(shape)).cloned().collect();
        if !left.is_empty() {
            self.shapes = left;
        }
    }

    /// The schema of all arguments.
    fn root(&self) -> &Value {
        let tool = self.tools.iter().find(|tool| self.name.as_deref() == Some(&tool.name));
        tool.map_or(&Value::Null, |tool| &tool.parameters)
    }
}

/// How a value is compared with those of `enum` and `const`.
type IsEqual = fn(&Value, &Value) -> bool;

/// Whether a value is of a type that a schema allows; of what is not known here, any is.
fn may_be(schema: &Value, root: &Value, value: &Value, is_equal: IsEqual, depth: usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else { return true };
    let Value::Object(schema) = schema else { return *schema != Value::Bool(false) };
    let all = |key: &str| schema.get(key).and_then(Value::as_array);
    let of_branch = |branch: &Value| may_be(branch, root, value, is_equal, depth);
    let target = schema.get("$ref").and_then(Value::as_str).and_then(|at| root.pointer(at.strip_prefix('#')?));
    target.is_none_or(of_branch)
        && schema.get("type").is_none_or(|kind| match kind {
            Value::String(kind) => is_of(value, kind),
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).any(|kind| is_of(value, kind)),
            _ => true,
        })
        && all("enum").is_none_or(|values| values.iter().any(|other| is_equal(value, other)))
        && schema.get("const").is_none_or(|other| is_equal(value, other))
        && all("allOf").is_none_or(|branches| branches.iter().all(of_branch))
        && ["anyOf", "oneOf"].into_iter().filter_map(all).all(|branches| branches.iter().any(of_branch))
}

fn is_of(value: &Value, kind: &str) -> bool {
    match kind {
        "string" => value.is_string(),
        "number" | "integer" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => true,
    }
}

/// Whether two values are of one type.
fn is_alike(value: &Value, other: &Value) -> bool {
    std::mem::discriminant(value) == std::mem::discriminant(other)
}
