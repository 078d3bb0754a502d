//! The first failure of an applier. The leader reads and records it.

use std::cell::UnsafeCell;

use crate::sync::{AtomicU32, Ordering};

const TEXT: usize = 1000;
/// Message, detail, hint and context.
const TEXTS: usize = 4;

/// The first failure that an applier can't handle itself.
#[repr(C)]
#[derive(Debug)]
pub struct Failure {
    /// 0: none. 1: being written. 2: readable.
    pub(crate) state: AtomicU32,
    body: UnsafeCell<FailureBody>,
}

// SAFETY: `body` is written by the one process that moves `state` from 0 to 1, and read only after
// it moved it to 2.
unsafe impl Sync for Failure {}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct FailureBody {
    lsn: u64,
    sqlstate: [u8; 5],
    comes_again: bool,
    reason: u8,
    lengths: [u16; TEXTS],
    texts: [[u8; TEXT]; TEXTS],
}

/// A failure as the leader records it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FailureReport {
    /// End of the failed transaction's commit record at the provider; 0 if there was no
    /// transaction.
    pub lsn: u64,
    /// SQLSTATE: five characters.
    pub sqlstate: [u8; 5],
    /// The transaction is received once more, whatever the SQLSTATE says of other errors.
    pub comes_again: bool,
    /// A number for the reason of an error that is handled differently; 0 for none.
    pub reason: u8,
    /// Primary message, cut to 1,000 bytes.
    pub message: String,
    /// Detail, cut to 1,000 bytes; empty for none.
    pub detail: String,
    /// Hint, cut to 1,000 bytes; empty for none.
    pub hint: String,
    /// Context: lines, the innermost first; empty for none. If it is longer than 1,000 bytes, its
    /// beginning and its last line are kept.
    pub context: String,
}

fn cut(text: &str) -> &[u8] {
    let mut end = text.len().min(TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.as_bytes().get(..end).unwrap_or_default()
}

/// Returns a text of several lines in at most `limit` bytes: whole, or its beginning and last line.
#[must_use]
pub fn with_last_line(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let last = text.lines().next_back().unwrap_or_default();
    let room = limit.saturating_sub(last.len() + " ...\n".len());
    let mut end = room.min(text.len().saturating_sub(last.len()));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    match text.get(..end).map(str::trim_end) {
        Some(first) if !first.is_empty() => format!("{first} ...\n{last}"),
        _ => last.to_owned(),
    }
}

impl Failure {
    /// Reports a failure. Later failures are dropped: the first is the cause.
    pub fn report(&self, report: &FailureReport) {
        if self
            .state
            .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            return;
        }
        let mut body = FailureBody {
            lsn: report.lsn,
            sqlstate: report.sqlstate,
            comes_again: report.comes_again,
            reason: report.reason,
            lengths: [0; TEXTS],
            texts: [[0; TEXT]; TEXTS],
        };
        let context = with_last_line(&report.context, TEXT);
        let texts = [&report.message, &report.detail, &report.hint, &*context];
        for ((to, length), text) in body.texts.iter_mut().zip(&mut body.lengths).zip(texts) {
            let text = cut(text);
            for (to, from) in to.iter_mut().zip(text) {
                *to = *from;
            }
            *length = u16::try_from(text.len()).unwrap_or(0);
        }
        // SAFETY: this process moved `state` from 0 to 1, so nobody else writes, and nobody reads
        // before 2.
        unsafe { self.body.get().write(body) };
        self.state.store(2, Ordering::Release);
    }

    /// The failure, if one was reported.
    #[must_use]
    pub fn get(&self) -> Option<FailureReport> {
        if self.state.load(Ordering::Acquire) != 2 {
            return None;
        }
        // SAFETY: state 2 is final: the body does not change any more.
        let body = unsafe { *self.body.get() };
        let text = |index: usize| {
            let length = usize::from(body.lengths.get(index).copied().unwrap_or(0));
            let bytes = body.texts.get(index).and_then(|text| text.get(..length));
            String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
        };
        Some(FailureReport {
            lsn: body.lsn,
            sqlstate: body.sqlstate,
            comes_again: body.comes_again,
            reason: body.reason,
            message: text(0),
            detail: text(1),
            hint: text(2),
            context: text(3),
        })
    }
}
