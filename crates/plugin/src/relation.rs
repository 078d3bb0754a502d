//! Compiles what a change of a relation needs: how its tuples are stored, how its columns are
//! written, which keys it has, which rows pass.

use braid_decoder::{
    Actions, KeyPlan, Publication, Publishing, RelationFacts, Shape, ShapeColumn, ShapeKey,
    UniqueKey, publishing,
};
use braid_gir::{ColumnFlags, ReplicaIdentity};
use braid_postgres::relation::{Described, IndexRef, RelationRef};
use braid_postgres::syscache::IndexRow;
use braid_postgres::tuple_desc::{Attribute as Column, TupleDesc};
use pgrx::pg_sys;

use super::column::Encoder;
use super::invalidation::Notes;
use super::key::KeyColumn;
use super::marks;
use super::publications::Catalogs;
use super::relation_cache::Compilation;
use super::report;
use super::routed::Routed;
use super::row_filter::RowFilters;
use super::running::Unwatched;
use super::scratch::{PartMemory, StreamMemory};
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
    /// The relation's changes are sent under an ancestor's name.
    pub(super) by_ancestor: bool,
    pub(super) shape: Shape,
    /// Attributes up to the last one that is needed.
    pub(super) attributes: Vec<Attribute>,
    pub(super) columns: Vec<SentColumn>,
    pub(super) key_columns: Vec<KeyColumn>,
    pub(super) keys: KeyPlan,
    pub(super) filters: Option<RowFilters>,
    /// The rows of a routed table that the subscriber gets.
    pub(super) routed: Option<Routed>,
    /// Some column's bytes depend on the client's encoding.
    pub(super) sends_text: bool,
    /// Attribute numbers of the columns in the relation under whose name they are sent.
    numbers: Vec<i16>,
    /// Values are written as [`Encoder::new`] says.
    text: bool,
    /// Holds functions and filters; deleted by [`Compiled::release`].
    context: PartMemory,
    /// The relations on which this depends.
    depends: Vec<u32>,
    /// The types on which this depends, by hash value.
    type_hashes: Vec<u32>,
}

impl Compiled {
    /// Compile `relation`, for [`Encoder::new`] with `text`, and for a subscriber that is the node
    /// `member`. `None` if nothing of it is published.
    pub(super) fn new(
        relation: RelationRef<'_>,
        publications: &[Publication],
        member: Option<&str>,
        text: bool,
        parent: StreamMemory,
    ) -> Option<Self> {
        let facts = facts(relation);
        let decision = report::or_raise(publishing(&facts, publications, &mut Catalogs::new()));
        if decision.actions == Actions::default() {
            return None;
        }
        if decision.publish_as == facts.oid {
            return Some(Self::compile(
                relation, relation, &decision, member, text, parent,
            ));
        }
        let ancestor = open_ancestor(decision.publish_as);
        Some(Self::compile(
            relation,
            ancestor.view(),
            &decision,
            member,
            text,
            parent,
        ))
    }

    fn compile(
        relation: RelationRef<'_>,
        ancestor: RelationRef<'_>,
        decision: &Publishing,
        member: Option<&str>,
        text: bool,
        parent: StreamMemory,
    ) -> Self {
        let context = PartMemory::below(parent, c"braid relation");
        let (namespace, name) = ancestor.qualified_name();
        let identity = Identity::of(relation);
        let map = AttributeMap { relation, ancestor };
        let mut compiled = Self {
            actions: decision.actions,
            by_ancestor: relation.oid() != ancestor.oid(),
            shape: Shape {
                relation_oid: ancestor.oid().to_u32(),
                namespace,
                name,
                identity: identity.kind,
                columns: Vec::with_capacity(decision.columns.len()),
                keys: Vec::new(),
            },
            attributes: Vec::new(),
            numbers: Vec::with_capacity(decision.columns.len()),
            columns: Vec::with_capacity(decision.columns.len()),
            key_columns: Vec::new(),
            keys: KeyPlan::default(),
            filters: None,
            routed: None,
            sends_text: false,
            text,
            context,
            depends: vec![ancestor.oid().to_u32()],
            type_hashes: Vec::new(),
        };
        for number in &decision.columns {
            compiled.add_column(&map, *number, &identity);
        }
        compiled.add_keys(relation, &identity);

        compiled.filters = compiled.context.get().run(|| {
            // Constants in it are computed.
            let _unwatched = Unwatched::enter();
            RowFilters::new(decision, ancestor, || map.sources())
        });

        compiled.routed = member.and_then(|member| {
            compiled.context.get().run(|| {
                let _unwatched = Unwatched::enter();
                Routed::new(relation, member)
            })
        });

        let mut attributes = attributes(relation);
        if compiled.filters.is_none() && compiled.routed.is_none() {
            let sent = compiled.columns.iter().map(|column| column.attribute);
            let keys = compiled.key_columns.iter().map(|key| key.attribute);
            attributes.truncate(sent.chain(keys).max().map_or(0, |last| last + 1));
        }
        compiled.attributes = attributes;
        compiled
    }

