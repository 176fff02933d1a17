//! Reads the keys of a request one by one, so that each error names its key and no key is ignored.

use engine::EngineError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::ApiError;

/// Nesting of arrays and objects in a body at most.
const MAX_DEPTH: usize = 64;

/// What is done with a key that a request may have and that decides nothing.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// These values say what is so anyway; others are refused, with the advice.
    True(fn(&Value) -> bool, &'static str),
    /// A label or a hint: any value.
    Label,
    /// Known, and refused with the advice.
    Refused(&'static str),
}

/// The keys of a request that were not read yet.
#[derive(Debug)]
pub struct Fields {
    rest: Map<String, Value>,
    /// Keys that were asked for.
    known: Vec<&'static str>,
}

impl Fields {
    /// Of a body. Keys with `null` count as absent, as clients send it.
    pub fn of(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid("invalid_json", None, format!("the body is not valid JSON: {error}")))?;
        if depth(&value) > MAX_DEPTH {
            let message = format!("the body is nested deeper than {MAX_DEPTH} levels");
            return Err(ApiError::invalid("invalid_json", None, message));
        }
        let Value::Object(mut rest) = value else {
            return Err(ApiError::invalid("invalid_json", None, "the body must be a JSON object"));
        };
        rest.retain(|_, value| !value.is_null());
        Ok(Self { rest, known: Vec::new() })
    }

    /// The value of a key; `None` when it is absent.
    pub fn take<T: DeserializeOwned>(&mut self, key: &'static str) -> Result<Option<T>, ApiError> {
        self.known.push(key);
        let Some(mut value) = self.rest.shift_remove(key) else { return Ok(None) };
        without_fractions(&mut value);
        serde_path_to_error::deserialize(value).map(Some).map_err(|error| {
            let path = error.path().to_string();
            let param = match path.as_str() {
                "." => key.to_owned(),
                path if path.starts_with('[') => format!("{key}{path}"),
                path => format!("{key}.{path}"),
            };
            ApiError::value(param, format!("is not what it must be: {}", error.inner()))
        })
    }

    /// Applies the rules of a table to the keys that nobody asked for, and refuses those that are in no table.
    pub fn finish(mut self, rules: &[(&'static str, Rule)]) -> Result<(), ApiError> {
        for (key, rule) in rules {
            let Some(value) = self.rest.shift_remove(*key) else { continue };
            match rule {
                Rule::Label => {}
                Rule::True(holds, _) if holds(&value) => {}
                Rule::True(_, advice) | Rule::Refused(advice) => return Err(ApiError::unsupported(*key, advice)),
            }
        }
        let Some((key, _)) = self.rest.into_iter().next() else { return Ok(()) };
        let known = self.known.iter().copied().chain(rules.iter().map(|(key, _)| *key));
        let nearest = known.map(|name| (strsim::jaro_winkler(name, &key), name)).max_by(|a, b| a.0.total_cmp(&b.0));
        let shown: String = key.chars().take(64).collect();
        let advice = match nearest {
            Some((likeness, name)) if likeness > 0.8 => format!(". Did you mean `{name}`?"),
            _ => String::new(),
        };
        let message = format!("Unrecognized request argument supplied: {shown}{advice}");
        Err(ApiError::invalid("unknown_parameter", shown, message))
    }
}

/// An integer is one however it is written: 16.0 is 16. Objects are left as they came.
pub fn without_fractions(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let whole = number.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < (1_u64 << 53) as f64);
            if let Some(whole) = whole {
                *value = Value::from(whole as i64);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(without_fractions),
        _ => {}
    }
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Names a field of the request in an error that the engine found.
pub fn of_request(error: EngineError) -> ApiError {
    let mut error = ApiError::from(error);
    if error.code == "invalid_value" && error.param.is_none() {
        let first = error.message.split([' ', '`']).find(|word| !word.is_empty()).unwrap_or_default();
        let is_name = first.len() > 1 && first.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') && first.contains('_');
        if is_name || matches!(first, "temperature" | "seed" | "prompt" | "stop" | "dimensions" | "input") {
            error.param = Some(first.to_owned());
        }
    }
    error
}

/// A request's keys as a struct: each is optional, and its documentation is the parameter's.
macro_rules! fields {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$about:meta])* $field:ident: $type:ty,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, schemars::JsonSchema)]
        $vis struct $name { $($(#[$about])* pub $field: Option<$type>,)+ }

        impl $name {
            /// Takes its keys from a request's.
            pub fn take(fields: &mut $crate::fields::Fields) -> Result<Self, $crate::ApiError> {
                Ok(Self { $($field: fields.take(stringify!($field))?,)+ })
            }
        }
    };
}
pub(crate) use fields;
