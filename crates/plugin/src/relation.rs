//! Compiles what a change of a relation needs: how its tuples are stored, how its columns are written, which keys it has, which
//! rows pass.

use std::ffi::CStr;

use braid_decoder::{
    Actions, KeyPlan, Publication, Publishing, RelationFacts, Shape, ShapeColumn, ShapeKey,
    UniqueKey, publishing,
};
use braid_gir::{ColumnFlags, ReplicaIdentity};
use braid_postgres::{compat, encoding};
use pgrx::pg_sys;

use super::column::{self, Encoder};
use super::key::KeyColumn;
use super::publications::{self, Catalogs};
use super::report;
use super::row_filter::RowFilters;
use super::running::Unwatched;
use super::scratch;
use super::tuple::Attribute;
use super::type_facts::TypeFacts;

/// A column that is sent.
#[derive(Debug)]
pub(super) struct SentColumn {
    /// Index of the attribute in the changed relation.
    pub(super) attribute: usize,
    /// Part of the replica identity, so that an old key has it.
    pub(super) in_identity: bool,
    pub(super) encoder: Encoder,
}

/// Keys, and the types of their columns.
pub(super) type Hashed = (KeyPlan, Vec<u32>);

/// A relation of which something is published.
#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) actions: Actions,
    /// Its changes are sent under an ancestor's name.
    pub(super) by_ancestor: bool,
    pub(super) shape: Shape,
    /// Attributes up to the last one that is needed.
    pub(super) attributes: Vec<Attribute>,
    pub(super) columns: Vec<SentColumn>,
    pub(super) key_columns: Vec<KeyColumn>,
    pub(super) keys: KeyPlan,
    pub(super) filters: Option<RowFilters>,
    /// Some column's bytes depend on the client's encoding.
    pub(super) sends_text: bool,
    /// Values are written as [`Encoder::new`] says.
    text: bool,
    /// Holds functions and filters; deleted by [`Compiled::release`].
    context: pg_sys::MemoryContext,
    /// The relations on which this depends.
    depends: Vec<u32>,
    /// The types on which this depends, by hash value.
    type_hashes: Vec<u32>,
}

impl Compiled {
    /// Compile `relation`, for [`Encoder::new`] with `text`. `None` if nothing of it is published.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot; `relation` is valid; `parent` outlives the result, and the current memory
    /// context is freed soon.
    pub(super) unsafe fn new(
        relation: pg_sys::Relation,
        publications: &[Publication],
        text: bool,
        parent: pg_sys::MemoryContext,
    ) -> Option<Self> {
        // SAFETY: as the caller says. The ancestor is closed after its last use.
        unsafe {
            let facts = facts(relation);
            let decision = report::or_raise(publishing(&facts, publications, &mut Catalogs::new()));
            if decision.actions == Actions::default() {
                return None;
            }
            if decision.publish_as == facts.oid {
                return Some(Self::compile(relation, relation, &decision, text, parent));
            }
            let ancestor = open_ancestor(decision.publish_as);
            let compiled = Self::compile(relation, ancestor, &decision, text, parent);
            pg_sys::RelationClose(ancestor);
            Some(compiled)
        }
    }

    unsafe fn compile(
        relation: pg_sys::Relation,
        ancestor: pg_sys::Relation,
        decision: &Publishing,
        text: bool,
        parent: pg_sys::MemoryContext,
    ) -> Self {
        // SAFETY: both relations are valid; the context is a new one.
        unsafe {
            let context = pg_sys::AllocSetContextCreateInternal(
                parent,
                c"braid relation".as_ptr(),
                pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
                pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
                pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
            );
            let (namespace, name) = encoding::of_relation(ancestor);
            let identity = Identity::of(relation);
            let map = AttributeMap { relation, ancestor };
            let mut compiled = Self {
                actions: decision.actions,
                by_ancestor: relation != ancestor,
                shape: Shape {
                    relation_oid: (*ancestor).rd_id.to_u32(),
                    namespace,
                    name,
                    identity: identity.kind,
                    columns: Vec::with_capacity(decision.columns.len()),
                    keys: Vec::new(),
                },
                attributes: Vec::new(),
                columns: Vec::with_capacity(decision.columns.len()),
                key_columns: Vec::new(),
                keys: KeyPlan::default(),
                filters: None,
                sends_text: false,
                text,
                context,
                depends: vec![(*ancestor).rd_id.to_u32()],
                type_hashes: Vec::new(),
            };
            for number in &decision.columns {
                compiled.add_column(&map, *number, &identity);
            }
            compiled.add_keys(relation, &identity);

            compiled.filters = scratch::within(context, || {
                // Constants in it are computed.
                let _unwatched = Unwatched::enter();
                RowFilters::new(decision, ancestor, || map.sources())
            });

            let mut attributes = attributes(relation);
            if compiled.filters.is_none() {
                let sent = compiled.columns.iter().map(|column| column.attribute);
                let keys = compiled.key_columns.iter().map(|key| key.attribute);
                attributes.truncate(sent.chain(keys).max().map_or(0, |last| last + 1));
            }
            compiled.attributes = attributes;
            compiled
        }
    }

