//! State that a process keeps while it applies changes of one stream. Run by the processes that
//! apply changes.

use std::collections::HashSet;
use std::rc::Rc;

use braid_bgworker::parked::Touch;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::table_order::TableOrder;
use braid_gir::{Operation, Schema};
use braid_node::origin::OriginId;
use braid_postgres::error::PgError;
use braid_postgres::memory::Scratch;
use pgrx::pg_sys;

use super::attempt::{Attempt, Buffers, Piece, RetryHints, Uncounted};
use super::batch::KnownVersions;
use super::bulk::Bulk;
use super::doing::Doing;
use super::generation;
use super::number_map::NumberMap;
use super::querier::Querier;
use super::relation::RemoteRelation;
use super::route::Route;
use super::statement::StatementInHand;
use super::table::RowValues;
use super::target::Tables;
use super::transaction::Current;
use super::version::{Alone, OriginNames};
use super::window::Window;

/// Names and rights under which a session applies.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Subscription's id, or [`crate::NO_SUBSCRIPTION`].
    pub subscription_id: u32,
    /// Subscription's name.
    pub subscription: String,
    /// User to apply as; `None`: each table's owner.
    pub run_as: Option<u32>,
    /// This node.
    pub local_node: String,
    /// Name of the node that sends the stream.
    pub provider: String,
    /// Charset of the stream, as PostgreSQL numbers encodings.
    pub charset: i32,
    /// Leave out columns of the stream that the local table does not have, unless a rule of the
    /// table says otherwise.
    pub ignores_missing: bool,
}

/// State that an applier keeps between transactions, and the current attempt.
#[derive(Debug)]
pub struct Session {
    pub(super) identity: Identity,
    pub(super) provider: Rc<str>,
    pub(super) schemas: NumberMap<u32, Rc<RemoteRelation>>,
    pub(super) routes: NumberMap<u32, Route>,
    /// Version of the catalog's table states that `routes` was read under.
    pub(super) tables_version: u32,
    pub(super) tables: Tables,
    /// How changes of a table are ordered, by schema number; each with the generation that it was
    /// read in.
    pub(super) orders: NumberMap<u32, (u64, TableOrder)>,
    pub(super) origins: OriginNames,
    /// Origins under which this stream has brought rows; `None` if they need not be known.
    pub(super) same_stream: Option<Rc<[OriginId]>>,
    pub(super) known_versions: KnownVersions,
    /// The current attempt. `None` between transactions.
    pub(super) attempt: Option<Attempt>,
    /// Hints from the previous attempt.
    pub(super) hints: RetryHints,
    /// State of a transaction of which a chunk was just committed.
    pub(super) piece: Option<Piece>,
    pub(super) uncounted: Uncounted,
    pub(super) buffers: Buffers,
    /// Rows of values to be reused.
    pub(super) spare: Vec<RowValues>,
    pub(super) bulk: Bulk,
    pub(super) change_context: Scratch,
    /// The current step, for the context of an error, also of an error that has ended the attempt.
    pub(super) doing: Doing,
    /// The current statement, for the context of an error.
    pub(super) statement_in_hand: Option<Box<StatementInHand>>,
    /// Whether truncates by sessions of this node can be known.
    pub(super) window: Window,
    /// Questions to other nodes about rows.
    pub(super) querier: Querier,
    /// The transaction is parked: it waits for copies of the tables that it changes.
    pub(super) is_parked: bool,
    pub(super) reported_unsubscribed: HashSet<u32>,
    /// Local tables whose persistence was reported.
    pub(super) reported_unlogged: HashSet<u32>,
}

