//! Takes an answer apart, as it comes: reasoning, text, calls.
//!
//! However the text is cut, the parts are the same. What may be the beginning of a marker is held, and is text if nothing comes
//! of it. Special tokens that are markers come with [`MARK`] before their spelling, so that text which only spells one is text.

use super::{
    Reading, ToolCallDelta, call_id,
    call_json::{CallJson, JsonValue, Step},
    formats::{Body, Format, Thinking},
    parameters::ParametersReader,
};

/// Before the spelling of a special token: a noncharacter, which no text for interchange has (Unicode 17, section 23.7).
pub(crate) const MARK: char = '\u{FDD1}';

/// What is new of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Parts {
    /// Of its reasoning.
    pub reasoning: String,
    /// Of its text.
    pub text: String,
    /// Of its calls.
    pub calls: Vec<ToolCallDelta>,
}

impl Parts {
    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.text.is_empty() && self.calls.is_empty()
    }
}

#[derive(Clone, Debug)]
enum Mode {
    /// Before any text: reasoning or a call may begin.
    Start,
    Reasoning,
    Text,
    /// Within the calls, before the next one.
    Between,
    /// A call.
    Call(Box<Call>),
    /// Behind a call, before what closes it.
    Closing,
}

/// A call that has begun.
#[derive(Clone, Debug)]
struct Call {
    /// All of it, until its name has been given out: it may turn out to be text.
    raw: String,
    body: CallBody,
    is_open: bool,
    has_arguments: bool,
}

#[derive(Clone, Debug)]
enum CallBody {
    Json(CallJson),
    /// The name so far.
    Name(String),
    Arguments(JsonValue),
    Parameters(ParametersReader),
}

/// Reads one answer.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    reading: Reading,
    mode: Mode,
    /// What has come and was not taken.
    held: String,
    /// Whitespace behind text: given out with what follows, dropped before a call.
    spaces: String,
    has_text: bool,
    num_calls: usize,
    num_closed: usize,
}

impl Reader {
    pub fn new(reading: Reading) -> Self {
        let mode = if reading.thinks { Mode::Reasoning } else { Mode::Start };
        let (held, spaces) = (String::new(), String::new());
        Self { reading, mode, held, spaces, has_text: false, num_calls: 0, num_closed: 0 }
    }

    /// Whether a call is complete.
    pub fn has_calls(&self) -> bool {
        self.num_closed > 0
    }

