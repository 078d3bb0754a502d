//! Commits that overtake each other, and crashes between them: transactions in the local WAL are
//! exactly those that are not requested again.
//!
//! The local WAL is a list of commits; a crash keeps a prefix of it. Appliers read the mark,
//! commit, and mark their transactions as done in separate steps, with those of others in between.

use std::collections::{BTreeMap, BTreeSet};

use braid_bgworker::applied::{Applied, AppliedAhead, Committing, Note, Range};

use crate::random::{Budget, Random};

/// A transaction at the provider: start and end of its commit record.
type Source = (u64, u64);

struct Commit {
    /// The committed transactions, by the starts of their commit records.
    of: Vec<u64>,
    applier: usize,
    position: u64,
    note: Option<Vec<Range>>,
}

/// Returns the state after a crash: the position, and each applier's last record.
fn recover(wal: &[Commit]) -> (u64, BTreeMap<usize, Vec<Range>>) {
    let mut notes = BTreeMap::new();
    let mut position = 0;
    for commit in wal {
        position = position.max(commit.position);
        if let Some(note) = &commit.note {
            notes.insert(commit.applier, note.clone());
        }
    }
    (position, notes)
}

/// An applier, with its claimed transactions, and a commit that is not marked as done yet.
struct Applier {
    applied: Applied,
    taken: Vec<u64>,
    /// The record is made, the commit is to follow.
    about: Option<(Vec<u64>, Note)>,
    committed: Vec<u64>,
}

struct Run<'a> {
    /// Transactions of this run, by number less one.
    todo: Vec<Source>,
    start: u64,
    relaxed: bool,
    wal: &'a mut Vec<Commit>,
    /// Transactions that left no record.
    wrote_nothing: &'a mut BTreeSet<u64>,
    done: BTreeSet<u64>,
    mark: u64,
    claimed: u64,
    /// Transactions are put back at times, and any applier claims them again later.
    puts_aside: bool,
    aside: Vec<u64>,
}

impl Run<'_> {
    fn source(&self, sequence: u64) -> Source {
        self.todo[usize::try_from(sequence - 1).unwrap()]
    }

    fn mark(&self) -> (u64, u64) {
        match self.mark {
            0 => (0, self.start),
            mark => (mark, self.source(mark).1),
        }
    }

    fn step(&mut self, number: usize, applier: &mut Applier, random: &mut Random) {
        if !applier.committed.is_empty() {
            self.done.extend(applier.committed.drain(..));
            while self.done.remove(&(self.mark + 1)) {
                self.mark += 1;
            }
        } else if let Some((sequences, note)) = applier.about.take() {
            // A transaction that writes nothing leaves no commit record, unless `applied` is
            // stored.
            if note.is_needed || !random.one_in(10) {
                self.wal.push(Commit {
                    of: sequences.iter().map(|s| self.source(*s).0).collect(),
                    applier: number,
                    position: note.position,
                    note: note.is_needed.then(|| note.applied.ranges()),
                });
            } else {
                let of: Vec<u64> = sequences.iter().map(|s| self.source(*s).0).collect();
                self.wrote_nothing.extend(of);
            }
            applier.applied = note.applied;
            applier.committed = sequences;
        } else if applier.taken.is_empty() && !self.aside.is_empty() && random.one_in(4) {
            // The next transaction to commit must be claimed before long.
            let place = random.index(self.aside.len());
            applier.taken = vec![self.aside.swap_remove(place)];
        } else if applier.taken.is_empty() && self.puts_aside {
            if self.claimed < self.todo.len() as u64 {
                self.claimed += 1;
                if self.relaxed && random.one_in(3) {
                    self.aside.push(self.claimed);
                } else {
                    applier.taken = vec![self.claimed];
                }
            }
        } else if applier.taken.is_empty() {
            let free = self.todo.len() as u64 - self.claimed;
            let run = free.min(1 + random.below(5));
            applier.taken = (self.claimed + 1..=self.claimed + run).collect();
            self.claimed += run;
        } else {
            let count = if random.one_in(2) {
                1
            } else {
                applier.taken.len()
            };
            let (first, last) = (applier.taken[0], applier.taken[count - 1]);
            let commit = Committing {
                first,
                last,
                range: (self.source(first).0, self.source(last).1),
            };
            let note = if self.relaxed {
                let (mark, done) = (self.mark, &self.done);
                let is_done = |sequence| sequence <= mark || done.contains(&sequence);
                if applier.applied.is_full(first, self.mark().1, is_done) {
                    return;
                }
                let note = applier.applied.note(commit, self.mark(), is_done);
                assert!(note.applied.ranges().len() <= 100, "i9: a note is small");
                note
            } else if self.mark + 1 == first {
                Note {
                    position: commit.range.1,
                    is_needed: false,
                    applied: applier.applied.clone(),
                }
            } else {
                return;
            };
            applier.about = Some((applier.taken.drain(..count).collect(), note));
        }
    }
}