    /// Gives the columns the marks that statements have left. In a transaction with a historic
    /// snapshot.
    pub(super) fn add_marks(&mut self) {
        let marks = marks::of(self.shape.relation_oid);
        if marks.is_empty() {
            return;
        }
        for (column, number) in self.shape.columns.iter_mut().zip(&self.numbers) {
            column.mark = marks
                .iter()
                .filter(|mark| mark.number == *number && mark.name == column.name)
                .map(|mark| mark.mark)
                .min()
                .unwrap_or(0);
        }
    }

    fn add_column(&mut self, map: &AttributeMap<'_>, number: i16, identity: &Identity) {
        let Some((sent, own)) = map.find(number) else {
            return;
        };
        let facts = TypeFacts::look_up(sent.type_id(), sent.type_modifier());
        let encoder = Encoder::new(&facts, sent.is_by_value(), self.text, self.context.get());
        let in_identity = identity.has(own.number());
        let in_primary_key = identity.primary_key.contains(&own.number());
        let flag = |on: bool, bit| if on { bit } else { 0 };
        self.sends_text |= encoder.sends_text();
        self.type_hashes.extend(&facts.hashes);
        self.shape.columns.push(ShapeColumn {
            flags: ColumnFlags(
                flag(in_identity, ColumnFlags::IDENTITY)
                    | flag(in_primary_key, ColumnFlags::PRIMARY_KEY)
                    | flag(sent.is_not_null(), ColumnFlags::NOT_NULL)
                    | flag(sent.is_generated(), ColumnFlags::GENERATED),
            ),
            type_oid: facts.oid.to_u32(),
            type_modifier: facts.modifier,
            name: sent.name(),
            type_namespace: facts.namespace,
            type_name: facts.name,
            mark: 0,
        });
        self.numbers.push(sent.number());
        self.columns.push(SentColumn {
            attribute: index(own.number()),
            in_identity,
            encoder,
        });
    }

    fn add_keys(&mut self, relation: RelationRef<'_>, identity: &Identity) {
        let (mut keys, mut incomputable) = (Vec::new(), false);
        for index_oid in &identity.indexes {
            let index = Described::find((*index_oid).into());
            let Some(index) = index.as_ref().and_then(|index| index.view().index()) else {
                incomputable = true;
                continue;
            };
            if index.indisexclusion {
                incomputable = true;
            } else if index.indisunique {
                match self.key(relation, index, identity) {
                    Some(key) => keys.push(key),
                    None => incomputable = true,
                }
            }
        }
        self.keys = KeyPlan::new(keys, incomputable);
    }

    /// The unique key of `index`; `None` if it has expressions, or columns that can't be hashed.
    fn key(
        &mut self,
        relation: RelationRef<'_>,
        index: IndexRef<'_>,
        identity: &Identity,
    ) -> Option<UniqueKey> {
        let numbers = index.key_columns();
        let mut columns = Vec::new();
        let mut sent = Vec::new();
        for (number, operators) in numbers.iter().zip(index.operators()) {
            if *number <= 0 {
                return None;
            }
            let place = self::index(*number);
            let attribute = relation.descriptor().get(place)?;
            let facts = TypeFacts::look_up(attribute.type_id(), attribute.type_modifier());
            let order = (operators.family, operators.collation);
            let column = KeyColumn::new(place, &facts, attribute.is_by_value(), order)?;
            self.type_hashes.extend(&facts.hashes);
            let mut name = attribute.name();
            if !column.comparison.is_empty() {
                // Another key than that of an index which compares the same column as usual. No
                // name has a zero byte.
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
                nulls_equal: index.indnullsnotdistinct,
                columns,
            });
        }
        let in_identity = numbers.iter().all(|number| identity.has(*number));
        let names = (self.shape.namespace.as_str(), self.shape.name.as_str());
        Some(UniqueKey::new(
            names,
            columns,
            !index.indnullsnotdistinct,
            in_identity,
        ))
    }

    /// The place of a key's column among the sent ones, and how it is compared; `None` if it is not
    /// sent.
    fn sent_column(&self, key: &KeyColumn) -> Option<(u16, String)> {
        let sent = |column: &SentColumn| column.attribute == key.attribute;
        let place = self.columns.iter().position(sent)?;
        Some((u16::try_from(place).ok()?, key.comparison.clone()))
    }

    /// The sources of the relation's key hashes. Hashes with other sources can't be compared with
    /// these.
    pub(super) fn hashed(&self) -> Hashed {
        let types = self.key_columns.iter().map(|key| key.type_oid);
        (self.keys.clone(), types.collect())
    }
}

