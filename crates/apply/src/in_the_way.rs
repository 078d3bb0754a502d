//! Rows in the way of one that is about to be written: equal to it under a unique index other than that by which rows are found, or
//! kept apart from it by an exclusion constraint. Run by the appliers.
//!
//! To look for them before every write would cost a look-up for each index. So a transaction is written as though there were none;
//! when that ends in a violation, it is applied once more, and then they are looked for. One that can't be applied twice (it
//! was too large to be held) looks for them at once.
//!
//! Whoever loses does so before the transaction is applied once more, and on all nodes: `eviction` sees to that.
//!
//! Which rows those are `constraint` says. Deferrable constraints, where rows may be equal until the transaction ends, are looked at
//! then (`deferred`).

use braid_bgworker::conflict::{Action, Decision, Kind, Local, decide_in_the_way};
use braid_bgworker::merge::Answer;
use braid_bgworker::resolution::Resolution;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

use super::Session;
use super::change::{Key, Rows, refused};
use super::constraint::Checked;
use super::copied;
use super::eviction::{Loser, to_leave_first};
use super::key_hash::key_hash;
use super::lookup::{Found, LockedRows, writer};
use super::merge::ConflictInput;
use super::row_context::RowContext;
use super::version::Stamp;

/// SQLSTATE unique_violation.
pub(super) const UNIQUE_VIOLATION: &str = "23505";
/// SQLSTATE exclusion_violation.
const EXCLUSION_VIOLATION: &str = "23P01";

/// Whether an error says that a row is in the way of another.
#[must_use]
pub fn is_in_the_way(sqlstate: &str) -> bool {
    matches!(sqlstate, UNIQUE_VIOLATION | EXCLUSION_VIOLATION)
}

/// What becomes of a row that is about to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// It can be written.
    Clear,
    /// It can't stay beside one that does: it is not written, and what stands under its key leaves too.
    Leave,
    /// It is not written, and that is all.
    Stay,
}

/// The rows are not used any more.
pub(super) fn drop_rows(rows: LockedRows) {
    for (slot, _) in rows {
        // SAFETY: made by `find_others`.
        unsafe { pg_sys::ExecDropSingleTupleTableSlot(slot) };
    }
}

impl Session {
    /// Rows that stand in the way are looked for before each write of the transaction that is begun next, or not.
    pub fn look_for_rows_in_the_way(&mut self, look: bool) {
        self.hints.check_other_keys = look;
    }

    /// Make way for the row in the new slot, which takes the place of what was `found`, if it wins; record each conflict.
    pub(super) fn make_way(
        &mut self,
        context: RowContext<'_>,
        found: Found,
    ) -> Result<Way, PgError> {
        let RowContext { key, .. } = context;
        let table = self.open(key)?;
        let exists = matches!(found, Found::Row(_));
        // SAFETY: the local slot holds what was found.
        let own = exists.then(|| unsafe { (*table.local_slot()).tts_tid });
        table.compute_generated(exists);
        let rows = table.in_the_way(own, Checked::AtOnce)?;
        let way = self.settle(context, exists, &rows);
        drop_rows(rows);
        way
    }

