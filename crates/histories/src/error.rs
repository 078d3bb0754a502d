//! Histories that cannot be checked.

use crate::value::Value;

/// A reason why a history cannot be checked: the fault is the recorder's, not the database's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// A history is of lists or of registers.
    #[error("operation {index} mixes lists and registers")]
    Mixed {
        /// The index of the operation.
        index: u64,
    },
    /// Versions are distinguished by their values, so each write needs a value of its own.
    #[error("operations {first} and {second} both write {value} to key {key}")]
    RepeatedWrite {
        /// The key.
        key: Value,
        /// The value.
        value: Value,
        /// The index of the one operation.
        first: u64,
        /// The index of the other, or the same one.
        second: u64,
    },
    /// `nil` is the initial value of a register.
    #[error("operation {index} writes nil to key {key}")]
    NilWrite {
        /// The key.
        key: Value,
        /// The index of the operation.
        index: u64,
    },
    /// A process does one transaction at a time.
    #[error("operation {index}: process {process} has not completed its last invocation")]
    Overlap {
        /// The process.
        process: i64,
        /// The index of the second invocation.
        index: u64,
    },
    /// A completion repeats the steps that were invoked, with the results of reads.
    #[error("operation {index} does not complete the transaction that its process invoked")]
    Mismatch {
        /// The index of the completion.
        index: u64,
    },
    /// An invocation and a committed transaction have steps.
    #[error("operation {index} has no value")]
    MissingValue {
        /// The index of the operation.
        index: u64,
    },
    /// Nodes and edges of the graph are numbered with 32 bits.
    #[error("history is too large")]
    TooLarge,
}
