//! Calls of conflict functions in transactions of this node, and the records by which their answers
//! are found again. Run by the appliers.

use braid_bgworker::resolution::Function;
use braid_node::origin::{self, OriginId};
use braid_node::subscription::{execute, rows_written};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::memory;
use braid_postgres::value::Value;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use super::ConflictInput;
use super::row_value::{first_bytes, read_as};
use crate::function::{Callee, Writes};
use crate::key_hash::key_hash;
use crate::lookup::Found;
use crate::relation::LocalRelation;
use crate::rights::Rights;
use crate::target::Key;
use crate::{Current, Session};

/// A call to make in a transaction of this node.
#[derive(Debug)]
pub(crate) struct Call {
    pub(super) function: Function,
    /// Arguments, in the process's memory: two rows of the table's type, and others.
    pub(super) arguments: [Option<Value<'static>>; 4],
    pub(super) about: String,
    /// Record to write after the call.
    pub(super) note: Option<Note>,
}

/// Key of a call's record: the two rows of the conflict.
#[derive(Debug, Clone, Copy)]
pub(super) struct Note {
    lsn: u64,
    relation: u32,
    pub(super) hash: u64,
    local: Option<(i64, ReplOriginId)>,
    /// Number of earlier calls for the row in the same transaction: after the first, its version
    /// stays the same.
    times: i64,
}

impl Note {
    /// Returns the arguments of a statement about a record.
    fn arguments(&self, subscription: u32) -> [DatumWithOid<'static>; 7] {
        [
            i64::from(subscription).into(),
            i64::try_from(self.lsn).unwrap_or(i64::MAX).into(),
            i64::from(self.relation).into(),
            self.hash.cast_signed().into(),
            self.local.map(|(timestamp, _)| timestamp).into(),
            self.local.map(|(_, origin)| i64::from(origin)).into(),
            self.times.into(),
        ]
    }
}

/// Frees the memory of a call.
pub(crate) fn free(call: Call) {
    for argument in call.arguments.into_iter().flatten() {
        // SAFETY: copied by `kept`, and used by nobody else.
        unsafe { pg_sys::pfree(argument.datum().cast_mut_ptr()) };
    }
}

/// Returns copies of rows that outlive the transaction.
pub(super) fn kept(arguments: [Option<Value<'static>>; 4]) -> [Option<Value<'static>>; 4] {
    memory::in_process(|| arguments.map(|argument| argument.map(Value::copy)))
}

impl Note {
    /// Returns the key of a record, in a transaction that has called the function for these rows
    /// before.
    pub(super) fn of(
        (key, plan): (Key, &LocalRelation),
        current: &Current,
        input: ConflictInput<'_>,
        asked_about: &[u64],
    ) -> Self {
        let rows = input.rows;
        let hash = match rows.remote.as_ref().or(rows.local.as_ref()) {
            Some(slot) => key_hash(plan, slot),
            None => 0,
        };
        let times = asked_about.iter().filter(|asked| **asked == hash);
        Self {
            times: i64::try_from(times.count()).unwrap_or(i64::MAX),
            lsn: current.commit_lsn,
            relation: key.1,
            hash,
            local: match input.found {
                Found::Row(stamp) | Found::Missing(Some(stamp)) => stamp.known(),
                Found::Missing(None) => None,
            },
        }
    }

    /// Returns the answer of the function, if it was called for these rows in a transaction of this
    /// node. The record is deleted with the current transaction. `rights` are back at the table's
    /// owner when the row is read.
    pub(super) fn take(
        &self,
        subscription: u32,
        mut rights: Rights<'_>,
        (key, callee): (Key, &Callee),
    ) -> Result<Option<Option<Value<'static>>>, PgError> {
        let arguments = self.arguments(subscription);
        let found = rights.with_own(key, || rows_written(
            "delete from braid.conflict_call where subscription_id = $1 and commit_lsn = '0/0'::pg_lsn + $2::numeric \
             and relation = $3::oid and key_hash = $4 and local_timestamp is not distinct from $5 \
             and local_origin is not distinct from $6::oid and times = $7 \
             returning encode(convert_to(given, getdatabaseencoding()), 'hex')",
            &arguments,
        ))?;
        if found.is_empty() {
            return Ok(None);
        }
        let row = first_bytes(found).map(|text| read_as(callee.row_type, text));
        Ok(Some(row.transpose()?))
    }
}

impl Session {
    /// Makes the planned calls, in the open transaction of this node. The commit has no origin. If
    /// a function's writes are not to be sent on, their WAL records are marked with `origin`.
    pub(crate) fn make_calls(&mut self, calls: &[Call], origin: OriginId) -> Result<(), PgError> {
        for call in calls {
            let callee = Callee::find(call.function.oid)?;
            self.work_as_self();
            self.work_as(callee.owner);
            if !call.function.replicates {
                origin::stamp_with(origin);
            }
            let outcome = callee.call(call.arguments, Writes::Keep, &call.about, &mut || Ok(true));
            origin::suspend();
            let given = outcome?;
            self.work_as_self();
            if let Some(note) = call.note {
                let row = match given.row {
                    Some(row) => row.argument(),
                    None => DatumWithOid::null_oid(callee.row_type),
                };
                let mut arguments = Vec::from(note.arguments(self.identity.subscription_id));
                arguments.push(row);
                execute(
                    "insert into braid.conflict_call (subscription_id, commit_lsn, relation, key_hash, local_timestamp, local_origin, times, given) \
                     values ($1, '0/0'::pg_lsn + $2::numeric, $3::oid, $4, $5, $6::oid, $7, $8::text)",
                    &arguments,
                )?;
            }
        }
        Ok(())
    }
}
