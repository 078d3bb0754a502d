//! Tables without a key, in which rows are found by all of their values (`braid_bgworker::keyless`): what was to be taken out and was not here is
//! remembered for the row that it was meant for. Run by the appliers.
//!
//! Such a removal is a row of `braid.tombstone` under the hash of all values that came, and goes like others do when nothing older can come
//! any more. Unlike theirs each counts once: a row that meets one does not come, and takes it away.
//!
//! A removal that has taken a row is a row of `braid.taken_row`. Of one that finds none these say whose row it gets instead, and which removal is left without one
//! then (`hand_on`). What sessions have taken out the collector writes there, so it is waited for first.
//!
//! Two streams may bring a row and its removal at the same time. Who removes writes that down, and then looks for the row once more; who
//! inserts looks at what others are writing down afterwards: one of them sees the other. The same goes for two that change what is written down of
//! identical rows (`check_alone`).

use braid_bgworker::conflict::{Action, Decision, Version, decide_insert};
use braid_bgworker::keyless::{self, Taken, handed_on, hands_up_to};
use braid_node::registry;
use braid_node::subscription::execute_counting;
use braid_node::taken_row::{self, Author, Place, TakenRow};
use braid_node::tombstone::{self, Seen, waiting};
use braid_postgres::error::PgError;
use pgrx::pg_sys;

use super::change::{Key, version};
use super::deletion::session_origin;
use super::key_hash::{RowHash, key_hash, row_hash_by};
use super::lookup::{Found, Purpose};
use super::row_context::RowContext;
use super::table::{OpenTable, RowValues};
use super::version::{Stamp, known};
use super::{Current, Session};

/// Words of 64 bits by which rows are known that a transaction has added.
const ADDED_WORDS: usize = 1024;

/// Rows of tables without a key that the transaction in hand has added, by their hashes: those it may have.
#[derive(Debug, Default)]
pub(super) struct Added {
    bits: Vec<u64>,
    any: bool,
}

impl Added {
    /// A transaction begins.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.any) {
            self.bits.fill(0);
        }
    }

    fn note(&mut self, hash: u64) {
        self.bits.resize(ADDED_WORDS, 0);
        if let Some(word) = self.bits.get_mut(Self::word(hash)) {
            *word |= 1 << (hash % 64);
            self.any = true;
        }
    }

    fn may_have(&self, hash: u64) -> bool {
        let word = self.bits.get(Self::word(hash)).copied();
        self.any && word.unwrap_or(0) & 1 << (hash % 64) != 0
    }

    fn word(hash: u64) -> usize {
        usize::try_from((hash >> 32) % ADDED_WORDS as u64).unwrap_or(0)
    }
}

/// A row that is to come meets a removal which is remembered.
#[derive(Debug)]
pub(super) struct Met {
    hash: u64,
    removal: Author,
    /// What is decided about the row: it stays away.
    pub(super) decision: Decision,
    /// What was known of rows like it.
    alike: Alike,
}

impl Met {
    /// What is known, then, of the row that is to come.
    pub(super) fn found(&self) -> Found {
        found(self.removal)
    }
}

fn found((timestamp, origin): Author) -> Found {
    Found::Missing(Some(known(timestamp, origin)))
}

/// What becomes of a removal that has found no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Without {
    /// It, or the one that has none in its place, is remembered for a row that is to come.
    Remembered,
    /// An identical row is gone for it.
    Served,
    /// A row has come, or changed, meanwhile. Nothing was done.
    Changed,
}

/// What was found for a removal that has lost its row to another one.
pub(super) enum Live {
    Nothing,
    /// A row, which is gone; who had written it.
    Gone(Option<Author>),
    Changed,
}

/// What is known of rows that are identical, and are not here.
#[derive(Debug, Clone, Default)]
struct Alike {
    /// Removals that have found no row.
    removals: Vec<Author>,
    /// Rows that were taken out, and where that is written down.
    taken: Vec<(TakenRow, Place)>,
}

