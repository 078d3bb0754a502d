//! Transactions from the leader to an applier, one step at a time.

use braid_ring::{Awaited, Complete, EDGES, FrameRead, Geometry, Grain, Ring, Run, Wakes};

use crate::memory::{Random, frames, ring, small, store};

fn complete(number: u64) -> Complete {
    Complete {
        depends_on: 0,
        through: 0,
        edges: [0; EDGES],
        commit_lsn: number * 100,
        end_lsn: number * 100 + 50,
        commit_timestamp: -i64::try_from(number).unwrap(),
        changes: 1,
        skip: false,
        split: false,
        wide: false,
        alone: false,
        elsewhere: false,
    }
}

#[test]
fn frames_of_all_sizes_arrive_as_they_were() {
    let mut random = Random::new("frames_of_all_sizes_arrive_as_they_were");
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    let edges = [
        0, 1, 7, 8, 9, 15, 16, 4095, 4096, 8183, 8184, 8185, 8191, 8192, 8193, 16_384, 16_385,
    ];
    for (number, len) in (1..).zip(
        edges
            .into_iter()
            .chain((0..3000).map(|len| len * 7 % 20_000)),
    ) {
        let frame = random.bytes(len);
        assert!(store(&mut leader, &frame), "{len}");
        assert_eq!(leader.publish(&complete(number)), number);
        let mut transaction = ring.claim(0).unwrap();
        assert_eq!(transaction.sequence, number);
        assert_eq!(
            frames(&mut transaction).unwrap(),
            std::slice::from_ref(&frame),
            "{len}"
        );
        transaction.rewind();
        assert_eq!(
            frames(&mut transaction).unwrap(),
            [frame],
            "{len} after a rewind"
        );
        let _ = ring.commit(0, number, number, 0);
        leader.committed_at(number);
    }
    assert!(ring.tail() > 10 * ring.geometry().buffer, "it went around");
}

#[test]
fn a_transaction_of_many_frames_and_of_none() {
    let mut random = Random::new("a_transaction_of_many_frames_and_of_none");
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    for number in 1..500 {
        let mut stored = Vec::new();
        for _ in 0..random.index(60) {
            let len = random.index(400);
            let frame = random.bytes(len);
            assert!(store(&mut leader, &frame));
            stored.push(frame);
        }
        leader.publish(&complete(number));
        let mut transaction = ring.claim(1).unwrap();
        assert_eq!(frames(&mut transaction).unwrap(), stored);
        assert_eq!(transaction.commit_lsn(), number * 100);
        assert_eq!(transaction.end_lsn(), number * 100 + 50);
        let _ = ring.commit(1, number, 7 * number, 0);
        let (remote, local, timestamp) = leader.committed_at(number);
        assert_eq!((remote, local), (number * 100 + 50, 7 * number));
        assert_eq!(timestamp, -i64::try_from(number).unwrap());
    }
}

#[test]
fn i9_a_full_ring_takes_nothing_until_a_commit_releases_it() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    let mut published = 0;
    let frame = vec![3; 8000];
    while store(&mut leader, &frame) {
        published = leader.publish(&complete(published + 1));
    }
    assert_eq!(published, 8);
    assert_eq!(
        leader.pending_bytes(),
        0,
        "what has no room has done nothing"
    );
    assert!(!store(&mut leader, &frame));
    let _ = ring.claim(0).unwrap();
    assert!(!store(&mut leader, &frame), "taking it releases nothing");
    let _ = ring.commit(0, 1, 1, 0);
    assert!(store(&mut leader, &frame), "its commit does");
    assert!(!store(&mut leader, &frame));
}

