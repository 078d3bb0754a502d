//! Rules for single columns (`braid_bgworker::column_rule`), carried out: read with a table's plan, and asked whenever a change
//! meets a row, whoever wins. Run by the appliers.
//!
//! A row into which a losing change has added something is written by that change's transaction, but keeps its version: that is written
//! down as for rows that a conflict function has made (`batch.rs`).
//!
//! Columns that are registers of their own have who wrote them in `braid.column_write` (`braid_node::column_write`). A change is compared with that only where something
//! newer may have written the row: its version is not known to be the oldest. Then the row is locked, and what local sessions have written to it is waited for.

use std::cmp::Ordering;

use braid_bgworker::column_rule::{Came, ColumnRule, Here, Values, is_again, merge, takes, writes};
use braid_bgworker::conflict::{Action, Decision, Kind, Local, Version};
use braid_bgworker::resolution::Resolution;
use braid_gir::{Change, Operation, ReplicaIdentity};
use braid_node::column_write::{self, ColumnWrite};
use braid_node::settings::{self, RememberDeletions};
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{Is, Sees, has_any};
use braid_postgres::{compat, encoding, ffi, kept_plan};
use pgrx::{FromDatum, pg_sys};

use super::change::{Incoming, Key, version};
use super::deletion::session_origin;
use super::lookup::{Found, writer};
use super::relation::{LocalColumn, RemoteRelation};
use super::table::{OpenTable, RowValues};
use super::version::Stamp;
use super::write::Written;
use super::{Current, Session, Target};

// src/include/utils/fmgroids.h, 15 to 18.
const NUMERIC_ADD: u32 = 1724;
const NUMERIC_SUB: u32 = 1725;
const NUMERIC_CMP: u32 = 1769;
/// numeric(numeric, int4): applies a type modifier.
const NUMERIC_SCALED: u32 = 1703;

const RULES: &str =
    "select column_number::text, rule from braid.column_rule where relation = $1::oid";
/// How many streams bring changes of the table; whether one of them may bring what another one does.
const STREAMS: &str = "select (count(*) > 1 and (bool_or(s.origin = 'any') or count(distinct s.provider_id) < count(*)))::text \
    from braid.subscription s join braid.subscription_table t using (subscription_id) where t.relation = $1::oid";

type Datum = pg_sys::Datum;

/// How a column's values are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Int2,
    Int4,
    Int8,
    Numeric,
}

impl Number {
    fn of(type_id: pg_sys::Oid) -> Option<Self> {
        match type_id {
            pg_sys::INT2OID => Some(Self::Int2),
            pg_sys::INT4OID => Some(Self::Int4),
            pg_sys::INT8OID => Some(Self::Int8),
            pg_sys::NUMERICOID => Some(Self::Numeric),
            _ => None,
        }
    }
}

/// A column that has a rule.
#[derive(Debug, Clone)]
pub struct RuledColumn {
    /// Position in the local row, from 0.
    pub local: usize,
    rule: ColumnRule,
    name: String,
    type_id: pg_sys::Oid,
    type_modifier: i32,
    collation: pg_sys::Oid,
    by_value: bool,
    length: i16,
}

/// Those of one table.
#[derive(Debug, Default)]
pub struct ColumnRules {
    columns: Vec<RuledColumn>,
    /// The table has rules, or had some: rows may be there that are of several changes.
    pub were_set: bool,
}

impl ColumnRules {
    /// Whether there are any.
    #[must_use]
    pub fn any(&self) -> bool {
        !self.columns.is_empty()
    }

    /// Whether a column is a sum.
    #[must_use]
    pub fn has_sums(&self) -> bool {
        self.columns
            .iter()
            .any(|column| column.rule == ColumnRule::Delta)
    }

    /// Whether a column is a register of its own.
    #[must_use]
    pub fn has_registers(&self) -> bool {
        self.columns.iter().any(RuledColumn::is_register)
    }

    /// The rule that needs the rows as the writers of updates saw them, if there is one.
    fn needs_before(&self) -> Option<ColumnRule> {
        [ColumnRule::Delta, ColumnRule::LastUpdateWins]
            .into_iter()
            .find(|rule| self.columns.iter().any(|column| column.rule == *rule))
    }
}

impl RuledColumn {
    fn is_register(&self) -> bool {
        self.rule == ColumnRule::LastUpdateWins
    }

    /// Its number, from 1.
    fn number(&self) -> i16 {
        i16::try_from(self.local + 1).unwrap_or(i16::MAX)
    }
}

