//! Answers that consist of messages, as gpt-oss writes them: OpenAI's harmony.
//!
//! A message has a header, which says for whom and in which channel it is, and a text. Reasoning is in the channel `analysis`,
//! the answer in `final`, and what is said before a call in `commentary`. A call is a message to a function: its text is the
//! arguments. It ends the answer, so there is one at most.

use super::{
    CallChoice, Parts, Reading, Tool, ToolCallDelta, ToolOptions, call_id,
    call_json::JsonValue,
    reader::{Found, MARK, find},
};
use crate::{EngineError, grammar::Rules};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";
/// All that may be a special token.
pub(super) const MARKERS: [&str; 7] = [START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN];
/// What ends a text. Those that begin a message do so even where the end of the one before is missing.
const ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];
/// Ends a message, and begins another.
pub(super) const TO_NEXT: &str = "<|end|><|start|>assistant";
/// Ends a message, and begins the text.
pub(super) const TO_FINAL: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";
/// Before the name of a function that is called.
const FUNCTIONS: &str = "functions.";

/// What the prompt has of the message that the answer goes on with: what is behind its last beginning.
pub(super) fn begun(prompt_end: &str) -> &str {
    prompt_end.rsplit_once(START).map_or("", |(_, message)| message)
}

/// What a message is.
#[derive(Debug, PartialEq)]
enum Kind {
    Reasoning,
    Text,
    Call(String),
    /// To a function, where none may be called.
    Dropped,
}

/// Reads a header: the text between the beginning of a message and its text, with markers spelled plainly.
fn kind(header: &str, reading: &Reading) -> Kind {
    let word =
        |rest: &str| rest.trim_start().split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default().to_owned();
    // A channel that is begun twice is the second.
    let channel = header.rsplit_once(CHANNEL).map_or(String::new(), |(_, rest)| word(rest));
    let recipient = header.split_once("to=").map(|(_, rest)| word(rest));
    let is_function = |recipient: &String| match recipient.as_str() {
        "user" | "all" => false,
        // In other channels it is a result that the model makes up.
        "assistant" => channel != "final" && channel != "analysis",
        _ => true,
    };
    let Some(recipient) = recipient.filter(is_function) else {
        return if channel == "analysis" { Kind::Reasoning } else { Kind::Text };
    };
    let name = recipient.strip_prefix(FUNCTIONS).map(str::to_owned);
    let is_known = |tool: &Tool| tool.name == recipient;
    match name.or_else(|| reading.tools.iter().any(is_known).then_some(recipient.clone())) {
        Some(name) if reading.calls => Kind::Call(name),
        Some(_) => Kind::Dropped,
        // A tool that the model thinks it has: its own thoughts.
        None => Kind::Reasoning,
    }
}

#[derive(Clone, Debug)]
enum Place {
    /// Before a message; text may come that belongs to none.
    Start,
    Header,
    Reasoning,
    Text,
    Arguments(JsonValue),
    /// In a message, or in the rest of one, that is not given out.
    Dropped,
}

/// Reads such an answer.
#[derive(Clone, Debug)]
pub(crate) struct HarmonyReader {
    reading: Reading,
    /// [`ENDS`] as they come.
    ends: Vec<String>,
    place: Place,
    /// What has come and was not taken.
    held: String,
    has_text: bool,
    has_reasoning: bool,
    /// A message has begun behind another of its kind: a line break comes between them.
    is_next: bool,
    has_arguments: bool,
    num_calls: usize,
    num_closed: usize,
}

impl HarmonyReader {
    pub fn new(reading: Reading) -> Self {
        let begun = reading.begun.as_str();
        let (place, held) = match begun.split_once(MESSAGE).map(|(header, _)| kind(header, &reading)) {
            Some(Kind::Reasoning) => (Place::Reasoning, String::new()),
            Some(Kind::Text) => (Place::Text, String::new()),
            Some(Kind::Call(_) | Kind::Dropped) => (Place::Dropped, String::new()),
            None if begun.contains(CHANNEL) || begun.contains("to=") => (Place::Header, reading.marked(begun)),
            // Whose message it is goes without saying.
            None => (Place::Start, String::new()),
        };
        Self {
            ends: ENDS.map(|end| reading.marked(end)).to_vec(),
            reading,
            place,
            held,
            has_text: false,
            has_reasoning: false,
            is_next: false,
            has_arguments: false,
            num_calls: 0,
            num_closed: 0,
        }
    }

