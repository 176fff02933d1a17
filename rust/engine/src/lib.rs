//! From files and requests to tokens.
