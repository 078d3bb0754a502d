//! The records of a transaction that is parked, or that is read while it arrives: the keys and
//! tables that they touch, and which of them are committed already.

use std::collections::{BTreeMap, BTreeSet};

use braid_apply::{content_of_statement, is_statement, tables_of};
use braid_bgworker::parked::Touch;
use braid_bgworker::split::{Progress, Split};
use braid_gir::{Reader, Record, Tag};
use braid_node::parked::{self, Note, Why};
use braid_node::{origin, split};
use braid_postgres::error::{self, PgError};
use braid_postgres::transaction;
use braid_ring::{FrameRead, Transaction};

use super::super::Applier;
use super::super::piece::differs;
use super::super::post::next_frame;
use super::super::records::out_of_order;

/// The note, and the changed rows by schema, of a transaction in the ring.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) note: Note,
    /// Changed rows by schema: whether there is a barrier, and hashes.
    pub(super) changes: BTreeMap<u32, (bool, Vec<u64>)>,
    /// Tables that statements touch.
    pub(super) tables: Vec<String>,
}

impl Content {
    fn record(&mut self, tag: Tag, body: &[u8]) -> Result<(), PgError> {
        match tag {
            Tag::Insert | Tag::Update | Tag::Delete => {
                let header = Record::read_change_header(body)?;
                let (barrier, hashes) = self.changes.entry(header.schema.0).or_default();
                *barrier |= header.barrier;
                hashes.extend(header.writeset.hashes());
                self.note.changes += 1;
            }
            _ => match Record::read(tag, body)? {
                Record::Begin(begin) => {
                    self.note.xid = begin.xid;
                    self.note.commit_lsn = begin.commit_lsn;
                    self.note.timestamp = begin.commit_timestamp;
                    begin.origin.clone_into(&mut self.note.origin);
                }
                Record::Commit(commit) => self.note.end_lsn = commit.end_lsn,
                Record::Truncate(truncate) => {
                    for schema in truncate.schemas() {
                        self.changes.entry(schema.0).or_default().0 = true;
                        self.note.changes += 1;
                    }
                }
                Record::Message(message) if is_statement(&message) => {
                    self.tables.extend(tables_of(message.content)?);
                    self.note.changes += 1;
                }
                _ => {}
            },
        }
        Ok(())
    }

    pub(super) fn frame(&mut self, frame: &[u8]) -> Result<(), PgError> {
        let mut reader = Reader::new(frame);
        while let Some((tag, body)) = reader.next_raw()? {
            if !matches!(tag, Tag::StreamHeader | Tag::Schema) {
                self.record(tag, body)?;
            }
        }
        self.note.bytes += frame.len() as u64;
        Ok(())
    }
}

impl Applier {
    /// Stores a transaction as [`Applier::store`] does, but reads it while it arrives, and leaves
    /// out the chunks that are committed already.
    pub(super) fn store_as_it_comes(
        &mut self,
        transaction: &mut Transaction,
        why: Why<'_>,
    ) -> Result<(i64, u64), PgError> {
        self.look_at_parked()?;
        self.read_log()?;
        self.origins.use_that_of_provider()?;
        let mut assembled = Vec::new();
        let mut rest = Vec::new();
        // For an open transaction it is not known whether its keys show all its dependencies.
        let by_table = transaction.is_open() || transaction.is_wide();
        let id = error::transaction(|| {
            let id = parked::next_id()?;
            let mut split = Split::new(0, Progress::default());
            let mut content = Content::default();
            let mut touch = Touch::default();
            let mut schemas = BTreeSet::new();
            let mut part = 1;
            loop {
                let frame = match next_frame(transaction, &mut assembled)? {
                    FrameRead::Frame(frame) => frame,
                    FrameRead::Assembled => &assembled,
                    FrameRead::End => break,
                    FrameRead::Pending => {
                        self.post.wait_for_rest()?;
                        continue;
                    }
                };
                let frame = if transaction.is_split() {
                    self.rest_of(frame, &mut split, &mut rest)?;
                    rest.as_slice()
                } else {
                    frame
                };
                if frame.is_empty() {
                    continue;
                }
                content.frame(frame)?;
                for name in std::mem::take(&mut content.tables) {
                    touch.change(&name, true, []);
                }
                for (schema, (barrier, hashes)) in std::mem::take(&mut content.changes) {
                    schemas.insert(schema);
                    self.know(schema)?;
                    let session = self.session.as_mut().ok_or_else(out_of_order)?;
                    session.touch(&mut touch, schema, barrier || by_table, hashes)?;
                }
                parked::check_limits(&self.subscription, content.note.bytes, why)?;
                parked::add(id, &mut part, frame)?;
            }
            if content.note.origin.is_empty() {
                content.note.origin.clone_from(&self.subscription.provider);
            }
            let touch = touch.finish();
            let why = match why {
                // Known so far was only one that the first changes have to follow.
                Why::Waits(holder) => {
                    let all = self.parking.known.parked.holder(&touch, i64::MAX);
                    Why::Waits(all.unwrap_or(holder))
                }
                why @ (Why::Error(..) | Why::Lock(_)) => why,
            };
            split.finish().map_err(differs)?;
            content.note.committed = split.committed().changes;
            if content.note.committed > 0 {
                split::finish(self.subscription.id)?;
            }
            let preamble = self.preamble(schemas.into_iter())?;
            parked::add(id, &mut 0, &preamble)?;
            parked::insert(&self.subscription, id, &content.note, &touch, why)?;
            origin::stands_for(content.note.end_lsn, 0);
            Ok(id)
        })?;
        Ok((id, transaction::last_commit_end()))
    }

    /// Copies to `rest` the part of a frame that is not committed in chunks yet; `split` knows how
    /// far the chunks go, from the begin record on. In a transaction.
    fn rest_of(
        &mut self,
        frame: &[u8],
        split: &mut Split,
        rest: &mut Vec<u8>,
    ) -> Result<(), PgError> {
        rest.clear();
        let mut reader = Reader::new(frame);
        let mut from = 0;
        while let Some((tag, body)) = reader.next_raw()? {
            let to = frame.len() - reader.remaining();
            let place = std::mem::replace(&mut from, to)..to;
            let is_committed = match tag {
                Tag::Begin => {
                    let Record::Begin(begin) = Record::read(tag, body)? else {
                        continue;
                    };
                    let committed = split::read(self.subscription.id, begin.commit_lsn)?;
                    *split = Split::new(0, committed);
                    false
                }
                Tag::Insert | Tag::Update | Tag::Delete | Tag::Truncate | Tag::Message
                    if split.seen().changes < split.committed().changes =>
                {
                    let record = Record::read(tag, body)?;
                    if matches!(&record, Record::Message(message) if !is_statement(message)) {
                        continue;
                    }
                    match &record {
                        Record::Change(change) => self.know(change.header.schema.0)?,
                        Record::Truncate(truncate) => {
                            for schema in truncate.schemas() {
                                self.know(schema.0)?;
                            }
                        }
                        _ => {}
                    }
                    let content = match (&record, self.session.as_ref()) {
                        (Record::Change(change), Some(session)) => session.content(change)?,
                        (Record::Truncate(truncate), Some(session)) => {
                            session.content_of_truncate(truncate)?
                        }
                        (Record::Message(message), _) => content_of_statement(message.content),
                        _ => 0,
                    };
                    !split.take(content).map_err(differs)?
                }
                _ => false,
            };
            if !is_committed {
                rest.extend_from_slice(frame.get(place).unwrap_or_default());
            }
        }
        Ok(())
    }
}
