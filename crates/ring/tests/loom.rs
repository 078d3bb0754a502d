//! The waiting and waking of a group, in every order that the memory model allows (bounded preemptions). A latch is a
//! flag that stays set until its owner has slept on it; sleepers have no time-outs here, so a lost wake-up is a deadlock,
//! which loom reports.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p braid-ring --release --test loom`
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

use braid_ring::{ApplierWait, Counters, LeaderWait, Wakes};
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

const IDLE: u64 = u64::MAX - 1;

struct Latch {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Latch {
    fn new() -> Self {
        Self {
            set: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    fn set(&self) {
        *self.set.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut set = self.set.lock().unwrap();
        while !*set {
            set = self.changed.wait(set).unwrap();
        }
        *set = false;
    }
}

/// Latch 1 is the leader's, 2 and on the appliers'.
struct Group {
    counters: Counters,
    leader: LeaderWait,
    appliers: Vec<ApplierWait>,
    latches: Vec<Latch>,
    /// Of each transaction, from 0, when commits overtake each other.
    done: Vec<AtomicBool>,
}

impl Group {
    fn new(appliers: usize) -> Arc<Self> {
        Arc::new(Self {
            counters: Counters::new(),
            leader: LeaderWait::at(1),
            appliers: (0..appliers)
                .map(|applier| ApplierWait::at(applier + 2))
                .collect(),
            latches: (0..=appliers).map(|_| Latch::new()).collect(),
            done: (0..4).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    fn set(&self, wakes: &Wakes) {
        for latch in wakes.iter() {
            self.latches[latch - 1].set();
        }
    }

    fn publish(&self, sequence: u64) {
        self.counters.publish(sequence);
        self.set(
            &self
                .counters
                .idle(self.appliers.iter(), |first, last, _| last + 1 - first),
        );
    }

    fn commit(&self, sequence: u64) {
        self.set(
            &self
                .counters
                .commit(sequence, sequence, &self.leader, self.appliers.iter()),
        );
    }

    fn is_done(&self, sequence: u64) -> bool {
        let place = usize::try_from(sequence).unwrap();
        self.done
            .get(place)
            .is_some_and(|done| done.load(Ordering::SeqCst))
    }

    /// Commit whatever is before it.
    fn complete(&self, sequence: u64) {
        let place = usize::try_from(sequence).unwrap();
        self.done[place].store(true, Ordering::SeqCst);
        self.set(&self.counters.complete(
            sequence,
            sequence,
            |sequence| self.is_done(sequence),
            |sequence| sequence,
            &self.leader,
            self.appliers.iter(),
        ));
    }

    fn applier_waits_for_one(&self, applier: usize, sequence: u64) {
        let me = &self.appliers[applier];
        while !self.is_done(sequence) {
            me.will_wait_for(sequence);
            if !self.is_done(sequence) {
                self.latches[applier + 1].wait();
            }
            me.awake();
        }
    }

    fn claim(&self, applier: usize) -> u64 {
        let me = &self.appliers[applier];
        loop {
            me.will_wait(IDLE);
            if let Some((sequence, _)) = self.counters.claim(me, |_| {}, |first, _| first) {
                me.awake();
                return sequence;
            }
            self.latches[applier + 1].wait();
            me.awake();
        }
    }

    fn applier_waits_for(&self, applier: usize, sequence: u64) {
        let me = &self.appliers[applier];
        while self.counters.committed() < sequence {
            me.will_wait(sequence);
            if self.counters.committed() < sequence {
                self.latches[applier + 1].wait();
            }
            me.awake();
        }
    }

    fn leader_waits_for(&self, sequence: u64) {
        while self.counters.committed() < sequence {
            self.leader.will_wait(sequence);
            if self.counters.committed() < sequence {
                self.latches[0].wait();
            }
        }
    }
}

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// The leader publishes and waits for the commit; the applier waits for something to take.
#[test]
fn a_publication_wakes_and_a_commit_wakes_the_leader() {
    check(4, || {
        let group = Group::new(1);
        let applier = {
            let group = Arc::clone(&group);
            thread::spawn(move || {
                for _ in 0..2 {
                    let sequence = group.claim(0);
                    group.commit(sequence);
                }
            })
        };
        for sequence in 1..=2 {
            group.publish(sequence);
            group.leader_waits_for(sequence);
        }
        applier.join().unwrap();
    });
}

/// Two appliers commit in order: each waits for its turn, and the leader for both.
#[test]
fn i5_appliers_wait_for_their_turn_and_are_woken() {
    check(3, || {
        let group = Group::new(2);
        let appliers: Vec<_> = (0..2)
            .map(|number| {
                let group = Arc::clone(&group);
                thread::spawn(move || {
                    let sequence = group.claim(number);
                    group.applier_waits_for(number, sequence - 1);
                    assert_eq!(group.counters.committed(), sequence - 1);
                    group.commit(sequence);
                })
            })
            .collect();
        group.publish(1);
        group.publish(2);
        group.leader_waits_for(2);
        for applier in appliers {
            applier.join().unwrap();
        }
    });
}

/// Two transactions that are published one after the other get two appliers, even when the first does not end before the
/// second is taken: no wake-up is spent on an applier that is busy or was woken before.
#[test]
fn every_published_transaction_gets_an_idle_applier() {
    check(3, || {
        let group = Group::new(2);
        let both = Arc::new(Latch::new());
        let appliers: Vec<_> = (0..2)
            .map(|number| {
                let (group, both) = (Arc::clone(&group), Arc::clone(&both));
                thread::spawn(move || {
                    // The first one is busy until the second is taken.
                    if group.claim(number) == 1 {
                        both.wait()
                    } else {
                        both.set()
                    }
                })
            })
            .collect();
        group.publish(1);
        group.publish(2);
        for applier in appliers {
            applier.join().unwrap();
        }
    });
}

/// The leader counts on the second applier, which is busy, to take what it publishes; but only the first is to take any more.
#[test]
fn what_an_applier_leaves_behind_is_taken_by_another() {
    check(3, || {
        let group = Group::new(2);
        group.counters.publish(1);
        let taken = group
            .counters
            .claim(&group.appliers[1], |_| {}, |first, _| first);
        assert_eq!(taken, Some((1, 1)));
        let second = {
            let group = Arc::clone(&group);
            thread::spawn(move || {
                group.commit(1);
                if group.counters.leaves_some() {
                    group.latches[1].set();
                }
            })
        };
        let first = {
            let group = Arc::clone(&group);
            thread::spawn(move || {
                assert_eq!(group.claim(0), 2);
                group.applier_waits_for(0, 1);
                group.commit(2);
            })
        };
        group.counters.publish(2);
        let may_take = group.appliers.iter().take(1);
        let wakes = group.counters.idle(may_take, |_, _, busy| u64::from(!busy));
        group.set(&wakes);
        group.leader_waits_for(2);
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// The leader waits for room that an open transaction releases.
#[test]
fn a_release_wakes_the_leader() {
    check(4, || {
        let group = Group::new(1);
        let applier = {
            let group = Arc::clone(&group);
            thread::spawn(move || {
                for position in [8, 16] {
                    group.set(&group.counters.release(position, &group.leader));
                }
            })
        };
        while group.counters.tail() < 16 {
            group.leader.will_wait(u64::MAX - 1);
            if group.counters.tail() < 16 {
                group.latches[0].wait();
            }
        }
        applier.join().unwrap();
    });
}

/// Two appliers commit as they please: the mark ends behind both, whoever is last, and the leader is woken for it.
#[test]
fn i1_commits_that_overtake_each_other_move_the_mark_over_all() {
    check(3, || {
        let group = Group::new(2);
        let appliers: Vec<_> = (1..=2)
            .map(|number| {
                let group = Arc::clone(&group);
                thread::spawn(move || group.complete(number))
            })
            .collect();
        group.leader_waits_for(2);
        assert_eq!(group.counters.tail(), 2);
        for applier in appliers {
            applier.join().unwrap();
        }
    });
}

/// One waits for the very transaction that it depends on, another for all up to one: both are woken.
#[test]
fn appliers_that_wait_for_one_or_for_the_mark_are_woken() {
    check(3, || {
        let group = Group::new(3);
        let appliers: Vec<_> = (0..3)
            .map(|number| {
                let group = Arc::clone(&group);
                thread::spawn(move || match number {
                    0 => group.complete(2),
                    1 => {
                        group.applier_waits_for_one(1, 2);
                        group.complete(1);
                    }
                    _ => {
                        group.applier_waits_for(2, 2);
                        assert_eq!(group.counters.tail(), 2);
                        group.complete(3);
                    }
                })
            })
            .collect();
        for applier in appliers {
            applier.join().unwrap();
        }
        assert_eq!(group.counters.committed(), 3);
    });
}
