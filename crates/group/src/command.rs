//! The kinds of entries of the group's log, and their bytes.
//!
//! Each kind has a tag that never changes, a format version of its own, and the first version of
//! Braid that knows it. A kind is proposed only when all members have that version
//! ([`crate::State::lacking`]); the state refuses it otherwise. A tag that a member does not know
//! stops it with an error: an entry is never skipped.
//!
//! To add a kind (a routing rule, a map of shards, who sequences table versions): a variant of
//! [`Command`], one line in `KINDS`, its fields in `write` and `read`, its effect in `state.rs`. A
//! field that is added to a kind later gets a new format version of that kind. Nothing in the
//! agreement itself changes.
//!
//! The bytes of an entry: format (u8, 1), proposer (member u64, boot u64, counter u64), tag (u16),
//! length of the body (u32), body (format u8, then the fields). All numbers are big-endian.

use std::fmt;

use crate::member::{ConnectionString, MemberId, MemberState, NewMember, Version};
use crate::versioned::{CUT_LIMIT, read_name, write_name};
use braid_codec::{Malformed, Reader, Writer};
use braid_versions::{Bytes, Cut, TableName, TableNumber};

/// The longest key of a lock, name of a sequence or name of a lease, in bytes.
pub const KEY_LIMIT: usize = 512;
/// The longest value of an option, in bytes.
pub const VALUE_LIMIT: usize = 16 * 1024;
/// The longest entry, in bytes.
pub const ENTRY_LIMIT: usize = 64 * 1024;
/// The longest lease, in microseconds: an hour.
pub const LEASE_LIMIT: u64 = 3_600_000_000;

const ENTRY_FORMAT: u8 = 1;
const BODY_FORMAT: u8 = 1;

/// A proposal: its member, that member's boot, and a number within the boot. Repeats of a proposal
/// take effect once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProposalId {
    /// The member that proposed.
    pub member: MemberId,
    /// The counter of its boot.
    pub boot: u64,
    /// The proposal's number within the boot, from 1.
    pub counter: u64,
}

/// The place of a grant in the log. A later grant has a greater token: whoever is asked to act on a
/// grant compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    /// The term of the entry.
    pub term: u64,
    /// The index of the entry.
    pub index: u64,
}

impl Token {
    pub(crate) fn write(self, writer: &mut Writer) {
        writer.u64(self.term).u64(self.index);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            term: reader.u64()?,
            index: reader.u64()?,
        })
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.term, self.index)
    }
}

