//! Tests of the module of that name.
