//! The Querier: large values that a change has left as they were, and that the row here does not
//! have either, are asked for at the node that has them. Run by the appliers.
//!
//! An update's unchanged TOAST values are not in WAL. The row that is here has them when the same
//! node wrote it last (`braid_bgworker::conflict::completes`). Else the provider is asked before
//! the change is written. Its answer may be newer than the change: what made it newer comes later.
//! If it is, it may be of another row that has the key by then, so the row is marked as below.
//! It is never older: what the change left as it was, its writer had seen, and whoever asks sees
//! that too, if not the change itself yet (a commit is in WAL before other sessions see it, and
//! where it waits for a synchronous standby that may be long). Only where the key has changed it
//! matters which of both is seen.
//!
//! Not all is known when a change comes. A value may have been put into the row at a third node,
//! and come from there later: then it loses here against what was made of it. So what loses with
//! large values of its own, or with some left as they were, which its writer may have had others
//! of, is a reason to ask as well: the node whose version of the row is here.
//!
//! A table may be locked at the asked node, by a transaction whose commit waits until this node has
//! confirmed it (`synchronous_standby_names` there). It may be the very transaction that is
//! applied. No question is answered before it is confirmed. So a question ends with 55P03 after a
//! while, the error says whether commits wait ([`PeerLock`](braid_postgres::error::PeerLock)), and
//! the applier parks the transaction if they do: it is durable then, and confirmed, and is applied
//! later.
//!
//! A row that nobody knows any more was deleted or given another key there since, and that change
//! is on its way. The row is then written with what is here, and remembered as one that was merged:
//! whatever changes it next does not take its columns for granted.

mod entered;

use std::ffi::CString;
use std::time::{Duration, Instant};

use braid_bgworker::conflict::{Action, Decision, completes};
use braid_bgworker::resolution::Resolution;
use braid_bgworker::sqlstate::SqlState;
use braid_node::connection_string::{self, DSN};
use braid_node::settings;
use braid_node::subscription::{self, execute, rows_written};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::latch;
use braid_postgres::memory::Scratch;
use braid_postgres::wait::Wait;
use pgrx::pg_sys;

use super::attempt::{Attempt, RetryHints};
use super::change::version;
use super::lookup::Found;
use super::peer::{AsOf, Column, Form, Peers, Question, Reply, Source};
use super::relation::IdentityColumn;
use super::relation::RemoteRelation;
use super::rights::Rights;
use super::row_context::RowContext;
use super::table::{OpenTable, RowValues};
use super::target::{Key, Tables};
use super::version::{OriginNames, Stamp};
use super::write::Written;
use super::{Current, Identity, NO_SUBSCRIPTION, Session, rules};

pub(super) use entered::{Answers, Entered};
use entered::{WRITTEN_AT, is_written_at};

/// Pause before a node is asked again that did not see its own commit yet.
const AGAIN: Duration = Duration::from_millis(10);

/// `MAXALIGN(TOAST_POINTER_SIZE)` of src/backend/access/heap/heaptoast.c, 15 to 18: shorter values
/// stay in their row.
const SHORTEST: usize = 24;

/// `TOAST_TUPLE_TARGET` of src/include/access/heaptoast.h, 15 to 18, of 8 kB pages, less what a row
/// takes for itself.
const ROW_TARGET: usize = 2000;

/// Values of columns, by their place in a local row.
pub(super) type ColumnValues = Vec<(usize, Option<pg_sys::Datum>)>;

/// What was found out about a row.
#[derive(Debug)]
pub(super) enum Fetched {
    /// Values of its columns.
    Columns {
        values: ColumnValues,
        /// No later transaction has written the row: its key may be another row's by then.
        is_exact: bool,
    },
    /// The row is not there any more.
    Gone,
    /// There is nobody to ask: the change was handed to `braid.ingest`.
    Nobody,
}

/// Columns that the provider is asked for.
struct Sought {
    source: Source,
    /// Places of the columns that the row lacks, in the plan.
    gaps: Vec<usize>,
    /// These columns, and [`WRITTEN_AT`].
    columns: Vec<Column>,
}