/// An entry's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Adds a member, without a vote. Answered by [`crate::Value::Member`].
    AddMember(NewMember),
    /// Gives a joining member its vote. Waits at the leader until the member has the log.
    Activate {
        /// The joining member.
        member: MemberId,
    },
    /// Changes a member's state between active, in maintenance and leaving.
    SetState {
        /// The member.
        member: MemberId,
        /// The new state.
        state: MemberState,
    },
    /// Makes a member refuse or take writes of users.
    SetReadOnly {
        /// The member.
        member: MemberId,
        /// Whether it refuses them.
        read_only: bool,
    },
    /// Changes a member's connection string.
    SetConnection {
        /// The member.
        member: MemberId,
        /// The new connection string.
        connection: ConnectionString,
    },
    /// Says that a member runs other versions than before.
    SetVersion {
        /// The member.
        member: MemberId,
        /// Its version of Braid.
        braid: Version,
        /// Its major version of PostgreSQL.
        postgres: u16,
    },
    /// Removes a member for good, with its locks and leases.
    RemoveMember {
        /// The member.
        member: MemberId,
    },
    /// Takes a lock. Answered by [`crate::Value::Lock`].
    TakeLock {
        /// The locked thing, for example a table.
        key: Vec<u8>,
        /// The member that holds it, until it releases it or is removed.
        holder: MemberId,
    },
    /// Releases a lock.
    ReleaseLock {
        /// The locked thing.
        key: Vec<u8>,
        /// The token that taking it gave.
        token: Token,
    },
    /// Assigns the next block of a sequence. Answered by [`crate::Value::Block`].
    AssignBlock {
        /// The sequence.
        sequence: Vec<u8>,
        /// The member that gets the block.
        holder: MemberId,
        /// How many numbers, from 1.
        size: u64,
        /// The smallest number that the block may start with.
        at_least: u64,
    },
    /// Sets an option of the group; without a value, resets it.
    SetOption {
        /// The option.
        name: String,
        /// Its value.
        value: Option<String>,
    },
    /// Grants a lease in place of the grant that the proposer knows. Answered by
    /// [`crate::Value::Lease`].
    GrantLease {
        /// The right to act alone, by name.
        name: Vec<u8>,
        /// The member that may do it.
        holder: MemberId,
        /// How long the lease runs after each renewal, in microseconds of the holder's monotonic
        /// clock.
        duration: u64,
        /// The grant that this one replaces; none if the lease was never granted, or is released.
        instead_of: Option<Token>,
    },
    /// Renews a lease.
    RenewLease {
        /// The lease.
        name: Vec<u8>,
        /// The grant.
        token: Token,
        /// Whether the holder has waited out the leases before its own.
        acting: bool,
    },
    /// Gives a lease back; the holder has stopped before it proposes this.
    ReleaseLease {
        /// The lease.
        name: Vec<u8>,
        /// The grant.
        token: Token,
    },
    /// Changes where rows live.
    Route(braid_routing::Entry),
    /// Says what the balancer of routing has decided, for all members to show and to carry out.
    Decide(braid_routing::Decided),
    /// Has a table be written in the order of versions, on all nodes.
    VersionTable {
        /// The table, with its schema.
        table: TableName,
    },
    /// Ends that.
    UnversionTable {
        /// The table's number.
        table: TableNumber,
    },
    /// Decides which versioned writes count, and has the proposer's versions process begin as
    /// sequencer.
    CutVersions {
        /// The decision, over everyone.
        cut: Cut,
        /// The start of the proposer's versions process.
        boot: u64,
    },
    /// Says that a member has all that the others wrote to a table before it begins, or ends, to be
    /// versioned, and that it writes no more in that way.
    DrainTable {
        /// The table's number.
        table: TableNumber,
        /// The member.
        member: MemberId,
        /// Whether the table's versions end.
        ends: bool,
    },
}

/// Tag, first version and name of every kind. Tags are never changed and never used again.
const KINDS: [(u16, Version, &str); 20] = [
    (2, Version::new(0, 0, 0), "add member"),
    (3, Version::new(0, 0, 0), "activate member"),
    (4, Version::new(0, 0, 0), "set state"),
    (5, Version::new(0, 0, 0), "set read only"),
    (6, Version::new(0, 0, 0), "set connection"),
    (7, Version::new(0, 0, 0), "set version"),
    (8, Version::new(0, 0, 0), "remove member"),
    (16, Version::new(0, 0, 0), "take lock"),
    (17, Version::new(0, 0, 0), "release lock"),
    (24, Version::new(0, 0, 0), "assign block"),
    (32, Version::new(0, 0, 0), "set option"),
    (40, Version::new(0, 0, 0), "grant lease"),
    (41, Version::new(0, 0, 0), "renew lease"),
    (42, Version::new(0, 0, 0), "release lease"),
    (48, Version::new(0, 0, 0), "routing"),
    (49, Version::new(0, 0, 0), "balancer"),
    (56, Version::new(0, 0, 0), "version table"),
    (57, Version::new(0, 0, 0), "unversion table"),
    (58, Version::new(0, 0, 0), "cut versions"),
    (59, Version::new(0, 0, 0), "drain table"),
];

impl Command {
    /// The kind's tag in the log.
    #[must_use]
    pub const fn tag(&self) -> u16 {
        match self {
            Self::AddMember(_) => 2,
            Self::Activate { .. } => 3,
            Self::SetState { .. } => 4,
            Self::SetReadOnly { .. } => 5,
            Self::SetConnection { .. } => 6,
            Self::SetVersion { .. } => 7,
            Self::RemoveMember { .. } => 8,
            Self::TakeLock { .. } => 16,
            Self::ReleaseLock { .. } => 17,
            Self::AssignBlock { .. } => 24,
            Self::SetOption { .. } => 32,
            Self::GrantLease { .. } => 40,
            Self::RenewLease { .. } => 41,
            Self::ReleaseLease { .. } => 42,
            Self::Route(_) => 48,
            Self::Decide(_) => 49,
            Self::VersionTable { .. } => 56,
            Self::UnversionTable { .. } => 57,
            Self::CutVersions { .. } => 58,
            Self::DrainTable { .. } => 59,
        }
    }

