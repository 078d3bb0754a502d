//! Regroups the changes of several whole transactions by table, for bulk apply: all of one table,
//! then all of the next, in the order of the tables' first changes. Run by an applier before it
//! applies a batch in mode `aggregate`.
//!
//! Each table has a [`crate::consolidate::Run`] of its own, so many changes of one row become one;
//! what ends a run ends it for this table only, and the next run of the table follows it. Within a
//! run no two net changes share a key, so they are put into the order in which they are cheapest:
//! what goes, what changes, what comes, each by key, as look-ups then walk the index.
//!
//! | a table here | [`Freedom`] | its changes |
//! |---|---|---|
//! | only columns, NOT NULL and plain indexes have a say; one unique key, which the provider hashes | `Rows` | are joined and sorted |
//! | has more unique keys or one that the provider does not hash, is partitioned, has CHECKs, generated columns, defaults for columns that the provider lacks, triggers that look at their row only | `Table` | are applied one by one in the order in which they were made |
//! | fires a trigger here that may look at other rows, a foreign key's among them | `Everything` | as that, after all that came before, and before all that comes after |
//!
//! **What is given up.** The order of changes of different rows and tables inside one local commit,
//! which only triggers see that look at their row only. Everything else is as in the order of the
//! source: the property tests compare with that.
//!
//! Not for: whose changes are joined how, and how conflicts are decided ([`crate::consolidate`]).

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::consolidate::{Action, Change, Ended, Net, Run};
use crate::table_order::TableOrder;

/// Changes of one run: all that a batch has.
const LIMIT: u32 = u32::MAX;

/// How far the changes of a table may leave their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freedom {
    /// Those of different rows do not order.
    Rows,
    /// They keep their order, but do not order with those of other tables.
    Table,
    /// They order with everything.
    Everything,
}

impl Freedom {
    /// That of a table whose keys and triggers say `order`. `plain`: nothing but its columns, NOT
    /// NULL and plain indexes have a say in a write. `one_key`: it has one unique key, by which its
    /// rows are found.
    #[must_use]
    pub fn of(order: &TableOrder, plain: bool, one_key: bool) -> Self {
        match order {
            TableOrder::Everything { .. } => Self::Everything,
            TableOrder::Keys if plain && one_key => Self::Rows,
            TableOrder::Keys | TableOrder::Table { .. } => Self::Table,
        }
    }
}

/// What is to be done with a table, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<K, V> {
    /// Net changes, whose parts are the numbers that the changes were taken with.
    Nets(Vec<Net<K, V>>),
    /// The change with this number, as it is.
    One(u32),
}

#[derive(Debug)]
struct Table<K, V> {
    relation: u32,
    steps: Vec<Step<K, V>>,
    run: Run<K, V>,
    /// Of the run's changes.
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

    /// Take the change `number` of a table with [`Freedom::Rows`].
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

    /// Take the change `number` of a table: after all before it, and before all after it, of this
    /// table.
    pub fn keep(&mut self, number: u32, relation: u32) {
        if let Some(table) = self.table(relation) {
            table.seal();
            table.steps.push(Step::One(number));
        }
    }

    /// The tables, and what is to be done with each. `order` compares keys, for speed alone.
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
    /// End the run.
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

/// What goes makes room for what changes, and that for what comes.
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