    unsafe fn add_column(&mut self, map: &AttributeMap, number: i16, identity: &Identity) {
        // SAFETY: the relations of the map are valid; the context lives as long as `self`.
        unsafe {
            let Some((sent, own)) = map.find(number) else {
                return;
            };
            let facts = TypeFacts::look_up(sent.atttypid, sent.atttypmod);
            let encoder = Encoder::new(&facts, sent.attbyval, self.text, self.context);
            let in_identity = identity.has(own.attnum);
            let flag = |on: bool, bit| if on { bit } else { 0 };
            self.sends_text |= encoder.sends_text();
            self.type_hashes.extend(&facts.hashes);
            self.shape.columns.push(ShapeColumn {
                flags: ColumnFlags(
                    flag(in_identity, ColumnFlags::IDENTITY)
                        | flag(
                            identity.primary_key.contains(&own.attnum),
                            ColumnFlags::PRIMARY_KEY,
                        )
                        | flag(sent.attnotnull, ColumnFlags::NOT_NULL)
                        | flag(sent.attgenerated != 0, ColumnFlags::GENERATED),
                ),
                type_oid: facts.oid.to_u32(),
                type_modifier: facts.modifier,
                name: encoding::from_server(sent.attname.data.as_ptr()),
                type_namespace: facts.namespace,
                type_name: facts.name,
            });
            self.columns.push(SentColumn {
                attribute: index(own.attnum),
                in_identity,
                encoder,
            });
        }
    }

    unsafe fn add_keys(&mut self, relation: pg_sys::Relation, identity: &Identity) {
        let (mut keys, mut incomputable) = (Vec::new(), false);
        for index_oid in &identity.indexes {
            // SAFETY: the index is closed after its last use.
            unsafe {
                let index = pg_sys::RelationIdGetRelation((*index_oid).into());
                if index.is_null() {
                    incomputable = true;
                    continue;
                }
                let form = &*(*index).rd_index;
                if form.indisexclusion {
                    incomputable = true;
                } else if form.indisunique {
                    match self.key(relation, index, identity) {
                        Some(key) => keys.push(key),
                        None => incomputable = true,
                    }
                }
                pg_sys::RelationClose(index);
            }
        }
        self.keys = KeyPlan::new(keys, incomputable);
    }

    /// The unique key of `index`; `None` if it has expressions, or columns that can't be hashed.
    unsafe fn key(
        &mut self,
        relation: pg_sys::Relation,
        index: pg_sys::Relation,
        identity: &Identity,
    ) -> Option<UniqueKey> {
        // SAFETY: both relations are valid; a unique index has an operator family and a collation for each of its key columns.
        unsafe {
            let form = &*(*index).rd_index;
            let mut columns = Vec::new();
            let mut sent = Vec::new();
            for (position, number) in key_numbers(index).into_iter().enumerate() {
                if number <= 0 {
                    return None;
                }
                let attribute = &*compat::TupleDescAttr((*relation).rd_att, self::index(number));
                let facts = TypeFacts::look_up(attribute.atttypid, attribute.atttypmod);
                let order = (
                    *(*index).rd_opfamily.add(position),
                    *(*index).rd_indcollation.add(position),
                );
                let column =
                    KeyColumn::new(self::index(number), &facts, attribute.attbyval, order)?;
                self.type_hashes.extend(&facts.hashes);
                let mut name = encoding::from_server(attribute.attname.data.as_ptr());
                if !column.comparison.is_empty() {
                    // Another key than that of an index which compares the same column as usual. No name has a zero byte.
                    name.push('\0');
                    name.push_str(&column.comparison);
                }
                columns.push((self.key_columns.len(), name));
                sent.push(self.sent_column(&column));
                self.key_columns.push(column);
            }
            // The subscriber goes by columns that it knows.
            if let Some(columns) = sent.into_iter().collect() {
                self.shape.keys.push(ShapeKey {
                    nulls_equal: form.indnullsnotdistinct,
                    columns,
                });
            }
            let in_identity = key_numbers(index)
                .into_iter()
                .all(|number| identity.has(number));
            let names = (self.shape.namespace.as_str(), self.shape.name.as_str());
            Some(UniqueKey::new(
                names,
                columns,
                !form.indnullsnotdistinct,
                in_identity,
            ))
        }
    }

