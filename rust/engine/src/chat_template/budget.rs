//! What a template may make of memory, whatever it does.
//!
//! minijinja bounds instructions and not the values that they make, and a few instructions make gigabytes: a text joined with
//! itself doubles. So a compiled template gets instructions of our own between its own: every text, list and map that it makes
//! is charged to one budget with all that is in it, each time that it is there. What can grow by more than its operands is
//! charged before it is made. Values so charged are also shallow and without cycles: whatever walks them later ends.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    sync::atomic::{AtomicU64, Ordering},
};

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value, filters,
    machinery::{Instruction, Instructions, Vm, get_compiled_template, make_string_output},
    value::{Kwargs, Object, Rest, ValueKind},
};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Bytes that a render may make beyond [`BYTES_PER_BYTE`] times those it is given.
const MAX_BYTES: u64 = 64 << 20;
/// Templates that append to a list or a text as they go copy it each time.
const BYTES_PER_BYTE: u64 = 256;
/// A value in a list.
const VALUE_BYTES: u64 = 32;
/// Lists in lists.
const MAX_DEPTH: usize = 128;
/// The largest width or precision of a number that is formatted.
const MAX_WIDTH: u64 = 9999;

// No template can name these: they are no identifiers.
const BUDGET: &str = "the budget";
const CHARGE: &str = "#";
const CONCAT: &str = "~";
const STORE: &str = "=";
/// A filter that is looked up each time.
const UNCACHED: u8 = !0;

/// Bytes that are left of a render's.
#[derive(Debug)]
struct Budget {
    limit: u64,
    left: AtomicU64,
}

impl Object for Budget {}

impl Budget {
    fn take(&self, bytes: u64) -> Result<(), Error> {
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        taken.map(drop).map_err(|_| {
            let limit = self.limit;
            refused(format!(
                "the template makes texts and lists of more than {limit} bytes in all, which is the most for these messages"
            ))
        })
    }

    /// Charges a value and what is in it.
    fn take_value(&self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(refused(format!("the template makes a list in a list more than {MAX_DEPTH} deep")));
        }
        if depth > 0 {
            ends(value)?;
        }
        self.take(VALUE_BYTES)?;
        match value.kind() {
            ValueKind::String => self.take(value.as_str().map_or(0, str::len) as u64),
            ValueKind::Bytes => self.take(value.as_bytes().map_or(0, <[u8]>::len) as u64),
            ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.try_for_each(|item| self.take_value(&item, depth + 1)),
            ValueKind::Map => value.try_iter()?.try_for_each(|key| {
                self.take_value(&key, depth + 1)?;
                self.take_value(&value.get_item(&key)?, depth + 1)
            }),
            _ => Ok(()),
        }
    }

    /// Charges the text that a value is written as.
    fn take_text(&self, value: &Value) -> Result<(), Error> {
        if let Some(text) = value.as_str() {
            return self.take(text.len() as u64);
        }
        let mut text = Charged { budget: self, error: None };
        let written = write!(text, "{value}");
        text.error.map_or(Ok(()), Err).and(written.map_err(Error::from))
    }
}

/// Charges what is written to it, and keeps none of it.
struct Charged<'a> {
    budget: &'a Budget,
    error: Option<Error>,
}

impl fmt::Write for Charged<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.budget.take(text.len() as u64).map_err(|e| {
            self.error = Some(e);
            fmt::Error
        })
    }
}

