//! Tests of the checker: seeded anomalies, simulated stores, every order of small histories.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "test code"
)]

mod anomalies;
mod format;
mod mutations;
mod orders;
mod store;
mod stores;
