//! Weights as they lie in files; names are translated here and only here.

pub mod metadata;