impl std::io::Write for Charged<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.budget.take(bytes.len() as u64).map_err(std::io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn refused(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// Refuses what could hold itself: a namespace, a macro or a loop in a list or a namespace.
fn ends(value: &Value) -> Result<(), Error> {
    let is_namespace = value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"));
    if is_namespace || value.kind() == ValueKind::Plain {
        return Err(refused("a namespace, macro or loop cannot be kept in a list or a namespace".into()));
    }
    Ok(())
}

/// Runs `work` on the budget of the render.
fn with_budget<T>(state: &State<'_, '_>, work: impl FnOnce(&Budget) -> Result<T, Error>) -> Result<T, Error> {
    let value = state.lookup(BUDGET);
    match value.as_ref().and_then(Value::downcast_object_ref::<Budget>) {
        Some(budget) => work(budget),
        None => Err(refused("the template runs without a budget".into())),
    }
}

/// Charges what a serializer will write, by having it write to nowhere.
pub(super) fn charge_written<E>(
    state: &State<'_, '_>,
    write: impl FnOnce(&mut dyn std::io::Write) -> Result<(), E>,
) -> Result<(), Error>
where
    E: fmt::Display,
{
    with_budget(state, |budget| write(&mut Charged { budget, error: None }).map_err(|e| refused(e.to_string())))
}

/// Charges the environment's filters and methods, and those that [`render`] needs.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_filter(CHARGE, |state: &State<'_, '_>, value: Value| {
        with_budget(state, |budget| {
            if value.kind() != ValueKind::Iterable {
                return budget.take_value(&value, 0).map(|()| value);
            }
            // Nothing, as often as a template likes: to find that there is nothing took as long.
            if value.len() == Some(0) {
                return Ok(Value::from(Vec::<Value>::new()));
            }
            // What is computed as it is walked, from something that is too, would be walked at any depth.
            let mut list = Vec::new();
            for item in value.try_iter()? {
                budget.take_value(&item, 1)?;
                list.push(item);
            }
            Ok(Value::from(list))
        })
    });
    environment.add_filter(CONCAT, |state: &State<'_, '_>, left: Value, right: Value| {
        with_budget(state, |budget| budget.take_text(&left).and_then(|()| budget.take_text(&right)))?;
        Ok::<_, Error>(Value::from(format!("{left}{right}")))
    });
    environment.add_filter(STORE, |value: Value| ends(&value).map(|()| value));
    environment.set_formatter(|out: &mut Output<'_>, state: &State<'_, '_>, value: &Value| {
        // Markup takes up to six bytes for one.
        let times = if state.auto_escape() == AutoEscape::None { 1 } else { 6 };
        with_budget(state, |budget| (0..times).try_for_each(|_| budget.take_text(value)))?;
        minijinja::escape_formatter(out, state, value)
    });
    for (name, original) in [
        ("batch", Value::from_function(filters::batch)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(filters::indent)),
        ("join", Value::from_function(filters::join)),
        ("lines", Value::from_function(filters::lines)),
        ("list", Value::from_function(filters::list)),
        ("replace", Value::from_function(filters::replace)),
        ("slice", Value::from_function(filters::slice)),
        ("split", Value::from_function(filters::split)),
    ] {
        environment.add_filter(name, move |state: &State<'_, '_>, args: Rest<Value>| {
            with_budget(state, |budget| charge_growth(budget, name, &args))?;
            original.call(state, &args)
        });
    }
    // Both write far more than they read.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
    environment.set_unknown_method_callback(|state, value, method, args| {
        let mut all = vec![value.clone()];
        all.extend_from_slice(args);
        if method == "join" {
            all.reverse();
        }
        with_budget(state, |budget| charge_growth(budget, method, &all))?;
        unknown_method_callback(state, value, method, args)
    });
}

/// Charges what a filter, or a method of the same name, makes beyond what it is given.
fn charge_growth(budget: &Budget, name: &str, args: &[Value]) -> Result<(), Error> {
    let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    let number = |value: Option<&Value>| value.and_then(Value::as_usize).unwrap_or(0) as u64;
    let len = |text: &str| text.len() as u64;
    let bytes = match name {
        "batch" | "slice" => number(args.get(1)).saturating_mul(2 * VALUE_BYTES),
        "format" => return charge_format(budget, args),
        "indent" => {
            let kwargs = args.last().and_then(|last| Kwargs::try_from(last.clone()).ok());
            let width = kwargs.and_then(|kwargs| kwargs.get::<Option<Value>>("width").ok().flatten());
            let width = number(args.get(1)).max(number(width.as_ref()));
            (text(0).matches('\n').count() as u64 + 1).saturating_mul(width) + len(text(0))
        }
        "join" => {
            let items = args.first().and_then(|list| list.len().or(list.as_str().map(str::len))).unwrap_or(0) as u64;
            // A text is joined by its characters.
            items.saturating_mul(len(text(1))) + len(text(0))
        }
        "list" => len(text(0)).saturating_mul(VALUE_BYTES),
        "lines" | "splitlines" => len(text(0)) + (text(0).matches('\n').count() as u64 + 1).saturating_mul(VALUE_BYTES),
        "replace" => {
            for arg in args.iter().take(3) {
                budget.take_text(arg)?;
            }
            let (old, new) = (args.get(1).map(Value::to_string), args.get(2).map(Value::to_string));
            let count = args.first().map_or(0, |value| value.to_string().matches(old.as_deref().unwrap_or_default()).count());
            (count as u64).saturating_mul(len(&new.unwrap_or_default()))
        }
        "split" => {
            let pieces = match args.get(1).and_then(Value::as_str) {
                Some(separator) => text(0).matches(separator).count() + 1,
                None => text(0).split_whitespace().count(),
            };
            len(text(0)) + (pieces as u64).saturating_mul(VALUE_BYTES)
        }
        // Would never end.
        "count" if args.get(1).is_some_and(|what| what.as_str() == Some("")) => {
            return Err(refused("count of an empty text".into()));
        }
        _ => 0,
    };
    budget.take(bytes)
}

