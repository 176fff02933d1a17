//! How models write calls: a row each.

use super::harmony;
use crate::Tokenizer;

/// What stands between the markers of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// A JSON object with the function's name and, below this key, its arguments.
    Json(&'static str),
    /// The name, this text, and the arguments as a JSON object.
    NameThen(&'static str),
    /// The name and each argument by itself.
    Parameters(&'static Parameters),
    /// The name and, in brackets, the arguments as literals.
    Literals(&'static Literals),
    /// A message to the function; [`super::harmony`] reads and describes all of such an answer.
    Harmony,
}

/// Arguments one by one, each between markers: strings as they are, other values as JSON.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Behind the function's name.
    pub after_name: &'static str,
    /// Before a key.
    pub before_key: &'static str,
    /// Between key and value.
    pub before_value: &'static str,
    /// Behind a value.
    pub after_value: &'static str,
}

/// Arguments as a programming language writes them, not JSON: `key value, key value` in brackets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Literals {
    /// Around the arguments.
    pub brackets: (char, char),
    /// Between an argument's name and its value. Within values it is a colon.
    pub assign: char,
    /// Around texts.
    pub quotes: Quotes,
    /// True, false and null.
    pub words: [&'static str; 3],
}

/// How texts begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quotes {
    /// As Python's: single or double, with backslash escapes.
    Python,
    /// This on either side; between them nothing is escaped, and what has none and is no number or word is a text too.
    Marker(&'static str),
}

const PYTHON: Literals = Literals { brackets: ('(', ')'), assign: '=', quotes: Quotes::Python, words: ["True", "False", "None"] };
const GEMMA: Literals =
    Literals { brackets: ('{', '}'), assign: ':', quotes: Quotes::Marker("<|\"|>"), words: ["true", "false", "null"] };
const FUNCTION_GEMMA: Literals = Literals { quotes: Quotes::Marker("<escape>"), ..GEMMA };

/// One way to write calls. Whitespace at the ends of the texts is what a model writes; it is not needed to read a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// As `/v1/models` shows it.
    pub name: &'static str,
    /// Before the first call.
    pub begin: &'static str,
    /// Before each call.
    pub open: &'static str,
    /// Some models leave out the first line of that: before a call on a line of its own without it. Empty: there is none.
    pub open_alone: &'static str,
    /// The call.
    pub body: Body,
    /// Behind each call.
    pub close: &'static str,
    /// Between two calls; `None`: there is one at most.
    pub between: Option<&'static str>,
    /// Behind the last call.
    pub end: &'static str,
    /// May stand around all that.
    pub around: (&'static str, &'static str),
    /// Between the name and the id that the model gives a call, in vocabularies that have this token; empty: it gives none.
    pub call_id: &'static str,
    /// Ids are 9 letters and digits.
    pub short_ids: bool,
    /// The template puts the arguments of earlier calls into its text as they are.
    pub arguments_as_text: bool,
    /// The template has these texts.
    template: &'static [&'static str],
    /// The vocabulary has these tokens.
    tokens: &'static [&'static str],
}

const PLAIN: Format = Format {
    name: "",
    begin: "",
    open: "",
    open_alone: "",
    body: Body::Json("arguments"),
    close: "",
    between: None,
    end: "",
    around: ("", ""),
    call_id: "",
    short_ids: false,
    arguments_as_text: false,
    template: &[],
    tokens: &[],
};

