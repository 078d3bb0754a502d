//! Mapping of a relation of the stream to a local one: columns by name, the index that finds its
//! rows, the conversion of its values. Built once for each schema record and local relation, and
//! again after either changed.

use braid_bgworker::resolution::Rules;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::table_order::HashedKey;
use braid_gir::{Image, ReplicaIdentity, Schema, Value};
use braid_node::ddl::{self, ColumnPlace};
use braid_node::table_order;
use braid_node::versions::{self, tables};
use braid_postgres::error::PgError;
use braid_postgres::lock::LockMode;
use braid_postgres::memory::Scratch;
use braid_postgres::names::find_table;
use braid_postgres::relation::{Relation, RelationRef};
use braid_postgres::tuple_desc::{Attribute as Column, TupleDesc};
use braid_postgres::{plain, snapshot, syscache};
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
    /// Mark of the statement that gave it its name; 0 if none is known.
    pub mark: u64,
}

/// A schema record of the stream.
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
    /// Stores a schema record.
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
                    mark: column.mark,
                })
                .collect(),
            hashed: table_order::hashed_keys(schema),
        }
    }

    /// Returns `"namespace.name"`, for messages.
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
    /// Rule for when its values are equal.
    pub equality: Equality,
}

/// A column of the key that identifies a row.
#[derive(Debug, Clone, Copy)]
pub struct IdentityColumn {
    /// Attribute number in the table, from 1.
    pub attribute: i16,
    /// Position among the stream's columns.
    pub remote: usize,
    /// Rule for when its values are equal.
    pub equality: Equality,
}

impl From<KeyColumn> for IdentityColumn {
    fn from(column: KeyColumn) -> Self {
        Self {
            attribute: column.attribute,
            remote: column.remote,
            equality: column.equality,
        }
    }
}

/// An index that finds one row by its key.
///
/// Example of a narrow key: the provider identifies rows by `(a, b)`, and the index is on `(a)`.
/// The provider's rows (1, 1) and (1, 2) are different rows, of which this table has room for one.
/// If the row here is (1, 2), a delete of (1, 1) must not take it. So a row that the index finds is
/// compared in the other columns of the identity as well.
#[derive(Debug, Clone)]
pub struct Key {
    /// The index.
    pub index: pg_sys::Oid,
    /// Columns of the index.
    pub columns: Vec<KeyColumn>,
    /// The columns that identify a row: the index's, or those of the provider's replica identity,
    /// in the order of the provider's key, if the index has only some of these.
    pub identity: Vec<IdentityColumn>,
}

impl Key {
    /// Whether the index has only some of the columns that identify a row.
    #[must_use]
    pub fn is_narrow(&self) -> bool {
        self.rest().next().is_some()
    }

    /// The columns of the identity that the index lacks.
    pub fn rest(&self) -> impl Iterator<Item = &IdentityColumn> {
        let in_index = |attribute| self.columns.iter().any(|one| one.attribute == attribute);
        let columns = self.identity.iter();
        columns.filter(move |column| !in_index(column.attribute))
    }
}

/// A local column and where its values come from.
#[derive(Debug)]
pub struct LocalColumn {
    /// Position among the stream's columns.
    pub remote: usize,
    /// Position in the local row, from 0.
    pub local: usize,
    /// Hash of the column's name, as it is part of a row's hash ([`RowHash`]).
    pub name_hash: u64,
    /// Converts its values.
    pub decoder: ColumnDecoder,
}

/// Converts the values of an image's columns that `wants` accepts into `row`, which is as wide as
/// the table; `columns` are in the stream's order.
///
/// # Errors
/// 08P01 for an invalid image; whatever the types' functions raise.
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
    /// Attribute number, from 1, in the table that the stream names, whose default is used.
    pub named: i16,
}

/// Plan for applying a relation of the stream to a local table.
#[derive(Debug)]
pub struct LocalRelation {
    /// The table.
    pub oid: pg_sys::Oid,
    /// The table's owner.
    pub owner: pg_sys::Oid,
    /// Partitioned: rows go to a partition.
    pub partitioned: bool,
    /// Columns of a local row, dropped ones included.
    pub width: usize,
    /// Columns that the stream has, in the stream's order.
    pub columns: Vec<LocalColumn>,
    /// The key by which rows are found; `None`: only by a scan of the whole table.
    pub key: Option<Key>,
    /// Local columns that the stream does not have: inserts compute their defaults.
    pub defaults: Vec<Lacking>,
    /// The partitioned table that the stream names, if this is a partition of it.
    pub root: Option<pg_sys::Oid>,
    /// Columns of the stream that the table does not have, and that are left out.
    pub missing: Vec<String>,
    /// Rules for conflicts.
    pub rules: Rules,
    /// Rules for single columns.
    pub column_rules: ColumnRules,
    /// Seed of its rows' hashes ([`RowHash`]).
    pub row_hash: u64,
    /// Whether deleted rows are stored, because a foreign key may need them back.
    pub keeps_deleted: bool,
    /// Sources of copied rows whose versions, or deletions, are remembered.
    pub copied_from: Vec<copied::From>,
    /// Memory of the columns' decoders. A new plan is made after each invalidation, and a domain's
    /// input function alone keeps 8 kB.
    _memory: Scratch,
}

