//! Images of deleted rows, in `braid.deleted_parent`. They are kept if a foreign key with the rule
//! `restore` refers to the table; `workers/orphan/parent.rs` restores rows from them. Run by the
//! appliers.
//!
//! Invariant: an image is written in the transaction that deletes its row. So the commit timestamp
//! of the image is that of the deletion.
//!
//! Not for: rows that sessions of this node delete, and tables that are truncated whole.

use std::cell::RefCell;
use std::mem::ManuallyDrop;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::kept_plan;
use braid_postgres::names::own_table;
use braid_postgres::slot::Slot;
use braid_postgres::table_scan::{Sees, has_any};
use pgrx::PgOid;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use pgrx::spi::OwnedPreparedStatement;

use super::Target;
use super::deletion::Deletions;
use super::image::{Image, to_jsonb, with_fixed_settings};
use super::key_hash::key_hashes_as;
use super::table::OpenTable;
use super::target::Key;

/// Foreign keys with the rule that refer to a table, or to a partitioned table above it. They are
/// found by their triggers: `pg_constraint` has no index on referenced tables.
const WANTED: &str = "\
    select 1::text from (select relid::oid from pg_catalog.pg_partition_ancestors($1::oid) p (relid) union select $1::oid) a (oid) \
    join pg_catalog.pg_trigger t on t.tgrelid = a.oid \
    join pg_catalog.pg_constraint n on n.oid = t.tgconstraint and n.contype = 'f' and n.confrelid = a.oid \
    join braid.foreign_key_rule f on f.constraint_name = n.conname and f.rule = 'restore' \
     and coalesce(pg_catalog.pg_partition_root(f.relation), f.relation)::oid = coalesce(pg_catalog.pg_partition_root(n.conrelid::regclass), n.conrelid::regclass)::oid \
    limit 1";

/// The first argument of the image.
const IMAGE: usize = 5;

thread_local! {
    /// Never dropped: when the process ends, plans can't be freed any more.
    static INSERT: RefCell<Option<ManuallyDrop<OwnedPreparedStatement>>> = const { RefCell::new(None) };
}

/// Whether rows that are deleted from a table are to be kept. In a transaction, with the process's
/// own rights.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub(super) fn is_wanted(table: pg_sys::Oid) -> Result<bool, PgError> {
    let rules = own_table("foreign_key_rule")?;
    if !has_any(rules, pg_sys::InvalidOid, &[], Sees::Committed) {
        return Ok(false);
    }
    Ok(!kept_plan::rows(WANTED, &[table.into()])?.is_empty())
}

impl Deletions<'_> {
    /// Keeps an image of the row in a slot, which was just deleted, if the table's plan wants that.
    pub(super) fn keep_deleted(
        &mut self,
        key: Key,
        slot: impl Fn(&OpenTable) -> Slot,
    ) -> Result<(), PgError> {
        let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = self.tables.get(key)
        else {
            return Ok(());
        };
        if !plan.keeps_deleted {
            return Ok(());
        }
        let (oid, slot) = (plan.oid.to_u32(), slot(table));
        let has_key = plan.key.is_some();
        let hash = has_key.then(|| key_hashes_as(oid, plan, &slot).each().next());
        self.rights().with_own(key, || {
            with_fixed_settings(|| store(oid, hash.flatten(), &slot))
        })
    }
}

fn store(table: u32, hash: Option<u64>, slot: &Slot) -> Result<(), PgError> {
    let image = Image::of_slot(slot, |_| false);
    let [_, absent, names, values] = image.arguments();
    // One plan serves all tables, whose rows have different types. A composite value names its own.
    let Some(row) = image.row() else {
        return Ok(());
    };
    let row = row.as_record().argument();
    let [large_names, large_values] = image.large().unwrap_or_else(|| {
        [
            DatumWithOid::null_oid(pg_sys::TEXTARRAYOID),
            DatumWithOid::null_oid(pg_sys::TEXTARRAYOID),
        ]
    });
    let arguments = [
        DatumWithOid::from(i64::from(table)),
        DatumWithOid::from(hash.map(u64::cast_signed)),
        large_names,
        large_values,
        row,
        absent,
        names,
        values,
    ];
    pgrx::Spi::connect_mut(|client| {
        INSERT.with_borrow_mut(|kept| {
            let plan = match kept {
                Some(plan) => plan,
                None => {
                    let sql = format!(
                        "insert into braid.deleted_parent (relation, key_hash, large_names, large_values, \"row\") \
                         select $1::oid, $2, $3, $4, {}",
                        to_jsonb(IMAGE)
                    );
                    let types: Vec<PgOid> = arguments
                        .iter()
                        .map(|argument| PgOid::from(argument.oid()))
                        .collect();
                    kept.insert(ManuallyDrop::new(
                        client.prepare_mut(sql.as_str(), &types)?.keep(),
                    ))
                }
            };
            client.update(&**plan, None, &arguments).map(|_| ())
        })
    })
    .map_err(|error: pgrx::spi::SpiError| {
        PgError::new(SqlState::InternalError, format!("could not keep a deleted row: {error}"))
    })
}
