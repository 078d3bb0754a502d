//! Applying changes to this database. Run by the appliers, one transaction at a time.
//!
//! [`Session`] lives as long as the process and keeps what is expensive to find: schemas of the stream, how they map to
//! local tables, names of origins. What a transaction opens is closed at its end, or dropped without further ado when it is
//! rolled back.
//!
//! Invariants: nothing is written outside of the transaction that carries the source's origin, position and timestamp
//! (I1, I3); a row's version is read only after the row is locked; a change of another origin is decided by
//! `braid_bgworker::conflict` alone (I2).
//!
//! The crate must not know the plugin, nor the processes: where a change comes from, who waits for it and when it is
//! confirmed its callers know.

#![allow(unsafe_code)]

mod aggregate;
mod ahead;
mod attach;
mod attempt;
mod batch;
mod bulk;
mod change;
mod column_rules;
mod consolidate;
mod constraint;
mod content;
mod copied;
mod decode;
mod deferred;
mod deleted_parent;
mod deletion;
mod doing;
mod eviction;
mod freed;
mod function;
mod history;
mod image;
mod in_the_way;
mod key_hash;
mod key_order;
mod lookup;
pub mod meanwhile;
mod merge;
pub mod missing;
mod number_map;
mod partition;
mod peer;
mod places;
mod querier;
mod relation;
mod removal;
mod route;
mod row_context;
mod rules;
mod savepoint;
mod scan;
mod table;
mod truncate;
mod unfound;
pub mod user;
mod version;
mod window;
mod write;

use std::ffi::CStr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use braid_bgworker::conflict::{self, Version};
use braid_bgworker::parked::Touch;
use braid_bgworker::table_order::TableOrder;
use braid_gir::{Begin, Schema};
use braid_node::origin::{self, OriginId};
use braid_node::registry::{self, SubscriptionEntry, TableEntry};
use braid_node::{clock, crash};
use braid_postgres::error::PgError;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use pgrx::pg_sys;

use attempt::{Attempt, Buffers, Piece, RetryHints, Uncounted};
use batch::KnownVersions;
use bulk::Bulk;
use doing::{Doing, Step};
use number_map::NumberMap;
use peer::{Peers, Source};
use relation::{LocalRelation, RemoteRelation};
use route::Route;
use table::{OpenTable, RowValues};
use window::Window;

pub use attach::Versions;
pub use batch::{KEEP_MERGED, store as store_versions};
pub use column_rules::{adds_up, has_order};
pub use consolidate::Item;
pub use copied::{DeadRows, RowVersion, has_merged_rows, key_hashes_at, row_version};
pub use eviction::tell as tell_displacements;
pub use image::{row_image, with_fixed_settings};
pub use in_the_way::is_in_the_way;
pub use key_hash::{KeyHashes, KeyPart, copied_hash, identity_key, key_hashes_of_row, table_hash};
pub use missing::RULE as MISSING_COLUMN_RULE;
pub use relation::{check_kind, check_partitions, takes_changes};
pub use route::NOT_KNOWN;
pub use rules::{announce as announce_rules, is_rule, take_rule};
pub use savepoint::Savepoint;
pub use version::OriginNames;

