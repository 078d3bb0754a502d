//! Writes rows. Run by the appliers.
//!
//! Plain tables are written directly, through the table access method and `ExecInsertIndexTuples`.
//! The executor's functions do the same for them, but lock each row before they write it. Other
//! tables are written through the executor's functions: triggers, generated columns, constraints.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::ffi::{self, raw};
use braid_postgres::lock::LockMode;
use braid_postgres::memory;
use braid_postgres::plain;
use braid_postgres::slot::Slot;
use pgrx::pg_sys;

use super::relation::LocalRelation;
use super::table::{OpenTable, RowValues};
use super::user;

/// Outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// Carried out.
    Done,
    /// Nothing was written: the row was changed or deleted since it was found without a lock. The
    /// caller looks it up again.
    Changed,
}

/// A write by the executor's functions.
#[derive(Debug)]
enum Write<'s> {
    /// The row in the new slot.
    Insert,
    /// The row in the local slot, replaced by the one in the new slot.
    Update,
    /// The row in this slot.
    Delete(&'s Slot),
    /// No row: triggers are fired.
    BeforeTruncate,
    /// No row: triggers are fired.
    AfterTruncate,
}

/// A write into a plain table.
#[derive(Debug)]
enum PlainWrite<'s> {
    /// The row in the new slot.
    Insert,
    /// The rows in these slots.
    InsertMany(
        &'s mut [*mut pg_sys::TupleTableSlot],
        *mut pg_sys::BulkInsertStateData,
    ),
    /// The row in the local slot, replaced by the one in the new slot.
    Update,
    /// The row in this slot.
    Delete(&'s Slot),
}

