//! What belongs to the process that made it.

use std::process;

use pyo3::prelude::*;

use crate::{detach::Inside, exceptions::InternalError};

/// A value that lives on threads, of which a forked child has none: there it would wait for ever, so it is refused, and not
/// dropped.
pub struct OwnProcess<T: Send> {
    /// There until the drop.
    value: Option<T>,
    pid: u32,
}

impl<T: Send> OwnProcess<T> {
    /// Belongs to this process.
    pub fn new(value: T) -> Self {
        Self { value: Some(value), pid: process::id() }
    }

    /// The value; an error in another process.
    pub fn get(&self) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.pid == process::id() => Ok(value),
            _ => Err(InternalError::new_err(format!(
                "the runner was made in process {}, and process {} was forked from it without the engine's threads; make a runner in \
                 each process, or start processes with the method \"spawn\"",
                self.pid,
                process::id()
            ))),
        }
    }
}

impl<T: Send> Drop for OwnProcess<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        if self.pid == process::id() {
            // The last handle of an engine waits for its tier to be written: without the interpreter, unless that is ending.
            Python::try_attach(|py| match Inside::try_new() {
                Some(_inside) => py.detach(|| drop(value)),
                None => drop(value),
            });
        } else {
            std::mem::forget(value);
        }
    }
}
