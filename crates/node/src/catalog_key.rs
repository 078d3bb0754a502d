//! The unique keys of a table, read from the catalogs' caches. Run by the leader and the appliers when a relation's first change
//! comes, so each row is found by its key.
//!
//! Not for: relations that are locked. No lock is taken here, so that the leader waits for nobody; what is dropped meanwhile
//! is passed over.

use std::ffi::c_char;

use braid_bgworker::table_order::{ColumnType, KeyColumn, LocalKey};
use braid_postgres::encoding;
use pgrx::pg_sys;

/// F_OIDEQ of src/include/utils/fmgroids.h, 15 to 18.
const OID_EQUAL: u32 = 184;
/// BTEqualStrategyNumber of src/include/access/stratnum.h.
const EQUAL: u16 = 3;
/// Anum_pg_index_indrelid of src/include/catalog/pg_index.h, 15 to 18.
const TABLE: i16 = 2;

/// A row of pg_index, as far as it matters here.
struct Index {
    oid: pg_sys::Oid,
    is_exclusion: bool,
    nulls_equal: bool,
    /// Column in the table, operator class and collation of each key column.
    columns: Vec<(i16, pg_sys::Oid, pg_sys::Oid)>,
}

/// Add the unique indexes and exclusion constraints of a relation, in the order of their OIDs. A key column stands there if
/// the index compares a column by its type's usual equality.
///
/// # Safety
/// In a transaction.
pub(crate) unsafe fn read(relation: pg_sys::Oid, keys: &mut Vec<LocalKey>) {
    // SAFETY: as the caller says.
    let mut indexes = unsafe { indexes(relation) };
    indexes.sort_unstable_by_key(|index| index.oid.to_u32());
    for index in indexes {
        let columns = index
            .columns
            .iter()
            .filter_map(|(number, class, collation)| {
                // SAFETY: as the caller says.
                unsafe { column(relation, *number, *class, *collation, index.is_exclusion) }
            });
        keys.push(LocalKey {
            columns: columns.collect(),
            // SAFETY: as the caller says.
            name: unsafe { name_of(index.oid) },
            nulls_equal: index.nulls_equal,
        });
    }
}

/// The unique and the exclusion indexes of a relation.
///
/// # Safety
/// In a transaction.
unsafe fn indexes(relation: pg_sys::Oid) -> Vec<Index> {
    let lock = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
    let mut key = pg_sys::ScanKeyData::default();
    let mut found = Vec::new();
    // SAFETY: the scan of the catalog ends before it is closed; each tuple is a row of pg_index, read before the next one.
    unsafe {
        pg_sys::ScanKeyInit(
            &raw mut key,
            TABLE,
            EQUAL,
            OID_EQUAL.into(),
            relation.into(),
        );
        let catalog = pg_sys::table_open(pg_sys::IndexRelationId, lock);
        let by_table = pg_sys::IndexIndrelidIndexId.into();
        let scan = pg_sys::systable_beginscan(
            catalog,
            by_table,
            true,
            std::ptr::null_mut(),
            1,
            &raw mut key,
        );
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_index>();
            if !form.indislive || !(form.indisunique || form.indisexclusion) {
                continue;
            }
            let oids = |number: u32| -> Vec<pg_sys::Oid> {
                let mut is_null = false;
                let number = i32::try_from(number).unwrap_or(0);
                let value = pg_sys::heap_getattr(tuple, number, (*catalog).rd_att, &mut is_null);
                if is_null {
                    return Vec::new();
                }
                let vector = value.cast_mut_ptr::<pg_sys::oidvector>();
                let count = usize::try_from((*vector).dim1).unwrap_or(0);
                (*vector).values.as_slice(count).to_vec()
            };
            let classes = oids(pg_sys::Anum_pg_index_indclass);
            let collations = oids(pg_sys::Anum_pg_index_indcollation);
            let count = usize::try_from(form.indnkeyatts).unwrap_or(0);
            let numbers = form.indkey.values.as_slice(count);
            found.push(Index {
                oid: form.indexrelid,
                is_exclusion: form.indisexclusion,
                nulls_equal: form.indnullsnotdistinct,
                columns: numbers
                    .iter()
                    .zip(classes)
                    .zip(collations)
                    .map(|((number, class), collation)| (*number, class, collation))
                    .collect(),
            });
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(catalog, lock);
    }
    found
}

