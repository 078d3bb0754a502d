//! Entries of the group's log about routing, and their bytes.
//!
//! The bytes: format (u8, 1), tag (u8), then the fields. Numbers are big-endian, lists and runs of
//! bytes come after their length (u32). A tag, format or version of the hash that a node does not
//! know is an error: an entry is never skipped.

use crate::hash::{HASH_VERSION, TENANT_LIMIT, Tenant};
use crate::map::{NodeSet, read_sets, write_sets};
use crate::rules::{Shards, Spread, Time};
use braid_codec::{Malformed, Reader, Writer};

/// The longest entry, in bytes. It fits into an entry of the group's log.
pub const ENTRY_LIMIT: usize = 48 * 1024;
/// The longest name of a table, in bytes.
pub const TABLE_LIMIT: usize = 512;

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

    /// The name.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A table is prepared for routing: its shards are distributed over these sets. It takes no
    /// rows yet, so its first rules can count from any time on.
    Route {
        /// The table.
        table: TableName,
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
    /// A table is not routed any more.
    Unroute {
        /// The table.
        table: TableName,
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
                shards,
                sets,
            } => {
                w.u8(1).bytes(&table.0).u8(HASH_VERSION).u32(shards.get());
                write_sets(sets, &mut w);
            }
            Self::Unroute { table } => {
                w.u8(2).bytes(&table.0);
            }
            Self::Open { table } => {
                w.u8(5).bytes(&table.0);
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
    /// [`Malformed::UnknownTag`] and [`Malformed::UnknownVersion`] if a newer Braid wrote it, or has
    /// routed the table with another hash; others for bad bytes.
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
    (0..r.count(ENTRY_LIMIT)?)
        .map(|_| {
            Tenant::from_canonical(r.bytes(TENANT_LIMIT)?).map_err(|_| Malformed::Invalid("tenant"))
        })
        .collect()
}