/// A row that is asked for, and the key that it had before, of which it has what it lacks.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'v> {
    pub(super) row: &'v RowValues,
    pub(super) before: (Key, &'v RowValues),
    /// Its key is another one than before, or it may be.
    pub(super) moved: bool,
}

impl Tables {
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
                    form: if column.decoder.is_bytea() {
                        Form::Bytes
                    } else {
                        Form::Text
                    },
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
            return Err(PgError::new(SqlState::InternalError, "row without a key"));
        };
        let text_of = |column: &IdentityColumn| {
            let place = usize::try_from(column.attribute - 1).unwrap_or(usize::MAX);
            let value = table.cell(values, place).flatten();
            let name = remote.columns.get(column.remote).map(|column| &column.name);
            let known = other.iter().find(|(known, _)| Some(known) == name);
            match (value, name, known) {
                (Some(value), Some(name), _) => Ok((name.clone(), value.output())),
                (None, _, Some(known)) => Ok(known.clone()),
                _ => Err(PgError::new(
                    SqlState::ProtocolViolation,
                    "change without a key from the provider",
                )),
            }
        };
        index.identity.iter().map(text_of).collect()
    }

    /// Places in the plan's columns of large values that another node may have left as they were:
    /// those that a row brings, if they are not what is here, and those that it leaves as they were
    /// at its own node.
    fn late_columns(&mut self, key: Key, after: &RowValues) -> Result<Vec<usize>, PgError> {
        let target = self.target(key)?;
        let Some(table) = &target.table else {
            return Ok(Vec::new());
        };
        let slot = table.local_slot();
        let mut places = Vec::new();
        let mut size = 0;
        let shape = table.relation().descriptor();
        for (place, column) in target.plan.columns.iter().enumerate() {
            let Some(attribute) = shape.get(column.local) else {
                continue;
            };
            match table.cell(after, column.local) {
                Some(Some(value)) => {
                    let bytes = value.size();
                    let is_large =
                        attribute.is_varlena() && attribute.is_toastable() && bytes > SHORTEST;
                    let is_here = !is_large || slot.has(column.local, Some(value));
                    size += bytes;
                    if !is_here {
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
        if size < ROW_TARGET {
            places.clear();
        }
        Ok(places)
    }
}

impl OriginNames {
    /// Whether what a change leaves as it was is what the row that was found has.
    pub(super) fn knows_rest(&mut self, found: Found, current: &Current) -> bool {
        completes(self.local(found), version(current))
    }
}

/// Questions to other nodes about rows: the connections, and the provider as one of these nodes.
#[derive(Debug, Default)]
pub(super) struct Querier {
    peers: Peers,
    provider: Option<Source>,
}

/// Columns of a row that are asked for: at which node, as of when, and until when.
struct Inquiry<'a> {
    source: &'a Source,
    is_provider: bool,
    remote: &'a RemoteRelation,
    columns: &'a [Column],
    as_of: AsOf,
    deadline: Instant,
}

impl Inquiry<'_> {
    /// Wait a moment for the node to show what it has sent. False when it has had all its time: a
    /// commit there may wait for a standby, and that, in the end, for this very transaction.
    fn may_wait(&self) -> bool {
        if Instant::now() < self.deadline {
            latch::wait_as(Wait::Querier, AGAIN);
            return true;
        }
        pgrx::log!(
            "node \"{}\" does not show what it has sent of table \"{}\": large values of a row are left as they are here",
            self.source.node,
            self.remote.qualified_name()
        );
        false
    }
}

impl Querier {
    /// Ask for the row with this key.
    fn ask(
        &mut self,
        inquiry: &Inquiry<'_>,
        key: &[(String, CString)],
    ) -> Result<(Reply, bool), PgError> {
        let question = Question {
            namespace: &inquiry.remote.namespace,
            name: &inquiry.remote.name,
            columns: inquiry.columns,
            key,
            as_of: inquiry.as_of,
        };
        self.peers
            .ask(inquiry.source, &question, inquiry.deadline)
            .map_err(|error| failed(error, inquiry.source, inquiry.is_provider, inquiry.remote))
    }

    /// The provider of a subscription; `None` when there is none. With the process's own rights.
    fn provider(&mut self, subscription_id: u32) -> Result<Option<&Source>, PgError> {
        if subscription_id == NO_SUBSCRIPTION {
            return Ok(None);
        }
        if self.provider.is_none() {
            let found = subscription::load(subscription_id)?;
            self.provider = found.map(|subscription| Source {
                subscription: subscription_id,
                name: subscription.name,
                node: subscription.provider,
                dsn: subscription.dsn,
            });
        }
        match &self.provider {
            Some(source) => Ok(Some(source)),
            None => Err(PgError::new(
                SqlState::UndefinedObject,
                "subscription is gone",
            )),
        }
    }
}

/// The provider of the subscription that brought what has this origin, if that is enabled. With the
/// process's own rights.
fn source_of(origin: ReplOriginId) -> Result<Option<Source>, PgError> {
    // As a statement that writes: it sees what is committed now, also an origin that is younger
    // than this transaction.
    let found = rows_written(
        &format!(
            "select s.subscription_id::text, s.subscription_name::text, s.provider_name::text, {DSN} from braid.origin o \
             join braid.subscription s on s.subscription_id = o.subscription_id where o.origin_id = $1::oid and s.enabled"
        ),
        &[i64::from(origin).into()],
    )?;
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

/// Questions about rows of the transaction in hand: what they need of a session.
pub(super) struct Questions<'s> {
    querier: &'s mut Querier,
    tables: &'s mut Tables,
    attempt: &'s mut Attempt,
    hints: &'s mut RetryHints,
    identity: &'s Identity,
    change_context: &'s Scratch,
}

impl Questions<'_> {
    /// Whose rights a question is put with, and who puts it.
    fn rights(&mut self) -> (Rights<'_>, &mut Querier) {
        let rights = Rights {
            user: &mut self.attempt.user,
            tables: self.tables,
            run_as: self.identity.run_as,
            change_context: self.change_context,
        };
        (rights, self.querier)
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
        let Some(sought) = self.sought_of_provider(context, wanted.row)? else {
            return Ok(Fetched::Nobody);
        };
        let Sought {
            source,
            gaps,
            columns,
        } = sought;
        let old = self
            .tables
            .key_texts(wanted.before.0, remote, wanted.before.1, &[])?;
        let new = self.tables.key_texts(key, remote, wanted.row, &old)?;
        let inquiry = self.inquiry(&source, remote, &columns, AsOf::Transaction(current.xid));
        loop {
            match self.put(&inquiry, &new)? {
                (Reply::NoTable, _) | (Reply::None, true) => return Ok(Fetched::Gone),
                (Reply::Row(row), is_current) if is_current || !wanted.moved => {
                    let is_exact = !is_current || is_written_at(&row, current.timestamp);
                    let values = self.read_columns(key, &gaps, &row)?;
                    return Ok(Fetched::Columns { values, is_exact });
                }
                // The change is not to be seen yet: the row has its old key.
                _ => {
                    if let (Reply::Row(row), false) = self.put(&inquiry, &old)? {
                        let values = self.read_columns(key, &gaps, &row)?;
                        let is_exact = true;
                        return Ok(Fetched::Columns { values, is_exact });
                    }
                }
            }
            if !inquiry.may_wait() {
                return Ok(Fetched::Gone);
            }
        }
    }

    /// Finds what the provider is to be asked for: the columns that a row lacks. `None` if there is
    /// no provider. The answer is to be used while the current change is applied.
    ///
    /// # Errors
    /// 40001 if the transaction still runs at the provider.
    fn sought_of_provider(
        &mut self,
        context: RowContext<'_>,
        row: &RowValues,
    ) -> Result<Option<Sought>, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        if current.runs {
            return Err(self
                .hints
                .wait_for_commit("A large value is to be asked for."));
        }
        self.change_context.context().enter();
        let Some(source) = self.provider(key)? else {
            return Ok(None);
        };
        let gaps = self.tables.gaps(key, row)?;
        let mut columns = self.tables.asked_columns(key, remote, &gaps)?;
        columns.push(WRITTEN_AT);
        Ok(Some(Sought {
            source,
            gaps,
            columns,
        }))
    }

    fn inquiry<'a>(
        &self,
        source: &'a Source,
        remote: &'a RemoteRelation,
        columns: &'a [Column],
        as_of: AsOf,
    ) -> Inquiry<'a> {
        Inquiry {
            source,
            is_provider: source.subscription == self.identity.subscription_id,
            remote,
            columns,
            as_of,
            deadline: Instant::now() + settings::querier_timeout(),
        }
    }

    /// Ask, and count it.
    fn put(
        &mut self,
        inquiry: &Inquiry<'_>,
        key: &[(String, CString)],
    ) -> Result<(Reply, bool), PgError> {
        self.attempt.counts.questions += 1;
        self.querier.ask(inquiry, key)
    }

    /// What came, as values of a local row.
    fn read_columns(
        &mut self,
        key: Key,
        places: &[usize],
        row: &[Option<Vec<u8>>],
    ) -> Result<ColumnValues, PgError> {
        self.attempt.counts.fetched += places.len() as u64;
        let columns = &mut self.tables.target(key)?.plan.columns;
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
        Ok(values)
    }

    /// The provider of the stream; `None` when there is none.
    fn provider(&mut self, key: Key) -> Result<Option<Source>, PgError> {
        let id = self.identity.subscription_id;
        let (mut rights, querier) = self.rights();
        rights.with_own(key, || Ok(querier.provider(id)?.cloned()))
    }

    /// Values that a row, which is in the local slot and has this version, gets of the large values
    /// that its writer had: `None` where that is what it has, or nobody can be asked. The change
    /// that has lost brings `after`; `sought` has the key of the row.
    fn late_values(
        &mut self,
        context: RowContext<'_>,
        (timestamp, origin): (i64, ReplOriginId),
        (after, sought): (&RowValues, &RowValues),
    ) -> Result<Option<RowValues>, PgError> {
        let RowContext { key, remote, .. } = context;
        let places = self.tables.late_columns(key, after)?;
        if places.is_empty() || self.identity.subscription_id == NO_SUBSCRIPTION {
            return Ok(None);
        }
        let Some(source) = self.rights().0.with_own(key, || source_of(origin))? else {
            return Ok(None);
        };
        let columns = self.tables.asked_columns(key, remote, &places)?;
        let texts = self.tables.key_texts(key, remote, sought, &[])?;
        let inquiry = self.inquiry(&source, remote, &columns, AsOf::Version(timestamp));
        let row = loop {
            match self.put(&inquiry, &texts)? {
                (Reply::Row(row), true) => break Some(row),
                (Reply::Row(_), false) if inquiry.may_wait() => {}
                _ => break None,
            }
        };
        let mut values = vec![None; after.len()];
        let Some(row) = row else {
            return Ok(Some(values));
        };
        let read = self.read_columns(key, &places, &row)?;
        for (place, value) in &read {
            if let Some(to) = values.get_mut(*place) {
                *to = Some(*value);
            }
        }
        let table = self.tables.open(key)?;
        let slot = table.local_slot();
        let is_here = |place: usize| slot.has(place, table.cell(&values, place).flatten());
        let is_known = read.iter().all(|(place, _)| is_here(*place));
        Ok((!is_known).then_some(values))
    }
}

