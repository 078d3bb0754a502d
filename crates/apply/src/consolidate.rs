//! Consolidation: joins the changes of a batch's transactions, or of one, into one change for each
//! row, if the result is the same (`braid_bgworker::consolidate`). Run by the appliers.
//!
//! A net change is written if its first change has no conflict. Otherwise its changes are applied
//! one by one. The row's version is that of its last change.

use std::cmp::Ordering;
use std::rc::Rc;

use braid_bgworker::conflict::{Action as RowAction, decide_insert, decide_update};
use braid_bgworker::consolidate::{
    Action, Change as Part, Net, Operation as PartOperation, Run, Version as PartVersion,
    group_by_table,
};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Begin, Change, Image, Operation, Truncate, Value};
use braid_postgres::error::PgError;
use braid_postgres::slot::Slot;

use super::Session;
use super::change::version;
use super::doing::{self, Step};
use super::lookup::{Found, Purpose};
use super::number_map::NumberMap;
use super::route::Effect;
use super::table::{OpenTable, RowValues};
use super::target::Key;
use super::write::Written;

/// Largest number of changes that are joined: all of a batch.
const LIMIT: u32 = 1 << 20;

/// One record of a batch, and the number of its transaction.
#[derive(Debug, Clone, Copy)]
pub enum Item<'a> {
    /// A row; with the version that the change has replaced, as it was sent.
    Change(usize, Change<'a>, Option<&'a [u8]>),
    /// Tables.
    Truncate(usize, Truncate<'a>),
}

/// The values of a key, byte for byte.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ExactKey<'a>(Vec<Value<'a>>);

// A NaN is not equal to itself. Then a row counts as another one with the same hash, and is applied
// by itself.
impl Eq for ExactKey<'_> {}

impl ExactKey<'_> {
    /// Compares as most indexes do; only for speed.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        for pair in self.0.iter().zip(&other.0) {
            let order = match pair {
                (Value::Integer(one), Value::Integer(other)) => one.cmp(other),
                (Value::UnixTimestamp(one), Value::UnixTimestamp(other)) => one.cmp(other),
                (Value::String(one), Value::String(other))
                | (Value::Binary(one), Value::Binary(other)) => one.cmp(other),
                _ => Ordering::Equal,
            };
            if order != Ordering::Equal {
                return order;
            }
        }
        Ordering::Equal
    }
}

/// A net change. When it is written, its columns are made of those of its parts.
pub(super) type Joined<'a> = Net<ExactKey<'a>, ()>;

/// Tables whose changes may be joined, by schema number; with the columns of their key.
type Eligible = NumberMap<u32, Option<(u32, Vec<usize>)>>;