/// Whether changes can be applied to a relation: it is an ordinary or a partitioned table.
#[must_use]
pub fn takes_changes(oid: pg_sys::Oid) -> bool {
    let kind = plain::get_rel_relkind(oid).cast_unsigned();
    kind == b'r' || kind == b'p'
}

/// Checks that changes can be applied to a relation, if it exists.
///
/// # Errors
/// As [`check_kind`].
pub(super) fn check_kind_of(oid: pg_sys::Oid) -> Result<(), PgError> {
    // A lock that allows reading prevents changes of its kind.
    let mode = LockMode::AccessShare;
    let Some(relation) = Relation::try_open(oid, mode) else {
        return Ok(());
    };
    let checked = check_kind(relation.view());
    relation.close(mode);
    checked
}

/// Returns the error for a table that was dropped between the look-up of its name and its lock.
/// Another table may have the name by now, so the transaction is applied again, and the name looked
/// up again.
pub(super) fn dropped() -> PgError {
    PgError::new(
        SqlState::SerializationFailure,
        "table was dropped while changes were applied",
    )
}

/// Checks that rows of the stream may be written to a relation.
///
/// # Errors
/// 42809 for anything but an ordinary or partitioned table.
pub fn check_kind(relation: RelationRef<'_>) -> Result<(), PgError> {
    let kind = relation.kind();
    if kind == b'r' || kind == b'p' {
        return check_unversioned(relation);
    }
    let (schema, name) = relation.qualified_name();
    if kind == b'f' && relation.is_partition() {
        return Err(PgError::new(
            SqlState::WrongObjectType,
            format!("partition \"{schema}.{name}\" is a foreign table here"),
        )
        .with_detail("Changes are applied to ordinary and partitioned tables only.")
        .with_hint(
            "Detach the partition, or put an ordinary table in its place, then run braid.enable_subscription.",
        ));
    }
    Err(
        PgError::new(SqlState::WrongObjectType, format!("\"{schema}.{name}\" is not a table here"))
            .with_hint(
                "Rename it, create a table as it is at the provider in its place, and run braid.refresh_subscription and \
                 braid.enable_subscription.",
            ),
    )
}

/// Checks that the current transaction may write a table: a versioned one only in the order of
/// versions, as a transaction that begins with them.
fn check_unversioned(relation: RelationRef<'_>) -> Result<(), PgError> {
    let Some(table) = tables::of(relation.oid()) else {
        return Ok(());
    };
    // In the other phases what was written before is on its way.
    if table.phase != tables::COUNTS || versions::is_in_order(table.relation) {
        return Ok(());
    }
    let (schema, name) = relation.qualified_name();
    Err(PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!(
            "a change without versions cannot be applied to versioned table \"{schema}.{name}\""
        ),
    )
    .with_detail("It would be applied without regard to the order of versions.")
    .with_hint("All nodes write the table in versioned transactions. See braid.unversion_table."))
}

/// Checks that no partition of a table, of any level, is a foreign table.
///
/// # Errors
/// 42809 if one is.
///
/// In a transaction; the table is locked.
pub fn check_partitions(table: pg_sys::Oid) -> Result<(), PgError> {
    // A partition that was dropped meanwhile has no kind.
    let below = syscache::with_inheritors(table, LockMode::None).into_iter();
    below
        .filter(|oid| syscache::relation_kind(*oid) == b'f')
        .try_for_each(check_kind_of)
}

struct Attribute {
    name: String,
    type_oid: u32,
    type_modifier: i32,
    dropped: bool,
    generated: bool,
}

/// Returns the attributes of an open relation.
fn attributes(relation: RelationRef<'_>) -> Vec<Attribute> {
    let all = relation.descriptor().iter();
    all.map(|attribute| Attribute {
        name: attribute.name(),
        type_oid: attribute.type_id().to_u32(),
        type_modifier: attribute.type_modifier(),
        dropped: attribute.is_dropped(),
        generated: attribute.is_generated(),
    })
    .collect()
}

