//! Hashes by which Braid's records identify a row: its table and key. Run by the appliers, the
//! collector of deletions, and the processes that copy or compare.
//!
//! Example. A session deletes the row with key `1.0`. A late update of `1.00` from another node
//! must find that deletion, so both keys must have the same hash. But a batch's record must find
//! only the row that is stored with these very bytes. So there are two hashes:
//!
//! - *of the stored bytes*: the same stored row always has the same hash. Used for records of rows
//!   as they stand here, such as those of batches. Bytes that hold OIDs of this database, or that
//!   may differ for one value, are fed by their parts (`feed`), because other nodes compute the
//!   hash too.
//! - *by equality*: rows with equal keys have the same hash, whatever their bytes; the index that
//!   finds rows says what is equal. Used for deletions and copied rows.
//!
//! If no key has two forms, the two are one. Otherwise the hash of a value is that of the type's
//! own extended hash function, under the index's collation, or made of its parts (`feed`). It stays
//! the same in all releases, because hash indexes and partitions rely on it. But a collation's
//! equality comes from the sort keys of a library, and another node may have another version of it;
//! so may this node tomorrow. So a record with such a hash also has the hash of the stored bytes
//! ([`KeyHashes::each`]). Then the same bytes are found at all nodes, and other forms of the key
//! where the library is the same.
//!
//! A type without such a function (tsvector, for example), or an index with an equality of its own,
//! has only the hash of the bytes.
//!
//! A row of a table without a key is identified by all of its values ([`RowHash`]).
//!
//! If the index that finds rows has only some of the columns that identify them at the provider
//! ([`Key::is_narrow`]), these two sets of columns have hashes of their own:
//!
//! | record | by the columns of |
//! | the version of a row of a batch, or of one that a statement has rewritten | the index |
//! | deletions by an applier, done or planned; rows and deletions from a copy | the identity |
//! | deletions by a session of this node | the index |
//!
//! Deletions are looked up by both.

mod equality;
mod feed;
mod row;

use braid_decoder::KeyHasher;
use braid_postgres::relation::RelationRef;
use braid_postgres::slot::Slot;
use braid_postgres::syscache::{IndexOperators, IndexRow};
use braid_postgres::value::Value;
use pgrx::pg_sys;

use crate::relation::{Key, LocalRelation};
use feed::feed_equal;

pub use equality::Equality;
pub(crate) use feed::feed;
pub use row::{RowHash, row_hash, row_hash_by, stored_row_hash};

/// Types and collations below this OID come with PostgreSQL, and have the same OID at every node.
const FIRST_OTHER_OID: u32 = 10_000;

/// Returns the hash that stands for all rows of a table, in a place where a row would have its own.
/// No row has it: rows have other seeds.
#[must_use]
pub fn table_hash(relation: u32) -> u64 {
    KeyHasher::new(u64::from(relation) | 1 << 32).finish()
}

/// Seed of hashes of copied rows, apart from those of keys and of tables.
const COPIED_ROWS: u64 = 1 << 33;

/// Returns the local hash of a row that was copied into the table with OID `relation`, given the
/// provider's `hash`. It differs from all hashes that are computed here, because the provider's
/// table OID may belong to another table here.
#[must_use]
pub fn copied_hash(relation: u32, hash: u64) -> u64 {
    let mut hasher = KeyHasher::new(COPIED_ROWS);
    hasher.word(u64::from(relation));
    hasher.word(hash);
    hasher.finish()
}

/// A column of the key that identifies rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyPart {
    /// Number of the column in the table, from 1.
    pub attribute: i16,
    /// Rule for when its values are equal.
    pub equality: Equality,
}

/// Hashes of the key of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyHashes {
    /// Hash of the stored bytes.
    pub stored: u64,
    /// Hash by equality.
    pub equal: u64,
    everywhere: bool,
}

impl KeyHashes {
    /// Returns all hashes under which a record for an equal key is stored and looked up.
    pub fn each(self) -> impl Iterator<Item = u64> {
        let stored = (!self.everywhere).then_some(self.stored);
        std::iter::once(self.equal).chain(stored)
    }

    /// Returns the hash, beside [`Self::equal`], that does not depend on this node's libraries;
    /// `None` if `equal` does not depend on them either.
    #[must_use]
    pub fn other(self) -> Option<u64> {
        self.each().nth(1)
    }
}

/// Both hashes while they are computed.
struct Hashing {
    stored: KeyHasher,
    equal: KeyHasher,
    everywhere: bool,
}

impl Hashing {
    fn new(seed: u32) -> Self {
        let hasher = KeyHasher::new(u64::from(seed));
        Self {
            stored: hasher,
            equal: hasher,
            everywhere: true,
        }
    }

