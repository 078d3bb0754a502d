//! Parked transactions, which cannot be applied (`on_error => 'park'`), and later ones that have to
//! wait for them. Run by the appliers.
//!
//! A parked transaction keeps its keys. A later transaction that depends on it is parked too, and
//! keeps its own keys in turn. Dependencies are those of [`crate::dependency`]: a common key hash,
//! or a barrier of one on a table that the other changes. So of two transactions that depend on
//! each other, the earlier one is always applied first, at any time. The final result equals that
//! of applying everything in order.
//!
//! Numbers of parked transactions grow in the source's commit order.
//!
//! One difference: a trigger that may read and write anything orders its transaction with
//! everything, so parking it would stop everything. Here it counts as a barrier on its own table.
//!
//! Not for: deciding which errors are parked ([`crate::policy`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Most keys that are kept for a transaction. A transaction with more counts as a barrier on all
/// its tables, so that memory stays bounded.
pub const MOST_KEYS: usize = 4096;

/// Tables and keys that a transaction changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touch {
    /// Whether there is a barrier on the table, by the table's name.
    tables: BTreeMap<String, bool>,
    keys: Vec<u64>,
    /// The transaction has more keys than are kept.
    wide: bool,
}

impl Touch {
    /// Restores a stored touch: tables with a barrier, other tables, and keys.
    #[must_use]
    pub fn stored(
        barred: impl IntoIterator<Item = String>,
        others: impl IntoIterator<Item = String>,
        keys: Vec<u64>,
    ) -> Self {
        let mut tables: BTreeMap<String, bool> =
            others.into_iter().map(|name| (name, false)).collect();
        tables.extend(barred.into_iter().map(|name| (name, true)));
        Self {
            tables,
            keys,
            wide: false,
        }
    }

    /// Adds a change of a row of `table` whose unique keys have these hashes. With `barrier`, it is
    /// a change that has no key.
    pub fn change(&mut self, table: &str, barrier: bool, hashes: impl IntoIterator<Item = u64>) {
        let barrier = barrier || self.wide;
        match self.tables.get_mut(table) {
            Some(barred) => *barred |= barrier,
            None => {
                self.tables.insert(table.to_owned(), barrier);
            }
        }
        if barrier {
            return;
        }
        self.keys.extend(hashes);
        if self.keys.len() > 2 * MOST_KEYS {
            self.tidy();
        }
    }

    fn tidy(&mut self) {
        self.keys.sort_unstable();
        self.keys.dedup();
        if self.keys.len() > MOST_KEYS {
            self.wide = true;
            self.keys = Vec::new();
            for barred in self.tables.values_mut() {
                *barred = true;
            }
        }
    }

    /// Completes the touch.
    #[must_use]
    pub fn finish(mut self) -> Self {
        self.tidy();
        self
    }

    /// Returns the tables, and whether there is a barrier on each.
    pub fn tables(&self) -> impl Iterator<Item = (&str, bool)> {
        self.tables
            .iter()
            .map(|(name, barred)| (name.as_str(), *barred))
    }

    /// Returns the keys, without those of tables that had a barrier from the start.
    #[must_use]
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }
}

#[derive(Debug, Default)]
struct Table {
    changed_by: BTreeSet<i64>,
    barred_by: BTreeSet<i64>,
}

/// All parked transactions, by number.
#[derive(Debug, Default)]
pub struct Parked {
    touches: BTreeMap<i64, Touch>,
    keys: HashMap<u64, BTreeSet<i64>>,
    tables: HashMap<String, Table>,
}

impl Parked {
    /// Adds a parked transaction.
    pub fn insert(&mut self, id: i64, touch: Touch) {
        self.remove(id);
        for (name, barred) in &touch.tables {
            let table = self.tables.entry(name.clone()).or_default();
            table.changed_by.insert(id);
            if *barred {
                table.barred_by.insert(id);
            }
        }
        for key in &touch.keys {
            self.keys.entry(*key).or_default().insert(id);
        }
        self.touches.insert(id, touch);
    }

    /// Removes a transaction, which was applied or given up.
    pub fn remove(&mut self, id: i64) {
        let Some(touch) = self.touches.remove(&id) else {
            return;
        };
        for name in touch.tables.keys() {
            if let Some(table) = self.tables.get_mut(name) {
                table.changed_by.remove(&id);
                table.barred_by.remove(&id);
                if table.changed_by.is_empty() {
                    self.tables.remove(name);
                }
            }
        }
        for key in &touch.keys {
            if let Some(holders) = self.keys.get_mut(key) {
                holders.remove(&id);
                if holders.is_empty() {
                    self.keys.remove(key);
                }
            }
        }
    }

