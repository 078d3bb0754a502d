//! Joins the changes of several whole transactions, in the provider's commit order, into one net
//! change for each row, and groups these by table. Run by an applier before it applies a batch.
//!
//! A [`Run`] takes changes as long as they may be applied in any order with the others in it. Then
//! the run is applied, and the next one starts. Within a run no two net changes share a unique key
//! (by hash, as in the writeset), so they may be applied in any order, table by table, or at once.
//! A run ends at:
//!
//! - a barrier: truncate, unknown keys, or a table that this node orders by itself;
//! - a change of a key that another row of the run has had;
//! - a change of a row whose key has changed in the run;
//! - a change of a row in another shape than its earlier ones: the provider's table was altered, so
//!   its columns may differ or be in other places;
//! - a change whose version does not follow from the row's last one;
//! - a hash that two keys share;
//! - its limit.
//!
//! How two changes of one row are joined:
//!
//! | first | then | net |
//! | --- | --- | --- |
//! | insert | update | insert |
//! | insert | delete | vanish: no row, only a tombstone |
//! | update | update | one update; a column that the later one lacks is the earlier one's |
//! | update | delete | delete |
//! | delete | insert | replace: as a new row; columns that only this node has get defaults |
//! | update that changes the key | anything | not joined |
//!
//! **Conflicts.** With `last_update_wins` the net result equals that of applying the changes one
//! after the other, the row's final version included. For that, the applier follows two rules:
//!
//! 1. It decides the conflict with [`Net::first`], the first change's operation and version. If
//!    that change is to be applied, and is no conflict, then so are all the others, since each
//!    finds the row that the one before has left. The row then gets [`Net::version`], the last
//!    change's.
//! 2. In all other cases it applies [`Net::parts`] one by one.
//!
//! If one decision covered all changes, three things would go wrong. A change that should have lost
//! would win with a later one's version. A value that only that change has would be written. And of
//! several losers only one would be recorded.
//!
//! A vanished row leaves a tombstone: an older change from a third node must not bring it back. An
//! applier that cannot write a tombstone without a row applies the parts.
//!
//! **What is given up.** States between a run's transactions are never visible, and one local
//! commit stands for several of the provider's. Triggers and `RETURNING`-like side effects see one
//! change for each row instead of all. Nothing else: each row ends with the same values and
//! version. Grouping by table gives up the order between tables inside a run. That only matters to
//! triggers, and to foreign keys if these are checked on this node; such tables have barriers
//! ([`crate::table_order`]).
//!
//! Not for: reading rows. A column is any value of the caller's, for example the position of its
//! bytes.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Insert of a row.
    Insert,
    /// Update of a row.
    Update,
    /// Delete of a row.
    Delete,
}

/// A row version: commit timestamp, and a number for the origin's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// A number that stands for the origin.
    pub origin: u32,
}

/// A change of a row.
#[derive(Debug, Clone)]
pub struct Change<'c, K, V> {
    /// The table.
    pub relation: u32,
    /// A number for the set and places of the columns that the provider's table has.
    pub shape: u32,
    /// The kind of the change.
    pub operation: Operation,
    /// The change orders with every other change of its table.
    pub barrier: bool,
    /// Hashes of all unique keys of the row, before and after.
    pub hashes: &'c [u64],
    /// The exact key by which the row is found; for an update, before the change.
    pub key: K,
    /// The change is an update that changes that key.
    pub moves: bool,
    /// The row after the change; `None` for an unchanged column. Empty for a delete.
    pub columns: Vec<Option<V>>,
    /// Version of the change.
    pub version: Version,
    /// The change comes from its origin itself, in the origin's commit order.
    pub from_origin: bool,
}

/// The net action on a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action<V> {
    /// Insert the row.
    Insert(Vec<Option<V>>),
    /// Update these columns.
    Update(Vec<Option<V>>),
    /// Update all columns; those that only this node has get their defaults.
    Replace(Vec<Option<V>>),
    /// Delete the row.
    Delete,
    /// Write only a tombstone: the row was inserted and deleted within the run.
    Vanish,
}

/// The net change of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Net<K, V> {
    /// The table.
    pub relation: u32,
    /// The row's key before the changes.
    pub key: K,
    /// The action on the row.
    pub action: Action<V>,
    /// The first of the joined changes, which decides conflicts.
    pub first: (Operation, Version),
    /// Version of the last change, which becomes the row's.
    pub version: Version,
    /// Numbers of the changes, in the order in which they were pushed, from 0.
    pub parts: Vec<u32>,
}