#[test]
fn i1_a_descriptor_is_not_used_again_before_its_end_was_read() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    let mut number = 0;
    while leader.has_descriptor() {
        number += 1;
        leader.publish(&complete(number));
    }
    assert_eq!(number, 15);
    for sequence in 1..=5 {
        let _ = ring.claim(0).unwrap();
        let _ = ring.commit(0, sequence, sequence * 3, 0);
    }
    // Committed, but the leader has not collected it yet.
    assert!(!leader.has_descriptor());
    for sequence in 1..=5 {
        assert_eq!(
            leader.committed_at(sequence),
            (sequence * 100 + 50, sequence * 3, -sequence.cast_signed())
        );
    }
    for _ in 0..5 {
        assert!(leader.has_descriptor());
        number += 1;
        leader.publish(&complete(number));
    }
    assert!(!leader.has_descriptor());
    // An uncommitted transaction's descriptor is not freed by reading it.
    leader.committed_at(15);
    assert!(!leader.has_descriptor());
}

#[test]
fn i5_transactions_are_taken_in_order_by_who_may() {
    let (_memory, mut leader) = ring(Geometry::new(3, 0, 16));
    let ring = leader.ring();
    assert!(ring.claim(0).is_none());
    for number in 1..=4 {
        leader.publish(&Complete {
            depends_on: number - 1,
            ..complete(number)
        });
    }
    ring.set_active_appliers(2);
    assert!(ring.claim(2).is_none() && ring.claim(99).is_none());
    let first = ring.claim(1).unwrap();
    let second = ring.claim(0).unwrap();
    assert_eq!(
        (first.sequence, second.sequence, second.depends_on),
        (1, 2, 1)
    );
    assert_eq!(ring.slot(1).unwrap().sequence(), 1);
    assert_eq!(
        ring.ahead_of(2).collect::<Vec<_>>(),
        [2],
        "the process of applier 1"
    );
    assert_eq!(ring.ahead_of(3).count(), 2);
    assert_eq!(ring.ahead_of(1).count(), 0);
    let _ = ring.commit(1, 1, 1, 0);
    assert_eq!(ring.ahead_of(2).count(), 0);
    ring.set_active_appliers(3);
    assert_eq!(ring.claim(2).unwrap().sequence, 3);
    assert_eq!(
        (ring.published(), ring.claimed(), ring.committed()),
        (4, 3, 1)
    );
}

#[test]
fn those_that_are_to_wait_take_nothing_and_pass_on_what_is_left() {
    let (_memory, mut leader) = ring(Geometry::new(3, 0, 16));
    let ring = leader.ring();
    let woken = |wakes: Wakes| wakes.iter().collect::<Vec<_>>();
    for applier in 0..3 {
        ring.applier_will_wait(applier, Awaited::Transaction);
    }
    leader.publish(&complete(1));
    ring.applier_awake(0);
    assert_eq!(ring.claim(0).unwrap().sequence, 1);
    ring.set_taking(1);
    assert_eq!((ring.takers(), ring.active_appliers()), (2..3, 3));
    assert!(woken(ring.left_behind()).is_empty());
    leader.publish(&complete(2));
    let grain = Grain { run: 8, small: 2 };
    assert!(
        woken(ring.idle_appliers(grain)).is_empty(),
        "one is busy, and would take it"
    );
    let _ = ring.commit(0, 1, 1, 0);
    assert!(ring.claim(0).is_none() && ring.claim(1).is_none());
    assert_eq!(woken(ring.left_behind()), [4], "but it may not");
    assert_eq!(ring.claim(2).unwrap().sequence, 2);
    let _ = ring.commit(2, 2, 1, 0);
    ring.set_taking(0);
    assert_eq!(ring.takers(), 2..3);
    ring.set_active_appliers(2);
    assert_eq!(ring.takers(), 1..2);
    ring.set_taking(usize::MAX);
    assert_eq!(ring.takers(), 0..2);
}

#[test]
fn what_is_to_be_skipped_says_so() {
    let (_memory, mut leader) = ring(small());
    leader.publish(&Complete {
        skip: true,
        ..complete(1)
    });
    leader.publish(&complete(2));
    assert!(leader.ring().claim(0).unwrap().is_skipped());
    assert!(!leader.ring().claim(0).unwrap().is_skipped());
}

