//! The ring in one process, over a piece of the heap.
#![cfg(not(loom))]
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::too_many_lines,
    reason = "test code, over raw memory"
)]

mod aside;
mod failure;
mod memory;
mod segment;
mod stress;
mod transactions;
