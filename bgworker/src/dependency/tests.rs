//! Small cases. Schedules of random transactions are in `tests/bgworker/schedule.rs`.

use super::*;

/// Returns a key whose bits are all well mixed, like the decoder's.
fn spread(number: u64) -> u64 {
    (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn enter<'t>(tracker: &'t mut DependencyTracker, sequence: u64, keys: &[u64]) -> Edges<'t> {
    tracker.begin(sequence, 0);
    tracker.change(1, keys.iter().copied());
    tracker.finish()
}

/// Finishes the current transaction. Returns its edges: latest, through, single edges.
fn finish(tracker: &mut DependencyTracker) -> (u64, u64, Vec<u64>) {
    let edges = tracker.finish();
    (edges.latest, edges.through, edges.all.to_vec())
}

#[test]
fn independent_transactions_have_no_edges() {
    let mut tracker = DependencyTracker::new(100);
    for sequence in 1..10 {
        assert_eq!(enter(&mut tracker, sequence, &[spread(sequence)]).latest, 0);
    }
}

#[test]
fn a_shared_key_is_an_edge_to_its_last_writer() {
    let mut tracker = DependencyTracker::new(100);
    enter(&mut tracker, 1, &[7]);
    enter(&mut tracker, 2, &[8]);
    assert_eq!(enter(&mut tracker, 3, &[7]).all, [1]);
    assert_eq!(enter(&mut tracker, 4, &[7, 8]).all, [2, 3]);
}

#[test]
fn what_is_committed_is_no_edge() {
    let mut tracker = DependencyTracker::new(100);
    enter(&mut tracker, 1, &[7]);
    enter(&mut tracker, 2, &[8]);
    tracker.begin(3, 1);
    tracker.change(1, [7, 8].into_iter());
    assert_eq!(finish(&mut tracker), (2, 0, vec![2]));
    tracker.begin(4, 3);
    tracker.barrier(1);
    assert_eq!(finish(&mut tracker), (0, 0, vec![]));
    tracker.begin(5, 4);
    tracker.change(1, [7].into_iter());
    assert_eq!(finish(&mut tracker), (0, 0, vec![]));
}

#[test]
fn a_key_written_twice_in_one_transaction_is_no_edge_to_itself() {
    let mut tracker = DependencyTracker::new(100);
    tracker.begin(1, 0);
    tracker.change(1, [5].into_iter());
    tracker.change(1, [5].into_iter());
    assert_eq!(finish(&mut tracker), (0, 0, vec![]));
}

#[test]
fn a_barrier_orders_with_its_table_only() {
    let mut tracker = DependencyTracker::new(100);
    enter(&mut tracker, 1, &[1]);
    tracker.begin(2, 0);
    tracker.change(2, [9].into_iter());
    tracker.finish();
    tracker.begin(3, 0);
    tracker.barrier(1);
    assert_eq!(finish(&mut tracker), (1, 1, vec![]));
    assert_eq!(enter(&mut tracker, 4, &[44]).all, [3]);
    tracker.begin(5, 0);
    tracker.change(2, [10].into_iter());
    assert_eq!(finish(&mut tracker), (0, 0, vec![]));
}

#[test]
fn a_barrier_waits_for_all_changes_of_its_table() {
    let mut tracker = DependencyTracker::new(100);
    enter(&mut tracker, 1, &[1]);
    enter(&mut tracker, 2, &[2]);
    tracker.begin(3, 0);
    tracker.barrier(1);
    let edges = tracker.finish();
    assert_eq!(
        (edges.latest, edges.through, edges.barrier),
        (2, 2, true),
        "1 too must be committed"
    );
}

#[test]
fn barriers_of_one_table_form_a_chain_and_hold_up_no_others() {
    let mut tracker = DependencyTracker::new(100);
    for sequence in 1..10 {
        let before = 2 * (sequence - 1);
        tracker.begin(2 * sequence - 1, 0);
        tracker.change(9, [spread(sequence)].into_iter());
        assert_eq!(finish(&mut tracker), (0, 0, vec![]));
        tracker.begin(2 * sequence, 0);
        tracker.barrier(1);
        tracker.change(1, [spread(sequence)].into_iter());
        let edges: Vec<u64> = (before > 0).then_some(before).into_iter().collect();
        assert_eq!(finish(&mut tracker), (before, 0, edges));
    }
}

#[test]
fn keys_of_a_table_under_a_barrier_are_ordered_by_it() {
    let mut tracker = DependencyTracker::new(100);
    enter(&mut tracker, 1, &[7]);
    tracker.begin(2, 0);
    tracker.barrier(1);
    tracker.change(1, [7].into_iter());
    tracker.change(2, [8].into_iter());
    assert_eq!(finish(&mut tracker), (1, 1, vec![]));
    // The edge to 1 is redundant: 2 comes after it.
    assert_eq!(enter(&mut tracker, 3, &[7]).all, [1, 2]);
    tracker.begin(4, 0);
    tracker.change(2, [8].into_iter());
    assert_eq!(finish(&mut tracker), (2, 0, vec![2]));
}

