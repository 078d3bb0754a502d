//! Chains of removals of identical rows: which removal takes over the row of another one, and which
//! one is left without a row. Run by the appliers.

use braid_bgworker::conflict::Version;
use braid_bgworker::keyless::{Taken, handed_on, hands_up_to};
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::execute_counting;
use braid_node::taken_row::{self, Author, Place, TakenRow};
use braid_node::tombstone::{self, Seen};
use braid_postgres::error::PgError;
use braid_postgres::{memory, snapshot};

use super::{Removals, Without};
use crate::attempt::Attempt;
use crate::target::Key;
use crate::version::OriginNames;

/// Row that was found for the last removal of a chain.
pub(crate) enum Live {
    Nothing,
    /// A row, which was deleted, and its author.
    Gone(Option<Author>),
    Changed,
}

/// Records about identical rows that are not in the table.
#[derive(Debug, Clone, Default)]
pub(super) struct Alike {
    /// Removals that have found no row.
    pub(super) removals: Vec<Author>,
    /// Rows that were removed, and the places of their records.
    taken: Vec<(TakenRow, Place)>,
}

impl Alike {
    /// Reads the records about rows with this hash, including those of the current transaction.
    pub(super) fn read(hash: u64, seen: Seen) -> Result<Self, PgError> {
        snapshot::show_own();
        memory::in_transaction(|| {
            let mut taken = Vec::new();
            let removals = tombstone::find_all(hash, seen)?;
            taken_row::each(Some(hash), seen, |row, place| taken.push((row, place)))?;
            Ok(Self { removals, taken })
        })
    }

    /// Removes a removal from those that have found no row.
    pub(super) fn forget(&mut self, removal: Author) {
        if let Some(place) = self.removals.iter().position(|one| *one == removal) {
            self.removals.swap_remove(place);
        }
    }

    /// Adds a row that was just removed.
    fn take(&mut self, taken: TakenRow) {
        self.taken.push((taken, (0, 0)));
    }

    /// Whether both have the same records, in any places.
    fn says_the_same_as(&self, other: &Self) -> bool {
        let removals = |alike: &Self| {
            let mut removals = alike.removals.clone();
            removals.sort_unstable();
            removals
        };
        let taken = |alike: &Self| {
            let mut taken: Vec<TakenRow> = alike.taken.iter().map(|(taken, _)| *taken).collect();
            taken.sort_unstable();
            taken
        };
        removals(self) == removals(other) && taken(self) == taken(other)
    }
}

pub(super) fn named<'n>(((timestamp, _), origin): (Author, &'n str)) -> Version<'n> {
    Version { timestamp, origin }
}

pub(crate) fn at_the_same_time() -> PgError {
    PgError::new(
        SqlState::SerializationFailure,
        "another transaction has deleted identical rows of a table without a key at the same time",
    )
}

impl OriginNames {
    /// As [`handed_on`], for stored rows.
    fn hands(&mut self, taken: &[TakenRow], removal: Author) -> Vec<usize> {
        self.with_versions(taken, removal, handed_on)
    }

    /// As [`hands_up_to`], for stored rows.
    fn up_to(&mut self, taken: &[TakenRow], hands: &mut Vec<usize>, row: Option<Author>) {
        let count = self.with_versions(taken, row.unwrap_or((0, 0)), |taken, version| {
            hands_up_to(taken, hands, row.map(|_| version))
        });
        hands.truncate(count);
    }

    /// Calls a rule with versions that are made of the stored rows.
    fn with_versions<T>(
        &mut self,
        taken: &[TakenRow],
        other: Author,
        work: impl FnOnce(&[Taken<'_>], Version<'_>) -> T,
    ) -> T {
        let mut name = |(_, origin): Author| self.node(origin).to_owned();
        let names: Vec<(Option<String>, String)> = taken
            .iter()
            .map(|taken| (taken.row.map(&mut name), name(taken.removal)))
            .collect();
        let other_name = name(other);
        let versions: Vec<Taken<'_>> = taken
            .iter()
            .zip(&names)
            .map(|(taken, (row, removal))| Taken {
                row: taken.row.zip(row.as_deref()).map(named),
                removal: named((taken.removal, removal)),
            })
            .collect();
        work(&versions, named((other, &other_name)))
    }
}

/// Removals of identical rows, each of which takes over the row of the next one.
pub(crate) struct Chain {
    key: Key,
    hash: u64,
    /// The removal that has no row.
    removal: Author,
    /// Whether that removal is recorded as one without a row.
    is_remembered: bool,
    alike: Alike,
    /// Rows that were removed.
    taken: Vec<TakenRow>,
    /// Positions in `taken` of the rows that are taken over, in order.
    hands: Vec<usize>,
}

impl Chain {
    /// Returns the last removal of the chain, which is left without a row.
    pub(crate) fn last(&self) -> Author {
        let last = self.hands.last().and_then(|place| self.taken.get(*place));
        last.map_or(self.removal, |taken| taken.removal)
    }
}

impl Removals<'_> {
    /// Returns the chain of a removal that has no row: it takes over the row of a newer removal,
    /// which takes over that of another one, and so on. Returns `None` if it finds none, and is
    /// recorded already (`is_remembered`).
    pub(crate) fn chain(
        &mut self,
        key: Key,
        hash: u64,
        removal: Author,
        is_remembered: bool,
    ) -> Result<Option<Chain>, PgError> {
        self.deletions.store()?;
        let alike = Alike::read(hash, Seen::Committed)?;
        let taken: Vec<TakenRow> = alike.taken.iter().map(|(taken, _)| *taken).collect();
        let hands = self.deletions.origins.hands(&taken, removal);
        if hands.is_empty() && is_remembered {
            self.check_alone(key, hash, &alike)?;
            return Ok(None);
        }
        let current = self.deletions.attempt.current.as_ref();
        if current.is_some_and(|now| now.unsettled) {
            let reason = "It takes out a row that a newer transaction has taken out.";
            return Err(self.deletions.hints.wait_for_commit(reason));
        }
        Ok(Some(Chain {
            key,
            hash,
            removal,
            is_remembered,
            alike,
            taken,
            hands,
        }))
    }

