//! The current step of a session, for the context of errors: the operation, its relation and
//! column, and the transaction. Run by the processes that apply changes. It is noted before each
//! change, and becomes a text only after an error.

use std::sync::atomic::{AtomicUsize, Ordering};

use braid_gir::{Operation, lsn_text};

use super::{NO_SUBSCRIPTION, Session};

/// Number for no column.
const NONE: usize = usize::MAX;

/// The column of the stream's relation whose value is being converted. A static of the process,
/// because it is set for each value.
static COLUMN: AtomicUsize = AtomicUsize::new(NONE);

/// Notes that a value of this column is converted next.
#[inline]
pub(super) fn convert(column: usize) {
    COLUMN.store(column, Ordering::Relaxed);
}

/// Notes that all values are converted.
#[inline]
pub(super) fn converted() {
    COLUMN.store(NONE, Ordering::Relaxed);
}

/// A step of a transaction, by the name of the message that asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Step {
    #[default]
    Begin,
    Change(Operation),
    Truncate,
    Statement,
    Commit,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Begin => "BEGIN",
            Self::Change(Operation::Insert) => "INSERT",
            Self::Change(Operation::Update) => "UPDATE",
            Self::Change(Operation::Delete) => "DELETE",
            Self::Truncate => "TRUNCATE",
            Self::Statement => "DDL",
            Self::Commit => "COMMIT",
        }
    }
}

/// The current step, without names.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Doing {
    pub(super) step: Step,
    /// Number of the stream's relation; `None` if the step concerns no single one.
    pub(super) schema: Option<u32>,
    /// The transaction at the node where it was first committed; 0 for none.
    pub(super) xid: u32,
}

impl Session {
    /// Notes the step that begins.
    pub(super) fn does(&mut self, step: Step, schema: Option<u32>) {
        converted();
        let xid = self.current().map_or(self.doing.xid, |now| now.xid);
        self.doing = Doing { step, schema, xid };
    }

    /// Returns the step in which an error occurred, as a line of the error's CONTEXT. `end_lsn` is
    /// the end of the transaction at the provider, 0 if that is not known.
    #[must_use]
    pub fn doing(&self, end_lsn: u64) -> String {
        let doing = self.doing;
        let name = &self.identity.subscription;
        let mut text = if self.identity.subscription_id == NO_SUBSCRIPTION {
            format!("processing records of origin \"{name}\"")
        } else {
            format!("processing remote data for subscription \"{name}\"")
        };
        text.push_str(&format!(" during message type \"{}\"", doing.step.name()));
        let remote = doing.schema.and_then(|schema| self.schemas.get(&schema));
        if let Some(remote) = remote {
            text.push_str(&format!(
                " for replication target relation \"{}.{}\"",
                remote.namespace, remote.name
            ));
            if let Some(column) = remote.columns.get(COLUMN.load(Ordering::Relaxed)) {
                text.push_str(&format!(" column \"{}\"", column.name));
            }
        }
        if doing.step == Step::Statement
            && let Some(statement) = &self.statement_in_hand
        {
            text.push_str(&format!(" for statement \"{}\"", statement.shown()));
        }
        if doing.xid != 0 {
            text.push_str(&format!(" in transaction {}", doing.xid));
        }
        if end_lsn != 0 {
            text.push_str(&format!(", finished at {}", lsn_text(end_lsn)));
        }
        text
    }
}
