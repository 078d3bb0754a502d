//! The one safe layer over PostgreSQL's C interfaces. All `unsafe` of the project lives here and in `crates/ring`.
#![allow(unsafe_code)]

pub mod apply;
pub mod node;
pub mod plugin;
pub mod postgres;
pub mod workers;
