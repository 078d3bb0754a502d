//! Properties of writesets, over rows in memory.

use super::*;
use proptest::prelude::*;

/// A column's value; `None` in the outer option is a value that WAL does not have.
type Cell = Option<Option<i64>>;

#[derive(Debug, Clone)]
struct Row(Vec<Cell>);

impl KeyValues for Row {
    fn feed(&mut self, column: usize, hasher: &mut KeyHasher) -> Fed {
        match self.0.get(column) {
            Some(Some(Some(value))) => {
                hasher.word(value.cast_unsigned());
                Fed::Value
            }
            Some(Some(None)) => Fed::Null,
            _ => Fed::Unavailable,
        }
    }
}

fn key(columns: &[usize], in_identity: bool) -> UniqueKey {
    let columns = columns
        .iter()
        .map(|column| (*column, format!("c{column}")))
        .collect();
    UniqueKey::new(("public", "t"), columns, true, in_identity)
}

/// A primary key on column 0, and another unique index on column 1.
fn two_keys(whole_row: bool) -> KeyPlan {
    KeyPlan::new(vec![key(&[0], true), key(&[1], whole_row)], false)
}

fn primary_key() -> KeyPlan {
    KeyPlan::new(vec![key(&[0], true)], false)
}

fn row(values: &[i64]) -> Row {
    Row(values.iter().map(|value| Some(Some(*value))).collect())
}

fn run(
    plan: &KeyPlan,
    operation: Operation,
    kind: BeforeKind,
    before: Option<&Row>,
    after: Option<&Row>,
) -> (Vec<u64>, bool) {
    let (mut before, mut after) = (before.cloned(), after.cloned());
    let mut out = vec![99];
    let images = Images {
        operation,
        kind,
        before: before.as_mut(),
        after: after.as_mut(),
    };
    let barrier = collect(plan, images, &mut out);
    (out, barrier)
}

fn insert(plan: &KeyPlan, after: &Row) -> (Vec<u64>, bool) {
    run(
        plan,
        Operation::Insert,
        BeforeKind::Absent,
        None,
        Some(after),
    )
}

fn meet(a: &[u64], b: &[u64]) -> bool {
    a.iter().any(|hash| b.contains(hash))
}

#[test]
fn a_changed_key_lists_both() {
    let plan = primary_key();
    let (old, new) = (row(&[1, 5]), row(&[2, 5]));
    let (keys, barrier) = run(
        &plan,
        Operation::Update,
        BeforeKind::Key,
        Some(&old),
        Some(&new),
    );
    assert!(!barrier);
    assert_eq!(keys.len(), 2);
    assert!(meet(&keys, &insert(&plan, &old).0));
    assert!(meet(&keys, &insert(&plan, &new).0));
}

#[test]
fn an_unchanged_key_is_listed_once() {
    let plan = primary_key();
    let same = row(&[1, 5]);
    let absent = run(
        &plan,
        Operation::Update,
        BeforeKind::Absent,
        None,
        Some(&same),
    );
    assert_eq!(absent, insert(&plan, &same));
    let full = KeyPlan::new(vec![key(&[0], true)], false);
    let (keys, barrier) = run(
        &full,
        Operation::Update,
        BeforeKind::Row,
        Some(&same),
        Some(&same),
    );
    assert_eq!((keys.len(), barrier), (1, false));
}

#[test]
fn giving_up_an_unknown_key_is_a_barrier() {
    let plan = two_keys(false);
    let new = row(&[1, 5]);
    assert!(
        run(
            &plan,
            Operation::Update,
            BeforeKind::Absent,
            None,
            Some(&new)
        )
        .1
    );
    let old = Row(vec![Some(Some(1)), Some(None)]);
    assert!(run(&plan, Operation::Delete, BeforeKind::Key, Some(&old), None).1);
    assert!(!insert(&plan, &new).1);
}

#[test]
fn whole_rows_know_every_key() {
    let plan = two_keys(true);
    let (old, new) = (row(&[1, 4]), row(&[1, 5]));
    let (keys, barrier) = run(
        &plan,
        Operation::Update,
        BeforeKind::Row,
        Some(&old),
        Some(&new),
    );
    assert!(!barrier);
    assert_eq!(keys.len(), 3);
    assert!(meet(&keys, &insert(&plan, &row(&[7, 4])).0));
    assert!(!run(&plan, Operation::Delete, BeforeKind::Row, Some(&old), None).1);
}

#[test]
fn rows_without_a_key_are_barriers_unless_new() {
    for whole_row in [false, true] {
        let plan = KeyPlan::new(Vec::new(), false);
        let kind = if whole_row {
            BeforeKind::Row
        } else {
            BeforeKind::Absent
        };
        let new = row(&[1]);
        assert_eq!(insert(&plan, &new), (Vec::new(), false));
        assert!(run(&plan, Operation::Update, kind, Some(&new), Some(&new)).1);
        assert!(run(&plan, Operation::Delete, kind, Some(&new), None).1);
    }
    // The only unique key has a null in the old row: nothing identifies the row.
    let plan = KeyPlan::new(vec![key(&[0], true)], false);
    let (old, new) = (Row(vec![Some(None)]), row(&[5]));
    let (keys, barrier) = run(
        &plan,
        Operation::Update,
        BeforeKind::Row,
        Some(&old),
        Some(&new),
    );
    assert_eq!((keys.len(), barrier), (1, true));
}

