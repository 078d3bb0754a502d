//! Tables without a key, in which rows are found by all of their values
//! (`braid_bgworker::keyless`): what was to be taken out and was not here is remembered for the row
//! that it was meant for. Run by the appliers.
//!
//! Such a removal is a row of `braid.tombstone` under the hash of all values that came, and goes
//! like others do when nothing older can come any more. Unlike theirs each counts once: a row that
//! meets one does not come, and takes it away.
//!
//! A removal that has taken a row is a row of `braid.taken_row`. Of one that finds none these say
//! whose row it gets instead, and which removal is left without one then (`hand_on`). What sessions
//! have taken out the collector writes there, so it is waited for first.
//!
//! Two streams may bring a row and its removal at the same time. Who removes writes that down, and
//! then looks for the row once more; who inserts looks at what others are writing down afterwards:
//! one of them sees the other. The same goes for two that change what is written down of identical
//! rows (`check_alone`).

mod added;
mod hand_on;

use braid_bgworker::conflict::{Action, Decision, Version, decide_insert};
use braid_bgworker::keyless;
use braid_bgworker::sqlstate::SqlState;
use braid_node::registry;
use braid_node::taken_row::Author;
use braid_node::tombstone::{Seen, waiting};
use braid_postgres::error::PgError;

use crate::change::version;
use crate::deletion::{Deletions, session_origin};
use crate::key_hash::{RowHash, key_hash, row_hash_by};
use crate::lookup::{Found, Purpose};
use crate::row_context::RowContext;
use crate::table::{OpenTable, RowValues};
use crate::target::{Key, Tables};
use crate::version::{OriginNames, Stamp, known};
use crate::write::Written;
use crate::{Current, Session};
use hand_on::{Alike, named};

pub(crate) use added::Added;

pub(crate) use hand_on::{Live, at_the_same_time};

/// A removal that is remembered and meant for a row that is to come.
pub(crate) struct Meant {
    hash: u64,
    removal: Author,
    /// What was known of rows like it.
    alike: Alike,
}

/// A row that is to come meets a removal which is remembered.
pub(crate) struct Met {
    meant: Meant,
    /// The decision about the row: it stays away.
    pub(crate) decision: Decision,
}

impl Met {
    /// What is known, then, of the row that is to come.
    pub(crate) fn found(&self) -> Found {
        found(self.meant.removal)
    }
}

fn found((timestamp, origin): Author) -> Found {
    Found::Missing(Some(known(timestamp, origin)))
}

/// What becomes of a removal that has found no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Without {
    /// It, or the one that has none in its place, is remembered for a row that is to come.
    Remembered,
    /// An identical row is gone for it.
    Served,
    /// A row has come, or changed, meanwhile. Nothing was done.
    Changed,
}

impl Tables {
    /// Whether removals of a table's rows are remembered.
    pub(crate) fn is_keyless(&self, key: Key) -> bool {
        self.get(key)
            .is_some_and(|target| target.plan.key.is_none())
            && registry::remembers_deletions()
    }

    /// The hash of all values that came. `None` where the table has a key, or a value is not in the
    /// change.
    fn row_hash(&self, key: Key, values: &RowValues) -> Option<u64> {
        let target = self.get(key)?;
        let table = target.table.as_ref()?;
        if target.plan.key.is_some() {
            return None;
        }
        let mut hash = RowHash::new(target.plan.row_hash);
        for column in &target.plan.columns {
            hash.feed(column.name_hash, table.cell(values, column.local)?);
        }
        Some(hash.finish())
    }

    /// Whether a row with these values may be among those that were added to a table without a key.
    pub(crate) fn may_be_among(&self, added: &Added, key: Key, values: &RowValues) -> bool {
        added.any
            && self.is_keyless(key)
            && self
                .row_hash(key, values)
                .is_some_and(|hash| added.may_have(hash))
    }

    /// Whether a row that is to be inserted may meet a removal.
    pub(crate) fn may_meet_removal(&self, key: Key, values: &RowValues, timestamp: i64) -> bool {
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
}

/// Waits until the rows that sessions of this node have taken out of tables without a key are
/// written down, as far as they could be seen when it began.
pub(crate) fn wait_for_sessions() -> Result<(), PgError> {
    if waiting::wait_past(braid_postgres::catalog::flush_all()) {
        return Ok(());
    }
    Err(waiting::not_yet(
        "what sessions of this node have taken out of a table without a key is not known yet",
    ))
}

impl OriginNames {
    fn meant(&mut self, removals: &[Author], current: &Current) -> Option<Author> {
        let names: Vec<String> = removals
            .iter()
            .map(|(_, origin)| self.node(*origin).to_owned())
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

/// Removals of rows without a key, by the transaction in hand and by those before it: what they
/// need of a session.
pub(crate) struct Removals<'s> {
    deletions: Deletions<'s>,
}

impl Removals<'_> {
    /// A row was added by the transaction in hand.
    pub(crate) fn note_added(&mut self, key: Key, values: &RowValues) {
        let Deletions {
            tables, attempt, ..
        } = &mut self.deletions;
        if tables.is_keyless(key)
            && let Some(hash) = tables.row_hash(key, values)
        {
            attempt.added.note(hash);
        }
    }

    /// The row that was found is taken out by the transaction in hand, and is in the local slot. An
    /// older removal may come that was to have it.
    pub(crate) fn remember_taken(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
    ) -> Result<(), PgError> {
        let Found::Row(stamp) = found else {
            return Ok(());
        };
        let tables = self.deletions.tables;
        if !tables.is_keyless(key) || !tables.plan(key)?.rules.go_by_versions() {
            return Ok(());
        }
        let (plan, table) = tables.opened_at(key)?;
        let hash = row_hash_by(plan, &table.local_slot());
        let row = self.author(key, current, stamp)?;
        let removal = (current.timestamp, session_origin());
        self.deletions.attempt.note_taken(key, hash, row, removal);
        self.deletions.hold_back()
    }

