//! Objects for the boundaries of transactions and segments, and the transaction's members in the
//! objects between them.

use super::{JsonWriter, print, put_lsn, put_string, timestamp_text};
use crate::prepared::{Prepared, RollbackPrepared};
use crate::segment::{Abort, SegmentStart, StreamedCommit};
use crate::transaction::{Begin, Commit};

impl JsonWriter {
    pub(super) fn begin(&mut self, begin: &Begin<'_>, out: &mut String) {
        self.within.clear();
        put_transaction(&mut self.within, begin, &self.node);
        print(
            out,
            format_args!(r#"{{"operation":"begin",{}}}"#, self.within),
        );
    }

    pub(super) fn commit(&mut self, commit: &Commit, out: &mut String) {
        self.end("commit", commit, "commit_time", out);
    }

    pub(super) fn begin_prepared(&mut self, prepared: &Prepared<'_>, out: &mut String) {
        self.put_prepared("begin_prepared", prepared, out);
        out.push('}');
        let text = &mut self.within;
        text.clear();
        put_transaction(text, &prepared.begin, &self.node);
        text.push_str(r#","prepared":"#);
        put_string(text, prepared.gid);
    }

    pub(super) fn prepare(&mut self, prepare: &Commit, out: &mut String) {
        self.end("prepare", prepare, "prepare_time", out);
    }

    fn end(&mut self, operation: &str, end: &Commit, time: &str, out: &mut String) {
        self.within.clear();
        print(out, format_args!(r#"{{"operation":"{operation}","lsn":"#));
        put_lsn(out, end.commit_lsn);
        out.push_str(r#","end_lsn":"#);
        put_lsn(out, end.end_lsn);
        let at = timestamp_text(end.commit_timestamp);
        print(out, format_args!(r#","{time}":"{at}"}}"#));
    }

    pub(super) fn segment_start(&mut self, start: SegmentStart, out: &mut String) {
        let SegmentStart { first, xid } = start;
        self.segment = Some(xid);
        self.running(xid, xid);
        print(
            out,
            format_args!(r#"{{"operation":"segment_start","xid":{xid},"first":{first}}}"#),
        );
    }

    pub(super) fn segment_end(&mut self, out: &mut String) {
        self.segment = None;
        self.within.clear();
        out.push_str(r#"{"operation":"segment_end"}"#);
    }

    pub(super) fn subtransaction(&mut self, subxid: u32, out: &mut String) {
        if let Some(xid) = self.segment {
            self.running(xid, subxid);
        }
        print(
            out,
            format_args!(r#"{{"operation":"subtransaction","xid":{subxid}}}"#),
        );
    }

    /// Sets `subxid` as the subtransaction of the segment's next changes.
    fn running(&mut self, xid: u32, subxid: u32) {
        let text = &mut self.within;
        text.clear();
        print(
            text,
            format_args!(r#""running":{{"xid":{xid},"subxid":{subxid}"#),
        );
        if !self.node.is_empty() {
            print(text, format_args!(r#","node":{}"#, self.node));
        }
        text.push('}');
    }

    pub(super) fn abort(abort: Abort, out: &mut String) {
        let Abort { xid, subxid } = abort;
        print(
            out,
            format_args!(r#"{{"operation":"abort","xid":{xid},"subxid":{subxid}}}"#),
        );
    }

    pub(super) fn streamed_commit(&self, commit: &StreamedCommit<'_>, out: &mut String) {
        self.put_whole("streamed_commit", &commit.begin, commit.end_lsn, out);
        out.push('}');
    }

    pub(super) fn step(&self, operation: &str, prepared: &Prepared<'_>, out: &mut String) {
        self.put_prepared(operation, prepared, out);
        out.push('}');
    }

    pub(super) fn rollback_prepared(&self, rollback: &RollbackPrepared<'_>, out: &mut String) {
        self.put_prepared("rollback_prepared", &rollback.prepared, out);
        out.push_str(r#","prepare_end_lsn":"#);
        put_lsn(out, rollback.prepare_end_lsn);
        let at = timestamp_text(rollback.prepare_timestamp);
        print(out, format_args!(r#","prepare_time":"{at}"}}"#));
    }

    /// Appends the object without its end.
    fn put_prepared(&self, operation: &str, prepared: &Prepared<'_>, out: &mut String) {
        self.put_whole(operation, &prepared.begin, prepared.end_lsn, out);
        out.push_str(r#","gid":"#);
        put_string(out, prepared.gid);
    }

    /// Appends the object without its end.
    fn put_whole(&self, operation: &str, begin: &Begin<'_>, end_lsn: u64, out: &mut String) {
        print(out, format_args!(r#"{{"operation":"{operation}","#));
        put_transaction(out, begin, &self.node);
        out.push_str(r#","end_lsn":"#);
        put_lsn(out, end_lsn);
    }

    /// Appends the current transaction's members, behind another member.
    pub(super) fn put_within(&self, out: &mut String) {
        if !self.within.is_empty() {
            out.push(',');
            out.push_str(&self.within);
        }
    }
}

/// Appends the member `transaction`. `node` is a JSON string, or empty.
fn put_transaction(text: &mut String, begin: &Begin<'_>, node: &str) {
    print(
        text,
        format_args!(r#""transaction":{{"xid":{},"lsn":"#, begin.xid),
    );
    put_lsn(text, begin.commit_lsn);
    print(
        text,
        format_args!(
            r#","commit_time":"{}","#,
            timestamp_text(begin.commit_timestamp)
        ),
    );
    if !node.is_empty() {
        print(text, format_args!(r#""node":{node},"#));
    }
    text.push_str(r#""origin":"#);
    if begin.origin.is_empty() {
        text.push_str("null");
    } else {
        put_string(text, begin.origin);
    }
    text.push_str(r#","origin_lsn":"#);
    put_lsn(text, begin.origin_lsn);
    text.push('}');
}
