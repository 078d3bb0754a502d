//! PostgreSQL's interfaces, made safe: memory, errors, catalogs, pages, processes, connections.
//!
//! Knows no table, view or setting of Braid's.

pub mod catalog;
pub(crate) mod compat;
pub mod drop_command;
pub mod encoding;
pub mod error;
pub(crate) mod ffi;
pub(crate) mod heap_page;
pub(crate) mod index_end;
pub(crate) mod kept_plan;
pub mod latch;
pub mod libpq;
pub(crate) mod names;
pub mod process;
pub mod rows;
pub(crate) mod spool;
pub(crate) mod subtransaction;
pub(crate) mod table_scan;
pub mod timestamp;
pub mod wait;
pub mod worker;
pub(crate) mod xid;
