//! Weight formats: their block layouts and exact dequantisation.
