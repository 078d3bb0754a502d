//! The processes: supervisor, manager, leaders, appliers, copy workers, collector, cleanup and
//! others.
//!
//! Each module is one kind of process, or work that sessions and processes share: `as_owner`,
//! `ingest`, `compare`, `orphan`. This crate connects the layers below: a leader reads a stream,
//! appliers apply it, the collector decodes local WAL. The crate must not know the SQL functions:
//! `extension` calls these modules, and never the other way. Decisions belong to `bgworker`, which
//! is pure; a process only carries them out.

#![forbid(unsafe_code)]

pub mod applier;
pub(crate) mod appliers;
pub(crate) mod as_owner;
pub mod away;
pub mod cleanup;
pub mod collector;
pub mod compare;
pub mod copy;
pub(crate) mod durability;
pub mod group;
pub mod ingest;
pub mod intent;
pub(crate) mod keep_commits;
pub mod leader;
pub mod manager;
pub mod orphan;
pub mod own_values;
pub(crate) mod purge;
pub mod supervisor;
pub mod upgrade;
pub mod versions;

use braid_postgres::{lock, worker};
use pgrx::pg_sys;

/// Connects a worker that may run while nothing is replicated to the database whose OID is its
/// argument. Returns that OID.
fn connect(argument: pg_sys::Datum) -> u32 {
    let database = u32::try_from(argument.value()).unwrap_or(0);
    worker::connect(database);
    // DROP EXTENSION may come at any time.
    lock::extension_first(c"braid");
    database
}
