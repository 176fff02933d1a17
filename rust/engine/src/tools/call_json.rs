//! A call as a JSON object, character by character.

/// What a character made known.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Nothing.
    More,
    /// The object is complete.
    Complete,
    /// It is no call.
    Malformed,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Start,
    /// Before a key, or the end.
    Key,
    InKey,
    Colon,
    Value,
    InValue,
    /// Behind a value.
    Comma,
}

/// Reads `{"name": ..., "arguments": {...}}` and tells of the arguments as they come.
#[derive(Clone, Debug)]
pub(super) struct CallJson {
    place: Place,
    key: String,
    value: JsonValue,
    /// A value that is held until it is complete: of a key that is not the arguments', or arguments in quotes.
    other: String,
    /// The arguments are a text, which may have an object in it.
    is_quoted: bool,
    /// The name, once it is known.
    pub name: Option<String>,
    /// The id that the model gives the call, once it is known.
    pub id: Option<String>,
    /// Arguments that have come and were not taken.
    pub arguments: String,
    /// Whether they have begun.
    pub has_arguments: bool,
}

impl CallJson {
    pub fn new() -> Self {
        Self {
            place: Place::Start,
            key: String::new(),
            value: JsonValue::default(),
            other: String::new(),
            is_quoted: false,
            name: None,
            id: None,
            arguments: String::new(),
            has_arguments: false,
        }
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }

    pub fn push(&mut self, character: char) -> Step {
        let is_space = character.is_ascii_whitespace();
        match self.place {
            Place::Start if character == '{' => self.place = Place::Key,
            Place::Start | Place::Key | Place::Colon | Place::Value | Place::Comma if is_space => {}
            Place::Key if character == '"' => {
                self.key.clear();
                self.place = Place::InKey;
            }
            Place::Key | Place::Comma if character == '}' => {
                return if self.name.is_some() { Step::Complete } else { Step::Malformed };
            }
            Place::InKey if character == '"' => self.place = Place::Colon,
            Place::InKey => self.key.push(character),
            Place::Colon if character == ':' => self.place = Place::Value,
            Place::Value => {
                self.place = Place::InValue;
                self.value = JsonValue::default();
                self.other.clear();
                self.has_arguments |= self.is_arguments();
                self.is_quoted = self.is_arguments() && character == '"';
                return self.value_character(character);
            }
            Place::InValue => return self.value_character(character),
            Place::Comma if character == ',' => self.place = Place::Key,
            _ => return Step::Malformed,
        }
        Step::More
    }

    /// The answer has ended within the call: what is held of its arguments is what there is of them.
    pub fn finish(&mut self) {
        if self.is_quoted {
            self.arguments.push_str(&self.other);
        }
    }

    fn value_character(&mut self, character: char) -> Step {
        let is_part = self.value.push(character);
        if is_part {
            if self.is_arguments() && !self.is_quoted { self.arguments.push(character) } else { self.other.push(character) }
        }
        if !self.value.is_complete() {
            return Step::More;
        }
        if self.is_quoted {
            let text = serde_json::from_str::<String>(&self.other).unwrap_or_default();
            let is_object = serde_json::from_str::<serde_json::Map<_, _>>(&text).is_ok();
            self.arguments.push_str(if is_object { text.trim() } else { &self.other });
            self.is_quoted = false;
        }
        if self.key == "id" {
            self.id = serde_json::from_str(&self.other).ok();
        }
        if self.key == "name" {
            match serde_json::from_str(&self.other) {
                Ok(name) => self.name = Some(name),
                Err(_) => return Step::Malformed,
            }
        }
        self.place = Place::Comma;
        // A number or a word ends with what follows it.
        if is_part { Step::More } else { self.push(character) }
    }
}

/// Where one JSON value ends.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonValue {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    is_scalar: bool,
    is_complete: bool,
}

impl JsonValue {
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Takes a character; false if it is no part of the value any more, which then is complete.
    pub fn push(&mut self, character: char) -> bool {
        if self.in_string {
            match character {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => {
                    self.in_string = false;
                    self.is_complete = self.depth == 0;
                }
                _ => {}
            }
            return true;
        }
        match character {
            ',' | '}' | ']' if self.depth == 0 => {
                self.is_complete = true;
                return false;
            }
            character if self.is_scalar && character.is_ascii_whitespace() => {
                self.is_complete = true;
                return false;
            }
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth -= 1;
                self.is_complete = self.depth == 0;
            }
            _ if self.depth == 0 => self.is_scalar = true,
            _ => {}
        }
        true
    }
}
