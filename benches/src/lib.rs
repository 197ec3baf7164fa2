//! Programs that see the whole of Ebb.
