//! Hashes of rows of tables without a key, of all of their values. Run by the appliers and by the
//! collector of deletions.

use braid_decoder::KeyHasher;
use braid_postgres::relation::RelationRef;
use braid_postgres::slot::Slot;
use braid_postgres::value::Value;

use super::feed::feed;
use crate::relation::LocalRelation;

/// Where hashes of whole rows begin: apart from those of keys, of tables, and of copied rows.
const WHOLE_ROWS: u64 = 1 << 34;

/// A row of a table without a key: of its names and stored bytes, in whatever order the columns
/// come. So it is the same at every node that stores the values alike. Values whose bytes hold OIDs
/// of this database, or have several forms, are taken apart ([`super::feed()`]).
#[derive(Debug, Clone, Copy)]
pub struct RowHash {
    table: u64,
    columns: u64,
}

impl RowHash {
    /// Of a row of an open table. In a transaction.
    #[must_use]
    pub fn of_table(relation: RelationRef<'_>) -> u64 {
        let mut hasher = KeyHasher::new(WHOLE_ROWS);
        if let Some(namespace) = relation.namespace() {
            hasher.bytes(namespace.as_bytes());
        }
        hasher.bytes(relation.name().as_bytes());
        hasher.finish()
    }

    /// Of a column, by its name.
    #[must_use]
    pub fn of_column(name: &str) -> u64 {
        let mut hasher = KeyHasher::new(WHOLE_ROWS);
        hasher.bytes(name.as_bytes());
        hasher.finish()
    }

    /// That of a row, of which nothing is known yet but the table's ([`Self::of_table`]).
    #[must_use]
    pub fn new(table: u64) -> Self {
        Self { table, columns: 0 }
    }

    /// Take in a value; `name` is its column's ([`Self::of_column`]). In a transaction.
    pub fn feed(&mut self, name: u64, value: Option<Value<'_>>) {
        let mut hasher = KeyHasher::new(self.table);
        hasher.word(name);
        feed(&mut hasher, value);
        self.columns = self.columns.wrapping_add(hasher.finish());
    }

    /// The hash.
    #[must_use]
    pub fn finish(self) -> u64 {
        let mut hasher = KeyHasher::new(self.table);
        hasher.word(self.columns);
        hasher.finish()
    }
}

/// The hash by which a row of a table without a key is known everywhere, of all its columns but
/// those that are generated. In a transaction.
#[must_use]
pub fn row_hash(table: RelationRef<'_>, slot: &Slot) -> u64 {
    let mut hash = RowHash::new(RowHash::of_table(table));
    for (position, attribute) in slot.descriptor().iter().enumerate() {
        if !attribute.is_dropped() && !attribute.is_generated() {
            let name = RowHash::of_column(&attribute.name());
            hash.feed(name, slot.cell(position));
        }
    }
    hash.finish()
}

/// Hash of the row in `slot` by which it is known everywhere, of the stream's columns, where the
/// table has no key. In a transaction.
#[must_use]
pub fn row_hash_by(plan: &LocalRelation, slot: &Slot) -> u64 {
    let mut hash = RowHash::new(plan.row_hash);
    let shape = slot.descriptor();
    slot.deform(shape.len());
    for column in &plan.columns {
        if column.local < shape.len() {
            hash.feed(column.name_hash, slot.taken_cell(column.local));
        }
    }
    hash.finish()
}

/// Hash of all columns, as [`super::key_hash`] has it where the table has no key. In a
/// transaction.
#[must_use]
pub fn stored_row_hash(table: u32, slot: &Slot) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(table));
    for position in 0..slot.descriptor().len() {
        feed(&mut hasher, slot.cell(position));
    }
    hasher.finish()
}
