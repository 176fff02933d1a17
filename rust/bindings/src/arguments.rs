//! Checks of single arguments; every error names the argument and the value.

use std::fmt;

use pyo3::{
    IntoPyObjectExt,
    exceptions::{PyOverflowError, PyTypeError, PyUnicodeEncodeError},
    prelude::*,
    types::{PyBytes, PyDict, PyFrozenSet, PySet, PyString},
};

use crate::{
    exceptions::{InvalidArgumentError, invalid, not_yet},
    which::OneOrMany,
};

/// An integer as Python has it, of any size: what does not fit is refused by name, not by an `OverflowError` that names nothing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Integer {
    /// One that any range here could hold.
    Near(i128),
    /// One beyond every range, as text.
    Far(String),
}

impl Integer {
    /// The value as a `T`, when it is one.
    pub fn to<T: TryFrom<i128>>(&self) -> Option<T> {
        match self {
            Self::Near(value) => T::try_from(*value).ok(),
            Self::Far(_) => None,
        }
    }
}

impl fmt::Display for Integer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Near(value) => value.fmt(f),
            Self::Far(text) => f.write_str(&shorten(text)),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Integer {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(value) = object.extract::<i64>() {
            return Ok(Self::Near(value.into()));
        }
        match object.extract::<i128>() {
            Ok(value) => Ok(Self::Near(value)),
            // Python itself refuses to write out very long integers.
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                let text = object.str().map(|text| text.to_string());
                Ok(Self::Far(text.unwrap_or_else(|_| "an integer of thousands of digits".to_owned())))
            }
            Err(error) => Err(error),
        }
    }
}

impl<'py> IntoPyObject<'py> for &Integer {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        match self {
            Integer::Near(value) => value.into_bound_py_any(py),
            Integer::Far(text) => text.into_bound_py_any(py),
        }
    }
}

/// A count of at least `min`, at most half of what a count holds, so that two of them can be added.
pub fn at_least(name: &str, value: &Integer, min: usize) -> PyResult<usize> {
    within(name, value, min, isize::MAX.unsigned_abs())
}

/// A count of at least `min` that may be left out.
pub fn at_least_if_given(name: &str, value: Option<&Integer>, min: usize) -> PyResult<Option<usize>> {
    value.map(|value| at_least(name, value, min)).transpose()
}

/// A count from `min` to `max`.
pub fn within(name: &str, value: &Integer, min: usize, max: usize) -> PyResult<usize> {
    value
        .to::<usize>()
        .filter(|count| (min..=max).contains(count))
        .ok_or_else(|| invalid(format!("`{name}` must be an integer from {min} to {max}, got {value}")))
}

/// A seed: any 64 bits.
pub fn check_seed(seed: Option<&Integer>) -> PyResult<Option<u64>> {
    seed.map(|seed| seed.to().ok_or_else(|| invalid(format!("`seed` must be an integer from 0 to {}, got {seed}", u64::MAX))))
        .transpose()
}

/// A number; an integer too large for a float is infinite, which no argument takes and whose check names it.
#[derive(Clone, Copy, Debug, IntoPyObject, IntoPyObjectRef)]
#[pyo3(transparent)]
pub struct Real(pub f64);

impl Real {
    /// In single precision.
    pub fn single(self) -> f32 {
        self.0 as f32
    }
}

impl<'py> FromPyObject<'_, 'py> for Real {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<f64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { f64::NEG_INFINITY } else { f64::INFINITY }))
            }
            number => number.map(Self),
        }
    }
}

/// A text; one with a lone surrogate, which no encoding has, is refused as what it is.
#[derive(Clone, Debug, IntoPyObject, IntoPyObjectRef)]
#[pyo3(transparent)]
pub struct Text(pub String);

impl<'py> FromPyObject<'_, 'py> for Text {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract().map(Self).map_err(|error| {
            if error.is_instance_of::<PyUnicodeEncodeError>(object.py()) {
                return invalid(format!(
                    "{} is not Unicode text: it has a lone surrogate ({error}); decode bytes with errors='replace'",
                    object.repr().map_or_else(|_| "the text".to_owned(), |shown| shorten(&shown.to_string_lossy()))
                ));
            }
            error
        })
    }
}

/// A text that is refused by the argument's name.
pub fn named_text(name: &str, text: &Bound<'_, PyString>) -> PyResult<String> {
    text.extract().map(|Text(text)| text).map_err(|error| invalid(format!("`{name}`: {}", error.value(text.py()))))
}