/// In the order in which they are tried: what is special before what is general.
pub(crate) const FORMATS: [Format; 19] = [
    Format { name: "harmony", body: Body::Harmony, template: &["<|start|>assistant", "<|channel|>", "functions."], ..PLAIN },
    Format {
        name: "gemma4",
        open: "<|tool_call>call:",
        body: Body::Literals(&GEMMA),
        close: "<tool_call|>",
        between: Some(""),
        template: &["<|tool_call>call:"],
        ..PLAIN
    },
    Format {
        name: "functiongemma",
        open: "<start_function_call>call:",
        body: Body::Literals(&FUNCTION_GEMMA),
        close: "<end_function_call>",
        between: Some(""),
        template: &["<start_function_call>call:"],
        ..PLAIN
    },
    Format {
        name: "mistral-args",
        open: "[TOOL_CALLS]",
        body: Body::NameThen("[ARGS]"),
        between: Some(""),
        call_id: "[CALL_ID]",
        short_ids: true,
        template: &["[TOOL_CALLS]"],
        tokens: &["[TOOL_CALLS]", "[ARGS]"],
        ..PLAIN
    },
    Format {
        name: "mistral",
        begin: "[TOOL_CALLS][",
        between: Some(", "),
        end: "]",
        short_ids: true,
        template: &["[TOOL_CALLS]"],
        ..PLAIN
    },
    Format {
        name: "deepseek-v3.1",
        begin: "<｜tool▁calls▁begin｜>",
        open: "<｜tool▁call▁begin｜>",
        body: Body::NameThen("<｜tool▁sep｜>"),
        close: "<｜tool▁call▁end｜>",
        between: Some(""),
        end: "<｜tool▁calls▁end｜>",
        arguments_as_text: true,
        template: &["<｜tool▁calls▁begin｜>", "tool_call_name"],
        ..PLAIN
    },
    Format {
        name: "deepseek-v3",
        begin: "<｜tool▁calls▁begin｜>",
        open: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        body: Body::NameThen("\n```json\n"),
        close: "\n```<｜tool▁call▁end｜>",
        between: Some("\n"),
        end: "<｜tool▁calls▁end｜>",
        arguments_as_text: true,
        template: &["<｜tool▁calls▁begin｜>"],
        ..PLAIN
    },
    Format {
        name: "seed-oss",
        open: "<seed:tool_call>\n<function=",
        body: Body::Parameters(&Parameters {
            after_name: ">\n",
            before_key: "<parameter=",
            before_value: ">",
            after_value: "</parameter>\n",
        }),
        close: "</function>\n</seed:tool_call>",
        between: Some("\n"),
        template: &["<seed:tool_call>", "<function="],
        ..PLAIN
    },
    Format {
        name: "qwen3-coder",
        open: "<tool_call>\n<function=",
        open_alone: "<function=",
        body: Body::Parameters(&Parameters {
            after_name: ">\n",
            before_key: "<parameter=",
            before_value: ">\n",
            after_value: "\n</parameter>\n",
        }),
        close: "</function>\n</tool_call>",
        between: Some("\n"),
        template: &["<tool_call>", "<function=", "<parameter="],
        ..PLAIN
    },
    Format {
        name: "glm4.5",
        open: "<tool_call>",
        body: Body::Parameters(&Parameters {
            after_name: "\n",
            before_key: "<arg_key>",
            before_value: "</arg_key>\n<arg_value>",
            after_value: "</arg_value>\n",
        }),
        close: "</tool_call>",
        between: Some("\n"),
        template: &["<arg_key>", "<tool_call>"],
        ..PLAIN
    },
    Format {
        name: "phi4-mini-functools",
        begin: "functools[",
        between: Some(", "),
        end: "]",
        template: &["functools["],
        ..PLAIN
    },
    Format {
        name: "phi4-mini",
        begin: "<|tool_call|>[",
        between: Some(", "),
        end: "]<|/tool_call|>",
        template: &["<|tool|>"],
        tokens: &["<|tool_call|>", "<|/tool_call|>"],
        ..PLAIN
    },
    Format {
        name: "granite3",
        begin: "<|tool_call|>[",
        between: Some(", "),
        end: "]",
        template: &["<|tool_call|>"],
        tokens: &["<|tool_call|>"],
        ..PLAIN
    },
    Format {
        name: "granite3.1",
        begin: "<tool_call>[",
        between: Some(", "),
        end: "]",
        template: &["<tool_call>", "<|start_of_role|>", "JSON list"],
        ..PLAIN
    },
    Format {
        name: "hermes",
        open: "<tool_call>\n",
        close: "\n</tool_call>",
        between: Some("\n"),
        template: &["<tool_call>"],
        ..PLAIN
    },
    Format {
        name: "pythonic",
        begin: "[",
        body: Body::Literals(&PYTHON),
        between: Some(", "),
        end: "]",
        around: ("<|python_start|>", "<|python_end|>"),
        template: &["[func_name1("],
        ..PLAIN
    },
    Format {
        name: "llama4-json",
        body: Body::Json("parameters"),
        around: ("<|python_start|>", "<|python_end|>"),
        template: &["\"parameters\"", "<|python_start|>"],
        ..PLAIN
    },
    Format {
        name: "llama3-json",
        body: Body::Json("parameters"),
        around: ("<|python_tag|>", ""),
        template: &["\"parameters\""],
        tokens: &["<|eom_id|>"],
        ..PLAIN
    },
    GENERIC,
];

/// What a model is asked for whose template knows nothing of tools, or of a form that is not here.
pub(crate) const GENERIC: Format =
    Format { name: "generic", open: "<tool_call>\n", close: "\n</tool_call>", between: Some("\n"), ..PLAIN };

