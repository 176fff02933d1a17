//! Metadata of a GGUF file as it is written.

use std::collections::HashMap;

use crate::weights::{Metadata, MetadataValue};

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
}

const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Metadata by key, in the order in which it is written.
#[derive(Clone, Debug, Default)]
pub(super) struct Entries {
    values: Vec<(String, Value)>,
    /// Entries of another file, as they lie there.
    copied: Vec<Vec<u8>>,
}

impl Entries {
    pub fn push(&mut self, key: impl Into<String>, value: Value) {
        self.values.push((key.into(), value));
    }

    pub fn text(&mut self, key: &str, text: impl Into<String>) {
        self.push(key, Value::Text(text.into()));
    }

    /// An entry of another file.
    pub fn copy(&mut self, entry: Vec<u8>) {
        self.copied.push(entry);
    }

    pub fn len(&self) -> usize {
        self.values.len() + self.copied.len()
    }

    /// As a reader of the file sees it, but for what is copied.
    pub fn metadata(&self) -> Metadata {
        let read = |value: &Value| match value.clone() {
            Value::U32(n) => MetadataValue::Int(n.into()),
            Value::F32(x) => MetadataValue::Float(x.into()),
            Value::Bool(b) => MetadataValue::Bool(b),
            Value::Text(text) => MetadataValue::String(text),
            Value::Texts(all) => MetadataValue::Strings(all),
            Value::I32s(all) => MetadataValue::Ints(all.into_iter().map(i64::from).collect()),
            Value::F32s(all) => MetadataValue::Floats(all),
            Value::Bools(all) => MetadataValue::Bools(all),
        };
        Metadata::new(self.values.iter().map(|(key, value)| (key.clone(), read(value))).collect::<HashMap<_, _>>())
    }

    /// All of them, as they lie in a file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.copied.concat();
        for (key, value) in &self.values {
            string(&mut out, key);
            write(&mut out, value);
        }
        out
    }
}

/// Text as a GGUF file has it: its length, then its bytes.
pub(super) fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write(out: &mut Vec<u8>, value: &Value) {
    let kind = |out: &mut Vec<u8>, kind: u32| out.extend(kind.to_le_bytes());
    let array = |out: &mut Vec<u8>, element: u32, len: usize| {
        kind(out, ARRAY);
        kind(out, element);
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Value::U32(n) => {
            kind(out, U32);
            out.extend(n.to_le_bytes());
        }
        Value::F32(x) => {
            kind(out, F32);
            out.extend(x.to_le_bytes());
        }
        Value::Bool(b) => {
            kind(out, BOOL);
            out.push(u8::from(*b));
        }
        Value::Text(text) => {
            kind(out, STRING);
            string(out, text);
        }
        Value::Texts(all) => {
            array(out, STRING, all.len());
            for text in all {
                string(out, text);
            }
        }
        Value::I32s(all) => {
            array(out, I32, all.len());
            out.extend(all.iter().flat_map(|n| n.to_le_bytes()));
        }
        Value::F32s(all) => {
            array(out, F32, all.len());
            out.extend(all.iter().flat_map(|x| x.to_le_bytes()));
        }
        Value::Bools(all) => {
            array(out, BOOL, all.len());
            out.extend(all.iter().map(|flag| u8::from(*flag)));
        }
    }
}
