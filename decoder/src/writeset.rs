//! The writeset: a hash of every unique key that a change takes or gives up, so that the
//! subscriber's leader can order changes without decoding a row.
//!
//! Two changes of a stream must be applied in their order if one gives up or takes a key that the
//! other gives up or takes. Hashes say so for the keys that are known; a change whose keys are not
//! all known is a *barrier*, ordered with every other change of its table. The rules:
//!
//! - Equal keys have equal hashes, under the index's own equality. Keys of different indexes, or of
//!   different relations, have different seeds. The seed is made of names, so it is the same on
//!   every node.
//! - A key with a null in it conflicts with nothing and is not listed, unless nulls are not
//!   distinct.
//! - An update gives up the old row's keys. WAL has the old values of the replica identity's
//!   columns only (of none when they did not change). So an update or delete on a table with
//!   another unique index, one that has columns outside of the replica identity, is a barrier:
//!   which key it gives up can't be known. REPLICA IDENTITY FULL lifts that.
//! - The subscriber finds the old row by its replica identity: an update or delete for which no key
//!   that identifies the old row is listed is a barrier.
//! - An insert into a table without any unique key is no barrier: inserts commute, and whatever
//!   changes such a row later is a barrier itself.
//! - Expressions are not evaluated and types without a hash function not hashed: tables with such
//!   unique indexes, and with exclusion constraints, have barriers only. A partial index is treated
//!   as if it had all rows, which orders more than needed but never less.

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
    /// The unique key on `columns` (an index for [`KeyValues`], and the column's name) of the
    /// relation that is sent under the name `relation` (schema, name). `in_identity` says that all
    /// its columns are part of the replica identity.
    #[must_use]
    pub fn new(
        relation: (&str, &str),
        mut columns: Vec<(usize, String)>,
        nulls_distinct: bool,
        in_identity: bool,
    ) -> Self {
        // By name, so that neither the order in the index nor that in the table matters.
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

/// What is to be hashed of a relation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyPlan {
    keys: Vec<UniqueKey>,
    incomputable: bool,
}

impl KeyPlan {
    /// `incomputable`: the relation has unique indexes or exclusion constraints that are not among
    /// `keys`.
    #[must_use]
    pub fn new(mut keys: Vec<UniqueKey>, incomputable: bool) -> Self {
        keys.sort_by_key(|key| key.seed);
        // Two indexes on the same columns are one key; the stricter of them counts.
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

/// What became of one column of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fed {
    /// Its value was fed to the hasher.
    Value,
    /// It is null.
    Null,
    /// Its value is not in WAL.
    Unavailable,
}

/// Port: the values of one row.
pub trait KeyValues {
    /// Feed the canonical form of a column's value, which is the same for all values that are equal
    /// under the index.
    fn feed(&mut self, column: usize, hasher: &mut KeyHasher) -> Fed;
}

/// The rows of a change.
#[derive(Debug)]
pub struct Images<'r, R> {
    /// Insert, update or delete.
    pub operation: Operation,
    /// What the before image holds.
    pub kind: BeforeKind,
    /// The row before, or its key.
    pub before: Option<&'r mut R>,
    /// The row after.
    pub after: Option<&'r mut R>,
}

enum Key {
    Hash(u64),
    /// It has a null, so it conflicts with nothing.
    Free,
    Unknown,
}

/// Put the change's key hashes into `out`, each once. Returns whether the change is a barrier.
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
            // An unchanged TOAST value is missing in the new row; it may be in the old one.
            match hash_key(key, after, images.before.as_deref_mut()) {
                Key::Hash(hash) => {
                    push(hash, out);
                    // Without a before image the identity did not change: the new key is the old
                    // one.
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
                // A value that is stored out of line is not null: the old image does not have this
                // column.
                fed = Fed::Unavailable;
            }
        }
        match fed {
            Fed::Value => {}
            Fed::Null if key.nulls_distinct => return Key::Free,
            // No value's form is this word alone followed by another column's: values end with
            // their length or are one word.
            Fed::Null => hasher.word(u64::MAX),
            Fed::Unavailable => return Key::Unknown,
        }
    }
    Key::Hash(hasher.finish())
}

#[cfg(test)]
#[path = "writeset_tests.rs"]
mod tests;
