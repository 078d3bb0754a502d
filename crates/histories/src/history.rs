//! A history: the transactions that clients asked for, the results that they got, and their order.

use crate::value::Value;

/// The result of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// `nil`. In an invocation: not known yet. In a completion: an empty list, or the initial
    /// value of a register.
    Nil,
    /// The elements of a list, in order.
    List(Vec<Value>),
    /// The value of a register.
    Value(Value),
}

/// One step of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MicroOp {
    /// `[:append key value]` adds an element to the end of a list.
    Append {
        /// The list.
        key: Value,
        /// The element, which no other append to this list has.
        value: Value,
    },
    /// `[:w key value]` sets a register.
    Write {
        /// The register.
        key: Value,
        /// The value, which no other write to this register has.
        value: Value,
    },
    /// `[:r key seen]` reads a list or a register.
    Read {
        /// The list or register.
        key: Value,
        /// The values that were read.
        seen: Seen,
    },
}

impl MicroOp {
    /// Returns the key of the step.
    #[must_use]
    pub fn key(&self) -> &Value {
        match self {
            Self::Append { key, .. } | Self::Write { key, .. } | Self::Read { key, .. } => key,
        }
    }

    /// Returns the step as it is in an invocation: a read has no result yet.
    #[must_use]
    pub fn invoked(&self) -> Self {
        match self {
            Self::Read { key, .. } => Self::Read {
                key: key.clone(),
                seen: Seen::Nil,
            },
            other => other.clone(),
        }
    }
}

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The client sends the transaction.
    Invoke,
    /// The transaction is committed.
    Ok,
    /// The transaction did not happen and never will.
    Fail,
    /// The outcome is not known: the transaction may be committed, or be committed later.
    Info,
}

/// One entry of a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Whether the transaction begins, or how it ended.
    pub kind: Kind,
    /// The client, which does one transaction after another. `None`: not recorded.
    pub process: Option<i64>,
    /// The number of the entry, for reports.
    pub index: u64,
    /// Nanoseconds since the test began. Only informative: the order of entries counts.
    pub time: Option<i64>,
    /// The steps of the transaction. `None` for a completion that does not repeat them.
    pub value: Option<Vec<MicroOp>>,
}

/// The entries of a test, in the order of real time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    /// The entries.
    pub operations: Vec<Operation>,
}

impl History {
    /// Adds an entry with the next index.
    pub fn push(
        &mut self,
        kind: Kind,
        process: Option<i64>,
        time: Option<i64>,
        value: Option<Vec<MicroOp>>,
    ) {
        self.operations.push(Operation {
            kind,
            process,
            index: self.operations.len() as u64,
            time,
            value,
        });
    }
}
