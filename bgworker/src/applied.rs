//! Records which transactions are committed locally although earlier ones are not. Run by the
//! appliers and the leader if commits may overtake each other.
//!
//! The position that is stored with a commit is the low-water mark: all transactions that end up to
//! it were committed before. In the same commit each applier records what it has committed beyond
//! the mark, this commit included. The record replaces the applier's previous one. A crash keeps
//! some prefix of the local WAL. For each such prefix, the largest stored position and the last
//! records of all appliers name exactly the commits in it (I1). If no earlier transaction is
//! outstanding, a commit needs no record: its own end is the new mark.
//!
//! Transactions that follow each other at the provider are one range: from the start of the first
//! commit record to the end of the last one. No other commit record lies in between. A range also
//! covers transactions in between that other appliers have committed and published as done: their
//! commit records precede this one in the local WAL, like those up to the mark. A record has a
//! bounded number of ranges, so that its row stays small. If it is full, the applier waits until
//! the mark moves.

/// Start of the first commit record, and end of the last one, as LSNs of the provider.
pub type Range = (u64, u64);

/// Most ranges in a record: each has 16 bytes, and the row shall stay within a quarter of a page.
const MOST: usize = 100;

/// Transactions that follow each other and are committed as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committing {
    /// Sequence number of the first transaction.
    pub first: u64,
    /// Sequence number of the last transaction.
    pub last: u64,
    /// Start of the first commit record and end of the last one, as LSNs of the provider.
    pub range: Range,
}

/// Committed transactions that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    first: u64,
    last: u64,
    range: Range,
}

/// Transactions that an applier has committed beyond the low-water mark.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    /// Stretches of this run of the group, in the provider's order.
    stretches: Vec<Stretch>,
    /// Ranges of earlier runs, whose sequence numbers are not known any more.
    left: Vec<Range>,
}

/// Progress that is stored in the same transaction as a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The position to store.
    pub position: u64,
    /// Whether `applied` must be stored too.
    pub is_needed: bool,
    /// The applier's state once the commit has happened.
    pub applied: Applied,
}

impl Applied {
    /// Takes over the ranges of an earlier run of the group that end beyond `mark`.
    #[must_use]
    pub fn resume(ranges: impl IntoIterator<Item = Range>, mark: u64) -> Self {
        Self {
            stretches: Vec::new(),
            left: ranges.into_iter().filter(|(_, end)| *end > mark).collect(),
        }
    }

    /// Returns all ranges: first those of earlier runs, then those of this run.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range> {
        let own = self.stretches.iter().map(|stretch| stretch.range);
        self.left.iter().copied().chain(own).collect()
    }

    fn len(&self) -> usize {
        self.stretches.len() + self.left.len()
    }

    /// Returns a copy without the ranges that end at or before `position`.
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

    /// Merges neighbouring stretches if all transactions between them are committed, and drops
    /// older ranges that a stretch covers.
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

    /// Returns whether a commit that starts with transaction `first` does not fit into the record
    /// while the mark is at the position `mark`. `is_done` says which transactions are committed.
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

    /// Returns what to store with a commit when the mark is at (number, position). `is_done` says
    /// which other transactions are committed; each of these committed before this commit.
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

/// Transactions beyond the start position of the stream that the appliers have committed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AppliedAhead {
    /// Sorted; they do not overlap.
    ranges: Vec<Range>,
}

impl AppliedAhead {
    /// Collects the records of all appliers.
    #[must_use]
    pub fn new(ranges: impl IntoIterator<Item = Range>, mark: u64) -> Self {
        let mut notes = Applied::resume(ranges, mark).left;
        notes.sort_unstable();
        let mut ranges: Vec<Range> = Vec::with_capacity(notes.len());
        for (begin, end) in notes {
            // A range of an earlier run may lie within a later range that covers it.
            match ranges.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                _ => ranges.push((begin, end)),
            }
        }
        Self { ranges }
    }

    /// Returns whether the transaction whose commit record starts at `commit_lsn` is committed
    /// locally.
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

    /// Returns the number of ranges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns whether there is no range.
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
        // This commit is number 7. Others have committed 4 and 6, but not 8.
        let note = applied.note(committing(7, 7), mark, |n| n == 4 || n == 6);
        assert_eq!(note.applied.ranges(), [(30, 75), (90, 95)]);
        let note = note.applied.note(committing(8, 8), mark, nothing);
        assert_eq!(note.applied.ranges(), [(30, 95)]);
        // Ranges of an earlier run are dropped if a stretch covers them, and kept otherwise.
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