    /// Feeds the value of a column. In a transaction.
    fn feed(&mut self, equality: Equality, value: Option<Value<'_>>) {
        feed(&mut self.stored, value);
        match (equality, value) {
            (Equality::Type { collation, .. }, Some(value)) => {
                feed_equal(&mut self.equal, collation, value);
            }
            _ => feed(&mut self.equal, value),
        }
        self.everywhere &= !matches!(
            equality,
            Equality::Type {
                everywhere: false,
                ..
            }
        );
    }

    fn finish(self) -> KeyHashes {
        KeyHashes {
            stored: self.stored.finish(),
            equal: self.equal.finish(),
            everywhere: self.everywhere,
        }
    }
}

/// Selects the columns of a key that are hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Columns {
    /// The columns of the index that finds rows. At any time one row has their values, whichever
    /// provider it is from.
    Index,
    /// The columns that identify a row ([`crate::relation::Key::identity`]).
    Identity,
}

impl Columns {
    /// Returns the columns that are hashed.
    fn of(self, key: &Key) -> impl Iterator<Item = KeyPart> + Clone + '_ {
        let index = key.columns.iter().map(|column| KeyPart {
            attribute: column.attribute,
            equality: column.equality,
        });
        let identity = key.identity.iter().map(|column| KeyPart {
            attribute: column.attribute,
            equality: column.equality,
        });
        let (is_index, is_identity) = (self == Self::Index, self == Self::Identity);
        let index = index.filter(move |_| is_index);
        index.chain(identity.filter(move |_| is_identity))
    }
}

/// Returns the hash of the stored bytes of the row in `slot`: of the columns of the index that
/// finds it, or of all columns if the table has no key. In a transaction.
#[must_use]
pub fn key_hash(plan: &LocalRelation, slot: &Slot) -> u64 {
    stored_hash(plan, slot, Columns::Index)
}

/// As [`key_hash`], for the columns that identify the row. In a transaction.
#[must_use]
pub(crate) fn identity_hash(plan: &LocalRelation, slot: &Slot) -> u64 {
    stored_hash(plan, slot, Columns::Identity)
}

fn stored_hash(plan: &LocalRelation, slot: &Slot, columns: Columns) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(plan.oid.to_u32()));
    each_column(plan, slot, columns, |_, value| feed(&mut hasher, value));
    hasher.finish()
}

/// Returns both hashes of the columns that identify the row in `slot`, seeded as in the table with
/// OID `seed`. In a transaction.
#[must_use]
pub fn key_hashes_as(seed: u32, plan: &LocalRelation, slot: &Slot) -> KeyHashes {
    both_hashes(seed, plan, slot, Columns::Identity)
}

/// Returns all hashes that records of the row in `slot`, which has a key, may have, seeded as in
/// the table with OID `seed`. In a transaction.
///
/// A session that deletes a row does not know a provider's identity. The collector of deletions
/// uses the table's own identity; if the index is narrow, its columns are those of the index.
pub(crate) fn known_by(
    seed: u32,
    plan: &LocalRelation,
    slot: &Slot,
) -> impl Iterator<Item = KeyHashes> + use<> {
    let of_index = || both_hashes(seed, plan, slot, Columns::Index);
    let narrow = has_narrow_key(plan).then(of_index);
    std::iter::once(key_hashes_as(seed, plan, slot)).chain(narrow)
}

fn has_narrow_key(plan: &LocalRelation) -> bool {
    plan.key.as_ref().is_some_and(Key::is_narrow)
}

fn both_hashes(seed: u32, plan: &LocalRelation, slot: &Slot, columns: Columns) -> KeyHashes {
    let mut hashing = Hashing::new(seed);
    each_column(plan, slot, columns, |equality, value| {
        hashing.feed(equality, value);
    });
    hashing.finish()
}

