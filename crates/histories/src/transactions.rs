//! Transactions: invocations with their completions.

use std::collections::HashMap;

use crate::error::HistoryError;
use crate::format::write_steps;
use crate::history::{History, Kind, MicroOp, Operation};

/// Lists longer than this are shortened in reports.
const MOST_ELEMENTS: usize = 12;

/// Outcome of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Committed,
    Aborted,
    /// Not known: it may be committed, or be committed later.
    Indeterminate,
}

/// One transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transaction<'h> {
    pub status: Status,
    pub process: Option<i64>,
    /// The index of the operation that tells most: the completion, or else the invocation.
    pub index: u64,
    pub steps: &'h [MicroOp],
}

/// An event of a transaction, in the order of the history.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    Began(u32),
    /// The transaction is committed, and its client has been notified.
    Committed(u32),
}

/// The transactions of a history, in the order of their first operations.
pub(crate) struct Transactions<'h> {
    pub all: Vec<Transaction<'h>>,
    pub events: Vec<Event>,
}

impl<'h> Transactions<'h> {
    /// Finds the completion of each invocation.
    ///
    /// A completion without an invocation is a transaction of which the beginning is unknown.
    pub fn of(history: &'h History) -> Result<Self, HistoryError> {
        let mut all: Vec<Transaction<'h>> = Vec::with_capacity(history.operations.len() / 2 + 1);
        let mut events = Vec::with_capacity(history.operations.len());
        let mut pending: HashMap<Option<i64>, u32> = HashMap::new();
        for operation in &history.operations {
            let next = number(all.len())?;
            if operation.kind == Kind::Invoke {
                let (Some(steps), process) = (&operation.value, operation.process) else {
                    return Err(HistoryError::MissingValue {
                        index: operation.index,
                    });
                };
                if pending.insert(process, next).is_some()
                    && let Some(process) = process
                {
                    let index = operation.index;
                    return Err(HistoryError::Overlap { process, index });
                }
                events.push(Event::Began(next));
                all.push(Transaction {
                    status: Status::Indeterminate,
                    process,
                    index: operation.index,
                    steps,
                });
                continue;
            }
            let number = pending.remove(&operation.process);
            let invoked = number.and_then(|number| all.get_mut(number as usize));
            let completed = complete(operation, invoked.as_deref())?;
            if completed.status == Status::Committed {
                events.push(Event::Committed(number.unwrap_or(next)));
            }
            match invoked {
                Some(transaction) => *transaction = completed,
                None => all.push(completed),
            }
        }
        Ok(Self { all, events })
    }

    /// Returns the transaction `number`, as a map of EDN.
    pub fn describe(&self, number: u32) -> String {
        let Some(transaction) = self.all.get(number as usize) else {
            return String::new();
        };
        let kind = match transaction.status {
            Status::Committed => "ok",
            Status::Aborted => "fail",
            Status::Indeterminate => "info",
        };
        let mut text = format!("{{:index {}, :type :{kind}", transaction.index);
        if let Some(process) = transaction.process {
            text.push_str(&format!(", :process {process}"));
        }
        text.push_str(", :value ");
        write_steps(&mut text, transaction.steps, MOST_ELEMENTS);
        text.push('}');
        text
    }

    /// Returns the index of the operation of a transaction.
    pub fn index(&self, number: u32) -> u64 {
        self.all.get(number as usize).map_or(0, |t| t.index)
    }
}

/// Returns a position as a number. Fails from 2^28 on: the graph has several nodes for each.
pub(crate) fn number(position: usize) -> Result<u32, HistoryError> {
    match u32::try_from(position) {
        Ok(number) if number < 1 << 28 => Ok(number),
        _ => Err(HistoryError::TooLarge),
    }
}

fn complete<'h>(
    operation: &'h Operation,
    invoked: Option<&Transaction<'h>>,
) -> Result<Transaction<'h>, HistoryError> {
    let index = operation.index;
    let status = match operation.kind {
        Kind::Ok => Status::Committed,
        Kind::Fail => Status::Aborted,
        Kind::Info | Kind::Invoke => Status::Indeterminate,
    };
    let given = operation.value.as_deref();
    let steps = match (invoked, given) {
        (Some(invoked), Some(steps)) if status == Status::Committed => {
            if !completes(invoked.steps, steps) {
                return Err(HistoryError::Mismatch { index });
            }
            steps
        }
        (Some(invoked), _) if status != Status::Committed => invoked.steps,
        (None, Some(steps)) => steps,
        (None, None) if status != Status::Committed => &[],
        _ => return Err(HistoryError::MissingValue { index }),
    };
    Ok(Transaction {
        status,
        process: operation.process,
        index,
        steps,
    })
}

/// Whether the completed steps are the invoked ones, with results of reads.
fn completes(invoked: &[MicroOp], completed: &[MicroOp]) -> bool {
    let same = |(a, b): (&MicroOp, &MicroOp)| match (a, b) {
        (MicroOp::Read { key: a, .. }, MicroOp::Read { key: b, .. }) => a == b,
        (a, b) => a == b,
    };
    invoked.len() == completed.len() && invoked.iter().zip(completed).all(same)
}
