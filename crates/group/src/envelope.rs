//! The envelope in which every message between members travels.
//!
//! Bytes: `braid group` (11), format (u8, 1), group (16), from (u64), to (u64), boot (counter u64,
//! random u64), what the sender had stored at its start (term u64, index u64), its stored term
//! (u64), the index that it has applied (u64), kind (u8), body. Version 1. All numbers are
//! big-endian. Not for: encryption and rights, which the connection has.

use crate::boot::{Boot, Distrust, Start};
use crate::command::ENTRY_LIMIT;
use crate::member::{GroupId, MemberId, NodeNumber};
use braid_codec::{Malformed, Reader, Writer};

const MAGIC: &[u8; 11] = b"braid group";
const FORMAT: u8 = 1;

/// A message with its head.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Envelope {
    pub(crate) group: GroupId,
    pub(crate) from: MemberId,
    pub(crate) to: MemberId,
    pub(crate) boot: Boot,
    pub(crate) start: Start,
    pub(crate) term: u64,
    pub(crate) applied: u64,
    pub(crate) body: Body,
}

/// The kinds of messages.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Body {
    /// One of the algorithm's, in its own bytes.
    Raft(Vec<u8>),
    /// A proposal for the leader.
    Propose(Vec<u8>),
    /// Shows that the sender is there; `asks` to be welcomed.
    Ping { asks: bool },
    /// The receiver's boot is written down and in order. With the voters that the sender knows.
    Welcome { boot: Boot, voters: Vec<u64> },
    /// The receiver's boot is not believed.
    Refused { boot: Boot, why: Distrust },
}

impl Envelope {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.raw(MAGIC).u8(FORMAT).raw(&self.group.0);
        w.u64(self.from.get()).u64(self.to.get());
        self.boot.write(&mut w);
        w.u64(self.start.term).u64(self.start.index);
        w.u64(self.term).u64(self.applied);
        match &self.body {
            Body::Raft(bytes) => {
                w.u8(1).raw(bytes);
            }
            Body::Propose(bytes) => {
                w.u8(2).raw(bytes);
            }
            Body::Ping { asks } => {
                w.u8(3).bool(*asks);
            }
            Body::Welcome { boot, voters } => {
                w.u8(4);
                boot.write(&mut w);
                w.count(voters.len());
                for voter in voters {
                    w.u64(*voter);
                }
            }
            Body::Refused { boot, why } => {
                w.u8(5);
                boot.write(&mut w);
                why.write(&mut w);
            }
        }
        w.done()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "message of the group");
        if r.raw(MAGIC.len())? != MAGIC {
            return Err(Malformed::Invalid("message of the group"));
        }
        let format = r.u8()?;
        if format != FORMAT {
            return Err(Malformed::UnknownVersion {
                what: "message of the group",
                version: format,
            });
        }
        let group = GroupId(r.array()?);
        let from = MemberId::read(&mut r)?;
        let to = MemberId::read(&mut r)?;
        let boot = Boot::read(&mut r)?;
        let start = Start {
            term: r.u64()?,
            index: r.u64()?,
        };
        let term = r.u64()?;
        let applied = r.u64()?;
        let body = match r.u8()? {
            1 => Body::Raft(r.rest().to_vec()),
            2 => {
                let bytes = r.rest();
                if bytes.len() > ENTRY_LIMIT {
                    return Err(Malformed::TooLong {
                        what: "proposal",
                        limit: ENTRY_LIMIT,
                    });
                }
                Body::Propose(bytes.to_vec())
            }
            3 => Body::Ping { asks: r.bool()? },
            4 => Body::Welcome {
                boot: Boot::read(&mut r)?,
                voters: {
                    let count = r.count(NodeNumber::LAST.into())?;
                    (0..count).map(|_| r.u64()).collect::<Result<_, _>>()?
                },
            },
            5 => Body::Refused {
                boot: Boot::read(&mut r)?,
                why: Distrust::read(&mut r)?,
            },
            other => return Err(r.unknown(other)),
        };
        r.end()?;
        Ok(Self {
            group,
            from,
            to,
            boot,
            start,
            term,
            applied,
            body,
        })
    }
}
