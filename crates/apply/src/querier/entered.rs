//! Large values of a row that an update has brought into a publication's row filter: the row comes
//! as an insert, without the values that the update left as they were. Run by the appliers.
//!
//! Example: a publication has the rows `where (id > 10)`. `update f set id = 11 where id = 1` comes
//! as the insert of row 11. Its large value is neither in WAL nor at the subscriber. Null in its
//! place would be a lost value, which nobody would notice.
//!
//! So the provider is asked, also where the subscriber has a row with this key. There are five
//! answers:
//!
//! 1. The provider shows the transaction and has the row: the row is written with the answer. If a
//!    later transaction has written the row, the answer may be of another row that has the key by
//!    now. Then the row is marked, and the change that follows asks again.
//! 2. The provider shows the transaction and has no such row: a deletion, or another key, follows
//!    in the stream. The row is left out, and that is recorded as a conflict.
//! 3. The provider does not show the transaction: the row still has its former key, under which the
//!    provider is asked.
//! 4. The provider does not show the transaction, which has inserted the row: the row has no former
//!    key. The commit may wait for this subscription as a synchronous standby. Then the transaction
//!    is parked, and applied once the commit is past. Otherwise it is tried again.
//! 5. The provider has the row under neither key, or cannot tell: that is an error. The row is
//!    never written with a null in place of the value.
//!
//! Not for: updates, whose missing values the row at the subscriber may have (`super`).

use std::ffi::CString;
use std::time::Instant;

use braid_bgworker::sqlstate::SqlState;
use braid_node::settings;
use braid_postgres::error::{PeerLock, PgError};

use super::{Questions, Sought};
use crate::peer::{AsOf, Column, Form, Reply};
use crate::relation::RemoteRelation;
use crate::row_context::RowContext;
use crate::table::RowValues;
use crate::target::{Key, Tables};

/// Values of columns as the provider has sent them, by their positions in the stream.
pub(crate) type Answers = Vec<(usize, Option<Vec<u8>>)>;

/// Answer about a row that came without all of its values.
#[derive(Debug)]
pub(crate) enum Entered {
    /// The provider has the row.
    Values {
        /// The values that it lacked.
        answers: Answers,
        /// Whether the transaction that is applied has written the row last.
        is_exact: bool,
    },
    /// The row was deleted by now, or has another key.
    Gone,
    /// No subscription brings the rows.
    Nobody,
}

/// The provider shows a transaction at once, or waits for a standby. After this part of the time
/// for its answer it is asked whether it waits for this node.
const COMMIT_PART: u32 = 4;

/// A column that is fetched besides those of the row: the time of the transaction that wrote it.
pub(super) const WRITTEN_AT: Column = Column {
    name: String::new(),
    form: Form::CommitTime,
};

impl Tables {
    /// Names and texts of the columns that identify a row at the provider.
    fn identity_texts(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        values: &RowValues,
    ) -> Result<Vec<(String, CString)>, PgError> {
        let (plan, table) = self.opened_at(key)?;
        let identity = remote.columns.iter().enumerate();
        let texts: Option<Vec<_>> = identity
            .filter(|(_, column)| column.identity)
            .map(|(remote, column)| {
                let place = plan.columns.iter().find(|known| known.remote == remote)?;
                let value = table.cell(values, place.local).flatten()?;
                Some((column.name.clone(), value.output()))
            })
            .collect();
        texts.filter(|texts| !texts.is_empty()).ok_or_else(|| {
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                format!(
                    "large values of a row of table \"{}\" cannot be asked for without its key",
                    remote.qualified_name()
                ),
            )
            .with_hint(
                "Add the columns of the provider's key to the table, then run braid.enable_subscription.",
            )
        })
    }

    /// Fills the missing values of a row with those that the provider has sent.
    pub(crate) fn fill_gaps(
        &mut self,
        key: Key,
        values: &mut RowValues,
        answers: &Answers,
    ) -> Result<(), PgError> {
        for column in &mut self.target(key)?.plan.columns {
            let Some(gap) = values.get_mut(column.local).filter(|gap| gap.is_none()) else {
                continue;
            };
            let answer = answers.iter().find(|(remote, _)| *remote == column.remote);
            if let Some((_, bytes)) = answer {
                let decode = |bytes: &Vec<u8>| column.decoder.decode_answer(bytes);
                *gap = Some(bytes.as_ref().map(decode).transpose()?);
            }
        }
        Ok(())
    }
}