/// Grows with each relcache invalidation.
static GENERATION: AtomicU64 = AtomicU64::new(1);
static REGISTERED: AtomicBool = AtomicBool::new(false);

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_invalidation(_arg: pg_sys::Datum, _relation: pg_sys::Oid) {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A snapshot that sees every row version that is there.
fn any_snapshot() -> pg_sys::Snapshot {
    &raw mut pg_sys::SnapshotAnyData
}

/// ExecClearTuple of src/include/executor/tuptable.h.
///
/// # Safety
/// `slot` is valid.
unsafe fn clear_slot(slot: *mut pg_sys::TupleTableSlot) {
    // SAFETY: as the caller says; the slot's own function, behind pgrx's guard.
    unsafe {
        if let Some(clear) = (*(*slot).tts_ops).clear {
            pg_sys::ffi::pg_guard_ffi_boundary(|| clear(slot));
        }
    }
}

/// ExecStoreVirtualTuple of src/backend/executor/execTuples.c, 15 to 18.
///
/// # Safety
/// `slot` is a virtual slot whose arrays hold a value, or null, for each column.
unsafe fn store_virtual(slot: *mut pg_sys::TupleTableSlot) {
    // SAFETY: as the caller says.
    unsafe {
        (*slot).tts_flags &= !u16::try_from(pg_sys::TTS_FLAG_EMPTY).unwrap_or(2);
        (*slot).tts_nvalid =
            i16::try_from((*(*slot).tts_tupleDescriptor).natts).unwrap_or(i16::MAX);
    }
}

/// How many tables are kept set up between transactions.
const KEPT_TABLES: usize = 256;

/// Id of no subscription: what is applied was handed to `braid.ingest`, and may go to any table of users.
pub const NO_SUBSCRIPTION: u32 = 0;
/// FirstNormalObjectId of src/include/access/transam.h.
const FIRST_NORMAL_OBJECT: u32 = 16384;

/// Who applies, for whom.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Subscription's id, or [`NO_SUBSCRIPTION`].
    pub subscription_id: u32,
    /// Subscription's name.
    pub subscription: String,
    /// User to apply as; `None`: each table's owner.
    pub run_as: Option<u32>,
    /// This node.
    pub local_node: String,
    /// The node that sends the stream.
    pub provider: String,
    /// Charset of the stream, as PostgreSQL numbers encodings.
    pub charset: i32,
    /// Columns of the stream that a table does not have here are left out, unless a rule of the table
    /// says otherwise.
    pub ignores_missing: bool,
}

#[derive(Debug)]
struct Target {
    plan: LocalRelation,
    generation: u64,
    /// Open, or suspended.
    table: Option<OpenTable>,
    /// Its indexes, as long as it is there.
    indexes: Vec<pg_sys::Oid>,
    counters: Option<&'static TableEntry>,
    /// What the transaction in hand did.
    counts: Counts,
    /// The columns that the plan leaves out are written down.
    missing_noted: bool,
}

impl Target {
    fn is_open(&self) -> bool {
        self.table
            .as_ref()
            .is_some_and(|table| !table.is_suspended())
    }
}

/// The transaction in hand.
#[derive(Debug, Clone)]
struct Current {
    commit_lsn: u64,
    timestamp: i64,
    xid: u32,
    origin: Rc<str>,
    /// The sender is the origin: its order is the order of versions.
    from_origin: bool,
    /// The sender gives notice of a row that has lost to another one (`eviction`): a deletion, which versions judge and no rule.
    is_displacement_notice: bool,
    /// It is to be prepared: the time is that of PREPARE, and its version will have a later one. Or it runs.
    unsettled: bool,
    /// It runs at the provider: it commits after this position, and at this time or later. What more than that would have to be known for is
    /// not applied now.
    runs: bool,
}

/// Rows written by a transaction, for the counters.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Inserted.
    pub inserts: u64,
    /// Updated.
    pub updates: u64,
    /// Deleted.
    pub deletes: u64,
    /// Tables truncated.
    pub truncates: u64,
    /// Conflicts met.
    pub conflicts: u64,
    /// Changes for which a later one of the same row was written.
    pub consolidated: u64,
    /// Questions put to other nodes.
    pub questions: u64,
    /// Values of columns that came in answer to them.
    pub fetched: u64,
}

impl Counts {
    /// Changes in all.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.inserts + self.updates + self.deletes + self.truncates
    }
}

