//! How a relation of the stream maps to one of this database: columns by name, the index that finds its rows, how its
//! values are converted. Built once for each schema record and local relation, and again after either changed.

use braid_bgworker::resolution::Rules;
use braid_bgworker::table_order::HashedKey;
use braid_gir::{Image, ReplicaIdentity, Schema, Value};
use braid_node::table_order;
use braid_postgres::error::PgError;
use braid_postgres::names::find_table;
use braid_postgres::{compat, encoding, ffi};
use pgrx::pg_sys;

use super::column_rules::{self, ColumnRules};
use super::copied;
use super::decode::ColumnDecoder;
use super::deleted_parent;
use super::doing;
use super::key_hash::{Equality, RowHash};
use super::missing::{self, MissingColumn};
use super::rules;
use super::table::RowValues;

/// A column of the stream.
#[derive(Debug, Clone)]
pub struct RemoteColumn {
    /// Name.
    pub name: String,
    /// Type's OID and modifier at the source.
    pub type_id: (u32, i32),
    /// Part of the replica identity.
    pub identity: bool,
    /// Part of the primary key at the source, or of a replica identity that is an index.
    pub key: bool,
}

/// A schema record, kept.
#[derive(Debug, Clone)]
pub struct RemoteRelation {
    /// OID at the source.
    pub oid: u32,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// How old rows are identified.
    pub identity: ReplicaIdentity,
    /// Columns in the stream's order.
    pub columns: Vec<RemoteColumn>,
    /// Unique keys whose hashes come with its changes.
    pub hashed: Vec<HashedKey>,
}

impl RemoteRelation {
    /// Keep a schema record.
    #[must_use]
    pub fn new(schema: &Schema<'_>) -> Self {
        Self {
            oid: schema.relation_oid,
            namespace: schema.namespace.to_owned(),
            name: schema.name.to_owned(),
            identity: schema.replica_identity,
            columns: schema
                .columns()
                .map(|column| RemoteColumn {
                    name: column.name.to_owned(),
                    type_id: (column.type_oid, column.type_modifier),
                    identity: column.flags.is_identity(),
                    key: column.flags.is_primary_key()
                        || (column.flags.is_identity()
                            && schema.replica_identity != ReplicaIdentity::Full),
                })
                .collect(),
            hashed: table_order::hashed_keys(schema),
        }
    }

    /// `"namespace.name"` for messages.
    #[must_use]
    pub fn qualified_name(&self) -> String {
        format!("{}.{}", self.namespace, self.name)
    }
}

/// A key column of the index that finds rows.
#[derive(Debug, Clone, Copy)]
pub struct KeyColumn {
    /// Attribute number in the table, from 1.
    pub attribute: i16,
    /// Position among the stream's columns.
    pub remote: usize,
    /// Equality function for the index's operator class.
    pub equal: pg_sys::Oid,
    /// Collation of the index column.
    pub collation: pg_sys::Oid,
    /// When its values are equal.
    pub equality: Equality,
}

/// An index that finds one row by its key.
#[derive(Debug, Clone)]
pub struct Key {
    /// The index.
    pub index: pg_sys::Oid,
    /// Its columns.
    pub columns: Vec<KeyColumn>,
}

/// A local column and where its values come from.
#[derive(Debug)]
pub struct LocalColumn {
    /// Position among the stream's columns.
    pub remote: usize,
    /// Position in the local row, from 0.
    pub local: usize,
    /// Its name, as it is part of a row's hash ([`RowHash`]).
    pub name_hash: u64,
    /// Converts its values.
    pub decoder: ColumnDecoder,
}

/// Convert the values of an image, those of the columns that `wants` takes, into `row`, which is as wide as the table; `columns` are in the
/// stream's order.
///
/// # Errors
/// Of the image, and of the types.
pub(super) fn fill_row(
    row: &mut RowValues,
    columns: &mut [LocalColumn],
    image: &Image<'_>,
    wants: impl Fn(&LocalColumn) -> bool,
) -> Result<(), PgError> {
    let mut columns = columns.iter_mut().peekable();
    for (position, value) in image.values().enumerate() {
        let value = value?;
        let Some(column) = columns.next_if(|column| column.remote == position) else {
            continue;
        };
        if matches!(value, Value::None) || !wants(column) {
            continue;
        }
        doing::convert(position);
        let datum = column.decoder.decode(&value)?;
        if let Some(place) = row.get_mut(column.local) {
            *place = Some(datum);
        }
    }
    doing::converted();
    Ok(())
}

/// A column that the stream does not have.
#[derive(Debug, Clone, Copy)]
pub struct Lacking {
    /// Position in the local row, from 0.
    pub local: usize,
    /// Its attribute number, from 1, in the table that the stream names, whose default counts.
    pub named: i16,
}

