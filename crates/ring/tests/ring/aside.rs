//! Wait lists: any interleaving of claiming, committing and failing has the result of applying one
//! transaction after the other.

use std::collections::{BTreeMap, BTreeSet};

use braid_ring::{Awaited, Complete, EDGES, Geometry, Leader, Ring};

use crate::memory::{Memory, Random, ring};

/// A transaction: the keys that it writes, in this order. If it is a barrier, all before it must be
/// committed first.
#[derive(Debug, Clone)]
struct Work {
    keys: Vec<u64>,
    barrier: bool,
}

/// A value for each key. It depends on the order of the key's changes.
type Database = BTreeMap<u64, u64>;

fn apply(database: &mut Database, sequence: u64, work: &Work) {
    for key in &work.keys {
        let value = database.entry(*key).or_default();
        *value = value.wrapping_mul(31).wrapping_add(sequence);
    }
}

fn history(random: &mut Random, count: usize, keys: u64) -> Vec<Work> {
    (0..count)
        .map(|_| Work {
            keys: (0..=random.index(3))
                .map(|_| random.next() % keys)
                .collect(),
            barrier: random.index(25) == 0,
        })
        .collect()
}

/// The leader's tracker: the last writer of each key.
#[derive(Default)]
struct Tracker {
    last: BTreeMap<u64, u64>,
    barrier: u64,
}

impl Tracker {
    /// Keeps up to `most` single edges. If there are more, depends on all up to the newest of the
    /// others.
    fn edges(&mut self, sequence: u64, work: &Work, most: usize) -> Complete {
        let mut all: Vec<u64> = work
            .keys
            .iter()
            .filter_map(|key| self.last.insert(*key, sequence))
            .filter(|edge| *edge != sequence)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .rev()
            .collect();
        let mut through = self.barrier;
        if work.barrier {
            self.barrier = sequence;
            through = sequence - 1;
        }
        all.retain(|edge| *edge > through);
        if all.len() > most {
            through = through.max(all[most]);
            all.truncate(most);
        }
        let mut edges = [0; EDGES];
        for (to, from) in edges.iter_mut().zip(&all) {
            *to = *from;
        }
        Complete {
            depends_on: through.max(edges[0]),
            through,
            edges,
            end_lsn: sequence,
            changes: 1,
            ..Complete::default()
        }
    }
}

struct Replay<'a> {
    ring: Ring,
    leader: Leader,
    history: &'a [Work],
    database: Database,
    taken: Vec<(usize, u64)>,
    applied: BTreeSet<u64>,
    failed: BTreeSet<u64>,
}

impl Replay<'_> {
    /// An applier takes a transaction that can be applied, if there is one.
    fn take(&mut self, applier: usize) -> bool {
        let Some(sequence) = self.ring.take(applier) else {
            return false;
        };
        let (through, edges) = self.ring.transaction(sequence).needs(sequence);
        let missing = (1..=through)
            .chain(edges)
            .find(|needed| *needed != 0 && !self.applied.contains(needed));
        assert_eq!(missing, None, "{sequence} was taken without what it needs");
        assert!(
            !self.applied.contains(&sequence)
                && self.taken.iter().all(|(_, other)| *other != sequence),
            "{sequence} was taken twice"
        );
        self.taken.push((applier, sequence));
        true
    }

    /// Goes on with the taken transaction at `place`: it fails, is released, or commits.
    fn go_on(&mut self, place: usize, random: &mut Random) {
        let (applier, sequence) = self.taken[place];
        self.taken.swap_remove(place);
        if random.index(12) == 0 && self.failed.insert(sequence) {
            // It was rolled back. It waits for all before it, or is tried again at once.
            let careful = random.index(2) == 0;
            let alone = self.ring.committed() + 1 == sequence;
            let aside = self.ring.put_aside_until_turn(applier, sequence, careful);
            assert_eq!(aside, !alone);
            let transaction = self.ring.transaction(sequence);
            assert!(transaction.is_tried() && transaction.is_careful() == careful);
            if aside {
                return;
            }
        } else if random.index(20) == 0 {
            self.ring.give_back(applier, sequence);
            assert!(self.ring.is_ready(sequence));
            return;
        }
        if self.failed.contains(&sequence) {
            assert_eq!(self.ring.committed() + 1, sequence, "it is its turn");
        }
        let work = &self.history[usize::try_from(sequence - 1).unwrap()];
        apply(&mut self.database, sequence, work);
        assert!(self.applied.insert(sequence));
        let _ = self.ring.commit(applier, sequence, sequence, 0);
        while self.leader_collected() < self.ring.committed() {}
    }

    fn leader_collected(&mut self) -> u64 {
        let committed = self.ring.committed();
        let (end, _, _) = self.leader.committed_at(committed);
        assert_eq!(end, committed);
        committed
    }
}

