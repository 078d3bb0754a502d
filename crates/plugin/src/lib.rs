//! The output plugin `braid`: carries out the decisions of `decoder` with PostgreSQL's interfaces.
//!
//! The crate must not know how changes are applied, nor the processes: it reads what a node knows,
//! decodes, and sends. The collector decodes with a format of its own, which it hands in.
//!
//! Runs in a walsender, or in the backend that calls `pg_logical_slot_get_binary_changes`, inside
//! of callbacks of logical decoding: catalogs are read under the historic snapshot of the change,
//! nothing may be written, no lock is taken.
//!
//! A change costs no catalog look-up and, for the common types, no call into PostgreSQL and no
//! allocation: the relation's shape, its columns' encoders, its keys and its filters are compiled
//! once (`relation`) and kept until an invalidation (`invalidation`) says that they may differ; the
//! tuple is taken apart once (`tuple`) and written straight into the frame (`column`).
//!
//! A stream is in one of several formats: `callbacks` has the callbacks, `format` the port behind
//! them, `stream` the format `gir`, `wal2json` the one of that name (`json_table` compiles a
//! relation for it, `json_value` writes values). A process may have a format of its own, which
//! cannot be asked for (`format::set_format`): the collector has.
//!
//! Transactions in progress and prepared ones are more callbacks in `callbacks` over the same
//! [`braid_decoder::Outbox`], which does not know where a transaction's changes come from.
//! `version` finds the version of one of this node's.

#![allow(unsafe_code)]

mod arguments;
mod bulk;
mod callbacks;
mod column;
mod delivery;
mod displacement;
mod fetch;
mod format;
mod gir_json;
mod held;
mod invalidation;
mod json_table;
mod json_value;
mod key;
mod marks;
mod message_file;
mod node;
mod origin_names;
mod outgoing;
mod own_table;
mod paced;
mod page_read;
mod publications;
mod relation;
mod relation_cache;
mod relations;
mod replaced;
mod report;
mod routed;
mod row_change;
mod row_filter;
mod row_slot;
mod rows;
mod running;
mod scratch;
mod session;
mod stream;
mod tally;
mod transaction;
mod tuple;
mod turn;
mod type_facts;
mod unfound;
mod version;
mod wal2json;

pub use callbacks::install;
pub use fetch::worker_main as fetch_worker_main;
pub use format::{Change, Format, LogicalMessage, Truncation, set_format};
pub use version::of as version_of;
