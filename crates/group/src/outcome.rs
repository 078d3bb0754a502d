//! Outcomes of entries: a value, or a reason why it was refused with words for the user.
//!
//! Outcomes are part of the agreed state (a repeated proposal gets the first answer), so they have
//! bytes. Not for: errors of one member alone, which are [`crate::Error`].

use std::fmt;

use crate::command::{KEY_LIMIT, Token};
use crate::member::{MemberId, MemberState, NAME_LIMIT, NodeNumber, Version};
use braid_codec::{Malformed, Reader, Writer};

/// The answer to a proposal.
pub type Outcome = Result<Value, Refusal>;

/// The value that an entry gave to its proposer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// Nothing beyond its effect.
    Done,
    /// The new member's numbers.
    Member {
        /// In the log.
        id: MemberId,
        /// In keys.
        number: NodeNumber,
    },
    /// The lock is held.
    Lock {
        /// Fences what is done under the lock, and releases it.
        token: Token,
    },
    /// A block of numbers that nobody else gets: `start` to `start + size - 1`.
    Block {
        /// The first number, from 1.
        start: u64,
        /// How many numbers.
        size: u64,
    },
    /// The lease is granted.
    Lease {
        /// Fences what is done under the lease.
        token: Token,
        /// How long the holder waits before it acts, in microseconds of a perfect clock.
        wait: u64,
    },
}

/// Why an entry had no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// No member has this number.
    NoSuchMember(MemberId),
    /// The member was removed.
    Removed(String),
    /// The name is another member's, or was a removed one's that still counts.
    NameTaken(String),
    /// The data directory or node is a member already.
    IdentityTaken(String),
    /// All node numbers have been used.
    NumbersExhausted,
    /// A member can't go from one state to the other.
    State {
        /// The state it has.
        from: MemberState,
        /// The state that was asked for.
        to: MemberState,
    },
    /// Without this member nobody has a vote.
    LastVoter,
    /// Another proposal holds the lock.
    LockHeld {
        /// The holder's name.
        holder: String,
        /// The grant.
        token: Token,
    },
    /// The token holds no lock on this key.
    LockNotHeld,
    /// A block has no size, or the sequence has no numbers left for it.
    BlockSize,
    /// The lease has another grant than the proposer knew.
    LeaseChanged,
    /// The token is not the lease's grant any more.
    LeaseLost,
    /// The lease's duration is 0 or too long.
    LeaseDuration,
    /// The member's Braid is older than the group's entries need.
    TooOld {
        /// The version that it has.
        has: Version,
        /// The version that is needed.
        needs: Version,
    },
    /// Members whose Braid does not know this kind of entry yet.
    KindTooNew {
        /// The version that is needed.
        needs: Version,
        /// The name of one such member.
        lacking: String,
    },
    /// The member has started anew since it proposed this.
    Superseded,
    /// The proposal is too old for its answer to be known.
    Forgotten,
    /// The table is versioned.
    AlreadyVersioned(String),
    /// No versioned table has this number.
    NotVersioned(u32),
    /// Another decision about versioned writes came first.
    OtherCut {
        /// The term of that decision.
        term: u64,
    },
    /// Tables are versioned only while all members with data are active.
    NotActive(String),
    /// A node with data can't join a group that has versioned tables.
    HasVersionedTables,
    /// A table of the state is full.
    Full {
        /// Its limit.
        limit: u64,
    },
    /// An entry of routing has no effect.
    Routing(braid_routing::Refusal),
    /// The member alone has rows of a routed table.
    HasShards {
        /// The table.
        table: String,
    },
}