    /// Returns the latest parked transaction with a number below `before` that has to be applied
    /// before one with this touch.
    #[must_use]
    pub fn holder(&self, touch: &Touch, before: i64) -> Option<i64> {
        if self.touches.is_empty() {
            return None;
        }
        let latest = |holders: &BTreeSet<i64>| holders.range(..before).next_back().copied();
        let by_table = touch.tables.iter().filter_map(|(name, barred)| {
            let table = self.tables.get(name)?;
            latest(if *barred {
                &table.changed_by
            } else {
                &table.barred_by
            })
        });
        let by_key = touch
            .keys
            .iter()
            .filter_map(|key| latest(self.keys.get(key)?));
        by_table.chain(by_key).max()
    }

    /// Returns the latest parked transaction that the parked transaction `id` has to wait for.
    #[must_use]
    pub fn holder_of(&self, id: i64) -> Option<i64> {
        self.holder(self.touches.get(&id)?, id)
    }

    /// Returns the numbers, in the source's commit order.
    pub fn ids(&self) -> impl Iterator<Item = i64> {
        self.touches.keys().copied()
    }

    /// Returns whether this transaction is parked.
    #[must_use]
    pub fn contains(&self, id: i64) -> bool {
        self.touches.contains_key(&id)
    }

    /// Returns whether no transaction is parked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.touches.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(table: &str, barrier: bool, keys: &[u64]) -> Touch {
        let mut touch = Touch::default();
        touch.change(table, barrier, keys.iter().copied());
        touch.finish()
    }

    #[test]
    fn what_shares_a_key_waits_for_the_latest_of_them() {
        let mut parked = Parked::default();
        parked.insert(1, touch("a", false, &[1, 2]));
        parked.insert(2, touch("a", false, &[2, 3]));
        assert_eq!(parked.holder(&touch("a", false, &[1]), i64::MAX), Some(1));
        assert_eq!(parked.holder(&touch("a", false, &[2]), i64::MAX), Some(2));
        assert_eq!(parked.holder(&touch("a", false, &[4]), i64::MAX), None);
        assert_eq!(parked.holder_of(2), Some(1));
        assert_eq!(parked.holder_of(1), None);
        parked.remove(1);
        assert_eq!(parked.holder_of(2), None);
        parked.remove(2);
        assert!(parked.is_empty() && parked.keys.is_empty() && parked.tables.is_empty());
    }

    #[test]
    fn a_barrier_holds_its_table_and_is_held_by_it() {
        let mut parked = Parked::default();
        parked.insert(1, touch("a", true, &[]));
        parked.insert(2, touch("b", false, &[7]));
        assert_eq!(parked.holder(&touch("a", false, &[9]), i64::MAX), Some(1));
        assert_eq!(parked.holder(&touch("b", false, &[9]), i64::MAX), None);
        assert_eq!(parked.holder(&touch("b", true, &[]), i64::MAX), Some(2));
        assert_eq!(parked.holder(&touch("b", true, &[]), 2), None);
    }

    #[test]
    fn i9_many_keys_are_the_table() {
        let mut wide = Touch::default();
        for key in 0..10 * MOST_KEYS as u64 {
            wide.change(if key % 2 == 0 { "a" } else { "b" }, false, [key]);
        }
        wide.change("c", false, [1]);
        let wide = wide.finish();
        assert!(wide.keys().is_empty());
        assert!(wide.tables().all(|(_, barred)| barred));
        assert_eq!(wide.tables().count(), 3);
        let mut parked = Parked::default();
        parked.insert(1, wide);
        assert_eq!(
            parked.holder(&touch("c", false, &[u64::MAX]), i64::MAX),
            Some(1)
        );
    }

    #[test]
    fn what_was_stored_is_the_same() {
        let mut one = touch("a", false, &[3, 1, 3]);
        one.change("b", true, [5]);
        let part = |wanted: bool| {
            one.tables()
                .filter(move |(_, barred)| *barred == wanted)
                .map(|(name, _)| name.to_owned())
        };
        let other = Touch::stored(part(true), part(false), one.keys().to_vec());
        assert_eq!(other, one);
    }
}
