//! Nodes that write, exchange their changes in any order and apply the conflict rules end with the
//! state of one last-writer-wins register per key.

mod group;
mod history;

use braid_bgworker::conflict::{
    Action, Local, decide_delete, decide_insert, decide_new_key, decide_update,
};

use crate::random::Random;
use group::{Change, Group, Kind, Node, Topology, version};
use history::{Course, History, Step, converges, failing};

#[test]
fn i2_a_mesh_converges_to_one_register_per_key() {
    converges(
        "i2_a_mesh_converges_to_one_register_per_key",
        Course::new(Topology::Mesh),
    );
}

/// A truncate deletes each row with its own version, and is remembered for all keys.
#[test]
fn i2_a_mesh_that_truncates_converges() {
    let test = "i2_a_mesh_that_truncates_converges";
    let truncates = Course {
        truncates: true,
        ..Course::new(Topology::Mesh)
    };
    converges(test, truncates);
    converges(
        test,
        Course {
            clocks: true,
            ..truncates
        },
    );
}

/// A truncate is forwarded as a truncate, even by a node on which some rows stay, so it has the
/// same effect by other ways. Forwarding ends, as a node that has this truncate or a newer one does
/// not forward it.
#[test]
fn i2_i8_truncates_are_passed_on() {
    let test = "i2_i8_truncates_are_passed_on";
    for topology in [Topology::Star, Topology::Chain, Topology::ForwardingMesh] {
        for clocks in [false, true] {
            let course = Course {
                truncates: true,
                clocks,
                ..Course::new(topology)
            };
            converges(test, course);
        }
    }
}

/// Why deletions that find nothing are forwarded.
#[test]
fn i2_what_finds_nothing_is_news_to_those_behind() {
    let test = "i2_what_finds_nothing_is_news_to_those_behind";
    for topology in [Topology::Star, Topology::Chain] {
        for truncates in [false, true] {
            let course = Course {
                passes_on: false,
                truncates,
                ..Course::new(topology)
            };
            let history = failing(course, &mut Random::new(test));
            let mended = History {
                course: Course {
                    passes_on: true,
                    ..course
                },
                ..history.clone()
            };
            assert!(history.run().is_err(), "{history:?}");
            assert!(mended.run().is_ok(), "{mended:?}");
        }
    }
    // A star around a. Two ends delete a row, and the older deletion arrives first. Then the end
    // that made it inserts the row again, before the other end's deletion.
    let differs = |passes_on: bool| {
        let mut group = Group::new(3, Topology::Star);
        if !passes_on {
            group.forgets_unfound();
        }
        let mut random = Random::new(test);
        group.write(0, Kind::Insert, 0, 1);
        group.deliver_all(&mut random).unwrap();
        group.write(1, Kind::Delete, 0, 4);
        group.write(2, Kind::Delete, 0, 5);
        for end in [1, 2] {
            let to_the_centre = |link: &group::Link| (link.from, link.to) == (end, 0);
            let link = group.links.iter().position(to_the_centre).unwrap();
            assert!(group.deliver(link));
        }
        group.write(1, Kind::Insert, 0, 5);
        group.deliver_all(&mut random).unwrap();
        assert!(!group.nodes[0].has(0) && !group.nodes[2].has(0));
        group.nodes[1].has(0)
    };
    assert!(differs(false));
    assert!(!differs(true));
}

#[test]
fn i2_i8_a_mesh_that_forwards_converges_and_comes_to_rest() {
    converges(
        "i2_i8_a_mesh_that_forwards_converges_and_comes_to_rest",
        Course::new(Topology::ForwardingMesh),
    );
}

#[test]
fn i2_a_star_converges() {
    converges("i2_a_star_converges", Course::new(Topology::Star));
}

#[test]
fn i2_a_chain_converges() {
    converges("i2_a_chain_converges", Course::new(Topology::Chain));
}

/// A clock that is set back changes which row wins, but nodes still agree: commits wait until the
/// clock is past everything that their node has seen, its own commits included.
#[test]
fn i4_clocks_may_step_back() {
    for topology in [
        Topology::Mesh,
        Topology::ForwardingMesh,
        Topology::Star,
        Topology::Chain,
    ] {
        let course = Course {
            clocks: true,
            ..Course::new(topology)
        };
        converges("i4_clocks_may_step_back", course);
    }
}

/// Why a node's own commits count as seen. Node a writes a row at 10 and, with its clock set back,
/// again at 5; node b writes it at 7. A node that gets 10, 7, 5 keeps the 10 against the 7, and
/// then takes the 5, which follows the 10 in its stream. A node that gets the 7 last takes the 7.
#[test]
fn i4_covers_a_nodes_own_commits() {
    let mut group = Group::new(3, Topology::Mesh);
    group.write(0, Kind::Insert, 0, 10);
    group.write(0, Kind::Update, 0, 5);
    group.write(1, Kind::Insert, 0, 7);
    // Node c gets both of a's, then b's; node b has its own and gets both of a's.
    group
        .deliver_all(&mut Random::new("i4_covers_a_nodes_own_commits"))
        .unwrap();
    let rows: Vec<_> = group.nodes.iter().map(Node::rows).collect();
    assert_ne!(rows[0], rows[1], "rules alone do not make up for it");
}

