//! Rules of a grammar in llguidance's Lark, as they are written.

use std::{fmt::Write as _, ops::Range};

use serde_json::Value;

use super::escaped;
use crate::Tokenizer;

/// Any character, as an expression.
pub(crate) const ANY: &str = "(?s:.)";

/// Rules as they are written.
pub(crate) struct Rules<'a> {
    /// What is written.
    pub text: String,
    tokenizer: &'a Tokenizer,
    count: usize,
}

impl<'a> Rules<'a> {
    /// None yet, for a model with these tokens.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { text: String::new(), tokenizer, count: 0 }
    }

    /// The name of a new rule.
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

    /// The name of a new terminal, which matches as much as it can.
    pub fn terminal(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("T{}", self.count);
        let _ = writeln!(self.text, "{name}: {body}");
        name
    }

    /// The name of a new terminal that ends as soon as it matches.
    pub fn lazy(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("t{}", self.count);
        let _ = writeln!(self.text, "{name}[lazy]: {body}");
        name
    }

    /// Any text, or none.
    pub fn any_text(&mut self) -> String {
        format!("{}?", self.terminal(&format!("/{ANY}+/")))
    }

    /// Text up to this marker and with it.
    pub fn up_to(&mut self, marker: &str) -> String {
        if let Some((token, _)) = self.find_special(marker) {
            // As much text as can be would have the beginning of the marker in it.
            let (text, rest) = marker.split_at(token.start);
            let text = if text.is_empty() { self.any_text() } else { self.terminal(&format!("/{ANY}*{}/", escaped(text))) };
            return format!("{text} {}", self.literal(rest));
        }
        self.lazy(&format!("/{ANY}*{}/", escaped(marker)))
    }

    /// Where the first special token in it is, and which.
    pub fn find_special(&self, text: &str) -> Option<(Range<usize>, u32)> {
        self.tokenizer.find_special(text)
    }

    /// Whether there is a special token in it.
    pub fn has_special(&self, text: &str) -> bool {
        self.find_special(text).is_some()
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
            let special = self.find_special(rest);
            let plain = &rest[..special.as_ref().map_or(rest.len(), |(range, _)| range.start)];
            if !plain.is_empty() {
                terms.push(Value::from(plain).to_string());
            }
            let Some((range, id)) = special else { break };
            terms.push(format!("<[{id}]>"));
            rest = &rest[range.end..];
        }
        terms.join(" ")
    }
}
