//! Consolidation: the changes of a batch's transactions, joined into one for each row where that comes to the same
//! (`braid_bgworker::consolidate`), carried out. Run by the appliers.
//!
//! A net change is written when its first change meets no conflict; in all other cases its changes are applied one by one, as
//! they would have been. The row's version is that of its last change.

use braid_bgworker::conflict::{Action as Deed, decide_insert, decide_update};
use braid_bgworker::consolidate::{
    Action, Change as Part, Net, Operation as PartOperation, Run, Version as PartVersion,
    group_by_table,
};
use braid_gir::{Begin, Change, Image, Operation, Truncate, Value};

use super::Session;
use super::change::{Key, version};
use super::lookup::Found;
use super::number_map::NumberMap;
use super::table::{OpenTable, RowValues};
use super::write::Written;
use crate::error::PgError;

/// Changes that are joined at most: of a batch all.
const LIMIT: u32 = 1 << 20;

/// One record of a batch, and the number of its transaction.
#[derive(Debug, Clone, Copy)]
pub enum Item<'a> {
    /// A row.
    Change(usize, Change<'a>),
    /// Tables.
    Truncate(usize, Truncate<'a>),
}

/// The values of a key, exactly as they came.
#[derive(Debug, Clone, PartialEq)]
struct ExactKey<'a>(Vec<Value<'a>>);

// A NaN is not equal to itself; then a row is taken for another one with its hash, which is applied by itself.
impl Eq for ExactKey<'_> {}

type Joined<'a> = Net<ExactKey<'a>, Value<'a>>;

/// Tables whose changes may be joined, by schema number; with the columns of their key.
type Eligible = NumberMap<u32, Option<(u32, Vec<usize>)>>;

