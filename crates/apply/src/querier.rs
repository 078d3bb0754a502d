//! The Querier: large values that a change has left as they were, and that the row here does not have either, are asked for at the
//! node that has them. Run by the appliers.
//!
//! An update's unchanged TOAST values are not in WAL. The row that is here has them when the same node wrote it last
//! (`braid_bgworker::conflict::completes`). Else the provider is asked before the change is written. Its answer may be newer than the
//! change: what made it newer comes later. It is never older: what the change left as it was, its writer had seen, and whoever asks
//! sees that too, if not the change itself yet (a commit is in WAL before other sessions see it, and where it waits for a synchronous
//! standby that may be long). Only where the key has changed it matters which of both is seen.
//!
//! Not all is known when a change comes. A value may have been put into the row at a third node, and come from there later: then it
//! loses here against what was made of it. So what loses with large values of its own, or with some left as they were, which its
//! writer may have had others of, is a reason to ask as well: the node whose version of the row is here.
//!
//! A row that nobody knows any more was deleted or given another key there since, and that change is on its way. The row is then
//! written with what is here, and remembered as one that was merged: whatever changes it next does not take its columns for granted.

use std::ffi::{CStr, CString};
use std::time::{Duration, Instant};

use braid_bgworker::conflict::{Action, Decision, completes};
use braid_bgworker::resolution::Resolution;
use braid_node::connection_string::{self, DSN};
use braid_node::settings;
use braid_node::subscription::{self, execute, rows_written};
use braid_postgres::error::PgError;
use braid_postgres::wait::Wait;
use braid_postgres::{compat, latch};
use pgrx::pg_sys;

use super::change::{Key, version};
use super::lookup::Found;
use super::merge::same_value;
use super::peer::{AsOf, Column, Question, Reply, Source};
use super::relation::RemoteRelation;
use super::row_context::RowContext;
use super::table::{OpenTable, RowValues};
use super::version::Stamp;
use super::write::Written;
use super::{Current, NO_SUBSCRIPTION, Session, rules};

/// Pause before a node is asked again that did not see its own commit yet.
const AGAIN: Duration = Duration::from_millis(10);
/// `MAXALIGN(TOAST_POINTER_SIZE)` of src/backend/access/heap/heaptoast.c, 15 to 18: shorter values stay in their row.
const SHORTEST: usize = 24;
/// `TOAST_TUPLE_TARGET` of src/include/access/heaptoast.h, 15 to 18, of 8 kB pages, less what a row takes for itself.
const ROW_TARGET: usize = 2000;

/// What was found out about a row.
#[derive(Debug)]
pub(super) enum Fetched {
    /// Values of columns, by their place in a local row.
    Columns(Vec<(usize, Option<pg_sys::Datum>)>),
    /// The row is not there any more.
    Gone,
    /// There is nobody to ask: the change was handed to `braid.ingest`.
    Nobody,
}

/// A row that is asked for, and the key that it had before, of which it has what it lacks.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'v> {
    pub(super) row: &'v RowValues,
    pub(super) before: (Key, &'v RowValues),
    /// Its key is another one than before, or it may be.
    pub(super) moved: bool,
}

impl Session {
    /// Whether what a change leaves as it was is what the row that was found has.
    pub(super) fn knows_rest(&mut self, found: Found, current: &Current) -> bool {
        completes(self.local(found), version(current))
    }

