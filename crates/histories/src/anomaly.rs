//! The kinds of anomalies, and which models forbid them.
//!
//! Sources: Adya, "Weak Consistency" (1999), chapter 3 and 4; Cerone and Gotsman, "Analysing
//! Snapshot Isolation" (2016); Kingsbury and Alvaro, "Elle" (VLDB 2020), sections 4 to 6.

use std::fmt;
use std::str::FromStr;

/// The kind of a cycle of dependencies, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cycle {
    /// Writes only.
    G0,
    /// Writes and reads of what was written.
    G1c,
    /// Exactly one anti-dependency: read skew.
    GSingle,
    /// Several anti-dependencies, of which no two follow each other. Snapshot isolation has none.
    GNonadjacent,
    /// Several anti-dependencies, two of which follow each other: write skew.
    G2Item,
}

/// The orders that a cycle uses, beside the dependencies through data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Orders {
    /// None.
    Data,
    /// The order of transactions in a process.
    Process,
    /// Real time: a transaction was over before another one began.
    Realtime,
}

/// A kind of anomaly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Anomaly {
    /// A read has an element twice.
    DuplicateElements,
    /// Two reads of a list, neither of which begins with the other.
    IncompatibleOrder,
    /// A read has something that nobody wrote.
    GarbageRead,
    /// The values of a register follow each other in a cycle.
    CyclicVersions,
    /// A transaction does not see its own earlier reads and writes.
    Internal,
    /// A transaction sees its own later write.
    FutureRead,
    /// A read of what an aborted transaction wrote.
    G1a,
    /// A read of what its writer overwrote in the same transaction.
    G1b,
    /// Two transactions read the same version of a key, and both wrote the key.
    LostUpdate,
    /// A cycle of dependencies.
    Cycle(Cycle, Orders),
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DuplicateElements => "duplicate-elements",
            Self::IncompatibleOrder => "incompatible-order",
            Self::GarbageRead => "garbage-read",
            Self::CyclicVersions => "cyclic-versions",
            Self::Internal => "internal",
            Self::FutureRead => "future-read",
            Self::G1a => "G1a",
            Self::G1b => "G1b",
            Self::LostUpdate => "lost-update",
            Self::Cycle(Cycle::G0, _) => "G0",
            Self::Cycle(Cycle::G1c, _) => "G1c",
            Self::Cycle(Cycle::GSingle, _) => "G-single",
            Self::Cycle(Cycle::GNonadjacent, _) => "G-nonadjacent",
            Self::Cycle(Cycle::G2Item, _) => "G2-item",
        })?;
        match self {
            Self::Cycle(_, Orders::Process) => f.write_str("-process"),
            Self::Cycle(_, Orders::Realtime) => f.write_str("-realtime"),
            _ => Ok(()),
        }
    }
}

/// A model of consistency that a database promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Model {
    /// PL-1: writes have one order.
    ReadUncommitted,
    /// PL-2: reads are of committed, final versions.
    ReadCommitted,
    /// PL-2.99: what was read stays, but for predicates.
    RepeatableRead,
    /// Generalized snapshot isolation: each transaction sees some prefix of the commits.
    SnapshotIsolation,
    /// Snapshot isolation in which a process sees its own earlier transactions.
    StrongSessionSnapshotIsolation,
    /// Snapshot isolation in which a transaction sees all that was committed before it began.
    StrongSnapshotIsolation,
    /// PL-3: as if transactions ran one by one, in some order.
    Serializable,
    /// Serializable in an order that keeps the order of each process.
    StrongSessionSerializable,
    /// Serializable in an order that keeps real time.
    StrictSerializable,
}

/// All models, with their names.
pub const MODELS: [(&str, Model); 9] = [
    ("read-uncommitted", Model::ReadUncommitted),
    ("read-committed", Model::ReadCommitted),
    ("repeatable-read", Model::RepeatableRead),
    ("snapshot-isolation", Model::SnapshotIsolation),
    (
        "strong-session-snapshot-isolation",
        Model::StrongSessionSnapshotIsolation,
    ),
    ("strong-snapshot-isolation", Model::StrongSnapshotIsolation),
    ("serializable", Model::Serializable),
    (
        "strong-session-serializable",
        Model::StrongSessionSerializable,
    ),
    ("strict-serializable", Model::StrictSerializable),
];

impl Model {
    /// Returns the orders that the model keeps.
    #[must_use]
    pub fn orders(self) -> Orders {
        match self {
            Self::StrongSessionSnapshotIsolation | Self::StrongSessionSerializable => {
                Orders::Process
            }
            Self::StrongSnapshotIsolation | Self::StrictSerializable => Orders::Realtime,
            _ => Orders::Data,
        }
    }

    /// Returns whether no history of this model has the anomaly.
    #[must_use]
    pub fn forbids(self, anomaly: Anomaly) -> bool {
        let reads_committed = self != Self::ReadUncommitted;
        let repeatable = reads_committed && self != Self::ReadCommitted;
        match anomaly {
            Anomaly::DuplicateElements | Anomaly::GarbageRead | Anomaly::CyclicVersions => true,
            Anomaly::IncompatibleOrder | Anomaly::FutureRead | Anomaly::G1a | Anomaly::G1b => {
                reads_committed
            }
            Anomaly::Internal | Anomaly::LostUpdate => repeatable,
            Anomaly::Cycle(cycle, orders) => {
                orders <= self.orders()
                    && match cycle {
                        Cycle::G0 => true,
                        Cycle::G1c => reads_committed,
                        Cycle::GSingle | Cycle::GNonadjacent => repeatable,
                        Cycle::G2Item => matches!(
                            self,
                            Self::RepeatableRead
                                | Self::Serializable
                                | Self::StrongSessionSerializable
                                | Self::StrictSerializable
                        ),
                    }
            }
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = MODELS.iter().find(|(_, model)| model == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

/// The name is of no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown model \"{0}\"")]
pub struct UnknownModel(pub String);

impl FromStr for Model {
    type Err = UnknownModel;

    fn from_str(name: &str) -> Result<Self, UnknownModel> {
        MODELS
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, model)| *model)
            .ok_or_else(|| UnknownModel(name.to_owned()))
    }
}
