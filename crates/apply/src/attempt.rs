//! State of one attempt at a transaction, by how long its parts live. Run by the appliers.
//!
//! | value | lives |
//! |---|---|
//! | [`Attempt`] | from the begin of a local transaction to its commit or rollback; dropped whole |
//! | [`RetryHints`] | from an attempt that was rolled back to the next attempt at the transaction |
//! | [`Piece`] | from the commit of a chunk of a transaction to the begin of the next chunk |
//! | [`Uncounted`] | from a commit to its counting |
//! | [`Buffers`] | as long as the session; memory alone, and empty between attempts |
//!
//! Memory contexts are not part of an attempt: the session resets them.

use std::collections::HashSet;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;

use super::batch::WrittenVersions;
use super::bulk::Held;
use super::constraint::Unchecked;
use super::counts::Counts;
use super::eviction::Eviction;
use super::held_removals::HeldRemovals;
use super::history::Tally;
use super::kept_out::KeptOut;
use super::merge::{self, Call};
use super::querier::Answers;
use super::removal::Added;
use super::target::Key;
use super::transaction::Current;
use super::user::UserSwitch;

/// The current local transaction, and the source's transaction that it is for.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    pub(super) current: Option<Current>,
    /// Version of the row that the current change, or the next one, has replaced at its node: Unix
    /// microseconds and node.
    pub(super) replaced: Option<(i64, String)>,
    /// Image of the former key of the row that the current change, or the next one, inserts.
    pub(super) former_key: Option<Vec<u8>>,
    /// Values that the provider sent, when asked, for the row that the current change inserts.
    pub(super) answers: Option<Answers>,
    /// Some values of the row that the current change inserts may be those of another row.
    pub(super) is_unverified: bool,
    /// The newest timestamp of the current batch.
    pub(super) newest: i64,
    /// Tables that the attempt has opened.
    pub(super) open: Vec<Key>,
    /// At least one of them is not plain.
    pub(super) has_rules: bool,
    /// The table whose slot has values for the row that the current change inserts.
    pub(super) given_to: Option<Key>,
    pub(super) user: UserSwitch,
    /// Rows that are written together later.
    pub(super) held: Held,
    /// Versions of rows that the commit's timestamp does not carry.
    pub(super) written: WrittenVersions,
    /// Incoming rows that lose to local ones, and whose deletion is not announced yet.
    pub(super) kept_out: KeptOut,
    /// Rows have been deleted within this attempt only. It is rolled back at its end, and the rows
    /// are deleted for good before the next attempt.
    pub(super) is_to_be_repeated: bool,
    /// Hashes of the keys of such rows. A change of one of them ends the attempt.
    pub(super) left_for_now: HashSet<u64>,
    /// Rows that conflicted under deferrable constraints, of tables that have been closed since.
    pub(super) unchecked: Vec<(Key, Unchecked)>,
    /// Hashes of the rows for which functions were called.
    pub(super) asked_about: Vec<u64>,
    /// Deletions that are not stored yet.
    pub(super) removals: HeldRemovals,
    /// Rows added to tables without a key.
    pub(super) added: Added,
    /// Tables that the attempt has truncated, to be counted.
    pub(super) truncated: Vec<u32>,
    pub(super) counts: Counts,
    /// Conflicts of the attempt, to be counted.
    pub(super) tally: Tally,
}

impl Attempt {
    /// A new attempt that uses the memory of earlier ones.
    pub(super) fn with(buffers: &mut Buffers) -> Self {
        let buffers = std::mem::take(buffers);
        Self {
            open: buffers.open,
            held: buffers.held,
            removals: buffers.removals,
            added: buffers.added,
            ..Self::default()
        }
    }

    /// Forgets what came with a change, and the answers about it.
    pub(super) fn forget_told(&mut self) {
        self.replaced = None;
        self.former_key = None;
        self.answers = None;
        self.is_unverified = false;
    }

    /// Ends the attempt. Returns the open tables, the counts and the truncated tables; `buffers`
    /// gets the memory.
    pub(super) fn end(mut self, buffers: &mut Buffers) -> Uncounted {
        self.kept_out.clear();
        self.added.clear();
        *buffers = Buffers {
            open: Vec::new(),
            held: self.held.emptied(),
            removals: self.removals.emptied(),
            added: self.added,
        };
        Uncounted {
            counts: self.counts,
            tables: self.open,
            truncated: self.truncated,
        }
    }

    /// Stores the deletions that were held back.
    pub(super) fn store_removals(&mut self) -> Result<(), PgError> {
        let is_unsettled = self.current.as_ref().is_some_and(|now| now.unsettled);
        self.removals.store(is_unsettled)
    }

    /// Whether the source's transaction is in progress at the provider.
    pub(super) fn runs(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.runs)
    }

    /// Time of the source's transaction, in Unix microseconds; 0 for none.
    pub(super) fn timestamp(&self) -> i64 {
        self.current.as_ref().map_or(0, |current| current.timestamp)
    }
}

/// Memory that one attempt leaves to the next.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) open: Vec<Key>,
    held: Held,
    removals: HeldRemovals,
    added: Added,
}

/// Hints that the next attempt at a transaction starts with.
#[derive(Debug, Default)]
pub(super) struct RetryHints {
    /// Before each write, look for local rows that are equal under further unique keys.
    pub(super) check_other_keys: bool,
    /// Rows to delete before the attempt.
    pub(super) evictions: Vec<Eviction>,
    /// Calls of conflict functions to make before the attempt.
    pub(super) calls: Vec<Call>,
    /// Incoming rows whose deletion is announced: the commit position of their transaction, and
    /// their hashes.
    pub(super) displaced: (u64, HashSet<u64>),
    /// The reason why the transaction can't be applied before its commit.
    pub(super) waits_for_commit: Option<&'static str>,
}

impl RetryHints {
    /// Returns an error that ends the attempt, because a conflict can only be decided once the
    /// transaction has committed.
    pub(super) fn wait_for_commit(&mut self, reason: &'static str) -> PgError {
        self.waits_for_commit = Some(reason);
        PgError::new(
            SqlState::SerializationFailure,
            "a transaction is not applied before it has committed",
        )
        .with_detail(reason)
    }

    /// Another transaction begins: forgets evictions and calls.
    pub(super) fn forget_preparations(&mut self) {
        self.evictions.clear();
        self.forget_calls();
    }

    /// Forgets calls that were to be made.
    pub(super) fn forget_calls(&mut self) {
        std::mem::take(&mut self.calls)
            .into_iter()
            .for_each(merge::free);
    }
}

/// State of a transaction between two of its chunks.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) current: Option<Current>,
    pub(super) added: Added,
}

/// Results of a committed transaction that the shared counters do not have yet.
#[derive(Debug, Default)]
pub(super) struct Uncounted {
    pub(super) counts: Counts,
    /// Tables whose own counts are to be added.
    pub(super) tables: Vec<Key>,
    pub(super) truncated: Vec<u32>,
}
