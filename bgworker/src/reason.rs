//! Why an error is handled differently from other errors of its SQLSTATE.
//!
//! No decision depends on the text of a message. An error of Braid's own is made with its reason.
//! An error of another server gets one when it arrives ([`Reason::of_provider`]).

use crate::sqlstate::SqlState;

/// Reason of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// A prepared transaction is to be sent once it has committed: the leader restarts and requests
    /// it. Nothing has failed.
    SendOnceCommitted = 1,
    /// A transaction that was applied while it ran was given up: the leader restarts and requests
    /// it. Nothing has failed.
    RunningGivenUp,
    /// A transaction does not fit into temporary files: the leader restarts and requests large
    /// transactions once they have committed.
    SpoolFull,
    /// The provider does not have the table any more.
    TableDropped,
    /// The provider has no such replication slot.
    SlotMissing,
    /// The provider has no such publication.
    PublicationMissing,
    /// The provider has removed WAL that its walsender was reading. This can happen without a
    /// fault: confirming received changes advances the slot to a position that an earlier walsender
    /// had noted, and a checkpoint may then remove WAL that the next walsender has not passed yet
    /// (`LogicalConfirmReceivedLocation` of src/backend/replication/logical/logical.c, 15 to 18).
    /// The walsender after that one does not need this WAL.
    WalRemoved,
    /// The provider has invalidated the slot, as WAL that it needs was removed.
    SlotInvalidated,
    /// The provider lacks a function of Braid.
    BraidMissing,
    /// The provider has run out of files, disk space or memory, and reported that as XX000.
    ResourcesExhausted,
}

impl Reason {
    /// All reasons.
    pub const ALL: &[Self] = &[
        Self::SendOnceCommitted,
        Self::RunningGivenUp,
        Self::SpoolFull,
        Self::TableDropped,
        Self::SlotMissing,
        Self::PublicationMissing,
        Self::WalRemoved,
        Self::SlotInvalidated,
        Self::BraidMissing,
        Self::ResourcesExhausted,
    ];

    /// Returns the number that stands for a reason in shared memory; 0 stands for none.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the reason that a number stands for.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.code() == code)
    }

    /// Returns the reason of an error that another server has reported. PostgreSQL raises these
    /// errors with SQLSTATEs that others share, so this is the one place that reads its message.
    #[must_use]
    pub fn of_provider(sqlstate: SqlState, message: &str) -> Option<Self> {
        let says = |words: &str| message.contains(words);
        match sqlstate {
            SqlState::UndefinedObject if says("replication slot") => Some(Self::SlotMissing),
            SqlState::UndefinedObject if says("publication") => Some(Self::PublicationMissing),
            // InternalError if the file was already read, as there is no errno then
            // (`CheckXLogRemoved` of src/backend/access/transam/xlog.c).
            SqlState::UndefinedFile | SqlState::InternalError
                if says("WAL segment") && says("removed") =>
            {
                Some(Self::WalRemoved)
            }
            SqlState::ObjectNotInPrerequisiteState if says("removed") || says("can no longer") => {
                Some(Self::SlotInvalidated)
            }
            SqlState::UndefinedFunction if says("braid") => Some(Self::BraidMissing),
            SqlState::InternalError if sqlstate.refined(message) != sqlstate => {
                Some(Self::ResourcesExhausted)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_and_its_number_lead_to_each_other() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_code(reason.code()), Some(*reason));
        }
        assert_eq!(Reason::from_code(0), None);
        let last = Reason::ALL.last().map_or(0, |reason| reason.code());
        assert_eq!(usize::from(last), Reason::ALL.len());
        assert_eq!(Reason::from_code(last + 1), None);
    }

    #[test]
    fn errors_of_a_provider_have_reasons() {
        let removed = "requested WAL segment 000000010000000000000005 has already been removed";
        let table = [
            (
                *b"42704",
                "replication slot \"s\" does not exist",
                Some(Reason::SlotMissing),
            ),
            (
                *b"42704",
                "replication slot \"publication\" does not exist",
                Some(Reason::SlotMissing),
            ),
            (
                *b"42704",
                "publication \"shop\" does not exist",
                Some(Reason::PublicationMissing),
            ),
            (*b"42704", "type \"mood\" does not exist", None),
            (*b"58P01", removed, Some(Reason::WalRemoved)),
            (*b"XX000", removed, Some(Reason::WalRemoved)),
            (
                *b"58P01",
                "could not access file \"braid\": No such file or directory",
                None,
            ),
            (*b"55000", removed, Some(Reason::SlotInvalidated)),
            (
                *b"55000",
                "can no longer get changes from replication slot \"s\"",
                Some(Reason::SlotInvalidated),
            ),
            (
                *b"55000",
                "logical decoding requires wal_level >= logical",
                None,
            ),
            (
                *b"42883",
                "function braid.group_log() does not exist",
                Some(Reason::BraidMissing),
            ),
            (*b"42883", "function f() does not exist", None),
            (
                *b"XX000",
                "could not create file: No space left on device",
                Some(Reason::ResourcesExhausted),
            ),
            (*b"XX000", "cache lookup failed for relation 1", None),
            (*b"P0001", removed, None),
        ];
        for (code, message, reason) in table {
            let found = Reason::of_provider(SqlState::from_code(code), message);
            assert_eq!(found, reason, "{message}");
        }
    }
}
