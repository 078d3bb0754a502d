use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use proptest::prelude::*;

use super::*;

type Rows = BTreeMap<u32, u32>;

/// Answers for one side as a server does.
fn read(rows: &Rows, range: &Range, limit: u64) -> Sum {
    let number = |key: &Key| key.concat().parse::<u32>().unwrap_or(0);
    let (after, upto) = (
        range.after.as_ref().map(number),
        range.upto.as_ref().map(number),
    );
    let found: Vec<(u32, u32)> = rows
        .iter()
        .map(|(key, value)| (*key, *value))
        .filter(|(key, _)| after.is_none_or(|after| *key > after))
        .filter(|(key, _)| upto.is_none_or(|upto| *key <= upto))
        .take(usize::try_from(limit).unwrap_or(usize::MAX))
        .collect();
    let hash = found.iter().fold(0, |sum: u64, row| {
        sum.wrapping_add(BuildHasherDefault::<DefaultHasher>::default().hash_one(row))
    });
    Sum {
        rows: found.len() as u64,
        hash: hash.to_string(),
        last: found
            .last()
            .filter(|_| found.len() as u64 == limit)
            .map(|(key, _)| vec![key.to_string()]),
    }
}

/// Walks both sides. Returns the keys that were listed, and how many rows the longest list had.
fn walk(here: &Rows, there: &Rows, rows: u64) -> (BTreeSet<u32>, u64) {
    let mut ranges = Ranges::default();
    let (mut listed, mut longest) = (BTreeSet::new(), 0);
    while let Some(range) = ranges.take() {
        let asked = range.rows.unwrap_or(rows);
        let mine = read(here, &range, asked);
        let range = ranges.cut(range, asked, mine.last.as_ref());
        let theirs = read(there, &range, Ranges::ask(&range));
        if let Outcome::List(range) = ranges.compare(range, &mine, &theirs) {
            for side in [here, there] {
                let all = read(side, &range, u64::MAX);
                longest = longest.max(all.rows);
                let number = |key: &Key| key.concat().parse::<u32>().unwrap_or(0);
                listed.extend(side.keys().copied().filter(|key| {
                    range
                        .after
                        .as_ref()
                        .is_none_or(|after| *key > number(after))
                        && range.upto.as_ref().is_none_or(|upto| *key <= number(upto))
                }));
            }
        }
    }
    (listed, longest)
}

fn differences(here: &Rows, there: &Rows) -> BTreeSet<u32> {
    here.keys()
        .chain(there.keys())
        .copied()
        .filter(|key| here.get(key) != there.get(key))
        .collect()
}

#[test]
fn equal_tables_are_read_once_and_never_listed() {
    let rows: Rows = (0..100_000).map(|key| (key, key)).collect();
    assert_eq!(walk(&rows, &rows, 16_000), (BTreeSet::new(), 0));
    assert_eq!(walk(&Rows::new(), &Rows::new(), 16_000).1, 0);
}

#[test]
fn one_row_among_many_is_listed_with_few_others() {
    let here: Rows = (0..100_000).map(|key| (key, 0)).collect();
    let mut there = here.clone();
    there.insert(70_001, 1);
    let (listed, longest) = walk(&here, &there, LARGEST);
    assert!(listed.contains(&70_001));
    assert!(listed.len() as u64 <= LISTED && longest <= LISTED);
}