fn replay(random: &mut Random, geometry: Geometry, history: &[Work]) -> (Database, u64) {
    let (memory, leader): (Memory, Leader) = ring(geometry);
    leader.ring().relax(0);
    let mut replay = Replay {
        ring: memory.attach().unwrap(),
        leader,
        history,
        database: Database::new(),
        taken: Vec::new(),
        applied: BTreeSet::new(),
        failed: BTreeSet::new(),
    };
    let mut tracker = Tracker::default();
    let mut published = 0;
    let mut most_ahead = 0;
    // One applier keeps its transaction for long, as if it waited for a lock.
    let slow = random.index(geometry.appliers);
    let edges = random.index(EDGES + 1);
    while replay.ring.committed() < history.len() as u64 {
        let mut moved = false;
        if published < history.len() as u64 && replay.leader.has_descriptor() {
            moved = true;
            if random.index(2) == 0 {
                published += 1;
                let work = &history[usize::try_from(published - 1).unwrap()];
                let complete = tracker.edges(published, work, edges);
                assert_eq!(replay.leader.publish(&complete), published);
            }
        }
        for applier in 0..geometry.appliers {
            let in_hand = replay.taken.iter().position(|(by, _)| *by == applier);
            match in_hand {
                None => moved |= replay.take(applier),
                Some(place) if applier != slow || random.index(60) == 0 => {
                    moved = true;
                    if random.index(2) == 0 {
                        replay.go_on(place, random);
                    }
                }
                Some(_) => moved = true,
            }
            let furthest = replay.applied.last().copied().unwrap_or(0);
            most_ahead = most_ahead.max(furthest.saturating_sub(replay.ring.committed()));
        }
        // No applier has a transaction, and none will come: then one can be taken.
        assert!(
            moved,
            "nothing moves: {} committed, {} claimed, {} published, {} wait",
            replay.ring.committed(),
            replay.ring.claimed(),
            replay.ring.published(),
            replay.ring.waiting_aside()
        );
    }
    assert_eq!(replay.ring.waiting_aside(), 0);
    assert_eq!(replay.ring.take(0), None);
    (replay.database, most_ahead)
}

#[test]
fn i1_any_interleaving_with_what_is_put_aside_is_serial_replay() {
    let mut random = Random::new("i1_any_interleaving_with_what_is_put_aside_is_serial_replay");
    let mut furthest = 0;
    for round in 0..300 {
        let keys = [2, 10, 50, 1000][round % 4];
        let history = history(&mut random, 300, keys);
        let mut serial = Database::new();
        for (sequence, work) in (1..).zip(&history) {
            apply(&mut serial, sequence, work);
        }
        let appliers = 1 + random.index(6);
        let descriptors = [16, 64, 256][random.index(3)];
        let geometry = Geometry::new(appliers, 0, descriptors);
        let (database, ahead) = replay(&mut random, geometry, &history);
        assert!(
            database == serial,
            "round {round}: not what serial replay gives"
        );
        furthest = furthest.max(ahead);
    }
    // Many times the number of appliers. With 24 seeds it was 82 to 162.
    assert!(furthest > 30, "some were far ahead: {furthest}");
}

/// One applier keeps the first transaction, and all that depend on it are on its wait list. The
/// other applier gets to all independent ones. Once the first is committed, the waiting ones are
/// taken before new ones, the oldest first.
#[test]
fn one_applier_of_two_gets_past_all_that_waits() {
    let (_memory, mut leader) = ring(Geometry::new(2, 0, 64));
    let ring = leader.ring();
    ring.relax(0);
    for sequence in 1..=40 {
        let mut edges = [0; EDGES];
        edges[0] = if sequence > 1 && sequence % 4 == 0 {
            1
        } else {
            0
        };
        leader.publish(&Complete {
            edges,
            end_lsn: sequence,
            ..Complete::default()
        });
    }
    assert_eq!(ring.take(0), Some(1));
    let mut others = Vec::new();
    while let Some(sequence) = ring.take(1) {
        others.push(sequence);
        let _ = ring.commit(1, sequence, sequence, 0);
    }
    assert_eq!(others, (2..=40).filter(|n| n % 4 != 0).collect::<Vec<_>>());
    assert_eq!((ring.committed(), ring.waiting_aside()), (0, 10));
    ring.applier_will_wait(1, Awaited::Transaction);
    let wakes: Vec<usize> = ring.commit(0, 1, 1, 0).iter().collect();
    assert_eq!(wakes, [3], "more than the one who commits can take");
    ring.applier_awake(1);
    leader.publish(&Complete::default());
    let mut then = Vec::new();
    while let Some(sequence) = ring.take(0) {
        then.push(sequence);
        let _ = ring.commit(0, sequence, sequence, 0);
    }
    assert_eq!(then, [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 41]);
    assert_eq!(ring.committed(), 41);
}

/// A chain: each transaction is ready as soon as the one before is committed. An idle applier is
/// not woken for a transaction that the committing applier takes itself.
#[test]
fn who_commits_takes_what_has_become_ready() {
    let (_memory, mut leader) = ring(Geometry::new(2, 0, 64));
    let ring = leader.ring();
    ring.relax(0);
    for sequence in 1..=10 {
        let mut edges = [0; EDGES];
        edges[0] = sequence - 1;
        leader.publish(&Complete {
            edges,
            end_lsn: sequence,
            ..Complete::default()
        });
    }
    assert_eq!(ring.take(0), Some(1));
    ring.applier_will_wait(1, Awaited::Transaction);
    assert_eq!(ring.take(1), None);
    for sequence in 1..10 {
        assert!(ring.commit(0, sequence, sequence, 0).is_empty());
        assert_eq!(ring.take(0), Some(sequence + 1));
    }
    // An applier that may not claim any more leaves it to the other.
    ring.set_active_appliers(1);
    ring.applier_awake(1);
    ring.applier_will_wait(0, Awaited::Transaction);
    assert_eq!(ring.take(1), None);
    let _ = ring.commit(1, 10, 10, 0);
    let mut edges = [0; EDGES];
    edges[0] = 11;
    leader.publish(&Complete {
        end_lsn: 11,
        ..Complete::default()
    });
    leader.publish(&Complete {
        edges,
        end_lsn: 12,
        ..Complete::default()
    });
    assert_eq!(ring.take(0), Some(11));
    ring.applier_will_wait(0, Awaited::Transaction);
    assert_eq!(ring.left_behind().iter().collect::<Vec<_>>(), [2]);
}
