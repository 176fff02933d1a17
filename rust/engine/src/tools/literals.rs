//! A call whose arguments are literals of a language: read character by character, and written as JSON.

mod grammar;

use std::fmt::Write as _;

use super::{
    call_json::Step,
    formats::{Literals, Quotes},
    reader::MARK,
};

/// Reads a name and its arguments. What has come of these is written at once: texts by the character, other values when they
/// are complete.
#[derive(Clone, Debug)]
pub(super) struct LiteralsReader {
    language: &'static Literals,
    /// What quotes texts, as it comes; empty where that are single and double quotes.
    marker: String,
    place: Place,
    /// What is open, from the outermost.
    open: Vec<Open>,
    /// What has come of the name, of a key, of a value without quotes, or of a marker.
    held: String,
    /// The first half of a character that is written as two.
    surrogate: Option<u32>,
    name: Option<String>,
}

/// What holds values.
#[derive(Clone, Copy, Debug)]
struct Open {
    closer: char,
    is_array: bool,
    has_values: bool,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// In the function's name.
    Name,
    /// Before a key, or the end of what is open.
    Key,
    /// In a key without quotes.
    BareKey,
    /// Behind a key with quotes.
    Assign,
    /// Before a value, or the end of what is open.
    Value,
    /// In a value without quotes.
    Bare,
    /// In what may become the marker before a text.
    Opening { is_key: bool },
    /// In a text that ends with this character, or else with the marker.
    Text { quote: Option<char>, escape: Escape, is_key: bool },
    /// Behind a value.
    Next,
}

#[derive(Clone, Copy, Debug)]
enum Escape {
    None,
    /// Behind a backslash.
    Begun,
    /// How many digits of this base may still come, and what they are so far.
    Digits {
        base: u32,
        left: u32,
        value: u32,
    },
}

impl LiteralsReader {
    /// `marked` gives a text as it comes.
    pub fn new(language: &'static Literals, marked: impl Fn(&str) -> String) -> Self {
        let marker = match language.quotes {
            Quotes::Python => String::new(),
            Quotes::Marker(marker) => marked(marker),
        };
        let (open, held) = (Vec::new(), String::new());
        Self { language, marker, place: Place::Name, open, held, surrogate: None, name: None }
    }

    /// Once it is known.
    pub fn name(&self) -> Option<String> {
        self.name.clone()
    }

    /// Takes a character, and appends what it makes known of the arguments.
    pub fn push(&mut self, character: char, arguments: &mut String) -> Step {
        match self.place {
            Place::Name => return self.name_character(character, arguments),
            Place::Key | Place::Assign | Place::Value | Place::Next if character.is_whitespace() => {}
            Place::Key => return self.key(character, arguments),
            Place::BareKey if character == self.assign() => {
                let key = std::mem::take(&mut self.held);
                self.separate(arguments);
                arguments.push('"');
                push_text(key.trim_end(), arguments);
                arguments.push('"');
                self.assigned(arguments);
            }
            Place::Assign if character == self.assign() => self.assigned(arguments),
            Place::BareKey | Place::Bare if !self.ends_bare(character) => self.held.push(character),
            Place::BareKey | Place::Assign => return Step::Malformed,
            Place::Value => return self.value(character, arguments),
            Place::Bare => {
                if !self.bare(arguments) {
                    return Step::Malformed;
                }
                return self.next(character, arguments);
            }
            Place::Opening { is_key } => return self.opening(character, is_key, arguments),
            Place::Text { quote, escape, is_key } => match quote {
                Some(quote) => self.quoted(character, (quote, escape), is_key, arguments),
                None => self.marked(character, is_key, arguments),
            },
            Place::Next => return self.next(character, arguments),
        }
        Step::More
    }

    fn name_character(&mut self, character: char, arguments: &mut String) -> Step {
        let (before, after) = self.language.brackets;
        if character == before && !self.held.is_empty() {
            self.name = Some(std::mem::take(&mut self.held));
            self.begin(after, false, arguments);
        } else if character.is_alphanumeric() || "_-.".contains(character) {
            self.held.push(character);
        } else {
            return Step::Malformed;
        }
        Step::More
    }

    fn begin(&mut self, closer: char, is_array: bool, arguments: &mut String) {
        arguments.push(if is_array { '[' } else { '{' });
        self.open.push(Open { closer, is_array, has_values: false });
        self.place = if is_array { Place::Value } else { Place::Key };
    }

    fn close(&mut self, arguments: &mut String) -> Step {
        let is_array = self.open.pop().is_some_and(|open| open.is_array);
        arguments.push(if is_array { ']' } else { '}' });
        self.place = Place::Next;
        if self.open.is_empty() { Step::Complete } else { Step::More }
    }

