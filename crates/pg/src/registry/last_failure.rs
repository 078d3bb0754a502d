//! The last failure of a subscription's workers, whole, for the views: one that may pass is nowhere else.
//!
//! Written by the leader and the manager, read by any backend; both hold the registry's lock, so that a failure is read as it was
//! written. Texts are cut to 512 bytes.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use super::{locked, now};
use crate::error::PgError;

const WORDS: usize = 128;

/// A text of at most 512 bytes.
#[repr(C)]
#[derive(Debug)]
struct Text {
    /// Bytes; 0: none.
    len: AtomicU32,
    words: [AtomicU32; WORDS],
}

impl Text {
    /// Keep `text` on one line: libpq breaks its messages for terminals.
    fn store(&self, text: &str) {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut end = line.len().min(WORDS * 4);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        let words = line.as_bytes().get(..end).unwrap_or_default().chunks(4);
        for (place, chunk) in self.words.iter().zip(words) {
            let mut word = [0_u8; 4];
            for (to, from) in word.iter_mut().zip(chunk) {
                *to = *from;
            }
            place.store(u32::from_ne_bytes(word), Ordering::Relaxed);
        }
        let len = u32::try_from(end).unwrap_or(0);
        self.len.store(len, Ordering::Relaxed);
    }

    fn load(&self) -> Option<String> {
        let len = usize::try_from(self.len.load(Ordering::Relaxed)).unwrap_or(0);
        if len == 0 {
            return None;
        }
        let bytes: Vec<u8> = self
            .words
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
            .take(len)
            .collect();
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Where it is kept.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LastFailure {
    /// TimestampTz; 0: there is none.
    at: AtomicI64,
    /// End of the transaction that failed; 0 for none.
    lsn: AtomicU64,
    sqlstate: Text,
    message: Text,
    detail: Text,
    hint: Text,
}

/// A failure as it was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedFailure {
    /// What it was.
    pub error: PgError,
    /// End of the transaction that failed, in the provider's WAL; 0 for none.
    pub lsn: u64,
    /// When (TimestampTz).
    pub at: i64,
}

impl LastFailure {
    pub(super) fn record(&self, error: &PgError, lsn: u64) {
        locked(|| {
            self.sqlstate.store(&error.sqlstate);
            self.message.store(&error.message);
            self.detail.store(error.detail.as_deref().unwrap_or(""));
            self.hint.store(error.hint.as_deref().unwrap_or(""));
            self.lsn.store(lsn, Ordering::Relaxed);
            self.at.store(now(), Ordering::Relaxed);
        });
    }

    /// Forget it. Also without the lock, by whoever owns the whole entry.
    pub(super) fn clear(&self) {
        self.at.store(0, Ordering::Relaxed);
    }

    pub(super) fn is_there(&self) -> bool {
        self.at.load(Ordering::Relaxed) != 0
    }

    pub(super) fn get(&self) -> Option<RecordedFailure> {
        locked(|| {
            let at = self.at.load(Ordering::Relaxed);
            (at != 0).then(|| RecordedFailure {
                error: PgError {
                    sqlstate: self.sqlstate.load().unwrap_or_default(),
                    message: self.message.load().unwrap_or_default(),
                    detail: self.detail.load(),
                    hint: self.hint.load(),
                },
                lsn: self.lsn.load(Ordering::Relaxed),
                at,
            })
        })
    }
}
