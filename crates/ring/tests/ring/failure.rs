//! Failures, from an applier to the leader.

use braid_ring::FailureReport;

use crate::memory::{ring, small};

fn report(message: &str) -> FailureReport {
    FailureReport {
        lsn: 77,
        sqlstate: *b"23505",
        comes_again: true,
        reason: 3,
        message: message.into(),
        detail: "a detail".into(),
        hint: String::new(),
        context: "line 3 of a function\nprocessing data".into(),
    }
}

#[test]
fn i7_a_failure_arrives_as_it_was() {
    let (memory, leader) = ring(small());
    assert_eq!(leader.ring().failure().get(), None);
    memory
        .attach()
        .unwrap()
        .failure()
        .report(&report("duplicate key"));
    assert_eq!(leader.ring().failure().get(), Some(report("duplicate key")));
}

#[test]
fn long_texts_are_cut_between_characters() {
    let (_memory, leader) = ring(small());
    let long = format!("{}{}", "x".repeat(999), "é".repeat(500));
    let failure = FailureReport {
        detail: "é".repeat(501),
        hint: "€".repeat(334),
        context: format!("{}\nprocessing data", "é".repeat(600)),
        ..report(&long)
    };
    leader.ring().failure().report(&failure);
    let read = leader.ring().failure().get().unwrap();
    assert_eq!(read.message, "x".repeat(999));
    assert_eq!(read.detail, "é".repeat(500));
    assert_eq!(read.hint, "€".repeat(333));
    assert_eq!(
        read.context,
        format!("{} ...\nprocessing data", "é".repeat(490))
    );
}

#[test]
fn the_first_failure_stays() {
    let (_memory, leader) = ring(small());
    leader.ring().failure().report(&report("the cause"));
    leader.ring().failure().report(&report("a consequence"));
    assert_eq!(leader.ring().failure().get().unwrap().message, "the cause");
}

#[test]
fn of_many_at_once_one_is_kept_whole() {
    for _ in 0..50 {
        let (memory, leader) = ring(small());
        std::thread::scope(|scope| {
            for number in 0..4_u64 {
                let memory = &memory;
                scope.spawn(move || {
                    let text = number.to_string().repeat(1000);
                    let digit = b'0' + u8::try_from(number).unwrap();
                    let failure = FailureReport {
                        lsn: number,
                        sqlstate: [digit, b'0', b'0', b'0', b'0'],
                        comes_again: number % 2 == 0,
                        reason: digit,
                        message: text.clone(),
                        detail: text.clone(),
                        context: format!("context {number}"),
                        hint: text,
                    };
                    memory.attach().unwrap().failure().report(&failure);
                });
            }
            while leader.ring().failure().get().is_none() {
                std::thread::yield_now();
            }
        });
        let read = leader.ring().failure().get().unwrap();
        let text = read.lsn.to_string().repeat(1000);
        let digit = b'0' + u8::try_from(read.lsn).unwrap();
        assert_eq!(read.sqlstate, [digit, b'0', b'0', b'0', b'0']);
        assert_eq!(read.comes_again, read.lsn % 2 == 0);
        assert_eq!(read.reason, digit);
        assert!(read.message == text && read.detail == text && read.hint == text);
    }
}