#[test]
fn a_barrier_for_all_orders_with_all_and_forgets_nothing_that_matters() {
    let mut tracker = DependencyTracker::new(100);
    enter(&mut tracker, 1, &[1]);
    tracker.begin(2, 0);
    tracker.barrier_for_all();
    tracker.change(1, [1].into_iter());
    assert_eq!(finish(&mut tracker), (1, 1, vec![]));
    assert_eq!(
        enter(&mut tracker, 3, &[1]).through,
        2,
        "an edge to 1 would say less"
    );
    assert_eq!(enter(&mut tracker, 4, &[1]).all, [3]);
    tracker.begin(5, 2);
    tracker.change(3, [99].into_iter());
    assert_eq!(finish(&mut tracker), (0, 0, vec![]), "2 is committed");
}

#[test]
fn i9_memory_is_fixed_and_forgetting_is_safe() {
    let mut tracker = DependencyTracker::new(64);
    for sequence in 1..10_000 {
        enter(&mut tracker, sequence, &[spread(sequence)]);
    }
    assert!(tracker.statistics().forgotten > 9_000);
    for sequence in 1..9_000 {
        let edges = enter(&mut tracker, 10_000 + sequence, &[spread(sequence)]);
        assert!(edges.latest >= sequence, "the writer of {sequence} is lost");
    }
}

#[test]
fn what_was_forgotten_is_not_known_one_by_one() {
    let mut tracker = DependencyTracker::new(16);
    // Small numbers share a line. Transactions 8 and 9 make it forget keys 1 and 2.
    for sequence in 1..=9 {
        enter(&mut tracker, sequence, &[sequence]);
    }
    tracker.begin(10, 0);
    tracker.change(1, [1].into_iter());
    assert_eq!(
        finish(&mut tracker),
        (2, 2, vec![]),
        "1 too must be committed"
    );
}

#[test]
fn i9_one_huge_transaction_is_bounded_too() {
    let mut tracker = DependencyTracker::new(64);
    enter(&mut tracker, 1, &[1]);
    enter(&mut tracker, 2, &[2]);
    tracker.begin(3, 0);
    for key in 0..100_000 {
        tracker.change(1, [key].into_iter());
        assert!(tracker.keys_in_hand.len() <= 65);
    }
    let edges = tracker.finish();
    assert_eq!((edges.latest, edges.through, edges.barrier), (2, 2, true));
    assert_eq!(enter(&mut tracker, 4, &[1_000_000]).latest, 3);
    assert_eq!(tracker.statistics().too_large, 1);
}

#[test]
fn i9_any_number_of_tables() {
    let mut tracker = DependencyTracker::new(64);
    for sequence in 1..1000_u32 {
        tracker.begin(u64::from(sequence), 0);
        tracker.barrier(sequence);
        tracker.finish();
    }
    // The barrier on table 1 was forgotten, so this waits for everything before that.
    tracker.begin(1000, 0);
    tracker.change(1, [1].into_iter());
    assert!(finish(&mut tracker).1 > 900);
    // One transaction with too many tables.
    tracker.begin(1001, 0);
    for table in 0..1000 {
        tracker.change(5000 + table, [1].into_iter());
    }
    assert_eq!(finish(&mut tracker), (1000, 1000, vec![]));
}

#[test]
fn an_abandoned_transaction_hides_nothing() {
    let mut tracker = DependencyTracker::new(100);
    enter(&mut tracker, 1, &[7]);
    tracker.begin(2, 0);
    tracker.change(1, [7].into_iter());
    tracker.abandon();
    assert_eq!(enter(&mut tracker, 2, &[7]).all, [1]);
    // An abandoned transaction leaves no trace in the tables either.
    tracker.begin(3, 0);
    tracker.change(1, [8].into_iter());
    tracker.barrier(1);
    tracker.abandon();
    tracker.begin(3, 0);
    tracker.barrier(1);
    assert_eq!(finish(&mut tracker), (2, 2, vec![]));
    // Nor does an abandoned barrier for everything.
    tracker.begin(4, 0);
    tracker.barrier_for_all();
    tracker.abandon();
    assert_eq!(enter(&mut tracker, 4, &[7]).all, [2, 3]);
    // An abandoned barrier does not swallow keys.
    tracker.begin(5, 0);
    tracker.barrier(2);
    tracker.abandon();
    tracker.begin(5, 0);
    tracker.change(2, [70].into_iter());
    tracker.finish();
    tracker.begin(6, 0);
    tracker.change(2, [70].into_iter());
    assert_eq!(finish(&mut tracker), (5, 0, vec![5]));
}

#[test]
fn repetitions_among_many_edges_take_no_room() {
    let mut tracker = DependencyTracker::new(100_000);
    for sequence in 1..=100 {
        tracker.begin(sequence, 0);
        tracker.change(1, (0..1000).map(|key| spread(key * 100 + sequence - 1)));
        tracker.finish();
    }
    tracker.begin(101, 0);
    tracker.change(1, (0..100_000).map(spread));
    let edges = finish(&mut tracker);
    let expected: Vec<u64> = (edges.1 + 1..=100).collect();
    assert_eq!((edges.0, edges.2), (100, expected));
    assert!(
        tracker.edges.all.capacity() <= 1024,
        "{} edges",
        tracker.edges.all.capacity()
    );
}

#[test]
fn edges_fit_into_any_room() {
    let edges = Edges {
        latest: 9,
        through: 3,
        all: &[5, 7, 9],
        barrier: false,
    };
    assert_eq!(edges.at_most(3), edges);
    let two = edges.at_most(2);
    assert_eq!((two.through, two.all), (5, &[7, 9][..]));
    let none = edges.at_most(0);
    assert_eq!((none.latest, none.through, none.all), (9, 9, &[][..]));
}
