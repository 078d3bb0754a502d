//! A truncate that comes after newer removals, in tables without a key (`braid_bgworker::keyless`). Run by the appliers.
//!
//! What such a removal has taken was gone already, as a row that is older than the truncate. So it has none, and gets that of a newer removal, or one
//! that is here, or is remembered, like one that comes now and finds none (`removal`).

use std::collections::{HashMap, HashSet};

use braid_bgworker::conflict::Version;
use braid_node::taken_row::{self, Author, Place, TakenRow};
use braid_node::tombstone::Seen;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

use super::change::version;
use super::key_hash::row_hash_by;
use super::lookup::writer;
use super::removal::{Live, at_the_same_time};
use super::truncate::Emptied;
use super::version::{Stamp, stamp_of};
use super::{Current, Session, scan};

/// Rows that are here, by their hashes: where each is, and who wrote it.
type Here = HashMap<u64, Vec<(pg_sys::ItemPointerData, Option<Author>)>>;

impl Session {
    /// The transaction in hand has emptied tables, which are locked and open. What was taken out of them is read once for all.
    pub(super) fn free_removals(
        &mut self,
        tables: &[Emptied],
        current: &Current,
    ) -> Result<(), PgError> {
        let mut freed = self.freed_by(tables, current)?;
        for table in tables {
            if let Some(freed) = freed.remove(&table.key.1) {
                self.free_removals_of(table, freed, current)?;
            }
        }
        Ok(())
    }

    fn free_removals_of(
        &mut self,
        table: &Emptied,
        freed: Vec<(TakenRow, Place)>,
        current: &Current,
    ) -> Result<(), PgError> {
        self.open_emptied(table)?;
        if !self.is_keyless(table.key) || !self.target(table.key)?.plan.rules.go_by_versions() {
            return Ok(());
        }
        if current.unsettled {
            return Err(self.wait_for_commit(
                "It truncates a table from which newer transactions have taken out rows.",
            ));
        }
        let hashes = freed.iter().map(|(taken, _)| (taken.hash, Vec::new()));
        let mut here = self.rows_here(table, current, hashes.collect())?;
        // First all, so that none gets what another one had.
        for (taken, place) in &freed {
            if !self.forget_taken(table.key, taken.hash, *place)? {
                return Err(at_the_same_time());
            }
        }
        let mut deleted = false;
        for (taken, _) in freed {
            let mut take = |session: &mut Self, older_than: Author| {
                let rows = here.get_mut(&taken.hash);
                let Some(rows) = rows else {
                    return Ok(Live::Nothing);
                };
                let found = rows
                    .iter()
                    .position(|(_, author)| session.is_older(*author, older_than));
                let Some(found) = found else {
                    return Ok(Live::Nothing);
                };
                let (mut place, author) = rows.swap_remove(found);
                deleted = true;
                // SAFETY: a row of the table, which nobody else can change.
                unsafe { pg_sys::simple_heap_delete(table.relation, &raw mut place) };
                Ok(Live::Gone(author))
            };
            self.hand_on(table.key, taken.hash, taken.removal, false, &mut take)?;
        }
        if deleted {
            // SAFETY: what was deleted is gone for what follows in this transaction.
            unsafe {
                pg_sys::CommandCounterIncrement();
                pg_sys::UpdateActiveSnapshotCommandId();
            }
        }
        Ok(())
    }

    /// What newer transactions have taken out of tables that is older than the one in hand: by table, in the order in which they did.
    fn freed_by(
        &mut self,
        tables: &[Emptied],
        current: &Current,
    ) -> Result<HashMap<u32, Vec<(TakenRow, Place)>>, PgError> {
        self.store_tombstones()?;
        let heaps: HashSet<u32> = tables
            .iter()
            .filter(|table| table.is_heap)
            .map(|table| table.key.1)
            .collect();
        let mut all = Vec::new();
        taken_row::each(None, Seen::Committed, |taken, place| {
            if heaps.contains(&taken.relation) && taken.removal.0 >= current.timestamp {
                all.push((taken, place));
            }
        })?;
        let mut freed: HashMap<u32, Vec<_>> = HashMap::new();
        for (taken, place) in all {
            let truncate = version(current);
            let was_before = taken.row.is_none_or(|row| self.version_of(row) < truncate);
            if was_before && self.version_of(taken.removal) > truncate {
                freed
                    .entry(taken.relation)
                    .or_default()
                    .push((taken, place));
            }
        }
        for freed in freed.values_mut() {
            freed.sort_unstable_by_key(|(taken, place)| (taken.removal, *place));
        }
        Ok(freed)
    }

    fn version_of(&mut self, (timestamp, origin): Author) -> Version<'_> {
        Version {
            timestamp,
            origin: self.origins.node(origin),
        }
    }

    fn is_older(&mut self, author: Option<Author>, than: Author) -> bool {
        let Some(author) = author else {
            return true;
        };
        let name = self.origins.node(than.1).to_owned();
        let than = Version {
            timestamp: than.0,
            origin: &name,
        };
        self.version_of(author) < than
    }

    /// The rows with these hashes that are in a table which nobody else can change.
    fn rows_here(
        &mut self,
        table: &Emptied,
        current: &Current,
        mut here: Here,
    ) -> Result<Here, PgError> {
        let key = table.key;
        let slot = self.open(key)?.local_slot();
        // SAFETY: the table is open and locked against everybody; the slot is of its kind. The scan ends before its snapshot, and lives in
        // the transaction's context.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
            pg_sys::CommandCounterIncrement();
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let rows = scan::begin(table.relation, snapshot)?;
            pg_sys::MemoryContextSwitchTo(self.change_context);
            while scan::next(table.relation, rows, slot) {
                pgrx::check_for_interrupts!();
                let plan = &self.target(key)?.plan;
                let hash = row_hash_by(plan, slot);
                if let Some(rows) = here.get_mut(&hash) {
                    let stamp = stamp_of(writer(slot));
                    let stamp = match stamp {
                        Stamp::Known(_, 0) => stamp,
                        _ => self.refined(key, slot, stamp)?,
                    };
                    let author = self.author(key, current, stamp)?;
                    rows.push(((*slot).tts_tid, author));
                }
                pg_sys::MemoryContextReset(self.change_context);
            }
            super::clear_slot(slot);
            scan::end(table.relation, rows);
            pg_sys::UnregisterSnapshot(snapshot);
            pg_sys::MemoryContextSwitchTo(before);
        }
        Ok(here)
    }
}
