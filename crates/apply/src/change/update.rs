//! An updated row. Run by the appliers.
//!
//! An update that gives a row another key concerns two keys: the old one, under which the row is
//! looked up, and the new one, which another row may have ([`Room`]).

use std::ops::ControlFlow;

use braid_bgworker::conflict::{
    Action, Decision, Kind, Local, NO_CONFLICT, Version, decide_new_key, decide_update,
};
use braid_gir::ReplicaIdentity;
use braid_postgres::error::PgError;

use super::decision::writes;
use super::incoming::Incoming;
use super::row_change::{RowChange, Sought};
use crate::deletion::session_origin;
use crate::key_hash::KeyHashes;
use crate::lookup::{Found, Purpose};
use crate::querier::{Fetched, Wanted, completed};
use crate::removal::Without;
use crate::row_context::RowContext;
use crate::table::{OpenTable, RowValues};
use crate::target::{Key, Tables};
use crate::write::Written;
use crate::{Current, Session};

/// Row under an updated row's new key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    /// A newer row.
    Taken,
    /// The updated row itself.
    Own,
    /// None, or an older one that was deleted.
    Free,
}

/// An update of one row, and what is found out before it is carried out.
#[derive(Debug)]
struct Update<'v> {
    /// Values that include the row's key.
    old: &'v RowValues,
    after: &'v RowValues,
    /// The row as its writer saw it, if all of it is known.
    before: Option<&'v RowValues>,
    /// Whether the row gets another key.
    moved: bool,
    /// The row under the new key.
    room: Room,
    /// Whether large values are missing because the update left them unchanged.
    incomplete: bool,
    /// Large values that another node has sent.
    answer: Option<Fetched>,
    /// Hashes of the key that the row leaves, until its absence is recorded for other streams.
    left: Option<KeyHashes>,
}

impl Update<'_> {
    /// Returns the row after the update, with the large values that are known; `None` if none are.
    fn whole(&self) -> Option<RowValues> {
        match (self.before, &self.answer) {
            (Some(before), _) => Some(filled_from(self.after, before)),
            (None, Some(Fetched::Columns { values, .. })) => Some(completed(self.after, values)),
            (None, _) => None,
        }
    }
}

impl RowChange for Update<'_> {
    fn sought(&self) -> Sought<'_> {
        let seen = self
            .before
            .map(|before| (Kind::UpdateOriginDiffers, before));
        Sought::new(self.old, Purpose::Change, seen)
    }

    fn decide(local: Local<'_>, version: Version<'_>, from_origin: bool) -> Decision {
        decide_update(local, version, from_origin)
    }

    /// The whole old row is as good as an answer.
    fn may_ask(&self) -> bool {
        self.incomplete && self.before.is_none()
    }

    fn ask(
        &mut self,
        session: &mut Session,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        session.ask_for_gaps(context, self, found, decision)
    }

    fn carry_out(
        &mut self,
        session: &mut Session,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<Written, PgError> {
        session.carry_out_update(context, self, found, decision)
    }
}

/// Returns a row, with missing values taken from the whole old row.
fn filled_from(after: &RowValues, before: &RowValues) -> RowValues {
    let filled = after.iter().zip(before);
    filled.map(|(new, old)| new.or(*old)).collect()
}

impl Tables {
    /// Whether a row with the key of these hashes gets another key by these values. Another form of
    /// the same key is not another key.
    pub(super) fn leaves(&self, key: Key, gone: KeyHashes, after: &RowValues) -> bool {
        self.key_hashes(key, after)
            .is_none_or(|here| here.equal != gone.equal)
    }

    /// Returns `after` with values that a function, or a sum, needs: unchanged large values, which
    /// the whole old row has. Returns `None` if nothing needs them.
    fn filled(&self, key: Key, after: &RowValues, before: &RowValues) -> Option<RowValues> {
        let plan = &self.get(key)?.plan;
        if !(plan.rules.asks() || plan.column_rules.any()) || !self.has_gaps(key, after) {
            return None;
        }
        Some(filled_from(after, before))
    }
}