#[test]
fn what_is_discarded_is_never_seen() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    for number in 1..300 {
        assert!(store(&mut leader, &vec![1; 5000]) && store(&mut leader, &vec![1; 9000]));
        leader.discard();
        assert_eq!(leader.pending_bytes(), 0);
        assert!(store(&mut leader, &[2; 100]));
        leader.publish(&complete(number));
        assert_eq!(frames(&mut ring.claim(0).unwrap()).unwrap(), [[2; 100]]);
        let _ = ring.commit(0, number, 1, 0);
        leader.committed_at(number);
    }
}

#[test]
fn an_open_transaction_is_read_as_it_comes() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    assert!(leader.store(b"one", true, true));
    assert!(!leader.should_open());
    leader.publish_open(4711, true);
    let mut transaction = ring.claim(0).unwrap();
    assert!(transaction.is_open() && transaction.is_split());
    assert_eq!((transaction.commit_lsn(), transaction.end_lsn()), (4711, 0));
    let mut assembled = Vec::new();
    assert_eq!(
        transaction.next_frame(&mut assembled, |_| {}).unwrap(),
        FrameRead::Frame(b"one")
    );
    assert_eq!(
        transaction.next_frame(&mut assembled, |_| {}).unwrap(),
        FrameRead::Pending
    );
    assert!(leader.store(b"tw", true, false));
    assert_eq!(
        transaction.next_frame(&mut assembled, |_| {}).unwrap(),
        FrameRead::Pending,
        "not shown yet"
    );
    leader.extend();
    assert_eq!(
        transaction.next_frame(&mut assembled, |_| {}).unwrap(),
        FrameRead::Pending,
        "half of it"
    );
    assert!(leader.store(b"o", false, true));
    leader.extend();
    assert_eq!(
        transaction.next_frame(&mut assembled, |_| {}).unwrap(),
        FrameRead::Assembled
    );
    assert_eq!(assembled, b"two");
    leader.discard();
    assert!(leader.is_open(), "what is open can't be discarded");
    leader.publish(&complete(1));
    assert_eq!(
        transaction.next_frame(&mut assembled, |_| {}).unwrap(),
        FrameRead::End
    );
    assert_eq!(transaction.end_lsn(), 150);
    let _ = ring.commit(0, 1, 1, 0);
    leader.publish(&complete(2));
    assert_eq!(ring.claim(1).unwrap().sequence, 2);
}

#[test]
fn i9_a_transaction_asks_to_be_opened_before_it_fills_the_ring() {
    let (_memory, mut leader) = ring(small());
    let mut stored = 0;
    while !leader.should_open() {
        assert!(leader.store(&[5; 1000], true, true));
        stored += 1;
    }
    assert!(stored < 20);
    leader.publish_open(0, false);
    assert!(!leader.should_open());
}

#[test]
fn a_run_takes_what_fits_and_nothing_that_stands_alone() {
    let (_memory, mut leader) = ring(Geometry::new(2, 0, 64));
    let ring = leader.ring();
    for number in 1..=13 {
        assert!(leader.store(&[1; 10], true, true));
        leader.publish(&Complete {
            changes: if number == 9 { 4 } else { 1 },
            skip: number == 6,
            split: number == 13,
            alone: number == 8,
            ..complete(number)
        });
    }
    let mut runs = Vec::new();
    while let Some(run) = ring.claim_run(0, Grain { run: 4, small: 3 }) {
        runs.push((run.first, run.last));
    }
    assert_eq!(
        runs,
        [
            (1, 4),
            (5, 5),
            (6, 6),
            (7, 7),
            (8, 8),
            (9, 9),
            (10, 12),
            (13, 13)
        ]
    );
    let split = |number| ring.transaction(number).is_split();
    assert!(split(13) && !split(12));
    // The current transaction of a run is shown.
    assert_eq!(ring.slot(0).unwrap().sequence(), 13);
    let _ = ring.commit(0, 10, 1, 11);
    assert_eq!(ring.slot(0).unwrap().sequence(), 11);
}