    /// Where a key's column is among those that are sent, and what compares it; `None` when it is not sent.
    fn sent_column(&self, key: &KeyColumn) -> Option<(u16, String)> {
        let sent = |column: &SentColumn| column.attribute == key.attribute;
        let place = self.columns.iter().position(sent)?;
        Some((u16::try_from(place).ok()?, key.comparison.clone()))
    }

    /// What its hashes are made of. Those that are made of something else do not meet them.
    pub(super) fn hashed(&self) -> Hashed {
        let types = self.key_columns.iter().map(|key| key.type_oid);
        (self.keys.clone(), types.collect())
    }

    /// Whether a change of `relation` concerns this.
    pub(super) fn depends_on(&self, relation: u32) -> bool {
        self.depends.contains(&relation)
    }

    /// Whether a change of a type with this hash value concerns this.
    pub(super) fn has_type(&self, hash: u32) -> bool {
        self.type_hashes.contains(&hash)
    }

    /// Free what PostgreSQL allocated. Not done by dropping: when the plugin's own context goes, this one has gone before.
    pub(super) fn release(self) {
        // SAFETY: the context is this value's own, and nothing refers to it any more.
        unsafe { pg_sys::MemoryContextDelete(self.context) };
    }
}

/// What is to be known of a relation to decide what of it is published.
///
/// # Safety
/// `relation` is valid.
pub(super) unsafe fn facts(relation: pg_sys::Relation) -> RelationFacts {
    // SAFETY: as the caller says.
    unsafe {
        let form = &*(*relation).rd_rel;
        RelationFacts {
            oid: (*relation).rd_id.to_u32(),
            is_partition: form.relispartition,
            is_partitioned: form.relkind.cast_unsigned() == pg_sys::RELKIND_PARTITIONED_TABLE,
        }
    }
}

/// The relation under whose name changes are sent; to be closed.
///
/// # Safety
/// In a transaction with a snapshot for catalogs.
pub(super) unsafe fn open_ancestor(oid: u32) -> pg_sys::Relation {
    // SAFETY: as the caller says.
    let ancestor = unsafe { pg_sys::RelationIdGetRelation(oid.into()) };
    if ancestor.is_null() {
        report::fail(
            pgrx::PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("could not open relation with OID {oid}"),
            None,
        );
    }
    ancestor
}

/// Numbers of the attributes that were not dropped.
///
/// # Safety
/// `relation` is valid.
pub(super) unsafe fn live_numbers(relation: pg_sys::Relation) -> Vec<i16> {
    // SAFETY: as the caller says.
    let live = unsafe { all(relation) }.filter(|attribute| !attribute.attisdropped);
    live.map(|attribute| attribute.attnum).collect()
}

/// How old rows of a relation are identified in WAL.
pub(super) struct Identity {
    pub(super) kind: ReplicaIdentity,
    /// Attributes of the index that identifies rows.
    pub(super) columns: Vec<i16>,
    pub(super) primary_key: Vec<i16>,
    /// All indexes.
    indexes: Vec<u32>,
}

impl Identity {
    /// # Safety
    /// `relation` is valid; in a transaction with a snapshot for catalogs.
    pub(super) unsafe fn of(relation: pg_sys::Relation) -> Self {
        // SAFETY: as the caller says. RelationGetIndexList fills in the OIDs of the primary key and of the identity's index.
        unsafe {
            let indexes = publications::oids(pg_sys::RelationGetIndexList(relation));
            let letter = (*(*relation).rd_rel).relreplident.cast_unsigned();
            let kind = ReplicaIdentity::from_byte(letter).unwrap_or(ReplicaIdentity::Nothing);
            let identity = (*relation).rd_replidindex;
            let primary = (*relation).rd_pkindex;
            Self {
                kind,
                columns: columns_of(identity),
                primary_key: columns_of(primary),
                indexes,
            }
        }
    }

    fn has(&self, number: i16) -> bool {
        self.kind == ReplicaIdentity::Full || self.columns.contains(&number)
    }
}

/// Key columns of an index by its OID; none for an invalid one.
unsafe fn columns_of(index: pg_sys::Oid) -> Vec<i16> {
    if index == pg_sys::InvalidOid {
        return Vec::new();
    }
    // SAFETY: in a transaction; the index is closed after its last use.
    unsafe {
        let index = pg_sys::RelationIdGetRelation(index);
        if index.is_null() {
            return Vec::new();
        }
        let numbers = key_numbers(index);
        pg_sys::RelationClose(index);
        numbers
    }
}