/// Which registers a change gives its values.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Won {
    /// Numbers of those that it writes, and that nothing newer has written.
    numbers: Vec<i16>,
    /// Nothing older is meant for the row: it is remembered as one that has written all.
    is_new: bool,
}

/// What changes here of a row by its columns' rules.
#[derive(Debug)]
pub(super) struct Merged {
    /// Position and value of each column that has one.
    values: Vec<(usize, Option<Datum>)>,
    /// A value is not that of the row that is here.
    changed: bool,
    /// Which are not those of the row that wins, for the history.
    pub(super) words: String,
    /// To be remembered, if the table has registers.
    won: Option<Won>,
}

/// Whether values of a type add up.
#[must_use]
pub fn adds_up(type_id: pg_sys::Oid) -> bool {
    Number::of(type_id).is_some()
}

/// Whether values of a type have an order.
#[must_use]
pub fn has_order(type_id: pg_sys::Oid) -> bool {
    compare_function(type_id).is_some()
}

/// A type's comparison, which belongs to the type cache.
fn compare_function(type_id: pg_sys::Oid) -> Option<*mut pg_sys::FmgrInfo> {
    // SAFETY: in a transaction; entries of the type cache are never freed.
    unsafe {
        let flags = i32::try_from(pg_sys::TYPECACHE_CMP_PROC_FINFO).unwrap_or(0);
        let entry = pg_sys::lookup_type_cache(type_id, flags);
        ((*entry).cmp_proc_finfo.fn_oid != pg_sys::InvalidOid)
            .then(|| &raw mut (*entry).cmp_proc_finfo)
    }
}

fn unsuited(table: &str, column: &str, why: &str) -> PgError {
    PgError::new(
        "55000",
        format!("column \"{column}\" of table \"{table}\" can't be merged by its rule"),
    )
    .with_detail(why.to_owned())
    .with_hint(
        "Correct that, or remove the rule with braid.set_column_rule(table, column, null), then run braid.enable_subscription.",
    )
}

/// The rules for the columns of an open table that the stream has. In a transaction, with the process's own rights.
///
/// # Errors
/// 55000 when a column, or the table, has become such that its rule can't be kept; whatever PostgreSQL raises.
///
/// # Safety
/// `relation` is open.
pub unsafe fn load(
    relation: pg_sys::Relation,
    name: &str,
    sent: &[LocalColumn],
    has_key: bool,
    asks: bool,
) -> Result<ColumnRules, PgError> {
    // SAFETY: as the caller says.
    let (oid, is_partition, descriptor) = unsafe {
        let form = (*relation).rd_rel;
        (
            (*relation).rd_id,
            (*form).relispartition,
            (*relation).rd_att,
        )
    };
    let (table, index) = (own_table("column_rule")?, own_table("column_rule_pkey")?);
    // SAFETY: in a transaction; the key begins with the relation.
    let found = if unsafe { has_any(table, index, &[Is::Oid(1, oid)], Sees::Committed) } {
        kept_plan::rows(RULES, &[oid.into()])?
    } else {
        Vec::new()
    };
    let mut rules = ColumnRules {
        columns: Vec::new(),
        were_set: !found.is_empty(),
    };
    for row in found {
        let [Some(number), Some(rule)] = <[_; 2]>::try_from(row).unwrap_or_default() else {
            continue;
        };
        let rule: ColumnRule = rule.parse().map_err(|_| {
            PgError::new(
                "XX000",
                format!("\"{rule}\" in braid.column_rule is not known to this version"),
            )
        })?;
        let local = number.parse::<usize>().unwrap_or(0).wrapping_sub(1);
        // SAFETY: the relation is open, and the position is one of its columns'.
        let attribute = unsafe {
            if local >= usize::try_from((*descriptor).natts).unwrap_or(0) {
                continue;
            }
            &*compat::TupleDescAttr(descriptor, local)
        };
        if attribute.attisdropped || !sent.iter().any(|column| column.local == local) {
            continue;
        }
        // SAFETY: a name ends with a zero byte.
        let column = unsafe { encoding::from_server(attribute.attname.data.as_ptr()) };
        let why = match rule {
            ColumnRule::Delta if !adds_up(attribute.atttypid) => {
                Some("Its type is not one whose values add up.")
            }
            ColumnRule::Max | ColumnRule::Min if !has_order(attribute.atttypid) => {
                Some("Its type has no order.")
            }
            _ if !has_key => Some(
                "The table has no primary key, by which its rows are found whatever is in them.",
            ),
            _ if is_partition => {
                Some("The table has become a partition: column rules are for ordinary tables.")
            }
            _ if asks => Some("A conflict function is set for the table: it gives whole rows."),
            ColumnRule::LastUpdateWins
                if settings::remember_deletions() == RememberDeletions::Off =>
            {
                Some(
                    "What sessions of this node write is not collected: braid.remember_deletions is off.",
                )
            }
            _ => None,
        };
        if let Some(why) = why {
            return Err(unsuited(name, &column, why));
        }
        rules.columns.push(RuledColumn {
            local,
            rule,
            name: column,
            type_id: attribute.atttypid,
            type_modifier: attribute.atttypmod,
            collation: attribute.attcollation,
            by_value: attribute.attbyval,
            length: attribute.attlen,
        });
    }
    if rules.has_sums() {
        let twice = kept_plan::rows(STREAMS, &[oid.into()])?;
        if twice.first().and_then(|row| row.first()?.as_deref()) == Some("true") {
            return Err(PgError::new(
                "55000",
                format!("changes of table \"{name}\" may come here by two ways, and would be added twice"),
            )
            .with_detail("The table is in several subscriptions, of which one has origin 'any', or two have the same provider.")
            .with_hint(
                "Let each change come once: origin => 'none' in a full mesh, a single subscription otherwise. Then run braid.enable_subscription.",
            ));
        }
    }
    Ok(rules)
}

