//! Merges a change with a local row, in a table with column rules. Run by the appliers.

use braid_bgworker::column_rule::{Came, ColumnRule, Here, Values, is_again, merge, takes, writes};
use braid_bgworker::conflict::{Action, Decision, Kind, Local, Version};
use braid_bgworker::resolution::Resolution;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Change, Operation, ReplicaIdentity};
use braid_node::column_write::{self, ColumnWrite};
use braid_postgres::error::PgError;

use super::cells::Cells;
use super::{Datum, RuledColumn};
use crate::change::{Incoming, version};
use crate::deletion::{Deletions, session_origin};
use crate::lookup::Found;
use crate::relation::RemoteRelation;
use crate::table::{OpenTable, RowValues};
use crate::target::{Key, Tables};
use crate::version::Stamp;
use crate::write::Written;
use crate::{Current, Session, Target};

/// Registers whose value a change determines.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Won {
    /// Numbers of the columns that the change writes, and that no newer change has written.
    numbers: Vec<i16>,
    /// No older change is meant for this row: the change counts as one that has written all
    /// columns.
    is_new: bool,
}

/// Values that column rules give to a local row.
#[derive(Debug)]
pub(crate) struct Merged {
    /// Position and value of each column with a rule.
    values: Vec<(usize, Option<Datum>)>,
    /// Whether one of the values is not that of the local row.
    changed: bool,
    /// Names of columns whose values are not those of the winning row, for the history.
    pub(crate) words: String,
    /// Registers to store, if the table has any.
    won: Option<Won>,
}

impl Merged {
    /// Returns the values of `after`, with those of the columns that have rules.
    pub(crate) fn over(&self, after: &RowValues) -> RowValues {
        let mut values = after.clone();
        for (position, value) in &self.values {
            if let Some(place) = values.get_mut(*position) {
                *place = Some(*value);
            }
        }
        values
    }
}

/// Returns a column's values in a change.
fn came(
    column: &RuledColumn,
    incoming: Incoming<'_>,
    new: Option<Datum>,
) -> Result<Came<Datum>, PgError> {
    if incoming.is_insert {
        return Ok(Came::Insert(new));
    }
    let before = incoming
        .before
        .and_then(|before| *before.get(column.local)?);
    match (before, column.rule) {
        (None, ColumnRule::Delta | ColumnRule::LastUpdateWins) => Err(PgError::new(
            SqlState::InternalError,
            format!("a change lacks the old value of column \"{}\"", column.name),
        )),
        (old, _) => Ok(Came::Update {
            new,
            old: old.flatten(),
        }),
    }
}

impl Tables {
    /// Checks that updates carry whole old rows, if the rules need them.
    pub(crate) fn check_before(
        &self,
        key: Key,
        remote: &RemoteRelation,
        before: Option<&RowValues>,
    ) -> Result<(), PgError> {
        let needs = |target: &Target| target.plan.column_rules.needs_before();
        let Some(rule) = self.get(key).and_then(needs) else {
            return Ok(());
        };
        if before.is_some() {
            return Ok(());
        }
        let name = remote.qualified_name();
        Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!("changes of table \"{name}\" come without the old values that column rule \"{}\" needs", rule.name()),
        )
        .with_detail("Its replica identity at the node that wrote them is not FULL.")
        .with_hint(format!(
            "Run ALTER TABLE {name} REPLICA IDENTITY FULL there. To let pass what was written before, remove the rule with braid.set_column_rule \
             and run braid.enable_subscription; set it again when that is applied."
        )))
    }

    /// Whether a newer change may have written the row that was found.
    pub(crate) fn may_lose(
        &self,
        key: Key,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        let plan = self.plan(key)?;
        if !plan.column_rules.has_registers() || !matches!(found, Found::Row(_)) {
            return Ok(false);
        }
        // If a rule other than `last_update_wins` decides, an older row may have replaced a newer
        // one.
        let grows = [Kind::InsertExists, Kind::UpdateOriginDiffers]
            .into_iter()
            .all(|kind| plan.rules.of(kind) == Resolution::LastUpdateWins);
        Ok(decision.action != Action::Apply || !grows || found == Found::Row(Stamp::Unversioned))
    }

    /// Stores which registers a change, which was just written, has set.
    pub(crate) fn remember_columns(
        &self,
        key: Key,
        current: &Current,
        merged: &Merged,
        row: &RowValues,
    ) -> Result<(), PgError> {
        let columns = match &merged.won {
            Some(won) if won.is_new => None,
            Some(won) if !won.numbers.is_empty() => Some(won.numbers.clone()),
            _ => return Ok(()),
        };
        let Some(hashes) = self.key_hashes(key, row) else {
            return Ok(());
        };
        let writes: Vec<ColumnWrite> = hashes
            .each()
            .map(|hash| ColumnWrite {
                hash,
                relation: key.1,
                timestamp: current.timestamp,
                origin: session_origin(),
                columns: columns.clone(),
            })
            .collect();
        column_write::store(&writes)
    }
}