    /// Who wrote the row in the local slot, which leaves; `None`: it is older than all.
    pub(crate) fn author(
        &mut self,
        key: Key,
        current: &Current,
        stamp: Stamp,
    ) -> Result<Option<Author>, PgError> {
        if !matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
            return Ok(stamp.known());
        }
        let (plan, table) = self.deletions.tables.opened_at(key)?;
        let hash = key_hash(plan, &table.local_slot());
        let timestamp = self.deletions.attempt.written.take_alike(hash);
        Ok(Some((
            timestamp.unwrap_or(current.timestamp),
            session_origin(),
        )))
    }

    /// The removal that is meant for a row that is to come, unless the row is older than a truncate
    /// and stays away anyway.
    fn meant_for(
        &mut self,
        key: Key,
        current: &Current,
        row: &RowValues,
    ) -> Result<Option<Meant>, PgError> {
        let since = if current.runs { 1 } else { current.timestamp };
        let tables = self.deletions.tables;
        if !tables.is_keyless(key) {
            return Ok(None);
        }
        let Some(hash) = tables.may_be_removed(key, row, since) else {
            return Ok(None);
        };
        if self.deletions.is_truncated_since(key, current)? {
            return Ok(None);
        }
        self.deletions.store()?;
        let alike = Alike::read(hash, Seen::Committed)?;
        if current.runs && !alike.removals.is_empty() {
            let reason = "It brings a row that was to be taken out before.";
            return Err(self.deletions.hints.wait_for_commit(reason));
        }
        let removal = self.deletions.origins.meant(&alike.removals, current);
        Ok(removal.map(|removal| Meant {
            hash,
            removal,
            alike,
        }))
    }

    /// A row does not come, as it has met a removal, which has done then what it was remembered
    /// for.
    pub(crate) fn stay_away(
        &mut self,
        key: Key,
        current: &Current,
        met: Met,
    ) -> Result<(), PgError> {
        let Meant {
            hash,
            removal,
            mut alike,
        } = met.meant;
        self.spend(key, hash, removal)?;
        alike.forget(removal);
        let row = Some((current.timestamp, session_origin()));
        let attempt = &mut self.deletions.attempt;
        attempt.write_taken(key, hash, &mut alike, row, removal);
        self.check_alone(key, hash, &alike)
    }

    /// A row without a key was just inserted. Not if another stream has removed it just now: then
    /// the transaction is applied again.
    pub(crate) fn check_not_removed(
        &mut self,
        key: Key,
        current: &Current,
        row: &RowValues,
    ) -> Result<(), PgError> {
        let tables = self.deletions.tables;
        let Some(hash) = tables.may_be_removed(key, row, current.timestamp) else {
            return Ok(());
        };
        let all = Alike::read(hash, Seen::All)?.removals;
        let rules = tables.plan(key)?.rules;
        match self.deletions.origins.meant(&all, current) {
            Some(_) if rules.go_by_versions() => Err(PgError::new(
                SqlState::SerializationFailure,
                "row was removed by another subscription's transaction at the same time",
            )),
            _ => Ok(()),
        }
    }
}

impl Session {
    /// Removals of rows without a key.
    pub(crate) fn removals(&mut self) -> Removals<'_> {
        Removals {
            deletions: self.deletions(),
        }
    }

    /// A row is to be taken out of a table without a key, and is not here. Write that down, and
    /// look again; then see whose row it gets.
    pub(crate) fn remove_without_row(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
    ) -> Result<Without, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        if !self.tables.is_keyless(key) {
            return Ok(Without::Remembered);
        }
        let Some(hash) = self.tables.row_hash(key, old) else {
            return Ok(Without::Remembered);
        };
        let removal = (current.timestamp, session_origin());
        let mut deletions = self.deletions();
        deletions.record_tombstone(key, hash, removal)?;
        deletions.store()?;
        if matches!(
            self.find_here(key, remote, old, (Purpose::Delete, true))?,
            Found::Row(_)
        ) {
            self.removals().spend(key, hash, removal)?;
            return Ok(Without::Changed);
        }
        if !self.tables.target(key)?.plan.rules.go_by_versions() {
            return Ok(Without::Remembered);
        }
        wait_for_sessions()?;
        let chain = self.removals().chain(key, hash, removal, true)?;
        let Some(chain) = chain else {
            return Ok(Without::Remembered);
        };
        let live = self.take_older(context, old, chain.last())?;
        self.removals().hand_on(chain, live)
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
        if self.tables.open(key)?.delete()? == Written::Changed {
            return Ok(Live::Changed);
        }
        self.deletions().keep_deleted(key, OpenTable::local_slot)?;
        self.count(key, |counts| counts.deletes += 1);
        Ok(Live::Gone(self.removals().author(key, current, stamp)?))
    }

    /// The removal that was meant for a row that is to come, if the row stays away for that. Unless
    /// a rule says otherwise.
    pub(crate) fn removal_of(
        &mut self,
        context: RowContext<'_>,
        row: &RowValues,
    ) -> Result<Option<Met>, PgError> {
        let RowContext { key, current, .. } = context;
        let Some(meant) = self.removals().meant_for(key, current, row)? else {
            return Ok(None);
        };
        let found = found(meant.removal);
        let mut decision = self.decide(context, found, decide_insert)?;
        if decision.action == Action::Ask {
            let local = self.origins.local(found);
            decision = decide_insert(local, context.version(), current.from_origin);
        }
        Ok((decision.action == Action::Keep).then_some(Met { meant, decision }))
    }
}
