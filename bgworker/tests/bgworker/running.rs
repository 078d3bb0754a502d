//! In-progress transactions: steps of the processes that share the state, in any order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use braid_bgworker::running::{Ending, Running, State, Supply};

fn ending(sequence: u64) -> Ending {
    Ending {
        commit_lsn: sequence * 10,
        end_lsn: sequence * 10 + 5,
        timestamp: 7,
        sequence,
    }
}

/// Returns a state whose process was started.
fn started() -> Arc<Running> {
    let running = Running::new();
    assert!(running.prepare(42, "base/pgsql_tmp/pgsql_tmp1.0"));
    Arc::new(running)
}

#[test]
fn it_goes_its_way() {
    let running = started();
    assert_eq!(running.state(), State::Started);
    assert_eq!(
        (running.xid(), running.path().as_str()),
        (42, "base/pgsql_tmp/pgsql_tmp1.0")
    );
    assert!(!running.prepare(43, "other"), "one at a time");
    assert_eq!(running.xid(), 42);
    running.take_turn(5);
    assert_eq!(
        running.state(),
        State::Started,
        "its turn is not before it is whole"
    );
    assert!(!running.commit(100), "nor is it committed before its turn");
    assert!(running.is_whole(ending(9)));
    assert!(!running.is_whole(ending(10)), "once");
    assert!(!running.commit(100));
    running.take_turn(5);
    assert_eq!((running.state(), running.waiter()), (State::Turn, 5));
    assert!(running.commit(100));
    assert_eq!(
        (running.state(), running.local_end()),
        (State::Committed, 100)
    );
    assert!(!running.give_up(), "what is committed stays so");
    running.free();
    assert_eq!(running.state(), State::Free);
    assert!(!running.give_up(), "there is none");
    assert!(running.prepare(44, "next"));
    assert_eq!(
        (
            running.ending().sequence,
            running.waiter(),
            running.process()
        ),
        (0, 0, 0)
    );
    assert_eq!(
        running.supplied(),
        Some(Supply {
            length: 0,
            ..running.supplied().unwrap_or_default()
        })
    );
}

#[test]
fn it_is_given_up_once_at_any_time() {
    for moves in 0..3 {
        let running = started();
        if moves > 0 {
            assert!(running.is_whole(ending(1)));
        }
        if moves > 1 {
            running.take_turn(0);
        }
        assert!(running.give_up());
        assert!(!running.give_up());
        assert!(!running.is_whole(ending(1)));
        running.take_turn(0);
        assert!(!running.commit(1));
        assert_eq!(running.state(), State::GivenUp);
    }
}

#[test]
fn a_path_that_does_not_fit_is_none() {
    let running = Running::new();
    assert!(!running.prepare(1, &"x".repeat(513)));
    assert_eq!(running.state(), State::Free);
    assert!(running.prepare(1, &"x".repeat(512)));
    assert_eq!(running.path().len(), 512);
}

#[test]
fn what_is_supplied_belongs_together() {
    const STEPS: u64 = 200_000;
    let running = started();
    // The writer stops half way until a part was read.
    let is_read = Arc::new(AtomicBool::new(false));
    let writer = {
        let (running, is_read) = (Arc::clone(&running), Arc::clone(&is_read));
        thread::spawn(move || {
            for length in 1..=STEPS {
                running.supply(Supply {
                    length,
                    after: length * 3,
                    read: length * 5,
                    newest: i64::try_from(length * 7).unwrap_or(0),
                });
                while length == STEPS / 2 && !is_read.load(Ordering::Acquire) {
                    thread::yield_now();
                }
            }
        })
    };
    let mut last = 0;
    let mut seen = 0;
    while last < STEPS {
        let Some(supply) = running.supplied() else {
            continue;
        };
        assert_eq!(supply.after, supply.length * 3);
        assert_eq!(supply.read, supply.length * 5);
        assert_eq!(supply.newest, i64::try_from(supply.length * 7).unwrap_or(0));
        assert!(supply.length >= last, "it grows");
        seen += usize::from(supply.length > last);
        last = supply.length;
        is_read.store(last > 0, Ordering::Release);
    }
    writer.join().expect("the leader does not fail");
    assert!(seen > 1, "it was read while it was written");
}

#[test]
fn it_is_either_committed_or_given_up() {
    let mut committed = 0;
    const ROUNDS: usize = 2000;
    for round in 0..ROUNDS {
        let running = started();
        let go = Arc::new(AtomicBool::new(false));
        let actor = |act: fn(&Running, usize) -> bool| {
            let (running, go) = (Arc::clone(&running), Arc::clone(&go));
            thread::spawn(move || {
                while !go.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                act(&running, round)
            })
        };
        let process = actor(|running, _| {
            loop {
                match running.state() {
                    State::Turn => return running.commit(1),
                    State::GivenUp => return false,
                    _ => thread::yield_now(),
                }
            }
        });
        let others = [
            actor(|running, _| running.is_whole(ending(3))),
            actor(|running, _| {
                while running.state() == State::Started {
                    thread::yield_now();
                }
                running.take_turn(1);
                false
            }),
        ];
        let giver = actor(|running, round| {
            for _ in 0..(round % 50) * 40 {
                std::hint::spin_loop();
            }
            running.give_up()
        });
        go.store(true, Ordering::Release);
        let was_committed = process.join().expect("the process does not fail");
        let was_given_up = giver.join().expect("nobody fails");
        for other in others {
            other.join().expect("nobody fails");
        }
        assert_ne!(was_committed, was_given_up, "one of the two");
        assert_eq!(
            running.state(),
            if was_committed {
                State::Committed
            } else {
                State::GivenUp
            }
        );
        committed += usize::from(was_committed);
    }
    println!("{committed} of {ROUNDS} were committed");
}