impl Alike {
    /// A removal is not remembered any more.
    fn forget(&mut self, removal: Author) {
        if let Some(place) = self.removals.iter().position(|one| *one == removal) {
            self.removals.swap_remove(place);
        }
    }

    /// A row was taken out just now.
    fn take(&mut self, taken: TakenRow) {
        self.taken.push((taken, (0, 0)));
    }

    /// Whether both say the same, wherever it is written.
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

impl Session {
    /// Whether removals of a table's rows are remembered.
    pub(super) fn is_keyless(&self, key: Key) -> bool {
        self.targets
            .get(&key)
            .is_some_and(|target| target.plan.key.is_none())
            && registry::remembers_deletions()
    }

    /// The hash of all values that came. `None` where the table has a key, or a value is not in the change.
    fn row_hash(&self, key: Key, values: &RowValues) -> Option<u64> {
        let target = self.targets.get(&key)?;
        let table = target.table.as_ref()?;
        if target.plan.key.is_some() {
            return None;
        }
        let mut hash = RowHash::new(target.plan.row_hash);
        for column in &target.plan.columns {
            let value = values.get(column.local).copied().flatten()?;
            // SAFETY: the table is open, and the value is one of the column.
            unsafe {
                let descriptor = (*table.relation()).rd_att;
                hash.feed(column.name_hash, descriptor, column.local, value);
            }
        }
        Some(hash.finish())
    }

    /// A row was added by the transaction in hand.
    pub(super) fn note_added(&mut self, key: Key, values: &RowValues) {
        if self.is_keyless(key)
            && let Some(hash) = self.row_hash(key, values)
        {
            self.attempt().added.note(hash);
        }
    }

    /// Whether the transaction in hand may have added a row with these values to a table without a key.
    pub(super) fn may_have_added(&self, key: Key, values: &RowValues) -> bool {
        let Some(added) = self.attempt.as_ref().map(|attempt| &attempt.added) else {
            return false;
        };
        added.any
            && self.is_keyless(key)
            && self
                .row_hash(key, values)
                .is_some_and(|hash| added.may_have(hash))
    }

    /// Whether a row that is to be inserted may meet a removal.
    pub(super) fn may_meet_removal(&self, key: Key, values: &RowValues, timestamp: i64) -> bool {
        self.may_be_removed(key, values, timestamp).is_some()
    }

    /// The same, with the hash by which that is known.
    fn may_be_removed(&self, key: Key, values: &RowValues, since: i64) -> Option<u64> {
        if !registry::may_have_tombstone_since(since) {
            return None;
        }
        self.row_hash(key, values)
            .filter(|hash| registry::may_have_tombstone(*hash, since))
    }

    /// The row that was found is taken out by the transaction in hand, and is in the local slot. An older removal may come that was to have it.
    pub(super) fn remember_taken(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
    ) -> Result<(), PgError> {
        let Found::Row(stamp) = found else {
            return Ok(());
        };
        if !self.is_keyless(key) || !self.target(key)?.plan.rules.go_by_versions() {
            return Ok(());
        }
        let (plan, table) = self.opened(key)?;
        // SAFETY: the slot holds the row.
        let hash = unsafe { row_hash_by(plan, table.local_slot()) };
        let row = self.author(key, current, stamp)?;
        let removal = (current.timestamp, session_origin());
        self.note_taken(key, hash, row, removal);
        self.hold_back()
    }

    /// Who wrote the row in the local slot, which leaves; `None`: it is older than all.
    pub(super) fn author(
        &mut self,
        key: Key,
        current: &Current,
        stamp: Stamp,
    ) -> Result<Option<Author>, PgError> {
        if !matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
            return Ok(stamp.known());
        }
        let (plan, table) = self.opened(key)?;
        // SAFETY: the slot holds the row.
        let hash = unsafe { key_hash(plan, table.local_slot()) };
        let timestamp = self.attempt().written.take_alike(hash);
        Ok(Some((
            timestamp.unwrap_or(current.timestamp),
            session_origin(),
        )))
    }

