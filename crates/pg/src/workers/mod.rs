//! The processes: supervisor, manager, leader, appliers, copy and fetch workers, collector, cleanup.
//!
//! Knows nothing of the SQL functions.

pub mod applier;
pub(crate) mod appliers;
pub mod away;
pub mod cleanup;
pub mod collector;
pub mod compare;
pub mod copy;
pub(crate) mod durability;
pub mod ingest;
pub(crate) mod keep_commits;
pub mod leader;
pub mod manager;
pub mod orphan;
pub mod supervisor;
pub mod upgrade;
