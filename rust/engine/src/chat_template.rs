//! Chat templates: a model's Jinja template turns messages into its prompt.

mod budget;
mod limits;

use std::{
    fmt::Write as _,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{Environment, Error, ErrorKind, State, Value, value::Kwargs};
use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use crate::{
    EngineError, Message, MessageContent,
    error::caught_quietly,
    json::{read_bounded, read_json},
    tokenizer::SpecialTokens,
    tools::ToolOptions,
};

/// Instructions that a template may execute; one for a long conversation needs some hundred a message.
const FUEL: u64 = 10_000_000;
const NAME: &str = "chat_template";

/// A compiled chat template.
///
/// Templates come with models and are not trusted: instructions, recursion, and the bytes of all texts and lists that a template
/// makes are bounded, the latter by 64 MiB and 256 times the bytes of the messages.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: SpecialTokens,
    source: String,
    form: ContentForm,
}

/// How a template wants the content of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentForm {
    /// As texts, whatever they are made of.
    Texts,
    /// As texts, or as lists of parts where there are images or sounds.
    Either,
    /// As lists of parts.
    Parts,
}

impl ContentForm {
    /// By what the template's text looks for.
    fn of(source: &str) -> Self {
        let names = |kind: &str| source.contains(&format!("'{kind}'")) || source.contains(&format!("\"{kind}\""));
        match (["image", "audio", "video"].iter().any(|kind| names(kind)), source.contains("is string")) {
            (false, _) => Self::Texts,
            (true, true) => Self::Either,
            (true, false) => Self::Parts,
        }
    }
}

/// What a template is rendered with, beside the messages.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// Ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Ends with the text of the last message, which the answer then goes on from; not with `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Written behind what the template gives, as if it were a part of it: special tokens in it are such.
    pub appended: String,
    /// The contents of messages are lists of parts, whatever the template looks for.
    pub has_parts: bool,
    /// Given to the template when set.
    pub enable_thinking: Option<bool>,
    /// Given to the template when set.
    pub reasoning_effort: Option<String>,
    /// Tokens of reasoning at most: behind them comes what ends it. Any number unless given, or where the model marks none.
    pub thinking_budget: Option<usize>,
    /// The functions that the answer may call, and whether it does.
    pub tools: ToolOptions,
    /// Further variables.
    pub extra: Map<String, Json>,
    /// What `strftime_now` tells, in UTC.
    pub now: SystemTime,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            appended: String::new(),
            has_parts: false,
            enable_thinking: None,
            reasoning_effort: None,
            thinking_budget: None,
            tools: ToolOptions::default(),
            extra: Map::new(),
            now: SystemTime::now(),
        }
    }
}

impl ChatTemplate {
    /// Compiles a template as Hugging Face's `apply_chat_template` does: blocks trimmed, loop controls, Python's string methods.
    ///
    /// A source beyond the limits of [`limits`] is an [`EngineError::ChatTemplate`]: the parser recurses into what it reads.
    pub fn new(source: &str, special_tokens: SpecialTokens) -> Result<Self, EngineError> {
        limits::check(source)?;
        let environment = limits::with_known_stack(|| Self::compile(source))??;
        Ok(Self { environment, special_tokens, source: source.to_owned(), form: ContentForm::of(source) })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    fn compile(source: &str) -> Result<Environment<'static>, EngineError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        budget::install(&mut environment);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .and_then(|()| budget::check(&environment, NAME))
            .map_err(|e| EngineError::ChatTemplate(format!("the chat template does not compile: {}", describe(&e))))?;
        Ok(environment)
    }

    /// The prompt for a conversation. BOS and the like are part of it where the template writes them: tokenize it without adding
    /// special tokens.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, EngineError> {
        if messages.is_empty() {
            return Err(EngineError::InvalidArgument("messages is empty; a chat needs at least one message".into()));
        }
        let form = if options.has_parts { ContentForm::Parts } else { self.form };
        let messages = messages.iter().enumerate().map(|(i, m)| message_object(i, m, form)).collect::<Result<Vec<_>, _>>()?;
        let num_bytes: usize = messages.iter().map(|m| m.to_string().len()).sum();

