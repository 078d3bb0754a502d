//! Rows in the way of one that is about to be written: equal to it under a unique index other than
//! that by which rows are found, or kept apart from it by an exclusion constraint. Run by the
//! appliers.
//!
//! To look for them before every write would cost a look-up for each index. So a transaction is
//! written as though there were none; when that ends in a violation, it is applied once more, and
//! then they are looked for. One that can't be applied twice (it was too large to be held) looks
//! for them at once.
//!
//! Whoever loses does so before the transaction is applied once more, and on all nodes: `eviction`
//! sees to that. The attempt that meets such rows goes on without them, and is rolled back at its
//! end: one attempt finds all of them.
//!
//! Which rows those are `constraint` says. Deferrable constraints, where rows may be equal until
//! the transaction ends, are looked at then (`deferred`).

use braid_bgworker::conflict::{Action, Decision, Kind, Local, decide_in_the_way};
use braid_bgworker::merge::Answer;
use braid_bgworker::resolution::Resolution;
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::slot::Slot;
use pgrx::pg_sys;

use super::Session;
use super::change::{Rows, refused};
use super::constraint::Checked;
use super::copied::{self, Told};
use super::eviction::Loser;
use super::key_hash::key_hash;
use super::lookup::Found;
use super::merge::ConflictInput;
use super::row_context::RowContext;
use super::target::{Key, Tables};
use super::version::Stamp;
use super::write::Written;

/// Whether an error says that a row is in the way of another.
#[must_use]
pub fn is_in_the_way(sqlstate: SqlState) -> bool {
    matches!(
        sqlstate,
        SqlState::UniqueViolation | SqlState::ExclusionViolation
    )
}

/// What becomes of a row that is about to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// It can be written.
    Clear,
    /// It can't stay beside one that does: it is not written, and what stands under its key leaves
    /// too.
    Leave,
    /// It is not written, and that is all.
    Stay,
    /// It can be written in this attempt, which is to be rolled back: what was in its way has left
    /// within the attempt only.
    ForNow,
}

impl Tables {
    /// The index in which a row was met that was last found in the way.
    pub(super) fn met_index(&self, key: Key, slot: &Slot) -> Option<pg_sys::Oid> {
        let met = &self.get(key)?.table.as_ref()?.met;
        let (_, index) = met.iter().find(|(row, _)| *row == slot.as_ptr())?;
        Some(*index)
    }
}

impl Session {
    /// Rows that stand in the way are looked for before each write of the transaction that is begun
    /// next, or not.
    pub fn look_for_rows_in_the_way(&mut self, look: bool) {
        self.hints.check_other_keys = look;
    }

    /// Make way for the row in the new slot, which takes the place of what was `found`, if it wins;
    /// record each conflict.
    pub(super) fn make_way(
        &mut self,
        context: RowContext<'_>,
        found: Found,
    ) -> Result<Way, PgError> {
        let RowContext { key, .. } = context;
        let table = self.tables.open(key)?;
        let exists = matches!(found, Found::Row(_));
        let own = exists.then(|| table.local_slot().tid());
        table.compute_generated(exists);
        let rows = table.in_the_way(own, Checked::AtOnce)?;
        self.settle(context, exists, &rows)
    }

