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

use braid_node::taken_row::TakenRow;
use braid_node::tombstone::Tombstone;

use super::batch::WrittenVersions;
use super::bulk::Held;
use super::change::Key;
use super::constraint::Unchecked;
use super::eviction::{self, Eviction};
use super::history::Tally;
use super::merge::{self, Call};
use super::removal::Added;
use super::user::UserSwitch;
use super::{Counts, Current};

/// The local transaction in hand, and the source's transaction that it is for.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    pub(super) current: Option<Current>,
    /// Version of the row that the change in hand, or the next one, has replaced at its node: Unix
    /// microseconds and node.
    pub(super) replaced: Option<(i64, String)>,
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
    pub(super) kept_out: Vec<Eviction>,
    /// Rows that met others under deferrable constraints, of tables that are closed meanwhile.
    pub(super) unchecked: Vec<(Key, Unchecked)>,
    /// Hashes of the rows that functions were asked about.
    pub(super) asked_about: Vec<u64>,
    /// Deletions that are not written down yet.
    pub(super) tombstones: Vec<Tombstone>,
    /// Rows taken out of tables without a key that are not written down yet.
    pub(super) taken: Vec<TakenRow>,
    /// How often either was written down.
    pub(super) tombstones_stored: u64,
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
            tombstones: buffers.tombstones,
            taken: buffers.taken,
            added: buffers.added,
            ..Self::default()
        }
    }

    /// The end of it. Returns the open tables, the counts and the truncated tables; `buffers` gets the memory.
    pub(super) fn end(mut self, buffers: &mut Buffers) -> Uncounted {
        eviction::free(std::mem::take(&mut self.kept_out));
        self.tombstones.clear();
        self.taken.clear();
        self.added.clear();
        *buffers = Buffers {
            open: Vec::new(),
            held: self.held.emptied(),
            tombstones: self.tombstones,
            taken: self.taken,
            added: self.added,
        };
        Uncounted {
            counts: self.counts,
            tables: self.open,
            truncated: self.truncated,
        }
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
    tombstones: Vec<Tombstone>,
    taken: Vec<TakenRow>,
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
    pub(super) displaced: (u64, Vec<u64>),
    /// Why the transaction, which was to be prepared, can't be.
    pub(super) waits_for_commit: Option<&'static str>,
}

impl RetryHints {
    /// Another transaction begins: nothing has to leave or to be called for it.
    pub(super) fn forget_preparations(&mut self) {
        eviction::free(std::mem::take(&mut self.evictions));
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
