//! Every way the crate says no.

use paged::{InvalidSchedulerConfig, UpdateError};

/// Why a simulation cannot be run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// A value of the trace.
    #[error("trace row {row}: `{field}` is {value}: {requirement}")]
    Trace {
        /// Index of the request, from 0.
        row: usize,
        /// The column.
        field: &'static str,
        /// What stands there.
        value: f64,
        /// What would work.
        requirement: String,
    },
    /// A column of the trace that is shorter or longer than the others.
    #[error("the trace's `{field}` has {len} values and `arrival` has {expected}: give one a request")]
    ColumnLength {
        /// The column.
        field: &'static str,
        /// Its length.
        len: usize,
        /// What it must be.
        expected: usize,
    },
    /// A setting.
    #[error("`{field}` is {value}: {requirement}")]
    Setting {
        /// Its name.
        field: &'static str,
        /// What it was set to.
        value: String,
        /// What would work.
        requirement: String,
    },
    /// A setting that the scheduler refuses.
    #[error(transparent)]
    Scheduler(#[from] InvalidSchedulerConfig),
    /// The scheduler found requests and neither ran, ended nor preempted one. Always a defect.
    #[error("the scheduler has {num_running} running and {num_waiting} waiting requests and lets none of them go on")]
    Stuck {
        /// Requests in the batch.
        num_running: usize,
        /// Requests that wait.
        num_waiting: usize,
    },
    /// The scheduler refused a step's result. Always a defect.
    #[error("the scheduler refused the result of a step: {0}")]
    Update(#[from] UpdateError),
}

impl SimulationError {
    pub(crate) fn setting(field: &'static str, value: &dyn ToString, requirement: impl Into<String>) -> Self {
        Self::Setting { field, value: value.to_string(), requirement: requirement.into() }
    }
}