    /// The same, for rows that were found in its way. Clear when there are none, or one that this very transaction wrote.
    pub(super) fn settle(
        &mut self,
        context: RowContext<'_>,
        exists: bool,
        rows: &[(*mut pg_sys::TupleTableSlot, Stamp)],
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
        if self.is_asked(key, kind) {
            return self.ask_who_stays(context, kind, rows);
        }
        let rules = self.target(key)?.plan.rules;
        let mut decisions: Vec<(*mut pg_sys::TupleTableSlot, Found, Decision)> = Vec::new();
        for (slot, stamp) in rows {
            // SAFETY: the slot holds a row of the table.
            let found = Found::Row(self.refined(key, *slot, *stamp)?);
            let local = self.local(found);
            if matches!(local, Local::Own | Local::OwnMerged(_)) {
                // This very transaction wrote it: the write says what is wrong.
                return Ok(Way::Clear);
            }
            let decision = decide_in_the_way(kind, local, context.version());
            let decision = rules
                .resolve(decision, local, context.version())
                .map_err(|kind| refused(kind, remote))?;
            decisions.push((*slot, found, decision));
        }
        // It takes the place of all of them, or of none.
        let kept = decisions
            .iter()
            .find(|(_, _, decision)| decision.action == Action::Keep)
            .map(|(_, _, decision)| *decision);
        let new_slot = self.open(key)?.new_slot();
        // What is told is a deletion, which the versions have to be left to judge.
        let sends_notice =
            self.remembers(key) && rules.of(Kind::UpdateDeleted) == Resolution::LastUpdateWins;
        let Some(kept) = kept else {
            let loser = if sends_notice {
                Loser::Here
            } else {
                Loser::HereAsOwn
            };
            for (slot, found, decision) in decisions {
                if let Found::Row(stamp) = found {
                    self.plan_eviction(key, current, (slot, stamp), decision, loser)?;
                }
            }
            return Err(to_leave_first());
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
            let rows = Rows {
                local: Some(slot),
                remote: Some(new_slot),
                given: None,
                index: self.met_index(key, slot),
            };
            self.record(context, found, decision, rows)?;
        }
        Ok(if stays { Way::Stay } else { Way::Leave })
    }

    /// Ask the function whether the row in the new slot takes the place of those in its way.
    fn ask_who_stays(
        &mut self,
        context: RowContext<'_>,
        kind: Kind,
        rows: &[(*mut pg_sys::TupleTableSlot, Stamp)],
    ) -> Result<Way, PgError> {
        let RowContext { key, current, .. } = context;
        let mut found = Vec::with_capacity(rows.len());
        for (slot, stamp) in rows {
            let stamp = self.refined(key, *slot, *stamp)?;
            if matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
                // This very transaction wrote it: the write says what is wrong.
                return Ok(Way::Clear);
            }
            found.push((*slot, stamp));
        }
        let Some((first, stamp)) = found.first().copied() else {
            return Ok(Way::Clear);
        };
        let others: Vec<_> = found.iter().skip(1).map(|(slot, _)| *slot).collect();
        let new_slot = self.open(key)?.new_slot();
        let input = ConflictInput {
            found: Found::Row(stamp),
            kind,
            rows: Rows {
                local: Some(first),
                remote: Some(new_slot),
                given: None,
                index: None,
            },
            before: None,
            in_the_way: true,
            others: &others,
        };
        self.hints.forget_calls();
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
        for (slot, stamp) in found {
            if leave {
                self.plan_eviction(key, current, (slot, stamp), decision, Loser::HereAsOwn)?;
                continue;
            }
            let rows = Rows {
                local: Some(slot),
                remote: Some(new_slot),
                given: None,
                index: self.met_index(key, slot),
            };
            self.record(context, Found::Row(stamp), decision, rows)?;
        }
        if leave {
            return Err(to_leave_first());
        }
        Ok(Way::Leave)
    }

    /// The index in which a row was met that was last found in the way.
    pub(super) fn met_index(
        &self,
        key: Key,
        slot: *mut pg_sys::TupleTableSlot,
    ) -> Option<pg_sys::Oid> {
        let met = &self.targets.get(&key)?.table.as_ref()?.met;
        let (_, index) = met.iter().find(|(row, _)| *row == slot)?;
        Some(*index)
    }

    /// The version of a row in a slot, given that of the transaction that wrote it.
    pub(super) fn refined(
        &mut self,
        key: Key,
        slot: *mut pg_sys::TupleTableSlot,
        stamp: Stamp,
    ) -> Result<Stamp, PgError> {
        let Self {
            targets,
            known_versions,
            attempt,
            ..
        } = self;
        let written = &attempt.get_or_insert_default().written;
        let Some(target) = targets.get(&key) else {
            return Ok(stamp);
        };
        // SAFETY: the slot holds a row of the table, which is open.
        unsafe {
            if stamp == Stamp::Unversioned {
                return copied::refine(&target.plan, writer(slot), slot);
            }
            let hash = || key_hash(&target.plan, slot);
            known_versions.refine(written, writer(slot), stamp, hash)
        }
    }
}