/// How a stream's relation is applied here.
#[derive(Debug)]
pub struct LocalRelation {
    /// The table.
    pub oid: pg_sys::Oid,
    /// Its owner.
    pub owner: pg_sys::Oid,
    /// Partitioned: rows go to a partition.
    pub partitioned: bool,
    /// Columns of a local row, dropped ones included.
    pub width: usize,
    /// Columns that the stream has, in the stream's order.
    pub columns: Vec<LocalColumn>,
    /// Finds rows; `None`: only a scan of the whole table does.
    pub key: Option<Key>,
    /// Local columns that the stream does not have: inserts compute their defaults.
    pub defaults: Vec<Lacking>,
    /// The partitioned table that the stream names, where this is a partition of it.
    pub root: Option<pg_sys::Oid>,
    /// Columns of the stream that the table does not have, and that are left out.
    pub missing: Vec<String>,
    /// What is done about conflicts.
    pub rules: Rules,
    /// What becomes of single columns.
    pub column_rules: ColumnRules,
    /// Where the hashes of its rows begin ([`RowHash`]).
    pub row_hash: u64,
    /// Rows that are deleted from it may have to be put back for a foreign key.
    pub keeps_deleted: bool,
    /// From where rows were copied whose versions, or deletions, are remembered.
    pub copied_from: Vec<copied::From>,
    /// For what the columns' decoders keep.
    _memory: Memory,
}

/// A memory context that goes with its owner. A plan is made anew after each invalidation, and a
/// domain's input function alone keeps 8 kB.
#[derive(Debug)]
struct Memory(pg_sys::MemoryContext);