#[test]
fn what_cannot_be_computed_is_a_barrier() {
    let plan = KeyPlan::new(vec![key(&[0], true)], true);
    let (keys, barrier) = insert(&plan, &row(&[1]));
    assert_eq!((keys.len(), barrier), (1, true));
}

#[test]
fn nulls() {
    let mut secondary = key(&[1], false);
    let plan = KeyPlan::new(vec![key(&[0], true), secondary.clone()], false);
    let with_null = Row(vec![Some(Some(1)), Some(None)]);
    assert_eq!(insert(&plan, &with_null).0.len(), 1);
    secondary.nulls_distinct = false;
    let plan = KeyPlan::new(vec![key(&[0], true), secondary], false);
    let other = Row(vec![Some(Some(2)), Some(None)]);
    assert!(meet(&insert(&plan, &with_null).0, &insert(&plan, &other).0));
}

#[test]
fn unchanged_toast_comes_from_the_old_row_or_is_a_barrier() {
    let plan = KeyPlan::new(vec![key(&[0, 1], true)], false);
    let (old, new) = (row(&[1, 2]), Row(vec![Some(Some(3)), None]));
    let (keys, barrier) = run(
        &plan,
        Operation::Update,
        BeforeKind::Key,
        Some(&old),
        Some(&new),
    );
    assert!(!barrier);
    assert!(meet(&keys, &insert(&plan, &row(&[3, 2])).0));
    assert!(
        run(
            &plan,
            Operation::Update,
            BeforeKind::Absent,
            None,
            Some(&new)
        )
        .1
    );
    let no_help = Row(vec![Some(Some(1)), Some(None)]);
    assert!(
        run(
            &plan,
            Operation::Update,
            BeforeKind::Key,
            Some(&no_help),
            Some(&new)
        )
        .1
    );
}

#[test]
fn names_make_the_seed() {
    let columns = |names: [&str; 2]| vec![(0, names[0].to_owned()), (1, names[1].to_owned())];
    let base = UniqueKey::new(("s", "t"), columns(["a", "b"]), true, true);
    let swapped = UniqueKey::new(
        ("s", "t"),
        vec![(1, "b".to_owned()), (0, "a".to_owned())],
        true,
        true,
    );
    assert_eq!(base, swapped);
    for other in [
        UniqueKey::new(("s", "u"), columns(["a", "b"]), true, true),
        UniqueKey::new(("u", "t"), columns(["a", "b"]), true, true),
        UniqueKey::new(("s", "t"), columns(["a", "c"]), true, true),
        UniqueKey::new(("st", ""), columns(["a", "b"]), true, true),
    ] {
        assert_ne!(base.seed, other.seed);
    }
}

#[test]
fn the_stricter_of_two_equal_indexes_counts() {
    let mut strict = key(&[0], true);
    strict.nulls_distinct = false;
    for keys in [
        vec![key(&[0], true), strict.clone()],
        vec![strict, key(&[0], true)],
    ] {
        let plan = KeyPlan::new(keys, false);
        assert_eq!(insert(&plan, &Row(vec![Some(None)])).0.len(), 1);
    }
}

fn cell() -> impl Strategy<Value = Cell> {
    prop_oneof![4 => (0..4_i64).prop_map(|value| Some(Some(value))), 1 => Just(Some(None))]
}

fn keys_of(row: &Row, columns: &[usize]) -> Option<Vec<i64>> {
    columns
        .iter()
        .map(|column| row.0[*column].flatten())
        .collect()
}

proptest! {
    /// Two inserts share a hash exactly if they are equal in some unique key. Equal keys always
    /// share it; others (with 64 bits) never within a test's lifetime.
    #[test]
    fn inserts_meet_exactly_when_a_key_is_equal(
        a in prop::collection::vec(cell(), 4),
        b in prop::collection::vec(cell(), 4),
    ) {
        let (a, b) = (Row(a), Row(b));
        let indexes: [&[usize]; 4] = [&[0], &[1, 2], &[2, 1, 3], &[3]];
        let plan =
            KeyPlan::new(indexes.iter().map(|columns| key(columns, true)).collect(), false);
        let expected = indexes.iter().any(|columns| {
            keys_of(&a, columns).is_some_and(|key| Some(key) == keys_of(&b, columns))
        });
        prop_assert_eq!(meet(&insert(&plan, &a).0, &insert(&plan, &b).0), expected);
    }

    /// An update with a whole old row shares a hash with an insert of the row before it, and of the
    /// row after it.
    #[test]
    fn updates_meet_both_rows(
        a in prop::collection::vec(cell(), 3),
        b in prop::collection::vec(cell(), 3),
    ) {
        let (a, b) = (Row(a), Row(b));
        let plan = KeyPlan::new(vec![key(&[0], true), key(&[1, 2], true)], false);
        let (keys, _) = run(&plan, Operation::Update, BeforeKind::Row, Some(&a), Some(&b));
        for row in [&a, &b] {
            for hash in insert(&plan, row).0 {
                prop_assert!(keys.contains(&hash));
            }
        }
        let mut unique = keys.clone();
        unique.sort_unstable();
        unique.dedup();
        prop_assert_eq!(unique.len(), keys.len());
    }
}
