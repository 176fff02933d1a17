//! How a request is served beside others.

use std::time::Duration;

use engine::ServiceParams;
use pyo3::{prelude::*, types::PyString};

use crate::{
    arguments::{Integer, Real, named_text},
    exceptions::invalid,
};

/// The fields that all requests have.
pub struct ServiceFields<'py> {
    pub priority: i32,
    pub deadline: Option<Real>,
    pub tenant: Option<Bound<'py, PyString>>,
    pub cache_salt: Option<Bound<'py, PyString>>,
    pub public_prefix: usize,
    pub keep: bool,
}

impl ServiceFields<'_> {
    /// Checks every field.
    pub fn check(self) -> PyResult<ServiceParams> {
        Ok(ServiceParams {
            priority: self.priority,
            deadline: self.deadline.map(|Real(after)| seconds("deadline", after)).transpose()?,
            tenant: self.tenant.map(|tenant| named_text("tenant", &tenant)).transpose()?,
            cache_salt: self.cache_salt.map(|salt| named_text("cache_salt", &salt)).transpose()?,
            public_prefix: self.public_prefix,
            keep: self.keep,
            ..ServiceParams::default()
        })
    }
}

/// A priority: any 32 bits.
pub fn check_priority(priority: &Bound<'_, PyAny>) -> PyResult<i32> {
    let priority: Integer = priority.extract()?;
    priority
        .to()
        .ok_or_else(|| invalid(format!("`priority` must be an integer from {} to {}, got {priority}", i32::MIN, i32::MAX)))
}

/// Seconds above 0. More than a clock will ever show are as many as a duration holds.
pub fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    let is_long = seconds.is_finite() && seconds > 0.0;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .or(is_long.then_some(Duration::MAX))
        .filter(|duration| *duration > Duration::ZERO)
        .ok_or_else(|| invalid(format!("`{name}` must be a finite number of seconds above 0, got {seconds:?}; None is no limit")))
}