/// What a comparison gave.
fn order_of(result: Datum) -> Ordering {
    // SAFETY: comparisons give an integer.
    unsafe { i32::from_datum(result, false) }
        .unwrap_or(0)
        .cmp(&0)
}

/// Values of a column.
struct Cells<'a>(&'a RuledColumn);

impl Cells<'_> {
    fn out_of_range(&self) -> PgError {
        PgError::new(
            "22003",
            format!("sum of column \"{}\" is out of range", self.0.name),
        )
        .with_detail("Changes that were in range where they were made are not when they are added up.")
        .with_hint(
            "Make the column's type larger on all nodes, or remove its rule with braid.set_column_rule, then run braid.enable_subscription.",
        )
    }

    /// Of a whole number's type.
    fn whole(&self, value: Option<Datum>) -> i128 {
        let Some(value) = value else { return 0 };
        // SAFETY: a value of the column, whose type it is.
        let number = unsafe {
            match self.0.type_id {
                pg_sys::INT2OID => i16::from_datum(value, false).map(i128::from),
                pg_sys::INT4OID => i32::from_datum(value, false).map(i128::from),
                _ => i64::from_datum(value, false).map(i128::from),
            }
        };
        number.unwrap_or(0)
    }

    fn numeric(&self, value: Option<Datum>) -> Result<Datum, PgError> {
        // SAFETY: a numeric, whose copy in one piece is in the memory of the change.
        unsafe {
            let Some(value) = value else {
                return Ok(Datum::from(pg_sys::int64_to_numeric(0)));
            };
            let plain = pg_sys::pg_detoast_datum(value.cast_mut_ptr());
            let number: pg_sys::Numeric = plain.cast();
            if pg_sys::numeric_is_nan(number) || pg_sys::numeric_is_inf(number) {
                return Err(PgError::new(
                    "22023",
                    format!("column \"{}\" can't be added up: it is NaN or infinite", self.0.name),
                )
                .with_hint(
                    "Set it to a number where it is none; to let the change pass, remove the rule with braid.set_column_rule, and run braid.enable_subscription.",
                ));
            }
            Ok(Datum::from(plain))
        }
    }

    fn sum_of_numerics(
        &self,
        base: Option<Datum>,
        new: Option<Datum>,
        old: Option<Datum>,
    ) -> Result<(Datum, bool), PgError> {
        let [base, new, old] = [self.numeric(base)?, self.numeric(new)?, self.numeric(old)?];
        let call = |function: u32, one, other| {
            // SAFETY: functions of two numerics, or of a numeric and a modifier.
            unsafe {
                pg_sys::OidFunctionCall2Coll(
                    pg_sys::Oid::from(function),
                    pg_sys::InvalidOid,
                    one,
                    other,
                )
            }
        };
        let mut sum = call(NUMERIC_ADD, base, call(NUMERIC_SUB, new, old));
        if self.0.type_modifier >= 0 {
            sum = call(NUMERIC_SCALED, sum, Datum::from(self.0.type_modifier));
        }
        let zero = self.numeric(None)?;
        let order = order_of(call(NUMERIC_CMP, sum, zero));
        Ok((sum, order == Ordering::Equal))
    }

    /// The bytes of a value, without its length where that is not fixed.
    ///
    /// # Safety
    /// A value of the column.
    unsafe fn bytes(&self, value: Datum) -> Vec<u8> {
        // SAFETY: as the caller says; of a fixed length, or a varlena.
        unsafe {
            if let Ok(length) = usize::try_from(self.0.length) {
                return std::slice::from_raw_parts(value.cast_mut_ptr::<u8>(), length).to_vec();
            }
            let packed = pg_sys::pg_detoast_datum_packed(value.cast_mut_ptr());
            pgrx::varlena_to_byte_slice(packed).to_vec()
        }
    }
}

