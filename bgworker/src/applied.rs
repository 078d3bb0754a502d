//! Which transactions are committed here although earlier ones are not. Run by the appliers and the
//! leader where commits may overtake each other.
//!
//! The position that is stored with a commit is the low-water mark: all transactions that end up to
//! there were committed before. In the same commit each applier writes down what it has committed
//! beyond that mark, this commit included, in place of what it wrote before. So whatever part of
//! the local WAL a crash leaves: of what is in it, nothing is missing from the largest position and
//! the last notes of all appliers, and nothing else is in them (I1). A commit with nothing
//! outstanding before it needs no note: its own end is the mark then.
//!
//! Transactions that follow each other at the provider are one range, from where the commit record
//! of the first starts to where that of the last ends: no other commit record lies there. What
//! others have committed between an applier's own is part of the range once they have said so:
//! their commit records are before this one in the local WAL, as those up to the mark are. A note
//! has a bounded number of ranges, so that it stays a small row; whoever has no room for another
//! waits for the mark.

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

/// Transactions that follow each other, and are committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    first: u64,
    last: u64,
    range: Range,
}

/// What an applier has committed beyond the low-water mark.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    /// In this run of the group. In the provider's order.
    stretches: Vec<Stretch>,
    /// In earlier ones, whose numbers are not known any more.
    left: Vec<Range>,
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
            stretches: Vec::new(),
            left: ranges.into_iter().filter(|(_, end)| *end > mark).collect(),
        }
    }

    /// The ranges.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range> {
        let own = self.stretches.iter().map(|stretch| stretch.range);
        self.left.iter().copied().chain(own).collect()
    }

    fn len(&self) -> usize {
        self.stretches.len() + self.left.len()
    }

    /// The same without what ends up to a position.
    fn beyond(&self, position: u64) -> Self {
        let is_beyond = |range: &Range| range.1 > position;
        Self {
            stretches: self
                .stretches
                .iter()
                .filter(|stretch| is_beyond(&stretch.range))
                .copied()
                .collect(),
            left: self.left.iter().copied().filter(is_beyond).collect(),
        }
    }

    /// Make one of what has nothing between it that is not committed.
    fn join(&mut self, is_done: impl Fn(u64) -> bool) {
        self.stretches.dedup_by(|next, stretch| {
            let follows = (stretch.last + 1..next.first).all(&is_done);
            if follows {
                stretch.last = next.last;
                stretch.range.1 = next.range.1;
            }
            follows
        });
        let own = &self.stretches;
        self.left.retain(|(begin, end)| {
            !own.iter()
                .any(|stretch| stretch.range.0 <= *begin && *end <= stretch.range.1)
        });
    }

    /// Whether a commit of what starts with transaction `first` could not be noted while the mark
    /// is at the position `mark`. `is_done` says which transactions are committed.
    #[must_use]
    pub fn is_full(&self, first: u64, mark: u64, is_done: impl Fn(u64) -> bool) -> bool {
        if self.len() < MOST {
            return false;
        }
        let mut kept = self.beyond(mark);
        kept.join(&is_done);
        let before = kept.stretches.iter().rfind(|stretch| stretch.last < first);
        let is_next = before.is_some_and(|before| (before.last + 1..first).all(&is_done));
        kept.len() >= MOST && !is_next
    }

    /// What goes with a commit when the mark is (the number, the position). `is_done` says which
    /// other transactions are committed: whatever it says is so before this commit.
    #[must_use]
    pub fn note(
        &self,
        commit: Committing,
        (number, position): (u64, u64),
        is_done: impl Fn(u64) -> bool,
    ) -> Note {
        if number + 1 >= commit.first {
            let end = commit.range.1;
            return Note {
                position: end,
                is_needed: false,
                applied: self.beyond(end),
            };
        }
        let mut applied = self.beyond(position);
        let place = applied
            .stretches
            .partition_point(|stretch| stretch.first < commit.first);
        let stretch = Stretch {
            first: commit.first,
            last: commit.last,
            range: commit.range,
        };
        applied.stretches.insert(place, stretch);
        applied.join(is_done);
        Note {
            position,
            is_needed: true,
            applied,
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
        let mut notes = Applied::resume(ranges, mark).left;
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

    fn nothing(_: u64) -> bool {
        false
    }

    #[test]
    fn what_has_nothing_outstanding_before_it_needs_no_note() {
        let applied = Applied::resume([(100, 105), (200, 205)], 0);
        let note = applied.note(committing(11, 12), (10, 105), nothing);
        assert!(!note.is_needed);
        assert_eq!(note.position, 125);
        assert_eq!(note.applied.ranges(), [(200, 205)]);
    }

    #[test]
    fn transactions_that_follow_each_other_are_one_range() {
        let mark = (1, 15);
        let first = Applied::default().note(committing(3, 3), mark, nothing);
        assert!(first.is_needed);
        assert_eq!(first.position, 15);
        let second = first.applied.note(committing(4, 6), mark, nothing);
        assert_eq!(second.applied.ranges(), [(30, 65)]);
        let third = second.applied.note(committing(8, 8), (4, 45), nothing);
        assert_eq!(third.applied.ranges(), [(30, 65), (80, 85)]);
        assert_eq!(third.position, 45);
        let fourth = third.applied.note(committing(10, 10), (6, 65), nothing);
        assert_eq!(fourth.applied.ranges(), [(80, 85), (100, 105)]);
    }

    #[test]
    fn what_others_have_committed_in_between_is_part_of_the_range() {
        let mark = (1, 15);
        let mut applied = Applied::default();
        for number in [9, 3, 5] {
            applied = applied
                .note(committing(number, number), mark, nothing)
                .applied;
        }
        assert_eq!(applied.ranges(), [(30, 35), (50, 55), (90, 95)]);
        // Number 7 is committed now; 4 and 6 were by others, 8 is not.
        let note = applied.note(committing(7, 7), mark, |n| n == 4 || n == 6);
        assert_eq!(note.applied.ranges(), [(30, 75), (90, 95)]);
        let note = note.applied.note(committing(8, 8), mark, nothing);
        assert_eq!(note.applied.ranges(), [(30, 95)]);
        // What an earlier run has left is within it, or stays.
        let left = Applied {
            left: vec![(80, 85), (98, 99)],
            ..note.applied
        };
        let note = left.note(committing(12, 12), mark, nothing);
        assert_eq!(note.applied.ranges(), [(98, 99), (30, 95), (120, 125)]);
    }

    #[test]
    fn i9_a_note_has_so_many_ranges_and_no_more() {
        let mut applied = Applied::default();
        let mut number = 3;
        while !applied.is_full(number, 15, nothing) {
            applied = applied
                .note(committing(number, number), (1, 15), nothing)
                .applied;
            number += 2;
        }
        assert_eq!(applied.ranges().len(), MOST);
        assert!(
            !applied.is_full(number - 1, 15, nothing),
            "what follows the last one"
        );
        assert!(
            !applied.is_full(4, 15, nothing),
            "what follows one in the middle"
        );
        assert!(
            !applied.is_full(number, 35, nothing),
            "the first is not needed any more"
        );
        assert!(
            !applied.is_full(number, 15, |n| n == 4),
            "two are one since what was between them is committed"
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
