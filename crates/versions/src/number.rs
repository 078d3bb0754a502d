//! The numbers that the rules of versions speak of. Each has a type of its own, so that none is
//! taken for another.

use std::fmt;

/// Numbers stay below this, so that adding to one can't overflow.
pub const NUMBER_LIMIT: u64 = 1 << 62;

/// The number of a node in its group. Unique for ever; 0 is nobody's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeNumber(pub u16);

/// The number that the group gave a table when it was versioned. All nodes use this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableNumber(pub u32);

/// The number of a write of one table: 1 for the first write, 0 for none yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version(pub u64);

impl Version {
    pub(crate) const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    pub(crate) const fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

/// The term of the sequencer: one more with each [`crate::Cut`] that the group agrees on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Term(pub u64);

/// The start of a node's server, counted durably by the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Boot(pub u64);

/// A request for a grant, and the transaction that asked: unique for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantId {
    /// The node of the transaction.
    pub node: NodeNumber,
    /// The node's start.
    pub boot: Boot,
    /// Counts the requests of this start, from 1.
    pub number: u64,
}

impl fmt::Display for NodeNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for TableNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
