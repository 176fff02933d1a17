//! What an answer with tools or reasoning must be: one automaton, `reasoning? (text | calls)`, in llguidance's Lark.

use std::fmt::Write as _;

use serde_json::Value;

use super::{
    CallChoice, Reading, Tool, ToolOptions,
    formats::{Body, Format},
};
use crate::{
    EngineError, Tokenizer,
    grammar::{ANY, Rules, escaped, tool_schema},
};

/// A short id.
const SHORT_ID: &str = "[A-Za-z0-9]{9}";

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
    let mut rules = Rules::new(tokenizer);
    if consists_of_messages {
        let answer = rules.harmony(reading, tools, has_grammar)?;
        return Ok(Some(format!("start: {answer}\n{}", rules.text)));
    }
    let thinking = rules.thinking(reading);
    let answer = if reading.calls { rules.answer(reading, tools, has_grammar)? } else { "@answer".to_owned() };
    Ok(Some(format!("start: {thinking} {answer}\n{}", rules.text)))
}

impl Rules<'_> {
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
        let may_be_alone = !format.open_alone.is_empty() && tools.choice != CallChoice::Required && !has_grammar;
        let (mut bodies, mut alone) = (Vec::new(), Vec::new());
        for tool in tools.callable() {
            let (body, behind_name) = self.body(format, tool)?;
            bodies.push(body);
            if let (true, Body::Parameters(parameters)) = (may_be_alone, format.body) {
                let name = escaped(&format!("{}{}", tool.name, parameters.after_name.trim_end()));
                let name = self.lazy(&format!("/{name}[ \\t]*\\n/"));
                alone.push(self.rule(&format!("{name} {behind_name}")));
            }
        }
        let body = self.rule(&bodies.join(" | "));
        let first = self.literal(&head[trigger.len()..]);
        let more = match format.between.filter(|_| tools.parallel) {
            Some(between) => format!("({} {open} {body} {close})*", self.literal(between)),
            None => String::new(),
        };
        let mut calls = self.rule(&format!("{first} {body} {close} {more} {end}"));
        let (lines, alone) = if may_be_alone {
            let lines = self.lines_that_begin_with(format.open_alone);
            let (close, rest) = format.closes();
            let (close, rest) = (self.literal(close), self.literal(&format!("\n{rest}")));
            (format!("{lines}?"), format!("| {lines} ({}) {close} ({rest} {more})? {end}", alone.join(" | ")))
        } else {
            (String::new(), String::new())
        };
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
            self.rule(&format!("{lines} OTHER? ({trigger_term} {calls})? {alone}"))
        } else {
            let before = self.up_to(trigger);
            let _ = writeln!(self.text, "OTHER: /{ANY}+/");
            self.rule(&format!("{lines} ({before} {calls} | OTHER?) {alone}"))
        })
    }

    /// Text up to a line that begins with a marker, and with that, once or again. Of what may follow it any text is one, so that
    /// each name needs no text before it in a terminal of its own, which a lexer could not bear for many.
    fn lines_that_begin_with(&mut self, marker: &str) -> String {
        let line = format!("[ \\t]*{}", escaped(marker));
        let (first, next) = (self.lazy(&format!("/({ANY}*\\n)?{line}/")), self.lazy(&format!("/{ANY}*\\n{line}/")));
        self.rule(&format!("{first} {next}*"))
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

    /// A call of one tool, between its markers, and what of it stands behind the name where the arguments come one by one.
    fn body(&mut self, format: &Format, tool: &Tool) -> Result<(String, String), EngineError> {
        let mut behind_name = String::new();
        let body = match format.body {
            Body::Json(key) => {
                let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
                let arguments = self.arguments(tool)?;
                // Templates of the models whose ids are short write the id behind the arguments.
                let id = if format.short_ids {
                    format!("({} /{SHORT_ID}/ {})?", Self::plain(", \"id\": \""), Self::plain("\""))
                } else {
                    String::new()
                };
                let (head, tail) = (Self::plain(&head), Self::plain("}"));
                self.rule(&format!("{head} {arguments} {id} {tail}"))
            }
            Body::NameThen(then) => {
                let (name, then) = (self.literal(&tool.name), self.literal(then));
                // As a token alone: text that spells it would be some of the name.
                let id = if self.has_special(format.call_id) {
                    format!("({} /{SHORT_ID}/)?", self.literal(format.call_id))
                } else {
                    String::new()
                };
                let arguments = self.arguments(tool)?;
                self.rule(&format!("{name} {id} {then} {arguments}"))
            }
            Body::Parameters(parameters) => {
                let head = self.literal(&format!("{}{}", tool.name, parameters.after_name));
                behind_name = self.parameters(parameters, tool)?;
                self.rule(&format!("{head} {behind_name}"))
            }
            Body::Literals(literals) => self.literals(literals, tool)?,
            Body::Harmony => self.harmony_call(tool)?,
        };
        Ok((body, behind_name))
    }

    pub fn arguments(&mut self, tool: &Tool) -> Result<String, EngineError> {
        let schema = tool_schema(&tool.name, &tool.parameters, tool.strict)?;
        Ok(self.rule(&format!("%json {schema}")))
    }
}

#[cfg(test)]
mod tests;
