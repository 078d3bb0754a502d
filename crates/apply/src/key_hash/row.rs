//! Hashes of rows of tables without a key, made of all of their values. Run by the appliers and by
//! the collector of deletions.

use braid_decoder::KeyHasher;
use braid_postgres::relation::RelationRef;
use braid_postgres::slot::Slot;
use braid_postgres::value::Value;

use super::feed::feed;
use crate::relation::LocalRelation;

/// Seed of hashes of whole rows: apart from those of keys, tables, and copied rows.
const WHOLE_ROWS: u64 = 1 << 34;

/// Hash of a row of a table without a key, made of the columns' names and stored bytes, in any
/// order of the columns. So it is the same at every node that stores the values alike. Values whose
/// bytes hold OIDs of this database, or have several forms, are fed by their parts
/// ([`super::feed()`]).
#[derive(Debug, Clone, Copy)]
pub struct RowHash {
    table: u64,
    columns: u64,
}

impl RowHash {
    /// Returns the hash of an open table's name, with which its rows' hashes begin. In a
    /// transaction.
    #[must_use]
    pub fn of_table(relation: RelationRef<'_>) -> u64 {
        let mut hasher = KeyHasher::new(WHOLE_ROWS);
        if let Some(namespace) = relation.namespace() {
            hasher.bytes(namespace.as_bytes());
        }
        hasher.bytes(relation.name().as_bytes());
        hasher.finish()
    }

    /// Returns the hash of a column's name.
    #[must_use]
    pub fn of_column(name: &str) -> u64 {
        let mut hasher = KeyHasher::new(WHOLE_ROWS);
        hasher.bytes(name.as_bytes());
        hasher.finish()
    }

    /// Begins a row's hash with its table's ([`Self::of_table`]).
    #[must_use]
    pub fn new(table: u64) -> Self {
        Self { table, columns: 0 }
    }

    /// Feeds a value; `name` is the hash of its column's name ([`Self::of_column`]). In a
    /// transaction.
    pub fn feed(&mut self, name: u64, value: Option<Value<'_>>) {
        let mut hasher = KeyHasher::new(self.table);
        hasher.word(name);
        feed(&mut hasher, value);
        self.columns = self.columns.wrapping_add(hasher.finish());
    }

    /// Returns the hash.
    #[must_use]
    pub fn finish(self) -> u64 {
        let mut hasher = KeyHasher::new(self.table);
        hasher.word(self.columns);
        hasher.finish()
    }
}

/// Returns the hash that identifies a row of a table without a key at all nodes, of all columns
/// except generated ones. In a transaction.
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

/// Returns the hash that identifies the row in `slot` at all nodes, of the stream's columns. For
/// tables without a key. In a transaction.
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

/// Returns the hash of the stored bytes of all columns, as [`super::key_hash`] has it for tables
/// without a key. In a transaction.
#[must_use]
pub fn stored_row_hash(table: u32, slot: &Slot) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(table));
    for position in 0..slot.descriptor().len() {
        feed(&mut hasher, slot.cell(position));
    }
    hasher.finish()
}
