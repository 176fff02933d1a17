//! A call whose arguments stand one by one between markers.

mod grammar;

use std::sync::Arc;

use serde_json::Value;

use super::{Tool, formats::Parameters};

/// Reads the name and the arguments of a call, and writes these as a JSON object.
#[derive(Clone, Debug)]
pub(super) struct ParametersReader {
    after_name: String,
    before_key: String,
    after_key: String,
    before_value: String,
    after_value: String,
    close: String,
    held: String,
    place: Place,
    name: Option<String>,
    key: String,
    num_arguments: usize,
    tools: Arc<[Tool]>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Name,
    /// Before a key, or the end.
    Next,
    Key,
    Value,
}

impl ParametersReader {
    pub fn new(format: &Parameters, close: String, tools: &Arc<[Tool]>, marked: impl Fn(&str) -> String) -> Self {
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
            close,
            held: String::new(),
            place: Place::Name,
            name: None,
            key: String::new(),
            num_arguments: 0,
        }
    }

    /// Once it is known.
    pub fn name(&self) -> Option<String> {
        self.name.clone()
    }

    /// Takes a character, and appends what it makes known of the arguments; true at the end.
    pub fn push(&mut self, character: char, arguments: &mut String) -> bool {
        self.held.push(character);
        match self.place {
            Place::Name => {
                // The name ends at a line's end where nothing else is said.
                let is_line = self.after_name.is_empty() && character == '\n';
                let is_next = self.held.ends_with(&self.before_key);
                let is_over = self.held.ends_with(&self.close);
                let end = if is_line {
                    1
                } else if !self.after_name.is_empty() && self.held.ends_with(&self.after_name) {
                    self.after_name.len()
                } else if is_next {
                    self.before_key.len()
                } else if is_over {
                    self.close.len()
                } else {
                    return false;
                };
                let name = self.held[..self.held.len() - end].trim().to_owned();
                if name.is_empty() && is_line {
                    return false;
                }
                self.name = Some(name);
                self.place = if is_next { Place::Key } else { Place::Next };
                self.held.clear();
                if is_over && !is_line {
                    return true;
                }
            }
            Place::Next => {
                if self.held.ends_with(&self.before_key) {
                    self.place = Place::Key;
                    self.held.clear();
                } else if self.held.ends_with(&self.close) {
                    if self.num_arguments > 0 {
                        arguments.push('}');
                    }
                    return true;
                }
            }
            Place::Key => {
                if self.held.ends_with(&self.before_value) {
                    let key = self.held[..self.held.len() - self.before_value.len()].trim();
                    self.key = key.strip_suffix(self.after_key.as_str()).unwrap_or(key).trim().to_owned();
                    self.place = Place::Value;
                    self.held.clear();
                }
            }
            Place::Value => {
                if self.held.ends_with(&self.after_value) {
                    let value = self.held[..self.held.len() - self.after_value.len()].to_owned();
                    self.write(&value, arguments);
                    self.place = Place::Next;
                    self.held.clear();
                }
            }
        }
        false
    }

    fn write(&mut self, value: &str, arguments: &mut String) {
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.push_str(if self.num_arguments == 0 { "{" } else { ", " });
        self.num_arguments += 1;
        arguments.push_str(&Value::from(self.key.as_str()).to_string());
        arguments.push_str(": ");
        match serde_json::from_str::<Value>(value) {
            // By the schema; where that says nothing, what is JSON is JSON.
            Ok(_) if !self.is_string() => arguments.push_str(value.trim()),
            _ => arguments.push_str(&Value::from(value).to_string()),
        }
    }

    fn is_string(&self) -> bool {
        let tool = self.tools.iter().find(|tool| self.name.as_deref() == Some(&tool.name));
        tool.is_some_and(|tool| tool.parameters["properties"][&self.key]["type"] == "string")
    }
}
