//! Texts in shared memory. A process that reads or writes one holds the registry's lock, or accepts
//! a mixture of two.

use std::sync::atomic::{AtomicU32, Ordering};

const WORDS: usize = 128;

/// A text of at most 512 bytes.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Text {
    /// Bytes; 0: none.
    len: AtomicU32,
    words: [AtomicU32; WORDS],
}

impl Text {
    /// Keep `text` on one line: libpq breaks its messages for terminals.
    pub(super) fn store(&self, text: &str) {
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

    pub(super) fn load(&self) -> Option<String> {
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
