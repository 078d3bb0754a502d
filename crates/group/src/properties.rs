//! Properties of bytes and of the state, over random commands.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::boot::{Boot, Known, Start};
use crate::cluster::{GROUP, id, new_member};
use crate::envelope::{Body, Envelope};
use crate::stored::Core;
use crate::{
    Command, ConnectionString, Distrust, Malformed, MemberId, MemberState, Monotonic, Outcome,
    Proposal, ProposalId, State, TableName, TableNumber, Token, Value, Version,
};

fn member() -> impl Strategy<Value = MemberId> {
    (1..6_u64).prop_map(id)
}

fn token() -> impl Strategy<Value = Token> {
    (1..3_u64, 1..40_u64).prop_map(|(term, index)| Token { term, index })
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![Just(b"a".to_vec()), Just(b"b".to_vec())]
}

fn state_of_member() -> impl Strategy<Value = MemberState> {
    prop_oneof![
        Just(MemberState::Joining),
        Just(MemberState::Active),
        Just(MemberState::Maintenance),
        Just(MemberState::Leaving),
        Just(MemberState::Removed),
    ]
}

fn command() -> impl Strategy<Value = Command> {
    prop_oneof![
        (2..9_u64).prop_map(|number| Command::AddMember(new_member(number))),
        member().prop_map(|member| Command::Activate { member }),
        (member(), state_of_member())
            .prop_map(|(member, state)| Command::SetState { member, state }),
        (member(), any::<bool>())
            .prop_map(|(member, read_only)| Command::SetReadOnly { member, read_only }),
        (member(), "[a-z =]{0,20}").prop_map(|(member, text)| Command::SetConnection {
            member,
            connection: ConnectionString::new(text).unwrap(),
        }),
        (member(), 0..2_u16).prop_map(|(member, minor)| Command::SetVersion {
            member,
            braid: Version::new(0, minor, 0),
            postgres: 18,
        }),
        member().prop_map(|member| Command::RemoveMember { member }),
        (key(), member()).prop_map(|(key, holder)| Command::TakeLock { key, holder }),
        (key(), token()).prop_map(|(key, token)| Command::ReleaseLock { key, token }),
        (key(), member(), any::<u64>(), any::<u64>(), any::<bool>()).prop_map(
            |(sequence, holder, size, at_least, wild)| Command::AssignBlock {
                sequence,
                holder,
                size: if wild { size } else { size % 20 },
                at_least: if wild { at_least } else { at_least % 50 },
            }
        ),
        ("[ab]", option::of("[a-z]{0,9}"))
            .prop_map(|(name, value)| Command::SetOption { name, value }),
        (key(), member(), 0..100_u64, option::of(token())).prop_map(
            |(name, holder, duration, instead_of)| Command::GrantLease {
                name,
                holder,
                duration,
                instead_of,
            }
        ),
        (key(), token(), any::<bool>()).prop_map(|(name, token, acting)| Command::RenewLease {
            name,
            token,
            acting
        }),
        (key(), token()).prop_map(|(name, token)| Command::ReleaseLease { name, token }),
        ("[ab]{0,1}", "[ab]").prop_map(|(schema, table)| Command::VersionTable {
            table: TableName {
                schema: (!schema.is_empty()).then_some(schema),
                table,
            },
        }),
        (0..4_u32).prop_map(|table| Command::UnversionTable {
            table: TableNumber(table),
        }),
        (0..4_u32, member(), any::<bool>()).prop_map(|(table, member, ends)| {
            Command::DrainTable {
                table: TableNumber(table),
                member,
                ends,
            }
        }),
        (0..3_u64, 0..9_u64).prop_map(|(follows, boot)| Command::CutVersions {
            cut: braid_versions::Cut {
                term: braid_versions::Term(follows + 1),
                follows: braid_versions::Term(follows),
                scope: braid_versions::Scope::Everyone {
                    ends: std::collections::BTreeMap::new(),
                },
            },
            boot,
        }),
        routing().prop_map(Command::Route),
        decided().prop_map(Command::Decide),
    ]
}