    /// The values that a change, which is about to be written, leaves as they were.
    pub(super) fn fetch_gaps(
        &mut self,
        context: RowContext<'_>,
        wanted: Wanted<'_>,
    ) -> Result<Fetched, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        if current.runs {
            return Err(self.wait_for_commit("A large value is to be asked for."));
        }
        // SAFETY: the answer's values are used while the change is applied.
        unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
        let gaps = self.gaps(key, wanted.row)?;
        let Some(source) = self.provider_source(key)? else {
            return Ok(Fetched::Nobody);
        };
        let columns = self.asked_columns(key, remote, &gaps)?;
        let old = self.key_texts(wanted.before.0, remote, wanted.before.1, &[])?;
        let new = self.key_texts(key, remote, wanted.row, &old)?;
        let deadline = Instant::now() + settings::querier_timeout();
        loop {
            let as_of = AsOf::Transaction(current.xid);
            let ask = |session: &mut Self, of: &[(String, CString)]| {
                session.put(&source, remote, &columns, of, as_of, deadline)
            };
            match ask(self, &new)? {
                (Reply::NoTable, _) | (Reply::None, true) => return Ok(Fetched::Gone),
                (Reply::Row(row), current) if current || !wanted.moved => {
                    return self.read_columns(key, &gaps, &row);
                }
                // The change is not to be seen yet: the row has its old key.
                _ => {
                    if let (Reply::Row(row), false) = ask(self, &old)? {
                        return self.read_columns(key, &gaps, &row);
                    }
                }
            }
            if !is_to_wait(deadline, &source, remote) {
                return Ok(Fetched::Gone);
            }
        }
    }

    /// Ask, and count it.
    fn put(
        &mut self,
        source: &Source,
        remote: &RemoteRelation,
        columns: &[Column],
        key: &[(String, CString)],
        as_of: AsOf,
        deadline: Instant,
    ) -> Result<(Reply, bool), PgError> {
        let question = Question {
            namespace: &remote.namespace,
            name: &remote.name,
            columns,
            key,
            as_of,
        };
        self.attempt().counts.questions += 1;
        let own = source.subscription == self.identity.subscription_id;
        self.peers
            .ask(source, &question, deadline)
            .map_err(|error| failed(error, source, own, remote))
    }

    /// Places in the plan's columns of those that are not available in `values`.
    fn gaps(&mut self, key: Key, values: &RowValues) -> Result<Vec<usize>, PgError> {
        let columns = self.target(key)?.plan.columns.iter().enumerate();
        Ok(columns
            .filter(|(_, column)| values.get(column.local).is_some_and(Option::is_none))
            .map(|(place, _)| place)
            .collect())
    }

    fn asked_columns(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        places: &[usize],
    ) -> Result<Vec<Column>, PgError> {
        let plan = &self.target(key)?.plan;
        Ok(places
            .iter()
            .filter_map(|place| {
                let column = plan.columns.get(*place)?;
                Some(Column {
                    name: remote.columns.get(column.remote)?.name.clone(),
                    bytea: column.decoder.is_bytea(),
                })
            })
            .collect())
    }

    /// The key of a row as names and texts; what it lacks from those of another.
    fn key_texts(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        values: &RowValues,
        other: &[(String, CString)],
    ) -> Result<Vec<(String, CString)>, PgError> {
        let target = self.target(key)?;
        let (Some(index), Some(table)) = (&target.plan.key, &target.table) else {
            return Err(PgError::new("XX000", "row without a key"));
        };
        // SAFETY: the table is open; the values are of its columns' types.
        unsafe {
            let descriptor = (*table.relation()).rd_att;
            index
                .columns
                .iter()
                .map(|column| {
                    let place = usize::try_from(column.attribute - 1).unwrap_or(usize::MAX);
                    let value = values.get(place).copied().flatten().flatten();
                    let name = remote.columns.get(column.remote).map(|column| &column.name);
                    let known = other.iter().find(|(known, _)| Some(known) == name);
                    let (value, name) = match (value, name, known) {
                        (Some(value), Some(name), _) => (value, name),
                        (None, _, Some(known)) => return Ok(known.clone()),
                        _ => {
                            return Err(PgError::new(
                                "08P01",
                                "change without a key from the provider",
                            ));
                        }
                    };
                    let attribute = compat::TupleDescAttr(descriptor, place);
                    let (mut output, mut is_varlena) = (pg_sys::InvalidOid, false);
                    pg_sys::getTypeOutputInfo(
                        (*attribute).atttypid,
                        &raw mut output,
                        &raw mut is_varlena,
                    );
                    let text = pg_sys::OidOutputFunctionCall(output, value);
                    Ok((name.clone(), CStr::from_ptr(text).to_owned()))
                })
                .collect()
        }
    }

    /// What came, as values of a local row.
    fn read_columns(
        &mut self,
        key: Key,
        places: &[usize],
        row: &[Option<Vec<u8>>],
    ) -> Result<Fetched, PgError> {
        self.attempt().counts.fetched += places.len() as u64;
        let columns = &mut self.target(key)?.plan.columns;
        let mut values = Vec::with_capacity(places.len());
        for (place, bytes) in places.iter().zip(row) {
            let Some(column) = columns.get_mut(*place) else {
                continue;
            };
            let value = bytes
                .as_deref()
                .map(|bytes| column.decoder.decode_answer(bytes))
                .transpose()?;
            values.push((column.local, value));
        }
        Ok(Fetched::Columns(values))
    }

    /// The provider of the stream; `None` when there is none.
    fn provider_source(&mut self, key: Key) -> Result<Option<Source>, PgError> {
        let id = self.identity.subscription_id;
        if id == NO_SUBSCRIPTION {
            return Ok(None);
        }
        if self.own_source.is_none() {
            let found = self.with_own_rights(key, || subscription::load(id))?;
            self.own_source = found.map(|subscription| Source {
                subscription: id,
                name: subscription.name,
                node: subscription.provider,
                dsn: subscription.dsn,
            });
        }
        match &self.own_source {
            Some(source) => Ok(Some(source.clone())),
            None => Err(PgError::new("42704", "subscription is gone")),
        }
    }

    /// The provider of the subscription that brought what has this origin, if that is enabled.
    fn source_of(
        &mut self,
        key: Key,
        origin: pg_sys::RepOriginId,
    ) -> Result<Option<Source>, PgError> {
        // As a statement that writes: it sees what is committed now, also an origin that is younger than this transaction.
        let found = self.with_own_rights(key, || {
            rows_written(
                &format!("select s.subscription_id::text, s.subscription_name::text, s.provider_name::text, {DSN} from braid.origin o \
                 join braid.subscription s on s.subscription_id = o.subscription_id where o.origin_id = $1::oid and s.enabled"),
                &[i64::from(origin).into()],
            )
        })?;
        let Some(row) = found.into_iter().next() else {
            return Ok(None);
        };
        let [id, name, node, dsn] = <[_; 4]>::try_from(row).unwrap_or_default();
        let [id, name, node] = [id, name, node].map(Option::unwrap_or_default);
        let dsn = dsn.ok_or_else(|| connection_string::missing(&name))?;
        Ok(id.parse().ok().map(|subscription| Source {
            subscription,
            name,
            node,
            dsn,
        }))
    }

    /// Do `work` as this process, not as the owner of the table.
    fn with_own_rights<T>(
        &mut self,
        key: Key,
        work: impl FnOnce() -> Result<T, PgError>,
    ) -> Result<T, PgError> {
        self.work_as_self();
        let done = work();
        self.work_as_owner_of(key);
        // SAFETY: SPI leaves the context that it was called in as the current one; to be sure.
        unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
        done
    }

    /// The row in the new slot was just written with columns that nobody vouches for: it has this version, and whatever changes it next
    /// does not take them for granted.
    pub(super) fn mark_unverified(
        &mut self,
        key: Key,
        version: (i64, pg_sys::RepOriginId),
    ) -> Result<(), PgError> {
        self.note_merged(key, version, OpenTable::new_slot)?;
        if self.target(key)?.plan.rules.may_have_merged_rows() {
            return Ok(());
        }
        let oid = i64::from(key.1);
        self.with_own_rights(key, || {
            execute(
                "insert into braid.conflict_rule (relation, has_asked) values ($1::oid::regclass, true) \
                 on conflict (relation, kind) do update set has_asked = true",
                &[oid.into()],
            )?;
            rules::announce()
        })
    }

    /// A change has lost against the row that was found, which is locked. It brings, for the first time, large values, or leaves some
    /// alone that only its own node has: they may be those that the row's writer had and left as they were. See that the row has what
    /// it has there. `sought` has its key.
    pub(super) fn settle_late(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        (after, sought): (&RowValues, &RowValues),
    ) -> Result<(), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        // Where whole old rows come and complete each row that is written, nobody has left anything out; and what is merged is not the other node's alone.
        if remote.identity == braid_gir::ReplicaIdentity::Full
            && self.target(key)?.plan.column_rules.any()
        {
            return Ok(());
        }
        let (timestamp, origin) = match found {
            Found::Row(Stamp::Known(timestamp, origin)) => (timestamp, origin),
            // One of which other columns were asked for; not what a function has made.
            Found::Row(Stamp::Merged(timestamp, origin))
                if !self.target(key)?.plan.rules.asks() =>
            {
                (timestamp, origin)
            }
            _ => return Ok(()),
        };
        // What was written here is as it was written here.
        if origin == 0 || decision.action != Action::Keep || self.knows_rest(found, current) {
            return Ok(());
        }
        let Some(kind) = decision.conflict else {
            return Ok(());
        };
        if self.target(key)?.plan.rules.of(kind) != Resolution::LastUpdateWins {
            return Ok(());
        }
        let places = self.late_columns(key, after)?;
        if places.is_empty() || self.identity.subscription_id == NO_SUBSCRIPTION {
            return Ok(());
        }
        let Some(source) = self.source_of(key, origin)? else {
            return Ok(());
        };
        let columns = self.asked_columns(key, remote, &places)?;
        let texts = self.key_texts(key, remote, sought, &[])?;
        let deadline = Instant::now() + settings::querier_timeout();
        let as_of = AsOf::Version(timestamp);
        let row = loop {
            match self.put(&source, remote, &columns, &texts, as_of, deadline)? {
                (Reply::Row(row), true) => break Some(row),
                (Reply::Row(_), false) if is_to_wait(deadline, &source, remote) => {}
                _ => break None,
            }
        };
        let mut values = vec![None; after.len()];
        if let Some(row) = row {
            let Fetched::Columns(read) = self.read_columns(key, &places, &row)? else {
                return Ok(());
            };
            let slot = self.open(key)?.local_slot();
            let mut differs = false;
            for (place, value) in read {
                // SAFETY: the slot holds the row; the value is of the column.
                differs |= unsafe { !same_value(slot, place, value) };
                if let Some(to) = values.get_mut(place) {
                    *to = Some(value);
                }
            }
            if !differs {
                return Ok(());
            }
        }
        let table = self.open(key)?;
        table.prepare_update(&values);
        if table.update()? == Written::Changed {
            return Err(PgError::new("40001", "a locked row has changed"));
        }
        self.note_version(key, current, OpenTable::new_slot);
        self.mark_unverified(key, (timestamp, origin))
    }

    /// Places in the plan's columns of large values that another node may have left as they were: those that a row brings, if they are
    /// not what is here, and those that it leaves as they were at its own node.
    fn late_columns(&mut self, key: Key, after: &RowValues) -> Result<Vec<usize>, PgError> {
        let target = self.target(key)?;
        let Some(table) = &target.table else {
            return Ok(Vec::new());
        };
        let slot = table.local_slot();
        let mut places = Vec::new();
        let mut size = 0;
        // SAFETY: the table is open, the values are of its columns, and the slot holds a row of it.
        unsafe {
            let descriptor = (*table.relation()).rd_att;
            for (place, column) in target.plan.columns.iter().enumerate() {
                let attribute = compat::TupleDescAttr(descriptor, column.local);
                let is_large = |size: usize| {
                    (*attribute).attlen == -1
                        && (*attribute).attstorage.cast_unsigned() != pg_sys::TYPSTORAGE_PLAIN
                        && size > SHORTEST
                };
                match after.get(column.local).copied().flatten() {
                    Some(Some(value)) => {
                        let bytes = if (*attribute).attlen == -1 {
                            pg_sys::toast_raw_datum_size(value)
                        } else {
                            usize::try_from((*attribute).attlen).unwrap_or(8)
                        };
                        size += bytes;
                        if is_large(bytes) && !same_value(slot, column.local, Some(value)) {
                            places.push(place);
                        }
                    }
                    Some(None) => {}
                    None => {
                        size += ROW_TARGET;
                        places.push(place);
                    }
                }
            }
        }
        if size < ROW_TARGET {
            places.clear();
        }
        Ok(places)
    }

    /// Close connections that were not used for a while.
    pub fn rest(&mut self) {
        self.peers.close_unused();
    }
}

