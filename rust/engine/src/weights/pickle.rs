//! The part of Python's pickle that checkpoints of PyTorch use (the format: CPython's `Lib/pickletools.py`, protocol 2, and what
//! 3 and 4 add to it).
//!
//! A pickle is a program for a stack machine. This one runs nothing: of the functions that a pickle calls it knows those that
//! make tensors and dicts, and everything else it calls is an opaque value. Values lie in a list and name each other by number,
//! so sharing costs nothing, and no depth can overflow a stack. Every instruction takes a byte at least and makes one value at
//! most.

use std::{collections::HashMap, ops::Range};

/// Instructions of a pickle at most, each of which makes one value at most; a checkpoint takes some sixty for each of its
/// tensors.
const MAX_INSTRUCTIONS: usize = 1 << 23;

/// The number of a value.
pub(super) type Id = usize;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// What is of no interest: None, floats, objects.
    Opaque,
    Int(i64),
    /// Where its bytes lie.
    Text(Range<usize>),
    /// A class or function by module and name.
    Global(Range<usize>, Range<usize>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// What lies outside of the pickle, by what the pickler says of it.
    Persistent(Id),
    /// A call of [`REBUILD_TENSOR`] with these arguments.
    Tensor(Id),
    /// What any other call would make, by its function.
    Made(Id),
}

/// The function that tensors are made by.
const REBUILD_TENSOR: (&[u8], &[u8]) = (b"torch._utils", b"_rebuild_tensor_v2");
/// The functions that wrap one up as a parameter.
const REBUILD_PARAMETER: [(&[u8], &[u8]); 2] =
    [(b"torch._utils", b"_rebuild_parameter"), (b"torch._utils", b"_rebuild_parameter_with_state")];
const ORDERED_DICT: (&[u8], &[u8]) = (b"collections", b"OrderedDict");

/// A pickle that was read.
pub(super) struct Pickle<'a> {
    bytes: &'a [u8],
    values: Vec<Value>,
    /// What it is.
    pub(super) root: Id,
    /// Behind its last byte.
    pub(super) end: usize,
}

impl<'a> Pickle<'a> {
    /// Reads the pickle that begins at `at`.
    ///
    /// # Errors
    /// What is wrong with it, without the file's name.
    pub(super) fn read(bytes: &'a [u8], at: usize) -> Result<Self, String> {
        let mut machine = Machine { bytes, at, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
        let root = machine.run()?;
        Ok(Self { bytes, values: machine.values, root, end: machine.at })
    }

    pub(super) fn values(&self) -> impl Iterator<Item = Id> {
        0..self.values.len()
    }

    pub(super) fn value(&self, id: Id) -> &Value {
        self.values.get(id).unwrap_or(&Value::Opaque)
    }

    /// A text that is UTF-8.
    pub(super) fn text(&self, id: Id) -> Option<&'a str> {
        let Value::Text(range) = self.value(id) else { return None };
        std::str::from_utf8(self.bytes.get(range.clone())?).ok()
    }

    pub(super) fn int(&self, id: Id) -> Option<i64> {
        if let Value::Int(value) = self.value(id) { Some(*value) } else { None }
    }

    /// The items of a list or tuple.
    pub(super) fn list(&self, id: Id) -> Option<&[Id]> {
        if let Value::List(items) = self.value(id) { Some(items) } else { None }
    }

    pub(super) fn dict(&self, id: Id) -> Option<&[(Id, Id)]> {
        if let Value::Dict(items) = self.value(id) { Some(items) } else { None }
    }

