//! The node: its settings, its tables, the memory that its processes share, and the versions of its
//! rows.
//!
//! Every process with the library reads it; the postmaster lays out the shared parts at server
//! start. Functions of this crate read and write the catalog and shared memory in the transaction
//! of their caller. The crate must not know a stream, a format or how rows are applied, nor the
//! processes: it starts none, waits for none, and holds the state that they share.

#![allow(unsafe_code)]

pub mod applied;
mod catalog_key;
pub mod clock;
pub mod column_write;
pub mod connection_string;
pub mod crash;
pub mod ddl;
pub mod group;
pub mod kept_commit;
pub mod left_origin;
pub mod local_version;
mod mail;
pub mod mailbox;
pub mod origin;
pub mod owners;
pub mod parked;
pub mod prepared;
pub mod published;
pub mod rate_limit;
pub mod read_only;
pub mod readers;
pub mod registry;
pub mod rewrite;
pub mod routing;
pub mod routing_guard;
pub mod routing_key;
pub mod secrecy;
pub mod sequence;
pub mod settings;
pub mod snowflake;
pub mod split;
pub mod standing;
pub mod subscription;
pub mod table_order;
pub mod taken_row;
pub mod tenant_load;
pub mod tombstone;
pub mod umbrella;
pub mod versions;
pub mod wake;
pub mod watch;