    /// Carries out a chain. Its last removal gets the row that was found for it; if there is none,
    /// it is recorded as one without a row.
    pub(crate) fn hand_on(&mut self, mut chain: Chain, live: Live) -> Result<Without, PgError> {
        let Chain {
            key, hash, removal, ..
        } = chain;
        let last = chain.last();
        if chain.is_remembered {
            self.spend(key, hash, removal)?;
            chain.alike.forget(removal);
        }
        let outcome = match live {
            Live::Changed => return Ok(Without::Changed),
            Live::Gone(row) => {
                let origins = &mut self.deletions.origins;
                origins.up_to(&chain.taken, &mut chain.hands, row);
                let last = chain.last();
                let attempt = &mut self.deletions.attempt;
                attempt.write_taken(key, hash, &mut chain.alike, row, last);
                Without::Served
            }
            Live::Nothing => {
                self.deletions.record_tombstone(key, hash, last)?;
                chain.alike.removals.push(last);
                Without::Remembered
            }
        };
        let mut to = removal;
        for place in chain.hands {
            let Some((before, at)) = chain.alike.taken.get(place).copied() else {
                continue;
            };
            if !self.forget_taken(key, hash, at)? {
                return Err(at_the_same_time());
            }
            if let Some(one) = chain.alike.taken.get_mut(place) {
                one.0.removal = to;
            }
            self.deletions.attempt.note_taken(key, hash, before.row, to);
            to = before.removal;
        }
        self.check_alone(key, hash, &chain.alike)?;
        Ok(outcome)
    }

    /// Fails with 40001 if another transaction has changed the records of these identical rows.
    /// Called after this transaction has written its own records: of two concurrent transactions at
    /// least one sees the other. `expected` is what was read before, with this transaction's
    /// changes.
    pub(super) fn check_alone(
        &mut self,
        key: Key,
        hash: u64,
        expected: &Alike,
    ) -> Result<(), PgError> {
        self.deletions.store()?;
        let now = Alike::read(hash, Seen::All)?;
        self.deletions.rights().take_owners(key);
        if now.says_the_same_as(expected) {
            return Ok(());
        }
        Err(at_the_same_time())
    }

    /// Removes the record of a removal that has found no row.
    pub(super) fn spend(
        &mut self,
        key: Key,
        hash: u64,
        (timestamp, origin): Author,
    ) -> Result<(), PgError> {
        let spent = self.deletions.rights().with_own(key, || execute_counting(
            "delete from braid.tombstone where ctid = (select ctid from braid.tombstone \
             where key_hash = $1 and (deleted_at = $2 or deleted_at = 0) and origin_id = $3 order by deleted_at desc limit 1 for update)",
            &[
                hash.cast_signed().into(),
                timestamp.into(),
                i32::from(origin).into(),
            ],
        ))?;
        if spent == 0 {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "a removal counted for another row at the same time",
            ));
        }
        Ok(())
    }

    pub(crate) fn forget_taken(
        &mut self,
        key: Key,
        hash: u64,
        place: Place,
    ) -> Result<bool, PgError> {
        let forget = || taken_row::forget(hash, place);
        self.deletions.rights().with_own(key, forget)
    }
}

/// Rows that the current transaction removes.
impl Attempt {
    pub(super) fn write_taken(
        &mut self,
        key: Key,
        hash: u64,
        alike: &mut Alike,
        row: Option<Author>,
        removal: Author,
    ) {
        if self.note_taken(key, hash, row, removal) {
            alike.take(TakenRow {
                hash,
                relation: key.1,
                row,
                removal,
            });
        }
    }

    /// Notes that a removal has taken a row. Not if the same transaction has added the row: no
    /// other session has seen it. Returns whether it was noted.
    pub(super) fn note_taken(
        &mut self,
        key: Key,
        hash: u64,
        row: Option<Author>,
        removal: Author,
    ) -> bool {
        let counts = row != Some(removal);
        if counts {
            self.removals.take(TakenRow {
                hash,
                relation: key.1,
                row,
                removal,
            });
        }
        counts
    }
}
