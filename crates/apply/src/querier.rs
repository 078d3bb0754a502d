//! Fetches large values that a change left unchanged, and that the local row does not have, from
//! the node that has them. Run by the appliers.
//!
//! An update's unchanged TOAST values are not in WAL. If the same node wrote the local row last,
//! that row has them (`braid_bgworker::conflict::completes`). Otherwise the provider is asked
//! before the change is written. Its answer may be newer than the change: the change that made it
//! newer follows in the stream. A newer answer may also be of another row that has the key by then,
//! so the row gets a merge marker.
//!
//! The answer is never older than the change. Its writer had seen the unchanged value, and a
//! question sees it too, even if it does not see the change itself yet. (A commit is in WAL before
//! other sessions see it; if it waits for a synchronous standby, that may be long.) It only matters
//! which of the two is seen if the key has changed.
//!
//! Another case: C writes a large value. B updates the row and leaves the value alone. The change
//! of B arrives here first, then that of C, which loses: its value is lost here. So B, whose
//! version the local row has, is also asked when a losing change brings large values, or leaves
//! some unchanged that its own node may have had.
//!
//! A table may be locked at the asked node by a transaction whose commit waits until this node has
//! confirmed it (`synchronous_standby_names`). It may be the very transaction that is applied, and
//! the question would wait for its confirmation. So a question ends with 55P03 after a while. The
//! error says whether commits wait for this node ([`PeerLock`](braid_postgres::error::PeerLock)).
//! If they do, the applier parks the transaction: it is durable then, is confirmed, and is applied
//! later.
//!
//! If no node has the row any more, it was deleted or got another key since, and that change is on
//! its way. The row is then written with the local values and a merge marker, so the next change of
//! it counts as a conflict.

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

/// Pause before asking a node again that did not see its own commit yet.
const AGAIN: Duration = Duration::from_millis(10);

/// `MAXALIGN(TOAST_POINTER_SIZE)` of src/backend/access/heap/heaptoast.c, 15 to 18: shorter values
/// stay in their row.
const SHORTEST: usize = 24;

/// `TOAST_TUPLE_TARGET` of src/include/access/heaptoast.h, 15 to 18, for 8 kB pages, less the row's
/// header.
const ROW_TARGET: usize = 2000;

/// Values of columns, by their positions in a local row.
pub(super) type ColumnValues = Vec<(usize, Option<pg_sys::Datum>)>;

/// Answer about a row.
#[derive(Debug)]
pub(super) enum Fetched {
    /// The values of its columns.
    Columns {
        values: ColumnValues,
        /// Whether no later transaction has written the row: otherwise another row may have its key
        /// by now.
        is_exact: bool,
    },
    /// The row is gone.
    Gone,
    /// There is no node to ask: the change was passed to `braid.ingest`.
    Nobody,
}

/// Columns that the provider is asked for.
struct Sought {
    source: Source,
    /// Positions in the plan of the columns that the row lacks.
    gaps: Vec<usize>,
    /// The columns of `gaps`, and [`WRITTEN_AT`].
    columns: Vec<Column>,
}

/// A row that another node is asked for, and the key that it had before. Parts of the key that
/// `row` lacks are taken from `before`.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'v> {
    pub(super) row: &'v RowValues,
    pub(super) before: (Key, &'v RowValues),
    /// Whether its key has changed, or may have.
    pub(super) moved: bool,
}

impl Tables {
    /// Returns the positions in the plan of columns whose values are missing in `values`.
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

    /// Returns the names and texts of a row's key; missing ones are taken from another row's.
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

    /// Returns the positions in the plan of large values that another node's update may have left
    /// unchanged: those that a row brings and that differ from the local ones, and those that its
    /// own node left unchanged.
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
    /// Whether the values that a change left unchanged are those of the local row that was found.
    pub(super) fn knows_rest(&mut self, found: Found, current: &Current) -> bool {
        completes(self.local(found), version(current))
    }
}

/// Connections to other nodes for questions about rows, and the provider as one of these nodes.
#[derive(Debug, Default)]
pub(super) struct Querier {
    peers: Peers,
    provider: Option<Source>,
}

/// A question for columns of a row: the node, the state that it must show, and the deadline.
struct Inquiry<'a> {
    source: &'a Source,
    is_provider: bool,
    remote: &'a RemoteRelation,
    columns: &'a [Column],
    as_of: AsOf,
    deadline: Instant,
}

