//! Table versions: the rules of transactions that are serializable over all nodes of a group.
//!
//! A transaction declares its tables. A sequencer gives it a number of each, all at once. Each node
//! runs and applies in the order of these numbers, so transactions wait instead of aborting.
//!
//! Everything here is pure: no clock, no randomness, no threads, no input and output. Shared memory
//! holds one [`Local`] for each database; a worker of the node with the lease holds the
//! [`Sequencer`]. Not for: what a statement reads and writes, and how records reach other nodes.
//!
//! # Example
//!
//! Nodes A and B, tables `stock` and `accounts`. The sequencer is on A. `scenario.rs` runs this.
//!
//! 1. T1 on A declares `write stock`. Grant: stock seen 0, own 1. It runs.
//! 2. T2 on B declares `read stock, write accounts`. Grant: stock seen 1; accounts seen 0, own 1.
//!    B is at stock 0, so T2 waits.
//! 3. T3 on A declares `write stock`. Grant: stock seen 1, own 2. T2 reads stock 1 and so comes
//!    before T3: the grant also says accounts 1.
//! 4. T1 commits. A marks stock 1 as *coming*, commits, and publishes it as *reached*. The record
//!    (stock seen 0, own 1) travels with the changes. B applies it.
//! 5. B is at stock 1. T2 takes its snapshot. On A, T3 still waits for accounts 1.
//! 6. T2 commits with the record (stock seen 1; accounts seen 0, own 1). A applies it: accounts
//!    were at 0 and stock at 1. T3 starts.
//! 7. T4 on B declares `write stock`. Grant: stock seen 2, own 3.
//! 8. T3 rolls back: stock 2 is *void*. The sequencer announces for stock: committed 1, settled 2.
//!    B is at stock 2 then, and T4 starts.
//! 9. T4 commits with the record (stock seen 1, own 3). A node that never heard of the void number
//!    applies it after stock 1.
//!
//! # Rules
//!
//! - **Exact snapshots.** A snapshot holds just the writes that the grant names. So the history
//!   equals the serial one in the order of grants ([`Grant`] has the reasons). A reader that comes
//!   too late for that asks again.
//! - **Order of application.** A write is applied after the write before it and after all that its
//!   transaction had seen ([`Local::may_apply`]).
//! - **No deadlock.** All versions of a transaction are assigned at once, and each wait is for an
//!   earlier grant.
//! - **Void numbers.** A number is void only if its node says so, has started anew without it, or
//!   was fenced ([`Cut`]). A node that is cut off may have committed: then others
//!   wait, up to their deadline.
//! - **New sequencer.** A majority promises to hold back old writes and reports. Numbers begin
//!   after all that it has. Old writes above are refused by every node that knows the new term. A
//!   node that has one has diverged and gives it up.
//! - **Acknowledgement.** With `durability => 'majority'` a client hears of a commit, or of a read,
//!   once a majority has reached it ([`Confirmations`]). So no client sees what is given up.
//!
//! | module | holds |
//! |---|---|
//! | `declaration` | the text that a transaction declares |
//! | `grant`, `report` | what a transaction asks and gets; the published algorithm's counters |
//! | `sequencer` | who gives numbers |
//! | `local`, `applying`, `joining`, `progress` | one node: transactions, appliers, cuts, tables |
//! | `rounds` | one node: who gives versions, the messages about it, tables that are drained |
//! | `record`, `vector`, `cut`, `number` | values |
//! | `bytes`, `message` | their bytes; what nodes send each other |
#![forbid(unsafe_code)]

mod applying;
mod broken;
mod bytes;
#[cfg(test)]
mod cluster;
mod cut;
mod declaration;
mod grant;
#[cfg(test)]
mod history;
mod joining;
mod local;
mod message;
#[cfg(test)]
mod model;
mod number;
mod progress;
#[cfg(test)]
mod properties;
mod record;
mod report;
mod rounds;
#[cfg(test)]
mod scenario;
mod sequencer;
#[cfg(test)]
mod simulation;
mod vector;

pub use applying::Verdict;
pub use braid_codec::Malformed;
pub use bytes::{Announcement, Bytes};
pub use cut::{CUTS_LIMIT, Cut, Scope};
pub use declaration::{Declaration, DeclarationError, NAME_LIMIT, Problem, TableName};
pub use grant::{
    Access, Answer, Batch, Grant, Granted, Refusal, Release, Released, Request, TABLES_LIMIT,
};
pub use joining::Learned;
pub use local::{
    BATCH_LIMIT, Commit, EarlyRelease, Edge, Error, Local, Start, TRANSACTIONS_LIMIT, Waiting,
};
pub use message::{Content, Message, Note};
pub use number::{Boot, GrantId, NUMBER_LIMIT, NodeNumber, TableNumber, Term, Version};
pub use record::{Record, Shipped};
pub use report::{ReportCounter, ReportVersion};
pub use rounds::{Agreement, Drains, Effect, Followed, Moment, NextDrain, Rounds, Rules, Timing};
pub use sequencer::{OUTSTANDING_LIMIT, Sequencer, WINDOW};
pub use vector::{Confirmations, End, Ends, Report, Reports, Vector, is_majority};
