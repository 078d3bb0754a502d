//! The hashes by which a row is remembered that has no place of its own. Run by the appliers, by
//! the collector of deletions, and by who copies or compares.
//!
//! Two of them, both of its table and key:
//!
//! - *of the stored bytes*: the same stored row always gives the same. For what is known of rows as
//!   they stand here: those of batches. Bytes that hold OIDs of this database, or may differ for
//!   one value, are taken apart (`feed`), as other nodes have the hash too.
//! - *by equality*: rows with equal keys, as the index says that finds them, give the same,
//!   whatever their bytes. For deletions, which another form of the key must meet (1.0 and 1.00),
//!   and for copied rows.
//!
//! Where no key has two forms these are one. Otherwise a value's hash is that of the type's own
//! extended hash function, under the index's collation, or is made of the parts (`feed`). It stays
//! the same from release to release, as hash indexes and partitions do; but what a collation calls
//! equal is made of the sort keys of a library, which another node, or this one tomorrow, may have
//! in another version. So what is told by such a hash is told by that of the stored bytes as well
//! ([`KeyHashes::each`]): then the same bytes are found everywhere, and another form of them
//! wherever the library is the same.
//!
//! A type without such a function (tsvector, say), or an index with an equality of its own, has the
//! bytes alone.
//!
//! A row of a table without a key is remembered by all of its values ([`RowHash`]).
//!
//! If the index that finds rows has only some of the columns that identify them at the provider
//! ([`Key::is_narrow`]), these two sets of columns have hashes of their own:
//!
//! | remembered | by the columns of |
//! |---|---|
//! | the version of a row of a batch, or of one that a statement has written anew | the index |
//! | what an applier deletes, or has planned; what a copy has brought | the identity |
//! | what a session of this node deletes | the index |
//!
//! Deletions are looked for by both.

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

/// Types and collations below this OID come with PostgreSQL, and have it at every node.
const FIRST_OTHER_OID: u32 = 10_000;

/// What stands for all rows of a table, where one of them would have its hash: the seed of no
/// row's.
#[must_use]
pub fn table_hash(relation: u32) -> u64 {
    KeyHasher::new(u64::from(relation) | 1 << 32).finish()
}

/// Where hashes begin of rows that came from elsewhere: above all others.
const COPIED_ROWS: u64 = 1 << 33;

/// What stands for a hash that comes from elsewhere, of a row that was copied into the table with
/// this OID: other than all hashes that are computed here, as tables elsewhere may well have the
/// OIDs of other tables here.
#[must_use]
pub fn copied_hash(relation: u32, hash: u64) -> u64 {
    let mut hasher = KeyHasher::new(COPIED_ROWS);
    hasher.word(u64::from(relation));
    hasher.word(hash);
    hasher.finish()
}

/// A column of the key by which rows are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyPart {
    /// Its number in the table, from 1.
    pub attribute: i16,
    /// When its values are equal.
    pub equality: Equality,
}

/// By what a row is known that has a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyHashes {
    /// That of the stored bytes.
    pub stored: u64,
    /// The same for equal keys.
    pub equal: u64,
    everywhere: bool,
}

impl KeyHashes {
    /// All by which what is to be found by an equal key is remembered, and looked for.
    pub fn each(self) -> impl Iterator<Item = u64> {
        let stored = (!self.everywhere).then_some(self.stored);
        std::iter::once(self.equal).chain(stored)
    }

    /// Beside [`Self::equal`], the one that does not hang on this node; `None` where that is the
    /// only one.
    #[must_use]
    pub fn other(self) -> Option<u64> {
        self.each().nth(1)
    }
}

/// Both hashes in the making.
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

    /// Take in the value of a column. In a transaction.
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

/// Which columns of a key are hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Columns {
    /// Those of the index that finds rows. At one time one row has them, whichever provider it is
    /// from.
    Index,
    /// Those that identify a row ([`crate::relation::Key::identity`]).
    Identity,
}