impl OpenTable {
    fn prepare_defaults(&mut self, local: &LocalRelation) {
        if self.defaults.is_some() {
            return;
        }
        let mut prepared = Vec::new();
        let share = LockMode::AccessShare.as_raw();
        // SAFETY: the named table is opened and closed here; expressions are built and prepared in
        // the executor state's context, and live as long as it.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo((*self.estate).es_query_cxt);
            let root = match local.root {
                Some(root) if !local.defaults.is_empty() => pg_sys::try_relation_open(root, share),
                _ => std::ptr::null_mut(),
            };
            for column in &local.defaults {
                let own = i32::try_from(column.local + 1).unwrap_or(1);
                let (relation, attribute) = if root.is_null() || column.named <= 0 {
                    (self.relation, own)
                } else {
                    (root, i32::from(column.named))
                };
                let expression =
                    pg_sys::build_column_default(relation, attribute).cast::<pg_sys::Expr>();
                if !expression.is_null() {
                    let planned = pg_sys::expression_planner(expression);
                    let state = pg_sys::ExecInitExpr(planned, std::ptr::null_mut());
                    prepared.push((column.local, state));
                }
            }
            if !root.is_null() {
                pg_sys::relation_close(root, 0);
            }
            pg_sys::MemoryContextSwitchTo(before);
        }
        self.defaults = Some(prepared);
    }

    /// Puts a new row into the new slot: values of the stream, and defaults for columns that it
    /// lacks.
    pub fn prepare_insert(&mut self, local: &LocalRelation, values: &RowValues) {
        if let Some(given) = &self.given {
            self.fill_with(&self.new_slot, values, |column| {
                let known = given.iter().find(|(position, _)| *position == column);
                known.and_then(|(_, value)| *value)
            });
            return;
        }
        self.prepare_defaults(local);
        self.fill(&self.new_slot, values);
        // SAFETY: the slot is this table's; expressions were prepared in this executor state.
        unsafe {
            let context = (*self.estate).es_per_tuple_exprcontext;
            for (position, state) in self.defaults.iter().flatten() {
                let Some(evaluate) = (**state).evalfunc else {
                    continue;
                };
                let mut is_null = false;
                let value = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    evaluate(*state, context, &raw mut is_null)
                });
                self.new_slot.set(*position, (!is_null).then_some(value));
            }
        }
    }

    /// Returns the value of a column, from 0, of the row in the new slot; `None` for null.
    pub(super) fn new_value(&self, column: usize) -> Option<pg_sys::Datum> {
        self.new_slot.value(column)
    }

    /// Returns the value of a column, from 0, of the row that was found, copied to the current
    /// memory context; `None` for null.
    pub(super) fn copied_value(&self, column: usize) -> Option<pg_sys::Datum> {
        self.local_slot.copy_value(column)
    }

    /// Puts the row that was found, with new values, into the new slot.
    pub fn prepare_update(&mut self, values: &RowValues) {
        self.fill_with(&self.new_slot, values, |column| {
            self.local_slot.value(column)
        });
    }

    /// Computes the generated columns of the row in the new slot, which is about to be written.
    pub(super) fn compute_generated(&mut self, exists: bool) {
        if !self.relation().descriptor().has_stored_generated() {
            return;
        }
        let (target, estate, slot) = (self.target, self.estate, self.new_slot.as_ptr());
        let command = if exists {
            pg_sys::CmdType::CMD_UPDATE
        } else {
            pg_sys::CmdType::CMD_INSERT
        };
        // SAFETY: target, state and slot belong together.
        unsafe { ffi::compute_stored_generated(target, estate, slot, command) };
    }

    /// Calls one of the executor's functions for many rows, in memory that lives as long as the
    /// executor state. PostgreSQL looks up triggers' functions once for all rows, in the current
    /// context, and keeps in it what a call caches (`fn_extra`). For single rows these functions
    /// have memory of their own.
    fn in_query_memory<T>(&self, work: impl FnOnce() -> T) -> T {
        // SAFETY: the executor state is this transaction's; the caller's context is put back, or,
        // after an error, set by the rollback.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo((*self.estate).es_query_cxt);
            let value = work();
            pg_sys::MemoryContextSwitchTo(before);
            value
        }
    }

    fn begin_write(&self) {
        // SAFETY: the executor state is this transaction's.
        unsafe {
            (*self.estate).es_output_cid = pg_sys::GetCurrentCommandId(true);
            if self.has_triggers {
                // Earlier writes into plain tables are visible to triggers too.
                pg_sys::UpdateActiveSnapshotCommandId();
                pg_sys::AfterTriggerBeginQuery();
            }
        }
    }

    fn end_write(&self) {
        let estate = self.estate;
        // SAFETY: the executor state is this transaction's. The end of a query for triggers pairs
        // with its beginning in `begin_write`. What was written becomes visible to what follows.
        unsafe {
            if self.has_triggers {
                self.in_query_memory(|| pg_sys::AfterTriggerEndQuery(estate));
            }
            let context = (*estate).es_per_tuple_exprcontext;
            if !context.is_null() {
                pg_sys::MemoryContextReset((*context).ecxt_per_tuple_memory);
            }
            pg_sys::CommandCounterIncrement();
            pg_sys::UpdateActiveSnapshotCommandId();
        }
    }

    /// Makes the new slot own the row that was written. If a trigger has put another row into it,
    /// its values are in the memory of the row, which is freed before the slot is read again.
    fn keep_written(&self) {
        if !self.has_triggers {
            return;
        }
        self.new_slot.materialize();
    }

    /// Checks that the user whom this process works as has the right to write the table. Raises
    /// 42501 otherwise, as COPY into it does.
    fn check_right(&mut self, right: u32) {
        if self.granted & right != 0 {
            return;
        }
        let (is_granted, has_policies) = user::rights(self.relation().oid(), right);
        let name = || {
            let (schema, table) = self.relation().qualified_name();
            format!("\"{schema}.{table}\"")
        };
        if !is_granted {
            let word = match right {
                pg_sys::ACL_INSERT => "INSERT",
                pg_sys::ACL_UPDATE => "UPDATE",
                _ => "DELETE",
            };
            let hint =
                format!("Grant {word} on the table to the role that changes are applied as.");
            PgError::new(
                SqlState::InsufficientPrivilege,
                format!("permission denied for table {}", name()),
            )
            .with_hint(&hint)
            .raise();
        }
        // Policies are not evaluated here, so writing must not bypass them.
        if has_policies {
            let message = format!(
                "cannot apply changes to table {}, whose row-level security applies to the role that they are applied as",
                name()
            );
            PgError::new(SqlState::InsufficientPrivilege, message)
                .with_hint(
                    "Turn FORCE ROW LEVEL SECURITY off, or let that role bypass row-level security.",
                )
                .raise();
        }
        self.granted |= right;
    }

    /// Writes as the executor does, with triggers, generated columns and constraints.
    fn execute(&mut self, write: &Write<'_>) {
        self.begin_write();
        let (target, estate) = (self.target, self.estate);
        let (local, slot) = (self.local_slot.as_ptr(), self.new_slot.as_ptr());
        let epq = &raw mut *self.epq;
        // SAFETY: target, state and slots belong together. The local slot, or the given one, holds
        // the locked row that is replaced or deleted. Only triggers that fire here are the
        // target's.
        self.in_query_memory(|| unsafe {
            match write {
                Write::Insert => pg_sys::ExecSimpleRelationInsert(target, estate, slot),
                Write::Update => {
                    pg_sys::ExecSimpleRelationUpdate(target, estate, epq, local, slot);
                }
                Write::Delete(row) => {
                    pg_sys::ExecSimpleRelationDelete(target, estate, epq, row.as_ptr());
                }
                Write::BeforeTruncate => pg_sys::ExecBSTruncateTriggers(estate, target),
                Write::AfterTruncate => pg_sys::ExecASTruncateTriggers(estate, target),
            }
        });
        let exists = matches!(write, Write::Update);
        if exists || matches!(write, Write::Insert) {
            self.keep_written();
            self.note_unchecked(exists);
        }
        self.end_write();
    }

    /// Writes into a plain table, under one guard. Later commands of this transaction see the rows.
    fn write_plain(&mut self, write: PlainWrite<'_>) -> pg_sys::TM_Result::Type {
        let (relation, target, estate) = (self.relation, self.target, self.estate);
        let (local, slot) = (self.local_slot.as_ptr(), self.new_slot.as_ptr());
        let mut failure = pg_sys::TM_FailureData::default();
        let failure = &raw mut failure;
        // SAFETY: target, state and slots belong together; a plain table is a heap, whose access
        // method has all functions. A slot that is given holds a row of the table, and a state of
        // bulk inserts is this transaction's. Nothing with a destructor is on the closure's stack.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let command = raw::GetCurrentCommandId(true);
                (*estate).es_output_cid = command;
                let access = (*relation).rd_tableam;
                let check = |slot| {
                    if !(*(*relation).rd_att).constr.is_null() {
                        raw::ExecConstraints(target, slot, estate);
                    }
                };
                let memory = (*(*estate).es_per_tuple_exprcontext).ecxt_per_tuple_memory;
                let mut result = pg_sys::TM_Result::TM_Ok;
                match write {
                    PlainWrite::Insert => {
                        check(slot);
                        if let Some(insert) = (*access).tuple_insert {
                            insert(relation, slot, command, 0, std::ptr::null_mut());
                        }
                        compat::insert_index_tuples(target, slot, estate, false, false);
                    }
                    PlainWrite::InsertMany(rows, state) => {
                        rows.iter().for_each(|slot| check(*slot));
                        let count = i32::try_from(rows.len()).unwrap_or(i32::MAX);
                        if let Some(insert) = (*access).multi_insert {
                            insert(relation, rows.as_mut_ptr(), count, command, 0, state);
                        }
                        for slot in rows {
                            compat::insert_index_tuples(target, *slot, estate, false, false);
                            raw::MemoryContextReset(memory);
                        }
                    }
                    PlainWrite::Update => {
                        check(slot);
                        let mut tid = (*local).tts_tid;
                        let tid = &raw mut tid;
                        result = compat::update_tuple_and_indexes(
                            relation, target, estate, tid, slot, command, failure,
                        );
                    }
                    PlainWrite::Delete(row) => {
                        let mut tid = (*row.as_ptr()).tts_tid;
                        let tid = &raw mut tid;
                        result = match (*access).tuple_delete {
                            Some(delete) => {
                                compat::delete_tuple(delete, relation, tid, command, failure)
                            }
                            None => pg_sys::TM_Result::TM_Invisible,
                        };
                    }
                }
                raw::MemoryContextReset(memory);
                raw::CommandCounterIncrement();
                result
            })
        }
    }

    /// Inserts the row in the new slot.
    pub fn insert(&mut self) {
        self.check_right(pg_sys::ACL_INSERT);
        if self.is_plain() {
            self.write_plain(PlainWrite::Insert);
            self.note_place();
        } else {
            self.execute(&Write::Insert);
        }
    }

    /// Inserts the rows in these virtual slots into a plain table.
    pub(super) fn write_many(&mut self, slots: &[Slot]) {
        self.check_right(pg_sys::ACL_INSERT);
        let state = self.bulk_state();
        let mut rows: Vec<*mut pg_sys::TupleTableSlot> = slots.iter().map(Slot::as_ptr).collect();
        self.write_plain(PlainWrite::InsertMany(&mut rows, state));
    }

    /// Returns the state of bulk inserts: the place of the last insert, and the buffers that are
    /// used.
    fn bulk_state(&mut self) -> *mut pg_sys::BulkInsertStateData {
        *self.bulk_state.get_or_insert_with(|| {
            // The state lives as long as the transaction, whose end frees or forgets it.
            memory::in_top_transaction(plain::GetBulkInsertState)
        })
    }

    /// Releases the page into which rows were inserted last.
    pub(super) fn end_bulk(&mut self) {
        if let Some(state) = self.bulk_state.take() {
            // SAFETY: made in this transaction, and taken once.
            unsafe { pg_sys::FreeBulkInsertState(state) };
        }
    }

    /// Fires the triggers of a TRUNCATE that is carried out row by row.
    pub fn fire_truncate(&mut self, before: bool) {
        if self.has_triggers {
            self.execute(if before {
                &Write::BeforeTruncate
            } else {
                &Write::AfterTruncate
            });
        }
    }

    /// Checks whether this node's own publications allow rows to be updated (0) or deleted (1).
    fn check_identity(&mut self, command: usize) {
        if let Some(checked) = self.checked.get_mut(command)
            && !*checked
        {
            let kind = if command == 0 {
                pg_sys::CmdType::CMD_UPDATE
            } else {
                pg_sys::CmdType::CMD_DELETE
            };
            // SAFETY: the relation is open; raises an error if not.
            unsafe { pg_sys::CheckCmdReplicaIdentity(self.relation, kind) };
            *checked = true;
        }
    }

    /// Replaces the row that was found by the one in the new slot.
    ///
    /// # Errors
    /// XX000 for an unexpected answer of the table access method.
    pub fn update(&mut self) -> Result<Written, PgError> {
        self.check_right(pg_sys::ACL_UPDATE);
        if !self.is_plain() {
            self.execute(&Write::Update);
            return Ok(Written::Done);
        }
        self.check_identity(0);
        let result = self.write_plain(PlainWrite::Update);
        if result == pg_sys::TM_Result::TM_Ok {
            self.note_place();
        }
        written(result)
    }

    /// Stores the place of the row in the new slot, which was looked up or inserted.
    fn note_place(&mut self) {
        if let Some(lookup) = self.lookup.as_mut() {
            lookup.note(&self.new_slot);
        }
    }

    /// Deletes the row that was found.
    ///
    /// # Errors
    /// As [`OpenTable::update`].
    pub fn delete(&mut self) -> Result<Written, PgError> {
        let slot = self.local_slot();
        let written = self.delete_row(&slot)?;
        // A trigger may have replaced the row.
        if written == Written::Done
            && self.is_plain()
            && let Some(lookup) = self.lookup.as_mut()
        {
            lookup.note_deleted(&slot);
        }
        Ok(written)
    }

    /// Deletes the row of this table that is in a slot, as it was found.
    ///
    /// # Errors
    /// As [`OpenTable::update`].
    pub fn delete_row(&mut self, slot: &Slot) -> Result<Written, PgError> {
        self.check_right(pg_sys::ACL_DELETE);
        if !self.is_plain() {
            self.execute(&Write::Delete(slot));
            return Ok(Written::Done);
        }
        self.check_identity(1);
        let result = self.write_plain(PlainWrite::Delete(slot));
        written(result)
    }
}

fn written(result: pg_sys::TM_Result::Type) -> Result<Written, PgError> {
    match result {
        pg_sys::TM_Result::TM_Ok => Ok(Written::Done),
        pg_sys::TM_Result::TM_Updated | pg_sys::TM_Result::TM_Deleted => Ok(Written::Changed),
        other => Err(PgError::new(
            SqlState::InternalError,
            format!("unexpected result {other} of writing a row"),
        )),
    }
}
