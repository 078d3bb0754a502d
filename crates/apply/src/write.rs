//! Writing rows. Run by the appliers.
//!
//! Into plain tables directly, through the table access method and `ExecInsertIndexTuples`: what the executor's functions do for
//! them, without locking a row first that is then written anyway. Into others through the executor's own functions:
//! triggers, generated columns, constraints.

use braid_postgres::error::PgError;
use braid_postgres::ffi::{self, raw};
use braid_postgres::{compat, encoding};
use pgrx::pg_sys;

use super::relation::LocalRelation;
use super::table::{OpenTable, RowValues};
use super::user;

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is done.
    Done,
    /// Nothing is written: the row was changed or deleted since it was found without a lock. To be looked for again.
    Changed,
}

impl OpenTable {
    fn prepare_defaults(&mut self, local: &LocalRelation) {
        if self.defaults.is_some() {
            return;
        }
        let mut prepared = Vec::new();
        let share = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
        // SAFETY: the named table is opened and closed here; expressions are built and prepared in the executor state's context, and live
        // as long as it.
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
            // SAFETY: the slot is this table's, and the positions are columns of it.
            unsafe {
                self.fill(self.new_slot, values);
                for (position, value) in given {
                    let datum = value.unwrap_or_else(pg_sys::Datum::null);
                    *(*self.new_slot).tts_values.add(*position) = datum;
                    *(*self.new_slot).tts_isnull.add(*position) = value.is_none();
                }
            }
            return;
        }
        self.prepare_defaults(local);
        // SAFETY: the slot is this table's; expressions were prepared in this executor state.
        unsafe {
            self.fill(self.new_slot, values);
            let context = (*self.estate).es_per_tuple_exprcontext;
            for (position, state) in self.defaults.iter().flatten() {
                let Some(evaluate) = (**state).evalfunc else {
                    continue;
                };
                let mut is_null = false;
                let value = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    evaluate(*state, context, &raw mut is_null)
                });
                *(*self.new_slot).tts_values.add(*position) = value;
                *(*self.new_slot).tts_isnull.add(*position) = is_null;
            }
        }
    }

    /// The value of a column, from 0, of the row in the new slot; `None` for null.
    pub(super) fn new_value(&self, column: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the slot is a virtual one that holds a row; `column` is checked.
        unsafe {
            let natts = (*(*self.new_slot).tts_tupleDescriptor).natts;
            if column >= usize::try_from(natts).unwrap_or(0) {
                return None;
            }
            let is_null = *(*self.new_slot).tts_isnull.add(column);
            (!is_null).then(|| *(*self.new_slot).tts_values.add(column))
        }
    }

    /// The value of a column, from 0, of the row that was found, copied to the current memory context; `None` for null.
    pub(super) fn copied_value(&self, column: usize) -> Option<pg_sys::Datum> {
        let value = self.local_value(column)?;
        // SAFETY: the value is one of this column's type, whose length says where it ends.
        unsafe {
            let attribute = compat::TupleDescAttr((*self.relation).rd_att, column);
            if (*attribute).attbyval {
                return Some(value);
            }
            let from = value.cast_mut_ptr::<std::ffi::c_char>();
            Some(match (*attribute).attlen {
                -1 => pg_sys::Datum::from(pg_sys::pg_detoast_datum_copy(from.cast())),
                -2 => pg_sys::Datum::from(pg_sys::pstrdup(from)),
                length => {
                    let length = usize::try_from(length).unwrap_or(0);
                    let copy = pg_sys::palloc(length).cast::<std::ffi::c_char>();
                    std::ptr::copy_nonoverlapping(from, copy, length);
                    pg_sys::Datum::from(copy)
                }
            })
        }
    }

    /// Put the found row with new values into the slot.
    pub fn prepare_update(&mut self, values: &RowValues) {
        // SAFETY: both slots have the table's shape; the values of the local slot stay valid while it holds the row.
        unsafe {
            let natts = (*(*self.new_slot).tts_tupleDescriptor).natts;
            let wanted = usize::try_from(natts).unwrap_or(0);
            let complete = values.len() >= wanted && values.iter().all(Option::is_some);
            if !complete && i32::from((*self.local_slot).tts_nvalid) < natts {
                pg_sys::slot_getsomeattrs_int(self.local_slot, natts);
            }
            super::clear_slot(self.new_slot);
            for position in 0..wanted {
                let (value, is_null) = match values.get(position).copied().flatten() {
                    Some(Some(value)) => (value, false),
                    Some(None) => (pg_sys::Datum::null(), true),
                    None => (
                        *(*self.local_slot).tts_values.add(position),
                        *(*self.local_slot).tts_isnull.add(position),
                    ),
                };
                *(*self.new_slot).tts_values.add(position) = value;
                *(*self.new_slot).tts_isnull.add(position) = is_null;
            }
            super::store_virtual(self.new_slot);
        }
    }

    /// Have the row in the new slot, which is about to be written, what is generated in it.
    pub(super) fn compute_generated(&mut self, exists: bool) {
        let (target, estate, slot) = (self.target, self.estate, self.new_slot);
        // SAFETY: target, state and slot belong together.
        unsafe {
            let constraints = (*(*self.relation).rd_att).constr;
            if constraints.is_null() || !(*constraints).has_generated_stored {
                return;
            }
            let command = if exists {
                pg_sys::CmdType::CMD_UPDATE
            } else {
                pg_sys::CmdType::CMD_INSERT
            };
            ffi::compute_stored_generated(target, estate, slot, command);
        }
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
        if self.has_triggers {
            // SAFETY: pairs with begin_write.
            self.in_query_memory(|| unsafe { pg_sys::AfterTriggerEndQuery(estate) });
        }
        // SAFETY: the executor state is this transaction's; what was written becomes visible to
        // what follows in it.
        unsafe {
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
        let slot = self.new_slot;
        // SAFETY: the slot is this table's; every kind of slot has the function.
        unsafe {
            if let Some(materialize) = (*(*slot).tts_ops).materialize {
                pg_sys::ffi::pg_guard_ffi_boundary(|| materialize(slot));
            }
        }
    }

    /// Make sure that the user whom this process works as may write the table so. Raises 42501 if not, as COPY into it does.
    fn check_right(&mut self, right: u32) {
        if self.granted & right != 0 {
            return;
        }
        // SAFETY: the relation is open, in a transaction.
        let (is_granted, has_policies) = unsafe { user::rights((*self.relation).rd_id, right) };
        let name = || {
            // SAFETY: as above.
            let (schema, table) = unsafe { encoding::of_relation(self.relation) };
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
            PgError::new("42501", format!("permission denied for table {}", name()))
                .with_hint(&hint)
                .raise();
        }
        // Nothing here looks at policies, so it must not be a way around them.
        if has_policies {
            let message = format!(
                "cannot apply changes to table {}, whose row-level security applies to the role that they are applied as",
                name()
            );
            PgError::new("42501", message)
                .with_hint(
                    "Turn FORCE ROW LEVEL SECURITY off, or let that role bypass row-level security.",
                )
                .raise();
        }
        self.granted |= right;
    }

    /// Insert the row in the new slot.
    pub fn insert(&mut self) {
        self.check_right(pg_sys::ACL_INSERT);
        let (relation, target, estate, slot) =
            (self.relation, self.target, self.estate, self.new_slot);
        if !self.is_plain() {
            self.begin_write();
            // SAFETY: target, state and slot belong together.
            self.in_query_memory(|| unsafe {
                pg_sys::ExecSimpleRelationInsert(target, estate, slot);
            });
            self.keep_written();
            self.note_unchecked(false);
            self.end_write();
            return;
        }
        // SAFETY: as above; a plain table is a heap, whose access method has all functions.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let command = raw::GetCurrentCommandId(true);
                (*estate).es_output_cid = command;
                check_not_null(relation, target, slot, estate);
                if let Some(insert) = (*(*relation).rd_tableam).tuple_insert {
                    insert(relation, slot, command, 0, std::ptr::null_mut());
                }
                compat::insert_index_tuples(target, slot, estate, false, false);
                finish(estate);
            });
        }
        self.note_place();
    }

    /// Insert the rows in these virtual slots into a plain table.
    pub(super) fn write_many(&mut self, slots: &mut [*mut pg_sys::TupleTableSlot]) {
        self.check_right(pg_sys::ACL_INSERT);
        let (relation, target, estate) = (self.relation, self.target, self.estate);
        let state = self.bulk_state();
        let rows = slots.as_mut_ptr();
        let count = slots.len();
        let length = i32::try_from(count).unwrap_or(i32::MAX);
        // SAFETY: as for `insert`; the slots are this table's. The state's buffer is let go of before the transaction ends.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let command = raw::GetCurrentCommandId(true);
                (*estate).es_output_cid = command;
                for position in 0..count {
                    check_not_null(relation, target, *rows.add(position), estate);
                }
                if let Some(insert) = (*(*relation).rd_tableam).multi_insert {
                    insert(relation, rows, length, command, 0, state);
                }
                let context = (*(*estate).es_per_tuple_exprcontext).ecxt_per_tuple_memory;
                for position in 0..count {
                    compat::insert_index_tuples(target, *rows.add(position), estate, false, false);
                    raw::MemoryContextReset(context);
                }
                finish(estate);
            });
        }
    }

    /// Where rows were inserted last, and the buffers that are used for it.
    fn bulk_state(&mut self) -> *mut pg_sys::BulkInsertStateData {
        *self.bulk_state.get_or_insert_with(|| {
            // SAFETY: it lives as long as the transaction, at the end of which it is freed or forgotten.
            unsafe {
                let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
                let state = pg_sys::GetBulkInsertState();
                pg_sys::MemoryContextSwitchTo(before);
                state
            }
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
        if !self.has_triggers {
            return;
        }
        self.begin_write();
        let (estate, target) = (self.estate, self.target);
        // SAFETY: executor state and table belong together; only triggers that fire here do.
        self.in_query_memory(|| unsafe {
            if before {
                pg_sys::ExecBSTruncateTriggers(estate, target);
            } else {
                pg_sys::ExecASTruncateTriggers(estate, target);
            }
        });
        self.end_write();
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
        let (relation, target, estate) = (self.relation, self.target, self.estate);
        let (local, slot) = (self.local_slot, self.new_slot);
        if !self.is_plain() {
            self.begin_write();
            // SAFETY: as for `insert`; the local slot holds the locked row.
            let epq = &raw mut *self.epq;
            self.in_query_memory(|| unsafe {
                pg_sys::ExecSimpleRelationUpdate(target, estate, epq, local, slot);
            });
            self.keep_written();
            self.note_unchecked(true);
            self.end_write();
            return Ok(Written::Done);
        }
        self.check_identity(0);
        let mut failure = pg_sys::TM_FailureData::default();
        let failure = &raw mut failure;
        // SAFETY: as for `insert`; the local slot holds a row of this table.
        let result = unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let command = raw::GetCurrentCommandId(true);
                (*estate).es_output_cid = command;
                check_not_null(relation, target, slot, estate);
                let mut tid = (*local).tts_tid;
                let result = compat::update_tuple_and_indexes(
                    relation,
                    target,
                    estate,
                    &raw mut tid,
                    slot,
                    command,
                    failure,
                );
                finish(estate);
                result
            })
        };
        if result == pg_sys::TM_Result::TM_Ok {
            self.note_place();
        }
        written(result)
    }

    /// The row that was looked for, or made, is where the new slot says.
    fn note_place(&mut self) {
        if let Some(lookup) = self.lookup.as_mut() {
            lookup.note(self.new_slot);
        }
    }

    /// Delete the found row.
    ///
    /// # Errors
    /// As [`OpenTable::update`].
    pub fn delete(&mut self) -> Result<Written, PgError> {
        // SAFETY: the slot is this table's.
        let written = unsafe { self.delete_row(self.local_slot) }?;
        // A trigger may have put another row in its place.
        if written == Written::Done
            && self.is_plain()
            && let Some(lookup) = self.lookup.as_mut()
        {
            lookup.note_deleted(self.local_slot);
        }
        Ok(written)
    }

    /// Delete the row in a slot.
    ///
    /// # Errors
    /// As [`OpenTable::update`].
    ///
    /// # Safety
    /// The slot holds a row of this table, as it was found.
    pub unsafe fn delete_row(
        &mut self,
        local: *mut pg_sys::TupleTableSlot,
    ) -> Result<Written, PgError> {
        self.check_right(pg_sys::ACL_DELETE);
        let (relation, target, estate) = (self.relation, self.target, self.estate);
        if !self.is_plain() {
            self.begin_write();
            // SAFETY: as for `update`.
            let epq = &raw mut *self.epq;
            self.in_query_memory(|| unsafe {
                pg_sys::ExecSimpleRelationDelete(target, estate, epq, local);
            });
            self.end_write();
            return Ok(Written::Done);
        }
        self.check_identity(1);
        let mut failure = pg_sys::TM_FailureData::default();
        let failure = &raw mut failure;
        // SAFETY: as for `update`.
        let result = unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let command = raw::GetCurrentCommandId(true);
                let mut tid = (*local).tts_tid;
                let result = match (*(*relation).rd_tableam).tuple_delete {
                    Some(delete) => delete(
                        relation,
                        &raw mut tid,
                        command,
                        std::ptr::null_mut(),
                        std::ptr::null_mut(),
                        true,
                        failure,
                        false,
                    ),
                    None => pg_sys::TM_Result::TM_Invisible,
                };
                finish(estate);
                result
            })
        };
        written(result)
    }
}

fn written(result: pg_sys::TM_Result::Type) -> Result<Written, PgError> {
    match result {
        pg_sys::TM_Result::TM_Ok => Ok(Written::Done),
        pg_sys::TM_Result::TM_Updated | pg_sys::TM_Result::TM_Deleted => Ok(Written::Changed),
        other => Err(PgError::new(
            "XX000",
            format!("unexpected result {other} of writing a row"),
        )),
    }
}

/// # Safety
/// Under a guard; all belong together.
unsafe fn check_not_null(
    relation: pg_sys::Relation,
    target: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    estate: *mut pg_sys::EState,
) {
    // SAFETY: as the caller says.
    unsafe {
        if !(*(*relation).rd_att).constr.is_null() {
            raw::ExecConstraints(target, slot, estate);
        }
    }
}

/// What was written becomes visible to what follows in this transaction.
///
/// # Safety
/// Under a guard; the state is this transaction's and has its context for rows.
unsafe fn finish(estate: *mut pg_sys::EState) {
    // SAFETY: as the caller says.
    unsafe {
        raw::MemoryContextReset((*(*estate).es_per_tuple_exprcontext).ecxt_per_tuple_memory);
        raw::CommandCounterIncrement();
    }
}