impl Session {
    /// Applies an update of one row.
    pub(super) fn update(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
        after: &RowValues,
        moved: bool,
    ) -> Result<(), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let before =
            (remote.identity == ReplicaIdentity::Full && !std::ptr::eq(old, after)).then_some(old);
        self.tables.check_before(key, remote, before)?;
        let filled = before.and_then(|before| self.tables.filled(key, after, before));
        let after = filled.as_ref().unwrap_or(after);
        let room = self.room(context, (old, after), moved)?;
        if room == Room::Taken {
            // The row under the new key is newer: this row only leaves its old key.
            return self.delete(context, old);
        }
        let gone = moved.then(|| self.tables.key_hashes(key, old)).flatten();
        let mut update = Update {
            old,
            after,
            before,
            moved,
            room,
            incomplete: self.tables.has_gaps(key, after),
            answer: None,
            left: gone.filter(|gone| self.tables.leaves(key, *gone, after)),
        };
        self.apply_row(context, &mut update)?;
        if !moved {
            return Ok(());
        }
        self.remember_left(key, current, old, update.left)
    }

    /// Asks another node for large values that an update leaves unchanged, if the update is to be
    /// written and the local row may have others. Returns whether the node was asked.
    fn ask_for_gaps(
        &mut self,
        context: RowContext<'_>,
        update: &mut Update<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        let is_wanted = update.may_ask()
            && update.answer.is_none()
            && (writes(decision) || update.moved)
            && !self.origins.knows_rest(found, context.current);
        if is_wanted {
            let wanted = Wanted {
                row: update.after,
                before: (context.key, update.old),
                moved: update.moved,
            };
            update.answer = Some(self.questions().fetch_gaps(context, wanted)?);
        }
        Ok(is_wanted)
    }

    /// Carries out the decision about an update.
    fn carry_out_update(
        &mut self,
        context: RowContext<'_>,
        update: &mut Update<'_>,
        mut found: Found,
        mut decision: Decision,
    ) -> Result<Written, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let (old, after) = (update.old, update.after);
        let missing = matches!(found, Found::Missing(_));
        // A missing row can't be locked. Another stream may be about to insert an older state of it
        // under the old key.
        if missing && update.left.take().is_some() {
            if self.has_come(key, remote, current.timestamp, old)? {
                return Ok(Written::Changed);
            }
            self.pass_on_deletion(key, current, found, old)?;
        }
        let writes = writes(decision);
        if missing && writes && self.tables.is_keyless(key) {
            match self.leave_keyless(context, (old, after))? {
                ControlFlow::Break(written) => return Ok(written),
                ControlFlow::Continue(Some(served)) => (found, decision) = served,
                ControlFlow::Continue(None) => {}
            }
        }
        let foreign = update.incomplete && !self.origins.knows_rest(found, current);
        let whole = (foreign && (writes || update.moved))
            .then(|| update.whole())
            .flatten();
        let row = whole.as_ref().unwrap_or(after);
        let incomplete = self.tables.has_gaps(key, row);
        if missing && writes && incomplete {
            decision.action = Action::Keep;
            decision.reason =
                "the row is not here, and the change does not carry its unchanged large values";
        }
        let incoming = Incoming {
            after: row,
            before: update.before,
            is_insert: false,
        };
        let written = self.write_row(context, found, decision, incoming)?;
        if written == Written::Changed {
            return Ok(written);
        }
        if decision.action == Action::Apply
            && foreign
            && matches!(
                update.answer,
                Some(
                    Fetched::Gone
                        | Fetched::Columns {
                            is_exact: false,
                            ..
                        }
                )
            )
        {
            self.mark_unverified(key, (current.timestamp, session_origin()))?;
        }
        if decision.action != Action::Keep {
            return Ok(written);
        }
        if !update.moved {
            self.settle_late(context, found, decision, (after, old))?;
        }
        if update.room != Room::Free || incomplete || !self.tables.newest_wins(key, decision)? {
            return Ok(written);
        }
        self.write_under_new_key(context, incoming)
    }

    /// Returns what is under the new key of a row that gets another one. In a table without a key,
    /// returns whether the new row was removed before it came.
    fn room(
        &mut self,
        context: RowContext<'_>,
        (old, after): (&RowValues, &RowValues),
        moved: bool,
    ) -> Result<Room, PgError> {
        let RowContext { key, current, .. } = context;
        if moved {
            return self.make_room(context, old, after);
        }
        if !self.tables.is_keyless(context.key) {
            return Ok(Room::Own);
        }
        let Some(met) = self.removal_of(context, after)? else {
            return Ok(Room::Own);
        };
        self.removals().stay_away(key, current, met)?;
        Ok(Room::Taken)
    }

    /// Deletes the row under a row's new key, unless it is newer.
    fn make_room(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
        after: &RowValues,
    ) -> Result<Room, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let own = match self.find(key, remote, old, (Purpose::Change, true))? {
            Found::Row(_) => Some(self.tables.found_at(key)),
            Found::Missing(_) => None,
        };
        let found = self.find(key, remote, after, (Purpose::Change, true))?;
        if matches!(found, Found::Row(_)) && own == Some(self.tables.found_at(key)) {
            // The keys differ in their bytes only (1.0 and 1.00): a row does not block itself.
            return Ok(Room::Own);
        }
        let decision = self.decide(context, found, decide_new_key)?;
        let exists = matches!(found, Found::Row(_));
        if let (Action::Ask, Some(kind)) = (decision.action, decision.conflict) {
            // The function's result is written over that row; the updated row only leaves its old
            // key.
            self.ask_about_new_key(context, found, kind, after)?;
            return Ok(Room::Taken);
        }
        if decision.conflict.is_some() {
            if let Some(table) = self.tables.target(key)?.table.as_mut()
                && exists
            {
                table.prepare_update(after);
            }
            let rows = self.tables.rows(key, exists, exists.then_some(after))?;
            self.record(context, found, decision, &rows)?;
        }
        if decision.action == Action::Keep {
            self.settle_late(context, found, decision, (after, after))?;
            return Ok(Room::Taken);
        }
        if exists {
            // Locked since it was found, so it has not changed.
            self.tables.open(key)?.delete()?;
            self.note_version(key, current, OpenTable::local_slot);
            self.count(key, |counts| counts.deletes += 1);
        }
        Ok(Room::Free)
    }

    /// Called if the old row of an update is not in a table without a key. Returns how to go on if
    /// another row was removed in its place; otherwise what has become of the update.
    fn leave_keyless(
        &mut self,
        context: RowContext<'_>,
        (old, after): (&RowValues, &RowValues),
    ) -> Result<ControlFlow<Written, Option<(Found, Decision)>>, PgError> {
        let RowContext { key, current, .. } = context;
        let served = match self.remove_without_row(context, old)? {
            Without::Changed => return Ok(ControlFlow::Break(Written::Changed)),
            // Treated as if it had been found.
            Without::Served => Some((Found::Missing(None), NO_CONFLICT)),
            Without::Remembered => None,
        };
        // A removal that is left without a row now may be newer than this change, and the new row
        // identical.
        match self.removal_of(context, after)? {
            Some(met) => {
                self.removals().stay_away(key, current, met)?;
                Ok(ControlFlow::Break(Written::Done))
            }
            None => Ok(ControlFlow::Continue(served)),
        }
    }

    /// Writes the row under its new key, although a newer change has deleted or moved the row under
    /// its old key: that says nothing about the new key.
    fn write_under_new_key(
        &mut self,
        context: RowContext<'_>,
        incoming: Incoming<'_>,
    ) -> Result<Written, PgError> {
        let nothing = Found::Missing(None);
        let incoming = Incoming {
            is_insert: true,
            ..incoming
        };
        self.write_row(context, nothing, NO_CONFLICT, incoming)
    }

    /// Records that the row with the key of these values got another key, or another form of the
    /// same: it has left the key with the hashes `left`. So an older change can't bring it back
    /// under that key, and the time of a whole batch can't keep out a newer row.
    fn remember_left(
        &mut self,
        key: Key,
        current: &Current,
        old: &RowValues,
        left: Option<KeyHashes>,
    ) -> Result<(), PgError> {
        if let Some(left) = left.filter(|_| self.tables.remembers(key)) {
            self.deletions()
                .record_tombstones(key, left, (current.timestamp, session_origin()))?;
        }
        if let Some(hash) = self.tables.stored_key_hash(key, old) {
            self.attempt().written.note_gone(hash, current.timestamp);
        }
        Ok(())
    }
}
