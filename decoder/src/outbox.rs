//! Groups records into frames: one frame for each transaction, several for a large one, or one for
//! several small ones.
//!
//! Records are collected in one buffer that lives as long as the stream. The buffer becomes a frame
//! at the end of the transaction, or once it has more than [`FRAME_BYTES`]. A stream that joins
//! transactions delays complete ones until there are [`JOINED_BYTES`] of them, or until
//! [`Outbox::release`] is called. The caller must do that whenever it is about to wait for more to
//! send. Joining pays, as a write to the socket costs more than everything else in a small
//! transaction.
//!
//! The stream header is written before the very first record, a Begin before the first record of
//! its transaction. So a transaction without records costs no bytes.
//!
//! On request, a stream sends transactions in segments while they run ([`Outbox::start_segment`]).
//! A segment stands between other transactions and is sent when it stops. If no segment of a
//! transaction was sent, its commit or abort is not sent either.
//!
//! For a prepared transaction, begin and end are sent even without records in between. Its outcome
//! follows later, perhaps in another stream, which cannot know whether there were records.

use std::collections::HashSet;

use braid_gir::{
    Abort, Begin, Commit, Message, Prepared, RollbackPrepared, SegmentStart, StreamedCommit, Writer,
};

use crate::error::Result;

/// Size in bytes from which a frame is sent before its transaction ends.
const FRAME_BYTES: usize = 256 * 1024;
/// Size in bytes from which delayed transactions are sent.
const JOINED_BYTES: usize = 64 * 1024;
/// Prefix of the message that announces that everything up to its position was sent.
pub const POSITION_PREFIX: &str = "braid.position";
/// Prefix of the message that carries a rule for conflicts or for a column, set for all nodes.
/// Content: see `braid.take_conflict_resolution` and `braid.take_column_rule`.
pub const RULE_PREFIX: &str = "braid.conflict_rule";
/// Prefix of the message with which a versioned transaction begins. Content:
/// `braid_versions::Note`.
pub const VERSIONS_PREFIX: &str = "braid.versions";
/// Prefix of the message before a change that has replaced a row version of another node. Content:
/// that version, as the timestamp (i64, microseconds since 1970-01-01 UTC, little-endian), then the
/// origin's name.
pub const REPLACED_PREFIX: &str = "braid.replaced";
/// Bytes that the buffer keeps allocated between frames.
const KEPT_BYTES: usize = 2 * FRAME_BYTES;

/// Port: takes finished frames. An error unwinds, like all errors of PostgreSQL.
pub trait FrameSink {
    /// Sends `frame` as one message.
    fn send(&mut self, frame: &[u8]);
}

/// Fields of a Begin record, in case one is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// LSN of the commit record.
    pub commit_lsn: u64,
    /// Commit timestamp, microseconds since 1970-01-01 UTC.
    pub commit_timestamp: i64,
    /// Transaction id.
    pub xid: u32,
    /// Name of the origin node, empty for the sender.
    pub origin: String,
    /// LSN of the commit at the origin, 0 if the origin is the sender.
    pub origin_lsn: u64,
    /// If the transaction is or was prepared: end LSN of the record of that, and its global id. The
    /// LSN and timestamp above are then those of that record.
    pub prepared: Option<(u64, String)>,
}

impl Transaction {
    fn prepared(&self) -> Option<Prepared<'_>> {
        self.prepared.as_ref().map(|(end_lsn, gid)| Prepared {
            begin: self.record(),
            end_lsn: *end_lsn,
            gid,
        })
    }

    fn record(&self) -> Begin<'_> {
        Begin {
            commit_lsn: self.commit_lsn,
            commit_timestamp: self.commit_timestamp,
            xid: self.xid,
            origin: &self.origin,
            origin_lsn: self.origin_lsn,
        }
    }
}