#[test]
fn i1_nothing_is_lost_or_repeated_when_commits_overtake_each_other() {
    let mut random = Random::new("i1_nothing_is_lost_or_repeated_when_commits_overtake_each_other");
    let mut budget = Budget::new();
    let (mut overtook, mut crashes) = (0, 0);
    while let Some(round) = budget.round(300) {
        let mut lsn = 50;
        let sources: Vec<Source> = (0..20 + random.below(200))
            .map(|_| {
                let begin = lsn + random.below(3) * 40;
                lsn = begin + 1 + random.below(60);
                (begin, lsn)
            })
            .collect();
        let mut wal: Vec<Commit> = Vec::new();
        let mut wrote_nothing = BTreeSet::new();
        loop {
            let (start, notes) = recover(&wal);
            let ahead = AppliedAhead::new(notes.values().flatten().copied(), start);
            let committed: BTreeSet<u64> = wal
                .iter()
                .flat_map(|commit| commit.of.iter().copied())
                .collect();
            let records: usize = wal.iter().map(|commit| commit.of.len()).sum();
            assert_eq!(
                committed.len(),
                records,
                "round {round}: something was applied twice"
            );
            let todo: Vec<Source> = sources
                .iter()
                .filter(|(begin, _)| *begin >= start && !ahead.contains(*begin))
                .copied()
                .collect();
            for (begin, end) in &sources {
                let sent = todo.contains(&(*begin, *end));
                assert!(
                    !(sent && committed.contains(begin)),
                    "round {round}: {begin} would be applied twice"
                );
            }
            for (begin, _) in sources.iter().filter(|(begin, _)| *begin < start) {
                assert!(
                    committed.contains(begin) || wrote_nothing.contains(begin),
                    "round {round}: {begin} is lost"
                );
            }
            overtook += usize::from(!ahead.is_empty());
            // Every transaction in a record was committed, or wrote nothing.
            for range in &ahead_ranges(&sources, &ahead, start) {
                assert!(
                    committed.contains(range) || wrote_nothing.contains(range),
                    "round {round}: {range} was not committed"
                );
            }
            if todo.is_empty() {
                break;
            }
            let appliers = 1 + random.index(5);
            let mut group: Vec<Applier> = (0..appliers)
                .map(|number| Applier {
                    applied: Applied::resume(
                        notes.get(&number).into_iter().flatten().copied(),
                        start,
                    ),
                    taken: Vec::new(),
                    about: None,
                    committed: Vec::new(),
                })
                .collect();
            let flushed = wal.len();
            let mut run = Run {
                start,
                relaxed: !random.one_in(4),
                puts_aside: random.one_in(2),
                aside: Vec::new(),
                wal: &mut wal,
                wrote_nothing: &mut wrote_nothing,
                done: BTreeSet::new(),
                mark: 0,
                claimed: 0,
                todo,
            };
            // A slow applier lets the others get far ahead.
            let slow = random.index(appliers);
            let steps = random.below(600);
            for _ in 0..steps {
                let number = random.index(appliers);
                if number != slow || random.one_in(30) {
                    run.step(number, &mut group[number], &mut random);
                }
            }
            if random.one_in(2) {
                crashes += 1;
                let kept = flushed + random.index(wal.len() - flushed + 1);
                wal.truncate(kept);
            }
        }
    }
    println!("{crashes} crashes, {overtook} restarts with transactions ahead of the mark");
    assert!(overtook > 100 && crashes > 100);
}

/// Returns the transactions beyond the position that count as committed.
fn ahead_ranges(sources: &[Source], ahead: &AppliedAhead, start: u64) -> Vec<u64> {
    sources
        .iter()
        .map(|(begin, _)| *begin)
        .filter(|begin| *begin >= start && ahead.contains(*begin))
        .collect()
}