impl Values for Cells<'_> {
    type Value = Datum;
    type Error = PgError;

    fn sum(
        &mut self,
        base: Option<Datum>,
        new: Option<Datum>,
        old: Option<Datum>,
    ) -> Result<(Datum, bool), PgError> {
        let sum = self.whole(base) + self.whole(new) - self.whole(old);
        let made = match Number::of(self.0.type_id) {
            Some(Number::Int2) => i16::try_from(sum).map(Datum::from).ok(),
            Some(Number::Int4) => i32::try_from(sum).map(Datum::from).ok(),
            Some(Number::Int8) => i64::try_from(sum).map(Datum::from).ok(),
            Some(Number::Numeric) => return self.sum_of_numerics(base, new, old),
            None => None,
        };
        made.map(|made| (made, sum == 0))
            .ok_or_else(|| self.out_of_range())
    }

    fn is_same(&mut self, one: Datum, other: Datum) -> bool {
        // SAFETY: values of the column.
        unsafe { ffi::datum_image_eq(one, other, self.0.by_value, self.0.length) }
    }

    fn is_after(&mut self, one: Datum, other: Datum) -> bool {
        let Some(function) = compare_function(self.0.type_id) else {
            return false;
        };
        // SAFETY: the type's own comparison.
        let order = unsafe { pg_sys::FunctionCall2Coll(function, self.0.collation, one, other) };
        match order_of(order) {
            Ordering::Greater => true,
            Ordering::Less => false,
            // Equal, and not the same: of 1.0 and 1.00 all nodes take one.
            Ordering::Equal if self.0.by_value => one.value() > other.value(),
            // SAFETY: values of the column.
            Ordering::Equal => unsafe { self.bytes(one) > self.bytes(other) },
        }
    }
}

/// What a change says of a column.
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
            "XX000",
            format!("a change lacks the old value of column \"{}\"", column.name),
        )),
        (old, _) => Ok(Came::Update {
            new,
            old: old.flatten(),
        }),
    }
}

impl Session {
    /// Whether rules need the rows as the writers of updates saw them.
    pub(super) fn check_before(
        &self,
        key: Key,
        remote: &RemoteRelation,
        before: Option<&RowValues>,
    ) -> Result<(), PgError> {
        let needs = |target: &Target| target.plan.column_rules.needs_before();
        let Some(rule) = self.targets.get(&key).and_then(needs) else {
            return Ok(());
        };
        if before.is_some() {
            return Ok(());
        }
        let name = remote.qualified_name();
        Err(PgError::new(
            "55000",
            format!("changes of table \"{name}\" come without the old values that column rule \"{}\" needs", rule.name()),
        )
        .with_detail("Its replica identity at the node that wrote them is not FULL.")
        .with_hint(format!(
            "Run ALTER TABLE {name} REPLICA IDENTITY FULL there. To let pass what was written before, remove the rule with braid.set_column_rule \
             and run braid.enable_subscription; set it again when that is applied."
        )))
    }

