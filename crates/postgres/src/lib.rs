//! The safe layer over PostgreSQL's C interfaces: memory, errors, catalogs, pages, processes and connections.
//!
//! Callers above use these modules instead of the bindings. Every process with the library runs this code.
//! The crate must not know a table, a view or a setting of Braid's, nor who replicates what to whom.
//! Differences between major versions are in `compat`, and functions that the bindings lack in `ffi`.

#![allow(unsafe_code)]

pub mod catalog;
pub mod compat;
pub mod drop_command;
pub mod encoding;
pub mod error;
pub mod ffi;
pub mod heap_page;
pub mod index_end;
pub mod kept_plan;
pub mod latch;
pub mod libpq;
pub mod names;
pub mod process;
pub mod rows;
pub mod spool;
pub mod subtransaction;
pub mod table_scan;
pub mod timestamp;
pub mod wait;
pub mod worker;
pub mod xid;
