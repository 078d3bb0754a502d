//! Regroups the changes of several whole transactions by table, for bulk apply: all of one table,
//! then all of the next, in the order of the tables' first changes. Run by an applier before it
//! applies a batch in mode `aggregate`.
//!
//! Each table has a [`crate::consolidate::Run`] of its own, so many changes of one row become one.
//! A change that ends a run ends it for its table only; the next run of the table follows. Within a
//! run no two net changes share a key, so they are sorted into the cheapest order: deletes, then
//! updates, then inserts, each by key, so that look-ups walk the index.
//!
//! The definition of the local table decides its [`Freedom`]:
//!
//! - `Rows`: writes depend on nothing but columns, NOT NULL and plain indexes, and the table has
//!   one unique key, which the provider hashes. Its changes are joined and sorted.
//! - `Table`: the table has more unique keys or one that the provider does not hash, is
//!   partitioned, or has CHECKs, generated columns, defaults for columns that the provider lacks,
//!   or triggers that look at their row only. Its changes are applied one by one, in their original
//!   order.
//! - `Everything`: the table fires a trigger that may look at other rows, such as a foreign key's.
//!   Each of its changes is applied after all earlier changes and before all later ones.
//!
//! **What is given up.** The order of changes of different rows and tables inside one local commit.
//! Only triggers that look at their row only can see it. Everything else is as in the source's
//! order: the property tests compare with that.
//!
//! Not for: how changes are joined, and how conflicts are decided ([`crate::consolidate`]).

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::consolidate::{Action, Change, Ended, Net, Run};
use crate::table_order::TableOrder;

/// Limit of changes in one run: no limit, as a run may hold all changes of a batch.
const LIMIT: u32 = u32::MAX;

/// How far the changes of a table may be reordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freedom {
    /// Changes of different rows may be reordered.
    Rows,
    /// Changes of the table keep their order among each other, not with those of other tables.
    Table,
    /// Changes of the table keep their order with all changes.
    Everything,
}

impl Freedom {
    /// Returns the freedom of a table with the order `order`. `plain`: only its columns, NOT NULL
    /// and plain indexes affect a write. `one_key`: it has one unique key, by which its rows are
    /// found.
    #[must_use]
    pub fn of(order: &TableOrder, plain: bool, one_key: bool) -> Self {
        match order {
            TableOrder::Everything { .. } => Self::Everything,
            TableOrder::Keys if plain && one_key => Self::Rows,
            TableOrder::Keys | TableOrder::Table { .. } => Self::Table,
        }
    }
}

/// One step of what to do with a table. Steps run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<K, V> {
    /// Net changes. Their parts are the numbers that were passed to [`Aggregate::take`].
    Nets(Vec<Net<K, V>>),
    /// The change with this number, not joined with others.
    One(u32),
}

#[derive(Debug)]
struct Table<K, V> {
    relation: u32,
    steps: Vec<Step<K, V>>,
    run: Run<K, V>,
    /// Numbers of the run's changes, in the order in which they were taken.
    numbers: Vec<u32>,
}

/// Changes that are being regrouped.
#[derive(Debug)]
pub struct Aggregate<K, V> {
    tables: Vec<Table<K, V>>,
    places: HashMap<u32, usize>,
}

impl<K, V> Default for Aggregate<K, V> {
    fn default() -> Self {
        Self {
            tables: Vec::new(),
            places: HashMap::new(),
        }
    }
}

impl<K: Clone + Eq, V: Clone> Aggregate<K, V> {
    fn table(&mut self, relation: u32) -> Option<&mut Table<K, V>> {
        let next = self.tables.len();
        let place = *self.places.entry(relation).or_insert(next);
        if place == next {
            self.tables.push(Table {
                relation,
                steps: Vec::new(),
                run: Run::new(LIMIT),
                numbers: Vec::new(),
            });
        }
        self.tables.get_mut(place)
    }

    /// Takes the change `number` of a table with [`Freedom::Rows`].
    pub fn take(&mut self, number: u32, change: Change<'_, K, V>) {
        let Some(table) = self.table(change.relation) else {
            return;
        };
        let Err((ended, change)) = table.run.offer(change) else {
            table.numbers.push(number);
            return;
        };
        table.seal();
        if ended != Ended::Barrier && table.run.offer(change).is_ok() {
            table.numbers.push(number);
        } else {
            table.steps.push(Step::One(number));
        }
    }

    /// Takes the change `number`, which is applied after all earlier and before all later changes
    /// of its table.
    pub fn keep(&mut self, number: u32, relation: u32) {
        if let Some(table) = self.table(relation) {
            table.seal();
            table.steps.push(Step::One(number));
        }
    }

