//! The text of transactions, changes and messages, in both versions.
//!
//! Version 1 has one object for a transaction: [`Document::begin`], each change and
//! [`Document::commit`] append its parts to one message, or to one each with `write-in-chunks`.
//! Version 2 has an object for each begin, change and commit.

use super::escape::{push_integer, push_string, push_unsigned};
use super::layout::{Image, Layout, Style};
use super::options::{Version, Wal2JsonOptions};

/// Fields of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransactionText<'t> {
    /// Id of the transaction.
    pub xid: u32,
    /// Commit time in PostgreSQL's text format; only used with `include-timestamp`.
    pub timestamp: &'t [u8],
    /// Number of its replication origin, 0 for none.
    pub origin: u32,
    /// LSN of its commit.
    pub commit_lsn: u64,
    /// LSN of the end of its commit.
    pub end_lsn: u64,
}

/// A logical message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageText<'t> {
    /// The message is part of the current transaction.
    pub transactional: bool,
    /// LSN of the message.
    pub lsn: u64,
    /// Prefix of the message.
    pub prefix: &'t [u8],
    /// Content of the message.
    pub content: &'t [u8],
}

/// The kind of a row's change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// INSERT.
    Insert,
    /// UPDATE.
    Update,
    /// DELETE.
    Delete,
}

impl ChangeKind {
    const fn letter(self) -> u8 {
        match self {
            Self::Insert => b'I',
            Self::Update => b'U',
            Self::Delete => b'D',
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Update => "update",
            Self::Delete => "delete",
        }
    }
}

/// Writes the text. All functions append to the caller's buffer.
#[derive(Debug)]
pub struct Document {
    version: Version,
    style: Style,
    chunks: bool,
    xids: bool,
    timestamp: bool,
    origin: bool,
    lsn: bool,
    /// Version 2: the transaction's members in each of its objects.
    transaction: Vec<u8>,
    /// Version 1: number of changes in the current transaction.
    changes: u64,
    scratch: Vec<usize>,
}

impl Document {
    /// Returns the writer for a stream.
    #[must_use]
    pub fn new(options: &Wal2JsonOptions) -> Self {
        Self {
            version: options.version,
            style: Style::new(options),
            chunks: options.chunks,
            xids: options.xids,
            timestamp: options.timestamp,
            origin: options.origin,
            lsn: options.lsn,
            transaction: Vec::new(),
            changes: 0,
            scratch: Vec::new(),
        }
    }

    /// Begins a transaction: in version 1 the beginning of its object, in version 2 a separate
    /// object.
    pub fn begin(&mut self, out: &mut Vec<u8>, transaction: &TransactionText<'_>) {
        self.changes = 0;
        match self.version {
            Version::One => self.open(out, Some(transaction)),
            Version::Two => {
                self.set_transaction(transaction);
                self.put_boundary(out, b'B', transaction);
            }
        }
    }

    /// Version 2: prepares the transaction's members for each object.
    fn set_transaction(&mut self, transaction: &TransactionText<'_>) {
        let bytes = &mut self.transaction;
        bytes.clear();
        if self.xids {
            bytes.extend_from_slice(b",\"xid\":");
            push_unsigned(bytes, u64::from(transaction.xid));
        }
        if self.timestamp {
            bytes.extend_from_slice(b",\"timestamp\":\"");
            bytes.extend_from_slice(transaction.timestamp);
            bytes.push(b'"');
        }
        if self.origin {
            bytes.extend_from_slice(b",\"origin\":");
            push_unsigned(bytes, u64::from(transaction.origin));
        }
    }

    fn put_boundary(&self, out: &mut Vec<u8>, action: u8, transaction: &TransactionText<'_>) {
        self.put_action(out, action, transaction.commit_lsn);
        if self.lsn {
            out.extend_from_slice(b",\"nextlsn\":");
            push_lsn(out, transaction.end_lsn);
        }
        out.push(b'}');
    }

    /// Version 2: appends the beginning of an object.
    fn put_action(&self, out: &mut Vec<u8>, action: u8, lsn: u64) {
        out.extend_from_slice(b"{\"action\":\"");
        out.extend_from_slice(&[action, b'"']);
        out.extend_from_slice(&self.transaction);
        if self.lsn {
            out.extend_from_slice(b",\"lsn\":");
            push_lsn(out, lsn);
        }
    }

    /// Version 1: appends the beginning of an object.
    fn open(&self, out: &mut Vec<u8>, transaction: Option<&TransactionText<'_>>) {
        let style = self.style;
        out.push(b'{');
        if let Some(transaction) = transaction {
            if self.xids {
                style.line(out, 1);
                style.key(out, "xid");
                push_unsigned(out, u64::from(transaction.xid));
                out.push(b',');
            }
            if self.lsn {
                style.line(out, 1);
                style.key(out, "nextlsn");
                push_lsn(out, transaction.end_lsn);
                out.push(b',');
            }
            if self.timestamp {
                style.line(out, 1);
                style.key(out, "timestamp");
                out.push(b'"');
                out.extend_from_slice(transaction.timestamp);
                out.extend_from_slice(b"\",");
            }
            if self.origin {
                style.line(out, 1);
                style.key(out, "origin");
                push_integer(out, i64::from(transaction.origin));
                out.push(b',');
            }
        }
        style.line(out, 1);
        style.key(out, "change");
        out.push(b'[');
    }

