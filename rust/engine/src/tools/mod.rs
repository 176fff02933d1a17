//! Functions that a model may call: how they are put to it, how it writes calls, and how these are read back.
//!
//! A model has one way to write calls, a row of [`formats::FORMATS`], which its chat template and its vocabulary tell when it is
//! loaded. The row says what a call looks like. From it come the grammar that an answer is held to and the [`Reader`] that takes
//! an answer apart; both know reasoning as well, so there is one automaton a request.

mod call_json;
pub(crate) mod formats;
mod generic;
mod grammar;
mod harmony;
mod literals;
mod parameters;
mod reader;
mod shapes;

use std::sync::Arc;

use serde_json::{Value, json};

use formats::Body;
pub(crate) use formats::{Dialect, Format, Thinking};
pub(crate) use generic::with_tools;
pub(crate) use grammar::answer_grammar;
pub(crate) use reader::{MARK, Parts, Reader};

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// The JSON Schema of its arguments, an object.
    pub parameters: Value,
    /// Arguments are as the schema says in every respect, or the request is refused. Else what a grammar cannot enforce is only
    /// told to the model.
    pub strict: bool,
}

impl Tool {
    /// In the form that chat templates know.
    fn definition(&self) -> Value {
        let mut function = json!({ "name": self.name, "description": self.description, "parameters": self.parameters });
        if let (None, Some(map)) = (&self.description, function.as_object_mut()) {
            map.shift_remove("description");
        }
        json!({ "type": "function", "function": function })
    }
}

/// Whether calls may come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallChoice {
    /// Text or calls, as the model likes.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// None, and the model does not hear of the tools.
    None,
}

/// What a request says of tools.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolOptions {
    /// All that the model is told of.
    pub tools: Vec<Tool>,
    /// Whether calls may come.
    pub choice: CallChoice,
    /// Only these may be called; `None`: all.
    pub only: Option<Vec<String>>,
    /// Several calls may come in one answer.
    pub parallel: bool,
}

impl Default for ToolOptions {
    fn default() -> Self {
        Self { tools: Vec::new(), choice: CallChoice::Auto, only: None, parallel: true }
    }
}

impl ToolOptions {
    /// Those that may be called.
    pub fn callable(&self) -> impl Iterator<Item = &Tool> {
        let may =
            |tool: &&Tool| self.choice != CallChoice::None && self.only.as_ref().is_none_or(|only| only.contains(&tool.name));
        self.tools.iter().filter(may)
    }
}

/// A call that an answer makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// By which its result is sent back.
    pub id: String,
    /// The function.
    pub name: String,
    /// Its arguments, a JSON object as the model wrote it.
    pub arguments: String,
}

/// A part of a call: the first has `id` and `name`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCallDelta {
    /// Which call of the answer, from 0.
    pub index: usize,
    /// By which its result is sent back.
    pub id: Option<String>,
    /// The function.
    pub name: Option<String>,
    /// What is new of the arguments.
    pub arguments: String,
}

impl ToolCallDelta {
    /// Appends it to other parts: what goes on with the last of them becomes one with it, for clients take the parts of one
    /// message by their index.
    pub fn join(self, parts: &mut Vec<Self>) {
        match parts.last_mut() {
            Some(last) if last.index == self.index && self.id.is_none() => last.arguments.push_str(&self.arguments),
            _ => parts.push(self),
        }
    }

    /// Puts parts of calls together.
    pub fn collect(self, calls: &mut Vec<ToolCall>) {
        while calls.len() <= self.index {
            calls.push(ToolCall { id: String::new(), name: String::new(), arguments: String::new() });
        }
        let call = &mut calls[self.index];
        call.id.extend(self.id);
        call.name.extend(self.name);
        call.arguments.push_str(&self.arguments);
    }
}

/// Characters of a short id: Mistral's templates refuse calls with others.
const SHORT_ID_LEN: usize = 9;

/// A new id of a call.
fn call_id(format: &Format) -> String {
    use rand::{Rng, distr::Alphanumeric};
    let letters = |count| rand::rng().sample_iter(Alphanumeric).take(count).map(char::from).collect::<String>();
    if format.short_ids { letters(SHORT_ID_LEN) } else { format!("call_{}", letters(24)) }
}

/// A dialect and what a request asks of it: what is needed to read an answer.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    /// How the model writes.
    pub dialect: Arc<Dialect>,
    /// The functions, whose schemas tell strings from other values; no calls are read when there are none.
    pub tools: Arc<[Tool]>,
    /// Calls are read as such.
    pub calls: bool,
    /// The prompt ends within reasoning.
    pub thinks: bool,
    /// The prompt ends behind reasoning, of which no more comes.
    pub has_thought: bool,
    /// What the prompt has of the message that the answer goes on with, where answers consist of messages.
    pub begun: String,
}

impl Reading {
    /// Of an answer to a prompt that ends so.
    pub fn new(dialect: &Arc<Dialect>, options: &ToolOptions, prompt_end: &str) -> Self {
        let tools: Arc<[Tool]> = options.callable().cloned().collect();
        let ends_with = |marker: fn(&Thinking) -> &'static str| {
            dialect.thinking.is_some_and(|thinking| prompt_end.trim_end().ends_with(marker(thinking).trim_end()))
        };
        let (thinks, has_thought) = (ends_with(|thinking| thinking.open), ends_with(|thinking| thinking.close));
        let begun = if dialect.format.body == Body::Harmony { harmony::begun(prompt_end) } else { "" }.to_owned();
        Self { dialect: Arc::clone(dialect), calls: !tools.is_empty(), tools, thinks, has_thought, begun }
    }

    /// A text as it comes: marked before each special token in it.
    fn marked(&self, text: &str) -> String {
        let mut marked = text.to_owned();
        for (_, spelling) in &self.dialect.markers {
            marked = marked.replace(spelling.as_str(), &format!("{MARK}{spelling}"));
        }
        marked
    }

    /// How reasoning is marked that may come.
    pub fn thinking(&self) -> Option<&'static Thinking> {
        self.dialect.thinking.filter(|_| !self.has_thought)
    }

    /// The text that ends reasoning wherever it is.
    pub fn thinking_end(&self) -> Option<&'static str> {
        match self.dialect.format.body {
            // A call may have to follow.
            Body::Harmony if self.calls => Some(harmony::TO_NEXT),
            Body::Harmony => Some(harmony::TO_FINAL),
            _ => self.thinking().map(|thinking| thinking.close),
        }
    }

    /// Whether anything of the answer is not its text.
    pub fn is_needed(&self) -> bool {
        self.calls || self.thinking().is_some() || self.dialect.format.body == Body::Harmony
    }
}
