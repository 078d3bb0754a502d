//! Counts and records conflicts. Run by the appliers; `history` writes the rows.

use braid_bgworker::concurrency::{Writer, concurrent};
use braid_bgworker::conflict::{Decision, Kind, Version};
use braid_node::settings::{self, ConflictHistory};
use braid_postgres::error::PgError;
use braid_postgres::slot::Slot;
use pgrx::pg_sys;

use super::decision::version;
use crate::lookup::Found;
use crate::row_context::RowContext;
use crate::table::RowValues;
use crate::target::{Key, Tables};
use crate::{Current, Session, Target, history};

/// Slots with the rows of a conflict.
#[derive(Debug, Clone)]
pub(crate) struct Rows<'a> {
    pub(crate) local: Option<Slot>,
    pub(crate) remote: Option<Slot>,
    /// Columns that the change itself carried; the others were filled in. `None`: it carried all.
    pub(crate) given: Option<&'a RowValues>,
    /// The index that has the conflict; `None`: the one by which rows are found.
    pub(crate) index: Option<pg_sys::Oid>,
}

impl Tables {
    /// Returns the row that was found and the one to be written, as far as there are such rows.
    pub(crate) fn rows<'a>(
        &mut self,
        key: Key,
        local: bool,
        given: Option<&'a RowValues>,
    ) -> Result<Rows<'a>, PgError> {
        let table = self.open(key)?;
        Ok(Rows {
            local: local.then(|| table.local_slot()),
            remote: given.map(|_| table.new_slot()),
            given,
            index: None,
        })
    }
}

impl Session {
    /// Counts a conflict, and records it with its rows if the settings ask for that.
    pub(crate) fn record(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        rows: &Rows<'_>,
    ) -> Result<(), PgError> {
        self.record_in_words(context, found, decision, (rows, ""))
    }

    /// As [`Session::record`], with a further explanation.
    pub(super) fn record_in_words(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        (rows, words): (&Rows<'_>, &str),
    ) -> Result<(), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        if decision.conflict == Some(Kind::UpdateDeleted)
            && rows.remote.is_some()
            && self.is_displaced(key, current)
        {
            // Recorded when its deletion was announced.
            return Ok(());
        }
        self.count(key, |counts| counts.conflicts += 1);
        let resolution = match decision.conflict {
            Some(kind) => self.tables.target(key)?.plan.rules.of(kind),
            None => return Ok(()),
        };
        let oid = self.tables.target(key)?.plan.oid;
        self.attempt().tally.add(oid, decision, resolution);
        let history = settings::conflict_history();
        if history == ConflictHistory::Off {
            return Ok(());
        }
        let concurrent = self.is_concurrent(key, current, found, decision)?;
        if history == ConflictHistory::On && concurrent == Some(false) {
            return Ok(());
        }
        let stamp = match found {
            Found::Row(stamp) | Found::Missing(Some(stamp)) => stamp.known(),
            Found::Missing(None) => None,
        };
        let local =
            stamp.map(|(timestamp, origin)| (timestamp, self.origins.node(origin).to_owned()));
        self.work_as_self();
        let entry = history::Entry {
            subscription: &self.identity.subscription,
            decision,
            words,
            resolution,
            local,
            remote: (current.timestamp, &current.origin),
            xid: current.xid,
            lsn: current.commit_lsn,
            concurrent,
            index: rows.index,
        };
        if let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = self.tables.get(key)
        {
            history::record(&entry, remote, plan, table, rows)?;
        }
        self.work_as_owner_of(key);
        // SPI leaves the memory context in which it was called as the current one. This makes sure.
        self.enter_change();
        Ok(())
    }

    /// Returns whether the current change and the row that was found are concurrent; `None` if that
    /// is not known.
    fn is_concurrent(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
        decision: Decision,
    ) -> Result<Option<bool>, PgError> {
        let Some(kind) = decision
            .conflict
            .filter(|_| !current.is_displacement_notice)
        else {
            return Ok(None);
        };
        let by_versions = self.tables.target(key)?.plan.rules.go_by_versions();
        let replaced = self.attempt().replaced.take();
        let writer = Writer {
            version: version(current),
            replaced: replaced.as_ref().map(|(timestamp, origin)| Version {
                timestamp: *timestamp,
                origin,
            }),
            by_versions,
        };
        let concurrent = concurrent(kind, self.origins.local(found), writer);
        self.attempt().replaced = replaced;
        Ok(concurrent)
    }
}
