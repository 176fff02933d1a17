//! What an answer must be: a grammar that every token of it is checked against.
//!
//! A grammar is compiled on the caller's thread, within limits that are counts and bytes, over a trie of the tokenizer's own
//! pieces, and kept for the next request with the same one. Each choice of a request has a [`Constraint`]: how far it has come.

mod compiler;
mod constraint;
mod forced;
mod rules;
mod schema;
mod structural_tag;
mod text;
mod vocabulary;

use serde_json::Value;

pub use compiler::{Compiled, GrammarCompiler};
pub use constraint::Constraint;
pub(crate) use rules::{ANY, Rules};
pub use schema::check_strict;
pub(crate) use schema::{describes, tool_schema};
pub(crate) use text::{OF_TEXTS, TextLimit, text_limit};

use crate::EngineError;

/// Bytes of a grammar at most.
pub const MAX_GRAMMAR_BYTES: usize = 1 << 16;

/// What an answer must be, as a whole.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// A text that this expression matches from its first character to its last, in the syntax of Rust's `regex` without
    /// anchors and look-around.
    Regex(String),
    /// JSON that this JSON Schema describes; `{"type": "object"}` is any object. A keyword that is not enforced is an error.
    JsonSchema(Value),
    /// A grammar in llguidance's dialect of Lark.
    Lark(String),
    /// llguidance's own form: `{"grammars": [{"lark_grammar": ...}, {"json_schema": ...}]}`, of which the first is the start, or
    /// Lark.
    Llguidance(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Free text with parts of a given form: a structural tag as vLLM and xgrammar describe it, an object with `format`, or with
    /// `structures` and `triggers`. What of it is not honoured is an error that names it.
    StructuralTag(Value),
}

/// What is wrong with a grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrammarFault {
    /// The JSON Schema is none, or has what cannot be enforced.
    Schema,
    /// The grammar or expression cannot be read.
    Syntax,
    /// It is larger than a limit allows.
    TooComplex,
}

impl GrammarFault {
    /// The machine's word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Schema => "invalid_schema",
            Self::Syntax => "invalid_grammar",
            Self::TooComplex => "grammar_too_complex",
        }
    }

    pub(crate) fn error(self, message: impl Into<String>) -> EngineError {
        EngineError::Grammar { fault: self, message: message.into() }
    }
}

/// Of one of some texts, as a regular expression.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if r"\.+*?()|[]{}^$#&-~/".contains(character) {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

#[cfg(test)]
mod tests;
