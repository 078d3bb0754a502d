//! Versions of rows.

use braid_apply::{has_merged_rows as has_merged, row_version as version_of};
use braid_node::local_version;
use braid_postgres::catalog::{Rights, current_role, with_rights};
use braid_postgres::encoding::Text;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use pgrx::iter::TableIterator;
use pgrx::name;
use pgrx::prelude::*;

/// braid.row_version("relation" oid, "row" tid) returns table (key_hash bigint, committed_at
/// timestamptz, node text, other_hash bigint, merged boolean)
#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn row_version(
    relation: pg_sys::Oid,
    row: pg_sys::ItemPointerData,
) -> TableIterator<
    'static,
    (
        name!(key_hash, Option<i64>),
        name!(committed_at, i64),
        name!(node, Text),
        name!(other_hash, Option<i64>),
        name!(merged, bool),
    ),
> {
    let caller = current_role();
    let found = match with_rights(Rights::ExtensionOwner, || version_of(relation, row, caller)) {
        Ok(found) => found,
        Err(error) => error.raise(),
    };
    TableIterator::new(found.map(|found| {
        (
            found
                .hashes
                .map(|hashes| hashes.equal)
                .or(found.row_hash)
                .map(u64::cast_signed),
            found.timestamp.saturating_sub(EPOCH_DIFFERENCE),
            Text(found.node),
            found
                .hashes
                .and_then(|hashes| hashes.other().map(u64::cast_signed)),
            found.merged,
        )
    }))
}

/// braid.has_merged_rows(xid) returns boolean
#[pg_extern(sql = false)]
fn has_merged_rows(xid: pg_sys::TransactionId) -> bool {
    match with_rights(Rights::ExtensionOwner, || has_merged(xid)) {
        Ok(has) => has,
        Err(error) => error.raise(),
    }
}

/// braid.commit_timestamp(xid) returns timestamptz
#[pg_extern(sql = false)]
fn commit_timestamp(xid: pg_sys::TransactionId) -> Option<i64> {
    local_version::commit_timestamp(xid)
}