/// Why a run takes no more changes. The refused change is not part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The change is a barrier: it is applied alone, after this run.
    Barrier,
    /// Another row of the run has had one of the change's keys.
    SharedKey,
    /// The row's key has changed in the run, or this change of an earlier changed row changes it.
    KeyChange,
    /// The change has other columns than earlier changes of its row.
    Shape,
    /// The change's version does not follow from that of the row's last change.
    Version,
    /// The run has reached its limit.
    Full,
}

/// Uses the hashes as they are.
#[derive(Debug, Default, Clone)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// A row of the run.
#[derive(Debug)]
struct Row<K, V> {
    relation: u32,
    shape: u32,
    key: K,
    moves: bool,
    first: (Operation, Version),
    version: Version,
    from_origin: bool,
    parts: Vec<u32>,
    /// `None` if the row is deleted.
    columns: Option<Vec<Option<V>>>,
    /// The row was deleted in the run and inserted again.
    anew: bool,
}

/// Changes of one run.
#[derive(Debug)]
pub struct Run<K, V> {
    rows: Vec<Row<K, V>>,
    /// Index of the row that has had a key, by the key's hash.
    owners: HashMap<u64, usize, BuildHasherDefault<AsItIs>>,
    pushed: u32,
    limit: u32,
}

impl<K: Clone + Eq, V: Clone> Run<K, V> {
    /// Returns an empty run of at most `limit` changes.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            rows: Vec::new(),
            owners: HashMap::default(),
            pushed: 0,
            limit: limit.max(1),
        }
    }

    /// Returns the number of changes taken.
    #[must_use]
    pub fn changes(&self) -> u32 {
        self.pushed
    }

    /// Returns whether no change was taken yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pushed == 0
    }

    /// Takes the next change.
    ///
    /// # Errors
    /// The reason why the run has ended. [`Run::finish`] then returns the net changes; the refused
    /// change belongs to the next run, or is a barrier.
    pub fn push(&mut self, change: Change<'_, K, V>) -> Result<(), Ended> {
        self.offer(change).map_err(|(ended, _)| ended)
    }

    /// Takes the next change, as [`Run::push`] does.
    ///
    /// # Errors
    /// The error returns the refused change as well.
    pub fn offer<'c>(&mut self, change: Change<'c, K, V>) -> Result<(), (Ended, Change<'c, K, V>)> {
        if change.barrier {
            return Err((Ended::Barrier, change));
        }
        if self.pushed >= self.limit {
            return Err((Ended::Full, change));
        }
        let place = match self.place_for(&change) {
            Ok(place) => place,
            Err(ended) => return Err((ended, change)),
        };
        for hash in change.hashes {
            self.owners.insert(*hash, place);
        }
        let number = self.pushed;
        self.pushed += 1;
        match self.rows.get_mut(place) {
            Some(row) => row.join(change, number),
            None => self.rows.push(Row::new(change, number)),
        }
        Ok(())
    }

    /// Returns the index of the row that a change belongs to, or the next free one.
    fn place_for(&self, change: &Change<'_, K, V>) -> Result<usize, Ended> {
        let mut owners = change
            .hashes
            .iter()
            .filter_map(|hash| self.owners.get(hash));
        let Some(place) = owners.next().copied() else {
            return Ok(self.rows.len());
        };
        if owners.any(|other| *other != place) {
            return Err(Ended::SharedKey);
        }
        let Some(row) = self.rows.get(place) else {
            return Err(Ended::SharedKey);
        };
        if row.moves {
            return Err(Ended::KeyChange);
        }
        if row.relation != change.relation || row.key != change.key {
            return Err(Ended::SharedKey);
        }
        if change.moves {
            return Err(Ended::KeyChange);
        }
        if row.shape != change.shape {
            return Err(Ended::Shape);
        }
        let follows = row.version.origin == change.version.origin
            && ((row.from_origin && change.from_origin)
                || row.version.timestamp < change.version.timestamp);
        if !follows {
            return Err(Ended::Version);
        }
        Ok(place)
    }

    /// Returns the net changes, in the order of each row's first change.
    #[must_use]
    pub fn finish(self) -> Vec<Net<K, V>> {
        self.rows.into_iter().map(Row::net).collect()
    }
}