    fn close(&self, out: &mut Vec<u8>) {
        self.style.indent(out, 1);
        out.push(b']');
        self.style.line(out, 0);
        out.push(b'}');
    }

    /// Version 1: separates the parts of an object that are one message.
    fn separate(&self, out: &mut Vec<u8>) {
        if self.style.is_pretty() && !self.chunks {
            out.push(b'\n');
        }
    }

    /// Version 1: appends the beginning of a change.
    fn open_change(&mut self, out: &mut Vec<u8>, kind: &str) {
        self.separate(out);
        self.open_element(out, kind, self.changes > 0);
        self.changes += 1;
    }

    fn open_element(&self, out: &mut Vec<u8>, kind: &str, follows: bool) {
        let style = self.style;
        style.indent(out, 2);
        out.extend_from_slice(if follows { b",{" } else { b"{" });
        style.line(out, 3);
        style.key(out, "kind");
        out.push(b'"');
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(b"\",");
    }

    fn close_element(&self, out: &mut Vec<u8>) {
        self.style.line(out, 2);
        out.push(b'}');
    }

    /// Appends a row's change. `old`: the row before the change, if WAL has it.
    #[inline]
    pub fn change<I: Image>(
        &mut self,
        out: &mut Vec<u8>,
        layout: &Layout,
        kind: ChangeKind,
        lsn: u64,
        (old, new): (Option<&I>, Option<&I>),
    ) {
        match self.version {
            Version::One => self.open_change(out, kind.word()),
            Version::Two => self.put_action(out, kind.letter(), lsn),
        }
        layout.put_relation(out);
        if let (ChangeKind::Insert | ChangeKind::Update, Some(new)) = (kind, new) {
            let is_insert = kind == ChangeKind::Insert;
            layout.put_new(out, new, is_insert, &mut self.scratch);
        }
        if self.version == Version::One {
            layout.put_primary_key(out);
        }
        if kind != ChangeKind::Insert {
            match (old, new) {
                (Some(old), _) => layout.put_identity(out, old, true, &mut self.scratch),
                (None, Some(new)) => layout.put_identity(out, new, false, &mut self.scratch),
                (None, None) => {}
            }
        }
        match self.version {
            Version::One => self.close_element(out),
            Version::Two => {
                layout.put_primary_key(out);
                out.push(b'}');
            }
        }
    }

    /// Appends the truncate of one relation. Version 1 has none.
    pub fn truncate(&self, out: &mut Vec<u8>, layout: &Layout, lsn: u64) {
        self.put_action(out, b'T', lsn);
        layout.put_relation(out);
        out.push(b'}');
    }

    /// Appends a message. A non-transactional one is a separate object in version 1, too.
    pub fn message(&mut self, out: &mut Vec<u8>, message: &MessageText<'_>) {
        match (self.version, message.transactional) {
            (Version::One, true) => {
                self.open_change(out, "message");
                self.put_message_one(out, message);
            }
            (Version::One, false) => {
                self.open(out, None);
                self.separate_alone(out);
                self.open_element(out, "message", false);
                self.put_message_one(out, message);
                self.separate_alone(out);
                self.close(out);
            }
            (Version::Two, transactional) => {
                if !transactional {
                    self.forget_transaction();
                }
                self.put_action(out, b'M', message.lsn);
                out.push(b',');
                self.put_message(out, message);
                out.push(b'}');
            }
        }
    }

    /// A separate object is one message, even with `write-in-chunks`.
    fn separate_alone(&self, out: &mut Vec<u8>) {
        if self.style.is_pretty() {
            out.push(b'\n');
        }
    }

    fn forget_transaction(&mut self) {
        self.transaction.clear();
        for (on, null) in [
            (self.xids, &b",\"xid\":null"[..]),
            (self.timestamp, b",\"timestamp\":null"),
            (self.origin, b",\"origin\":null"),
        ] {
            if on {
                self.transaction.extend_from_slice(null);
            }
        }
    }

    fn put_message_one(&self, out: &mut Vec<u8>, message: &MessageText<'_>) {
        self.style.line(out, 3);
        self.put_message(out, message);
        self.close_element(out);
    }

    fn put_message(&self, out: &mut Vec<u8>, message: &MessageText<'_>) {
        let style = self.style;
        style.key(out, "transactional");
        out.extend_from_slice(if message.transactional {
            b"true,"
        } else {
            b"false,"
        });
        style.line(out, 3);
        style.key(out, "prefix");
        push_string(out, message.prefix);
        out.push(b',');
        style.line(out, 3);
        style.key(out, "content");
        push_string(out, message.content);
    }

    /// Ends a transaction: in version 1 the end of its object, in version 2 a separate object.
    pub fn commit(&mut self, out: &mut Vec<u8>, transaction: &TransactionText<'_>) {
        match self.version {
            Version::One => {
                self.separate(out);
                self.close(out);
            }
            Version::Two => self.put_boundary(out, b'C', transaction),
        }
    }
}

/// Appends an LSN like `"0/16B3748"`.
fn push_lsn(out: &mut Vec<u8>, lsn: u64) {
    use std::io::Write as _;
    // Writing to a Vec can't fail.
    let _ = write!(out, "\"{:X}/{:X}\"", lsn >> 32, lsn & 0xffff_ffff);
}

#[cfg(test)]
#[path = "document_tests.rs"]
mod tests;
