//! Transactions that arrive while they are in progress at the provider. Each is kept in a file of
//! its own ([`Spool`]) until it commits, and is then read back as though it had arrived whole.
//!
//! They do not hold back the confirmed position: until they have ended, the provider keeps the WAL
//! that it needs to send them again. Schemas learnt in a segment stay valid whatever becomes of the
//! transaction: a schema's number never stands for another one. But a table that is new in a
//! segment may never be committed, so it joins the subscription only with the first change that
//! counts.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use braid_gir::{Prepared, Reader, Record, StreamedCommit, Tag, Writer};
use braid_postgres::error::PgError;
use braid_postgres::spool::Spool;

use super::reception::Reception;
use super::running::Content;
use super::{End, out_of_order};

/// How much of a transaction is read back at once, if its blocks are small: they are if it has many
/// subtransactions.
const READ_BACK: usize = 256 * 1024;

/// The received part of a transaction.
struct Kept {
    spool: Spool,
    content: Content,
}

/// The transactions that have not ended.
#[derive(Default)]
pub(super) struct Segments {
    running: HashMap<u32, Kept>,
    /// The transaction whose segment is being received.
    current: Option<u32>,
    /// Schemas that came in a segment, of relations that may be new.
    pub(super) tentative: HashSet<u32>,
}

impl Segments {
    /// Drops the received part of a transaction.
    pub(super) fn forget(&mut self, xid: u32) {
        self.running.remove(&xid);
    }

    /// Whether a segment is being received.
    pub(super) fn is_open(&self) -> bool {
        self.current.is_some()
    }

    fn current(&mut self) -> Option<&mut Kept> {
        self.running.get_mut(&self.current?)
    }

    /// Returns the facts about the transaction whose segment is being received.
    pub(super) fn content(&mut self) -> Option<&mut Content> {
        self.current().map(|kept| &mut kept.content)
    }

    /// Why a transaction is not to be applied before it has ended, if it is not.
    pub(super) fn unfit(&self, xid: u32) -> Option<&'static str> {
        self.running
            .get(&xid)
            .map_or(Some("It is not known."), |kept| kept.content.unfit())
    }

    /// A transaction is not to be applied before it has ended.
    pub(super) fn leave(&mut self, xid: u32) {
        if let Some(kept) = self.running.get_mut(&xid) {
            kept.content.leave("It was given up.");
        }
    }

    /// The tables of a transaction, by schema.
    pub(super) fn schemas(&self, xid: u32) -> Vec<u32> {
        let kept = self.running.get(&xid);
        kept.map(|kept| kept.content.schemas()).unwrap_or_default()
    }

    /// Where the file of a transaction is.
    pub(super) fn path(&mut self, xid: u32) -> Option<String> {
        self.running.get_mut(&xid).map(|kept| kept.spool.path())
    }

    /// Hand all that came of a transaction to its file. How long that is.
    pub(super) fn hand_over(&mut self, xid: u32) -> Result<Option<u64>, PgError> {
        let kept = self.running.get_mut(&xid);
        kept.map(|kept| kept.spool.hand_over()).transpose()
    }
}

