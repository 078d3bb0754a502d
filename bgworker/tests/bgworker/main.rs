//! The decisions of the background workers against models. Randomized tests print their seed;
//! `BRAID_TEST_SEED=n` repeats a run.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "test code"
)]

mod aggregate;
mod applied;
mod breadth;
mod busy_time;
mod column_rule;
mod commit_block;
mod consolidate;
mod convergence;
mod keyless;
mod merge;
mod parked;
mod progress;
mod random;
mod running;
mod scaling;
mod schedule;
mod skew;
mod split;
mod unique;
