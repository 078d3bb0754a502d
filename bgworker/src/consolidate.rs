//! Joins the changes of several whole transactions, in the provider's commit order, into one net
//! change for each row, and groups these by table. Run by an applier before it applies a batch.
//!
//! A [`Run`] takes changes until one comes that it can't take in any order with what it has; then
//! it is applied, and the next one starts. Within a run no two net changes share a unique key (by
//! hash, as in the writeset), so they may be applied in any order, table by table, or at once. What
//! ends a run: a barrier (truncate, unknown keys, a table that this node orders by itself), a
//! change of a key that another row of the run has had, a change of a row whose key has changed in
//! the run, a change of a row in another shape than its earlier ones (the provider's table was
//! altered: its columns may be others, or in other places), a change whose version does not follow
//! from the row's last one, a hash that two keys share, and its limit.
//!
//! | first | then | net |
//! |---|---|---|
//! | insert | update | insert |
//! | insert | delete | vanish: no row, but the trace of its deletion |
//! | update | update | one update; a column that the later one does not have is the earlier one's |
//! | update | delete | delete |
//! | delete | insert | replace: the row as if new, columns that only this node has at their defaults |
//! | update that changes the key | anything | not joined |
//!
//! **Conflicts.** With `last_update_wins` the net result is what applying the changes one after the
//! other gives, the row's final version included, if the applier goes by two rules. It decides the
//! conflict with [`Net::first`], the first change's operation and version: if that is to be
//! applied, and is no conflict, then so are all the others, since each finds the row that the one
//! before has left. The row then gets [`Net::version`], the last one's. In all other cases it
//! applies [`Net::parts`] one by one. Were a conflict decided once for all, a change that should
//! have lost would win with a later one's version, a value that only it has would get in, and of
//! several losers one would be recorded. A vanished row leaves a deletion's trace: an older change
//! from a third node must not bring it back. Who can't leave one without a row applies the parts.
//!
//! **What is given up.** States between a run's transactions are never visible, and a commit here
//! stands for several there; triggers and `RETURNING`-like side effects see one change for each row
//! instead of all. Nothing else: each row ends with the same values and version. Grouping by table
//! gives up the order between tables inside a run, which only matters to triggers and to foreign
//! keys where these are made to be checked here; such tables have barriers
//! ([`crate::table_order`]).
//!
//! Not for: reading rows. A column is whatever the caller takes for one, for example where its
//! bytes are.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// What a change does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A row comes.
    Insert,
    /// A row changes.
    Update,
    /// A row goes.
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
    /// A number for which columns it has there, and where.
    pub shape: u32,
    /// What it does.
    pub operation: Operation,
    /// It orders with every other change of its table.
    pub barrier: bool,
    /// Hashes of all its unique keys, before and after.
    pub hashes: &'c [u64],
    /// The key by which its row is found, exactly; of an update, before it.
    pub key: K,
    /// An update that changes that key.
    pub moves: bool,
    /// The row after it; `None` in a column that is as it was. Empty for a delete.
    pub columns: Vec<Option<V>>,
    /// Its version.
    pub version: Version,
    /// It comes from its origin itself, in that one's commit order.
    pub from_origin: bool,
}

/// What is to be done to a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action<V> {
    /// Insert it.
    Insert(Vec<Option<V>>),
    /// Change these columns.
    Update(Vec<Option<V>>),
    /// Change all columns, those that only this node has to their defaults.
    Replace(Vec<Option<V>>),
    /// Delete it.
    Delete,
    /// It came and went. Nothing to write but the trace of its deletion.
    Vanish,
}

/// The net change of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Net<K, V> {
    /// The table.
    pub relation: u32,
    /// The row's key, before.
    pub key: K,
    /// What to do.
    pub action: Action<V>,
    /// The first of the changes that were joined, by which conflicts are decided.
    pub first: (Operation, Version),
    /// The version of the last one, which is the row's.
    pub version: Version,
    /// Numbers of the changes, in the order in which they were pushed, from 0.
    pub parts: Vec<u32>,
}

/// Why a run takes no more. The change was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The change is a barrier: it is to be applied as it is, alone, after this run.
    Barrier,
    /// Another row of the run has had one of its keys.
    SharedKey,
    /// Its row has had, or now gets, another key.
    KeyChange,
    /// It has other columns than its row's changes before it.
    Shape,
    /// Its version does not follow from that of its row's last change.
    Version,
    /// The run is as large as it may be.
    Full,
}

/// Hashes are good as they are.
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
    /// `None` when it is deleted.
    columns: Option<Vec<Option<V>>>,
    /// It was deleted in between.
    anew: bool,
}

/// Changes that are being joined.
#[derive(Debug)]
pub struct Run<K, V> {
    rows: Vec<Row<K, V>>,
    /// Which row has had a key.
    owners: HashMap<u64, usize, BuildHasherDefault<AsItIs>>,
    pushed: u32,
    limit: u32,
}

impl<K: Clone + Eq, V: Clone> Run<K, V> {
    /// An empty run of at most `limit` changes.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            rows: Vec::new(),
            owners: HashMap::default(),
            pushed: 0,
            limit: limit.max(1),
        }
    }

    /// Changes that were taken.
    #[must_use]
    pub fn changes(&self) -> u32 {
        self.pushed
    }

    /// Whether nothing was taken yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pushed == 0
    }

    /// Take the next change.
    ///
    /// # Errors
    /// Why the run has ended. [`Run::finish`] then gives what it has; the change belongs to the
    /// next run, or is a barrier.
    pub fn push(&mut self, change: Change<'_, K, V>) -> Result<(), Ended> {
        self.offer(change).map_err(|(ended, _)| ended)
    }

    /// As [`Run::push`].
    ///
    /// # Errors
    /// The change is given back too.
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

    /// The row that a change belongs to, or the next free place.
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

    /// The net changes, in the order of each row's first change.
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
            // An insert over a row, or an update of none, is what no provider sends; the later one
            // counts.
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

/// Group a run's net changes for bulk apply: table by table in the order of their first changes, in
/// each table first what goes, then what changes, then what comes; otherwise in the order that they
/// had.
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
        // Another row with a key of the first one.
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