#[test]
fn appliers_are_woken_by_the_load() {
    let (_memory, mut leader) = ring(Geometry::new(3, 0, 64));
    let ring = leader.ring();
    for applier in 0..3 {
        ring.applier_will_wait(applier, Awaited::Transaction);
    }
    const GRAIN: Grain = Grain { run: 8, small: 2 };
    let publish = |leader: &mut braid_ring::Leader, number: u64| {
        assert!(leader.store(&[1; 10], true, true));
        leader.publish(&Complete {
            changes: 2,
            ..complete(number)
        });
    };
    publish(&mut leader, 1);
    assert_eq!(ring.idle_appliers(GRAIN).len(), 1, "nobody is busy");
    assert_eq!(ring.claim_run(0, GRAIN).unwrap().last, 1);
    for number in 2..=4 {
        publish(&mut leader, number);
        assert!(ring.idle_appliers(GRAIN).is_empty(), "the busy one goes on");
    }
    publish(&mut leader, 5);
    assert_eq!(
        ring.idle_appliers(GRAIN).len(),
        1,
        "more than it can do soon"
    );
    for number in 6..=30 {
        publish(&mut leader, number);
    }
    assert_eq!(ring.idle_appliers(GRAIN).len(), 2);
}

#[test]
fn waiting_and_waking_by_address() {
    let (_memory, mut leader) = ring(Geometry::new(3, 0, 16));
    let ring = leader.ring();
    let list = |wakes: braid_ring::Wakes| wakes.iter().collect::<Vec<_>>();
    assert_eq!(list(ring.all_appliers()), [2, 3, 4]);
    for applier in 0..3 {
        ring.applier_will_wait(applier, Awaited::Transaction);
    }
    assert!(
        ring.idle_appliers(Grain::ONE).is_empty(),
        "there is nothing to take"
    );
    leader.publish(&complete(1));
    assert_eq!(list(ring.idle_appliers(Grain::ONE)), [2]);
    // The first applier has not run yet; the second transaction is for another.
    leader.publish(&complete(2));
    assert_eq!(list(ring.idle_appliers(Grain::ONE)), [2, 3]);
    ring.claim(0).unwrap();
    assert_eq!(
        list(ring.idle_appliers(Grain::ONE)),
        [3],
        "who has taken one is not idle"
    );
    ring.claim(1).unwrap();
    assert!(ring.idle_appliers(Grain::ONE).is_empty());
    ring.applier_will_wait(1, Awaited::Commit(1));
    leader.publish(&complete(3));
    ring.leader_will_wait(0);
    assert_eq!(
        list(ring.commit(0, 1, 1, 0)),
        [3, 1],
        "who waits for it, and the leader"
    );
    ring.applier_awake(1);
    assert!(
        ring.commit(1, 2, 2, 0).is_empty(),
        "the leader was woken, applier 2 waits for another thing"
    );
}

#[test]
fn i1_commits_that_overtake_move_the_mark_only_when_it_is_their_turn() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    ring.relax(77);
    assert!(ring.is_relaxed());
    assert_eq!(ring.mark(), (0, 77));
    let frame = vec![3; 800];
    for number in 1..=5 {
        assert!(store(&mut leader, &frame));
        leader.publish(&complete(number));
    }
    for _ in 1..=5 {
        let _ = ring.claim(0).unwrap();
    }
    let tail = ring.tail();
    let _ = ring.commit(0, 2, 20, 0);
    let run = Run { first: 4, last: 5 };
    let _ = ring.commit_run(1, run, 50, 0);
    assert_eq!((ring.committed(), ring.tail()), (0, tail));
    assert_eq!(ring.mark(), (0, 77));
    let done = |ring: &Ring| (1..=5).filter(|n| ring.is_done(*n)).collect::<Vec<_>>();
    assert_eq!(done(&ring), [2, 4, 5]);
    let _ = ring.commit(0, 1, 60, 0);
    assert_eq!(ring.mark(), (2, 250));
    let middle = ring.tail();
    assert!(middle > tail);
    let _ = ring.commit(0, 3, 70, 0);
    assert_eq!(ring.mark(), (5, 550));
    assert!(ring.tail() > middle);
    assert_eq!(done(&ring), [1, 2, 3, 4, 5]);
    for sequence in 1..=5 {
        let (_, local, _) = leader.committed_at(sequence);
        assert_eq!(
            local,
            [60, 20, 70, 50, 50][usize::try_from(sequence).unwrap() - 1]
        );
    }
}