    /// The first version of Braid that knows the kind.
    #[must_use]
    pub fn since(&self) -> Version {
        self.kind().0
    }

    /// The kind's name, for messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.kind().1
    }

    fn kind(&self) -> (Version, &'static str) {
        let tag = self.tag();
        KINDS
            .iter()
            .find(|kind| kind.0 == tag)
            .map_or((Version::new(0, 0, 0), "unknown"), |kind| (kind.1, kind.2))
    }

    /// Whether the kind can change who receives the log or has a vote.
    #[must_use]
    pub const fn reconfigures(&self) -> bool {
        matches!(
            self,
            Self::AddMember(_) | Self::Activate { .. } | Self::RemoveMember { .. }
        )
    }

    fn write(&self, w: &mut Writer) {
        w.u8(BODY_FORMAT);
        match self {
            Self::AddMember(member) => member.write(w),
            Self::Activate { member } | Self::RemoveMember { member } => {
                w.u64(member.get());
            }
            Self::SetState { member, state } => {
                w.u64(member.get()).u8(state.tag());
            }
            Self::SetReadOnly { member, read_only } => {
                w.u64(member.get()).bool(*read_only);
            }
            Self::SetConnection { member, connection } => {
                w.u64(member.get()).text(connection.expose());
            }
            Self::SetVersion {
                member,
                braid,
                postgres,
            } => {
                w.u64(member.get());
                braid.write(w);
                w.u16(*postgres);
            }
            Self::TakeLock { key, holder } => {
                w.bytes(key).u64(holder.get());
            }
            Self::ReleaseLock { key: name, token } | Self::ReleaseLease { name, token } => {
                w.bytes(name);
                token.write(w);
            }
            Self::AssignBlock {
                sequence,
                holder,
                size,
                at_least,
            } => {
                w.bytes(sequence)
                    .u64(holder.get())
                    .u64(*size)
                    .u64(*at_least);
            }
            Self::SetOption { name, value } => {
                w.text(name).bool(value.is_some());
                if let Some(value) = value {
                    w.text(value);
                }
            }
            Self::GrantLease {
                name,
                holder,
                duration,
                instead_of,
            } => {
                w.bytes(name).u64(holder.get()).u64(*duration);
                w.bool(instead_of.is_some());
                if let Some(token) = instead_of {
                    token.write(w);
                }
            }
            Self::RenewLease {
                name,
                token,
                acting,
            } => {
                w.bytes(name);
                token.write(w);
                w.bool(*acting);
            }
            // An entry above its limits has no bytes, and is refused by its proposer.
            Self::Route(entry) => {
                w.bytes(&entry.encode().unwrap_or_default());
            }
            Self::Decide(decided) => {
                w.bytes(&decided.encode().unwrap_or_default());
            }
            Self::VersionTable { table } => write_name(table, w),
            Self::UnversionTable { table } => {
                w.u32(table.0);
            }
            Self::CutVersions { cut, boot } => {
                w.bytes(&cut.encode()).u64(*boot);
            }
            Self::DrainTable {
                table,
                member,
                ends,
            } => {
                w.u32(table.0).u64(member.get()).bool(*ends);
            }
        }
    }

    fn read(tag: u16, body: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(body, "entry", BODY_FORMAT)?;
        let command = match tag {
            2 => Self::AddMember(NewMember::read(&mut r)?),
            3 => Self::Activate {
                member: MemberId::read(&mut r)?,
            },
            4 => Self::SetState {
                member: MemberId::read(&mut r)?,
                state: MemberState::read(&mut r)?,
            },
            5 => Self::SetReadOnly {
                member: MemberId::read(&mut r)?,
                read_only: r.bool()?,
            },
            6 => Self::SetConnection {
                member: MemberId::read(&mut r)?,
                connection: ConnectionString::read(&mut r)?,
            },
            7 => Self::SetVersion {
                member: MemberId::read(&mut r)?,
                braid: Version::read(&mut r)?,
                postgres: r.u16()?,
            },
            8 => Self::RemoveMember {
                member: MemberId::read(&mut r)?,
            },
            16 => Self::TakeLock {
                key: key(&mut r)?,
                holder: MemberId::read(&mut r)?,
            },
            17 => Self::ReleaseLock {
                key: key(&mut r)?,
                token: Token::read(&mut r)?,
            },
            24 => Self::AssignBlock {
                sequence: key(&mut r)?,
                holder: MemberId::read(&mut r)?,
                size: r.u64()?,
                at_least: r.u64()?,
            },
            32 => Self::SetOption {
                name: r.text(KEY_LIMIT)?,
                value: if r.bool()? {
                    Some(r.text(VALUE_LIMIT)?)
                } else {
                    None
                },
            },
            40 => Self::GrantLease {
                name: key(&mut r)?,
                holder: MemberId::read(&mut r)?,
                duration: r.u64()?,
                instead_of: if r.bool()? {
                    Some(Token::read(&mut r)?)
                } else {
                    None
                },
            },
            41 => Self::RenewLease {
                name: key(&mut r)?,
                token: Token::read(&mut r)?,
                acting: r.bool()?,
            },
            42 => Self::ReleaseLease {
                name: key(&mut r)?,
                token: Token::read(&mut r)?,
            },
            48 => Self::Route(braid_routing::Entry::decode(
                r.bytes(braid_routing::ENTRY_LIMIT)?,
            )?),
            49 => Self::Decide(braid_routing::Decided::decode(
                r.bytes(braid_routing::DECISION_LIMIT)?,
            )?),
            56 => Self::VersionTable {
                table: read_name(&mut r)?,
            },
            57 => Self::UnversionTable {
                table: TableNumber(r.u32()?),
            },
            58 => Self::CutVersions {
                cut: Cut::decode(r.bytes(CUT_LIMIT)?)?,
                boot: r.u64()?,
            },
            59 => Self::DrainTable {
                table: TableNumber(r.u32()?),
                member: MemberId::read(&mut r)?,
                ends: r.bool()?,
            },
            other => return Err(r.unknown(other)),
        };
        r.end()?;
        Ok(command)
    }
}

