//! What an answer with tools or reasoning must be: one automaton, `reasoning? (text | calls)`, in llguidance's Lark.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::{
    CallChoice, Reading, Tool, ToolOptions,
    formats::{Body, Format, Parameters},
};
use crate::{
    EngineError, Tokenizer,
    grammar::{escaped, tool_schema},
};

/// Any text.
const ANY: &str = "(?s:.)";

/// Rules as they are written.
pub(super) struct Rules<'a> {
    pub text: String,
    tokenizer: &'a Tokenizer,
    markers: &'a [(u32, String)],
    count: usize,
}

/// The grammar of an answer that is read so; its other text is what the rule `@answer` says, if `has_grammar`, else any. `None`
/// where anything may come.
pub(crate) fn answer_grammar(
    reading: &Reading,
    tools: &ToolOptions,
    tokenizer: &Tokenizer,
    has_grammar: bool,
) -> Result<Option<String>, EngineError> {
    let consists_of_messages = reading.dialect.format.body == Body::Harmony;
    // What tells a call from a text there is no token that could be left out.
    let is_without_calls = consists_of_messages && tools.choice == CallChoice::None && !tools.tools.is_empty();
    if !reading.calls && !has_grammar && !is_without_calls {
        return Ok(None);
    }
    let mut rules = Rules { text: String::new(), tokenizer, markers: &reading.dialect.markers, count: 0 };
    if consists_of_messages {
        let answer = rules.harmony(reading, tools, has_grammar)?;
        return Ok(Some(format!("start: {answer}\n{}", rules.text)));
    }
    let thinking = rules.thinking(reading);
    let answer = if reading.calls { rules.answer(reading, tools, has_grammar)? } else { "@answer".to_owned() };
    Ok(Some(format!("start: {thinking} {answer}\n{}", rules.text)))
}

