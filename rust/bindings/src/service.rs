//! How a request is served beside others.

use std::time::Duration;

use engine::ServiceParams;
use pyo3::prelude::*;

use crate::{
    arguments::{Integer, Real, Text},
    exceptions::invalid,
};

/// The fields that all requests have.
pub struct ServiceFields {
    pub priority: i32,
    pub deadline: Option<Real>,
    pub tenant: Option<Text>,
    pub cache_salt: Option<Text>,
    pub public_prefix: usize,
    pub keep: bool,
}

impl ServiceFields {
    /// Checks every field.
    pub fn check(self) -> PyResult<ServiceParams> {
        Ok(ServiceParams {
            priority: self.priority,
            deadline: self.deadline.map(|Real(after)| seconds("deadline", after)).transpose()?,
            tenant: self.tenant.map(|Text(tenant)| tenant),
            cache_salt: self.cache_salt.map(|Text(salt)| salt),
            public_prefix: self.public_prefix,
            keep: self.keep,
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

/// Seconds above 0.
pub fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| *duration > Duration::ZERO)
        .ok_or_else(|| invalid(format!("`{name}` must be a finite number of seconds above 0, got {seconds:?}; None is no limit")))
}