    /// Returns the tables, each with its steps. `order` compares keys; it affects speed only.
    #[must_use]
    pub fn finish(self, order: impl Fn(&K, &K) -> Ordering) -> Vec<(u32, Vec<Step<K, V>>)> {
        self.tables
            .into_iter()
            .map(|mut table| {
                table.seal();
                for step in &mut table.steps {
                    if let Step::Nets(nets) = step {
                        nets.sort_by(|one, other| {
                            kind(one)
                                .cmp(&kind(other))
                                .then_with(|| order(&one.key, &other.key))
                        });
                    }
                }
                (table.relation, table.steps)
            })
            .collect()
    }
}

impl<K: Clone + Eq, V: Clone> Table<K, V> {
    /// Ends the run and makes a step of it.
    fn seal(&mut self) {
        if self.run.is_empty() {
            return;
        }
        let run = std::mem::replace(&mut self.run, Run::new(LIMIT));
        let numbers = std::mem::take(&mut self.numbers);
        let mut nets = run.finish();
        for net in &mut nets {
            for part in &mut net.parts {
                if let Some(number) = numbers.get(*part as usize) {
                    *part = *number;
                }
            }
        }
        self.steps.push(Step::Nets(nets));
    }
}

/// Rank of a net change in a run: deletes come before updates, updates before inserts.
fn kind<K, V>(net: &Net<K, V>) -> u8 {
    match net.action {
        Action::Delete | Action::Vanish => 0,
        Action::Update(_) | Action::Replace(_) => 1,
        Action::Insert(_) => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consolidate::{Operation, Version};

    fn change(
        relation: u32,
        operation: Operation,
        key: &'static [u64],
    ) -> Change<'static, u64, u64> {
        Change {
            relation,
            shape: relation,
            operation,
            barrier: false,
            hashes: key,
            key: key[0],
            moves: false,
            columns: Vec::new(),
            version: Version {
                timestamp: 1,
                origin: 0,
            },
            from_origin: true,
        }
    }

    /// The numbers of changes in the order in which they are applied.
    fn numbers(aggregate: Aggregate<u64, u64>) -> Vec<Vec<u32>> {
        let parts = |step: Step<u64, u64>| match step {
            Step::Nets(nets) => nets.into_iter().flat_map(|net| net.parts).collect(),
            Step::One(number) => vec![number],
        };
        let steps =
            |(_, steps): (u32, Vec<Step<u64, u64>>)| steps.into_iter().flat_map(parts).collect();
        aggregate.finish(u64::cmp).into_iter().map(steps).collect()
    }

    #[test]
    fn tables_follow_each_other() {
        let mut aggregate = Aggregate::default();
        aggregate.take(0, change(7, Operation::Insert, &[3]));
        aggregate.take(1, change(5, Operation::Update, &[30]));
        aggregate.take(2, change(7, Operation::Insert, &[2]));
        aggregate.take(3, change(7, Operation::Delete, &[4]));
        aggregate.take(4, change(5, Operation::Update, &[20]));
        aggregate.take(5, change(7, Operation::Update, &[3]));
        assert_eq!(numbers(aggregate), [vec![3, 2, 0, 5], vec![4, 1]]);
    }

    #[test]
    fn what_keeps_its_place_parts_its_own_table_only() {
        let mut aggregate = Aggregate::default();
        aggregate.take(0, change(7, Operation::Insert, &[3]));
        aggregate.take(1, change(5, Operation::Insert, &[9]));
        aggregate.keep(2, 7);
        aggregate.take(3, change(7, Operation::Delete, &[3]));
        aggregate.take(4, change(5, Operation::Insert, &[8]));
        let mut barrier = change(5, Operation::Update, &[1]);
        barrier.barrier = true;
        aggregate.take(5, barrier);
        aggregate.take(6, change(5, Operation::Insert, &[7]));
        assert_eq!(numbers(aggregate), [vec![0, 2, 3], vec![4, 1, 5, 6]]);
    }

    #[test]
    fn what_a_table_allows() {
        let table = TableOrder::Table {
            index: "i".to_owned(),
        };
        let all = TableOrder::Everything {
            trigger: "t".to_owned(),
        };
        assert_eq!(Freedom::of(&TableOrder::Keys, true, true), Freedom::Rows);
        assert_eq!(Freedom::of(&TableOrder::Keys, false, true), Freedom::Table);
        assert_eq!(Freedom::of(&TableOrder::Keys, true, false), Freedom::Table);
        assert_eq!(Freedom::of(&table, true, true), Freedom::Table);
        assert_eq!(Freedom::of(&all, true, true), Freedom::Everything);
    }
}
