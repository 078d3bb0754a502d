//! The one safe layer over PostgreSQL's C interfaces. All `unsafe` of the project lives here and in `crates/ring`.
#![allow(unsafe_code)]

mod compat;
pub mod decoding;
mod ffi;