/// What `read` finds in a row of a catalog that has this key in a cache; `None` if there is no such row.
///
/// # Safety
/// In a transaction; the cache is one of the catalog whose rows are `F`, by one OID or by an OID and a number.
unsafe fn cached<F, T>(
    cache: pg_sys::SysCacheIdentifier::Type,
    oid: pg_sys::Oid,
    number: Option<i16>,
    read: impl FnOnce(&F) -> Option<T>,
) -> Option<T> {
    // SAFETY: as the caller says; the row is released after it was read.
    unsafe {
        let cache = cache.cast_signed();
        let tuple = match number {
            Some(number) => pg_sys::SearchSysCache2(cache, oid.into(), number.into()),
            None => pg_sys::SearchSysCache1(cache, oid.into()),
        };
        if tuple.is_null() {
            return None;
        }
        let found = read(&*pg_sys::GETSTRUCT(tuple).cast::<F>());
        pg_sys::ReleaseSysCache(tuple);
        found
    }
}

fn text(name: &pg_sys::NameData) -> String {
    let name: *const c_char = name.data.as_ptr();
    // SAFETY: a name ends with a zero byte.
    unsafe { encoding::from_server(name) }
}

unsafe fn name_of(index: pg_sys::Oid) -> String {
    let cache = pg_sys::SysCacheIdentifier::RELOID;
    // SAFETY: as the caller says.
    unsafe {
        cached(cache, index, None, |form: &pg_sys::FormData_pg_class| {
            Some(text(&form.relname))
        })
    }
    .unwrap_or_default()
}

/// A key column; `None` for an expression, and for what is compared by another equality than the type's usual one.
unsafe fn column(
    relation: pg_sys::Oid,
    number: i16,
    class: pg_sys::Oid,
    collation: pg_sys::Oid,
    is_exclusion: bool,
) -> Option<KeyColumn> {
    use pg_sys::SysCacheIdentifier as Cache;
    if number <= 0 {
        return None;
    }
    // SAFETY: as the caller says; each cache is of the catalog whose row is read.
    unsafe {
        let (name, type_oid, modifier) = cached(
            Cache::ATTNUM,
            relation,
            Some(number),
            |form: &pg_sys::FormData_pg_attribute| {
                (form.attgenerated == 0)
                    .then(|| (text(&form.attname), form.atttypid, form.atttypmod))
            },
        )?;
        let (by_bytes, is_default) = cached(
            Cache::CLAOID,
            class,
            None,
            |form: &pg_sys::FormData_pg_opclass| {
                let name = text(&form.opcname);
                Some((name.ends_with("_pattern_ops"), form.opcdefault))
            },
        )?;
        if is_exclusion || !(is_default || by_bytes) {
            return None;
        }
        let unusual = cached(
            Cache::COLLOID,
            collation,
            None,
            |form: &pg_sys::FormData_pg_collation| {
                (!form.collisdeterministic).then(|| text(&form.collname))
            },
        );
        Some(KeyColumn {
            name,
            column_type: base_type(type_oid, modifier)?,
            comparison: unusual.filter(|_| !by_bytes).unwrap_or_default(),
        })
    }
}

/// A type by its name, and its modifier; of a domain, the type that it is made of.
unsafe fn base_type(mut oid: pg_sys::Oid, mut modifier: i32) -> Option<ColumnType> {
    loop {
        let domain = pg_sys::TYPTYPE_DOMAIN;
        // SAFETY: as the caller says.
        let (base, name, namespace) = unsafe {
            cached(
                pg_sys::SysCacheIdentifier::TYPEOID,
                oid,
                None,
                |form: &pg_sys::FormData_pg_type| {
                    let is_domain = form.typtype.cast_unsigned() == domain;
                    let base = is_domain.then_some((form.typbasetype, form.typtypmod));
                    Some((base, text(&form.typname), form.typnamespace))
                },
            )
        }?;
        let Some(base) = base else {
            // SAFETY: as the caller says; null for a namespace that is gone.
            let namespace = unsafe {
                let name = pg_sys::get_namespace_name(namespace);
                if name.is_null() {
                    return None;
                }
                encoding::from_server(name)
            };
            return Some(ColumnType {
                name: (namespace, name),
                modifier,
            });
        };
        (oid, modifier) = base;
    }
}
