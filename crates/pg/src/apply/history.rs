//! Recording conflicts in `braid.conflict_record`, in the transaction that resolves them. Run by the appliers.

use braid_bgworker::conflict::{Action, Decision};
use braid_bgworker::resolution::Resolution;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use super::relation::{LocalRelation, RemoteRelation};
use super::table::OpenTable;
use crate::error::PgError;

/// What is known of a conflict besides its rows.
#[derive(Debug)]
pub struct Entry<'a> {
    /// Name of the subscription.
    pub subscription: &'a str,
    /// What was decided.
    pub decision: Decision,
    /// By which rule.
    pub resolution: Resolution,
    /// Version of the local row: Unix microseconds and node; `None` when there is none.
    pub local: Option<(i64, String)>,
    /// Version of the incoming change.
    pub remote: (i64, &'a str),
    /// Transaction at the provider.
    pub xid: u32,
    /// Its position at the provider.
    pub lsn: u64,
}

const INSERT: &str = "insert into braid.conflict_record (subscription_name, relation, kind, resolution, winner, reason, \
    key, local_row, remote_row, local_timestamp, remote_timestamp, local_origin, remote_origin, remote_xid, remote_lsn) \
    select $1, $2::oid::regclass, $3, $15, $4, $5, \
    (select jsonb_object_agg(k, coalesce(r.remote, r.local) -> k) from unnest($6::text[]) k), r.local, r.remote, \
    to_timestamp(($7 / 1000000)::double precision) + ($7 % 1000000) * interval '1 microsecond', \
    to_timestamp(($8 / 1000000)::double precision) + ($8 % 1000000) * interval '1 microsecond', \
    $9, $10, $11::text::xid, '0/0'::pg_lsn + $12::numeric \
    from (select to_jsonb($13) as local, to_jsonb($14) as remote) r";

/// The row in `slot` as a composite Datum of the table's row type.
///
/// # Safety
/// The slot holds a row of the open table.
unsafe fn row_datum(slot: *mut pg_sys::TupleTableSlot) -> pg_sys::Datum {
    // SAFETY: as the caller says; the copy is in the current context.
    unsafe { pg_sys::ExecFetchSlotHeapTupleDatum(slot) }
}

/// Record a conflict. `local_row` and `remote_row` are the slots that hold those rows, which are the table's.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn record(
    entry: &Entry<'_>,
    remote: &RemoteRelation,
    local: &LocalRelation,
    table: &OpenTable,
    (local_row, remote_row): (
        Option<*mut pg_sys::TupleTableSlot>,
        Option<*mut pg_sys::TupleTableSlot>,
    ),
) -> Result<(), PgError> {
    let Some(kind) = entry.decision.conflict else {
        return Ok(());
    };
    let winner = match entry.decision.action {
        Action::Apply => "remote",
        Action::Keep => "local",
        Action::Merge => "merged",
        Action::Remove | Action::Ask => "none",
    };
    let key_names: Vec<String> = local
        .key
        .iter()
        .flat_map(|key| &key.columns)
        .filter_map(|column| Some(remote.columns.get(column.remote)?.name.clone()))
        .collect();
    // SAFETY: the table is open; its row type is what the slots' rows are of.
    let row_type = unsafe { (*(*table.relation()).rd_rel).reltype };
    // SAFETY: `row_type` is the type of the Datums that row_datum makes, null ones too.
    let row = |slot: Option<*mut pg_sys::TupleTableSlot>| unsafe {
        match slot.map(|slot| row_datum(slot)) {
            Some(datum) => DatumWithOid::new(datum, row_type),
            None => DatumWithOid::null_oid(row_type),
        }
    };
    let relation = local.oid.to_u32();
    let local_version = entry.local.clone();
    let arguments = [
        DatumWithOid::from(entry.subscription),
        DatumWithOid::from(i64::from(relation)),
        DatumWithOid::from(kind.name()),
        DatumWithOid::from(winner),
        DatumWithOid::from(entry.decision.reason),
        DatumWithOid::from(key_names),
        DatumWithOid::from(local_version.as_ref().map(|(timestamp, _)| *timestamp)),
        DatumWithOid::from(entry.remote.0),
        DatumWithOid::from(local_version.map(|(_, origin)| origin)),
        DatumWithOid::from(entry.remote.1),
        DatumWithOid::from(entry.xid.to_string()),
        DatumWithOid::from(i64::try_from(entry.lsn).unwrap_or(i64::MAX)),
        row(local_row),
        row(remote_row),
        DatumWithOid::from(entry.resolution.name()),
    ];
    pgrx::Spi::connect_mut(|client| client.update(INSERT, None, &arguments).map(|_| ()))
        .map_err(|error| PgError::new("XX000", format!("could not record a conflict: {error}")))
}