#[test]
fn a_side_without_rows_does_not_make_a_long_list() {
    let (full, empty): (Rows, Rows) = ((0..50_000).map(|key| (key, 0)).collect(), Rows::new());
    for (here, there) in [(&full, &empty), (&empty, &full)] {
        let (listed, longest) = walk(here, there, LARGEST);
        assert_eq!(listed.len(), full.len());
        assert!(longest <= 2 * LISTED, "{longest}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_difference_is_listed(
        here in prop::collection::btree_map(0_u32..20_000, 0_u32..2, 0..6_000),
        changes in prop::collection::btree_map(0_u32..20_000, prop::option::of(0_u32..3), 0..40),
        rows in 1_u64..20_000,
    ) {
        let mut there = here.clone();
        for (key, change) in changes {
            match change {
                Some(value) => { there.insert(key, value); }
                None => { there.remove(&key); }
            }
        }
        let (listed, longest) = walk(&here, &there, rows);
        prop_assert!(differences(&here, &there).is_subset(&listed));
        prop_assert!(longest <= 2 * LISTED.max(rows.min(LISTED)));
    }
}

#[test]
fn lists_are_compared_by_key_whatever_their_order() {
    let row = |key: &str, hash: &str| (vec![key.to_owned()], hash.to_owned());
    let mut keys = differing(
        vec![row("a", "1"), row("b", "1"), row("c", "1")],
        vec![row("c", "2"), row("d", "1"), row("a", "1")],
    );
    keys.sort();
    assert_eq!(
        keys,
        [
            vec!["b".to_owned()],
            vec!["c".to_owned()],
            vec!["d".to_owned()]
        ]
    );
}

fn seen(hash: &str, xid: &str, version: Option<(i64, &str)>) -> Option<Seen> {
    Some(Seen {
        hash: hash.to_owned(),
        xid: xid.to_owned(),
        version: version.map(|(timestamp, origin)| (timestamp, origin.to_owned())),
    })
}

#[test]
fn what_stands_still_and_differs_is_a_difference() {
    let sight = |here, there| Sight { here, there };
    let old = sight(seen("1", "10", None), seen("2", "20", None));
    assert_eq!(verdict(&old, &old), Verdict::Differs);
    // The provider's row has been replicated.
    let came = sight(seen("2", "11", None), seen("2", "20", None));
    assert_eq!(verdict(&old, &came), Verdict::Equal);
    // Written again on either side, with or without other contents.
    let moved = sight(seen("1", "10", None), seen("3", "21", None));
    assert_eq!(verdict(&old, &moved), Verdict::Moves);
    let rewritten = sight(seen("1", "12", None), seen("2", "20", None));
    assert_eq!(verdict(&old, &rewritten), Verdict::Moves);
    // Deleted on one side in the meantime, then on both.
    let gone = sight(None, seen("2", "20", None));
    assert_eq!(
        (verdict(&old, &gone), gone.kind()),
        (Verdict::Moves, "missing_here")
    );
    assert_eq!(verdict(&gone, &gone), Verdict::Differs);
    assert_eq!(verdict(&gone, &Sight::default()), Verdict::Equal);
}

#[test]
fn the_newest_version_is_repaired_at_the_other_node() {
    let newest = |here, there| repair(Side::Newest, &Sight { here, there });
    let provider = |here, there| repair(Side::Provider, &Sight { here, there });
    let (old, new) = (Some((1, "b")), Some((2, "a")));
    assert_eq!(
        newest(seen("1", "1", old), seen("2", "1", new)),
        Repair::Update
    );
    assert!(matches!(
        newest(seen("1", "1", new), seen("2", "1", old)),
        Repair::Keep(_)
    ));
    assert!(matches!(
        newest(seen("1", "1", new), seen("2", "1", new)),
        Repair::Keep(_)
    ));
    assert!(matches!(
        newest(seen("1", "1", None), seen("2", "1", None)),
        Repair::Keep(_)
    ));
    assert_eq!(
        newest(seen("1", "1", None), seen("2", "1", old)),
        Repair::Update
    );
    assert_eq!(newest(None, seen("2", "1", old)), Repair::Insert);
    assert!(matches!(newest(seen("1", "1", old), None), Repair::Keep(_)));
    assert_eq!(
        provider(seen("1", "1", new), seen("2", "1", old)),
        Repair::Update
    );
    assert_eq!(provider(seen("1", "1", new), None), Repair::Delete);
    assert_eq!(provider(None, seen("1", "1", None)), Repair::Insert);
    assert!(matches!(provider(None, None), Repair::Keep(_)));
    // If timestamps are equal, the name decides, in byte order.
    assert_eq!(
        newest(
            seen("1", "1", Some((1, "a"))),
            seen("2", "1", Some((1, "b")))
        ),
        Repair::Update
    );
}

#[test]
fn ranges_grow_until_they_take_long_and_a_limit_pauses() {
    let mut pace = Pace::new(None);
    for _ in 0..20 {
        let rows = pace.rows();
        assert_eq!(pace.took(rows, Duration::from_millis(10)), Duration::ZERO);
    }
    assert_eq!(pace.rows(), LARGEST);
    pace.took(LARGEST, Duration::from_secs(1));
    assert_eq!(pace.rows(), LARGEST / 2);
    // A short range at the end of a table does not change the size.
    pace.took(3, Duration::from_millis(1));
    assert_eq!(pace.rows(), LARGEST / 2);
    let mut limited = Pace::new(NonZeroU64::new(500));
    assert_eq!(limited.rows(), 500);
    assert_eq!(
        limited.took(500, Duration::from_millis(200)),
        Duration::from_millis(800)
    );
}
