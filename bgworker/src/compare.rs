//! Comparing a table with the provider's: how it is divided into ranges, which rows count as
//! different, and what is written to repair one. Run by the session that calls `braid.compare` or
//! `braid.repair`; the state is never shared between processes.
//!
//! A range is a number of rows in the order of the key. For each range, both sides report how many
//! rows they have and the sum of the rows' hashes. Ranges that differ are divided into smaller
//! ones, until they are small enough to list the rows. A listed row that differs may only be late:
//! its change has not been replicated yet. So each such row is read twice. Between the two reads,
//! each side must have applied everything that the other side had written at the first read. The
//! row counts as different if it is unchanged on both sides and still unequal.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::conflict::Version;

/// Values of a key's columns, as text.
pub type Key = Vec<String>;

/// Largest range whose rows are listed one by one instead of being divided further.
pub const LISTED: u64 = 1_000;
/// Rows of the smallest range, if rows are large.
const SMALLEST: u64 = 50;
/// Rows of the largest range.
pub const LARGEST: u64 = 128_000;
/// Number of parts that a differing range is divided into.
const PARTS: u64 = 8;
/// Target time of a range: no statement is long, and round trips hardly count.
const QUICK: Duration = Duration::from_millis(100);
const SLOW: Duration = Duration::from_millis(400);
/// Reads of a row that keeps changing before it is given up.
pub const LOOKS: u32 = 10;

/// Size of the ranges, and the pause after each.
#[derive(Debug)]
pub struct Pace {
    rows: u64,
    per_second: Option<NonZeroU64>,
}

impl Pace {
    /// Starts with the default size; `per_second` limits the rows per second.
    #[must_use]
    pub fn new(per_second: Option<NonZeroU64>) -> Self {
        Self {
            rows: LISTED,
            per_second,
        }
    }

    /// Returns the rows of the next range: with a limit, at most those of one second.
    #[must_use]
    pub fn rows(&self) -> u64 {
        match self.per_second {
            Some(limit) => self.rows.min(limit.get()),
            None => self.rows,
        }
    }

    /// Adapts the size after a range of `rows` rows took `time`. Returns how long to pause.
    pub fn took(&mut self, rows: u64, time: Duration) -> Duration {
        if time > SLOW {
            self.rows = (self.rows / 2).max(SMALLEST);
        } else if time < QUICK && rows >= self.rows {
            self.rows = (self.rows * 2).min(LARGEST);
        }
        match self.per_second {
            Some(limit) => {
                let micros = rows.saturating_mul(1_000_000) / limit;
                Duration::from_micros(micros).saturating_sub(time)
            }
            None => Duration::ZERO,
        }
    }
}

/// Keys behind `after`, up to and including `upto`. `None` leaves that end open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Range {
    /// The last key before the range.
    pub after: Option<Key>,
    /// The last key of the range.
    pub upto: Option<Key>,
    /// Rows of the parts in which the range is read; `None`: the size that the pace gives.
    pub rows: Option<u64>,
}

/// One side's answer for a range.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sum {
    /// Number of rows.
    pub rows: u64,
    /// Sum of the rows' hashes.
    pub hash: String,
    /// Last key that the answer covers, if there may be more rows behind it.
    pub last: Option<Key>,
}

/// Result of comparing a range that both sides have read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Both sides have the same rows.
    Equal,
    /// The range was divided, and its parts are still to be read.
    Cut,
    /// The rows of this range are to be listed.
    List(Range),
}

/// Ranges that are still to be read.
#[derive(Debug)]
pub struct Ranges {
    todo: Vec<Range>,
}

impl Default for Ranges {
    fn default() -> Self {
        Self {
            todo: vec![Range::default()],
        }
    }
}

impl Ranges {
    /// Returns an empty set of ranges.
    #[must_use]
    pub fn none() -> Self {
        Self { todo: Vec::new() }
    }

    /// Returns the range to read next.
    pub fn take(&mut self) -> Option<Range> {
        self.todo.pop()
    }

