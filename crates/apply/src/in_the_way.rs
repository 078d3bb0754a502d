//! Unique conflicts: local rows that block an incoming one. They are equal to it under a unique
//! index other than the one by which rows are found, or an exclusion constraint keeps the two
//! apart. Run by the appliers.
//!
//! A look-up in each index before every write would be expensive. So a transaction is first written
//! without. If that ends in a violation, it is applied again, this time with the look-ups. A
//! transaction that can't be applied twice (it was too large for the ring) is applied with them at
//! once.
//!
//! The losing row must lose before the transaction is applied again, and on all nodes: `eviction`
//! does that. The attempt that finds such rows goes on without them, and is rolled back at its end,
//! so one attempt finds all.
//!
//! `constraint` finds the rows. Deferrable constraints, under which rows may be equal until the
//! transaction ends, are checked then (`deferred`).

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

/// Whether an error says that a row blocks another.
#[must_use]
pub fn is_in_the_way(sqlstate: SqlState) -> bool {
    matches!(
        sqlstate,
        SqlState::UniqueViolation | SqlState::ExclusionViolation
    )
}

/// Whether a row that is about to be written can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Can be written.
    Clear,
    /// Loses to a blocking row: the row is not written, and the local row with its key is deleted
    /// too.
    Leave,
    /// Is not written; nothing else is changed.
    Stay,
    /// Can be written in this attempt, which is rolled back later: its blocking rows were deleted
    /// within the attempt only.
    ForNow,
}

impl Tables {
    /// Returns the index in which the last look-up found a blocking row.
    pub(super) fn met_index(&self, key: Key, slot: &Slot) -> Option<pg_sys::Oid> {
        let met = &self.get(key)?.table.as_ref()?.met;
        let (_, index) = met.iter().find(|(row, _)| *row == slot.as_ptr())?;
        Some(*index)
    }
}

impl Session {
    /// Sets whether the next transaction looks for blocking rows before each write.
    pub fn look_for_rows_in_the_way(&mut self, look: bool) {
        self.hints.check_other_keys = look;
    }

    /// Looks for rows that block the one in the new slot, which replaces the row that was `found`.
    /// Decides, plans the evictions of losers, and records each conflict.
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

    /// As [`Session::make_way`], for blocking rows that were found already. Clear if there are
    /// none, or if this very transaction wrote one of them.
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
                // This very transaction wrote it: the write itself will report the violation.
                return Ok(Way::Clear);
            }
            let decision = decide_in_the_way(kind, local, context.version());
            let decision = rules
                .resolve(decision, local, context.version())
                .map_err(|kind| refused(kind, remote))?;
            decisions.push((slot, found, decision));
        }
        // The incoming row replaces all blocking rows or none.
        let kept = decisions
            .iter()
            .find(|(_, _, decision)| decision.action == Action::Keep)
            .map(|(_, _, decision)| *decision);
        let new_slot = self.tables.open(key)?.new_slot();
        // The announcement is a deletion. It is only sent if the other nodes decide about it by
        // versions.
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

    /// Records the decision about a local row that blocks the one in `new_slot`.
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

    /// As [`Self::settle`] if this node decides alone: by versions, and at once.
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
                // The write itself will report the violation.
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
                    "a conflicting row was changed at the same time",
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

    /// Asks the conflict function whether the row in the new slot replaces its blocking rows.
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
                // This very transaction wrote it: the write itself will report the violation.
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
        // If rows were deleted within this attempt, their calls are made together with these.
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

    /// Returns the version of a row in a slot, given that of the transaction that wrote it.
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
