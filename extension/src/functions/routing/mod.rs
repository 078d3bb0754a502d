//! Routing: which nodes of a group have a row. Run in the session that calls the functions.

mod check;
mod shard;

use braid_node::routing_guard;
use pgrx::{pg_extern, pg_sys};

/// braid.is_routed(relation oid) returns boolean
#[pg_extern(sql = false)]
fn is_routed(relation: pg_sys::Oid) -> bool {
    routing_guard::is_routed(relation)
}