impl Refusal {
    /// The hint for the user: a sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::NoSuchMember(_) => "Look at the group's members in braid.group_nodes.",
            Self::Removed(_) => "A removed node can only join anew, as a new member.",
            Self::NameTaken(_) => "Choose another node name.",
            Self::IdentityTaken(_) => {
                "A copy of a member's data directory cannot join beside it. Create the node anew there."
            }
            Self::NumbersExhausted => "A group can have had 1023 members. Create a new group.",
            Self::State { .. } => "Look at the member's state in braid.group_nodes.",
            Self::LastVoter => "Add another member and wait until it is active, or drop the group.",
            Self::LockHeld { .. } => {
                "Wait until the holder releases the lock, or remove that node."
            }
            Self::LockNotHeld | Self::LeaseLost => {
                "Another member may hold it by now. Take it again before going on."
            }
            Self::BlockSize => "Ask for a smaller block, or use a sequence with a larger range.",
            Self::LeaseChanged => "Look at who holds it now, and try again.",
            Self::LeaseDuration => "Choose a duration between 1 microsecond and an hour.",
            Self::TooOld { .. } => "Update Braid on that node first.",
            Self::KindTooNew { .. } => "Update Braid on all nodes of the group first.",
            Self::AlreadyVersioned(_) | Self::NotVersioned(_) => {
                "The view braid.table_versions lists the versioned tables."
            }
            Self::OtherCut { .. } => "Nothing is to be done: versions go on from that decision.",
            Self::NotActive(_) => {
                "Wait until it has joined, or is active again. See braid.group_nodes."
            }
            Self::HasVersionedTables => {
                "Call braid.unversion_table for each table of braid.table_versions first."
            }
            Self::Superseded | Self::Forgotten => "Look at what is in effect, and try again.",
            Self::Full { .. } => "Remove what is not needed any more.",
            Self::Routing(refusal) => refusal.hint(),
            Self::HasShards { .. } => {
                "Move its shards away with braid.move_shard, or end the routing with braid.unroute_table."
            }
        }
    }

    fn write(&self, w: &mut Writer) {
        match self {
            Self::NoSuchMember(id) => w.u8(1).u64(id.get()),
            Self::Removed(name) => w.u8(2).text(name),
            Self::NameTaken(name) => w.u8(3).text(name),
            Self::IdentityTaken(name) => w.u8(4).text(name),
            Self::NumbersExhausted => w.u8(5),
            Self::State { from, to } => w.u8(6).u8(from.tag()).u8(to.tag()),
            Self::LastVoter => w.u8(7),
            Self::LockHeld { holder, token } => {
                w.u8(8).text(holder);
                token.write(w);
                w
            }
            Self::LockNotHeld => w.u8(9),
            Self::BlockSize => w.u8(10),
            Self::LeaseChanged => w.u8(11),
            Self::LeaseLost => w.u8(12),
            Self::LeaseDuration => w.u8(13),
            Self::TooOld { has, needs } => {
                w.u8(14);
                has.write(w);
                needs.write(w);
                w
            }
            Self::KindTooNew { needs, lacking } => {
                w.u8(15);
                needs.write(w);
                w.text(lacking)
            }
            Self::Superseded => w.u8(16),
            Self::Forgotten => w.u8(17),
            Self::Full { limit } => w.u8(18).u64(*limit),
            Self::Routing(refusal) => {
                w.u8(19);
                refusal.write(w);
                w
            }
            Self::HasShards { table } => w.u8(20).text(table),
            Self::AlreadyVersioned(name) => w.u8(56).text(name),
            Self::NotVersioned(number) => w.u8(57).u32(*number),
            Self::OtherCut { term } => w.u8(58).u64(*term),
            Self::NotActive(name) => w.u8(60).text(name),
            Self::HasVersionedTables => w.u8(59),
        };
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match r.u8()? {
            1 => Self::NoSuchMember(MemberId::read(r)?),
            2 => Self::Removed(r.text(NAME_LIMIT)?),
            3 => Self::NameTaken(r.text(NAME_LIMIT)?),
            4 => Self::IdentityTaken(r.text(NAME_LIMIT)?),
            5 => Self::NumbersExhausted,
            6 => Self::State {
                from: MemberState::read(r)?,
                to: MemberState::read(r)?,
            },
            7 => Self::LastVoter,
            8 => Self::LockHeld {
                holder: r.text(KEY_LIMIT)?,
                token: Token::read(r)?,
            },
            9 => Self::LockNotHeld,
            10 => Self::BlockSize,
            11 => Self::LeaseChanged,
            12 => Self::LeaseLost,
            13 => Self::LeaseDuration,
            14 => Self::TooOld {
                has: Version::read(r)?,
                needs: Version::read(r)?,
            },
            15 => Self::KindTooNew {
                needs: Version::read(r)?,
                lacking: r.text(NAME_LIMIT)?,
            },
            16 => Self::Superseded,
            17 => Self::Forgotten,
            18 => Self::Full { limit: r.u64()? },
            19 => Self::Routing(braid_routing::Refusal::read(r)?),
            20 => Self::HasShards {
                table: r.text(braid_routing::TABLE_LIMIT)?,
            },
            56 => Self::AlreadyVersioned(r.text(3 * KEY_LIMIT)?),
            57 => Self::NotVersioned(r.u32()?),
            58 => Self::OtherCut { term: r.u64()? },
            60 => Self::NotActive(r.text(NAME_LIMIT)?),
            59 => Self::HasVersionedTables,
            other => return Err(r.unknown(other)),
        })
    }
}

