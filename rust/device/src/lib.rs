//! How a step runs.
