//! One attempt at a transaction, by how long its parts live. Run by the appliers.
//!
//! | value | lives |
//! |---|---|
//! | [`Attempt`] | from the begin of a local transaction to its commit or rollback; dropped whole |
//! | [`RetryHints`] | from an attempt that was rolled back to the next attempt at the transaction |
//! | [`Piece`] | from the commit of a piece of a transaction to the begin of the next piece |
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

/// The local transaction in hand, and the source's transaction that it is for.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    pub(super) current: Option<Current>,
    /// Version of the row that the change in hand, or the next one, has replaced at its node: Unix
    /// microseconds and node.
    pub(super) replaced: Option<(i64, String)>,
    /// Image of the former key of the row that the current change, or the next one, inserts.
    pub(super) former_key: Option<Vec<u8>>,
    /// Values that the provider was asked for, of the row that the current change inserts.
    pub(super) answers: Option<Answers>,
    /// Some values of the row that the current change inserts may be another row's.
    pub(super) is_unverified: bool,
    /// The newest timestamp of the batch in hand.
    pub(super) newest: i64,
    /// Tables that it has open.
    pub(super) open: Vec<Key>,
    /// A table that it has open is not plain.
    pub(super) has_rules: bool,
    /// The table that has values for the row that the change in hand inserts.
    pub(super) given_to: Option<Key>,
    pub(super) user: UserSwitch,
    /// Rows that are written together later.
    pub(super) held: Held,
    /// Versions of its rows, as far as its commit does not tell them.
    pub(super) written: WrittenVersions,
    /// Rows that are not written because of others, as far as the other nodes are not told of them.
    pub(super) kept_out: KeptOut,
    /// Rows have left within this attempt only: it is rolled back at its end, and they leave before
    /// the next one.
    pub(super) is_to_be_repeated: bool,
    /// Rows that have left so, of which a change ends the attempt: hashes of their keys.
    pub(super) left_for_now: HashSet<u64>,
    /// Rows that met others under deferrable constraints, of tables that are closed meanwhile.
    pub(super) unchecked: Vec<(Key, Unchecked)>,
    /// Hashes of the rows that functions were asked about.
    pub(super) asked_about: Vec<u64>,
    /// Removals that are not written down yet.
    pub(super) removals: HeldRemovals,
    /// Rows added to tables without a key.
    pub(super) added: Added,
    /// Tables that it has emptied, to be counted.
    pub(super) truncated: Vec<u32>,
    pub(super) counts: Counts,
    /// Its conflicts.
    pub(super) tally: Tally,
}

impl Attempt {
    /// An attempt that knows nothing yet, with memory to use.
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

    /// Forgets what came with a change, or was asked about it.
    pub(super) fn forget_told(&mut self) {
        self.replaced = None;
        self.former_key = None;
        self.answers = None;
        self.is_unverified = false;
    }

    /// The end of it. Returns the open tables, the counts and the truncated tables; `buffers` gets
    /// the memory.
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

    /// Write down what is held back.
    pub(super) fn store_removals(&mut self) -> Result<(), PgError> {
        let is_unsettled = self.current.as_ref().is_some_and(|now| now.unsettled);
        self.removals.store(is_unsettled)
    }

    /// Whether the source's transaction runs at the provider.
    pub(super) fn runs(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.runs)
    }

    /// Time of the source's transaction, in Unix microseconds; 0 for none.
    pub(super) fn timestamp(&self) -> i64 {
        self.current.as_ref().map_or(0, |current| current.timestamp)
    }
}

/// Memory that one attempt leaves for the next.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) open: Vec<Key>,
    held: Held,
    removals: HeldRemovals,
    added: Added,
}

/// The next attempt at a transaction starts with these.
#[derive(Debug, Default)]
pub(super) struct RetryHints {
    /// Rows that are equal under further unique keys are looked for before each write.
    pub(super) check_other_keys: bool,
    /// Rows that are to leave before it.
    pub(super) evictions: Vec<Eviction>,
    /// Calls of conflict functions that are to be made before it.
    pub(super) calls: Vec<Call>,
    /// Rows of the transaction that is committed at this position, by their hashes, of which the
    /// others were told that they are dead.
    pub(super) displaced: (u64, HashSet<u64>),
    /// Why the transaction, which was to be prepared, can't be.
    pub(super) waits_for_commit: Option<&'static str>,
}

impl RetryHints {
    /// The transaction in hand can't be prepared: its meeting with a row is to be decided once it
    /// has committed.
    pub(super) fn wait_for_commit(&mut self, reason: &'static str) -> PgError {
        self.waits_for_commit = Some(reason);
        PgError::new(
            SqlState::SerializationFailure,
            "a transaction is not applied before it has committed",
        )
        .with_detail(reason)
    }

    /// Another transaction begins: nothing has to leave or to be called for it.
    pub(super) fn forget_preparations(&mut self) {
        self.evictions.clear();
        self.forget_calls();
    }

    /// Forget calls that were to be made.
    pub(super) fn forget_calls(&mut self) {
        std::mem::take(&mut self.calls)
            .into_iter()
            .for_each(merge::free);
    }
}

/// State of a transaction between two of its pieces.
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