/// How a transaction ends that came in segments.
enum Ending<'a> {
    Commit(StreamedCommit<'a>),
    Prepare(Prepared<'a>),
}

impl Reception {
    pub(super) fn expect_between(&self) -> Result<(), End> {
        if self.in_hand.is_some() || self.segments.is_open() || !self.dictionary.is_open() {
            return Err(out_of_order());
        }
        Ok(())
    }

    /// A record that only running transactions have.
    pub(super) fn segment_record(&mut self, tag: Tag, body: &[u8]) -> Result<(), End> {
        self.hand_out();
        match Record::read(tag, body)? {
            Record::SegmentStart(start) => {
                self.expect_between()?;
                if start.first == self.segments.running.contains_key(&start.xid) {
                    return Err(out_of_order());
                }
                self.segments
                    .running
                    .entry(start.xid)
                    .or_insert_with(|| Kept {
                        spool: Spool::create(),
                        content: Content::default(),
                    });
                self.segments.current = Some(start.xid);
            }
            Record::Subtransaction(xid) => {
                let top = self.segments.current;
                let kept = self.segments.current().ok_or_else(out_of_order)?;
                if top != Some(xid) {
                    kept.spool.subtransaction(xid, kept.content.changes());
                }
            }
            Record::SegmentStop => {
                let xid = self.segments.current.take().ok_or_else(out_of_order)?;
                self.supply(xid)?;
            }
            Record::Abort(abort) => {
                self.expect_between()?;
                let running = &mut self.segments.running;
                let kept = running.get_mut(&abort.xid).ok_or_else(out_of_order)?;
                if abort.subxid == abort.xid {
                    self.give_up_running(abort.xid, None);
                    self.segments.running.remove(&abort.xid);
                } else if let Some(changes) = kept.spool.roll_back(abort.subxid) {
                    // A process that applies it finds that in the file.
                    kept.content.go_back(changes);
                }
            }
            Record::StreamedCommit(commit) => {
                self.expect_between()?;
                self.end_streamed(&Ending::Commit(commit))?;
            }
            Record::StreamedPrepare(prepared) => {
                self.expect_between()?;
                self.end_streamed(&Ending::Prepare(prepared))?;
            }
            _ => return Err(out_of_order()),
        }
        Ok(())
    }

    /// Keep records of the segment that is being received.
    pub(super) fn keep(&mut self, records: &[u8]) -> Result<(), End> {
        if records.is_empty() {
            return Ok(());
        }
        let kept = self.segments.current().ok_or_else(out_of_order)?;
        Ok(kept.spool.write(records)?)
    }

    fn end_streamed(&mut self, ending: &Ending<'_>) -> Result<(), End> {
        let (begin, commit) = match ending {
            Ending::Commit(streamed) => (&streamed.begin, streamed.commit()),
            Ending::Prepare(prepared) => (&prepared.begin, prepared.commit()),
        };
        let xid = begin.xid;
        if !self.segments.running.contains_key(&xid) {
            return Err(out_of_order());
        }
        match ending {
            Ending::Commit(_) => self.begin(begin)?,
            Ending::Prepare(prepared) => self.begin_prepared(prepared)?,
        }
        let skip = self.subscription.skip_lsn;
        let wanted = self.in_hand.as_mut().is_some_and(|in_hand| {
            in_hand.skip |= skip != 0 && skip == commit.end_lsn;
            in_hand.streamed = true;
            !in_hand.skip && !in_hand.discard
        });
        let is_elsewhere = match ending {
            Ending::Commit(_) if wanted => {
                let timestamp = begin.commit_timestamp;
                self.is_applied_elsewhere(xid, begin.origin.is_empty(), &commit, timestamp)?
            }
            _ => {
                self.give_up_running(xid, Some("It is prepared, or left out."));
                false
            }
        };
        let Some(mut kept) = self.segments.running.remove(&xid) else {
            return Err(out_of_order());
        };
        if wanted {
            // Its keys were hashed at another time than those of its neighbours, perhaps under
            // indexes that a subtransaction created and rolled back.
            self.scheduling.barrier_for_all();
            let mut writer = Writer::new();
            match ending {
                Ending::Commit(_) => writer.begin(begin)?,
                Ending::Prepare(prepared) => writer.begin_prepared(prepared)?,
            }
            // Its changes were counted when they arrived.
            let rows = self.intake.rows();
            if is_elsewhere {
                self.store(writer.frame())?;
                if let Some(in_hand) = self.in_hand.as_mut() {
                    in_hand.elsewhere = true;
                    in_hand.changes = kept.content.changes();
                }
            } else {
                self.read_back(writer.frame(), &mut kept.spool)?;
            }
            self.intake.set_rows(rows);
            writer.clear(0);
            match ending {
                Ending::Commit(_) => writer.commit(&commit)?,
                Ending::Prepare(_) => writer.prepare(&commit)?,
            }
            self.store(writer.frame())?;
        }
        drop(kept);
        self.commit(&commit)
    }

    /// Reads the content of a spool back into the current transaction, which begins with the record
    /// `begin`. An applier finds a record of versions in the frame of the Begin only.
    fn read_back(&mut self, begin: &[u8], spool: &mut Spool) -> Result<(), End> {
        spool.rewind()?;
        let mut records = begin.to_vec();
        let mut begin = begin.len();
        loop {
            while records.len() < READ_BACK && spool.read(&mut records)? {}
            if records.is_empty() {
                return Ok(());
            }
            let mut reader = Reader::new(records.get(begin..).unwrap_or_default());
            begin = 0;
            while let Some((tag, body)) = reader.next_raw()? {
                match tag {
                    Tag::Insert | Tag::Update | Tag::Delete => self.change(body)?,
                    Tag::Truncate => self.truncate(tag, body)?,
                    Tag::Message => self.transactional_message(tag, body)?,
                    _ => {}
                }
            }
            self.store(&records)?;
            records.clear();
            self.tend()?;
            // Nobody looks at the socket meanwhile.
            self.contact.looked_away(Instant::now());
        }
    }
}
