//! How the changes of a local table are ordered: by the keys that the provider hashes, or more
//! strictly because the local table has something that these keys do not cover. Decided by the
//! leader when it learns of a relation, and again after either side changed it.
//!
//! Two transactions without a common hash may be applied in either order and in parallel. That is
//! wrong, or makes them collide, if the local table
//! - has a unique index (plain, partial, on expressions) or an exclusion constraint under which
//!   rows collide that share no hashed key. Its transactions are then ordered among themselves, by
//!   a barrier on the table at constant cost. Foreign keys do not matter, since the subscriber does
//!   not check them;
//! - fires a trigger on the subscriber (ENABLE REPLICA or ALWAYS, including a foreign key's own
//!   triggers if they were set so). The trigger may read and write any row of any table, so its
//!   transactions are ordered with all others. Only a trigger whose function is declared IMMUTABLE
//!   looks at nothing but its row, by PostgreSQL's own definition.
//!
//! A local unique index is covered if only rows with equal hashes can violate it. That holds if all
//! columns of some hashed key are among its own, and if values that are equal locally were equal at
//! the provider.
//!
//! Not for: changes whose keys the provider cannot hash, which arrive with a barrier anyway.

use std::fmt;

/// A column's type. A domain is replaced by its base type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnType {
    /// Namespace and name, as in `pg_type`.
    pub name: (String, String),
    /// Type modifier, -1 for none.
    pub modifier: i32,
}

/// A column of a unique key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyColumn {
    /// Name of the column.
    pub name: String,
    /// Type of the column.
    pub column_type: ColumnType,
    /// The collation by which values are equal although their bytes differ; empty for the type's
    /// usual equality.
    pub comparison: String,
}

/// A unique key that the provider hashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashedKey {
    /// Columns of the key.
    pub columns: Vec<KeyColumn>,
    /// Two nulls are equal in this key.
    pub nulls_equal: bool,
}

/// A unique index or exclusion constraint of the local table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalKey {
    /// Name of the index, for messages.
    pub name: String,
    /// Columns that are compared by their type's usual equality; expressions and other operators
    /// are left out.
    pub columns: Vec<KeyColumn>,
    /// Two nulls are equal in this key.
    pub nulls_equal: bool,
    /// OID of the table or partition that has the index.
    pub table: u32,
    /// Rows can be found by this key: it is a plain unique index whose columns are all among
    /// `columns`.
    pub finds_rows: bool,
}

/// A trigger that fires while changes are applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trigger {
    /// Name of the trigger, for messages.
    pub name: String,
    /// The trigger's function is declared IMMUTABLE.
    pub immutable: bool,
}

/// Keys and triggers of the local table, including its partitions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalTable {
    /// Unique indexes and exclusion constraints.
    pub keys: Vec<LocalKey>,
    /// Triggers that fire.
    pub triggers: Vec<Trigger>,
}

/// The changes that a table's changes are ordered with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TableOrder {
    /// Changes that share a key's hash.
    #[default]
    Keys,
    /// All changes of the table, because of this index.
    Table {
        /// The index that no hashed key covers.
        index: String,
    },
    /// All changes of all tables, because of this trigger.
    Everything {
        /// The trigger.
        trigger: String,
    },
}

impl fmt::Display for TableOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keys => write!(f, "ordered by keys"),
            Self::Table { index } => write!(
                f,
                "ordered among themselves: the provider has no unique key that covers index \"{index}\""
            ),
            Self::Everything { trigger } => {
                write!(
                    f,
                    "ordered with all others: trigger \"{trigger}\" fires here"
                )
            }
        }
    }
}

impl TableOrder {
    /// Returns the order that `table` requires if the provider hashes `hashed`.
    #[must_use]
    pub fn of(table: &LocalTable, hashed: &[HashedKey]) -> Self {
        if let Some(trigger) = table.triggers.iter().find(|trigger| !trigger.immutable) {
            return Self::Everything {
                trigger: trigger.name.clone(),
            };
        }
        let covered = |key: &&LocalKey| hashed.iter().any(|hashed| covers(hashed, key));
        match table.keys.iter().find(|key| !covered(key)) {
            Some(key) => Self::Table {
                index: key.name.clone(),
            },
            None => Self::Keys,
        }
    }
}

impl LocalTable {
    /// Returns the key by which rows of the table, or of a partition, are found, if the key has
    /// only some of the columns of the provider's replica identity, and no other key of the same
    /// table or partition has all of them. If there are several, the first is returned.
    #[must_use]
    pub fn narrow_key(&self, identity: &[&str]) -> Option<&LocalKey> {
        let named = |key: &LocalKey, name: &str| key.columns.iter().any(|one| one.name == name);
        let is_part = |key: &&LocalKey| {
            key.finds_rows
                && !key.columns.is_empty()
                && key
                    .columns
                    .iter()
                    .all(|one| identity.contains(&one.name.as_str()))
        };
        let is_whole = |key: &LocalKey| identity.iter().all(|name| named(key, name));
        let has_whole = |table: u32| {
            self.keys
                .iter()
                .any(|key| key.table == table && is_part(&key) && is_whole(key))
        };
        self.keys
            .iter()
            .filter(is_part)
            .find(|key| !has_whole(key.table))
    }
}