    /// The module of a class or function.
    pub(super) fn module(&self, id: Id) -> Option<&'a str> {
        let Value::Global(module, _) = self.value(id) else { return None };
        std::str::from_utf8(self.bytes.get(module.clone())?).ok()
    }

    /// The name of a class or function, without its module.
    pub(super) fn class(&self, id: Id) -> Option<&'a str> {
        let Value::Global(_, name) = self.value(id) else { return None };
        std::str::from_utf8(self.bytes.get(name.clone())?).ok()
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl Machine<'_> {
    fn take(&mut self, len: usize) -> Result<Range<usize>, String> {
        let start = self.at;
        let end = start.checked_add(len).filter(|end| *end <= self.bytes.len());
        self.at = end.ok_or_else(|| format!("a pickle is cut off at byte {start}"))?;
        Ok(start..self.at)
    }

    /// An unsigned number of so many bytes.
    fn number(&mut self, len: usize) -> Result<u64, String> {
        let range = self.take(len)?;
        Ok(self.bytes[range].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// As many bytes as a number of `len` bytes says.
    fn counted(&mut self, len: usize) -> Result<Range<usize>, String> {
        let count = self.number(len)?;
        self.take(usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn line(&mut self) -> Result<Range<usize>, String> {
        let start = self.at;
        let len = self.bytes[start..].iter().position(|byte| *byte == b'\n').ok_or("a pickle is cut off in a name")?;
        self.take(len + 1)?;
        Ok(start..start + len)
    }

    fn push(&mut self, value: Value) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    fn pop(&mut self) -> Result<Id, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.pop().filter(|_| self.stack.len() >= floor).ok_or_else(|| "a pickle takes more than it has".to_owned())
    }

    /// The value that an instruction changes, which stays on the stack.
    fn top(&mut self) -> Result<&mut Value, String> {
        let id = self.stack.last().copied().ok_or("a pickle changes what it does not have")?;
        Ok(&mut self.values[id])
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("a pickle ends a list that it has not begun")?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn pop_many(&mut self, count: usize) -> Result<(), String> {
        let mut items = (0..count).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
        items.reverse();
        self.push(Value::List(items));
        Ok(())
    }

    fn get(&mut self, key: u64) -> Result<(), String> {
        let id = u32::try_from(key).ok().and_then(|key| self.memo.get(&key));
        self.stack.push(*id.ok_or_else(|| format!("a pickle refers to value {key}, which it has not kept"))?);
        Ok(())
    }

    fn put(&mut self, key: u64) -> Result<(), String> {
        let id = *self.stack.last().ok_or("a pickle keeps what it does not have")?;
        self.memo.insert(u32::try_from(key).map_err(|_| "a pickle keeps too many values")?, id);
        Ok(())
    }

    fn set_items(&mut self, items: &[Id]) -> Result<(), String> {
        let (pairs, []) = items.as_chunks::<2>() else { return Err("a pickle has a key without a value".into()) };
        if let Value::Dict(dict) = self.top()? {
            dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
        }
        Ok(())
    }

    fn append(&mut self, items: Vec<Id>) -> Result<(), String> {
        if let Value::List(list) = self.top()? {
            list.extend(items);
        }
        Ok(())
    }

    /// A call: nothing is run, and what tensors and dicts are made of is kept.
    fn reduce(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let called = match &self.values[function] {
            Value::Global(module, name) => (&self.bytes[module.clone()], &self.bytes[name.clone()]),
            _ => (&b""[..], &b""[..]),
        };
        if REBUILD_PARAMETER.contains(&called) {
            let Value::List(items) = &self.values[arguments] else {
                self.push(Value::Opaque);
                return Ok(());
            };
            let data = *items.first().ok_or("a pickle makes a parameter of nothing")?;
            self.stack.push(data);
            return Ok(());
        }
        self.push(if called == REBUILD_TENSOR {
            Value::Tensor(arguments)
        } else if called == ORDERED_DICT {
            Value::Dict(Vec::new())
        } else {
            Value::Made(function)
        });
        Ok(())
    }

    fn run(&mut self) -> Result<Id, String> {
        for _ in 0..MAX_INSTRUCTIONS {
            let at = self.at;
            let instruction = self.bytes[self.take(1)?.start];
            match instruction {
                b'.' => return self.pop(),
                // The protocol, and how much of it belongs together.
                0x80 => {
                    self.take(1)?;
                }
                0x95 => {
                    self.take(8)?;
                }
                b'(' => self.marks.push(self.stack.len()),
                // The state of an object, which nobody needs, or a value that is dropped.
                b'0' | b'b' => {
                    self.pop()?;
                }
                b'1' => drop(self.pop_mark()?),
                b'2' => {
                    let id = self.pop()?;
                    self.stack.extend([id, id]);
                }
                b'N' => self.push(Value::Opaque),
                0x88 | 0x89 => self.push(Value::Int(i64::from(instruction == 0x88))),
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Opaque);
                }
                b'J' => {
                    let value = self.number(4)? as u32;
                    self.push(Value::Int(i64::from(value.cast_signed())));
                }
                b'K' => self.small_int(1)?,
                b'M' => self.small_int(2)?,
                0x8a => {
                    let range = self.counted(1)?;
                    let value = signed(&self.bytes[range]);
                    self.push(value.map_or(Value::Opaque, Value::Int));
                }
                b'X' | b'T' | b'B' => self.text(4)?,
                0x8c | b'U' | b'C' => self.text(1)?,
                0x8d | 0x8e => self.text(8)?,
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.push(Value::Global(module, name));
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let global = match (&self.values[module], &self.values[name]) {
                        (Value::Text(module), Value::Text(name)) => Value::Global(module.clone(), name.clone()),
                        _ => Value::Opaque,
                    };
                    self.push(global);
                }
                b'q' => self.number(1).and_then(|key| self.put(key))?,
                b'r' => self.number(4).and_then(|key| self.put(key))?,
                0x94 => self.put(self.memo.len() as u64)?,
                b'h' => self.number(1).and_then(|key| self.get(key))?,
                b'j' => self.number(4).and_then(|key| self.get(key))?,
                b')' | b']' => self.push(Value::List(Vec::new())),
                b'}' => self.push(Value::Dict(Vec::new())),
                0x85..=0x87 => self.pop_many(usize::from(instruction - 0x84))?,
                b't' | b'l' => {
                    let items = self.pop_mark()?;
                    self.push(Value::List(items));
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set_items(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_mark()?;
                    self.set_items(&items)?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' => {
                    let items = self.pop_mark()?;
                    self.append(items)?;
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.push(Value::Persistent(id));
                }
                b'R' => self.reduce()?,
                // An object of a class.
                0x81 => {
                    self.pop()?;
                    self.pop()?;
                    self.push(Value::Opaque);
                }
                other => return Err(format!("a pickle has instruction {other:#04x} at byte {at}, which no checkpoint needs")),
            }
        }
        Err(format!("a pickle has more than {MAX_INSTRUCTIONS} instructions"))
    }

    fn small_int(&mut self, len: usize) -> Result<(), String> {
        let value = self.number(len)?;
        self.push(Value::Int(value.cast_signed()));
        Ok(())
    }

    fn text(&mut self, len: usize) -> Result<(), String> {
        let range = self.counted(len)?;
        self.push(Value::Text(range));
        Ok(())
    }
}

/// A little-endian number in two's complement; `None` for one that is larger than sizes are.
fn signed(bytes: &[u8]) -> Option<i64> {
    if bytes.len() > 8 {
        return None;
    }
    let fill = if bytes.last().is_some_and(|byte| *byte >= 0x80) { 0xff } else { 0 };
    let mut all = [fill; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    Some(i64::from_le_bytes(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read() {
        // {"a": (1, -2, 65536), "b": [True, "a"]}, by protocol 2.
        let bytes = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01J\xfe\xff\xff\xffJ\x00\x00\x01\x00\x87q\x02X\x01\x00\x00\x00bq\x03]q\x04(\x88h\x01eu.rest";
        let pickle = Pickle::read(bytes, 0).unwrap();
        let [(a, tuple), (b, list)] = *pickle.dict(pickle.root).unwrap() else { panic!() };
        assert_eq!((pickle.text(a), pickle.text(b)), (Some("a"), Some("b")));
        let ints: Vec<_> = pickle.list(tuple).unwrap().iter().map(|id| pickle.int(*id)).collect();
        assert_eq!(ints, [Some(1), Some(-2), Some(65536)]);
        let [flag, text] = *pickle.list(list).unwrap() else { panic!() };
        assert_eq!((pickle.int(flag), pickle.text(text)), (Some(1), Some("a")));
        assert_eq!(&bytes[pickle.end..], b"rest");
    }

    #[test]
    fn a_call_runs_nothing() {
        // os.system("true"), which an unpickler would run.
        let bytes = b"cos\nsystem\n(X\x04\x00\x00\x00truetR.";
        let pickle = Pickle::read(bytes, 0).unwrap();
        let Value::Made(function) = pickle.value(pickle.root) else { panic!() };
        assert_eq!((pickle.module(*function), pickle.class(*function)), (Some("os"), Some("system")));
    }

    #[test]
    fn broken_pickles_are_errors() {
        for (bytes, why) in [
            (&b""[..], "cut off"),
            (b"X\xff\xff\xff\xffab.", "cut off"),
            (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "cut off"),
            (b"cos", "cut off in a name"),
            (b".", "takes more"),
            (b"(.", "takes more"),
            (b"N(0.", "takes more"),
            (b"h\x05.", "value 5"),
            (b"q\x00.", "keeps what"),
            (b"t.", "not begun"),
            (b"}(Nu.", "without a value"),
            (b"s.", "takes more"),
            (b"i", "0x69"),
        ] {
            let error = Pickle::read(bytes, 0).err().unwrap_or_else(|| panic!("{bytes:?} is read"));
            assert!(error.contains(why), "{bytes:?}: {error}");
        }
    }

    #[test]
    fn what_contains_itself_a_hundred_times_takes_no_room() {
        // A list twice in a list twice in a list: 2^100 in full.
        let mut bytes = b"]".to_vec();
        for _ in 0..100 {
            bytes.extend(b"2\x86");
        }
        bytes.push(b'.');
        let pickle = Pickle::read(&bytes, 0).unwrap();
        assert_eq!(pickle.values.len(), 101);
    }

    #[test]
    fn long_numbers_have_a_sign() {
        for (bytes, value) in [(&b""[..], Some(0)), (b"\xff", Some(-1)), (b"\xff\x00", Some(255)), (b"\x00\x80", Some(-32768))] {
            assert_eq!(signed(bytes), value);
        }
        assert_eq!(signed(&[0; 9]), None);
    }
}