impl Tables {
    /// The version of the row that was found, if its writer is to be asked for large values: a
    /// change has lost against it by the versions alone.
    fn asked_version(
        &self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<Option<(i64, ReplOriginId)>, PgError> {
        let plan = self.plan(context.key)?;
        // Where whole old rows come and complete each row that is written, nobody has left anything
        // out; and what is merged is not the other node's alone.
        if context.remote.identity == braid_gir::ReplicaIdentity::Full && plan.column_rules.any() {
            return Ok(None);
        }
        let version = match found {
            Found::Row(Stamp::Known(timestamp, origin)) => (timestamp, origin),
            // One of which other columns were asked for; not what a function has made.
            Found::Row(Stamp::Merged(timestamp, origin)) if !plan.rules.asks() => {
                (timestamp, origin)
            }
            _ => return Ok(None),
        };
        let is_newest = |kind| plan.rules.of(kind) == Resolution::LastUpdateWins;
        // A row that was written here is as it was written here.
        let asks = version.1 != 0
            && decision.action == Action::Keep
            && decision.conflict.is_some_and(is_newest);
        Ok(asks.then_some(version))
    }
}

impl Session {
    /// Questions about rows of the transaction in hand.
    pub(super) fn questions(&mut self) -> Questions<'_> {
        Questions {
            querier: &mut self.querier,
            tables: &mut self.tables,
            attempt: self.attempt.get_or_insert_default(),
            hints: &mut self.hints,
            identity: &self.identity,
            change_context: &self.change_context,
        }
    }

