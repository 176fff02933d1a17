//! The grammar of a call whose arguments stand one by one between markers.

use serde_json::{Map, Value};

use super::super::{
    Tool,
    formats::Parameters,
    shapes::{is_text, shapes},
};
use crate::{
    EngineError,
    grammar::{ANY, GrammarFault, OF_TEXTS, Rules, TextLimit, check_strict, describes, escaped, text_limit, tool_schema},
};

/// Keywords of all arguments together that are enforced; with `strict` others are refused.
const OF_ARGUMENTS: [&str; 6] = ["type", "properties", "required", "additionalProperties", "$defs", "definitions"];

/// A term that is no text.
const NOTHING: &str = "\"\"";

impl Rules<'_> {
    /// What a call of a tool has behind its name: its arguments, in the order of the schema.
    pub(in super::super) fn parameters(&mut self, format: &Parameters, tool: &Tool) -> Result<String, EngineError> {
        let empty = Map::new();
        let schema = tool.parameters.as_object().unwrap_or(&empty);
        if tool.strict {
            check_strict(&tool.parameters).map_err(|error| of_tool(tool, &error))?;
            if let Some(key) = schema.keys().find(|key| !OF_ARGUMENTS.contains(&key.as_str()) && !describes(key)) {
                return Err(left_out(tool, key, "is not enforced"));
            }
        }
        let mut ways = Vec::new();
        for shape in shapes(&tool.parameters) {
            ways.push(self.arguments_of(format, tool, &shape)?);
        }
        Ok(self.rule(&ways.join(" | ")))
    }

    /// Arguments of one shape.
    fn arguments_of(&mut self, format: &Parameters, tool: &Tool, shape: &Map<String, Value>) -> Result<String, EngineError> {
        let more = shape.get("additionalProperties").unwrap_or(&Value::Bool(true));
        let Some(properties) = shape.get("properties").and_then(Value::as_object) else {
            // Of the arguments nothing is said.
            if *more == Value::Bool(false) {
                return Ok(NOTHING.to_owned());
            }
            let (before, between) = (self.literal(format.before_key), self.literal(format.before_value));
            let is_any = *more == Value::Bool(true);
            let value = if is_any { self.text(format.after_value, &[]) } else { self.value(format, tool, more)? };
            return Ok(self.rule(&format!("({before} /[A-Za-z_][A-Za-z0-9_.-]*/ {between} {value})*")));
        };
        let required = shape.get("required").and_then(Value::as_array);
        let mut terms = vec![NOTHING.to_owned()];
        for (key, schema) in properties {
            let before = self.literal(&format!("{}{key}{}", format.before_key, format.before_value));
            let value = self.value(format, tool, schema)?;
            let rule = self.rule(&format!("{before} {value}"));
            let is_required = required.is_some_and(|names| names.iter().any(|name| name == key.as_str()));
            terms.push(if is_required { rule } else { format!("{rule}?") });
        }
        Ok(self.rule(&terms.join(" ")))
    }

    /// A value and what closes it: a text as it is, other values as JSON.
    fn value(&mut self, format: &Parameters, tool: &Tool, schema: &Value) -> Result<String, EngineError> {
        if let Some(map) = schema.as_object().filter(|_| is_text(schema)) {
            let limits = limits(tool, map)?;
            return Ok(self.text(format.after_value, &limits));
        }
        let after = self.literal(format.after_value);
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

    /// A text within its limits, and what closes it.
    fn text(&mut self, after: &str, limits: &[TextLimit]) -> String {
        if limits.is_empty() {
            return self.up_to(after);
        }
        let mut all: Vec<String> = limits.iter().map(|limit| format!("/({})/", limit.expression)).collect();
        // A line break at either end of a value is none of it.
        all.push(format!("/([^\\n]({ANY}*[^\\n])?)?/"));
        let Some((token, _)) = self.find_special(after) else {
            // Nor does a value have what closes it.
            all.push(format!("~/{ANY}*{}{ANY}*/", escaped(after).replace('\n', "\\n")));
            return self.lazy(&format!("({}) {}", all.join(" & "), self.literal(after)));
        };
        if token.start > 0 {
            let (text, rest) = after.split_at(token.start);
            let text = self.terminal(&format!("({}) {}", all.join(" & "), Self::plain(text)));
            return format!("{text} {}", self.literal(rest));
        }
        all.push(format!("/{ANY}+/"));
        let text = self.terminal(&all.join(" & "));
        let or_none = if limits.iter().all(|limit| limit.may_be_empty) { "?" } else { "" };
        format!("{text}{or_none} {}", self.literal(after))
    }
}

/// The limits of a text that are enforced.
fn limits(tool: &Tool, schema: &Map<String, Value>) -> Result<Vec<TextLimit>, EngineError> {
    let is_unknown = |key: &&String| *key != "type" && !OF_TEXTS.contains(&key.as_str()) && !describes(key);
    if let Some(key) = schema.keys().find(is_unknown).filter(|_| tool.strict) {
        return Err(left_out(tool, key, "is not enforced"));
    }
    let mut limits = Vec::new();
    for keyword in OF_TEXTS {
        match text_limit(keyword, schema) {
            Ok(limit) => limits.extend(limit),
            Err(why) if tool.strict => return Err(left_out(tool, keyword, &format!("{why}, which is not enforced"))),
            Err(_) => {}
        }
    }
    Ok(limits)
}

fn left_out(tool: &Tool, keyword: &str, why: &str) -> EngineError {
    let keyword: String = keyword.chars().take(64).collect();
    GrammarFault::Schema
        .error(format!("tool {:?}: `{keyword}` {why} in calls as this model writes them: leave it out", tool.name))
}

fn of_tool(tool: &Tool, error: &EngineError) -> EngineError {
    match error {
        EngineError::Grammar { fault, message } => fault.error(format!("tool {:?}: {message}", tool.name)),
        other => EngineError::Internal(other.to_string()),
    }
}