#[test]
fn i1_a_descriptor_that_is_used_again_is_not_done_already() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    ring.relax(0);
    for number in 1..=100 {
        leader.publish(&complete(number));
        let _ = ring.claim(0).unwrap();
        assert!(!ring.is_done(number));
        assert!(number <= 16 || ring.is_done(number - 16));
        let _ = ring.commit(0, number, number, 0);
        assert!(ring.is_done(number));
        leader.committed_at(number);
    }
    assert_eq!(ring.mark(), (100, 10_050));
}

#[test]
fn what_joins_others_needs_what_is_before_them() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    for number in 1..10 {
        leader.publish(&complete(number));
    }
    leader.publish(&Complete {
        depends_on: 9,
        through: 3,
        edges: [4, 6, 9, 0, 0, 0],
        ..complete(10)
    });
    leader.publish(&complete(11));
    let transaction = ring.transaction(10);
    assert_eq!(transaction.needs(10), (3, [4, 6, 9, 0, 0, 0]));
    assert_eq!(transaction.needs(6), (3, [4, 0, 0, 0, 0, 0]));
    assert_eq!(transaction.needs(3), (2, [0; EDGES]));
    assert_eq!(ring.transaction(11).needs(11), (0, [0; EDGES]));
}

#[test]
fn what_is_complete_is_there_once_it_is_published() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    for number in 1..=3 {
        assert!(store(&mut leader, b"records"));
        assert_eq!(leader.complete(&complete(number)), number);
        assert_eq!(leader.completed(), number);
    }
    assert_eq!(ring.published(), 0);
    assert!(ring.claim(0).is_none());
    // One by one, for the leader to claim.
    leader.publish_up_to(1);
    assert!(ring.take_last(1));
    assert!(ring.claim(0).is_none());
    let _ = ring.commit(ring.geometry().appliers, 1, 10, 0);
    // The others are for appliers. No more are published than are complete.
    leader.publish_up_to(9);
    assert_eq!(ring.published(), 3);
    assert_eq!(ring.claim(0).unwrap().sequence, 2);
    // An open transaction counts from then on.
    assert!(store(&mut leader, b"records"));
    assert_eq!(leader.completed(), 3);
    leader.publish_open(400, false);
    assert_eq!((leader.completed(), ring.published()), (4, 4));
    leader.complete(&complete(4));
    leader.publish_completed();
    assert_eq!((leader.completed(), ring.published()), (4, 4));
}

#[test]
fn the_leader_takes_what_it_has_published_last_while_nothing_else_is_in_hand() {
    let (_memory, mut leader) = ring(small());
    let ring = leader.ring();
    let mut publish = |number: u64| {
        assert!(store(&mut leader, b"records"));
        assert_eq!(leader.publish(&complete(number)), number);
    };
    // An applier is faster.
    publish(1);
    assert_eq!(ring.claim(0).unwrap().sequence, 1);
    assert!(!ring.take_last(1));
    // An earlier transaction is not committed.
    publish(2);
    assert!(!ring.take_last(2));
    let _ = ring.commit(0, 1, 10, 0);
    // The leader has it, until the leader releases it.
    assert!(ring.take_last(2));
    assert!(!ring.take_last(2));
    assert!(ring.claim(0).is_none());
    let mut transaction = ring.transaction(2);
    assert_eq!(frames(&mut transaction).unwrap(), [b"records"]);
    let _ = ring.give_back_last(2);
    assert_eq!(ring.claim(0).unwrap().sequence, 2);
    let _ = ring.commit(0, 2, 20, 0);
    // The leader commits it, under no applier's number.
    publish(3);
    assert!(ring.take_last(3));
    let _ = ring.commit(ring.geometry().appliers, 3, 30, 0);
    assert_eq!((ring.claimed(), ring.committed()), (3, 3));
    assert_eq!(leader.committed_at(3), (350, 30, -3));
    // Not in relaxed order.
    ring.relax(0);
    assert!(store(&mut leader, b"records"));
    leader.publish(&complete(4));
    assert!(!ring.take_last(4));
}
