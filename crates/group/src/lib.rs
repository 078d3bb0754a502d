//! The agreement of a group: one replicated log, agreed by a majority of its members, and what it
//! says.
//!
//! Members, node numbers, locks, blocks of sequences, options and leases are entries of the log
//! ([`Command`]); all members apply the same entries in the same order to the same [`State`]. The
//! algorithm is Raft in the `raft` crate (TiKV's); this crate stores and sends for it in bytes of
//! its own, keeps bad messages from it, and knows who is to be believed. Data never waits for any
//! of it.
//!
//! Everything here is pure: no clock, no randomness, no threads, no input and output. A background
//! worker drives one [`Agreement`] for its database:
//!
//! ```text
//! Stored::create(..) or Stored::join(..)            what a new member stores first
//! Agreement::start(&stored, settings, continuity, random, now)
//! loop:
//!   agreement.receive(bytes, now)   agreement.tick(now)   agreement.propose(command, now) -> ProposalId
//!   while let Some(work) = agreement.work()? {
//!       write `work` in one transaction (flushed, if work.flush)
//!       let effects = agreement.persisted(work.number)?;
//!       send effects.send; show effects.applied; answer effects.answered
//!   }
//! agreement.state()   .diagnosis(now)   .may_act(lease, now) -> Option<Token>   .stopped()
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `member` | members: numbers, names, roles, states |
//! | `command` | the kinds of entries, and how to add one |
//! | `outcome` | what an entry came to: values, refusals |
//! | `state` | what all entries have made of the group |
//! | `stored` | what a member stores and is told to write |
//! | `agreement` | one member: the algorithm, proposals, membership |
//! | `versioned` | the tables that are written in the order of versions |
//! | `boot` | starts of a member; which restored ones are found out, and which not |
//! | `lease` | who may act alone, by monotonic clocks |
//! | `diagnosis` | what users are told of the members |
//! | `wording` | what users are told of entries |
//! | `message`, `envelope`, `mirror` | bytes, checks, the log in memory |
#![forbid(unsafe_code)]

mod agreement;
mod boot;
#[cfg(test)]
mod cluster;
mod command;
mod diagnosis;
mod envelope;
mod error;
mod lease;
mod member;
mod message;
mod mirror;
#[cfg(test)]
mod model;
mod mutation;
mod outcome;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod simulation;
mod state;
mod stored;
mod versioned;
pub mod wording;

pub use agreement::{Agreement, Applied, Effects, PROPOSALS_LIMIT, Settings};
pub use boot::{Boot, Continuity, Distrust, Start};
pub use braid_codec::Malformed;
pub use braid_versions::{TableName, TableNumber};
pub use command::{
    Command, ENTRY_LIMIT, KEY_LIMIT, LEASE_LIMIT, Proposal, ProposalId, Token, VALUE_LIMIT,
};
pub use diagnosis::{Diagnosis, Sight};
pub use error::{Error, Stopped};
pub use lease::{DRIFT_PPM, Monotonic};
pub use member::{
    CONNECTION_LIMIT, ConnectionString, GroupId, Identity, Member, MemberId, MemberState,
    NAME_LIMIT, NewMember, NodeNumber, Role, Version,
};
pub use outcome::{Outcome, Refusal, Value};
pub use state::{Lease, Lock, State, TABLE_LIMIT};
pub use stored::{Record, Stored, Work};
pub use versioned::{Phase, Sequencing};
