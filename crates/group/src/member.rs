//! A member of a group: its numbers, name, role and state.
//!
//! Invariants: a [`MemberId`] is never used twice. A [`NodeNumber`] and the name of a member are
//! unique; the number is not used again while the group lives. Not for: how far a member is, which
//! [`crate::Diagnosis`] shows.

use std::fmt;

use braid_codec::{Malformed, Reader, Writer};

/// The longest name, in bytes: PostgreSQL's for identifiers.
pub const NAME_LIMIT: usize = 63;
/// The longest connection string, in bytes.
pub const CONNECTION_LIMIT: usize = 8192;

/// A member's number in the consensus algorithm: from 1, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(u64);

impl MemberId {
    /// The member that creates the group.
    pub const FIRST: Self = Self(1);

    /// The member with this number; none for 0 and for numbers that no group reaches.
    #[must_use]
    pub const fn new(id: u64) -> Option<Self> {
        if id == 0 || id > 1 << 32 {
            None
        } else {
            Some(Self(id))
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::new(reader.u64()?).ok_or(Malformed::Invalid("member number"))
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A node's number in keys that carry it (snowflake): 1 to 1023.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeNumber(u16);

impl NodeNumber {
    /// The largest number.
    pub const LAST: u16 = 1023;

    /// The number, if it is in the range.
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if number == 0 || number > Self::LAST {
            None
        } else {
            Some(Self(number))
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// A group's identity: 16 random bytes, drawn when the group is created.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub [u8; 16]);

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A version of Braid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The first part.
    pub major: u16,
    /// The second part.
    pub minor: u16,
    /// The third part.
    pub patch: u16,
}

impl Version {
    /// The version with these parts.
    #[must_use]
    pub const fn new(major: u16, minor: u16, patch: u16) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    pub(crate) fn write(self, writer: &mut Writer) {
        writer.u16(self.major).u16(self.minor).u16(self.patch);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self::new(reader.u16()?, reader.u16()?, reader.u16()?))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// A node's connection string. May hold a password, so `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionString(String);

impl ConnectionString {
    /// The connection string, if it is not too long and has no zero byte.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Option<Self> {
        let text = text.into();
        (text.len() <= CONNECTION_LIMIT && !text.contains('\0')).then_some(Self(text))
    }

    /// The text for libpq.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self(reader.text(CONNECTION_LIMIT)?))
    }
}

impl fmt::Debug for ConnectionString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConnectionString(..)")
    }
}

/// A member's share in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Has the data and a vote.
    Data,
    /// Has a vote and no data.
    Witness,
}

/// A member's state, as agreed. Durable in the log of each member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberState {
    /// Set by [`crate::Command::AddMember`]. Receives the log and has no vote yet.
    Joining,
    /// Set by [`crate::Command::Activate`]. Has a vote.
    Active,
    /// Set by [`crate::Command::SetState`]: no traffic, keeps its place and its vote.
    Maintenance,
    /// Set by [`crate::Command::SetState`]: hands over; has a vote until it is removed.
    Leaving,
    /// Set by [`crate::Command::RemoveMember`]. Final.
    Removed,
}

impl MemberState {
    /// The word that users see.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Active => "active",
            Self::Maintenance => "in maintenance",
            Self::Leaving => "leaving",
            Self::Removed => "removed",
        }
    }

    /// Whether a member in this state counts for a majority.
    #[must_use]
    pub const fn votes(self) -> bool {
        matches!(self, Self::Active | Self::Maintenance | Self::Leaving)
    }

    pub(crate) const fn tag(self) -> u8 {
        match self {
            Self::Joining => 1,
            Self::Active => 2,
            Self::Maintenance => 3,
            Self::Leaving => 4,
            Self::Removed => 5,
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match reader.u8()? {
            1 => Self::Joining,
            2 => Self::Active,
            3 => Self::Maintenance,
            4 => Self::Leaving,
            5 => Self::Removed,
            other => return Err(reader.unknown(other)),
        })
    }
}

/// Whose data directory a member is: two members with one identity are a node and its copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The system identifier of the data directory (`pg_control_system()`).
    pub system: u64,
    /// The node's own 16 random bytes, drawn by `create_node`.
    pub node: [u8; 16],
}

/// A new member as it asks to join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMember {
    /// The node's name.
    pub name: String,
    /// The member's share.
    pub role: Role,
    /// The member's data directory and node.
    pub identity: Identity,
    /// The member's version of Braid.
    pub braid: Version,
    /// The member's major version of PostgreSQL.
    pub postgres: u16,
    /// The node's connection string, for all other members.
    pub connection: ConnectionString,
}

impl NewMember {
    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.text(&self.name);
        writer.u8(match self.role {
            Role::Data => 1,
            Role::Witness => 2,
        });
        writer.u64(self.identity.system).raw(&self.identity.node);
        self.braid.write(writer);
        writer.u16(self.postgres).text(self.connection.expose());
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let name = reader.text(NAME_LIMIT)?;
        if name.is_empty() {
            return Err(Malformed::Invalid("node name"));
        }
        Ok(Self {
            name,
            role: match reader.u8()? {
                1 => Role::Data,
                2 => Role::Witness,
                other => return Err(reader.unknown(other)),
            },
            identity: Identity {
                system: reader.u64()?,
                node: reader.array()?,
            },
            braid: Version::read(reader)?,
            postgres: reader.u16()?,
            connection: ConnectionString::read(reader)?,
        })
    }
}

/// A member, as agreed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The member's number in the log.
    pub id: MemberId,
    /// The node's number in keys.
    pub number: NodeNumber,
    /// Its own words about itself, with the changes since.
    pub about: NewMember,
    /// Its state.
    pub state: MemberState,
    /// Whether it takes no writes of users.
    pub read_only: bool,
    /// The index of the entry that added it.
    pub since: u64,
}

impl Member {
    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.u64(self.id.get()).u16(self.number.get());
        self.about.write(writer);
        writer
            .u8(self.state.tag())
            .bool(self.read_only)
            .u64(self.since);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            id: MemberId::read(reader)?,
            number: NodeNumber::new(reader.u16()?).ok_or(Malformed::Invalid("node number"))?,
            about: NewMember::read(reader)?,
            state: MemberState::read(reader)?,
            read_only: reader.bool()?,
            since: reader.u64()?,
        })
    }
}
