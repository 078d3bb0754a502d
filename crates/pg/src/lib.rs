//! The one safe layer over PostgreSQL's C interfaces. All `unsafe` of the project lives here and in `crates/ring`.
#![allow(unsafe_code)]

mod applied;
pub mod applier;
mod appliers;
pub mod apply;
pub mod catalog;
pub mod cleanup;
pub mod clock;
pub mod compare;
mod compat;
pub mod copy;
pub mod decoding;
pub mod drop_command;
mod durability;
pub mod error;
mod ffi;
mod group;
pub mod ingest;
pub mod latch;
pub mod leader;
pub mod libpq;
pub mod manager;
mod origin;
pub mod parked;
pub mod prepared;
pub mod rate_limit;
pub mod registry;
pub mod secrecy;
pub mod settings;
mod split;
pub mod subscription;
pub mod supervisor;
mod table_order;
pub mod tombstone;
pub mod wait;
pub mod wake;
pub mod worker;