    /// Returns whether nothing is left to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.todo.is_empty()
    }

    /// Adds a range again, to be read in parts of `rows` rows.
    pub fn again(&mut self, range: Range, rows: u64) {
        self.todo.push(Range {
            rows: Some(rows),
            ..range
        });
    }

    /// Takes the local answer for `range`: `asked` rows were requested, and `last` is the last one
    /// if there may be more. Returns the range to compare; the rest is kept for later.
    pub fn cut(&mut self, range: Range, asked: u64, last: Option<&Key>) -> Range {
        let rows = Some(asked);
        match last {
            Some(last) if range.upto.as_ref() != Some(last) => {
                self.todo.push(Range {
                    after: Some(last.clone()),
                    upto: range.upto,
                    rows: range.rows,
                });
                Range {
                    after: range.after,
                    upto: Some(last.clone()),
                    rows,
                }
            }
            _ => Range { rows, ..range },
        }
    }

    /// Returns how many rows to request from the provider for a local range.
    #[must_use]
    pub fn ask(range: &Range) -> u64 {
        range.rows.unwrap_or(LISTED).saturating_mul(2)
    }

    /// Compares both sides' answers for a range.
    pub fn compare(&mut self, range: Range, here: &Sum, there: &Sum) -> Outcome {
        if here.rows == there.rows && here.hash == there.hash {
            return Outcome::Equal;
        }
        let rows = range.rows.unwrap_or(LISTED);
        let range = match &there.last {
            // The provider has more rows than were requested: the rest becomes a range of its own.
            Some(last) if range.upto.as_ref() != Some(last) => {
                self.todo.push(Range {
                    after: Some(last.clone()),
                    ..range.clone()
                });
                Range {
                    upto: Some(last.clone()),
                    ..range
                }
            }
            _ => range,
        };
        if rows <= LISTED {
            return Outcome::List(range);
        }
        self.again(range, (rows / PARTS).max(LISTED));
        Outcome::Cut
    }
}

/// Returns the keys whose rows differ between two lists of keys and hashes.
#[must_use]
pub fn differing(here: Vec<(Key, String)>, there: Vec<(Key, String)>) -> Vec<Key> {
    let mut known: HashMap<Key, String> = here.into_iter().collect();
    let mut keys = Vec::new();
    for (key, hash) in there {
        if known.remove(&key).as_ref() != Some(&hash) {
            keys.push(key);
        }
    }
    keys.extend(known.into_keys());
    keys
}

/// One side's row for a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Hash of the compared columns.
    pub hash: String,
    /// Transaction on that side that wrote the row.
    pub xid: String,
    /// Commit timestamp in microseconds since 1970 and name of the origin node, if they are known.
    pub version: Option<(i64, String)>,
}

impl Seen {
    /// Returns a text that changes whenever the row changes.
    #[must_use]
    pub fn state(&self) -> String {
        format!("{} {}", self.xid, self.hash)
    }
}

/// Both sides' rows for one key, from one read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sight {
    /// The local row.
    pub here: Option<Seen>,
    /// The provider's row.
    pub there: Option<Seen>,
}

impl Sight {
    /// Returns whether both sides have the same row, or none.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.here.as_ref().map(|row| &row.hash) == self.there.as_ref().map(|row| &row.hash)
    }

    /// Returns the kind of difference, for the result of `braid.compare`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match (&self.here, &self.there) {
            (None, _) => "missing_here",
            (Some(_), None) => "only_here",
            (Some(_), Some(_)) => "differs",
        }
    }
}

/// Result of reading a row twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The row is the same on both sides.
    Equal,
    /// The row differs, and no change of it is being replicated.
    Differs,
    /// The row changed in between: read it again.
    Moves,
}

/// Judges two reads. Between them each side applied what the other had written at the first read.
#[must_use]
pub fn verdict(before: &Sight, now: &Sight) -> Verdict {
    if now.is_equal() {
        Verdict::Equal
    } else if now == before {
        Verdict::Differs
    } else {
        Verdict::Moves
    }
}

/// The side whose row a repair takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The provider.
    Provider,
    /// The side with the larger version.
    Newest,
}

/// Action of a repair for one difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// Insert the provider's row, which is missing locally.
    Insert,
    /// Overwrite the local row with the provider's.
    Update,
    /// Delete the local row.
    Delete,
    /// Do nothing, for this reason.
    Keep(&'static str),
}

/// Returns the action for one key, given both sides' rows.
#[must_use]
pub fn repair(side: Side, sight: &Sight) -> Repair {
    let version = |row: &Seen| row.version.clone();
    match (&sight.here, &sight.there, side) {
        (None, None, _) => Repair::Keep("no row any more"),
        (None, Some(_), _) => Repair::Insert,
        (Some(_), None, Side::Provider) => Repair::Delete,
        (Some(_), Some(_), Side::Provider) => Repair::Update,
        (Some(_), None, Side::Newest) => Repair::Keep("only here: to be repaired at the provider"),
        (Some(here), Some(there), Side::Newest) => match (version(here), version(there)) {
            (None, None) => Repair::Keep("neither version is known: say which side is right"),
            (None, Some(_)) => Repair::Update,
            (Some(_), None) => Repair::Keep("newer here: to be repaired at the provider"),
            (Some(here), Some(there)) => match as_version(&there).cmp(&as_version(&here)) {
                std::cmp::Ordering::Greater => Repair::Update,
                std::cmp::Ordering::Less => {
                    Repair::Keep("newer here: to be repaired at the provider")
                }
                std::cmp::Ordering::Equal => {
                    Repair::Keep("both are the same version: say which side is right")
                }
            },
        },
    }
}

/// Converts a version to the type that compares.
#[must_use]
pub fn as_version((timestamp, origin): &(i64, String)) -> Version<'_> {
    Version {
        timestamp: *timestamp,
        origin,
    }
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