impl<K, V> Row<K, V> {
    fn new(change: Change<'_, K, V>, number: u32) -> Self {
        Self {
            relation: change.relation,
            shape: change.shape,
            key: change.key,
            moves: change.moves,
            first: (change.operation, change.version),
            version: change.version,
            from_origin: change.from_origin,
            parts: vec![number],
            columns: (change.operation != Operation::Delete).then_some(change.columns),
            anew: change.operation == Operation::Delete,
        }
    }

    fn join(&mut self, change: Change<'_, K, V>, number: u32) {
        self.version = change.version;
        self.from_origin = change.from_origin;
        self.parts.push(number);
        match (change.operation, self.columns.as_mut()) {
            (Operation::Delete, _) => {
                self.columns = None;
                self.anew = true;
            }
            (Operation::Update, Some(columns)) => {
                for (place, column) in columns.iter_mut().zip(change.columns) {
                    if column.is_some() {
                        *place = column;
                    }
                }
            }
            // No provider sends an insert over a row, or an update of a missing row; the later
            // change counts.
            (Operation::Insert | Operation::Update, _) => self.columns = Some(change.columns),
        }
    }

    fn net(self) -> Net<K, V> {
        let action = match (self.first.0, self.columns) {
            (Operation::Insert, Some(columns)) => Action::Insert(columns),
            (Operation::Insert, None) => Action::Vanish,
            (Operation::Update | Operation::Delete, None) => Action::Delete,
            (Operation::Update | Operation::Delete, Some(columns)) if self.anew => {
                Action::Replace(columns)
            }
            (Operation::Update | Operation::Delete, Some(columns)) => Action::Update(columns),
        };
        Net {
            relation: self.relation,
            key: self.key,
            action,
            first: self.first,
            version: self.version,
            parts: self.parts,
        }
    }
}

