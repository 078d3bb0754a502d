//! Lock cycles through a prepared transaction. PostgreSQL's deadlock detector does not see them, as
//! a prepared transaction has no process that could be found waiting.
//!
//! A transaction that a subscription has prepared locally holds its locks until its end arrives in
//! the stream. So it waits for everything that is applied before: for all of the subscription's
//! appliers that have a current transaction. If one of these waits for the prepared transaction,
//! the cycle never ends. The wait may be indirect: through sessions, other subscriptions' appliers
//! and the transactions that these have prepared. The subscription can give the prepared
//! transaction up: it is rolled back locally, and sent again as a whole once it has committed.

use std::collections::{BTreeSet, HashSet};

/// Holder of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// A process, by its id.
    Process(i32),
    /// A transaction that a subscription has prepared: the subscription's number, and the
    /// transaction's id at its provider.
    Prepared(u32, u32),
}

/// A process waits for a lock that `holder` has, or that `holder` precedes it in the queue for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The process.
    pub process: i32,
    /// The holder that it waits for.
    pub holder: Holder,
}

/// Returns the transactions that `subscription` has prepared and that its own appliers wait for, by
/// their ids at the provider. `appliers` returns the processes of a subscription.
#[must_use]
pub fn through_own(
    subscription: u32,
    waits: &[Wait],
    appliers: impl Fn(u32) -> Vec<i32>,
) -> BTreeSet<u32> {
    let mut own = BTreeSet::new();
    let mut seen = HashSet::new();
    let mut ahead: Vec<Holder> = appliers(subscription)
        .into_iter()
        .map(Holder::Process)
        .collect();
    while let Some(holder) = ahead.pop() {
        if !seen.insert(holder) {
            continue;
        }
        match holder {
            Holder::Process(process) => {
                let waited_for = waits.iter().filter(|wait| wait.process == process);
                ahead.extend(waited_for.map(|wait| wait.holder));
            }
            Holder::Prepared(whose, xid) if whose == subscription => {
                own.insert(xid);
            }
            Holder::Prepared(whose, _) => {
                ahead.extend(appliers(whose).into_iter().map(Holder::Process));
            }
        }
    }
    own
}

#[cfg(test)]
mod tests {
    use super::Holder::{Prepared, Process};
    use super::*;

    const MINE: u32 = 1;
    const OTHER: u32 = 2;

    fn appliers(subscription: u32) -> Vec<i32> {
        match subscription {
            MINE => vec![10, 11],
            OTHER => vec![20],
            _ => Vec::new(),
        }
    }

    fn found(waits: &[(i32, Holder)]) -> Vec<u32> {
        let waits: Vec<Wait> = waits
            .iter()
            .map(|&(process, holder)| Wait { process, holder })
            .collect();
        through_own(MINE, &waits, appliers).into_iter().collect()
    }

    const NONE: [u32; 0] = [];

    #[test]
    fn nothing_waits() {
        assert_eq!(found(&[]), NONE);
        assert_eq!(found(&[(10, Process(99))]), NONE);
    }

    #[test]
    fn a_session_between() {
        assert_eq!(
            found(&[
                (11, Process(99)),
                (99, Process(98)),
                (98, Prepared(MINE, 7))
            ]),
            [7]
        );
        // No applier waits for that process.
        assert_eq!(found(&[(99, Process(98)), (98, Prepared(MINE, 7))]), NONE);
    }

    #[test]
    fn an_applier_alone() {
        assert_eq!(
            found(&[(10, Prepared(MINE, 7)), (10, Prepared(MINE, 8))]),
            [7, 8]
        );
    }

    #[test]
    fn two_subscriptions() {
        let each_other = [(10, Prepared(OTHER, 5)), (20, Prepared(MINE, 7))];
        assert_eq!(found(&each_other), [7]);
        assert_eq!(found(&each_other[..1]), NONE);
        // The end of transaction 5 does not depend on this subscription.
        assert_eq!(found(&[(10, Prepared(OTHER, 5)), (20, Process(99))]), NONE);
    }

    #[test]
    fn circles_of_processes_end() {
        assert_eq!(
            found(&[
                (10, Process(11)),
                (11, Process(10)),
                (11, Process(99)),
                (99, Process(10))
            ]),
            NONE
        );
    }
}