    /// Whether reasoning goes on.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.mode, Mode::Reasoning)
    }

    fn format(&self) -> &'static Format {
        self.reading.dialect.format
    }

    fn thinking(&self) -> Option<&'static Thinking> {
        self.reading.thinking()
    }

    /// A marker as it comes: marked where it is, or begins with, a special token.
    fn marked(&self, text: &str) -> String {
        let mut marked = text.trim().to_owned();
        for (_, spelling) in &self.reading.dialect.markers {
            marked = marked.replace(spelling.as_str(), &format!("{MARK}{spelling}"));
        }
        marked
    }

    /// Takes the next part of the answer.
    pub fn push(&mut self, text: &str, out: &mut Parts) {
        self.held.push_str(text);
        while self.advance(out, false) {}
    }

    /// The answer has ended.
    pub fn finish(&mut self, out: &mut Parts) {
        while self.advance(out, true) {}
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.mode, Mode::Text) {
            Mode::Reasoning => out.reasoning.push_str(&held),
            // A call that was cut off: its arguments are what there is of them.
            // Likewise what there is of one behind others.
            Mode::Call(call) if call.is_open || self.num_calls > 0 => {}
            Mode::Text if self.num_calls > 0 && self.marked(self.format().trigger()).starts_with(held.as_str()) => {}
            Mode::Call(call) => {
                let text = self.before_call() + &call.raw + &held;
                self.text(&text, out);
            }
            Mode::Start | Mode::Text => self.text(&held, out),
            Mode::Between | Mode::Closing => {}
        }
        if self.num_calls == 0 && self.has_text {
            out.text.push_str(&std::mem::take(&mut self.spaces));
        }
    }

    /// What was taken before a call's own text.
    fn before_call(&self) -> String {
        let trigger = self.format().trigger();
        if self.num_calls > 0 { String::new() } else { trigger.to_owned() }
    }

    /// Gives out text, but for whitespace at its end, and at the beginning of all.
    fn text(&mut self, text: &str, out: &mut Parts) {
        let plain;
        let text = if text.contains(MARK) {
            plain = text.replace(MARK, "");
            &plain
        } else {
            text
        };
        let body = text.trim_end();
        if !body.is_empty() {
            let spaces = std::mem::take(&mut self.spaces);
            if self.has_text {
                out.text.push_str(&spaces);
                out.text.push_str(body);
            } else {
                out.text.push_str(body.trim_start());
            }
            self.has_text = true;
        }
        self.spaces.push_str(&text[body.len()..]);
    }

    /// Goes on with what is held; true if there may be more to be done.
    fn advance(&mut self, out: &mut Parts, at_end: bool) -> bool {
        match &mut self.mode {
            Mode::Start => self.start(at_end),
            Mode::Reasoning => self.reasoning(out),
            Mode::Text => self.find_call(out),
            Mode::Between => self.between(at_end),
            Mode::Call(_) => self.call(out),
            Mode::Closing => self.closing(at_end),
        }
    }

    fn start(&mut self, at_end: bool) -> bool {
        let rest = self.held.trim_start();
        if let Some(open) = self.thinking().map(|thinking| self.marked(thinking.open)) {
            if let Some(rest) = rest.strip_prefix(&open) {
                self.held = rest.to_owned();
                self.mode = Mode::Reasoning;
                return true;
            }
            if open.starts_with(rest) && !at_end {
                return false;
            }
        }
        if self.reading.calls && self.format().trigger().is_empty() {
            if rest.is_empty() {
                return false;
            }
            // What begins an answer as JSON is a call.
            let rest = rest.trim_start_matches(MARK);
            if rest.starts_with('{') {
                self.held = rest.to_owned();
                self.begin_call();
                return true;
            }
        }
        self.mode = Mode::Text;
        true
    }

    fn reasoning(&mut self, out: &mut Parts) -> bool {
        let close = self.thinking().map_or(String::new(), |thinking| self.marked(thinking.close));
        let found = find(&self.held, &close);
        let (given, rest) = match found {
            Found::At(at) => (at, at + close.len()),
            Found::Perhaps(at) => (at, at),
        };
        out.reasoning.push_str(&self.held[..given]);
        self.held.drain(..rest);
        let is_over = matches!(found, Found::At(_));
        if is_over {
            self.mode = Mode::Text;
            if self.reading.calls && self.format().trigger().is_empty() {
                self.mode = Mode::Start;
            }
        }
        is_over
    }

    fn find_call(&mut self, out: &mut Parts) -> bool {
        let trigger = if self.reading.calls { self.marked(self.format().trigger()) } else { String::new() };
        if trigger.is_empty() {
            let held = std::mem::take(&mut self.held);
            self.text(&held, out);
            return false;
        }
        let found = find(&self.held, &trigger);
        let (Found::At(at) | Found::Perhaps(at)) = found;
        let text = self.held[..at].to_owned();
        self.text(&text, out);
        self.held.drain(..at);
        if matches!(found, Found::Perhaps(_)) {
            return false;
        }
        self.held.drain(..trigger.len());
        if self.format().begin.is_empty() {
            self.begin_call();
        } else {
            self.mode = Mode::Between;
        }
        true
    }

    fn begin_call(&mut self) {
        let body = match self.format().body {
            Body::Json(_) => CallBody::Json(CallJson::new()),
            Body::NameThen(_) => CallBody::Name(String::new()),
            Body::Parameters(parameters) => {
                let close = self.marked(self.format().close);
                CallBody::Parameters(ParametersReader::new(parameters, close, &self.reading.tools, |text| self.marked(text)))
            }
        };
        self.mode = Mode::Call(Box::new(Call { raw: String::new(), body, is_open: false, has_arguments: false }));
    }

    /// Before a call: what opens it, what ends them all, or something else, which is text.
    fn between(&mut self, at_end: bool) -> bool {
        let format = self.format();
        let skipped = |c: char| c.is_whitespace() || c == ',' || c == '[' || c == ';';
        let trimmed = self.held.trim_start_matches(skipped).len();
        self.held.drain(..self.held.len() - trimmed);
        if self.held.is_empty() {
            return false;
        }
        let (open, end) = (self.marked(format.open), self.marked(format.end));
        // The rest of what ends them, where its beginning is a bracket.
        let end = if end.is_empty() { self.marked("]") } else { end };
        if open.is_empty() && self.held.starts_with('{') {
            self.begin_call();
            return true;
        }
        for marker in [&open, &end] {
            if !marker.is_empty() && self.held.starts_with(marker.as_str()) {
                let is_open = marker == &open;
                let is_end = marker == &end && !is_open;
                self.held.drain(..marker.len());
                if is_open {
                    self.begin_call();
                } else if is_end {
                    self.mode = Mode::Text;
                }
                return true;
            }
        }
        if !at_end && [&open, &end].iter().any(|marker| marker.starts_with(self.held.as_str())) {
            return false;
        }
        self.mode = Mode::Text;
        true
    }

    fn call(&mut self, out: &mut Parts) -> bool {
        let name_then = match self.format().body {
            Body::NameThen(text) => self.marked(text),
            _ => String::new(),
        };
        let id = call_id(self.format());
        let index = self.num_calls;
        let Mode::Call(call) = &mut self.mode else { return false };
        let (mut taken, mut is_complete, mut is_malformed) = (0, false, false);
        let mut delta = ToolCallDelta { index, ..ToolCallDelta::default() };
        for (at, character) in self.held.char_indices() {
            taken = at + character.len_utf8();
            if !call.is_open {
                call.raw.push(character);
            }
            let mut name = None;
            match &mut call.body {
                CallBody::Json(json) => {
                    match json.push(character) {
                        Step::More => {}
                        Step::Complete => is_complete = true,
                        Step::Malformed => is_malformed = true,
                    }
                    if !call.is_open {
                        name.clone_from(&json.name);
                    }
                    if call.is_open || name.is_some() {
                        delta.arguments.push_str(&std::mem::take(&mut json.arguments));
                    }
                }
                CallBody::Name(so_far) => {
                    so_far.push(character);
                    if so_far.ends_with(&name_then) {
                        so_far.truncate(so_far.len() - name_then.len());
                        name = Some(so_far.trim().to_owned());
                        call.body = CallBody::Arguments(JsonValue::default());
                    }
                }
                CallBody::Arguments(value) => {
                    if !character.is_whitespace() || call.has_arguments {
                        if value.push(character) {
                            delta.arguments.push(character);
                            call.has_arguments = true;
                        } else {
                            taken = at;
                        }
                        is_complete = value.is_complete();
                    }
                }
                CallBody::Parameters(parameters) => {
                    is_complete = parameters.push(character, &mut delta.arguments);
                    name = parameters.name();
                }
            }
            if let Some(name) = name.filter(|_| !call.is_open) {
                (delta.id, delta.name) = (Some(id.clone()), Some(name));
                call.is_open = true;
            }
            call.has_arguments |= !delta.arguments.is_empty();
            if is_complete || is_malformed {
                break;
            }
        }
        if is_complete && !call.has_arguments {
            delta.arguments.push_str("{}");
        }
        let is_open = call.is_open;
        let raw = std::mem::take(&mut call.raw);
        self.held.drain(..taken);
        if delta.id.is_some() || !delta.arguments.is_empty() {
            out.calls.push(delta);
        }
        if is_complete {
            self.num_calls += 1;
            self.num_closed += 1;
            self.spaces.clear();
            let closes_itself = matches!(self.format().body, Body::Parameters(_));
            self.mode = if closes_itself { Mode::Between } else { Mode::Closing };
            if self.format().begin.is_empty() && closes_itself {
                self.mode = Mode::Text;
            }
        } else if is_malformed {
            self.num_calls += usize::from(is_open);
            self.mode = Mode::Text;
            if !is_open {
                let text = self.before_call() + &raw;
                self.text(&text, out);
            }
        } else if let Mode::Call(call) = &mut self.mode {
            call.raw = raw;
            return false;
        }
        true
    }

    /// Behind a call: what closes it, if it is there.
    fn closing(&mut self, at_end: bool) -> bool {
        let close = self.marked(self.format().close);
        let rest = self.held.trim_start();
        if let Some(rest) = rest.strip_prefix(close.as_str()) {
            self.held = rest.to_owned();
        } else if close.starts_with(rest) && !at_end {
            return false;
        }
        self.mode = if self.format().begin.is_empty() { Mode::Text } else { Mode::Between };
        true
    }
}

/// Where a marker is, or may begin at the end of what has come; the end if nowhere.
enum Found {
    At(usize),
    Perhaps(usize),
}

fn find(text: &str, marker: &str) -> Found {
    if marker.is_empty() {
        return Found::Perhaps(text.len());
    }
    if let Some(at) = text.find(marker) {
        return Found::At(at);
    }
    let starts = text.char_indices().map(|(at, _)| at).rev().take(marker.len());
    let longest = starts.filter(|at| marker.starts_with(&text[*at..])).last();
    Found::Perhaps(longest.unwrap_or(text.len()))
}

#[cfg(test)]
mod tests;
