//! The one safe layer over PostgreSQL's C interfaces. All `unsafe` of the project lives here and in `crates/ring`.
#![allow(unsafe_code)]

pub mod apply;
pub mod catalog;
mod compat;
pub mod drop_command;
pub mod error;
mod ffi;
pub mod latch;
pub mod libpq;
pub mod registry;
pub mod secrecy;
pub mod settings;
pub mod subscription;
pub mod wake;
pub mod worker;