impl Compilation for Compiled {
    fn is_touched(&self, notes: &Notes) -> bool {
        let depends = |relation| self.depends.contains(relation);
        let has_type = |hash| self.type_hashes.contains(hash);
        notes.relations.iter().any(depends) || notes.types.iter().any(has_type)
    }

    fn release(self) {
        self.context.release();
    }
}

/// The facts about a relation that decide what is published of it.
pub(super) fn facts(relation: RelationRef<'_>) -> RelationFacts {
    RelationFacts {
        oid: relation.oid().to_u32(),
        is_partition: relation.is_partition(),
        is_partitioned: relation.kind() == pg_sys::RELKIND_PARTITIONED_TABLE,
    }
}

/// The relation under whose name changes are sent. In a transaction with a snapshot for catalogs.
pub(super) fn open_ancestor(oid: u32) -> Described {
    Described::find(oid.into()).unwrap_or_else(|| {
        report::fail(
            pgrx::PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("could not open relation with OID {oid}"),
            None,
        )
    })
}

/// Numbers of the attributes that were not dropped.
pub(super) fn live_numbers(relation: RelationRef<'_>) -> Vec<i16> {
    let all = relation.descriptor().iter();
    all.filter(|attribute| !attribute.is_dropped())
        .map(Column::number)
        .collect()
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
    /// In a transaction with a snapshot for catalogs.
    pub(super) fn of(relation: RelationRef<'_>) -> Self {
        let indexes = relation.indexes();
        let letter = relation.replica_identity();
        let columns = |index: pg_sys::Oid| {
            IndexRow::find(index).map_or_else(Vec::new, |row| row.key_columns().to_vec())
        };
        Self {
            kind: ReplicaIdentity::from_byte(letter).unwrap_or(ReplicaIdentity::Nothing),
            columns: columns(indexes.identity),
            primary_key: columns(indexes.primary),
            indexes: indexes.all.into_iter().map(pg_sys::Oid::to_u32).collect(),
        }
    }

    fn has(&self, number: i16) -> bool {
        self.kind == ReplicaIdentity::Full || self.columns.contains(&number)
    }
}

/// Index of an attribute by its number.
pub(super) fn index(number: i16) -> usize {
    usize::try_from(number).unwrap_or(1).saturating_sub(1)
}

/// From the columns of the relation under whose name changes are sent to those of the changed one,
/// by name.
pub(super) struct AttributeMap<'r> {
    pub(super) relation: RelationRef<'r>,
    pub(super) ancestor: RelationRef<'r>,
}

impl<'r> AttributeMap<'r> {
    /// Attribute `number` of the ancestor, and the one of the relation that has its name.
    pub(super) fn find(&self, number: i16) -> Option<(Column<'r>, Column<'r>)> {
        let mut all = self.ancestor.descriptor().iter();
        let wanted = all.find(|attribute| attribute.number() == number)?;
        if self.relation.oid() == self.ancestor.oid() {
            return Some((wanted, wanted));
        }
        let own = self.relation.descriptor().iter().find(|attribute| {
            !attribute.is_dropped() && attribute.raw_name() == wanted.raw_name()
        })?;
        Some((wanted, own))
    }

    /// For every attribute of the ancestor the index of the relation's, and whether it is by value.
    pub(super) fn sources(&self) -> Vec<Option<(usize, bool)>> {
        let all = self.ancestor.descriptor().iter();
        all.map(|attribute| {
            if attribute.is_dropped() {
                return None;
            }
            let (_, own) = self.find(attribute.number())?;
            Some((index(own.number()), own.is_by_value()))
        })
        .collect()
    }
}

/// How the attributes of a relation are stored.
pub(super) fn attributes(relation: RelationRef<'_>) -> Vec<Attribute> {
    let shape = relation.descriptor();
    let stored = |attribute: Column<'_>| Attribute {
        len: attribute.length(),
        align: attribute.alignment(),
        missing: missing(shape, attribute),
    };
    shape.iter().map(stored).collect()
}

/// The stored form of the value in rows that are older than the attribute.
fn missing(shape: TupleDesc<'_>, attribute: Column<'_>) -> Option<Box<[u8]>> {
    if !attribute.has_missing() {
        return None;
    }
    let value = shape.missing(attribute)?;
    let Some(bytes) = value.stored_bytes() else {
        let bytes = value.datum().value().to_le_bytes();
        let length = usize::try_from(attribute.length()).unwrap_or_default();
        return bytes.get(..length).map(Into::into);
    };
    Some(bytes.into())
}
