//! The shared memory between a subscription's leader and its appliers.
//!
//! One producer (the leader) writes the bytes of frames once; consumers (the appliers) read them in place. A transaction is
//! a run of frames and has a descriptor. Sequence numbers count transactions from 1 in the provider's commit order.
//!
//! Four counters say where everything is; each only grows, and each has its movers:
//!
//! | counter | meaning | moved by |
//! |---|---|---|
//! | `published` | transactions that appliers may take | the leader |
//! | `claimed` | transactions that some applier has taken | any applier, by compare-and-swap |
//! | `committed` | transactions that are committed here, in order | the applier whose turn it is |
//! | `tail` | bytes that are no longer needed | the applier whose turn it is |
//!
//! A descriptor belongs to the leader until it is published, then to the applier that claimed it until it is committed;
//! only then does the leader use it again. `end` of an open transaction (one that is larger than the ring can hold) grows
//! while the applier already reads; such a transaction is applied alone, and its bytes are released as they are read.
//!
//! Not for: waiting and waking. Who waits for what is shown here; latches are PostgreSQL's and live in `crates/pg`.
//!
//! Nothing here trusts a consumer to be alive: a process that dies with shared memory attached makes PostgreSQL restart
//! all of them, and the ring with them.
#![allow(unsafe_code)]

mod layout;
mod ring;
mod sync;

pub use layout::{ApplierSlot, ApplierState, Descriptor, Failure, FailureReport, Geometry, MAX_APPLIERS};
pub use ring::{Complete, Error, FrameRead, Leader, Ring, Transaction, Wakes};
