//! A node's processes, over `crates/plugin`, `crates/apply`, `crates/node` and `crates/postgres`.
#![allow(unsafe_code)]

pub mod workers;