fn decided() -> impl Strategy<Value = braid_routing::Decided> {
    use braid_routing::{
        Basis, Decided, Decision, Finding, Key, Proposal, Shards, Spread, TableName, Tenant, Time,
    };
    ("[ab]", any::<i64>(), any::<bool>(), 0..4_u32, any::<u64>()).prop_map(
        |(table, time, adds, spread, amount)| Decided {
            table: TableName::new(table.as_bytes()).unwrap(),
            time: Time(time),
            adds,
            period: amount,
            decision: Decision {
                at: std::time::Duration::ZERO,
                basis: if adds { Basis::Writes } else { Basis::Storage },
                total: amount,
                floor: 1,
                threshold: 500,
                shards: Shards::new(8).unwrap(),
                rules: vec![Proposal {
                    spread: Spread::new(1 << spread).unwrap(),
                    findings: vec![Finding {
                        tenant: Tenant::new(&Key::Integer(time)).unwrap(),
                        amount,
                        error: 0,
                        periods: 2,
                        had: Spread::ONE,
                    }],
                }],
            },
        },
    )
}

fn routing() -> impl Strategy<Value = braid_routing::Entry> {
    use braid_routing::{Entry, Key, Shards, Spread, TableName, Tenant, Time};
    let table = || "[ab]".prop_map(|name| TableName::new(name.as_bytes()).unwrap());
    prop_oneof![
        (table(), 1..9_u32, 1..4_u64).prop_map(|(table, shards, nodes)| Entry::Route {
            table,
            expressions: braid_routing::Expressions {
                tenant: "t".to_owned(),
                record: "r".to_owned(),
                created: "c".to_owned(),
            },
            shards: Shards::new(shards).unwrap(),
            sets: (1..=nodes)
                .map(|node| braid_routing::NodeSet {
                    id: braid_routing::SetId(u32::try_from(node).unwrap()),
                    nodes: vec![braid_routing::NodeId(node)],
                })
                .collect(),
        }),
        table().prop_map(|table| Entry::Open { table }),
        table().prop_map(|table| Entry::Shut { table }),
        table().prop_map(|table| Entry::Unroute { table }),
        (-9..9_i64).prop_map(|time| Entry::Close { time: Time(time) }),
        (table(), -9..9_i64, 0..4_u32, 0..3_i64).prop_map(|(table, time, spread, tenant)| {
            Entry::Rule {
                table,
                time: Time(time),
                spread: Spread::new(1 << spread).unwrap(),
                tenants: vec![Tenant::new(&Key::Integer(tenant)).unwrap()],
            }
        }),
    ]
}

fn proposal() -> impl Strategy<Value = Proposal> {
    (1..5_u64, 1..3_u64, 1..90_u64, command()).prop_map(|(member, boot, counter, command)| {
        Proposal {
            id: ProposalId {
                member: id(member),
                boot,
                counter,
            },
            command,
        }
    })
}

fn begin() -> State {
    State::create(GROUP, "shop", new_member(1)).unwrap()
}

