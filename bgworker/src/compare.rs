//! Comparing a table with the provider's: how it is cut into ranges, what of two looks at a row is
//! a difference, and what is written to mend one. Run by the session that calls `braid.compare` or
//! `braid.repair`; two processes never share anything of it.
//!
//! A range is so many rows in the order of the key. Each side says how many rows it has there and
//! the sum of their hashes. What differs is cut into smaller ranges, until the rows themselves are
//! worth listing. A row that differs in the lists may still be on its way from one side to the
//! other: it is a difference when it is found unchanged on both sides, and not equal, after each
//! side has come past what the other had written at the first look.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::conflict::Version;

/// Texts of a key's columns.
pub type Key = Vec<String>;

/// Rows that are listed one by one rather than cut any further.
pub const LISTED: u64 = 1_000;
/// Rows of the smallest range, where rows are large.
const SMALLEST: u64 = 50;
/// Rows of the largest range.
pub const LARGEST: u64 = 128_000;
/// Into how many a range is cut that differs.
const PARTS: u64 = 8;
/// A range is to take between these, so that no statement is long and round trips don't count.
const QUICK: Duration = Duration::from_millis(100);
const SLOW: Duration = Duration::from_millis(400);
/// Looks at a row that keeps changing before it is given up.
pub const LOOKS: u32 = 10;

/// How large ranges are, and how long to pause after each.
#[derive(Debug)]
pub struct Pace {
    rows: u64,
    per_second: Option<NonZeroU64>,
}

impl Pace {
    /// At most so many rows a second.
    #[must_use]
    pub fn new(per_second: Option<NonZeroU64>) -> Self {
        Self {
            rows: LISTED,
            per_second,
        }
    }

    /// Rows of the next range. With a limit it is no more than what a second allows.
    #[must_use]
    pub fn rows(&self) -> u64 {
        match self.per_second {
            Some(limit) => self.rows.min(limit.get()),
            None => self.rows,
        }
    }

    /// So many rows took so long. Gives how long to pause.
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

/// Keys behind `after`, up to and with `upto`; without these from the first, to the last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Range {
    /// The last key before it.
    pub after: Option<Key>,
    /// Its last key.
    pub upto: Option<Key>,
    /// It is read in pieces of this many rows; `None`: as the pace has it.
    pub rows: Option<u64>,
}

/// What one side has in a range.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sum {
    /// Rows.
    pub rows: u64,
    /// Sum of their hashes.
    pub hash: String,
    /// The key up to which these are, if there may be more behind it.
    pub last: Option<Key>,
}

/// What becomes of a range that both sides have read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Both have the same.
    Equal,
    /// It was cut, and its parts are to be read.
    Cut,
    /// Its rows are to be listed.
    List(Range),
}

/// The ranges that are still to be read.
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
    /// None.
    #[must_use]
    pub fn none() -> Self {
        Self { todo: Vec::new() }
    }

    /// The range to go on with.
    pub fn take(&mut self) -> Option<Range> {
        self.todo.pop()
    }

    /// Nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.todo.is_empty()
    }

    /// Put a range back, to be read in pieces of so many rows.
    pub fn again(&mut self, range: Range, rows: u64) {
        self.todo.push(Range {
            rows: Some(rows),
            ..range
        });
    }

    /// This side was asked for `asked` rows of `range`, of which `last` is the last one if there
    /// may be more. Gives the range that is to be compared; the rest is for later.
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

    /// How many rows the other side is asked for in a range of this side's.
    #[must_use]
    pub fn ask(range: &Range) -> u64 {
        range.rows.unwrap_or(LISTED).saturating_mul(2)
    }

    /// Both sides have answered for a range.
    pub fn compare(&mut self, range: Range, here: &Sum, there: &Sum) -> Outcome {
        if here.rows == there.rows && here.hash == there.hash {
            return Outcome::Equal;
        }
        let rows = range.rows.unwrap_or(LISTED);
        let range = match &there.last {
            // The other side has more than it was asked for: what lies behind is a range of its
            // own.
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

/// The keys whose rows differ between two lists of keys and hashes.
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

/// One side's row under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Hash of what is compared.
    pub hash: String,
    /// The transaction that wrote it, at that side.
    pub xid: String,
    /// Commit timestamp in microseconds since 1970 and name of the origin node, where they are
    /// known.
    pub version: Option<(i64, String)>,
}

impl Seen {
    /// Changes whenever the row does.
    #[must_use]
    pub fn state(&self) -> String {
        format!("{} {}", self.xid, self.hash)
    }
}

/// What both sides had under a key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sight {
    /// At this node.
    pub here: Option<Seen>,
    /// At the provider.
    pub there: Option<Seen>,
}

impl Sight {
    /// Both have the same row, or none.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.here.as_ref().map(|row| &row.hash) == self.there.as_ref().map(|row| &row.hash)
    }

    /// What it is if it is a difference.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match (&self.here, &self.there) {
            (None, _) => "missing_here",
            (Some(_), None) => "only_here",
            (Some(_), Some(_)) => "differs",
        }
    }
}

/// What is known of a row that was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is the same on both sides.
    Equal,
    /// It is not, and nothing is on its way.
    Differs,
    /// It moves: look again.
    Moves,
}

/// Two looks, between which each side has come past what the other had written at the first.
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

/// Who is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The provider.
    Provider,
    /// Whoever has the larger version.
    Newest,
}

/// What a repair does about a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// Write the provider's row, which is not here.
    Insert,
    /// Write the provider's row over the one that is here.
    Update,
    /// Remove the row that is here.
    Delete,
    /// Nothing, for this reason.
    Keep(&'static str),
}

/// What a repair does about what both sides have.
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

/// As it compares with others.
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