impl Rules<'_> {
    pub fn rule(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("r{}", self.count);
        let _ = writeln!(self.text, "{name}: {body}");
        name
    }

    /// The name of a rule that is written later, for rules that go on with themselves.
    pub fn reserved(&mut self) -> String {
        self.count += 1;
        format!("r{}", self.count)
    }

    /// Any text, or none.
    pub fn any_text(&mut self) -> String {
        self.count += 1;
        let _ = writeln!(self.text, "T{}: /{ANY}+/", self.count);
        format!("T{}?", self.count)
    }

    /// Text up to this marker and with it.
    pub fn up_to(&mut self, marker: &str) -> String {
        if self.has_special(marker) {
            return format!("{} {}", self.any_text(), self.literal(marker));
        }
        self.count += 1;
        let number = self.count;
        let _ = writeln!(self.text, "t{number}[lazy]: /{ANY}*{}/", escaped(marker));
        format!("t{number}")
    }

    pub fn has_special(&self, text: &str) -> bool {
        self.tokenizer.find_special(text).is_some()
    }

    /// A text of a caller's, whose special tokens are text.
    pub fn plain(text: &str) -> String {
        Value::from(text).to_string()
    }

    /// A text of ours, whose special tokens are tokens.
    pub fn literal(&self, text: &str) -> String {
        let mut terms = Vec::new();
        let mut rest = text;
        loop {
            let special = self.tokenizer.find_special(rest);
            let plain = &rest[..special.as_ref().map_or(rest.len(), |(range, _)| range.start)];
            if !plain.is_empty() {
                terms.push(Value::from(plain).to_string());
            }
            let Some((range, id)) = special else { break };
            debug_assert!(self.markers.is_empty() || self.markers.iter().any(|(marker, _)| *marker == id));
            terms.push(format!("<[{id}]>"));
            rest = &rest[range.end..];
        }
        terms.join(" ")
    }

    fn thinking(&mut self, reading: &Reading) -> String {
        let Some(thinking) = reading.thinking() else { return String::new() };
        let rest = self.up_to(thinking.close);
        let space = "/[ \\n]{1,4}/?";
        if reading.thinks {
            return self.rule(&format!("{rest} {space}"));
        }
        let open = self.literal(thinking.open);
        let rule = self.rule(&format!("{open} {rest} {space}"));
        format!("{rule}?")
    }

    fn answer(&mut self, reading: &Reading, tools: &ToolOptions, has_grammar: bool) -> Result<String, EngineError> {
        let format = reading.dialect.format;
        let trigger = format.trigger();
        let head = format!("{}{}", format.begin, format.open);
        let (open, close, end) = (self.literal(format.open), self.literal(format.close), self.literal(format.end));
        let mut bodies = Vec::new();
        for tool in tools.callable() {
            bodies.push(self.body(format.body, tool)?);
        }
        let body = self.rule(&bodies.join(" | "));
        let first = self.literal(&head[trigger.len()..]);
        let more = match format.between.filter(|_| tools.parallel) {
            Some(between) => format!("({} {open} {body} {close})*", self.literal(between)),
            None => String::new(),
        };
        let mut calls = self.rule(&format!("{first} {body} {close} {more} {end}"));
        if !format.around.0.is_empty() {
            let (before, after) = (self.literal(format.around.0), self.optional(format.around.1));
            calls = self.rule(&format!("{calls} | {before} {calls} {after}"));
        }
        let trigger_term = self.literal(trigger);
        if tools.choice == CallChoice::Required {
            return Ok(self.rule(&format!("{trigger_term} {calls}")));
        }
        Ok(if has_grammar {
            self.rule(&format!("@answer | {trigger_term} {calls}"))
        } else if trigger.is_empty() {
            let others = self.beginnings_of_text(format);
            let _ = writeln!(self.text, "OTHER: /\\s*{others}{ANY}*/");
            self.rule(&format!("{calls} | OTHER?"))
        } else if self.has_special(trigger) {
            let _ = writeln!(self.text, "OTHER: /{ANY}+/");
            self.rule(&format!("OTHER? ({trigger_term} {calls})?"))
        } else {
            let before = self.up_to(trigger);
            let _ = writeln!(self.text, "OTHER: /{ANY}+/");
            self.rule(&format!("{before} {calls} | OTHER?"))
        })
    }

    fn optional(&self, text: &str) -> String {
        if text.is_empty() { String::new() } else { format!("({})?", self.literal(text)) }
    }

    /// Characters that begin no call, where calls begin an answer.
    fn beginnings_of_text(&self, format: &Format) -> String {
        let mut calls = escaped(&format.first_character().to_string());
        if !self.has_special(format.around.0) {
            calls.extend(format.around.0.chars().next());
        }
        format!("[^\\s{calls}]")
    }

    /// A call of one tool, between its markers.
    fn body(&mut self, body: Body, tool: &Tool) -> Result<String, EngineError> {
        Ok(match body {
            Body::Json(key) => {
                let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
                let arguments = self.arguments(tool)?;
                let (head, tail) = (Self::plain(&head), Self::plain("}"));
                self.rule(&format!("{head} {arguments} {tail}"))
            }
            Body::NameThen(then) => {
                let head = self.literal(&format!("{}{then}", tool.name));
                let arguments = self.arguments(tool)?;
                self.rule(&format!("{head} {arguments}"))
            }
            Body::Parameters(parameters) => self.parameters(parameters, tool)?,
            Body::Literals(literals) => self.literals(literals, tool)?,
            Body::Harmony => self.harmony_call(tool)?,
        })
    }

    pub fn arguments(&mut self, tool: &Tool) -> Result<String, EngineError> {
        let schema = tool_schema(&tool.name, &tool.parameters, tool.strict)?;
        Ok(self.rule(&format!("%json {schema}")))
    }

    fn parameters(&mut self, format: &Parameters, tool: &Tool) -> Result<String, EngineError> {
        let head = self.literal(&format!("{}{}", tool.name, format.after_name));
        let empty = Map::new();
        let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required = tool.parameters.get("required").and_then(Value::as_array);
        let mut terms = vec![head];
        for (key, schema) in properties {
            let before = self.literal(&format!("{}{key}{}", format.before_key, format.before_value));
            let value = self.value(format, tool, schema)?;
            let rule = self.rule(&format!("{before} {value}"));
            let is_required = required.is_some_and(|names| names.iter().any(|name| name == key.as_str()));
            terms.push(if is_required { rule } else { format!("{rule}?") });
        }
        Ok(self.rule(&terms.join(" ")))
    }

    /// A value and what closes it: a string as it is, unless only some may come.
    fn value(&mut self, format: &Parameters, tool: &Tool, schema: &Value) -> Result<String, EngineError> {
        let after = self.literal(format.after_value);
        if schema["type"] == "string" {
            let texts = schema["enum"].as_array().map(|all| all.iter().filter_map(Value::as_str).map(Self::plain));
            return Ok(match texts {
                Some(texts) => format!("({}) {after}", texts.collect::<Vec<_>>().join(" | ")),
                None => self.up_to(format.after_value),
            });
        }
        let mut whole = schema.clone();
        if let Value::Object(map) = &mut whole {
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = tool.parameters.get(key) {
                    map.insert(key.to_owned(), definitions.clone());
                }
            }
        }
        let schema = tool_schema(&tool.name, &whole, tool.strict)?;
        let value = self.rule(&format!("%json {schema}"));
        Ok(format!("{value} {after}"))
    }
}

#[cfg(test)]
mod tests;