proptest! {
    #[test]
    fn an_entry_comes_back_and_each_part_of_it_is_refused(proposal in proposal()) {
        let bytes = proposal.encode().unwrap();
        prop_assert_eq!(Proposal::decode(&bytes).unwrap(), proposal);
        for len in 0..bytes.len() {
            prop_assert!(Proposal::decode(&bytes[..len]).is_err());
        }
        let mut longer = bytes;
        longer.push(0);
        prop_assert!(Proposal::decode(&longer).is_err());
    }

    #[test]
    fn any_bytes_are_an_entry_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
        let _ = Proposal::decode(&bytes);
        let _ = State::decode(&bytes);
        let _ = Envelope::decode(&bytes);
        let _ = Core::decode(&bytes);
        let _ = Known::decode(&bytes);
        let _ = crate::message::decode(&bytes, 1, 2);
        let _ = crate::message::decode_entry(&bytes);
    }

    /// Wherever a snapshot is taken, the rest of the log leads to the same state and answers.
    #[test]
    fn a_snapshot_is_the_state(log in vec(proposal(), 1..60), at in 0..60_usize) {
        let (mut one, mut other) = (begin(), begin());
        for (number, proposal) in log.iter().enumerate() {
            if number == at {
                other = State::decode(&other.encode()).unwrap();
            }
            let index = number as u64 + 2;
            prop_assert_eq!(one.apply(index, 1, proposal), other.apply(index, 1, proposal));
            prop_assert_eq!(&one, &other);
        }
        let bytes = one.encode();
        for len in (0..bytes.len()).step_by(7) {
            prop_assert!(State::decode(&bytes[..len]).is_err());
        }
    }

    /// A changed byte of a snapshot or of a message is another value or an error, never a panic.
    #[test]
    fn a_changed_byte_is_no_panic(log in vec(proposal(), 1..30), at in any::<usize>(), to in any::<u8>()) {
        let mut state = begin();
        for (number, proposal) in log.iter().enumerate() {
            let _ = state.apply(number as u64 + 2, 1, proposal);
        }
        let mut bytes = state.encode();
        let at = at % bytes.len();
        bytes[at] = to;
        if let Ok(mut state) = State::decode(&bytes) {
            let _ = state.configuration();
            for proposal in &log {
                let _ = state.apply(1000, 2, proposal);
            }
        }
    }

    #[test]
    fn what_is_given_is_given_once(log in vec(proposal(), 1..120)) {
        let mut state = begin();
        let mut answers: Vec<(ProposalId, Outcome)> = Vec::new();
        let (mut members, mut numbers) = (BTreeSet::from([id(1)]), BTreeSet::from([1]));
        let mut blocks: Vec<(Vec<u8>, u64, u64)> = Vec::new();
        for (number, proposal) in log.iter().enumerate() {
            let locked = |state: &State| state.locks().map(|(key, _)| key.to_vec()).collect::<BTreeSet<_>>();
            let before = locked(&state);
            let outcome = state.apply(number as u64 + 2, 1, proposal);
            if let Some((_, first)) = answers.iter().find(|(id, first)| *id == proposal.id && first.is_ok()) {
                // A repeat gets the first answer, or none once that is too old.
                prop_assert!(outcome.is_err() || outcome == *first);
                prop_assert_eq!(before, locked(&state));
                continue;
            }
            answers.push((proposal.id, outcome.clone()));
            match (outcome, &proposal.command) {
                (Ok(Value::Member { id, number }), _) => {
                    prop_assert!(members.insert(id) && numbers.insert(number.get()));
                }
                (Ok(Value::Block { start, size }), Command::AssignBlock { sequence, .. }) => {
                    let end = start + (size - 1);
                    prop_assert!(start >= 1 && i64::try_from(end).is_ok());
                    for (other, from, to) in &blocks {
                        prop_assert!(other != sequence || end < *from || *to < start);
                    }
                    blocks.push((sequence.clone(), start, end));
                }
                (Ok(Value::Lock { .. }), Command::TakeLock { key, .. }) => {
                    prop_assert!(!before.contains(key));
                }
                _ => {}
            }
            // Removed members hold nothing, and somebody has a vote.
            let present = |who: MemberId| state.member(who).unwrap().state != MemberState::Removed;
            prop_assert!(state.locks().all(|(_, lock)| present(lock.holder)));
            prop_assert!(state.leases().all(|(_, lease)| lease.holder.is_none_or(present)));
            prop_assert!(!state.configuration().0.is_empty());
        }
    }

    #[test]
    fn an_envelope_comes_back(
        (from, to) in (member(), member()), counter in any::<u64>(), asks in any::<bool>(),
        kind in 0..5, bytes in vec(any::<u8>(), 0..40),
    ) {
        let boot = Boot { counter, random: counter / 2 };
        let body = match kind {
            0 => Body::Raft(bytes),
            1 => Body::Propose(bytes),
            2 => Body::Ping { asks },
            3 => Body::Welcome { boot, voters: vec![1, 2, 3] },
            _ => Body::Refused { boot, why: Distrust::LostTerm { known: 3, has: 2 } },
        };
        let start = Start { term: 3, index: 4 };
        let envelope = Envelope { group: GROUP, from, to, boot, start, term: 5, applied: 6, body };
        let bytes = envelope.encode();
        prop_assert_eq!(Envelope::decode(&bytes).unwrap(), envelope);
    }
}

