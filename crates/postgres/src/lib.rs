//! The safe layer over PostgreSQL's C interfaces: memory, errors, catalogs, pages, processes and
//! connections.
//!
//! Callers above use these modules instead of the bindings. Every process with the library runs
//! this code. The crate must not know a table, a view or a setting of Braid's, nor the nodes and
//! their replication. Differences between major versions are in `compat`, and functions that the
//! bindings lack in `ffi`.

#![allow(unsafe_code)]

pub mod access_check;
pub mod acting_role;
pub mod bytewise;
pub mod catalog;
pub mod catalog_scan;
pub mod check_constraint;
pub mod compat;
pub mod composite;
pub mod conflict_target;
pub mod copy_from;
pub mod declared_tables;
pub mod decoding;
pub mod drop_command;
pub mod encoding;
pub mod error;
pub mod ffi;
pub mod function_call;
pub mod heap_page;
pub mod held_slot;
pub mod hook;
pub mod index_end;
pub mod jsonb;
pub mod kept_plan;
pub mod latch;
pub mod layout;
pub mod libpq;
pub mod lock;
pub mod memory;
pub mod message_queue;
pub mod names;
mod owned;
pub mod parse_tree;
pub mod partition_planning;
pub mod plain;
mod pointee;
pub mod process;
pub mod relation;
pub mod role_statement;
pub mod rows;
pub mod scan_key;
pub mod schema_statement;
pub mod sequential_scan;
pub mod server;
pub mod session_origin;
pub mod setting;
pub mod slot;
pub mod slot_decoder;
pub mod snapshot;
pub mod spool;
pub mod subtransaction;
pub mod syscache;
pub mod table_expression;
pub mod table_rights;
pub mod table_scan;
pub mod target;
pub mod temporary_file;
pub mod text_setting;
pub mod timestamp;
pub mod top_level;
pub mod touched_tables;
pub mod transaction;
pub mod tuple_desc;
pub mod two_phase;
pub mod type_cache;
pub mod type_function;
pub mod value;
pub mod wait;
pub mod wal;
pub mod worker;
pub mod xid;