/// Groups a run's net changes for bulk apply: table by table in the order of their first changes;
/// in each table deletes, then updates, then inserts. The sort is stable.
pub fn group_by_table<K, V>(nets: &mut [Net<K, V>]) {
    let mut order: HashMap<u32, usize> = HashMap::new();
    for net in nets.iter() {
        let next = order.len();
        order.entry(net.relation).or_insert(next);
    }
    nets.sort_by_cached_key(|net| {
        let kind = match net.action {
            Action::Delete | Action::Vanish => 0,
            Action::Update(_) | Action::Replace(_) => 1,
            Action::Insert(_) => 2,
        };
        (order.get(&net.relation).copied(), kind)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(
        operation: Operation,
        key: u64,
        columns: &[Option<u64>],
        timestamp: i64,
    ) -> Change<'static, u64, u64> {
        let hashes: &'static [u64] = match key {
            1 => &[1],
            2 => &[2],
            _ => &[3],
        };
        Change {
            relation: 1,
            shape: 1,
            operation,
            barrier: false,
            hashes,
            key,
            moves: false,
            columns: columns.to_vec(),
            version: Version {
                timestamp,
                origin: 1,
            },
            from_origin: true,
        }
    }

    fn net(changes: &[Change<'static, u64, u64>]) -> Action<u64> {
        let mut run = Run::new(100);
        for change in changes {
            run.push(change.clone()).unwrap();
        }
        let nets = run.finish();
        assert_eq!(nets.len(), 1);
        assert_eq!(nets[0].version, changes[changes.len() - 1].version);
        assert_eq!(nets[0].first, (changes[0].operation, changes[0].version));
        assert_eq!(nets[0].parts.len(), changes.len());
        nets[0].action.clone()
    }

    #[test]
    fn the_table_of_net_changes() {
        let insert = change(Operation::Insert, 1, &[Some(1), Some(2)], 1);
        let update = change(Operation::Update, 1, &[Some(3), None], 2);
        let other = change(Operation::Update, 1, &[None, Some(4)], 3);
        let delete = change(Operation::Delete, 1, &[], 4);
        let again = change(Operation::Insert, 1, &[Some(8), Some(9)], 5);
        let all = vec![Some(3), Some(4)];
        assert_eq!(
            net(&[insert.clone(), update.clone(), other.clone()]),
            Action::Insert(all.clone())
        );
        assert_eq!(net(&[update.clone(), other.clone()]), Action::Update(all));
        assert_eq!(
            net(&[update.clone(), update.clone()]),
            Action::Update(vec![Some(3), None])
        );
        assert_eq!(net(&[insert.clone(), delete.clone()]), Action::Vanish);
        assert_eq!(net(&[update.clone(), delete.clone()]), Action::Delete);
        assert_eq!(
            net(&[delete.clone(), again.clone(), other]),
            Action::Replace(vec![Some(8), Some(4)])
        );
        assert_eq!(
            net(&[insert, delete.clone(), again.clone()]),
            Action::Insert(vec![Some(8), Some(9)])
        );
        assert_eq!(
            net(&[update, delete.clone(), again.clone()]),
            Action::Replace(vec![Some(8), Some(9)])
        );
        assert_eq!(net(&[delete.clone(), again, delete]), Action::Delete);
    }

    #[test]
    fn what_ends_a_run() {
        let mut run = Run::new(3);
        assert!(run.is_empty());
        run.push(change(Operation::Insert, 1, &[Some(1)], 1))
            .unwrap();
        let mut barrier = change(Operation::Update, 2, &[Some(1)], 2);
        barrier.barrier = true;
        assert_eq!(run.push(barrier), Err(Ended::Barrier));
        // Another row has a key of the first one.
        let mut shared = change(Operation::Insert, 2, &[Some(1)], 2);
        shared.hashes = &[2, 1];
        assert_eq!(run.push(shared.clone()), Err(Ended::SharedKey));
        shared.key = 1;
        shared.relation = 7;
        assert_eq!(run.push(shared), Err(Ended::SharedKey));
        let mut moves = change(Operation::Update, 1, &[Some(1)], 2);
        moves.moves = true;
        assert_eq!(run.push(moves), Err(Ended::KeyChange));
        let mut altered = change(Operation::Update, 1, &[Some(1)], 2);
        altered.shape = 2;
        assert_eq!(run.push(altered), Err(Ended::Shape));
        let mut elsewhere = change(Operation::Update, 1, &[Some(1)], 2);
        elsewhere.version.origin = 2;
        assert_eq!(run.push(elsewhere), Err(Ended::Version));
        let mut forwarded = change(Operation::Update, 1, &[Some(1)], 1);
        forwarded.from_origin = false;
        assert_eq!(run.push(forwarded.clone()), Err(Ended::Version));
        forwarded.version.timestamp = 2;
        run.push(forwarded).unwrap();
        // A key change is taken, but nothing after it.
        let mut moves = change(Operation::Update, 2, &[Some(1)], 2);
        moves.moves = true;
        moves.hashes = &[2, 3];
        run.push(moves).unwrap();
        assert_eq!(
            run.push(change(Operation::Insert, 4, &[Some(1)], 3)),
            Err(Ended::Full)
        );
        run.limit = 10;
        for key in [2, 3] {
            let later = change(Operation::Insert, key, &[Some(1)], 3);
            assert_eq!(run.push(later), Err(Ended::KeyChange));
        }
        assert_eq!(run.changes(), 3);
    }

    #[test]
    fn two_rows_of_a_run_that_meet_end_it() {
        let mut run = Run::new(10);
        run.push(change(Operation::Insert, 1, &[Some(1)], 1))
            .unwrap();
        run.push(change(Operation::Insert, 2, &[Some(1)], 1))
            .unwrap();
        let mut both = change(Operation::Update, 1, &[Some(1)], 2);
        both.hashes = &[1, 2];
        assert_eq!(run.push(both), Err(Ended::SharedKey));
    }

    #[test]
    fn groups_are_stable() {
        let mut run = Run::new(10);
        for (relation, operation, key) in [
            (5, Operation::Insert, 1),
            (4, Operation::Update, 2),
            (5, Operation::Delete, 3),
            (4, Operation::Insert, 4),
            (5, Operation::Insert, 5),
            (4, Operation::Update, 6),
        ] {
            let mut change = change(operation, key, &[Some(key)], 1);
            change.relation = relation;
            change.hashes = &[];
            run.push(change).unwrap();
        }
        let mut nets = run.finish();
        group_by_table(&mut nets);
        let keys: Vec<u64> = nets.iter().map(|net| net.key).collect();
        assert_eq!(keys, [3, 1, 5, 2, 6, 4]);
    }
}