/// Each field takes its width or precision, or as much as the longest argument.
fn charge_format(budget: &Budget, args: &[Value]) -> Result<(), Error> {
    let Some((Some(pattern), values)) = args.split_first().map(|(pattern, values)| (pattern.as_str(), values)) else {
        return Ok(());
    };
    let mut fields = 0;
    for (at, sign) in pattern.match_indices(['%', '{']) {
        fields += 1;
        let end = if sign == "{" { "}" } else { "diouxXeEfFgGcrsa%" };
        let field = pattern[at + 1..].split(|c| end.contains(c)).next().unwrap_or_default();
        let too_wide =
            |digits: &str| !digits.is_empty() && digits.parse::<u64>().is_ok_and(|n| n > MAX_WIDTH) || digits.len() > 15;
        if field.contains('*') || field.split(|c: char| !c.is_ascii_digit()).any(too_wide) {
            return Err(refused(format!("format of {field:?}: a width or precision is a number up to {MAX_WIDTH}")));
        }
    }
    let before = budget.left.load(Ordering::Relaxed);
    for value in values {
        budget.take_text(value)?;
    }
    let arguments = before - budget.left.load(Ordering::Relaxed).min(before);
    budget.take((MAX_WIDTH + arguments).saturating_mul(fields))
}

/// Renders a template of [`install`]'s environment.
///
/// `num_bytes` is the size of what is in `context`.
pub(super) fn render(environment: &Environment<'static>, name: &str, context: Value, num_bytes: usize) -> Result<String, Error> {
    let template = environment.get_template(name)?;
    let compiled = get_compiled_template(&template);
    let instructions = charged(&compiled.instructions)?;
    let mut blocks = BTreeMap::new();
    for (name, block) in &compiled.blocks {
        blocks.insert(*name, charged(block)?);
    }
    let limit = MAX_BYTES.saturating_add((num_bytes as u64).saturating_mul(BYTES_PER_BYTE));
    let budget = Value::from_object(Budget { limit, left: AtomicU64::new(limit) });
    let context = minijinja::context! { ..Value::from_iter([(BUDGET, budget)]), ..context };
    let mut text = String::new();
    let mut output = make_string_output(&mut text);
    Vm::new(environment).eval(&instructions, context, &blocks, &mut output, compiled.initial_auto_escape)?;
    Ok(text)
}

/// Refuses what cannot be charged.
pub(super) fn check(environment: &Environment<'static>, name: &str) -> Result<(), Error> {
    let template = environment.get_template(name)?;
    let compiled = get_compiled_template(&template);
    std::iter::once(&compiled.instructions).chain(compiled.blocks.values()).try_for_each(|code| charged(code).map(drop))
}

/// The instructions, with those that charge what they make.
fn charged<'a>(code: &Instructions<'a>) -> Result<Instructions<'a>, Error> {
    let all = || (0..code.len() as u32).filter_map(|i| Some((i, code.get(i)?)));
    // Where each instruction, and the end, comes to stand.
    let mut places = vec![0];
    for (_, instruction) in all() {
        let place = places.last().copied().unwrap_or(0);
        places.push(place + replaced(instruction)?.len() as u32);
    }
    let mut result = Instructions::new(code.name(), code.source());
    for (i, instruction) in all() {
        for mut instruction in replaced(instruction)? {
            if let Instruction::Iterate(to)
            | Instruction::Jump(to)
            | Instruction::JumpIfFalse(to)
            | Instruction::JumpIfFalseOrPop(to)
            | Instruction::JumpIfTrueOrPop(to)
            | Instruction::BuildMacro(_, to, _) = &mut instruction
            {
                *to = places.get(*to as usize).copied().ok_or_else(|| refused("the template jumps out of itself".into()))?;
            }
            match (code.get_span(i), code.get_line(i)) {
                (Some(span), _) => result.add_with_span(instruction, span),
                (None, Some(line)) => result.add_with_line(instruction, line.try_into().unwrap_or(u16::MAX)),
                (None, None) => result.add(instruction),
            };
        }
    }
    Ok(result)
}

fn replaced<'a>(instruction: &Instruction<'a>) -> Result<Vec<Instruction<'a>>, Error> {
    let charge = || Instruction::ApplyFilter(CHARGE, Some(1), UNCACHED);
    Ok(match instruction {
        // The formatter charges what is emitted so.
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        Instruction::StringConcat => vec![Instruction::ApplyFilter(CONCAT, Some(2), UNCACHED)],
        Instruction::SetAttr(_) => {
            let store = Instruction::ApplyFilter(STORE, Some(1), UNCACHED);
            vec![Instruction::Swap, store, Instruction::Swap, instruction.clone()]
        }
        Instruction::Slice
        | Instruction::BuildMap(_)
        | Instruction::BuildList(_)
        | Instruction::Add
        | Instruction::Mul
        | Instruction::ApplyFilter(..)
        | Instruction::CallFunction(..)
        | Instruction::CallMethod(..)
        | Instruction::CallObject(_) => vec![instruction.clone(), charge()],
        // The parser has multiplied constants already.
        Instruction::LoadConst(value) if value.kind() == ValueKind::Iterable => vec![instruction.clone(), charge()],
        Instruction::UnpackLists(_) => {
            return Err(refused("the arguments of a call are unpacked from a list (*), which is not supported".into()));
        }
        Instruction::Include(_) | Instruction::LoadBlocks | Instruction::ExportLocals => {
            return Err(refused("another template is included, imported or extended; a chat template stands alone".into()));
        }
        _ => vec![instruction.clone()],
    })
}
