//! Bulk inserts: consecutive inserts into one plain table are held back for a moment, and written
//! together. Run by the appliers.
//!
//! Writing together saves a WAL record, a buffer lock and a search for a page for each row; and for
//! keys in order, the look-up of each. All keys are looked up before the first row is written. A
//! row that conflicts with another one, or with a newer deletion, is applied alone in the ordinary
//! way. If a session inserts one of the keys in between, that is a unique violation; the
//! transaction is then applied again, row by row.
//!
//! The rows belong to the open transaction, and their table is locked since the first of them came.
//! So its shape, and the decision to hold them back, stay valid. Anything else that the transaction
//! does comes after [`Session::flush`].

use braid_bgworker::conflict::{Action, decide_insert};
use braid_gir::{Change, Operation};
use braid_node::registry;
use braid_postgres::error::PgError;
use braid_postgres::memory::Scratch;
use braid_postgres::slot::Slot;
use pgrx::pg_sys;

use super::change::version;
use super::doing::Step;
use super::key_hash::key_hash;
use super::key_order::{KeyOrder, is_empty_between};
use super::lookup::{Found, Purpose};
use super::route::Effect;
use super::row_context::RowContext;
use super::table::{OpenTable, RowValues};
use super::target::Key;
use super::{Current, Session};

/// Largest number of rows that are held back.
const ROWS: usize = 1000;
/// Bytes of values after which no more rows are held back. A single row may be larger.
const BYTES: usize = 1 << 20;
/// Fewer rows than these are written one by one.
const FEWEST: usize = 4;
/// Number of chunks whose ranges of keys are not looked up, after a range that was not free.
const PAUSE: u32 = 15;

/// A row that is held back.
#[derive(Debug)]
pub struct Row {
    /// Values of the row, in [`Bulk::context`].
    pub values: RowValues,
    /// Index of the row's transaction in [`Held::currents`].
    pub current: usize,
    /// Timestamp of the row's version.
    pub timestamp: i64,
}

/// Rows that an attempt holds back, all of one table.
#[derive(Debug, Default)]
pub struct Held {
    target: Option<(Key, u32)>,
    rows: Vec<Row>,
    bytes: usize,
    currents: Vec<Current>,
}

impl Held {
    /// Returns an empty one that uses the memory of this one.
    pub fn emptied(mut self) -> Self {
        self.rows.clear();
        self.currents.clear();
        Self {
            target: None,
            rows: self.rows,
            bytes: 0,
            currents: self.currents,
        }
    }

    fn is_full(&self) -> bool {
        self.rows.len() >= ROWS || self.bytes >= BYTES
    }
}

/// Switch for bulk inserts, and their memory.
#[derive(Debug)]
pub struct Bulk {
    /// Whether rows may be held back.
    allowed: bool,
    context: Scratch,
    order: Vec<u32>,
}

impl Bulk {
    pub fn new() -> Self {
        Self {
            allowed: false,
            context: Scratch::new(c"braid bulk insert"),
            order: Vec::new(),
        }
    }

    /// Frees the values of rows that were held back.
    pub fn reset(&mut self) {
        // SAFETY: nothing refers to the values any more: they were copied into the table, or are
        // rolled back. Rows that are kept to be used again are filled anew.
        unsafe { self.context.context().reset() };
    }
}

impl Session {
    /// Sets whether rows of the next transaction may be held back and inserted together.
    pub fn allow_bulk(&mut self, allowed: bool) {
        self.bulk.allowed = allowed;
    }

    /// Whether inserts are held back.
    pub(super) fn is_bulk_allowed(&self) -> bool {
        self.bulk.allowed
    }

    /// Drops the rows that are held back: they are rolled back.
    pub(super) fn drop_held(&mut self) {
        let attempt = self.attempt();
        attempt.held = std::mem::take(&mut attempt.held).emptied();
        self.bulk.reset();
    }

    /// Holds an inserted row back, or inserts it.
    pub(super) fn insert_later(&mut self, change: &Change<'_>) -> Result<(), PgError> {
        let schema = change.header.schema.0;
        let held = &self.attempt().held;
        if held.target.is_some_and(|(_, held)| held != schema) {
            self.flush()?;
        }
        let Some((key, remote, current)) = self.prepare(schema, Effect::Write)? else {
            return Ok(());
        };
        let held = &self.attempt().held;
        if held.target.is_some_and(|(held, _)| held != key) {
            self.flush()?;
        }
        let Some(image) = change.after.as_ref().filter(|_| self.takes_bulk(key)) else {
            return {
                let context = RowContext {
                    key,
                    remote: &remote,
                    current: &current,
                };
                self.insert_now(change, schema, context)
            };
        };
        let size = image.size();
        let values = self
            .bulk
            .context
            .context()
            .run(|| self.values(image, key, &remote))?;
        if self.tables.has_gaps(key, &values) {
            return self.insert_alone(change);
        }
        let timestamp = current.timestamp;
        self.hold(key, schema, values, size, current, timestamp);
        if self.attempt().held.is_full() {
            self.flush()?;
        }
        Ok(())
    }

