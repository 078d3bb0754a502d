//! Applying, and a node's processes, over `crates/plugin`, `crates/node` and `crates/postgres`.
#![allow(unsafe_code)]

pub mod apply;
pub mod workers;
