//! Routing: which nodes of a group have a row. Run in the session that calls the functions.

mod shard;