impl std::error::Error for Refusal {}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchMember(id) => write!(f, "the group has no member {id}"),
            Self::Removed(name) => write!(f, "node \"{name}\" was removed from the group"),
            Self::NameTaken(name) => write!(f, "the group has a node \"{name}\" already"),
            Self::IdentityTaken(name) => {
                write!(
                    f,
                    "this database is node \"{name}\" of the group, or a copy of it"
                )
            }
            Self::NumbersExhausted => f.write_str("the group has no node number left"),
            Self::State { from, to } => {
                write!(
                    f,
                    "a node that is {} cannot become {}",
                    from.word(),
                    to.word()
                )
            }
            Self::LastVoter => f.write_str("the group's last node with a vote cannot be removed"),
            Self::LockHeld { holder, .. } => write!(f, "node \"{holder}\" holds the lock"),
            Self::LockNotHeld => f.write_str("the lock is not held any more"),
            Self::BlockSize => f.write_str("the sequence has no block of this size"),
            Self::LeaseChanged => f.write_str("the lease was granted anew meanwhile"),
            Self::LeaseLost => f.write_str("the lease is lost"),
            Self::LeaseDuration => f.write_str("the lease's duration is out of range"),
            Self::TooOld { has, needs } => {
                write!(f, "the group needs Braid {needs}, the node has {has}")
            }
            Self::KindTooNew { needs, lacking } => {
                write!(
                    f,
                    "this needs Braid {needs}, which node \"{lacking}\" does not have"
                )
            }
            Self::Superseded => f.write_str("the node has started anew since it asked for this"),
            Self::Forgotten => f.write_str("what became of the proposal is not known any more"),
            Self::AlreadyVersioned(name) => write!(f, "table {name} is versioned already"),
            Self::NotVersioned(number) => write!(f, "the group has no versioned table {number}"),
            Self::OtherCut { term } => {
                write!(f, "term {term} of table versions has begun meanwhile")
            }
            Self::NotActive(name) => write!(f, "node \"{name}\" is not active in the group"),
            Self::HasVersionedTables => {
                f.write_str("a node with data cannot join yet, as the group has versioned tables")
            }
            Self::Full { limit } => write!(f, "the group cannot keep more than {limit} of these"),
            Self::Routing(refusal) => refusal.fmt(f),
            Self::HasShards { table } => {
                write!(
                    f,
                    "no other node has this node's rows of routed table {table}"
                )
            }
        }
    }
}

pub(crate) fn write_outcome(outcome: &Outcome, w: &mut Writer) {
    match outcome {
        Ok(Value::Done) => {
            w.u8(0);
        }
        Ok(Value::Member { id, number }) => {
            w.u8(1).u64(id.get()).u16(number.get());
        }
        Ok(Value::Lock { token }) => {
            w.u8(2);
            token.write(w);
        }
        Ok(Value::Block { start, size }) => {
            w.u8(3).u64(*start).u64(*size);
        }
        Ok(Value::Lease { token, wait }) => {
            w.u8(4);
            token.write(w);
            w.u64(*wait);
        }
        Err(refusal) => {
            w.u8(255);
            refusal.write(w);
        }
    }
}

pub(crate) fn read_outcome(r: &mut Reader<'_>) -> Result<Outcome, Malformed> {
    Ok(match r.u8()? {
        0 => Ok(Value::Done),
        1 => Ok(Value::Member {
            id: MemberId::read(r)?,
            number: NodeNumber::new(r.u16()?).ok_or(Malformed::Invalid("node number"))?,
        }),
        2 => Ok(Value::Lock {
            token: Token::read(r)?,
        }),
        3 => Ok(Value::Block {
            start: r.u64()?,
            size: r.u64()?,
        }),
        4 => Ok(Value::Lease {
            token: Token::read(r)?,
            wait: r.u64()?,
        }),
        255 => Err(Refusal::read(r)?),
        other => return Err(r.unknown(other)),
    })
}