/// Returns whether rows that are equal in `local` have equal hashes of `hashed`.
fn covers(hashed: &HashedKey, local: &LocalKey) -> bool {
    !hashed.columns.is_empty()
        && (hashed.nulls_equal || !local.nulls_equal)
        && hashed.columns.iter().all(|there| {
            local
                .columns
                .iter()
                .any(|here| here.name == there.name && is_as_fine(here, there))
        })
}

/// Returns whether values that are equal in column `here` were equal in column `there`.
fn is_as_fine(here: &KeyColumn, there: &KeyColumn) -> bool {
    let same_collation = here.comparison.is_empty() || here.comparison == there.comparison;
    same_collation && keeps_apart(&there.column_type, &here.column_type)
}

/// Returns whether different values of type `from` stay different as values of type `to`.
fn keeps_apart(from: &ColumnType, to: &ColumnType) -> bool {
    // A modifier may round or truncate.
    if to.modifier != -1 && (to.modifier != from.modifier || to.name != from.name) {
        return false;
    }
    if from.name == to.name {
        return true;
    }
    let built_in = |of: &ColumnType| (of.name.0 == "pg_catalog").then(|| of.name.1.clone());
    let (Some(from), Some(to)) = (built_in(from), built_in(to)) else {
        return false;
    };
    let wider: &[&[&str]] = &[
        &["int2", "int4", "int8", "numeric"],
        &["float4", "float8"],
        // bpchar ignores trailing blanks, so it distinguishes fewer values than the others.
        &["bpchar", "varchar", "text"],
        &["text", "varchar"],
    ];
    wider.iter().any(|family| {
        let place = |name: &str| family.iter().position(|member| *member == name);
        matches!((place(&from), place(&to)), (Some(from), Some(to)) if from <= to)
            // Integers keep their value in any width that holds them; otherwise there is an error.
            || (family.contains(&"int8") && place(&from).is_some_and(|place| place < 3) && place(&to).is_some())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, type_name: &str) -> KeyColumn {
        KeyColumn {
            name: name.to_owned(),
            column_type: ColumnType {
                name: ("pg_catalog".to_owned(), type_name.to_owned()),
                modifier: -1,
            },
            comparison: String::new(),
        }
    }

    fn hashed(columns: &[KeyColumn]) -> HashedKey {
        HashedKey {
            columns: columns.to_vec(),
            nulls_equal: false,
        }
    }

    fn local(columns: &[KeyColumn]) -> LocalKey {
        LocalKey {
            name: "i".to_owned(),
            columns: columns.to_vec(),
            nulls_equal: false,
            table: 1,
            finds_rows: true,
        }
    }

    #[test]
    fn a_key_on_some_columns_of_the_identity_is_narrow() {
        let (id, at) = (column("id", "int4"), column("at", "timestamptz"));
        let narrow = local(std::slice::from_ref(&id));
        let whole = local(&[at.clone(), id.clone()]);
        let other = local(&[column("email", "text")]);
        let named = |keys: &[&LocalKey], identity: &[&str]| {
            let table = LocalTable {
                keys: keys.iter().map(|key| (*key).clone()).collect(),
                triggers: Vec::new(),
            };
            table.narrow_key(identity).cloned()
        };
        let both = ["id", "at"];
        assert_eq!(named(&[&other, &narrow], &both), Some(narrow.clone()));
        // A key that equals the identity, or is wider; one that has none of its columns; whole old
        // rows.
        assert_eq!(named(&[&narrow, &whole], &both), None);
        assert_eq!(named(&[&narrow], &["id"]), None);
        assert_eq!(named(&[&whole], &["id"]), None);
        assert_eq!(named(&[&other], &both), None);
        assert_eq!(named(&[&narrow], &[]), None);
        // Only a key of the same partition counts.
        let mut elsewhere = whole;
        elsewhere.table = 2;
        assert_eq!(named(&[&narrow, &elsewhere], &both), Some(narrow.clone()));
        // A partial index finds no rows.
        let mut partial = narrow;
        partial.finds_rows = false;
        assert_eq!(named(&[&partial, &local(&[])], &both), None);
    }

    fn order(keys: &[LocalKey], hashed: &[HashedKey]) -> TableOrder {
        let table = LocalTable {
            keys: keys.to_vec(),
            triggers: Vec::new(),
        };
        TableOrder::of(&table, hashed)
    }

    fn by_table() -> TableOrder {
        TableOrder::Table {
            index: "i".to_owned(),
        }
    }

    #[test]
    fn the_same_keys_are_enough() {
        let (id, email) = (column("id", "int4"), column("email", "text"));
        let keys = [
            local(std::slice::from_ref(&id)),
            local(std::slice::from_ref(&email)),
        ];
        let both = [hashed(&[id]), hashed(&[email])];
        assert_eq!(order(&keys, &both), TableOrder::Keys);
        assert_eq!(order(&keys, &both[..1]), by_table());
        assert_eq!(order(&keys, &[]), by_table());
        assert_eq!(order(&[], &[]), TableOrder::Keys);
    }

    #[test]
    fn an_index_on_more_columns_is_covered_one_on_fewer_is_not() {
        let (id, region) = (column("id", "int4"), column("region", "text"));
        let wide = [local(&[region.clone(), id.clone()])];
        assert_eq!(
            order(&wide, &[hashed(std::slice::from_ref(&id))]),
            TableOrder::Keys
        );
        let narrow = [local(std::slice::from_ref(&id))];
        assert_eq!(order(&narrow, &[hashed(&[id, region])]), by_table());
        // Only expressions: no columns.
        assert_eq!(
            order(&[local(&[])], &[hashed(&[column("id", "int4")])]),
            by_table()
        );
        assert_eq!(
            order(&[local(&[column("id", "int4")])], &[hashed(&[])]),
            by_table()
        );
    }

    #[test]
    fn what_is_equal_here_must_be_equal_there() {
        let covered = |here: &KeyColumn, there: &KeyColumn| {
            order(
                &[local(std::slice::from_ref(here))],
                &[hashed(std::slice::from_ref(there))],
            ) == TableOrder::Keys
        };
        let case = |expected: bool, here: &str, there: &str| {
            assert_eq!(
                covered(&column("c", here), &column("c", there)),
                expected,
                "{there} there, {here} here"
            );
        };
        case(true, "int8", "int4");
        case(true, "int4", "int8");
        case(true, "numeric", "int8");
        case(false, "int8", "numeric");
        case(true, "float8", "float4");
        case(false, "float4", "float8");
        case(true, "text", "varchar");
        case(true, "varchar", "text");
        case(true, "text", "bpchar");
        case(false, "bpchar", "text");
        case(false, "bpchar", "varchar");
        case(false, "date", "timestamp");
        case(false, "int4", "text");
        // A local citext, in any schema.
        let mut citext = column("c", "citext");
        citext.column_type.name.0 = "public".to_owned();
        assert!(!covered(&citext, &column("c", "text")));
        assert!(covered(&citext, &citext));
        // A modifier that rounds, or truncates.
        let mut rounded = column("c", "numeric");
        rounded.column_type.modifier = 655_366;
        assert!(!covered(&rounded, &column("c", "numeric")));
        assert!(covered(&rounded, &rounded));
        assert!(covered(&column("c", "numeric"), &rounded));
        let mut short = column("c", "varchar");
        short.column_type.modifier = 9;
        assert!(!covered(&short, &column("c", "text")));
        // A collation that ignores case: only with the same one at the provider.
        let mut folded = column("c", "text");
        folded.comparison = "any_case".to_owned();
        assert!(!covered(&folded, &column("c", "text")));
        assert!(covered(&folded, &folded));
        assert!(covered(&column("c", "text"), &folded));
    }

    #[test]
    fn nulls() {
        let id = column("id", "int4");
        let mut strict = local(std::slice::from_ref(&id));
        strict.nulls_equal = true;
        let mut strict_there = hashed(std::slice::from_ref(&id));
        assert_eq!(
            order(
                std::slice::from_ref(&strict),
                std::slice::from_ref(&strict_there)
            ),
            by_table()
        );
        strict_there.nulls_equal = true;
        assert_eq!(
            order(&[strict], std::slice::from_ref(&strict_there)),
            TableOrder::Keys
        );
        assert_eq!(order(&[local(&[id])], &[strict_there]), TableOrder::Keys);
    }

    #[test]
    fn a_trigger_orders_with_everything_unless_it_sees_its_row_only() {
        let trigger = |immutable| Trigger {
            name: "t".to_owned(),
            immutable,
        };
        let id = column("id", "int4");
        let mut table = LocalTable {
            keys: vec![local(std::slice::from_ref(&id))],
            triggers: vec![trigger(true)],
        };
        let keys = [hashed(&[id])];
        assert_eq!(TableOrder::of(&table, &keys), TableOrder::Keys);
        table.triggers.push(trigger(false));
        assert_eq!(
            TableOrder::of(&table, &keys).to_string(),
            "ordered with all others: trigger \"t\" fires here"
        );
        table.keys.clear();
        assert!(matches!(
            TableOrder::of(&table, &keys),
            TableOrder::Everything { .. }
        ));
    }
}
