//! PURE. The model table, ownership trees, a node's view of a file, the race checker and the explorer.