/// The parts of a session that merge columns with rules.
pub(crate) struct ColumnMerge<'s> {
    deletions: Deletions<'s>,
}

impl ColumnMerge<'_> {
    /// Returns the values of the columns that have rules. Returns `None` if a change adds nothing
    /// to them, or if there are none.
    pub(crate) fn merge(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
        decision: Decision,
        incoming: Incoming<'_>,
    ) -> Result<Option<Merged>, PgError> {
        if !self.deletions.tables.plan(key)?.column_rules.any() {
            return Ok(None);
        }
        let wins = decision.action == Action::Apply;
        let exists = matches!(found, Found::Row(_));
        if !exists && !wins {
            return Ok(None);
        }
        if !wins
            && (is_again(
                decision,
                self.deletions.origins.local(found),
                version(current),
            ) || self.is_of_an_earlier_row(key, current, incoming)?)
        {
            return Ok(None);
        }
        let deleted = matches!(self.deletions.origins.local(found), Local::Deleted(_));
        let won = self.won(key, current, (found, deleted), decision, incoming)?;
        let (plan, table) = self.deletions.tables.opened_at(key)?;
        let mut merged = Merged {
            values: Vec::new(),
            changed: false,
            words: String::new(),
            won,
        };
        let mut names = Vec::new();
        for column in &plan.column_rules.columns {
            // Not in the change: unchanged.
            let Some(new) = incoming.after.get(column.local).copied().flatten() else {
                continue;
            };
            let local = exists.then(|| table.local_value(column.local)).flatten();
            let here = match found {
                Found::Row(Stamp::Unversioned) => Here::Unversioned(local),
                Found::Row(_) => Here::Row(local),
                Found::Missing(_) if deleted => Here::Deleted,
                Found::Missing(_) => Here::Nothing,
            };
            let came = came(column, incoming, new)?;
            let mut cells = Cells(column);
            let takes = match &merged.won {
                Some(won) if column.is_register() && exists => {
                    won.numbers.contains(&column.number())
                }
                _ => wins,
            };
            let value = merge(&mut cells, column.rule, here, came, takes)?;
            let mut same = |other: Option<Datum>| match (value, other) {
                (Some(one), Some(other)) => cells.is_same(one, other),
                (one, other) => one.is_none() && other.is_none(),
            };
            merged.changed |= !same(local);
            if !same(if wins { new } else { local }) {
                names.push(format!("{} ({})", column.name, column.rule.name()));
            }
            merged.values.push((column.local, value));
        }
        if !names.is_empty() {
            merged.words = format!("; merged by column: {}", names.join(", "));
        }
        Ok(Some(merged))
    }

    /// Returns the registers that a change sets. Returns `None` if the table has none.
    fn won(
        &mut self,
        key: Key,
        current: &Current,
        (found, deleted): (Found, bool),
        decision: Decision,
        incoming: Incoming<'_>,
    ) -> Result<Option<Won>, PgError> {
        let columns = self.deletions.tables.plan(key)?.column_rules.columns.iter();
        let columns: Vec<RuledColumn> = columns
            .filter(|column| column.is_register())
            .cloned()
            .collect();
        if columns.is_empty() {
            return Ok(None);
        }
        if current.runs || current.unsettled {
            return Err(self
                .deletions
                .hints
                .wait_for_commit("It writes columns whose newest value counts."));
        }
        let wins = decision.action == Action::Apply;
        let exists = matches!(found, Found::Row(_));
        let moved = match incoming.before {
            Some(before) if !incoming.is_insert => {
                let here = self.deletions.tables.key_hashes(key, incoming.after);
                let left = self.deletions.tables.key_hashes(key, before);
                here.map(|here| here.equal) != left.map(|left| left.equal)
            }
            _ => false,
        };
        let mut written = Vec::with_capacity(columns.len());
        for column in &columns {
            let Some(new) = incoming.after.get(column.local).copied().flatten() else {
                continue;
            };
            if writes(&mut Cells(column), came(column, incoming, new)?) {
                written.push(column.number());
            }
        }
        let mut lost = 0;
        if exists && !written.is_empty() && self.deletions.tables.may_lose(key, found, decision)? {
            let newest = self.newest_writes(key, incoming, &written)?;
            let remote = version(current);
            let mut newest = newest.iter();
            let before = written.len();
            written.retain(|_| {
                let newest = newest.next().and_then(Option::as_ref);
                takes(
                    newest.map(|(timestamp, origin)| Version {
                        timestamp: *timestamp,
                        origin,
                    }),
                    remote,
                )
            });
            lost = before - written.len();
        }
        let is_new = incoming.is_insert || (!exists && deleted) || moved;
        Ok(Some(Won {
            numbers: written,
            is_new: wins && is_new && lost == 0,
        }))
    }

    /// Returns the newest remembered version that has written each of these columns of the row that
    /// was found, which is locked.
    fn newest_writes(
        &mut self,
        key: Key,
        incoming: Incoming<'_>,
        numbers: &[i16],
    ) -> Result<Vec<Option<(i64, String)>>, PgError> {
        let slot = self.deletions.tables.opened_at(key)?.1.local_slot();
        // SAFETY: the slot holds the row.
        column_write::wait_for_local(slot.writer())?;
        let sought = incoming.before.unwrap_or(incoming.after);
        let mut known = Vec::new();
        for hash in self.deletions.tables.hashes(key, sought) {
            column_write::each(hash, |write| known.push(write))?;
        }
        let mut newest: Vec<Option<(i64, String)>> = vec![None; numbers.len()];
        for write in known {
            let node = self.deletions.origins.node(write.origin);
            for (number, newest) in numbers.iter().zip(&mut newest) {
                let is_newer = newest.as_ref().is_none_or(|(timestamp, origin)| {
                    (write.timestamp, node.as_bytes()) > (*timestamp, origin.as_bytes())
                });
                if is_newer && write.has(*number) {
                    *newest = Some((write.timestamp, node.to_owned()));
                }
            }
        }
        Ok(newest)
    }

    /// Whether a losing change was made to a row that has been deleted since, before the local row
    /// came.
    fn is_of_an_earlier_row(
        &mut self,
        key: Key,
        current: &Current,
        incoming: Incoming<'_>,
    ) -> Result<bool, PgError> {
        let sought = incoming.before.unwrap_or(incoming.after);
        let found = self.deletions.recall(key, sought, None, true)?;
        Ok(
            matches!(self.deletions.origins.local(found), Local::Deleted(deleted) if deleted > version(current)),
        )
    }
}

