//! What the output plugin emits: which change passes, how a row is identified, which keys order it.
//!
//! Pure Rust, run by the walsender on the provider through the ports that `crates/pg` implements.
#![forbid(unsafe_code)]