/// State that an applier keeps between transactions, and the attempt in hand.
#[derive(Debug)]
pub struct Session {
    identity: Identity,
    provider: Rc<str>,
    schemas: NumberMap<u32, Rc<RemoteRelation>>,
    routes: NumberMap<u32, Route>,
    /// Version of the catalog's table states that `routes` was read under.
    tables_version: u32,
    targets: NumberMap<(u32, u32), Target>,
    /// Tables that are suspended.
    kept: usize,
    /// How changes order, by schema; as of a generation.
    orders: NumberMap<u32, (u64, TableOrder)>,
    origins: OriginNames,
    /// Origins of what came before by the stream of the transaction in hand; `None` where its place in the stream is known to count.
    same_stream: Option<Rc<[OriginId]>>,
    known_versions: KnownVersions,
    /// The attempt in hand. `None` between transactions.
    attempt: Option<Attempt>,
    /// Hints of the attempt before.
    hints: RetryHints,
    /// State of a transaction of which a piece was just committed.
    piece: Option<Piece>,
    uncounted: Uncounted,
    buffers: Buffers,
    /// Rows of values to be used again.
    spare: Vec<RowValues>,
    bulk: Bulk,
    change_context: pg_sys::MemoryContext,
    /// The step in hand, for the context of an error: also of one that has ended the attempt.
    doing: Doing,
    /// Whether local truncates can be told.
    window: Window,
    /// Connections to nodes that are asked about rows.
    peers: Peers,
    /// The provider, as one of these.
    own_source: Option<Source>,
    reported_unsubscribed: std::collections::HashSet<u32>,
    /// Tables here whose persistence was reported.
    reported_unlogged: std::collections::HashSet<u32>,
}

/// The warning about a table that changes are applied to and that a crash empties. It is a partition
/// that is unlogged, or the whole table.
#[must_use]
pub fn unlogged(table: &str) -> PgError {
    PgError::new("01000", format!("table \"{table}\" is unlogged here"))
        .with_detail("After a crash of this server it is empty, and its rows do not come again.")
        .with_hint(
            "Run ALTER TABLE ... SET LOGGED for it or its partitions. After a crash, copy it again with braid.resync_table.",
        )
}

fn memory_context(name: &'static std::ffi::CStr) -> pg_sys::MemoryContext {
    // SAFETY: a context below TopMemoryContext, for the life of the process.
    unsafe {
        pg_sys::AllocSetContextCreateInternal(
            pg_sys::TopMemoryContext,
            name.as_ptr(),
            0,
            8 * 1024,
            8 * 1024 * 1024,
        )
    }
}