impl Session {
    /// Returns access to the merging of columns.
    pub(crate) fn columns(&mut self) -> ColumnMerge<'_> {
        ColumnMerge {
            deletions: self.deletions(),
        }
    }

    /// Sets the columns that have rules in the row to which several changes are joined, all of
    /// which are to be applied. Each change adds its own difference: between two of them, their
    /// node may have applied additions of other nodes, which come here by themselves.
    pub(crate) fn fold_columns<'c, 'a: 'c>(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        found: Found,
        changes: impl Iterator<Item = &'c Change<'a>>,
        values: &mut RowValues,
    ) -> Result<(), PgError> {
        if !self.tables.target(key)?.plan.column_rules.any() {
            return Ok(());
        }
        let mut heres: Vec<(usize, Here<Datum>)> = {
            let (plan, table) = self.tables.opened(key)?;
            let columns = plan.column_rules.columns.iter();
            let here = |column: &RuledColumn| match found {
                Found::Row(Stamp::Unversioned) => {
                    Here::Unversioned(table.local_value(column.local))
                }
                Found::Row(_) => Here::Row(table.local_value(column.local)),
                Found::Missing(_) => Here::Nothing,
            };
            columns.map(|column| (column.local, here(column))).collect()
        };
        for change in changes {
            let is_insert = change.operation == Operation::Insert;
            let Some(after) = change.after.as_ref() else {
                continue;
            };
            let after = self.values(after, key, remote)?;
            let before = match change.before.as_ref() {
                Some(before) => Some(self.values(before, key, remote)?),
                None => None,
            };
            if !is_insert {
                let whole = before
                    .as_ref()
                    .filter(|_| remote.identity == ReplicaIdentity::Full);
                self.tables.check_before(key, remote, whole)?;
            }
            let columns = &self.tables.target(key)?.plan.column_rules.columns;
            for (column, (_, here)) in columns.iter().zip(&mut heres) {
                let of = |row: &RowValues| row.get(column.local).copied().flatten();
                let Some(new) = of(&after) else { continue };
                let (met, came) = if is_insert {
                    (Here::Nothing, Came::Insert(new))
                } else {
                    let old = before.as_ref().and_then(of).flatten();
                    (*here, Came::Update { new, old })
                };
                *here = Here::Row(merge(&mut Cells(column), column.rule, met, came, true)?);
            }
            self.spare.push(after);
            self.spare.extend(before);
        }
        for (position, here) in heres {
            if let (Here::Row(value), Some(place)) = (here, values.get_mut(position)) {
                *place = Some(value);
            }
        }
        Ok(())
    }

    /// Writes the values that a losing change adds to the row that was found, which keeps its
    /// version.
    pub(crate) fn write_merged(
        &mut self,
        key: Key,
        found: Found,
        merged: &Merged,
    ) -> Result<Written, PgError> {
        if !merged.changed {
            return Ok(Written::Done);
        }
        let values = merged.over(&vec![None; self.tables.target(key)?.plan.width]);
        let table = self.tables.open(key)?;
        table.prepare_update(&values);
        if table.update()? == Written::Changed {
            return Ok(Written::Changed);
        }
        self.count(key, |counts| counts.updates += 1);
        let stamp = match found {
            Found::Row(Stamp::Own) => return Ok(Written::Done),
            Found::Row(stamp) => stamp.known(),
            Found::Missing(_) => None,
        };
        // A row without a version is older than all that have one.
        self.note_merged(key, stamp.unwrap_or((0, 0)), OpenTable::new_slot)?;
        Ok(Written::Done)
    }
}
