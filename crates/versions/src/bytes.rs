//! Bytes of everything that nodes send each other: the format's version (one byte, 1), then the
//! value. Numbers are big-endian; sets and maps are in ascending order, after a count of 4 bytes.
//!
//! | value | bytes |
//! |---|---|
//! | table 4, version 8, term 8, boot 8, request's number 8, node 2 | |
//! | [`Record`] | term, id, count, each: table, seen, own (8; 0 for none) |
//! | [`Grant`] | as a record, each followed by: declared (1), holder (2; 0 for none) |
//! | [`Batch`] | term, node, boot, low, requests, releases |
//! | [`Request`] | number, count, each: table, access (1; 1 reads, 2 writes) |
//! | [`Release`] | number, kind (1; 1 committed, 2 void, 3 unused), for 1 and 3 the tables |
//! | [`Answer`] | grants, refused (number, reason), confirmed releases |
//! | [`Announcement`] | term, ends |
//! | [`Report`] | term, ends |
//! | [`Cut`] | term, follows, scope (1; 1 everyone, 2 node), its content |

use std::collections::{BTreeMap, BTreeSet};

use crate::cut::{Cut, Scope};
use crate::grant::{
    Access, Answer, Batch, Grant, Granted, Refusal, Release, Released, Request, TABLES_LIMIT,
};
use crate::local::{BATCH_LIMIT, TRANSACTIONS_LIMIT};
use crate::number::{Boot, GrantId, NUMBER_LIMIT, NodeNumber, TableNumber, Term, Version};
use crate::record::{Record, Shipped};
use crate::sequencer::OUTSTANDING_LIMIT;
use crate::vector::{End, Ends, Report, Vector};
use braid_codec::{Malformed, Reader, Writer};

/// The format that this version writes.
const FORMAT: u8 = 1;

/// A value that travels.
pub trait Bytes: Sized {
    /// Its name in errors.
    const WHAT: &'static str;

    /// Appends the value without the format's version.
    fn write(&self, w: &mut Writer);

    /// Takes the value.
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed>;

    /// The value's bytes.
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u8(FORMAT);
        self.write(&mut w);
        w.done()
    }

    /// Reads a value of all these bytes.
    ///
    /// # Errors
    ///
    /// [`Malformed`], for any bytes that [`Bytes::encode`] does not make.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(bytes, Self::WHAT, FORMAT)?;
        let value = Self::read(&mut r)?;
        r.end()?;
        Ok(value)
    }
}

/// What a sequencer says is decided.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Announcement {
    /// The sequencer's term.
    pub term: Term,
    /// What is decided, by table.
    pub ends: Ends,
}

pub(crate) fn number(r: &mut Reader<'_>) -> Result<u64, Malformed> {
    let number = r.u64()?;
    if number < NUMBER_LIMIT {
        Ok(number)
    } else {
        Err(r.invalid())
    }
}

pub(crate) fn node(r: &mut Reader<'_>) -> Result<Option<NodeNumber>, Malformed> {
    let node = r.u16()?;
    Ok((node != 0).then_some(NodeNumber(node)))
}