        let mut context = options.extra.clone();
        context.insert("messages".into(), Json::Array(messages));
        context.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        context.entry("tools").or_insert(Json::Null);
        context.entry("documents").or_insert(Json::Null);
        let special = &self.special_tokens;
        for (key, token) in [
            ("bos_token", &special.bos_token),
            ("eos_token", &special.eos_token),
            ("unk_token", &special.unk_token),
            ("pad_token", &special.pad_token),
            ("reasoning_effort", &options.reasoning_effort),
        ] {
            if let Some(text) = token {
                context.insert(key.into(), text.as_str().into());
            }
        }
        if let Some(thinking) = options.enable_thinking {
            context.insert("enable_thinking".into(), thinking.into());
        }
        let now = options.now;
        let strftime_now = Value::from_function(move |format: String| strftime(&format, now));
        // The outer map comes first, so no key of a caller hides the function.
        let context = minijinja::context! { strftime_now, ..Value::from_serialize(&context) };

        caught_quietly(|| budget::render(&self.environment, NAME, context, num_bytes))
            .and_then(|result| result.map_err(|e| describe(&e)))
            .map_err(|e| EngineError::ChatTemplate(format!("the chat template rejected the messages: {e}")))
    }
}

/// Reads a template that a user names: a `.json` file with a `chat_template` key, else the template's text itself.
pub fn read_template(path: &Path) -> Result<String, EngineError> {
    let file = path.display();
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
        return match read_json(path).map_err(EngineError::ChatTemplate)? {
            Some(json) => named_template(&json["chat_template"]).ok_or_else(|| {
                EngineError::ChatTemplate(format!("{file} has no chat_template; it is a text, or a list with a default"))
            }),
            None => Err(EngineError::ChatTemplate(format!("chat template {file} does not exist; give a .jinja or .json file"))),
        };
    }
    read_bounded(path, limits::MAX_BYTES as u64)
        .and_then(|bytes| String::from_utf8(bytes).map_err(|e| std::io::Error::new(std::io::ErrorKind::InvalidData, e)))
        .map_err(|e| EngineError::ChatTemplate(format!("chat template {file} cannot be read: {e}; give a .jinja or .json file")))
}

/// The template of a model folder: `chat_template.jinja`, else the `chat_template` of `tokenizer_config.json` or
/// `chat_template.json`.
pub fn template_in_dir(dir: &Path) -> Result<Option<String>, EngineError> {
    let jinja = dir.join("chat_template.jinja");
    if jinja.exists() {
        return read_template(&jinja).map(Some);
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        if let Some(json) = read_json(&dir.join(name)).map_err(EngineError::ChatTemplate)?
            && let Some(template) = named_template(&json["chat_template"])
        {
            return Ok(Some(template));
        }
    }
    Ok(None)
}

/// A template's text, or of a list of named templates the default.
fn named_template(value: &Json) -> Option<String> {
    match value {
        Json::String(text) => Some(text.clone()),
        Json::Array(list) => {
            let default = list.iter().find(|t| t["name"] == "default").or(if list.len() == 1 { list.first() } else { None })?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

fn message_object(index: usize, message: &Message, form: ContentForm) -> Result<Json, EngineError> {
    let is_list = form == ContentForm::Parts || form == ContentForm::Either && !message.media.is_empty();
    let content: Json = match &message.content {
        MessageContent::Text(text) if form == ContentForm::Parts => json!([{ "type": "text", "text": text }]),
        MessageContent::Text(text) => text.as_str().into(),
        MessageContent::Parts(parts) => {
            let mut text = String::new();
            for part in parts {
                let kind = part["type"].as_str().unwrap_or("nothing");
                match (kind, part["text"].as_str()) {
                    ("text", Some(t)) => text.push_str(t),
                    ("text", None) => {
                        return Err(EngineError::InvalidArgument(format!(
                            "messages[{index}].content has a text part without text: {part}"
                        )));
                    }
                    (kind, _) if message.media.iter().any(|media| media.kind().part_type() == kind) => {}
                    _ => {
                        return Err(EngineError::NotSupported(format!(
                            "messages[{index}].content has a part of type {kind:?}; text, images and sounds are supported"
                        )));
                    }
                }
            }
            if is_list { Json::Array(parts.clone()) } else { text.into() }
        }
    };
    let mut object = Map::new();
    object.insert("role".into(), message.role.as_str().into());
    object.insert("content".into(), content);
    for (key, value) in &message.extra {
        object.entry(key.clone()).or_insert_with(|| value.clone());
    }
    Ok(Json::Object(object))
}

/// The error and its causes, with the line.
fn describe(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line() {
        let _ = write!(text, " (line {line} of the template)");
    }
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text
}

/// `{% generation %}` marks what a trainer learns from; here it means nothing, and becomes a block that is always taken.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let inside = start + 2;
        let Some(len) = rest[inside..].find("%}") else { break };
        let tag = &rest[inside..inside + len];
        let word = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let plain = match word {
            "generation" => tag.replacen(word, "if true", 1),
            "endgeneration" => tag.replacen(word, "endif", 1),
            _ => tag.to_owned(),
        };
        result.push_str(&rest[..inside]);
        result.push_str(&plain);
        result.push_str("%}");
        rest = &rest[inside + len + 2..];
    }
    result.push_str(rest);
    result
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
#[allow(clippy::needless_pass_by_value)] // The signature of a filter.
fn tojson(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted by Hugging Face's filter; the defaults are what templates ask for.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    if indent.is_some_and(|i| i > 16) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson indents by 16 at most"));
    }
    let spaces = " ".repeat(indent.unwrap_or(0));
    let write = |writer: &mut dyn std::io::Write| match indent {
        Some(_) => {
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(writer, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(writer, PythonFormatter)),
    };
    budget::charge_written(state, write)?;
    let mut bytes = Vec::new();
    write(&mut bytes).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&bytes).into_owned()))
}

