//! The processes: supervisor, manager, leaders, appliers, copy workers, collector and cleanup.
//!
//! Each module is one kind of process, or what sessions and processes do alike: `ingest`, `compare`, `orphan`.
//! Here the layers below meet: a leader reads a stream, appliers apply it, the collector decodes local WAL.
//! The crate must not know the SQL functions: `extension` calls these modules, and never the other way.
//! What decides something belongs to `bgworker`, which is pure; a process only carries it out.

#![allow(unsafe_code)]

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
