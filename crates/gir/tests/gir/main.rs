//! The codec's interface. `GIR_SEED=n` repeats a run of the randomized tests; each prints its seed.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "test code"
)]

mod frozen_bytes;
mod json;
mod model;
mod mutation;
mod order;
mod published;
mod rejection;
mod rendering;
mod round_trip;
mod statement;
mod text;
mod uncommitted;
