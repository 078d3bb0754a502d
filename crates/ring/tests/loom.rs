//! The waiting and waking of a leader and its appliers, in every order that the memory model allows
//! (with bounded preemptions). A latch is a flag that stays set until its owner has slept on it.
//! Sleepers have no time-outs, so a lost wake-up is a deadlock, which loom reports.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p braid-ring --release --test loom`
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

use braid_ring::{
    ApplierWait, Aside, Awaited, Counters, EDGES, LeaderWait, Places, Wakes, close, list_of,
};
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// No sequence number: any release wakes the leader.
const ANY_RELEASE: u64 = u64::MAX - 1;

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

/// Latch 1 is the leader's. Latch 2 is the first applier's, and so on.
struct Group {
    counters: Counters,
    leader: LeaderWait,
    appliers: Vec<ApplierWait>,
    latches: Vec<Latch>,
    /// Whether each transaction is done, by number from 0. In relaxed order.
    done: Vec<AtomicBool>,
    aside: Aside,
    /// Of each transaction, by number from 0: its wait list, the next on the list that it is on,
    /// and its dependencies.
    lists: Vec<AtomicU64>,
    links: Vec<AtomicU64>,
    needs: Vec<(u64, [u64; EDGES])>,
    ready: AtomicU64,
}

impl Places for Group {
    fn waiters(&self, sequence: u64) -> &AtomicU64 {
        &self.lists[usize::try_from(sequence).unwrap()]
    }

    fn next(&self, sequence: u64) -> &AtomicU64 {
        &self.links[usize::try_from(sequence).unwrap()]
    }

    fn needs(&self, sequence: u64) -> (u64, [u64; EDGES]) {
        self.needs[usize::try_from(sequence).unwrap()]
    }

    fn ready(&self, _: usize) -> &AtomicU64 {
        &self.ready
    }

    fn count(&self) -> u64 {
        4
    }

    fn committed(&self) -> u64 {
        self.counters.committed()
    }
}

impl Group {
    fn new(appliers: usize) -> Arc<Self> {
        Self::with(appliers, &[])
    }

