//! Routing: which nodes of a group have a row. Run in the session that calls the functions.
//!
//! | file | functions |
//! |---|---|
//! | `balancer.rs` | that have hot tenants spread |
//! | `check.rs` | whether a table can be routed |
//! | `guard.rs` | that are called for each row |
//! | `look.rs` | that say where rows are, and the rows of views |
//! | `members.rs` | that each member carries out |
//! | `moves.rs` | that move shards |
//! | `shard.rs` | the shard of a row, by numbers alone |
//! | `table.rs` | that route a table, and add rules |
//! | `umbrella.rs` | that show a table's rows of all nodes under one name |
//! | `umbrella_member.rs` | that each member carries out for that |

mod balancer;
mod check;
mod guard;
mod look;
mod members;
mod moves;
mod shard;
mod table;
mod umbrella;
mod umbrella_member;

use braid_node::routing_guard;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};

/// braid.is_routed(relation oid) returns boolean
#[pg_extern(sql = false)]
fn is_routed(relation: pg_sys::Oid) -> bool {
    routing_guard::is_routed(relation)
}

/// Refuses a routed table for work that takes the rows of two nodes for the same.
pub fn check_whole(relation: pg_sys::Oid, work: &str, shown: &str) -> Outcome<()> {
    if !routing_guard::is_routed(relation) {
        return Ok(());
    }
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("cannot {work} table {shown}, which is routed"),
    )
    .detail("Each node has other rows of a routed table.")
    .hint("Call braid.unroute_table for the table first."))
}
