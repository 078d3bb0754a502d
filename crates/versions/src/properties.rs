//! Properties of bytes and of declarations, over random values.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;

use crate::{
    Access, Announcement, Answer, Batch, Boot, Bytes, Cut, Declaration, End, Ends, Grant, GrantId,
    Granted, Malformed, NUMBER_LIMIT, NodeNumber, Record, Refusal, Release, Released, Report,
    Request, Scope, Shipped, TableName, TableNumber, Term, Version,
};

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..9_u64, 0..NUMBER_LIMIT]
}

fn table() -> impl Strategy<Value = TableNumber> {
    prop_oneof![0..5_u32, any::<u32>()].prop_map(TableNumber)
}

fn node() -> impl Strategy<Value = NodeNumber> {
    (1..=u16::MAX).prop_map(NodeNumber)
}

fn id() -> impl Strategy<Value = GrantId> {
    (node(), number(), number()).prop_map(|(node, boot, number)| GrantId {
        node,
        boot: Boot(boot),
        number,
    })
}

fn versions() -> impl Strategy<Value = (Version, Option<Version>)> {
    (0..NUMBER_LIMIT / 2, option::of(1..NUMBER_LIMIT / 2))
        .prop_map(|(seen, above)| (Version(seen), above.map(|above| Version(seen + above))))
}

fn record() -> impl Strategy<Value = Record> {
    let tables = btree_map(table(), versions(), 0..5);
    (number(), id(), tables).prop_map(|(term, id, tables)| Record {
        term: Term(term),
        id,
        tables: tables
            .into_iter()
            .map(|(table, (seen, own))| (table, Shipped { seen, own }))
            .collect(),
    })
}

fn grant() -> impl Strategy<Value = Grant> {
    let granted = (versions(), any::<bool>(), option::of(node()));
    let granted = granted.prop_map(|((seen, own), declared, holder)| Granted {
        seen,
        own,
        declared,
        holder,
    });
    (number(), id(), btree_map(table(), granted, 0..5)).prop_map(|(term, id, tables)| Grant {
        term: Term(term),
        id,
        tables,
    })
}

fn release() -> impl Strategy<Value = Release> {
    let tables = || btree_set(table(), 0..4);
    let released = prop_oneof![
        tables().prop_map(Released::Committed),
        Just(Released::Void),
        tables().prop_map(Released::Unused),
    ];
    (number(), released).prop_map(|(number, released)| Release { number, released })
}

fn batch() -> impl Strategy<Value = Batch> {
    let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
    let request = (number(), btree_map(table(), access, 0..4));
    let request = request.prop_map(|(number, tables)| Request { number, tables });
    let head = (number(), node(), number(), number());
    (head, vec(request, 0..4), vec(release(), 0..4)).prop_map(
        |((term, node, boot, low), requests, releases)| Batch {
            term: Term(term),
            node,
            boot: Boot(boot),
            low,
            requests,
            releases,
        },
    )
}

fn answer() -> impl Strategy<Value = Answer> {
    let refusal = prop_oneof![
        Just(Refusal::NotActing),
        Just(Refusal::NoMajority),
        Just(Refusal::OtherTerm),
        Just(Refusal::OtherBoot),
        Just(Refusal::Fenced),
        Just(Refusal::Tables),
        Just(Refusal::TooMany),
        Just(Refusal::Window),
        Just(Refusal::NotAll),
    ];
    let refused = vec((number(), refusal), 0..4);
    (vec(grant(), 0..4), refused, vec(release(), 0..4)).prop_map(|(grants, refused, confirmed)| {
        Answer {
            grants,
            refused,
            confirmed,
        }
    })
}

fn ends() -> impl Strategy<Value = Ends> {
    let end = (0..NUMBER_LIMIT / 2, 0..NUMBER_LIMIT / 2).prop_map(|(committed, void)| End {
        committed: Version(committed),
        settled: Version(committed + void),
    });
    btree_map(table(), end, 0..5)
}

fn cut() -> impl Strategy<Value = Cut> {
    let void = btree_set((table(), number().prop_map(Version)), 0..5);
    let scope = prop_oneof![
        ends().prop_map(|ends| Scope::Everyone { ends }),
        (node(), number(), void).prop_map(|(node, boot, void)| Scope::Node {
            node,
            boot: Boot(boot),
            void
        }),
    ];
    (0..NUMBER_LIMIT - 1, scope).prop_map(|(follows, scope)| Cut {
        term: Term(follows + 1),
        follows: Term(follows),
        scope,
    })
}