    /// `needs`: the dependencies of each transaction, from the first on: all up to a number, and
    /// two single ones.
    fn with(appliers: usize, needs: &[(u64, [u64; 2])]) -> Arc<Self> {
        let mut all = vec![(0, [0; EDGES])];
        all.extend(needs.iter().map(|(through, [one, two])| {
            let mut edges = [0; EDGES];
            (edges[0], edges[1]) = (*one, *two);
            (*through, edges)
        }));
        Arc::new(Self {
            aside: Aside::new(),
            lists: (0..4).map(list_of).collect(),
            links: (0..4).map(|_| AtomicU64::new(0)).collect(),
            needs: all,
            ready: AtomicU64::new(0),
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
                .idle(self.appliers.iter(), &self.aside, |first, last, _| {
                    last + 1 - first
                }),
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

    /// Commits a transaction, in relaxed order.
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

    /// Takes a transaction that can be applied, as `Ring::take` does.
    fn take(&self, applier: usize) -> Option<u64> {
        let me = &self.appliers[applier];
        let waited = me.waited();
        loop {
            if let Some(sequence) = self.aside.take(self) {
                return Some(sequence);
            }
            let (sequence, _) = self.counters.claim(me, |_| {}, |first, _| first)?;
            if !self.aside.put(self, sequence) {
                return Some(sequence);
            }
            if let Some(awaited) = waited {
                me.will_wait(awaited);
            }
        }
    }

    /// Commits as `Ring::commit_run` does.
    fn finish(&self, sequence: u64) {
        let place = usize::try_from(sequence).unwrap();
        let waiter = close(self, sequence);
        self.done[place].store(true, Ordering::SeqCst);
        let mut wakes = self.counters.complete(
            sequence,
            sequence,
            |sequence| self.is_done(sequence),
            |sequence| sequence,
            &self.leader,
            self.appliers.iter(),
        );
        if self.aside.release(self, waiter) > 0 {
            self.offer(1, &mut wakes);
        }
        self.set(&wakes);
    }

    fn offer(&self, but: u64, wakes: &mut Wakes) {
        self.counters
            .offer(self.appliers.iter(), &self.aside, but, wakes);
    }

    /// Applies until all is committed, as `Applier::run` does. Calls `hold` with each transaction
    /// that was taken, before its commit.
    fn apply_all(&self, applier: usize, last: u64, mut hold: impl FnMut(u64)) {
        let me = &self.appliers[applier];
        loop {
            let mut taken = self.take(applier);
            while taken.is_none() {
                if self.counters.committed() == last {
                    return;
                }
                // It waits for a transaction to take, or for the end.
                me.will_wait(Awaited::Transaction);
                taken = self.take(applier);
                if taken.is_some() {
                    me.awake();
                    let mut wakes = Wakes::default();
                    self.offer(0, &mut wakes);
                    self.set(&wakes);
                } else if self.counters.committed() != last {
                    self.latches[applier + 1].wait();
                }
                me.awake();
            }
            let Some(sequence) = taken else { continue };
            let (through, edges) = self.needs(sequence);
            assert!((1..=through).all(|needed| self.is_closed(needed)));
            assert!(edges.iter().all(|edge| *edge == 0 || self.is_closed(*edge)));
            hold(sequence);
            self.finish(sequence);
            if self.counters.committed() == last {
                for latch in self.latches.iter().skip(1) {
                    latch.set();
                }
            }
        }
    }

    /// Whether the wait list of a transaction is closed: it is committed.
    fn is_closed(&self, sequence: u64) -> bool {
        self.waiters(sequence).load(Ordering::SeqCst) & ((1 << 21) - 1) == (1 << 21) - 1
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
            me.will_wait(Awaited::Transaction);
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
            me.will_wait(Awaited::Commit(sequence));
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

/// The leader publishes and waits for the commit; the applier waits for a transaction.
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

/// Two transactions that are published one after the other get two appliers, even when the first
/// does not end before the second is taken: no wake-up is spent on an applier that is busy or was
/// woken before.
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

/// The leader counts on the second applier, which is busy, to take what it publishes; but only the
/// first is to take any more.
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
        let wakes = group
            .counters
            .idle(may_take, &group.aside, |_, _, busy| u64::from(!busy));
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
            group.leader.will_wait(ANY_RELEASE);
            if group.counters.tail() < 16 {
                group.latches[0].wait();
            }
        }
        applier.join().unwrap();
    });
}

/// Two appliers commit in relaxed order. In the end the mark is behind both, whichever is last, and
/// the leader is woken.
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

/// One applier waits for the very transaction that it depends on, another for all up to one. Both
/// are woken.
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

/// Each transaction depends on the one before. Any applier may take a ready one, and each is taken
/// once.
#[test]
fn what_is_put_aside_is_taken_once_what_it_needs_is_committed() {
    check(2, || {
        let group = Group::with(2, &[(0, [0, 0]), (0, [1, 0]), (2, [0, 0])]);
        let counts: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
        group.counters.publish(2);
        let appliers: Vec<_> = (0..2)
            .map(|number| {
                let (group, counts) = (Arc::clone(&group), Arc::clone(&counts));
                thread::spawn(move || {
                    group.apply_all(number, 3, |sequence| {
                        let place = usize::try_from(sequence).unwrap();
                        assert_eq!(counts[place].fetch_add(1, Ordering::SeqCst), 0);
                    });
                })
            })
            .collect();
        group.publish(3);
        for applier in appliers {
            applier.join().unwrap();
        }
        assert_eq!(group.counters.committed(), 3);
        assert_eq!((group.aside.ready(), group.aside.waiting()), (0, 0));
    });
}

/// The first and the third transaction have no dependencies, the second depends on the first. The
/// first is kept until the third is taken.
#[test]
fn one_that_is_held_up_does_not_hold_up_what_does_not_depend_on_it() {
    check(2, || {
        let group = Group::with(2, &[(0, [0, 0]), (1, [1, 0]), (0, [0, 0])]);
        let free = Arc::new(Latch::new());
        let appliers: Vec<_> = (0..2)
            .map(|number| {
                let (group, free) = (Arc::clone(&group), Arc::clone(&free));
                thread::spawn(move || {
                    group.apply_all(number, 3, |sequence| match sequence {
                        1 => free.wait(),
                        3 => free.set(),
                        _ => {}
                    });
                })
            })
            .collect();
        for sequence in 1..=3 {
            group.publish(sequence);
        }
        for applier in appliers {
            applier.join().unwrap();
        }
        assert_eq!(group.counters.committed(), 3);
    });
}

/// A third transaction depends on two that are committed at the same time. It is ready once,
/// whichever is last.
#[test]
fn what_needs_two_is_ready_once() {
    check(2, || {
        let group = Group::with(2, &[(0, [0, 0]), (0, [0, 0]), (0, [1, 2])]);
        group.counters.publish(3);
        for sequence in 1..=2 {
            assert_eq!(group.take(0), Some(sequence));
        }
        assert_eq!((group.take(0), group.aside.waiting()), (None, 1));
        let appliers: Vec<_> = (1..=2)
            .map(|sequence| {
                let group = Arc::clone(&group);
                thread::spawn(move || group.finish(sequence))
            })
            .collect();
        for applier in appliers {
            applier.join().unwrap();
        }
        assert_eq!((group.aside.ready(), group.aside.waiting()), (1, 0));
        assert_eq!((group.take(0), group.take(1)), (Some(3), None));
    });
}

/// A transaction is enqueued while its dependency is being committed. Its applier keeps it, or it
/// becomes ready.
#[test]
fn what_is_put_aside_at_this_moment_is_not_lost() {
    check(3, || {
        let group = Group::with(2, &[(0, [0, 0]), (1, [0, 0])]);
        group.counters.publish(2);
        assert_eq!(group.take(0), Some(1));
        let committer = {
            let group = Arc::clone(&group);
            thread::spawn(move || group.finish(1))
        };
        let taken = group.take(1);
        committer.join().unwrap();
        assert_eq!(taken.or_else(|| group.take(0)), Some(2));
        assert_eq!((group.aside.ready(), group.aside.waiting()), (0, 0));
    });
}

/// The leader publishes without waking anybody, and claims the transaction itself unless an applier
/// was faster. A transaction that the leader releases goes to an applier. Each is committed once,
/// and no applier sleeps while one is left.
#[test]
fn what_the_leader_takes_is_its_own_until_it_gives_it_back() {
    for gives_back in [[false, false], [true, false], [true, true]] {
        check(3, move || {
            let group = Group::new(1);
            let applier = {
                let group = Arc::clone(&group);
                thread::spawn(move || {
                    let me = &group.appliers[0];
                    loop {
                        me.will_wait(Awaited::Transaction);
                        if let Some((sequence, last)) =
                            group.counters.claim(me, |_| {}, |first, _| first)
                        {
                            me.awake();
                            assert_eq!(sequence, last);
                            assert_eq!(group.counters.committed(), sequence - 1);
                            group.commit(sequence);
                        } else if group.counters.committed() == 2 {
                            return;
                        } else {
                            group.latches[1].wait();
                            me.awake();
                        }
                    }
                })
            };
            for (sequence, give_back) in (1..).zip(gives_back) {
                group.counters.publish(sequence);
                if group.counters.take_last(sequence) {
                    assert_eq!(group.counters.committed(), sequence - 1);
                    if give_back {
                        group.counters.give_back_last(sequence);
                        group.latches[1].set();
                    } else {
                        group.commit(sequence);
                    }
                }
                group.leader_waits_for(sequence);
            }
            group.latches[1].set();
            applier.join().unwrap();
        });
    }
}
