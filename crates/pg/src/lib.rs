//! A node's output plugin, applying, and its processes, over `crates/node` and `crates/postgres`.
#![allow(unsafe_code)]

pub mod apply;
pub mod plugin;
pub mod workers;
