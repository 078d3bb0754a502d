//! The writeset: hashes of all unique keys that a change takes or releases, so that the
//! subscriber's leader can order changes without decoding a row.
//!
//! Two changes of a stream must be applied in order if a key that one of them takes or releases is
//! taken or released by the other. For known keys, equal hashes show that. A change with an unknown
//! key is a *barrier*, which is ordered with every other change of its table. The rules:
//!
//! - Equal keys have equal hashes, under the index's own equality. Keys of different indexes, or of
//!   different relations, have different seeds. Seeds are derived from names, so they are equal on
//!   every node.
//! - A key with a null in it conflicts with nothing and is not listed, unless nulls are not
//!   distinct.
//! - An update releases the old row's keys. WAL has old values only of the replica identity's
//!   columns, and none if these did not change. So an update or delete on a table with another
//!   unique index, which has columns outside of the replica identity, is a barrier: the key that it
//!   releases is unknown. REPLICA IDENTITY FULL lifts that.
//! - The subscriber finds the old row by its replica identity. So an update or delete without a
//!   listed key that identifies the old row is a barrier.
//! - An insert into a table without any unique key is no barrier: inserts commute, and any later
//!   change of such a row is a barrier itself.
//! - Expressions are not evaluated, and types without a hash function are not hashed. All changes
//!   of tables with such unique indexes, or with exclusion constraints, are barriers. A partial
//!   index is treated as if it had all rows, which orders more than needed but never less.

use crate::hash::KeyHasher;
use braid_gir::{BeforeKind, Operation};

/// A unique index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueKey {
    seed: u64,
    columns: Vec<usize>,
    nulls_distinct: bool,
    in_identity: bool,
}

impl UniqueKey {
    /// Returns the unique key on `columns` (an index for [`KeyValues`], and the column's name).
    /// `relation` is the schema and name under which changes are sent. `in_identity`: all columns
    /// are part of the replica identity.
    #[must_use]
    pub fn new(
        relation: (&str, &str),
        mut columns: Vec<(usize, String)>,
        nulls_distinct: bool,
        in_identity: bool,
    ) -> Self {
        // Sorted by name, so that the order of columns in the index and in the table does not
        // matter.
        columns.sort_by(|a, b| a.1.cmp(&b.1));
        let mut seed = KeyHasher::new(0);
        seed.bytes(relation.0.as_bytes());
        seed.bytes(relation.1.as_bytes());
        for (_, name) in &columns {
            seed.bytes(name.as_bytes());
        }
        Self {
            seed: seed.finish(),
            columns: columns.into_iter().map(|(column, _)| column).collect(),
            nulls_distinct,
            in_identity,
        }
    }
}

/// The unique keys of a relation that are hashed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyPlan {
    keys: Vec<UniqueKey>,
    incomputable: bool,
}

impl KeyPlan {
    /// Returns the plan for these keys. `incomputable`: the relation has further unique indexes or
    /// exclusion constraints.
    #[must_use]
    pub fn new(mut keys: Vec<UniqueKey>, incomputable: bool) -> Self {
        keys.sort_by_key(|key| key.seed);
        // Two indexes on the same columns are one key; the stricter one counts.
        keys.dedup_by(|drop, keep| {
            let same = drop.seed == keep.seed;
            if same {
                keep.nulls_distinct &= drop.nulls_distinct;
            }
            same
        });
        Self { keys, incomputable }
    }
}

/// Result of hashing one column of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fed {
    /// The value was added to the hash.
    Value,
    /// The value is null.
    Null,
    /// WAL does not have the value.
    Unavailable,
}

/// Port: the values of one row.
pub trait KeyValues {
    /// Adds the canonical form of a column's value to the hash. The form is the same for all values
    /// that are equal under the index.
    fn feed(&mut self, column: usize, hasher: &mut KeyHasher) -> Fed;
}

/// The rows of a change.
#[derive(Debug)]
pub struct Images<'r, R> {
    /// Insert, update or delete.
    pub operation: Operation,
    /// Content of the before image.
    pub kind: BeforeKind,
    /// The row before the change, or its key.
    pub before: Option<&'r mut R>,
    /// The row after the change.
    pub after: Option<&'r mut R>,
}

enum Key {
    Hash(u64),
    /// The key has a null, so it conflicts with nothing.
    Free,
    Unknown,
}

/// Collects the change's key hashes in `out`, each once. Returns whether the change is a barrier.
pub fn collect<R: KeyValues>(
    plan: &KeyPlan,
    mut images: Images<'_, R>,
    out: &mut Vec<u64>,
) -> bool {
    out.clear();
    let mut barrier = plan.incomputable;
    let push = |hash: u64, out: &mut Vec<u64>| {
        if !out.contains(&hash) {
            out.push(hash);
        }
    };
    let mut identified = false;
    let old_row_matters = images.operation != Operation::Insert;
    for key in &plan.keys {
        if let Some(after) = images.after.as_deref_mut() {
            // The new row lacks an unchanged TOAST value; the old one may have it.
            match hash_key(key, after, images.before.as_deref_mut()) {
                Key::Hash(hash) => {
                    push(hash, out);
                    // Without a before image the identity did not change: the new key equals the
                    // old one.
                    identified |= key.in_identity && images.kind == BeforeKind::Absent;
                }
                Key::Free => {}
                Key::Unknown => barrier = true,
            }
        }
        if !old_row_matters {
            continue;
        }
        let known = match images.kind {
            BeforeKind::Absent => key.in_identity,
            BeforeKind::Key => key.in_identity,
            BeforeKind::Row => true,
        };
        if !known {
            barrier = true;
            continue;
        }
        if let Some(before) = images.before.as_deref_mut() {
            match hash_key(key, before, None) {
                Key::Hash(hash) => {
                    push(hash, out);
                    identified |= key.in_identity || images.kind == BeforeKind::Row;
                }
                Key::Free => {}
                Key::Unknown => barrier = true,
            }
        }
    }
    if old_row_matters {
        barrier |= !identified;
    }
    barrier
}

fn hash_key<R: KeyValues>(key: &UniqueKey, row: &mut R, mut fallback: Option<&mut R>) -> Key {
    let mut hasher = KeyHasher::new(key.seed);
    for column in &key.columns {
        let mut fed = row.feed(*column, &mut hasher);
        if fed == Fed::Unavailable
            && let Some(other) = fallback.as_deref_mut()
        {
            fed = other.feed(*column, &mut hasher);
            if fed == Fed::Null {
                // A value that is stored out of line is not null, so this null only means that the
                // old image does not have the column.
                fed = Fed::Unavailable;
            }
        }
        match fed {
            Fed::Value => {}
            Fed::Null if key.nulls_distinct => return Key::Free,
            // No other value can look like this word: a value's form ends with its length or is a
            // single word.
            Fed::Null => hasher.word(u64::MAX),
            Fed::Unavailable => return Key::Unknown,
        }
    }
    Key::Hash(hasher.finish())
}

#[cfg(test)]
#[path = "writeset_tests.rs"]
mod tests;