/// The value comes back, no part of its bytes is a value, and a changed byte is no panic: another
/// value, whose bytes are these, or an error.
fn travels<T: Bytes + PartialEq + Debug>(value: &T, at: usize, to: u8) {
    let bytes = value.encode();
    assert_eq!(&T::decode(&bytes).unwrap(), value);
    for len in 0..bytes.len() {
        assert!(T::decode(&bytes[..len]).is_err());
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(T::decode(&longer), Err(Malformed::Trailing(T::WHAT)));
    let mut changed = bytes;
    let at = at % changed.len();
    changed[at] = to;
    if let Ok(other) = T::decode(&changed) {
        assert_eq!(other.encode(), changed);
    }
    changed[0] = 2;
    let (what, version) = (T::WHAT, 2);
    assert_eq!(
        T::decode(&changed),
        Err(Malformed::UnknownVersion { what, version })
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn values_travel(
        record in record(), grant in grant(), batch in batch(), answer in answer(), cut in cut(),
        (term, ends) in (number().prop_map(Term), ends()), at in any::<usize>(), to in any::<u8>(),
    ) {
        travels(&record, at, to);
        travels(&grant, at, to);
        travels(&batch, at, to);
        travels(&answer, at, to);
        travels(&cut, at, to);
        travels(&Announcement { term, ends: ends.clone() }, at, to);
        travels(&Report { term, ends }, at, to);
    }

    #[test]
    fn any_bytes_are_a_value_or_an_error(mut bytes in vec(any::<u8>(), 0..200), known in any::<bool>()) {
        if known && let Some(first) = bytes.first_mut() {
            *first = 1;
        }
        let _ = Record::decode(&bytes);
        let _ = Grant::decode(&bytes);
        let _ = Batch::decode(&bytes);
        let _ = Answer::decode(&bytes);
        let _ = Cut::decode(&bytes);
        let _ = Report::decode(&bytes);
        let _ = Announcement::decode(&bytes);
    }

    /// The canonical text is read as the same declaration, whatever the names are.
    #[test]
    fn a_declaration_comes_back(
        tables in vec((option::of("[^\0]{1,9}"), "[^\0]{1,9}", any::<bool>()), 1..9),
    ) {
        let access = |write| if write { Access::Write } else { Access::Read };
        let tables = tables.into_iter().map(|(schema, table, write)| {
            (TableName { schema, table }, access(write))
        });
        let declaration = Declaration::new(tables).unwrap();
        let text = declaration.to_string();
        prop_assert_eq!(text.parse::<Declaration>().unwrap(), declaration, "{}", text);
    }

    #[test]
    fn any_text_is_a_declaration_or_an_error(text in "(read |write |[a-z\"., ]|\\PC){0,30}") {
        match text.parse::<Declaration>() {
            Ok(declaration) => {
                let canonical = declaration.to_string();
                prop_assert_eq!(canonical.parse::<Declaration>().unwrap(), declaration);
            }
            Err(error) => prop_assert!(error.position <= text.chars().count() + 1),
        }
    }
}

/// Counts that promise more than there is take no memory.
#[test]
fn a_count_is_bounded() {
    let grant = Grant {
        term: Term(1),
        id: GrantId {
            node: NodeNumber(1),
            boot: Boot(1),
            number: 1,
        },
        tables: BTreeMap::new(),
    };
    let mut bytes = grant.encode();
    let count = bytes.len() - 4;
    bytes[count..].copy_from_slice(&u32::MAX.to_be_bytes());
    let (what, limit) = (Grant::WHAT, crate::TABLES_LIMIT);
    assert_eq!(
        Grant::decode(&bytes),
        Err(Malformed::TooMany { what, limit })
    );
    bytes[count..].copy_from_slice(&200_u32.to_be_bytes());
    assert_eq!(
        Grant::decode(&bytes),
        Err(Malformed::Truncated(Grant::WHAT))
    );
    // Tables out of order, or twice, are not valid.
    let release = |tables: &[u32]| {
        let mut bytes = vec![1, 0, 0, 0, 0, 0, 0, 0, 1, 3];
        bytes.extend_from_slice(&u32::try_from(tables.len()).unwrap().to_be_bytes());
        for table in tables {
            bytes.extend_from_slice(&table.to_be_bytes());
        }
        Release::decode(&bytes)
    };
    let unused = Released::Unused(BTreeSet::from([TableNumber(1), TableNumber(2)]));
    assert_eq!(release(&[1, 2]).unwrap().released, unused);
    assert_eq!(release(&[2, 1]), Err(Malformed::Invalid(Release::WHAT)));
    assert_eq!(release(&[1, 1]), Err(Malformed::Invalid(Release::WHAT)));
}
