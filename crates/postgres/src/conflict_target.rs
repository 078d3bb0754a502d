//! `INSERT .. ON CONFLICT (columns)` into a partitioned table that has no unique index. Run by
//! every session of a server that has the library preloaded, before a query is planned.
//!
//! Example: `insert into everywhere.orders .. on conflict (tenant_id, order_id) do update ..`. The
//! unique index is that of `public.orders`, one of the partitions; the others are foreign tables,
//! which have none. So PostgreSQL finds no index for the clause. The statement is turned into one
//! about `public.orders` itself, which refuses rows of other nodes, with a hint how to reach their
//! node.
//!
//! The statement then needs the rights of that table.

use std::ffi::c_int;
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::compat;
use crate::error::{PgError, pass_on};
use crate::parse_tree::raw_nodes;

/// The decisions of a library about such tables.
#[derive(Debug)]
pub struct Watch {
    /// The table in place of which a partitioned table stands; `None` of any other table.
    pub plain: fn(pg_sys::Oid) -> Result<Option<pg_sys::Oid>, PgError>,
    /// The error for a table whose columns have other numbers than those of the plain one.
    pub differs: fn(pg_sys::Oid) -> PgError,
}

static WATCH: OnceLock<&'static Watch> = OnceLock::new();

/// Starts to watch. Called once, while the postmaster loads its libraries.
pub fn install(watch: &'static Watch) {
    if WATCH.set(watch).is_ok() {
        compat::install_planner_hook();
    }
}

/// A query is about to be planned.
///
/// # Safety
/// What PostgreSQL has passed to the hook.
pub(crate) unsafe fn before(query: *mut pg_sys::Query) {
    // SAFETY: as the caller says.
    unsafe {
        if has_conflict_clause(query) || (*query).hasModifyingCTE {
            look(query);
        }
    }
}

/// # Safety
/// A query.
unsafe fn has_conflict_clause(query: *mut pg_sys::Query) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        (*query).commandType == pg_sys::CmdType::CMD_INSERT
            && (*query)
                .onConflict
                .as_ref()
                .is_some_and(|clause| !clause.arbiterElems.is_null())
    }
}

/// # Safety
/// A query that is about to be planned.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn look(query: *mut pg_sys::Query) {
    // SAFETY: as the caller says. Only queries at the top have common table expressions that write.
    pass_on(|| unsafe {
        if has_conflict_clause(query) {
            aim(query);
        }
        for expression in raw_nodes((*query).cteList) {
            let inner = (*expression.cast::<pg_sys::CommonTableExpr>()).ctequery;
            let is_query = inner
                .as_ref()
                .is_some_and(|node| node.type_ == pg_sys::NodeTag::T_Query);
            if is_query && has_conflict_clause(inner.cast()) {
                aim(inner.cast());
            }
        }
    });
}

/// The entry of a range table at a place, from 1 on.
///
/// # Safety
/// A query.
unsafe fn entry(query: *mut pg_sys::Query, place: c_int) -> Option<*mut pg_sys::RangeTblEntry> {
    let place = usize::try_from(place).ok()?.checked_sub(1)?;
    // SAFETY: as the caller says.
    unsafe { raw_nodes((*query).rtable).nth(place).map(<*mut _>::cast) }
}

/// The partitions of a table that this session has locked.
#[must_use]
pub fn partitions(table: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    // SAFETY: the list has so many OIDs, and is in the current memory context.
    unsafe {
        let found = pg_sys::find_inheritance_children(table, pg_sys::NoLock.cast_signed());
        found.as_ref().map_or_else(Vec::new, |list| {
            let count = usize::try_from(list.length).unwrap_or(0);
            let cells = std::slice::from_raw_parts(list.elements, count);
            cells.iter().map(|cell| cell.oid_value).collect()
        })
    }
}

/// Makes a statement one about the plain table.
///
/// # Safety
/// An INSERT with a conflict clause, which is about to be planned.
unsafe fn aim(query: *mut pg_sys::Query) {
    // SAFETY: as the caller says. PostgreSQL has locked the tables of the statement; the plain one
    // is locked as the other one is.
    unsafe {
        let (Some(watch), Some(target)) = (WATCH.get(), entry(query, (*query).resultRelation))
        else {
            return;
        };
        if (*target).relkind.cast_unsigned() != pg_sys::RELKIND_PARTITIONED_TABLE {
            return;
        }
        let table = (*target).relid;
        let plain = match (watch.plain)(table) {
            Ok(Some(plain)) => plain,
            Ok(None) => return,
            Err(error) => error.raise(),
        };
        pg_sys::LockRelationOid(plain, (*target).rellockmode);
        if !has_same_columns(table, plain) {
            (watch.differs)(table).raise();
        }
        compat::change_rights(query, target, plain);
        let excluded = (*query)
            .onConflict
            .as_ref()
            .and_then(|clause| entry(query, clause.exclRelIndex));
        if let Some(excluded) = excluded {
            compat::change_rights(query, excluded, plain);
            (*excluded).relid = plain;
        }
        (*target).relid = plain;
        (*target).relkind = pg_sys::RELKIND_RELATION.cast_signed();
    }
}

/// Whether the columns of two tables have one number each, a name and a type.
///
/// # Safety
/// Two tables that this session has locked.
unsafe fn has_same_columns(one: pg_sys::Oid, other: pg_sys::Oid) -> bool {
    // SAFETY: as the caller says; each is closed again, and the lock stays.
    unsafe {
        let mode = pg_sys::NoLock.cast_signed();
        let (first, second) = (
            pg_sys::table_open(one, mode),
            pg_sys::table_open(other, mode),
        );
        let columns = |relation: pg_sys::Relation| {
            let descriptor = (*relation).rd_att;
            let count = usize::try_from((*descriptor).natts).unwrap_or(0);
            (0..count).map(move |place| &*compat::TupleDescAttr(descriptor, place))
        };
        let is_same = columns(first).count() == columns(second).count()
            && columns(first).zip(columns(second)).all(|(one, other)| {
                one.attisdropped == other.attisdropped
                    && (one.attisdropped
                        || (one.atttypid == other.atttypid
                            && one.attname.data == other.attname.data))
            });
        pg_sys::table_close(second, mode);
        pg_sys::table_close(first, mode);
        is_same
    }
}
