//! Versioned transactions of this node's sessions. Run by every session of a server that has the
//! library preloaded.
//!
//! Example of what goes wrong without it: T1 reads `accounts` and writes `stock`, T2 reads `stock`
//! and writes `accounts`. Under snapshot isolation both commit, and no serial order explains both.
//! Here each declares its tables with SET LOCAL before its snapshot; the versions process numbers
//! their writes, and T2 waits for T1.
//!
//! A session and the versions process share a [`Slot`]. Its state, and who moves it:
//!
//! | state | set by | next |
//! |---|---|---|
//! | free | the versions process | claimed |
//! | claimed | the session, at SET LOCAL | asked |
//! | asked | the session, once the slot has its tables | waiting, refused |
//! | waiting | the versions process: numbers are given, earlier writes are missing | ready, refused |
//! | ready | the versions process: all that the transaction is to see is visible | running, refused |
//! | running | the session, with its snapshot taken | commit asked, ended |
//! | commit asked | the session, before its commit record | may commit, refused |
//! | may commit | the versions process: the writes are marked as coming | committed, ended |
//! | refused | the versions process, with a problem | ended |
//! | committed | the session, once its commit is visible | free |
//! | ended | the session: rolled back, or nothing was written | free |
//!
//! None of it is durable. If the server crashes, all slots are free, and no transaction runs. If
//! the versions process ends, the next one refuses transactions that have numbers of the earlier
//! one.
//!
//! In a group of several nodes with data the versions process puts a note into the slot when it
//! says *ready*. The session writes it as the first change of its transaction (`note`). An applier
//! of another node claims a slot with that note before it begins, and goes through the same
//! states: it is *ready* once all that the transaction had seen is visible here.
//!
//! Commit order is right for two reasons. Writes become visible before their slot says *committed*,
//! so a transaction that is *ready* sees them. And while a transaction is *ready*, the versions
//! process lets no later write of its tables commit, so its snapshot does not see too much.
//!
//! | module | holds |
//! |---|---|
//! | `memory` | slots, and what `braid.table_versions` shows |
//! | `tables` | which tables are versioned, known without cost where none is |
//! | `transaction` | the session's transaction: SET LOCAL, wait, commit |
//! | `access` | undeclared access, and statements that are refused |
//! | `setting` | the settings |
//! | `note` | rows that are shipped, and say what the node has |
//! | `mailbox` | messages of other nodes' versions processes |
//!
//! Not for: which numbers a transaction gets and what it waits for (`braid_versions`), and the
//! process that gives them (`braid_workers::versions`).

mod access;
pub mod mailbox;
pub mod memory;
pub mod note;
mod setting;
pub mod tables;
mod transaction;

use braid_postgres::hook::Utility;

pub use memory::Slot;
pub use transaction::{find_tables, follow, forget, is_in_order, read_current};

pub(crate) use access::{dropped, truncated};
pub(crate) use setting::register;

/// [`before`] says so of a statement that has set `braid.versions`.
pub(crate) const DECLARES: u8 = 8;
/// [`before`] says so of a statement that has set `braid.release`.
pub(crate) const RELEASES: u8 = 16;

/// Starts to follow transactions and to check statements. Called once, while the postmaster loads
/// its libraries. Before other callbacks of transactions are registered: PostgreSQL calls the last
/// one first, and nothing that may fail is to follow the mark before a commit.
pub(crate) fn install() {
    transaction::install();
    access::install();
}

/// Whether a statement is looked at. Raises nothing.
pub(crate) fn may_concern(statement: Utility<'_>) -> bool {
    setting::of(statement).is_some() || access::may_concern(statement)
}

/// A statement begins. Returns what [`after`] is to do.
pub(crate) fn before(statement: Utility<'_>) -> u8 {
    if let Some(setting) = setting::of(statement) {
        return transaction::before_set(statement, setting);
    }
    if access::may_concern(statement) {
        access::before(statement);
    }
    0
}

/// A statement has succeeded.
pub(crate) fn after(followed: u8) {
    if followed & DECLARES != 0 {
        transaction::declared();
    }
    if followed & RELEASES != 0 {
        transaction::released();
    }
}
