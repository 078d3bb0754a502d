//! Messages that wait in shared memory for one process: a ring of bytes.
//!
//! All bytes are read and written under the registry's lock, each for the time of one copy. A
//! message is its length (4 bytes, big-endian) and its bytes. If there is no room, it is lost.
//!
//! Not for: the senders' rights, and the contents of a message.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::registry::locked;

/// The ring. All atomics, so that zeroed memory is a valid one.
#[repr(C)]
pub(crate) struct Mail<const BYTES: usize> {
    /// Bytes that were ever put in, and taken out.
    written: AtomicU64,
    read: AtomicU64,
    bytes: [AtomicU8; BYTES],
}

impl<const BYTES: usize> Mail<BYTES> {
    fn cell(&self, at: u64) -> Option<&AtomicU8> {
        let place = usize::try_from(at % BYTES as u64).ok()?;
        self.bytes.get(place)
    }

    /// Takes all messages out.
    pub(crate) fn take(&self) -> Vec<Vec<u8>> {
        let bytes = locked(|| {
            let (read, written) = (
                self.read.load(Ordering::Relaxed),
                self.written.load(Ordering::Relaxed),
            );
            let bytes: Vec<u8> = (read..written)
                .filter_map(|at| self.cell(at))
                .map(|cell| cell.load(Ordering::Relaxed))
                .collect();
            self.read.store(written, Ordering::Relaxed);
            bytes
        });
        let mut rest = bytes.as_slice();
        let mut messages = Vec::new();
        while let Some((length, after)) = rest.split_first_chunk::<4>() {
            let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
            let Some((message, after)) = after.split_at_checked(length) else {
                break;
            };
            messages.push(message.to_vec());
            rest = after;
        }
        messages
    }

    /// Puts a message in. False if there is no room, so that it is lost.
    pub(crate) fn post(&self, message: &[u8]) -> bool {
        let Ok(length) = u32::try_from(message.len()) else {
            return false;
        };
        locked(|| {
            let (read, written) = (
                self.read.load(Ordering::Relaxed),
                self.written.load(Ordering::Relaxed),
            );
            let room = (BYTES as u64).saturating_sub(written.saturating_sub(read));
            if message.len() as u64 + 4 > room {
                return false;
            }
            let mut at = written;
            for byte in length.to_be_bytes().iter().chain(message) {
                if let Some(cell) = self.cell(at) {
                    cell.store(*byte, Ordering::Relaxed);
                }
                at += 1;
            }
            self.written.store(at, Ordering::Relaxed);
            true
        })
    }
}