impl Session {
    /// A session that knows nothing yet.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        if !REGISTERED.swap(true, Ordering::Relaxed) {
            // SAFETY: the callback belongs to this library, which is never unloaded.
            unsafe {
                pg_sys::CacheRegisterRelcacheCallback(Some(on_invalidation), pg_sys::Datum::null());
            }
        }
        Self {
            provider: Rc::from(identity.provider.as_str()),
            origins: OriginNames::new(&identity.local_node),
            identity,
            schemas: NumberMap::default(),
            routes: NumberMap::default(),
            tables_version: 0,
            targets: NumberMap::default(),
            kept: 0,
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
            change_context: memory_context(c"braid change"),
            doing: Doing::default(),
            window: Window::default(),
            peers: Peers::default(),
            own_source: None,
            reported_unsubscribed: std::collections::HashSet::new(),
            reported_unlogged: std::collections::HashSet::new(),
        }
    }

    /// Learn a schema of the stream.
    pub fn learn(&mut self, schema: &Schema<'_>) {
        self.schemas
            .insert(schema.number.0, Rc::new(RemoteRelation::new(schema)));
    }

    /// Add a change of `schema` to what a transaction changes. In a transaction.
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

    /// What follows, in the transaction in hand, is the process's own doing.
    pub fn work_as_self(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            attempt.user.restore();
        }
    }

    /// The attempt in hand, which begins here if there is none.
    fn attempt(&mut self) -> &mut Attempt {
        self.attempt.get_or_insert_default()
    }

    /// The transaction in hand.
    fn current(&self) -> Option<&Current> {
        self.attempt.as_ref()?.current.as_ref()
    }

    /// Time of the transaction in hand, in Unix microseconds; 0 for none.
    fn timestamp(&self) -> i64 {
        self.attempt.as_ref().map_or(0, Attempt::timestamp)
    }

    /// What follows is done with the rights of this user.
    fn work_as(&mut self, user: pg_sys::Oid) {
        self.attempt().user.work_as(user);
    }

    /// Whether a schema is known.
    #[must_use]
    pub fn knows(&self, schema: u32) -> bool {
        self.schemas.contains_key(&schema)
    }

    /// What follows belongs to the transaction of `begin`.
    pub fn show(&mut self, begin: &Begin<'_>) {
        let from_origin = begin.origin.is_empty();
        let current = Current {
            commit_lsn: begin.commit_lsn,
            timestamp: begin.commit_timestamp,
            xid: begin.xid,
            origin: if from_origin {
                Rc::clone(&self.provider)
            } else {
                Rc::from(begin.origin)
            },
            from_origin,
            is_displacement_notice: begin.origin == &*self.provider,
            unsettled: false,
            runs: false,
        };
        let attempt = self.attempt();
        attempt.added.clear();
        attempt.replaced = None;
        attempt.current = Some(current);
        self.show_versions();
    }

    /// The next change has replaced a row that another node had written, of the version that is in
    /// `content`; `None` if nothing was sent about that.
    pub fn replaces(&mut self, content: Option<&[u8]>) {
        let parts = content.and_then(|content| content.split_first_chunk::<8>());
        self.attempt().replaced = parts.and_then(|(time, node)| {
            let node = std::str::from_utf8(node).ok()?;
            Some((i64::from_le_bytes(*time), node.to_owned()))
        });
    }

    /// The transaction that was begun is to be prepared.
    pub fn expect_prepare(&mut self) {
        self.hints.waits_for_commit = None;
        if let Some(current) = self.attempt().current.as_mut() {
            current.unsettled = true;
        }
    }

    /// The transaction that was begun runs at the provider: it commits after `read`, and not before `newest` (Unix microseconds).
    pub fn runs(&mut self, read: u64, newest: i64) {
        self.hints.waits_for_commit = None;
        if let Some(current) = self.attempt().current.as_mut() {
            current.unsettled = true;
            current.runs = true;
            current.commit_lsn = current.commit_lsn.max(read);
            current.timestamp = current.timestamp.max(newest);
        }
    }

    /// The transaction that was applied while it ran has committed there, at this position and time (Unix microseconds).
    ///
    /// # Errors
    /// 40001 when that is before what is here and was taken for older.
    pub fn has_committed(&mut self, commit_lsn: u64, timestamp: i64) -> Result<(), PgError> {
        self.flush()?;
        let attempt = self.attempt();
        let Some(current) = attempt.current.as_mut() else {
            return Err(PgError::new("XX000", "no transaction is in hand"));
        };
        if timestamp < current.timestamp {
            return Err(self.wait_for_commit("The provider's clock has gone back."));
        }
        current.commit_lsn = commit_lsn;
        current.timestamp = timestamp;
        current.unsettled = false;
        current.runs = false;
        for tombstone in &mut attempt.tombstones {
            tombstone.timestamp = timestamp;
        }
        for taken in &mut attempt.taken {
            taken.removal.0 = timestamp;
        }
        Ok(())
    }

    /// Whether the transaction in hand runs at the provider.
    fn is_running(&self) -> bool {
        self.current().is_some_and(|current| current.runs)
    }

    /// Why the transaction that was rolled back is not to be applied before it has committed at the provider, if that is so.
    pub fn take_reason_to_wait(&mut self) -> Option<&'static str> {
        self.hints.waits_for_commit.take()
    }

    /// The transaction in hand can't be prepared: what it meets is to be decided once it has committed.
    fn wait_for_commit(&mut self, reason: &'static str) -> PgError {
        self.hints.waits_for_commit = Some(reason);
        PgError::new(
            "40001",
            "a transaction is not applied before it has committed",
        )
        .with_detail(reason)
    }

    /// What is here under the version of the transaction in hand, and came by this stream, is its own: a change that comes after it is later.
    fn show_versions(&self) {
        match (&self.same_stream, self.current()) {
            (Some(origins), Some(current)) => version::own(current.timestamp, origins),
            _ => version::own_nothing(),
        }
    }

    /// By which origins rows are known that this stream has brought, for the transactions that follow; `None`: they need not be.
    pub fn know_stream_by(&mut self, origins: Option<Rc<[OriginId]>>) {
        self.same_stream = origins;
    }

    /// Whether the transaction in hand began under this version of the tables' states.
    #[must_use]
    pub fn is_as_of(&self, tables_version: u32) -> bool {
        self.tables_version == tables_version
    }

    /// Open a transaction for what follows `begin`, and for more that is to be committed with it as one.
    pub fn begin_batch(&mut self, begin: &Begin<'_>, tables_version: u32) {
        self.begin(begin, tables_version);
        let attempt = self.attempt();
        attempt.newest = begin.commit_timestamp;
        attempt.written.begin();
    }

    /// What follows `begin` joins the open batch. False, and nothing has happened, when it can't: it has another origin, or a version
    /// that is not the newer one for being later.
    pub fn join(&mut self, begin: &Begin<'_>) -> bool {
        let from_origin = begin.origin.is_empty();
        let next = Version {
            timestamp: begin.commit_timestamp,
            origin: if from_origin {
                &self.provider
            } else {
                begin.origin
            },
        };
        let joins = self.current().is_some_and(|current| {
            conflict::joins(
                (change::version(current), current.from_origin),
                (next, from_origin),
            )
        });
        if !joins {
            return false;
        }
        self.show(begin);
        let attempt = self.attempt();
        attempt.newest = attempt.newest.max(begin.commit_timestamp);
        if attempt.has_rules {
            self.refresh_snapshot();
        }
        true
    }

    /// What triggers and expressions see is what is committed now, as in a transaction of its own.
    fn refresh_snapshot(&mut self) {
        // SAFETY: in a transaction whose active snapshot is the one that `begin` pushed.
        unsafe {
            pg_sys::PopActiveSnapshot();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        }
    }

    /// All of the batch is applied: write down what its commit does not say. It is committed next.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn finish_batch(&mut self) -> Result<(), PgError> {
        self.finish()?;
        let attempt = self.attempt();
        attempt.written.store(attempt.newest)?;
        if let Some(current) = attempt.current.as_mut() {
            current.timestamp = attempt.newest;
        }
        Ok(())
    }

    /// Open a transaction for what follows `begin`.
    pub fn begin(&mut self, begin: &Begin<'_>, tables_version: u32) {
        if tables_version != self.tables_version {
            self.routes.clear();
            self.tables_version = tables_version;
        }
        self.hints.forget_preparations();
        self.begin_attempt();
        self.show(begin);
        crash::begin(begin.xid, begin.commit_lsn);
        self.does(Step::Begin, None);
        self.start();
    }

    /// Commit what there is of the transaction in hand as a piece of it, at `position`, and count it. [`Session::go_on`] opens the next. Returns the
    /// end of the local commit record.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn commit_piece(
        &mut self,
        position: u64,
        entry: &SubscriptionEntry,
    ) -> Result<u64, PgError> {
        self.finish()?;
        let attempt = self.attempt();
        let piece = Piece {
            current: attempt.current.clone(),
            added: std::mem::take(&mut attempt.added),
        };
        let local_end = self.commit(position)?;
        self.publish_changes(entry);
        self.piece = Some(piece);
        Ok(local_end)
    }

    /// Open the next piece of the transaction in hand.
    pub fn go_on(&mut self, tables_version: u32) {
        if tables_version != self.tables_version {
            self.routes.clear();
            self.tables_version = tables_version;
        }
        self.begin_attempt();
        if let Some(piece) = self.piece.take() {
            let attempt = self.attempt();
            attempt.current = piece.current;
            attempt.added = piece.added;
        }
        self.start();
    }

    /// Begin an attempt. One that was not ended is dropped.
    fn begin_attempt(&mut self) {
        self.drop_attempt();
        self.attempt = Some(Attempt::with(&mut self.buffers));
    }

    /// Open a local transaction for the attempt in hand, which begins here if there is none.
    fn start(&mut self) {
        if self.attempt.is_none() {
            self.begin_attempt();
        }
        // SAFETY: outside of a transaction until here.
        unsafe {
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            pg_sys::MemoryContextSwitchTo(self.change_context);
        }
    }

    /// Commit what was done as a change of this node.
    fn commit_as_own(&mut self) -> Result<(), PgError> {
        self.close_tables();
        self.store_tally()?;
        clock::before_own_commit();
        self.end();
        Ok(())
    }

    /// Commit the local transaction, with whatever origin is set.
    fn end(&mut self) {
        // SAFETY: the transaction was opened in `start`.
        unsafe {
            pg_sys::PopActiveSnapshot();
            pg_sys::CommitTransactionCommand();
            pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            pg_sys::MemoryContextReset(self.change_context);
        }
        self.end_attempt();
    }

    /// The attempt in hand is committed, or prepared: only its counts stay.
    fn end_attempt(&mut self) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let mut ended = attempt.end(&mut self.buffers);
        // Tables of a commit before that nobody has counted are counted with this one's.
        let uncounted = &mut self.uncounted;
        std::mem::swap(&mut uncounted.tables, &mut ended.tables);
        uncounted.tables.append(&mut ended.tables);
        uncounted.truncated.append(&mut ended.truncated);
        uncounted.counts = ended.counts;
        self.buffers.open = ended.tables;
    }

    /// Drop an attempt that was rolled back, with what it has counted.
    fn drop_attempt(&mut self) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let mut tables = attempt.end(&mut self.buffers).tables;
        for key in tables.drain(..) {
            if let Some(target) = self.targets.get_mut(&key) {
                target.counts = Counts::default();
                target.missing_noted = false;
                if let Some(table) = target.table.take_if(|table| !table.is_suspended()) {
                    table.discard();
                }
            }
        }
        self.buffers.open = tables;
    }

    /// Write down the conflicts of the attempt in hand.
    fn store_tally(&mut self) -> Result<(), PgError> {
        match &mut self.attempt {
            Some(attempt) => attempt.tally.store(&self.identity.subscription),
            None => Ok(()),
        }
    }

    /// Commit with the origin's position and this timestamp (Unix microseconds). Returns the end of the local commit record; 0 when nothing
    /// was written.
    fn commit_at(&mut self, end_lsn: u64, timestamp: i64) -> u64 {
        let timestamp = timestamp.saturating_sub(EPOCH_DIFFERENCE);
        clock::seen(timestamp);
        origin::stands_for(end_lsn, timestamp);
        // SAFETY: a variable of the process, set by the commit.
        unsafe { pg_sys::XactLastCommitEnd = 0 };
        self.end();
        // SAFETY: reads a variable of the process.
        unsafe { pg_sys::XactLastCommitEnd }
    }

    /// All of the transaction is there: write what was held back, and let go of what was opened, before it waits for its turn.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn finish(&mut self) -> Result<(), PgError> {
        self.flush()?;
        self.does(Step::Commit, None);
        self.check_deferred()?;
        self.check_kept_out()?;
        self.close_tables();
        // Those of a batch are written down with its versions.
        let attempt = self.attempt();
        if attempt.written.has_merged() && !attempt.written.is_making() {
            attempt.written.store(attempt.timestamp())?;
        }
        self.store_tombstones()?;
        self.note_missing()?;
        self.store_tally()
    }

    /// Commit as the source's transaction that ends at `end_lsn`. Returns the end of the local commit record; 0 when nothing was
    /// written.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn commit(&mut self, end_lsn: u64) -> Result<u64, PgError> {
        self.finish()?;
        let timestamp = self.timestamp();
        Ok(self.commit_at(end_lsn, timestamp))
    }

    /// Prepare, under the name `gid`, as the source's transaction whose PREPARE ends at `end_lsn`.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn prepare_transaction(&mut self, gid: &CStr, end_lsn: u64) -> Result<(), PgError> {
        self.finish()?;
        let timestamp = self.timestamp();
        origin::stands_for(end_lsn, timestamp.saturating_sub(EPOCH_DIFFERENCE));
        // SAFETY: the transaction was opened in `begin`; the steps are those of PostgreSQL's own worker (apply_handle_prepare_internal of
        // src/backend/replication/logical/worker.c, 15 to 18).
        unsafe {
            pg_sys::PopActiveSnapshot();
            pg_sys::BeginTransactionBlock();
            pg_sys::CommitTransactionCommand();
            pg_sys::PrepareTransactionBlock(gid.as_ptr());
            pg_sys::CommitTransactionCommand();
            pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            pg_sys::MemoryContextReset(self.change_context);
        }
        self.end_attempt();
        Ok(())
    }

    /// Let go of what the transaction has opened, before it commits or waits to.
    fn close_tables(&mut self) {
        self.work_as_self();
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        for key in &attempt.open {
            let Some(target) = self.targets.get_mut(key) else {
                continue;
            };
            if let Some(table) = target.table.as_mut().filter(|table| !table.is_suspended()) {
                if table.is_plain() {
                    table.suspend();
                    self.kept += 1;
                } else if let Some(table) = target.table.take() {
                    let unchecked = table.unchecked.iter().map(|row| (*key, *row));
                    attempt.unchecked.extend(unchecked);
                    table.close();
                }
            }
        }
        if self.kept > KEPT_TABLES {
            self.forget_kept();
        }
    }

    /// Free all tables that are suspended.
    fn forget_kept(&mut self) {
        for target in self.targets.values_mut() {
            if let Some(table) = target.table.take_if(|table| table.is_suspended()) {
                table.discard();
            }
        }
        self.kept = 0;
    }

    /// The transaction was rolled back: the attempt at it is over.
    pub fn forget_transaction(&mut self) {
        self.drop_attempt();
        self.bulk.reset();
        // SAFETY: nothing of the rolled-back transaction is used any more.
        unsafe {
            pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            pg_sys::MemoryContextReset(self.change_context);
        }
    }

    /// Counts of the attempt in hand.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.attempt
            .as_ref()
            .map_or_else(Counts::default, |attempt| attempt.counts)
    }

    /// Add what the committed transaction did to the shared counters.
    pub fn publish_counts(&mut self, entry: &SubscriptionEntry) {
        entry.transactions.fetch_add(1, Ordering::Relaxed);
        self.publish_changes(entry);
    }

    /// Add the changes of a committed transaction, or a piece of one, to the shared counters.
    fn publish_changes(&mut self, entry: &SubscriptionEntry) {
        let add = |counter: &std::sync::atomic::AtomicU64, count: u64| {
            if count > 0 {
                counter.fetch_add(count, Ordering::Relaxed);
            }
        };
        let Uncounted {
            counts,
            tables,
            truncated,
        } = &mut self.uncounted;
        let counts = std::mem::take(counts);
        add(&entry.inserts, counts.inserts);
        add(&entry.updates, counts.updates);
        add(&entry.deletes, counts.deletes);
        add(&entry.truncates, counts.truncates);
        add(&entry.conflicts, counts.conflicts);
        add(&entry.schedule.consolidated, counts.consolidated);
        add(&entry.questions, counts.questions);
        add(&entry.fetched, counts.fetched);
        let subscription = self.identity.subscription_id;
        for key in tables.drain(..) {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            let counts = std::mem::take(&mut target.counts);
            if target.counters.is_none() {
                target.counters = registry::table(subscription, key.1);
            }
            if let Some(table) = target.counters {
                add(&table.inserts, counts.inserts);
                add(&table.updates, counts.updates);
                add(&table.deletes, counts.deletes);
                add(&table.conflicts, counts.conflicts);
            }
        }
        for relation in truncated.drain(..) {
            if let Some(table) = registry::table(subscription, relation) {
                add(&table.truncates, 1);
            }
        }
    }

    fn remote(&self, schema: u32) -> Result<Rc<RemoteRelation>, PgError> {
        self.schemas.get(&schema).cloned().ok_or_else(|| {
            PgError::new(
                "08P01",
                format!("change of unknown schema {schema} from the provider"),
            )
        })
    }

    /// Whether the changes of the transaction in hand go there. `writes`: inserts and updates.
    ///
    /// # Errors
    /// 40001 where only its commit says that: it is applied then.
    fn takes(&mut self, route: &Route, current: &Current, writes: bool) -> Result<bool, PgError> {
        route
            .decides(current, writes)
            .ok_or_else(|| self.wait_for_commit("Its commit says whether it is in a copy."))
    }

    /// Whether nothing was invalidated since a route was found.
    fn is_current(&self, route: &Route) -> bool {
        route.generation == GENERATION.load(Ordering::Relaxed)
    }

    /// Make sure that a table is open under the current plan.
    fn open_table(
        &mut self,
        schema: u32,
        remote: &RemoteRelation,
        oid: pg_sys::Oid,
    ) -> Result<(u32, u32), PgError> {
        let key = (schema, oid.to_u32());
        crash::change(key.1);
        if let Some(target) = self.targets.get_mut(&key) {
            if target.is_open() {
                return Ok(key);
            }
            if let Some(table) = target.table.as_mut() {
                let fresh = |generation| generation == GENERATION.load(Ordering::Relaxed);
                // SAFETY: in a transaction. Without an invalidation up to here the table may be taken up; taking the locks
                // processes what has come meanwhile.
                let resumed = unsafe {
                    fresh(target.generation)
                        && {
                            OpenTable::lock(oid, &target.indexes);
                            fresh(target.generation)
                        }
                        && {
                            table.resume();
                            true
                        }
                };
                self.kept = self.kept.saturating_sub(1);
                if resumed {
                    self.attempt().open.push(key);
                    return Ok(key);
                }
                if let Some(table) = target.table.take() {
                    table.discard();
                }
            }
        }
        // SAFETY: opened in this transaction, which has not ended; the lock makes the shape stable until it does.
        unsafe {
            let relation = pg_sys::try_relation_open(oid, table::write_lock());
            if relation.is_null() {
                return Err(relation::dropped());
            }
            // After the lock: a change of the table that committed before it is known by now.
            let generation = GENERATION.load(Ordering::Relaxed);
            let stale = self
                .targets
                .get(&key)
                .is_none_or(|target| target.generation != generation);
            if stale {
                // Rules are read with the process's own rights.
                self.work_as_self();
                self.window.close(oid)?;
                let plan = LocalRelation::new(
                    remote,
                    relation,
                    self.identity.charset,
                    self.identity.ignores_missing,
                )?;
                if (*(*relation).rd_rel).relpersistence.cast_unsigned() == b'u'
                    && self.reported_unlogged.insert(oid.to_u32())
                {
                    unlogged(&remote.qualified_name()).warn();
                }
                let before = self.targets.insert(
                    key,
                    Target {
                        plan,
                        generation,
                        table: None,
                        indexes: Vec::new(),
                        counters: None,
                        counts: Counts::default(),
                        missing_noted: false,
                    },
                );
                // What this transaction did to it under its former shape counts too.
                if let (Some(before), Some(now)) = (before, self.targets.get_mut(&key)) {
                    now.counts = before.counts;
                    now.missing_noted = before.missing_noted
                        && before.plan.width == now.plan.width
                        && before.plan.missing == now.plan.missing;
                    now.counters = before.counters;
                }
            }
            if let Some(target) = self.targets.get_mut(&key) {
                let table = OpenTable::open(relation, &target.plan)?;
                let plain = table.is_plain();
                target.indexes = table.index_oids();
                // To open the indexes may have shown that something changed: then it is good for this transaction only, as a
                // plan's generation is not the current one's any more when it is looked for next.
                target.table = Some(table);
                self.attempt().open.push(key);
                let attempt = self.attempt();
                if !plain && !attempt.has_rules {
                    attempt.has_rules = true;
                    if attempt.written.is_making() {
                        self.refresh_snapshot();
                    }
                }
            }
        }
        Ok(key)
    }

    fn work_as_owner_of(&mut self, key: (u32, u32)) {
        let owner = match (self.identity.run_as, self.targets.get(&key)) {
            (Some(user), _) => pg_sys::Oid::from(user),
            (None, Some(target)) => target.plan.owner,
            (None, None) => return,
        };
        self.work_as(owner);
    }

    fn count(&mut self, key: (u32, u32), add: impl Fn(&mut Counts)) {
        add(&mut self.attempt().counts);
        if let Some(target) = self.targets.get_mut(&key) {
            add(&mut target.counts);
        }
    }
}