    /// A row is taken out by a removal. Of what one transaction adds and takes out itself nobody else has seen anything.
    fn note_taken(&mut self, key: Key, hash: u64, row: Option<Author>, removal: Author) -> bool {
        let counts = row != Some(removal);
        if counts {
            self.attempt().taken.push(TakenRow {
                hash,
                relation: key.1,
                row,
                removal,
            });
        }
        counts
    }

    /// A row is to be taken out of a table without a key, and is not here. Write that down, and look again; then see whose row it gets.
    pub(super) fn remove_without_row(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
    ) -> Result<Without, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        if !self.is_keyless(key) {
            return Ok(Without::Remembered);
        }
        let Some(hash) = self.row_hash(key, old) else {
            return Ok(Without::Remembered);
        };
        let removal = (current.timestamp, session_origin());
        self.record_tombstone(key, hash, removal)?;
        self.store_tombstones()?;
        if matches!(
            self.find_here(key, remote, old, (Purpose::Delete, true))?,
            Found::Row(_)
        ) {
            self.spend(key, hash, removal)?;
            return Ok(Without::Changed);
        }
        if !self.target(key)?.plan.rules.go_by_versions() {
            return Ok(Without::Remembered);
        }
        self.wait_for_sessions()?;
        let mut take =
            |session: &mut Self, older_than: Author| session.take_older(context, old, older_than);
        self.hand_on(key, hash, removal, true, &mut take)
    }

    /// What sessions of this node have taken out of tables without a key is written down when this returns, as far as it was there to be seen.
    pub(super) fn wait_for_sessions(&mut self) -> Result<(), PgError> {
        if waiting::wait_past(braid_postgres::catalog::flush_all()) {
            return Ok(());
        }
        Err(waiting::not_yet(
            "what sessions of this node have taken out of a table without a key is not known yet",
        ))
    }

    /// Take out a row with these values that is older than a removal, of whichever transaction.
    fn take_older(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
        (timestamp, origin): Author,
    ) -> Result<Live, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let as_of = Current {
            timestamp,
            origin: self.origins.node(origin).into(),
            from_origin: false,
            ..current.clone()
        };
        let now = self.attempt().current.replace(as_of);
        let found = self.find_here(key, remote, old, (Purpose::Delete, true));
        self.attempt().current = now;
        let Found::Row(stamp) = found? else {
            return Ok(Live::Nothing);
        };
        if self.open(key)?.delete()? == super::write::Written::Changed {
            return Ok(Live::Changed);
        }
        self.keep_deleted(key, OpenTable::local_slot)?;
        self.count(key, |counts| counts.deletes += 1);
        Ok(Live::Gone(self.author(key, current, stamp)?))
    }

    /// A removal, which is written down if it `is_remembered`, has no row: it gets that of a newer one, which gets another one's, and so on. For the last
    /// `take` takes out an older row, if there is any; else it is the one that is remembered.
    pub(super) fn hand_on(
        &mut self,
        key: Key,
        hash: u64,
        removal: Author,
        is_remembered: bool,
        take: &mut dyn FnMut(&mut Self, Author) -> Result<Live, PgError>,
    ) -> Result<Without, PgError> {
        self.store_tombstones()?;
        let mut alike = self.alike(hash, Seen::Committed)?;
        let taken: Vec<TakenRow> = alike.taken.iter().map(|(taken, _)| *taken).collect();
        let mut hands = self.hands(&taken, removal);
        if hands.is_empty() && is_remembered {
            // And has found no row.
            self.check_alone(key, hash, &alike)?;
            return Ok(Without::Remembered);
        }
        if self.current().is_some_and(|now| now.unsettled) {
            return Err(
                self.wait_for_commit("It takes out a row that a newer transaction has taken out.")
            );
        }
        let last = |hands: &[usize]| {
            let last = hands.last().and_then(|place| taken.get(*place));
            last.map_or(removal, |taken| taken.removal)
        };
        let live = take(self, last(&hands))?;
        if is_remembered {
            self.spend(key, hash, removal)?;
            alike.forget(removal);
        }
        let outcome = match live {
            Live::Changed => return Ok(Without::Changed),
            Live::Gone(row) => {
                self.up_to(&taken, &mut hands, row);
                self.write_taken(key, hash, &mut alike, row, last(&hands));
                Without::Served
            }
            Live::Nothing => {
                self.record_tombstone(key, hash, last(&hands))?;
                alike.removals.push(last(&hands));
                Without::Remembered
            }
        };
        let mut to = removal;
        for place in hands {
            let Some((before, at)) = alike.taken.get(place).copied() else {
                continue;
            };
            if !self.forget_taken(key, hash, at)? {
                return Err(at_the_same_time());
            }
            if let Some(one) = alike.taken.get_mut(place) {
                one.0.removal = to;
            }
            self.note_taken(key, hash, before.row, to);
            to = before.removal;
        }
        self.check_alone(key, hash, &alike)?;
        Ok(outcome)
    }

    /// [`handed_on`], of rows as they are written down.
    fn hands(&mut self, taken: &[TakenRow], removal: Author) -> Vec<usize> {
        self.with_versions(taken, removal, handed_on)
    }

    /// [`hands_up_to`].
    fn up_to(&mut self, taken: &[TakenRow], hands: &mut Vec<usize>, row: Option<Author>) {
        let count = self.with_versions(taken, row.unwrap_or((0, 0)), |taken, version| {
            hands_up_to(taken, hands, row.map(|_| version))
        });
        hands.truncate(count);
    }

    /// Work on versions instead of what is stored of them.
    fn with_versions<T>(
        &mut self,
        taken: &[TakenRow],
        other: Author,
        work: impl FnOnce(&[Taken<'_>], Version<'_>) -> T,
    ) -> T {
        let mut name = |(_, origin): Author| self.origins.node(origin).to_owned();
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

    fn write_taken(
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

    /// The removal that was meant for a row that is to come, if it stays away for that. Unless a rule says otherwise, or it is older than a truncate and does so anyway.
    pub(super) fn removal_of(
        &mut self,
        context: RowContext<'_>,
        row: &RowValues,
    ) -> Result<Option<Met>, PgError> {
        let RowContext { key, current, .. } = context;
        let since = if current.runs { 1 } else { current.timestamp };
        if !self.is_keyless(key) {
            return Ok(None);
        }
        let Some(hash) = self.may_be_removed(key, row, since) else {
            return Ok(None);
        };
        if self.is_truncated_since(key, current)? {
            return Ok(None);
        }
        self.store_tombstones()?;
        let alike = self.alike(hash, Seen::Committed)?;
        if current.runs && !alike.removals.is_empty() {
            return Err(self.wait_for_commit("It brings a row that was to be taken out before."));
        }
        let Some(removal) = self.meant(&alike.removals, current) else {
            return Ok(None);
        };
        let mut decision = self.decide(context, found(removal), decide_insert)?;
        if decision.action == Action::Ask {
            let local = self.local(found(removal));
            decision = decide_insert(local, context.version(), current.from_origin);
        }
        Ok((decision.action == Action::Keep).then_some(Met {
            hash,
            removal,
            decision,
            alike,
        }))
    }

    /// A row does not come, as it has met a removal, which has done then what it was remembered for.
    pub(super) fn stay_away(
        &mut self,
        key: Key,
        current: &Current,
        mut met: Met,
    ) -> Result<(), PgError> {
        self.spend(key, met.hash, met.removal)?;
        met.alike.forget(met.removal);
        let row = Some((current.timestamp, session_origin()));
        self.write_taken(key, met.hash, &mut met.alike, row, met.removal);
        self.check_alone(key, met.hash, &met.alike)
    }

    /// A row without a key was just inserted. Not if another stream has removed it just now: then the transaction is applied again.
    pub(super) fn check_not_removed(
        &mut self,
        key: Key,
        current: &Current,
        row: &RowValues,
    ) -> Result<(), PgError> {
        let Some(hash) = self.may_be_removed(key, row, current.timestamp) else {
            return Ok(());
        };
        let all = self.alike(hash, Seen::All)?.removals;
        let rules = self.target(key)?.plan.rules;
        match self.meant(&all, current) {
            Some(_) if rules.go_by_versions() => Err(PgError::new(
                "40001",
                "row was removed by another subscription's transaction at the same time",
            )),
            _ => Ok(()),
        }
    }

    /// Nobody else changes what is known of identical rows, of which this transaction has written what it has to: then one of two transactions sees the other.
    /// `expected` is what was known before, with what it has changed.
    fn check_alone(&mut self, key: Key, hash: u64, expected: &Alike) -> Result<(), PgError> {
        self.store_tombstones()?;
        let now = self.alike(hash, Seen::All)?;
        self.work_as_owner_of(key);
        if now.says_the_same_as(expected) {
            return Ok(());
        }
        Err(at_the_same_time())
    }

    /// A removal is not remembered any more.
    fn spend(&mut self, key: Key, hash: u64, (timestamp, origin): Author) -> Result<(), PgError> {
        self.work_as_self();
        let spent = execute_counting(
            "delete from braid.tombstone where ctid = (select ctid from braid.tombstone \
             where key_hash = $1 and (deleted_at = $2 or deleted_at = 0) and origin_id = $3 order by deleted_at desc limit 1 for update)",
            &[
                hash.cast_signed().into(),
                timestamp.into(),
                i32::from(origin).into(),
            ],
        )?;
        self.after_statement(key);
        if spent == 0 {
            return Err(PgError::new(
                "40001",
                "a removal counted for another row at the same time",
            ));
        }
        Ok(())
    }

    pub(super) fn forget_taken(
        &mut self,
        key: Key,
        hash: u64,
        place: Place,
    ) -> Result<bool, PgError> {
        self.work_as_self();
        let forgotten = taken_row::forget(hash, place);
        self.after_statement(key);
        forgotten
    }

    /// After a statement of this process's own.
    pub(super) fn after_statement(&mut self, key: Key) {
        self.work_as_owner_of(key);
        // SAFETY: the context lives as long as the process.
        unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
    }

    /// What is known of rows with this hash.
    fn alike(&mut self, hash: u64, seen: Seen) -> Result<Alike, PgError> {
        // SAFETY: in a transaction; what it has written down itself is to be seen.
        let before = unsafe {
            pg_sys::CommandCounterIncrement();
            pg_sys::UpdateActiveSnapshotCommandId();
            pg_sys::MemoryContextSwitchTo(pg_sys::CurTransactionContext)
        };
        let mut taken = Vec::new();
        let found = tombstone::find_all(hash, seen).and_then(|removals| {
            taken_row::each(Some(hash), seen, |row, place| taken.push((row, place)))?;
            Ok(removals)
        });
        // SAFETY: the caller's.
        unsafe { pg_sys::MemoryContextSwitchTo(before) };
        Ok(Alike {
            removals: found?,
            taken,
        })
    }

    fn meant(&mut self, removals: &[Author], current: &Current) -> Option<Author> {
        let names: Vec<String> = removals
            .iter()
            .map(|(_, origin)| self.origins.node(*origin).to_owned())
            .collect();
        let versions: Vec<Version<'_>> = removals
            .iter()
            .zip(&names)
            .map(|(removal, name)| named((*removal, name)))
            .collect();
        let place = keyless::removal_of(&versions, version(current), current.from_origin)?;
        removals.get(place).copied()
    }
}

fn named<'n>(((timestamp, _), origin): (Author, &'n str)) -> Version<'n> {
    Version { timestamp, origin }
}

pub(super) fn at_the_same_time() -> PgError {
    PgError::new(
        "40001",
        "identical rows of a table without a key were taken out by another transaction at the same time",
    )
}
