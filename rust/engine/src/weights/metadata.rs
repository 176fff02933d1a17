//! GGUF metadata: typed values by key.

use std::collections::HashMap;

use serde_json::{Number, Value};

/// One metadata value; integers of every width are `Int`, floats of every width `Float`.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// An integer.
    Int(i128),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// UTF-8 text; invalid bytes are replaced by U+FFFD.
    String(String),
    /// Integers.
    Ints(Vec<i64>),
    /// Floats.
    Floats(Vec<f32>),
    /// Booleans.
    Bools(Vec<bool>),
    /// Texts.
    Strings(Vec<String>),
}

impl MetadataValue {
    /// In JSON: a float that JSON has no number for is text, and of a list there is its length, as text.
    pub fn json(&self) -> Value {
        let list = |len: usize, of: &str| format!("a list of {len} {of}").into();
        match self {
            Self::Int(n) => Number::from_i128(*n).map_or_else(|| n.to_string().into(), Value::Number),
            Self::Float(x) => Number::from_f64(*x).map_or_else(|| x.to_string().into(), Value::Number),
            Self::Bool(b) => (*b).into(),
            Self::String(text) => text.as_str().into(),
            Self::Ints(all) => list(all.len(), "integers"),
            Self::Floats(all) => list(all.len(), "numbers"),
            Self::Bools(all) => list(all.len(), "booleans"),
            Self::Strings(all) => list(all.len(), "strings"),
        }
    }
}

/// Metadata of a GGUF file.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    values: HashMap<String, MetadataValue>,
}

impl Metadata {
    /// From its entries.
    pub fn new(values: HashMap<String, MetadataValue>) -> Self {
        Self { values }
    }

    /// A value by key.
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.values.get(key)
    }

    /// All values by key, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &MetadataValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Text by key; `None` when absent or of another type.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            MetadataValue::String(s) => Some(s),
            _ => None,
        }
    }

    /// A non-negative integer that fits.
    pub fn usize(&self, key: &str) -> Option<usize> {
        match self.get(key)? {
            MetadataValue::Int(i) => usize::try_from(*i).ok(),
            _ => None,
        }
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            MetadataValue::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// A list of texts.
    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            MetadataValue::Strings(s) => Some(s),
            _ => None,
        }
    }

    /// A list of floats.
    pub fn floats(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            MetadataValue::Floats(f) => Some(f),
            _ => None,
        }
    }

    /// A list of integers.
    pub fn ints(&self, key: &str) -> Option<&[i64]> {
        match self.get(key)? {
            MetadataValue::Ints(i) => Some(i),
            _ => None,
        }
    }
}