/// JSON on one line with a space after commas and colons.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Python's `strftime`, in UTC, for the directives that chat templates use.
fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, time) = (seconds / 86400, seconds % 86400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let (month_name, weekday) = (MONTHS[month as usize - 1], WEEKDAYS[((days + 4) % 7) as usize]);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        // Writing to a String cannot fail.
        let _ = match chars.next() {
            Some('Y') => write!(text, "{year}"),
            Some('y') => write!(text, "{:02}", year % 100),
            Some('m') => write!(text, "{month:02}"),
            Some('d') => write!(text, "{day:02}"),
            Some('e') => write!(text, "{day:2}"),
            Some('H') => write!(text, "{hour:02}"),
            Some('I') => write!(text, "{:02}", (hour + 11) % 12 + 1),
            Some('M') => write!(text, "{minute:02}"),
            Some('S') => write!(text, "{second:02}"),
            Some('p') => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('B') => write!(text, "{month_name}"),
            Some('b') => write!(text, "{}", &month_name[..3]),
            Some('A') => write!(text, "{weekday}"),
            Some('a') => write!(text, "{}", &weekday[..3]),
            Some('F') => write!(text, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(text, "{hour:02}:{minute:02}:{second:02}"),
            Some('j') => write!(text, "{:03}", days - days_of(year, 1, 1) + 1),
            Some('%') => write!(text, "%"),
            other => {
                let directive: String = other.into_iter().collect();
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now does not know %{directive}; known are YymdeHIMSpBbAaFTj%"),
                ));
            }
        };
    }
    Ok(text)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar, from 1970 on (Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms").
fn days_of(year: u64, month: u64, day: u64) -> u64 {
    // Years begin in March, so the leap day is the last.
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
}

/// The inverse of [`days_of`].
fn civil_date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day_of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let all = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %I%p %y %e %F %T 100%%";
        assert_eq!(
            strftime(all, at(0)).unwrap(),
            "1970-01-01 00:00:00 Thursday Thu January Jan 001 12AM 70  1 1970-01-01 00:00:00 100%"
        );
        // date -u -d @1709210096, the leap day of 2024; then the last second of that year.
        assert_eq!(strftime("%d %b %Y %T %a %j", at(1_709_210_096)).unwrap(), "29 Feb 2024 12:34:56 Thu 060");
        assert_eq!(strftime("%F %T %j", at(1_735_689_599)).unwrap(), "2024-12-31 23:59:59 366");
        assert!(strftime("%Q", at(0)).unwrap_err().to_string().contains("%Q"));
        for days in 0..200_000 {
            let (y, m, d) = civil_date(days);
            assert_eq!(days_of(y, m, d), days);
        }
    }

    #[test]
    fn generation_tags_become_plain_blocks() {
        let source = "a{%- generation -%} b {% endgeneration %}c{% if generation %}d{% endif %}{%";
        assert_eq!(without_generation_tags(source), "a{%- if true -%} b {% endif %}c{% if generation %}d{% endif %}{%");
    }
}