/// Calls `hand_on` with each column that is hashed: its equality, and its value in the slot.
#[inline]
fn each_column(
    plan: &LocalRelation,
    slot: &Slot,
    columns: Columns,
    mut hand_on: impl FnMut(Equality, Option<Value<'_>>),
) {
    let shape = slot.descriptor();
    let last = plan.key.as_ref().and_then(|key| {
        let numbers = columns.of(key).map(|column| column.attribute);
        numbers.max().and_then(|last| usize::try_from(last).ok())
    });
    slot.deform(last.unwrap_or(shape.len()));
    let mut column = |equality, position: usize| {
        if position < shape.len() {
            hand_on(equality, slot.taken_cell(position));
        }
    };
    match &plan.key {
        Some(key) => {
            for place in columns.of(key) {
                let position = usize::try_from(place.attribute - 1).unwrap_or(0);
                column(place.equality, position);
            }
        }
        None => {
            for position in 0..shape.len() {
                column(Equality::Bytes, position);
            }
        }
    }
}

/// As [`key_hashes_as`], for the row that has these values, by the positions of its columns.
/// Returns `None` if the table has no key, or the values lack some of it. In a transaction.
pub fn key_hashes_of_values<'v>(
    seed: u32,
    plan: &LocalRelation,
    cell: impl Fn(usize) -> Option<Value<'v>>,
) -> Option<KeyHashes> {
    hashes_of_values(seed, plan, cell, Columns::Identity)
}

/// As [`known_by`], for the row that has these values.
pub(crate) fn known_by_values<'v>(
    seed: u32,
    plan: &LocalRelation,
    cell: impl Fn(usize) -> Option<Value<'v>> + Copy,
) -> impl Iterator<Item = KeyHashes> {
    let of = |columns| hashes_of_values(seed, plan, cell, columns);
    let narrow = has_narrow_key(plan).then(|| of(Columns::Index));
    of(Columns::Identity).into_iter().chain(narrow.flatten())
}

/// As [`key_hash`], for the row that has these values; `None` as for [`key_hashes_of_values`]. In a
/// transaction.
pub(crate) fn key_hash_of_values<'v>(
    plan: &LocalRelation,
    cell: impl Fn(usize) -> Option<Value<'v>>,
) -> Option<u64> {
    let hashes = hashes_of_values(plan.oid.to_u32(), plan, cell, Columns::Index)?;
    Some(hashes.stored)
}

fn hashes_of_values<'v>(
    seed: u32,
    plan: &LocalRelation,
    cell: impl Fn(usize) -> Option<Value<'v>>,
    columns: Columns,
) -> Option<KeyHashes> {
    let mut hashing = Hashing::new(seed);
    for place in columns.of(plan.key.as_ref()?) {
        let position = usize::try_from(place.attribute - 1).ok()?;
        hashing.feed(place.equality, Some(cell(position)?));
    }
    Some(hashing.finish())
}

/// Returns both hashes of a row, given the values of its key's columns in the index's order, `None`
/// for null. Returns `None` if one of them is null, or stored out of line. The row is one of the
/// relation with this OID. In a transaction.
#[must_use]
pub fn key_hashes_of_row(
    relation: pg_sys::Oid,
    key: &[KeyPart],
    values: &[Option<Value<'_>>],
) -> Option<KeyHashes> {
    key_hashes_of(relation.to_u32(), key, |position| *values.get(position)?)
}

/// As [`key_hashes_of_row`], for the row in a slot, seeded as in the table with OID `seed`. In a
/// transaction.
#[must_use]
pub fn key_hashes_in_slot(seed: u32, key: &[KeyPart], slot: &Slot) -> Option<KeyHashes> {
    key_hashes_of(seed, key, |position| slot.cell(position))
}

/// As [`key_hashes_of_row`]; `value` returns the value at a position of the row. In a transaction.
fn key_hashes_of<'v>(
    seed: u32,
    key: &[KeyPart],
    value: impl Fn(usize) -> Option<Value<'v>>,
) -> Option<KeyHashes> {
    let mut hashing = Hashing::new(seed);
    for part in key {
        let position = usize::try_from(part.attribute - 1).ok()?;
        let value = value(position).filter(|value| !value.is_elsewhere())?;
        hashing.feed(part.equality, Some(value));
    }
    Some(hashing.finish())
}

/// Returns the columns of the key that identifies a table's rows, in the key's order: the replica
/// identity, or else the primary key. In a transaction with a snapshot for catalogs.
#[must_use]
pub fn identity_key(relation: RelationRef<'_>) -> Option<Vec<KeyPart>> {
    let index = match relation.replica_index() {
        pg_sys::InvalidOid => relation.primary_key_index(),
        replica => replica,
    };
    if index == pg_sys::InvalidOid {
        return None;
    }
    let shape = relation.descriptor();
    let columns = IndexRow::find(index)?.key_columns().to_vec();
    let operators = IndexOperators::of(index)?;
    let part = |(position, attribute): (usize, i16)| {
        // An expression has number 0; an index with one is no replica identity.
        let column = usize::try_from(attribute).ok()?.checked_sub(1)?;
        Some(KeyPart {
            attribute,
            equality: Equality::of(operators.get(position)?, shape.get(column)?.type_id()),
        })
    };
    columns.into_iter().enumerate().map(part).collect()
}