    /// What becomes of the columns that have rules. `None` where a change adds nothing to them, or there are none.
    pub(super) fn merge_columns(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
        decision: Decision,
        incoming: Incoming<'_>,
    ) -> Result<Option<Merged>, PgError> {
        if !self.target(key)?.plan.column_rules.any() {
            return Ok(None);
        }
        let wins = decision.action == Action::Apply;
        let exists = matches!(found, Found::Row(_));
        if !exists && !wins {
            return Ok(None);
        }
        if !wins
            && (is_again(decision, self.local(found), version(current))
                || self.is_of_an_earlier_row(key, current, incoming)?)
        {
            return Ok(None);
        }
        let deleted = matches!(self.local(found), Local::Deleted(_));
        let won = self.won(key, current, (found, deleted), decision, incoming)?;
        let (plan, table) = self.opened(key)?;
        let mut merged = Merged {
            values: Vec::new(),
            changed: false,
            words: String::new(),
            won,
        };
        let mut names = Vec::new();
        for column in &plan.column_rules.columns {
            // Not in the change: as it was.
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

    /// Which registers a change gives its values. `None` where the table has none.
    fn won(
        &mut self,
        key: Key,
        current: &Current,
        (found, deleted): (Found, bool),
        decision: Decision,
        incoming: Incoming<'_>,
    ) -> Result<Option<Won>, PgError> {
        let columns = self.target(key)?.plan.column_rules.columns.iter();
        let columns: Vec<RuledColumn> = columns
            .filter(|column| column.is_register())
            .cloned()
            .collect();
        if columns.is_empty() {
            return Ok(None);
        }
        if current.runs || current.unsettled {
            return Err(self.wait_for_commit("It writes columns whose newest value counts."));
        }
        let wins = decision.action == Action::Apply;
        let exists = matches!(found, Found::Row(_));
        let moved = match incoming.before {
            Some(before) if !incoming.is_insert => {
                let here = self.key_hashes(key, incoming.after);
                let left = self.key_hashes(key, before);
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
        if exists && !written.is_empty() && self.may_lose(key, found, decision)? {
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

    /// Whether something newer than a change may have written the row that was found.
    pub(super) fn may_lose(
        &mut self,
        key: Key,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        let plan = &self.target(key)?.plan;
        if !plan.column_rules.has_registers() || !matches!(found, Found::Row(_)) {
            return Ok(false);
        }
        // By other rules than the versions, an older row may have been written over a newer one.
        let grows = [Kind::InsertExists, Kind::UpdateOriginDiffers]
            .into_iter()
            .all(|kind| plan.rules.of(kind) == Resolution::LastUpdateWins);
        Ok(decision.action != Action::Apply || !grows || found == Found::Row(Stamp::Unversioned))
    }

    /// The newest version, as far as it is remembered, that has written each of these columns of the row that was found, which is locked.
    fn newest_writes(
        &mut self,
        key: Key,
        incoming: Incoming<'_>,
        numbers: &[i16],
    ) -> Result<Vec<Option<(i64, String)>>, PgError> {
        let slot = self.open(key)?.local_slot();
        // SAFETY: the slot holds the row.
        column_write::wait_for_local(unsafe { writer(slot) })?;
        let sought = incoming.before.unwrap_or(incoming.after);
        let mut known = Vec::new();
        for hash in self.hashes(key, sought) {
            column_write::each(hash, |write| known.push(write))?;
        }
        let mut newest: Vec<Option<(i64, String)>> = vec![None; numbers.len()];
        for write in known {
            let node = self.origins.node(write.origin);
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

    /// Remember which registers a change has given its values: it was just written.
    pub(super) fn remember_columns(
        &mut self,
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

    /// Put what becomes of the columns that have rules into the row that several changes of it come to, all of which are to be applied. Each
    /// adds its own difference: between two of them their node may have applied what others have added, which comes here by itself.
    pub(super) fn fold_columns<'c, 'a: 'c>(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        found: Found,
        changes: impl Iterator<Item = &'c Change<'a>>,
        values: &mut RowValues,
    ) -> Result<(), PgError> {
        if !self.target(key)?.plan.column_rules.any() {
            return Ok(());
        }
        let mut heres: Vec<(usize, Here<Datum>)> = {
            let (plan, table) = self.opened(key)?;
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
                self.check_before(key, remote, whole)?;
            }
            let columns = &self.target(key)?.plan.column_rules.columns;
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

    /// Whether a change that loses was made to a row that has been deleted since, before the one that is here came.
    fn is_of_an_earlier_row(
        &mut self,
        key: Key,
        current: &Current,
        incoming: Incoming<'_>,
    ) -> Result<bool, PgError> {
        let sought = incoming.before.unwrap_or(incoming.after);
        let found = self.recall(key, sought, None, true)?;
        Ok(matches!(self.local(found), Local::Deleted(deleted) if deleted > version(current)))
    }

    /// The values of `after`, with those of the columns that have rules.
    pub(super) fn with_merged(after: &RowValues, merged: &Merged) -> RowValues {
        let mut values = after.clone();
        for (position, value) in &merged.values {
            if let Some(place) = values.get_mut(*position) {
                *place = Some(*value);
            }
        }
        values
    }

    /// Write what a change that has lost adds to the row that was found, which keeps its version.
    pub(super) fn write_merged(
        &mut self,
        key: Key,
        found: Found,
        merged: &Merged,
    ) -> Result<Written, PgError> {
        if !merged.changed {
            return Ok(Written::Done);
        }
        let values = Self::with_merged(&vec![None; self.target(key)?.plan.width], merged);
        let table = self.open(key)?;
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
        // One without a version is older than all that has one.
        self.note_merged(key, stamp.unwrap_or((0, 0)), OpenTable::new_slot)?;
        Ok(Written::Done)
    }
}
