//! Confirmed positions, under random interleavings of receiving, committing and flushing; and the
//! table of policies.

use braid_bgworker::policy::{Policy, backoff_ms, for_apply, for_provider, provider_hint};
use braid_bgworker::progress::Progress;
use braid_bgworker::reason::Reason;
use braid_bgworker::sqlstate::SqlState;

use crate::random::Random;

struct Transaction {
    remote_end: u64,
    /// Local end of its commit record; 0 if it wrote nothing.
    local_end: Option<u64>,
}

/// The flushed position never passes what is durable locally, the applied one never what is
/// committed locally. Neither goes back, and in the end everything is confirmed.
#[test]
fn i1_nothing_is_confirmed_that_is_not_durable() {
    let mut random = Random::new("i1_nothing_is_confirmed_that_is_not_durable");
    for _ in 0..3000 {
        let start = random.below(1000);
        let mut progress = Progress::new(start, 0);
        let (mut remote, mut local, mut flushed) = (start, random.below(50), 0);
        let mut transactions: Vec<Transaction> = Vec::new();
        let (mut committed, mut collected) = (0, 0);
        let mut last = progress.update(0, false);
        for step in 0..random.below(200) {
            match random.below(7) {
                // A whole transaction arrives.
                0 | 1 => {
                    remote += 1 + random.below(100);
                    transactions.push(Transaction {
                        remote_end: remote,
                        local_end: None,
                    });
                    progress.received(remote);
                }
                // The provider reports its position, with nothing to apply up to it.
                2 => {
                    remote += random.below(100);
                    progress.received(remote);
                }
                // A local commit. Some write nothing.
                3 | 4 if committed < transactions.len() => {
                    local += 1 + random.below(20);
                    let nothing = random.one_in(4);
                    transactions[committed].local_end = Some(if nothing { 0 } else { local });
                    committed += 1;
                }
                // The local WAL is flushed, up to a random position,
                5 => flushed += random.below(local - flushed + 1),
                // or up to where the leader requests.
                6 => flushed = flushed.max(progress.unflushed().unwrap_or(0)),
                _ => {}
            }
            while collected < committed && !random.one_in(3) {
                let transaction = &transactions[collected];
                progress.applied(transaction.remote_end, transaction.local_end.unwrap());
                collected += 1;
            }
            let positions = progress.update(flushed, collected < transactions.len());
            for transaction in &transactions {
                let durable = transaction.local_end.is_some_and(|end| end <= flushed);
                assert!(
                    durable || positions.flushed < transaction.remote_end,
                    "step {step}: {} is confirmed as flushed",
                    transaction.remote_end
                );
                assert!(
                    transaction.local_end.is_some() || positions.applied < transaction.remote_end,
                    "step {step}: {} is confirmed as applied",
                    transaction.remote_end
                );
            }
            assert!(
                positions.flushed <= positions.applied && positions.applied <= positions.received
            );
            assert!(positions.flushed >= last.flushed && positions.applied >= last.applied);
            last = positions;
        }
        // Once everything is applied, one flush up to the requested position confirms everything.
        for transaction in &transactions[collected..] {
            local += 1;
            progress.applied(
                transaction.remote_end,
                transaction.local_end.unwrap_or(local),
            );
        }
        let flushed = flushed.max(progress.unflushed().unwrap_or(0));
        let positions = progress.update(flushed, false);
        assert_eq!((positions.flushed, positions.applied), (remote, remote));
        assert_eq!(progress.unflushed(), None);
    }
}

/// All SQLSTATEs that PostgreSQL could raise: five of 36 characters. A class has one policy except
/// for the codes named below.
#[test]
fn every_sqlstate_has_a_policy_and_classes_keep_together() {
    let characters: Vec<char> = ('0'..='9').chain('A'..='Z').collect();
    let tails = [
        "000", "001", "006", "P01", "P02", "P03", "P04", "P05", "014", "505", "ZZZ", "100", "200",
        "300",
    ];
    for first in &characters {
        for second in &characters {
            for tail in tails {
                let code = format!("{first}{second}{tail}");
                let apply = match code.as_str() {
                    "40001" | "40P01" | "55P03" | "57014" => Policy::Retry,
                    "53000" | "53100" | "53200" | "53300" | "55006" => Policy::Reconnect,
                    _ if code.starts_with("57P") || code.starts_with("08") => Policy::Reconnect,
                    "XX000" => Policy::Conflict,
                    _ if code.starts_with("23") => Policy::Conflict,
                    _ => Policy::Stop,
                };
                assert_eq!(for_apply(SqlState::parse(&code)), apply, "{code}");
                let reconnects = ["57", "53", "08"]
                    .iter()
                    .any(|class| code.starts_with(class))
                    && code != "08P01"
                    || ["55006", "25P03", "25P04"].contains(&code.as_str());
                let provider = if reconnects {
                    Policy::Reconnect
                } else {
                    Policy::Stop
                };
                assert_eq!(for_provider(SqlState::parse(&code)), provider, "{code}");
            }
        }
    }
    assert_eq!(for_apply(SqlState::LockNotAvailable), Policy::Retry);
    assert_eq!(for_provider(SqlState::ObjectInUse), Policy::Reconnect);
    // A text that is no SQLSTATE stops the subscription: somebody has to intervene.
    for odd in ["", "5", "4000", "é", "\0\0\0\0\0"].map(SqlState::parse) {
        assert_eq!(
            (for_apply(odd), for_provider(odd)),
            (Policy::Stop, Policy::Stop),
            "{odd:?}"
        );
        assert_eq!(provider_hint(odd, None), "");
    }
    assert!(provider_hint(SqlState::UndefinedObject, Some(Reason::SlotMissing)).contains("slot"));
}

#[test]
fn pauses_grow_up_to_the_bound_and_never_shrink() {
    let mut random = Random::new("pauses_grow_up_to_the_bound_and_never_shrink");
    for _ in 0..1000 {
        let (first, most) = (
            1 + (random.next() >> random.below(64) >> 1),
            1 + (random.next() >> random.below(63) >> 2),
        );
        let mut last = 0;
        for attempt in (0..70).chain([u32::MAX]) {
            let pause = backoff_ms(attempt, first, most);
            assert!(pause >= last && pause <= most, "{first} {most} {attempt}");
            last = pause;
        }
        assert_eq!(last, most.max(first.min(most)));
    }
}
