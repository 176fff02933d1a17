//! What an answer with tools or reasoning must be: one automaton, `reasoning? (text | calls)`, in llguidance's Lark.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::{
    CallChoice, Reading, Tool, ToolOptions,
    formats::{Body, Parameters},
};
use crate::{
    EngineError, Tokenizer,
    grammar::{escaped, tool_schema},
};

/// Any text.
const ANY: &str = "(?s:.)";

/// Rules as they are written.
struct Rules<'a> {
    text: String,
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
    if !reading.calls && !has_grammar {
        return Ok(None);
    }
    let mut rules = Rules { text: String::new(), tokenizer, markers: &reading.dialect.markers, count: 0 };
    let thinking = rules.thinking(reading);
    let answer = if reading.calls { rules.answer(reading, tools, has_grammar)? } else { "@answer".to_owned() };
    Ok(Some(format!("start: {thinking} {answer}\n{}", rules.text)))
}

impl Rules<'_> {
    fn rule(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("r{}", self.count);
        let _ = writeln!(self.text, "{name}: {body}");
        name
    }

    /// Text up to this marker and with it.
    fn up_to(&mut self, marker: &str) -> String {
        self.count += 1;
        let number = self.count;
        if self.has_special(marker) {
            let _ = writeln!(self.text, "T{number}: /{ANY}+/");
            return format!("T{number}? {}", self.literal(marker));
        }
        let _ = writeln!(self.text, "t{number}[lazy]: /{ANY}*{}/", escaped(marker));
        format!("t{number}")
    }

    fn has_special(&self, text: &str) -> bool {
        self.tokenizer.find_special(text).is_some()
    }

    /// A text whose special tokens are tokens.
    fn literal(&self, text: &str) -> String {
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
        let calls = self.rule(&format!("{first} {body} {close} {more} {end}"));
        let trigger_term = self.literal(trigger);
        if tools.choice == CallChoice::Required {
            return Ok(self.rule(&format!("{trigger_term} {calls}")));
        }
        Ok(if has_grammar {
            self.rule(&format!("@answer | {trigger_term} {calls}"))
        } else if trigger.is_empty() {
            let _ = writeln!(self.text, "OTHER: /\\s*[^\\s{{]{ANY}*/");
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

    /// A call of one tool, between its markers.
    fn body(&mut self, body: Body, tool: &Tool) -> Result<String, EngineError> {
        Ok(match body {
            Body::Json(key) => {
                let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
                let arguments = self.arguments(tool)?;
                let (head, tail) = (self.literal(&head), self.literal("}"));
                self.rule(&format!("{head} {arguments} {tail}"))
            }
            Body::NameThen(then) => {
                let head = self.literal(&format!("{}{then}", tool.name));
                let arguments = self.arguments(tool)?;
                self.rule(&format!("{head} {arguments}"))
            }
            Body::Parameters(parameters) => self.parameters(parameters, tool)?,
        })
    }

    fn arguments(&mut self, tool: &Tool) -> Result<String, EngineError> {
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
            let texts = schema["enum"].as_array().map(|all| all.iter().filter_map(Value::as_str).map(|text| self.literal(text)));
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