    /// The row in the new slot was just written with columns that nobody vouches for: it has this
    /// version, and whatever changes it next does not take them for granted.
    pub(super) fn mark_unverified(
        &mut self,
        key: Key,
        version: (i64, ReplOriginId),
    ) -> Result<(), PgError> {
        self.note_merged(key, version, OpenTable::new_slot)?;
        if self.tables.target(key)?.plan.rules.may_have_merged_rows() {
            return Ok(());
        }
        let oid = i64::from(key.1);
        self.rights().with_own(key, || {
            execute(
                "insert into braid.conflict_rule (relation, has_asked) values ($1::oid::regclass, true) \
                 on conflict (relation, kind) do update set has_asked = true",
                &[oid.into()],
            )?;
            rules::announce()
        })
    }

    /// A change has lost against the row that was found, which is locked. It brings, for the first
    /// time, large values, or leaves some alone that only its own node has: they may be those that
    /// the row's writer had and left as they were. See that the row has what it has there. `sought`
    /// has its key.
    pub(super) fn settle_late(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        (after, sought): (&RowValues, &RowValues),
    ) -> Result<(), PgError> {
        let RowContext { key, current, .. } = context;
        let Some(version) = self.tables.asked_version(context, found, decision)? else {
            return Ok(());
        };
        if self.origins.knows_rest(found, current) {
            return Ok(());
        }
        let Some(values) = self
            .questions()
            .late_values(context, version, (after, sought))?
        else {
            return Ok(());
        };
        let table = self.tables.open(key)?;
        table.prepare_update(&values);
        if table.update()? == Written::Changed {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "a locked row has changed",
            ));
        }
        self.note_version(key, current, OpenTable::new_slot);
        self.mark_unverified(key, version)
    }

    /// Close connections that were not used for a while.
    pub fn rest(&mut self) {
        self.querier.peers.close_unused();
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

/// What went wrong with a question, for whoever reads it. Of another node than the provider it is
/// nothing that a new connection to the provider would mend: the transaction is tried again.
fn failed(error: PgError, source: &Source, own: bool, remote: &RemoteRelation) -> PgError {
    let message = format!(
        "could not ask node \"{}\" for large values of table \"{}\": {}",
        source.node,
        remote.qualified_name(),
        error.message
    );
    let passes =
        error.sqlstate.is_of("08") || error.sqlstate.is_of("57") || error.sqlstate.is_of("53");
    let hint = match error.sqlstate {
        SqlState::InsufficientPrivilege => {
            "At the provider, grant the connecting role USAGE on the schema, SELECT on the table, and BYPASSRLS if the table has \
             row-level security; then run braid.enable_subscription."
                .to_owned()
        }
        _ if passes && !own => format!(
            "It is tried again. If the node does not come back, run braid.disable_subscription for \"{}\".",
            source.name
        ),
        SqlState::LockNotAvailable => format!(
            "The transaction is tried again. If this does not pass, look at node \"{}\" for sessions that hold a lock on the table for long.",
            source.node
        ),
        _ => error.hint.unwrap_or_default(),
    };
    let sqlstate = if passes && !own {
        SqlState::SerializationFailure
    } else {
        error.sqlstate
    };
    let mut made = PgError::new(sqlstate, message).with_hint(hint);
    made.peer_lock = error.peer_lock;
    match error.detail {
        Some(detail) => made.with_detail(detail),
        None => made,
    }
}
