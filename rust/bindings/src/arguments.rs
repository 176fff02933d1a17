//! Checks of single arguments; every error names the argument and the value.

use pyo3::prelude::*;

use crate::exceptions::{invalid, not_yet};

/// A count of at least `min`.
pub fn at_least(name: &str, value: i64, min: i64) -> PyResult<usize> {
    if value < min {
        return Err(invalid(format!("`{name}` must be at least {min}, got {value}")));
    }
    usize::try_from(value).map_err(|_| invalid(format!("`{name}` is too large: {value}")))
}

/// Arguments of the mirrored interface that do not work yet, with what works instead.
pub struct Unsupported<'a> {
    /// The argument.
    pub name: &'a str,
    /// Whether the caller gave it.
    pub given: bool,
    /// What works.
    pub instead: &'a str,
}

/// Refuses the first that was given.
pub fn refuse(arguments: &[Unsupported<'_>]) -> PyResult<()> {
    match arguments.iter().find(|argument| argument.given) {
        Some(argument) => Err(not_yet(&format!("`{}`", argument.name), argument.instead)),
        None => Ok(()),
    }
}

/// Token ids from a list, a tuple, a numpy array or anything else that yields integers.
pub fn token_ids(name: &str, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    ids.try_iter()?
        .map(|id| {
            let id: i64 = id?.extract()?;
            u32::try_from(id).map_err(|_| invalid(format!("`{name}` has a token id out of range: {id}")))
        })
        .collect()
}