impl Memory {
    fn new() -> Self {
        // SAFETY: a small context below TopMemoryContext, which always exists.
        Self(unsafe {
            pg_sys::AllocSetContextCreateInternal(
                pg_sys::TopMemoryContext,
                c"braid relation".as_ptr(),
                pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
                pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
                pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
            )
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: made for this value alone; functions that allocate there have put the
            // caller's context back, or an abort has.
            unsafe { pg_sys::MemoryContextDelete(self.0) };
        }
    }
}

/// Whether changes can be applied to a relation: it is an ordinary or a partitioned table.
#[must_use]
pub fn takes_changes(oid: pg_sys::Oid) -> bool {
    // SAFETY: a catalog look-up in a transaction; 0 for a relation that is not there.
    let kind = unsafe { pg_sys::get_rel_relkind(oid) }.cast_unsigned();
    kind == b'r' || kind == b'p'
}

/// Why changes can't be applied to a relation that is here, if they can't.
///
/// # Errors
/// As [`check_kind`].
pub(super) fn check_kind_of(oid: pg_sys::Oid) -> Result<(), PgError> {
    // SAFETY: in a transaction; the relation is closed again. A lock that readers take keeps it as it is.
    unsafe {
        let lock = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
        let relation = pg_sys::try_relation_open(oid, lock);
        if relation.is_null() {
            return Ok(());
        }
        let checked = check_kind(relation);
        pg_sys::relation_close(relation, lock);
        checked
    }
}

/// The table that changes go to is gone.
pub(super) fn dropped() -> PgError {
    PgError::new("42P01", "table was dropped while changes were applied")
}

/// Checks that rows of the stream may be written to a relation.
///
/// # Errors
/// 42809 for anything but an ordinary or partitioned table.
///
/// # Safety
/// `relation` is open, in a transaction.
pub unsafe fn check_kind(relation: pg_sys::Relation) -> Result<(), PgError> {
    // SAFETY: as the caller says.
    let (kind, is_partition, (schema, name)) = unsafe {
        let form = &*(*relation).rd_rel;
        let kind = form.relkind.cast_unsigned();
        if kind == b'r' || kind == b'p' {
            return Ok(());
        }
        (kind, form.relispartition, encoding::of_relation(relation))
    };
    if kind == b'f' && is_partition {
        return Err(PgError::new(
            "42809",
            format!("partition \"{schema}.{name}\" is a foreign table here"),
        )
        .with_detail("Changes are applied to ordinary and partitioned tables only.")
        .with_hint(
            "Detach the partition, or put an ordinary table in its place, then run braid.enable_subscription.",
        ));
    }
    Err(
        PgError::new("42809", format!("\"{schema}.{name}\" is not a table here"))
            .with_hint(
                "Rename it, create a table as it is at the provider in its place, and run braid.refresh_subscription and \
                 braid.enable_subscription.",
            ),
    )
}

/// Checks that no partition of a table, of any level, is a foreign table.
///
/// # Errors
/// 42809 when one is.
///
/// # Safety
/// In a transaction; the table is locked.
pub unsafe fn check_partitions(table: pg_sys::Oid) -> Result<(), PgError> {
    // SAFETY: as the caller says. A partition that is gone by now has no kind; what is opened is closed.
    unsafe {
        let below = ffi::find_all_inheritors(table, 0);
        for position in 0..compat::list_length(below) {
            let oid = compat::list_oid(below, position);
            if pg_sys::get_rel_relkind(oid).cast_unsigned() != b'f' {
                continue;
            }
            let lock = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
            let relation = pg_sys::try_relation_open(oid, lock);
            if relation.is_null() {
                continue;
            }
            let checked = check_kind(relation);
            pg_sys::relation_close(relation, lock);
            checked?;
        }
        pg_sys::list_free(below);
    }
    Ok(())
}

struct Attribute {
    name: String,
    type_oid: u32,
    type_modifier: i32,
    dropped: bool,
    generated: bool,
}

/// The attributes of an open relation.
///
/// # Safety
/// `relation` is open.
unsafe fn attributes(relation: pg_sys::Relation) -> Vec<Attribute> {
    // SAFETY: the caller holds the relation open, so its descriptor stays.
    unsafe {
        let descriptor = (*relation).rd_att;
        (0..usize::try_from((*descriptor).natts).unwrap_or(0))
            .map(|index| {
                let attribute = compat::TupleDescAttr(descriptor, index);
                Attribute {
                    name: encoding::from_server((*attribute).attname.data.as_ptr()),
                    type_oid: (*attribute).atttypid.to_u32(),
                    type_modifier: (*attribute).atttypmod,
                    dropped: (*attribute).attisdropped,
                    generated: (*attribute).attgenerated != 0,
                }
            })
            .collect()
    }
}

impl LocalRelation {
    /// Maps `remote` onto the open relation. With `ignores`, columns of the stream that are missing
    /// here are left out, unless a rule of the table says otherwise. To be called in a transaction,
    /// with the process's own rights.
    ///
    /// # Errors
    /// 42703 when a column of the stream is missing here and not left out.
    ///
    /// # Safety
    /// `relation` is open and locked.
    pub unsafe fn new(
        remote: &RemoteRelation,
        relation: pg_sys::Relation,
        charset: i32,
        ignores: bool,
    ) -> Result<Self, PgError> {
        // SAFETY: the caller keeps the relation open for the call.
        unsafe {
            check_kind(relation)?;
            let form = (*relation).rd_rel;
            let attributes = attributes(relation);
            let local_encoding = pg_sys::GetDatabaseEncoding();
            let memory = Memory::new();
            let mut columns = Vec::with_capacity(remote.columns.len());
            let mut missing = Vec::new();
            for (index, column) in remote.columns.iter().enumerate() {
                let found = attributes
                    .iter()
                    .position(|attribute| !attribute.dropped && attribute.name == column.name);
                match found.and_then(|local| Some((local, attributes.get(local)?))) {
                    Some((_, attribute)) if attribute.generated => {}
                    Some((local, attribute)) => columns.push(LocalColumn {
                        remote: index,
                        local,
                        name_hash: RowHash::of_column(&column.name),
                        decoder: ColumnDecoder::new(
                            attribute.type_oid,
                            attribute.type_modifier,
                            column.type_id,
                            (charset, local_encoding),
                            memory.0,
                        ),
                    }),
                    None => missing.push(MissingColumn {
                        name: column.name.clone(),
                        is_key: column.key,
                    }),
                }
            }
            let missing = missing::left_out(
                (*relation).rd_id,
                &remote.qualified_name(),
                ignores,
                &missing,
            )?;
            let root = if (*form).relispartition {
                find_table(&remote.namespace, &remote.name)?
                    .filter(|root| *root != (*relation).rd_id)
            } else {
                None
            };
            let defaults = attributes
                .iter()
                .enumerate()
                .filter(|(index, attribute)| {
                    !attribute.dropped
                        && !attribute.generated
                        && !columns.iter().any(|column| column.local == *index)
                })
                .map(|(local, _)| {
                    let own = i16::try_from(local + 1).unwrap_or(i16::MAX);
                    let attribute = compat::TupleDescAttr((*relation).rd_att, local);
                    let named = root.map_or(own, |root| {
                        pg_sys::get_attnum(root, (*attribute).attname.data.as_ptr())
                    });
                    Lacking { local, named }
                })
                .collect();
            let key = find_key(remote, relation, &columns);
            let rules = rules::load((*relation).rd_id)?;
            let column_rules = column_rules::load(
                relation,
                &remote.qualified_name(),
                &columns,
                key.is_some(),
                rules.asks(),
            )?;
            Ok(Self {
                oid: (*relation).rd_id,
                owner: (*form).relowner,
                partitioned: (*form).relkind.cast_unsigned() == b'p',
                width: attributes.len(),
                columns,
                key,
                defaults,
                root,
                missing,
                rules: rules.with_merged_rows(column_rules.were_set),
                column_rules,
                row_hash: RowHash::of_table(relation),
                keeps_deleted: deleted_parent::is_wanted((*relation).rd_id)?,
                copied_from: copied::tables((*relation).rd_id)?,
                _memory: memory,
            })
        }
    }
}

/// The index by which rows are found: one on just the stream's replica identity if there is one, else, as the stream then
/// carries whole old rows or only inserts, the primary key or another unique index whose columns the stream has.
///
/// # Safety
/// `relation` is open and locked.
unsafe fn find_key(
    remote: &RemoteRelation,
    relation: pg_sys::Relation,
    columns: &[LocalColumn],
) -> Option<Key> {
    // SAFETY: the caller keeps the relation open; the list and the indexes are opened and closed here.
    unsafe {
        let list = pg_sys::RelationGetIndexList(relation);
        let primary = (*relation).rd_pkindex;
        let mut candidates = Vec::new();
        for position in 0..compat::list_length(list) {
            candidates.push(compat::list_oid(list, position));
        }
        pg_sys::list_free(list);
        let identity: Vec<usize> = remote
            .columns
            .iter()
            .enumerate()
            .filter(|(_, column)| column.identity)
            .map(|(index, _)| index)
            .collect();
        let full = remote.identity == ReplicaIdentity::Full;
        let mut best: Option<(u8, Key)> = None;
        for oid in candidates {
            let index =
                pg_sys::index_open(oid, i32::try_from(pg_sys::AccessShareLock).unwrap_or(1));
            let key = read_key(index, (*relation).rd_att, columns);
            pg_sys::index_close(index, 0);
            let Some(key) = key else { continue };
            let same = !full
                && key.columns.len() == identity.len()
                && key
                    .columns
                    .iter()
                    .all(|column| identity.contains(&column.remote));
            // A key that is not the identity finds rows only when whole old rows come, or when there are no old rows.
            let rank = match (same, oid == primary) {
                (true, true) => 4,
                (true, false) => 3,
                (false, true) if full || identity.is_empty() => 2,
                (false, false) if full || identity.is_empty() => 1,
                _ => continue,
            };
            if best.as_ref().is_none_or(|(has, _)| rank > *has) {
                best = Some((rank, key));
            }
        }
        best.map(|(_, key)| key)
    }
}

/// An index's columns, if it is a usable unique index on plain columns that the stream has.
///
/// # Safety
/// `index` is open, and of the open table with this descriptor.
unsafe fn read_key(
    index: pg_sys::Relation,
    descriptor: pg_sys::TupleDesc,
    columns: &[LocalColumn],
) -> Option<Key> {
    // SAFETY: the caller keeps the index open; rd_index and its arrays belong to it.
    unsafe {
        let form = (*index).rd_index;
        if !(*form).indisunique
            || !(*form).indisvalid
            || !(*form).indimmediate
            // A key WITHOUT OVERLAPS is in a GiST index, where operators have other numbers.
            || (*(*index).rd_rel).relam != pg_sys::BTREE_AM_OID
            || !pg_sys::RelationGetIndexPredicate(index).is_null()
            || !pg_sys::RelationGetIndexExpressions(index).is_null()
        {
            return None;
        }
        let count = usize::try_from((*form).indnkeyatts).ok()?;
        let attributes = (*form).indkey.values.as_slice(count);
        let mut key = Vec::with_capacity(count);
        for (position, attribute) in attributes.iter().enumerate() {
            let local = usize::try_from(*attribute).ok()?.checked_sub(1)?;
            let column = columns.iter().find(|column| column.local == local)?;
            let family = *(*index).rd_opfamily.add(position);
            let input = *(*index).rd_opcintype.add(position);
            let operator = pg_sys::get_opfamily_member(family, input, input, 3);
            let equal = pg_sys::get_opcode(operator);
            if equal == pg_sys::InvalidOid {
                return None;
            }
            let declared = (*compat::TupleDescAttr(descriptor, local)).atttypid;
            key.push(KeyColumn {
                attribute: *attribute,
                remote: column.remote,
                equal,
                collation: *(*index).rd_indcollation.add(position),
                equality: Equality::of(index, position, declared),
            });
        }
        Some(Key {
            index: (*index).rd_id,
            columns: key,
        })
    }
}