impl Session {
    /// A new session.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        generation::register();
        Self {
            provider: Rc::from(identity.provider.as_str()),
            origins: OriginNames::new(&identity.local_node),
            identity,
            schemas: NumberMap::default(),
            routes: NumberMap::default(),
            tables_version: 0,
            tables: Tables::default(),
            orders: NumberMap::default(),
            same_stream: None,
            known_versions: KnownVersions::default(),
            attempt: None,
            hints: RetryHints::default(),
            piece: None,
            uncounted: Uncounted::default(),
            buffers: Buffers::default(),
            spare: Vec::new(),
            bulk: Bulk::new(),
            change_context: Scratch::new(c"braid change"),
            doing: Doing::default(),
            statement_in_hand: None,
            window: Window::default(),
            querier: Querier::default(),
            is_parked: false,
            reported_unsubscribed: HashSet::new(),
            reported_unlogged: HashSet::new(),
        }
    }

    /// Makes this node alone decide about incoming rows. Its writes count as changes of its own,
    /// with the version `time` (Unix microseconds). So no deletion of a losing row is announced, a
    /// row that blocks a newer one is deleted at once, and conflict functions are not called. Local
    /// rows without a known version count as written here at `unversioned_at`, because incoming
    /// rows may be older still.
    ///
    /// Only for inserts, into tables without deferrable constraints and column rules.
    pub fn decide_alone(&mut self, time: i64, unversioned_at: i64) {
        self.origins.alone = Some(Alone {
            unversioned_at,
            time,
        });
        self.look_for_rows_in_the_way(true);
    }

    /// Makes transactions fail with 55P03 if a table that they change is still to be copied: they
    /// are parked.
    pub fn apply_parked(&mut self) {
        self.is_parked = true;
    }

    /// Stores a schema of the stream.
    pub fn learn(&mut self, schema: &Schema<'_>) {
        self.schemas
            .insert(schema.number.0, Rc::new(RemoteRelation::new(schema)));
    }

    /// Adds a change of `schema` to the keys that a transaction touches. In a transaction.
    ///
    /// # Errors
    /// 08P01; whatever PostgreSQL raises.
    pub fn touch(
        &mut self,
        touch: &mut Touch,
        schema: u32,
        barrier: bool,
        hashes: impl IntoIterator<Item = u64>,
    ) -> Result<(), PgError> {
        let remote = self.remote(schema)?;
        let barrier = barrier || self.table_order(schema, &remote)? != TableOrder::Keys;
        touch.change(&remote.qualified_name(), barrier, hashes);
        Ok(())
    }

    /// Switches to the process's own rights for the rest of the current transaction.
    pub fn work_as_self(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            attempt.user.restore();
        }
    }

    /// Switches to the memory of the change, and frees what the change before has allocated.
    pub(super) fn begin_change(&self) {
        self.enter_change();
        self.forget_change();
    }

    /// Makes further allocations go to the memory of the change.
    pub(super) fn enter_change(&self) {
        self.change_context.context().enter();
    }

    /// Frees the memory of a change, or of one of its rows, that is done.
    pub(super) fn forget_change(&self) {
        // SAFETY: the context has values of a change or row that is done. Code that goes on to the
        // next one keeps none of its values, and fills slots anew before they are read.
        unsafe { self.change_context.context().reset() };
    }

    /// Returns the current attempt, which begins here if there is none.
    pub(super) fn attempt(&mut self) -> &mut Attempt {
        self.attempt.get_or_insert_default()
    }

    /// Returns the current transaction.
    pub(super) fn current(&self) -> Option<&Current> {
        self.attempt.as_ref()?.current.as_ref()
    }

    /// Returns the time of the current transaction, in Unix microseconds; 0 for none.
    pub(super) fn timestamp(&self) -> i64 {
        self.attempt.as_ref().map_or(0, Attempt::timestamp)
    }

    /// Switches to the rights of this user.
    pub(super) fn work_as(&mut self, user: pg_sys::Oid) {
        self.attempt().user.work_as(user);
    }

    /// Whether a schema is known.
    #[must_use]
    pub fn knows(&self, schema: u32) -> bool {
        self.schemas.contains_key(&schema)
    }

    /// Stores the `content` of the message that came before the next change, an `operation`;
    /// `None`: no message came. Before an update or a delete, it is the version of the row, written
    /// by another node, that the change has replaced. Before an insert, it is the key that the row
    /// had before.
    pub fn replaces(&mut self, operation: Operation, content: Option<&[u8]>) {
        self.attempt().forget_told();
        if operation == Operation::Insert {
            self.attempt().former_key = content.map(<[u8]>::to_vec);
            return;
        }
        let parts = content.and_then(|content| content.split_first_chunk::<8>());
        self.attempt().replaced = parts.and_then(|(time, node)| {
            let node = std::str::from_utf8(node).ok()?;
            Some((i64::from_le_bytes(*time), node.to_owned()))
        });
    }

    /// Returns the reason why the transaction that was rolled back must not be applied before it
    /// has committed at the provider, if there is one.
    pub fn take_reason_to_wait(&mut self) -> Option<&'static str> {
        self.hints.waits_for_commit.take()
    }

    /// Sets the origins under which this stream has brought rows, for the transactions that follow;
    /// `None`: they need not be known.
    pub fn know_stream_by(&mut self, origins: Option<Rc<[OriginId]>>) {
        self.same_stream = origins;
    }

    pub(super) fn remote(&self, schema: u32) -> Result<Rc<RemoteRelation>, PgError> {
        self.schemas.get(&schema).cloned().ok_or_else(|| {
            PgError::new(
                SqlState::ProtocolViolation,
                format!("change of unknown schema {schema} from the provider"),
            )
        })
    }
}