/// Histories find the failure by themselves, and the reported one is as short as possible.
#[test]
fn a_history_that_fails_is_shown_in_its_smallest_form() {
    let mut random = Random::new("a_history_that_fails_is_shown_in_its_smallest_form");
    let course = Course {
        clocks: true,
        waits: false,
        ..Course::new(Topology::Mesh)
    };
    for _ in 0..20 {
        let history = failing(course, &mut random);
        assert!(history.run().is_err());
        let writes = |step: &&Step| matches!(step, Step::Write { .. });
        let writes = history.steps.iter().filter(writes).count();
        assert!(history.steps.len() <= 12, "{history:?}");
        assert!((2..=5).contains(&writes), "{history:?}");
        for left_out in 0..history.steps.len() {
            let mut less = history.clone();
            less.steps.remove(left_out);
            assert!(less.run().is_ok(), "step {left_out} of {history:?}");
        }
    }
}

/// Merging depends on the row's version alone: for each pair of versions and each kind of change
/// there is one winner, in any order of arrival.
#[test]
fn i2_merging_commutes_and_is_idempotent() {
    let stamps = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)];
    let kinds = [Kind::Insert, Kind::Update, Kind::Delete];
    for first in stamps {
        for second in stamps.into_iter().filter(|second| *second != first) {
            for one in kinds {
                for two in kinds {
                    let one = Change {
                        kind: one,
                        key: 0,
                        value: 1,
                        stamp: first,
                    };
                    let two = Change {
                        kind: two,
                        key: 0,
                        value: 2,
                        stamp: second,
                    };
                    let state = |changes: &[Change]| {
                        let mut node = Node::default();
                        for change in changes {
                            node.receive(*change, false);
                        }
                        node.cells
                    };
                    let merged = state(&[one, two]);
                    assert_eq!(merged, state(&[two, one]), "{one:?} {two:?}");
                    assert_eq!(merged, state(&[one, two, two]), "{one:?} {two:?}");
                    assert_eq!(merged, state(&[one, two, one]), "{one:?} {two:?}");
                }
            }
        }
    }
}

/// A single writer has no conflicts: its stream's order is the order of its versions, even if its
/// clock steps back.
#[test]
fn i2_a_single_writers_clock_may_step_back() {
    let mut random = Random::new("i2_a_single_writers_clock_may_step_back");
    for _ in 0..1000 {
        let mut group = Group::new(3, Topology::Mesh);
        for _ in 0..random.below(20) {
            let key = random.below(2);
            let kind = match (group.nodes[0].has(key), random.below(2)) {
                (false, _) => Kind::Insert,
                (true, 0) => Kind::Update,
                (true, _) => Kind::Delete,
            };
            let timestamp = random.below(5).cast_signed();
            group.write(0, kind, key, timestamp);
            let link = random.index(group.links.len());
            group.deliver(link);
        }
        group.deliver_all(&mut random).unwrap();
        assert_eq!(group.nodes[1].rows(), group.nodes[0].rows());
        assert_eq!(group.nodes[2].rows(), group.nodes[0].rows());
    }
}

/// Why I4 is an invariant, and why a deletion counts as seen. If a writer's clock is behind what
/// its node has seen, nodes differ for good, whatever the rules.
#[test]
fn i4_is_what_convergence_rests_on() {
    let mut group = Group::new(2, Topology::Mesh);
    group.write(0, Kind::Insert, 0, 1);
    group
        .deliver_all(&mut Random::new("i4_is_what_convergence_rests_on"))
        .unwrap();
    group.write(0, Kind::Delete, 0, 10);
    group
        .deliver_all(&mut Random::new("i4_is_what_convergence_rests_on"))
        .unwrap();
    // Node b has seen the deletion of time 10; its clock says 8.
    group.write(1, Kind::Insert, 0, 8);
    group
        .deliver_all(&mut Random::new("i4_is_what_convergence_rests_on"))
        .unwrap();
    assert!(group.nodes[1].has(0) && !group.nodes[0].has(0));
}

/// I3: the row's origin decides the version, so it makes no difference by which way a change
/// arrives.
#[test]
fn i3_the_rows_origin_decides_and_not_the_sender() {
    for local in [(1, 0), (1, 1), (2, 2)] {
        for remote in [(1, 0), (1, 1), (2, 2), (3, 0)] {
            let (here, incoming) = (Local::Present(version(local)), version(remote));
            for forwarded in [false, true] {
                let applied = Action::Apply == decide_insert(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
                let applied = Action::Apply == decide_new_key(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
                // From its origin, a change of the same origin follows in its stream's order.
                if local.1 == remote.1 && !forwarded {
                    continue;
                }
                let applied = Action::Apply == decide_update(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
                let applied = Action::Apply == decide_delete(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
            }
        }
    }
}
