//! The last writer of each key, in fixed memory: a set-associative table of cache lines.
//!
//! A key's hash chooses a line and a tag in it; the line has room for seven keys. The entry of a
//! committed transaction may be overwritten. If all seven writers still wait, the oldest entry is
//! forgotten. The line then keeps the number of the latest transaction of which it has forgotten a
//! key. A transaction that does not find its key in the line waits for everything up to that
//! number. So a full table costs waiting, first for the few that share a line, but never breaks the
//! order.
//!
//! Numbers are stored as their low 32 bits and read relative to the current transaction. A writer
//! that is more than 2^32 behind may look like a waiting one: that adds an edge, and never loses
//! one.

/// Keys in a line.
const WAYS: usize = 7;

/// As many tags as writers. The last tag is not used; the last writer is the latest forgotten one.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(64))]
struct Line {
    tags: [u32; WAYS + 1],
    writers: [u32; WAYS + 1],
}

/// The last writer of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// No waiting transaction.
    None,
    /// Exactly this transaction.
    Known(u64),
    /// Unknown, but not later than this transaction.
    UpTo(u64),
}

/// The table. Line and tag come from different bits of a hash.
#[derive(Debug)]
pub struct RecentWriters {
    lines: Vec<Line>,
    mask: usize,
    current: u64,
    /// Low 32 bits of `current`.
    now: u32,
    /// Age of the youngest writer that counts as committed.
    window: u32,
    forgotten: u64,
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
fn low(number: u64) -> u32 {
    number as u32
}

impl RecentWriters {
    /// Largest distance between a transaction and the last committed one.
    pub const WINDOW: u64 = 1 << 31;

    /// Returns a table for `capacity` keys.
    pub fn new(capacity: usize) -> Self {
        // The upper half of a hash chooses the line.
        let lines = capacity.div_ceil(WAYS).next_power_of_two().min(1 << 31);
        Self {
            lines: vec![Line::default(); lines],
            mask: lines - 1,
            current: 0,
            now: 0,
            window: 0,
            forgotten: 0,
        }
    }

    /// Sets the writer of the following keys; writers up to `horizon` do not matter.
    pub fn start(&mut self, current: u64, horizon: u64) {
        self.current = current;
        self.now = low(current);
        self.window = u32::try_from(current.saturating_sub(horizon)).unwrap_or(u32::MAX);
    }

    /// Returns the last writer of a key, and makes `current` the new one.
    #[inline]
    pub fn replace(&mut self, key: u64) -> Writer {
        let (now, window) = (self.now, self.window);
        let tag = low(key);
        let place = usize::try_from(key >> 32).unwrap_or(0) & self.mask;
        let Some(line) = self.lines.get_mut(place) else {
            return Writer::None;
        };
        let waits = |age: u32| age != 0 && age < window;
        let found = line.tags.iter().take(WAYS).position(|has| *has == tag);
        if let Some(writer) = found.and_then(|lane| line.writers.get_mut(lane)) {
            let age = now.wrapping_sub(std::mem::replace(writer, now));
            return if waits(age) {
                Writer::Known(self.current - u64::from(age))
            } else {
                Writer::None
            };
        }
        let [writers @ .., latest_forgotten] = &mut line.writers;
        let age_of_forgotten = now.wrapping_sub(*latest_forgotten);
        let mut oldest = (0, 0);
        for (lane, writer) in writers.iter().enumerate() {
            oldest = oldest.max((now.wrapping_sub(*writer), lane));
        }
        let (age, lane) = oldest;
        if age < window {
            // All seven writers wait, or are the current transaction itself. In that case it
            // already has an edge to the latest forgotten writer, and a transaction that waits for
            // it waits for that writer too.
            self.forgotten += 1;
            *latest_forgotten = if age_of_forgotten < window {
                now.wrapping_sub(age.min(age_of_forgotten))
            } else {
                now.wrapping_sub(age)
            };
        }
        if let (Some(has), Some(writer)) = (line.tags.get_mut(lane), writers.get_mut(lane)) {
            (*has, *writer) = (tag, now);
        }
        if waits(age_of_forgotten) {
            Writer::UpTo(self.current - u64::from(age_of_forgotten))
        } else {
            Writer::None
        }
    }

    /// Returns how many keys of waiting transactions were forgotten.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that share a line.
    fn key(tag: u64) -> u64 {
        (5 << 32) | tag
    }

    #[test]
    fn the_last_writer_is_known_while_it_waits() {
        let mut table = RecentWriters::new(100);
        table.start(3, 0);
        assert_eq!(table.replace(key(1)), Writer::None);
        assert_eq!(table.replace(key(1)), Writer::None, "its own");
        table.start(9, 2);
        assert_eq!(table.replace(key(1)), Writer::Known(3));
        table.start(12, 9);
        assert_eq!(table.replace(key(1)), Writer::None, "9 is committed");
    }

    #[test]
    fn committed_writers_make_room() {
        let mut table = RecentWriters::new(1);
        for current in 1..1000 {
            table.start(current, current.saturating_sub(7));
            assert_eq!(table.replace(key(current)), Writer::None);
        }
        assert_eq!(table.forgotten(), 0);
    }

    #[test]
    fn the_eighth_key_of_a_line_makes_the_first_one_stand_for_all_before() {
        let mut table = RecentWriters::new(1);
        for current in 1..=8 {
            table.start(current, 0);
            assert_eq!(table.replace(key(current)), Writer::None);
        }
        assert_eq!(table.forgotten(), 1);
        table.start(9, 0);
        assert_eq!(table.replace(key(5)), Writer::Known(5));
        assert_eq!(table.replace(key(1)), Writer::UpTo(1));
        // Key 2 was forgotten to make room for key 1.
        table.start(10, 0);
        assert_eq!(table.replace(key(2)), Writer::UpTo(2));
        assert_eq!(table.replace(key(1)), Writer::Known(9));
    }

    #[test]
    fn what_was_forgotten_stays_known_when_a_transaction_fills_its_line_with_its_own() {
        let mut table = RecentWriters::new(1);
        table.start(1, 0);
        table.replace(key(1));
        table.start(2, 0);
        let met: Vec<Writer> = (100..120).map(|tag| table.replace(key(tag))).collect();
        assert!(met.contains(&Writer::UpTo(1)), "2 comes after 1");
        table.start(3, 0);
        assert_eq!(table.replace(key(1)), Writer::UpTo(2), "3 after 2");
    }

    #[test]
    fn numbers_go_past_32_bits() {
        let mut table = RecentWriters::new(100);
        let base = (7 << 32) - 3;
        for current in base..base + 6 {
            table.start(current, current - 2);
            let before = table.replace(key(1));
            if current > base {
                assert_eq!(before, Writer::Known(current - 1));
            }
        }
    }
}