impl Inquiry<'_> {
    /// Waits a moment for the node to show the state that it has sent. Returns false after the
    /// deadline: a commit there may wait for a standby, and so for this very transaction.
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
    /// Asks for the row with this key.
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

    /// Returns the provider of a subscription; `None` if there is none. With the process's own
    /// rights.
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

/// Returns the provider of the subscription that brings changes with this origin, if it is enabled.
/// With the process's own rights.
fn source_of(origin: ReplOriginId) -> Result<Option<Source>, PgError> {
    // Run as a statement that writes, so that it sees the newest commits: the origin may be younger
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

/// The parts of a session that ask other nodes about rows of the current transaction.
pub(super) struct Questions<'s> {
    querier: &'s mut Querier,
    tables: &'s mut Tables,
    attempt: &'s mut Attempt,
    hints: &'s mut RetryHints,
    identity: &'s Identity,
    change_context: &'s Scratch,
}

impl Questions<'_> {
    /// Returns the rights with which a question is asked, and the connections.
    fn rights(&mut self) -> (Rights<'_>, &mut Querier) {
        let rights = Rights {
            user: &mut self.attempt.user,
            tables: self.tables,
            run_as: self.identity.run_as,
            change_context: self.change_context,
        };
        (rights, self.querier)
    }

    /// Fetches the values that a change, which is about to be written, left unchanged.
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
                // The change is not visible yet: the row has its old key.
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

    /// Returns the columns that the provider has to be asked for: those that a row lacks. Returns
    /// `None` if there is no provider. The answer lives as long as the current change.
    ///
    /// # Errors
    /// 40001 if the transaction is in progress at the provider.
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

    /// Asks, and counts the question.
    fn put(
        &mut self,
        inquiry: &Inquiry<'_>,
        key: &[(String, CString)],
    ) -> Result<(Reply, bool), PgError> {
        self.attempt.counts.questions += 1;
        self.querier.ask(inquiry, key)
    }

    /// Converts an answer to values of a local row.
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

    /// Returns the provider of the stream; `None` if there is none.
    fn provider(&mut self, key: Key) -> Result<Option<Source>, PgError> {
        let id = self.identity.subscription_id;
        let (mut rights, querier) = self.rights();
        rights.with_own(key, || Ok(querier.provider(id)?.cloned()))
    }

    /// Returns the large values that the row in the local slot, which has this version, has at its
    /// writer's node. Returns `None` if the local row has them already, or there is no node to ask;
    /// no values if the node does not tell. `after` is the row of the change that has lost,
    /// `sought` has the row's key.
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
    /// Returns the version of the row that was found, if its writer has to be asked for large
    /// values: a change has lost against it, by the versions alone.
    fn asked_version(
        &self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<Option<(i64, ReplOriginId)>, PgError> {
        let plan = self.plan(context.key)?;
        // With whole old rows, each written row is complete. With column rules, merged values are
        // not those of the other node alone.
        if context.remote.identity == braid_gir::ReplicaIdentity::Full && plan.column_rules.any() {
            return Ok(None);
        }
        let version = match found {
            Found::Row(Stamp::Known(timestamp, origin)) => (timestamp, origin),
            // A row with fetched columns has a merge marker too; a row that a conflict function
            // made is left as it is.
            Found::Row(Stamp::Merged(timestamp, origin)) if !plan.rules.asks() => {
                (timestamp, origin)
            }
            _ => return Ok(None),
        };
        let is_newest = |kind| plan.rules.of(kind) == Resolution::LastUpdateWins;
        // A row that this node wrote has its own values.
        let asks = version.1 != 0
            && decision.action == Action::Keep
            && decision.conflict.is_some_and(is_newest);
        Ok(asks.then_some(version))
    }
}

impl Session {
    /// Returns access to questions, for the current transaction.
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

    /// Marks the row in the new slot, which was just written with this version and with values that
    /// no node has confirmed. The next change of it counts as a conflict.
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

    /// Called when a change has lost against the row that was found, which is locked. If the change
    /// brings large values, or leaves some unchanged that only its own node has, the winner's
    /// update may have left those unchanged. Fetches the winner's values from its writer's node,
    /// and writes them. `sought` has the row's key.
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

    /// Closes connections that were not used for a while.
    pub fn rest(&mut self) {
        self.querier.peers.close_unused();
    }
}

/// Returns `values` with the fetched values in the missing columns.
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

/// Returns an error about a question, for users. If the node is not the provider, a new connection
/// to the provider would not help: the transaction is applied again.
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