/// Attribute numbers of an index's key columns; 0 for an expression.
unsafe fn key_numbers(index: pg_sys::Relation) -> Vec<i16> {
    // SAFETY: `index` is valid; pg_index.indkey has at least as many members as there are key columns.
    unsafe {
        let form = (*index).rd_index;
        let count = usize::try_from((*form).indnkeyatts).unwrap_or_default();
        (*form).indkey.values.as_slice(count).to_vec()
    }
}

/// Index of an attribute by its number.
pub(super) fn index(number: i16) -> usize {
    usize::try_from(number).unwrap_or(1).saturating_sub(1)
}

/// From the columns of the relation under whose name changes are sent to those of the changed one, by name.
pub(super) struct AttributeMap {
    pub(super) relation: pg_sys::Relation,
    pub(super) ancestor: pg_sys::Relation,
}

impl AttributeMap {
    /// Attribute `number` of the ancestor, and the one of the relation that has its name.
    ///
    /// # Safety
    /// Both relations are valid.
    pub(super) unsafe fn find(
        &self,
        number: i16,
    ) -> Option<(
        &pg_sys::FormData_pg_attribute,
        &pg_sys::FormData_pg_attribute,
    )> {
        // SAFETY: both relations are valid for as long as the map.
        unsafe {
            let wanted = all(self.ancestor).find(|attribute| attribute.attnum == number)?;
            if self.relation == self.ancestor {
                return Some((wanted, wanted));
            }
            let own = all(self.relation).find(|attribute| {
                !attribute.attisdropped && attribute.attname.data == wanted.attname.data
            })?;
            Some((wanted, own))
        }
    }

    /// For every attribute of the ancestor the index of the relation's, and whether it is by value.
    pub(super) fn sources(&self) -> Vec<Option<(usize, bool)>> {
        // SAFETY: both relations are valid for as long as the map.
        unsafe {
            all(self.ancestor)
                .map(|attribute| {
                    if attribute.attisdropped {
                        return None;
                    }
                    let (_, own) = self.find(attribute.attnum)?;
                    Some((index(own.attnum), own.attbyval))
                })
                .collect()
        }
    }
}

/// The attributes of a relation.
unsafe fn all<'r>(
    relation: pg_sys::Relation,
) -> impl Iterator<Item = &'r pg_sys::FormData_pg_attribute> {
    // SAFETY: `relation` is valid, so its descriptor has `natts` attributes.
    unsafe {
        let descriptor = (*relation).rd_att;
        let natts = usize::try_from((*descriptor).natts).unwrap_or_default();
        (0..natts).map(move |index| &*compat::TupleDescAttr(descriptor, index))
    }
}

/// How the attributes of a relation are stored.
///
/// # Safety
/// `relation` is valid.
pub(super) unsafe fn attributes(relation: pg_sys::Relation) -> Vec<Attribute> {
    // SAFETY: as the caller says; missing values belong to the descriptor and are copied.
    unsafe {
        let descriptor = (*relation).rd_att;
        all(relation)
            .map(|attribute| {
                let missing = attribute
                    .atthasmissing
                    .then(|| missing(descriptor, attribute));
                Attribute {
                    len: attribute.attlen,
                    align: match attribute.attalign.cast_unsigned() {
                        pg_sys::TYPALIGN_CHAR => 1,
                        pg_sys::TYPALIGN_SHORT => 2,
                        pg_sys::TYPALIGN_INT => 4,
                        _ => 8,
                    },
                    missing: missing.flatten(),
                }
            })
            .collect()
    }
}

/// The stored form of what rows have that are older than the attribute.
unsafe fn missing(
    descriptor: pg_sys::TupleDesc,
    attribute: &pg_sys::FormData_pg_attribute,
) -> Option<Box<[u8]>> {
    // SAFETY: the attribute is one of the descriptor's.
    unsafe {
        let mut is_null = false;
        let number = i32::from(attribute.attnum);
        let value = pg_sys::getmissingattr(descriptor, number, &raw mut is_null);
        if is_null {
            return None;
        }
        let len = usize::try_from(attribute.attlen);
        if attribute.attbyval {
            let bytes = value.value().to_le_bytes();
            return bytes.get(..len.unwrap_or_default()).map(Into::into);
        }
        let start = value.cast_mut_ptr::<u8>().cast_const();
        Some(match (len, attribute.attlen) {
            (Ok(len), _) => std::slice::from_raw_parts(start, len).into(),
            (_, -1) => column::varlena_at(start).into(),
            _ => CStr::from_ptr(start.cast()).to_bytes_with_nul().into(),
        })
    }
}
