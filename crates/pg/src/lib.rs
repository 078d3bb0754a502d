//! A node's state, its output plugin, applying, and its processes, over `crates/postgres`.
#![allow(unsafe_code)]

pub mod apply;
pub mod node;
pub mod plugin;
pub mod workers;