impl Questions<'_> {
    /// Asks the provider for the values that an inserted row lacks. `former` has the key that the
    /// row had before, if that is known.
    pub(crate) fn fetch_entered(
        &mut self,
        context: RowContext<'_>,
        values: &RowValues,
        former: Option<&RowValues>,
    ) -> Result<Entered, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let Some(sought) = self.sought_of_provider(context, values)? else {
            return Ok(Entered::Nobody);
        };
        let Sought {
            source,
            gaps,
            columns,
        } = sought;
        let new = self.tables.identity_texts(key, remote, values)?;
        let old = match former {
            Some(former) => Some(self.tables.identity_texts(key, remote, former)?),
            None => None,
        };
        let inquiry = self.inquiry(&source, remote, &columns, AsOf::Transaction(current.xid));
        let mut ask_of_commits = Instant::now() + settings::querier_timeout() / COMMIT_PART;
        loop {
            match self.put(&inquiry, &new)? {
                (Reply::NoTable, _) => return Err(changed_at_provider(remote)),
                (Reply::None, true) => return Ok(Entered::Gone),
                (Reply::Row(row), true) => {
                    return self.entered(key, &gaps, row, Some(current.timestamp));
                }
                // The transaction is not visible yet: the row has its old key.
                (Reply::Row(_) | Reply::None, false) => {}
            }
            if let Some(old) = &old
                && let (Reply::Row(row), false) = self.put(&inquiry, old)?
            {
                return self.entered(key, &gaps, row, None);
            }
            if current.unsettled {
                return Err(self
                    .hints
                    .wait_for_commit("A large value is to be asked for."));
            }
            // The commit may wait for this subscription. Then it is not shown before that is past
            // the transaction, which is parked.
            if Instant::now() > ask_of_commits {
                let deadline = Instant::now() + settings::querier_timeout();
                if self.querier.peers.commits_wait(&source, deadline) {
                    let mut error = not_shown(remote, &source.node);
                    error.peer_lock = Some(PeerLock::ByCommit);
                    return Err(error);
                }
                ask_of_commits = deadline;
            }
            if !inquiry.may_wait() {
                return Err(not_shown(remote, &source.node));
            }
        }
    }

    /// Converts an answer, by the stream's columns. `written_at` is the time of the transaction
    /// that is applied; `None` if the answer does not show it yet, and so is no later state.
    fn entered(
        &mut self,
        key: Key,
        gaps: &[usize],
        mut row: Vec<Option<Vec<u8>>>,
        written_at: Option<i64>,
    ) -> Result<Entered, PgError> {
        let is_exact = written_at.is_none_or(|at| is_written_at(&row, at));
        row.pop();
        self.attempt.counts.fetched += gaps.len() as u64;
        let columns = &self.tables.plan(key)?.columns;
        let places = gaps.iter().filter_map(|place| columns.get(*place));
        let answers = places.map(|column| column.remote).zip(row).collect();
        Ok(Entered::Values { answers, is_exact })
    }
}

/// Whether the transaction of this time (Unix microseconds) has written a row last, by an answer
/// that ends with [`WRITTEN_AT`].
pub(super) fn is_written_at(row: &[Option<Vec<u8>>], timestamp: i64) -> bool {
    let time = row.last().and_then(Option::as_deref);
    time == Some(timestamp.to_string().as_bytes())
}

/// Returns the error for a provider that no longer has the table with these columns.
fn changed_at_provider(remote: &RemoteRelation) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!(
            "the provider has no table \"{}\" with the columns of a row that has entered its row filter",
            remote.qualified_name()
        ),
    )
    .with_detail("The row came without large values, which are read from the provider's table.")
    .with_hint(
        "If the table or a column was renamed at the provider, rename it back and run braid.enable_subscription. Otherwise leave this \
         transaction out with braid.skip_transaction, and copy the table anew with braid.resync_table.",
    )
}

/// Returns the error for a provider that does not show a state that it has sent. The transaction is
/// applied again.
fn not_shown(remote: &RemoteRelation, node: &str) -> PgError {
    PgError::new(
        SqlState::SerializationFailure,
        format!(
            "node \"{node}\" does not show a row of table \"{}\" that has entered its row filter",
            remote.qualified_name()
        ),
    )
    .with_detail("The row came without large values, which are read from the provider's table.")
    .with_hint("The transaction may wait there for a synchronous standby. It is tried again.")
}
