//! The shared memory between a subscription's leader and its appliers.
//!
//! One producer (the leader) writes the bytes of frames once; consumers (the appliers) read them in
//! place. A transaction is a run of frames and has a descriptor. Sequence numbers count
//! transactions from 1 in the provider's commit order.
//!
//! Four counters say where everything is; each only grows, and each has its movers:
//!
//! | counter | meaning | moved by |
//! |---|---|---|
//! | `published` | transactions that appliers may take | the leader |
//! | `claimed` | transactions that some applier has taken | any applier, by compare-and-swap |
//! | `committed` | transactions that are committed here, with all before them | the applier whose turn it is |
//! | `tail` | bytes that are no longer needed | the applier whose turn it is |
//!
//! Where commits may overtake each other there are no turns: each commit is marked in its
//! descriptor, and whoever marks moves `committed` over all marked ones that follow it
//! (`Counters::complete`). So `committed` is the low-water mark there. And whoever has taken a
//! transaction that can't be applied yet puts it aside (`aside.rs`): then it is nobody's until what
//! it depends on is committed.
//!
//! A descriptor belongs to the leader until it is published, then to the applier that claimed it
//! until it is committed; only then does the leader use it again. `end` of an open transaction (one
//! that is larger than the ring can hold) grows while the applier already reads; such a transaction
//! is applied alone, and its bytes are released as they are read.
//!
//! Not for: sleeping and setting latches. Who waits for what is shown here, and whom a step is to
//! wake; latches are PostgreSQL's and live in `crates/postgres`.
//!
//! Nothing here trusts a consumer to be alive: a process that dies with shared memory attached
//! makes PostgreSQL restart all of them, and the ring with them.
#![allow(unsafe_code)]

mod aside;
#[cfg(not(loom))]
mod consumer;
#[cfg(not(loom))]
mod failure;
#[cfg(not(loom))]
mod frame;
#[cfg(not(loom))]
mod layout;
#[cfg(not(loom))]
mod producer;
#[cfg(not(loom))]
mod ring;
mod sync;
#[cfg(not(loom))]
mod taking;
mod wake;

pub use aside::EDGES;
#[cfg(loom)]
pub use aside::{Aside, Places, close, list_of};
#[cfg(not(loom))]
pub use consumer::{FrameRead, Transaction};
#[cfg(not(loom))]
pub use failure::{Failure, FailureReport, with_last_line};
#[cfg(not(loom))]
pub use layout::{ApplierSlot, ApplierState, Descriptor, Geometry};
#[cfg(not(loom))]
pub use producer::{Complete, Leader};
#[cfg(not(loom))]
pub use ring::{Error, Grain, Ring, Run};
#[cfg(loom)]
pub use wake::{ApplierWait, Counters, LeaderWait};
pub use wake::{Awaited, MAX_APPLIERS, Wakes};