    /// Inserts a row that can't be held back, after those that are.
    fn insert_alone(&mut self, change: &Change<'_>) -> Result<(), PgError> {
        self.flush()?;
        let schema = change.header.schema.0;
        let Some((key, remote, current)) = self.prepare(schema, Effect::Write)? else {
            return Ok(());
        };
        let context = RowContext {
            key,
            remote: &remote,
            current: &current,
        };
        self.insert_entered(change, schema, context)
    }

    fn hold(
        &mut self,
        key: Key,
        schema: u32,
        values: RowValues,
        size: usize,
        current: Current,
        timestamp: i64,
    ) {
        let held = &mut self.attempt().held;
        held.target = Some((key, schema));
        held.bytes += size;
        if held
            .currents
            .last()
            .is_none_or(|last| last.commit_lsn != current.commit_lsn)
        {
            held.currents.push(current);
        }
        held.rows.push(Row {
            values,
            current: held.currents.len() - 1,
            timestamp,
        });
    }

    /// Whether rows of a table can be written together.
    fn takes_bulk(&self, key: Key) -> bool {
        self.tables.get(key).is_some_and(|target| {
            // For a register, the writer of each row is stored.
            !target.plan.column_rules.has_registers()
                && target.table.as_ref().is_some_and(|table| {
                    table.is_plain() && table.has_key() == target.plan.key.is_some()
                })
        })
    }

