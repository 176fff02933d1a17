//! Which tokens live in which block, and who runs next.
