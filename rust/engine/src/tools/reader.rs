//! Takes an answer apart, as it comes: reasoning, text, calls.
//!
//! However the text is cut, the parts are the same. What may be the beginning of a marker is held, and is text if nothing comes
//! of it. Special tokens that are markers come with [`MARK`] before their spelling, so that text which only spells one is text.

mod alone;
mod call;

use super::{
    Reading, ToolCallDelta, call_id,
    call_json::CallJson,
    formats::{Body, Format, Thinking},
    harmony::HarmonyReader,
    literals::LiteralsReader,
    parameters::ParametersReader,
};
use alone::Alone;
use call::{Call, CallBody, NameReader, Taken};

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

/// Reads one answer.
#[derive(Clone, Debug)]
pub(crate) enum Reader {
    /// Whose reasoning and calls stand between markers.
    Marked(MarkedReader),
    /// That consists of messages.
    Harmony(HarmonyReader),
}

impl Reader {
    pub fn new(reading: Reading) -> Self {
        match reading.dialect.format.body {
            Body::Harmony => Self::Harmony(HarmonyReader::new(reading)),
            _ => Self::Marked(MarkedReader::new(reading)),
        }
    }

    /// Whether a call is complete.
    pub fn has_calls(&self) -> bool {
        match self {
            Self::Marked(reader) => reader.num_closed > 0,
            Self::Harmony(reader) => reader.has_calls(),
        }
    }

    /// Whether reasoning goes on.
    pub fn is_reasoning(&self) -> bool {
        match self {
            Self::Marked(reader) => matches!(reader.mode, Mode::Reasoning),
            Self::Harmony(reader) => reader.is_reasoning(),
        }
    }

    /// Whether reasoning goes on, or may begin.
    pub fn may_reason(&self) -> bool {
        match self {
            Self::Marked(reader) => matches!(reader.mode, Mode::Start | Mode::Reasoning),
            Self::Harmony(_) => true,
        }
    }

    /// Takes the next part of the answer.
    pub fn push(&mut self, text: &str, out: &mut Parts) {
        match self {
            Self::Marked(reader) => reader.push(text, out),
            Self::Harmony(reader) => reader.push(text, out),
        }
    }

    /// The answer has ended.
    pub fn finish(&mut self, out: &mut Parts) {
        match self {
            Self::Marked(reader) => reader.finish(out),
            Self::Harmony(reader) => reader.finish(out),
        }
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
    /// Behind all calls, before what may stand there.
    Ending,
}

/// Reads an answer with markers.
#[derive(Clone, Debug)]
pub(crate) struct MarkedReader {
    reading: Reading,
    mode: Mode,
    /// What has come and was not taken.
    held: String,
    /// What was taken where calls begin; it is text if there is none.
    begun: String,
    /// Whitespace behind text: given out with what follows, dropped before a call.
    spaces: String,
    /// Reasoning has begun, and what begins it may come again, which some models write twice.
    may_begin_again: bool,
    has_text: bool,
    /// There is text on the line that has come last.
    is_in_line: bool,
    /// Of the calls so far.
    ids: Vec<String>,
    num_calls: usize,
    num_closed: usize,
}

impl MarkedReader {
    fn new(reading: Reading) -> Self {
        let mode = if reading.thinks { Mode::Reasoning } else { Mode::Start };
        let (held, begun, spaces) = (String::new(), String::new(), String::new());
        let may_begin_again = reading.thinks;
        let (has_text, is_in_line) = (false, false);
        let ids = Vec::new();
        Self { reading, mode, held, begun, spaces, may_begin_again, has_text, is_in_line, ids, num_calls: 0, num_closed: 0 }
    }

    fn format(&self) -> &'static Format {
        self.reading.dialect.format
    }