/// Items in strictly ascending order.
fn ascending<T: Ord, V>(
    r: &mut Reader<'_>,
    limit: usize,
    mut item: impl FnMut(&mut Reader<'_>) -> Result<(T, V), Malformed>,
) -> Result<BTreeMap<T, V>, Malformed> {
    let mut items = BTreeMap::new();
    for _ in 0..r.count(limit)? {
        let (key, value) = item(r)?;
        if items.last_key_value().is_some_and(|(last, _)| *last >= key) {
            return Err(r.invalid());
        }
        items.insert(key, value);
    }
    Ok(items)
}

fn list<T>(
    r: &mut Reader<'_>,
    limit: usize,
    mut item: impl FnMut(&mut Reader<'_>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    (0..r.count(limit)?).map(|_| item(r)).collect()
}

fn write_tables(tables: &BTreeSet<TableNumber>, w: &mut Writer) {
    w.count(tables.len());
    for table in tables {
        w.u32(table.0);
    }
}

fn read_tables(r: &mut Reader<'_>) -> Result<BTreeSet<TableNumber>, Malformed> {
    let tables = ascending(r, TABLES_LIMIT, |r| Ok((TableNumber(r.u32()?), ())))?;
    Ok(tables.into_keys().collect())
}

fn write_ends(ends: &Ends, w: &mut Writer) {
    w.count(ends.len());
    for (table, end) in ends {
        w.u32(table.0).u64(end.committed.0).u64(end.settled.0);
    }
}

fn read_ends(r: &mut Reader<'_>) -> Result<Ends, Malformed> {
    ascending(r, TABLES_LIMIT, |r| {
        let table = TableNumber(r.u32()?);
        let end = End {
            committed: Version(number(r)?),
            settled: Version(number(r)?),
        };
        if end.committed > end.settled {
            return Err(r.invalid());
        }
        Ok((table, end))
    })
}

pub(crate) fn write_vector(vector: &Vector, w: &mut Writer) {
    w.count(vector.len());
    for (table, version) in vector {
        w.u32(table.0).u64(version.0);
    }
}

pub(crate) fn read_vector(r: &mut Reader<'_>, limit: usize) -> Result<Vector, Malformed> {
    ascending(r, limit, |r| {
        Ok((TableNumber(r.u32()?), Version(number(r)?)))
    })
}

fn write_id(id: GrantId, w: &mut Writer) {
    w.u16(id.node.0).u64(id.boot.0).u64(id.number);
}

fn read_term(r: &mut Reader<'_>) -> Result<(Term, Ends), Malformed> {
    Ok((Term(number(r)?), read_ends(r)?))
}

fn read_id(r: &mut Reader<'_>) -> Result<GrantId, Malformed> {
    Ok(GrantId {
        node: node(r)?.ok_or_else(|| r.invalid())?,
        boot: Boot(number(r)?),
        number: number(r)?,
    })
}

fn write_versions(seen: Version, own: Option<Version>, w: &mut Writer) {
    w.u64(seen.0).u64(own.map_or(0, |own| own.0));
}

fn read_versions(r: &mut Reader<'_>) -> Result<(Version, Option<Version>), Malformed> {
    let (seen, own) = (number(r)?, number(r)?);
    if own != 0 && own <= seen {
        return Err(r.invalid());
    }
    Ok((Version(seen), (own != 0).then_some(Version(own))))
}

impl Bytes for Record {
    const WHAT: &'static str = "versions of a transaction";

    fn write(&self, w: &mut Writer) {
        w.u64(self.term.0);
        write_id(self.id, w);
        w.count(self.tables.len());
        for (table, shipped) in &self.tables {
            w.u32(table.0);
            write_versions(shipped.seen, shipped.own, w);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (term, id) = (Term(number(r)?), read_id(r)?);
        let tables = ascending(r, TABLES_LIMIT, |r| {
            let table = TableNumber(r.u32()?);
            let (seen, own) = read_versions(r)?;
            Ok((table, Shipped { seen, own }))
        })?;
        Ok(Self { term, id, tables })
    }
}

impl Bytes for Grant {
    const WHAT: &'static str = "grant of versions";

    fn write(&self, w: &mut Writer) {
        w.u64(self.term.0);
        write_id(self.id, w);
        w.count(self.tables.len());
        for (table, granted) in &self.tables {
            w.u32(table.0);
            write_versions(granted.seen, granted.own, w);
            w.u8(u8::from(granted.declared))
                .u16(granted.holder.map_or(0, |node| node.0));
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (term, id) = (Term(number(r)?), read_id(r)?);
        let tables = ascending(r, TABLES_LIMIT, |r| {
            let table = TableNumber(r.u32()?);
            let (seen, own) = read_versions(r)?;
            let declared = match r.u8()? {
                0 => false,
                1 => true,
                _ => return Err(r.invalid()),
            };
            let granted = Granted {
                seen,
                own,
                declared,
                holder: node(r)?,
            };
            Ok((table, granted))
        })?;
        Ok(Self { term, id, tables })
    }
}

impl Bytes for Release {
    const WHAT: &'static str = "release of versions";

    fn write(&self, w: &mut Writer) {
        w.u64(self.number);
        match &self.released {
            Released::Committed(tables) => write_tables(tables, w.u8(1)),
            Released::Void => {
                w.u8(2);
            }
            Released::Unused(tables) => write_tables(tables, w.u8(3)),
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let number = number(r)?;
        let released = match r.u8()? {
            1 => Released::Committed(read_tables(r)?),
            2 => Released::Void,
            3 => Released::Unused(read_tables(r)?),
            tag => return Err(r.unknown(tag)),
        };
        Ok(Self { number, released })
    }
}

impl Bytes for Request {
    const WHAT: &'static str = "request for versions";

    fn write(&self, w: &mut Writer) {
        w.u64(self.number).count(self.tables.len());
        for (table, access) in &self.tables {
            let tag = match access {
                Access::Read => 1,
                Access::Write => 2,
            };
            w.u32(table.0).u8(tag);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let number = number(r)?;
        let tables = ascending(r, TABLES_LIMIT, |r| {
            let table = TableNumber(r.u32()?);
            match r.u8()? {
                1 => Ok((table, Access::Read)),
                2 => Ok((table, Access::Write)),
                tag => Err(r.unknown(tag)),
            }
        })?;
        Ok(Self { number, tables })
    }
}

impl Bytes for Batch {
    const WHAT: &'static str = "requests for versions";

    fn write(&self, w: &mut Writer) {
        w.u64(self.term.0).u16(self.node.0);
        w.u64(self.boot.0).u64(self.low);
        w.count(self.requests.len());
        for request in &self.requests {
            request.write(w);
        }
        w.count(self.releases.len());
        for release in &self.releases {
            release.write(w);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            term: Term(number(r)?),
            node: node(r)?.ok_or_else(|| r.invalid())?,
            boot: Boot(number(r)?),
            low: number(r)?,
            requests: list(r, BATCH_LIMIT, Request::read)?,
            releases: list(r, BATCH_LIMIT, Release::read)?,
        })
    }
}

const REFUSALS: [(u8, Refusal); 9] = [
    (1, Refusal::NotActing),
    (2, Refusal::NoMajority),
    (3, Refusal::OtherTerm),
    (4, Refusal::OtherBoot),
    (5, Refusal::Fenced),
    (6, Refusal::Tables),
    (7, Refusal::TooMany),
    (8, Refusal::Window),
    (9, Refusal::NotAll),
];

impl Bytes for Answer {
    const WHAT: &'static str = "answer of the sequencer";

    fn write(&self, w: &mut Writer) {
        w.count(self.grants.len());
        for grant in &self.grants {
            grant.write(w);
        }
        w.count(self.refused.len());
        for (number, refusal) in &self.refused {
            let tag = REFUSALS.iter().find(|(_, known)| known == refusal);
            w.u64(*number).u8(tag.map_or(0, |(tag, _)| *tag));
        }
        w.count(self.confirmed.len());
        for release in &self.confirmed {
            release.write(w);
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            grants: list(r, BATCH_LIMIT, Grant::read)?,
            refused: list(r, BATCH_LIMIT, |r| {
                let (number, tag) = (number(r)?, r.u8()?);
                let known = REFUSALS.iter().find(|(known, _)| *known == tag);
                let (_, refusal) = known.ok_or_else(|| r.unknown(tag))?;
                Ok((number, *refusal))
            })?,
            confirmed: list(r, BATCH_LIMIT, Release::read)?,
        })
    }
}

impl Bytes for Announcement {
    const WHAT: &'static str = "announcement of versions";

    fn write(&self, w: &mut Writer) {
        write_ends(&self.ends, w.u64(self.term.0));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (term, ends) = read_term(r)?;
        Ok(Self { term, ends })
    }
}

impl Bytes for Report {
    const WHAT: &'static str = "report of versions";

    fn write(&self, w: &mut Writer) {
        write_ends(&self.ends, w.u64(self.term.0));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (term, ends) = read_term(r)?;
        Ok(Self { term, ends })
    }
}

impl Bytes for Cut {
    const WHAT: &'static str = "cut of versions";

    fn write(&self, w: &mut Writer) {
        w.u64(self.term.0).u64(self.follows.0);
        match &self.scope {
            Scope::Everyone { ends } => write_ends(ends, w.u8(1)),
            Scope::Node { node, boot, void } => {
                w.u8(2).u16(node.0).u64(boot.0).count(void.len());
                for (table, version) in void {
                    w.u32(table.0).u64(version.0);
                }
            }
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (term, follows) = (Term(number(r)?), Term(number(r)?));
        if term.0 != follows.0.saturating_add(1) {
            return Err(r.invalid());
        }
        let scope = match r.u8()? {
            1 => Scope::Everyone {
                ends: read_ends(r)?,
            },
            2 => {
                let limit = OUTSTANDING_LIMIT.max(TRANSACTIONS_LIMIT * TABLES_LIMIT);
                let node = node(r)?.ok_or_else(|| r.invalid())?;
                let boot = Boot(number(r)?);
                let void = ascending(r, limit, |r| {
                    let table = TableNumber(r.u32()?);
                    Ok(((table, Version(number(r)?)), ()))
                })?;
                let void = void.into_keys().collect();
                Scope::Node { node, boot, void }
            }
            tag => return Err(r.unknown(tag)),
        };
        Ok(Self {
            term,
            follows,
            scope,
        })
    }
}
