//! What the background workers decide: what depends on what, who wins a conflict, what to do about an error.
//!
//! Pure Rust: `crates/pg` carries the decisions out.
#![forbid(unsafe_code)]