/// An argument that is a text or has texts: a lone surrogate in it is refused by the argument's name.
pub fn named<'a, 'py, T: FromPyObject<'a, 'py>>(name: &str, value: &'a Bound<'py, PyAny>) -> PyResult<T> {
    let py = value.py();
    value.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        if error.is_instance_of::<PyUnicodeEncodeError>(py) {
            // In the words of all texts.
            return value
                .extract()
                .map_or_else(|error: PyErr| invalid(format!("`{name}`: {}", error.value(py))), |Text(_)| error);
        }
        let is_unnamed = error.is_instance_of::<InvalidArgumentError>(py) && !error.value(py).to_string().starts_with('`');
        if is_unnamed { invalid(format!("`{name}`: {}", error.value(py))) } else { error }
    })
}

/// [`named`] as `from_py_with` takes it, one for each argument.
macro_rules! texts {
    ($($name:ident)+) => {$(
        pub fn $name<'a, 'py, T: FromPyObject<'a, 'py>>(value: &'a Bound<'py, PyAny>) -> PyResult<T> {
            named(stringify!($name), value)
        }
    )+};
}

/// Arguments that are texts or have some.
#[allow(missing_docs)]
pub mod text {
    use pyo3::prelude::*;

    use super::named;

    texts! {
        allowed_media_domains attention_backend chat_template cpu_tier device dry_sequence_breakers dtype grammar_type in_situ_quant
        jinja_explicit model
        model_id reasoning_effort stop_seqs token_source
    }
}

/// The same for a field of an enum, which is a type of its own.
macro_rules! fields {
    ($($type:ident($inner:ty) = $name:literal),+) => {$(
        #[doc = concat!("`", $name, "`.")]
        #[derive(Clone, Debug, IntoPyObject, IntoPyObjectRef)]
        #[pyo3(transparent)]
        pub struct $type(pub $inner);

        impl<'py> FromPyObject<'_, 'py> for $type {
            type Error = PyErr;

            fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
                named($name, &object).map(Self)
            }
        }
    )+};
}

fields! {
    HfCachePath(Text) = "hf_cache_path",
    ImatrixPath(Text) = "imatrix",
    MmprojFilename(Text) = "mmproj_filename",
    CalibrationFile(Text) = "calibration_file",
    ModelId(Text) = "model_id",
    QuantizedFilename(OneOrMany) = "quantized_filename",
    QuantizedModelId(Text) = "quantized_model_id",
    TokModelId(Text) = "tok_model_id",
    TokenizerJson(Text) = "tokenizer_json"
}

/// The same for counts, which are 1 or more.
macro_rules! counts {
    ($($type:ident = $name:literal),+) => {$(
        #[doc = concat!("`", $name, "`.")]
        #[derive(Clone, Copy, Debug, IntoPyObject, IntoPyObjectRef)]
        #[pyo3(transparent)]
        pub struct $type(pub usize);

        impl<'py> FromPyObject<'_, 'py> for $type {
            type Error = PyErr;

            fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
                at_least($name, &object.extract()?, 1).map(Self)
            }
        }
    )+};
}

counts! {
    EncoderCacheBytes = "encoder_cache_memory_bytes",
    Gqa = "gqa",
    MaxEdge = "max_edge"
}

/// The first characters of a long text.
pub fn shorten(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Refuses the first that was given of arguments of the mirrored interface that do not work yet.
pub fn refuse(arguments: &[(&str, bool)]) -> PyResult<()> {
    match arguments.iter().find(|(_, given)| *given) {
        Some((name, _)) => Err(not_yet(&format!("`{name}`"), "leave it out")),
        None => Ok(()),
    }
}

/// Token ids from a list, a tuple, a numpy array or anything else that yields integers.
pub fn token_ids(name: &str, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let is_set = ids.is_instance_of::<PySet>() || ids.is_instance_of::<PyFrozenSet>();
    if ids.is_instance_of::<PyBytes>() || ids.is_instance_of::<PyDict>() || is_set {
        let why = if is_set { ", which has no order" } else { "" };
        return Err(PyTypeError::new_err(format!("`{name}` must be token ids (integers), not {}{why}", ids.get_type().name()?)));
    }
    ids.try_iter()?.map(|id| token_id(name, &id?.extract()?)).collect()
}

/// One token id of an argument; whether the model has it, the engine knows.
pub fn token_id(name: &str, id: &Integer) -> PyResult<u32> {
    id.to().ok_or_else(|| invalid(format!("`{name}` has a token id out of range: {id}; ids are integers from 0 to {}", u32::MAX)))
}
