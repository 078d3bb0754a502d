//! Messages between the versions processes of a group's nodes. Each message goes one way, and
//! may be lost, repeated or late.
//!
//! | message | from, to | answer |
//! |---|---|---|
//! | [`Content::Hello`] | a node, all; again and again | none |
//! | [`Content::Ask`] | a node, the sequencer | answer |
//! | [`Content::Answer`] | the sequencer, the node | none |
//! | [`Content::Announce`] | the sequencer, all; again and again | none |
//! | [`Content::Promise`] | the next sequencer, all; until all have answered | report |
//! | [`Content::Report`] | a node that has promised, the sender | none |
//!
//! Bytes: the format's version, the sender's number and start, a tag (1), the content.

use braid_codec::{Malformed, Reader, Writer};

use crate::bytes::{Announcement, Bytes, node, number, read_vector, write_vector};
use crate::grant::{Answer, Batch, TABLES_LIMIT};
use crate::number::{Boot, NodeNumber, Term};
use crate::vector::{Report, Vector};

/// A message with its sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The sender.
    pub from: NodeNumber,
    /// The sender's start.
    pub boot: Boot,
    /// The rest.
    pub content: Content,
}

/// The content of a [`Message`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Content {
    /// The sender is there, and has this. See [`crate::Sequencer::restarted`].
    Hello {
        /// The term that it knows.
        term: Term,
        /// The sender's last write of each table.
        has: Vector,
        /// The sender has promised to hold back everyone's writes, and waits for a cut.
        waits: bool,
    },
    /// Requests and releases.
    Ask(Batch),
    /// The answer to one start of a node.
    Answer {
        /// The start that has asked.
        to: Boot,
        /// The answer.
        answer: Answer,
    },
    /// The writes that are decided.
    Announce(Announcement),
    /// Asks for a promise to hold back everyone's writes, and for a report.
    Promise {
        /// The last term that the sender knows.
        follows: Term,
        /// Tells the sender's rounds apart.
        round: u64,
    },
    /// The sender has promised, and has this.
    Report {
        /// The start that has asked.
        to: Boot,
        /// The round.
        round: u64,
        /// The writes that the sender has.
        report: Report,
    },
}

impl Bytes for Message {
    const WHAT: &'static str = "message of versions";

    fn write(&self, w: &mut Writer) {
        w.u16(self.from.0).u64(self.boot.0);
        match &self.content {
            Content::Hello { term, has, waits } => {
                w.u8(1).u64(term.0).bool(*waits);
                write_vector(has, w);
            }
            Content::Ask(batch) => batch.write(w.u8(2)),
            Content::Answer { to, answer } => {
                w.u8(3).u64(to.0);
                answer.write(w);
            }
            Content::Announce(announcement) => announcement.write(w.u8(4)),
            Content::Promise { follows, round } => {
                w.u8(5).u64(follows.0).u64(*round);
            }
            Content::Report { to, round, report } => {
                w.u8(6).u64(to.0).u64(*round);
                report.write(w);
            }
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let from = node(r)?.ok_or_else(|| r.invalid())?;
        let boot = Boot(number(r)?);
        let content = match r.u8()? {
            1 => Content::Hello {
                term: Term(number(r)?),
                waits: r.bool()?,
                has: read_vector(r, TABLES_LIMIT)?,
            },
            2 => Content::Ask(Batch::read(r)?),
            3 => Content::Answer {
                to: Boot(number(r)?),
                answer: Answer::read(r)?,
            },
            4 => Content::Announce(Announcement::read(r)?),
            5 => Content::Promise {
                follows: Term(number(r)?),
                round: number(r)?,
            },
            6 => Content::Report {
                to: Boot(number(r)?),
                round: number(r)?,
                report: Report::read(r)?,
            },
            tag => return Err(r.unknown(tag)),
        };
        Ok(Self {
            from,
            boot,
            content,
        })
    }
}

/// The content of a row of `braid.version_record`, and of the message that travels.
///
/// Bytes: the format's version, a tag (1), the content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The versions of the transaction that has written the row, as its first change.
    Versions(crate::Record),
    /// At its node all transactions that wrote a table before have ended, and none begins: what
    /// comes later in the node's stream has no change of the table from before.
    Drained {
        /// The node.
        node: NodeNumber,
        /// The table.
        table: crate::TableNumber,
        /// Whether the table is versioned until then, rather than from then on.
        ends: bool,
    },
}

impl Bytes for Note {
    const WHAT: &'static str = "note of versions";

    fn write(&self, w: &mut Writer) {
        match self {
            Self::Versions(record) => record.write(w.u8(1)),
            Self::Drained { node, table, ends } => {
                w.u8(2).u16(node.0).u32(table.0).bool(*ends);
            }
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match r.u8()? {
            1 => Self::Versions(crate::Record::read(r)?),
            2 => Self::Drained {
                node: node(r)?.ok_or_else(|| r.invalid())?,
                table: crate::TableNumber(r.u32()?),
                ends: r.bool()?,
            },
            tag => return Err(r.unknown(tag)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{Access, GrantId, Record, Request, Shipped, TableNumber, Version};

    fn messages() -> Vec<Message> {
        let contents = [
            Content::Hello {
                term: Term(3),
                has: Vector::from([(TableNumber(1), Version(7))]),
                waits: true,
            },
            Content::Ask(Batch {
                term: Term(3),
                node: NodeNumber(2),
                boot: Boot(4),
                low: 1,
                requests: vec![Request {
                    number: 1,
                    tables: BTreeMap::from([(TableNumber(1), Access::Write)]),
                }],
                releases: Vec::new(),
            }),
            Content::Answer {
                to: Boot(4),
                answer: Answer::default(),
            },
            Content::Announce(Announcement {
                term: Term(3),
                ends: BTreeMap::new(),
            }),
            Content::Promise {
                follows: Term(3),
                round: 9,
            },
            Content::Report {
                to: Boot(4),
                round: 9,
                report: Report {
                    term: Term(3),
                    ends: BTreeMap::new(),
                },
            },
        ];
        let message = |content| Message {
            from: NodeNumber(2),
            boot: Boot(4),
            content,
        };
        contents.into_iter().map(message).collect()
    }

    #[test]
    fn every_message_is_read_as_it_was_written() {
        for message in messages() {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Ok(message));
            for length in 0..bytes.len() {
                assert!(Message::decode(&bytes[..length]).is_err());
            }
        }
        let mut bytes = messages()[0].encode();
        bytes[11] = 99;
        assert!(Message::decode(&bytes).is_err());
    }

    #[test]
    fn every_note_is_read_as_it_was_written() {
        let record = Record {
            term: Term(1),
            id: GrantId {
                node: NodeNumber(1),
                boot: Boot(1),
                number: 1,
            },
            tables: BTreeMap::from([(
                TableNumber(1),
                Shipped {
                    seen: Version(0),
                    own: Some(Version(1)),
                },
            )]),
        };
        let drained = Note::Drained {
            node: NodeNumber(1),
            table: TableNumber(1),
            ends: true,
        };
        for note in [Note::Versions(record), drained] {
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes), Ok(note));
            assert!(Note::decode(&bytes[1..]).is_err());
        }
    }
}