/// The frame in progress and the state of the stream.
#[derive(Debug, Default)]
pub struct Outbox {
    writer: Writer,
    headed: bool,
    begun: bool,
    /// Complete transactions may be delayed, to be sent together.
    joins: bool,
    /// The last announced position.
    announced: u64,
    transaction: Transaction,
    segment: Option<Segment>,
    /// Transactions of which segments were written, but no end.
    streamed: HashSet<u32>,
}

/// The current segment.
#[derive(Debug, Clone, Copy)]
struct Segment {
    /// Id of the transaction.
    xid: u32,
    /// Transaction or subtransaction that the reader assigns the next changes to; `None` before the
    /// segment's first record.
    subxid: Option<u32>,
}

impl Outbox {
    /// Returns an empty stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the outbox delay complete transactions, to send several at a time. The caller must
    /// then call [`Outbox::release`].
    pub fn join_transactions(&mut self) {
        self.joins = true;
    }

    /// Returns whether transactions are joined.
    #[must_use]
    pub fn joins(&self) -> bool {
        self.joins
    }

    /// Returns whether complete transactions are delayed.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.joins && !self.begun && !self.writer.is_empty()
    }

    /// Sends the delayed transactions. `decoded`: the position up to which everything was decoded;
    /// it is announced too, unless it was announced before. Keepalives do not account for delayed
    /// transactions, so the reader of such a stream relies on this message.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn release(&mut self, decoded: Option<u64>, sink: &mut impl FrameSink) -> Result<()> {
        if self.begun {
            return Ok(());
        }
        if let Some(lsn) = decoded.filter(|lsn| *lsn > self.announced) {
            self.announced = lsn;
            self.writer.message(&Message {
                transactional: false,
                lsn,
                prefix: POSITION_PREFIX,
                content: &[],
            })?;
        }
        self.flush(sink);
        Ok(())
    }

    /// Returns whether [`Outbox::release`] would send anything.
    #[must_use]
    pub fn would_release(&self, decoded: u64) -> bool {
        !self.begun && (!self.writer.is_empty() || decoded > self.announced)
    }

    /// Returns whether the stream's header must still be written, with [`Outbox::writer`].
    #[must_use]
    pub fn wants_header(&self) -> bool {
        !self.headed
    }

    /// Records that the header was written.
    pub fn header_written(&mut self) {
        self.headed = true;
    }

    /// Returns whether a record of this transaction was written.
    #[must_use]
    pub fn begun(&self) -> bool {
        self.begun
    }

    /// Returns the buffer, for records outside of transactions or after [`Outbox::ensure_begun`].
    pub fn writer(&mut self) -> &mut Writer {
        &mut self.writer
    }

    /// Starts a transaction without writing anything yet. The caller fills in the fields of its
    /// Begin record.
    pub fn start(&mut self) -> &mut Transaction {
        self.begun = false;
        &mut self.transaction
    }

    /// Returns the fields of the current transaction's Begin record, which can be changed until it
    /// is written.
    pub fn transaction(&mut self) -> &mut Transaction {
        &mut self.transaction
    }

    /// Starts a segment of transaction `xid` without writing anything yet.
    pub fn start_segment(&mut self, xid: u32) {
        self.begun = false;
        self.segment = Some(Segment { xid, subxid: None });
    }

    /// Returns whether there is a current segment.
    #[must_use]
    pub fn in_segment(&self) -> bool {
        self.segment.is_some()
    }

    /// Writes the records that must precede a change of transaction or subtransaction `xid`, unless
    /// they are written already: the Begin, or in a segment its start and the change's
    /// subtransaction.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    #[inline]
    pub fn ensure_begun(&mut self, xid: u32) -> Result<()> {
        if let Some(segment) = self.segment {
            return self.ensure_in_segment(segment, xid);
        }
        if self.begun {
            return Ok(());
        }
        match self.transaction.prepared() {
            Some(prepared) => self.writer.begin_prepared(&prepared)?,
            None => self.writer.begin(&self.transaction.record())?,
        }
        self.begun = true;
        Ok(())
    }

    fn ensure_in_segment(&mut self, segment: Segment, subxid: u32) -> Result<()> {
        let Segment { xid, subxid: last } = segment;
        if last.is_none() {
            self.writer.segment_start(SegmentStart {
                first: !self.streamed.contains(&xid),
                xid,
            })?;
            self.streamed.insert(xid);
            self.begun = true;
        }
        // A change without a subtransaction record belongs to the transaction itself.
        if last.unwrap_or(xid) != subxid {
            self.writer.subtransaction(subxid)?;
        }
        self.segment = Some(Segment {
            xid,
            subxid: Some(subxid),
        });
        Ok(())
    }

    /// Ends the current segment, and sends it. Returns whether it contains anything.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn stop_segment(&mut self, sink: &mut impl FrameSink) -> Result<bool> {
        let written = self
            .segment
            .take()
            .is_some_and(|segment| segment.subxid.is_some());
        self.begun = false;
        if written {
            self.writer.segment_stop()?;
            self.flush(sink);
        }
        Ok(written)
    }

    /// Writes the rollback of subtransaction `subxid` of transaction `xid`, or of the whole
    /// transaction if both ids are equal. Returns whether the reader had anything of the
    /// transaction.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn abort(&mut self, xid: u32, subxid: u32, sink: &mut impl FrameSink) -> Result<bool> {
        if !self.streamed.contains(&xid) {
            return Ok(false);
        }
        self.writer.abort(Abort { xid, subxid })?;
        if xid == subxid {
            self.streamed.remove(&xid);
        }
        self.flush_unless_joined(sink);
        Ok(true)
    }

    /// Writes the commit of the transaction of [`Outbox::start`], which came in segments; the
    /// commit record ends at `end_lsn`. Returns whether the reader had anything of it.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn commit_streamed(&mut self, end_lsn: u64, sink: &mut impl FrameSink) -> Result<bool> {
        if !self.streamed.remove(&self.transaction.xid) {
            return Ok(false);
        }
        self.writer.streamed_commit(&StreamedCommit {
            begin: self.transaction.record(),
            end_lsn,
        })?;
        self.flush_unless_joined(sink);
        Ok(true)
    }

    fn flush_unless_joined(&mut self, sink: &mut impl FrameSink) {
        if !self.joins || self.writer.len() >= JOINED_BYTES {
            self.flush(sink);
        }
    }

    /// Sends the buffer if it is large enough for a frame.
    #[inline]
    pub fn flush_if_large(&mut self, sink: &mut impl FrameSink) {
        if self.writer.len() >= FRAME_BYTES {
            self.flush(sink);
        }
    }

    fn flush(&mut self, sink: &mut impl FrameSink) {
        if !self.writer.is_empty() {
            sink.send(self.writer.frame());
            self.writer.clear(KEPT_BYTES);
        }
    }

    /// Ends the transaction at `end_lsn`. Returns whether any record of it was written.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    #[inline]
    pub fn commit(&mut self, end_lsn: u64, sink: &mut impl FrameSink) -> Result<bool> {
        if !self.begun {
            return Ok(false);
        }
        self.writer.commit(&Commit {
            commit_lsn: self.transaction.commit_lsn,
            end_lsn,
            commit_timestamp: self.transaction.commit_timestamp,
        })?;
        self.begun = false;
        self.flush_unless_joined(sink);
        Ok(true)
    }

    /// Writes the PREPARE of the current transaction, which [`Outbox::ensure_begun`] has begun.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn prepare(&mut self, sink: &mut impl FrameSink) -> Result<()> {
        if let Some(prepared) = self.transaction.prepared().filter(|_| self.begun) {
            self.writer.prepare(&prepared.commit())?;
            self.begun = false;
            self.flush_unless_joined(sink);
        }
        Ok(())
    }

    /// Writes the PREPARE of the transaction of [`Outbox::start`], whether or not segments of it
    /// were sent.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn prepare_streamed(&mut self, sink: &mut impl FrameSink) -> Result<()> {
        let Some(prepared) = self.transaction.prepared() else {
            return Ok(());
        };
        if self.streamed.remove(&self.transaction.xid) {
            self.writer.streamed_prepare(&prepared)?;
        } else {
            self.writer.begin_prepared(&prepared)?;
            self.writer.prepare(&prepared.commit())?;
        }
        self.flush_unless_joined(sink);
        Ok(())
    }

    /// Writes the end of the prepared transaction of [`Outbox::start`]: its commit, or, with the
    /// end LSN and time of its PREPARE, its rollback.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn finish_prepared(
        &mut self,
        rolled_back: Option<(u64, i64)>,
        sink: &mut impl FrameSink,
    ) -> Result<()> {
        // After the reader confirmed the PREPARE, segments of the transaction may have been sent
        // once more: the reader forgets them.
        self.streamed.remove(&self.transaction.xid);
        let Some(prepared) = self.transaction.prepared() else {
            return Ok(());
        };
        match rolled_back {
            None => self.writer.commit_prepared(&prepared)?,
            Some((prepare_end_lsn, prepare_timestamp)) => {
                self.writer.rollback_prepared(&RollbackPrepared {
                    prepared,
                    prepare_end_lsn,
                    prepare_timestamp,
                })?;
            }
        }
        self.flush_unless_joined(sink);
        Ok(())
    }

    /// Sends a message that belongs to no transaction, at once and in a frame of its own.
    ///
    /// # Errors
    /// [`crate::Error::Gir`].
    pub fn lone_message(&mut self, message: &Message<'_>, sink: &mut impl FrameSink) -> Result<()> {
        self.writer.message(message)?;
        self.flush(sink);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_gir::{Reader, SchemaNumber, Tag, Value};

    #[derive(Default)]
    struct Frames(Vec<Vec<u8>>);

    impl FrameSink for Frames {
        fn send(&mut self, frame: &[u8]) {
            self.0.push(frame.to_vec());
        }
    }

    fn tags(frame: &[u8]) -> Vec<Tag> {
        let mut reader = Reader::new(frame);
        std::iter::from_fn(|| reader.next_raw().unwrap())
            .map(|(tag, _)| tag)
            .collect()
    }

    fn insert(outbox: &mut Outbox, bytes: usize) {
        let body = vec![b'x'; bytes];
        outbox
            .writer()
            .insert::<crate::Error>(SchemaNumber(0), false, &[], |image| {
                image.put(&Value::String(&body));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn a_transaction_without_records_sends_nothing() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        outbox.start().xid = 7;
        assert!(!outbox.commit(9, &mut frames).unwrap());
        assert!(frames.0.is_empty());
    }

    #[test]
    fn one_frame_a_transaction() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        for _ in 0..2 {
            outbox.start();
            outbox.ensure_begun(7).unwrap();
            insert(&mut outbox, 1);
            outbox.ensure_begun(7).unwrap();
            insert(&mut outbox, 1);
            outbox.flush_if_large(&mut frames);
            assert!(outbox.commit(9, &mut frames).unwrap());
        }
        assert_eq!(frames.0.len(), 2);
        assert_eq!(
            tags(&frames.0[1]),
            [Tag::Begin, Tag::Insert, Tag::Insert, Tag::Commit]
        );
    }

    #[test]
    fn joined_transactions_go_together_in_order() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        outbox.join_transactions();
        outbox.header_written();
        for _ in 0..2 {
            outbox.start();
            outbox.ensure_begun(7).unwrap();
            // Records of an incomplete transaction must not be sent as if it were complete.
            outbox.release(Some(5), &mut frames).unwrap();
            insert(&mut outbox, 1);
            assert!(!outbox.holds());
            assert!(outbox.commit(9, &mut frames).unwrap());
        }
        assert!(outbox.holds());
        assert!(frames.0.is_empty());
        outbox.release(Some(9), &mut frames).unwrap();
        outbox.release(Some(9), &mut frames).unwrap();
        outbox.release(Some(12), &mut frames).unwrap();
        let kinds: Vec<_> = frames.0.iter().map(|frame| tags(frame)).collect();
        let transaction = [Tag::Begin, Tag::Insert, Tag::Commit];
        assert_eq!(
            kinds,
            [
                [&transaction[..], &transaction[..], &[Tag::Message]].concat(),
                vec![Tag::Message]
            ]
        );
        assert!(!outbox.holds());
    }

    #[test]
    fn joined_transactions_are_sent_once_they_are_many() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        outbox.join_transactions();
        for _ in 0..4 {
            outbox.start();
            outbox.ensure_begun(7).unwrap();
            insert(&mut outbox, JOINED_BYTES / 3);
            assert!(outbox.commit(9, &mut frames).unwrap());
        }
        assert_eq!(frames.0.len(), 1);
        assert!(outbox.holds());
    }

    #[test]
    fn a_large_transaction_is_cut_and_memory_given_back() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        outbox.start();
        outbox.ensure_begun(7).unwrap();
        for _ in 0..3 {
            insert(&mut outbox, 5 * FRAME_BYTES);
            outbox.flush_if_large(&mut frames);
        }
        assert!(outbox.commit(9, &mut frames).unwrap());
        let kinds: Vec<_> = frames.0.iter().map(|frame| tags(frame)).collect();
        assert_eq!(
            kinds,
            [
                vec![Tag::Begin, Tag::Insert],
                vec![Tag::Insert],
                vec![Tag::Insert],
                vec![Tag::Commit]
            ]
        );
        assert!(outbox.writer.is_empty());
    }

    #[test]
    fn segments_stand_between_transactions() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        outbox.join_transactions();
        let small = |outbox: &mut Outbox, frames: &mut Frames| {
            outbox.start().xid = 7;
            outbox.ensure_begun(7).unwrap();
            insert(outbox, 1);
            assert!(outbox.commit(9, frames).unwrap());
        };
        small(&mut outbox, &mut frames);
        // No change of the first segment is published.
        outbox.start_segment(8);
        assert!(!outbox.stop_segment(&mut frames).unwrap());
        assert!(!outbox.abort(8, 9, &mut frames).unwrap());
        assert!(outbox.holds());
        outbox.start_segment(8);
        for subxid in [8, 9, 9, 8] {
            outbox.ensure_begun(subxid).unwrap();
            insert(&mut outbox, 1);
            // Not to be sent as if it were complete, and no position inside.
            assert!(!outbox.holds() && !outbox.would_release(50));
            outbox.release(Some(50), &mut frames).unwrap();
        }
        assert!(frames.0.is_empty());
        assert!(outbox.stop_segment(&mut frames).unwrap());
        let (i, x) = (Tag::Insert, Tag::Subtransaction);
        assert_eq!(
            tags(&frames.0[0]),
            [
                Tag::Begin,
                i,
                Tag::Commit,
                Tag::SegmentStart,
                i,
                x,
                i,
                i,
                x,
                i,
                Tag::SegmentStop
            ]
        );
        small(&mut outbox, &mut frames);
        outbox.start_segment(8);
        outbox.ensure_begun(10).unwrap();
        insert(&mut outbox, 1);
        assert!(outbox.stop_segment(&mut frames).unwrap());
        assert!(outbox.abort(8, 10, &mut frames).unwrap());
        outbox.start().xid = 8;
        assert!(outbox.holds());
        assert!(outbox.commit_streamed(60, &mut frames).unwrap());
        assert!(!outbox.commit_streamed(60, &mut frames).unwrap());
        outbox.release(Some(60), &mut frames).unwrap();
        assert_eq!(
            tags(&frames.0[1]),
            [
                Tag::Begin,
                i,
                Tag::Commit,
                Tag::SegmentStart,
                x,
                i,
                Tag::SegmentStop
            ]
        );
        assert_eq!(
            tags(&frames.0[2]),
            [Tag::Abort, Tag::StreamedCommit, Tag::Message]
        );
        let mut reader = Reader::new(&frames.0[1]);
        while let Some(record) = reader.next_record().unwrap() {
            if let braid_gir::Record::SegmentStart(start) = record {
                assert!(!start.first && start.xid == 8);
            }
        }
    }

    #[test]
    fn an_aborted_transaction_may_not_commit() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        outbox.start_segment(8);
        outbox.ensure_begun(8).unwrap();
        insert(&mut outbox, 1);
        assert!(outbox.stop_segment(&mut frames).unwrap());
        assert!(outbox.abort(8, 8, &mut frames).unwrap());
        outbox.start().xid = 8;
        assert!(!outbox.commit_streamed(60, &mut frames).unwrap());
        assert_eq!(frames.0.len(), 2);
    }

    #[test]
    fn a_large_segment_is_cut() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        outbox.join_transactions();
        outbox.start_segment(8);
        for _ in 0..2 {
            outbox.ensure_begun(9).unwrap();
            insert(&mut outbox, FRAME_BYTES);
            outbox.flush_if_large(&mut frames);
        }
        assert!(outbox.stop_segment(&mut frames).unwrap());
        let kinds: Vec<_> = frames.0.iter().map(|frame| tags(frame)).collect();
        assert_eq!(
            kinds,
            [
                vec![Tag::SegmentStart, Tag::Subtransaction, Tag::Insert],
                vec![Tag::Insert],
                vec![Tag::SegmentStop]
            ]
        );
    }

    #[test]
    fn what_is_prepared_is_told_also_when_it_is_empty() {
        let (mut outbox, mut frames) = (Outbox::new(), Frames::default());
        let start = |outbox: &mut Outbox| {
            let transaction = outbox.start();
            transaction.xid = 7;
            transaction.prepared = Some((9, "gid".to_owned()));
        };
        start(&mut outbox);
        outbox.ensure_begun(7).unwrap();
        outbox.prepare(&mut frames).unwrap();
        start(&mut outbox);
        outbox.finish_prepared(None, &mut frames).unwrap();
        start(&mut outbox);
        outbox.finish_prepared(Some((5, 6)), &mut frames).unwrap();
        // In segments, without and with published changes.
        start(&mut outbox);
        outbox.prepare_streamed(&mut frames).unwrap();
        outbox.start_segment(7);
        outbox.ensure_begun(7).unwrap();
        insert(&mut outbox, 1);
        assert!(outbox.stop_segment(&mut frames).unwrap());
        start(&mut outbox);
        outbox.prepare_streamed(&mut frames).unwrap();
        let kinds: Vec<_> = frames.0.iter().map(|frame| tags(frame)).collect();
        assert_eq!(
            kinds,
            [
                vec![Tag::BeginPrepared, Tag::Prepare],
                vec![Tag::CommitPrepared],
                vec![Tag::RollbackPrepared],
                vec![Tag::BeginPrepared, Tag::Prepare],
                vec![Tag::SegmentStart, Tag::Insert, Tag::SegmentStop],
                vec![Tag::StreamedPrepare],
            ]
        );
        // A transaction without records has no end either, and one that is not prepared ends as
        // usual.
        start(&mut outbox);
        outbox.prepare(&mut frames).unwrap();
        outbox.start().prepared = None;
        outbox.ensure_begun(8).unwrap();
        assert!(outbox.commit(9, &mut frames).unwrap());
        assert_eq!(frames.0.len(), 7);
        assert_eq!(tags(&frames.0[6]), [Tag::Begin, Tag::Commit]);
    }
}
