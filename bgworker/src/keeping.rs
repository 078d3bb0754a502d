//! Changes that the members of a group keep for each other, in case one of them dies. Decides when
//! the slot that keeps them may advance, and which member forwards a dead member's last
//! transactions to which. Run by the steps process.
//!
//! Each member has one slot in its own WAL. A *sample* is a position in that WAL, and for each
//! other member the position up to which its transactions were applied locally by then. Positions
//! are those of each member's own WAL; 0 stands for nothing.

use std::collections::BTreeMap;

/// Up to which position a member has the transactions of others, by the others' numbers.
pub type Vector = BTreeMap<u64, u64>;

/// Returns whether every other member has everything before a sample, so that nobody needs it from
/// this node. `others` are these members' vectors by their numbers; `None` for a member that does
/// not answer.
#[must_use]
pub fn may_move(sample: &Vector, others: &BTreeMap<u64, Option<Vector>>) -> bool {
    others.iter().all(|(member, vector)| {
        let Some(vector) = vector else {
            return false;
        };
        sample
            .iter()
            .filter(|(of, _)| *of != member)
            .all(|(of, position)| vector.get(of).copied().unwrap_or(0) >= *position)
    })
}

/// Another member that survives a dead one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Survivor {
    /// The member's number.
    pub member: u64,
    /// Position of the dead member's last transaction that the survivor has.
    pub has: u64,
    /// Position of the dead member behind which the survivor can forward; `None` if it keeps
    /// nothing.
    pub keeps_from: Option<u64>,
}

/// A member's part in a recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The largest position of the dead member that a survivor has.
    pub most: u64,
    /// The member that forwards what this node lacks; `None` if it lacks nothing, or nobody can.
    pub from: Option<u64>,
    /// Transactions between `has` and this position are lost for this node: nobody can forward them
    /// any more. Not larger than `has` if nothing is lost.
    pub gone_to: u64,
}

/// Returns the share of a member that has the dead one's transactions up to `has`.
///
/// The survivor with the largest position forwards. If there are several, one that keeps everything
/// that is lacked is chosen, then the one with the lowest number.
#[must_use]
pub fn share(has: u64, others: &[Survivor]) -> Share {
    let most = others.iter().map(|other| other.has).fold(has, u64::max);
    if most == has {
        return Share {
            most,
            from: None,
            gone_to: has,
        };
    }
    let best = others
        .iter()
        .filter(|other| other.has == most)
        .filter_map(|other| Some((other.keeps_from?.max(has), other.member)))
        .min();
    match best {
        Some((kept, _)) if kept >= most => Share {
            most,
            from: None,
            gone_to: most,
        },
        Some((gone_to, member)) => Share {
            most,
            from: Some(member),
            gone_to,
        },
        None => Share {
            most,
            from: None,
            gone_to: most,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vector(pairs: &[(u64, u64)]) -> Vector {
        pairs.iter().copied().collect()
    }

    #[test]
    fn a_slot_moves_when_the_slowest_has_it() {
        let sample = vector(&[(2, 20), (3, 30)]);
        // Member 2 has its position, and so has member 3.
        let both = |two: &[(u64, u64)], three: &[(u64, u64)]| {
            BTreeMap::from([(2, Some(vector(two))), (3, Some(vector(three)))])
        };
        assert!(may_move(&sample, &both(&[(3, 30)], &[(2, 20)])));
        assert!(may_move(&sample, &both(&[(3, 31)], &[(2, 25)])));
        assert!(!may_move(&sample, &both(&[(3, 29)], &[(2, 20)])));
        assert!(!may_move(&sample, &both(&[(3, 30)], &[])));
        let mut away = both(&[(3, 30)], &[(2, 20)]);
        away.insert(4, None);
        assert!(!may_move(&sample, &away), "who does not answer may lack it");
        assert!(may_move(&Vector::new(), &both(&[], &[])));
    }

    #[test]
    fn who_has_most_passes_it_on() {
        let other = |member, has, keeps_from| Survivor {
            member,
            has,
            keeps_from,
        };
        let of = |has, others: &[Survivor]| {
            let share = share(has, others);
            (share.most, share.from, share.gone_to)
        };
        assert_eq!(of(20, &[]), (20, None, 20), "nobody else");
        assert_eq!(
            of(20, &[other(2, 20, Some(5)), other(3, 10, None)]),
            (20, None, 20)
        );
        assert_eq!(
            of(10, &[other(2, 20, Some(5)), other(3, 15, Some(5))]),
            (20, Some(2), 10)
        );
        assert_eq!(
            of(10, &[other(3, 20, Some(12)), other(4, 20, Some(10))]),
            (20, Some(4), 10)
        );
        assert_eq!(
            of(10, &[other(4, 20, Some(0)), other(3, 20, Some(10))]),
            (20, Some(3), 10)
        );
        assert_eq!(
            of(10, &[other(2, 20, Some(12))]),
            (20, Some(2), 12),
            "a part is gone"
        );
        assert_eq!(
            of(10, &[other(2, 20, Some(20))]),
            (20, None, 20),
            "all of it is gone"
        );
        assert_eq!(
            of(10, &[other(2, 20, None)]),
            (20, None, 20),
            "nothing is kept"
        );
    }

    /// Members 1 to `n` apply the transactions of member 0 in order, each at its own pace, and
    /// advance their slots by the others' answers. Then member 0 dies.
    #[derive(Debug, Clone)]
    enum Event {
        Commit,
        Apply(usize),
        Sample(usize),
        Move(usize),
    }

    fn events(members: usize) -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            3 => Just(Event::Commit),
            4 => (0..members).prop_map(Event::Apply),
            2 => (0..members).prop_map(Event::Sample),
            2 => (0..members).prop_map(Event::Move),
        ];
        proptest::collection::vec(event, 0..200)
    }

    proptest! {
        #[test]
        fn what_one_survivor_has_all_get(events in events(3)) {
            let mut written = 0_u64;
            let mut has = [0_u64; 3];
            let mut samples = [0_u64; 3];
            let mut kept = [0_u64; 3];
            for event in events {
                match event {
                    Event::Commit => written += 1,
                    Event::Apply(at) => has[at] = (has[at] + 1).min(written),
                    Event::Sample(at) => samples[at] = has[at],
                    Event::Move(at) => {
                        let others = (0..3)
                            .filter(|other| *other != at)
                            .map(|other| (other as u64 + 1, Some(vector(&[(0, has[other])]))))
                            .collect();
                        if may_move(&vector(&[(0, samples[at])]), &others) {
                            kept[at] = kept[at].max(samples[at]);
                        }
                    }
                }
            }
            let most = has.iter().copied().max().unwrap();
            for me in 0..3 {
                let others: Vec<Survivor> = (0..3)
                    .filter(|other| *other != me)
                    .map(|other| Survivor { member: other as u64 + 1, has: has[other], keeps_from: Some(kept[other]) })
                    .collect();
                let share = share(has[me], &others);
                prop_assert_eq!(share.most, most);
                prop_assert_eq!(share.gone_to, has[me], "nothing is missed");
                match share.from {
                    None => prop_assert_eq!(has[me], most),
                    Some(from) => {
                        let from = usize::try_from(from).unwrap() - 1;
                        prop_assert_eq!(has[from], most);
                        prop_assert!(kept[from] <= has[me]);
                    }
                }
            }
        }
    }
}