impl Columns {
    /// The columns that are hashed.
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

/// Hash of the stored bytes of the row in `slot`: of the columns of the index that finds it, of all
/// where the table has no key. In a transaction.
#[must_use]
pub fn key_hash(plan: &LocalRelation, slot: &Slot) -> u64 {
    stored_hash(plan, slot, Columns::Index)
}

/// As [`key_hash`], of the columns that identify the row. In a transaction.
#[must_use]
pub(crate) fn identity_hash(plan: &LocalRelation, slot: &Slot) -> u64 {
    stored_hash(plan, slot, Columns::Identity)
}

fn stored_hash(plan: &LocalRelation, slot: &Slot, columns: Columns) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(plan.oid.to_u32()));
    each_column(plan, slot, columns, |_, value| feed(&mut hasher, value));
    hasher.finish()
}

/// Both hashes of the columns that identify the row in `slot`, as in the table with OID `seed`. In
/// a transaction.
#[must_use]
pub fn key_hashes_as(seed: u32, plan: &LocalRelation, slot: &Slot) -> KeyHashes {
    both_hashes(seed, plan, slot, Columns::Identity)
}

/// All hashes by which the row in `slot` may be known that has a key, as in the table with OID
/// `seed`. In a transaction.
///
/// A session that deletes a row knows no provider's identity. The collector of deletions goes by
/// the table's own identity, whose columns are the index's if the index is narrow.
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

/// Hand on the columns that are hashed.
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

/// As [`key_hashes_as`], of the row that has these values, by the positions of its columns. `None`
/// where the table has no key, or the values lack some of it. In a transaction.
pub fn key_hashes_of_values<'v>(
    seed: u32,
    plan: &LocalRelation,
    cell: impl Fn(usize) -> Option<Value<'v>>,
) -> Option<KeyHashes> {
    hashes_of_values(seed, plan, cell, Columns::Identity)
}

/// As [`known_by`], of the row that has these values.
pub(crate) fn known_by_values<'v>(
    seed: u32,
    plan: &LocalRelation,
    cell: impl Fn(usize) -> Option<Value<'v>> + Copy,
) -> impl Iterator<Item = KeyHashes> {
    let of = |columns| hashes_of_values(seed, plan, cell, columns);
    let narrow = has_narrow_key(plan).then(|| of(Columns::Index));
    of(Columns::Identity).into_iter().chain(narrow.flatten())
}

/// As [`key_hash`], of the row that has these values; `None` as for [`key_hashes_of_values`]. In a
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

/// The same of a row that was taken apart, by the columns of its key in the order in which the
/// index has them. `None` where one of them is null, or not in the row but elsewhere. The values
/// are a row of the relation with this OID, `None` for null. In a transaction.
#[must_use]
pub fn key_hashes_of_row(
    relation: pg_sys::Oid,
    key: &[KeyPart],
    values: &[Option<Value<'_>>],
) -> Option<KeyHashes> {
    key_hashes_of(relation.to_u32(), key, |position| *values.get(position)?)
}

/// As [`key_hashes_of_row`], of the row in a slot, as in the table with OID `seed`. In a
/// transaction.
#[must_use]
pub fn key_hashes_in_slot(seed: u32, key: &[KeyPart], slot: &Slot) -> Option<KeyHashes> {
    key_hashes_of(seed, key, |position| slot.cell(position))
}

/// `value` gives the values of a row. In a transaction.
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

/// The columns of the key that identifies a table's rows, in the key's order: that of the replica
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
        // An expression has number 0; such an index is nobody's identity.
        let column = usize::try_from(attribute).ok()?.checked_sub(1)?;
        Some(KeyPart {
            attribute,
            equality: Equality::of(operators.get(position)?, shape.get(column)?.type_id()),
        })
    };
    columns.into_iter().enumerate().map(part).collect()
}