    pub fn has_calls(&self) -> bool {
        self.num_closed > 0
    }

    pub fn is_reasoning(&self) -> bool {
        matches!(self.place, Place::Reasoning)
    }

    pub fn push(&mut self, text: &str, out: &mut Parts) {
        self.held.push_str(text);
        while self.advance(out, false) {}
    }

    pub fn finish(&mut self, out: &mut Parts) {
        while self.advance(out, true) {}
        // Half a marker is text. A header without a text is nothing.
        let held = std::mem::take(&mut self.held);
        if !matches!(self.place, Place::Start | Place::Header) {
            self.body(&held, out);
        }
    }

    /// Goes on with what is held; true if there may be more to be done.
    fn advance(&mut self, out: &mut Parts, at_end: bool) -> bool {
        match self.place {
            Place::Start => self.start(at_end),
            Place::Header => self.header(out),
            _ => self.message(out),
        }
    }

    fn start(&mut self, at_end: bool) -> bool {
        let rest = self.held.trim_start();
        if rest.is_empty() {
            return false;
        }
        let (start, channel) = (self.reading.marked(START), self.reading.marked(CHANNEL));
        if let Some(rest) = rest.strip_prefix(&start) {
            self.held = rest.to_owned();
            self.place = Place::Header;
            return true;
        }
        if rest.starts_with(&channel) || rest.starts_with("to=") {
            self.place = Place::Header;
            return true;
        }
        if !at_end && [&*start, &*channel, "to="].iter().any(|beginning| beginning.starts_with(rest)) {
            return false;
        }
        self.enter(Place::Text);
        true
    }

    /// A message's text begins.
    fn enter(&mut self, place: Place) {
        self.is_next = match place {
            Place::Reasoning => self.has_reasoning,
            Place::Text => self.has_text,
            _ => false,
        };
        self.place = place;
    }

    fn header(&mut self, out: &mut Parts) -> bool {
        let message = self.reading.marked(MESSAGE);
        let Found::At(at) = find(&self.held, &message) else { return false };
        let header = self.held[..at].replace(MARK, "");
        self.held.drain(..at + message.len());
        // The last one counts where a header was begun twice.
        let header = header.rsplit(START).next().unwrap_or_default();
        match kind(header, &self.reading) {
            Kind::Reasoning => self.enter(Place::Reasoning),
            Kind::Text => self.enter(Place::Text),
            Kind::Dropped => self.enter(Place::Dropped),
            Kind::Call(name) => {
                let id = Some(call_id(self.reading.dialect.format));
                let (index, arguments) = (self.num_calls, String::new());
                out.calls.push(ToolCallDelta { index, id, name: Some(name), arguments });
                self.num_calls += 1;
                self.has_arguments = false;
                self.enter(Place::Arguments(JsonValue::default()));
            }
        }
        true
    }

    /// The text of a message, up to what ends it.
    fn message(&mut self, out: &mut Parts) -> bool {
        let places = self.ends.iter().map(|end| find(&self.held, end));
        let (mut end, mut perhaps) = (None, self.held.len());
        for (index, place) in places.enumerate() {
            match place {
                Found::At(at) if end.is_none_or(|(first, _)| at < first) => end = Some((at, index)),
                Found::At(_) => {}
                Found::Perhaps(at) => perhaps = perhaps.min(at),
            }
        }
        let text: String = self.held.drain(..end.map_or(perhaps, |(at, _)| at)).collect();
        self.body(&text, out);
        let Some((_, index)) = end else { return false };
        // What begins the next message stays.
        if ![START, CHANNEL].contains(&ENDS[index]) {
            self.held.drain(..self.ends[index].len());
        }
        if matches!(self.place, Place::Arguments(_)) {
            self.close_call(out);
        }
        self.place = Place::Start;
        true
    }

