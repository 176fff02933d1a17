//! A call between its markers, character by character, however it is written.

use super::{
    super::{
        SHORT_ID_LEN,
        call_json::{CallJson, JsonValue, Step},
        literals::LiteralsReader,
        parameters::ParametersReader,
    },
    MARK, is_name,
};

/// A call that has begun.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// All of it, until its name has been given out: it may turn out to be text.
    pub raw: String,
    pub body: CallBody,
    pub is_open: bool,
    pub has_arguments: bool,
}

#[derive(Clone, Debug)]
pub(super) enum CallBody {
    Json(CallJson),
    /// The name so far.
    Name(NameReader),
    Arguments(JsonValue),
    Parameters(ParametersReader),
    Literals(LiteralsReader),
}

/// The name of a call up to its arguments, with the id that the model has given it, if any.
#[derive(Clone, Debug)]
pub(super) struct NameReader {
    so_far: String,
    /// Before an id; empty: there is none.
    call_id: String,
    /// Before the arguments.
    end: String,
}

impl NameReader {
    pub fn new(call_id: String, end: String) -> Self {
        Self { so_far: String::new(), call_id, end }
    }

    /// Takes a character; the name and the id once the arguments begin.
    fn push(&mut self, character: char) -> Option<(&str, Option<&str>)> {
        self.so_far.push(character);
        let named = self.so_far.strip_suffix(self.end.as_str());
        // What stands before the arguments may be missing.
        let text = named.or_else(|| self.so_far.strip_suffix('{'))?;
        let parts = text.split_once(self.call_id.as_str()).filter(|_| !self.call_id.is_empty());
        Some(parts.map_or((text.trim(), None), |(name, id)| (name.trim(), Some(id.trim()))))
    }
}

/// What a character made of a call.
#[derive(Default)]
pub(super) struct Taken {
    /// The name, at the moment when it is known.
    pub name: Option<String>,
    /// The id that the model has given it.
    pub id: Option<String>,
    pub is_complete: bool,
    pub is_malformed: bool,
    /// The character is what follows the call.
    pub is_beyond: bool,
}

impl Taken {
    fn of(step: &Step) -> Self {
        Self { is_complete: *step == Step::Complete, is_malformed: *step == Step::Malformed, ..Self::default() }
    }
}

impl Call {
    pub fn new(body: CallBody) -> Self {
        Self { raw: String::new(), body, is_open: false, has_arguments: false }
    }

    /// Takes a character, and appends what it makes known of the arguments.
    pub fn push(&mut self, character: char, arguments: &mut String) -> Taken {
        let mut taken = Taken::default();
        match &mut self.body {
            // A special token that is out of place is its spelling.
            CallBody::Json(_) | CallBody::Arguments(_) if character == MARK => {}
            CallBody::Json(json) => {
                taken = Taken::of(&json.push(character));
                if !self.is_open {
                    taken.name.clone_from(&json.name);
                    taken.id = json.id.clone().filter(|id| is_short_id(id));
                }
                if self.is_open || taken.name.is_some() {
                    arguments.push_str(&std::mem::take(&mut json.arguments));
                }
            }
            CallBody::Name(reader) => {
                if let Some((name, id)) = reader.push(character) {
                    taken.is_malformed = !is_name(name);
                    taken.name = Some(name.to_owned()).filter(|_| !taken.is_malformed);
                    taken.id = id.filter(|id| is_short_id(id)).map(str::to_owned);
                    let mut value = JsonValue::default();
                    if character == '{' && !taken.is_malformed && value.push(character) {
                        arguments.push(character);
                    }
                    self.body = CallBody::Arguments(value);
                }
            }
            CallBody::Arguments(value) => {
                if !character.is_whitespace() || self.has_arguments {
                    if value.push(character) {
                        arguments.push(character);
                    } else {
                        taken.is_beyond = true;
                    }
                    taken.is_complete = value.is_complete();
                }
            }
            CallBody::Parameters(parameters) => {
                taken = Taken::of(&parameters.push(character, arguments));
                taken.name = parameters.name();
            }
            CallBody::Literals(literals) => {
                taken = Taken::of(&literals.push(character, arguments));
                taken.name = literals.name();
            }
        }
        self.has_arguments |= !arguments.is_empty();
        taken
    }

    /// The answer has ended within it: appends what was held of the arguments.
    pub fn finish(&mut self, arguments: &mut String) {
        match &mut self.body {
            CallBody::Json(json) => {
                json.finish();
                arguments.push_str(&json.arguments);
            }
            CallBody::Parameters(parameters) => parameters.finish(arguments),
            CallBody::Name(_) | CallBody::Arguments(_) | CallBody::Literals(_) => {}
        }
    }
}

/// Whether templates take it back in the next prompt.
fn is_short_id(text: &str) -> bool {
    text.len() == SHORT_ID_LEN && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}