    /// Whether this closes the innermost of what is open.
    fn closes(&self, character: char) -> bool {
        self.open.last().is_some_and(|open| open.closer == character)
    }

    fn is_in_array(&self) -> bool {
        self.open.last().is_some_and(|open| open.is_array)
    }

    fn ends_bare(&self, character: char) -> bool {
        character == ',' || self.closes(character)
    }

    /// Between a key and its value.
    fn assign(&self) -> char {
        if self.open.len() == 1 { self.language.assign } else { ':' }
    }

    fn assigned(&mut self, arguments: &mut String) {
        arguments.push_str(": ");
        self.place = Place::Value;
    }

    /// Writes a comma, unless what comes is the first. Behind the last there may be one too, which is no JSON.
    fn separate(&mut self, arguments: &mut String) {
        if let Some(open) = self.open.last_mut() {
            if open.has_values {
                arguments.push_str(", ");
            }
            open.has_values = true;
        }
    }

    fn separate_in_array(&mut self, arguments: &mut String) {
        if self.is_in_array() {
            self.separate(arguments);
        }
    }

    fn key(&mut self, character: char, arguments: &mut String) -> Step {
        if self.closes(character) {
            return self.close(arguments);
        }
        // What is called has names, and no texts, before `=`.
        if self.assign() == ':' && self.begin_text(character, true, arguments) {
            return Step::More;
        }
        self.place = Place::BareKey;
        self.push(character, arguments)
    }

    fn value(&mut self, character: char, arguments: &mut String) -> Step {
        if self.is_in_array() && self.closes(character) {
            return self.close(arguments);
        }
        if let '[' | '{' = character {
            self.separate_in_array(arguments);
            self.begin(if character == '[' { ']' } else { '}' }, character == '[', arguments);
            return Step::More;
        }
        if self.begin_text(character, false, arguments) {
            return Step::More;
        }
        self.place = Place::Bare;
        self.push(character, arguments)
    }

    fn next(&mut self, character: char, arguments: &mut String) -> Step {
        if self.closes(character) {
            return self.close(arguments);
        }
        self.place = if self.is_in_array() { Place::Value } else { Place::Key };
        match self.language.quotes {
            _ if character == ',' => Step::More,
            Quotes::Python => Step::Malformed,
            // A marker tells where a text ends; the comma may be missing.
            Quotes::Marker(_) => self.push(character, arguments),
        }
    }

    /// Whether the character may begin a text, which then is begun.
    fn begin_text(&mut self, character: char, is_key: bool, arguments: &mut String) -> bool {
        match self.language.quotes {
            Quotes::Python if matches!(character, '\'' | '"') => self.open_text(Some(character), is_key, arguments),
            Quotes::Marker(_) if self.marker.starts_with(character) => {
                self.opening(character, is_key, arguments);
            }
            _ => return false,
        }
        true
    }

    fn open_text(&mut self, quote: Option<char>, is_key: bool, arguments: &mut String) {
        if is_key {
            self.separate(arguments);
        } else {
            self.separate_in_array(arguments);
        }
        arguments.push('"');
        self.place = Place::Text { quote, escape: Escape::None, is_key };
    }

    fn close_text(&mut self, is_key: bool, arguments: &mut String) {
        self.end_surrogate(arguments);
        arguments.push('"');
        self.place = if is_key { Place::Assign } else { Place::Next };
    }

    /// In what may become the marker before a text; what does not is no text.
    fn opening(&mut self, character: char, is_key: bool, arguments: &mut String) -> Step {
        self.held.push(character);
        if self.marker.starts_with(self.held.as_str()) {
            self.place = Place::Opening { is_key };
            if self.held == self.marker {
                self.held.clear();
                self.open_text(None, is_key, arguments);
            }
            return Step::More;
        }
        self.held.pop();
        self.place = if is_key { Place::BareKey } else { Place::Bare };
        self.push(character, arguments)
    }

    /// In a text that ends with the marker.
    fn marked(&mut self, character: char, is_key: bool, arguments: &mut String) {
        self.held.push(character);
        while !self.marker.starts_with(self.held.as_str()) {
            let first = self.held.remove(0);
            push_character(first, arguments);
        }
        if self.held == self.marker {
            self.held.clear();
            self.close_text(is_key, arguments);
        }
    }