    fn thinking(&self) -> Option<&'static Thinking> {
        self.reading.thinking()
    }

    fn marked(&self, text: &str) -> String {
        self.reading.marked(text.trim())
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
            Mode::Reasoning => out.reasoning.push_str(&held.replace(MARK, "")),
            // A call that was cut off: its arguments are what there is of them.
            Mode::Call(mut call) if call.is_open => {
                let mut delta = ToolCallDelta { index: self.num_calls, ..ToolCallDelta::default() };
                call.finish(&mut delta.arguments);
                self.spaces.clear();
                if !delta.arguments.is_empty() {
                    delta.join(&mut out.calls);
                }
            }
            // Likewise what there is of one behind others.
            Mode::Call(_) if self.num_calls > 0 => {}
            Mode::Text if self.num_calls > 0 && self.marked(self.format().trigger()).starts_with(held.as_str()) => {}
            Mode::Call(call) => {
                let text = self.taken_before_call() + &call.raw + &held;
                self.text(&text, out);
            }
            Mode::Start | Mode::Text => self.text(&held, out),
            Mode::Between => {
                let text = self.taken_before_call() + &held;
                if self.num_calls == 0 {
                    self.text(&text, out);
                }
            }
            Mode::Closing | Mode::Ending => {}
        }
        if self.num_calls == 0 && self.has_text {
            out.text.push_str(&std::mem::take(&mut self.spaces));
        }
    }

    /// What was taken before a call's own text; nothing of it is text behind another call.
    fn taken_before_call(&mut self) -> String {
        let begun = std::mem::take(&mut self.begun);
        if self.num_calls > 0 { String::new() } else { begun }
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
        let (is_new_line, line) = text.rsplit_once('\n').map_or((false, text), |(_, line)| (true, line));
        self.is_in_line = !line.trim_start_matches([' ', '\t']).is_empty() || (self.is_in_line && !is_new_line);
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
            Mode::Reasoning => self.reasoning(out, at_end),
            Mode::Text => self.find_call(out),
            Mode::Between => self.between(out, at_end),
            Mode::Call(_) => self.call(out),
            Mode::Closing | Mode::Ending => self.closing(at_end),
        }
    }

    fn start(&mut self, at_end: bool) -> bool {
        let rest = self.held.trim_start();
        if let Some(open) = self.thinking().map(|thinking| self.reading.marked(thinking.open)) {
            if let Some(rest) = rest.strip_prefix(&open) {
                self.held = rest.to_owned();
                self.mode = Mode::Reasoning;
                self.may_begin_again = true;
                return true;
            }
            if open.starts_with(rest) && !at_end {
                return false;
            }
        }
        if self.reading.calls && self.format().trigger().is_empty() {
            let around = self.marked(self.format().around.0);
            if rest.len() < around.len() && around.starts_with(rest) && !at_end {
                return false;
            }
            let inner = rest.strip_prefix(&around).map_or(rest, str::trim_start);
            if inner.is_empty() && !at_end {
                return false;
            }
            if inner.starts_with(self.format().first_character()) {
                let begun = rest.len() - inner.len();
                self.begun = rest[..begun].to_owned();
                self.held = inner.to_owned();
                self.begin();
                return true;
            }
        }
        self.mode = Mode::Text;
        true
    }

    /// Calls begin.
    fn begin(&mut self) {
        if self.format().begin.is_empty() && self.format().opens().is_empty() {
            self.begin_call();
        } else {
            self.mode = Mode::Between;
        }
    }

    fn reasoning(&mut self, out: &mut Parts, at_end: bool) -> bool {
        if self.may_begin_again {
            let open = self.thinking().map_or(String::new(), |thinking| self.reading.marked(thinking.open));
            let rest = self.held.trim_start();
            if let Some(rest) = rest.strip_prefix(&open).filter(|_| !open.is_empty()) {
                self.held = rest.to_owned();
                return true;
            }
            if open.starts_with(rest) && !at_end {
                return false;
            }
            self.may_begin_again = false;
        }
        let close = self.thinking().map_or(String::new(), |thinking| self.marked(thinking.close));
        let found = find(&self.held, &close);
        let (given, rest) = match found {
            Found::At(at) => (at, at + close.len()),
            Found::Perhaps(at) => (at, at),
        };
        // A token that marks something else is text here.
        out.reasoning.push_str(&self.held[..given].replace(MARK, ""));
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
        let (found, alone) = (find(&self.held, &trigger), self.find_alone());
        let is_alone = alone.place() < found.place();
        let found = if is_alone { alone } else { found };
        let at = found.place();
        let text = self.held[..at].to_owned();
        self.text(&text, out);
        self.held.drain(..at);
        if matches!(found, Found::Perhaps(_)) {
            return false;
        }
        self.begun = if is_alone { self.marked(self.format().open_alone) } else { trigger };
        self.held.drain(..self.begun.len());
        if is_alone {
            self.begin_call();
        } else {
            self.begin();
        }
        true
    }

    /// Where a call is without the marker of calls, if some models of this format write such.
    fn find_alone(&self) -> Found {
        let (Body::Parameters(parameters), false) = (self.format().body, self.format().open_alone.is_empty()) else {
            return Found::Perhaps(self.held.len());
        };
        let alone = Alone {
            open: self.marked(self.format().open_alone),
            after_name: self.marked(parameters.after_name),
            next: [parameters.before_key, self.format().closes().0].map(|marker| self.marked(marker)),
            tools: &self.reading.tools,
        };
        alone.find(&self.held, self.is_in_line)
    }

    fn begin_call(&mut self) {
        let body = match self.format().body {
            Body::Json(_) | Body::Harmony => CallBody::Json(CallJson::new()),
            Body::NameThen(end) => CallBody::Name(NameReader::new(self.marked(self.format().call_id), self.marked(end))),
            Body::Parameters(parameters) => {
                let close = self.marked(self.format().close);
                CallBody::Parameters(ParametersReader::new(parameters, &close, &self.reading.tools, |text| self.marked(text)))
            }
            Body::Literals(literals) => CallBody::Literals(LiteralsReader::new(literals, |text| self.marked(text))),
        };
        self.mode = Mode::Call(Box::new(Call::new(body)));
    }

    /// Before a call: what opens it, what ends them all, or something else, which is text.
    fn between(&mut self, out: &mut Parts, at_end: bool) -> bool {
        let format = self.format();
        let skipped = |c: char| c.is_whitespace() || c == ',' || c == '[' || c == ';';
        let trimmed = self.held.trim_start_matches(skipped).len();
        self.begun.extend(self.held.drain(..self.held.len() - trimmed));
        if self.held.is_empty() {
            return false;
        }
        let (open, end) = (self.marked(format.opens()), self.marked(format.end));
        // The rest of what ends them, where its beginning is a bracket.
        let end = if end.is_empty() { self.marked("]") } else { end };
        let begins_call = match format.body {
            Body::Literals(_) => |character: char| character.is_alphabetic() || character == '_',
            _ => |character: char| character == '{',
        };
        if open.is_empty() && self.held.starts_with(begins_call) {
            self.begin_call();
            return true;
        }
        if !open.is_empty() && self.held.starts_with(&open) {
            self.begun.extend(self.held.drain(..open.len()));
            self.begin_call();
            return true;
        }
        if self.num_calls > 0 && !format.begin.is_empty() && self.held.starts_with(&end) {
            self.held.drain(..end.len());
            self.mode = Mode::Ending;
            return true;
        }
        if !at_end && [&open, &end].iter().any(|marker| marker.starts_with(self.held.as_str())) {
            return false;
        }
        self.mode = Mode::Text;
        let text = self.taken_before_call();
        self.text(&text, out);
        true
    }

    fn call(&mut self, out: &mut Parts) -> bool {
        let (id, has_ids) = (call_id(self.format()), self.format().short_ids);
        let index = self.num_calls;
        let Mode::Call(call) = &mut self.mode else { return false };
        let (mut end, mut last) = (0, Taken::default());
        let mut delta = ToolCallDelta { index, ..ToolCallDelta::default() };
        for (at, character) in self.held.char_indices() {
            if !call.is_open {
                call.raw.push(character);
            }
            last = call.push(character, &mut delta.arguments);
            end = if last.is_beyond { at } else { at + character.len_utf8() };
            if let Some(name) = last.name.take().filter(|_| !call.is_open) {
                // Results are told apart by it, so that no two calls of an answer have the same.
                let own = last.id.take().filter(|id| has_ids && !self.ids.contains(id));
                let id = own.unwrap_or_else(|| id.clone());
                self.ids.push(id.clone());
                (delta.id, delta.name) = (Some(id), Some(name));
                call.is_open = true;
            }
            if last.is_complete || last.is_malformed {
                break;
            }
        }
        if last.is_complete && !call.has_arguments {
            delta.arguments.push_str("{}");
        }
        let is_open = call.is_open;
        if delta.id.is_some() || !delta.arguments.is_empty() {
            delta.join(&mut out.calls);
        }
        self.held.drain(..end);
        if last.is_complete {
            self.num_calls += 1;
            self.num_closed += 1;
            self.spaces.clear();
            self.is_in_line = false;
            self.mode = Mode::Closing;
        } else if last.is_malformed {
            let raw = std::mem::take(&mut call.raw);
            self.num_calls += usize::from(is_open);
            self.mode = Mode::Text;
            if !is_open {
                let text = self.taken_before_call() + &raw;
                self.text(&text, out);
            }
        }
        last.is_complete || last.is_malformed
    }

    /// What comes when a call is closed.
    fn behind_call(&self) -> Mode {
        let format = self.format();
        match (format.begin.is_empty(), format.trigger().is_empty()) {
            (false, _) => Mode::Between,
            // There is one call.
            (true, true) => Mode::Ending,
            (true, false) => Mode::Text,
        }
    }

    /// Behind a call, or all: what closes it, if it is there.
    fn closing(&mut self, at_end: bool) -> bool {
        let is_last = matches!(self.mode, Mode::Ending);
        let close = self.marked(if is_last { self.format().around.1 } else { self.format().closes().1 });
        let rest = self.held.trim_start();
        if let Some(rest) = rest.strip_prefix(close.as_str()).filter(|_| !close.is_empty()) {
            self.held = rest.to_owned();
        } else if !close.is_empty() && close.starts_with(rest) && !at_end {
            return false;
        }
        self.mode = if is_last { Mode::Text } else { self.behind_call() };
        true
    }
}

/// Where a marker is, or may begin at the end of what has come; the end if nowhere.
pub(super) enum Found {
    At(usize),
    Perhaps(usize),
}

impl Found {
    fn place(&self) -> usize {
        let (Self::At(at) | Self::Perhaps(at)) = self;
        *at
    }
}

pub(super) fn find(text: &str, marker: &str) -> Found {
    if marker.is_empty() {
        return Found::Perhaps(text.len());
    }
    if let Some(at) = text.find(marker) {
        return Found::At(at);
    }
    Found::Perhaps(end_of(text, marker))
}

/// Where the end of a text begins that may be the beginning of a marker.
pub(super) fn end_of(text: &str, marker: &str) -> usize {
    let starts = text.char_indices().map(|(at, _)| at).rev().take(marker.len());
    starts.filter(|at| marker.starts_with(&text[*at..])).last().unwrap_or(text.len())
}

/// Whether a function can be called so.
pub(super) fn is_name(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c == MARK || c.is_whitespace() || "<>[](){}\"',".contains(c))
}

#[cfg(test)]
mod tests;