/// `values` with what was found out put into its gaps.
pub(super) fn completed(
    values: &RowValues,
    columns: &[(usize, Option<pg_sys::Datum>)],
) -> RowValues {
    let mut complete = values.clone();
    for (place, value) in columns {
        if let Some(gap) = complete.get_mut(*place).filter(|gap| gap.is_none()) {
            *gap = Some(*value);
        }
    }
    complete
}

/// Wait a moment for a node to show what it has sent. False when it has had all its time: a commit there may wait for a standby, and
/// that, in the end, for this very transaction.
fn is_to_wait(deadline: Instant, source: &Source, remote: &RemoteRelation) -> bool {
    if Instant::now() < deadline {
        latch::wait_as(Wait::Querier, AGAIN);
        return true;
    }
    pgrx::log!(
        "node \"{}\" does not show what it has sent of table \"{}\": large values of a row are left as they are here",
        source.node,
        remote.qualified_name()
    );
    false
}

/// What went wrong with a question, for whoever reads it. Of another node than the provider it is nothing that a new connection to the
/// provider would mend: the transaction is tried again.
fn failed(error: PgError, source: &Source, own: bool, remote: &RemoteRelation) -> PgError {
    let message = format!(
        "could not ask node \"{}\" for large values of table \"{}\": {}",
        source.node,
        remote.qualified_name(),
        error.message
    );
    let passes = error.sqlstate.starts_with("08")
        || error.sqlstate.starts_with("57")
        || error.sqlstate.starts_with("53");
    let hint = match error.sqlstate.as_str() {
        "42501" => {
            "At the provider, grant the connecting role USAGE on the schema, SELECT on the table, and BYPASSRLS if the table has \
             row-level security; then run braid.enable_subscription."
                .to_owned()
        }
        _ if passes && !own => format!(
            "It is tried again. If the node does not come back, run braid.disable_subscription for \"{}\".",
            source.name
        ),
        _ => error.hint.unwrap_or_default(),
    };
    let sqlstate = if passes && !own {
        "40001"
    } else {
        &error.sqlstate
    };
    let made = PgError::new(sqlstate, message).with_hint(hint);
    match error.detail {
        Some(detail) => made.with_detail(detail),
        None => made,
    }
}
