//! The unique keys of a table, read from the catalogs' caches. Run by the leader and the appliers
//! when a relation's first change comes, so each row is found by its key.
//!
//! Not for: relations that are locked. This module takes no lock, so that the leader never waits;
//! relations that are dropped meanwhile are ignored.

use braid_bgworker::table_order::{ColumnType, KeyColumn, LocalKey};
use braid_postgres::encoding;
use braid_postgres::lock::LockMode;
use braid_postgres::syscache::{
    self, AttributeRow, CollationRow, OperatorClassRow, TypeRow, utf8_or_empty,
};
use pgrx::pg_sys;

/// F_OIDEQ of src/include/utils/fmgroids.h, 15 to 18.
const OID_EQUAL: u32 = 184;
/// BTEqualStrategyNumber of src/include/access/stratnum.h.
const EQUAL: u16 = 3;
/// Anum_pg_index_indrelid of src/include/catalog/pg_index.h, 15 to 18.
const TABLE: i16 = 2;

/// The needed columns of a row of pg_index.
struct Index {
    oid: pg_sys::Oid,
    is_exclusion: bool,
    nulls_equal: bool,
    /// The index holds for all rows, after each statement.
    is_plain: bool,
    /// Column in the table, operator class and collation of each key column.
    columns: Vec<(i16, pg_sys::Oid, pg_sys::Oid)>,
}

/// Add the unique indexes and exclusion constraints of a relation, in the order of their OIDs. A
/// key column stands there if the index compares a column by its type's usual equality. In a
/// transaction.
pub(crate) fn read(relation: pg_sys::Oid, keys: &mut Vec<LocalKey>) {
    let mut indexes = indexes(relation);
    indexes.sort_unstable_by_key(|index| index.oid.to_u32());
    for index in indexes {
        let columns = index
            .columns
            .iter()
            .filter_map(|(number, class, collation)| {
                column(relation, *number, *class, *collation, index.is_exclusion)
            });
        let columns: Vec<KeyColumn> = columns.collect();
        keys.push(LocalKey {
            finds_rows: index.is_plain && columns.len() == index.columns.len(),
            columns,
            name: utf8_or_empty(syscache::raw_relation_name(index.oid)),
            nulls_equal: index.nulls_equal,
            table: relation.to_u32(),
        });
    }
}

/// The unique and the exclusion indexes of a relation.
fn indexes(relation: pg_sys::Oid) -> Vec<Index> {
    let lock = LockMode::AccessShare.as_raw();
    let mut key = pg_sys::ScanKeyData::default();
    let mut found = Vec::new();
    // SAFETY: the scan of the catalog ends before it is closed; each tuple is a row of pg_index,
    // read before the next one.
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
            let is_partial = !pg_sys::heap_attisnull(
                tuple,
                pg_sys::Anum_pg_index_indpred.cast_signed(),
                std::ptr::null_mut(),
            );
            let classes = oids(pg_sys::Anum_pg_index_indclass);
            let collations = oids(pg_sys::Anum_pg_index_indcollation);
            let count = usize::try_from(form.indnkeyatts).unwrap_or(0);
            let numbers = form.indkey.values.as_slice(count);
            found.push(Index {
                oid: form.indexrelid,
                is_exclusion: form.indisexclusion,
                nulls_equal: form.indnullsnotdistinct,
                is_plain: form.indisunique
                    && form.indisvalid
                    && form.indimmediate
                    && !form.indisexclusion
                    && !is_partial,
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

/// A key column; `None` for an expression, and for a column that is compared by another equality
/// than the type's usual one.
fn column(
    relation: pg_sys::Oid,
    number: i16,
    class: pg_sys::Oid,
    collation: pg_sys::Oid,
    is_exclusion: bool,
) -> Option<KeyColumn> {
    if number <= 0 {
        return None;
    }
    let attribute = AttributeRow::find(relation, number).filter(|row| row.attgenerated == 0)?;
    let class = OperatorClassRow::find(class)?;
    let by_bytes = encoding::name(&class.opcname).ends_with("_pattern_ops");
    if is_exclusion || !(class.opcdefault || by_bytes) {
        return None;
    }
    let unusual = CollationRow::find(collation)
        .filter(|row| !row.collisdeterministic)
        .map(|row| encoding::name(&row.collname));
    Some(KeyColumn {
        name: encoding::name(&attribute.attname),
        column_type: base_type(attribute.atttypid, attribute.atttypmod)?,
        comparison: unusual.filter(|_| !by_bytes).unwrap_or_default(),
    })
}

/// A type by its name, and its modifier; of a domain, the type that it is made of.
fn base_type(mut oid: pg_sys::Oid, mut modifier: i32) -> Option<ColumnType> {
    loop {
        let row = TypeRow::find(oid)?;
        if row.typtype.cast_unsigned() == pg_sys::TYPTYPE_DOMAIN {
            (oid, modifier) = (row.typbasetype, row.typtypmod);
            continue;
        }
        // None for a namespace that is gone.
        let namespace = syscache::namespace_name(row.typnamespace)?;
        return Some(ColumnType {
            name: (encoding::utf8(&namespace), encoding::name(&row.typname)),
            modifier,
        });
    }
}