impl Session {
    /// Applies changes of the current transaction, each of which has number 0.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn consolidate(&mut self, items: &[Item<'_>]) -> Result<(), PgError> {
        let Some(current) = self.current() else {
            return Err(PgError::new(
                SqlState::InternalError,
                "no transaction is open",
            ));
        };
        let origin = Rc::clone(&current.origin);
        let begin = Begin {
            xid: current.xid,
            commit_lsn: current.commit_lsn,
            commit_timestamp: current.timestamp,
            origin: if current.from_origin { "" } else { &origin },
            origin_lsn: 0,
        };
        self.apply_joined(&[begin], items)
    }

    /// Makes one of a batch's transactions the current one. A single transaction is the current one
    /// already, and more may be known of it than its begin tells.
    pub(super) fn show_part(&mut self, begins: &[Begin<'_>], number: usize) {
        if begins.len() > 1
            && let Some(begin) = begins.get(number)
        {
            self.show(begin);
        }
    }

    /// Applies the records of a batch whose transactions began with `begins`. The batch is open.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn apply_joined(
        &mut self,
        begins: &[Begin<'_>],
        items: &[Item<'_>],
    ) -> Result<(), PgError> {
        let mut eligible = Eligible::default();
        let mut hashes = Vec::new();
        let mut rest = items;
        while let Some(next) = rest.first() {
            let mut run = Run::new(LIMIT);
            let mut taken = 0;
            for item in rest {
                let Item::Change(number, change, _) = item else {
                    break;
                };
                let Some(begin) = begins.get(*number) else {
                    break;
                };
                let schema = change.header.schema.0;
                self.show_part(begins, *number);
                let Some((relation, columns)) = self.eligible(&mut eligible, schema)? else {
                    break;
                };
                let Some(part) = part(begin, change, relation, &columns, &mut hashes)? else {
                    break;
                };
                if run.push(part).is_err() {
                    break;
                }
                taken += 1;
            }
            if taken == 0 {
                self.apply_item(begins, next)?;
                rest = rest.get(1..).unwrap_or_default();
                continue;
            }
            let (parts, later) = rest.split_at(taken);
            let mut nets = run.finish();
            group_by_table(&mut nets);
            for net in &nets {
                if net.parts.len() > 1 && self.apply_net(net, begins, parts)? {
                    continue;
                }
                for part in &net.parts {
                    if let Some(item) = parts.get(*part as usize) {
                        self.apply_item(begins, item)?;
                    }
                }
            }
            rest = later;
        }
        Ok(())
    }

    pub(super) fn apply_item(
        &mut self,
        begins: &[Begin<'_>],
        item: &Item<'_>,
    ) -> Result<(), PgError> {
        let (Item::Change(number, ..) | Item::Truncate(number, _)) = item;
        self.show_part(begins, *number);
        match item {
            Item::Change(_, change, replaced) => {
                self.replaces(change.operation, *replaced);
                self.change(change)
            }
            Item::Truncate(_, truncate) => self.truncate(truncate),
        }
    }

    /// Returns whether changes of a relation may be joined: if so, its table, and which of its
    /// columns are the key.
    fn eligible(
        &mut self,
        known: &mut Eligible,
        schema: u32,
    ) -> Result<Option<(u32, Vec<usize>)>, PgError> {
        if let Some(found) = known.get(&schema) {
            return Ok(found.clone());
        }
        let found = match self.prepare(schema, Effect::Remove)? {
            None => None,
            Some((key, _, _)) => {
                let target = self.tables.target(key)?;
                // A function is called for each change by itself, because its answer may depend on
                // what the writer had seen. With registers, the writer of each column is stored for
                // each change.
                let simple = !target.plan.rules.asks()
                    && !target.plan.column_rules.has_registers()
                    && target
                        .table
                        .as_ref()
                        .is_some_and(|table| table.is_plain() && table.has_one_key());
                target.plan.key.as_ref().filter(|_| simple).map(|index| {
                    let columns = index.columns.iter().map(|column| column.remote);
                    (key.1, columns.collect())
                })
            }
        };
        known.insert(schema, found.clone());
        Ok(found)
    }

    /// Writes a net change. Returns false, and writes nothing, if its parts have to be applied one
    /// by one.
    pub(super) fn apply_net(
        &mut self,
        net: &Joined<'_>,
        begins: &[Begin<'_>],
        parts: &[Item<'_>],
    ) -> Result<bool, PgError> {
        let part = |number: Option<&u32>| match parts.get(*number? as usize)? {
            Item::Change(number, change, _) => Some((*number, change)),
            Item::Truncate(..) => None,
        };
        let (Some((number, change)), Some((last, _))) =
            (part(net.parts.first()), part(net.parts.last()))
        else {
            return Ok(false);
        };
        let Some(last) = begins.get(last) else {
            return Ok(false);
        };
        let (exists, effect) = match (net.first.0, &net.action) {
            (PartOperation::Insert, Action::Insert(_)) => (false, Effect::Write),
            (PartOperation::Update, Action::Update(_)) => (true, Effect::Write),
            (PartOperation::Update, Action::Delete) => (true, Effect::Remove),
            // A replaced row's other columns get their defaults again, and a deleted row needs a
            // tombstone: the parts do both.
            _ => return Ok(false),
        };
        let columns = if effect == Effect::Write {
            let changes = net.parts.iter().rev().map(Some).filter_map(part);
            Some(joined_columns(changes.map(|(_, change)| change))?)
        } else {
            None
        };
        self.show_part(begins, number);
        self.does(Step::Change(change.operation), Some(change.header.schema.0));
        let Some((key, remote, mut current)) = self.prepare(change.header.schema.0, effect)? else {
            return Ok(false);
        };
        let sought = self.sought(key, &net.key)?;
        let purpose = match (exists, effect) {
            (false, _) => Purpose::Insert,
            (true, Effect::Write) => Purpose::Change,
            (true, Effect::Remove) => Purpose::Delete,
        };
        let found = self.find(key, &remote, &sought, (purpose, false))?;
        if matches!(found, Found::Row(_)) != exists
            || (current.unsettled && self.origins.may_yet_be_older(&current, found))
        {
            return Ok(false);
        }
        let (incoming, from_origin) = (version(&current), current.from_origin);
        let decision = if exists {
            decide_update(self.origins.local(found), incoming, from_origin)
        } else {
            decide_insert(self.origins.local(found), incoming, from_origin)
        };
        if decision.conflict.is_some() || decision.action != RowAction::Apply {
            return Ok(false);
        }
        let mut slot: fn(&OpenTable) -> Slot = OpenTable::new_slot;
        match columns {
            Some(columns) => {
                let mut values = self.row(
                    key,
                    columns
                        .into_iter()
                        .enumerate()
                        .filter_map(|(at, value)| Some((at, value?))),
                )?;
                let changes = net.parts.iter().filter_map(|number| part(Some(number)));
                let changes = changes.map(|(_, change)| change);
                // A row that lacks values is not written before the provider was asked for them.
                if !exists && self.tables.has_gaps(key, &values) {
                    return Ok(false);
                }
                self.fold_columns(key, &remote, found, changes, &mut values)?;
                let target = self.tables.target(key)?;
                let Some(table) = target.table.as_mut() else {
                    return Ok(false);
                };
                if exists {
                    table.prepare_update(&values);
                    if table.update()? == Written::Changed {
                        return Ok(false);
                    }
                } else {
                    table.prepare_insert(&target.plan, &values);
                    table.insert();
                    let new_slot = table.new_slot();
                    self.deletions()
                        .check_not_deleted(key, &current, &new_slot)?;
                }
                self.spare.push(values);
            }
            None => {
                slot = OpenTable::local_slot;
                if self.tables.open(key)?.delete()? == Written::Changed {
                    return Ok(false);
                }
            }
        }
        self.spare.push(sought);
        let changes = net.parts.iter().filter_map(|number| part(Some(number)));
        self.count_each(key, changes.map(|(_, change)| change.operation));
        current.timestamp = last.commit_timestamp;
        self.note_version(key, &current, slot);
        if effect == Effect::Remove {
            self.deletions().remember(key, current.timestamp, slot)?;
        }
        Ok(true)
    }

    /// Counts changes that were carried out as one.
    fn count_each(&mut self, key: Key, operations: impl Iterator<Item = Operation> + Clone) {
        let joined = (operations.clone().count() as u64).saturating_sub(1);
        self.attempt().counts.consolidated += joined;
        self.count(key, |counts| {
            for operation in operations.clone() {
                match operation {
                    Operation::Insert => counts.inserts += 1,
                    Operation::Update => counts.updates += 1,
                    Operation::Delete => counts.deletes += 1,
                }
            }
        });
    }

    /// Returns a row that has only the key.
    fn sought(&mut self, key: Key, exact: &ExactKey<'_>) -> Result<RowValues, PgError> {
        let columns: Vec<usize> = self
            .tables
            .target(key)?
            .plan
            .key
            .iter()
            .flat_map(|index| &index.columns)
            .map(|column| column.remote)
            .collect();
        self.row(key, columns.into_iter().zip(exact.0.iter().copied()))
    }

    /// Returns the values of a local row, given those of some of the stream's columns.
    fn row<'a>(
        &mut self,
        key: Key,
        values: impl Iterator<Item = (usize, Value<'a>)>,
    ) -> Result<RowValues, PgError> {
        let mut row = self.spare.pop().unwrap_or_default();
        let plan = &mut self.tables.target(key)?.plan;
        row.clear();
        row.resize(plan.width, None);
        for (remote, value) in values {
            let Some(column) = plan
                .columns
                .iter_mut()
                .find(|column| column.remote == remote)
            else {
                continue;
            };
            doing::convert(column.remote);
            let datum = column.decoder.decode(&value)?;
            if let Some(place) = row.get_mut(column.local) {
                *place = Some(datum);
            }
        }
        Ok(row)
    }
}

/// Returns a change in the form that consolidation uses; `None` if its key is missing. `columns`
/// are those of the key; `hashes` is memory for its hashes.
pub(super) fn part<'c, 'a>(
    begin: &Begin<'_>,
    change: &Change<'a>,
    relation: u32,
    columns: &[usize],
    hashes: &'c mut Vec<u64>,
) -> Result<Option<Part<'c, ExactKey<'a>, ()>>, PgError> {
    let Some(image) = change.before.or(change.after) else {
        return Ok(None);
    };
    let Some(key) = exact(image, columns)? else {
        return Ok(None);
    };
    let moves = match (change.before, change.after) {
        (Some(_), Some(after)) => exact(after, columns)?.as_ref() != Some(&key),
        _ => false,
    };
    hashes.clear();
    hashes.extend(change.header.writeset.hashes());
    Ok(Some(Part {
        relation,
        shape: change.header.schema.0,
        operation: match change.operation {
            Operation::Insert => PartOperation::Insert,
            Operation::Update => PartOperation::Update,
            Operation::Delete => PartOperation::Delete,
        },
        barrier: change.header.barrier,
        hashes,
        key,
        moves,
        columns: Vec::new(),
        version: PartVersion {
            timestamp: begin.commit_timestamp,
            // All transactions of a batch have one origin.
            origin: 0,
        },
        from_origin: begin.origin.is_empty(),
    }))
}

/// Returns the values of some columns of an image; `None` if one of them is missing.
fn exact<'a>(image: Image<'a>, columns: &[usize]) -> Result<Option<ExactKey<'a>>, PgError> {
    let last = columns.iter().max().map_or(0, |last| last + 1);
    let values: Vec<Value<'a>> = image.values().take(last).collect::<Result<_, _>>()?;
    let of = |column: &usize| {
        values
            .get(*column)
            .copied()
            .filter(|value| *value != Value::None)
    };
    Ok(columns.iter().map(of).collect::<Option<_>>().map(ExactKey))
}

/// Returns a row after these changes of it, the last of which comes first. A column is `None` if no
/// change has set it.
fn joined_columns<'b, 'a: 'b>(
    changes: impl Iterator<Item = &'b Change<'a>>,
) -> Result<Vec<Option<Value<'a>>>, PgError> {
    let mut columns: Vec<Option<Value<'a>>> = Vec::new();
    for (at, change) in changes.enumerate() {
        let Some(image) = change.after else { break };
        if at == 0 {
            columns.resize(usize::from(image.columns()), None);
        }
        for (place, value) in columns.iter_mut().zip(image.values()) {
            let value = value?;
            if place.is_none() && value != Value::None {
                *place = Some(value);
            }
        }
        // Mostly true after the last change: only unchanged values that are stored out of line are
        // missing.
        if change.operation != Operation::Update || columns.iter().all(Option::is_some) {
            break;
        }
    }
    Ok(columns)
}
