//! The shared memory between a subscription's leader and its appliers.
//!
//! The leader is the only producer: it copies the bytes of frames once into the ring. The appliers
//! are the consumers: they read the frames in place. A transaction is a run of frames and has a
//! descriptor. Sequence numbers count transactions from 1, in the provider's commit order.
//!
//! Four counters only grow:
//!
//! | counter | meaning | moved by |
//! |---|---|---|
//! | `published` | transactions that appliers may claim | the leader |
//! | `claimed` | transactions that an applier has claimed | any applier, by compare-and-swap |
//! | `committed` | transactions committed with all before them | the applier whose turn it is |
//! | `tail` | bytes that are no longer needed | the applier whose turn it is |
//!
//! In relaxed commit order, appliers do not wait for a turn. Each commit marks its descriptor as
//! done, and then moves `committed` over all done transactions that follow it
//! (`Counters::complete`). So `committed` is the low-water mark. An applier that has claimed a
//! transaction with an unmet dependency enqueues it on a wait list (`aside.rs`). No applier has it
//! then until the dependency is committed.
//!
//! A descriptor belongs to the leader until its transaction is published, then to the applier that
//! has claimed it, until the commit. Only then does the leader use it again. A transaction larger
//! than a quarter of the buffer is published *open*: its `end` grows while the applier already
//! reads. It is applied alone, and its bytes are released as they are read.
//!
//! Not for: sleeping and setting latches. This crate records who waits for what, and returns which
//! latches a step has to set. Latches are PostgreSQL's (`crates/postgres`).
//!
//! If a process with shared memory attached dies, PostgreSQL restarts all processes and
//! reinitializes the memory. So no code here handles half-finished updates.
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
