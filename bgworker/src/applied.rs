//! Which transactions are committed here although earlier ones are not. Run by the appliers and the leader where commits may
//! overtake each other.
//!
//! The position that is stored with a commit is the low-water mark: all transactions that end up to there were committed before.
//! In the same commit each applier writes down what it has committed beyond that mark, this commit included, in place of what it
//! wrote before. So whatever part of the local WAL a crash leaves: of what is in it, nothing is missing from the largest position
//! and the last notes of all appliers, and nothing else is in them (I1). A commit with nothing outstanding before it needs no note: its
//! own end is the mark then.
//!
//! Transactions that follow each other at the provider and are committed by one applier are one range, from where the commit record of the first starts
//! to where that of the last ends: no other commit record lies there. A note has a bounded number of ranges, so that it
//! stays a small row; whoever has no room for another waits for the mark.

/// A range: where the first commit record starts, and where the last one ends.
pub type Range = (u64, u64);

/// Ranges in a note at most: 16 bytes each, and the row is to stay within a quarter of a page.
const MOST: usize = 100;

/// What is committed as one: transactions that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committing {
    /// Number of the first.
    pub first: u64,
    /// Number of the last.
    pub last: u64,
    /// Where the first and the last commit record start and end at the provider.
    pub range: Range,
}

/// What an applier has committed beyond the low-water mark.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    ranges: Vec<Range>,
    /// Number of the transaction with which the last range ends; 0 when it is of another run of the group.
    last: u64,
}

/// What goes with a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The position to store.
    pub position: u64,
    /// Whether `applied` must be stored too.
    pub is_needed: bool,
    /// What is so once the commit has happened.
    pub applied: Applied,
}

impl Applied {
    /// What an earlier run of the group has left, beyond `mark`.
    #[must_use]
    pub fn resume(ranges: impl IntoIterator<Item = Range>, mark: u64) -> Self {
        Self {
            ranges: ranges.into_iter().filter(|(_, end)| *end > mark).collect(),
            last: 0,
        }
    }

    /// The ranges.
    #[must_use]
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Whether a commit of what starts with transaction `first` could not be noted while the mark is at the position `mark`.
    #[must_use]
    pub fn is_full(&self, first: u64, mark: u64) -> bool {
        self.ranges.len() >= MOST
            && !self.is_followed_by(first)
            && self.ranges.iter().filter(|(_, end)| *end > mark).count() >= MOST
    }

    fn is_followed_by(&self, first: u64) -> bool {
        self.last != 0 && self.last + 1 == first
    }

    /// What goes with a commit when the mark is (the number, the position).
    #[must_use]
    pub fn note(&self, commit: Committing, (number, position): (u64, u64)) -> Note {
        let (begin, end) = commit.range;
        if number + 1 >= commit.first {
            return Note {
                position: end,
                is_needed: false,
                applied: Self::resume(self.ranges.iter().copied(), end),
            };
        }
        let mut ranges = self.ranges.clone();
        match ranges.last_mut() {
            Some(last) if self.is_followed_by(commit.first) => last.1 = end,
            _ => ranges.push((begin, end)),
        }
        ranges.retain(|(_, end)| *end > position);
        Note {
            position,
            is_needed: true,
            applied: Self {
                ranges,
                last: commit.last,
            },
        }
    }
}

/// What all appliers have left beyond the position from which the stream goes on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AppliedAhead {
    /// Sorted; they do not overlap.
    ranges: Vec<Range>,
}

impl AppliedAhead {
    /// From the notes of all appliers.
    #[must_use]
    pub fn new(ranges: impl IntoIterator<Item = Range>, mark: u64) -> Self {
        let mut notes = Applied::resume(ranges, mark).ranges;
        notes.sort_unstable();
        let mut ranges: Vec<Range> = Vec::with_capacity(notes.len());
        for (begin, end) in notes {
            // One that was left by an earlier run may lie within one that was made around it.
            match ranges.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                _ => ranges.push((begin, end)),
            }
        }
        Self { ranges }
    }

    /// Whether a transaction is committed here whose commit record starts at `commit_lsn`.
    #[must_use]
    pub fn contains(&self, commit_lsn: u64) -> bool {
        let after = self
            .ranges
            .partition_point(|(begin, _)| *begin <= commit_lsn);
        after
            .checked_sub(1)
            .and_then(|last| self.ranges.get(last))
            .is_some_and(|(_, end)| commit_lsn < *end)
    }

    /// How many ranges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether nothing is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committing(first: u64, last: u64) -> Committing {
        Committing {
            first,
            last,
            range: (first * 10, last * 10 + 5),
        }
    }

    #[test]
    fn what_has_nothing_outstanding_before_it_needs_no_note() {
        let applied = Applied::resume([(100, 105), (200, 205)], 0);
        let note = applied.note(committing(11, 12), (10, 105));
        assert!(!note.is_needed);
        assert_eq!(note.position, 125);
        assert_eq!(note.applied.ranges(), [(200, 205)]);
    }

    #[test]
    fn transactions_that_follow_each_other_are_one_range() {
        let mark = (1, 15);
        let first = Applied::default().note(committing(3, 3), mark);
        assert!(first.is_needed);
        assert_eq!(first.position, 15);
        let second = first.applied.note(committing(4, 6), mark);
        assert_eq!(second.applied.ranges(), [(30, 65)]);
        let third = second.applied.note(committing(8, 8), (4, 45));
        assert_eq!(third.applied.ranges(), [(30, 65), (80, 85)]);
        assert_eq!(third.position, 45);
        let fourth = third.applied.note(committing(10, 10), (6, 65));
        assert_eq!(fourth.applied.ranges(), [(80, 85), (100, 105)]);
    }

    #[test]
    fn i9_a_note_has_so_many_ranges_and_no_more() {
        let mut applied = Applied::default();
        let mut number = 3;
        while !applied.is_full(number, 15) {
            applied = applied.note(committing(number, number), (1, 15)).applied;
            number += 2;
        }
        assert_eq!(applied.ranges().len(), MOST);
        assert!(
            !applied.is_full(number - 1, 15),
            "what follows the last one"
        );
        assert!(
            !applied.is_full(number, 35),
            "the first is not needed any more"
        );
    }

    #[test]
    fn what_was_left_is_found() {
        let ahead = AppliedAhead::new(
            [(200, 230), (20, 25), (190, 300), (100, 105), (105, 109)],
            25,
        );
        assert_eq!(ahead.ranges, [(100, 109), (190, 300)]);
        let found: Vec<u64> = (0..40)
            .map(|n| n * 10)
            .filter(|lsn| ahead.contains(*lsn))
            .collect();
        assert_eq!(
            found,
            [100, 190, 200, 210, 220, 230, 240, 250, 260, 270, 280, 290]
        );
        assert!(AppliedAhead::default().is_empty() && !AppliedAhead::default().contains(7));
    }
}
