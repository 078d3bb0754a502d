//! What a transaction asks of the sequencer and what it gets.

use std::collections::{BTreeMap, BTreeSet};

use crate::number::{Boot, GrantId, NodeNumber, TableNumber, Term, Version};

/// The most versioned tables of a group.
pub const TABLES_LIMIT: usize = 256;

/// What a transaction does with a table. A table that is both read and written is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes, and may read.
    Write,
}

/// Versions of all tables that a transaction declared, assigned at once.
///
/// # Why writers do not wait for readers
///
/// The published algorithm counts reads, so that a write waits for the reads before it
/// ([`crate::ReportCounter`]). A reader there reads the tables one query after the other: a write
/// in between would change what it sees. A PostgreSQL snapshot is taken once. Writes that commit
/// later do not change it, so nobody needs to know when a reader ends, and a reader that writes
/// nothing costs no message at its end.
///
/// The snapshot has to be *exact*: of each declared table it holds the write [`Granted::seen`]
/// and none after it. Then each transaction reads and writes as if all ran one after the other in
/// the order of the grants, and that order agrees with real time. A snapshot with a later write is
/// not sound. Example: A writes `a`, B writes `b`; Q1 and Q2 were granted before both and read
/// both tables on two nodes. If one node applies A first and the other B, Q1 sees only A and Q2
/// only B (a long fork). So [`crate::Local`] refuses such a snapshot ([`crate::Start::Overtaken`])
/// and the transaction asks again.
///
/// A transaction that reads `r` and writes `t` must not have to ask again: its number of `t` would
/// be void. So the next writer of `r` waits for that number, as in the published algorithm. This
/// wait is an entry of the grant that is not [`Granted::declared`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The sequencer's term.
    pub term: Term,
    /// Whose grant this is.
    pub id: GrantId,
    /// The versions by table.
    pub tables: BTreeMap<TableNumber, Granted>,
}

/// The versions of one table in a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Granted {
    /// The last write before this transaction. The node waits for it.
    pub seen: Version,
    /// The number of this transaction's write. None if it does not write the table.
    pub own: Option<Version>,
    /// Whether the transaction declared the table. Otherwise it only waits for `seen`.
    pub declared: bool,
    /// The node that has the write `seen`, if the sequencer does not know yet how it ended.
    pub holder: Option<NodeNumber>,
}

impl Grant {
    /// Whether the transaction may write anything.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.tables.values().any(|granted| granted.own.is_some())
    }
}

/// A transaction's request for a grant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// See [`GrantId::number`].
    pub number: u64,
    /// The declared tables, at least one and at most [`TABLES_LIMIT`].
    pub tables: BTreeMap<TableNumber, Access>,
}

/// What a node says of a grant that it no longer needs, whole or in part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Released {
    /// The transaction is committed and its writes of these tables are published on its node. Its
    /// numbers of other tables are void.
    Committed(BTreeSet<TableNumber>),
    /// The transaction wrote nothing and never will: its numbers are void.
    Void,
    /// These tables were declared and not used, neither will they be: their numbers are void.
    Unused(BTreeSet<TableNumber>),
}

/// A release of one grant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Release {
    /// See [`GrantId::number`].
    pub number: u64,
    /// How much is released, and how it ended.
    pub released: Released,
}

/// What one node sends the sequencer in one message. A repeat of it, or of parts of it, in any
/// order, takes effect once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Batch {
    /// The term that the node knows.
    pub term: Term,
    /// The sender.
    pub node: NodeNumber,
    /// The sender's start.
    pub boot: Boot,
    /// The node needs nothing of requests with a lower number any more.
    pub low: u64,
    /// Requests of all transactions that wait for an answer.
    pub requests: Vec<Request>,
    /// Releases that the sequencer has not confirmed.
    pub releases: Vec<Release>,
}

/// The sequencer's answer to a [`Batch`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Answer {
    /// Grants, in the order in which they were made.
    pub grants: Vec<Grant>,
    /// The numbers of requests that the sequencer refuses, and why.
    pub refused: Vec<(u64, Refusal)>,
    /// The releases that took effect, now or before.
    pub confirmed: Vec<Release>,
}

/// Why a sequencer refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// The sequencer may not act: its lease is over, or an earlier one's may still run.
    #[error("the sequencer of table versions may not act at this moment")]
    NotActing,
    /// Fewer than a majority of the members have reported.
    #[error("a majority of the group's members is not reachable")]
    NoMajority,
    /// A member has not reported.
    #[error("not all other members of the group are reachable")]
    NotAll,
    /// The sender knows another term.
    #[error("the request is of another term of the sequencer")]
    OtherTerm,
    /// The sender has started anew and has not said what it has, or the request is of an earlier
    /// start.
    #[error("the request is of a start of the node that the sequencer does not know")]
    OtherBoot,
    /// The node was fenced.
    #[error("the node's versions were given up by the group")]
    Fenced,
    /// The request names no table, or too many.
    #[error("a versioned transaction declares from 1 to 256 tables")]
    Tables,
    /// Too many grants are outstanding, or too many tables are versioned.
    #[error("too many versioned transactions wait")]
    TooMany,
    /// The number is too far above the lowest that the node still needs.
    #[error("the request's number is not in its window")]
    Window,
}
