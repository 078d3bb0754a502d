//! Errors of one member's agreement. What the group refuses is a [`crate::Refusal`].

use thiserror::Error;

use crate::boot::Distrust;
use crate::member::MemberId;
use crate::outcome::Refusal;
use braid_codec::Malformed;

/// Why a member takes no part any more.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Stopped {
    /// The member is not believed. Durable.
    #[error("this node takes no part in the group: {0}")]
    Refused(Distrust),
    /// The member was removed, as agreed.
    #[error("this node was removed from the group")]
    Removed,
    /// The agreement failed and is to be started anew from what is stored.
    #[error("the group's agreement failed: {0}")]
    Failed(String),
}

/// An error of an agreement.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// Bytes are not what they should be.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The message is for another group or member.
    #[error("the message is for another member or group")]
    NotOurs,
    /// The sender is not believed. It is told so.
    #[error("node \"{name}\" is not believed: {why}")]
    Distrusted {
        /// The sender.
        member: MemberId,
        /// Its name.
        name: String,
        /// Why.
        why: Distrust,
    },
    /// The group would refuse the proposal.
    #[error(transparent)]
    Refused(Refusal),
    /// Too many proposals of this member wait for an answer.
    #[error("too many proposals of this node wait for an answer")]
    TooManyProposals,
    /// Work is not written yet, or other work is.
    #[error("the last work of the agreement is not written yet")]
    Outstanding,
    /// The member takes no part any more.
    #[error(transparent)]
    Stopped(Stopped),
    /// Stored rows do not fit together.
    #[error("what is stored of the group is damaged: {0}")]
    Damaged(&'static str),
    /// An entry of the log can't be read: it is never skipped, so the agreement ends.
    #[error("entry {index} of the group's log cannot be read: {source}")]
    UnknownEntry {
        /// The entry's index.
        index: u64,
        /// Why.
        source: Malformed,
    },
    /// The agreement failed and is to be started anew.
    #[error("the group's agreement failed: {0}")]
    Failed(String),
}

impl Error {
    /// Whether the agreement has ended with this error. Otherwise it goes on as if the call had not
    /// been.
    #[must_use]
    pub const fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Stopped(_) | Self::Damaged(_) | Self::UnknownEntry { .. } | Self::Failed(_)
        )
    }

    /// The hint for the user, where there is one: a sentence.
    #[must_use]
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Distrusted { why, .. } | Self::Stopped(Stopped::Refused(why)) => Some(why.hint()),
            Self::Refused(refusal) => Some(refusal.hint()),
            Self::Stopped(Stopped::Removed) => Some(Distrust::Removed.hint()),
            Self::TooManyProposals => Some("Wait for the answers to earlier requests."),
            Self::UnknownEntry { source, .. } => source.hint(),
            _ => None,
        }
    }
}
