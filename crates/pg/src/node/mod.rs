//! The node: its settings, its tables, and what its processes share.
//!
//! Knows neither streams nor the processes that serve them.

pub(crate) mod applied;
pub(crate) mod catalog_key;
pub mod clock;
pub(crate) mod column_write;
pub mod connection_string;
pub mod crash;
pub(crate) mod group;
pub mod kept_commit;
pub mod local_version;
pub(crate) mod origin;
pub mod owners;
pub mod parked;
pub mod prepared;
pub mod rate_limit;
pub mod readers;
pub mod registry;
pub mod secrecy;
pub mod settings;
pub(crate) mod split;
pub mod standing;
pub mod subscription;
pub(crate) mod table_order;
pub mod taken_row;
pub mod tombstone;
pub mod wake;