    fn body(&mut self, text: &str, out: &mut Parts) {
        let text = text.replace(MARK, "");
        if text.is_empty() {
            return;
        }
        match &mut self.place {
            Place::Reasoning => {
                out.reasoning.push_str(if self.is_next { "\n" } else { "" });
                out.reasoning.push_str(&text);
                (self.has_reasoning, self.is_next) = (true, false);
            }
            Place::Text => {
                out.text.push_str(if self.is_next { "\n" } else { "" });
                out.text.push_str(&text);
                (self.has_text, self.is_next) = (true, false);
            }
            Place::Arguments(_) => self.arguments(&text, out),
            Place::Start | Place::Header | Place::Dropped => {}
        }
    }

    fn arguments(&mut self, text: &str, out: &mut Parts) {
        let Place::Arguments(value) = &mut self.place else { return };
        let mut arguments = String::new();
        for character in text.chars() {
            if character.is_whitespace() && !self.has_arguments {
                continue;
            }
            if value.push(character) {
                arguments.push(character);
                self.has_arguments = true;
            }
            if value.is_complete() {
                break;
            }
        }
        let is_complete = value.is_complete();
        self.more_arguments(arguments, out);
        if is_complete {
            self.num_closed += 1;
            self.place = Place::Dropped;
        }
    }

    fn more_arguments(&self, arguments: String, out: &mut Parts) {
        if !arguments.is_empty() {
            ToolCallDelta { index: self.num_calls - 1, arguments, ..ToolCallDelta::default() }.join(&mut out.calls);
        }
    }

    /// The message of a call ends whose arguments have not.
    fn close_call(&mut self, out: &mut Parts) {
        if !self.has_arguments {
            self.more_arguments("{}".to_owned(), out);
            self.num_closed += 1;
        }
    }
}

impl Rules<'_> {
    /// The grammar of such an answer: `reasoning* (text | call)`.
    pub(super) fn harmony(&mut self, reading: &Reading, tools: &ToolOptions, has_grammar: bool) -> Result<String, EngineError> {
        let is_required = tools.choice == CallChoice::Required && reading.calls;
        let next = format!("{} {}", self.up_to(END), self.literal(&format!("{START}assistant")));
        let thought = self.literal(&format!("{CHANNEL}analysis{MESSAGE}"));
        let remark = self.literal(&format!("{CHANNEL}commentary{MESSAGE}"));
        // Where all of the text has a form, or there is to be none, there are no remarks.
        let before = if has_grammar || is_required { thought } else { format!("({thought} | {remark})") };
        let before = self.rule(&format!("({before} {next})*"));
        let text = if has_grammar { "@answer".to_owned() } else { self.any_text() };
        let mut answers = Vec::new();
        if !is_required {
            // The content type of a text that has a form.
            let kind = format!("(\" \"? {})?", self.literal(&format!("{CONSTRAIN}json")));
            let kind = if has_grammar { kind.as_str() } else { "" };
            answers.push(format!("{} {kind} {} {text}", self.literal(&format!("{CHANNEL}final")), self.literal(MESSAGE)));
        }
        if reading.calls {
            for tool in tools.callable() {
                answers.push(self.harmony_call(tool)?);
            }
        }
        let answer = self.rule(&answers.join(" | "));
        Ok(match reading.begun.split_once(MESSAGE) {
            Some((header, _)) if kind(header, reading) == Kind::Reasoning => format!("{next} {before} {answer}"),
            // A text has begun: no more than a text comes, unless it has to.
            Some(_) if is_required => format!("{next} {before} {answer}"),
            Some(_) => text,
            None => format!("{before} {answer}"),
        })
    }

    /// The recipient stands before the channel or behind it.
    pub(super) fn harmony_call(&mut self, tool: &Tool) -> Result<String, EngineError> {
        let recipient = format!(" to={FUNCTIONS}{}", tool.name);
        let heads = [format!("{CHANNEL}commentary{recipient}"), format!("{recipient}{CHANNEL}commentary")];
        let [first, second] = heads.map(|head| self.literal(&head));
        let kind = format!("(\" json\" | \" \"? {})?", self.literal(&format!("{CONSTRAIN}json")));
        let (message, arguments) = (self.literal(MESSAGE), self.arguments(tool)?);
        Ok(self.rule(&format!("({first} | {second}) {kind} {message} {arguments}")))
    }
}