impl Session {
    /// Apply the records of a batch whose transactions began with `begins`. The batch is open.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn apply_joined(
        &mut self,
        begins: &[Begin<'_>],
        items: &[Item<'_>],
    ) -> Result<(), PgError> {
        let mut eligible = Eligible::default();
        let mut rest = items;
        while let Some(next) = rest.first() {
            let mut run = Run::new(LIMIT);
            let mut taken = 0;
            for item in rest {
                if !self.push(&mut run, &mut eligible, begins, item)? {
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

    fn apply_item(&mut self, begins: &[Begin<'_>], item: &Item<'_>) -> Result<(), PgError> {
        let (Item::Change(number, _) | Item::Truncate(number, _)) = item;
        if let Some(begin) = begins.get(*number) {
            self.show(begin);
        }
        match item {
            Item::Change(_, change) => self.change(change),
            Item::Truncate(_, truncate) => self.truncate(truncate),
        }
    }

    /// Whether changes of a relation may be joined: then the table, and which of its columns are the key.
    fn eligible(
        &mut self,
        known: &mut Eligible,
        begin: &Begin<'_>,
        schema: u32,
    ) -> Result<Option<(u32, Vec<usize>)>, PgError> {
        if let Some(found) = known.get(&schema) {
            return Ok(found.clone());
        }
        self.show(begin);
        let found = match self.prepare(schema)? {
            None => None,
            Some((key, _, _)) => {
                let target = self.target(key)?;
                let simple = target
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

    /// Put a record into the run. False when it has to be applied by itself, or belongs to the next run.
    fn push<'a>(
        &mut self,
        run: &mut Run<ExactKey<'a>, Value<'a>>,
        known: &mut Eligible,
        begins: &[Begin<'_>],
        item: &Item<'a>,
    ) -> Result<bool, PgError> {
        let Item::Change(number, change) = item else {
            return Ok(false);
        };
        let Some(begin) = begins.get(*number) else {
            return Ok(false);
        };
        let Some((relation, columns)) = self.eligible(known, begin, change.header.schema.0)? else {
            return Ok(false);
        };
        let before = change.before.map(values).transpose()?;
        let after = change.after.map(values).transpose()?;
        let exact = |row: &Vec<Value<'a>>| -> Option<ExactKey<'a>> {
            columns
                .iter()
                .map(|column| {
                    row.get(*column)
                        .copied()
                        .filter(|value| *value != Value::None)
                })
                .collect::<Option<Vec<_>>>()
                .map(ExactKey)
        };
        let Some(key) = before.as_ref().or(after.as_ref()).and_then(exact) else {
            return Ok(false);
        };
        let moves = before.is_some()
            && after
                .as_ref()
                .is_some_and(|row| exact(row).as_ref() != Some(&key));
        let hashes: Vec<u64> = change.header.writeset.hashes().collect();
        let row = after.unwrap_or_default();
        let part = Part {
            relation,
            operation: match change.operation {
                Operation::Insert => PartOperation::Insert,
                Operation::Update => PartOperation::Update,
                Operation::Delete => PartOperation::Delete,
            },
            barrier: change.header.barrier,
            hashes: &hashes,
            key,
            moves,
            columns: row
                .into_iter()
                .map(|value| (value != Value::None).then_some(value))
                .collect(),
            version: PartVersion {
                timestamp: begin.commit_timestamp,
                // All of a batch have one origin.
                origin: 0,
            },
            from_origin: begin.origin.is_empty(),
        };
        Ok(run.push(part).is_ok())
    }

    /// Write a net change. False, and nothing is written, when its parts have to be applied one by one.
    fn apply_net(
        &mut self,
        net: &Joined<'_>,
        begins: &[Begin<'_>],
        parts: &[Item<'_>],
    ) -> Result<bool, PgError> {
        let part = |number: Option<&u32>| match parts.get(*number? as usize)? {
            Item::Change(number, change) => Some((begins.get(*number)?, change)),
            Item::Truncate(..) => None,
        };
        let (Some((begin, change)), Some((last, _))) =
            (part(net.parts.first()), part(net.parts.last()))
        else {
            return Ok(false);
        };
        let (exists, columns) = match (net.first.0, &net.action) {
            (PartOperation::Insert, Action::Insert(columns)) => (false, Some(columns)),
            (PartOperation::Update, Action::Update(columns)) => (true, Some(columns)),
            (PartOperation::Update, Action::Delete) => (true, None),
            // A replaced row's other columns go back to their defaults, a vanished one leaves a trace: both come of the parts.
            _ => return Ok(false),
        };
        self.show(begin);
        let Some((key, remote, current)) = self.prepare(change.header.schema.0)? else {
            return Ok(false);
        };
        let sought = self.sought(key, &net.key)?;
        let found = self.find(key, &remote, &sought, false)?;
        if matches!(found, Found::Row(_)) != exists {
            return Ok(false);
        }
        let (incoming, from_origin) = (version(&current), current.from_origin);
        let decision = if exists {
            decide_update(self.local(found), incoming, from_origin)
        } else {
            decide_insert(self.local(found), incoming, from_origin)
        };
        if decision.conflict.is_some() || decision.action != Deed::Apply {
            return Ok(false);
        }
        let mut slot: fn(&OpenTable) -> *mut pgrx::pg_sys::TupleTableSlot = OpenTable::new_slot;
        match columns {
            Some(columns) => {
                let values = self.row(
                    key,
                    columns
                        .iter()
                        .enumerate()
                        .filter_map(|(at, value)| Some((at, (*value)?))),
                )?;
                let target = self.target(key)?;
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
                }
                self.spare.push(values);
            }
            None => {
                slot = OpenTable::local_slot;
                if self.open(key)?.delete()? == Written::Changed {
                    return Ok(false);
                }
            }
        }
        self.spare.push(sought);
        for number in &net.parts {
            if let Some((_, change)) = part(Some(number)) {
                self.count(key, |counts| match change.operation {
                    Operation::Insert => counts.inserts += 1,
                    Operation::Update => counts.updates += 1,
                    Operation::Delete => counts.deletes += 1,
                });
            }
        }
        self.counts.consolidated += (net.parts.len() as u64).saturating_sub(1);
        let mut current = current;
        current.timestamp = last.commit_timestamp;
        self.note_version(key, &current, slot);
        Ok(true)
    }

    /// A row that has only the key.
    fn sought(&mut self, key: Key, exact: &ExactKey<'_>) -> Result<RowValues, PgError> {
        let columns: Vec<usize> = self
            .target(key)?
            .plan
            .key
            .iter()
            .flat_map(|index| &index.columns)
            .map(|column| column.remote)
            .collect();
        self.row(key, columns.into_iter().zip(exact.0.iter().copied()))
    }

    /// The values of a local row, from those of some of the stream's columns.
    fn row<'a>(
        &mut self,
        key: Key,
        values: impl Iterator<Item = (usize, Value<'a>)>,
    ) -> Result<RowValues, PgError> {
        let mut row = self.spare.pop().unwrap_or_default();
        let plan = &mut self.target(key)?.plan;
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
            let datum = column.decoder.decode(&value)?;
            if let Some(place) = row.get_mut(column.local) {
                *place = Some(datum);
            }
        }
        Ok(row)
    }
}

fn values(image: Image<'_>) -> Result<Vec<Value<'_>>, PgError> {
    image
        .values()
        .collect::<Result<_, _>>()
        .map_err(PgError::from)
}
