//! Starts of a member, and how a member is known that forgot what it had promised.
//!
//! Consensus is safe only if a member remembers its votes and the entries that it acknowledged. A
//! data directory that was restored from a backup, or copied, forgets. Three things tell:
//!
//! 1. **Continuity**, from the file system, at the member's own start (the server side finds it).
//!    [`Continuity::Broken`]: the files are not the ones of before. The member takes no part at
//!    all.
//! 2. **Boots.** Each start draws a [`Boot`] (a counter, and 8 random bytes) and writes it before
//!    it speaks. Every message carries it. A member keeps, durably, the newest boot of each other
//!    one. A boot that is older, or has the counter of a known one with other random bytes, is
//!    refused.
//! 3. **Promises.** A member keeps, of each other one, the newest term that it spoke in and the
//!    newest index that it acknowledged in that term. Every message carries what the sender had
//!    stored when it started ([`Start`]). A start below what the receiver knows is refused.
//!
//! A refused member is told so with the reason. It notes that durably and takes no part any more:
//! it is removed and joins anew as a new member.
//!
//! Detected: any copy through the file system (1); a backup that was followed by another start of
//! the member (2); a backup that lacks a vote or an entry that the member had acknowledged to the
//! one it speaks with (3).
//!
//! Not detected with [`Continuity::Proven`]: a block-level snapshot of the running member's disk
//! that is put back while every member that heard later promises is away; and two block-level
//! copies that start at once and reach different members. [`Continuity::Unproven`] closes both: the
//! member votes and acknowledges only after every other voter has written its new boot down and
//! found its start in order. From then on nothing of an older boot is accepted by anybody, and each
//! promise of an older boot was either received, and then compared, or never will be. The price: it
//! waits for all voters. It knows them from its own log and from those that welcome it. Nobody can
//! tell of a group's only voter. So `Unproven` is for starts where the disk may have been put back
//! (another machine, another boot of a virtual machine), `Proven` for those of the running machine.

use std::fmt;

use braid_codec::{Malformed, Reader, Writer};

/// One start of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Boot {
    /// Counts the member's starts, from 1.
    pub counter: u64,
    /// Drawn at the start.
    pub random: u64,
}

impl Boot {
    pub(crate) fn write(self, w: &mut Writer) {
        w.u64(self.counter).u64(self.random);
    }

    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            counter: r.u64()?,
            random: r.u64()?,
        })
    }
}

/// Whether a member's files are those that it wrote, as its server found out at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continuity {
    /// The files are the ones that this member wrote last.
    Proven,
    /// Perhaps they are; all other voters are asked before the member votes or acknowledges
    /// anything.
    Unproven,
    /// The files are a copy or were restored: the member takes no part.
    Broken,
}

/// Term and end of the log that a member had stored when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Start {
    /// Its term.
    pub term: u64,
    /// The index of its last entry.
    pub index: u64,
}

/// Memory of another member's starts and promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Known {
    pub(crate) boot: Boot,
    /// The newest term that it spoke in.
    pub(crate) term: u64,
    /// The newest index that it acknowledged in that term.
    pub(crate) index: u64,
}

impl Known {
    pub(crate) fn encode(self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(1);
        self.boot.write(&mut w);
        w.u64(self.term).u64(self.index);
        w.done()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(bytes, "what is known of a member", 1)?;
        let known = Self {
            boot: Boot::read(&mut r)?,
            term: r.u64()?,
            index: r.u64()?,
        };
        r.end()?;
        Ok(known)
    }

    /// Compares a message's boot and start with what is known.
    pub(crate) fn judge(&self, boot: Boot, start: Start) -> Result<Meeting, Distrust> {
        if boot == self.boot {
            return Ok(Meeting::Again);
        }
        if boot.counter < self.boot.counter {
            return Err(Distrust::OlderBoot {
                known: self.boot.counter,
                has: boot.counter,
            });
        }
        if boot.counter == self.boot.counter {
            return Err(Distrust::TwoOfOne);
        }
        self.judge_start(start)?;
        Ok(Meeting::New)
    }

    fn judge_start(&self, start: Start) -> Result<(), Distrust> {
        if start.term < self.term {
            return Err(Distrust::LostTerm {
                known: self.term,
                has: start.term,
            });
        }
        // In a later term, entries of the earlier one may have been replaced.
        if start.term == self.term && start.index < self.index {
            return Err(Distrust::LostEntries {
                known: self.index,
                has: start.index,
            });
        }
        Ok(())
    }

    /// Notes a message of this term; with `index`, one that promises the entries up to it. Says
    /// whether anything is new.
    pub(crate) fn note(&mut self, term: u64, index: Option<u64>) -> bool {
        let before = *self;
        if term > self.term {
            self.term = term;
            self.index = 0;
        }
        if term == self.term {
            self.index = self.index.max(index.unwrap_or(0));
        }
        *self != before
    }
}

/// A boot that is in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// The one that is known.
    Again,
    /// A newer one.
    New,
}

