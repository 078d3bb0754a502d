//! Entries of the group's log about routing, and their bytes.
//!
//! The bytes: format (u8, 1), tag (u8), then the fields. Numbers are big-endian, lists and runs of
//! bytes come after their length (u32). A tag, format or version of the hash that a node does not
//! know is an error: an entry is never skipped.

use std::fmt;

use crate::hash::{HASH_VERSION, TENANT_LIMIT, Tenant};
use crate::map::{NodeSet, SetId, read_sets, write_sets};
use crate::rules::{Shard, Shards, Spread, Time};
use braid_codec::{Malformed, Reader, Writer};

/// The longest entry, in bytes. It fits into an entry of the group's log.
pub const ENTRY_LIMIT: usize = 48 * 1024;
/// The longest name of a table, in bytes.
pub const TABLE_LIMIT: usize = 512;
/// The longest expression of a tenant, record or creation, in bytes.
pub const EXPRESSION_LIMIT: usize = 2_048;

const FORMAT: u8 = 1;

/// A table by its name, which is the same on all nodes: schema and table in the group's own form.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName(Vec<u8>);

impl TableName {
    /// A name of 1 to [`TABLE_LIMIT`] bytes.
    ///
    /// # Errors
    /// [`Malformed::Invalid`].
    pub fn new(name: &[u8]) -> Result<Self, Malformed> {
        if name.is_empty() || name.len() > TABLE_LIMIT {
            return Err(Malformed::Invalid("table name"));
        }
        Ok(Self(name.to_vec()))
    }

    /// A table by its schema and name, as all nodes call it: with quotes where a name is not a
    /// plain word. It does not depend on the words that a major version of PostgreSQL has for
    /// itself.
    ///
    /// # Errors
    /// [`Malformed::Invalid`].
    pub fn of(schema: &str, table: &str) -> Result<Self, Malformed> {
        Self::new(format!("{}.{}", word(schema), word(table)).as_bytes())
    }

    /// The name.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

fn word(name: &str) -> String {
    let is_letter = |c: char| c.is_ascii_lowercase() || c == '_';
    let is_plain = name.starts_with(is_letter)
        && name
            .chars()
            .all(|c| is_letter(c) || c.is_ascii_digit() || c == '$');
    if is_plain {
        name.to_owned()
    } else {
        format!("\"{}\"", name.replace('"', "\"\""))
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

/// The expressions over a table's columns by which its rows are routed, as SQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expressions {
    /// The tenant.
    pub tenant: String,
    /// The record.
    pub record: String,
    /// When the row was created: a `timestamptz`.
    pub created: String,
}

impl Expressions {
    #[cfg(test)]
    pub(crate) fn of_orders() -> Self {
        Self {
            tenant: "tenant_id".to_owned(),
            record: "order_id".to_owned(),
            created: "created_at".to_owned(),
        }
    }

    fn all(&self) -> [&str; 3] {
        [&self.tenant, &self.record, &self.created]
    }

    pub(crate) fn write(&self, w: &mut Writer) {
        for text in self.all() {
            w.text(text);
        }
    }

    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut next = || match r.text(EXPRESSION_LIMIT)? {
            text if text.is_empty() || text.contains('\0') => Err(Malformed::Invalid("expression")),
            text => Ok(text),
        };
        Ok(Self {
            tenant: next()?,
            record: next()?,
            created: next()?,
        })
    }
}

/// A step of moving a shard ([`crate::ShardMap`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveStep {
    /// The set begins to get the shard's rows.
    Begin(SetId),
    /// The set has all rows, and answers for the shard.
    Switch,
    /// The former set has the shard no more.
    Finish,
    /// The move ends before the switch; the former set keeps the shard.
    Cancel,
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A table is prepared for routing: its shards are distributed over these sets. It takes no
    /// rows yet, so its first rules can count from any time on.
    Route {
        /// The table.
        table: TableName,
        /// The table's tenant, record and creation.
        expressions: Expressions,
        /// The number of shards.
        shards: Shards,
        /// The node sets.
        sets: Vec<NodeSet>,
    },
    /// A routed table takes rows from now on; its rules follow [`Entry::Close`].
    Open {
        /// The table.
        table: TableName,
    },
    /// A routed table takes no rows any more, so that its routing can end.
    Shut {
        /// The table.
        table: TableName,
    },
    /// A table that takes no rows is not routed any more.
    Unroute {
        /// The table.
        table: TableName,
    },
    /// A further set of nodes, without shards yet.
    AddSet {
        /// The table.
        table: TableName,
        /// The set: a new number, and nodes that are in no other one.
        set: NodeSet,
    },
    /// A step of moving a shard to another set.
    Move {
        /// The table.
        table: TableName,
        /// The shard.
        shard: Shard,
        /// The step.
        step: MoveStep,
    },
    /// No rule of an open table will ever count from a time at or before this one. So rows created
    /// at or before it have their final place.
    Close {
        /// The time.
        time: Time,
    },
    /// Rows of these tenants that are created after `time` are spread over `spread` shards.
    Rule {
        /// The table.
        table: TableName,
        /// The time. For an open table it is after the last `Close` before this entry.
        time: Time,
        /// The spread.
        spread: Spread,
        /// The tenants.
        tenants: Vec<Tenant>,
    },
}

/// The entry's name in errors.
const WHAT: &str = "entry of routing";