/// Returns the local position of a column of the stream: under its name, or under the name that a
/// statement has given it since. Returns `Some(None)` if it is missing, `None` if a statement has
/// dropped it.
#[allow(clippy::option_option, reason = "two ways not to have a place")]
fn place_of(
    attributes: &[Attribute],
    relation: pg_sys::Oid,
    subscription_id: u32,
    column: &RemoteColumn,
) -> Result<Option<Option<usize>>, PgError> {
    let name = column.name.as_str();
    let found = attributes
        .iter()
        .position(|attribute| !attribute.dropped && attribute.name == name);
    let number = found.and_then(|place| i16::try_from(place + 1).ok());
    let number = number.unwrap_or(0);
    // A statement may have committed while this transaction waited for the table's lock. The
    // attributes are those after that statement.
    let find = || ddl::column_place(subscription_id, relation, name, number, column.mark);
    Ok(match snapshot::latest(find)? {
        ColumnPlace::ByName => Some(found),
        ColumnPlace::Dropped => None,
        ColumnPlace::Renamed(number) => {
            let place = usize::try_from(number).ok().and_then(|n| n.checked_sub(1));
            // Renamed, and then dropped.
            let place = place.filter(|place| attributes.get(*place).is_some_and(|a| !a.dropped));
            place.map(Some)
        }
        ColumnPlace::NotYet => return Err(not_yet(name)),
    })
}

/// Returns the error for a row with a column that gets its name by a statement that has not arrived
/// yet. Another column may have the name at present.
fn not_yet(name: &str) -> PgError {
    PgError::new(
        SqlState::UndefinedColumn,
        format!("column \"{name}\" of the provider is newer than the table here"),
    )
    .with_hint("A statement of another node is awaited. braid.ddl_log of the provider has it.")
}

impl LocalRelation {
    /// Maps `remote` onto the open relation. With `ignores`, columns of the stream that are missing
    /// here are left out, unless a rule of the table says otherwise. Called in a transaction, with
    /// the process's own rights.
    ///
    /// # Errors
    /// 42703 if a column of the stream is missing here and not left out.
    pub fn new(
        remote: &RemoteRelation,
        relation: RelationRef<'_>,
        charset: i32,
        ignores: bool,
        subscription_id: u32,
    ) -> Result<Self, PgError> {
        check_kind(relation)?;
        let oid = relation.oid();
        let attributes = attributes(relation);
        let local_encoding = plain::GetDatabaseEncoding();
        let memory = Scratch::small(c"braid relation");
        let mut columns = Vec::with_capacity(remote.columns.len());
        let mut missing = Vec::new();
        for (index, column) in remote.columns.iter().enumerate() {
            let Some(found) = place_of(&attributes, oid, subscription_id, column)? else {
                continue;
            };
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
                        memory.context(),
                    ),
                }),
                None => missing.push(MissingColumn {
                    name: column.name.clone(),
                    is_key: column.key,
                }),
            }
        }
        let missing = missing::left_out(oid, &remote.qualified_name(), ignores, &missing)?;
        let root = if relation.is_partition() {
            find_table(&remote.namespace, &remote.name)?.filter(|root| *root != oid)
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
                let name = relation.descriptor().get(local).map(Column::raw_name);
                let named = match (root, name) {
                    (Some(root), Some(name)) => syscache::column_number(root, name),
                    _ => own,
                };
                Lacking { local, named }
            })
            .collect();
        let key = find_key(remote, relation, &columns);
        let rules = rules::load(oid)?;
        let column_rules = column_rules::load(
            relation,
            &remote.qualified_name(),
            &columns,
            key.is_some(),
            rules.asks(),
        )?;
        Ok(Self {
            oid,
            owner: relation.owner(),
            partitioned: relation.kind() == b'p',
            width: attributes.len(),
            columns,
            key,
            defaults,
            root,
            missing,
            rules: rules.with_merged_rows(column_rules.were_set),
            column_rules,
            row_hash: RowHash::of_table(relation),
            keeps_deleted: deleted_parent::is_wanted(oid)?,
            copied_from: copied::tables(oid)?,
            _memory: memory,
        })
    }
}