    /// The same, for rows that were found in its way. Clear when there are none, or one that this
    /// very transaction wrote.
    pub(super) fn settle(
        &mut self,
        context: RowContext<'_>,
        exists: bool,
        rows: &[(Slot, Stamp)],
    ) -> Result<Way, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let kind = match (rows.len(), exists) {
            (0, _) => return Ok(Way::Clear),
            (1, false) => Kind::InsertExists,
            (1, true) => Kind::UpdateExists,
            _ => Kind::MultipleUniqueConflicts,
        };
        if self.origins.alone.is_some() {
            return self.settle_alone(context, kind, rows);
        }
        if self.tables.is_asked(key, kind) {
            return self.ask_who_stays(context, kind, rows);
        }
        let rules = self.tables.target(key)?.plan.rules;
        let mut decisions: Vec<(&Slot, Found, Decision)> = Vec::new();
        for (slot, stamp) in rows {
            let found = Found::Row(self.refined(key, slot, *stamp)?);
            let local = self.origins.local(found);
            if matches!(local, Local::Own | Local::OwnMerged(_)) {
                // This very transaction wrote it: the write says what is wrong.
                return Ok(Way::Clear);
            }
            let decision = decide_in_the_way(kind, local, context.version());
            let decision = rules
                .resolve(decision, local, context.version())
                .map_err(|kind| refused(kind, remote))?;
            decisions.push((slot, found, decision));
        }
        // It takes the place of all of them, or of none.
        let kept = decisions
            .iter()
            .find(|(_, _, decision)| decision.action == Action::Keep)
            .map(|(_, _, decision)| *decision);
        let new_slot = self.tables.open(key)?.new_slot();
        // What is told is a deletion, which the versions have to be left to judge.
        let sends_notice = self.tables.remembers(key)
            && rules.of(Kind::UpdateDeleted) == Resolution::LastUpdateWins;
        let Some(kept) = kept else {
            let loser = if sends_notice {
                Loser::Here
            } else {
                Loser::HereAsOwn
            };
            let mut leaving = Vec::with_capacity(decisions.len());
            for (slot, found, decision) in decisions {
                if let Found::Row(stamp) = found {
                    self.plan_eviction(key, current, (slot, stamp), decision, loser)?;
                    leaving.push(slot.clone());
                }
            }
            return self.leave_for_now(context, &leaving, loser);
        };
        let stays = rules.of(kind) == Resolution::KeepLocal;
        let sends_notice = sends_notice && !stays && !self.is_displaced(key, current);
        let mut first = true;
        for (slot, found, decision) in decisions {
            let decision = Decision {
                action: Action::Keep,
                reason: kept.reason,
                ..decision
            };
            if let (true, Found::Row(stamp)) = (sends_notice, found) {
                let loser = Loser::Incoming { first };
                self.plan_eviction(key, current, (slot, stamp), decision, loser)?;
                first = false;
            }
            self.record_met(context, (slot, found), decision, &new_slot)?;
        }
        Ok(if stays { Way::Stay } else { Way::Leave })
    }

    /// Records the decision about a row here that is in the way of the one in `new_slot`.
    fn record_met(
        &mut self,
        context: RowContext<'_>,
        (slot, found): (&Slot, Found),
        decision: Decision,
        new_slot: &Slot,
    ) -> Result<(), PgError> {
        let rows = Rows {
            local: Some(slot.clone()),
            remote: Some(new_slot.clone()),
            given: None,
            index: self.tables.met_index(context.key, slot),
        };
        self.record(context, found, decision, &rows)
    }

    /// Settles as [`Self::settle`] does where this node alone decides: by versions, and at once.
    fn settle_alone(
        &mut self,
        context: RowContext<'_>,
        kind: Kind,
        rows: &[(Slot, Stamp)],
    ) -> Result<Way, PgError> {
        let key = context.key;
        let mut decisions = Vec::with_capacity(rows.len());
        for (slot, stamp) in rows {
            let found = Found::Row(self.refined(key, slot, *stamp)?);
            let local = self.origins.local(found);
            if matches!(local, Local::Own | Local::OwnMerged(_)) {
                // The write says what is wrong.
                return Ok(Way::Clear);
            }
            decisions.push((
                slot,
                found,
                decide_in_the_way(kind, local, context.version()),
            ));
        }
        let kept = decisions
            .iter()
            .find(|(_, _, decision)| decision.action == Action::Keep)
            .map(|(_, _, decision)| decision.reason);
        let new_slot = self.tables.open(key)?.new_slot();
        for (slot, found, decision) in decisions {
            let decision = match kept {
                Some(reason) => Decision {
                    action: Action::Keep,
                    reason,
                    ..decision
                },
                None => decision,
            };
            self.record_met(context, (slot, found), decision, &new_slot)?;
            if kept.is_some() {
                continue;
            }
            if self.tables.open(key)?.delete_row(slot)? == Written::Changed {
                return Err(PgError::new(
                    SqlState::SerializationFailure,
                    "a row in the way was changed meanwhile",
                ));
            }
            self.count(key, |counts| counts.deletes += 1);
        }
        Ok(if kept.is_some() {
            Way::Stay
        } else {
            Way::Clear
        })
    }

    /// Ask the function whether the row in the new slot takes the place of those in its way.
    fn ask_who_stays(
        &mut self,
        context: RowContext<'_>,
        kind: Kind,
        rows: &[(Slot, Stamp)],
    ) -> Result<Way, PgError> {
        let RowContext { key, current, .. } = context;
        let mut found = Vec::with_capacity(rows.len());
        for (slot, stamp) in rows {
            let stamp = self.refined(key, slot, *stamp)?;
            if matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
                // This very transaction wrote it: the write says what is wrong.
                return Ok(Way::Clear);
            }
            found.push((slot, stamp));
        }
        let Some((first, stamp)) = found.first().copied() else {
            return Ok(Way::Clear);
        };
        let others: Vec<_> = found
            .iter()
            .skip(1)
            .map(|(slot, _)| (*slot).clone())
            .collect();
        let new_slot = self.tables.open(key)?.new_slot();
        let meeting = Rows {
            local: Some(first.clone()),
            remote: Some(new_slot.clone()),
            given: None,
            index: None,
        };
        let input = ConflictInput {
            found: Found::Row(stamp),
            kind,
            rows: &meeting,
            before: None,
            in_the_way: true,
            others: &others,
        };
        // Those for rows that have left for now are made with those for these.
        if !self.attempt().is_to_be_repeated {
            self.hints.forget_calls();
        }
        let asked = self.ask(context, input)?;
        let leave = asked.answer == Answer::Remote;
        let decision = Decision {
            action: if leave { Action::Apply } else { Action::Keep },
            conflict: Some(kind),
            reason: if leave {
                "the function takes the remote row"
            } else {
                "the function keeps the local row"
            },
        };
        let mut leaving = Vec::new();
        for (slot, stamp) in found {
            if leave {
                self.plan_eviction(key, current, (slot, stamp), decision, Loser::HereAsOwn)?;
                leaving.push(slot.clone());
                continue;
            }
            let rows = Rows {
                local: Some(slot.clone()),
                remote: Some(new_slot.clone()),
                given: None,
                index: self.tables.met_index(key, slot),
            };
            self.record(context, Found::Row(stamp), decision, &rows)?;
        }
        if leave {
            return self.leave_for_now(context, &leaving, Loser::HereAsOwn);
        }
        Ok(Way::Leave)
    }

    /// The version of a row in a slot, given that of the transaction that wrote it.
    pub(super) fn refined(
        &mut self,
        key: Key,
        slot: &Slot,
        stamp: Stamp,
    ) -> Result<Stamp, PgError> {
        let Self {
            tables,
            known_versions,
            attempt,
            ..
        } = self;
        let written = &attempt.get_or_insert_default().written;
        let Some(target) = tables.get(key) else {
            return Ok(stamp);
        };
        let stamp = match copied::told(&target.plan, slot.writer(), slot, stamp)? {
            Told::ByTransaction(stamp) => stamp,
            Told::Apart(stamp) => return Ok(stamp),
        };
        let hash = || key_hash(&target.plan, slot);
        known_versions.refine(written, slot.writer(), stamp, hash)
    }
}