/// A later version's kind or format stops the reader with an error that says so.
#[test]
fn what_a_newer_braid_wrote_is_an_error() {
    let proposal = Proposal {
        id: ProposalId {
            member: id(1),
            boot: 1,
            counter: 1,
        },
        command: Command::Activate { member: id(1) },
    };
    let bytes = proposal.encode().unwrap();
    let mut newer = bytes.clone();
    newer[25..27].copy_from_slice(&999_u16.to_be_bytes());
    let unknown = Malformed::UnknownTag {
        what: "entry",
        tag: 999,
    };
    assert_eq!(Proposal::decode(&newer), Err(unknown));
    let mut newer = bytes;
    newer[31] = 2;
    assert!(matches!(
        Proposal::decode(&newer),
        Err(Malformed::UnknownVersion { version: 2, .. })
    ));
}

/// Messages of any kind with any content change a member or are refused; the library never sees
/// what makes it panic.
#[test]
fn no_message_makes_a_member_fail() {
    use braid_testing::Random;
    let mut random = Random::from_seed(7);
    let mut now = Monotonic(0);
    let mut cluster = crate::cluster::Cluster::grown(crate::Settings::default(), 3, &mut now);
    // Real messages, with numbers changed.
    let mut letters = Vec::new();
    for _ in 0..6 {
        now.0 += 100_000;
        for number in 1..=3 {
            cluster.tick(id(number), now);
        }
        let option = Command::SetOption {
            name: "o".into(),
            value: None,
        };
        cluster.propose(id(2), option, now);
        letters.extend(cluster.letters.clone());
        let round = std::mem::take(&mut cluster.letters);
        for letter in round {
            cluster.deliver(&letter, now);
        }
    }
    cluster.check().unwrap();
    for _ in 0..20_000 {
        let letter = &letters[random.index(letters.len())];
        let mut bytes = letter.bytes.clone();
        // Behind the envelope's head: kind and body.
        let head = 93;
        for _ in 0..=random.below(2) {
            if bytes.len() > head {
                let at = head + random.index(bytes.len() - head);
                bytes[at] = if random.one_in(2) {
                    u8::try_from(random.below(12)).unwrap()
                } else {
                    random.bytes(1)[0]
                };
            }
        }
        let agreement = cluster.agreement(letter.to).unwrap();
        match agreement.receive(&bytes, now) {
            Err(crate::Error::Stopped(crate::Stopped::Refused(_))) => {
                cluster.boot_anew(letter.to, now);
            }
            Err(error) => assert!(!error.is_final(), "{error}"),
            Ok(()) => {}
        }
        let agreement = cluster.agreement(letter.to).unwrap();
        while let Ok(Some(work)) = agreement.work() {
            agreement.persisted(work.number).unwrap();
        }
        if random.one_in(50) {
            cluster.boot_anew(letter.to, now);
        }
    }
}

#[test]
fn a_member_that_alone_has_shards_does_not_leave() {
    use braid_routing::{Entry, Expressions, NodeId, NodeSet, SetId, Shards, TableName};
    let mut state = begin();
    let mut index = 1;
    let mut apply = |command| {
        index += 1;
        let proposal = Proposal {
            id: ProposalId {
                member: id(1),
                boot: 1,
                counter: index,
            },
            command,
        };
        state.apply(index, 1, &proposal)
    };
    apply(Command::AddMember(new_member(2))).unwrap();
    apply(Command::Activate { member: id(2) }).unwrap();
    let table = TableName::new(b"public.orders").unwrap();
    let route = |sets: &[&[u64]]| {
        Command::Route(Entry::Route {
            table: TableName::new(b"public.orders").unwrap(),
            expressions: Expressions {
                tenant: "tenant_id".to_owned(),
                record: "order_id".to_owned(),
                created: "created_at".to_owned(),
            },
            shards: Shards::new(8).unwrap(),
            sets: sets
                .iter()
                .zip(1..)
                .map(|(nodes, id)| NodeSet {
                    id: SetId(id),
                    nodes: nodes.iter().map(|node| NodeId(*node)).collect(),
                })
                .collect(),
        })
    };
    let leave = Command::SetState {
        member: id(2),
        state: MemberState::Leaving,
    };
    apply(route(&[&[1], &[2]])).unwrap();
    let refused = apply(leave.clone()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "no other node has this node's rows of routed table public.orders"
    );
    let shut = Entry::Shut {
        table: table.clone(),
    };
    apply(Command::Route(shut)).unwrap();
    apply(Command::Route(Entry::Unroute { table })).unwrap();
    // Each node of a set has all of its rows.
    apply(route(&[&[1, 2]])).unwrap();
    apply(leave).unwrap();
}