    /// Writes the rows that are held back.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn flush(&mut self) -> Result<(), PgError> {
        let held = self.attempt.as_mut().map(|attempt| &mut attempt.held);
        let Some((key, schema)) = held.and_then(|held| held.target.take()) else {
            return Ok(());
        };
        let doing = self.doing;
        self.does(Step::Change(Operation::Insert), Some(schema));
        let attempt = self.attempt();
        let Held {
            mut rows, currents, ..
        } = std::mem::take(&mut attempt.held);
        let now = attempt.current.take();
        let remote = self.remote(schema)?;
        self.open_table(schema, &remote, pg_sys::Oid::from(key.1))?;
        self.work_as_owner_of(key);
        self.begin_change();
        let refused = if rows.len() < FEWEST {
            (0..rows.len()).collect()
        } else {
            self.insert_together(key, &rows, &currents)?
        };
        for number in refused {
            let Some(row) = rows.get(number) else {
                continue;
            };
            let current = currents.get(row.current).cloned();
            self.attempt().current.clone_from(&current);
            self.show_versions();
            if let Some(current) = current {
                self.forget_change();
                let context = RowContext {
                    key,
                    remote: &remote,
                    current: &current,
                };
                self.insert(context, &row.values)?;
            }
        }
        self.attempt().current = now;
        self.show_versions();
        self.spare.extend(rows.drain(..).map(|row| row.values));
        self.spare.truncate(2 * ROWS);
        let held = Held {
            rows,
            currents,
            ..Held::default()
        };
        self.attempt().held = held.emptied();
        self.doing = doing;
        self.bulk.reset();
        Ok(())
    }

    /// Writes the rows without conflicts. Returns the numbers of the others, in their order in the
    /// stream.
    fn insert_together(
        &mut self,
        key: Key,
        rows: &[Row],
        currents: &[Current],
    ) -> Result<Vec<usize>, PgError> {
        let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        let mut order = std::mem::take(&mut self.bulk.order);
        order.clear();
        order.extend(0..count);
        let mut refused = Vec::new();
        let all = || rows.iter().map(|row| (&row.values, row.timestamp));
        let has_key = self.tables.target(key)?.plan.key.is_some();
        let may_meet_removal = || {
            rows.iter().any(|row| {
                self.tables
                    .may_meet_removal(key, &row.values, row.timestamp)
            })
        };
        if !has_key && (self.tables.may_meet_tombstone(key, all()) || may_meet_removal()) {
            // The table was truncated by a transaction that may be newer, or one of the rows was
            // removed.
            refused.extend(order.drain(..).map(|number| number as usize));
        } else if has_key
            && (!self.sort_and_probe(key, rows, &mut order)?
                || self.tables.may_meet_tombstone(key, all()))
        {
            let kept = self.look_up_all(key, rows, currents, &order, &mut refused)?;
            order.clear();
            order.extend(kept);
        }
        let written = order.len();
        let (plan, table) = self.tables.opened(key)?;
        let of = |number: &u32| rows.get(*number as usize);
        let slots = table.insert_many(order.iter().filter_map(of).map(|row| &row.values));
        let mut noted = Vec::new();
        for (row, slot) in order.iter().filter_map(of).zip(&slots) {
            noted.push((key_hash(plan, slot), row.timestamp));
        }
        let versions = &mut self.attempt().written;
        for (hash, timestamp) in noted {
            versions.note(hash, timestamp);
            if !has_key && registry::remembers_deletions() {
                versions.note_alike(hash, timestamp);
            }
        }
        let written_rows = || order.iter().filter_map(of);
        if self
            .tables
            .may_meet_tombstone(key, written_rows().map(|row| (&row.values, row.timestamp)))
        {
            for (row, slot) in written_rows().zip(&slots) {
                if let Some(current) = currents.get(row.current) {
                    self.deletions().check_not_deleted(key, current, slot)?;
                }
            }
        }
        if !has_key {
            for row in order.iter().filter_map(of) {
                if let Some(current) = currents.get(row.current) {
                    self.removals()
                        .check_not_removed(key, current, &row.values)?;
                }
                self.removals().note_added(key, &row.values);
            }
        }
        let inserted = written as u64;
        self.count(key, |counts| counts.inserts += inserted);
        drop(slots);
        self.forget_change();
        self.bulk.order = order;
        refused.sort_unstable();
        Ok(refused)
    }

    /// Sorts the rows' numbers in the order of their keys. Returns true if the index has neither a
    /// row nor a dead entry for any of them.
    fn sort_and_probe(
        &mut self,
        key: Key,
        rows: &[Row],
        order: &mut [u32],
    ) -> Result<bool, PgError> {
        let empty = RowValues::new();
        let of = |number: u32| rows.get(number as usize).map_or(&empty, |row| &row.values);
        let (plan, table) = self.tables.opened(key)?;
        let (Some(index), Some(key)) = (table.key_index(), &plan.key) else {
            return Ok(false);
        };
        // SAFETY: the table and its indexes are open.
        let distinct = unsafe { KeyOrder::new(index, key) }.sort(order, of);
        if !distinct {
            return Ok(false);
        }
        if table.unprobed > 0 {
            table.unprobed -= 1;
            return Ok(false);
        }
        let Some(column) = key.columns.first() else {
            return Ok(false);
        };
        let place = usize::try_from(column.attribute - 1).unwrap_or(usize::MAX);
        let first = |number: Option<&u32>| of(*number?).get(place).copied().flatten().flatten();
        // Null comes first.
        let (Some(low), Some(high)) = (first(order.first()), first(order.last())) else {
            return Ok(false);
        };
        // SAFETY: the table and its indexes are open; the values are the column's.
        let free =
            unsafe { is_empty_between(table.relation, index, column.collation, (low, high)) };
        if !free {
            table.unprobed = PAUSE;
        }
        Ok(free)
    }

    /// Looks up the rows' keys, in this order. Returns the numbers of the rows that can be written,
    /// in the same order; the others are added to those that are refused.
    fn look_up_all(
        &mut self,
        key: Key,
        rows: &[Row],
        currents: &[Current],
        order: &[u32],
        refused: &mut Vec<usize>,
    ) -> Result<Vec<u32>, PgError> {
        let mut kept = Vec::with_capacity(order.len());
        let mut shown = usize::MAX;
        let remote = self.remote(key.0)?;
        for number in order {
            let Some(row) = rows.get(*number as usize) else {
                continue;
            };
            let Some(current) = currents.get(row.current) else {
                continue;
            };
            if shown != row.current {
                // Needed to decide whether a version can be trusted.
                self.attempt().current = Some(current.clone());
                self.show_versions();
                shown = row.current;
            }
            let found = self.find(key, &remote, &row.values, (Purpose::Insert, false))?;
            let decision = decide_insert(
                self.origins.local(found),
                version(current),
                current.from_origin,
            );
            let free = matches!(found, Found::Missing(_))
                && decision.action == Action::Apply
                && decision.conflict.is_none();
            if free {
                kept.push(*number);
            } else {
                refused.push(*number as usize);
            }
        }
        Ok(kept)
    }
}

impl OpenTable {
    /// Inserts rows into a plain table, together. Returns slots with the inserted rows, in the
    /// current memory context.
    pub(super) fn insert_many<'a>(
        &mut self,
        rows: impl Iterator<Item = &'a RowValues>,
    ) -> Vec<Slot> {
        let slots: Vec<Slot> = rows
            .map(|values| {
                // SAFETY: the slot is freed with the memory of the change, after its last use.
                let slot = unsafe { Slot::virtual_like(&self.new_slot) };
                self.fill(&slot, values);
                slot
            })
            .collect();
        if !slots.is_empty() {
            self.write_many(&slots);
        }
        slots
    }
}