/// The index by which rows are found. Returns, if it exists, the first of:
///
/// 1. one on just the stream's replica identity,
/// 2. if the stream has a key as its identity: one on some of the identity's columns
///    ([`Key::is_narrow`]); the table's own replica identity, or else its primary key, before
///    others,
/// 3. if the stream carries whole old rows, or only inserts: the primary key, or another unique
///    index whose columns the stream has.
fn find_key(
    remote: &RemoteRelation,
    relation: RelationRef<'_>,
    columns: &[LocalColumn],
) -> Option<Key> {
    let indexes = relation.indexes();
    let identity: Vec<usize> = remote
        .columns
        .iter()
        .enumerate()
        .filter(|(_, column)| column.identity)
        .map(|(index, _)| index)
        .collect();
    let any = remote.identity == ReplicaIdentity::Full || identity.is_empty();
    let own_identity = match relation.replica_index() {
        pg_sys::InvalidOid => indexes.primary,
        replica => replica,
    };
    let mut best: Option<(u8, Key)> = None;
    for oid in indexes.all {
        let index = Relation::open(oid, LockMode::AccessShare);
        let shape = relation.descriptor();
        let Some(mut key) = read_key(index.view(), shape, columns) else {
            continue;
        };
        let has = |position: &usize| key.columns.iter().any(|one| one.remote == *position);
        let is_part = !any && key.columns.iter().all(|one| identity.contains(&one.remote));
        let same = is_part && identity.iter().all(has);
        // The collector of deletions identifies rows by the table's own identity.
        let is_first = oid
            == if is_part && !same {
                own_identity
            } else {
                indexes.primary
            };
        let rank = match (same, is_first) {
            (true, true) => 4,
            (true, false) => 3,
            (false, true) if any || is_part => 2,
            (false, false) if any || is_part => 1,
            _ => continue,
        };
        if is_part && !same {
            let Some(wide) = wide_identity(remote, &identity, (&key, shape), columns) else {
                continue;
            };
            key.identity = wide;
        }
        if best.as_ref().is_none_or(|(has, _)| rank > *has) {
            best = Some((rank, key));
        }
    }
    best.map(|(_, key)| key)
}

/// Returns the columns of the stream's replica identity, of which `key` has some, in the order of
/// the provider's key. Returns `None` if the table lacks one of them.
fn wide_identity(
    remote: &RemoteRelation,
    identity: &[usize],
    (key, shape): (&Key, TupleDesc<'_>),
    columns: &[LocalColumn],
) -> Option<Vec<IdentityColumn>> {
    let column = |position: &usize| {
        if let Some(column) = key.columns.iter().find(|one| one.remote == *position) {
            return Some(IdentityColumn::from(*column));
        }
        let local = columns.iter().find(|one| one.remote == *position)?.local;
        let attribute = shape.get(local)?;
        Some(IdentityColumn {
            attribute: i16::try_from(local + 1).ok()?,
            remote: *position,
            equality: Equality::by_default(attribute.type_id(), attribute.collation()),
        })
    };
    // Hashes that come with a copy are made in that order.
    let position_of = |name: &str| remote.columns.iter().position(|one| one.name == name);
    let in_order = remote.hashed.iter().find_map(|hashed| {
        let names = hashed.columns.iter().map(|column| column.name.as_str());
        let positions: Vec<usize> = names.filter_map(position_of).collect();
        let is_identity = positions.len() == identity.len()
            && hashed.columns.len() == identity.len()
            && positions.iter().all(|one| identity.contains(one));
        is_identity.then_some(positions)
    });
    let positions = in_order.as_deref().unwrap_or(identity);
    positions.iter().map(column).collect()
}

/// Returns an open index's columns, if it is a usable unique index on plain columns of the table
/// that the stream has.
fn read_key(
    relation: RelationRef<'_>,
    shape: TupleDesc<'_>,
    columns: &[LocalColumn],
) -> Option<Key> {
    let index = relation.index()?;
    if !index.indisunique
        || !index.indisvalid
        || !index.indimmediate
        // A key WITHOUT OVERLAPS is in a GiST index, where operators have other numbers.
        || !index.is_btree()
        || index.has_conditions_or_expressions()
    {
        return None;
    }
    let mut key = Vec::new();
    for (attribute, operators) in index.key_columns().iter().zip(index.operators()) {
        let local = usize::try_from(*attribute).ok()?.checked_sub(1)?;
        let column = columns.iter().find(|column| column.local == local)?;
        let operator = syscache::equality_operator(operators.family, operators.input);
        let equal = syscache::function_of(operator);
        if equal == pg_sys::InvalidOid {
            return None;
        }
        key.push(KeyColumn {
            attribute: *attribute,
            remote: column.remote,
            equal,
            collation: operators.collation,
            equality: Equality::of(operators, shape.get(local)?.type_id()),
        });
    }
    Some(Key {
        index: index.oid(),
        identity: key.iter().copied().map(IdentityColumn::from).collect(),
        columns: key,
    })
}