impl Format {
    /// The text at which reading begins: the first line of what stands before the first call, without the spaces around it and
    /// without a bracket behind a marker. Empty: a call begins an answer.
    pub fn trigger(&self) -> &'static str {
        let head = if self.begin.is_empty() { self.open } else { self.begin }.trim();
        let head = head.split('\n').next().unwrap_or_default();
        let marker = head.trim_end_matches('[');
        if marker.is_empty() || marker.ends_with(['>', ']']) { marker } else { head }
    }

    /// What opens a call behind the text at which reading begins, without the spaces around it.
    pub fn opens(&self) -> &'static str {
        let open = self.open.trim();
        if self.begin.is_empty() { open.strip_prefix(self.trigger()).unwrap_or(open).trim_start() } else { open }
    }

    /// What closes a call: what is some of its own text, and what may be missing behind that.
    pub fn closes(&self) -> (&'static str, &'static str) {
        match self.body {
            Body::Parameters(_) => self.close.split_once('\n').unwrap_or((self.close, "")),
            _ => ("", self.close),
        }
    }

    /// What a call begins with where it begins an answer.
    pub fn first_character(&self) -> char {
        self.begin.chars().next().unwrap_or('{')
    }

    fn is_of(&self, template: &str, tokenizer: &Tokenizer) -> bool {
        self.template.iter().all(|text| template.contains(text))
            && self.tokens.iter().all(|token| tokenizer.token_to_id(token).is_some())
    }
}

/// How reasoning is marked.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Thinking {
    /// Before it.
    pub open: &'static str,
    /// Behind it.
    pub close: &'static str,
}

pub(crate) const THINKING: [Thinking; 4] = [
    Thinking { open: "<think>", close: "</think>" },
    Thinking { open: "[THINK]", close: "[/THINK]" },
    Thinking { open: "<seed:think>", close: "</seed:think>" },
    Thinking { open: "<|channel>thought\n", close: "<channel|>" },
];

/// How one model writes what is not its answer's text.
#[derive(Debug)]
pub(crate) struct Dialect {
    /// Its calls.
    pub format: &'static Format,
    /// Its reasoning, if its template knows of it.
    pub thinking: Option<&'static Thinking>,
    /// Special tokens that mark either, which become text, with their spelling.
    pub markers: Vec<(u32, String)>,
}

impl Dialect {
    /// Of a model with this template, which puts the tools it gets into prompts or does not.
    pub fn of(template: &str, tokenizer: &Tokenizer, uses_tools: bool) -> Self {
        let known = FORMATS.iter().find(|format| format.is_of(template, tokenizer));
        let format = known.filter(|_| uses_tools).unwrap_or(&GENERIC);
        let is_marked = |thinking: &&Thinking| template.contains(thinking.close) && format.body != Body::Harmony;
        let thinking = THINKING.iter().find(is_marked);
        let mut dialect = Self { format, thinking, markers: Vec::new() };
        for text in dialect.texts() {
            let mut rest = text;
            while let Some((range, id)) = tokenizer.find_special(rest) {
                dialect.markers.push((id, rest[range.clone()].to_owned()));
                rest = &rest[range.end..];
            }
        }
        dialect.markers.sort_unstable();
        dialect.markers.dedup();
        dialect
    }

    /// The tokens with which calls begin, where one token spells such a beginning.
    pub fn call_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let trigger = self.format.trigger();
        let special = tokenizer.find_special(trigger).filter(|(range, _)| range.start == 0).map(|(_, id)| id);
        let plain = tokenizer.token_to_id(trigger).filter(|_| trigger.len() > 1);
        let around = Some(self.format.around.0).filter(|token| !token.is_empty()).and_then(|token| tokenizer.token_to_id(token));
        special.or(plain).into_iter().chain(around).collect()
    }

    /// Every text that may hold a marker.
    fn texts(&self) -> Vec<&'static str> {
        let Format { begin, open, body, close, end, around, call_id, .. } = *self.format;
        let mut texts = vec![begin, open, close, end, around.0, around.1, call_id];
        match body {
            Body::Json(_) => {}
            Body::NameThen(text) => texts.push(text),
            Body::Parameters(parameters) => {
                texts.extend([parameters.after_name, parameters.before_key, parameters.before_value, parameters.after_value]);
            }
            Body::Literals(literals) => texts.extend(match literals.quotes {
                Quotes::Marker(marker) => Some(marker),
                Quotes::Python => None,
            }),
            Body::Harmony => texts.extend(harmony::MARKERS),
        }
        texts.extend(self.thinking.into_iter().flat_map(|thinking| [thinking.open, thinking.close]));
        texts
    }
}