    /// In a text of Python's.
    fn quoted(&mut self, character: char, (quote, escape): (char, Escape), is_key: bool, arguments: &mut String) {
        let mut after = Escape::None;
        match escape {
            Escape::None if character == quote => return self.close_text(is_key, arguments),
            Escape::None if character == '\\' => after = Escape::Begun,
            Escape::None => self.push_code(character as u32, arguments),
            Escape::Begun => match character {
                'x' => after = Escape::Digits { base: 16, left: 2, value: 0 },
                'u' => after = Escape::Digits { base: 16, left: 4, value: 0 },
                'U' => after = Escape::Digits { base: 16, left: 8, value: 0 },
                '0'..='7' => {
                    after = Escape::Digits { base: 8, left: 2, value: character.to_digit(8).unwrap_or_default() };
                }
                // A line that goes on.
                '\n' => {}
                _ => {
                    let code = escaped(character).unwrap_or_else(|| {
                        // As in Python a backslash that escapes nothing is one.
                        self.push_code('\\' as u32, arguments);
                        character
                    });
                    self.push_code(code as u32, arguments);
                }
            },
            Escape::Digits { base, left, value } => {
                let Some(digit) = character.to_digit(base) else {
                    self.push_code(value, arguments);
                    return self.quoted(character, (quote, Escape::None), is_key, arguments);
                };
                let value = value.saturating_mul(base).saturating_add(digit);
                if left > 1 {
                    after = Escape::Digits { base, left: left - 1, value };
                } else {
                    self.push_code(value, arguments);
                }
            }
        }
        self.place = Place::Text { quote: Some(quote), escape: after, is_key };
    }

    /// A character by its code, or half of one.
    fn push_code(&mut self, code: u32, arguments: &mut String) {
        if let (Some(high), 0xDC00..0xE000) = (self.surrogate, code) {
            self.surrogate = None;
            return self.push_code(0x1_0000 + ((high - 0xD800) << 10) + (code - 0xDC00), arguments);
        }
        self.end_surrogate(arguments);
        if (0xD800..0xDC00).contains(&code) {
            self.surrogate = Some(code);
        } else {
            push_character(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), arguments);
        }
    }

    /// Half a character is none.
    fn end_surrogate(&mut self, arguments: &mut String) {
        if self.surrogate.take().is_some() {
            arguments.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Writes a value without quotes; false if it is none.
    fn bare(&mut self, arguments: &mut String) -> bool {
        let held = std::mem::take(&mut self.held);
        let text = held.trim_end();
        let json = ["true", "false", "null"];
        let word = self.language.words.iter().chain(&json).position(|word| *word == text).map(|at| json[at % 3].to_owned());
        let value = match word.or_else(|| number(text)) {
            Some(value) => value,
            None if self.language.quotes == Quotes::Python => return false,
            None => {
                let mut quoted = String::from('"');
                push_text(text, &mut quoted);
                quoted + "\""
            }
        };
        self.separate_in_array(arguments);
        arguments.push_str(&value);
        true
    }
}

/// What a backslash and this character stand for.
fn escaped(character: char) -> Option<char> {
    Some(match character {
        '\\' | '\'' | '"' => character,
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{C}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{B}',
        _ => return None,
    })
}

/// A number as JSON writes it, which has digits on both sides of a point and no plus before them.
fn number(text: &str) -> Option<String> {
    let unsigned = text.trim_start_matches(['+', '-']);
    if text.len() - unsigned.len() > 1 {
        return None;
    }
    let (mantissa, exponent) = unsigned.split_at(unsigned.find(['e', 'E']).unwrap_or(unsigned.len()));
    let (whole, part) = mantissa.split_once('.').unwrap_or((mantissa, "0"));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let power = exponent.get(1..).unwrap_or_default();
    let power = power.strip_prefix(['+', '-']).unwrap_or(power);
    let has_digits = !whole.is_empty() || (mantissa.contains('.') && !part.is_empty());
    if !has_digits || !are_digits(whole) || !are_digits(part) || !are_digits(power) || power.is_empty() != exponent.is_empty() {
        return None;
    }
    if whole.len() > 1 && whole.starts_with('0') {
        return None;
    }
    let sign = if text.starts_with('-') { "-" } else { "" };
    let whole = if whole.is_empty() { "0" } else { whole };
    let part = if part.is_empty() { "0" } else { part };
    let point = if mantissa.contains('.') { format!(".{part}") } else { String::new() };
    Some(format!("{sign}{whole}{point}{exponent}"))
}

fn push_text(text: &str, json: &mut String) {
    text.chars().for_each(|character| push_character(character, json));
}

/// A character of a JSON string. The mark of a special token that is out of place is none.
pub(super) fn push_character(character: char, json: &mut String) {
    match character {
        MARK => {}
        '"' | '\\' => json.extend(['\\', character]),
        '\n' => json.push_str("\\n"),
        '\r' => json.push_str("\\r"),
        '\t' => json.push_str("\\t"),
        '\0'..' ' => {
            let _ = write!(json, "\\u{:04x}", character as u32);
        }
        _ => json.push(character),
    }
}
