//! Transactions that cannot be applied are parked with all that depend on them, and applied later
//! or given up: the final state is as if all had been applied in order.

use std::collections::{BTreeMap, BTreeSet};

use braid_bgworker::parked::{Parked, Touch};

use crate::random::{Budget, Random};

const TABLES: [&str; 3] = ["a", "b", "c"];
const KEYS: u64 = 5;

#[derive(Debug, Clone)]
struct Transaction {
    id: i64,
    /// Table, key; no key: the whole table.
    changes: Vec<(usize, Option<u64>)>,
}

impl Transaction {
    fn random(id: i64, random: &mut Random) -> Self {
        let count = 1 + random.index(3);
        let changes = (0..count)
            .map(|_| {
                let table = random.index(TABLES.len());
                let key = (!random.one_in(12)).then(|| random.below(KEYS));
                (table, key)
            })
            .collect();
        Self { id, changes }
    }

    fn touch(&self) -> Touch {
        let mut touch = Touch::default();
        for (table, key) in &self.changes {
            let hash = key.map(|key| (*table as u64) << 32 | key);
            touch.change(TABLES[*table], key.is_none(), hash);
        }
        touch.finish()
    }
}

/// For each row, a number that depends on the order in which transactions changed it.
type Rows = BTreeMap<(usize, u64), u64>;

fn apply(rows: &mut Rows, transaction: &Transaction) {
    let mut mix = |table: usize, key: u64| {
        let row = rows.entry((table, key)).or_default();
        *row = (*row ^ transaction.id.cast_unsigned())
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23);
    };
    for (table, key) in &transaction.changes {
        match key {
            Some(key) => mix(*table, *key),
            None => (0..KEYS).for_each(|key| mix(*table, key)),
        }
    }
}

#[derive(Default)]
struct Node {
    rows: Rows,
    parked: Parked,
    /// Stored transactions, which survive a restart.
    stored: BTreeMap<i64, (Transaction, bool)>,
    /// Transactions that cannot be applied.
    broken: BTreeSet<i64>,
    given_up: BTreeSet<i64>,
    waited: usize,
}

impl Node {
    fn receive(&mut self, transaction: Transaction) {
        let held = self.parked.holder(&transaction.touch(), i64::MAX).is_some();
        if !held && !self.broken.contains(&transaction.id) {
            apply(&mut self.rows, &transaction);
            return;
        }
        self.waited += usize::from(held);
        self.parked.insert(transaction.id, transaction.touch());
        self.stored.insert(transaction.id, (transaction, held));
    }

    fn try_one(&mut self, id: i64) {
        if self.parked.holder_of(id).is_some() {
            return;
        }
        let Some((transaction, waits)) = self.stored.get_mut(&id) else {
            return;
        };
        if self.broken.contains(&id) {
            *waits = false;
            return;
        }
        apply(&mut self.rows, transaction);
        self.stored.remove(&id);
        self.parked.remove(id);
    }

    fn retry(&mut self, which: Option<i64>) {
        let ids: Vec<i64> = self.parked.ids().collect();
        for id in ids {
            let waits = self.stored.get(&id).is_some_and(|(_, waits)| *waits);
            if which.is_none_or(|which| which == id) || waits {
                self.try_one(id);
            }
        }
    }

    fn skip(&mut self, id: i64) {
        if self.stored.remove(&id).is_some() {
            self.parked.remove(id);
            self.given_up.insert(id);
            self.retry(Some(0));
        }
    }

    fn restart(&mut self) {
        self.parked = Parked::default();
        for (id, (transaction, _)) in &self.stored {
            self.parked.insert(*id, transaction.touch());
        }
    }

    fn any(&self, random: &mut Random) -> i64 {
        let ids: Vec<i64> = self.stored.keys().copied().collect();
        if ids.is_empty() {
            return 0;
        }
        ids[random.index(ids.len())]
    }
}

#[test]
fn i2_parked_and_retried_is_as_one_after_the_other() {
    let mut random = Random::new("parked");
    let mut budget = Budget::new();
    let (mut waited, mut given_up) = (0, 0);
    while let Some(round) = budget.round(300) {
        let mut node = Node::default();
        let all: Vec<Transaction> = (1..=40)
            .map(|id| Transaction::random(id, &mut random))
            .collect();
        for transaction in &all {
            if random.one_in(8) {
                node.broken.insert(transaction.id);
            }
            node.receive(transaction.clone());
            match random.below(12) {
                0 => {
                    let mended = node.any(&mut random);
                    node.broken.remove(&mended);
                }
                1 => node.retry(None),
                2 => {
                    let id = node.any(&mut random);
                    node.retry(Some(id));
                }
                3 => node.restart(),
                4 if random.one_in(3) => {
                    let id = node.any(&mut random);
                    node.skip(id);
                }
                _ => {}
            }
        }
        node.broken.clear();
        node.retry(None);
        assert!(node.parked.is_empty() && node.stored.is_empty(), "{round}");
        let mut serial = Rows::new();
        for transaction in &all {
            if !node.given_up.contains(&transaction.id) {
                apply(&mut serial, transaction);
            }
        }
        assert_eq!(node.rows, serial, "round {round}");
        waited += node.waited;
        given_up += node.given_up.len();
    }
    assert!(waited > 100 && given_up > 10, "{waited} {given_up}");
}
