//! Writing rows. Run by the appliers.
//!
//! Into plain tables directly, through the table access method and `ExecInsertIndexTuples`: what
//! the executor's functions do for them, without locking a row first that is then written anyway.
//! Into others through the executor's own functions: triggers, generated columns, constraints.

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

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is done.
    Done,
    /// Nothing is written: the row was changed or deleted since it was found without a lock. To be
    /// looked for again.
    Changed,
}

/// A write by the executor's functions.
#[derive(Debug)]
enum Write<'s> {
    /// Of the row in the new slot.
    Insert,
    /// Of the row in the local slot, to that in the new one.
    Update,
    /// Of the row in this slot.
    Delete(&'s Slot),
    /// None: triggers are fired.
    BeforeTruncate,
    /// None: triggers are fired.
    AfterTruncate,
}

/// A write into a plain table.
#[derive(Debug)]
enum PlainWrite<'s> {
    /// Of the row in the new slot.
    Insert,
    /// Of the rows in these slots.
    InsertMany(
        &'s mut [*mut pg_sys::TupleTableSlot],
        *mut pg_sys::BulkInsertStateData,
    ),
    /// Of the row in the local slot, to that in the new one.
    Update,
    /// Of the row in this slot.
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

    /// Put a new row into the slot: what the stream gives, and defaults for what it lacks.
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

    /// The value of a column, from 0, of the row in the new slot; `None` for null.
    pub(super) fn new_value(&self, column: usize) -> Option<pg_sys::Datum> {
        self.new_slot.value(column)
    }

    /// The value of a column, from 0, of the row that was found, copied to the current memory
    /// context; `None` for null.
    pub(super) fn copied_value(&self, column: usize) -> Option<pg_sys::Datum> {
        self.local_slot.copy_value(column)
    }

    /// Put the found row with new values into the slot.
    pub fn prepare_update(&mut self, values: &RowValues) {
        self.fill_with(&self.new_slot, values, |column| {
            self.local_slot.value(column)
        });
    }

    /// Have the row in the new slot, which is about to be written, what is generated in it.
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

    /// Calls one of the executor's functions that work on many rows, in memory that lives as long
    /// as the executor state. PostgreSQL looks up triggers' functions once for all rows, in the
    /// current context, and keeps there what a call of them caches (`fn_extra`). For single rows
    /// these functions have memory of their own.
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
                // What plain tables wrote before is visible to triggers too.
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

    /// Has the new slot own the row that was written. Where a trigger has put another one there,
    /// its values are in the memory of the row, which goes before the slot is looked at again.
    fn keep_written(&self) {
        if !self.has_triggers {
            return;
        }
        self.new_slot.materialize();
    }

    /// Make sure that the user whom this process works as may write the table so. Raises 42501 if
    /// not, as COPY into it does.
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
        // Nothing here looks at policies, so it must not be a way around them.
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

    /// Writes into a plain table, under one guard. What was written becomes visible to what follows
    /// in this transaction.
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

    /// Insert the row in the new slot.
    pub fn insert(&mut self) {
        self.check_right(pg_sys::ACL_INSERT);
        if self.is_plain() {
            self.write_plain(PlainWrite::Insert);
            self.note_place();
        } else {
            self.execute(&Write::Insert);
        }
    }

    /// Insert the rows in these virtual slots into a plain table.
    pub(super) fn write_many(&mut self, slots: &[Slot]) {
        self.check_right(pg_sys::ACL_INSERT);
        let state = self.bulk_state();
        let mut rows: Vec<*mut pg_sys::TupleTableSlot> = slots.iter().map(Slot::as_ptr).collect();
        self.write_plain(PlainWrite::InsertMany(&mut rows, state));
    }

    /// Where rows were inserted last, and the buffers that are used for it.
    fn bulk_state(&mut self) -> *mut pg_sys::BulkInsertStateData {
        *self.bulk_state.get_or_insert_with(|| {
            // The state lives as long as the transaction, whose end frees or forgets it.
            memory::in_top_transaction(plain::GetBulkInsertState)
        })
    }

    /// Let go of the page that rows were inserted into last.
    pub(super) fn end_bulk(&mut self) {
        if let Some(state) = self.bulk_state.take() {
            // SAFETY: made in this transaction, and taken once.
            unsafe { pg_sys::FreeBulkInsertState(state) };
        }
    }

    /// Fire the triggers of a TRUNCATE that is carried out row by row.
    pub fn fire_truncate(&mut self, before: bool) {
        if self.has_triggers {
            self.execute(if before {
                &Write::BeforeTruncate
            } else {
                &Write::AfterTruncate
            });
        }
    }

    /// Whether rows may be updated (0) or deleted (1) as far as this node's own publications go.
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

    /// Replace the found row by the one in the new slot.
    ///
    /// # Errors
    /// XX000 for an answer of the table access method that cannot be.
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

    /// The row that was looked for, or made, is where the new slot says.
    fn note_place(&mut self) {
        if let Some(lookup) = self.lookup.as_mut() {
            lookup.note(&self.new_slot);
        }
    }

    /// Delete the found row.
    ///
    /// # Errors
    /// As [`OpenTable::update`].
    pub fn delete(&mut self) -> Result<Written, PgError> {
        let slot = self.local_slot();
        let written = self.delete_row(&slot)?;
        // A trigger may have put another row in its place.
        if written == Written::Done
            && self.is_plain()
            && let Some(lookup) = self.lookup.as_mut()
        {
            lookup.note_deleted(&slot);
        }
        Ok(written)
    }

    /// Delete the row of this table that is in a slot, as it was found.
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
