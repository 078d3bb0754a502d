//! Truncates that arrive after newer removals, in tables without a key (`braid_bgworker::keyless`).
//! Run by the appliers.
//!
//! If such a removal has taken a row that is older than the truncate, that row was gone already. So
//! the removal has no row now. It takes over that of a newer removal, takes one that is in the
//! table, or is recorded as one without a row, like a removal that arrives now and finds none
//! (`removal`).

use std::collections::{HashMap, HashSet};

use braid_bgworker::conflict::Version;
use braid_node::taken_row::{self, Author, Place, TakenRow};
use braid_node::tombstone::Seen;
use braid_postgres::error::PgError;
use braid_postgres::sequential_scan::SequentialScan;
use braid_postgres::{memory, snapshot, transaction};
use pgrx::pg_sys;

use super::change::version;
use super::key_hash::row_hash_by;
use super::removal::{Live, at_the_same_time};
use super::truncate::Emptied;
use super::version::{OriginNames, Stamp, stamp_of};
use super::{Current, Session};

/// Rows in the table, by their hashes: the place and the writer of each.
type Here = HashMap<u64, Vec<(pg_sys::ItemPointerData, Option<Author>)>>;

impl OriginNames {
    fn version_of(&mut self, (timestamp, origin): Author) -> Version<'_> {
        Version {
            timestamp,
            origin: self.node(origin),
        }
    }

    fn is_older(&mut self, author: Option<Author>, than: Author) -> bool {
        let Some(author) = author else {
            return true;
        };
        let name = self.node(than.1).to_owned();
        let than = Version {
            timestamp: than.0,
            origin: &name,
        };
        self.version_of(author) < than
    }
}

impl Session {
    /// Frees the removals that the current transaction's truncate leaves without a row. The
    /// truncated tables are locked and open. The records of all tables are read once.
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
        if !self.tables.is_keyless(table.key)
            || !self.tables.target(table.key)?.plan.rules.go_by_versions()
        {
            return Ok(());
        }
        if current.unsettled {
            return Err(self.hints.wait_for_commit(
                "It truncates a table from which newer transactions have taken out rows.",
            ));
        }
        let hashes = freed.iter().map(|(taken, _)| (taken.hash, Vec::new()));
        let mut here = self.rows_here(table, current, hashes.collect())?;
        // All first, so that no removal takes over a row of another freed one.
        for (taken, place) in &freed {
            if !self
                .removals()
                .forget_taken(table.key, taken.hash, *place)?
            {
                return Err(at_the_same_time());
            }
        }
        let mut deleted = false;
        for (taken, _) in freed {
            let chain = self
                .removals()
                .chain(table.key, taken.hash, taken.removal, false)?;
            let Some(chain) = chain else {
                continue;
            };
            let older_than = chain.last();
            let origins = &mut self.origins;
            let row = here.get_mut(&taken.hash).and_then(|rows| {
                let mut authors = rows.iter().map(|(_, author)| *author);
                let found = authors.position(|author| origins.is_older(author, older_than))?;
                Some(rows.swap_remove(found))
            });
            let live = row.map_or(Live::Nothing, |(place, author)| {
                // The table is locked: no other session can change it.
                deleted |= table.relation.view().delete_at(place);
                Live::Gone(author)
            });
            self.removals().hand_on(chain, live)?;
        }
        if deleted {
            snapshot::show_own();
        }
        Ok(())
    }

    /// Returns rows older than the current transaction that newer transactions have removed, by
    /// table, in the order of the removals.
    fn freed_by(
        &mut self,
        tables: &[Emptied],
        current: &Current,
    ) -> Result<HashMap<u32, Vec<(TakenRow, Place)>>, PgError> {
        self.deletions().store()?;
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
            let was_before = taken
                .row
                .is_none_or(|row| self.origins.version_of(row) < truncate);
            if was_before && self.origins.version_of(taken.removal) > truncate {
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

    /// Returns the rows with these hashes that are in a table. The table is locked: no other
    /// session can change it.
    fn rows_here(
        &mut self,
        table: &Emptied,
        current: &Current,
        mut here: Here,
    ) -> Result<Here, PgError> {
        let key = table.key;
        let slot = self.tables.open(key)?.local_slot();
        transaction::next_command();
        let relation = table.relation.view();
        let mut rows = memory::in_top_transaction(|| SequentialScan::of_latest(relation, &slot))?;
        let context = self.change_context.context();
        while rows.advance() {
            pgrx::check_for_interrupts!();
            let looked: Result<(), PgError> = context.run(|| {
                let hash = row_hash_by(&self.tables.target(key)?.plan, &slot);
                if let Some(rows) = here.get_mut(&hash) {
                    let stamp = match stamp_of(slot.writer()) {
                        stamp @ Stamp::Known(_, 0) => stamp,
                        stamp => self.refined(key, &slot, stamp)?,
                    };
                    let author = self.removals().author(key, current, stamp)?;
                    rows.push((slot.tid(), author));
                }
                Ok(())
            });
            looked?;
            self.forget_change();
        }
        slot.clear();
        drop(rows);
        Ok(here)
    }
}