pub(crate) fn key(r: &mut Reader<'_>) -> Result<Vec<u8>, Malformed> {
    let key = r.bytes(KEY_LIMIT)?;
    if key.is_empty() {
        return Err(Malformed::Invalid("key"));
    }
    Ok(key.to_vec())
}

/// A command with its proposal: an entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// The proposer, and which of its proposals this is.
    pub id: ProposalId,
    /// The command.
    pub command: Command,
}

impl Proposal {
    /// The entry's bytes.
    ///
    /// # Errors
    /// If a value is longer than its limit, so that no member could read it.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        let mut body = Writer::new();
        self.command.write(&mut body);
        let mut w = Writer::new();
        w.u8(ENTRY_FORMAT)
            .u64(self.id.member.get())
            .u64(self.id.boot)
            .u64(self.id.counter)
            .u16(self.command.tag())
            .bytes(&body.done());
        let bytes = w.done();
        // A proposer that breaks a limit learns it here, not each member when it reads the log.
        if Self::decode(&bytes)? == *self {
            Ok(bytes)
        } else {
            Err(Malformed::Invalid("entry"))
        }
    }

    /// The entry of these bytes.
    ///
    /// # Errors
    /// [`Malformed::UnknownTag`] and [`Malformed::UnknownVersion`] if a newer Braid wrote it;
    /// others for bad bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > ENTRY_LIMIT {
            return Err(Malformed::TooLong {
                what: "entry",
                limit: ENTRY_LIMIT,
            });
        }
        let mut r = Reader::versioned(bytes, "entry", ENTRY_FORMAT)?;
        let id = ProposalId {
            member: MemberId::read(&mut r)?,
            boot: r.u64()?,
            counter: r.u64()?,
        };
        let tag = r.u16()?;
        let command = Command::read(tag, r.bytes(ENTRY_LIMIT)?)?;
        r.end()?;
        Ok(Self { id, command })
    }
}