/// Why a member is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distrust {
    /// Its own server found that its files were copied or restored.
    Broken,
    /// A later start of it is known.
    OlderBoot {
        /// The counter of the newest start that is known.
        known: u64,
        /// The counter that it has.
        has: u64,
    },
    /// Another start with this counter is known: two run, or one was restored.
    TwoOfOne,
    /// The member has spoken in a later term than it has stored.
    LostTerm {
        /// The term that is known.
        known: u64,
        /// The term that it had stored.
        has: u64,
    },
    /// The member has acknowledged entries that it has not stored.
    LostEntries {
        /// The index that is known.
        known: u64,
        /// The index that it had stored.
        has: u64,
    },
    /// The member was removed from the group.
    Removed,
}

impl Distrust {
    /// The hint for the user: a sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Removed => {
                "The node can join anew, as a new member. Its last transactions may have reached no other node: before its tables \
                 are emptied, find their rows with braid.compare, or in braid.conflict_history."
            }
            _ => "Remove the node from the group on another node, then let it join anew.",
        }
    }

    pub(crate) fn write(self, w: &mut Writer) {
        let (tag, known, has) = match self {
            Self::Broken => (1, 0, 0),
            Self::OlderBoot { known, has } => (2, known, has),
            Self::TwoOfOne => (3, 0, 0),
            Self::LostTerm { known, has } => (4, known, has),
            Self::LostEntries { known, has } => (5, known, has),
            Self::Removed => (6, 0, 0),
        };
        w.u8(tag).u64(known).u64(has);
    }

    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (tag, known, has) = (r.u8()?, r.u64()?, r.u64()?);
        Ok(match tag {
            1 => Self::Broken,
            2 => Self::OlderBoot { known, has },
            3 => Self::TwoOfOne,
            4 => Self::LostTerm { known, has },
            5 => Self::LostEntries { known, has },
            6 => Self::Removed,
            other => return Err(r.unknown(other)),
        })
    }
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broken => f.write_str("its data directory was copied or restored from a backup"),
            Self::OlderBoot { known, has } => write!(
                f,
                "it was restored from a backup: this is its start number {has}, number {known} is known"
            ),
            Self::TwoOfOne => {
                f.write_str("it was restored or copied: another start has its number")
            }
            Self::LostTerm { known, has } => write!(
                f,
                "it was restored from a backup: it has term {has} and had spoken in term {known}"
            ),
            Self::LostEntries { known, has } => write!(
                f,
                "it was restored from a backup: its log ends at {has} and it had acknowledged {known}"
            ),
            Self::Removed => f.write_str("it was removed from the group"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(counter: u64, random: u64) -> Boot {
        Boot { counter, random }
    }

    fn start(term: u64, index: u64) -> Start {
        Start { term, index }
    }

    /// Of a member at its third start, which has spoken in term 5 and acknowledged up to 20.
    fn known() -> Known {
        let mut known = Known {
            boot: boot(3, 7),
            ..Known::default()
        };
        assert!(known.note(4, Some(30)));
        assert!(known.note(5, Some(20)), "a later term begins anew");
        assert!(!known.note(5, Some(19)), "nothing new");
        assert!(!known.note(4, Some(99)), "an earlier term says nothing");
        known
    }

    #[test]
    fn a_start_is_believed_that_has_what_was_promised() {
        let same = known().judge(boot(3, 7), start(0, 0));
        assert_eq!(same, Ok(Meeting::Again));
        for start in [start(5, 20), start(5, 21), start(6, 1)] {
            assert_eq!(known().judge(boot(4, 1), start), Ok(Meeting::New));
        }
    }

    #[test]
    fn a_restored_or_copied_member_is_not() {
        let judged = |boot, start| known().judge(boot, start).unwrap_err();
        assert_eq!(
            judged(boot(2, 9), start(9, 99)),
            Distrust::OlderBoot { known: 3, has: 2 }
        );
        assert_eq!(judged(boot(3, 8), start(9, 99)), Distrust::TwoOfOne);
        assert_eq!(
            judged(boot(4, 1), start(4, 99)),
            Distrust::LostTerm { known: 5, has: 4 }
        );
        assert_eq!(
            judged(boot(4, 1), start(5, 19)),
            Distrust::LostEntries { known: 20, has: 19 }
        );
    }

    #[test]
    fn why_a_member_is_not_believed_is_read_as_it_was_written() {
        for why in [
            Distrust::Broken,
            Distrust::OlderBoot { known: 3, has: 2 },
            Distrust::TwoOfOne,
            Distrust::LostTerm { known: 5, has: 4 },
            Distrust::LostEntries { known: 20, has: 19 },
            Distrust::Removed,
        ] {
            let mut writer = Writer::new();
            why.write(&mut writer);
            let bytes = writer.done();
            assert_eq!(Distrust::read(&mut Reader::new(&bytes, "why")), Ok(why));
        }
    }
}