impl Entry {
    /// The hint for the user about bytes that are no entry, where there is one: a sentence.
    #[must_use]
    pub const fn hint(error: &Malformed) -> Option<&'static str> {
        match error {
            Malformed::TooLong { .. } | Malformed::TooMany { .. } => {
                Some("Divide the tenants among several rules with one time.")
            }
            other => other.hint(),
        }
    }

    /// The entry's bytes.
    ///
    /// # Errors
    /// [`Malformed`] if a value is above its limit, so that no node could read it.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        let mut w = Writer::default();
        w.u8(FORMAT);
        match self {
            Self::Route {
                table,
                expressions,
                shards,
                sets,
            } => {
                w.u8(1).bytes(&table.0);
                expressions.write(&mut w);
                w.u8(HASH_VERSION).u32(shards.get());
                write_sets(sets, &mut w);
            }
            Self::Unroute { table } => {
                w.u8(2).bytes(&table.0);
            }
            Self::Open { table } => {
                w.u8(5).bytes(&table.0);
            }
            Self::Shut { table } => {
                w.u8(6).bytes(&table.0);
            }
            Self::AddSet { table, set } => {
                w.u8(7).bytes(&table.0);
                write_sets(std::slice::from_ref(set), &mut w);
            }
            Self::Move { table, shard, step } => {
                w.u8(8).bytes(&table.0).u32(shard.0);
                match step {
                    MoveStep::Begin(to) => w.u8(1).u32(to.0),
                    MoveStep::Switch => w.u8(2),
                    MoveStep::Finish => w.u8(3),
                    MoveStep::Cancel => w.u8(4),
                };
            }
            Self::Close { time } => {
                w.u8(3).i64(time.0);
            }
            Self::Rule {
                table,
                time,
                spread,
                tenants,
            } => {
                w.u8(4).bytes(&table.0).i64(time.0).u32(spread.get());
                w.count(tenants.len());
                for tenant in tenants {
                    w.bytes(tenant.canonical());
                }
            }
        }
        let bytes = w.done();
        // A proposer that breaks a limit learns it here, not each node when it reads the log.
        if Self::decode(&bytes)? == *self {
            Ok(bytes)
        } else {
            Err(Malformed::Invalid("value"))
        }
    }

    /// The entry of these bytes.
    ///
    /// # Errors
    /// [`Malformed::UnknownTag`] and [`Malformed::UnknownVersion`] if a newer Braid wrote it, or
    /// has routed the table with another hash; others for bad bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > ENTRY_LIMIT {
            return Err(Malformed::TooLong {
                what: WHAT,
                limit: ENTRY_LIMIT,
            });
        }
        let mut r = Reader::versioned(bytes, WHAT, FORMAT)?;
        let entry = match r.u8()? {
            1 => Self::Route {
                table: table(&mut r)?,
                expressions: Expressions::read(&mut r)?,
                shards: shards(&mut r)?,
                sets: read_sets(&mut r)?,
            },
            2 => Self::Unroute {
                table: table(&mut r)?,
            },
            3 => Self::Close {
                time: time(&mut r)?,
            },
            4 => Self::Rule {
                table: table(&mut r)?,
                time: time(&mut r)?,
                spread: Spread::new(r.u32()?).map_err(|_| Malformed::Invalid("spread"))?,
                tenants: tenants(&mut r)?,
            },
            5 => Self::Open {
                table: table(&mut r)?,
            },
            6 => Self::Shut {
                table: table(&mut r)?,
            },
            7 => {
                let table = table(&mut r)?;
                let mut sets = read_sets(&mut r)?;
                match (sets.pop(), sets.is_empty()) {
                    (Some(set), true) => Self::AddSet { table, set },
                    _ => return Err(Malformed::Invalid("node set")),
                }
            }
            8 => Self::Move {
                table: table(&mut r)?,
                shard: Shard(r.u32()?),
                step: match r.u8()? {
                    1 => MoveStep::Begin(SetId(r.u32()?)),
                    2 => MoveStep::Switch,
                    3 => MoveStep::Finish,
                    4 => MoveStep::Cancel,
                    other => return Err(r.unknown(other)),
                },
            },
            other => return Err(r.unknown(other)),
        };
        r.end()?;
        Ok(entry)
    }
}

pub(crate) fn table(r: &mut Reader<'_>) -> Result<TableName, Malformed> {
    TableName::new(r.bytes(TABLE_LIMIT)?)
}

/// The version of the hash, then the number of shards.
pub(crate) fn shards(r: &mut Reader<'_>) -> Result<Shards, Malformed> {
    match r.u8()? {
        HASH_VERSION => {}
        version => {
            let what = "routing hash";
            return Err(Malformed::UnknownVersion { what, version });
        }
    }
    Shards::new(r.u32()?).map_err(|_| Malformed::Invalid("number of shards"))
}

pub(crate) fn time(r: &mut Reader<'_>) -> Result<Time, Malformed> {
    let time = Time(r.i64()?);
    if time.is_finite() {
        Ok(time)
    } else {
        Err(Malformed::Invalid("time"))
    }
}

fn tenants(r: &mut Reader<'_>) -> Result<Vec<Tenant>, Malformed> {
    (0..r.count(ENTRY_LIMIT)?).map(|_| tenant(r)).collect()
}

pub(crate) fn tenant(r: &mut Reader<'_>) -> Result<Tenant, Malformed> {
    Tenant::from_canonical(r.bytes(TENANT_LIMIT)?).map_err(|_| Malformed::Invalid("tenant"))
}

#[cfg(test)]
mod tests {
    use super::{TableName, word};

    #[test]
    fn a_name_has_quotes_where_it_needs_them() {
        assert_eq!(word("order_2$"), "order_2$");
        assert_eq!(word("Order"), "\"Order\"");
        assert_eq!(word("2nd"), "\"2nd\"");
        assert_eq!(word("a\"b"), "\"a\"\"b\"");
        assert_eq!(word(""), "\"\"");
        let name = TableName::of("public", "select").unwrap();
        assert_eq!(name.to_string(), "public.select");
        assert!(TableName::of("public", &"x".repeat(600)).is_err());
    }
}
